"""The gradient of an embedding against torch: python benchmarks/encoder.py

Needs a GPU and about a minute. Parts: backward, grid. Gradients are bf16.

backward: 64 x 1024 tokens, 768 channels. Tokens by Zipf's law (exponent 1, 50,257 of them, in a
random order), uniform, real text (Python's standard library through our BPE), and one token
everywhere. Ours: with segments known, and found as part of the time ("in line"); fp32 sums. torch:
embedding_dense_backward (bf16, into a fresh table), and index_add_ with atomics, sums and rows of
one dtype (rows are made fp32 beforehand). Times are of one of several calls in a row, replayed.
Shares are of the rate of a device-to-device copy in the same run, for the bytes of the job: every
row of dout is read once, every row of the sums that has a token is read and written (torch's table:
all of it is written). Bits: elements that differ between 100 runs of ours (10 of them replays, 10
on another stream).
grid: 4 kinds of tokens, 4 widths, 3 lengths, 3 vocabularies: ours in line, atomic index_add_ (fp32)
and embedding_dense_backward. The sums are added to ones and compared with float64 (64 channels of
large tables; the error is divided by the sum of the absolute values). 3 runs of ours are compared
bit by bit. Rows without a token must stay as they were.
"""

import functools

import memory
import torch
from common import DEVICE, Clock, record
from tables import Column, Table, integer, number, ratio, scientific, share
from timing import copy_rate, release, timed

from gpuaccel.backends import backend
from gpuaccel.graphs.capture import recorder_for
from gpuaccel.ops.embedding_backward import encoder_backward
from gpuaccel.ops.token_sort import find_segments
from gpuaccel.training.data import Batches, make_dataset

# ---- sizes --------------------------------------------------------------------------------------

VOCAB, T, TEXT_BYTES = 50257, 1024, 8 << 20
WIDTHS = (768, 1600, 4096, 770)
COUNTS = (4096, 65536, 524288)
VOCABS = (256, 50257, 128256)
# Milliseconds of one measurement; of a case of the grid: 3 rounds.
BUDGET, QUICK = 150.0, 0.0
# Up to so many elements of dout or of the sums, all channels are checked; otherwise CHANNELS.
ALL_CHANNELS = 2**26
CHANNELS = 64
# The largest error of fp32 sums, relative to the sum of the absolute values.
ROUNDING = 1e-6
# GiB of memory for the largest grid.
GIB = 40

ZIPF, UNIFORM, TEXT, SAME = DISTRIBUTIONS = "Zipf", "uniform", "real text", "all the same"

# ---- variants -----------------------------------------------------------------------------------

KNOWN = "ours, segments known"
IN_LINE = "ours, segments in line"
DENSE = "embedding_dense_backward"
ATOMICS = "index_add_, fp32"
ATOMICS_BF16 = "index_add_, bf16"


# ---- tokens and gradients -----------------------------------------------------------------------


def zipf(count: int, vocab: int, generator) -> torch.Tensor:
    """(count,) tokens: the k-th of a random order of the vocabulary has a share of about 1 / k."""
    ranks = torch.arange(1, vocab + 1, dtype=torch.float64, device=DEVICE)
    shares = (1 / ranks).cumsum(0)
    uniform = torch.rand(count, dtype=torch.float64, device=DEVICE, generator=generator)
    index = torch.searchsorted(shares, uniform * shares[-1]).clamp(max=vocab - 1)
    return torch.randperm(vocab, device=DEVICE, generator=generator)[index]


@functools.cache
def dataset(tokenizer: str):
    return make_dataset(tokenizer=tokenizer, max_bytes=TEXT_BYTES, vocab_size=VOCAB)


