"""Ranks from a notebook or a script: processes of this machine that run one function, watched until
they end.

    ga.launch(work, 2)                  # work() in two processes; returns [result, result]
    ga.launch(work, 2, ("tiny",), timeout=10)
    ga.launch(work, 2, live=ga.LiveThroughput())     # work yields the Readings of ga.train

In each process torch.distributed is initialized. A rank that raises, dies or hangs ends all of
them, and the RankError names it. A rank hangs when another one has waited for it in a collective
for `timeout` seconds: torch.distributed ends the wait, and the ranks that are not in a collective
are named with the line at which they are. Where GPUs wait in a CUDA graph torch has no limit; there
heartbeats tell who is behind (distributed/heartbeat.py). When the process that called ga.launch
ends, however it does, its ranks end within a second. The processes meet over a file and talk over
loopback: nothing listens elsewhere. On several machines, or where something else starts the
processes: torchrun, and ga.Distributed() in each.
"""

import contextlib
import datetime
import faulthandler
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import pathlib
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

try:
    import fcntl
except ImportError:
    # Windows has none.
    fcntl = None  # type: ignore[assignment]

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _set_pg_timeout

from ..errors import ArgumentError, RankError, check_choice
from ..forkserver import LAUNCHED_BY
from . import heartbeat
from .heartbeat import SLACK, ranks_in_words
from .rendezvous import loopback

AHEAD = 3  # steps that a rank's host may be ahead of another's
GRACE = 1.0  # seconds in which further ranks may still report, after the first that failed
PARENT_CHECK = 0.2  # seconds between two looks of a rank at its parent
# The modules of a training step, behind one that ends their process with its parent.
PRELOADED = ["gpuaccel.forkserver", "gpuaccel.training", "torch._dynamo"]
# In a rank, while it imports the script of its function.
importing_script = False
# Of a rank's process group.
RankBackend = Literal["nccl", "gloo"]
NOT_PICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


def launch(
    fn: Callable[..., Any],
    ranks: int = 2,
    args: tuple = (),
    *,
    backend: RankBackend | None = None,
    timeout: float = 60.0,
    start: float = 60.0,
    after_step: bool = False,
    live: Any | None = None,
) -> list:
    """Run `fn(*args)` in new processes, each of which is a rank, and wait for all.

    Each process has torchrun's RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, and the process
    group of torch.distributed is there when fn is called. accelerate takes it over.

    Args:
        fn: a function, picklable, or one of a notebook. That is handed over by value with what it
            refers to (cloudpickle). It may be a generator (see `live`).
        ranks: how many processes, 1 or more. Default: 2.
        args: picklable, as what fn returns. Tensors are sent by value.
        backend: "nccl" (a GPU for each rank) or "gloo" (on CPUs: in these processes the GPU policy
            is off). Default: nccl where there are GPUs enough.
        timeout: seconds that a rank may wait for another one in a collective of any group; then the
            other one counts as hanging. While no rank waits, ranks may compute as long as they
            like. A group of your own takes the `timeout=` of torch.distributed.new_group, if you
            give one. Default: 60.
        start: seconds, the same for the start of the processes, and from a rank's first TrainStep
            until its first step is over, as models are built and kernels compiled. Default: 60.
        after_step: at the first Ctrl-C all ranks are asked to stop after the same step; fn has to
            look at Reducer.asked_to_stop(). At the second, or without it at the first, they are
            stopped.
        live: a LiveThroughput. fn is `yield from ga.train(...)` and then a return: the Readings
            that it yields are drawn there, each rank's as a run of its own, while this call waits.
            Stop, or Ctrl-C, stops all ranks; the result of one that was stopped is None.

    Returns:
        What fn returned on each rank, in their order.

    Raises:
        RankError: for the first rank that raised, died or hung; the others have been stopped.
        ArgumentError: for a fn or args that cannot be handed to new processes, and for ranks or a
            backend that this machine has not.

    Example:
        >>> import os
        >>> ga.launch(os.getenv, ranks=2, args=("RANK",), timeout=60)
        ['0', '1']
    """
    if importing_script:
        raise ArgumentError(
            "ga.launch was called by a rank that imports this script; expected the call under "
            "if __name__ == '__main__'"
        )
    for name, seconds in (("timeout", timeout), ("start", start)):
        if not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            raise ArgumentError(f"{name} is {seconds!r}; expected seconds, more than 0")
    process_group = _checked_backend(ranks, args, backend)
    context, work = _start_method(fn, args)
    with tempfile.TemporaryDirectory() as folder:
        shared = SharedCounts(
            steps=context.RawArray("q", ranks),
            heartbeats=context.RawArray("q", ranks),
            last_step=context.RawValue("q", 0),
        )
        limits = Limits(timeout, max(start, timeout))
        connections, processes = [], []
        try:
            for rank in range(ranks):
                receiving, sending = context.Pipe(duplex=False)
                place = RankPlace(rank, ranks, process_group, folder, limits, dict(os.environ))
                # No daemon: a rank may have processes of its own, as a DataLoader's.
                process = context.Process(target=_run_rank, args=(place, shared, sending, work))
                with _environment(place), _sigint_blocked(), _main_hidden():
                    process.start()
                sending.close()
                connections.append(receiving)
                processes.append(process)
            watch = RankWatch(connections, processes, shared, limits, pathlib.Path(folder))
            if live is not None:
                live.run(watch.readings(), [f"rank {rank}" for rank in range(ranks)])
                return watch.results_in_order()
            try:
                return watch.wait()
            except KeyboardInterrupt:
                if not after_step:
                    raise
                # A step that no rank has begun.
                shared.last_step.value = max(shared.steps) + AHEAD + 1
                return watch.wait()
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()


