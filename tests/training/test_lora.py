"""LoRA: only the factors are trained, unmerging is bit-identical, and the files are PEFT's."""

import contextlib
import copy
import itertools
import json
import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import differ, products_add, same
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

# Nothing is downloaded. Before transformers and peft are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from gpuaccel.errors import ArgumentError, CheckpointError  # noqa: E402
from gpuaccel.nn import fused_forward  # noqa: E402
from gpuaccel.nn.lora import LoRALinear, frozen_state_dict  # noqa: E402
from gpuaccel.optim.arena import Arena  # noqa: E402
from gpuaccel.training import lora_files  # noqa: E402
from gpuaccel.training.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from gpuaccel.training.lora import (  # noqa: E402
    BLOCK_NORMS,
    apply_lora,
    merge_lora,
    modules_trained_whole,
    remove_lora,
    unmerge_lora,
)
from gpuaccel.training.lora_files import (  # noqa: E402
    CONFIG,
    PREFIX,
    WEIGHTS,
    load_lora,
    save_lora,
)
from gpuaccel.training.models import Transformer, generate, preset  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing"),
]
KINDS = ["ours", "llama", "gpt2"]
TARGETS = {"ours": ("w_q", "w_v"), "llama": ("q_proj", "v_proj"), "gpt2": ("c_attn",)}
ALL = ("w_q", "w_k", "w_v", "w_o", "gate", "up", "down")
NORMS = {
    "ours": ("input_norm", "post_attn_norm"),
    "llama": ("input_layernorm", "post_attention_layernorm"),
    "gpt2": ("ln_1", "ln_2"),
}
V = 61


def build(kind="ours", dtype=torch.float32, seed=0, **changes):
    """A small model of two layers; a seed gives the same weights each time."""
    torch.manual_seed(seed)
    if kind == "ours":
        sizes = dict(layers=2, vocab=V, hidden=32, head_dim=8, intermediate=48, T=32)
        return Transformer(preset("tiny", **{**sizes, **changes})).to(dtype)
    transformers = pytest.importorskip(
        "transformers", reason="transformers, of the extra `test`, is not installed"
    )
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=V,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=1,
            **changes,
        )
        return transformers.LlamaForCausalLM(config).to(dtype)
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=1,
        **changes,
    )
    return transformers.GPT2LMHeadModel(config).to(dtype)


def peft_or_skip():
    return pytest.importorskip("peft", reason="peft, of the extra `test`, is not installed")


def tokens(rows=3, T=10, seed=1):
    return torch.randint(0, V, (rows, T), generator=torch.Generator().manual_seed(seed))


def logits(model, x):
    out = model(x)
    return getattr(out, "logits", out)


