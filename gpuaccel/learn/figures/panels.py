"""The parts of `ga.show`'s picture: a row of threads, a tensor's elements or an array's banks, and the lines between them.

    panel = Panel(trace, 0, drawn, frame, whole, range(32))      # tensor 0: events to draw, that set the frame, of all warps
    bottom = panel.draw(sheet, x, y, width, panel.above)

Global memory is a row of elements in groups of 32 bytes (sectors); shared memory is a table of 4-byte words, 32 banks wide.
"""

import numpy as np

from ...simt.tracing import ATOMIC, BANKS, READ, SECTOR, WARP, bank_ways, groups
from .picture import RUN_COLOURS, WIDTH, _Ink, _text_width

WARP_COLOURS, RED, GREY = RUN_COLOURS[:4], "#e5484d", "#8d949e"
MOST_SECTORS, MOST_ROWS = 40, 34  # of one tensor, that a picture can show
OTHERS = (GREY, 0.42)  # colour and opacity of what warps touch that are not drawn
LEFT, LINK, CELL, BAND = (
    58,
    60,
    20,
    30,
)  # left margin; heights of the lines, the cells, the row of threads


class Sheet(_Ink):
    """The ink of the other pictures, and many equal things at once: a picture of a thousand cells stays small."""

    def __init__(self):
        super().__init__(themed=False)

    def mono(self, x, y, words):
        self.out.append(
            f'<text x="{x}" y="{y:.1f}" font-size="11.5" style="white-space:pre" font-family="ui-monospace, Menlo, '
            f'Consolas, monospace" {self.paint(fill=self.strong)}>{_escaped(words)}</text>'
        )

    def boxes(self, boxes, fill, opacity=1.0):
        """(x, y, width, height) in one colour; corners are rounded where there is room."""
        for rounded in (False, True):
            some = [b for b in boxes if (b[2] >= 5 and b[3] >= 5) is rounded]
            inset = 1.5 if rounded else 0
            path = "".join(
                f"M{x + inset:.1f} {y + inset:.1f}h{max(w, 0.6) - 2 * inset:.1f}v{h - 2 * inset:.1f}"
                f"h{2 * inset - max(w, 0.6):.1f}z"
                for x, y, w, h in some
            )
            edge = f'stroke="{fill}" stroke-width="3" stroke-linejoin="round" ' if rounded else ""
            self.out += (
                [f'<path d="{path}" fill="{fill}" {edge}opacity="{opacity}"/>'] if some else []
            )

    def frames(self, boxes, colour):
        """The outlines of (x, y, width, height)."""
        path = "".join(
            f"M{x + 2:.1f} {y + 0.6:.1f}h{w - 4:.1f}q1.4 0 1.4 1.4v{h - 4:.1f}q0 1.4-1.4 1.4h{4 - w:.1f}q-1.4 0-1.4-1.4"
            f"v{4 - h:.1f}q0-1.4 1.4-1.4"
            for x, y, w, h in boxes
        )
        self.out += (
            [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.1"/>']
            if boxes
            else []
        )

    def words(self, items, colour, size=9.5, anchor="middle", weight=400):
        """(x, y, text), many in one look."""
        if items:
            inner = "".join(
                f'<text x="{x:.1f}" y="{y:.1f}">{_escaped(text)}</text>' for x, y, text in items
            )
            look = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" {self.paint(fill=colour)}'
            self.out.append(f"<g {look}>{inner}</g>")


def _escaped(words):
    return str(words).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def colour_of(thread):
    return WARP_COLOURS[thread // WARP % len(WARP_COLOURS)]


def sectors_of(events):
    """For every sector that an event touches: the event's index and the sector."""
    first = events["offset"] // SECTOR
    many = (events["offset"] + events["bytes"] - 1) // SECTOR - first + 1
    each = np.repeat(np.arange(len(events)), many)
    return each, first[each] + np.arange(len(each)) - np.repeat(np.cumsum(many) - many, many)


def _rows(events, *names):
    return zip(*(events[name].tolist() for name in names))


class Panel:
    """One tensor, the threads, and the lines between them.

    drawn: the events to draw; frame: those that decide what of the tensor is shown; whole: those of all the block's warps."""

    def __init__(self, trace, index, drawn, frame, whole, threads):
        drawn, frame, whole = (
            events[events["tensor"] == index] for events in (drawn, frame, whole)
        )
        self.traced, self.threads, self.events = trace.tensors[index], threads, drawn
        self.shared, self.outside = self.traced.space == "shared", trace.outside(drawn)
        self.reads, self.writes = (
            bool((frame["kind"] == READ).any()),
            bool((frame["kind"] != READ).any()),
        )
        self.arrow = "atomic ↓↑" if (frame["kind"] == ATOMIC).any() else "write ↓"
        self.order = (
            1 if self.shared else 2 if self.reads and self.writes else 3 if self.writes else 0
        )
        self.small = not self.shared and len(threads) <= WARP
        if self.shared:
            self.cells, self.ways = (
                Banks(self.traced, frame, whole),
                int(trace.requests(drawn)["ways"].max(initial=0)),
            )
        else:
            self.cells = Cells(self.traced, frame)
            self.small = self.small and self.cells.bytes <= 40 * self.traced.itemsize
        self.above = (
            24 if self.shared or not self.reads else 40 + CELL + LINK
        )  # from the title to the threads

    def draw(self, sheet, x, y, width, above) -> float:
        """Draws it with its upper left corner at (x, y), its threads `above` lower; returns where it ends."""
        traced, right = self.traced, x + width
        sheet.text(x, y + 12, traced.name, 13, weight=650)
        at = x + 1.08 * _text_width(traced.name, 13) + 10
        words = f"{'shared, ' if self.shared else ''}{traced.dtype}, {traced.elements:,} element{'s' * (traced.elements != 1)}"
        sheet.text(at, y + 12, words, 11.5, sheet.soft)
        if self.shared and len(self.events):
            found = f"{self.ways}-way bank conflict" if self.ways > 1 else "no bank conflict"
            sheet.text(
                at + _text_width(words, 11.5) + 4,
                y + 12,
                found,
                11.5,
                RED if self.ways > 1 else sheet.soft,
                weight=600,
            )
        band, read = Band(self.threads, x + LEFT, right), self.events["kind"] == READ
        self.cells.place(x + LEFT + 4, right - 14)

        def threads(top, which):
            sheet.text(x, top + 14, "threads", 11.5, sheet.soft)
            band.draw(sheet, top, set(self.events["thread"][which].tolist()))
            return top + BAND

        def links(top, which, reading):
            sheet.text(
                x,
                top + LINK / 2 + 4,
                "read ↓" if reading else self.arrow,
                11.5,
                sheet.soft,
                weight=600,
            )
            draw_links(
                sheet, self.events[which], self.outside[which], band, self.cells, top, reading
            )
            return top + LINK

        top = y + above
        if self.shared:
            if self.writes:
                top = links(threads(top, ~read), ~read, False)
            top = self.cells.draw(sheet, top, self.events, self.outside, self.writes, self.reads)
            return threads(links(top, read, True), read) if self.reads else top
        if self.reads:
            self.cells.draw(sheet, top - LINK - CELL, self.events[read], True)
            links(top - LINK, read, True)
        top = threads(top, slice(None))
        if self.writes:
            top = links(top, ~read, False) + CELL + 14
            self.cells.draw(sheet, top - CELL - 14, self.events[~read], False)
        return top


class Band:
    """The row of threads: a square each, a colour for each warp; small ones in groups of eight, so that they can be counted."""

    def __init__(self, threads, left, right):
        self.threads, warps = threads, -(-len(threads) // WARP)
        room = right - left - 12 * (warps - 1) - 10
        self.pitch, self.eights = min(26.0, room / len(threads)), 0.0
        if self.pitch < 14:
            self.eights = 2.0
            self.pitch = (room - self.eights * (-(-len(threads) // 8) - warps)) / len(threads)
        self.start = 0.0
        self.start = left + (right - left - self.left(threads[-1]) - self.pitch) / 2

    def left(self, thread):
        k = thread - self.threads[0]
        return self.start + k * self.pitch + (k // 8 - k // WARP) * self.eights + k // WARP * 12

    def x(self, thread):
        return self.left(thread) + self.pitch / 2

    def draw(self, sheet, y, busy):
        numbered, gap = (
            self.pitch >= _text_width(self.threads[-1], 9.5) + 4,
            1.5 if self.pitch > 8 else 0.8,
        )
        for first in range(self.threads[0], self.threads[-1] + 1, WARP):
            warp, colour = (
                range(first, min(first + WARP - 1, self.threads[-1]) + 1),
                colour_of(first),
            )
            x, width = self.left(first) - 4, self.left(warp[-1]) + self.pitch - self.left(first) + 8
            sheet.boxes([(x, y, width, BAND)], colour, 0.13)
            square = {t: (self.left(t) + gap, y + 3, self.pitch - 2 * gap, 13) for t in warp}
            sheet.boxes([square[t] for t in warp if t in busy], colour, 0.9)
            sheet.frames([square[t] for t in warp if t not in busy], colour)
            if numbered:
                sheet.words(
                    [(self.x(t), y + 13, t) for t in warp if t in busy], "#ffffff", weight=600
                )
                sheet.words([(self.x(t), y + 13, t) for t in warp if t not in busy], sheet.soft)
            words = f"warp {first // WARP}" + (
                "" if numbered or width < 150 else f", threads {first} to {warp[-1]}"
            )
            sheet.text(x + width / 2, y + 26.5, words, 9.5, colour, "middle", 600)


class Cells:
    """A row of elements in groups of 32 bytes, the sectors; what lies far from every access is left out."""

    def __init__(self, traced, events):
        self.item, self.end = traced.itemsize, traced.elements * traced.itemsize
        touched = set(sectors_of(events)[1].tolist())
        low, high = int(events["offset"].min()), int((events["offset"] + events["bytes"]).max())
        sectors, ends = -(-self.end // SECTOR), {min(touched) - 1, max(touched) + 1}
        near = {s for s in ends if 0 <= s < sectors and len(touched) <= 2}
        if sectors <= max(5, len(touched)):
            shown = touched | set(range(sectors))
        elif max(touched) - min(touched) < MOST_SECTORS:
            shown = set(range(min(touched), max(touched) + 1)) | near
        else:
            shown = touched | {s + 1 for s in touched if s + 2 in touched} | near
        self.sectors = {}  # sector -> its first and last byte that exist or are touched
        for s in sorted(shown):
            first, last = (
                max(SECTOR * s, min(0, low)),
                min(SECTOR * s + SECTOR, max(self.end, high)),
            )
            self.sectors[s] = (first // self.item * self.item, -(-last // self.item) * self.item)
        self.bytes, self.pieces = (
            sum(b - a for a, b in self.sectors.values()),
            sum(s - 1 not in shown for s in shown),
        )

    def place(self, left, right):
        order, before, after = (
            list(self.sectors),
            min(self.sectors) > 0,
            SECTOR * (max(self.sectors) + 1) < self.end,
        )
        gap, skip = 5.0 if len(order) <= 12 else 3.0, 14.0 if self.pieces <= 12 else 7.0
        beyond = 9.0 * ((self.sectors[order[0]][0] < 0) + (self.sectors[order[-1]][1] > self.end))
        space = gap * (len(order) - 1) + skip * (self.pieces - 1) + beyond
        self.scale = min(26 / self.item, (right - left - space) / self.bytes)
        at = left + (right - left - space - self.bytes * self.scale) / 2
        self.start, self.dots = {}, [at - 10] * before
        for k, s in enumerate(order):
            first, last = self.sectors[s]
            if k:
                at += gap + 9.0 * (
                    order[k - 1] < 0 <= s or first >= self.end > self.sectors[order[k - 1]][0]
                )
                if s != order[k - 1] + 1:
                    self.dots += [at + skip / 2 - gap / 2] * (skip > 10)
                    at += skip
            self.start[s] = at - (first - SECTOR * s) * self.scale
            at += (last - first) * self.scale + 9.0 * (first < self.end < last)
        self.dots += [at + 7.5] * after

    def x(self, byte):
        sector = byte // SECTOR
        crossed = (
            SECTOR * sector < self.end <= byte
        )  # past the end, in the sector that holds the end
        return self.start[sector] + byte % SECTOR * self.scale + 9.0 * crossed

    def span(self, offset, size):
        return self.x(offset), self.x(offset + size - 1) + self.scale

    def draw(self, sheet, y, events, labels_above):
        pitch, touched = self.item * self.scale, {}
        for thread, offset, size in _rows(events, "thread", "offset", "bytes"):
            for element in range(offset // self.item, (offset + size - 1) // self.item + 1):
                touched[element] = colour_of(thread) if 0 <= element * self.item < self.end else RED
        gap = 1.2 if pitch >= 8 else 0.4 if pitch >= 2.2 else 0
        shown = [
            e
            for low, high in self.sectors.values()
            for e in range(low // self.item, high // self.item)
            if e in touched or 0 <= e * self.item < self.end
        ]
        digits = (
            9
            if pitch >= _text_width(shown[-1], 9) + 3
            else 8.5
            if pitch >= _text_width(shown[-1], 8.5) + 1
            else 0
        )
        label_y, labelled, looks, plain, solid, labels, odd = (
            y - 5 if labels_above else y + CELL + 12,
            -1e9,
            {},
            [],
            [],
            [],
            [],
        )
        for low, high in self.sectors.values():  # the sectors behind the cells
            low, high = max(low, 0), min(high, self.end)
            here = [touched[e] for e in range(low // self.item, high // self.item) if e in touched]
            if high > low:
                looks.setdefault((here[0], 0.3) if here else (GREY, 0.1), []).append(
                    (self.x(low) - 1, y - 1, (high - low) * self.scale + 2, CELL + 2)
                )
        for e in shown:
            x, colour = self.x(e * self.item), touched.get(e)
            if colour or pitch >= 8:
                look = (colour, 0.85) if colour else (GREY, 0.14)
                looks.setdefault(look, []).append((x + gap, y + 1, pitch - 2 * gap, CELL - 2))
            if digits:
                (solid if colour else plain).append((x + pitch / 2, y + 13.4, e))
            elif (
                e * self.item % SECTOR == 0 or e == shown[0] or colour == RED != touched.get(e - 1)
            ):
                long = 1.1 * _text_width(f"{e:,}", 9.5)
                if (x := min(x, WIDTH - long)) > labelled:
                    (odd if colour == RED else labels).append((x, label_y, f"{e:,}"))
                    labelled = x + long + 7
        for (colour, opacity), boxes in looks.items():
            sheet.boxes(boxes, colour, opacity)
        sheet.words(solid, "#ffffff", digits, weight=600)
        sheet.words(plain, sheet.soft, digits)
        sheet.words(labels, sheet.soft, anchor="start")
        sheet.words(odd, RED, anchor="start", weight=600)
        sheet.words([(x, y + 13, "…") for x in self.dots], sheet.soft, 12)
        low, high = min(touched, default=0), max(touched, default=0)
        if 0 in self.sectors:  # the tensor's own ends
            sheet.boxes([(self.x(0) - 4.5, y - 4, 1.6, CELL + 8)], RED if low < 0 else GREY)
        if (self.end - 1) // SECTOR in self.sectors:
            after = high * self.item >= self.end
            sheet.boxes(
                [(self.x(self.end - 1) + self.scale + 3, y - 4, 1.6, CELL + 8)],
                RED if after else GREY,
            )


class Banks:
    """An array in shared memory as rows of 32 words, one word for each bank; rows that nobody touches are left out."""

    def __init__(self, traced, events, whole):
        self.item, self.words, self.whole = (
            traced.itemsize,
            -(-traced.elements * traced.itemsize // 4),
            whole,
        )
        rows = {
            r
            for o, b in _rows(events, "offset", "bytes")
            for r in range(o // 4 // BANKS, (o + b - 1) // 4 // BANKS + 1)
        }
        everything = set(range(-(-self.words // BANKS)))
        self.rows = sorted(rows | everything if len(rows | everything) <= MOST_ROWS else rows)
        self.height = 16 if len(self.rows) <= 4 else 11 if len(self.rows) <= 12 else 6

    def place(self, left, right):
        self.pitch = min(23.0, (right - left + 8) / BANKS)
        self.left = left + (right - left + 10 - BANKS * self.pitch) / 2

    def span(self, offset, size):
        x = self.left + offset // 4 % BANKS * self.pitch
        return x, x + ((offset + size - 1) // 4 - offset // 4 + 1) * self.pitch

    def ports(self, sheet, y, events):
        """The banks, with the turns that the worst request takes at each."""
        order, group = groups(
            events["pc"], events["block"], events["thread"] // WARP, events["visit"], events["kind"]
        )
        request = np.empty(len(events), np.int64)
        request[order] = group
        ways = (
            bank_ways(events, request, request.max(initial=-1) + 1).max(axis=0, initial=0).tolist()
        )
        sheet.words([(self.left - 9, y + 10.5, "bank")], sheet.soft, anchor="end")
        looks = (
            (0, 0, GREY, 0.15, sheet.soft, 400),
            (1, 1, GREY, 0.8, "#ffffff", 600),
            (2, 999, RED, 0.9, "#ffffff", 600),
        )
        for few, many, fill, opacity, colour, weight in looks:
            some = [
                (self.left + bank * self.pitch, f"{turns}×" if turns > 1 else bank)
                for bank, turns in enumerate(ways)
                if few <= turns <= many
            ]
            sheet.boxes([(x + 0.8, y, self.pitch - 1.6, 14) for x, _ in some], fill, opacity)
            sheet.words(
                [(x + self.pitch / 2, y + 10.4, word) for x, word in some], colour, 9, weight=weight
            )
        return y + 14

    def draw(self, sheet, y, events, outside, writes, reads) -> float:
        touched, looks, labels, labelled = {}, {}, [], -1e9
        for some, bad in ((self.whole, None), (events, outside.tolist())):
            for k, (thread, offset, size) in enumerate(_rows(some, "thread", "offset", "bytes")):
                for word in range(offset // 4, (offset + size - 1) // 4 + 1):
                    touched[word] = (
                        OTHERS if bad is None else (RED if bad[k] else colour_of(thread), 0.85)
                    )
        if writes:
            y = self.ports(sheet, y, events[events["kind"] != READ]) + 4
        for k, row in enumerate(self.rows):
            if k and row != self.rows[k - 1] + 1:
                y += 8
            for word in range(row * BANKS, row * BANKS + BANKS):
                if 0 <= word < self.words or word in touched:
                    looks.setdefault(touched.get(word, (GREY, 0.14)), []).append(
                        (
                            self.left + word % BANKS * self.pitch + 0.8,
                            y + 0.6,
                            self.pitch - 1.6,
                            self.height - 1.2,
                        )
                    )
            if y - labelled >= 11:
                labels.append(
                    (self.left - 9, y + self.height / 2 + 3.5, f"{row * BANKS * 4 // self.item:,}")
                )
                labelled = y
            y += self.height
        for (colour, opacity), boxes in looks.items():
            sheet.boxes(boxes, colour, opacity)
        sheet.words(labels, sheet.soft, anchor="end")
        return self.ports(sheet, y + 4, events[events["kind"] == READ]) if reads else y


def draw_links(sheet, events, outside, band, cells, top, reading):
    """Lines from `top` down, between threads and what they touch; a wedge where that is more than one element."""
    bottom, middle, seen, paths = top + LINK, top + LINK / 2, set(), {}
    for (thread, offset, size, kind), bad in zip(
        _rows(events, "thread", "offset", "bytes", "kind"), outside.tolist()
    ):
        if (thread, offset, size, kind) in seen:
            continue
        seen.add((thread, offset, size, kind))
        t, (a, b) = band.x(thread), cells.span(offset, size)
        lines, wedges, heads = paths.setdefault(
            (RED if bad else colour_of(thread), kind == ATOMIC), ([], [], [])
        )
        if size > cells.item and b - a > 5:
            a, b, c, d = (a + 1, b - 1, t - 1, t + 1) if reading else (t - 1, t + 1, a + 1, b - 1)
            wedges.append(
                f"M{a:.1f} {top}C{a:.1f} {middle} {c:.1f} {middle} {c:.1f} {bottom}H{d:.1f}"
                f"C{d:.1f} {middle} {b:.1f} {middle} {b:.1f} {top}Z"
            )
        else:
            a, b = ((a + b) / 2, t) if reading else (t, (a + b) / 2)
            lines.append(
                f"M{a:.1f} {top + 1}C{a:.1f} {middle} {b:.1f} {middle} {b:.1f} {bottom - 4}"
            )
            heads.append(f"M{b - 2.6:.1f} {bottom - 6}h5.2l-2.6 5z")
    width, opacity = (
        (1.5, 0.85) if len(seen) <= 40 else (1.1, 0.6) if len(seen) <= 140 else (0.9, 0.4)
    )
    for (colour, atomic), (lines, wedges, heads) in sorted(
        paths.items(), key=lambda item: item[0][0] == RED
    ):
        dashes = 'stroke-dasharray="4 3" ' if atomic else ""
        for path, look in (
            (
                lines,
                f'fill="none" stroke="{colour}" stroke-width="{width}" {dashes}opacity="{opacity}"',
            ),
            (heads if len(seen) <= 140 else (), f'fill="{colour}" opacity="{opacity}"'),
            (wedges, f'fill="{colour}" opacity="0.5"'),
        ):
            sheet.out += [f'<path d="{"".join(path)}" {look}/>'] if path else []
