"""A step replayed from a CUDA graph against one launched from Python: python benchmarks/graphs.py

Needs a GPU and two to three minutes. Parts: bits, speed, host, memory.

llama-350m, AdamW, clipped at 1.0. Plain torch: fp32 weights, bf16 autocast, autograd, foreach clip,
fused AdamW, nothing compiled. Ours: bf16 weights with fp32 masters in an arena, ga.AdamW, launched
and replayed. Compiled steps, torch's and ours, are those of step_variants.py.

bits: 100 steps with a cosine schedule, dropout, clipping, one NaN, alternating T = 128 and 96,
two micro-batches. Deterministic: losses and weights that differ between eager and replay, and
between two replays. Not deterministic: how far the losses are apart.
speed: batch 4, T = 1024, and batch 1, T = 128, one micro-batch, in turns; and the share of the time
in which the GPU works (its busy time as the profiler records it, over the time of a step without
the profiler).
host: what the host did in one step (ledger), and for three micro-batches given as a list.
memory: after many replays, which run under set_sync_debug_mode("error"), and after many captures
and closes.
"""

import functools
import gc

import torch
import torch.nn.functional as F
from common import DEVICE, Clock, record
from step_variants import BF16, CALLS, LAUNCHED, REPLAYED, Bf16Peer, Ours, Task
from tables import Column, Table, integer, number, ratio, share, thousands
from timing import OURS, in_turns, queued
from training import SETTINGS, build, token_batch
from workers import Workers

from gpuaccel.measure import ledger, resident_bytes
from gpuaccel.measure.timeline import facts, whole
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.loop import warmup_cosine
from gpuaccel.training.models import preset
from gpuaccel.training.step import TrainStep, token_loss

# (rows, T) of a step
SHAPES = ((4, 1024), (1, 128))
PLAIN = "plain torch"
EAGER = "ours, eager"
REPLAY = "ours, replayed"
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


# ---- bits ------------------------------------------------------------------------------------


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


# ---- speed --------------------------------------------------------------------------------------


def compiled_variants(config, shapes) -> dict:
    """(shape, variant, kind) -> how it is made, for Workers; torch's is of both kinds."""
    variants = {}
    for rows, T in shapes:
        make_batch = functools.partial(token_batch, config.vocab, rows, T)
        task = Task(functools.partial(build, config), make_batch, micro_batches=1)
        shape = f"{rows} x {T}"
        variants[shape, BF16, None] = (Bf16Peer, task)
        for kind in (REPLAYED, LAUNCHED):
            variants[shape, OURS, kind] = (Ours, task, kind)
    return variants


def speed(config, shapes=SHAPES, here=False) -> dict:
    """Milliseconds, tokens per second and GPU busy time, by shape and variant."""
    clock = Clock()
    compiled: dict[str, dict] = {f"{rows} x {T}": {} for rows, T in shapes}
    # Memory is for the compiled ones or for the others.
    with Workers(compiled_variants(config, shapes), here) as workers:
        workers.ready()
        clock.say("compiled")
        for shape, times in compiled.items():
            for kind in (REPLAYED, LAUNCHED):
                keys = [key for key in workers.names if key[0] == shape and key[2] in (None, kind)]
                for key in keys:
                    workers.ask(key, "alone", kind)
                for (_, name, _), ms in in_turns(workers.timers(keys, CALLS[kind])).items():
                    times[f"{name}, {kind}, compiled"] = ms
            workers.close(*(key for key in workers.names if key[0] == shape))
            clock.say(shape)
    steps = {PLAIN: Plain(config), EAGER: ours(config, "eager"), REPLAY: ours(config)}
    results: dict[str, dict] = {}
    for (rows, T), (shape, times) in zip(shapes, compiled.items()):
        batch = token_batch(config.vocab, rows, T)
        runs = {name: functools.partial(step, batch) for name, step in steps.items()}
        for run in runs.values():
            run()
            run()
        timers = {n: functools.partial(queued, run, CALLS[REPLAYED]) for n, run in runs.items()}
        times = {**in_turns(timers), **times}
        busy = {name: busy_ms(run) for name, run in runs.items()}
        results[shape] = {
            name: {
                "ms": ms,
                "tokens_per_s": rows * T / ms * 1e3,
                "times_plain": times[PLAIN] / ms,
                "gpu_busy": min(1.0, busy[name] / ms) if busy.get(name) else None,
            }
            for name, ms in times.items()
        }
        clock.say(shape)
    return results


def busy_ms(run) -> float | None:
    step = facts(whole(run))
    return step["gpu_busy"] and step["gpu_busy"] * step["us"] / 1e3


# ---- the host, and memory -----------------------------------------------------------------------


def host(config, rows: int = 1, T: int = 128) -> dict:
    """What the host did in a step."""
    eager, replay = ours(config, "eager"), ours(config)
    batch = token_batch(config.vocab, rows, T)
    micro_batches = [token_batch(config.vocab, rows, T, seed) for seed in range(3)]
    runs = {
        "eager": lambda: eager(batch),
        "replay": lambda: replay(batch),
        "a list of 3 micro-batches, replayed": lambda: replay(micro_batches),
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


def memory(config, small_config=None, replays=(100, 1000), captures=50) -> dict:
    small_config = small_config or preset("tiny")
    batch = token_batch(config.vocab, 1, min(128, config.T))
    small_batch = token_batch(small_config.vocab, 4, small_config.T)
    with ours(config) as step:
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


# ---- the script ---------------------------------------------------------------------------------

PARTS = {"bits": bits, "speed": speed, "host": host, "memory": memory}


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
        for shape, variants in results.get("speed", {}).items()
        for name, m in variants.items()
    ]
    host = [
        Column("one step", "step"),
        Column("kernel launches", "launches", integer),
        Column("graph launches", "graph_launches", integer),
        Column("host waits", "syncs", integer),
    ]
    ledger = [{"step": name, **m} for name, m in results.get("host", {}).items()]
    return {"speed": Table(columns, rows), "host": Table(host, ledger), "checks": checks(results)}


def checks(results: dict) -> Table:
    """Equality and memory."""
    rows = []
    if bits := results.get("bits"):
        for pair, m in bits["exact"].items():
            what = f"{pair.replace(', ', ' and ')}, deterministic: values that differ"
            of = bits["steps"] + bits["weights"]
            rows.append({"what": what, "value": f"{sum(m.values()):,} of {of:,}"})
        apart = number(max(bits["free"]["apart"].values()))
        rows.append({"what": "eager and replay: largest difference of a loss", "value": apart})
    for name, m in results.get("memory", {}).items():
        grown = max(0, m["allocated"], m["reserved"], m["device"])
        what = f"bytes by which GPU memory grows: {name}, {m['count']:,}"
        rows.append({"what": what, "value": integer(grown)})
    return Table([Column("check", "what"), Column("measured", "value")], rows)


def main():
    record("graphs", PARTS, tables, GiB=70)


if __name__ == "__main__":
    main()
