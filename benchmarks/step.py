"""A whole optimizer step against the best that torch alone can do: python benchmarks/step.py

Needs a GPU and about a minute and a half.

llama-350m, batch 4, 4 micro-batches, T = 1024 and T = 256, AdamW with decay of matrices, clipped at
1.0.

torch: fp32 weights, bf16 autocast, model and loss compiled, foreach clip, fused AdamW with a
learning rate on the device, all of it in one CUDA graph; its gradients zeroed in place or set to
None, whichever is faster.
Ours: bf16 weights with fp32 masters in an arena, ga.AdamW, mode `fused`, compiled,
TrainStep(replay="graph"); the same with deterministic=True.
Both copy the batch in and hand the loss out in each step.

Each variant has a process of its own. All compile side by side. Then each is captured alone, which
gives its peak of allocated memory from warm-up to replay. Then those of one T are measured in
turns. Times are those of steps that are queued back to back, as in a training loop.
"""

import math
import time

import torch
import torch.nn.functional as F
from common import DEVICE, Clock, record, show_table
from timing import captured, in_turns, queued, reset_peaks
from training import SETTINGS, build, captured_adamw, token_batch
from workers import Workers

from gpuaccel.measure import peak_flops
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.models import flops_per_token
from gpuaccel.training.step import TrainStep

# Sequences of a micro-batch; micro-batches of a step.
B = 4
MICRO_BATCHES = 4
LENGTHS = (1024, 256)
# Steps of a turn.
CALLS = 4
PEER, OURS, EXACT = VARIANTS = "torch", "ours", "ours, deterministic"
# How far first losses may be apart: fp32 weights, and bf16 copies of them.
SAME_LOSS = 0.05


def batch_of(config, T: int) -> tuple:
    return token_batch(config.vocab, B * MICRO_BATCHES, T)


def measured_alone(run, began: float) -> dict:
    """Peaks of memory, seconds since capturing began, and the median time of three steps."""
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    times = sorted(queued(run, 3))
    return {
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
        "capture_s": seconds,
        "ms_alone": times[1],
    }


class Peer:
    """The whole step in torch."""

    def __init__(self, config, T: int):
        model = build(config)
        self.parameters = list(model.parameters())
        self.optimizer = captured_adamw(self.parameters)
        self.batch = batch_of(config, T)
        # What the graph reads.
        self.inputs, self.targets = (t.clone() for t in self.batch)
        self.loss = torch.zeros((), device=DEVICE)

        def loss_fn(inputs, targets):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                return loss / MICRO_BATCHES

        self.loss_fn = torch.compile(loss_fn, dynamic=False)
        self.step(to_none=False)
        self.first_loss = float(self.loss)

    def step(self, to_none: bool):
        if to_none:
            self.optimizer.zero_grad(set_to_none=True)
        self.loss.zero_()
        micro_batches = self.inputs.chunk(MICRO_BATCHES), self.targets.chunk(MICRO_BATCHES)
        for inputs, targets in zip(*micro_batches):
            loss = self.loss_fn(inputs, targets)
            loss.backward()
            self.loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        if not to_none:
            self.optimizer.zero_grad(set_to_none=False)

    def run(self):
        torch._foreach_copy_([self.inputs, self.targets], self.batch)
        self.replay()
        self.out = self.loss.clone()

    def alone(self) -> dict:
        """Capture with both ways of zeroing gradients, one at a time; keep the faster one."""
        zeroing = {"zeroed in place": False, "set to None": True}
        results = {name: self._capture(to_none) for name, to_none in zeroing.items()}
        best = min(results, key=lambda name: results[name]["ms_alone"])
        if best != list(zeroing)[-1]:
            self._capture(zeroing[best])
        return {
            **results[best],
            "gradients": best,
            "variants_ms": {name: r["ms_alone"] for name, r in results.items()},
            "first_loss": self.first_loss,
        }

    def _capture(self, to_none: bool) -> dict:
        # Frees the graph before.
        self.replay = None
        self.optimizer.zero_grad(set_to_none=True)
        reset_peaks()
        began = time.perf_counter()
        if not to_none:
            for p in self.parameters:
                p.grad = torch.zeros_like(p)
        self.replay = captured(lambda: self.step(to_none))
        return measured_alone(self.run, began)

    def times(self, calls: int) -> "list[float]":
        return queued(self.run, calls)

    def end(self) -> dict:
        return {"last_loss": float(self.out)}


