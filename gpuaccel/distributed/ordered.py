"""Summation in the order of the micro-batches: N ranks with M micro-batches each are bit-identical
to one rank with N * M.

After each micro-batch's backward the ranks exchange slices of arena.grads (all-to-all). Each rank
adds the slices of its share in the order of the ranks; after the last one, the sums of all shares
go to every rank, by an all-to-all the other way.
"""

import functools

import torch

from ..ops import accumulate_
from . import collectives
from .buckets import Bucket, equal_ranges
from .reducer import Reducer, Totals


class OrderedReducer(Reducer):
    """Of ga.Distributed(ordered=True). Memory: two arenas over all ranks, one share of it here.

    Args:
        config: with ordered=True.
        arena: of the model.
        optimizers: a list, those of the step.
        settings: see Reducer.
    """

    def __init__(self, config, arena, optimizers, settings):
        super().__init__(config, arena, optimizers, settings)
        # Elements of each rank's share.
        self.shares = [stop - start for start, stop in equal_ranges(0, arena.numel, self.world)]
        share = self.shares[self.rank]
        self.total = torch.zeros(share, dtype=torch.float32, device=arena.device)
        # What each rank has of this rank's share.
        self.slices = torch.empty(self.world, share, dtype=torch.float32, device=arena.device)
        self.bucket = Bucket(0, arena.numel, 0, len(arena.segments))
        # Of this step's micro-batches so far: _message(), tensors with a gradient.
        self.messages: list[torch.Tensor] = []
        self.received = [False] * len(arena.segments)

    def follow(self, products):
        """Nothing is sent while backward runs."""

    def listener(self):
        return None

    @torch.no_grad()
    def add_micro_batch(self, totals: Totals):
        """Add one micro-batch of each rank, in the order of the ranks. arena.grads has this rank's,
        or none (without a loss): it has none left, and others have."""
        gradients, slices = self.arena.gradients, self.arena.grads[None]
        self.heartbeat(0)
        gradients.collect()
        gradients.zero_stale()
        self.nonfinite.probe(self.bucket)
        self.nonfinite.collect()
        if self.world > 1:
            self.sent = not self._capturing()
            slices = self.slices
            collectives.all_to_all(
                slices.view(-1),
                self.arena.grads,
                [len(self.total)] * self.world,
                self.shares,
                group=self.group,
            )
        for of_rank in slices:
            accumulate_(self.total, of_rank)
        self.messages.append(self._message(totals))
        self.received = [a or b for a, b in zip(self.received, gradients.received())]
        gradients.clear()

    def _reduce(self, message):
        """The sums of all shares, and the messages of all micro-batches in place of `message`."""
        grads, count = self.arena.grads, len(self.messages)
        mine = torch.cat([*self.messages, self.nonfinite.message()])
        everyone = mine[None]
        if self.world == 1:
            grads.copy_(self.total)
        else:
            self.slices.copy_(self.total)
            collectives.all_to_all(
                grads,
                self.slices.view(-1),
                self.shares,
                [len(self.total)] * self.world,
                group=self.group,
            )
            everyone = mine.new_empty(self.world, len(mine))
            collectives.all_gather(everyone.view(-1), mine, group=self.group)
        self.arena.gradients.set(self.received)
        self._forget_step()
        self.nonfinite.record(everyone[:, len(message) * count :])
        by_rank = everyone[:, : len(message) * count].view(self.world, count, len(message))
        in_order = by_rank.transpose(0, 1).flatten(0, 1)
        totals = in_order.sum(0)
        # In fp32, as one process adds them.
        totals[0] = functools.reduce(torch.add, in_order[:, 0].float())
        return totals

    def _forget_step(self):
        self.total.zero_()
        self.messages = []
        self.received = [False] * len(self.received)
