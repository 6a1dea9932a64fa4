"""Polynomial attention: values and every gradient are those of the formulas, in float64, written
down here once more, one query after the other."""

import copy
import importlib
import math

import pytest
import torch
from helpers import EVERYWHERE, KERNELS
from richards_formula import close, exact, values_of

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.nn import PolyAttention
from gpuaccel.nn.poly_attention import (
    WIDTHS,
    attention_kernel,
    launch_backward,
    launch_forward,
    plan,
    reference_poly_attention,
    shared_bytes,
)

module = importlib.import_module("gpuaccel.nn.poly_attention")
NAMES = ("y", "dq_tilde", "dqkv", "dpe", "dcoefficients")
# Version of the kernels, stages of their loads.
V1, V2, V2_LATER, V3 = (1, 1), (2, 2), (2, 1), (3, 2)


def by_query(q_tilde, qkv, pe, coefficients, degree, window):
    """The formula, one query at a time: what a query does not see is not there."""
    q, k, v = qkv.unbind(2)
    a, b, scale = coefficients
    B, T, H, _ = q.shape
    y = []
    for sequence in range(B):
        for i in range(T):
            first = max(0, i - (window or T) + 1)
            for h in range(H):
                keys, values, places = (
                    k[sequence, first : i + 1, h],
                    v[sequence, first : i + 1, h],
                    pe[: i + 1 - first].flip(0),
                )
                s = keys @ q_tilde[sequence, i, h] + places @ q[sequence, i, h]
                y.append((scale * (a * (8 * torch.tanh(s / 8)) ** degree + b)) @ values)
    return torch.stack(y).view(B, T, H, -1)


