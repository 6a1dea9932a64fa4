"""What every benchmark needs: the device, the facts about the machine, result files and tables.

>>> record("clip", measure, show)                     # measure(), show its results, write them
>>> record("step", measure, show, GiB=70)             # measure(config) of a model that fits
"""

import contextlib
import datetime
import gc
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

import memory
import power
from fingerprints import ROOT, fingerprints, kernels_in_use, machine_code, nvrtc_version
from workers import KERNELS_USED

# Tests set "cpu" before they import the other modules.
DEVICE = "cuda"
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))


def environment() -> dict:
    """GPU, driver, versions, commit and date; no names of machines. No GPU: "none"."""
    import torch

    gpu = {"gpu": "none", "gpus": 0, "driver": "none", "cuda": None}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout
        limit = os.environ.get(memory.LIMIT)
        gpu = {
            "gpu": torch.cuda.get_device_name() + (f", limited to {limit} GiB" if limit else ""),
            "gpus": torch.cuda.device_count(),
            "driver": driver.split("\n")[0].strip(),
            "cuda": torch.version.cuda,
        }
    return {
        **gpu,
        "nvrtc": nvrtc_version() or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """The commit of this checkout, shortened."""
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, capture_output=True, text=True).stdout.strip() or "unknown"


def folder_of(gpu: str) -> str:
    """The folder of a GPU's results: "NVIDIA H200" -> "h200", no GPU -> "cpu"."""
    if gpu.startswith("none"):
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower().removeprefix("nvidia ")).strip("_")


def facts(script: str) -> dict:
    """What every result says: the benchmark, the machine, and fingerprints of what was measured."""
    here = environment()
    kernels = kernels_in_use() | KERNELS_USED
    return {
        "benchmark": script,
        **here,
        "fingerprints": fingerprints(script, {use.file for use in kernels}),
        "machine_code": machine_code(kernels, architecture()) if here["gpus"] else None,
    }


def write(
    name: str, results: dict, script: "str | None" = None, size: "str | None" = None, gpus: int = 1
) -> pathlib.Path:
    """Write benchmarks/results/<gpu>/<name>.json: facts(), power, memory and the results.

    script: the benchmark's name where it is not `name`
    size: what was measured in words, where it is smaller so that it fits into the GPU's memory
    gpus: how many have measured"""
    result = facts(script or name)
    result |= {
        "size": size,
        "power": power.reading(gpus=gpus),
        "power_by_variant": power.readings(gpus=gpus),
        "most_GiB_in_use": power.most_GiB(),
        "results": results,
    }
    path = RESULTS / folder_of(result["gpu"]) / f"{name}.json"
    save(path, result)
    return path


def save(path: pathlib.Path, result: dict):
    """Write a result file. An interruption leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)
    print(f"\nwritten: {path.parent.name}/{path.name}", flush=True)


@contextlib.contextmanager
def measuring_here():
    """What a benchmark's main() measures in: the memory is limited, the power is read."""
    memory.obey_limit()
    with power.Sampler():
        yield


def record(name: str, measure, show, GiB: "float | None" = None):
    """Measure, show the results, and write them.

    GiB: what all processes of the benchmark take together with llama-350m. measure(config) then
        gets the largest model that fits, and a smaller one after it has run out of memory."""
    with measuring_here():
        models = [(None, None)] if GiB is None else memory.models_that_fit(GiB)
        for model, size in models:
            try:
                results = measure() if GiB is None else measure(model)
                break
            except RuntimeError as error:
                if "out of memory" not in str(error).lower() or size == models[-1][1]:
                    raise
                print(f"{size or 'llama-350m'} does not fit: {str(error)[-300:]}", flush=True)
            # After the error: its frames no longer hold what they have made.
            power.SPANS.clear()
            give_memory_back()
        show(results)
        write(name, results, size=size)


def give_memory_back():
    """Free what nothing holds, for other processes too."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def architecture() -> str:
    """Of the GPU, as "sm_90"."""
    import torch

    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def plain(results: dict) -> dict:
    """Results as they are after they have been written and read."""
    return json.loads(json.dumps(results))


class Clock:
    """Prints lines that begin with the seconds since the benchmark began."""

    def __init__(self):
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def say(self, text: str):
        print(f"{self.seconds:5.1f} s: {text}", flush=True)


def show_table(title: str, rows, head):
    """Print a title and a plain text table; numbers are aligned to the right."""
    rows = [
        [f"{cell:,.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        for row in [head, *rows]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    print(f"\n{title}")
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        print("  ".join(cells))


def with_goal(value: "float | None", goal: float, reached: "bool | None" = None) -> str:
    """A value and its goal, for a table; by default the goal is reached from there upwards."""
    if value is None:
        return ""
    if reached is None:
        reached = value >= goal
    return f"{value:.2f} ({goal:g}{'' if reached else ': missed'})"
