"""ga.optim.Lion is its authors' formula.

What it has from DeviceOptimizer is tested with ga.AdamW, in test_adamw.py.
"""

import copy
import pickle

import pytest
import torch
from helpers import EVERYWHERE, INF, KERNELS, NAN, differ, exact_norm, generator, same
from optimizers import Training, check_arena, give, params_of, snapshot
from torch import nn
from torch.optim import lr_scheduler

import gpuaccel as ga
from gpuaccel.compiler.kernel import Kernel
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.optim.lion import Lion, reference_lion

NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
WHAT = ["parameters", "arena"]


def formula(w, g, m, lr, beta1, beta2, weight_decay):
    """Chen et al., algorithm 2, literally, in float64.

    Returns (w, m, where fp32 cannot have another sign)."""
    w, g, m = (t.detach().double() for t in (w, g, m))
    u = beta1 * m + (1 - beta1) * g
    sure = u.abs() > 1e-6 * (m.abs() + g.abs())
    sure |= (m == 0) & (g == 0)
    w = w - lr * (u.sign() + weight_decay * w)
    return w, beta2 * m + (1 - beta2) * g, sure


def settings_of(group):
    beta1, beta2 = group["betas"]
    return group["lr"], beta1, beta2, group["weight_decay"]


def close(got, want, sure, what, bound=5e-6):
    assert want.numel() < 100 or sure.double().mean() > 0.999, f"{what}: too many signs in doubt"
    got, want = got.detach().double()[sure], want[sure]
    torch.testing.assert_close(
        got, want, rtol=bound, atol=bound, msg=lambda _: f"{what}: {differ(got, want)}"
    )


# ---- the formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reference_lion_is_the_formula(dtype):
    random = generator(0)
    w, g, m = (torch.randn(1000, generator=random).to(dtype) for _ in range(3))
    g[:2] = m[:2] = 0  # the sign of 0 is 0
    want_w, want_m, sure = formula(w, g.double() * -0.5, m, **NUMBERS)
    exact = reference_lion(w, g, m, 1, **NUMBERS, factor=-0.5)
    bound = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
    close(w, want_w, sure, "weight", bound)
    close(m, want_m, sure, "m", bound)
    same(exact.to(dtype), w, "what it returns is the weight before rounding")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_lion_v1_is_the_formula(device):
    for n in (1, 255, 257, 1000):
        random = generator(n)
        w, g, m = (torch.randn(n, generator=random).to(device) for _ in range(3))
        want_w, want_m, sure = formula(w, g, m, **NUMBERS)
        with ga.checked():
            Kernel("lion", "lion_v1")[-(-n // 256), 256](w, g, m, n, *NUMBERS.values())
        close(w, want_w, sure, f"n = {n}, weight")
        close(m, want_m, sure, f"n = {n}, m")


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"maximize": True, "weight_decay": 0.0, "betas": (0.5, 0.0)},
        {"max_norm": 1.0},
        {"max_norm": 1.0, "scope": "tensor"},
    ],
    ids=str,
)
def test_the_optimizer_is_the_formula(kwargs, what, device):
    run = Training(Lion, what, device, **{"lr": 0.01, "weight_decay": 0.1, **kwargs})
    group_of = {id(p): group for group in run.opt.param_groups for p in group["params"]}
    state = [[p.detach().double(), torch.zeros_like(p, dtype=torch.float64)] for p in run.params]
    sures = [torch.ones_like(p, dtype=torch.bool) for p in run.params]
    for k in range(8):
        run.backward(k)
        grads = [g.detach().double().clone() for g in run.gradients()]
        whole = exact_norm(grads)
        for i, (p, g) in enumerate(zip(run.params, grads)):
            norm = exact_norm([g]) if kwargs.get("scope") == "tensor" else whole
            factor = min(1.0, 1.0 / (norm + 1e-6)) if "max_norm" in kwargs else 1.0
            group = group_of[id(p)]
            factor *= -1 if group["maximize"] else 1
            *state[i], sure = formula(state[i][0], g * factor, state[i][1], *settings_of(group))
            sures[i] &= sure
        run.opt.step()
        for p, (w, m), sure in zip(run.params, state, sures):
            close(p, w, sure, f"step {k}, weight")
            close(run.opt.state[p]["exp_avg"], m, torch.ones_like(sure), f"step {k}, m")
        if what != "parameters":
            check_arena(run.arena)
    decays = {group["weight_decay"] for group in run.opt.param_groups}
    assert len(decays) == (1 if what == "parameters" or "maximize" in kwargs else 2)
    assert run.opt.skipped == 0
    run.close()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_rounded_once(dtype, device):
    ours = params_of(device, dtype=dtype)
    opt = Lion(ours, lr=0.01, weight_decay=0.1)
    for k in range(3):
        give(k, ours)
        moments = [opt.state[p]["exp_avg"] if k else torch.zeros_like(p) for p in ours]
        want = [formula(p, p.grad, m, **NUMBERS) for p, m in zip(ours, moments)]
        opt.step()
        for p, (w, m, sure) in zip(ours, want):
            bound = 1.01 * torch.finfo(dtype).eps
            close(p, w, sure, f"step {k}, weight", bound)
            close(opt.state[p]["exp_avg"], m, sure, f"step {k}, m", bound)
            assert opt.state[p]["exp_avg"].dtype == dtype


