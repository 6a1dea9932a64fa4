"""Pictures of RichardsGLU and PolyAttention: curves with sliders, passes over memory, what is allocated, attention maps.

    >>> layer_figures.explore("none", nu=0.3)                          # the curve and its derivative; in a notebook with sliders
    >>> layer_figures.lines({"R": {"sigmoid": [(-1, 0.3), (1, 0.7)]}}) # panels side by side, linear axes
    >>> layer_figures.passes({"torch": f, "ours": g}, x, parameters)   # each operation of forward and backward, and the bytes it moves
    >>> layer_figures.allocated(run)                                    # the largest tensor that run() makes, and all at once
    >>> layer_figures.maps({"softmax": p, "polynomial": q}, "the cat") # (T, T) weights over the letters of a text
    >>> layer_figures.attention_map(model, tokens, block=0)            # (heads, T, T) of a model of either family

Each picture is a figures.Figure. What is drawn is measured: operations are seen where torch dispatches them, allocations by torch's profiler.
"""

import math

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...graphs.tape import FRESH
from ...measure import profiler_sees_gpu, quiet_profiler, trace_events
from ...nn.poly_attention import reference_poly_attention
from ...nn.richards_glu import DEFAULTS, LEAST, NAMES, RichardsCurve, reference_richards
from ...notebook import notebook_shell
from ...training.models import rotate
from .figures import BLUE, GREY, ORANGE, Figure, _title
from .picture import RUN_COLOURS, WIDTH, _Ink, _nice_ticks, _spread, _text_width

REACH = 6.0  # curves are drawn for x between -REACH and REACH


# ---- lines --------------------------------------------------------------------------------------


def lines(
    panels: "dict[str, dict[str, list]]",
    title: str = "",
    x_label: str = "x",
    dashed=(),
    height: int = 190,
) -> Figure:
    """Panels side by side: title -> name -> [(x, y)]. A name in `dashed` is drawn thin and broken; one colour per name in all panels."""
    ink, top = _Ink(themed=False), 50 if title else 28
    if title:
        _title(ink, 16, title)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    colours = dict(zip([n for n in names if n not in dashed], RUN_COLOURS)) | dict.fromkeys(
        dashed, GREY
    )
    wide, told = (WIDTH - 24 * (len(panels) - 1)) / len(panels), []
    beyond = max(_text_width(name, 12) for name in names) * 1.15 + 14 if len(names) > 1 else 8
    for k, (name, panel) in enumerate(panels.items()):
        x0 = k * (wide + 24)
        points = [p for line in panel.values() for p in line if p[1] == p[1]]
        last = k == len(panels) - 1
        _panel(
            ink,
            (x0 + 40, top, x0 + wide - (beyond if last else 8), top + height),
            name,
            x_label,
            panel,
            points,
            colours,
            dashed,
            last,
        )
        told.append(f"{name}: {', '.join(panel)}")
    return Figure(
        ink, top + height + 26, f"{title}: {'; '.join(told)}" if title else "; ".join(told)
    )


def _panel(ink, box, title, x_label, panel, points, colours, dashed, named):
    left, top, right, bottom = box
    ticks = _nice_ticks(min(y for _, y in points), max(y for _, y in points))
    low, high, x0, x1 = ticks[0], ticks[-1], min(x for x, _ in points), max(x for x, _ in points)

    def at(x, y):
        return left + (x - x0) / ((x1 - x0) or 1.0) * (right - left), bottom - (y - low) / (
            high - low
        ) * (bottom - top)

    ink.text(left - 36, top - 12, title, 12.5, weight=600)
    for tick in ticks:
        y = at(x0, tick)[1]
        ink.line(left, y, right, y, opacity=0.9 if abs(tick) < 1e-12 else 0.4)
        ink.text(left - 7, y + 4, f"{tick:.6g}", 11, ink.soft, "end")
    room = _text_width(x_label, 11) + 12
    for tick in [
        t for t in _nice_ticks(x0, x1, 5) if x0 - 1e-9 <= t and at(t, low)[0] < right - room
    ]:
        ink.text(at(tick, low)[0], bottom + 17, f"{tick:g}", 11, ink.soft, "middle")
    ink.text(right, bottom + 17, x_label, 11, ink.soft, "end")
    ends = []
    for name, line in panel.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in line if p[1] == p[1]))
        look = (
            'stroke-width="1.6" stroke-dasharray="5 4"' if name in dashed else 'stroke-width="2.4"'
        )
        ink.out.append(
            f'<polyline points="{path}" fill="none" stroke="{colours[name]}" {look} stroke-linejoin="round"/>'
        )
        ends.append((name, at(*line[-1])[1]))
    if named and len(colours) > 1:
        for (name, _), y in zip(ends, _spread([y for _, y in ends], 16, top, bottom)):
            ink.text(
                right + 9,
                y + 4,
                name,
                12,
                ink.soft if name in dashed else colours[name],
                weight=600,
            )


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
    both = {name: curve_points(curve) for name, curve in named.items()}
    return lines(
        {
            "R(x)": {name: y for name, (y, _) in both.items()},
            "R'(x)": {name: d for name, (_, d) in both.items()},
        },
        title,
        dashed=dashed,
    )


