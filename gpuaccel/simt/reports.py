"""What a kernel did wrong, in words: lines for addresses, threads for numbers, one error for all.

except ga.errors.KernelError as error:
    error.reports[0].kind, error.reports[0].line, error.reports[0].thread
"""

import ctypes
import functools
import io
import textwrap
from bisect import bisect_right
from dataclasses import dataclass

from ..errors import KernelError
from .build import SIMT_HEADERS, text_line


@dataclass(frozen=True)
class Report:
    """One mistake of a kernel, at one source line.

    Of a race, `line` and `thread` are the later access, and `other_line` and `other_thread` the
    earlier one.

    Attributes:
        kind: "out of bounds", "race", "uninitialised", ...
        line: of the source, from 1.
        file: of the source.
        thread: (x, y, z) in the block.
        block: (x, y, z) in the grid.
        message: in words.
        other_line: of a race, of the earlier access.
        other_thread: of a race, of the earlier access.
        other_block: of a race, of the earlier access.
        tensor: the parameter's name.
        element: index in the tensor.
        count: how often it happened at this line.
        callers: lines from which its function was called, innermost first.
        needs_effect: whether it is a mistake only where it changes a result.
        looks_unset: whether all that tells it is the number that unset variables hold.
    """

    kind: str
    line: int | None
    file: str | None
    thread: tuple[int, int, int]
    block: tuple[int, int, int]
    message: str
    other_line: int | None = None
    other_thread: tuple[int, int, int] | None = None
    other_block: tuple[int, int, int] | None = None
    tensor: str | None = None
    element: int | None = None
    count: int = 1
    callers: tuple[int, ...] = ()
    needs_effect: bool = False
    looks_unset: bool = False


# Files of the runtime, whose lines mean nothing to the user.
RUNTIME_FILES = (*SIMT_HEADERS, "exports", "namespace")
DW_OP_ADDR = 3


class Symbols:
    """Source lines and variables of a compiled program, from the debug information in its file.

    base: address at which the library is loaded
    size: bytes of memory that it takes
    variables: sorted (offset, bytes, whether it is a __shared__ variable)
    shared: first and last offset of the __shared__ variables

    Lines and types are read when they are first needed: a correct kernel needs no lines, and one
    without variables no types.
    """

    def __init__(self, program):
        # Imported here: only checked launches and errors need it.
        from elftools.elf.elffile import ELFFile

        elf = ELFFile(io.BytesIO(program.image))
        symbols = [
            symbol
            for name in (".symtab", ".dynsym")
            if (table := elf.get_section_by_name(name))
            for symbol in table.iter_symbols()
        ]
        entry = next(s for s in symbols if s.name.startswith("simt_run_"))
        address = ctypes.cast(getattr(program.library, entry.name), ctypes.c_void_p).value
        self.base = address - entry["st_value"]
        self.size = max(
            s["p_vaddr"] + s["p_memsz"] for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"
        )
        self.variables = _variables(elf, symbols)
        section = elf.get_section_by_name("simt_shared")
        self.shared = (0, 0)
        if section:
            self.shared = section["sh_addr"], section["sh_addr"] + section["sh_size"]
        self._elf = elf

    @functools.cached_property
    def rows(self) -> list:
        """Rows (offset, file, line) of the line table, sorted by offset."""
        return _line_table(self._elf.get_dwarf_info())

    @functools.cached_property
    def addresses(self) -> list:
        return [offset for offset, _, _ in self.rows]

    @functools.cached_property
    def types(self) -> dict:
        """Offset of a variable -> (its name, and what `_element_type` returns)."""
        types = {}
        for unit in self._elf.get_dwarf_info().iter_CUs():
            for die in unit.iter_DIEs():
                location = die.attributes.get("DW_AT_location")
                if die.tag != "DW_TAG_variable" or not location:
                    continue
                expression = location.value
                if isinstance(expression, list) and expression[0] == DW_OP_ADDR:
                    offset = int.from_bytes(bytes(expression[1:9]), "little")
                    types[offset] = _name(die), *_element_type(die)
        return types

    @functools.cached_property
    def calls(self) -> list:
        """(start, end, file, line) of each inlined call, outer ones first."""
        calls = []
        dwarf = self._elf.get_dwarf_info()
        for unit in dwarf.iter_CUs():
            names = _file_names(dwarf.line_program_for_CU(unit))
            for die in unit.iter_DIEs():
                line = die.attributes.get("DW_AT_call_line")
                if die.tag == "DW_TAG_inlined_subroutine" and line:
                    name = names.get(die.attributes["DW_AT_call_file"].value, "")
                    for start, end in _addresses_of(die, unit, dwarf):
                        calls.append((start, end, name, line.value))
        return calls

    def callers(self, offset: int, returns, line) -> tuple[int, ...]:
        """Lines of the calls that lead to the code at an offset, innermost first.

        Args:
            returns: return addresses on the stack above it
            line: the line of the code itself
        """
        lines: list[int] = []
        for depth, place in enumerate([offset, *(address - 1 for address in returns)]):
            if depth:
                index = bisect_right(self.addresses, place) - 1
                name, own = self.rows[index][1:] if index >= 0 else (None, None)
                if not own or not name or name in RUNTIME_FILES:
                    continue
                lines.append(own)
            inlined = [c for c in self.calls if c[0] <= place < c[1] and c[2] not in RUNTIME_FILES]
            lines += [c[3] for c in reversed(inlined)]
        # Functions of the runtime are inlined into the line itself.
        while lines and lines[0] == line:
            del lines[0]
        return tuple(lines)

    def locate(self, offset: int) -> tuple[str | None, int | None]:
        """(file, line) of the machine code at this offset into the library, or (None, None)."""
        index = bisect_right(self.addresses, offset) - 1
        if index < 0 or self.rows[index][1] is None or offset >= self.size:
            return None, None
        # Where the row is of the runtime, or names no line, the nearest row of the user's counts.
        before = range(index, max(index - 8, -1), -1)
        after = range(index + 1, min(index + 8, len(self.rows)))
        for neighbour in (*before, *after):
            _, name, line = self.rows[neighbour]
            if line and name and name not in RUNTIME_FILES:
                return name, line
        return self.rows[index][1:]


