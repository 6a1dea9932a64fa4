"""The parts of `ga.show`'s picture: threads, elements or banks, and lines between them.

    panel = Panel(trace, 0, drawn, frame, whole, range(32))      # tensor 0 and the first warp
    bottom = panel.draw(sheet, x, y, width, panel.above)

Global memory is a row of elements in groups of 32 bytes (sectors). Shared memory is a table of
4-byte words, 32 banks wide.
"""

from html import escape

import numpy as np

from ...simt import ATOMIC, BANKS, READ, SECTOR, WARP, groups, turns_per_bank
from .drawing import GREY, RED, RUN_COLOURS, WHITE, WIDTH, Ink, plural, text_width

WARP_COLOURS = RUN_COLOURS[:4]
# of one tensor, that a picture can show
MOST_SECTORS, MOST_ROWS = 40, 34
# colour and opacity of what is touched by warps that are not drawn
OTHERS = (GREY, 0.42)
LEFT = 58
# heights of the lines between threads and cells, of the cells, and of the row of threads
LINK, CELL, BAND = 60, 20, 30


class Sheet(Ink):
    """Ink for many equal shapes at once, so that a picture of a thousand cells stays small."""

    def mono(self, x, y, words):
        """Words in a monospaced font."""
        self.out.append(
            f'<text x="{x}" y="{y:.1f}" font-size="11.5" '
            'font-family="ui-monospace, Menlo, Consolas, monospace" '
            f'style="white-space:pre;fill:{self.strong}">{escape(words)}</text>'
        )

    def boxes(self, boxes, fill, opacity=1.0):
        """(x, y, width, height) in one colour; corners are rounded where there is room."""
        small = [(x, y, max(w, 0.6), h) for x, y, w, h in boxes if min(w, h) < 5]
        large = [box for box in boxes if min(box[2:]) >= 5]
        if small:
            self.path(_outlines(small, 0), fill, opacity=opacity)
        if large:
            # a round line around the box makes its corners round
            line = dict(stroke=fill, stroke_width=3, stroke_linejoin="round")
            self.path(_outlines(large, 1.5), fill, opacity=opacity, **line)

    def frames(self, boxes, colour):
        """The outlines of (x, y, width, height)."""
        if boxes:
            line = dict(stroke=colour, stroke_width=1.1, stroke_linejoin="round")
            self.path(_outlines(boxes, 0.6), **line)

    def words(self, items, colour, size=9.5, anchor="middle", weight=400):
        """(x, y, text), many in one look."""
        if items:
            inner = "".join(
                f'<text x="{x:.1f}" y="{y:.1f}">{escape(str(text))}</text>' for x, y, text in items
            )
            look = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
            self.out.append(f"<g {look} {self.paint(fill=colour)}>{inner}</g>")


def _outlines(boxes, inset):
    """A path around each of (x, y, width, height), this much smaller on each side."""
    return "".join(
        f"M{x + inset:.1f} {y + inset:.1f}h{w - 2 * inset:.1f}v{h - 2 * inset:.1f}"
        f"h{2 * inset - w:.1f}z"
        for x, y, w, h in boxes
    )


