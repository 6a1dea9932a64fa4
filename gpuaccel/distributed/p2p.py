"""All-reduce within one machine by peer-to-peer copies: copy engines move the data and one kernel
adds it, so no NCCL kernel takes SMs from the matrix products. With several machines the sums of
each go over the network in between (distributed/machines.py).

An NCCL kernel occupies SMs for as long as the links between GPUs need; a matrix product beside it,
which counts on all SMs, took 30 to 40% longer on two H200s. Here arena.grads lies in memory that
the other ranks of the machine can read (distributed/shared_memory.py). Each rank adds up one block
of every bucket: it copies what the others have there, adds in the order of the ranks (peers.cu),
and copies the sums of the others' blocks. The kernel also writes sums of squares for the norm and
finds the rank whose gradient is not finite. Copies in, additions and copies out have a stream each,
and overlap. With several machines the sums of a block are summed over the machines, on a fourth
stream, before the others copy them.

On CPUs the same is done by processes of one machine that share memory, and by gloo between
machines, where there are several; gloo alone reduces on one machine.

    p2p = PeerToPeer.of(config, arena)        # None, and a line in the log, where not possible;
    p2p.plan(buckets)                         # before anything takes arena.grads' address
    p2p.send(bucket)                          # its reduction is queued
    p2p.join_sums()                           # p2p.stream has this rank's sums and all squares
    p2p.join()                                # the current stream has all sums
"""

import contextlib
import logging
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import backend, takes
from ..errors import ArgumentError
from ..ops import CHUNK
from ..optim import Arena
from . import collectives, heartbeat
from .buckets import Bucket
from .config import Distributed
from .heartbeat import SLACK
from .machines import Machines, MachineSums
from .peer_sums import add_ranks, sum_kernel
from .shared_memory import SharedMemory, shared_memory
from .zero1 import gathered_buffers, share

SLAB = 1 << 24  # elements of all ranks' blocks that are added at once
log = logging.getLogger("gpuaccel")

# Channels of the barriers between the ranks of a machine.
GRADIENTS_READY, SUMS_READY, SUMS_COPIED, WEIGHTS_READY = range(4)


# ---- public: the ranks of a step -----------------------------------------------------------------


Copies = list[tuple[Tensor, Tensor]]  # (destination, source)


@dataclass
class Slab:
    """A part of a bucket that is added at once, as the arguments of the calls that do it."""

    buffer: int  # which of PeerToPeer.parts it uses
    copies_in: Copies
    sum: tuple  # arguments of add_ranks()
    copies_out: Copies


@dataclass
class Section:
    """A part of a bucket that is cut into a block for each rank of the machine.

    With several machines copies out wait until the block has the sums of all of them."""

    slabs: "list[Slab]"
    block: Tensor  # of arena.grads, this rank's
    squares: Tensor  # of its chunks
    whole: bool  # all ranks need all sums of it; else each its own range
    part: int  # elements of the block that each machine adds, equal on all ranks
    copies_out: Copies = field(default_factory=list)


