"""All-reduce within one machine by peer-to-peer copies: copy engines move the data and one kernel
adds it, so no NCCL kernel takes SMs from the matrix products. NCCL sums over several machines.

An NCCL kernel occupies SMs for as long as the links between GPUs need; a matrix product beside it,
which counts on all SMs, took 30 to 40% longer on two H200s. Here arena.grads lies in torch's
symmetric memory, which the other ranks of the machine can read. Each rank adds up one block of
every bucket: it copies what the others have there, adds in the order of the ranks (peers.cu), and
copies the sums of the others' blocks. The kernel also writes sums of squares for the norm and finds
the rank whose gradient is not finite. Copies in, additions and copies out have a stream each, and
overlap.

    p2p = PeerToPeer.of(config, arena, buckets)  # None, and a line in the log, where not possible
    p2p.send(bucket)                          # its reduction is queued
    p2p.join_sums()                           # p2p.stream has this rank's sums and all squares
    p2p.join()                                # the current stream has all sums
"""

import contextlib
import functools
import logging
import os
import pathlib
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import backend, takes
from ..compiler import Kernel
from ..errors import ArgumentError
from ..ops import CHUNK, SQUARES_THREADS
from ..optim import Arena
from .buckets import Bucket, equal_ranges
from .collectives import gather_objects
from .config import Distributed
from .heartbeat import SLACK
from .zero1 import gathered_buffers, share

SLAB = 1 << 24  # elements of all ranks' blocks that are added at once
log = logging.getLogger("gpuaccel")

# Channels of the barriers between the ranks.
GRADIENTS_READY, SUMS_READY, SUMS_COPIED, WEIGHTS_READY = range(4)


class SymmetricMemory:
    """Buffers of equal length on each rank, which the other GPUs of the machine can read.

    A rank that waits longer than a barrier's limit ends with a CUDA error.

    Args:
        numel: elements of each buffer.
        dtypes: name -> dtype.
        device: of this rank.

    Attributes:
        buffers: name -> this rank's.
    """

    def __init__(self, numel: int, dtypes: dict[str, torch.dtype], device: torch.device):
        """Take memory, which may fail on one rank alone."""
        import torch.distributed._symmetric_memory as symmetric

        self.buffers = {
            name: symmetric.empty(numel, dtype=dtype, device=device)
            for name, dtype in dtypes.items()
        }

    def connect(self, group: dist.ProcessGroup | None):
        """Map the other ranks' buffers. Collective; may fail on one rank alone."""
        import torch.distributed._symmetric_memory as symmetric

        group = group if group is not None else dist.group.WORLD
        # ga.Distributed has made the default group where there was none.
        assert group is not None
        self.handles = {
            name: symmetric.rendezvous(own, group) for name, own in self.buffers.items()
        }

    def of_rank(self, name: str, rank: int) -> Tensor:
        """A rank's buffer, as a tensor of this rank's device."""
        own = self.buffers[name]
        return self.handles[name].get_buffer(rank, own.shape, own.dtype)

    def barrier(self, channel: int, milliseconds: int):
        """The current stream waits for those of the other ranks."""
        next(iter(self.handles.values())).barrier(channel, milliseconds)


# ---- the addition (kernels_cu/peers.cu) ----------------------------------------------------------


@functools.cache
def sum_kernel() -> Kernel:
    return Kernel("peers", "peers_sum", CHUNK=CHUNK, THREADS=SQUARES_THREADS)


def add_ranks(
    own: Tensor,  # (n,) fp32, whole chunks
    others: Tensor,  # (ranks - 1, at least n) fp32, rows 16-byte aligned; of one rank: anything
    rank: int,
    partials: Tensor,  # (at least n / CHUNK,) fp64: sums of squares of own's chunks
    nonfinite: Tensor,  # (ranks, rows) int32: 1 where a rank's chunk is not finite
    row: int,  # of nonfinite, of own's first chunk
):
    """own += others, in the order of the ranks."""
    if not len(own):
        return
    sum_kernel()[len(own) // CHUNK, SQUARES_THREADS](
        own,
        partials,
        nonfinite.view(-1)[row:],
        others,
        rank,
        len(nonfinite),
        nonfinite.shape[1],
        others.stride(0) // 4,
    )


