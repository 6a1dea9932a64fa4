"""Pictures of where the gradients of an embedding go: rows that meet, buckets, segments, the bits of two sums, two runs, a rounding.

    >>> token_figures.meeting("the cat and the dog".split())         # which rows of dout meet in which row of dwte
    >>> token_figures.buckets(words)                                  # llm.c's: a thread block for each token, eight warps
    >>> token_figures.segments(words)                                 # sorted, equal ones in the order of their positions, and the runs
    >>> token_figures.pieces({"text": ga.find_segments(tokens, 256)}) # the runs of a batch, cut into pieces of 32 rows
    >>> token_figures.bits({"one order": 0.1, "another": 0.3})        # two sums, bit by bit
    >>> token_figures.twice({"atomics": (losses, losses_again)})      # what became of two runs with the same seed
    >>> token_figures.draws(rounded, exact=256.25)                    # bf16 numbers that were rounded at random, and their mean

Each is a figures.Figure. Words stand for tokens, so that a picture can be read; their numbers are those of the alphabet.
"""

import math
import struct

import torch

from ...ops.token_sort import PIECE, Segments, reference_segments
from .figures import BLUE, GREEN, GREY, ORANGE, RED, Figure, _power, _title
from .picture import RUN_COLOURS, WIDTH, _Ink, _spread, _text_width

LEFT, WARPS = 64, 8


def _numbers(words) -> "tuple[torch.Tensor, list[str]]":
    """(token of each word, the words in the order of their tokens)."""
    names = sorted(set(words))
    return torch.tensor([names.index(word) for word in words]), names


def _colour(token) -> str:
    return RUN_COLOURS[token % len(RUN_COLOURS)]


def _box(ink, x, y, wide, high, colour, words="", pale=False):
    ink.out.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="4" fill="{colour}" opacity="{0.3 if pale else 1}"/>'
    )
    if words != "":
        size = 12 * min(1.0, (wide - 4) / max(_text_width(words, 12), 1))
        ink.text(
            x + wide / 2,
            y + high / 2 + 4,
            words,
            f"{size:.1f}",
            None if pale else "#ffffff",
            "middle",
            600,
        )


def _curve(ink, x1, y1, x2, y2, colour):
    middle = (y1 + y2) / 2
    ink.out.append(
        f'<path d="M{x1:.1f} {y1:.1f}C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}" fill="none" stroke="{colour}" '
        'stroke-width="1.8" opacity="0.8"/>'
    )


def _row(ink, y, label, note=""):
    ink.text(0, y, label, 12.5, weight=600)
    if note:
        ink.text(0, y + 15, note, 11, ink.soft)


def _batch(ink, words, tokens, y):
    """The tokens of a batch in their order, a column each. Returns the columns' left edges and their width."""
    step = (WIDTH - LEFT) / len(words)
    edges = [LEFT + i * step for i in range(len(words))]
    for i, (x, word) in enumerate(zip(edges, words)):
        ink.text(x + step / 2 - 3, y - 6, i, 11, ink.soft, "middle")
        _box(ink, x, y, step - 6, 26, _colour(int(tokens[i])), word)
    return edges, step


# ---- which rows meet ----------------------------------------------------------------------------


def meeting(words: "list[str]") -> Figure:
    """A batch of words above, a row of dout each; the rows of dwte below, and who adds to which. For 16 words at most."""
    ink, (tokens, names) = _Ink(themed=False), _numbers(words)
    _row(ink, 34, "dout", "by row")
    edges, step = _batch(ink, words, tokens, 18)
    _row(ink, 122, "dwte", "by token")
    wide = (WIDTH - LEFT) / len(names)
    for token, name in enumerate(names):
        x = LEFT + token * wide
        for i in (tokens == token).nonzero()[:, 0].tolist():
            _curve(ink, edges[i] + step / 2 - 3, 46, x + wide / 2 - 3, 106, _colour(token))
        _box(ink, x, 106, wide - 6, 26, _colour(token), name)
        ink.text(x + wide / 2 - 3, 148, token, 11, ink.soft, "middle")
    counts = torch.bincount(tokens)
    told = f"{len(words)} rows of dout go to {len(names)} rows of dwte; '{names[int(counts.argmax())]}' gets {int(counts.max())} of them"
    return Figure(ink, 156, told)


