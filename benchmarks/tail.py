"""The tail of a step against torch: python benchmarks/tail.py

Needs a GPU and about a minute.

The tail is what follows the last backward: clip at 1.0, AdamW, and the bf16 copy of the weights.

470 M elements in 219 tensors (llama-350m with full key/value heads), fp32 weights, then bf16 ones
with fp32 masters: ga.AdamW(arena, max_norm=1.0), and torch's sequences over separate tensors;
launched from Python and replayed from a CUDA graph. Shares are of the rate of a device-to-device
copy in the same run, for the bytes that the job must move. Before each run, and not counted, the
fp32 gradients are restored.
"""

import dataclasses
import functools

import torch
from clip import DTYPES
from common import DEVICE, record
from tables import Column, Table, number, ratio, share
from timing import captured, copy_rate, milliseconds_after
from training import CAPTURABLE, SETTINGS, build, decay_groups

from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena

OURS = "ours"
FUSED = "torch, fused AdamW"
FOREACH = "torch, foreach AdamW"
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
        self.arena.gradients.set([True] * len(self.grads))

    def restore(self):
        torch._foreach_copy_(self.arena.gradients.views, self.grads)

    def tail(self):
        self.optimizer.step()


def tail(dtype, config) -> dict:
    """The whole tail: milliseconds, shares of the copy rate, ratios. Our kernels: milliseconds."""
    ours = Ours(dataclasses.replace(config, kv_heads=config.heads), dtype)
    arena, bf16 = ours.arena, dtype == torch.bfloat16
    elements = sum(segment.numel for segment in arena.segments)
    rate = copy_rate(elements)
    weights = [p.detach() for p in arena.module_parameters]
    fused = Peer(weights, ours.grads, fused=True, **CAPTURABLE)
    foreach = Peer(weights, ours.grads, foreach=True)

    ours.restore()
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
        FUSED: (fused.restore, fused.tail),
        FOREACH: (foreach.restore, foreach.tail),
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

    # Every run was a step, also the replayed ones.
    steps = float(ours.optimizer.state[arena.masters[0]]["step"])
    finite = bool(torch.isfinite(arena.weights).all())
    assert int(ours.optimizer.skipped) == 0 and finite and steps >= 4, (
        f"{steps} steps, {int(ours.optimizer.skipped)} skipped, weights finite: {finite}; "
        "expected at least 4, 0, True"
    )
    arena.release()
    return results


# ---- the script ---------------------------------------------------------------------------------


PARTS = {name: functools.partial(tail, dtype) for name, dtype in DTYPES.items()}


def tables(results: dict) -> dict[str, Table]:
    columns = [
        Column("weights, by", "by"),
        Column("ms", "ms", number),
        Column("of copy rate", "of_copy_rate", share),
        Column("against torch", "times_torch", ratio),
        Column("launched: ms", "launched", number),
    ]
    rows = [
        {"by": f"{dtype}: {name}", **m, "launched": results[dtype]["launched"][name]["ms"]}
        for dtype in DTYPES
        for name, m in results.get(dtype, {}).get("replayed", {}).items()
    ]
    return {"tail": Table(columns, rows)}


def main():
    record("tail", PARTS, tables, GiB=45)


if __name__ == "__main__":
    main()
