"""Data-parallel training: several processes ("ranks") with one model each, whose gradients are added up while backward still runs.

    >>> step = ga.TrainStep(model, opt, micro_batches=4, distributed=ga.Distributed())      # in each rank; `torchrun --nproc-per-node 2 train.py`
    >>> out = step(batch)                          # this rank's batch, or None: it has none left; out.loss is the mean over all ranks
    >>> step.reducer.last_nonfinite()                # waits: which rank and tensor brought a gradient that is not finite, or None

The collectives are torch.distributed's (NCCL on GPUs, gloo on CPUs; the GPUs of one machine copy instead: distributed/p2p.py), over buckets: contiguous ranges of
the arena, whole blocks, in the order in which backward finishes. In the last micro-batch's backward a bucket is sent as soon as its gradients are in, on a
stream of its own; nothing waits for the host. Sums are added, not means: they are divided once, by the tokens of all ranks, so that uneven batches give
the gradient that one process would have had.

Two orders of summation:
  all-reduce  (default) fast; each rank gets the same bits, but how many ranks there are, and what the library does, decides which
  ordered     every micro-batch's gradient is added in global order (micro-batch m of rank r is number m * ranks + r): N ranks with M micro-batches
              give the bits of one rank with N * M. Costs an all-to-all per micro-batch, and memory for one more arena

Source: Li et al., PyTorch Distributed (2020), for buckets; contract C-DDP-001 of entrenar's trainer for what must hold.
"""

import os
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError
from ..ops.accumulate import CHUNK
from ..optim.arena import Arena
from .rendezvous import init_from_environment

DTYPES = (torch.float32, torch.bfloat16)
# One tensor for all ranks; the names are torch 2.13's, which warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PIECE = 1 << 22  # elements that are hashed at once: 32 MB of memory in between


@dataclass(frozen=True)
class Bucket:
    """A contiguous range of the arena that is sent at once: elements [start, stop), segments [first, last)."""

    start: int
    stop: int
    first: int
    last: int


def buckets_of(arena: Arena, least_bytes: float) -> "list[Bucket]":
    """Neighbouring blocks of an arena, joined until they have `least_bytes` of fp32; the last one may have less. Blocks are never cut."""
    found, start, first = [], 0, 0
    for block in arena.blocks:
        if 4 * (block.stop - start) >= least_bytes or block.stop == arena.numel:
            found.append(Bucket(start, block.stop, first, block.last))
            start, first = block.stop, block.last
    return [b for b in found if b.stop > b.start] or found[-1:]


def check_alike(mine: "list[tuple[str, str]]", group, world: int):
    """ArgumentError on every rank, naming the first entry (name, value) in which one differs from rank 0."""
    everyone = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            one, two = next((a, b) for a, b in zip_longest(everyone[0], theirs) if a != b)
            if one and two and one[0] == two[0]:
                what = f"{one[0]} is {two[1]} on rank {rank}, and {one[1]} on rank 0"
            else:
                what = f"rank {rank} has {' '.join(two) if two else 'nothing'} where rank 0 has {' '.join(one) if one else 'nothing'}"
            raise ArgumentError(
                f"the ranks differ: {what}. All have to train the same model in the same way"
            )


def compare(how: "Distributed", arena: Arena, opt, settings: dict):
    """ArgumentError on every rank unless all have the same model, the same optimizer and the same way of working as rank 0."""
    rows = [
        (
            s.name,
            f"{str(p.dtype).removeprefix('torch.')} {list(s.shape)}, weight decay {s.decay}, learning rate x{s.lr_scale:g}",
        )
        for s, p in zip(arena.segments, arena.params)
    ]
    rows += [
        (name, f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}, not trained")
        for name, t in _not_trained(arena)
    ]
    rows += [
        (
            f"{key} of the optimizer's group {g}",
            f"{value.tolist() if isinstance(value, Tensor) else value}",
        )
        for g, group in enumerate(opt.param_groups)
        for key, value in sorted(group.items())
        if key not in ("params", "param_names")
    ]
    names = (
        "dtype",
        "ordered",
        "sharded",
        "bucket_mb",
        "find_unused",
        "check_every",
        "blame",
        "peer_to_peer",
    )
    choices = [(name, str(getattr(how, name))) for name in names]
    check_alike(
        [
            ("ranks", f"{how.world}"),
            ("the optimizer", type(opt).__name__),
            *choices,
            *settings.items(),
            *rows,
        ],
        how.group,
        how.world,
    )


@torch.no_grad()
def broadcast(how: "Distributed", arena: Arena):
    """Every rank gets rank 0's weights, frozen parameters and buffers."""
    if how.world == 1:
        return
    arena.adopt()
    for t in [arena.weights, arena.bf16_weights, *(t.data for _, t in _not_trained(arena))]:
        if t is not None and t.numel():
            home = t if t.is_contiguous() else t.contiguous()
            dist.broadcast(home, group_src=0, group=how.group)
            if home is not t:
                t.copy_(home)
    arena.weights_written()


def _not_trained(arena):
    """(name, tensor) of frozen parameters and buffers."""
    trained = {id(p) for p in arena.params}
    yield from ((name, p) for name, p in arena.module.named_parameters() if id(p) not in trained)
    yield from arena.module.named_buffers()


