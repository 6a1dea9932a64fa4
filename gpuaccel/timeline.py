"""Who waited for whom: what the host and the GPU did, as spans of time on two lanes.

    >>> spans = timeline.tail(lambda: step(batch))       # the tail of a step: what follows its last backward
    >>> spans[:2]
    [Span(lane='host', name='python', start=0.0, stop=912.4), Span(lane='host', name='launch', start=3.1, stop=9.0)]
    >>> figures.timeline({"item": spans})                # drawn

Everything is read from the records of `torch.profiler`, as the ledger's counts are. On the host: `launch`, `wait` and `copy` are its
calls to the GPU, `python` is all the rest of its time. On the GPU: kernels by name, copies, and `backward`, what was still queued from
before. Without a GPU there is one lane: torch's own operators, and `read` where a number went to Python. With the profiler
watching everything takes longer: a picture of the order of things, not a benchmark.

exchange(step, batch) notes when a rank of several computed and when its buckets were on their way, without a profiler.
"""
import re
import threading
import time
from itertools import count
from typing import NamedTuple

import torch

from .errors import ArgumentError
from .ledger import GRAPH_LAUNCHES, LAUNCHES, REGION, SYNC_RECORDS, SYNCS, blocking_copy, correlation, plain_name, watched, watches_gpu

BACKWARD = "autograd::engine::evaluate_function"
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


class Span(NamedTuple):
    """One stretch of one lane, "host" or "GPU" (of exchange(): "computes" or "sends"); times in microseconds since the tail (of whole(): the run;
    of exchange(): the step) began."""
    lane: str
    name: str
    start: float
    stop: float


def tail(run) -> "list[Span]":
    """What host and GPU did in `run()` after its last backward (or in all of it, where there was none), until both were done.

    Call it once before to warm up. Raises BackendError inside a ledger or another profiler. Waits for the GPU."""
    with watched("timeline") as events:
        run()
    return _spans(events, watches_gpu())


def whole(run) -> "list[Span]":
    """The same of all of `run()`, from its beginning."""
    with watched("timeline") as events:
        run()
    return _spans([event for event in events if not event["name"].startswith(BACKWARD)], watches_gpu())


