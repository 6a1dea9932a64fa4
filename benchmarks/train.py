"""A whole training step in the four ways of accumulating: python benchmarks/train.py  (needs a GPU, takes about a minute)

llama-350m, bf16 with fp32 masters, batch 4 x T = 1024 per micro-batch, compiled, clipped at 1.0, torch's fused AdamW. For each way:
tokens/s with 1, 4 and 16 micro-batches per optimizer step, where the time goes, and what the host did (ledger). Launched
from Python, so that on a slow host it is the host that is measured.
"""

import statistics

import common
import torch
from workers import Workers

from gpuaccel.measure import Meter, ledger, peak_flops
from gpuaccel.optim.accumulate import MODES
from gpuaccel.optim.arena import Arena
from gpuaccel.training.models import Transformer, flops_per_token, preset
from gpuaccel.training.step import TrainStep

B, T = 4, 1024


class Run:
    """Training in one mode, in a process of its own, because compiling takes long: all modes do it side by side."""

    def __init__(self, mode: str):
        torch.manual_seed(0)
        with torch.device("cuda"):
            module = Transformer(preset("llama-350m")).bfloat16()
        arena = Arena(module)
        opt = torch.optim.AdamW(arena.parameter_groups(0.1), lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.mode, self.step = (
            mode,
            TrainStep(module, opt, accumulate=mode, max_norm=1.0, compile=True),
        )
        self.step(batch(1))
        torch.cuda.synchronize()

    def alone(self) -> dict:
        """What does not depend on the others: memory, what the host did, where the time went."""
        step, four, repeated = self.step, batch(4), 1 if self.mode == "host" else 3
        step.micro_batches = 4
        step(four)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with ledger(self.mode) as row:
            step(four)
        step.meter = Meter(
            "cuda", flops_per_token(preset("llama-350m"), T), peak_flops("cuda", torch.bfloat16)
        )
        for _ in range(repeated):
            out = step(four)
            step.meter.update(four[0].numel(), out.loss)
        stages = step.meter.finish().stages
        step.meter = None
        return {
            "stages_ms": stages,
            "activations_GiB": (torch.cuda.max_memory_allocated() - before) / 2**30,
            "accumulator_MiB": step.arena.summary().block_bytes / 2**20,
            "ledger": {
                "launches": row.launches,
                "syncs": row.syncs,
                "copies": {k: list(v) for k, v in row.copies.items()},
            },
        }

    def times(self, micro_batches: int, calls: int) -> "list[float]":
        """Milliseconds of steps, each by itself."""
        data, times, self.step.micro_batches = batch(micro_batches), [], micro_batches
        for _ in range(calls):
            torch.cuda.synchronize()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.step(data)
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        return times


def batch(micro_batches: int):
    tokens = torch.randint(0, 32768, (B * micro_batches, T + 1), device="cuda")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def race(workers: Workers) -> dict:
    """tokens/s by mode and micro-batches: the modes take turns, the median of their turns counts. `host`, whose steps take seconds, has
    three, two and one turn."""
    rates = {mode: {} for mode in workers.names}
    for micro_batches, rounds, slow in ((1, 12, 3), (4, 6, 2), (16, 3, 1)):
        times = {mode: [] for mode in workers.names}
        for turn in range(rounds):
            for mode in workers.names:
                if mode != "host" or turn < slow:
                    times[mode] += workers.ask(
                        mode, "times", micro_batches, 1 if turn or mode == "host" else 2
                    )[-1:]  # the first turn warms up
        for mode in workers.names:
            rates[mode][f"tokens_per_s, {micro_batches}"] = (
                B * T * micro_batches / statistics.median(times[mode]) * 1e3
            )
    return rates


def main():
    with Workers({mode: (Run, mode) for mode in MODES}) as workers:
        workers.ready()
        results, raced = {mode: workers.ask(mode, "alone") for mode in MODES}, race(workers)
    peak, flops = peak_flops("cuda", torch.bfloat16), flops_per_token(preset("llama-350m"), T)
    for mode, rates in raced.items():
        results[mode].update(rates)
        results[mode]["accumulation_cost"] = rates["tokens_per_s, 16"] / rates["tokens_per_s, 1"]
        results[mode]["mfu"] = rates["tokens_per_s, 4"] * flops / peak
    rows = [
        (
            mode,
            *(f"{r[f'tokens_per_s, {k}'] / 1e3:,.1f}K" for k in (1, 4, 16)),
            f"{r['accumulation_cost']:.2f}",
            f"{r['mfu']:.1%}",
            r["ledger"]["launches"],
            r["ledger"]["syncs"],
            f"{r['ledger']['copies'].get('DtoH', [0, 0])[1] / 2**20:,.1f}",
        )
        for mode, r in results.items()
    ]
    print(
        common.table(
            rows,
            (
                "tokens/s with micro-batches:",
                "1",
                "4",
                "16",
                "16 : 1",
                "MFU (4)",
                "launches",
                "syncs",
                "MiB down",
            ),
        )
    )
    print("written:", common.write("train", results).name)


if __name__ == "__main__":
    main()
