"""The tail of a step against torch: python benchmarks/tail.py

Needs a GPU and about a minute.

The tail is what follows the last backward: clip at 1.0, AdamW, and the bf16 copy of the weights.

1. 470 M elements in 219 tensors (llama-350m with full key/value heads), fp32 weights, then bf16
   ones with fp32 masters: ga.AdamW(arena, max_norm=1.0), torch's sequences over separate tensors,
   and torch's over one flat tensor; launched from Python and replayed from a CUDA graph. Shares are
   of the rate of a device-to-device copy in the same run, for the bytes that the job must move.
   Before each run, and not counted, the fp32 gradients are restored.
2. The kernels of ours, each alone, replayed.
3. Clip and AdamW of 1,000 tensors of 1,000 elements, without an arena (16 MB stay in the L2 cache).
4. Drift: how far weights are after 100 steps from those of torch's foreach AdamW, and from AdamW in
   float64, all with the same gradients; and with each model's own gradients.
"""

import dataclasses
import gc

import torch
from clip import DTYPES, show_small, times_torch
from common import DEVICE, record, show_table
from timing import captured, copy_rate, milliseconds, milliseconds_after, wall
from training import CAPTURABLE, SETTINGS, build, decay_groups, token_batch

from gpuaccel.ops.accumulate import CHUNK
from gpuaccel.ops.update_rule import StepInputs, launch_begin, launch_update, list_launches
from gpuaccel.optim import clip
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.models import preset
from gpuaccel.training.step import token_loss

OURS = "ours"
MIXED = "ours, but torch's fused AdamW"
FUSED = "torch, fused AdamW"
FOREACH = "torch, foreach AdamW"
FLAT = "torch, fused, one flat tensor"
# How far our weights may be from torch's after one tail.
SAME_WEIGHTS = 1e-6


class Peer:
    """torch's sequence over separate tensors: fp32 weights (of bf16 models: masters) and sums."""

    def __init__(self, weights, grads, **options):
        self.grads = grads
        self.weights = [torch.nn.Parameter(w.detach().float().clone()) for w in weights]
        self.bf16_weights = None
        if weights[0].dtype == torch.bfloat16:
            self.bf16_weights = [w.detach().clone() for w in weights]
        for w in self.weights:
            w.grad = torch.zeros_like(w)
        self.optimizer = torch.optim.AdamW(decay_groups(self.weights), **SETTINGS, **options)

    @torch.no_grad()
    def restore(self):
        torch._foreach_copy_([w.grad for w in self.weights], self.grads)

    @torch.no_grad()
    def tail(self):
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        self.optimizer.step()
        if self.bf16_weights is not None:
            torch._foreach_copy_(self.bf16_weights, self.weights)


class Ours:
    """An arena with random gradients."""

    def __init__(self, config, dtype):
        self.arena = Arena(build(config, dtype))
        self.grads = [torch.randn(segment.shape, device=DEVICE) for segment in self.arena.segments]
        self.optimizer = AdamW(self.arena, **SETTINGS, max_norm=1.0)
        groups = self.arena.parameter_groups(0.1)
        self.torch_optimizer = torch.optim.AdamW(groups, **SETTINGS, fused=True, **CAPTURABLE)
        self.arena.gradients.set([True] * len(self.grads))

    def restore(self):
        torch._foreach_copy_(self.arena.gradients.views, self.grads)

    def tail(self):
        self.optimizer.step()

    def mixed_tail(self):
        clip.clip_grad_norm_(self.arena, 1.0)
        # The arena copies the new masters to bf16.
        self.torch_optimizer.step()

    def stages(self) -> dict:
        """name -> function that launches one kernel of the tail."""
        self.restore()
        self.tail()
        arena, rule = self.arena, self.optimizer.rule
        jobs, state = self.optimizer.jobs(), self.optimizer.device_state(arena.device)
        clip_state = self.optimizer.clip_state
        inputs = StepInputs(clip_state, None, True, None, None, state.record)
        squares = torch.zeros(len(arena.chunk_table), dtype=torch.float64, device=arena.device)

        def add_squares():
            clip.launch_squares(arena.gradients.views, squares)

        def reduce():
            clip.launch_reduce(
                clip_state, squares, arena.chunk_to_tensor, None, len(squares), state.max_norm
            )

        def begin():
            return launch_begin(rule, jobs, state.settings, inputs)

        add_squares()
        reduce()
        coefficients = begin()
        v2 = list_launches(rule, jobs, stochastic=False)
        v3 = self.optimizer.layout.launches(rule, jobs, stochastic=False)
        return {
            "squares_v2": add_squares,
            "reduce_v2": reduce,
            "adamw_begin": begin,
            "adamw_v2": lambda: launch_update(v2, coefficients, state.seed),
            "adamw_v3": lambda: launch_update(v3, coefficients, state.seed),
        }


