"""Pictures of RichardsGLU and PolyAttention, and what their notebooks measure: curves, passes over
memory, gradients, allocations, attention maps.

    layer_figures.explore("none", nu=0.3)              # a curve; in a notebook with sliders
    layer_figures.plot(x, {"sigmoid": x.sigmoid()})    # one panel, of tensors
    layer_figures.lines({"R": {"sigmoid": [(-1, 0.3), (1, 0.7)]}})      # linear axes
    layer_figures.passes({"torch": f, "ours": g}, x, parameters)        # bytes moved
    layer_figures.gated_unit()                         # x, its halves, value and gate, y
    layer_figures.fit(gradient)                        # losses with a backward of one's own
    layer_figures.gradient_errors(layer, x, dy)        # of each gradient, against float64
    layer_figures.tiles(256, 32)                       # tiles of weights that are computed
    layer_figures.allocated(run)                       # the largest tensor, and the peak
    layer_figures.poly_memory("torch", 256, "cpu")     # the same of polynomial attention
    layer_figures.maps({"softmax": p, "polynomial": q}, "the cat")      # (T, T) weights
    layer_figures.attention_map(model, tokens, block=0)                 # (heads, T, T)

Each picture is a Figure of measured values: operations are seen where torch dispatches them,
allocations by torch's profiler.
"""

import copy
import itertools
import math
from collections.abc import Callable
from typing import get_args

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...errors import ArgumentError
from ...graphs import ALLOCATIONS
from ...measure import profiler_sees_gpu, quiet_profiler, trace_events
from ...nn import (
    DEFAULTS,
    LEAST,
    NAMES,
    RichardsCurve,
    Variant,
    poly_attention,
    reference_poly_attention,
    reference_richards,
)
from ...notebook import notebook_shell
from ...training import rotate
from .drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RUN_COLOURS,
    WHITE,
    WIDTH,
    Figure,
    Ink,
    nice_ticks,
    plural,
    spread,
    text_width,
)
from .sliders import display_below_sliders

# curves are drawn for x between -REACH and REACH
REACH = 6.0
POSITIVE = ("nu", "k", "beta", "T")


# ---- lines --------------------------------------------------------------------------------------


def lines(
    panels: "dict[str, dict[str, list]]",
    title: str = "",
    x_label: str = "x",
    dashed=(),
    height: int = 190,
) -> Figure:
    """Panels side by side on linear axes; a name has one colour in all panels.

    Args:
        panels: title -> name -> [(x, y)].
        dashed: names that are drawn thin and broken.
        height: of the panels, in pixels.
    """
    ink = Ink()
    top = 50 if title else 28
    if title:
        ink.title(16, title)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    coloured = [name for name in names if name not in dashed]
    colours = dict(zip(coloured, itertools.cycle(RUN_COLOURS)))
    colours |= dict.fromkeys(dashed, GREY)
    width = (WIDTH - 24 * (len(panels) - 1)) / len(panels)
    # space for the names behind the last panel
    margin = 8
    if len(names) > 1:
        margin = max(text_width(name, 12) for name in names) * 1.15 + 14
    summaries = []
    for k, (name, panel) in enumerate(panels.items()):
        left = k * (width + 24)
        is_last = k == len(panels) - 1
        box = (left + 40, top, left + width - (margin if is_last else 8), top + height)
        _draw_panel(ink, box, name, x_label, panel, colours, dashed, is_last)
        summaries.append(f"{name}: {', '.join(panel)}")
    summary = "; ".join(summaries)
    return Figure(ink, top + height + 26, f"{title}: {summary}" if title else summary)


def plot(
    x: torch.Tensor,
    named: "dict[str, torch.Tensor]",
    title: str = "",
    x_label: str = "x",
    dashed=(),
    height: int = 190,
) -> Figure:
    """One panel of lines(): a line for each tensor over x. Both are on any device."""
    xs = x.detach().tolist()
    drawn = {name: list(zip(xs, y.detach().tolist())) for name, y in named.items()}
    return lines({title: drawn}, x_label=x_label, dashed=dashed, height=height)


