"""A batch as micro-batches: the pieces along dim 0 that a step goes through one by one.

[inputs.shape for inputs, targets in split((tokens, targets), 4)]
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import ArgumentError


def split(batch, parts: int) -> list:
    """`batch` in `parts` pieces along dim 0, whose sizes differ by one at most.

    Args:
        batch: a tensor, or a tuple, list or dict of tensors. A list of tuples, lists or dicts is
            split already, into micro-batches that may differ in number and shape; it is returned as
            it is.

    Raises:
        ArgumentError: when the tensors disagree in dim 0, or there are fewer rows than pieces.
    """
    if is_split(batch):
        return batch
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or batch.shape[0] < parts:
            raise ArgumentError(
                f"a batch of shape {tuple(batch.shape)} cannot be split into {parts} "
                "micro-batches along dim 0"
            )
        return list(torch.tensor_split(batch, parts))
    if not isinstance(batch, (tuple, list, dict)) or not batch:
        raise ArgumentError(
            f"a batch is a tensor or a tuple, list or dict of tensors; got {type(batch).__name__}"
        )
    items = dict(batch.items() if isinstance(batch, dict) else enumerate(batch))
    rows = {key: len(t) if isinstance(t, Tensor) and t.dim() else None for key, t in items.items()}
    if len(set(rows.values())) > 1 or None in rows.values():
        raise ArgumentError(
            f"the tensors of a batch must agree in dim 0, the number of sequences; got {rows}"
        )
    micros = zip(*[split(t, parts) for t in items.values()])
    if isinstance(batch, dict):
        return [dict(zip(batch, micro)) for micro in micros]
    if hasattr(batch, "_fields"):  # a named tuple
        return [type(batch)(*micro) for micro in micros]
    return [type(batch)(micro) for micro in micros]


def with_dicts(batch):
    """The batch with dicts in the place of other mappings, such as transformers' BatchEncoding.

    Args:
        batch: any, or a list of micro-batches.
    """
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return dict(batch)
    return [with_dicts(micro) for micro in batch] if type(batch) is list else batch


def is_split(batch) -> bool:
    """Is it a list of micro-batches, rather than one batch?"""
    return (
        isinstance(batch, list)
        and len(batch) > 0
        and all(isinstance(micro, (tuple, list, dict)) for micro in batch)
    )


def rows_of(micro) -> int:
    """How many sequences a micro-batch has: dim 0 of its first tensor; 0 without one."""
    tensors = (leaf for leaf in tree_leaves(micro) if isinstance(leaf, Tensor) and leaf.dim())
    return next((len(t) for t in tensors), 0)
