"""A launch with the checks on: every access of every thread is checked before it happens.

The tensors are copied into memory of our own, each with unused zones around it. An access outside
a tensor is thereby seen, named, and damages nothing. After a correct launch the copies are copied
back. After a wrong one no tensor has changed, and KernelError says which thread did what at which
line.

A *trace* is such a launch that also records each access, and copies nothing back.
"""

import contextlib
import ctypes
import math
import mmap
import re
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
import torch

from ..errors import ArgumentError
from .build import OVERFLOWS, ZEROED, Program, compiler, fill_pattern, text_line
from .build import program as built
from .driver import FAULTS, fault_report, launch, members, symbols
from .reports import Report, coordinates, error, thread_words
from .tracing import EVENT, SECTOR, Trace, Traced, groups

# Bytes around each tensor in which an access does no damage, so that the launch continues.
ZONE = 1 << 16
# Addresses before and after a tensor that are reserved for it: all that a 32-bit index, signed or
# not, can reach in elements of 16 bytes. So each such access is reported for this tensor, and hits
# no other. All tensors together get MOST_ADDRESSES. Where the system has fewer, each has its zones.
BELOW, ABOVE = 1 << 35, 1 << 36
MOST_ADDRESSES = 1 << 45
# Accesses that a trace keeps.
EVENTS = 1 << 20
# In the order of simt_report_kind in checks.cpp.
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
    "same value",
    "uninitialised",
    "harmless",
    "local of another thread",
    "out of bounds",
    "cast",
    "overflow",
    "benign race",
)
RACE, UNSET_LOCAL, NO_LOCAL, OVERFLOW, BENIGN_RACE = 3, 13, 16, 18, 19
# Kinds that are shown, but let the launch succeed.
NOTES = ("const", "same value", "cast", "benign race")
# VALUE_KNOWN in checks.cpp: a racing write wrote the same value each time.
VALUE_KNOWN = 1
READ, WRITE, ATOMIC = 0, 1, 2
DYNAMIC = "dynamic shared memory"
# By the access: read, write, atomic.
VERBS = ("reads", "writes", "atomically updates")
PAST = ("read", "wrote", "atomically updated")


class Region(ctypes.Structure):
    _fields_ = members(
        "u64 lo hi zone below above, u32 kind granule readonly element, u64 cells, str padding, "
        "u64 before after earlier"
    )


class CReport(ctypes.Structure):
    _fields_ = [
        *members("i32 kind access, u32 pc other_pc, u64 thread other_thread address size"),
        *members("i32 region other_access, u64 count, str file type, u32 line mask, i64 value"),
        *members("u32 column callers"),
        ("caller", ctypes.c_uint32 * 6),
    ]


class CRacePair(ctypes.Structure):
    _fields_ = members("u32 read write tested")


class CBarrierUse(ctypes.Structure):
    _fields_ = members("u32 pc needed, u64 ended")


class Checks(ctypes.Structure):
    _fields_ = [
        ("region", ctypes.POINTER(Region)),
        *members("i32 regions reports, u64 base end shared_lo shared_hi published"),
        *members("u64 event events event_room events_lost, u32 flip pattern barriers pairs"),
        ("pair", CRacePair * 32),
        ("barrier", CBarrierUse * 64),
        ("report", CReport * 256),
    ]


C_EVENT = numpy.dtype("u4, u4, u2, u2, u1, u1, u2, i8")
C_EVENT.names = "pc", "block", "thread", "region", "kind", "bytes", "unused", "offset"
# Bytes of a struct publication in checks.cpp.
PUBLICATION = 36
# Bytes of a struct cell in checks.cpp.
CELL = 48
# simt_region_kind in checks.cpp.
GLOBAL, SHARED, VARIABLE = 0, 1, 2


# Types without smaller parts: an array of them needs one cell per word.
WORDS = ("float", "double", "int", "unsigned int", "long int", "long unsigned int")


# Of Linux; Python names it since 3.13.
MAP_NORESERVE = 0x4000


class Memory:
    """Zeroed pages and their address, as long as this object lives.

    Args:
        size: in bytes
        sparse: what is used of it lies far from each other
    """

    def __init__(self, size: int, sparse: bool = False):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.map = mmap.mmap(-1, max(size, 1), flags=flags)
        # Without huge pages, page faults take a third of a launch over large tensors. With them, a
        # tensor that is far from all others would clear a huge page of its own.
        advice = "MADV_NOHUGEPAGE" if sparse else "MADV_HUGEPAGE"
        with contextlib.suppress(AttributeError, OSError):
            self.map.madvise(getattr(mmap, advice))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


