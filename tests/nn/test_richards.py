"""The Richards curve and its gated unit: the values and every gradient are those of the formula, in
float64, written down here once more."""

import math

import numpy
import pytest
import torch
from helpers import EVERYWHERE, KERNELS
from richards_formula import close, exact, values_of

from gpuaccel.errors import ArgumentError
from gpuaccel.nn.richards_glu import (
    DEFAULTS,
    GATE,
    NAMES,
    RichardsCurve,
    RichardsGLU,
)

ODD = dict(nu=0.3, k=1.7, m=0.4, beta=2.5, T=0.6, a=-1.3, c=0.2, s=1.4, b=-0.3)
CASES = [{}, ODD, dict(nu=8.0), dict(s=6.0, T=0.4), dict(nu=0.05, b=0.5)]


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)], ids=str
)
@pytest.mark.parametrize("values", CASES, ids=str)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_values_and_all_ten_derivatives_are_those_of_float64(device, values, dtype, bound):
    c = RichardsCurve(device=device, **values)
    for n in (1, 7, 1000, 8193):
        generator = torch.Generator().manual_seed(n)
        x, dy = (
            (torch.randn(n, generator=generator) * scale).to(device, dtype) for scale in (3, 1)
        )
        x.requires_grad_()
        y = c(x)
        found = (y, *torch.autograd.grad(y, (x, c.theta), dy))
        wide, theta = (
            x.detach().double().requires_grad_(),
            c.theta.detach().double().requires_grad_(),
        )
        want = exact(wide, values_of(c, theta))
        want = (want, *torch.autograd.grad(want, (wide, theta), dy.double()))
        assert [t.dtype for t in found] == [dtype, dtype, torch.float32]
        for what, a, b in zip(("y", "dx", "dtheta"), found, want):
            close(a, b, bound, f"{what}, n = {n}")


@pytest.mark.parametrize("rows, dim, hidden", [(1, 3, 5), (15, 12, 10), (70, 16, 64)])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_the_gated_unit_and_all_its_gradients_are_those_of_float64(
    device, dtype, bound, rows, dim, hidden
):
    torch.manual_seed(1)
    layer = RichardsGLU(dim, hidden, device=device, dtype=dtype)
    x, dy = (torch.randn(rows, dim).to(device, dtype) for _ in range(2))
    x.requires_grad_()
    inside = []
    layer.w_in.register_forward_hook(lambda _, given, y: inside.append(y))
    layer.w_out.register_forward_pre_hook(lambda _, given: inside.append(given[0]))
    y = layer(x)
    dboth, dh, dta, dtg, dx = torch.autograd.grad(
        y, (*inside, layer.activation.theta, layer.gate.theta, x), dy, retain_graph=True
    )
    # Between the products, whose rounding is not ours; then the residual.
    both, ta, tg = (
        t.detach().double().requires_grad_()
        for t in (inside[0], layer.activation.theta, layer.gate.theta)
    )
    x1, x2 = both.chunk(2, -1)
    h = x1 * exact(x1, values_of(layer.activation, ta)) * exact(x2, values_of(layer.gate, tg))
    close(inside[1], h, bound, "h")
    close(y, x.double() + h @ layer.w_out.weight.double().T, bound, "y")
    for what, a, b in zip(
        ("dx1, dx2", "activation", "gate"),
        (dboth, dta, dtg),
        torch.autograd.grad(h, (both, ta, tg), dh.double()),
    ):
        close(a, b, bound, what)
    through = torch.autograd.grad(inside[0], x, dboth)[0]
    close(dx, through.double() + dy.double(), bound, "dx is that of the product and dy itself")


