"""Layers of one input are one product where their weights lie side by side: values, gradients."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import CUDA, close, products_add, sums
from torch import nn

from gpuaccel.errors import ArgumentError
from gpuaccel.nn import fused_forward, fused_linears, weight_gradient
from gpuaccel.nn.fused_linear import FusedConv1D, _LinearsIntoArena
from gpuaccel.nn.gradient_slice import slice_of
from gpuaccel.optim import Arena, Products
from gpuaccel.training.models import Block, Config, Transformer, rotary_table

DEVICES = ["cpu", "simt", CUDA]
NAMES = ("w_q", "w_k", "w_v")
WIDTHS = (
    128,
    64,
    64,
)  # whole chunks of the arena (64 columns each), so that nothing lies between them
INDUCTOR = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))),
    reason="inductor needs a C++ compiler for the CPU, and there is none",
)
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Heads(nn.Module):
    """Three layers of one input, as in a block, and one that has its own."""

    FUSED_LINEARS = (NAMES,)

    def __init__(self, widths=WIDTHS, wide=64, bias=()):
        super().__init__()
        self.before = nn.Linear(wide, wide, bias=False)
        for name, width in zip(NAMES, widths):
            setattr(self, name, nn.Linear(wide, width, bias=name in bias))

    def forward(self, x):
        return fused_linears(self.before(x), self.w_q, self.w_k, self.w_v)


def heads(device="cpu", dtype=torch.float32, **changes):
    torch.manual_seed(0)
    return Heads(**changes).to(device, dtype)


def inputs(device="cpu", dtype=torch.float32, seed=1, shape=(3, 5, 64)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def objective(outputs):
    """Each output counts, and each differently."""
    return sum(((k + 1) * y.float().sin()).sum() for k, y in enumerate(outputs))


def separately(model, x):
    h = F.linear(x, model.before.weight)
    return [F.linear(h, getattr(model, name).weight, getattr(model, name).bias) for name in NAMES]


def sums_agree(arena, plain, times=1, bound=BOUND[torch.float32], only=None):
    """Each weight's sum is what plain torch has as its gradient."""
    for name, p in plain.named_parameters():
        if p.requires_grad and (only is None or name in only):
            close(sums(arena)[name], times * p.grad, f"sum of {name}", bound)


@pytest.fixture
def joined(monkeypatch):
    """Grows with each joint product."""
    seen, was = [], _LinearsIntoArena.forward

    def forward(ctx, x, joint, *rest):
        seen.append(tuple(joint.shape))
        return was(ctx, x, joint, *rest)

    monkeypatch.setattr(_LinearsIntoArena, "forward", staticmethod(forward))
    return seen


# ---- values and gradients ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_values_and_gradients_are_those_of_separate_layers(device, dtype, joined):
    """Outputs, the input's gradient, and each weight's sum over two backwards, in its own slice."""
    model, plain = heads(device, dtype), heads(device, dtype)
    arena = Arena(model)
    with products_add(arena):
        for seed in (1, 2):
            x, twin = (inputs(device, dtype, seed).requires_grad_() for _ in range(2))
            got, want = model(x), separately(plain, twin)
            objective(got).backward()
            objective(want).backward()
            for name, y, wanted in zip(NAMES, got, want):
                close(y, wanted, f"output of {name}", BOUND[dtype])
            close(x.grad, twin.grad, "gradient of the input", BOUND[dtype])
        assert joined == [(sum(WIDTHS), 64)] * 2, "the product was not joint: nothing was tested"
        sums_agree(arena, plain, bound=BOUND[dtype])
        assert all(arena.gradients.received())
        for i, owner in enumerate(arena.masters):
            assert owner.grad is arena.gradients.views[i]
        model.zero_grad(set_to_none=False)
        assert not arena.grads.any()


