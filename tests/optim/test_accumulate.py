"""Accumulation: four modes against the float64 sum of the same micro-batches' gradients."""

import copy
import math
import pickle
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import CUDA, EVERYWHERE, KERNELS, differ, needs_free_gpu_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.nn.fused_linear import fused_forward
from gpuaccel.ops.accumulate import accumulate_, reference_accumulate
from gpuaccel.optim import fused_mode
from gpuaccel.optim.accumulate import MODES, GradientAccumulator
from gpuaccel.optim.arena import Arena
from gpuaccel.training.step import TrainStep, token_loss

DEVICES = ["cpu", CUDA]
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


class Chosen(nn.Module):
    """Parameters of given shapes; its loss has exactly the gradients that are asked for."""

    def __init__(self, shapes, dtypes):
        super().__init__()
        parts = [
            nn.ParameterList([nn.Parameter(torch.randn(s).to(d))]) for s, d in zip(shapes, dtypes)
        ]
        self.blocks = nn.ModuleList(parts)

    def forward(self, grads):
        return sum(
            (p.float() * g.float()).sum() for (p,), g in zip(self.blocks, grads) if g is not None
        )


def s_of(buffer, segment):
    """The segment's part of a flat buffer."""
    return buffer[segment.offset : segment.offset + segment.numel].view(segment.shape)


def loss_of(model, x):
    return F.cross_entropy(model(x).float().flatten(0, 1), x.flatten(), reduction="sum")


def micro_batches(n, device="cpu", V=13, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, V, (2, 1 + i % 4), generator=generator).to(device) for i in range(n)]


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


def error(got, want):
    """Norm-relative difference."""
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()


def assert_sums(arena, exact, bound, where=""):
    for name, owner in arena.named_parameters().items():
        if name not in exact:
            assert owner.grad is None, f"{where}: {name} got no gradient, yet .grad is there"
            continue
        assert owner.grad is not None, f"{where}: {name} has no .grad"
        e = error(owner.grad, exact[name])
        assert e <= bound, (
            f"{where}: {name} is {e:.3g} off (bound {bound:.3g}); {differ(owner.grad, exact[name])}"
        )


# ---- the sum -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("mode", MODES)
def test_fp32_sum_is_within_1e_6_of_float64(mode, n, device):
    model = Net().to(device)
    exact = exact_sum(copy.deepcopy(model), micro_batches(n, device))
    arena = Arena(model)
    with GradientAccumulator(arena, mode) as accumulator:
        for x in micro_batches(n, device):
            loss_of(model, x).backward()
        accumulator.finish()
        assert_sums(arena, exact, 1e-6, f"{mode}, {n} micro-batches")


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("mode", ["host", "arena"])
def test_bf16_gradients_are_rounded_once_each_and_their_sum_is_fp32(mode, n, device):
    model = Net().to(device, torch.bfloat16)
    exact = exact_sum(copy.deepcopy(model), micro_batches(n, device))
    arena = Arena(model)
    with GradientAccumulator(arena, mode) as accumulator:
        for x in micro_batches(n, device):
            loss_of(model, x).backward()
        accumulator.finish()
        assert_sums(arena, exact, 1e-6, f"{mode}, {n} micro-batches")


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("n", [4, 16])
def test_bf16_product_is_added_unrounded_in_fused(n, device):
    """Against the float64 product of the same bf16 factors: `arena` would round it to bf16."""
    torch.manual_seed(0)
    model = nn.Linear(24, 40, bias=False).to(device, torch.bfloat16)
    pairs = [
        (
            torch.randn(3, 5, 24, device=device).bfloat16(),
            torch.randn(3, 5, 40, device=device).bfloat16(),
        )
        for _ in range(n)
    ]
    exact = {
        "weight": sum(dy.double().flatten(0, 1).T @ x.double().flatten(0, 1) for x, dy in pairs)
    }
    arena = Arena(model)
    with GradientAccumulator(arena, "fused"):
        for x, dy in pairs:
            model(x).backward(dy)
        assert_sums(arena, exact, 1e-6, f"fused, {n} micro-batches")


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("mode", ["autograd", "fused"])
def test_bf16_bound_of_each_mode(mode, device):
    """autograd rounds the sum n times, fused rounds other things than torch: each within 2^-8."""
    n = 16
    model = Net().to(device, torch.bfloat16)
    exact = exact_sum(copy.deepcopy(model), micro_batches(n, device))
    arena = Arena(model)
    with GradientAccumulator(arena, mode) as accumulator:
        for x in micro_batches(n, device):
            loss_of(model, x).backward()
        accumulator.finish()
        assert_sums(arena, exact, n * 2**-8, mode)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(
    "mode, total", [("autograd", 256.0), ("host", 512.0), ("arena", 512.0), ("fused", 512.0)]
)
def test_256_plus_256_times_1_is_512_unless_autograd_sums_in_bf16(mode, total, device):
    model = Chosen([(5,)], [torch.bfloat16]).to(device)
    arena = Arena(model)
    with GradientAccumulator(arena, mode) as accumulator:
        for value in [256.0] + [1.0] * 256:
            model([torch.full((5,), value, device=device)]).backward()
        accumulator.finish()
        assert arena.parameters()[0].grad.tolist() == [total] * 5


