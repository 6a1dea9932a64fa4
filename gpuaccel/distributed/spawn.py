"""Ranks from a notebook or a script: processes of this machine that run one function, watched until
they end.

    ga.launch(work, 2)                  # work() in two processes; returns [result, result]
    ga.launch(work, 2, ("tiny",), timeout=10)
    for loss in ga.launch(train, 2): ...    # train yields: what rank 0 yields, as it trains

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

import cloudpickle
import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _set_pg_timeout

from ..errors import ArgumentError, RankError, check_choice
from ..forkserver import LAUNCHED_BY
from . import heartbeat
from .heartbeat import SLACK, ranks_in_words, timed_out
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
NOT_PICKLABLE = (pickle.PicklingError, AttributeError, TypeError, ValueError)


def launch(
    fn: Callable[..., Any],
    ranks: int = 2,
    args: tuple = (),
    *,
    backend: RankBackend | None = None,
    timeout: float = 60.0,
    start: float = 60.0,
    after_step: bool = False,
) -> Any:
    """Run `fn(*args)` in new processes, each of which is a rank, and wait for all.

    Each process has torchrun's RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, and the process
    group of torch.distributed is there when fn is called. accelerate takes it over.

    Args:
        fn: a function, picklable, or one of a notebook. That is handed over by value with what it
            refers to (cloudpickle). With a generator function launch returns a generator: its
            first `next` starts the ranks, it yields what rank 0 yields, and returns the list.
        ranks: how many processes, 1 or more. Default: 2.
        args: picklable, as what fn returns. Tensors are sent by value.
        backend: "nccl" (a GPU for each rank) or "gloo" (on CPUs: in these processes the GPU policy
            is off). Default: nccl where there are GPUs enough.
        timeout: seconds that a rank may wait for another one in a collective of any group; then the
            other one counts as hanging. While no rank waits, ranks may compute as long as they
            like. A group of your own takes the `timeout=` of torch.distributed.new_group, if you
            give one. Default: 60.
        start: the timeout in seconds while processes start, and until a rank's first TrainStep has
            taken a step, as models are built and kernels compiled. Default: 60.
        after_step: at the first Ctrl-C all ranks are asked to stop after the same step; fn has to
            test step.reducer.asked_to_stop() (reducer is None for one rank). At the second, or
            without after_step at the first, they are stopped.

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
    if os.name == "nt":
        raise ArgumentError("ga.launch needs Linux or macOS; on Windows expected WSL")
    for name, seconds in (("timeout", timeout), ("start", start)):
        if not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            raise ArgumentError(f"{name} is {seconds!r}; expected seconds, more than 0")
    backend = _checked_backend(ranks, args, backend)
    script, work = _packed(fn, args)
    results = _results(script, work, ranks, backend, timeout, start, after_step)
    return results if inspect.isgeneratorfunction(fn) else _exhaust(results)


def _exhaust(generator, each=lambda value: None):
    """Call each() with what it yields, and return what it returns."""
    while True:
        try:
            each(next(generator))
        except StopIteration as end:
            return end.value


def _results(script, work, ranks, backend, timeout, start, after_step):
    """Start the ranks; a generator of what rank 0 yields, which returns what each rank returned."""
    context = _start_method()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            script=script,
            work=work,
            ranks=ranks,
            backend=backend,
            folder=folder,
            timeout=timeout,
            start=max(start, timeout),
            variables=dict(os.environ),
            steps=context.RawArray("q", ranks),
            heartbeats=context.RawArray("q", ranks),
            last_step=context.RawValue("q", 0),
        )
        watch = RankWatch(job)
        try:
            for rank in range(ranks):
                receiving, sending = context.Pipe(duplex=False)
                # No daemon: a rank may have processes of its own, as a DataLoader's.
                process = context.Process(target=_run_rank, args=(job, rank, sending))
                # Before Ctrl-C may end the block.
                watch.processes.append(process)
                watch.connections.append(receiving)
                with _sigint_blocked(), _main_hidden():
                    process.start()
                sending.close()
            try:
                return (yield from watch.wait())
            except KeyboardInterrupt:
                if not after_step:
                    raise
                # A step that no rank has begun.
                job.last_step.value = max(job.steps) + AHEAD + 1
                return (yield from watch.wait())
        finally:
            running = [process for process in watch.processes if process.is_alive()]
            for process in running:
                process.kill()
            for process in running:
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


