"""What every benchmark needs: the device, the facts about the machine, result files and tables."""

import datetime
import json
import pathlib
import platform
import re
import subprocess
import sys
import time

from fingerprints import ROOT, fingerprints, kernels_in_use
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


def write(name: str, results: dict, script: "str | None" = None) -> pathlib.Path:
    """Write benchmarks/results/<name>_<gpu>.json: results, environment and fingerprints.

    script: the benchmark's name where it is not `name`."""
    facts = environment()
    gpu = re.sub(r"[^a-z0-9]+", "_", facts["gpu"].lower().removeprefix("nvidia ")).strip("_")
    result = {
        "benchmark": script or name,
        **facts,
        "fingerprints": fingerprints(script or name, kernels_in_use() | KERNELS_USED),
        "results": results,
    }
    path = RESULTS / f"{name}_{gpu}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print("\nwritten:", path.name, flush=True)
    return path


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
