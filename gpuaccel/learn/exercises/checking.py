"""Try an answer to an exercise; a wrong one gets hint and solution, folded.

    ga.check("scale", scale)             # a kernel, or a Python function

A check runs an answer on sizes around the edges of a thread block and on one of a million elements,
with new random data each time. Elements outside the tensors are poisoned before and compared after,
so that a write beyond the end is seen. Every run is made twice and must be bit-identical. Where the
output holds nothing yet, it holds NaN in one run and zeros in the other: a kernel whose result
differs has read what it was to write.

Kernels run on the CPU with every access checked (simt), so that an error is named with its line and
its thread. On a GPU they run there as well, after the small sizes on the CPU: a kernel that leaves
its tensors or does not end is stopped before it reaches the GPU. Without a C++ compiler a GPU runs
them unchecked; without a GPU too a kernel is only compiled, for every architecture, and the result
is neither right nor wrong, and says so. A function that is to be captured is recorded on a tape,
with or without a GPU.

A right answer is compared with the solution: the accesses of a traced run, the operations of torch.
What it does much more often, and what was asked and not done, stands in the result's remarks.
"""

import copy
import itertools
import re
import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html import escape

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ... import simt
from ...backends import backend, default_device, find_compiler, use_backend
from ...compiler import Kernel, nvrtc, parameters_differ
from ...compiler import compile as compile_kernel
from ...errors import ArgumentError, CaptureError, GpuaccelError, KernelError, suggestion
from ...graphs import TapeRecorder
from ...source import signature, without_comments
from ..magics import is_outdated
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
from .exercises import BLOCK, UNWRITTEN, Exercise

EXERCISES = (
    kernel_puzzles.EXERCISES
    | accumulate_puzzles.EXERCISES
    | clip_puzzles.EXERCISES
    | graph_puzzles.EXERCISES
    | encoder_puzzles.EXERCISES
    | layer_puzzles.EXERCISES
    | rank_puzzles.EXERCISES
    | everything_puzzles.EXERCISES
)
SIZES = (1, 255, 256, 257, 1000, 4096, 1_000_003)
# poisoned elements before and after each tensor: more than a missing bounds check can reach
GUARD = 4096
# seconds that a launch may take on the CPU: of a small size, and of the large one
SMALL_SIZE = 4096
SECONDS = 5.0
SECONDS_LARGE = 10.0
# seconds that the host waits for a launch on a GPU
SECONDS_GPU = 20.0
# the size at which the cost of an answer is counted, and that of its picture
COST_SIZE = 600
PICTURE_SIZE = 100
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
_MARKS = {True: ("✓", "#1b9e77"), False: ("✗", "#d95f3b"), None: ("·", "#8d949e")}
# of a right answer about which something is to be said
_AMBER = "#e6a700"


