"""What checks of answers, and of kernels in the place of ours, say alike."""

from torch import Tensor

from .figures.drawing import plural


def number(value: Tensor, digits: int = 7) -> str:
    """An element of a tensor; a whole number with all its digits."""
    item = value.item()
    return f"{item:,}" if isinstance(item, int) else f"{item:.{digits}g}"


def first_wrong(
    result: Tensor, expected: Tensor, differing: Tensor, digits: int = 7, got: str = ""
) -> str:
    """How many elements are wrong, and the first one.

    Args:
        differing: for each element whether it is wrong.
        digits: of each number.
        got: what the first one is, in words. Default: its value.
    """
    places = differing.nonzero()
    first = tuple(places[0].tolist())
    got = got or f"got {number(result[first], digits)}"
    words = f"{got}, expected {number(expected[first], digits)}"
    if not first:
        return f"wrong: {words}"
    index = ", ".join(f"{i:,}" for i in first)
    return f"{plural(len(places), 'element')} wrong; the first is [{index}]: {words}"


def is_rounding(difference: Tensor, expected: Tensor, allowed: float) -> bool:
    """Whether a result differs from a typical element by at most this much of it, everywhere."""
    size = expected.abs()
    return bool((difference <= allowed * size.clamp(min=float(size.mean()))).all())
