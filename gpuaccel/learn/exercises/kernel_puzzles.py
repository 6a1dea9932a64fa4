"""The exercises of notebook 00: a line, index and guard, other elements, a barrier."""

import torch

from .exercises import BLOCK, INDEX, Case, kernel_exercise, normal, unwritten


def _saxpy_case(n, generator):
    y, x = normal(n, generator), normal(n, generator)
    a = float(torch.rand(1, generator=generator, device=generator.device) - 1.5)
    product = a * x.double()
    # The product and the sum are rounded once or twice.
    least = (product.abs() + y.abs()) * EPS
    return Case(y, (x,), (a,), product + y.double(), least=least)


def _scale_case(n, generator):
    x = normal(n, generator)
    factor = float(torch.rand(1, generator=generator, device=generator.device) + 0.5)
    return Case(unwritten(n, generator), (x,), (factor,), x.double() * factor)


def _reverse_case(n, generator):
    x = normal(n, generator)
    return Case(unwritten(n, generator), (x,), (), x.flip(0).double())


def _blur_case(n, generator):
    x = normal(n, generator)
    padded = torch.nn.functional.pad(x.double(), (1, 1))
    expected = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
    return Case(unwritten(n, generator), (x,), (), expected, roundings=4, least=EPS * 4)


def _block_sum_case(n, generator):
    x = normal(n, generator)
    blocks = (n + BLOCK - 1) // BLOCK
    rows = torch.nn.functional.pad(x.double(), (0, blocks * BLOCK - n)).view(blocks, BLOCK)
    # of a sum in any order
    least = rows.abs().sum(1) * EPS * 8
    return Case(unwritten(blocks, generator), (x,), (), rows.sum(1), least=least)


EPS = torch.finfo(torch.float32).eps
_TREE = """__shared__ float part[256];
int t = threadIdx.x;
int i = blockIdx.x * blockDim.x + t;
part[t] = i < n ? x[i] : 0.0f;
for (int half = 128; half > 0; half /= 2) {
    @
    if (t < half) part[t] += part[t + half];
}
if (t == 0) out[blockIdx.x] = part[0];"""
_BARRIER = "__syncthreads();"


