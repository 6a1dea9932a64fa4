"""A model of one data-parallel step on N GPUs: how much of the communication does backward hide?

    workload = Workload.of(model, micro_ms=21.6, tail_ms=3.7, micro_batches=4)
    machine = Machine(gpus=8, link=Link(GBs=317), network=Link(GBs=50, latency_us=10))
    prediction = predict(workload, machine, gpus=64)
    prediction.step_ms, prediction.rate            # of the step; of one GPU that trains alone

The step is the one of distributed/reducer.py. All micro-batches but the last only compute. In the
backward of the last one each bucket is sent as soon as its gradients are complete, behind the
bucket before it. Clipping and the update follow when backward and the last bucket are over. Buckets
are those of the arena (distributed/buckets.py).

A bucket passes through stages, each on a lane that serves one bucket at a time, first come, first
served: `link` (between the GPUs of a machine), `network` (between machines), `memory` (a pass over
GPU memory). While a stage runs, backward may be slowed. `overlap` is this simulation; `predict`
makes the stages, counts what is outside of them, and adds the wait for the slowest rank.
`calibrated` finds the numbers of a machine with two GPUs, `daly_interval` when to write a
checkpoint.

What is measured, fitted and assumed, and how far predictions are off: docs/planning.md.
"""

import functools
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
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
# Of a message from GPU to GPU inside a machine, in us: as NCCL's src/graph/tuning.cc has it for
# the ring with NVLink.
HOP_US = 3.4
# Bytes. A smaller all-reduce that Python launches takes as long as its launch.
LEAST_LAUNCHED = 16 << 20


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

    Example:
        >>> from gpuaccel.distributed.plan import Workload
        >>> with torch.device("meta"):
        ...     model = ga.preset("tiny").build()
        >>> workload = Workload.of(model, micro_ms=2.0, tail_ms=1.0, micro_batches=4)
        >>> workload.step_ms, len(workload.blocks)
        (9.0, 6)
    """

    blocks: tuple[Block, ...]
    work: tuple[float, ...]
    micro_ms: float
    tail_ms: float = 0.0
    micro_batches: int = 1

    def __post_init__(self):
        """Check the times.

        Raises:
            ArgumentError: for times that are not positive, and for less than one micro-batch.
        """
        if not (0 < self.micro_ms < math.inf and 0 <= self.tail_ms < math.inf):
            raise ArgumentError(
                f"micro_ms is {self.micro_ms} and tail_ms {self.tail_ms}; expected milliseconds "
                "above 0, and of the tail not below it"
            )
        if self.micro_batches < 1:
            raise ArgumentError(f"micro_batches is {self.micro_batches}; expected 1 or more")

    @classmethod
    def of(
        cls,
        module: nn.Module,
        micro_ms: float,
        tail_ms: float = 0.0,
        micro_batches: int = 1,
    ) -> "Workload":
        """The workload of a module, which may be on the meta device.

        A block's share of backward is its share of the elements: the products of a weight take
        time in proportion to its elements. An embedding has no product.

        Args:
            module: an nn.Module with trainable parameters.
            micro_ms: forward and backward of one micro-batch, in ms.
            tail_ms: clipping and the update, in ms.
            micro_batches: of one step.

        Returns:
            The workload; its arena is laid out, and takes no memory.
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
        """Buckets of at least this size, as the reducer makes them.

        Args:
            bucket_mb: in megabytes of fp32; blocks are not cut.

        Returns:
            (elements, ms of backward that completes it) of each bucket, in the order of sending.
        """
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
        if not self.GBs > 0:
            raise ArgumentError(f"GBs is {self.GBs}; expected gigabytes per second above 0")
        if self.latency_us < 0:
            raise ArgumentError(f"latency_us is {self.latency_us}; expected 0 or more")

    def ms(self, count: float) -> float:
        """Milliseconds of so many bytes, without latency.

        Args:
            count: of the bytes.
        """
        return count / self.GBs / 1e6


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
        if self.gpus < 1:
            raise ArgumentError(f"gpus is {self.gpus}; expected 1 or more")
        for name in ("start_us", "nccl_slow", "spread"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if not self.memory_GBs > 0:
            raise ArgumentError(f"memory_GBs is {self.memory_GBs}; expected more than 0")

    def pass_ms(self, count: float) -> float:
        """Milliseconds of a pass that reads and writes so many bytes of GPU memory.

        Args:
            count: of the bytes.
        """
        return count / self.memory_GBs / 1e6


# ---- the simulation ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A part of a bucket's way.

    Attributes:
        lane: serves one bucket at a time.
        ms: how long this bucket occupies it.
        slows: backward takes 1 + slows times as long meanwhile.
    """

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

    Example:
        >>> from gpuaccel.distributed.plan import Stage, overlap
        >>> overlap([2.0, 2.0], [[Stage("link", 3.0)], [Stage("link", 3.0)]])
        [(2.0, 5.0), (4.0, 8.0)]
        >>> overlap([2.0, 2.0], [[Stage("link", 3.0, slows=1.0)], []])
        [(2.0, 5.0), (5.5, 5.5)]
    """
    now, computing = 0.0, 0
    left = list(work)
    complete = [0.0] * len(work)
    over = [0.0] * len(work)
    waiting = [deque(bucket) for bucket in stages]
    queues: dict[str, deque[tuple[int, Stage]]] = {}
    # lane -> [ms that are left, bucket, slows]
    busy: dict[str, list] = {}

    def go_on(bucket):
        if waiting[bucket]:
            stage = waiting[bucket].popleft()
            queues.setdefault(stage.lane, deque()).append((bucket, stage))
        else:
            over[bucket] = now

    while True:
        for lane, queue in queues.items():
            if queue and lane not in busy:
                bucket, stage = queue.popleft()
                busy[lane] = [stage.ms, bucket, stage.slows]
        speed = 1 / (1 + sum(slows for _, _, slows in busy.values()))
        events = [ms for ms, _, _ in busy.values()]
        if computing < len(work):
            events.append(left[computing] / speed)
        if not events:
            return list(zip(complete, over))
        # To the next event. Whatever ends there ends exactly, whatever its rounding.
        elapsed = min(events)
        ended = [lane for lane, (ms, _, _) in busy.items() if ms <= elapsed]
        completed = computing < len(work) and events[-1] <= elapsed
        now += elapsed
        for entry in busy.values():
            entry[0] -= elapsed
        if completed:
            complete[computing] = now
            computing += 1
        elif computing < len(work):
            left[computing] = max(0.0, left[computing] - elapsed * speed)
        for lane in ended:
            go_on(busy.pop(lane)[1])
        if completed:
            go_on(computing - 1)


# ---- collectives ---------------------------------------------------------------------------------


def all_reduce_ms(count: float, machine: Machine, gpus: int) -> float:
    """NCCL's all-reduce over all GPUs: the faster one of its ring and its double binary tree.

    In a ring every GPU sends 2 (N - 1) / N of the bytes; a machine sends as much through all its
    network cards together. In a tree it sends and receives the bytes twice, in fewer hops.

    Args:
        count: bytes that each GPU has.
        machine: of the GPUs.
        gpus: N; more than machine.gpus are several machines.

    Returns:
        Milliseconds.

    Source:
        The latencies of ring and tree are counted as in src/graph/tuning.cc of NCCL.
    """
    if gpus == 1:
        return 0.0
    inside = min(gpus, machine.gpus)
    machines = -(-gpus // machine.gpus)
    hop, far_hop = machine.link.latency_us / 1e3, machine.network.latency_us / 1e3

    def bytes_ms(sent):
        through_network = machine.network.ms(sent / inside) if machines > 1 else 0.0
        return max(machine.link.ms(sent) if inside > 1 else 0.0, through_network)

    far_hops = 2 * (machines - 1)
    ring = bytes_ms(2 * (gpus - 1) / gpus * count)
    ring += (2 * (gpus - 1) - far_hops) * hop + far_hops * far_hop
    tree = bytes_ms(2 * count) + 2 * (inside - 1) * hop + 2 * math.log2(machines) * far_hop
    return machine.start_us / 1e3 + min(ring, tree)


def nccl_stages(elements: int, machine: Machine, gpus: int, dtype: torch.dtype) -> list[Stage]:
    """A bucket that NCCL reduces over all GPUs.

    The search for non-finite gradients reads it first. In bf16 it is rounded before and converted
    back behind. These are passes over memory (PASS_SLOW).

    Args:
        elements: of the bucket.
        machine: of the GPUs.
        gpus: of all machines.
        dtype: of what is sent, fp32 or bf16.

    Returns:
        The stages.
    """
    low = dtype != torch.float32
    lane = "network" if gpus > machine.gpus else "link"
    message = all_reduce_ms(elements * (2 if low else 4), machine, gpus)
    passes = [elements * (10 if low else 4), elements * 6 if low else 0]
    before, behind = (Stage("memory", machine.pass_ms(count), PASS_SLOW) for count in passes)
    stages = [before, Stage(lane, message, machine.nccl_slow), behind]
    return [stage for stage in stages if stage.ms]


def copy_stages(elements: int, machine: Machine, gpus: int) -> list[Stage]:
    """A bucket that the GPUs of one machine reduce by peer-to-peer copies, in fp32.

    Each GPU copies in what the others have in its block (1 / gpus of the bucket) and adds, which is
    a pass over memory (PASS_SLOW). Then it copies the other blocks' sums.

    Args:
        elements: of the bucket.
        machine: of the GPUs.
        gpus: of this machine.

    Returns:
        The stages.
    """
    count = 4 * elements
    copy = Stage("link", machine.start_us / 1e3 + machine.link.ms((gpus - 1) / gpus * count))
    adding = machine.pass_ms((gpus + 1) / gpus * count)
    return [copy, Stage("memory", adding, PASS_SLOW), copy]


# ---- the step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """A step on N GPUs.

    Attributes:
        gpus: N.
        one_gpu_ms: the step of one GPU that trains alone.
        slowed_ms: what backward takes longer because buckets are sent meanwhile.
        exposed_ms: from the end of backward to that of the last bucket and of the step's totals.
        waiting_ms: for the slowest rank.
        buckets: (complete, over) of each bucket, in ms from the beginning of the last backward.
    """

    gpus: int
    one_gpu_ms: float
    slowed_ms: float
    exposed_ms: float
    waiting_ms: float
    buckets: tuple[tuple[float, float], ...]

    @property
    def step_ms(self) -> float:
        """Time of a step."""
        return self.one_gpu_ms + self.communication_ms + self.waiting_ms

    @property
    def communication_ms(self) -> float:
        """What communication adds to the step: slowed_ms and exposed_ms."""
        return self.slowed_ms + self.exposed_ms

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
        return Prediction(1, alone, 0.0, 0.0, 0.0, ())
    sizes, work = zip(*workload.buckets(bucket_mb))
    if peer_to_peer and gpus <= machine.gpus and dtype == torch.float32:
        stages = [copy_stages(size, machine, gpus) for size in sizes]
        # The totals, and a sum of squares for each chunk.
        behind = all_reduce_ms(8 * (workload.numel // CHUNK), machine, gpus)
    else:
        stages = [nccl_stages(size, machine, gpus, dtype) for size in sizes]
        # The totals, and a pass that reads all sums for the norm.
        behind = all_reduce_ms(8, machine, gpus) + machine.pass_ms(4 * workload.numel)
    sent = overlap(work, stages)
    complete = sent[-1][0]
    return Prediction(
        gpus,
        alone,
        slowed_ms=complete - sum(work),
        exposed_ms=max(over for _, over in sent) - complete + behind,
        waiting_ms=machine.spread * slowest_of(gpus) * alone,
        buckets=tuple(sent),
    )


@functools.cache
def slowest_of(ranks: int) -> float:
    """Mean of the largest of so many standard normal numbers: 0, 0.56, 0.85, 1.03, ...

    Args:
        ranks: how many numbers.

    Returns:
        The mean, in standard deviations.
    """
    cdf = statistics.NormalDist().cdf
    step = 0.01
    total = 0.0
    for k in range(1000):
        x = (k + 0.5) * step
        total += step * (1 - cdf(x) ** ranks - cdf(-x) ** ranks)
    return total


# ---- a machine that was measured -----------------------------------------------------------------


def calibrated(
    module: nn.Module, results: dict, memory_GBs: float = math.inf
) -> tuple[Workload, Machine]:
    """The step and the machine of two GPUs that benchmarks/ddp.py has measured.

    The step of one GPU and the all-reduces alone are measured. `nccl_slow` is fitted to NCCL's step
    of one micro-batch. `spread` is fitted to what a peer-to-peer step of four micro-batches takes
    longer than one of one: three micro-batches that do not communicate, and the wait for the other
    rank.

    Args:
        module: the model that was measured, which may be on the meta device.
        results: `["results"]["2"]` of the file that the benchmark wrote.
        memory_GBs: as for Machine; benchmarks/clip.py measures it as "copy_GB_per_s".

    Returns:
        (the workload with one micro-batch, a machine with two GPUs whose network is its link).

    Raises:
        ArgumentError: for results without the steps and all-reduces that are needed.
    """
    try:
        steps = results["groups"]["ours, replayed"]
        alone_1, alone_4 = (steps[count]["one GPU"]["ms"] for count in ("1", "4"))
        copies_1, copies_4 = (steps[count]["all-reduce"]["ms"] for count in ("1", "4"))
        nccl_1 = steps["1"]["all-reduce by NCCL"]["ms"]
        sizes = [m for m in results["bandwidth"].values() if m["bytes"] >= LEAST_LAUNCHED]
        points = np.array([(m["bytes"], m["all_reduce"]["ms"]) for m in sizes]).T
        # The line whose relative errors have the least sum of squares.
        slope, fixed = np.polyfit(points[0], points[1], 1, w=1 / points[1])
    except (KeyError, IndexError, TypeError) as error:
        raise ArgumentError(
            f"results lack {error}; expected those of benchmarks/ddp.py on two GPUs, with steps of "
            "1 and 4 micro-batches and all-reduces of 16 MiB and more"
        ) from None
    micro_ms = (alone_4 - alone_1) / 3
    workload = Workload.of(module, micro_ms, alone_1 - micro_ms)
    # A hop's latency is in what an all-reduce costs beside its bytes.
    start_us = max(0.0, 1e3 * float(fixed) - 2 * HOP_US)
    link = Link(1 / float(slope) / 1e6, HOP_US)
    waited = (copies_4 - copies_1) / (3 * micro_ms) - 1
    machine = Machine(
        gpus=2,
        link=link,
        network=link,
        start_us=start_us,
        memory_GBs=memory_GBs,
        spread=max(0.0, waited / slowest_of(2)),
    )

    def step_ms(nccl_slow):
        slowed = replace(machine, nccl_slow=nccl_slow)
        return predict(workload, slowed, 2, peer_to_peer=False).step_ms

    return workload, replace(machine, nccl_slow=fit(step_ms, nccl_1))


def fit(predicted_ms: Callable[[float], float], measured_ms: float, most: float = 8.0) -> float:
    """The parameter, from 0 to `most`, with which a prediction is the measured time.

    Args:
        predicted_ms: function of the parameter -> ms, which grows with it.
        measured_ms: of the row that it is fitted to.
        most: the largest value that is tried.

    Returns:
        The parameter; 0 or `most` where the measured time is outside of what these give.
    """
    low, high = 0.0, most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted_ms(middle) < measured_ms else (low, middle)
    return low if low else 0.0


# ---- checkpoints ---------------------------------------------------------------------------------


def daly_interval(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds of training between two checkpoints that lose least.

    Args:
        checkpoint_s: seconds that a checkpoint stops the training.
        between_failures_s: mean seconds between two failures of any rank.

    Returns:
        The interval; where a checkpoint takes twice the time between failures or more, that time.

    Raises:
        ArgumentError: for times that are not above 0.

    Source:
        J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
        Future Generation Computer Systems 22(3), 2006.

    Example:
        >>> from gpuaccel.distributed.plan import daly_interval
        >>> f"a checkpoint of 3 s every {daly_interval(3, 86400) / 60:.0f} minutes"
        'a checkpoint of 3 s every 12 minutes'
    """
    if not (checkpoint_s > 0 and between_failures_s > 0):
        raise ArgumentError(
            f"checkpoint_s is {checkpoint_s} and between_failures_s {between_failures_s}; expected "
            "seconds above 0"
        )
    if checkpoint_s >= 2 * between_failures_s:
        return between_failures_s
    root = math.sqrt(checkpoint_s / (2 * between_failures_s))
    young = math.sqrt(2 * checkpoint_s * between_failures_s)
    return young * (1 + root / 3 + root * root / 9) - checkpoint_s


def lost_share(
    interval_s: float, checkpoint_s: float, between_failures_s: float, restart_s: float
) -> float:
    """The share of all time that does not train: checkpoints, restarts, and steps done twice.

    Failures are taken as independent of each other and equally likely at any time. Each stops all
    ranks, which start again from the last checkpoint.

    Args:
        interval_s: seconds of training between two checkpoints.
        checkpoint_s: seconds that a checkpoint stops the training.
        between_failures_s: mean seconds between two failures of any rank.
        restart_s: from a failure until all ranks train again.

    Returns:
        From 0 to 1.

    Source:
        Daly (2006): the expected time until an interval and its checkpoint are done.
    """
    mean = between_failures_s
    try:
        spent = mean * math.exp(restart_s / mean) * math.expm1((interval_s + checkpoint_s) / mean)
    except OverflowError:
        return 1.0
    return 1 - interval_s / spent