def buckets(words: "list[str]") -> Figure:
    """llm.c's buckets: one thread block for each token (and group of channels), the fullest first; its warps take the rows in turn."""
    ink, (tokens, names) = _Ink(themed=False), _numbers(words)
    _row(ink, 34, "rows")
    edges, step = _batch(ink, words, tokens, 18)
    counts = torch.bincount(tokens)
    fullest = counts.argsort(descending=True, stable=True).tolist()
    wide, idle = (WIDTH - LEFT) / len(fullest), 0
    _row(ink, 124, "blocks", "8 warps")
    for b, token in enumerate(fullest):
        x, rows = LEFT + b * wide, (tokens == token).nonzero()[:, 0].tolist()
        ink.out.append(
            f'<rect x="{x:.1f}" y="104" width="{wide - 6:.1f}" height="52" rx="6" fill="{_colour(token)}" opacity="0.13"/>'
        )
        slot, high = (wide - 18) / WARPS, 20
        for warp in range(WARPS):
            taken = rows[warp::WARPS]
            at = x + 6 + warp * slot
            if taken:
                _box(ink, at, 110, slot - 2, high, _colour(token), ",".join(map(str, taken)))
            else:
                idle += 1
                ink.out.append(
                    f'<rect x="{at + 1:.1f}" y="111" width="{slot - 4:.1f}" height="{high - 2}" rx="4" fill="none" stroke="{_colour(token)}" '
                    'stroke-width="1.1" stroke-dasharray="2 2" opacity="0.7"/>'
                )
            for i in taken:
                _curve(ink, edges[i] + step / 2 - 3, 46, at + slot / 2 - 1, 108, _colour(token))
        ink.text(
            x + (wide - 6) / 2,
            147,
            f"{names[token]}: {len(rows)} row{'s' * (len(rows) > 1)}",
            11.5,
            _colour(token),
            "middle",
            600,
        )
    told = f"{len(fullest)} bucket{'s' * (len(fullest) > 1)}, {len(fullest) * WARPS} warps, {idle} of them idle (dashed); warp 0 adds what the others have, in order"
    ink.text(LEFT, 176, told, 12, ink.soft)
    return Figure(ink, 184, told)


