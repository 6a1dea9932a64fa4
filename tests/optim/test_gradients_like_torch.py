"""What users do to gradients before, in and after a backward counts over an arena as in torch."""

import contextlib
import copy
import io
import os
import pickle
import random

import pytest
import torch
from helpers import CUDA, RaisesInBackward, differ, generator
from torch import nn

import gpuaccel as ga
from gpuaccel.graphs.snapshot import preserved
from gpuaccel.nn import fused_forward
from gpuaccel.optim import Products
from gpuaccel.optim.arena import Arena

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
    pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract"),
]
# Random sequences in all, over all settings. 1,000 take about a minute.
SEQUENCES = int(os.environ.get("GPUACCEL_SEQUENCES", "200"))
OPTIMIZERS = ["SGD", "torch.AdamW", "Muon", "ga.AdamW", "ga.AdamW of parameters"]
ADDING = ["autograd", "products"]
# The dtype of the weights, and whose gradients are edited: the optimizer's or the model's.
WEIGHTS = [("fp32", "arena"), ("bf16", "arena"), ("bf16", "model")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Net(nn.Module):
    """Two layers whose products can add, and a parameter of which autograd adds.

    Gradients are small whole numbers, exact in bf16, and do not depend on the weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.zeros(4))
        self.embedding = nn.Embedding(3, 4)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.randint(-8, 9, p.shape, generator=generator(i)) / 8)

    def forward(self, x, tokens, weight):
        h = self.linear(x) + self.embedding(tokens)
        return (h * weight + self.scale * weight.sum()).sum()

    def loss(self, k):
        """That of batch k."""
        shapes = (2, 4), (4,), (2,)
        x, weight, tokens = (torch.randint(-2, 3, s, generator=generator(k)) for s in shapes)
        like = self.scale
        # With create_graph=True each gradient has a graph of its own.
        x, weight = (t.to(like.device, like.dtype).requires_grad_() for t in (x, weight))
        return self(x, tokens.to(like.device) % 3, weight)


class Several:
    """Several optimizers, each over some of the parameters."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for opt in self.optimizers:
            opt.step()

    def zero_grad(self, set_to_none=True):
        for opt in self.optimizers:
            opt.zero_grad(set_to_none)


def optimizer_of(name, parameters, arena=None):
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)
    if name == "ga.AdamW" and arena is not None:
        return ga.AdamW(arena, lr=0.25, weight_decay=0.1, on_nonfinite="propagate")
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() < 2]
    if name == "Muon":
        return Several(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.25))
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    make = torch.optim.AdamW if name == "torch.AdamW" or arena is None else ga.AdamW
    return make(groups, lr=0.25)


class Run:
    """A module, its optimizer, and `params`, the tensors whose gradients are edited.

    adding: who adds, "autograd" or "products"; None: a plain model of torch, without an arena.
    through: whose the `params` are, "arena" (what the optimizer updates) or "model"."""

    def __init__(
        self, optimizer, adding=None, weights="fp32", through="arena", device="cpu", model=None
    ):
        self.model = model or Net().to(device, DTYPES[weights])
        self.arena = self.products = self.norm = None
        self.hooks = []
        self.params = self.updated = list(self.model.parameters())
        if adding is not None:
            self.arena = Arena(self.model)
            self.updated = self.arena.parameters()
            if adding == "products":
                self.products = Products(self.arena)
        if through == "arena":
            self.params = self.updated
        self.opt = optimizer_of(optimizer, self.updated, self.arena)

    def backward(self, loss, **kwargs):
        if self.products is not None:
            self.products.begin_backward()
        loss.backward(**kwargs)

    def act(self, action, k):
        """Action number k of a sequence. The same k has the same numbers in every run."""
        params, linear = self.params, self.model.linear
        given = [p for p in params if p.grad is not None]
        if action == "backward":
            self.backward(self.model.loss(k))
        elif action == "with a graph":
            self.backward(self.model.loss(k), create_graph=True)
        elif action == "raise":
            # After the gradients of `scale` and the bias, before that of the weight.
            x = torch.ones(2, 4, dtype=linear.weight.dtype, device=linear.weight.device)
            h = nn.functional.linear(x, RaisesInBackward.apply(linear.weight), linear.bias)
            # Unless the weight is frozen.
            with contextlib.suppress(ZeroDivisionError):
                self.backward((h + self.model.scale).sum())
        elif action == "autograd.grad":
            wanted = [p for p in self.model.parameters() if p.requires_grad]
            torch.autograd.grad(self.model.loss(k), wanted)
        elif action == "freeze":
            linear.weight.requires_grad_(False)
        elif action == "unfreeze":
            linear.weight.requires_grad_(True)
        elif action == "hook":
            if linear.weight.requires_grad:
                self.hooks.append(linear.weight.register_hook(lambda grad: grad / 2))
        elif action == "no hook":
            while self.hooks:
                self.hooks.pop().remove()
        elif action == "clip":
            self.norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        elif action == "halve":
            for p in given:
                with torch.no_grad():
                    p.grad.mul_(0.5)
        elif action == "data":
            for p in given:
                p.grad.data = p.grad.data.sign() / 4
        elif action == "replace":
            params[0].grad = torch.full_like(params[0], 3.0)
        elif action == "exchange":
            params[0].grad, params[2].grad = params[2].grad, params[0].grad
        elif action == "transpose" and params[1].grad is not None:
            params[1].grad = params[1].grad.detach().t()
        elif action == "transpose data" and params[1].grad is not None:
            params[1].grad.data = params[1].grad.data.t()
        elif action == "remove":
            params[1].grad = None
        elif action == "zero_grad":
            self.opt.zero_grad()
        elif action == "zero_grad in place":
            self.opt.zero_grad(set_to_none=False)
        elif action == "model.zero_grad":
            self.model.zero_grad()
        elif action == "model.zero_grad in place":
            self.model.zero_grad(set_to_none=False)
        elif action == "step":
            self.opt.step()
        elif not action.startswith("transpose"):
            raise ValueError(action)

    def close(self):
        if self.arena is not None:
            self.arena.release()


