"""Exercises of the notebooks: a task, a check on random data of several sizes, a folded hint and a folded solution.

    >>> ga.check("scale", scale)             # a kernel made with %%cuda or ga.compile, or a Python function
    >>> ga.hint("scale"); ga.solution("scale")

A check runs an answer on sizes around the edges of a thread block and on one of a million elements, with new random
data each time. Elements outside the tensors are poisoned before and compared after, so that a write beyond the end is
seen; every run is made twice and must give the same bits. Without a GPU the kernel runs on the CPU with every access
checked (simt), so that a mistake is named with its line and its thread. Where there is no C++ compiler either, it is
only compiled, for every architecture: the result then is neither right nor wrong, and says so. What is to be captured in a graph is
captured on a tape on the CPU, with or without a GPU. Each exercise keeps wrong answers too: the tests show that they fail.
"""

import secrets
from dataclasses import dataclass, field
from html import escape

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...backends import backend, default_device, find_compiler
from ...compiler import nvrtc
from ...compiler.kernel import Kernel
from ...errors import ArgumentError, CaptureError, GpuaccelError, KernelError
from ...graphs.capture import TapeRecorder
from . import encoder_puzzles, layer_puzzles, puzzles, rank_puzzles
from .puzzles import BLOCK, Exercise

EXERCISES = (
    puzzles.EXERCISES | encoder_puzzles.EXERCISES | layer_puzzles.EXERCISES | rank_puzzles.EXERCISES
)
SIZES = (1, 255, 256, 257, 1000, 4096, 1_000_003)
GUARD = 4096  # poisoned elements before and after each tensor; more than a missing bounds check can reach
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Result:
    """`passed`: True, False, or None for compiled but not run. True in an `if` only when passed."""

    name: str
    passed: "bool | None"
    verdict: str
    lines: "list[tuple[bool | None, str, str]]" = field(
        default_factory=list
    )  # (good, what, how it went)

    def __bool__(self):
        return self.passed is True

    def __str__(self):
        width = max((len(what) for _, what, _ in self.lines), default=0)
        rows = [f"  {_MARKS[good][0]} {what:<{width}}  {how}" for good, what, how in self.lines]
        return "\n".join([f"{self.name}: {self.verdict}", *rows])

    __repr__ = __str__

    def _repr_html_(self):
        rows = "".join(
            '<tr style="background:transparent"><td style="padding:1px 8px 1px'
            f' 2px;color:{_MARKS[good][1]};font-weight:700">{_MARKS[good][0]}</td><td style="padding:1px 16px 1px'
            f' 0;text-align:right;white-space:nowrap">{escape(what)}</td><td style="padding:1px'
            f' 0;text-align:left;color:var(--jp-ui-font-color2,inherit)">{escape(how)}</td></tr>'
            for good, what, how in self.lines
        )
        return (
            f'<div style="border-left:4px solid {_MARKS[self.passed][1]};padding:4px'
            ' 14px;font-size:13px;font-variant-numeric:tabular-nums"><div'
            f' style="padding-bottom:3px"><b>{escape(self.name)}</b>: {escape(self.verdict)}</div><table'
            f' style="border-collapse:collapse;margin:0;font-size:13px">{rows}</table></div>'
        )


_MARKS = {True: ("✓", "#1b9e77"), False: ("✗", "#d95f3b"), None: ("·", "#8d949e")}


class Folded:
    """Text behind a heading: closed in a notebook until clicked, plain text elsewhere."""

    def __init__(self, title, text, code):
        self.title, self.text, self.code = title, text.strip("\n"), code

    def __str__(self):
        return f"{self.title}\n{self.text}"

    __repr__ = __str__

    def _repr_html_(self):
        body = (
            f'<pre style="margin:6px 0 0 14px;font-size:13px;line-height:1.45">{escape(self.text)}</pre>'
            if self.code
            else f'<div style="margin:6px 0 0 14px;max-width:720px">{escape(self.text)}</div>'
        )
        return f'<details><summary style="cursor:pointer;font-weight:600">{escape(self.title)}</summary>{body}</details>'


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
    """Try an answer: a Kernel for a kernel exercise, a Python function for the others. Never raises for a wrong answer.

    seed: of the random data; a new one each time by default, and named when something is wrong."""
    task = exercise(name)
    seed = secrets.randbelow(2**31) if seed is None else seed
    if task.params:
        if not isinstance(answer, Kernel):
            raise ArgumentError(
                f"exercise {name!r} takes a kernel made with %%cuda or ga.compile, got {type(answer).__name__}"
            )
        problem = _parameters_differ(task, answer)
        if problem:
            return Result(name, False, problem)
        there = backend().name == "cuda" or find_compiler()[0] is not None
        return _run_kernel(task, answer, seed) if there else _compile_only(task, answer)
    if not callable(answer) or isinstance(answer, Kernel):
        raise ArgumentError(
            f"exercise {name!r} takes a Python function, got {type(answer).__name__}"
        )
    return (_run_captured if task.turns else _run_python)(task, answer, seed)


