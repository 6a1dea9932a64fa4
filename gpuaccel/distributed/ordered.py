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
from .buckets import whole_arena
from .reducer_base import ReducerBase, StepTotals


class OrderedReducer(ReducerBase):
    """Of ga.Distributed(ordered=True). Memory: two arenas over all ranks, one share of it here.

    Args:
        config: with ordered=True.
        arena: of the model.
        accumulator: of the arena.
        opt: the optimizer of the step.
        settings: see ReducerBase.
    """

    def __init__(self, config, arena, accumulator, opt, settings):
        super().__init__(config, arena, accumulator, opt, settings)
        # Elements of a rank's share: whole chunks. Every rank adds up what is left at the end.
        self.share = arena.numel // CHUNK // self.world * CHUNK
        rest = arena.numel - self.share * self.world
        self.total = torch.zeros(self.share + rest, device=arena.device)
        self.slices = torch.empty(self.world, self.share, device=arena.device)
        self.rests = torch.empty(self.world, rest, device=arena.device)
        self.bucket = whole_arena(arena)
        # Of this step's micro-batches so far: StepTotals.message(), tensors with a gradient.
        self.messages: "list[torch.Tensor]" = []
        self.received_mask = 0

    @torch.no_grad()
    def add_micro_batch(self, loss, tokens, rows, micro_batches):
        """Add one micro-batch of each rank, in the order of the ranks. arena.grads has this rank's,
        or zeros (loss None): it has none left, and others have."""
        accumulator, grads, share = self.accumulator, self.arena.grads, self.share
        if not self.messages:
            self.exchange_began = time.monotonic()
        if not self._capturing():
            self.heartbeat(0)
        accumulator.finish()
        self.nonfinite.probe(self.bucket)
        self.nonfinite.collect()
        if self.world == 1:
            accumulate_(self.total, grads)
        else:
            shares, rest = grads[: share * self.world], grads[share * self.world :]
            if share:
                collectives.all_to_all(self.slices.view(-1), shares, group=self.group)
            if len(rest):
                collectives.all_gather(self.rests.view(-1), rest, group=self.group)
            for rank in range(self.world):
                accumulate_(self.total[:share], self.slices[rank])
                accumulate_(self.total[share:], self.rests[rank])
        self.messages.append(self._message(loss, tokens, rows, micro_batches))
        self.received_mask |= accumulator.received_mask
        accumulator.zero_()

    def _reduce(self, loss, tokens, rows, micro_batches) -> StepTotals:
        """All-gather the ordered sums, and the messages of all micro-batches."""
        grads, share = self.arena.grads, self.share
        mine = torch.cat([*self.messages, self.nonfinite.message()])
        if self.world == 1:
            everyone = mine[None]
            grads.copy_(self.total)
        else:
            everyone = mine.new_empty(self.world, len(mine))
            if share:
                collectives.all_gather(
                    grads[: share * self.world], self.total[:share], group=self.group
                )
            grads[share * self.world :] = self.total[share:]
            collectives.all_gather(everyone.view(-1), mine, group=self.group)
        self.arena.grads_changed()
        count = len(self.messages)
        self.accumulator.restore(self.received_mask)
        self._forget_step()
        self.nonfinite.record(everyone[:, StepTotals.FIELDS * count :])
        return self._added(everyone[:, : StepTotals.FIELDS * count], count)

    def _added(self, everyone, count: int) -> StepTotals:
        """The totals of a step; losses are added in global order and in fp32, as one process adds
        them.

        Args:
            everyone: (ranks, 5 * count) float64, the messages of each rank's micro-batches.
            count: micro-batches of each rank.
        """
        by_rank = everyone.view(self.world, count, StepTotals.FIELDS)
        in_order = by_rank.transpose(0, 1).reshape(-1, StepTotals.FIELDS)
        losses = in_order[:, 0].float()
        loss = losses[0]
        for other in losses[1:]:
            loss = loss + other
        return StepTotals(loss, *in_order[:, 1:].sum(0))

    def _sent_something(self) -> bool:
        return bool(self.messages)

    def _forget_step(self):
        self.total.zero_()
        self.messages = []
        self.received_mask = 0
