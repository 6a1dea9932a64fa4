"""Writing work down so that it can be done again without Python: in a CUDA graph on a GPU, on a tape (graphs/tape.py) on the CPU.

    >>> recorder = CudaRecorder("cuda")                  # its own memory pool, shared by all of its recordings
    >>> recording, out = recorder.record(fn)             # fn ran, but nothing of it was executed
    >>> recording.replay()

A capture that fails leaves torch unwell: its random generator stays in capture mode and memory keeps going to the pool. record() heals
both, and a CaptureError names the line of Python that cannot be captured, and what to do instead.
"""

import contextlib
import ctypes
import functools
import gc
import linecache
import os
import re
import sys
import tempfile
import threading
import traceback
import warnings

import torch

from ..errors import CaptureError
from .tape import Tape

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

# (what the message or the line looks like, what happened, what to do instead)
_CAUSES = [
    (
        r"\.item\(\)|\bfloat\(|\bint\(|\bbool\(|\.tolist\(\)|\.numpy\(\)|\bprint\(|^\s*(el)?if |^\s*while |value of the device|not permitted when stream is capturing",
        "the host would wait for a value of the device",
        "keep the number on the device (tensor arithmetic, torch.where), or read it one step late: ga.LateValue",
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
    (r"synchronize\(", "the host would wait for the device", "take the wait out of the step"),
    (
        r"[mM]alloc|MemPool|cupy",
        "it allocates memory outside of the graph's pool",
        "allocate it before the first step",
    ),
    (r"[cC]allback", "it has the driver call a function of the host", "call it after the step"),
    (
        r"legacy stream depend",
        "the graph of an earlier backward is still alive, on another stream",
        "detach() what you keep of earlier steps (a loss, say)",
    ),
    (
        r"capturable",
        "the optimizer counts its steps on the host",
        "give it capturable=True and a learning rate on the device (lr=torch.tensor(..., device=...)), or use ga.AdamW",
    ),
]


@functools.cache
def _capture_stream(index: int):
    """One for the whole process: cuBLAS keeps a workspace for each stream that it has seen, for ever."""
    return torch.cuda.Stream(index)


class CudaRecorder:
    """CUDA graphs of one device: one memory pool for all, so that they may share memory. Never replayed side by side."""

    executes = False  # while it records

    def __init__(self, device):
        self.device = torch.device(
            "cuda",
            torch.device(device).index
            if torch.device(device).index is not None
            else torch.cuda.current_device(),
        )
        self.stream = _capture_stream(self.device.index)
        self.pool, self.living = None, 0

    def run(self, fn):
        """fn() on the capture stream, executed: a warm-up."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            result = fn()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return result

    def record(self, fn):
        """(recording, fn()'s result). Nothing is executed. CaptureError when fn cannot be captured; an error of its own comes through."""
        try:
            return self._record(fn)
        except CaptureError:
            raise
        except RuntimeError as error:  # torch's, CUDA's, and our BackendError
            where = _line_of(error) if not _without_a_line(error) else None
            if where is None:
                where = self._find(fn) or _line_of(error)
            raise explained(error, where) from error

    def _record(self, fn):
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        if not self.living:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            # Other threads (a loader that pins memory, a live view) may go on using CUDA: their calls are none of the capture's.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            ended, collects = False, gc.isenabled()
            gc.disable()  # what it finds may give back memory in a way that no capture allows
            try:
                result = fn()
                graph.capture_end()
                ended = True
            finally:
                if collects:
                    gc.enable()
                if not ended:
                    self._heal(graph)
            graph.instantiate()
        self.living += 1
        return CudaRecording(graph, self), result

    def _heal(self, graph):
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
            return  # the capture itself was well: it was Python that raised
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(RuntimeError):
                end(self.device.index, self.pool)
        empty = (
            torch.cuda.CUDAGraph()
        )  # a capture that ends takes the generator out of capture mode
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is empty
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()

    def _find(self, fn):
        """The line after which the capture was invalid, found in a second capture that looks after each line."""
        from cuda.bindings import driver

        invalid, last, found = (
            driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED,
            [None],
            [],
        )

        def look(frame, event, arg):
            if found:
                return None
            if driver.cuStreamIsCapturing(self.stream.cuda_stream)[1] == invalid:
                found.append(last[0])
                return None
            last[0] = _line_of_frame(frame.f_back if event == "return" else frame) or last[0]
            return look

        before, threads_before = sys.gettrace(), threading.gettrace()
        with (
            warnings.catch_warnings(record=True) as said,
            contextlib.suppress(Exception),
            torch.autograd.detect_anomaly(check_nan=False),
        ):
            warnings.simplefilter("always")
            sys.settrace(look)
            threading.settrace(
                look
            )  # backward runs Python (hooks, autograd.Function) in threads of its own
            try:
                self._record(fn)[0].close()
            finally:
                sys.settrace(before)
                threading.settrace(threads_before)
        if found and found[0]:
            return found[0]
        forward = [
            text for text in (str(w.message) for w in said) if "Traceback of forward call" in text
        ]
        lines = re.findall(r'File "([^"]+)", line (\d+)', forward[0]) if forward else []
        return next(((file, int(line)) for file, line in reversed(lines) if _is_users(file)), None)


class CudaRecording:
    """One captured graph."""

    def __init__(self, graph, recorder):
        self._graph, self._recorder = graph, recorder

    def replay(self):
        """Launch it on the current stream. No wait."""
        self._graph.replay()

    def graph(self) -> "tuple[list[str], list[tuple[int, int]]]":
        """(names of the nodes in the order of their launch, edges between them), from CUDA's own debug dump."""
        handle, path = tempfile.mkstemp(suffix=".dot", prefix="gpuaccel-graph-")
        os.close(handle)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._graph.debug_dump(path)
            with open(path, encoding="utf-8", errors="replace") as file:
                return parse_dot(file.read())
        finally:
            os.unlink(path)

    def close(self):
        torch.cuda.synchronize(self._recorder.device)  # its memory is free from here on
        self._graph.reset()
        self._recorder.living -= 1


class TapeRecorder:
    """The same on the CPU, for backend simt: what runs is torch's CPU code and our kernels on the CPU."""

    executes = True

    def run(self, fn):
        return fn()

    def record(self, fn):
        """As CudaRecorder.record, but fn is executed."""
        tape = Tape()
        try:
            return tape, tape.record(fn)
        except CaptureError as error:
            raise explained(error, _line_of(error)) from error


def recorder_for(device, runs_here: str):
    """The recorder for a device under a backend ("cuda", "simt", "torch"); None where nothing can be recorded."""
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        return CudaRecorder(device)
    return TapeRecorder() if runs_here == "simt" else None


# ---- why it failed --------------------------------------------------------------------------------------------------


def explained(error: BaseException, where) -> CaptureError:
    """A CaptureError that says which line did what, and what to do instead."""
    code = re.split(r"\s+#", linecache.getline(*where).strip())[0] if where else ""
    texts = [_first_line(e) for e in _chain(error)]
    for source in (code, " ".join(texts)):
        cause = next(
            (
                (what, instead)
                for pattern, what, instead in _CAUSES
                if source and re.search(pattern, source)
            ),
            None,
        )
        if cause:
            break
    what, instead = cause or (texts[0], 'leave it out of the step, or run with replay="eager"')
    place = (
        f"{os.path.basename(where[0])}:{where[1]}" + (f": `{code}`" if code else "")
        if where
        else "the step"
    )
    return CaptureError(
        f"{place} cannot be captured in a CUDA graph: {what}. Instead: {instead}", *(where or ())
    )


def _chain(error):
    """The error, and those that it came from."""
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return seen


def _first_line(error) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _without_a_line(error) -> bool:
    """Did the capture end badly without an operation that refused? Then the line at hand is only where it was noticed."""
    return all(
        re.search("previous error during capture|CAPTURE_INVALIDATED", str(e))
        for e in _chain(error)
        if isinstance(e, RuntimeError)
    )


def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, _TORCH, "<frozen")) and os.path.basename(file) not in (
        "threading.py",
        "contextlib.py",
    )