def _packed(fn, args) -> tuple[dict, bytes]:
    """(what multiprocessing needs to import the script, the function and its arguments).

    Pickled here: multiprocessing would let all processes share the memory of a tensor. A function
    of a script is imported by its name; one of a notebook, whose __main__ has no file, goes by
    value."""
    if os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or ""):
        script = multiprocessing.spawn.get_preparation_data("rank")
        script = {key: value for key, value in script.items() if key.startswith("init_main")}
        with contextlib.suppress(*NOT_PICKLABLE):
            return script, pickle.dumps((fn, args))
    try:
        return {}, cloudpickle.dumps((fn, args))
    except NOT_PICKLABLE as error:
        raise ArgumentError(
            f"{getattr(fn, '__name__', fn)} or its args cannot be handed to new processes: {error};"
            " expected a function that uses no open files, locks or live views of this process, or "
            "one from a file (%%writefile)"
        ) from error


def _start_method():
    """multiprocessing's context.

    On Linux ranks are forks of a server process, which has imported torch and gpuaccel before, has
    no threads, and has not touched a GPU: a launch then takes a tenth of a second, where imports
    take several."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ[LAUNCHED_BY] = str(os.getpid())
    try:
        with _sigint_blocked():
            multiprocessing.forkserver.ensure_running()
    except OSError:
        # The server listens on a socket in the temporary folder, whose path may be too long.
        return multiprocessing.get_context("spawn")
    finally:
        del os.environ[LAUNCHED_BY]
    return context


@contextlib.contextmanager
def _main_hidden():
    """A process that is started in the block does not import the script before _run_rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _sigint_blocked():
    """A process that is started in the block gets no SIGINT while it imports torch.

    Ctrl-C in a terminal reaches every process of it. Here it is delivered after the block.
    """
    # multiprocessing starts it before the first process, and then unblocks SIGINT.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class Job:
    """A launch, as the parent and all ranks know it."""

    script: dict  # where __main__ is, as multiprocessing describes it; {}: nothing to import
    work: bytes  # the function and its arguments
    ranks: int
    backend: str
    folder: str  # of the file over which the ranks meet, and of their stacks
    timeout: float  # seconds that a rank may wait for another one
    start: float  # the same until the first step is over; not less
    variables: dict  # the parent's environment
    # Memory that all processes share.
    steps: Any  # of each rank: steps whose backward is over
    heartbeats: Any  # of each rank: how often it has reached a collective of all ranks' step
    last_step: Any  # the step, from 1, after which all ranks are asked to stop; 0: none

    def limit(self, rank: int) -> float:
        """Seconds that the others may wait for a rank."""
        return self.timeout if self.steps[rank] else self.start

    def limit_of_collectives(self, seconds: float) -> datetime.timedelta:
        """NCCL ends the process that waits; who hangs is known before, where heartbeats tell."""
        return datetime.timedelta(seconds=seconds + SLACK * (self.backend == "nccl"))

    def stack_file(self, rank: int) -> pathlib.Path:
        """Where a rank writes where it is, when its parent asks by SIGUSR1."""
        return pathlib.Path(self.folder, f"stack {rank}")


# ---- in the processes ----------------------------------------------------------------------------


class LaunchedRank:
    """What heartbeat.py calls in a process of ga.launch."""

    def __init__(self, job: Job, rank: int):
        self.job, self.rank = job, rank
        # Of each group of a TrainStep: how long its collectives may wait.
        self.seconds: dict[dist.ProcessGroup | None, float] = {}

    def heartbeat(self, steps: int, group: dist.ProcessGroup | None):
        # The others' first backward is over when this rank's first step is.
        seconds = self.job.limit(self.rank)
        if self.seconds.get(group, self.job.timeout) != seconds:
            _set_pg_timeout(self.job.limit_of_collectives(seconds), group)
        self.seconds[group] = seconds
        self.job.steps[self.rank] += steps
        if group in (None, dist.group.WORLD):
            self.job.heartbeats[self.rank] += 1

    def asked_to_stop(self) -> bool:
        """Whether all ranks are to stop after the step that this one has taken last."""
        return 0 < self.job.last_step.value <= self.job.steps[self.rank]


@dataclass
class Failure:
    """The exception that ended a rank."""

    time: float
    kind: str
    message: str
    trace: str
    lost_rank: bool  # a collective failed: another rank has ended


def _environment(job: Job, rank: int) -> dict[str, str]:
    """The parent's, with torchrun's variables."""
    new = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
    }
    if job.backend == "gloo":
        new |= {"GPUACCEL_GPU": "off", "GLOO_SOCKET_IFNAME": loopback()}
    else:
        new |= {"NCCL_SOCKET_IFNAME": loopback()}
    # As torchrun; so the sums of one rank and of several have the same order.
    return {"OMP_NUM_THREADS": "1", **job.variables, **new}


