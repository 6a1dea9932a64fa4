"""What the ranks of a data-parallel run do in one optimizer step; TrainStep calls it. The choices, and the words for them: distributed/config.py.

    ranks = Reducer(how, arena, accumulator, opt, settings)       # compares the models, sends out rank 0's weights
    with ranks.listening():                                     # around the last micro-batch's backward: full buckets are on their way
        loss.backward()
    loss, tokens, rows, micros = ranks.reduce(loss, tokens, rows, 1)      # arena.grads holds the sum over all ranks

On GPUs all of it goes to streams that are forked from the current one by events and joined to it again, so that a CUDA graph can hold it; nothing is
read by the host. Buckets are summed by copies between the GPUs of one machine (distributed/p2p.py), else by NCCL. On CPUs gloo's own threads do the work between
start and join.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import takes
from ..errors import ArgumentError, RankError
from ..measure.meter import LateValue
from ..ops.accumulate import CHUNK, accumulate_, accumulate_kernel
from ..ops.clip import clip_kernel, launch_squares
from ..optim.accumulate import GradientAccumulator
from ..optim.arena import Arena
from ..optim.device_optimizer import DeviceOptimizer
from . import rendezvous
from .config import (
    Distributed,
    all_gather,
    broadcast,
    buckets_of,
    compare,
    reduce_scatter,
    weight_hashes,
)
from .early import Apart
from .p2p import PeerToPeer
from .zero1 import ShardedLayout, share


class Reducer:
    """A TrainStep's side of the group: what TrainStep calls. Making one compares the models of all ranks and sends out rank 0's weights.

    ArgumentError, on every rank, naming the first tensor and rank that differ from rank 0's."""

    def __init__(
        self,
        how: Distributed,
        arena: Arena,
        accumulator: GradientAccumulator,
        opt,
        settings: dict,
        compiled: bool = False,
        peers: "PeerToPeer | None" = None,
    ):
        self.how, self.arena, self.accumulator, self.opt = how, arena, accumulator, opt
        self.rank, self.world, self.group = how.rank, how.world, how.group
        self.buckets = buckets_of(arena, how.bucket_mb * 1e6)
        self.bucket_of = [nth for nth, b in enumerate(self.buckets) for _ in range(b.first, b.last)]
        self.cuda = arena.device.type == "cuda"
        self.nccl = how.backend == "nccl"
        if self.nccl and not self.cuda:
            raise ArgumentError(
                f"the group's backend is nccl, and the model is on {arena.device}; expected a model on a GPU, or gloo"
            )
        self.p2p = peers
        if peers:
            peers.plan(self.buckets)
        self.stream = (
            peers.stream
            if peers
            else torch.cuda.Stream(arena.device, priority=-1)
            if self.nccl
            else None
        )
        device, self.kernels = arena.device, takes(arena.device)
        self.steps = 0
        self.beat(0)
        try:
            compare(how, arena, opt, settings)
            broadcast(how, arena)
        except RuntimeError as error:
            self._give_up(error, "at the start")
            raise
        self.find_unused = self.world == 1 or (
            not self.cuda if how.find_unused is None else how.find_unused
        )
        most = max(b.stop - b.start for b in self.buckets)
        self.low = (
            torch.empty(most, dtype=how.dtype, device=device)
            if self.nccl and how.dtype != torch.float32
            else None
        )
        self.sharded = how.sharded and self.world > 1
        if self.sharded:
            self._shard()
        if self.cuda:
            self._get_ready()
        # Of each row of arena.partials (torch: of each tensor): a sum over what this rank brought, is it finite, and whose number this is.
        self.own_sums = (
            peers.own_sums
            if peers
            else torch.zeros(
                len(arena.chunk_to_tensor) if self.kernels else len(arena.segments),
                dtype=torch.float64,
                device=device,
            )
        )
        self.place = (
            arena.chunk_to_tensor.long()
            if self.kernels
            else torch.arange(len(arena.segments), device=device)
        )
        self.wrong = (
            peers.wrong
            if peers
            else torch.zeros(1, len(self.own_sums), dtype=torch.bool, device=device)
        )  # peers: a row for each rank
        self.blamed = torch.zeros(
            self.world, dtype=torch.int64, device=device
        )  # 1 + the first tensor of each rank that was not finite; 0: none
        self.agreed: "int | None" = None  # bits: the tensors that take part in the update
        self.count_dtype, self.late = torch.int64, LateValue()
        self.pending, self.next, self.missing, self.broken = [], 0, None, False
        self.sent = False  # something of this step (not of a capture, which does nothing yet), until its update is over
        early = compiled and accumulator.mode == "fused" and self.world > 1 and not how.ordered
        self.apart = Apart(accumulator, self.group) if early else None
        self.came = set()  # tensors that were complete before their hook said so
        if how.ordered:
            self.own = (
                arena.numel // CHUNK // self.world * CHUNK
            )  # elements of a rank's slice; what is left at the end is everyone's
            rest = arena.numel - self.own * self.world
            self.total = torch.zeros(self.own + rest, device=device)
            self.slices, self.rests = (
                torch.empty(self.world, n, device=device) for n in (self.own, rest)
            )
            self.messages, self.bits = [], 0
        if isinstance(opt, DeviceOptimizer) and opt.arena is arena:
            opt.explain_skip = self._explain_skip

    # ---- the start ----

    def _shard(self):
        """The optimizer keeps this rank's share from here on. `counted`: what this rank takes the squares of, which rows of
        arena.partials these are, and a place for them."""
        opt, arena = self.opt, self.arena
        held = {id(p) for group in opt.param_groups for p in group["params"]}
        if not (isinstance(opt, DeviceOptimizer) and opt.arena is arena) or held != arena.master_ids:
            raise ArgumentError(
                "sharded=True is done by a ga.AdamW over the whole arena: ga.AdamW(arena, ...); the optimizer is "
                f"{type(opt).__name__} over {len(held)} of the arena's {len(arena.masters)} tensors, or over parameters"
            )
        layout = ShardedLayout(arena, self.buckets, self.rank, self.world, self.group, self.p2p)
        opt.shard(layout)
        if self.p2p:  # they have the squares
            return
        ranges = []
        for b in self.buckets:
            own = share(b, self.world)
            ranges += [
                (b.start + self.rank * own, b.start + (self.rank + 1) * own),
                (b.start + self.world * own, b.stop),
            ][: 1 + (self.rank == 0)]
        rows = torch.cat([torch.arange(start // CHUNK, stop // CHUNK) for start, stop in ranges])
        self.counted = (
            [arena.grads[start:stop] for start, stop in ranges if stop > start],
            rows.to(arena.device),
            arena.partials.new_zeros(len(rows)),
        )

    def _get_ready(self):
        """What cannot be done in a capture: kernels are compiled and loaded, and NCCL connects the ranks."""
        index = self.arena.device.index
        for kernel in (
            (clip_kernel("squares_v2", 2.0), accumulate_kernel("accumulate_v2", torch.float32))
            if self.kernels
            else ()
        ):
            kernel.load(index)
        if self.nccl and self.world > 1:
            few, many = (torch.zeros(n, device=self.arena.device) for n in (1, self.world))
            dist.all_to_all_single(torch.empty_like(many), many, group=self.group)
            all_gather(many, few, group=self.group)
            reduce_scatter(few, many, group=self.group)
            dist.all_reduce(few, group=self.group)
            torch.cuda.synchronize(self.arena.device)

    # ---- while backward runs ----

    def look_before(self):
        """RankError where this rank cannot go on: it left a step after it had sent part of it."""
        if self.broken:
            raise RankError(
                f"rank {self.rank} left an earlier step half way, with an error, after it had sent part of its gradient; the other ranks wait "
                "for the rest. Expected a new start of all ranks, from a checkpoint"
            )

    @contextlib.contextmanager
    def listening(self):
        """Around the last micro-batch's backward: what is complete is sent."""
        if self.how.ordered or self.accumulator.mode in ("host", "autograd"):
            yield  # the sums are in place only after finish()
            return
        apart = self.apart.numbers if self.apart else ()
        self.missing = [sum(i not in apart for i in range(b.first, b.last)) for b in self.buckets]
        self.accumulator.arrived = self._arrived
        if self.apart:
            self.came.clear()
            self.accumulator.added = self._added
            self.apart.begin()
        try:
            yield
        finally:
            self.accumulator.arrived = self.accumulator.added = self.missing = None

    def _arrived(self, i):
        """Backward has given tensor i all of its gradient. Buckets go in order, so that all ranks send them in the same one."""
        if self.apart and i in self.apart.numbers:
            return
        nth = self.bucket_of[i]
        again = i in self.came
        self.missing[nth] -= not again
        if (
            nth < self.next
            and not (again and self.accumulator.fresh[i] is None)
            or self.missing[nth] < 0
        ):
            self._too_late(i)
        while self.next < len(self.buckets) and not self.missing[self.next]:
            self._send()

    def _added(self, numbers):
        """A product has been added to these tensors. If a backward has no more for them, as the one before had, they are complete."""
        known = self.accumulator
        for i in numbers:
            if i in self.came and self.bucket_of[i] < self.next:
                self._too_late(i)
            if (
                i not in self.came
                and known.uses[i]
                and known.uses[i] == known.usual[i]
                and i not in known.elsewhere
            ):
                self._arrived(i)
                self.came.add(i)

    def _too_late(self, i):
        raise ArgumentError(
            f"{self.arena.segments[i].name} got more of its gradient after that was sent to the other ranks (a weight that several "
            "checkpointed parts share, with use_reentrant=True? a compiled model that uses it more often than in the step before?); use "
            "torch.utils.checkpoint(..., use_reentrant=False), or compile=False"
        )

    @torch.no_grad()
    def _send(self):
        """Start the next bucket's reduction."""
        bucket = self.buckets[self.next]
        self.accumulator._flush()
        if self.apart:
            self.apart.take()
        self.next += 1
        self.sent = not (self.cuda and torch.cuda.is_current_stream_capturing())
        if self.p2p:
            self.p2p.send(bucket)
            return
        part = self.arena.grads[bucket.start : bucket.stop]
        if not self.nccl:
            self._look(bucket)
            sent = part if self.how.dtype == torch.float32 else part.to(self.how.dtype)
            self.pending.append((*self._sum(bucket, sent, True), part, sent))
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.arena.device))
        with torch.cuda.stream(self.stream):
            self._look(bucket)
            sent = part if self.low is None else self.low[: bucket.stop - bucket.start].copy_(part)
            self._sum(bucket, sent, False)
            if sent is not part:
                part.copy_(sent)

    def _sum(self, bucket, sent, later):
        """The sum over all ranks, in place; of shares this rank's and the common rest. later: returns (works, [(where it goes, what came)])."""
        if not (self.sharded and self.kernels):
            return [dist.all_reduce(sent, group=self.group, async_op=later)], []
        own, works, copies = share(bucket, self.world), [], []
        if own:
            mine = sent[self.rank * own : (self.rank + 1) * own]
            got = torch.empty_like(mine) if later else mine
            works.append(
                reduce_scatter(got, sent[: self.world * own], group=self.group, async_op=later)
            )
            copies.append((mine, got))
        if len(sent) > self.world * own:
            works.append(
                dist.all_reduce(sent[self.world * own :], group=self.group, async_op=later)
            )
        return works, copies

    def _look(self, bucket):
        """Sums over what this rank has brought itself, not finite where that is not. In mode "arena" the last addition has left squares behind."""
        if not self.how.blame:
            return
        arena, tensors = self.arena, slice(bucket.first, bucket.last)
        rows = slice(arena.rows[bucket.first], arena.rows[bucket.last])
        if not self.kernels:
            self.own_sums[tensors] = torch.stack(
                [view.sum(dtype=torch.float64) for view in arena.grad_views[tensors]]
            )
        elif all(arena.squares_known()[tensors]):
            self.own_sums[rows] = arena.partials[rows]
        else:
            launch_squares([arena.grads[bucket.start : bucket.stop]], self.own_sums[rows])

    # ---- after backward ----

    @torch.no_grad()
    def reduce(self, loss, tokens, rows, micros: float):
        """The sums of all ranks are in arena.grads. loss, tokens: sums of this rank's micro-batches (None: it had none; tokens None too where
        loss_fn returned means); rows: a number or tensor. Returns (loss, tokens, rows, micro-batches), () tensors over all ranks; tokens None as given."""
        if not (self.cuda and torch.cuda.is_current_stream_capturing()):
            self.beat()
        accumulator, means = self.accumulator, loss is not None and tokens is None
        accumulator.finish()
        if self.how.ordered:
            sums = self._end_rounds()
        else:
            while self.next < len(self.buckets):
                self._send()
            if self.apart:
                self.apart.complete()
            sums = self._exchange(loss, tokens, rows, micros)
            self._join()
        self._agree()
        loss, tokens, rows, micros, counted = sums
        tokens = tokens.to(self.count_dtype)
        return (
            loss,
            None if means else torch.where(counted > 0, tokens, micros.to(self.count_dtype)),
            rows,
            micros,
        )

    def _message(self, loss, tokens, rows, micros) -> Tensor:
        """(5,) fp64: loss, tokens, rows, micro-batches, micro-batches whose tokens were counted."""
        device = self.arena.device
        if tokens is not None:
            self.count_dtype = tokens.dtype
        numbers = [
            x.double().view(())
            if isinstance(x, Tensor)
            else torch.full((), float(x or 0), dtype=torch.float64, device=device)
            for x in (loss, tokens, rows, micros, 0 if tokens is None else micros)
        ]
        return torch.stack(numbers)

    def _blame(self) -> Tensor:
        """(rows, ranks) fp64: 1 + the first tensor of each rank that was not finite as this rank saw it, 0 for none. One row, of which this rank
        fills in its own place; with peers, which see what the others bring, a row for each rank, of which it fills in its own."""
        none = len(self.arena.segments)
        self.wrong[self.rank if self.p2p else 0] |= ~torch.isfinite(self.own_sums)
        first = torch.where(self.wrong != 0, self.place, none).amin(1)
        found = torch.zeros(
            len(self.wrong), self.world, dtype=torch.float64, device=self.arena.device
        )
        (found[self.rank] if self.p2p else found[:, self.rank]).copy_(
            torch.where(first < none, first + 1, 0)
        )
        self.wrong.zero_()
        return found

    def _keep_blame(self, found):
        """found: (any, ranks), _blame() of all ranks."""
        none = len(self.arena.segments) + 1
        found = torch.where(found > 0, found.long(), none).amin(0) % none
        self.blamed.copy_(torch.where((found > 0).any(), found, self.blamed))

    def _exchange(self, loss, tokens, rows, micros):
        """The few numbers of a step in one message behind the last bucket, with peers also the squares of what each has added up."""
        message = self._message(loss, tokens, rows, micros)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.arena.device))
        with (
            torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()
        ):
            if self.apart:
                self.apart.send(self.own_sums if self.how.blame else None)
            if self.p2p:
                self.p2p.join()
            parts = [message, self._blame().view(-1), *([self.p2p.squares] if self.p2p else [])]
            dist.all_reduce(message := torch.cat(parts), group=self.group)
            numbers, found, *squares = message.split([len(part) for part in parts])
            self._keep_blame(found.view(-1, self.world))
            if self.p2p:
                self.arena.partials.copy_(*squares)
            return numbers[0].float(), *numbers[1:]

    def _join(self):
        """From here on the current stream sees the sums."""
        for works, copies, part, sent in self.pending:
            for work in works:
                work.wait()
            for mine, got in copies:
                mine.copy_(got)
            if sent is not part:
                part.copy_(sent)
        if self.stream is not None:
            torch.cuda.current_stream(self.arena.device).wait_stream(self.stream)
        if self.apart:
            self.apart.put_back()
        self.pending, self.next = [], 0
        torch.autograd.graph.increment_version(
            self.arena.grads
        )  # collectives are not counted by torch: squares taken before are void
        partials = self.arena.partials
        if self.p2p:
            if self.apart:  # where these are now, something stale was added up
                squares = partials.new_empty(len(self.apart.rows))
                launch_squares([self.apart.sums], squares)
                partials.index_copy_(0, self.apart.rows, squares)
        elif (
            self.sharded and self.kernels
        ):  # each rank has squares of its share: together they are the whole table
            shares, rows, squares = self.counted
            launch_squares(shares, squares)
            partials.zero_().index_copy_(0, rows, squares)
            dist.all_reduce(partials, group=self.group)
        if self.p2p or self.sharded and self.kernels:
            known = self.arena.squares_known()
            known[:] = [True] * len(known)

    def _agree(self):
        """The tensors that got a gradient on some rank are those that the optimizer sees, on every rank."""
        mine = self.accumulator.bits
        if self.agreed is None or self.find_unused:
            self.agreed = self._union(mine)
        elif mine & ~self.agreed:
            late = (mine & ~self.agreed).bit_length() - 1
            raise ArgumentError(
                f"rank {self.rank}: {self.arena.segments[late].name} got a gradient, and in the first step it got none on any rank: which "
                "tensors take part is settled then, without a wait later on. Instead: ga.Distributed(find_unused=True)"
            )
        if mine != self.agreed:
            self.accumulator.restore(self.agreed)

    def settle(self, mine: int):
        """Before the first capture: which tensors take part. mine: bits of those that get a gradient here."""
        if self.agreed is None:
            self.agreed = self._union(mine)

    def _union(self, mine: int) -> int:
        if self.world == 1:
            return mine
        if self.cuda and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "which tensors get a gradient has to be found out in every step (find_unused=True), which a CUDA graph cannot wait for; "
                "expected replay='eager', or find_unused=False"
            )
        bits = torch.tensor(
            [mine >> i & 1 for i in range(len(self.arena.segments))],
            dtype=torch.int32,
            device=self.arena.device,
        )
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self.group)
        return sum(1 << i for i, bit in enumerate(bits.tolist()) if bit)

    def close(self, alone: bool):
        """The step is closed. The process group stays. alone: by an error, so that the other ranks may not do the same."""
        self.accumulator.arrived = None
        if isinstance(self.opt, DeviceOptimizer):
            self.opt.explain_skip = None
        if self.sharded:
            self.opt.unshard(discard=alone or self.broken)

    def abandon(self, error: BaseException):
        """An error in the middle of a step: forget what was sent. The other ranks cannot go on without this one. RankError in place of what a
        collective raises that another rank has left."""
        # Shares: the others wait for this rank's weights, too.
        self.broken = (
            self.broken
            or self.sent
            and (self.next > 0 or self.sharded)
            or self.how.ordered
            and bool(self.messages)
        )
        self.sent = False
        if self.p2p:
            self.p2p.forget()
        self.pending, self.next, self.missing = [], 0, None
        self.accumulator.added = None
        if self.apart:
            self.apart.forget()
        self.wrong.zero_()
        if self.how.ordered:
            self.total.zero_()
            self.messages, self.bits = [], 0
        self._give_up(error, f"in step {self.steps + 1}")

    def _give_up(self, error: BaseException, when: str):
        """RankError where that is what a failed collective says, with the ranks that did not come to it."""
        if (
            isinstance(error, dist.DistError)
            or isinstance(error, RuntimeError)
            and ("gloo" in str(error) or "pair closure" in str(error))
        ):
            late = "imed out" in str(error) or "timeout" in str(
                error
            )  # else a rank has gone, and who is behind may only be slower
            gone = late and self.group is None and rendezvous.missing()
            who = f"{rendezvous.ranks_in_words(gone)} of {self.world}" if gone else "another one"
            raise RankError(
                f"rank {self.rank} of {self.world} cannot reach {who} {when}: it has stopped (what it said is in its own output), hangs, or the "
                f"network is down. {str(error).splitlines()[0]}"
            ) from error

    # ---- ordered mode ----

    @torch.no_grad()
    def round(self, loss, tokens, rows, micros):
        """One micro-batch of each rank (or none) is in arena.grads: slices change hands, and are added in the order of the ranks."""
        accumulator, grads, own = self.accumulator, self.arena.grads, self.own
        if not (self.cuda and torch.cuda.is_current_stream_capturing()):
            self.beat(0)
        accumulator.finish()
        for bucket in self.buckets:
            self._look(bucket)
        self.wrong |= ~torch.isfinite(self.own_sums)
        if self.world == 1:
            accumulate_(self.total, grads)
        else:
            tail = grads[own * self.world :]
            if own:
                dist.all_to_all_single(
                    self.slices.view(-1), grads[: own * self.world], group=self.group
                )
            if len(tail):
                all_gather(self.rests.view(-1), tail, group=self.group)
            for theirs, last in zip(self.slices, self.rests):
                accumulate_(self.total[:own], theirs)
                accumulate_(self.total[own:], last)
        self.messages.append(self._message(loss, tokens, rows, micros))
        self.bits |= accumulator.detach()
        accumulator._clear()

    def _end_rounds(self):
        """The ordered sum goes to every rank."""
        grads, own = self.arena.grads, self.own
        mine = torch.cat([*self.messages, self._blame()[0]])
        everyone = (
            mine[None]
            if self.world == 1
            else torch.empty(self.world, len(mine), dtype=torch.float64, device=grads.device)
        )
        if self.world == 1:
            grads.copy_(self.total)
        else:
            if own:
                all_gather(grads[: own * self.world], self.total[:own], group=self.group)
            grads[own * self.world :] = self.total[own:]
            all_gather(everyone.view(-1), mine, group=self.group)
        self.arena.grads_changed()
        rounds = len(self.messages)
        self.total.zero_()
        self.accumulator.restore(self.bits)
        self.messages, self.bits = [], 0
        self._keep_blame(everyone[:, 5 * rounds :])
        numbers = (
            everyone[:, : 5 * rounds].view(self.world, rounds, 5).transpose(0, 1).reshape(-1, 5)
        )  # in global order
        loss = numbers[0, 0].float()
        for other in numbers[1:, 0].float():
            loss = loss + other
        return loss, *numbers[:, 1:].sum(0)

    # ---- what may be asked ----

    def _explain_skip(self, number: int) -> dict:
        """What is said of a skipped step whose first tensor that was not finite has this number."""
        found = self.blamed.tolist()
        guilty = [rank for rank, tensor in enumerate(found) if tensor and tensor - 1 == number]
        return {"rank": guilty[0]} if guilty else {}

    def last_nonfinite(self) -> "dict | None":
        """{"rank", "tensor"}: who brought the latest gradient that was not finite, and its first tensor; None. Waits for the device."""
        found = [(tensor - 1, rank) for rank, tensor in enumerate(self.blamed.tolist()) if tensor]
        return (
            {"rank": min(found)[1], "tensor": self.arena.segments[min(found)[0]].name}
            if found
            else None
        )

    def beat(self, steps: int = 1):
        """This rank comes to what it does with the others: at the start and in each round (steps=0), and when a step's backward is over."""
        rendezvous.beat(steps, self.group is None)

    def asked_to_stop(self) -> bool:
        """Have all ranks been asked to stop after the step that has just been taken, or an earlier one?"""
        return 0 < rendezvous.last_step() <= self.steps

    def gather(self, t: Tensor) -> "list[Tensor]":
        """A CPU tensor of each rank, all of one shape, in the order of the ranks. Waits."""
        if self.world == 1:
            return [t]
        mine = t.to(self.arena.device if self.nccl else "cpu")
        everyone = mine.new_empty(self.world * mine.numel())
        all_gather(everyone, mine.view(-1), group=self.group)
        return [one.view_as(t) for one in everyone.cpu().chunk(self.world)]

    def barrier(self):
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier(self.group, device_ids=[self.arena.device.index] if self.nccl else None)

    @torch.no_grad()
    def check(self):
        """Every `check_every` steps the weights' bits are compared over all ranks; on a GPU the result is heard of in a later step."""
        self.steps += 1
        self.sent = False
        if self.world == 1 or not self.how.check_every:
            return
        if self.steps % self.how.check_every == 0:
            mine = weight_hashes(
                self.arena,
                not self.sharded or any(p.dtype == torch.float32 for p in self.arena.params),
            )
            everyone = mine.new_empty(self.world, len(mine))
            all_gather(everyone.view(-1), mine, group=self.group)
            wrong = (everyone != everyone[0]).flatten()
            number = torch.arange(1, len(wrong) + 1, device=wrong.device)
            self.late.put(torch.where(wrong, number, 1 << 24).min() % (1 << 24), self.steps)
        found = self.late.get()
        if found:
            rank, tensor = divmod(int(found) - 1, len(self.arena.segments))
            raise RankError(
                f"after step {self.late.tag} the weights of rank {rank} are not those of rank 0: {self.arena.segments[tensor].name} is the first "
                "tensor that differs. Something outside of the step has changed it, or the ranks do not compute alike"
            )
