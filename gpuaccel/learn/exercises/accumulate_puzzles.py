"""The exercises of notebook 01: accumulate bf16 gradients, vectorise it, average over tokens."""

import math

import torch

from .exercises import LONG_INDEX, Case, kernel_exercise, normal, python_exercise


def _accumulate_case(n, generator):
    acc, grad = normal(n, generator) * 100, normal(n, generator, torch.bfloat16)
    return Case(acc, (grad,), (), acc.double() + grad.double())


def _token_mean_cases(generator):
    for size, counts, dtype, bad in (
        (1, [7], torch.float32, False),
        (255, [64, 64], torch.float32, False),
        (256, [5, 1, 40], torch.float32, False),
        (257, [90, 0, 6], torch.float32, False),
        (257, [8, 5], torch.float32, True),
        (1000, [3] * 64, torch.bfloat16, False),
        (4096, [512, 8, 200, 1], torch.bfloat16, False),
    ):
        sums = [
            torch.randn(max(count, 1), size, generator=generator).add(0.5)[:count].sum(0)
            for count in counts
        ]
        # the mean of no token at all is 0 / 0, NaN
        means = [(total / count).to(dtype) for total, count in zip(sums, counts)]
        if bad:
            # a gradient that is NaN although there are tokens: it has to be seen in the result
            means[1][size // 2] = math.nan
        total = sum(mean.double() * count for mean, count in zip(means, counts) if count)
        expected = total / sum(counts)
        words = ", ".join(map(str, counts)) + " tokens"
        if len(counts) > 5:
            words = f"{len(counts)} micro-batches of {counts[0]} tokens"
        words += ", one mean has a NaN" if bad else ""
        words += ", in bf16" if dtype == torch.bfloat16 else ""
        yield words, ([mean.clone() for mean in means], list(counts)), expected


_FOUR = "long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);\n"


EXERCISES = [
    kernel_exercise(
        "accumulate",
        task=(
            "acc[i] += grad[i] for every i below n: gradients in bf16, the sum in fp32, one thread"
            " per element. as_float(grad[i]) reads a bf16. Expected: two lines."
        ),
        params="float* acc, const bf16* grad, long long n",
        stub="// your two lines",
        hint=(
            "A 64-bit index: (long long)blockIdx.x * blockDim.x + threadIdx.x. The sum stays a "
            "float: nothing is rounded to bf16."
        ),
        solution=LONG_INDEX + "if (i < n) acc[i] += as_float(grad[i]);",
        wrong_answers={
            "no guard": LONG_INDEX + "acc[i] += as_float(grad[i]);",
            "one too many": LONG_INDEX + "if (i <= n) acc[i] += as_float(grad[i]);",
            "that is `grad` alone: what was in `acc` before is lost": LONG_INDEX
            + "if (i < n) acc[i] = as_float(grad[i]);",
            "sum kept in bf16": LONG_INDEX
            + "if (i < n) acc[i] = as_float(as_bf16(acc[i] + as_float(grad[i])));",
            "`.bits` is not the number: read it with as_float(grad[i])": LONG_INDEX
            + "if (i < n) acc[i] += grad[i].bits;",
            "the gradient is subtracted, not added": LONG_INDEX
            + "if (i < n) acc[i] -= as_float(grad[i]);",
            "the gradient is added twice": (" acc", " for (int k = 0; k < 2; k++) acc"),
            "the first thread of each block does nothing": (
                "(i",
                "(threadIdx.x == 0) return;\nif (i",
            ),
            "it adds the gradient of another element": ("grad[i", "grad[n - 1 - i"),
        },
        data=_accumulate_case,
    ),
    kernel_exercise(
        "accumulate4",
        task=(
            "acc[i] += grad[i] for every i below n; thread t takes elements 4t to 4t + 3. n need "
            "not be a multiple of four. Expected: one line, or ten with wide accesses."
        ),
        params="float* acc, const bf16* grad, long long n",
        stub="// your lines",
        hint=(
            "A loop over k = 0 .. 3 with the guard inside it is right for every n. With fewer "
            "requests: where all four exist, load4 reads them at once and store4 writes them; the "
            "loop is for the tail."
        ),
        solution=_FOUR
        + (
            "if (first + 4 <= n) {\n"
            "    float4 a = load4(acc, first / 4), b = load4(grad, first / 4);\n"
            "    store4(acc, first / 4, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));\n"
            "} else {\n"
            "    for (long long i = first; i < n; i++) acc[i] += as_float(grad[i]);\n"
            "}"
        ),
        wrong_answers={
            "the last elements are left out where `n` is no multiple of 4": _FOUR
            + (
                "if (first + 4 <= n) for (int k = 0; k < 4; k++) acc[first + k] += "
                "as_float(grad[first + k]);"
            ),
            "guards the first only": _FOUR
            + (
                "if (first < n) for (int k = 0; k < 4; k++) acc[first + k] += "
                "as_float(grad[first + k]);"
            ),
            "the first element is 4 times the thread's index": (
                "long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
                "for (int k = 0; k < 4; k++) if (first + k < n) acc[first + k] += "
                "as_float(grad[first + k]);"
            ),
            "each thread adds three elements, not four": _FOUR
            + (
                "for (int k = 0; k < 3; k++) if (first + k < n) acc[first + k] += "
                "as_float(grad[first + k]);"
            ),
            "one too many": _FOUR
            + (
                "for (int k = 0; k < 4; k++) if (first + k <= n) acc[first + k] += "
                "as_float(grad[first + k]);"
            ),
            "that is `grad` alone: what was in `acc` before is lost": _FOUR
            + (
                "for (int k = 0; k < 4; k++) if (first + k < n) acc[first + k] = "
                "as_float(grad[first + k]);"
            ),
            "it adds the gradient of the neighbour": _FOUR
            + (
                "for (int k = 0; k < 4; k++) if (first + k < n) acc[first + k] += "
                "as_float(grad[(first + k) ^ 1]);"
            ),
        },
        data=_accumulate_case,
        per_thread=4,
    ),
    python_exercise(
        "token_mean",
        task=(
            "means: a list of tensors, each the mean gradient over the tokens of one micro-batch; "
            "counts: how many tokens each has. Return the mean over all tokens, in fp32. A "
            "micro-batch without tokens has a mean of NaN, and must not matter; a NaN of one with "
            "tokens stays NaN. Expected: three to five lines."
        ),
        params="means, counts",
        stub="return sum(means) / len(means)          # right only when all counts are equal",
        hint=(
            "A mean times its count is a sum again. Add the sums in fp32, and divide once, by all "
            "tokens. NaN times 0 is NaN: leave empty ones out."
        ),
        solution="""
total = torch.zeros_like(means[0], dtype=torch.float32)
for mean, count in zip(means, counts):
    if count:
        total += mean.float() * count
return total / sum(counts)""",
        wrong_answers={
            "the mean of the means: each counts alike": (
                "return sum(m.float() for m in means) / len(means)"
            ),
            "the NaN of the micro-batch without tokens is in it: leave that one out": (
                "if count:",
                "if True:",
            ),
            "the NaN of a micro-batch with tokens is gone: it has to stay": (
                "mean.float()",
                "mean.float().nan_to_num()",
            ),
            "the sum is not divided by the number of tokens": ("total / sum(counts)", "total"),
            "it is divided by the number of micro-batches, not of tokens": (
                "sum(counts)",
                "len(counts)",
            ),
            "summed in bf16: the means may be bf16, the result is fp32": (
                ", dtype=torch.float32",
                "",
                "mean.float()",
                "mean",
            ),
            "first micro-batch only": "return means[0].float() * counts[0] / sum(counts)",
        },
        cases=_token_mean_cases,
    ),
]
