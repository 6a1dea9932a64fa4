"""Pictures of curves, passes and maps draw what was measured, and say it in text."""

import json
import re

import pytest
import torch
from helpers import write_result
from pictures import text_of

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.learn import layer_figures, recorded
from gpuaccel.learn.figures.layer_figures import (
    allocated,
    attention_map,
    curve_points,
    difference_errors,
    equal_gradients,
    explore,
    fit,
    glu_variants,
    gradient_errors,
    letters,
    lines,
    maps,
    passes,
    plot,
    poly_map,
    poly_memory,
    softmax_map,
    tiles,
)

SMALL = dict(layers=2, hidden=64, intermediate=48, heads=2, kv_heads=2, T=16)


def test_a_curve_and_its_slope_are_those_of_the_module_and_of_finite_differences():
    curve = ga.nn.RichardsCurve(nu=0.3, T=0.5, c=0.2)
    y, slope = curve_points(curve, reach=4.0, count=801)
    x = torch.tensor([point[0] for point in y], dtype=torch.float64)
    assert torch.allclose(
        torch.tensor([p[1] for p in y], dtype=torch.float64), curve.double()(x), atol=1e-6
    )
    by_differences = (
        torch.tensor([b[1] for b in y[2:]]) - torch.tensor([a[1] for a in y[:-2]])
    ) / 0.02
    assert torch.allclose(by_differences, torch.tensor([p[1] for p in slope[1:-1]]), atol=1e-3)
    assert "R(x): one, two" in text_of(
        layer_figures.curves({"one": curve, "two": ga.nn.RichardsCurve("tanh")}, "Two")
    )


@pytest.mark.parametrize("variant", ["none", "tanh", "gompertz"])
def test_the_explorer_says_what_is_not_as_at_the_beginning_and_refuses_what_cannot_be(variant):
    assert "nu = 0.5, k = 2" in text_of(explore(variant, nu=0.5, k=2.0, beta=1.0).picture())
    with pytest.raises(ArgumentError, match="nu is -1"):
        explore(variant, nu=-1)


def test_a_slider_moves_the_curve():
    pytest.importorskip("ipywidgets")
    shown, seen = explore(nu=0.5), []
    shown._handle = type(
        "Handle", (), {"update": lambda self, bundle, raw: seen.append(bundle["text/plain"])}
    )()
    sliders = {widget.description: widget for widget in shown._sliders().children}
    sliders["m"].value = 2.0
    sliders["variant"].value = "tanh"
    assert (
        "nu = 0.5, m = 2" in seen[0]
        and seen[-1].startswith("tanh, all parameters as at the beginning")
        and set(ga.nn.richards_glu.NAMES) < set(sliders)
    )
    sliders["variant"].value = "gompertz"
    assert seen[-1].startswith("gompertz, nu = 0.01, beta = 0.01:")


def test_lines_of_one_point_or_with_gaps_are_drawn():
    assert text_of(lines({"a": {"x": [(0, 1.0)]}})) == "a: x"
    text_of(
        lines(
            {
                "a": {"x": [(0, 1.0), (1, float("nan")), (2, 3.0)]},
                "b": {"y": [(0, 0.0), (1, 1e-6)]},
            },
            "gaps",
            dashed=("y",),
        )
    )


def test_a_plot_has_a_line_for_each_tensor():
    x = torch.arange(5.0)
    figure = plot(x, {"once": x, "twice": 2 * x}, "Lines", dashed=["once"])
    assert text_of(figure) == "Lines: once, twice"
    assert figure.drawn.count("<polyline") == 2
    assert figure.drawn.count("stroke-dasharray") == 1
    assert layer_figures.GREY in figure.drawn


def test_the_picture_of_a_gated_unit_names_its_parts():
    words = text_of(layer_figures.gated_unit())
    assert "halves of x W_in" in words and "y = x + h W_out" in words


# ---- gradients by hand --------------------------------------------------------------------------


def by_hand(dh, x1, x2):
    s, g = x1.sigmoid(), x2.sigmoid()
    return torch.stack([dh * g * (s + x1 * s * (1 - s)), dh * x1 * s * g * (1 - g)])


