"""Pairs of kernels for the tests of simt: a correct one, and the same with one mistake."""

import pathlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

import gpuaccel as ga


@dataclass(frozen=True)
class Case:
    """A correct kernel, called k.

    grid, block, shared: of the launch
    args: makes the arguments; the first one is the result
    result: makes what must be in it afterwards; None: the order of the threads decides
    change: (old, new) text; the kernel is wrong with the new one
    kinds: kinds of report that are right for the wrong kernel
    note: what the correct kernel's only note is
    """

    source: str
    grid: int
    block: int
    args: "Callable[[], tuple]"
    result: "Callable[[], torch.Tensor] | None"
    change: "tuple[str, str]"
    kinds: "tuple[str, ...]" = ("race",)
    note: "str | None" = None
    shared: int = 0


def launched(case: Case, source: str):
    """The first argument after a checked launch, and the texts of the warnings."""
    args = case.args()
    with warnings.catch_warnings(record=True) as caught, ga.use_backend("simt"):
        warnings.simplefilter("always")
        with ga.checked(seconds=20):
            ga.compile(source, "k")[case.grid, case.block, case.shared](*args)
    return args[0], [str(warning.message) for warning in caught]


def counts_on_page(table: str) -> "list[int]":
    """[planted, found] in the row of docs/kernels.md about a table of the tests."""
    page = pathlib.Path(__file__).parents[2] / "docs" / "kernels.md"
    (row,) = [line for line in page.read_text().splitlines() if f"`{table}`" in line]
    return [int(cell) for cell in row.split("|")[2:4]]
