"""The sums of squares behind a gradient norm: one per chunk of an arena's gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..ops import launch_squares, launches_for, tensors_of_launch


class ChunkSquares:
    """Each chunk's sum of squares of `arena.grads`, and which of these sums are up to date.

    `values`: (chunks,) fp64 on the device of grads.

    The window's last accumulation kernel (accumulate_v4) also writes the sums, so that clipping
    need not read the gradients again. update() computes those that are out of date. A torch
    operation on grads, or on a view of it, voids all sums: the tensor's version tells. After a
    write that torch does not count (by kernels, collectives, `.data` or NumPy) call invalidate() or
    mark().

    Args:
        grads: (N,) fp32.
        grad_views: its slices, one per tensor.
        first_chunk: the first chunk of each tensor; at the end the number of chunks.
    """

    def __init__(self, grads: Tensor, grad_views: "list[Tensor]", first_chunk: "list[int]"):
        self.values = torch.zeros(first_chunk[-1], dtype=torch.float64, device=grads.device)
        self._grads = grads
        self._grad_views = grad_views
        self._first_chunk = first_chunk
        self._current = [False] * len(grad_views)
        self._seen_version = grads._version

    def _current_flags(self) -> "list[bool]":
        """Of each tensor: are its sums up to date? All are not, after a torch operation on
        grads."""
        if self._seen_version != self._grads._version:
            self._current = [False] * len(self._current)
            self._seen_version = self._grads._version
        return self._current

    def current(self, first: int = 0, last: "int | None" = None) -> bool:
        """Are the sums of tensors [first, last) up to date?"""
        return all(self._current_flags()[first:last])

    def mark(self, tensors: "Iterable[int]", current: bool):
        """Declare the sums of these tensors (indices) up to date, or out of date."""
        flags = self._current_flags()
        for i in tensors:
            flags[i] = current

    def mark_all(self):
        """Declare every sum up to date."""
        self._current = [True] * len(self._current)
        self._seen_version = self._grads._version

    def invalidate(self):
        """Declare every sum out of date, after a write to grads that torch does not count."""
        self._current = [False] * len(self._current)

    def update(self):
        """Compute the sums that are out of date, and those of the tensors between them."""
        flags = self._current_flags()
        if all(flags):
            return
        first = flags.index(False)
        last = len(flags) - flags[::-1].index(False)
        views = self._grad_views[first:last]
        # One kernel for any range: a capture may need another range than the steps before it.
        launches = launches_for(views, tensors_of_launch(len(flags)))
        launch_squares(views, self.values[self._first_chunk[first] :], launches=launches)
        self.mark_all()
