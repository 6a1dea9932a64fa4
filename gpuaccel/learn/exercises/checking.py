"""Try an answer to an exercise; show its hint and its solution, folded.

    >>> ga.check("scale", scale)             # a kernel, or a Python function
    >>> ga.hint("scale"); ga.solution("scale")

A check runs an answer on sizes around the edges of a thread block and on one of a million elements,
with new random data each time. Elements outside the tensors are poisoned before and compared after,
so that a write beyond the end is seen. Every run is made twice and must be bit-identical. Without a
GPU the kernel runs on the CPU with every access checked (simt), so that an error is named with its
line and its thread. Without a C++ compiler it is only compiled, for every architecture; the result
then is neither right nor wrong, and says so. A function that is to be captured is recorded on a
tape, with or without a GPU.
"""

import secrets
from dataclasses import dataclass, field
from html import escape

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...backends import backend, default_device, find_compiler
from ...compiler import Kernel, nvrtc
from ...errors import ArgumentError, CaptureError, GpuaccelError, KernelError
from ...graphs import TapeRecorder
from ...source import signature
from . import (
    accumulate_puzzles,
    clip_puzzles,
    encoder_puzzles,
    graph_puzzles,
    kernel_puzzles,
    layer_puzzles,
    rank_puzzles,
)
from .exercises import BLOCK, Exercise

EXERCISES = (
    kernel_puzzles.EXERCISES
    | accumulate_puzzles.EXERCISES
    | clip_puzzles.EXERCISES
    | graph_puzzles.EXERCISES
    | encoder_puzzles.EXERCISES
    | layer_puzzles.EXERCISES
    | rank_puzzles.EXERCISES
)
SIZES = (1, 255, 256, 257, 1000, 4096, 1_000_003)
# poisoned elements before and after each tensor: more than a missing bounds check can reach
GUARD = 4096
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
_MARKS = {True: ("✓", "#1b9e77"), False: ("✗", "#d95f3b"), None: ("·", "#8d949e")}


@dataclass(frozen=True)
class Result:
    """How an answer did. True in an `if` only when it passed.

    passed: True, False, or None for compiled but not run.
    summary: one sentence.
    lines: (passed, what was tried, how it went) for each trial."""

    name: str
    passed: "bool | None"
    summary: str
    lines: "list[tuple[bool | None, str, str]]" = field(default_factory=list)

    def __bool__(self):
        return self.passed is True

    def __str__(self):
        width = max((len(trial) for _, trial, _ in self.lines), default=0)
        rows = [
            f"  {_MARKS[passed][0]} {trial:<{width}}  {outcome}"
            for passed, trial, outcome in self.lines
        ]
        return "\n".join([f"{self.name}: {self.summary}", *rows])

    __repr__ = __str__

    def _repr_html_(self):
        rows = "".join(self._row_html(*line) for line in self.lines)
        box = (
            f"border-left:4px solid {_MARKS[self.passed][1]};padding:4px 14px;font-size:13px;"
            "font-variant-numeric:tabular-nums"
        )
        return (
            f'<div style="{box}"><div style="padding-bottom:3px">'
            f"<b>{escape(self.name)}</b>: {escape(self.summary)}</div>"
            '<table style="border-collapse:collapse;margin:0;font-size:13px">'
            f"{rows}</table></div>"
        )

    def _row_html(self, passed, trial, outcome):
        mark, colour = _MARKS[passed]
        return (
            '<tr style="background:transparent">'
            f'<td style="padding:1px 8px 1px 2px;color:{colour};font-weight:700">{mark}</td>'
            '<td style="padding:1px 16px 1px 0;text-align:right;white-space:nowrap">'
            f"{escape(trial)}</td>"
            '<td style="padding:1px 0;text-align:left;color:var(--jp-ui-font-color2,inherit)">'
            f"{escape(outcome)}</td></tr>"
        )


class Folded:
    """Text behind a heading: closed in a notebook until clicked, plain text elsewhere."""

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
    """The exercise of this name; ArgumentError lists the names there are."""
    if name not in EXERCISES:
        raise ArgumentError(f"there is no exercise {name!r}; exercises: {', '.join(EXERCISES)}")
    return EXERCISES[name]


