"""`ga.show` runs a kernel on copies of its tensors and draws which thread touches which element.

    ga.show(saxpy[3, 8], y, 2.0, x, 21)                     # block 0; sliders in a notebook
    ga.show(saxpy[3, 8], y, 2.0, x, 21, block=2, step=0)    # each thread's first access
    print(ga.show(trace))                                   # a trace made before, in text

Data flows downwards: what a thread reads is above it, what it writes below it. Shared memory is
between the threads that fill it and those that read it. A solid cell is touched, a pale one only
lies in the same 32-byte sector, a hollow thread does nothing; red is outside the tensor. The table
counts the whole launch, not only the block.
"""

from __future__ import annotations

import numbers
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..compiler import Launch
from ..errors import ArgumentError
from ..notebook import notebook_shell
from ..simt import BANKS, SECTOR, WARP, Trace, groups, share
from ..simt import trace as run_traced
from .figures.access_panels import (
    LEFT,
    MOST_ROWS,
    MOST_SECTORS,
    OTHERS,
    Panel,
    Sheet,
    colour_of,
)
from .figures.drawing import GREY, RED, WIDTH, bundle, live_bundle, plural, shorten, text_width

# lines between threads and one tensor, that a picture can show
MOST_LINES = 160
VERBS = ("reads", "writes", "updates")
# What columns of the table mean.
MEANINGS = {
    "sectors per request": "how many pieces of 32 bytes memory moves for one access of a warp",
    "of their bytes used": "the share that some thread asked for",
    "bank conflict": "how many turns one access of a warp takes at the same bank",
}


def show(
    launch: Launch | Trace,
    *args: Any,
    tensors: Iterable[torch.Tensor] = (),
    block: int | tuple[int, ...] = 0,
    step: int | None = None,
    warp: int = 0,
) -> AccessView:
    """Draw which thread of a block touches which element, and what that costs.

    Nothing is changed: the kernel runs on copies of the tensors, on the CPU.

    Args:
        launch: `kernel[grid, block]`; or a simt.Trace, and no arguments.
        *args: the kernel's arguments, tensors on any device and numbers.
        tensors: those whose addresses are in a struct or a table. Default: none.
        block: a number or (x, y, z). Default: the first.
        step: which access of each thread, from 0; None, the default: all.
        warp: the first one drawn, where a block has more than fit. Default: 0.

    Returns:
        An AccessView, which is a picture with sliders in a notebook and text in print().

    Raises:
        ArgumentError: for what is no launch, touches nothing, or is outside the grid.
        BackendError: without a C++ compiler.

    Example:
        >>> kernel = ga.Kernel("accumulate", "accumulate_v1", GRAD_T="float")
        >>> view = ga.show(kernel[2, 32], torch.zeros(50), torch.ones(50), 50)
        >>> print(view)
        accumulate_v1...
    """
    if isinstance(launch, Trace) and not args:
        return AccessView(launch, block, step, warp)
    if not isinstance(launch, Launch):
        name = getattr(launch, "name", "kernel")
        raise ArgumentError(
            f"show takes kernel[grid, block] and its arguments, got a {type(launch).__name__}: "
            f"write ga.show({name}[grid, block], ...)"
        )
    on_cpu = [a.cpu() if isinstance(a, torch.Tensor) and a.is_cuda else a for a in args]
    return AccessView(run_traced(launch, *on_cpu, tensors=tensors), block, step, warp)