SHAPES = st.lists(
    st.lists(st.sampled_from([1, 1, 2, 3, 7, 65]), max_size=3).map(tuple)
    | st.just((0,))
    | st.just((3, 0))
    | st.just((4097,)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("mode", MODES)
@few
@given(shapes=SHAPES, n=st.integers(1, 6), seed=st.integers(0, 99), data=st.data())
def test_any_shapes_dtypes_and_missing_gradients_sum_exactly(device, mode, shapes, n, seed, data):
    """Small whole numbers: every sum is exact in fp32 and bf16, so all modes are bit-identical."""
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in shapes]
    given_ = [[data.draw(st.integers(0, 3)) > 0 for _ in shapes] for _ in range(n)]
    generator = torch.Generator().manual_seed(seed)
    model = Chosen(shapes, dtypes).to(device)
    want = [None] * len(shapes)
    arena = Arena(model)
    with GradientAccumulator(arena, mode) as accumulator:
        for row in given_:
            grads = [
                torch.randint(-8, 9, s, generator=generator).float().to(device) if there else None
                for s, there in zip(shapes, row)
            ]
            if any(row):
                model(grads).backward()
            want = [w if g is None else g if w is None else w + g for w, g in zip(want, grads)]
        accumulator.finish()
        for name, owner, w in zip(arena.parameter_names(), arena.parameters(), want):
            assert (owner.grad is None) == (w is None), name
            assert w is None or torch.equal(owner.grad, w), f"{name}: {differ(owner.grad, w)}"
        used = torch.zeros(arena.numel, dtype=torch.bool)
        for s in arena.segments:
            used[s.offset : s.offset + s.numel] = True
        assert not arena.grads.cpu()[~used].any(), "padding between tensors was written"


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_any_stride_are_summed(mode):
    model = Chosen([(4, 6), (4, 6), (6,)], [torch.float32, torch.bfloat16, torch.float32])
    arena = Arena(model)
    g = torch.arange(24.0).view(6, 4)
    with GradientAccumulator(arena, mode) as accumulator:
        a, b, c = (p for part in model.blocks for p in part)
        for _ in range(2):
            ((a.t() * g).sum() + (b.float().t() * g).sum() + c.expand(5, 6).sum()).backward()
        accumulator.finish()
        a, b, c = arena.parameters()
        assert (
            torch.equal(a.grad, 2 * g.t())
            and torch.equal(b.grad, 2 * g.t())
            and c.grad.tolist() == [10.0] * 6
        )


# ---- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("how", ["zero_grad", "zero_grad(set_to_none=False)", "zero_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_leaks_from_one_window_into_the_next(mode, dtype, how, device):
    model = Chosen([(5,), (3, 2)], [dtype, dtype]).to(device)
    arena = Arena(model)
    opt = torch.optim.SGD(arena.parameters(), lr=0.0)
    ones = [torch.ones(5, device=device), torch.ones(3, 2, device=device)]
    with GradientAccumulator(arena, mode) as accumulator:
        for window, n in enumerate((3, 1, 2)):
            for _ in range(n):
                model(ones).backward()
            opt.step()  # runs finish() by itself
            sums = [p.grad.unique().tolist() for p in arena.parameters()]
            assert sums == [[n], [n]], f"window {window}: {sums} instead of {n}"
            if how == "zero_":
                accumulator.zero_()
            else:
                opt.zero_grad(set_to_none="False" not in how)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_in_the_middle_of_a_window_does_not_disturb_the_sum(mode):
    model = Chosen([(5,)], [torch.float32])
    arena = Arena(model)
    opt = torch.optim.SGD(arena.parameters(), lr=0.0)
    with GradientAccumulator(arena, mode):
        for n in (1, 2, 3):
            model([torch.ones(5)]).backward()
            opt.step()
            assert arena.parameters()[0].grad.tolist() == [n] * 5


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    ],
)
def test_a_users_own_loop_gives_torchs_weights(make, mode, device):
    """No TrainStep: backward, step, zero_grad. A parameter without gradient is not changed."""
    model, plain = Net().to(device), Net().to(device)
    arena = Arena(model)
    opt = make(arena.parameter_groups(weight_decay=0.1))
    by_name = dict(plain.named_parameters())
    names = {id(p): n for n, p in arena.named_parameters().items()}
    ref = make(
        [
            {**g, "params": [by_name[names[id(p)]] for p in g["params"]]}
            for g in arena.parameter_groups(weight_decay=0.1)
        ]
    )
    assert (
        len(opt.param_groups) == 2
        and opt.param_groups[0]["weight_decay"] != opt.param_groups[1]["weight_decay"]
    )
    with GradientAccumulator(arena, mode):
        for window in range(3):
            for x in micro_batches(3, device, seed=window):
                loss_of(model, x).backward()
                loss_of(plain, x).backward()
            opt.step(), ref.step()
            opt.zero_grad(), ref.zero_grad()
        for name, p in model.named_parameters():
            assert torch.allclose(p, by_name[name], rtol=1e-3, atol=2e-4), (
                f"{mode} {name}: {differ(p, by_name[name])}"
            )
        assert torch.equal(model.unused, torch.full((3, 2), 5.0, device=device)), (
            "a parameter without gradient was changed"
        )


