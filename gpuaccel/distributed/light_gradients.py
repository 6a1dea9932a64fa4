"""Overlap of communication with a compiled backward.

A compiled backward is one node of autograd: its hooks run when all of it is over. Only the products
of mode "fused" (optim/fused_mode.py) call back while it runs; they compute most of the bytes. The
other tensors of a bucket are light (norms, biases) and complete only at the end. In the last
backward their sums are kept in a buffer of their own, which is all-reduced behind the last bucket.
The result is copied to their slices of the arena: the buckets were sent with stale values there.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import CHUNK
from ..optim import GradientAccumulator
from .nonfinite import NonFiniteSearch

MAX_LIGHT = 1 << 16  # elements up to which a tensor counts as light


class LightGradients:
    """The sums of an arena's light tensors while the buckets around them are on their way.

    `tensors`: their indices. `chunks`: (chunks,) int64, the indices of their chunks in the arena.
    `sums`: (chunks, CHUNK) fp32."""

    def __init__(self, accumulator: GradientAccumulator, group):
        self.arena = arena = accumulator.arena
        self.group = group
        self.tensors = {
            i
            for i, s in enumerate(arena.segments)
            if i not in accumulator.product_tensors and 0 < s.numel <= MAX_LIGHT
        }
        chunks: "list[int]" = []
        self.views = {}
        starts = {}
        for i in sorted(self.tensors):
            starts[i] = len(chunks) * CHUNK
            chunks += range(arena.first_chunk[i], arena.first_chunk[i + 1])
        self.chunks = torch.tensor(chunks, dtype=torch.int64, device=arena.device)
        self.sums = torch.zeros(len(chunks), CHUNK, dtype=torch.float32, device=arena.device)
        for i, start in starts.items():
            s = arena.segments[i]
            self.views[i] = self.sums.view(-1)[start : start + s.numel].view(s.shape)
        self.reset()

    def reset(self):
        """No gradient is kept, and nothing has been copied in."""
        self.kept: "dict[int, list[Tensor]]" = {i: [] for i in self.tensors}
        self.copied_in = False

    def keep(self, i: int, grad: Tensor) -> bool:
        """Keep a gradient of the last backward; False for a tensor that is not light."""
        if i in self.tensors:
            self.kept[i].append(grad)
            return True
        return False

    def copy_in(self):
        """Before anything is sent: the sums of earlier micro-batches."""
        if not self.copied_in:
            torch.index_select(self.arena.grads.view(-1, CHUNK), 0, self.chunks, out=self.sums)
            self.copied_in = True

    def complete(self):
        """Backward is over: add the gradients that were kept."""
        self.copy_in()
        for number in range(max(map(len, self.kept.values()), default=0)):
            # One launch for many tensors, whatever the dtype of their gradients.
            pairs = [(self.views[i], g[number]) for i, g in self.kept.items() if len(g) > number]
            views, grads = zip(*pairs)
            in_fp32 = [torch.empty_like(view) for view in views]
            torch._foreach_copy_(in_fp32, grads)
            torch._foreach_add_(views, in_fp32)
        self.reset()

    def all_reduce(self, search: NonFiniteSearch):
        """Sum over all ranks, behind the last bucket.

        Args:
            search: takes this rank's probes, if it is enabled.
        """
        if search.enabled and search.by_chunk:
            search.probes.index_copy_(0, self.chunks, self.sums.sum(1, dtype=torch.float64))
        elif search.enabled:
            for i, view in self.views.items():
                search.probes[i] = view.sum(dtype=torch.float64)
        if self.tensors:
            dist.all_reduce(self.sums, group=self.group)

    def copy_out(self):
        """All buckets have arrived: the sums go to their places in the arena."""
        self.arena.grads.view(-1, CHUNK).index_copy_(0, self.chunks, self.sums)
