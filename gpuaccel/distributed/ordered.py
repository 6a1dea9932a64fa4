"""Summation in the order of the micro-batches: N ranks with M micro-batches each are bit-identical
to one rank with N * M.

After each micro-batch's backward the ranks exchange slices of arena.grads (all-to-all). Each rank
adds the slices of its share in the order of the ranks; after the last one, the sums of all shares
go to every rank (all-gather).
"""

import time

import torch

from ..ops import CHUNK, accumulate_
from . import collectives
from .buckets import Bucket
from .reducer_base import ReducerBase, Totals


class OrderedReducer(ReducerBase):
    """Of ga.Distributed(ordered=True). Memory: two arenas over all ranks, one share of it here.

    Args:
        config: with ordered=True.
        arena: of the model.
        optimizers: a list, those of the step.
        settings: see ReducerBase.
    """

    def __init__(self, config, arena, optimizers, settings):
        super().__init__(config, arena, optimizers, settings)
        # Elements of a rank's share: whole chunks. Every rank adds up what is left at the end.
        share = arena.numel // CHUNK // self.world * CHUNK
        # All shares, one behind the other.
        self.shared = share * self.world
        rest = arena.numel - self.shared
        self.total = torch.zeros(share, dtype=torch.float32, device=arena.device)
        self.total_rest = torch.zeros(rest, dtype=torch.float32, device=arena.device)
        self.slices = torch.empty(self.world, share, dtype=torch.float32, device=arena.device)
        self.rests = torch.empty(self.world, rest, dtype=torch.float32, device=arena.device)
        self.bucket = Bucket(0, arena.numel, 0, len(arena.segments))
        # Of this step's micro-batches so far: _message(), tensors with a gradient.
        self.messages: list[torch.Tensor] = []
        self.received = [False] * len(arena.segments)

    @torch.no_grad()
    def add_micro_batch(self, totals: Totals):
        """Add one micro-batch of each rank, in the order of the ranks. arena.grads has this rank's,
        or none (without a loss): it has none left, and others have."""
        arena, grads = self.arena, self.arena.grads
        if not self.messages:
            self.exchange_began = time.monotonic()
        if not self._capturing():
            self.heartbeat(0)
        arena.gradients.collect()
        arena.gradients.zero_stale()
        self.nonfinite.probe(self.bucket)
        self.nonfinite.collect()
        shares, rest = grads[: self.shared], grads[self.shared :]
        if self.world == 1:
            accumulate_(self.total, shares)
            accumulate_(self.total_rest, rest)
        else:
            self._add_shares(shares)
            if len(rest):
                collectives.all_gather(self.rests.view(-1), rest, group=self.group)
            for rank in range(self.world):
                accumulate_(self.total_rest, self.rests[rank])
        self.messages.append(self._message(totals))
        self.received = [a or b for a, b in zip(self.received, arena.gradients.received())]
        arena.gradients.clear()

    def _add_shares(self, shares: torch.Tensor):
        """Add the slices of this rank's share, of all ranks."""
        if not len(shares):
            return
        collectives.all_to_all(self.slices.view(-1), shares, group=self.group)
        for one_rank in self.slices:
            accumulate_(self.total, one_rank)

    def _reduce(self, totals: Totals) -> torch.Tensor:
        """All-gather the ordered sums, and the messages of all micro-batches."""
        grads = self.arena.grads
        mine = torch.cat([*self.messages, self.nonfinite.message()])
        if self.world == 1:
            everyone = mine[None]
            grads[: self.shared].copy_(self.total)
        else:
            everyone = mine.new_empty(self.world, len(mine))
            if self.shared:
                collectives.all_gather(grads[: self.shared], self.total, group=self.group)
            collectives.all_gather(everyone.view(-1), mine, group=self.group)
        grads[self.shared :].copy_(self.total_rest)
        count = len(self.messages)
        self.arena.gradients.set(self.received)
        self._forget_step()
        messages, tensors = everyone.tensor_split([everyone.shape[1] - self.world], 1)
        self.nonfinite.record(tensors)
        # (micro-batches in global order, 4).
        in_order = messages.view(self.world, count, -1).transpose(0, 1).flatten(0, 1)
        result = in_order.sum(0)
        # Losses are added in global order and in fp32, as one process adds them.
        loss, *others = in_order[:, 0].float()
        for other in others:
            loss = loss + other
        result[0] = loss
        return result

    def _sent_something(self) -> bool:
        return bool(self.messages)

    def _forget_step(self):
        self.total.zero_()
        self.total_rest.zero_()
        self.messages = []
        self.received = [False] * len(self.received)
