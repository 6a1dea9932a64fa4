"""Accumulation: `.grad` against the float64 sum of the same micro-batches' gradients."""

import contextlib
import copy
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    CUDA,
    EVERYWHERE,
    NAN,
    Blocks,
    RaisesInBackward,
    differ,
    generator,
    needs_free_gpu_memory,
    no_waiting,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpuaccel as ga
from gpuaccel.backends import takes
from gpuaccel.compiler import launch as launches
from gpuaccel.errors import ArgumentError
from gpuaccel.ops.accumulate import (
    MAX_TENSORS,
    accumulate_,
    accumulate_each_,
    accumulate_kernel,
)
from gpuaccel.optim import AdamW, GradientListener, Lion, Products
from gpuaccel.optim import gradients as gradients_module
from gpuaccel.optim.arena import Arena
from gpuaccel.training.step import TrainStep, token_loss

DEVICES = ["cpu", CUDA]
ADDING = ["autograd", "products"]
few = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Net(nn.Module):
    """Embedding, blocks with biases, a norm, a head (tied or not), a parameter without gradient."""

    def __init__(self, tied=False, V=13, H=8, layers=3, checkpointing=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, H)
        self.blocks = nn.ModuleList(nn.Linear(H, H) for _ in range(layers))
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)
        self.unused = nn.Parameter(torch.full((3, 2), 5.0))
        self.checkpointing = checkpointing
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x)
        for block in self.blocks:

            def part(h, block=block):
                return h + torch.tanh(block(h))

            if self.checkpointing is None:
                h = part(h)
            else:
                h = checkpoint(part, h, use_reentrant=self.checkpointing)
        return self.head(self.norm(h))


def loss_of(model, x):
    return F.cross_entropy(model(x).float().flatten(0, 1), x.flatten(), reduction="sum")


def micro_batches(n, device="cpu", V=13, seed=1):
    random = generator(seed)
    return [torch.randint(0, V, (2, 1 + i % 4), generator=random).to(device) for i in range(n)]


def exact_sum(model, micros, loss=loss_of):
    """name -> float64 sum of torch's gradients of each micro-batch, in the parameters' dtype."""
    total = {}
    for micro in micros:
        model.zero_grad()
        loss(model, micro).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, 0) + p.grad.double()
    model.zero_grad()
    return total


class Sums:
    """An arena of a model, whose slices are stale, and a backward to add into them."""

    def __init__(self, model, adding):
        self.arena = Arena(model)
        self.products = Products(self.arena) if adding == "products" else None
        for view in self.arena.gradients.views:
            view.fill_(NAN)

    def backward(self, loss, *args):
        if self.products is not None:
            self.products.begin_backward()
        loss.backward(*args)
        if self.products is not None:
            self.products.end_backward()

    def check(self, exact, bound):
        """Each `.grad` is within `bound` of float64, relative to its norm, and in its slice."""
        arena = self.arena
        for s, p, view in zip(arena.segments, arena.module_parameters, arena.gradients.views):
            if s.name not in exact:
                assert p.grad is None, f"{s.name} got no gradient, yet .grad is there"
                continue
            assert p.grad.data_ptr() == view.data_ptr() and p.grad.dtype == torch.float32, s.name
            want = exact[s.name]
            error = ((p.grad.double() - want).norm() / want.norm().clamp(min=1e-30)).item()
            assert error <= bound, f"{s.name} is {error:.3g} off: {differ(p.grad, want)}"


@contextlib.contextmanager
def accumulating(model, adding):
    sums = Sums(model, adding)
    yield sums
    sums.arena.release()


def check_sums(model, adding, micros, exact, bound, loss=loss_of):
    with accumulating(model, adding) as sums:
        for x in micros:
            sums.backward(loss(model, x))
        sums.check(exact, bound)


