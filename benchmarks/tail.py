"""The tail of a step against torch: python benchmarks/tail.py   (needs a GPU, takes about two minutes)

The tail is what follows the last backward: add its gradients to the sums, clip at norm 1.0, AdamW, set the sums to zero.

1. 470 M elements in 219 tensors (llama-350m with full key/value heads), fp32 weights and gradients, then bf16 ones with fp32 masters: ours
   (accumulate_v4 and ga.AdamW(arena, max_norm=1.0)), ours where the sums are there already (mode `fused`), torch's sequences over tensors of
   their own, and torch's over one flat tensor; launched from Python and replayed from a CUDA graph. Shares are of the rate of a
   device-to-device copy measured in the same run, on the bytes that the job must move. Before each run, and not counted, a micro-batch is added.
2. The stages of ours, each alone, replayed.
3. Clip and AdamW of 1,000 tensors of 1,000 elements, without an arena (16 MB: they stay in the L2 cache).
4. Drift: how far weights are after 100 steps from those of torch's foreach AdamW, and from AdamW in float64, all with the same gradients;
   and with each model's own gradients.
"""

import gc

import common
import torch
from clip import build, captured, copy_rate, in_turns, wall

from gpuaccel.compiler.kernel import zero_
from gpuaccel.ops.accumulate import CHUNK
from gpuaccel.ops.update_rule import StepInputs, launch_begin, launch_update, list_launches
from gpuaccel.optim import clip
from gpuaccel.optim.accumulation_modes import add_to_arena
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.models import preset
from gpuaccel.training.step import token_loss

DEVICE, CAPTURABLE = "cuda", {"capturable": True}
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
OURS, THERE, MIXED = "ours", "ours, sums there already", "ours, but torch's fused AdamW"
FUSED, FOREACH, FUSED_THERE, FLAT = (
    "torch, fused AdamW",
    "torch, foreach AdamW",
    "torch, fused, sums there already",
    "torch, fused, one flat tensor",
)