def _with_space(size: int, count: int, dynamic: int) -> tuple[Memory, int, int]:
    """Memory for `count` tensors of `size` bytes in all and `dynamic` bytes of shared memory.

    Returns it, and the addresses that are reserved below and above each tensor.
    """

    def reserved(share):
        below, above = (max(int(reach * share), ZONE) for reach in (BELOW, ABOVE))
        # Each is aligned.
        total = size + count * (below + above + 256) + dynamic + 2 * ZONE + 256
        return Memory(total, sparse=above > ZONE), below, above

    try:
        return reserved(min(1.0, MOST_ADDRESSES / (max(count, 1) * (BELOW + ABOVE))))
    except OSError:
        return reserved(0)


@dataclass(eq=False)
class Array:
    """A tensor or variable that a kernel may access: the bytes [lo, hi).

    Attributes:
        itemsize, dtype: of an element; dtype "" where the type is not known
        lead: see Traced
        addresses: its elements may be addresses of tensors
        shift: address of the copy minus address of the original
    """

    name: str
    lo: int
    hi: int
    itemsize: int
    dtype: str
    kind: int = GLOBAL
    readonly: bool = False
    lead: int = 0
    addresses: bool = False
    shift: int = 0

    @classmethod
    def of_tensor(cls, name, tensor, readonly=False, addresses=False):
        lo = tensor.data_ptr()
        size = tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        hi, lead = lo + tensor.numel() * size, tensor.storage_offset() * size % SECTOR
        return cls(name, lo, hi, size, dtype, readonly=readonly, lead=lead, addresses=addresses)

    @property
    def elements(self) -> int:
        return (self.hi - self.lo) // self.itemsize

    def distance(self, address) -> int:
        """0 for an address in the copy, else 1 more than the bytes to its nearer end."""
        lo, hi = self.lo + self.shift, self.hi + self.shift
        return 0 if lo <= address < hi else 1 + min(abs(address - lo), abs(address - hi))


@dataclass
class Slot:
    """A range of addresses that is copied as one, and the tensors in it, which may overlap."""

    lo: int
    hi: int
    arrays: list[Array]
    readonly: bool = True
    addresses: bool = False

    def add(self, array: Array):
        self.hi = max(self.hi, array.hi)
        self.arrays.append(array)
        self.readonly &= array.readonly
        self.addresses |= array.addresses


def _may_hold_addresses(param, tensor) -> bool:
    """True if elements may be addresses: structs, pointers and 64-bit integers."""
    if param is not None and param.dtypes is None:
        return True
    return tensor.dtype in (torch.int64, torch.uint64)


