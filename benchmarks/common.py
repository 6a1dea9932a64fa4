"""What every benchmark needs: the device, the facts about the machine, and result files.

>>> record("clip", measure, tables)                   # measure(), print its tables, write results
>>> record("step", measure, tables, GiB=70)           # measure(config) of a model that fits
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
from tables import show

ROOT = pathlib.Path(__file__).resolve().parent.parent

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
        "nvrtc": nvrtc_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """The commit of this checkout, shortened; with "+" where code differs from it."""

    def git(*words) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    code = ("gpuaccel", "kernels_cu", "benchmarks/*.py")
    changes = "+" if git("status", "--porcelain", "--", *code) else ""
    return head + changes if head else "unknown"


def nvrtc_version() -> str:
    """As 12.9; "none" without NVRTC."""
    from gpuaccel.compiler import nvrtc
    from gpuaccel.errors import BackendError

    try:
        return ".".join(map(str, nvrtc.library().version))
    except BackendError:
        return "none"


def folder_of(gpu: str) -> str:
    """The folder of a GPU's results: "NVIDIA H200" -> "h200", no GPU -> "cpu"."""
    if gpu.startswith("none"):
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower().removeprefix("nvidia ")).strip("_")


def write(
    name: str, results: dict, script: str | None = None, size: str | None = None, gpus: int = 1
) -> pathlib.Path:
    """Write benchmarks/results/<gpu>/<name>.json: environment(), power, memory and the results.

    script: the benchmark's name where it is not `name`
    size: what was measured in words, where it is smaller so that it fits into the GPU's memory
    gpus: how many have measured"""
    result = {
        "benchmark": script or name,
        **environment(),
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


def record(name: str, measure, tables, GiB: float | None = None):
    """Measure, print the tables, and write the results.

    tables: plain results -> name -> Table (tables.py)
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
        write(name, results, size=size)
        show(tables(plain(results)))


def give_memory_back():
    """Free what nothing holds, for other processes too."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def processor() -> str:
    """The CPU's name."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


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
