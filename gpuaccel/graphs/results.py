"""The results of a captured step: packed into one buffer, so that one copy hands them out."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import CaptureError

# Bytes. Each tensor in the buffer begins at a multiple of it.
_ALIGNMENT = 16


class ResultBuffer:
    """A tree of tensors, copied one behind the other into one buffer.

    Made inside the capture: the copies into the buffer are part of the graph. After a replay
    results() copies the buffer, and the caller's tensors are views of that copy.

    Raises:
        CaptureError: for a tree that holds anything but tensors, numbers, strings and None.
    """

    def __init__(self, tree, device):
        leaves, self._spec = tree_flatten(tree)
        # (bytes, dtype, shape) of a tensor; others do not change from replay to replay.
        self._entries: list[Any] = []
        end = 0
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._entries.append((slice(end, end + leaf.nbytes), leaf.dtype, leaf.shape))
                end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
            elif isinstance(leaf, (type(None), int, float, str)):
                self._entries.append(leaf)
            else:
                raise CaptureError(
                    f"the step returns a {type(leaf).__name__}; expected tensors, in tuples, "
                    "lists or dicts"
                )
        self._buffer = torch.empty(end, dtype=torch.uint8, device=device)
        for leaf, view in zip(leaves, self._leaves(self._buffer)):
            if isinstance(leaf, Tensor):
                view.copy_(leaf.detach())

    def _leaves(self, buffer) -> list:
        return [
            buffer[entry[0]].view(entry[1]).view(entry[2]) if isinstance(entry, tuple) else entry
            for entry in self._entries
        ]

    def results(self):
        """The tree with the newest values, in memory of its own."""
        return tree_unflatten(self._leaves(self._buffer.clone()), self._spec)
