"""Programs that use more of torch than layers and a loss train in an arena as without one."""

import contextlib
import copy

import pytest
import torch
from helpers import generator
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import swa_utils

import gpuaccel as ga
from gpuaccel.backends import find_compiler

STEPS = 30


def layers():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def rows(k, *shape):
    return torch.randn(*shape or (4, 8), generator=generator(k))


def square(model, x):
    return model(x).float().square().mean()


def torchs_or_ours(model, adds, **options):
    """AdamW over the model's parameters; adds: None for torch's, else over an arena, which is
    returned."""
    if adds is None:
        return torch.optim.AdamW(model.parameters(), **options), None
    arena = ga.Arena(model, decay=lambda name, p: True)
    return ga.AdamW(arena, **options), arena


# ---- modules and losses --------------------------------------------------------------------------


class WeightNorm:
    """Computed once for two forwards."""

    def make(self):
        model = layers()
        parametrizations.weight_norm(model[0])
        parametrizations.spectral_norm(model[2])
        return model

    def loss(self, model, x):
        with parametrize.cached():
            return square(model, x) + square(model, x + 1)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            grad @ weight if of_x else None,
            grad.t() @ x if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


class CustomFunction:
    """Which computes the gradients that are needed; with a hook in backward."""

    def make(self):
        model = layers()
        model[1].register_full_backward_hook(lambda module, of_input, _: (of_input[0] * 0.5,))
        return model

    def loss(self, model, x):
        first, between, last = model
        x = between(Product.apply(x, first.weight, first.bias))
        return (Product.apply(x, last.weight, last.bias.detach()) + last.bias).square().mean()


def trained(program, adds):
    """adds: None without an arena, "loop" or "step"."""
    torch.manual_seed(0)
    model = program.make()
    opt, _ = torchs_or_ours(model, adds, lr=1e-2, weight_decay=0.1)
    torch.manual_seed(5)
    if adds == "step":
        with ga.TrainStep(model, opt, program.loss, micro_batches=2) as step:
            for k in range(STEPS):
                step(rows(k))
        return model.state_dict()
    for k in range(STEPS):
        for micro in rows(k).split(2):
            (program.loss(model, micro) / 2).backward()
        opt.step(), opt.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    "program",
    [WeightNorm, CustomFunction],
)
def test_what_modules_and_losses_do_counts_as_in_torch(program):
    want = trained(program(), None)
    for adds in ("loop", "step"):
        torch.testing.assert_close(trained(program(), adds), want, rtol=1e-4, atol=1e-5)


# ---- averages of weights -------------------------------------------------------------------------