def _draw_panel(ink, box, title, x_label, panel, colours, dashed, named):
    """One panel of lines(). named: write each line's name at its end. NaN is left out."""
    left, top, right, bottom = box
    points = [p for line in panel.values() for p in line if p[1] == p[1]]
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    ticks = nice_ticks(min(y for _, y in points), max(y for _, y in points))
    low, high = ticks[0], ticks[-1]

    def place(x, y):
        across = (x - x0) / ((x1 - x0) or 1.0)
        up = (y - low) / (high - low)
        return left + across * (right - left), bottom - up * (bottom - top)

    ink.text(left - 36, top - 12, title, 12.5, weight=600)
    for tick in ticks:
        y = place(x0, tick)[1]
        ink.line(left, y, right, y, opacity=0.9 if abs(tick) < 1e-12 else 0.4)
        ink.text(left - 7, y + 4, f"{tick:.6g}", 11, ink.soft, "end")
    label_left = right - text_width(x_label, 11) - 12
    for tick in nice_ticks(x0, x1, 5):
        x = place(tick, low)[0]
        if x0 - 1e-9 <= tick and x < label_left:
            ink.text(x, bottom + 17, f"{tick:g}", 11, ink.soft, "middle")
    ink.text(right, bottom + 17, x_label, 11, ink.soft, "end")
    ends = []
    for name, line in panel.items():
        places = [place(x, y) for x, y in line if y == y]
        is_dashed = name in dashed
        width, dash = (1.6, "5 4") if is_dashed else (2.4, None)
        ink.polyline(places, colours[name], width, dash=dash)
        ends.append((name, place(*line[-1])[1]))
    if named and len(colours) > 1:
        for (name, _), y in zip(ends, spread([y for _, y in ends], 16, top, bottom)):
            colour = ink.soft if name in dashed else colours[name]
            ink.text(right + 9, y + 4, name, 12, colour, weight=600)


# ---- the curve ----------------------------------------------------------------------------------


def curve_points(
    curve: RichardsCurve, reach: float = REACH, count: int = 161
) -> "tuple[list, list]":
    """(x, R(x)) and (x, R'(x)) of a curve, in float64 by its definition in torch."""
    x = torch.linspace(-reach, reach, count, dtype=torch.float64, requires_grad=True)
    values = curve.values().detach().double().cpu()
    y = reference_richards(x, values, curve.variant == "tanh", curve.birch)
    (slope,) = torch.autograd.grad(y.sum(), x)
    xs = x.detach().tolist()
    return list(zip(xs, y.detach().tolist())), list(zip(xs, slope.tolist()))


def curves(named: "dict[str, RichardsCurve]", title: str = "", dashed=()) -> Figure:
    """Several curves, and their derivatives beside them."""
    points = {name: curve_points(curve) for name, curve in named.items()}
    panels = {
        "R(x)": {name: values for name, (values, _) in points.items()},
        "R'(x)": {name: slopes for name, (_, slopes) in points.items()},
    }
    return lines(panels, title, dashed=dashed)