def hint(name: str) -> Folded:
    """A hint, folded."""
    return Folded("A hint", exercise(name).hint, code=False)


def solution(name: str) -> Folded:
    """A solution, folded."""
    return Folded("A solution", exercise(name).solution, code=True)


def check(name: str, answer, *, seed: "int | None" = None) -> Result:
    """Try an answer. A wrong answer is a Result, never an exception.

    answer: a Kernel for a kernel exercise, a Python function for the others.
    seed: of the random data; a new one each time by default, and named when an answer is wrong.

    Raises ArgumentError for an unknown exercise and for the other kind of answer."""
    task = exercise(name)
    seed = secrets.randbelow(2**31) if seed is None else seed
    if task.params:
        if not isinstance(answer, Kernel):
            raise ArgumentError(
                f"exercise {name!r} takes a kernel made with %%cuda or ga.compile, "
                f"got {type(answer).__name__}"
            )
        problem = _parameters_differ(task, answer)
        if problem:
            return Result(name, False, problem)
        if backend().name == "cuda" or find_compiler()[0] is not None:
            return _run_kernel(task, answer, seed)
        return _compile_only(task, answer)
    if not callable(answer) or isinstance(answer, Kernel):
        raise ArgumentError(
            f"exercise {name!r} takes a Python function, got {type(answer).__name__}"
        )
    if task.turns:
        return _run_captured(task, answer, seed)
    return _run_python(task, answer, seed)


def _conclude(task, lines, seed, trial) -> Result:
    """The result of all trials. trial: what one is called."""
    failures = sum(not passed for passed, _, _ in lines)
    if failures:
        summary = f"not yet: {failures} of {len(lines)} {trial}s differ (seed {seed})."
    else:
        summary = f"right for every {trial}."
    return Result(task.name, not failures, summary, lines)


# ---- a kernel -----------------------------------------------------------------------------------


def _parameters_differ(task, kernel) -> "str | None":
    """How the kernel's parameters differ from the task's, in a sentence; names are free."""
    declaration = f'extern "C" __global__ void k({", ".join(task.params)}) {{}}'
    expected = signature(declaration, "k", {})
    params = kernel.params
    for i in range(max(len(expected), len(params))):
        want = expected[i] if i < len(expected) else None
        got = params[i] if i < len(params) else None
        if not want or not got or _kind(want) != _kind(got):
            return (
                f"the kernel takes ({', '.join(map(str, params))}); "
                f"expected ({', '.join(map(str, expected))}): they differ at parameter {i + 1}, "
                f"`{got or 'nothing'}` where `{want or 'nothing'}` belongs"
            )
    return None


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


def _run_kernel(task, kernel, seed) -> Result:
    """Run a kernel on data of every size."""
    generator = torch.Generator(default_device().type).manual_seed(seed)
    lines: "list[tuple[bool | None, str, str]]" = []
    for n in SIZES:
        case = task.data(n, generator)
        trial = f"{n:,}, {case.label}" if case.label else f"{n:,}"
        try:
            passed, outcome = _try_kernel(task, kernel, n, case)
        except KernelError as error:
            # seen by the checks on the CPU; nothing was changed
            passed = False
            outcome = "; ".join(f"line {r.line}: {r.message}" for r in error.reports)
        except RuntimeError as error:
            if isinstance(error, GpuaccelError):
                lines.append((False, trial, str(error)))
                return Result(task.name, False, "it could not be launched.", lines)
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