def given(device, dtype, B, T, H, d, seed=0, more=1):
    """q~, qkv, PE with `more` rows than needed, coefficients; and dy."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    qkv, noise = random(B, T, 3, H, d).to(dtype), random(B, T, H, d)
    q_tilde = (qkv[:, :, 0].float() / math.sqrt(d) + 0.1 * noise).to(device, dtype)
    pe = (2.0 / math.sqrt(d) * random(T + more, d)).to(device, dtype)
    coefficients = torch.tensor([1.1, 0.3, 0.2], device=device)
    dy = random(B, T, H, d).to(device, dtype)
    return [q_tilde, qkv.to(device), pe, coefficients], dy


def by_reference(q_tilde, qkv, *others):
    return reference_poly_attention(q_tilde, *qkv.unbind(2), *others)


def wanted(inputs, dy, degree, window, f=by_query):
    wide = [t.detach().double().requires_grad_() for t in inputs]
    y = f(*wide, degree, window)
    return (y.detach(), *torch.autograd.grad(y, wide, dy.double()))


def launched(inputs, dy, degree, window, how):
    on_hopper(inputs[0], how)
    if inputs[0].is_cuda and how[0] > 1:
        gpu = torch.cuda.get_device_properties(0)
        most = max(
            shared_bytes(name, dy.shape[-1], how[1]) for name in ("poly_forward", "poly_backward")
        )
        if gpu.major < 8 or most + 1024 > gpu.shared_memory_per_multiprocessor:
            pytest.skip(
                f"{gpu.name} has no tensor cores for bf16, or less than {most:,} bytes of shared"
                " memory for a block"
            )
    window = window or dy.shape[1]
    return (
        launch_forward(*inputs, degree, window, how),
        *launch_backward(dy, *inputs, degree, window, how),
    )


def on_hopper(q, how):
    if how == V3 and not (q.is_cuda and torch.cuda.get_device_capability()[0] == 9):
        pytest.skip("v3 needs a GPU with products of warpgroups (sm_90a)")


def same(mine, theirs):
    for name, a, b in zip(NAMES, mine, theirs):
        assert torch.equal(a, b), (
            f"{name}: largest difference {(a.double() - b.double()).abs().max():.3g}"
        )


# ---- the kernels ---------------------------------------------------------------------------------

#        how, dtype, degree, width, then (B, T, heads, window) each: one program
CASES = [
    (V1, torch.float32, 3, 16, [(3, 17, 1, None), (1, 1, 2, None), (2, 65, 1, 5)]),
    (V1, torch.bfloat16, 5, 24, [(1, 64, 1, 1), (2, 2, 2, None), (1, 130, 1, None)]),
    (V1, torch.float16, 3, 128, [(1, 65, 1, 64)]),
    (V2, torch.bfloat16, 3, 64, [(1, 130, 2, None), (1, 64, 1, 1), (3, 1, 1, None)]),
    (
        V2_LATER,
        torch.bfloat16,
        7,
        16,
        [(2, 130, 1, 64), (1, 2, 1, None), (1, 65, 2, 5), (1, 130, 1, 66)],
    ),
    (V2, torch.bfloat16, 1, 128, [(1, 65, 1, None), (1, 17, 3, 5)]),
]
ON_HOPPER = [
    (
        V3,
        torch.bfloat16,
        3,
        64,
        [
            (1, 1, 2, None),
            (2, 130, 2, None),
            (3, 64, 1, 1),
            (1, 200, 1, 63),
            (2, 330, 1, 65),
            (33, 70, 1, 2),
        ],
    ),
    (V3, torch.bfloat16, 5, 64, [(1, 129, 2, 64), (2, 520, 1, None)]),
    (V3, torch.bfloat16, 1, 64, [(1, 330, 1, 128)]),
]


@pytest.mark.gpu
@pytest.mark.parametrize("how, dtype, degree, d, shapes", ON_HOPPER, ids=str)
def test_gpu_with_products_of_warpgroups_values_are_those_of_float64(how, dtype, degree, d, shapes):
    test_values_and_all_gradients_are_those_of_float64_on_the_same_inputs(
        "cuda", how, dtype, degree, d, shapes
    )


@pytest.mark.slow
@pytest.mark.parametrize("how, dtype, degree, d, shapes", CASES, ids=str)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_values_and_all_gradients_are_those_of_float64_on_the_same_inputs(
    device, how, dtype, degree, d, shapes
):
    for B, T, H, window in shapes:
        inputs, dy = given(device, dtype, B, T, H, d)
        found, want = launched(inputs, dy, degree, window, how), wanted(inputs, dy, degree, window)
        for name, mine, theirs in zip(NAMES, found, want):
            close(
                mine,
                theirs,
                1e-5 if dtype == torch.float32 else 1e-4 if name == "dcoefficients" else 1e-2,
                f"{name}, {B, T, H, window}",
            )
            if dtype != torch.float32:
                off = (mine.double() - theirs).abs() - 2**-7 * (
                    theirs.abs() + 2 * theirs.square().mean(-1, keepdim=True).sqrt()
                )
                assert (off <= 1e-6).all(), (
                    f"{name}, {B, T, H, window}: an element is off by {off.max():.3g} more than"
                    " 2^-7 of it and 2^-6 of its row"
                )
        same(found, launched(inputs, dy, degree, window, how))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how, dtype, degree, d",
    [
        (V1, torch.float32, 3, 64),
        (V1, torch.bfloat16, 5, 24),
        *((V2, torch.bfloat16, 3, d) for d in WIDTHS),
        (V2, torch.bfloat16, 7, 64),
        (V3, torch.bfloat16, 3, 64),
        (V3, torch.bfloat16, 7, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "B, T, H, window", [(2, 512, 3, None), (1, 4096, 1, None), (1, 4096, 2, 100), (64, 100, 2, 33)]
)
def test_gpu_long_sequences_and_many_of_them(B, T, H, window, how, dtype, degree, d):
    """The reference in float64, which the small cases have compared with the formula, is the
    judge."""
    inputs, dy = given("cuda", dtype, B, T, H, d)
    on_hopper(inputs[0], how)
    y = launch_forward(*inputs, degree, window or T, how)
    dy = dy + y / y.float().square().mean().sqrt().to(
        dtype
    )  # else millions of terms cancel in dcoefficients, and only rounding is left to be compared
    found = launched(inputs, dy, degree, window, how)
    for name, mine, theirs in zip(NAMES, found, wanted(inputs, dy, degree, window, by_reference)):
        close(mine, theirs, (1e-5 if dtype == torch.float32 else 1e-2), name)
    same(found, launched(inputs, dy, degree, window, how))


VERSIONS = pytest.mark.parametrize(
    "how, dtype, d",
    [
        (V1, torch.float32, 12),
        (V2, torch.bfloat16, 64),
        pytest.param(V3, torch.bfloat16, 64, marks=pytest.mark.gpu),
    ],
    ids=str,
)


@VERSIONS
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_sequence_has_the_same_bits_in_any_batch_and_what_is_masked_does_not_matter(
    device, how, dtype, d
):
    (q_tilde, qkv, pe, coefficients), dy = given(device, dtype, 2, 70, 2, d)
    y, *grads = launched((q_tilde, qkv, pe, coefficients), dy, 3, 6, how)
    alone = launched((q_tilde[1:], qkv[1:], pe, coefficients), dy[1:], 3, 6, how)
    for name, one, all in zip(NAMES[:3], alone, (y, *grads)):
        assert torch.equal(one, all[1:]), name
    # Before, after, farther than what queries 30 .. 60 see.
    qkv, pe = qkv.clone(), pe.clone()
    qkv[:, :20, 1], qkv[:, 69:, 2], pe[6:] = 100.0, -7.0, 50.0
    assert torch.equal(
        launch_forward(q_tilde, qkv, pe, coefficients, 3, 6, how)[:, 30:60], y[:, 30:60]
    )


@VERSIONS
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_gate_multiplies_rows(device, how, dtype, d):
    inputs, dy = given(device, dtype, 2, 70, 3, d)
    want, gate = (
        launched(inputs, dy, 3, 6, how),
        torch.rand(2, 70, 3, generator=torch.Generator().manual_seed(1)).to(device),
    )
    gate[0, :40, 1] = 0.0
    y = launch_forward(*inputs, 3, 6, how, gate)
    assert not y[0, :40, 1].any()
    close(
        y,
        want[0].double() * gate.double().unsqueeze(-1),
        1e-6 if dtype == torch.float32 else 5e-3,
        "y",
    )


@pytest.mark.slow
@pytest.mark.parametrize("how, dtype", [(V1, torch.float32), (V2, torch.bfloat16)], ids=str)
def test_under_the_checks_the_kernels_do_nothing_wrong(how, dtype):
    inputs, dy = given("cpu", dtype, 1, 34 if how == V1 else 66, 1, 16)
    for i in (0, 2):  # not where 16 bytes can be loaded from
        inputs[i] = torch.cat([inputs[i].new_zeros(1), inputs[i].flatten()])[1:].view_as(inputs[i])
    with ga.use_backend("simt"):
        want = launched(inputs, dy, 3, 5, how)
        with ga.checked():
            same(launched(inputs, dy, 3, 5, how), want)
        if how == V1:
            layer, x, dy = layer_of("cpu", window=5), torch.randn(1, 34, 32), torch.randn(1, 34, 32)
            want = run(layer, x, dy)
            with ga.checked():
                for name, mine in run(layer, x, dy).items():
                    assert torch.equal(mine, want[name]), name


@pytest.mark.slow
def test_tensor_core_kernels_have_registers_enough():
    for name, how in (
        ("poly_forward", V2),
        ("poly_backward", V2),
        ("poly_forward", V3),
        ("poly_backward", V3),
    ):
        cost = attention_kernel(f"{name}_v{how[0]}", torch.bfloat16, 64, 3, *how).resources("sm_90")
        assert cost.arch == ("sm_90a" if how == V3 else "sm_90") and cost.registers > 100, (
            f"an empty body: {cost}"
        )
        assert cost.spill_store_bytes == cost.spill_load_bytes == 0, f"{name}: {cost}"


@pytest.mark.gpu
def test_gpu_heads_of_64_in_bf16_take_tensor_cores_and_nothing_waits():
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no tensor cores for bf16")
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert (
        plan("poly_forward", q)[0] == (3 if hopper else 2) and plan("poly_forward", q.float()) == V1
    )
    assert plan("poly_backward", q)[0] == plan("poly_forward", q)[0]
    layer = PolyAttention(256, 4, max_positions=4096, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    most = []
    for T in (2048, 4096):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(torch.randn(1, T, 256, device="cuda", dtype=torch.bfloat16)).sum().backward()
        most.append(torch.cuda.max_memory_allocated() - before)
    assert most[1] < min(2.1 * most[0], 4 * 4096 * 4096 * 2 / 2), (
        f"{most} bytes for 2048 and 4096 positions: not O(T), or half of a T x T matrix per head"
    )


# ---- the layer -----------------------------------------------------------------------------------


def formula(x, p, layer):
    """The whole layer in float64, pair by pair, from section and verse: nothing folded. p: the
    parameters by name."""
    H, d, (B, T) = layer.heads, layer.dim // layer.heads, x.shape[:2]
    rank = min(max(round(math.sqrt(d)), 2), 16)
    ends = [sum(d // rank + (m < d % rank) for m in range(n)) for n in range(rank + 1)]
    a, b, scale = p["coefficients"]
    q, k, v = (x @ w.t() for w in p["w_qkv.weight"].split(layer.dim))
    gate = exact(
        p["alpha"] * (x @ p["w_gate.weight"].t()) + p["beta"],
        values_of(layer.gate, p["gate.theta"]),
    )
    rows = []
    for n in range(B):
        for i in range(T):
            heads = []
            for h in range(H):
                of = slice(h * d, (h + 1) * d)
                y = torch.zeros(d, dtype=x.dtype, device=x.device)
                for j in range(max(0, i - (layer.window or T) + 1), i + 1):
                    qi, kj = q[n, i, of], k[n, j, of]
                    s = qi @ kj / math.sqrt(d) + qi @ p["pe"][i - j]
                    u, kbar = (
                        torch.stack([t[one:two].mean() for one, two in zip(ends, ends[1:])])
                        for t in (qi, kj)
                    )
                    term = u * exact(u, values_of(layer.curve, p["curve.theta"]))
                    s = s + 0.15 / math.sqrt(rank) * term @ kbar
                    y = y + scale * (a * (8 * torch.tanh(s / 8)) ** layer.degree + b) * v[n, j, of]
                heads.append(gate[n, i, h] * y if gate[n, i, h] > 1e-4 else 0 * y)
            rows.append(torch.cat(heads) @ p["w_out.weight"].t())
    return torch.stack(rows).view(x.shape)


def layer_of(device, dim=32, heads=2, seed=1, dtype=None, **more):
    torch.manual_seed(seed)
    layer = PolyAttention(dim, heads, max_positions=80, dtype=dtype, **more).to(device)
    with torch.no_grad():
        layer.coefficients[1] = 0.2
        layer.pe.mul_(20.0)
        layer.alpha.uniform_(0.5, 2.0)
        layer.beta.normal_()
    return layer


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, bound, more",
    [
        (torch.float32, 1e-5, {}),
        (torch.float32, 1e-5, dict(window=4)),
        (torch.float64, 1e-10, dict(heads=4)),
        (torch.bfloat16, 3e-2, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_the_layer_and_all_its_gradients_are_those_of_the_formula(device, dtype, bound, more):
    layer = layer_of(device, dtype=dtype, **more)
    if dtype == torch.float64:
        layer.double()
    x, dy = (torch.randn(2, 7, 32).to(device, dtype) for _ in range(2))
    dy = (layer(x).detach() + dy / 4).to(
        dtype
    )  # so that no parameter's gradient is small by mere chance, and all rounding
    x.requires_grad_()
    names, parameters = zip(*layer.named_parameters())
    found = (layer(x), *torch.autograd.grad(layer(x), (x, *parameters), dy))
    wide = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    want = formula(wide[0], dict(zip(names, wide[1:])), layer)
    for name, mine, theirs in zip(
        ("y", "x", *names), found, (want, *torch.autograd.grad(want, wide, dy.double()))
    ):
        close(mine, theirs, bound, name)


def run(layer, x, dy):
    """y and the gradients of x and of all parameters."""
    x = x.detach().to(layer.pe.dtype).requires_grad_()
    y = layer(x)
    return dict(
        zip(
            ("y", "x", *dict(layer.named_parameters())),
            (y, *torch.autograd.grad(y, (x, *layer.parameters()), dy.to(y.dtype))),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, bound, dim, more",
    [
        (torch.bfloat16, 3e-2, 128, {}),
        (torch.float16, 1e-2, 80, {}),
        (torch.float32, 1e-5, 6, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_around_the_attention_kernels_agree_with_float64_in_many_blocks_of_rows(
    device, dtype, bound, dim, more, monkeypatch
):
    layer, x, dy = (
        layer_of(device, dim=dim, dtype=dtype, **more),
        torch.randn(2, 39, dim).to(device, dtype),
        torch.randn(2, 39, dim).to(device, dtype),
    )
    dy = (layer(x).detach() + dy / 4).to(dtype)
    want = run(copy.deepcopy(layer).double(), x, dy)
    # From here on only our kernels will do.
    monkeypatch.setattr(module, "reference_poly_attention", None)
    found, again = run(layer, x, dy), run(layer, x, dy)
    for name in found:
        close(found[name], want[name], bound, name)
        assert torch.equal(found[name], again[name]), f"{name} has other bits in a second run"


def others_of(layer):
    """The operation's inputs from pe to the kinds of the curves."""
    gate, curve = layer.gate, layer.curve
    parameters = layer.pe, layer.coefficients, layer.alpha, layer.beta, gate.theta, curve.theta
    return *parameters, gate.kinds, curve.kinds


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_columns_of_a_wider_product_and_gradients_that_lie_apart_are_taken(device):
    layer = layer_of(device)
    wider, seen, dout = (torch.randn(2, 5, n).to(device) for n in (112, 2, 64))
    others = *others_of(layer), 3, 5
    for first in (0, 1):  # of the second 16 bytes cannot be loaded
        apart = wider[..., first : first + 96].unflatten(-1, (3, 2, 16)).detach().requires_grad_()
        near = apart.detach().contiguous().requires_grad_()
        ys = [torch.ops.gpuaccel.poly_layer(qkv, seen, *others)[0] for qkv in (apart, near)]
        grads = (
            torch.autograd.grad(ys[0], apart, dout[..., ::2]),
            torch.autograd.grad(ys[1], near, dout[..., ::2].contiguous()),
        )
        assert torch.equal(*ys) and torch.equal(grads[0][0], grads[1][0])


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_head_whose_gate_is_shut_is_exactly_zero_and_gets_no_gradient(device):
    layer = layer_of(device)
    with torch.no_grad():
        layer.alpha.fill_(0.0)
        layer.beta.copy_(torch.tensor([-30.0, 3.0]))
    x = torch.randn(1, 5, 32, device=device)
    y = layer(x)
    y.square().sum().backward()
    assert (
        layer.beta.grad[0] == 0
        and layer.beta.grad[1] != 0
        and not layer.w_qkv.weight.grad.view(3, 2, 16, 32)[:, 0].any()
    )
    layer.w_out.weight.data[:, :16] = 7.0
    assert torch.equal(layer(x), y), "the first head's columns count for nothing"


