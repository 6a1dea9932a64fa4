"""Several machines with several ranks each: who is where, and sums between machines.

    machines, reason = Machines.of(config)      # (None, why): every rank talks to every other one
    machines.machine, machines.local            # this rank is number `local` of machine `machine`
    sums = MachineSums(machines, longest, device)
    sums.all_reduce(block, squares, part)       # the sums of this machine -> those of all machines

A network between machines is slower than the links inside of one. So ranks first sum inside their
machine, where each gets the sums of one block (distributed/p2p.py). Then the ranks with one local
number, one of each machine, sum their blocks: each sends 2 (n - 1) / n of a block over the network,
with n machines. A block is 1 / g of a bucket, with g ranks per machine.

The order of additions is fixed: the ranks of a machine in their order, then the machines in theirs.
The additions between machines are ours as well (an all-to-all moves the parts). NCCL's all-reduce
adds in an order that depends on its algorithm, on the topology and on the size of the message.
"""

import datetime
import os
import pathlib
import socket
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from ..ops import CHUNK
from . import collectives
from .config import Distributed
from .peer_sums import add_ranks


@dataclass(frozen=True)
class Machines:
    """The machines of a group, with equally many ranks each: machine m has ranks
    [m * size, (m + 1) * size).

    Attributes:
        count: machines.
        size: ranks of each.
        machine: of this rank.
        local: number of this rank on its machine.
        inside: the group of this machine's ranks. None: the default group, or it has one rank.
        between: the group of the ranks with this local number, one of each machine; None: there is
            one machine.
    """

    count: int
    size: int
    machine: int
    local: int
    inside: "dist.ProcessGroup | None"
    between: "dist.ProcessGroup | None"

    @classmethod
    def of(cls, config: Distributed) -> "tuple[Machines | None, str]":
        """(machines, ""), or (None, why sums have no levels). Collective at the first call."""
        if config._placement is None:
            config._placement = _placement(config)
        return config._placement

    @property
    def ranks(self) -> range:
        """Those of this machine."""
        return range(self.machine * self.size, (self.machine + 1) * self.size)

    @property
    def position(self) -> int:
        """Of this rank among all, where those with one local number are neighbours: its place among
        the ranges of a bucket that is sharded."""
        return self.local * self.count + self.machine

    def part(self, numel: int) -> int:
        """Elements of a block of `numel` that each machine adds: whole chunks."""
        return -(-numel // CHUNK // self.count) * CHUNK

    @property
    def levels(self) -> "list[tuple[dist.ProcessGroup | None, int, int]]":
        """(group, its ranks, number of this one) of the two all-gathers that make one over all
        ranks: of ranges in the order of `position`."""
        levels = [
            (self.between, self.count, self.machine),
            (self.inside, self.size, self.local),
        ]
        return [level for level in levels if level[1] > 1]


def machine_name() -> tuple:
    """Equal on two ranks that torchrun has started on one machine: the host, since when it is up,
    and torchrun's number of the node."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return (
        socket.gethostname(),
        boot.read_text().strip() if boot.exists() else "",
        os.environ.get("GROUP_RANK", ""),
    )


def _placement(config: Distributed) -> "tuple[Machines | None, str]":
    world = config.world
    # torch counts a process' groups, and gives a new one a name that has the number in it.
    mine = machine_name(), len(_world.pg_names)
    everyone = [mine] * world
    if world > 1:
        collectives.gather_objects(everyone, mine, group=config.group)
    names, groups = zip(*everyone)
    count = len(set(names))
    if count == 1:
        return Machines(1, world, 0, config.rank, config.group, None), ""
    sizes = sorted({names.count(name) for name in names})
    if len(sizes) > 1:
        return None, f"the machines have {' and '.join(map(str, sizes))} ranks"
    size = sizes[0]
    if any(names[r] != names[r // size * size] for r in range(world)):
        return None, "the ranks of a machine are not neighbours"
    parent = config.group if config.group is not None else dist.group.WORLD
    # Several ranks: there is a default group.
    assert parent is not None
    made = _made.setdefault(parent, {})
    if names not in made:
        # What torch needs for a group that only its members make.
        if world < dist.get_world_size():
            if len(set(groups)) > 1:
                return None, "the ranks are in different numbers of process groups"
            if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
                return None, "the default group, of more ranks, is bound to devices (device_id=)"
        made[names] = _make_groups(config, parent, count, size)
    return made[names], ""


# Group -> names of its ranks' machines -> Machines: communicators are made once.
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Machines]]"
_made = weakref.WeakKeyDictionary()


def _make_groups(config: Distributed, parent: dist.ProcessGroup, count: int, size: int) -> Machines:
    machine, local = divmod(config.rank, size)
    # All ranks of the default group make every group, as torch asks; where not all are here, those
    # of a new group do it among themselves.
    everyone = config.world == dist.get_world_size()
    groups = {}
    for kind, number, ranks in _members(count, size):
        mine = number == (machine if kind == "inside" else local)
        if (mine or everyone) and len(ranks) > 1:
            group = dist.new_group(
                [dist.get_global_rank(parent, r) for r in ranks],
                timeout=_timeout(parent, config),
                backend=config.backend,
                use_local_synchronization=not everyone,
            )
            if mine:
                groups[kind] = group
    return Machines(count, size, machine, local, groups.get("inside"), groups["between"])


def _members(count: int, size: int):
    """(kind, number, ranks) of each group."""
    for m in range(count):
        yield "inside", m, range(m * size, (m + 1) * size)
    for local in range(size):
        yield "between", local, range(local, count * size, size)


def _timeout(parent: dist.ProcessGroup, config: Distributed) -> datetime.timedelta:
    """A collective of `parent` fails after so long."""
    device = torch.device("cuda" if config.backend == "nccl" else "cpu")
    options = getattr(parent._get_backend(device), "options", None)
    return getattr(options, "_timeout", datetime.timedelta(seconds=config.timeout))


class MachineSums:
    """Sums over all machines of a block that each of them has summed inside.

    A block is cut into as many parts of whole chunks as there are machines; this rank adds one.

    NCCL gets copies of gradients, in memory of one kind. In a CUDA graph it registers the buffers
    of a message, where it can, and GPUs then write into each other's. Its documentation forbids a
    message of which only some are registered: sums sent right from arena.grads, which lies in
    symmetric memory, to ordinary memory never arrived (NCCL 2.28, steps of llama-350m).

    Args:
        machines: of the group.
        longest: elements of the longest part.
        device: of the blocks.
    """

    def __init__(self, machines: Machines, longest: int, device: torch.device):
        self.machines = machines
        # A block; then the sums of all its parts.
        self.staged = torch.empty(machines.count * longest, dtype=torch.float32, device=device)
        # Of each machine, its sums of this rank's part.
        self.incoming = torch.empty_like(self.staged)
        # Which machine's sum is not finite: known inside of that machine, so nobody reads it.
        self.nonfinite = torch.zeros(
            machines.count, longest // CHUNK, dtype=torch.int32, device=device
        )

    def reduce_scatter(self, block: Tensor, squares: Tensor, part: int):
        """This rank's part of the block gets its sums, in the order of the machines.

        Args:
            block: (n,) fp32, whole chunks, contiguous; n may be less than all parts together.
            squares: (n / CHUNK,) fp64, gets the sums of squares of the part.
            part: elements of a part, equal on all ranks.
        """
        own = block[part * self.machines.machine :][:part]
        own.copy_(self._sum(block, squares, part)[: len(own)])

    def all_reduce(self, block: Tensor, squares: Tensor, part: int):
        """All of the block gets its sums. The arguments are those of reduce_scatter()."""
        total = self._sum(block, squares, part)
        everyone = self.staged[: self.machines.count * part]
        collectives.all_gather(everyone, total, group=self.machines.between)
        block.copy_(everyone[: len(block)])

    def _sum(self, block: Tensor, squares: Tensor, part: int) -> Tensor:
        """(part,): the sums of this rank's part; behind the block's end not defined."""
        machines = self.machines
        outgoing = self.staged[: machines.count * part]
        incoming = self.incoming[: len(outgoing)]
        outgoing[: len(block)].copy_(block)
        collectives.all_to_all(incoming, outgoing, group=machines.between)
        parts = incoming.view(machines.count, part)
        total, first = parts[0], part * machines.machine
        length = len(block[first:][:part])
        add_ranks(total[:length], parts[1:], 0, squares[first // CHUNK :], self.nonfinite, 0)
        return total

    def all_gather(self, block: Tensor):
        """Every machine gets the parts of all, which are equal.

        Args:
            block: (n,) of any dtype, contiguous.
        """
        if not len(block):
            return
        mine = block.view(self.machines.count, -1)[self.machines.machine]
        group = self.machines.between
        collectives.all_gather(block, mine if mine.is_cuda else mine.clone(), group=group)
