"""The notebooks as text: short cells, few words, nothing stored of one machine. Running them is
nbval's part."""

import ast
import pathlib
import re

import pytest

nbformat = pytest.importorskip("nbformat")
from gpuaccel.learn import EXERCISES  # noqa: E402

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
TIMES = re.compile(r"perf_counter|time\.time|tokens_per_s|tok/s|seconds|milliseconds|elapsed")


@pytest.fixture(params=PATHS, ids=lambda p: p.stem)
def notebook(request):
    book = nbformat.read(request.param, as_version=4)
    nbformat.validate(book)
    return book


def code(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def marked(book):
    return [cell for cell in code(book) if "nbval-check-output" in cell.metadata.get("tags", ())]


def python(cell):
    """The cell's Python without lines that only IPython reads; "" for a cell of CUDA C."""
    return (
        ""
        if cell.source.startswith("%%")
        else "\n".join(line for line in cell.source.split("\n") if not line.startswith("%"))
    )


def test_notebooks_are_numbered_from_zero_or_on_the_shelf():
    numbers = [path.stem[:2] for path in PATHS if not path.stem.startswith("shelf_")]
    assert numbers == [f"{i:02d}" for i in range(len(numbers))]
    assert len(numbers) >= 7


def test_cells_are_short(notebook):
    long = [cell.source for cell in code(notebook) if len(cell.source.split("\n")) > 20]
    assert not long, long[0]
    wide = [line for cell in code(notebook) for line in cell.source.split("\n") if len(line) > 105]
    assert not wide, f"wider than a page of JupyterLab: {wide[0]}"


def test_the_text_is_long_enough_to_teach(notebook):
    words = sum(
        len(re.findall(r"[A-Za-z0-9']+", cell.source))
        for cell in notebook.cells
        if cell.cell_type == "markdown"
    )
    assert words >= 500


def test_every_code_cell_is_python_or_cuda(notebook):
    for cell in code(notebook):
        ast.parse(python(cell))


def test_cells_that_are_compared_print_facts_and_no_times(notebook):
    assert marked(notebook)
    for cell in marked(notebook):
        assert not TIMES.search(cell.source), cell.source
        for output in cell.outputs:
            shown = output.get("text") or output.get("data", {}).get("text/plain", "")
            assert not re.search(r"\d\s*(ms|us|s|GB/s|tok/s)\b", shown), shown


def test_no_widget_state_path_or_error_is_stored(notebook):
    assert "widgets" not in notebook.metadata
    for cell in code(notebook):
        for output in cell.outputs:
            assert output.output_type != "error"
            stored = str(dict(output))
            assert "jupyter.widget-view" not in stored, (
                "a live view without its kernel shows an error: store its picture only"
            )
            assert not re.search(r"(?<![\w.~])/(home|root|work|opt|tmp|usr)/", stored), (
                f"a path of one machine is stored: {stored[:300]}"
            )


def test_every_exercise_is_checked_in_a_notebook():
    text = "\n".join(
        cell.source for path in PATHS for cell in code(nbformat.read(path, as_version=4))
    )
    for name in EXERCISES:
        assert f'ga.check("{name}"' in text or f"%%cuda --check {name}\n" in text, name


def test_first_cells_say_what_runs_and_last_ones_what_to_remember(notebook):
    assert "ga.doctor()" in "".join(
        c.source for c in code(notebook)[:2]
    ) or "ga.backend()" in "".join(c.source for c in code(notebook)[:2])
    assert notebook.cells[-1].source.startswith("## What to remember")
