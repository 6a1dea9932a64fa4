"""What a rank does in a data-parallel step, whatever the order of summation: the start, the step's
totals, the tensors that take part, errors, and what may be asked.

`Reducer` (distributed/reducer.py) sums buckets while backward runs; `OrderedReducer`
(distributed/ordered.py) adds the micro-batches in global order.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..backends import takes
from ..errors import ArgumentError, NonFiniteError, RankError
from ..ops import MAX_TENSORS, accumulate_kernel, clip_kernel, tensors_of_launch
from ..optim import Arena, DeviceOptimizer, GradientListener
from . import collectives, heartbeat
from .agreement import UsedTensors, WeightCheck, broadcast, broadcast_weights, compare
from .buckets import join_blocks
from .config import Distributed
from .nonfinite import NonFiniteSearch
from .p2p import PeerToPeer
from .zero1 import ShardedLayout


class ReducerBase:
    """A TrainStep's side of the group: compares the models of all ranks, sends rank 0's weights.

    Make it before layers add into the arena, whose buffers may move.

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
        with heartbeat.at_the_start(config):
            compare(config, arena, optimizers, settings)
            self.p2p = PeerToPeer.of(config, arena, self.buckets)
            broadcast_weights(config, arena)
        every_step = config.find_unused
        if every_step is None:
            every_step = not self.cuda
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
        masters = not self.sharded or any(p.dtype == torch.float32 for p in arena.params)
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
        collectives.all_to_all(torch.empty_like(each), each, group=self.group)
        collectives.all_gather(each, one, group=self.group)
        collectives.reduce_scatter(one, each, group=self.group)
        collectives.all_reduce(one, group=self.group)
        collectives.broadcast(one, group_src=0, group=self.group)
        torch.cuda.synchronize(self.arena.device)

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

    def listener(self) -> GradientListener | None:
        """Sends buckets while the last backward runs; None: they are sent after it."""
        return None

    @torch.no_grad()
    def reduce(self, loss, tokens, rows, micro_batches: Tensor | float):
        """Sum the gradients in arena.grads and the step's totals over all ranks.

        Args:
            loss, tokens: sums over this rank's micro-batches; None: it had none. tokens is None too
                where loss_fn returns means.
            rows: of this rank's batch, a number or a tensor.

        Returns:
            (loss, tokens, rows, micro-batches), () tensors over all ranks, the loss in fp32, the
            others in fp64: a rank that has had no batch does not know the dtype of the tokens.
            tokens is None where loss_fn returns means.
        """
        self.heartbeat()
        if loss is not None:
            self.means = tokens is None
        if tokens is not None:
            self.count_dtype = tokens.dtype
        self.arena.gradients.collect()
        message = self._message(loss, tokens, rows, micro_batches)
        loss, tokens, rows, micro_batches, counted = self._reduce(message).unbind()
        # Where it raises, the other ranks may go on with a tensor less.
        self.used.expose()
        # With a sharded optimizer the others wait for this rank's weights, too.
        self.sent = self.sent and self.sharded
        means = self.means
        if means is None and not self.cuda:
            means = not counted
        tokens = None if means else torch.where(counted > 0, tokens, micro_batches)
        return loss.float(), tokens, rows, micro_batches

    def as_counted(self, tokens: Tensor | None) -> Tensor | None:
        """The tokens of all ranks in the dtype in which loss_fn counts them, if that is known.

        Args:
            tokens: of reduce().
        """
        return tokens if tokens is None or self.count_dtype is None else tokens.to(self.count_dtype)

    def _reduce(self, message: Tensor) -> Tensor:
        """Sum gradients and _message() over all ranks; the order of summation decides how."""
        raise NotImplementedError

    def _message(self, loss, tokens, rows, micro_batches) -> Tensor:
        """(5,) float64: what this rank adds to the totals, and its micro-batches whose tokens were
        counted. None counts as 0."""
        counted = 0 if tokens is None else micro_batches
        zero = torch.zeros((), dtype=torch.float64, device=self.arena.device)
        values = (loss, tokens, rows, micro_batches, counted)
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
        raise NotImplementedError

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

    # ---- what may be asked ----

    def _capturing(self) -> bool:
        return self.cuda and torch.cuda.is_current_stream_capturing()

    def _explain_skip(self, tensor: int) -> dict:
        """What is said of a skipped step whose first non-finite tensor has this number."""
        rank = self.nonfinite.rank_of(tensor)
        return {} if rank is None else {"rank": rank}

    def last_nonfinite(self) -> dict | None:
        """{"rank", "tensor"}: the rank that brought the newest non-finite gradient, and its first
        tensor; None. Waits for the device."""
        return self.nonfinite.last()

    def heartbeat(self, steps: int = 1):
        """This rank is about to enter a collective. steps: 1 when a step's backward is over; 0 at
        the start, at a broadcast of buffers and between the micro-batches of ordered mode."""
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
