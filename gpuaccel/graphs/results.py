"""The results of a captured step: packed into one buffer, so that one copy hands them out."""

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
        leaves, self.spec = tree_flatten(tree)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, type(None), int, float, str)):
                raise CaptureError(
                    f"the step returns a {type(leaf).__name__}; expected tensors, in tuples, "
                    "lists or dicts"
                )
        # Leaves that are no tensors do not change from replay to replay.
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # (first byte, bytes, dtype, shape) of each tensor.
        self.layout = []
        end = 0
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self.layout.append(None)
                continue
            size = leaf.numel() * leaf.element_size()
            self.layout.append((end, size, leaf.dtype, leaf.shape))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.buffer = torch.empty(end, dtype=torch.uint8, device=device)
        for leaf, view in zip(leaves, self._views(self.buffer)):
            if view is not None:
                view.copy_(leaf.detach())

    def _views(self, buffer) -> list[Tensor | None]:
        views: list[Tensor | None] = []
        for entry in self.layout:
            if entry is None:
                views.append(None)
            else:
                start, size, dtype, shape = entry
                views.append(buffer[start : start + size].view(dtype).view(shape))
        return views

    def results(self):
        """The tree with the newest values, in memory of its own."""
        views = self._views(self.buffer.clone())
        leaves = [
            constant if view is None else view for view, constant in zip(views, self.constants)
        ]
        return tree_unflatten(leaves, self.spec)