# ---- the ranks of a step -------------------------------------------------------------------------


Copies = list[tuple[Tensor, Tensor]]  # (destination, source)


@dataclass
class Slab:
    """A part of a bucket that is added at once, as the arguments of the calls that do it."""

    buffer: int  # which of PeerToPeer.parts it uses
    copies_in: Copies
    sum: tuple  # arguments of add_ranks()
    copies_out: Copies


class PeerToPeer:
    """This rank's side of the reduction. Made by of(), on every rank.

    Args:
        config: of the group.
        arena: whose buffers are moved to memory that the other ranks can read.
    """

    def __init__(self, config: Distributed, arena: Arena):
        """Take memory and compile the kernel, which may fail on one rank alone."""
        self.config, self.arena = config, arena
        self.rank, self.world = config.rank, config.world
        self.others = [r for r in range(self.world) if r != self.rank]
        # The tests copy on a CPU: there every call has finished when it returns.
        cuda = arena.device.type == "cuda"
        self.stream, self.sum_stream, self.out_stream = (
            torch.cuda.Stream(arena.device, priority=-1) if cuda else None for _ in range(3)
        )
        rows = arena.numel // CHUNK
        # Chunks of a slab: of this rank's block.
        self.slab_chunks = min(max(1, SLAB // self.world // CHUNK), rows // self.world + 1)
        # Two buffers in turns: one is filled while the other is added.
        shape = (2, self.world - 1, self.slab_chunks * CHUNK)
        self.parts = torch.empty(shape, dtype=torch.float32, device=arena.device)
        # Of each buffer: the event behind its last addition in this step.
        self.buffer_added: list[torch.cuda.Event | None] = [None, None]
        # Sums of squares of the chunks that this rank adds; 0 elsewhere.
        self.squares = torch.zeros(rows, dtype=torch.float64, device=arena.device)
        # See nonfinite.py. Probes are of what NCCL or gloo adds.
        self.probes = torch.zeros_like(self.squares)
        self.nonfinite = torch.zeros(self.world, rows, dtype=torch.int32, device=arena.device)
        dtypes = {name: getattr(arena, name).dtype for name in _shared_buffers(config, arena)}
        self.memory = SymmetricMemory(arena.numel, dtypes, arena.device)
        if cuda:
            sum_kernel().load(arena.device.index)

    def connect(self):
        """Map the other ranks' buffers. Collective; may fail on one rank alone."""
        self.memory.connect(self.config.group)

    def connected(self, buckets: list[Bucket]) -> "PeerToPeer":
        """Move the arena's buffers to the shared memory, and plan the sums. Collective."""
        # name -> rank -> its buffer.
        self.theirs: dict[str, dict[int, Tensor]] = {}
        for name in _shared_buffers(self.config, self.arena):
            self.arena.move(name, self.memory.buffers[name])
            self.theirs[name] = {r: self.memory.of_rank(name, r) for r in self.others}
        if self.stream is not None:
            # Loads the barrier's kernel, which a capture could not.
            for channel in (GRADIENTS_READY, SUMS_READY, SUMS_COPIED, WEIGHTS_READY):
                self._barrier(channel)
        self._plan(buckets)
        return self

    def _barrier(self, channel: int):
        """The current stream waits for the other ranks' streams. A rank that waits longer than the
        timeout ends with a CUDA error."""
        self.memory.barrier(channel, int(1000 * (self.config.timeout + SLACK)))

    @classmethod
    def of(cls, config: Distributed, arena: Arena, buckets: list[Bucket]) -> "PeerToPeer | None":
        """Of a ga.Distributed; None where NCCL or gloo reduces alone. The log says which, and why
        it is not the other. Collective, on ranks that have been compared.

        Raises:
            ArgumentError: on every rank, where config.peer_to_peer is True and that is not
                possible.
        """
        if config.peer_to_peer is False:
            return None
        p2p, reason = None, _obstacle(config, arena.device)
        if not reason:
            p2p, reason = _attempt(config, lambda: cls(config, arena))
        if p2p is not None and not reason:
            _, reason = _attempt(config, p2p.connect)
            if not reason:
                log.info("gradients are added up by peer-to-peer copies of %d ranks", config.world)
                return p2p.connected(buckets)
        if config.peer_to_peer:
            raise ArgumentError(
                f"peer_to_peer is True, and {reason}; expected the GPUs of one machine, "
                "which can read each other's memory, and fp32 sums"
            )
        if config.world > 1 and not config.ordered and config.backend == "nccl":
            log.info("gradients are added up by NCCL: %s", reason)
        return None

    def _ranges(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Of each rank, the elements of a bucket that a sharded optimizer has there."""
        own = share(bucket, self.world)
        starts = [bucket.start + r * own for r in range(self.world)]
        return [(start, start + own) for start in starts]

    def _plan(self, buckets: list[Bucket]):
        """Prepare the arguments of all calls, so that a step's host only has to make them."""
        self.plans: dict[Bucket, list[Slab]] = {}
        self._next_buffer = 0
        for bucket in buckets:
            # Nothing hides the last bucket: smaller slabs let copies and additions overlap.
            last = bucket is buckets[-1]
            most = max(1, self.slab_chunks // 2) if last else self.slab_chunks
            # Where the sums begin that all ranks need.
            rest, slabs = bucket.start, []
            if self.config.sharded:
                ranges = self._ranges(bucket)
                rest = ranges[-1][1]
                slabs = self._slabs(ranges, most, copies_out=False)
            ranges = equal_ranges(rest, bucket.stop, self.world)
            self.plans[bucket] = slabs + self._slabs(ranges, most, copies_out=True)

    def _slabs(self, ranges: list[tuple[int, int]], most: int, copies_out: bool) -> list[Slab]:
        """A part of a bucket that is cut into a block for each rank.

        Args:
            ranges: of each rank.
            most: chunks of a slab.
            copies_out: all ranks need all sums; else each those of its own range.
        """
        longest = max(stop - start for start, stop in ranges) // CHUNK
        # Slabs of equal size.
        size = CHUNK * -(-longest // max(1, -(-longest // most)))
        return [
            self._slab(
                [slice(min(a + offset, b), min(a + offset + size, b)) for a, b in ranges],
                copies_out,
            )
            for offset in range(0, longest * CHUNK, size or CHUNK)
        ]

    def _slab(self, slices: list[slice], copies_out: bool) -> Slab:
        """The copies of one slab. slices: of each rank, the elements of the arena that it adds."""
        buffer = self._next_buffer
        self._next_buffer = 1 - buffer
        grads, theirs, parts = self.arena.grads, self.theirs["grads"], self.parts[buffer]
        own = slices[self.rank]
        copies_in = [
            (part[: own.stop - own.start], theirs[r][own]) for part, r in zip(parts, self.others)
        ]
        row = own.start // CHUNK
        add = (grads[own], parts, self.rank, self.squares[row:], self.nonfinite, row)
        # What the other ranks have summed.
        back = [(grads[slices[r]], theirs[r][slices[r]]) for r in self.others]
        return Slab(buffer, copies_in, add, back if copies_out else [])

    def send(self, bucket: Bucket):
        """Queue the reduction of a bucket whose gradients the current stream has. With a sharded
        optimizer only this rank's range, and the rest that belongs to all, get their sums."""
        current = torch.cuda.current_stream(self.arena.device) if self.stream else None
        with behind(current, self.stream):
            self._barrier(GRADIENTS_READY)
            for slab in self.plans[bucket]:
                self._send_slab(slab)

    def _send_slab(self, slab: Slab):
        stream = self.stream
        added = self.buffer_added[slab.buffer]
        if stream is not None and added is not None:
            stream.wait_event(added)
        for destination, source in slab.copies_in:
            destination.copy_(source)
        with behind(stream, self.sum_stream):
            add_ranks(*slab.sum)
            if self.sum_stream is not None:
                self.buffer_added[slab.buffer] = self.sum_stream.record_event()
        with behind(self.sum_stream, self.out_stream):
            if slab.copies_out:
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
        with behind(current, stream):
            self._barrier(WEIGHTS_READY)
            for ranges in map(self._ranges, self.plans):
                for r in self.others:
                    part = slice(*ranges[r])
                    buffer[part].copy_(self.theirs[name][r][part])
            # All have read: weights may be changed.
            self._barrier(WEIGHTS_READY)
        if current is not None and stream is not None:
            current.wait_stream(stream)

    def join_sums(self):
        """Behind all buckets: self.stream has the sums that this rank has added, and the squares of
        all of them. Copies of what others have added may still be under way."""
        if self.stream is not None:
            self.stream.wait_stream(self.sum_stream)

    def join(self):
        """The current stream has all sums, and no other rank reads arena.grads any more."""
        if self.out_stream is not None:
            with torch.cuda.stream(self.out_stream):
                self._barrier(SUMS_COPIED)
            torch.cuda.current_stream(self.arena.device).wait_stream(self.out_stream)
        self.forget()

    def forget(self):
        """The events belong to a step that is over, or was given up."""
        self.buffer_added = [None, None]


@contextlib.contextmanager
def behind(before, stream):
    """Inside it, work goes to a stream, behind what `before` has. None, None: on a CPU."""
    if stream is not None:
        stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield


def _attempt(config: Distributed, function):
    """(what function() returns, and why it failed on any rank, or "": equal on all ranks)."""
    result, problem = None, ""
    try:
        result = function()
    except dist.DistError:
        raise
    except (RuntimeError, OSError) as error:
        problem = str(error).splitlines()[0]
    problems = enumerate(gather_objects(problem, config.group, config.world))
    return result, next((f"on rank {rank}: {theirs}" for rank, theirs in problems if theirs), "")


def _obstacle(config: Distributed, device: torch.device) -> str:
    """Why copies are not possible as far as that is known without trying, or ""."""
    if config.world > 1:
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        mine = (gpu, machine_name(), can_copy(config, device))
        gpus, machines, can = zip(*gather_objects(mine, config.group, config.world))
        if config.backend == "nccl" and len(set(gpus)) < config.world:
            return f"{config.world} ranks share {len(set(gpus))} GPUs"
        if all(can):
            if len(set(machines)) > 1:
                return f"the ranks are on {len(set(machines))} machines"
            if config.ordered:
                return "sums are ordered"
            return f"sums are sent in {config.dtype}" * (config.dtype != torch.float32)
    return (
        f"the {config.world} ranks' collectives are {config.backend}'s, the model is on "
        f"{device}, backend {backend().name}"
    )


def can_copy(config: Distributed, device: torch.device) -> bool:
    """Whether the group and the model are of GPUs, and our kernels run there."""
    return config.backend == "nccl" and device.type == "cuda" and takes(device)


def machine_name() -> tuple:
    """Equal on two ranks that torchrun has started on one machine: the host, since when it is up,
    and torchrun's number of the node."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return (
        socket.gethostname(),
        boot.read_text().strip() if boot.exists() else "",
        os.environ.get("GROUP_RANK", ""),
    )


def _shared_buffers(config: Distributed, arena: Arena) -> list[str]:
    """The buffers that other ranks read: gradients, and with a sharded optimizer the weights."""
    return ["grads", *(gathered_buffers(arena) if config.sharded else ())]
