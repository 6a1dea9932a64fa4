"""Sums over the GPUs of one machine without a kernel that carries: copy engines bring the parts, one kernel of ours adds, copy engines take the sums.

A collective's kernels hold multiprocessors for as long as the links between GPUs need; a matrix product beside them, which counts on all of them, took 30
to 40% longer on two H200s. Here arena.grads lies in memory that the other ranks' GPUs can read (torch's symmetric memory). Of each bucket a rank
adds up one range: it copies what the others have there, adds in the order of the ranks (peers.cu), which leaves sums of squares behind and finds
who brought what is not finite, and copies the sums of the others' ranges. One stream each: parts come, are added, and sums are handed on at the same time.

    >>> peers = PeerToPeer.of(how, arena)              # None, and a line in the log, where that cannot be done; before anything knows arena.grads' address
    >>> peers.plan(buckets)
    >>> peers.send(bucket)                        # from here on it is on its way
    >>> peers.join()                              # peers.stream has everything
"""

import contextlib
import functools
import logging
import pathlib
import socket

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import backend, takes
from ..compiler.kernel import Kernel
from ..errors import ArgumentError
from ..ops.accumulate import CHUNK, SQUARES_THREADS
from ..ops.clip import launch_squares
from ..optim.accumulate import GradientAccumulator
from ..optim.arena import Arena
from .rendezvous import SLACK
from .zero1 import gathered_buffers, share

SLAB = 1 << 24  # elements of all ranks' ranges that are added at once
log = logging.getLogger("gpuaccel")


# ---- launcher -------------------------------------------------------------------------------------------------------


@functools.cache
def _kernel() -> Kernel:
    return Kernel("peers", "peers_sum", CHUNK=CHUNK, THREADS=SQUARES_THREADS)


def launch_sum(own: Tensor, others: Tensor, rank: int, partials: Tensor, wrong: Tensor, row: int):
    """peers_sum: own += others, in the order of the ranks. own: (n,) fp32, whole chunks; others: (ranks - 1, at least n) fp32, rows 16-byte aligned.

    partials: (rows,) fp64, and wrong: (ranks, rows) int32, of which `row` is that of own's first chunk."""
    if len(own):
        _kernel()[len(own) // CHUNK, SQUARES_THREADS](
            own,
            partials[row:],
            wrong.view(-1)[row:],
            others,
            rank,
            len(wrong),
            wrong.shape[1],
            others.stride(0) // 4,
        )


# ---- public: the ranks of a step ------------------------------------------------------------------------------------