class Session:
    """The memory of one checked launch.

    Args:
        shape: grid, block and bytes of dynamic shared memory, seven numbers
        extra: tensors whose addresses are in a struct or a table
        trace: record each access
    """

    def __init__(self, program, shape, params, args, extra, trace: bool):
        self.shape = shape
        # Reports point into its memory.
        self.program = program
        self.table = symbols(program)
        self.text = program.text
        threads = math.prod(shape[:6])
        if threads >= 2**32:
            raise ArgumentError(
                f"{threads:,} threads are too many to check; expected fewer than 2^32 "
                "(ga.checked(False) checks nothing)"
            )
        self.arrays = []
        # id of an argument without an address -> its array
        self.empty = {}
        for param, tensor in zip(params, args):
            if not isinstance(tensor, torch.Tensor):
                continue
            readonly = "const" in param.ctype.split("*")[0].split()
            addresses = _may_hold_addresses(param, tensor)
            array = Array.of_tensor(param.name, tensor, readonly, addresses)
            self.arrays.append(array)
            if not array.lo:
                self.empty[id(tensor)] = array
        for i, tensor in enumerate(extra):
            if tensor is not None:
                addresses = _may_hold_addresses(None, tensor)
                array = Array.of_tensor(f"tensors[{i}]", tensor, addresses=addresses)
                self.arrays.append(array)
        # Whether the kernel can get an address from a struct, a table or a 64-bit number.
        self.has_addresses = any(array.addresses for array in self.arrays) or any(
            not param.pointer and param.code in (None, "q", "Q") for param in params
        )
        self.slots: list[Slot] = []
        for array in sorted(self.arrays, key=lambda a: (a.lo, a.hi)):
            if not self.slots or array.lo >= self.slots[-1].hi:
                self.slots.append(Slot(array.lo, array.hi, []))
            self.slots[-1].add(array)
        # (region, the arrays there), in the order of their addresses
        parts = [*self._copies(shape[6]), *self._variables()]
        parts.sort(key=lambda part: part[0].lo)
        self.members = [arrays for _, arrays in parts]
        self.regions = (Region * len(parts))(*(region for region, _ in parts))
        self._fill_checks(threads)
        if trace:
            self.events = numpy.zeros(EVENTS, C_EVENT)
            self.checks.event = self.events.ctypes.data
            self.checks.event_room = EVENTS

    def _copies(self, dynamic: int):
        """Copy the tensors; yield their regions, and that of `dynamic` bytes of shared memory."""
        sizes = [slot.hi - slot.lo for slot in self.slots]
        self.memory, below, above = _with_space(sum(sizes), len(sizes), dynamic)
        self.below, self.above = below, above
        address = self.memory.address
        for slot, size in zip(self.slots, sizes):
            address += below
            # Aligned as the original is.
            address += (slot.lo - address) % 256
            for array in slot.arrays:
                array.shift = address - slot.lo
            ctypes.memmove(address, slot.lo, size)
            region = Region(
                lo=address,
                hi=address + size,
                zone=ZONE,
                below=below,
                above=above,
                kind=GLOBAL,
                granule=min(4, *(array.itemsize for array in slot.arrays)),
                readonly=slot.readonly,
            )
            yield region, slot.arrays
            address += size + above
        address += ZONE
        self.dynamic = address + -address % 256
        end = self.dynamic + dynamic
        region = Region(self.dynamic, end, ZONE, kind=SHARED, below=ZONE, above=ZONE, granule=1)
        yield region, [Array(DYNAMIC, self.dynamic, end, 1, "", SHARED)]

    def _variables(self):
        """Yield the regions of the program's own variables."""
        unknown = "a variable", 1, "", None
        for offset, size, shared in self.table.variables:
            lo = self.table.base + offset
            name, itemsize, dtype, padding = self.table.types.get(offset, unknown)
            kind = SHARED if shared else VARIABLE
            region = Region(lo, lo + size, kind=kind, granule=4 if dtype in WORDS else 1)
            if shared and dtype:
                region.element = itemsize
                region.padding = padding
            yield region, [Array(name, lo, lo + size, itemsize, dtype, kind)]

    def _fill_checks(self, threads):
        sizes = [-(-(region.hi - region.lo) // region.granule) * CELL for region in self.regions]
        self.cells = Memory(sum(sizes))
        self.published = Memory(PUBLICATION * threads)
        address = self.cells.address
        for region, size in zip(self.regions, sizes):
            region.cells = address
            address += size
        base = self.table.base
        shared_lo, shared_hi = self.table.shared
        self.checks = Checks(
            region=self.regions,
            regions=len(self.regions),
            base=base,
            end=base + self.table.size,
            shared_lo=base + shared_lo,
            shared_hi=base + shared_hi,
            published=self.published.address,
            pattern=fill_pattern(compiler()),
        )

    def moved(self, address: int) -> int:
        """The address of the copy of what is at an address; the address itself if none has it."""
        for array in self.arrays:
            if array.lo <= address < array.hi or address == array.lo:
                return address + array.shift
        return address

    def moved_words(self, words: bytes) -> bytes:
        """A struct, or a table of pointers, with the addresses of tensors replaced."""
        whole = len(words) // 8 * 8
        values = numpy.frombuffer(words[:whole], "u8").copy()
        # An empty tensor has no address.
        arrays = [array for array in self.arrays if array.lo]
        first = min((array.lo for array in arrays), default=0)
        last = max((array.hi for array in arrays), default=0)
        # Compare only words in the range of addresses: few of a large tensor are.
        places = numpy.flatnonzero((values >= first) & (values <= last))
        found = values[places]
        moved = found.copy()
        # The end address of a tensor is its own, unless another tensor begins there.
        for behind in (1, 0):
            for array in arrays if len(found) else ():
                inside = (found >= array.lo) & (found < array.hi + behind)
                moved[inside] = found[inside] + numpy.uint64(array.shift % 2**64)
        values[places] = moved
        return values.tobytes() + words[whole:]

    def argument(self, param, arg, value):
        """What is packed for an argument: pointers and structs with new addresses, else `value`."""
        if id(arg) in self.empty:
            # An empty tensor has no address. Its copy has one, so that every access is outside.
            return self.empty[id(arg)].shift
        if param.pointer:
            return self.moved(value) if value else 0
        if param.code:
            return self.moved(value) if param.code in "qQ" else value
        return self.moved_words(bytes(value))

    def move_tables(self):
        """Replace the addresses of tensors in the copies of tensors."""
        for slot in self.slots:
            if slot.addresses:
                # Addresses are aligned to 8 bytes.
                skipped = -slot.lo % 8
                address = slot.lo + slot.arrays[0].shift + skipped
                size = max(slot.hi - slot.lo - skipped, 0)
                ctypes.memmove(address, self.moved_words(ctypes.string_at(address, size)), size)

    def copy_back(self, constant: bool):
        """Copy the results into the tensors. constant: also into those behind pointers to const."""
        for slot in self.slots:
            if constant or not slot.readonly:
                ctypes.memmove(slot.lo, self._content(slot), slot.hi - slot.lo)

    def results(self) -> list[bytes]:
        """The bytes of the copies of the tensors."""
        return [self._content(slot) for slot in self.slots]

    def _content(self, slot) -> bytes:
        """The bytes of a copy, with addresses of copies replaced by those of the tensors."""
        content = ctypes.string_at(slot.lo + slot.arrays[0].shift, slot.hi - slot.lo)
        if not slot.addresses:
            return content
        skipped = -slot.lo % 8
        whole = max(len(content) - skipped, 0) // 8 * 8
        values = numpy.frombuffer(content[skipped : skipped + whole], "u8").copy()
        start = self.memory.address
        places = numpy.flatnonzero((values >= start) & (values < start + len(self.memory.map)))
        found = values[places]
        for target in self.slots if len(found) else ():
            shift = target.arrays[0].shift
            lo, hi = target.lo + shift - self.below, target.hi + shift + self.above
            inside = (values[places] >= lo) & (values[places] < hi)
            found[inside] -= numpy.uint64(shift % 2**64)
        values[places] = found
        return content[:skipped] + values.tobytes() + content[skipped + whole :]

    # ---- reports ----

    @property
    def raws(self) -> list[CReport]:
        """What the checks reported."""
        return self.checks.report[: self.checks.reports]

    def _coordinates(self, number):
        """(thread, block) coordinates of a linear thread index in the grid."""
        threads = math.prod(self.shape[3:6])
        thread = coordinates(number % threads, self.shape[3:6])
        return thread, coordinates(number // threads, self.shape[:3])

    def _words(self, number):
        return thread_words(*self._coordinates(number), self.shape[3:6], self.shape[:3])

    def _element(self, index, address, size):
        """Describe an address in or near a region.

        Returns:
            (name, element, "x[3]", "x has 3 elements of float32").
        """
        array = min(self.members[index], key=lambda a: a.distance(address))
        itemsize = array.itemsize
        if not array.dtype:
            # Dynamic shared memory has no type of its own.
            itemsize = size if 0 < size <= 16 else 1
        element = (address - array.lo - array.shift) // itemsize
        count = (array.hi - array.lo) // itemsize
        if not array.dtype:
            place = f"element {element} of {array.name}"
            size_words = f"it has {_elements(count)} of {itemsize} bytes"
            if array.name == DYNAMIC:
                # Mostly the launch forgot its third argument.
                size_words += "; a launch says how many bytes it has: kernel[grid, block, bytes]"
            return array.name, element, place, size_words
        place = f"{array.name}[{element}]" if count != 1 or element else array.name
        if array.kind == SHARED:
            place = f"__shared__ {place}"
        return array.name, element, place, f"{array.name} has {_elements(count)} of {array.dtype}"

    def reports(self) -> tuple[list[Report], list[Report]]:
        """(mistakes, notes): one report for each kind and line."""
        # (kind, file, line) -> report
        mistakes: dict[tuple, Report] = {}
        notes = []
        noted: list[tuple] = []
        for raw in self.raws:
            if raw.kind == OVERFLOW:
                continue
            report = self._report(raw)
            if report is None:
                continue
            if report.kind in NOTES:
                # The two lines of a race need one note, whichever was first.
                lines = report.kind, report.file, {report.line, report.other_line}
                if lines not in noted:
                    notes.append(report)
                if report.kind == "benign race":
                    noted.append(lines)
                continue
            key = (report.kind, report.file, report.line)
            if key in mistakes:
                report = replace(mistakes[key], count=mistakes[key].count + report.count)
            mistakes[key] = report
        # A line with a race gets no note in addition.
        races = {(r.file, line) for r in mistakes.values() for line in (r.line, r.other_line)}
        notes = [n for n in notes if n.kind == "const" or (n.file, n.line) not in races]
        return list(mistakes.values()), notes

    def _report(self, raw) -> Report | None:
        """Turn a raw access record into a report, or None if the access is legal."""
        kind = KINDS[raw.kind]
        if kind == "harmless":
            return None
        file, line = self.table.locate(raw.pc - 1)
        if raw.file:
            file, line = raw.file.decode(), raw.line
        source = text_line(self.text, file or "", line or 0) or ""
        who = self._words(raw.thread)
        verb = VERBS[raw.access]
        tensor = element = None
        place = "memory"
        # The other side of a race, a divergent barrier or a shuffle.
        other_line = None
        has_other = kind in ("race", "benign race", "same value", "divergent barrier")
        if has_other:
            _, other_line = self.table.locate(raw.other_pc - 1)
        if raw.region >= 0 and raw.address:
            address = raw.address
            end = self.regions[raw.region].hi
            if kind == "out of bounds" and address < end < address + raw.size:
                # Report the first element outside, not the access's first one.
                address = end
            tensor, element, place, size = self._element(raw.region, address, raw.size)
        if kind == "out of bounds" and raw.region >= 0:
            message = f"{who} {verb} {place}: {size}{self._explained(raw)}"
        elif raw.kind == NO_LOCAL and raw.mask:
            name = _only_name(source, {array.name for array in self.arrays})
            through = f" through {name}" if name else ""
            message = f"{who} {verb} local memory beyond a local array{through}"
        elif raw.kind == NO_LOCAL:
            message = (
                f"{who} {verb} local memory that is not in use: beyond a local array, or of a "
                "function that has returned"
            )
        elif kind == "out of bounds":
            type_name = (raw.type or b"").decode().strip("'").replace(" [", "[")
            tensor, row = _indexed_name(source, raw.column)
            array = f"{tensor}{row}" if tensor else "a shared or local array"
            message = f"{who} accesses {array}, beyond its end"
            if type_name:
                element = raw.value
                message = f"{who} accesses {array}[{element}]: {array} is {type_name}"
        elif raw.kind == UNSET_LOCAL and raw.region >= 0:
            message = f"{who} writes an uninitialised local variable to {place}"
        elif raw.kind == UNSET_LOCAL:
            tensor = name = _only_name(source, {array.name for array in self.arrays})
            what = f"an element of {name}" if name else "a local variable or array"
            message = f"{who} reads {what}, which it has not set"
        elif kind in ("race", "benign race"):
            message = self._race_words(raw, who, place, other_line)
            if kind == "benign race":
                message += "; the results of this launch do not depend on which comes first"
        elif kind == "same value":
            message = (
                f"{who} writes {place}, where {self._words(raw.other_thread)} wrote the same value "
                f"at line {other_line}; no barrier orders the two writes"
            )
        elif kind == "divergent barrier":
            if other_line == line:
                # The compiler made two barriers of one.
                return None
            message = (
                f"{who} waits at the barrier of line {line}, {self._words(raw.other_thread)} at "
                f"that of line {other_line}: all threads of a block must reach the same barrier"
            )
        elif kind == "shuffle":
            threads = math.prod(self.shape[3:6])
            # Whether the lane has a thread in the block.
            has_other = raw.other_thread - raw.thread + raw.thread % threads < threads
            lane = f"lane {raw.value}, for which the block has no thread"
            if has_other:
                lane = (
                    f"lane {raw.value} ({self._words(raw.other_thread)}), which does not take part "
                    "in the shuffle"
                )
            message = f"{who} reads {lane} (mask {raw.mask:#010x})"
        elif kind == "null":
            message = f"{who} {verb} through a null pointer"
            if raw.address:
                message += f" (address {raw.address})"
        elif kind == "far":
            message = f"{who} {verb} address {raw.address:#x}, {self._far_words(raw.address)}"
        elif kind == "cast":
            (number,) = struct.unpack("d", struct.pack("q", raw.value))
            message = (
                f"{who} casts {number:g} to {(raw.type or b'').decode()}, which cannot hold it; "
                "a GPU gives another result than the CPU"
            )
        else:
            zero = "an integer by zero"
            overflows = "the smallest integer by -1, which overflows"
            words = {
                "local of another thread": f"{verb} a local variable of another thread",
                "misaligned": f"{verb} {raw.value} bytes at {place}, which is misaligned: the "
                f"address must be a multiple of {raw.value} bytes",
                "uninitialised": f"reads {place}, which no thread of its block has written",
                "division by zero": f"divides {overflows if raw.value else zero}",
                "shift": f"shifts by {raw.value} bits, which its type does not have",
                "const": f"writes {place} through a pointer to const",
            }
            message = f"{who} {words[kind]}"
        callers = self.table.callers(raw.pc - 1, raw.caller[: raw.callers], line)
        if callers:
            lines = ", which is called at line ".join(str(number) for number in callers)
            message += f" (in a function called at line {lines})"
        # What an atomic operation may drop, and a variable that is not written to a tensor.
        in_tensor = raw.region >= 0 and self.members[raw.region][0].kind == GLOBAL
        may_be_unused = raw.access == ATOMIC or (raw.kind == UNSET_LOCAL and not in_tensor)
        thread, block = self._coordinates(raw.thread)
        other_thread = other_block = None
        if has_other:
            other_thread, other_block = self._coordinates(raw.other_thread)
        return Report(
            kind,
            line,
            file,
            thread,
            block,
            message,
            other_line=other_line,
            other_thread=other_thread,
            other_block=other_block,
            tensor=tensor,
            element=element,
            count=raw.count,
            callers=callers,
            needs_effect=kind == "shuffle" or (kind == "uninitialised" and may_be_unused),
            looks_unset=raw.kind == UNSET_LOCAL,
        )

    def _may_be_benign(self, raw) -> bool:
        """True if a race is harmless as long as every order of threads gives the same results.

        Its plain read of a tensor races with an atomic operation, or with writes of one value.
        """
        if raw.region < 0 or self.members[raw.region][0].kind != GLOBAL:
            return False
        accesses = sorted((raw.access, raw.other_access))
        return accesses == [READ, ATOMIC] or (accesses == [READ, WRITE] and raw.mask == VALUE_KNOWN)

    def races(self) -> list:
        return [raw for raw in self.raws if raw.kind == RACE]

    def may_all_be_benign(self) -> bool:
        races = self.races()
        return len(races) <= len(self.checks.pair) and all(map(self._may_be_benign, races))

    def replay(self, first: "Session"):
        """Give reads that raced in the first launch the values of another thread order."""
        pairs = {
            (raw.pc, raw.other_pc) if raw.access == READ else (raw.other_pc, raw.pc)
            for raw in first.races()
        }
        for i, (read, write) in enumerate(sorted(pairs)):
            self.checks.pair[i] = CRacePair(read, write, 0)
        self.checks.pairs = len(pairs)
        # The copies lie in the same order in both.
        for region, earlier, arrays in zip(self.regions, first.regions, self.members):
            if arrays[0].kind == GLOBAL:
                region.before = arrays[0].lo
                region.after = earlier.lo
                region.earlier = earlier.cells

    def _explained(self, raw) -> str:
        """Explain an index far outside of a tensor, as far as its value tells."""
        region = self.regions[raw.region]
        # A float4* to floats counts four of them per index.
        index = (raw.address - region.lo) // max(raw.size, 1)
        if 2**31 <= index < 2**32:
            return f"; as an unsigned int, {index - 2**32} is {index}"
        return ""

    def _far_words(self, address) -> str:
        """Describe an address that is near no tensor of the launch."""
        for array in self.arrays:
            if array.lo <= address < array.hi:
                return (
                    f"which is that of {array.name}[{(address - array.lo) // array.itemsize}]; the "
                    "checks find addresses in pointers, structs and whole 64-bit numbers only; "
                    "ga.checked(False) runs the kernel without the checks"
                )
        words = "which is in no tensor and no array of this launch"
        if self.has_addresses:
            words += (
                "; tensors whose addresses are in a struct or a table are named with "
                "kernel[grid, block](..., tensors=[...])"
            )
        return words

    def is_far(self) -> bool:
        """True if an access ended the launch, as it was far from all arrays, or from its own."""
        for raw in self.raws:
            kind = KINDS[raw.kind]
            if kind == "out of bounds" and raw.region >= 0:
                region = self.regions[raw.region]
                if not region.lo - ZONE <= raw.address <= region.hi + ZONE:
                    return True
            elif kind == "far":
                return True
        return False

    def overflow_words(self, report: Report) -> str:
        """The last signed overflow of a report's thread, at the report's line if there is one."""
        found: dict[bool, str] = {}
        for raw in self.raws:
            bits = raw.size
            is_its_own = self._coordinates(raw.thread) == (report.thread, report.block)
            if raw.kind != OVERFLOW or not is_its_own or not 0 < bits <= 64:
                continue
            left, right = (
                (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
                for number in (raw.value, raw.address)
            )
            type_name = (raw.type or b"int").decode().strip("'")
            found[raw.line == report.line] = (
                f"; line {raw.line} computes {left} {chr(raw.mask)} "
                f"{f'({right})' if right < 0 else right}, which does not fit in "
                f"{'an' if type_name.startswith('i') else 'a'} {type_name}"
            )
        return found.get(True) or found.get(False) or ""

    def barrier_notes(self) -> list[Report]:
        """Notes of a trace on barriers that some threads do not reach, or that order nothing."""
        notes = []
        for use in self.checks.barrier[: self.checks.barriers]:
            file, line = self.table.locate(use.pc - 1)
            if use.ended:
                who = self._words(use.ended - 1)
                thread, block = self._coordinates(use.ended - 1)
                message = f"{who} has ended when others reach this barrier"
                notes.append(Report("ended before a barrier", line, file, thread, block, message))
            if not use.needed:
                message = "in this launch no two accesses need this barrier to be ordered"
                origin = (0, 0, 0)
                notes.append(Report("redundant barrier", line, file, origin, origin, message))
        return notes

    def _race_words(self, raw, who, place, other_line) -> str:
        same_block = self._coordinates(raw.thread)[1] == self._coordinates(raw.other_thread)[1]
        if same_block:
            missing = "no barrier orders the two accesses"
        else:
            missing = "no __threadfence() and atomic orders the two blocks"
        return (
            f"race: {who} {VERBS[raw.access]} {place}, which {self._words(raw.other_thread)} "
            f"{PAST[raw.other_access]} at line {other_line}; {missing}"
        )


def _elements(count: int) -> str:
    """ "1 element", "1,000 elements"."""
    return f"{count:,} element{'' if count == 1 else 's'}"


_INDEXED = re.compile(r"((?:\w+(?:\.|->))*\w+)\s*((?:\[[^\[\]]*\])*)\[")


def _indexed_name(source: str, column: int) -> tuple[str | None, str]:
    """(name, earlier indices) of the array that is indexed at or before a column (from 1)."""
    names = [m for m in _INDEXED.finditer(source) if m.start() < column]
    return (names[-1][1], names[-1][2]) if names else (None, "")


def _only_name(source: str, known: set[str]) -> str | None:
    """The array that a source line indexes, other than known ones; None if there are several."""
    names = {m[1] for m in _INDEXED.finditer(source)} - known
    return names.pop() if len(names) == 1 else None


class Call(NamedTuple):
    """A launch with the checks on.

    Attributes:
        params: the kernel's parameters
        args: what the caller gave for them
        values: what would be packed for them without the checks
        extra: tensors whose addresses are in a struct or a table
        pack: function of the values to pack; returns the address that the executor takes
    """

    program: Program
    name: str
    shape: tuple[int, int, int, int, int, int, int]
    params: Sequence
    args: Sequence
    values: Sequence
    extra: Sequence
    pack: Callable[[Sequence], int]


def _launch(call: Call, trace: bool):
    """Launch with the checks on. Return the session, its mistakes and its notes."""
    program = call.program
    printed: list[str] = []
    before = _variables(program)
    session, fault, mistakes, notes = _launch_once(call, trace, printed)
    after = _variables(program)

    def again(variant=(), **options):
        """Repeat the first launch, with other options or another build of the kernel."""
        build = program
        if variant:
            build = built(program.text, program.filename, program.names, True, variant)
        _set_variables(build, before)
        return _launch_once(call._replace(program=build), False, **options)

    if fault is not None and session.is_far():
        # An overflow is reported only as the cause of a wild index: hashes overflow on purpose.
        other, *_ = again(OVERFLOWS, printed=[])
        mistakes = [
            replace(report, message=report.message + other.overflow_words(report))
            if report.kind in ("out of bounds", "far")
            else report
            for report in mistakes
        ]
    if fault is None and any(report.needs_effect for report in mistakes):
        # Values of absent lanes and of unset variables matter only if they change a result. This
        # launch inverts them: with the same results they are no mistake.
        other, _, other_mistakes, _ = again(printed=[], flip=True)
        if session.results() == other.results() and _places(mistakes) == _places(other_mistakes):
            mistakes = [report for report in mistakes if not report.needs_effect]
    if fault is None and mistakes and all(report.looks_unset for report in mistakes):
        # A computed number may equal the pattern of unset variables. In this build they are 0: if
        # nothing is reported and the results are the same, it was such a number.
        other, other_fault, other_mistakes, _ = again(ZEROED, printed=[], pattern=0)
        if not other_fault and not other_mistakes and session.results() == other.results():
            mistakes = []
    if fault is None and mistakes and all(report.kind == "race" for report in mistakes):
        # This launch gives racing reads the values of another thread order. The races are benign if
        # results, output and variables stay the same, and if each pair of accesses was tested.
        if session.may_all_be_benign():
            output: list[str] = []
            other, other_fault, _, _ = again(printed=output, first=session)
            is_same = other.results() == session.results() and output == printed
            if (
                not other_fault
                and is_same
                and _variables(program) == after
                and other.may_all_be_benign()
                and all(pair.tested for pair in other.checks.pair[: other.checks.pairs])
            ):
                for raw in session.races():
                    raw.kind = BENIGN_RACE
                mistakes, notes = [], session.reports()[1]
    _set_variables(program, after)
    sys.stdout.write("".join(printed))
    return session, mistakes, notes


def _variables(program: Program) -> dict[str, bytes]:
    """What the program's variables in device memory hold. It stays between launches."""
    return {
        name: ctypes.string_at(address, len(value))
        for name, (address, value) in program.variables.items()
    }


def _set_variables(program: Program, values: dict[str, bytes]):
    for name, content in values.items():
        ctypes.memmove(program.variables[name][0], content, len(content))


def _places(mistakes):
    return {(report.kind, report.file, report.line) for report in mistakes}


def _launch_once(call: Call, trace: bool, printed, flip=False, pattern=None, first=None):
    """Launch once. Return the session, its fault or None, its mistakes and its notes.

    Args:
        printed: list to which the kernel's output is added
        flip: invert all bits of values that are read from an absent lane of a shuffle, or before
            they are set
        pattern: content of variables that are not set; None: as the program was built, 0: unknown
        first: an earlier launch; racing reads get the values of another thread order
    """
    program, name, shape, params, args, values, extra, pack = call
    session = Session(program, shape, params, args, extra, trace)
    session.checks.flip = flip
    if pattern is not None:
        session.checks.pattern = pattern
    moved = [session.argument(*argument) for argument in zip(params, args, values)]
    session.move_tables()
    if first is not None:
        session.replay(first)
    fault = launch(
        program,
        name,
        shape,
        pack(moved),
        checks=session.checks,
        dynamic=session.dynamic,
        printed=printed,
    )
    program.runtime.simt_checked(ctypes.byref(session.checks))
    mistakes, notes = session.reports()
    # A check that stopped the launch has reported its reason.
    if fault is not None and (FAULTS[fault.kind] != "check" or not mistakes):
        last = fault_report(program, fault, shape)
        # A mistake at the fault's own line is its cause.
        is_explained = any((last.file, last.line) == (r.file, r.line) for r in mistakes)
        if last.kind == "time limit" or not is_explained:
            mistakes.append(last)
    return session, fault, mistakes, notes


def run(call: Call):
    """Launch a kernel with the checks on.

    Raises:
        KernelError: and changes no tensor, when the kernel makes a mistake.
    """
    session, mistakes, notes = _launch(call, trace=False)
    for note in notes:
        warnings.warn(f"{call.name}: {note.file}, line {note.line}: {note.message}", stacklevel=4)
    if mistakes:
        raise error(call.program, call.name, mistakes, checked=True)
    session.copy_back(constant=bool(notes))


def record(call: Call, source: str, filename: str) -> Trace:
    """Launch as `run` does, record each access, and copy nothing back."""
    session, mistakes, notes = _launch(call, trace=True)
    shape = call.shape
    raw = session.events[: session.checks.events]
    accessed = {int(i) for i in numpy.unique(raw["region"])}
    tensors = {i for i, arrays in enumerate(session.members) if arrays[0].kind == GLOBAL}
    kept = sorted(accessed | tensors)
    traced = [
        Traced(
            array.name,
            array.elements,
            array.itemsize,
            array.dtype or "byte",
            "shared" if array.kind == SHARED else "global",
            array.lead,
        )
        for array, *_ in (session.members[i] for i in kept)
    ]
    index = numpy.zeros(len(session.members), "i2")
    index[kept] = range(len(kept))
    places, place = numpy.unique(raw["pc"], return_inverse=True)
    lines = numpy.array([session.table.locate(int(pc) - 1)[1] or 0 for pc in places], "i4")
    thread = raw["block"].astype("i8") * math.prod(shape[3:6]) + raw["thread"]
    events = numpy.zeros(len(raw), EVENT)
    for name in ("block", "thread", "offset", "bytes", "kind"):
        events[name] = raw[name]
    events["line"] = lines[place] if len(places) else 0
    events["tensor"] = index[raw["region"]]
    events["pc"] = place
    events["visit"] = _occurrence(thread, place)
    events["step"] = _occurrence(thread)
    return Trace(
        kernel=call.name,
        grid=shape[:3],
        block=shape[3:6],
        tensors=traced,
        events=events,
        source=source,
        filename=filename,
        truncated=bool(session.checks.events_lost),
        reports=mistakes,
        notes=[*notes, *session.barrier_notes()],
    )


def _occurrence(*keys):
    """For each row, how many earlier rows have the same keys."""
    order, group = groups(*keys)
    first = numpy.flatnonzero(numpy.diff(group, prepend=-1))
    result = numpy.empty(len(order), "i4")
    result[order] = numpy.arange(len(order)) - first[group]
    return result
