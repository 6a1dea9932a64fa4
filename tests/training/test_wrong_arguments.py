"""Who gives a model where its parameters are expected, a loss where the optimizer is, and the like,
is told what was given and what is expected. Nothing has changed then."""

import collections
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.optim.arena import Arena


def loss_fn(model, micro):
    return model(micro).square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# What was called, and the beginning of the message. Each begins with a new nn.Linear.
CASES = {
    "the loss in the optimizer's place": (
        lambda model: ga.TrainStep(model, loss_fn),
        "opt is the function loss_fn; expected an optimizer, a list of optimizers, or None. A loss "
        "has a name: ga.TrainStep(model, loss_fn=...)",
    ),
    "a list of something else": (
        lambda model: ga.TrainStep(model, [sgd(model), model]),
        "opt holds a Linear (a module); expected an optimizer, a list of optimizers, or None",
    ),
    "no optimizer in a list": (
        lambda model: ga.TrainStep(model, []),
        "opt is an empty list; expected an optimizer, a list of optimizers, or None",
    ),
    "an optimizer that calls the loss": (
        lambda model: ga.TrainStep(model, torch.optim.LBFGS(model.parameters())),
        "opt is LBFGS, which calls the loss several times in a step; expected an optimizer",
    ),
    "a scheduler that needs a metric": (
        lambda model: ga.TrainStep(
            model, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(model))
        ),
        "scheduler is ReduceLROnPlateau, which needs a metric in each step; expected one",
    ),
    "a step of parameters": (
        lambda model: ga.TrainStep(model.parameters()),
        "model is a generator; expected a module",
    ),
    "a criterion as loss_fn": (
        lambda model: ga.TrainStep(model, loss_fn=nn.MSELoss()),
        "loss_fn is MSELoss, which takes outputs and targets; expected a function of (model, "
        "micro): lambda model, micro: criterion(model(micro[0]), micro[1])",
    ),
    "a function of torch's as loss_fn": (
        lambda model: ga.TrainStep(model, loss_fn=F.cross_entropy),
        "loss_fn is cross_entropy, which takes outputs and targets",
    ),
    "no loss_fn": (
        lambda model: ga.TrainStep(model, loss_fn=None),
        "loss_fn is None; expected a function of (model, micro)",
    ),
    "no micro-batch": (
        lambda model: ga.TrainStep(model, micro_batches=0),
        "micro_batches is 0; expected a whole number of 1 or more",
    ),
    "a negative norm": (
        lambda model: ga.TrainStep(model, max_norm=-1.0),
        "max_norm is -1.0; expected a number of 0 or more",
    ),
    "a number of micro-batches as text": (
        lambda model: ga.TrainStep(model, micro_batches="4"),
        "micro_batches is '4'; expected a whole number of 1 or more",
    ),
    "autocast as a switch": (
        lambda model: ga.TrainStep(model, autocast=True),
        "autocast is True; expected a dtype, such as torch.bfloat16, or None",
    ),
    "autocast without a scaler": (
        lambda model: ga.TrainStep(model, autocast=torch.float16),
        "float16 needs a scaled loss: a loop of your own with torch.amp.GradScaler, or bfloat16",
    ),
    "ranks as a number": (
        lambda model: ga.TrainStep(model, distributed=2),
        "distributed is an int; expected a ga.Distributed, or None",
    ),
    "a schedule that is a function": (
        lambda model: ga.TrainStep(model, scheduler=loss_fn),
        "scheduler is the function loss_fn; expected a learning-rate scheduler, a list of them, "
        "or None",
    ),
    "an arena of parameters": (
        lambda model: Arena(model.parameters()),
        "module is a generator; expected a module, not its parameters: ga.Arena(model)",
    ),
    "an arena of a tensor": (
        lambda model: Arena(model.weight),
        "module is a tensor of shape (2, 2); expected a module",
    ),
    "an arena of a class": (
        lambda model: Arena(nn.Linear),
        "module is the class Linear; expected a module",
    ),
    "decay as a number": (
        lambda model: Arena(model, decay=0.1),
        "decay is a float; expected a function of (name, parameter), or None",
    ),
    "an optimizer of a model": (
        lambda model: ga.AdamW(model),
        "params is a Linear (a module); expected parameters or an arena: model.parameters(), or "
        "ga.Arena(model)",
    ),
    "an optimizer of nothing": (
        lambda model: ga.AdamW(None),
        "params is None; expected parameters or an arena",
    ),
    "clipping of a model": (
        lambda model: ga.clip_grad_norm_(model, 1.0),
        "parameters is a Linear (a module); expected parameters or an arena: model.parameters(), "
        "or ga.Arena(model)",
    ),
    "clipping of an optimizer": (
        lambda model: ga.clip_grad_norm_(sgd(model), 1.0),
        "parameters is an SGD (an optimizer); expected parameters or an arena",
    ),
    "clipping of parameter groups": (
        lambda model: ga.clip_grad_norm_(sgd(model).param_groups, 1.0),
        "parameters holds a dict; expected tensors",
    ),
    "clipping with the arguments swapped": (
        lambda model: ga.clip_grad_norm_(1.0, model.parameters()),
        "max_norm is a generator; expected a number",
    ),
    "the state of a captured step as a number": (
        lambda model: ga.GraphedStep(loss_fn, 3),
        "state is an int; expected modules, optimizers and tensors",
    ),
    "a captured step of no function": (
        lambda model: ga.GraphedStep(None, model),
        "fn is None; expected a function",
    ),
    "embeddings of parameters": (
        lambda model: ga.deterministic_embeddings(model.parameters()),
        "model is a generator; expected a module",
    ),
}


