"""What a rank does in one optimizer step: compare, reduce, tell of errors. The choices, and the
words for them: distributed/config.py.

    reducer = Reducer(config, arena, optimizers, settings)
    reducer.follow(products)                                 # where backward is compiled
    with arena.gradients.listening(reducer.listener()):      # buckets are sent
        loss.backward()
    totals = reducer.reduce(Totals(loss, tokens, 1))
    # arena.grads holds the sum over all ranks

On GPUs everything runs on streams that fork from the current one by events and join it again, so
that a CUDA graph can hold it, and the host reads nothing. Buckets are reduced by peer-to-peer
copies within one machine (distributed/p2p.py), or by NCCL. On CPUs gloo sums a bucket, and then
backward resumes. OrderedReducer (distributed/ordered.py) sums in another order.
"""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..backends import takes
from ..errors import ArgumentError, NonFiniteError, RankError
from ..ops import (
    CHUNK,
    MAX_TENSORS,
    accumulate_kernel,
    clip_kernel,
    launch_squares,
    tensors_of_launch,
)
from ..optim import Arena, DeviceOptimizer, GradientListener, Products
from . import collectives, heartbeat
from .agreement import UsedTensors, WeightCheck, broadcast, broadcast_weights, compare
from .buckets import Bucket, join_blocks
from .config import Distributed
from .light_gradients import LightGradients
from .nonfinite import NonFiniteSearch
from .p2p import PeerToPeer, behind
from .zero1 import ShardedLayout, share


@dataclass
class Totals:
    """Sums over the micro-batches of a step: of one rank, or of all ranks.

    Numbers on the host, or () tensors on the device in a captured step and after an all-reduce.

    Attributes:
        loss: fp32; None before the first micro-batch.
        tokens: None where loss_fn returns means.
        micro_batches: how many were added.
    """

    loss: Tensor | None = None
    tokens: Tensor | None = None
    micro_batches: int | Tensor = 0

    def add(self, loss: Tensor, tokens: Tensor | None):
        self.loss = loss if self.loss is None else self.loss + loss
        # loss_fn counts tokens in every micro-batch, or in none.
        if tokens is not None:
            self.tokens = tokens if self.tokens is None else self.tokens + tokens
        self.micro_batches += 1


