"""State that goes from one optimizer to another: copied, matched by name, and nobody else's."""

import copy

import pytest
import torch
from helpers import EVERYWHERE, KERNELS, generator, same
from optimizers import Training, compare, give, params_of, snapshot, states, twin, unchanged
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.optim import device_optimizer
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena

Torchs = torch.optim.AdamW
DTYPES = [torch.float32, torch.bfloat16]
KEYS = ("step", "exp_avg", "exp_avg_sq")


class Side:
    """An optimizer of ours or torch's over parameters or an arena, after two steps."""

    def __init__(self, make, what, dtype, device, seed):
        if make is AdamW:
            self.run = Training(make, what, device, dtype, lr=0.01)
            self.opt, self.params = self.run.opt, self.run.params
        else:
            # Kept: an optimizer over masters alone trains nothing.
            self.arena = arena = Training(AdamW, what, device, dtype).arena
            self.params = arena.masters if arena else params_of(device, dtype=dtype)
            self.opt = Torchs(arena.parameter_groups(0.01) if arena else self.params, lr=0.01)
        for k in (seed, seed + 1):
            self.step(k)

    def step(self, k):
        give(k, self.params)
        self.opt.step()
        self.opt.zero_grad()


def hand_over(how, one, two):
    saved = one.opt.state_dict()
    two.opt.load_state_dict(copy.deepcopy(saved) if how == "a copied state_dict" else saved)


def state_of(side):
    """Name of the state -> its values, of each parameter in the order of `params`.

    torch's step counts lie on the CPU."""
    return [{k: side.opt.state[p][k].cpu() for k in KEYS} for p in side.params]


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ["parameters", "arena"])
@pytest.mark.parametrize(
    "source, target, how",
    [
        (AdamW, AdamW, "state_dict"),
        (Torchs, AdamW, "state_dict"),
        # torch's load_state_dict keeps the tensors that it is given.
        (AdamW, Torchs, "a copied state_dict"),
    ],
)
@pytest.mark.parametrize("first", ["source", "target"])
def test_no_step_writes_what_another_optimizer_holds(
    first, source, target, how, what, dtype, device
):
    one, two = Side(source, what, dtype, device, 0), Side(target, what, dtype, device, 50)
    hand_over(how, one, two)
    for a, b in zip(state_of(one), state_of(two)):
        for key in KEYS:
            assert torch.equal(a[key], b[key]), f"{key} was not handed over"
    sides = [one, two] if first == "source" else [two, one]
    for stepping, other in (sides, sides[::-1]):
        before = snapshot(other.opt)
        stepping.step(8)
        unchanged(before, other.opt)
    assert [float(s) for s in states(one.opt, "step")] == [3.0] * len(one.params)
    assert [float(s) for s in states(two.opt, "step")] == [3.0] * len(two.params)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("what", ["parameters", "arena"])
def test_state_lies_where_it_lay_before_it_was_replaced(what, device):
    """A captured step knows these addresses."""
    run = Training(AdamW, what, device, lr=0.01)
    if what == "parameters":
        # With gaps; AdamW is over these very parameters.
        run.params[0].data = torch.ones(10, 9, device=device)[:, :5]
    run.step(0)

    def addresses():
        return [t.data_ptr() for p in run.params for t in run.opt.state[p].values()]

    before = addresses()
    held = [t for p in run.params for t in run.opt.state[p].values()]
    run.opt.prepare()
    run.step(1)
    after = [t for p in run.params for t in run.opt.state[p].values()]
    assert all(a is b for a, b in zip(after, held, strict=True))
    run.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))
    assert addresses() == before
    for change in (
        lambda: [s.update(exp_avg=s["exp_avg"] * 2) for s in run.opt.state.values()],
        lambda: [s.update(step=7) for s in run.opt.state.values()],
        run.opt.state.clear,
    ):
        change()
        run.step(1)
        assert addresses() == before
    run.close()


# ---- by name -------------------------------------------------------------------------------------


def network(device, dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)
    return nn.Sequential(*layers).to(device, dtype)