def _end_with_parent(started_by: int):
    """End this process as soon as the one that called ga.launch has ended. For a thread.

    started_by: the process that has started this one: the parent, or its server, which ends with
    it. The pipe that tells of the parent's end may have been inherited by another process, which
    keeps it open. The folder stays where the parent was killed: where it is missing, torch's
    FileStore retries for five minutes, in which no other thread of a rank runs."""
    parent: Any = multiprocessing.parent_process()
    while parent.is_alive() and os.getppid() == started_by:
        time.sleep(PARENT_CHECK)
    os._exit(1)


def _run_rank(job: Job, rank: int, connection):
    """The whole life of a rank."""
    # Ctrl-C is the parent's business. The server has ignored SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # A fork of the server has the environment in which that was started.
    os.environ.clear()
    os.environ.update(_environment(job, rank))
    with open(job.stack_file(rank), "w") as stack:
        # Asked for by the parent. It works in C code, too, whoever has the interpreter's lock.
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        try:
            _import_script(job.script)
            _init_rank(job, rank)
            heartbeat.launched_rank = LaunchedRank(job, rank)
            fn, args = pickle.loads(job.work)
            result = fn(*args)
            if inspect.isgeneratorfunction(fn):

                def send(value):
                    if rank == 0:
                        connection.send_bytes(cloudpickle.dumps(("yielded", value)))

                result = _exhaust(result, send)
            try:
                # Multiprocessing would send a tensor as a file that has to stay open here.
                message = cloudpickle.dumps(("returned", result))
            except NOT_PICKLABLE as error:
                raise ArgumentError(
                    f"what the function returned cannot be sent back: {error}; expected something "
                    "that can be pickled"
                ) from error
        # The parent reports it, and stops all ranks.
        except BaseException as error:
            lost = _is_of_collective(error) or _is_of_collective(error.__cause__)
            words = type(error).__name__, str(error), traceback.format_exc()
            message = pickle.dumps(("raised", Failure(time.time(), *words, lost)))
        connection.send_bytes(message)
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.terminate()
    # Without torch's own clean-up, which may wait for other ranks.
    os._exit(0)


def _import_script(script: dict):
    """As multiprocessing imports it in a new process."""
    global importing_script
    importing_script = True
    multiprocessing.spawn.prepare(script)
    importing_script = False


def _init_rank(job: Job, rank: int):
    # A fork of the server has read OMP_NUM_THREADS before.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if job.backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(job.folder, "store"), job.ranks)
    store.set_timeout(datetime.timedelta(seconds=job.start))
    # The limit of collectives holds from here on: all ranks have imported their function.
    store.set(f"rank {rank} has started", "")
    store.wait([f"rank {rank} has started" for rank in range(job.ranks)])
    limit = job.limit_of_collectives(job.timeout)
    # torch gives a further group its default, and not the limit of the first one.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = limit
    dist.init_process_group(
        job.backend, store=store, rank=rank, world_size=job.ranks, timeout=limit
    )
    if job.backend == "gloo":
        # A rank that returns at once would leave while another one still connects to it.
        dist.barrier()


def _is_of_collective(error: BaseException | None) -> bool:
    # gloo raises a plain RuntimeError.
    of_gloo = type(error) is RuntimeError and "/gloo/" in str(error)
    return of_gloo or isinstance(error, dist.DistError)


# ---- in the parent -------------------------------------------------------------------------------


