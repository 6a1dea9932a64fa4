"""The encoder's backward against torch: python benchmarks/encoder.py [part ...]   (needs a GPU, takes about two minutes)

Parts: backward, grid, positions, segments, step. Without any: all of them, and the result is written.

1. backward: 64 x 1024 tokens, 768 channels, bf16 gradients; tokens by Zipf's law (exponent 1, 50,257 of them, in a random order), uniform, real text
   (windows of Python's standard library through our BPE) and one token everywhere. Ours with segments known and found in line, sums in fp32 and
   bf16; torch's embedding_dense_backward (bf16, into a fresh table), index_add_ with atomics and in its deterministic form, sums and rows of one
   dtype (rows are made fp32 beforehand); the ladder's first rungs (v1 adds dwpe too; v2 with buckets known, their making and copying by the host's
   clock). Replayed from CUDA graphs and launched from Python; what cannot be captured is compared with what was launched too. Times are of one of
   several calls in a row. Shares are of the rate of a device-to-device copy measured in the same run, on the bytes of the job: every row of dout
   once, every row of the sums that has a token read and written (torch's table: all of it written).
   Bits: elements that differ between 100 runs of ours (10 of them replays, 10 on another stream), and between 10 runs of the others.
2. grid: 4 kinds of tokens, 4 widths, 3 lengths, 3 vocabularies: ours in line, atomic index_add_ (fp32) and embedding_dense_backward. The sums are
   added to ones and compared with float64 (of large tables 64 channels; the error is divided by the sum of the absolute values), 3 runs of ours bit
   by bit; rows without a token must stay as they were.
3. positions: the gradient of wpe against torch's sum over the batch.
4. segments: finding them, against torch.sort(stable=True).
5. step: a whole step of GPT-2 124M, 16 x 1024 tokens by Zipf's law, bf16 autocast, mode `fused`, replayed, in turns: with torch's embeddings in the
   encoder's place, with ours, and with ours and deterministic=True; then 200 deterministic steps twice, side by side, weights and losses compared.
   Each variant has a process of its own.
"""

import argparse
import functools
import hashlib
import json
import math
import statistics
import time

import common
import torch
from clip import copy_rate
from timing import release, timed
from torch import nn
from workers import Workers, in_turns, queued

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

DEVICE = "cuda"
ZIPF, UNIFORM, TEXT, SAME = DISTRIBUTIONS = "Zipf", "uniform", "real text", "all the same"
GOALS = {
    ZIPF: (7, 4.5),
    TEXT: (7, 4.5),
    UNIFORM: (7, 4),
    SAME: (9, 12),
}  # segments known: times DENSE, times the best atomics
IN_LINE_GOAL = 4  # times DENSE
VOCAB, T, TEXT_BYTES = 50257, 1024, 8 << 20
WIDTHS, COUNTS, VOCABS = (768, 1600, 4096, 770), (4096, 65536, 524288), (256, 50257, 128256)
BUDGET, QUICK = 150.0, 0.0  # milliseconds of one measurement; of a case of the grid: 3 rounds
WHOLE, CHANNELS = (
    2**26,
    64,
)  # elements of dout or of the sums of which all channels are checked; otherwise so many channels
ROUNDING = 1e-6  # what fp32 sums may be off, as a part of the sum of the absolute values
KNOWN, KNOWN_LOW, IN_LINE, IN_LINE_LOW = (
    "ours, segments known",
    "ours, segments known, bf16 sums",
    "ours, segments in line",
    "ours, segments in line, bf16 sums",
)
DENSE, ATOMICS, ATOMICS_LOW = "embedding_dense_backward", "index_add_, fp32", "index_add_, bf16"
EXACT, EXACT_LOW, V1, V2 = (
    "index_add_ deterministic, fp32",
    "index_add_ deterministic, bf16",
    "encoder_backward_v1",
    "encoder_backward_v2",
)
OURS, SUM, SUM_WIDE, SORT = (
    "ours",
    "add_(dout.sum(0))",
    "add_(dout.sum(0, dtype=fp32))",
    "torch.sort(stable=True)",
)
TORCH_STEP, OURS_STEP, EXACT_STEP = "torch's embeddings", "ours", "ours, deterministic"
STEPS, CALLS = 200, 5