def gradients(params, k):
    """Random ones of step k, in the order of the names."""
    random = generator(k)
    for _, p in sorted(params.items()):
        p.grad = torch.randn(p.shape, generator=random).to(p.device)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moments_survive_a_new_arena_over_more_tensors(dtype, device):
    """As torch's add_param_group, in fp32: what is unfrozen begins anew, the head resumes."""
    model = network(device, dtype)
    twins = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    model[:2].requires_grad_(False)
    head = {name: p for name, p in twins.items() if name.startswith("2.")}
    rest = {name: p for name, p in twins.items() if name not in head}

    def groups(params):
        return [
            {"params": [p for p in params.values() if (p.dim() > 1) == decays], "weight_decay": wd}
            for decays, wd in ((True, 0.1), (False, 0.0))
        ]

    theirs = Torchs(groups(head), lr=0.01)
    arena = Arena(model)
    mine = AdamW(arena, lr=0.01, weight_decay=0.1)

    def train(ks, reference):
        for k in ks:
            ours = arena.named_parameters()
            assert ours.keys() == reference.keys()
            gradients(ours, k), gradients(reference, k)
            mine.step(), theirs.step()
            compare([ours[name] for name in reference], reference.values(), f"step {k}")

    train(range(4), head)
    saved = mine.state_dict()
    arena.release()
    model.requires_grad_(True)
    arena = Arena(model)
    mine = AdamW(arena, lr=0.5, weight_decay=0.3)
    mine.load_state_dict(saved)
    for group in groups(rest):
        theirs.add_param_group(group)
    assert {(g["lr"], g["weight_decay"]) for g in mine.param_groups} == {(0.01, 0.1), (0.01, 0.0)}
    train(range(4, 8), twins)
    counts = [float(mine.state[p]["step"]) for p in arena.named_parameters().values()]
    assert counts == [4.0] * 4 + [8.0] * 2
    arena.release()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_named_parameters_are_matched_by_name(device):
    """In another order, in other groups, with some that the dict lacks; else by order, as torch."""
    params = dict(zip("abcd", params_of(device, ((2, 3), (2, 3), (4,), (2, 3)))))
    source = Torchs([(name, params[name]) for name in "abc"], lr=0.01)
    give(0, list(params.values())[:3])
    source.step()
    saved = source.state_dict()
    groups = [
        {"params": [("d", params["d"])], "lr": 0.7},
        {"params": [(name, params[name]) for name in "cba"]},
    ]
    mine = AdamW(groups, lr=0.5)
    mine.load_state_dict(saved)
    assert [group["lr"] for group in mine.param_groups] == [0.7, 0.01]
    assert mine.names() == ["d", "c", "b", "a"]
    for name in "abc":
        for key in KEYS:
            same(mine.state[params[name]][key], source.state[params[name]][key].to(device), name)
    assert not mine.state.get(params["d"])
    # Without names, by order: a moment of another shape.
    with pytest.raises(ArgumentError, match="exp_avg of parameter 1"):
        AdamW([params[name] for name in "dcba"]).load_state_dict(saved)
    other = AdamW([(name * 2, params[name]) for name in "abc"])
    other.load_state_dict(saved)
    for name in "abc":
        same(other.state[params[name]]["exp_avg"], source.state[params[name]]["exp_avg"], name)
    # Two stored groups in one of ours: by order, which does not fit.
    with pytest.raises(ValueError, match="different number of parameter groups"):
        AdamW([(name, params[name]) for name in "dcba"]).load_state_dict(mine.state_dict())


def as_written_by_torch_1_9(state_dict):
    """Numbers, and the options that there were."""
    options = {"params", "lr", "betas", "eps", "weight_decay", "amsgrad"}
    return {
        "state": {
            i: {**state, "step": int(state["step"])} for i, state in state_dict["state"].items()
        },
        "param_groups": [
            {key: value for key, value in group.items() if key in options}
            for group in state_dict["param_groups"]
        ],
    }


@pytest.mark.parametrize("written", ["by torch 1.9", "without names", "with names"])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_torchs_one_group_and_the_two_of_an_arena(device, written):
    """The message names the arena that loads it, and that one does."""
    model = network(device)
    named = written == "with names"
    params = model.named_parameters() if named else model.parameters()
    theirs = Torchs(params, lr=0.01, weight_decay=0.2)
    for k in range(3):
        gradients(dict(model.named_parameters()), k)
        theirs.step()
    saved = copy.deepcopy(theirs.state_dict())
    if written == "by torch 1.9":
        saved = as_written_by_torch_1_9(saved)
    twin_model = copy.deepcopy(model)
    arena = Arena(twin_model)
    mine = AdamW(arena)
    before = snapshot(mine)
    with pytest.raises(ArgumentError) as info:
        mine.load_state_dict(saved)
    words = "parameter groups of [6] tensors; expected [2, 4]"
    way_out = "ga.Arena(model, decay=lambda name, p: True)"
    assert words in str(info.value) and way_out in str(info.value)
    unchanged(before, mine)
    arena.release()
    arena = eval(way_out, {"ga": ga, "model": twin_model})
    mine = AdamW(arena)
    mine.load_state_dict(saved)
    for k in range(3, 6):
        gradients(dict(model.named_parameters()), k)
        gradients(arena.named_parameters(), k)
        theirs.step(), mine.step()
        compare(twin_model.parameters(), model.parameters(), f"step {k}")
    arena.release()


# ---- what a plan follows from --------------------------------------------------------------------


@pytest.fixture
def plans(monkeypatch):
    """One entry for each plan that is made."""
    made, plain = [], device_optimizer.DevicePlan
    monkeypatch.setattr(
        device_optimizer, "DevicePlan", lambda *args: made.append(1) or plain(*args)
    )
    return made


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("what", ["parameters", "arena"])
def test_fresh_gradients_need_no_new_plan(what, device, plans):
    run = Training(AdamW, what, device, lr=0.01, max_norm=1.0)
    kept = []
    for k in range(5):
        run.step(k)
        # So that the next ones lie elsewhere.
        kept += run.gradients()
    assert len(plans) == 1
    run.close()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_edits_in_the_same_memory_are_noticed(device, plans):
    """Another order of a weight, a gradient that is a negated view, state on another device."""
    ours = params_of(device, ((6, 6), (1,), (2, 3)))
    reference = twin(ours)
    mine, theirs = AdamW(ours, lr=0.01), Torchs(reference, lr=0.01)

    def transpose(params, opt):
        params[0].data = params[0].data.t()
        for key in ("exp_avg", "exp_avg_sq"):
            opt.state[params[0]][key] = opt.state[params[0]][key].t().clone()

    def negate(params, opt):
        z = torch.complex(torch.zeros_like(params[1].grad), -params[1].grad)
        params[1].grad = z.conj().imag
        assert params[1].grad.is_neg()

    def move_state(params, opt):
        for state in opt.state.values():
            for t in state.values():
                t.data = t.data.clone()

    for k, change in enumerate((None, None, transpose, negate, move_state, None)):
        give(k, ours, reference)
        if change is not None:
            change(ours, mine), change(reference, theirs)
            if change is transpose:
                give(k, ours, reference)
        made = len(plans)
        mine.step(), theirs.step()
        compare(ours, reference, f"step {k}")
        assert change is None or len(plans) > made