def loss_of(model, x):
    return F.cross_entropy(logits(model, x)[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())


def layers(model):
    return {path: part for path, part in model.named_modules() if isinstance(part, LoRALinear)}


def learned(model, scale=0.1, seed=3):
    """Factors as after some training: B is no longer zero, modules in `also` have other values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "lora_A" not in name:
                p.add_(torch.randn(p.shape, generator=generator).to(p) * scale)
    return model


def snapshot(model):
    """(parameters, modules): all that a failed call must leave as it is."""
    parameters = {
        name: (p.clone(), p.requires_grad, p.data_ptr())
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    modules = {
        name: (id(part), type(part), part.training, sorted(vars(part)))
        for name, part in model.named_modules()
    }
    return parameters, modules


def assert_unchanged(model, before):
    parameters, modules = snapshot(model)
    assert modules == before[1], "a module was replaced or marked"
    assert parameters.keys() == before[0].keys()
    for name, (value, *rest) in parameters.items():
        old_value, *old_rest = before[0][name]
        assert rest == old_rest and torch.equal(value, old_value), f"{name} changed"


def trainable(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


# ---- what is applied -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_at_first_the_output_is_that_of_the_base_model(kind, dtype):
    model, x = build(kind, dtype), tokens()
    expected = logits(model, x)
    assert apply_lora(model, targets=TARGETS[kind], seed=0) is model
    lora_layers = layers(model)
    assert len(lora_layers) == 2 * len(TARGETS[kind])
    assert all(path.endswith(TARGETS[kind]) for path in lora_layers)
    assert torch.equal(logits(model, x), expected)
    with torch.no_grad():
        next(iter(lora_layers.values())).lora_B.weight.fill_(0.5)
    assert not torch.equal(logits(model, x), expected), "the factors are not in the forward pass"


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_factors_are_trainable_and_start_as_pefts(kind):
    model = build(kind)
    shapes = {
        name: part.weight.shape
        for name, part in model.named_modules()
        if name.endswith(TARGETS[kind])
    }
    apply_lora(model, rank=4, targets=TARGETS[kind])
    assert trainable(model) == {f"{path}.lora_{x}.weight" for path in shapes for x in "AB"}
    for path, layer in layers(model).items():
        # Conv1D's weight is (in, out).
        columns, rows = shapes[path] if kind == "gpt2" else reversed(shapes[path])
        assert (layer.in_features, layer.out_features) == (columns, rows)
        a, b = layer.lora_A.weight, layer.lora_B.weight
        assert a.shape == (4, columns) and b.shape == (rows, 4) and not b.any()
        bound = 1 / math.sqrt(columns)
        assert 0.8 * bound < a.abs().max() <= bound
        assert abs(a.mean()) < 0.2 * bound and a.std() > 0.4 * bound


def test_the_base_weight_is_visible_but_registered_once():
    model = build()
    names = [name for name, _ in model.named_parameters()]
    apply_lora(model, targets=("w_q",))
    layer = model.blocks[0].w_q
    assert layer.weight is layer.base_layer.weight and layer.bias is None
    assert (layer.in_features, layer.out_features) == (32, 32)
    now = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(now) == len(set(now)) == len(names) + 4
    assert {name.replace(".base_layer", "") for name in now if "lora_" not in name} == set(names)
    assert set(model.state_dict()) == set(now)


def test_a_seed_gives_the_same_factors_in_every_dtype_and_leaves_torchs_random_numbers():
    def factor(dtype, seed):
        model = build(dtype=dtype)
        state = torch.get_rng_state()
        apply_lora(model, targets=("w_q",), seed=seed)
        assert torch.equal(torch.get_rng_state(), state) == (seed is not None)
        return model.blocks[1].w_q.lora_A.weight

    fp32, bf16 = factor(torch.float32, seed=5), factor(torch.bfloat16, seed=5)
    assert bf16.dtype == torch.bfloat16 and torch.equal(fp32.bfloat16(), bf16)
    assert not torch.equal(fp32, factor(torch.float32, seed=6))
    assert not torch.equal(fp32, factor(torch.float32, seed=None))


@pytest.mark.parametrize("training", [True, False])
def test_the_layers_take_the_mode_of_what_they_wrap(training):
    model = build().train(training)
    apply_lora(model, dropout=0.5, targets=("w_q",))
    assert all(part.training == training for part in model.modules())


def test_fp32_factors_beside_a_bf16_base():
    model, x = build(dtype=torch.bfloat16), tokens()
    expected = logits(model, x)
    apply_lora(model, targets=("w_q", "w_v"), dtype=torch.float32)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert torch.equal(logits(model, x), expected) and logits(model, x).dtype == torch.bfloat16
    learned(model)
    loss_of(model, x).backward()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.any()
        for p in model.parameters()
        if p.requires_grad
    )


def test_a_target_may_be_a_whole_path_the_end_of_one_or_a_single_string():
    def names(**targets):
        return " ".join(layers(apply_lora(build(), **targets)))

    assert names(targets=("blocks.1.w_q",)) == "blocks.1.w_q"
    assert names(targets="0.gate") == "blocks.0.gate"
    assert names(targets=("w_q", "lm_head")) == "blocks.0.w_q blocks.1.w_q lm_head"
    assert names() == "blocks.0.w_q blocks.0.w_v blocks.1.w_q blocks.1.w_v"


def test_one_module_under_two_names_gets_one_pair_of_factors():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(6, 6))
            self.again = self.first[0]

        def forward(self, x):
            return self.again(self.first(x))

    model = apply_lora(Twice(), rank=2, targets=("0",))
    assert model.again is model.first[0] and isinstance(model.again, LoRALinear)
    remove_lora(model)
    assert model.again is model.first[0] and type(model.again) is nn.Linear


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("conv1d", [False, True], ids=["Linear", "Conv1D"])
def test_gradients_equal_the_formula_in_float64(conv1d, bias):
    torch.manual_seed(0)
    base = nn.Linear(24, 16, bias=bias)
    if conv1d:
        base = pytest.importorskip(
            "transformers", reason="Conv1D is of transformers"
        ).pytorch_utils.Conv1D(16, 24)
    layer = learned(LoRALinear(base, 4, 6).requires_grad_(True))
    x, dy = torch.randn(5, 7, 24, requires_grad=True), torch.randn(5, 7, 16)
    y = layer(x)
    y.backward(dy)
    a = layer.lora_A.weight.detach().double()
    b = layer.lora_B.weight.detach().double()
    w = (layer.weight.t() if conv1d else layer.weight).detach().double()
    rows = x.detach().double().flatten(0, 1)
    d = dy.double().flatten(0, 1)
    s = 6 / 4
    expected = rows @ w.t() + s * (rows @ a.t()) @ b.t()
    if layer.bias is not None:
        expected += layer.bias.detach().double()
    for name, actual, exact in (
        ("y", y.flatten(0, 1), expected),
        ("dB", layer.lora_B.weight.grad, s * d.t() @ (rows @ a.t())),
        ("dA", layer.lora_A.weight.grad, s * (d @ b).t() @ rows),
        ("dx", x.grad.flatten(0, 1), d @ w + s * (d @ b) @ a),
    ):
        torch.testing.assert_close(
            actual.double(), exact, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_dropout_is_of_the_factors_input_and_takes_torchs_random_numbers():
    layer = learned(LoRALinear(nn.Linear(24, 16), 4, 8, dropout=0.5))
    x = torch.randn(100, 24)
    torch.manual_seed(4)
    y = layer(x)
    torch.manual_seed(4)
    expected = layer.base_layer(x) + layer.lora_B(layer.lora_A(F.dropout(x, 0.5)) * 2)
    assert torch.equal(y, expected) and not torch.equal(y, layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_the_factors_and_no_bit_of_the_frozen_weights(kind, dtype):
    model = build(kind, dtype)
    x = tokens(8)
    apply_lora(model, rank=4, dropout=0.05, targets=TARGETS[kind], also=NORMS[kind], seed=0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    arena = Arena(model)
    opt = torch.optim.AdamW(arena.parameter_groups(weight_decay=0.1), lr=2e-2)
    losses = []
    for _ in range(20):
        loss = loss_of(model, x)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2, losses
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (not p.requires_grad), (
            f"{name}: requires_grad {p.requires_grad}"
        )
        assert p.requires_grad or p.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_autograd_and_products_add_the_same_gradients(dtype):
    sums = []
    for adds in (contextlib.nullcontext, products_add):
        model = learned(
            apply_lora(build(dtype=dtype), targets=("w_q", "w_v", "down"), also=BLOCK_NORMS, seed=0)
        )
        arena = Arena(model)
        with adds(arena):
            fused = {name for name, part in model.named_modules() if fused_forward(part)}
            factors = {f"{path}.lora_{f}" for path in layers(model) for f in "AB"}
            # Frozen layers of one input, with LoRA or without, are one product.
            frozen = ("w_q", "w_k", "w_v", "gate", "up")
            joint = {f"blocks.{k}.{name}" for k in range(2) for name in frozen}
            assert fused == (factors | joint if adds is products_add else set())
            for seed in (1, 2, 3):
                loss_of(model, tokens(seed=seed)).backward()
            assert all(view.any() for view in arena.gradients.views), "a factor got no gradient"
            sums.append(arena.grads.clone())
        assert type(model.blocks[0].w_q.lora_A) is nn.Linear
    tolerance = dict(rtol=1e-5, atol=1e-7) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(*sums, **tolerance)


def test_a_block_of_the_arena_holds_the_six_tensors_of_the_reference_system():
    for kind, norms in (("ours", NORMS["ours"]), ("llama", NORMS["llama"])):
        model = apply_lora(build(kind), also=BLOCK_NORMS)
        q, v = TARGETS[kind] if kind == "ours" else ("self_attn.q_proj", "self_attn.v_proj")
        arena = Arena(model)
        assert len(arena.blocks) == 2
        for block in arena.blocks:
            names = {
                s.name.removeprefix(block.name + ".").removesuffix(".weight")
                for s in arena.segments[block.first : block.last]
            }
            assert names == {f"{q}.lora_A", f"{q}.lora_B", f"{v}.lora_A", f"{v}.lora_B", *norms}
        arena.release()


def test_seven_targets_make_fourteen_tensors_per_block():
    arena = Arena(apply_lora(build(), targets=ALL))
    assert [block.last - block.first for block in arena.blocks] == [14, 14]


def test_autocast():
    model, x = build(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(model, x)
        apply_lora(model, targets=ALL, seed=0)
        assert torch.equal(logits(model, x), expected)
    # Outside autocast, which keeps the weights that it has cast.
    learned(model)
    with torch.autocast("cpu", torch.bfloat16):
        actual = logits(model, x)
        assert actual.dtype == expected.dtype == torch.bfloat16
        assert not torch.equal(actual, expected)
        loss = loss_of(model, x)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(grad.any() and grad.isfinite().all() for grad in grads)


@pytest.mark.slow
def test_compile_takes_the_whole_graph_and_sees_merging():
    model = learned(apply_lora(build(layers=1), targets=ALL, also=BLOCK_NORMS, seed=0))
    x = tokens()
    expected = logits(model, x)
    loss_of(model, x).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(logits(compiled, x), expected)
    loss_of(compiled, x).backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-5, atol=1e-7)
    model.eval()
    merge_lora(compiled)  # the wrapper stands for the model
    with torch.no_grad():
        assert torch.equal(logits(compiled, x), logits(model, x))
        assert not torch.equal(logits(compiled, x), expected)
    unmerge_lora(compiled)
    assert torch.equal(logits(compiled, x), expected)


def test_a_compiled_models_adapter_has_plain_names(tmp_path):
    model = learned(apply_lora(build(), seed=0))
    save_lora(torch.compile(model, backend="eager"), tmp_path)
    other = load_lora(torch.compile(build(), backend="eager"), tmp_path)
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))


def test_gradient_checkpointing_gives_the_same_gradients():
    model, x = learned(apply_lora(build(), targets=ALL, dropout=0.1, seed=0)), tokens()

    def gradients(checkpointing):
        model.zero_grad()
        torch.manual_seed(0)
        h = model.embedding(x)
        for block in model.blocks:
            if checkpointing:
                h = checkpoint(block, h, model.rope, use_reentrant=False)
            else:
                h = block(h, model.rope)
        h.square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert len(plain) == 28 and plain.keys() == checkpointed.keys()
    for name, grad in plain.items():
        same(grad, checkpointed[name], name)


def test_gradient_checkpointing_of_transformers():
    model, x = learned(apply_lora(build("llama"), seed=0)), tokens()
    loss_of(model, x).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    loss_of(model, x).backward()
    for name, grad in grads.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_merged_or_not(kind):
    model = learned(apply_lora(build(kind), targets=TARGETS[kind], seed=0), 0.5).eval()
    x = tokens(2, 4)

    def generated():
        if kind == "ours":
            return generate(model, x, 12, temperature=0)
        lengths = dict(max_new_tokens=12, min_new_tokens=12)
        mask = torch.ones_like(x)
        return model.generate(x, attention_mask=mask, do_sample=False, **lengths)

    text = generated()
    merge_lora(model)
    assert text.shape == (2, 16) and torch.equal(text, generated())


# ---- merging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_exact_and_unmerging_is_bit_identical(kind, dtype):
    model = apply_lora(build(kind, dtype), rank=4, alpha=6, targets=TARGETS[kind], seed=0)
    learned(model).eval()
    x = tokens()
    frozen = {path: layer.weight.clone() for path, layer in layers(model).items()}
    places = {path: layer.weight.data_ptr() for path, layer in layers(model).items()}
    state = copy.deepcopy(model.state_dict())
    y = logits(model, x)
    assert merge_lora(model) is model
    half_ulp = 2**-24 if dtype == torch.float32 else 2**-8
    for path, layer in layers(model).items():
        product = 6 / 4 * layer.lora_B.weight.double() @ layer.lora_A.weight.double()
        exact = frozen[path].double() + (product.t() if kind == "gpt2" else product)
        off = (layer.weight.double() - exact).abs()
        # One rounding to the weight's dtype, and what fp32 loses in the product of rank 4.
        assert (off <= 1.01 * half_ulp * exact.abs() + 3e-7).all(), f"{path}: {off.max():.3g}"
        assert not torch.equal(layer.weight, frozen[path])
        assert layer.weight.data_ptr() == places[path]
    # Of logits up to about 1: in bf16 a few roundings per layer.
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    assert (logits(model, x) - y).abs().max() <= tolerance, differ(logits(model, x), y)
    # What a checkpoint would hold does not depend on merging.
    held = frozen_state_dict(model)
    assert held.keys() == state.keys()
    for name, t in held.items():
        assert torch.equal(t, state[name]), name
    assert unmerge_lora(model) is model
    for path, layer in layers(model).items():
        assert torch.equal(layer.weight, frozen[path]) and layer.frozen_weight is None
        assert layer.weight.data_ptr() == places[path]
    assert torch.equal(logits(model, x), y)


def test_merging_twice_and_unmerging_what_is_not_merged_are_errors():
    model = learned(apply_lora(build(), seed=0))
    with pytest.raises(ArgumentError, match="blocks.0.w_q is not merged"):
        unmerge_lora(model)
    merge_lora(model)
    before = snapshot(model)
    with pytest.raises(ArgumentError, match="blocks.0.w_q is merged already"):
        merge_lora(model)
    assert_unchanged(model, before)
    for function in (merge_lora, unmerge_lora, remove_lora):
        with pytest.raises(ArgumentError, match="Transformer has no LoRA layer"):
            function(build())


def test_a_layer_is_merged_once_and_removal_looks_at_each_layer():
    base = nn.Linear(6, 4)
    layer = learned(LoRALinear(base.requires_grad_(False), rank=2, alpha=4))
    frozen = layer.weight.clone()
    with pytest.raises(ArgumentError, match="the LoRA layer is not merged"):
        layer.unmerge()
    layer.merge()
    merged = layer.weight.clone()
    with pytest.raises(ArgumentError, match="the LoRA layer is merged already"):
        layer.merge()
    assert torch.equal(layer.weight, merged)
    layer.unmerge()
    assert torch.equal(layer.weight, frozen)
    x = tokens()
    for merge in (True, False):
        model = learned(apply_lora(build().eval(), seed=0))
        want = logits(model, x) if merge else logits(build().eval(), x)
        model.blocks[0].w_q.merge()  # the first layer
        torch.testing.assert_close(logits(remove_lora(model, merge=merge), x), want)


def test_a_linear_layer_with_a_forward_of_its_own_is_not_merged():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Same(nn.Linear):
        pass

    model = nn.Sequential(Same(4, 4), Twice(4, 4))
    model = learned(apply_lora(model, rank=2, targets=("0", "1"), seed=0)).eval()
    before = snapshot(model)
    for function in (merge_lora, lambda model: remove_lora(model, merge=True)):
        with pytest.raises(ArgumentError, match="^1 is around a .*Twice, which has a forward of"):
            function(model)
        assert_unchanged(model, before)
    y = model[0](torch.ones(2, 4))
    model[0].merge()
    torch.testing.assert_close(model[0](torch.ones(2, 4)), y)
    remove_lora(model, merge=False)


def test_a_merged_model_refuses_to_train_and_evaluates():
    model, x = merge_lora(learned(apply_lora(build(), seed=0))), tokens()
    with pytest.raises(ArgumentError, match="unmerge_lora"):
        model(x)
    with torch.no_grad():
        y = model(x)
    assert torch.equal(model.eval()(x), y)


def test_a_merge_that_fails_leaves_no_half_merged_model(monkeypatch):
    model = learned(apply_lora(build(), seed=0))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    merge = LoRALinear.merge
    calls = []

    def merge_or_fail(layer):
        calls.append(layer)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("out of memory, on purpose")
        merge(layer)

    monkeypatch.setattr(LoRALinear, "merge", merge_or_fail)
    with pytest.raises(torch.OutOfMemoryError):
        merge_lora(model)
    assert not any(layer.merged for layer in layers(model).values())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_states_are_loaded_into_a_merged_model_as_into_any():
    source = learned(apply_lora(build(), seed=0))
    model = merge_lora(learned(apply_lora(build(seed=1), seed=1), seed=4))
    model.load_state_dict(source.state_dict())
    assert not model.blocks[0].w_q.merged
    assert torch.equal(logits(model, tokens()), logits(source, tokens()))


def test_copies_are_independent_merged_or_not():
    model, x = learned(apply_lora(build(), also=BLOCK_NORMS, seed=0)).eval(), tokens()
    y = logits(model, x)
    twin = copy.deepcopy(merge_lora(model))
    unmerge_lora(twin)
    assert torch.equal(logits(twin, x), y) and model.blocks[0].w_q.merged
    norms = {f"blocks.{i}.{n}" for i in (0, 1) for n in NORMS["ours"]}
    assert set(modules_trained_whole(twin)) == norms
    remove_lora(twin)
    assert layers(model) and not layers(twin)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_removing_gives_plain_modules_back(kind, merged):
    model, x = build(kind).eval(), tokens()
    kinds = {name: type(part) for name, part in model.named_modules()}
    before, y = copy.deepcopy(model.state_dict()), logits(model, x)
    remove_lora(apply_lora(model, targets=TARGETS[kind], also=NORMS[kind]))
    learned(apply_lora(model, targets=TARGETS[kind], seed=0))
    assert not modules_trained_whole(model), "a module would still be saved with the adapter"
    z = logits(model, x)
    if merged:
        merge_lora(model)
    assert remove_lora(model, merge=False if merged else None) is model
    assert {name: type(part) for name, part in model.named_modules()} == kinds
    assert torch.equal(logits(model, x), y)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()), (
        "the frozen weights are not the old ones"
    )
    learned(apply_lora(model, targets=TARGETS[kind], seed=0))  # can be applied again
    if merged:
        merge_lora(model)
    remove_lora(model, merge=None if merged else True)
    assert {name: type(part) for name, part in model.named_modules()} == kinds
    torch.testing.assert_close(logits(model, x), z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("actions", [*itertools.product(["merge", "unmerge"], repeat=3)])
def test_merges_and_removal_end_as_pefts(actions):
    peft = peft_or_skip()
    model, x = learned(apply_lora(build("llama"), rank=4, alpha=8, seed=0)).eval(), tokens()
    factors = {name: p for name, p in model.named_parameters() if "lora_" in name}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    theirs = peft.get_peft_model(build("llama"), config).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_" in name:
                p.copy_(factors[name.removeprefix("base_model.model.").replace(".default", "")])
    merged = False
    for action in actions:
        if (action == "merge") != merged:
            merge_lora(model) if action == "merge" else unmerge_lora(model)
            theirs.merge_adapter() if action == "merge" else theirs.unmerge_adapter()
            merged = not merged
        torch.testing.assert_close(logits(model, x), logits(theirs, x), rtol=1e-4, atol=1e-5)
    remove_lora(model)
    plain = theirs.unload()
    assert model.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(logits(model, x), logits(plain, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_save_pretrained_keeps_the_merge_and_does_not_double_it(kind, tmp_path):
    model, x = learned(apply_lora(build(kind), targets=TARGETS[kind], seed=0)).eval(), tokens()
    frozen, y = logits(build(kind).eval(), x), logits(merge_lora(model), x)
    assert not torch.allclose(y, frozen, atol=1e-3)
    model.save_pretrained(tmp_path / "merged")
    plain = type(model).from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(logits(plain, x), y)
    # A model with LoRA gets the frozen weights and the factors.
    twin = apply_lora(build(kind, seed=1), targets=TARGETS[kind]).eval()
    twin.load_state_dict(model.state_dict())
    assert not any(layer.merged for layer in layers(twin).values())
    torch.testing.assert_close(logits(twin, x), y, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(merge_lora(twin), x), y)
    remove_lora(model).save_pretrained(tmp_path / "removed")
    plain = type(model).from_pretrained(tmp_path / "removed").eval()
    assert torch.equal(logits(plain, x), y)


def test_a_checkpoint_of_a_merged_model_is_one_of_the_model_with_lora(tmp_path):
    model, x = learned(apply_lora(build(), seed=0)).eval(), tokens()
    y = logits(model, x)
    save_checkpoint(tmp_path / "one.safetensors", model=merge_lora(model))
    for twin in (apply_lora(build(seed=1)), merge_lora(apply_lora(build(seed=1)))):
        load_checkpoint(tmp_path / "one.safetensors", model=twin.eval())
        assert torch.equal(logits(twin, x), y)


# ---- errors --------------------------------------------------------------------------------------

ERRORS = {
    "rank 0": (dict(rank=0), "rank is 0; expected"),
    "rank 1.5": (dict(rank=1.5), "rank is 1.5; expected"),
    "rank too large": (
        dict(rank=17),
        "rank is 17, more than 16, the smaller side of target blocks.0.w_v",
    ),
    "dropout 1": (dict(dropout=1.0), "dropout is 1.0; expected"),
    "dropout -0.1": (dict(dropout=-0.1), "dropout is -0.1; expected"),
    "dropout nan": (dict(dropout=float("nan")), "dropout is nan"),
    "alpha 0": (dict(alpha=0), "alpha is 0; expected"),
    "rank true": (dict(rank=True), "rank is True; expected a whole number"),
    "seed": (dict(seed=1.5), "seed is 1.5; expected a whole number"),
    "alpha inf": (dict(alpha=float("inf")), "alpha is inf"),
    "dtype": (dict(dtype=torch.int8), "dtype is torch.int8"),
    "no match": (
        dict(targets=("query",)),
        "targets: no module of the model is called query; expected names among its linear layers: "
        "w_q, w_k, w_v, w_o, gate, up, down, lm_head",
    ),
    "one misspelt": (dict(targets=("w_q", "w_vv")), "no module of the model is called w_vv"),
    "half a name": (dict(targets=("_q",)), "no module of the model is called _q"),
    "no target": (dict(targets=()), "targets is empty"),
    "a norm": (
        dict(targets=("w_q", "input_norm")),
        "target blocks.0.input_norm is a torch.nn.modules.normalization.RMSNorm; expected",
    ),
    "an embedding": (
        dict(targets=("embedding",)),
        "target embedding is a torch.nn.modules.sparse.Embedding",
    ),
    "a block": (dict(targets=("blocks.0",)), "target blocks.0 is a gpuaccel.training.models.Block"),
    "also matches nothing": (
        dict(also=("norm",)),
        "also: no module of the model is called norm; expected names among its modules with "
        "parameters: embedding, input_norm",
    ),
    "also and target": (dict(also=("w_q",)), "blocks.0.w_q is named by both targets and also"),
    "also around a target": (
        dict(also=("blocks.1",)),
        "blocks.1.w_q is named by both targets and also",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_wrong_argument_is_named_and_changes_nothing(case):
    arguments, message = ERRORS[case]
    model = build(kv_heads=2)
    before = snapshot(model)
    with pytest.raises(ArgumentError) as error:
        apply_lora(model, **{"targets": ("w_q", "w_v"), **arguments})
    assert message in str(error.value)
    assert_unchanged(model, before)


def test_a_layer_checks_its_settings():
    for arguments, message in (
        ((0, 1), "rank is 0"),
        ((2, -1), "alpha is -1"),
        ((2, 1, 1.0), "dro"),
    ):
        with pytest.raises(ArgumentError, match=message):
            LoRALinear(nn.Linear(4, 4), *arguments)


def test_default_targets_need_a_match_too():
    message = "is called w_q or w_v or q_proj or v_proj; .*c_attn, c_proj, c_fc, lm_head"
    with pytest.raises(ArgumentError, match=message):
        apply_lora(build("gpt2"))
    message = "also: no module of the model is called input_norm or .*ln_1"
    with pytest.raises(ArgumentError, match=message):
        apply_lora(build("gpt2"), targets="c_attn", also=BLOCK_NORMS)


def test_apply_and_remove_refuse_a_model_in_an_arena():
    model = build()
    arena, before = Arena(model), snapshot(model)
    with pytest.raises(ArgumentError, match="in an Arena; apply_lora comes before Arena"):
        apply_lora(model)
    with pytest.raises(ArgumentError, match="parameter input_norm.weight is in an Arena"):
        apply_lora(model.blocks[0])  # the arena is of the module around it
    assert_unchanged(model, before)
    arena.release()
    arena, before = Arena(apply_lora(model)), snapshot(model)
    with pytest.raises(ArgumentError, match="release"):
        remove_lora(model)
    assert_unchanged(model, before)
    arena.release()
    remove_lora(model)


def test_applying_twice_is_an_error():
    model = apply_lora(build(), targets=("w_q",))
    before = snapshot(model)
    with pytest.raises(ArgumentError, match="blocks.0.w_q is a LoRA layer already"):
        apply_lora(model, targets=("w_v",))
    assert_unchanged(model, before)


def test_odd_linear_layers_are_refused_by_name():
    attention = nn.MultiheadAttention(8, 2)
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    cases = (
        (attention, "0.out_proj", (), "reads its weight without calling it"),
        (nn.LazyLinear(4), "0", (), "expected an ordinary matrix"),
        (computed, "0", (), "computed, not a parameter"),
        (nn.Linear(4, 4), "0", "1", "also: 1 is a ReLU without parameters"),
    )
    for layer, target, also, message in cases:
        with pytest.raises(ArgumentError, match=message):
            apply_lora(nn.Sequential(layer, nn.ReLU()), rank=2, targets=target, also=also)


def test_tied_weights_are_refused_as_targets_and_kept_together(tmp_path):
    model = build(tied=True)
    before = snapshot(model)
    message = "target lm_head has a tied weight, embedding.weight and lm_head.weight"
    with pytest.raises(ArgumentError, match=message):
        apply_lora(model, targets=("w_q", "lm_head"))
    message = "also: embedding has a weight that is tied with lm_head.weight"
    with pytest.raises(ArgumentError, match=message):
        apply_lora(model, also=("embedding",))
    assert_unchanged(model, before)
    learned(apply_lora(model, also=("embedding", "lm_head"), seed=0))
    save_lora(model, tmp_path)
    other = load_lora(build(tied=True), tmp_path)
    assert other.lm_head.weight is other.embedding.weight
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))
    tensors = load_file(tmp_path / WEIGHTS)
    tensors[PREFIX + "lm_head.weight"] += 1
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError, match="one tensor here"):
        load_lora(build(tied=True), tmp_path)


# ---- files ---------------------------------------------------------------------------------------


def contents(folder):
    """What the two files say: configuration, metadata, bytes of each tensor."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        tensors = {name: file.get_tensor(name).view(torch.uint8).tolist() for name in file.keys()}
        return (folder / CONFIG).read_text(), file.metadata(), tensors


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_is_the_same_model(kind, merged, tmp_path):
    settings = dict(rank=4, alpha=6, targets=TARGETS[kind], also=NORMS[kind])
    model = apply_lora(build(kind), dropout=0.1, seed=0, **settings)
    x = tokens()
    y = logits(learned(model).eval(), x)
    if merged:
        merge_lora(model)
    folder = tmp_path / "made" / "here"
    assert save_lora(model, folder) == folder
    assert sorted(file.name for file in folder.iterdir()) == [CONFIG, WEIGHTS]
    without_lora = load_lora(build(kind).eval(), folder)
    with_lora = apply_lora(build(kind), seed=9, **settings).eval()
    places = {name: p.data_ptr() for name, p in with_lora.named_parameters()}
    assert load_lora(with_lora, folder) is with_lora
    assert places == {name: p.data_ptr() for name, p in with_lora.named_parameters()}
    for other in (without_lora, with_lora):
        assert torch.equal(logits(other, x), y) and trainable(other) == trainable(model)
    layer = next(iter(layers(without_lora).values()))
    assert (layer.rank, layer.alpha, layer.lora_dropout.p) == (4, 6, 0.1)
    save_lora(without_lora, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)


def test_loading_into_an_arena_keeps_its_views_and_moves_its_masters(tmp_path):
    model, x = learned(apply_lora(build(dtype=torch.bfloat16), also=BLOCK_NORMS, seed=0)), tokens()
    save_lora(model, tmp_path)
    other = apply_lora(build(dtype=torch.bfloat16), also=BLOCK_NORMS, seed=1)
    arena = Arena(other)
    load_lora(other, tmp_path)
    arena.check()
    assert torch.equal(logits(other, x), logits(model, x))
    for name, master in arena.named_master().items():
        assert torch.equal(master, dict(model.named_parameters())[name].float()), name
    # A step copies the masters to the weights: the old masters would bring the old weights back.
    opt = torch.optim.AdamW(arena.parameters(), lr=0.0, weight_decay=0.0)
    with products_add(arena):
        loss_of(other, x).backward()
        opt.step()
    assert torch.equal(logits(other, x), logits(model, x))
    save_lora(other, tmp_path / "from the arena")
    assert contents(tmp_path / "from the arena") == contents(tmp_path)


def test_checkpoints_of_a_run_hold_the_adapter_too(tmp_path):
    def run():
        model = apply_lora(build(dtype=torch.bfloat16), also=BLOCK_NORMS, seed=0)
        arena = Arena(model)
        return model, arena, torch.optim.AdamW(arena.parameters(), lr=1e-2)

    def steps(model, arena, opt):
        with products_add(arena):
            for _ in range(3):
                loss_of(model, tokens()).backward()
                opt.step()
                opt.zero_grad()

    model, arena, opt = run()
    steps(model, arena, opt)
    path = tmp_path / "step-00000003.safetensors"
    save_checkpoint(path, model=model, optimizer=opt, arena=arena, step=3)
    resumed_model, resumed_arena, resumed_opt = run()
    load_checkpoint(path, model=resumed_model, optimizer=resumed_opt, arena=resumed_arena)
    steps(model, arena, opt)
    steps(resumed_model, resumed_arena, resumed_opt)
    assert torch.equal(arena.weights, resumed_arena.weights)


def test_names_in_the_configuration_mean_for_peft_what_they_meant_here(tmp_path):
    def config(model, **more):
        return json.loads((save_lora(model, tmp_path, **more) / CONFIG).read_text())

    def holds(config, **expected):
        assert {key: config[key] for key in expected} == expected

    model = apply_lora(build(), rank=4, alpha=6.5, dropout=0.25, targets=ALL, also=BLOCK_NORMS)
    holds(
        config(model),
        peft_type="LORA",
        r=4,
        lora_alpha=6.5,
        lora_dropout=0.25,
        bias="none",
        inference_mode=True,
        task_type=None,
        fan_in_fan_out=False,
        target_modules=sorted(ALL),
        modules_to_save=sorted(NORMS["ours"]),
    )
    model = apply_lora(build(), targets=("1.w_q", "w_v"))
    holds(config(model), target_modules=["blocks.1.w_q", "w_v"], modules_to_save=None)
    # PEFT matches modules_to_save by the bare end of a name: `norm` would be input_layernorm too.
    model = apply_lora(build("llama"), also=("norm",))
    holds(config(model), modules_to_save=["model.norm"])
    model = apply_lora(build("gpt2"), targets="c_attn")
    holds(
        config(model, base_model="gpt2", task_type="CAUSAL_LM"),
        fan_in_fan_out=True,
        base_model_name_or_path="gpt2",
        task_type="CAUSAL_LM",
        auto_mapping=None,
    )


CASES = [
    ("ours", ALL, ()),
    ("ours", ("w_q", "1.w_v"), NORMS["ours"]),
    ("llama", ("q_proj", "v_proj"), BLOCK_NORMS),
    ("llama", ("0.self_attn.q_proj",), ("norm",)),
    ("llama", ("q_proj", "lm_head"), ("embed_tokens",)),
    ("gpt2", ("c_attn",), ()),
    ("gpt2", ("c_attn", "c_fc"), ("ln_1", "ln_f")),
]


@pytest.mark.parametrize("kind, targets, also", CASES)
def test_peft_reads_ours_and_computes_bit_identical_outputs(kind, targets, also, tmp_path):
    peft = peft_or_skip()
    # alpha / rank is 2, with which scaling is exact.
    model = apply_lora(build(kind), 4, alpha=8, dropout=0.1, targets=targets, also=also, seed=0)
    learned(model).eval()
    x = tokens()
    save_lora(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(build(kind), tmp_path).eval()
    y = logits(theirs, x)
    same(y, logits(model, x))
    base = logits(build(kind).eval(), x)
    assert not torch.allclose(y, base, atol=1e-3), "the adapter does nothing"
    theirs.train()
    model.train()
    torch.manual_seed(5)
    y = logits(theirs, x)
    torch.manual_seed(5)
    same(y, logits(model, x), "with dropout")


@pytest.mark.parametrize(
    "kind, targets, also", [(k, t, a) for k, t, a in CASES if not {"1.w_v", "norm"} & {*t, *a}]
)
def test_we_read_pefts_and_write_it_back(kind, targets, also, tmp_path):
    peft = peft_or_skip()
    also = [name for name in also if name in NORMS[kind] or name not in BLOCK_NORMS]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        lora_dropout=0.1,
        target_modules=list(targets),
        modules_to_save=also or None,
    )
    theirs, x = learned(peft.get_peft_model(build(kind), config)).eval(), tokens()
    y = logits(theirs, x)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_lora(build(kind).eval(), tmp_path / "theirs")
    # Close, not equal: PEFT scales by 6 / 4 at another place.
    torch.testing.assert_close(logits(ours, x), y, rtol=1e-5, atol=1e-5)
    added_by_peft = re.compile(r"base_model\.model\.|\.modules_to_save|\.default")
    names = {added_by_peft.sub("", name) for name in trainable(theirs)}
    assert names == trainable(ours)
    save_lora(ours, tmp_path / "ours")
    our_tensors, their_tensors = (
        {n: t for n, t in load_file(tmp_path / name / WEIGHTS).items() if "base_layer" not in n}
        for name in ("ours", "theirs")
    )
    assert our_tensors.keys() == their_tensors.keys()
    for name, tensor in our_tensors.items():
        same(tensor, their_tensors[name], name)
    again = peft.PeftModel.from_pretrained(build(kind), tmp_path / "ours").eval()
    assert torch.equal(logits(again, x), y)
    our_config, their_config = (
        json.loads((tmp_path / name / CONFIG).read_text()) for name in ("ours", "theirs")
    )
    for key, value in our_config.items():
        other = their_config[key]
        if key in ("target_modules", "modules_to_save"):
            assert sorted(value or []) == sorted(other or []), key
        else:
            # Older versions of PEFT write "" where newer ones write null.
            assert (value or None) == (other or None), key


def test_pefts_fp32_factors_beside_a_bf16_model_stay_fp32(tmp_path):
    peft = peft_or_skip()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    theirs = learned(peft.get_peft_model(build("llama", torch.bfloat16), config)).eval()
    theirs.save_pretrained(tmp_path)
    ours, x = load_lora(build("llama", torch.bfloat16).eval(), tmp_path), tokens()
    assert ours.model.layers[0].self_attn.q_proj.lora_A.weight.dtype == torch.float32
    assert torch.equal(logits(ours, x), logits(theirs, x))
    with pytest.raises(CheckpointError, match="is torch.float32 .*expected torch.bfloat16"):
        load_lora(apply_lora(build("llama", torch.bfloat16), 4, 8, targets="q_proj"), tmp_path)


def rewrite(folder, change, keep=False):
    """Change the tensors of a file. keep: also the metadata that this package adds to PEFT's."""
    tensors = load_file(folder / WEIGHTS)
    with safe_open(folder / WEIGHTS, "pt") as file:
        metadata = file.metadata() if keep else {"format": "pt"}
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata)


