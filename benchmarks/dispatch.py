"""RichardsGLU and PolyAttention against torch, and the GPU against the CPU: python benchmarks/dispatch.py [part ...]   (needs a GPU)

Parts: curves, attention, layers. Without any: all of them, and the result is written; about two minutes, half of them torch.compile's.

1. curves: the pointwise part of RichardsGLU, 16,384 x 4,096 and 65,536 x 1,024 elements of h, and one curve of as many elements; bf16 and fp32.
   Ours: glu_forward; glu_backward and richards_finish. The floor is the larger of two times: that of the bytes at the rate of
   a device-to-device copy, and that of the special functions at 16 per clock and multiprocessor, at the clock that nvidia-smi reads meanwhile. Both
   counts are those of kernels_cu/richards.cu's header. PeerToPeer: the curve in torch, as its formula stands and with the line in x worked out once
   ("folded", as our kernel does it), in eager mode and compiled. Their backward is what forward and backward take together, less forward.
2. attention: PolyAttention at T = 2,048, 16 heads of 64, bf16, forward and backward, the core (poly_attention) and the whole layer: on tensor cores
   (v2), on fp32 units (v1), and written in torch: products in bf16, T x T matrices, shifted along the diagonal by padding; eager and compiled.
   Beside them reference_poly_attention (fp32, gathered), and flash attention, another function. Peaks of memory at T = 2,048 and 4,096.
3. layers: both layers of poly-7m and whole training steps, T = 512, by batch. Ours: bf16 weights with fp32 masters, ga.AdamW, mode `fused`,
   replayed. Torch: the same model in its own operations, bf16 autocast, foreach clip, fused AdamW, launched from Python; its blocks compiled (they
   share one compilation), launched and replayed. The CPU: backend `torch`, fp32, all cores, two sequences at a time, because that is faster.

Values are compared with float64 before anything is timed. Each case has a process of its own, in which ours and its peers are measured in turns; all
processes compile side by side first. Times are those of replayed CUDA graphs of several calls, where nothing else is said.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import json
import math
import os
import time

import common
import torch
import torch.nn.functional as F
from clip import copy_rate
from dispatch_layers import BATCHES, CPU, Layers, on_the_cpu
from timing import (
    OURS,
    apart,
    clock_MHz,
    gradients,
    multiprocessors,
    peak_MiB,
    random,
    release,
    repeat,
    timed_alike,
    times_ours,
)
from torch_layers import COMPILED, COMPILED_FOLDED, EAGER, FOLDED, Gated, in_torch, torch_attention
from workers import Workers

from gpuaccel.nn.poly_attention import PolyAttention, poly_attention, reference_poly_attention
from gpuaccel.nn.richards_glu import (
    GATE,
    RichardsCurve,
    launch_backward,
    launch_forward,
    launch_glu_backward,
    launch_glu_forward,
    reference_richards,
    reference_values,
)

poly = importlib.import_module("gpuaccel.nn.poly_attention")
DEVICE = "cuda"
HEADS, HEAD, T, LONG = 16, 64, 2048, 4096  # of the attention's cases
CASES = {
    "curves": {
        f"{dtype}, {N:,} x {hidden:,}": (dtype, N, hidden, N == 16384)
        for N, hidden in ((16384, 4096), (65536, 1024))
        for dtype in ("bfloat16", "float32")
    },
    "attention": {
        f"batch {B}" + (f", window {window}" if window else ""): (
            B,
            window,
            B == 1 and window is None,
        )
        for window in (None, 256)
        for B in (1, 2, 4)
    },
    "layers": BATCHES,
}
COPIED, CHUNK = 2**27, 2**23  # elements; elements that float64 takes at a time
# Per element of h (or y): elements read and written, and special functions (the header of kernels_cu/richards.cu).
MOVED = {"glu": {"forward": 3, "backward": 5}, "curve": {"forward": 2, "backward": 3}}
SPECIAL = {"glu": {"forward": 6, "backward": 8}, "curve": {"forward": 3, "backward": 4}}
SPECIAL_PER_CLOCK = 16  # on a multiprocessor
WITHIN = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
}  # of float64, by norm: y and gradients by the element
OF_SUMS, OF_LAYERS = 1e-3, 3e-2  # gradients of a curve's parameters; a whole layer in bf16
GOALS = {
    "floor": 0.85,
    "compile": 1.2,
    "attention": {"eager": 4, "compile": 2},
    "memory": 2.2,
    "cpu": 8,
    "cpu batch": "batch 32",
}
PLAIN, GATHERED, FLASH = (
    "ours, v1",
    "reference_poly_attention, fp32",
    "flash attention (another function)",
)
VALUES = dict(nu=1.3, k=0.9, m=0.2, beta=1.4, T=1.1, a=0.9, c=0.1, s=1.2, b=-0.1)


@contextlib.contextmanager
def plain_kernels():
    """PolyAttention takes v1, what GPUs without tensor cores and types other than bf16 get."""
    plan, poly.plan = poly.plan, lambda *_: (1, 1)
    try:
        yield
    finally:
        poly.plan = plan


def check(errors: dict, within: dict):
    """AssertionError for a way that is farther from float64 than it may be. errors: way -> part -> error; within: part -> most.

    Torch's may be five times as far: its score matrices are bf16. So a sum of all of them, which may come out near 0, is not looked at there."""
    for way, parts in errors.items():
        ours = way.startswith(OURS)
        wrong = {
            part: e
            for part, e in parts.items()
            if (ours or part != "dcoefficients") and not e <= within[part] * (1 if ours else 5)
        }
        assert not wrong, f"{way} is farther from float64 than {within}: {wrong}"


