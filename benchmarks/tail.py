"""The tail of a step against torch: python benchmarks/tail.py

Needs a GPU and about two minutes.

The tail is what follows the last backward: add its gradients to the sums, clip at norm 1.0, AdamW,
set the sums to zero.

1. 470 M elements in 219 tensors (llama-350m with full key/value heads), fp32 weights and gradients,
   then bf16 ones with fp32 masters: ours (accumulate_v4 and ga.AdamW(arena, max_norm=1.0)), ours
   where the sums are there already (mode `fused`), torch's sequences over separate tensors, and
   torch's over one flat tensor; launched from Python and replayed from a CUDA graph. Shares are of
   the rate of a device-to-device copy in the same run, for the bytes that the job must move. Before
   each run, and not counted, a micro-batch is added.
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

from gpuaccel.compiler.kernel import zero_
from gpuaccel.ops.accumulate import CHUNK
from gpuaccel.ops.update_rule import StepInputs, launch_begin, launch_update, list_launches
from gpuaccel.optim import clip
from gpuaccel.optim.accumulation_modes import add_to_arena
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.models import preset
from gpuaccel.training.step import token_loss

OURS = "ours"
OURS_ADDED = "ours, sums there already"
MIXED = "ours, but torch's fused AdamW"
FUSED = "torch, fused AdamW"
FOREACH = "torch, foreach AdamW"
FUSED_ADDED = "torch, fused, sums there already"
FLAT = "torch, fused, one flat tensor"
# How far our weights may be from torch's after one tail.
SAME_WEIGHTS = 1e-6


class Peer:
    """torch's sequence over separate tensors: fp32 weights (of bf16 models: masters) and sums."""

    def __init__(self, weights, new_grads, **options):
        self.new_grads = new_grads
        self.weights = [torch.nn.Parameter(w.detach().float().clone()) for w in weights]
        self.bf16_weights = None
        if weights[0].dtype == torch.bfloat16:
            self.bf16_weights = [w.detach().clone() for w in weights]
        self.sums = [torch.zeros_like(w) for w in self.weights]
        for w, total in zip(self.weights, self.sums):
            w.grad = total
        self.optimizer = torch.optim.AdamW(decay_groups(self.weights), **SETTINGS, **options)

    @torch.no_grad()
    def add(self):
        torch._foreach_add_(self.sums, self.new_grads)

    @torch.no_grad()
    def update(self):
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        self.optimizer.step()
        if self.bf16_weights is not None:
            torch._foreach_copy_(self.bf16_weights, self.weights)
        torch._foreach_zero_(self.sums)

    def tail(self):
        self.add()
        self.update()


class Ours:
    """An arena whose sums are exposed as `.grad`, and new gradients of the model's dtype."""

    def __init__(self, config, dtype):
        self.arena = Arena(build(config, dtype))
        shapes = [segment.shape for segment in self.arena.segments]
        self.new_grads = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
        self.optimizer = AdamW(self.arena, **SETTINGS, max_norm=1.0)
        groups = self.arena.parameter_groups(0.1)
        self.torch_optimizer = torch.optim.AdamW(groups, **SETTINGS, fused=True, **CAPTURABLE)

    def add(self, last=False):
        add_to_arena(self.arena, 0, len(self.new_grads), self.new_grads, squares=last)
        for master, view in zip(self.arena.masters, self.arena.grad_views):
            master.grad = view

    def tail(self):
        self.add(last=True)
        self.optimizer.step()

    def mixed_tail(self):
        self.add(last=True)
        clip.clip_grad_norm_(self.arena, 1.0)
        # The arena copies the new masters to bf16.
        self.torch_optimizer.step()
        zero_(self.arena.grads)

    def stages(self) -> dict:
        """name -> function that launches one kernel of the tail."""
        self.tail()
        self.add()
        arena, rule = self.arena, self.optimizer.rule
        jobs, state = self.optimizer.jobs(), self.optimizer.device_state(arena.device)
        clip_state = self.optimizer.clip_state
        inputs = StepInputs(clip_state, None, True, None, None, state.record)

        def reduce():
            chunks = len(arena.squares.values)
            clip.launch_reduce(
                clip_state,
                arena.squares.values,
                arena.chunk_to_tensor,
                None,
                chunks,
                state.max_norm,
            )

        def begin():
            return launch_begin(rule, jobs, state.settings, inputs)

        self.add(last=True)
        reduce()
        coefficients = begin()
        v2 = list_launches(rule, jobs, stochastic=False)
        v3 = self.optimizer.layout.launches(rule, jobs, stochastic=False, all_sums=True)
        return {
            "accumulate_v3": self.add,
            "accumulate_v4": lambda: self.add(last=True),
            "squares_v2": lambda: clip.launch_squares(arena.grad_views, arena.squares.values),
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
    fused = Peer(weights, ours.new_grads, fused=True, **CAPTURABLE)
    foreach = Peer(weights, ours.new_grads, foreach=True)
    flat_weights = (arena.bf16_weights if bf16 else arena.weights).view(-1, CHUNK)
    flat_grads = torch.randn(arena.numel // CHUNK, CHUNK, device=DEVICE).to(dtype)
    flat = Peer([flat_weights], [flat_grads], fused=True, **CAPTURABLE)

    ours.tail()
    fused.tail()
    pairs = zip(arena.masters, fused.weights)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert difference < SAME_WEIGHTS and not arena.grads.any(), (
        f"after one tail our weights differ from torch's by {difference}, "
        f"expected less than {SAME_WEIGHTS:g}; sums are zero: {not arena.grads.any()}"
    )

    # Bytes per element. The norm reads the sums; AdamW reads and writes weights, moments and sums,
    # and writes bf16 weights. With the addition, which also gives the norm: new gradients are read,
    # sums are read and written.
    bf16_bytes = 2 if bf16 else 0
    added_bytes = 4 + 32 + bf16_bytes
    whole_bytes = dtype.itemsize + 8 + 32 + bf16_bytes
    results = {
        "elements": elements,
        "tensors": len(weights),
        "copy_GB_per_s": rate,
        "apart_after_one": difference,
        "bytes": {"whole": whole_bytes, "sums there already": added_bytes},
    }
    runs = {
        OURS: (ours.add, ours.tail),
        OURS_ADDED: (ours.add, ours.optimizer.step),
        MIXED: (ours.add, ours.mixed_tail),
        FUSED: (fused.add, fused.tail),
        FOREACH: (foreach.add, foreach.tail),
        FUSED_ADDED: (fused.add, fused.update),
        FLAT: (flat.add, flat.tail),
    }
    for kind in ("launched", "replayed"):
        if kind == "replayed":
            # A graph needs the step count on the device.
            foreach = Peer(weights, ours.new_grads, foreach=True, **CAPTURABLE)
            runs[FOREACH] = foreach.add, foreach.tail
            runs = {
                name: (prepare, captured(run, prepare)) for name, (prepare, run) in runs.items()
            }
        times = milliseconds_after(runs)
        results[kind] = {}
        for name, ms in times.items():
            if name in (OURS_ADDED, FUSED_ADDED):
                moved, best = added_bytes, times[FUSED_ADDED]
            else:
                moved, best = whole_bytes, min(times[FUSED], times[FOREACH])
            results[kind][name] = {
                "ms": ms,
                "of_copy_rate": moved * elements / ms / 1e6 / rate,
                "times_torch": best / ms,
            }
    stages = {name: (ours.add, captured(run, ours.add)) for name, run in ours.stages().items()}
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
