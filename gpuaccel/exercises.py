"""Exercises of the notebooks: a task, a check on random data of several sizes, a folded hint and a folded solution.

    >>> ga.check("scale", scale)             # a kernel made with %%cuda or ga.compile, or a Python function
    >>> ga.hint("scale"); ga.solution("scale")

A check runs an answer on sizes around the edges of a thread block and on one of a million elements, with new random
data each time. Elements outside the tensors are poisoned before and compared after, so that a write beyond the end is
seen; every run is made twice and must give the same bits. Without a GPU the kernel runs on the CPU with every access
checked (simt), so that a mistake is named with its line and its thread. Where there is no C++ compiler either, it is
only compiled, for every architecture: the result then is neither right nor wrong, and says so. Each exercise keeps
wrong answers too: the tests show that they fail.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import nvrtc
from .backend import backend, default_device, find_compiler
from .errors import ArgumentError, GpuaccelError, KernelError
from .kernel import Kernel

SIZES = (1, 255, 256, 257, 1000, 4096, 1_000_003)
BLOCK = 256  # threads per block in every check
GUARD = 4096  # poisoned elements before and after each tensor; more than a missing bounds check can reach
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Case:
    """One trial of a kernel: launched as kernel(out, *inputs, *numbers, n)."""

    out: torch.Tensor  # fp32, often (n), its content before the launch
    inputs: tuple  # tensors, often (n)
    numbers: tuple  # Python numbers
    expected: torch.Tensor  # as out, float64; `out` itself where nothing may be written
    label: str = ""  # what is special about it
    roundings: int = 1  # how many roundings a right answer may be off


@dataclass(frozen=True)
class Exercise:
    """A task and all that belongs to it. `data(n, generator)` makes a Case for a kernel; for Python, `cases(generator)`
    makes (label, arguments, expected tensor) triples."""

    name: str
    task: str
    stub: str
    hint: str
    solution: str
    wrong: "dict[str, str]"  # what is wrong -> an answer with that mistake
    params: "tuple[str, ...]" = ()  # a kernel's parameters; empty for a Python function
    per_thread: int = 1
    data: "Callable | None" = None
    cases: "Callable | None" = None
    on_device: bool = False  # Python: no number may be read on the host


@dataclass(frozen=True)
class Result:
    """`passed`: True, False, or None for compiled but not run. True in an `if` only when passed."""

    name: str
    passed: "bool | None"
    verdict: str
    lines: "list[tuple[bool | None, str, str]]" = field(default_factory=list)  # (good, what, how it went)

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
        return (
            f'<details><summary style="cursor:pointer;font-weight:600">{escape(self.title)}</summary>{body}</details>'
        )


# ---- public ---------------------------------------------------------------------------------------------------------


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
        raise ArgumentError(f"exercise {name!r} takes a Python function, got {type(answer).__name__}")
    return _run_python(task, answer, seed)


# ---- how a check works ----------------------------------------------------------------------------------------------


def _parameters_differ(task, kernel):
    """None, or a sentence that says how the kernel's parameters differ from the task's (names and const are free)."""
    expected = Kernel.__new__(Kernel)
    expected._setup(f'extern "C" __global__ void k({", ".join(task.params)}) {{}}', "k", task.name, {})
    wanted, found = expected.params, kernel.params
    for i in range(max(len(wanted), len(found))):
        w, f = (wanted[i] if i < len(wanted) else None), (found[i] if i < len(found) else None)
        same = w and f and w.pointer == f.pointer and (w.dtypes == f.dtypes if w.pointer else _kind(w) == _kind(f))
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
    span = f"{min(registers)}" if len(set(registers)) == 1 else f"{min(registers)} to {max(registers)}"
    lines = [
        (None, f"{len(archs)} architectures", f"{archs[0]} to {archs[-1]}: the parameters are right, {span} registers")
    ]
    why = f"{backend().reason}; {find_compiler()[1]}"
    return Result(task.name, None, f"compiled, not run. Running it needs a GPU or a C++ compiler: {why}.", lines)


def _guarded(tensor, poison):
    """(the tensor's copy with GUARD poisoned elements before and after, the view of the middle)."""
    n = tensor.numel()
    whole = torch.full((GUARD + n + GUARD + (-n) % 8,), poison, dtype=tensor.dtype, device=tensor.device)
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
        except RuntimeError as error:  # the GPU itself stopped the kernel, or it could not be launched
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
    wrong = sum(not good for good, _, _ in lines)
    verdict = "right for every size." if not wrong else f"not yet: {wrong} of {len(lines)} sizes differ (seed {seed})."
    return Result(task.name, not wrong, verdict, lines)


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
    poison = _bits(torch.tensor([-777.0], device=out.device))
    outside = int((_bits(whole[:GUARD]) != poison).sum() + (_bits(whole[GUARD + out.numel() :]) != poison).sum())
    if outside:
        return False, f"it writes to {outside:,} elements outside `{kernel.params[0].name}`"
    if any(not torch.equal(_bits(was), _bits(now)) for was, (now, _) in zip(before, inputs)):
        return False, "it changes its input"
    changed = int((_bits(out) != _bits(case.out)).sum())
    if case.expected is case.out:
        return not changed, f"{changed:,} elements were written, and none should be" if changed else "right; left alone"
    if not changed:
        return False, "nothing was written"
    difference = (out.double() - case.expected).abs()
    allowed = case.expected.abs() * torch.finfo(out.dtype).eps * case.roundings + 1e-30
    bad = (~(difference <= allowed)).nonzero().flatten()  # also where it is NaN
    if len(bad):
        i = int(bad[0])
        got = "not written" if torch.isnan(out[i]) else f"got {float(out[i]):.7g}"
        count = f"{len(bad):,} element{'s' if len(bad) > 1 else ''}"
        return False, f"{count} wrong; the first is [{i:,}]: {got}, expected {float(case.expected[i]):.7g}"
    if not torch.equal(_bits(whole), _bits(again)):
        return False, "two runs on the same data gave different bits"
    return True, f"right; largest difference {float(difference.max()):.2g}"


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
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            what = f"a tensor of shape {tuple(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)[:60]
            lines.append((False, label, f"expected a tensor of shape {tuple(expected.shape)}, got {what}"))
            continue
        if task.on_device and reads.count:
            lines.append((False, label, f"it reads {reads.count:,} number{'s' * (reads.count > 1)}: on a GPU the host waits for each"))
            continue
        both_nan = got.isnan() & expected.isnan()
        difference = float((got.double() - expected).abs().masked_fill(both_nan, 0.0).max())
        good = difference <= 1e-5 * float(expected.abs().nan_to_num().max())
        lines.append((good, label, f"{'right' if good else 'wrong'}; largest difference {difference:.2g}"))
    wrong = sum(not good for good, _, _ in lines)
    verdict = f"not yet: {wrong} of {len(lines)} cases differ (seed {seed})." if wrong else "right for every case."
    return Result(task.name, not wrong, verdict, lines)


# ---- the exercises --------------------------------------------------------------------------------------------------


def _normal(n, generator, dtype=torch.float32):
    return torch.randn(n, generator=generator, device=generator.device).to(dtype)


def _unwritten(n, generator):
    return torch.full((n,), float("nan"), device=generator.device)


def _scale_case(n, generator):
    x = _normal(n, generator)
    factor = float(torch.rand(1, generator=generator, device=generator.device) + 0.5)
    return Case(_unwritten(n, generator), (x,), (factor,), x.double() * factor)


def _reverse_case(n, generator):
    x = _normal(n, generator)
    return Case(_unwritten(n, generator), (x,), (), x.flip(0).double())


def _accumulate_case(n, generator):
    acc, grad = _normal(n, generator) * 100, _normal(n, generator, torch.bfloat16)
    return Case(acc, (grad,), (), acc.double() + grad.double())


def _squares_case(n, generator):
    x = _normal(n, generator)
    blocks = -(-n // BLOCK)
    expected = torch.nn.functional.pad(x.double().square(), (0, blocks * BLOCK - n)).view(blocks, BLOCK).sum(1)
    return Case(_unwritten(blocks, generator), (x,), (), expected, roundings=16)


def _rescale_case(n, generator):
    x = _normal(n, generator)
    by = {256: 1.0, 4096: 1.0, 1000: math.nan}.get(n)
    if by == 1.0:
        _bits(x)[::7] = 0x7F800001  # a NaN that loses this pattern when it is multiplied: so a needless write is seen
    factor = torch.rand(1, generator=generator, device=generator.device) * 0.8 + 0.1
    scale = factor if by is None else torch.full_like(factor, by)
    label = "scale < 1" if by is None else "scale 1" if by == 1.0 else "scale NaN"
    return Case(x, (scale,), (), x.double() * factor.double() if by is None else x, label)


def _global_scale_cases(generator):
    def norms(count, size):
        return torch.rand(count, generator=generator).add(0.1) * size

    one_bad, infinite = norms(9, 1.0), norms(9, 1.0)
    one_bad[int(torch.randint(9, (), generator=generator))] = math.nan
    infinite[3] = math.inf
    for label, values, limit in (
        ("1 tensor, above", norms(1, 5.0) + 1.0, 1.0),
        ("1 tensor, below", norms(1, 0.5), 1.0),
        ("219 tensors, above", norms(219, 2.0), 1.0),
        ("219 tensors, just below", norms(219, 1e-2), 0.25),
        ("all of them 0", torch.zeros(5), 1.0),
        ("one is NaN", one_bad, 1.0),
        ("one is infinite", infinite, 1.0),
    ):
        norm = values.double().square().sum().sqrt()
        yield label, (values.clone(), limit), torch.clamp(limit / (norm + 1e-6), max=1.0)


def _token_mean_cases(generator):
    for size, counts, dtype in (
        (1, [7], torch.float32),
        (255, [64, 64], torch.float32),
        (256, [5, 1, 40], torch.float32),
        (257, [90, 0, 6], torch.float32),
        (1000, [3] * 64, torch.bfloat16),
        (4096, [512, 8, 200, 1], torch.bfloat16),
    ):
        sums = [torch.randn(max(count, 1), size, generator=generator).add(0.5)[:count].sum(0) for count in counts]
        means = [(total / count).to(dtype) for total, count in zip(sums, counts)]  # of no token at all: 0 / 0, NaN
        expected = sum(mean.double() * count for mean, count in zip(means, counts) if count) / sum(counts)
        words = ", ".join(map(str, counts)) if len(counts) < 6 else f"{len(counts)} x {counts[0]}"
        yield f"{words} tokens", ([mean.clone() for mean in means], list(counts)), expected


def _kernel_exercise(name, task, params, stub, hint, solution, wrong, data, per_thread=1):
    def source(body):
        lines = "\n".join("    " + line for line in body.strip("\n").split("\n"))
        return f'extern "C" __global__ void {name}({", ".join(params)})\n{{\n{lines}\n}}\n'

    mistakes = {what: source(body) for what, body in wrong.items()}
    return Exercise(name, task, source(stub), hint, source(solution), mistakes, params, per_thread, data)


_INDEX = "int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
_LONG = "long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
_FOUR = "long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);\n"
_SQUARE = """__shared__ float warps[8];
int i = blockIdx.x * blockDim.x + threadIdx.x;
float sum = i < n ? x[i] * x[i] : 0.0f;
"""
_TREE = "for (int far = 16; far > 0; far /= 2) sum += __shfl_down_sync(0xffffffffu, sum, far);\n"
_JOIN = """if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
__syncthreads();
if (threadIdx.x == 0) {
    sum = 0.0f;
    for (int warp = 0; warp < 8; warp++) sum += warps[warp];
    sums[blockIdx.x] = sum;
}"""


def _scale_by(norm):
    return f"def global_scale(norms, max_norm):\n    return torch.clamp(max_norm / ({norm} + 1e-6), max=1.0)\n"


EXERCISES = {
    e.name: e
    for e in [
        _kernel_exercise(
            "scale",
            "out[i] = factor * x[i] for every i below n, one thread per element. Expected: two lines.",
            ("float* out", "const float* x", "float factor", "int n"),
            "// your two lines",
            "The last block has threads to spare when n is no multiple of 256. Compute i as in saxpy, and let only"
            " threads with i < n write.",
            _INDEX + "if (i < n) out[i] = factor * x[i];",
            {
                "no guard": _INDEX + "out[i] = factor * x[i];",
                "one too many": _INDEX + "if (i <= n) out[i] = factor * x[i];",
                "one too few": _INDEX + "if (i < n - 1) out[i] = factor * x[i];",
                "index within the block only": "int i = threadIdx.x;\nif (i < n) out[i] = factor * x[i];",
                "adds": _INDEX + "if (i < n) out[i] = factor + x[i];",
                "through bf16": _INDEX + "if (i < n) out[i] = as_float(as_bf16(factor * x[i]));",
            },
            _scale_case,
        ),
        _kernel_exercise(
            "reverse",
            "out[i] = x[n - 1 - i]: the same elements, last one first. Expected: two lines.",
            ("float* out", "const float* x", "int n"),
            "// your two lines",
            "Element 0 goes to n - 1, element 1 to n - 2. Think of n = 1: thread 0 reads element 0.",
            _INDEX + "if (i < n) out[i] = x[n - 1 - i];",
            {
                "no guard": _INDEX + "out[i] = x[n - 1 - i];",
                "off by one": _INDEX + "if (i < n) out[i] = x[n - i];",
                "reverses each block": (
                    _INDEX
                    + "int j = (blockIdx.x + 1) * blockDim.x - 1 - threadIdx.x;\nif (i < n && j < n) out[i] = x[j];"
                ),
                "leaves the order": _INDEX + "if (i < n) out[i] = x[i];",
                "half only": _INDEX + "if (i < n / 2) out[i] = x[n - 1 - i];",
            },
            _reverse_case,
        ),
        _kernel_exercise(
            "accumulate",
            "acc[i] += grad[i]: gradients in bf16, the sum in fp32, one thread per element. as_float(grad[i]) reads a"
            " bf16.",
            ("float* acc", "const bf16* grad", "long long n"),
            "// your two lines",
            "A 64-bit index: (long long)blockIdx.x * blockDim.x + threadIdx.x. The sum stays a float: nothing is"
            " rounded to bf16.",
            _LONG + "if (i < n) acc[i] += as_float(grad[i]);",
            {
                "no guard": _LONG + "acc[i] += as_float(grad[i]);",
                "one too many": _LONG + "if (i <= n) acc[i] += as_float(grad[i]);",
                "overwrites": _LONG + "if (i < n) acc[i] = as_float(grad[i]);",
                "sum kept in bf16": _LONG + "if (i < n) acc[i] = as_float(as_bf16(acc[i] + as_float(grad[i])));",
                "bits taken as a number": _LONG + "if (i < n) acc[i] += grad[i].bits;",
                "subtracts": _LONG + "if (i < n) acc[i] -= as_float(grad[i]);",
            },
            _accumulate_case,
        ),
        _kernel_exercise(
            "accumulate4",
            "acc[i] += grad[i], each thread adds four neighbours: thread t takes elements 4t .. 4t+3. n need not be a"
            " multiple of four.",
            ("float* acc", "const bf16* grad", "long long n"),
            _FOUR + "// your lines",
            "A loop over k = 0 .. 3 with the guard inside it is right for every n. Faster: one float4 where all four"
            " exist, the loop for the tail.",
            _FOUR + """if (first + 4 <= n) {
    float4* out = reinterpret_cast<float4*>(acc + first);
    float4 a = *out;
    uint2 g = *reinterpret_cast<const uint2*>(grad + first);      // four bf16 in eight bytes
    float4 b = make_float4(low_as_float(g.x), high_as_float(g.x), low_as_float(g.y), high_as_float(g.y));
    *out = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
} else {
    for (long long i = first; i < n; i++) acc[i] += as_float(grad[i]);
}""",
            {
                "ignores the tail": (
                    _FOUR
                    + "if (first + 4 <= n) for (int k = 0; k < 4; k++) acc[first + k] += as_float(grad[first + k]);"
                ),
                "guards the first only": (
                    _FOUR + "if (first < n) for (int k = 0; k < 4; k++) acc[first + k] += as_float(grad[first + k]);"
                ),
                "wrong stride": (
                    "long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
                    "for (int k = 0; k < 4; k++) if (first + k < n) acc[first + k] += as_float(grad[first + k]);"
                ),
                "three of four": (
                    _FOUR
                    + "for (int k = 0; k < 3; k++) if (first + k < n) acc[first + k] += as_float(grad[first + k]);"
                ),
                "one too many": (
                    _FOUR
                    + "for (int k = 0; k < 4; k++) if (first + k <= n) acc[first + k] += as_float(grad[first + k]);"
                ),
                "halves swapped": (
                    _FOUR
                    + "for (int k = 0; k < 4; k++) if (first + k < n) acc[first + k] += as_float(grad[(first + k) ^"
                    " 1]);"
                ),
            },
            _accumulate_case,
            per_thread=4,
        ),
        Exercise(
            "token_mean",
            "means: a list of tensors, each the mean gradient over the tokens of one micro-batch; counts: how many"
            " tokens each has. Return the mean over all tokens, in fp32. A micro-batch without tokens has a mean of"
            " NaN, and must not matter. Expected: three to five lines.",
            "def token_mean(means, counts):\n    return sum(means) / len(means)          # right only when all counts"
            " are equal\n",
            "A mean times its count is a sum again. Add the sums in fp32, and divide once, by all tokens. NaN times 0"
            " is NaN: leave empty ones out.",
            "def token_mean(means, counts):\n    total = torch.zeros_like(means[0], dtype=torch.float32)\n    for mean,"
            " count in zip(means, counts):\n        if count:\n            total += mean.float() * count\n    return"
            " total / sum(counts)\n",
            {
                "mean of means": (
                    "def token_mean(means, counts):\n    return sum(m.float() for m in means) / len(means)\n"
                ),
                "empty micro-batch counts": (
                    "def token_mean(means, counts):\n    return sum(m.float() * c for m, c in zip(means, counts)) /"
                    " sum(counts)\n"
                ),
                "not divided": (
                    "def token_mean(means, counts):\n    return sum(m.float() * c for m, c in zip(means, counts) if"
                    " c)\n"
                ),
                "divided by micro-batches": (
                    "def token_mean(means, counts):\n    return sum(m.float() * c for m, c in zip(means, counts) if c)"
                    " / len(counts)\n"
                ),
                "summed in bf16": (
                    "def token_mean(means, counts):\n    total = torch.zeros_like(means[0])\n    for m, c in zip(means,"
                    " counts):\n        if c:\n            total += m * c\n    return total / sum(counts)\n"
                ),
            },
            cases=_token_mean_cases,
        ),
        _kernel_exercise(
            "squares",
            "sums[b] = the sum of x[i] * x[i] over the 256 elements of block b, in a fixed order: the 32 lanes of a warp by"
            " __shfl_down_sync, the eight warps through shared memory. No atomics. Expected: eight lines.",
            ("float* sums", "const float* x", "int n"),
            _SQUARE + "// your lines",
            "for (int far = 16; far > 0; far /= 2): each lane adds what the lane `far` above it has; then lane 0 holds the warp's"
            " sum. All 256 threads take part: one beyond n brings 0. Between writing and reading `warps` stands __syncthreads().",
            _SQUARE + _TREE + _JOIN,
            {
                "no guard": _SQUARE.replace("i < n ? x[i] * x[i] : 0.0f", "x[i] * x[i]") + _TREE + _JOIN,
                "first warp only": _SQUARE + _TREE + "if (threadIdx.x == 0) sums[blockIdx.x] = sum;",
                "each warp overwrites": _SQUARE + _TREE + "if (threadIdx.x % 32 == 0) sums[blockIdx.x] = sum;",
                "half of the lanes": _SQUARE + _TREE.replace("16", "8") + _JOIN,
                "does not square": _SQUARE.replace("x[i] * x[i]", "x[i]") + _TREE + _JOIN,
                "norm of each warp": _SQUARE + _TREE + _JOIN.replace("= sum;", "= sqrtf(sum);", 1),
                "seven warps": _SQUARE + _TREE + _JOIN.replace("warp < 8", "warp < 7"),
                "fixed place, not the block's": _SQUARE + _TREE + _JOIN.replace("sums[blockIdx.x]", "sums[0]"),
            },
            _squares_case,
        ),
        _kernel_exercise(
            "rescale",
            "x[i] *= scale[0], one thread per element; where the scale is 1, or not a number, x is not written at all."
            " Expected: two lines.",
            ("float* x", "const float* scale", "long long n"),
            "// your two lines",
            "Every thread reads the scale itself: nobody has to ask the host. Compare with < 1: that is false for 1 and for NaN.",
            _LONG + "if (i < n && *scale < 1.0f) x[i] *= *scale;",
            {
                "no guard": _LONG + "if (*scale < 1.0f) x[i] *= *scale;",
                "always writes": _LONG + "if (i < n) x[i] *= *scale;",
                "nearly 1 returns, NaN does not": (
                    _LONG + "if (fabsf(*scale - 1.0f) < 1e-7f) return;\nif (i < n) x[i] *= *scale;"
                ),
                "NaN returns, 1 does not": _LONG + "if (i < n && *scale == *scale) x[i] *= *scale;",
                "divides": _LONG + "if (i < n && *scale < 1.0f) x[i] /= *scale;",
                "one too few": _LONG + "if (i < n - 1 && *scale < 1.0f) x[i] *= *scale;",
            },
            _rescale_case,
        ),
        Exercise(
            "global_scale",
            "norms: (k,) fp32, the norm of each tensor. Return the scale that brings the norm of all of them together down to"
            " max_norm, a tensor () that is 1 where nothing is to be done and NaN where a norm is NaN. No number may be read on"
            " the host. Expected: two lines.",
            "def global_scale(norms, max_norm):\n    norm = norms.sum()                      # wrong, and it is a real bug\n"
            "    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)\n",
            "The norm of all elements is the square root of the sum of all squares. A tensor's norm is already a root: square it"
            " first. torch.clamp keeps NaN.",
            "def global_scale(norms, max_norm):\n    norm = norms.square().sum().sqrt()\n"
            "    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)\n",
            {
                "sum of the norms": _scale_by("norms.sum()"),
                "root of the sum of the norms": _scale_by("norms.sum().sqrt()"),
                "not rooted": _scale_by("norms.square().sum()"),
                "largest norm": _scale_by("norms.max()"),
                "asks the host": _scale_by("torch.tensor(norms.square().sum().item()).sqrt()"),
                "decides on the host": (
                    "def global_scale(norms, max_norm):\n    norm = norms.square().sum().sqrt()\n    return max_norm / norm if"
                    " norm > max_norm else torch.ones(())\n"
                ),
                "lengthens short gradients": (
                    "def global_scale(norms, max_norm):\n    return max_norm / (norms.square().sum().sqrt() + 1e-6)\n"
                ),
                "NaN becomes 1": (
                    "def global_scale(norms, max_norm):\n    norm = norms.square().sum().sqrt()\n    return"
                    " torch.fmin(max_norm / (norm + 1e-6), torch.ones(()))\n"
                ),
            },
            cases=_global_scale_cases,
            on_device=True,
        ),
    ]
}
