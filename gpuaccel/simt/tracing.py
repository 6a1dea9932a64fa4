"""What a trace says: which thread accesses which element, in how many requests, sectors and turns.

    trace = gpuaccel.simt.trace(saxpy[3, 8], y, 2.0, x, 21)      # each access, in order
    trace.requests()["sectors"]                                   # a row per request of a warp
    for use in trace.summary():                                   # a row per line and tensor
        print(use)
    # line 4, x read: 21 (0 to 1 per thread), 1.0 sectors per request, 87.5% of their bytes used

How requests are counted. The threads of a warp that reach one place in the code for the n-th time
make one request together.

Global memory serves a request in sectors of 32 bytes. They are counted from the first byte of the
memory that a tensor or its base was given, which torch aligns to more than that.

Shared memory has 32 banks. Each serves one 4-byte word at a time, and all threads that read the
same word share it. A request therefore takes as many turns as the busiest bank has different words
to serve. Atomic operations do not share a word: each takes a turn. A request of 8 bytes per thread
is served in two halves of the warp, one of 16 bytes in four quarters. Each part is counted by
itself, so that 1 always means no bank conflict.
"""

from dataclasses import dataclass, field, replace

import numpy as np

# threads of a warp
WARP = 32
# banks of shared memory, 4 bytes wide
BANKS = 32
# bytes of a sector
SECTOR = 32
READ, WRITE, ATOMIC = 0, 1, 2
KINDS = ("read", "write", "atomic")
EVENT = np.dtype(
    [
        # of the kernel's source, from 1
        ("line", "i4"),
        ("block", "i8"),
        # linear in the block; the warp is thread // 32
        ("thread", "i4"),
        # index into Trace.tensors
        ("tensor", "i2"),
        # bytes from the tensor's first one
        ("offset", "i8"),
        ("bytes", "i2"),
        # READ, WRITE or ATOMIC
        ("kind", "u1"),
        # how often this thread has been at this place in the code (pc) before
        ("visit", "i4"),
        ("pc", "i4"),
        # how many accesses this thread has made before
        ("step", "i4"),
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
        # threads that take part
        ("threads", "i4"),
        # bytes that the threads access, summed, and without repetitions
        ("requested", "i8"),
        ("used", "i8"),
        # global memory: 32-byte sectors; else 0
        ("sectors", "i4"),
        # shared memory: turns, 1 without a bank conflict, up to 32; else 0
        ("bank_turns", "i4"),
    ]
)


@dataclass
class Traced:
    """A tensor, or an array in shared memory, of a trace.

    Attributes:
        name: of the parameter, or of the array.
        elements: how many there are.
        itemsize: bytes of one.
        dtype: in words.
        space: "global" or "shared".
        lead: bytes from the beginning of a sector to the first one: 4 for x[1:] in fp32.
    """

    name: str
    elements: int
    itemsize: int
    dtype: str
    space: str
    lead: int = 0


@dataclass(frozen=True, repr=False)
class Use:
    """What one source line does to one tensor, over the whole launch.

    Attributes:
        line: of the source, from 1.
        tensor: its name.
        space: "global" or "shared".
        kind: "read", "write" or "atomic".
        count: accesses of all threads.
        least, most: fewest and most accesses of one thread.
        requests: of whole warps.
        sectors: global memory: sectors per request.
        needed: global memory: sectors per request if the same bytes were contiguous.
        used: global memory: share of the sectors' bytes that a thread accesses.
        bank_turns: shared memory: turns of the worst request, 1 without a bank conflict.
    """

    line: int
    tensor: str
    space: str
    kind: str
    count: int
    least: int
    most: int
    requests: int
    sectors: float | None
    needed: float | None
    used: float | None
    bank_turns: int | None

    @property
    def per_thread(self) -> str:
        return f"{self.most}" if self.least == self.most else f"{self.least} to {self.most}"

    def __str__(self):
        if self.space == "global":
            sectors, needed = f"{self.sectors:.1f}", f"{self.needed:.1f}"
            best = f" (at best {needed})" if needed != sectors else ""
            used = share(self.used)
            cost = f"{sectors} sectors per request{best}, {used} of their bytes used"
        elif self.bank_turns > 1:
            cost = f"{self.bank_turns}-way bank conflict"
        else:
            cost = "no bank conflict"
        accesses = f"{self.count:,} ({self.per_thread} per thread)"
        return f"line {self.line}, {self.tensor} {self.kind}: {accesses}, {cost}"

    __repr__ = __str__