def reconfigure(**values):
    def damage(folder):
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, **values}))

    return damage


def cut(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])


def flip(folder):
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-5] ^= 1
    (folder / WEIGHTS).write_bytes(data)


A = PREFIX + "blocks.0.w_q.lora_A.weight"
NORM = PREFIX + "blocks.1.input_norm.weight"
DAMAGE = {
    "cut short": (cut, "cannot be read as safetensors"),
    "one bit": (flip, "is damaged: its tensors have sha256"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "is not a file; expected an adapter"),
    "no configuration": (lambda f: (f / CONFIG).unlink(), CONFIG + " cannot be read"),
    "no JSON": (lambda f: (f / CONFIG).write_text('{"r": 4'), CONFIG + " cannot be read as JSON"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), "peft_type is 'list'"),
    "another method": (reconfigure(peft_type="IA3"), "peft_type is 'IA3'; expected 'LORA'"),
    "no rank": (reconfigure(r=None), "r is None; expected a number"),
    "another rank": (reconfigure(r=5), "was written with r = 4"),
    "another alpha": (reconfigure(lora_alpha=9), "was written with lora_alpha = 8"),
    "DoRA": (reconfigure(use_dora=True), "use_dora is True; expected plain LoRA"),
    "rsLoRA": (reconfigure(use_rslora=True), "use_rslora is True"),
    "ranks": (reconfigure(rank_pattern={"w_q": 2}), "rank_pattern is {'w_q': 2}"),
    "biases": (reconfigure(bias="all"), "bias is 'all'"),
    "PiSSA": (
        reconfigure(init_lora_weights="pissa"),
        "init_lora_weights is 'pissa', which changed the base weights",
    ),
    "a factor less": (lambda f: rewrite(f, lambda t: t.pop(A)), A),
    "a norm less": (lambda f: rewrite(f, lambda t: t.pop(NORM)), NORM),
    "a factor more": (
        lambda f: rewrite(f, lambda t: t.update({A.replace("w_q", "w_o"): t[A].clone()})),
        "blocks.0.w_o",
    ),
    "a weight more": (
        lambda f: rewrite(f, lambda t: t.update({PREFIX + "lm_head.weight": torch.zeros(3)})),
        "lm_head.weight",
    ),
    "another module": (
        lambda f: rewrite(f, lambda t: t.update({A.replace("w_q", "query"): t.pop(A)})),
        "query",
    ),
    "another shape": (
        lambda f: rewrite(f, lambda t: t.update({A: torch.zeros(4, 31)})),
        f"{A} is torch.float32 (4, 31), expected torch.float32 (4, 32)",
    ),
    "another dtype": (lambda f: rewrite(f, lambda t: t.update({A: t[A].half()})), "torch.float16"),
    "foreign": (
        lambda f: rewrite(f, lambda t: (t.clear(), t.update(weight=torch.zeros(2)))),
        "weight",
    ),
    "marks of another file": (
        lambda f: rewrite(f, lambda t: t[A].add_(1), keep=True),
        "is damaged",
    ),
    "nothing in it": (lambda f: rewrite(f, dict.clear), WEIGHTS),
}


