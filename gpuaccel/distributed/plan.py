"""A model of one data-parallel step on N GPUs: how much of the communication does backward hide?

    workload = Workload.of(model, micro_ms=21.6, tail_ms=3.7, micro_batches=4)
    machine = Machine(gpus=8, link=Link(GBs=317), network=Link(GBs=50, latency_us=10))
    prediction = predict(workload, machine, gpus=64)
    prediction.step_ms, prediction.rate            # of the step; of one GPU that trains alone

The step is the one of distributed/reducer.py. All micro-batches but the last only compute. In the
backward of the last one each bucket is sent as soon as its gradients are complete, behind the
bucket before it. Clipping and the update follow when backward and the last bucket are over.

`overlap` simulates that; `predict` counts what is outside of it, and adds the wait for the slowest
rank. What is measured, fitted and assumed, and how far predictions are off: docs/planning.md.
"""

import functools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ArgumentError
from ..ops import CHUNK
from ..optim.layout import Block, lay_out
from .buckets import join_blocks

# Of a micro-batch's time: two of the three matrix products of a weight are those of backward.
BACKWARD = 2 / 3
# Beside a pass over GPU memory backward has a quarter of its speed; peer-to-peer copies do not slow
# it. Chosen with recorded steps in view, as docs/planning.md says.
PASS_SLOW = 3.0


def _ms(count: float, GBs: float) -> float:
    return count / GBs / 1e6


def _check(positive: dict[str, float], others: dict[str, float] | None = None):
    for name, value in positive.items():
        if not value > 0:
            raise ArgumentError(f"{name} is {value}; expected more than 0")
    for name, value in (others or {}).items():
        if not value >= 0:
            raise ArgumentError(f"{name} is {value}; expected 0 or more")


# ---- what is asked about -------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A model and the time of its step on one GPU that trains alone.

    Attributes:
        blocks: of its arena, in the order in which backward finishes them.
        work: of each block, the share of backward that computes it; their sum is 1.
        micro_ms: forward and backward of one micro-batch.
        tail_ms: clipping and the update.
        micro_batches: of one step.

    Raises:
        ArgumentError: for times that are not positive, and for less than one micro-batch.
    """

    blocks: tuple[Block, ...]
    work: tuple[float, ...]
    micro_ms: float
    tail_ms: float = 0.0
    micro_batches: int = 1

    def __post_init__(self):
        positive = {"micro_ms": self.micro_ms, "micro_batches": self.micro_batches}
        _check(positive, {"tail_ms": self.tail_ms})

    @classmethod
    def of(cls, module: nn.Module, micro_ms: float, tail_ms: float = 0.0, micro_batches: int = 1):
        """The workload of a module, which may be on the meta device.

        A block's share of backward is its share of the elements: the products of a weight take
        time in proportion to its elements. An embedding has no product.
        """
        segments, blocks = lay_out(module)
        products = [
            sum(s.numel for s in segments[b.first : b.last] if not s.embedding) for b in blocks
        ]
        total = sum(products) or 1
        work = tuple(count / total for count in products)
        return cls(tuple(blocks), work, micro_ms, tail_ms, micro_batches)

    @property
    def step_ms(self) -> float:
        """Of one GPU that trains alone."""
        return self.micro_batches * self.micro_ms + self.tail_ms

    @property
    def numel(self) -> int:
        """Elements of the arena, with padding."""
        return self.blocks[-1].stop

    def buckets(self, bucket_mb: float) -> list[tuple[int, float]]:
        """(elements, ms of backward that completes it) of each bucket that the reducer sends."""
        backward = BACKWARD * self.micro_ms
        result, first = [], 0
        for bucket in join_blocks(self.blocks, bucket_mb * 1e6):
            count = sum(b.stop <= bucket.stop for b in self.blocks)
            work = backward * sum(self.work[first:count])
            result.append((bucket.stop - bucket.start, work))
            first = count
        return result


@dataclass(frozen=True)
class Link:
    """What connects one GPU with others.

    Attributes:
        GBs: gigabytes (1e9) per second that a GPU sends, and receives at the same time.
        latency_us: of a message between two neighbours.

    Raises:
        ArgumentError: for a bandwidth that is not positive, and for a negative latency.
    """

    GBs: float = math.inf
    latency_us: float = 0.0

    def __post_init__(self):
        _check({"GBs": self.GBs}, {"latency_us": self.latency_us})


@dataclass(frozen=True)
class Machine:
    """The machines that train. What is left out costs nothing.

    Attributes:
        gpus: of each machine.
        link: of a GPU to the others of its machine.
        network: of a GPU to other machines: a machine's network cards over its GPUs.
        start_us: fixed cost of a collective or of a barrier with its copies.
        memory_GBs: rate of a pass over GPU memory, bytes read and written together.
        nccl_slow: while an NCCL kernel runs, backward takes 1 + nccl_slow times as long.
        spread: standard deviation of a rank's step time, as a share of it.

    Raises:
        ArgumentError: for less than one GPU, and for numbers below 0.
    """

    gpus: int = 8
    link: Link = Link()
    network: Link = Link()
    start_us: float = 0.0
    memory_GBs: float = math.inf
    nccl_slow: float = 0.0
    spread: float = 0.0

    def __post_init__(self):
        others = {name: getattr(self, name) for name in ("start_us", "nccl_slow", "spread")}
        _check({"gpus": self.gpus, "memory_GBs": self.memory_GBs}, others)


# ---- the simulation ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A part of a bucket's way: it occupies a lane for so many ms.

    A lane serves one bucket at a time, first come, first served: `link` (between the GPUs of a
    machine), `network` (between machines), `memory` (a pass over GPU memory). Meanwhile backward
    takes 1 + slows times as long."""

    lane: str
    ms: float
    slows: float = 0.0