def tail(config, dtype) -> dict:
    """The whole tail: milliseconds, shares of the copy rate, ratios. Our kernels: milliseconds."""
    ours = Ours(config, dtype)
    arena, bf16 = ours.arena, dtype == torch.bfloat16
    elements = sum(segment.numel for segment in arena.segments)
    rate = copy_rate(elements)
    weights = [p.detach() for p in arena.params]
    fused = Peer(weights, ours.grads, fused=True, **CAPTURABLE)
    foreach = Peer(weights, ours.grads, foreach=True)
    flat_weights = (arena.bf16_weights if bf16 else arena.weights).view(-1, CHUNK)
    ours.restore()
    flat = Peer([flat_weights], [arena.grads.view(-1, CHUNK).clone()], fused=True, **CAPTURABLE)

    ours.tail()
    fused.restore()
    fused.tail()
    pairs = zip(arena.masters, fused.weights)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert difference < SAME_WEIGHTS, (
        f"after one tail our weights differ from torch's by {difference}, "
        f"expected less than {SAME_WEIGHTS:g}"
    )

    # Bytes per element. The norm reads the gradients; AdamW reads weights, moments and gradients,
    # and writes weights, moments and bf16 weights.
    moved = 4 + 16 + 12 + (2 if bf16 else 0)
    results = {
        "elements": elements,
        "tensors": len(weights),
        "copy_GB_per_s": rate,
        "apart_after_one": difference,
        "bytes": moved,
    }
    runs = {
        OURS: (ours.restore, ours.tail),
        MIXED: (ours.restore, ours.mixed_tail),
        FUSED: (fused.restore, fused.tail),
        FOREACH: (foreach.restore, foreach.tail),
        FLAT: (flat.restore, flat.tail),
    }
    for kind in ("launched", "replayed"):
        if kind == "replayed":
            # A graph needs the step count on the device.
            foreach = Peer(weights, ours.grads, foreach=True, **CAPTURABLE)
            runs[FOREACH] = foreach.restore, foreach.tail
            runs = {
                name: (prepare, captured(run, prepare)) for name, (prepare, run) in runs.items()
            }
        times = milliseconds_after(runs)
        best = min(times[FUSED], times[FOREACH])
        results[kind] = {
            name: {
                "ms": ms,
                "of_copy_rate": moved * elements / ms / 1e6 / rate,
                "times_torch": best / ms,
            }
            for name, ms in times.items()
        }
    stages = {name: (ours.restore, captured(run)) for name, run in ours.stages().items()}
    results["stages"] = milliseconds_after(stages)

    # Every run was a step, also the replayed ones.
    steps = float(ours.optimizer.state[arena.masters[0]]["step"])
    finite = bool(torch.isfinite(arena.weights).all())
    assert int(ours.optimizer.skipped) == 0 and finite and steps > 4, (
        f"{steps} steps, {int(ours.optimizer.skipped)} skipped, weights finite: {finite}; "
        "expected more than 4, 0, True"
    )
    arena.release()
    return results