def test_a_rank_above_a_layers_smaller_side_is_loaded_as_peft_has_it(tmp_path):
    model = nn.Sequential(nn.Linear(6, 4))
    base = copy.deepcopy(model[0]).requires_grad_(False)
    layer = learned(LoRALinear(base, rank=9, alpha=3))
    save_lora(nn.Sequential(layer), tmp_path)
    x = torch.ones(2, 6)
    assert torch.equal(load_lora(model, tmp_path)(x), layer(x))
    tensors = load_file(tmp_path / WEIGHTS)
    save_file(tensors, tmp_path / WEIGHTS)  # without the marks of save_lora
    reconfigure(r=10**12)(tmp_path)
    with pytest.raises(CheckpointError, match=r"has shape \(9, 6\), expected 1000000000000 rows"):
        load_lora(nn.Sequential(nn.Linear(6, 4)), tmp_path)


@pytest.mark.parametrize("fresh", [True, False], ids=["without LoRA", "with LoRA"])
@pytest.mark.parametrize("case", DAMAGE)
def test_a_file_that_does_not_fit_is_named_and_changes_nothing(case, fresh, tmp_path):
    damage, message = DAMAGE[case]
    save_lora(learned(apply_lora(build(), 4, 8, also=BLOCK_NORMS, seed=0)), tmp_path)
    model = build() if fresh else apply_lora(build(), 4, 8, also=BLOCK_NORMS, seed=1)
    load_lora(copy.deepcopy(model), tmp_path)  # it fits before it is damaged
    damage(tmp_path)
    before = snapshot(model)
    random_state = torch.get_rng_state()
    with pytest.raises(CheckpointError) as error:
        load_lora(model, tmp_path)
    assert message in str(error.value) and str(tmp_path) in str(error.value)
    assert_unchanged(model, before)
    assert torch.equal(random_state, torch.get_rng_state())


