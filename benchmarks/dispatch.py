"""RichardsGLU and PolyAttention against torch: python benchmarks/dispatch.py

Needs a GPU and about three minutes, most of them for torch.compile. Parts: curves, attention,
steps.

curves: the pointwise part of RichardsGLU, 16,384 x 4,096 and 65,536 x 1,024 elements of h; bf16 and
fp32. Ours: glu_forward; glu_backward and richards_finish. The limit is the larger of two times:
that of the bytes at the rate of a device-to-device copy, and that of the special functions at 16
per clock and multiprocessor, at the clock that nvidia-smi reads meanwhile. Both counts are those of
the header of kernels_cu/richards.cu. torch, compiled: the curves as their formula stands, or with
the line in x evaluated once ("folded", as our kernel does), whichever is faster. Its backward is
the time of forward and backward less that of forward.
attention: PolyAttention, the layer, at T = 2,048, 16 heads of 64, bf16, forward and backward.
torch, compiled: products in bf16 and T x T matrices that are shifted along the diagonal by padding.
steps: whole training steps of poly-7m, T = 512, by batch, as in step_variants.py. torch: the same
model in its own operations, fp32 weights under bf16 autocast.

Values are compared with float64 before anything is timed. Each case has a process of its own, in
which ours and its peers are measured in turns; the processes of a part compile side by side first.
Times are those of replayed CUDA graphs of several calls, where nothing else is said.
"""

import copy
import functools

import memory
import torch
from common import DEVICE, Clock, record
from step_variants import KINDS, LAUNCHED, PEER, REPLAYED, Ours, Peer, Task, measured
from tables import Column, Table, number, ratio, share
from timing import (
    OURS,
    clock_MHz,
    copy_rate,
    gradients,
    multiprocessors,
    peak_MiB,
    random,
    relative_error,
    release,
    repeat,
    timed,
)
from torch_layers import TorchCurve, TorchGate, in_torch
from training import build, token_batch
from workers import Workers

from gpuaccel.nn.poly_attention import PolyAttention
from gpuaccel.nn.richards_glu import RichardsGLU, launch_backward, launch_forward
from gpuaccel.training.models import preset

# Of the attention's cases.
HEADS, HEAD, T = 16, 64, 2048
CURVES = {
    f"{dtype}, {N:,} x {hidden:,}": (dtype, N, hidden)
    for N, hidden in ((16384, 4096), (65536, 1024))
    for dtype in ("bfloat16", "float32")
}
ATTENTION = {
    f"batch {B}" + (f", window {window}" if window else ""): (B, window)
    for window in (None, 256)
    for B in (1, 2, 4)
}
# Elements of the copy that gives the copy rate; rows that are compared with float64.
COPIED, CHECKED = 2**27, 1024
# Per element of h: elements read and written, and special functions.
MOVED = {"forward": 3, "backward": 5}
SPECIAL = {"forward": 6, "backward": 8}
# Special functions of a multiprocessor.
SPECIAL_PER_CLOCK = 16
# Errors against float64 by norm: of an element, and of a curve's parameters; of a layer in bf16.
ELEMENT_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SUM_ERROR = 1e-3
LAYER_ERROR = 3e-2
DIRECTIONS = ("forward", "backward")


def check(values, exact, most) -> None:
    """Raises AssertionError where a result is too far from float64."""
    errors = [relative_error(value, right) for value, right in zip(values, exact, strict=True)]
    assert all(error <= limit for error, limit in zip(errors, most, strict=True)), (
        f"ours is farther from float64 than {most}: {errors}"
    )


# ---- the pointwise part -------------------------------------------------------------------------


