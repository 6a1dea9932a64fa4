"""Names and lines as CONTRIBUTING.md asks: the table "Words", and 100 columns."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COLUMNS = 100


def files(folder, *patterns):
    """The files of a folder of the repository, in order; a checkout without it has none."""
    return sorted(path for pattern in patterns for path in (ROOT / folder).rglob(pattern))


def refused_words():
    """The table "Words" of CONTRIBUTING.md: (refused everywhere, refused in benchmarks/)."""
    page = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Words\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    everywhere, in_benchmarks = set(), set()
    for say, refused in rows[2:]:
        words = re.findall(r"`([^`]+)`", refused)
        in_benchmarks.update(words)
        if "(benchmarks)" not in say:
            everywhere.update(words)
    return everywhere, in_benchmarks


def names(tree):
    """(line, name) of what a syntax tree defines: classes, functions, arguments, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                match statement:
                    case ast.AnnAssign(target=ast.Name(id=name)):
                        yield statement.lineno, name
                    case ast.Assign(targets=targets):
                        for target in targets:
                            if isinstance(target, ast.Name):
                                yield statement.lineno, target.id


def misnamed(path, refused):
    """One line of text for each name in a module that the table refuses."""
    where = path.relative_to(ROOT)
    lines = [f"{where}: module {path.stem}"] if path.stem in refused else []
    for line, name in names(ast.parse(path.read_text())):
        if name in refused:
            lines.append(f"{where}:{line}: {name}")
    return lines


def test_table_of_words_is_read():
    everywhere, in_benchmarks = refused_words()
    assert {"lay_down", "owners", "nth"} <= everywhere < in_benchmarks
    assert all(word.isidentifier() for word in in_benchmarks)


def test_every_kind_of_name_is_seen():
    source = """
class A:
    b: int
    c = 0
    def d(self, e, *f, g=0, **h):
        self.i = self.j[0] = local = e.read
        async def k(): pass
"""
    defined = {name for _, name in names(ast.parse(source))}
    assert defined == {"A", "b", "c", "d", "self", "e", "f", "g", "h", "i", "k"}


@pytest.mark.parametrize("folder", ["gpuaccel", "benchmarks"])
def test_no_name_is_a_refused_word(folder):
    refused = refused_words()[folder == "benchmarks"]
    lines = [line for path in files(folder, "*.py") for line in misnamed(path, refused)]
    assert not lines, "Named by a word of the right column of the table:\n" + "\n".join(lines)


def test_no_line_is_longer_than_100_columns():
    sources = (
        files("gpuaccel", "*.py", "*.h", "*.cpp")
        + files("kernels_cu", "*.cu", "*.cuh")
        + files("benchmarks", "*.py")
        + files("tests", "*.py")
        + sorted((ROOT / "docs").glob("*.py"))
    )
    long_lines = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS and "://" not in line
    ]
    assert not long_lines, "\n".join(long_lines)