def compare(run, reference, what, bound):
    """Norm, gradients, fp32 weights (masters), and bf16 weights, which are rounded masters."""

    def close(got, want, name):
        got, want = got.detach().float().cpu(), want.detach()
        assert torch.allclose(got, want, rtol=bound, atol=bound), (
            f"{what}: {name}: {differ(got, want)}"
        )

    if reference.norm is not None:
        close(run.norm, reference.norm, "norm")
    for i, (p, q) in enumerate(zip(run.params, reference.params, strict=True)):
        assert (p.grad is None) == (q.grad is None), f"{what}: .grad {i} is {p.grad}, not {q.grad}"
        if q.grad is not None:
            close(p.grad, q.grad, f".grad {i}")
    for i, (p, q) in enumerate(zip(run.updated, reference.params, strict=True)):
        close(p, q, f"weight {i}")
    for i, (p, master) in enumerate(zip(run.model.parameters(), run.updated, strict=True)):
        assert torch.equal(p, master.to(p.dtype)), f"{what}: weight {i} is not its rounded master"


def follow(sequences, optimizer, adding, weights, through, device="cpu"):
    """Do the same with an arena and with plain fp32 parameters; compare after every action."""
    exact = 1e-5 if optimizer.startswith("ga.") or device != "cpu" else 0
    for actions in sequences:
        # What is not exact is the norm: of bf16 gradients, which these leave the model, and of
        # another order.
        rough = {"transpose", "transpose data"}
        if through == "model":
            rough |= {"with a graph", "replace", "raise"}
        bound = 2**-6 if "clip" in actions and not rough.isdisjoint(actions) else exact
        run = Run(optimizer, adding, weights, through, device)
        reference = Run(optimizer)
        try:
            for k, action in enumerate(actions):
                run.act(action, k), reference.act(action, k)
                compare(run, reference, ", ".join(actions[: k + 1]), bound)
        finally:
            run.close()