# ---- the sum -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adding", ADDING)
def test_the_sum_is_fp32(adding, dtype, device):
    """autograd rounds each bf16 gradient once, as torch; products round other things than torch."""
    model, micros = Net().to(device, dtype), micro_batches(16, device)
    exact = exact_sum(copy.deepcopy(model), micros)
    rounded = dtype == torch.bfloat16 and adding == "products"
    check_sums(model, adding, micros, exact, 2**-6 if rounded else 1e-6)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_bf16_product_is_added_unrounded(device):
    """Against the float64 product of the same bf16 factors, which autograd would round to bf16."""
    torch.manual_seed(0)
    model = nn.Linear(24, 40, bias=False).to(device, torch.bfloat16)
    pairs = [[torch.randn(3, 5, n).to(device).bfloat16() for n in (24, 40)] for _ in range(16)]
    exact = sum(dy.double().flatten(0, 1).T @ x.double().flatten(0, 1) for x, dy in pairs)
    with accumulating(model, "products") as sums:
        for x, dy in pairs:
            sums.backward(model(x), dy)
        sums.check({"weight": exact}, 1e-6)


SHAPES = st.lists(
    st.lists(st.sampled_from([1, 1, 2, 3, 7, 65]), max_size=3).map(tuple)
    | st.just((0,))
    | st.just((3, 0))
    | st.just((4097,)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@few
@given(shapes=SHAPES, n=st.integers(1, 6), seed=st.integers(0, 99), data=st.data())
def test_any_shapes_dtypes_and_missing_gradients_sum_exactly(device, shapes, n, seed, data):
    """Small whole numbers: every sum is exact."""
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in shapes]
    present = [[data.draw(st.integers(0, 3)) > 0 for _ in shapes] for _ in range(n)]
    random = generator(seed)
    model = Blocks([(shape,) for shape in shapes]).to(device)
    for block, dtype in zip(model.blocks, dtypes):
        block.to(dtype)
    want = [None] * len(shapes)
    with accumulating(model, "autograd") as sums:
        for row in present:
            grads = [
                torch.randint(-8, 9, s, generator=random).float().to(device) if there else None
                for s, there in zip(shapes, row)
            ]
            if any(row):
                model(grads).backward()
            want = [w if g is None else g if w is None else w + g for w, g in zip(want, grads)]
        for (name, p), w in zip(model.named_parameters(), want):
            assert (p.grad is None) == (w is None), name
            assert w is None or torch.equal(p.grad, w), f"{name}: {differ(p.grad, w)}"
        used = torch.zeros(sums.arena.numel, dtype=torch.bool)
        for s in sums.arena.segments:
            used[s.offset : s.offset + s.numel] = True
        assert not sums.arena.grads.cpu()[~used].any(), "padding between tensors was written"


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("size", [1, 2**30])
def test_fresh_gradients_of_many_tensors_are_copied_at_once_or_when_many_bytes_wait(
    size, device, monkeypatch
):
    monkeypatch.setattr(gradients_module, "MAX_FRESH_BYTES", size)
    params = [nn.Parameter(torch.randn(1 + i % 50)) for i in range(1000)]
    model = nn.ParameterList(params).to(device)
    with accumulating(model, "autograd") as sums:
        calls = []
        copied = torch._foreach_copy_
        monkeypatch.setattr(torch, "_foreach_copy_", lambda *a: calls.append(1) or copied(*a))
        for _ in range(2):
            sum(p.sum() * (i % 7) for i, p in enumerate(model)).backward()
        assert len(calls) == (1000 if size == 1 else 1)
        sums.check({str(i): torch.full_like(p, 2 * (i % 7)) for i, p in enumerate(model)}, 0)


class Listens(GradientListener):
    def __init__(self, arena):
        self.arena = arena
        self.complete, self.early = {}, set()

    def gradient_complete(self, i):
        assert i not in self.complete
        self.complete[i] = self.arena.gradients[i].clone()

    def product_added(self, tensors):
        self.early |= {i for i, complete in tensors.items() if complete}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adding", ADDING)
def test_a_listener_is_told_of_each_gradient_once_when_it_is_complete(adding, tied):
    model = Net(tied)
    with accumulating(model, adding) as sums:
        for k, x in enumerate(micro_batches(3)):
            listener = Listens(sums.arena)
            # Autograd adds to this weight as well, behind the product.
            loss = model.blocks[0].weight.sum() + loss_of(model, x)
            with sums.arena.gradients.listening(listener):
                sums.backward(loss)
            trained = [i for i, s in enumerate(sums.arena.segments) if s.name != "unused"]
            assert sorted(listener.complete) == trained
            for i, grad in listener.complete.items():
                assert torch.equal(grad, sums.arena.module_parameters[i].grad)
            # How many products a tensor gets is known from the second backward on. Nothing runs
            # behind an embedding.
            linears = ["blocks.1.weight", "blocks.2.weight"] + ["head.weight"] * (not tied)
            expected = linears if adding == "products" and k else []
            early = [sums.arena.segments[i].name for i in sorted(listener.early, reverse=True)]
            assert early == expected


# ---- stale slices, and what cannot be a sum ------------------------------------------------------


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [AdamW, Lion])
def test_a_stale_slice_is_neither_used_nor_measured_nor_clipped(make, dtype, device):
    model = Net().to(device, dtype)
    with accumulating(model, "autograd") as sums:
        arena = sums.arena
        opt = make(arena, lr=0.1, max_norm=1.0)
        for missing in (["unused"], ["unused", "blocks.1.weight", "norm.bias"]):
            opt.zero_grad()
            loss_of(model, micro_batches(1, device)[0]).backward()
            for s, p, view in zip(arena.segments, arena.module_parameters, arena.gradients.views):
                if s.name in missing:
                    p.grad = None
                    view.fill_(NAN)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            norm = torch.stack(
                [p.grad.norm() for p in arena.module_parameters if p.grad is not None]
            ).norm()
            torch.testing.assert_close(ga.clip_grad_norm_(arena, 1e9), norm)
            opt.step()
            torch.testing.assert_close(opt.clip_state.norm, norm)
            for name, p in model.named_parameters():
                assert p.isfinite().all() and torch.equal(p, before[name]) == (name in missing)
            assert opt.skipped == 0


