"""Sending gradients while a compiled backward runs: torch.compile's backward is one node of autograd, whose hooks run when all of it is over.

What can be seen inside of it are the products of mode "fused" (nn/fused_linear.py): they are most of the bytes, and each says when it has been added.
What a bucket has beside them (norms, biases) comes at the end; its own sums are kept apart for the last backward, added up over the ranks in one
message behind the last bucket, and put in their places, where meanwhile only something stale was sent.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import takes
from ..ops.accumulate import CHUNK
from ..optim.accumulate import GradientAccumulator

LIGHT = 1 << 16  # elements up to which a tensor is worth keeping apart


class Apart:
    """The light tensors of an arena: their sums while the buckets around them are on their way. `sums`: (rows, CHUNK), rows of the arena's."""

    def __init__(self, accumulator: GradientAccumulator, group):
        self.arena, self.accumulator, self.group = accumulator.arena, accumulator, group
        arena = self.arena
        self.numbers = {
            i
            for i, s in enumerate(arena.segments)
            if i not in accumulator._products and 0 < s.numel <= LIGHT
        }
        rows = [
            (i, row)
            for i in sorted(self.numbers)
            for row in range(arena.rows[i], arena.rows[i + 1])
        ]
        self.rows = torch.tensor([row for _, row in rows], dtype=torch.int64, device=arena.device)
        self.sums = torch.zeros(len(rows), CHUNK, device=arena.device)
        first = {i: nth for nth, (i, _) in reversed(list(enumerate(rows)))}
        self.views = {
            i: self.sums.view(-1)[first[i] * CHUNK :][: arena.segments[i].numel].view(
                arena.segments[i].shape
            )
            for i in self.numbers
        }
        self.taken, self.kernels = False, takes(arena.device)

    def begin(self):
        """The last backward: from here on gradients come here."""
        self.accumulator.apart = {i: [] for i in self.numbers}

    def take(self):
        """Before anything is sent: what earlier micro-batches have left."""
        if not self.taken:
            torch.index_select(self.arena.grads.view(-1, CHUNK), 0, self.rows, out=self.sums)
            self.taken = True

    def complete(self):
        """Backward is over: this rank's sums, last gradients included."""
        self.take()
        for i, grads in (self.accumulator.apart or {}).items():
            for grad in grads:
                self.views[i].add_(grad)
        self.forget()

    def send(self, own_sums: "Tensor | None"):
        """Behind the last bucket: the sums over all ranks. own_sums: as in distributed/reducer.py."""
        if own_sums is not None and self.kernels:
            own_sums.index_copy_(0, self.rows, self.sums.sum(1, dtype=torch.float64))
        elif own_sums is not None:
            for i, view in self.views.items():
                own_sums[i] = view.sum(dtype=torch.float64)
        if self.numbers:
            dist.all_reduce(self.sums, group=self.group)

    def put_back(self):
        """All buckets are there, and the sums belong into their places."""
        self.arena.grads.view(-1, CHUNK).index_copy_(0, self.rows, self.sums)

    def forget(self):
        self.taken, self.accumulator.apart = False, None