@pytest.mark.slow
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_opcheck_passes(device):
    layer = layer_of(device)
    qkv, seen = (
        torch.randn(2, 5, *shape).to(device).requires_grad_() for shape in ((3, 2, 16), (2,))
    )
    torch.library.opcheck(
        torch.ops.gpuaccel.poly_layer.default, (qkv, seen, *others_of(layer), 3, 4)
    )


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_shapes_strides_and_nothing_at_all(device):
    layer = layer_of(device)
    x = torch.randn(2, 3, 6, 32, device=device)
    y = layer(x)
    assert (
        y.shape == x.shape
        and layer(x[:0]).shape == (0, 3, 6, 32)
        and layer(x[..., :0, :]).shape == (2, 3, 0, 32)
    )
    assert torch.allclose(layer(x[1, 2]), y[1, 2], atol=1e-6) and torch.allclose(
        layer(x.transpose(0, 1)).transpose(0, 1), y, atol=1e-6
    )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            lambda: PolyAttention(30, 4),
            "dim is 30 and heads 4; expected a dim that is a multiple of heads",
        ),
        (lambda: PolyAttention(32, 0), "dim is 32 and heads 0"),
        (
            lambda: PolyAttention(32, 2, degree=2),
            "degree is 2; expected an odd number from 1 to 41",
        ),
        (lambda: PolyAttention(32, 2, degree=3.0), "degree is 3.0; expected an odd"),
        (lambda: PolyAttention(32, 2, window=0), "window is 0; expected None, or a whole number"),
        (lambda: PolyAttention(32, 2, max_positions=0), "max_positions is 0; expected 1 or more"),
        (
            lambda: PolyAttention(32, 2, degree=43),
            "degree is 43; expected an odd number from 1 to 41",
        ),
        (
            lambda: PolyAttention(32, 2)(torch.zeros(1, 4, 32).double()),
            r"x is torch.float64; expected torch.float32, as w_qkv.weight is \(or torch.autocast\)",
        ),
        (
            lambda: PolyAttention(32, 2)(torch.zeros(1, 4, 32, dtype=torch.int64)),
            "x is torch.int64; expected a floating-point tensor",
        ),
        (
            lambda: PolyAttention(32, 2, max_positions=8)(torch.zeros(1, 9, 32)),
            "x has 9 positions; expected at most max_positions, 8",
        ),
        (
            lambda: PolyAttention(32, 2)(torch.zeros(1, 9, 31)),
            r"x is \(1, 9, 31\); expected a tensor \(\.\.\., T, 32\)",
        ),
    ],
)
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        wrong()