def overlap(work: Sequence[float], stages: Sequence[Sequence[Stage]]) -> list[tuple[float, float]]:
    """When each bucket is complete, and when its last stage is over.

    Args:
        work: of each bucket, ms of backward behind the bucket before it, were nothing sent.
        stages: of each bucket, what it passes through when it is complete.

    Returns:
        (complete, over) of each bucket, in ms from the beginning of backward.
    """
    # Backward is a lane, in which all buckets wait at the beginning.
    ahead = [deque([Stage("backward", ms), *after]) for ms, after in zip(work, stages)]
    lanes = {"backward": deque(range(len(work)))}
    left: dict[str, float] = {}
    ends: list[list[float]] = [[] for _ in work]
    now = 0.0
    while busy := {lane: ahead[waiting[0]][0] for lane, waiting in lanes.items() if waiting}:
        slowed = 1 + sum(stage.slows for stage in busy.values())
        slow = {lane: slowed if lane == "backward" else 1.0 for lane in busy}
        until_over = {lane: left.get(lane, stage.ms) * slow[lane] for lane, stage in busy.items()}
        # To the next event. Whatever ends there ends exactly, whatever its rounding.
        elapsed = min(until_over.values())
        now += elapsed
        for lane in busy:
            left[lane] = (until_over[lane] - elapsed) / slow[lane]
            if until_over[lane] <= elapsed:
                del left[lane]
                bucket = lanes[lane].popleft()
                ahead[bucket].popleft()
                ends[bucket].append(now)
                if ahead[bucket]:
                    lanes.setdefault(ahead[bucket][0].lane, deque()).append(bucket)
    return [(times[0], times[-1]) for times in ends]


