"""Clipping: the norm against float64, the scale against torch, the table of edges, no host wait."""

import contextlib
import itertools
import math
import re
from typing import get_args

import pytest
import torch
from helpers import (
    EVERYWHERE,
    INF,
    KERNELS,
    NAN,
    Blocks,
    bits,
    exact_norm,
    fill,
    filled,
    generator,
    needs_free_gpu_memory,
    no_waiting,
    parameters,
    same,
)
from optimizers import check_arena
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError, BackendError, NonFiniteError
from gpuaccel.ops import clip as clip_ops
from gpuaccel.ops.clip import EPS, OnNonfinite, launch_squares
from gpuaccel.optim import clip
from gpuaccel.optim.arena import Arena
from gpuaccel.optim.clip import clip_grad_norm_, clip_grads_


def close(got, want, bound=1e-6, what="norm"):
    got = float(got)
    e = abs(got - want) / want if want else abs(got)
    assert e <= bound, f"{what} is {got!r}, in float64 {want!r}: {e:.3g} off (bound {bound})"


SIZES = (4097, 0, 1, 3, 4095, 4096, 100, 9000)


def view(kind, n, dtype, device, seed):
    """(gradient, the memory it lies in): a view of about n elements."""

    def random(*shape):
        return torch.randn(shape, generator=generator(seed)).to(device, dtype)

    if kind == "plain":
        base = random(n)
        return base, base
    if kind == "transposed":
        base = random(n // 5 + 1, 5)
        return base.t(), base
    if kind == "gaps":
        base = random(n // 5 + 1, 12)
        return base[:, 2:7], base
    if kind == "every third":
        base = random(3 * n + 1)
        return base[1 : 3 * n : 3], base
    if kind == "odd":
        base = random(n + 3)
        return base[1 : n + 1], base
    raise ValueError(kind)


KINDS = ("plain", "transposed", "gaps", "every third", "odd")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def all_views(sizes, device, dtypes=DTYPES):
    cases = itertools.product(KINDS, sizes, dtypes)
    return [view(kind, n, dtype, device, i) for i, (kind, n, dtype) in enumerate(cases)]


# ---- the norm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
@pytest.mark.parametrize("count", [1, 2, 7, 219, 1000])
def test_the_norm_is_within_1e_6_of_float64(count, norm_type, device):
    # Many tensors are small, but for every 40th.
    sizes = [
        SIZES[i % len(SIZES)] if count < 20 or i % 40 == 0 else 1 + i % 37 for i in range(count)
    ]
    grads = [torch.randn(n, generator=generator(i)).to(device) for i, n in enumerate(sizes)]
    want = exact_norm(grads, norm_type)
    found = clip_grads_(parameters(grads, device), 0.5 * want, norm_type)
    close(found.norm, want)
    close(found.clipped_norm, 0.5 * want, 1e-5)
    close(exact_norm(grads, norm_type), 0.5 * want, 1e-5, "norm after clipping")


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
def test_any_view_of_any_dtype_is_measured_and_scaled_and_its_neighbours_are_not(norm_type, device):
    """fp32, bf16 and fp16 in one call: multiplied in fp32 and rounded once. In torch, fp32."""
    dtypes = DTYPES if ga.backend().name != "torch" else DTYPES[:1]
    pairs = all_views((1, 50, 4100), device, dtypes)
    grads = [g for g, _ in pairs]
    before = [g.clone() for g in grads]
    bases = [b.clone() for _, b in pairs]
    want = exact_norm(grads, norm_type)
    found = clip_grads_(parameters(grads, device), want / 3, norm_type)
    close(found.norm, want)
    for (g, base), old, old_base in zip(pairs, before, bases):
        same(g, (old.float() * found.scale).to(g.dtype), f"{tuple(g.shape)} {g.stride()} {g.dtype}")
        g.copy_(old)
        same(base, old_base, f"memory around {tuple(g.shape)} {g.stride()} {g.dtype}")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("value", [1e-25, 1e25, 3e-38, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_that_leave_fp32_do_no_harm(dtype, value, device):
    """Alone, and among numbers of ordinary size in other threads' hands."""
    tiny = [(value * torch.randn(n, generator=generator(n))).to(device, dtype) for n in (5000, 3)]
    want = exact_norm(tiny)
    found = clip_grads_(parameters(tiny, device), want / 2)
    close(found.norm, want)
    close(found.scale, 0.5 if value > 1 else 0.5 * want / (want + EPS), 1e-5, "scale")
    assert bool(found.finite)
    mixed = [
        (value * torch.ones(5000)).to(device, dtype),
        torch.randn(5000, generator=generator(1)).to(device, dtype),
    ]
    want = exact_norm(mixed)
    close(clip_grads_(parameters(mixed, device), 1.0).norm, want)


@pytest.mark.gpu
def test_gpu_a_norm_of_more_than_2_to_the_31_elements():
    # 2 bytes an element, and 1 of a comparison.
    needs_free_gpu_memory(8 * 10**9)
    grad = torch.ones(2**31 + 5000, dtype=torch.bfloat16, device="cuda")
    grad[-1] = 3.0
    param = nn.Parameter(torch.empty(0, device="cuda"))
    param.data, param.grad = grad, grad
    found = clip_grads_([param], 1.0)
    close(found.norm, math.sqrt(2**31 + 5000 - 1 + 9))
    one = torch.ones((), dtype=torch.bfloat16, device="cuda")
    assert bool((grad[:-1] == one.mul(found.scale).bfloat16()).all())
    assert grad[-1] == (3.0 * found.scale).bfloat16()
    del grad, param
    torch.cuda.empty_cache()


# ---- scale 1, and just above ---------------------------------------------------------------------


@pytest.mark.parametrize("device", ["simt"], indirect=True)
@pytest.mark.parametrize(
    "verdict, skip, writes",
    [
        ((1, 5, 5, 1), 0, 0),
        ((1, 5, 5, 1), 1, 0),
        ((NAN, NAN, NAN, 0), 1, 0),
        ((0.5, 5, 2.5, 1), 1, 5000),
        ((NAN, NAN, NAN, 0), 0, 5000),
    ],
)
def test_scale_v2_touches_the_gradients_only_when_it_has_to(verdict, skip, writes, device):
    """The executor counts each access: with scale 1 no element is read or written."""
    g = torch.randn(5000, generator=generator(0))
    found = clip_ops.new_state(1, "cpu", "global", list)
    found.values.copy_(torch.tensor([verdict]))
    for start, chunks, _, packed in clip_ops.launches_for([g]):
        trace = clip_ops.clip_kernel("scale_v2", 2.0)[chunks, 256].on_cpu(
            (found.values, None, skip, start, packed), [g], trace=True
        )
    (at,) = [
        i for i, traced in enumerate(trace.tensors) if traced.elements * traced.itemsize == 20_000
    ]
    touched = trace.events[trace.events["tensor"] == at]
    for kind in (0, 1):
        assert touched["bytes"][touched["kind"] == kind].sum() == 4 * writes, (
            f"{'wrote' if kind else 'read'} gradients, scale {verdict[0]}"
        )


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_the_norm_is_divided_by_norm_plus_eps(device):
    g = torch.tensor([3.0, 4.0], device=device)
    found = clip_grads_(parameters([g], device), 1.0, eps=5.0)
    assert found.scale == torch.tensor(0.1, device=device) and torch.equal(
        g, torch.tensor([3.0, 4.0], device=device) * found.scale
    )
    # CLIP-001: the scale is 0.1, not 0.01 (a square) and not 0.316 (a root too many).
    g = torch.tensor([6.0, 8.0], device=device)
    close(clip_grads_(parameters([g], device), 1.0).scale, 0.1, 1e-6, "scale")
    close(exact_norm([g]), 1.0, 1e-6)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_clipped_gradient_is_another_version(device):
    """autograd is told: what was saved for a backward is not used any more."""
    g = torch.ones(8, device=device)
    before = g._version
    clip_grad_norm_(parameters([g], device), 1.0)
    assert g._version > before


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
def test_two_runs_and_any_grid_give_the_same_bits(norm_type, device, monkeypatch):
    def run():
        grads = [g for g, _ in all_views((1, 20_000), device)]
        found = clip_grads_(parameters(grads, device), 1.0, norm_type)
        return [found.values, *grads]

    first = run()
    for blocks in (2**20, 1, 3, 7):
        monkeypatch.setattr(clip_ops, "MAX_BLOCKS", blocks)
        for got, want in zip(run(), first):
            same(got, want, f"{blocks} blocks")


def test_a_launch_has_at_most_so_many_tensors_and_each_once():
    grads = list(torch.ones(600, 2))
    assert [start for start, *_ in clip_ops.launches_for(grads, 256)] == [0, 256, 512]
    assert [start for start, *_ in clip_ops.launches_for([grads[0]] * 3, 256)] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("count, launches", [(256, 1), (257, 1), (1000, 1), (2049, 2)])
def test_many_small_tensors_take_one_launch(device, count, launches):
    """Of up to 2,048, as those of 256; each chunk's sum is the same in either."""
    numbers = torch.randn(count, 5, generator=torch.Generator().manual_seed(count))
    numbers[3] = 0.0
    grads = [row[: 1 + i % 5].clone().to(device) for i, row in enumerate(numbers)]
    grads[1] = grads[1][:0]
    found = clip_ops.launches_for(grads)
    assert len(found) == launches
    partials = torch.zeros(count - 1, dtype=torch.float64, device=grads[0].device)
    by_256 = torch.zeros_like(partials)
    tensors = torch.zeros(count - 1, dtype=torch.int32, device=grads[0].device)
    launch_squares(grads, partials, tensors, launches=found)
    launch_squares(grads, by_256)
    assert torch.equal(partials, by_256)
    assert tensors.tolist() == [i for i in range(count) if i != 1]
    plain = [g.clone() for g in grads]
    torchs_norm = torch.nn.utils.clip_grad_norm_(parameters(plain, device), 0.5)
    norm = clip_grad_norm_(parameters(grads, device), 0.5)
    torch.testing.assert_close(norm, torchs_norm)
    for g, want in zip(grads, plain):
        torch.testing.assert_close(g, want)


# ---- the table of edges --------------------------------------------------------------------------


def edge(grads, max_norm, device, **more):
    grads = [torch.tensor(g, device=device) if isinstance(g, list) else g.to(device) for g in grads]
    before = [g.clone() for g in grads]
    found = clip_grads_(parameters(grads, device), max_norm, **more)
    return found, grads, before


def unchanged(grads, before):
    return all(torch.equal(bits(g), bits(b)) for g, b in zip(grads, before, strict=True))


def zeros(device, ours):
    found, grads, before = edge([[0.0, -0.0], [0.0]], 1.0, device)
    assert found.norm == 0 and found.scale == 1 and found.clipped_norm == 0 and found.finite
    assert unchanged(grads, before)


def below(device, ours):
    base = torch.zeros(6, 8)
    base[1, 2], base[3, 4], base[0, 2], base[5, 7] = 3.0, 4.0, -0.0, -0.0
    base[2, 3] = 1e-42  # subnormal: what 1.0 * x might flush
    for max_norm in (5.0 + EPS, 5.1, 1e30):
        found, grads, before = edge([base[:, 2:5], [-0.0, 0.0]], max_norm, device)
        assert found.norm == 5 and found.scale == 1 and found.clipped_norm == 5
        assert unchanged(grads, before)


def just_above(device, ours):
    scale = torch.tensor(1 - 2**-24)
    found, (g,), (old,) = edge([torch.full((4,), 0.5)], scale.item(), device, eps=0.0)
    assert found.norm == 1 and found.scale == scale.to(device)
    assert torch.equal(g, old * scale.to(device)) and not torch.equal(g, old)


def nonfinite(*values):
    """Propagate, the default: what torch does. Skip: nothing is written."""

    def check(device, ours):
        for value in values:
            found, grads, before = edge([[4.0], [3.0, value, 0.0]], 1.0, device)
            assert not found.finite and found.first_nonfinite == 1
            twins = parameters([g.clone() for g in before], device)
            norm = nn.utils.clip_grad_norm_(twins, 1.0)
            same(found.norm, norm, "torch's norm")
            for g, twin in zip(grads, twins):
                same(g, twin.grad, "torch")
            found, grads, before = edge([[4.0], [3.0, value]], 1.0, device, on_nonfinite="skip")
            assert unchanged(grads, before) and found.name() == "parameter 1 of shape (2,)"

    return check


def overflow(device, ours):
    found, (g,), (old,) = edge([[3e25, 4e25]], 1.0, device)
    if not ours:  # torch squares in fp32
        assert found.norm == INF and found.scale == 0
        return
    close(found.norm, 5e25)
    close(found.scale, 2e-26, 1e-6, "scale")
    assert found.finite and torch.allclose(g, torch.tensor([0.6, 0.8], device=device))
    # A norm beyond fp32.
    found, (g,), (old,) = edge([torch.full((100,), 3e38)], 1.0, device, on_nonfinite="skip")
    assert found.norm == INF and not found.finite and found.first_nonfinite == -1
    assert torch.equal(g, old)


def underflow(device, ours):
    found, (g,), (old,) = edge([[3e-25, 4e-25]], 1e-25, device, eps=0.0)
    if not ours:
        assert found.norm == 0
        return
    close(found.norm, 5e-25)
    close(found.scale, 0.2, 1e-6, "scale")
    assert torch.equal(g, old * found.scale)


def max_norm_0(device, ours):
    found, grads, _ = edge([[3.0, -4.0], [1.0]], 0.0, device)
    assert found.scale == 0 and found.clipped_norm == 0 and not any(g.any() for g in grads)
    # For norm 0 eps keeps 0 / 0 away.
    assert edge([[0.0]], 0.0, device)[0].scale == 0


def max_norm_negative(device, ours):
    for bad in (-1.0, -1e-30, -INF, NAN):
        g = torch.tensor([3.0, 4.0], device=device)
        for foreach in (None, False):
            with pytest.raises(ArgumentError, match="max_norm is .*expected a number of 0 or more"):
                clip_grad_norm_(parameters([g], device), bad, foreach=foreach)
        assert g.tolist() == [3.0, 4.0]


def max_norm_infinite(device, ours):
    found, grads, before = edge([[3.0, 4.0]], INF, device)
    assert found.scale == 1 and found.norm == 5 and unchanged(grads, before)
    found, (g,), _ = edge([[3.0, INF]], INF, device)
    assert found.norm == INF and g.isnan().all()
    (twin,) = parameters([torch.tensor([3.0, INF], device=device)], device)
    nn.utils.clip_grad_norm_([twin], INF)
    same(g, twin.grad, "torch")


def no_tensors(device, ours):
    for params in ([], parameters([None, None], device), iter([])):
        assert clip_grad_norm_(params, 1.0) == 0
    for scope, shape in (("global", ()), ("tensor", (0,))):
        found = clip_grads_([], 1.0, scope=scope)
        assert found.norm.shape == shape and found.scale.shape == shape and found.name() is None
    empty = [torch.zeros(0), torch.zeros(3, 0)]
    found, grads, _ = edge([empty[0], torch.tensor([3.0, 4.0]), empty[1]], 1.0, device)
    assert found.norm == 5 and found.finite
    close(exact_norm(grads), 1.0, 1e-6)
    found, _, _ = edge(empty, 1.0, device)
    assert found.norm == 0 and found.scale == 1 and found.finite and found.name() is None


def launch_fails(device, ours):
    if not ours:  # nothing of ours is launched
        return

    class Broken:
        def __getitem__(self, shape):
            raise BackendError("squares_v2 was not launched: it was put to the test")

    g, plain = torch.tensor([3.0, 4.0], device=device), clip_ops.clip_kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            clip_ops,
            "clip_kernel",
            lambda name, *rest: Broken() if name == "squares_v2" else plain(name, *rest),
        )
        with pytest.raises(BackendError, match="was not launched"):
            clip_grad_norm_(parameters([g], device), 1.0)
    assert g.tolist() == [3.0, 4.0]


EDGES = {
    "all gradients zero": zeros,
    "norm + eps <= max_norm": below,
    "norm just above max_norm": just_above,
    "any NaN": nonfinite(NAN),
    "any infinity": nonfinite(INF, -INF),
    "squares overflow (|g| > 1.8e19)": overflow,
    "squares underflow (|g| < 1e-23)": underflow,
    "max_norm = 0": max_norm_0,
    "max_norm negative or NaN": max_norm_negative,
    "max_norm infinite": max_norm_infinite,
    "no tensors, empty tensors": no_tensors,
    "a launch that fails": launch_fails,
}


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("row", EDGES)
def test_edge(row, device):
    EDGES[row](device, ga.backend().name != "torch")


def test_the_table_of_edges_has_these_rows():
    rows = [
        line[2:].split(" | ")[0]
        for line in clip.__doc__.split("\n")
        if re.match(r"\| (?!case)[^-]", line)
    ]
    assert rows == list(EDGES), "each row of clip.py's table has its test, and the other way round"


# ---- torch's own cases ---------------------------------------------------------------------------


def torchs(grads, device):
    return parameters([g.clone() if g is not None else None for g in grads], device)


def compared(grads, device, max_norm, **how):
    """Ours and torch's on the same gradients: bit-identical where torch computes both."""
    mine, theirs = torchs(grads, device), torchs(grads, device)
    got = clip_grad_norm_(mine, max_norm, **how)
    want = nn.utils.clip_grad_norm_(theirs, max_norm, **how)
    assert got.shape == want.shape == () and got.device == want.device
    if ga.backend().name == "torch":
        same(got, want if want.dtype == torch.float64 else want.float(), f"norm {how}")
    else:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)
    for a, b in zip(mine, theirs):
        if a.grad is None:
            assert b.grad is None
        elif ga.backend().name == "torch":
            same(a.grad, b.grad, f"{how}")
        else:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8)
    return got, mine


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [0.5, 1.5, 1, 2, 4, INF, "inf"])
def test_clip_grad_norm_as_torch(norm_type, foreach, device):
    how = {"norm_type": norm_type, "foreach": foreach}
    grads = [torch.arange(1.0, 101, device=device).view(10, 10)]
    grads.append(torch.ones(10, device=device) / 1000)
    norm, params = compared(grads, device, 2.0, **how)
    close(exact_norm([p.grad for p in params], float(norm_type)), 2.0, 2e-6, "norm after")
    # Small ones are left alone.
    small = [g * 1e-6 for g in grads]
    norm, params = compared(small, device, 2.0, **how)
    assert norm <= 2 and all(torch.equal(p.grad, g) for p, g in zip(params, small))


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_dtype_as_torch(dtype, device):
    random = torch.randn(10, 7, generator=generator(0))
    grads = [random.to(device, dtype), torch.ones(3, device=device, dtype=dtype)]
    wide = dtype in (torch.float64, torch.float32)
    by_torch = ga.backend().name == "torch"
    if wide or by_torch:
        compared(grads, device, 1.0)
    want = exact_norm(grads)
    norm = clip_grad_norm_(parameters(grads, device), 1.0)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(norm, want, 1e-6 if wide or not by_torch else 2**-8)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("norm_type", [0.1, 1, 2, 3.5, INF])
