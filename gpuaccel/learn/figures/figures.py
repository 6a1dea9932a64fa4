"""Small pictures for the notebooks: a kernel's source, threads, bits, the arena's layout, curves, bars, timelines, tables.

    >>> figures.source("accumulate", "accumulate_v1")        # as it stands in kernels_cu/, coloured
    >>> figures.threads(n=21, block=8)                        # which thread takes which element
    >>> figures.arena(arena)                                  # blocks and tensors in their order
    >>> figures.curves({"fp32": [(1, 1e-8), (4, 2e-8)]}, "Error", "micro-batches", "relative error")
    >>> figures.timeline({"item": timeline.tail(run)})        # who waited for whom
    >>> figures.norms({"block 0": (3.2, 1.0)}, 1.0)           # before and after clipping

Each is an SVG in colours that suit light and dark pages, or a table, and a line of text where pictures are not shown.
"""

import math
import re
from html import escape

from ...compiler.kernel import Kernel, kernel_root
from ...measure.timeline import facts
from .picture import (
    RUN_COLOURS,
    WIDTH,
    _Ink,
    _spread,
    _text_width,
    _time_axis,
    microseconds,
    norm_words,
)

BLUE, ORANGE, GREEN, PINK = RUN_COLOURS[:4]
GREY, RED = "#8d949e", "#e5484d"


class Figure:
    """An SVG and its one line of text."""

    def __init__(self, ink, height, words):
        self.drawn, self.words = ink.svg(height, words), words

    def __repr__(self):
        return self.words

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/svg+xml": self.drawn, "text/plain": self.words}


class Table:
    """Rows of text and a caption; the first column is aligned to the left, the others to the right."""

    def __init__(self, columns, rows, caption=""):
        self.columns, self.rows, self.caption = (
            list(columns),
            [list(map(str, row)) for row in rows],
            caption,
        )

    def __str__(self):
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(line, widths))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*([self.caption] if self.caption else []), *text])

    __repr__ = __str__

    def _repr_html_(self):
        style = (
            "padding:5px 16px 5px 4px;background:transparent;font-variant-numeric:tabular-nums;border-bottom:1px solid"
            " var(--jp-border-color2,rgba(128,128,128,.35))"
        )
        soft = "color:var(--jp-ui-font-color2,inherit)"

        def row(cells, tag, extra=""):
            return (
                '<tr style="background:transparent">'
                + "".join(
                    f'<{tag} style="{style};text-align:{"left" if i == 0 else "right"};{extra}">{escape(cell)}</{tag}>'
                    for i, cell in enumerate(cells)
                )
                + "</tr>"
            )

        caption = (
            f'<div style="{soft};font-size:12px;padding:2px 4px">{escape(self.caption)}</div>'
            if self.caption
            else ""
        )
        return (
            f'{caption}<table style="border-collapse:collapse;font-size:13px;margin:2px'
            f' 0"><thead>{row(self.columns, "th", soft + ";font-weight:500")}</thead>'
            f"<tbody>{''.join(row(cells, 'td') for cells in self.rows)}</tbody></table>"
        )


