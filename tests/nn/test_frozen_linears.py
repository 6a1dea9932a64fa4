"""Frozen layers of one input, with LoRA around some of them, are one product: values, gradients,
and what happens to the frozen weights."""

import copy
import shutil

import pytest
import torch
from helpers import EVERYWHERE, KERNELS, differ, products_add, same, sums
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.nn import GradientSlice, SlicePart, fused_forward, fused_linears, joint_linears
from gpuaccel.nn.gradient_slice import slice_of
from gpuaccel.ops import lora_gradients
from gpuaccel.optim import Arena, Products
from gpuaccel.training.lora import BLOCK_NORMS
from gpuaccel.training.lora_files import WEIGHTS
from gpuaccel.training.models import Config, Transformer

V, T = 61, 8
NAMES = ("w_q", "w_k", "w_v")
ALL = (*NAMES, "w_o", "gate", "up", "down")
TARGETS = [("w_q", "w_v"), ("w_k",), ("down",), ALL]
# Of a difference's norm, and of its largest value: bf16 is rounded in each operation of a model.
BOUND = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-2, 8e-2)}

needs_a_cpp_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))),
    reason="inductor needs a C++ compiler, and there is none",
)


def adapted(device="cpu", dtype=torch.float32, targets=("w_q", "w_v"), layers=2, **options):
    """A model with LoRA whose B is not zero, and the same for plain layers."""
    torch.manual_seed(0)
    sizes = dict(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16)
    model = Transformer(Config(vocab=V, layers=layers, T=2 * T, **sizes)).to(device, dtype)
    ga.apply_lora(model, rank=3, alpha=4.5, targets=targets, seed=0, **options)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.2)
    return model, copy.deepcopy(model)


def tokens(device="cpu", seed=1):
    return torch.randint(V, (3, T), generator=torch.Generator().manual_seed(seed)).to(device)


def objective(y):
    return y.float().sin().mean()


def close(got, want, what, bound=BOUND[torch.float32]):
    """The difference, as a part of the values, by norm and by the largest."""
    assert got.shape == want.shape, what
    got, want = got.double(), want.double()
    error = got - want
    assert error.norm() <= bound[0] * want.norm(), f"{what}: {differ(got, want)}"
    assert error.abs().max() <= bound[1] * want.abs().max(), f"{what}: {differ(got, want)}"


def sums_agree(arena, plain, bound=BOUND[torch.float32]):
    for name, p in plain.named_parameters():
        if p.requires_grad:
            close(sums(arena)[name], p.grad.float(), f"sum of {name}", bound)


@pytest.fixture
def joined(monkeypatch):
    """Grows by the number of LoRA layers with each joint product of frozen weights."""
    seen, was = [], joint_linears._FrozenLinears.forward

    def forward(ctx, x, joint, widths, table, starts, *rest):
        seen.append(len(starts))
        return was(ctx, x, joint, widths, table, starts, *rest)

    monkeypatch.setattr(joint_linears._FrozenLinears, "forward", staticmethod(forward))
    return seen


@pytest.fixture
def launches(monkeypatch):
    """Grows by the number of products of each launch that adds gradients of factors."""
    sizes, launch = [], lora_gradients._launch

    def note(kernel, gradients):
        sizes.append(len(gradients))
        launch(kernel, gradients)

    monkeypatch.setattr(lora_gradients, "_launch", note)
    return sizes


# ---- values and gradients ----


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_values_and_sums_are_those_of_plain_layers(device, dtype, targets, joined):
    """Over several micro-batches; the norms are trained whole."""
    model, plain = adapted(device, dtype, targets, also=BLOCK_NORMS)
    arena = Arena(model)
    with products_add(arena):
        for seed in (1, 2, 3):
            x = tokens(device, seed)
            got, want = model(x), plain(x)
            close(got, want, "logits", BOUND[dtype])
            objective(got).backward()
            objective(want).backward()
        sums_agree(arena, plain, BOUND[dtype])
        assert all(arena.gradients.received())
    # Gate and up, too, are one product where torch.compile makes one kernel of what follows.
    assert joined == [len(set(targets).intersection(NAMES))] * 6


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_autocast_takes_the_products_in_its_dtype(device, joined):
    model, plain = adapted(device)
    arena = Arena(model)
    with products_add(arena):
        x = tokens(device)
        with torch.autocast(device, torch.bfloat16):
            got, want = model(x), plain(x)
        assert got.dtype == torch.bfloat16
        close(got, want, "logits", BOUND[torch.bfloat16])
        objective(got).backward()
        objective(want).backward()
        sums_agree(arena, plain, BOUND[torch.bfloat16])
    assert joined == [2, 2]