class explore:
    """A curve and its derivative beside the logistic one; in a notebook with sliders.

    There are sliders for the nine parameters. The picture stays in the saved notebook.

    Args:
        variant, values: as for RichardsCurve, which raises for what cannot be.
    """

    def __init__(self, variant: Variant = "none", **values):
        self.variant = variant
        self.values = values
        self.curve()

    def curve(self) -> RichardsCurve:
        """The curve with the present parameters."""
        return RichardsCurve(self.variant, **self.values)

    def picture(self) -> Figure:
        curve = self.curve()
        changed = [
            f"{name} = {value:.2g}"
            for name, value in zip(NAMES, curve.setting)
            if value != DEFAULTS[name]
        ]
        title = ", ".join(changed) or "all parameters as at the beginning"
        if self.variant != "none":
            title = f"{self.variant}, {title}"
        return curves({"logistic": RichardsCurve(), "yours": curve}, title, dashed=("logistic",))

    def __repr__(self):
        return repr(self.picture())

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.picture()._repr_mimebundle_()

    def _ipython_display_(self):
        sliders = self._sliders() if notebook_shell() is not None else None
        self._handle = display_below_sliders(
            self, sliders, "Run this cell to move the nine parameters with sliders."
        )

    def _sliders(self):
        """A box of nine sliders and the variants; None without ipywidgets."""
        try:
            import ipywidgets as W
        except ImportError:
            return None
        look = dict(
            layout=W.Layout(width="252px"),
            style={"description_width": "42px"},
            readout_format=".2f",
        )
        sliders = {}
        for name, value in zip(NAMES, self.curve().setting):
            if name in POSITIVE:
                exponent = math.log10(value)
                sliders[name] = W.FloatLogSlider(
                    value,
                    min=min(-2.0, exponent),
                    max=max(1.5, exponent),
                    step=0.02,
                    description=name,
                    **look,
                )
            else:
                sliders[name] = W.FloatSlider(
                    value,
                    min=min(-3.0, value),
                    max=max(3.0, value),
                    step=0.05,
                    description=name,
                    **look,
                )
        variants = W.Dropdown(
            options=get_args(Variant),
            value=self.variant,
            description="variant",
            layout=W.Layout(width="252px"),
            style={"description_width": "52px"},
        )

        def redraw(_):
            self.variant = variants.value
            self.values = {
                name: max(slider.value, LEAST) if name in POSITIVE else slider.value
                for name, slider in sliders.items()
            }
            self._handle.update(self._repr_mimebundle_(), raw=True)

        def start_variant(_):
            for name, value in zip(NAMES, RichardsCurve(variants.value).setting):
                sliders[name].value = value
            redraw(_)

        for slider in sliders.values():
            slider.observe(redraw, "value")
        variants.observe(start_variant, "value")
        return W.HBox([*sliders.values(), variants], layout=W.Layout(flex_flow="row wrap"))


# ---- a small gated unit, and its training -------------------------------------------------------


class _GatedUnit(torch.autograd.Function):
    """x + (x1 sigmoid(x1) sigmoid(x2)) w_out, x1, x2 the halves of x w_in, with a given backward.

    gradient: function(dh, x1, x2) that returns dx1 and dx2.
    residual: whether the backward adds dy to dx."""

    @staticmethod
    def forward(ctx, x, w_in, w_out, gradient, residual):
        x1, x2 = (x @ w_in.T).chunk(2, -1)
        h = x1 * x1.sigmoid() * x2.sigmoid()
        ctx.save_for_backward(x, w_in, w_out, x1, x2, h)
        ctx.gradient = gradient
        ctx.residual = residual
        return x + h @ w_out.T

    @staticmethod
    def backward(ctx, dy):
        x, w_in, w_out, x1, x2, h = ctx.saved_tensors
        dx1, dx2 = _two_like(x1, ctx.gradient(dy @ w_out, x1, x2))
        both = torch.cat([dx1, dx2], -1)
        dx = both @ w_in + dy if ctx.residual else both @ w_in
        return dx, both.T @ x, dy.T @ h, None, None


def _two_like(x1, result):
    """dx1 and dx2 of what a gradient function returned; ArgumentError where it is not these two."""
    expected = f"expected dx1 and dx2, two tensors of shape {tuple(x1.shape)}"
    if not isinstance(result, (torch.Tensor, tuple, list)) or len(result) != 2:
        raise ArgumentError(f"gradient: {expected}, got {type(result).__name__}")
    for name, d in zip(("dx1", "dx2"), result):
        if not isinstance(d, torch.Tensor) or d.shape != x1.shape:
            got = tuple(d.shape) if isinstance(d, torch.Tensor) else type(d).__name__
            raise ArgumentError(f"gradient: {expected}, got {name}: {got}")
    return result


def _gated_unit(x, w_in, w_out):
    """The same with autograd's backward."""
    x1, x2 = (x @ w_in.T).chunk(2, -1)
    return x + (x1 * x1.sigmoid() * x2.sigmoid()) @ w_out.T