def _spans(events, gpu) -> "list[Span]":
    """The spans in a list of Chrome trace events."""
    events = [e for e in events if e.get("ph") == "X"]
    region = next(e for e in events if e["name"] == REGION and e.get("cat") != "gpu_user_annotation")
    end = region["ts"] + region["dur"]
    inside = [e for e in events if region["ts"] <= e["ts"] <= end and e is not region]
    zero = max([e["ts"] + e["dur"] for e in inside if e["name"].startswith(BACKWARD)], default=region["ts"])
    found = [Span("host", "python", 0.0, end - zero)]

    def add(lane, name, event, start=None):
        start = event["ts"] - zero if start is None else start
        stop = event["ts"] + event["dur"] - zero
        if stop > max(start, 0.0):
            found.append(Span(lane, name, round(max(start, 0.0), 1), round(stop, 1)))

    late = [e for e in inside if e["ts"] >= zero]
    if not gpu:
        stop = zero
        for e in sorted((e for e in late if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])):
            if e["name"] == "aten::_local_scalar_dense":     # inside the operator `item`, which is drawn under it
                add("host", "read", e)
            elif e["ts"] >= stop:                            # outermost operators only
                add("host", "operator", e)
                stop = e["ts"] + e["dur"]
        return sorted(found, key=lambda s: s.start)
    calls = [e for e in inside if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    known = {correlation(e) for e in calls} - {None}
    early = {correlation(e) for e in calls if e["ts"] < zero}
    after = {correlation(e) for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["ts"] > end}
    for e in late:
        name = plain_name(e["name"])
        if e.get("cat") == "cuda_sync" and e["name"] in SYNC_RECORDS and correlation(e) not in known:
            add("host", "wait", e)
        elif e.get("cat") not in ("cuda_runtime", "cuda_driver"):
            continue
        elif name in SYNCS or blocking_copy(name):
            add("host", "wait", e)
        elif name in LAUNCHES | GRAPH_LAUNCHES:
            add("host", "launch", e)
        elif re.match(r"cu(da)?Mem(cpy|set)", name):
            add("host", "copy", e)
    for e in events:
        if e.get("cat") in GPU_WORK and correlation(e) not in after and e["ts"] >= region["ts"]:
            name = "backward" if correlation(e) in early else "copy" if e["cat"] == "gpu_memcpy" else _kernel_name(e["name"])
            add("GPU", name, e)
    return sorted(found, key=lambda s: s.start)


def _kernel_name(name: str) -> str:
    """The last name before templates and arguments: void at::native::reduce_kernel<512, ...>(...) -> reduce_kernel."""
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    return re.split(r"[<(]", name.removeprefix("void "))[0].split("::")[-1].strip()


def lines(spans: "list[Span]") -> "list[str]":
    """A line of text for each span, as result files keep them: "host wait 12.5 40.1"."""
    return [f"{s.lane} {s.name.replace(' ', '_')} {s.start:.1f} {s.stop:.1f}" for s in spans]


def spans_of(lines: "list[str]") -> "list[Span]":
    """The spans of such lines."""
    return [Span(lane, name, float(start), float(stop)) for lane, name, start, stop in map(str.split, lines)]


def facts(spans: "list[Span]") -> dict:
    """{"waits", "reads", "launches": counts; "us": from the first to the last span; "gpu_busy": share of it, None without a GPU}."""
    stop = max((s.stop for s in spans), default=0.0)
    names = [s.name for s in spans if s.lane == "host"]
    busy, reached = 0.0, 0.0
    for s in sorted((s for s in spans if s.lane == "GPU"), key=lambda s: s.start):
        busy += max(0.0, s.stop - max(s.start, reached))
        reached = max(reached, s.stop)
    share = busy / stop if stop and any(s.lane == "GPU" for s in spans) else None
    return {"waits": names.count("wait"), "reads": names.count("read"), "launches": names.count("launch"), "us": stop, "gpu_busy": share}


# ---- what a rank sends while it computes ----------------------------------------------------------------------------

class _Watch:
    """Stands in for a step's meter and its timer, and notes when each part began and ended: events on a GPU, else the host's clock."""

    def __init__(self, device):
        self.timer, self.device, self.noted, self.open = self, device, [], None
        self.lock = threading.Lock()               # gloo's own threads say when a sum has come

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
            return round(1e3 * self.zero.elapsed_time(moment) if cuda else 1e6 * (moment - self.zero), 1)
        return sorted((Span(lane, name, at(a), at(b)) for lane, name, a, b in self.noted), key=lambda s: (s.start, -s.stop))


def exchange(step, batch) -> "list[Span]":
    """step(batch), an eager TrainStep with a ga.Distributed of several ranks, and what this rank did when. To be called on every rank.

    Lane "computes": forward and backward of each micro-batch, "wait" for the sums (inside of "accumulate", on CPUs only), "optimizer".
    Lane "sends": "bucket 0", ... from its sending until its sum had come. On a GPU from CUDA events, and it waits for the device once at the end."""
    ranks = step.ranks
    if ranks is None or ranks.how.ordered or step.replays == "graph":
        raise ArgumentError("expected a TrainStep with replay='eager' and distributed=ga.Distributed() of two ranks or more, not in ordered mode")
    watch, usual = _Watch(step.arena.device), step.meter
    summed, number = ranks._sum, count()

    def send(bucket, sent, later):
        name, begin = f"bucket {next(number)}", watch.now()
        works, copies = summed(bucket, sent, later)
        if later:
            works[-1].get_future().add_done_callback(lambda _: watch.note("sends", name, begin))
        else:
            watch.note("sends", name, begin)
        return works, copies

    def waiting(usual):
        def wait(*given):
            begin = watch.now()
            found = usual(*given)
            if watch.device.type != "cuda":
                watch.note("computes", "wait", begin)
            return found
        return wait
    step.meter, ranks._sum, ranks._exchange, ranks._join = watch, send, waiting(ranks._exchange), waiting(ranks._join)
    try:
        step(batch)
    finally:
        step.meter = usual
        del ranks._sum, ranks._exchange, ranks._join
    until = time.monotonic() + 10                  # a callback may come a moment after who waited for its sum goes on
    while sum(lane == "sends" for lane, *_ in watch.noted) < len(ranks.buckets) and time.monotonic() < until:
        time.sleep(1e-3)
    return watch.spans()


def sent_early(spans: "list[Span]") -> int:
    """How many buckets were on their way before the rank's last backward was over."""
    over = max(s.stop for s in spans if s.name == "backward")
    return sum(s.lane == "sends" and s.start < over for s in spans)