class Heads(nn.Module):
    """Two LoRA layers and a frozen one between them, of one input."""

    FUSED_LINEARS = (NAMES,)

    def __init__(self, bias=False):
        super().__init__()
        self.w_q = nn.Linear(24, 20, bias=bias)
        self.w_k = nn.Linear(24, 10, bias=False)
        self.w_v = nn.Linear(24, 15, bias=False)

    def forward(self, x):
        return torch.cat(fused_linears(x, self.w_q, self.w_k, self.w_v), -1)


class Wide(Heads):
    """The same, of widths that are whole groups of 16 bytes."""

    def __init__(self):
        super().__init__()
        self.w_q = nn.Linear(24, 40, bias=False)
        self.w_k = nn.Linear(24, 16, bias=False)
        self.w_v = nn.Linear(24, 24, bias=False)


def heads(device="cpu", dtype=torch.float32, bias=False, **options):
    torch.manual_seed(0)
    model = ga.apply_lora(Heads(bias).to(device, dtype), rank=4, alpha=6, seed=0, **options)
    with torch.no_grad():
        for layer in (model.w_q, model.w_v):
            layer.lora_B.weight.normal_()
    return model, copy.deepcopy(model)


def rows(device="cpu", shape=(3, 5, 24)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return x.to(device).requires_grad_()


@pytest.mark.parametrize("shape", [(24,), (7, 24), (1, 24), (2, 3, 4, 24), (0, 24)], ids=str)
def test_any_number_of_leading_dimensions(shape, joined):
    model, plain = heads()
    x, twin = rows(shape=shape), rows(shape=shape)
    arena = Arena(model)
    with products_add(arena):
        model(x).sin().sum().backward()
        plain(twin).sin().sum().backward()
        assert joined == [2]
        if x.numel():
            close(x.grad, twin.grad, "gradient of x")
            sums_agree(arena, plain)
        else:
            assert not arena.grads.any()


FACTORS = [f"{name}.lora_{factor}.weight" for name in ("w_q", "w_v") for factor in "AB"]


@pytest.mark.parametrize("some", [[name] for name in [*FACTORS, "x"]] + [FACTORS], ids="+".join)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_backward_for_some_factors_adds_or_returns_only_those(device, some, joined):
    model, plain = heads(device)
    x, twin = rows(device), rows(device)
    plain(twin).sin().sum().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()} | {"x": twin.grad}
    arena = Arena(model)
    with products_add(arena):
        leaves = [x if name == "x" else model.get_parameter(name) for name in some]
        returned = torch.autograd.grad(model(x).sin().sum(), leaves)
        assert not arena.grads.any()
        for name, got in zip(some, returned, strict=True):
            close(got, wanted[name], f"gradient of {name}")
        model(x).sin().sum().backward(inputs=leaves)
        for s, total, received in zip(
            arena.segments, arena.gradients.views, arena.gradients.received()
        ):
            assert received == (s.name in some)
            if received:
                close(total, wanted[s.name], f"sum of {s.name}")
            else:
                assert not total.any(), f"{s.name} was not asked for"
    assert joined == [2, 2]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_second_derivatives_are_those_of_torch(device, autocast, joined):
    results = []
    for model in heads(device):
        x = rows(device)
        with products_add(arena := Arena(model)):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                y = model(x)
            leaves = [x, *map(model.get_parameter, FACTORS)]
            grads = torch.autograd.grad(y.float().sin().sum(), leaves, create_graph=True)
            results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
            assert not arena.grads.any()
    assert joined == [2, 2]
    model, plain = heads(device)
    x = rows(device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        y = plain(x)
    leaves = [x, *map(plain.get_parameter, FACTORS)]
    grads = torch.autograd.grad(y.float().sin().sum(), leaves, create_graph=True)
    wanted = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
    # In bf16 gradients are rounded, and what is made of them is rounded again.
    bound = (0.1, 0.1) if autocast else (1e-4, 1e-4)
    for name, got, again, want in zip(("x", *FACTORS), *results, wanted, strict=True):
        same(got, again, name)
        close(got, want, f"second derivative by {name}", bound)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_hook_on_a_factor_sees_its_gradient_and_a_frozen_factor_gets_none(device, joined):
    model, plain = heads(device)
    x = rows(device)
    plain(x).sin().sum().backward()
    arena, seen = Arena(model), []
    with products_add(arena):
        model.w_q.lora_B.weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
        model.w_v.lora_A.weight.requires_grad_(False)
        model(x).sin().sum().backward()
        totals = sums(arena)
        close(seen[0], plain.w_q.lora_B.weight.grad, "what the hook has seen")
        close(totals["w_q.lora_B.weight"], 2 * plain.w_q.lora_B.weight.grad, "twice")
        close(totals["w_q.lora_A.weight"], plain.w_q.lora_A.weight.grad, "A of the same layer")
        close(totals["w_v.lora_B.weight"], plain.w_v.lora_B.weight.grad, "B beside a frozen A")
        assert not totals["w_v.lora_A.weight"].any()
    assert joined == [2]


# ---- one launch for the factors' gradients ----


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_one_launch_adds_what_a_product_each_added(device, dtype, targets, launches, monkeypatch):
    """Both sum in fp32; a second run is bit-identical. Layers without a joint product have none."""
    model, _ = adapted(device, dtype, targets)

    def sums_of(module):
        arena = Arena(module)
        with products_add(arena):
            for seed in (1, 2):
                objective(module(tokens(device, seed))).backward()
            return {name: t.clone() for name, t in sums(arena).items()}

    got, again, other = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    got = sums_of(got)
    # A dA and a dB of each layer, in each of two blocks.
    count = 2 * len(set(targets).intersection(NAMES))
    assert launches == [count] * 4 if count else not launches
    for name, t in sums_of(again).items():
        same(t, got[name], name)
    launches.clear()
    monkeypatch.setattr(lora_gradients, "_fits", lambda gradient: False)
    for name, t in sums_of(other).items():
        close(got[name], t, name)
    assert not launches


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_products_that_the_kernel_does_not_take_are_added_one_by_one(device, launches):
    """Outputs of 15 and 20 columns; backend torch; ranks above 16."""
    on_kernels = ga.backend().name != "torch"
    for cls, rank, taken in ((Heads, 4, [2]), (Wide, 16, [4]), (Wide, 17, [])):
        model = ga.apply_lora(cls().to(device), rank=rank, alpha=6, seed=0)
        nn.init.normal_(model.w_q.lora_B.weight)
        plain = copy.deepcopy(model)
        arena = Arena(model)
        with products_add(arena):
            model(rows(device)).sin().sum().backward()
            plain(rows(device)).sin().sum().backward()
            sums_agree(arena, plain)
        assert launches == (taken if on_kernels else [])
        launches.clear()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_factor_that_two_layers_share_gets_the_gradients_of_both(device, launches):
    """One launch must not write a sum twice."""
    torch.manual_seed(0)
    model = ga.apply_lora(Wide().to(device), rank=4, alpha=6, seed=0)
    model.w_v.lora_A = model.w_q.lora_A
    for layer in (model.w_q, model.w_v):
        nn.init.normal_(layer.lora_B.weight)
    plain = copy.deepcopy(model)
    arena = Arena(model)
    with products_add(arena):
        model(rows(device)).sin().sum().backward()
        plain(rows(device)).sin().sum().backward()
        sums_agree(arena, plain)
    assert launches == ([2] if ga.backend().name != "torch" else [])


# ---- where each layer is called ----


def test_a_factor_that_two_layers_share_is_complete_once():
    """When both products are there: what it had before was sent to other ranks too early."""
    acc, log = torch.zeros(4, 24), []

    class Target(GradientSlice):
        def begin(self, uses):
            log.append("begin")
            return [SlicePart(acc, None, False)]

        def end(self, uses):
            log.append("end")

    target = Target(acc)
    dys, xs = [torch.ones(3, 4)] * 2, [torch.ones(3, 24)] * 2
    torch.ops.gpuaccel.add_lora_gradients_([acc, acc], dys, xs, [1.0, 2.0])
    assert slice_of(acc) is target
    assert log == ["begin", "begin", "end"] and acc.eq(9).all()


def test_a_factor_that_a_layer_outside_of_the_joint_has_too_lies_in_one_storage():
    model, _ = heads()
    model.other = ga.apply_lora(nn.Sequential(nn.Linear(24, 5, bias=False)), 4, 6, targets="0")
    model.other[0].lora_A.weight = model.w_q.lora_A.weight
    with products_add(Arena(model)):
        grads = [layer.lora_A.gpuaccel_fused.grad for layer in (model.w_q, model.other[0])]
        assert grads[0] is grads[1]
        assert grads[0].untyped_storage().nbytes() == grads[0].nbytes


def without_a_joint_product(model, plain, what, joined, call=None):
    """The values are bit-identical to those of plain layers, because plain layers are called."""
    call = call or (lambda module: module(rows()))
    with products_add(Arena(model)):
        same(call(model).detach(), call(plain).detach(), what)
    assert not joined, what


def test_dropout_bias_hooks_and_factors_of_another_dtype_leave_the_layers_alone(joined):
    for options in ({"dropout": 0.5}, {"bias": True}, {"dtype": torch.float64}):
        if options.pop("dtype", None):
            model, plain = (copy.deepcopy(m).bfloat16() for m in heads())
            for module in (model, plain):
                for layer in (module.w_q, module.w_v):
                    layer.lora_A.float()
                    layer.lora_B.float()
            without_a_joint_product(
                model, plain, "fp32 factors", joined, lambda module: module(rows().bfloat16())
            )
            continue

        def seeded(module):
            torch.manual_seed(5)
            return module(rows())

        without_a_joint_product(*heads(**options), str(options), joined, seeded)
    for path in ("w_k", "w_q", "w_q.base_layer", "w_v.lora_A", "w_v.lora_dropout"):
        model, plain = heads()
        seen = []
        model.get_submodule(path).register_forward_hook(lambda *_: seen.append(1))
        without_a_joint_product(model, plain, path, joined)
        assert seen == [1], "a layer that is not called has no hooks: so it is called"
    model, plain = heads()
    model.w_q.lora_A.weight.register_hook(lambda grad: None)
    without_a_joint_product(model, plain, "a factor with a hook", joined)


def test_without_gradients_with_other_weights_and_under_transforms_the_layers_are_plain(joined):
    def without_gradients(module):
        with torch.no_grad():
            return module(rows())

    def other_weights(module):
        return functional_call(module, {n: 2 * p for n, p in module.named_parameters()}, (rows(),))

    def jacobian(module):
        return torch.func.jacrev(lambda x: module(x).sum(0))(rows(shape=(2, 24)).detach())

    for call in (without_gradients, other_weights, jacobian):
        without_a_joint_product(*heads(), call.__name__, joined, call)


def test_a_weight_that_is_trained_later_is_plain_again(joined):
    model, plain = heads()
    x = rows()
    with products_add(Arena(model)):
        for module in (model, plain):
            module.w_k.weight.requires_grad_(True)
            module(x).sin().sum().backward()
        close(model.w_k.weight.grad, plain.w_k.weight.grad, "gradient of a base weight")
    assert not joined


# ---- the frozen weights ----


def storages(model):
    return {getattr(model, name).weight.untyped_storage().data_ptr() for name in NAMES}


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_frozen_weights_lie_side_by_side_and_keep_every_bit(device):
    model, plain = heads(device)
    wanted, parameters = plain.state_dict(), dict(model.named_parameters())

    def unchanged(what):
        assert dict(model.named_parameters()).keys() == parameters.keys()
        for name, p in model.named_parameters():
            assert p is parameters[name], f"{what}: {name} is another parameter"
        for name, t in model.state_dict().items():
            same(t, wanted[name], f"{what}: {name}")

    with products_add(Arena(model)):
        unchanged("in the product")
        joint = fused_forward(model.w_q).joint
        assert joint.grad is None and joint.weight.shape == (45, 24)
        v, k, q = (getattr(model, name).weight for name in reversed(NAMES))
        addresses = [t.data_ptr() for t in joint.weight.split([15, 10, 20])]
        assert [t.data_ptr() for t in (v, k, q)] == addresses
        assert len(storages(model)) == 3, "each parameter has a storage of its own, as before"
        twin = copy.deepcopy(model)
        assert not any(map(fused_forward, twin.modules()))
        with torch.no_grad():
            twin.w_k.weight.zero_()
        unchanged("after a copy was written to")
        with torch.no_grad():
            model.w_k.weight.zero_()
            assert not joint.weight[15:25].any(), "the product reads what a parameter holds"
            model.load_state_dict(wanted)
        unchanged("loaded")
    unchanged("after close()")
    assert not any(map(fused_forward, model.modules()))
    # A second time.
    with products_add(Arena(heads(device)[0])):
        pass


def test_weights_in_one_memory_stay_in_it(joined):
    for tie in ("one group", "two groups"):
        torch.manual_seed(0)
        model = nn.ModuleList(Heads() for _ in range(2))
        model.requires_grad_(False)
        if tie == "one group":
            for part in model:
                part.w_v.weight = nn.Parameter(part.w_q.weight.data[:15], requires_grad=False)
        else:
            model[1].w_k.weight = model[0].w_k.weight
        model.register_parameter("trained", nn.Parameter(torch.ones(24)))
        want = [part(rows()) for part in model]
        with products_add(Arena(model)):
            for part, y in zip(model, want):
                got = part(rows() * model.trained)
                close(got, y, tie)
                got.sum().backward()
        assert len(joined) == (tie == "two groups")


def test_a_frozen_weight_that_was_moved_is_an_error_with_a_way_out():
    model, _ = heads()
    arena = Arena(model)
    adding = Products(arena)
    model.w_k.weight.data = model.w_k.weight.data.clone()
    with pytest.raises(ArgumentError, match="a frozen weight no longer lies where"):
        adding.begin_backward()
    adding.close()
    with products_add(arena):
        model(rows()).sum().backward()


def test_merging_saving_and_loading_are_as_before(joined, tmp_path):
    model, plain = adapted()
    x = tokens()
    with products_add(Arena(model)):
        ga.save_lora(model, tmp_path / "joint")
        ga.save_lora(plain, tmp_path / "plain")
        # The order of a file's metadata is not fixed.
        saved, wanted = (load_file(tmp_path / kind / WEIGHTS) for kind in ("joint", "plain"))
        assert saved.keys() == wanted.keys() and len(saved) == 8
        for name, t in wanted.items():
            same(saved[name], t, name)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        first = model(x)
        count = len(joined)
        for module in (model, plain):
            ga.merge_lora(module).eval()
        same(model(x).detach(), plain(x).detach(), "merged, the base layers alone")
        with pytest.raises(ArgumentError, match="was called in training mode"):
            model.train()(x)
        assert len(joined) == count
        for module in (model, plain):
            ga.training.unmerge_lora(module).train()
        for name, t in model.state_dict().items():
            same(t, before[name], name)
        same(model(x).detach(), first.detach(), "unmerged")
        with torch.no_grad():
            model.blocks[0].w_q.lora_B.weight.zero_()
        ga.load_lora(model, tmp_path / "plain")
        same(model(x).detach(), first.detach(), "loaded")


# ---- torch.compile ----


@pytest.mark.slow
@needs_a_cpp_compiler
@pytest.mark.parametrize(
    "device, targets",
    [
        ("cpu", ("w_q", "w_v")),
        ("simt", ALL),
        pytest.param("cuda", ("w_q", "w_v"), marks=pytest.mark.gpu),
        pytest.param("cuda", ALL, marks=pytest.mark.gpu),
    ],
    indirect=["device"],
)
def test_compiled_whole_it_has_the_sums_of_eager_and_copies_nothing(device, targets):
    """Gate and up are one product, too."""
    missed = torch._dynamo.utils.ReinplaceCounters
    model, _ = adapted(device, targets=targets, layers=1, also=BLOCK_NORMS)
    results = []
    torch._dynamo.reset()
    missed.clear()
    try:
        for compiled in (False, True):
            module = copy.deepcopy(model)
            arena = Arena(module)
            with products_add(arena):
                if compiled:
                    module.compile(dynamic=False, fullgraph=True)
                objective(module(tokens(device, 1))).backward()
                with torch.profiler.profile(record_shapes=True) as profile:
                    y = module(tokens(device, 2))
                objective(y).backward()
                results.append((y.detach(), arena.grads.clone()))
    finally:
        torch._dynamo.reset()
    assert missed.get_total_missed() == 0
    events = [(event.name, event.input_shapes) for event in profile.events()]
    operations = [name for name, _ in events].count("gpuaccel::lora_linears")
    products = [shapes[:2] for name, shapes in events if name == "aten::mm"]
    gate_and_up = products.count([[3 * T, 64], [64, 2 * 96]])
    # Inside the operation the product is an aten::mm, too.
    assert operations == (2 if "up" in targets else 1) and gate_and_up == 1
    for what, want, got in zip(("logits", "sums"), *results, strict=True):
        close(got, want, what)


@needs_a_cpp_compiler
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_compiled_the_sums_of_the_factors_are_bit_identical_to_those_of_eager(device, launches):
    """And some factors alone, as in a backward for some inputs."""
    torch.manual_seed(0)
    model = ga.apply_lora(Wide().to(device), rank=4, alpha=6, seed=0)
    for layer in (model.w_q, model.w_v):
        nn.init.normal_(layer.lora_B.weight)
    x, dy = rows(device), rows(device, (3, 5, 80)).detach()
    results = []
    torch._dynamo.reset()
    try:
        for compiled in (False, True):
            module = copy.deepcopy(model)
            arena = Arena(module)
            with products_add(arena):
                if compiled:
                    module.compile(dynamic=False, fullgraph=True)
                for some in (None, [module.w_q.lora_B.weight, module.w_v.lora_A.weight]):
                    module(x).backward(dy, inputs=some)
                    results.append({name: t.clone() for name, t in sums(arena).items()})
    finally:
        torch._dynamo.reset()
    both, more = results[:2], results[2:]
    for eager, compiled in zip(both, more, strict=True):
        for name, t in eager.items():
            same(compiled[name], t, name)
    assert all(t.any() for t in both[0].values())
    assert launches == ([4, 2] * 2 if ga.backend().name != "torch" else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_operations(dtype):
    def random(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)

    bs, starts, scalings = [random(4, 2), random(3, 1)], [0, 5], [2.0, 0.5]
    weight = random(9, 6)
    torch.library.opcheck(
        torch.ops.gpuaccel.lora_linears.default,
        (random(2, 5, 6), weight, random(2, 5, 3), bs, starts, scalings),
    )
    torch.library.opcheck(
        torch.ops.gpuaccel.lora_linears_backward.default,
        (random(2, 5, 9), weight, random(3, 6), bs, starts, scalings),
    )
    accs = [random(2, 6).float(), random(4, 2).float()]
    torch.library.opcheck(
        torch.ops.gpuaccel.add_lora_gradients_.default,
        (accs, [random(2, 5, 2), random(2, 5, 4)], [random(2, 5, 6), random(2, 5, 2)], [1.0, 0.5]),
    )