def fit(gradient=None, residual: bool = True, steps: int = 100) -> "list[tuple[int, float]]":
    """(step, loss) of four gated units that learn what four others compute, on the CPU.

    Args:
        gradient: function(dh, x1, x2) that returns dx1 and dx2, or one tensor of both; None:
            autograd.
        residual: whether the backward of a unit adds the gradient of its residual.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 16), (16, 32)] * 4

    def weights():
        return [torch.randn(s, generator=generator) * (2 / s[1]) ** 0.5 for s in shapes]

    def outputs(x, matrices, unit):
        for w_in, w_out in zip(matrices[::2], matrices[1::2]):
            x = unit(x, w_in, w_out)
        return x

    def unit(x, w_in, w_out):
        if gradient is None:
            return _gated_unit(x, w_in, w_out)
        return _GatedUnit.apply(x, w_in, w_out, gradient, residual)

    teacher = weights()
    learned = [w.requires_grad_() for w in weights()]
    optimizer = torch.optim.Adam(learned, lr=3e-3)
    losses = []
    for step in range(steps):
        x = torch.randn(64, 16, generator=generator)
        expected = outputs(x, teacher, _gated_unit)
        loss = (outputs(x, learned, unit) - expected).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((step, loss.item()))
    return losses


def gated_unit() -> Figure:
    """The way of a number through a gated unit: two halves, a value, a gate, the residual."""
    ink = Ink()

    def arrow(x1, y1, x2, y2):
        ink.segment(x1, y1, x2 - 5, y2, GREY, 1.6)
        ink.path(f"M{x2 - 7:.1f} {y2 - 4:.1f}l7 4l-7 4z", GREY)

    def box(x, y, width, words, colour, below=""):
        ink.box(x, y - 17, width, 34, colour, words)
        ink.text(x + width / 2, y + 34, below, 11.5, ink.soft, "middle")

    middle, value, gate = 92.0, 46.0, 138.0
    ink.text(14, middle + 4, "x", 14, anchor="middle", weight=600)
    arrow(26, middle, 62, middle)
    box(62, middle, 70, "W_in", GREY, "a product")
    for y, words in ((value, "x1"), (gate, "x2")):
        ink.segment(132, middle, 166, y, GREY, 1.6)
        ink.text(182, y + 4, words, 13, anchor="middle", weight=600)
        arrow(198, y, 232, y)
    box(232, value, 150, "x1 · curve a(x1)", BLUE, "the value")
    box(232, gate, 150, "curve g(x2)", ORANGE, "the gate, 0 to 1")
    for y in (value, gate):
        ink.segment(382, y, 424, middle, GREY, 1.6)
    ink.dot(434, middle, 13, GREEN)
    ink.text(434, middle + 5, "×", 15, WHITE, "middle", 700)
    arrow(447, middle, 500, middle)
    ink.text(472, middle - 8, "h", 13, anchor="middle", weight=600)
    box(500, middle, 70, "W_out", GREY, "a product")
    arrow(570, middle, 634, middle)
    ink.dot(647, middle, 13, GREEN)
    ink.text(647, middle + 5, "+", 15, WHITE, "middle", 700)
    arrow(660, middle, 706, middle)
    ink.text(722, middle + 4, "y", 14, anchor="middle", weight=600)
    ink.polyline([(14, 80), (14, 12), (647, 12), (647, 74)], GREY, 1.6)
    ink.path("M643 72l4 7l4 -7z", GREY)
    ink.text(500, 28, "the residual: x itself", 11.5, ink.soft, "middle")
    words = "x1 and x2 are the halves of x W_in; value times gate is h; y = x + h W_out"
    return Figure(ink, 186, words)


# ---- gradients against float64 ------------------------------------------------------------------


def _gradients(layer, x, dy):
    """Gradients of a layer's input and parameters."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)


def equal_gradients(layer, x: torch.Tensor, dy: torch.Tensor) -> int:
    """How many gradients of a layer are bit-identical when they are computed twice."""
    pairs = zip(_gradients(layer, x, dy), _gradients(layer, x, dy))
    return sum(first.equal(second) for first, second in pairs)


def gradient_errors(layer, x: torch.Tensor, dy: torch.Tensor) -> "dict[str, float]":
    """How far each gradient of a layer is from float64: name -> relative difference.

    The same layer is run in float64 by its definition. x: its input. dy: gradient of its output."""

    names = ["x", *(name for name, _ in layer.named_parameters())]
    grads = _gradients(layer, x, dy)
    exact = _gradients(copy.deepcopy(layer).double(), x.double(), dy.double())
    return {
        name: float((grad - expected).norm() / expected.norm().clamp(min=1e-30))
        for name, grad, expected in zip(names, grads, exact)
    }


