"""Without a GPU: clipping and AdamW, and whole training steps, beside torch's own.

    python benchmarks/cpu.py

Needs no GPU, leaves one that is there alone, and takes about a minute.

The peer is the fastest way in torch that we know on a CPU: a fused AdamW, foreach clipping, and a
loop that adds up the gradients of the micro-batches in `.grad`.
"""

import copy
import functools
import os

import common
import torch
from tables import Column, Table, number, ratio
from timing import host_milliseconds, in_turns
from training import SETTINGS, build, decay_groups, token_batch

import gpuaccel as ga

MICRO_BATCHES, ROWS, T = 4, 8, 64
ROUNDS = 60


def milliseconds(functions: dict) -> dict:
    """Median time of each function; they run in turns, after three calls that are not timed."""
    for function in functions.values():
        for _ in range(3):
            function()
    timers = {name: lambda f=f: [host_milliseconds(f)] for name, f in functions.items()}
    return in_turns(timers, ROUNDS)


def measure_tail(config) -> dict:
    """Clipping and AdamW of all parameters of a model, with gradients whose norm is too large."""
    model = build(config, device="cpu")
    for parameter in model.parameters():
        parameter.grad = 1e-2 * torch.randn_like(parameter)
    other = copy.deepcopy(model)
    for parameter, twin in zip(model.parameters(), other.parameters()):
        twin.grad = parameter.grad.clone()
    torch_adamw = torch.optim.AdamW(decay_groups(other.parameters()), **SETTINGS, fused=True)
    our_adamw = ga.AdamW(decay_groups(model.parameters()), **SETTINGS)

    def by_torch():
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        torch_adamw.step()

    def by_ours():
        ga.clip_grad_norm_(model.parameters(), 1.0)
        our_adamw.step()

    return milliseconds({"torch": by_torch, "ours": by_ours})


def torch_step(config):
    """A function that takes one step as a careful script does."""
    model = build(config, device="cpu")
    optimizer = torch.optim.AdamW(decay_groups(model.parameters()), **SETTINGS, fused=True)
    inputs, targets = token_batch(config.vocab, ROWS, T, device="cpu")
    tokens = targets.numel()

    def step():
        for x, y in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)):
            logits = model(x)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), y.flatten(), reduction="sum"
            )
            (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(config):
    """A function that takes one step of TrainStep."""
    model = build(config, device="cpu")
    optimizer = ga.AdamW(ga.Arena(model), **SETTINGS, max_norm=1.0)
    step = ga.TrainStep(model, optimizer, micro_batches=MICRO_BATCHES)
    batch = token_batch(config.vocab, ROWS, T, device="cpu")
    return lambda: step(batch)


def measure(threads: int) -> dict:
    config = ga.preset("tiny")
    torch.set_num_threads(threads)
    step = milliseconds({"torch": torch_step(config), "ours": our_step(config)})
    return {"clipping and AdamW": measure_tail(config), "step": step}


PARTS = {
    "1 thread": functools.partial(measure, 1),
    "2 threads": functools.partial(measure, 2),
}


def tables(results: dict) -> dict[str, Table]:
    columns = [
        Column("what", "what"),
        Column("torch, ms", "torch", number),
        Column("ours, ms", "ours", number),
        Column("against torch", "ratio", ratio),
    ]
    rows = [
        {
            "what": f"{what}, {threads}",
            **ms,
            "ratio": ms["torch"] / ms["ours"],
        }
        for threads, measured in results.items()
        for what, ms in measured.items()
    ]
    return {"cpu": Table(columns, rows)}


def main():
    # Before torch looks for a GPU.
    os.environ["GPUACCEL_GPU"] = "off"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    common.record("cpu", PARTS, tables)


if __name__ == "__main__":
    main()
