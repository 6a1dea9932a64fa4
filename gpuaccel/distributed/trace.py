"""When a rank computed and when its buckets were on their way: a trace of one step.

    spans = trace.watch(step, batch)          # on every rank; step(batch), and what it did when
    spans[:2]
    # [Span(lane='computes', name='forward', start=0.0, stop=8412.5),
     # Span(lane='computes', name='backward', start=8412.5, stop=25016.1)]

Times are the host's clock on CPUs and CUDA events on GPUs. There is no profiler, so that the step
takes as long as it does.
"""

import threading
import time

import torch

from ..errors import ArgumentError
from ..measure import Span


class StepTrace:
    """What a TrainStep (`start`, `mark` and `stop`, as of a StageTimer) and its reducer do when.

    The step calls it while `step.reducer.trace` is one."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        self.events: list[tuple] = []  # (lane, name, begin, end)
        self.buckets_finished = 0
        self._bucket_began: dict = {}
        self._lock = threading.Lock()  # gloo's threads call bucket_finished()

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    # ---- called by the step ----

    def start(self):
        self._began = self._stage_began = self._now()

    def mark(self, name: str):
        """A stage ends here; it began where the one before ended."""
        now = self._now()
        self.events.append(("computes", name, self._stage_began, now))
        self._stage_began = now

    def stop(self):
        pass

    # ---- called by the reducer ----

    def bucket_started(self, number: int):
        """The current stream is about to reduce this bucket."""
        self._bucket_began[number] = self._now()

    def bucket_finished(self, number: int):
        """The current stream has reduced it."""
        end = self._now()
        with self._lock:
            self.events.append(("sends", f"bucket {number}", self._bucket_began[number], end))
            self.buckets_finished += 1

    def wait_started(self):
        """Backward is over, and all buckets are on their way."""
        self._wait_began = self._now()

    def wait_finished(self):
        """The sums are there. On a GPU the host has not waited."""
        if not self.cuda:
            self.events.append(("computes", "wait", self._wait_began, self._now()))

    # ---- the result ----

    def spans(self) -> list[Span]:
        """Times in microseconds since start(), in order. Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

        def microseconds(moment):
            if self.cuda:
                return round(1e3 * self._began.elapsed_time(moment), 1)
            return round(1e6 * (moment - self._began), 1)

        spans = [
            Span(lane, name, microseconds(begin), microseconds(end))
            for lane, name, begin, end in self.events
        ]
        return sorted(spans, key=lambda span: (span.start, -span.stop))


def watch(step, batch) -> list[Span]:
    """Take a step of several ranks and trace what this rank did. To be called on every rank.

    Lane "computes": forward and backward of each micro-batch, "accumulate", in it "wait" for the
    sums (on CPUs only), "optimizer". Lane "sends": "bucket 0", ... from its start until its sum was
    there. Waits for the device once, at the end.

    Raises:
        ArgumentError: for a step that does not send buckets, or replays a graph.
    """
    reducer = step.reducer
    if reducer is None or reducer.config.ordered or step.replays == "graph":
        raise ArgumentError(
            "expected a TrainStep with replay='eager' and distributed=ga.Distributed() of two "
            "ranks or more, not in ordered mode"
        )
    reducer.trace = trace = StepTrace(step.arena.device)
    try:
        step(batch)
    finally:
        reducer.trace = None
    # gloo's thread may call bucket_finished() a moment after the step has seen the sum.
    until = time.monotonic() + 10
    while trace.buckets_finished < len(reducer.buckets) and time.monotonic() < until:
        time.sleep(1e-3)
    return trace.spans()


def sent_early(spans: list[Span]) -> int:
    """How many buckets were on their way before the rank's last backward was over.

    Args:
        spans: of one rank.
    """
    backward_over = max(s.stop for s in spans if s.name == "backward")
    return sum(s.lane == "sends" and s.start < backward_over for s in spans)