@pytest.mark.parametrize("value", [INF, -INF, NAN, 2.0])
@pytest.mark.parametrize("prefix", [True, False])
def test_error_if_nonfinite_as_torch(prefix, value, norm_type, device):
    for dtype, place in itertools.product((torch.float64, torch.float32), (1, slice(None))):
        g = torch.ones(10, dtype=dtype, device=device)
        g[place] = value
        grads = [torch.ones_like(g[:1]), g] if prefix else [g]
        mine, theirs, outcomes = torchs(grads, device), torchs(grads, device), []
        for function, ps in ((nn.utils.clip_grad_norm_, theirs), (clip_grad_norm_, mine)):
            try:
                norm = function(ps, 1, norm_type=norm_type, error_if_nonfinite=True)
                outcomes.append(float(norm))
            except RuntimeError as error:
                words = f"The total norm of order {float(norm_type)} for gradients"
                assert words in str(error), error
                outcomes.append(None)
        assert outcomes[1] == outcomes[0] or outcomes[1] == pytest.approx(outcomes[0], rel=1e-5)
        if outcomes[1] is None:
            assert unchanged([p.grad for p in mine], grads), "an error changed gradients"
        # Without the flag the same numbers go on.
        mine, theirs = torchs(grads, device), torchs(grads, device)
        got = clip_grad_norm_(mine, 1, norm_type=norm_type)
        want = nn.utils.clip_grad_norm_(theirs, 1, norm_type=norm_type)
        pairs = [(got, want), *((a.grad, b.grad) for a, b in zip(mine, theirs))]
        for a, b in pairs:
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_parameters_in_every_form(device, recwarn):
    def fresh():
        grads = [torch.tensor([3.0], device=device), None, torch.tensor([4.0], device=device)]
        return parameters(grads, device)

    for form in (
        list,
        iter,
        lambda ps: (p for p in ps),
        lambda ps: dict(enumerate(ps)).values(),
        nn.ParameterList,
    ):
        params = fresh()
        assert clip_grad_norm_(form(params), 1.0) == 5
        close(exact_norm([params[0].grad, params[2].grad]), 1.0)
        assert params[1].grad is None
    alone = fresh()[2]
    assert clip_grad_norm_(alone, 1.0) == 4, "a single tensor"
    close(alone.grad, 1.0)
    assert clip_grad_norm_(fresh()[1], 1.0) == 0
    assert not recwarn.list
    with pytest.warns(UserWarning, match="empty generator") as warned:
        assert clip_grad_norm_((p for p in []), 1.0) == 0
    assert warned[0].filename == __file__, "the warning does not point to the caller"


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_one_gradient_of_two_parameters(device):
    """As in torch: its elements count twice in the norm, and it is scaled twice."""
    shared = torch.tensor([3.0, 4.0], device=device)
    norm = clip_grad_norm_(parameters([shared, shared], device), 1.0)
    close(norm, math.sqrt(50))
    twin = torch.tensor([3.0, 4.0], device=device)
    # One tensor at a time: with foreach the threads of torch's kernel race for the tensor.
    nn.utils.clip_grad_norm_(parameters([twin, twin], device), 1.0, foreach=False)
    torch.testing.assert_close(shared, twin)


