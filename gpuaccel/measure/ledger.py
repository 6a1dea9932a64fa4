"""The ledger counts what the host did: launches, synchronisations, copies and their bytes.

    with ledger("arena") as row:
        step(batch)
    row.launches, row.syncs, row.copies["DtoH"]          # filled when the block has ended

    book = Ledger()
    book.add(row)
    book                                                  # a table, in a notebook or in print

Everything is read from the records of `torch.profiler` (measure/profiler.py), never guessed. On a
GPU CUPTI leaves four kinds of them: the host's calls to the runtime and the driver, the GPU's
kernels, copies and memsets, and synchronisations. A call and the work that it asked for carry the
same correlation number.

Without a GPU there are no launches and no waits: `launches`, `syncs` and `copies` are None. Counted
instead are the operators that torch called, and the scalars that the host read, the number of
elements in a mask included (`x[mask]`). A read is a wait if its tensor is on a GPU. Step counters
that torch's optimizers keep on the CPU are not counted.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from ..compiler import replaced_words
from .profiler import REGION, profiled, profiler_sees_gpu

LAUNCHES = {
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel",
}
GRAPH_LAUNCHES = {"cudaGraphLaunch", "cuGraphLaunch"}
SYNCS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
}
SYNC_RECORDS = {
    f"{what} {verb}" for what in ("Stream", "Context", "Event") for verb in ("Sync", "Synchronize")
}


@dataclass
class Row:
    """What one region did. None: could not be counted here; `notes` says why.

    Attributes:
        name: of the row.
        launches: kernels launched one by one, by runtime or driver call.
        graph_launches: CUDA graphs launched; the kernels inside are not counted as launches.
        syncs: calls in which the host waited for the GPU, blocking copies included.
        copies: direction ("HtoD", "DtoH", "DtoD", ...) -> (count, bytes).
        operators: torch operators called, those inside other operators included.
        would_sync: scalars that the host read outside of an optimizer's step: a wait if the tensor
            is on a GPU.
        notes: sentences about what could not be counted here.
    """

    name: str
    launches: int | None = None
    graph_launches: int | None = None
    syncs: int | None = None
    copies: dict | None = None
    operators: int | None = None
    would_sync: int | None = None
    notes: list = field(default_factory=list)

    def bytes(self, direction: str) -> int | None:
        """Bytes copied in one direction ("DtoH", "HtoD", "DtoD"), or None if not counted.

        Args:
            direction: "DtoH", "HtoD", "DtoD", ...
        """
        return None if self.copies is None else self.copies.get(direction, (0, 0))[1]

    def __str__(self):
        book = Ledger()
        book.add(self)
        return str(book)


@contextlib.contextmanager
def ledger(name: str | None = None) -> Iterator[Row]:
    """Count what the block does: launches, synchronisations, copies and their bytes.

    The block may launch work on any stream and from any thread. Work queued before it and the
    profiler's own waiting are not counted. The first use in a process starts the profiler (about a
    second on a GPU): warm up outside the block, and do not read a speed from it. On a GPU each
    launch of this process takes longer afterwards, so measure times before.

    Args:
        name: of the row; default: "your NAME" while ga.replaced has replaced kernel NAME, else
            "step".

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
    row = Row(name or replaced_words() or "step")
    with profiled(f"ledger({row.name!r})") as events:
        yield row
    _fill(row, events, profiler_sees_gpu())


# ---- the records of a block ----------------------------------------------------------------------


def _fill(row, events, gpu):
    """Fill the row from the events of a Chrome trace."""
    events = [event for event in events if event.get("ph") == "X"]
    region = next(
        e for e in events if e["name"] == REGION and e.get("cat") != "gpu_user_annotation"
    )
    end = region["ts"] + region["dur"]
    inside = [e for e in events if region["ts"] <= e["ts"] <= end and e is not region]
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
    if not any(_is_call(e) for e in events):
        row.notes.append(
            "the profiler gave no records of the GPU "
            "(another profiler is attached, or CUPTI is not permitted here)"
        )
        return
    calls = [e for e in inside if _is_call(e)]
    names = [_call_name(e) for e in calls]
    row.launches = sum(name in LAUNCHES for name in names)
    row.graph_launches = sum(name in GRAPH_LAUNCHES for name in names)
    known = {_correlation(e) for e in calls} - {None}
    row.syncs = sum(_is_wait(e, known) for e in inside)
    outside = {_correlation(e) for e in events if _is_call(e)} - known
    row.copies = {}
    for e in events:
        # The GPU may do the work after the region has ended: it belongs to the region of its call.
        # Copies by driver calls have no call record. They belong to the region if they began in it
        # or right after it, as the device was idle before.
        asked_outside = _correlation(e) in outside or e["ts"] < region["ts"]
        if e.get("cat") != "gpu_memcpy" or asked_outside:
            continue
        match = re.match(r"Memcpy (\w+)", e["name"])
        direction = match.group(1) if match else "other"
        count, total = row.copies.get(direction, (0, 0))
        row.copies[direction] = (count + 1, total + int(e.get("args", {}).get("bytes", 0)))


