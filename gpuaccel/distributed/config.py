"""Data-parallel training: several processes ("ranks") with one model each, whose gradients are
summed while backward still runs.

    config = ga.Distributed()              # in each rank; torchrun --nproc-per-node 2 train.py
    step = ga.TrainStep(model, opt, micro_batches=4, distributed=config)
    out = step(batch)                      # this rank's batch, or None: it has none left
    out.loss                               # the mean over all ranks
    step.reducer.last_nonfinite()         # waits; None, or {"rank": 1, "tensor": "head.weight"}

The collectives are torch.distributed's: NCCL on GPUs, gloo on CPUs. GPUs that are all of one
machine sum by peer-to-peer copies instead (distributed/p2p.py). Gradients are reduced in buckets,
contiguous ranges of the arena. In the last micro-batch's backward a bucket is sent as soon as its
gradients are complete, on a stream of its own, without host synchronisation. The sum is divided
once, by the tokens of all ranks: uneven batches give the gradient of one process.

Two orders of summation:
  all-reduce  (default) Fast. All ranks get bit-identical sums, which depend on the number of ranks.
              Copies are added in the order of the ranks; where NCCL or gloo sums, the order is
              the library's.
  ordered     Every micro-batch's gradient is added in global order: micro-batch m of rank r has
              number m * ranks + r. N ranks with M micro-batches are bit-identical to one rank with
              N * M. Costs an all-to-all per micro-batch and memory for one more arena.

Source: Li et al., PyTorch Distributed (2020), for buckets; contract C-DDP-001 of entrenar's trainer
for what must hold.
"""

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..errors import ArgumentError
from .rendezvous import init_from_environment

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(kw_only=True, eq=False)
class Distributed:
    """How the ranks of a TrainStep work together. Every rank makes one, with the same arguments.

    gloo listens on the interface through which MASTER_ADDR is reached: on loopback where that is
    this machine. GLOO_SOCKET_IFNAME overrides it.

    Weights, frozen parameters and buffers are rank 0's at the start.

    Attributes:
        group: a process group. Default: torch.distributed's default group. If there is none yet, it
            is made from torchrun's environment, with NCCL where torch sees a GPU and gloo
            elsewhere. ga.launch has made one: NCCL where there are GPUs enough for all ranks.
            Without either this process is the only rank.
        dtype: of the gradient sums that are sent, torch.float32 or torch.bfloat16. bfloat16 halves
            the bytes; each rank rounds its sum once, and every addition rounds again.
        ordered: add the micro-batches in global order: N ranks with M micro-batches are
            bit-identical to one process with N x M, whether that one is given `distributed` or not.
        sharded: each rank keeps and updates its share of the optimizer's moments, ZeRO stage 1.
            Needs ga.AdamW or ga.optim.Lion over the arena.
        broadcast_buffers: buffers, such as running means of BatchNorm, are rank 0's at the start of
            each step, before the first micro-batch, as in torch's DistributedDataParallel. One
            collective; none for a model without buffers. False: what forward does to buffers stays
            on its rank.
        bucket_mb: smallest size of a bucket, in megabytes of fp32.
        find_unused: True: find in every step the tensors that got a gradient on any rank; on a GPU
            the host waits for that. False: the first step fixes the set; afterwards a missing
            gradient counts as zero, and a new one is an ArgumentError. None: True on CPUs, False on
            GPUs.
        check_every: steps between comparisons of the bits of all weights over all ranks; 0, the
            default: none. RankError where they differ. On a GPU it comes some steps late, without a
            wait.
        find_nonfinite_rank: find the rank that brought a gradient that is NaN or infinite. This
            reads the gradients once more, beside backward; with peer-to-peer copies it costs
            nothing.
        peer_to_peer: GPUs that are all of one machine reduce fp32 sums by peer-to-peer copies
            instead of NCCL's kernels. None: where possible. True:
            ArgumentError where it is not possible. False: always NCCL.
        timeout: seconds that a group made here waits for another rank, at its start and in every
            collective. Then RankError, which names the rank. With NCCL, where no call returns with
            an error, the process prints the message and ends. Peer-to-peer copies, in any
            group, fail with a CUDA error after timeout + 10 seconds.
        rank: of this process in the group, from 0.
        world: number of ranks.
        backend: "nccl", "gloo", or "none" for this process alone.

    Raises:
        ArgumentError: for a dtype that is neither fp32 nor bf16, bf16 in ordered mode, a bucket_mb
            that is not positive, a negative check_every, an environment that is not torchrun's,
            more ranks than GPUs on a machine with GPUs, and a process outside the group.
        RankError: where the ranks do not find each other within `timeout`.

    Example:
        >>> model = torch.nn.Linear(4, 2, device=ga.default_device())
        >>> ranks = ga.Distributed(check_every=100)  # of torchrun, or this process alone
        >>> step = ga.TrainStep(model, loss_fn=lambda m, x: m(x).square().mean(), distributed=ranks)
        >>> out = step(torch.ones(8, 4, device=ga.default_device()))
        >>> ranks
        Distributed(rank 0 of 1, none, all-reduce in float32)
        >>> step.close()
    """

    group: dist.ProcessGroup | None = None
    dtype: torch.dtype = torch.float32
    ordered: bool = False
    sharded: bool = False
    broadcast_buffers: bool = True
    bucket_mb: float = 32.0
    find_unused: bool | None = None
    check_every: int = 0
    find_nonfinite_rank: bool = True
    peer_to_peer: bool | None = None
    timeout: float = 600.0
    rank: int = field(default=0, init=False)
    world: int = field(default=1, init=False)
    backend: str = field(default="none", init=False)

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ArgumentError(
                f"dtype is {self.dtype}; sums are sent as torch.float32 or torch.bfloat16"
            )
        if self.ordered and self.dtype != torch.float32:
            raise ArgumentError(
                f"dtype is {self.dtype}; in ordered mode every addition is fp32: expected "
                "torch.float32"
            )
        if not self.bucket_mb > 0:
            raise ArgumentError(
                f"bucket_mb is {self.bucket_mb}; expected a positive number of megabytes"
            )
        if self.check_every < 0:
            raise ArgumentError(
                f"check_every is {self.check_every}; expected 0 (never) or a number of steps"
            )
        if self.group is None and not dist.is_initialized() and "RANK" in os.environ:
            init_from_environment(self.timeout)
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise ArgumentError("this process is not a member of the group it was given")
            self.backend = _backend_of(self.group)

    @property
    def needs_reducer(self) -> bool:
        """Whether gradients have to be reduced, as with several ranks and in ordered mode."""
        return self.world > 1 or self.ordered

    def __repr__(self):
        dtype = str(self.dtype).removeprefix("torch.")
        mode = "ordered" if self.ordered else f"all-reduce in {dtype}"
        return (
            f"Distributed(rank {self.rank} of {self.world}, {self.backend}, {mode}"
            f"{', sharded' * self.sharded})"
        )


def _backend_of(group: dist.ProcessGroup | None) -> str:
    """A group's backend; of one that has several, that of the GPUs where torch sees some."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    device = "cuda" if torch.cuda.is_available() and "cuda" in backends else "cpu"
    return backends.get(device) or next(iter(backends.values()))
