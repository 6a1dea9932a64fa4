"""The exercises of notebooks 04 and shelf_rounding.

Where runs begin, sums in a fixed order, rounding at random, tokens out of range."""

import torch

from ...ops import reference_encoder, reference_round
from ..figures.drawing import plural
from .exercises import GUARDED, INDEX, Case, kernel_exercise, normal, unwritten, whole_number

# A token like the poison around a check's tensors, so that a read in front of them is seen.
POISON = 65_000


CHANNELS = {255: 51, 256: 32, 1000: 8, 4096: 64}  # n -> a divisor of n


def _group_starts_case(n, generator):
    device = generator.device
    tokens = (
        POISON
        + torch.randint(0, n // 3 + 1, (n,), generator=generator, device=device).sort().values.int()
    )
    tokens[0] = POISON
    first = torch.ones(n, dtype=torch.bool, device=device)
    first[1:] = tokens[1:] != tokens[:-1]
    return Case(
        torch.full((n,), -1, dtype=torch.int32, device=device),
        (tokens,),
        (),
        first.double(),
        f"{plural(int(first.sum()), 'group')} of equal tokens",
    )


def _embedding_gradient_case(n, generator):
    C = CHANNELS.get(n, 1)
    rows = 3 if n > 100_000 else whole_number(90, 120, generator)
    # Few of the tokens, so that their rows meet.
    most = min(n // C, 7)
    tokens = torch.randint(
        0, most, (rows,), generator=generator, device=generator.device, dtype=torch.int32
    )
    dout = normal(rows * C, generator)
    total = dout.new_zeros(n // C, C)
    for token, row in zip(tokens.tolist(), dout.view(rows, C)):
        total[token] += row
    return Case(
        unwritten(n, generator),
        (dout, tokens),
        (rows, C),
        total.flatten().double(),
        f"{plural(n // C, 'token')}, {plural(rows, 'row')} of {plural(C, 'channel')}",
        roundings=0,
    )


def _stochastic_case(n, generator):
    x = normal(n, generator) * 10.0 ** torch.randint(
        -30, 30, (n,), generator=generator, device=generator.device
    )
    noise = torch.randint(
        0, 2**16, (n,), generator=generator, device=generator.device, dtype=torch.int32
    )
    label = ""
    if n == 1000:
        x.view(torch.int32)[::5] &= -65536  # exact in bf16 already
        x.view(torch.int32)[1::100] = 0x7FFFFFFF  # two ways to write NaN, and infinity
        x.view(torch.int32)[2::100] = 0x7F800001
        x[3::100] = -torch.inf
        label = "some NaN or infinite"
    expected = reference_round(x, noise.long()).double()

    def describe(i):
        if not bool(x[i].isfinite()):
            return f"x[{i:,}] is {float(x[i])}"
        lower, added = int(x.view(torch.int32)[i]) & 0xFFFF, int(noise[i])
        carries = "carries" if lower + added >= 2**16 else "does not carry"
        halves = f"the lower half of x[{i:,}] is {lower:,}, noise[{i:,}] is {added:,}"
        return f"{halves}: {lower + added:,} {carries}"

    return Case(
        torch.full((n,), -1.0, dtype=torch.bfloat16, device=x.device),
        (x, noise),
        (),
        expected,
        label,
        roundings=0,
        describe=describe,
    )


def _safe_rows_case(n, generator):
    C = CHANNELS.get(n, 1)
    vocab = whole_number(10, 60, generator)
    wte = normal(vocab * C, generator)
    # A few just outside: never so far that an answer which reads there hits memory of others.
    tokens = torch.randint(
        -3, vocab + 3, (n // C,), generator=generator, device=generator.device, dtype=torch.int32
    )
    if n > 1:
        # the first and the last token there is, and their neighbours out of range
        edges = torch.tensor([0, vocab - 1, -1, vocab], dtype=torch.int32, device=tokens.device)
        tokens[:4] = edges[: len(tokens)]
    expected = reference_encoder(tokens, wte.view(vocab, C))
    outside = int(((tokens < 0) | (tokens >= vocab)).sum())
    return Case(
        torch.full((n,), -1.0, device=wte.device),
        (wte, tokens),
        (vocab, C),
        expected.flatten().double(),
        f"{outside:,} of {plural(n // C, 'token')} out of range",
        roundings=0,
    )


_STARTS = INDEX + "if (i < n) starts[i] = {};"


_IN_ORDER = """int i = blockIdx.x * blockDim.x + threadIdx.x;
if (i >= n) return;
float sum = 0.0f;
for (int row = 0; row < rows; row++)
    if (tokens[row] == i / C) sum += dout[row * C + i % C];
dwte[i] = sum;"""


_BITS = (
    GUARDED
    + """unsigned bits = __float_as_uint(x[i]);
if (isnan(x[i])) out[i] = as_bf16(x[i]);
else out[i].bits = (bits + noise[i]) >> 16;"""
)


_SAFE = (
    GUARDED
    + """int token = tokens[i / C];
if (token < 0 || token >= vocab) out[i] = __uint_as_float(0x7fc00000u);
else out[i] = wte[token * C + i % C];"""
)


_REST = "else out[i].bits = (bits + noise[i]) >> 16;"
_CUT = "out[i].bits = bits >> 16;"


EXERCISES = [
    kernel_exercise(
        "group_starts",
        task=(
            "tokens: (n) sorted. starts[i] = 1 where a group of equal tokens begins, else 0; one "
            "thread per place. Expected: two lines."
        ),
        params="int* starts, const int* tokens, int n",
        stub="// your two lines",
        hint=(
            "A group begins where the token before is another one. In front of place 0 there is "
            "none, so ask i == 0 first: `||` is C's `or`, and it does not look at the right side "
            "when the left side is true."
        ),
        solution=_STARTS.format("i == 0 || tokens[i - 1] != tokens[i]"),
        wrong_answers={
            "no guard": INDEX + "starts[i] = i == 0 || tokens[i - 1] != tokens[i];",
            "looks in front of the first": _STARTS.format("tokens[i - 1] != tokens[i]"),
            "forgets the first": _STARTS.format("i > 0 && tokens[i - 1] != tokens[i]"),
            "marks the ends": _STARTS.format("i == n - 1 || tokens[i + 1] != tokens[i]"),
            "adds to what was there": ("] =", "] +="),
            "all of them begin": _STARTS.format("1"),
            "each block begins anew": ("= i ", "= threadIdx.x "),
            "a token that begins a group need not be one larger": _STARTS.format(
                "i == 0 || tokens[i - 1] + 1 == tokens[i]"
            ),
            "the wrong way round": _STARTS.format("i > 0 && tokens[i - 1] == tokens[i]"),
        },
        data=_group_starts_case,
    ),
    kernel_exercise(
        "embedding_gradient",
        task=(
            "dwte[i] is channel i % C of token i / C: the sum of channel i % C of the rows of dout"
            " whose token that is, first row first, so that it is bit-identical in every run. A "
            "token without a row gets 0. One thread per sum. Expected: six lines."
        ),
        params="float* dwte, const float* dout, const int* tokens, int rows, int C, int n",
        stub="// dwte[i] is channel i % C of token i / C\n// your lines",
        hint=(
            "A loop over all rows: where tokens[row] is the thread's token, add dout[row * C + i %"
            " C] to a float of the thread's own. Write it once, at the end."
        ),
        solution=_IN_ORDER,
        wrong_answers={
            "no guard": ("if (i >= n) return;\n", ""),
            "the last row is added first": (
                "int row = 0; row < rows; row++",
                "int row = rows - 1; row >= 0; row--",
            ),
            "the last row is left out": ("row < rows", "row < rows - 1"),
            "one too many": ("row < rows", "row <= rows"),
            "the sum is overwritten: the last row is left": ("sum += dout", "sum = dout"),
            "it adds all rows, also those of other tokens": ("if (tokens[row] == i / C) ", ""),
            "it reads the first channel in place of its own": ("row * C + i % C", "row * C"),
            "adds to what was there": ("dwte[i] = sum", "dwte[i] += sum"),
            "summed in double precision, not in fp32": ("float sum = 0.0f", "double sum = 0"),
            "`atomicAdd` adds to what was there, and in no fixed order": (
                INDEX + "if (i < rows * C) atomicAdd(&dwte[tokens[i / C] * C + i % C], dout[i]);"
            ),
        },
        data=_embedding_gradient_case,
    ),
    kernel_exercise(
        "stochastic",
        task=(
            "out[i] = x[i] in bf16, rounded at random: add noise[i], 16 random bits, to the bits "
            "of x[i], and keep the upper 16. NaN stays NaN. Expected: five lines, without "
            "as_bf16_stochastic."
        ),
        params="bf16* out, const float* x, const int* noise, int n",
        stub="// your lines",
        hint=(
            "__float_as_uint(x[i]) are the bits, out[i].bits those of the result. Add the noise to"
            " the bits, then >> 16: the larger the lower half, the more often it carries. Where "
            "isnan(x[i]), as_bf16(x[i]) keeps the NaN."
        ),
        solution=_BITS,
        wrong_answers={
            "no guard": ("if (i >= n) return;\n", ""),
            "to the nearest": INDEX + "if (i < n) out[i] = as_bf16(x[i]);",
            "adds to what was there": (_REST, _REST.replace(" = (", " += (")),
            "cuts off": (_REST, f"else {_CUT}"),
            "keeps the lower half": (" >> 16", ""),
            "always up": (_REST, "else out[i].bits = (bits + 0xffff) >> 16;"),
            "a bit of noise too few": ("noise[i]", "(noise[i] & 0x7fff)"),
            "rounds twice": (_REST, "else out[i] = as_bf16(__uint_as_float(bits + noise[i]));"),
            "the same noise for all": ("noise[i]", "noise[0]"),
            "NaN carries over": INDEX
            + "if (i < n) out[i].bits = (__float_as_uint(x[i]) + noise[i]) >> 16;",
            "NaN is cut off": ("out[i] = as_bf16(x[i]);", _CUT),
            "infinity becomes NaN": (
                "isnan(x[i])",
                "isnan(x[i] - x[i])",
                "as_bf16(x[i])",
                "as_bf16(x[i] - x[i])",
            ),
        },
        data=_stochastic_case,
    ),
    kernel_exercise(
        "safe_rows",
        task=(
            "tokens: one per row. out[i] = element i % C of row `token` of wte (vocab, C), where "
            "token is tokens[i / C]; NaN where there is no such row. A token out of range never "
            "becomes an address. Expected: four lines."
        ),
        params="float* out, const float* wte, const int* tokens, int vocab, int C, int n",
        stub="const float NaN = __uint_as_float(0x7fc00000u);\n// your lines",
        hint=(
            "The rows are 0 to vocab - 1: a token can be below 0 or too large. Ask first, and read"
            " wte in the other branch only."
        ),
        solution=_SAFE,
        wrong_answers={
            "no guard": ("if (i >= n) return;\n", ""),
            "trusts the tokens": ("token < 0 || token >= vocab", "false"),
            "forgets below zero": ("token < 0 || ", ""),
            "forgets above": (" || token >= vocab", ""),
            "one too many": (">= vocab", "> vocab"),
            "token 0 does not exist": ("token < 0", "token <= 0"),
            "0 instead of NaN": ("__uint_as_float(0x7fc00000u)", "0.0f"),
            "leaves it alone": ("out[i] = __uint_as_float(0x7fc00000u);", "return;"),
            "adds to what was there": ("else out[i] =", "else out[i] +="),
            "NaN everywhere": INDEX + "if (i < n) out[i] = __uint_as_float(0x7fc00000u);",
        },
        data=_safe_rows_case,
    ),
]
