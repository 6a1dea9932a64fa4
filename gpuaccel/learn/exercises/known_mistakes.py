"""Which known mistake a wrong answer makes: it does the same as that wrong answer of its exercise.

    known_mistake(exercise("ring_sum"), function, lambda answer: [...])      # "a round too many"

What an answer does are its results on a few trials, or in words why there is none. Nothing is said
where no wrong answer does the same, or several do, or where the answer does what the stub does.
"""

from collections.abc import Callable

import torch

# The share of a result's largest element by which two answers that do the same may differ.
ROUNDING = 1e-5


def known_mistake(task, answer, make: Callable[[dict[str, str]], dict], do: Callable) -> str:
    """A sentence on the one known mistake that an answer makes, or "".

    Args:
        make: make(sources) -> answers, by the same keys.
        do: do(answer) -> what it does: a tensor for each trial, or words.
    """
    mine = do(answer)
    answers = make({"": task.stub, **task.wrong_answers})
    theirs = {what: do(other) for what, other in answers.items()}
    for rounding in (0.0, ROUNDING):
        alike = [
            what
            for what, results in theirs.items()
            if all(_alike(a, b, rounding) for a, b in zip(mine, results, strict=True))
        ]
        if len(alike) == 1:
            return f" A known mistake: {alike[0]}." if alike[0] else ""
    return ""


def _alike(mine, other, rounding) -> bool:
    """Whether two results are the same: words, or tensors up to a share of the largest element."""
    if isinstance(mine, str) or isinstance(other, str):
        return type(mine) is type(other) and mine == other
    mine, other = mine.double(), other.double()
    allowed = rounding * float(other.nan_to_num(0.0, 0.0, 0.0).abs().max())
    same_shape = mine.shape == other.shape
    return same_shape and torch.allclose(mine, other, rtol=0.0, atol=allowed, equal_nan=True)
