"""The exercises of shelf_activation (a backward by hand, a gate) and of shelf_attention (attention
key by key, and by a table)."""

import re

import torch

from .exercises import (
    BLOCK,
    GUARDED,
    INDEX,
    WRONG_GUARDS,
    Case,
    kernel_exercise,
    normal,
    unwritten,
    whole_number,
)

FAR = (1000, 4096)  # sizes at which some exp is infinite in fp32


def _uniform(n, generator, low=0.2, high=1.2):
    return low + (high - low) * torch.rand(n, generator=generator, device=generator.device)


# ---- shelf_activation: y = x * sigmoid(k x)


def _activation(n, generator):
    """(x, k, sigmoid(k x) in float64, a label)."""
    k = _uniform(1, generator, 0.5, 2.0)
    # The slope is 0 at k x = -1.28: elements keep away from there, where digits cancel.
    u = torch.rand(n, generator=generator, device=generator.device)
    u = torch.where(torch.arange(n, device=u.device) % 3 == 0, -8.0 + 6.4 * u, -1.0 + 7.0 * u)
    if n in FAR:  # |k x| from 45 to 110: exp(-k x), or its square, is infinite for some
        u[3::8] = -45.0 - 65.0 * torch.rand(u[3::8].shape, generator=generator, device=u.device)
        u[7::8] = 45.0 + 65.0 * torch.rand(u[7::8].shape, generator=generator, device=u.device)
    x = u / k
    label = "some |k x| above 88" if n in FAR else ""
    return x, k, torch.sigmoid(k.double() * x.double()), label


def _swish_case(n, generator):
    x, k, s, label = _activation(n, generator)
    dy = normal(n, generator)
    expected = dy.double() * (s + k.double() * x.double() * s * (1 - s))
    return Case(
        unwritten(n, generator),
        (dy, x, k),
        (),
        expected,
        label,
        roundings=64,
        # A sigmoid is rounded as 1 is, for example as (1 + tanh(k x / 2)) / 2.
        least=8 * torch.finfo(dy.dtype).eps * dy.double().abs(),
    )


