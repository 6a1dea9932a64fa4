"""Recorded runs of benchmarks/results, beside what a reader measures here.

    run = recorded.recorded("accumulate") # the result of benchmarks/accumulate.py
    run.label                             # "Recorded, not run here: NVIDIA H200, ..."
    run.get("addition", "elements")       # a value of the results; None where the file has none
    recorded.ledger("01", book)           # one's own ledger, and that of a recorded run

Where there is no recording, a table says so.
"""

import json
import pathlib
from typing import Literal

import torch

from ..backends import backend
from ..errors import check_choice
from ..measure import Ledger, Row

ABSENT = "no recorded run in this checkout"


class Recorded:
    """One result file.

    exists: whether there is one. label: in words, what it is. content: its JSON."""

    def __init__(self, benchmark: str, content: "dict | None"):
        self.benchmark = benchmark
        self.exists = content is not None
        self.content = content or {}
        facts = [str(self.content[key]) for key in ("gpu", "date") if key in self.content]
        if "torch" in self.content:
            facts.append(f"torch {self.content['torch']}")
        machine = ", ".join(facts) or "no facts about the machine"
        self.label = f"{benchmark}: {ABSENT}"
        if self.exists:
            self.label = f"Recorded, not run here: {machine}"

    def get(self, *keys):
        """The value under these keys of the results, or None."""
        value = self.content.get("results")
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def __repr__(self):
        return self.label


def results_folder() -> pathlib.Path:
    """benchmarks/results of the checkout that this package is part of (it need not exist)."""
    return pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def result_paths(
    benchmark: str = "*", folder: "pathlib.Path | None" = None
) -> "list[pathlib.Path]":
    """The result files of a benchmark, one for each GPU: <folder>/<gpu>/<benchmark>.json.

    Args:
        benchmark: name of the file, e.g. "step" or "ddp_2gpus"; default: every benchmark.
        folder: default: results_folder().
    """
    return sorted((folder or results_folder()).glob(f"*/{benchmark}.json"))


def recorded(benchmark: str, gpu: "str | None" = None) -> Recorded:
    """The result of benchmarks/<benchmark>.py; a damaged file counts as none.

    Where several GPUs have one, it is that of the GPU with most results, so that the pictures of
    the notebooks and their sentences are of one GPU; among equals the newest.

    Args:
        benchmark: name of the file.
        gpu: only of this GPU. Default: of any.
    """
    contents = []
    for path in result_paths(benchmark):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and gpu in (None, content.get("gpu")):
            results = len(list(path.parent.glob("*.json")))
            contents.append((results, str(content.get("date", "")), content))
    best = max(contents, key=lambda choice: choice[:2], default=(0, "", None))
    return Recorded(benchmark, best[2])


# ---- ledgers of the notebooks -------------------------------------------------------------------

# Notebooks of which a ledger may be recorded.
Notebook = Literal["01", "02", "03", "04", "05", "07"]


class Ledgers:
    """Ledgers, one below the other, each with a sentence that tells what machine it is from."""

    def __init__(self, parts):
        self.parts = list(parts)  # a Ledger, or a sentence where there is none

    def __str__(self):
        return "\n\n".join(map(str, self.parts))

    __repr__ = __str__

    def _repr_html_(self):
        return "".join(
            part._repr_html_()
            if isinstance(part, Ledger)
            else f'<p style="margin:10px 14px">{part}</p>'
            for part in self.parts
        )


def ledger(notebook: Notebook, own: "Ledger | None" = None) -> Ledgers:
    """The ledger rows of a notebook as they were recorded on a GPU.

    Args:
        notebook: "01", "02", "03", "04", "05" or "07".
        own: the rows that were measured here; they are shown above.
    """
    check_choice("notebook", notebook, Notebook)
    parts: "list[Ledger | str]" = []
    if own is not None:
        here = Ledger(_measured_here())
        here.rows = list(own.rows)
        parts.append(here)
    run = recorded("rungs")
    rows = recorded_rows(notebook)
    if not rows:
        parts.append("Nothing is recorded for this table.")
        return Ledgers(parts)
    what = run.get(notebook, "what")
    table = Ledger(f"{run.label}. {what}." if what else f"{run.label}.")
    for name, values in rows.items():
        row = Row(
            name,
            launches=values.get("launches"),
            graph_launches=values.get("graph_launches"),
            syncs=values.get("syncs"),
            copies={k: tuple(v) for k, v in (values.get("copies") or {}).items()},
        )
        measured_beside = (values.get(key) for key in ("tokens_per_s", "max_diff", "bit_equal"))
        table.add(row, *measured_beside)
    parts.append(table)
    return Ledgers(parts)


def recorded_rows(notebook: str) -> "dict[str, dict]":
    """Name -> values of each row that was recorded for a notebook; {} for none."""
    return _dicts(recorded("rungs").get(notebook, "rows"))


def _measured_here() -> str:
    """A sentence on the machine of one's own rows."""
    if torch.cuda.is_available() and backend().policy != "off":
        return f"Measured here, on this machine: {torch.cuda.get_device_name()}."
    return (
        "Measured here, on this machine: a CPU. Its speeds say little about a GPU, and its columns "
        "are others, because nothing is launched or copied."
    )


def _dicts(values) -> dict:
    """The items of a dictionary whose values are dictionaries; {} for anything else."""
    items = values.items() if isinstance(values, dict) else ()
    return {name: value for name, value in items if isinstance(value, dict)}