def _checked_backend(ranks: int, args, backend: RankBackend | None) -> RankBackend:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ArgumentError(f"ranks is {ranks!r}; expected a whole number, 1 or more")
    gpus = 0
    if torch.cuda.is_available() and dist.is_nccl_available():
        gpus = torch.cuda.device_count()
    backend = backend or ("nccl" if gpus >= ranks else "gloo")
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(f"args is {args!r}; expected a tuple, what the function is called with")
    check_choice("backend", backend, RankBackend)
    if backend == "nccl" and gpus < ranks:
        raise ArgumentError(
            f"{ranks} ranks with backend 'nccl' need a GPU each, and this machine has {gpus} that "
            "torch can use; expected fewer ranks, or backend='gloo'"
        )
    return backend


def _start_method(fn, args) -> tuple:
    """(multiprocessing's context, the work of each process).

    On Linux ranks are forks of a server process, which has imported torch and gpuaccel before, has
    no threads, and has not touched a GPU: a launch then takes a tenth of a second, where imports
    take several. A function of a file is imported by its name; one of a notebook goes by value.
    """
    work = _work(fn, args)
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn"), work
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Here, so that the server does not get a rank's variables.
    try:
        with _sigint_blocked(), _variables({LAUNCHED_BY: str(os.getpid())}):
            multiprocessing.forkserver.ensure_running()
    except OSError:
        # The server listens on a socket in the temporary folder, whose path may be too long.
        return multiprocessing.get_context("spawn"), work
    return context, work


def _work(fn, args) -> "_ByName | _ByValue":
    try:
        packed = pickle.dumps(args)
    except NOT_PICKLABLE as error:
        raise ArgumentError(
            f"args cannot be handed to new processes: {error}; expected what can be pickled"
        ) from error
    main = getattr(sys.modules["__main__"], "__file__", None)
    # A notebook's __main__ has no file, and that of `python -` is none.
    in_file = main is not None and os.path.isfile(main)
    if in_file or getattr(fn, "__module__", None) != "__main__" and main is None:
        script = multiprocessing.spawn.get_preparation_data("rank")
        script = {key: value for key, value in script.items() if key.startswith("init_main")}
        with contextlib.suppress(*NOT_PICKLABLE):
            return _ByName(script, pickle.dumps(fn), packed)
    try:
        return _ByValue(cloudpickle.dumps((fn, args)))
    except (*NOT_PICKLABLE, ValueError) as error:
        raise ArgumentError(
            f"{getattr(fn, '__name__', fn)} cannot be handed to new processes: {error}; expected a "
            "function that uses no open files, locks or live views of this process, or one from a "
            "file (%%writefile)"
        ) from error


