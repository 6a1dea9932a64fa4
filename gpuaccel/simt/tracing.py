"""What a trace says: which thread touched which element, and what it costs in requests, sectors and bank conflicts.

    >>> trace = gpuaccel.simt.trace(saxpy[3, 8], y, 2.0, x, 21)      # every access of the launch, in order
    >>> trace.requests()["sectors"]                                   # one row per warp-wide request
    >>> for use in trace.summary(): print(use)                        # one row per source line, tensor and kind of access
    line 4, x read: 21 (0 to 1 per thread), 1.0 sectors per request, 87.5% of their bytes used

How requests are counted. The threads of a warp that reach one place in the code for the n-th time make one request together.
Global memory serves it in sectors of 32 bytes, counted from the tensor's first byte (torch aligns tensors to more than that).
Shared memory has 32 banks, each gives one 4-byte word at a time: a request takes as many turns as the busiest bank has different
words to give; threads that ask for the same word share it (atomics do not: each takes a turn). A request of 8 bytes per thread is
served in two halves of the warp, one of 16 bytes in four quarters, and each part is counted by itself: conflict-free is always 1.
"""

from dataclasses import dataclass, field, replace

import numpy as np

WARP, BANKS, SECTOR = 32, 32, 32  # threads of a warp; banks of 4 bytes; bytes of a sector
READ, WRITE, ATOMIC = 0, 1, 2
KINDS = ("read", "write", "atomic")
EVENT = np.dtype(
    [
        ("line", "i4"),  # of the kernel's source, from 1
        ("block", "i8"),
        ("thread", "i4"),  # linear; the warp is thread // 32
        ("tensor", "i2"),  # index into Trace.tensors
        ("offset", "i8"),
        ("bytes", "i2"),  # from the tensor's first byte
        ("kind", "u1"),  # READ, WRITE or ATOMIC
        ("visit", "i4"),
        ("pc", "i4"),  # this thread is at this place in the code (pc) for the n-th time, from 0
        ("step", "i4"),  # n-th access of this thread, from 0
    ]
)
REQUEST = np.dtype(
    [
        ("line", "i4"),
        ("pc", "i4"),
        ("block", "i8"),
        ("warp", "i4"),
        ("visit", "i4"),
        ("tensor", "i2"),
        ("kind", "u1"),
        ("threads", "i4"),  # that take part
        ("asked", "i8"),
        ("used", "i8"),  # bytes that the threads ask for, all together and without repetitions
        ("sectors", "i4"),  # global memory: 32-byte sectors touched, else 0
        ("ways", "i4"),  # shared memory: 1 without a bank conflict, up to 32; else 0
    ]
)


@dataclass
class Traced:
    """A tensor, or an array in shared memory, that a trace knows."""

    name: str
    elements: int
    itemsize: int
    dtype: str
    space: str  # "global" or "shared"


@dataclass(frozen=True, repr=False)
class Use:
    """What one source line does to one tensor, over the whole launch."""

    line: int
    tensor: str
    space: str
    kind: str  # "read", "write" or "atomic"
    count: int  # accesses of all threads
    least: int  # fewest and most accesses of one thread
    most: int
    requests: int  # of whole warps
    sectors: "float | None"  # per request (global memory)
    needed: "float | None"  # per request, if the same bytes lay side by side (global memory)
    used: "float | None"  # share of the sectors' bytes that a thread asked for (global memory)
    ways: "int | None"  # worst bank conflict (shared memory), 1: none

    @property
    def per_thread(self) -> str:
        return f"{self.most}" if self.least == self.most else f"{self.least} to {self.most}"

    def __str__(self):
        if self.space == "global":
            best = (
                f" (at best {self.needed:.1f})"
                if f"{self.needed:.1f}" != f"{self.sectors:.1f}"
                else ""
            )
            cost = f"{self.sectors:.1f} sectors per request{best}, {share(self.used)} of their bytes used"
        else:
            cost = f"{self.ways}-way bank conflict" if self.ways > 1 else "no bank conflict"
        return f"line {self.line}, {self.tensor} {self.kind}: {self.count:,} ({self.per_thread} per thread), {cost}"

    __repr__ = __str__


