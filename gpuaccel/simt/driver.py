"""Launches a compiled kernel on the CPU: which mode, how many workers, how long, and what ended it.

    >>> with ga.checked():                    # every access is looked at, see checking.py
    ...     kernel[grid, block](x, y, n)
    >>> ga.checked(False)                     # fast, for the rest of the process

`GPUACCEL_SIMT`: auto (checked for kernels made from strings, fast for the files of kernels_cu), checked, fast.
`GPUACCEL_SIMT_SECONDS`: time limit of one launch, 20 by default.
"""

import ctypes
import os
import sys
import threading

from ..backends import ProcessSwitch
from ..errors import ArgumentError, BackendError
from .reports import Report, Symbols, coordinates, error, thread_words

MODES = ("auto", "checked", "fast")
MANY_THREADS = 8192  # CUDA threads from which a second core pays
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
)
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
)


class Wait(ctypes.Structure):
    _fields_ = [
        ("thread", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("mask", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("pc", ctypes.c_void_p),
    ]


class Fault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("thread", ctypes.c_uint32),
        ("block", ctypes.c_uint64),
        ("pc", ctypes.c_void_p),
        ("address", ctypes.c_void_p),
        ("last_pc", ctypes.c_void_p),
        ("reason", ctypes.c_char_p),
        ("waits", ctypes.c_uint32),
        ("mask", ctypes.c_uint32),
        ("waiting", Wait * 1024),
    ]


class Job(ctypes.Structure):
    _fields_ = [
        ("run", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint64),
        ("workers", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("seconds", ctypes.c_double),
        ("fault", Fault),
    ]


# (mode, seconds) as checked() set them; None leaves it to the environment.
_mode: "tuple[str | None, float | None]" = (None, None)


class checked(ProcessSwitch):
    """Turn the checks of kernels on the CPU on or off, for the whole process with all its threads.

    on: True checks every launch, False none; None leaves it to `GPUACCEL_SIMT`
    seconds: time limit of one launch; 0 for none, None leaves it as it is

    Like `use_backend` it is a call, a `with` block or a decorator.
    """

    def __init__(self, on: "bool | None" = True, *, seconds: "float | None" = None):
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds >= 0):
            raise ArgumentError(f"seconds is {seconds!r}; expected a number, 0 or more")
        if on not in (True, False, None):
            raise ArgumentError(f"checked is {on!r}; expected True, False or None")
        mode = {True: "checked", False: "fast", None: None}[on]
        super().__init__((mode, _mode[1] if seconds is None else seconds))

    @staticmethod
    def _get():
        return _mode

    @staticmethod
    def _set(mode):
        global _mode
        _mode = mode


def is_checked(learner: bool) -> bool:
    """Does a launch get the checks? learner: the kernel was made from a string."""
    mode = _mode[0] or os.environ.get("GPUACCEL_SIMT") or "auto"
    if mode not in MODES:
        raise BackendError(f"GPUACCEL_SIMT is {mode!r}; expected one of {', '.join(MODES)}")
    return learner if mode == "auto" else mode == "checked"


def time_limit() -> float:
    """Seconds that a launch may take; 0: no limit."""
    text = os.environ.get("GPUACCEL_SIMT_SECONDS") or "20"
    try:
        seconds = float(text) if _mode[1] is None else float(_mode[1])
        if seconds >= 0:
            return seconds
    except ValueError:
        pass
    raise BackendError(
        f"GPUACCEL_SIMT_SECONDS is {text!r}; expected a number of seconds, 0 or more"
    )


_lock = threading.Lock()
_job = None


def launch(
    program, name: str, shape, arguments: int, *, checks=None, dynamic: "int | None" = None
) -> "Fault | None":
    """Run a kernel's grid to its end; the reason when it ended early. One launch at a time in a process.

    shape: grid, block and shared bytes, seven numbers; arguments: address of a table of pointers to the values; checks: what a
    checked program is to look at (then one worker); dynamic: where dynamic shared memory is (None: its own)."""
    global _job
    threads = shape[0] * shape[1] * shape[2] * shape[3] * shape[4] * shape[5]
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with _lock:
        job = _job = _job or Job()
        job.run = ctypes.cast(getattr(program.library, f"simt_run_{name}"), ctypes.c_void_p).value
        job.arguments, job.grid[:], job.block[:], job.shared = (
            arguments,
            shape[:3],
            shape[3:6],
            shape[6],
        )
        job.workers = (
            min(cores, shape[0] * shape[1] * shape[2], 64)
            if threads >= MANY_THREADS and checks is None
            else 1
        )
        job.seconds = time_limit()
        if checks is not None:
            program.runtime.simt_check_with(ctypes.byref(checks))
        if program.runtime.simt_launch(ctypes.byref(job), ctypes.c_void_p(dynamic)):
            raise BackendError(
                f"{name}: there is no memory for the stacks of {job.workers} workers and {shape[6]:,} bytes of shared "
                "memory"
            )
        text = ctypes.c_char_p()
        length = program.runtime.simt_printed(ctypes.byref(text))
        printed = ctypes.string_at(text, length).decode(errors="replace") if length else ""
        fault = Fault.from_buffer_copy(job.fault) if job.fault.kind else None
    if printed:
        sys.stdout.write(printed)
    if fault is not None and FAULTS[fault.kind] == "interrupted":
        raise KeyboardInterrupt
    return fault


def symbols(program) -> Symbols:
    """The program's lines and variables, read once."""
    if not hasattr(program, "symbols"):
        program.symbols = Symbols(program)
    return program.symbols


def fault_report(program, fault: Fault, shape) -> Report:
    """The fault that ended a launch, as a report."""
    table, grid, dims = symbols(program), shape[:3], shape[3:6]
    kind = FAULTS[fault.kind]
    # A fault's address is the instruction itself; the others are return addresses, one instruction further.
    exact = kind in ("memory", "misaligned", "division by zero", "time limit", "stack overflow")

    def line(pc, back):
        return table.locate(pc - table.base - back) if pc and pc >= table.base else (None, None)

    file, at = line(fault.pc, 0 if exact else 1)
    if at is None:  # in the runtime: the kernel's last call of it
        file, at = line(fault.last_pc, 1)
    thread, block = coordinates(fault.thread, dims), coordinates(fault.block, grid)
    who = thread_words(thread, block, dims, grid)
    if kind == "memory":
        address = fault.address or 0
        kind = "null" if address < 65536 else "far"
        message = (
            f"{who} uses a null pointer (address {address})"
            if kind == "null"
            else f"{who} touches address {address:#x}, which is not its own"
        )
    elif kind == "deadlock":
        places = {}
        for wait in fault.waiting[: fault.waits]:
            places.setdefault((line(wait.pc, 1), WAITING[wait.kind], wait.mask), []).append(
                wait.thread
            )
        (file, at), _, _ = next(iter(places))
        thread = coordinates(fault.waiting[0].thread, dims)
        rows = [
            f"{_ranges(threads)} at line {where[1]} for {what}"
            + (f" with mask {mask:#010x}" if mask else "")
            for (where, what, mask), threads in places.items()
        ]
        message = f"deadlock in {who.split(' of ', 1)[1]}: everyone waits, " + "; ".join(rows)
        others = [where for where, *_ in places if where != (file, at)]
        return Report(
            kind, at, file, thread, block, message, other_line=others[0][1] if others else None
        )
    else:
        message = {
            "division by zero": f"{who} divides an integer by zero (or the smallest one by -1)",
            "time limit": f"{who} was still running after {time_limit():g} s, in block {fault.block + 1:,} of "
            f"{grid[0] * grid[1] * grid[2]:,}: a loop that does not end (blocks run in order: none can wait for a later "
            "one), or much work; ga.checked(seconds=...) sets the limit",
            "stack overflow": f"{who} used more than 256 KiB of stack (a recursion without end, or large local arrays)",
            "misaligned": f"{who} reads or writes a vector (float4 or the like) at an address that is no multiple of its size",
            "shuffle": f"{who} (lane {fault.thread % 32}) is not in its own mask {fault.mask:#010x}",
            "trap": f"{who} stopped the kernel: {(fault.reason or b'').decode(errors='replace')}",
        }.get(kind, f"{who}: {kind}")
    return Report(kind, at, file, thread, block, message)


def _ranges(numbers) -> str:
    """ "threads 0-31, 40"."""
    parts, start = [], None
    for i, n in enumerate(numbers):
        start = n if start is None else start
        if i + 1 == len(numbers) or numbers[i + 1] != n + 1:
            parts.append(f"{start}-{n}" if n > start else str(n))
            start = None
    more = f" and {len(parts) - 6} more groups" if len(parts) > 6 else ""
    return ("thread " if len(numbers) == 1 else "threads ") + ", ".join(parts[:6]) + more


def run_fast(program, name: str, shape, arguments: int):
    """A launch without checks; KernelError when it did not end well."""
    fault = launch(program, name, shape, arguments)
    if fault is not None:
        raise error(program, name, [fault_report(program, fault, shape)], checked=False)