@dataclass
class _ByName:
    """A function of a file, and its arguments; both pickled here: multiprocessing would let all
    processes share the memory of a tensor."""

    script: dict  # where __main__ is, as multiprocessing describes it
    fn: bytes
    args: bytes

    def import_script(self):
        """As multiprocessing imports it in a new process."""
        global importing_script
        importing_script = True
        multiprocessing.spawn.prepare(self.script)
        importing_script = False

    def __call__(self):
        return pickle.loads(self.fn)(*pickle.loads(self.args))


@dataclass
class _ByValue:
    """A function for a process that does not have its notebook, and its arguments."""

    packed: bytes

    def import_script(self):
        pass

    def __call__(self):
        fn, args = pickle.loads(self.packed)
        return fn(*args)


@contextlib.contextmanager
def _main_hidden():
    """A process that is started in the block does not import the script before _run_rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# ---- in the processes ----------------------------------------------------------------------------


@dataclass
class SharedCounts:
    """Memory that all processes share."""

    steps: Any  # of each rank: steps whose backward is over
    heartbeats: Any  # of each rank: how often it has reached a collective of all ranks' step
    last_step: Any  # the step, from 1, after which all ranks are asked to stop; 0: none


@dataclass
class Limits:
    """Seconds that a rank may wait for another one."""

    timeout: float
    start: float  # until the first step is over; not less


@dataclass
class RankPlace:
    """Where a process belongs."""

    rank: int
    ranks: int
    backend: str
    folder: str  # of the file over which the ranks meet, and of their stacks
    limits: Limits
    variables: dict  # the parent's environment


class LaunchedRank:
    """What heartbeat.py calls in a process of ga.launch."""

    def __init__(self, place: RankPlace, shared: SharedCounts):
        self.place, self.rank, self.shared = place, place.rank, shared
        # Of each group of a TrainStep: how long its collectives may wait.
        self.seconds: dict[dist.ProcessGroup | None, float] = {}

    def heartbeat(self, steps: int, group: dist.ProcessGroup | None):
        limits = self.place.limits
        # The others' first backward is over when this rank's first step is.
        seconds = limits.timeout if self.shared.steps[self.rank] else limits.start
        if self.seconds.get(group, limits.timeout) != seconds:
            _set_pg_timeout(_limit_of_collectives(self.place, seconds), group)
        self.seconds[group] = seconds
        self.shared.steps[self.rank] += steps
        if group in (None, dist.group.WORLD):
            self.shared.heartbeats[self.rank] += 1

    def asked_to_stop(self) -> bool:
        """Whether all ranks are to stop after the step that this one has taken last."""
        return 0 < self.shared.last_step.value <= self.shared.steps[self.rank]


@dataclass
class Message:
    """From a rank to the parent. kind: "reading", "result", or "error"."""

    kind: str
    value: Any


@dataclass
class Failure:
    """The exception that ended a rank."""

    time: float
    kind: str
    message: str
    trace: str
    lost_rank: bool  # a collective failed: another rank has ended


def _environment(place: RankPlace):
    """torchrun's variables, for the process that is started in the block."""
    new = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_WORLD_SIZE": str(place.ranks),
        # As torchrun; so the sums of one rank and of several have the same order.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if place.backend == "gloo":
        new |= {"GPUACCEL_GPU": "off", "GLOO_SOCKET_IFNAME": loopback()}
    else:
        new |= {"NCCL_SOCKET_IFNAME": loopback()}
    return _variables(new)


@contextlib.contextmanager
def _variables(new: dict[str, str]):
    """Variables of the environment, inside the block."""
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


@contextlib.contextmanager
def _sigint_blocked():
    """A process that is started in the block gets no SIGINT while it imports torch.

    Ctrl-C in a terminal reaches every process of it. Here it is delivered after the block.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # multiprocessing starts it before the first process, and then unblocks SIGINT.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Parent:
    """The process that called ga.launch, as a rank sees it.

    The ranks meet over a file in `folder`. Where the folder is missing, torch's FileStore retries
    for five minutes, in which no other thread runs. So it stays until the last rank has ended.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.started_by = os.getppid()  # the parent or its server, which ends with it
        if fcntl is not None:
            self.held = os.open(folder, os.O_RDONLY)
            fcntl.flock(self.held, fcntl.LOCK_SH)

    def is_alive(self) -> bool:
        # The pipe that tells of the parent's end may have been inherited by another process, which
        # keeps it open; the number of who started this one tells too, but not on Windows.
        parent: Any = multiprocessing.parent_process()
        return parent.is_alive() and (os.name == "nt" or os.getppid() == self.started_by)

    def end_with_it(self):
        """End this process as soon as the parent has ended. For a thread."""
        while self.is_alive():
            time.sleep(PARENT_CHECK)
        with contextlib.suppress(OSError):
            # Fails while another rank holds it.
            if fcntl is not None:
                fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(1)