def test_one_gradient_of_two_parameters_is_scaled_by_one_launch_after_the_other():
    """In one launch two blocks would read and write the same elements."""
    with ga.use_backend("simt"), ga.checked():
        shared = torch.full((5000,), 0.5)
        clip_grad_norm_(parameters([shared, torch.ones(3), shared], "cpu"), 1.0)
    norm = math.sqrt(2 * 5000 * 0.25 + 3)
    torch.testing.assert_close(shared, torch.full((5000,), 0.5 / norm**2))


@pytest.mark.gpu
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_gpu_several_devices(norm_type, foreach):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there is {torch.cuda.device_count()}")
    grads = [torch.ones(10, 10, device=f"cuda:{i}") for i in (0, 1)] + [
        torch.ones(10, device=f"cuda:{i}") for i in (1, 0)
    ]
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads):
        p.grad = g
    reference = torchs([g.to("cuda:0") for g in grads], "cuda:0")
    got = clip_grad_norm_(params, 0.5, norm_type=norm_type, foreach=foreach)
    want = nn.utils.clip_grad_norm_(reference, 0.5, norm_type=norm_type, foreach=foreach)
    torch.testing.assert_close(got, want)
    for p, q in zip(params, reference):
        torch.testing.assert_close(p.grad.to("cuda:0"), q.grad)


