"""What an exercise is: task, stub, hint, solution, known-wrong answers, data to try answers on.

The exercises of a notebook are in a module of their own (`kernel_puzzles` ... `rank_puzzles`), as
entries of its EXERCISES; `checking` tries answers. The tests show for each exercise that its
solution passes and that each known-wrong answer fails.
"""

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 256  # threads per block in every check
# What `out` holds before a launch where it cannot hold NaN, or where NaN is a result.
UNWRITTEN = -1

# The first lines of many kernels: a thread's element, and what is often wrong with the guard.
INDEX = "int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
LONG_INDEX = "long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
GUARDED = INDEX + "if (i >= n) return;\n"
WRONG_GUARDS = {"no guard": ("if (i >= n) return;\n", ""), "one too many": ("i >= n", "i > n")}


@dataclass(frozen=True)
class Case:
    """One trial of a kernel: launched as kernel(out, *inputs, *numbers, n)."""

    # fp32, bf16 or int32, often (n): its content before the launch
    out: torch.Tensor
    # tensors, often (n)
    inputs: tuple
    # Python numbers
    numbers: tuple
    # of out's shape, float64; `out` itself where nothing may be written
    expected: torch.Tensor
    # what is special about it
    label: str = ""
    # by how many roundings a right answer may differ; 0: it must be bit-identical
    roundings: int = 1
    # of out's shape: what a right answer may differ by besides; for terms that cancel
    least: torch.Tensor | float = 1e-30
    # a clause that explains what is expected at one place of out
    describe: Callable[[int], str] | None = None

    @property
    def begins_empty(self) -> bool:
        """Whether `out` holds nothing that a kernel may use: NaN everywhere, or UNWRITTEN."""
        if self.out.dtype.is_floating_point and bool(self.out.isnan().all()):
            return True
        return bool((self.out == UNWRITTEN).all())


@dataclass(frozen=True)
class Turns:
    """One trial of a function that is captured and replayed.

    function(*tensors, *numbers) is called once. Then each turn copies new values into some of the
    tensors and replays."""

    label: str
    tensors: tuple
    numbers: tuple
    # for each turn: a value or None for each tensor, the expected result in float64, and in words
    # what is special about it
    turns: list
    # which tensor then holds the result; None: what the function returned
    result_index: int | None = None
    # (name, index) of a tensor to which each replay adds 1, from 0 on
    counter: tuple[str, int] | None = None
    # which other tensors the function may change
    may_change: tuple[int, ...] = ()


@dataclass(frozen=True)
class Exercise:
    """A task and all that belongs to it.

    Attributes:
        name: what ga.check() calls it.
        task: what is asked, in words.
        stub: the code that a cell begins with.
        hint: in words.
        solution: code that passes.
        wrong_answers: what is wrong -> an answer with that mistake. An answer that does the same
            hears what is wrong.
        params: a kernel's parameters; empty for a Python function.
        per_thread: elements for each thread of a kernel.
        data: of a kernel: data(n, generator) -> Case.
        cases: of a Python function: cases(generator) -> (label, arguments, expected tensor) for
            each trial.
        turns: of a Python function that is captured: turns(generator) -> Turns for each trial.
        on_device: of a Python function: the host may not wait for a number.
        launches: of a Python function: the exercises whose kernels it launches, under their names.
    """

    name: str
    task: str
    stub: str
    hint: str
    solution: str
    wrong_answers: dict[str, str]
    params: tuple[str, ...] = ()
    per_thread: int = 1
    data: Callable | None = None
    cases: Callable | None = None
    turns: Callable | None = None
    on_device: bool = False
    launches: tuple[str, ...] = ()

    @property
    def with_sum(self) -> bool:
        """Whether the task asks for a sum, whose order changes the last bits."""
        return re.search(r"\b(sums?|added)\b", self.task) is not None


def kernel_exercise(name, task, params, stub, hint, solution, wrong_answers, **trials) -> Exercise:
    """An exercise whose answer is a kernel.

    Args:
        params: as they stand in the kernel's first line.
        stub, solution: bodies of the kernel.
        wrong_answers: what is wrong -> a body, or edits of the solution: (old, new, ...).
        **trials: how it is tried, see Exercise.
    """
    source = f"__global__ void {name}({params})\n{{\n{{}}\n}}\n"
    bodies = _bodies(source, stub, solution, wrong_answers)
    return Exercise(name, task, hint=hint, **bodies, params=tuple(params.split(", ")), **trials)


def python_exercise(name, task, params, stub, hint, solution, wrong_answers, **trials) -> Exercise:
    """An exercise whose answer is a Python function.

    Args:
        params: of the function, as they stand in its first line.
        stub, solution, wrong_answers: as in kernel_exercise.
    """
    source = f"def {name}({params}):\n{{}}\n"
    bodies = _bodies(source, stub, solution, wrong_answers)
    return Exercise(name, task, hint=hint, **bodies, **trials)


def _bodies(source, stub, solution, wrong_answers) -> dict:
    def whole(body):
        if isinstance(body, tuple):
            edits, body = body, solution
            for old, new in zip(edits[::2], edits[1::2]):
                assert old in body, (old, body)
                body = body.replace(old, new)
        return source.replace("{}", textwrap.indent(body.strip("\n"), "    "))

    return dict(
        stub=whole(stub),
        solution=whole(solution),
        wrong_answers={what: whole(body) for what, body in wrong_answers.items()},
    )


def normal(n, generator, dtype=torch.float32) -> torch.Tensor:
    """n normally distributed numbers on the generator's device."""
    return torch.randn(n, generator=generator, device=generator.device).to(dtype)


def unwritten(n, generator) -> torch.Tensor:
    """n fp32 elements that a kernel has to write: NaN."""
    return torch.full((n,), float("nan"), device=generator.device)


def whole_number(low, high, generator) -> int:
    """A random whole number, low <= it < high."""
    return int(torch.randint(low, high, (), generator=generator, device=generator.device))