def test_a_gradient_that_does_not_fit_is_named_before_anything_changes():
    model = Net()
    with accumulating(model, "autograd") as sums:
        opt = ga.AdamW(sums.arena)
        loss_of(model, micro_batches(1)[0]).backward()
        weights = sums.arena.weights.clone()
        for bad in (torch.ones(3), torch.ones(8, 8).to_sparse()):
            weight = model.blocks[0].weight
            if bad.is_sparse:
                weight.grad = bad
            else:
                weight.grad.data = bad
            for use in (
                opt.step,
                sums.arena.gradients.collect,
                lambda: ga.clip_grad_norm_(sums.arena, 1.0),
            ):
                with pytest.raises(ArgumentError, match=r"blocks\.0\.weight"):
                    use()
        assert torch.equal(sums.arena.weights, weights)
        opt.zero_grad()
        with pytest.raises(ArgumentError, match=r"embedding\.weight has layout torch.sparse_coo"):
            F.embedding(torch.tensor([1]), model.embedding.weight, sparse=True).sum().backward()
        opt.zero_grad()
        exact = exact_sum(copy.deepcopy(model), micro_batches(1))
        loss_of(model, micro_batches(1)[0]).backward()
        sums.check(exact, 1e-6)


# ---- what users do besides -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"checkpointing": True}, {"checkpointing": False}, {"tied": True}], ids=str
)
@pytest.mark.parametrize("adding", ADDING)
def test_activation_checkpointing_and_tied_weights(adding, options):
    micros = micro_batches(4)
    exact = exact_sum(Net(tied=options.get("tied", False)), micros)
    check_sums(Net(**options), adding, micros, exact, 1e-6)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("adding", ADDING)
def test_autocast(adding, device):
    def loss(model, x):
        with torch.autocast(device, torch.bfloat16):
            return loss_of(model, x)

    model, micros = Net().to(device), micro_batches(4, device)
    exact = exact_sum(copy.deepcopy(model), micros, loss)
    check_sums(model, adding, micros, exact, 2**-6 if adding == "products" else 1e-6, loss)


def half_way(model, x):
    h = model.blocks[1](RaisesInBackward.apply(model.blocks[0](model.embedding(x))))
    return model.head(model.norm(h)).sum()


STEPS = [{}, {"deterministic": True}]