@pytest.mark.parametrize("mode", MODES)
def test_bf16_weights_follow_their_masters_after_a_step(mode):
    model = Net().bfloat16()
    before = model.head.weight.clone()
    arena = Arena(model)
    opt = torch.optim.SGD(arena.parameters(), lr=0.5)
    with GradientAccumulator(arena, mode):
        for x in micro_batches(2):
            loss_of(model, x).backward()
        opt.step()
        assert not torch.equal(model.head.weight, before)
        for name, p in model.named_parameters():
            assert torch.equal(p, arena.named_master()[name].bfloat16()), name


@pytest.mark.parametrize("mode", MODES)
def test_unequal_micro_batches_give_the_full_batchs_gradient_and_a_mean_of_means_does_not(mode):
    targets = torch.randint(0, 13, (8, 6))
    for row in range(8):
        targets[row, 1 + row % 6 :] = -100  # 1 to 6 valid tokens per sequence
    batch = torch.randint(0, 13, (8, 6)), targets
    results = {}
    for parts, divide in ((1, "tokens"), (8, "tokens"), (8, "micro_batches"), (8, "sequences")):
        model = Net()
        with TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            micro_batches=parts,
            accumulate=mode,
            divide=divide,
        ) as step:
            before = model.head.weight.detach().clone()
            out = step(batch)
            results[parts, divide] = before - model.head.weight.detach()
            assert step.count == 1 and out.tokens.item() == (targets != -100).sum().item()
    full = results[1, "tokens"]
    assert torch.allclose(results[8, "tokens"], full, rtol=1e-4, atol=1e-6), differ(
        results[8, "tokens"], full
    )
    assert error(results[8, "micro_batches"], full.double()) > 0.01
    per_sequence = full * out.tokens.item() / 8
    assert torch.allclose(results[8, "sequences"], per_sequence, rtol=1e-4, atol=1e-6), differ(
        results[8, "sequences"], per_sequence
    )


