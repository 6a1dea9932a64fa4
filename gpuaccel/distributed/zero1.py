"""The sharded optimizer (ZeRO stage 1): each rank keeps and updates its share of the state.

    step = ga.TrainStep(model, ga.AdamW(arena), distributed=ga.Distributed(sharded=True))
    # On every rank: a folder, into which each rank writes its share.
    ga.save_checkpoint(path, model=model, optimizer=opt, arena=arena)
    with step.gathered():             # on every rank: the state is whole, as one process has it
        torch.save(opt.state_dict(), "optimizer.pt")

The memory for the state is divided by the number of ranks. A bucket is cut into as many equal
ranges of whole chunks as there are ranks, one for each. What is left at its end (fewer chunks than
ranks) every rank updates. Gradients arrive by reduce-scatter, weights leave by all-gather. The norm
is made of the same partial sums as without shares, in the same order. A checkpoint names each
tensor's elements: a run may go on with another number of ranks, or with one.

Any optimizer of ours over an arena can be sharded: a ShardedLayout takes the place of its
ArenaLayout (optim/state_layout.py).

Source: Rajbhandari et al., ZeRO (2020), stage 1.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..ops import CHUNK
from ..optim import ParameterLayout, own_storage
from ..optim.update_rule import arena_launches
from .collectives import all_gather


class Piece(NamedTuple):
    """Elements [start, stop) of the arena that this rank updates. local: first in its buffers."""

    start: int
    stop: int
    local: int


def share(bucket, world: int) -> int:
    """Elements of a bucket that belong to each rank alone: whole chunks."""
    return (bucket.stop - bucket.start) // CHUNK // world * CHUNK


def gathered_buffers(arena) -> list[str]:
    """The buffers that every rank needs whole after an update: `weights`, `bf16_weights` or both.

    Masters of bf16 weights stay on the rank that updates them."""
    names = {torch.float32: "weights", torch.bfloat16: "bf16_weights"}
    return [
        name
        for dtype, name in names.items()
        if any(p.dtype == dtype for p in arena.module_parameters)
    ]


def pieces_of(buckets, rank: int, world: int) -> list[Piece]:
    """What a rank updates, in the order of the arena."""
    pieces, local = [], 0
    for b in buckets:
        own = share(b, world)
        ranges = (
            (b.start + rank * own, b.start + (rank + 1) * own),
            (b.start + world * own, b.stop),
        )
        for start, stop in ranges:
            if stop > start:
                pieces.append(Piece(start, stop, local))
                local += stop - start
    return pieces


class ShardedLayout(ParameterLayout):
    """State of an optimizer over an arena: this rank's share only, flat and padded to chunks.

    Args:
        config: of the group.
        arena: of the model.
        buckets: as the reducer sends them.
        p2p: the PeerToPeer that copies new weights; None: all-gathers.
    """

    def __init__(self, config, arena, buckets, p2p=None):
        super().__init__()
        self.arena = arena
        self.buckets = buckets
        self.rank, self.ranks, self.group = config.rank, config.world, config.group
        self.p2p = p2p
        self.pieces = pieces_of(buckets, self.rank, self.ranks)
        self.buffers: dict[str, Tensor] = {}  # state key -> (elements of all pieces,) fp32
        # Of each tensor: where its state lies in the buffers; (first, last element, offset in that)
        # of its parts here, padding included. They are side by side: between a rank's own range and
        # the end of a bucket there is nothing but the tensor that has part in both.
        self._spans: list[tuple[int, int]] = []
        self._parts: list[list[tuple[int, int, int]]] = []
        for s in arena.segments:
            here = []
            for p in self.pieces:
                start, stop = max(p.start, s.offset), min(p.stop, s.offset + s.padded)
                if stop > start:
                    here.append((start - s.offset, stop - s.offset, p.local + start - p.start))
            begin = here[0][2] if here else 0
            self._spans.append((begin, begin + sum(last - first for first, last, _ in here)))
            self._parts.append([(first, last, place - begin) for first, last, place in here])

    # ---- what this rank reads and writes of a checkpoint ----

    def held(self, i: int) -> list[tuple[int, int, int]]:
        """What is here of the state of tensor i.

        Args:
            i: the tensor's number in the arena.

        Returns:
            (first, last, place): elements [first, last) of the tensor lie at `place` in its state.
        """
        numel = self.arena.segments[i].numel
        parts = self._parts[i]
        return [(first, min(last, numel), place) for first, last, place in parts if first < numel]

    def saved(self, i: int) -> tuple[int, int, int]:
        """(first, last, place) of the elements of tensor i that this rank saves.

        They are one range: what every rank updates is saved by the rank of the last range,
        which ends where that begins."""
        held = self.held(i)
        bucket = next(b for b in self.buckets if b.first <= i < b.last)
        common = bucket.start + self.ranks * share(bucket, self.ranks)
        if self.rank < self.ranks - 1:
            offset = self.arena.segments[i].offset
            held = [part for part in held if offset + part[0] < common]
        if not held:
            return 0, 0, 0
        return held[0][0], held[-1][1], held[0][2]

    # ---- memory ----

    def fits(self, t, p, i):
        start, stop = self._spans[i]
        return t.shape == p.shape or t.shape == (stop - start,)

    def _is_place(self, t, key, p, i):
        start, stop = self._spans[i]
        return stop == start or t.data_ptr() == self.buffers[key].data_ptr() + 4 * start

    def _new(self, key, p, i):
        if key not in self.buffers:
            size = sum(p.stop - p.start for p in self.pieces)
            self.buffers[key] = torch.zeros(size, dtype=torch.float32, device=self.arena.device)
        start, stop = self._spans[i]
        return own_storage(self.buffers[key][start:stop])

    def fill(self, t, value, p, i):
        """The value is whole, or this rank's part of it."""
        flat = value.reshape(-1)
        if value.shape != p.shape:
            t.copy_(flat)
            return
        for first, last, place in self._parts[i]:
            last = min(last, len(flat))
            t[place : place + max(last - first, 0)].copy_(flat[first:last])

    @torch.no_grad()
    def gather_state(self) -> dict[str, Tensor]:
        """State key -> (N,) fp32 with the arena's layout, whole on every rank. Collective."""
        whole = {}
        for key in sorted(self.buffers):
            buffer = torch.zeros_like(self.arena.weights)
            for p in self.pieces:
                buffer[p.start : p.stop] = self.buffers[key][p.local : p.local + p.stop - p.start]
            self.all_gather(buffer)
            whole[key] = buffer
        return whole

    def gather_masters(self):
        """The fp32 masters of bf16 weights are whole on every rank. Collective."""
        if self.arena.bf16_weights is not None:
            self.all_gather(self.arena.weights)

    @torch.no_grad()
    def all_gather(self, buffer: Tensor):
        """Each rank's own ranges of a flat buffer go to all others, in place."""
        for b in self.buckets:
            length = share(b, self.ranks)
            if not length or self.ranks == 1:
                continue
            everyone = buffer[b.start : b.start + self.ranks * length]
            mine = everyone[self.rank * length : (self.rank + 1) * length]
            all_gather(everyone, mine if mine.is_cuda else mine.clone(), group=self.group)

    # ---- the update ----

    def launches(self, rule, jobs, stochastic):
        return arena_launches(rule, jobs, stochastic, self.arena, self.buffers, self.pieces)

    def local(self, jobs, seed):
        """The first part of a tensor (which may be empty) counts its step."""
        if seed is not None:
            raise ArgumentError(
                "stochastic_rounding with shares needs our kernels; expected backend cuda or simt, "
                "or sharded=False"
            )
        cut = []
        for j in jobs:
            flat = [None if t is None else t.view(-1) for t in (j.weight, j.grad, j.copy)]
            for k, (first, last, place) in enumerate(self._parts[j.number] or [(0, 0, 0)]):
                here = slice(first, min(last, j.weight.numel()))
                local = slice(place, place + len(flat[0][here]))
                weight, grad, copy = (None if t is None else t[here] for t in flat)
                state = tuple(None if t is None else t[local] for t in j.state)
                step = j.step.clone() if k else j.step
                part = replace(j, weight=weight, grad=grad, state=state, step=step, copy=copy)
                cut.append(part)
        return cut

    def after_update(self):
        """All-gather the new weights."""
        for name in gathered_buffers(self.arena):
            if self.p2p:
                self.p2p.spread(name)
            else:
                self.all_gather(getattr(self.arena, name))
        self.arena.weights_written()