class Ours:
    """The whole step in gpuaccel."""

    def __init__(self, config, T: int, deterministic: bool):
        model = build(config, torch.bfloat16)
        self.optimizer = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        self.step = TrainStep(
            model,
            self.optimizer,
            micro_batches=MICRO_BATCHES,
            accumulate="fused",
            compile=True,
            replay=Replay(policy="require"),
            deterministic=deterministic,
        )
        self.batch = batch_of(config, T)
        self.steps = 0
        # Compiles, and takes a step.
        self.run()
        self.first_loss = float(self.out.loss)

    def run(self):
        self.out = self.step(self.batch)
        self.steps += 1

    def alone(self) -> dict:
        self.step.reset()
        reset_peaks()
        began = time.perf_counter()
        # Warms up, captures, replays.
        self.run()
        return {**measured_alone(self.run, began), "first_loss": self.first_loss}

    def times(self, calls: int) -> "list[float]":
        return queued(self.run, calls)

    def end(self) -> dict:
        steps = float(self.optimizer.state[self.step.arena.masters[0]]["step"])
        skipped = int(self.optimizer.skipped)
        assert steps == self.steps and skipped == 0, (
            f"the optimizer took {steps} steps and skipped {skipped}; expected {self.steps} and 0"
        )
        return {"last_loss": float(self.out.loss)}


def measure(config, lengths=LENGTHS, here=False) -> dict:
    variants = {}
    for T in lengths:
        variants[PEER, T] = (Peer, config, T)
        variants[OURS, T] = (Ours, config, T, False)
        variants[EXACT, T] = (Ours, config, T, True)
    clock = Clock()
    with Workers(variants, here) as workers:
        workers.ready()
        alone = {}
        for name, T in variants:
            alone[name, T] = workers.ask((name, T), "alone")
            clock.say(f"{name}, T = {T}, alone: {alone[name, T]}")
        return {str(T): speed(workers, config, T, alone) for T in lengths}


def speed(workers, config, T: int, alone: dict) -> dict:
    """variant -> measurement with sequences of one length. alone: (variant, T) -> its alone()."""
    peak = peak_flops(DEVICE, torch.bfloat16)
    times = in_turns(workers.timers([(name, T) for name in VARIANTS], CALLS))
    rows = {}
    for (name, _), ms in times.items():
        rate = B * MICRO_BATCHES * T / ms * 1e3
        rows[name] = {
            "ms": ms,
            "tokens_per_s": rate,
            "times_torch": times[PEER, T] / ms,
            "mfu": rate * flops_per_token(config, T) / peak if peak else None,
            **alone[name, T],
            "memory": alone[name, T]["peak_GiB"] / alone[PEER, T]["peak_GiB"],
            **workers.ask((name, T), "end"),
        }
    first_losses = [r["first_loss"] for r in rows.values()]
    last_losses = [r["last_loss"] for r in rows.values()]
    difference = max(first_losses) - min(first_losses)
    assert difference < SAME_LOSS and all(map(math.isfinite, last_losses)), (
        f"T = {T}: first losses {first_losses}, last losses {last_losses}; "
        f"expected first ones within {SAME_LOSS:g} and finite last ones"
    )
    return rows


def show(results: dict):
    head = ("", "ms", "tokens/s", "x torch", "MFU", "peak GiB", "x torch's", "capture s")
    for T, variants in results.items():
        rows = [
            (
                name,
                f"{r['ms']:.2f}",
                f"{r['tokens_per_s'] / 1e3:,.1f}K",
                r["times_torch"],
                f"{r['mfu'] or 0:.1%}",
                f"{r['peak_GiB']:.2f}",
                r["memory"],
                f"{r['capture_s']:.1f}",
            )
            for name, r in variants.items()
        ]
        show_table(f"T = {T}; torch's gradients {variants[PEER]['gradients']}", rows, head)


def main():
    record("step", measure, show, GiB=70)


if __name__ == "__main__":
    main()
