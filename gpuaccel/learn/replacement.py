"""Your kernel in the training: a kernel of kernels_cu is replaced by your own, once it is right.

    %%cuda --replace settings_write        # in a notebook; `%cuda --restore` puts ours back
    extern "C" __global__ void settings_write(...) { ... }

    with ga.replaced("settings_write", source):    # in a script
        step(batch)

Before anything launches your kernel, it is run on the CPU with every access checked, then compared
with ours and with the operation's definition in torch, on random data of several sizes. A kernel
that is wrong is refused with a ReplacementError that says where, and nothing has changed.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from ..backends import Running, backend, default_device, find_compiler, use_backend
from ..compiler import is_loaded, replace, replacements
from ..errors import ArgumentError, CompileError, GpuaccelError, KernelError, ReplacementError
from ..simt import checked
from .kernel_cases import CASES, Case, Results
from .sentences import first_wrong

# Elements for the run with every access checked, and for the comparison.
CHECKED_SIZES = (1, 700)
DTYPES = (torch.float32, torch.bfloat16)
SIZES = (5, 4099, 30_000)
GPU_SIZES = (5, 4099, 1_000_003)
# A kernel that makes the operation this many times slower than ours is refused.
MOST_TIMES_SLOWER = 20.0
# Shorter differences, in seconds, are the machine's.
LEAST_DIFFERENCE = 0.5
# Runs of a kernel that was far slower, before it is refused for that.
RUNS_AGAIN = 2
# Seconds that one launch on the CPU may take during the check.
LAUNCH_LIMIT = 10.0
SEED = 20


@dataclass(frozen=True)
class Verdict:
    """How a kernel compares with ours. It is installed.

    Attributes:
        name: of the kernel.
        identical: whether all results are bit-identical to those of ours.
        largest: the largest difference from ours, relative to the largest element of the result.
        tensors: how many results were compared.
        notes: sentences about what was not checked, or has no effect here.
    """

    name: str
    identical: bool
    largest: float
    tensors: int
    notes: tuple[str, ...] = ()

    def __str__(self):
        if self.identical:
            words = f"bit-identical to ours in all {self.tensors} results"
        else:
            words = (
                f"equal to ours within rounding in {self.tensors} results "
                f"(largest relative difference {self.largest:.1e})"
            )
        return " ".join([f"your {self.name} is installed: {words}.", *self.notes])

    __repr__ = __str__

    def _repr_html_(self):
        return (
            '<div style="border-left:4px solid #1b9e77;padding:4px 14px;font-size:13px">'
            f"{escape(str(self))}</div>"
        )


def _check_name(name: str):
    if name not in CASES:
        raise ArgumentError(
            f"no training step launches a kernel {name!r}; those that can be replaced: "
            f"{', '.join(CASES)}"
        )


@contextlib.contextmanager
def replaced(name: str, source: str) -> Iterator[Verdict]:
    """Run your own kernel in the place of ours while the block runs.

    Graphs are captured again with it. In another process, such as another rank, ours go on.

    Args:
        name: of a kernel that a training step launches, e.g. "squares_v2".
        source: CUDA C that defines a kernel of this name with the same parameters. What its file in
            kernels_cu defines (macros, structs, functions) is at hand.

    Yields:
        A Verdict, which says how its results compare with ours.

    Raises:
        ReplacementError: with nothing changed, for a kernel that does not compile, makes a mistake,
            gives other results, or is far slower than ours.
        ArgumentError: for a kernel that no training step launches.

    Example:
        >>> from gpuaccel.source import definition
        >>> text = ga.Kernel("segments", "segments_pieces").text
        >>> start, end = definition(text, "segments_pieces")  # ours, as if you had written it
        >>> with ga.replaced("segments_pieces", text[start:end]) as verdict:
        ...     print(verdict)
        your segments_pieces is installed: bit-identical to ours in all ... results...
    """
    before = dict(replacements()).get(name)
    verdict = install(name, source)
    try:
        yield verdict
    finally:
        replace(name, before)


def install(name: str, source: str, say: Callable[[str], None] = lambda words: None) -> Verdict:
    """Check a kernel and put it in the place of ours, until restore().

    Args:
        say: called with a line of text after each part of the check, which takes some seconds.

    Raises:
        ReplacementError: with nothing changed, for a kernel that is not right.
    """
    _check_name(name)
    say(f"checking your {name}:")
    before = dict(replacements()).get(name)
    try:
        verdict = _judge(name, source, say)
    except BaseException:
        replace(name, before)
        raise
    replace(name, source)
    return verdict


def restore(*names: str) -> list[str]:
    """Put our kernels back: those named, or all.

    Args:
        *names: of kernels; none: all that are replaced.

    Returns:
        The names of those that were replaced.
    """
    for name in names:
        _check_name(name)
    found = [name for name, _ in replacements() if name in names or not names]
    for name in found:
        replace(name, None)
    return found


# ---- the check -----------------------------------------------------------------------------------


def _judge(name: str, source: str, say) -> Verdict:
    """Compare a kernel with ours. Leaves it, or ours, in place."""
    runs_here: Running = "cuda" if backend().name == "cuda" else "simt"
    has_compiler = find_compiler()[0] is not None
    if runs_here == "simt" and not has_compiler:
        raise ReplacementError(
            f"{name}: without a GPU and without a C++ compiler no kernel can run here "
            f"({find_compiler()[1]})"
        )
    notes = []
    cases = CASES[name]
    for case in cases:
        if not case.on_cpu and runs_here == "simt":
            raise ReplacementError(
                f"{name} runs on tensor cores, which only a GPU has: it can be replaced there"
            )
        if case.on_cpu and has_compiler:
            _run_checked(name, source, case)
            say("  on the CPU, every access checked: right")
        else:
            reason = "there is no C++ compiler" if case.on_cpu else "it runs on tensor cores"
            notes.append(f"Its accesses were not checked one by one: {reason}.")
    identical = True
    largest = 0.0
    tensors = 0
    with use_backend(runs_here):
        device = default_device()
        for case in cases:
            for n in GPU_SIZES if runs_here == "cuda" else SIZES:
                same, difference, count = _compare(name, source, case, n, device)
                identical = identical and same
                largest = max(largest, difference)
                tensors += count
                say(f"  {n:,} elements, {count} results: right")
        if not is_loaded(name):
            raise ReplacementError(f"{name}: this GPU ({backend().reason}) takes another kernel")
    if backend().name == "torch":
        notes.append(
            "The backend is torch, so no step here launches it: ga.use_backend('simt') runs it."
        )
    return Verdict(name, identical, largest, tensors, tuple(notes))


def _run_checked(name, source, case: Case):
    """Run a kernel on the CPU on small inputs, with every access checked.

    Raises:
        ReplacementError: for a mistake, and for a result that is wrong.
    """
    cpu = torch.device("cpu")
    for n in CHECKED_SIZES:
        with use_backend("torch"):
            expected = case.run(n, cpu, _generator(n), [torch.float32])
        with use_backend("simt"), checked(seconds=LAUNCH_LIMIT):
            replace(name, source)
            with _refusal(name), _poisoned():
                results = case.run(n, cpu, _generator(n), [torch.float32])
        _check_results(name, results, expected, expected, case)


@contextlib.contextmanager
def _refusal(name):
    """Errors of a kernel, or of its launch, as ReplacementError."""
    try:
        yield
    except KernelError as error:
        raise ReplacementError(f"{name} is refused: {error}") from None
    except CompileError:
        raise
    except GpuaccelError as error:
        raise ReplacementError(f"{name} is refused, it cannot be launched: {error}") from None


def _compare(name, source, case: Case, n: int, device) -> tuple[bool, float, int]:
    """(bit-identical to ours, largest relative difference from ours, results) for one size.

    Raises:
        ReplacementError: where a result is wrong or the kernel is far slower than ours.
    """
    with use_backend("torch"):
        expected = _run(case, n, device)[0]
    replace(name, None)
    _run(case, n, device)
    ours, our_seconds = _run(case, n, device)
    try:
        with checked(False, seconds=LAUNCH_LIMIT):
            replace(name, source)
            with _refusal(name):
                with _poisoned():
                    first = _run(case, n, device)[0]
                yours, your_seconds = _run(case, n, device)
                limit = max(MOST_TIMES_SLOWER * our_seconds, our_seconds + LEAST_DIFFERENCE)
                # Whatever else the machine does may have held one run up.
                for _ in range(RUNS_AGAIN):
                    if your_seconds > limit:
                        your_seconds = min(your_seconds, _run(case, n, device)[1])
    except RuntimeError as error:
        if device.type != "cuda":
            raise
        raise ReplacementError(
            f"{name} is refused: the GPU stopped it ({str(error).splitlines()[0]}). After that "
            "nothing runs on the GPU in this process: restart the notebook's kernel and run its "
            "cells again, without this one."
        ) from None
    for results in (first, yours):
        _check_results(name, results, expected, ours, case)
    if your_seconds > limit:
        raise ReplacementError(
            f"{name} is refused: it is right, but with it the operation takes "
            f"{your_seconds / our_seconds:.0f} times as long as with ours; expected at most "
            f"{MOST_TIMES_SLOWER:.0f} times"
        )
    identical = all(_bits_equal(yours[label], ours[label]) for label in ours)
    largest = max(_relative(yours[label], ours[label]) for label in ours)
    return identical, largest, len(ours)


def _run(case: Case, n: int, device: torch.device) -> tuple[Results, float]:
    """(results, seconds) of a case under the backend in use."""
    start = time.perf_counter()
    results = case.run(n, device, _generator(n), DTYPES)
    if device.type == "cuda":
        # A mistake of the kernel shows here.
        torch.cuda.synchronize(device)
    return results, time.perf_counter() - start


def _generator(n) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + n)


@contextlib.contextmanager
def _poisoned():
    """New memory holds NaN while the block runs: what a kernel does not write is seen.

    Otherwise it may hold the right results of a run before."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _check_results(name, results, expected, ours, case):
    for label, want in expected.items():
        got = results[label]
        wrong, allowed = _wrong(got, want, ours[label], case)
        if wrong.any():
            problem = first_wrong(got, want, wrong)
            if label in expected.before:
                problem += _sum_lost(got, want, expected.before[label], allowed)
            raise ReplacementError(f"{name} is refused: {label}: {problem}")


