"""What every benchmark needs: the device, the facts about the machine, and result files.

>>> record("dispatch", {"curves": curves}, tables)    # curves(), then the result file and tables
>>> record("step", {"256": short}, tables, GiB=70)    # short(config) of a model that fits
"""

import argparse
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
import traceback

import memory
import power
from tables import show

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Tests set "cpu" before they import the other modules.
DEVICE = "cuda"
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))


def environment() -> dict:
    """GPU, driver, CPU, versions, commit and date; no names of machines. No GPU: "none"."""
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
        "processor": processor(),
        "cores": os.cpu_count(),
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


def write(name: str, results: dict, parts=(), script: str | None = None, **facts) -> dict:
    """Write benchmarks/results/<gpu>/<name>.json. Returns all results of the file.

    Parts that were measured before stay, if they are of the same GPU, commit, torch and size.

    parts: names of all parts, in their order; those that are not measured yet are in "missing"
    script: the benchmark's name where it is not `name`
    facts: further ones, as the size, where what was measured is smaller to fit into the memory"""
    gpus = facts.pop("gpus", 1)
    result = {
        "benchmark": script or name,
        **environment(),
        **facts,
        "power": power.reading(gpus),
    }
    path = RESULTS / folder_of(result["gpu"]) / f"{name}.json"
    before = json.loads(path.read_text()) if path.is_file() else {}
    same = ("gpu", "commit", "torch", "size")
    if all(before.get(key) == result.get(key) for key in same):
        results = {**before["results"], **results}
    missing = [part for part in parts if part not in results]
    if missing:
        result["missing"] = missing
    order = [*(part for part in parts if part in results), *results]
    result["results"] = {part: results[part] for part in order}
    save(path, result)
    return result["results"]


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


def record(name: str, parts: dict, tables, GiB: float | None = None):
    """Measure parts and write the results after each, so that a stopped run keeps what it has.

    One that fails does not stop the others. The command line chooses: `--only NAME ...`.

    parts: name -> a function that measures it
    tables: plain results -> name -> Table (tables.py)
    GiB: what all processes of a part take together with llama-350m. The functions then get the
        largest model that fits, and a smaller one after it has run out of memory."""
    chosen, failed = chosen_parts(parts, name), []
    models = [(None, None)] if GiB is None else memory.models_that_fit(GiB)
    clock = Clock()
    with measuring_here():
        todo = list(chosen)
        while todo:
            part, (model, size) = todo.pop(0), models[0]
            try:
                result = parts[part]() if GiB is None else parts[part](model)
                results = write(name, plain({part: result}), list(parts), size=size)
                show(tables(results))
                clock.say(f"{part} is done")
            except Exception as error:
                if "out of memory" in str(error).lower() and len(models) > 1:
                    print(f"{size or 'llama-350m'} does not fit: {str(error)[-300:]}", flush=True)
                    models, todo, failed = models[1:], list(chosen), []
                    power.SPANS.clear()
                else:
                    traceback.print_exc()
                    failed.append(part)
            # After an error: its frames no longer hold what they have made.
            give_memory_back()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def chosen_parts(parts, name: str) -> list[str]:
    """The parts that the command line names; all, where it names none."""
    parser = argparse.ArgumentParser(description=f"The benchmark {name}.")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=parts,
        default=list(parts),
        metavar="PART",
        help=f"of {', '.join(parts)}",
    )
    only = parser.parse_args().only
    return [part for part in parts if part in only]


def give_memory_back():
    """Free what nothing holds, for other processes too."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
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