class Pointwise:
    """The gated unit of one size and dtype."""

    def __init__(self, dtype: str, N: int, hidden: int):
        self.dtype, self.N, self.hidden = getattr(torch, dtype), N, hidden
        torch.manual_seed(0)
        self.layer = RichardsGLU(1, 1, device=DEVICE)
        for curve in (self.layer.activation, self.layer.gate):
            curve.theta.data += 0.2 * torch.randn_like(curve.theta)
        self.compiled = {
            folded: torch.compile(self.in_torch(folded), dynamic=False) for folded in (False, True)
        }
        x, dy = self.data(N)
        for module in self.compiled.values():
            self.both(module, x, dy)
        release()

    def in_torch(self, folded: bool):
        curves = copy.deepcopy([self.layer.activation, self.layer.gate])
        return TorchGate(*(TorchCurve(curve, folded) for curve in curves))

    def data(self, rows: int):
        """x and the gradient of the result."""
        x = random(rows, 2 * self.hidden, dtype=self.dtype).requires_grad_()
        return x, random(rows, self.hidden, seed=2, dtype=self.dtype)

    @staticmethod
    def both(module, x, dy):
        """Forward and backward of a peer."""
        return gradients(lambda: module(x), (x, *module.parameters()), dy)

    def ours(self, x, dy) -> dict:
        """forward, backward: our launches."""
        a, g = self.layer.activation, self.layer.gate
        inputs, kinds = (x, a.theta.detach(), g.theta.detach()), (a.kinds, g.kinds)
        forward = functools.partial(launch_forward, *inputs, *kinds)
        backward = functools.partial(launch_backward, dy, *inputs, *kinds)
        return {"forward": forward, "backward": backward}

    def check(self):
        """The first rows against float64."""
        x, dy = self.data(min(self.N, CHECKED))
        ours = self.ours(x.detach(), dy)
        exact, wide = self.in_torch(folded=False).double(), x.detach().double().requires_grad_()
        y = exact(wide)
        dx, *dthetas = gradients(lambda: exact(wide), (wide, *exact.parameters()), dy.double())
        most = ELEMENT_ERROR[self.dtype]
        our_dx, *our_dthetas = ours["backward"]()
        check(
            (ours["forward"]()[0], our_dx, torch.cat(our_dthetas)),
            (y.detach(), dx, torch.cat(dthetas)),
            (most, most, SUM_ERROR),
        )

    def measure(self) -> dict:
        self.check()
        rate = copy_rate(COPIED)
        x, dy = self.data(self.N)
        ours = self.ours(x.detach(), dy)
        clock = clock_MHz(functools.partial(repeat, ours["backward"], 32))
        runs = {(OURS, direction): run for direction, run in ours.items()}
        for folded, module in self.compiled.items():
            runs[folded, "forward"] = functools.partial(module, x)
            runs[folded, "both"] = functools.partial(self.both, module, x, dy)
        ms = timed(runs)
        folded = min((False, True), key=lambda folded: ms[folded, "both"])
        peer = {"forward": ms[folded, "forward"]}
        peer["backward"] = ms[folded, "both"] - peer["forward"]
        elements, size = self.N * self.hidden, self.dtype.itemsize
        per_ms = SPECIAL_PER_CLOCK * multiprocessors() * clock * 1e3
        result = {"torch": "folded" if folded else "formula", "clock_MHz": clock}
        for direction in DIRECTIONS:
            moved = MOVED[direction] * elements * size / rate / 1e6
            special = SPECIAL[direction] * elements / per_ms
            own = ms[OURS, direction]
            result[direction] = {
                "ms": own,
                "of_limit": max(moved, special) / own,
                "times_torch": peer[direction] / own,
            }
        return {**result, "copy_GB_per_s": rate}


# ---- polynomial attention -----------------------------------------------------------------------


class Attention:
    """The layer with one batch and window."""

    def __init__(self, B: int, window):
        self.B = B
        torch.manual_seed(0)
        options = dict(max_positions=T, device=DEVICE, dtype=torch.bfloat16)
        self.layer = PolyAttention(HEADS * HEAD, HEADS, window=window, **options)
        peer = in_torch(copy.deepcopy(self.layer))
        self.layers = {OURS: self.layer, PEER: torch.compile(peer, dynamic=False)}
        self.runs()[PEER]()
        release()

    def runs(self) -> dict:
        """variant -> forward and backward, gradients of x and every parameter."""
        x, dy = (random(self.B, T, HEADS * HEAD, seed=seed) for seed in (5, 6))
        x.requires_grad_()

        def both(layer):
            return gradients(lambda: layer(x), (x, *layer.parameters()), dy)

        return {name: functools.partial(both, layer) for name, layer in self.layers.items()}

    def check(self):
        """The first sequence against float64, and two runs bit by bit."""
        x, dy = (random(self.B, T, HEADS * HEAD, seed=seed)[:1] for seed in (5, 6))

        def both(layer):
            own = x.to(layer.pe.dtype).requires_grad_()
            y = layer(own)
            return y.detach(), torch.autograd.grad(y, own, dy.to(y.dtype))[0]

        ours, again = both(self.layer), both(self.layer)
        check(ours, both(copy.deepcopy(self.layer).double()), (LAYER_ERROR, LAYER_ERROR))
        differ = sum(int((a != b).sum()) for a, b in zip(ours, again))
        assert differ == 0, f"two runs of ours differ in {differ} elements, expected none"

    def measure(self) -> dict:
        self.check()
        release()
        runs = self.runs()
        ms = timed(runs)
        MiB = {name: peak_MiB(run) for name, run in runs.items()}
        return {
            "ms": ms[OURS],
            "times_torch": ms[PEER] / ms[OURS],
            "MiB": MiB[OURS],
            "torch_MiB": MiB[PEER],
        }