def test_it_is_the_product_with_the_weights_as_they_lie():
    """No copy of the weights: what an optimizer writes to one of them is in the next product."""
    model = heads()
    arena = Arena(model)
    with products_add(arena):
        first = model.w_q
        assert (
            fused_forward(first).joint.weight.data_ptr() == model.w_v.weight.data_ptr()
            and fused_forward(first).joint.grad.data_ptr() == sums(arena)["w_v.weight"].data_ptr()
        )
        with torch.no_grad():
            model.w_k.weight.mul_(0)
        q, k, v = model(inputs())
        assert not k.any() and q.any() and v.any()
        assert [y.shape[-1] for y in (q, k, v)] == list(WIDTHS)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_autocast_takes_the_product_in_its_dtype(device, joined):
    model, plain, x = heads(device), heads(device), inputs(device)
    arena = Arena(model)
    with products_add(arena):
        with torch.autocast(device, torch.bfloat16):
            got, want = model(x), separately(plain, x)
        objective(got).backward()
        objective(want).backward()
        assert joined and all(y.dtype == torch.bfloat16 for y in got)
        for y, wanted in zip(got, want):
            close(y, wanted, "output", BOUND[torch.bfloat16])
        sums_agree(arena, plain, bound=BOUND[torch.bfloat16])


def test_an_output_that_is_not_used_has_a_gradient_of_zero():
    model, plain, x = heads(), heads(), inputs()
    arena = Arena(model)
    with products_add(arena):
        q, k, v = model(x)
        (q.sin().sum() + v.cos().sum()).backward()
        a, b, c = separately(plain, x)
        (a.sin().sum() + c.cos().sum()).backward()
        assert not sums(arena)["w_k.weight"].any()
        sums_agree(arena, plain, only=("w_q.weight", "w_v.weight", "before.weight"))


# ---- gradients of some ----

SOME = [("w_q",), ("w_k",), ("w_v",), ("w_q", "w_v"), ("before",), ("before", "w_k"), ()]


@pytest.mark.parametrize("asked", SOME, ids=lambda asked: "+".join(asked) or "input")
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_a_backward_for_some_weights_adds_only_those(device, asked, joined):
    model, plain, x = heads(device), heads(device), inputs(device)
    arena = Arena(model)
    with products_add(arena):
        leaves = [model.get_parameter(f"{name}.weight") for name in asked] or [x.requires_grad_()]
        objective(model(x)).backward(inputs=leaves)
        objective(separately(plain, x)).backward()
        assert len(joined) == 1
        for name, total in sums(arena).items():
            i = [s.name for s in arena.segments].index(name)
            if name.removesuffix(".weight") in asked:
                close(total, plain.get_parameter(name).grad, f"sum of {name}")
                assert arena.gradients.received()[i]
            else:
                assert not total.any() and not arena.gradients.received()[i], (
                    f"{name} was not asked for"
                )


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_a_weight_frozen_later_gets_no_gradient(device, joined):
    model, plain, x = heads(device), heads(device), inputs(device)
    arena = Arena(model)
    with products_add(arena):
        model.w_k.weight.requires_grad_(False)
        objective(model(x)).backward()
        objective(separately(plain, x)).backward()
        assert len(joined) == 1 and not sums(arena)["w_k.weight"].any()
        sums_agree(arena, plain, only=("before.weight", "w_q.weight", "w_v.weight"))


# ---- when each layer is called by itself ----


def test_a_hook_on_one_of_the_layers_is_called_and_its_change_counts(joined):
    """A layer that is not called has no hooks: so it is called."""
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        model, x, seen = heads(), inputs(), []
        with products_add(Arena(model)):

            def hook(layer, given, output=None):
                seen.append(layer)
                return output * 3 if output is not None else (given[0] * 3,)

            handle = getattr(model.w_v, register)(hook)
            got = model(x)
            assert seen == [model.w_v] and not joined
            want = separately(model, x)
            close(got[2], 3 * want[2], "what the hook made three times")
            close(got[0], want[0], "the others")
            handle.remove()
            model(x)
            assert len(joined) == 1 and len(seen) == 1, "without the hook it is one product again"
            joined.clear()


@pytest.mark.parametrize(
    "changes, shape, rows",
    [
        *(({}, shape, 256) for shape in ((64,), (2, 3, 4, 64), (0, 64))),
        # Zeros behind the first layer's weight, which lies last: an arena is in reverse order.
        ({"widths": (100, 64, 64)}, (3, 5, 64), 228),
        # A bias, or zeros behind weights that do not fill their chunks of the arena, lie between.
        ({"bias": ("w_v",)}, (3, 64), None),
        ({"widths": (128, 64, 65)}, (3, 64), None),
        ({"widths": (64, 65, 64)}, (3, 64), None),
        ({"wide": 32}, (3, 32), None),
    ],
    ids=str,
)
def test_weights_side_by_side_are_one_product_and_others_are_not(changes, shape, rows, joined):
    """rows: of the joint weight; None: each layer is called."""
    model, plain = heads(**changes), heads(**changes)
    arena, x = Arena(model), inputs(shape=shape)
    with products_add(arena):
        assert (fused_forward(model.w_q).joint is None) == (rows is None)
        objective(model(x)).backward()
        objective(separately(plain, x)).backward()
        sums_agree(arena, plain)
    assert joined == ([] if rows is None else [(rows, 64)])