class explore:
    """A curve and its derivative beside the logistic one; in a notebook with sliders for the nine parameters. The picture stays in the file."""

    def __init__(self, variant: str = "none", **values):
        self.variant, self.given = variant, values
        RichardsCurve(variant, **values)  # refuses what cannot be

    def picture(self) -> Figure:
        shown = RichardsCurve(self.variant, **self.given)
        start = dict(zip(NAMES, shown.setting))
        told = (
            ", ".join(
                f"{name} = {value:.2g}" for name, value in start.items() if value != DEFAULTS[name]
            )
            or "all parameters as at the beginning"
        )
        title = f"{'' if self.variant == 'none' else self.variant + ', '}{told}"
        return curves({"logistic": RichardsCurve(), "yours": shown}, title, dashed=("logistic",))

    def __repr__(self):
        return repr(self.picture())

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.picture()._repr_mimebundle_()

    def _ipython_display_(self):
        from IPython.display import display

        sliders = self._sliders() if notebook_shell() is not None else None
        if sliders is not None:
            view = {"version_major": 2, "version_minor": 0, "model_id": sliders.model_id}
            display(
                {
                    "application/vnd.jupyter.widget-view+json": view,
                    "text/plain": "Run this cell to move the nine parameters with sliders.",
                },
                raw=True,
            )
        self._handle = display(self._repr_mimebundle_(), raw=True, display_id=True)

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
        start = dict(zip(NAMES, RichardsCurve(self.variant, **self.given).setting))
        offered = {}
        for name, value in start.items():
            if name in ("nu", "k", "beta", "T"):
                low, high = (f(end, math.log10(value)) for f, end in ((min, -2.0), (max, 1.5)))
                offered[name] = W.FloatLogSlider(
                    value, min=low, max=high, step=0.02, description=name, **look
                )
            else:
                offered[name] = W.FloatSlider(
                    value,
                    min=min(-3.0, value),
                    max=max(3.0, value),
                    step=0.05,
                    description=name,
                    **look,
                )
        kind = W.Dropdown(
            options=["none", "sigmoid", "tanh", "gompertz"],
            value=self.variant,
            description="variant",
            layout=W.Layout(width="252px"),
            style={"description_width": "52px"},
        )

        def moved(_):
            self.variant, self.given = (
                kind.value,
                {
                    name: max(slider.value, LEAST)
                    if name in ("nu", "k", "beta", "T")
                    else slider.value
                    for name, slider in offered.items()
                },
            )
            self._handle.update(self._repr_mimebundle_(), raw=True)

        def chosen(_):  # another variant begins where it begins
            for name, value in zip(NAMES, RichardsCurve(kind.value).setting):
                offered[name].value = value
            moved(_)

        for slider in offered.values():
            slider.observe(moved, "value")
        kind.observe(chosen, "value")
        return W.HBox([*offered.values(), kind], layout=W.Layout(flex_flow="row wrap"))


# ---- passes over memory -------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """The operations that run inside, in order: (name, bytes read, bytes written). Views and memory without a value are none."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        places = {t.untyped_storage().data_ptr() for t in given}
        made = [
            t
            for t in tree_leaves(result)
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in places
        ]
        if not func.name().startswith((*FRESH, "aten::lift_fresh")) and (
            made or func._schema.is_mutable
        ):
            name = func.name().split("::")[1].split(".")[0]
            written = made if made else given[:1]
            read = (
                given[1:]
                if name in ("copy_", "fill_", "zero_")
                or name.endswith("_like")
                or name.startswith("new_")
                else given
            )
            self.steps.append((name, sum(map(_touched, read)), sum(map(_touched, written))))
        return result


def _touched(t) -> int:
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