def of_another_function(dh, x1, x2):
    value, g = x1 * x1.sigmoid(), x2.sigmoid()
    return dh * value * g * (value + 0.75 * x1), dh * value * g * (1 - g)


def test_a_right_gradient_trains_as_autograd_does_and_another_one_worse():
    right, exact = fit(by_hand, steps=60), fit(steps=60)
    for (step, loss), (step_exact, loss_exact) in zip(right, exact):
        assert step == step_exact and loss == pytest.approx(loss_exact, rel=1e-4)
    assert len(right) == 60
    for residual in (True, False):
        worse = fit(of_another_function, residual, steps=60)
        assert worse[0][1] == exact[0][1], "the forward is the same"
        assert exact[-1][1] < 0.8 * worse[-1][1], "less is learned"
        assert worse[-1][1] < 0.7 * worse[0][1], "and yet the loss falls"


@pytest.mark.parametrize(
    "gradient, got",
    [
        (lambda dh, x1, x2: None, "got NoneType"),
        (lambda dh, x1, x2: dh, "got Tensor"),
        (lambda dh, x1, x2: (dh, None), "got dx2: NoneType"),
        (lambda dh, x1, x2: (dh[:, :1], dh), r"got dx1: \(64, 1\)"),
    ],
)
def test_a_gradient_that_is_not_finished_is_named(gradient, got):
    expected = r"gradient: expected dx1 and dx2, two tensors of shape \(64, 32\), "
    with pytest.raises(ArgumentError, match=expected + got):
        fit(gradient, steps=1)


def test_a_gradient_without_its_residual_is_not_the_right_one():
    assert fit(by_hand, residual=False, steps=5) != fit(by_hand, steps=5)