class RankWatch:
    """Waits for all ranks. After an exception it can go on waiting."""

    def __init__(self, job: Job):
        self.job = job
        self.connections: list = []
        self.processes: list = []
        self.yielded: list = []
        # By rank: what it returned, the Failure that ended it, when its process was gone.
        self.results: dict = {}
        self.failed: dict[int, Failure] = {}
        self.dead: dict[int, float] = {}

    def wait(self):
        """A generator of what rank 0 yields; returns the result of each rank. RankError for a rank
        that failed or hangs."""
        ranks = self.job.ranks
        heartbeats, changed = list(self.job.heartbeats), time.monotonic()
        give_up_at = None
        while len(self.results) < ranks:
            self._listen()
            while self.yielded:
                yield self.yielded.pop(0)
            now = time.monotonic()
            if (self.failed or self.dead) and give_up_at is None:
                give_up_at = now + GRACE
            if give_up_at is not None:
                if now > give_up_at or not self._running():
                    raise self._error()
                continue
            newest = list(self.job.heartbeats)
            if newest != heartbeats:
                heartbeats, changed = newest, now
            self._check_for_hang(heartbeats, now - changed)
        return [self.results[rank] for rank in range(ranks)]

    def _check_for_hang(self, heartbeats: list[int], waited: float):
        """By heartbeats: where GPUs wait in a CUDA graph, no call of the waiting rank returns."""
        running = self._running()
        # The rank that others wait for.
        rank = min(running, key=lambda r: heartbeats[r], default=None)
        if rank is not None and heartbeats[rank] == max(heartbeats[r] for r in running):
            rank = None
            if waited > self.job.timeout:
                # All are in the same collective, and one of them may have been stopped there.
                rank = next((r for r in running if is_stopped(self.processes[r].pid)), None)
        if rank is not None and waited > self.job.limit(rank):
            raise self._error_of_hanging([rank], self.job.limit(rank))

    def _running(self) -> list[int]:
        ended = self.results.keys() | self.failed.keys() | self.dead.keys()
        return [rank for rank in range(self.job.ranks) if rank not in ended]

    def _error_of_hanging(self, ranks: list[int], limit: float) -> RankError:
        """ranks: those that run, of which some may wait themselves."""
        hanging = self._outside_of_collectives(ranks)
        one = len(hanging) == 1
        error = RankError(
            f"{ranks_in_words(hanging)} hang{'s' * one}: another rank has waited for "
            f"{'it' if one else 'them'} in a collective for {limit:g} s"
            f"{self._places(hanging)}. All ranks were stopped"
        )
        for rank, stack in hanging.items():
            error.add_note("\n".join([f"on rank {rank}, the innermost call first:", *stack]))
        return error

    def _outside_of_collectives(self, ranks: list[int]) -> dict[int, list[str]]:
        """Rank -> its stack; of all `ranks` where all are in a collective."""
        stacks = {r: stack_of(self.processes[r].pid, self.job.stack_file(r)) for r in ranks}
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
        if not (self.job.heartbeats[rank] or self.job.steps[rank]):
            return ""
        return f" in step {self.job.steps[rank] + 1}"

    def _listen(self):
        """Receive what ranks have sent."""
        open_connections = {self.connections[rank]: rank for rank in self._running()}
        for connection in multiprocessing.connection.wait(list(open_connections), timeout=0.1):
            rank = open_connections[connection]
            try:
                received = self.connections[rank].recv_bytes()
            except (EOFError, OSError):
                # The process ended without a message, or in the middle of one.
                self.dead[rank] = time.time()
                continue
            try:
                what, value = pickle.loads(received)
            except Exception as error:
                raise RankError(
                    f"what rank {rank} returned cannot be unpickled: {type(error).__name__}: "
                    f"{error}. All ranks were stopped"
                ) from error
            if what == "raised":
                self.failed[rank] = value
            elif what == "yielded":
                self.yielded.append(value)
            else:
                self.results[rank] = value

    def _error(self) -> RankError:
        """Of the ranks that failed the one that began it: who died, else who raised first; or who
        had returned while that one waited for it."""
        if self.dead:
            return self._error_of_dead(min(self.dead, key=lambda r: self.dead[r]))
        rank = min(self.failed, key=lambda r: self.failed[r].time)
        failure = self.failed[rank]
        steps, running = self.job.steps, self._running()
        if failure.lost_rank and running and timed_out(failure.message):
            first_step = self.job.heartbeats[rank] and steps[rank] < 2
            limit = self.job.start if first_step else self.job.timeout
            return self._error_of_hanging(running, limit)
        returned = min(self.results, key=lambda r: steps[r], default=None)
        if returned is not None and failure.lost_rank:
            # The rank's own words: its count of steps is ahead behind a backward.
            step = re.search(r" in step \d+", failure.message)
            count = steps[returned]
            after = f", after {count} step{'s' * (count != 1)}," if step else ","
            return RankError(
                f"rank {returned} has returned{after} and rank {rank} waits for it"
                f"{step[0] if step else ''}. Every rank makes its TrainStep, and "
                "calls it, and collectives of its own, as often as the others: step(None) where it "
                "has no batch left. All ranks were stopped"
            )
        before = "" if returned is None else f". Rank {returned} had returned before"
        error = RankError(
            f"rank {rank} raised {failure.kind}: {failure.message}{before}. All ranks were stopped"
        )
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
    if is_stopped(pid):
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
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
