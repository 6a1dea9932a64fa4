"""RichardsGLU: the values and every gradient are those of the formula, in float64, written down in
richards_formula.py once more."""

import numpy
import pytest
import torch
from helpers import EVERYWHERE, KERNELS
from richards_formula import close, exact, learn, values_of

from gpuaccel.errors import ArgumentError
from gpuaccel.nn.richards_glu import (
    FIXED_VALUES,
    GATE,
    RichardsCurve,
    RichardsGLU,
    reference_curve,
)

ODD = dict(nu=0.3, k=1.7, m=0.4, beta=2.5, T=0.6, a=-1.3, c=0.2, s=1.4, b=-0.3)
CASES = [{}, ODD, dict(nu=8.0), dict(s=6.0, T=0.4), dict(nu=0.05, b=0.5)]
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)]


def glu(layer, x):
    """The layer's operation on x (..., 2 hidden)."""
    a, g = layer.activation, layer.gate
    return torch.ops.gpuaccel.richards_glu(x, a.theta, g.theta, a.kinds, g.kinds)


def by_formula(layer, x, theta_a, theta_g):
    x1, x2 = x.chunk(2, -1)
    a, g = values_of(layer.activation, theta_a), values_of(layer.gate, theta_g)
    return x1 * exact(x1, a) * exact(x2, g)


@pytest.mark.parametrize("dtype, bound", DTYPES, ids=str)
@pytest.mark.parametrize("values", CASES, ids=str)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_values_and_all_derivatives_are_those_of_float64(device, values, dtype, bound):
    layer = RichardsGLU(2, 2, device=device)
    learn(layer.activation, values)
    learn(layer.gate, values)
    thetas = layer.activation.theta, layer.gate.theta
    for rows, hidden in ((1, 1), (1, 7), (3, 8), (100, 10), (9, 1000)):
        generator = torch.Generator().manual_seed(hidden)
        x = 3 * torch.randn(rows, 2 * hidden, generator=generator)
        dh = torch.randn(rows, hidden, generator=generator).to(device, dtype)
        x = x.to(device, dtype).requires_grad_()
        h = glu(layer, x)
        found = h, *torch.autograd.grad(h, (x, *thetas), dh)
        wide = [t.detach().double().requires_grad_() for t in (x, *thetas)]
        want = by_formula(layer, *wide)
        want = want, *torch.autograd.grad(want, wide, dh.double())
        assert [t.dtype for t in found] == [dtype, dtype, torch.float32, torch.float32]
        for what, a, b in zip(("h", "dx", "activation", "gate"), found, want):
            close(a, b, bound, f"{what}, {rows} x {hidden}")


