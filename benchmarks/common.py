"""What the benchmarks share: timing, the facts about the machine, and results that know which sources they measured."""

import datetime
import hashlib
import json
import pathlib
import platform
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))


def digests(patterns) -> "dict[str, str]":
    """relative path -> first 16 hex digits of its SHA-256, for glob patterns below the repository."""
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in paths
    }


def stale(result: dict) -> "list[str]":
    """Sources that have changed, come or gone since this result was measured."""
    then = result["sources"]
    now = digests(result["source_patterns"])
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


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


def write(name: str, patterns, results: dict, script: "str | None" = None) -> pathlib.Path:
    """benchmarks/results/<name>_<gpu>.json with everything needed to trust it, or to doubt it.

    script: the benchmark's name, if it is not `name`."""
    facts = environment()
    gpu = re.sub(r"[^a-z0-9]+", "_", facts["gpu"].lower().removeprefix("nvidia ")).strip("_")
    path = RESULTS / f"{name}_{gpu}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps(
            {
                "benchmark": script or name,
                **facts,
                "source_patterns": list(patterns),
                "sources": digests(patterns),
                "results": results,
            },
            indent=1,
        )
        + "\n"
    )
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