class Source:
    """A piece of CUDA C, coloured like the editor's theme."""

    _WORDS = re.compile(
        r"(?P<comment>//[^\n]*)|(?P<keyword>\b(?:extern|const|if|else|for|return|struct|void|float|float4|uint2|int|"
        r"long|unsigned|bf16|longlong2|double|float2|int4|bool|template|class|__shared__|__global__|__device__|__forceinline__|__launch_bounds__)\b)|"
        r"(?P<meta>^\s*#[^\n]*)|(?P<string>\"[^\"\n]*\")|"
        r"(?P<number>\b\d\w*\b)|(?P<builtin>\b(?:blockIdx|blockDim|threadIdx|gridDim)\b)",
        re.M,
    )
    _COLOURS = {
        "comment": "var(--jp-mirror-editor-comment-color,#6a8759)",
        "keyword": "var(--jp-mirror-editor-keyword-color,#2f86d1)",
        "meta": "var(--jp-mirror-editor-meta-color,#a06a2c)",
        "string": "var(--jp-mirror-editor-string-color,#b05a3c)",
        "number": "var(--jp-mirror-editor-number-color,#1b9e77)",
        "builtin": "var(--jp-mirror-editor-builtin-color,#c5629f)",
    }

    def __init__(self, text, title):
        self.text, self.title = text.strip("\n"), title

    def __repr__(self):
        return f"// {self.title}\n{self.text}"

    def _repr_html_(self):
        out, at = [], 0
        for found in self._WORDS.finditer(self.text):
            out += [
                escape(self.text[at : found.start()]),
                f'<span style="color:{self._COLOURS[found.lastgroup]}">{escape(found[0])}</span>',
            ]
            at = found.end()
        out.append(escape(self.text[at:]))
        return (
            '<div style="font-size:12px;color:var(--jp-ui-font-color2,inherit);padding:2px 0'
            f' 4px">{escape(self.title)}</div><pre style="font-size:12px;line-height:1.45;margin:0;padding:8px'
            f' 12px;border-left:3px solid {BLUE};white-space:pre;overflow:auto;max-height:560px">{"".join(out)}</pre>'
        )


def source(file: str, name: str, **defines) -> Source:
    """Kernel `name` of kernels_cu/<file>.cu: its text, its lines, and what it costs on this GPU or sm_90."""
    lines = (kernel_root() / f"{file}.cu").read_text().split("\n")
    cost = Kernel(
        file, name, **defines
    ).resources()  # raises, in words, for a name that is not there
    first = next(
        i
        for i, line in enumerate(lines)
        if "__global__" in line and re.search(rf"\b{name}\s*\(", line)
    )
    last = next(i for i in range(first, len(lines)) if lines[i] == "}")
    return Source(
        "\n".join(lines[first : last + 1]),
        f"kernels_cu/{file}.cu, lines {first + 1} to {last + 1}  ·  {cost.registers} registers on {cost.arch}  ·  "
        f"{cost.spill_store_bytes + cost.spill_load_bytes} bytes spilled",
    )


