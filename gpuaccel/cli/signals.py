"""Ctrl-C (SIGINT) and SIGTERM: both stop a command, and training waits for its step.

The exit status is 128 and the signal's number, as shells have it: 130 and 143."""

import os
import signal

INTERRUPTED = 128 + signal.SIGINT


class StopSignals:
    """Inside the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does.

    A signal that is ignored (under nohup, in a script's background) stays ignored. In a thread
    other than the main one nothing changes.

    launched: whether this is a rank that --nproc has started. In one that another launcher has
        started SIGTERM ends the process at once: such a launcher sends it when a rank is lost, and
        the others may wait for that one without end.

    status: the exit status that belongs to the latest signal."""

    def __init__(self, launched: bool = False):
        self.status = INTERRUPTED
        self.previous: dict = {}
        self.numbers = [signal.SIGINT]
        if launched or "RANK" not in os.environ:
            self.numbers.append(signal.SIGTERM)

    def __enter__(self):
        for number in self.numbers:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_IGN, None):
                continue
            try:
                signal.signal(number, self._on_signal)
            except ValueError:
                # Only the main thread may set a handler.
                break
            self.previous[number] = handler
        return self

    def _on_signal(self, number, _):
        self.status = 128 + number
        self.handle()

    def handle(self):
        raise KeyboardInterrupt

    def restore(self):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def __exit__(self, *_):
        self.restore()


class StopAfterStep(StopSignals):
    """Inside the block, Ctrl-C or SIGTERM sets `.requested` and lets the running step finish; a
    second one does what it did before the block."""

    requested = False

    def handle(self):
        self.requested = True
        self.restore()
