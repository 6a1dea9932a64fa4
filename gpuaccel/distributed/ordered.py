"""Summation in the order of the micro-batches: N ranks with M micro-batches each are bit-identical
to one rank with N * M.

After each micro-batch's backward the ranks exchange slices of arena.grads (all-to-all). Each rank
adds the slices of its share in the order of the ranks; after the last one, the sums of all shares
go to every rank (all-gather).

With several machines of several ranks only sums go over the network. The ranks of a machine
exchange slices among themselves; a rank's share is as large as all shares of its local number. The
sum so far of the share goes from machine to machine, in as many stripes as there are machines, and
each adds the slices of its ranks: while one adds the first stripe, the machine before it adds the
second. The additions and their order are the same.
"""

import logging
import time

import torch

from ..ops import CHUNK, accumulate_
from . import collectives
from .buckets import whole_arena
from .machines import Machines
from .reducer_base import ReducerBase, StepTotals

log = logging.getLogger("gpuaccel")


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
        # The ranks that exchange slices; the stripes of a share that go from machine to machine.
        sources, stripes = self.world, 1
        if self.machines is not None:
            sources, stripes = self.machines.size, self.machines.count
            log.info(
                "ordered sums go from machine to machine: %d machines of %d ranks", stripes, sources
            )
        rest = arena.numel - self.shared
        self.total = torch.zeros(share * stripes, dtype=torch.float32, device=arena.device)
        self.total_rest = torch.zeros(rest, dtype=torch.float32, device=arena.device)
        self.slices = torch.empty(
            sources, share * stripes, dtype=torch.float32, device=arena.device
        )
        self.rests = torch.empty(self.world, rest, dtype=torch.float32, device=arena.device)
        self.bucket = whole_arena(arena)
        # Of this step's micro-batches so far: StepTotals.message(), tensors with a gradient.
        self.messages: "list[torch.Tensor]" = []
        self.received = [False] * len(arena.segments)

    @torch.no_grad()
    def add_micro_batch(self, loss, tokens, rows, micro_batches):
        """Add one micro-batch of each rank, in the order of the ranks. arena.grads has this rank's,
        or none (loss None): it has none left, and others have."""
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
        self.messages.append(self._message(loss, tokens, rows, micro_batches))
        self.received = [a or b for a, b in zip(self.received, arena.gradients.received())]
        arena.gradients.clear()

    def _add_shares(self, shares: torch.Tensor):
        """Add the slices of this rank's share, of all ranks."""
        if not len(shares):
            return
        if self.machines is None:
            collectives.all_to_all(self.slices.view(-1), shares, group=self.group)
            self._add_slices(slice(None))
        else:
            collectives.all_to_all(self.slices.view(-1), shares, group=self.machines.inside)
            self._add_in_turns(self.machines)

    def _add_slices(self, part: slice):
        for one_rank in self.slices:
            accumulate_(self.total[part], one_rank[part])

    def _add_in_turns(self, machines: Machines):
        """Stripe s begins on machine 0 in round s, and has the slices of all machines after
        `count` rounds. Then it is back on machine 0."""
        count, machine = machines.count, machines.machine
        length = len(self.total) // count
        stripes = [slice(s * length, (s + 1) * length) for s in range(count)]
        before, after = (machine - 1) % count, (machine + 1) % count
        for turn in range(2 * count - 1):
            ready = turn - machine
            # What the machine before has had in this round.
            arriving = turn - before
            outgoing = incoming = self.total[:0]
            sizes_in, sizes_out = [0] * count, [0] * count
            if 0 <= ready < count:
                self._add_slices(stripes[ready])
                outgoing = self.total[stripes[ready]]
                sizes_out[after] = length
            if 0 <= arriving < count:
                incoming = self.total[stripes[arriving]]
                sizes_in[before] = length
            collectives.all_to_all(incoming, outgoing, sizes_in, sizes_out, group=machines.between)

    def _gather_shares(self, shares: torch.Tensor):
        """The sums of all shares go to every rank."""
        group, machines = self.group, self.machines
        if machines is not None:
            collectives.broadcast(self.total, group_src=0, group=machines.between)
            group = machines.inside
        if len(shares):
            collectives.all_gather(shares, self.total, group=group)

    def _reduce(self, loss, tokens, rows, micro_batches) -> StepTotals:
        """All-gather the ordered sums, and the messages of all micro-batches."""
        grads = self.arena.grads
        mine = torch.cat([*self.messages, self.nonfinite.message()])
        if self.world == 1:
            everyone = mine[None]
            grads[: self.shared].copy_(self.total)
        else:
            everyone = mine.new_empty(self.world, len(mine))
            self._gather_shares(grads[: self.shared])
            collectives.all_gather(everyone.view(-1), mine, group=self.group)
        grads[self.shared :].copy_(self.total_rest)
        count = len(self.messages)
        self.arena.gradients.set(self.received)
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
        self.total_rest.zero_()
        self.messages = []
        self.received = [False] * len(self.received)