class PeerToPeer:
    """This rank's side of the sums. Made by of(), on every rank."""

    def __init__(self, how, arena: Arena):
        """What needs memory or a compiler: it may fail on one rank alone."""
        self.how, self.arena, self.rank, self.world = how, arena, how.rank, how.world
        self.others = [r for r in range(self.world) if r != self.rank]
        cuda, rows = (
            arena.device.type == "cuda",
            arena.numel // CHUNK,
        )  # on a CPU (in tests) everything is done when it is asked for
        self.stream, self.adder, self.hand = (
            torch.cuda.Stream(arena.device, priority=-1) if cuda else None for _ in range(3)
        )
        self.last = self.adder if how.sharded else self.hand
        self.slab = min(max(1, SLAB // self.world // CHUNK), rows // self.world + 1)  # chunks
        self.parts = torch.empty(
            2, self.world - 1, self.slab * CHUNK, device=arena.device
        )  # two, in turns: one is filled while the other is added
        self.free = [None, None]  # events: this step has added what was there
        self.squares = torch.zeros(
            rows, dtype=torch.float64, device=arena.device
        )  # of what this rank adds up; the rest stays 0
        self.wrong = torch.zeros(self.world, rows, dtype=torch.int32, device=arena.device)
        self.own_sums = torch.zeros_like(
            self.squares
        )  # of what this rank brings and NCCL adds: not finite where that is not
        if cuda:
            _kernel().load(arena.device.index)

    def meet(self, homes: "dict[str, tuple]") -> "PeerToPeer":
        """homes: name of each buffer of the arena that the others read -> memory for it, and what knows that of the others. Collective."""
        self.homes, self.theirs = homes, {}  # name -> rank -> its buffer
        for name, (home, handle) in homes.items():
            self.arena.move(name, home)
            self.theirs[name] = {
                r: handle.get_buffer(r, (self.arena.numel,), home.dtype) for r in self.others
            }
        for channel in range(3) if self.stream else ():  # their kernel is loaded before any capture
            self._barrier(channel)
        return self

    def _barrier(self, channel):
        """All ranks have come here, on a stream of theirs: 0 with a bucket, 1 with sums, 2 with weights. A rank that waits too long ends with a CUDA error."""
        self.homes["grads"][1].barrier(channel, int(1000 * (self.how.timeout + SLACK)))

    @classmethod
    def of(cls, how, arena: Arena) -> "PeerToPeer | None":
        """Of a ga.Distributed; None where NCCL (or gloo) has to do it: the log says why NCCL has. Collective.

        ArgumentError, on every rank, where how.peer_to_peer is True and it cannot be done."""
        if (
            GradientAccumulator.of(arena) is not None
        ):  # somebody knows the buffers' addresses; a second accumulator will be refused
            return None
        alike, reason = _why_not(how, arena)
        if (
            not alike or how.peer_to_peer is False
        ):  # what differs will be named when the ranks are compared
            return None

        def attempt(part):
            """What it gives, if there is no reason against it; afterwards there is one if it failed on any rank."""
            nonlocal reason
            found, problem = None, ""
            if not reason:
                try:
                    found = part()
                except RuntimeError as error:
                    problem = str(error).splitlines()[0]
                reason = next(
                    (
                        f"on rank {r}: {said}"
                        for r, said in enumerate(_gathered(problem, how))
                        if said
                    ),
                    "",
                )
            return found

        homes = attempt(lambda: _allocate(how, arena))
        made = attempt(lambda: cls(how, arena))
        homes = attempt(lambda: _rendezvous(how, homes))
        if reason and how.peer_to_peer:
            raise ArgumentError(
                f"peer_to_peer is True, and {reason}; expected the GPUs of one machine, which can read each other's memory, and fp32 sums"
            )
        if reason and how.backend == "nccl" and how.world > 1:
            log.info("gradients are added up by NCCL: %s", reason)
        return None if reason else made.meet(homes)

    def _ranges(self, bucket) -> "list[tuple[int, int]]":
        """Of each rank, the elements of a bucket that it adds up: whole chunks."""
        if self.how.sharded:
            own = share(bucket, self.world)
            return [
                (bucket.start + r * own, bucket.start + (r + 1) * own) for r in range(self.world)
            ]
        chunks = (bucket.stop - bucket.start) // CHUNK
        ends = [bucket.start + chunks * r // self.world * CHUNK for r in range(self.world + 1)]
        return list(zip(ends, ends[1:]))

    def plan(self, buckets):
        """Before the first send(): what is copied and added for each bucket, so that a step's host only has to start it."""
        self.plans, turn = {}, 0
        for bucket in buckets:
            ranges, slabs = self._ranges(bucket), []
            longest = max(stop - start for start, stop in ranges) // CHUNK
            most = (
                self.slab if bucket is not buckets[-1] else max(1, self.slab // 2)
            )  # nothing hides the last bucket: smaller steps, less waiting
            slab = CHUNK * max(1, -(-longest // max(1, -(-longest // most))))  # equal ones
            for at in range(0, longest * CHUNK, slab):
                slabs.append(
                    self._slab(
                        [
                            slice(min(start + at, stop), min(start + at + slab, stop))
                            for start, stop in ranges
                        ],
                        turn,
                    )
                )
                turn = 1 - turn
            rest = slice(ranges[-1][1], bucket.stop)
            rows = slice(rest.start // CHUNK, rest.stop // CHUNK)
            self.plans[bucket] = (
                slabs,
                (self.arena.grads[rest], self.own_sums[rows], self.squares[rows])
                if rest.stop > rest.start
                else None,
            )

    def _slab(self, slabs, turn) -> tuple:
        """Of a part of each rank's range: what to copy here, what to add, what to hand on, each as the arguments of a call."""
        grads, theirs, own, parts = (
            self.arena.grads,
            self.theirs["grads"],
            slabs[self.rank],
            self.parts[turn],
        )
        pulls = [
            (place[: own.stop - own.start], theirs[r][own]) for place, r in zip(parts, self.others)
        ]
        hands = (
            []
            if self.how.sharded
            else [(grads[slabs[r]], theirs[r][slabs[r]]) for r in self.others]
        )
        return (
            turn,
            pulls,
            (grads[own], parts, self.rank, self.squares, self.wrong, own.start // CHUNK),
            hands,
        )

    def send(self, bucket):
        """The current stream has this rank's gradients of a bucket: their sums are on their way; of shares this rank's and the common rest."""
        slabs, rest = self.plans[bucket]
        with _behind(
            torch.cuda.current_stream(self.arena.device) if self.stream else None, self.stream
        ):
            self._barrier(0)  # all ranks have theirs
            for turn, pulls, sums, hands in slabs:
                if self.free[turn] is not None:
                    self.stream.wait_event(self.free[turn])
                for here, there in pulls:
                    here.copy_(there)
                with _behind(self.stream, self.adder):
                    launch_sum(*sums)
                    self.free[turn] = self.adder and self.adder.record_event()
                if hands:
                    with _behind(self.adder, self.hand):
                        self._barrier(1)  # all ranks have added, and read what is overwritten here
                        for here, there in hands:
                            here.copy_(there)
            if rest:
                sums, brought, squares = rest
                launch_squares([sums], brought)
                dist.all_reduce(sums, group=self.how.group)
                if self.rank == 0:
                    launch_squares([sums], squares)

    def spread(self, name: str):
        """sharded: what the other ranks have updated of arena.weights or arena.bf16_weights comes from them; the current stream goes on behind it."""
        current = torch.cuda.current_stream(self.arena.device) if self.stream else None
        with _behind(current, self.stream):
            self._barrier(2)  # all ranks have updated theirs
            for bucket in self.plans:
                ranges = self._ranges(bucket)
                for r in self.others:
                    here = slice(*ranges[r])
                    getattr(self.arena, name)[here].copy_(self.theirs[name][r][here])
            self._barrier(2)  # all have read: weights may be changed
        if self.stream:
            current.wait_stream(self.stream)

    def join(self):
        """Behind all buckets: self.stream has the sums. What the other ranks still read is free after the next collective on that stream."""
        if any(self.free):  # else nothing was sent, or this is a CPU
            self.stream.wait_stream(self.last)
        self.forget()

    def forget(self):
        """The next step is behind this one anyway; and events of one that was given up are nobody's any more."""
        self.free = [None, None]


@contextlib.contextmanager
def _behind(before, stream):
    """Inside it, work goes to a stream, behind what `before` has."""
    if stream is not None:
        stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield


def _gathered(mine, how) -> list:
    found = [mine] * how.world
    dist.all_gather_object(found, mine, group=how.group)
    return found


def _why_not(how, arena) -> "tuple[bool, str]":
    """(do all ranks want the same?, why that cannot be done as far as it is known without trying; "" if nothing is). Reducer that differ ask alike."""
    cuda = arena.device.type == "cuda"
    if how.world > 1 and how.backend == "nccl":
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
        machine = socket.gethostname(), boot.read_text().strip() if boot.exists() else ""
        gpu = str(torch.cuda.get_device_properties(arena.device).uuid) if cuda else ""
        wanted = (
            arena.numel,
            str(how.dtype),
            how.ordered,
            how.sharded,
            how.peer_to_peer,
            _read(how, arena),
            cuda,
            takes(arena.device),
        )
        machines, gpus, choices = zip(*_gathered((machine, gpu, wanted), how))
        if any(choice != wanted for choice in choices):
            return False, "the ranks differ"
        if len(set(machines)) > 1:
            return True, f"the ranks are on {len(set(machines))} machines"
        if len(set(gpus)) < how.world:
            return True, f"{how.world} ranks share {len(set(gpus))} GPUs"
    if how.world == 1 or how.backend != "nccl" or not cuda or not takes(arena.device):
        return (
            True,
            f"the {how.world} ranks' collectives are {how.backend}'s, the model is on {arena.device}, backend {backend().name}",
        )
    if how.ordered or how.dtype != torch.float32:
        return True, "sums are ordered" if how.ordered else f"sums are sent in {how.dtype}"
    return True, ""


def _allocate(how, arena) -> "dict[str, Tensor]":
    import torch.distributed._symmetric_memory as symmetric

    return {
        name: symmetric.empty(arena.numel, dtype=getattr(arena, name).dtype, device=arena.device)
        for name in _read(how, arena)
    }


def _rendezvous(how, homes) -> "dict[str, tuple]":
    import torch.distributed._symmetric_memory as symmetric

    group = how.group if how.group is not None else dist.group.WORLD
    return {name: (home, symmetric.rendezvous(home, group)) for name, home in homes.items()}


def _read(how, arena) -> "list[str]":
    """The buffers that other ranks read: gradients, and of shares the weights, too."""
    return ["grads", *(gathered_buffers(arena) if how.sharded else ())]
