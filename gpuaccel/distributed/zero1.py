"""The sharded optimizer (ZeRO stage 1): each rank keeps the moments of its share of the arena only, updates that share, and gets the rest.

    >>> step = ga.TrainStep(model, ga.AdamW(arena), distributed=ga.Distributed(sharded=True))      # memory for moments / ranks
    >>> with step.opt.whole():                        # on every rank: its state is whole, and like that of one process
    ...     ga.save_checkpoint(path, model=model, optimizer=step.opt, arena=arena)

A share is, of each bucket, one of as many equal ranges of whole chunks as there are ranks, and what is left at the bucket's end (fewer chunks than
ranks), which everyone updates. Gradients come by reduce-scatter, weights go by all-gather; the norm is made of the same partial sums as without
shares, in the same order. A checkpoint holds whole tensors: a run may go on with another number of ranks, or with one.

Source: Rajbhandari et al., ZeRO (2020), stage 1.
"""

import contextlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..compiler.kernel import zero_
from ..errors import ArgumentError
from ..ops.accumulate import CHUNK
from ..ops.adamw import arena_runs, reference_step, update_kernel
from ..ops.clip import MAX_BLOCKS
from ..optim.adamw import AdamW
from ..optim.arena import own_storage
from .config import all_gather

KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """A range of the arena that this rank updates: elements [start, stop), kept from `local` on in this rank's buffers."""

    start: int
    stop: int
    local: int


def share(bucket, world: int) -> int:
    """Elements of a bucket that belong to each rank alone: whole chunks."""
    return (bucket.stop - bucket.start) // CHUNK // world * CHUNK


def handed_on(arena) -> "list[str]":
    """The buffers that every rank needs whole after an update, `weights` or `bf16_weights` or both; masters stay where they are used."""
    names = {torch.float32: "weights", torch.bfloat16: "bf16_weights"}
    return [name for dtype, name in names.items() if any(p.dtype == dtype for p in arena.params)]


def pieces_of(buckets, rank: int, world: int) -> "list[Piece]":
    found, local = [], 0
    for b in buckets:
        own = share(b, world)
        for start, stop in (
            (b.start + rank * own, b.start + (rank + 1) * own),
            (b.start + world * own, b.stop),
        ):
            if stop > start:
                found.append(Piece(start, stop, local))
                local += stop - start
    return found