def _variables(elf, symbols) -> list:
    """Sorted (offset, bytes, whether it is a __shared__ variable) of all variables."""
    sections = {i: section.name for i, section in enumerate(elf.iter_sections())}
    variables = set()
    for symbol in symbols:
        section = sections.get(symbol["st_shndx"])
        if symbol["st_info"]["type"] != "STT_OBJECT" or not symbol["st_size"]:
            continue
        if section not in ("simt_shared", ".data", ".bss"):
            continue
        # Skip the compiler's own guard variables of initialisations.
        if symbol.name.startswith("_ZGV"):
            continue
        # g++ drops the section of a variable in a function template. A variable of a device
        # function (_ZZ) can only be a shared one.
        is_shared = section == "simt_shared" or symbol.name.startswith("_ZZ")
        variables.add((symbol["st_value"], symbol["st_size"], is_shared))
    return sorted(variables)


def _file_names(table) -> dict[int, str]:
    first = 0 if table["version"] >= 5 else 1
    entries = table["file_entry"]
    return {i: entry.name.decode(errors="replace") for i, entry in enumerate(entries, first)}


def _addresses_of(die, unit, dwarf):
    """Yield (start, end) of the code of a DIE."""
    low = die.attributes.get("DW_AT_low_pc")
    high = die.attributes.get("DW_AT_high_pc")
    ranges = die.attributes.get("DW_AT_ranges")
    if low and high:
        is_size = high.form != "DW_FORM_addr"
        yield low.value, low.value + high.value if is_size else high.value
    elif ranges:
        base = unit.get_top_DIE().attributes.get("DW_AT_low_pc")
        start = base.value if base else 0
        lists = dwarf.range_lists()
        for entry in lists.get_range_list_at_offset(ranges.value, cu=unit):
            if hasattr(entry, "base_address"):
                start = entry.base_address
            else:
                is_absolute = getattr(entry, "is_absolute", False)
                shift = 0 if is_absolute else start
                yield entry.begin_offset + shift, entry.end_offset + shift


def _line_table(dwarf) -> list:
    """Rows (offset, file, line), sorted by offset; file is None after the end of a sequence."""
    rows = []
    for unit in dwarf.iter_CUs():
        table = dwarf.line_program_for_CU(unit)
        names = _file_names(table)
        for entry in table.get_entries():
            state = entry.state
            if state is None:
                continue
            name = names.get(state.file, "")
            rows.append((state.address, None if state.end_sequence else name, state.line))
    return sorted(rows, key=lambda row: (row[0], row[1] is not None))


