"""The exercises of notebook 00: index and guard, an index of another element, a barrier."""

import torch

from .exercises import BLOCK, INDEX, Case, kernel_exercise, normal, unwritten


def _scale_case(n, generator):
    x = normal(n, generator)
    factor = float(torch.rand(1, generator=generator, device=generator.device) + 0.5)
    return Case(unwritten(n, generator), (x,), (factor,), x.double() * factor)


def _reverse_case(n, generator):
    x = normal(n, generator)
    return Case(unwritten(n, generator), (x,), (), x.flip(0).double())


def _add_first_case(n, generator):
    x = normal(n, generator)
    # for each element, the index of the first one of its block
    firsts = torch.arange(n, device=x.device) // BLOCK * BLOCK
    return Case(unwritten(n, generator), (x,), (), x.double() + x[firsts].double())


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
                "adds to what is there": INDEX + "if (i < n) out[i] += factor * x[i];",
                "forgets the factor, which is near 1": INDEX + "if (i < n) out[i] = x[i];",
                "through bf16": INDEX + "if (i < n) out[i] = as_float(as_bf16(factor * x[i]));",
            },
            data=_scale_case,
        ),
        kernel_exercise(
            "reverse",
            task="out holds the elements of x, last one first. Expected: two lines.",
            params=("float* out", "const float* x", "int n"),
            stub="// your two lines",
            hint=(
                "The index that is read and the index that is written always add up to the same "
                "number. Which one, when n is 1? And when n is 2?"
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
                "adds to what is there": INDEX + "if (i < n) out[i] += x[n - 1 - i];",
                "half only": INDEX + "if (i < n / 2) out[i] = x[n - 1 - i];",
            },
            data=_reverse_case,
        ),
        kernel_exercise(
            "add_first",
            task=(
                "To each element, add the first element of its block of 256. One thread "
                "reads the first element, all threads of the block use it. Expected: five lines."
            ),
            params=("float* out", "const float* x", "int n"),
            stub="// your five lines",
            hint=(
                "Thread 0 of the block writes `first`, and the others read it. What has to stand "
                "between a write by one thread and a read by another one? Write that line where "
                "all threads of the block reach it: outside of each `if`."
            ),
            solution=INDEX
            + (
                "__shared__ float first;\n"
                "if (threadIdx.x == 0) first = x[i];\n"
                "__syncthreads();\n"
                "if (i < n) out[i] = x[i] + first;"
            ),
            wrong_answers={
                "no barrier": INDEX
                + (
                    "__shared__ float first;\n"
                    "if (threadIdx.x == 0) first = x[i];\n"
                    "if (i < n) out[i] = x[i] + first;"
                ),
                "barrier too early": INDEX
                + (
                    "__shared__ float first;\n"
                    "__syncthreads();\n"
                    "if (threadIdx.x == 0) first = x[i];\n"
                    "if (i < n) out[i] = x[i] + first;"
                ),
                "every thread writes": INDEX
                + (
                    "__shared__ float first;\n"
                    "if (i < n) first = x[i];\n"
                    "__syncthreads();\n"
                    "if (i < n) out[i] = x[i] + first;"
                ),
                "no guard": INDEX
                + (
                    "__shared__ float first;\n"
                    "if (threadIdx.x == 0) first = x[i];\n"
                    "__syncthreads();\n"
                    "out[i] = x[i] + first;"
                ),
                "first of the tensor": INDEX + "if (i < n) out[i] = x[i] + x[0];",
                "the element before": INDEX
                + (
                    "__shared__ float first;\n"
                    "if (threadIdx.x == 0) first = i > 0 ? x[i - 1] : x[0];\n"
                    "__syncthreads();\n"
                    "if (i < n) out[i] = x[i] + first;"
                ),
                "adds to what is there": INDEX
                + (
                    "__shared__ float first;\n"
                    "if (threadIdx.x == 0) first = x[i];\n"
                    "__syncthreads();\n"
                    "if (i < n) out[i] += x[i] + first;"
                ),
            },
            data=_add_first_case,
        ),
    ]
}
