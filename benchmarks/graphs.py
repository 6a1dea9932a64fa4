"""A step replayed from a CUDA graph against one launched from Python: python benchmarks/graphs.py

Needs a GPU and two minutes. Parts: speed, host.

llama-350m, AdamW, clipped at 1.0. Plain torch: fp32 weights, bf16 autocast, autograd, foreach clip,
fused AdamW, nothing compiled. Ours: bf16 weights with fp32 masters in an arena, ga.AdamW, launched
and replayed. Compiled steps, torch's and ours, are those of step_variants.py.

speed: batch 4, T = 1024, and batch 1, T = 128, one micro-batch, in turns; and the share of the time
in which the GPU works (its busy time as the profiler records it, over the time of a step without
the profiler).
host: what the host did in one step (ledger), and for three micro-batches given as a list.
"""

import functools

import torch
import torch.nn.functional as F
from common import DEVICE, Clock, record
from step_variants import BF16, CALLS, LAUNCHED, REPLAYED, Bf16Peer, Ours, Task
from tables import Column, Table, integer, number, ratio, share, thousands
from timing import OURS, in_turns, queued
from traces import busy_ms
from training import SETTINGS, build, token_batch
from workers import Workers

from gpuaccel.measure import ledger
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.step import TrainStep

# (rows, T) of a step
SHAPES = ((4, 1024), (1, 128))
PLAIN = "plain torch"
EAGER = "ours, eager"
REPLAY = "ours, replayed"


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


# ---- speed --------------------------------------------------------------------------------------


def compiled_variants(config, shapes) -> dict:
    """(shape, variant, kind) -> how it is made, for Workers; torch's is of both kinds (None)."""
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
    all_runs = {}
    for (rows, T), (shape, times) in zip(shapes, compiled.items()):
        batch = token_batch(config.vocab, rows, T)
        runs = {name: functools.partial(step, batch) for name, step in steps.items()}
        for run in runs.values():
            run()
            run()
        timers = {n: functools.partial(queued, run, CALLS[REPLAYED]) for n, run in runs.items()}
        times = {**in_turns(timers), **times}
        results[shape] = {
            name: {"ms": ms, "tokens_per_s": rows * T / ms * 1e3, "times_plain": times[PLAIN] / ms}
            for name, ms in times.items()
        }
        all_runs[shape] = runs
        clock.say(shape)
    # Behind all timings: once the profiler has run, launches take longer.
    for shape, runs in all_runs.items():
        for name, run in runs.items():
            if busy := busy_ms(run):
                results[shape][name]["gpu_busy"] = min(1.0, busy / results[shape][name]["ms"])
    return results


# ---- the host ------------------------------------------------------------------------------------


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


# ---- the script ---------------------------------------------------------------------------------

PARTS = {"speed": speed, "host": host}


def tables(results: dict) -> dict[str, Table]:
    columns = [
        Column("batch x T, step", "step"),
        Column("ms", "ms", number),
        Column("tokens/s", "tokens_per_s", thousands),
        Column("against plain torch", "times_plain", ratio),
        Column("against compiled torch", "times_compiled", ratio),
        Column("GPU busy", "gpu_busy", share),
    ]
    rows = []
    for shape, variants in results.get("speed", {}).items():
        for name, m in variants.items():
            peer = variants.get(name.replace(OURS, "torch, bf16 weights"))
            compared = peer and peer is not m
            times = {"times_compiled": peer["ms"] / m["ms"]} if compared else {}
            rows.append({"step": f"{shape}: {name.replace('eager', LAUNCHED)}", **m, **times})
    host = [
        Column("one step", "step"),
        Column("kernel launches", "launches", integer),
        Column("graph launches", "graph_launches", integer),
        Column("host waits", "syncs", integer),
    ]
    names = {"eager": "launched", "replay": "replayed"}
    ledger = [{"step": names.get(name, name), **m} for name, m in results.get("host", {}).items()]
    return {"speed": Table(columns, rows), "host": Table(host, ledger)}


def main():
    record("graphs", PARTS, tables, GiB=70)


if __name__ == "__main__":
    main()