def difference_errors(
    layer, x: torch.Tensor, dy: torch.Tensor, h: float = 1e-5
) -> "dict[str, float]":
    """How far each gradient of a layer is from finite differences: name -> relative difference.

    Args:
        layer, x, dy: in float64, and small: the layer runs twice for each number of x and
            parameters.
        h: the step to both sides.
    """
    grads = _gradients(layer, x, dy)
    x = x.detach().clone()
    tensors = [("x", x), *layer.named_parameters()]
    errors = {}
    with torch.no_grad():
        for (name, t), grad in zip(tensors, grads):
            flat = t.view(-1)
            by_steps = torch.empty_like(flat)
            for i, value in enumerate(flat.tolist()):
                sums = []
                for moved in (value + h, value - h):
                    flat[i] = moved
                    sums.append((layer(x) * dy).sum())
                flat[i] = value
                by_steps[i] = (sums[0] - sums[1]) / (2 * h)
            errors[name] = float((grad.view(-1) - by_steps).norm() / by_steps.norm())
    return errors


def glu_variants(layer) -> "dict[str, Callable]":
    """What a RichardsGLU computes between its two products, h of the halves, in two ways.

    "torch": operations of torch, with each curve folded into a line, a power and a scale first.
    "gpuaccel": one operation."""
    activation, gate = layer.activation, layer.gate

    def curve(x, values):
        nu, k, m, beta, T, a, c, s, b = values.unbind()
        t = beta.log() - k * nu * (b - m) - k * nu * s / T * x
        return a * torch.exp(F.softplus(t) / -nu) + c

    def by_torch(halves):
        x1, x2 = halves.chunk(2, -1)
        return x1 * curve(x1, activation.values()) * curve(x2, gate.values())

    def by_kernel(halves):
        return torch.ops.gpuaccel.richards_glu(
            halves, activation.theta, gate.theta, activation.setting, gate.setting
        )[0]

    return {"torch": by_torch, "gpuaccel": by_kernel}


# ---- passes over memory -------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Records the operations that run inside, in order.

    `operations`: (name, bytes read, bytes written). Views and memory without a value are none."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in inputs}
        outputs = [
            t
            for t in tree_leaves(result)
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in storages
        ]
        if func.name().startswith((*ALLOCATIONS, "aten::lift_fresh")):
            return result
        if outputs or func._schema.is_mutable:
            name = func.name().split("::")[1].split(".")[0]
            written = outputs or inputs[:1]
            read = inputs[1:] if _ignores_first(name) else inputs
            self.operations.append((name, sum(map(_bytes, read)), sum(map(_bytes, written))))
        return result


def _ignores_first(operation) -> bool:
    """Whether an operation does not read its first argument's values."""
    return (
        operation in ("copy_", "fill_", "zero_")
        or operation.endswith("_like")
        or operation.startswith("new_")
    )


