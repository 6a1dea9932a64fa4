"""What the exercises of the notebooks ask: task, stub, hint, solution, known-wrong answers, and random data to try an answer on.

learn/exercises/exercises.py checks and shows them. A new one is an entry in EXERCISES; the tests then show that its solution passes and
that each wrong answer fails.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...graphs.tape import Tape

BLOCK = 256  # threads per block in every check


@dataclass(frozen=True)
class Case:
    """One trial of a kernel: launched as kernel(out, *inputs, *numbers, n)."""

    out: torch.Tensor  # fp32, bf16 or int32, often (n), its content before the launch
    inputs: tuple  # tensors, often (n)
    numbers: tuple  # Python numbers
    expected: torch.Tensor  # as out, float64; `out` itself where nothing may be written
    label: str = ""  # what is special about it
    roundings: int = 1  # how many roundings a right answer may be off; 0: every bit counts


@dataclass(frozen=True)
class Turns:
    """One trial of a function that is captured and replayed: function(*tensors, *numbers) once, then, for each turn, new values
    into those tensors that have some, and a replay."""

    label: str
    tensors: tuple
    numbers: tuple
    turns: list  # (a value or None for each tensor, what is expected after the replay, float64)
    where: "int | None" = None  # the tensor that then holds it; None: what the function returned


@dataclass(frozen=True)
class Exercise:
    """A task and all that belongs to it. `data(n, generator)` makes a Case for a kernel; for Python, `cases(generator)`
    makes (label, arguments, expected tensor) triples; for Python that is to be captured, `turns(generator)` makes Turns."""

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
    turns: "Callable | None" = None
    on_device: bool = False  # Python: no number may be read on the host


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
    expected = (
        torch.nn.functional.pad(x.double().square(), (0, blocks * BLOCK - n))
        .view(blocks, BLOCK)
        .sum(1)
    )
    return Case(_unwritten(blocks, generator), (x,), (), expected, roundings=16)


def _rescale_case(n, generator):
    x = _normal(n, generator)
    by = {256: 1.0, 4096: 1.0, 1000: math.nan}.get(n)
    if by == 1.0:
        x.view(torch.int32)[::7] = (
            0x7F800001  # a NaN that loses this pattern when it is multiplied: so a needless write is seen
        )
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
        sums = [
            torch.randn(max(count, 1), size, generator=generator).add(0.5)[:count].sum(0)
            for count in counts
        ]
        means = [
            (total / count).to(dtype) for total, count in zip(sums, counts)
        ]  # of no token at all: 0 / 0, NaN
        expected = sum(mean.double() * count for mean, count in zip(means, counts) if count) / sum(
            counts
        )
        words = ", ".join(map(str, counts)) if len(counts) < 6 else f"{len(counts)} x {counts[0]}"
        yield f"{words} tokens", ([mean.clone() for mean in means], list(counts)), expected


def _guarded_turns(generator):
    for n in (1, 255, 1000, 4096):
        limit = float(torch.rand((), generator=generator)) + 2.0
        turns = []
        for loss in (limit - 1, limit + 1, limit, math.nan, math.inf, limit / 2):
            weight, grad = _normal(n, generator), _normal(n, generator)
            if not math.isfinite(loss):
                grad[int(torch.randint(n, (), generator=generator))] = loss
            loss = torch.tensor(loss)  # limit as fp32, too: the two must agree on what is equal
            steps = bool(loss <= torch.tensor(limit))
            turns.append(
                (
                    (weight, grad, loss),
                    weight.double() - 0.1 * grad.double() if steps else weight.double(),
                )
            )
        yield Turns(
            f"{n:,}, loss below, above, NaN, ...",
            (torch.zeros(n), torch.zeros(n), torch.zeros(())),
            (float(torch.tensor(limit)),),
            turns,
        )


def _decay_turns(generator):
    for n, steps in ((1, 1), (255, 4), (1000, 10), (4097, 7)):
        first = _normal(n, generator)
        exact, turns = first.double(), []
        for k in range(steps + 2):
            grad = _normal(n, generator)
            exact = exact - 0.1 * max(0.0, 1 - k / steps) * grad.double()
            turns.append(((None, grad, None), exact))
        tensors = first, torch.zeros(n), torch.zeros((), dtype=torch.int64)
        yield Turns(
            f"{n:,}, {steps} step{'s' * (steps > 1)} and two more",
            tensors,
            (steps,),
            turns,
            where=0,
        )


def _replay_over_cases(generator):
    for n, count in ((1, 2), (255, 3), (1000, 5), (4096, 2)):
        weight, memory, tape = _normal(n, generator), torch.zeros(n), Tape()
        result = tape.record(lambda: memory * weight + memory.mean())
        batches = [_normal(n, generator) for _ in range(count)]
        expected = torch.stack(
            [batch.double() * weight.double() + batch.double().mean() for batch in batches]
        )
        # detach(): names of the same memory. Who gives such a name other memory does not move the graph's.
        yield (
            f"{count} batches of {n:,}",
            (tape, memory.detach(), result.detach(), [batch.clone() for batch in batches]),
            expected,
        )


def _kernel_exercise(name, task, params, stub, hint, solution, wrong, data, per_thread=1):
    def source(body):
        lines = "\n".join("    " + line for line in body.strip("\n").split("\n"))
        return f'extern "C" __global__ void {name}({", ".join(params)})\n{{\n{lines}\n}}\n'

    mistakes = {what: source(body) for what, body in wrong.items()}
    return Exercise(
        name, task, source(stub), hint, source(solution), mistakes, params, per_thread, data
    )


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


def _decay(lr):
    return f"def decay(weight, grad, count, steps):\n    lr = {lr}\n    weight -= lr * grad\n    count += 1\n"


def _over(*lines):
    body = "".join(f"        {line}\n" for line in lines)
    return f"def replay_over(graph, static, out, batches):\n    results = []\n    for batch in batches:\n{body}    return torch.stack(results)\n"


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
                "sum kept in bf16": _LONG
                + "if (i < n) acc[i] = as_float(as_bf16(acc[i] + as_float(grad[i])));",
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
            _FOUR
            + """if (first + 4 <= n) {
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
                    _FOUR
                    + "if (first < n) for (int k = 0; k < 4; k++) acc[first + k] += as_float(grad[first + k]);"
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
                "no guard": _SQUARE.replace("i < n ? x[i] * x[i] : 0.0f", "x[i] * x[i]")
                + _TREE
                + _JOIN,
                "first warp only": _SQUARE
                + _TREE
                + "if (threadIdx.x == 0) sums[blockIdx.x] = sum;",
                "each warp overwrites": _SQUARE
                + _TREE
                + "if (threadIdx.x % 32 == 0) sums[blockIdx.x] = sum;",
                "half of the lanes": _SQUARE + _TREE.replace("16", "8") + _JOIN,
                "does not square": _SQUARE.replace("x[i] * x[i]", "x[i]") + _TREE + _JOIN,
                "norm of each warp": _SQUARE + _TREE + _JOIN.replace("= sum;", "= sqrtf(sum);", 1),
                "seven warps": _SQUARE + _TREE + _JOIN.replace("warp < 8", "warp < 7"),
                "fixed place, not the block's": _SQUARE
                + _TREE
                + _JOIN.replace("sums[blockIdx.x]", "sums[0]"),
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
        Exercise(
            "guarded",
            "One step that can be captured: return weight - 0.1 * grad where loss is at most limit, else weight as it is (also when the loss is"
            " NaN). weight, grad: (n) fp32, loss: () fp32, limit: a number. Expected: one line.",
            "def guarded(weight, grad, loss, limit):\n    if not loss.item() <= limit:\n        return weight.clone()\n"
            "    return weight - 0.1 * grad\n",
            "A graph has no if: compute both and choose. torch.where(condition, a, b) takes a where the condition holds; NaN <= limit is false."
            " Do not multiply by 0: NaN times 0 is NaN.",
            "def guarded(weight, grad, loss, limit):\n    return torch.where(loss <= limit, weight - 0.1 * grad, weight)\n",
            {
                "asks the host": "def guarded(weight, grad, loss, limit):\n    if not loss.item() <= limit:\n        return weight.clone()\n"
                "    return weight - 0.1 * grad\n",
                "asks in other words": "def guarded(weight, grad, loss, limit):\n    return weight - 0.1 * grad if loss <= limit else weight.clone()\n",
                "picks by a mask": "def guarded(weight, grad, loss, limit):\n    out = weight.clone()\n"
                "    out[(loss <= limit).expand_as(out)] -= 0.1 * grad[(loss <= limit).expand_as(out)]\n    return out\n",
                "NaN passes": "def guarded(weight, grad, loss, limit):\n    return torch.where(loss > limit, weight, weight - 0.1 * grad)\n",
                "multiplies by 0 or 1": "def guarded(weight, grad, loss, limit):\n    return weight - 0.1 * grad * (loss <= limit)\n",
                "the wrong way round": "def guarded(weight, grad, loss, limit):\n    return torch.where(loss <= limit, weight, weight - 0.1 * grad)\n",
                "skips at the limit": "def guarded(weight, grad, loss, limit):\n    return torch.where(loss < limit, weight - 0.1 * grad, weight)\n",
                "never skips": "def guarded(weight, grad, loss, limit):\n    return weight - 0.1 * grad\n",
            },
            turns=_guarded_turns,
        ),
        Exercise(
            "decay",
            "A learning rate that falls under replay: 0.1 in the first step, then linearly to 0 in step number `steps`, and 0 from there on. Change"
            " weight in place by -lr * grad. count: () int64 on the device, 0 at first; nobody else counts. Expected: three lines.",
            "def decay(weight, grad, count, steps):\n    lr = 0.1 * max(0.0, 1 - int(count) / steps)\n"
            "    weight -= lr * grad\n    count += 1\n",
            "Leave out int(): 1 - count / steps is a tensor on the device, computed anew in each replay. What max does for numbers, .clamp(min=0)"
            " does for tensors.",
            "def decay(weight, grad, count, steps):\n    lr = 0.1 * (1 - count / steps).clamp(min=0)\n    weight -= lr * grad\n    count += 1\n",
            {
                "a number": _decay("0.1 * max(0.0, 1 - int(count) / steps)"),
                "frozen": _decay("0.1"),
                "whole numbers": _decay("0.1 * (1 - count // steps).clamp(min=0)"),
                "below zero": _decay("0.1 * (1 - count / steps)"),
                "one step late": _decay("0.1 * (1 - (count - 1) / steps).clamp(min=0, max=1)"),
                "counts first": "def decay(weight, grad, count, steps):\n    count += 1\n    weight -= 0.1 * (1 - count / steps).clamp(min=0) * grad\n",
                "does not count": _decay("0.1 * (1 - count / steps).clamp(min=0)").replace(
                    "    count += 1\n", ""
                ),
                "counts another tensor": _decay("0.1 * (1 - count / steps).clamp(min=0)").replace(
                    "count += 1", "count = count + 1"
                ),
                "a new weight": _decay("0.1 * (1 - count / steps).clamp(min=0)").replace(
                    "weight -= lr * grad", "weight = weight - lr * grad"
                ),
            },
            turns=_decay_turns,
        ),
        Exercise(
            "replay_over",
            "graph reads the memory of static and writes that of out. For each batch: give it to the graph, graph.replay(), keep the result. Return"
            " the results stacked, (batches, n). Expected: change two lines.",
            "def replay_over(graph, static, out, batches):\n    results = []\n    for batch in batches:\n        static = batch               # wrong:"
            " a name, not the memory\n        graph.replay()\n        results.append(out)          # wrong: the same memory every time\n"
            "    return torch.stack(results)\n",
            "static.copy_(batch) fills the memory that the graph knows. The next replay writes over out: keep out.clone().",
            "def replay_over(graph, static, out, batches):\n    results = []\n    for batch in batches:\n        static.copy_(batch)\n"
            "        graph.replay()\n        results.append(out.clone())\n    return torch.stack(results)\n",
            {
                "a name, and the same memory": _over(
                    "static = batch", "graph.replay()", "results.append(out)"
                ),
                "gives a name": _over(
                    "static = batch", "graph.replay()", "results.append(out.clone())"
                ),
                "gives other memory": _over(
                    "static.data = batch", "graph.replay()", "results.append(out.clone())"
                ),
                "keeps the buffer": _over(
                    "static.copy_(batch)", "graph.replay()", "results.append(out)"
                ),
                "replays before it fills": _over(
                    "graph.replay()", "static.copy_(batch)", "results.append(out.clone())"
                ),
                "keeps before it replays": _over(
                    "static.copy_(batch)", "results.append(out.clone())", "graph.replay()"
                ),
                "adds": _over("static += batch", "graph.replay()", "results.append(out.clone())"),
            },
            cases=_replay_over_cases,
            on_device=True,
        ),
    ]
}
