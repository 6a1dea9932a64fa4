"""A whole training step in the four ways of accumulating: python benchmarks/train.py   (needs a GPU, takes about three minutes)

llama-350m, bf16 with fp32 masters, batch 4 x T = 1024 per micro-batch, compiled, clipped at 1.0, torch's fused AdamW. For each way:
tokens/s with 1, 4 and 16 micro-batches per optimizer step, memory, and what the host did in one step (ledger).
"""
import statistics

import common
import torch

from gpuaccel.accumulate import MODES
from gpuaccel.arena import Arena
from gpuaccel.ledger import ledger
from gpuaccel.meter import Meter, peak_flops
from gpuaccel.models import Transformer, flops_per_token, preset
from gpuaccel.train import TrainStep

SOURCES = ["kernels_cu/common.cuh", "kernels_cu/accumulate.cu", "gpuaccel/nvrtc.py", "gpuaccel/kernel.py", "gpuaccel/arena.py", "gpuaccel/accumulate.py",
           "gpuaccel/models.py", "gpuaccel/train.py", "gpuaccel/meter.py", "gpuaccel/ledger.py", "benchmarks/train.py", "benchmarks/common.py"]
B, T = 4, 1024


def one_way(mode: str) -> dict:
    config = preset("llama-350m")
    found = {}
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = Transformer(config).bfloat16()
    arena = Arena(module)
    opt = torch.optim.AdamW(arena.parameter_groups(0.1), lr=3e-4, betas=(0.9, 0.95), fused=True)
    with TrainStep(module, opt, accumulate=mode, max_norm=1.0, compile=True) as step:
        for micro_batches in (1, 4, 16):
            step.micro_batches = micro_batches
            tokens = torch.randint(0, config.vocab, (B * micro_batches, T + 1), device="cuda")
            batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            for _ in range(2):
                step(batch)
            step.meter = Meter("cuda", flops_per_token(config, T), peak_flops("cuda", torch.bfloat16))
            rates = []
            for _ in range(2 if mode == "host" else 12 if micro_batches < 16 else 5):
                torch.cuda.synchronize()
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                out = step(batch)
                stop.record()
                reading = step.meter.update(batch[0].numel(), out.loss)
                torch.cuda.synchronize()
                rates.append(batch[0].numel() / start.elapsed_time(stop) * 1e3)
            reading = step.meter.finish()
            found[f"tokens_per_s, {micro_batches}"] = statistics.median(rates)
            if micro_batches == 4:
                found["mfu"] = statistics.median(rates) * step.meter.flops_per_token / step.meter.peak_flops
                found["stages_ms"] = reading.stages
                step.meter = None
                with ledger(mode) as row:
                    step(batch)
                found["ledger"] = {"launches": row.launches, "syncs": row.syncs, "copies": {k: list(v) for k, v in row.copies.items()}}
            step.meter = None
        found["accumulation_cost"] = found["tokens_per_s, 16"] / found["tokens_per_s, 1"]
        found["memory_GiB"] = torch.cuda.max_memory_allocated() / 2**30
        found["accumulator_MiB"] = arena.summary().block_bytes / 2**20
    return found


def main():
    results = {}
    for mode in MODES:
        results[mode] = one_way(mode)
        torch.cuda.empty_cache()
    rows = [(mode, *(f"{r[f'tokens_per_s, {k}'] / 1e3:,.1f}K" for k in (1, 4, 16)), f"{r['accumulation_cost']:.2f}", f"{r['mfu']:.1%}",
             f"{r['memory_GiB']:.1f}", r["ledger"]["launches"], r["ledger"]["syncs"], f"{r['ledger']['copies'].get('DtoH', [0, 0])[1] / 2**20:,.1f}")
            for mode, r in results.items()]
    print(common.table(rows, ("tokens/s with micro-batches:", "1", "4", "16", "16 : 1", "MFU (4)", "GiB", "launches", "syncs", "MiB down")))
    print("written:", common.write("train", SOURCES, results).name)


if __name__ == "__main__":
    main()