def _bytes(t) -> int:
    """How many bytes of memory a tensor touches (less than its elements where it is expanded)."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


class Passes(Figure):
    """The picture of passes() and its numbers.

    `counts[name][phase]`, phase "forward" or "backward": "operations", "small" operations, and
    "bytes" per element of h."""

    def __init__(self, ink, height, words, counts):
        super().__init__(ink, height, words)
        self.counts = counts


def passes(
    variants: "dict[str, Callable]",
    x: torch.Tensor,
    parameters,
    title: str = "Operations, and the bytes they read (full) and write (pale), per element of h",
) -> Passes:
    """The operations of forward and backward, a box each, as wide as the bytes that it moves.

    Operations on less than half of h's elements are counted and not drawn.

    Args:
        variants: name -> function of x that returns h; each is run for x and the parameters.
    """
    counts: "dict[str, dict[str, dict[str, float]]]" = {}
    # (name, phase) -> (bytes read, bytes written) per element of h, of each operation
    boxes: "dict[tuple[str, str], list[tuple[float, float]]]" = {}
    for name, function in variants.items():
        x = x.detach().requires_grad_()
        with Traffic() as forward:
            h = function(x)
        dh = torch.ones_like(h)
        with Traffic() as backward:
            torch.autograd.grad(h, [x, *parameters], dh)
        for phase, traffic in (("forward", forward), ("backward", backward)):
            large = [
                (read / h.numel(), written / h.numel())
                for _, read, written in traffic.operations
                if read + written >= 0.5 * h.numel() * h.element_size()
            ]
            boxes[name, phase] = large
            counts.setdefault(name, {})[phase] = {
                "operations": len(large),
                "small": len(traffic.operations) - len(large),
                "bytes": sum(read + written for read, written in large),
            }
    ink, height, words = _draw_passes(boxes, counts, title)
    return Passes(ink, height, words, counts)


def _draw_passes(boxes, counts, title):
    """(ink, height, words) of the picture."""
    ink = Ink()
    left, y = 78, 42.0
    summaries = []
    ink.title(16, title)
    longest = max(sum(read + written for read, written in row) for row in boxes.values())
    scale = (WIDTH - left - 4) / longest
    for (name, phase), row in boxes.items():
        if phase == "forward":
            ink.text(0, y + 4, name, 12.5, weight=600)
            y += 14
        count = counts[name][phase]
        words = f"{plural(count['operations'], 'operation')}, {count['bytes']:.0f} bytes"
        if count["small"]:
            words += f" (and {plural(count['small'], 'small operation')})"
        summaries.append(f"{name} {phase} {words}")
        ink.text(left - 10, y + 15, phase, 12, ink.soft, "end")
        x = left
        colour = BLUE if phase == "forward" else ORANGE
        for read, written in row:
            for part, opacity in ((read, 1.0), (written, 0.45)):
                if part:
                    ink.rect(x, y, max(part * scale, 0.5), 22, colour, opacity)
                    x += part * scale
            ink.rect(x - 1, y - 1, 1, 24, ink.strong)
        # below the boxes where there is no room behind them
        if x + text_width(words, 12) * 0.95 + 10 > WIDTH:
            ink.text(left, y + 38, words, 12, ink.soft)
            y += 48
        else:
            ink.text(x + 8, y + 15, words, 12)
            y += 30
        if phase == "backward":
            y += 8
    return ink, y + 2, "; ".join(summaries)


# ---- what is allocated --------------------------------------------------------------------------


def allocated(run) -> "tuple[int, int]":
    """(bytes of the largest tensor that run() makes, the most bytes that all of them have at once).

    Call run() once before, so that caches are full."""
    activities = [ProfilerActivity.CPU]
    if profiler_sees_gpu():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, profile_memory=True)
    with quiet_profiler(), profiler:
        run()
    with quiet_profiler():
        events = trace_events(profiler)
    changes = [event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"]
    current = peak = largest = 0
    for change in changes:
        current += change
        largest = max(largest, change)
        peak = max(peak, current)
    return largest, peak


def poly_memory(variant: str, T: int, device) -> "tuple[int, int]":
    """What allocated() says of polynomial attention, forward and backward, for T tokens.

    Args:
        variant: "torch", its definition with T x T matrices, or "gpuaccel".
    """
    attention = {"torch": reference_poly_attention, "gpuaccel": poly_attention}[variant]
    q, k, v = torch.randn(3, 1, T, 2, 32, device=device)
    pe = torch.randn(T, 32, device=device)
    coefficients = torch.tensor([1.0, 0.0, 0.1], device=device)
    inputs = [t.requires_grad_() for t in (q, k, v, pe, coefficients)]

    def run():
        return torch.autograd.grad(attention(q, *inputs).sum(), inputs)

    run()
    return allocated(run)


# ---- tiles of the T x T weights -----------------------------------------------------------------


class Tiles(Figure):
    """The picture of tiles() and its numbers.

    Args:
        computed: tiles that hold a weight which counts. all: tiles of the square.
    """

    def __init__(self, ink, height, words, computed, all):
        super().__init__(ink, height, words)
        self.computed = computed
        self.all = all


def tiles(T: int, tile: int, window: "int | None" = None) -> Tiles:
    """Which tiles of T x T weights causal attention computes: one thread block per row of tiles.

    Args:
        window: how many positions a token sees, itself included; None: all before it.
    """
    window = window or T
    count = -(-T // tile)
    step = min(24.0, 260.0 / count)
    ink = Ink()
    left, top = 92.0, 44.0
    computed = 0
    ink.text(left, top - 26, f"keys, {tile} in a column", 11.5, ink.soft)
    for i in range(count):
        colour = RUN_COLOURS[i % 4]
        ink.text(left - 10, top + (i + 0.68) * step, f"block {i}", 11, ink.soft, "end")
        for j in range(count):
            # the first query of the tile sees back to its own position - window + 1
            sees = j <= i and (j + 1) * tile - 1 > i * tile - window
            computed += sees
            x, y = left + j * step, top + i * step
            if sees:
                ink.rect(x + 1, y + 1, step - 2, step - 2, colour, rx=3)
            else:
                ink.rect(x + 1, y + 1, step - 2, step - 2, GREY, 0.14, rx=3)
    words = (
        f"{T} tokens, tiles of {tile} x {tile}: {computed} of {count * count} tiles are computed"
    )
    x = left + count * step + 28
    ink.text(x, top + 14, f"{computed} of {count * count} tiles are computed,", 12.5, weight=600)
    ink.text(x, top + 34, "one after the other in each block;", 12.5)
    ink.text(x, top + 54, "a tile is gone when the next one begins.", 12.5)
    return Tiles(ink, top + count * step + 8, words, computed, count * count)


# ---- attention maps -----------------------------------------------------------------------------

LEVELS = 16  # shades of a colour


def letters(text: str) -> torch.Tensor:
    """A random vector for each letter of a text, equal ones for equal letters: (1, T, 1, 32)."""
    vectors = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
    return (2.2 * F.normalize(vectors, dim=1))[list(text.encode())][None, :, None]


def poly_map(q: torch.Tensor, k: torch.Tensor, degree: int, window: "int | None" = None):
    """Weights of polynomial attention, (T, T), from scores alone: no low-rank term, no distances.

    Args:
        q, k: (1, T, 1, d), T at most d.
    """
    T, d = q.shape[1], q.shape[3]
    unit = torch.eye(T, d, device=q.device)[None, :, None]
    coefficients = torch.tensor([1.0, 0.0, 1.0], device=q.device)
    no_distances = torch.zeros(T, d, device=q.device)
    y = poly_attention(q, q, k, unit, no_distances, coefficients, degree, window)
    return y[0, :, 0, :T]


def softmax_map(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Weights of causal softmax attention, (T, T), of the same scores. q, k: (1, T, 1, d)."""
    scores = q[0, :, 0] @ k[0, :, 0].T
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)