def averaged(adds, ema):
    """A model, and its average, whose BatchNorm is updated at the end and which then trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    opt, arena = torchs_or_ours(model, adds, lr=0.05, weight_decay=0.1)
    average = swa_utils.get_ema_multi_avg_fn(0.9) if ema else None
    mean = swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=ema)
    schedule = swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=3)
    step = None
    if adds == "step":
        step = ga.TrainStep(model, opt, square, scheduler=schedule)
    rates = []
    for k in range(12):
        if step is not None:
            step(rows(k))
        else:
            square(model, rows(k)).backward()
            opt.step(), opt.zero_grad(), schedule.step()
        if k >= 4:
            mean.update_parameters(model)
        rates.append(opt.param_groups[0]["lr"])
    swa_utils.update_bn([rows(50 + k) for k in range(3)], mean)
    before = [t.clone() for t in model.state_dict().values()]
    other = torch.optim.SGD(mean.parameters(), 0.1)
    square(mean, rows(60)).backward()
    other.step()
    assert all(map(torch.equal, before, model.state_dict().values()))
    return {**model.state_dict(prefix="model."), **mean.state_dict()}, rates


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("adds", ["loop", "step"])
def test_swa_and_ema_are_torchs(adds, ema):
    torch.testing.assert_close(averaged(adds, ema), averaged(None, ema), rtol=1e-4, atol=1e-5)


# ---- optimizers and loops ------------------------------------------------------------------------


class Descent(torch.optim.Optimizer):
    """Writes `.data`, in place or by assignment."""

    def __init__(self, params, assigns):
        super().__init__(params, dict(assigns=assigns))

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if group["assigns"]:
                    p.data = p.data - 0.5 * p.grad
                else:
                    p.data -= 0.5 * p.grad


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("assigns", [False, True])
@pytest.mark.parametrize("stepped", [False, True], ids=["loop", "step"])
def test_an_optimizer_may_write_data(stepped, assigns, dtype, bound):
    torch.manual_seed(0)
    start = layers()
    model, plain = copy.deepcopy(start).to(dtype), copy.deepcopy(start)
    arena = ga.Arena(model)
    opt = Descent(arena.parameters(), assigns)
    step = ga.TrainStep(model, opt, square) if stepped else None
    theirs = Descent(plain.parameters(), assigns)
    for k in range(12):
        square(plain, rows(k)).backward()
        theirs.step(), theirs.zero_grad()
        if step is not None:
            step(rows(k).to(dtype))
            continue
        square(model, rows(k).to(dtype)).backward()
        opt.step(), opt.zero_grad()
    for p, want in zip(model.parameters(), plain.parameters()):
        assert float((want - p.float()).detach().abs().max()) < bound
    assert float((plain[0].weight - start[0].weight).detach().abs().max()) > 5 * bound


class Wrapped:
    """Stands for an optimizer, as in Lightning: it has its attributes, and a step of its own."""

    def __init__(self, opt):
        self.__dict__ = {**opt.__dict__, "opt": opt, "steps": 0}

    def step(self, closure=None):
        self.steps += 1
        return self.opt.step(closure)

    def zero_grad(self):
        self.opt.zero_grad()


@contextlib.contextmanager
def toggled(opt, other):
    """Only the tensors of `opt` are trained."""
    for group in other.param_groups:
        for p in group["params"]:
            p.requires_grad_(False)
    yield
    for group in other.param_groups:
        for p in group["params"]:
            p.requires_grad_(True)


def played(adds, how):
    """A generator and a discriminator with an optimizer each, optimized by hand."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(8, 8), "d": nn.Linear(8, 1)})
    g, d = model["g"], model["d"]
    names = dict(model.named_parameters())
    if adds == "one arena":
        names = ga.Arena(model).named_parameters()
    options = dict(lr=0.01, weight_decay=0.1)
    if adds == "two arenas":
        opts = [ga.AdamW(ga.Arena(part, decay=lambda *_: True), **options) for part in (g, d)]
    else:
        kind = torch.optim.AdamW if adds is None else ga.AdamW
        parts = [[p for name, p in names.items() if name.startswith(part)] for part in "gd"]
        opts = [kind(part, **options) for part in parts]
    of_g, of_d = map(Wrapped, opts)
    for k in range(12):
        x = rows(k)

        def back(opt, loss):
            opt.zero_grad()
            loss.backward()
            return loss.detach()

        if how == "toggled":
            with toggled(of_d, of_g):
                back(of_d, d(g(x)).square().mean() + d(x).mean())
                of_d.step()
            with toggled(of_g, of_d):
                back(of_g, -d(g(x)).mean())
                of_g.step()
        elif how == "closures":
            first = of_d.step(lambda: back(of_d, d(g(x)).square().mean()))
            second = of_g.step(lambda: back(of_g, (d(g(x)) - 1).square().mean()))
            assert first > 0 and second > 0
        else:
            ((d(g(x)) - 1).square().mean() / 3).backward()
            if k % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                for opt in (of_g, of_d):
                    opt.step(), opt.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("how", ["toggled", "closures", "accumulated"])
@pytest.mark.parametrize("adds", ["one arena", "two arenas"])
def test_optimization_by_hand_is_torchs(adds, how):
    torch.testing.assert_close(played(adds, how), played(None, how), rtol=1e-5, atol=1e-6)


