"""Heartbeats: how often each rank has reached the collectives of a step, so that a rank that waits
can say for whom.

    heartbeat(0)                            # this rank is about to enter a collective
    heartbeat(1)                            # ..., and one more backward is over
    group_heartbeats.ranks_behind()         # [3]: rank 3 has not reached this collective

In a group that rendezvous.py made, each rank writes its count into the store where the ranks met.
In processes of ga.launch the parent reads the counts from shared memory (distributed/spawn.py).
Groups of some ranks are not counted: their collectives have torch.distributed's limit alone.
"""

import os
import re
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..errors import RankError

# Seconds that what cannot name a rank (NCCL, a CUDA event) waits longer than what can.
SLACK = 10.0

# Of the group that rendezvous.init_from_environment() made; None: there is none.
group_heartbeats: "Heartbeats | None" = None

# In a process of ga.launch: its spawn.LaunchedRank.
launched_rank: Any = None


def heartbeat(steps: int, group: dist.ProcessGroup | None = None):
    """This rank is about to enter a collective. steps: backwards that are over since the last one.

    Args:
        group: whose ranks enter it; None: those of the default group.
    """
    if launched_rank is not None:
        launched_rank.heartbeat(steps, group)
    if group is None and group_heartbeats is not None:
        group_heartbeats.increment()


def ranks_in_words(ranks) -> str:
    """rank 3; ranks 1 and 3."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def timed_out(message: str) -> bool:
    """Whether a collective's error is that of its time limit."""
    return bool(re.search("timed? ?out", message, re.I))


def lost_rank(error: dist.DistError, when: str, config: Any) -> RankError:
    """In place of a collective's error, with the ranks that had not reached the collective when
    it timed out. (A connection that was closed names nobody: who is behind may be slower.)

    Args:
        when: "at the start".
        config: the Distributed of the group.
    """
    behind = None
    if group_heartbeats is not None and config.group is None and timed_out(str(error)):
        behind = group_heartbeats.ranks_behind()
    whom = "another one"
    if behind:
        whom = f"{ranks_in_words(behind)} of {config.world}"
    return RankError(
        f"rank {config.rank} of {config.world} cannot reach {whom} {when}: it has stopped (what it "
        f"said is in its own output), hangs, or the network is down. "
        "Ranks must take equally many steps; a rank without a batch calls step(None). "
        f"{str(error).splitlines()[0]}"
    )


class Heartbeats:
    """The counts of the default group's ranks."""

    def __init__(self, store):
        self.store = dist.PrefixStore("heartbeats", store)
        self.count = 0
        self._query: threading.Thread | None = None
        self._behind: list[int] = []

    def increment(self):
        """Count one more collective. The store is written without a wait."""
        self.count += 1
        with suppress(dist.DistError):
            self.store.set(f"rank {dist.get_rank()}", str(self.count))

    def ranks_behind(self, limit: float = 2.0) -> list[int] | None:
        """The other ranks that have not reached the collective in which this one waits.

        Returns:
            [] where that cannot be known, None where the store does not answer for `limit` seconds.
        """
        # A query to a machine that was stopped does not return: one is enough.
        if self._query is None or not self._query.is_alive():
            self._query = threading.Thread(target=self._ask_store, daemon=True)
            self._query.start()
        self._query.join(limit)
        return None if self._query.is_alive() else self._behind

    def _ask_store(self):
        self._behind = []
        # The store's machine, or the group, may have ended.
        with suppress(RuntimeError, ValueError):
            others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
            # get() would wait for a key that is not there yet.
            counts = [self.store.add(f"rank {rank}", 0) for rank in others]
            self._behind = [rank for rank, count in zip(others, counts) if count < self.count]

    def is_current(self) -> bool:
        """Whether these are the default group's. False once the group was destroyed."""
        return group_heartbeats is self and dist.is_initialized()

    def watch(self, seconds: float):
        """End this process when it has waited `seconds` for ranks that are behind. For a thread.

        No call returns with an error where GPUs wait for each other: NCCL has no time limit for
        its kernels in a CUDA graph."""
        interval = min(1.0, seconds / 4)
        count, waited = self.count, 0.0
        while True:
            began = time.monotonic()
            time.sleep(interval)
            if not self.is_current():
                return
            # A job that was stopped as a whole (a suspended machine) has not waited.
            waited += min(time.monotonic() - began, 2 * interval)
            if self.count != count:
                count, waited = self.count, 0.0
            if not self.count or waited < seconds:
                continue
            behind = self.ranks_behind()
            if behind:
                end_process(seconds, ranks_in_words(behind))
            elif behind is None and waited > seconds + SLACK:
                end_process(seconds, "the machine with the ranks' store, which does not answer")


def end_process(seconds: float, whom: str):
    """Say for whom this rank has waited, and exit: the thread that waits cannot be interrupted."""
    print(
        f"gpuaccel: rank {dist.get_rank()} of {dist.get_world_size()} has waited {seconds:g} s for "
        f"{whom}: it has stopped (what it said is in its own output), hangs, or the network is "
        "down",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