@dataclass
class Trace:
    """The accesses of one launch. `gpuaccel.simt.trace` makes it."""

    kernel: str
    grid: "tuple[int, int, int]"
    block: "tuple[int, int, int]"
    tensors: "list[Traced]"
    events: np.ndarray  # of dtype EVENT, in the order in which things happened
    source: str = ""  # the kernel's file as its author wrote it
    filename: str = ""
    truncated: bool = False  # there were more events than were kept
    reports: list = field(default_factory=list)

    def __post_init__(self):
        self.events = as_written(self.events)
        self.tensors = [self._measured(i, traced) for i, traced in enumerate(self.tensors)]

    def _measured(self, i, traced):
        """Memory that was declared without a type (dynamic shared memory) counts in pieces that fit its accesses."""
        theirs = self.events[self.events["tensor"] == i]
        piece = int(
            np.gcd.reduce(
                [
                    *np.unique(theirs["bytes"]),
                    *np.unique(theirs["offset"]),
                    traced.elements * traced.itemsize,
                ]
            )
        )
        if traced.dtype != "byte" or len(theirs) == 0 or piece < 2:
            return traced
        return replace(
            traced,
            elements=traced.elements * traced.itemsize // piece,
            itemsize=piece,
            dtype=f"{piece}-byte",
        )

    @property
    def blocks(self) -> int:
        return int(np.prod(self.grid, dtype=np.int64))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return int(np.prod(self.block, dtype=np.int64))

    def known(self) -> np.ndarray:
        """The events whose tensor is known."""
        return self.events[
            (self.events["tensor"] >= 0) & (self.events["tensor"] < len(self.tensors))
        ]

    def outside(self, events) -> np.ndarray:
        """Which of these events are not, or not wholly, inside their tensor."""
        sizes = np.array([t.elements * t.itemsize for t in self.tensors] or [0], np.int64)[
            events["tensor"]
        ]
        return (events["offset"] < 0) | (events["offset"] + events["bytes"] > sizes)

    def requests(self, events=None) -> np.ndarray:
        """One row of dtype REQUEST per warp-wide request and tensor, in order of first appearance."""
        events = self.known() if events is None else events
        warp = events["thread"] // WARP
        order, group = groups(
            events["pc"], events["block"], warp, events["visit"], events["tensor"], events["kind"]
        )
        first = np.full(group[-1] + 1 if len(group) else 0, len(events))
        np.minimum.at(first, group, order)
        rank = np.argsort(np.argsort(first))  # number requests in the order of their first events
        at = np.empty(len(events), np.int64)
        at[order] = rank[group]
        first = np.sort(first)
        rows = np.zeros(len(first), REQUEST)
        for name in ("line", "pc", "block", "visit", "tensor", "kind"):
            rows[name] = events[name][first]
        rows["warp"] = warp[first]
        start, stop = events["offset"], events["offset"] + events["bytes"]
        rows["threads"] = np.bincount(at, minlength=len(rows))
        rows["asked"] = np.bincount(at, events["bytes"], len(rows))
        rows["used"] = _covered(at, start, stop, len(rows))
        shared = np.array([t.space == "shared" for t in self.tensors] or [False])
        sectors = _covered(at, start // SECTOR, -(-stop // SECTOR), len(rows))
        rows["sectors"] = np.where(shared[rows["tensor"]], 0, sectors)
        in_shared = shared[events["tensor"]]
        rows["ways"] = bank_ways(events[in_shared], at[in_shared], len(rows)).max(axis=1, initial=0)
        return rows

    def summary(self) -> "list[Use]":
        """One row per source line, tensor and kind of access, by line and then by first appearance."""
        events, requests, uses = self.known(), self.requests(), []
        who = events["block"] * self.threads + events["thread"]
        for line, tensor, kind in dict.fromkeys(
            zip(*(requests[k].tolist() for k in ("line", "tensor", "kind")))
        ):
            theirs = [
                (rows["line"] == line) & (rows["tensor"] == tensor) & (rows["kind"] == kind)
                for rows in (events, requests)
            ]
            some, traced = requests[theirs[1]], self.tensors[tensor]
            counts = np.unique(who[theirs[0]], return_counts=True)[1]
            shared, fetched = traced.space == "shared", int(some["sectors"].sum())
            uses.append(
                Use(
                    line,
                    traced.name,
                    traced.space,
                    KINDS[kind],
                    int(counts.sum()),
                    int(counts.min()) if len(counts) == self.blocks * self.threads else 0,
                    int(counts.max()),
                    len(some),
                    None if shared else fetched / len(some),
                    None if shared else float((-(-some["used"] // SECTOR)).mean()),
                    None if shared else int(some["used"].sum()) / (fetched * SECTOR),
                    int(some["ways"].max()) if shared else None,
                )
            )
        return sorted(uses, key=lambda use: (use.line, KINDS.index(use.kind)))


def as_written(events) -> np.ndarray:
    """The events without two traces of the compiler's work on structs such as float4.

    `a = x[i]` can be seen as a read of 16 bytes and then one of each member: the members are in registers, and are dropped.
    `out[i] = x[i]` can be seen as the write before the read: they change places."""
    if not (events["bytes"] >= 8).any():
        return events
    when = np.lexsort((events["step"], events["thread"], events["block"]))
    e = events[when]  # thread by thread
    alike = np.logical_and.reduce(
        [e[k][1:] == e[k][:-1] for k in ("block", "thread", "line", "bytes")]
    )
    first = np.flatnonzero(
        alike & (e["bytes"][1:] >= 8) & (e["kind"][:-1] == WRITE) & (e["kind"][1:] == READ)
    )
    e[first], e[first + 1] = e[first + 1], e[first]
    for size in (16, 8):
        whole = (e["bytes"] >= size) & (e["kind"] == READ)
        last = np.maximum.accumulate(
            np.where(whole, np.arange(len(e)), 0)
        )  # the whole that was read last
        part = whole[last] & ~whole & (e["kind"] == READ) & (e["offset"] >= e["offset"][last])
        part &= e["offset"] + e["bytes"] <= e["offset"][last] + e["bytes"][last]
        part &= np.logical_and.reduce(
            [e[k] == e[k][last] for k in ("block", "thread", "line", "tensor")]
        )
        others = np.cumsum(~part)
        part &= others == others[last]  # nothing else happened in between
        e, when = e[~part], when[~part]
    thread = _changes(e["block"], e["thread"])
    e["step"] = np.arange(len(e)) - np.maximum.accumulate(np.where(thread, np.arange(len(e)), 0))
    return e[np.argsort(when)]


def share(part: float) -> str:
    """A share in percent, with a decimal where there is one: 12.5%, 100%."""
    return f"{part:.1%}".replace(".0%", "%")


def bank_ways(events, request, count) -> np.ndarray:
    """Turns that each of `count` requests takes at each of the 32 banks, in its worst part: (count, 32).

    request: the number of the request that each event belongs to."""
    first = events["offset"] // 4
    words = (events["offset"] + events["bytes"] - 1) // 4 - first + 1
    each = np.repeat(np.arange(len(events)), words)
    word = first[each] + np.arange(len(each)) - np.repeat(np.cumsum(words) - words, words)
    lane = events["thread"] % WARP
    parts = np.where(events["bytes"] <= 4, 1, np.where(events["bytes"] <= 8, 2, 4))
    alone = np.where(events["kind"] == ATOMIC, lane + 1, 0)  # atomics do not share a word
    keys = (request[each], (lane * parts // WARP)[each], word % BANKS, word, alone[each])
    order, turn = groups(*keys)
    turns = order[np.diff(turn, prepend=-1) > 0]  # one event of each turn
    order, place = groups(*(key[turns] for key in keys[:3]))
    where = turns[order[np.diff(place, prepend=-1) > 0]]
    ways = np.zeros((count, BANKS), np.int64)
    np.maximum.at(ways, (keys[0][where], keys[2][where]), np.bincount(place))
    return ways


def groups(*keys):
    """The order that sorts rows by `keys`, and the number of the group of equal rows that each sorted row is in."""
    order = np.lexsort(keys[::-1])
    return order, np.cumsum(_changes(*(key[order] for key in keys)))


def _changes(*keys):
    """Which rows differ from the row before them."""
    fresh = np.zeros(len(keys[0]), bool)
    for key in keys:
        fresh[1:] |= key[1:] != key[:-1]
    return fresh


def _covered(group, start, stop, count):
    """How many units the intervals [start, stop) of each of `count` groups cover together."""
    if not len(start):
        return np.zeros(count, np.int64)
    base = (
        group * (stop.max() - start.min() + 1) - start.min()
    )  # lays the groups out one behind the other
    start, stop = start + base, stop + base
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    before = np.concatenate(([0], np.maximum.accumulate(stop)[:-1]))
    return np.bincount(group[order], np.maximum(stop - np.maximum(start, before), 0), count).astype(
        np.int64
    )
