"""The exercises of notebook 02: sums of squares, the scale, a step that clips, the scale of many
norms."""

import math

import torch

from .exercises import (
    BLOCK,
    INDEX,
    LONG_INDEX,
    Case,
    Exercise,
    code,
    kernel_exercise,
    normal,
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
            "squares",
            task=(
                "sums[b] = the sum of x[i] * x[i] over the 256 elements of block b, in a fixed "
                "order, without atomics. Expected: nine lines."
            ),
            params=("float* sums", "const float* x", "int n"),
            stub="// your lines",
            hint=(
                "It is block_sum of notebook 00 with x[i] * x[i] in the place of x[i]. All threads "
                "reach each barrier, also those without an element."
            ),
            solution=_SQUARES,
            wrong_answers={
                "no guard": _SQUARES.replace("i < n ? x[i] * x[i] : 0.0f", "x[i] * x[i]"),
                "no barrier": _SQUARES.replace("    __syncthreads();\n", ""),
                "does not square": _SQUARES.replace("x[i] * x[i]", "x[i]"),
                "squares the sum": _SQUARES.replace("x[i] * x[i]", "x[i]").replace(
                    "= part[0]", "= part[0] * part[0]"
                ),
                "one round too few": _SQUARES.replace("half > 0", "half > 1"),
                "half of the threads": _SQUARES.replace("half = 128", "half = 64"),
                "fixed place, not the block's": _SQUARES.replace("sums[blockIdx.x]", "sums[0]"),
                "adds to sums": _SQUARES.replace("sums[blockIdx.x] =", "sums[blockIdx.x] +="),
                "atomics": (INDEX + "if (i < n) atomicAdd(&sums[blockIdx.x], x[i] * x[i]);"),
            },
            cheats={
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
            "clip_scale",
            task=(
                "scale[0] = max_norm / norm where the norm is larger than max_norm, else 1. The "
                "norm is the square root of the sum of all n sums; where it is NaN, scale[0] is "
                "NaN. One thread is enough. Expected: five lines."
            ),
            params=("float* scale", "const float* sums", "float max_norm", "int n"),
            stub=(
                "if (blockIdx.x > 0 || threadIdx.x > 0) return;      // one thread is left\n"
                "float total = 0.0f;\n"
                "// your lines"
            ),
            hint=(
                "for (int b = 0; b < n; b++) total += sums[b]; then sqrtf(total). fminf "
                "would hide the NaN: use a comparison. Every comparison with NaN is false."
            ),
            solution=_SCALE,
            wrong_answers={
                "the smaller one, which is 1 for NaN": _SCALE.replace(
                    "norm <= max_norm ? 1.0f : max_norm / norm", "fminf(1.0f, max_norm / norm)"
                ),
                "NaN counts as small": _SCALE.replace(
                    "norm <= max_norm ? 1.0f : max_norm / norm",
                    "norm > max_norm ? max_norm / norm : 1.0f",
                ),
                "no root": _SCALE.replace("sqrtf(total)", "total"),
                "lengthens short gradients": _SCALE.replace("norm <= max_norm ? 1.0f : ", ""),
                "upside down": _SCALE.replace("max_norm / norm", "norm / max_norm"),
                "first sum only": _SCALE.replace("b < n", "b < 1"),
                "one too few": _SCALE.replace("b < n", "b < n - 1"),
                "max_norm is 1": _SCALE.replace("max_norm", "1.0f"),
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
            params=(
                "float* w",
                "const float* grad",
                "const float* scale",
                "float lr",
                "long long n",
            ),
            stub="// your lines",
            hint=(
                "Every comparison with NaN is false, so s > 0.0f is false for 0 and for NaN. Every "
                "thread reads the scale by itself; nobody has to ask the host."
            ),
            solution=_STEP,
            wrong_answers={
                "no guard": _STEP.replace("i < n && ", ""),
                "NaN reaches the weights": _STEP.replace(" && s > 0.0f", ""),
                "infinite gradients reach the weights": _STEP.replace("s > 0.0f", "s == s"),
                "NaN counts as 0": _STEP.replace(" && s > 0.0f", "").replace(
                    "float s = scale[0];", "float s = isnan(scale[0]) ? 0.0f : scale[0];"
                ),
                "adds": _STEP.replace("-=", "+="),
                "does not clip": _STEP.replace("lr * s *", "lr *"),
                "forgets the learning rate": _STEP.replace("lr * s *", "s *"),
                "overwrites the weight": _STEP.replace("w[i] -= ", "w[i] = -"),
                "divides by the scale": _STEP.replace("lr * s *", "lr / s *"),
                "one too few": _STEP.replace("i < n", "i < n - 1"),
                "steps only where it clips": _STEP.replace("s > 0.0f", "s > 0.0f && s < 1.0f"),
                "one thread of each block": _STEP.replace("i < n", "threadIdx.x == 0 && i < n"),
            },
            cheats={
                "one thread": (
                    "if (blockIdx.x > 0 || threadIdx.x > 0 || !(*scale > 0.0f)) return;\n"
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
