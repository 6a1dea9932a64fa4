"""What every benchmark needs: the device, the facts about the machine, result files and tables."""

import datetime
import json
import pathlib
import platform
import re
import subprocess
import sys
import time

import power
from fingerprints import ROOT, fingerprints, kernels_in_use, machine_code
from workers import KERNELS_USED

# Tests set "cpu" before they import the other modules.
DEVICE = "cuda"
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))


def environment() -> dict:
    """GPU, driver, versions, commit and date; no names of machines. No GPU: "none"."""
    import torch

    from gpuaccel.compiler import nvrtc

    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    gpu = {"gpu": "none", "gpus": 0, "driver": "none", "cuda": None, "nvrtc": "none"}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout
        gpu = {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "driver": driver.split("\n")[0].strip(),
            "cuda": torch.version.cuda,
            "nvrtc": ".".join(map(str, nvrtc.library().version)),
        }
    return {
        **gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def folder_of(gpu: str) -> str:
    """The folder of a GPU's results: "NVIDIA H200" -> "h200", no GPU -> "cpu"."""
    if gpu.startswith("none"):
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower().removeprefix("nvidia ")).strip("_")


def write(
    name: str, results: dict, script: "str | None" = None, size: "str | None" = None, gpus: int = 1
) -> pathlib.Path:
    """Write benchmarks/results/<gpu>/<name>.json: results, environment, power and fingerprints.

    script: the benchmark's name where it is not `name`
    size: of the model, in words, where it depends on the GPU's memory
    gpus: how many have measured"""
    facts = environment()
    kernels = kernels_in_use() | KERNELS_USED
    result = {
        "benchmark": script or name,
        **facts,
        "size": size,
        "power": power.reading(gpus=gpus),
        "most_GiB_in_use": power.most_GiB(),
        "fingerprints": fingerprints(script or name, {use.file for use in kernels}),
        "machine_code": machine_code(kernels, architecture()) if facts["gpus"] else None,
        "results": results,
    }
    path = RESULTS / folder_of(facts["gpu"]) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # An interruption leaves the old file or the new one.
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)
    print("\nwritten:", path.relative_to(RESULTS), flush=True)
    return path


def record(name: str, measure, show, size: "str | None" = None):
    """Measure while the GPU's power is read, show the results, and write them."""
    with power.Sampler():
        results = measure()
        show(results)
        write(name, results, size=size)


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
