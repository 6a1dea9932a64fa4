"""All-reduce within one machine by peer-to-peer copies: copy engines move the data and one kernel
adds it, so no NCCL kernel takes SMs from the matrix products.

An NCCL kernel occupies SMs for as long as the links between GPUs need; a matrix product beside it,
which counts on all SMs, took 30 to 40% longer on two H200s. Here arena.grads lies in memory that
the other ranks' GPUs can read (torch's symmetric memory). Each rank adds up one range of every
bucket: it copies what the other ranks have there, adds in the order of the ranks (peers.cu), and
copies the sums of the others' ranges. The kernel also writes sums of squares for the norm and finds
the rank whose gradient is not finite. Copies in, additions and copies out have a stream each, and
overlap.

    p2p = PeerToPeer.of(config, arena)        # None, and a line in the log, where not possible;
    p2p.plan(buckets)                         # before anything takes arena.grads' address
    p2p.send(bucket)                          # its reduction is queued
    p2p.join()                                # p2p.stream has all sums
"""

import contextlib
import functools
import logging
import pathlib
import socket
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import backend, takes
from ..compiler import Kernel
from ..errors import ArgumentError
from ..ops import CHUNK, SQUARES_THREADS, launch_squares
from ..optim import Arena, GradientAccumulator
from . import collectives
from .buckets import Bucket
from .config import Distributed
from .heartbeat import SLACK
from .zero1 import gathered_buffers, share

SLAB = 1 << 24  # elements of all ranks' ranges that are added at once
log = logging.getLogger("gpuaccel")

# Channels of the barriers between the ranks' GPUs.
GRADIENTS_READY, SUMS_READY, WEIGHTS_READY = range(3)


# ---- launcher ------------------------------------------------------------------------------------


@functools.cache
def sum_kernel() -> Kernel:
    return Kernel("peers", "peers_sum", CHUNK=CHUNK, THREADS=SQUARES_THREADS)


def launch_sum(
    own: Tensor,  # (n,) fp32, whole chunks
    others: Tensor,  # (ranks - 1, at least n) fp32, rows 16-byte aligned
    rank: int,
    partials: Tensor,  # (rows,) fp64: sums of squares of each chunk of the arena
    nonfinite: Tensor,  # (ranks, rows) int32: 1 where a rank's chunk is not finite
    row: int,  # of partials and nonfinite, of own's first chunk
):
    """peers_sum: own += others, in the order of the ranks."""
    if len(own):
        sum_kernel()[len(own) // CHUNK, SQUARES_THREADS](
            own,
            partials[row:],
            nonfinite.view(-1)[row:],
            others,
            rank,
            len(nonfinite),
            nonfinite.shape[1],
            others.stride(0) // 4,
        )


# ---- public: the ranks of a step -----------------------------------------------------------------


@dataclass
class Slab:
    """A part of a bucket that is added at once, as the arguments of the calls that do it."""

    buffer: int  # which of PeerToPeer.parts it uses
    copies_in: "list[tuple[Tensor, Tensor]]"  # (destination, source)
    sum: tuple  # arguments of launch_sum()
    copies_out: "list[tuple[Tensor, Tensor]]"  # (destination, source)


@dataclass
class Plan:
    """What has to be done for one bucket."""

    slabs: "list[Slab]" = field(default_factory=list)
    # What is left behind the ranges: its sums, and its rows of probes and squares. None: nothing.
    rest: "tuple[Tensor, Tensor, Tensor] | None" = None