@pytest.mark.parametrize("rule", [AdamW.rule, Lion.rule], ids=lambda rule: rule.file)
def test_the_state_keys_of_a_rule_are_the_pointers_of_its_kernel(rule):
    names = [param.name for param in rule.kernel("v3").params]
    state = names[names.index("g") + 1 : names.index("copy")]
    assert state == list(rule.state_keys)


# ---- what every DeviceOptimizer has --------------------------------------------------------------


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_nan_reaches_the_weights_under_propagate(device):
    w = nn.Parameter(torch.ones(3, device=device))
    w.grad = torch.tensor([NAN, INF, -INF], device=device)
    Lion([w], lr=0.5).step()
    same(w.detach().cpu(), torch.tensor([NAN, 0.5, 1.5]))


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(
    "what, dtype, how",
    [
        ("parameters", torch.float32, "state_dict"),
        ("parameters", torch.float32, "deepcopy"),
        ("parameters", torch.float32, "pickle"),
        ("arena", torch.bfloat16, "state_dict"),
    ],
)
@pytest.mark.parametrize("make", [AdamW, Lion])
def test_a_resumed_run_has_the_same_bits(make, what, dtype, how, device):
    kwargs = {"lr": 0.01, "max_norm": 0.5, "stochastic_rounding": True, "seed": 3}
    one, two = (Training(make, what, device, dtype, **kwargs) for _ in range(2))
    for k in range(3):
        one.step(k)
    if how != "state_dict":
        two.close()
        two.take(
            copy.deepcopy(one.opt) if how == "deepcopy" else pickle.loads(pickle.dumps(one.opt))
        )
        assert not set(map(id, one.params)) & set(map(id, two.params))
    else:
        with torch.no_grad():
            if what == "arena":
                two.arena.module.load_state_dict(one.arena.module.state_dict())
            else:
                for p, q in zip(two.params, one.params):
                    p.copy_(q)
        two.opt.load_state_dict(copy.deepcopy(one.opt.state_dict()))
        keys = {"step", *make.rule.state_keys} - {"max_exp_avg_sq"}
        keys |= {"master"} if what == "arena" else set()
        assert set(one.opt.state_dict()["state"][0]) == keys
    for k in range(3, 6):
        one.step(k), two.step(k)
    pairs = zip(snapshot(one.opt, *one.watched), snapshot(two.opt, *two.watched), strict=True)
    for got, want in pairs:
        assert torch.equal(got, want)
    one.close(), two.close()


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
        ({"lr": torch.ones(2)}, r"lr has shape \(2,\); expected one element"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Lion(params_of(), **kwargs)


# ---- replay and ranks ----------------------------------------------------------------------------


def train(replay, device, dtype=torch.float32, distributed=None):
    """Weights and losses of a small model under a schedule, with one step that is skipped."""
    torch.manual_seed(0)
    layers = nn.Linear(30, 70), nn.Tanh(), nn.Linear(70, 5)
    model = nn.Sequential(*layers).to(device, dtype)
    arena = Arena(model)
    opt = Lion(arena, lr=0.01, weight_decay=0.1, max_norm=0.5)
    rank, ranks = (0, 1) if distributed is None else (distributed.rank, distributed.world)

    def loss_fn(model, x):
        return (model(x.to(dtype)).float() - 1).square().sum(), len(x)

    losses = []
    with ga.TrainStep(
        model,
        opt,
        loss_fn,
        micro_batches=4 // ranks,
        scheduler=lr_scheduler.ExponentialLR(opt, 0.7),
        replay=replay,
        deterministic=True,
        distributed=distributed,
    ) as step:
        assert step.replays == replay
        for k in range(6):
            x = torch.randn(4, 2, 30, generator=generator(k))
            x[0, 0, 0] = NAN if k == 2 else 0.0
            losses.append(float(step(x[rank::ranks].flatten(0, 1).to(device)).loss))
        assert opt.skipped == 1
        with step.gathered():
            states = [opt.state[p]["exp_avg"].clone() for p in arena.masters]
            return [arena.weights.clone(), *states, torch.tensor(losses)]


def sharded(backend):
    """In each of two ranks: its weights, state and losses, with the state spread over both."""
    with ga.use_backend(backend):
        how = ga.Distributed(sharded=True, ordered=True, bucket_mb=0.001)
        return train("eager", "cpu", distributed=how)


@pytest.mark.parametrize("backend", ["torch", "simt"])
def test_two_ranks_with_a_sharded_state_are_one_process(backend):
    ranks = ga.launch(sharded, 2, (backend,), backend="gloo", start=600.0)
    with ga.use_backend(backend):
        want = train("eager", "cpu")
    for rank in ranks:
        for got, expected in zip(rank, want, strict=True):
            same(got, expected)
