"""Which thread touches which element: `ga.show` runs a kernel on copies of its tensors and draws the accesses of one block.

    >>> ga.show(saxpy[3, 8], y, 2.0, x, 21)                     # block 0, all accesses; in a notebook with sliders for both
    >>> ga.show(saxpy[3, 8], y, 2.0, x, 21, block=2, step=0)    # only the first access of each thread of block 2
    >>> print(ga.show(trace))                                   # a trace made before; the same facts in text

Data flows downwards: what a thread reads stands above it, what it writes below it. (Shared memory stands the other way round,
between the threads that fill it and those that read it.) A solid cell is touched, a pale one only lies in the same 32-byte
sector, a hollow thread does nothing; red is outside the tensor. The table counts the whole launch, not only the block.
"""

from __future__ import annotations

import numbers
import textwrap

import numpy as np
import torch

from ..compiler.kernel import Launch
from ..errors import ArgumentError
from ..notebook import notebook_shell
from ..simt.tracing import BANKS, SECTOR, WARP, Trace, groups, share
from .figures.panels import (
    GREY,
    LEFT,
    MOST_ROWS,
    MOST_SECTORS,
    OTHERS,
    RED,
    Panel,
    Sheet,
    colour_of,
    sectors_of,
)
from .figures.picture import WIDTH, _short, _text_width

MOST_LINES = 160  # between threads and one tensor, that a picture can show
VERBS = ("reads", "writes", "updates")


def show(launch, *args, tensors=(), block=0, step=None, warp=0) -> "Shown":
    """Draws which thread of a block touches which element, and what that costs. Nothing is changed: it works on copies.

    launch, args: as in `kernel[grid, block](*args)`, or a Trace. tensors: those whose addresses stand inside a struct or a
    table. block: a number or (x, y, z). step: n-th access of each thread, from 0; None: all. warp: first one drawn, where a
    block has more than fit. Raises ArgumentError for what is not a launch, touches nothing, or is outside the grid.
    """
    if isinstance(launch, Trace) and not args:
        return Shown(launch, block, step, warp)
    if not isinstance(launch, Launch):
        name = getattr(launch, "name", "kernel")
        raise ArgumentError(
            f"show takes kernel[grid, block] and its arguments, got a {type(launch).__name__}: "
            f"write ga.show({name}[grid, block], ...)"
        )
    from ..simt import trace

    here = [
        a.cpu() if isinstance(a, torch.Tensor) and a.is_cuda else a for a in args
    ]  # the trace runs on the CPU
    return Shown(trace(launch, *here, tensors=tensors), block, step, warp)


