"""Layers whose products add, under everything that autograd offers beside backward(): the gradients
are those of the same layers in plain torch, or a sentence of ours says what to do instead."""

import contextlib
import copy

import pytest
import torch
from helpers import EVERYWHERE, close, products_add
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

from gpuaccel.errors import ArgumentError
from gpuaccel.nn import fused_forward, fused_linears
from gpuaccel.optim.arena import Arena

DEVICES = pytest.mark.parametrize("device", EVERYWHERE, indirect=True)


class Net(nn.Module):
    """Tokens (B, T) -> (B, T, 5): an embedding, a layer with a bias, three as one product."""

    FUSED_LINEARS = [("q", "k", "v")]

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 64)
        self.first = nn.Linear(64, 64)
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.last = nn.Linear(64, 5)

    def features(self, x):
        q, k, v = fused_linears(torch.tanh(self.first(x)), self.q, self.k, self.v)
        return self.last(q * k.sigmoid() + v)

    def forward(self, tokens):
        return self.features(self.embedding(tokens))


def tokens_on(device):
    return torch.randint(0, 7, (2, 3), generator=torch.Generator().manual_seed(1)).to(device)


def embedded_on(device):
    return torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2)).to(device)


def loss_of(model, tokens):
    return model(tokens).square().mean()


def pair(device):
    """(a model, the same model for plain torch)."""
    torch.manual_seed(0)
    model = Net().to(device)
    return model, copy.deepcopy(model)


# ---- what each returns or leaves behind ----


def grad_of_all(model, device):
    return torch.autograd.grad(loss_of(model, tokens_on(device)), [*model.parameters()])


def grad_of_one(model, device):
    return torch.autograd.grad(loss_of(model, tokens_on(device)), [model.k.weight])


def grad_of_input(model, device):
    x = embedded_on(device).requires_grad_()
    return torch.autograd.grad(model.features(x).square().sum(), x)


def grads_batched(model, device):
    x = embedded_on(device).requires_grad_()
    y = model.features(x)
    vectors = torch.ones(4, *y.shape, device=device)
    wanted = [x, model.last.weight, model.q.weight]
    return torch.autograd.grad(y, wanted, vectors, is_grads_batched=True)


def second_derivative(model, device):
    first = grad_of_all_with_graph(model, device)
    return torch.autograd.grad(sum(g.square().sum() for g in first), [*model.parameters()])


def grad_of_all_with_graph(model, device):
    loss = loss_of(model, tokens_on(device))
    return torch.autograd.grad(loss, [*model.parameters()], create_graph=True)


def derivative_of(fn):
    def derivative(model, device):
        return [fn(lambda x: model.features(x).square().sum())(embedded_on(device)).detach()]

    return derivative


def jvp(model, device):
    x = embedded_on(device)
    return torch.func.jvp(model.features, (x,), (x,))


def forward_mode(model, device):
    x = embedded_on(device)
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model.features(forward_ad.make_dual(x, x)))


def functional_grad(model, device):
    def loss(params):
        return functional_call(model, params, (tokens_on(device),)).square().mean()

    return list(torch.func.grad(loss)(dict(model.named_parameters())).values())


def per_sample_grads(model, device):
    def loss(params, tokens):
        return functional_call(model, params, (tokens[None],)).square().mean()

    params = {name: p.detach() for name, p in model.named_parameters()}
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    return list(each(params, tokens_on(device)).values())


