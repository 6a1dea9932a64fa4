"""simt: run, check and trace the kernels of kernels_cu on the CPU, with their source unchanged.

    saxpy[3, 8](y, 2.0, x, 21)                        # CPU tensors; the backend is not cuda
    with ga.checked():
        saxpy[3, 8](y, 2.0, x, 22)     # KernelError: thread 5 of block 2 reads x[21] ...
    simt.trace(saxpy[3, 8], y, 2.0, x, 21).summary()  # which thread accesses what

build.py compiles the source to a library. driver.py launches it on the executor (executor.cpp).
checking.py launches it with the checks (checks.cpp).
"""

from .driver import checked, is_checked
from .reports import Report
from .tracing import ATOMIC, BANKS, READ, SECTOR, WARP, Trace, groups, share, turns_per_bank

__all__ = [
    "ATOMIC",
    "BANKS",
    "READ",
    "Report",
    "SECTOR",
    "Trace",
    "WARP",
    "checked",
    "groups",
    "is_checked",
    "share",
    "trace",
    "turns_per_bank",
]


def trace(launch, *args, tensors=()) -> Trace:
    """Run `kernel[grid, block]` with the checks on copies of its tensors, and record each access.

    No tensor is changed, and no KernelError is raised: mistakes of the kernel are in `.reports`,
    what is none but worth knowing in `.notes` (equal values in one place, barriers that order
    nothing). A trace keeps a million accesses; `.truncated` says whether there were more.

    Args:
        launch: `kernel[grid, block]`.
        *args: the kernel's arguments.
        tensors: those whose addresses are in a struct or a table of pointers.
    """
    return launch.on_cpu(args, tensors, trace=True)
