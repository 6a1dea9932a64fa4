"""Reduction of gradients while backward runs: what a rank does in one optimizer step. The choices,
and the words for them: distributed/config.py.

    reducer = Reducer(config, arena, optimizers, settings)
    reducer.follow(products)                                 # where backward is compiled
    with arena.gradients.listening(reducer.listener()):      # buckets are sent
        loss.backward()
    loss, tokens, rows, micro_batches = reducer.reduce(loss, tokens, rows, 1)
    # arena.grads holds the sum over all ranks

On GPUs everything runs on streams that fork from the current one by events and join it again, so
that a CUDA graph can hold it, and the host reads nothing. Buckets are reduced by peer-to-peer
copies within one machine (distributed/p2p.py), or by NCCL. On CPUs gloo sums a bucket, and then
backward resumes.
"""

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..ops import CHUNK, launch_squares
from ..optim import Arena, GradientListener, Products
from . import collectives
from .buckets import Bucket
from .config import Distributed
from .light_gradients import LightGradients
from .p2p import behind
from .reducer_base import ReducerBase
from .zero1 import share


class Reducer(ReducerBase):
    """Reduces buckets of gradients while backward runs.

    Args:
        config: not ordered.
        arena: of the model.
        optimizers: a list, those of the step.
        settings: see ReducerBase.
    """

    def __init__(
        self,
        config: Distributed,
        arena: Arena,
        optimizers: list[torch.optim.Optimizer],
        settings: dict[str, str],
    ):
        super().__init__(config, arena, optimizers, settings)
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

    def follow(self, products: Products):
        """Where backward is compiled, autograd's hooks run only at its end: learn from the products
        that they have added."""
        if self.world > 1:
            self.light = LightGradients(self.arena, products.tensors, self.group)

    # ---- while backward runs ----

    @torch.no_grad()
    def listener(self):
        if self.light:
            self.light.begin()
        return _BucketSender(self)

    @torch.no_grad()
    def send_next_bucket(self):
        """Start the next bucket's reduction."""
        bucket = self.buckets[self.next]
        self.arena.gradients.collect(bucket.first, bucket.last)
        self.arena.gradients.zero_stale(bucket.first, bucket.last)
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

    def _reduce(self, message):
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

    # ---- errors, the end ----

    def _forget_step(self):
        if self.p2p is not None:
            self.p2p.forget()
        self.next = 0
        if self.light:
            self.light.end()


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
