"""Mutation testing: small mistakes are planted in the code, and the tests have to notice each.

>>> python tests/mutants.py                  # 70 mutants against the fast tests: an hour
>>> python tests/mutants.py --all            # the survivors also against the slow tests
>>> python tests/mutants.py --only 12 40     # these again: number as printed

The mutants are drawn, with a seed, from `optim/`, `ops/`, `graphs/`, `distributed/` and from the
kernels that these launch, in turns from each room and of each kind: a sign, a bound, a negated
condition, a constant, a statement that is removed, swapped arguments, another value returned.
Messages, docstrings and types are not changed.

A test can only notice a line that it runs. So one run of the tests records first which test runs
which line (coverage.py) and launches which kernel. Nothing is drawn from what neither a fast test
nor any test of these rooms runs: without a GPU the code of streams, NCCL and captures. The script
prints how many mutants that leaves out. A mutant is planted in a copy of the checkout, and meets

1. the fast tests that run its line, those of its room first; of many tests one of each function,
2. together with all others that are left, all fast tests; what fails meets each mutant alone,
3. ruff and mypy,
4. with --all, together again, the slow tests.

The first failure kills it. Notebooks are not run. A new test counts without a new recording.

mutmut and cosmic-ray know neither kernels nor a sample with a seed, and run the same tests for
every mutant: with these it would take days.
"""

import argparse
import ast
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ROOMS = ("optim", "ops", "graphs", "distributed")
# Seconds until one test counts as hanging, and a whole run of pytest.
TEST_HANGS, RUN_HANGS = 300, 1800
# Of more tests that run a mutant, one of each function runs first.
MANY_TESTS = 100
# What pytest adds to the name of a test in PYTEST_CURRENT_TEST.
PHASE = re.compile(r" \((setup|call|teardown)\)$")
# They compare the text of kernels with pages and lists, so they would notice every mutant.
ABOUT_TEXT = (
    "tests/simt/test_simt_checks.py::test_each_kernel_has_something_to_remove",
    "tests/simt/test_simt_checks.py::test_what_is_removed_is_noticed",
)
COVERAGE = """[run]
include = {include}
data_file = {folder}/coverage/data
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
patch = fork,_exit
disable_warnings = no-data-collected
"""


# kind, start and end in the text, text in its place
Edit = tuple[str, int, int, str]


@dataclass(frozen=True)
class Mutant:
    file: str  # relative to the checkout
    start: int  # the bytes from here to `end` are replaced
    end: int
    new: str
    kind: str
    lines: tuple[int, int]  # first and last line of its statement
    kernels: tuple[str, ...] = ()  # that run it; none: it is Python

    @property
    def room(self) -> str:
        return "kernels" if self.kernels else self.file.split("/")[1]

    @property
    def folders(self) -> tuple[str, ...]:
        """Of the tests of its room."""
        return ("tests/ops", "tests/optim") if self.kernels else (f"tests/{self.room}",)

    def __str__(self):
        text = _read(ROOT / self.file)
        line = text.count("\n", 0, self.start) + 1
        column = self.start - text.rfind("\n", 0, self.start)
        old, new = (" ".join(part.split()) for part in (text[self.start : self.end], self.new))
        return f"{self.file}:{line}:{column} {self.kind}: {old} -> {new}"


# ---- the edits -----------------------------------------------------------------------------------

