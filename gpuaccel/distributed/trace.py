"""When a rank computed and when its buckets were on their way: one step of several ranks, watched.

    >>> spans = exchange.watch(step, batch)          # on every rank; step(batch), and what this rank did when
    >>> spans[:2]
    [Span(lane='computes', name='forward', start=0.0, stop=8412.5), Span(lane='computes', name='backward', start=8412.5, stop=25016.1)]
    >>> rank_figures.overlap({"buckets": [spans, spans_of_rank_1]})          # drawn

On CPUs the host's clock tells, on GPUs CUDA events do; no profiler, so that the step takes as long as it does.
"""

import threading
import time
from itertools import count

import torch

from ..errors import ArgumentError
from ..measure import Span


class _Notes:
    """Stands in for a step's meter and its timer, and notes when each part began and ended: events on a GPU, else the host's clock."""

    def __init__(self, device):
        self.timer, self.device, self.noted, self.open = self, device, [], None
        self.lock = threading.Lock()  # gloo's own threads say when a sum has come

    def now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def note(self, lane, name, begin):
        end = self.now()
        with self.lock:
            self.noted.append((lane, name, begin, end))

    def start(self):
        self.zero = self.open = self.now()

    def mark(self, name):
        now = self.now()
        self.noted.append(("computes", name, self.open, now))
        self.open = now

    def stop(self):
        pass

    def spans(self) -> "list[Span]":
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)

        def at(moment):
            return round(
                1e3 * self.zero.elapsed_time(moment) if cuda else 1e6 * (moment - self.zero), 1
            )

        return sorted(
            (Span(lane, name, at(a), at(b)) for lane, name, a, b in self.noted),
            key=lambda s: (s.start, -s.stop),
        )


def watch(step, batch) -> "list[Span]":
    """step(batch), an eager TrainStep with a ga.Distributed of several ranks, and what this rank did when. To be called on every rank.

    Lane "computes": forward and backward of each micro-batch, "wait" for the sums (inside of "accumulate", on CPUs only), "optimizer".
    Lane "sends": "bucket 0", ... from its sending until its sum had come. On a GPU from CUDA events, and it waits for the device once at the end."""
    ranks = step.reducer
    if ranks is None or ranks.how.ordered or step.replays == "graph":
        raise ArgumentError(
            "expected a TrainStep with replay='eager' and distributed=ga.Distributed() of two ranks or more, not in ordered mode"
        )
    notes, usual = _Notes(step.arena.device), step.meter
    summed, carried, number = ranks._sum, ranks.p2p and ranks.p2p.send, count()

    def send(bucket, sent, later):
        name, begin = f"bucket {next(number)}", notes.now()
        works, copies = summed(bucket, sent, later)
        if later:
            works[-1].get_future().add_done_callback(lambda _: notes.note("sends", name, begin))
        else:
            notes.note("sends", name, begin)
        return works, copies

    def carry(bucket):
        name, begin = f"bucket {next(number)}", notes.now()
        carried(bucket)
        with torch.cuda.stream(ranks.p2p.last):
            notes.note("sends", name, begin)

    def waiting(usual):
        def wait(*given):
            begin = notes.now()
            found = usual(*given)
            if notes.device.type != "cuda":
                notes.note("computes", "wait", begin)
            return found

        return wait

    step.meter, ranks._sum, ranks._exchange, ranks._join = (
        notes,
        send,
        waiting(ranks._exchange),
        waiting(ranks._join),
    )
    if ranks.p2p:
        ranks.p2p.send = carry
    try:
        step(batch)
    finally:
        step.meter = usual
        if ranks.p2p:
            del ranks.p2p.send
        del ranks._sum, ranks._exchange, ranks._join
    until = (
        time.monotonic() + 10
    )  # a callback may come a moment after who waited for its sum goes on
    while (
        sum(lane == "sends" for lane, *_ in notes.noted) < len(ranks.buckets)
        and time.monotonic() < until
    ):
        time.sleep(1e-3)
    return notes.spans()


def sent_early(spans: "list[Span]") -> int:
    """How many buckets were on their way before the rank's last backward was over."""
    over = max(s.stop for s in spans if s.name == "backward")
    return sum(s.lane == "sends" and s.start < over for s in spans)
