"""Reducer from a notebook or a script: processes of this machine that run one function, watched until they end.

    >>> ga.launch(work, 2)                 # work(*args) in two processes, torch.distributed is ready in each; returns [result, result]
    >>> ga.launch(work, 2, ("tiny",), timeout=10)
    >>> ga.launch(work, 2, live=ga.LiveThroughput())      # work yields the Readings of ga.train: a line for each rank, while they train

A rank that raises, dies or hangs ends all of them, and the RankError names it. The processes meet over a file and talk over loopback: nothing
listens elsewhere. On several machines, or where something else starts the processes: torchrun, and ga.Distributed() in each.
"""

import contextlib
import datetime
import inspect
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

from ..errors import ArgumentError, RankError
from . import rendezvous
from .rendezvous import loopback

AHEAD = 3  # steps that a rank's host may be ahead of another's
GRACE = 1.0  # seconds in which the ranks after the first that failed may still say what they saw


def launch(
    fn,
    ranks: int = 2,
    args: tuple = (),
    *,
    backend: "str | None" = None,
    timeout: float = 10.0,
    start: float = 60.0,
    after_step: bool = False,
    live=None,
) -> list:
    """fn(*args) in `ranks` new processes; what each returned, in the order of the ranks.

    fn, args and what it returns have to be picklable (tensors are sent by value); a function of a notebook is handed on by a fork (one thread per
    rank) or, where torch sees a GPU (which a fork could not use), by value, with what it refers to (cloudpickle).
    backend: "nccl" (a GPU for each rank) or "gloo" (on CPUs: in these processes the GPU policy is off); default: nccl where there are GPUs enough.
    timeout: seconds after which a rank that stands still while others wait for it counts as hanging. start: the same until its first backward is over,
    as models are built and kernels compiled; from when the first rank makes its TrainStep.
    after_step: at the first Ctrl-C all ranks are asked to stop after the same step (Reducer.asked_to_stop()), which fn has to look at; at the second,
    or without it at the first, they are stopped.
    live: a LiveThroughput. fn may be a generator, `yield from ga.train(...)` and then return: the Readings that it yields are drawn there, each rank's
    as a run of its own, while this call waits. Stop, or Ctrl-C, stops all ranks; of one that was stopped the result is None.
    RankError: the first rank that raised, died or hung, and how; the others have been stopped."""
    gpus = (
        torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    )
    backend = backend or ("nccl" if gpus >= ranks else "gloo")
    if ranks < 1:
        raise ArgumentError(f"ranks is {ranks}; expected 1 or more")
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(f"args is {args!r}; expected a tuple, what the function is called with")
    if backend not in ("nccl", "gloo"):
        raise ArgumentError(f"backend is {backend!r}; expected 'nccl' or 'gloo'")
    if backend == "nccl" and gpus < ranks:
        raise ArgumentError(
            f"{ranks} ranks with backend 'nccl' need a GPU each, and this machine has {gpus} that torch can use; expected fewer ranks, or "
            "backend='gloo'"
        )
    way, fn = _way(fn)
    if way == "spawn":
        try:
            pickle.dumps(args)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ArgumentError(
                f"args cannot be handed to new processes: {error}; expected what can be pickled"
            ) from error
    context = multiprocessing.get_context(way)
    with tempfile.TemporaryDirectory() as folder:
        beats, came, stop = (
            context.RawArray("q", ranks),
            context.RawArray("q", ranks),
            context.RawValue("q", 0),
        )
        lines, processes = [], []
        try:
            for rank in range(ranks):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank,
                    args=(
                        rank,
                        ranks,
                        backend,
                        os.path.join(folder, "store"),
                        theirs,
                        beats,
                        came,
                        stop,
                        fn,
                        args,
                    ),
                    daemon=True,
                )
                with _environment(rank, ranks, backend):
                    process.start()
                theirs.close()
                lines.append(mine)
                processes.append(process)
            watch = _Watch(lines, processes, beats, came, timeout, start)
            if live is not None:
                live.run(watch.readings(), [f"rank {rank}" for rank in range(ranks)], wait=True)
                return watch.found()
            try:
                return watch()
            except KeyboardInterrupt:
                if not after_step:
                    raise
                stop.value = max(beats) + AHEAD + 1  # a step that no rank has begun
                return watch()
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()


def _way(fn) -> tuple:
    """How new processes come to be, and what they get for fn: "spawn" where it can be pickled, or where a fork would not do; else "fork"."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    real = file is not None and os.path.isfile(
        file
    )  # a notebook's has none, that of `python -` is no file
    if real or getattr(fn, "__module__", None) != "__main__" and file is None:
        try:
            pickle.dumps(fn)
            return "spawn", fn
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
    if hasattr(os, "fork") and not torch.cuda.is_available():
        return "fork", fn
    import cloudpickle

    try:
        return "spawn", _ByValue(cloudpickle.dumps(fn))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{getattr(fn, '__name__', fn)} cannot be handed to new processes: {error}; expected a function that uses no open "
            "files, locks or live views of this process, or one from a file (%%writefile)"
        ) from error


class _ByValue:
    """A function of a notebook on its way to a process that does not have the notebook."""

    def __init__(self, packed: bytes):
        self.packed = packed

    def __call__(self, *args):
        return pickle.loads(self.packed)(*args)


@contextlib.contextmanager
def _environment(rank, ranks, backend):
    """As torchrun has it, for the process that is started in the block."""
    new = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        **(
            {"GPUACCEL_GPU": "off", "GLOO_SOCKET_IFNAME": loopback()}
            if backend == "gloo"
            else {"NCCL_SOCKET_IFNAME": loopback()}
        ),
    }
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


def _rank(rank, ranks, backend, store, line, beats, came, stop, fn, args):
    """The whole life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    with _environment(rank, ranks, backend):  # a fork took the parent's state along
        try:
            forked = type(multiprocessing.current_process()).__name__ == "ForkProcess"
            torch.set_num_threads(
                1 if forked else int(os.environ["OMP_NUM_THREADS"])
            )  # OpenMP's threads do not survive a fork: two would wait for ever
            if backend == "nccl":
                torch.cuda.set_device(rank)
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=ranks,
                timeout=datetime.timedelta(minutes=30),
            )

            def beat(steps):
                beats[rank] += steps
                came[rank] += 1

            rendezvous.on_beat, rendezvous.last_step = beat, lambda: stop.value
            found = _drained(fn(*args), line)
            try:
                _send(line, (True, found))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ArgumentError(
                    f"what the function returned cannot be sent back: {error}; expected something that can be pickled"
                ) from error
        except BaseException as error:  # the parent tells, and stops all
            _send(
                line,
                (False, (time.time(), type(error).__name__, str(error), traceback.format_exc())),
            )
    line.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not through torch's goodbyes, which may wait for others


