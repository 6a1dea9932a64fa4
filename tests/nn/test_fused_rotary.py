"""q, k and v of one product that is rotated in place: the values and gradients of separate layers
and rotate(), under all that autograd offers."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import EVERYWHERE, KERNELS, close, products_add, same, sums
from torch import nn

from gpuaccel import backends
from gpuaccel.errors import ArgumentError
from gpuaccel.nn import fused_linears, fused_rotary, joint_linears
from gpuaccel.ops import rotary_table, rotate
from gpuaccel.optim.arena import Arena

NAMES = ("w_q", "w_k", "w_v")
T, HEADS, KV_HEADS, D = 6, 4, 2, 32


class Attention(nn.Module):
    """Of 64 channels: whole chunks of the arena, so that nothing lies between the weights."""

    FUSED_LINEARS = (NAMES,)

    def __init__(self):
        super().__init__()
        self.w_q = nn.Linear(64, HEADS * D, bias=False)
        self.w_k = nn.Linear(64, KV_HEADS * D, bias=False)
        self.w_v = nn.Linear(64, KV_HEADS * D, bias=False)
        self.register_buffer("rope", rotary_table(T + 2, D, 100.0), persistent=False)

    def heads(self, x):
        return fused_rotary(x, self.w_q, self.w_k, self.w_v, self.rope)

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.heads(x), is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(-2)


class Separately(Attention):
    """The definition."""

    def heads(self, x):
        q, k, v = (getattr(self, name)(x).unflatten(-1, (-1, D)).transpose(1, 2) for name in NAMES)
        return rotate(q, self.rope), rotate(k, self.rope), v


def pair(device, dtype=torch.float32):
    """The layer, and the same as its definition in torch."""
    torch.manual_seed(0)
    layer = Attention().to(device, dtype)
    plain = Separately().to(device, dtype)
    plain.load_state_dict(layer.state_dict())
    return layer, plain


def inputs(device, dtype=torch.float32, seed=1):
    x = torch.randn(3, T, 64, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype).requires_grad_()


@pytest.fixture
def rotated(monkeypatch):
    """Grows with each product that is rotated in place."""
    seen, was = [], joint_linears._LinearsIntoArena.forward

    def forward(ctx, x, joint, acc, widths, table, *rest):
        seen.append(table is not None)
        return was(ctx, x, joint, acc, widths, table, *rest)

    monkeypatch.setattr(joint_linears._LinearsIntoArena, "forward", staticmethod(forward))
    return seen


# ---- values and gradients ----


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_values_and_gradients_are_those_of_separate_layers(device, dtype, bound, request, rotated):
    """Without our kernels, rotate() runs as before: `cpu` is backend torch."""
    layer, plain = pair(device, dtype)
    arena = Arena(layer)
    with products_add(arena):
        for seed in (1, 2):
            x, twin = (inputs(device, dtype, seed) for _ in range(2))
            for name, got, want in zip(NAMES, layer.heads(x), plain.heads(twin), strict=True):
                close(got, want, name, bound)
                assert got.stride(-1) == 1
            got, want = layer(x), plain(twin)
            close(got, want, "output", bound)
            got.float().sin().sum().backward()
            want.float().sin().sum().backward()
            close(x.grad, twin.grad, "gradient of the input", bound)
        for name, p in plain.named_parameters():
            close(sums(arena)[name], p.grad.float(), f"sum of {name}", bound)
    own_kernels = request.node.callspec.params["device"] != "cpu"
    assert rotated == [own_kernels] * 4


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_in_fp32_q_and_k_have_rotates_bits(device, rotated):
    layer, _ = pair(device)
    x = inputs(device)
    with products_add(Arena(layer)):
        q, k, v = layer.heads(x)
        plain = fused_linears(x, layer.w_q, layer.w_k, layer.w_v)
        q0, k0, v0 = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in plain)
        assert rotated == [True, False]
        same(q, rotate(q0, layer.rope), "q")
        same(k, rotate(k0, layer.rope), "k")
        same(v, v0, "v")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_nothing_is_copied(device, rotated):
    """q, k and v are the product's output itself, and their gradients go into one tensor."""
    layer, _ = pair(device)
    with products_add(Arena(layer)):
        q, k, v = layer.heads(inputs(device))
        storages = {t.untyped_storage().data_ptr() for t in (q, k, v)}
        assert len(storages) == 1 and rotated == [True]
        assert q.untyped_storage().nbytes() == 3 * T * (HEADS + 2 * KV_HEADS) * D * 4


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_autocast_rotates_in_its_dtype(device, rotated):
    layer, plain = pair(device)
    x, arena = inputs(device), Arena(layer)
    with products_add(arena):
        with torch.autocast(device, torch.bfloat16):
            got, want = layer(x), plain(x)
        assert got.dtype == torch.bfloat16 and rotated == [True]
        close(got, want, "output", 2e-2)
        got.float().sin().sum().backward()
        want.float().sin().sum().backward()
        for name, p in plain.named_parameters():
            close(sums(arena)[name], p.grad, f"sum of {name}", 2e-2)


# ---- what autograd offers ----

SOME = [("w_q",), ("w_k",), ("w_v",), ("w_q", "w_v"), ()]