@functools.cache
def tokens_of(distribution: str, count: int, vocab: int) -> torch.Tensor:
    """(rows, up to 1024) int64. Real text: bytes where the vocabulary is too small for our BPE."""
    generator, length = torch.Generator(DEVICE).manual_seed(1), min(T, count)
    if distribution == TEXT:
        text = dataset("bpe" if vocab >= VOCAB else "byte")
        return next(Batches(text.train, count // length, length, seed=1))[0].to(DEVICE)
    if distribution == ZIPF:
        tokens = zipf(count, vocab, generator)
    elif distribution == UNIFORM:
        tokens = torch.randint(0, vocab, (count,), device=DEVICE, generator=generator)
    else:
        tokens = torch.full((count,), vocab // 3, device=DEVICE)
    return tokens.view(-1, length)


def random_dout(count: int, C: int) -> torch.Tensor:
    """(count, C) bf16 gradients."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    return torch.randn(count, C, device=DEVICE, dtype=torch.bfloat16, generator=generator)


# ---- one size -----------------------------------------------------------------------------------


def variants_of(tokens, dout, vocab) -> dict:
    """name -> (run, bytes to move); and the sums that ours in line adds into."""
    ids, (n, C) = tokens.view(-1), dout.shape
    shaped, dout_fp32 = dout.view(*tokens.shape, C), dout.float()
    used = ids.unique().numel()
    sums = torch.zeros(vocab, C, device=DEVICE)
    sums_bf16 = torch.zeros(vocab, C, device=DEVICE, dtype=torch.bfloat16)
    segments = find_segments(tokens, vocab)
    bytes_fp32, bytes_bf16 = C * (2 * n + 8 * used), C * (2 * n + 4 * used)
    bytes_wide, bytes_dense = bytes_fp32 + 2 * n * C, C * (2 * n + 2 * vocab)

    def dense():
        return torch.ops.aten.embedding_dense_backward(shaped, tokens, vocab, -1, False)

    runs = {
        KNOWN: (
            lambda: encoder_backward(sums, None, shaped, tokens, segments=segments),
            bytes_fp32,
        ),
        IN_LINE: (lambda: encoder_backward(sums, None, shaped, tokens), bytes_fp32),
        DENSE: (dense, bytes_dense),
        ATOMICS: (lambda: sums.index_add_(0, ids, dout_fp32), bytes_wide),
        ATOMICS_BF16: (lambda: sums_bf16.index_add_(0, ids, dout), bytes_bf16),
    }
    return runs, sums


def differing(run, sums, runs: int = 100) -> int:
    """How many sums do not have the same bits after each run: some of them replays, some on another
    stream."""
    recorder = recorder_for(DEVICE, backend().name)
    recording, _ = recorder.record(run)
    on_other_stream = functools.partial(recorder.run, run)
    first = unequal = None
    for run_once in [run] * (runs - 20) + [recording.replay] * 10 + [on_other_stream] * 10:
        sums.zero_()
        run_once()
        bits = sums.view(torch.int32)
        if first is None:
            first, unequal = bits.clone(), torch.zeros_like(bits, dtype=torch.bool)
        unequal |= bits != first
    recording.close()
    return int(unequal.sum())


def backward(count: int = 64 * T, C: int = 768, copied: int = 2**27) -> dict:
    rate = copy_rate(copied)
    results = {"tokens": count, "C": C, "vocab": VOCAB, "copy_GB_per_s": rate}
    release()
    for distribution in DISTRIBUTIONS:
        tokens, dout = tokens_of(distribution, count, VOCAB), random_dout(count, C)
        variants, sums = variants_of(tokens, dout, VOCAB)
        ms = timed({name: run for name, (run, _) in variants.items()}, BUDGET)
        atomics = min((ATOMICS, ATOMICS_BF16), key=ms.get)
        results[distribution] = {
            "best_atomics": atomics,
            "differ": differing(variants[IN_LINE][0], sums),
            "variants": {
                name: {
                    "ms": ms[name],
                    "of_copy_rate": moved / ms[name] / 1e6 / rate,
                    "times_dense": ms[DENSE] / ms[name],
                    "times_atomics": ms[atomics] / ms[name],
                }
                for name, (_, moved) in variants.items()
            },
        }
        del variants, sums
        release()
    return results


# ---- every size, three variants -----------------------------------------------------------------


def in_float64(ids, dout, vocab, columns) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of some channels, and sums of their absolute values, (vocab, channels) float64 each."""
    rows = dout[:, columns].double()
    zeros = torch.zeros(vocab, len(columns), dtype=torch.float64, device=DEVICE)
    return zeros.clone().index_add_(0, ids, rows), zeros.index_add_(0, ids, rows.abs())


def case(tokens, dout, dout_fp32, vocab) -> dict:
    """Errors, bits and times of one case."""
    ids, (n, C) = tokens.view(-1), dout.shape
    shaped, sums = dout.view(*tokens.shape, C), torch.empty(vocab, C, device=DEVICE)
    if max(n, vocab) * C <= ALL_CHANNELS:
        columns = torch.arange(C, device=DEVICE)
    else:
        columns = torch.linspace(0, C - 1, CHANNELS, device=DEVICE).long()
    exact, absolute = in_float64(ids, dout, vocab, columns)
    used = torch.zeros(vocab, dtype=torch.bool, device=DEVICE).index_fill_(0, ids, True)
    runs = {
        IN_LINE: lambda: encoder_backward(sums, None, shaped, tokens),
        ATOMICS: lambda: sums.index_add_(0, ids, dout_fp32),
        DENSE: lambda: torch.ops.aten.embedding_dense_backward(shaped, tokens, vocab, -1, False),
    }
    error, first, differ = {}, None, 0
    for name in (ATOMICS, IN_LINE, IN_LINE, IN_LINE):
        sums.fill_(1)
        runs[name]()
        difference = (sums[:, columns].double() - 1 - exact).abs()
        error[name] = float((difference / (absolute + 1)).max())
        if name == IN_LINE:
            bits = sums.view(torch.int32)
            first = bits.clone() if first is None else first
            differ += int((bits != first).sum())
    stray = int((sums != 1)[~used].sum())
    del exact, absolute, first
    ms = timed(runs, QUICK)
    return {
        "distinct": int(used.sum()),
        "channels_checked": len(columns),
        "error": error,
        "differ": differ,
        "stray": stray,
        "ms": ms,
        "times_atomics": ms[ATOMICS] / ms[IN_LINE],
        "times_dense": ms[DENSE] / ms[IN_LINE],
    }


def is_right(result: dict) -> bool:
    """Sums within rounding, the same bits in each run, nothing in rows without a token."""
    return result["error"][IN_LINE] < ROUNDING and result["differ"] == 0 and result["stray"] == 0


def grid(widths=WIDTHS, counts=None, vocabs=VOCABS) -> list:
    """Every case. counts: of tokens; None: as many as fit into the memory."""
    counts = counts or COUNTS[: 3 if memory.available_GiB() >= GIB else 2]
    cases, clock = [], Clock()
    for count in counts:
        for C in widths:
            dout = random_dout(count, C)
            dout_fp32 = dout.float()
            for vocab in vocabs:
                for distribution in DISTRIBUTIONS:
                    tokens = tokens_of(distribution, count, vocab)
                    result = case(tokens, dout, dout_fp32, vocab)
                    facts = {"distribution": distribution, "C": C, "tokens": count, "vocab": vocab}
                    cases.append({**facts, **result})
            del dout, dout_fp32
            release()
            clock.say(f"{count:,} tokens, C = {C}")
    failed = [result for result in cases if not is_right(result)]
    assert not failed, f"{len(failed)} of {len(cases)} cases have wrong sums: {failed[:5]}"
    return cases


# ---- tables -------------------------------------------------------------------------------------


def tables(results: dict) -> dict[str, Table]:
    made = {}
    if "backward" in results:
        made |= backward_tables(results["backward"])
    return made | (grid_tables(results["grid"]) if "grid" in results else {})


def backward_tables(r: dict) -> dict[str, Table]:
    """ "gradient": a row for each kind of tokens."""
    columns = [
        Column("tokens", "tokens"),
        Column("ms", "ms", number),
        Column("against dense", "times_dense", ratio),
        Column("against atomics", "times_atomics", ratio),
        Column("segments known: ms", "known_ms", number),
        Column("segments known: of copy rate", "known_share", share),
        Column("sums that differ between runs", "differ", integer),
    ]
    rows = []
    for tokens in DISTRIBUTIONS:
        known = r[tokens]["variants"][KNOWN]
        row = {"tokens": tokens, **r[tokens]["variants"][IN_LINE], "differ": r[tokens]["differ"]}
        rows.append({**row, "known_ms": known["ms"], "known_share": known["of_copy_rate"]})
    return {"gradient": Table(columns, rows)}


def grid_tables(cases: list) -> dict[str, Table]:
    """ "grid": the least ratio against atomics of each size, segments in line. "grid, dense":
    against the dense table. "error": the largest, ours and that of atomics."""
    widths = list(dict.fromkeys(c["C"] for c in cases))

    def table(value, form) -> Table:
        rows = []
        for tokens in dict.fromkeys(c["tokens"] for c in cases):
            row = {"tokens": f"{tokens:,}"}
            for C in widths:
                row[str(C)] = value([c for c in cases if (c["tokens"], c["C"]) == (tokens, C)])
            rows.append(row)
        columns = [Column("tokens", "tokens"), *(Column(f"C={C:,}", str(C), form) for C in widths)]
        return Table(columns, rows)

    return {
        "grid": table(lambda some: min(c["times_atomics"] for c in some), ratio),
        "grid, dense": table(lambda some: min(c["times_dense"] for c in some), ratio),
        "error": table(lambda some: max(c["error"][IN_LINE] for c in some), scientific),
        "error of atomics": table(lambda some: max(c["error"][ATOMICS] for c in some), scientific),
    }


# ---- the script ---------------------------------------------------------------------------------


def main():
    record("encoder", {"backward": backward, "grid": grid}, tables)


if __name__ == "__main__":
    main()