# ---- 1: the pointwise part ------------------------------------------------------------------------------------------


class Pointwise:
    """The gated unit of one size and dtype, and (with `alone`) one curve of as many elements."""

    def __init__(self, dtype: str, N: int, hidden: int, alone: bool):
        self.dtype, self.N, self.hidden = getattr(torch, dtype), N, hidden
        curves = (
            RichardsCurve(**VALUES, device=DEVICE),
            RichardsCurve("sigmoid", learn=GATE, bounded=True, nu=0.8, T=1.05, device=DEVICE),
        )
        self.curves, self.p2p = {"glu": curves, **({"curve": curves[:1]} if alone else {})}, {}
        for kind in self.curves:
            for name, folded, compiled in (
                (EAGER, False, False),
                (FOLDED, True, False),
                (COMPILED, False, True),
                (COMPILED_FOLDED, True, True),
            ):
                own = [in_torch(copy.deepcopy(curve)) for curve in self.curves[kind]]
                for curve in own:
                    curve.folded = folded
                module = Gated(*own) if kind == "glu" else own[0]
                self.p2p[kind, name] = (
                    torch.compile(module, dynamic=False) if compiled else module,
                    [curve.theta for curve in own],
                )
            x, dy = self.data(kind)
            for name in (COMPILED, COMPILED_FOLDED):
                self.peer(kind, name, x, dy)()
        del x, dy
        release()

    def data(self, kind: str):
        """x and the gradient of the result."""
        x = random(
            self.N, (2 if kind == "glu" else 1) * self.hidden, dtype=self.dtype
        ).requires_grad_()
        return x, random(self.N, self.hidden, seed=2, dtype=self.dtype)

    def peer(self, kind, name, x, dy):
        """Forward and backward of a peer."""
        module, thetas = self.p2p[kind, name]
        return lambda: gradients(lambda: module(x), (x, *thetas), dy)

    def ours(self, kind, x, dy) -> dict:
        """forward, backward: our launches."""
        thetas, settings = (
            [c.theta.detach() for c in self.curves[kind]],
            [c.setting for c in self.curves[kind]],
        )
        if kind == "glu":
            forward = lambda: launch_glu_forward(x, thetas, settings)
            kept = forward()[1]
            return {
                "forward": forward,
                "backward": lambda: launch_glu_backward(dy, x, thetas, kept, settings),
            }
        forward = lambda: launch_forward(x, thetas[0], settings[0])
        kept = forward()[1]
        return {
            "forward": forward,
            "backward": lambda: launch_backward(dy, x, thetas[0], kept, settings[0]),
        }

    def errors(self, kind, x, dy, ours) -> dict:
        """way -> {"y", "dx", "dtheta"} against float64, which takes some rows at a time."""
        exact = [copy.deepcopy(c).double() for c in self.curves[kind]]
        of_theta, parts = [torch.zeros_like(c.theta) for c in exact], []
        for rows in range(0, self.N, max(1, CHUNK // self.hidden)):
            some = slice(rows, rows + max(1, CHUNK // self.hidden))
            wide = x[some].detach().double().requires_grad_()
            values = [reference_values(c.theta, c.setting) for c in exact]
            x1, *x2 = wide.chunk(len(exact), -1)
            y = reference_richards(
                x1, values[0], exact[0].setting[10] != 0, exact[0].setting[11] != 0
            )
            if x2:
                y = (
                    x1
                    * y
                    * reference_richards(
                        x2[0], values[1], exact[1].setting[10] != 0, exact[1].setting[11] != 0
                    )
                )
            dx, *found = torch.autograd.grad(
                y, (wide, *(c.theta for c in exact)), dy[some].double()
            )
            parts.append((y.detach(), dx))
            of_theta = [a + b for a, b in zip(of_theta, found)]
        wide = [torch.cat(some) for some in zip(*parts)]
        del parts
        results = {OURS: lambda: (ours["forward"]()[0], *ours["backward"]())}
        results |= {
            name: lambda name=name: (
                self.p2p[kind, name][0](x).detach(),
                *self.peer(kind, name, x, dy)(),
            )
            for k, name in self.p2p
            if k == kind
        }
        found = {}
        for name, run in results.items():
            y, dx, *thetas = run()
            found[name] = {
                "y": apart(y, wide[0]),
                "dx": apart(dx, wide[1]),
                "dtheta": apart(torch.cat(thetas), torch.cat(of_theta)),
            }
            del y, dx
        return found

    def measure(self) -> dict:
        rate, found = copy_rate(COPIED), {}
        for kind in self.curves:
            x, dy = self.data(kind)
            ours = self.ours(kind, x.detach(), dy)
            errors = self.errors(kind, x, dy, ours)
            check(errors, {"y": WITHIN[self.dtype], "dx": WITHIN[self.dtype], "dtheta": OF_SUMS})
            release()
            clock = clock_MHz(functools.partial(repeat, ours["backward"], 32))
            runs = {(OURS, way): run for way, run in ours.items()}
            for k, name in self.p2p:
                if k == kind:
                    runs[name, "forward"], runs[name, "both"] = (
                        functools.partial(self.p2p[kind, name][0], x),
                        self.peer(kind, name, x, dy),
                    )
            taken, _, refused = timed_alike(runs)
            found[kind] = self.rows(kind, taken, rate, clock) | {
                "errors": errors,
                "clock_MHz": clock,
                "copy_GB_per_s": rate,
                "cannot_be_captured": {" ".join(name): why for name, why in refused.items()},
            }
            del x, dy, ours, runs
            release()
        return found

    def rows(self, kind, ms, rate, clock) -> dict:
        """{"ms": way -> {"forward", "backward"}, "floors_ms", "best_compiled", "of_floor", "times": way -> times ours}."""
        rows = {
            name: {
                "forward": ms[name, "forward"],
                "backward": ms[name, "backward"]
                if name == OURS
                else ms[name, "both"] - ms[name, "forward"],
            }
            for name in dict.fromkeys(name for name, _ in ms)
        }
        elements, size = self.N * self.hidden, self.dtype.itemsize
        floors, best = (
            {},
            min((COMPILED, COMPILED_FOLDED), key=lambda name: sum(rows[name].values())),
        )
        for way in ("forward", "backward"):
            floors[way] = {
                "bytes": MOVED[kind][way] * elements * size / rate / 1e6,
                "special": SPECIAL[kind][way]
                * elements
                / (SPECIAL_PER_CLOCK * multiprocessors() * clock * 1e3),
            }
        return {
            "ms": rows,
            "floors_ms": floors,
            "best_compiled": best,
            "of_floor": {
                way: max(floor.values()) / rows[OURS][way] for way, floor in floors.items()
            },
            "times": {
                name: {way: m[way] / rows[OURS][way] for way in floors}
                for name, m in rows.items()
                if name != OURS
            },
        }


# ---- 2: polynomial attention ----------------------------------------------------------------------------------------


class Attention:
    """One batch and window: the core and the whole layer. long: peaks of memory, too."""

    def __init__(self, B: int, window, long: bool):
        self.B, self.window, self.long = B, window, long
        torch.manual_seed(0)
        self.layer = PolyAttention(
            HEADS * HEAD,
            HEADS,
            window=window,
            max_positions=max(T, LONG),
            device=DEVICE,
            dtype=torch.bfloat16,
        )
        self.torch_layer = in_torch(copy.deepcopy(self.layer))
        self.compiled, self.compiled_layer = (
            torch.compile(torch_attention, dynamic=False),
            torch.compile(self.torch_layer, dynamic=False),
        )
        for runs in (
            self.core(T, (COMPILED,)),
            self.whole((COMPILED,)),
            *([self.core(LONG, (COMPILED,))] if long else []),
        ):
            runs[COMPILED]()
        del runs
        release()

    def data(self, T: int):
        """q_tilde, q, k, v, pe, coefficients as the layer makes them of random projections; and dy."""
        q, k, v, dy = (random(self.B, T, HEADS, HEAD, seed=seed) for seed in range(4))
        tensors = (self.layer.query(q), q, k, v, self.layer.pe, self.layer.coefficients)
        return [t.detach().clone().requires_grad_() for t in tensors], dy

    def core(self, T: int, names=None) -> dict:
        """way -> forward and backward of the core, gradients of all six."""
        inputs, dy = self.data(T)
        q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in inputs[1:4])
        ways = {
            OURS: poly_attention,
            PLAIN: poly_attention,
            EAGER: torch_attention,
            COMPILED: self.compiled,
            GATHERED: reference_poly_attention,
        }
        if not self.long:
            del ways[GATHERED]
        runs = {
            name: lambda way=way: gradients(
                lambda: way(*inputs, self.layer.degree, self.window), inputs, dy
            )
            for name, way in ways.items()
        }
        runs[PLAIN] = lambda run=runs[PLAIN]: _plainly(run)
        if self.window is None:
            runs[FLASH] = lambda: gradients(
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                (q, k, v),
                dy.transpose(1, 2),
            )
        return {name: run for name, run in runs.items() if names is None or name in names}

    def whole(self, names=None) -> dict:
        """way -> forward and backward of the layer, gradients of x and every parameter."""
        x, dy = (random(self.B, T, HEADS * HEAD, seed=seed) for seed in (5, 6))
        x.requires_grad_()
        ways = {
            OURS: self.layer,
            PLAIN: self.layer,
            EAGER: self.torch_layer,
            COMPILED: self.compiled_layer,
        }
        runs = {
            name: lambda way=way: gradients(lambda: way(x), (x, *way.parameters()), dy)
            for name, way in ways.items()
        }
        runs[PLAIN] = lambda run=runs[PLAIN]: _plainly(run)
        return {name: run for name, run in runs.items() if names is None or name in names}

    def errors(self) -> dict:
        """way -> {"y", "dq_tilde", ...}: the core against float64, which takes a sequence at a time; "differ": elements, of two runs of ours."""
        inputs, dy = self.data(T)
        names, exact = ("y", "dq_tilde", "dq", "dk", "dv", "dpe", "dcoefficients"), []
        for b in range(self.B):
            wide = [
                (t[b : b + 1] if t.dim() == 4 else t).detach().double().requires_grad_()
                for t in inputs
            ]
            y = reference_poly_attention(*wide, self.layer.degree, self.window)
            exact.append((y.detach(), *torch.autograd.grad(y, wide, dy[b : b + 1].double())))
            del wide, y
        exact = [torch.cat(some) if some[0].dim() == 4 else sum(some) for some in zip(*exact)]
        found, first = {}, None
        ways = (
            (OURS, poly_attention),
            (OURS, poly_attention),
            (PLAIN, poly_attention),
            (EAGER, torch_attention),
            (COMPILED, self.compiled),
        )
        for name, way in ways:
            with plain_kernels() if name == PLAIN else contextlib.nullcontext():
                y = way(*inputs, self.layer.degree, self.window)
                got = (y.detach(), *torch.autograd.grad(y, inputs, dy))
            found[name] = {part: apart(a, b) for part, a, b in zip(names, got, exact)}
            if name == OURS:
                differ = (
                    None if first is None else sum(int((a != b).sum()) for a, b in zip(first, got))
                )
                first = got if first is None else first
                found["differ"] = differ
        return found

    def layer_errors(self) -> dict:
        """way -> error of the layer's result and of the gradient of x, of the first sequence, against the layer in float64."""
        x, dy = (
            random(self.B, T, HEADS * HEAD, seed=5)[:1],
            random(self.B, T, HEADS * HEAD, seed=6)[:1],
        )
        found, exact = {}, None
        for name, way in (
            ("float64", copy.deepcopy(self.layer).double()),
            (OURS, self.layer),
            (EAGER, self.torch_layer),
        ):
            own = x.to(way.pe.dtype).requires_grad_()
            y = way(own)
            got = y.detach(), torch.autograd.grad(y, own, dy.to(y.dtype))[0]
            exact = exact or got
            found[name] = dict(zip(("y", "dx"), map(apart, got, exact)))
        del found["float64"]
        return found

    def measure(self) -> dict:
        errors = self.errors()
        differ = errors.pop("differ")
        check(errors, dict.fromkeys(errors[OURS], WITHIN[torch.bfloat16]))
        assert differ == 0, f"two runs of ours differ in {differ} elements"
        of_layer = self.layer_errors()
        check(of_layer, {"y": OF_LAYERS, "dx": OF_LAYERS})
        release()
        result = {"errors": errors, "layer_errors": of_layer, "differ": differ}
        for what, runs in (("core", self.core(T)), ("layer", self.whole())):
            ms, _, refused = timed_alike(runs)
            result[what] = {
                "ms": ms,
                "cannot_be_captured": refused,
                "times": times_ours(ms),
                "peak_MiB": {name: peak_MiB(run) for name, run in runs.items()},
            }
            del runs
            release()
        if self.long:
            found, before = (
                {name: peak_MiB(run) for name, run in self.core(LONG).items()},
                result["core"]["peak_MiB"],
            )
            result["long"] = {
                "T": [T, LONG],
                "peak_MiB": found,
                "grows": {name: mib / before[name] for name, mib in found.items()},
            }
        return result


def _plainly(run):
    with plain_kernels():
        return run()


# ---- printed --------------------------------------------------------------------------------------------------------


def goal(value, least) -> str:
    return "" if value is None else f"{value:.2f} ({least:g}{'' if value >= least else ': missed'})"


def at_most(value, most) -> str:
    return f"{value:.2f} (at most {most:g}{'' if value <= most else ': missed'})"


def show_curves(r):
    for case, kinds in r.items():
        for kind, m in kinds.items():
            rows = [
                (
                    name,
                    *(f"{ms[way]:.4f}" for way in ("forward", "backward")),
                    *(
                        (
                            goal(m["of_floor"][way], GOALS["floor"])
                            for way in ("forward", "backward")
                        )
                        if name == OURS
                        else ("", "")
                    ),
                    *(
                        (
                            f"{m['times'][name][way]:.2f}"
                            if name != m["best_compiled"]
                            else goal(m["times"][name][way], GOALS["compile"])
                            for way in ("forward", "backward")
                        )
                        if name != OURS
                        else ("", "")
                    ),
                    f"{max(m['errors'][name].values()):.1e}",
                )
                for name, ms in m["ms"].items()
            ]
            floors = ", ".join(
                f"{way} {f['bytes']:.4f} bytes {f['special']:.4f} special"
                for way, f in m["floors_ms"].items()
            )
            print(
                f"\n{kind}, {case}: {m['copy_GB_per_s']:,.0f} GB/s, {m['clock_MHz']:,.0f} MHz; floors in ms: {floors}\n"
                + common.table(
                    rows,
                    (
                        "",
                        "forward ms",
                        "backward ms",
                        "of floor",
                        "of floor",
                        "times ours",
                        "times ours",
                        "error",
                    ),
                )
            )
            for name, why in m["cannot_be_captured"].items():
                print(f"{name}: {why}")


def show_attention(r):
    for what in ("core", "layer"):
        rows = []
        for case, m in r.items():
            for name, mib in m[what]["peak_MiB"].items():
                least = GOALS["attention"].get({EAGER: "eager", COMPILED: "compile"}.get(name))
                ratio = m[what]["times"].get(name)
                error = max(
                    m["errors" if what == "core" else "layer_errors"]
                    .get(name, {"": math.nan})
                    .values()
                )
                rows.append(
                    (
                        f"{case}: {name}",
                        f"{m[what]['ms'][name]:.3f}",
                        goal(ratio, least) if least else f"{ratio or 1:.2f}",
                        f"{mib:,.1f}",
                        f"{error:.1e}",
                    )
                )
        print(f"\n{what}\n" + common.table(rows, ("", "ms", "times ours", "peak MiB", "error")))
        for case, m in r.items():
            for name, why in m[what]["cannot_be_captured"].items():
                print(f"{case}, {name}: {why}")
    for m in r.values():
        if "long" in m:
            print(
                "\nmemory from T = {} to {}\n".format(*m["long"]["T"])
                + common.table(
                    [
                        (
                            name,
                            f"{mib:,.1f}",
                            at_most(m["long"]["grows"][name], GOALS["memory"])
                            if name == OURS
                            else f"{m['long']['grows'][name]:.2f}",
                        )
                        for name, mib in m["long"]["peak_MiB"].items()
                    ],
                    ("core", "MiB", "times"),
                )
            )


def show_layers(r):
    rows = []
    for case, parts in r.items():
        for part, m in parts.items() if isinstance(parts, dict) else ():
            for name, ms in m["ms"].items():
                judged = (name, case, part) == (CPU, GOALS["cpu batch"], "step")
                ratio = (
                    ""
                    if name == OURS
                    else goal(m["times"][name], GOALS["cpu"])
                    if judged
                    else f"{m['times'][name]:.2f}"
                )
                rows.append(
                    (
                        f"{case}, {part}: {name}",
                        f"{ms:,.3f}",
                        f"{m.get('launched_ms', {}).get(name, math.nan):.3f}",
                        ratio,
                    )
                )
    print(
        f"\nCPU: {r['cpu']}, {r['cores']} cores\n"
        + common.table(rows, ("", "ms", "launched", "times ours"))
    )


PARTS = {
    "curves": (Pointwise, show_curves),
    "attention": (Attention, show_attention),
    "layers": (Layers, show_layers),
}


def measure(parts, cases=None, here: bool = False, done=lambda *_: None) -> dict:
    """part -> case -> result. done(part, result): called after each part. here: in this process (for tests).

    A case that fails is printed, and the others go on, so that one run tells all; then RuntimeError names it."""
    cases, began, results, failed = cases or CASES, time.perf_counter(), {}, []
    with Workers(
        {
            (part, case): (PARTS[part][0], *args)
            for part in parts
            for case, args in cases[part].items()
        },
        here,
    ) as workers:
        workers.ready()
        print(f"{time.perf_counter() - began:5.1f} s: all is compiled", flush=True)
        for part in parts:
            results[part] = {}
            for case in cases[part]:
                try:
                    results[part][case] = workers.ask((part, case), "measure")
                except (AssertionError, RuntimeError) as error:
                    failed.append(f"{part}, {case}: {error}")
                    print(failed[-1])
                workers.close((part, case))
                print(f"{time.perf_counter() - began:5.1f} s: {part}, {case}", flush=True)
            if part != "layers":
                results[part] = json.loads(json.dumps(results[part]))
                done(part, results[part])
    if "layers" in parts:  # the processes are gone: all cores are free
        config = next((args[1] for args in cases["layers"].values() if len(args) > 1), None)
        results["layers"] = json.loads(
            json.dumps(on_the_cpu(results["layers"], cases["layers"], config))
        )
        done("layers", results["layers"])
    if failed:
        raise RuntimeError("\n".join(failed))
    return results


def main():
    parser = argparse.ArgumentParser(
        description="RichardsGLU and PolyAttention against torch and the CPU; see this file's first lines."
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"some of: {', '.join(PARTS)}; nothing is written then",
    )
    chosen = parser.parse_args().parts
    unknown = set(chosen) - PARTS.keys()
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    os.environ["GPUACCEL_GPU"] = (
        "require"  # a kernel that does not run here stops the benchmark; otherwise torch would take its place
    )
    results = measure(
        [name for name in PARTS if not chosen or name in chosen],
        done=lambda part, result: PARTS[part][1](result),
    )
    if not chosen:
        print("\nwritten:", common.write("dispatch", results).name)


if __name__ == "__main__":
    main()
