"""All exercises, their hints and solutions, and the result of a check: text, or HTML in a notebook.

exercise("scale").task, exercise("scale").solution
Result("scale", False, "not yet: ...", [(False, "n = 1", "nothing was written")])
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html import escape

from ... import simt
from ...backends import find_compiler
from ...errors import ArgumentError, GpuaccelError, suggestion
from ..figures.drawing import in_page
from . import (
    accumulate_puzzles,
    clip_puzzles,
    costs,
    encoder_puzzles,
    everything_puzzles,
    graph_puzzles,
    kernel_puzzles,
    layer_puzzles,
    rank_puzzles,
)
from .exercises import Exercise

MODULES = (
    kernel_puzzles,
    accumulate_puzzles,
    clip_puzzles,
    graph_puzzles,
    encoder_puzzles,
    layer_puzzles,
    rank_puzzles,
    everything_puzzles,
)
EXERCISES = {e.name: e for module in MODULES for e in module.EXERCISES}
# the size at which the cost of an answer is counted, and that of its picture
COST_SIZE = 600
PICTURE_SIZE = 100
# seconds that a picture's launch may take
PICTURE_SECONDS = 5.0
_MARKS = {True: ("✓", "#1b9e77"), False: ("✗", "#d95f3b"), None: ("·", "#8d949e")}
# of a right answer about which something is to be said
_AMBER = "#e6a700"


@dataclass(frozen=True)
class Result:
    """How an answer did. True in an `if` only when it passed.

    Attributes:
        name: of the exercise.
        passed: True, False, or None for a kernel that was compiled and not run.
        summary: one sentence.
        lines: (passed, what was tried, how it went) for each trial.
        remarks: of a right answer, what it does other than asked or much more often than the
            solution; the summary ends with the first one.
        cost: of a right kernel, (what is counted, this answer, the solution).
        launch: of a kernel that was run, (`kernel[grid, block]`, its arguments) of a small size.
        function: of a Python exercise, the answer where it passed, else the solution.
    """

    name: str
    passed: bool | None
    summary: str
    lines: list[tuple[bool | None, str, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    cost: list[tuple[str, int, int]] = field(default_factory=list)
    launch: tuple | None = field(default=None, repr=False)
    function: Callable | None = field(default=None, repr=False)

    def __bool__(self):
        return self.passed is True

    def show(self, **options):
        """`ga.show` of the answer on a small size: which thread touches which element.

        Args:
            **options: as in `ga.show`: block, step, warp.

        Returns:
            An AccessView.

        Raises:
            ArgumentError: for what is no kernel that was run, and without a C++ compiler.
        """
        from ..access_view import show

        if self.launch is None:
            raise ArgumentError(
                f"{self.name}: there is nothing to show; expected a kernel that ga.check has run "
                f"to its end, and a C++ compiler ({find_compiler()[1]})"
            )
        launch, arguments = self.launch
        return show(launch, *arguments, **options)

    def __str__(self):
        rows = [*self._shown_lines(), *self._cost_lines()]
        width = max((len(trial) for _, trial, _ in rows), default=0)
        text = [f"{self.name}: {self.summary}"]
        text += [f"  and {remark}" for remark in self.remarks[1:]]
        text += [
            f"  {_MARKS[passed][0]} {trial:<{width}}  {outcome}" for passed, trial, outcome in rows
        ]
        if self.passed is False:
            text.append(f"  hint: {exercise(self.name).hint}")
        return "\n".join(text)

    __repr__ = __str__

    def _shown_lines(self):
        """The trials; three or more that failed alike, up to numbers, in two lines."""

        def words(line):
            return not line[0] and re.sub(r"-?\d[\d,.]*(e[+-]\d+)?|(?<=element)s", "", line[2])

        shown = []
        for failed, group in itertools.groupby(self.lines, words):
            first, *others = group
            if failed and len(others) > 1:
                same = all(line[2] == first[2] for line in others)
                outcome = "the same" if same else "the same, with other numbers"
                others = [(False, f"{len(others)} more", outcome)]
            shown += [first, *others]
        return shown

    def _cost_lines(self):
        """The cost as one more line, in the form of the others."""
        if not self.cost:
            return []
        counts = ", ".join(f"{count:,} {what}" for what, count, _ in self.cost)
        solution = ", ".join(
            "the same" if count == other else f"{other:,}" for _, count, other in self.cost
        )
        if all(count == other for _, count, other in self.cost):
            solution = "the same"
        outcome = f"with {COST_SIZE:,} elements: {counts} (the solution: {solution})"
        same = {what: count == other for what, count, other in self.cost}
        if same.get(costs.BYTES) and not same.get("reads"):
            outcome += "; the bytes are the same: a float4 is one read"
        return [(None, "cost", outcome)]

    def _repr_html_(self):
        rows = [*self._shown_lines(), *self._cost_lines()]
        colour = _AMBER if self.passed and self.remarks else _MARKS[self.passed][1]
        box = (
            f"border-left:4px solid {colour};padding:4px 14px;font-size:13px;"
            "font-variant-numeric:tabular-nums"
        )
        remarks = "".join(
            f'<div style="padding-bottom:3px">and {_html(remark)}</div>'
            for remark in self.remarks[1:]
        )
        return (
            f'<div style="{box}"><div style="padding-bottom:3px">'
            f"<b>{escape(self.name)}</b>: {_html(self.summary)}</div>{remarks}"
            '<table style="border-collapse:collapse;margin:0;font-size:13px">'
            f"{''.join(self._row_html(*row) for row in rows)}</table>"
            f"{self._help_html()}{self._picture_html()}</div>"
        )

    def _help_html(self):
        """Hint and solution of what is not right, each folded."""
        if self.passed is not False:
            return ""
        task = exercise(self.name)
        code = "font-size:13px;line-height:1.45"
        return _folded("A hint", task.hint, "div", "max-width:720px") + _folded(
            "A solution", task.solution.strip("\n"), "pre", code
        )

    def _picture_html(self):
        """The picture of a kernel, folded; nothing where there is none."""
        if self.launch is None:
            return ""
        try:
            with simt.checked(True, seconds=PICTURE_SECONDS):
                picture = in_page(self.show().picture(in_verdict=True))
        except GpuaccelError:
            # it touches nothing, or the CPU cannot run it
            return ""
        title = f"Which thread touches what, {PICTURE_SIZE} elements"
        return (
            '<details style="margin-top:4px"><summary style="cursor:pointer">'
            f"{title}</summary>{picture}</details>"
        )

    def _row_html(self, passed, trial, outcome):
        mark, colour = _MARKS[passed]
        return (
            '<tr style="background:transparent">'
            f'<td style="padding:1px 8px 1px 2px;color:{colour};font-weight:700">{mark}</td>'
            '<td style="padding:1px 16px 1px 0;text-align:right;white-space:nowrap">'
            f"{escape(trial)}</td>"
            '<td style="padding:1px 0;text-align:left;color:var(--jp-ui-font-color2,inherit)">'
            f"{_html(outcome)}</td></tr>"
        )


def _html(sentence) -> str:
    """A sentence, with `code` in the font of code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(sentence))