# ---- tokens and gradients -------------------------------------------------------------------------------------------


def zipf(count: int, vocab: int, generator) -> torch.Tensor:
    """(count,) tokens: the k-th of a random order of the vocabulary comes with a probability proportional to 1 / k."""
    share = (1 / torch.arange(1, vocab + 1, dtype=torch.float64, device=DEVICE)).cumsum(0)
    at = torch.searchsorted(
        share,
        torch.rand(count, dtype=torch.float64, device=DEVICE, generator=generator) * share[-1],
    )
    return torch.randperm(vocab, device=DEVICE, generator=generator)[at.clamp(max=vocab - 1)]


@functools.cache
def dataset(tokenizer: str):
    return make_dataset(tokenizer=tokenizer, max_bytes=TEXT_BYTES, vocab_size=VOCAB)


@functools.cache
def tokens_of(distribution: str, count: int, vocab: int) -> torch.Tensor:
    """(rows, up to 1024) int64. Real text: bytes where the vocabulary has no room for our BPE."""
    generator, length = torch.Generator(DEVICE).manual_seed(1), min(T, count)
    if distribution == TEXT:
        text = dataset("bpe" if vocab >= VOCAB else "byte")
        return next(Batches(text.train, count // length, length, seed=1))[0].to(DEVICE)
    tokens = {
        ZIPF: lambda: zipf(count, vocab, generator),
        UNIFORM: lambda: torch.randint(0, vocab, (count,), device=DEVICE, generator=generator),
        SAME: lambda: torch.full((count,), vocab // 3, device=DEVICE),
    }[distribution]()
    return tokens.view(-1, length)


def gradients(count: int, C: int) -> torch.Tensor:
    """(count, C) bf16."""
    return torch.randn(
        count,
        C,
        device=DEVICE,
        dtype=torch.bfloat16,
        generator=torch.Generator(DEVICE).manual_seed(2),
    )


# ---- how it is timed ------------------------------------------------------------------------------------------------


def times(found: dict, peer: str, way: str) -> "float | None":
    """How many times the peer's time is the way's: both replayed, or both launched where one of them cannot be captured."""
    for kind in found.values():
        if peer in kind and way in kind:
            return kind[peer] / kind[way]


# ---- 1: one size, every way -----------------------------------------------------------------------------------------


def ways(tokens, dout, vocab) -> dict:
    """name -> (run, the sums that it adds into; None: it returns them, bytes that must move)."""
    ids, (n, C) = tokens.view(-1), dout.shape
    shaped, wide, used = dout.view(*tokens.shape, C), dout.float(), ids.unique().numel()
    sums, low = (
        torch.zeros(vocab, C, device=DEVICE, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    dwpe, found = torch.zeros(tokens.shape[1], C, device=DEVICE), find_segments(tokens, vocab)
    buckets, items = (t.to(DEVICE) for t in reference_buckets(tokens, C, 8))

    def exactly(to, rows):
        with deterministic():
            to.index_add_(0, ids, rows)

    rows, rows_low, dense = C * (2 * n + 8 * used), C * (2 * n + 4 * used), C * (2 * n + 2 * vocab)
    return {
        KNOWN: (lambda: encoder_backward(sums, None, shaped, tokens, segments=found), sums, rows),
        KNOWN_LOW: (
            lambda: encoder_backward(low, None, shaped, tokens, segments=found),
            low,
            rows_low,
        ),
        IN_LINE: (lambda: encoder_backward(sums, None, shaped, tokens), sums, rows),
        IN_LINE_LOW: (lambda: encoder_backward(low, None, shaped, tokens), low, rows_low),
        DENSE: (
            lambda: torch.ops.aten.embedding_dense_backward(shaped, tokens, vocab, -1, False),
            None,
            dense,
        ),
        ATOMICS: (lambda: sums.index_add_(0, ids, wide), sums, rows + 2 * n * C),
        ATOMICS_LOW: (lambda: low.index_add_(0, ids, dout), low, rows_low),
        EXACT: (lambda: exactly(sums, wide), sums, rows + 2 * n * C),
        EXACT_LOW: (lambda: exactly(low, dout), low, rows_low),
        V1: (lambda: launch_atomic(sums, dwpe, shaped, tokens), sums, rows + 8 * dwpe.numel()),
        V2: (lambda: launch_buckets(sums, dout, buckets, items), sums, rows),
    }


def differing(runs, sums) -> int:
    """How many elements do not have the same bits after each of these runs, all of which begin with zeros. sums: None: a run returns its own."""
    first = unequal = None
    for run in runs:
        if sums is not None:
            sums.zero_()
        result = run()
        result = result if sums is None else sums
        got = result.view(torch.int16 if result.dtype == torch.bfloat16 else torch.int32)
        if first is None:
            first, unequal = got.clone(), torch.zeros_like(got, dtype=torch.bool)
        unequal |= got != first
    return int(unequal.sum())


def bits(found: dict, runs: int = 100, others: int = 10) -> dict:
    """name -> {"runs", "differ"} of each way."""
    rows = {}
    for name, (run, sums, _) in found.items():
        if name in (IN_LINE, IN_LINE_LOW):
            recorder = recorder_for(DEVICE, backend().name)
            recording, _ = recorder.record(run)
            many = (
                [run] * (runs - 20)
                + [recording.replay] * 10
                + [lambda run=run: recorder.run(run)] * 10
            )
            rows[name] = {"runs": len(many), "differ": differing(many, sums)}
            recording.close()
        else:
            rows[name] = {"runs": others, "differ": differing([run] * others, sums)}
    return rows


def buckets_ms(tokens, C: int) -> float:
    """Milliseconds by the host's clock of making buckets on the CPU and copying both ways; the median of 5."""
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for t in reference_buckets(tokens, C, 8):
            t.to(DEVICE)
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken)


def backward(count: int = 64 * T, C: int = 768, copied: int = 2**27) -> dict:
    results = {
        "tokens": count,
        "C": C,
        "vocab": VOCAB,
        "bpe": dataset("bpe").vocab_size,
        "copy_GB_per_s": copy_rate(copied),
    }
    release()
    for distribution in DISTRIBUTIONS:
        tokens, dout = tokens_of(distribution, count, VOCAB), gradients(count, C)
        all_ways, counts = ways(tokens, dout, VOCAB), torch.bincount(tokens.view(-1))
        found, refused = timed(
            {name: run for name, (run, *_) in all_ways.items()}, launched=True, budget=BUDGET
        )
        same, rows = bits(all_ways), {}
        atomics = ATOMICS if times(found, ATOMICS, ATOMICS_LOW) < 1 else ATOMICS_LOW
        for name, (_, _, size) in all_ways.items():
            ms = {kind: some[name] for kind, some in found.items() if name in some}
            rows[name] = {
                "ms": ms,
                "of_copy_rate": {
                    kind: size / t / 1e6 / results["copy_GB_per_s"] for kind, t in ms.items()
                },
                "cannot_be_captured": refused.get(name),
                "times_dense": times(found, DENSE, name),
                "times_atomics": times(found, atomics, name),
                "times_launched": {
                    peer: found["launched"][peer] / ms["launched"] for peer in (DENSE, atomics)
                },
                **same[name],
            }
        dense, best = GOALS[distribution]
        results[distribution] = {
            "distinct": int((counts > 0).sum()),
            "most": int(counts.max()),
            "best_atomics": atomics,
            "ways": rows,
            "goals": {"dense": dense, "atomics": best, "in_line": IN_LINE_GOAL},
            "buckets_ms": buckets_ms(tokens, C),
        }
        del all_ways
        release()
    return results


# ---- 2: every size, three ways --------------------------------------------------------------------------------------


def in_float64(ids, dout, vocab, columns) -> "tuple[torch.Tensor, torch.Tensor]":
    """Sums of some channels, and of their absolute values, (vocab, channels) float64 each."""
    rows = dout[:, columns].double()
    return tuple(
        torch.zeros(vocab, len(columns), dtype=torch.float64, device=DEVICE).index_add_(
            0, ids, part
        )
        for part in (rows, rows.abs())
    )


def case(tokens, dout, wide, vocab) -> dict:
    """Errors, bits and times of one case. wide: dout in fp32."""
    ids, (n, C) = tokens.view(-1), dout.shape
    shaped, sums = dout.view(*tokens.shape, C), torch.empty(vocab, C, device=DEVICE)
    columns = (
        torch.arange(C, device=DEVICE)
        if max(n, vocab) * C <= WHOLE
        else torch.linspace(0, C - 1, CHANNELS, device=DEVICE).long()
    )
    exact, size = in_float64(ids, dout, vocab, columns)
    used = torch.zeros(vocab, dtype=torch.bool, device=DEVICE).index_fill_(0, ids, True)
    runs = {
        IN_LINE: lambda: encoder_backward(sums, None, shaped, tokens),
        ATOMICS: lambda: sums.index_add_(0, ids, wide),
        DENSE: lambda: torch.ops.aten.embedding_dense_backward(shaped, tokens, vocab, -1, False),
    }
    error, first, differ = {}, None, 0
    for name in (ATOMICS, IN_LINE, IN_LINE, IN_LINE):
        sums.fill_(1)
        runs[name]()
        error[name] = float(((sums[:, columns].double() - 1 - exact).abs() / (size + 1)).max())
        if name == IN_LINE:
            first = sums.view(torch.int32).clone() if first is None else first
            differ += int((sums.view(torch.int32) != first).sum())
    stray = int((sums != 1)[~used].sum())
    del exact, size, first
    found, refused = timed(runs, budget=QUICK)
    return {
        "distinct": int(used.sum()),
        "channels_checked": len(columns),
        "error": error,
        "differ": differ,
        "stray": stray,
        "ms": found,
        "times_atomics": times(found, ATOMICS, IN_LINE),
        "times_dense": times(found, DENSE, IN_LINE),
        **({"cannot_be_captured": refused} if refused else {}),
    }


def grid(widths=WIDTHS, counts=COUNTS, vocabs=VOCABS) -> list:
    cases, wrong, began = [], [], time.perf_counter()
    for count in counts:
        for C in widths:
            dout = gradients(count, C)
            wide = dout.float()
            for vocab in vocabs:
                for distribution in DISTRIBUTIONS:
                    found = {
                        "distribution": distribution,
                        "C": C,
                        "tokens": count,
                        "vocab": vocab,
                        **case(tokens_of(distribution, count, vocab), dout, wide, vocab),
                    }
                    cases.append(found)
                    if not (
                        found["error"][IN_LINE] < ROUNDING
                        and found["differ"] == found["stray"] == 0
                    ):
                        wrong.append(found)
            del dout, wide
            release()
            print(f"{time.perf_counter() - began:5.1f} s: {count:,} tokens, C = {C}", flush=True)
    assert not wrong, f"{len(wrong)} of {len(cases)} cases have wrong sums: {wrong[:5]}"
    return cases


# ---- 3, 4: positions, segments --------------------------------------------------------------------------------------


def positions(B: int = 64, length: int = T, widths=(768, 1600), copied: int = 2**27) -> dict:
    results, rate = {"B": B, "T": length}, copy_rate(copied)
    for C in widths:
        tokens, dout = (
            tokens_of(ZIPF, B * length, VOCAB).view(B, length),
            gradients(B * length, C).view(B, length, C),
        )
        dwpe = torch.zeros(length, C, device=DEVICE)
        runs = {
            OURS: lambda: encoder_backward(None, dwpe, dout, tokens),
            SUM: lambda: dwpe.add_(dout.sum(0)),
            SUM_WIDE: lambda: dwpe.add_(dout.sum(0, dtype=torch.float32)),
        }
        found, refused = timed(runs, launched=True, budget=BUDGET)
        results[str(C)] = {
            name: {
                "ms": {kind: some[name] for kind, some in found.items() if name in some},
                "cannot_be_captured": refused.get(name),
                "of_copy_rate": length * C * (2 * B + 8) / found["replayed"][name] / 1e6 / rate
                if name not in refused
                else None,
                "times_torch": times(found, SUM, name),
            }
            for name in runs
        }
    return results


def segments(counts=COUNTS, vocabs=VOCABS) -> list:
    rows = []
    for vocab in vocabs:
        for count in counts:
            tokens = tokens_of(ZIPF, count, vocab)
            found, refused = timed(
                {
                    OURS: lambda: find_segments(tokens, vocab),
                    SORT: lambda: tokens.view(-1).sort(stable=True),
                },
                launched=True,
                budget=BUDGET,
            )
            rows.append(
                {
                    "tokens": count,
                    "vocab": vocab,
                    "ms": found,
                    "times_torch": times(found, SORT, OURS),
                    "cannot_be_captured": refused,
                }
            )
    return rows


# ---- 5: whole steps -------------------------------------------------------------------------------------------------


class TorchEmbedding(nn.Embedding):
    """Mode `fused` leaves a subclass alone: forward and backward are torch's, and the gradient comes to the arena as any other."""


class TorchEncoder(nn.Module):
    """The same with two embeddings of torch, with the weights of one of ours."""

    def __init__(self, ours):
        super().__init__()
        self.wte, self.wpe = (
            TorchEmbedding(*part.weight.shape, device="meta") for part in (ours.wte, ours.wpe)
        )
        self.wte.weight, self.wpe.weight = (
            ours.wte.weight,
            ours.wpe.weight,
        )  # the very tensors: the head is tied to one

    def forward(self, tokens):
        return self.wte(tokens) + self.wpe(torch.arange(tokens.shape[-1], device=tokens.device))


def batch_of(config, rows: int, seed: int):
    tokens = zipf(
        rows * (config.T + 1), config.vocab, torch.Generator(DEVICE).manual_seed(seed)
    ).view(rows, -1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def training(config, way: str) -> TrainStep:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = config.build()
    if way == TORCH_STEP:
        model.encoder = TorchEncoder(model.encoder)
    opt = AdamW(Arena(model), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0)
    return TrainStep(
        model,
        opt,
        accumulate="fused",
        autocast=torch.bfloat16,
        replay=Replay(policy="require"),
        deterministic=way == EXACT_STEP,
    )


class Step:
    """One variant. It is made when it is asked for: others need the memory before."""

    def __init__(self, config, rows: int, way: str):
        self.config, self.rows, self.way = config, rows, way

    def alone(self) -> dict:
        """Captures; the first loss."""
        self.step, self.batch = training(self.config, self.way), batch_of(self.config, self.rows, 0)
        self.run()
        return {"first_loss": float(self.out.loss)}

    def run(self):
        self.out = self.step(self.batch)

    def times(self, calls: int) -> "list[float]":
        return queued(self.run, calls)

    def end(self) -> dict:
        return {"last_loss": float(self.out.loss), "skipped": int(self.step.opt.skipped)}


class Trained:
    """Deterministic steps, each with a batch of its own."""

    def __init__(self, config, rows: int, steps: int):
        step = training(config, EXACT_STEP)
        losses = torch.stack([step(batch_of(config, rows, i)).loss for i in range(steps)])
        whole = hashlib.sha256(step.arena.weights.cpu().numpy()).hexdigest()
        self.found = {
            "weights": step.arena.weights.numel(),
            "sha256": whole,
            "losses": losses.tolist(),
            "skipped": int(step.opt.skipped),
        }

    def result(self) -> dict:
        return self.found


def step(config=None, rows: int = 16, steps: int = STEPS, here: bool = False) -> dict:
    config, names, pair = (
        config or preset("gpt2-124m"),
        (TORCH_STEP, OURS_STEP, EXACT_STEP),
        ("one", "two"),
    )
    variants = {name: (Step, config, rows, name) for name in names} | {
        name: (Trained, config, rows, steps) for name in pair
    }
    release()
    with Workers(variants, here) as workers:
        workers.ready()
        one, two = (workers.ask(name, "result") for name in pair)
        workers.close(*pair)
        found = {name: workers.ask(name, "alone") for name in names}
        taken = in_turns(
            {name: lambda name=name: workers.ask(name, "times", CALLS) for name in names}
        )
        for name, ms in taken.items():
            found[name] |= {
                "ms": ms,
                "tokens_per_s": rows * config.T / ms * 1e3,
                "times_torch": taken[TORCH_STEP] / ms,
                **workers.ask(name, "end"),
            }
    firsts, lasts = ([row[key] for row in found.values()] for key in ("first_loss", "last_loss"))
    assert max(firsts) - min(firsts) < 0.01 and all(map(math.isfinite, lasts)), (
        f"first losses {firsts}, last ones {lasts}"
    )
    assert not any(row["skipped"] for row in (one, two, *found.values())), "a step was skipped"
    return {
        "rows": rows,
        "T": config.T,
        "ways": found,
        "twice": {
            "steps": steps,
            "weights": one["weights"],
            "weights_equal": one["sha256"] == two["sha256"],
            "losses_equal": one["losses"] == two["losses"],
            "sha256": [one["sha256"], two["sha256"]],
            "first_and_last_loss": [one["losses"][0], one["losses"][-1]],
        },
    }


# ---- printed --------------------------------------------------------------------------------------------------------


def goal(value, least) -> str:
    return "" if value is None else f"{value:.2f} ({least:g}{'' if value >= least else ': missed'})"


def show_backward(r):
    for distribution in DISTRIBUTIONS:
        d, rows = r[distribution], []
        for name, m in d["ways"].items():
            known, line = name in (KNOWN, KNOWN_LOW), name in (IN_LINE, IN_LINE_LOW)
            dense, atomics = m["times_dense"], m["times_atomics"]
            rows.append(
                (
                    name,
                    *(f"{m['ms'].get(kind, math.nan):.4f}" for kind in ("replayed", "launched")),
                    f"{m['of_copy_rate'].get('replayed', math.nan):.0%}",
                    goal(dense, d["goals"]["dense"] if known else d["goals"]["in_line"])
                    if known or line
                    else f"{dense or math.nan:.2f}",
                    goal(atomics, d["goals"]["atomics"]) if known else f"{atomics or math.nan:.2f}",
                    " ".join(f"{x:.2f}" for x in m["times_launched"].values()),
                    f"{m['differ']:,} / {m['runs']}",
                )
            )
        print(
            f"\n{distribution}: {d['distinct']:,} of {r['tokens']:,} tokens are different, the most frequent comes {d['most']:,} times; atomics: "
            f"{d['best_atomics']}; buckets {d['buckets_ms']:.2f} ms by the host's clock\n"
            + common.table(
                rows,
                (
                    "",
                    "replayed ms",
                    "launched ms",
                    "of copy rate",
                    "x dense (goal)",
                    "x atomics (goal)",
                    "both, launched",
                    "differ / runs",
                ),
            )
        )
        for name, m in d["ways"].items():
            if m["cannot_be_captured"]:
                print(f"{name}: {m['cannot_be_captured']}")
    print(f"copy rate {r['copy_GB_per_s']:,.0f} GB/s, BPE of {r['bpe']:,} tokens")


def show_grid(cases):
    rows = []
    for count in sorted({c["tokens"] for c in cases}):
        for C in dict.fromkeys(c["C"] for c in cases):
            for vocab in sorted({c["vocab"] for c in cases}):
                some = [c for c in cases if (c["tokens"], c["C"], c["vocab"]) == (count, C, vocab)]
                rows.append(
                    (
                        f"{count:,} x {C}, V = {vocab:,}",
                        *(f"{c['times_atomics']:.2f} {c['times_dense']:.2f}" for c in some),
                        " ".join(
                            f"{c['ms'].get('replayed', {}).get(IN_LINE, math.nan):.4f}"
                            for c in some
                        ),
                        f"{max(c['error'][IN_LINE] for c in some):.1e}",
                        f"{max(c['error'][ATOMICS] for c in some):.1e}",
                    )
                )
    print(
        "\nin line: x atomics, x dense\n"
        + common.table(rows, ("", *DISTRIBUTIONS, "ms", "error", "of atomics"))
    )
    above = [c for c in cases if c["tokens"] > min(c["tokens"] for c in cases)]
    for key in ("times_atomics", "times_dense"):
        c = min(above, key=lambda c: c[key])
        print(
            f"least {key} but for the fewest tokens: {goal(c[key], 1)}: {c['distribution']}, {c['tokens']:,} x {c['C']}, V = {c['vocab']:,}"
        )


def show_positions(r):
    rows = [
        (
            f"C = {C}: {name}",
            m["ms"].get("replayed", math.nan),
            m["ms"].get("launched", math.nan),
            f"{m['of_copy_rate'] or math.nan:.0%}",
            m["times_torch"],
        )
        for C, some in r.items()
        if isinstance(some, dict)
        for name, m in some.items()
    ]
    print(
        "\npositions\n"
        + common.table(rows, ("", "replayed ms", "launched ms", "of copy rate", "x torch"))
    )


def show_segments(r):
    rows = [
        (
            f"{m['tokens']:,} tokens, V = {m['vocab']:,}",
            *(
                f"{m['ms'].get(kind, {}).get(name, math.nan):.4f}"
                for kind in ("replayed", "launched")
                for name in (OURS, SORT)
            ),
            m["times_torch"],
        )
        for m in r
    ]
    print(
        "\nsegments\n"
        + common.table(
            rows, ("", "ours ms", "torch.sort ms", "launched", "launched", "x torch.sort")
        )
    )
    for m in r:
        for name, why in m["cannot_be_captured"].items():
            print(f"{name}, {m['tokens']:,}, {m['vocab']:,}: {why}")


def show_step(r):
    rows = [
        (
            name,
            m["ms"],
            f"{m['tokens_per_s'] / 1e3:,.1f}K",
            f"{m['times_torch']:.4f}",
            m["first_loss"],
            m["last_loss"],
        )
        for name, m in r["ways"].items()
    ]
    print(
        f"\nGPT-2 124M, {r['rows']} x {r['T']}\n"
        + common.table(rows, ("encoder", "ms", "tokens/s", "x torch", "first loss", "last loss"))
    )
    print(
        f"after {r['twice']['steps']} steps twice: weights equal {r['twice']['weights_equal']}, losses equal {r['twice']['losses_equal']}; "
        f"loss {r['twice']['first_and_last_loss']}"
    )


PARTS = {
    "backward": (backward, show_backward),
    "grid": (grid, show_grid),
    "positions": (positions, show_positions),
    "segments": (segments, show_segments),
    "step": (step, show_step),
}


def main():
    parser = argparse.ArgumentParser(
        description="The encoder's backward against torch; see this file's first lines."
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"some of: {', '.join(PARTS)}; nothing is written then",
    )
    chosen, results, began = parser.parse_args().parts, {}, time.perf_counter()
    unknown = set(chosen) - PARTS.keys()
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    for name, (measure, show) in PARTS.items():
        if not chosen or name in chosen:
            results[name] = json.loads(json.dumps(measure()))
            show(results[name])
            print(f"{time.perf_counter() - began:5.1f} s: {name} is done", flush=True)
            release()
    if not chosen:
        print("\nwritten:", common.write("encoder", results).name)


if __name__ == "__main__":
    main()
