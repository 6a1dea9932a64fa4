"""What the ledger and the benchmarks read: the records of `torch.profiler`.

with profiled("ledger('arena')") as events:
    step(batch)
events                                  # the events of a Chrome trace, filled after the block
"""

import contextlib
import json
import os
import sys
import tempfile
import warnings

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from ..backends import backend
from ..errors import BackendError

REGION = "gpuaccel.measure.region"


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
