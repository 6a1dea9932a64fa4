"""Every error gpuaccel raises on purpose, so that a caller can catch `GpuaccelError` and show its one clear sentence.

Each message names the value that was found, what was expected, and the tensor, parameter or file it is about.
"""


class GpuaccelError(Exception):
    """Base of all errors below."""


class BackendError(GpuaccelError, RuntimeError):
    """The requested backend cannot run here; the message says why and what to install or set."""


class CompileError(GpuaccelError, RuntimeError):
    """A kernel did not compile. `log` holds the compiler's whole output with file, line and caret."""

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log


class ArgumentError(GpuaccelError, ValueError):
    """An argument has the wrong dtype, device, shape, layout, alignment or value. Nothing was changed."""


class DataError(GpuaccelError, ValueError):
    """Text or tokens cannot be used for training."""


class CheckpointError(GpuaccelError, RuntimeError):
    """A checkpoint cannot be written, or cannot be trusted or does not fit. Nothing was changed."""


class KernelError(GpuaccelError, RuntimeError):
    """A kernel on the CPU did something wrong, or did not end. `reports`: a list of simt.Report, one for each kind and line.
    With the checks on, no tensor was changed."""

    def __init__(self, message: str, reports=()):
        super().__init__(message)
        self.reports = list(reports)


class RankError(GpuaccelError, RuntimeError):
    """Another rank of a data-parallel run cannot be reached, has stopped, or has other weights than this one."""


class NonFiniteError(GpuaccelError, RuntimeError):
    """A gradient holds NaN or infinity, and the caller asked to be told. Nothing was changed."""


class CaptureError(GpuaccelError):
    """A step cannot be captured in a CUDA graph, or a captured one no longer fits. Says what did it, in which line, and what to do.

    file, line: of the Python that did it, None where it is not a line's doing."""

    def __init__(self, message, file=None, line=None):
        super().__init__(message)
        self.file, self.line = file, line