@pytest.mark.gpu
def test_gpu_on_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there is {torch.cuda.device_count()}")
    g = torch.tensor([3.0, 4.0], device="cuda:1")
    p = nn.Parameter(torch.zeros_like(g))
    p.grad = g
    assert clip_grad_norm_(p, 1.0) == 5 and g.device.index == 1
    close(exact_norm([g]), 1.0)


class Wrapped(torch.Tensor):
    """A tensor subclass, whose memory is not ours to read."""


@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_torch_computes_for_what_our_kernels_do_not_take(device, monkeypatch):
    monkeypatch.setattr(clip, "_by_kernels", lambda *_: pytest.fail("our kernels were asked"))
    for g in (torch.tensor([3.0, 4.0]).double(), torch.tensor([3.0, 4.0]).as_subclass(Wrapped)):
        params = parameters([g])
        assert clip_grad_norm_(params, 1.0) == 5
        close(exact_norm([g.as_subclass(torch.Tensor)]), 1.0)
    assert clip_grad_norm_(
        parameters([torch.tensor([3.0, 4.0])]), 1.0, norm_type=3
    ) == pytest.approx(91 ** (1 / 3))


# ---- scopes and policies -------------------------------------------------------------------------


# Of the seven tensors of Blocks, in the order of the model.
GROUPS = {
    "global": [range(7)],
    "block": [(0, 1), (2, 3, 4), (5, 6)],
    "tensor": [(i,) for i in range(7)],
}
SCOPES = [(what, scope) for what in ("parameters", "arena") for scope in GROUPS]
SCOPES.remove(("parameters", "block"))


