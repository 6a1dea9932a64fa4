"""Try a Python function as the answer to an exercise: called with data, or captured and replayed.

run_python(exercise("token_mean"), token_mean, seed=1)          # a Result
run_captured(exercise("decay"), decay, seed=1)
"""

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...compiler import compile as compile_kernel
from ...errors import CaptureError, KernelError
from ...graphs import TapeRecorder
from ..figures.drawing import plural
from ..sentences import first_wrong, is_rounding
from . import costs
from .known_mistakes import known_mistake
from .results import Result, conclude, exercise, with_remarks

# roundings to bf16 by which a result in bf16, or a sum in bf16, may differ
_ROUNDINGS_BF16 = 4


class _Operations(TorchDispatchMode):
    """Counts operations of torch."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def run_python(task, function, seed) -> Result:
    def cases():
        return task.cases(torch.Generator().manual_seed(seed))

    def do(answer):
        return [_result(lambda: _call(task, answer, arguments)) for _, arguments, _ in cases()]

    lines = []
    sentences: dict[str, None] = {}
    for label, arguments, expected in cases():
        # the answer may change its own
        given = copy.deepcopy(arguments)
        operations = _Operations()
        passed, outcome = _try_python(task, function, arguments, given, expected, operations)
        changed = _changed(task, given, arguments)
        if changed:
            sentences[changed] = None
            outcome += "" if passed else f"; {changed}"
        lines.append((passed, label, outcome))
    make = functools.partial(_functions, task)
    mistake = functools.partial(known_mistake, task, function, make, do)
    result = conclude(task, lines, seed, "case", mistake)
    if not result:
        return result
    return with_remarks(result, [*sentences, *_python_remarks(task, operations, given)])


def _changed(task, before, after) -> str:
    """A sentence on the first argument that a function has changed; "" where it changed none."""
    for name, was, now in zip(_names(task), before, after):
        if not _equal(was, now):
            return f"it changes its argument `{name}` in place"
    return ""


def _names(task) -> list[str]:
    """The names of the arguments, as the task calls them."""
    return list(inspect.signature(function_of(task, task.solution)).parameters)


def function_of(task, source) -> Callable:
    """The function that a source defines; what it launches are the solutions of those exercises."""
    kernels = {name: compile_kernel(exercise(name).solution, name) for name in task.launches}
    space: dict = {}
    exec(source, {"torch": torch, **kernels}, space)
    (function,) = space.values()
    return function


def _functions(task, sources) -> dict[str, Callable]:
    return {what: function_of(task, source) for what, source in sources.items()}


def _call(task, function, arguments):
    """What a function returns."""
    if task.on_device:
        # a tape refuses what the host would wait for
        return TapeRecorder().record(lambda: function(*arguments))[1]
    return function(*arguments)


def _result(call):
    """What a call gives to compare: a tensor, or words."""
    try:
        result = call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return result if isinstance(result, torch.Tensor) else _what(result)


def _equal(was, now) -> bool:
    """Whether tensors, numbers, or lists of them are equal; NaN is equal to NaN."""
    if isinstance(was, (list, tuple)):
        same = isinstance(now, (list, tuple)) and len(was) == len(now)
        return same and all(map(_equal, was, now))
    if not isinstance(was, torch.Tensor):
        return bool(was == now)
    same = isinstance(now, torch.Tensor) and (was.shape, was.dtype) == (now.shape, now.dtype)
    return same and torch.allclose(was, now, rtol=0.0, atol=0.0, equal_nan=True)


def _python_remarks(task, operations, arguments) -> list[str]:
    """What is to be said against a right function. arguments: of the run that was counted."""
    with _Operations() as theirs:
        function_of(task, task.solution)(*arguments)
    if operations.count < costs.MORE_OPERATIONS * max(theirs.count, 1):
        return []
    return [f"it runs {operations.count:,} operations of torch, the solution {theirs.count:,}"]


def _try_python(task, function, arguments, given, expected, operations):
    """(passed, how it went) of one case.

    Args:
        given: a copy of the arguments, which the function may change
    """
    try:
        with operations:
            result = _call(task, function, arguments)
    except CaptureError as error:
        return False, str(error).partition("in a CUDA graph: ")[2]
    except Exception as error:
        return False, _error_words(error)
    largest, problem = _difference(result, expected, _has_bf16(given))
    if not problem:
        return True, f"right; largest difference {largest:.2g}"
    return False, problem


def _error_words(error) -> str:
    """An error of the learner's own code, in one line instead of a traceback."""
    if isinstance(error, KernelError) and error.reports:
        kernel, report = re.match(r"\w+", str(error)), error.reports[0]
        return f"{kernel and kernel[0]}, line {report.line}: {report.message}"
    return f"{type(error).__name__}: {error}"


