"""Gradients of LoRA's factors in one launch: float64's values, deterministic sums, and torch's own
products wherever the kernel does not fit."""

import contextlib

import pytest
import torch
from helpers import CUDA, KERNELS, NAN, differ, generator, same

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.ops import WeightGradient, add_lora_gradients_
from gpuaccel.ops import lora_gradients as module

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
on_kernels = pytest.mark.parametrize("device", KERNELS, indirect=True)
on_simt = pytest.mark.parametrize("device", ["simt"], indirect=True)


def normal(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=generator(seed)).to(device, dtype)


def gradients(N, widths, ranks, dtype, device="cpu", seed=0):
    """A dA and a dB of each width and rank, in turn, of column slices.

    Every third one overwrites its acc, which is NaN."""
    wide = normal(N, 8 + sum(widths), dtype=dtype, device=device, seed=seed)[:, 8:]
    thin = normal(N, sum(ranks), dtype=dtype, device=device, seed=seed + 1)
    result = []
    for i, (w, r) in enumerate(zip(wide.split(widths, 1), thin.split(ranks, 1))):
        dy, x = (w, r) if i % 2 else (r, w)
        acc = normal(dy.shape[1], x.shape[1], device=device, seed=seed + 2 + i)
        if i % 3 == 2:
            acc.fill_(NAN)
        result.append(WeightGradient(acc, dy, x, 1 - 0.75 * i, i % 3 == 2))
    return result


def exact(gradient):
    """What is left in acc, in float64, and of what size the terms of each element are."""
    acc, dy, x, alpha, overwrite = gradient
    acc, dy, x = (t.detach().cpu().double() for t in (acc, dy, x))
    before = torch.zeros_like(acc) if overwrite else acc
    size = before.abs() + abs(alpha) * (dy.abs().t() @ x.abs())
    return before + alpha * (dy.t() @ x), size


def close(gradient, wanted, what):
    want, size = wanted
    got = gradient.acc.cpu().double()
    # Sums of 1000 terms in 64 parts.
    assert ((got - want).abs() <= 2e-6 * size).all(), f"{what}: {differ(got, want)}"


def copies(some):
    return [gradient._replace(acc=gradient.acc.clone()) for gradient in some]


@pytest.fixture
def launches(monkeypatch):
    """Grows by the number of products of each launch."""
    sizes, launch = [], module._launch

    def note(kernel, some):
        sizes.append(len(some))
        launch(kernel, some)

    monkeypatch.setattr(module, "_launch", note)
    return sizes


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [1, 3, 127, 129, 1000])
@on_kernels
def test_sums_are_those_of_float64(device, N, dtype, checked, launches):
    if checked and device == "cuda":
        pytest.skip("the checks are those of the CPU")
    # Less than a thread's columns, tiles that are cut off, many tiles; ranks with and without a
    # rest, in rows that are aligned and in rows that are not.
    widths = [4, 36, 32, 340] if dtype == torch.float32 else [8, 40, 32, 336]
    with ga.checked(checked) if device == "cpu" else contextlib.nullcontext():
        for ranks in ([3, 16, 8, 1], [3, 4, 1, 8]):
            some = gradients(N, widths, ranks, dtype, device, seed=N)
            wanted = [exact(gradient) for gradient in some]
            add_lora_gradients_(some)
            for gradient, want in zip(some, wanted):
                close(gradient, want, f"{tuple(gradient.acc.shape)} of {N} tokens")
    assert launches == [4, 4]


