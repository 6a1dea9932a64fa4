"""A step with LoRA against PEFT's: python benchmarks/lora.py

Needs a GPU, peft and two minutes.

llama-350m with bf16 weights that are frozen, LoRA of rank 16 and alpha 32 on queries and values;
batch 4, 4 micro-batches, T = 1024 and T = 256, AdamW with decay, clipped at 1.0. As in step.py
(step_variants.py):

torch, peft: get_peft_model; fp32 factors, as it makes them, and bf16 autocast; compiled, foreach
clip, AdamW fused and capturable, one CUDA graph.
Ours: ga.apply_lora; bf16 factors with fp32 masters, compiled, replayed.

B is zero at first, so both begin with the same loss. The limit (limits.py) is that of the frozen
model: the factors' own products are not in it.
"""

import functools

import torch
from common import Clock, record
from limits import Limit
from step import LENGTHS, OURS, B, lengths_of, step_tables
from step_variants import Ours, Peer, Task, measured
from training import build
from workers import Workers

from gpuaccel.training.lora import apply_lora

PEER = "torch, peft"
LIMIT = "limit"
RANK, ALPHA, TARGETS = 16, 32, ("w_q", "w_v")


def with_peft(config, dtype):
    """With fp32 factors beside bf16 weights. dtype: not used; a peer is asked for fp32 weights."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), lora_dropout=0.0)
    return get_peft_model(build(config, torch.bfloat16), settings)


def with_ours(config, dtype):
    return apply_lora(build(config, dtype), RANK, ALPHA, targets=TARGETS, seed=0)


def task(make, config, T: int) -> Task:
    return Task(functools.partial(make, config), config.vocab, B, T)


def measure(config, lengths=LENGTHS, here=False) -> dict:
    """T -> variant -> measurement, and beside them "limits": T -> the limit of a step."""
    variants = {}
    for T in lengths:
        variants[PEER, T] = (Peer, task(with_peft, config, T))
        variants[OURS, T] = (Ours, task(with_ours, config, T))
        variants[LIMIT, T] = (Limit, config, B, T, Task.micro_batches, False)
    clock = Clock()
    results, limits = {}, {}
    with Workers(variants, here) as workers:
        workers.ready()
        clock.say("compiled")
        for T in lengths:
            keys = [(name, T) for name in (PEER, OURS)]
            tokens = task(with_ours, config, T).tokens
            rows, _ = measured(dict.fromkeys(keys, workers), tokens, clock)
            limit = limits[str(T)] = workers.ask((LIMIT, T), "measure")
            for row in rows.values():
                row["of_limit"] = limit["ms"] / row["ms"]
            results[str(T)] = rows
    return {**results, "limits": limits}


def tables(results: dict) -> dict:
    steps, limits = lengths_of(results), results["limits"]
    return step_tables(
        {f"T={T}": rows for T, rows in steps.items()},
        {f"T={T}": limit for T, limit in limits.items()},
    )


def main():
    record("lora", measure, tables, GiB=30)


if __name__ == "__main__":
    main()