def _sum_lost(got, want, before, allowed) -> str:
    """What to say of a wrong sum that is only what was to be added to it."""
    added = want.double() - before.double()
    rounding = 4 * torch.finfo(want.dtype).eps * (want.abs() + before.abs()).double()
    if bool(((got.double() - added).abs() <= allowed + rounding).all()):
        return "; that is the gradient alone: what was in the sum before is lost"
    return ""


def _wrong(got: Tensor, want: Tensor, ours: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """(where a result differs from the definition's by more than rounding, what is rounding)."""
    same = (got == want) | (got.isnan() & want.isnan())
    exact = want.double()
    if not got.dtype.is_floating_point:
        return ~same, torch.zeros_like(exact)
    size = exact.abs()
    finite = size.isfinite()
    # A sum is rounded as its terms are, which are as large as a typical element.
    typical = float(size[finite].square().mean().sqrt()) if bool(finite.any()) else 0.0
    rounding = case.roundings * torch.finfo(torch.float32).eps
    if got.dtype.itemsize < 4:
        rounding += case.stored_roundings * torch.finfo(got.dtype).eps
    # Ours are the measure where the definition itself rounds more.
    allowed = torch.maximum(rounding * (size + typical), 2 * (ours.double() - exact).abs())
    # Written so that NaN counts as a difference.
    return ~(same | ((got.double() - exact).abs() <= allowed)), allowed


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _relative(a: Tensor, b: Tensor) -> float:
    """The largest difference of two results, relative to the largest element."""
    difference = (a.double() - b.double()).abs().nan_to_num()
    largest = float(b.double().abs().nan_to_num().max()) if b.numel() else 0.0
    return float(difference.max()) / largest if largest else 0.0
