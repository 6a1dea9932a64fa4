"""simt: the kernels of kernels_cu, unchanged, on the CPU: to run, to check, and to see every thread.

    >>> saxpy[3, 8](y, 2.0, x, 21)                        # CPU tensors, when the backend is not cuda
    >>> with ga.checked(): saxpy[3, 8](y, 2.0, x, 22)     # KernelError: thread 5 of block 2 reads x[21] ...
    >>> simt.trace(saxpy[3, 8], y, 2.0, x, 21).summary()  # who touched what

build.py makes a library of the source, driver.py launches it on the executor (executor.cpp), checking.py with the checks (checks.cpp).
"""

from .driver import checked, is_checked, time_limit
from .reports import Report
from .tracing import Trace

__all__ = ["Report", "Trace", "checked", "is_checked", "time_limit", "trace"]


def trace(launch, *args, tensors=()) -> Trace:
    """Run `kernel[grid, block]` with the checks on copies of its tensors and keep every access; nothing is changed.

    tensors: those whose addresses stand in a struct or a table. Mistakes of the kernel are in `.reports`; at most a million
    accesses are kept (`.truncated` says when there were more)."""
    return launch.on_cpu(args, tensors, trace=True)