@pytest.mark.parametrize("mode", MODES)
def test_one_optimizer_step_per_window(mode):
    model, calls = Net(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.register_step_post_hook(lambda *_: calls.append(1))
    with TrainStep(model, opt, micro_batches=4, accumulate=mode, max_norm=1.0) as step:
        for i in range(3):
            x = torch.randint(0, 13, (8, 3))
            step((x, x))
            assert len(calls) == i + 1 == step.count


# ---- what users do besides -----------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_activation_checkpointing(mode, reentrant):
    exact = exact_sum(Net(), micro_batches(4))
    model = Net(checkpointing=reentrant)
    arena = Arena(model)
    with GradientAccumulator(arena, mode) as accumulator:
        for x in micro_batches(4):
            loss_of(model, x).backward()
        accumulator.finish()
        assert_sums(arena, exact, 1e-6, mode)


@pytest.mark.parametrize("mode", MODES)
def test_tied_weights_get_both_gradients(mode):
    model = Net(tied=True)
    exact = exact_sum(copy.deepcopy(model), micro_batches(4))
    arena = Arena(model)
    assert len(arena.segments) == len(list(model.parameters()))
    with GradientAccumulator(arena, mode) as accumulator:
        for x in micro_batches(4):
            loss_of(model, x).backward()
        accumulator.finish()
        assert model.head.weight is model.embedding.weight
        assert_sums(arena, exact, 1e-6, mode)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode, device):
    def loss(model, x):
        with torch.autocast(device, torch.bfloat16):
            return loss_of(model, x)

    model = Net().to(device)
    exact = exact_sum(copy.deepcopy(model), micro_batches(4, device), loss)
    arena = Arena(model)
    with GradientAccumulator(arena, mode) as accumulator:
        for x in micro_batches(4, device):
            loss(model, x).backward()
        accumulator.finish()
        assert_sums(arena, exact, 4 * 2**-8 if mode == "fused" else 1e-6, mode)


@pytest.mark.parametrize("mode", MODES)
def test_grad_scaler_unscales_and_skips_a_step_that_overflows(mode):
    model = Net()
    arena = Arena(model)
    opt = torch.optim.SGD(arena.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    exact = exact_sum(Net(), micro_batches(2))
    with GradientAccumulator(arena, mode) as accumulator:
        for x in micro_batches(2):
            scaler.scale(loss_of(model, x)).backward()
        accumulator.finish()
        scaler.unscale_(opt)
        assert_sums(arena, exact, 1e-6, mode)
        scaler.step(opt), scaler.update(), opt.zero_grad()
        before = model.head.weight.detach().clone()
        (loss_of(model, micro_batches(1)[0]) * math.inf).backward()
        accumulator.finish()
        scaler.step(opt), scaler.update()
        assert torch.equal(before, model.head.weight) and scaler.get_scale() == 128.0


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [None, True])
def test_a_backward_that_raises_half_way_leaves_nothing_behind(mode, dtype, reentrant):
    model = Net(checkpointing=reentrant).to(dtype)
    arena = Arena(model)
    opt = torch.optim.SGD(arena.parameters(), lr=0.0)
    exact = exact_sum(Net().to(dtype), micro_batches(2))
    with GradientAccumulator(arena, mode) as accumulator:

        def bad(x):
            h = model.blocks[1](Breaks.apply(model.blocks[0](model.embedding(x))))
            return model.head(model.norm(h)).sum()

        loss_of(model, micro_batches(1)[0]).backward()
        with pytest.raises(ZeroDivisionError):
            bad(micro_batches(1)[0]).backward()
        # In mode autograd torch keeps the gradients from before the error.
        opt.zero_grad() if mode != "autograd" else accumulator.zero_()
        for x in micro_batches(2):
            loss_of(model, x).backward()
        opt.step()
        rounded = dtype == torch.bfloat16 and mode in ("autograd", "fused")
        assert_sums(arena, exact, 2**-6 if rounded else 1e-6, mode)


@pytest.mark.parametrize("mode", MODES)
def test_train_step_drops_the_gradients_of_a_backward_that_raises(mode):
    model, plain = Net(), Net()
    x = torch.randint(0, 13, (4, 3))

    def loss(model, micro):
        if isinstance(micro, tuple) and micro[0].shape[1] == 2:
            h = model.blocks[1](Breaks.apply(model.blocks[0](model.embedding(micro[0]))))
            return model.head(model.norm(h)).sum(), torch.tensor(1)
        return token_loss(model, micro)

    with (
        TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            loss,
            accumulate=mode,
            micro_batches=2,
        ) as step,
        TrainStep(
            plain, torch.optim.SGD(plain.parameters(), lr=1.0), accumulate=mode, micro_batches=2
        ) as reference,
    ):
        with pytest.raises(ZeroDivisionError):
            step((x[:, :2], x[:, :2]))
        assert step.count == 0
        step((x, x)), reference((x, x))
        assert torch.equal(model.head.weight, plain.head.weight), differ(
            model.head.weight, plain.head.weight
        )