def maps(weights: "dict[str, torch.Tensor]", text: str, title: str = "") -> Figure:
    """Attention weights over the letters of a text: positive ones blue, negative ones orange.

    Args:
        weights: name -> (T, T), query by row and key by column.
        text: T letters, 40 at most.
    """
    ink = Ink()
    T = len(text)
    columns = min(len(weights), 4 if T <= 20 else 2)
    width = (WIDTH - 22 * (columns - 1)) / columns
    step = min((width - 20) / T, 15.0)
    height = T * step + 66
    top = 20.0
    summaries = []
    if title:
        ink.title(16, title)
        top += 24
    for k, (name, map) in enumerate(weights.items()):
        values = map.detach().double().cpu()
        x = k % columns * (width + 22) + 16
        y = top + k // columns * height + 26
        ink.text(x - 16, y - 26, name, 12.5, weight=600)
        _draw_map(ink, values, text, x, y, step)
        facts = [f"rows add up to {_range_words(values.sum(1))}"]
        negative = float((values < 0).double().mean() * 2 * T / (T + 1))
        if negative > 0.004:
            facts.append(f"{negative:.0%} negative")
        if text_width(", ".join(facts), 11.5) < width:
            facts = [", ".join(facts)]
        for line, words in enumerate(facts):
            ink.text(x - 16, y + T * step + 17 + 15 * line, words, 11.5, ink.soft)
        summaries.append(f"{name}: {', '.join(facts)}")
    bottom = top + -(-len(weights) // columns) * height - 6
    summary = "; ".join(summaries)
    return Figure(ink, bottom, f"{title}: {summary}" if title else summary)


def _draw_map(ink, values, text, x, y, step):
    """One (T, T) map with the letters above it and left of it."""
    T = len(text)
    size = f"{min(11.0, step + 1):.1f}"
    for i, letter in enumerate(text):
        letter = "·" if letter.isspace() else letter
        ink.text(x - 6, y + (i + 0.75) * step, letter, size, ink.soft, "middle")
        ink.text(x + (i + 0.5) * step, y - 5, letter, size, ink.soft, "middle")
    largest = values.abs().max().item() or 1.0
    side = step - 0.8
    for colour, sign in ((BLUE, 1), (ORANGE, -1)):
        levels = (values * sign / largest * LEVELS).round().clamp(min=0).int().tolist()
        paths = {}  # level -> its squares
        for i in range(T):
            for j in range(T):
                square = (
                    f"M{x + j * step:.1f} {y + i * step:.1f}h{side:.1f}v{side:.1f}h{-side:.1f}z"
                )
                paths[levels[i][j]] = paths.get(levels[i][j], "") + square
        for level in range(1, LEVELS + 1):
            if level in paths:
                ink.path(paths[level], colour, opacity=0.06 + 0.94 * level / LEVELS)
    # the outline of what a causal map can hold
    stairs = f"v-{step:.1f}h-{step:.1f}" * (T - 1)
    edge = T * step + 1
    outline = f"M{x - 1:.1f} {y - 1:.1f}v{edge:.1f}h{edge:.1f}{stairs}v-{step + 1:.1f}z"
    ink.path(outline, stroke=GREY, stroke_width=0.8, opacity=0.6)


def _range_words(values):
    """ "1", or "0.5 to 12"."""
    ends = (values.min().item(), values.max().item())
    low, high = (f"{x:.0f}" if abs(x) >= 10 else f"{x:.2g}" for x in ends)
    return low if low == high else f"{low} to {high}"


@torch.no_grad()
def attention_map(model, tokens: torch.Tensor, block: int = 0) -> torch.Tensor:
    """How much each token takes of each one before it, in one block: (heads, T, T) fp32.

    Args:
        model: a Transformer of family llama or poly. tokens: (T).
    """
    captured = []
    layer = model.blocks[block]
    is_poly = hasattr(layer, "attention")
    module = layer.attention if is_poly else layer.input_norm
    handle = module.register_forward_hook(lambda _, inputs, y: captured.append((inputs[0], y)))
    try:
        model(tokens[None])
    finally:
        handle.remove()
    inputs, normed = captured[0]
    if is_poly:
        return _poly_weights(layer.attention, inputs)
    return _softmax_weights(model, layer, normed)


def _poly_weights(attention, x):
    """The weights of polynomial attention for its input x (1, T, hidden)."""
    T = x.shape[1]
    q, k, _ = attention.w_qkv(x).view(1, T, 3, attention.heads, -1).unbind(2)
    # values that are unit vectors make the result the weights
    unit = torch.eye(T, device=x.device)[None, :, None].expand(1, T, attention.heads, T)
    weights = reference_poly_attention(
        attention.query(q),
        q,
        k,
        unit,
        attention.pe.to(q.dtype),
        attention.coefficients,
        attention.degree,
        attention.window,
    )
    return weights[0].transpose(0, 1).float()


def _softmax_weights(model, layer, x):
    """The weights of causal softmax attention for its input x (1, T, hidden)."""
    T = x.shape[1]
    q = layer.w_q(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
    k = layer.w_k(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
    k = rotate(k, model.rope).repeat_interleave(layer.heads // layer.kv_heads, 1)
    scores = rotate(q, model.rope) @ k.transpose(-1, -2) / layer.head_dim**0.5
    future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
    return scores.float().masked_fill(future, -torch.inf).softmax(-1)[0]