class Passes(Figure):
    """A drawing of passes() and its numbers. `found[name]["forward" or "backward"]`: operations, small operations, bytes per element of h."""

    def __init__(self, ink, height, words, found):
        super().__init__(ink, height, words)
        self.found = found


def passes(
    ways: "dict[str, callable]",
    x: torch.Tensor,
    parameters,
    title: str = "Operations, and the bytes they read (full) and write (pale), per element of h",
) -> Passes:
    """ways: name -> function of x that returns h. Each is run forward and backward for x and the parameters; a box is one operation, as wide as
    the bytes that it reads and writes, on one scale for all. Operations on less than half of h's elements are counted, and not drawn."""
    found, drawn = {}, {}
    for name, function in ways.items():
        x = x.detach().requires_grad_()
        with Traffic() as forward:
            h = function(x)
        dh = torch.ones_like(h)
        with Traffic() as backward:
            torch.autograd.grad(h, [x, *parameters], dh)
        for phase, traffic in (("forward", forward), ("backward", backward)):
            large = [
                (r / h.numel(), w / h.numel())
                for _, r, w in traffic.steps
                if r + w >= 0.5 * h.numel() * h.element_size()
            ]
            drawn[name, phase] = large
            found.setdefault(name, {})[phase] = {
                "operations": len(large),
                "small": len(traffic.steps) - len(large),
                "bytes": sum(r + w for r, w in large),
            }
    return Passes(*_draw_passes(drawn, found, title), found)


def _draw_passes(drawn, found, title):
    ink, left, y, told = _Ink(themed=False), 78, 42.0, []
    _title(ink, 16, title)
    longest = max(sum(r + w for r, w in boxes) for boxes in drawn.values())
    scale = (WIDTH - left - 4) / longest
    for (name, phase), boxes in drawn.items():
        if phase == "forward":
            ink.text(0, y + 4, name, 12.5, weight=600)
            y += 14
        r = found[name][phase]
        words = f"{r['operations']} operation{'s' * (r['operations'] != 1)}, {r['bytes']:.0f} bytes"
        words += (
            f" (and {r['small']} small operation{'s' * (r['small'] != 1)})" if r["small"] else ""
        )
        told.append(f"{name} {phase} {words}")
        ink.text(left - 10, y + 15, phase, 12, ink.soft, "end")
        at, colour = left, BLUE if phase == "forward" else ORANGE
        for read, written in boxes:
            for part, opacity in ((read, 1.0), (written, 0.45)):
                if part:
                    ink.out.append(
                        f'<rect x="{at:.1f}" y="{y:.1f}" width="{max(part * scale, 0.5):.1f}" height="22" fill="{colour}"'
                        f' opacity="{opacity}"/>'
                    )
                    at += part * scale
            ink.out.append(
                f'<rect x="{at - 1:.1f}" y="{y - 1:.1f}" width="1" height="24" fill="{ink.strong}"/>'
            )
        inside = at + _text_width(words, 12) * 0.95 + 10 > WIDTH
        ink.text(
            left if inside else at + 8,
            y + (38 if inside else 15),
            words,
            12,
            None if not inside else ink.soft,
        )
        y += 48 if inside else 30
        y += 8 * (phase == "backward")
    return ink, y + 2, "; ".join(told)


# ---- what is allocated --------------------------------------------------------------------------


def allocated(run) -> "tuple[int, int]":
    """(bytes of the largest tensor that run() makes, the most bytes that its tensors have at once). Call run() once before: caches fill up."""
    seen = profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * profiler_sees_gpu(),
        profile_memory=True,
    )
    with quiet_profiler(), seen:
        run()
    with quiet_profiler():
        events = [event["args"] for event in trace_events(seen) if event.get("name") == "[memory]"]
    at = most = largest = 0
    for event in events:
        at, largest = at + event["Bytes"], max(largest, event["Bytes"])
        most = max(most, at)
    return largest, most


# ---- attention maps -----------------------------------------------------------------------------

LEVELS = 16


