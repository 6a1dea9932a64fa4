"""RichardsGLU and PolyAttention against torch and the CPU: python benchmarks/dispatch.py [part ...]

Needs a GPU and about two minutes, half of them for torch.compile. Parts: curves, attention, layers.
Without any, all of them are measured and the result is written.

1. curves: the pointwise part of RichardsGLU, 16,384 x 4,096 and 65,536 x 1,024 elements of h, and
   one curve of as many elements; bf16 and fp32. Ours: glu_forward; glu_backward and
   richards_finish. The floor is the larger of two times: that of the bytes at the rate of a
   device-to-device copy, and that of the special functions at 16 per clock and multiprocessor, at
   the clock that nvidia-smi reads meanwhile. Both counts are those of the header of
   kernels_cu/richards.cu.
   torch: the curve as its formula stands, and with the line in x evaluated once ("folded", as our
   kernel does), in eager mode and compiled. Their backward is the time of forward and backward less
   that of forward.
2. attention: PolyAttention at T = 2,048, 16 heads of 64, bf16, forward and backward, the core and
   the whole layer: on tensor cores (v2), on fp32 units (v1), and in torch, with products in bf16
   and T x T matrices that are shifted along the diagonal by padding; eager and compiled. Beside
   them reference_poly_attention (fp32, gathered), and flash attention, another function. Peaks of
   memory at T = 2,048 and 4,096.
3. layers: both layers of poly-7m and whole training steps, T = 512, by batch. Ours: bf16 weights
   with fp32 masters, ga.AdamW, replayed. torch: the same model in its own operations,
   bf16 autocast, foreach clip, fused AdamW, launched from Python; its blocks compiled (they share
   one compilation), launched and replayed. The CPU: backend `torch`, fp32, all cores, two sequences
   at a time, because that is faster.

Values are compared with float64 before anything is timed. Each case has a process of its own, in
which ours and its peers are measured in turns; all processes compile side by side first. Times are
those of replayed CUDA graphs of several calls, where nothing else is said.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import os

import memory
import torch
import torch.nn.functional as F
from common import DEVICE, Clock, measuring_here, plain, write
from dispatch_layers import BATCHES, CPU, REPLAYED, Layers, on_the_cpu
from tables import Column, Table, integer, number, ratio, scientific, share, show
from timing import (
    OURS,
    clock_MHz,
    copy_rate,
    gradients,
    multiprocessors,
    peak_MiB,
    random,
    ratios_to_ours,
    relative_error,
    release,
    repeat,
    timed_alike,
)
from torch_layers import (
    COMPILED,
    COMPILED_FOLDED,
    EAGER,
    FOLDED,
    TorchCurve,
    TorchGate,
    in_torch,
    torch_attention,
)
from workers import Workers

from gpuaccel.nn.poly_attention import PolyAttention, reference_poly_attention, reference_query
from gpuaccel.nn.richards_glu import (
    GATE,
    RichardsCurve,
    launch_backward,
    launch_forward,
    reference_richards,
    reference_values,
)

poly = importlib.import_module("gpuaccel.nn.poly_attention")

# ---- cases --------------------------------------------------------------------------------------

# Of the attention's cases.
HEADS, HEAD, T, LONG = 16, 64, 2048, 4096
CASES = {
    "curves": {
        f"{dtype}, {N:,} x {hidden:,}": (dtype, N, hidden, N == 16384)
        for N, hidden in ((16384, 4096), (65536, 1024))
        for dtype in ("bfloat16", "float32")
    },
    "attention": {
        f"batch {B}" + (f", window {window}" if window else ""): (B, window, B == 1 and not window)
        for window in (None, 256)
        for B in (1, 2, 4)
    },
    "layers": BATCHES,
}
# GiB that all cases need side by side.
GIB = 70
# Elements of the copy that gives the copy rate; elements that float64 takes at a time.
COPIED, CHUNK = 2**27, 2**23
# Per element of h (or y): elements read and written, and special functions.
MOVED = {"glu": {"forward": 3, "backward": 5}, "curve": {"forward": 2, "backward": 3}}
SPECIAL = {"glu": {"forward": 6, "backward": 8}, "curve": {"forward": 3, "backward": 4}}
# Special functions of a multiprocessor.
SPECIAL_PER_CLOCK = 16
# Errors against float64 by norm: y and gradients with an element for each of x's; gradients of a
# curve's parameters; a whole layer in bf16.
ELEMENT_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SUM_ERROR = 1e-3
LAYER_ERROR = 3e-2
PLAIN = "ours, v1"
GATHERED = "reference_poly_attention, fp32"
FLASH = "flash attention (another function)"
DIRECTIONS = ("forward", "backward")
VALUES = dict(nu=1.3, k=0.9, m=0.2, beta=1.4, T=1.1, a=0.9, c=0.1, s=1.2, b=-0.1)


@contextlib.contextmanager
def plain_kernels():
    """PolyAttention uses v1: what GPUs without tensor cores and types other than bf16 use."""
    plan, poly.plan = poly.plan, lambda *_: (1, 1)
    try:
        yield
    finally:
        poly.plan = plan


def attend(inputs, dy, degree: int, window: int | None) -> tuple:
    """y of the core, and the gradients of all four inputs, by our launches."""
    inputs, window = [t.detach() for t in inputs], window or dy.shape[1]
    y = poly.launch_forward(*inputs, degree, window)
    return y, *poly.launch_backward(dy, *inputs, degree, window)


def with_plain_kernels(run):
    with plain_kernels():
        return run()


def check(errors: dict, limits: dict):
    """Raises AssertionError for a variant that is too far from float64.

    torch may be five times as far: its score matrices are bf16. A sum of all of them may come out
    near 0, so torch's gradient of the coefficients is not checked.

    errors: variant -> part -> error; limits: part -> largest error of ours"""
    for variant, parts in errors.items():
        ours = variant.startswith(OURS)
        too_far = {
            part: error
            for part, error in parts.items()
            if (ours or part != "dcoefficients") and not error <= limits[part] * (1 if ours else 5)
        }
        assert not too_far, f"{variant} is farther from float64 than {limits}: {too_far}"


# ---- 1: the pointwise part ----------------------------------------------------------------------


class Pointwise:
    """The gated unit of one size and dtype, and (with `alone`) one curve of as many elements."""

    def __init__(self, dtype: str, N: int, hidden: int, alone: bool):
        self.dtype = getattr(torch, dtype)
        self.N = N
        self.hidden = hidden
        activation = RichardsCurve(**VALUES, device=DEVICE)
        gate = RichardsCurve(GATE, bounded=True, nu=0.8, T=1.05, device=DEVICE)
        self.curves = {"glu": (activation, gate)}
        if alone:
            self.curves["curve"] = (activation,)
        # kind -> variant -> (module, parameters of its curves)
        self.torch_modules = {
            kind: self.torch_modules_of(curves) for kind, curves in self.curves.items()
        }
        for kind in self.curves:
            x, dy = self.data(kind)
            for name in (COMPILED, COMPILED_FOLDED):
                self.peer(kind, name, x, dy)()
            del x, dy
            release()

    @staticmethod
    def torch_modules_of(curves) -> dict:
        modules = {}
        for name, folded, compiled in (
            (EAGER, False, False),
            (FOLDED, True, False),
            (COMPILED, False, True),
            (COMPILED_FOLDED, True, True),
        ):
            own = [TorchCurve(copy.deepcopy(curve), folded) for curve in curves]
            module = TorchGate(*own) if len(own) == 2 else own[0]
            thetas = [curve.theta for curve in own]
            modules[name] = torch.compile(module, dynamic=False) if compiled else module, thetas
        return modules

    def data(self, kind: str):
        """x and the gradient of the result."""
        width = 2 * self.hidden if kind == "glu" else self.hidden
        x = random(self.N, width, dtype=self.dtype).requires_grad_()
        return x, random(self.N, self.hidden, seed=2, dtype=self.dtype)

    def peer(self, kind, name, x, dy):
        """Forward and backward of a peer."""
        module, thetas = self.torch_modules[kind][name]
        return lambda: gradients(lambda: module(x), (x, *thetas), dy)

    def ours(self, kind, x, dy) -> dict:
        """forward, backward: our launches."""
        thetas = [curve.theta.detach() for curve in self.curves[kind]]
        settings = [curve.setting for curve in self.curves[kind]]
        forward = lambda: launch_forward(x, thetas, settings)
        kept = forward()[1]
        backward = lambda: launch_backward(dy, x, thetas, kept, settings)
        return {"forward": forward, "backward": backward}

    def exact(self, kind, x, dy) -> tuple:
        """y, dx and the gradient of all thetas in float64, some rows at a time."""
        curves = [copy.deepcopy(curve).double() for curve in self.curves[kind]]
        thetas = [curve.theta for curve in curves]
        dthetas, parts = [torch.zeros_like(theta) for theta in thetas], []
        count = max(1, CHUNK // self.hidden)
        for start in range(0, self.N, count):
            rows = slice(start, start + count)
            wide = x[rows].detach().double().requires_grad_()
            halves = wide.chunk(len(curves), -1)
            y = halves[0]
            for half, curve in zip(halves, curves):
                values = reference_values(curve.theta, curve.setting)
                factor = reference_richards(half, values)
                y = factor if kind == "curve" else y * factor
            dx, *more = torch.autograd.grad(y, (wide, *thetas), dy[rows].double())
            parts.append((y.detach(), dx))
            dthetas = [a + b for a, b in zip(dthetas, more)]
        y, dx = (torch.cat(tensors) for tensors in zip(*parts))
        return y, dx, torch.cat(dthetas)

    def errors(self, kind, x, dy, ours) -> dict:
        """variant -> {"y", "dx", "dtheta"} against float64."""
        exact = self.exact(kind, x, dy)
        runs = {OURS: lambda: (ours["forward"]()[0], *ours["backward"]())}
        for name, (module, _) in self.torch_modules[kind].items():
            both = self.peer(kind, name, x, dy)
            runs[name] = lambda module=module, both=both: (module(x).detach(), *both())
        results = {}
        for name, run in runs.items():
            y, dx, *thetas = run()
            values = y, dx, torch.cat(thetas)
            results[name] = {
                part: relative_error(value, right)
                for part, value, right in zip(("y", "dx", "dtheta"), values, exact)
            }
            del y, dx, values
        return results

    def measure(self) -> dict:
        rate, results = copy_rate(COPIED), {}
        limit = ELEMENT_ERROR[self.dtype]
        for kind in self.curves:
            x, dy = self.data(kind)
            ours = self.ours(kind, x.detach(), dy)
            errors = self.errors(kind, x, dy, ours)
            check(errors, {"y": limit, "dx": limit, "dtheta": SUM_ERROR})
            release()
            clock = clock_MHz(functools.partial(repeat, ours["backward"], 32))
            runs = {(OURS, direction): run for direction, run in ours.items()}
            for name, (module, _) in self.torch_modules[kind].items():
                runs[name, "forward"] = functools.partial(module, x)
                runs[name, "both"] = self.peer(kind, name, x, dy)
            ms, _, refused = timed_alike(runs)
            results[kind] = {
                **self.rows(kind, ms, rate, clock),
                "errors": errors,
                "clock_MHz": clock,
                "copy_GB_per_s": rate,
                "cannot_be_captured": {" ".join(name): why for name, why in refused.items()},
            }
            del x, dy, ours, runs
            release()
        return results

    def rows(self, kind, ms, rate, clock) -> dict:
        """Milliseconds, floors and ratios. ms: (variant, direction or "both") -> milliseconds."""
        rows = {}
        for name in dict.fromkeys(name for name, _ in ms):
            forward = ms[name, "forward"]
            backward = ms[name, "backward"] if name == OURS else ms[name, "both"] - forward
            rows[name] = {"forward": forward, "backward": backward}
        elements, size = self.N * self.hidden, self.dtype.itemsize
        per_ms = SPECIAL_PER_CLOCK * multiprocessors() * clock * 1e3
        floors = {
            direction: {
                "bytes": MOVED[kind][direction] * elements * size / rate / 1e6,
                "special": SPECIAL[kind][direction] * elements / per_ms,
            }
            for direction in DIRECTIONS
        }
        compiled = (COMPILED, COMPILED_FOLDED)
        return {
            "ms": rows,
            "floors_ms": floors,
            "best_compiled": min(compiled, key=lambda name: sum(rows[name].values())),
            "of_floor": {
                direction: max(floor.values()) / rows[OURS][direction]
                for direction, floor in floors.items()
            },
            "times": {
                name: {direction: m[direction] / rows[OURS][direction] for direction in DIRECTIONS}
                for name, m in rows.items()
                if name != OURS
            },
        }


# ---- 2: polynomial attention --------------------------------------------------------------------


class Attention:
    """One batch and window: the core and the whole layer. long: peaks of memory, too."""

    def __init__(self, B: int, window, long: bool):
        self.B = B
        self.window = window
        self.long = long
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
        self.compiled = torch.compile(torch_attention, dynamic=False)
        self.compiled_layer = torch.compile(self.torch_layer, dynamic=False)
        self.core(T)[COMPILED]()
        self.whole()[COMPILED]()
        if long:
            self.core(LONG)[COMPILED]()
        release()

    def data(self, T: int):
        """q_tilde, qkv, pe, coefficients as the layer makes them of random projections; dy."""
        q, k, v, dy = (random(self.B, T, HEADS, HEAD, seed=seed) for seed in range(4))
        q_tilde, qkv = reference_query(q, self.layer.curve), torch.stack([q, k, v], 2)
        tensors = (q_tilde, qkv, self.layer.pe, self.layer.coefficients)
        return [t.detach().clone().requires_grad_() for t in tensors], dy

    def core_of(self, function, inputs):
        """y by a peer, which takes q, k and v one by one."""
        q_tilde, qkv, *others = inputs
        return function(q_tilde, *qkv.unbind(2), *others, self.layer.degree, self.window)

    def core(self, T: int) -> dict:
        """variant -> forward and backward of the core, gradients of all four inputs."""
        inputs, dy = self.data(T)
        q, k, v = (t.transpose(1, 2).requires_grad_() for t in inputs[1].detach().unbind(2))
        functions = {EAGER: torch_attention, COMPILED: self.compiled}
        if self.long:
            functions[GATHERED] = reference_poly_attention

        def both(function):
            return gradients(lambda: self.core_of(function, inputs), inputs, dy)

        def flash():
            attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return gradients(attend, (q, k, v), dy.transpose(1, 2))

        ours = lambda: attend(inputs, dy, self.layer.degree, self.window)
        runs = {OURS: ours, PLAIN: lambda: with_plain_kernels(ours)}
        runs |= {name: functools.partial(both, function) for name, function in functions.items()}
        if self.window is None:
            runs[FLASH] = flash
        return runs

    def whole(self) -> dict:
        """variant -> forward and backward of the layer, gradients of x and every parameter."""
        x, dy = (random(self.B, T, HEADS * HEAD, seed=seed) for seed in (5, 6))
        x.requires_grad_()
        layers = {
            OURS: self.layer,
            PLAIN: self.layer,
            EAGER: self.torch_layer,
            COMPILED: self.compiled_layer,
        }

        def both(layer):
            return gradients(lambda: layer(x), (x, *layer.parameters()), dy)

        runs = {name: functools.partial(both, layer) for name, layer in layers.items()}
        runs[PLAIN] = functools.partial(with_plain_kernels, runs[PLAIN])
        return runs

    def errors(self) -> tuple[dict, int]:
        """The core against float64, one sequence at a time; and two runs of ours.

        Returns (variant -> {"y", "dq_tilde", ...}, elements that differ between the runs)."""
        inputs, dy = self.data(T)
        names = ("y", "dq_tilde", "dqkv", "dpe", "dcoefficients")

        def both(function, inputs, dy):
            y = self.core_of(function, inputs)
            return (y.detach(), *torch.autograd.grad(y, inputs, dy))

        parts = []
        for b in range(self.B):
            sequence = [t[b : b + 1] if t.dim() > 3 else t for t in inputs]
            wide = [t.detach().double().requires_grad_() for t in sequence]
            parts.append(both(reference_poly_attention, wide, dy[b : b + 1].double()))
        exact = [torch.cat(some) if some[0].dim() > 3 else sum(some) for some in zip(*parts)]
        del parts, wide
        values = {
            OURS: lambda: attend(inputs, dy, self.layer.degree, self.window),
            PLAIN: lambda: with_plain_kernels(values[OURS]),
            EAGER: lambda: both(torch_attention, inputs, dy),
            COMPILED: lambda: both(self.compiled, inputs, dy),
        }
        first, second = values[OURS](), values[OURS]()
        differ = sum(int((a != b).sum()) for a, b in zip(first, second))
        del first, second
        errors = {
            name: {part: relative_error(a, b) for part, a, b in zip(names, run(), exact)}
            for name, run in values.items()
        }
        return errors, differ

    def layer_errors(self) -> dict:
        """variant -> errors of the layer's result and of the gradient of x against float64.

        Of the first sequence."""
        x = random(self.B, T, HEADS * HEAD, seed=5)[:1]
        dy = random(self.B, T, HEADS * HEAD, seed=6)[:1]

        def both(layer):
            own = x.to(layer.pe.dtype).requires_grad_()
            y = layer(own)
            return y.detach(), torch.autograd.grad(y, own, dy.to(y.dtype))[0]

        exact = both(copy.deepcopy(self.layer).double())
        return {
            name: dict(zip(("y", "dx"), map(relative_error, both(layer), exact)))
            for name, layer in ((OURS, self.layer), (EAGER, self.torch_layer))
        }

    def measure(self) -> dict:
        errors, differ = self.errors()
        check(errors, dict.fromkeys(errors[OURS], ELEMENT_ERROR[torch.bfloat16]))
        assert differ == 0, f"two runs of ours differ in {differ} elements, expected none"
        layer_errors = self.layer_errors()
        check(layer_errors, {"y": LAYER_ERROR, "dx": LAYER_ERROR})
        release()
        result = {"errors": errors, "layer_errors": layer_errors, "differ": differ}
        for part, make in (("core", functools.partial(self.core, T)), ("layer", self.whole)):
            runs = make()
            ms, _, refused = timed_alike(runs)
            result[part] = {
                "ms": ms,
                "cannot_be_captured": refused,
                "times": ratios_to_ours(ms),
                "peak_MiB": {name: peak_MiB(run) for name, run in runs.items()},
            }
            del runs
            release()
        if self.long:
            peaks = {name: peak_MiB(run) for name, run in self.core(LONG).items()}
            before = result["core"]["peak_MiB"]
            grows = {name: mib / before[name] for name, mib in peaks.items()}
            result["long"] = {"T": [T, LONG], "peak_MiB": peaks, "grows": grows}
        return result


# ---- tables -------------------------------------------------------------------------------------


def curves_tables(r: dict) -> dict[str, Table]:
    """ "pointwise": ours. Against the faster of torch's two formulations, eager and compiled."""
    columns = [Column("elements", "case")]
    for d in DIRECTIONS:
        columns += [
            Column(f"{d}: ms", f"{d} ms", number),
            Column(f"{d}: of the limit", f"{d} of_floor", share),
            Column(f"{d}: against compiled", f"{d} compiled", ratio),
            Column(f"{d}: against eager", f"{d} eager", ratio),
        ]
    columns.append(Column("error", "error", scientific))
    rows = []
    for case, kinds in r.items():
        for kind, m in kinds.items():
            row = {"case": f"{case}: {'gated unit' if kind == 'glu' else 'one curve'}"}
            for d in DIRECTIONS:
                row |= {
                    f"{d} ms": m["ms"][OURS][d],
                    f"{d} of_floor": m["of_floor"][d],
                    f"{d} compiled": m["times"][m["best_compiled"]][d],
                    f"{d} eager": min(m["times"][name][d] for name in (EAGER, FOLDED)),
                }
            rows.append({**row, "error": max(m["errors"][OURS].values())})
    return {"pointwise": Table(columns, rows)}


