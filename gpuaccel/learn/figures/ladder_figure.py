"""The notebooks as a ladder, for the index that `make lab` opens:

    python -m gpuaccel.learn.figures.ladder_figure notebooks

It writes ladder.svg and the table in README.md. Both show those rungs whose notebook is in the
folder. The picture is an image of its own, whose words are readable in light and in dark pages.
"""

import pathlib
import re
import sys
from dataclasses import dataclass

from .drawing import BLUE, WIDTH, Figure, Ink, text_width

HEIGHT = 38
MARGIN = 22
MARKS = ("<!-- ladder -->", "<!-- /ladder -->")


@dataclass(frozen=True)
class Rung:
    """A notebook: its file, its title, what it teaches, and what is read before it.

    Attributes:
        learn: a line of the table. about: a few words for the picture.
        minutes: of a careful first read with the exercises that are not marked optional.
    """

    stem: str
    title: str
    learn: str
    about: str
    before: tuple[str, ...] = ()
    minutes: int = 30

    @property
    def number(self) -> str:
        return self.stem.split("_")[0]

    @property
    def on_shelf(self) -> bool:
        """Nothing is built on it: it may be left out."""
        return self.number == "shelf"


RUNGS = (
    Rung(
        "00_first_kernel",
        "Your first kernel",
        "a kernel of one line trains a network; which bytes threads move, how they share results",
        "a kernel that trains a network",
        minutes=35,
    ),
    Rung(
        "01_accumulate",
        "Gradient accumulation",
        "micro-batches, the kernel that adds their gradients, and why the sum needs 32 bits",
        "gradients of micro-batches",
        ("00",),
        minutes=25,
    ),
    Rung(
        "02_clip",
        "Clipping",
        "one bad batch, and three kernels that stop it while Python does not wait",
        "one bad batch, stopped",
        ("01",),
        minutes=30,
    ),
    Rung(
        "03_graphs",
        "One step, one launch",
        "a whole training step, recorded once and started with one call",
        "a whole step in one call",
        ("02",),
        minutes=30,
    ),
    Rung(
        "04_encoder",
        "Why two runs differ",
        "sums without an order, and the kernel whose sums are the same in every bit",
        "two runs, every bit equal",
        ("02",),
        minutes=25,
    ),
    Rung(
        "05_processes",
        "More than one process",
        "your sum of gradients trains two processes as one; torch's DDP beside it; a rank dies",
        "your sum over processes",
        ("02", "04"),
        minutes=30,
    ),
    Rung(
        "06_everything",
        "Everything, in one launch",
        "a script that waits becomes one launch of your kernels; ours beside it; your own model",
        "a script becomes one launch",
        ("03", "04"),
        minutes=40,
    ),
    Rung(
        "shelf_rounding",
        "Rounding at random",
        "how a network with weights of 16 bits learns as one with 32; tokens out of range",
        "weights in 16 bits",
        ("01",),
        minutes=20,
    ),
    Rung(
        "shelf_activation",
        "An activation that learns",
        "a backward by hand, a wrong one that no error names, and a check that finds it",
        "a backward by hand",
        ("01",),
        minutes=25,
    ),
    Rung(
        "shelf_attention",
        "Attention without a softmax",
        "attention key by key, then by a table of fixed size, and how much the table holds",
        "a memory of fixed size",
        ("01",),
        minutes=35,
    ),
)


def present(folder) -> list[Rung]:
    """The rungs whose notebook is in this folder."""
    return [rung for rung in RUNGS if (pathlib.Path(folder) / f"{rung.stem}.ipynb").exists()]


def ladder(rungs=RUNGS) -> Figure:
    """A step for each notebook, the first one at the bottom; the shelf branches off below."""
    ink = Ink()
    top = 34
    main = [rung for rung in rungs if not rung.on_shelf]
    shelf = [rung for rung in rungs if rung.on_shelf]
    shift = min(26.0, 190 / len(main))
    ink.text(0, 14, "loss.backward()  →  a gradient  →  a new weight", 13, weight=600)
    ink.text(WIDTH, 14, "minutes", 12, ink.soft, "end")
    for k, rung in enumerate(main):
        words = f"; needs {' and '.join(rung.before)}" if rung.before else ": start here"
        y = top + (len(main) - 1 - k) * HEIGHT
        _step(ink, MARGIN + k * shift, y, rung, rung.about + words)
    bottom = top + len(main) * HEIGHT + 4
    if shelf:
        ink.text(MARGIN, bottom + 18, "The shelf: after 01, in any order", 13, weight=600)
        start = top + (len(main) - 2) * HEIGHT + HEIGHT / 2 - 4
        for k, rung in enumerate(shelf):
            y = bottom + 30 + k * HEIGHT
            _step(ink, MARGIN, y, rung, rung.about)
            middle = y + HEIGHT / 2 - 4
            corners = (MARGIN + shift, start), (8, start), (8, middle), (MARGIN, middle)
            ink.polyline(corners, BLUE, 2)
        bottom += 30 + len(shelf) * HEIGHT
    words = "; ".join(f"{rung.number} {rung.title}, {rung.minutes} minutes" for rung in rungs)
    return Figure(ink, bottom, f"The notebooks as a ladder: {words}")


def _step(ink, x, y, rung, words):
    """A rung: its number, its title, and the line on which the next one stands."""
    ink.box(x, y, 44, HEIGHT - 8, BLUE, rung.number, size=13 if rung.on_shelf else 15)
    ink.rect(x, y + HEIGHT - 6, WIDTH - x, 2, BLUE, 0.5)
    ink.text(x + 56, y + 20, rung.title, 14, weight=600)
    ink.text(x + 70 + 1.06 * text_width(rung.title, 14), y + 20, words, 12.5, ink.soft)
    ink.text(WIDTH, y + 20, rung.minutes, 13, anchor="end", weight=600)


def table(rungs=RUNGS) -> str:
    """The same as a table in Markdown, with links."""
    lines = ["| | notebook | what you learn | read before | minutes |", "|---|---|---|---|---|"]
    for rung in rungs:
        link = f"[{rung.title}]({rung.stem}.ipynb)"
        before = ", ".join(rung.before)
        lines.append(f"| {rung.number} | {link} | {rung.learn} | {before} | {rung.minutes} |")
    return "\n".join(lines)


def with_table(page: str, rungs=RUNGS) -> str:
    """The index page with this table between its two marks."""
    first, last = MARKS
    pattern = f"{re.escape(first)}.*?{re.escape(last)}"
    return re.sub(pattern, lambda _: f"{first}\n{table(rungs)}\n{last}", page, flags=re.DOTALL)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    (folder / "ladder.svg").write_text(ladder(present(folder)).drawn + "\n")
    index = folder / "README.md"
    index.write_text(with_table(index.read_text(), present(folder)))