def test_weights_of_two_dtypes_fall_back():
    model = heads()
    model.w_k.bfloat16()
    with products_add(Arena(model)):
        assert fused_forward(model.w_q).joint is None


def test_hooked_weights_and_frozen_ones_beside_trained_ones_fall_back(joined):
    config = Config(
        vocab=11, hidden=64, intermediate=64, layers=1, heads=2, kv_heads=1, head_dim=64, T=8
    )
    tokens = torch.arange(8)[None]
    for what in ("tensor hook", "frozen"):
        torch.manual_seed(0)
        model = Transformer(config)
        block, seen = model.blocks[0], []
        if what == "tensor hook":
            block.w_k.weight.register_hook(lambda grad: seen.append(grad))
        else:
            block.w_q.weight.requires_grad_(False)
        plain = copy.deepcopy(model)
        arena = Arena(model)
        with products_add(arena):
            assert all(
                getattr(fused_forward(getattr(block, name)), "joint", None) is None
                for name in NAMES
            ), what
            model(tokens).square().sum().backward()
            plain(tokens).square().sum().backward()
            sums_agree(arena, plain)
        assert what != "tensor hook" or len(seen) >= 1
    assert not joined


def test_without_gradients_or_where_autograd_adds_each_layer_is_called(joined):
    model, x = heads(), inputs()
    want = separately(model, x)
    for y, wanted in zip(model(x), want):
        assert torch.equal(y, wanted)
    arena = Arena(model)
    with products_add(arena):
        with torch.no_grad():
            for y, wanted in zip(model(x), want):
                close(y, wanted, "without gradients")
                assert not y.requires_grad
    model(x)
    assert not joined


# ---- coming and going ----


def add_in_a_backward(sums):
    """What a compiled backward calls."""
    dy, x = torch.ones(2, len(sums)), torch.ones(2, sums.shape[1])
    y = torch.ones(1, requires_grad=True)
    y.register_hook(lambda grad: torch.ops.gpuaccel.add_weight_gradient_(sums, dy, x))
    y.sum().backward()


def test_close_takes_the_joint_product_away(joined):
    """The gradients of a forward before are autograd's; those of a compiled one are refused."""
    model, x = heads(), inputs()
    arena = Arena(model)
    adding = Products(arena)
    sums = [fused_forward(getattr(model, name)).grad for name in NAMES]
    sums.append(fused_forward(model.w_q).joint.grad)
    assert len({slice_of(t) for t in sums}) == 4 and all(slice_of(t).acc is t for t in sums)
    late = objective(model(x))
    adding.close()
    assert joined.pop() and not joined
    for name in NAMES:
        layer = getattr(model, name)
        assert type(layer) is nn.Linear and "forward" not in vars(layer)
    late.backward()
    for t in sums:
        with pytest.raises(ArgumentError, match="closed between forward and backward"):
            add_in_a_backward(t)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    objective(model(x)).backward()
    for p, of_the_graph_before in zip(model.parameters(), gradients, strict=True):
        close(of_the_graph_before, p.grad, "the gradient of a forward before close()")
    assert not joined and all(p.grad is not None for p in model.parameters())
    with products_add(arena):
        model(x)
    assert len(joined) == 1, "and it comes again"


def test_every_block_of_the_transformer_has_one_product(joined):
    config = Config(
        vocab=11, hidden=64, intermediate=64, layers=3, heads=2, kv_heads=1, head_dim=64, T=8
    )
    torch.manual_seed(0)
    model = Transformer(config)
    plain, tokens = copy.deepcopy(model), torch.arange(8)[None]
    arena = Arena(model)
    with products_add(arena):
        model(tokens).square().sum().backward()
        plain(tokens).square().sum().backward()
        assert joined == [(256, 64)] * 3
        sums_agree(arena, plain)