@pytest.mark.parametrize("dtype", DTYPES)
@on_kernels
def test_a_sum_depends_neither_on_the_launch_nor_on_the_other_products(device, dtype):
    some = gradients(300, [64, 40, 32, 16], [8, 3, 16, 5], dtype, device)
    want = copies(some)
    add_lora_gradients_(want)
    again, reverse, alone = copies(some), copies(some), copies(some)
    add_lora_gradients_(again)
    add_lora_gradients_(reverse[::-1])
    for gradient in alone:
        add_lora_gradients_([gradient])
    # Thin rows that begin elsewhere are read in another way.
    moved = [
        gradient._replace(**{name: torch.cat([t[:, :1], t], 1)[:, 1:]})
        for gradient in copies(some)
        for name, t in (("dy", gradient.dy), ("x", gradient.x))
        if t.shape[1] == min(gradient.acc.shape)
    ]
    add_lora_gradients_(moved)
    for what, others in (
        ("again", again),
        ("reverse", reverse),
        ("alone", alone),
        ("moved", moved),
    ):
        for got, gradient in zip(others, want, strict=True):
            same(got.acc, gradient.acc, what)


@on_kernels
def test_more_products_than_a_launch_takes_and_two_dtypes(device, launches):
    some = gradients(20, [32] * 19, [4] * 19, torch.float32, device)
    some += gradients(20, [32] * 3, [4] * 3, torch.bfloat16, device)
    wanted = [exact(gradient) for gradient in some]
    versions = [gradient.acc._version for gradient in some]
    add_lora_gradients_(some)
    assert launches == [8, 8, 3, 3]
    for i, (gradient, want) in enumerate(zip(some, wanted)):
        close(gradient, want, f"product {i}")
    assert all(gradient.acc._version > before for gradient, before in zip(some, versions))


@on_kernels
def test_products_with_one_acc_are_added_one_after_the_other(device, launches):
    """A launch could lose one of the two."""
    some = gradients(20, [32, 32, 32], [4, 4, 4], torch.float32, device)
    acc = some[0].acc
    some[2] = some[2]._replace(acc=acc, overwrite=False)
    other = exact(some[1])
    (first, size), (second, more) = exact(some[0]), exact(some[2])
    before = acc.cpu().double()
    add_lora_gradients_(some)
    assert launches == [1]
    close(some[0], (first + second - before, size + more), "both")
    close(some[1], other, "the other one")


@on_simt
@pytest.mark.parametrize("ranks, registers", [([3, 8], 8), ([8, 9], 16)])
def test_ranks_up_to_8_take_the_kernel_with_fewer_registers(device, ranks, registers, monkeypatch):
    kernels, launch = [], module._launch
    monkeypatch.setattr(module, "_launch", lambda k, some: (kernels.append(k), launch(k, some)))
    add_lora_gradients_(gradients(5, [16, 32], ranks, torch.float32, device))
    assert [kernel.defines["RANKS"] for kernel in kernels] == [str(registers)]


# ---- where the kernel does not fit ---------------------------------------------------------------


def strided(t):
    return torch.stack([t, t], -1)[..., 0]


def shifted(t):
    """The same numbers, one element behind an aligned address."""
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


BF16 = torch.bfloat16
OTHERS = {
    "rank 17": lambda: (normal(9, 17), normal(9, 32)),
    "a width that is no whole group": lambda: (normal(9, 4, dtype=BF16), normal(9, 36, dtype=BF16)),
    "rows that are not aligned": lambda: (normal(9, 4), normal(9, 34)[:, :32]),
    "a first row that is not aligned": lambda: (shifted(normal(9, 32)), normal(9, 4)),
    "columns that are apart": lambda: (strided(normal(9, 32)), normal(9, 4)),
    "thin columns that are apart": lambda: (normal(9, 32), strided(normal(9, 4))),
    "expanded rows": lambda: (normal(9, 1).expand(9, 32), normal(9, 4)),
    "float64": lambda: (normal(9, 32).double(), normal(9, 4).double()),
    "two dtypes": lambda: (normal(9, 32, dtype=BF16), normal(9, 4)),
    "negated numbers": lambda: (torch._neg_view(normal(9, 32)), normal(9, 4)),
    "no tokens": lambda: (normal(0, 32), normal(0, 4)),
}