def _run_rank(place: RankPlace, shared: SharedCounts, connection, work):
    """The whole life of a rank."""
    # Ctrl-C is the parent's business. The server has ignored SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        parent = _Parent(place.folder)
    except FileNotFoundError:
        # The parent has ended, and no rank needs the folder any more.
        os._exit(1)
    if not parent.is_alive():
        parent.end_with_it()
    threading.Thread(target=parent.end_with_it, daemon=True).start()
    # A fork of the server has the environment in which that was started.
    os.environ.clear()
    os.environ.update(place.variables)
    with _environment(place), open(_stack_file(place.folder, place.rank), "w") as stack:
        if hasattr(faulthandler, "register"):
            # Asked for by the parent. It works in C code, too, whoever has the interpreter's lock.
            faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        try:
            work.import_script()
            _init_rank(place)
            heartbeat.launched_rank = LaunchedRank(place, shared)
            result = _run_to_end(work(), connection)
            try:
                _send(connection, Message("result", result))
            except NOT_PICKLABLE as error:
                raise ArgumentError(
                    f"what the function returned cannot be sent back: {error}; expected something "
                    "that can be pickled"
                ) from error
        # The parent reports it, and stops all ranks.
        except BaseException as error:
            _send(connection, Message("error", _failure(error)))
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.terminate()
    # Without torch's own clean-up, which may wait for other ranks.
    os._exit(0)


def _init_rank(place: RankPlace):
    # A fork of the server has read OMP_NUM_THREADS before.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if place.backend == "nccl":
        torch.cuda.set_device(place.rank)
    store = dist.FileStore(os.path.join(place.folder, "store"), place.ranks)
    store.set_timeout(datetime.timedelta(seconds=place.limits.start))
    # The limit of collectives holds from here on: all ranks have imported their function.
    store.set(f"rank {place.rank} has started", "")
    store.wait([f"rank {rank} has started" for rank in range(place.ranks)])
    limit = _limit_of_collectives(place, place.limits.timeout)
    # torch gives a further group its default, and not the limit of the first one.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = limit
    dist.init_process_group(
        place.backend, store=store, rank=place.rank, world_size=place.ranks, timeout=limit
    )
    if place.backend == "gloo":
        # A rank that returns at once would leave while another one still connects to it.
        dist.barrier()


def _limit_of_collectives(place: RankPlace, seconds: float) -> datetime.timedelta:
    """NCCL ends the process that waits; who hangs is known before, where heartbeats tell."""
    return datetime.timedelta(seconds=seconds + SLACK * (place.backend == "nccl"))


def _stack_file(folder, rank: int) -> pathlib.Path:
    """Where a rank writes where it is, when its parent asks by SIGUSR1."""
    return pathlib.Path(folder, f"stack {rank}")


def _failure(error: BaseException) -> Failure:
    return Failure(
        time.time(),
        type(error).__name__,
        str(error),
        traceback.format_exc(),
        _is_of_collective(error) or _is_of_collective(error.__cause__),
    )


def _is_of_collective(error: BaseException | None) -> bool:
    # gloo raises a plain RuntimeError.
    of_gloo = type(error) is RuntimeError and "/gloo/" in str(error)
    return of_gloo or isinstance(error, dist.DistError)


def _send(connection, message: Message):
    """By value: multiprocessing would send a tensor as a file that has to stay open here."""
    connection.send_bytes(cloudpickle.dumps(message))


def _run_to_end(result, connection):
    """What fn returned. If that is a generator, send the Readings that it yields first."""
    if not inspect.isgenerator(result):
        return result
    while True:
        try:
            reading = next(result)
        except StopIteration as end:
            return end.value
        _send(connection, Message("reading", reading))