EXERCISES = [
    kernel_exercise(
        "saxpy",
        task="y[i] = a * x[i] + y[i] for every i below n. Expected: one line.",
        params="float* y, const float* x, float a, int n",
        stub=INDEX + "if (i < n) {\n    // your line\n}",
        hint=(
            "It is the line of the Python loop, with a semicolon at its end. Each thread has an i "
            "of its own."
        ),
        solution=INDEX + "if (i < n) y[i] = a * x[i] + y[i];",
        wrong_answers={
            "no guard": INDEX + "y[i] = a * x[i] + y[i];",
            "one too many": INDEX + "if (i <= n) y[i] = a * x[i] + y[i];",
            "`+ y[i]` is missing: what was in `y` is lost": INDEX + "if (i < n) y[i] = a * x[i];",
            "the product is subtracted, not added": INDEX + "if (i < n) y[i] = y[i] - a * x[i];",
            "`y[i]` is subtracted, not added": INDEX + "if (i < n) y[i] = a * x[i] - y[i];",
            "`a` is missing": INDEX + "if (i < n) y[i] += x[i];",
            "`a` belongs to `x`, not to `y`": INDEX + "if (i < n) y[i] = x[i] + a * y[i];",
            "the index lacks blockIdx.x * blockDim.x": (
                "int i = threadIdx.x;\nif (i < n) y[i] = a * x[i] + y[i];"
            ),
            "no loop is needed: each thread computes one element": (
                "for (int i = 0; i < n; i++) y[i] = a * x[i] + y[i];"
            ),
            "it is rounded to 16 bits on the way": INDEX
            + "if (i < n) y[i] += as_float(as_bf16(a * x[i]));",
        },
        data=_saxpy_case,
    ),
    kernel_exercise(
        "scale",
        task=(
            "out[i] = factor * x[i] for every i below n, one thread per element. Expected: two "
            "lines."
        ),
        params="float* out, const float* x, float factor, int n",
        stub="// your two lines",
        hint=(
            "The last block has threads to spare when n is no multiple of 256. Compute i as in "
            "saxpy, and let only threads with i < n write."
        ),
        solution=INDEX + "if (i < n) out[i] = factor * x[i];",
        wrong_answers={
            "no guard": INDEX + "out[i] = factor * x[i];",
            "one too many": INDEX + "if (i <= n) out[i] = factor * x[i];",
            "one too few": INDEX + "if (i < n - 1) out[i] = factor * x[i];",
            "the index lacks blockIdx.x * blockDim.x": (
                "int i = threadIdx.x;\nif (i < n) out[i] = factor * x[i];"
            ),
            "a sum in place of the product": INDEX + "if (i < n) out[i] = factor + x[i];",
            "adds to what is there": INDEX + "if (i < n) out[i] += factor * x[i];",
            "`factor` is missing": INDEX + "if (i < n) out[i] = x[i];",
            "it is rounded to 16 bits on the way": INDEX
            + "if (i < n) out[i] = as_float(as_bf16(factor * x[i]));",
        },
        data=_scale_case,
    ),
    kernel_exercise(
        "reverse",
        task="out holds the elements of x, last one first. Expected: two lines.",
        params="float* out, const float* x, int n",
        stub="// your two lines",
        hint=(
            "The index that is read and the index that is written always add up to the same "
            "number. Which one, when n is 1? And when n is 2?"
        ),
        solution=INDEX + "if (i < n) out[i] = x[n - 1 - i];",
        wrong_answers={
            "no guard": INDEX + "out[i] = x[n - 1 - i];",
            "`n - i` is one too far: the last element is x[n - 1]": INDEX
            + "if (i < n) out[i] = x[n - i];",
            "reverses each block": INDEX
            + (
                "int j = (blockIdx.x + 1) * blockDim.x - 1 - threadIdx.x;\n"
                "if (i < n && j < n) out[i] = x[j];"
            ),
            "the order is as it was": INDEX + "if (i < n) out[i] = x[i];",
            "adds to what is there": INDEX + "if (i < n) out[i] += x[n - 1 - i];",
            "only the first half is written": INDEX + "if (i < n / 2) out[i] = x[n - 1 - i];",
        },
        data=_reverse_case,
    ),
    kernel_exercise(
        "blur",
        task=(
            "out[i] = the mean of x[i - 1], x[i] and x[i + 1]; beyond the ends of x there are "
            "zeros. Expected: five lines."
        ),
        params="float* out, const float* x, int n",
        stub="// your lines",
        hint=(
            "The guard of i does not guard its neighbours: float left = i > 0 ? x[i - 1] : 0.0f; "
            "reads only where there is something to read."
        ),
        solution=INDEX
        + (
            "if (i >= n) return;\n"
            "float left = i > 0 ? x[i - 1] : 0.0f;\n"
            "float right = i + 1 < n ? x[i + 1] : 0.0f;\n"
            "out[i] = (left + x[i] + right) / 3.0f;"
        ),
        wrong_answers={
            "neighbours without a guard": (
                INDEX + "if (i < n) out[i] = (x[i - 1] + x[i] + x[i + 1]) / 3.0f;"
            ),
            "the first and the last element are not written": (
                INDEX + "if (i > 0 && i < n - 1) out[i] = (x[i - 1] + x[i] + x[i + 1]) / 3.0f;"
            ),
            "beyond an end it takes the end, not 0": (
                INDEX + "if (i < n) out[i] = (x[i > 0 ? i - 1 : 0] + x[i] + "
                "x[i < n - 1 ? i + 1 : i]) / 3.0f;"
            ),
            "beyond an end it takes the other end, not 0": (
                INDEX + "if (i < n) out[i] = (x[(i + n - 1) % n] + x[i] + x[(i + 1) % n]) / 3.0f;"
            ),
            "1 / 3 is 0, as both are whole numbers: write 3.0f": (
                INDEX + "if (i < n) out[i] = ((i > 0 ? x[i - 1] : 0.0f) + x[i] + "
                "(i < n - 1 ? x[i + 1] : 0.0f)) * (1 / 3);"
            ),
            "`threadIdx.x > 0` is false at the start of each block: ask `i > 0`": (
                "= i >",
                "= threadIdx.x >",
            ),
        },
        data=_blur_case,
    ),
    kernel_exercise(
        "block_sum",
        task=(
            "out[b] = the sum of the 256 elements of x in block b, with no race. Expected: one "
            "line more."
        ),
        params="float* out, const float* x, int n",
        stub=_TREE.replace("@", "// your line"),
        hint=(
            "What must stand between the write of part[t + half] by one thread and its read by "
            "another one? Each round reads what the round before has written."
        ),
        solution=_TREE.replace("@", _BARRIER),
        wrong_answers={
            "barrier before the loop only": _TREE.replace("@", "").replace(
                "for (int", f"{_BARRIER}\nfor (int"
            ),
            "barrier after the loop only": _TREE.replace("@", "").replace(
                "if (t == 0)", f"{_BARRIER}\nif (t == 0)"
            ),
            "__syncwarp() orders 32 threads, not the block": _TREE.replace("@", "__syncwarp();"),
            "no guard": _TREE.replace("@", _BARRIER).replace("i < n ? x[i] : 0.0f", "x[i]"),
            "one round too few: half ends at 1": _TREE.replace("@", _BARRIER).replace(
                "half > 0", "half > 1"
            ),
            "every thread writes `out[blockIdx.x]`: one is enough": ("if (t == 0) ", ""),
        },
        data=_block_sum_case,
    ),
]
