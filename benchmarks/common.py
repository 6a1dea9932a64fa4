"""What every benchmark needs: the device, the facts about the machine, result files and tables."""

import datetime
import json
import pathlib
import platform
import re
import statistics
import subprocess
import sys

from fingerprints import ROOT, fingerprints

RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))


def milliseconds(functions: dict, rounds: int = 20, warm_up: int = 3) -> "dict[str, float]":
    """Median device time of each function, measured in turns (a, b, c, a, b, c, ...), so that drift of the clock meets all alike. The device has something
    to do before each round, so that the first function does not wait for the host either."""
    import torch

    for function in functions.values():
        for _ in range(warm_up):
            function()
    events = {name: [] for name in functions}
    torch.cuda.synchronize()
    for _ in range(rounds):
        torch.cuda._sleep(1_000_000)  # clocks: half a millisecond
        for name, function in functions.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            stop.record()
            events[name].append((start, stop))
        torch.cuda.synchronize()
    return {
        name: statistics.median(a.elapsed_time(b) for a, b in pairs)
        for name, pairs in events.items()
    }


def environment() -> dict:
    """GPU, driver, versions, commit and date; no names of machines."""
    import torch

    from gpuaccel.compiler import nvrtc

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "driver": driver.split("\n")[0].strip(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "nvrtc": ".".join(map(str, nvrtc.library().version)),
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
        "fingerprints": fingerprints(script or name),
        "results": results,
    }
    path = RESULTS / f"{name}_{gpu}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def table(rows, head) -> str:
    """A plain text table; numbers are aligned to the right."""
    rows = [
        [f"{cell:,.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        for row in [head, *rows]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        )
        for row in rows
    )