def attention_tables(r: dict) -> dict[str, Table]:
    """ "core" and "layer", and "memory": the peak of the core with longer sequences."""
    columns = [
        Column("batch", "case"),
        Column("ms", "ms", number),
        Column("against compiled", COMPILED, ratio),
        Column("against eager", EAGER, ratio),
        Column("against v1", PLAIN, ratio),
        Column("MiB", "MiB", number),
        Column("compiled, MiB", "compiled_MiB", number),
        Column("error", "error", scientific),
    ]
    made = {}
    for part, errors in (("core", "errors"), ("layer", "layer_errors")):
        rows = []
        for case, m in r.items():
            peaks = m[part]["peak_MiB"]
            row = {"case": case, "ms": m[part]["ms"][OURS], **m[part]["times"]}
            row |= {"MiB": peaks[OURS], "compiled_MiB": peaks[COMPILED]}
            rows.append({**row, "error": max(m[errors][OURS].values())})
        made[part] = Table(columns, rows)
    long = [Column("core", "name"), Column("MiB", "MiB", number), Column("grows", "grows", ratio)]
    grown = [
        {
            "name": f"T = {m['long']['T'][1]:,}: {name}",
            "MiB": MiB,
            "grows": m["long"]["grows"][name],
        }
        for m in r.values()
        if "long" in m
        for name, MiB in m["long"]["peak_MiB"].items()
    ]
    return {**made, "memory": Table(long, grown)}