BEFORE_A_STEP = [
    ["zero_grad", "backward"],
    ["zero_grad in place", "backward"],
    ["zero_grad in place"],
    ["zero_grad"],
    ["model.zero_grad", "backward"],
    ["model.zero_grad in place"],
    ["backward", "zero_grad", "backward"],
    ["backward", "zero_grad in place", "backward"],
    ["clip"],
    ["backward", "clip"],
    ["clip", "backward", "clip"],
    ["clip", "model.zero_grad", "backward", "backward"],
    ["halve", "backward"],
    ["data"],
    ["data", "backward"],
    ["data", "zero_grad in place", "backward"],
    ["data", "zero_grad", "backward", "data"],
    ["replace"],
    ["replace", "backward"],
    ["exchange", "backward"],
    ["transpose", "backward"],
    ["transpose data", "backward", "clip"],
    ["remove"],
    ["remove", "backward"],
    ["remove", "backward", "remove"],
    ["with a graph"],
    ["with a graph", "backward"],
    ["zero_grad", "with a graph", "clip", "with a graph"],
    ["with a graph", "zero_grad in place", "backward"],
    ["with a graph", "halve", "data"],
    ["autograd.grad"],
    ["autograd.grad", "clip", "backward", "autograd.grad"],
    ["raise"],
    ["raise", "backward"],
    ["zero_grad", "raise", "backward"],
    ["zero_grad", "raise", "replace"],
    ["hook", "backward"],
    ["hook", "backward", "no hook", "backward"],
    ["freeze", "backward"],
    ["freeze", "zero_grad", "backward"],
    ["freeze", "zero_grad", "backward", "unfreeze", "backward"],
]
AFTER_A_STEP = [
    ["step"],
    ["backward", "step"],
    ["zero_grad", "step"],
    ["zero_grad in place", "step"],
    ["zero_grad in place", "step", "zero_grad in place", "step"],
    ["zero_grad in place", "backward", "step"],
    ["zero_grad in place", "zero_grad", "step"],
    ["model.zero_grad in place", "step", "model.zero_grad", "backward", "step"],
    ["clip", "step"],
    ["data", "step", "backward", "step"],
    ["freeze", "zero_grad", "backward", "step", "unfreeze", "zero_grad", "backward", "step"],
]
FIXED = [["backward", *actions, "step"] for actions in BEFORE_A_STEP]
FIXED += [["backward", "step", *actions] for actions in AFTER_A_STEP]


def in_all_settings(test):
    for name, values in (("optimizer", OPTIMIZERS), ("adding", ADDING), ("weights", WEIGHTS)):
        ids = " ".join if name == "weights" else str
        test = pytest.mark.parametrize(name, values, ids=ids)(test)
    return test


@in_all_settings
def test_what_is_done_to_gradients_counts_as_in_torch(optimizer, adding, weights):
    follow(FIXED, optimizer, adding, *weights)


ACTIONS = ["backward", "step"] * 4 + ["zero_grad", "zero_grad in place"] * 2
ACTIONS += ["model.zero_grad", "model.zero_grad in place", "clip", "halve", "data", "replace"]
ACTIONS += ["exchange", "transpose", "transpose data"]
ACTIONS += [
    "remove",
    "with a graph",
    "autograd.grad",
    "raise",
    "freeze",
    "unfreeze",
    "hook",
    "no hook",
]