# ---- how a check works --------------------------------------------------------------------------


def _parameters_differ(task, kernel):
    """None, or a sentence that says how the kernel's parameters differ from the task's (names and const are free)."""
    expected = Kernel.__new__(Kernel)
    expected._setup(
        f'extern "C" __global__ void k({", ".join(task.params)}) {{}}', "k", task.name, {}
    )
    wanted, found = expected.params, kernel.params
    for i in range(max(len(wanted), len(found))):
        w, f = (wanted[i] if i < len(wanted) else None), (found[i] if i < len(found) else None)
        same = (
            w
            and f
            and w.pointer == f.pointer
            and (w.dtypes == f.dtypes if w.pointer else _kind(w) == _kind(f))
        )
        if not same:
            return (
                f"the kernel takes ({', '.join(map(str, found))}); expected ({', '.join(map(str, wanted))}): "
                f"they differ at parameter {i + 1}, `{f or 'nothing'}` where `{w or 'nothing'}` belongs"
            )
    return None


def _kind(param):
    return "number" if param.code in ("f", "d") else "whole number" if param.code else "struct"


def _compile_only(task, kernel):
    archs = [arch for arch in ARCHS if arch in nvrtc.library().archs]
    registers = []
    for arch in archs:
        try:
            registers.append(kernel.resources(arch).registers)
        except GpuaccelError as error:
            return Result(task.name, False, f"does not compile for {arch}: {error}")
    span = (
        f"{min(registers)}" if len(set(registers)) == 1 else f"{min(registers)} to {max(registers)}"
    )
    lines = [
        (
            None,
            f"{len(archs)} architectures",
            f"{archs[0]} to {archs[-1]}: the parameters are right, {span} registers",
        )
    ]
    why = f"{backend().reason}; {find_compiler()[1]}"
    return Result(
        task.name,
        None,
        f"compiled, not run. Running it needs a GPU or a C++ compiler: {why}.",
        lines,
    )


def _guarded(tensor, poison):
    """(the tensor's copy with GUARD poisoned elements before and after, the view of the middle)."""
    n = tensor.numel()
    whole = torch.full(
        (GUARD + n + GUARD + (-n) % 8,), poison, dtype=tensor.dtype, device=tensor.device
    )
    whole[GUARD : GUARD + n] = tensor
    return whole, whole[GUARD : GUARD + n]


def _bits(tensor):
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def _run_kernel(task, kernel, seed):
    generator, lines = torch.Generator(default_device().type).manual_seed(seed), []
    for n in SIZES:
        case = task.data(n, generator)
        what = f"{n:,}, {case.label}" if case.label else f"{n:,}"
        try:
            good, how = _try_kernel(task, kernel, n, case)
        except KernelError as error:  # seen by the checks on the CPU; nothing was changed
            good, how = False, "; ".join(f"line {r.line}: {r.message}" for r in error.reports)
        except (
            RuntimeError
        ) as error:  # the GPU itself stopped the kernel, or it could not be launched
            lost = not isinstance(error, GpuaccelError)
            how = f"the GPU stopped it: {str(error).splitlines()[0]}" if lost else str(error)
            lines.append((False, what, how))
            if lost:
                return Result(
                    task.name,
                    False,
                    "it touched memory far outside its tensors. Restart the notebook's kernel, then mend it.",
                    lines,
                )
            return Result(task.name, False, "it could not be launched.", lines)
        lines.append((good, what, how))
    return _verdict(task, lines, seed, "size")


