"""Views that torch negates when it reads them (Tensor.is_neg), as x.conj().imag is one: kernels are
given the numbers that the tensor has, not those that lie in memory."""

import pytest
import torch
from helpers import KERNELS, same

import gpuaccel as ga
from gpuaccel.errors import ArgumentError

on_kernels = pytest.mark.parametrize("device", KERNELS, indirect=True)


def negated(*shape, device, seed=0):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    view = torch._neg_view(t)
    assert view.is_neg()
    return view


@on_kernels
def test_they_are_read_as_what_they_are(device):
    grad = negated(2, 3, 8, device=device)
    plain = grad.resolve_neg()
    tokens = torch.tensor([[1, 2, 1], [0, 3, 3]], device=device)

    def results(x):
        torch.manual_seed(0)
        sums = [torch.zeros(n, 8, device=device) for n in (4, 3)]
        ga.ops.encoder_backward(*sums, x, tokens)
        glu = ga.RichardsGLU(4, 4, device=device)
        a, g = glu.activation, glu.gate
        return [
            ga.ops.accumulate_(torch.zeros(2, 3, 8, device=device), x),
            *sums,
            torch.ops.gpuaccel.richards_glu(x, a.theta, g.theta, a.kinds, g.kinds),
        ]

    for got, want in zip(results(grad), results(plain)):
        same(got, want)
    norm = ga.clip_grad_norm_
    found = []
    for g in (grad, plain):
        p = torch.zeros(2, 3, 8, device=device).requires_grad_()
        p.grad = g.clone() if g is plain else g
        norm([p], 0.5)
        found.append(p.grad.resolve_neg())
    torch.testing.assert_close(*found)


@on_kernels
def test_they_are_refused_where_sums_would_be_added(device):
    rows = torch.zeros(2, 8, device=device)
    tokens = torch.tensor([0, 1], device=device)
    for function in (
        lambda t: ga.ops.accumulate_(t, rows),
        lambda t: ga.ops.encoder_backward(t, None, rows, tokens),
        lambda t: ga.ops.encoder_backward(None, t, rows, tokens[None][0]),
    ):
        with pytest.raises(ArgumentError, match="is a view of numbers that torch negates"):
            function(negated(2, 8, device=device))


def test_on_the_meta_device_nothing_overlaps_and_there_are_no_values():
    acc, grad = torch.zeros(2, 3, device="meta"), torch.ones(2, 3, device="meta")
    assert ga.ops.accumulate_(acc, grad) is acc
    tokens = torch.zeros(2, dtype=torch.int64, device="meta")
    with pytest.raises(ArgumentError, match="tokens are on meta, where they have no values"):
        ga.ops.encoder_backward(acc, None, grad, tokens)
