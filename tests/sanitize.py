"""Run the GPU tests under NVIDIA's compute-sanitizer: `make sanitize`, on a machine with a GPU.

memcheck finds accesses outside of allocations, initcheck reads of memory that nobody has written,
racecheck races in shared memory, and synccheck barriers that not all threads reach. Each tool goes
over each file of tests in a run of its own.

>>> python tests/sanitize.py                             # everything: hours
>>> python tests/sanitize.py --tool memcheck --tests tests/ops tests/nn/test_encoder.py
"""

import argparse
import importlib.metadata
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from gpuaccel.source import kernel_names

ROOT = pathlib.Path(__file__).parent.parent
# measure/ and learn/ are left out: a process has one profiler or one sanitizer.
ROOMS = ("compiler", "graphs", "nn", "ops", "optim", "simt", "training")
# They count the host's waits and launches, which the sanitizer changes.
LEFT_OUT = (
    "not test_gpu_a_window_neither_waits_nor_downloads "
    "and not test_gpu_a_replayed_step_never_waits_and_is_one_launch"
)
# A backtrace of the host keeps Python's frames alive, and with them the graph of an earlier
# backward, after which torch cannot capture the next one.
BACKTRACE = "--show-backtrace=device"
TOOLS = {
    # torch asks the driver for things that need not be there; those answers are no findings.
    "memcheck": ["--report-api-errors=no"],
    # It does not see what cuBLAS writes with the tensor memory accelerator: plain
    # F.linear(x, w) + bias in bf16 is a finding on an H100 (seen with 2025.3 and 2026.4).
    # So only reads by our kernels count, and what other kernels write is tracked still. Reads of a
    # gradient that cuBLAS wrote in bf16 (by accumulate_v3, for example) are findings all the same.
    "initcheck": ["--initcheck-track-filtered-global-memory=yes"],
    "racecheck": [],
    "synccheck": [],
}
OUR_KERNELS_ONLY = ("initcheck", "racecheck", "synccheck")
# Their two halves of a block reach one named barrier (bar.sync 1) from different lines, as PTX
# allows. synccheck takes a barrier of all threads for a __syncthreads() and ends the kernel.
NOT_FOR_SYNCCHECK = ("poly_forward_v3", "poly_backward_v3")
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
NO_TESTS = 5  # pytest's exit status


def find_sanitizer() -> str:
    """The path of compute-sanitizer: that of NVIDIA's wheel, or the one on the PATH."""
    try:
        files = importlib.metadata.files("nvidia-cuda-sanitizer-api") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "compute-sanitizer":
            folder = pathlib.Path(str(file.locate())).parent
            # pip does not keep the permission to execute.
            for program in folder.rglob("*"):
                program.chmod(0o755)
            return str(folder / "compute-sanitizer")
    found = shutil.which("compute-sanitizer")
    if found is None:
        raise SystemExit("no compute-sanitizer here: pip install nvidia-cuda-sanitizer-api")
    return found


def all_kernels() -> list[str]:
    files = (ROOT / "kernels_cu").glob("*.cu")
    return sorted(name for path in files for name in kernel_names(path.read_text()))


def files_with_gpu_tests() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in sorted((ROOT / "tests" / room).glob("test_*.py"))
        if re.search(r"mark\.gpu|KERNELS|EVERYWHERE|CUDA", path.read_text())
    ]


def check(tool: str, tests: str, jobs: int, timeout: float) -> dict:
    """Run one tool over one file of tests: what it found, and how the tests went."""
    with tempfile.TemporaryDirectory(prefix="gpuaccel-sanitize-") as folder:
        log = pathlib.Path(folder) / "log"
        command = [find_sanitizer(), f"--tool={tool}", *TOOLS[tool], BACKTRACE]
        command += [f"--log-file={log}"]
        if tool in OUR_KERNELS_ONLY:
            left_out = NOT_FOR_SYNCCHECK if tool == "synccheck" else ()
            names = [name for name in all_kernels() if name not in left_out]
            command += [f"--kernel-name=kns={name}" for name in names]
        command += [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", LEFT_OUT]
        command += ["-n", str(jobs), tests]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, timeout=timeout, text=True, stdout=subprocess.PIPE
            )
            output = done.stdout.strip()
            ended = output.splitlines()[-1].strip("= ") if output else "no output"
            passed = done.returncode in (0, NO_TESTS)
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
            ended = f"not done after {timeout:.0f} s"
            passed = False
        report = log.read_text(errors="replace") if log.exists() else ""
    counts = [int(errors or hazards) for errors, hazards in SUMMARY.findall(report)]
    return {
        "tool": tool,
        "tests": tests,
        # None: the tool did not get to its summary.
        "findings": sum(counts) if counts else None,
        "passed": passed,
        "ended": ended,
        "seconds": round(time.monotonic() - start),
        "report": report,
        "output": output,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--tests", nargs="+", help="folders or files; default: all with GPU tests")
    parser.add_argument("--jobs", type=int, default=8, help="test processes side by side")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the results")
    args = parser.parse_args()
    results = []
    for tool in args.tool:
        for tests in args.tests or files_with_gpu_tests():
            result = check(tool, tests, args.jobs, args.timeout)
            report, output = result.pop("report"), result.pop("output")
            if result["findings"] or not result["passed"]:
                print(report, output, sep="\n")
            print(
                f"{tool:9} {tests:35} {result['findings']} findings; {result['ended']}", flush=True
            )
            results.append(result)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(r["findings"] != 0 or not r["passed"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