def _difference(result, expected, in_bf16=False) -> tuple[float, str]:
    """(largest difference, what is wrong in words) of a function's result; "" where it is right.

    Args:
        in_bf16: whether its arguments are, so that it may have been rounded to it
    """
    if not isinstance(result, torch.Tensor) or result.shape != expected.shape:
        shape = tuple(expected.shape)
        return math.nan, f"expected a tensor of shape {shape}, got {_what(result)}"
    expected = expected.double()
    both_nan = result.isnan() & expected.isnan()
    difference = (result.double() - expected).abs().masked_fill(both_nan, 0.0)
    problem = ""
    allowed = 1e-5 * float(expected.abs().nan_to_num().max())
    if result.dtype == torch.bfloat16:
        allowed = allowed + torch.finfo(torch.bfloat16).eps / 2 * expected.abs()
    differing = ~(difference <= allowed)
    if differing.any():
        problem = first_wrong(result, expected, differing)
        step = _ROUNDINGS_BF16 * torch.finfo(torch.bfloat16).eps
        if in_bf16 and is_rounding(difference, expected, step):
            problem += "; it differs by roundings to bf16"
    return float(difference.max()), problem


def _has_bf16(arguments) -> bool:
    """Whether a tensor among the arguments, or in a list of them, is in bf16."""
    if isinstance(arguments, torch.Tensor):
        return arguments.dtype == torch.bfloat16
    return isinstance(arguments, (tuple, list)) and any(map(_has_bf16, arguments))


def run_captured(task, function, seed) -> Result:
    """The function is called once, on a tape; then only the tape is replayed."""

    def cases():
        return task.turns(torch.Generator().manual_seed(seed))

    def do(answer):
        return [_result(lambda: _all_turns(answer, case)) for case in cases()]

    lines = []
    remarks: dict[str, None] = {}
    for case in cases():
        try:
            tape, tensors, result = _capture(function, case)
        except CaptureError as error:
            line = (False, case.label, str(error))
            return Result(task.name, False, "not yet: it cannot be captured.", [line])
        except Exception as error:
            lines.append((False, case.label, _error_words(error)))
            continue
        passed, outcome, changed = _replay(task, case, tensors, tape, result)
        lines.append((passed, case.label, outcome))
        remarks |= dict.fromkeys(filter(None, [changed]))
    make = functools.partial(_functions, task)
    mistake = functools.partial(known_mistake, task, function, make, do)
    result = conclude(task, lines, seed, "case", mistake)
    return with_remarks(result, list(remarks)) if result else result


def _capture(function, case):
    """(the tape of one call, the call's tensors as they were before it, the one with the result)"""
    tensors = [t.clone() for t in case.tensors]
    tape, returned = TapeRecorder().record(lambda: function(*tensors, *case.numbers))
    # a tape's capture already was a step
    for tensor, first in zip(tensors, case.tensors):
        tensor.copy_(first)
    return tape, tensors, returned if case.result_index is None else tensors[case.result_index]


def _set(tensors, values):
    """Copy a turn's new values into the tensors."""
    for tensor, value in zip(tensors, values):
        if value is not None:
            tensor.copy_(value)


def _all_turns(function, case):
    """The results of all turns, and the counter behind each of them, in one tensor."""
    tape, tensors, result = _capture(function, case)
    kept = []
    for values, _, _ in case.turns:
        _set(tensors, values)
        tape.replay()
        kept.append(result.flatten().double())
        if case.counter:
            kept.append(tensors[case.counter[1]].double().view(1))
    return torch.cat(kept)


def _replay(task, case, tensors, tape, result):
    """(passed, how it went, a sentence on an argument that it changed) of all turns of a case."""
    largest = 0.0
    changed = ""
    count = len(case.turns)
    may_change = (case.result_index, case.counter and case.counter[1], *case.may_change)
    for turn, (values, expected, special) in enumerate(case.turns, 1):
        _set(tensors, values)
        before = [tensor.clone() for tensor in tensors]
        tape.replay()
        difference, problem = _difference(result, expected)
        if problem:
            in_place = case.result_index is not None
            if in_place and torch.equal(result, before[case.result_index]):
                problem = "no element was changed in place"
            where = f"wrong in replay {turn} of {count}, where {special}"
            return False, f"{where}; {problem.removeprefix('wrong: ')}", ""
        if case.counter:
            name, index = case.counter
            if int(tensors[index]) != turn:
                held = f"`{name}` holds {int(tensors[index])}, expected {turn}"
                return False, f"after replay {turn} of {count} {held}", ""
        now = [b if i in may_change else t for i, (b, t) in enumerate(zip(before, tensors))]
        changed = changed or _changed(task, before, now)
        largest = max(largest, difference)
    return True, f"right in {count} replays; largest difference {largest:.2g}", changed


def _what(result) -> str:
    """What a function returned, without its numbers where these are many."""
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {plural(len(result), 'item')}"
    if result is None or isinstance(result, (bool, int, float, str)):
        return repr(result)[:60]
    return f"a {type(result).__name__}"