def _send(line, what):
    """By value: multiprocessing would send a tensor as a file that this process has to keep open."""
    line.send_bytes(pickle.dumps(what))


def _drained(made, line):
    """What fn returned; of a generator the Readings that it yields are sent first."""
    if not inspect.isgenerator(made):
        return made
    while True:
        try:
            reading = next(made)
        except StopIteration as end:
            return end.value
        _send(line, (None, reading))


class _Watch:
    """Waits for all ranks; called again it goes on waiting."""

    def __init__(self, lines, processes, beats, came, timeout, start):
        self.lines, self.processes, self.timeout, self.start = lines, processes, timeout, start
        self.beats, self.came = (
            beats,
            came,
        )  # of each rank: steps whose backward is over; how often it has come to what it does with the others
        self.results, self.failed, self.dead = {}, {}, {}

    def __call__(self) -> list:
        for _ in self.readings():
            pass
        return self.found()

    def found(self) -> list:
        """The result of each rank; None of those that have not come to their end."""
        return [self.results.get(rank) for rank in range(len(self.lines))]

    def readings(self):
        """(rank, Reading) as they come, until all ranks have ended; (0, None) every now and then, so that who listens may stop."""
        seen, since, until, ranks = list(self.came), time.monotonic(), None, len(self.lines)
        while len(self.results) < ranks:
            yield from self._listen() or [(0, None)]
            if (self.failed or self.dead) and until is None:
                until = time.monotonic() + GRACE
            if until is not None and (
                time.monotonic() > until
                or len(self.results) + len(self.failed) + len(self.dead) == ranks
            ):
                raise _said(self.processes, self.failed, self.dead, self.beats, self.results)
            now = list(self.came)
            if now != seen:
                seen, since = now, time.monotonic()
            if until is None and (rank := _behind(now, self.results)) is not None:
                limit = self.timeout if self.beats[rank] else max(self.start, self.timeout)
                if time.monotonic() - since > limit:
                    where = (
                        f"come to the end of its backward in step {self.beats[rank] + 1}"
                        if now[rank]
                        else "made its TrainStep"
                    )
                    raise RankError(
                        f"rank {rank} hangs: it has not {where} for {limit:g} s, and the other ranks wait for it. All ranks were stopped"
                    )

    def _listen(self) -> list:
        waiting, news = (
            {
                line: r
                for r, line in enumerate(self.lines)
                if r not in self.results and r not in self.failed and r not in self.dead
            },
            [],
        )
        for line in multiprocessing.connection.wait(list(waiting), timeout=0.1):
            rank = waiting[line]
            try:
                fine, what = pickle.loads(line.recv_bytes())
            except (EOFError, OSError):  # it ended without a last word, or in the middle of one
                self.dead[rank] = time.time()
                continue
            if fine is None:
                news.append((rank, what))
            else:
                (self.results if fine else self.failed)[rank] = what
        return news


def _behind(came, results) -> "int | None":
    """The rank that the others wait for; None: all have come as often."""
    left = [rank for rank in range(len(came)) if rank not in results]
    last = min(left, key=lambda rank: came[rank], default=None)
    return last if last is not None and came[last] < max(came) else None


def _said(processes, failed, dead, beats, results) -> RankError:
    """Of the ranks that failed the one that began it: who died, else who raised first; or who had returned while that one waited for it."""
    if dead:
        rank = min(dead, key=dead.get)
        processes[rank].join(5 * GRACE)
        code = processes[rank].exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code and code < 0
            else f"ended with status {code}"
        )
        hint = (
            ""
            if code != 1 or beats[rank]
            else (
                ". Its output says why; where it is that the function was not found, or a process started before its time: "
                "a script calls ga.launch under if __name__ == '__main__', with a function that is defined above"
            )
        )
        return RankError(
            f"rank {rank} {how} in step {beats[rank] + 1}. All ranks were stopped{hint}"
        )
    rank = min(failed, key=lambda r: failed[r][0])
    _, kind, message, trace = failed[rank]
    gone = min(results, key=lambda r: beats[r], default=None)
    if gone is not None and (
        kind == "RankError" and "cannot reach" in message or "gloo" in message
    ):
        return RankError(
            f"rank {gone} has returned, after {beats[gone]} step{'s' * (beats[gone] != 1)}, and rank {rank} waits for it in step {beats[gone] + 1}. "
            "Every rank makes its TrainStep, and calls it, and collectives of its own, as often as the others: step(None) where it has no batch left. "
            "All ranks were stopped"
        )
    error = RankError(f"rank {rank} raised {kind}: {message}. All ranks were stopped")
    if hasattr(error, "add_note"):
        error.add_note(f"on rank {rank}:\n{trace}")
    return error