# ---- in the parent -------------------------------------------------------------------------------


class RankWatch:
    """Waits for all ranks. After an exception it can go on waiting."""

    def __init__(self, connections, processes, shared: SharedCounts, limits: Limits, folder):
        self.connections, self.processes = connections, processes
        self.shared, self.limits, self.folder = shared, limits, folder
        # By rank: what it returned, the Failure that ended it, when its process was gone.
        self.results: dict = {}
        self.failed: dict[int, Failure] = {}
        self.dead: dict[int, float] = {}

    def wait(self) -> list:
        """The result of each rank."""
        for _ in self.readings():
            pass
        return self.results_in_order()

    def results_in_order(self) -> list:
        """The result of each rank; None of those that have not ended."""
        return [self.results.get(rank) for rank in range(len(self.connections))]

    def readings(self):
        """Yield (rank, Reading) until all ranks have ended, and (0, None) at least every 0.1 s, so
        that the caller can stop. RankError for a rank that failed or hangs."""
        ranks = len(self.connections)
        heartbeats, changed = list(self.shared.heartbeats), time.monotonic()
        give_up_at = None
        while len(self.results) < ranks:
            yield from self._listen() or [(0, None)]
            now = time.monotonic()
            if (self.failed or self.dead) and give_up_at is None:
                give_up_at = now + GRACE
            if give_up_at is not None:
                ended = len(self.results) + len(self.failed) + len(self.dead)
                if now > give_up_at or ended == ranks:
                    raise self._error()
                continue
            newest = list(self.shared.heartbeats)
            if newest != heartbeats:
                heartbeats, changed = newest, now
            self._check_for_hang(heartbeats, now - changed)

    def _check_for_hang(self, heartbeats: list[int], waited: float):
        """By heartbeats: where GPUs wait in a CUDA graph, no call of the waiting rank returns."""
        rank = slowest_rank(heartbeats, self.results)
        if rank is None and waited > self.limits.timeout:
            # All are in the same collective, and one of them may have been stopped there.
            rank = next((r for r in self._running() if is_stopped(self.processes[r].pid)), None)
        if rank is None:
            return
        limit = self.limits.timeout if self.shared.steps[rank] else self.limits.start
        if waited > limit:
            raise self._error_of_hanging([rank], limit)

    def _running(self) -> list[int]:
        ended = self.results.keys() | self.failed.keys() | self.dead.keys()
        return [rank for rank in range(len(self.connections)) if rank not in ended]

    def _error_of_hanging(self, ranks: list[int], limit: float) -> RankError:
        """ranks: those that run, of which some may wait themselves."""
        hanging = self._outside_of_collectives(ranks)
        one = len(hanging) == 1
        error = RankError(
            f"{ranks_in_words(hanging)} hang{'s' * one}: another rank has waited for "
            f"{'it' if one else 'them'} in a collective for {limit:g} s"
            f"{self._places(hanging)}. All ranks were stopped"
        )
        if hasattr(error, "add_note"):
            for rank, stack in hanging.items():
                error.add_note("\n".join([f"on rank {rank}, the innermost call first:", *stack]))
        return error

    def _outside_of_collectives(self, ranks: list[int]) -> dict[int, list[str]]:
        """Rank -> its stack; of all `ranks` where all are in a collective."""
        stacks = {r: stack_of(self.processes[r].pid, _stack_file(self.folder, r)) for r in ranks}
        return {
            rank: stack
            for rank, stack in stacks.items()
            if not stack or "/torch/distributed/" not in stack[0]
        } or stacks

    def _places(self, stacks: dict[int, list[str]]) -> str:
        """Where ranks are: "; rank 1 is in step 4, in work (train.py, line 7)"."""
        places = ""
        for rank, stack in stacks.items():
            words = [self._step(rank)] if self._step(rank) else []
            frame = re.match(r' *File "(.*)", line (\d+) in (.*)', stack[0]) if stack else None
            if is_stopped(self.processes[rank].pid):
                words.append(" stopped, by SIGSTOP or a debugger")
            elif frame is not None:
                words.append(f" in {frame[3]} ({os.path.basename(frame[1])}, line {frame[2]})")
            places += f"; rank {rank} is{','.join(words)}" if words else ""
        return places

    def _step(self, rank: int) -> str:
        """The step in which a rank is; "" without a TrainStep."""
        if not (self.shared.heartbeats[rank] or self.shared.steps[rank]):
            return ""
        return f" in step {self.shared.steps[rank] + 1}"

    def _listen(self) -> list:
        """Receive what ranks have sent; returns their (rank, Reading)."""
        open_connections = {
            connection: rank
            for rank, connection in enumerate(self.connections)
            if rank not in self.results and rank not in self.failed and rank not in self.dead
        }
        readings = []
        for connection in multiprocessing.connection.wait(list(open_connections), timeout=0.1):
            rank = open_connections[connection]
            try:
                received = self.connections[rank].recv_bytes()
            except (EOFError, OSError):
                # The process ended without a message, or in the middle of one.
                self.dead[rank] = time.time()
                continue
            try:
                message = pickle.loads(received)
            except Exception as error:
                raise RankError(
                    f"what rank {rank} returned cannot be unpickled: {type(error).__name__}: "
                    f"{error}. All ranks were stopped"
                ) from error
            if message.kind == "reading":
                readings.append((rank, message.value))
            elif message.kind == "result":
                self.results[rank] = message.value
            else:
                self.failed[rank] = message.value
        return readings

    def _error(self) -> RankError:
        """Of the ranks that failed the one that began it: who died, else who raised first; or who
        had returned while that one waited for it."""
        if self.dead:
            return self._error_of_dead(min(self.dead, key=lambda r: self.dead[r]))
        rank = min(self.failed, key=lambda r: self.failed[r].time)
        failure = self.failed[rank]
        steps, running = self.shared.steps, self._running()
        if failure.lost_rank and running and re.search("timed? ?out", failure.message, re.I):
            first_step = self.shared.heartbeats[rank] and steps[rank] < 2
            limit = self.limits.start if first_step else self.limits.timeout
            return self._error_of_hanging(running, limit)
        returned = min(self.results, key=lambda r: steps[r], default=None)
        if returned is not None and failure.lost_rank:
            count = steps[returned]
            after = f", after {count} step{'s' * (count != 1)}," if self._step(rank) else ","
            return RankError(
                f"rank {returned} has returned{after} and rank {rank} waits for it"
                f"{self._step(rank)}. Every rank makes its TrainStep, and "
                "calls it, and collectives of its own, as often as the others: step(None) where it "
                "has no batch left. All ranks were stopped"
            )
        before = "" if returned is None else f". Rank {returned} had returned before"
        error = RankError(
            f"rank {rank} raised {failure.kind}: {failure.message}{before}. All ranks were stopped"
        )
        if hasattr(error, "add_note"):
            error.add_note(f"on rank {rank}:\n{failure.trace}")
        return error

    def _error_of_dead(self, rank: int) -> RankError:
        self.processes[rank].join(5 * GRACE)
        code = self.processes[rank].exitcode
        if code and code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
        else:
            end = f"ended with status {code}"
        places = ""
        if code == -signal.SIGABRT and self._running():
            # So NCCL ends a process whose collective is not over in time.
            places = self._places(self._outside_of_collectives(self._running()))
        return RankError(f"rank {rank} {end}{self._step(rank)}{places}. All ranks were stopped")


def stack_of(pid: int, path: pathlib.Path) -> list[str]:
    """The Python calls in which a rank is, the innermost first; [] where it does not answer."""
    if not hasattr(faulthandler, "register") or is_stopped(pid):
        return []
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR1)
        text, until = "", time.monotonic() + GRACE
        while time.monotonic() < until:
            time.sleep(0.02)
            before, text = text, path.read_text()
            if text and text == before:
                return text.splitlines()[1:]
    return []


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger. Only Linux tells."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


def slowest_rank(heartbeats: list[int], results) -> int | None:
    """The rank that others wait for; None where no rank is known to be behind.

    Args:
        heartbeats: of each rank, as SharedCounts has them.
        results: has the ranks that have returned.
    """
    running = [rank for rank in range(len(heartbeats)) if rank not in results]
    most = max((heartbeats[rank] for rank in running), default=0)
    behind = [rank for rank in running if heartbeats[rank] < most]
    return min(behind, key=lambda rank: heartbeats[rank], default=None)