def target_of(what, grads, device):
    """(what is clipped, its gradients, their names), in the order of the model."""
    if what == "parameters":
        target = torchs(grads, device)
        names = [f"parameter {i} of shape {tuple(g.shape)}" for i, g in enumerate(grads)]
        return target, [p.grad for p in target], names
    arena = Arena(Blocks().to(device))
    fill(arena, grads)
    names = [s.name for s in reversed(arena.segments)]
    return arena, [*reversed(arena.gradients.views)], names


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF, 3.0])
def test_scopes_against_torch_per_group(norm_type, device):
    sizes = (10, 10, 1e-5, 1e-5, 1e-5, 1, 3)
    grads = [s * g for g, s in zip(filled(Blocks().to(device)), sizes)]
    for what, scope in SCOPES:
        twins = torchs(grads, device)
        target, now, _ = target_of(what, grads, device)
        found = clip_grads_(target, 2.0, norm_type, scope=scope)
        groups = GROUPS[scope] if what == "parameters" else GROUPS[scope][::-1]
        shape = () if scope == "global" else (len(groups),)
        assert found.norm.shape == found.scale.shape == found.first_nonfinite.shape == shape
        assert found.finite.all() and found.name() is None
        for norm, group in zip(found.norm.view(-1), groups, strict=True):
            members = [twins[i] for i in group if twins[i].numel()]
            want = nn.utils.clip_grad_norm_(members, 2.0, norm_type)
            torch.testing.assert_close(norm, want.to(norm), rtol=1e-5, atol=1e-7)
        for got, twin in zip(now, twins, strict=True):
            torch.testing.assert_close(got, twin.grad, rtol=1e-5, atol=1e-7)
        if scope != "global":
            clipped = sum(s.item() < 1 for s in found.scale)
            assert 0 < clipped < len(groups), "some were clipped, some were not"
        if what == "arena":
            check_arena(target)
            target.release()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("policy", get_args(OnNonfinite))