@dataclass
class Trace:
    """The accesses of one launch, as `gpuaccel.simt.trace` records them.

    Attributes:
        kernel: its name.
        grid: three sizes.
        block: three sizes.
        tensors: those that it can access.
        events: of dtype EVENT, in the order in which they happened.
        source: the kernel's file as its author wrote it.
        filename: of that file.
        truncated: whether there were more accesses than are kept.
        reports: mistakes.
        notes: what is no mistake but worth knowing.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    tensors: list[Traced]
    events: np.ndarray
    source: str = ""
    filename: str = ""
    truncated: bool = False
    reports: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    def __post_init__(self):
        self.events = as_written(self.events)
        self.tensors = [self._with_elements(i, traced) for i, traced in enumerate(self.tensors)]

    def _with_elements(self, i, traced):
        """Give memory without a type (dynamic shared memory) elements that fit its accesses."""
        size = traced.elements * traced.itemsize
        accesses = self.events[self.events["tensor"] == i]
        if traced.dtype != "byte" or len(accesses) == 0:
            return traced
        itemsize = int(
            np.gcd.reduce([*np.unique(accesses["bytes"]), *np.unique(accesses["offset"]), size])
        )
        if itemsize < 2:
            return traced
        dtype = f"{itemsize}-byte"
        return replace(traced, elements=size // itemsize, itemsize=itemsize, dtype=dtype)

    @property
    def blocks(self) -> int:
        return int(np.prod(self.grid, dtype=np.int64))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return int(np.prod(self.block, dtype=np.int64))

    def known(self) -> np.ndarray:
        """The events whose tensor is known."""
        tensor = self.events["tensor"]
        return self.events[(tensor >= 0) & (tensor < len(self.tensors))]

    def outside(self, events) -> np.ndarray:
        """Mask of the events that are not entirely inside their tensor."""
        sizes = [t.elements * t.itemsize for t in self.tensors] or [0]
        end = np.array(sizes, np.int64)[events["tensor"]]
        return (events["offset"] < 0) | (events["offset"] + events["bytes"] > end)

    def requests(self, events=None) -> np.ndarray:
        """One row of dtype REQUEST per request and tensor, in the order of their first events."""
        events = self.known() if events is None else events
        warp = events["thread"] // WARP
        order, group = groups(
            events["pc"], events["block"], warp, events["visit"], events["tensor"], events["kind"]
        )
        first = np.full(group[-1] + 1 if len(group) else 0, len(events))
        np.minimum.at(first, group, order)
        rank = np.argsort(np.argsort(first))
        # the row of each event
        row = np.empty(len(events), np.int64)
        row[order] = rank[group]
        first = np.sort(first)
        rows = np.zeros(len(first), REQUEST)
        for name in ("line", "pc", "block", "visit", "tensor", "kind"):
            rows[name] = events[name][first]
        rows["warp"] = warp[first]
        start = events["offset"]
        stop = start + events["bytes"]
        rows["threads"] = np.bincount(row, minlength=len(rows))
        rows["requested"] = np.bincount(row, events["bytes"], len(rows))
        rows["used"] = _covered(row, start, stop, len(rows))
        is_shared = np.array([t.space == "shared" for t in self.tensors] or [False])
        lead = self._leads()[events["tensor"]]
        first_sector, end = (start + lead) // SECTOR, -(-(stop + lead) // SECTOR)
        sectors = _covered(row, first_sector, end, len(rows))
        rows["sectors"] = np.where(is_shared[rows["tensor"]], 0, sectors)
        in_shared = is_shared[events["tensor"]]
        bank_turns = turns_per_bank(events[in_shared], row[in_shared], len(rows))
        rows["bank_turns"] = bank_turns.max(axis=1, initial=0)
        return rows

    def _leads(self) -> np.ndarray:
        return np.array([t.lead for t in self.tensors] or [0], np.int64)

    def sectors_of(self, events) -> tuple[np.ndarray, np.ndarray]:
        """For every sector that an event touches: the event's index, and the sector.

        Args:
            events: of known tensors. Sector 0 holds a tensor's first byte.
        """
        offset = events["offset"] + self._leads()[events["tensor"]]
        first = offset // SECTOR
        counts = (offset + events["bytes"] - 1) // SECTOR - first + 1
        event = np.repeat(np.arange(len(events)), counts)
        position = np.arange(len(event)) - np.repeat(np.cumsum(counts) - counts, counts)
        return event, first[event] + position

    def summary(self) -> list[Use]:
        """One row per source line, tensor and kind of access, by line and then by kind."""
        events = self.known()
        requests = self.requests()
        thread = events["block"] * self.threads + events["thread"]
        columns = (requests[name].tolist() for name in ("line", "tensor", "kind"))
        uses = []
        for key in dict.fromkeys(zip(*columns)):
            line, tensor, kind = key
            mine = _equal(requests, key)
            traced = self.tensors[tensor]
            counts = np.unique(thread[_equal(events, key)], return_counts=True)[1]
            rows = requests[mine]
            sectors = needed = used = bank_turns = None
            if traced.space == "shared":
                bank_turns = int(rows["bank_turns"].max())
            else:
                total = int(rows["sectors"].sum())
                sectors = total / len(rows)
                needed = float((-(-rows["used"] // SECTOR)).mean())
                used = int(rows["used"].sum()) / (total * SECTOR)
            all_take_part = len(counts) == self.blocks * self.threads
            uses.append(
                Use(
                    line,
                    traced.name,
                    traced.space,
                    KINDS[kind],
                    count=int(counts.sum()),
                    least=int(counts.min()) if all_take_part else 0,
                    most=int(counts.max()),
                    requests=len(rows),
                    sectors=sectors,
                    needed=needed,
                    used=used,
                    bank_turns=bank_turns,
                )
            )
        return sorted(uses, key=lambda use: (use.line, KINDS.index(use.kind)))


def _equal(rows, key):
    """Mask of the rows with this line, tensor and kind."""
    line, tensor, kind = key
    return (rows["line"] == line) & (rows["tensor"] == tensor) & (rows["kind"] == kind)


def as_written(events) -> np.ndarray:
    """The events, with the read of a copy before its write.

    The compiler names them the other way round where a struct such as float4 is copied.
    """
    if not (events["bytes"] >= 8).any():
        return events
    # Thread by thread.
    when = np.lexsort((events["step"], events["thread"], events["block"]))
    e = events[when]
    equal = [e[k][1:] == e[k][:-1] for k in ("block", "thread", "line", "bytes")]
    is_swapped = np.logical_and.reduce(equal) & (e["bytes"][1:] >= 8)
    is_swapped &= (e["kind"][:-1] == WRITE) & (e["kind"][1:] == READ)
    first = np.flatnonzero(is_swapped)
    steps = e["step"].copy()
    e[first], e[first + 1] = e[first + 1], e[first]
    e["step"] = steps
    return e[np.argsort(when)]


def share(part: float) -> str:
    """A share in percent, with a decimal where there is one: 12.5%, 100%.

    Args:
        part: from 0 to 1.
    """
    return f"{part:.1%}".replace(".0%", "%")


def turns_per_bank(events, request, count) -> np.ndarray:
    """Turns of each of `count` requests at each of the 32 banks, in its worst part: (count, 32).

    Args:
        events: those in shared memory.
        request: the number of the request of each event.
        count: number of requests.
    """
    first = events["offset"] // 4
    words = (events["offset"] + events["bytes"] - 1) // 4 - first + 1
    # one row per word that an event accesses, and the number of that event
    event = np.repeat(np.arange(len(events)), words)
    word = first[event] + np.arange(len(event)) - np.repeat(np.cumsum(words) - words, words)
    lane = events["thread"] % WARP
    parts = np.where(events["bytes"] <= 4, 1, np.where(events["bytes"] <= 8, 2, 4))
    # Atomics do not share a word.
    alone = np.where(events["kind"] == ATOMIC, lane + 1, 0)
    request = request[event]
    part = (lane * parts // WARP)[event]
    bank = word % BANKS
    order, turn = groups(request, part, bank, word, alone[event])
    # one row of each turn
    first_of_turn = order[np.diff(turn, prepend=-1) > 0]
    order, place = groups(request[first_of_turn], part[first_of_turn], bank[first_of_turn])
    # one row of each bank in each part, and the number of turns there
    rows = first_of_turn[order[np.diff(place, prepend=-1) > 0]]
    turns = np.zeros((count, BANKS), np.int64)
    np.maximum.at(turns, (request[rows], bank[rows]), np.bincount(place))
    return turns


def groups(*keys):
    """The order that sorts rows by `keys`, and the number of each sorted row's group of equals.

    Args:
        *keys: arrays of one length.
    """
    order = np.lexsort(keys[::-1])
    return order, np.cumsum(_changes(*(key[order] for key in keys)))


def _changes(*keys):
    """Mask of the rows that differ from the row before them."""
    result = np.zeros(len(keys[0]), bool)
    for key in keys:
        result[1:] |= key[1:] != key[:-1]
    return result


def _covered(group, start, stop, count):
    """The size of the union of the intervals [start, stop) of each of `count` groups."""
    if not len(start):
        return np.zeros(count, np.int64)
    # Shift the groups, so that they follow each other without overlap.
    base = group * (stop.max() - start.min() + 1) - start.min()
    start = start + base
    stop = stop + base
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    before = np.concatenate(([0], np.maximum.accumulate(stop)[:-1]))
    sizes = np.maximum(stop - np.maximum(start, before), 0)
    return np.bincount(group[order], sizes, count).astype(np.int64)
