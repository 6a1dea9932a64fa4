"""The encoder's backward against torch: python benchmarks/encoder.py [part ...]

Needs a GPU and about two minutes. Parts: backward, grid, step. Without any, all of them are
measured and the result is written.

1. backward: 64 x 1024 tokens, 768 channels, bf16 gradients. Tokens by Zipf's law (exponent 1,
   50,257 of them, in a random order), uniform, real text (Python's standard library through our
   BPE), and one token everywhere.
   Ours: with segments known, and found as part of the time ("in line"); sums in fp32 and bf16.
   torch: embedding_dense_backward (bf16, into a fresh table), and index_add_ with atomics and in
   its deterministic form, sums and rows of one dtype (rows are made fp32 beforehand).
   The first versions of our kernel: v1, which adds dwpe too, and v2 with buckets known; making and
   copying the buckets is measured by the host's clock.
   Replayed from CUDA graphs and launched from Python. What cannot be captured is compared with what
   was launched, too. Times are of one of several calls in a row. Shares are of the rate of a
   device-to-device copy in the same run, for the bytes of the job: every row of dout is read once,
   every row of the sums that has a token is read and written (torch's table: all of it is written).
   Bits: elements that differ between 100 runs of ours (10 of them replays, 10 on another stream),
   and between 10 runs of the others.
2. grid: 4 kinds of tokens, 4 widths, 3 lengths, 3 vocabularies: ours in line, atomic index_add_
   (fp32) and embedding_dense_backward. The sums are added to ones and compared with float64 (64
   channels of large tables; the error is divided by the sum of the absolute values). 3 runs of ours
   are compared bit by bit. Rows without a token must stay as they were.
3. step: a whole step of GPT-2 124M, 16 x 1024 tokens by Zipf's law, bf16 autocast, replayed, in
   turns: with torch's embeddings in the encoder's place, with ours, and with ours and
   deterministic=True. Each variant has a process of its own.
"""

import argparse
import functools
import math
import statistics

import memory
import torch
from common import DEVICE, Clock, measuring_here, plain, write
from tables import Column, Table, integer, number, ratio, scientific, share, show, thousands
from timing import copy_rate, host_milliseconds, in_turns, queued, release, timed
from torch import nn
from training import inputs_and_targets
from workers import Workers

from gpuaccel.backends import backend, deterministic
from gpuaccel.graphs.capture import recorder_for
from gpuaccel.learn.ladders import launch_atomic, launch_buckets, reference_buckets
from gpuaccel.ops.embedding_backward import encoder_backward
from gpuaccel.ops.token_sort import find_segments
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.data import Batches, make_dataset
from gpuaccel.training.models import preset
from gpuaccel.training.step import TrainStep

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
# GiB of memory for the largest grid and the whole GPT-2.
GIB = 60
# Steps of a turn.
CALLS = 5

ZIPF, UNIFORM, TEXT, SAME = DISTRIBUTIONS = "Zipf", "uniform", "real text", "all the same"

# ---- variants -----------------------------------------------------------------------------------

KNOWN = "ours, segments known"
KNOWN_BF16 = "ours, segments known, bf16 sums"
IN_LINE = "ours, segments in line"
IN_LINE_BF16 = "ours, segments in line, bf16 sums"
DENSE = "embedding_dense_backward"
ATOMICS = "index_add_, fp32"
ATOMICS_BF16 = "index_add_, bf16"
EXACT = "index_add_ deterministic, fp32"
EXACT_BF16 = "index_add_ deterministic, bf16"
V1 = "encoder_backward_v1"
V2 = "encoder_backward_v2"
TORCH_STEP = "torch's embeddings"
OURS_STEP = "ours"
EXACT_STEP = "ours, deterministic"


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


def times_of(times: dict, peer: str, variant: str) -> float | None:
    """The peer's time as a multiple of the variant's.

    Both replayed, or both launched where one of them cannot be captured."""
    for kind in times.values():
        if peer in kind and variant in kind:
            return kind[peer] / kind[variant]
    return None


# ---- 1: one size, every variant -----------------------------------------------------------------