def test_policies_for_each_scope(policy, value, device):
    """One bad number: finite groups are clipped as ever, the others by the policy."""
    grads = filled(Blocks().to(device), size=10.0)
    grads[3][4000] = value  # the second block's second tensor
    for what, scope in SCOPES:
        target, now, names = target_of(what, grads, device)
        if policy == "raise":
            name = re.escape(names[3])
            message = f"The total norm of order 2.0 for gradients of {name} is non-finite"
            with pytest.raises(NonFiniteError, match=message):
                clip_grads_(target, 1.0, scope=scope, on_nonfinite=policy)
            assert unchanged(now, grads)
            continue
        found = clip_grads_(target, 1.0, scope=scope, on_nonfinite=policy)
        assert found.name() == names[3]
        assert (~found.finite).sum() == 1
        firsts = found.first_nonfinite.flatten().tolist()
        # The fourth of seven, from either end.
        assert sorted(firsts)[-1] == 3 and firsts.count(-1) == len(firsts) - 1
        for group in GROUPS[scope]:
            norm = exact_norm([grads[i] for i in group])
            for i in group:
                if 3 not in group:
                    want = grads[i] * min(1.0, 1 / (norm + EPS))
                    torch.testing.assert_close(now[i], want, rtol=1e-5, atol=1e-7)
                elif policy == "skip":
                    assert unchanged([now[i]], [grads[i]]), f"skip: tensor {i} was written"
                elif math.isnan(value):
                    assert now[i].isnan().all(), f"propagate: tensor {i} is not all NaN"
                else:
                    assert (now[i].isnan() | (now[i] == 0)).all(), f"propagate: tensor {i}"
                    assert now[i].isnan().sum() == (i == 3)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_by_default_a_bad_gradient_of_an_arena_writes_nothing(device):
    """Of parameters: torch's behaviour, in the table of edges."""
    grads = filled(Blocks().to(device))
    grads[0][0, 0] = NAN
    target, now, _ = target_of("arena", grads, device)
    clip_grads_(target, 1.0)
    assert unchanged(now, grads)
    target.release()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_the_first_of_several_bad_tensors_is_named(device):
    params = parameters(
        [
            torch.ones(5, device=device),
            torch.zeros(0, device=device),
            torch.full((9000,), NAN, device=device),
            torch.full((3,), INF, device=device),
        ],
        device,
    )
    found = clip_grads_(params, 1.0, on_nonfinite="skip")
    assert found.first_nonfinite == 2
    assert found.first_nonfinite.dtype == torch.int32
    assert found.name() == "parameter 2 of shape (9000,)"
    found = clip_grads_(params, 1.0, on_nonfinite="skip", scope="tensor")
    assert found.first_nonfinite.tolist() == [-1, -1, 2, 3]
    assert found.finite.tolist() == [True, True, False, False]


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_what_clipping_found(device):
    found = clip_grads_(parameters([torch.tensor([3.0, 4.0], device=device)], device), 1.0)
    assert repr(found).startswith("ClipState(global, 1 norm on c")
    kept = found.clone()
    found.values.zero_(), found.nonfinite_tensor.zero_()
    assert kept.norm == 5 and kept.first_nonfinite == -1 and kept.finite and kept.name() is None
    close(kept.clipped_norm, 1.0, 1e-6)
    close(kept.scale, 0.2, 1e-6)
    values = (kept.scale, kept.norm, kept.clipped_norm, kept.finite)
    assert all(t.device.type == torch.device(device).type and t.shape == () for t in values)


