"""A step captured in a CUDA graph against the same step launched from Python: python benchmarks/graphs.py   (needs a GPU, takes about two minutes)

llama-350m, AdamW, clipped at 1.0. The peer: plain torch, fp32 weights, bf16 autocast, autograd, foreach clip, fused AdamW, nothing compiled. Ours:
bf16 weights with fp32 masters in an arena, ga.AdamW; launched in mode `arena` (TrainStep's default), replayed in mode `fused`.

1. Bits: 100 steps with a cosine schedule, dropout, clipping, one NaN, alternating T = 128 and 96, two micro-batches; deterministic: eager against replay
   and replay against replay, losses and weights that are not equal; otherwise: how far the losses are apart.
2. Seconds from the first call to the end of the first step (warm-up, capture, replay; 4 micro-batches of 4 x T = 1024), each in a new process: model
   in eager mode, and its blocks compiled one by one with empty caches.
3. Speed at batch 4, T = 1024 and 256, and at batch 1, T = 128, one micro-batch, in turns; and the share of the time in which the GPU works (its busy
   time as the profiler records it, of the step's time without the profiler).
4. What the host did in one step (ledger), and for three micro-batches given as a list.
5. Memory after many replays (which run under set_sync_debug_mode("error")), and after many captures and closes.
6. For the notebook: host and GPU in a step of a small model, eager and replayed, and its graph as CUDA dumps it.
"""

import gc
import json
import os
import tempfile
import time

import common
import torch
import torch.nn.functional as F
from workers import Workers, in_turns, queued

from gpuaccel.measure import ledger, resident_bytes
from gpuaccel.measure.timeline import facts, lines, whole
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.loop import warmup_cosine
from gpuaccel.training.models import Transformer, preset
from gpuaccel.training.step import TrainStep, token_loss

DEVICE = "cuda"
SHAPES, CALLS = ((4, 1024), (4, 256), (1, 128)), 4
PLAIN, EAGER, REPLAY, COMPILED = (
    "plain torch",
    "ours, eager",
    "ours, replayed",
    "ours, replayed, compiled",
)
WHOLE, BLOCKS = "model in eager mode", "blocks compiled one by one"
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
STEPS, POISONED, DROPOUT = 100, 30, 0.1