class PeerToPeer:
    """This rank's side of the reduction. Made by of(), on every rank.

    Args:
        config: of the group.
        arena: whose buffers are moved to memory that the other ranks of the machine can read.
        machines: of the group.
    """

    def __init__(self, config: Distributed, arena: Arena, machines: Machines):
        """Take memory and compile the kernel, which may fail on one rank alone."""
        self.config, self.arena, self.machines = config, arena, machines
        self.local, self.size = machines.local, machines.size
        self.others = [r for r in range(self.size) if r != self.local]
        # Without our kernels the norm needs every gradient on every rank.
        self.scatters = config.sharded and takes(arena.device)
        # On a CPU there are no streams, and every call has finished when it returns.
        cuda = arena.device.type == "cuda"
        self.stream, self.sum_stream, self.network_stream, self.out_stream = (
            torch.cuda.Stream(arena.device, priority=-1) if cuda else None for _ in range(4)
        )
        self.queued = False  # something that join() has to wait for
        rows = arena.numel // CHUNK
        # Chunks of a slab: of this rank's block.
        self.slab_chunks = min(max(1, SLAB // self.size // CHUNK), rows // self.size + 1)
        # Two buffers in turns: one is filled while the other is added.
        shape = (2, self.size - 1, self.slab_chunks * CHUNK) if self.others else (2, 1, CHUNK)
        self.parts = torch.empty(shape, dtype=torch.float32, device=arena.device)
        # Of each buffer: the event behind its last addition in this step.
        self.buffer_added: "list[torch.cuda.Event | None]" = [None, None]
        # Sums of squares of the chunks that this rank adds last; 0 elsewhere.
        self.squares = torch.zeros(rows, dtype=torch.float64, device=arena.device)
        # With several machines, of sums inside of one: nobody reads them.
        inner = torch.zeros_like(self.squares) if machines.count > 1 else self.squares
        self.inner_squares = inner
        # See nonfinite.py. Probes are of what NCCL or gloo adds.
        self.probes = torch.zeros_like(self.squares)
        self.nonfinite = torch.zeros(self.size, rows, dtype=torch.int32, device=arena.device)
        # None: one machine.
        self.between: "MachineSums | None" = None
        self.memory: "SharedMemory | None" = None
        if self.others:
            dtypes = {name: getattr(arena, name).dtype for name in _shared_buffers(config, arena)}
            self.memory = shared_memory(arena.numel, dtypes, arena.device)
        if cuda:
            sum_kernel().load(arena.device.index)

    def connect(self):
        """Map the other ranks' buffers. Collective; may fail on one rank alone."""
        if self.memory is not None:
            self.memory.connect(self.machines.inside)

    def connected(self) -> "PeerToPeer":
        """Move the arena's buffers to the shared memory. Collective."""
        # name -> local rank -> its buffer.
        self.theirs: "dict[str, dict[int, Tensor]]" = {}
        for name in _shared_buffers(self.config, self.arena):
            self.theirs[name] = {}
            if self.memory is not None:
                self.arena.move(name, self.memory.buffers[name])
                self.theirs[name] = {r: self.memory.of_rank(name, r) for r in self.others}
        if self.memory is not None:
            self.memory.connected()
        if self.stream is not None:
            # Loads the barrier's kernel, which a capture could not.
            for channel in (GRADIENTS_READY, SUMS_READY, SUMS_COPIED, WEIGHTS_READY):
                self._barrier(channel)
        return self

    def _barrier(self, channel: int):
        """The current stream waits for the streams of this machine's other ranks. A rank that waits
        longer than the timeout ends with a CUDA error."""
        if self.memory is not None:
            self.memory.barrier(channel, int(1000 * (self.config.timeout + SLACK)))

    @classmethod
    def of(cls, config: Distributed, arena: Arena) -> "PeerToPeer | None":
        """Of a ga.Distributed; None where NCCL or gloo reduces alone. The log says which, and why
        it is not the other. Collective.

        Raises:
            ArgumentError: on every rank, where config.peer_to_peer is True and that is not
                possible.
            RankError: where another rank is lost meanwhile.
        """
        if arena.before_release:
            # Somebody knows the buffers' addresses. A second TrainStep will be refused.
            return None
        began = time.monotonic()
        heartbeat.heartbeat(0, config.group)
        try:
            return cls._of(config, arena)
        except dist.DistError as error:
            raise heartbeat.lost_rank(error, "at the start", config, began) from error

    @classmethod
    def _of(cls, config: Distributed, arena: Arena) -> "PeerToPeer | None":
        equal, reason = _obstacle(config, arena)
        if not equal or config.peer_to_peer is False:
            # Ranks that differ are told apart when they are compared.
            return None
        machines, apart = Machines.of(config)
        attempts = _Attempts(config, reason or apart)
        # With a reason nothing is called.
        p2p = attempts(lambda: cls(config, arena, machines))  # type: ignore[arg-type]
        attempts(lambda: p2p.connect())
        if not attempts.reason:
            log.info("gradients are added up by %s", in_words(p2p.machines, config.backend))
            return p2p.connected()
        if config.peer_to_peer:
            raise ArgumentError(
                f"peer_to_peer is True, and {attempts.reason}; expected the GPUs of one machine, "
                "which can read each other's memory, and fp32 sums"
            )
        several = machines is None or machines.count > 1
        if config.world > 1 and not config.ordered and (config.backend == "nccl" or several):
            name = "NCCL" if config.backend == "nccl" else config.backend
            log.info("gradients are added up by %s: %s", name, attempts.reason)
        return None

    def _ranges(self, bucket: Bucket) -> "list[tuple[int, int]]":
        """Of each rank of the machine, the elements of a bucket that belong to it, or with a
        sharded optimizer to the ranks with its local number: whole chunks."""
        if self.config.sharded:
            own = share(bucket, self.config.world) * self.machines.count
            starts = [bucket.start + r * own for r in range(self.size)]
            return [(start, start + own) for start in starts]
        return self._equal_ranges(bucket.start, bucket.stop)

    def _equal_ranges(self, start: int, stop: int) -> "list[tuple[int, int]]":
        """[start, stop) in as many ranges as this machine has ranks, as equal as chunks allow."""
        chunks = (stop - start) // CHUNK
        ends = [start + chunks * r // self.size * CHUNK for r in range(self.size + 1)]
        return list(zip(ends, ends[1:]))

    def plan(self, buckets: "list[Bucket]"):
        """Prepare the arguments of all calls, so that a step's host only has to make them."""
        self.plans: "dict[Bucket, list[Section]]" = {}
        self._next_buffer = 0
        for bucket in buckets:
            # Nothing hides the last bucket: smaller slabs let copies and additions overlap.
            last = bucket is buckets[-1]
            most = max(1, self.slab_chunks // 2) if last else self.slab_chunks
            if not self.scatters:
                ranges = self._equal_ranges(bucket.start, bucket.stop)
                self.plans[bucket] = [self._section(ranges, most, whole=True)]
                continue
            ranges = self._ranges(bucket)
            self.plans[bucket] = [self._section(ranges, most, whole=False)]
            if bucket.stop > ranges[-1][1]:
                # What is left behind the ranges every rank updates.
                rest = self._equal_ranges(ranges[-1][1], bucket.stop)
                self.plans[bucket].append(self._section(rest, most, whole=True))
        if self.machines.count > 1:
            parts = [s.part for sections in self.plans.values() for s in sections]
            self.between = MachineSums(self.machines, max(parts), self.arena.device)

    def _section(self, ranges: "list[tuple[int, int]]", most: int, whole: bool) -> Section:
        """ranges: of each rank of the machine. most: chunks of a slab."""
        first, last = ranges[self.local]
        block, rows = self.arena.grads[first:last], slice(first // CHUNK, last // CHUNK)
        longest = max(stop - start for start, stop in ranges) // CHUNK
        part = self.machines.part(longest * CHUNK)
        section = Section([], block, self.squares[rows], whole, part)
        slabs = max(1, -(-longest // most))
        size = CHUNK * max(1, -(-longest // slabs))
        at_once = whole and self.machines.count == 1
        for offset in range(0, longest * CHUNK, size):
            slices = [
                slice(min(start + offset, stop), min(start + offset + size, stop))
                for start, stop in ranges
            ]
            section.slabs.append(self._slab(slices, at_once))
        if whole and not at_once:
            section.copies_out = self._copies_out([slice(*r) for r in ranges])
        return section

    def _slab(self, slices: "list[slice]", copies_out: bool) -> Slab:
        """The copies of one slab. slices: of each rank, the elements of the arena that it adds."""
        buffer = self._next_buffer
        self._next_buffer = 1 - buffer
        grads, theirs, parts = self.arena.grads, self.theirs["grads"], self.parts[buffer]
        own = slices[self.local]
        copies_in = [
            (part[: own.stop - own.start], theirs[r][own]) for part, r in zip(parts, self.others)
        ]
        row = own.start // CHUNK
        add = (grads[own], parts, self.local, self.inner_squares[row:], self.nonfinite, row)
        return Slab(buffer, copies_in, add, self._copies_out(slices) if copies_out else [])

    def _copies_out(self, slices: "list[slice]") -> Copies:
        """Of what the other ranks of the machine have summed."""
        grads, theirs = self.arena.grads, self.theirs["grads"]
        return [(grads[slices[r]], theirs[r][slices[r]]) for r in self.others]

    def send(self, bucket: Bucket):
        """Queue the reduction of a bucket whose gradients the current stream has. With a sharded
        optimizer only this rank's range, and the rest that belongs to all, get their sums."""
        current = torch.cuda.current_stream(self.arena.device) if self.stream else None
        self.queued = True
        with _behind(current, self.stream):
            self._barrier(GRADIENTS_READY)
            for section in self.plans[bucket]:
                for slab in section.slabs:
                    self._send_slab(slab)
                if self.between is not None and section.part:
                    self._send_block(self.between, section)

    def _send_slab(self, slab: Slab):
        stream = self.stream
        added = self.buffer_added[slab.buffer]
        if stream is not None and added is not None:
            stream.wait_event(added)
        for destination, source in slab.copies_in:
            destination.copy_(source)
        with _behind(stream, self.sum_stream):
            add_ranks(*slab.sum)
            if self.sum_stream is not None:
                self.buffer_added[slab.buffer] = self.sum_stream.record_event()
        self._copy_out(self.sum_stream, slab.copies_out)

    def _send_block(self, between: MachineSums, section: Section):
        """Sum the block over the machines."""
        with _behind(self.sum_stream, self.network_stream):
            reduce = between.all_reduce if section.whole else between.reduce_scatter
            reduce(section.block, section.squares, section.part)
        self._copy_out(self.network_stream, section.copies_out)

    def _copy_out(self, before, copies: Copies):
        """Behind what the stream `before` has."""
        with _behind(before, self.out_stream):
            if not copies:
                return
            # Also: all ranks have read what is overwritten here.
            self._barrier(SUMS_READY)
            for destination, source in copies:
                destination.copy_(source)

    def spread(self, name: str):
        """With a sharded optimizer: copy what the other ranks have updated of arena.weights or
        arena.bf16_weights. The current stream goes on behind it."""
        stream = self.stream
        current = torch.cuda.current_stream(self.arena.device) if stream else None
        buffer = getattr(self.arena, name)
        ranges = [self._ranges(bucket) for bucket in self.plans]
        with _behind(current, stream):
            if self.between is not None:
                for of_bucket in ranges:
                    self.between.all_gather(buffer[slice(*of_bucket[self.local])])
            self._barrier(WEIGHTS_READY)
            for of_bucket in ranges:
                for r in self.others:
                    part = slice(*of_bucket[r])
                    buffer[part].copy_(self.theirs[name][r][part])
            # All have read: weights may be changed.
            self._barrier(WEIGHTS_READY)
        if current is not None and stream is not None:
            current.wait_stream(stream)

    def join_sums(self):
        """Behind all buckets: self.stream has the sums that this rank has added, and the squares of
        all of them. Copies of what others have added may still be under way."""
        if self.queued and self.stream is not None:
            several = self.machines.count > 1
            self.stream.wait_stream(self.network_stream if several else self.sum_stream)

    def join(self):
        """The current stream has all sums, and no other rank reads arena.grads any more."""
        if self.queued and self.out_stream is not None:
            with torch.cuda.stream(self.out_stream):
                self._barrier(SUMS_COPIED)
            torch.cuda.current_stream(self.arena.device).wait_stream(self.out_stream)
        self.forget()

    def forget(self):
        """The events belong to a step that is over, or was given up."""
        self.queued = False
        self.buffer_added = [None, None]


def in_words(machines: Machines, backend: str) -> str:
    """What adds up gradients."""
    inside = f"peer-to-peer copies of {machines.size} ranks"
    if machines.count == 1:
        return inside
    name = "NCCL" if backend == "nccl" else backend
    between = f"{name} between {machines.count} machines"
    return f"{inside} on each machine, and {between}" if machines.size > 1 else between


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
        except dist.DistError:
            raise
        except (RuntimeError, OSError) as error:
            problem = str(error).splitlines()[0]
        for rank, theirs in enumerate(_gather(problem, self.config)):
            if theirs and not self.reason:
                self.reason = f"on rank {rank}: {theirs}"
        return result


def _gather(mine, config: Distributed) -> list:
    everyone = [mine] * config.world
    if config.world > 1:
        collectives.gather_objects(everyone, mine, group=config.group)
    return everyone


def _obstacle(config: Distributed, arena: Arena) -> "tuple[bool, str]":
    """(whether all ranks want the same, why copies are not possible as far as that is known without
    trying, or "")."""
    if config.world == 1:
        return True, _nothing_to_copy(config, arena)
    device = arena.device
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    wanted = (
        arena.numel,
        str(config.dtype),
        config.ordered,
        config.sharded,
        config.peer_to_peer,
        _shared_buffers(config, arena),
        device.type,
        takes(device),
    )
    gpus, choices = zip(*_gather((gpu, wanted), config))
    if any(choice != wanted for choice in choices):
        return False, "the ranks differ"
    if config.backend == "nccl" and len(set(gpus)) < config.world:
        return True, f"{config.world} ranks share {len(set(gpus))} GPUs"
    machines, apart = Machines.of(config)
    if config.backend == "nccl":
        possible = device.type == "cuda" and takes(device)
    else:
        # On one machine gloo's threads reduce beside backward.
        several = machines is None or machines.count > 1
        possible = config.backend == "gloo" and device.type == "cpu" and several
    if not possible:
        return True, _nothing_to_copy(config, arena)
    if apart:
        return True, apart
    if config.ordered:
        return True, "sums are ordered"
    if config.dtype != torch.float32:
        return True, f"sums are sent in {config.dtype}"
    return True, ""


def _nothing_to_copy(config: Distributed, arena: Arena) -> str:
    return (
        f"the {config.world} ranks' collectives are {config.backend}'s, the model is on "
        f"{arena.device}, backend {backend().name}"
    )


def _shared_buffers(config: Distributed, arena: Arena) -> "list[str]":
    """The buffers that other ranks read: gradients, and with a sharded optimizer the weights."""
    return ["grads", *(gathered_buffers(arena) if config.sharded else ())]