@pytest.mark.parametrize("mode, compiler", [("arena", "aot_eager"), ("fused", "inductor")])
def test_torch_compile(mode, compiler):
    if compiler == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler for the CPU, and there is none")
    torch._dynamo.reset()
    model = Net(layers=1)
    x = torch.randint(0, 13, (2, 4))
    exact = exact_sum(copy.deepcopy(model), [x, x, x])
    arena = Arena(model)
    with GradientAccumulator(arena, mode) as accumulator:
        compiled = torch.compile(loss_of, backend=compiler, dynamic=False)
        for _ in range(3):
            compiled(model, x).backward()
        accumulator.finish()
        assert_sums(arena, exact, 1e-6, f"{mode} under {compiler}")
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_models_in_all_modes(family):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: it is part of no extra"
    )
    torch.manual_seed(0)
    if family == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=31,
                n_positions=16,
                n_embd=16,
                n_layer=2,
                n_head=2,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
        )
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=31,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=16,
            )
        )

    def loss(model, x):
        return model(input_ids=x, labels=x).loss

    micros = [torch.randint(0, 31, (2, 9)) for _ in range(3)]
    exact = exact_sum(copy.deepcopy(model), micros, loss)
    for mode in MODES:
        arena = Arena(model)
        with GradientAccumulator(arena, mode) as accumulator:
            assert any(map(fused_forward, model.modules())) == (mode == "fused")
            for x in micros:
                loss(model, x).backward()
            accumulator.finish()
            assert_sums(arena, exact, 2e-6, f"{family} {mode}")
        arena.release()
        model.zero_grad()


# ---- fused ---------------------------------------------------------------------------------------


def test_fused_linear_is_a_linear_again_after_close_and_in_copies():
    model = Net()
    arena = Arena(model)
    accumulator = GradientAccumulator(arena, "fused")
    assert type(model.head) is nn.Linear and fused_forward(model.head)
    twin = copy.deepcopy(model)
    assert type(twin.head) is nn.Linear and not fused_forward(twin.head)
    again = pickle.loads(pickle.dumps(model.head))
    assert type(again) is nn.Linear and torch.equal(again.weight, model.head.weight)
    assert not fused_forward(again) and not fused_forward(copy.deepcopy(again))
    loss_of(twin, micro_batches(1)[0]).backward()
    assert twin.head.weight.grad is not None and not arena.grads.any()
    accumulator.close()
    assert "forward" not in vars(model.head)
    loss_of(model, micro_batches(1)[0]).backward()
    assert model.head.weight.grad is not None and not arena.grads.any()


@pytest.mark.parametrize("device", ["cpu", "simt"], indirect=True)
def test_without_kernels_small_weights_are_left_to_autograd(device, monkeypatch):
    monkeypatch.setattr(fused_mode, "LEAST_ELEMENTS", 4 * 5)
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 5), nn.Linear(5, 3))
    arena = Arena(model)
    want = [False, True, False] if ga.backend().name == "torch" else [True, True, True]
    with GradientAccumulator(arena, "fused"):
        assert [fused_forward(layer) is not None for layer in model] == want
        for _ in range(2):
            model(torch.tensor([0, 2, 2])).square().sum().backward()
        sums = {name: p.grad.clone() for name, p in arena.named_parameters().items()}
    arena.release()
    model.zero_grad()
    for _ in range(2):
        model(torch.tensor([0, 2, 2])).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(sums[name], p.grad)


@pytest.mark.parametrize("mode", ["arena", "fused"])
def test_a_step_without_kernels_lets_autograd_add_small_weights(mode, monkeypatch):
    """Mode "autograd" is faster there, and bit-identical to mode "arena"."""

    def trained(mode, least, dtype=torch.float32):
        monkeypatch.setattr(fused_mode, "LEAST_ELEMENTS", least)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7)).to(dtype)
        opt = ga.AdamW(Arena(model), lr=0.1, max_norm=0.5)
        with (
            ga.use_backend("torch"),
            TrainStep(model, opt, micro_batches=3, accumulate=mode) as step,
        ):
            tokens = torch.arange(24).view(6, 4) % 7
            outputs = [step((tokens.roll(k), tokens)) for k in range(3)]
            return step.accumulator.mode, [o.norm for o in outputs], step.arena.weights.clone()

    taken, norms, weights = trained(mode, 29)
    by_hooks = trained("arena", 0)
    assert taken == "autograd"
    assert norms == by_hooks[1] and torch.equal(weights, by_hooks[2])
    # A weight is not small, or torch would add in bf16.
    assert trained(mode, 28)[0] == trained(mode, 29, torch.bfloat16)[0] == mode


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4)])
def test_fused_linear_takes_every_input_that_linear_takes(shape):
    model = nn.Linear(4, 5)
    x = torch.randn(shape)
    F.linear(x, model.weight, model.bias).square().sum().backward()
    want, model.weight.grad, model.bias.grad = model.weight.grad, None, None
    arena = Arena(model)
    with GradientAccumulator(arena, "fused"):
        model(x).square().sum().backward()
        assert torch.allclose(arena.named_parameters()["weight"].grad, want), differ(
            model.weight.grad, want
        )