@pytest.mark.parametrize("options", STEPS)
def test_train_step_drops_the_gradients_of_a_backward_that_raises(options):
    x = torch.randint(0, 13, (4, 3))

    def loss(model, micro):
        if micro[0].shape[1] == 2:
            return half_way(model, micro[0]), torch.tensor(1)
        return token_loss(model, micro)

    weights = []
    for raises in (True, False):
        model = Net()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        with TrainStep(model, opt, loss, micro_batches=2, **options) as step:
            if raises:
                with pytest.raises(ZeroDivisionError):
                    step((x[:, :2], x[:, :2]))
                assert step.count == 0
            step((x, x))
        weights.append(model.head.weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize("options", STEPS)
def test_unequal_micro_batches_give_the_full_batchs_gradient_and_a_mean_of_means_does_not(options):
    targets = torch.randint(0, 13, (8, 6), generator=generator(0))
    for row in range(8):
        targets[row, 1 + row % 6 :] = -100  # 1 to 6 valid tokens per sequence
    batch = torch.randint(0, 13, (8, 6), generator=generator(1)), targets

    def rows(model, micro):
        total, _ = token_loss(model, micro)
        return total, len(micro[0])

    def mean(model, micro):
        total, tokens = token_loss(model, micro)
        return total / tokens

    def update(parts, loss_fn=token_loss):
        model = Net()
        before = model.head.weight.detach().clone()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        with TrainStep(model, opt, loss_fn, micro_batches=parts, **options) as step:
            out = step(batch)
            assert step.count == 1
        count = {token_loss: (targets != -100).sum(), rows: 8, mean: None}[loss_fn]
        assert out.tokens == count
        return before - model.head.weight.detach()

    full = update(1)
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(update(8), full, **close)
    torch.testing.assert_close(update(8, rows), full * (targets != -100).sum() / 8, **close)
    assert (update(8, mean) - full).norm() > 0.01 * full.norm()


@pytest.mark.slow
@pytest.mark.parametrize("adding, compiler", [("autograd", "aot_eager"), ("products", "inductor")])
def test_torch_compile(adding, compiler):
    if compiler == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler for the CPU, and there is none")
    torch._dynamo.reset()
    model, micros = Net(layers=1), [torch.randint(0, 13, (2, 4))] * 3
    exact = exact_sum(copy.deepcopy(model), micros)
    compiled = torch.compile(loss_of, backend=compiler, dynamic=False)
    check_sums(model, adding, micros, exact, 1e-6, compiled)
    torch._dynamo.reset()


# ---- layers whose products add -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_fused_product(dtype):
    acc = torch.zeros(4, 3)
    dy = torch.randn(2, 5, 4, dtype=dtype)
    x = torch.randn(2, 5, 3, dtype=dtype)
    torch.library.opcheck(torch.ops.gpuaccel.add_weight_gradient_.default, (acc, dy, x))


# ---- accumulate_ and errors ----------------------------------------------------------------------


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@few
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 5, 64, 129]), max_size=3).map(tuple),
    bf16=st.booleans(),
    a0=st.integers(0, 3),
    g0=st.integers(0, 7),
    transpose=st.booleans(),
    seed=st.integers(0, 99),
)
def test_accumulate_is_bit_equal_to_torchs_add_at_any_alignment(
    device, shape, bf16, a0, g0, transpose, seed
):
    generator = torch.Generator().manual_seed(seed)
    n = math.prod(shape)
    acc = torch.randn(n + 8, generator=generator).to(device)[a0 : a0 + n].view(shape)
    grad = torch.randn(n + 8, generator=generator).to(
        device, torch.bfloat16 if bf16 else torch.float32
    )[g0 : g0 + n]
    grad = (
        grad.view(shape[::-1]).permute(tuple(range(len(shape))[::-1]))
        if transpose
        else grad.view(shape)
    )
    want, version = acc.clone().add_(grad), acc._version
    assert accumulate_(acc, grad) is acc
    assert torch.equal(acc, want), differ(acc, want)
    assert not n or acc._version > version, "autograd has not seen the addition"


