"""All errors that gpuaccel raises on purpose.

A caller can catch `GpuaccelError` and show its message. A message names the value that was given,
what was expected, and the tensor, parameter or file.
"""

import inspect
from typing import Any, get_args


class GpuaccelError(Exception):
    """The base of all errors that gpuaccel raises on purpose; its message is made to be shown.

    Example:
        >>> try:
        ...     ga.Kernel("no_such_file", "add")
        ... except ga.GpuaccelError as error:
        ...     print(type(error).__name__, "-", error)
        CompileError - there is no file no_such_file.cu in kernels_cu; files: ...
    """


class BackendError(GpuaccelError, RuntimeError):
    """The requested backend cannot run here. The message says why, and what to install or set."""


class CompileError(GpuaccelError, RuntimeError):
    """A kernel does not compile.

    Args:
        message: what the compiler says, with line and caret.
        log: the compiler's whole output, with file, line and caret.
    """

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log


class CompileWarning(UserWarning):
    """What the compiler of CUDA C warns of, with file and line."""


class ArgumentError(GpuaccelError, ValueError):
    """An argument has a wrong dtype, device, shape, layout, alignment or value.

    Nothing has changed.
    """


class DataError(GpuaccelError, ValueError):
    """Text or tokens cannot be used for training."""


class CheckpointError(GpuaccelError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit. Nothing has changed.

    Args:
        message: which file, and what is wrong with it.
        older: paths of older checkpoints beside a damaged one that are whole, the newest first.
    """

    def __init__(self, message: str, older=()):
        super().__init__(message)
        self.older = list(older)


class KernelError(GpuaccelError, RuntimeError):
    """A kernel on the CPU made a mistake, or did not end.

    With the checks on, no tensor has changed.

    Args:
        message: the mistakes, with line, thread and element.
        reports: a list of simt.Report, one for each kind of mistake and line.
    """

    def __init__(self, message: str, reports=()):
        super().__init__(message)
        self.reports = list(reports)


class ReplacementError(GpuaccelError):
    """A kernel cannot take the place of one of ours. The message says why. Nothing has changed."""


class RankError(GpuaccelError, RuntimeError):
    """Another rank of a data-parallel run is unreachable, has stopped, or has other weights."""


class NonFiniteError(GpuaccelError, RuntimeError):
    """A gradient holds NaN or infinity, and the caller wants an error. Nothing has changed."""


class CaptureError(GpuaccelError):
    """A step cannot be captured in a CUDA graph, or does not match the captured one any more.

    The message says why, in which line, and what to do.

    Args:
        message: why, in which line, and what to do.
        file, line: of the Python code that is the reason; None where there is no such line.
    """

    def __init__(self, message, file=None, line=None):
        super().__init__(message)
        self.file = file
        self.line = line


def described(value) -> str:
    """An argument of a wrong kind, for a message: "a generator", "a Linear (a module)", "None"."""
    # Not imported above: these errors are also those of modules that do without torch.
    import torch

    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = type(value).__name__
    # "an Arena", "an SGD", "a Linear".
    spoken_as_vowel = "AEFHILMNORSX" if name.isupper() else "AEIOUaeiou"
    words = f"{'an' if name[0] in spoken_as_vowel else 'a'} {name}"
    if isinstance(value, torch.nn.Module):
        return f"{words} (a module)"
    if isinstance(value, torch.optim.Optimizer):
        return f"{words} (an optimizer)"
    return words


def suggestion(value, choices) -> str:
    """The end of a message about a misspelt word: "; did you mean 'global'?", or nothing."""
    # Not imported above: it is not needed unless something is misspelt.
    import difflib

    by_lower_case = {choice.lower(): choice for choice in choices}
    words = difflib.get_close_matches(str(value).lower(), by_lower_case, n=1)
    return f"; did you mean {by_lower_case[words[0]]!r}?" if words else ""


def check_choice(
    name: str, value, literal: Any, or_else: str = "", error: type[GpuaccelError] = ArgumentError
):
    """Refuse a value that is none of the words of a Literal, which is the argument's type.

    Args:
        name: of the argument, for the message.
        value: of the argument.
        literal: Literal["global", ...], of strings.
        or_else: what else is allowed, for the message, as " or None".
        error: what is raised.

    Raises:
        GpuaccelError: of this class; it names the value, the words and the one that was meant.
    """
    choices = get_args(literal)
    if not isinstance(value, str) or value not in choices:
        expected = f"expected one of {', '.join(choices)}{or_else}"
        raise error(f"{name} is {value!r}; {expected}{suggestion(value, choices)}")


def check_module(name: str, value, hint: str = ""):
    """ArgumentError unless the argument `name` is an nn.Module. hint: ends the message."""
    import torch

    if not isinstance(value, torch.nn.Module):
        raise ArgumentError(f"{name} is {described(value)}; expected a module{hint}")
