"""Crews of a benchmark: sets of rank processes, each of which meets in a group of its own and does what it is asked, together.

    >>> with Crews({"torch": (Rank, bench), "ours": (Rank, bench)}, ranks=2) as crews:     # Rank(rank, bench) in 2 x 2 processes
    ...     crews.ask("ours", "times", 5)                                                   # [result of rank 0, result of rank 1]

All crews start, and may compile, side by side; only one of them works at a time from then on. Every wait has a limit: a rank that raises alone, dies
or does not answer ends its crew, and the CrewError names it; the other crews go on.
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

import torch
import torch.distributed as dist

SECONDS = 60.0  # that a rank may take for an answer, and NCCL for a collective
DIED = "has died"
GRACE = 2.0  # seconds in which other ranks may still say what they saw


class CrewError(RuntimeError):
    """A crew was stopped: the rank, and what it did."""


class Stuck(BaseException):
    """Raised by a rank whose GPU hangs: it says so, and ends."""


class Crews:
    """name -> (function or class, its arguments), to be found by name in a module; it is called with the rank in front of them.

    ranks: processes of each crew, on GPU 0, 1, ...; device: "cuda" (NCCL) or "cpu" (gloo, for tests)."""

    def __init__(self, crews: dict, ranks: int, device: str = "cuda", seconds: float = SECONDS):
        self.ranks, self.seconds, self.stopped = ranks, seconds, {}
        self._folder, self._crews = tempfile.TemporaryDirectory(), {}
        context, loopback = (
            multiprocessing.get_context("spawn"),
            "lo0" if sys.platform == "darwin" else "lo",
        )
        threads = str(max(1, (os.cpu_count() or 1) // (ranks * len(crews))))
        new = {
            "OMP_NUM_THREADS": threads,
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(2, int(threads))),
            "NCCL_SOCKET_IFNAME": loopback,
            "GLOO_SOCKET_IFNAME": loopback,
        }
        before = {key: os.environ.get(key) for key in new}
        os.environ.update(new)
        try:
            for nth, (name, (make, *args)) in enumerate(crews.items()):
                store, self._crews[name] = str(pathlib.Path(self._folder.name) / f"store{nth}"), []
                for rank in range(ranks):
                    mine, theirs = context.Pipe()
                    process = context.Process(
                        target=_serve,
                        args=(rank, ranks, device, store, seconds, theirs, make, args),
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    self._crews[name].append((mine, process))
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})

    @property
    def names(self) -> list:
        """Crews that have not been stopped."""
        return [name for name in self._crews if name not in self.stopped]

    def send(self, name, method: str, *args):
        """Ask without waiting for the answers."""
        if name in self.stopped:
            raise CrewError(self.stopped[name])
        for line, _ in self._crews[name]:
            with contextlib.suppress(OSError):  # it has died: answers() says so
                line.send((method, args))

    def answers(self, name, seconds: "float | None" = None) -> list:
        """Each rank's answer to the oldest question. CrewError after `seconds`, or when a rank raises or dies; the crew is gone then,
        unless all ranks have raised."""
        if name in self.stopped:
            raise CrewError(self.stopped[name])
        seconds, found, wrong = seconds or self.seconds, {}, {}
        lines = {line: rank for rank, (line, _) in enumerate(self._crews[name])}
        until = time.monotonic() + seconds
        while len(found) + len(wrong) < len(lines) and time.monotonic() < until:
            for line in multiprocessing.connection.wait(
                [line for line, rank in lines.items() if rank not in found and rank not in wrong],
                0.05,
            ):
                try:
                    error, found[lines[line]] = line.recv()
                except (EOFError, OSError):
                    error = DIED
                if error:
                    found.pop(lines[line], None)
                    until = until if wrong else min(until, time.monotonic() + GRACE)
                    wrong[lines[line]] = error
        silent = [rank for rank in range(len(lines)) if rank not in found and rank not in wrong]
        if wrong or silent:
            said = [f"rank {rank} {error}" for rank, error in wrong.items()] or [
                f"rank {rank} has not answered for {seconds:g} s" for rank in silent
            ]
            why = f"{name}: {'; '.join(said)}"
            if (
                silent
                or found
                or any(error.startswith((DIED, "is stuck")) for error in wrong.values())
            ):
                self.stop(name, why)  # the ranks are not in the same place any more
            raise CrewError(why)
        return [found[rank] for rank in range(len(lines))]

    def ask(self, name, method: str, *args, seconds: "float | None" = None) -> list:
        self.send(name, method, *args)
        return self.answers(name, seconds)

    def stop(self, name, why: str = "it was closed"):
        """End a crew's processes, which gives their memory back. No goodbyes: a rank may wait for one that is gone."""
        self.stopped.setdefault(name, why)
        for _, process in self._crews[name]:
            process.kill()
        for line, process in self._crews[name]:
            process.join()
            line.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for name in self.names:
            self.stop(name)
        self._folder.cleanup()


def _serve(rank, ranks, device, store, seconds, line, make, args):
    """A rank's life: meet the others, make the object, then do what it is asked for."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        thing = None
        while True:
            method, given = line.recv()
            try:
                if thing is None:
                    if device == "cuda":
                        torch.cuda.set_device(rank)
                    dist.init_process_group(
                        "nccl" if device == "cuda" else "gloo",
                        init_method=f"file://{store}",
                        rank=rank,
                        world_size=ranks,
                        timeout=datetime.timedelta(seconds=seconds),
                    )
                    thing = make(rank, *args)
                answer = None, getattr(thing, method)(*given)
            except Exception:
                answer = f"raised\n{traceback.format_exc()}", None
            except Stuck as error:
                line.send((f"is stuck: {error}", None))
                break
            line.send(answer)
    os._exit(0)