def _swish_k_case(n, generator):
    x, k, s, label = _activation(n, generator)
    dy = _uniform(n, generator)  # every term is positive: no sum loses digits

    def sums(terms):
        blocks = -(-n // BLOCK)
        padded = torch.nn.functional.pad(dy.double() * terms, (0, blocks * BLOCK - n))
        return padded.view(blocks, BLOCK).sum(1)

    expected = sums(x.double().square() * s * (1 - s))
    return Case(
        unwritten(len(expected), generator),
        (dy, x, k),
        (),
        expected,
        label,
        roundings=64,
        # what is left of 1 - s where s is nearly 1
        least=8 * torch.finfo(x.dtype).eps * sums(x.double().square()),
    )


def _gated_case(n, generator):
    hidden = 2 if n > 100_000 else whole_number(2, 30, generator)
    rows = -(-n // hidden)
    x1, k, s, _ = _activation(rows * hidden, generator)
    if n in FAR:
        x1[3::8] = x1[3::8].abs()
        x1[7::8] = 100.0 / k
        s = torch.sigmoid(k.double() * x1.double())
    x2 = normal(rows * hidden, generator)
    x = torch.stack([x1.view(rows, hidden), x2.view(rows, hidden)], dim=1)
    return Case(
        unwritten(n, generator),
        (x.flatten(), k),
        (hidden,),
        (x1.double() * s * x2.double())[:n],
        f"rows of 2 x {hidden}" + (", some |k x1| above 88" if n in FAR else ""),
        roundings=32,
    )


_SWISH = (
    GUARDED
    + """float s = 1.0f / (1.0f + expf(-k[0] * x[i]));
dx[i] = dy[i] * (s + k[0] * x[i] * s * (1.0f - s));"""
)
_SLOPE = "(s + k[0] * x[i] * s * (1.0f - s))"

_SWISH_K = """__shared__ float part[256];
int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
part[t] = 0.0f;
if (i < n) {
    float s = 1.0f / (1.0f + expf(-k[0] * x[i]));
    part[t] = dy[i] * x[i] * x[i] * s * (1.0f - s);
}
for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) part[t] += part[t + half];
}
if (t == 0) sums[blockIdx.x] = part[0];"""

_GATED = (
    GUARDED
    + """const float* row = x + i / hidden * 2 * hidden;
float x1 = row[i % hidden], x2 = row[hidden + i % hidden];
h[i] = x1 / (1.0f + expf(-k[0] * x1)) * x2;"""
)

# ---- shelf_attention: q and k lie on a grid, so that every score is exact in fp32


def _grid(shape, generator):
    return torch.randint(-6, 7, shape, generator=generator, device=generator.device) / 4


def _attend_case(n, generator):
    T, d = (
        (3, 2) if n > 100_000 else (whole_number(4, 20, generator), whole_number(2, 7, generator))
    )
    queries = -(-n // d)
    q, k = _grid((queries, d), generator), _grid((T, d), generator)
    label = ""
    if n in FAR:
        q[:, 0], k[:, 0] = 16.0, 16.0 if n == FAR[0] else -16.0
        label = ", scores above 200" if n == FAR[0] else ", scores below -200"
    v = _uniform(T * d, generator).view(T, d)  # positive: no sum loses digits
    s = q.double() @ k.double().T

    return Case(
        unwritten(n, generator),
        (q.flatten(), k.flatten(), v.flatten()),
        (T, d),
        (s.softmax(-1) @ v.double()).flatten()[:n],
        f"{T} keys, d = {d}{label}",
        roundings=64,
    )


def _add_pair_case(n, generator):
    d = 2
    while d**3 < n:
        d += 1
    table = _uniform(n, generator)
    # positive, as the table is: no sum loses digits
    k, v = _uniform(d, generator, 0.5, 2.0), _uniform(d, generator, 0.5, 2.0)

    added = torch.einsum("a,b,c->abc", k.double(), k.double(), v.double()).flatten()[:n]
    return Case(
        table,
        (k, v),
        (d,),
        table.double() + added,
        f"d = {d}",
        roundings=8,
    )


def _read_table_case(n, generator):
    d = 2 if n > 100_000 else whole_number(2, 7, generator)
    queries = -(-n // d)
    q = _uniform(queries * d, generator).view(queries, d)
    table = _uniform(d**3, generator).view(d, d, d)
    table = (table + table.transpose(0, 1)).contiguous()  # symmetric, as sums of k[a] k[b] are
    wide, cells = q.double(), table.double()

    return Case(
        unwritten(n, generator),
        (q.flatten(), table.flatten()),
        (d,),
        torch.einsum("ra,rb,abc->rc", wide, wide, cells).flatten()[:n],
        f"d = {d}",
        roundings=32,
    )


_ATTEND = (
    GUARDED
    + """const float* query = q + i / d * d;     // its d numbers; this thread's channel is i % d
float m = -INFINITY, sum = 0.0f, total = 0.0f;
for (int j = 0; j < T; j++) {
    float s = 0.0f;
    for (int e = 0; e < d; e++) s += query[e] * k[j * d + e];
    float larger = fmaxf(m, s);
    float keep = expf(m - larger), weight = expf(s - larger);
    sum = sum * keep + weight;
    total = total * keep + weight * v[j * d + i % d];
    m = larger;
}
y[i] = total / sum;"""
)
# The lines of _ATTEND that are given.
_ATTEND_STUB = re.sub(
    r"    float larger.*(?=})",
    "    // your lines\n",
    _ATTEND.replace("float m = -INFINITY, sum = 0.0f, total = 0.0f;", "// your lines"),
    flags=re.DOTALL,
).replace("y[i] = total / sum;", "// your line: y[i]")

_ADD_PAIR = (
    GUARDED
    + """int a = i / (d * d), b = i / d % d, c = i % d;
table[i] += k[a] * k[b] * v[c];"""
)

_READ_TABLE = (
    GUARDED
    + """const float* query = q + i / d * d;
int c = i % d;
float sum = 0.0f;
for (int a = 0; a < d; a++)
    for (int b = 0; b < d; b++) sum += query[a] * query[b] * table[(a * d + b) * d + c];
y[i] = sum;"""
)


EXERCISES = [
    kernel_exercise(
        "swish_backward",
        task=(
            "The backward of y = x * sigmoid(k x), by hand: dx[i] for every i below n, from dy, x "
            "and k[0], also where exp(-k x) is infinite in fp32 (k x below -88). x appears twice "
            "in y, so the slope has two terms. Expected: four lines."
        ),
        params="float* dx, const float* dy, const float* x, const float* k, int n",
        stub="// your lines",
        hint=(
            "Call s = sigmoid(k x), which is 1 / (1 + exp(-k x)). The product rule: the slope of x"
            " * s is 1 * s plus x times the slope of s, which is k * s * (1 - s)."
        ),
        solution=_SWISH,
        wrong_answers={
            **WRONG_GUARDS,
            "adds to dx": ("dx[i] =", "dx[i] +="),
            "it is the value, not its slope": (_SLOPE, "x[i] * s"),
            "0.75 x": (_SLOPE, "(x[i] * s + 0.75f * x[i])"),
            "forgets the first term of the product rule": ("(s + k", "(k"),
            "it is the slope of the sigmoid alone": (_SLOPE, "k[0] * s * (1.0f - s)"),
            "forgets the second term of the product rule": (_SLOPE, "s"),
            "forgets k": ("(s + k[0] * x[i]", "(s + x[i]"),
            "forgets dy": ("dy[i] * ", ""),
            "`1 - s * s` is not `s * (1 - s)`": ("s * (1.0f - s)", "(1.0f - s * s)"),
            "infinite by infinite": GUARDED
            + """float e = expf(-k[0] * x[i]);
dx[i] = dy[i] * (1.0f / (1.0f + e) + k[0] * x[i] * e / ((1.0f + e) * (1.0f + e)));""",
            "infinite by infinite, on the right": GUARDED
            + """float s = expf(k[0] * x[i]) / (1.0f + expf(k[0] * x[i]));
dx[i] = dy[i] * (s + k[0] * x[i] * s * (1.0f - s));""",
        },
        data=_swish_case,
    ),
    kernel_exercise(
        "swish_k",
        task=(
            "The gradient of k: sums[b] is the sum over the elements of block b of dy[i] times the"
            " slope of y in k. Blocks have 256 threads. Expected: ten lines, of which block_sum "
            "has most."
        ),
        params="float* sums, const float* dy, const float* x, const float* k, int n",
        stub="// your lines",
        hint=(
            "x * sigmoid(k x) changes with k by x * x * s * (1 - s), where s is the sigmoid. The "
            "rest is block_sum of notebook 00: a thread without an element adds 0, and all threads"
            " reach each barrier."
        ),
        solution=_SWISH_K,
        wrong_answers={
            "no guard": ("if (i < n) {", "{"),
            "one too many": ("i < n", "i <= n"),
            "no barrier": ("    __syncthreads();\n", ""),
            "adds to sums": ("sums[blockIdx.x] =", "sums[blockIdx.x] +="),
            "`x[i]` appears twice in the slope": ("dy[i] * x[i] * x[i]", "dy[i] * x[i]"),
            "forgets dy": ("dy[i] * ", ""),
            "the gradient of x, not of k": (
                "x[i] * x[i] * s * (1.0f - s)",
                "(s + k[0] * x[i] * s * (1.0f - s))",
            ),
            "with a factor k": ("= dy[i]", "= k[0] * dy[i]"),
            "`1 - s * s` is not `s * (1 - s)`": ("s * (1.0f - s)", "(1.0f - s * s)"),
            "the wrong sign": ("= dy[i]", "= -dy[i]"),
            "`atomicAdd` adds to what was there, and in no fixed order": GUARDED
            + """float s = 1.0f / (1.0f + expf(-k[0] * x[i]));
atomicAdd(&sums[blockIdx.x], dy[i] * x[i] * x[i] * s * (1.0f - s));""",
        },
        data=_swish_k_case,
    ),
    kernel_exercise(
        "gated",
        task=(
            "h[i] = x1 * sigmoid(k x1) * x2, n numbers. A row of x has 2 * hidden numbers, first "
            "the x1, then the x2 of a row of h. Right also where exp(k x1) is infinite. Expected: "
            "five lines."
        ),
        params="float* h, const float* x, const float* k, int hidden, int n",
        stub="// your lines",
        hint=(
            "Element i of h is in row i / hidden and in column i % hidden. That row of x begins at"
            " x[i / hidden * 2 * hidden], and its second half hidden numbers later."
        ),
        solution=_GATED,
        wrong_answers={
            **WRONG_GUARDS,
            "adds to h": ("h[i] =", "h[i] +="),
            "rows of h in x": ("i / hidden * 2 * hidden", "i / hidden * hidden"),
            "neighbours": (
                "row[i % hidden]",
                "row[2 * (i % hidden)]",
                "row[hidden + i % hidden]",
                "row[2 * (i % hidden) + 1]",
            ),
            "the halves swapped": ("x1 = row", "x2 = row", "x2 = row[hidden", "x1 = row[hidden"),
            "forgets the factor x1": ("x1 / (1", "1.0f / (1"),
            "no gate": (" * x2;", ";"),
            "forgets k": ("-k[0] * x1", "-x1"),
            "the other sign": ("expf(-k", "expf(k"),
            "infinite by infinite": (
                "x1 / (1.0f + expf(-k[0] * x1))",
                "x1 * expf(k[0] * x1) / (1.0f + expf(k[0] * x1))",
            ),
        },
        data=_gated_case,
    ),
    kernel_exercise(
        "attend",
        task=(
            "Attention with a softmax, one key after the other, without a place for all scores: "
            "y[i] is the sum over the T keys of weight * v[j * d + c], divided by the sum of the "
            "weights, exp(score). Right also where exp(score) is infinite or 0. Expected: six "
            "lines."
        ),
        params="float* y, const float* q, const float* k, const float* v, int T, int d, int n",
        stub=_ATTEND_STUB,
        hint=(
            "Keep m, the largest score so far, and take expf(s - m) as the weight of s. Where s is"
            " larger than m, multiply both sums by expf(m - s) first, then set m."
        ),
        solution=_ATTEND,
        wrong_answers={
            **WRONG_GUARDS,
            "adds to y": ("y[i] =", "y[i] +="),
            "no largest score": ("fmaxf(m, s)", "0.0f"),
            "the sums are not brought to a new largest score": (" * keep", ""),
            "only the values' sum is corrected": ("sum * keep", "sum"),
            "only the weights' sum is corrected": ("total * keep", "total"),
            "m is never set": ("    m = larger;\n", ""),
            "not divided by the sum of the weights": ("total / sum", "total"),
            "forgets the last key": ("j < T", "j < T - 1"),
            "a key too many": ("j < T", "j <= T"),
            "the negative scores": ("s += query", "s -= query"),
            "scores as weights": ("expf(s - larger)", "s"),
            "divides the score by the square root of d": (
                "    float larger",
                "    s /= sqrtf((float)d);\n    float larger",
            ),
            "the channel of another thread": ("v[j * d + i % d]", "v[j * d]"),
            "keys in columns": ("k[j * d + e]", "k[e * T + j]"),
            "each thread its own query": ("q + i / d * d", "q + i * d"),
        },
        data=_attend_case,
    ),
    kernel_exercise(
        "add_pair",
        task=(
            "Add one key and its value to the table: table[(a * d + b) * d + c] gets k[a] * k[b] *"
            " v[c] on top of what it holds. One thread per cell, n cells. Expected: four lines."
        ),
        params="float* table, const float* k, const float* v, int d, int n",
        stub="// your lines",
        hint=(
            "c changes fastest: it is i % d. Then b, i / d % d, then a, i / (d * d). No thread "
            "needs another one's cell."
        ),
        solution=_ADD_PAIR,
        wrong_answers={
            **WRONG_GUARDS,
            "overwrites": ("+=", "="),
            "k[a] only: the degree is 2": ("k[a] * k[b]", "k[a]"),
            "one number of the key twice": ("k[a] * k[b]", "k[a] * k[a]"),
            "forgets the value": (" * v[c]", ""),
            "channels first": ("k[a] * k[b] * v[c]", "v[a] * k[b] * k[c]"),
            "a from the wrong length": ("i / (d * d)", "i / d"),
            "all into one row": ("table[i]", "table[c]"),
        },
        data=_add_pair_case,
    ),
    kernel_exercise(
        "read_table",
        task=(
            "Ask the table: y[i] is the sum over all a and b of q_a * q_b * table[(a * d + b) * d "
            "+ c], with the query i / d and the channel c = i % d. Expected: eight lines."
        ),
        params="float* y, const float* q, const float* table, int d, int n",
        stub=(INDEX + "if (i >= n) return;\n// your lines"),
        hint=(
            "Two loops, one in the other, over a and b below d. The sum is a float of the thread's"
            " own; y[i] is written once, after the loops."
        ),
        solution=_READ_TABLE,
        wrong_answers={
            **WRONG_GUARDS,
            "adds to y": ("y[i] =", "y[i] +="),
            "q[a] only: the degree is 2": ("query[a] * query[b]", "query[a]"),
            "one number of the query twice": ("query[a] * query[b]", "query[a] * query[a]"),
            "the first query": ("q + i / d * d", "q"),
            "each thread its own query": ("q + i / d * d", "q + i"),
            "the query's number as channel": ("c = i % d", "c = i / d % d"),
            "channels first": ("(a * d + b) * d + c", "(c * d + a) * d + b"),
            "stops too early": ("b < d", "b < d - 1"),
            "the pairs with a <= b only": ("int b = 0", "int b = a"),
        },
        data=_read_table_case,
    ),
]