# ---- what reaches the masters of bf16 weights ----------------------------------------------------


def sgd_step(model, arena, **options):
    opt = torch.optim.SGD(arena.parameters(), lr=0.5)
    return ga.TrainStep(model, opt, micro_batches=2, **options)


def changes(weights, start):
    return torch.cat([(p.detach().float() - q).flatten() for p, q in zip(weights, start)])


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["autograd", "products"])
def test_a_backward_inside_of_the_loss_adds_to_the_sum(options):
    def trained(inside):
        torch.manual_seed(0)
        model = layers().bfloat16()
        start = [p.detach().float() for p in model.parameters()]
        arena = ga.Arena(model)

        def loss(model, x):
            auxiliary = square(model, x + 1)
            if not inside:
                # Of two micro-batches the mean is taken.
                return square(model, x) + 2 * auxiliary
            auxiliary.backward()
            return square(model, x)

        with sgd_step(model, arena, loss_fn=loss, **options) as step:
            for k in range(6):
                step(rows(k).bfloat16())
        return changes(model.parameters(), start)

    inside, outside = trained(True), trained(False)
    assert float((inside - outside).norm() / outside.norm()) < 0.03


def on_gradients(opt, args, kwargs):
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad.mul_(0.5)


@pytest.mark.parametrize("replay", ["eager", "graph"])
@pytest.mark.parametrize("whose", ["parameters", "masters"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_hooks_of_an_optimizer_edit_bf16_weights_before_and_behind_its_step(
    optimizer, whose, replay
):
    """As those of the same model in fp32. Clamped behind the step, as in a WGAN."""

    def trained(dtype):
        torch.manual_seed(0)
        model = layers().to(dtype)
        start = [p.detach().float() for p in model.parameters()]
        arena = ga.Arena(model, decay=lambda name, p: True)
        if optimizer == "AdamW":
            opt = ga.AdamW(arena, lr=0.02, weight_decay=0.1)
        else:
            opt = torch.optim.SGD(arena.parameters(), lr=0.5)
        weights = [*(model.parameters() if whose == "parameters" else arena.parameters())]

        @torch.no_grad()
        def shrink(opt, args, kwargs):
            for p in weights:
                p.mul_(0.9)

        @torch.no_grad()
        def clamp(opt, args, kwargs):
            for p in weights:
                p.clamp_(-0.15, 0.15)

        opt.register_step_pre_hook(on_gradients)
        opt.register_step_pre_hook(shrink)
        opt.register_step_post_hook(clamp)
        step = ga.TrainStep(model, opt, square, replay=replay)
        with ga.use_backend("simt" if replay == "graph" else "torch"), step:
            for k in range(10):
                step(rows(k).to(dtype))
        assert all(p.abs().max() <= 0.1501 for p in model.parameters())
        return changes(model.parameters(), start)

    low, full = trained(torch.bfloat16), trained(torch.float32)
    assert float((low - full).norm() / full.norm()) < 0.1


@pytest.mark.skipif(find_compiler()[0] is None, reason="needs a C++ compiler")
def test_weights_that_a_replayed_forward_writes_reach_their_masters():
    """nn.Embedding(max_norm=) does; SGD is launched behind the replay. The loss lets norms grow."""

    def loss(model, tokens):
        return -square(model, tokens)

    def trained(replay):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 8, max_norm=1.0), nn.Linear(8, 8)).bfloat16()
        model[1].requires_grad_(False)
        arena = ga.Arena(model)
        with ga.use_backend("simt"), sgd_step(model, arena, loss_fn=loss, replay=replay) as step:
            for k in range(12):
                step(torch.randint(0, 9, (8,), generator=generator(k)))
        assert step.replays == replay
        return arena.weights.clone()

    eager, graph = trained("eager"), trained("graph")
    assert float((graph - eager).norm() / eager.norm()) < 0.03