class ShardedAdamW(AdamW):
    """What a ga.AdamW over an arena becomes, in place, in a step with ga.Distributed(sharded=True). Its state has this rank's share only, flat and
    padded to chunks, and `state_dict()` likewise; whole() makes it whole for a while. load_state_dict() takes a whole state."""

    @classmethod
    def wear(cls, opt: AdamW, buckets, rank, world, group, peers=None):
        """`opt` becomes one of these; the state that it has is cut. peers: a PeerToPeer (distributed/p2p.py) that brings new weights, if there is one."""
        opt.__class__ = cls
        opt.buckets, opt.rank, opt.world, opt.group, opt.p2p = buckets, rank, world, group, peers
        opt.pieces, opt._moments, opt._plan = pieces_of(buckets, rank, world), {}, None
        opt._local = [opt._cut(s) for s in opt.arena.segments]
        opt._reload()

    def shed(self, alone: bool = False):
        """A plain ga.AdamW again, with the whole state. To be called on every rank. alone: the others will not; the state is gone."""
        if alone:
            self.state.clear()
        else:
            self._gather_states()
        local, self._moments, self._plan, self.p2p = self.state, {}, None, None
        self.__class__ = AdamW
        self._make_states(
            [
                (g, p, self._number_of(p))
                for g, group in enumerate(self.param_groups)
                for p in group["params"]
                if local.get(p)
            ]
        )

    def _cut(self, s) -> "list[tuple[int, int, int]]":
        """(first, last element of the tensor, place in this rank's buffers) of its parts here, padding included."""
        parts = [(max(p.start, s.offset), min(p.stop, s.offset + s.padded), p) for p in self.pieces]
        return [
            (start - s.offset, stop - s.offset, p.local + start - p.start)
            for start, stop, p in parts
            if stop > start
        ]

    # ---- state ----

    def _span(self, i) -> "tuple[int, int]":
        """Where tensor i's parts lie in this rank's buffers: side by side, for there is nothing between a rank's own range and the end of a bucket
        but the tensor that has part in both."""
        parts = self._local[i]
        return (parts[0][2], parts[-1][2] + parts[-1][1] - parts[-1][0]) if parts else (0, 0)

    def _home(self, key, p, i) -> Tensor:
        if key not in self._moments:
            self._moments[key] = torch.zeros(
                self.pieces[-1].local + self.pieces[-1].stop - self.pieces[-1].start
                if self.pieces
                else 0,
                device=self.arena.device,
            )
        start, stop = self._span(i)
        return own_storage(self._moments[key][start:stop])

    def _in_place(self, key, t, p, i) -> bool:
        start, stop = self._span(i)
        return (
            key in self._moments
            and t.shape == (stop - start,)
            and (stop == start or t.data_ptr() == self._moments[key].data_ptr() + 4 * start)
        )

    def _fits(self, t, p, i) -> bool:
        start, stop = self._span(i)
        return t.shape == p.shape or t.shape == (stop - start,)

    def _bring_home(self, key, p, i, t) -> Tensor:
        home, flat = self._home(key, p, i), t.reshape(-1)
        if t.shape == p.shape:  # a whole one: this rank's parts of it
            for first, last, place in self._local[i]:
                last = min(last, len(flat))
                at = place - self._span(i)[0]
                home[at : at + max(last - first, 0)].copy_(flat[first:last])
        else:
            home.copy_(t)
        return home

    def _reload(self):
        """Whole tensors in the state come to their places."""
        self._make_states(
            [
                (g, p, self._number_of(p))
                for g, group in enumerate(self.param_groups)
                for p in group["params"]
                if self.state.get(p)
            ]
        )

    @torch.no_grad()
    def _gather_states(self):
        """Every tensor's moments are whole, on every rank. Collective."""
        keys = [key for key in KEYS if key in self._moments]
        whole = {}
        for key in keys:
            buffer = torch.zeros_like(self.arena.weights)
            for p in self.pieces:
                buffer[p.start : p.stop] = self._moments[key][p.local : p.local + p.stop - p.start]
            self.spread(buffer)
            whole[key] = buffer
        for group in self.param_groups:
            for p in group["params"]:
                for key in keys:
                    if key in self.state.get(p, {}):
                        whole_state = self.arena.slice(whole[key], self._number_of(p))
                        self.state[p][key] = own_storage(whole_state)

    @contextlib.contextmanager
    def whole(self):
        """Inside the block this is a plain ga.AdamW with its whole state, and the masters of bf16 weights are whole too; afterwards all is cut again,
        also when it was loaded meanwhile. To be entered on every rank; needs memory for whole moments."""
        if self.arena.bf16_weights is not None:
            self.spread(self.arena.weights)
        self._gather_states()
        kept, self._moments = self._moments, {}  # a captured step knows their addresses
        self.__class__ = AdamW
        try:
            yield self
        finally:
            self.__class__, self._moments, self._plan = ShardedAdamW, kept, None
            self._reload()

    @torch.no_grad()
    def spread(self, buffer: Tensor):
        """All-gather: each rank's own ranges of a flat buffer go to all others."""
        for b in self.buckets:
            own = share(b, self.world)
            if own and self.world > 1:
                mine = buffer[b.start + self.rank * own : b.start + (self.rank + 1) * own]
                all_gather(
                    buffer[b.start : b.start + self.world * own],
                    mine if mine.is_cuda else mine.clone(),
                    group=self.group,
                )

    # ---- the step ----

    # Not step() itself: a scheduler has put a wrapper of the plain optimizer's in its place.

    def _launch_update(self, part, coefficients, seed):
        arena, m = self.arena, self._moments
        for first, last, ahead, amsgrad in arena_runs(part.ours, arena):
            kernel = update_kernel(
                "adamw_v3", torch.float32, torch.float32, amsgrad, self.stochastic_rounding
            )
            for p in self.pieces:
                start, stop = max(p.start, first * CHUNK), min(p.stop, last * CHUNK)
                if stop > start:
                    here = slice(start, stop)
                    there = slice(p.local + start - p.start, p.local + stop - p.start)
                    kernel[min((stop - start) // CHUNK, MAX_BLOCKS), kernel.bound](
                        coefficients,
                        seed,
                        arena.weights[here],
                        arena.grads[here],
                        m["exp_avg"][there],
                        m["exp_avg_sq"][there],
                        m["max_exp_avg_sq"][there] if amsgrad else None,
                        None if arena.bf16_weights is None else arena.bf16_weights[here],
                        arena.chunk_table[start // CHUNK : stop // CHUNK],
                        0,
                        (stop - start) // CHUNK,
                        ahead,
                    )
        self._hand_on()

    def _reference_step(self, jobs, param_groups, found, rows, skip, *rest):
        """By parts: the first one of a tensor (which may be empty) counts its step."""
        if rest[-1] is not None:
            raise ArgumentError(
                "stochastic_rounding with shares needs our kernels; expected backend cuda or simt, or sharded=False"
            )
        cut, cut_rows = [], []
        for j, row in zip(jobs, rows):
            flat = [t if t is None else t.view(-1) for t in (j.weight, j.grad, j.copy)]
            for nth, (first, last, place) in enumerate(self._local[j.number] or [(0, 0, 0)]):
                here, at = (
                    slice(first, min(last, j.weight.numel())),
                    place - self._span(j.number)[0],
                )
                there = slice(at, at + len(flat[0][here]))
                weight, grad, copy = (t if t is None else t[here] for t in flat)
                cut.append(
                    replace(
                        j,
                        weight=weight,
                        grad=grad,
                        copy=copy,
                        m=j.m[there],
                        v=j.v[there],
                        vmax=j.vmax if j.vmax is None else j.vmax[there],
                        step=j.step.clone() if nth else j.step,
                    )
                )
                cut_rows.append(row)
        reference_step(cut, param_groups, found, cut_rows, skip, *rest)
        self._hand_on()

    def _hand_on(self):
        """The new weights go to all ranks. What the others update is cleared here too: the optimizer says that it clears the sums."""
        for name in handed_on(self.arena):
            buffer = getattr(self.arena, name)
            if self.p2p:
                self.p2p.spread(name)
            else:
                self.spread(buffer)
        self.arena.weights_written()
        zero_(self.arena.grads)

    def __getstate__(self):  # a copy is a plain optimizer's business
        raise TypeError(
            "a sharded optimizer cannot be copied or pickled: close its TrainStep before"
        )
