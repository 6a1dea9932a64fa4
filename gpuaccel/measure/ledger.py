"""The ledger counts what the host did: launches, synchronisations, copies and their bytes.

    with ledger("arena") as row:
        step(batch)
    row.launches, row.syncs, row.copies["DtoH"]          # filled when the block has ended

    book = Ledger()
    book.add(row)
    book                                                  # a table, in a notebook or in print

Everything is read from the records of `torch.profiler` (measure/profiler.py), never guessed.
Without a GPU there are no launches and no waits: `launches`, `syncs` and `copies` are None. Counted
instead are the operators that torch called, and the scalars that the host read, the number of
elements in a mask included (`x[mask]`). A read is a wait if its tensor is on a GPU. Step counters
that torch's optimizers keep on the CPU are not counted.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from ..backends import backend
from ..compiler import replaced_words
from .profiler import (
    GRAPH_LAUNCHES,
    LAUNCHES,
    SCALAR_READ,
    call_name,
    correlation,
    is_call,
    is_wait,
    profiled,
    profiler_sees_gpu,
    split_region,
)


@dataclass
class Row:
    """What one region did. None: could not be counted here; `notes` says why.

    Attributes:
        name: of the row.
        backend: the backend in use, "cuda", "simt" or "torch".
        launches: kernels launched one by one, by runtime or driver call.
        graph_launches: CUDA graphs launched; the kernels inside are not counted as launches.
        syncs: calls in which the host waited for the GPU, blocking copies included.
        copies: direction ("HtoD", "DtoH", "DtoD", ...) -> (count, bytes).
        memsets: (count, bytes).
        operators: torch operators called, those inside other operators included.
        would_sync: scalars that the host read outside of an optimizer's step: a wait if the tensor
            is on a GPU.
        seconds: the host's time under the profiler: not a benchmark.
        notes: sentences about what could not be counted here.
    """

    name: str
    backend: str = ""
    launches: int | None = None
    graph_launches: int | None = None
    syncs: int | None = None
    copies: dict | None = None
    memsets: tuple | None = None
    operators: int | None = None
    would_sync: int | None = None
    seconds: float | None = None
    notes: list = field(default_factory=list)

    def bytes(self, direction: str) -> int | None:
        """Bytes copied in one direction ("DtoH", "HtoD", "DtoD"), or None if not counted.

        Args:
            direction: "DtoH", "HtoD", "DtoD", ...
        """
        return None if self.copies is None else self.copies.get(direction, (0, 0))[1]

    def __str__(self):
        return str(_Table([self]))


@contextlib.contextmanager
def ledger(name: str | None = None) -> Iterator[Row]:
    """Count what the block does: launches, synchronisations, copies and their bytes.

    The block may launch work on any stream and from any thread. Work queued before it and the
    profiler's own waiting are not counted. The first use in a process starts the profiler (about a
    second on a GPU): warm up outside the block, and do not read a speed from it.

    Args:
        name: of the row; default: "your settings_write" while that kernel is replaced, else "step".

    Yields:
        A Row that is filled when the block ends without an error.

    Raises:
        BackendError: inside another ledger or another profiler.

    Source:
        torch.profiler.

    Example:
        >>> x = torch.ones(1000, device=ga.default_device())
        >>> with ga.ledger("a sum that is read") as row:
        ...     total = x.sum().item()
        >>> row.would_sync, row.operators > 0
        (1, True)
    """
    name = name or replaced_words() or "step"
    row = Row(name=name, backend=backend().name)
    with profiled(f"ledger({name!r})") as events:
        start = time.perf_counter()
        yield row
        row.seconds = time.perf_counter() - start
    _fill(row, events, profiler_sees_gpu())


def _fill(row, events, gpu):
    """Fill the row from the events of a Chrome trace."""
    events, region, inside = split_region(events)
    operators = [e for e in inside if e.get("cat") == "cpu_op"]
    row.operators = len(operators)
    row.would_sync = _scalars_read(operators, inside)
    if not gpu:
        row.notes.append(
            "no GPU: nothing is launched, waited for or copied here. Counted are torch's operators "
            "and the scalars that the host read. On a GPU such a read is a wait, but some reads "
            "are made on a CPU only, for example to check token numbers"
        )
        return
    if not any(is_call(e) for e in events):
        row.notes.append(
            "the profiler gave no records of the GPU "
            "(another profiler is attached, or CUPTI is not permitted here)"
        )
        return
    calls = [e for e in inside if is_call(e)]
    names = [call_name(e) for e in calls]
    row.launches = sum(name in LAUNCHES for name in names)
    row.graph_launches = sum(name in GRAPH_LAUNCHES for name in names)
    known = {correlation(e) for e in calls} - {None}
    row.syncs = sum(is_wait(e, known) for e in inside)
    outside = {correlation(e) for e in events if is_call(e)} - known
    row.copies = {}
    row.memsets = (0, 0)
    for e in events:
        # The GPU may do the work after the region has ended: it belongs to the region of its call.
        # Copies by driver calls have no call record. They belong to the region if they began in it
        # or right after it, as the device was idle before.
        if (
            e.get("cat") not in ("gpu_memcpy", "gpu_memset")
            or correlation(e) in outside
            or e["ts"] < region["ts"]
        ):
            continue
        size = int(e.get("args", {}).get("bytes", 0))
        if e["cat"] == "gpu_memset":
            count, total = row.memsets
            row.memsets = (count + 1, total + size)
            continue
        match = re.match(r"Memcpy (\w+)", e["name"])
        direction = match.group(1) if match else "other"
        count, total = row.copies.get(direction, (0, 0))
        row.copies[direction] = (count + 1, total + size)


def _scalars_read(operators, inside):
    """Scalars that the host read, without those that torch's optimizers read in their step.

    A mask's elements are counted by aten::nonzero. Of `x[mask] = 0` a GPU needs no value: only a
    CPU reads that number back, from the tensor that it became.

    On a CPU these optimizers read their step counters. With parameters on a GPU the counters are on
    the CPU or are not read, so the host does not wait for them."""
    steps = [
        (e["ts"], e["ts"] + e.get("dur", 0))
        for e in inside
        if e.get("cat") == "user_annotation" and e["name"].startswith("Optimizer.step#")
    ]
    operators = sorted(operators, key=lambda e: e["ts"])
    before = itertools.chain([""], (e["name"] for e in operators))
    reads = 0
    fills = False
    for previous, e in zip(before, operators):
        if e["name"] == "aten::index_put_":
            fills = previous == "aten::lift_fresh"
        elif e["name"] == "aten::nonzero" or e["name"] == SCALAR_READ and not fills:
            reads += not any(begin <= e["ts"] <= end for begin, end in steps)
        elif e["name"] not in ("aten::_index_put_impl_", "aten::item"):
            fills = False
    return reads


class Ledger:
    """Rows side by side, one for each variant of the same step; displays as a table.

    Args:
        title: a sentence above the table, or "".

    Attributes:
        rows: of each variant.
    """

    def __init__(self, title: str = ""):
        self.title = title
        self.rows: list[Row] = []

    def add(self, row):
        """Add a row; one of the same name is replaced.

        Args:
            row: what `ledger` yielded, after its block.
        """
        names = [old.name for old in self.rows]
        if row.name in names:
            self.rows[names.index(row.name)] = row
        else:
            self.rows.append(row)

    def __str__(self):
        return "\n".join(filter(None, [self.title, str(_Table(self.rows))]))

    __repr__ = __str__

    def _repr_html_(self):
        title = ""
        if self.title:
            title = f'<p style="margin:10px 14px 2px;max-width:760px">{escape(self.title)}</p>'
        return title + _Table(self.rows).html()


def _cells(row) -> dict:
    """The cells in the order of the columns; None if unknown."""
    on_cpu = row.launches is None
    return {
        "kernel launches": _count(row.launches),
        "graph launches": _count(row.graph_launches),
        "host waits": _count(row.syncs),
        "GPU to host": _copied(row, "DtoH"),
        "host to GPU": _copied(row, "HtoD"),
        "within GPU": _copied(row, "DtoD"),
        "torch operators": _count(row.operators) if on_cpu else None,
        "scalars read": _count(row.would_sync) if on_cpu else None,
    }


class _Table:
    """Rows as text or HTML. Columns without any cell are left out."""

    def __init__(self, rows):
        cells = [_cells(row) for row in rows]
        titles = list(cells[0]) if cells else []
        self.columns = [title for title in titles if any(row[title] is not None for row in cells)]
        self.lines = [
            [row.name] + [row_cells[title] or "–" for title in self.columns]
            for row, row_cells in zip(rows, cells)
        ]
        self.notes = list(dict.fromkeys(note for row in rows for note in row.notes))

    def __str__(self):
        if not self.lines:
            return "the ledger is empty"
        lines = [["", *self.columns], *self.lines]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = []
        for name, *cells in lines:
            padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
            text.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
        return "\n".join(text + [f"({note})" for note in self.notes])

    def html(self):
        if not self.lines:
            return "<p>the ledger is empty</p>"
        soft = "color:var(--jp-ui-font-color2,inherit)"
        rule = "border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.35))"
        cell = "padding:6px 10px;background:transparent;font-variant-numeric:tabular-nums"
        first = f"{cell};{rule};text-align:left;font-weight:600"
        other = f"{cell};{rule};text-align:right"
        head = "".join(
            f'<th style="{other};{soft};font-weight:500">{escape(title)}</th>'
            for title in self.columns
        )
        body = "".join(
            f'<tr style="background:transparent"><td style="{first}">{escape(line[0])}</td>'
            + "".join(f'<td style="{other}">{escape(value)}</td>' for value in line[1:])
            + "</tr>"
            for line in self.lines
        )
        notes = "".join(
            f'<p style="{soft};font-size:12px;margin:6px 14px;max-width:760px">{escape(note)}</p>'
            for note in self.notes
        )
        return (
            '<div style="overflow-x:auto">'
            '<table style="border-collapse:collapse;font-size:13px;margin:4px 0">'
            f'<thead><tr><th style="{first}"></th>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>{notes}"
        )


def _count(value):
    return None if value is None else f"{value:,}"


def _copied(row, direction):
    """Amount that was copied in one direction, as text; None if copies are not counted."""
    if row.copies is None:
        return None
    count, size = row.copies.get(direction, (0, 0))
    if not count:
        return "none"
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= scale:
            amount = size / scale
            words = f"{amount:,.0f}" if amount >= 999.5 else f"{amount:.3g}"
            return f"{words} {unit} in {count:,}"
    return f"{size} bytes in {count:,}"
