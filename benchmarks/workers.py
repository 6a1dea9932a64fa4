"""Variants of a benchmark in processes of their own: one each (Workers) or one per rank.

Most of a benchmark's time is torch.compile's. All variants compile side by side; then only one
process measures at a time, and the others wait. Each process has its own memory caches, so its
memory peaks are its own.

>>> with Workers({"torch": (Peer, 1024), "ours": (Ours, 1024)}) as workers:
...     workers.ready()                      # Peer(1024) and Ours(1024) are made
...     workers.ask("ours", "times", 5)      # what .times(5) returns

>>> with RankWorkers({"torch": (Rank, bench), "ours": (Rank, bench)}, ranks=2) as workers:
...     workers.ask("ours", "times", 5)      # [of rank 0, of rank 1]
"""

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import sys
import tempfile
import time
import traceback

import memory
import power

# How long a rank may take for an answer, and NCCL for a collective, in seconds.
TIMEOUT = 60.0
# How long the other ranks may still report after one has failed, in seconds.
GRACE = 2.0
DIED = "has died"
# In the place of a method's name: when have you measured?
SPANS = None


class WorkerError(RuntimeError):
    """A worker failed. The message names the worker, the rank and the failure."""


class Stuck(BaseException):
    """Raised by a rank whose GPU hangs. The rank reports it and ends."""


@contextlib.contextmanager
def environment(**values):
    """Environment variables for the processes that are started inside."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


# ---- one process per variant --------------------------------------------------------------------


class Workers:
    """One process per variant.

    variants: name -> (function or class, its arguments); a module must define it under its name
    here: make and run the variants in this process (for tests)
    """

    def __init__(self, variants: dict, here: bool = False):
        self._objects = None
        self._pipes = {}
        self._processes = {}
        self._ready = set()
        if here:
            self._objects = {name: make(*args) for name, (make, *args) in variants.items()}
            return
        threads = max(2, (os.cpu_count() or 2) // max(1, len(variants)))
        context = multiprocessing.get_context("spawn")
        with environment(TORCHINDUCTOR_COMPILE_THREADS=str(threads)):
            for name, (make, *args) in variants.items():
                self._pipes[name], pipe = context.Pipe()
                self._processes[name] = context.Process(target=_serve, args=(pipe, make, args))
                self._processes[name].start()
                pipe.close()

    @property
    def names(self) -> list:
        return list(self._pipes if self._objects is None else self._objects)

    def ready(self):
        """Wait until every variant is made."""
        for name in self._pipes.keys() - self._ready:
            self._answer(name)
            self._ready.add(name)

    def ask(self, name, method: str, *args):
        """The result of a variant's method. Raises WorkerError where the variant fails."""
        if self._objects is not None:
            return getattr(self._objects[name], method)(*args)
        self.ready()
        self._pipes[name].send((method, args))
        return self._answer(name)

    def timers(self, names, *args) -> dict:
        """name -> a function that returns the result of its method `times(*args)`."""
        return {name: lambda name=name: self.ask(name, "times", *args) for name in names}

    def _answer(self, name):
        try:
            error, result = self._pipes[name].recv()
        except (EOFError, ConnectionResetError):
            raise WorkerError(f"the process of {name!r} has died") from None
        if error:
            raise WorkerError(f"{name!r} failed in its process:\n{error}")
        return result

    def close(self, *names):
        """End these processes (default: all), which gives their memory back."""
        for name in names or self.names:
            if self._objects is not None:
                del self._objects[name]
            elif name in self._pipes:
                with contextlib.suppress(WorkerError, OSError):
                    power.SPANS += self.ask(name, SPANS)
                # The worker's recv() raises EOFError, and the worker ends.
                self._pipes.pop(name).close()
        for name in self._processes.keys() - self._pipes.keys():
            process = self._processes.pop(name)
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            # After an error, do not wait for those that still compile.
            for process in self._processes.values():
                process.kill()
        self.close()