@pytest.mark.parametrize("rows, dim, hidden", [(1, 3, 5), (70, 16, 64)])
@pytest.mark.parametrize("dtype, bound", DTYPES[:2], ids=str)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_the_layer_adds_the_residual_to_the_products(device, dtype, bound, rows, dim, hidden):
    torch.manual_seed(1)
    layer = RichardsGLU(dim, hidden, device=device, dtype=dtype)
    x, dy = (torch.randn(rows, dim).to(device, dtype) for _ in range(2))
    x.requires_grad_()
    inside = []
    layer.w_in.register_forward_hook(lambda _, given, y: inside.append(y))
    layer.w_out.register_forward_pre_hook(lambda _, given: inside.append(given[0]))
    y = layer(x)
    dboth, dx = torch.autograd.grad(y, (inside[0], x), dy, retain_graph=True)
    # Between the products, whose rounding is not ours; then the residual.
    wide = [t.detach().double() for t in (inside[0], layer.activation.theta, layer.gate.theta)]
    h = by_formula(layer, *wide)
    close(inside[1], h, bound, "h")
    close(y, x.double() + h @ layer.w_out.weight.double().T, bound, "y")
    through = torch.autograd.grad(inside[0], x, dboth)[0]
    close(dx, through.double() + dy.double(), bound, "dx is that of the product and dy itself")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_two_runs_have_the_same_bits_and_rows_do_not_depend_on_the_others(device):
    torch.manual_seed(3)
    layer = RichardsGLU(8, 20, device=device)
    x, dy = (torch.randn(300, 8, device=device) for _ in range(2))

    def run():
        return torch.autograd.grad(layer(x), tuple(layer.parameters()), dy)

    for a, b in zip(run(), run()):
        assert torch.equal(a, b)
    y = torch.randn(300, 40, device=device)
    assert torch.equal(glu(layer, y)[17:40], glu(layer, y[17:40]))


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_shapes_strides_and_nothing_at_all(device):
    layer = RichardsGLU(numpy.int64(4), numpy.int32(6), device=device)
    learn(layer.activation, ODD)
    x = torch.randn(4, 6, 20, device=device)
    assert glu(layer, x).shape == (4, 6, 10)
    close(glu(layer, x.transpose(0, 1)), glu(layer, x).transpose(0, 1), 1e-6, "transposed")
    # Rows that begin at an odd address.
    odd = x[..., 1:19]
    close(glu(layer, odd), glu(layer, odd.contiguous()), 1e-6, "columns")
    for empty in (torch.zeros(2, 0, 4, device=device), torch.zeros(0, 4, device=device)):
        layer.zero_grad()
        y = layer(empty.requires_grad_())
        y.sum().backward()
        assert y.shape == empty.shape == empty.grad.shape
        assert not layer.activation.theta.grad.any()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_far_out_the_curve_is_flat_and_finite(device):
    for values in CASES:
        layer = RichardsGLU(2, 2)
        layer.gate = RichardsCurve()
        learn(layer.gate, values)
        layer.to(device)
        x = torch.tensor([[-1e30], [-3e4], [3e4], [1e30], [torch.nan]], device=device)
        x = torch.cat([torch.ones_like(x), x], 1).requires_grad_()
        h = glu(layer, x)
        dx, dtheta = torch.autograd.grad(h[:4].sum(), (x, layer.gate.theta))
        low = values.get("c", 0.0)
        high = low + values.get("a", 1.0)
        # R_a(1) of what the activation begins with.
        want = torch.sigmoid(torch.ones(())) * torch.tensor([low, low, high, high])
        assert torch.allclose(h[:4, 0].cpu(), want, atol=1e-6), (values, h)
        assert dx[:4, 1].abs().max() == 0 and h[4].isnan()


def test_what_is_learned_begins_at_the_given_values():
    c = RichardsCurve()
    assert torch.allclose(c.values(), torch.tensor([*FIXED_VALUES.values()]), rtol=1e-5)
    gate = RichardsGLU(4, 8).gate
    assert (
        gate.learn == GATE
        and 0.1 < gate.values()[4].item() < 10
        and gate.values()[5:].tolist() == [1, 0, 1, 0]
    )
    x = torch.linspace(-5, 5, 11)
    assert torch.allclose(reference_curve(x, c.theta, c.kinds), torch.sigmoid(x), atol=1e-6)


def test_a_bounded_temperature_stays_in_its_bounds():
    gate = RichardsGLU(4, 8).gate
    for z in (-50.0, 50.0):
        with torch.no_grad():
            gate.theta[GATE.index("T")] = z
        assert 0.1 - 1e-6 <= float(gate.values().detach()[4]) <= 10.0 + 1e-5
    layer = RichardsGLU(4, 8)
    with torch.no_grad():
        layer.activation.theta.fill_(-200.0)
    assert torch.isfinite(layer(torch.randn(3, 4))).all(), "a positive parameter stays above 1e-6"


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_opcheck_passes(device):
    layer = RichardsGLU(4, 4, device=device)
    a, g = layer.activation, layer.gate
    x = torch.randn(3, 8, device=device).requires_grad_()
    operation = torch.ops.gpuaccel.richards_glu.default
    torch.library.opcheck(operation, (x, a.theta, g.theta, a.kinds, g.kinds))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: RichardsGLU(0, 4), "dim is 0 and hidden 4; expected whole numbers of 1 or more"),
        (
            lambda: RichardsGLU(4, 6)(torch.zeros(2, 5)),
            r"x has shape \(2, 5\); expected \(\.\.\., 4\)",
        ),
        (
            lambda: RichardsGLU(4, 6)(torch.zeros(2, 4).bfloat16()),
            r"x is torch.bfloat16; expected torch.float32, as w_in.weight is \(or torch.autocast\)",
        ),
        (
            lambda: RichardsGLU(4, 6)(torch.zeros(3, dtype=torch.int64)),
            "x is torch.int64; expected a floating-point tensor",
        ),
        (
            lambda: RichardsGLU(4, 6)(torch.zeros(3, device="meta")),
            "x is on meta, the curve's parameters on cpu",
        ),
    ],
)
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        wrong()
