"""Layers and whole steps of poly-7m on the GPU, in our operations and in torch's, and on the CPU: the third part of dispatch.py."""

import contextlib
import copy
import functools
import math
import os
import time

import torch
from timing import OURS, apart, gradients, random, release, timed_alike, times_ours
from torch_layers import COMPILED, EAGER, TorchStep, in_torch
from workers import in_turns, queued

from gpuaccel.backends import use_backend
from gpuaccel.nn.poly_attention import PolyAttention
from gpuaccel.nn.richards_glu import RichardsGLU
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.models import preset
from gpuaccel.training.step import TrainStep

DEVICE = "cuda"
BATCHES = {f"batch {B}": (B,) for B in (4, 32, 64)}
REPLAYED, CPU = "torch.compile, replayed", "CPU"
APART, CPU_ROWS, CALLS = (
    5e-2,
    2,
    10,
)  # of gradients in bf16, by norm; the CPU's sequences at a time; steps in a row


def layers_of(config, **options) -> dict:
    """name -> the layer, as the model makes it."""
    torch.manual_seed(0)
    return {
        "RichardsGLU": RichardsGLU(config.hidden, config.intermediate, **options),
        "PolyAttention": PolyAttention(
            config.hidden,
            config.heads,
            config.degree,
            config.window,
            max_positions=config.T,
            **options,
        ),
    }


def batch_of(config, B: int, device):
    tokens = torch.randint(
        0, config.vocab, (B, config.T + 1), generator=torch.Generator().manual_seed(1)
    ).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def our_step(model, *, betas=(0.9, 0.95), **options) -> TrainStep:
    opt = AdamW(Arena(model), lr=3e-4, betas=betas, weight_decay=0.1, max_norm=1.0)
    return TrainStep(model, opt, accumulate="fused", **options)


class Layers:
    """Layers and steps of one batch on the GPU."""

    def __init__(self, B: int, config=None):
        self.B, self.config = B, config or preset("poly-7m")
        self.layers = layers_of(self.config, device=DEVICE, dtype=torch.bfloat16)
        self.p2p = {name: in_torch(copy.deepcopy(layer)) for name, layer in self.layers.items()}
        self.compiled = {
            name: torch.compile(layer, dynamic=False) for name, layer in self.p2p.items()
        }
        for name in self.layers:
            self.runs(name)[COMPILED]()
        self.compiled_step = TorchStep(self.config, batch_of(self.config, B, DEVICE), compiled=True)
        self.compiled_step()
        self.first = float(self.compiled_step.loss)
        self.compiled_step.opt.zero_grad(set_to_none=True)
        release()

    def runs(self, layer: str) -> dict:
        """way -> forward and backward, gradients of x and every parameter."""
        x, dy = (random(self.B, self.config.T, self.config.hidden, seed=seed) for seed in (1, 2))
        x.requires_grad_()
        ways = {OURS: self.layers[layer], EAGER: self.p2p[layer], COMPILED: self.compiled[layer]}
        return {
            name: lambda way=way: gradients(lambda: way(x), (x, *way.parameters()), dy)
            for name, way in ways.items()
        }

    def layer(self, name: str) -> dict:
        runs = self.runs(name)
        mine, theirs = runs[OURS]()[0], runs[EAGER]()[0]
        error = apart(mine, theirs)
        assert error < APART, f"{name}: the gradients of x are {error:.1e} apart"
        del mine, theirs
        release()
        ms, launched, refused = timed_alike(runs, launched=True)
        return {"ms": ms, "launched_ms": launched, "cannot_be_captured": refused, "apart": error}

    def measure(self) -> dict:
        result = {name: self.layer(name) for name in self.layers}
        batch = batch_of(self.config, self.B, DEVICE)
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = self.config.build().bfloat16()
        step, eager = (
            our_step(model, replay=Replay(policy="require")),
            TorchStep(self.config, batch, compiled=False),
        )
        eager()
        first = {OURS: float(step(batch).loss), EAGER: float(eager.loss), COMPILED: self.first}
        runs = {OURS: lambda: step(batch), EAGER: eager, COMPILED: self.compiled_step}
        ms = in_turns({name: lambda run=run: queued(run, CALLS) for name, run in runs.items()}, 2)
        last = {EAGER: float(eager.loss), COMPILED: float(self.compiled_step.loss)}
        del eager, runs
        release()
        runs = {OURS: lambda: step(batch), REPLAYED: self.compiled_step.replayed()}
        ms |= in_turns({name: lambda run=run: queued(run, CALLS) for name, run in runs.items()}, 2)
        last |= {OURS: float(step(batch).loss), REPLAYED: float(self.compiled_step.loss)}
        self.compiled_step.recording.close()
        skipped = int(step.opt.skipped)
        far = max(first.values()) - min(first.values())
        assert far < 0.05 and all(map(math.isfinite, last.values())) and skipped == 0, (
            f"first losses {first}, last ones {last}, {skipped} skipped"
        )
        return result | {
            "step": {
                "ms": ms,
                "tokens": self.B * self.config.T,
                "first_loss": first,
                "last_loss": last,
            }
        }


def on_the_cpu(found: dict, cases=None, config=None) -> dict:
    """Adds the CPU's milliseconds to each batch's result: all cores, by the host's clock, the better of two calls. Then how many times ours all are."""
    config, cores = (
        config or preset("poly-7m"),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )
    torch.set_num_threads(cores)
    with use_backend("torch", "off"):
        torch.manual_seed(0)
        model, layers = config.build(), layers_of(config)
        began = time.perf_counter()
        for case in found:
            B = (cases or BATCHES)[case][0]
            batch, x = batch_of(config, B, "cpu"), torch.randn(B, config.T, config.hidden)
            step = our_step(model, micro_batches=max(1, B // CPU_ROWS))
            runs = {
                name: functools.partial(_by_rows, layer, x) for name, layer in layers.items()
            } | {"step": lambda: step(batch)}
            for name, run in runs.items():
                row = found[case][name]
                row["ms"][CPU] = min(_host_ms(run) for _ in range(2))
                row["times"] = times_ours(row["ms"])
            step.close()
            print(f"{time.perf_counter() - began:5.1f} s: {case} on {cores} cores", flush=True)
    return found | {"cores": cores, "cpu": _processor()}


def _by_rows(layer, x):
    for some in x.split(CPU_ROWS):
        some = some.detach().requires_grad_()
        gradients(lambda: layer(some), (some, *layer.parameters()), torch.ones_like(some))


def _host_ms(run) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next(
            (line.split(":")[1].strip() for line in file if line.startswith("model name")),
            "unknown",
        )
    return "unknown"
