"""This version against another one: python benchmarks/versions.py --other FOLDER

Needs a GPU and about two minutes. FOLDER holds gpuaccel/ and kernels_cu/ of the other version:

    mkdir ../other && git archive REVISION gpuaccel kernels_cu | tar -x -C ../other

llama-350m in bf16, batch 4, 4 micro-batches, AdamW clipped at 1.0: a compiled step replayed at
T = 1024 and 256, the same launched at T = 256, the optimizer's step launched and replayed, and the
host's time for one launch. Then the bits: losses and weights of short deterministic runs, eager and
replayed.

Each version has a process of its own; they measure in turns. Ratios are this version's time over
the other's.
"""

import argparse
import concurrent.futures
import gc
import hashlib
import pathlib
import sys

# Nothing of gpuaccel: each process imports its own version, in Version.__init__.
from common import DEVICE, show_table
from fingerprints import ROOT
from workers import Workers

B = 4
MICRO_BATCHES = 4
# Turns of each version, and calls of a turn.
ROUNDS = 6
CALLS = 6
LAUNCHES = 2000
LONG, SHORT = 1024, 256
STEPS = 8
BITS_T = 64
NOW, OTHER = "now", "other"
KERNEL = 'extern "C" __global__ void nothing(float* x, int n) {}'


class Version:
    """What one version does, in a process of its own. folder: holds its gpuaccel/."""

    def __init__(self, folder: str, preset: str, bits_preset: str):
        sys.path.insert(0, folder)
        import gpuaccel

        assert pathlib.Path(gpuaccel.__file__).parent.parent == pathlib.Path(folder), (
            f"gpuaccel is that of {gpuaccel.__file__}, expected {folder}"
        )
        self.config = gpuaccel.preset(preset)
        self.bits_config = gpuaccel.preset(bits_preset)
        self.step = None

    def prepare(self, what: str, T: int):
        """Make self.run, for times(). what: "step", "launched step", "tail", "launched tail"."""
        import torch
        from timing import captured
        from training import SETTINGS, build, token_batch

        from gpuaccel.optim import AdamW, Arena
        from gpuaccel.training import Replay, TrainStep

        self.run = None
        if self.step is not None:
            self.step.close()
        self.step = None
        torch._dynamo.reset()
        # The step before is in cycles of references.
        gc.collect()
        torch.cuda.empty_cache()
        model = build(self.config, torch.bfloat16)
        optimizer = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        self.step = TrainStep(
            model,
            optimizer,
            micro_batches=MICRO_BATCHES,
            compile=what == "step",
            replay=Replay(policy="require") if what == "step" else "eager",
        )
        batch = token_batch(self.config.vocab, B * MICRO_BATCHES, T)
        self.step(batch)
        if what.endswith("step"):
            self.run = lambda: self.step(batch)
            return self.run()

        def tail():
            # Gradients of zero are all the work that others are.
            for master, view in zip(optimizer.arena.masters, optimizer.arena.gradients.views):
                master.grad = view
            optimizer.step()

        self.run = tail if what == "launched tail" else captured(tail)
        return None

    def times(self, calls: int) -> "list[float]":
        from timing import queued

        return queued(self.run, calls)

    def host_times(self, calls: int) -> "list[float]":
        """Milliseconds of the host for each run; the device is waited for between them."""
        import torch
        from timing import host_milliseconds

        times = []
        for _ in range(calls):
            torch.cuda.synchronize()
            times.append(host_milliseconds(self.run))
        return times

    def launch_microseconds(self) -> "list[float]":
        import torch
        from timing import host_milliseconds, repeat

        import gpuaccel

        kernel, x = gpuaccel.compile(KERNEL), torch.zeros(8, device=DEVICE)
        launch = kernel[1, 32]
        launch(x, 8)
        torch.cuda.synchronize()
        many = host_milliseconds(lambda: repeat(lambda: launch(x, 8), LAUNCHES))
        torch.cuda.synchronize()
        return [many / LAUNCHES * 1e3]

    def bits(self, replay: str) -> str:
        """A hash of all losses and of the weights after some deterministic steps."""
        import torch
        from training import SETTINGS, build, token_batch

        from gpuaccel.optim import AdamW, Arena
        from gpuaccel.training import Replay, TrainStep

        model = build(self.bits_config, torch.bfloat16)
        optimizer = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        digest = hashlib.sha256()
        with TrainStep(
            model,
            optimizer,
            micro_batches=2,
            deterministic=True,
            compile=replay == "compiled and replayed",
            replay="eager" if replay == "eager" else Replay(policy="require"),
        ) as step:
            for k in range(STEPS):
                loss = step(token_batch(self.bits_config.vocab, 4, BITS_T, seed=k)).loss
                digest.update(loss.detach().cpu().numpy().tobytes())
            for p in model.parameters():
                digest.update(p.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()


def measure(
    other: str, only: str = "", preset="llama-350m", bits_preset="tiny", here=False
) -> dict:
    """{"ratios": name -> ratio, "bits": run -> whether they are the same}.

    only: measure what has this in its name"""
    from timing import in_turns

    results = {"ratios": {}, "bits": {}}
    folders = {NOW: str(ROOT), OTHER: str(pathlib.Path(other).resolve())}
    variants = {name: (Version, folder, preset, bits_preset) for name, folder in folders.items()}
    with Workers(variants, here) as workers:

        def ratio(name: str, method: str, *args):
            times = in_turns(
                {who: lambda who=who: workers.ask(who, method, *args) for who in folders}, ROUNDS
            )
            results["ratios"][name] = times[NOW] / times[OTHER]
            print(f"{name}: {results['ratios'][name]:.4f}  {times}", flush=True)

        if only in "host time of one launch":
            ratio("host time of one launch", "launch_microseconds")
        for name, what, T, method in (
            (f"step, compiled and replayed, T = {LONG}", "step", LONG, "times"),
            (f"step, compiled and replayed, T = {SHORT}", "step", SHORT, "times"),
            (f"step, launched, T = {SHORT}", "launched step", SHORT, "times"),
            (f"host time of a launched step, T = {SHORT}", "launched step", SHORT, "host_times"),
            ("optimizer's step, replayed", "tail", SHORT, "times"),
            ("optimizer's step, launched", "launched tail", SHORT, "times"),
            ("host time of the optimizer's step", "launched tail", SHORT, "host_times"),
        ):
            if only not in name:
                continue
            # Both compile at the same time; in one process a tape would record both.
            with concurrent.futures.ThreadPoolExecutor(1 if here else 2) as pool:
                list(pool.map(lambda who: workers.ask(who, "prepare", what, T), folders))
            ratio(name, method, CALLS)
        for replay in ("eager", "replayed", "compiled and replayed"):
            if only in replay:
                found = {who: workers.ask(who, "bits", replay) for who in folders}
                results["bits"][replay] = found[NOW] == found[OTHER]
                print(f"{replay}: {found[NOW] == found[OTHER]}", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", required=True, help="folder with the other version's gpuaccel/")
    parser.add_argument("--only", default="", help="measure what has this in its name")
    options = parser.parse_args()
    results = measure(options.other, options.only)
    show_table("this version / the other", results["ratios"].items(), ["time", "ratio"])
    show_table("bits of losses and weights", results["bits"].items(), ["run", "the same"])
    return int(not all(results["bits"].values()))


if __name__ == "__main__":
    sys.exit(main())
