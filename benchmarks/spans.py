"""What host and GPU did in a step, as spans of time: from the records of torch.profiler.

On the host's lane `launch`, `wait` and `copy` are its calls to the GPU, and `python` is the rest of
its time. On the GPU's lane are kernels by name, copies, and `backward`: work queued before. Without
a GPU there is one lane: torch's own operators, and `read` where a number went to Python. The
profiler slows everything down: the spans show the order of things, not how fast they are.
"""

import re

from gpuaccel.measure import Span
from gpuaccel.measure.profiler import (
    GRAPH_LAUNCHES,
    LAUNCHES,
    SCALAR_READ,
    call_name,
    correlation,
    covered,
    is_call,
    is_wait,
    profiled,
    profiler_sees_gpu,
    split_region,
)

BACKWARD = "autograd::engine::evaluate_function"
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


def tail(run) -> list[Span]:
    """What host and GPU did in run() after its last backward, until both were done.

    All of run() where there is no backward. Call run() once before to warm up."""
    with profiled("timeline") as events:
        run()
    return _spans(events, profiler_sees_gpu())


def whole(run) -> list[Span]:
    """What host and GPU did in all of run(); as tail() otherwise."""
    with profiled("timeline") as events:
        run()
    events = [event for event in events if not event["name"].startswith(BACKWARD)]
    return _spans(events, profiler_sees_gpu())


def _spans(events, gpu) -> list[Span]:
    """The spans in the events of a Chrome trace."""
    events, region, inside = split_region(events)
    region_end = region["ts"] + region["dur"]
    backward_ends = [e["ts"] + e["dur"] for e in inside if e["name"].startswith(BACKWARD)]
    zero = max(backward_ends, default=region["ts"])
    spans = [Span("host", "python", 0.0, region_end - zero)]

    def add(lane, name, event):
        start = max(event["ts"] - zero, 0.0)
        stop = event["ts"] + event["dur"] - zero
        if stop > start:
            spans.append(Span(lane, name, round(start, 1), round(stop, 1)))

    in_tail = [e for e in inside if e["ts"] >= zero]
    if not gpu:
        operators = [e for e in in_tail if e.get("cat") == "cpu_op"]
        outermost_end = zero
        for e in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
            if e["name"] == SCALAR_READ:
                # inside the operator `item`, which is drawn under it
                add("host", "read", e)
            elif e["ts"] >= outermost_end:
                add("host", "operator", e)
                outermost_end = e["ts"] + e["dur"]
        return sorted(spans, key=lambda span: span.start)

    calls = [e for e in inside if is_call(e)]
    known = {correlation(e) for e in calls} - {None}
    for e in in_tail:
        if is_wait(e, known):
            add("host", "wait", e)
        elif is_call(e):
            name = call_name(e)
            if name in LAUNCHES | GRAPH_LAUNCHES:
                add("host", "launch", e)
            elif re.match(r"cu(da)?Mem(cpy|set)", name):
                add("host", "copy", e)
    asked_before = {correlation(e) for e in calls if e["ts"] < zero}
    asked_after = {correlation(e) for e in events if is_call(e) and e["ts"] > region_end}
    for e in events:
        if e.get("cat") not in GPU_WORK or e["ts"] < region["ts"]:
            continue
        if correlation(e) in asked_after:
            continue
        if correlation(e) in asked_before:
            name = "backward"
        elif e["cat"] == "gpu_memcpy":
            name = "copy"
        else:
            name = _kernel_name(e["name"])
        add("GPU", name, e)
    return sorted(spans, key=lambda span: span.start)


def _kernel_name(name: str) -> str:
    """The last name before templates and arguments.

    void at::native::reduce_kernel<512, ...>(...) -> reduce_kernel"""
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    return re.split(r"[<(]", name.removeprefix("void "))[0].split("::")[-1].strip()


def lines(spans: list[Span]) -> list[str]:
    """A line of text for each span, as result files keep them: "host wait 12.5 40.1"."""
    return [f"{s.lane} {s.name.replace(' ', '_')} {s.start:.1f} {s.stop:.1f}" for s in spans]


def facts(spans: list[Span]) -> dict:
    """Counts and times of some spans.

    "waits", "reads", "launches": how many the host has.
    "us": microseconds until the last span ends.
    "gpu_busy": the share of them in which the GPU worked; None without a GPU."""
    stop = max((s.stop for s in spans), default=0.0)
    host = [s.name for s in spans if s.lane == "host"]
    gpu = [(s.start, s.stop) for s in spans if s.lane == "GPU"]
    return {
        "waits": host.count("wait"),
        "reads": host.count("read"),
        "launches": host.count("launch"),
        "us": stop,
        "gpu_busy": covered(gpu) / stop if stop and gpu else None,
    }
