"""The models: tensors per block, rotary positions, causality, sampling by a seed."""

import pytest
import torch
import torch.nn.functional as F
from helpers import EVERYWHERE
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuaccel.backends import backend, use_backend
from gpuaccel.errors import ArgumentError
from gpuaccel.training.models import (
    Config,
    Transformer,
    flops_per_token,
    generate,
    preset,
    rotary_table,
    rotate,
)

SMALL = dict(vocab=17, hidden=16, intermediate=24, layers=2, heads=4, kv_heads=2, T=12)


def small(**changes):
    torch.manual_seed(0)
    return Transformer(Config(**{**SMALL, **changes}))


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def separate_forward(model, tokens):
    """The formulas of family Llama, each addition and each norm by itself."""
    x = model.embedding(tokens)
    for block in model.blocks:
        h = block.input_norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, block.head_dim)).transpose(1, 2)
            for layer in (block.w_q, block.w_k, block.w_v)
        )
        q, k = rotate(q, model.rope), rotate(k, model.rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + block.w_o(y.transpose(1, 2).flatten(-2))
        h = block.post_attn_norm(x)
        x = x + block.down(F.silu(block.gate(h)) * block.up(h))
    return model.lm_head(model.final_norm(x))


def results(model, forward, tokens):
    """The logits, and the gradient of each parameter."""
    model.zero_grad()
    y = forward(tokens)
    y.float().square().mean().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("changes", [{}, dict(kv_heads=1, head_dim=6, tied=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_transformer_computes_the_formulas(device, dtype, changes):
    model = small(**changes).to(device, dtype)
    tokens = torch.randint(0, 17, (2, 12), generator=torch.Generator().manual_seed(0)).to(device)
    y, grads = results(model, model, tokens)
    with use_backend("torch"):
        want, want_grads = results(model, lambda tokens: separate_forward(model, tokens), tokens)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.04}[dtype]
    for name, a, b in (("y", y, want), *((n, grads[n], want_grads[n]) for n in grads)):
        # Without our kernels not one operation differs.
        if device == "cpu" and backend().name == "torch":
            assert torch.equal(a, b), name
        assert float((a - b).abs().max()) <= tolerance * float(b.abs().max()), name


def test_parameter_counts_of_the_presets():
    with torch.device("meta"):
        large, tiny = Transformer(preset("llama-350m")), Transformer(preset("tiny"))
    without_embedding = [p for n, p in large.named_parameters() if n != "embedding.weight"]
    assert sum(p.numel() for p in without_embedding) == 398_509_056
    assert large.embedding.weight.numel() == 32768 * 1024
    c = large.config
    assert (c.hidden, c.intermediate, c.layers, c.vocab) == (1024, 4096, 24, 32768)
    assert tuple(large.blocks[0].w_k.weight.shape) == (256, 1024)
    block = 2 * 128 + 128 * (2 * 128 + 2 * 64) + 3 * 128 * 384
    assert sum(p.numel() for p in tiny.parameters()) == 256 * 128 * 2 + 128 + 4 * block
    named = dict(tiny.named_parameters())
    assert tiny.state_dict().keys() == named.keys(), "the rotary table is in no checkpoint"


def test_the_polynomial_model_has_seven_million_parameters_and_learns():
    with torch.device("meta"):
        assert sum(p.numel() for p in preset("poly-7m").build().parameters()) == 7_097_176
    torch.manual_seed(0)
    model = preset(
        "poly-7m",
        layers=1,
        hidden=32,
        head_dim=8,
        heads=4,
        kv_heads=4,
        intermediate=48,
        T=16,
        vocab=31,
    ).build()
    tokens = torch.randint(0, 31, (4, 17))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = loss_of(model, tokens)
        losses.append(loss.item())
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert losses[-1] < 0.5 * losses[0], losses[::10]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(hidden=18), "hidden is 18, not a multiple of heads = 4: give head_dim"),
        (dict(kv_heads=3), "heads is 4, not a multiple of kv_heads = 3"),
        (dict(head_dim=5), "head_dim is 5; rotary positions need an even one"),
        (dict(family="gpt3"), "family is 'gpt3'; expected one of llama, poly"),
        (dict(family="poly"), "kv_heads is 2; family poly has 4, as many as heads"),
        (dict(family="poly", kv_heads=4, head_dim=8), "head_dim is 8; family poly has .* = 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ArgumentError, match=message):
        Config(**{**SMALL, **changes})


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(
        ArgumentError,
        match="preset is 'huge'; expected one of tiny, llama-350m, poly-7m",
    ):
        preset("huge")
    assert preset("tiny", layers=1).layers == 1 and preset("tiny").layers == 4


@settings(max_examples=15, deadline=None)
@given(
    T=st.integers(1, 40),
    half=st.integers(1, 16),
    theta=st.sampled_from([10.0, 10_000.0, 500_000.0]),
    seed=st.integers(0, 99),
)
def test_rotary_positions_turn_each_pair_by_position_times_frequency(T, half, theta, seed):
    """Against the definition, in float64 complex numbers: (a + ib) * exp(i * t * theta^(-2k/D))."""
    x = torch.randn(
        2, 3, T, 2 * half, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    pair = torch.complex(x[..., :half], x[..., half:])
    angle = torch.tensor(
        [[t * theta ** (-2 * k / (2 * half)) for k in range(half)] for t in range(T)],
        dtype=torch.float64,
    )
    want = pair * torch.polar(torch.ones_like(angle), angle)
    got = rotate(x.float(), rotary_table(T + 3, 2 * half, theta)).double()
    d = (got - torch.cat([want.real, want.imag], -1)).abs()
    assert d.max() < 1e-5, f"largest difference {d.max():.3g}, mean {d.mean():.3g}"


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(
        ArgumentError, match="tokens have T = 13, the model was made for T up to 12"
    ):
        small()(torch.zeros(1, 13, dtype=torch.long))


def test_generate_depends_on_its_seed_only_and_draws_nothing_from_torchs_generator():
    model, tokens = small(), torch.randint(0, 17, (2, 3))
    model.train()
    before = torch.get_rng_state()
    first = generate(model, tokens, 20, seed=1)  # 23 tokens are more than T = 12
    assert torch.equal(first, generate(model, tokens, 20, seed=1))
    assert not torch.equal(first, generate(model, tokens, 20, seed=2))
    assert torch.equal(torch.get_rng_state(), before), "generate drew from the global generator"
    assert first.shape == (2, 23) and first.dtype == torch.int64
    assert torch.equal(first[:, :3], tokens)
    assert model.training and not any(p.grad is not None for p in model.parameters())


def test_generate_without_temperature_takes_the_likeliest():
    model, tokens = small(), torch.randint(0, 17, (1, 3))
    greedy = generate(model, tokens, 4, temperature=0)
    for t in range(3, 7):
        assert greedy[0, t] == model(greedy[:, :t])[0, -1].argmax()
    assert torch.equal(generate(model, tokens, 0), tokens)
    model.eval()
    generate(model, tokens, 1)
    assert not model.training


def test_flops_per_token_count_six_per_weight_and_attention():
    c = preset("tiny")
    named = c.build().named_parameters()
    matrices = sum(p.numel() for n, p in named if p.dim() == 2 and n != "embedding.weight")
    assert flops_per_token(c, 64) == 6 * matrices + 12 * c.layers * c.heads * c.head_dim * 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_gpu_output_is_the_cpus(dtype, bound):
    model, tokens = small(), torch.randint(0, 17, (2, 12))
    want = model(tokens)
    d = (model.to("cuda", dtype)(tokens.cuda()).float().cpu() - want).abs()
    assert d.max() < bound, f"largest difference {d.max():.3g}, mean {d.mean():.3g}"
    assert torch.equal(
        generate(model, tokens.cuda(), 5, seed=3), generate(model, tokens.cuda(), 5, seed=3)
    )
