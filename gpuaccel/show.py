"""Which thread touches which element: `ga.show` runs a kernel on copies of its tensors and draws the accesses of one block.

    >>> ga.show(saxpy[3, 8], y, 2.0, x, 21)                 # block 0, all accesses; in a notebook with a slider for each
    >>> ga.show(saxpy[3, 8], y, 2.0, x, 21, block=2, step=0)    # only the first access of each thread of block 2
    >>> print(ga.show(trace))                               # a trace made before; the same facts in text

Data flows downwards: what a thread reads stands above it, what it writes below it. (Shared memory stands the other way round,
between the threads that fill it and those that read it.) A solid cell is touched, a pale one only lies in the same 32-byte
sector, a hollow thread does nothing; red is outside the tensor. The table counts the whole launch, not only the block.
"""
from __future__ import annotations

import numbers
from html import escape

import numpy as np

from .errors import ArgumentError
from .kernel import Launch
from .picture import RUN_COLOURS, WIDTH, _Ink, _short, _text_width
from .simt.tracing import ATOMIC, BANKS, KINDS, READ, SECTOR, WARP, Trace, _groups, bank_ways, share
from .widgets import _kernel

WARP_COLOURS, RED, GREY = RUN_COLOURS[:4], "#e5484d", "#8d949e"
MOST_SECTORS, MOST_ROWS, MOST_LINES = 40, 34, 512       # of one tensor, that one picture can show
LEFT, LINK, CELL, BAND = 58, 60, 20, 30                 # left margin; heights of the lines, the cells, the row of threads


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
        raise ArgumentError(f"show takes kernel[grid, block] and its arguments, got {type(launch).__name__}: "
                            f"write ga.show({name}[grid, block], ...) instead of ga.show({name}, ...)")
    from .simt import trace
    return Shown(trace(launch, *args, tensors=tensors), block, step, warp)