def data(config, rows: int, T: int, seed: int = 1):
    tokens = torch.randint(
        0,
        config.vocab,
        (rows, T + 1),
        device=DEVICE,
        generator=torch.Generator(DEVICE).manual_seed(seed),
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(config, dtype=torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Transformer(config).to(dtype)


def ours(config, replay: str = "graph", accumulate: str = "fused", **how) -> TrainStep:
    model = build(config)
    return TrainStep(
        model,
        AdamW(Arena(model), **SETTINGS, max_norm=1.0),
        replay=Replay(policy="require") if replay == "graph" else "eager",
        accumulate=accumulate,
        **how,
    )


class Plain:
    """The step as most people write it."""

    def __init__(self, config):
        self.model = build(config, torch.float32)
        self.opt = torch.optim.AdamW(self.model.parameters(), **SETTINGS, fused=True)

    def __call__(self, batch):
        inputs, targets = batch
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()


class Compiled:
    """Our replay of one shape, the model compiled; in a process of its own, because compiling takes long."""

    def __init__(self, config, rows: int, T: int):
        self.step, self.batch = ours(config, compile=True), data(config, rows, T)
        self.step(self.batch)

    def times(self, calls: int) -> "list[float]":
        return queued(lambda: self.step(self.batch), calls)


class First:
    """A step that nobody has taken, in a process that has taken none."""

    def __init__(self, config, rows: int, compiled: bool):
        self.step, self.batch = ours(config, micro_batches=4), data(config, 4 * rows, config.T)
        if compiled:
            self.cache = tempfile.TemporaryDirectory(prefix="gpuaccel-cold-")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = self.cache.name
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(32, os.cpu_count() or 1))
            for block in self.step.model.blocks:
                block.compile()
        torch.cuda.synchronize()

    def seconds(self) -> float:
        began = time.perf_counter()
        out = self.step(self.batch)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        assert torch.isfinite(out.loss) and self.step.replays == "graph"
        return seconds


# ---- 1: the same bits -----------------------------------------------------------------------------------------------


def trained(config, replay: str, exact: bool, lengths) -> dict:
    """A run with everything that changes from step to step."""
    model = build(config)
    for block in model.blocks:
        block.register_forward_hook(lambda block, given, y: F.dropout(y, DROPOUT, block.training))
    opt = AdamW(Arena(model), **SETTINGS, max_norm=0.5)

    def loss_fn(model, micro):
        inputs, targets, weight = micro
        total, tokens = token_loss(model, (inputs, targets))
        return total * weight.mean(), tokens

    step = TrainStep(
        model,
        opt,
        loss_fn,
        micro_batches=2,
        accumulate="fused",
        scheduler=warmup_cosine(opt, STEPS // 10, STEPS),
        replay=Replay(policy="require") if replay == "graph" else "eager",
        deterministic=exact,
    )
    torch.manual_seed(1)
    outs = []
    for i in range(STEPS):
        weight = torch.full((2,), float("nan") if i == POISONED else 1.0, device=DEVICE)
        outs.append(step((*data(config, 2, lengths[i % len(lengths)], i), weight)))
    found = {
        "losses": torch.stack([out.loss for out in outs]),
        "weights": step.arena.weights.clone(),
        "skipped": int(opt.skipped),
        "clipped": sum(bool(out.scale < 1) for out in outs),
        "graphs": len(step.graphs) if replay == "graph" else 0,
        "rate": opt.param_groups[0]["lr"],
    }
    assert step.replays == replay, step.reason
    step.close()
    return found


def unequal(one, two) -> dict:
    return {
        name: int((one[name].view(torch.int32) != two[name].view(torch.int32)).sum())
        for name in ("losses", "weights")
    }


def bits(config, lengths=(128, 96)) -> dict:
    eager, replay, again = (
        trained(config, how, True, lengths) for how in ("eager", "graph", "graph")
    )
    found = {
        "steps": STEPS,
        "weights": eager["weights"].numel(),
        "exact": {
            "eager, replay": unequal(eager, replay),
            "replay, replay": unequal(replay, again),
        },
        **{name: replay[name] for name in ("skipped", "clipped", "graphs", "rate")},
        "losses": [float(replay["losses"][0]), float(replay["losses"][-1])],
    }
    del eager, replay, again
    one, two = (trained(config, how, False, lengths) for how in ("eager", "graph"))
    apart = (one["losses"] - two["losses"]).abs().tolist()
    found["free"] = {
        "apart": {str(at): apart[at - 1] for at in (STEPS // 10, STEPS // 2, STEPS)},
        "unequal": unequal(one, two),
    }
    return found


# ---- 3: speed -------------------------------------------------------------------------------------------------------


def speed(steps: dict, ask, config, shapes=SHAPES) -> dict:
    """Milliseconds, tokens per second and busy GPU by shape and way. ask(shape, calls): times of the compiled replay."""
    found = {}
    for rows, T in shapes:
        batch = data(config, rows, T)
        runs = {name: lambda step=step: step(batch) for name, step in steps.items()}
        for run in runs.values():
            run(), run()
        takers = {name: lambda run=run: queued(run, CALLS) for name, run in runs.items()}
        times = in_turns({**takers, COMPILED: lambda: ask((rows, T), CALLS)})
        busy = {name: _busy_ms(run) for name, run in runs.items()}
        found[f"{rows} x {T}"] = {
            name: {
                "ms": ms,
                "tokens_per_s": rows * T / ms * 1e3,
                "times_plain": times[PLAIN] / ms,
                **({"gpu_busy": min(1.0, busy[name] / ms)} if busy.get(name) else {}),
            }
            for name, ms in times.items()
        }
    return found


def _busy_ms(run) -> "float | None":
    found = facts(whole(run))
    return found["gpu_busy"] and found["gpu_busy"] * found["us"] / 1e3


# ---- 4, 5: what the host did, what stays in memory --------------------------------------------------------------------


def host(steps: dict, config, rows: int, T: int) -> dict:
    batch, micros = data(config, rows, T), [data(config, rows, T, seed) for seed in range(3)]
    runs = {
        "eager": lambda: steps[EAGER](batch),
        "replay": lambda: steps[REPLAY](batch),
        "a list of 3 micro-batches, replayed": lambda: steps[REPLAY](micros),
    }
    found = {}
    for name, run in runs.items():
        run(), run()
        with ledger(name) as row:
            run()
        found[name] = {
            "launches": row.launches,
            "graph_launches": row.graph_launches,
            "syncs": row.syncs,
            "copies": {k: list(v) for k, v in (row.copies or {}).items()},
        }
    return found


def held() -> dict:
    """Bytes: torch's own, torch's with what it keeps for later, everybody's on the device, this process's on the host."""
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
    before = held()
    for _ in range(count):
        run()
    after = held()
    return {"count": count, **{name: after[name] - before[name] for name in after}}


def without_waits(run):
    """run(); a RuntimeError if the host waits in it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def memory(large: TrainStep, config, small_config, replays=(100, 1000), captures=50) -> dict:
    batch, little = data(config, 1, min(128, config.T)), data(small_config, 4, small_config.T)
    with ours(small_config) as small:
        found = {
            "llama-350m, replays": growth(lambda: without_waits(lambda: large(batch)), replays[0]),
            "tiny, replays": growth(lambda: without_waits(lambda: small(little)), replays[1]),
        }

    def capture():
        with ours(small_config) as step:
            step(little)

    return {**found, "tiny, captures and closes": growth(capture, captures, 5)}


# ---- 6: for the notebook ----------------------------------------------------------------------------------------------


def pictures(config) -> dict:
    """Spans of a step, eager and replayed, and the nodes and edges of its graph."""
    batch, spans = data(config, 1, config.T), {}
    for name, step in (
        ("eager", ours(config, "eager", "arena")),
        ("replay", ours(config, "graph", "arena")),
    ):
        for _ in range(5):
            step(batch)
        tries = sorted(
            (whole(lambda: step(batch)) for _ in range(3)), key=lambda spans: facts(spans)["us"]
        )
        spans[name] = lines(tries[1])
        if name == "replay":
            names, edges = step.graphs.graph()
        step.close()
    return {"timeline": spans, "graph": {"names": names, "edges": [list(edge) for edge in edges]}}


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
    variants |= {WHOLE: (First, config, rows, False), BLOCKS: (First, config, rows, True)}
    results, began, last = {}, time.perf_counter(), shapes[-1]

    def keep(**found):
        results.update(found)
        print(f"{time.perf_counter() - began:5.1f} s:", json.dumps(found)[:1200], flush=True)

    with Workers(variants, here) as workers:
        keep(bits=bits(config, lengths))  # while the others compile: nothing here is timed
        workers.ready()
        if not here:
            gc.collect()
            torch.cuda.empty_cache()
        keep(capture_s={name: workers.ask(name, "seconds") for name in (WHOLE, BLOCKS)})
        workers.close(WHOLE, BLOCKS)
        steps = {PLAIN: Plain(config), EAGER: ours(config, "eager", "arena"), REPLAY: ours(config)}
        keep(
            speed=speed(
                steps, lambda shape, calls: workers.ask(shape, "times", calls), config, shapes
            )
        )
    keep(what=f"llama-350m, batch {last[0]}, T = {last[1]}", ledger=host(steps, config, *last))
    for name, way in (("eager", EAGER), ("replay", REPLAY)):
        results["ledger"][name]["tokens_per_s"] = results["speed"][f"{last[0]} x {last[1]}"][way][
            "tokens_per_s"
        ]
    keep(**pictures(notebook))
    keep(memory=memory(steps[REPLAY], config, tiny, *counts))
    return results


def main():
    results = measure(preset("llama-350m"), preset("tiny"), preset("tiny", layers=1))
    r = results["bits"]
    print(
        f"{r['steps']} steps, not equal of {r['steps']} losses and {r['weights']:,} weights: {r['exact']}; not deterministic: {r['free']}; "
        f"clipped {r['clipped']}, skipped {r['skipped']}, graphs {r['graphs']}"
    )
    print(
        "seconds to the first step: "
        + ", ".join(f"{name} {s:.1f}" for name, s in results["capture_s"].items())
    )
    for shape, rows in results["speed"].items():
        lines = [
            (
                name,
                m["ms"],
                f"{m['tokens_per_s']:,.0f}",
                m["times_plain"],
                f"{m['gpu_busy']:.0%}" if "gpu_busy" in m else "",
            )
            for name, m in rows.items()
        ]
        print(f"\n{shape}\n" + common.table(lines, ("", "ms", "tokens/s", "x plain", "GPU busy")))
    print(
        "\n"
        + common.table(
            [
                (name, m["launches"], m["graph_launches"], m["syncs"], str(m["copies"]))
                for name, m in results["ledger"].items()
            ],
            ("", "launches", "graph launches", "waits", "copies"),
        )
    )
    print(
        "\ngrowth in bytes\n"
        + common.table(
            [(name, *m.values()) for name, m in results["memory"].items()],
            ("", "times", "allocated", "reserved", "device", "host"),
        )
    )
    print(
        f"\n{ {name: len(spans) for name, spans in results['timeline'].items()} } spans, {len(results['graph']['names'])} nodes"
    )
    print("written:", common.write("graphs", results).name)


if __name__ == "__main__":
    main()
