"""Every benchmark that this machine can run, one after the other: make bench

make bench                        # on the GPU that is there: half an hour on an H200
make bench ONLY="step clip"       # these, also when they have a result of this commit
make bench AGAIN=1                # all, also those with a result of this commit

Each benchmark is a process of its own; what it prints is in build/bench/<name>.log. One that fails
does not stop the others, and the command ends with status 1. After an interruption, the same
command continues: what has a result of this commit is not measured again, unless code was edited
since. At the end benchmarks/report.py writes the pages, and build/bench/<gpu>.md.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from common import RESULTS, ROOT, folder_of
from tqdm import tqdm

BENCHMARKS = ROOT / "benchmarks"
LOGS = ROOT / "build" / "bench"


class Benchmark(NamedTuple):
    """What a script needs.

    seconds: about as many on an H200, for the progress bar
    gpus: at least so many
    modules: that it imports and the package does not
    """

    seconds: int
    gpus: int = 1
    modules: tuple = ()


# In this order.
ALL = {
    "step": Benchmark(240),
    "transformers_step": Benchmark(960, 1, ("transformers", "peft")),
    "graphs": Benchmark(110),
    "accumulate": Benchmark(25),
    "clip": Benchmark(20),
    "tail": Benchmark(35),
    "encoder": Benchmark(60),
    "dispatch": Benchmark(170),
    "models": Benchmark(90, 0, ("transformers",)),
    "cpu": Benchmark(60, 0),
    "ddp": Benchmark(190, 2),
    "faults": Benchmark(1200, 0),
}
# They measure a CPU: on a machine with a GPU they run by name only.
ONLY_WITHOUT_A_GPU = ("cpu", "faults")


def machine() -> dict:
    """Facts about this machine, from a process that then leaves the GPU alone."""
    script = "import common, json; print(json.dumps(common.environment()))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def result_paths(name: str, here: dict) -> list[pathlib.Path]:
    """The files that a benchmark writes on this machine."""
    if name == "models":
        return [RESULTS / "models.json"]
    folder = RESULTS / folder_of(here["gpu"] if ALL[name].gpus else "none")
    if name == "ddp":
        return [folder / f"ddp_{n}gpus.json" for n in (2, 4) if n <= here["gpus"]]
    return [folder / f"{name}.json"]


def is_done(name: str, here: dict) -> bool:
    """Does it have a result of this commit? One of edited code ("+") is measured again."""
    for path in result_paths(name, here):
        if not path.is_file():
            return False
        result = json.loads(path.read_text())
        other_gpu = name == "models" and result["gpu"] != here["gpu"]
        if other_gpu or result["commit"] != here["commit"] or result.get("missing"):
            return False
    return not here["commit"].endswith("+")


def lacks(name: str, here: dict) -> str | None:
    """What a benchmark needs and this machine lacks, in words."""
    gpus = ALL[name].gpus
    if here["gpus"] < gpus:
        needed = "a GPU" if gpus == 1 else f"{gpus} GPUs"
        return f"needs {needed}; this machine has {here['gpus'] or 'none'}"
    absent = [module for module in ALL[name].modules if not importlib.util.find_spec(module)]
    if absent:
        return f"needs {', '.join(absent)}, of the extra `test`: pip install -e '.[test]'"
    return None


def chosen(names, again: bool, here: dict) -> tuple[list[str], dict[str, str]]:
    """(benchmarks to run, name -> why another one is left out).

    names: those that were asked for; [] for all"""
    todo, left_out = [], {}
    for name in names or ALL:
        if reason := lacks(name, here):
            left_out[name] = reason
        elif not names and name in ONLY_WITHOUT_A_GPU and here["gpus"]:
            left_out[name] = f'measures a CPU: make bench ONLY="{name}"'
        elif not names and not again and is_done(name, here):
            left_out[name] = "has a result of this commit"
        else:
            todo.append(name)
    return todo, left_out


def run_script(script: str, log: pathlib.Path, tick=lambda: None) -> int:
    """The exit status of a script. tick() is called twice a second meanwhile.

    Whatever ends this process ends the script's processes, too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", BENCHMARKS / f"{script}.py"],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    return process.wait(0.5)
                except subprocess.TimeoutExpired:
                    tick()
        except BaseException:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
            raise


def run_all(todo, bar) -> dict[str, str]:
    """Run benchmarks. Returns name -> how it failed."""
    failed = {}
    for index, name in enumerate(todo):
        left = ", ".join(todo[index + 1 :]) or "nothing"
        bar.set_description_str(f"{name} ({index + 1} of {len(todo)}); then {left}")
        began, before, seconds = time.monotonic(), bar.n, ALL[name].seconds

        def tick():
            bar.update(min(seconds, time.monotonic() - began) - (bar.n - before))

        log = LOGS / f"{name}.log"
        status = run_script(name, log, tick)
        bar.update(seconds - (bar.n - before))
        words = f"{name}: {time.monotonic() - began:.0f} s"
        if status:
            last = "\n".join(f"    {line}" for line in log.read_text().splitlines()[-5:])
            failed[name] = f"exit status {status}, {log.relative_to(ROOT)}"
            words += f", failed with {failed[name]}\n{last}"
        bar.write(words, file=sys.stderr)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run every benchmark that this machine can run, then write the pages."
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(ALL)}")
    parser.add_argument("--again", action="store_true", help="also those with a result")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in ALL]:
        parser.error(f"no benchmark {', '.join(unknown)}; expected some of {', '.join(ALL)}")
    # A job that is stopped stops what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here = machine()
    todo, left_out = chosen(args.names, args.again, here)
    seconds = sum(ALL[name].seconds for name in todo)
    print(f"{here['gpu']}: {', '.join(todo) or 'nothing'} to run, about {seconds / 60:.0f} min")
    for name, reason in left_out.items():
        print(f"left out: {name} {reason}")
    layout = "{percentage:3.0f}% |{bar:20}| {elapsed}, about {remaining} left: {desc}"
    # Where nobody watches, a line now and then.
    pause = 0.5 if sys.stderr.isatty() else 60
    with tqdm(total=seconds, bar_format=layout, mininterval=pause, disable=not todo) as bar:
        try:
            failed = run_all(todo, bar)
        except KeyboardInterrupt:
            bar.write("stopped; the same command continues with what is left", file=sys.stderr)
            return 130
    log = LOGS / "report.log"
    if run_script("report", log):
        failed["report"] = f"{log.relative_to(ROOT)}"
    else:
        print(f"tables and charts: build/bench/{folder_of(here['gpu'])}.md")
    for name, how in failed.items():
        print(f"failed: {name} ({how})")
    # What was asked for by name and cannot run here is a failure, too.
    return int(bool(failed or (args.names and left_out)))


if __name__ == "__main__":
    sys.exit(main())
