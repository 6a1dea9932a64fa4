"""Overlap of communication with a compiled backward.

A compiled backward is one node of autograd: its hooks run when all of it is over. Only the products
that add (optim/products.py) call back while it runs; they compute most of the bytes. The other
tensors of a bucket are light (norms, biases) and complete only at the end. During the last backward
their sums lie in a buffer of their own, which is all-reduced behind the last bucket. The result is
copied to their slices of the arena: the buckets were sent with stale values there.
"""

import itertools

import torch
from torch import Tensor

from ..ops import CHUNK
from ..optim import Arena, own_storage
from .collectives import all_reduce
from .nonfinite import NonFiniteSearch

MAX_LIGHT = 1 << 16  # elements up to which a tensor counts as light


class LightGradients:
    """The sums of an arena's light tensors while the buckets around them are on their way.

    `tensors`: their indices. `chunks`: (chunks,) int64, the indices of their chunks in the arena.
    `sums`: (chunks, CHUNK) fp32."""

    def __init__(self, arena: Arena, product_tensors: set[int], group):
        self.arena = arena
        self.group = group
        self.tensors = {
            i
            for i, s in enumerate(arena.segments)
            if i not in product_tensors and 0 < s.numel <= MAX_LIGHT
        }
        ranges = {i: range(*arena.first_chunk[i : i + 2]) for i in sorted(self.tensors)}
        chunks = [*itertools.chain(*ranges.values())]
        self.chunks = torch.tensor(chunks, dtype=torch.int64, device=arena.device)
        self.sums = torch.zeros(len(chunks), CHUNK, dtype=torch.float32, device=arena.device)
        self.views = {}
        for i, part in zip(ranges, self.sums.split([*map(len, ranges.values())])):
            s = arena.segments[i]
            flat = part.view(-1)[: s.numel]
            self.views[i] = own_storage(flat.as_strided(s.shape, s.stride))
        # The slices, while the sums lie here.
        self.moved: dict[int, Tensor] = {}

    def begin(self):
        """Before the last backward: the sums move to the buffer."""
        if self.moved:
            return
        arena = self.arena
        for i in self.tensors:
            arena.gradients.collect(i, i + 1)
        torch.index_select(arena.grads.view(-1, CHUNK), 0, self.chunks, out=self.sums)
        self.moved = arena.gradients.place(self.views)

    def all_reduce(self, search: NonFiniteSearch):
        """Sum over all ranks, behind the last bucket.

        Args:
            search: takes this rank's probes, if it is enabled.
        """
        for i in self.tensors:
            self.arena.gradients.zero_stale(i, i + 1)
        if search.enabled:
            search.probes.index_copy_(0, self.chunks, self.sums.sum(1, dtype=torch.float64))
        if self.tensors:
            all_reduce(self.sums, group=self.group)

    def copy_out(self):
        """All buckets have arrived: the sums go to their places in the arena."""
        self.arena.grads.view(-1, CHUNK).index_copy_(0, self.chunks, self.sums)
        self.end()

    def end(self):
        """From here on the slices are the arena's again."""
        self.arena.gradients.place(self.moved)
        self.moved = {}