@pytest.mark.parametrize("some", SOME, ids=lambda some: "+".join(some) or "input")
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_backward_for_some_weights_adds_or_returns_only_those(device, some, rotated):
    layer, plain = pair(device)
    x, arena = inputs(device), Arena(layer)
    plain(x).sin().sum().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()} | {"x": x.grad}
    with products_add(arena):
        names = [f"{name}.weight" for name in some] or ["x"]
        leaves = [x if name == "x" else layer.get_parameter(name) for name in names]
        returned = torch.autograd.grad(layer(x).sin().sum(), leaves)
        assert not arena.grads.any()
        for name, got in zip(names, returned, strict=True):
            close(got, wanted[name], f"gradient of {name}", 1e-5)
        layer(x).sin().sum().backward(inputs=leaves)
        for name, total in sums(arena).items():
            if name in names:
                close(total, wanted[name], f"sum of {name}", 1e-5)
            else:
                assert not total.any(), f"{name} was not asked for"
    assert rotated == [True] * 2


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_second_derivatives_are_those_of_torch(device, rotated):
    results = []
    for layer in pair(device):
        x = inputs(device)
        with products_add(arena := Arena(layer)):
            # Attention written out: torch's fused kernels have no second derivative.
            q, k, v = layer.heads(x)
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
            y = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).sin().sum()
            weights = [getattr(layer, name).weight for name in NAMES]
            grads = torch.autograd.grad(y, [x, *weights], create_graph=True)
            penalty = sum(g.square().sum() for g in grads)
            results.append(torch.autograd.grad(penalty, [x, *weights]))
            assert not arena.grads.any()
    assert rotated == [True]
    for name, got, want in zip(("x", *NAMES), *results, strict=True):
        close(got, want, f"second derivative by {name}", 1e-4)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_frozen_weights_and_one_output_that_is_not_used(device, rotated):
    layer, plain = pair(device)
    x, arena = inputs(device), Arena(layer)
    with products_add(arena):
        for module in (layer, plain):
            module.w_k.weight.requires_grad_(False)
            q, _, v = module.heads(x)
            (q.sin().sum() + v.cos().sum()).backward()
        assert rotated == [True] and not sums(arena)["w_k.weight"].any()
        for name in ("w_q.weight", "w_v.weight"):
            close(sums(arena)[name], plain.get_parameter(name).grad, f"sum of {name}", 1e-5)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_elsewhere_it_is_rotate_bit_for_bit(device, rotated):
    """Where autograd adds, without gradients, with other weights or hooks, under torch.func."""
    layer, plain = pair(device)
    x = inputs(device)
    want = [t.detach() for t in plain.heads(x)]

    def as_before(what):
        for name, got, wanted in zip(NAMES, layer.heads(x), want, strict=True):
            same(got.detach(), wanted, f"{what}: {name}")

    arena = Arena(layer)
    as_before("autograd adds")
    with products_add(arena):
        with torch.no_grad():
            as_before("without gradients")
        handle = layer.w_v.register_forward_hook(lambda layer, x, y: y)
        as_before("with a hook")
        handle.remove()
        state = {name: 2 * p.detach() for name, p in layer.named_parameters()}
        got = torch.func.functional_call(layer, state, (x,))
        same(got.detach(), torch.func.functional_call(plain, state, (x,)).detach(), "other weights")
        jacobian = torch.func.jacrev(lambda x: layer(x[None]).sum())(x[0])
        assert jacobian.shape == x[0].shape
    assert not rotated


# ---- torch.compile ----


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))),
    reason="inductor needs a C++ compiler, and there is none",
)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_compiled_whole_it_has_the_sums_of_eager_and_copies_nothing(device, dtype, bound):
    """inductor would copy the product's output before a launch that it cannot do in place."""
    layer, _ = pair(device, dtype)
    missed = torch._dynamo.utils.ReinplaceCounters
    results = []
    torch._dynamo.reset()
    missed.clear()
    try:
        for compiled in (False, True):
            module, x = copy.deepcopy(layer), inputs(device, dtype)
            arena = Arena(module)
            with products_add(arena):
                if compiled:
                    module.compile(dynamic=False, fullgraph=True)
                y = module(x)
                y.float().sin().sum().backward()
                results.append((y.detach(), x.grad, arena.grads.clone()))
    finally:
        torch._dynamo.reset()
    assert missed.get_total_missed() == 0
    for what, want, got in zip(("output", "gradient of x", "sums"), *results, strict=True):
        close(got, want, what, bound)


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))),
    reason="inductor needs a C++ compiler, and there is none",
)
def test_it_compiles_before_anything_has_chosen_a_backend(monkeypatch):
    """torch.compile cannot trace how a backend is looked for."""
    layer, _ = pair("cpu")
    torch._dynamo.reset()
    try:
        with products_add(Arena(layer)):
            monkeypatch.setattr(backends, "_current", None)
            layer.compile(dynamic=False, fullgraph=True)
            layer(inputs("cpu")).sum().backward()
    finally:
        torch._dynamo.reset()


# ---- what is refused ----


def test_shapes_that_do_not_fit_are_refused_in_words():
    layer, _ = pair("cpu")
    for x, words in (
        (torch.randn(2, T + 3, 64), r"x has shape \(2, 9, 64\); expected \(B, T, in\), T up to 8"),
        (torch.randn(T, 64), r"x has shape \(6, 64\)"),
    ):
        with pytest.raises(ArgumentError, match=words):
            layer(x)