def _try_kernel(task, kernel, n, case):
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
    poison = _bits(torch.tensor([-777.0], device=out.device).to(out.dtype))
    outside = int(
        (_bits(whole[:GUARD]) != poison).sum()
        + (_bits(whole[GUARD + out.numel() :]) != poison).sum()
    )
    if outside:
        return False, f"it writes to {outside:,} elements outside `{kernel.params[0].name}`"
    if any(not torch.equal(_bits(was), _bits(now)) for was, (now, _) in zip(before, inputs)):
        return False, "it changes its input"
    changed = int((_bits(out) != _bits(case.out)).sum())
    if case.expected is case.out:
        return (
            not changed,
            f"{changed:,} elements were written, and none should be"
            if changed
            else "right; left alone",
        )
    if not changed:
        return False, "nothing was written"
    same = (out == case.expected) | out.isnan() & case.expected.isnan()
    difference = (out.double() - case.expected).abs().masked_fill(same, 0.0)
    eps = torch.finfo(out.dtype).eps if out.dtype.is_floating_point else 0.0
    allowed = case.expected.abs() * eps * case.roundings + 1e-30
    bad = (~(same | (difference <= allowed))).nonzero().flatten()  # also where it is NaN
    if len(bad):
        i, digits = int(bad[0]), 7 if case.roundings else 9
        got = (
            "not written"
            if out[i].isnan() and case.out[i].isnan()
            else f"got {float(out[i]):.{digits}g}"
        )
        count = f"{len(bad):,} element{'s' if len(bad) > 1 else ''}"
        return (
            False,
            f"{count} wrong; the first is [{i:,}]: {got}, expected {float(case.expected[i]):.{digits}g}",
        )
    if not torch.equal(_bits(whole), _bits(again)):
        return False, "two runs on the same data gave different bits"
    return (
        True,
        f"right; largest difference {float(difference.max()):.2g}"
        if case.roundings
        else "right, bit by bit",
    )


class _Reads(TorchDispatchMode):
    """Counts the numbers that Python reads out of tensors: on a GPU it would wait for each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _run_python(task, function, seed):
    generator, lines = torch.Generator().manual_seed(seed), []
    for label, arguments, expected in task.cases(generator):
        try:
            with _Reads() as reads:
                got = function(*arguments)
        except Exception as error:  # the learner's own code: show it as one line
            lines.append((False, label, f"{type(error).__name__}: {error}"))
            continue
        if problem := _other_shape(got, expected):
            lines.append((False, label, problem))
            continue
        if task.on_device and reads.count:
            lines.append(
                (
                    False,
                    label,
                    f"it reads {reads.count:,} number{'s' * (reads.count > 1)}: on a GPU the host waits for each",
                )
            )
            continue
        both_nan = got.isnan() & expected.isnan()
        difference = float((got.double() - expected).abs().masked_fill(both_nan, 0.0).max())
        good = difference <= 1e-5 * float(expected.abs().nan_to_num().max())
        lines.append(
            (good, label, f"{'right' if good else 'wrong'}; largest difference {difference:.2g}")
        )
    return _verdict(task, lines, seed, "case")


def _run_captured(task, function, seed):
    """The function is called once, on a tape; then only the tape is replayed."""
    generator, lines = torch.Generator().manual_seed(seed), []
    for case in task.turns(generator):
        mine = [t.clone() for t in case.tensors]
        try:
            tape, returned = TapeRecorder().record(lambda: function(*mine, *case.numbers))
        except CaptureError as error:
            return Result(
                task.name, False, "it cannot be captured.", [(False, case.label, str(error))]
            )
        except Exception as error:  # the learner's own code: show it as one line
            lines.append((False, case.label, f"{type(error).__name__}: {error}"))
            continue
        for tensor, first in zip(mine, case.tensors):
            tensor.copy_(first)  # on a tape the capture was a step
        lines.append(
            _replays(case, mine, tape, returned if case.where is None else mine[case.where])
        )
    return _verdict(task, lines, seed, "case")


def _replays(case, mine, tape, out):
    worst = 0.0
    for nth, (values, expected) in enumerate(case.turns, 1):
        for tensor, value in zip(mine, values):
            if value is not None:
                tensor.copy_(value)
        tape.replay()
        if problem := _other_shape(out, expected):
            return False, case.label, problem
        difference = float((out.double() - expected).abs().max())
        if not difference <= 1e-5 * float(expected.abs().max()):
            return (
                False,
                case.label,
                f"wrong in replay {nth} of {len(case.turns)}; largest difference {difference:.2g}",
            )
        worst = max(worst, difference)
    return True, case.label, f"right in {len(case.turns)} replays; largest difference {worst:.2g}"


def _other_shape(got, expected) -> "str | None":
    if isinstance(got, torch.Tensor) and got.shape == expected.shape:
        return None
    what = (
        f"a tensor of shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)[:60]
    )
    return f"expected a tensor of shape {tuple(expected.shape)}, got {what}"


def _verdict(task, lines, seed, what) -> Result:
    wrong = sum(not good for good, _, _ in lines)
    words = (
        f"not yet: {wrong} of {len(lines)} {what}s differ (seed {seed})."
        if wrong
        else f"right for every {what}."
    )
    return Result(task.name, not wrong, words, lines)
