"""The exercises of notebooks 04 and 04b.

Where runs begin, sums in a fixed order, rounding at random, tokens out of range."""

import torch

from ...ops import reference_encoder, reference_round
from ..figures.drawing import plural
from .exercises import INDEX, Case, kernel_exercise, normal, unwritten, whole_number

# A token like the poison around a check's tensors, so that a read in front of them is seen.
POISON = 65_000


CHANNELS = {255: 51, 256: 32, 1000: 8, 4096: 64}  # n -> a divisor of n


def _run_starts_case(n, generator):
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
        f"where {plural(int(first.sum()), 'run')} of equal tokens begin{'s' * (n == 1)}",
    )


def _piece_sums_case(n, generator):
    C = CHANNELS.get(n, 1)
    size = (
        2
        if n > 100_000
        else int(torch.randint(20, 33, (), generator=generator, device=generator.device))
    )
    rows = (n // C - 1) * size + int(
        torch.randint(1, size + 1, (), generator=generator, device=generator.device)
    )
    dout = normal(rows * C, generator)
    padded = torch.cat([dout, dout.new_zeros(n * size - rows * C)]).view(
        n // C, size, C
    )  # adding a zero changes no bit
    total = padded[:, 0]
    for r in range(1, size):
        total = total + padded[:, r]
    return Case(
        unwritten(n, generator),
        (dout,),
        (rows, C, size),
        total.flatten().double(),
        f"from {plural(rows, 'row')} of {plural(C, 'channel')}, in pieces of {size} rows",
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


_PIECE = """int i = blockIdx.x * blockDim.x + threadIdx.x;
int piece = i / C, c = i % C;
"""


_SUM = """if (i >= n) return;
float sum = 0.0f;
for (int row = piece * size; row < min(piece * size + size, rows); row++) sum += dout[row * C + c];
sums[i] = sum;"""


_BITS = (
    INDEX
    + """if (i >= n) return;
unsigned bits = __float_as_uint(x[i]);
if (isnan(x[i])) out[i] = as_bf16(x[i]);
else out[i].bits = (bits + noise[i]) >> 16;"""
)


_SAFE = (
    INDEX
    + """if (i >= n) return;
int token = tokens[i / C];
if (token < 0 || token >= vocab) out[i] = __uint_as_float(0x7fc00000u);
else out[i] = wte[token * C + i % C];"""
)


_REST = "else out[i].bits = (bits + noise[i]) >> 16;"
_CUT = "out[i].bits = bits >> 16;"


EXERCISES = {
    e.name: e
    for e in [
        kernel_exercise(
            "run_starts",
            task=(
                "tokens: (n) sorted. starts[i] = 1 where a run of equal tokens begins, else 0; "
                "one thread per place. Expected: two lines."
            ),
            params=("int* starts", "const int* tokens", "int n"),
            stub="// your two lines",
            hint=(
                "A run begins where the token before is another one. In front of place 0 there "
                "is none, so ask i == 0 first: `||` is C's `or`, and it does not look at the right "
                "side when the left side is true."
            ),
            solution=_STARTS.format("i == 0 || tokens[i - 1] != tokens[i]"),
            wrong_answers={
                "no guard": INDEX + "starts[i] = i == 0 || tokens[i - 1] != tokens[i];",
                "looks in front of the first": _STARTS.format("tokens[i - 1] != tokens[i]"),
                "forgets the first": _STARTS.format("i > 0 && tokens[i - 1] != tokens[i]"),
                "marks the ends": _STARTS.format("i == n - 1 || tokens[i + 1] != tokens[i]"),
                "adds to what was there": INDEX
                + "if (i < n) starts[i] += i == 0 || tokens[i - 1] != tokens[i];",
                "all of them begin": _STARTS.format("1"),
                "each block begins anew": _STARTS.format(
                    "threadIdx.x == 0 || tokens[i - 1] != tokens[i]"
                ),
                "only upwards by one": _STARTS.format("i == 0 || tokens[i - 1] + 1 == tokens[i]"),
                "the wrong way round": _STARTS.format("i > 0 && tokens[i - 1] == tokens[i]"),
            },
            data=_run_starts_case,
        ),
        kernel_exercise(
            "piece_sums",
            task=(
                "dout: (rows, C), all of one token, in pieces of `size` rows; the last may be "
                "shorter. sums[piece * C + c] = channel c of the piece's rows, added one after "
                "the other, first row first: bit-identical in every run. One thread per sum, n of "
                "them. Expected: four lines."
            ),
            params=("float* sums", "const float* dout", "int rows", "int C", "int size", "int n"),
            stub="// sum i belongs to piece i / C and channel i % C\n// your lines",
            hint=(
                "The piece's rows are piece * size up to, but not including, min(piece * size +"
                " size, rows); element c of a row is dout[row * C + c]. One float, one loop: "
                "any other order gives other bits."
            ),
            solution=_PIECE + _SUM,
            wrong_answers={
                "no guard": _PIECE + _SUM.replace("if (i >= n) return;\n", ""),
                "ignores the end": _PIECE
                + _SUM.replace("min(piece * size + size, rows)", "piece * size + size"),
                "one too many": _PIECE
                + _SUM.replace(
                    "row < min(piece * size + size, rows)", "row <= min(piece * size + size, rows)"
                ),
                "one too few": _PIECE + _SUM.replace("row < min(", "row + 1 < min("),
                "last row first": _PIECE
                + _SUM.replace(
                    "int row = piece * size; row < min(piece * size + size, rows); row++",
                    "int row = min(piece * size + size, rows) - 1; row >= piece * size; row--",
                ),
                "adds to what was there": _PIECE + _SUM.replace("sums[i] = sum", "sums[i] += sum"),
                "adds in memory": _PIECE
                + _SUM.replace("float sum = 0.0f;\n", "")
                .replace("sum += dout", "sums[i] += dout")
                .replace("\nsums[i] = sum;", ""),
                "only the first row": _PIECE + "if (i < n) sums[i] = dout[piece * size * C + c];",
                "in two halves": _PIECE
                + _SUM.replace(
                    "sum += dout[row * C + c]", "(row % 2 ? odd : sum) += dout[row * C + c]"
                )
                .replace("= 0.0f", "= 0.0f, odd = 0.0f")
                .replace("sums[i] = sum", "sums[i] = sum + odd"),
                "in double": _PIECE
                + _SUM.replace("float sum", "double sum").replace(
                    "sums[i] = sum", "sums[i] = (float)sum"
                ),
                "rounds to bf16": _PIECE
                + _SUM.replace(
                    "sum += dout[row * C + c]", "sum = as_float(as_bf16(sum + dout[row * C + c]))"
                ),
                "32 rows whatever the size": _PIECE
                + _SUM.replace("piece * size", "piece * 32").replace("32 + size", "32 + 32"),
                "rows and channels swapped": _PIECE
                + _SUM.replace("dout[row * C + c]", "dout[(c * rows + row) % (rows * C)]"),
            },
            data=_piece_sums_case,
        ),
        kernel_exercise(
            "stochastic",
            task=(
                "out[i] = x[i] in bf16, rounded at random: add noise[i], 16 random bits, to the"
                " bits of x[i], and keep the upper 16. NaN stays NaN. "
                "Expected: five lines, without as_bf16_stochastic."
            ),
            params=("bf16* out", "const float* x", "const int* noise", "int n"),
            stub="// your lines",
            hint=(
                "__float_as_uint(x[i]) are the bits, out[i].bits those of the result. Add "
                "the noise to the bits, then >> 16: the larger the lower half, the more often it "
                "carries. Where isnan(x[i]), as_bf16(x[i]) keeps the NaN."
            ),
            solution=_BITS,
            wrong_answers={
                "no guard": _BITS.replace("if (i >= n) return;\n", ""),
                "to the nearest": INDEX + "if (i < n) out[i] = as_bf16(x[i]);",
                "adds to what was there": _BITS.replace(_REST, _REST.replace(" = (", " += (")),
                "cuts off": _BITS.replace(_REST, f"else {_CUT}"),
                "keeps the lower half": _BITS.replace(" >> 16", ""),
                "always up": _BITS.replace(_REST, "else out[i].bits = (bits + 0xffff) >> 16;"),
                "a bit of noise too few": _BITS.replace("noise[i]", "(noise[i] & 0x7fff)"),
                "a bit of noise too many": _BITS.replace("noise[i]", "2 * noise[i]"),
                "rounds twice": _BITS.replace(
                    _REST, "else out[i] = as_bf16(__uint_as_float(bits + noise[i]));"
                ),
                "the same noise for all": _BITS.replace("noise[i]", "noise[0]"),
                "adds a number": _BITS.replace(
                    _REST, "else out[i] = as_bf16(x[i] + noise[i] / 65536.0f);"
                ),
                "NaN carries over": INDEX
                + "if (i < n) out[i].bits = (__float_as_uint(x[i]) + noise[i]) >> 16;",
                "NaN is cut off": _BITS.replace("out[i] = as_bf16(x[i]);", _CUT),
                "infinity becomes NaN": _BITS.replace("isnan(x[i])", "isnan(x[i] - x[i])").replace(
                    "as_bf16(x[i])", "as_bf16(x[i] - x[i])"
                ),
            },
            data=_stochastic_case,
        ),
        kernel_exercise(
            "safe_rows",
            task=(
                "tokens: one per row. out[i] = element i % C of row `token` of wte (vocab, C), "
                "where token is tokens[i / C]; NaN where there is no such row. A token out of "
                "range never becomes an address. Expected: four lines."
            ),
            params=("float* out", "const float* wte", "const int* tokens")
            + ("int vocab", "int C", "int n"),
            stub="const float NaN = __uint_as_float(0x7fc00000u);\n// your lines",
            hint=(
                "The rows are 0 to vocab - 1: a token can be below 0 or too large. Ask "
                "first, and read wte in the other branch only."
            ),
            solution=_SAFE,
            wrong_answers={
                "no guard": _SAFE.replace("if (i >= n) return;\n", ""),
                "trusts the tokens": _SAFE.replace("token < 0 || token >= vocab", "false"),
                "forgets below zero": _SAFE.replace("token < 0 || ", ""),
                "forgets above": _SAFE.replace(" || token >= vocab", ""),
                "one too many": _SAFE.replace(">= vocab", "> vocab"),
                "one too few": _SAFE.replace(">= vocab", ">= vocab - 1"),
                "token 0 does not exist": _SAFE.replace("token < 0", "token <= 0"),
                "0 instead of NaN": _SAFE.replace("__uint_as_float(0x7fc00000u)", "0.0f"),
                "row 0 instead of NaN": _SAFE.replace(
                    "out[i] = __uint_as_float(0x7fc00000u);", "out[i] = wte[i % C];"
                ),
                "leaves it alone": _SAFE.replace(
                    "out[i] = __uint_as_float(0x7fc00000u);", "return;"
                ),
                "adds to what was there": _SAFE.replace("else out[i] =", "else out[i] +="),
                "NaN everywhere": INDEX + "if (i < n) out[i] = __uint_as_float(0x7fc00000u);",
                "a token per element": _SAFE.replace("tokens[i / C]", "tokens[i % (n / C)]"),
            },
            data=_safe_rows_case,
        ),
    ]
}