def weight_hashes(arena: Arena, masters: bool = True) -> Tensor:
    """(S,) int64 on the arena's device, a hash of the bits of each tensor's weights. No wait; the same on every device.

    masters: with the fp32 masters of bf16 weights, and what else is fp32."""
    found = torch.zeros(len(arena.segments), dtype=torch.int64, device=arena.device)
    column = _odd(CHUNK, 0x9E3779B97F4A7C15, arena.device)
    for buffer, kind in (
        (arena.weights if masters else None, torch.int32),
        (arena.bf16_weights, torch.int16),
    ):
        for start in range(0, 0 if buffer is None else arena.numel, PIECE):
            piece = buffer[start : start + PIECE].view(kind).view(-1, CHUNK).long()
            first = start // CHUNK
            rows = (piece * column).sum(1) * _odd(
                len(piece), 0xBF58476D1CE4E5B9, arena.device, first
            )
            found.index_add_(
                0, arena.chunk_to_tensor[first : first + len(piece)].long(), rows ^ rows >> 29
            )
    return found


def _odd(count, factor, device, first=0) -> Tensor:
    """(count,) odd int64 numbers, all different: multiples of an odd factor, which wrap around."""
    factor -= 1 << 64 if factor >= 1 << 63 else 0
    return (torch.arange(first, first + count, device=device) * 2 + 1) * factor


class Distributed:
    """How the ranks of a TrainStep work together. Every rank makes one, with the same arguments.

    group: a process group; default: torch.distributed's, which is made from torchrun's environment if there is none yet (NCCL where torch sees a
    GPU, else gloo); without that environment this process is the only rank. dtype: of the sums on their way, torch.float32 or torch.bfloat16 (half
    the bytes; each rank rounds its sum once, and so does each addition). ordered: see this module's first lines. sharded: each rank keeps and updates
    its share of the moments (ga.AdamW over the arena; distributed/zero1.py: ZeRO stage 1). bucket_mb: megabytes of fp32 that are worth sending.
    find_unused: which tensors got a gradient on any rank is found out in every step (on a GPU it waits for it); False: in the first step, and from then on
    one of these without a gradient has a zero one, and another that gets one is an ArgumentError; None: True where nothing waits, on CPUs.
    check_every: steps between two comparisons of all weights' bits over all ranks (0: none); on a GPU they are heard of late, without a wait:
    RankError. blame: find out which rank brought a gradient that is not finite (in mode "fused" one more read, beside backward; with peer copies it costs
    nothing). peer_to_peer: GPUs of one machine add up fp32 sums by copies from memory to memory instead of NCCL's kernels (distributed/p2p.py); None: where that can
    be done; True: ArgumentError where it cannot; False: NCCL.
    timeout: seconds that a group made here waits for another rank, at its start and in every collective: then RankError, which names the rank. With NCCL,
    where no call comes back with an error, the process ends with such a message. (Copies end with a CUDA error 10 seconds later, in any group.)
    With gloo such a group listens where MASTER_ADDR is reached from here: on loopback if that is this machine by itself (GLOO_SOCKET_IFNAME: elsewhere).

    A tensor that counts is one of the arena. Frozen parameters and buffers are rank 0's, from the start on; what forward does to buffers later stays
    each rank's own."""

    def __init__(
        self,
        *,
        group=None,
        dtype: torch.dtype = torch.float32,
        ordered: bool = False,
        sharded: bool = False,
        bucket_mb: float = 32.0,
        find_unused: "bool | None" = None,
        check_every: int = 0,
        blame: bool = True,
        peer_to_peer: "bool | None" = None,
        timeout: float = 600.0,
    ):
        if dtype not in DTYPES:
            raise ArgumentError(
                f"dtype is {dtype}; sums are sent as torch.float32 or torch.bfloat16"
            )
        if ordered and dtype != torch.float32:
            raise ArgumentError(
                f"dtype is {dtype}; in ordered mode every addition is fp32: expected torch.float32"
            )
        if not bucket_mb > 0:
            raise ArgumentError(
                f"bucket_mb is {bucket_mb}; expected a positive number of megabytes"
            )
        if check_every < 0:
            raise ArgumentError(
                f"check_every is {check_every}; expected 0 (never) or a number of steps"
            )
        if group is None and not dist.is_initialized() and "RANK" in os.environ:
            init_from_environment(timeout)
        self.group, self.dtype, self.ordered, self.sharded, self.bucket_mb = (
            group,
            dtype,
            ordered,
            sharded,
            bucket_mb,
        )
        self.find_unused, self.check_every, self.blame, self.peer_to_peer, self.timeout = (
            find_unused,
            check_every,
            blame,
            peer_to_peer,
            timeout,
        )
        there = dist.is_initialized()
        self.rank, self.world = (
            (dist.get_rank(group), dist.get_world_size(group)) if there else (0, 1)
        )
        if self.rank < 0:
            raise ArgumentError("this process is not a member of the group it was given")
        self.backend = str(dist.get_backend(group)) if there else "none"

    @property
    def works(self) -> bool:
        """Is there anything to do? One rank needs no reduction; in ordered mode it adds as many would."""
        return self.world > 1 or self.ordered

    def __repr__(self):
        how = (
            "ordered" if self.ordered else f"all-reduce in {str(self.dtype).removeprefix('torch.')}"
        )
        return f"Distributed(rank {self.rank} of {self.world}, {self.backend}, {how}{', sharded' * self.sharded})"
