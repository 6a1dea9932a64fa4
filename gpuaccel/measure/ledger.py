"""The ledger: what the host really did between two points. Launches, synchronisations, copies by direction and bytes.

    with ledger("arena") as row:
        step(batch)
    row.launches, row.syncs, row.copies["DtoH"]          # filled when the block has ended

    book = Ledger()
    book.add(row, tokens_per_s=12345.0, max_diff=0.0, bit_equal=True)
    book                                                  # a table, in a notebook or in print

Everything is read from the records of `torch.profiler` (runtime and driver calls, and the GPU's own records of
copies), never guessed. Without a GPU there is nothing to launch and nothing to wait for: `launches`, `syncs` and
`copies` are None, and what can be counted is counted: the operators that torch called, and the scalars that the host
read, each of which would make it wait if it were on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from html import escape

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..backends import backend
from ..errors import BackendError

REGION = "gpuaccel.measure.ledger.region"
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
    """What one region did. None: could not be counted here; `notes` says why."""

    name: str
    backend: str = ""
    launches: int | None = None  # kernels launched one by one, by runtime or driver call
    graph_launches: int | None = (
        None  # CUDA graphs launched; the kernels inside are not counted as launches
    )
    syncs: int | None = None  # calls in which the host waited for the GPU, blocking copies included
    copies: dict | None = None  # direction ("HtoD", "DtoH", "DtoD", ...) -> (count, bytes)
    memsets: tuple | None = None  # (count, bytes)
    operators: int | None = None  # torch operators called, those inside other operators included
    would_sync: int | None = None  # scalars the host read: each waits, if the tensor is on a GPU
    seconds: float | None = None  # the host's time, with the profiler watching: not a benchmark
    notes: list = field(default_factory=list)

    def bytes(self, direction: str) -> int | None:
        """Bytes copied in one direction ("DtoH", "HtoD", "DtoD"), or None where copies are not counted."""
        return None if self.copies is None else self.copies.get(direction, (0, 0))[1]

    def __str__(self):
        return str(_table([(self, {})]))


@contextlib.contextmanager
def ledger(name="step"):
    """Counts what the block does; yields a Row that is filled when the block has ended without an error.

    The block may launch work on any stream and from any thread. Work queued before it is left out, and so is the
    profiler's own waiting. The first use in a process starts the profiler (on a GPU a second or so): warm up outside
    the block, and read no speed from it.
    """
    row = Row(name=name, backend=backend().name)
    with watched(f"ledger({name!r})") as events:
        began = time.perf_counter()
        yield row
        row.seconds = time.perf_counter() - began
    _fill(row, events, watches_gpu())


def watches_gpu() -> bool:
    """Is there a GPU whose records the profiler will have?"""
    return torch.cuda.is_available() and backend().policy != "off"


@contextlib.contextmanager
def watched(who):
    """Records what the block does with torch.profiler; yields a list which afterwards holds the events of a Chrome trace.

    The block's own are those within the event called REGION. who: for the error when another profiler is at work.
    """
    if torch._C._autograd._profiler_enabled():
        raise BackendError(
            f"{who} inside another ledger or torch.profiler: only one can watch at a time"
        )
    gpu, events = watches_gpu(), []
    options = {"activities": [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if gpu else [])}
    if gpu:
        options["experimental_config"] = _with_sync_records()
        torch.cuda.synchronize()  # what was queued before is not this block's
    profiler = profile(**options)
    with quiet():
        profiler.__enter__()
    try:
        with record_function(REGION):
            yield events
        if gpu:
            torch.cuda.synchronize()  # outside the region: so that every record of its work is complete
            torch.zeros(
                1, device="cuda"
            )  # and a call that must leave a record, or the profiler does not see the GPU
    finally:
        with quiet():
            profiler.__exit__(None, None, None)
    with quiet():
        events += trace_of(profiler)


@contextlib.contextmanager
def quiet():
    """Keeps the profiler library's own messages off the page: its warnings, and what it writes to file descriptor 2."""
    sys.stderr.flush()
    kept, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def _with_sync_records():
    """Asks for CUPTI's records of synchronisations too: the driver's calls leave no other trace. None where torch
    cannot."""
    try:
        from torch._C._profiler import _ExperimentalConfig

        return _ExperimentalConfig(enable_cuda_sync_events=True)
    except (ImportError, TypeError):
        return None


def trace_of(profiler) -> list:
    handle, path = tempfile.mkstemp(suffix=".json", prefix="gpuaccel-ledger-")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            return json.load(file, strict=False)["traceEvents"]
    finally:
        os.unlink(path)


