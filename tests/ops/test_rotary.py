"""Rotary positions in place: rotate()'s bits in fp32, its values rounded once in 16 bits."""

import pytest
import torch
from helpers import EVERYWHERE, KERNELS, same

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.ops import rotary, rotary_, rotary_backward, rotary_table, rotate

# B, T, heads of k and of v, heads of q, head_dim: with and without 16-byte accesses.
SIZES = [(2, 5, 2, 4, 16), (1, 1, 1, 1, 2), (3, 7, 1, 5, 6), (2, 4, 4, 16, 64), (1, 3, 3, 3, 32)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(size, dtype, device, table_dtype=None, seed=0):
    """v, k, q as (B, T, heads * head_dim), and a table with more positions than T."""
    B, T, kv_heads, heads, D = size
    g = torch.Generator().manual_seed(seed)
    parts = [torch.randn(B, T, n * D, generator=g) for n in (kv_heads, kv_heads, heads)]
    table = rotary_table(T + 2, D, 100.0).to(device, table_dtype or torch.float32)
    return [t.to(device, dtype) for t in parts], table


def by_heads(x, table, dtype):
    """rotate() of heads side by side, in another dtype."""
    heads = x.to(dtype).unflatten(-1, (-1, table.shape[-1])).transpose(1, 2)
    return rotate(heads, table.to(dtype)).transpose(1, 2).flatten(-2)


def back(table):
    """The table of the negative angles."""
    return table * torch.tensor([1, -1], dtype=table.dtype, device=table.device)[:, None, None]


def launched(monkeypatch):
    """Grows with the name of each kernel that is launched."""
    names, was = [], rotary.rotary_kernel

    def kernel(name, *dtypes):
        names.append(name)
        return was(name, *dtypes)

    monkeypatch.setattr(rotary, "_kernels_run", lambda x, table: True)
    monkeypatch.setattr(rotary, "rotary_kernel", kernel)
    return names


# ---- values ----


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_in_fp32_the_bits_are_those_of_rotate_and_of_its_gradient(device, size):
    (v, k, q), table = tensors(size, torch.float32, device)
    got = rotary_(torch.cat([v, k, q], -1), table, size[2])
    want = [v, *(by_heads(t, table, torch.float32) for t in (k, q))]
    same(got, torch.cat(want, -1), "forward")
    k, q = (t.clone().requires_grad_() for t in (k, q))
    dv, dk, dq = tensors(size, torch.float32, device, seed=1)[0]
    rotated = [by_heads(t, table, torch.float32) for t in (k, q)]
    grads = torch.autograd.grad(rotated, (k, q), (dk, dq))
    same(rotary_backward(dv, dk, dq, table), torch.cat([dv, *grads], -1), "backward")


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_in_16_bits_a_value_is_rounded_once_and_rotate_is_no_closer(
    device, size, dtype, table_dtype
):
    """Half a unit in the last place from float64, and fp32's error; v stays as it is."""
    (v, k, q), table = tensors(size, dtype, device, table_dtype)
    got = rotary_(torch.cat([v, k, q], -1), table, size[2])
    gradient = rotary_backward(v, k, q, table)
    for result, angles in ((got, table), (gradient, back(table))):
        same(result[..., : v.shape[-1]], v, "v")
        x = torch.cat([k, q], -1)
        exact = by_heads(x, angles, torch.float64)
        error = (result[..., v.shape[-1] :].double() - exact).abs()
        unit = torch.finfo(dtype).eps
        assert (error <= 0.51 * unit * exact.abs() + 1e-6).all(), error.max()
        rounded_often = (by_heads(x, angles, dtype).double() - exact).abs()
        assert error.mean() <= rounded_often.mean()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_nan_and_infinity_stay_with_their_pair_and_v_is_copied_as_it_is(device):
    (v, k, q), table = tensors((1, 4, 1, 2, 16), torch.float32, device)
    v[0, 1, 3], k[0, 0, 2], q[0, 2, 5] = torch.nan, torch.inf, torch.nan
    for got in (
        rotary_(torch.cat([v, k, q], -1), table, 1),
        rotary_backward(v, k, q, table),
    ):
        wrong = {tuple(i) for i in (~got.isfinite())[0].nonzero().tolist()}
        assert wrong == {(1, 3), (0, 18), (0, 26), (2, 37), (2, 45)}


# ---- launches ----


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_version_2_runs_where_16_byte_accesses_are_possible(device, monkeypatch):
    names = launched(monkeypatch)
    for size, dtype, offset, version in (
        ((1, 2, 1, 2, 16), torch.bfloat16, 0, 2),
        ((1, 2, 1, 2, 16), torch.bfloat16, 1, 1),
        ((1, 2, 1, 2, 8), torch.bfloat16, 0, 1),
        ((1, 2, 1, 2, 8), torch.float32, 0, 2),
        ((1, 2, 1, 2, 6), torch.float32, 0, 1),
    ):
        (v, k, q), table = tensors(size, dtype, device)
        vkq = torch.cat([v, k, q], -1)
        moved = torch.zeros(vkq.numel() + offset, dtype=dtype, device=device)[offset:]
        moved = moved.view_as(vkq).copy_(vkq)
        want = rotary.reference_rotary(vkq, table, 1)
        same(rotary_(moved, table, 1), want, f"{size}, {dtype}, {offset} elements off")
        if not offset:
            rotary_backward(v, k, q, table)
            assert names.pop() == f"rotary_backward_v{version}"
        assert names.pop() == f"rotary_v{version}"


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_gradients_of_any_strides_are_taken(device):
    (dv, dk, dq), table = tensors((2, 3, 2, 4, 16), torch.float32, device)
    want = rotary_backward(dv, dk, dq, table)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (dv, dk, dq)]
    assert not strided[0].is_contiguous()
    same(rotary_backward(*strided, table), want)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_an_empty_batch_and_fp64_are_no_problem(device):
    table = rotary_table(4, 8, 100.0).to(device)
    assert rotary_(torch.zeros(0, 4, 32, device=device), table, 1).shape == (0, 4, 32)
    (v, k, q), table = tensors((1, 3, 1, 2, 8), torch.float64, device)
    got = rotary_(torch.cat([v, k, q], -1), table, 1)
    assert torch.equal(got[..., 16:], by_heads(q, table, torch.float64))


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_what_autograd_saved_of_it_is_known_to_have_changed(device):
    (v, k, q), table = tensors((1, 3, 1, 2, 8), torch.float32, device)
    vkq, weight = torch.cat([v, k, q], -1), torch.ones((), requires_grad=True, device=device)
    y = (vkq * weight).sum()
    rotary_(vkq, table, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- what is refused ----


def test_what_does_not_fit_is_refused_in_words():
    table = rotary_table(4, 8, 100.0)
    x = torch.randn(2, 4, 32)
    before = x.clone()
    for arguments, words in (
        ((x[0], table, 1), "vkq is torch.float32 of shape (4, 32)"),
        ((x.int(), table, 1), "vkq is torch.int32"),
        ((x, table[0], 1), "table is torch.float32 of shape (4, 8)"),
        ((x, table[..., :7], 1), "head_dim even"),
        ((x, table[:1], 1), "expected (2, positions, head_dim)"),
        ((x, table[:, :3], 1), "vkq has 4 positions; expected up to 3, as in the table"),
        ((x, table, 2), "expected (B, T, (2 * 2 + heads) * 8)"),
        ((x, table, 1.0), "kv_heads is 1.0; expected a whole number"),
        ((x, table, 0), "expected (B, T, (2 * 0 + heads) * 8)"),
        ((torch.randn(2, 4, 30), table, 1), "vkq has shape (2, 4, 30)"),
        ((x.transpose(0, 1).contiguous().transpose(0, 1), table, 1), "expected a contiguous"),
        ((x.clone().requires_grad_(), table, 1), "use ga.nn.fused_rotary"),
        ((x, table.to("meta"), 1), "vkq is on cpu, table on meta"),
    ):
        with pytest.raises(ArgumentError) as caught:
            ga.ops.rotary_(*arguments)
        assert words in str(caught.value)
    assert torch.equal(x, before)
    v, q = torch.randn(2, 4, 8), torch.randn(2, 4, 16)
    for arguments, words in (
        (
            (v, v, q[:1], table),
            "dv is torch.float32 of shape (2, 4, 8); expected torch.float32, (1",
        ),
        ((v, v.bfloat16(), q, table), "dk is torch.bfloat16 of shape"),
        ((v, v[..., :7], q, table), "dk is torch.float32 of shape (2, 4, 7)"),
        ((v, q, q, table), "dv has shape (2, 4, 8); expected dk's, (2, 4, 16)"),
    ):
        with pytest.raises(ArgumentError) as caught:
            ga.ops.rotary_backward(*arguments)
        assert words in str(caught.value)
