"""A step replayed from a CUDA graph against one launched from Python: python benchmarks/graphs.py

Needs a GPU and about two minutes.

llama-350m, AdamW, clipped at 1.0. Plain torch: fp32 weights, bf16 autocast, autograd, foreach clip,
fused AdamW, nothing compiled. Ours: bf16 weights with fp32 masters in an arena, ga.AdamW, launched
and replayed.

1. Bits: 100 steps with a cosine schedule, dropout, clipping, one NaN, alternating T = 128 and 96,
   two micro-batches. Deterministic: losses and weights that differ between eager and replay, and
   between two replays. Not deterministic: how far the losses are apart.
2. Seconds from the first call to the end of the first step (warm-up, capture, replay; 4
   micro-batches of 4 x T = 1024), each in a new process: model in eager mode, and its blocks
   compiled one by one with empty caches.
3. Speed at batch 4, T = 1024 and 256, and at batch 1, T = 128, one micro-batch, in turns; and the
   share of the time in which the GPU works (its busy time as the profiler records it, over the time
   of a step without the profiler).
4. What the host did in one step (ledger), and for three micro-batches given as a list.
5. Memory after many replays, which run under set_sync_debug_mode("error"), and after many captures
   and closes.
6. For the notebook: host and GPU in a step of a small model, eager and replayed, and its graph as
   CUDA dumps it.
"""

import functools
import gc
import json
import os
import tempfile
import time

import torch
import torch.nn.functional as F
from common import DEVICE, Clock, record, show_table
from timing import in_turns, queued, release
from training import SETTINGS, build, token_batch
from workers import Workers

from gpuaccel.measure import ledger, resident_bytes
from gpuaccel.measure.timeline import facts, lines, whole
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
WHOLE, BLOCKS = "model in eager mode", "blocks compiled one by one"
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

    def times(self, calls: int) -> "list[float]":
        return queued(lambda: self.step(self.batch), calls)


class FirstStep:
    """The first step of a process."""

    def __init__(self, config, rows: int, compiled: bool):
        self.step = ours(config, micro_batches=4)
        self.batch = token_batch(config.vocab, 4 * rows, config.T)
        if compiled:
            self.cache = tempfile.TemporaryDirectory(prefix="gpuaccel-cold-")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = self.cache.name
            os.environ["TRITON_CACHE_DIR"] = self.cache.name
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(32, os.cpu_count() or 1))
            for block in self.step.model.blocks:
                block.compile()
        torch.cuda.synchronize()

    def seconds(self) -> float:
        began = time.perf_counter()
        out = self.step(self.batch)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        assert torch.isfinite(out.loss) and self.step.replays == "graph", (
            f"first loss {out.loss}, replays by {self.step.replays}; expected a finite one, 'graph'"
        )
        return seconds


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


# ---- 3: speed -----------------------------------------------------------------------------------


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


def busy_ms(run) -> "float | None":
    step = facts(whole(run))
    return step["gpu_busy"] and step["gpu_busy"] * step["us"] / 1e3


# ---- 4, 5: the host, and memory -----------------------------------------------------------------


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


# ---- 6: for the notebook ------------------------------------------------------------------------


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
    rows=4,
    counts=((100, 1000), 50),
    here=False,
) -> dict:
    variants = {shape: (Compiled, config, *shape) for shape in shapes}
    variants[WHOLE] = (FirstStep, config, rows, False)
    variants[BLOCKS] = (FirstStep, config, rows, True)
    results, clock = {}, Clock()

    def keep(**parts):
        results.update(parts)
        clock.say(json.dumps(parts)[:1200])

    with Workers(variants, here) as workers:
        # While the workers compile: nothing here is timed.
        keep(bits=bits(config, lengths))
        workers.ready()
        release()
        keep(capture_s={name: workers.ask(name, "seconds") for name in (WHOLE, BLOCKS)})
        workers.close(WHOLE, BLOCKS)
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


def show(results: dict):
    b = results["bits"]
    print(
        f"{b['steps']} steps; different bits among {b['steps']} losses and {b['weights']:,} "
        f"weights: {b['exact']}; not deterministic: {b['free']}; clipped {b['clipped']}, "
        f"skipped {b['skipped']}, graphs {b['graphs']}"
    )
    seconds = ", ".join(f"{name} {s:.1f}" for name, s in results["capture_s"].items())
    print(f"seconds to the first step: {seconds}")
    for shape, variants in results["speed"].items():
        rows = [
            (
                name,
                m["ms"],
                f"{m['tokens_per_s']:,.0f}",
                m["times_plain"],
                f"{m['gpu_busy']:.0%}" if "gpu_busy" in m else "",
            )
            for name, m in variants.items()
        ]
        show_table(shape, rows, ("", "ms", "tokens/s", "x plain", "GPU busy"))
    rows = [
        (name, m["launches"], m["graph_launches"], m["syncs"], str(m["copies"]))
        for name, m in results["ledger"].items()
    ]
    show_table(results["what"], rows, ("", "launches", "graph launches", "waits", "copies"))
    rows = [(name, *m.values()) for name, m in results["memory"].items()]
    head = ("", "times", "allocated", "reserved", "device", "host")
    show_table("growth in bytes", rows, head)
    spans = {name: len(spans) for name, spans in results["timeline"].items()}
    print(f"\n{spans} spans, {len(results['graph']['names'])} nodes")


def main():
    record(
        "graphs",
        lambda config: measure(config, preset("tiny"), preset("tiny", layers=1)),
        show,
        GiB=70,
    )


if __name__ == "__main__":
    main()