def variants_of(tokens, dout, vocab) -> dict:
    """name -> (run, the sums that it adds into or None where it returns them, bytes to move)."""
    ids, (n, C) = tokens.view(-1), dout.shape
    shaped, dout_fp32 = dout.view(*tokens.shape, C), dout.float()
    used = ids.unique().numel()
    sums = torch.zeros(vocab, C, device=DEVICE)
    sums_bf16 = torch.zeros(vocab, C, device=DEVICE, dtype=torch.bfloat16)
    dwpe = torch.zeros(tokens.shape[1], C, device=DEVICE)
    segments = find_segments(tokens, vocab)
    buckets, items = (t.to(DEVICE) for t in reference_buckets(tokens, C, 8))

    def deterministic_add(target, rows):
        with deterministic():
            target.index_add_(0, ids, rows)

    def dense():
        return torch.ops.aten.embedding_dense_backward(shaped, tokens, vocab, -1, False)

    bytes_fp32, bytes_bf16 = C * (2 * n + 8 * used), C * (2 * n + 4 * used)
    bytes_wide, bytes_dense = bytes_fp32 + 2 * n * C, C * (2 * n + 2 * vocab)
    backward = functools.partial(encoder_backward, dwpe=None, dout=shaped, tokens=tokens)
    return {
        KNOWN: (lambda: backward(sums, segments=segments), sums, bytes_fp32),
        KNOWN_BF16: (lambda: backward(sums_bf16, segments=segments), sums_bf16, bytes_bf16),
        IN_LINE: (lambda: backward(sums), sums, bytes_fp32),
        IN_LINE_BF16: (lambda: backward(sums_bf16), sums_bf16, bytes_bf16),
        DENSE: (dense, None, bytes_dense),
        ATOMICS: (lambda: sums.index_add_(0, ids, dout_fp32), sums, bytes_wide),
        ATOMICS_BF16: (lambda: sums_bf16.index_add_(0, ids, dout), sums_bf16, bytes_bf16),
        EXACT: (lambda: deterministic_add(sums, dout_fp32), sums, bytes_wide),
        EXACT_BF16: (lambda: deterministic_add(sums_bf16, dout), sums_bf16, bytes_bf16),
        V1: (
            lambda: launch_atomic(sums, dwpe, shaped, tokens),
            sums,
            bytes_fp32 + 8 * dwpe.numel(),
        ),
        V2: (lambda: launch_buckets(sums, dout, buckets, items), sums, bytes_fp32),
    }


def differing(runs, sums) -> int:
    """How many elements do not have the same bits after each of these runs.

    sums: set to zero before each run; None: a run returns its own"""
    first = unequal = None
    for run in runs:
        if sums is not None:
            sums.zero_()
        result = run()
        result = result if sums is None else sums
        bits = result.view(torch.int16 if result.dtype == torch.bfloat16 else torch.int32)
        if first is None:
            first, unequal = bits.clone(), torch.zeros_like(bits, dtype=torch.bool)
        unequal |= bits != first
    return int(unequal.sum())


def compare_bits(variants: dict, runs: int = 100, runs_of_others: int = 10) -> dict:
    """name -> {"runs", "differ"} of each variant."""
    rows = {}
    for name, (run, sums, _) in variants.items():
        if name not in (IN_LINE, IN_LINE_BF16):
            count = runs_of_others
            rows[name] = {"runs": count, "differ": differing([run] * count, sums)}
            continue
        recorder = recorder_for(DEVICE, backend().name)
        recording, _ = recorder.record(run)
        on_other_stream = functools.partial(recorder.run, run)
        several = [run] * (runs - 20) + [recording.replay] * 10 + [on_other_stream] * 10
        rows[name] = {"runs": len(several), "differ": differing(several, sums)}
        recording.close()
    return rows


def buckets_ms(tokens, C: int) -> float:
    """Milliseconds by the host's clock of making buckets on the CPU and copying; median of 5."""

    def run():
        for t in reference_buckets(tokens, C, 8):
            t.to(DEVICE)
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return statistics.median(host_milliseconds(run) for _ in range(5))