def other_parameters(model, device):
    """The gradients of weights that stand in for the module's."""
    params = {name: (3 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    functional_call(model, params, (tokens_on(device),)).square().mean().backward()
    return [p.grad for p in params.values()]


# These return gradients and add nothing to the arena.
RETURNING = {
    "autograd.grad": grad_of_all,
    "autograd.grad of one": grad_of_one,
    "autograd.grad of the input": grad_of_input,
    "is_grads_batched": grads_batched,
    "a second derivative": second_derivative,
    "func.jacrev": derivative_of(torch.func.jacrev),
    "func.hessian": derivative_of(torch.func.hessian),
    "func.vmap": derivative_of(torch.func.vmap),
    "func.jvp": jvp,
    "forward mode": forward_mode,
    "func.grad of functional_call": functional_grad,
    "per-sample gradients": per_sample_grads,
    "functional_call with other weights": other_parameters,
}


@pytest.mark.parametrize("case", RETURNING)
@DEVICES
def test_what_is_returned_is_as_in_torch_and_the_arena_stays_empty(device, case):
    model, plain = pair(device)
    arena = Arena(model)
    with products_add(arena):
        assert fused_forward(model.q).joint is not None
        results = RETURNING[case](model, device)
        wanted = RETURNING[case](plain, device)
        for k, (got, want) in enumerate(zip(results, wanted, strict=True)):
            close(got, want, f"result {k}")
        assert not arena.grads.any() and not any(arena.gradients.received())
        # The next backward adds.
        loss_of(model, tokens_on(device)).backward()
        loss_of(plain, tokens_on(device)).backward()
        for name, p in plain.named_parameters():
            close(model.get_parameter(name).grad, p.grad, name)


def weights_computed_from_parameters(model, device):
    params = {name: 3 * p for name, p in model.named_parameters()}
    functional_call(model, params, (tokens_on(device),)).square().mean().backward()


def gradient_penalty(model, device):
    x = model.embedding(tokens_on(device))
    y = model.features(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (y.mean() + slope.square().mean()).backward()


def keeping_its_graph(model, device):
    """Twice: the first `.grad` has a graph that the second backward adds to."""
    loss_of(model, tokens_on(device)).backward(create_graph=True)


def some_inputs(model, device):
    loss_of(model, tokens_on(device)).backward(inputs=[model.k.weight, model.first.bias])


def mapped_forward(model, device):
    torch.func.vmap(model)(tokens_on(device)).square().mean().backward()


def late_hooks(model, device):
    """Hooks that were not there when the products were made."""
    seen = []
    for p in (model.embedding.weight, model.first.weight, model.k.weight):
        p.register_hook(lambda grad: seen.append(grad.detach().clone()) or 2 * grad)
    loss_of(model, tokens_on(device)).backward()
    return seen


def hooks_after_forward(model, device):
    loss = loss_of(model, tokens_on(device))
    model.v.weight.register_hook(lambda grad: 5 * grad)
    loss.backward()


def hooks_taken_away(model, device):
    late_hooks(model, device)
    for p in (model.embedding.weight, model.first.weight, model.k.weight):
        p._backward_hooks.popitem()
    loss_of(model, tokens_on(device)).backward()


# These accumulate into .grad; a list that they return has to agree, too.
ADDING = {
    "weights computed from the parameters": weights_computed_from_parameters,
    "a gradient penalty": gradient_penalty,
    "backward(create_graph=True)": keeping_its_graph,
    "backward(inputs=)": some_inputs,
    "vmap around the forward": mapped_forward,
    "late hooks": late_hooks,
    "hooks between forward and backward": hooks_after_forward,
    "late hooks that were taken away": hooks_taken_away,
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("case", ADDING)
@DEVICES
def test_what_is_added_is_as_in_torch(device, case, times):
    model, plain = pair(device)
    with products_add(Arena(model)):
        for _ in range(times):
            results = ADDING[case](model, device) or []
            wanted = ADDING[case](plain, device) or []
            for k, (got, want) in enumerate(zip(results, wanted, strict=True)):
                close(got, want, f"result {k}")
        for name, p in plain.named_parameters():
            close(model.get_parameter(name).grad, p.grad, name)


def test_a_second_derivative_under_autocast_leads_through_the_casts():
    """The casts of weights and inputs are inside of the layers. torch's own are outside."""
    results = []
    model, plain = pair("cpu")
    for model, adding in ((model, products_add(Arena(model))), (plain, contextlib.nullcontext())):
        with adding, torch.autocast("cpu", torch.bfloat16):
            x = embedded_on("cpu").requires_grad_()
            (slope,) = torch.autograd.grad(model.features(x).sum(), x, create_graph=True)
        weights = [model.first.weight, model.q.weight, model.k.weight, model.last.weight]
        results.append(torch.autograd.grad(slope.square().sum(), [x, *weights], allow_unused=True))
    for k, (got, want) in enumerate(zip(*results, strict=True)):
        close(got, want, f"derivative {k}", bound=5e-2)


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_functional_call_inside_of_torch_compile_uses_the_weights_it_is_given(fullgraph):
    torch._dynamo.reset()
    model, plain = pair("cpu")
    arena = Arena(model)
    with products_add(arena):
        tokens = tokens_on("cpu")

        def loss(module, params):
            return functional_call(module, params, (tokens,)).square().mean()

        compiled = torch.compile(loss, backend="eager", fullgraph=fullgraph)
        compiled(model, dict(model.named_parameters())).backward()
        model.zero_grad()
        for module, function in ((model, compiled), (plain, loss)):
            params = {name: 3 * p.detach() for name, p in module.named_parameters()}
            for p in params.values():
                p.requires_grad_()
            function(module, params).backward()
            module.results = [p.grad for p in params.values()]
        for got, want in zip(model.results, plain.results, strict=True):
            close(got, want, "a gradient")
        assert all(p.grad is None for p in model.parameters())
    torch._dynamo.reset()


# ---- what is refused ----


@pytest.mark.slow
def test_a_compiler_that_hands_on_a_copy_of_the_sum_is_refused_and_says_what_to_do():
    torch._dynamo.reset()
    model, plain = pair("cpu")
    with products_add(Arena(model)):
        compiled = torch.compile(model, backend="aot_eager")
        message = "other than inductor.*compile with backend='inductor'"
        with pytest.raises(ArgumentError, match=message):
            loss_of(compiled, tokens_on("cpu")).backward()
        # The layers go on uncompiled.
        model.zero_grad()
        loss_of(model, tokens_on("cpu")).backward()
        loss_of(plain, tokens_on("cpu")).backward()
        for name, p in plain.named_parameters():
            close(model.get_parameter(name).grad, p.grad, name)
    torch._dynamo.reset()


def ask_for_gradients(model, loss):
    torch.autograd.grad(loss, [model.first.weight])


def hook_late(model, loss):
    model.first.weight.register_hook(lambda grad: grad)
    loss.backward()


def hook_behind_the_addition(model, loss):
    model.first.weight.register_post_accumulate_grad_hook(lambda p: None)
    loss.backward()


@pytest.mark.parametrize(
    "act, message",
    [
        (ask_for_gradients, r"torch.autograd.grad\(\) asks for the gradient of first.weight"),
        (hook_late, "first.weight got a hook after the TrainStep was made"),
        (hook_behind_the_addition, "first.weight got a hook after the TrainStep was made"),
    ],
)
def test_a_compiled_layer_says_that_it_returns_no_gradient(act, message, monkeypatch):
    """Its backward was traced, and calls the operation whatever it is asked for."""
    model, _ = pair("cpu")
    with products_add(arena := Arena(model)):
        loss = model.first(embedded_on("cpu")).square().sum()
        # As when autograd's function was traced.
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(ArgumentError, match=f"{message}.*do not compile it, or register"):
            act(model, loss)
        assert model.first.weight.grad is None
        assert not arena.gradients.views[arena.number_of(model.first.weight)].any()


def scaled(y):
    return y.mul_(2)


def masked(y):
    """As the masking of features in wav2vec2."""
    y[..., :2] = 0.5
    return y


@pytest.mark.parametrize("change", [scaled, masked])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
@pytest.mark.parametrize("kind", ["bias", "no bias", "Conv1D"])
@DEVICES
def test_a_layers_output_may_be_changed_in_place(device, kind, shape, change):
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=kind == "bias")
    if kind == "Conv1D":
        layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 6)
    layer = layer.to(device)
    torchs, x = copy.deepcopy(layer), torch.randn(shape).to(device)
    arena = Arena(layer)
    with products_add(arena) as products:
        products.begin_backward()
        change(layer(x)).square().sum().backward()
    change(torchs(x)).square().sum().backward()
    for p, q in zip(layer.parameters(), torchs.parameters(), strict=True):
        close(p.grad, q.grad)