@pytest.mark.parametrize(
    "device", ["simt", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_each_gradient_of_a_layer_is_compared_with_float64(device):
    layer = ga.RichardsGLU(8, 16, device=device)
    x, dy = torch.randn(2, 4, 8, device=device)
    errors = gradient_errors(layer, x, dy)
    assert list(errors) == ["x", "w_in.weight", "w_out.weight", "activation.theta", "gate.theta"]
    assert max(errors.values()) < 1e-5
    assert equal_gradients(layer, x, dy) == 5


def test_a_wrong_gradient_and_one_that_changes_are_seen():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight

        @staticmethod
        def backward(ctx, dy):
            return torch.zeros_like(dy), dy.sum() + torch.rand((), dtype=dy.dtype)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.weight if x.dtype == torch.float64 else Wrong.apply(x, self.weight)

    x, dy = torch.randn(2, 10)
    errors = gradient_errors(Layer(), x, dy)
    assert errors["x"] == pytest.approx(1.0) and errors["weight"] > 1e-5
    assert equal_gradients(Layer(), x, dy) == 1


def test_finite_differences_agree_with_a_right_gradient_only():
    layer = ga.RichardsGLU(3, 4).double()
    x, dy = torch.randn(2, 2, 3, dtype=torch.float64)
    before = x.clone()
    errors = difference_errors(layer, x, dy)
    assert list(errors) == list(gradient_errors(layer, x, dy))
    assert max(errors.values()) < 1e-7 and x.equal(before)
    layer.gate.theta.register_hook(lambda grad: 1.01 * grad)
    errors = difference_errors(layer, x, dy)
    assert errors["gate.theta"] == pytest.approx(0.01, rel=1e-3)
    assert sum(error > 1e-7 for error in errors.values()) == 1


def test_both_variants_of_a_glu_are_the_layer():
    layer, halves = ga.RichardsGLU(4, 8), torch.randn(6, 16)
    with torch.no_grad():
        layer.activation.theta.add_(0.3 * torch.randn(9))
        layer.gate.theta.add_(0.3 * torch.randn(4))
    x1, x2 = halves.chunk(2, -1)
    expected = x1 * layer.activation(x1) * layer.gate(x2)
    for name, function in glu_variants(layer).items():
        assert torch.allclose(function(halves), expected, atol=1e-5), name


# ---- passes over memory -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device", ["simt", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_each_operation_is_counted_once_with_the_bytes_it_reads_and_writes(device):
    layer, x = ga.RichardsGLU(4, 8, device=device), torch.randn(64, 512, device=device)
    a, g = layer.activation, layer.gate
    ours = passes(
        {
            "ours": lambda x: torch.ops.gpuaccel.richards_glu(
                x, a.theta, g.theta, a.setting, g.setting
            )[0]
        },
        x,
        [a.theta, g.theta],
    ).counts["ours"]
    assert {phase: (r["operations"], round(r["bytes"])) for phase, r in ours.items()} == {
        "forward": (1, 12),
        "backward": (1, 20),
    }
    with layer_figures.Traffic() as traffic:
        x[:, :256] * x[:, 256:]
        torch.zeros_like(x).add_(1.0).view(-1)
    n = 4 * 64 * 256
    assert traffic.operations == [
        ("mul", 2 * n, n),
        ("zeros_like", 0, 2 * n),
        ("add_", 2 * n, 2 * n),
    ]


def test_passes_are_drawn_on_one_scale_and_told():
    words = text_of(
        passes({"twice": lambda x: (x * 2) * 2, "once": lambda x: x * 4}, torch.randn(100), [])
    )
    assert words == "; ".join(
        f"{name} {phase} {n} operation{'s' * (n > 1)}, {8 * n} bytes"
        for name, n in (("twice", 2), ("once", 1))
        for phase in ("forward", "backward")
    )


def test_what_is_allocated_is_the_largest_and_the_most_at_once():
    def run():
        a = torch.empty(1000)
        del a
        b, c = torch.empty(300), torch.empty(400)
        return b, c

    assert allocated(run) == (4000, 4000) and allocated(lambda: (run(), torch.empty(500))[0]) == (
        4000,
        4800,
    )


@pytest.mark.parametrize("T, tile, window", [(256, 32, None), (256, 32, 32), (100, 16, 40)])
@pytest.mark.parametrize("change", [0, 1, 2])
def test_the_tiles_that_are_computed_are_those_with_a_weight_in_them(T, tile, window, change):
    window = window and window + change
    i, j = torch.arange(T)[:, None], torch.arange(T)
    seen = (j <= i) & (j > i - (window or T))
    count = -(-T // tile)
    padded = torch.nn.functional.pad(seen, (0, count * tile - T, 0, count * tile - T))
    expected = padded.view(count, tile, count, tile).any(3).any(1).sum()
    figure = tiles(T, tile, window)
    assert figure.computed == expected and figure.all == count * count
    assert f"{expected} of {count * count} tiles" in text_of(figure)


@pytest.mark.parametrize("backend", ["torch", "simt"])
def test_maps_of_letters_are_weights_of_their_scores(backend):
    q = letters("abcab")
    assert q.shape == (1, 5, 1, 32) and q[0, 0].equal(q[0, 3]) and not q[0, 0].equal(q[0, 1])
    scores = (q[0, :, 0] @ q[0, :, 0].T).tril()
    with ga.use_backend(backend):
        weights = poly_map(q, q, degree=3)
        near = poly_map(q, q, degree=3, window=2)
    expected = (8 * torch.tanh(scores / 8)) ** 3
    assert torch.allclose(weights, expected, atol=1e-3)
    assert torch.allclose(near, expected.triu(-1), atol=1e-3) and not near.tril(-2).any()
    softmax = softmax_map(q, q)
    assert torch.allclose(softmax.sum(1), torch.ones(5)) and not softmax.triu(1).any()
    assert softmax[3, 0] == softmax[3, 3] == softmax[3].max()


@pytest.mark.parametrize("variant, times", [("torch", 4), ("gpuaccel", 2)])
def test_memory_grows_with_the_square_of_tokens_in_torch_only(variant, times):
    with ga.use_backend("simt"):
        (largest, peak), (twice, twice_peak) = (poly_memory(variant, T, "cpu") for T in (128, 256))
    assert twice == times * largest and round(twice_peak / peak) == times


def test_a_map_is_signed_scaled_and_summed():
    weights = torch.tensor([[1.0, 0.0, 0.0], [-0.5, 0.5, 0.0], [0.25, 0.25, 20.5]])
    figure = maps({"one": weights, "two": weights.abs()}, "a b", "Maps")
    assert (
        text_of(figure)
        == "Maps: one: rows add up to 0 to 21, 17% negative; two: rows add up to 1 to 21"
    )
    assert (
        "·" in figure.drawn and figure.drawn.count(layer_figures.BLUE) == 4
    )  # 20.5 and 1 in both; 0.5 and less of 20.5 is hardly there
    assert text_of(maps({"nothing": torch.zeros(2, 2)}, "ab")) == "nothing: rows add up to 0"


@pytest.mark.parametrize("family", ["tiny", "poly-7m"])
def test_a_map_times_the_values_is_what_the_layer_makes(family):
    torch.manual_seed(0)
    model, tokens, seen = ga.preset(family, **SMALL).build(), torch.randint(0, 256, (12,)), []
    found = attention_map(model, tokens, block=1)
    assert found.shape == (2, 12, 12) and not found.triu(1).any()
    if family == "tiny":
        block = model.blocks[1]
        block.w_v.register_forward_hook(lambda _, x, y: seen.append(y))
        block.w_o.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
        model(tokens[None])
        v, y = (t[0].unflatten(-1, (2, -1)).transpose(0, 1) for t in seen)
        assert torch.allclose(found @ v, y, atol=1e-5) and torch.allclose(
            found.sum(-1), torch.ones(2, 12), atol=1e-5
        )
    else:
        layer = model.blocks[1].attention
        layer.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
        layer.w_out.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
        model(tokens[None])
        x, y = seen
        v = layer.w_qkv(x).view(12, 3, 2, -1)[:, 2].transpose(0, 1)
        e = layer.gate(layer.alpha * layer.w_gate(x) + layer.beta)[0].T[..., None]
        assert torch.allclose(found @ v * e, y[0].unflatten(-1, (2, -1)).transpose(0, 1), atol=1e-5)


def test_the_recorded_dispatch_is_labelled_and_without_a_recording_it_says_so(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(recorded, "results_folder", lambda: tmp_path)
    assert str(recorded.dispatch()) == "dispatch: no recorded run in this checkout"
    glu = {
        "ours": {"forward": 0.5, "backward": 1.0},
        "torch": {"forward": 2.0, "backward": 150.0},
        "torch.compile": {"forward": 0.8, "backward": 3.0},
        "torch.compile, folded": {"forward": 0.7, "backward": 4.0},
    }
    results = {
        "curves": {"bfloat16, 16,384 x 4,096": {"glu": {"ms": glu}}},
        "attention": {"batch 4": {"core": {"ms": {"ours": 1.0, "torch": 4.2}}, "layer": None}},
        "layers": {"batch 32": {"step": {"ms": {"ours": 2.0, "CPU": 3000.0}}}, "cores": 16},
    }
    write_result(
        tmp_path / "h200" / "dispatch.json",
        json.dumps({"gpu": "NVIDIA H200", "date": "2026-01-02", "results": results}),
    )
    lines = str(recorded.dispatch()).split("\n")
    assert (
        lines[0]
        == "Recorded, not run here: NVIDIA H200, 2026-01-02; the others: how many times ours"
    )
    assert [re.split(r" {2,}", line) for line in lines[2:]] == [
        ["RichardsGLU between its products, forward", "0.500 ms", "4.0x", "1.4x", "-"],
        ["RichardsGLU between its products, backward", "1.000 ms", "150x", "3.0x", "-"],
        ["PolyAttention, T=2048, kernels", "1.000 ms", "4.2x", "-", "-"],
        ["poly-7m, batch 32, whole step", "2.000 ms", "-", "-", "1,500x"],
    ]
    write_result(tmp_path / "h200" / "dispatch.json", json.dumps({"results": ["nothing", 3]}))
    assert "no facts" in str(recorded.dispatch())
