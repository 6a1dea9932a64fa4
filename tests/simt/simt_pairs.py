"""What tests of simt share: pairs of kernels, one correct and one with a mistake; launches."""

import math
import os
import pathlib
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch

import gpuaccel as ga


@dataclass(frozen=True)
class Case:
    """A correct kernel, called k, and the same with a mistake.

    text: of both: {{right => wrong}} where they differ; {{right}}: it is missing in the wrong one
    args: makes the arguments; the first one is the result
    result: makes what must be in it afterwards
    kinds: kinds of report that are right for the wrong kernel
    grid, block, shared: of the launch
    note: what the correct kernel's only note is
    """

    text: str
    args: Callable[[], tuple]
    result: Callable[[], torch.Tensor]
    kinds: tuple[str, ...] = ("race",)
    grid: int = 1
    block: int | tuple[int, int] = 64
    shared: int = 0
    note: str | None = None

    @property
    def source(self) -> str:
        return DIFFERENCE.sub(lambda m: m[1], self.text)

    @property
    def wrong_source(self) -> str:
        return DIFFERENCE.sub(lambda m: m[2] or "", self.text)


DIFFERENCE = re.compile(r"\{\{(.*?)(?: => (.*?))?\}\}(?!\})", re.DOTALL)


def with_mistake(source: str, right: str, wrong: str) -> str:
    """The text of a case, from that of a kernel that several cases share."""
    assert right in source
    return source.replace(right, f"{{{{{right} => {wrong}}}}}")


def launched(case: Case, source: str):
    """The first argument after a checked launch, and the texts of the warnings."""
    args = case.args()
    with warnings.catch_warnings(record=True) as caught, ga.use_backend("simt"):
        warnings.simplefilter("always")
        with ga.checked(seconds=20):
            ga.compile(source, "k")[case.grid, case.block, case.shared](*args)
    return args[0], [str(warning.message) for warning in caught]


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def mistakes(source, *args, name="k", grid=1, block=32, shared=0, tensors=()):
    """The reports of a checked launch; an empty list if it has none."""
    with ga.use_backend("simt"), ga.checked(seconds=60):
        try:
            ga.compile(source, name)[grid, block, shared](*args, tensors=tensors)
        except ga.errors.KernelError as error:
            return error.reports
    return []


def run(source, *args, grid=1, block=32, shared=0, **compiling):
    """Launch on copies of the tensors; those copies."""
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    ga.compile(source, **compiling)[grid, block, shared](*copies)
    return [a for a in copies if isinstance(a, torch.Tensor)]


def check_bits(got, expected, what=""):
    """Equal bit for bit; but one NaN is as good as another."""
    if got.is_floating_point():
        nan = expected.isnan()
        assert torch.equal(nan, got.isnan()), what
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        got, expected = got.view(kind)[~nan], expected.view(kind)[~nan]
    wrong = (got != expected).nonzero().flatten()
    assert not len(wrong), (
        f"{what}: {len(wrong)} differ, first at {wrong[0]}: {got[wrong[0]]}, expected "
        f"{expected[wrong[0]]}"
    )


ROUND = {"rn": round, "rz": math.trunc, "ru": math.ceil, "rd": math.floor}
# Binary digits behind the point and the lowest exponent of a normal number.
FORMATS = {"half": (10, -14), "bf16": (7, -126), "float": (23, -126), "double": (52, -1022)}


def rounded(exact: Fraction, kind: str, direction="rn") -> float:
    """The number of a format next to an exact one, in a direction."""
    digits, lowest = FORMATS[kind]
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, lowest) - digits)
    result = ROUND[direction](exact / step) * step
    highest = (2 - Fraction(1, 2**digits)) * Fraction(2) ** (1 - lowest)
    if abs(result) > highest:
        to_limit = direction == "rz" or direction == ("rd" if exact > 0 else "ru")
        return math.copysign(float(highest) if to_limit else math.inf, exact)
    return float(result)


def python(code, **environment):
    """Run this code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )


def counts_on_page(table: str) -> list[int]:
    """[planted, found] in the row of CONTRIBUTING.md about a table of the tests."""
    page = pathlib.Path(__file__).parents[2] / "CONTRIBUTING.md"
    (row,) = [line for line in page.read_text().splitlines() if f"`{table}`" in line]
    return [int(cell) for cell in row.split("|")[2:4]]
