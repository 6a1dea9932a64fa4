"""What tests of several rooms share: devices to parametrise over, comparisons, a small model."""

import contextlib
import errno
import math
import os
import shutil
import sys

import pytest
import torch
from torch import nn

from gpuaccel.optim import Products

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
KERNELS = ["simt", CUDA]  # our kernels
EVERYWHERE = ["cpu", *KERNELS]  # and torch's own code
INF = math.inf
NAN = math.nan


def needs_free_gpu_memory(size: int):
    """Skip the running test, in words, where fewer than `size` bytes are free on the GPU."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    # GPUACCEL_TEST_GIB is such a limit.
    limit = int(torch.cuda.get_per_process_memory_fraction() * total)
    free = min(free, limit - torch.cuda.memory_reserved())
    if free < size:
        pytest.skip(f"needs {size / 1e9:.0f} GB of free GPU memory; there are {free / 1e9:.1f} GB")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def parameters(grads, device="cpu"):
    """Parameters with these gradients, whose strides stay as they are; None: without a gradient."""
    params = []
    for g in grads:
        like = torch.zeros(()) if g is None else g
        p = nn.Parameter(torch.zeros(like.shape, dtype=like.dtype, device=device))
        p.grad = g
        params.append(p)
    return params


def bits(t):
    """A copy of a tensor's bits: tells -0.0 from 0.0, and one NaN from another."""
    t = t.detach().contiguous()
    return t.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    ).clone()


def differ(got, want):
    """In words, by how much two tensors differ."""
    d = (got.double() - want.double()).abs()
    if not d.numel():
        return "no elements"
    return f"largest difference {d.max().item():.3g}, mean {d.mean().item():.3g}"


def same(got, want, what=""):
    """Equal bit by bit, except that any NaN is like any other."""
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    )
    equal = torch.equal(bits(got.nan_to_num(1e30)), bits(want.nan_to_num(1e30)))
    assert equal and torch.equal(got.isnan(), want.isnan()), f"{what}: {differ(got, want)}"


def close(got, want, what="", bound=1e-5):
    """None where the other is; else the largest difference is a small part of the largest value."""
    assert (got is None) == (want is None), f"{what}: {got} is not {want}"
    if want is not None and (got.shape != want.shape or want.numel()):
        error, size = (got.double() - want.double()).abs().max(), want.detach().abs().max()
        assert error <= bound * size.clamp(min=1e-6), f"{what}: {differ(got, want)}, of {size:.3g}"


def exact_norm(grads, norm_type=2.0):
    """The norm of all elements, in float64."""
    if not grads:
        return 0.0
    elements = torch.cat([g.double().flatten() for g in grads if g is not None])
    return torch.linalg.vector_norm(elements, norm_type).item()


class RaisesInBackward(torch.autograd.Function):
    """A copy in forward, ZeroDivisionError in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("on purpose")


class Blocks(nn.Module):
    """A list of blocks whose tensors have these shapes; a gradient of any value on request."""

    def __init__(
        self, shapes=(((5, 7), (7,)), ((64, 65), (4097,), (3,)), ((0,), (1,))), dtype=torch.float32
    ):
        super().__init__()
        random = generator(0)

        def parameter(shape):
            return nn.Parameter(torch.randn(shape, generator=random).to(dtype))

        self.blocks = nn.ModuleList(
            nn.ParameterList([parameter(shape) for shape in block]) for block in shapes
        )

    def forward(self, grads):
        pairs = zip(self.parameters(), grads, strict=True)
        return sum((p.float() * g.float()).sum() for p, g in pairs if g is not None)


def filled(model, seed=0, size=1.0):
    """A gradient for each of the model's parameters, in their order."""
    random = generator(seed)
    return [
        size * torch.randn(p.shape, generator=random).to(p.device, p.dtype)
        for p in model.parameters()
    ]


def fill(arena, grads):
    """Sums as a backward would leave them; `grads` in the order of registration."""
    for view, g in zip(arena.gradients.views, reversed(grads), strict=True):
        view.copy_(g)
    arena.gradients.set([True] * len(grads))


def sums(arena):
    """Name -> slice with the sum of gradients, of each tensor of an arena."""
    return {s.name: view for s, view in zip(arena.segments, arena.gradients.views)}


def products_add(arena):
    """A context in which the products of layers add into the arena."""
    return contextlib.closing(Products(arena))


@contextlib.contextmanager
def no_waiting():
    """An error for whatever makes the host wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class FullDisk:
    """A file on a disk with room for 1,000 bytes more."""

    def __init__(self, file):
        self.file, self.left = file, 1000

    def write(self, data):
        self.left -= len(data)
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def forget_accelerator():
    """accelerate keeps the first Accelerator's settings, mixed precision too, for the process."""
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


def drawn(kind, n, vocab, seed=0):
    """n tokens below vocab, int64, of a distribution of this kind."""
    random = generator(seed)
    uniform = torch.randint(0, vocab, (n,), generator=random)
    return {
        "uniform": uniform,
        "sorted": uniform.sort()[0],
        "reversed": uniform.sort(descending=True)[0],
        "all the same": uniform[:1].expand(n).contiguous(),
        "zipf": (vocab ** torch.rand(n, generator=random, dtype=torch.float64))
        .long()
        .sub(1)
        .clamp(0, vocab - 1),
    }[kind]


# ---- a browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium():
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)
