"""A whole optimizer step against the best that torch alone can do: python benchmarks/step.py   (needs a GPU, takes about a minute and a half)

llama-350m, batch 4, 4 micro-batches, T = 1024 and T = 256, AdamW with decay of matrices, clipped at 1.0. The peer is written out below: fp32
weights, bf16 autocast, model and loss compiled, foreach clip, fused AdamW with a learning rate on the device, all of it in one CUDA graph; its
gradients zeroed in place or set to None, whichever is faster. Ours: bf16 weights with fp32 masters in an arena, ga.AdamW, mode `fused`, compiled,
TrainStep(replay="graph"); the same with deterministic=True. The batch is copied in and the loss handed out in each step of both.

Each variant has a process of its own: all compile side by side, then each is captured alone, which gives its peak of allocated memory from warm-up to
replay, then those of one T take turns. Times are those of steps that are queued one behind the other, as in a training loop.
"""

import gc
import math
import time

import common
import torch
import torch.nn.functional as F
from workers import Workers, in_turns, queued

from gpuaccel.measure import peak_flops
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.models import Transformer, flops_per_token, preset
from gpuaccel.training.step import TrainStep

DEVICE, CAPTURABLE = "cuda", {"capturable": True}
B, MICRO_BATCHES, LENGTHS, CALLS = 4, 4, (1024, 256), 4
PEER, OURS, EXACT = "torch", "ours", "ours, deterministic"
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def data(config, T: int):
    tokens = torch.randint(
        0,
        config.vocab,
        (B * MICRO_BATCHES, T + 1),
        device=DEVICE,
        generator=torch.Generator(DEVICE).manual_seed(1),
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def captured(run):
    """The replay of a CUDA graph of run()."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def peaks() -> dict:
    return {
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
    }


def fresh_peaks():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


class Peer:
    """The whole step in torch."""

    def __init__(self, config, T: int):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = Transformer(config)
        self.parameters = list(model.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2]},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.opt = torch.optim.AdamW(
            groups,
            **{**SETTINGS, "lr": torch.tensor(SETTINGS["lr"], device=DEVICE)},
            fused=True,
            **CAPTURABLE,
        )
        self.batch = data(config, T)
        self.inputs, self.targets = (t.clone() for t in self.batch)  # what the graph reads

        def loss_fn(inputs, targets):
            with torch.autocast(DEVICE, torch.bfloat16):
                return (
                    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / MICRO_BATCHES
                )

        self.loss_fn, self.loss = (
            torch.compile(loss_fn, dynamic=False),
            torch.zeros((), device=DEVICE),
        )
        self.step(to_none=False)
        self.first = float(self.loss)

    def step(self, to_none: bool):
        if to_none:
            self.opt.zero_grad(set_to_none=True)
        self.loss.zero_()
        for inputs, targets in zip(
            self.inputs.chunk(MICRO_BATCHES), self.targets.chunk(MICRO_BATCHES)
        ):
            loss = self.loss_fn(inputs, targets)
            loss.backward()
            self.loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.opt.step()
        if not to_none:
            self.opt.zero_grad(set_to_none=False)

    def run(self):
        torch._foreach_copy_([self.inputs, self.targets], self.batch)
        self.replay()
        self.out = self.loss.clone()

    def alone(self) -> dict:
        """Captured in both ways, one at a time; the faster one stays."""
        ways = {"zeroed in place": False, "set to None": True}
        found = {name: self._capture(to_none) for name, to_none in ways.items()}
        best = min(found, key=lambda name: found[name]["ms_alone"])
        if best != list(ways)[-1]:
            self._capture(ways[best])
        return {
            **found[best],
            "gradients": best,
            "ways_ms": {name: r["ms_alone"] for name, r in found.items()},
            "first_loss": self.first,
        }

    def _capture(self, to_none) -> dict:
        self.replay = None  # an earlier graph goes
        self.opt.zero_grad(set_to_none=True)
        fresh_peaks()
        began = time.perf_counter()
        if not to_none:
            for p in self.parameters:
                p.grad = torch.zeros_like(p)
        self.replay = captured(lambda: self.step(to_none))
        torch.cuda.synchronize()
        seconds, times = time.perf_counter() - began, sorted(queued(self.run, 3))
        return {**peaks(), "capture_s": seconds, "ms_alone": times[1]}

    def times(self, calls: int) -> "list[float]":
        return queued(self.run, calls)

    def end(self) -> dict:
        return {"last_loss": float(self.out)}


class Ours:
    """The whole step in gpuaccel."""

    def __init__(self, config, T: int, deterministic: bool):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = Transformer(config).bfloat16()
        self.opt = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        self.step = TrainStep(
            model,
            self.opt,
            micro_batches=MICRO_BATCHES,
            accumulate="fused",
            compile=True,
            replay=Replay(policy="require"),
            deterministic=deterministic,
        )
        self.batch, self.taken = data(config, T), 0
        self.run()  # compiles, and takes a step
        self.first = float(self.out.loss)

    def run(self):
        self.out = self.step(self.batch)
        self.taken += 1

    def alone(self) -> dict:
        self.step.reset()
        fresh_peaks()
        began = time.perf_counter()
        self.run()  # warms up, captures, replays
        torch.cuda.synchronize()
        seconds, times = time.perf_counter() - began, sorted(queued(self.run, 3))
        return {**peaks(), "capture_s": seconds, "ms_alone": times[1], "first_loss": self.first}

    def times(self, calls: int) -> "list[float]":
        return queued(self.run, calls)

    def end(self) -> dict:
        taken, skipped = (
            float(self.opt.state[self.step.arena.masters[0]]["step"]),
            int(self.opt.skipped),
        )
        assert taken == self.taken and skipped == 0, (
            f"{self.taken} steps were asked for, {taken} were taken and {skipped} skipped"
        )
        return {"last_loss": float(self.out.loss)}


def measure(config, lengths=LENGTHS, here=False) -> dict:
    variants = {
        (name, T): (Peer, config, T) if name == PEER else (Ours, config, T, name == EXACT)
        for T in lengths
        for name in (PEER, OURS, EXACT)
    }
    found, alone, peak, began = {}, {}, peak_flops(DEVICE, torch.bfloat16), time.perf_counter()
    with Workers(variants, here) as workers:
        workers.ready()
        for key in variants:
            alone[key] = workers.ask(key, "alone")
            print(
                f"{time.perf_counter() - began:5.1f} s: {key[0]}, T = {key[1]}, alone: {alone[key]}",
                flush=True,
            )
        for T in lengths:
            times = in_turns(
                {
                    name: lambda name=name: workers.ask((name, T), "times", CALLS)
                    for name in (PEER, OURS, EXACT)
                }
            )
            rows = found[str(T)] = {}
            for name, ms in times.items():
                rate = B * MICRO_BATCHES * T / ms * 1e3
                rows[name] = {
                    "ms": ms,
                    "tokens_per_s": rate,
                    "times_torch": times[PEER] / ms,
                    "mfu": rate * flops_per_token(config, T) / peak if peak else None,
                    **alone[name, T],
                    "memory": alone[name, T]["peak_GiB"] / alone[PEER, T]["peak_GiB"],
                    **workers.ask((name, T), "end"),
                }
            losses = [(r["first_loss"], r["last_loss"]) for r in rows.values()]
            apart = max(
                abs(first - losses[0][0]) for first, _ in losses
            )  # the same model and batch: fp32 weights, and bf16 copies of them
            assert apart < 0.05 and all(math.isfinite(last) for _, last in losses), (
                f"first and last losses at T={T}: {losses}"
            )
    return found


def main():
    results = measure(preset("llama-350m"))
    for T, rows in results.items():
        lines = [
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
            for name, r in rows.items()
        ]
        print(
            f"\nT = {T}; torch's gradients {rows[PEER]['gradients']}\n"
            + common.table(
                lines,
                ("", "ms", "tokens/s", "x torch", "MFU", "peak GiB", "x torch's", "capture s"),
            )
        )
    print("\nwritten:", common.write("step", results).name)


if __name__ == "__main__":
    main()