def test_fused_linear_adds_nothing_when_its_weight_is_not_asked_for():
    model = nn.Linear(4, 4, bias=False)
    arena = Arena(model)
    with GradientAccumulator(arena, "fused"):
        x = torch.randn(2, 4, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
        model.weight.requires_grad_(False)
        model(x).sum().backward()
        assert not arena.grads.any() and x.grad is not None
        with torch.no_grad():
            assert torch.equal(model(x), F.linear(x, model.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_fused_product(dtype):
    acc, dy, x = (
        torch.zeros(4, 3),
        torch.randn(2, 5, 4, dtype=dtype),
        torch.randn(2, 5, 3, dtype=dtype),
    )
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
    want = acc.clone().add_(grad)
    assert accumulate_(acc, grad) is acc
    assert torch.equal(acc, want), differ(acc, want)


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


def test_reference_is_one_rounding_per_element():
    acc = torch.full((3,), 256.0)
    assert reference_accumulate(acc, torch.ones(3).bfloat16()).tolist() == [257.0] * 3
    low = torch.full((3,), 256.0).bfloat16()
    assert reference_accumulate(low, torch.ones(3).bfloat16()).tolist() == [256.0] * 3


def test_an_accumulator_refuses_unknown_modes_and_a_second_one():
    arena = Arena(Net())
    with pytest.raises(
        ArgumentError, match="'magic'; expected one of host, autograd, arena, fused"
    ):
        GradientAccumulator(arena, "magic")
    with GradientAccumulator(arena):
        with pytest.raises(ArgumentError, match="has a GradientAccumulator already"):
            GradientAccumulator(arena)
    GradientAccumulator(arena, "fused").close()
    arena.release()


def test_a_backward_after_the_module_was_moved_names_the_parameter():
    model = Net()
    with GradientAccumulator(Arena(model), "arena"):
        model.double()
        with pytest.raises(ArgumentError, match="parameter .* is no longer a view of the arena"):
            loss_of(model, micro_batches(1)[0]).backward()


# ---- the kernels, and what only a GPU has --------------------------------------------------------


class Many(nn.Module):
    """One block with a thousand tensors."""

    def __init__(self, n=1000):
        super().__init__()
        self.block = nn.Sequential(
            nn.ParameterList([nn.Parameter(torch.randn(1 + i % 50)) for i in range(n)])
        )

    def forward(self):
        return sum(p.sum() * (i % 7) for i, p in enumerate(self.block[0]))


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_block_of_a_thousand_tensors(device):
    model = Many().to(device)
    arena = Arena(model)
    assert len(arena.blocks) == 1
    with GradientAccumulator(arena, "arena"):
        for _ in range(2):
            model().backward()
        wrong = [i for i, p in enumerate(model.block[0]) if not p.grad.eq(2 * (i % 7)).all()]
        assert not wrong, f"wrong sums in tensors {wrong[:10]}"


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("off", [0, 1, 3])
def test_every_version_is_bit_equal_to_torch(dtype, off, device):
    from gpuaccel.ops.accumulate import accumulate_kernel
    from gpuaccel.optim.accumulation_modes import add_to_arena

    torch.manual_seed(off)
    shapes = [(1,), (4095,), (4096,), (4097,), (63, 129), (512, 1024), (0,), (3, 5, 7)]
    arena = Arena(Chosen(shapes, [torch.float32] * len(shapes)).to(device))
    arena.grads.copy_(torch.randn(arena.numel, device=device))
    before = arena.grads.clone()
    fresh = [
        torch.randn(s.numel + off, device=device).to(dtype)[off:].view(s.shape)
        for s in arena.segments
    ]
    fresh[2] = None
    want = before.clone()
    for s, g in zip(arena.segments, fresh):
        if g is not None:
            s_of(want, s).add_(g)
    add_to_arena(arena, 0, len(arena.segments), fresh)
    assert torch.equal(arena.grads, want), f"accumulate_v3: {differ(arena.grads, want)}"
    for s, g in zip(arena.segments, fresh):
        if g is None or not s.numel:
            continue
        acc = s_of(before, s).clone()
        accumulate_kernel("accumulate_v1", dtype)[-(-s.numel // 256), 256](acc, g, s.numel)
        assert torch.equal(acc, s_of(want, s)), (
            f"accumulate_v1 {s.shape}: {differ(acc, s_of(want, s))}"
        )
        if off == 0 and s.numel % 4 == 0:
            acc = s_of(before, s).clone()
            accumulate_kernel("accumulate_v2", dtype)[min(-(-s.numel // 1024), 7), 256](
                acc, g, s.numel
            )
            assert torch.equal(acc, s_of(want, s)), (
                f"accumulate_v2 {s.shape}: {differ(acc, s_of(want, s))}"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["accumulate_v1", "accumulate_v2", "accumulate_v3"])
def test_gpu_more_than_2_to_the_31_elements(version):
    from gpuaccel.ops.accumulate import accumulate_kernel
    from gpuaccel.optim.accumulation_modes import add_to_arena

    # 6 bytes an element with a bf16 gradient; an arena also has fp32 and bf16 weights.
    needs_free_gpu_memory((40 if version == "accumulate_v3" else 14) * 10**9)
    n = 2**31 + 4096 + (1 if version == "accumulate_v1" else 0)
    # Whole numbers up to 250 are exact in bf16.
    grad = torch.arange(251, device="cuda").bfloat16().repeat(-(-n // 251))[:n]
    if version == "accumulate_v3":
        arena = Arena(nn.ParameterList([nn.Parameter(grad.new_zeros(n))]))
        acc = arena.grad_views[0]
        add_to_arena(arena, 0, 1, [grad])
    else:
        acc = torch.zeros(n, device="cuda")
        accumulate_kernel(version, torch.bfloat16)[
            -(-n // 256) if version == "accumulate_v1" else 4096, 256
        ](acc, grad, n)
    for start in range(0, n, 2**26):
        assert torch.equal(acc[start : start + 2**26], grad[start : start + 2**26].float()), (
            f"wrong between {start} and {start + 2**26}"
        )
    if version == "accumulate_v3":
        arena.release()
    del acc, grad
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["arena", "fused"])
def test_gpu_a_window_neither_waits_nor_downloads(mode, dtype):
    from gpuaccel.measure import ledger
    from gpuaccel.training.models import Transformer, preset

    model = Transformer(preset("tiny")).to("cuda", dtype)
    # clip="torch", because with ga.AdamW no memset is needed.
    with TrainStep(model, micro_batches=4, accumulate=mode, clip="torch", max_norm=1.0) as step:
        batch = tuple(torch.randint(0, 256, (8, 128), device="cuda") for _ in range(2))
        for _ in range(2):
            step(batch)  # compiles, loads, allocates
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with ledger(mode) as row:
            step(batch)
        assert row.syncs == 0, f"{row.syncs} synchronisations in mode {mode}\n{row}"
        assert row.bytes("DtoH") == 0, f"downloads in mode {mode}: {row.copies}"
        assert row.memsets[0] >= 1, f"zeroing is a memset; got {row.memsets}"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["arena", "fused"])
def test_gpu_a_captured_window_replays_to_the_eager_sum(mode):
    """The accumulator, and so torch's AccumulateGrad nodes, is made on the capturing stream."""
    micros = [torch.randint(0, 13, (2, 4), device="cuda") for _ in range(3)]
    model = Net().cuda()
    exact = exact_sum(copy.deepcopy(model), micros)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        arena = Arena(model)
        accumulator = GradientAccumulator(arena, mode)

        def window():
            accumulator.zero_()
            for x in micros:
                loss_of(model, x).backward()

        for _ in range(3):
            window()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            window()
    for _ in range(2):
        arena.grads.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        assert_sums(arena, exact, 1e-6, f"replay in mode {mode}")
    accumulator.close()