class PeerToPeer:
    """This rank's side of the reduction. Made by of(), on every rank.

    Args:
        config: of the group, whose ranks are GPUs of one machine.
        arena: whose buffers are moved to memory that the other ranks can read.
    """

    def __init__(self, config: Distributed, arena: Arena):
        """Take memory and compile the kernel, which may fail on one rank alone."""
        self.config, self.arena = config, arena
        self.rank, self.world = config.rank, config.world
        self.others = [r for r in range(self.world) if r != self.rank]
        # On a CPU (in tests) there are no streams, and every call has finished when it returns.
        cuda = arena.device.type == "cuda"
        self.stream, self.sum_stream, self.out_stream = (
            torch.cuda.Stream(arena.device, priority=-1) if cuda else None for _ in range(3)
        )
        self.last = self.sum_stream if config.sharded else self.out_stream
        rows = arena.numel // CHUNK
        # Chunks of a slab: of this rank's range.
        self.slab_chunks = min(max(1, SLAB // self.world // CHUNK), rows // self.world + 1)
        # Two buffers in turns: one is filled while the other is added.
        self.parts = torch.empty(2, self.world - 1, self.slab_chunks * CHUNK, device=arena.device)
        # Of each buffer: the event behind its last addition in this step.
        self.buffer_added: "list[torch.cuda.Event | None]" = [None, None]
        # Sums of squares of the chunks that this rank adds; 0 elsewhere.
        self.squares = torch.zeros(rows, dtype=torch.float64, device=arena.device)
        # See nonfinite.py. Probes are of what NCCL adds.
        self.probes = torch.zeros_like(self.squares)
        self.nonfinite = torch.zeros(self.world, rows, dtype=torch.int32, device=arena.device)
        if cuda:
            sum_kernel().load(arena.device.index)

    def connect(self, buffers: "dict[str, tuple]") -> "PeerToPeer":
        """Move the arena's buffers to shared memory and map those of the other ranks. Collective.

        Args:
            buffers: name in the arena -> (this rank's memory, its symmetric-memory handle).
        """
        self.handle = buffers["grads"][1]
        self.theirs: "dict[str, dict[int, Tensor]]" = {}  # name -> rank -> its buffer
        for name, (memory, handle) in buffers.items():
            self.arena.move(name, memory)
            self.theirs[name] = {
                r: handle.get_buffer(r, (self.arena.numel,), memory.dtype) for r in self.others
            }
        if self.stream is not None:
            # Loads the barrier's kernel, which a capture could not.
            for channel in (GRADIENTS_READY, SUMS_READY, WEIGHTS_READY):
                self._barrier(channel)
        return self

    def _barrier(self, channel: int):
        """The current stream waits for the other ranks' streams. A rank that waits longer than the
        timeout ends with a CUDA error."""
        self.handle.barrier(channel, int(1000 * (self.config.timeout + SLACK)))

    @classmethod
    def of(cls, config: Distributed, arena: Arena) -> "PeerToPeer | None":
        """Of a ga.Distributed; None where NCCL or gloo reduces: the log says why NCCL. Collective.

        ArgumentError, on every rank, where config.peer_to_peer is True and that is not possible."""
        if GradientAccumulator.of(arena) is not None:
            # Somebody knows the buffers' addresses. A second accumulator will be refused.
            return None
        equal, reason = _obstacle(config, arena)
        if not equal or config.peer_to_peer is False:
            # Ranks that differ are told apart when they are compared.
            return None
        attempts = _Attempts(config, reason)
        memory = attempts(lambda: _allocate(config, arena))
        p2p = attempts(lambda: cls(config, arena))
        buffers = attempts(lambda: _rendezvous(config, memory))
        if not attempts.reason:
            return p2p.connect(buffers)
        if config.peer_to_peer:
            raise ArgumentError(
                f"peer_to_peer is True, and {attempts.reason}; expected the GPUs of one machine, "
                "which can read each other's memory, and fp32 sums"
            )
        if config.backend == "nccl" and config.world > 1:
            log.info("gradients are added up by NCCL: %s", attempts.reason)
        return None

    def _ranges(self, bucket: Bucket) -> "list[tuple[int, int]]":
        """Of each rank, the elements of a bucket that it adds up: whole chunks."""
        if self.config.sharded:
            own = share(bucket, self.world)
            starts = [bucket.start + r * own for r in range(self.world)]
            return [(start, start + own) for start in starts]
        chunks = (bucket.stop - bucket.start) // CHUNK
        ends = [bucket.start + chunks * r // self.world * CHUNK for r in range(self.world + 1)]
        return list(zip(ends, ends[1:]))

    def plan(self, buckets: "list[Bucket]"):
        """Prepare the arguments of all calls, so that a step's host only has to make them."""
        self.plans: "dict[Bucket, Plan]" = {}
        buffer = 0
        for bucket in buckets:
            plan = self.plans[bucket] = Plan()
            ranges = self._ranges(bucket)
            longest = max(stop - start for start, stop in ranges) // CHUNK
            # Nothing hides the last bucket: smaller slabs let copies and additions overlap.
            last = bucket is buckets[-1]
            most = max(1, self.slab_chunks // 2) if last else self.slab_chunks
            slabs = max(1, -(-longest // most))
            size = CHUNK * max(1, -(-longest // slabs))
            for offset in range(0, longest * CHUNK, size):
                slices = [
                    slice(min(start + offset, stop), min(start + offset + size, stop))
                    for start, stop in ranges
                ]
                plan.slabs.append(self._slab(slices, buffer))
                buffer = 1 - buffer
            rest = slice(ranges[-1][1], bucket.stop)
            if rest.stop > rest.start:
                rows = slice(rest.start // CHUNK, rest.stop // CHUNK)
                plan.rest = self.arena.grads[rest], self.probes[rows], self.squares[rows]

    def _slab(self, slices: "list[slice]", buffer: int) -> Slab:
        """The copies of one slab. slices: of each rank, the elements of the arena that it adds."""
        grads, theirs, parts = self.arena.grads, self.theirs["grads"], self.parts[buffer]
        own = slices[self.rank]
        copies_in = [
            (part[: own.stop - own.start], theirs[r][own]) for part, r in zip(parts, self.others)
        ]
        copies_out = []
        if not self.config.sharded:
            copies_out = [(grads[slices[r]], theirs[r][slices[r]]) for r in self.others]
        row = own.start // CHUNK
        add = (grads[own], parts, self.rank, self.squares, self.nonfinite, row)
        return Slab(buffer, copies_in, add, copies_out)

    def send(self, bucket: Bucket):
        """Queue the reduction of a bucket whose gradients the current stream has. With a sharded
        optimizer only this rank's range, and the rest that belongs to all, get their sums."""
        plan = self.plans[bucket]
        current = torch.cuda.current_stream(self.arena.device) if self.stream else None
        with _behind(current, self.stream):
            self._barrier(GRADIENTS_READY)
            for slab in plan.slabs:
                self._send_slab(slab)
            if plan.rest is not None:
                sums, probes, squares = plan.rest
                launch_squares([sums], probes)
                collectives.all_reduce(sums, group=self.config.group)
                if self.rank == 0:
                    launch_squares([sums], squares)

    def _send_slab(self, slab: Slab):
        stream = self.stream
        added = self.buffer_added[slab.buffer]
        if stream is not None and added is not None:
            stream.wait_event(added)
        for destination, source in slab.copies_in:
            destination.copy_(source)
        with _behind(stream, self.sum_stream):
            launch_sum(*slab.sum)
            if self.sum_stream is not None:
                self.buffer_added[slab.buffer] = self.sum_stream.record_event()
        if slab.copies_out:
            with _behind(self.sum_stream, self.out_stream):
                # Also: all ranks have read what is overwritten here.
                self._barrier(SUMS_READY)
                for destination, source in slab.copies_out:
                    destination.copy_(source)

    def spread(self, name: str):
        """With a sharded optimizer: copy what the other ranks have updated of arena.weights or
        arena.bf16_weights. The current stream goes on behind it."""
        stream = self.stream
        current = torch.cuda.current_stream(self.arena.device) if stream else None
        buffer = getattr(self.arena, name)
        with _behind(current, stream):
            self._barrier(WEIGHTS_READY)
            for bucket in self.plans:
                ranges = self._ranges(bucket)
                for r in self.others:
                    part = slice(*ranges[r])
                    buffer[part].copy_(self.theirs[name][r][part])
            # All have read: weights may be changed.
            self._barrier(WEIGHTS_READY)
        if current is not None and stream is not None:
            current.wait_stream(stream)

    def join(self):
        """Behind all buckets: self.stream has the sums. Memory that the other ranks still read is
        free after the next collective on that stream."""
        if any(self.buffer_added):
            self.stream.wait_stream(self.last)
        self.forget()

    def forget(self):
        """The events belong to a step that is over, or was given up."""
        self.buffer_added = [None, None]


@contextlib.contextmanager
def _behind(before, stream):
    """Inside it, work goes to a stream, behind what `before` has. None, None: on a CPU."""
    if stream is not None:
        stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield


class _Attempts:
    """Calls that may fail on one rank alone. `reason`: why peer-to-peer copies are not possible, or
    ""; equal on all ranks."""

    def __init__(self, config: Distributed, reason: str):
        self.config, self.reason = config, reason

    def __call__(self, function):
        """function(), unless there is a reason against it; that it fails on any rank is one."""
        result, problem = None, ""
        if self.reason:
            return None
        try:
            result = function()
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        for rank, theirs in enumerate(_gather(problem, self.config)):
            if theirs and not self.reason:
                self.reason = f"on rank {rank}: {theirs}"
        return result


def _gather(mine, config: Distributed) -> list:
    everyone = [mine] * config.world
    collectives.gather_objects(everyone, mine, group=config.group)
    return everyone


def _obstacle(config: Distributed, arena: Arena) -> "tuple[bool, str]":
    """(whether all ranks want the same, why copies are not possible as far as that is known without
    trying, or "")."""
    cuda = arena.device.type == "cuda"
    if config.world > 1 and config.backend == "nccl":
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
        machine = socket.gethostname(), boot.read_text().strip() if boot.exists() else ""
        gpu = str(torch.cuda.get_device_properties(arena.device).uuid) if cuda else ""
        wanted = (
            arena.numel,
            str(config.dtype),
            config.ordered,
            config.sharded,
            config.peer_to_peer,
            _shared_buffers(config, arena),
            cuda,
            takes(arena.device),
        )
        machines, gpus, choices = zip(*_gather((machine, gpu, wanted), config))
        if any(choice != wanted for choice in choices):
            return False, "the ranks differ"
        if len(set(machines)) > 1:
            return True, f"the ranks are on {len(set(machines))} machines"
        if len(set(gpus)) < config.world:
            return True, f"{config.world} ranks share {len(set(gpus))} GPUs"
    if config.world == 1 or config.backend != "nccl" or not cuda or not takes(arena.device):
        return True, (
            f"the {config.world} ranks' collectives are {config.backend}'s, the model is on "
            f"{arena.device}, backend {backend().name}"
        )
    if config.ordered:
        return True, "sums are ordered"
    if config.dtype != torch.float32:
        return True, f"sums are sent in {config.dtype}"
    return True, ""


def _allocate(config: Distributed, arena: Arena) -> "dict[str, Tensor]":
    import torch.distributed._symmetric_memory as symmetric

    return {
        name: symmetric.empty(arena.numel, dtype=getattr(arena, name).dtype, device=arena.device)
        for name in _shared_buffers(config, arena)
    }


def _rendezvous(config: Distributed, memory: "dict[str, Tensor]") -> "dict[str, tuple]":
    """name -> (memory, handle). Collective."""
    import torch.distributed._symmetric_memory as symmetric

    group = config.group if config.group is not None else dist.group.WORLD
    # ga.Distributed has made the default group where there was none.
    assert group is not None
    return {name: (own, symmetric.rendezvous(own, group)) for name, own in memory.items()}


def _shared_buffers(config: Distributed, arena: Arena) -> "list[str]":
    """The buffers that other ranks read: gradients, and with a sharded optimizer the weights."""
    return ["grads", *(gathered_buffers(arena) if config.sharded else ())]