@in_all_settings
def test_any_sequence_of_actions_ends_where_torch_ends(optimizer, adding, weights):
    draw = random.Random(f"{optimizer} {adding} {weights}")
    count = -(-SEQUENCES // (len(OPTIMIZERS) * len(ADDING) * len(WEIGHTS)))
    sequences = [["backward", *draw.choices(ACTIONS, k=12)] for _ in range(count)]
    follow(sequences, optimizer, adding, *weights)


@pytest.mark.parametrize("device", ["simt", CUDA], indirect=True)
@pytest.mark.parametrize("weights", WEIGHTS, ids=" ".join)
def test_so_it_counts_in_a_step_by_kernels(weights, device):
    follow(FIXED, "ga.AdamW", "autograd", *weights, device)


@pytest.fixture(params=[(a, w) for a in ADDING for w in DTYPES], ids=" ".join)
def pair(request):
    """A model over an arena and a plain fp32 one, both with SGD."""
    adding, weights = request.param
    run = Run("SGD", adding, weights, "model")
    yield run, Run("SGD")
    run.close()


def in_turn(actions, *runs):
    for k, action in enumerate(actions):
        for run in runs:
            run.act(action, k)


def test_the_fp32_sum_is_the_gradient_of_a_parameter_and_of_its_master(pair):
    run, _ = pair
    for _ in range(2):
        run.act("backward", 0)
        for p, master, view in zip(
            run.arena.module_parameters, run.arena.masters, run.arena.gradients.views
        ):
            assert p.grad is view and master.grad is view and view.dtype == torch.float32


def test_a_gradients_own_gradient_is_torchs(pair):
    """A gradient penalty: the second backward goes through `.grad` of the first."""
    for run in pair:
        x = torch.ones(2, 4, dtype=run.model.scale.dtype)
        for _ in range(2):
            h = run.model.linear(x).square() + run.model.scale.square()
            h = h + run.model.embedding(torch.tensor([0, 2])).square()
            run.backward(h.sum(), create_graph=True)
            grads = [p.grad for p in run.params]
            run.opt.zero_grad()
            run.backward(sum(grad.float().square().sum() for grad in grads))
    compare(*pair, "penalty", 2**-5 if pair[0].params[0].dtype == torch.bfloat16 else 1e-5)


def test_a_gradient_of_another_dtype_counts(pair):
    """An operation with an fp32 or fp64 tensor makes one."""
    for run in pair:
        for dtype in (torch.float32, torch.float64):
            run.backward((run.model.scale * torch.tensor([1.0, 0.5, 3.0, 2.0], dtype=dtype)).sum())
    compare(*pair, "other dtypes", 0)


def test_closed_in_the_middle_the_sum_goes_on(pair):
    run, reference = pair
    in_turn(["backward", "backward"], *pair)
    if run.products is not None:
        run.products.close()
        run.products = Products(run.arena)
    in_turn(["backward", "clip", "step"], *pair)
    compare(run, reference, "goes on", 0)


def test_a_warm_up_that_raises_leaves_the_sum(pair):
    run, reference = pair
    in_turn(["backward"], *pair)
    with preserved([run.model], "cpu"):
        run.act("raise", 0)
    in_turn(["backward", "step"], *pair)
    compare(run, reference, "after the warm-up", 0)


def test_a_released_model_is_ordinary(pair):
    run, _ = pair
    low = Net().to(run.model.scale.dtype)
    run.act("backward", 0)
    low.loss(0).backward()
    run.close()
    for dtype in (None, torch.bfloat16, torch.float32):
        for p, q in zip(run.model.parameters(), low.parameters()):
            assert p.grad.dtype == q.dtype and torch.equal(p.grad, q.grad)
        if dtype is not None:
            for model in (run.model, low):
                model.to(dtype).zero_grad()
                model.loss(1).backward()
    Arena(run.model).release()


def test_a_model_is_copied_and_pickled_without_its_sums(pair):
    run, _ = pair
    run.act("backward", 0)
    saved = io.BytesIO()
    torch.save(run.model.state_dict(), saved)
    saved.seek(0)
    loaded = Net().to(run.model.scale.dtype)
    loaded.load_state_dict(torch.load(saved))
    sums = run.arena.grads.clone()
    for model in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model)), loaded):
        assert all(map(torch.equal, model.parameters(), run.params))
        assert type(model.linear) is nn.Linear and fused_forward(model.linear) is None
        model.zero_grad()
        model.loss(0).backward()
        for p, q in zip(model.parameters(), run.params):
            assert p.grad.dtype == p.dtype and torch.equal(p.grad.float(), q.grad)
    assert torch.equal(run.arena.grads, sums)


# ---- hooks ---------------------------------------------------------------------------------------


def sees(i, p, seen, tensors):
    seen.setdefault(i, []).append(p.grad.float().clone())


def clamps(i, p, seen, tensors):
    p.grad.clamp_(-1.5, 1.5)
    sees(i, p, seen, tensors)


def assigns(i, p, seen, tensors):
    p.grad.data = p.grad.data.sign()
    sees(i, p, seen, tensors)


def takes_away(i, p, seen, tensors):
    sees(i, p, seen, tensors)
    p.grad = None


def steps(i, p, seen, tensors, make=torch.optim.AdamW):
    """The optimizer in backward: one for each parameter."""
    opt = seen.setdefault(f"optimizer {i}", make([tensors[i]], lr=0.125))
    opt.step()
    opt.zero_grad()


def steps_by_ours(i, p, seen, tensors):
    steps(i, p, seen, tensors, ga.AdamW)


def register(hook, model, tensors=()):
    """Call it when backward has added to a parameter's `.grad`.

    Args:
        hook: function of a parameter's number, the parameter, what is seen, `tensors`.
        tensors: what an optimizer updates, known when a backward runs.

    Returns:
        What is seen, a dict that the hook fills.
    """
    seen = {}
    for i, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(lambda p, i=i: hook(i, p, seen, tensors))
    return seen


def check_seen(got, want):
    assert got.keys() == want.keys()
    for i, grads in want.items():
        if isinstance(grads, list):
            torch.testing.assert_close(torch.stack(got[i]).cpu(), torch.stack(grads))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", [sees, clamps, assigns, takes_away, steps, steps_by_ours])
