"""What the ledger and the benchmarks read: the records of `torch.profiler`.

    with profiled("ledger('arena')") as events:
        step(batch)
    events                                  # the events of a Chrome trace, filled after the block

CUPTI, the profiler's source on a GPU, leaves four kinds of records: the host's calls to the runtime
and the driver, the GPU's kernels, copies and memsets, and synchronisations. A call and the work
that it asked for carry the same correlation number.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import warnings
from typing import NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from ..backends import backend
from ..errors import BackendError

REGION = "gpuaccel.measure.region"
LAUNCHES = {
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel",
}
GRAPH_LAUNCHES = {"cudaGraphLaunch", "cuGraphLaunch"}
SYNCS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
}
SYNC_RECORDS = {
    f"{what} {verb}" for what in ("Stream", "Context", "Event") for verb in ("Sync", "Synchronize")
}
SCALAR_READ = "aten::_local_scalar_dense"


class Span(NamedTuple):
    """A stretch of one lane. Times in microseconds since the first of them began.

    Attributes:
        lane: who did it.
        name: what was done.
        start: microseconds.
        stop: microseconds.
    """

    lane: str
    name: str
    start: float
    stop: float


def profiler_sees_gpu() -> bool:
    """True if the profiler can record a GPU."""
    return torch.cuda.is_available() and backend().policy != "off"


@contextlib.contextmanager
def profiled(caller):
    """Record the block with torch.profiler; yields a list that holds the trace's events afterwards.

    The block's own events are those within the event called REGION. caller: named in the
    BackendError that is raised inside another profiler. Waits for the GPU before and after."""
    if torch._C._autograd._profiler_enabled():
        raise BackendError(
            f"{caller} inside another ledger or torch.profiler: only one can watch at a time"
        )
    gpu = profiler_sees_gpu()
    events = []
    activities = [ProfilerActivity.CPU]
    options = {}
    if gpu:
        activities.append(ProfilerActivity.CUDA)
        # Records of synchronisations: calls of the driver API leave no other trace.
        options["experimental_config"] = _ExperimentalConfig(enable_cuda_sync_events=True)
        # work that was queued before is not the block's
        torch.cuda.synchronize()
    profiler = profile(activities=activities, **options)
    with quiet_profiler():
        profiler.__enter__()
    try:
        with record_function(REGION):
            yield events
        if gpu:
            # Outside the region, so that every record of its work is complete. The call after it
            # must leave a record: without one the profiler does not see the GPU.
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda")
    finally:
        with quiet_profiler():
            profiler.__exit__(None, None, None)
    with quiet_profiler():
        events += trace_events(profiler)


@contextlib.contextmanager
def quiet_profiler():
    """Hide the profiler library's own messages: its warnings, and what it writes to stderr."""
    sys.stderr.flush()
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


def trace_events(profiler) -> list:
    """The events of a finished torch.profiler.profile, as dictionaries of a Chrome trace."""
    handle, path = tempfile.mkstemp(suffix=".json", prefix="gpuaccel-profile-")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            return json.load(file, strict=False)["traceEvents"]
    finally:
        os.unlink(path)


def split_region(events):
    """(events of a Chrome trace with a duration, the event REGION, those that began within it)."""
    events = [event for event in events if event.get("ph") == "X"]
    region = next(
        e for e in events if e["name"] == REGION and e.get("cat") != "gpu_user_annotation"
    )
    end = region["ts"] + region["dur"]
    inside = [e for e in events if region["ts"] <= e["ts"] <= end and e is not region]
    return events, region, inside


def is_call(event) -> bool:
    """Whether the event is a call of the host to the CUDA runtime or driver."""
    return event.get("cat") in ("cuda_runtime", "cuda_driver")


def is_wait(event, known) -> bool:
    """Whether the host waits for the GPU here. known: correlation numbers of the host's calls.

    A wait through the driver API has no call record, only CUPTI's record of the synchronisation;
    where there are both, the record is not counted a second time."""
    if is_call(event):
        name = call_name(event)
        return name in SYNCS or (bool(re.match(r"cu(da)?Memcpy", name)) and "Async" not in name)
    return (
        event.get("cat") == "cuda_sync"
        and event["name"] in SYNC_RECORDS
        and correlation(event) not in known
    )


def call_name(event) -> str:
    """The name of a call without its variant's suffix: cuLaunchKernel_ptsz -> cuLaunchKernel."""
    return re.sub(r"(_v\d+|_v2|_ptsz|_ptds)+$", "", event["name"])


def correlation(event):
    """The number that a call shares with the work that it asked for, or None."""
    return event.get("args", {}).get("correlation")


def covered(spans) -> float:
    """How long at least one of these spans, (start, stop), is. Each instant counts once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total
