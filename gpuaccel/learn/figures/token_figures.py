"""Pictures of an embedding's gradients: rows that meet, a sort, bits of sums, rounding.

    token_figures.meeting("the cat and the dog".split())   # rows of dout that meet in dwte
    token_figures.counting(words)                          # counted, and put in their places
    token_figures.bits({"one order": 0.1, "another": 0.3}) # two sums, bit by bit
    token_figures.carry(256.25, [50_000, 60_000])          # 16 random bits, added and cut off

Each is a Figure. Words stand for tokens, so that a picture can be read; their numbers are their
places in the alphabet.
"""

import struct

import torch

from .drawing import (
    BLUE,
    GREY,
    ORANGE,
    PINK,
    RED,
    RUN_COLOURS,
    WHITE,
    WIDTH,
    Figure,
    Ink,
    plural,
    text_width,
)
from .kernel_figures import float_bits

LEFT = 64


def _tokens_of(words) -> tuple[torch.Tensor, list[str]]:
    """(the token of each word, the words in the order of their tokens)."""
    names = sorted(set(words))
    return torch.tensor([names.index(word) for word in words]), names


def _colour(token) -> str:
    return RUN_COLOURS[token % len(RUN_COLOURS)]


def _draw_label(ink, y, label, note=""):
    """What a row of the picture is, at its left."""
    ink.text(0, y, label, 12.5, weight=600)
    if note:
        ink.text(0, y + 15, note, 11, ink.soft)


def _places(count) -> tuple[list[float], float]:
    """The left edges of `count` columns, and their width."""
    step = (WIDTH - LEFT) / count
    return [LEFT + i * step for i in range(count)], step


def _draw_batch(ink, words, tokens, y):
    """The tokens of a batch, a column each.

    Returns:
        The columns' left edges and their width.
    """
    edges, step = _places(len(words))
    for i, (x, word) in enumerate(zip(edges, words)):
        ink.text(x + step / 2 - 3, y - 6, i, 11, ink.soft, "middle")
        ink.box(x, y, step - 6, 26, _colour(int(tokens[i])), word)
    return edges, step


# ---- which rows meet ----------------------------------------------------------------------------


def meeting(words: list[str]) -> Figure:
    """A batch of words above, a row of dout each, and the rows of dwte that they add to below.

    For 16 words at most."""
    ink = Ink()
    tokens, names = _tokens_of(words)
    _draw_label(ink, 34, "dout", "by row")
    edges, step = _draw_batch(ink, words, tokens, 18)
    _draw_label(ink, 122, "dwte", "by token")
    width = (WIDTH - LEFT) / len(names)
    for token, name in enumerate(names):
        x = LEFT + token * width
        middle = x + width / 2 - 3
        for row in (tokens == token).nonzero()[:, 0].tolist():
            ink.curve(edges[row] + step / 2 - 3, 46, middle, 106, _colour(token))
        ink.box(x, 106, width - 6, 26, _colour(token), name)
        ink.text(middle, 148, token, 11, ink.soft, "middle")
    counts = torch.bincount(tokens)
    summary = (
        f"{len(words)} rows of dout go to {len(names)} rows of dwte; "
        f"'{names[int(counts.argmax())]}' gets {int(counts.max())} of them"
    )
    return Figure(ink, 156, summary)


def counting(words: list[str]) -> Figure:
    """A stable counting sort: how many rows each token has, where they begin, where each row lands.

    Args:
        words: 16 at most.
    """
    ink = Ink()
    tokens, names = _tokens_of(words)
    counts = torch.bincount(tokens, minlength=len(names)).tolist()
    _draw_label(ink, 34, "rows")
    _draw_batch(ink, words, tokens, 18)
    _draw_label(ink, 92, "1. count")
    _draw_label(ink, 116, "2. start")
    _draw_label(ink, 184, "3. place")
    edges, step = _places(len(words))
    width = (WIDTH - LEFT) / len(names)
    order = tokens.argsort(stable=True).tolist()
    start = 0
    for token, name in enumerate(names):
        colour = _colour(token)
        x = LEFT + token * width
        left = x + 0.56 * width
        ink.box(x, 76, 0.5 * width, 24, colour, name)
        ink.text(left, 92, plural(counts[token], "row"), 12.5)
        ink.text(left, 116, f"place {start}", 12.5, colour, weight=600)
        first = edges[start] + step / 2 - 3
        ink.curve(x + 0.7 * width, 122, first, 164, colour)
        for place in range(start, start + counts[token]):
            ink.box(edges[place], 168, step - 6, 26, colour, f"row {order[place]}")
        start += counts[token]
    for place, x in enumerate(edges):
        ink.text(x + step / 2 - 3, 210, place, 11, ink.soft, "middle")
    summary = "; ".join(f"{name}: {plural(count, 'row')}" for name, count in zip(names, counts))
    words_below = "places, and the rows that stand there; rows of one word keep their order"
    ink.text(LEFT, 230, words_below, 12, ink.soft)
    listed = ", ".join(map(str, order))
    return Figure(ink, 238, f"counted: {summary}; rows in their places: {listed}")


