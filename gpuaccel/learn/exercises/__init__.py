"""The exercises of the notebooks: what one is, all of them, and how an answer is checked.

`EXERCISES` maps names to exercises; `check` takes a name."""

from .checking import ARCHS, SIZES, check
from .exercises import BLOCK, Case, Exercise, Turns
from .results import EXERCISES, Folded, Result, exercise

__all__ = [
    "ARCHS",
    "BLOCK",
    "EXERCISES",
    "SIZES",
    "Case",
    "Exercise",
    "Folded",
    "Result",
    "Turns",
    "check",
    "exercise",
]
