"""A launch with the checks on: every access of every thread is looked at before it happens.

The tensors are copied into memory of our own, each with empty zones around it, so that a stray access is seen, named, and hits
nothing. When all went well they are copied back; when not, nothing has changed, and KernelError says what, who and where.
A *trace* is such a launch that also keeps each access, and copies nothing back.
"""

import ctypes
import mmap
import warnings

import numpy
import torch

from ..errors import ArgumentError
from .driver import FAULTS, fault_report, launch, symbols
from .reports import Report, coordinates, error, thread_words
from .tracing import EVENT, Trace, Traced, groups

ZONE = 1 << 16  # bytes around each tensor that are still called by its name
EVENTS = 1 << 20  # accesses that a trace keeps
KINDS = (
    "out of bounds",
    "misaligned",
    "uninitialised",
    "race",
    "divergent barrier",
    "shuffle",
    "null",
    "far",
    "division by zero",
    "shift",
    "const",
    "out of bounds",
)
VERBS = ("reads", "writes", "updates atomically")
PAST = ("read", "written", "updated atomically")


class Region(ctypes.Structure):
    _fields_ = [
        ("lo", ctypes.c_uint64),
        ("hi", ctypes.c_uint64),
        ("zone", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("granule", ctypes.c_uint32),
        ("readonly", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("cells", ctypes.c_uint64),
    ]


class CReport(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("access", ctypes.c_int32),
        ("pc", ctypes.c_uint32),
        ("other_pc", ctypes.c_uint32),
        ("thread", ctypes.c_uint64),
        ("other_thread", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("region", ctypes.c_int32),
        ("other_access", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("file", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("line", ctypes.c_uint32),
        ("mask", ctypes.c_uint32),
        ("value", ctypes.c_int64),
    ]


class Checks(ctypes.Structure):
    _fields_ = [
        ("region", ctypes.POINTER(Region)),
        ("regions", ctypes.c_int32),
        ("reports", ctypes.c_int32),
        ("base", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("shared_lo", ctypes.c_uint64),
        ("shared_hi", ctypes.c_uint64),
        ("published", ctypes.c_uint64),
        ("event", ctypes.c_uint64),
        ("events", ctypes.c_uint64),
        ("event_room", ctypes.c_uint64),
        ("events_lost", ctypes.c_uint64),
        ("report", CReport * 256),
    ]


C_EVENT = numpy.dtype(
    [
        ("pc", "u4"),
        ("block", "u4"),
        ("thread", "u2"),
        ("region", "u2"),
        ("kind", "u1"),
        ("bytes", "u1"),
        ("unused", "u2"),
        ("offset", "i8"),
    ]
)
CELL, GLOBAL, SHARED, VARIABLE = 48, 0, 1, 2


class Memory:
    """Fresh pages, zero, with their address. They go when this goes."""

    def __init__(self, size: int):
        self.map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class Named:
    """Something that a kernel may touch: [lo, hi) at its own address, `shift` bytes away from where the kernel finds it."""

    def __init__(self, name, lo, hi, itemsize, dtype, kind=GLOBAL, readonly=False):
        self.name, self.lo, self.hi, self.itemsize, self.dtype = name, lo, hi, itemsize, dtype
        self.kind, self.readonly, self.shift = kind, readonly, 0


class Session:
    """The memory of one checked launch."""

    def __init__(self, program, shape, params, args, extra, trace: bool):
        self.shape, self.table = shape, symbols(program)
        self.kept = [
            Named(
                p.name,
                a.data_ptr(),
                a.data_ptr() + a.numel() * a.element_size(),
                a.element_size(),
                str(a.dtype)[6:],
                readonly="const" in p.ctype.split("*")[0].split(),
            )
            for p, a in zip(params, args)
            if isinstance(a, torch.Tensor)
        ]
        for i, tensor in enumerate(extra):
            if tensor is None:
                continue
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.device.type != "cpu"
                or tensor.layout != torch.strided
            ):
                raise ArgumentError(
                    f"tensors[{i}] is {type(tensor).__name__}; expected a dense tensor on the CPU"
                )
            if not tensor.is_contiguous():
                raise ArgumentError(
                    f"tensors[{i}] has shape {tuple(tensor.shape)} with strides {tensor.stride()}; expected a contiguous one"
                )
            start, size = tensor.data_ptr(), tensor.element_size()
            self.kept.append(
                Named(
                    f"tensors[{i}]",
                    start,
                    start + tensor.numel() * size,
                    size,
                    str(tensor.dtype)[6:],
                )
            )
        self.empty = {
            id(a): n
            for n, a in zip(self.kept, [a for a in args if isinstance(a, torch.Tensor)])
            if not n.lo
        }
        self.slots = []  # ranges of addresses that overlap share one copy
        for named in sorted(self.kept, key=lambda n: (n.lo, n.hi)):
            if self.slots and named.lo < self.slots[-1][1]:
                self.slots[-1] = (
                    self.slots[-1][0],
                    max(self.slots[-1][1], named.hi),
                    [*self.slots[-1][2], named],
                )
            else:
                self.slots.append((named.lo, named.hi, [named]))
        dynamic = shape[6]
        room = sum(hi - lo + 2 * ZONE + 512 for lo, hi, _ in self.slots) + dynamic + 2 * ZONE + 512
        self.memory = Memory(room)
        at, rows = self.memory.address + ZONE, []
        for lo, hi, members in self.slots:
            at += (lo - at) % 256  # aligned as the original is
            for named in members:
                named.shift = at - lo
            ctypes.memmove(at, lo, hi - lo)
            rows.append(
                (
                    at,
                    at + hi - lo,
                    ZONE,
                    GLOBAL,
                    min(4, *(n.itemsize for n in members)),
                    all(n.readonly for n in members),
                    members,
                )
            )
            at += hi - lo + 2 * ZONE
        at += -at % 256
        self.dynamic = at
        rows.append(
            (
                at,
                at + dynamic,
                ZONE,
                SHARED,
                1,
                False,
                [Named("dynamic shared memory", at, at + dynamic, 1, "", SHARED)],
            )
        )
        base = self.table.base
        for start, size, name, shared in self.table.variables:
            lo, kind = base + start, SHARED if shared else VARIABLE
            itemsize, dtype = self.table.types.get(start, (1, ""))
            rows.append(
                (
                    lo,
                    lo + size,
                    0,
                    kind,
                    1,
                    False,
                    [Named(name, lo, lo + size, itemsize, dtype, kind)],
                )
            )
        rows.sort(key=lambda row: row[0])
        cells = [-(-(row[1] - row[0]) // row[4]) * CELL for row in rows]
        threads = shape[0] * shape[1] * shape[2] * shape[3] * shape[4] * shape[5]
        if threads >= 2**32:
            raise ArgumentError(
                f"{threads:,} threads are too many to check; expected fewer than 2^32 (ga.checked(False) checks nothing)"
            )
        self.cells, self.published = Memory(sum(cells)), Memory(4 * threads)
        self.regions, self.members, cell = (
            (Region * len(rows))(),
            [row[6] for row in rows],
            self.cells.address,
        )
        for region, row, size in zip(self.regions, rows, cells):
            region.lo, region.hi, region.zone, region.kind, region.granule, region.readonly = row[
                :6
            ]
            region.cells, cell = cell, cell + size
        shared_lo, shared_hi = self.table.shared
        self.checks = Checks(
            self.regions,
            len(rows),
            0,
            base,
            base + self.table.size,
            base + shared_lo,
            base + shared_hi,
            self.published.address,
        )
        if trace:
            self.events = numpy.zeros(EVENTS, C_EVENT)
            self.checks.event, self.checks.event_room = self.events.ctypes.data, EVENTS

    def moved(self, address: int) -> int:
        """Where the kernel finds what lies at an address; the address itself when it belongs to no tensor."""
        for named in self.kept:
            if named.lo <= address < named.hi or address == named.lo:
                return address + named.shift
        return address

    def moved_words(self, words: bytes) -> bytes:
        """A struct, or a table of pointers, with the addresses of known tensors in their new places."""
        whole = len(words) // 8 * 8
        values = numpy.frombuffer(words[:whole], "u8").copy()
        moved = values.copy()
        for ends in (1, 0):  # also the address just behind a tensor, where no other begins
            for named in filter(lambda n: n.lo, self.kept):  # an empty tensor has no address
                inside = (values >= named.lo) & (values < named.hi + ends)
                moved[inside] = values[inside] + numpy.uint64(named.shift % 2**64)
        return moved.tobytes() + words[whole:]

    def argument(self, param, arg, value):
        """What is packed for an argument: a pointer's new place, a struct with new addresses, a number as it is."""
        if (
            id(arg) in self.empty
        ):  # it has no address, but a place beside which stray accesses are seen
            return self.empty[id(arg)].shift
        if param.pointer:
            return self.moved(value) if value else 0
        return value if param.code else self.moved_words(bytes(value))

    def move_tables(self, params, args):
        """Tables of pointers (T**): the copies get the new addresses."""
        for param, arg in zip(params, args):
            if param.ctype.count("*") > 1 and isinstance(arg, torch.Tensor):
                at, size = self.moved(arg.data_ptr()), arg.numel() * 8
                ctypes.memmove(at, self.moved_words(ctypes.string_at(at, size)), size)

    def copy_back(self, params, args, constant: bool):
        """What the kernel made of the tensors. constant: also those that it only has pointers to const to."""
        tables = {
            a.data_ptr()
            for p, a in zip(params, args)
            if p.ctype.count("*") > 1 and isinstance(a, torch.Tensor)
        }
        for lo, hi, members in self.slots:
            if (constant or not all(n.readonly for n in members)) and lo not in tables:
                ctypes.memmove(lo, lo + members[0].shift, hi - lo)

    # ---- reports ----

    def _who(self, number):
        threads = self.shape[3] * self.shape[4] * self.shape[5]
        return coordinates(number % threads, self.shape[3:6]), coordinates(
            number // threads, self.shape[:3]
        )

    def _words(self, number):
        return thread_words(*self._who(number), self.shape[3:6], self.shape[:3])

    def _element(self, index, address, size):
        """(name, element, "x[3]", "x has 3 elements of float32") of an address in or near a region."""
        members = self.members[index]
        named = min(
            members,
            key=lambda n: (
                0
                if n.lo + n.shift <= address < n.hi + n.shift
                else min(abs(address - n.lo - n.shift), abs(address - n.hi - n.shift)) + 1
            ),
        )
        itemsize = (
            named.itemsize if named.dtype else size if 0 < size <= 16 else 1
        )  # dynamic shared memory has no type of its own
        element = (address - named.lo - named.shift) // itemsize
        count = (named.hi - named.lo) // itemsize
        if not named.dtype:
            return (
                named.name,
                element,
                f"element {element} of {named.name}",
                f"it has {count:,} elements of {itemsize} bytes",
            )
        what = "__shared__ " if named.kind == SHARED else ""
        place = f"{named.name}[{element}]" if count != 1 or element else named.name
        return (
            named.name,
            element,
            what + place,
            f"{named.name} has {count:,} elements of {named.dtype}",
        )

    def reports(self) -> "tuple[list[Report], list[Report]]":
        """(what is wrong, notes), one for each kind and line."""
        found, notes = {}, []
        for raw in self.checks.report[: self.checks.reports]:
            report = self._report(raw)
            if report is None:
                continue
            if report.kind == "const":
                notes.append(report)
                continue
            key = (report.kind, report.file, report.line)
            first = found.get(key)
            found[key] = (
                report
                if first is None
                else Report(**{**first.__dict__, "count": first.count + report.count})
            )
        return list(found.values()), notes

    def _report(self, raw) -> "Report | None":
        kind = KINDS[raw.kind]
        file, line = (raw.file.decode(), raw.line) if raw.file else self.table.locate(raw.pc - 1)
        who = self._words(raw.thread)
        other = {}
        tensor = element = None
        place = "memory"
        if raw.region >= 0 and raw.address:
            end, address = self.regions[raw.region].hi, raw.address
            if kind == "out of bounds" and address < end < address + raw.size:
                address = end  # the first element outside
            tensor, element, place, size = self._element(raw.region, address, raw.size)
        if kind == "out of bounds" and raw.region >= 0:
            message = f"{who} {VERBS[raw.access]} {place}: {size}"
        elif kind == "out of bounds":
            kind_of = (raw.type or b"").decode().strip("'").replace(" [", "[")
            message = (
                f"{who} uses element {raw.value} of an array of type {kind_of}"
                if kind_of
                else f"{who} goes beyond the end of a shared or local array"
            )
            element = raw.value
        elif kind == "misaligned":
            message = f"{who} {VERBS[raw.access]} {raw.value} bytes at {place}, which is at no multiple of {raw.value} bytes"
        elif kind == "uninitialised":
            message = f"{who} reads {place} before any thread of its block has written it"
        elif kind == "race":
            _, other_line = self.table.locate(raw.other_pc - 1)
            was = f"{self._words(raw.other_thread)} {'had' if raw.other_access == 0 else 'has'} {PAST[raw.other_access]}"
            same = self._who(raw.thread)[1] == self._who(raw.other_thread)[1]
            message = (
                f"race: {who} {VERBS[raw.access]} {place}, which {was} at line {other_line}, "
                + (
                    "with no barrier between"
                    if same
                    else "and nothing puts the two blocks in order"
                )
            )
            if line == other_line and raw.access == raw.other_access == 1:
                message += " (if all write the same value, atomicExch says so)"
            other = dict(other_line=other_line)
        elif kind == "divergent barrier":
            _, other_line = self.table.locate(raw.other_pc - 1)
            if other_line == line:
                return None  # one barrier that the compiler made two of
            message = f"{who} waits at the barrier of line {line}, {self._words(raw.other_thread)} at the one of line {other_line}"
            other = dict(other_line=other_line)
        elif kind == "shuffle":
            threads = self.shape[3] * self.shape[4] * self.shape[5]
            read = (
                raw.other_thread - raw.thread + raw.thread % threads
            )  # its number in the block, if it has one
            other = {"other_line": None} if read < threads else {}
            message = (
                f"{who} reads lane {raw.value}, "
                + (
                    f"{self._words(raw.other_thread)}, which takes no part"
                    if other
                    else "for which the block has no thread"
                )
                + f" (mask {raw.mask:#010x})"
            )
        elif kind == "null":
            message = f"{who} {VERBS[raw.access]} through a null pointer" + (
                f" (address {raw.address})" if raw.address else ""
            )
        elif kind == "far":
            message = (
                f"{who} {VERBS[raw.access]} address {raw.address:#x}, which is in no tensor it was given; tensors whose addresses "
                "stand in a struct or a table are named with kernel[grid, block](..., tensors=[...])"
            )
        elif kind == "division by zero":
            message = f"{who} divides " + (
                "an integer by zero"
                if raw.value == 0
                else "the smallest integer by -1: it has no result"
            )
        elif kind == "shift":
            message = f"{who} shifts by {raw.value}, which its type does not allow"
        else:
            message = f"{who} writes {place} through a pointer to const"
        if other:
            other["other_thread"], other["other_block"] = self._who(raw.other_thread)
        thread, block = self._who(raw.thread)
        return Report(
            kind,
            line,
            file,
            thread,
            block,
            message,
            tensor=tensor,
            element=element,
            count=raw.count,
            **other,
        )


def _run(
    program, name, shape, params, args, values, extra, pack, trace
) -> "tuple[Session, list[Report], list[Report]]":
    session = Session(program, shape, params, args, extra, trace)
    moved = [session.argument(*one) for one in zip(params, args, values)]
    session.move_tables(params, args)
    fault = launch(
        program, name, shape, pack(moved), checks=session.checks, dynamic=session.dynamic
    )
    found, notes = session.reports()
    if fault is not None and (
        FAULTS[fault.kind] != "check" or not found
    ):  # a check that stops a launch has reported
        last = fault_report(program, fault, shape)
        if last.kind == "time limit" or all(
            (last.file, last.line) != (r.file, r.line) for r in found
        ):  # else its cause is reported
            found.append(last)
    return session, found, notes


def run(program, name: str, shape, params, args, values, extra, pack):
    """A checked launch. params, args, values: the kernel's parameters, what the caller gave, what is packed; extra: tensors whose
    addresses stand in a struct or a table; pack: values -> address for the executor. Raises KernelError; nothing is changed then."""
    session, found, notes = _run(program, name, shape, params, args, values, extra, pack, False)
    for note in notes:
        warnings.warn(f"{name}: {note.file}, line {note.line}: {note.message}", stacklevel=4)
    if found:
        raise error(program, name, found, checked=True)
    session.copy_back(params, args, bool(notes))


def record(
    program, name: str, shape, params, args, values, extra, pack, source: str, filename: str
) -> Trace:
    """The same launch, with each access kept and nothing copied back."""
    session, found, _ = _run(program, name, shape, params, args, values, extra, pack, True)
    raw = session.events[: session.checks.events]
    used = sorted(
        {int(i) for i in numpy.unique(raw["region"])}
        | {i for i, m in enumerate(session.members) if m[0].kind == GLOBAL}
    )
    tensors = [
        Traced(
            n.name,
            (n.hi - n.lo) // n.itemsize,
            n.itemsize,
            n.dtype or "byte",
            "shared" if n.kind == SHARED else "global",
        )
        for n in (session.members[i][0] for i in used)
    ]
    index = numpy.zeros(len(session.members), "i2")
    index[used] = range(len(used))
    events = numpy.zeros(len(raw), EVENT)
    places, inverse = numpy.unique(raw["pc"], return_inverse=True)
    lines = numpy.array([session.table.locate(int(pc) - 1)[1] or 0 for pc in places], "i4")
    threads = shape[3] * shape[4] * shape[5]
    number = raw["block"].astype("i8") * threads + raw["thread"]
    for field, value in (
        ("line", lines[inverse] if len(places) else 0),
        ("block", raw["block"]),
        ("thread", raw["thread"]),
        ("tensor", index[raw["region"]]),
        ("offset", raw["offset"]),
        ("bytes", raw["bytes"]),
        ("kind", raw["kind"]),
        ("pc", inverse),
        ("visit", _nth(number, inverse)),
        ("step", _nth(number)),
    ):
        events[field] = value
    return Trace(
        kernel=name,
        grid=tuple(shape[:3]),
        block=tuple(shape[3:6]),
        tensors=tensors,
        events=events,
        source=source,
        filename=filename,
        truncated=bool(session.checks.events_lost),
        reports=found,
    )


def _nth(*keys):
    """For each row: how many earlier rows have the same keys."""
    order, group = groups(*keys)
    first = numpy.flatnonzero(numpy.diff(group, prepend=-1))
    result = numpy.empty(len(order), "i4")
    result[order] = numpy.arange(len(order)) - first[group]
    return result
