"""Mutation testing: small mistakes are planted in the code, and the tests have to notice each.

>>> python tests/mutants.py                  # 70 mutants against the fast tests of their rooms
>>> python tests/mutants.py --rooms nn       # of one room
>>> python tests/mutants.py --only 12 40     # these again: number as printed

The mutants are drawn, with a seed, in turns from each room and of each kind: a sign, a bound, a
negated condition, a constant, a statement that is removed, swapped arguments, another value
returned. Messages, docstrings and types are not changed, nor lines that the fast tests of the room
do not run, in their ranks either (coverage.py): without a GPU the code of streams, NCCL and
captures. A mutant is planted in a copy of the checkout, and meets ruff, mypy and the fast tests of
its room. The first failure kills it.

Kernels have mutants of their own, in tests/simt/test_simt_checks.py. mutmut and cosmic-ray know no
sample with a seed, and would take days.
"""

import argparse
import ast
import contextlib
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

ROOT = pathlib.Path(__file__).parents[1]
ROOMS = ("optim", "ops", "graphs", "distributed")


def tests_of(room: str) -> list[str]:
    """The folders of its tests. Operations are also tested by the optimizers and layers on them."""
    return [f"tests/{name}" for name in ((room, "optim", "nn") if room == "ops" else (room,))]


# Seconds until a run of the tests counts as hanging.
HANGS = 1800

# kind, start and end in the text, text in its place
Edit = tuple[str, int, int, str]


@dataclass(frozen=True)
class Mutant:
    file: str  # relative to the checkout
    start: int  # the characters from here to `end` are replaced
    end: int
    new: str
    kind: str
    lines: tuple[int, int]  # first and last line of its statement

    @property
    def room(self) -> str:
        return self.file.split("/")[1]

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
    "negated": [
        (r" == ", " != "),
        (r" != ", " == "),
        (r" and ", " or "),
        (r" or ", " and "),
        (r" is not ", " is "),
    ],
    "constant": [
        (r"(?<![\w.])\d+(?![\w.])", lambda m: str(int(m[0]) + 1)),
        (r"(?<![\w.])\d+\.\d*\b", lambda m: str(float(m[0]) + 1)),
        (r"\bTrue\b", "False"),
        (r"\bFalse\b", "True"),
    ],
    "swapped": [
        (rf"({WORD})( - | / | // | % )({WORD})", r"\3\2\1"),
        (rf"(?:(?<=[(,] )|(?<=\w\())({WORD}), ({WORD})(?=[,)])", r"\2, \1"),
    ],
}
# Of what these are given nothing is changed: people read it, or it is about time alone.
UNCHANGED = re.compile(
    r"(\w+\.)*(\w*(Error|Warning)|warn|print)|log\.\w+|time\.sleep|non_blocking|priority"
)
NOTHING = ("None", "False")
HIDDEN = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


def edits(code: str) -> Iterator[Edit]:
    """The edits of this text, by pattern."""
    for kind, patterns in EDITS.items():
        for pattern, new in patterns:
            for m in re.finditer(pattern, code):
                text = new(m) if callable(new) else m.expand(new)
                if text != m[0]:
                    yield kind, m.start(), m.end(), text


def mutants_of(path: pathlib.Path) -> Iterator[Mutant]:
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
        if isinstance(node, ast.Call) and UNCHANGED.fullmatch(code_of(node.func)):
            hidden.append(node)
        elif isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
            hidden.append(node)
        elif isinstance(node, ast.keyword) and UNCHANGED.fullmatch(node.arg or ""):
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
    for kind, start, end, new in itertools.chain(found, edits(code)):
        line = text.count("\n", 0, start) + 1
        if line in spans and not any(a <= start < b for a, b in places):
            yield Mutant(str(path.relative_to(ROOT)), start, end, new, kind, spans[line])


def _read(path: pathlib.Path) -> str:
    """One character for each byte, as ast counts."""
    return path.read_text(encoding="latin-1")


def _blank(text: str, start: int, end: int) -> str:
    return text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]


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

    def run(self, *command: str) -> int | None:
        """The exit status of `python -m ...`, or None where it hangs."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "GPUACCEL_CACHE": str(self.folder / "cache"),
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
                return process.wait(HANGS)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # What it has started, too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def lines_that_run(self, room: str) -> dict[str, set[int]]:
        """File -> its lines that the fast tests of the room run."""
        settings, report = self.folder / "coverage.ini", self.folder / "coverage.json"
        settings.write_text(
            f"""[run]
            data_file = {self.folder}/coverage-{room}
            include = {self.tree}/gpuaccel/{room}/*
            concurrency = multiprocessing, thread
            parallel = true
            patch = _exit
            """
        )
        rc = f"--rcfile={settings}"
        if self.run("coverage", "run", rc, "-m", "pytest", "-q", "--fast", *tests_of(room)):
            output = (self.folder / "output.txt").read_text()
            raise SystemExit(f"the tests fail without a mutant:\n{output[-4000:]}")
        self.run("coverage", "combine", rc, "-q")
        self.run("coverage", "json", rc, "-q", "-o", str(report))
        files = json.loads(report.read_text())["files"]
        return {name: set(file["executed_lines"]) for name, file in files.items()}

    def killer(self, mutant: Mutant) -> str:
        """What notices the mutant, or ""."""
        path = self.tree / mutant.file
        before, text = path.read_bytes(), _read(path)
        text = text[: mutant.start] + mutant.new + text[mutant.end :]
        path.write_text(text, encoding="latin-1")
        try:
            if self.run("ruff", "check", "--quiet", mutant.file):
                return "ruff"
            if self.run("mypy"):
                return "mypy"
            status = self.run("pytest", "-q", "-x", "--fast", *tests_of(mutant.room))
        finally:
            path.write_bytes(before)
        if status is None:
            return "a test hangs"
        output = (self.folder / "output.txt").read_text()
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return "" if not status else failed[1] if failed else f"pytest ends with status {status}"


def draw(copy: Copy, rooms, count: int, seed: int) -> list[Mutant]:
    """So many mutants, in turns from each room and of each kind, at most one of a line."""
    turns = []
    for room in rooms:
        # Of its own, so that a change of one room changes no other room's mutants.
        chance = random.Random(f"{seed} {room}")
        executed = copy.lines_that_run(room)
        every = [
            m for path in sorted((ROOT / "gpuaccel" / room).glob("*.py")) for m in mutants_of(path)
        ]
        run = [
            m for m in every if executed.get(m.file, set()) & set(range(m.lines[0], m.lines[1] + 1))
        ]
        print(f"{room}: {len(run)} mutants; {len(every) - len(run)} that no fast test runs here")
        by_kind: dict[str, list[Mutant]] = {}
        for mutant in chance.sample(run, len(run)):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=70, help="number of mutants (70)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the choice (1)")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, help="folders of gpuaccel/")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutants, which run alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuaccel-mutants-") as folder:
        copy = Copy(pathlib.Path(folder))
        mutants = draw(copy, options.rooms, options.count, options.seed)
        numbers = options.only or range(len(mutants))
        killed = 0
        for number in numbers:
            by = copy.killer(mutants[number])
            killed += bool(by)
            print(f"{number:3} {mutants[number]}\n      {by or 'survives'}", flush=True)
        print(f"{killed} of {len(numbers)} are killed")


if __name__ == "__main__":
    main()