def _is_call(event) -> bool:
    """Whether the event is a call of the host to the CUDA runtime or driver."""
    return event.get("cat") in ("cuda_runtime", "cuda_driver")


def _is_wait(event, known) -> bool:
    """Whether the host waits for the GPU here. known: correlation numbers of the host's calls.

    A wait through the driver API has no call record, only CUPTI's record of the synchronisation;
    where there are both, the record is not counted a second time."""
    if _is_call(event):
        name = _call_name(event)
        return name in SYNCS or (bool(re.match(r"cu(da)?Memcpy", name)) and "Async" not in name)
    return (
        event.get("cat") == "cuda_sync"
        and event["name"] in SYNC_RECORDS
        and _correlation(event) not in known
    )


def _call_name(event) -> str:
    """The name of a call without its variant's suffix: cuLaunchKernel_ptsz -> cuLaunchKernel."""
    return re.sub(r"(_v\d+|_v2|_ptsz|_ptds)+$", "", event["name"])


def _correlation(event):
    return event.get("args", {}).get("correlation")


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
        elif e["name"] == "aten::nonzero" or e["name"] == "aten::_local_scalar_dense" and not fills:
            reads += not any(begin <= e["ts"] <= end for begin, end in steps)
        elif e["name"] not in ("aten::_index_put_impl_", "aten::item"):
            fills = False
    return reads


# ---- the table -----------------------------------------------------------------------------------


class Ledger:
    """Rows side by side, one for each variant of the same step; displays as a table.

    Columns that no row knows are left out.

    Attributes:
        rows: of each variant.
    """

    def __init__(self):
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

    def _lines(self) -> list[list[str]]:
        """The headings, then each row's cells."""
        cells = [_cells(row) for row in self.rows]
        titles = [t for t in _cells(Row("")) if any(row[t] is not None for row in cells)]
        rows = zip(self.rows, cells)
        return [["", *titles], *([row.name, *(c[t] or "–" for t in titles)] for row, c in rows)]

    def _notes(self) -> list[str]:
        return list(dict.fromkeys(note for row in self.rows for note in row.notes))

    def __str__(self):
        if not self.rows:
            return "the ledger is empty"
        lines = self._lines()
        widths = [max(map(len, column)) for column in zip(*lines)]
        text = []
        for name, *cells in lines:
            padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
            text.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
        return "\n".join(text + [f"({note})" for note in self._notes()])

    __repr__ = __str__

    def _repr_html_(self):
        if not self.rows:
            return "<p>the ledger is empty</p>"
        soft = "color:var(--jp-ui-font-color2,inherit)"
        rule = "border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.35))"
        cell = f"padding:6px 10px;background:transparent;font-variant-numeric:tabular-nums;{rule}"
        first = f"{cell};text-align:left;font-weight:600"
        other = f"{cell};text-align:right"
        head, *body = (
            f'<{tag} style="{first}">{escape(name)}</{tag}>'
            + "".join(f'<{tag} style="{other}">{escape(text)}</{tag}>' for text in texts)
            for tag, (name, *texts) in zip(["th"] + ["td"] * len(self.rows), self._lines())
        )
        rows = "".join(f'<tr style="background:transparent">{line}</tr>' for line in body)
        notes = "".join(
            f'<p style="{soft};font-size:12px;margin:6px 14px;max-width:760px">{escape(note)}</p>'
            for note in self._notes()
        )
        return (
            '<div style="overflow-x:auto">'
            '<table style="border-collapse:collapse;font-size:13px;margin:4px 0">'
            f'<thead style="{soft}"><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
            f"{notes}"
        )


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