def layers_tables(r: dict) -> dict[str, Table]:
    columns = [
        Column("batch, part", "case"),
        Column("ms", "ms", number),
        Column("against compiled", COMPILED, ratio),
        Column("against compiled, replayed", REPLAYED, ratio),
        Column("against eager", EAGER, ratio),
        Column("against the CPU", CPU, number),
        Column("cores", "cores", integer),
    ]
    rows: dict[str, list] = {"layers": [], "steps": []}
    for case, parts in r.items():
        for part, m in parts.items() if isinstance(parts, dict) else ():
            row = {
                "case": f"{case}: {part}",
                "ms": m["ms"][OURS],
                **m["times"],
                "cores": r["cores"],
            }
            rows["steps" if part == "step" else "layers"].append(row)
    return {name: Table(columns, some) for name, some in rows.items()}


# ---- the script ---------------------------------------------------------------------------------

PARTS = {
    "curves": (Pointwise, curves_tables),
    "attention": (Attention, attention_tables),
    "layers": (Layers, layers_tables),
}


def tables(results: dict) -> dict[str, Table]:
    return {
        name: table
        for part, result in results.items()
        for name, table in PARTS[part][1](result).items()
    }


def cases_that_fit() -> tuple[dict, str | None]:
    """The cases for the memory that is there; in words, if they are fewer."""
    if memory.available_GiB() >= GIB:
        return CASES, None
    batches = (4, 8)
    words = f"layers and steps in batches of {' and '.join(map(str, batches))}"
    return {**CASES, "layers": {f"batch {B}": (B,) for B in batches}}, words