def _fill(row, events, gpu):
    """Fills the row from a list of Chrome trace events."""
    events = [event for event in events if event.get("ph") == "X"]
    region = next(
        e for e in events if e["name"] == REGION and e.get("cat") != "gpu_user_annotation"
    )
    begin, end = region["ts"], region["ts"] + region["dur"]
    inside = [e for e in events if begin <= e["ts"] <= end and e is not region]
    operators = [e for e in inside if e.get("cat") == "cpu_op"]
    row.operators = len(operators)
    row.would_sync = sum(e["name"] == "aten::_local_scalar_dense" for e in operators)
    if not gpu:
        row.notes.append(
            "no GPU: launches, waits and copies do not exist here; counted are torch's operators "
            "and the scalars that the host read (each would be a wait, were the tensor on a GPU)"
        )
        return
    calls = [e for e in inside if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    if not any(e.get("cat") in ("cuda_runtime", "cuda_driver") for e in events):
        row.notes.append(
            "the profiler gave no records of the GPU "
            "(another profiler is attached, or CUPTI is not permitted here)"
        )
        return
    named = [(plain_name(e["name"]), e) for e in calls]
    row.launches = sum(name in LAUNCHES for name, _ in named)
    row.graph_launches = sum(name in GRAPH_LAUNCHES for name, _ in named)
    waits = [e for name, e in named if name in SYNCS or blocking_copy(name)]
    known = {correlation(e) for e in calls} - {None}
    # A wait through the driver API has no call record, only CUPTI's record of the synchronisation: the same wait is
    # not counted twice.
    waits += [
        e
        for e in inside
        if e.get("cat") == "cuda_sync" and e["name"] in SYNC_RECORDS and correlation(e) not in known
    ]
    row.syncs = len(waits)
    outside = {
        correlation(e) for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")
    } - known
    row.copies, sets = {}, (0, 0)
    for e in events:
        # The GPU may do the work after the region has ended: what counts is who asked. Copies of driver calls have no
        # call record; they belong to the region if they began in it or, the device being idle before, right after.
        if (
            e.get("cat") not in ("gpu_memcpy", "gpu_memset")
            or correlation(e) in outside
            or e["ts"] < begin
        ):
            continue
        size = int(e.get("args", {}).get("bytes", 0))
        if e["cat"] == "gpu_memset":
            sets = (sets[0] + 1, sets[1] + size)
            continue
        match = re.match(r"Memcpy (\w+)", e["name"])
        direction = match.group(1) if match else "other"
        count, total = row.copies.get(direction, (0, 0))
        row.copies[direction] = (count + 1, total + size)
    row.memsets = sets


def plain_name(name: str) -> str:
    return re.sub(r"(_v\d+|_v2|_ptsz|_ptds)+$", "", name)


def blocking_copy(name: str) -> bool:
    return bool(re.match(r"cu(da)?Memcpy", name)) and "Async" not in name


def correlation(event):
    return event.get("args", {}).get("correlation")


class Ledger:
    """Rows side by side, one for each way of doing the same step. Displays as a table; `str()` gives it as text."""

    def __init__(self):
        self.rows = []  # (Row, {"tokens_per_s", "max_diff", "bit_equal"})

    def add(self, row, tokens_per_s=None, max_diff=None, bit_equal=None):
        """Adds a row with what was measured beside it; a row of the same name is replaced.

        tokens_per_s: a rate; max_diff: the largest absolute difference from the reference; bit_equal: whether two
        runs gave the same bits.
        """
        extra = {"tokens_per_s": tokens_per_s, "max_diff": max_diff, "bit_equal": bit_equal}
        names = [old.name for old, _ in self.rows]
        if row.name in names:
            self.rows[names.index(row.name)] = (row, extra)
        else:
            self.rows.append((row, extra))

    def __str__(self):
        return str(_table(self.rows))

    __repr__ = __str__

    def _repr_html_(self):
        return _table(self.rows).html()


# What a column is called, and its cell: None where it cannot be known. Columns without any cell are left out.
_COLUMNS = [
    (
        "tokens/s",
        lambda row, extra: (
            None if extra.get("tokens_per_s") is None else _count(extra["tokens_per_s"])
        ),
    ),
    ("kernel launches", lambda row, extra: _exact(row.launches)),
    ("graph launches", lambda row, extra: _exact(row.graph_launches)),
    ("host waits", lambda row, extra: _exact(row.syncs)),
    ("GPU to host", lambda row, extra: _copied(row, "DtoH")),
    ("host to GPU", lambda row, extra: _copied(row, "HtoD")),
    ("within GPU", lambda row, extra: _copied(row, "DtoD")),
    ("torch operators", lambda row, extra: _exact(row.operators) if row.launches is None else None),
    ("scalars read", lambda row, extra: _exact(row.would_sync) if row.launches is None else None),
    (
        "largest difference",
        lambda row, extra: (
            None if extra.get("max_diff") is None else f"{float(extra['max_diff']):.3g}"
        ),
    ),
    (
        "same bits",
        lambda row, extra: (
            None if extra.get("bit_equal") is None else "yes" if extra["bit_equal"] else "no"
        ),
    ),
]


class _table:
    def __init__(self, rows):
        self.columns = [
            title for title, cell in _COLUMNS if any(cell(*row) is not None for row in rows)
        ]
        cells = dict(_COLUMNS)
        self.lines = [
            [row.name] + [cells[title](row, extra) or "–" for title in self.columns]
            for row, extra in rows
        ]
        self.notes = list(dict.fromkeys(note for row, _ in rows for note in row.notes))

    def __str__(self):
        if not self.lines:
            return "the ledger is empty"
        lines = [["", *self.columns], *self.lines]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = [
            "  ".join(
                [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))]
            ).rstrip()
            for line in lines
        ]
        return "\n".join(text + [f"({note})" for note in self.notes])

    def html(self):
        if not self.lines:
            return "<p>the ledger is empty</p>"
        soft = "color:var(--jp-ui-font-color2,inherit)"
        rule = "border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.35))"
        cell = "padding:6px 14px;background:transparent;font-variant-numeric:tabular-nums"
        first, other = (
            f"{cell};{rule};text-align:left;font-weight:600",
            f"{cell};{rule};text-align:right",
        )
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
            '<table style="border-collapse:collapse;font-size:13px;margin:4px 0">'
            f'<thead><tr><th style="{first}"></th>{head}</tr></thead><tbody>{body}</tbody></table>{notes}'
        )


def _exact(value):
    return None if value is None else f"{value:,}"


def _count(value):
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= scale * 0.9995:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def _copied(row, direction):
    if row.copies is None:
        return None
    count, size = row.copies.get(direction, (0, 0))
    if not count:
        return "none"
    for scale, unit in ((2**30, "GB"), (2**20, "MB"), (2**10, "KB")):
        if size >= scale:
            return f"{size / scale:.3g} {unit} in {count:,}"
    return f"{size} bytes in {count:,}"