# ---- torch.compile ----


@INDUCTOR
def test_blocks_compile_once_and_add_into_their_own_slices():
    """Two blocks, compiled one by one, run the same code. Values and sums are those of eager."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.ModuleList([Heads(), Heads()])
    plain, x, compiled = copy.deepcopy(model), inputs(), torch._dynamo.utils.counters["stats"]
    arena = Arena(model)
    try:
        with products_add(arena):
            for block in model:
                block.compile(dynamic=False)
            for times in (1, 2):
                before = compiled["unique_graphs"]
                for block in model:
                    objective(block(x)).backward()
                assert compiled["unique_graphs"] == before + (times == 1), (
                    "a block was compiled once more"
                )
                for block in plain:
                    objective(separately(block, x)).backward()
                sums_agree(arena, plain)
            assert all(arena.gradients.received())
            for block, other in zip(model, plain):
                for y, wanted in zip(block(x), separately(other, x)):
                    close(y, wanted, "output")
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
@INDUCTOR
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_gate_and_up_are_one_product_when_compiled_with_the_sums_of_eager(monkeypatch, device):
    torch.manual_seed(0)
    config = Config(vocab=32, hidden=64, intermediate=128, layers=1, heads=4, kv_heads=2, T=8)
    models = [Block(config).to(device) for _ in range(2)]
    x = torch.randn(2, 8, 64, device=device)
    models[1].load_state_dict(models[0].state_dict())
    add = weight_gradient.accumulate_product
    rope, weight = rotary_table(8, 16, 10_000.0).to(device), torch.randn(2, 8, 64, device=device)
    found, joined = [], []
    try:
        for model, compiled in zip(models, (False, True)):
            arena, given = Arena(model), x.clone().requires_grad_()
            with products_add(arena):
                if compiled:
                    model.compile(dynamic=False)
                joint = fused_forward(model.gate).joint.grad

                def add_and_note(acc, *rest, joint=joint, compiled=compiled):
                    if acc.data_ptr() == joint.data_ptr() and acc.shape == joint.shape:
                        joined.append(compiled)
                    add(acc, *rest)

                monkeypatch.setattr(weight_gradient, "accumulate_product", add_and_note)
                y = model(given, rope)
                (y * weight).sum().backward()
                found.append((y.detach(), given.grad, *(t.clone() for t in sums(arena).values())))
    finally:
        torch._dynamo.reset()
    assert joined == [True], "one product for both when compiled, one for each otherwise"
    for mine, eager in zip(*found[::-1]):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


def test_a_layer_whose_forward_somebody_has_replaced_is_left_alone():
    """Also a copy of a fused layer; a copy that nobody has touched is fused as any other."""
    arena = Arena(nn.Sequential(nn.Linear(3, 2)))
    with products_add(arena):
        wrapped, plain = (copy.deepcopy(arena.module) for _ in range(2))
    own = wrapped[0].forward
    replaced = wrapped[0].forward = lambda x: 2 * own(x)
    with products_add(Arena(wrapped)):
        assert fused_forward(wrapped[0]) is None and wrapped[0].forward is replaced
    with products_add(Arena(plain)):
        assert fused_forward(plain[0]) is not None


# ---- Conv1D of transformers ----


@pytest.fixture
def conv1d():
    utils = pytest.importorskip(
        "transformers.pytorch_utils", reason="transformers, of the extra `test`, is missing"
    )
    return utils.Conv1D


class Mlp(nn.Module):
    """As GPT-2's: two Conv1D, and an output layer that may be tied to the first one's weight."""

    def __init__(self, Conv1D, tied=False):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(48, 32), Conv1D(32, 48)
        self.head = nn.Linear(48, 32, bias=False)
        if tied:
            self.head.weight = self.c_fc.weight
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x))) + self.head(F.gelu(self.c_fc(x)))


def mlps(conv1d, device="cpu", dtype=torch.float32, **changes):
    """(a model, the same model for plain torch)."""
    torch.manual_seed(0)
    model = Mlp(conv1d, **changes).to(device, dtype)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_conv1d_has_the_values_and_gradients_of_transformers(
    conv1d, device, dtype, tied, monkeypatch
):
    """Over two backwards; the weight is (in, out), as its slice of the arena."""
    add, products = weight_gradient.accumulate_product, []

    def add_and_note(acc, *rest):
        products.append(tuple(acc.shape))
        add(acc, *rest)

    monkeypatch.setattr(weight_gradient, "accumulate_product", add_and_note)
    model, plain = mlps(conv1d, device, dtype, tied=tied)
    arena = Arena(model)
    with products_add(arena):
        layers = [model.c_fc, model.c_proj]
        assert all(type(layer) is conv1d and fused_forward(layer) for layer in layers)
        for seed in (1, 2):
            x, twin = (inputs(device, dtype, seed, (3, 5, 32)).requires_grad_() for _ in range(2))
            got, want = model(x), plain(twin)
            objective([got]).backward()
            objective([want]).backward()
            close(got, want, "output", BOUND[dtype])
            close(x.grad, twin.grad, "gradient of the input", BOUND[dtype])
        sums_agree(arena, plain, bound=2 * BOUND[dtype])
        assert all(arena.gradients.received())
    # In each backward of c_fc twice, of the head, and of c_proj.
    assert sorted(products) == [(32, 48)] * 6 + [(48, 32)] * 2
    assert all("forward" not in vars(layer) for layer in layers)
    assert not fused_forward(copy.deepcopy(model.c_fc))


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_conv1d_under_autocast(conv1d, device):
    model, plain = mlps(conv1d, device)
    arena = Arena(model)
    with products_add(arena):
        for module in (model, plain):
            with torch.autocast(device, torch.bfloat16):
                y = module(inputs(device, shape=(3, 5, 32)))
            assert y.dtype == torch.bfloat16
            objective([y]).backward()
        sums_agree(arena, plain, bound=2 * BOUND[torch.bfloat16])


def test_conv1d_returns_what_autograd_grad_asks_for_and_second_derivatives(conv1d):
    model, plain = mlps(conv1d)
    arena = Arena(model)
    with products_add(arena):
        results = []
        for module in (model, plain):
            x = inputs(shape=(3, 32)).requires_grad_()
            asked = [x, *module.parameters()]
            first = torch.autograd.grad(objective([module(x)]), asked, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), asked)
            results.append([*first, *second])
        for k, (got, want) in enumerate(zip(*results, strict=True)):
            close(got, want, f"derivative {k}", 1e-4)
        assert not arena.grads.any()


def test_only_the_conv1d_of_transformers_is_recognised(conv1d):
    class Conv1D(nn.Module):
        """y = x @ weight * bias: the same name and shapes."""

        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))

    assert FusedConv1D.supports(conv1d(3, 4))
    assert not FusedConv1D.supports(Conv1D())
    Subclass = type("Wider", (conv1d,), {})
    assert not FusedConv1D.supports(Subclass(3, 4))
    more = conv1d(3, 4)
    more.scale = nn.Parameter(torch.ones(3))
    assert not FusedConv1D.supports(more)


@pytest.mark.slow
@INDUCTOR
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_conv1d_compiled_adds_into_its_slice(conv1d, device):
    torch._dynamo.reset()
    model, plain = mlps(conv1d, device)
    arena = Arena(model)
    try:
        with products_add(arena):
            compiled = torch.compile(lambda x: objective([model(x)]), dynamic=False)
            for seed in (1, 2):
                x = inputs(device, seed=seed, shape=(3, 5, 32))
                compiled(x).backward()
                objective([plain(x)]).backward()
            sums_agree(arena, plain, bound=1e-4)
    finally:
        torch._dynamo.reset()


class Listed(nn.Module):
    FUSED_LINEARS = (("q", "k", "v"),)

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6, bias=False) for _ in "qkv")


@pytest.mark.parametrize("order", ["qkv", "qvk", "vkq", "qk", "kv", "q"])
def test_other_layers_than_the_listed_ones_are_called_one_by_one(order):
    """In another order, or some of them: each output is its layer's."""
    torch.manual_seed(0)
    module = Listed()
    x = torch.randn(3, 6)
    arena = Arena(module)
    products = Products(arena)
    layers = [getattr(module, name) for name in order]
    for y, layer in zip(fused_linears(x, *layers), layers, strict=True):
        torch.testing.assert_close(y, x @ layer.weight.t())
    products.close()
    arena.release()