def measure(
    parts, cases=None, here: bool = False, at_once: bool = True, done=lambda *_: None
) -> dict:
    """part -> case -> result. A case that fails is printed and the others go on, so that one run
    tells all.

    here: in this process (for tests)
    at_once: all cases compile side by side, which takes memory
    done(part, result): called after each part

    Raises RuntimeError that names the cases that failed, if any."""
    cases, clock, results, failed = cases or CASES, Clock(), {}, []
    variants = {
        (part, case): (PARTS[part][0], *args)
        for part in parts
        for case, args in cases[part].items()
    }
    with Workers(variants, here, at_once) as workers:
        workers.ready()
        clock.say("all is compiled" if at_once else "each case compiles in its turn")
        for part in parts:
            results[part] = {}
            for case in cases[part]:
                try:
                    results[part][case] = workers.ask((part, case), "measure")
                except (AssertionError, RuntimeError) as error:
                    failed.append(f"{part}, {case}: {error}")
                    print(failed[-1])
                workers.close((part, case))
                clock.say(f"{part}, {case}")
            if part != "layers":
                results[part] = plain(results[part])
                done(part, results[part])
    if "layers" in parts:
        # The workers have ended: all cores are free.
        config = next((args[1] for args in cases["layers"].values() if len(args) > 1), None)
        results["layers"] = plain(on_the_cpu(results["layers"], cases["layers"], config))
        done("layers", results["layers"])
    if failed:
        raise RuntimeError("\n".join(failed))
    return results


def main():
    parser = argparse.ArgumentParser(
        description="RichardsGLU and PolyAttention against torch and the CPU."
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"some of: {', '.join(PARTS)}; then nothing is written",
    )
    chosen = parser.parse_args().parts
    unknown = set(chosen) - PARTS.keys()
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    # A kernel that does not run here stops the benchmark; otherwise torch would take its place.
    os.environ["GPUACCEL_GPU"] = "require"
    parts = [name for name in PARTS if not chosen or name in chosen]
    cases, size = cases_that_fit()
    with measuring_here():
        results = measure(
            parts, cases, at_once=not size, done=lambda part, result: show(tables({part: result}))
        )
        if not chosen:
            write("dispatch", results, size=size)


if __name__ == "__main__":
    main()
