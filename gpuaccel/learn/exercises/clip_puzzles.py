"""The exercises of notebook 02: sums of squares, the scale, a step that clips, the scale of many
norms."""

import math

import torch

from .exercises import (
    BLOCK,
    INDEX,
    LONG_INDEX,
    Case,
    kernel_exercise,
    normal,
    python_exercise,
    unwritten,
)


def _rows_of_blocks(x, padding):
    """(blocks, BLOCK) float64: each block's elements, and `padding` behind the last of them."""
    blocks = -(-len(x) // BLOCK)
    padded = torch.nn.functional.pad(x.double(), (0, blocks * BLOCK - len(x)), value=padding)
    return padded.view(blocks, BLOCK)


def _squares_case(n, generator):
    x = normal(n, generator)
    expected = _rows_of_blocks(x, 0.0).square().sum(1)
    return Case(unwritten(len(expected), generator), (x,), (), expected, roundings=16)


def _clip_scale_case(n, generator):
    # Whole numbers, whose sum is exact in any order.
    sums = torch.randint(1, 9, (n,), generator=generator, device=generator.device).float()
    special = {256: math.nan, 1000: math.inf}.get(n)
    if special is not None:
        sums[n // 2] = special
    norm = sums.double().sum().sqrt()
    above = bool(torch.rand((), generator=generator, device=generator.device) < 0.5) or n == 257
    max_norm = 1.0 if special else float(norm) * (0.5 if above and n > 1 else 2.0)
    expected = (norm.new_tensor(max_norm) / norm).clamp(max=1.0)
    label = f"norm {float(norm):.3g}, max_norm {max_norm:.3g}"
    return Case(unwritten(1, generator), (sums,), (max_norm,), expected[None], label, roundings=4)


def _clipped_step_case(n, generator):
    # The weight is much larger than its change, so that the difference loses no digits.
    w = normal(n, generator).sign() + normal(n, generator) * 0.01
    grad = normal(n, generator)
    value = {256: 1.0, 1000: math.nan, 4096: 0.0}.get(n)
    if value is None:
        scale = torch.rand(1, generator=generator, device=generator.device) * 0.8 + 0.1
    else:
        scale = torch.full((1,), value, device=generator.device)
    lr = 0.01
    if n == 1000:
        # where NaN in the scale comes from; a product of it with 0 is NaN again
        grad[::3] = math.nan
        return Case(w, (grad, scale), (lr,), w, "scale NaN")
    if n == 4096:
        # 0 times infinity is NaN
        grad[::3] = math.inf
        return Case(w, (grad, scale), (lr,), w, "scale 0")
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


_SQUARES = """__shared__ float part[256];
int t = threadIdx.x;
int i = blockIdx.x * blockDim.x + t;
part[t] = i < n ? x[i] * x[i] : 0.0f;
for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) part[t] += part[t + half];
}
if (t == 0) sums[blockIdx.x] = part[0];"""


_SCALE = """if (blockIdx.x > 0 || threadIdx.x > 0) return;
float total = 0.0f;
for (int b = 0; b < n; b++) total += sums[b];
float norm = sqrtf(total);
scale[0] = norm <= max_norm ? 1.0f : max_norm / norm;"""


_STEP = LONG_INDEX + "float s = scale[0];\nif (i < n && s > 0.0f) w[i] -= lr * s * grad[i];"


EXERCISES = [
    kernel_exercise(
        "squares",
        task=(
            "sums[b] = the sum of x[i] * x[i] over the 256 elements of block b, in a fixed order, "
            "without atomics. Expected: nine lines."
        ),
        params="float* sums, const float* x, int n",
        stub="// your lines",
        hint=(
            "It is block_sum of notebook 00 with x[i] * x[i] in the place of x[i]. All threads "
            "reach each barrier, also those without an element."
        ),
        solution=_SQUARES,
        wrong_answers={
            "no guard": ("i < n ? x[i] * x[i] : 0.0f", "x[i] * x[i]"),
            "no barrier": ("    __syncthreads();\n", ""),
            "`x[i]` is not squared": ("x[i] * x[i]", "x[i]"),
            "it squares the sum: each x[i] is squared before the sum": (
                "x[i] * x[i]",
                "x[i]",
                "= part[0]",
                "= part[0] * part[0]",
            ),
            "one round too few": ("half > 0", "half > 1"),
            "half of the threads are left out: `half` begins at 128": ("half = 128", "half = 64"),
            "all blocks write `sums[0]`: the place of a block is blockIdx.x": (
                "sums[blockIdx.x]",
                "sums[0]",
            ),
            "adds to sums": ("sums[blockIdx.x] =", "sums[blockIdx.x] +="),
            "`atomicAdd` adds to what was there, and in no fixed order": (
                INDEX + "if (i < n) atomicAdd(&sums[blockIdx.x], x[i] * x[i]);"
            ),
        },
        data=_squares_case,
    ),
    kernel_exercise(
        "clip_scale",
        task=(
            "scale[0] = max_norm / norm where the norm is larger than max_norm, else 1. The norm "
            "is the square root of the sum of all n sums; where it is NaN, scale[0] is NaN. One "
            "thread is enough. Expected: five lines."
        ),
        params="float* scale, const float* sums, float max_norm, int n",
        stub=(
            "if (blockIdx.x > 0 || threadIdx.x > 0) return;      // one thread is left\n"
            "float total = 0.0f;\n"
            "// your lines"
        ),
        hint=(
            "for (int b = 0; b < n; b++) total += sums[b]; then sqrtf(total). norm < x and norm <= "
            "x are false where norm is NaN, and then ? a : b gives b: which value must stand there?"
        ),
        solution=_SCALE,
        wrong_answers={
            "`fminf` is 1 where the norm is NaN": (
                "norm <= max_norm ? 1.0f : max_norm / norm",
                "fminf(1.0f, max_norm / norm)",
            ),
            "NaN counts as small": (
                "norm <= max_norm ? 1.0f : max_norm / norm",
                "norm > max_norm ? max_norm / norm : 1.0f",
            ),
            "that is the sum of the squares: the root is missing": ("sqrtf(total)", "total"),
            "lengthens short gradients": ("norm <= max_norm ? 1.0f : ", ""),
            "`norm / max_norm` is the wrong way round": ("max_norm / norm", "norm / max_norm"),
            "first sum only": ("b < n", "b < 1"),
            "the last of the sums is left out": ("b < n", "b < n - 1"),
            "`max_norm` is not used": ("max_norm", "1.0f"),
            "every thread adds to the scale": (INDEX + "if (i < n) atomicAdd(scale, sums[i]);"),
        },
        data=_clip_scale_case,
    ),
    kernel_exercise(
        "clipped_step",
        task=(
            "A step of plain gradient descent that clips on the way: w[i] becomes w[i] - lr * "
            "scale[0] * grad[i]. Where the scale is 0 or NaN, no weight is written. Expected: "
            "three lines."
        ),
        params="float* w, const float* grad, const float* scale, float lr, long long n",
        stub="// your lines",
        hint=(
            "s > 0.0f is false for 0 and for NaN. Every thread reads the scale by itself, and "
            "Python reads nothing."
        ),
        solution=_STEP,
        wrong_answers={
            "no guard": ("i < n && ", ""),
            "NaN reaches the weights": (" && s > 0.0f", ""),
            "infinite gradients reach the weights": ("s > 0.0f", "s == s"),
            "NaN counts as 0": (
                " && s > 0.0f",
                "",
                "float s = scale[0];",
                "float s = isnan(scale[0]) ? 0.0f : scale[0];",
            ),
            "the step goes uphill: a plus in place of the minus": ("-=", "+="),
            "the scale is not used": ("lr * s *", "lr *"),
            "`lr` is missing": ("lr * s *", "s *"),
            "overwrites the weight": ("w[i] -= ", "w[i] = -"),
            "steps only where it clips": ("s > 0.0f", "s > 0.0f && s < 1.0f"),
        },
        data=_clipped_step_case,
    ),
    python_exercise(
        "global_scale",
        task=(
            "norms: (k,) fp32, the norm of each tensor. Return the scale that brings the norm of "
            "all of them together down to max_norm, a tensor () that is 1 where nothing is to be "
            "done and NaN where a norm is NaN. No number may be read on the host. Expected: two "
            "lines."
        ),
        params="norms, max_norm",
        stub="norm = norms.sum()\nreturn torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
        hint=(
            "The norm of all elements is the square root of the sum of all squares. A tensor's "
            "norm is already a root: square it first. torch.clamp keeps NaN."
        ),
        solution="""
norm = norms.square().sum().sqrt()
return torch.clamp(max_norm / (norm + 1e-6), max=1.0)""",
        wrong_answers={
            "the sum of the norms: each is squared first": (".square().sum().sqrt()", ".sum()"),
            "root of the sum of the norms": (".square()", ""),
            "the sum of the squares: the root is missing": (".sqrt()", ""),
            "it is the largest norm, not that of all together": (
                ".square().sum().sqrt()",
                ".max()",
            ),
            "it is the mean of the norms, not the norm of all together": (
                ".square().sum().sqrt()",
                ".mean()",
            ),
            "`max_norm` is not used": ("max_norm /", "1.0 /"),
            "asks the host": ("norms.square().sum()", "torch.tensor(norms.square().sum().item())"),
            "decides on the host": ("return", "if norm <= max_norm: return torch.ones(())\nreturn"),
            "lengthens short gradients": (
                "torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
                "max_norm / (norm + 1e-6)",
            ),
            "NaN becomes 1": (
                "torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
                "torch.fmin(max_norm / (norm + 1e-6), torch.ones(()))",
            ),
        },
        cases=_global_scale_cases,
        on_device=True,
    ),
]
