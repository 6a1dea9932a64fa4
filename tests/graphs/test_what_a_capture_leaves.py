"""A capture leaves no trace, in models, losses and optimizers that are not like ours."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError, CaptureError


@pytest.fixture(autouse=True)
def on_a_tape():
    with ga.use_backend("simt"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no CUDA graph")
        yield


class MomentumEncoder(nn.Module):
    """Frozen weights that forward moves after the trained ones."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.key.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for k, q in zip(self.key.parameters(), self.query.parameters()):
                k.mul_(0.9).add_(q, alpha=0.1)
        return F.mse_loss(self.query(x), self.key(x))


class Centered(nn.Module):
    """Puts another tensor in the place of a buffer: such a step runs eagerly."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        self.center = 0.9 * self.center + 0.1 * x.mean(0)
        return self.linear(x - self.center).square().mean()


class CenteredLoss(nn.Module):
    """A loss with a buffer."""

    def __init__(self, rebind: bool):
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.rebind = rebind

    def forward(self, model, batch):
        out = model(*batch)
        loss = (out - self.center).square().mean()
        with torch.no_grad():
            moved = 0.9 * self.center + 0.1 * out.mean(0)
            if self.rebind:
                self.center = moved
            else:
                self.center.copy_(moved)
        return loss


def losses(make_model, replay, loss_fn=None, steps: int = 4, lists: bool = False):
    """(losses, state of the model and of the loss, how it ran). The third batch is shorter."""
    torch.manual_seed(0)
    model, loss_fn = make_model(), loss_fn or (lambda model, batch: model(*batch))
    batches = [(torch.rand(5 if i == 2 else 8, 8),) for i in range(steps)]
    with ga.TrainStep(model, loss_fn=loss_fn, replay=replay) as step:
        out = [float(step([b] if lists else b).loss) for b in batches]
        state = [t.clone() for t in model.state_dict().values()]
        if isinstance(loss_fn, nn.Module):
            state += [t.clone() for t in loss_fn.buffers()]
        return out, state, step.replays


def same(first, second):
    return first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


@pytest.mark.parametrize("lists", [False, True], ids=["batch", "list"])
@pytest.mark.parametrize("make, replays", [(MomentumEncoder, "graph"), (Centered, "eager")])
def test_a_forward_that_writes_into_its_module_gives_what_eager_gives(make, replays, lists):
    eager, graph = (losses(make, replay, lists=lists) for replay in ("eager", "graph"))
    assert graph[2] == replays and same(eager, graph)


@pytest.mark.parametrize("lists", [False, True], ids=["batch", "list"])
@pytest.mark.parametrize("rebind, replays", [(False, "graph"), (True, "eager")])
def test_a_loss_with_buffers_is_part_of_the_state(rebind, replays, lists):
    eager, graph = (
        losses(lambda: nn.Linear(8, 8), replay, CenteredLoss(rebind), lists=lists)
        for replay in ("eager", "graph")
    )
    assert graph[2] == replays and same(eager, graph)


def test_another_loss_with_buffers_is_taken_into_the_state():
    step = ga.TrainStep(nn.Linear(8, 8), loss_fn=CenteredLoss(False), replay="graph")
    step((torch.rand(8, 8),))
    step.loss_fn = second = CenteredLoss(True)
    with pytest.warns(UserWarning, match="center has another address"):
        step((torch.rand(8, 8),))
    assert step.replays == "eager" and second.center.abs().sum() > 0


def adversarial(replay):
    """A loss that trains another model: its weights, those of the model, how it ran."""
    torch.manual_seed(0)
    model, other = nn.Linear(8, 8), nn.Linear(8, 1)
    opt = torch.optim.SGD(other.parameters(), lr=0.1)

    def loss_fn(model, x):
        out = model(x)
        other(out.detach()).square().mean().backward()
        opt.step(), opt.zero_grad()
        return out.square().mean() + other(out).mean()

    with ga.TrainStep(model, loss_fn=loss_fn, replay=replay) as step:
        for _ in range(4):
            step(torch.rand(4, 8))
        return [*other.parameters(), *model.parameters()], step.reason


def test_a_step_of_another_models_optimizer_is_refused_before_it_is_taken():
    (eager, _), (graph, reason) = map(adversarial, ("eager", "graph"))
    assert "calls step() of SGD over weights of another model" in reason
    assert all(map(torch.equal, eager, graph))


def test_a_capture_that_fails_leaves_the_graphs_that_there_are():
    """The mask grows with the longest batch."""
    model = nn.Linear(8, 8)
    model.register_buffer("mask", torch.ones(4, 1))

    def loss_fn(model, x):
        if len(model.mask) < len(x):
            model.mask = torch.ones(len(x), 1)
        return (model(x) * model.mask[: len(x)]).square().mean()

    step = ga.TrainStep(model, loss_fn=loss_fn, replay="graph")
    step(torch.ones(4, 8))
    with pytest.raises(CaptureError, match="mask has another address"):
        step(torch.ones(8, 8))
    step(torch.ones(4, 8))
    assert len(model.mask) == 4


@pytest.mark.parametrize("name", ["weight", "base"])
def test_a_forward_that_writes_into_a_trained_weight_or_one_of_many_frozen_ones_is_refused(name):
    model = nn.Linear(8, 8)
    model.base = nn.Parameter(torch.ones(1000), requires_grad=False)

    def loss_fn(model, x):
        with torch.no_grad():
            getattr(model, name).mul_(0.9)
        return model(x).square().mean()

    step = ga.TrainStep(model, loss_fn=loss_fn, replay=ga.training.Replay("require"))
    with pytest.raises(CaptureError, match=f"forward writes into the weight {name}"):
        step(torch.rand(4, 8))


def test_a_frozen_weight_of_up_to_four_times_the_trained_ones_may_be_written():
    """As that of a momentum encoder: each step writes it once, warm-ups of a capture do not."""
    model = nn.Linear(8, 8)
    model.base = nn.Parameter(torch.ones(4 * 72), requires_grad=False)

    def loss_fn(model, x):
        with torch.no_grad():
            model.base.mul_(0.5)
        return model(x).square().mean()

    step = ga.TrainStep(model, loss_fn=loss_fn, replay=ga.training.Replay("require"))
    for count in range(1, 4):
        step(torch.rand(4, 8))
        assert set(model.base.tolist()) == {0.5**count}


def test_a_warm_up_does_not_write_into_the_callers_micro_batches():
    def loss_fn(model, batch):
        batch["x"].div_(255.0)
        return model(batch["x"]).square().mean()

    def run(replay):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        data = [[{"x": torch.rand(8, 8) * 255}] for _ in range(3)]
        with ga.TrainStep(model, loss_fn=loss_fn, replay=replay) as step:
            return [float(step(micros).loss) for micros in data]

    assert run("eager") == run("graph")


def test_a_backward_that_reaches_another_arena_runs_eagerly():
    """As that of a generator through its discriminator."""

    def run(replay):
        torch.manual_seed(0)
        made, judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        judged = ga.AdamW(ga.Arena(judge), lr=1e-2)
        options = {"replay": replay, "deterministic": True}
        step = ga.TrainStep(made, None, lambda m, z: F.softplus(-judge(m(z))).mean(), **options)
        judging = ga.TrainStep(judge, judged, lambda m, x: F.softplus(m(x)).mean(), **options)
        out = []
        for _ in range(4):
            z = torch.randn(8, 8)
            judged.zero_grad()
            out += [float(judging(made(z).detach()).loss), float(step(z).loss)]
        return out, step.replays, step.reason

    graph, replays, reason = run("graph")
    assert replays == "eager"
    assert re.search("backward also reaches [02].(weight|bias) of another arena", reason)
    assert graph == run("eager")[0]


# ---- optimizers ---------------------------------------------------------------------------------


def captured(opt, model):
    """A GraphedStep of a simple step, after capture()."""

    def fn(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    step = ga.GraphedStep(fn, [model, opt])
    step.capture(torch.rand(4, 8))
    return step


class Counting(torch.optim.Optimizer):
    """Counts its steps in a number."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.sub_(p.grad / state["step"])