@pytest.mark.parametrize("case", OTHERS)
@on_simt
def test_what_the_kernel_does_not_take_is_added_by_torch(device, case, launches):
    dy, x = OTHERS[case]()
    acc = normal(dy.shape[1], x.shape[1], seed=7)
    gradient = WeightGradient(acc, dy, x, 2.0)
    taken = gradients(max(len(x), 1), [32], [4], torch.float32)[0]
    want = exact(gradient)
    add_lora_gradients_([gradient] if case == "no tokens" else [taken, gradient])
    of_taken = [] if case == "no tokens" else [1]
    assert launches == of_taken
    close(gradient, want, case)
    ones = WeightGradient(torch.full_like(acc, NAN), dy, x, 2.0, True)
    want = exact(ones)
    add_lora_gradients_([ones])
    assert launches == of_taken
    close(ones, want, f"{case}, overwritten")


@on_simt
def test_many_multiply_adds_are_torchs(device, launches, monkeypatch):
    some = gradients(30, [32, 40], [4, 16], torch.float32)
    monkeypatch.setattr(module, "MAX_MULTIPLY_ADDS", 30 * (32 * 4 + 40 * 16))
    add_lora_gradients_(copies(some))
    assert launches == [2]
    monkeypatch.setattr(module, "MAX_MULTIPLY_ADDS", 30 * (32 * 4 + 40 * 16) - 1)
    wanted = [exact(gradient) for gradient in some]
    add_lora_gradients_(some)
    assert launches == [2]
    for gradient, want in zip(some, wanted):
        close(gradient, want, str(tuple(gradient.acc.shape)))


@on_simt
def test_a_sum_with_gaps_and_the_backend_torch_are_torchs(device, launches):
    some = gradients(9, [32, 32], [4, 4], torch.float32)
    some[0] = some[0]._replace(acc=strided(some[0].acc))
    wanted = [exact(gradient) for gradient in some]
    with ga.use_backend("torch"):
        add_lora_gradients_(some[1:])
    add_lora_gradients_(some[:1])
    assert launches == []
    add_lora_gradients_(copies(some[1:]))
    assert launches == [1]
    for gradient, want in zip(some, wanted):
        close(gradient, want, "sum")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(acc=torch.zeros(32, 4)), r"acc has shape \(32, 4\), dy \(9, 4\) and x \(9, 32\)"),
        (dict(dy=torch.zeros(8, 4)), r"dy \(8, 4\) and x \(9, 32\); expected \(out, in\), \(N, "),
        (dict(dy=torch.zeros(9)), r"dy \(9,\)"),
        (dict(acc=torch.zeros(4, 32).double()), "acc is torch.float64 on cpu"),
        (dict(x=torch.zeros(9, 32, device="meta")), "x on meta; expected a torch.float32 acc, and"),
    ],
)
@on_simt
def test_tensors_that_do_not_fit_are_refused_with_nothing_changed(device, change, message):
    good, bad = gradients(9, [32, 32], [4, 4], torch.float32)
    before = good.acc.clone()
    bad = good._replace(acc=bad.acc.t().contiguous())._replace(**change)
    with pytest.raises(ArgumentError, match=message):
        add_lora_gradients_([good, bad])
    same(good.acc, before)


@on_simt
def test_all_products_have_one_number_of_tokens(device):
    some = [gradients(N, [32], [4], torch.float32)[0] for N in (9, 10)]
    with pytest.raises(ArgumentError, match="the same N for all products"):
        add_lora_gradients_(some)


# ---- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_stay_in_registers(dtype, ranks, arch):
    cost = module.lora_kernel("lora_gradients_v2", dtype, ranks).resources(arch)
    assert (cost.stack_bytes, cost.spill_store_bytes, cost.spill_load_bytes) == (0, 0, 0), cost
    # 256 threads share the 65,536 registers of an SM.
    assert cost.registers <= 255 and cost.shared_bytes <= 32 * 1024


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_a_replayed_launch_adds_once_more(device):
    some = gradients(300, [64, 64], [16, 16], torch.bfloat16, device)
    want = copies(some)
    add_lora_gradients_(copies(some))  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_lora_gradients_(some)
    for _ in range(3):
        graph.replay()
        add_lora_gradients_(want)
    for gradient, other in zip(some, want):
        same(gradient.acc, other.acc)
