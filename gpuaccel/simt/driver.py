"""Launches a compiled kernel on the CPU: its mode, workers, time limit and faults.

    with ga.checked():                    # check every access, see checking.py
        kernel[grid, block](x, y, n)
    ga.checked(False)                     # fast, from now on

`GPUACCEL_SIMT` is `auto` (kernels from strings are checked, those of kernels_cu are not),
`checked` or `fast`. `GPUACCEL_SIMT_SECONDS` is the time limit of one launch, 20 by default.
"""

import ctypes
import math
import os
import sys
import threading
from typing import Literal

from ..backends import ProcessSwitch
from ..errors import ArgumentError, BackendError, check_choice
from .build import symbol
from .reports import Report, Symbols, coordinates, error, thread_words

Mode = Literal["auto", "checked", "fast"]
# Number of CUDA threads from which a second operating-system thread is faster.
MANY_THREADS = 8192
MAX_WORKERS = 64
# In the order of simt_fault_kind in executor.h.
FAULTS = (
    "none",
    "deadlock",
    "memory",
    "misaligned",
    "division by zero",
    "time limit",
    "stack overflow",
    "shuffle",
    "trap",
    "check",
    "interrupted",
    "heap",
    "spin",
)
# What a thread waits at, in the order of simt_kind in runtime.h.
WAITING = (
    "a shuffle",
    "__ballot_sync",
    "__any_sync",
    "__all_sync",
    "__syncwarp",
    "__match_any_sync",
    "__match_all_sync",
    *["a warp reduction"] * 8,
    *["__syncthreads"] * 4,
    "__activemask",
)


_C_TYPES = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f64": ctypes.c_double,
    "ptr": ctypes.c_void_p,
    "str": ctypes.c_char_p,
}


def members(text: str) -> list[tuple[str, type]]:
    """The `_fields_` of a structure: "u32 thread mask, ptr pc" are three of them."""
    parts = [part.split() for part in text.split(",")]
    return [(name, _C_TYPES[kind]) for kind, *names in parts for name in names]


class Wait(ctypes.Structure):
    _fields_ = members("u32 thread, i32 kind, u32 mask unused, ptr pc")


class Fault(ctypes.Structure):
    _fields_ = [
        *members("i32 kind, u32 thread, u64 block, ptr pc address last_pc, str reason"),
        *members("u32 waits mask"),
        ("waiting", Wait * 1024),
    ]


class Job(ctypes.Structure):
    _fields_ = [
        *members("ptr run arguments"),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        *members("u64 shared, i32 workers unused, f64 seconds"),
        ("fault", Fault),
    ]


class checked(ProcessSwitch):
    """Turn the checks of kernels on the CPU on or off, for the whole process with all its threads.

    Like `use_backend` it is a call or a `with` block. The checks see accesses outside of tensors,
    races, values that were never written, and barriers that not all threads reach.

    Args:
        on: True, the default, checks every launch, False none; None leaves it to `GPUACCEL_SIMT`.
        seconds: time limit of one launch; 0 for none; None, the default, leaves it as it is.

    Raises:
        ArgumentError: for another value of `on`, and for seconds that are no number of 0 or more.

    Example:
        >>> source = 'extern "C" __global__ void ones(float* x) { x[threadIdx.x] = 1.0f; }'
        >>> ones = ga.compile(source)
        >>> with ga.checked(), ga.use_backend("simt"):
        ...     try:
        ...         ones[1, 8](torch.zeros(7))
        ...     except ga.errors.KernelError as error:
        ...         print(error)
        ones ...thread 7 of block 0 writes x[7]: x has 7 elements of float32...
    """

    # (mode, seconds); None leaves it to the environment.
    _current: tuple[str | None, float | None] = (None, None)

    def __init__(self, on: bool | None = True, *, seconds: float | None = None):
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds >= 0):
            raise ArgumentError(f"seconds is {seconds!r}; expected a number, 0 or more")
        if on not in (True, False, None):
            raise ArgumentError(f"checked is {on!r}; expected True, False or None")
        mode = {True: "checked", False: "fast", None: None}[on]
        super().__init__((mode, self._current[1] if seconds is None else seconds))


def is_checked(learner: bool) -> bool:
    """Whether a launch is checked.

    Args:
        learner: the kernel was made from a string.

    Raises:
        BackendError: for an unknown value of GPUACCEL_SIMT.
    """
    mode = checked._current[0] or os.environ.get("GPUACCEL_SIMT") or "auto"
    check_choice("GPUACCEL_SIMT", mode, Mode, error=BackendError)
    return learner if mode == "auto" else mode == "checked"


def time_limit() -> float:
    """Seconds that a launch may take; 0 for no limit.

    Raises:
        BackendError: for a GPUACCEL_SIMT_SECONDS that is no number of 0 or more.
    """
    if checked._current[1] is not None:
        return float(checked._current[1])
    text = os.environ.get("GPUACCEL_SIMT_SECONDS") or "20"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise BackendError(
            f"GPUACCEL_SIMT_SECONDS is {text!r}; expected a number of seconds, 0 or more"
        )
    return seconds


_lock = threading.Lock()