@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("adding", ADDING)
def test_a_hook_sees_the_sum_so_far_and_acts_as_in_torch(adding, weights, hook, when):
    """Registered before or after the arena is made."""

    def trained(adding, weights, when):
        model, tensors = Net().to(DTYPES[weights]), []
        if when == "before":
            seen = register(hook, model, tensors)
        run = Run("torch.AdamW", adding, weights, model=model)
        if when == "after":
            seen = register(hook, model, tensors)
        tensors += run.updated
        for k, action in enumerate(["backward", "backward", "step", "zero_grad"] * 3):
            run.act(action, k)
        run.close()
        return run.updated, seen

    ours, seen = trained(adding, weights, when)
    theirs, want = trained(None, "fp32", "after")
    check_seen(seen, want)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---- in a TrainStep ------------------------------------------------------------------------------

LAUNCHED = [
    pytest.param(device, options, marks=[pytest.mark.gpu] * (device == "cuda"))
    for device in ("cpu", "simt", "cuda")
    for options in ({}, {"deterministic": True})
]
REPLAYED = [
    ("simt", {"replay": "graph"}),
    pytest.param("cuda", {"replay": "graph"}, marks=pytest.mark.gpu),
]


def in_steps(steps):
    return pytest.mark.parametrize("device, options", steps, indirect=["device"])


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.head(self.backbone(x)), y)


def batch(k, device="cpu"):
    return tuple(torch.randn(6, n, generator=generator(k)).to(device) for n in (8, 1))


def torchs_steps(model, opt, count, before_step=lambda k: None):
    """So many steps of two micro-batches each."""
    for k in range(count):
        before_step(k)
        for micro in zip(*[t.chunk(2) for t in batch(k, next(model.parameters()).device)]):
            (model(micro) / 2).backward()
        opt.step()
        opt.zero_grad()
    return list(model.parameters())


def arena_of(model):
    """As torch's: weight decay for all."""
    return Arena(model, decay=lambda name, p: True)


def close_to(model, want):
    for (name, p), q in zip(model.named_parameters(), want, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")


def our_steps(model, opt, count, options, before_step=lambda k: None):
    """The same by a TrainStep."""
    device = next(model.parameters()).device
    with ga.TrainStep(model, opt, Layers.__call__, micro_batches=2, **options) as step:
        for k in range(count):
            before_step(k)
            step(batch(k, device))
        assert step.replays == options.get("replay", "eager"), step.reason


@in_steps(LAUNCHED)
@pytest.mark.parametrize("hook", [sees, clamps, assigns])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_in_a_step_acts_as_in_torch(when, hook, device, options):
    model = Layers().to(device)
    if when == "before":
        seen = register(hook, model)
    opt = ga.AdamW(arena_of(model), lr=0.01)
    with ga.TrainStep(model, opt, Layers.__call__, micro_batches=2, **options) as step:
        if when == "after":
            seen = register(hook, model)
        for k in range(4):
            step(batch(k, device))
    plain = Layers()
    want = register(hook, plain)
    close_to(model, torchs_steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), 4))
    check_seen(seen, want)


@in_steps(LAUNCHED + REPLAYED)
def test_data_assigned_before_a_step_does_no_lasting_harm(device, options):
    """The optimizer of that step knows nothing of the arena."""

    def first_step(model, parameters):
        model(batch(9, device=parameters[0].device)).backward()
        for p in parameters:
            p.grad.data = p.grad.data.clamp(-0.05, 0.05)
        torch.optim.SGD(parameters, lr=1.0).step()
        model.zero_grad()

    model, plain = Layers().to(device), Layers()
    arena = arena_of(model)
    first_step(model, arena.parameters()), first_step(plain, list(plain.parameters()))
    our_steps(model, ga.AdamW(arena, lr=0.01), 3, options)
    close_to(model, torchs_steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), 3))


def frozen(model, late):
    """Before step k: the backbone is frozen until step 2, or from step 2 to step 4."""
    return lambda k: model.backbone.requires_grad_(k >= 2 if late else not 2 <= k < 4)


@in_steps(LAUNCHED + REPLAYED)
@pytest.mark.parametrize("late", [True, False])
def test_weights_frozen_for_a_while_keep_their_moments(late, device, options):
    """An arena over all weights, of which some are frozen later on."""
    model, plain = Layers().to(device), Layers()
    opt = ga.AdamW(arena_of(model), lr=0.01, weight_decay=0.1)
    our_steps(model, opt, 6, options, frozen(model, late))
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    close_to(model, torchs_steps(plain, theirs, 6, frozen(plain, late)))
