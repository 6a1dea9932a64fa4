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
them unchecked; without a GPU too a kernel is only compiled, and the result is neither right nor
wrong, and says so. A function that is to be captured is recorded on a tape, with or without a GPU;
kernels that it launches run on the CPU.

A wrong answer is compared with the exercise's known-wrong answers: where it does the same as one of
them, the summary says which mistake that is. One that does not compile is explained by a table of
common slips.

A right answer is compared with the solution: the accesses of a traced run, the operations of torch,
double precision in the PTX. What it does much more often, what was asked and not done, and what is
right for these sizes only, stands in the result's remarks.
"""

import re
import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from ... import simt
from ...backends import backend, default_device, find_compiler, use_backend
from ...compiler import Kernel, parameters_differ
from ...compiler import compile as compile_kernel
from ...errors import ArgumentError, CompileError, GpuaccelError, KernelError
from ...source import signature, without_comments
from ..figures.drawing import plural
from ..sentences import first_wrong, is_rounding, number
from . import costs
from .compile_errors import does_not_compile, find_slip
from .exercises import BLOCK, UNWRITTEN
from .kernel_source import double_precision, small_index
from .known_mistakes import known_mistake
from .python_answers import function_of, run_captured, run_python
from .results import COST_SIZE, PICTURE_SIZE, Result, conclude, exercise, with_remarks

SIZES = (1, 255, 256, 257, 1000, 4096, 1_000_003)
# poisoned elements before and after each tensor: more than a missing bounds check can reach
GUARD = 4096
# seconds that a launch may take on the CPU: of a small size, and of the large one
SMALL_SIZE = 4096
SECONDS = 5.0
SECONDS_LARGE = 10.0
# seconds that the host waits for a launch on a GPU
SECONDS_GPU = 20.0


def check(name: str, answer: Kernel | Callable, *, seed: int | None = None) -> Result:
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
        problem = _parameters_differ(task, answer)
        if problem:
            return Result(name, False, problem)
        return _check_kernel(task, answer, seed)
    if not callable(answer) or isinstance(answer, Kernel):
        raise ArgumentError(
            f"exercise {name!r} takes a Python function, got {type(answer).__name__}"
        )
    result = _check_function(task, answer, seed)
    return replace(result, function=answer if result else function_of(task, task.solution))


def _check_function(task, function, seed) -> Result:
    """Run a Python function; kernels that it launches run on the CPU with every access checked."""
    run = run_captured if task.turns else run_python
    if not task.launches:
        return run(task, function, seed)
    if find_compiler()[0] is None:
        why = f"its kernels run on the CPU, which needs a C++ compiler: {find_compiler()[1]}"
        return Result(task.name, None, f"not tried: {why}.")
    with use_backend("simt"), simt.checked(True, seconds=SECONDS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(task, function, seed)


def _parameters_differ(task, kernel) -> str | None:
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
    reason = f"{backend().reason}; {find_compiler()[1]}"
    registers = kernel.resources().registers
    return Result(
        task.name,
        None,
        f"compiled, not run. Running it needs a GPU or a C++ compiler: {reason}.",
        [(None, "compiled", f"the parameters are right, {registers} registers")],
    )


def _check_kernel(task, kernel, seed) -> Result:
    """Run a kernel on the CPU, on the GPU, or on both; compile it where there is neither."""
    has_compiler = find_compiler()[0] is not None
    on_gpu = backend().name == "cuda"
    if not on_gpu and not has_compiler:
        return _compile_only(task, kernel)
    if on_gpu and has_compiler:
        with use_backend("simt"):
            result = _run_kernel(task, kernel, seed, [n for n in SIZES if n <= SMALL_SIZE])
        # What the CPU cannot run, such as PTX, is left to the GPU.
        if not result and result.summary != _NOT_LAUNCHED:
            return result
    result = _run_kernel(task, kernel, seed, SIZES)
    return _with_cost(result, task, kernel, seed) if result else result


_NOT_LAUNCHED = "it could not be launched."


def _run_kernel(task, kernel, seed, sizes) -> Result:
    """Run a kernel on data of every size, on the backend in use."""
    generator = torch.Generator(default_device().type).manual_seed(seed)
    lines: list[tuple[bool | None, str, str]] = []
    cases = {}
    for n in sizes:
        case = cases[n] = task.data(n, generator)
        trial = f"n = {n:,}, {case.label}" if case.label else f"n = {n:,}"
        seconds = SECONDS if n <= SMALL_SIZE else SECONDS_LARGE
        end = ""
        try:
            with simt.checked(True, seconds=seconds), warnings.catch_warnings():
                # What is none but worth knowing is in the remarks of a right answer.
                warnings.simplefilter("ignore")
                passed, outcome = _try_kernel(task, kernel, n, case)
        except KernelError as error:
            # seen by the checks on the CPU; nothing was changed
            passed = False
            outcome = _mistake_words(kernel, error.reports)
            late = [report for report in error.reports if report.kind == "time limit"]
            if late:
                outcome = f"stopped in line {late[0].line}"
                end = _stopped(n, seconds)
                if n == SMALL_SIZE:
                    end += _known_mistake(task, kernel, cases)
        except _StillRunning:
            passed, outcome = False, "the GPU was still running it"
            end = (
                f"{_stopped(n, SECONDS_GPU)} "
                "The GPU works on it until you restart the notebook's kernel."
            )
        except GpuaccelError as error:
            if isinstance(error, CompileError) and find_slip(error, kernel.text).sentence:
                return does_not_compile(task, error, kernel.text)
            passed, outcome, end = False, str(error), _NOT_LAUNCHED
        except RuntimeError as error:
            passed, outcome = False, f"the GPU stopped it: {str(error).splitlines()[0]}"
            end = (
                "it touched memory far outside its tensors. "
                "Restart the notebook's kernel, then mend it."
            )
        lines.append((passed, trial, outcome))
        if end:
            # A picture only of a kernel that ended with about as many elements.
            launch = _picture(task, kernel, seed) if n > SIZES[1] else None
            return Result(task.name, False, end, lines, launch=launch)
    result = conclude(task, lines, seed, "size", lambda: _known_mistake(task, kernel, cases))
    return replace(result, launch=_picture(task, kernel, seed))


def _known_mistake(task, kernel, cases) -> str:
    """A sentence on the one known mistake that a wrong kernel makes, or "".

    Args:
        cases: n -> Case; those below SMALL_SIZE are tried.
    """

    def make(sources):
        # one program, which is compiled once
        names = [f"{task.name}_{i}" for i in range(len(sources))]
        texts = [
            re.sub(rf"\b{task.name}(?=\()", name, source)
            for name, source in zip(names, sources.values())
        ]
        kernels = [Kernel.from_source("\n".join(texts), name, task.name) for name in names]
        return dict(zip(sources, kernels))

    def do(answer):
        return [_result(task, answer, n, case) for n, case in cases.items() if n < SMALL_SIZE]

    def wrote():
        return any(
            isinstance(result, str) or not torch.equal(_bits(result), _bits(case.out))
            for result, case in zip(do(kernel), cases.values())
        )

    # A stub needs no comparison, which begins with a compilation.
    is_stub = without_comments(kernel.text).split() == without_comments(task.stub).split()
    return "" if is_stub or not wrote() else known_mistake(task, kernel, make, do)


def _result(task, kernel, n, case):
    """What a kernel leaves in `out`; where the checks on the CPU see mistakes: these in words."""
    inputs = [_guarded(tensor, 3.0)[1] for tensor in case.inputs]
    out = _guarded(case.out, -777.0)[1]
    try:
        with simt.checked(True, seconds=SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel[_blocks(task, n), BLOCK](out, *inputs, *case.numbers, n)
    except KernelError as error:
        # another text has other lines
        return re.sub(r"\bline \d+", "line", "; ".join(report.message for report in error.reports))
    return out


def _stopped(n, seconds) -> str:
    """The summary of a kernel that was stopped at n elements."""
    why = f"it was stopped after {seconds:g} s: too slow, or a loop without an end."
    return f"not yet: with {plural(n, 'element')} {why}"


def _mistake_words(kernel, reports) -> str:
    """The first mistake that the checks have seen, in words of the lessons: without what only
    writers of launches need, and without fences, which no exercise asks for.

    A race comes first: a value that is read too early is another sight of the same one."""
    report = min(reports, key=lambda report: report.kind != "race")
    message = report.message.split("; tensors whose addresses")[0]
    blocks = "nothing orders two blocks: each needs elements of its own"
    message = message.replace("no __threadfence() and atomic orders the two blocks", blocks)
    in_a_block = report.kind == "race" and report.block == report.other_block
    if in_a_block and re.search(r"__syncthreads\w*\s*\(", without_comments(kernel.text)):
        message += (
            "; __syncthreads() orders them only if it is between them and all threads reach it"
        )
    return f"line {report.line}: {message}"


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
    # A number that a sum keeps, and a sigmoid: a large one may leave no trace.
    inputs = [_guarded(tensor, 3.0) for tensor in case.inputs]
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
        return True, "right; no element has changed"
    if begins_empty:
        # An element that holds what it held, whatever that was, is one that was not written.
        unchanged &= _bits(again) == _bits(zeros)
    if unchanged.all():
        return False, "nothing was written" if begins_empty else f"`{name}` is as it was before"
    passed, outcome = _compare(task, case, out, unchanged)
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


def _small_launch(task, kernel, n, seed):
    """(`kernel[grid, block]`, its arguments) with data on the CPU."""
    case = task.data(n, torch.Generator().manual_seed(seed))
    arguments = (case.out.clone(), *case.inputs, *case.numbers, n)
    return kernel[_blocks(task, n), BLOCK], arguments


def _picture(task, kernel, seed):
    """What a picture of the kernel needs; None without a compiler, which runs it for that."""
    return _small_launch(task, kernel, PICTURE_SIZE, seed) if find_compiler()[0] else None


def _with_cost(result, task, kernel, seed) -> Result:
    """A right result with its cost and remarks."""
    solution = compile_kernel(task.solution, task.name)
    of_source = [*small_index(task, kernel), *double_precision(kernel, solution)]
    mine, theirs = (_trace(task, answer, seed) for answer in (kernel, solution))
    if mine is None or theirs is None:
        return with_remarks(result, of_source)
    for note in mine.notes:
        if note.kind == "ended before a barrier":
            problem = f"not yet: not all threads of a block reach the barrier of line {note.line}."
            line = (False, f"{COST_SIZE:,}", f"line {note.line}: {note.message}")
            return replace(result, passed=False, summary=problem, lines=[line])
    my_cost, their_cost = costs.cost_of(mine), costs.cost_of(theirs)
    sentences = [*_note_words(mine), *of_source, *costs.remarks(my_cost, their_cost)]
    return with_remarks(replace(result, cost=costs.table(my_cost, their_cost)), sentences)


def _note_words(trace) -> list[str]:
    """The first two threads that write the same value to one place."""
    notes = [note for note in trace.notes if note.kind == "same value"]
    return [f"line {note.line}: {note.message}" for note in notes[:1]]


def _trace(task, kernel, seed) -> simt.Trace | None:
    """The trace of a small launch; None where the CPU cannot run the kernel."""
    if find_compiler()[0] is None:
        return None
    launch, arguments = _small_launch(task, kernel, COST_SIZE, seed)
    try:
        with simt.checked(True, seconds=SECONDS):
            return simt.trace(launch, *arguments)
    except GpuaccelError:
        return None


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
_ROUNDINGS = 256


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
    differing = ~(same | (difference <= allowed))
    if not differing.any():
        if case.roundings:
            return True, f"right; largest difference {float(difference.max()):.2g}"
        return True, "right, bit by bit"
    i = int(differing.nonzero()[0])
    digits = 7 if case.roundings else 9
    got = f"got {number(out[i], digits)}"
    if unchanged[i]:
        got = "not written" if case.begins_empty else f"{got}, as before"
    outcome = first_wrong(out, case.expected, differing, digits, got)
    if case.describe:
        outcome += f"; {case.describe(i)}"
    may_be_order = task.with_sum and out.dtype == torch.float32
    if may_be_order and is_rounding(difference, case.expected, _ROUNDINGS * eps):
        outcome += "; it differs by roundings, as a sum in another order or type does"
    return False, outcome