class AccessView:
    """The picture of a trace. A notebook adds sliders; print() gives the same facts in text.

    Args:
        trace: of one launch, from simt.trace.
        block: a number or (x, y, z).
        step: which access of each thread, from 0; None: all.
        warp: the first one drawn, where a block has more than fit.

    Raises:
        ArgumentError: for a launch that touches nothing, and for a block, step or warp
            outside of it.
    """

    def __init__(self, trace, block=0, step=None, warp=0):
        self.trace = trace
        self.uses = trace.summary()
        self._events = trace.known()
        if not self.uses:
            reason = "; expected at least one read or write"
            if trace.reports:
                reason = f": {trace.reports[0].message}"
            raise ArgumentError(
                f"{trace.kernel} touches no tensor and no shared memory with these arguments"
                f"{reason}"
            )
        self.steps = int(self._events["step"].max()) + 1
        self.warps = -(-trace.threads // WARP)
        if step is not None and not _is_index(step, self.steps):
            raise ArgumentError(
                f"step is {step!r}; {trace.kernel} has steps 0 to {self.steps - 1} here, "
                "None shows all"
            )
        if not _is_index(warp, self.warps):
            raise ArgumentError(
                f"warp is {warp!r}; {trace.kernel} has warps 0 to {self.warps - 1} here"
            )
        self.block = self._block(block)
        self.step = step
        self.warp = warp

    def _block(self, value):
        """The number of a block that was given as a number or as (x, y, z)."""
        grid = self.trace.grid
        if isinstance(value, (tuple, list)) and 1 <= len(value) <= 3:
            x, y, z = (*value, 0, 0)[:3]
            if all(_is_index(p, size) for p, size in zip((x, y, z), grid)):
                return x + grid[0] * (y + grid[1] * z)
        if _is_index(value, self.trace.blocks):
            return int(value)
        coordinates = " or (x, y, z)" if max(grid[1:]) > 1 else ""
        raise ArgumentError(
            f"block is {value!r}; {self.trace.kernel} was started with grid {_dims(grid)}: "
            f"expected 0 to {self.trace.blocks - 1}{coordinates}"
        )

    # ---- what is drawn --------------------------------------------------------------------------

    def _of_block(self):
        return self._events[self._events["block"] == self.block]

    def _choose(self):
        """(events to draw, events that set the frame, events of all warps, how many warps are
        drawn, how many accesses of each thread fit)."""
        of_block = self._of_block()
        warps = of_block["thread"] // WARP
        for count in (4, 2, 1):
            count = min(count, self.warps - self.warp)
            some = of_block[(warps >= self.warp) & (warps < self.warp + count)]
            if count == 1 or self._clear_together(some):
                break
        fit = self._fit(some)
        if self.step is None:
            drawn = some[some["step"] < fit]
            whole = of_block[of_block["step"] < fit]
        else:
            drawn = some[some["step"] == self.step]
            whole = of_block[of_block["step"] == self.step]
        return drawn, (some if fit >= self.steps else drawn), whole, count, fit

    def _clear_together(self, events):
        """Whether several warps can be drawn in one picture.

        Scattered accesses and shared memory are clearer for one warp."""
        requests = self.trace.requests(events)
        needed = -(-requests["used"] // SECTOR)
        scattered = (requests["sectors"] > 4) & (requests["sectors"] >= 2 * needed)
        if (scattered | (requests["bank_turns"] > 0)).any():
            return False
        return self._most_sectors(events) <= MOST_SECTORS

    def _most_sectors(self, events):
        """The most sectors of one tensor that one access of all these threads touches."""
        event, sector = self.trace.sectors_of(events)
        is_global = np.array([t.space == "global" for t in self.trace.tensors])
        kept = is_global[events["tensor"][event]]
        event, sector = event[kept], sector[kept]
        order, group = groups(events["tensor"][event], events["step"][event], sector)
        # an event for each sector
        first = event[order[np.diff(group, prepend=-1) > 0]]
        counts = groups(events["tensor"][first], events["step"][first])[1]
        return np.bincount(counts).max(initial=0)

    def _fit(self, events):
        """How many accesses of each thread a picture has room for."""
        fit = self.steps
        for i, traced in enumerate(self.trace.tensors):
            some = events[events["tensor"] == i]
            if traced.space == "global":
                event, sector = self.trace.sectors_of(some)
                cells = ((sector,), some["step"][event], MOST_SECTORS)
            else:
                cells = ((some["offset"] // (4 * BANKS),), some["step"], MOST_ROWS)
            lines = ((some["thread"], some["offset"], some["kind"]), some["step"], MOST_LINES)
            for keys, steps, most in (cells, lines):
                order, group = groups(*keys)
                # the access in which each of them is first needed
                first = np.full(group[-1] + 1 if len(group) else 0, self.steps)
                np.minimum.at(first, group, steps[order])
                if len(first) > most:
                    fit = min(fit, int(np.sort(first)[most]))
        return max(fit, 1)

    def _about(self, drawn, count, fit):
        """(what was launched, which part of it is drawn), in words."""
        trace, (gx, gy, gz) = self.trace, self.trace.grid
        launched = f"{plural(trace.blocks, 'block')} of {plural(trace.threads, 'thread')}"
        if max(gy, gz, *trace.block[1:]) > 1:
            launched = f"grid {_dims(trace.grid)}, blocks of {_dims(trace.block)} threads"
        x, y, z = self.block % gx, self.block // gx % gy, self.block // (gx * gy)
        if gz > 1:
            part = f"block ({x}, {y}, {z})"
        else:
            part = f"block ({x}, {y})" if gy > 1 else f"block {self.block}"
        if count < self.warps:
            last = self.warp + count - 1
            warps = f"warps {self.warp} to {last}" if count > 1 else f"warp {self.warp}"
            part += f", {warps} of 0 to {self.warps - 1}"
        if self.step is not None:
            part += f", access {self.step} of 0 to {self.steps - 1}"
        elif fit >= self.steps:
            part += ", all accesses"
        else:
            part += f", the first {plural(fit, 'access')} of {self.steps:,}"
        if not len(drawn):
            part += ": no thread touches anything"
        return launched, part

    def _remarks(self):
        """Sentences about accesses outside a tensor and a trace that was cut."""
        reports = self.trace.reports
        remarks = [f"line {report.line}: {report.message}" for report in reports[:3]]
        if len(reports) > 3:
            remarks.append(f"and {len(reports) - 3} more")
        remarks += [f"line {note.line}, a note: {note.message}" for note in self.trace.notes[:3]]
        if self.trace.truncated:
            remarks.append(
                "the launch made more accesses than a trace keeps: these are the first ones"
            )
        return remarks

    def _code(self, line):
        """A line of the kernel's source."""
        lines = self.trace.source.splitlines()
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""

    # ---- in text --------------------------------------------------------------------------------

    def __str__(self):
        drawn, _, _, count, fit = self._choose()
        launched, part = self._about(drawn, count, fit)
        text = [f"{self.trace.kernel}, {launched}; {part}"]
        for i, traced in enumerate(self.trace.tensors):
            some = drawn[drawn["tensor"] == i]
            facts = []
            for kind, verb in enumerate(VERBS):
                of_kind = some[some["kind"] == kind]
                if len(of_kind):
                    facts.append(f"{verb} {_elements(traced, of_kind)}")
            outside = some[self.trace.outside(some)]
            if len(outside):
                facts.append(f"OUTSIDE: {_elements(traced, outside)} of {traced.elements:,}")
            if facts:
                text.append(f"  {traced.name}: {'; '.join(facts)}")
        for line in dict.fromkeys(use.line for use in self.uses):
            text.append(f"line {line}: {self._code(line)}".rstrip(": "))
            text += ["  " + str(use).split(", ", 1)[1] for use in self.uses if use.line == line]
        return "\n".join(text + self._remarks())

    __repr__ = __str__

    # ---- drawn ----------------------------------------------------------------------------------

    def picture(self, in_verdict: bool = False) -> str:
        """The picture as SVG, in colours that suit light and dark pages.

        Args:
            in_verdict: whether it stands under a verdict, which names the mistakes. No lesson
                explains the banks of shared memory, so they are left out there.
        """
        drawn, frame, whole, count, fit = self._choose()
        trace = self.trace
        sheet = Sheet()
        launched, part = self._about(drawn, count, fit)
        y = 16.0
        sheet.text(0, y, trace.kernel, 15, weight=650)
        heading = f"{launched}  ·  {part}"
        sheet.text(text_width(trace.kernel, 15) + 14, y, heading, 12, sheet.soft)
        if self.step is not None:
            for line in list(dict.fromkeys(drawn["line"].tolist()))[:3]:
                y += 20
                sheet.mono(0, y, f"{line:>4}  {shorten(self._code(line), 100)}")
        for remark in () if in_verdict else self._remarks():
            for k, words in enumerate(textwrap.wrap(remark, 112)):
                y += 17 if k else 20
                sheet.text(0 if k == 0 else 16, y, words, 12, RED, weight=600)
        y += 24
        threads = range(self.warp * WARP, min((self.warp + count) * WARP, trace.threads))
        red = trace.outside(drawn)
        panels = [
            Panel(trace, i, drawn, red, frame, whole, threads, banks=not in_verdict)
            for i in np.unique(frame["tensor"]).tolist()
        ]
        panels.sort(key=lambda panel: panel.order)
        y = _draw_panels(sheet, panels, y)
        y = self._draw_legend(sheet, y, drawn, panels, len(whole) > len(drawn))
        y = self._draw_table(sheet, y, banks=not in_verdict)
        return sheet.svg(y + 4, f"{trace.kernel}, {launched}; {part}")

    def _draw_legend(self, sheet, y, drawn, panels, has_other_warps):
        """What the colours mean.

        Returns:
            Where the legend ends.
        """
        if not len(drawn):
            return y
        requests = self.trace.requests(drawn)
        colour = colour_of(self.warp * WARP)
        entries = [(colour, 0.85, "touched")]
        if (requests["used"] < requests["sectors"] * SECTOR).any():
            entries.append((colour, 0.3, "only in the same 32-byte sector"))
        if has_other_warps and any(panel.shared for panel in panels):
            entries.append((*OTHERS, "by another warp"))
        if any(len(np.unique(panel.events["thread"])) < len(panel.threads) for panel in panels):
            entries.append((None, 0, "thread without an access"))
        if self.trace.outside(drawn).any():
            entries.append((RED, 0.85, "outside the tensor"))
        x = float(LEFT)
        for colour, opacity, words in entries:
            box = (x, y - 9, 11, 11)
            if colour:
                sheet.boxes([box], colour, opacity)
            else:
                sheet.frames([box], GREY)
            sheet.text(x + 17, y, words, 11, sheet.soft)
            x += text_width(words, 11) + 28
        return y + 26

    def _draw_table(self, sheet, y, banks):
        """A row for each source line and tensor.

        There are columns for the kinds of memory that the kernel uses.

        Returns:
            Where the table ends.
        """
        spaces = {use.space for use in self.uses}
        columns = [
            ("accesses", 340, lambda use: f"{use.count:,}"),
            ("per thread", 430, lambda use: use.per_thread),
        ]
        if "global" in spaces:
            columns.append(("sectors per request", 560, _sectors_cell))
            columns.append(("of their bytes used", 690, _used_cell))
        if "shared" in spaces and banks:
            columns.append(("bank conflict", 796, _conflict_cell))
        shift = WIDTH - 4 - columns[-1][1]
        sheet.text(0, y, "The whole launch", 12.5, weight=600)
        for title, end, _ in columns:
            sheet.text(end + shift, y, title, 11, sheet.soft, "end")
        y += 7
        for line in dict.fromkeys(use.line for use in self.uses):
            sheet.line(0, y, WIDTH, y, opacity=0.8)
            sheet.mono(0, y + 17, f"{line:>4}  {shorten(self._code(line), 100)}")
            y += 18
            for use in (use for use in self.uses if use.line == line):
                y += 17
                sheet.text(36, y - 1, use.tensor, 12, weight=600)
                kind_x = 42 + 1.08 * text_width(use.tensor, 12)
                sheet.text(kind_x, y - 1, use.kind, 12, sheet.soft)
                for title, end, cell in columns:
                    red = _is_costly(use) and title not in ("accesses", "per thread")
                    colour, weight = (RED, 600) if red else (None, 400)
                    if cell(use):
                        sheet.text(end + shift, y - 1, cell(use), 12, colour, "end", weight)
            y += 8
        return self._draw_meanings(sheet, y + 6, [title for title, _, _ in columns])

    def _draw_meanings(self, sheet, y, titles):
        """A line for each column that needs one.

        Returns:
            Where they end.
        """
        for title in titles:
            if title in MEANINGS:
                y += 16
                sheet.text(0, y, f"{title}: {MEANINGS[title]}", 11, sheet.soft)
        costly = {use.space for use in self.uses if _is_costly(use)}
        if "bank conflict" not in titles:
            costly.discard("shared")
        if costly:
            y += 16
            words = "red: half of the bytes or more are moved for nothing"
            if "shared" in costly:
                words = "red: bytes that are moved for nothing, or turns that are waited for"
            sheet.text(0, y, words, 11, RED)
        return y + 4

    # ---- in a notebook --------------------------------------------------------------------------

    def _repr_mimebundle_(self, include=None, exclude=None):
        return bundle(self.picture(), str(self))

    def _ipython_display_(self):
        """Sliders, where there are ipywidgets, and the picture.

        The picture is an output of its own, so that it stays in the saved notebook."""
        from IPython.display import display

        sliders = self._sliders() if notebook_shell() is not None else None
        if sliders is not None:
            hint = "Run this cell to choose block and access with sliders."
            display(live_bundle(sliders, hint), raw=True)
        self._shown = display(self._repr_mimebundle_(), raw=True, display_id=True)

    def _sliders(self):
        """A box of sliders for what there is more than one of.

        None without ipywidgets or without a choice."""
        try:
            import ipywidgets as W
        except ImportError:
            return None
        look = dict(layout=W.Layout(width="250px"), style={"description_width": "46px"})
        sliders = {}
        if self.trace.blocks > 1:
            last = self.trace.blocks - 1
            sliders["block"] = W.IntSlider(self.block, 0, last, description="block", **look)
        if self.steps > 1:
            # -1 stands for all
            choices = [("all", -1), *((str(k), k) for k in range(min(self.steps, 1000)))]
            value = -1 if self.step is None else min(self.step, choices[-1][1])
            options = dict(options=choices, value=value, description="access")
            sliders["step"] = W.SelectionSlider(**options, **look)
        warps_drawn = self._choose()[3]
        if warps_drawn < self.warps:
            last = self.warps - 1
            sliders["warp"] = W.IntSlider(self.warp, 0, last, description="warp", **look)
        if not sliders:
            return None

        def redraw(_):
            for name, slider in sliders.items():
                setattr(self, name, None if slider.value < 0 else slider.value)
            self._shown.update(self._repr_mimebundle_(), raw=True)

        for slider in sliders.values():
            slider.observe(redraw, "value")
        return W.HBox(list(sliders.values()), layout=W.Layout(flex_flow="row wrap"))


def _draw_panels(sheet, panels, y):
    """The panels below each other, two small ones side by side.

    Returns:
        Where they end.
    """
    rest = list(panels)
    while rest:
        count = 2 if len(rest) > 1 and all(panel.small for panel in rest[:2]) else 1
        row, rest = rest[:count], rest[count:]
        # threads of panels that stand side by side have the same height
        above = max(panel.above for panel in row)
        width = (WIDTH - 30 * (count - 1)) / count
        ends = [panel.draw(sheet, k * (width + 30), y, width, above) for k, panel in enumerate(row)]
        y = max(ends) + 26
    return y


def _sectors_cell(use):
    return "" if use.sectors is None else f"{use.sectors:.1f}"


def _used_cell(use):
    return "" if use.used is None else share(use.used)


def _conflict_cell(use):
    if use.bank_turns is None:
        return ""
    return f"{use.bank_turns}-way" if use.bank_turns > 1 else "none"


def _is_costly(use):
    """Whether most of the memory traffic, or of the banks' turns, is for nothing."""
    if use.space == "shared":
        return use.bank_turns > 1
    return use.used <= 0.5 and use.sectors >= 2 * use.needed


# ---- words --------------------------------------------------------------------------------------


def _is_index(value, count):
    """Whether value is a whole number from 0 to count - 1."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_whole and 0 <= value < count


def _dims(shape):
    """A grid or block without the dimensions of 1 at its end."""
    if shape[2] > 1:
        used = 3
    else:
        used = 2 if shape[1] > 1 else 1
    return " × ".join(map(str, shape[:used]))


def _elements(traced, events):
    """Which elements these events touch, in words."""
    item = traced.itemsize
    touched = set()
    for offset, size in np.unique(np.stack([events["offset"], events["bytes"]]), axis=1).T.tolist():
        touched.update(range(offset // item, (offset + size - 1) // item + 1))
    touched = sorted(touched)
    first, last = touched[0], touched[-1]
    gaps = {b - a for a, b in zip(touched, touched[1:])}
    if len(touched) == 1:
        return f"element {first:,}"
    if gaps == {1}:
        return f"elements {first:,} to {last:,}"
    if len(gaps) == 1 and len(touched) > 2:
        return f"elements {first:,} to {last:,} in steps of {min(gaps):,}"
    return f"{len(touched):,} elements between {first:,} and {last:,}"