def _folded(title, text, tag, style) -> str:
    """Text behind a heading, closed until it is clicked."""
    return (
        f'<details><summary style="cursor:pointer;font-weight:600">{title}</summary>'
        f'<{tag} style="margin:6px 0 0 14px;{style}">{escape(text)}</{tag}></details>'
    )


def exercise(name: str) -> Exercise:
    """The exercise of this name.

    Args:
        name: one of EXERCISES.

    Raises:
        ArgumentError: for another name; it lists those there are.
    """
    if name not in EXERCISES:
        raise ArgumentError(
            f"there is no exercise {name!r}; exercises: {', '.join(EXERCISES)}"
            f"{suggestion(name, EXERCISES)}"
        )
    return EXERCISES[name]


def conclude(task, lines, seed, trial, mistake=lambda: "") -> Result:
    """The result of all trials.

    Args:
        trial: what one is called.
        mistake: asked where one is wrong: a sentence on the known mistake, or "".
    """
    failures = sum(not passed for passed, _, _ in lines)
    if failures:
        verb = "is" if failures == 1 else "are"
        summary = (
            f"not yet: {failures} of {len(lines)} {trial}s {verb} wrong (seed {seed}).{mistake()}"
        )
    else:
        summary = f"right for every {trial}."
    return Result(task.name, not failures, summary, lines)


def with_remarks(result, sentences) -> Result:
    """A right result with remarks; its summary ends with the first one."""
    if not sentences:
        return result
    summary = f"{result.summary.removesuffix('.')}; but {sentences[0]}."
    return replace(result, summary=summary, remarks=sentences)