class Reducer:
    """A TrainStep's side of the group: reduces buckets of gradients while backward runs.

    It begins by comparing the models of all ranks and sending rank 0's weights. Make it before
    layers add into the arena, whose buffers may move.

    Args:
        config: of the group.
        arena: of the model.
        optimizers: a list, those of the step.
        settings: name -> value of what has to be equal on all ranks beside `config`.

    Raises:
        ArgumentError: on every rank, naming the first tensor or setting that differs; and as
            PeerToPeer.of().
        RankError: where another rank is lost meanwhile.
    """

    def __init__(
        self,
        config: Distributed,
        arena: Arena,
        optimizers: list[torch.optim.Optimizer],
        settings: dict[str, str],
    ):
        self.config = config
        self.arena = arena
        self.optimizers = optimizers
        self.rank, self.world, self.group = config.rank, config.world, config.group
        self.cuda = arena.device.type == "cuda"
        self.nccl = config.backend == "nccl"
        if self.nccl and not self.cuda:
            raise ArgumentError(
                f"the group's backend is nccl, and the model is on {arena.device}; expected a "
                "model on a GPU, or gloo"
            )
        self.kernels = takes(arena.device)
        self.buckets = join_blocks(arena.blocks, config.bucket_mb * 1e6)
        self.steps = 0  # optimizer steps taken
        # The other ranks wait for the rest of this step. (A capture sends nothing yet.)
        self.sent = False
        self.broken = False  # a step was left then
        # All modules would take the host as long as many launches.
        self.modules_with_buffers: list[nn.Module] = []
        if config.broadcast_buffers and self.world > 1:
            self.modules_with_buffers = [m for m in arena.module.modules() if m._buffers]
        self.buffers_sent = False  # of the step that is under way
        self.heartbeat(0)
        try:
            compare(config, arena, optimizers, settings)
            self.p2p = PeerToPeer.of(config, arena, self.buckets)
            broadcast_weights(config, arena)
        except dist.DistError as error:
            raise heartbeat.lost_rank(error, "at the start", config) from error
        every_step = not self.cuda if config.find_unused is None else config.find_unused
        self.used = UsedTensors(config, arena, every_step or self.world == 1)
        self.sharded = config.sharded and self.world > 1
        if self.sharded:
            # From here on the optimizer keeps this rank's share of its state.
            opt = optimizers[0]
            # TrainStep refuses others.
            assert isinstance(opt, DeviceOptimizer)
            opt.shard(ShardedLayout(config, arena, self.buckets, self.p2p))
        if self.cuda:
            self._prepare_for_capture()
        self.nonfinite = NonFiniteSearch(config, arena, self.p2p)
        masters = not self.sharded or any(p.dtype == torch.float32 for p in arena.module_parameters)
        self.weight_check = WeightCheck(config, arena, masters)
        # Of the tokens that loss_fn counts; None: not known on this rank, or they are not counted.
        self.count_dtype: torch.dtype | None = None
        # Whether it returns means, without tokens; None: not known.
        self.means: bool | None = None
        # Whether the last step ended with an error on this rank.
        self.left = False
        for opt in optimizers:
            if isinstance(opt, DeviceOptimizer) and opt.arena is arena:
                opt.explain_skip = self._explain_skip
        self.bucket_of = [
            number for number, b in enumerate(self.buckets) for _ in range(b.first, b.last)
        ]
        self.stream: torch.cuda.Stream | None = None
        if self.p2p is not None:
            self.stream = self.p2p.stream
        elif self.nccl:
            self.stream = torch.cuda.Stream(arena.device, priority=-1)
        # Sums of squares of the chunks, of all ranks' gradients.
        self.squares = torch.zeros(arena.numel // CHUNK, dtype=torch.float64, device=arena.device)
        # The same of those that this rank has added up, 0 elsewhere. None: every rank has all sums.
        self.own_squares: Tensor | None = None
        if self.p2p is not None:
            self.own_squares = self.p2p.squares
        elif self.sharded and self.kernels:
            self.own_squares = torch.zeros_like(self.squares)
        self.next = 0
        self.light: LightGradients | None = None

    def _prepare_for_capture(self):
        """What a capture cannot do: compile and load kernels, and connect the ranks by NCCL."""
        if self.kernels:
            index = self.arena.device.index
            for most in {MAX_TENSORS, tensors_of_launch(len(self.arena.segments))}:
                clip_kernel("squares_v2", 2.0, most).load(index)
            accumulate_kernel("accumulate_v2", torch.float32).load(index)
        if not self.nccl or self.world == 1:
            return
        one = torch.zeros(1, device=self.arena.device)
        each = torch.zeros(self.world, device=self.arena.device)
        splits = [1] * self.world
        collectives.all_to_all(torch.empty_like(each), each, splits, splits, group=self.group)
        collectives.all_gather(each, one, group=self.group)
        collectives.reduce_scatter(one, each, group=self.group)
        collectives.all_reduce(one, group=self.group)
        collectives.broadcast(one, group_src=0, group=self.group)
        torch.cuda.synchronize(self.arena.device)

    def follow(self, products: Products):
        """Where backward is compiled, autograd's hooks run only at its end: learn from the products
        that they have added."""
        if self.world > 1:
            self.light = LightGradients(self.arena, products.tensors, self.group)

    # ---- what TrainStep calls ----

    def begin_step(self):
        """Every rank gets rank 0's buffers, before the first forward of a step.

        Raises:
            RankError: where this rank left an earlier step after it had sent part of it.
        """
        if self.broken:
            raise RankError(
                f"rank {self.rank} left an earlier step with an error after it had sent part of "
                "its gradient, and the other ranks wait for the rest. Expected a new start of all "
                "ranks, from a checkpoint"
            )
        # A rank whose forward raised takes the step again, and the others are in its middle.
        if self.left and self.buffers_sent:
            return
        # Looked up in each step: forward may replace a buffer.
        buffers = [b for m in self.modules_with_buffers for b in m._buffers.values()]
        buffers = [b for b in dict.fromkeys(buffers) if b is not None and b.numel()]
        if not buffers:
            return
        self.buffers_sent = self.buffers_sent or not self._capturing()
        self.heartbeat(0)
        broadcast(self.config, buffers)

    @torch.no_grad()
    def reduce(self, totals: Totals) -> Totals:
        """Sum the gradients in arena.grads and the step's totals over all ranks.

        Args:
            totals: of this rank's micro-batches.

        Returns:
            Those of all ranks, () tensors, micro_batches at least 1. All but the loss are fp64: a
            rank that has had no batch does not know the dtype of the tokens.
        """
        self.heartbeat()
        if totals.loss is not None:
            self.means = totals.tokens is None
        if totals.tokens is not None:
            self.count_dtype = totals.tokens.dtype
        self.arena.gradients.collect()
        loss, total, micro_batches, counted = self._reduce(self._message(totals)).unbind()
        # Where it raises, the other ranks may go on with a tensor less.
        self.used.expose()
        # With a sharded optimizer the others wait for this rank's weights, too.
        self.sent = self.sent and self.sharded
        means = self.means
        if means is None and not self.cuda:
            means = not counted
        tokens = None if means else torch.where(counted > 0, total, micro_batches)
        return Totals(loss.float(), tokens, micro_batches.clamp(min=1))

    def as_counted(self, tokens: Tensor | None) -> Tensor | None:
        """The tokens of all ranks in the dtype in which loss_fn counts them, if that is known.

        Args:
            tokens: of reduce().
        """
        return tokens if tokens is None or self.count_dtype is None else tokens.to(self.count_dtype)

    def _message(self, totals: Totals) -> Tensor:
        """(4,) float64: loss, tokens, micro-batches, and those whose tokens were counted."""
        counted = 0 if totals.tokens is None else totals.micro_batches
        zero = torch.zeros((), dtype=torch.float64, device=self.arena.device)
        values = (totals.loss, totals.tokens, totals.micro_batches, counted)
        return torch.stack([zero if value is None else zero + value for value in values])

    def after_step(self):
        """The update is over; weights are compared every `check_every` steps: RankError."""
        self.steps += 1
        self.sent = self.left = self.buffers_sent = False
        with torch.no_grad():
            self.weight_check.after_step(self.steps)

    def abort_step(self, error: BaseException):
        """An error ended the step on this rank. What it has sent is forgotten; when others wait
        for the rest, no further step is possible.

        Raises:
            RankError: where the error is a collective's, because another rank is lost.
        """
        # The norm is that of all ranks, and so is this error.
        if isinstance(error, NonFiniteError):
            self.buffers_sent = False
        else:
            self.broken = self.broken or self.sent
            self.left = True
        self.sent = False
        self._forget_step()
        self.nonfinite.forget()
        if isinstance(error, dist.DistError):
            raise heartbeat.lost_rank(error, f"in step {self.steps + 1}", self.config) from error

    def _forget_step(self):
        if self.p2p is not None:
            self.p2p.forget()
        self.next = 0
        if self.light:
            self.light.end()

    def close(self, alone: bool):
        """The step is closed. The process group stays.

        Args:
            alone: by an error, so that the other ranks may not do the same. So it is where the
                error that ended the last step is on its way (`finally: step.close()`).
        """
        alone = alone or self.broken or (self.left and sys.exc_info()[1] is not None)
        for opt in self.optimizers:
            if isinstance(opt, DeviceOptimizer):
                opt.explain_skip = None
                if self.sharded:
                    opt.unshard(discard=alone)

    # ---- while backward runs ----

    @torch.no_grad()
    def listener(self) -> GradientListener | None:
        """Sends buckets while the last backward runs; None: nothing is sent then."""
        if self.light:
            self.light.begin()
        return _BucketSender(self)

    @torch.no_grad()
    def send_next_bucket(self):
        """Start the next bucket's reduction."""
        bucket = self.buckets[self.next]
        self.arena.gradients.collect(bucket.first, bucket.last)
        self.arena.gradients.zero_stale(bucket.first, bucket.last)
        if self.next == 0 and not self.nccl:
            # The host waits here for ranks that have not come so far; with NCCL only a GPU does.
            self.heartbeat(0)
        self.next += 1
        self.sent = not self._capturing()
        if self.p2p is not None:
            self.p2p.send(bucket)
            return
        with self._beside():
            self._sum(bucket)

    def _beside(self):
        """Context manager: on this reducer's stream, behind what the current one has."""
        current = torch.cuda.current_stream(self.arena.device) if self.stream else None
        return behind(current, self.stream)

    def _sum(self, bucket: Bucket):
        """Sum a bucket over all ranks, in place; with a sharded optimizer only this rank's share of
        it, and the rest that belongs to all."""
        part = self.arena.grads[bucket.start : bucket.stop]
        self.nonfinite.probe(bucket)
        # The same tensor, if that is fp32.
        message = part.to(self.config.dtype)
        own = share(bucket, self.world) if self.sharded and self.kernels else 0
        mine, rest = (self.rank * own, (self.rank + 1) * own), (self.world * own, len(part))
        if own:
            result = message[slice(*mine)]
            # gloo does not write where it reads.
            target = result if self.nccl else torch.empty_like(result)
            collectives.reduce_scatter(target, message[: rest[0]], group=self.group)
            if target is not result:
                result.copy_(target)
        if rest[1] > rest[0]:
            collectives.all_reduce(message[rest[0] :], group=self.group)
        if message is not part:
            part.copy_(message)
        if self.own_squares is not None:
            # Rank 0 squares what all ranks have.
            for start, stop in (mine, rest)[: 1 if self.rank else 2]:
                first, last = (bucket.start + start) // CHUNK, (bucket.start + stop) // CHUNK
                launch_squares([part[start:stop]], self.own_squares[first:last])

    # ---- after backward ----

    def _reduce(self, message: Tensor) -> Tensor:
        """Sum gradients and _message() over all ranks."""
        if self.light:
            self.light.begin()
        while self.next < len(self.buckets):
            self.send_next_bucket()
        totals = self._exchange_totals(message)
        self._join()
        return totals

    def _exchange_totals(self, message: Tensor) -> Tensor:
        """One all-reduce behind the last bucket: the step's totals, the search for non-finite
        gradients, and the squares of what each rank has added up alone."""
        with self._beside():
            if self.light:
                self.light.all_reduce(self.nonfinite)
            if self.p2p is not None:
                self.p2p.join_sums()
            parts = [message, self.nonfinite.message()]
            if self.own_squares is not None:
                parts.append(self.own_squares)
            everything = torch.cat(parts)
            collectives.all_reduce(everything, group=self.group)
            totals, tensors, *squares = everything.split([len(part) for part in parts])
            self.nonfinite.record(tensors)
            if self.own_squares is not None:
                self.squares.copy_(*squares)
            return totals

    def _join(self):
        """From here on the current stream sees the sums; the arena keeps their squares."""
        if self.stream is not None:
            torch.cuda.current_stream(self.arena.device).wait_stream(self.stream)
        if self.own_squares is not None and self.light and self.kernels:
            # The buckets were reduced with old values of the light gradients.
            squares = self.squares.new_empty(len(self.light.chunks))
            launch_squares([self.light.sums], squares)
            self.squares.index_copy_(0, self.light.chunks, squares)
        if self.p2p is not None:
            self.p2p.join()
        if self.light:
            self.light.copy_out()
        self.next = 0
        # torch does not count collectives as writes.
        torch.autograd.graph.increment_version(self.arena.grads)
        if self.own_squares is not None:
            self.arena.gradients.keep_squares(self.squares)

    # ---- what may be asked ----

    def _capturing(self) -> bool:
        return self.cuda and torch.cuda.is_current_stream_capturing()

    def _explain_skip(self, tensor: int) -> dict:
        """What is said of a skipped step whose first non-finite tensor has this number."""
        newest = self.nonfinite.last()
        if newest is None or newest["tensor"] != self.arena.segments[tensor].name:
            return {}
        return {"rank": newest["rank"]}

    def last_nonfinite(self) -> dict | None:
        """{"rank", "tensor"}: the rank that brought the newest non-finite gradient, and its first
        tensor; None. Waits for the device."""
        return self.nonfinite.last()

    def heartbeat(self, steps: int = 1):
        """This rank is about to enter a collective. steps: 1 when a step's backward is over; 0 at
        the start, at a broadcast of buffers, at gloo's first bucket and between the micro-batches
        of ordered mode."""
        if not self._capturing():
            heartbeat.heartbeat(steps, self.group)

    def asked_to_stop(self) -> bool:
        """Whether ga.launch has asked all ranks to stop after the last step or an earlier one."""
        launched = heartbeat.launched_rank
        return launched is not None and launched.asked_to_stop()

    def gather(self, value) -> list:
        """A value of each rank, in their order. Waits.

        Args:
            value: picklable.
        """
        return collectives.gather_objects(value, self.group, self.world)


class _BucketSender(GradientListener):
    """Sends a bucket when backward has computed the gradients of all its tensors.

    Buckets are sent in order, so that all ranks send the same one.

    A compiled backward runs its hooks when all of it is over. Then a tensor of a fused product
    counts as complete after as many products as in the backward before, and light tensors are
    all-reduced by themselves (light_gradients.py)."""

    def __init__(self, reducer: Reducer):
        self.reducer = reducer
        self.light = reducer.light
        light = self.light.tensors if self.light else ()
        # Of each bucket: how many of its tensors are not complete yet.
        self.incomplete = [
            sum(i not in light for i in range(b.first, b.last)) for b in reducer.buckets
        ]
        # Tensors that counted as complete before their hook ran -> the gradient's version then.
        self.complete_early: dict[int, int] = {}

    def gradient_complete(self, i):
        if self.light and i in self.light.tensors:
            return
        reducer = self.reducer
        bucket = reducer.bucket_of[i]
        early = i in self.complete_early
        if not early:
            self.incomplete[bucket] -= 1
        same = early and self.complete_early[i] == self._version(i)
        if bucket < reducer.next and not same or self.incomplete[bucket] < 0:
            self._refuse(i)
        while reducer.next < len(reducer.buckets) and not self.incomplete[reducer.next]:
            reducer.send_next_bucket()

    def _version(self, i: int) -> int:
        """Autograd's additions and products change it."""
        return self.reducer.arena.gradients.views[i]._version

    def product_added(self, tensors):
        if not self.light:
            return
        for i, complete in tensors.items():
            if i in self.complete_early:
                if self.reducer.bucket_of[i] < self.reducer.next:
                    self._refuse(i)
                self.complete_early[i] = self._version(i)
            elif complete:
                self.gradient_complete(i)
                self.complete_early[i] = self._version(i)

    def _refuse(self, i):
        raise ArgumentError(
            f"{self.reducer.arena.segments[i].name} got more of its gradient after that was "
            "sent to the other ranks (a weight that several checkpointed parts share, with "
            "use_reentrant=True? a compiled model that uses it more often than in the last step?); "
            "use torch.utils.checkpoint(..., use_reentrant=False), or compile=False"
        )