def groups(parameters) -> "list[dict]":
    """Weight decay for matrices only, as an arena does it."""
    return [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


class Peer:
    """torch's sequence over tensors of its own: fp32 weights (for bf16 models: masters) and sums."""

    def __init__(self, weights, fresh, **how):
        self.fresh, self.weights = (
            fresh,
            [torch.nn.Parameter(w.detach().float().clone()) for w in weights],
        )
        self.low = (
            [w.detach().clone() for w in weights] if weights[0].dtype == torch.bfloat16 else None
        )
        self.sums = [torch.zeros_like(w) for w in self.weights]
        for w, total in zip(self.weights, self.sums):
            w.grad = total
        self.opt = torch.optim.AdamW(
            [g for g in groups(self.weights) if g["params"]], **SETTINGS, **how
        )

    @torch.no_grad()
    def add(self):
        torch._foreach_add_(self.sums, self.fresh)

    @torch.no_grad()
    def rest(self):
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        self.opt.step()
        if self.low:
            torch._foreach_copy_(self.low, self.weights)
        torch._foreach_zero_(self.sums)

    def tail(self):
        self.add()
        self.rest()


class Ours:
    """An arena whose `.grad`s are its sums, as a GradientAccumulator presents them, and fresh gradients of the model's dtype."""

    def __init__(self, config, dtype):
        self.arena = Arena(build(config, dtype))
        self.fresh = [torch.randn(s.shape, device=DEVICE).to(dtype) for s in self.arena.segments]
        self.opt = AdamW(self.arena, **SETTINGS, max_norm=1.0)
        self.theirs = torch.optim.AdamW(
            self.arena.parameter_groups(0.1), **SETTINGS, fused=True, **CAPTURABLE
        )

    def add(self, last=False):
        add_to_arena(self.arena, 0, len(self.fresh), self.fresh, squares=last)
        for owner, view in zip(self.arena.masters, self.arena.grad_views):
            owner.grad = view

    def tail(self):
        self.add(last=True)
        self.opt.step()

    def mixed(self):
        self.add(last=True)
        clip.clip_grad_norm_(self.arena, 1.0)
        self.theirs.step()  # and the arena publishes bf16 copies
        zero_(self.arena.grads)

    def stages(self) -> dict:
        """name -> function, each kernel of the tail alone."""
        self.tail()
        self.add()
        arena, rule = self.arena, self.opt.rule
        jobs, state = self.opt.jobs(), self.opt.device_state(arena.device)
        found = self.opt.clip_state
        inputs = StepInputs(found, None, True, None, None, state.record)

        def reduce():
            clip.launch_reduce(
                found,
                arena.squares.values,
                arena.chunk_to_tensor,
                None,
                len(arena.squares.values),
                state.max_norm,
            )

        def begin():
            return launch_begin(rule, jobs, state.settings, inputs)

        self.add(last=True)
        reduce()
        coefficients = begin()
        v2 = list_launches(rule, jobs, stochastic=False)
        v3 = self.opt.layout.launches(rule, jobs, stochastic=False, all_sums=True)
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
    """Milliseconds, shares of the copy rate and ratios of the whole tail; milliseconds of the stages of ours."""
    mine = Ours(config, dtype)
    arena, elements, low = (
        mine.arena,
        sum(s.numel for s in mine.arena.segments),
        2 * (dtype == torch.bfloat16),
    )
    rate, weights = copy_rate(elements), [p.detach() for p in arena.params]
    flat = (
        (arena.bf16_weights if low else arena.weights).view(-1, CHUNK),
        torch.randn(arena.numel // CHUNK, CHUNK, device=DEVICE).to(dtype),
    )
    fused, foreach = (
        Peer(weights, mine.fresh, fused=True, **CAPTURABLE),
        Peer(weights, mine.fresh, foreach=True),
    )
    one = Peer([flat[0]], [flat[1]], fused=True, **CAPTURABLE)
    runs = {
        OURS: (mine.add, mine.tail),
        THERE: (mine.add, mine.opt.step),
        MIXED: (mine.add, mine.mixed),
        FUSED: (fused.add, fused.tail),
        FOREACH: (foreach.add, foreach.tail),
        FUSED_THERE: (fused.add, fused.rest),
        FLAT: (one.add, one.tail),
    }
    there, whole = (
        4 + 32 + low,
        12 - low + 32 + low,
    )  # bytes per element: norm, AdamW with clearing and a bf16 copy; the addition for the norm
    mine.tail()
    fused.tail()
    apart = max(float((a - b).detach().abs().max()) for a, b in zip(arena.masters, fused.weights))
    assert apart < 1e-6 and not arena.grads.any(), (
        f"after one tail our weights and torch's are {apart} apart"
    )
    found = {
        "elements": elements,
        "tensors": len(weights),
        "copy_GB_per_s": rate,
        "apart_after_one": apart,
        "bytes": {"whole": whole, "sums there already": there},
    }
    for kind in ("launched", "replayed"):
        if kind == "replayed":
            foreach = Peer(
                weights, mine.fresh, foreach=True, **CAPTURABLE
            )  # a graph needs its step count on the device
            runs[FOREACH] = foreach.add, foreach.tail
            runs = {
                name: (prepare, captured(run, prepare)) for name, (prepare, run) in runs.items()
            }
        times = in_turns(runs)
        best = {whole: min(times[FUSED], times[FOREACH]), there: times[FUSED_THERE]}
        found[kind] = {}
        for name, ms in times.items():
            moved = there if name in (THERE, FUSED_THERE) else whole
            found[kind][name] = {
                "ms": ms,
                "of_copy_rate": moved * elements / ms / 1e6 / rate,
                "times_torch": best[moved] / ms,
            }
    found["stages"] = in_turns(
        {name: (mine.add, captured(run, mine.add)) for name, run in mine.stages().items()}
    )
    taken = float(
        mine.opt.state[arena.masters[0]]["step"]
    )  # replays count as well: every run was a step
    assert int(mine.opt.skipped) == 0 and bool(torch.isfinite(arena.weights).all()) and taken > 4, (
        f"{taken} steps were taken"
    )
    arena.release()
    return found


def small(count: int = 1000, size: int = 1000) -> dict:
    """Clip and AdamW of many small tensors: the work is in the launches."""
    both = [
        [torch.nn.Parameter(torch.randn(size, device=DEVICE)) for _ in range(count)]
        for _ in range(2)
    ]
    for parameters in both:
        for p in parameters:
            p.grad = torch.randn(size, device=DEVICE)
    ours, theirs = (
        AdamW(both[0], **SETTINGS, max_norm=1.0),
        torch.optim.AdamW(both[1], **SETTINGS, fused=True, **CAPTURABLE),
    )

    def torch_step():
        torch.nn.utils.clip_grad_norm_(both[1], 1.0, foreach=True)
        theirs.step()

    runs = {"torch": torch_step, "ours": ours.step}
    times = {
        "launched": common.milliseconds(runs),
        "wall": {name: wall(run, 20) for name, run in runs.items()},
        "replayed": common.milliseconds({name: captured(run) for name, run in runs.items()}, 100),
    }
    return {
        kind: {name: {"ms": ms, "times_torch": rows["torch"] / ms} for name, ms in rows.items()}
        for kind, rows in times.items()
    }


def drift(config, steps: int = 100) -> dict:
    """How far weights are apart after some steps: the farthest, and the root of the mean square."""
    found = {}
    for mode in (
        "same gradients",
        "own gradients",
    ):  # the second also shows what training makes of a difference
        models = {
            name: build(config, torch.float32)
            for name in ("foreach", "fused", "ours", "float64")[
                : 4 if mode == "same gradients" else 3
            ]
        }
        if "float64" in models:
            models["float64"].double()
        lists = {name: list(model.parameters()) for name, model in models.items()}
        opts = {
            name: AdamW(groups(some), **SETTINGS, max_norm=1.0)
            if name == "ours"
            else torch.optim.AdamW(
                groups(some), **SETTINGS, fused=name == "fused", foreach=name != "fused"
            )
            for name, some in lists.items()
        }
        generator = torch.Generator(DEVICE).manual_seed(2)
        for _ in range(steps):
            tokens = torch.randint(
                0, config.vocab, (4, config.T + 1), device=DEVICE, generator=generator
            )
            for name, model in models.items():  # foreach comes first
                model.zero_grad()
                if name == "foreach" or mode == "own gradients":
                    token_loss(model, (tokens[:, :-1], tokens[:, 1:]))[0].backward()
                else:
                    for p, first in zip(lists[name], lists["foreach"]):
                        p.grad = first.grad.to(p.dtype, copy=True)
            for name, opt in opts.items():
                if name != "ours":
                    torch.nn.utils.clip_grad_norm_(lists[name], 1.0, foreach=True)
                opt.step()
        weights = {
            name: torch.nn.utils.parameters_to_vector(some).detach().double()
            for name, some in lists.items()
        }
        for of in [name for name in ("foreach", "float64") if name in weights]:
            apart = {
                name: weights[name] - weights[of]
                for name in ("foreach", "fused", "ours")
                if name != of
            }
            found[f"{mode}, from {of}"] = {
                name: {"max": float(d.abs().max()), "rms": float(d.square().mean().sqrt())}
                for name, d in apart.items()
            }
    return found


def main():
    config = preset("llama-350m", kv_heads=16)
    results = {}
    for dtype in ("float32", "bfloat16"):
        results[dtype] = tail(config, getattr(torch, dtype))
        gc.collect()
    results |= {"small": small(), "drift": drift(preset("tiny", layers=2))}
    for dtype in ("float32", "bfloat16"):
        r = results[dtype]
        for kind in ("launched", "replayed"):
            rows = [
                (name, m["ms"], f"{m['of_copy_rate']:.0%}", m["times_torch"])
                for name, m in r[kind].items()
            ]
            print(
                f"\n{dtype}, {kind}\n" + common.table(rows, ("", "ms", "of copy rate", "x torch"))
            )
        print(f"\n{dtype}, stages of ours\n" + common.table(list(r["stages"].items()), ("", "ms")))
    rows = [
        (name, kind, m["ms"], m["times_torch"])
        for kind, names in results["small"].items()
        for name, m in names.items()
    ]
    print("\nmany small tensors\n" + common.table(rows, ("", "", "ms", "x torch")))
    rows = [
        (f"{kind}, {name}", f"{m['max']:.2e}", f"{m['rms']:.2e}")
        for kind, names in results["drift"].items()
        for name, m in names.items()
    ]
    print("\ndrift\n" + common.table(rows, ("", "max", "rms")))
    print("\nwritten:", common.write("tail", results).name)


if __name__ == "__main__":
    main()
