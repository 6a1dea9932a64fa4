"""Time, memory, clock rate and errors.

>>> milliseconds({"torch": run_torch, "ours": run_ours})     # medians, measured in turns
>>> timed({"torch": run_torch, "ours": run_ours})            # the same, replayed from CUDA graphs
"""

import functools
import gc
import statistics
import subprocess
import time

import torch
from common import DEVICE
from power import measuring, visible_gpus

from gpuaccel.backends import backend
from gpuaccel.graphs.capture import recorder_for

OURS = "ours"
# Milliseconds of the calls that are timed as one, and how many calls these are at most.
SPAN = 1.0
MAX_CALLS = 32
# Milliseconds of one measurement.
BUDGET = 500.0


# ---- time ---------------------------------------------------------------------------------------


def milliseconds(functions: dict, rounds: int = 20, warm_up: int = 3) -> dict[str, float]:
    """Median device time of each function.

    They run in turns (a, b, c, a, b, c, ...), so that drift of the clock rate affects all alike.
    Before each round the device is kept busy, so that the first function does not wait for the
    host either."""
    for function in functions.values():
        for _ in range(warm_up):
            function()
    events = {name: [] for name in functions}
    torch.cuda.synchronize()
    with measuring():
        for _ in range(rounds):
            # In clock cycles: half a millisecond.
            torch.cuda._sleep(1_000_000)
            for name, function in functions.items():
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                function()
                stop.record()
                events[name].append((start, stop))
            torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(stop) for start, stop in pairs)
        for name, pairs in events.items()
    }


def milliseconds_after(pairs: dict) -> dict[str, float]:
    """Median device time of each run without its preparation. pairs: name -> (prepare, run)."""
    functions = {}
    for name, (prepare, run) in pairs.items():
        functions[f"before {name}"] = prepare
        functions[name] = run
    times = milliseconds(functions)
    return {name: times[name] for name in pairs}


def queued(run, calls: int) -> list[float]:
    """Milliseconds of each of `calls` runs that are queued back to back, as in a training loop.

    One more run before them is not counted."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    run()
    with measuring():
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in zip(events, events[1:])]


def host_milliseconds(run) -> float:
    """Milliseconds of one run by the host's clock; the device is not waited for."""
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def back_to_back(run, calls: int) -> list[float]:
    """Milliseconds of one of `calls` runs by the host's clock, with one synchronization at the end.

    For runs that are launched from Python, whose time the host may decide. One more run before them
    is not counted."""

    def many():
        repeat(run, calls)
        torch.cuda.synchronize()

    run()
    torch.cuda.synchronize()
    with measuring():
        return [host_milliseconds(many) / calls]


def in_turns(timers: dict, rounds: int = 3) -> dict[str, float]:
    """Median of the times that each timer returns.

    They are called in turns (a, b, c, a, b, c, ...), so that drift of the clock rate affects all
    alike.

    timers: name -> a function that returns a list of milliseconds"""
    times = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            with measuring():
                times[name] += timer()
    return {name: statistics.median(values) for name, values in times.items()}


def repeat(run, calls: int):
    for _ in range(calls):
        run()


# ---- CUDA graphs --------------------------------------------------------------------------------


def captured(run, prepare=lambda: None):
    """The replay of a CUDA graph of run(), captured in the state that prepare() leaves.

    It is warmed up and captured on one stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            prepare()
            run()
        prepare()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def timed(runs: dict, budget: float = BUDGET) -> dict[str, float]:
    """Milliseconds of one call of each function, several calls of which are one CUDA graph.

    runs: name -> function
    budget: milliseconds to spend; at least 3 rounds, at most 20"""
    once = milliseconds(runs, 1, 1)
    calls = {name: max(1, min(MAX_CALLS, int(SPAN / ms))) for name, ms in once.items()}
    rounds = int(budget / sum(ms * calls[name] for name, ms in once.items()))
    recorder = recorder_for(DEVICE, backend().name)
    recordings = {
        name: recorder.record(functools.partial(repeat, run, calls[name]))[0]
        for name, run in runs.items()
    }
    replays = {name: recording.replay for name, recording in recordings.items()}
    times = milliseconds(replays, max(3, min(20, rounds)), 1)
    for recording in recordings.values():
        recording.close()
    return {name: ms / calls[name] for name, ms in times.items()}


# ---- memory, rates and clocks -------------------------------------------------------------------


def release():
    """Give unused memory back to the device."""
    if DEVICE == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def reset_peaks():
    """Give unused memory back and forget the peaks."""
    release()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_MiB(run) -> float:
    """Memory that a call allocates above what is there already, results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_rate(elements: int) -> float:
    """GB/s of a device-to-device copy of fp32 elements, bytes read and bytes written counted."""
    source = torch.randn(elements, device=DEVICE)
    target = torch.empty(elements, device=DEVICE)
    return 8 * elements / milliseconds({"copy": lambda: target.copy_(source)})["copy"] / 1e6


def clock_MHz(load) -> float:
    """The multiprocessors' clock by nvidia-smi while load() runs over and over; median of 3."""
    query = ["nvidia-smi", f"--id={visible_gpus()[0]}", "--query-gpu=clocks.sm"]
    query.append("--format=csv,noheader,nounits")
    readings = []
    for _ in range(3):
        with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                load()
                torch.cuda.synchronize()
            readings.append(float(process.stdout.readline()))
    return statistics.median(readings)


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


# ---- values -------------------------------------------------------------------------------------


def random(*shape, seed=1, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def gradients(function, inputs, dy) -> tuple:
    """Forward and backward: gradients of the inputs."""
    return torch.autograd.grad(function(), inputs, dy)


def relative_error(value, exact) -> float:
    """The norm of the difference over the norm of the exact value, in float64."""
    return float((value.double() - exact.double()).norm() / exact.double().norm())