def test_what_was_given_and_what_is_expected_is_said():
    # One test: of many the fast set would take eight.
    for case, (call, message) in CASES.items():
        print(case)
        model = nn.Linear(2, 2)
        with pytest.raises(ArgumentError, match=re.escape(message)):
            call(model)
        assert not any(hook for p in model.parameters() for hook in p._backward_hooks or ())
        assert vars(model).keys() == vars(nn.Linear(2, 2)).keys()
        assert "an Arena" in message or Arena.of(model) is None, "only the caller makes one"


def test_containers_of_parameters_are_parameters():
    """nn.ParameterList is a module, and torch's optimizers take it."""
    params = nn.ParameterList([nn.Parameter(torch.ones(3))])
    params[0].grad = torch.full((3,), 2.0)
    assert float(ga.clip_grad_norm_(params, 1.0)) == pytest.approx(12**0.5)
    for optimizer in (ga.AdamW, ga.optim.Lion):
        optimizer(params).step()
    assert not params[0].eq(1).any()


def test_a_model_without_tokens_is_told_to_bring_a_loss():
    model = nn.Linear(4, 3)
    message = r"returned \(8, 3\) for targets of \(8, 3\).*For another loss pass loss_fn"
    with ga.TrainStep(model) as step, pytest.raises(ArgumentError, match=message):
        step((torch.ones(8, 4), torch.ones(8, 3)))


@pytest.mark.parametrize("replay", ["eager", "graph"])
@pytest.mark.parametrize("form", [lambda batch: batch, lambda batch: [batch, batch]])
def test_a_mapping_that_is_no_dict_is_a_batch(replay, form):
    """As the BatchEncoding of transformers is."""
    batch = collections.UserDict(x=torch.ones(4, 8), y=torch.zeros(4, 8))

    def loss_fn(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"])

    losses = []
    for each in (batch, dict(batch)):
        torch.manual_seed(0)
        with ga.use_backend("simt"):
            step = ga.TrainStep(nn.Linear(8, 8), loss_fn=loss_fn, replay=replay)
            losses.append([float(step(form(each)).loss) for _ in range(2)])
            assert step.replays == replay
    assert losses[0] == losses[1]


def test_a_loss_beside_something_that_is_no_count_is_named():
    def loss_fn(model, x):
        return model(x).sum(), model(x)

    step = ga.TrainStep(nn.Linear(8, 8), loss_fn=loss_fn)
    with pytest.raises(ArgumentError, match=r"tokens in a tensor of shape \(4, 8\)"):
        step(torch.ones(4, 8))


@pytest.mark.parametrize("replay", ["eager", "graph"])
def test_a_step_whose_model_was_converted_is_told_what_helps(replay):
    """Not reset(): the arena has the old weights. What the message advises does help."""
    model = nn.Linear(2, 2)
    with ga.use_backend("simt"):
        step = ga.TrainStep(model, loss_fn=loss_fn, replay=replay)
        step(torch.ones(4, 2))
        model.double()
        for _ in range(2):
            with pytest.raises(ArgumentError, match=r"is no longer a view.*call arena.release\(\)"):
                step(torch.ones(4, 2).double())
            step.reset()
        step.arena.release()
        step = ga.TrainStep(model.float(), loss_fn=loss_fn, replay=replay)
        before = model.weight.detach().clone()
        step(torch.ones(4, 2))
    assert not torch.equal(model.weight, before)