TYPE_LINKS = ("DW_AT_specification", "DW_AT_abstract_origin", "DW_AT_type")
ELEMENT_TAGS = (
    "DW_TAG_base_type",
    "DW_TAG_structure_type",
    "DW_TAG_pointer_type",
    "DW_TAG_enumeration_type",
    "DW_TAG_union_type",
    "DW_TAG_class_type",
)


def _element_type(die) -> tuple[int, str, bytes | None]:
    """(bytes, name, padding) of a variable's type, or of its elements if it is an array.

    padding: 1 for each byte of a struct that belongs to no member; None without such bytes.
    (1, "", None) if the debug information has no type.
    """
    while die is not None:
        if die.tag in ELEMENT_TAGS:
            name = die.attributes.get("DW_AT_name")
            size = die.attributes.get("DW_AT_byte_size")
            size = size.value if size else 8
            used = bytearray(size)
            _use(die, used, 0)
            padding = bytes(1 - byte for byte in used)
            return size, name.value.decode() if name else "", padding if any(padding) else None
        die = _linked(die)
    return 1, "", None


def _name(die) -> str:
    while die is not None and "DW_AT_name" not in die.attributes:
        die = _linked(die)
    return die.attributes["DW_AT_name"].value.decode() if die else "a variable"


def _linked(die):
    """The type of a variable, an array's elements or a typedef; None if there is none."""
    link = next((link for link in TYPE_LINKS if link in die.attributes), None)
    return die.get_DIE_from_attribute(link) if link else None


def _use(die, used: bytearray, offset: int):
    """Mark the bytes of `used` that a type occupies from an offset on; padding stays 0."""
    while die is not None and die.tag not in ELEMENT_TAGS:
        if die.tag == "DW_TAG_array_type":
            break
        die = _linked(die)
    if die is None:
        return
    if die.tag in ("DW_TAG_structure_type", "DW_TAG_union_type", "DW_TAG_class_type"):
        for member in die.iter_children():
            if member.tag in ("DW_TAG_member", "DW_TAG_inheritance"):
                start = member.attributes.get("DW_AT_data_member_location")
                if not member.attributes.get("DW_AT_external"):
                    _use(_linked(member), used, offset + (start.value if start else 0))
        return
    if die.tag == "DW_TAG_array_type":
        count = 1
        for dimension in die.iter_children():
            last = dimension.attributes.get("DW_AT_upper_bound")
            number = dimension.attributes.get("DW_AT_count")
            count *= number.value if number else last.value + 1 if last else 1
        element = _linked(die)
        size = _element_type(element)[0]
        for i in range(count):
            _use(element, used, offset + i * size)
        return
    size = die.attributes.get("DW_AT_byte_size")
    for i in range(offset, min(offset + (size.value if size else 8), len(used))):
        used[i] = 1


def coordinates(linear: int, dims) -> tuple[int, int, int]:
    """(x, y, z) of a linear thread or block number in a block or grid of these dimensions."""
    return linear % dims[0], linear // dims[0] % dims[1], linear // dims[0] // dims[1]


def thread_words(thread, block, block_dims, grid_dims) -> str:
    """ "thread 5 of block 2", with three coordinates where a grid or block has more dimensions."""

    def words(value, dims):
        if dims[1] == dims[2] == 1:
            return str(value[0])
        return "(" + ", ".join(map(str, value)) + ")"

    return f"thread {words(thread, block_dims)} of block {words(block, grid_dims)}"


def error(program, name, reports, checked: bool) -> KernelError:
    """The one error that a launch raises for all its reports."""
    title = f"{name}: {len(reports)} problems" if len(reports) > 1 else name
    if checked:
        title += " (checked on the CPU; no tensor was changed)"
    else:
        title += " (on the CPU, unchecked: tensors may have been changed; ga.checked() tells more)"
    text = [title]
    for report in reports:
        place = f"{report.file}, line {report.line}" if report.line else "at an unknown line"
        repeats = f" (and {report.count - 1:,} more like this)" if report.count > 1 else ""
        sentence = f"{place}: {report.message}{repeats}"
        text.append(textwrap.fill(sentence, 96, initial_indent="  ", subsequent_indent="    "))
        lines = (report.other_line, report.line) if report.other_line else (report.line,)
        for line in dict.fromkeys(lines):
            source = line and text_line(program.text, report.file or "", line)
            if source:
                text.append(f"    {line:4} | {source.strip()}")
    if checked and any(report.kind == "race" for report in reports):
        text.append("  (ga.checked(False) runs a kernel without the checks)")
    return KernelError("\n".join(text), reports)