def _try_kernel(task, kernel, n, case):
    """(passed, how it went) of one case: two launches on the same data."""
    blocks = -(-n // (BLOCK * task.per_thread))
    inputs = [_guarded(tensor, 6.5e4) for tensor in case.inputs]
    before = [whole.clone() for whole, _ in inputs]
    results = []
    for _ in range(2):
        whole, out = _guarded(case.out, -777.0)
        kernel[blocks, BLOCK](out, *(view for _, view in inputs), *case.numbers, n)
        results.append((whole, out))
    if out.is_cuda:
        torch.cuda.synchronize()
    (whole, out), (again, _) = results
    outside = _poison_lost(whole, out)
    if outside:
        return False, f"it writes to {outside:,} elements outside `{kernel.params[0].name}`"
    if any(not torch.equal(_bits(was), _bits(now)) for was, (now, _) in zip(before, inputs)):
        return False, "it changes its input"
    changed = int((_bits(out) != _bits(case.out)).sum())
    if case.expected is case.out:
        if changed:
            return False, f"{changed:,} elements were written, and none should be"
        return True, "right; left alone"
    if not changed:
        return False, "nothing was written"
    passed, outcome = _compare(case, out)
    if passed and not torch.equal(_bits(whole), _bits(again)):
        return False, "two runs on the same data gave different bits"
    return passed, outcome


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


def _compare(case, out):
    """(passed, how it went) of a kernel's result."""
    same = (out == case.expected) | out.isnan() & case.expected.isnan()
    difference = (out.double() - case.expected).abs().masked_fill(same, 0.0)
    eps = torch.finfo(out.dtype).eps if out.dtype.is_floating_point else 0.0
    allowed = case.expected.abs() * eps * case.roundings + 1e-30
    # written so that NaN counts as a difference
    differing = (~(same | (difference <= allowed))).nonzero().flatten()
    if len(differing):
        i = int(differing[0])
        digits = 7 if case.roundings else 9
        got = f"got {float(out[i]):.{digits}g}"
        if out[i].isnan() and case.out[i].isnan():
            got = "not written"
        expected = f"expected {float(case.expected[i]):.{digits}g}"
        count = f"{len(differing):,} element{'s' if len(differing) > 1 else ''}"
        return False, f"{count} wrong; the first is [{i:,}]: {got}, {expected}"
    if case.roundings:
        return True, f"right; largest difference {float(difference.max()):.2g}"
    return True, "right, bit by bit"


# ---- a Python function --------------------------------------------------------------------------


class _Reads(TorchDispatchMode):
    """Counts the numbers that Python reads out of tensors: on a GPU each is a wait."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _run_python(task, function, seed) -> Result:
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for label, arguments, expected in task.cases(generator):
        passed, outcome = _try_python(task, function, arguments, expected)
        lines.append((passed, label, outcome))
    return _conclude(task, lines, seed, "case")


def _try_python(task, function, arguments, expected):
    """(passed, how it went) of one case."""
    try:
        with _Reads() as reads:
            result = function(*arguments)
    except Exception as error:
        # the learner's own code: one line instead of a traceback
        return False, f"{type(error).__name__}: {error}"
    problem = _shape_differs(result, expected)
    if problem:
        return False, problem
    if task.on_device and reads.count:
        count = f"{reads.count:,} number{'s' if reads.count > 1 else ''}"
        return False, f"it reads {count}: on a GPU the host waits for each"
    both_nan = result.isnan() & expected.isnan()
    difference = float((result.double() - expected).abs().masked_fill(both_nan, 0.0).max())
    passed = difference <= 1e-5 * float(expected.abs().nan_to_num().max())
    return passed, f"{'right' if passed else 'wrong'}; largest difference {difference:.2g}"


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
    for turn, (values, expected) in enumerate(case.turns, 1):
        for tensor, value in zip(tensors, values):
            if value is not None:
                tensor.copy_(value)
        tape.replay()
        problem = _shape_differs(result, expected)
        if problem:
            return False, problem
        difference = float((result.double() - expected).abs().max())
        if not difference <= 1e-5 * float(expected.abs().max()):
            return False, (
                f"wrong in replay {turn} of {count}; largest difference {difference:.2g}"
            )
        largest = max(largest, difference)
    return True, f"right in {count} replays; largest difference {largest:.2g}"


def _shape_differs(result, expected) -> "str | None":
    """A sentence where the result is no tensor of the expected shape."""
    if isinstance(result, torch.Tensor) and result.shape == expected.shape:
        return None
    got = repr(result)[:60]
    if isinstance(result, torch.Tensor):
        got = f"a tensor of shape {tuple(result.shape)}"
    return f"expected a tensor of shape {tuple(expected.shape)}, got {got}"