def test_an_adapter_must_fit_the_lora_that_is_there(tmp_path):
    settings = dict(rank=4, alpha=8, targets=("w_q", "w_v"), also=BLOCK_NORMS)
    save_lora(apply_lora(build(), **settings), tmp_path)
    cases = (
        (dict(rank=8), "r is 4, expected 8"),
        (dict(alpha=16), "lora_alpha is 8, expected 16"),
        (dict(targets=("w_q",)), "blocks.0.w_v"),
        (dict(also=()), "input_norm"),
        (dict(dtype=torch.bfloat16), "expected torch.bfloat16"),
    )
    for changes, message in cases:
        model = apply_lora(build(), **{**settings, **changes})
        before = snapshot(model)
        with pytest.raises(CheckpointError, match=message):
            load_lora(model, tmp_path)
        assert_unchanged(model, before)
    message = "holds base_model.model.blocks.0.input_norm.weight; expected"
    with pytest.raises(CheckpointError, match=message):
        load_lora(build("llama"), tmp_path)
    model = build()
    arena = Arena(model)
    with pytest.raises(CheckpointError, match="in an Arena"):
        load_lora(model, tmp_path)
    arena.release()
    with pytest.raises(ArgumentError, match="merged"):
        load_lora(merge_lora(apply_lora(build(), **settings)), tmp_path)


