"""The notebooks as a ladder, for notebooks/README.md:

    python -m gpuaccel.learn.figures.ladder_figure notebooks/ladder.svg

The picture is an image of its own. Its words are readable in light and in dark pages.
"""

import pathlib
import sys

from .drawing import RUN_COLOURS, WIDTH, Figure, Ink, text_width

# (number, title, what it is about, minutes, the notebooks that come before it)
RUNGS = (
    ("00", "Your first kernel", "threads, bytes, a race", 30, ()),
    ("01", "Gradient accumulation", "where gradients are added up", 45, ("00",)),
    ("02", "Clipping", "a norm, and nobody waits for it", 45, ("01",)),
    ("03", "CUDA graphs", "a whole step in one call", 45, ("02",)),
    ("04", "Embedding gradients", "a sum in a fixed order", 45, ("00",)),
    ("05", "Two layers", "one kernel instead of many", 45, ("00",)),
    ("06", "More than one process", "gradients of several GPUs", 45, ("01",)),
    ("07", "Everything", "all rungs together, and your own model", 45, ("03", "06")),
)
HEIGHT, SHIFT = 38, 26


def ladder() -> Figure:
    """A step for each notebook, the first one at the bottom."""
    ink = Ink()
    top = 34
    ink.text(0, 14, "loss.backward()  →  a gradient  →  a new weight", 13, weight=600)
    ink.text(WIDTH, 14, "minutes", 12, ink.soft, "end")
    for k, (number, title, about, minutes, before) in enumerate(RUNGS):
        x = k * SHIFT
        y = top + (len(RUNGS) - 1 - k) * HEIGHT
        colour = RUN_COLOURS[k % len(RUN_COLOURS)]
        ink.box(x, y, 40, HEIGHT - 8, colour, number, size=15)
        # the step on which the next one stands
        ink.rect(x, y + HEIGHT - 6, WIDTH - x, 2, colour, 0.5)
        ink.text(x + 52, y + 20, title, 14, weight=600)
        words = f"{about}, needs {' and '.join(before)}" if before else f"{about}: start here"
        ink.text(x + 62 + 1.08 * text_width(title, 14), y + 20, words, 12.5, ink.soft)
        ink.text(WIDTH, y + 20, minutes, 13, anchor="end", weight=600)
    words = "; ".join(
        f"{number} {title}, {minutes} minutes" for number, title, _, minutes, _ in RUNGS
    )
    return Figure(ink, top + len(RUNGS) * HEIGHT + 4, f"The notebooks as a ladder: {words}")


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(ladder().drawn + "\n")
