"""Ranks from a notebook or a script: processes of this machine that run one function, watched until they end.

    >>> ga.launch(work, 2)                 # work(*args) in two processes, torch.distributed is ready in each; returns [result, result]
    >>> ga.launch(work, 2, ("tiny",), timeout=10)

A rank that raises, dies or hangs ends all of them, and the RankError names it. The processes meet over a file and talk over loopback: nothing
listens elsewhere. On several machines, or where something else starts the processes: torchrun, and ga.Distributed() in each.
"""
import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

from . import distributed
from .errors import ArgumentError, RankError

AHEAD = 3                        # steps that a rank's host may be ahead of another's
GRACE = 1.0                      # seconds in which the ranks after the first that failed may still say what they saw


def launch(fn, ranks: int = 2, args: tuple = (), *, backend: "str | None" = None, timeout: float = 10.0,
           after_step: bool = False) -> list:
    """fn(*args) in `ranks` new processes; what each returned, in the order of the ranks.

    fn and what it returns have to be picklable; a function of a notebook is handed on by a fork, as long as this process has not used a GPU.
    backend: "nccl" (a GPU for each rank) or "gloo" (on CPUs: in these processes the GPU policy is off); default: nccl where there are GPUs enough.
    timeout: seconds after which a rank that stands still while others wait for it counts as hanging (from its first optimizer step on).
    after_step: at the first Ctrl-C all ranks are asked to stop after the same step (Ranks.asked_to_stop()), which fn has to look at; at the second,
    or without it at the first, they are stopped.
    RankError: the first rank that raised, died or hung, and how; the others have been stopped."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    backend = backend or ("nccl" if gpus >= ranks else "gloo")
    if ranks < 1:
        raise ArgumentError(f"ranks is {ranks}; expected 1 or more")
    if backend not in ("nccl", "gloo"):
        raise ArgumentError(f"backend is {backend!r}; expected 'nccl' or 'gloo'")
    if backend == "nccl" and gpus < ranks:
        raise ArgumentError(f"{ranks} ranks with backend 'nccl' need a GPU each, and this machine has {gpus} that torch can use; expected fewer ranks, or "
                            "backend='gloo'")
    context = multiprocessing.get_context(_way(fn))
    with tempfile.TemporaryDirectory() as folder:
        beats, stop = context.RawArray("q", ranks), context.RawValue("q", 0)
        lines, processes = [], []
        try:
            for rank in range(ranks):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(rank, ranks, backend, os.path.join(folder, "store"), theirs, beats, stop, fn, args),
                                          daemon=True)
                with _environment(rank, ranks, backend):
                    process.start()
                theirs.close()
                lines.append(mine)
                processes.append(process)
            watch = _Watch(lines, processes, beats, timeout)
            try:
                return watch()
            except KeyboardInterrupt:
                if not after_step:
                    raise
                stop.value = max(beats) + AHEAD + 1      # a step that no rank has begun
                return watch()
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()


def _way(fn) -> str:
    """"spawn" where the function can be pickled, else "fork"."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    real = file is not None and os.path.isfile(file)         # a notebook's has none, that of `python -` is no file
    if real or getattr(fn, "__module__", None) != "__main__" and file is None:
        try:
            pickle.dumps(fn)
            return "spawn"
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
    if not hasattr(os, "fork") or torch.cuda.is_initialized():
        raise ArgumentError(f"{getattr(fn, '__name__', fn)} cannot be handed to new processes: it is not a function of a module"
                            f"{', and a process that has used a GPU cannot be forked' if hasattr(os, 'fork') else ''}; expected one from a file (%%writefile)")
    return "fork"


@contextlib.contextmanager
def _environment(rank, ranks, backend):
    """As torchrun has it, for the process that is started in the block."""
    new = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
           **({"GPUACCEL_GPU": "off", "GLOO_SOCKET_IFNAME": _loopback()} if backend == "gloo" else {"NCCL_SOCKET_IFNAME": _loopback()})}
    before = {key: os.environ.get(key) for key in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def _rank(rank, ranks, backend, store, line, beats, stop, fn, args):
    """The whole life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # Ctrl-C is the parent's business
    with _environment(rank, ranks, backend):             # a fork took the parent's state along
        try:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            if backend == "nccl":
                torch.cuda.set_device(rank)
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=datetime.timedelta(minutes=30))

            def beat():
                beats[rank] += 1
            distributed.on_beat, distributed.last_step = beat, lambda: stop.value
            line.send((True, fn(*args)))
        except BaseException as error:                   # the parent tells, and stops all
            line.send((False, (time.time(), type(error).__name__, str(error), traceback.format_exc())))
    line.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)                                          # not through torch's goodbyes, which may wait for others


class _Watch:
    """Waits for all ranks; called again it goes on waiting."""

    def __init__(self, lines, processes, beats, timeout):
        self.lines, self.processes, self.beats, self.timeout = lines, processes, beats, timeout
        self.results, self.failed, self.dead = {}, {}, {}

    def __call__(self) -> list:
        seen, since, until, ranks = list(self.beats), time.monotonic(), None, len(self.lines)
        while len(self.results) < ranks:
            self._listen()
            if (self.failed or self.dead) and until is None:
                until = time.monotonic() + GRACE
            if until is not None and (time.monotonic() > until or len(self.results) + len(self.failed) + len(self.dead) == ranks):
                raise _said(self.processes, self.failed, self.dead, self.beats)
            now = list(self.beats)
            if now != seen:
                seen, since = now, time.monotonic()
            if until is None and time.monotonic() - since > self.timeout and min(now) and (rank := _behind(now, self.results)) is not None:
                raise RankError(f"rank {rank} hangs: it has not come to the end of its backward in step {now[rank] + 1} for {self.timeout:g} s, and the "
                                "other ranks wait for it. All ranks were stopped")
        return [self.results[rank] for rank in range(ranks)]

    def _listen(self):
        waiting = {line: r for r, line in enumerate(self.lines) if r not in self.results and r not in self.failed and r not in self.dead}
        for line in multiprocessing.connection.wait(list(waiting), timeout=0.1):
            rank = waiting[line]
            try:
                fine, what = line.recv()
            except EOFError:                             # it never said anything
                self.dead[rank] = time.time()
                continue
            (self.results if fine else self.failed)[rank] = what


def _behind(beats, results) -> "int | None":
    """The rank that the others wait for; None: all are in the same step."""
    left = [rank for rank in range(len(beats)) if rank not in results]
    last = min(left, key=lambda rank: beats[rank], default=None)
    return last if last is not None and beats[last] < max(beats) else None


def _said(processes, failed, dead, beats) -> RankError:
    """Of the ranks that failed the one that began it: who died, else who raised first."""
    if dead:
        rank = min(dead, key=dead.get)
        processes[rank].join(GRACE)
        code = processes[rank].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with status {code}"
        return RankError(f"rank {rank} {how} in step {beats[rank] + 1}. All ranks were stopped")
    rank = min(failed, key=lambda r: failed[r][0])
    _, kind, message, trace = failed[rank]
    error = RankError(f"rank {rank} raised {kind}: {message}. All ranks were stopped")
    if hasattr(error, "add_note"):
        error.add_note(f"on rank {rank}:\n{trace}")
    return error