def backward(count: int = 64 * T, C: int = 768, copied: int = 2**27) -> dict:
    rate = copy_rate(copied)
    results = {
        "tokens": count,
        "C": C,
        "vocab": VOCAB,
        "bpe": dataset("bpe").vocab_size,
        "copy_GB_per_s": rate,
    }
    release()
    for distribution in DISTRIBUTIONS:
        tokens, dout = tokens_of(distribution, count, VOCAB), random_dout(count, C)
        counts = torch.bincount(tokens.view(-1))
        variants = variants_of(tokens, dout, VOCAB)
        runs = {name: run for name, (run, *_) in variants.items()}
        times, refused = timed(runs, launched=True, budget=BUDGET)
        bits, rows = compare_bits(variants), {}
        atomics = ATOMICS if times_of(times, ATOMICS, ATOMICS_BF16) < 1 else ATOMICS_BF16
        for name, (_, _, moved) in variants.items():
            ms = {kind: values[name] for kind, values in times.items() if name in values}
            launched = times["launched"]
            rows[name] = {
                "ms": ms,
                "of_copy_rate": {kind: moved / t / 1e6 / rate for kind, t in ms.items()},
                "cannot_be_captured": refused.get(name),
                "times_dense": times_of(times, DENSE, name),
                "times_atomics": times_of(times, atomics, name),
                "times_launched": {
                    peer: launched[peer] / launched[name] for peer in (DENSE, atomics)
                },
                **bits[name],
            }
        results[distribution] = {
            "distinct": int((counts > 0).sum()),
            "most": int(counts.max()),
            "best_atomics": atomics,
            "variants": rows,
            "buckets_ms": buckets_ms(tokens, C),
        }
        del variants, runs
        release()
    return results


# ---- 2: every size, three variants --------------------------------------------------------------


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
    times, refused = timed(runs, budget=QUICK)
    result = {
        "distinct": int(used.sum()),
        "channels_checked": len(columns),
        "error": error,
        "differ": differ,
        "stray": stray,
        "ms": times,
        "times_atomics": times_of(times, ATOMICS, IN_LINE),
        "times_dense": times_of(times, DENSE, IN_LINE),
    }
    if refused:
        result["cannot_be_captured"] = refused
    return result


def is_right(result: dict) -> bool:
    """Sums within rounding, the same bits in each run, nothing in rows without a token."""
    return result["error"][IN_LINE] < ROUNDING and result["differ"] == 0 and result["stray"] == 0


def grid(widths=WIDTHS, counts=COUNTS, vocabs=VOCABS) -> list:
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


# ---- 3: whole steps -----------------------------------------------------------------------------


class TorchEmbedding(nn.Embedding):
    """torch's forward and backward: ours do not replace those of a subclass."""


class TorchEncoder(nn.Module):
    """Two embeddings of torch with the weights of one of our encoders."""

    def __init__(self, ours):
        super().__init__()
        self.wte = TorchEmbedding(*ours.wte.weight.shape, device="meta")
        self.wpe = TorchEmbedding(*ours.wpe.weight.shape, device="meta")
        # The same Parameter: the head is tied to wte.
        self.wte.weight = ours.wte.weight
        self.wpe.weight = ours.wpe.weight

    def forward(self, tokens):
        return self.wte(tokens) + self.wpe(torch.arange(tokens.shape[-1], device=tokens.device))


def zipf_batch(config, rows: int, seed: int) -> tuple:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tokens = zipf(rows * (config.T + 1), config.vocab, generator)
    return inputs_and_targets(tokens.view(rows, -1))


def train_step(config, variant: str) -> TrainStep:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = config.build()
    if variant == TORCH_STEP:
        model.encoder = TorchEncoder(model.encoder)
    optimizer = AdamW(Arena(model), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0)
    return TrainStep(
        model,
        optimizer,
        autocast=torch.bfloat16,
        replay=Replay(policy="require"),
        deterministic=variant == EXACT_STEP,
    )


class Step:
    """One variant. It is made in alone(): other workers need the memory before."""

    def __init__(self, config, rows: int, variant: str):
        self.config = config
        self.rows = rows
        self.variant = variant

    def alone(self) -> dict:
        """Capture; returns the first loss."""
        self.step = train_step(self.config, self.variant)
        self.batch = zipf_batch(self.config, self.rows, 0)
        self.run()
        return {"first_loss": float(self.out.loss)}

    def run(self):
        self.out = self.step(self.batch)

    def times(self, calls: int) -> list[float]:
        return queued(self.run, calls)

    def end(self) -> dict:
        return {"last_loss": float(self.out.loss), "skipped": int(self.step.optimizers[0].skipped)}


