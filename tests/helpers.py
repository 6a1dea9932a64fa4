"""What tests of several rooms share: devices to parametrise over, comparisons of bits, a small model, drawn tokens."""

import contextlib
import math

import pytest
import torch
from torch import nn

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


KERNELS = ["simt", CUDA]  # our kernels


EVERYWHERE = ["cpu", *KERNELS]  # and torch's own code


INF, NAN = math.inf, math.nan


def generator(seed):
    return torch.Generator().manual_seed(seed)


def parameters(grads, device="cpu"):
    """Parameters with these gradients, with the same strides as they have; None: without one."""
    params = []
    for g in grads:
        p = nn.Parameter(
            torch.zeros(
                () if g is None else g.shape,
                dtype=torch.float32 if g is None else g.dtype,
                device=device,
            )
        )
        p.grad = g
        params.append(p)
    return params


def bits(t):
    """A copy of a tensor's bits: tells -0.0 from 0.0, and one NaN from another."""
    t = t.detach().contiguous()
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]).clone()


def differ(got, want):
    d = (got.double() - want.double()).abs()
    return f"largest difference {d.max().item() if d.numel() else 0:.3g}"


def same(got, want, what=""):
    """Equal bit by bit, except that any NaN is like any other."""
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    )
    if not (
        torch.equal(bits(got.nan_to_num(1e30)), bits(want.nan_to_num(1e30)))
        and torch.equal(got.isnan(), want.isnan())
    ):
        raise AssertionError(f"{what}: {differ(got, want)}")


def exact_norm(grads, norm_type=2.0):
    """In float64."""
    return (
        torch.linalg.vector_norm(
            torch.cat([g.double().flatten() for g in grads if g is not None]), norm_type
        ).item()
        if grads
        else 0.0
    )


class Blocks(nn.Module):
    """A list of blocks whose tensors have these shapes; a gradient of any value on request."""

    def __init__(
        self, shapes=(((5, 7), (7,)), ((64, 65), (4097,), (3,)), ((0,), (1,))), dtype=torch.float32
    ):
        super().__init__()
        random = generator(0)
        self.blocks = nn.ModuleList(
            nn.ParameterList(
                [nn.Parameter(torch.randn(s, generator=random).to(dtype)) for s in block]
            )
            for block in shapes
        )

    def forward(self, grads):
        return sum(
            (p.float() * g.float()).sum()
            for p, g in zip(self.parameters(), grads, strict=True)
            if g is not None
        )


def filled(model, seed=0, size=1.0):
    """A gradient for each of the model's parameters, in their order."""
    random = generator(seed)
    return [
        size * torch.randn(p.shape, generator=random).to(p.device, p.dtype)
        for p in model.parameters()
    ]


def fill(arena, grads):
    """Sums as an accumulator would leave them; `grads` in the order of registration."""
    for at, g in zip(arena.grad_views, reversed(grads), strict=True):
        at.copy_(g)


@contextlib.contextmanager
def no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def drawn(kind, n, vocab, seed=0):
    """n tokens below vocab, int64."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.randint(0, vocab, (n,), generator=generator)
    return {
        "uniform": uniform,
        "sorted": uniform.sort()[0],
        "reversed": uniform.sort(descending=True)[0],
        "all the same": uniform[:1].expand(n).contiguous(),
        "zipf": (vocab ** torch.rand(n, generator=generator, dtype=torch.float64))
        .long()
        .sub(1)
        .clamp(0, vocab - 1),
    }[kind]
