"""Who waited for whom: what the host and the GPU did, as spans of time on two lanes.

    >>> spans = timeline.tail(lambda: step(batch))       # the tail of a step: what follows its last backward
    >>> spans[:2]
    [Span(lane='host', name='python', start=0.0, stop=912.4), Span(lane='host', name='launch', start=3.1, stop=9.0)]
    >>> figures.timeline({"item": spans})                # drawn

Everything is read from the records of `torch.profiler`, as the ledger's counts are. On the host: `launch`, `wait` and `copy` are its
calls to the GPU, `python` is all the rest of its time. On the GPU: kernels by name, copies, and `backward`, what was still queued from
before. Without a GPU there is one lane: torch's own operators, and `read` where a number went to Python. With the profiler
watching everything takes longer: a picture of the order of things, not a benchmark.
"""

import re
from typing import NamedTuple

from .ledger import (
    GRAPH_LAUNCHES,
    LAUNCHES,
    REGION,
    SYNC_RECORDS,
    SYNCS,
    blocking_copy,
    correlation,
    plain_name,
    watched,
    watches_gpu,
)

BACKWARD = "autograd::engine::evaluate_function"
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


class Span(NamedTuple):
    """One stretch of one lane, "host" or "GPU"; times in microseconds since the tail (of whole(): the run) began."""

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
    return _spans(
        [event for event in events if not event["name"].startswith(BACKWARD)], watches_gpu()
    )


def _spans(events, gpu) -> "list[Span]":
    """The spans in a list of Chrome trace events."""
    events = [e for e in events if e.get("ph") == "X"]
    region = next(
        e for e in events if e["name"] == REGION and e.get("cat") != "gpu_user_annotation"
    )
    end = region["ts"] + region["dur"]
    inside = [e for e in events if region["ts"] <= e["ts"] <= end and e is not region]
    zero = max(
        [e["ts"] + e["dur"] for e in inside if e["name"].startswith(BACKWARD)], default=region["ts"]
    )
    found = [Span("host", "python", 0.0, end - zero)]

    def add(lane, name, event, start=None):
        start = event["ts"] - zero if start is None else start
        stop = event["ts"] + event["dur"] - zero
        if stop > max(start, 0.0):
            found.append(Span(lane, name, round(max(start, 0.0), 1), round(stop, 1)))

    late = [e for e in inside if e["ts"] >= zero]
    if not gpu:
        stop = zero
        for e in sorted(
            (e for e in late if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])
        ):
            if (
                e["name"] == "aten::_local_scalar_dense"
            ):  # inside the operator `item`, which is drawn under it
                add("host", "read", e)
            elif e["ts"] >= stop:  # outermost operators only
                add("host", "operator", e)
                stop = e["ts"] + e["dur"]
        return sorted(found, key=lambda s: s.start)
    calls = [e for e in inside if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    known = {correlation(e) for e in calls} - {None}
    early = {correlation(e) for e in calls if e["ts"] < zero}
    after = {
        correlation(e)
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["ts"] > end
    }
    for e in late:
        name = plain_name(e["name"])
        if (
            e.get("cat") == "cuda_sync"
            and e["name"] in SYNC_RECORDS
            and correlation(e) not in known
        ):
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
            name = (
                "backward"
                if correlation(e) in early
                else "copy"
                if e["cat"] == "gpu_memcpy"
                else _kernel_name(e["name"])
            )
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
    return [
        Span(lane, name, float(start), float(stop))
        for lane, name, start, stop in map(str.split, lines)
    ]


def facts(spans: "list[Span]") -> dict:
    """{"waits", "reads", "launches": counts; "us": from the first to the last span; "gpu_busy": share of it, None without a GPU}."""
    stop = max((s.stop for s in spans), default=0.0)
    names = [s.name for s in spans if s.lane == "host"]
    busy, reached = 0.0, 0.0
    for s in sorted((s for s in spans if s.lane == "GPU"), key=lambda s: s.start):
        busy += max(0.0, s.stop - max(s.start, reached))
        reached = max(reached, s.stop)
    share = busy / stop if stop and any(s.lane == "GPU" for s in spans) else None
    return {
        "waits": names.count("wait"),
        "reads": names.count("read"),
        "launches": names.count("launch"),
        "us": stop,
        "gpu_busy": share,
    }