def all_reduce_ms(count: float, machine: Machine, gpus: int) -> float:
    """NCCL's all-reduce of so many bytes: the faster one of its ring and its double binary tree.

    In a ring every GPU sends 2 (N - 1) / N of the bytes; a machine sends as much through all its
    network cards together. In a tree it sends and receives the bytes twice, in fewer hops. Hops are
    counted as in src/graph/tuning.cc of NCCL."""
    if gpus == 1:
        return 0.0
    inside = min(gpus, machine.gpus)
    machines = -(-gpus // machine.gpus)
    hop, far_hop = machine.link.latency_us / 1e3, machine.network.latency_us / 1e3

    def bytes_ms(sent):
        through_network = _ms(sent / inside, machine.network.GBs) if machines > 1 else 0.0
        return max(_ms(sent, machine.link.GBs) if inside > 1 else 0.0, through_network)

    far_hops = 2 * (machines - 1)
    ring = bytes_ms(2 * (gpus - 1) / gpus * count)
    ring += (2 * (gpus - 1) - far_hops) * hop + far_hops * far_hop
    tree = bytes_ms(2 * count) + 2 * (inside - 1) * hop + 2 * math.log2(machines) * far_hop
    return machine.start_us / 1e3 + min(ring, tree)


def nccl_stages(elements: int, machine: Machine, gpus: int, dtype: torch.dtype) -> list[Stage]:
    """A bucket that NCCL reduces over all GPUs.

    The search for non-finite gradients reads it first. In bf16 it is rounded before and converted
    back behind. These are passes over memory."""
    low = dtype != torch.float32
    lane = "network" if gpus > machine.gpus else "link"
    message = all_reduce_ms(elements * (2 if low else 4), machine, gpus)
    passes = [elements * (10 if low else 4), elements * 6 if low else 0]
    times = (_ms(count, machine.memory_GBs) for count in passes)
    before, behind = (Stage("memory", ms, PASS_SLOW) for ms in times)
    stages = [before, Stage(lane, message, machine.nccl_slow), behind]
    return [stage for stage in stages if stage.ms]


def copy_stages(elements: int, machine: Machine, gpus: int) -> list[Stage]:
    """A bucket that the GPUs of one machine reduce by peer-to-peer copies, in fp32.

    Each GPU copies in what the others have in its block (1 / gpus of the bucket) and adds, which is
    a pass over memory. Then it copies the other blocks' sums."""
    count = 4 * elements
    in_or_out = machine.start_us / 1e3 + _ms((gpus - 1) / gpus * count, machine.link.GBs)
    adding = _ms((gpus + 1) / gpus * count, machine.memory_GBs)
    copy = Stage("link", in_or_out)
    return [copy, Stage("memory", adding, PASS_SLOW), copy]


# ---- the step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """A step on N GPUs.

    Attributes:
        one_gpu_ms: the step of one GPU that trains alone.
        slowed_ms: what backward takes longer because buckets are sent meanwhile.
        exposed_ms: from the end of backward to that of the last bucket and of the step's totals.
        waiting_ms: for the slowest rank.
    """

    one_gpu_ms: float
    slowed_ms: float = 0.0
    exposed_ms: float = 0.0
    waiting_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        """Time of a step."""
        return self.one_gpu_ms + self.slowed_ms + self.exposed_ms + self.waiting_ms

    @property
    def rate(self) -> float:
        """Of each GPU, as a share of the rate of one that trains alone."""
        return self.one_gpu_ms / self.step_ms


def predict(
    workload: Workload,
    machine: Machine,
    gpus: int,
    peer_to_peer: bool = True,
    dtype: torch.dtype = torch.float32,
    bucket_mb: float = 32.0,
) -> Prediction:
    """Predict one step.

    Args:
        workload: the model, and its step on one GPU.
        machine: the links.
        gpus: of all machines together.
        peer_to_peer: the GPUs of one machine sum in fp32 by peer-to-peer copies. False: NCCL, as
            always over several machines and in bf16.
        dtype: of the sums, fp32 or bf16.
        bucket_mb: smallest size of a bucket, in megabytes of fp32.

    Returns:
        A Prediction.

    Raises:
        ArgumentError: for GPUs that do not fill their machines, and another dtype.

    Example:
        >>> from gpuaccel.distributed.plan import Link, Machine, Workload, predict
        >>> with torch.device("meta"):
        ...     model = ga.preset("tiny").build()
        >>> workload = Workload.of(model, micro_ms=3.0, tail_ms=1.0)
        >>> f"{predict(workload, Machine(link=Link(GBs=10)), gpus=8).rate:.0%}"
        '87%'
        >>> predict(workload, Machine(), gpus=8).rate      # nothing costs anything
        1.0
    """
    if gpus < 1 or (gpus > machine.gpus and gpus % machine.gpus):
        raise ArgumentError(
            f"gpus is {gpus}; expected 1 to {machine.gpus}, or a multiple of the {machine.gpus} "
            "of a machine"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise ArgumentError(f"dtype is {dtype}; expected torch.float32 or torch.bfloat16")
    alone = workload.step_ms
    if gpus == 1:
        return Prediction(alone)
    sizes, work = zip(*workload.buckets(bucket_mb))
    if peer_to_peer and gpus <= machine.gpus and dtype == torch.float32:
        stages = [copy_stages(size, machine, gpus) for size in sizes]
        # The totals, and a sum of squares for each chunk.
        behind = all_reduce_ms(8 * (workload.numel // CHUNK), machine, gpus)
    else:
        stages = [nccl_stages(size, machine, gpus, dtype) for size in sizes]
        # The totals, and a pass that reads all sums for the norm.
        behind = all_reduce_ms(8, machine, gpus) + _ms(4 * workload.numel, machine.memory_GBs)
    complete, over = zip(*overlap(work, stages))
    return Prediction(
        alone,
        slowed_ms=complete[-1] - sum(work),
        exposed_ms=max(over) - complete[-1] + behind,
        waiting_ms=machine.spread * slowest_of(gpus) * alone,
    )


@functools.cache
def slowest_of(ranks: int) -> float:
    """Mean of the largest of so many standard normal numbers: 0, 0.56, 0.85, 1.03, ..."""
    step = 0.01
    x = step * (torch.arange(1000, dtype=torch.float64) + 0.5)
    cdf = torch.special.ndtr
    return float((1 - cdf(x) ** ranks - cdf(-x) ** ranks).sum() * step)