def small(count: int = 1000, size: int = 1000) -> dict:
    """Clip and AdamW of many small tensors: most of the time goes into launches."""

    def parameters():
        made = [torch.nn.Parameter(torch.randn(size, device=DEVICE)) for _ in range(count)]
        for p in made:
            p.grad = torch.randn(size, device=DEVICE)
        return made

    ours = AdamW(parameters(), **SETTINGS, max_norm=1.0)
    torch_parameters = parameters()
    fused = torch.optim.AdamW(torch_parameters, **SETTINGS, fused=True, **CAPTURABLE)

    def torch_step():
        torch.nn.utils.clip_grad_norm_(torch_parameters, 1.0, foreach=True)
        fused.step()

    runs = {"torch": torch_step, "ours": ours.step}
    times = {
        "launched": milliseconds(runs),
        "wall": {name: wall(run, 20) for name, run in runs.items()},
        "replayed": milliseconds({name: captured(run) for name, run in runs.items()}, 100),
    }
    return times_torch(times, "torch")


# ---- drift --------------------------------------------------------------------------------------


def drift(config, steps: int = 100) -> dict:
    """How far weights are apart after some steps: the largest difference, and the root mean square.

    With each model's own gradients, training amplifies a difference."""
    results = {}
    for mode, names in (
        ("same gradients", ("foreach", "fused", "ours", "float64")),
        ("own gradients", ("foreach", "fused", "ours")),
    ):
        weights = trained(config, names, mode == "own gradients", steps)
        for reference in ("foreach", "float64"):
            if reference in names:
                results[f"{mode}, from {reference}"] = {
                    name: distance(weights[name], weights[reference])
                    for name in ("foreach", "fused", "ours")
                    if name != reference
                }
    return results


def distance(weights, reference) -> "dict[str, float]":
    difference = weights - reference
    return {
        "max": float(difference.abs().max()),
        "rms": float(difference.square().mean().sqrt()),
    }


def trained(config, names, own_gradients: bool, steps: int) -> "dict[str, torch.Tensor]":
    """name -> all weights in float64. Without own_gradients, all take those of "foreach"."""
    models = {name: build(config) for name in names}
    if "float64" in models:
        models["float64"].double()
    parameters = {name: list(model.parameters()) for name, model in models.items()}
    optimizers = {}
    for name, some in parameters.items():
        if name == "ours":
            optimizers[name] = AdamW(decay_groups(some), **SETTINGS, max_norm=1.0)
        else:
            kind = {"fused": name == "fused", "foreach": name != "fused"}
            optimizers[name] = torch.optim.AdamW(decay_groups(some), **SETTINGS, **kind)
    for step in range(steps):
        batch = token_batch(config.vocab, 4, config.T, seed=step)
        # "foreach" is the first.
        for name, model in models.items():
            model.zero_grad()
            if name == "foreach" or own_gradients:
                token_loss(model, batch)[0].backward()
            else:
                for p, source in zip(parameters[name], parameters["foreach"]):
                    p.grad = source.grad.to(p.dtype, copy=True)
        for name, optimizer in optimizers.items():
            if name != "ours":
                torch.nn.utils.clip_grad_norm_(parameters[name], 1.0, foreach=True)
            optimizer.step()
    return {
        name: torch.nn.utils.parameters_to_vector(some).detach().double()
        for name, some in parameters.items()
    }


# ---- the script ---------------------------------------------------------------------------------


def measure(config) -> dict:
    config = dataclasses.replace(config, kv_heads=config.heads)
    results = {}
    for name, dtype in DTYPES.items():
        results[name] = tail(config, dtype)
        gc.collect()
    return {**results, "small": small(), "drift": drift(preset("tiny", layers=2))}


def show(results: dict):
    for dtype in DTYPES:
        r = results[dtype]
        for kind in ("launched", "replayed"):
            rows = [
                (name, m["ms"], f"{m['of_copy_rate']:.0%}", m["times_torch"])
                for name, m in r[kind].items()
            ]
            show_table(f"{dtype}, {kind}", rows, ("", "ms", "of copy rate", "x torch"))
        show_table(f"{dtype}, our kernels", list(r["stages"].items()), ("", "ms"))
    show_small(results["small"])
    rows = [
        (f"{reference}: {name}", f"{m['max']:.2e}", f"{m['rms']:.2e}")
        for reference, variants in results["drift"].items()
        for name, m in variants.items()
    ]
    show_table("drift", rows, ("", "max", "rms"))


def main():
    record("tail", measure, show, GiB=45)


if __name__ == "__main__":
    main()
