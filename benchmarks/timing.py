"""Time, memory, clock and distance: for benchmarks of operations that take microseconds to milliseconds, replayed from CUDA graphs."""

import functools
import gc
import statistics
import subprocess

import common
import torch

from gpuaccel.backends import backend
from gpuaccel.errors import CaptureError
from gpuaccel.graphs.capture import recorder_for

DEVICE, OURS = "cuda", "ours"
SPAN, MOST_CALLS, BUDGET = (
    1.0,
    32,
    500.0,
)  # milliseconds of calls in a row, how many of them at most, milliseconds of one measurement


def timed(runs: dict, launched: bool = False, budget: float = BUDGET) -> "tuple[dict, dict]":
    """({"replayed": name -> milliseconds of one call, "launched": likewise}, name -> why it cannot be captured).

    Several calls in a row are one graph, or one loop of Python, so that starting a graph does not count; fewer where one takes long.
    launched: also where everything can be captured. budget: milliseconds to spend on each kind; at least 3 rounds, at most 20."""
    once = common.milliseconds(runs, 1, 1)
    calls = {name: max(1, min(MOST_CALLS, int(SPAN / ms))) for name, ms in once.items()}
    rounds = max(3, min(20, int(budget / sum(ms * calls[name] for name, ms in once.items()))))
    several = {name: functools.partial(repeat, run, calls[name]) for name, run in runs.items()}
    recorder, recordings, refused = recorder_for(DEVICE, backend().name), {}, {}
    for name, run in several.items():
        try:
            recordings[name] = recorder.record(run)[0]
        except CaptureError as error:
            refused[name] = str(error)

    def per_call(functions):
        return {
            name: ms / calls[name] for name, ms in common.milliseconds(functions, rounds, 1).items()
        }

    found = {
        "replayed": per_call({name: recording.replay for name, recording in recordings.items()})
    }
    if launched or refused:
        found["launched"] = per_call(several)
    for recording in recordings.values():
        recording.close()
    return found, refused


def timed_alike(runs: dict, launched: bool = False) -> "tuple[dict, dict, dict]":
    """timed() as (milliseconds of all, replayed; launched, where one of them cannot be captured; those launched, if any; why not captured)."""
    found, refused = timed(runs, launched)
    launches = found.get("launched", {})
    return launches if refused else found["replayed"], launches, refused


def repeat(run, calls):
    for _ in range(calls):
        run()


def times_ours(ms: dict) -> dict:
    """name -> how many times our milliseconds it takes."""
    return {name: some / ms[OURS] for name, some in ms.items() if name != OURS}


def release():
    """Give back memory that nothing uses."""
    if DEVICE == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def peak_MiB(run) -> float:
    """Memory that a call allocates above what is there already, results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def clock_MHz(load) -> float:
    """The multiprocessors' clock by nvidia-smi while load() runs over and over; the median of 3."""
    readings = []
    for _ in range(3):
        with subprocess.Popen(
            ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            text=True,
        ) as asked:
            while asked.poll() is None:
                load()
                torch.cuda.synchronize()
            readings.append(float(asked.stdout.readline()))
    return statistics.median(readings)


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def random(*shape, seed=1, dtype=torch.bfloat16):
    return torch.randn(
        shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE
    ).to(dtype)


def gradients(function, inputs, dy):
    """Forward and backward: gradients of the inputs."""
    return torch.autograd.grad(function(), inputs, dy)


def apart(got, want) -> float:
    """The norm of the difference over the norm of what is right, in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())
