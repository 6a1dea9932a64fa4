"""Who waits for whom at the end of a step: python benchmarks/timeline.py

Needs a GPU and about half a minute.

llama-350m, bf16 with fp32 masters, one micro-batch of 4 x T = 1024, compiled, clipped at 1.0:
`torch` (clip_grad_norm_ and torch's fused AdamW) and `fused` (inside ga.AdamW). For each: what host
and GPU did after the last backward, as spans of time. The profiler slows the step down: this shows
the order of events, not how long they take.
"""

import torch
from common import record
from spans import facts, lines, tail
from tables import Column, Table, integer, number, share
from training import SETTINGS, build, token_batch
from workers import Workers

from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.step import TrainStep

CLIPS = ("torch", "fused")


class Tail:
    """A step with one kind of clipping."""

    def __init__(self, clip: str, config, rows: int, compile: bool):
        model = build(config, torch.bfloat16)
        arena = Arena(model)
        if clip == "fused":
            optimizer = AdamW(arena, **SETTINGS)
        else:
            groups = arena.parameter_groups(SETTINGS["weight_decay"])
            optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.step = TrainStep(model, optimizer, max_norm=1.0, compile=compile)
        self.batch = token_batch(config.vocab, rows, config.T)
        for _ in range(5):
            self.step(self.batch)

    def spans(self) -> dict:
        """The step of median length among three."""
        runs = [tail(lambda: self.step(self.batch)) for _ in range(3)]
        spans = sorted(runs, key=lambda spans: facts(spans)["us"])[1]
        return {**facts(spans), "tensors": len(self.step.arena.segments), "spans": lines(spans)}


def measure(config, rows: int = 4, compile: bool = True, here: bool = False) -> dict:
    with Workers({clip: (Tail, clip, config, rows, compile) for clip in CLIPS}, here) as workers:
        workers.ready()
        tails = {clip: workers.ask(clip, "spans") for clip in CLIPS}
    return {"what": "after the last backward of a Llama model", "tails": tails}


def tables(results: dict) -> dict[str, Table]:
    columns = [
        Column("clip", "clip"),
        Column("host waits", "waits", integer),
        Column("launches", "launches", integer),
        Column("us", "us", number),
        Column("GPU busy", "gpu_busy", share),
    ]
    return {"tails": Table(columns, [{"clip": name, **r} for name, r in results["tails"].items()])}


def main():
    record("timeline", measure, tables, GiB=45)


if __name__ == "__main__":
    main()