def maps(weights: "dict[str, torch.Tensor]", text: str, title: str = "") -> Figure:
    """name -> (T, T) weights, query by row and key by column, over the letters of a text (40 at most). Positive blue, negative orange."""
    ink, T = _Ink(themed=False), len(text)
    columns = min(len(weights), 4 if T <= 20 else 2)
    wide = (WIDTH - 22 * (columns - 1)) / columns
    step, y, told = min((wide - 20) / T, 15.0), 20.0, []
    if title:
        _title(ink, 16, title)
        y += 24
    for k, (name, map) in enumerate(weights.items()):
        x0, y0 = k % columns * (wide + 22) + 16, y + k // columns * (T * step + 66) + 26
        values = map.detach().double().cpu()
        size = values.abs().max().item() or 1.0
        ink.text(x0 - 16, y0 - 26, name, 12.5, weight=600)
        for i, letter in enumerate(text):
            shown = "·" if letter.isspace() else letter
            ink.text(
                x0 - 6,
                y0 + (i + 0.75) * step,
                shown,
                f"{min(11.0, step + 1):.1f}",
                ink.soft,
                "middle",
            )
            ink.text(
                x0 + (i + 0.5) * step,
                y0 - 5,
                shown,
                f"{min(11.0, step + 1):.1f}",
                ink.soft,
                "middle",
            )
        for colour, sign in ((BLUE, 1), (ORANGE, -1)):
            levels = (values * sign / size * LEVELS).round().clamp(min=0).int().tolist()
            for level in range(1, LEVELS + 1):
                path = "".join(
                    f"M{x0 + j * step:.1f} {y0 + i * step:.1f}h{step - 0.8:.1f}v{step - 0.8:.1f}h{0.8 - step:.1f}z"
                    for i in range(T)
                    for j in range(T)
                    if levels[i][j] == level
                )
                if path:
                    ink.out.append(
                        f'<path d="{path}" fill="{colour}" opacity="{0.06 + 0.94 * level / LEVELS:.2f}"/>'
                    )
        stairs = "".join(f"v-{step:.1f}h-{step:.1f}" for _ in range(T - 1))
        edge = f"M{x0 - 1:.1f} {y0 - 1:.1f}v{T * step + 1:.1f}h{T * step + 1:.1f}{stairs}v-{step + 1:.1f}z"
        ink.out.append(
            f'<path d="{edge}" fill="none" stroke="{GREY}" stroke-width="0.8" opacity="0.6"/>'
        )
        negative = float((values < 0).double().mean() * 2 * T / (T + 1))
        sums = values.sum(1)
        said = [f"rows add up to {_span(sums)}"] + (
            [f"{negative:.0%} negative"] if negative > 0.004 else []
        )
        if _text_width(", ".join(said), 11.5) < wide:
            said = [", ".join(said)]
        for line, words in enumerate(said):
            ink.text(x0 - 16, y0 + T * step + 17 + 15 * line, words, 11.5, ink.soft)
        told.append(f"{name}: {', '.join(said)}")
    below = -(-len(weights) // columns)
    return Figure(
        ink, y + below * (T * step + 66) - 6, (f"{title}: " if title else "") + "; ".join(told)
    )


def _span(values):
    low, high = (
        f"{x:.0f}" if abs(x) >= 10 else f"{x:.2g}"
        for x in (values.min().item(), values.max().item())
    )
    return low if low == high else f"{low} to {high}"


@torch.no_grad()
def attention_map(model, tokens: torch.Tensor, block: int = 0) -> torch.Tensor:
    """(heads, T, T) fp32: how much each of the tokens (T) takes of each before it, in one block of a Transformer of family llama or poly."""
    given = []
    layer = model.blocks[block]
    watched = layer.attention if hasattr(layer, "attention") else layer.input_norm
    handle = watched.register_forward_hook(lambda module, x, y: given.append((x[0], y)))
    try:
        model(tokens[None])
    finally:
        handle.remove()
    (x, y), T = given[0], len(tokens)
    if hasattr(layer, "attention"):
        a = layer.attention
        q, k, _ = a.w_qkv(x).view(1, T, 3, a.heads, -1).unbind(2)
        one = torch.eye(T, device=x.device)[None, :, None].expand(1, T, a.heads, T)
        return (
            reference_poly_attention(
                a.query(q), q, k, one, a.pe.to(q.dtype), a.coefficients, a.degree, a.window
            )[0]
            .transpose(0, 1)
            .float()
        )
    q, k = (
        w(y).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for w in (layer.w_q, layer.w_k)
    )
    s = (
        rotate(q, model.rope)
        @ rotate(k, model.rope)
        .repeat_interleave(layer.heads // layer.kv_heads, 1)
        .transpose(-1, -2)
        / layer.head_dim**0.5
    )
    return (
        s.float()
        .masked_fill(torch.ones(T, T, dtype=torch.bool, device=s.device).triu(1), -torch.inf)
        .softmax(-1)[0]
    )