def _serve(pipe, make, args):
    """A worker: make the variant, report it, then answer until the pipe is closed."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        try:
            memory.obey_limit()
            variant = make(*args)
            pipe.send((None, None))
            while True:
                method, args = pipe.recv()
                answer = power.SPANS if method is SPANS else getattr(variant, method)(*args)
                pipe.send((None, answer))
        except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
            raise
        except BaseException:
            pipe.send((traceback.format_exc(), None))


# ---- one process per rank -----------------------------------------------------------------------


class RankWorkers:
    """Named sets of rank processes; each set is a process group of its own.

    Every wait has a limit. A rank that raises alone, dies or does not answer ends its set, and the
    WorkerError names the rank; the other sets go on.

    sets: name -> (function or class, its arguments); it is called with the rank as first argument
    ranks: processes of each set, on GPU 0, 1, ...
    device: "cuda" (NCCL) or "cpu" (gloo, for tests)
    timeout: of an answer and of a collective, in seconds
    """

    def __init__(self, sets: dict, ranks: int, device: str = "cuda", timeout: float = TIMEOUT):
        self.ranks = ranks
        self.timeout = timeout
        # name -> why the set was stopped
        self.stopped = {}
        self._folder = tempfile.TemporaryDirectory()
        # name -> [(pipe, process) of each rank]
        self._sets = {}
        context = multiprocessing.get_context("spawn")
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        threads = max(1, (os.cpu_count() or 1) // (ranks * len(sets)))
        with environment(
            OMP_NUM_THREADS=str(threads),
            TORCHINDUCTOR_COMPILE_THREADS=str(max(2, threads)),
            NCCL_SOCKET_IFNAME=loopback,
            GLOO_SOCKET_IFNAME=loopback,
        ):
            for index, (name, (make, *args)) in enumerate(sets.items()):
                store = str(pathlib.Path(self._folder.name) / f"store{index}")
                self._sets[name] = []
                for rank in range(ranks):
                    pipe, remote = context.Pipe()
                    process = context.Process(
                        target=_serve_rank,
                        args=(rank, ranks, device, store, timeout, remote, make, args),
                        daemon=True,
                    )
                    process.start()
                    remote.close()
                    self._sets[name].append((pipe, process))

    @property
    def names(self) -> list:
        """Sets that have not been stopped."""
        return [name for name in self._sets if name not in self.stopped]

    def send(self, name, method: str, *args):
        """Ask every rank of a set without waiting for the answers."""
        if name in self.stopped:
            raise WorkerError(self.stopped[name])
        for pipe, _ in self._sets[name]:
            # answers() reports a rank that has died.
            with contextlib.suppress(OSError):
                pipe.send((method, args))

    def answers(self, name, timeout: float | None = None) -> list:
        """Each rank's answer to the oldest question.

        Raises WorkerError after `timeout` seconds, or when a rank raises or dies. The set is
        stopped then, unless all ranks have raised."""
        if name in self.stopped:
            raise WorkerError(self.stopped[name])
        timeout = timeout or self.timeout
        results, errors = self._collect(name, timeout)
        silent = set(range(self.ranks)) - results.keys() - errors.keys()
        if not errors and not silent:
            return [results[rank] for rank in range(self.ranks)]
        if errors:
            reports = [f"rank {rank} {error}" for rank, error in errors.items()]
        else:
            reports = [f"rank {rank} has not answered for {timeout:g} s" for rank in sorted(silent)]
        message = f"{name}: {'; '.join(reports)}"
        ended = any(error.startswith((DIED, "is stuck")) for error in errors.values())
        if silent or results or ended:
            # The ranks are not at the same collective any more.
            self.stop(name, message)
        raise WorkerError(message)

    def _collect(self, name, timeout: float) -> tuple[dict, dict]:
        """(rank -> answer, rank -> error) of the ranks that report in time."""
        results, errors = {}, {}
        waiting = {pipe: rank for rank, (pipe, _) in enumerate(self._sets[name])}
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            for pipe in multiprocessing.connection.wait(list(waiting), 0.05):
                rank = waiting.pop(pipe)
                try:
                    error, result = pipe.recv()
                except (EOFError, OSError):
                    error, result = DIED, None
                if not error:
                    results[rank] = result
                    continue
                if not errors:
                    deadline = min(deadline, time.monotonic() + GRACE)
                errors[rank] = error
        return results, errors

    def ask(self, name, method: str, *args, timeout: float | None = None) -> list:
        """The results of every rank's method."""
        self.send(name, method, *args)
        return self.answers(name, timeout)

    def stop(self, name, reason: str = "it was closed"):
        """Kill a set's processes, which gives their memory back.

        They are not asked to end: a rank may wait for one that is gone."""
        self.stopped.setdefault(name, reason)
        for _, process in self._sets[name]:
            process.kill()
        for pipe, process in self._sets[name]:
            process.join()
            pipe.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in self.names:
            self.stop(name)
        self._folder.cleanup()


def _serve_rank(rank, ranks, device, store, timeout, pipe, make, args):
    """A rank: join the process group, make the object, then answer until the pipe is closed."""
    # Not at the top: Workers do not need torch, and importing it takes seconds.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        made = None
        while True:
            method, values = pipe.recv()
            try:
                if made is None:
                    if device == "cuda":
                        torch.cuda.set_device(rank)
                        memory.obey_limit()
                    dist.init_process_group(
                        "nccl" if device == "cuda" else "gloo",
                        init_method=f"file://{store}",
                        rank=rank,
                        world_size=ranks,
                        timeout=datetime.timedelta(seconds=timeout),
                    )
                    made = make(rank, *args)
                answer = None, getattr(made, method)(*values)
            except Exception:
                answer = f"raised\n{traceback.format_exc()}", None
            except Stuck as error:
                pipe.send((f"is stuck: {error}", None))
                break
            pipe.send(answer)
    os._exit(0)
