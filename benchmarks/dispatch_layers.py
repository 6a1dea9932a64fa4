"""Part 3 of dispatch.py: layers and whole steps of poly-7m, ours, torch's and the CPU's."""

import copy
import functools
import math
import os

import torch
from common import DEVICE, Clock, processor
from timing import (
    OURS,
    gradients,
    host_milliseconds,
    in_turns,
    queued,
    random,
    ratios_to_ours,
    relative_error,
    release,
    timed_alike,
)
from torch_layers import COMPILED, EAGER, TorchStep, in_torch
from training import SETTINGS, build, token_batch

from gpuaccel.backends import use_backend
from gpuaccel.nn.poly_attention import PolyAttention
from gpuaccel.nn.richards_glu import RichardsGLU
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.models import preset
from gpuaccel.training.step import TrainStep

BATCHES = {f"batch {B}": (B,) for B in (4, 32, 64)}
REPLAYED, CPU = "torch.compile, replayed", "CPU"
# How far gradients in bf16 may be from torch's, by norm.
GRADIENT_ERROR = 5e-2
# Sequences that the CPU takes at a time.
CPU_ROWS = 2
# Steps of a turn.
CALLS = 10


def layers_of(config, **options) -> dict:
    """name -> the layer, as the model makes it."""
    torch.manual_seed(0)
    glu = RichardsGLU(config.hidden, config.intermediate, **options)
    attention = PolyAttention(
        config.hidden,
        config.heads,
        config.degree,
        config.window,
        max_positions=config.T,
        **options,
    )
    return {"RichardsGLU": glu, "PolyAttention": attention}


def our_step(model, **options) -> TrainStep:
    optimizer = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
    return TrainStep(model, optimizer, **options)


def step_times(runs: dict) -> dict[str, float]:
    return in_turns({name: functools.partial(queued, run, CALLS) for name, run in runs.items()}, 2)


class Layers:
    """Layers and steps of one batch on the GPU."""

    def __init__(self, B: int, config=None):
        self.B = B
        self.config = config or preset("poly-7m")
        self.batch = token_batch(self.config.vocab, B, self.config.T)
        self.layers = layers_of(self.config, device=DEVICE, dtype=torch.bfloat16)
        self.eager = {name: in_torch(copy.deepcopy(layer)) for name, layer in self.layers.items()}
        self.compiled = {
            name: torch.compile(layer, dynamic=False) for name, layer in self.eager.items()
        }
        for name in self.layers:
            self.runs(name)[COMPILED]()
        self.compiled_step = TorchStep(self.config, self.batch, compiled=True)
        self.compiled_step()
        self.first_loss = float(self.compiled_step.loss)
        self.compiled_step.optimizer.zero_grad(set_to_none=True)
        release()

    def runs(self, layer: str) -> dict:
        """variant -> forward and backward, gradients of x and every parameter."""
        x, dy = (random(self.B, self.config.T, self.config.hidden, seed=seed) for seed in (1, 2))
        x.requires_grad_()
        variants = {
            OURS: self.layers[layer],
            EAGER: self.eager[layer],
            COMPILED: self.compiled[layer],
        }
        return {
            name: lambda variant=variant: gradients(
                lambda: variant(x), (x, *variant.parameters()), dy
            )
            for name, variant in variants.items()
        }

    def layer(self, name: str) -> dict:
        runs = self.runs(name)
        error = relative_error(runs[OURS]()[0], runs[EAGER]()[0])
        assert error < GRADIENT_ERROR, (
            f"{name}: the gradient of x is {error:.1e} from torch's, "
            f"expected less than {GRADIENT_ERROR:g}"
        )
        release()
        ms, launched, refused = timed_alike(runs, launched=True)
        return {"ms": ms, "launched_ms": launched, "cannot_be_captured": refused, "apart": error}

    def measure(self) -> dict:
        return {**{name: self.layer(name) for name in self.layers}, "step": self.step()}

    def step(self) -> dict:
        """A whole step: first those launched from Python, then the replayed ones."""
        model = build(self.config, torch.bfloat16)
        step = our_step(model, replay=Replay(policy="require"))
        ours = functools.partial(step, self.batch)
        compiled, eager = self.compiled_step, TorchStep(self.config, self.batch, compiled=False)
        eager()
        first = {OURS: float(ours().loss), EAGER: float(eager.loss), COMPILED: self.first_loss}
        ms = step_times({OURS: ours, EAGER: eager, COMPILED: compiled})
        last = {EAGER: float(eager.loss), COMPILED: float(compiled.loss)}
        del eager
        release()
        ms |= step_times({OURS: ours, REPLAYED: compiled.replayed()})
        last |= {OURS: float(ours().loss), REPLAYED: float(compiled.loss)}
        compiled.recording.close()
        skipped = int(step.optimizers[0].skipped)
        difference = max(first.values()) - min(first.values())
        assert difference < 0.05 and all(map(math.isfinite, last.values())) and skipped == 0, (
            f"first losses {first}, last losses {last}, {skipped} steps skipped; "
            "expected first ones within 0.05, finite last ones, none skipped"
        )
        tokens = self.B * self.config.T
        return {"ms": ms, "tokens": tokens, "first_loss": first, "last_loss": last}


# ---- the CPU ------------------------------------------------------------------------------------


def on_the_cpu(results: dict, cases=None, config=None) -> dict:
    """Add the CPU's milliseconds to each batch's result, and all variants' ratios to ours.

    All cores, by the host's clock: the better of two calls of the first batch, and one call of each
    larger one, for which nothing is cold any more."""
    config = config or preset("poly-7m")
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    clock = Clock()
    with use_backend("torch", "off"):
        model, layers = build(config, device="cpu"), layers_of(config)
        first = next(iter(results))
        for case, parts in results.items():
            B = (cases or BATCHES)[case][0]
            batch = token_batch(config.vocab, B, config.T, device="cpu")
            x = torch.randn(B, config.T, config.hidden)
            step = our_step(model, micro_batches=max(1, B // CPU_ROWS))
            runs = {name: functools.partial(by_rows, layer, x) for name, layer in layers.items()}
            runs["step"] = lambda: step(batch)
            for name, run in runs.items():
                ms = parts[name]["ms"]
                ms[CPU] = min(host_milliseconds(run) for _ in range(2 if case == first else 1))
                parts[name]["times"] = ratios_to_ours(ms)
            step.close()
            step.arena.release()
            clock.say(f"{case} on {cores} cores")
    return {**results, "cores": cores, "cpu": processor()}


def by_rows(layer, x):
    """Forward and backward, CPU_ROWS sequences at a time."""
    for rows in x.split(CPU_ROWS):
        rows = rows.detach().requires_grad_()
        gradients(lambda: layer(rows), (rows, *layer.parameters()), torch.ones_like(rows))
