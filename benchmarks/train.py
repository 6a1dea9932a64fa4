"""A whole training step in the four ways of accumulating: python benchmarks/train.py  (needs a GPU, four minutes)

llama-350m, bf16 with fp32 masters, batch 4 x T = 1024 per micro-batch, compiled, clipped at 1.0, torch's fused AdamW. For each way:
tokens/s with 1, 4 and 16 micro-batches per optimizer step, where the time goes, and what the host did (ledger). Launched
from Python, so that on a slow host it is the host that is measured.
"""
import statistics

import common
import torch

from gpuaccel.accumulate import MODES
from gpuaccel.arena import Arena
from gpuaccel.ledger import ledger
from gpuaccel.meter import Meter, peak_flops
from gpuaccel.models import Transformer, flops_per_token, preset
from gpuaccel.step import TrainStep

SOURCES = ["kernels_cu/common.cuh", "kernels_cu/accumulate.cu", "gpuaccel/nvrtc.py", "gpuaccel/kernel.py",
           "gpuaccel/arena.py", "gpuaccel/accumulate.py", "gpuaccel/fused_linear.py", "gpuaccel/models.py", "gpuaccel/step.py", "gpuaccel/meter.py", "gpuaccel/ledger.py", "benchmarks/train.py", "benchmarks/common.py"]
B, T = 4, 1024


def build(mode: str) -> TrainStep:
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = Transformer(preset("llama-350m")).bfloat16()
    arena = Arena(module)
    opt = torch.optim.AdamW(arena.parameter_groups(0.1), lr=3e-4, betas=(0.9, 0.95), fused=True)
    return TrainStep(module, opt, accumulate=mode, max_norm=1.0, compile=True)


def batch(micro_batches: int):
    tokens = torch.randint(0, 32768, (B * micro_batches, T + 1), device="cuda")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def one_alone(mode: str, step: TrainStep) -> dict:
    """What does not depend on the others: memory, what the host did, where the time went."""
    config, four = preset("llama-350m"), batch(4)
    step.micro_batches = 4
    for _ in range(2):
        step(four)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with ledger(mode) as row:
        step(four)
    step.meter = Meter("cuda", flops_per_token(config, T), peak_flops("cuda", torch.bfloat16))
    for _ in range(3):
        out = step(four)
        step.meter.update(four[0].numel(), out.loss)
    stages = step.meter.finish().stages
    step.meter = None
    return {"stages_ms": stages, "activations_GiB": (torch.cuda.max_memory_allocated() - before) / 2**30,
            "accumulator_MiB": step.arena.summary().block_bytes / 2**20,
            "ledger": {"launches": row.launches, "syncs": row.syncs, "copies": {k: list(v) for k, v in row.copies.items()}}}


def race(steps: "dict[str, TrainStep]") -> dict:
    """tokens/s by mode and micro-batches: the modes take turns, the median of their turns counts."""
    rates = {mode: {} for mode in steps}
    for micro_batches, rounds in ((1, 16), (4, 8), (16, 4)):
        data, times = batch(micro_batches), {mode: [] for mode in steps}
        for turn in range(rounds + 1):
            for mode, step in steps.items():
                if mode == "host" and turn > 2:
                    continue
                step.micro_batches = micro_batches
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                step(data)
                stop.record()
                torch.cuda.synchronize()
                if turn:                              # the first turn warms up
                    times[mode].append(start.elapsed_time(stop))
        for mode in steps:
            rates[mode][f"tokens_per_s, {micro_batches}"] = data[0].numel() / statistics.median(times[mode]) * 1e3
    return rates


def main():
    steps = {mode: build(mode) for mode in MODES}
    results = {mode: one_alone(mode, step) for mode, step in steps.items()}
    peak, flops = peak_flops("cuda", torch.bfloat16), flops_per_token(preset("llama-350m"), T)
    for mode, rates in race(steps).items():
        results[mode].update(rates)
        results[mode]["accumulation_cost"] = rates["tokens_per_s, 16"] / rates["tokens_per_s, 1"]
        results[mode]["mfu"] = rates["tokens_per_s, 4"] * flops / peak
    rows = [(mode, *(f"{r[f'tokens_per_s, {k}'] / 1e3:,.1f}K" for k in (1, 4, 16)), f"{r['accumulation_cost']:.2f}",
             f"{r['mfu']:.1%}", r["ledger"]["launches"], r["ledger"]["syncs"],
             f"{r['ledger']['copies'].get('DtoH', [0, 0])[1] / 2**20:,.1f}") for mode, r in results.items()]
    print(common.table(rows, ("tokens/s with micro-batches:", "1", "4", "16", "16 : 1", "MFU (4)", "launches", "syncs", "MiB down")))
    print("written:", common.write("train", SOURCES, results).name)


if __name__ == "__main__":
    main()