@pytest.mark.parametrize("n, blocks", [(4096, 4), (5000, 5), (4099, 17)])
def test_accumulate_launches_as_many_blocks_as_elements_fill(n, blocks, monkeypatch):
    launched = []
    monkeypatch.setattr(
        launches, "recorders", [lambda launch, *_: launched.append(launch.shape[0])]
    )
    with ga.use_backend("simt"):
        accumulate_(torch.zeros(n), torch.ones(n))
    assert launched == [blocks]


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_many_tensors_are_added_in_one_launch_as_torch_adds_each(device, monkeypatch):
    shapes = [(1 + i % 50, 1 + i % 3) for i in range(2 * MAX_TENSORS)] + [(90, 100), (0,), (4096,)]
    accs = [torch.randn(shape, device=device) for shape in shapes]
    grads = [
        torch.randn(shape[::-1], device=device).t()
        if len(shape) > 1
        else torch.randn(shape, device=device)
        for shape in shapes
    ]
    grads = [g.bfloat16() if i % 2 else g for i, g in enumerate(grads)]
    wants = [acc + grad for acc, grad in zip(accs, grads)]
    versions = [acc._version for acc in accs]
    launched = []
    monkeypatch.setattr(launches, "recorders", [lambda launch, *_: launched.append(launch)])
    accumulate_each_(accs, grads)
    assert all(torch.equal(acc, want) for acc, want in zip(accs, wants))
    assert all(acc._version > version for acc, version in zip(accs, versions))
    # 182 tensors in fp32, 180 in bf16. Launches on the CPU are recorded.
    if accs[0].is_cpu and takes(accs[0].device):
        assert len(launched) == 3


def test_accumulate_refuses_and_changes_nothing():
    acc, grad = torch.ones(4, 6), torch.ones(4, 6)
    wide = torch.ones(8, 6)
    bad = [
        (acc, grad.double(), "float64.*expected torch.float32 or torch.bfloat16"),
        (acc, grad.half(), "float16"),
        (acc, grad.to(torch.complex64), "complex64"),
        (acc, torch.ones(6, 4), r"shape \(6, 4\); expected \(4, 6\)"),
        (acc, grad.to_sparse(), "layout torch.sparse_coo"),
        (acc, grad.to("meta"), "on meta; expected cpu"),
        (acc, 1.0, "is a float"),
        (acc.bfloat16(), grad, "256 \\+ 1 = 256"),
        (torch.ones(6, 4).t(), grad, "strides"),
        (wide[::2], grad, "contiguous"),
        (torch.ones(1, 6).expand(4, 6), grad, "contiguous"),
        (acc, acc, "overlap"),
        (wide[:4], wide[2:6], "overlap"),
        (torch.ones(4, 6, requires_grad=True), grad, "requires grad"),
        (grad.to_sparse(), grad, "acc is torch.sparse_coo"),
        ([1.0], grad, "acc is list"),
    ]
    for a, g, message in bad:
        with pytest.raises(ArgumentError, match=message):
            accumulate_(a, g)
    assert acc.eq(1).all() and grad.eq(1).all() and wide.eq(1).all()


def test_neighbours_in_one_buffer_do_not_overlap():
    both = torch.ones(8)
    accumulate_(both[:4], both[4:])
    accumulate_(both[4:], both[:4])
    assert both.tolist() == [2.0] * 4 + [3.0] * 4


# ---- the kernels, and what only a GPU has --------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("version, blocks", [("accumulate_v1", None), ("accumulate_v2", 4096)])
def test_gpu_more_than_2_to_the_31_elements(version, blocks):
    # 6 bytes an element.
    needs_free_gpu_memory(14 * 10**9)
    n = 2**31 + 4096 + (1 if blocks is None else 0)
    # Whole numbers up to 250 are exact in bf16.
    grad = torch.arange(251, device="cuda").bfloat16().repeat(-(-n // 251))[:n]
    acc = torch.zeros(n, device="cuda")
    accumulate_kernel(version, torch.bfloat16)[blocks or -(-n // 256), 256](acc, grad, n)
    for start in range(0, n, 2**26):
        assert torch.equal(acc[start : start + 2**26], grad[start : start + 2**26].float()), (
            f"wrong between {start} and {start + 2**26}"
        )
    del acc, grad
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", STEPS)
def test_gpu_a_step_neither_waits_nor_downloads(options, dtype):
    from gpuaccel.measure import ledger
    from gpuaccel.training.models import Transformer, preset

    model = Transformer(preset("tiny")).to("cuda", dtype)
    with TrainStep(model, micro_batches=4, max_norm=1.0, **options) as step:
        batch = tuple(torch.randint(0, 256, (8, 128), device="cuda") for _ in range(2))
        for _ in range(2):
            step(batch)  # compiles, loads, allocates
        with no_waiting():
            step(batch)
        with ledger("step") as row:
            step(batch)
        assert row.syncs == 0, f"{row.syncs} synchronisations\n{row}"
        assert row.bytes("DtoH") == 0, f"downloads: {row.copies}"
