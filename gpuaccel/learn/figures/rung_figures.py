"""The rungs of notebook 06: rates here and on a recorded GPU, side by side.

pairs({"host": (100.0, 4e4), "arena": (120.0, 9e4)}, ("here", "NVIDIA H200"), "Rates")
"""

from collections.abc import Mapping, Sequence

from .drawing import RUN_COLOURS, WIDTH, Figure, Ink, number, text_width


def pairs(
    rows: "Mapping[str, Sequence[float | None]]", names: "Sequence[str]", title: str
) -> Figure:
    """Two bars for each row, each as a multiple of the first value of its kind.

    Args:
        rows: name -> (value, value); None: no bar. names: of the two kinds, for the legend.
    """
    ink = Ink()
    ink.title(15, title)
    kinds = []
    for i, kind in enumerate(names):
        first = next((values[i] for values in rows.values() if values[i]), None)
        if first:
            kinds.append((i, kind, first, RUN_COLOURS[i]))
    x = 0.0
    for _, kind, _, colour in kinds:
        ink.dot(x + 6, 36, 5.5, colour)
        ink.text(x + 18, 40, kind, 12)
        x += text_width(kind, 12) + 44
    left = max((text_width(name, 12) for name in rows), default=0) + 16
    multiples: "dict[str, list[tuple[float, float, str]]]" = {name: [] for name in rows}
    for name, values in rows.items():
        for i, _, first, colour in kinds:
            value = values[i]
            if value:
                multiples[name].append((value / first, value, colour))
    highest = max((bar[0] for bars in multiples.values() for bar in bars), default=1.0)
    scale = (WIDTH - left - 150) / highest
    y = 58
    words = []
    for name, shown in multiples.items():
        ink.text(left - 10, y + 6 + 9 * max(len(shown), 1), name, 12, anchor="end")
        for multiple, value, colour in shown:
            ink.rect(left, y + 2, max(multiple * scale, 1), 15, colour, rx=2)
            label = f"{multiple:.2f}x, {number(value, 'tok/s')}"
            ink.text(left + multiple * scale + 8, y + 14, label, 12, weight=600)
            words.append(f"{name} {label}")
            y += 18
        y += 9
    return Figure(ink, y + 2, f"{title}: {'; '.join(words)}")
