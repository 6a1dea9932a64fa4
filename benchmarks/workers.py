"""Variants of a benchmark, each in a process of its own: made side by side, because most of a benchmark's time is torch.compile's, measured one at a time.

    >>> with Workers({"torch": (Peer, 1024), "ours": (Ours, 1024)}) as workers:     # Peer(1024) and Ours(1024), each in its process
    ...     workers.ready()                                                         # all of them are made; nothing was measured
    ...     times = in_turns({name: lambda name=name: workers.ask(name, "times", 5) for name in workers.names})

Only one process works at a time from then on, the others wait for their turn; each has its own caches of memory, so that peaks are its own.
"""

import contextlib
import multiprocessing
import os
import statistics
import traceback

import torch


def queued(run, calls: int) -> "list[float]":
    """Milliseconds of each of some runs that are queued one behind the other, as in a training loop. One more before them gets going."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    run()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def in_turns(takers: dict, rounds: int = 4) -> "dict[str, float]":
    """Median of the times that each taker returns, in turns (a, b, c, a, b, c, ...), so that drift of the clock meets all alike."""
    times = {name: [] for name in takers}
    for _ in range(rounds):
        for name, take in takers.items():
            times[name] += take()
    return {name: statistics.median(some) for name, some in times.items()}


class Workers:
    """name -> (function or class, its arguments), all of which must be found by name in a module. here: in this process (for tests)."""

    def __init__(self, variants: dict, here: bool = False):
        self._here = (
            {name: make(*args) for name, (make, *args) in variants.items()} if here else None
        )
        self._pipes, self._processes, self._ready = {}, {}, set()
        context, before = (
            multiprocessing.get_context("spawn"),
            os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"),
        )
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(
            max(2, (os.cpu_count() or 2) // max(1, len(variants)))
        )
        try:
            for name, (make, *args) in variants.items() if not here else ():
                self._pipes[name], theirs = context.Pipe()
                self._processes[name] = context.Process(target=_serve, args=(theirs, make, args))
                self._processes[name].start()
                theirs.close()
        finally:
            del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
            if before is not None:
                os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = before

    @property
    def names(self) -> list:
        return list(self._pipes if self._here is None else self._here)

    def ready(self):
        """Wait until every variant is made."""
        for name in self._pipes.keys() - self._ready:
            self._answer(name)
            self._ready.add(name)

    def ask(self, name, method: str, *args):
        """The result of a variant's method."""
        if self._here is not None:
            return getattr(self._here[name], method)(*args)
        self.ready()
        self._pipes[name].send((method, args))
        return self._answer(name)

    def _answer(self, name):
        try:
            error, result = self._pipes[name].recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"the process of {name!r} has died") from None
        if error:
            raise RuntimeError(f"{name!r} failed in its process:\n{error}")
        return result

    def close(self, *names):
        """End these processes (default: all), which gives their memory back."""
        for name in names or self.names:
            if self._here is not None:
                del self._here[name]
            elif name in self._pipes:
                self._pipes.pop(name).close()  # its recv() ends, and it with it
        for name in [name for name in self._processes if name not in self._pipes]:
            process = self._processes.pop(name)
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if error[0] is not None:
            for process in self._processes.values():  # one may be compiling still
                process.kill()
        self.close()


def _serve(pipe, make, args):
    """A worker's life: make the variant, say so, then do what is asked for until nobody asks any more."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        try:
            thing = make(*args)
            pipe.send((None, None))
            while True:
                method, args = pipe.recv()
                pipe.send((None, getattr(thing, method)(*args)))
        except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
            raise
        except BaseException:
            pipe.send((traceback.format_exc(), None))
