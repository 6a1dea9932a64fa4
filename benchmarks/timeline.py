"""Who waits for whom at the end of a step: python benchmarks/timeline.py   (needs a GPU, takes about 40 seconds)

llama-350m, bf16 with fp32 masters, one micro-batch of 4 x T = 1024, compiled, accumulated in the arena, clipped at 1.0 in three ways:
`item` (a norm per tensor to the host), `torch` (clip_grad_norm_ and torch's fused AdamW) and `fused` (inside ga.AdamW). For
each: what host and GPU did after the last backward, as spans of time. The profiler watches: the order of things, not a benchmark.
"""

import common
import torch
from workers import Workers

from gpuaccel.measure.timeline import facts, lines, tail
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.models import Transformer, preset
from gpuaccel.training.step import CLIPS, TrainStep

B, T, DEVICE = 4, 1024, "cuda"
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95)}


class Tail:
    """A step that clips in one way; in a process of its own, because compiling takes long: all ways do it side by side."""

    def __init__(self, clip: str, config, rows: int, compile: bool):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            module = Transformer(config).bfloat16()
        arena = Arena(module)
        opt = (
            AdamW(arena, weight_decay=0.1, **SETTINGS)
            if clip == "fused"
            else torch.optim.AdamW(arena.parameter_groups(0.1), fused=True, **SETTINGS)
        )
        self.step = TrainStep(module, opt, clip=clip, max_norm=1.0, compile=compile)
        tokens = torch.randint(0, config.vocab, (rows, config.T + 1), device=DEVICE)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        for _ in range(5):
            self.step(self.batch)

    def spans(self) -> dict:
        tries = sorted(
            (tail(lambda: self.step(self.batch)) for _ in range(3)),
            key=lambda spans: facts(spans)["us"],
        )
        spans = tries[len(tries) // 2]  # the median one
        return {**facts(spans), "tensors": len(self.step.arena.segments), "spans": lines(spans)}


def measure(config, rows: int, compile: bool = True, here: bool = False) -> dict:
    with Workers({clip: (Tail, clip, config, rows, compile) for clip in CLIPS}, here) as workers:
        workers.ready()
        return {clip: workers.ask(clip, "spans") for clip in CLIPS}


def main():
    config = preset("llama-350m", T=T)
    tails = measure(config, B)
    rows = [
        (
            name,
            r["tensors"],
            r["waits"],
            r["launches"],
            r["us"] / 1e3,
            f"{r['gpu_busy'] or 0:.0%}",
            len(r["spans"]),
        )
        for name, r in tails.items()
    ]
    print(common.table(rows, ("clip", "tensors", "waits", "launches", "ms", "GPU busy", "spans")))
    what = "after the last backward of llama-350m"
    print("written:", common.write("timeline", {"what": what, "tails": tails}).name)


if __name__ == "__main__":
    main()
