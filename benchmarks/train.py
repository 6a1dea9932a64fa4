"""A whole training step in each accumulation mode: python benchmarks/train.py

Needs a GPU and about a minute.

llama-350m, bf16 with fp32 masters, batch 4 x T = 1024 per micro-batch, compiled, clipped at 1.0,
torch's fused AdamW. For each mode: tokens/s with 1, 4 and 16 micro-batches per optimizer step,
where the time goes, and what the host did (ledger). Steps are launched from Python, so a slow host
limits them.
"""

import statistics

import torch
from common import DEVICE, record, show_table
from power import measuring
from timing import separately
from training import SETTINGS, build, token_batch
from workers import Workers

from gpuaccel.measure import Meter, ledger, peak_flops
from gpuaccel.optim.accumulate import MODES
from gpuaccel.optim.arena import Arena
from gpuaccel.training.models import flops_per_token
from gpuaccel.training.step import TrainStep

# Sequences of a micro-batch.
B = 4
# (micro-batches, turns, turns of mode `host`, whose steps take seconds)
TURNS = ((1, 12, 3), (4, 6, 2), (16, 3, 1))


class Training:
    """Training in one mode."""

    def __init__(self, mode: str, config):
        model = build(config, torch.bfloat16)
        arena = Arena(model)
        groups = arena.parameter_groups(SETTINGS["weight_decay"])
        optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.mode = mode
        self.config = config
        self.step = TrainStep(model, optimizer, accumulate=mode, max_norm=1.0, compile=True)
        self.step(self.batch(1))
        torch.cuda.synchronize()

    def batch(self, micro_batches: int) -> tuple:
        return token_batch(self.config.vocab, B * micro_batches, self.config.T)

    def alone(self) -> dict:
        """What does not depend on the other modes: memory, the ledger, the stages' times."""
        step, batch = self.step, self.batch(4)
        step.micro_batches = 4
        step(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with ledger(self.mode) as row:
            step(batch)
        peak = peak_flops(DEVICE, torch.bfloat16)
        step.meter = Meter(DEVICE, flops_per_token(self.config, self.config.T), peak)
        for _ in range(1 if self.mode == "host" else 3):
            out = step(batch)
            step.meter.update(batch[0].numel(), out.loss)
        stages = step.meter.finish().stages
        step.meter = None
        return {
            "stages_ms": stages,
            "activations_GiB": (torch.cuda.max_memory_allocated() - before) / 2**30,
            "accumulator_MiB": step.arena.summary().block_bytes / 2**20,
            "ledger": {
                "launches": row.launches,
                "syncs": row.syncs,
                "copies": {kind: list(copies) for kind, copies in (row.copies or {}).items()},
            },
        }

    def times(self, micro_batches: int, calls: int) -> "list[float]":
        """Milliseconds of steps, each by itself."""
        self.step.micro_batches = micro_batches
        batch = self.batch(micro_batches)
        return separately(lambda: self.step(batch), calls)


def speed(workers: Workers, config) -> dict:
    """tokens/s by mode and micro-batches: medians, measured in turns."""
    rates = {mode: {} for mode in workers.names}
    for micro_batches, turns, host_turns in TURNS:
        times = {mode: [] for mode in workers.names}
        for turn in range(turns):
            for mode in workers.names:
                if mode == "host" and turn >= host_turns:
                    continue
                # The first turn warms up.
                calls = 2 if turn == 0 and mode != "host" else 1
                with measuring(mode, micro_batches):
                    times[mode].append(workers.ask(mode, "times", micro_batches, calls)[-1])
        tokens = B * config.T * micro_batches
        for mode, values in times.items():
            rate = tokens / statistics.median(values) * 1e3
            rates[mode][f"tokens_per_s, {micro_batches}"] = rate
    return rates


def measure(config, here: bool = False) -> dict:
    with Workers({mode: (Training, mode, config) for mode in MODES}, here) as workers:
        workers.ready()
        results = {mode: workers.ask(mode, "alone") for mode in MODES}
        rates = speed(workers, config)
    peak, flops = peak_flops(DEVICE, torch.bfloat16), flops_per_token(config, config.T)
    for mode, r in results.items():
        r.update(rates[mode])
        r["accumulation_cost"] = r["tokens_per_s, 16"] / r["tokens_per_s, 1"]
        r["mfu"] = r["tokens_per_s, 4"] * flops / peak if peak else None
    return results


def show(results: dict):
    rows = []
    for mode, r in results.items():
        downloaded = r["ledger"]["copies"].get("DtoH", [0, 0])[1] / 2**20
        rows.append(
            (
                mode,
                *(f"{r[f'tokens_per_s, {k}'] / 1e3:,.1f}K" for k in (1, 4, 16)),
                f"{r['accumulation_cost']:.2f}",
                f"{r['mfu'] or 0:.1%}",
                r["ledger"]["launches"],
                r["ledger"]["syncs"],
                f"{downloaded:,.1f}",
            )
        )
    head = ("micro-batches:", "1", "4", "16", "16 : 1", "MFU (4)", "launches", "syncs", "MiB down")
    show_table("tokens/s", rows, head)


def main():
    record("train", measure, show, GiB=70)


if __name__ == "__main__":
    main()