def step(config=None, rows: int = 16, here: bool = False) -> dict:
    config = config or preset("gpt2-124m")
    names = TORCH_STEP, OURS_STEP, EXACT_STEP
    variants = {name: (Step, config, rows, name) for name in names}
    release()
    with Workers(variants, here) as workers:
        workers.ready()
        results = {name: workers.ask(name, "alone") for name in names}
        times = in_turns(workers.timers(names, CALLS))
        for name, ms in times.items():
            results[name] |= {
                "ms": ms,
                "tokens_per_s": rows * config.T / ms * 1e3,
                "times_torch": times[TORCH_STEP] / ms,
                **workers.ask(name, "end"),
            }
    first_losses = [row["first_loss"] for row in results.values()]
    last_losses = [row["last_loss"] for row in results.values()]
    difference = max(first_losses) - min(first_losses)
    assert difference < 0.01 and all(map(math.isfinite, last_losses)), (
        f"first losses {first_losses}, last losses {last_losses}; "
        "expected first ones within 0.01 and finite last ones"
    )
    skipped = [row["skipped"] for row in results.values()]
    assert not any(skipped), f"skipped steps: {skipped}, expected none"
    return {"rows": rows, "T": config.T, "variants": results}


# ---- tables -------------------------------------------------------------------------------------


def backward_tables(r: dict) -> dict[str, Table]:
    """ "gradient": a row for each kind of tokens. "variants": one for each variant, too."""
    columns = [
        Column("tokens", "tokens"),
        Column("ms", "ms", number),
        Column("against dense", "dense", ratio),
        Column("against atomics", "atomics", ratio),
        Column("segments known: ms", "known_ms", number),
        Column("segments known: of copy rate", "known_share", share),
        Column("segments known: against atomics", "known_atomics", ratio),
    ]
    each = [
        Column("tokens, variant", "variant"),
        Column("replayed ms", "replayed", number),
        Column("launched ms", "launched", number),
        Column("of copy rate", "of_copy_rate", share),
        Column("against dense", "times_dense", ratio),
        Column("against atomics", "times_atomics", ratio),
        Column("sums that differ between runs", "differ", integer),
        Column("cannot be captured", "cannot_be_captured"),
    ]
    rows, all_rows = [], []
    for distribution in DISTRIBUTIONS:
        variants = r[distribution]["variants"]
        for name, m in variants.items():
            row = {**m, **m["ms"], "variant": f"{distribution}: {name}"}
            all_rows.append({**row, "of_copy_rate": m["of_copy_rate"].get("replayed")})
        in_line, known = variants[IN_LINE], variants[KNOWN]
        rows.append(
            {
                "tokens": distribution,
                "ms": in_line["ms"].get("replayed"),
                "dense": in_line["times_dense"],
                "atomics": in_line["times_atomics"],
                "known_ms": known["ms"].get("replayed"),
                "known_share": known["of_copy_rate"].get("replayed"),
                "known_atomics": known["times_atomics"],
            }
        )
    return {"gradient": Table(columns, rows), "variants": Table(each, all_rows)}


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


def training_tables(r: dict) -> dict[str, Table]:
    columns = [
        Column("embeddings", "name"),
        Column("ms", "ms", number),
        Column("tokens/s", "tokens_per_s", thousands),
        Column("against torch", "times_torch", ratio),
    ]
    return {"GPT-2": Table(columns, [{"name": name, **m} for name, m in r["variants"].items()])}


# ---- the script ---------------------------------------------------------------------------------

PARTS = {
    "backward": (backward, backward_tables),
    "grid": (grid, grid_tables),
    "step": (step, training_tables),
}


def tables(results: dict) -> dict[str, Table]:
    return {
        name: table
        for part, result in results.items()
        for name, table in PARTS[part][1](result).items()
    }


def sizes_that_fit() -> tuple[dict, str | None]:
    """Arguments of the parts for the memory that is there; in words, if they are smaller."""
    if memory.available_GiB() >= GIB:
        return {}, None
    counts = COUNTS[:-1]
    config = preset("gpt2-124m", layers=4, vocab=16384)
    words = f"at most {counts[-1]:,} tokens; GPT-2 with 4 layers and 16,384 tokens"
    return {"grid": {"counts": counts}, "step": {"config": config, "rows": 2}}, words


def main():
    parser = argparse.ArgumentParser(description="The encoder's backward against torch.")
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"some of: {', '.join(PARTS)}; then nothing is written",
    )
    chosen = parser.parse_args().parts
    unknown = set(chosen) - PARTS.keys()
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    results, clock = {}, Clock()
    arguments, size = sizes_that_fit()
    with measuring_here():
        for name, (measure, _) in PARTS.items():
            if not chosen or name in chosen:
                results[name] = plain(measure(**arguments.get(name, {})))
                show(tables({name: results[name]}))
                clock.say(f"{name} is done")
                release()
        if not chosen:
            write("encoder", results, size=size)


if __name__ == "__main__":
    main()
