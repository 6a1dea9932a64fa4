"""The exercises of notebook 02: sums of squares, a rescale that skips, the scale of all norms."""

import math

import torch

from .exercises import BLOCK, LONG_INDEX, Case, Exercise, code, kernel_exercise, normal, unwritten


def _squares_case(n, generator):
    x = normal(n, generator)
    blocks = -(-n // BLOCK)
    expected = (
        torch.nn.functional.pad(x.double().square(), (0, blocks * BLOCK - n))
        .view(blocks, BLOCK)
        .sum(1)
    )
    return Case(unwritten(blocks, generator), (x,), (), expected, roundings=16)


def _rescale_case(n, generator):
    x = normal(n, generator)
    # None: a random factor
    fixed_scale = {256: 1.0, 4096: 1.0, 1000: math.nan}.get(n)
    if fixed_scale == 1.0:
        # a NaN that loses this pattern when it is multiplied, so that a needless write is seen
        x.view(torch.int32)[::7] = 0x7F800001
    factor = torch.rand(1, generator=generator, device=generator.device) * 0.8 + 0.1
    if fixed_scale is None:
        return Case(x, (factor,), (), x.double() * factor.double(), "scale < 1")
    label = "scale 1" if fixed_scale == 1.0 else "scale NaN"
    return Case(x, (torch.full_like(factor, fixed_scale),), (), x, label)


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


_SQUARE = """__shared__ float warps[8];
int i = blockIdx.x * blockDim.x + threadIdx.x;
float sum = i < n ? x[i] * x[i] : 0.0f;
"""


WARP_SUM = "for (int far = 16; far > 0; far /= 2) sum += __shfl_down_sync(0xffffffffu, sum, far);\n"


_JOIN = """if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
__syncthreads();
if (threadIdx.x == 0) {
    sum = 0.0f;
    for (int warp = 0; warp < 8; warp++) sum += warps[warp];
    sums[blockIdx.x] = sum;
}"""


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
                "order: the 32 lanes of a warp by __shfl_down_sync, the eight warps through "
                "shared memory. No atomics. Expected: eight lines."
            ),
            params=("float* sums", "const float* x", "int n"),
            stub=_SQUARE + "// your lines",
            hint=(
                "for (int far = 16; far > 0; far /= 2): each lane adds what the lane `far` "
                "above it has; then lane 0 holds the warp's sum. All 256 threads take part: one"
                " beyond n brings 0. Between writing and reading `warps` stands "
                "__syncthreads()."
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
            data=_rescale_case,
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
                    norm = norms.sum()                      # wrong, and it is a real bug
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
            cases=_global_scale_cases,
            on_device=True,
        ),
    ]
}
