"""A step replayed from a CUDA graph against one launched from Python: python benchmarks/graphs.py

Needs a GPU and about two minutes.

llama-350m, AdamW, clipped at 1.0. Plain torch: fp32 weights, bf16 autocast, autograd, foreach clip,
fused AdamW, nothing compiled. Ours: bf16 weights with fp32 masters in an arena, ga.AdamW, launched
and replayed.

1. Bits: 100 steps with a cosine schedule, dropout, clipping, one NaN, alternating T = 128 and 96,
   two micro-batches. Deterministic: losses and weights that differ between eager and replay, and
   between two replays. Not deterministic: how far the losses are apart.
2. Speed at batch 4, T = 1024 and 256, and at batch 1, T = 128, one micro-batch, in turns; and the
   share of the time in which the GPU works (its busy time as the profiler records it, over the time
   of a step without the profiler).
3. What the host did in one step (ledger), and for three micro-batches given as a list.
4. Memory after many replays, which run under set_sync_debug_mode("error"), and after many captures
   and closes.
5. For the notebook: host and GPU in a step of a small model, eager and replayed, and its graph as
   CUDA dumps it.
"""

import functools
import gc
import json

import torch
import torch.nn.functional as F
from common import DEVICE, Clock, record
from spans import facts, lines, whole
from tables import Column, Table, integer, number, ratio, share, thousands
from timing import in_turns, queued, release
from training import SETTINGS, build, token_batch
from workers import Workers

from gpuaccel.measure import ledger, resident_bytes
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.loop import warmup_cosine
from gpuaccel.training.models import preset
from gpuaccel.training.step import TrainStep, token_loss

# (rows, T) of a step
SHAPES = ((4, 1024), (4, 256), (1, 128))
# Steps of a turn.
CALLS = 4
PLAIN = "plain torch"
EAGER = "ours, eager"
REPLAY = "ours, replayed"
COMPILED = "ours, replayed, compiled"
# Of the comparison of bits: steps, the step whose loss is NaN, the probability of dropout.
STEPS = 100
NAN_STEP = 30
DROPOUT = 0.1


def ours(config, replay: str = "graph", **options) -> TrainStep:
    model = build(config, torch.bfloat16)
    optimizer = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
    return TrainStep(
        model,
        optimizer,
        replay=Replay(policy="require") if replay == "graph" else replay,
        **options,
    )


class Plain:
    """The step as most people write it."""

    def __init__(self, config):
        self.model = build(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **SETTINGS, fused=True)

    def __call__(self, batch):
        inputs, targets = batch
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Compiled:
    """Our replay of one shape, the model compiled."""

    def __init__(self, config, rows: int, T: int):
        self.step = ours(config, compile=True)
        self.batch = token_batch(config.vocab, rows, T)
        self.step(self.batch)

    def times(self, calls: int) -> list[float]:
        return queued(lambda: self.step(self.batch), calls)


# ---- 1: bits ------------------------------------------------------------------------------------