class Shown:
    """The picture of a trace. Displaying it in a notebook adds sliders; printing it tells the same in text."""

    def __init__(self, trace, block=0, step=None, warp=0):
        self.trace, self.uses, self._known = trace, trace.summary(), trace.known()
        if not self.uses:
            why = (
                f": {trace.reports[0].message}"
                if trace.reports
                else "; expected at least one read or write"
            )
            raise ArgumentError(
                f"{trace.kernel} touches no tensor and no shared memory with these arguments{why}"
            )
        self.steps, self.warps = int(self._known["step"].max()) + 1, -(-trace.threads // WARP)
        for what, value, count in (("step", step, self.steps), ("warp", warp, self.warps)):
            if not (_within(value, count) or (what == "step" and value is None)):
                raise ArgumentError(
                    f"{what} is {value!r}; {trace.kernel} has {what}s 0 to {count - 1} here"
                    + (", None shows all" if what == "step" else "")
                )
        self.block, self.step, self.warp = self._block(block), step, warp

    def _block(self, value):
        grid = self.trace.grid
        if isinstance(value, (tuple, list)) and 1 <= len(value) <= 3:
            x, y, z = (*value, 0, 0)[:3]
            if all(_within(p, size) for p, size in zip((x, y, z), grid)):
                return x + grid[0] * (y + grid[1] * z)
        if _within(value, self.trace.blocks):
            return int(value)
        raise ArgumentError(
            f"block is {value!r}; {self.trace.kernel} was started with grid {_dims(grid)}: "
            f"expected 0 to {self.trace.blocks - 1}"
            + (" or (x, y, z)" if max(grid[1:]) > 1 else "")
        )

    # ---- what is shown --------------------------------------------------------------------------

    def _choose(self):
        """Events to draw, those that set the frame, those of all warps; how many warps and how many accesses fit."""
        mine = self._known[self._known["block"] == self.block]
        for count in (4, 2, 1):
            count = min(count, self.warps - self.warp)
            some = mine[
                (mine["thread"] // WARP >= self.warp) & (mine["thread"] // WARP < self.warp + count)
            ]
            rows = self.trace.requests(
                some
            )  # what scatters, and shared memory, is clearer for one warp
            scattered = (rows["sectors"] > 4) & (
                rows["sectors"] >= 2 * -(-rows["used"] // SECTOR)
            ) | (rows["ways"] > 0)
            if count == 1 or not scattered.any() and self._crowd(some) <= MOST_SECTORS:
                break
        fit = self._fit(some)
        shown, whole = (
            (e[e["step"] == self.step] if self.step is not None else e[e["step"] < fit])
            for e in (some, mine)
        )
        return shown, (some if fit >= self.steps else shown), whole, count, fit

    def _crowd(self, events):
        """The most sectors of one tensor that one access of all these threads touches."""
        each, sector = sectors_of(events)
        is_global = np.array([t.space == "global" for t in self.trace.tensors])[
            events["tensor"][each]
        ]
        each, sector = each[is_global], sector[is_global]
        order, group = groups(events["tensor"][each], events["step"][each], sector)
        one = each[order[np.diff(group, prepend=-1) > 0]]  # an event for each sector
        return np.bincount(groups(events["tensor"][one], events["step"][one])[1]).max(initial=0)

    def _fit(self, events):
        """How many accesses of each thread a picture has room for."""
        fit = self.steps
        for i, traced in enumerate(self.trace.tensors):
            some = events[events["tensor"] == i]
            each, sector = sectors_of(some)
            limits = [
                ((sector,), some["step"][each], MOST_SECTORS)
                if traced.space == "global"
                else ((some["offset"] // (4 * BANKS),), some["step"], MOST_ROWS),
                ((some["thread"], some["offset"], some["kind"]), some["step"], MOST_LINES),
            ]
            for keys, steps, most in limits:
                order, group = groups(*keys)
                first = np.full(group[-1] + 1 if len(group) else 0, self.steps)
                np.minimum.at(first, group, steps[order])
                if len(first) > most:
                    fit = min(fit, int(np.sort(first)[most]))
        return max(fit, 1)

    def _about(self, shown, count, fit):
        """What was launched, and what of it is shown."""
        trace, (gx, gy, gz) = self.trace, self.trace.grid
        whole = f"{_count(trace.blocks, 'block')} of {_count(trace.threads, 'thread')}"
        if max(gy, gz, *trace.block[1:]) > 1:
            whole = f"grid {_dims(trace.grid)}, blocks of {_dims(trace.block)} threads"
        part = f"block {self.block}"
        if max(gy, gz) > 1:
            x, y, z = self.block % gx, self.block // gx % gy, self.block // (gx * gy)
            part = f"block ({x}, {y}, {z})" if gz > 1 else f"block ({x}, {y})"
        if count < self.warps:
            part += (
                f", warps {self.warp} to {self.warp + count - 1}"
                if count > 1
                else f", warp {self.warp}"
            )
            part += f" of 0 to {self.warps - 1}"
        part += (
            f", access {self.step} of 0 to {self.steps - 1}"
            if self.step is not None
            else ", all accesses"
            if fit >= self.steps
            else f", the first {_count(fit, 'access')} of {self.steps:,}"
        )
        return whole, part + ("" if len(shown) else ": no thread touches anything")

    def _remarks(self):
        trace = self.trace
        lines = [f"line {r.line}: {r.message}" for r in trace.reports]
        lines = lines[:3] + ([f"and {len(lines) - 3} more"] if len(lines) > 3 else [])
        return lines + (
            ["the launch made more accesses than a trace keeps: these are the first ones"]
            if trace.truncated
            else []
        )

    def _code(self, line):
        lines = self.trace.source.splitlines()
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""

    # ---- in text --------------------------------------------------------------------------------

    def __str__(self):
        shown, _, _, count, fit = self._choose()
        whole, part = self._about(shown, count, fit)
        out = [f"{self.trace.kernel}, {whole}; {part}"]
        for i, traced in enumerate(self.trace.tensors):
            some = shown[shown["tensor"] == i]
            did = [
                f"{verb} {_elements(traced, these)}"
                for k, verb in enumerate(VERBS)
                if len(these := some[some["kind"] == k])
            ]
            if len(beyond := some[self.trace.outside(some)]):
                did.append(f"OUTSIDE: {_elements(traced, beyond)} of {traced.elements:,}")
            out += [f"  {traced.name}: {'; '.join(did)}"] if did else []
        for line in dict.fromkeys(use.line for use in self.uses):
            out.append(f"line {line}: {self._code(line)}".rstrip(": "))
            out += ["  " + str(use).split(", ", 1)[1] for use in self.uses if use.line == line]
        return "\n".join(out + self._remarks())

    __repr__ = __str__

    # ---- drawn ----------------------------------------------------------------------------------

    def picture(self) -> str:
        """The picture as SVG, in colours that suit light and dark pages."""
        (shown, frame, every, count, fit), sheet, trace, y = (
            self._choose(),
            Sheet(),
            self.trace,
            16.0,
        )
        whole, part = self._about(shown, count, fit)
        sheet.text(0, y, trace.kernel, 15, weight=650)
        sheet.text(_text_width(trace.kernel, 15) + 14, y, f"{whole}  ·  {part}", 12, sheet.soft)
        for line in (
            list(dict.fromkeys(shown["line"].tolist()))[:3] if self.step is not None else ()
        ):
            y += 20
            sheet.mono(0, y, f"{line:>4}  {_short(self._code(line), 100)}")
        for remark in self._remarks():
            for k, words in enumerate(textwrap.wrap(remark, 112)):
                y += 17 if k else 20
                sheet.text(0 if k == 0 else 16, y, words, 12, RED, weight=600)
        threads, y = range(self.warp * WARP, min((self.warp + count) * WARP, trace.threads)), y + 24
        panels = [
            Panel(trace, i, shown, frame, every, threads)
            for i in np.unique(frame["tensor"]).tolist()
        ]
        panels.sort(
            key=lambda panel: panel.order
        )  # what is only read first, what is only written last
        rest = list(panels)
        while rest:
            row, rest = (
                (rest[:2], rest[2:])
                if all(panel.small for panel in rest[:2])
                else (rest[:1], rest[1:])
            )
            above, half = (
                max(p.above for p in row),
                (WIDTH - 30) / 2,
            )  # the threads of two stand side by side
            y = (
                max(
                    p.draw(sheet, k * (half + 30), y, half if len(row) == 2 else WIDTH, above)
                    for k, p in enumerate(row)
                )
                + 26
            )
        y = self._table(sheet, self._legend(sheet, y, shown, panels, len(every) > len(shown)))
        return sheet.svg(y + 4, f"{trace.kernel}, {whole}; {part}")

    def _legend(self, sheet, y, shown, panels, others):
        requests, x, entries = (
            self.trace.requests(shown),
            float(LEFT),
            [(colour_of(self.warp * WARP), 0.85, "touched")],
        )
        if (requests["used"] < requests["sectors"] * SECTOR).any():
            entries.append((colour_of(self.warp * WARP), 0.3, "only in the same 32-byte sector"))
        if others and any(panel.shared for panel in panels):
            entries.append((*OTHERS, "by another warp"))
        if any(len(np.unique(panel.events["thread"])) < len(panel.threads) for panel in panels):
            entries.append((None, 0, "thread without an access"))
        if self.trace.outside(shown).any():
            entries.append((RED, 0.85, "outside the tensor"))
        for colour, opacity, words in entries if len(shown) else ():
            sheet.boxes([(x, y - 9, 11, 11)], colour, opacity) if colour else sheet.frames(
                [(x, y - 9, 11, 11)], GREY
            )
            sheet.text(x + 17, y, words, 11, sheet.soft)
            x += _text_width(words, 11) + 28
        return y + 26 * (len(shown) > 0)

    def _table(self, sheet, y):
        """A row for each source line and tensor, with the columns that its kinds of memory need. Returns where it ends."""
        spaces = {use.space for use in self.uses}
        columns = [
            ("accesses", 340, lambda u: f"{u.count:,}"),
            ("per thread", 430, lambda u: u.per_thread),
        ]
        if "global" in spaces:
            columns += [
                (
                    "sectors per request",
                    560,
                    lambda u: "" if u.sectors is None else f"{u.sectors:.1f}",
                ),
                ("of their bytes used", 690, lambda u: "" if u.used is None else share(u.used)),
            ]
        if "shared" in spaces:
            columns += [
                (
                    "bank conflict",
                    796,
                    lambda u: "" if u.ways is None else f"{u.ways}-way" if u.ways > 1 else "none",
                )
            ]
        shift = WIDTH - 4 - columns[-1][1]
        sheet.text(0, y, "The whole launch", 12.5, weight=600)
        for title, end, _ in columns:
            sheet.text(end + shift, y, title, 11, sheet.soft, "end")
        y += 7
        for line in dict.fromkeys(use.line for use in self.uses):
            sheet.line(0, y, WIDTH, y, opacity=0.8)
            sheet.mono(0, y + 17, f"{line:>4}  {_short(self._code(line), 100)}")
            y += 18
            for use in (use for use in self.uses if use.line == line):
                y += 17
                sheet.text(36, y - 1, use.tensor, 12, weight=600)
                sheet.text(42 + 1.08 * _text_width(use.tensor, 12), y - 1, use.kind, 12, sheet.soft)
                costly = (
                    use.ways > 1
                    if use.space == "shared"
                    else use.used <= 0.5 and use.sectors >= 2 * use.needed
                )
                for title, end, value in (column for column in columns if column[2](use)):
                    red = costly and title not in ("accesses", "per thread")
                    sheet.text(
                        end + shift,
                        y - 1,
                        value(use),
                        12,
                        RED if red else None,
                        "end",
                        600 if red else 400,
                    )
            y += 8
        return y

    # ---- in a notebook --------------------------------------------------------------------------

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/svg+xml": self.picture(), "text/plain": str(self)}

    def _ipython_display_(self):
        """Sliders, where there are ipywidgets, and the picture: as an output of its own it stays in the saved notebook."""
        from IPython.display import display

        sliders = self._sliders() if notebook_shell() is not None else None
        if sliders is not None:
            view = {"version_major": 2, "version_minor": 0, "model_id": sliders.model_id}
            display(
                {
                    "application/vnd.jupyter.widget-view+json": view,
                    "text/plain": "Run this cell to choose block and access with sliders.",
                },
                raw=True,
            )
        self._handle = display(self._repr_mimebundle_(), raw=True, display_id=True)

    def _sliders(self):
        """A box of sliders for what there is more than one of; None without ipywidgets or without a choice."""
        try:
            import ipywidgets as W
        except ImportError:
            return None
        look, offered = (
            dict(layout=W.Layout(width="250px"), style={"description_width": "46px"}),
            {},
        )
        if self.trace.blocks > 1:
            offered["block"] = W.IntSlider(
                self.block, 0, self.trace.blocks - 1, description="block", **look
            )
        if self.steps > 1:
            choices = [("all", -1), *((str(k), k) for k in range(min(self.steps, 1000)))]
            chosen = -1 if self.step is None else min(self.step, choices[-1][1])
            offered["step"] = W.SelectionSlider(
                options=choices, value=chosen, description="access", **look
            )
        if self._choose()[3] < self.warps:
            offered["warp"] = W.IntSlider(self.warp, 0, self.warps - 1, description="warp", **look)

        def moved(_):
            for name, slider in offered.items():
                setattr(self, name, None if slider.value < 0 else slider.value)  # -1: all accesses
            self._handle.update(self._repr_mimebundle_(), raw=True)

        for slider in offered.values():
            slider.observe(moved, "value")
        return (
            W.HBox(list(offered.values()), layout=W.Layout(flex_flow="row wrap"))
            if offered
            else None
        )


# ---- words --------------------------------------------------------------------------------------


def _within(value, count):
    return (
        isinstance(value, numbers.Integral) and not isinstance(value, bool) and 0 <= value < count
    )


def _count(n, what):
    return f"{n:,} {what}{'' if n == 1 else 'es' if what.endswith('s') else 's'}"


def _dims(shape):
    return " × ".join(map(str, shape[: 3 if shape[2] > 1 else 2 if shape[1] > 1 else 1]))


def _elements(traced, events):
    """Which elements these events touch, in words."""
    item, found = traced.itemsize, set()
    for offset, size in np.unique(np.stack([events["offset"], events["bytes"]]), axis=1).T.tolist():
        found.update(range(offset // item, (offset + size - 1) // item + 1))
    found = sorted(found)
    gaps = {b - a for a, b in zip(found, found[1:])}
    if len(found) == 1:
        return f"element {found[0]:,}"
    if gaps == {1}:
        return f"elements {found[0]:,} to {found[-1]:,}"
    if len(gaps) == 1 and len(found) > 2:
        return f"elements {found[0]:,} to {found[-1]:,} in steps of {min(gaps):,}"
    return f"{len(found):,} elements between {found[0]:,} and {found[-1]:,}"