# ---- an arena ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_arenas_gradients_are_what_grad_is(dtype, device):
    """Sums, one of the user's own, one taken away; the sum goes on from what is clipped."""
    model = Blocks(dtype=dtype).to(device)
    # Whole numbers, exact in bf16.
    grads, arena = [g.round() for g in filled(model, size=4.0)], Arena(model)
    for _ in range(2):
        model(grads).backward()
    params = list(model.parameters())
    params[0].grad, params[2].grad = torch.full_like(params[0], 3.0), None
    want = [2 * g.float() for g in grads]
    want[0], want[2] = torch.full_like(want[0], 3.0), torch.zeros_like(want[2])
    found = clip_grads_(arena, 1.0)
    close(found.norm, exact_norm(want))
    model(grads).backward()
    for p, w, g in zip(params, want, grads):
        torch.testing.assert_close(p.grad.float(), w * found.scale + g.float())
    # The same through the parameters.
    want = exact_norm([p.grad for p in params])
    close(clip_grad_norm_(arena.parameters(), 1.0), want)
    close(clip_grads_(arena, 1e9).norm, 1.0, 1e-5)
    arena.release()


# ---- bad input -----------------------------------------------------------------------------------


@contextlib.contextmanager
def refused(match, *tensors):
    before = [bits(t) for t in tensors]
    with pytest.raises(ArgumentError, match=match):
        yield
    for i, (t, b) in enumerate(zip(tensors, before)):
        assert torch.equal(bits(t), b), f"tensor {i} was changed"


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(
    "bad, message",
    [
        ({"max_norm": -1.0}, "max_norm is -1.0; expected a number of 0 or more"),
        ({"max_norm": NAN}, "max_norm is nan"),
        ({"max_norm": "much"}, "max_norm is 'much'"),
        ({"max_norm": None}, "max_norm is None; expected a number"),
        ({"scope": "layer"}, "scope is 'layer'; expected one of global, block, tensor"),
        (
            {"on_nonfinite": "ignore"},
            "on_nonfinite is 'ignore'; expected one of propagate, skip, raise",
        ),
    ],
)
def test_bad_arguments(bad, message, device):
    g = torch.tensor([3.0, 4.0], device=device)
    model = Blocks().to(device)
    arena = Arena(model)
    fill(arena, filled(model))
    for target in (parameters([g], device), arena):
        with refused(message, g, arena.grads):
            clip_grads_(target, **{"max_norm": 1.0, **bad})
    arena.release()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_gradients_that_are_sparse_or_complex(device):
    good = torch.tensor([3.0, 4.0], device=device)
    sparse = nn.Embedding(5, 3, sparse=True).to(device)
    sparse(torch.tensor([1, 2], device=device)).sum().backward()
    (p,) = parameters([good], device)
    message = (
        r"the gradient of parameter 1 of shape \(5, 3\) has layout torch.sparse_coo; expected a "
        "dense, real tensor"
    )
    with refused(message, good):
        clip_grad_norm_([p, sparse.weight], 1.0)
    assert sparse.weight.grad.to_dense().sum() == 6
    (q,) = parameters([torch.tensor([1 + 2j], device=device)], device)
    message = (
        r"the gradient of parameter 1 of shape \(1,\) is torch.complex64; expected a dense, real "
        "tensor"
    )
    with refused(message, good):
        clip_grad_norm_([p, q], 1.0)
    with refused("scope='block' needs an arena", good):
        clip_grad_norm_([p], 1.0, scope="block")


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_an_arena_whose_parameters_were_moved(device):
    model = Blocks().to(device)
    arena = Arena(model)
    fill(arena, filled(model, size=9.0))
    model.double()
    with refused("is no longer a view of the arena", arena.grads):
        clip_grad_norm_(arena, 1.0)
    arena.release()


# ---- nothing waits -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
@pytest.mark.parametrize("policy", ["propagate", "skip"])
@pytest.mark.parametrize("scope", ["global", "block", "tensor"])
def test_gpu_nothing_waits(scope, policy, norm_type):
    model = Blocks().cuda()
    arena = Arena(model)
    fill(arena, filled(model))
    params = parameters(
        [
            *filled(model),
            torch.randn(40, 12, device="cuda")[:, 2:7],
            torch.randn(50, device="cuda").bfloat16(),
        ],
        "cuda",
    )
    # The first pass compiles and loads.
    for check in (contextlib.nullcontext, no_waiting):
        with check():
            clip_grads_(arena, 1.0, norm_type, scope=scope, on_nonfinite=policy)
            if scope != "block":
                clip_grad_norm_(params, 1.0, norm_type, scope=scope, on_nonfinite=policy)
    arena.release()
