"""What went wrong, in words: from addresses to source lines, from numbers to threads, from reports to one error.

except ga.KernelError as error:
    error.reports[0].kind, error.reports[0].line, error.reports[0].thread
"""

import ctypes
import io
import re
import textwrap
from bisect import bisect_right
from dataclasses import dataclass

from ..errors import KernelError
from .build import text_line


@dataclass(frozen=True)
class Report:
    """One thing that a kernel did wrong, at one line. Of a race, `line` and `thread` are the later access, `other_*` the
    earlier one. `count`: how often it was seen there."""

    kind: str  # "out of bounds", "race", "uninitialised", ...
    line: "int | None"
    file: "str | None"
    thread: "tuple[int, int, int]"
    block: "tuple[int, int, int]"
    message: str
    other_line: "int | None" = None
    other_thread: "tuple[int, int, int] | None" = None
    other_block: "tuple[int, int, int] | None" = None
    tensor: "str | None" = None
    element: "int | None" = None
    count: int = 1


class Symbols:
    """Source lines and variables of a compiled program, from the debug information in its file."""

    def __init__(self, program):
        from elftools.elf.elffile import (
            ELFFile,  # imported when something went wrong, or the checks are on
        )

        elf = ELFFile(io.BytesIO(program.image))
        sections = {i: s.name for i, s in enumerate(elf.iter_sections())}
        found = [
            s
            for name in (".symtab", ".dynsym")
            if (table := elf.get_section_by_name(name))
            for s in table.iter_symbols()
        ]
        entry = next(s for s in found if s.name.startswith("simt_run_"))
        self.base = (
            ctypes.cast(getattr(program.library, entry.name), ctypes.c_void_p).value
            - entry["st_value"]
        )
        self.size = max(
            s["p_vaddr"] + s["p_memsz"] for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"
        )
        # g++ forgets the section of a function template's variable; a variable of a device function can only be a shared one.
        self.variables = sorted(
            {
                (
                    s["st_value"],
                    s["st_size"],
                    plain_name(s.name),
                    sections.get(s["st_shndx"]) == "simt_shared" or s.name.startswith("_ZZ"),
                )
                for s in found
                if s["st_info"]["type"] == "STT_OBJECT"
                and s["st_size"]
                and sections.get(s["st_shndx"]) in ("simt_shared", ".data", ".bss")
            }
        )
        section = elf.get_section_by_name("simt_shared")
        self.shared = (
            (section["sh_addr"], section["sh_addr"] + section["sh_size"]) if section else (0, 0)
        )
        rows = []
        dwarf = elf.get_dwarf_info()
        for unit in dwarf.iter_CUs():
            table = dwarf.line_program_for_CU(unit)
            first = 0 if table["version"] >= 5 else 1
            names = [name.name.decode(errors="replace") for name in table["file_entry"]]
            for entry in table.get_entries():
                if entry.state is not None:
                    at = entry.state.file - first
                    name = names[at] if 0 <= at < len(names) else ""
                    rows.append(
                        (
                            entry.state.address,
                            None if entry.state.end_sequence else name,
                            entry.state.line,
                        )
                    )
        rows.sort(key=lambda row: (row[0], row[1] is not None))
        self.addresses, self.rows = [row[0] for row in rows], rows
        self.types = {}  # offset of a variable -> (bytes, name) of one element
        for unit in dwarf.iter_CUs():
            for die in unit.iter_DIEs():
                where = die.attributes.get("DW_AT_location")
                if (
                    die.tag == "DW_TAG_variable"
                    and where
                    and isinstance(where.value, list)
                    and where.value[0] == 3
                ):  # a fixed address
                    self.types[int.from_bytes(bytes(where.value[1:9]), "little")] = _element_type(
                        die
                    )

    def locate(self, offset: int) -> "tuple[str | None, int | None]":
        """(file, line) of the machine code at this offset into the library; (None, None) when it is not the source's."""
        at = bisect_right(self.addresses, offset) - 1
        if at < 0 or self.rows[at][1] is None or offset >= self.size:
            return None, None
        for near in (
            *range(at, max(at - 8, -1), -1),
            *range(at + 1, min(at + 8, len(self.rows))),
        ):  # ours, or not said: the next one
            _, name, line = self.rows[near]
            if line and name and name not in OURS:
                return name, line
        return self.rows[at][1:]


OURS = ("runtime.h", "simt.h", "exports", "namespace")


def _element_type(die) -> "tuple[int, str]":
    """(bytes, name) of a variable's type, of an array's element; (1, "") when the debug information does not say."""
    while die is not None:
        link = next(
            (
                a
                for a in ("DW_AT_specification", "DW_AT_abstract_origin", "DW_AT_type")
                if a in die.attributes
            ),
            None,
        )
        name, size = die.attributes.get("DW_AT_name"), die.attributes.get("DW_AT_byte_size")
        if die.tag in (
            "DW_TAG_base_type",
            "DW_TAG_structure_type",
            "DW_TAG_pointer_type",
            "DW_TAG_enumeration_type",
            "DW_TAG_union_type",
        ):
            return size.value if size else 8, name.value.decode() if name else ""
        die = die.get_DIE_from_attribute(link) if link else None
    return 1, ""


def plain_name(mangled: str) -> str:
    """The last name in a C++ symbol: _ZZ3sumE3buf is buf."""
    if not mangled.startswith("_Z"):
        return mangled.split(".")[0]
    mangled = re.sub(
        r"L[a-z]n?\d+E", "", mangled
    )  # numbers among a template's arguments are no lengths of names
    best, at = mangled, 2
    while at < len(mangled):
        digits = re.match(r"\d+", mangled[at:])
        if digits:
            start = at + len(digits[0])
            best, at = mangled[start : start + int(digits[0])], start + int(digits[0])
        else:
            at += 1
    return best


def coordinates(linear: int, dims) -> "tuple[int, int, int]":
    return linear % dims[0], linear // dims[0] % dims[1], linear // dims[0] // dims[1]


def thread_words(thread, block, dims, grid) -> str:
    """ "thread 5 of block 2", with three numbers each where the grid has more dimensions."""

    def words(value, size):
        return str(value[0]) if size[1] == size[2] == 1 else "(" + ", ".join(map(str, value)) + ")"

    return f"thread {words(thread, dims)} of block {words(block, grid)}"


def error(program, name, reports, checked: bool) -> KernelError:
    """The one error that a launch raises for all its reports."""
    head = f"{name}: {len(reports)} problems" if len(reports) > 1 else f"{name}"
    lines = [
        head
        + (
            " (checked on the CPU; no tensor was changed)"
            if checked
            else " (on the CPU, unchecked: tensors may have been changed; ga.checked() tells more)"
        )
    ]
    for report in reports:
        where = f"{report.file}, line {report.line}" if report.line else "at an unknown line"
        times = f" (and {report.count - 1:,} more)" if report.count > 1 else ""
        lines.append(
            textwrap.fill(
                f"{where}: {report.message}{times}",
                96,
                initial_indent="  ",
                subsequent_indent="    ",
            )
        )
        for line in dict.fromkeys(
            (report.other_line, report.line) if report.other_line else (report.line,)
        ):
            text = line and text_line(program.text, report.file or "", line)
            if text:
                lines.append(f"    {line:4} | {text.strip()}")
    return KernelError("\n".join(lines), reports)