@pytest.mark.parametrize(
    "make",
    [
        lambda: RichardsCurve(**ODD),
        lambda: RichardsCurve(GATE, bounded=True),
        lambda: RichardsGLU(3, 4),
    ],
)
def test_finite_differences_in_float64_agree(make):
    torch.manual_seed(2)
    layer = make().double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    names, params = zip(*layer.named_parameters())
    function = lambda x, *p: torch.func.functional_call(layer, dict(zip(names, p)), x)  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, *params))
    assert torch.autograd.gradgradcheck(function, (x, *params), fast_mode=True)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_two_runs_have_the_same_bits_and_rows_do_not_depend_on_the_others(device):
    torch.manual_seed(3)
    layer = RichardsGLU(8, 20, device=device)
    x, dy = (torch.randn(300, 8, device=device) for _ in range(2))

    def run():
        return torch.autograd.grad(layer(x), tuple(layer.parameters()), dy)

    for a, b in zip(run(), run()):
        assert torch.equal(a, b)
    op, thetas = (
        torch.ops.gpuaccel.richards_glu,
        (layer.activation.theta, layer.gate.theta, layer.activation.setting, layer.gate.setting),
    )
    y = torch.randn(300, 40, device=device)
    assert torch.equal(op(y, *thetas)[0][17:40], op(y[17:40], *thetas)[0])


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_shapes_strides_and_nothing_at_all(device):
    c = RichardsCurve(device=device, **ODD)
    x = torch.randn(4, 6, 10, device=device)
    assert (
        torch.allclose(c(x.transpose(0, 2)), c(x).transpose(0, 2), rtol=1e-6)
        and c(x).shape == x.shape
    )
    assert torch.allclose(c(x[..., 1:]), c(x)[..., 1:], rtol=1e-6), (
        "rows that begin at an odd address"
    )
    for empty in (torch.zeros(0, device=device), torch.zeros(3, 0, device=device)):
        empty.requires_grad_()
        y = c(empty)
        y.sum().backward()
        assert y.shape == empty.shape == empty.grad.shape and not c.theta.grad.any()
    assert c(torch.tensor(0.3, device=device)).shape == ()
    layer = RichardsGLU(4, 6, device=device)
    assert layer(torch.randn(2, 0, 4, device=device)).shape == (2, 0, 4)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_far_out_the_curve_is_flat_and_finite(device):
    for values in CASES:
        c = RichardsCurve(device=device, **values)
        x = torch.tensor([-1e30, -3e4, 3e4, 1e30, torch.nan], device=device, requires_grad=True)
        y = c(x)
        dx, dtheta = torch.autograd.grad(y[:4].sum(), (x, c.theta))
        low = values.get("c", 0.0)
        high = low + values.get("a", 1.0)
        assert torch.allclose(
            y[:4], torch.tensor([low, low, high, high], device=device), atol=1e-6
        ), (values, y)
        assert dx[:4].abs().max() == 0 and y[4].isnan()


def test_numbers_may_be_numpys():
    assert math.isclose(
        float(RichardsCurve(a=numpy.float32(0.5)).values().detach()[5]), 0.5
    ) and RichardsGLU(numpy.int64(4), numpy.int32(6))(torch.zeros(2, 4)).shape == (2, 4)


def test_what_is_learned_begins_at_the_given_values():
    c = RichardsCurve()
    assert torch.allclose(c.values(), torch.tensor([DEFAULTS[name] for name in NAMES]), rtol=1e-5)
    gate = RichardsGLU(4, 8).gate
    assert (
        gate.learn == GATE
        and 0.1 < gate.values()[4].item() < 10
        and gate.values()[5:].tolist() == [1, 0, 1, 0]
    )
    x = torch.linspace(-5, 5, 11)
    assert torch.allclose(c(x), torch.sigmoid(x), atol=1e-6)


def test_a_bounded_temperature_stays_in_its_bounds():
    gate = RichardsGLU(4, 8).gate
    for z in (-50.0, 50.0):
        with torch.no_grad():
            gate.theta[GATE.index("T")] = z
        assert 0.1 - 1e-6 <= float(gate.values()[4]) <= 10.0 + 1e-5
    free = RichardsCurve(("nu", "T"))
    with torch.no_grad():
        free.theta.fill_(-200.0)
    assert torch.isfinite(free(torch.randn(9))).all(), "a positive parameter stays above 1e-6"


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_opcheck_passes(device):
    x, c = torch.randn(3, 8, device=device), RichardsCurve(device=device, **ODD)
    layer = RichardsGLU(4, 4, device=device)
    torch.library.opcheck(
        torch.ops.gpuaccel.richards.default, (x.requires_grad_(), c.theta, c.setting)
    )
    torch.library.opcheck(
        torch.ops.gpuaccel.richards_glu.default,
        (x, layer.activation.theta, layer.gate.theta, layer.activation.setting, layer.gate.setting),
    )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: RichardsCurve(("nu", "q")), "'q' is no parameter of the curve"),
        (lambda: RichardsCurve(nu=0.0), "nu is 0.0; expected at least 1e-06"),
        (lambda: RichardsCurve(m=float("inf")), "m is inf; expected a finite number"),
        (lambda: RichardsCurve(bounded=True, T=20.0), "T is 20.0; expected a number between"),
        (lambda: RichardsGLU(0, 4), "dim is 0 and hidden 4; expected whole numbers of 1 or more"),
        (
            lambda: RichardsGLU(4, 6)(torch.zeros(2, 5)),
            r"x has shape \(2, 5\); expected \(\.\.\., 4\)",
        ),
        (lambda: RichardsCurve(learn=("nu", "k", "nu")), "'nu' is there twice"),
        (lambda: RichardsCurve(a=1e39), r"a is 1e\+39; expected a finite number"),
        (
            lambda: RichardsGLU(4, 6)(torch.zeros(2, 4).bfloat16()),
            r"x is torch.bfloat16; expected torch.float32, as w_in.weight is \(or torch.autocast\)",
        ),
        (
            lambda: RichardsCurve()(torch.zeros(3, dtype=torch.int64)),
            "x is torch.int64; expected a floating-point tensor",
        ),
        (
            lambda: RichardsCurve()(torch.zeros(3, device="meta")),
            "x is on meta, the curve's parameters on cpu",
        ),
    ],
)
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        wrong()