def trained(config, replay: str, deterministic: bool, lengths) -> dict:
    """A run with everything that changes from step to step."""
    model = build(config, torch.bfloat16)
    for block in model.blocks:
        block.register_forward_hook(lambda block, _, y: F.dropout(y, DROPOUT, block.training))
    optimizer = AdamW(Arena(model), **SETTINGS, max_norm=0.5)

    def loss_fn(model, micro_batch):
        inputs, targets, weight = micro_batch
        total, tokens = token_loss(model, (inputs, targets))
        return total * weight.mean(), tokens

    step = TrainStep(
        model,
        optimizer,
        loss_fn,
        micro_batches=2,
        scheduler=warmup_cosine(optimizer, STEPS // 10, STEPS),
        replay=Replay(policy="require") if replay == "graph" else replay,
        deterministic=deterministic,
    )
    torch.manual_seed(1)
    outs = []
    for i in range(STEPS):
        weight = torch.full((2,), float("nan") if i == NAN_STEP else 1.0, device=DEVICE)
        batch = token_batch(config.vocab, 2, lengths[i % len(lengths)], seed=i)
        outs.append(step((*batch, weight)))
    result = {
        "losses": torch.stack([out.loss for out in outs]),
        "weights": step.arena.weights.clone(),
        "skipped": int(optimizer.skipped),
        "clipped": sum(bool(out.scale < 1) for out in outs),
        "graphs": len(step.graphs) if replay == "graph" else 0,
        "rate": optimizer.param_groups[0]["lr"],
    }
    assert step.replays == replay, step.reason
    step.close()
    return result


def unequal(a: dict, b: dict) -> dict:
    """How many losses and weights differ between two runs."""
    return {
        name: int((a[name].view(torch.int32) != b[name].view(torch.int32)).sum())
        for name in ("losses", "weights")
    }


def bits(config, lengths=(128, 96)) -> dict:
    eager = trained(config, "eager", True, lengths)
    replay = trained(config, "graph", True, lengths)
    again = trained(config, "graph", True, lengths)
    result = {
        "steps": STEPS,
        "weights": eager["weights"].numel(),
        "exact": {
            "eager, replay": unequal(eager, replay),
            "replay, replay": unequal(replay, again),
        },
        **{name: replay[name] for name in ("skipped", "clipped", "graphs", "rate")},
        "losses": [float(replay["losses"][0]), float(replay["losses"][-1])],
    }
    # Free their memory.
    del eager, replay, again
    eager = trained(config, "eager", False, lengths)
    replay = trained(config, "graph", False, lengths)
    differences = (eager["losses"] - replay["losses"]).abs().tolist()
    result["free"] = {
        "apart": {str(step): differences[step - 1] for step in (STEPS // 10, STEPS // 2, STEPS)},
        "unequal": unequal(eager, replay),
    }
    return result


# ---- 2: speed -----------------------------------------------------------------------------------


def speed(steps: dict, workers: Workers, config, shapes=SHAPES) -> dict:
    """Milliseconds, tokens per second and GPU busy time, by shape and variant.

    workers: the compiled replays, by shape"""
    results = {}
    for rows, T in shapes:
        batch = token_batch(config.vocab, rows, T)
        runs = {name: functools.partial(step, batch) for name, step in steps.items()}
        for run in runs.values():
            run()
            run()
        timers = {name: functools.partial(queued, run, CALLS) for name, run in runs.items()}
        timers[COMPILED] = lambda: workers.ask((rows, T), "times", CALLS)
        times = in_turns(timers, what=f"{rows} x {T}")
        busy = {name: busy_ms(run) for name, run in runs.items()}
        row = results[f"{rows} x {T}"] = {}
        for name, ms in times.items():
            row[name] = {
                "ms": ms,
                "tokens_per_s": rows * T / ms * 1e3,
                "times_plain": times[PLAIN] / ms,
            }
            if busy.get(name):
                row[name]["gpu_busy"] = min(1.0, busy[name] / ms)
    return results


def busy_ms(run) -> float | None:
    step = facts(whole(run))
    return step["gpu_busy"] and step["gpu_busy"] * step["us"] / 1e3


# ---- 3, 4: the host, and memory -----------------------------------------------------------------


def host(steps: dict, config, rows: int, T: int) -> dict:
    """What the host did in a step."""
    batch = token_batch(config.vocab, rows, T)
    micro_batches = [token_batch(config.vocab, rows, T, seed) for seed in range(3)]
    runs = {
        "eager": lambda: steps[EAGER](batch),
        "replay": lambda: steps[REPLAY](batch),
        "a list of 3 micro-batches, replayed": lambda: steps[REPLAY](micro_batches),
    }
    results = {}
    for name, run in runs.items():
        run()
        run()
        with ledger(name) as row:
            run()
        results[name] = {
            "launches": row.launches,
            "graph_launches": row.graph_launches,
            "syncs": row.syncs,
            "copies": {kind: list(copies) for kind, copies in (row.copies or {}).items()},
        }
    return results


def memory_in_use() -> dict:
    """Bytes: tensors, torch's caching allocator, the device's, the process's on the host."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "device": total - free,
        "host": resident_bytes(),
    }


def growth(run, count: int, warm_up: int = 10) -> dict:
    """By how many bytes memory grows in `count` runs."""
    for _ in range(warm_up):
        run()
    before = memory_in_use()
    for _ in range(count):
        run()
    after = memory_in_use()
    return {"count": count, **{name: after[name] - before[name] for name in after}}


def without_waits(run):
    """run(); raises RuntimeError if the host waits in it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def memory(step: TrainStep, config, small_config, replays=(100, 1000), captures=50) -> dict:
    batch = token_batch(config.vocab, 1, min(128, config.T))
    small_batch = token_batch(small_config.vocab, 4, small_config.T)
    large = growth(lambda: without_waits(lambda: step(batch)), replays[0])
    with ours(small_config) as small_step:
        small = growth(lambda: without_waits(lambda: small_step(small_batch)), replays[1])

    def capture():
        with ours(small_config) as new_step:
            new_step(small_batch)

    return {
        "llama-350m, replays": large,
        "tiny, replays": small,
        "tiny, captures and closes": growth(capture, captures, 5),
    }


# ---- 5: for the notebook ------------------------------------------------------------------------


def pictures(config) -> dict:
    """Spans of a step, eager and replayed, and the nodes and edges of its graph."""
    batch, spans, graph = token_batch(config.vocab, 1, config.T), {}, {}
    for name, replay in (("eager", "eager"), ("replay", "graph")):
        step = ours(config, replay)
        for _ in range(5):
            step(batch)
        runs = sorted((whole(lambda: step(batch)) for _ in range(3)), key=lambda r: facts(r)["us"])
        spans[name] = lines(runs[1])
        if replay == "graph":
            names, edges = step.graphs.graph()
            graph = {"names": names, "edges": [list(edge) for edge in edges]}
        step.close()
    return {"timeline": spans, "graph": graph}


# ---- the script ---------------------------------------------------------------------------------


def measure(
    config,
    tiny,
    notebook,
    shapes=SHAPES,
    lengths=(128, 96),
    counts=((100, 1000), 50),
    here=False,
) -> dict:
    variants = {shape: (Compiled, config, *shape) for shape in shapes}
    results, clock = {}, Clock()

    def keep(**parts):
        results.update(parts)
        clock.say(json.dumps(parts)[:1200])

    with Workers(variants, here) as workers:
        # While the workers compile: nothing here is timed.
        keep(bits=bits(config, lengths))
        workers.ready()
        release()
        steps = {PLAIN: Plain(config), EAGER: ours(config, "eager"), REPLAY: ours(config)}
        keep(speed=speed(steps, workers, config, shapes))
    last_rows, last_T = shapes[-1]
    what = f"llama-350m, batch {last_rows}, T = {last_T}"
    keep(what=what, ledger=host(steps, config, last_rows, last_T))
    for name, variant in (("eager", EAGER), ("replay", REPLAY)):
        measured = results["speed"][f"{last_rows} x {last_T}"][variant]
        results["ledger"][name]["tokens_per_s"] = measured["tokens_per_s"]
    keep(**pictures(notebook))
    keep(memory=memory(steps[REPLAY], config, tiny, *counts))
    return results


def tables(results: dict) -> dict[str, Table]:
    columns = [
        Column("batch x T, step", "step"),
        Column("ms", "ms", number),
        Column("tokens/s", "tokens_per_s", thousands),
        Column("against eager torch", "times_plain", ratio),
        Column("GPU busy", "gpu_busy", share),
    ]
    rows = [
        {"step": f"{shape}: {name}", **m}
        for shape, variants in results["speed"].items()
        for name, m in variants.items()
    ]
    host = [
        Column("one step", "step"),
        Column("kernel launches", "launches", integer),
        Column("graph launches", "graph_launches", integer),
        Column("host waits", "syncs", integer),
    ]
    ledger = [{"step": name, **m} for name, m in results["ledger"].items()]
    return {"speed": Table(columns, rows), "host": Table(host, ledger), "checks": checks(results)}


def checks(results: dict) -> Table:
    """Equality and memory."""
    bits = results["bits"]
    rows = [
        {
            "what": f"{pair.replace(', ', ' and ')}, deterministic: values that differ",
            "value": f"{sum(m.values()):,} of {bits['steps'] + bits['weights']:,}",
        }
        for pair, m in bits["exact"].items()
    ]
    apart = max(bits["free"]["apart"].values())
    rows.append({"what": "eager and replay: largest difference of a loss", "value": number(apart)})
    for name, m in results["memory"].items():
        grown = max(0, m["allocated"], m["reserved"], m["device"])
        what = f"bytes by which GPU memory grows: {name}, {m['count']:,}"
        rows.append({"what": what, "value": integer(grown)})
    return Table([Column("check", "what"), Column("measured", "value")], rows)


def main():
    record(
        "graphs",
        lambda config: measure(config, preset("tiny"), preset("tiny", layers=1)),
        tables,
        GiB=70,
    )


if __name__ == "__main__":
    main()
