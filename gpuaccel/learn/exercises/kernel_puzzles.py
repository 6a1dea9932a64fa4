"""The exercises of notebook 00: scale and reverse a vector, one thread per element."""

import torch

from .exercises import INDEX, Case, kernel_exercise, normal, unwritten


def _scale_case(n, generator):
    x = normal(n, generator)
    factor = float(torch.rand(1, generator=generator, device=generator.device) + 0.5)
    return Case(unwritten(n, generator), (x,), (factor,), x.double() * factor)


def _reverse_case(n, generator):
    x = normal(n, generator)
    return Case(unwritten(n, generator), (x,), (), x.flip(0).double())


EXERCISES = {
    e.name: e
    for e in [
        kernel_exercise(
            "scale",
            task=(
                "out[i] = factor * x[i] for every i below n, one thread per element. Expected: "
                "two lines."
            ),
            params=("float* out", "const float* x", "float factor", "int n"),
            stub="// your two lines",
            hint=(
                "The last block has threads to spare when n is no multiple of 256. Compute i as"
                " in saxpy, and let only threads with i < n write."
            ),
            solution=INDEX + "if (i < n) out[i] = factor * x[i];",
            wrong_answers={
                "no guard": INDEX + "out[i] = factor * x[i];",
                "one too many": INDEX + "if (i <= n) out[i] = factor * x[i];",
                "one too few": INDEX + "if (i < n - 1) out[i] = factor * x[i];",
                "index within the block only": (
                    "int i = threadIdx.x;\nif (i < n) out[i] = factor * x[i];"
                ),
                "adds": INDEX + "if (i < n) out[i] = factor + x[i];",
                "through bf16": INDEX + "if (i < n) out[i] = as_float(as_bf16(factor * x[i]));",
            },
            data=_scale_case,
        ),
        kernel_exercise(
            "reverse",
            task="out[i] = x[n - 1 - i]: the same elements, last one first. Expected: two lines.",
            params=("float* out", "const float* x", "int n"),
            stub="// your two lines",
            hint=(
                "Element 0 goes to n - 1, element 1 to n - 2. Think of n = 1: thread 0 reads "
                "element 0."
            ),
            solution=INDEX + "if (i < n) out[i] = x[n - 1 - i];",
            wrong_answers={
                "no guard": INDEX + "out[i] = x[n - 1 - i];",
                "off by one": INDEX + "if (i < n) out[i] = x[n - i];",
                "reverses each block": INDEX
                + (
                    "int j = (blockIdx.x + 1) * blockDim.x - 1 - threadIdx.x;\n"
                    "if (i < n && j < n) out[i] = x[j];"
                ),
                "leaves the order": INDEX + "if (i < n) out[i] = x[i];",
                "half only": INDEX + "if (i < n / 2) out[i] = x[n - 1 - i];",
            },
            data=_reverse_case,
        ),
    ]
}