def segments(words: "list[str]") -> Figure:
    """A batch of words, stably sorted, and what begins at each place: `pieces` of ga.find_segments. For 16 words at most."""
    ink, (tokens, names) = _Ink(themed=False), _numbers(words)
    found = reference_segments(tokens, len(names))
    _row(ink, 34, "batch", "row")
    edges, step = _batch(ink, words, tokens, 18)
    _row(ink, 122, "order", "its row")
    for place, (row, token) in enumerate(found.order.tolist()):
        x = edges[place]
        _curve(ink, edges[row] + step / 2 - 3, 46, x + step / 2 - 3, 104, _colour(token))
        _box(ink, x, 106, step - 6, 26, _colour(token), names[token])
        ink.text(x + step / 2 - 3, 148, row, 11, ink.soft, "middle")
    _row(ink, 182, "pieces")
    for place, kind in enumerate(found.pieces.tolist()):
        x = edges[place]
        if kind:
            colour, wide = _colour(int(found.order[place, 1])), abs(kind) * step - 6
            ink.out.append(
                f'<path d="M{x:.1f} 156v8h{wide:.1f}v-8" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
        ink.text(
            x + step / 2 - 3,
            182,
            kind,
            12.5,
            _colour(int(found.order[place, 1])) if kind else ink.soft,
            "middle",
            600 if kind else 400,
        )
    told = f"{len(found.runs())} runs; equal tokens stay in the order of their rows; 0: nothing begins here"
    ink.text(LEFT, 204, told, 12, ink.soft)
    return Figure(ink, 212, told)


def pieces(batches: "dict[str, Segments]") -> Figure:
    """Each batch as a bar of its sorted rows: runs in colours, cut where a piece begins; below, where their sums meet. For 400 rows at most."""
    ink, y, told = _Ink(themed=False), 16.0, []
    for name, found in batches.items():
        runs, step = [], WIDTH / max(found.n, 1)  # of each run: how many rows its pieces have
        for kind in filter(None, found.pieces.tolist()):
            if kind <= PIECE:
                runs.append([])
            runs[-1].append(PIECE if kind < 0 else kind if kind <= PIECE else kind - PIECE)
        words = (
            f"{found.n} rows, {len(runs)} run{'s' * (len(runs) != 1)}, {sum(map(len, runs))} pieces"
        )
        told.append(f"{name}: {words}")
        _title(ink, y, name)
        ink.text(_text_width(name, 13) * 1.08 + 14, y, words, 12, ink.soft)
        x = 0.0
        for nth, parts in enumerate(runs):
            colour, end = _colour(nth), x + sum(parts) * step / 2
            for part in parts:
                ink.out.append(
                    f'<rect x="{x:.2f}" y="{y + 12:.1f}" width="{max(part * step - 1.2, 0.8):.2f}" height="22" rx="2.5" fill="{colour}"/>'
                )
                if part * step > _text_width(part, 11) + 6:
                    ink.text(x + part * step / 2 - 0.6, y + 27, part, 11, "#ffffff", "middle", 600)
                if len(parts) > 1:
                    _curve(ink, x + part * step / 2, y + 35, end, y + 66, colour)
                x += part * step
            if len(parts) == 1:
                ink.out.append(
                    f'<path d="M{end:.1f} {y + 35:.1f}V{y + 66:.1f}" stroke="{colour}" stroke-width="1" opacity="0.45"/>'
                )
            ink.dot(
                end,
                y + 68,
                3.6 if len(parts) > 1 else min(2.6, 0.4 * sum(parts) * step + 0.8),
                f'fill="{colour}"',
            )
        y += 104
    ink.text(
        0,
        y - 8,
        f"a bar: a piece of at most {PIECE} rows, added by one warp; a dot: a row of dwte. Pieces of one run are added up by a second kernel",
        12,
        ink.soft,
    )
    return Figure(ink, y, "; ".join(told))


# ---- the same sum, other bits -------------------------------------------------------------------


def _word(value) -> int:
    return struct.unpack(">I", struct.pack(">f", value))[0]


def bits(values: "dict[str, float]") -> Figure:
    """The 32 bits of several fp32 numbers, one below the other; where they are not all the same, red."""
    ink, all_words = _Ink(themed=False), [_word(value) for value in values.values()]
    left = max(_text_width(name, 12) for name in values) + 14
    step, y = (WIDTH - left - 110) / 32, 22.0
    for name, first, last in (("sign", 0, 1), ("exponent", 1, 9), ("fraction", 9, 32)):
        ink.text(
            left + (first + last) / 2 * step, 12, name if first else "±", 11.5, ink.soft, "middle"
        )
    for (name, value), word in zip(values.items(), all_words):
        ink.text(left - 10, y + 16, name, 12, anchor="end", weight=600)
        for i in range(32):
            bit, same = word >> (31 - i) & 1, len({w >> (31 - i) & 1 for w in all_words}) == 1
            _box(
                ink,
                left + i * step,
                y,
                step - 2,
                22,
                RED if not same else GREY if i < 1 else ORANGE if i < 9 else BLUE,
                bit,
            )
        ink.text(left + 32 * step + 10, y + 16, f"{value:.8g}", 12)
        y += 28
    differ = sum(len({w >> i & 1 for w in all_words}) > 1 for i in range(32))
    told = (
        "every bit is the same"
        if not differ
        else f"{differ} bit{'s' * (differ > 1)} differ{'s' * (differ == 1)} (red)"
    )
    ink.text(left, y + 12, told, 12, ink.soft)
    return Figure(
        ink,
        y + 20,
        ", ".join(f"{name} {value:.9g}" for name, value in values.items()) + f": {told}",
    )


def twice(runs: "dict[str, tuple]", title: str = "Two runs with the same seed") -> Figure:
    """Losses of two runs for each name, (first, second): the curves, and the difference by step, logarithmic; exactly 0 lies on the floor."""
    ink, pairs = (
        _Ink(themed=False),
        {name: [[float(x) for x in run] for run in pair] for name, pair in runs.items()},
    )
    _title(ink, 16, title)
    steps = max(len(run) for pair in pairs.values() for run in pair)
    everything = [x for pair in pairs.values() for run in pair for x in run if math.isfinite(x)]
    gaps = {name: [abs(a - b) for a, b in zip(*pair)] for name, pair in pairs.items()}
    seen = [gap for line in gaps.values() for gap in line if gap > 0 and math.isfinite(gap)]
    top, bottom, middle, right = 62, 238, 300, WIDTH - 130
    low, high = min(everything), max(everything)
    floor, roof = (math.floor(math.log10(f(seen))) for f in (min, max)) if seen else (-7, -1)
    floor, roof = floor - 1, roof + 1  # 0 has a place of its own, below the smallest difference

    def loss_at(i, x):
        return 34 + i / max(steps - 1, 1) * (middle - 54), bottom - (x - low) / (
            (high - low) or 1.0
        ) * (bottom - top)

    def gap_at(i, gap):
        share = (math.log10(gap) - floor) / (roof - floor) if gap > 0 else 0.0
        return middle + 56 + i / max(steps - 1, 1) * (right - middle - 56), bottom - share * (
            bottom - top
        )

    def line(points, colour, width=2.0, dash=""):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        ink.out.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round" stroke-dasharray="{dash}"/>'
        )

    ink.text(0, top - 18, "loss", 12, ink.soft)
    ink.text(middle + 20, top - 18, "difference of the two losses", 12, ink.soft)
    for x in sorted({round(low, 1), round((low + high) / 2, 1), round(high, 1)}):
        y = loss_at(0, min(max(x, low), high))[1]
        ink.line(34, y, middle - 20, y, opacity=0.45)
        ink.text(28, y + 4, f"{x:g}", 11, ink.soft, "end")
    for power in range(floor, roof + 1, max(1, (roof - floor) // 5)):
        y = gap_at(0, 10.0**power)[1]
        ink.line(middle + 56, y, right, y, opacity=0.9 if power == floor else 0.45)
        ink.text(middle + 48, y + 4, _power(power) if power > floor else "0", 11, ink.soft, "end")
    for x in (middle - 20, right):
        ink.text(x, bottom + 17, f"{steps} steps", 11, ink.soft, "end")
    ends, told = [], []
    for (name, pair), colour in zip(pairs.items(), (ORANGE, GREEN, *RUN_COLOURS)):
        for k, run in enumerate(pair):
            line(
                [loss_at(i, x) for i, x in enumerate(run) if math.isfinite(x)],
                colour,
                2.0 if k == 0 else 1.2,
                "" if k == 0 else "3 2",
            )
        points = [gap_at(i, gap) for i, gap in enumerate(gaps[name]) if math.isfinite(gap)]
        line(points, colour, 2.4)
        ends.append((name, colour, points[-1][1]))
        told.append(
            f"{name} "
            + (
                f"differ by {max(gaps[name]):.1g} at most"
                if max(gaps[name])
                else "differ in no step"
            )
        )
    for (name, colour, _), y in zip(ends, _spread([y for _, _, y in ends], 16, top, bottom)):
        ink.text(right + 10, y + 4, name, 12, colour, weight=600)
    return Figure(ink, bottom + 26, f"{title}: {'; '.join(told)}")


# ---- rounding at random -------------------------------------------------------------------------


def draws(
    values, exact: float, nearest: "float | None" = None, title: str = "Rounded at random"
) -> Figure:
    """How often each bf16 number came up in many roundings of `exact`, and the mean so far beside it; nearest: what rounding to the nearest gives."""
    ink, values = _Ink(themed=False), [float(x) for x in values]
    _title(ink, 16, title)
    counts = {x: values.count(x) for x in sorted(set(values))}
    y, wide = 54, 150
    for x, count in counts.items():
        ink.text(46, y + 16, f"{x:g}", 12.5, anchor="end", weight=600)
        ink.out.append(
            f'<rect x="56" y="{y}" width="{max(count / len(values) * wide, 1):.1f}" height="22" rx="3" fill="{BLUE}"/>'
        )
        ink.text(62 + count / len(values) * wide, y + 16, f"{count:,} times", 12)
        y += 30
    means, total = [], 0.0
    for i, x in enumerate(values, 1):
        total += x
        means.append(total / i)
    left, right, top, bottom = 340, WIDTH - 120, 48, 190
    shown = [exact, *([] if nearest is None else [nearest]), *means[5:]]
    low, high = min(shown), max(shown)
    low, high = low - 0.06 * (high - low or 1), high + 0.06 * (high - low or 1)

    def at(i, x):
        return left + i / max(len(means) - 1, 1) * (right - left), bottom - (
            min(max(x, low), high) - low
        ) / (high - low) * (bottom - top)

    ink.text(left - 42, top - 12, "mean so far", 12, ink.soft)
    labels = [("exact", exact, GREY, "5 4")] + (
        [] if nearest is None else [("to the nearest", nearest, RED, "")]
    )
    for name, x, colour, dash in labels:
        height = at(0, x)[1]
        ink.out.append(
            f'<line x1="{left}" y1="{height:.1f}" x2="{right}" y2="{height:.1f}" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
        )
        ink.text(left - 8, height + 4, f"{x:g}", 11, ink.soft, "end")
    path = " ".join(
        f"{x:.1f},{height:.1f}" for x, height in (at(i, x) for i, x in enumerate(means))
    )
    ink.out.append(
        f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="2.2" stroke-linejoin="round"/>'
    )
    labels = [(name, colour, at(0, x)[1]) for name, x, colour, _ in labels] + [
        ("at random", BLUE, at(0, means[-1])[1])
    ]
    for (name, colour, _), height in zip(
        labels, _spread([height for _, _, height in labels], 16, top, bottom)
    ):
        ink.text(
            right + 10, height + 4, name, 12, ink.soft if colour == GREY else colour, weight=600
        )
    ink.text(right, bottom + 17, f"{len(values):,} draws", 11, ink.soft, "end")
    told = ", ".join(f"{x:g} {count:,} times" for x, count in counts.items())
    return Figure(
        ink,
        bottom + 26,
        f"{title}: {told}; mean {means[-1]:.6g}, exact {exact:g}"
        + ("" if nearest is None else f", to the nearest {nearest:g}"),
    )
