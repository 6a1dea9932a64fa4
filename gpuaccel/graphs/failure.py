"""Why a capture failed: a CaptureError that names the line, what it did, and what to do instead."""

import linecache
import os
import re
import traceback

import torch

from ..errors import CaptureError
from ..notebook import cell_of

# (pattern of a line or message, what it does, what to do instead). The first match counts.
_CAUSES = [
    (
        r"\.item\(\)|\bfloat\(|\bint\(|\bbool\(|\.tolist\(\)|\.numpy\(\)|\bprint\("
        r"|^\s*(el)?if |^\s*while |value of the device|not permitted when stream is capturing",
        "the host would wait for a value of the device",
        "keep the number on the device (tensor arithmetic, torch.where, an index of shape (1,)), "
        "or read it one step late: ga.measure.LateValue",
    ),
    (
        r"Cannot copy between CPU and CUDA|\.cpu\(\)|torch\.tensor\(|pinned",
        "it copies between CPU and GPU memory that is not pinned",
        "make the tensor on the device before the step, or hand it in as an input",
    ),
    (
        r"nonzero|masked_select|unique|\[.*[=<>].*\]|shape that",
        "the shape of its result depends on values, which the host would have to wait for",
        "keep the shape fixed: torch.where, or multiply by the mask",
    ),
    (
        r"synchronize\(",
        "the host would wait for the device",
        "take the wait out of the step",
    ),
    (
        r"[mM]alloc|MemPool|cupy",
        "it allocates memory outside of the graph's pool",
        "allocate it before the first step",
    ),
    (
        r"[cC]allback",
        "it has the driver call a function of the host",
        "call it after the step",
    ),
    (
        r"legacy stream depend",
        "the graph of an earlier backward is still alive, on another stream",
        "detach() what you keep of earlier steps (a loss, say)",
    ),
    (
        r"capturable",
        "the optimizer counts its steps on the host",
        "give it capturable=True and a learning rate on the device "
        "(lr=torch.tensor(..., device=...)), or use ga.AdamW",
    ),
]
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def explained(error: BaseException, location: tuple[str, int] | None) -> CaptureError:
    """The error to raise in place of `error`. location: (file, line) of the line at fault."""
    code = ""
    if location is not None:
        code = re.split(r"\s+#", linecache.getline(*location).strip())[0]
    messages = [_first_line(e) for e in _chain(error)]
    texts = [code, " ".join(messages)]
    if isinstance(error, CaptureError):
        # A tape's message says what happened. A driver's message does not, so the line comes first.
        texts.reverse()
    cause = next(filter(None, map(_cause_in, texts)), None)
    if cause is None:
        cause = messages[0], 'leave it out of the step, or run with replay="eager"'
    where = "the step"
    if location is not None:
        where = _place(*location) + (f": `{code}`" if code else "")
    happened, instead = cause
    return CaptureError(
        f"{where} cannot be captured in a CUDA graph: {happened}. Instead: {instead}",
        *(location or ()),
    )


def _place(file: str, line: int) -> str:
    """Name a line of Python: "train.py:12", or in a notebook "In[12], line 3"."""
    cell = cell_of(file)
    return f"{cell}, line {line}" if cell else f"{os.path.basename(file)}:{line}"


def _cause_in(text: str) -> tuple[str, str] | None:
    """(what happened, what to do instead), from a line of code or a message."""
    if text:
        for pattern, happened, instead in _CAUSES:
            if re.search(pattern, text):
                return happened, instead
    return None


def _chain(error) -> list[BaseException]:
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _first_line(error) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def only_noticed_later(error: BaseException) -> bool:
    """True if CUDA reports an invalid capture only at its end, so that the line is not at fault."""
    return all(
        re.search("previous error during capture|CAPTURE_INVALIDATED", str(e))
        for e in _chain(error)
        if isinstance(e, RuntimeError)
    )


def is_users_file(file: str) -> bool:
    """True if the file belongs to neither this package nor torch."""
    if file.startswith((_OURS, _TORCH, "<frozen")):
        return False
    return os.path.basename(file) not in ("threading.py", "contextlib.py")


def line_of_error(error) -> tuple[str, int] | None:
    """(file, line) of the user's innermost line that the first error of the chain went through."""
    for e in reversed(_chain(error)):
        for frame in reversed(traceback.extract_tb(e.__traceback__)):
            if is_users_file(frame.filename):
                return frame.filename, frame.lineno or 0
    return None


def line_of_frame(frame) -> tuple[str, int] | None:
    """(file, line) of the innermost frame of the user's."""
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