WORD = r"[A-Za-z_][\w.]*(?:\[[^\[\]\s]*\])?"
# kind -> [(pattern, text in its place)]
EDITS = {
    "sign": [
        (r" \+ ", " - "),
        (r" - ", " + "),
        (r" \* ", " / "),
        (r" //? ", " * "),
        (r" \+= ", " -= "),
        (r"(?:(?<=[(\[])|(?<=[=,] ))-(?=\w)", ""),
    ],
    "bound": [(r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > ")],
    "negated": [(r" == ", " != "), (r" != ", " == ")],
    "constant": [
        (r"(?<![\w.])\d+(?![\w.])", lambda m: str(int(m[0]) + 1)),
        (r"(?<![\w.])\d+\.\d*(?=f?\b)", lambda m: str(float(m[0]) + 1)),
    ],
    "swapped": [
        (rf"({WORD})( - | / | // | % )({WORD})", r"\3\2\1"),
        (rf"(?:(?<=[(,] )|(?<=\w\())({WORD}), ({WORD})(?=[,)])", r"\2, \1"),
    ],
}
PYTHON_EDITS = {
    "negated": [(r" and ", " or "), (r" or ", " and "), (r" is not ", " is ")],
    "constant": [(r"\bTrue\b", "False"), (r"\bFalse\b", "True")],
}
KERNEL_EDITS = {
    "negated": [(r" && ", " || "), (r" \|\| ", " && ")],
    "removed": [(r"__sync(threads|warp)\([^()]*\);|__threadfence\(\);", ";")],
    "swapped": [(r" \? ([^?:;]+) : ([^?:;]+)(?=;)", r" ? \2 : \1")],
}
# Of what these are given nothing is changed: people read it.
FOR_PEOPLE = re.compile(r"(\w+\.)*(\w*(Error|Warning)|warn|print)")
NOTHING = ("None", "False")
HIDDEN = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


def edits(code: str, more: dict, start: int = 0, end: int | None = None) -> Iterator[Edit]:
    """The edits of this text, by pattern."""
    for kind, patterns in [*EDITS.items(), *more.items()]:
        for pattern, new in patterns:
            for m in re.compile(pattern).finditer(code, start, len(code) if end is None else end):
                text = new(m) if callable(new) else m.expand(new)
                if text != m[0]:
                    yield kind, m.start(), m.end(), text


def python_mutants(path: pathlib.Path) -> Iterator[Mutant]:
    text = _read(path)
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    spans, hidden, found = {}, [], []

    def place(node):
        return (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def code_of(node):
        start, end = place(node)
        return text[start:end]

    code = text
    # Outer statements come first.
    for node in ast.walk(ast.parse(text.encode("latin-1"))):
        if isinstance(node, ast.stmt):
            # Of an if, a for, a def: its header.
            last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
            for line in range(node.lineno, last + 1):
                spans[line] = node.lineno, last
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
            code = _blank(code, *place(node))
        hidden += [a for f in ("annotation", "returns") if (a := getattr(node, f, None))]
        hidden += [node] if isinstance(node, HIDDEN) else []
        if isinstance(node, ast.Call) and FOR_PEOPLE.fullmatch(code_of(node.func)):
            hidden.append(node)
        elif isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
            hidden.append(node)
        elif isinstance(node, ast.arguments):
            hidden += [*node.posonlyargs, *node.args, *node.kwonlyargs]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found.append(("removed", *place(node), "pass"))
        elif isinstance(node, ast.Return) and node.value and code_of(node.value) not in NOTHING:
            found.append(("return", *place(node.value), "None"))
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            found.append(("negated", *place(node.test), f"(not ({code_of(node.test)}))"))
    for match in re.finditer(r"#.*", code):
        code = _blank(code, *match.span())
    places = [place(node) for node in hidden]
    for kind, start, end, new in itertools.chain(found, edits(code, PYTHON_EDITS)):
        line = text.count("\n", 0, start) + 1
        if line in spans and not any(a <= start < b for a, b in places):
            yield Mutant(_name(path), start, end, new, kind, spans[line])


def _read(path: pathlib.Path) -> str:
    """One character for each byte, as ast counts."""
    return path.read_text(encoding="latin-1")


def _blank(text: str, start: int, end: int) -> str:
    return text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]


def kernel_mutants(launched: set[str]) -> tuple[list[Mutant], int]:
    """The mutants of what these kernels run of the files that the rooms name, and how many are left
    out: what no such kernel reaches, and what only NVRTC compiles."""
    sys.path.insert(0, str(ROOT / "tests" / "simt"))
    from simt_cases import functions, reached

    from gpuaccel.compiler.kernel import whole_program
    from gpuaccel.source import kernel_names, without_comments

    python = "".join(_read(path) for room in ROOMS for path in python_files(room))
    files = {path: _read(path) for path in sorted((ROOT / "kernels_cu").iterdir())}
    # kernel -> its program, and the functions that it runs
    programs = {}
    for path, text in files.items():
        for kernel in launched.intersection(kernel_names(text)):
            if f'"{path.stem}"' in python:
                whole, _ = whole_program(text, path.name)
                programs[kernel] = whole, reached(kernel, whole)
    found, left_out = [], 0
    for path, text in files.items():
        code = re.sub(r"(?m)^ *#.*", lambda m: " " * len(m[0]), without_comments(text))
        for name, (start, end) in [(n, body) for n, all in functions(text).items() for body in all]:
            # Functions of two files may have one name.
            kernels = tuple(
                kernel
                for kernel, (whole, names) in sorted(programs.items())
                if name in names and text[start:end] in whole
            )
            for kind, a, b, new in edits(code, KERNEL_EDITS, code.index("{", start), end):
                line = code.count("\n", 0, a) + 1
                if kernels and not _only_gpu(text, a):
                    found.append(Mutant(_name(path), a, b, new, kind, (line, line), kernels))
                elif f'"{path.stem}"' in python:
                    left_out += 1
    return list(dict.fromkeys(found)), left_out


def _only_gpu(code: str, position: int) -> bool:
    """Whether the text is in a part of an #if that only NVRTC compiles."""
    parts = []
    for m in re.finditer(r"^#\s*(if\w*|else|endif)(.*)$", code[:position], re.MULTILINE):
        if m[1] == "endif":
            parts.pop()
        elif m[1] == "else":
            parts[-1] = False
        else:
            parts.append(m[1] != "ifndef" and "__CUDA_ARCH__" in m[2])
    return any(parts)


# ---- which test runs which line ------------------------------------------------------------------


def python_files(room: str) -> list[pathlib.Path]:
    return sorted((ROOT / "gpuaccel" / room).glob("*.py"))


class Plugin:
    """What pytest does for this script, in the process of the tests (`-p mutants`)."""

    def __init__(self):
        self.item, self.seconds, self.failed, self.kernels = "", {}, [], {}
        self.order = {test: i for i, test in enumerate(_given("MUTANTS_ONLY"))}
        self.skipped = set(_given("MUTANTS_SKIP"))
        if "MUTANTS_RECORD" in os.environ:
            self._record_launches()

    def _record_launches(self):
        from gpuaccel.compiler.kernel import Launch

        on_cpu = Launch.on_cpu

        def recorded(launch, *args, **options):
            self.kernels.setdefault(launch.kernel.name, {})[self.item] = None
            return on_cpu(launch, *args, **options)

        setattr(Launch, "on_cpu", recorded)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        kept = [item for item in items if item.nodeid not in self.skipped]
        kept = [item for item in kept if item.nodeid.split("[")[0] not in ABOUT_TEXT]
        if self.order:
            kept = [item for item in kept if item.nodeid in self.order]
            kept.sort(key=lambda item: self.order[item.nodeid])
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.item = item.nodeid
        if "MUTANTS_RECORD" in os.environ:
            import coverage

            coverage.Coverage.current().switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self):
        names = {name: list(tests) for name, tests in self.kernels.items()}
        result = {"seconds": self.seconds, "failed": self.failed, "kernels": names}
        pathlib.Path(os.environ["MUTANTS_RESULT"]).write_text(json.dumps(result))


def pytest_configure(config):
    if "MUTANTS_RESULT" in os.environ:
        config.pluginmanager.register(Plugin())


def _given(variable: str) -> list[str]:
    path = os.environ.get(variable)
    return json.loads(pathlib.Path(path).read_text()) if path else []


# ---- runs of the tests ---------------------------------------------------------------------------


class Copy:
    """A copy of the checkout in `folder`, in which mutants are planted and tests run."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.tree = folder, folder / "tree"
        shutil.rmtree(self.tree, ignore_errors=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for file in filter(None, files.split("\0")):
            if (ROOT / file).is_file():
                (self.tree / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, self.tree / file)

    def run(self, *command: str, limit: float | None = None, **variables) -> int | None:
        """The exit status, or None after `limit` seconds."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "GPUACCEL_CACHE": str(self.folder / "cache"),
            **variables,
        }
        with open(self.folder / "output.txt", "w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.tree,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # What it has started, too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def tests(self, paths, *options, only=(), skip=(), limit=None, **variables):
        """(what the plugin has written, exit status) of pytest over these paths."""
        result = self.folder / "result.json"
        result.write_text("{}")
        for name, names in (("MUTANTS_ONLY", only), ("MUTANTS_SKIP", skip)):
            if names:
                variables[name] = str(self.folder / f"{name}.json")
                pathlib.Path(variables[name]).write_text(json.dumps(list(names)))
        status = self.run(
            *("pytest", "-q", "-p", "mutants", "-p", "no:cacheprovider"),
            *(f"--timeout={TEST_HANGS}", *options, *paths),
            limit=limit,
            MUTANTS_RESULT=str(result),
            **variables,
        )
        return json.loads(result.read_text()), status


class Recording:
    """Which test runs which line and launches which kernel, from a run of the tests in `copy`."""

    def __init__(self, copy: Copy):
        digest = hashlib.sha256()
        for path in itertools.chain(*map(python_files, ROOMS), (ROOT / "kernels_cu").iterdir()):
            digest.update(path.read_bytes())
        kept = copy.folder / f"recording-{digest.hexdigest()[:16]}.json"
        if not kept.exists():
            kept.write_text(json.dumps(self._record(copy)))
        self.__dict__ |= json.loads(kept.read_text())

    def _record(self, copy: Copy) -> dict:
        import coverage

        settings = copy.folder / "coveragerc"
        include = ", ".join(f"{copy.tree}/gpuaccel/{room}/*" for room in ROOMS)
        settings.write_text(COVERAGE.format(include=include, folder=copy.folder))
        shutil.rmtree(copy.folder / "coverage", ignore_errors=True)
        start = {"COVERAGE_PROCESS_START": str(settings), "MUTANTS_RECORD": "1"}
        fast, _ = copy.tests(["tests"], "--fast", **start)
        rooms = [f"tests/{room}" for room in ROOMS]
        slow, _ = copy.tests(rooms, skip=fast["seconds"], **start)
        data = coverage.Coverage(config_file=str(settings))
        data.combine()
        lines = {}
        for room in ROOMS:
            for path in python_files(room):
                file = str(path.relative_to(ROOT))
                contexts = data.get_data().contexts_by_lineno(str(copy.tree / file))
                lines[file] = {
                    str(line): sorted({PHASE.sub("", test) for test in tests})
                    for line, tests in contexts.items()
                }
        kernels = {
            name: fast["kernels"].get(name, []) + slow["kernels"].get(name, [])
            for name in fast["kernels"] | slow["kernels"]
        }
        return {
            "lines": lines,  # file -> line -> tests; "": at import
            "kernels": kernels,  # kernel -> tests
            "fast": fast["seconds"],  # test -> seconds
            "slow": slow["seconds"],
            "failed": fast["failed"] + slow["failed"],  # without a mutant
        }

    def tests_of(self, mutant: Mutant) -> set[str]:
        """Names of tests that run it, or that started a process that does; "" for import."""
        if mutant.kernels:
            return set().union(*(self.kernels[name] for name in mutant.kernels))
        lines = self.lines[mutant.file]
        first, last = mutant.lines
        return set().union(*(lines.get(str(line), ()) for line in range(first, last + 1)))


def draw(recording: Recording, count: int, seed: int) -> list[Mutant]:
    """So many mutants, in turns from each room and of each kind, at most one of a line. Prints what
    is left out."""
    candidates, left_out = {}, {}
    for room in ROOMS:
        every = [m for path in python_files(room) for m in python_mutants(path)]
        candidates[room] = [m for m in every if recording.tests_of(m)]
        left_out[room] = len(every) - len(candidates[room])
    own = tuple(f"tests/{room}/" for room in ROOMS)
    launched = {
        k for k, tests in recording.kernels.items() if any(t.startswith(own) for t in tests)
    }
    candidates["kernels"], left_out["kernels"] = kernel_mutants(launched)
    for room, mutants in candidates.items():
        print(f"{room}: {len(mutants)} mutants; {left_out[room]} that no test runs here")
    chance = random.Random(seed)
    turns = []
    for mutants in candidates.values():
        by_kind: dict[str, list[Mutant]] = {}
        for mutant in chance.sample(mutants, len(mutants)):
            by_kind.setdefault(mutant.kind, []).append(mutant)
        turns.append(m for turn in itertools.zip_longest(*by_kind.values()) for m in turn if m)
    drawn: list[Mutant] = []
    for mutant in filter(None, itertools.chain(*itertools.zip_longest(*turns))):
        taken = (m.lines for m in drawn if m.file == mutant.file)
        if not any(a <= mutant.lines[1] and mutant.lines[0] <= b for a, b in taken):
            drawn.append(mutant)
        if len(drawn) == count:
            break
    return drawn


def _name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


class Trial:
    """Mutants against the tests, in a copy of the checkout."""

    def __init__(self, copy: Copy, recording: Recording):
        self.copy, self.recording = copy, recording

    @contextlib.contextmanager
    def planted(self, *mutants: Mutant):
        """From the last place of a file to the first, so that places stay true."""
        before = {m.file: (self.copy.tree / m.file).read_bytes() for m in mutants}
        for mutant in sorted(mutants, key=lambda m: -m.start):
            path = self.copy.tree / mutant.file
            text = _read(path)
            text = text[: mutant.start] + mutant.new + text[mutant.end :]
            path.write_text(text, encoding="latin-1")
        try:
            yield
        finally:
            for file, text in before.items():
                (self.copy.tree / file).write_bytes(text)

    def alone(self, mutant: Mutant, whole_room: bool) -> str:
        """What kills it of the fast tests that run it, those of its room and the quick ones first;
        of many tests one of each function. whole_room: then all fast tests of its room."""
        fast, failed = self.recording.fast, self.recording.failed
        names = [name for name in self.recording.tests_of(mutant) if name in fast]
        names.sort(key=lambda name: fast[name])
        if len(names) > MANY_TESTS:
            first: dict[str, str] = {}
            for name in names:
                first.setdefault(name.split("[")[0], name)
            names = [*first.values()]
        here = [name for name in names if name.startswith(mutant.folders)]
        others = [name for name in names if name not in here]
        with self.planted(mutant):
            return (
                self.first_failure(_files(here), "--fast", only=here, skip=failed)
                or self.first_failure(_files(others), "--fast", only=others, skip=failed)
                or whole_room
                and self.first_failure(mutant.folders, "--fast", skip=[*names, *failed])
                or ""
            )

    def together(self, mutants: list[Mutant], which: str) -> dict[Mutant, str]:
        """What kills each of these, of the fast tests, or of "all" others.

        One run meets them all; what fails there meets each of them alone."""
        skip = [*self.recording.failed, *(self.recording.fast if which == "all" else ())]
        options = ["--fast"] if which == "fast" else []
        with self.planted(*mutants):
            failed = self.copy.tests(["tests"], *options, skip=skip)[0]["failed"]
        killed = {}
        for mutant in mutants if failed else ():
            with self.planted(mutant):
                killed[mutant] = self.first_failure(_files(failed), only=failed)
        return killed

    def first_failure(self, paths, *options, **choice) -> str:
        """The test that fails first, or ""."""
        if not paths:
            return ""
        result, status = self.copy.tests(paths, "-x", *options, limit=RUN_HANGS, **choice)
        if result.get("failed"):
            return result["failed"][0]
        # 5: there was no test.
        return "" if status in (0, 5) else f"pytest ends with status {status}"

    def check(self, mutant: Mutant) -> str:
        """ruff and mypy, as in `make check`; not the layout, which mutants do not keep."""
        if mutant.kernels:
            return ""
        with self.planted(mutant):
            if self.copy.run("ruff", "check", "--quiet", mutant.file):
                return "ruff"
            return "mypy" if self.copy.run("mypy") else ""


def _files(tests) -> list[str]:
    return list(dict.fromkeys(name.split("::")[0] for name in tests))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=70, help="number of mutants (70)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the choice (1)")
    parser.add_argument("--all", action="store_true", help="also run slow tests")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutants, which run anew")
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=pathlib.Path(tempfile.gettempdir(), "gpuaccel-mutants"),
        help="for the copy, the recording and the results; an interrupted run goes on there",
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    copy = Copy(options.folder)
    recording = Recording(copy)
    mutants = draw(recording, options.count, options.seed)
    kept = options.folder / "killed.json"
    # mutant -> what has killed it, "" for a survivor
    results = json.loads(kept.read_text()) if kept.exists() else {}
    trial = Trial(copy, recording)

    def keep(killed: dict[Mutant, str], words: str):
        for mutant, by in killed.items():
            results[str(mutant)] = f"{words}: {by}" if by else ""
        kept.write_text(json.dumps(results, indent=1))

    for number, mutant in enumerate(mutants):
        if number in options.only if options.only else str(mutant) not in results:
            # What ranks run is recorded for the test that started them, not for all, and what
            # NVRTC compiles is not recorded.
            whole_room = bool(options.only) or mutant.room in ("distributed", "kernels")
            keep({mutant: trial.alone(mutant, whole_room)}, "fast")
            print(f"{number:3} {results[str(mutant)] or 'survives'}", flush=True)
    for words in () if options.only else ("fast", "all")[: 1 + options.all]:
        if survivors := [m for m in mutants if not results[str(m)]]:
            keep(trial.together(survivors, words), words)
        if words == "fast":
            keep({m: trial.check(m) for m in mutants if not results[str(m)]}, words)
    for number, mutant in enumerate(mutants):
        print(f"{number:3} {mutant}\n      {results.get(str(mutant)) or 'survives'}")
    killed = [results.get(str(mutant), "") for mutant in mutants]
    fast, every = sum(by.startswith("fast") for by in killed), sum(map(bool, killed))
    print(f"{fast} of {len(mutants)} are killed by the fast tests, {every} by all that were run")


if __name__ == "__main__":
    main()