def bits(values: dict[str, float]) -> Figure:
    """The 32 bits of several fp32 numbers, one below the other; bits that differ are red."""
    ink = Ink()
    numbers = [float_bits(value) for value in values.values()]
    different = [len({number >> (31 - i) & 1 for number in numbers}) > 1 for i in range(32)]
    left = max(text_width(name, 12) for name in values) + 14
    step = (WIDTH - left - 110) / 32
    y = 22.0
    for name, first, last in (("±", 0, 1), ("exponent", 1, 9), ("fraction", 9, 32)):
        ink.text(left + (first + last) / 2 * step, 12, name, 11.5, ink.soft, "middle")
    part_colours = [GREY] + [ORANGE] * 8 + [BLUE] * 23
    for (name, value), number in zip(values.items(), numbers):
        ink.text(left - 10, y + 16, name, 12, anchor="end", weight=600)
        for i in range(32):
            colour = RED if different[i] else part_colours[i]
            ink.box(left + i * step, y, step - 2, 22, colour, number >> (31 - i) & 1)
        ink.text(left + 32 * step + 10, y + 16, f"{value:.8g}", 12)
        y += 28
    count = sum(different)
    result = "every bit is the same"
    if count:
        result = f"{plural(count, 'bit')} {'differs' if count == 1 else 'differ'} (red)"
    ink.text(left, y + 12, result, 12, ink.soft)
    summary = ", ".join(f"{name} {value:.9g}" for name, value in values.items())
    return Figure(ink, y + 20, f"{summary}: {result}")


def carry(value: float, noises: list[int]) -> Figure:
    """The bits of a number, 16 random bits added to them, and the 16 bits that bf16 keeps.

    Args:
        value: finite, in fp32. noises: whole numbers below 65,536, one for each trial.
    """
    ink = Ink()
    word = float_bits(value)
    left, step = 96, 19.5
    gap = 12

    def draw_bits(y, bits, colour, first, last):
        for i in range(first, last):
            x = left + i * step + (gap if i > 15 else 0)
            ink.rect(x, y, step - 2, 22, colour, rx=3)
            ink.text(x + step / 2 - 1, y + 16, bits >> (31 - i) & 1, 12, WHITE, "middle")

    ink.text(left, 12, "bf16 keeps these 16 bits", 12, ink.soft)
    lower = word & 0xFFFF
    ink.text(left + 16 * step + gap, 12, f"the lower half: {lower:,}", 12, ink.soft)
    ink.text(left - 10, 36, f"{value:g}", 12.5, anchor="end", weight=600)
    draw_bits(20, word, BLUE, 0, 16)
    draw_bits(20, word, GREY, 16, 32)
    y = 60
    results = []
    for noise in noises:
        rounded = (word + noise) >> 16 << 16
        result = struct.unpack(">f", struct.pack(">I", rounded))[0]
        carried = rounded >> 16 != word >> 16
        colour = RED if carried else BLUE
        ink.text(left - 10, y + 16, "+ random", 12, ink.soft, "end")
        draw_bits(y, noise, PINK, 16, 32)
        words = f"{lower:,} + {noise:,} = {lower + noise:,}: "
        words += "carries 1" if carried else "carries nothing"
        ink.text(left + 16 * step - 4, y + 16, words, 12, colour, "end", 600)
        ink.text(left - 10, y + 44, f"= {result:g}", 12.5, anchor="end", weight=600)
        draw_bits(y + 28, rounded, colour, 0, 16)
        results.append(
            f"with {noise:,}, which {'carries' if carried else 'does not carry'}, {result:g}"
        )
        y += 68
    return Figure(ink, y - 8, f"{value:g}, lower half {lower:,}: {'; '.join(results)}")
