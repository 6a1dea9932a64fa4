"""A batch as micro-batches: the pieces along dim 0 that a step goes through one by one.

[inputs.shape for inputs, targets in split((tokens, targets), 4)]
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, described


def split(batch, parts: int) -> list:
    """`batch` in pieces along dim 0, whose sizes differ by one at most, as torch.tensor_split.

    There are `parts` pieces, or one for each row where there are fewer rows. Each piece has all
    that has no rows: numbers, strings, None, () tensors, NumPy arrays. A list of tuples, lists or
    dicts is split already, into micro-batches that may differ in number and shape."""
    if is_split(batch):
        return batch
    rows = _rows(batch, "", {})
    if not rows:
        # Names tensors that stand elsewhere.
        _pieces(batch, 1)
        raise ArgumentError(
            "a batch is a tensor or a tuple, list or dict of tensors with rows in dim 0 "
            f"(torch.as_tensor makes one of an array); got {described(batch)}"
        )
    if len(set(rows.values())) > 1:
        raise ArgumentError(
            "the tensors of a batch must agree in dim 0, the number of sequences; got "
            + ", ".join(f"{count} in batch{name}" for name, count in rows.items())
        )
    count = next(iter(rows.values()))
    if count == 0:
        raise ArgumentError(
            "a batch of 0 rows has no micro-batch; expected 1 or more in dim 0 (of several ranks "
            "one without a batch calls step(None))"
        )
    return _pieces(batch, min(parts, count))


def _rows(value, name: str, rows: dict[str, int]) -> dict[str, int]:
    """rows, with place in the batch -> dim 0 of each tensor that has rows."""
    if isinstance(value, Tensor):
        if value.dim():
            rows[name] = len(value)
    elif isinstance(value, (tuple, list, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _rows(item, f"{name}[{key!r}]", rows)
    return rows


def _pieces(value, parts: int) -> list:
    if isinstance(value, Tensor) and value.dim():
        return list(torch.tensor_split(value, parts))
    if isinstance(value, dict):
        columns = {key: _pieces(item, parts) for key, item in value.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(parts)]
    if isinstance(value, (tuple, list)):
        pieces = [_pieces(item, parts) for item in value]
        return [_like(value, [column[i] for column in pieces]) for i in range(parts)]
    items: Iterable[Any] = getattr(value, "__dict__", {}).values()
    if isinstance(value, (set, frozenset, deque)):
        items = value
    if any(isinstance(item, Tensor) for item in items):
        raise ArgumentError(
            f"the batch holds {described(value)}, whose tensors would not be split; expected "
            "tensors in tuples, lists and dicts"
        )
    return [value] * parts


def _like(value: tuple | list, items: list):
    """The items in a tuple or list of the kind of `value`."""
    # A named tuple has its fields as arguments.
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def with_dicts(batch):
    """The batch with dicts in the place of other mappings, such as transformers' BatchEncoding."""
    if isinstance(batch, Mapping):
        return {key: with_dicts(item) for key, item in batch.items()}
    if isinstance(batch, (tuple, list)):
        return _like(batch, [with_dicts(item) for item in batch])
    return batch


def is_split(batch) -> bool:
    """Is it a list of micro-batches, rather than one batch?"""
    return (
        isinstance(batch, list)
        and len(batch) > 0
        and all(isinstance(micro, (tuple, list, dict)) for micro in batch)
    )