class Shown:
    """The picture of a trace. Displaying it in a notebook adds sliders; printing it tells the same in text."""

    def __init__(self, trace, block=0, step=None, warp=0):
        self.trace, self.uses, self._known = trace, trace.summary(), trace.known()
        if not self.uses:
            why = f": {trace.reports[0].message}" if trace.reports else "; expected at least one read or write"
            raise ArgumentError(f"{trace.kernel} touches no tensor and no shared memory with these arguments{why}")
        self.block = self._block(block)
        self.steps = int(self._known["step"].max()) + 1
        self.warps = -(-trace.threads // WARP)
        for what, value, count in (("step", step, self.steps), ("warp", warp, self.warps)):
            if not (value is None and what == "step") and not (isinstance(value, numbers.Integral) and 0 <= value < count):
                raise ArgumentError(f"{what} is {value!r}; {trace.kernel} has {what}s 0 to {count - 1} here"
                                    + (", None shows all" if what == "step" else ""))
        self.step, self.warp = step, warp

    def _block(self, value):
        grid = self.trace.grid
        place = (*value, 0, 0)[:3] if isinstance(value, (tuple, list)) and value else None
        if place and all(isinstance(p, numbers.Integral) and 0 <= p < g for p, g in zip(place, grid)):
            return place[0] + grid[0] * (place[1] + grid[1] * place[2])
        if isinstance(value, numbers.Integral) and 0 <= value < self.trace.blocks:
            return int(value)
        raise ArgumentError(f"block is {value!r}; {self.trace.kernel} was started with grid {_dims(grid)}: "
                            f"blocks 0 to {self.trace.blocks - 1}")

    # ---- what is drawn ----------------------------------------------------------------------------------------------

    def _choose(self):
        """The events to draw, those that give the picture its frame, the number of warps, and the accesses that fit."""
        mine = self._known[self._known["block"] == self.block]
        for count in (4, 2, 1):
            count = min(count, self.warps - self.warp)
            some = mine[(mine["thread"] // WARP >= self.warp) & (mine["thread"] // WARP < self.warp + count)]
            if len(_sectors(some)[0]) == 0 or max(self._crowd(some)) <= MOST_SECTORS:
                break
        fit = self._fit(some)
        drawn = some[some["step"] == self.step] if self.step is not None else some[some["step"] < fit]
        return drawn, (some if fit >= self.steps else drawn), count, fit

    def _crowd(self, events):
        """Sectors that one access of all these threads touches, for every tensor in global memory."""
        each, sector = _sectors(events)
        order, group = _groups(events["tensor"][each], events["step"][each], sector)
        first = each[order[np.diff(group, prepend=-1) > 0]]
        spaces = [t.space == "global" for t in self.trace.tensors]
        return [0, *(np.unique(events["step"][first[events["tensor"][first] == i]], return_counts=True)[1].max(initial=0)
                     for i, is_global in enumerate(spaces) if is_global)]

    def _fit(self, events):
        """How many accesses of each thread the picture has room for."""
        fit = self.steps
        for i, traced in enumerate(self.trace.tensors):
            some = events[events["tensor"] == i]
            each, sector = _sectors(some)
            sector, most = (sector, MOST_SECTORS) if traced.space == "global" else (some["offset"][each] // (4 * BANKS), MOST_ROWS)
            for keys, steps, most in (((sector,), some["step"][each], most),
                                      ((some["thread"], some["offset"], some["kind"]), some["step"], MOST_LINES)):
                order, group = _groups(*keys)
                first = np.full(group[-1] + 1 if len(group) else 0, self.steps)
                np.minimum.at(first, group, steps[order])
                if len(first) > most:
                    fit = min(fit, int(np.sort(first)[most]))
        return max(fit, 1)

    def _about(self, drawn, count, fit):
        """Two lines of words: the launch; what of it is drawn."""
        trace = self.trace
        of = lambda n, what: f"{n:,} {what}{'s' * (n != 1)}"                           # noqa: E731
        whole = f"{of(trace.blocks, 'block')} of {of(trace.threads, 'thread')}"
        if max(trace.grid[1:]) > 1 or max(trace.block[1:]) > 1:
            whole = f"grid {_dims(trace.grid)} of blocks {_dims(trace.block)}: {whole}"
        part = f"block {self.block}"
        if max(trace.grid[1:]) > 1:
            part += f" (x {self.block % trace.grid[0]}, y {self.block // trace.grid[0] % trace.grid[1]}"
            part += f", z {self.block // (trace.grid[0] * trace.grid[1])})" if trace.grid[2] > 1 else ")"
        if count < self.warps:
            part += f", warp {self.warp}" + (f" to {self.warp + count - 1}" if count > 1 else "") + f" of {self.warps}"
        if self.step is not None:
            part += f", access {self.step} of 0 to {self.steps - 1}"
        elif fit < self.steps:
            part += f", accesses 0 to {fit - 1} of 0 to {self.steps - 1}"
        else:
            part += ", all accesses"
        return whole, part + ("" if len(drawn) else ": no thread touches anything here")

    def _remarks(self):
        trace = self.trace
        lines = [f"{r.kind}, line {r.line}: {r.message}" for r in trace.reports]
        lines = lines[:3] + ([f"and {len(lines) - 3} more reports"] if len(lines) > 3 else [])
        return lines + (["the launch made more accesses than a trace keeps: the counts are of the first ones"] if trace.truncated else [])

    def _code(self, line):
        lines = self.trace.source.splitlines()
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""

    # ---- in text ----------------------------------------------------------------------------------------------------

    def __str__(self):
        drawn, _, count, fit = self._choose()
        whole, part = self._about(drawn, count, fit)
        out = [f"{self.trace.kernel}: {whole}", part + (":" if len(drawn) else "")]
        for i, traced in enumerate(self.trace.tensors):
            some = drawn[drawn["tensor"] == i]
            did = [f"{kind}s {_elements(traced, some[some['kind'] == k])}" for k, kind in enumerate(KINDS) if (some["kind"] == k).any()]
            beyond = some[self.trace.outside(some)]
            did += [f"OUTSIDE: {_elements(traced, beyond)}, it has {traced.elements:,}"] if len(beyond) else []
            out += [f"  {traced.name}: {'; '.join(did)}"] if did else []
        for line in dict.fromkeys(use.line for use in self.uses):
            out.append(f"line {line}: {self._code(line)}".rstrip(": "))
            out += ["  " + str(use).split(", ", 1)[1] for use in self.uses if use.line == line]
        return "\n".join(out + self._remarks())

    __repr__ = __str__

    # ---- drawn ------------------------------------------------------------------------------------------------------

    def picture(self) -> str:
        """The picture as SVG, in colours that suit light and dark pages."""
        drawn, frame, count, fit = self._choose()
        ink, trace = _Ink(themed=False), self.trace
        whole, part = self._about(drawn, count, fit)
        ink.text(0, 16, trace.kernel, 15, weight=650)
        ink.text(_text_width(trace.kernel, 15) + 14, 16, f"{whole}  ·  {part}", 12, ink.soft)
        y = 24
        for line in list(dict.fromkeys(drawn["line"].tolist()))[:3] if self.step is not None else ():
            y += 18
            _mono(ink, 0, y, f"{line:>4}  {_short(self._code(line), 100)}")
        for words in self._remarks():
            y += 18
            ink.text(0, y, _short(words, 130), 12, RED, weight=600)
        threads = range(self.warp * WARP, min((self.warp + count) * WARP, trace.threads))
        panels = [_Panel(trace, i, drawn, frame, threads) for i in range(len(trace.tensors)) if (frame["tensor"] == i).any()]
        panels, y = sorted(panels, key=lambda panel: panel.order), y + 16
        while panels:
            row, panels = (panels[:2], panels[2:]) if all(p.small for p in panels[:2]) else (panels[:1], panels[1:])
            above, half = max(p.above for p in row), (WIDTH - 30) / 2        # the threads of two stand side by side
            y = max(p.draw(ink, k * (half + 30), y, half if len(row) == 2 else WIDTH, above) for k, p in enumerate(row)) + 24
        y = self._legend(ink, y, drawn) + 12
        return ink.svg(self._table(ink, y) + 6, f"{trace.kernel}: {whole}, {part}")

    def _legend(self, ink, y, drawn):
        x = float(LEFT)
        entries = [(WARP_COLOURS[0], 0.85, "touched")]
        if any(self.trace.tensors[i].space == "global" for i in set(drawn["tensor"].tolist())):
            entries.append((WARP_COLOURS[0], 0.2, "in the same sector of 32 bytes"))
        if len(np.unique(drawn["thread"])) < self.trace.threads:
            entries.append((None, 0, "thread without an access"))
        if self.trace.outside(drawn).any():
            entries.append((RED, 0.85, "outside the tensor"))
        for colour, opacity, words in entries if len(drawn) else ():
            _box(ink, x, y - 9, 10, 10, colour, opacity, GREY if colour is None else None)
            ink.text(x + 16, y, words, 11, ink.soft)
            x += _text_width(words, 11) + 34
        return y

    def _table(self, ink, y):
        """Rows for each source line; the columns that the kernel's kinds of memory need."""
        spaces = {use.space for use in self.uses}
        columns = [("accesses", lambda u: f"{u.count:,}"), ("per thread", lambda u: u.per_thread)]
        if "global" in spaces:
            columns += [("sectors per request", lambda u: "" if u.sectors is None else f"{u.sectors:.1f}"),
                        ("of their bytes used", lambda u: "" if u.used is None else share(u.used))]
        if "shared" in spaces:
            columns += [("bank conflict", lambda u: "" if u.ways is None else f"{u.ways}-way" if u.ways > 1 else "none")]
        ends = [WIDTH - 4 - 128 * (len(columns) - 1 - k) for k in range(len(columns))]
        ink.text(0, y + 12, "The whole launch", 12.5, weight=600)
        for end, (title, _) in zip(ends, columns):
            ink.text(end, y + 12, title, 11, ink.soft, "end")
        y += 19
        for line in dict.fromkeys(use.line for use in self.uses):
            ink.line(0, y, WIDTH, y, opacity=0.8)
            y += 18
            _mono(ink, 0, y - 2, f"{line:>4}  {_short(self._code(line), 100)}")
            for use in (use for use in self.uses if use.line == line):
                y += 17
                ink.text(36, y - 2, use.tensor, 12, weight=600)
                ink.text(42 + _text_width(use.tensor, 12.5), y - 2, use.kind, 12, ink.soft)
                for end, (title, value) in zip(ends, columns):
                    bad = title.startswith("of") and use.used is not None and use.used <= 0.5 or title.startswith("bank") and (use.ways or 0) > 1
                    ink.text(end, y - 2, value(use), 12, RED if bad else None, "end", 600 if bad else 400)
            y += 6
        return y

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/svg+xml": self.picture(), "text/plain": str(self)}

    def _ipython_display_(self):
        """Sliders, where there are ipywidgets; and the picture, which stays in the saved notebook by itself."""
        from IPython.display import display
        sliders = self._sliders() if _kernel() is not None else None
        if sliders is not None:
            view = {"version_major": 2, "version_minor": 0, "model_id": sliders.model_id}
            display({"application/vnd.jupyter.widget-view+json": view,
                     "text/plain": "Run this cell to choose block and access with sliders."}, raw=True)
        self._handle = display(self._repr_mimebundle_(), raw=True, display_id=True)

    def _sliders(self):
        """A box of sliders for what there is more than one of; None without ipywidgets or choice."""
        try:
            import ipywidgets as W
        except ImportError:
            return None
        wide = dict(layout=W.Layout(width="340px"), style={"description_width": "52px"})
        offered = {}
        if self.trace.blocks > 1:
            offered["block"] = W.IntSlider(self.block, 0, self.trace.blocks - 1, description="block", **wide)
        if self.steps > 1:
            choices = [("all", None), *((str(k), k) for k in range(min(self.steps, 1000)))]
            offered["step"] = W.SelectionSlider(options=choices, value=self.step, description="access", **wide)
        if self._choose()[2] < self.warps:
            offered["warp"] = W.IntSlider(self.warp, 0, self.warps - 1, description="warp", **wide)

        def moved(change):
            for name, slider in offered.items():
                setattr(self, name, slider.value)
            self._handle.update(self._repr_mimebundle_(), raw=True)
        for slider in offered.values():
            slider.observe(moved, "value")
        return W.HBox(list(offered.values()), layout=W.Layout(flex_flow="row wrap", margin="2px 0 0 0")) if offered else None


# ---- the parts of a picture -----------------------------------------------------------------------------------------------

def _dims(shape):
    return " × ".join(map(str, shape[:3 if shape[2] > 1 else 2 if shape[1] > 1 else 1]))


def _sectors(events):
    """For every sector that an event touches: the event's index and the sector."""
    first = events["offset"] // SECTOR
    many = (events["offset"] + events["bytes"] - 1) // SECTOR - first + 1
    each = np.repeat(np.arange(len(events)), many)
    return each, first[each] + np.arange(len(each)) - np.repeat(np.cumsum(many) - many, many)


def _elements(traced, events):
    """Which elements these events touch, in words."""
    item = traced.itemsize
    found = sorted({i for o, b in zip(events["offset"].tolist(), events["bytes"].tolist()) for i in range(o // item, (o + b - 1) // item + 1)})
    gaps = {b - a for a, b in zip(found, found[1:])}
    if len(found) == 1:
        return f"element {found[0]:,}"
    if gaps <= {1}:
        return f"elements {found[0]:,} to {found[-1]:,}"
    if len(gaps) == 1 and len(found) > 2:
        nth = {2: "2nd", 3: "3rd"}.get(min(gaps), f"{min(gaps):,}th")
        return f"every {nth} element from {found[0]:,} to {found[-1]:,}"
    return f"{len(found):,} elements between {found[0]:,} and {found[-1]:,}"


def _mono(ink, x, y, words):
    ink.out.append(f'<text x="{x}" y="{y:.1f}" font-size="11.5" xml:space="preserve" style="white-space:pre" '
                   f'font-family="ui-monospace, Menlo, Consolas, monospace" {ink.paint(fill=ink.strong)}>{escape(words)}</text>')


def _box(ink, x, y, width, height, fill=None, opacity=1.0, stroke=None, dash=""):
    ink.out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height:.1f}" rx="{min(3, width / 4):.1f}" '
                   f'fill="{fill or "none"}" fill-opacity="{opacity}"' + (f' stroke="{stroke}" stroke-width="1.2"' if stroke else "")
                   + (f' stroke-dasharray="{dash}"' if dash else "") + "/>")


class _Panel:
    """One tensor, the threads, and the lines between them."""

    def __init__(self, trace, index, drawn, frame, threads):
        self.traced, self.threads, self.shared = trace.tensors[index], threads, trace.tensors[index].space == "shared"
        self.events, frame = drawn[drawn["tensor"] == index], frame[frame["tensor"] == index]
        self.outside = trace.outside(self.events)
        self.reads, self.writes = (frame["kind"] == READ).any(), (frame["kind"] != READ).any()
        self.atomic = (frame["kind"] == ATOMIC).any()
        self.order = 1 if self.shared else 2 if self.reads and self.writes else 3 if self.writes else 0
        self.cells = _Banks(self.traced, frame) if self.shared else _Cells(self.traced, frame)
        self.small = not self.shared and len(threads) <= WARP and self.cells.bytes <= 40 * self.traced.itemsize
        self.above = 22 if self.shared else 26 + (16 + CELL + LINK if self.reads else 0)      # from the title to the threads
        if self.shared:
            requests = trace.requests(self.events)["ways"]
            self.ways = int(requests.max(initial=0))

    def draw(self, ink, x, y, width, above) -> float:
        """Draws it with its upper left corner at (x, y) and its threads `above` lower; returns where it ends."""
        traced, right = self.traced, x + width
        ink.text(x, y + 12, traced.name, 13, weight=650)
        at = x + _text_width(traced.name, 13) + 10
        words = f"{'shared, ' if self.shared else ''}{traced.dtype}, {traced.elements:,} element{'s' * (traced.elements != 1)}"
        ink.text(at, y + 12, words, 11.5, ink.soft)
        if self.shared and len(self.events):
            found = f"{self.ways}-way bank conflict" if self.ways > 1 else "no bank conflict"
            ink.text(at + _text_width(words, 11.5) + 10, y + 12, found, 11.5, RED if self.ways > 1 else ink.soft, weight=600)
        band = _Band(self.threads, x + LEFT, right)
        self.cells.place(x + LEFT, right)
        read, write = self.events["kind"] == READ, self.events["kind"] != READ
        arrow = "atomic ↓↑" if self.atomic else "write ↓"

        def threads(top, which):
            ink.text(x, top + 15, "threads", 11.5, ink.soft)
            band.draw(ink, top, set(self.events["thread"][which].tolist()))

        def links(top, which, memory_above):
            ink.text(x, top + LINK / 2 + 4, "read ↓" if which is read else arrow, 11.5, ink.soft)
            _links(ink, self.events[which], self.outside[which], band, self.cells, top, top + LINK, memory_above)
        if self.shared:
            top = y + above
            if self.writes:
                threads(top, write)
                links(top + BAND, write, False)
                top += BAND + LINK
            top = self.cells.draw(ink, top, self.events, self.outside, self.writes, self.reads)
            if self.reads:
                links(top, read, True)
                threads(top + LINK, read)
                top += LINK + BAND
            return top
        top = y + above
        threads(top, read | write)
        if self.reads:
            self.cells.draw(ink, top - LINK - CELL, self.events[read], True)
            links(top - LINK, read, True)
        if self.writes:
            links(top + BAND, write, False)
            self.cells.draw(ink, top + BAND + LINK, self.events[write], False)
        return top + BAND + (LINK + CELL + 14 if self.writes else 0)


class _Band:
    """The row of threads: a square each, a colour for each warp, a little space after every eight where they are small."""

    def __init__(self, threads, left, right):
        self.threads, warps = threads, -(-len(threads) // WARP)
        room = right - left - 12 * (warps - 1) - 10
        self.pitch = min(26.0, room / len(threads))
        self.eights = 0.0
        if self.pitch < 14:
            self.eights = 2.0
            self.pitch = (room - self.eights * (len(threads) // 8 - warps)) / len(threads)
        total = self.left(threads[-1], 0) + self.pitch
        self.start = left + (right - left - total) / 2

    def left(self, thread, start=None):
        k = thread - self.threads[0]
        eights = k // 8 - k // WARP
        return (self.start if start is None else start) + k * self.pitch + eights * self.eights + k // WARP * 12

    def x(self, thread):
        return self.left(thread) + self.pitch / 2

    def draw(self, ink, y, busy):
        numbered = self.pitch >= _text_width(self.threads[-1], 10) + 5
        for first in range(self.threads[0], self.threads[-1] + 1, WARP):
            last, colour = min(first + WARP - 1, self.threads[-1]), _colour(first)
            x, width = self.left(first) - 4, self.left(last) + self.pitch - self.left(first) + 8
            _box(ink, x, y, width, BAND, colour, 0.13)
            for t in range(first, last + 1):
                gap = 1.5 if self.pitch > 8 else 0.8
                _box(ink, self.left(t) + gap, y + 3, self.pitch - 2 * gap, 13, colour if t in busy else None, 0.9, None if t in busy else colour)
                if numbered:
                    ink.text(self.x(t), y + 13, t, 9.5, "#ffffff" if t in busy else ink.soft, "middle", 600)
            words = f"warp {first // WARP}"
            if not numbered and width > 150:
                words += f", threads {first} to {last}"
            ink.text(x + width / 2, y + 26.5, words, 9.5, colour, "middle", 600)


class _Cells:
    """A row of elements in groups of 32 bytes, the sectors; what lies far from every access is left out."""

    def __init__(self, traced, events):
        self.traced, self.item, end = traced, traced.itemsize, traced.elements * traced.itemsize
        lows, highs = events["offset"], events["offset"] + events["bytes"]
        touched = set(_sectors(events)[1].tolist())
        whole = touched | set(range(-(-end // SECTOR)))
        span = set(range(min(touched), max(touched) + 1))
        near = {min(touched) - 1, max(touched) + 1} & whole
        if len(whole) <= max(5, len(touched) + 2):
            shown = whole
        elif len(span) <= MOST_SECTORS:
            shown = span | near
        else:
            shown = touched | {s + 1 for s in touched if s + 2 in touched} | near
        self.sectors = {}                                      # sector -> its first and last byte that exist, or are touched
        for s in sorted(shown):
            low, high = max(SECTOR * s, min(0, int(lows.min()))), min(SECTOR * s + SECTOR, max(end, int(highs.max())))
            self.sectors[s] = (low // self.item * self.item, -(-high // self.item) * self.item)
        self.bytes, self.end = sum(b - a for a, b in self.sectors.values()), end

    def place(self, left, right):
        order = list(self.sectors)
        breaks = sum(b != a + 1 for a, b in zip(order, order[1:]))
        more = (14 if order[0] > 0 else 0, 14 if SECTOR * (order[-1] + 1) < self.end else 0)
        gap = 5.0 if len(order) <= 12 else 3.0
        self.scale = min(26 / self.item, (right - left - sum(more) - breaks * 14 - gap * (len(order) - 1)) / self.bytes)
        at = left + (right - left - sum(more) - self.bytes * self.scale - breaks * 14 - gap * (len(order) - 1)) / 2 + more[0]
        self.start, self.dots = {}, [at - 9] * (more[0] > 0)
        for k, s in enumerate(order):
            if k:
                at += gap
                if s != order[k - 1] + 1:
                    self.dots.append(at + 7 - gap / 2)
                    at += 14
            self.start[s] = at - (self.sectors[s][0] - SECTOR * s) * self.scale
            at += (self.sectors[s][1] - self.sectors[s][0]) * self.scale
        self.dots += [at + 9] * (more[1] > 0)

    def x(self, byte):
        return self.start[byte // SECTOR] + byte % SECTOR * self.scale

    def span(self, offset, size):
        return self.x(offset), self.x(offset + size - 1) + self.scale

    def draw(self, ink, y, events, labels_above):
        pitch, touched = self.item * self.scale, {}
        for thread, offset, size in zip(events["thread"].tolist(), events["offset"].tolist(), events["bytes"].tolist()):
            for element in range(offset // self.item, (offset + size - 1) // self.item + 1):
                touched[element] = _colour(thread) if 0 <= element * self.item < self.end else RED
        label_y, labelled = (y - 4 if labels_above else y + CELL + 11), -1e9
        for s, (low, high) in self.sectors.items():
            elements = range(low // self.item, high // self.item)
            here = [touched[e] for e in elements if e in touched]
            x, inside = self.x(low), min(high, self.end) - max(low, 0)
            if inside > 0:
                left = self.x(max(low, 0))
                _box(ink, left - 1, y - 1, inside * self.scale + 2, CELL + 2, here[0] if here and here[0] != RED else GREY, 0.24 if here else 0.1)
            for e in elements:
                x, colour, outside = self.x(e * self.item), touched.get(e), not 0 <= e * self.item < self.end
                if colour or (pitch >= 8 and not outside):
                    gap = 1.2 if pitch >= 8 else 0.25 if pitch >= 3 else 0
                    _box(ink, x + gap, y + 1, pitch - 2 * gap, CELL - 2, colour, 0.85, None if colour else GREY) if colour else _box(
                        ink, x + gap, y + 1, pitch - 2 * gap, CELL - 2, GREY, 0.14)
                if pitch >= _text_width(e, 9.5) + 4 and (colour or not outside):
                    ink.text(x + pitch / 2, y + 13.5, e, 9.5, "#ffffff" if colour else ink.soft, "middle", 600 if colour else 400)
                elif (e == elements[0] or colour == RED) and x > labelled:
                    ink.text(x, label_y, f"{e:,}", 9.5, RED if colour == RED else ink.soft)
                    labelled = x + _text_width(f"{e:,}", 9.5) + 8
        for x in self.dots:
            ink.text(x, y + 13, "…", 12, ink.soft, "middle")
        for byte, x in ((0, self.x(0) - 3.5 if 0 in self.sectors else None),
                        (self.end, self.x(self.end - 1) + self.scale + 2 if (self.end - 1) // SECTOR in self.sectors else None)):
            if x is not None:                                  # the tensor's own ends
                _box(ink, x, y - 4, 1.6, CELL + 8, RED if RED in touched.values() else GREY)


class _Banks:
    """An array in shared memory as rows of 32 words, one word for each bank; rows that nobody touches are left out."""

    def __init__(self, traced, events):
        self.traced, self.words = traced, -(-traced.elements * traced.itemsize // 4)
        each, _ = _sectors(events)
        self.rows = sorted({r for o, b in zip(events["offset"].tolist(), events["bytes"].tolist())
                            for r in range(o // 4 // BANKS, (o + b - 1) // 4 // BANKS + 1)})[:MOST_ROWS + 6]
        self.height = 16 if len(self.rows) <= 4 else 11 if len(self.rows) <= 12 else 6

    def place(self, left, right):
        self.pitch = min(23.0, (right - left - 10) / BANKS)
        self.left = left + (right - left - BANKS * self.pitch) / 2

    def span(self, offset, size):
        x = self.left + offset // 4 % BANKS * self.pitch
        return x, x + ((offset + size - 1) // 4 - offset // 4 + 1) * self.pitch

    def ports(self, ink, y, events):
        """The banks, with the turns that the worst request takes at each."""
        requests = _request_numbers(events)
        ways = bank_ways(events, requests, requests.max(initial=-1) + 1).max(axis=0, initial=0)
        for bank, turns in enumerate(ways.tolist()):
            x = self.left + bank * self.pitch
            _box(ink, x + 0.8, y, self.pitch - 1.6, 14, RED if turns > 1 else GREY, 0.9 if turns > 1 else 0.45 if turns else 0.15)
            ink.text(x + self.pitch / 2, y + 10.5, f"{turns}×" if turns > 1 else bank, 9.5, "#ffffff" if turns > 1 else ink.strong if turns else ink.soft,
                     "middle", 600 if turns > 1 else 400)

    def draw(self, ink, y, events, outside, writes, reads) -> float:
        touched = {}
        for thread, offset, size, bad in zip(*(events[k].tolist() for k in ("thread", "offset", "bytes")), outside.tolist()):
            for word in range(offset // 4, (offset + size - 1) // 4 + 1):
                touched[word] = _colour(thread) if not bad else RED
        if writes:
            self.ports(ink, y, events[events["kind"] != READ])
            ink.text(self.left - 8, y + 10.5, "bank", 9.5, ink.soft, "end")
            y += 18
        labelled = y - 20
        for k, row in enumerate(self.rows):
            if k and row != self.rows[k - 1] + 1:
                ink.text(self.left - 8, y + 5, "…", 10, ink.soft, "end")
                y += 8
            for bank in range(BANKS):
                word = row * BANKS + bank
                if 0 <= word < self.words or word in touched:
                    colour = touched.get(word)
                    _box(ink, self.left + bank * self.pitch + 0.8, y + 0.6, self.pitch - 1.6, self.height - 1.2, colour or GREY, 0.85 if colour else 0.14)
            if y - labelled >= 11 and k < len(self.rows):
                ink.text(self.left - 8, y + self.height / 2 + 3.5, f"{row * BANKS * 4 // self.traced.itemsize:,}", 9.5, ink.soft, "end")
                labelled = y
            y += self.height
        if reads:
            y += 4
            self.ports(ink, y, events[events["kind"] == READ])
            ink.text(self.left - 8, y + 10.5, "bank", 9.5, ink.soft, "end")
            y += 14
        return y


def _colour(thread):
    return WARP_COLOURS[thread // WARP % len(WARP_COLOURS)]


def _request_numbers(events):
    order, group = _groups(events["pc"], events["block"], events["thread"] // WARP, events["visit"], events["kind"])
    numbers_ = np.empty(len(events), np.int64)
    numbers_[order] = group
    return numbers_


def _links(ink, events, outside, band, cells, top, bottom, memory_above):
    """Lines between threads and what they touch, from `top` down to `bottom`; a wedge where it is more than one element."""
    seen, paths, middle = set(), {}, (top + bottom) / 2
    for thread, offset, size, kind, bad in zip(*(events[k].tolist() for k in ("thread", "offset", "bytes", "kind")), outside.tolist()):
        if (thread, offset, size, kind) in seen:
            continue
        seen.add((thread, offset, size, kind))
        t, (a, b) = band.x(thread), cells.span(offset, size)
        lines, wedges, heads = paths.setdefault((RED if bad else _colour(thread), kind == ATOMIC), ([], [], []))
        if size > cells.traced.itemsize and b - a > 5:
            t0, t1, a, b = t - 1, t + 1, a + 1, b - 1
            if memory_above:
                t0, t1, a, b = a, b, t0, t1
            wedges.append(f"M{t0:.1f} {top}C{t0:.1f} {middle} {a:.1f} {middle} {a:.1f} {bottom}H{b:.1f}C{b:.1f} {middle} {t1:.1f} {middle} {t1:.1f} {top}Z")
            continue
        x0, x1 = ((a + b) / 2, t) if memory_above else (t, (a + b) / 2)
        lines.append(f"M{x0:.1f} {top + 1}C{x0:.1f} {middle} {x1:.1f} {middle} {x1:.1f} {bottom - 4}")
        heads.append(f"M{x1 - 2.6:.1f} {bottom - 6}h5.2l-2.6 5z")
    many = len(seen)
    width, opacity = (1.5, 0.85) if many <= 40 else (1.1, 0.6) if many <= 140 else (0.9, 0.4)
    for (colour, atomic), (lines, wedges, heads) in sorted(paths.items(), key=lambda item: item[0][0] == RED):
        if lines:
            ink.out.append(f'<path d="{"".join(lines)}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"'
                           + (' stroke-dasharray="4 3"' if atomic else "") + "/>")
        if heads and many <= 140:
            ink.out.append(f'<path d="{"".join(heads)}" fill="{colour}" opacity="{min(opacity + 0.1, 1)}"/>')
        if wedges:
            ink.out.append(f'<path d="{"".join(wedges)}" fill="{colour}" opacity="{0.5 if many <= 40 else 0.4}"/>')