def colour_of(thread):
    """The colour of a thread's warp."""
    return WARP_COLOURS[thread // WARP % len(WARP_COLOURS)]


def _rows(events, *names):
    return zip(*(events[name].tolist() for name in names))


class Panel:
    """One tensor, the threads, and the lines between them.

    Args:
        trace: a simt Trace.
        index: of the tensor.
        drawn: the events to draw.
        red: which of them are wrong.
        frame: those that decide which part of the tensor is shown.
        whole: those of all warps of the block.
        threads: the range of threads.
        banks: whether it shows the banks of shared memory.
    """

    def __init__(self, trace, index, drawn, red, frame, whole, threads, banks=True):
        self.outside = red[drawn["tensor"] == index]
        drawn = drawn[drawn["tensor"] == index]
        frame = frame[frame["tensor"] == index]
        whole = whole[whole["tensor"] == index]
        self.traced = trace.tensors[index]
        self.threads = threads
        self.events = drawn
        self.shared = self.traced.space == "shared"
        self.reads = bool((frame["kind"] == READ).any())
        self.writes = bool((frame["kind"] != READ).any())
        self.arrow = "atomic ↓↑" if (frame["kind"] == ATOMIC).any() else "write ↓"
        # what is only read comes first, what is only written last
        if self.shared:
            self.order = 1
        elif self.reads and self.writes:
            self.order = 2
        else:
            self.order = 3 if self.writes else 0
        if self.shared:
            self.cells = Banks(self.traced, frame, whole, banks)
            self.bank_turns = int(trace.requests(drawn)["bank_turns"].max(initial=0))
            self.small = False
        else:
            self.cells = Cells(trace, self.traced, frame)
            few_cells = self.cells.bytes <= 40 * self.traced.itemsize
            self.small = len(threads) <= WARP and few_cells
        # from the title to the threads
        self.above = 24 if self.shared or not self.reads else 40 + CELL + LINK

    def draw(self, sheet, x, y, width, above) -> float:
        """Draw with the upper left corner at (x, y) and the threads `above` lower.

        Returns:
            Where it ends.
        """
        traced, right = self.traced, x + width
        sheet.text(x, y + 12, traced.name, 13, weight=650)
        words_x = x + 1.08 * text_width(traced.name, 13) + 10
        space = "shared, " if self.shared else ""
        words = f"{space}{traced.dtype}, {plural(traced.elements, 'element')}"
        sheet.text(words_x, y + 12, words, 11.5, sheet.soft)
        if self.shared and self.cells.banks and len(self.events):
            conflict = self.bank_turns > 1
            cost = f"{self.bank_turns}-way bank conflict" if conflict else "no bank conflict"
            cost_x = words_x + text_width(words, 11.5) + 4
            sheet.text(cost_x, y + 12, cost, 11.5, RED if conflict else sheet.soft, weight=600)
        read = self.events["kind"] == READ
        self.cells.place(x + LEFT + 4, right - 14, self.threads, self.events)
        band = Band(self.threads, x + LEFT, right, self.cells, self.events)

        def threads(top, which):
            sheet.text(x, top + 14, "threads", 11.5, sheet.soft)
            band.draw(sheet, top, set(self.events["thread"][which].tolist()))
            return top + BAND

        def links(top, which, reading):
            arrow = "read ↓" if reading else self.arrow
            sheet.text(x, top + LINK / 2 + 4, arrow, 11.5, sheet.soft, weight=600)
            events, outside = self.events[which], self.outside[which]
            draw_links(sheet, events, outside, band, self.cells, top, reading)
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
    """The row of threads: a square each, a colour for each warp.

    Where there are about as many elements, threads have their spacing and stand below them, so that
    neighbours that touch neighbours are joined by straight lines. Elsewhere small squares stand in
    groups of eight, so that they can be counted.

    Args:
        threads: a range of them.
        left, right: where they may stand.
        cells: of the same panel, with a place.
        events: that are drawn between the two.
    """

    def __init__(self, threads, left, right, cells, events):
        self.threads = threads
        warps = -(-len(threads) // WARP)
        self.warp_gap, self.group, self.gap = 12.0, 8, 0.0
        room = right - left - self.warp_gap * (warps - 1) - 10
        self.pitch = min(26.0, room / len(threads))
        if cells.spacing:
            self.pitch, self.group, self.gap = cells.spacing
            self.warp_gap = self.gap
        elif self.pitch < 14:
            self.gap = 2.0
            gaps = -(-len(threads) // 8) - warps
            self.pitch = (room - self.gap * gaps) / len(threads)
        self.start = 0.0
        width = self.left(threads[-1]) + self.pitch
        self.start = left + (right - left - width) / 2
        if cells.spacing and len(events):
            rows = _rows(events, "thread", "offset", "bytes")
            shifts = [sum(cells.span(at, size)) / 2 - self.x(t) for t, at, size in rows]
            start = self.start + float(np.median(shifts))
            self.start = min(max(start, left), right - width)

    def left(self, thread):
        """The left edge of a thread's square."""
        k = thread - self.threads[0]
        warps = k // WARP
        gaps = k // self.group - (warps if self.group <= WARP else 0)
        return self.start + k * self.pitch + gaps * self.gap + warps * self.warp_gap

    def x(self, thread):
        """The middle of a thread's square."""
        return self.left(thread) + self.pitch / 2

    def draw(self, sheet, y, busy):
        """A square for each thread. busy: the threads that are drawn solid."""
        last = self.threads[-1]
        numbered = self.pitch >= text_width(last, 9.5) + 4
        gap = 1.5 if self.pitch > 8 else 0.8
        for first in range(self.threads[0], last + 1, WARP):
            warp = range(first, min(first + WARP - 1, last) + 1)
            colour = colour_of(first)
            margin = min(self.warp_gap / 2, 4.0)
            x = self.left(first) - margin
            width = self.left(warp[-1]) + self.pitch - self.left(first) + 2 * margin
            sheet.boxes([(x, y, width, BAND)], colour, 0.13)
            square = {t: (self.left(t) + gap, y + 3, self.pitch - 2 * gap, 13) for t in warp}
            idle = [t for t in warp if t not in busy]
            working = [t for t in warp if t in busy]
            sheet.boxes([square[t] for t in working], colour, 0.9)
            sheet.frames([square[t] for t in idle], colour)
            if numbered:
                sheet.words([(self.x(t), y + 13, t) for t in working], WHITE, weight=600)
                sheet.words([(self.x(t), y + 13, t) for t in idle], sheet.soft)
            words = f"warp {first // WARP}"
            if not numbered and width >= 150:
                words += f", threads {first} to {warp[-1]}"
            sheet.text(x + width / 2, y + 26.5, words, 9.5, colour, "middle", 600)


class Cells:
    """A row of elements in groups of 32 bytes, the sectors.

    Sectors far from every access are left out."""

    def __init__(self, trace, traced, events):
        self.item = traced.itemsize
        self.end = traced.elements * traced.itemsize
        self.lead = traced.lead
        touched = set(trace.sectors_of(events)[1].tolist())
        low = int(events["offset"].min())
        high = int((events["offset"] + events["bytes"]).max())
        sectors = -(-(self.end + self.lead) // SECTOR)
        ends = {min(touched) - 1, max(touched) + 1}
        neighbours = {s for s in ends if 0 <= s < sectors and len(touched) <= 2}
        if sectors <= max(5, len(touched)):
            visible = touched | set(range(sectors))
        elif max(touched) - min(touched) < MOST_SECTORS:
            visible = set(range(min(touched), max(touched) + 1)) | neighbours
        else:
            between = {s + 1 for s in touched if s + 2 in touched}
            visible = touched | between | neighbours
        # sector -> its first and last byte that exist or are touched
        self.sectors = {}
        for s in sorted(visible):
            first = max(self._first_byte(s), min(0, low)) // self.item * self.item
            last = -(-min(self._first_byte(s + 1), max(self.end, high)) // self.item) * self.item
            self.sectors[s] = (first, last)
        self.bytes = sum(last - first for first, last in self.sectors.values())
        # stretches of sectors without a gap
        self.stretches = sum(s - 1 not in visible for s in visible)

    def _first_byte(self, sector):
        return SECTOR * sector - self.lead

    def _sector(self, byte):
        return (byte + self.lead) // SECTOR

    def place(self, left, right, threads, events):
        """Decide where each sector stands between left and right.

        Where there are about as many elements as threads, `spacing` is that of both: (width of
        one, how many in a group, gap between groups).
        """
        order = list(self.sectors)
        gap = 5.0 if len(order) <= 12 else 3.0
        skip = 14.0 if self.stretches <= 12 else 7.0
        edge = 9.0
        beyond = edge * ((self.sectors[order[0]][0] < 0) + (self.sectors[order[-1]][1] > self.end))
        space = gap * (len(order) - 1) + skip * (self.stretches - 1) + beyond
        elements = self.bytes / self.item
        pitch = min(26.0, (right - left - space) / elements)
        # Elements and threads in one row of squares, from `low` on: the elements begin at 0.
        lead = self._lead(threads, events)
        low, high = min(lead, 0.0), max(lead + len(threads), elements)
        group = max(SECTOR // self.item, 1)
        room = right - left - space - gap * (high - low - elements) / group
        self.spacing = None
        if (
            high - low <= 2 * min(elements, len(threads))
            or room / (high - low) >= text_width(threads[-1], 9.5) + 4
        ):
            pitch = min(26.0, room / (high - low))
            self.spacing = pitch, group, gap
        else:
            low, high = 0.0, elements
        self.scale = pitch / self.item
        wide = pitch + gap / group
        x = left + (right - left - space - elements * pitch - (high - low - elements) * wide) / 2
        x -= low * wide
        self.start = {}
        # where dots stand for sectors that are left out
        self.dots = [x - 10] if order[0] > 0 else []
        previous = None
        for s in order:
            first, last = self.sectors[s]
            if previous is not None:
                starts = previous < 0 <= s
                ends = first >= self.end > self.sectors[previous][0]
                x += gap + edge * (starts or ends)
                if s != previous + 1:
                    if skip > 10:
                        self.dots.append(x + skip / 2 - gap / 2)
                    x += skip
            self.start[s] = x - (first - self._first_byte(s)) * self.scale
            x += (last - first) * self.scale + edge * (first < self.end < last)
            previous = s
        if self._first_byte(order[-1] + 1) < self.end:
            self.dots.append(x + 7.5)

    def _lead(self, threads, events):
        """How many squares the first thread stands behind the first element that is shown.

        That of most threads, if each stands below what it touches.
        """
        index, count = {}, 0.0
        for sector, (first, last) in self.sectors.items():
            index[sector] = count - first / self.item
            count += (last - first) / self.item
        leads = [
            index[self._sector(offset)] + offset / self.item - (thread - threads[0])
            for thread, offset in _rows(events, "thread", "offset")
        ]
        return float(np.median(leads)) if leads else 0.0

    def x(self, byte):
        """Where a byte begins."""
        sector = self._sector(byte)
        first = self._first_byte(sector)
        # past the end, in the sector that holds the end
        crossed = first < self.end <= byte
        return self.start[sector] + (byte - first) * self.scale + 9.0 * crossed

    def span(self, offset, size):
        """Where `size` bytes begin and end."""
        return self.x(offset), self.x(offset + size - 1) + self.scale

    def draw(self, sheet, y, events, labels_above):
        """The cells. labels_above: write the numbers of elements above them, else below."""
        pitch = self.item * self.scale
        touched = {}  # element -> its colour
        for thread, offset, size in _rows(events, "thread", "offset", "bytes"):
            for element in range(offset // self.item, (offset + size - 1) // self.item + 1):
                inside = 0 <= element * self.item < self.end
                touched[element] = colour_of(thread) if inside else RED
        elements = [
            e
            for low, high in self.sectors.values()
            for e in range(low // self.item, high // self.item)
            if e in touched or 0 <= e * self.item < self.end
        ]
        self._draw_cells(sheet, y, pitch, touched, elements)
        if pitch >= text_width(elements[-1], 8.5) + 1:
            places = {e: (self.x(e * self.item) + pitch / 2, y + 13.4, e) for e in elements}
            inside = [places[e] for e in elements if e in touched]
            sheet.words(inside, WHITE, 8.5, weight=600)
            sheet.words([places[e] for e in elements if e not in touched], sheet.soft, 8.5)
        else:
            self._draw_labels(sheet, y - 5 if labels_above else y + CELL + 12, touched, elements)
        sheet.words([(x, y + 13, "…") for x in self.dots], sheet.soft, 12)
        # the tensor's own ends
        if 0 in self.sectors:
            colour = RED if min(touched, default=0) < 0 else GREY
            sheet.boxes([(self.x(0) - 4.5, y - 4, 1.6, CELL + 8)], colour)
        if self._sector(self.end - 1) in self.sectors:
            colour = RED if max(touched, default=0) * self.item >= self.end else GREY
            x = self.x(self.end - 1) + self.scale + 3
            sheet.boxes([(x, y - 4, 1.6, CELL + 8)], colour)

    def _draw_cells(self, sheet, y, pitch, touched, elements):
        """The sectors, and the cells on them."""
        # (colour, opacity) -> boxes
        looks: dict[tuple[str, float], list[tuple]] = {}
        for low, high in self.sectors.values():
            low, high = max(low, 0), min(high, self.end)
            inside = range(low // self.item, high // self.item)
            colours = [touched[e] for e in inside if e in touched]
            if high > low:
                look = (colours[0], 0.3) if colours else (GREY, 0.1)
                box = (self.x(low) - 1, y - 1, (high - low) * self.scale + 2, CELL + 2)
                looks.setdefault(look, []).append(box)
        if pitch >= 8:
            gap = 1.2
        else:
            gap = 0.4 if pitch >= 2.2 else 0
        for e in elements:
            if e in touched or pitch >= 8:
                look = (touched[e], 0.85) if e in touched else (GREY, 0.14)
                box = (self.x(e * self.item) + gap, y + 1, pitch - 2 * gap, CELL - 2)
                looks.setdefault(look, []).append(box)
        for (colour, opacity), boxes in looks.items():
            sheet.boxes(boxes, colour, opacity)

    def _draw_labels(self, sheet, y, touched, elements):
        """Numbers of some elements: the first of each sector, and the first outside the tensor."""
        labels, outside = [], []
        free = -1e9
        for e in elements:
            first_outside = touched.get(e) == RED != touched.get(e - 1)
            if (e * self.item + self.lead) % SECTOR == 0 or e == elements[0] or first_outside:
                width = 1.1 * text_width(f"{e:,}", 9.5)
                x = min(self.x(e * self.item), WIDTH - width)
                if x > free:
                    label = (x, y, f"{e:,}")
                    (outside if touched.get(e) == RED else labels).append(label)
                    free = x + width + 7
        sheet.words(labels, sheet.soft, anchor="start")
        sheet.words(outside, RED, anchor="start", weight=600)


class Banks:
    """An array in shared memory as rows of 32 words, one for each bank.

    Rows that no thread touches are left out where there are many."""

    def __init__(self, traced, events, whole, banks):
        self.item = traced.itemsize
        self.banks = banks
        self.words = -(-traced.elements * traced.itemsize // 4)
        self.whole = whole
        touched = set()
        for offset, size in _rows(events, "offset", "bytes"):
            touched.update(range(offset // 4 // BANKS, (offset + size - 1) // 4 // BANKS + 1))
        everything = touched | set(range(-(-self.words // BANKS)))
        self.rows = sorted(everything if len(everything) <= MOST_ROWS else touched)
        if len(self.rows) <= 4:
            self.height = 16
        else:
            self.height = 11 if len(self.rows) <= 12 else 6

    def place(self, left, right, threads, events):
        """Decide where the banks stand between left and right; threads stand as they do."""
        self.pitch = min(23.0, (right - left + 8) / BANKS)
        self.spacing = (self.pitch, BANKS, 0.0) if len(threads) <= BANKS else None
        self.left = left + (right - left + 10 - BANKS * self.pitch) / 2

    def span(self, offset, size):
        """Where `size` bytes begin and end."""
        x = self.left + offset // 4 % BANKS * self.pitch
        return x, x + ((offset + size - 1) // 4 - offset // 4 + 1) * self.pitch

    def draw_banks(self, sheet, y, events):
        """The banks, with the turns that the worst request takes at each.

        Returns:
            Where they end.
        """
        warp = events["thread"] // WARP
        order, group = groups(events["pc"], events["block"], warp, events["visit"], events["kind"])
        request = np.empty(len(events), np.int64)
        request[order] = group
        count = request.max(initial=-1) + 1
        worst = turns_per_bank(events, request, count).max(axis=0, initial=0)
        sheet.words([(self.left - 9, y + 10.5, "bank")], sheet.soft, anchor="end")
        looks = (
            (0, 0, GREY, 0.15, sheet.soft, 400),
            (1, 1, GREY, 0.8, WHITE, 600),
            (2, 999, RED, 0.9, WHITE, 600),
        )
        for least, most, fill, opacity, colour, weight in looks:
            some = [
                (self.left + bank * self.pitch, f"{turns}×" if turns > 1 else bank)
                for bank, turns in enumerate(worst.tolist())
                if least <= turns <= most
            ]
            sheet.boxes([(x + 0.8, y, self.pitch - 1.6, 14) for x, _ in some], fill, opacity)
            words = [(x + self.pitch / 2, y + 10.4, word) for x, word in some]
            sheet.words(words, colour, 9, weight=weight)
        return y + 14

    def draw(self, sheet, y, events, outside, writes, reads) -> float:
        """The table, with its banks above it (writes) and below it (reads).

        Returns:
            Where it ends.
        """
        if writes and self.banks:
            y = self.draw_banks(sheet, y, events[events["kind"] != READ]) + 4
        colours = self._colours(events, outside)
        # (colour, opacity) -> boxes
        looks: dict[tuple[str, float], list[tuple]] = {}
        labels = []
        label_y = -1e9
        for k, row in enumerate(self.rows):
            if k and row != self.rows[k - 1] + 1:
                y += 8
            for word in range(row * BANKS, row * BANKS + BANKS):
                if 0 <= word < self.words or word in colours:
                    x = self.left + word % BANKS * self.pitch + 0.8
                    box = (x, y + 0.6, self.pitch - 1.6, self.height - 1.2)
                    looks.setdefault(colours.get(word, (GREY, 0.14)), []).append(box)
            if y - label_y >= 11:
                first = row * BANKS * 4 // self.item
                labels.append((self.left - 9, y + self.height / 2 + 3.5, f"{first:,}"))
                label_y = y
            y += self.height
        for (colour, opacity), boxes in looks.items():
            sheet.boxes(boxes, colour, opacity)
        sheet.words(labels, sheet.soft, anchor="end")
        if reads and self.banks:
            y = self.draw_banks(sheet, y + 4, events[events["kind"] == READ])
        return y

    def _colours(self, events, outside):
        """Word -> (colour, opacity) for the words that these events or other warps touch."""
        colours = {}
        for offset, size in _rows(self.whole, "offset", "bytes"):
            for word in range(offset // 4, (offset + size - 1) // 4 + 1):
                colours[word] = OTHERS
        rows = _rows(events, "thread", "offset", "bytes")
        for (thread, offset, size), is_outside in zip(rows, outside.tolist()):
            for word in range(offset // 4, (offset + size - 1) // 4 + 1):
                colours[word] = (RED if is_outside else colour_of(thread), 0.85)
        return colours


def draw_links(sheet, events, outside, band, cells, top, reading):
    """Lines down from `top`, between threads and what they touch.

    A wedge stands for more than one element."""
    bottom, middle = top + LINK, top + LINK / 2
    drawn = set()
    paths = {}  # (colour, atomic) -> lines, wedges, arrow heads
    rows = _rows(events, "thread", "offset", "bytes", "kind")
    for access, is_outside in zip(rows, outside.tolist()):
        if access in drawn:
            continue
        drawn.add(access)
        thread, offset, size, kind = access
        thread_x = band.x(thread)
        a, b = cells.span(offset, size)
        look = (RED if is_outside else colour_of(thread), kind == ATOMIC)
        lines, wedges, heads = paths.setdefault(look, ([], [], []))
        if size > cells.item and b - a > 5:
            cell_ends, thread_ends = (a + 1, b - 1), (thread_x - 1, thread_x + 1)
            (a, b), (c, d) = (cell_ends, thread_ends) if reading else (thread_ends, cell_ends)
            wedges.append(
                f"M{a:.1f} {top}C{a:.1f} {middle} {c:.1f} {middle} {c:.1f} {bottom}H{d:.1f}"
                f"C{d:.1f} {middle} {b:.1f} {middle} {b:.1f} {top}Z"
            )
        else:
            cell_x = (a + b) / 2
            a, b = (cell_x, thread_x) if reading else (thread_x, cell_x)
            lines.append(
                f"M{a:.1f} {top + 1}C{a:.1f} {middle} {b:.1f} {middle} {b:.1f} {bottom - 4}"
            )
            heads.append(f"M{b - 2.6:.1f} {bottom - 6}h5.2l-2.6 5z")
    if len(drawn) <= 40:
        width, opacity = 1.5, 0.85
    else:
        width, opacity = (1.1, 0.6) if len(drawn) <= 140 else (0.9, 0.4)
    # red ones last, above the others
    for (colour, atomic), (lines, wedges, heads) in sorted(
        paths.items(), key=lambda item: item[0][0] == RED
    ):
        if lines:
            dash = "4 3" if atomic else None
            sheet.path(
                "".join(lines),
                stroke=colour,
                stroke_width=width,
                opacity=opacity,
                stroke_dasharray=dash,
            )
        if heads and len(drawn) <= 140:
            sheet.path("".join(heads), colour, opacity=opacity)
        if wedges:
            sheet.path("".join(wedges), colour, opacity=0.5)
