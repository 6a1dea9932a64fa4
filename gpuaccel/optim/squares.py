"""The squares that a gradient norm is made of: one sum per chunk of an arena's gradients, and which of these sums are up to date."""

import torch
from torch import Tensor

from ..ops import launch_squares


class ChunkSquares:
    """Each chunk's sum of squares of `arena.grads`; this object alone decides which of them are up to date.

    grads: (N,) fp32. grad_views: its slices, one per tensor. first_chunk: the first chunk of each tensor, and the number of chunks.
    `values`: (chunks,) fp64 on the device of grads.

    The window's last accumulation kernel (accumulate_v4) writes sums on its way, so that clipping need not read the gradients
    again; update() computes those that are missing. A torch operation on grads, or on a view of it, voids all of them: the
    tensor's version tells. Whoever writes to grads in a way that torch does not count (kernels, collectives, `.data`, NumPy)
    calls invalidate() or mark()."""

    def __init__(self, grads: Tensor, grad_views: "list[Tensor]", first_chunk: "list[int]"):
        self.values = torch.zeros(first_chunk[-1], dtype=torch.float64, device=grads.device)
        self._grads = grads
        self._grad_views = grad_views
        self._first_chunk = first_chunk
        self._current = [False] * len(grad_views)
        self._version = grads._version

    def _checked(self) -> "list[bool]":
        if self._version != self._grads._version:
            self._current = [False] * len(self._current)
            self._version = self._grads._version
        return self._current

    def current(self, first: int = 0, last: "int | None" = None) -> bool:
        """Are the sums of tensors [first, last) those of what grads holds now?"""
        return all(self._checked()[first:last])

    def mark(self, tensors, current: bool):
        """The sums of these tensors (numbers) have been written, or their gradients have changed."""
        flags = self._checked()
        for i in tensors:
            flags[i] = current

    def mark_all(self):
        """Every sum has been written."""
        self._current = [True] * len(self._current)
        self._version = self._grads._version

    def invalidate(self):
        """grads has been written by something that torch does not count: no sum is up to date."""
        self._current = [False] * len(self._current)

    def update(self):
        """Bring every sum up to date; reads only the gradients between the first and the last that are not."""
        flags = self._checked()
        if all(flags):
            return
        first = flags.index(False)
        last = len(flags) - flags[::-1].index(False)
        launch_squares(self._grad_views[first:last], self.values[self._first_chunk[first] :])
        self.mark_all()