def test_a_failed_save_leaves_the_old_adapter(tmp_path, monkeypatch):
    model = learned(apply_lora(build(), seed=0))
    save_lora(model, tmp_path)
    old = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lora_files, "save", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_lora(learned(model), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == old
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_lora(model, tmp_path / WEIGHTS)  # a file is no folder
    with pytest.raises(ArgumentError, match="no LoRA layer"):
        save_lora(build(), tmp_path)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("adds", [contextlib.nullcontext, products_add])
def test_on_a_gpu_it_starts_trains_and_merges_as_on_the_cpu(adds, tmp_path):
    model = apply_lora(build(dtype=torch.bfloat16).cuda(), also=BLOCK_NORMS, seed=0)
    on_cpu = apply_lora(build(dtype=torch.bfloat16), also=BLOCK_NORMS, seed=0)
    for a, b in zip(model.parameters(), on_cpu.parameters()):
        assert torch.equal(a.cpu(), b)
    x = tokens(8).cuda()
    arena = Arena(model)
    opt = torch.optim.AdamW(arena.parameters(), lr=2e-2, fused=True)
    first = loss_of(model, x).item()
    with adds(arena):
        for _ in range(20):
            loss_of(model, x).backward()
            opt.step()
            opt.zero_grad()
    assert loss_of(model, x).item() < first - 0.2
    model.eval()
    frozen = {path: layer.weight.clone() for path, layer in layers(model).items()}
    y = logits(model, x)
    save_lora(merge_lora(model), tmp_path)
    assert all(layer.frozen_weight.is_cuda for layer in layers(model).values())
    torch.testing.assert_close(logits(model, x), y, rtol=5e-2, atol=1e-1)
    unmerge_lora(model)
    for path, layer in layers(model).items():
        same(layer.weight, frozen[path], path)
    assert torch.equal(logits(model, x), y)
    arena.release()
    loaded = load_lora(build(dtype=torch.bfloat16).cuda().eval(), tmp_path)
    assert torch.equal(logits(loaded, x), y)