@dataclass(frozen=True)
class Result:
    """How an answer did. True in an `if` only when it passed.

    Attributes:
        name: of the exercise.
        passed: True, False, or None for not judged: a kernel that was compiled and not run, or one
            whose name a later cell has that did not compile.
        summary: one sentence.
        lines: (passed, what was tried, how it went) for each trial.
        remarks: of a right answer, what it does other than asked or much more often than the
            solution; the summary ends with the first one.
        cost: of a right kernel, (what is counted, this answer, the solution).
        launch: of a kernel that was run, (`kernel[grid, block]`, its arguments) of a small size.
    """

    name: str
    passed: "bool | None"
    summary: str
    lines: "list[tuple[bool | None, str, str]]" = field(default_factory=list)
    remarks: "list[str]" = field(default_factory=list)
    cost: "list[tuple[str, int, int]]" = field(default_factory=list)
    launch: "tuple | None" = field(default=None, repr=False)

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
        """The trials; three or more that failed alike, one after the other, in two lines."""
        shown = []
        for failed, group in itertools.groupby(self.lines, lambda line: not line[0] and line[2]):
            first, *others = group
            if failed and len(others) > 1:
                others = [(False, f"{len(others)} more", "the same")]
            shown += [first, *others]
        return shown

    def _cost_lines(self):
        """The cost as one more line, in the form of the others."""
        if not self.cost:
            return []
        counts = ", ".join(f"{count:,} {what}" for what, count, _ in self.cost)
        solution = ", ".join(f"{count:,}" for _, _, count in self.cost)
        if all(count == other for _, count, other in self.cost):
            solution = "the same"
        outcome = f"with {COST_SIZE:,} elements: {counts} (the solution: {solution})"
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
        hint = Folded("A hint", task.hint, code=False)
        return hint._repr_html_() + Folded("A solution", task.solution, code=True)._repr_html_()

    def _picture_html(self):
        """The picture of a kernel, folded; nothing where there is none."""
        if self.launch is None:
            return ""
        try:
            with simt.checked(True, seconds=SECONDS):
                picture = self.show().picture()
        except GpuaccelError:
            # it touches nothing, or the CPU cannot run it
            return ""
        title = f"Which thread touches what, {PICTURE_SIZE} elements"
        is_open = "" if self.passed else " open"
        return (
            f'<details style="margin-top:4px"{is_open}><summary style="cursor:pointer">'
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


class Folded:
    """Text behind a heading: closed in a notebook until clicked, plain text elsewhere.

    Args:
        title: the heading.
        text: what is behind it.
        code: whether the text is code.
    """

    def __init__(self, title, text, code):
        self.title = title
        self.text = text.strip("\n")
        self.code = code

    def __str__(self):
        return f"{self.title}\n{self.text}"

    __repr__ = __str__

    def _repr_html_(self):
        if self.code:
            tag, style = "pre", "margin:6px 0 0 14px;font-size:13px;line-height:1.45"
        else:
            tag, style = "div", "margin:6px 0 0 14px;max-width:720px"
        return (
            '<details><summary style="cursor:pointer;font-weight:600">'
            f"{escape(self.title)}</summary>"
            f'<{tag} style="{style}">{escape(self.text)}</{tag}></details>'
        )


# ---- public -------------------------------------------------------------------------------------


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


def check(name: str, answer: "Kernel | Callable", *, seed: "int | None" = None) -> Result:
    """Try an answer to an exercise. A wrong answer is a Result, never an exception.

    Args:
        name: of the exercise; list(ga.learn.EXERCISES) names them.
        answer: a Kernel for a kernel exercise, a Python function for the others.
        seed: of the random data; a new one each time by default, and named when an answer is wrong.

    Returns:
        A Result, True in an `if` only when the answer passed; a notebook shows it as a table.

    Raises:
        ArgumentError: for an unknown exercise and for the other kind of answer.

    Example:
        >>> source = ga.learn.EXERCISES["scale"].solution
        >>> result = ga.check("scale", ga.compile(source))
        >>> result.passed
        True
        >>> ga.check("scale", ga.compile(source.replace("i < n", "i <= n"))).passed
        False
    """
    task = exercise(name)
    seed = secrets.randbelow(2**31) if seed is None else seed
    if task.params:
        if not isinstance(answer, Kernel):
            raise ArgumentError(
                f"exercise {name!r} takes a kernel made with %%cuda or ga.compile, "
                f"got {type(answer).__name__}"
            )
        if is_outdated(answer):
            return Result(name, None, _OUTDATED.format(answer.name))
        problem = _parameters_differ(task, answer)
        if problem:
            return Result(name, False, problem)
        return _check_kernel(task, answer, seed)
    if not callable(answer) or isinstance(answer, Kernel):
        raise ArgumentError(
            f"exercise {name!r} takes a Python function, got {type(answer).__name__}"
        )
    if task.turns:
        return _run_captured(task, answer, seed)
    return _run_python(task, answer, seed)


_OUTDATED = (
    "not judged: the last cell that defines `{0}` did not compile, and `{0}` is still the kernel "
    "of the last cell that did. Mend that cell, run it, then check again."
)


def _conclude(task, lines, seed, trial) -> Result:
    """The result of all trials. trial: what one is called."""
    failures = sum(not passed for passed, _, _ in lines)
    if failures:
        verb = "is" if failures == 1 else "are"
        summary = f"not yet: {failures} of {len(lines)} {trial}s {verb} wrong (seed {seed})."
    else:
        summary = f"right for every {trial}."
    return Result(task.name, not failures, summary, lines)


# ---- a kernel -----------------------------------------------------------------------------------


def _parameters_differ(task, kernel) -> "str | None":
    """How the kernel's parameters differ from the task's, in a sentence; names are free."""
    declaration = f'extern "C" __global__ void k({", ".join(task.params)}) {{}}'
    return parameters_differ(signature(declaration, "k", {}), kernel.params, _kind)


def _kind(param):
    """What a parameter accepts."""
    if param.pointer:
        return param.pointer, param.dtypes
    if param.code in ("f", "d"):
        return "number"
    return "whole number" if param.code else "struct"


def _compile_only(task, kernel) -> Result:
    """Compile for every architecture that NVRTC knows."""
    archs = [arch for arch in ARCHS if arch in nvrtc.library().archs]
    registers = []
    for arch in archs:
        try:
            registers.append(kernel.resources(arch).registers)
        except GpuaccelError as error:
            return Result(task.name, False, f"does not compile for {arch}: {error}")
    least, most = min(registers), max(registers)
    span = f"{least}" if least == most else f"{least} to {most}"
    outcome = f"{archs[0]} to {archs[-1]}: the parameters are right, {span} registers"
    reason = f"{backend().reason}; {find_compiler()[1]}"
    return Result(
        task.name,
        None,
        f"compiled, not run. Running it needs a GPU or a C++ compiler: {reason}.",
        [(None, f"{len(archs)} architectures", outcome)],
    )


def _check_kernel(task, kernel, seed) -> Result:
    """Run a kernel on the CPU, on the GPU, or on both; compile it where there is neither."""
    has_compiler = find_compiler()[0] is not None
    if backend().name == "cuda":
        if has_compiler:
            small = [n for n in SIZES if n <= SMALL_SIZE]
            with use_backend("simt"):
                result = _run_kernel(task, kernel, seed, small)
            # What the CPU cannot run, such as PTX, is left to the GPU.
            if not result and result.lines and result.summary != _NOT_LAUNCHED:
                return _with_picture(result, task, kernel, seed)
        result = _run_kernel(task, kernel, seed, SIZES)
    elif has_compiler:
        result = _run_kernel(task, kernel, seed, SIZES)
    else:
        return _compile_only(task, kernel)
    if has_compiler:
        result = _with_picture(_with_cost(result, task, kernel, seed), task, kernel, seed)
    return result


_NOT_LAUNCHED = "it could not be launched."
# A summary with these words is that of a kernel without a picture.
_NO_END = "did not end within"


def _too_slow(n, seconds, lines, seed) -> str:
    """The summary of a kernel that was stopped at n elements, after the trials of `lines`."""
    failures = sum(not passed for passed, _, _ in lines)
    if failures:
        took = f"that of {n:,} elements {_NO_END} {seconds:g} s"
        if n > SMALL_SIZE:
            took = f"the largest one took longer than {seconds:g} s"
        count = f"{failures} of the {len(lines)} smaller sizes"
        if len(lines) == 1:
            count = "the only smaller size"
        verb = "is" if failures == 1 else "are"
        return f"not yet: {count} {verb} wrong, and {took} (seed {seed})."
    if n > SMALL_SIZE and lines:
        return "right for every small size, but too slow for the large one."
    why = f"{_NO_END} {seconds:g} s: too slow, or a loop without an end."
    return f"right for every size below {n:,}; with {n:,} elements it {why}" if lines else why


def _run_kernel(task, kernel, seed, sizes) -> Result:
    """Run a kernel on data of every size, on the backend in use."""
    generator = torch.Generator(default_device().type).manual_seed(seed)
    lines: "list[tuple[bool | None, str, str]]" = []
    for n in sizes:
        case = task.data(n, generator)
        trial = f"{n:,}, {case.label}" if case.label else f"{n:,}"
        seconds = SECONDS if n <= SMALL_SIZE else SECONDS_LARGE
        try:
            with simt.checked(True, seconds=seconds), warnings.catch_warnings():
                # What is none but worth knowing is in the remarks of a right answer.
                warnings.simplefilter("ignore")
                passed, outcome = _try_kernel(task, kernel, n, case)
        except KernelError as error:
            # seen by the checks on the CPU; nothing was changed
            late = [report for report in error.reports if report.kind == "time limit"]
            if late:
                line = f"stopped after {seconds:g} s, in line {late[0].line}"
                summary = _too_slow(n, seconds, lines, seed)
                lines.append((False, trial, line))
                return Result(task.name, False, summary, lines)
            passed = False
            outcome = "; ".join(_report_words(report) for report in error.reports)
            outcome += _barrier_elsewhere(kernel, error.reports)
        except _StillRunning:
            line = f"the GPU was still running it after {SECONDS_GPU:g} s"
            summary = _too_slow(n, SECONDS_GPU, lines, seed)
            lines.append((False, trial, line))
            summary += " The GPU works on it until you restart the notebook's kernel."
            return Result(task.name, False, summary, lines)
        except RuntimeError as error:
            if isinstance(error, GpuaccelError):
                lines.append((False, trial, str(error)))
                return Result(task.name, False, _NOT_LAUNCHED, lines)
            # the GPU itself stopped the kernel
            outcome = f"the GPU stopped it: {str(error).splitlines()[0]}"
            lines.append((False, trial, outcome))
            summary = (
                "it touched memory far outside its tensors. "
                "Restart the notebook's kernel, then mend it."
            )
            return Result(task.name, False, summary, lines)
        lines.append((passed, trial, outcome))
    return _conclude(task, lines, seed, "size")


def _report_words(report) -> str:
    """A mistake that the checks have seen, in words of the lessons: without what only writers of
    launches need, and without fences, which no exercise asks for."""
    message = report.message.split("; tensors whose addresses")[0]
    blocks = "nothing orders two blocks: each needs elements of its own"
    message = message.replace("no __threadfence() and atomic orders the two blocks", blocks)
    return f"line {report.line}: {message}"


def _barrier_elsewhere(kernel, reports) -> str:
    """What to say where two threads of a block race, and the kernel has a barrier."""
    races = any(report.kind == "race" and report.block == report.other_block for report in reports)
    if not races or not re.search(r"__syncthreads\w*\s*\(", without_comments(kernel.text)):
        return ""
    return "; __syncthreads() orders them only if it is between them and all threads reach it"


class _StillRunning(Exception):
    """A GPU has not finished a launch in SECONDS_GPU."""


def _wait_for_gpu():
    """Wait until the GPU has finished; raise _StillRunning when it takes too long."""
    event = torch.cuda.Event()
    event.record()
    end = time.monotonic() + SECONDS_GPU
    while not event.query():
        if time.monotonic() > end:
            raise _StillRunning
        time.sleep(0.001)


def _blocks(task, n):
    """The grid of a launch for n elements."""
    return -(-n // (BLOCK * task.per_thread))


def _try_kernel(task, kernel, n, case):
    """(passed, how it went) of one case: two launches on the same data.

    Where `out` holds nothing yet, it holds zeros in the second one."""
    inputs = [_guarded(tensor, 6.5e4) for tensor in case.inputs]
    before = [whole.clone() for whole, _ in inputs]
    begins_empty = case.begins_empty
    zeros = torch.zeros_like(case.out)

    def run(content):
        whole, out = _guarded(content, -777.0)
        arguments = (out, *(view for _, view in inputs), *case.numbers, n)
        kernel[_blocks(task, n), BLOCK](*arguments)
        if out.is_cuda:
            _wait_for_gpu()
        return whole, out

    whole, out = run(case.out)
    whole_again, again = run(zeros if begins_empty else case.out)
    name = kernel.params[0].name
    outside = _poison_lost(whole, out) or _poison_lost(whole_again, again)
    if outside:
        return False, f"it writes to {outside:,} elements outside `{name}`"
    if any(not torch.equal(_bits(was), _bits(now)) for was, (now, _) in zip(before, inputs)):
        return False, "it changes its input"
    unchanged = _bits(out) == _bits(case.out)
    if case.expected is case.out:
        changed = int((~unchanged).sum())
        if changed:
            written = f"{changed:,} elements have changed, and none should"
            lost = int((out.isnan() & ~case.out.isnan()).sum())
            return False, f"{written}; {lost:,} of them are NaN now" if lost else written
        return True, "right; left alone"
    if begins_empty:
        # An element that holds what it held, whatever that was, is one that was not written.
        unchanged &= _bits(again) == _bits(zeros)
    if unchanged.all():
        return False, "nothing was written" if begins_empty else f"`{name}` is as it was before"
    passed, outcome = _compare(task, case, out, unchanged)
    if not passed and not begins_empty:
        outcome += _sum_lost(kernel, out, [view for _, view in inputs])
    differing = (_bits(out) != _bits(again)) & ~unchanged
    if not differing.any():
        return passed, outcome
    unequal = "two runs on the same data gave different bits"
    if not begins_empty:
        return (False, unequal) if passed else (passed, outcome)
    if not all(
        torch.equal(_bits(first), _bits(run(content)[1]))
        for first, content in ((out, case.out), (again, zeros))
    ):
        return False, unequal
    content = "NaN" if bool(case.out.isnan().any()) else f"{UNWRITTEN}"
    words = f"`{name}` was read before it was written: it holds {content}, not 0, until you write"
    if _compare(task, case, again, unchanged)[0]:
        words += "; with 0 the result would be right"
    return False, words


def _sum_lost(kernel, out, inputs) -> str:
    """What to say where `out` is one of the inputs, though it held something before."""
    name, *others = [param.name for param in kernel.params]
    for other, view in zip(others, inputs):
        if view.shape == out.shape and torch.equal(out, view.to(out.dtype)):
            return f"; that is `{other}` alone: what was in `{name}` before is lost"
    return ""


def _small_launch(task, kernel, n, seed):
    """(`kernel[grid, block]`, its arguments) with data on the CPU."""
    case = task.data(n, torch.Generator().manual_seed(seed))
    arguments = (case.out.clone(), *case.inputs, *case.numbers, n)
    return kernel[_blocks(task, n), BLOCK], arguments


def _with_picture(result, task, kernel, seed) -> Result:
    """The result with what its picture needs. A kernel that does not end has none."""
    if result.summary == _NOT_LAUNCHED or _NO_END in result.summary:
        return result
    return replace(result, launch=_small_launch(task, kernel, PICTURE_SIZE, seed))


def _with_cost(result, task, kernel, seed) -> Result:
    """A right result with its cost and remarks."""
    if not result:
        return result
    mine, theirs = (
        _trace(task, kernel, seed),
        _trace(task, compile_kernel(task.solution, task.name), seed),
    )
    if mine is None or theirs is None:
        return result
    my_cost, their_cost = costs.cost_of(mine), costs.cost_of(theirs)
    sentences = costs.remarks(my_cost, their_cost)
    written_back = _writes_back(task, kernel, seed)
    if written_back:
        same = [
            (ok, what, how.replace("left alone", "the same numbers"))
            for ok, what, how in result.lines
        ]
        result = replace(result, lines=same)
    sentences += written_back
    for kind, rule in _NOTES.items():
        notes = [note for note in mine.notes if note.kind == kind]
        sentences += [f"line {note.line}: {note.message}{rule}" for note in notes[:1]]
    return _with_remarks(replace(result, cost=costs.table(my_cost, their_cost)), sentences)


# Notes of a trace that are remarks, and what a remark adds to each.
_NOTES = {
    "same value": "",
    "ended before a barrier": "; CUDA asks that all threads of a block reach it",
}


def _writes_back(task, kernel, seed) -> "list[str]":
    """A sentence where a kernel writes what is there already, and nothing was to be written."""
    for n in SIZES:
        if n > SMALL_SIZE:
            break
        case = task.data(n, torch.Generator().manual_seed(seed))
        trace = _trace(task, kernel, seed, n) if case.expected is case.out else None
        count = costs.cost_of(trace).writes if trace else 0
        if count:
            return [
                f"it writes {count:,} elements where none should be ({case.label}), "
                "each with what it held"
            ]
    return []


def _trace(task, kernel, seed, n=COST_SIZE) -> "simt.Trace | None":
    """The trace of a small launch; None where the CPU cannot run the kernel."""
    launch, arguments = _small_launch(task, kernel, n, seed)
    try:
        with simt.checked(True, seconds=SECONDS):
            return simt.trace(launch, *arguments)
    except GpuaccelError:
        return None


def _with_remarks(result, sentences) -> Result:
    """A right result with remarks; its summary ends with the first one."""
    if not sentences:
        return result
    summary = f"{result.summary.removesuffix('.')}; but {sentences[0]}."
    return replace(result, summary=summary, remarks=sentences)


def _guarded(tensor, poison):
    """(a copy of the tensor between GUARD poisoned elements, the view of the copy)."""
    n = tensor.numel()
    size = GUARD + n + GUARD + (-n) % 8
    whole = torch.full((size,), poison, dtype=tensor.dtype, device=tensor.device)
    whole[GUARD : GUARD + n] = tensor
    return whole, whole[GUARD : GUARD + n]


def _poison_lost(whole, out) -> int:
    """How many poisoned elements around `out` have been written."""
    poison = _bits(torch.tensor([-777.0], device=out.device).to(out.dtype))
    before = _bits(whole[:GUARD])
    after = _bits(whole[GUARD + out.numel() :])
    return int((before != poison).sum() + (after != poison).sum())


def _bits(tensor):
    """The tensor's bits as whole numbers: NaN compares as any other pattern."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


# roundings by which a sum in another order may differ
_ROUNDINGS = 16


def _compare(task, case, out, unchanged):
    """(passed, how it went) of a kernel's result.

    Args:
        unchanged: which elements hold what they held before
    """
    same = (out == case.expected) | out.isnan() & case.expected.isnan()
    difference = (out.double() - case.expected).abs().masked_fill(same, 0.0)
    eps = torch.finfo(out.dtype).eps if out.dtype.is_floating_point else 0.0
    allowed = case.expected.abs() * eps * case.roundings + case.least
    # written so that NaN counts as a difference
    differing = (~(same | (difference <= allowed))).nonzero().flatten()
    if len(differing):
        i = int(differing[0])
        digits = 7 if case.roundings else 9
        got = f"got {float(out[i]):.{digits}g}"
        if unchanged[i]:
            got = "not written" if case.begins_empty else f"{got}, as before"
        expected = f"expected {float(case.expected[i]):.{digits}g}"
        count = f"{len(differing):,} element{'s' if len(differing) > 1 else ''}"
        outcome = f"{count} wrong; the first is [{i:,}]: {got}, {expected}"
        if case.describe:
            outcome += f"; {case.describe(i)}"
        size = case.expected.abs()
        may_be_order = task.with_sum and out.dtype == torch.float32
        if may_be_order and bool(
            (difference <= size.clamp(min=float(size.mean())) * eps * _ROUNDINGS).all()
        ):
            outcome += "; it differs by roundings, as a sum in another order or type does"
        return False, outcome + _known_mistake(case, out)
    if case.roundings:
        return True, f"right; largest difference {float(difference.max()):.2g}"
    return True, "right, bit by bit"


def _known_mistake(case, out) -> str:
    """What is wrong, where the result is that of an answer with one known mistake."""
    eps = torch.finfo(out.dtype).eps if out.dtype.is_floating_point else 0.0
    for what, result in (case.known_results() if case.known_results else {}).items():
        allowed = result.abs() * eps * case.roundings + case.least
        if bool(((out.double() - result).abs() <= allowed).all()):
            return f"; this is the result {what}"
    return ""


# ---- a Python function --------------------------------------------------------------------------

# Operations whose answer, or the size of whose result, the host has to know, by torch's names.
WAITING = {
    "aten.equal": "torch.equal",
    "aten.allclose": "torch.allclose",
    "aten.nonzero": "torch.nonzero",
    "aten.masked_select": "torch.masked_select",
    "aten._unique2": "torch.unique",
    "aten.unique_dim": "torch.unique",
    "aten.unique_consecutive": "torch.unique_consecutive",
}


class _Operations(TorchDispatchMode):
    """Counts operations of torch, and numbers that Python reads out of tensors.

    On a GPU each such number is a wait."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.numbers_read = 0
        # (shape, method) of each tensor that was copied to the host
        self.copied: "list[tuple]" = []
        # what else the host waits for, in words: an answer, or the size of a result
        self.waiting: "list[str]" = []
        self.copies = _Copies(self.copied)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        self.numbers_read += func is torch.ops.aten._local_scalar_dense.default
        name = str(func.overloadpacket)
        if name in WAITING:
            self.waiting.append(f"calls {WAITING[name]}()")
        elif name in ("aten.index", "aten.index_put", "aten.index_put_") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            self.waiting.append("indexes with a mask")
        return func(*args, **(kwargs or {}))

    def waits(self) -> str:
        """For what the host would wait on a GPU, in a sentence; "" where it would not."""
        if self.numbers_read:
            numbers = f"{self.numbers_read:,} number{'s' if self.numbers_read > 1 else ''}"
            return f"it reads {numbers}: on a GPU the host waits for each"
        if self.waiting:
            return f"it {self.waiting[0]}: on a GPU the host waits for the result or for its size"
        if not self.copied:
            return ""
        count = len(self.copied)
        tensors = "a tensor" if count == 1 else f"{count:,} tensors"
        waits = "the host waits for it" if count == 1 else "it waits for each"
        return f"it copies {tensors} to the host ({self.copied[0][1]}): on a GPU {waits}"

    def __enter__(self):
        self.copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.copies.__exit__(*error)


class _Copies(TorchFunctionMode):
    """Lists tensors that Python takes to the host as a whole. On a CPU no operation is run then."""

    METHODS = {
        torch.Tensor.cpu: ".cpu()",
        torch.Tensor.numpy: ".numpy()",
        torch.Tensor.tolist: ".tolist()",
        torch.Tensor.__array__: "numpy",
    }

    def __init__(self, copied):
        super().__init__()
        self.copied = copied

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        how = self.METHODS.get(func)
        if func is torch.Tensor.to:
            device = kwargs.get("device", args[1] if len(args) > 1 else None)
            # A torch.device is most often that of another tensor: no copy, and none on a GPU.
            if isinstance(device, str) and torch.device(device).type == "cpu":
                how = '.to("cpu")'
        if how:
            self.copied.append((tuple(args[0].shape), how))
        return func(*args, **kwargs)


def _run_python(task, function, seed) -> Result:
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for label, arguments, expected in task.cases(generator):
        # the answer may change its own
        given = copy.deepcopy(arguments)
        operations = _Operations()
        passed, outcome = _try_python(task, function, arguments, given, expected, operations)
        waits = operations.waits() if task.on_device else ""
        if waits:
            outcome = waits if passed else f"{outcome}; {waits}"
            passed = False
        lines.append((passed, label, outcome))
    result = _conclude(task, lines, seed, "case")
    return _with_remarks(result, _python_remarks(task, operations, given)) if result else result


def _python_remarks(task, operations, arguments) -> "list[str]":
    """What is to be said against a right function. arguments: of the run that was counted."""
    sentences = []
    space: dict = {"torch": torch}
    exec(task.solution, space)
    with _Operations() as theirs:
        space[task.name](*arguments)
    if operations.count >= costs.MORE_OPERATIONS * max(theirs.count, 1):
        sentences.append(
            f"it runs {operations.count:,} operations of torch, the solution {theirs.count:,}"
        )
    return sentences


def _try_python(task, function, arguments, given, expected, operations):
    """(passed, how it went) of one case.

    Args:
        given: a copy of the arguments, which the function may change
    """
    try:
        with operations:
            result = function(*arguments)
    except Exception as error:
        # the learner's own code: one line instead of a traceback
        return False, f"{type(error).__name__}: {error}"
    why = ""
    if task.explain and isinstance(result, torch.Tensor):
        sentence = task.explain(given, result)
        why = f"; {sentence}" if sentence else ""
    problem = _shape_differs(result, expected)
    if problem:
        return False, problem + why
    both_nan = result.isnan() & expected.isnan()
    difference = (result.double() - expected).abs().masked_fill(both_nan, 0.0)
    largest = float(difference.max())
    allowed = 1e-5 * float(expected.abs().nan_to_num().max())
    if largest <= allowed:
        return True, f"right; largest difference {largest:.2g}"
    outcome = _first_wrong(result, expected, ~(difference <= allowed))
    if _has_bf16(arguments):
        size = expected.abs()
        step = _ROUNDINGS_BF16 * torch.finfo(torch.bfloat16).eps
        if bool((difference <= step * size.clamp(min=float(size.mean()))).all()):
            outcome += "; it differs by roundings to bf16"
    return False, outcome + why


# roundings to bf16 by which a result in bf16, or a sum in bf16, may differ
_ROUNDINGS_BF16 = 4


def _has_bf16(arguments) -> bool:
    """Whether a tensor among the arguments, or in a list of them, is in bf16."""
    if isinstance(arguments, torch.Tensor):
        return arguments.dtype == torch.bfloat16
    return isinstance(arguments, (tuple, list)) and any(map(_has_bf16, arguments))


def _first_wrong(result, expected, differing) -> str:
    """How many elements are wrong, and the first one.

    Args:
        differing: for each element whether it is
    """
    places = differing.nonzero()
    first = tuple(places[0].tolist())
    got = f"got {float(result[first]):.7g}, expected {float(expected[first]):.7g}"
    if not first:
        return f"wrong: {got}"
    index = ", ".join(f"{i:,}" for i in first)
    count = f"{len(places):,} element{'s' if len(places) > 1 else ''}"
    return f"{count} wrong; the first is [{index}]: {got}"


def _run_captured(task, function, seed) -> Result:
    """The function is called once, on a tape; then only the tape is replayed."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for case in task.turns(generator):
        tensors = [t.clone() for t in case.tensors]
        try:
            tape, returned = TapeRecorder().record(lambda: function(*tensors, *case.numbers))
        except CaptureError as error:
            line = (False, case.label, str(error))
            return Result(task.name, False, "it cannot be captured.", [line])
        except Exception as error:
            # the learner's own code: one line instead of a traceback
            lines.append((False, case.label, f"{type(error).__name__}: {error}"))
            continue
        # a tape's capture already was a step
        for tensor, first in zip(tensors, case.tensors):
            tensor.copy_(first)
        result = returned if case.result_index is None else tensors[case.result_index]
        passed, outcome = _replay(case, tensors, tape, result)
        lines.append((passed, case.label, outcome))
    return _conclude(task, lines, seed, "case")


def _replay(case, tensors, tape, result):
    """(passed, how it went) of all turns of a case."""
    largest = 0.0
    count = len(case.turns)
    for turn, (values, expected, special) in enumerate(case.turns, 1):
        for tensor, value in zip(tensors, values):
            if value is not None:
                tensor.copy_(value)
        in_place = case.result_index is not None
        before = result.clone() if in_place else None
        tape.replay()
        problem = _shape_differs(result, expected)
        if problem:
            return False, problem
        difference = (result.double() - expected).abs()
        allowed = 1e-5 * float(expected.abs().max())
        differing = ~(difference <= allowed)
        if differing.any():
            first = _first_wrong(result, expected, differing).removeprefix("wrong: ")
            if in_place and torch.equal(result, before):
                first = "no element was changed in place"
            return False, f"wrong in replay {turn} of {count}, where {special}; {first}"
        if case.counter:
            name, index = case.counter
            if int(tensors[index]) != turn:
                held = f"`{name}` holds {int(tensors[index])}, expected {turn}"
                return False, f"after replay {turn} of {count} {held}"
        largest = max(largest, float(difference.max()))
    return True, f"right in {count} replays; largest difference {largest:.2g}"


def _shape_differs(result, expected) -> "str | None":
    """A sentence where the result is no tensor of the expected shape."""
    if isinstance(result, torch.Tensor) and result.shape == expected.shape:
        return None
    return f"expected a tensor of shape {tuple(expected.shape)}, got {_what(result)}"


# items of a tuple or list that are named
_ITEMS = 4


def _what(result) -> str:
    """What a function returned, without its numbers where these are many."""
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, (tuple, list)):
        items = [_what(item) for item in result[:_ITEMS]]
        items += ["..."] if len(result) > _ITEMS else []
        count = f"{len(result)} item{'' if len(result) == 1 else 's'}"
        return (
            f"a {type(result).__name__} of {count}: {', '.join(items)}" if items else repr(result)
        )
    if result is None or isinstance(result, (bool, int, float, str)):
        return repr(result)[:60]
    return f"a {type(result).__name__}"
