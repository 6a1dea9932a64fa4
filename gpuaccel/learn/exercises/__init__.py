"""The exercises of the notebooks: what one is, all of them, and how an answer is checked.

`EXERCISES` maps names to exercises; `check` takes a name."""

from .checking import SIZES, check
from .compile_errors import does_not_compile, find_slip
from .exercises import BLOCK, Case, Exercise, Turns
from .results import EXERCISES, Result, exercise

__all__ = [
    "BLOCK",
    "EXERCISES",
    "SIZES",
    "Case",
    "Exercise",
    "Result",
    "Turns",
    "check",
    "does_not_compile",
    "exercise",
    "find_slip",
]