class Lookahead(torch.optim.AdamW):
    """State of its own that does not begin at zero."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        super().step()
        for p in params:
            slow = self.state[p].setdefault("slow", p.clone())
            p.copy_(slow.lerp_(p, 0.5))


@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_optimizer_that_counts_on_the_host_runs_eagerly_from_where_it_was(steps_before):
    model = nn.Linear(8, 8)
    opt = Counting(model.parameters(), torch.tensor(0.1))
    for _ in range(steps_before):
        model(torch.rand(4, 8)).sum().backward()
        opt.step()
    weight = model.weight.detach().clone()
    step = captured(opt, model)
    assert step.replays == "eager" and torch.equal(model.weight, weight)
    assert opt.state[model.weight].get("step", 0) == steps_before
    if steps_before:
        assert "changes 'step' of its state on the host" in step.reason


def test_an_adamw_with_more_state_is_not_set_to_zero():
    model = nn.Linear(8, 8)
    opt = Lookahead(model.parameters(), lr=torch.tensor(0.01), fused=True)
    step = captured(opt, model)
    assert step.replays == "eager" and "the initial value of that state" in step.reason
    assert not opt.state[model.weight]


def test_all_of_several_optimizers_are_restored():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    opts = [
        torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1), momentum=0.9) for m in (first, second)
    ]

    def fn(x):
        second(first(x)).square().mean().backward()
        for opt in opts:
            opt.step()

    step = ga.GraphedStep(fn, [first, second, *opts])
    step.capture(torch.rand(4, 8))
    assert step.replays == "eager" and not any(opt.state[p] for opt in opts for p in opt.state)


def test_an_error_in_a_warm_up_is_not_hidden_by_one_of_the_restore():
    model = nn.Linear(8, 8)
    opt = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)

    def fn(x):
        model(x).sum().backward()
        opt.step()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ga.GraphedStep(fn, [model, opt]).capture(torch.rand(4, 8))
    assert not opt.state[model.weight]


# ---- what makes a graph's key, and errors in words -----------------------------------------------


def test_fp32_precision_set_by_either_of_torchs_names_makes_another_graph():
    step = ga.GraphedStep(lambda x: x @ x)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            matmul.fp32_precision = precision
            step.capture(torch.rand(4, 4))
        assert len(step) == 2
    finally:
        matmul.fp32_precision = before


def test_a_graph_of_inference_mode_is_not_that_of_no_grad():
    model = nn.Linear(8, 8)
    step = ga.GraphedStep(lambda x: model(x).mean(), [model])
    x = torch.rand(4, 8)
    with torch.inference_mode():
        first = float(step(x))
    with torch.no_grad():
        assert float(step(x)) == first and len(step) == 2


def test_a_loss_that_cannot_be_hashed_is_replayed():
    class Loss:
        __hash__ = None

        def __call__(self, model, x):
            return model(x).square().mean()

    step = ga.TrainStep(nn.Linear(8, 8), loss_fn=Loss(), replay="graph")
    for _ in range(2):
        step(torch.rand(4, 8))
    assert step.replays == "graph" and len(step.graphs) == 1


def test_a_method_is_the_same_loss_each_time_it_is_set():
    class Trainer:
        def loss(self, model, x):
            return model(x).square().mean()

    trainer = Trainer()
    step = ga.TrainStep(nn.Linear(8, 8), loss_fn=trainer.loss, replay="graph")
    for _ in range(3):
        step(torch.rand(4, 8))
        step.loss_fn = trainer.loss
    assert len(step.graphs) == 1


@pytest.mark.parametrize("replay", ["eager", "graph"])
def test_tokens_are_one_number_of_any_shape(replay):
    def loss_fn(model, batch):
        return model(*batch).square().sum(), torch.full(shape, len(batch[0]))

    step = ga.TrainStep(nn.Linear(8, 8), loss_fn=loss_fn, replay=replay)
    shape = (1,)
    out = step([(torch.ones(4, 8),), (torch.ones(3, 8),)])
    assert int(out.tokens) == 7 and out.tokens.shape == ()
    shape = (2,)
    with pytest.raises(ArgumentError, match=r"a tensor of shape \(2,\); expected one number"):
        step([(torch.ones(5, 8),)])


def test_a_step_called_under_another_backend_says_so():
    step = ga.TrainStep(nn.Linear(8, 8), loss_fn=lambda m, x: m(x).sum(), replay="graph")
    step(torch.ones(4, 8))
    with (
        ga.use_backend("torch"),
        pytest.raises(CaptureError, match="the backend is torch now"),
    ):
        step(torch.ones(4, 8))


def test_a_buffer_that_the_first_forward_makes_is_named():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("table", None, persistent=False)

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(8.0)
            return (self.linear(x) * self.table).sum()

    model = Lazy()
    step = ga.TrainStep(model, loss_fn=lambda m, x: m(x), replay="graph")
    step(torch.ones(4, 8))
    assert step.replays == "eager" and "Instead: call the model once before" in step.reason
    model(torch.ones(4, 8))
    step.reset()
    step(torch.ones(4, 8))
    assert step.replays == "graph"


def test_the_logged_learning_rate_is_the_first_groups_in_the_step_also_on_the_device():
    model = nn.Linear(8, 8)
    arena = ga.Arena(model)
    rates = zip(arena.parameters(), (0.5, 7.0))
    opt = torch.optim.SGD([{"params": [p], "lr": torch.tensor(rate)} for p, rate in rates])
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    rows = []
    with ga.TrainStep(model, opt, lambda m, x: m(x).square().mean(), scheduler=schedule) as step:
        list(ga.train(step, [torch.rand(4, 8)] * 3, 3, log=lambda row: rows.append(row["lr"])))
    assert [float(lr) for lr in rows] == [0.5, 0.25, 0.125]