# ---- whole steps --------------------------------------------------------------------------------


def make_in_torch(config, dtype):
    return in_torch(build(config, dtype))


def steps(config=None, batches=None, here: bool = False) -> dict:
    config, clock = config or preset("poly-7m"), Clock()
    batches = batches or ((4, 32) if memory.available_GiB() >= 40 else (4, 8))
    variants = {}
    for B in batches:
        make_batch = functools.partial(token_batch, config.vocab, B, config.T)
        task = Task(functools.partial(build, config), make_batch, micro_batches=1)
        peer = Task(functools.partial(make_in_torch, config), make_batch, micro_batches=1)
        variants |= {(PEER, kind, B): (Peer, peer) for kind in KINDS}
        variants |= {(OURS, kind, B): (Ours, task, kind) for kind in KINDS}
    with Workers(variants, here) as workers:
        workers.ready()
        clock.say("compiled")
        return {
            f"batch {B}": {kind: measured(workers, kind, clock, B) for kind in KINDS}
            for B in batches
        }


# ---- tables -------------------------------------------------------------------------------------


def curves_table(r: dict) -> Table:
    columns = [Column("elements", "case")]
    for d in DIRECTIONS:
        columns += [
            Column(f"{d}: ms", f"{d} ms", number),
            Column(f"{d}: of the limit", f"{d} of_limit", share),
            Column(f"{d}: against compiled", f"{d} times_torch", ratio),
        ]
    rows = [
        {"case": case, **{f"{d} {key}": value for d in DIRECTIONS for key, value in m[d].items()}}
        for case, m in r.items()
    ]
    return Table(columns, rows)


def attention_table(r: dict) -> Table:
    columns = [
        Column("batch", "case"),
        Column("ms", "ms", number),
        Column("against compiled", "times_torch", ratio),
        Column("MiB", "MiB", number),
        Column("compiled, MiB", "torch_MiB", number),
    ]
    return Table(columns, [{"case": case, **m} for case, m in r.items()])


def steps_table(r: dict) -> Table:
    columns = [Column("batch", "batch")]
    for kind in (REPLAYED, LAUNCHED):
        columns += [
            Column(f"{kind}: ms", f"{kind} ms", number),
            Column(f"{kind}: against torch", f"{kind} times_torch", ratio),
        ]
    rows = [
        {
            "batch": batch,
            **{f"{kind} {key}": m for kind in kinds for key, m in kinds[kind][OURS].items()},
        }
        for batch, kinds in r.items()
    ]
    return Table(columns, rows)


def tables(results: dict) -> dict[str, Table]:
    parts = {"curves": curves_table, "attention": attention_table, "steps": steps_table}
    return {part: parts[part](result) for part, result in results.items()}


# ---- the script ---------------------------------------------------------------------------------


def cases(make, arguments: dict, here: bool = False) -> dict:
    """case -> result."""
    with Workers({case: (make, *args) for case, args in arguments.items()}, here) as workers:
        workers.ready()
        return {case: workers.ask(case, "measure") for case in arguments}


PARTS = {
    "curves": functools.partial(cases, Pointwise, CURVES),
    "attention": functools.partial(cases, Attention, ATTENTION),
    "steps": steps,
}


def main():
    record("dispatch", PARTS, tables)


if __name__ == "__main__":
    main()