def launch(
    program,
    name: str,
    shape,
    arguments: int,
    *,
    checks=None,
    dynamic: int | None = None,
    printed: list[str] | None = None,
) -> Fault | None:
    """Run a kernel's grid to its end. Return the fault that ended it early, or None.

    One launch runs at a time in a process.

    Args:
        shape: grid, block and bytes of dynamic shared memory, seven numbers
        arguments: address of a table of pointers to the arguments' values
        checks: the Checks of a checked program, which runs on one worker
        dynamic: address of the dynamic shared memory; None: the worker's own
        printed: list to which the kernel's output is added; None: it is written to sys.stdout

    Raises:
        BackendError: without memory for the stacks, and KeyboardInterrupt after Ctrl-C.
    """
    blocks = math.prod(shape[:3])
    threads = math.prod(shape[:6])
    with _lock:
        job = Job()
        run = getattr(program.library, f"simt_run_{symbol(name)}")
        job.run = ctypes.cast(run, ctypes.c_void_p).value
        job.arguments = arguments
        job.grid[:] = shape[:3]
        job.block[:] = shape[3:6]
        job.shared = shape[6]
        job.workers = 1
        if threads >= MANY_THREADS and checks is None:
            job.workers = min(len(os.sched_getaffinity(0)), blocks, MAX_WORKERS)
        job.seconds = time_limit()
        if checks is not None:
            program.runtime.simt_check_with(ctypes.byref(checks))
        if program.runtime.simt_launch(ctypes.byref(job), ctypes.c_void_p(dynamic)):
            raise BackendError(
                f"{name}: there is no memory for the stacks of {job.workers} workers and "
                f"{shape[6]:,} bytes of shared memory"
            )
        text = ctypes.c_char_p()
        length = program.runtime.simt_printed(ctypes.byref(text))
        output = ctypes.string_at(text, length).decode(errors="replace") if length else ""
        fault = Fault.from_buffer_copy(job.fault) if job.fault.kind else None
    if printed is not None:
        printed.append(output)
    elif output:
        sys.stdout.write(output)
    if fault is not None and FAULTS[fault.kind] == "interrupted":
        raise KeyboardInterrupt
    return fault


def symbols(program) -> Symbols:
    """The program's lines and variables, read once."""
    if not hasattr(program, "symbols"):
        program.symbols = Symbols(program)
    return program.symbols


# These faults have the address of the instruction itself. Others have a return address, one
# instruction further.
EXACT_FAULTS = ("memory", "misaligned", "division by zero", "time limit", "stack overflow")
# An address below this one is a null pointer with an offset.
NULL_PAGE = 65536


def fault_report(program, fault: Fault, shape) -> Report:
    """The report of a fault that ended a launch."""
    table = symbols(program)
    grid = shape[:3]
    dims = shape[3:6]
    kind = FAULTS[fault.kind]

    def locate(pc, back):
        return table.locate(pc - table.base - back) if pc and pc >= table.base else (None, None)

    file, line = locate(fault.pc, 0 if kind in EXACT_FAULTS else 1)
    if line is None:
        # The fault is inside the runtime. The user's line is the kernel's last call of it.
        file, line = locate(fault.last_pc, 1)
    thread = coordinates(fault.thread, dims)
    block = coordinates(fault.block, grid)
    who = thread_words(thread, block, dims, grid)
    if kind == "deadlock":
        # (place, what it waits at, mask) -> the threads that wait there
        waiting: dict[tuple, list[int]] = {}
        for wait in fault.waiting[: fault.waits]:
            place = locate(wait.pc, 1), WAITING[wait.kind], wait.mask
            waiting.setdefault(place, []).append(wait.thread)
        places = list(waiting)
        file, line = places[0][0]
        rows = [
            f"{_ranges(threads)} at {what}"
            + (f" with mask {mask:#010x}" if mask else "")
            + f" (line {at_line})"
            for ((_, at_line), what, mask), threads in waiting.items()
        ]
        return Report(
            kind,
            line,
            file,
            coordinates(fault.waiting[0].thread, dims),
            block,
            f"deadlock in {who.split(' of ', 1)[1]}, where every thread waits: {', '.join(rows)}",
            other_line=next((at[1] for at, _, _ in places if at != (file, line)), None),
        )
    address = fault.address or 0
    reason = (fault.reason or b"").decode(errors="replace")
    in_block = f"block {fault.block + 1:,} of {math.prod(grid):,}"
    if kind == "memory":
        kind = "null" if address < NULL_PAGE else "far"
    words = {
        "null": f"dereferences a null pointer (address {address})",
        "far": f"accesses address {address:#x}, which is outside every allocation",
        "division by zero": "divides an integer by zero (or the smallest integer by -1)",
        "time limit": f"was still running after {time_limit():g} s, in {in_block}: a loop does not "
        "end (blocks run in order, so none can wait for a later one), or the launch is large; "
        "ga.checked(seconds=...) sets the limit",
        "spin": "waits in a loop for a value that no thread of its block will write; blocks run "
        f"in order here, and {in_block} cannot wait for a later one",
        "stack overflow": "used more than 256 KiB of stack (recursion without end, or large local "
        "arrays)",
        "misaligned": "reads or writes a vector (such as float4) at a misaligned address, or has "
        "written beyond a local array",
        "shuffle": f"calls a warp function with mask {fault.mask:#010x}, which does not include "
        f"its own lane {fault.thread % 32}",
        "trap": f"stopped the kernel: {reason}",
        "heap": reason,
    }.get(kind, kind)
    kind = "deadlock" if kind == "spin" else kind
    return Report(kind, line, file, thread, block, f"{who} {words}")


def _ranges(numbers) -> str:
    """ "threads 0-31, 40"."""
    # first and last number of each
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] + 1 == number:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    words = [f"{first}-{last}" if last > first else str(first) for first, last in ranges]
    more = f" and {len(words) - 6} more groups" if len(words) > 6 else ""
    return ("thread " if len(numbers) == 1 else "threads ") + ", ".join(words[:6]) + more


def run_fast(program, name: str, shape, arguments: int):
    """Launch without checks. A fault that ends the launch raises KernelError."""
    fault = launch(program, name, shape, arguments)
    if fault is not None:
        raise error(program, name, [fault_report(program, fault, shape)], checked=False)
