"""The exercises of notebooks 02 and 02b.

02: the largest number of a block, sums of squares, a rescale that skips. 02b: a step that clips,
the scale of all norms."""

import math

import torch

from .exercises import BLOCK, LONG_INDEX, Case, Exercise, code, kernel_exercise, normal, unwritten


def _rows_of_blocks(x, padding):
    """(blocks, BLOCK) float64: each block's elements, and `padding` behind the last of them."""
    blocks = -(-len(x) // BLOCK)
    padded = torch.nn.functional.pad(x.double(), (0, blocks * BLOCK - len(x)), value=padding)
    return padded.view(blocks, BLOCK)


def _largest_case(n, generator):
    # Below zero, so that a 0 from a thread without an element would win.
    x = normal(n, generator) - 9.0
    # The last element wins its block, so that nobody can leave it out.
    x[-1] = -0.5
    short = n % BLOCK
    if short:
        # Far below what a thread without an element may bring by mistake: a fixed number, x[0].
        size = torch.rand(short, generator=generator, device=generator.device)
        x[n - short :] = -1e37 * (20.0 + 13.0 * size)
        x[-1] *= 0.6
        if n > BLOCK:
            x[0] = 3.0
    expected = _rows_of_blocks(x, -math.inf).amax(1)
    return Case(unwritten(len(expected), generator), (x,), (), expected, roundings=0)


def _squares_case(n, generator):
    x = normal(n, generator)
    expected = _rows_of_blocks(x, 0.0).square().sum(1)
    return Case(unwritten(len(expected), generator), (x,), (), expected, roundings=16)


def _rescale_case(n, generator):
    x = normal(n, generator)
    # None: a random factor
    fixed_scale = {256: 1.0, 4096: 1.0, 1000: math.nan}.get(n)
    if fixed_scale == 1.0:
        # NaN that lose this pattern when they are multiplied, so that a needless product is seen
        x.view(torch.int32)[:] = 0x7F800001
    factor = torch.rand(1, generator=generator, device=generator.device) * 0.8 + 0.1
    if fixed_scale is None:
        return Case(x, (factor,), (), x.double() * factor.double(), "scale < 1")
    label = "scale 1" if fixed_scale == 1.0 else "scale NaN"
    return Case(x, (torch.full_like(factor, fixed_scale),), (), x, label)


def _clipped_step_case(n, generator):
    # The weight is much larger than its change, so that the difference loses no digits.
    w = normal(n, generator).sign() + normal(n, generator) * 0.01
    grad = normal(n, generator)
    value = {256: 1.0, 1000: math.nan}.get(n)
    if value is None:
        scale = torch.rand(1, generator=generator, device=generator.device) * 0.8 + 0.1
    else:
        scale = torch.full((1,), value, device=generator.device)
    lr = 0.01
    if n == 1000:
        # where NaN in the scale comes from; a product of it with 0 is NaN again
        grad[::3] = math.nan
        return Case(w, (grad, scale), (lr,), w, "scale NaN")
    expected = w.double() - lr * scale.double() * grad.double()
    label = "scale < 1" if value is None else "scale 1"
    return Case(w, (grad, scale), (lr,), expected, label, roundings=2)


def _global_scale_cases(generator):
    def norms(count, size):
        return torch.rand(count, generator=generator).add(0.1) * size

    def limit(low):
        return low * (1.0 + float(torch.rand((), generator=generator)))

    one_bad, infinite = norms(9, 1.0), norms(9, 1.0)
    one_bad[int(torch.randint(9, (), generator=generator))] = math.nan
    infinite[3] = math.inf
    for what, values, max_norm in (
        ("norms 3 and 4", torch.tensor([3.0, 4.0]), 1.0),
        ("1 tensor, above", norms(1, 50.0) + 10.0, limit(2.0)),
        ("1 tensor, below", norms(1, 0.5), limit(1.0)),
        ("9 tensors, above", norms(9, 20.0) + 10.0, limit(0.3)),
        # each of them is below, all together are above
        ("219 tensors, above together", norms(219, 1.0), limit(1.5)),
        ("all of them 0", torch.zeros(5), limit(1.0)),
        ("one is NaN", one_bad, limit(1.0)),
        ("one is infinite", infinite, limit(1.0)),
        ("219 tensors, just below", norms(219, 1e-2), limit(0.18)),
    ):
        label = f"{what}, max_norm={max_norm:.3g}"
        norm = values.double().square().sum().sqrt()
        yield label, (values.clone(), max_norm), torch.clamp(max_norm / (norm + 1e-6), max=1.0)


_LARGEST = """__shared__ float part[256];
int t = threadIdx.x;
int i = blockIdx.x * blockDim.x + t;
part[t] = x[i < n ? i : blockIdx.x * blockDim.x];
for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) part[t] = fmaxf(part[t], part[t + half]);
}
if (t == 0) out[blockIdx.x] = part[0];"""


_SQUARE = """__shared__ float warps[8];
int i = blockIdx.x * blockDim.x + threadIdx.x;
float sum = i < n ? x[i] * x[i] : 0.0f;
"""


WARP_SUM = """for (int delta = 16; delta > 0; delta /= 2)
    sum += __shfl_down_sync(0xffffffffu, sum, delta);
"""


_JOIN = """if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
__syncthreads();
if (threadIdx.x == 0) {
    sum = 0.0f;
    for (int warp = 0; warp < 8; warp++) sum += warps[warp];
    sums[blockIdx.x] = sum;
}"""


_STEP = LONG_INDEX + "float s = scale[0];\nif (i < n && s == s) w[i] -= lr * s * grad[i];"


def _scale_by(norm):
    """An answer that takes this for the norm of all."""
    return (
        "def global_scale(norms, max_norm):\n"
        f"    return torch.clamp(max_norm / ({norm} + 1e-6), max=1.0)\n"
    )


EXERCISES = {
    e.name: e
    for e in [
        kernel_exercise(
            "largest",
            task=(
                "out[b] = the largest x[i] of the 256 elements of block b, by a tree in shared "
                "memory. All of them may be negative. Expected: ten lines."
            ),
            params=("float* out", "const float* x", "int n"),
            stub="// your lines",
            hint=(
                "fmaxf(a, b) is the larger of two numbers. The last block may have fewer than 256 "
                "elements, and all 256 threads must reach each barrier: which number can a "
                "thread without an element bring, so that it never wins? One that is in the "
                "block anyway: its first one. Minus infinity, -__int_as_float(0x7f800000), is "
                "another."
            ),
            solution=_LARGEST,
            wrong_answers={
                "no guard": _LARGEST.replace("x[i < n ? i : blockIdx.x * blockDim.x]", "x[i]"),
                "threads without an element bring 0": _LARGEST.replace(
                    "x[i < n ? i : blockIdx.x * blockDim.x]", "i < n ? x[i] : 0.0f"
                ),
                **{
                    f"threads without an element bring {other}": _LARGEST.replace(
                        "x[i < n ? i : blockIdx.x * blockDim.x]", f"i < n ? x[i] : {other}"
                    )
                    for other in ("-1.0f", "-1e38f", "x[0]")
                },
                "one too few": _LARGEST.replace("i < n ?", "i < n - 1 ?"),
                "the last round is missing": _LARGEST.replace("half > 0", "half > 1"),
                "the first round is missing": _LARGEST.replace("half = 128", "half = 64"),
                "adds": _LARGEST.replace(
                    "fmaxf(part[t], part[t + half])", "part[t] + part[t + half]"
                ),
                "adds to out": _LARGEST.replace("out[blockIdx.x] =", "out[blockIdx.x] +="),
                "fixed place, not the block's": _LARGEST.replace("out[blockIdx.x]", "out[0]"),
                "largest magnitude": _LARGEST.replace("= x[", "= fabsf(x[").replace(
                    "blockDim.x];", "blockDim.x]);"
                ),
            },
            cheats={
                "one thread of each block": (
                    "if (threadIdx.x > 0) return;\n"
                    "int first = blockIdx.x * blockDim.x;\n"
                    "float most = x[first];\n"
                    "for (int i = first; i < first + 256 && i < n; i++) most = fmaxf(most, x[i]);\n"
                    "out[blockIdx.x] = most;"
                ),
                "barrier inside the if": _LARGEST.replace("    __syncthreads();\n", "").replace(
                    "if (t < half) part", "if (t < half) __syncthreads();\n    if (t < half) part"
                ),
            },
            data=_largest_case,
        ),
        kernel_exercise(
            "squares",
            task=(
                "sums[b] = the sum of x[i] * x[i] over the 256 elements of block b, in a fixed "
                "order: the 32 lanes of a warp by __shfl_down_sync, the eight warps through "
                "shared memory. No atomics. Expected: eight lines."
            ),
            params=("float* sums", "const float* x", "int n"),
            stub="// your lines",
            hint=(
                "First the loop of warp_sum: then lane 0 of each warp holds its warp's sum. The "
                "eight lanes 0 write into `warps`, each at the number of its warp, threadIdx.x / "
                "32. One thread reads all eight. Different warps write and read: what "
                "stands between the two?"
            ),
            solution=_SQUARE + WARP_SUM + _JOIN,
            wrong_answers={
                "no guard": _SQUARE.replace("i < n ? x[i] * x[i] : 0.0f", "x[i] * x[i]")
                + WARP_SUM
                + _JOIN,
                "first warp only": _SQUARE
                + WARP_SUM
                + "if (threadIdx.x == 0) sums[blockIdx.x] = sum;",
                "each warp overwrites": _SQUARE
                + WARP_SUM
                + "if (threadIdx.x % 32 == 0) sums[blockIdx.x] = sum;",
                "half of the lanes": _SQUARE + WARP_SUM.replace("16", "8") + _JOIN,
                "does not square": _SQUARE.replace("x[i] * x[i]", "x[i]") + WARP_SUM + _JOIN,
                "norm of each warp": _SQUARE
                + WARP_SUM
                + _JOIN.replace("= sum;", "= sqrtf(sum);", 1),
                "seven warps": _SQUARE + WARP_SUM + _JOIN.replace("warp < 8", "warp < 7"),
                "fixed place, not the block's": _SQUARE
                + WARP_SUM
                + _JOIN.replace("sums[blockIdx.x]", "sums[0]"),
                "adds to sums": _SQUARE
                + WARP_SUM
                + _JOIN.replace("sums[blockIdx.x] =", "sums[blockIdx.x] +="),
            },
            cheats={
                "a tree without shuffles": _SQUARE.replace("warps[8]", "part[256]")
                + (
                    "part[threadIdx.x] = sum;\n"
                    "for (int half = 128; half > 0; half /= 2) {\n"
                    "    __syncthreads();\n"
                    "    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];\n"
                    "}\n"
                    "if (threadIdx.x == 0) sums[blockIdx.x] = part[0];"
                ),
                "one thread of each block": (
                    "if (threadIdx.x > 0) return;\n"
                    "int first = blockIdx.x * blockDim.x;\n"
                    "float sum = 0.0f;\n"
                    "for (int i = first; i < first + 256 && i < n; i++) sum += x[i] * x[i];\n"
                    "sums[blockIdx.x] = sum;"
                ),
            },
            data=_squares_case,
        ),
        kernel_exercise(
            "rescale",
            task=(
                "x[i] *= scale[0], one thread per element; where the scale is 1, or not a "
                "number, x is not written at all. Expected: two lines."
            ),
            params=("float* x", "const float* scale", "long long n"),
            stub="// your two lines",
            hint=(
                "Every thread reads the scale itself: nobody has to ask the host. Compare with "
                "< 1: that is false for 1 and for NaN."
            ),
            solution=LONG_INDEX + "if (i < n && *scale < 1.0f) x[i] *= *scale;",
            wrong_answers={
                "no guard": LONG_INDEX + "if (*scale < 1.0f) x[i] *= *scale;",
                "always writes": LONG_INDEX + "if (i < n) x[i] *= *scale;",
                "nearly 1 returns, NaN does not": LONG_INDEX
                + "if (fabsf(*scale - 1.0f) < 1e-7f) return;\nif (i < n) x[i] *= *scale;",
                "NaN returns, 1 does not": LONG_INDEX
                + "if (i < n && *scale == *scale) x[i] *= *scale;",
                "divides": LONG_INDEX + "if (i < n && *scale < 1.0f) x[i] /= *scale;",
                "one too few": LONG_INDEX + "if (i < n - 1 && *scale < 1.0f) x[i] *= *scale;",
            },
            cheats={
                "one thread": (
                    "if (blockIdx.x > 0 || threadIdx.x > 0 || !(*scale < 1.0f)) return;\n"
                    "for (long long i = 0; i < n; i++) x[i] *= *scale;"
                ),
                "writes back": LONG_INDEX
                + "if (i < n) x[i] = *scale < 1.0f ? x[i] * *scale : x[i];",
            },
            data=_rescale_case,
        ),
        kernel_exercise(
            "clipped_step",
            task=(
                "A step of plain gradient descent that clips on the way: w[i] becomes w[i] - lr * "
                "scale[0] * grad[i]. Where the scale is not a number, no weight is written. "
                "Expected: three lines."
            ),
            params=(
                "float* w",
                "const float* grad",
                "const float* scale",
                "float lr",
                "long long n",
            ),
            stub="// your lines",
            hint=(
                "NaN is the only number that is not equal to itself: s == s is false for it. "
                "Every thread can find out by itself; nobody has to ask the host."
            ),
            solution=_STEP,
            wrong_answers={
                "no guard": _STEP.replace("i < n && ", ""),
                "NaN reaches the weights": _STEP.replace(" && s == s", ""),
                "NaN counts as 0": _STEP.replace(" && s == s", "").replace(
                    "float s = scale[0];", "float s = isnan(scale[0]) ? 0.0f : scale[0];"
                ),
                "adds": _STEP.replace("-=", "+="),
                "does not clip": _STEP.replace("lr * s *", "lr *"),
                "forgets the learning rate": _STEP.replace("lr * s *", "s *"),
                "overwrites the weight": _STEP.replace("w[i] -= ", "w[i] = -"),
                "divides by the scale": _STEP.replace("lr * s *", "lr / s *"),
                "one too few": _STEP.replace("i < n", "i < n - 1"),
                "steps only where it clips": _STEP.replace("s == s", "s < 1.0f"),
                "one thread of each block": _STEP.replace("i < n", "threadIdx.x == 0 && i < n"),
            },
            cheats={
                "one thread": (
                    "if (blockIdx.x > 0 || threadIdx.x > 0 || *scale != *scale) return;\n"
                    "for (long long i = 0; i < n; i++) w[i] -= lr * *scale * grad[i];"
                ),
            },
            data=_clipped_step_case,
        ),
        Exercise(
            "global_scale",
            task=(
                "norms: (k,) fp32, the norm of each tensor. Return the scale that brings the "
                "norm of all of them together down to max_norm, a tensor () that is 1 where "
                "nothing is to be done and NaN where a norm is NaN. No number may be read on "
                "the host. Expected: two lines."
            ),
            stub=code(
                """
                def global_scale(norms, max_norm):
                    norm = norms.sum()
                    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
                """
            ),
            hint=(
                "The norm of all elements is the square root of the sum of all squares. A "
                "tensor's norm is already a root: square it first. torch.clamp keeps NaN."
            ),
            solution=code(
                """
                def global_scale(norms, max_norm):
                    norm = norms.square().sum().sqrt()
                    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
                """
            ),
            wrong_answers={
                "sum of the norms": _scale_by("norms.sum()"),
                "root of the sum of the norms": _scale_by("norms.sum().sqrt()"),
                "not rooted": _scale_by("norms.square().sum()"),
                "largest norm": _scale_by("norms.max()"),
                "mean of the norms": _scale_by("norms.mean()"),
                "max_norm is always 1": _scale_by("norms.square().sum().sqrt()").replace(
                    "max_norm /", "1.0 /"
                ),
                "asks the host": _scale_by("torch.tensor(norms.square().sum().item()).sqrt()"),
                "decides on the host": code(
                    """
                    def global_scale(norms, max_norm):
                        norm = norms.square().sum().sqrt()
                        return max_norm / norm if norm > max_norm else torch.ones(())
                    """
                ),
                "lengthens short gradients": code(
                    """
                    def global_scale(norms, max_norm):
                        return max_norm / (norms.square().sum().sqrt() + 1e-6)
                    """
                ),
                "NaN becomes 1": code(
                    """
                    def global_scale(norms, max_norm):
                        norm = norms.square().sum().sqrt()
                        return torch.fmin(max_norm / (norm + 1e-6), torch.ones(()))
                    """
                ),
            },
            cheats={
                "tensor after tensor": code(
                    """
                    def global_scale(norms, max_norm):
                        total = torch.zeros(())
                        for norm in norms:
                            total = total + norm * norm
                        return torch.clamp(max_norm / (total.sqrt() + 1e-6), max=1.0)
                    """
                ),
            },
            cases=_global_scale_cases,
            on_device=True,
        ),
    ]
}