def threads(n: int, block: int, per_thread: int = 1) -> Figure:
    """Thread blocks above, n elements below; threads without an element are hollow. For 40 threads at most."""
    ink, blocks = _Ink(themed=False), -(-n // (block * per_thread))
    slots = blocks * block * per_thread
    step = min(30.0, (WIDTH - 90 - 14 * blocks) / slots)

    def x_of(slot):
        return 84 + slot * step + (slot // (block * per_thread)) * 14

    ink.text(0, 47, "threads", 12.5, weight=600)
    ink.text(0, 107, "elements", 12.5, weight=600)
    for b in range(blocks):
        colour, start = RUN_COLOURS[b % 4], x_of(b * block * per_thread)
        width = block * per_thread * step
        ink.text(start + width / 2, 17, f"block {b}", 12, colour, "middle", 600)
        ink.out.append(
            f'<rect x="{start - 4:.1f}" y="25" width="{width + 6:.1f}" height="36" rx="7" fill="{colour}"'
            ' opacity="0.13"/>'
        )
        for t in range(block):
            slot = (b * block + t) * per_thread
            x, wide, busy = x_of(slot), per_thread * step - 3, slot < n
            ink.out.append(
                f'<rect x="{x:.1f}" y="31" width="{wide:.1f}" height="24" rx="5" fill="{colour if busy else "none"}"'
                f' stroke="{colour}" stroke-width="1.4"'
                f" {'' if busy else 'stroke-dasharray=' + chr(34) + '3 3' + chr(34)}/>"
            )
            ink.text(x + wide / 2, 47, t, 11, "#ffffff" if busy else ink.soft, "middle")
            for i in range(slot, min(slot + per_thread, n)):
                xe = x_of(i)
                ink.line(x + wide / 2, 57, xe + (step - 3) / 2, 89, opacity=0.8)
                ink.out.append(
                    f'<rect x="{xe:.1f}" y="91" width="{step - 3:.1f}" height="24" rx="3" fill="{colour}"'
                    ' opacity="0.3"/>'
                )
                ink.text(xe + (step - 3) / 2, 107, i, 11, anchor="middle")
    spare = blocks * block - -(-n // per_thread)
    words = f"{n} elements, {blocks} blocks of {block} threads" + (
        f", {per_thread} elements per thread" if per_thread > 1 else ""
    )
    words += (
        f"; {spare} to spare (dashed): the guard keeps {'it' if spare == 1 else 'them'} idle"
        if spare
        else ""
    )
    ink.text(84, 138, words, 12, ink.soft)
    return Figure(ink, 146, words)


def bits(value: float) -> Figure:
    """The 32 bits of a float, and the 16 of them that bf16 keeps."""
    import struct

    word = struct.unpack(">I", struct.pack(">f", value))[0]
    ink, step = _Ink(themed=False), 24.0
    parts = [("sign", 0, 1, PINK), ("exponent", 1, 9, ORANGE), ("fraction", 9, 32, BLUE)]
    for name, first, last, colour in parts:
        ink.text(
            (first + last) / 2 * step, 16, name, 12, colour, "middle" if first else "start", 600
        )
        for i in range(first, last):
            kept = i < 16
            ink.out.append(
                f'<rect x="{i * step + 1:.1f}" y="24" width="{step - 3:.1f}" height="28" rx="4" fill="{colour}"'
                f' opacity="{1 if kept else 0.3}"/>'
            )
            ink.text(
                i * step + step / 2 - 0.5,
                43,
                word >> (31 - i) & 1,
                13,
                "#ffffff" if kept else ink.strong,
                "middle",
                600,
            )
    ink.out.append(
        f'<line x1="{16 * step - 0.5}" y1="18" x2="{16 * step - 0.5}" y2="76" stroke="{GREY}" stroke-width="1.6"'
        ' stroke-dasharray="4 3"/>'
    )
    ink.text(16 * step - 10, 72, "bf16 keeps these 16 bits", 12, ink.strong, "end")
    ink.text(
        16 * step + 10,
        72,
        "fp32 has these too" + (": here the last one of the sum is lost" if word & 0xFFFF else ""),
        12,
        ink.soft,
    )
    return Figure(ink, 82, f"{value:g} in fp32 is {word:032b}; bf16 keeps the first 16 bits")


def arena(arena) -> Figure:
    """The arena from first element to last: blocks above, below them the tensors of the first large block."""
    ink, elements = _Ink(themed=False), arena.numel
    ink.text(0, 14, "backward yields its gradients in this order  →", 12, ink.soft)

    def band(parts, y, height, total):
        x, labels = 0.0, []
        for name, size, used, colour in parts:
            width = size / total * WIDTH
            ink.out.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(width - 1.4, 0.7):.2f}" height="{height}" rx="3"'
                f' fill="{colour}" opacity="0.28"/><rect x="{x:.2f}" y="{y}"'
                f' width="{max(used / total * WIDTH - 1.4, 0.7):.2f}" height="{height}" rx="3" fill="{colour}"/>'
            )
            labels.append((name, x, width))
            x += width
        for name, x, width in labels:
            if _text_width(name, 11.5) + 6 < width:
                ink.text(
                    x + width / 2 - 0.7, y + height / 2 + 4, name, 11.5, "#ffffff", "middle", 600
                )
        small = [
            (name, x + width / 2)
            for name, x, width in labels
            if _text_width(name, 11.5) + 6 >= width
        ]
        for k, (name, x) in enumerate(small):
            ink.line(x, y + height, x, y + height + 8 + 15 * (k % 3), 1.0)
            end = "start" if x < WIDTH / 2 else "end"
            ink.text(
                x + (4 if end == "start" else -4),
                y + height + 14 + 15 * (k % 3),
                name,
                11,
                ink.soft,
                end,
            )
        return 15 * min(len(small), 3) + 8 if small else 0

    colours = [RUN_COLOURS[i % len(RUN_COLOURS)] for i in range(len(arena.blocks))]
    used = [sum(s.numel for s in arena.segments[b.first : b.last]) for b in arena.blocks]
    short = [
        b.name.removesuffix(".weight").replace("lm_head.weight .. final_norm", "head")
        for b in arena.blocks
    ]
    below = band(
        [
            (name, b.stop - b.start, u, c)
            for name, b, u, c in zip(short, arena.blocks, used, colours)
        ],
        24,
        44,
        elements,
    )
    chosen = max(
        range(len(arena.blocks)), key=lambda i: (arena.blocks[i].last - arena.blocks[i].first, -i)
    )
    b, top = arena.blocks[chosen], 24 + 44 + below + 46
    for edge, x in ((b.start, 0.0), (b.stop, float(WIDTH))):
        ink.line(edge / elements * WIDTH, 68, edge / elements * WIDTH, 68 + below, 1.0, "3 3")
        ink.line(edge / elements * WIDTH, 68 + below, x, top - 4, 1.0, "3 3")
    ink.text(
        0, top - 12, f"{short[chosen]}, {b.last - b.first} tensors", 12, colours[chosen], weight=600
    )
    tensors = [
        (
            s.name.removeprefix(b.name + ".").removesuffix(".weight"),
            s.padded,
            s.numel,
            colours[chosen],
        )
        for s in arena.segments[b.first : b.last]
    ]
    below = band(tensors, top, 36, b.stop - b.start)
    padding = arena.numel - sum(used)
    words = (
        f"{len(arena.segments)} tensors in {len(arena.blocks)} blocks, {4 * elements / 2**20:,.1f} MiB in one buffer, "
        f"{padding / elements:.1%} of it padding (pale)"
    )
    ink.text(0, top + 36 + below + 22, words, 12, ink.soft)
    return Figure(ink, top + 36 + below + 30, words)


def _power(exponent):
    return {0: "1", 1: "10"}.get(exponent) or "10" + str(exponent).translate(
        str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    )


def curves(
    lines: "dict[str, list[tuple[float, float]]]", title: str, x_label: str, y_label: str
) -> Figure:
    """Both axes logarithmic; points of 0 are left out. The name of each line stands at its end."""
    ink = _Ink(themed=False)
    points = [(x, y) for line in lines.values() for x, y in line if x > 0 and y > 0]
    if not points:
        ink.text(0, 20, f"{title}: nothing to draw, every value is 0", 12)
        return Figure(ink, 30, f"{title}: every value is 0")
    x0, x1 = (math.log10(f(p[0] for p in points)) for f in (min, max))
    y0, y1 = (
        math.floor(min(math.log10(p[1]) for p in points)),
        math.ceil(max(math.log10(p[1]) for p in points)),
    )
    x1, y1 = max(x1, x0 + 0.1), max(y1, y0 + 1)
    left, top, right, bottom = 56, 46, WIDTH - 150, 226

    def at(x, y):
        return left + (math.log10(x) - x0) / (x1 - x0) * (right - left), bottom - (
            math.log10(y) - y0
        ) / (y1 - y0) * (bottom - top)

    ink.text(0, 16, title, 13, weight=600)
    ink.text(0, 34, y_label, 11.5, ink.soft)
    for power in range(y0, y1 + 1, max(1, (y1 - y0) // 5)):
        y = at(10**x0, 10.0**power)[1]
        ink.line(left, y, right, y, opacity=0.5)
        ink.text(left - 8, y + 4, _power(power), 11, ink.soft, "end")
    shown = sorted({x for x, _ in points})
    for x in shown[:: max(1, len(shown) // 9)]:
        ink.text(at(x, 10.0**y0)[0], bottom + 17, f"{x:g}", 11, ink.soft, "middle")
    ink.text(right + 24, bottom + 17, x_label, 11.5, ink.soft)
    ends = []
    for (name, line), colour in zip(lines.items(), RUN_COLOURS):
        places = [at(x, y) for x, y in line if x > 0 and y > 0]
        if places:
            ink.out.append(
                f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" fill="none" stroke="{colour}"'
                ' stroke-width="2.2" stroke-linejoin="round"/>'
            )
            for x, y in places:
                ink.dot(x, y, 3, f'fill="{colour}"')
            ends.append((name, colour, places[-1][1]))
    for (name, colour, _), y in zip(ends, _spread([y for _, _, y in ends], 16, top, bottom)):
        ink.text(right + 14, y + 4, name, 12, colour, weight=600)
    last = ", ".join(f"{name} {line[-1][1]:.2g}" for name, line in lines.items() if line)
    return Figure(ink, bottom + 26, f"{title}: at {shown[-1]:g} {x_label} {last}")


def _title(ink, y, words):
    """In bold, and smaller where it would not fit."""
    ink.text(
        0,
        y,
        words,
        f"{13 * min(1.0, WIDTH / (1.12 * _text_width(words, 13))):.1f}".removesuffix(".0"),
        weight=600,
    )


def bars(
    rows: "list[tuple[str, float, str]]", title: str, limit: "tuple[float, str] | None" = None
) -> Figure:
    """(name, value, words) as horizontal bars on one scale; limit: (value, words) of a dashed line."""
    ink, highest = (
        _Ink(themed=False),
        max([row[1] for row in rows] + [limit[0] if limit else 0]) or 1.0,
    )
    left = max(_text_width(name, 12) for name, _, _ in rows) + 16
    scale, y = (WIDTH - left - 150) / highest, 34
    _title(ink, 15, title)
    for i, (name, value, words) in enumerate(rows):
        ink.text(left - 10, y + 15, name, 12, anchor="end")
        ink.out.append(
            f'<rect x="{left:.1f}" y="{y}" width="{max(value * scale, 1):.1f}" height="21" rx="3"'
            f' fill="{RUN_COLOURS[i % len(RUN_COLOURS)]}"/>'
        )
        x = left + value * scale + 8
        if limit and x - 6 < left + limit[0] * scale < x + _text_width(words, 12):
            x = left + limit[0] * scale + 8
        ink.text(x, y + 15, words, 12, weight=600)
        y += 28
    if limit:
        x = left + limit[0] * scale
        ink.line(x, 26, x, y - 2, 1.6, "4 4")
        ink.text(x, y + 12, limit[1], 11.5, ink.soft, "middle")
        y += 16
    return Figure(
        ink, y + 6, f"{title}: " + ", ".join(f"{name} {words}" for name, _, words in rows)
    )


def warp_sum() -> Figure:
    """How the 32 lanes of a warp add up in five rounds of __shfl_down_sync: what lane 0 needs is solid, with how many elements it holds."""
    ink, lanes, left = _Ink(themed=False), 32, 76
    step = (WIDTH - left - 2) / lanes
    ink.text(0, 14, "lane", 11.5, ink.soft)
    for lane in range(lanes):
        ink.text(left + (lane + 0.5) * step, 14, lane, 10, ink.soft, "middle")
    y = 22.0
    for k, far in enumerate((None, 16, 8, 4, 2, 1)):
        if far:
            for lane in range(far):
                x = left + (lane + 0.5) * step
                ink.line(x, y, x, y + 30, opacity=0.7)
                ink.out.append(
                    f'<path d="M{x + far * step:.1f} {y:.1f}C{x + far * step:.1f} {y + 19:.1f} {x:.1f} {y + 11:.1f} {x:.1f} {y + 30:.1f}"'
                    f' fill="none" stroke="{RUN_COLOURS[(k - 1) % 4]}" stroke-width="1.3" opacity="0.75"/>'
                )
            ink.text(0, y + 19, f"far = {far}", 11.5, ink.soft)
            y += 30
        for lane in range(lanes):
            needed = lane < (far or lanes)
            ink.out.append(
                f'<rect x="{left + lane * step + 1:.1f}" y="{y:.1f}" width="{step - 2:.1f}" height="18" rx="3" fill="{BLUE}"'
                f' opacity="{1 if needed else 0.13}"/>'
            )
            if needed:
                ink.text(left + (lane + 0.5) * step, y + 13, 2**k, 10.5, "#ffffff", "middle", 600)
        y += 20
    words = "five rounds, no memory, always the same order: lane 0 holds the sum of 32"
    ink.text(left, y + 16, words, 12, ink.soft)
    return Figure(ink, y + 24, words)


# ---- who waited for whom ------------------------------------------------------------------------

_SPANS = {  # name of a span -> (colour, opacity, words of the legend); what is not here is a kernel
    "python": (GREY, 0.22, "all else on the host"),
    "operator": (BLUE, 0.7, "an operator of torch"),
    "launch": (BLUE, 1.0, "launches"),
    "copy": (PINK, 1.0, "copies"),
    "wait": (RED, 0.9, "waits for the GPU"),
    "read": (RED, 0.9, "reads a number"),
    "backward": (GREY, 0.55, "rest of backward"),
}
_KERNEL = (GREEN, 1.0, "kernels")


def _lane(ink, spans, y, height, at, left, right):
    """The spans of one lane as one path for each colour: stretches less than half a pixel apart become one."""
    for look in dict.fromkeys([*_SPANS.values(), _KERNEL]):
        boxes = []
        for s in spans:
            if _SPANS.get(s.name, _KERNEL) == look and at(s.stop) > left and at(s.start) < right:
                a, b = max(at(s.start), left), min(at(s.stop), right)
                if boxes and a - boxes[-1][1] < 0.5:
                    boxes[-1][1] = max(boxes[-1][1], b)
                else:
                    boxes.append([a, b])
        if path := "".join(
            f"M{a:.1f} {y}h{max(b - a, 0.7):.1f}v{height}h{-max(b - a, 0.7):.1f}z" for a, b in boxes
        ):
            ink.out.append(f'<path d="{path}" fill="{look[0]}" opacity="{look[1]}"/>')
    named = []  # [name, from, to] of kernels; equal neighbours are one
    for s in (s for s in spans if s.name not in _SPANS):
        a, b = max(at(s.start), left), min(at(s.stop), right)
        if named and named[-1][0] == s.name and a - named[-1][2] < 2:
            named[-1][2] = b
        else:
            named.append([s.name, a, b])
    for name, a, b in named:
        if b - a > _text_width(name, 10) + 6:
            ink.text((a + b) / 2, y + height / 2 + 3.5, name, 10, "#ffffff", "middle", 600)


def timeline(
    runs: "dict[str, list]", title: str = "What follows the last backward of one step"
) -> Figure:
    """Spans of timeline.tail for each run, all on one scale: the host's lane above, the GPU's below (none on a machine without).

    Of the first run that waits (or reads) again and again, a stretch is drawn enlarged below it."""
    ink, left, right, words = _Ink(themed=False), 44, WIDTH - 8, []
    longest = max((s.stop for spans in runs.values() for s in spans), default=0.0) or 1.0
    _title(ink, 16, title)
    names = {s.name for spans in runs.values() for s in spans}
    legend = [_SPANS[name] for name in _SPANS if name in names] + [_KERNEL] * any(
        name not in _SPANS for name in names
    )
    x = 0.0
    for colour, opacity, meaning in legend:
        ink.out.append(
            f'<rect x="{x:.1f}" y="28" width="10" height="10" rx="2.5" fill="{colour}" opacity="{opacity}"/>'
        )
        ink.text(x + 15, 37, meaning, 11.5, ink.soft)
        x += _text_width(meaning, 11.5) * 0.92 + 34
    y, zoomed = 62.0, False

    def lanes(spans, y, first, last):
        def at(us):
            return left + (us - first) / (last - first) * (right - left)

        for lane in ("host", "GPU"):
            some = [s for s in spans if s.lane == lane]
            if some:
                ink.text(left - 10, y + 14, lane, 11, ink.soft, "end")
                _lane(ink, some, y, 20, at, left, right)
                y += 24
        return y

    for (name, spans), colour in zip(runs.items(), RUN_COLOURS):
        found = facts(spans)
        on_gpu = found["gpu_busy"] is not None
        count = found["waits"] if on_gpu else found["reads"]
        what = f"{count:,} {'wait' if on_gpu else 'number'}{'s' * (count != 1)}{'' if on_gpu else ' read'}"
        told = f"{what}, {microseconds(found['us'])}" + (
            f", the GPU works {found['gpu_busy']:.0%} of it" if on_gpu else ""
        )
        words.append(f"{name}: {told}")
        ink.text(0, y, name, 12.5, colour, weight=600)
        ink.text(_text_width(name, 12.5) + 14, y, told, 12, ink.soft)
        top, y = y + 8, lanes(spans, y + 8, 0.0, longest)
        stops = [s for s in spans if s.name in ("wait", "read")]
        if len(stops) >= 8 and not zoomed:
            zoomed, some = True, stops[1:7]  # not the first: that one waits for backward
            first, last = some[0].start - 0.6 * (some[1].start - some[0].start), some[-1].stop
            a, b = (left + us / longest * (right - left) for us in (first, last))
            ink.out.append(
                f'<rect x="{a - 1:.1f}" y="{top - 2:.1f}" width="{max(b - a, 1) + 2:.1f}" height="{y - top:.1f}" fill="none"'
                f' stroke="{colour}" stroke-width="1.4" rx="2"/>'
            )
            for near, far in ((a - 1, left), (b + 1, right)):
                ink.out.append(
                    f'<path d="M{near:.1f} {y - 2:.1f}L{far:.1f} {y + 17:.1f}" stroke="{colour}" stroke-width="1" opacity="0.5"/>'
                )
            y = lanes(spans, y + 19, first, last)
            ink.text(right, y + 11, f"enlarged: {microseconds(last - first)}", 11, ink.soft, "end")
            y += 14
        y += 20
    _time_axis(ink, longest, left, right, y)
    return Figure(ink, y + 16, f"{title}: " + "; ".join(words))


def norms(
    rows: "dict[str, tuple[float, float]]",
    limit: "float | None" = None,
    title: str = "Gradient norm",
) -> Figure:
    """name -> (norm before clipping, norm after it) as bars: pale before, solid after; limit: a dashed line at max_norm."""
    ink = _Ink(themed=False)
    highest = (
        max([pair[0] for pair in rows.values() if math.isfinite(pair[0])] + [limit or 0]) or 1.0
    )
    left = max(_text_width(name, 12) for name in rows) + 16
    scale, y = (WIDTH - left - 110) / highest, 36
    _title(ink, 15, title)
    for i, (name, (before, after)) in enumerate(rows.items()):
        colour = RUN_COLOURS[i % len(RUN_COLOURS)] if math.isfinite(before) else RED
        ink.text(left - 10, y + 15, name, 12, anchor="end")
        for value, opacity in ((before, 0.3), (after, 1.0)):
            if math.isfinite(value):
                ink.out.append(
                    f'<rect x="{left:.1f}" y="{y}" width="{max(value * scale, 1):.1f}" height="21" rx="3" fill="{colour}"'
                    f' opacity="{opacity}"/>'
                )
        ink.text(
            left + (before * scale if math.isfinite(before) else 0) + 8,
            y + 15,
            norm_words(before, after),
            12,
            weight=600,
        )
        y += 27
    if limit is not None:
        x = left + limit * scale
        ink.out.append(
            f'<line x1="{x:.1f}" y1="28" x2="{x:.1f}" y2="{y}" stroke="{ink.strong}" stroke-width="1.4" stroke-dasharray="4 4"/>'
        )
        ink.text(x, y + 13, f"max_norm {limit:g}", 11.5, ink.soft, "middle")
        y += 16
    return Figure(
        ink,
        y + 6,
        f"{title}: " + ", ".join(f"{name} {norm_words(*pair)}" for name, pair in rows.items()),
    )