def _line_of(error):
    """(file, line) of the innermost line of the user's that the first of a chain of errors went through; None: there is none."""
    for e in reversed(_chain(error)):
        for frame in reversed(traceback.extract_tb(e.__traceback__)):
            if _is_users(frame.filename):
                return frame.filename, frame.lineno
    return None


def _line_of_frame(frame):
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


# ---- what is in it --------------------------------------------------------------------------------------------------


def parse_dot(text: str) -> "tuple[list[str], list[tuple[int, int]]]":
    """(names, edges) of a graph as cudaGraphDebugDotPrint writes it. Nodes stand in the order in which they were captured."""
    nodes, edges = {}, []
    for name, label in re.findall(
        r'"(graph_\d+_node_\d+)"\s*\[[^\]]*?label="\{?(.*?)"\s*\]', text, flags=re.S
    ):
        nodes[name] = _node_name(label)
    for one, two in re.findall(r'"(graph_\d+_node_\d+)"\s*->\s*"(graph_\d+_node_\d+)"', text):
        edges.append((one, two))
    order = {
        name: i
        for i, name in enumerate(sorted(nodes, key=lambda name: int(name.rsplit("_", 1)[1])))
    }
    return [nodes[name] for name in order], sorted(
        (order[one], order[two]) for one, two in edges if one in order and two in order
    )


def _node_name(label: str) -> str:
    """What a node does: the kernel's whole name, or memset, memcpy, ..."""
    kind = re.match(r"\s*(\w+)", label)[1]
    symbol = re.search(r"topoId: \d+\)\s*\|\s*(.*?)\\<\\<\\<", label, flags=re.S)
    return demangled(symbol[1]) if kind == "KERNEL" and symbol else kind.lower()


def demangled(symbol: str) -> str:
    """The C++ name of a mangled symbol; as it is where nobody can tell."""
    if not symbol.startswith("_Z"):
        return symbol
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return symbol
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    return ctypes.string_at(address).decode() if address else symbol
