"""A replayed TrainStep is an eager one: the same bits, no trace of the capture.

On a GPU these are CUDA graphs; on the CPU, under backend simt, a tape stands in for them, and the
same claims hold.
"""

import copy
import itertools
import json
import warnings

import pytest
import torch
from helpers import EVERYWHERE, KERNELS, same
from replays import (
    HIDDEN,
    LIMIT,
    LR,
    OUTPUTS,
    Net,
    agree,
    batches,
    compare,
    encoder,
    frozen,
    lists,
    llama,
    loss_fn,
    make,
    mean_loss,
    outputs_agree,
    seed,
    side_by_side,
    their_loss,
    theirs,
    torchs,
    trained,
    unchanged,
)
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError, CaptureError
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.loop import warmup_cosine
from gpuaccel.training.step import TrainStep

CASES = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": torch.bfloat16},
    "q k v together": {"net": side_by_side},
    "bf16, q k v together": {"net": side_by_side, "dtype": torch.bfloat16},
    "grouped attention": {"net": llama},
    "encoder": {"net": encoder},
    "tied attention": {"net": lambda: llama(tied=True)},
    "a mean": {"loss": mean_loss},
    "a mean, three": {"loss": mean_loss, "micro_batches": 3},
    "scope block": {"opt": {"scope": "block"}},
    "scope tensor": {"opt": {"scope": "tensor"}},
    "bf16, scope block": {"opt": {"scope": "block"}, "dtype": torch.bfloat16},
    "unequal micro-batches": {"micro_batches": 3},
    "one micro-batch": {"micro_batches": 1},
    "frozen": {"net": frozen},
    "rare weight": {"net": lambda: Net(rare=True)},
    "tied": {"net": lambda: Net(tied=True)},
    "batch norm": {"net": lambda: Net(norm=True)},
    "amsgrad, maximize": {"opt": {"amsgrad": True, "maximize": True}},
    "stochastic rounding": {
        "dtype": torch.bfloat16,
        "opt": {"stochastic_rounding": True, "seed": 5},
    },
}


@pytest.mark.parametrize("make_data", [batches, lists])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_replayed_run_has_the_bits_of_an_eager_one(device, case, make_data, counts):
    """Losses, norms, tokens, clip results, weights, moments, skips, generators: with dropout, a
    schedule, clipping, a NaN, two lengths in turn. A list is one launch for each and a tail."""
    data = make_data(device, bad=(3,))
    wanted = compare(device, data, **CASES[case])
    launches = [1 if make_data is batches else len(micros) + 1 for micros in data]
    assert counts.replays == sum(launches)
    assert make_data is lists or counts.captures == 2
    # What was compared was a run in which all of it happened.
    assert [bool(out.finite.all()) for out in wanted] == [k != 3 for k in range(len(data))]
    assert len({out.loss.item() for out in wanted}) == len(data)
    clipped = [(out.scale < 1).any() for out in wanted if out.finite.all()]
    assert all(clipped), "clipping had nothing to do"


@pytest.mark.parametrize("kind", ["whole", "list"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_torchs_optimizer_and_torchs_clipping_are_replayed_with_eagers_bits(device, kind):
    data = batches(device, n=6) if kind == "whole" else lists(device)
    runs = {}
    for replay in ("eager", "graph"):
        torch.manual_seed(0)
        model = Net().to(device)
        opt = torchs(model, device)
        step = TrainStep(
            model,
            opt,
            loss_fn,
            micro_batches=2,
            max_norm=LIMIT,
            replay=replay,
            deterministic=True,
            scheduler=warmup_cosine(opt, 2, 6),
        )
        seed()
        runs[replay] = trained(step, data, device)
        assert step.replays == replay
    outputs_agree(runs["graph"][0], runs["eager"][0])
    agree(runs["graph"][1], runs["eager"][1])
    assert all(out.scale < 1 for out in runs["eager"][0])


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_replayed_run_warns_of_nothing(device):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(make(device, "graph"), batches(device, n=4), device)
    assert not said, [str(w.message) for w in said]


@pytest.mark.parametrize(
    "options, steps",
    [
        # A kind that is new in the middle of a list.
        ({}, [[(8, 0), (8, 1)], [(8, 2), (16, 3), (8, 4), (12, 5)], [(12, 6), (8, 7)]]),
        # A graph that has to go in the middle of a list is captured again there: its warm-up must
        # not take the sums so far.
        ({"max_graphs": 1}, [[(8, 0), (16, 1), (8, 2)], [(16, 3), (8, 4)]]),
    ],
    ids=["new kinds", "more than max_graphs"],
)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_capture_in_the_middle_of_a_list_leaves_the_sums_right(device, options, steps):
    """A micro-batch has two sequences, of a length and a seed."""

    def micro(T, seed):
        return batches(device, n=1, rows=2, lengths=(T,), seed=seed)[0]

    compare(device, [[micro(*kind) for kind in kinds] for kinds in steps], **options)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_lists_and_whole_batches_may_take_turns(device):
    whole, split = batches(device, n=4), lists(device)
    compare(device, [whole[0], split[1], whole[1], split[2], whole[2], split[0]])


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_loss_that_counts_tokens_and_a_mean_may_take_turns_over_lists(device):
    def between(step, k):
        step.loss_fn = mean_loss if k in (2, 3) else loss_fn

    compare(device, lists(device), between)


@pytest.mark.parametrize("make_data", [batches, lists])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_gradients_of_a_backward_outside_of_the_step_do_not_get_in(device, make_data):
    """Taken away they do not count; standing ones are refused before anything changes."""
    probe = batches(device, n=1)[0]

    def between(step, k):
        loss_fn(step.model, probe)[0].backward()
        step.optimizers[0].zero_grad()

    compare(device, make_data(device), between, net=lambda: Net(dropout=0.0))
    with make(device, "graph") as step:
        data = make_data(device)
        step(data[0])
        loss_fn(step.model, probe)[0].backward()
        with pytest.raises(CaptureError, match="gradients stand from a backward outside"):
            step(data[1])
        assert step.count == 1
        step.optimizers[0].zero_grad()
        step(data[1])


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_schedule_of_betas_reaches_an_optimizer_of_torchs(device):
    """Each other value needs a capture of its own."""
    ends = []
    for replay in ("eager", "graph"):
        torch.manual_seed(0)
        model = Net(dropout=0.0).to(device)
        arena = ga.Arena(model)
        lr = torch.tensor(LR, device=device)
        options = {"fused": True, "capturable": device == "cuda"}
        opt = torch.optim.AdamW(arena.parameters(), lr=lr, **options)
        with ga.TrainStep(model, opt, loss_fn, replay=replay, deterministic=True) as step:
            for k, batch in enumerate(batches(device, n=4, lengths=(8,))):
                opt.param_groups[0]["betas"] = (0.9 - 0.1 * (k // 2), 0.999)
                step(batch)
            assert step.replays == replay
        ends.append(arena.weights)
    same(*ends, "weights")


@pytest.mark.parametrize("make_data", [batches, lists])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_capture_leaves_no_trace_in_buffers_that_were_replaced_before_it(device, make_data):
    def between(step, k):
        # Before the first capture nothing has to be reset.
        if k in (0, 2):
            step.model.norm.running_mean = torch.zeros(HIDDEN, device=device)
            step.model.norm.num_batches_tracked = torch.tensor(0, device=device)
        if k == 2:
            step.reset()

    compare(device, make_data(device), between, net=lambda: Net(norm=True))


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_list_that_breaks_off_drops_its_sums(device):
    """An error at the last micro-batch: the next step is as if the list had never been."""
    broken = False

    def loss(model, micro):
        if broken and micro[0].shape[1] == 16:
            raise KeyError("broken off")
        return loss_fn(model, micro)

    data = lists(device)
    options = {"net": lambda: Net(dropout=0.0), "loss": loss, "schedule": None, "policy": "auto"}
    wanted, *_ = trained(make(device, "eager", **options), data[:2], device)
    (new,) = batches(device, n=1, rows=3, lengths=(16,))
    with make(device, "graph", **options) as step:
        outs = [step(data[0])]
        broken = True
        with pytest.raises(KeyError, match="broken off"):
            step([*batches(device, n=2, rows=2, lengths=(8,)), new])
        assert not any(step.arena.gradients.received()) and step.count == 1
        broken = False
        outs.append(step(data[1]))
    outputs_agree(outs, wanted)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("kind", ["whole", "list"])
def test_outputs_are_tensors_of_their_own(device, kind):
    """Five steps' outputs, kept: all different, and each as it was after its step."""
    data = batches(device, n=5, lengths=(8,))
    if kind == "list":
        data = [[batch] for batch in data]
    wanted, *_ = trained(make(device, "eager"), data, device)
    outs, values = [], []
    with make(device, "graph") as step:
        for batch in data:
            outs.append(step(batch))
            values.append({key: getattr(outs[-1], key).clone() for key in OUTPUTS})
    for key in OUTPUTS:
        assert len({getattr(out, key).data_ptr() for out in outs}) == 5, f"{key} shares its memory"
        for out, value in zip(outs, values):
            same(getattr(out, key), value[key], key)
    for key in ("loss", "norm"):
        assert len({getattr(out, key).item() for out in outs}) == 5
    assert not outs[0].loss.requires_grad and outs[0].loss.device == step.arena.device
    # Whoever writes to them disturbs no other.
    outs[0].loss.fill_(7)
    outs[1].norm.fill_(7)
    outputs_agree(outs[2:], wanted[2:])


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_eval_and_frozen_weights_are_other_kinds_of_step(device, counts):
    def between(step, k):
        step.model.train(k not in (2, 3))
        step.model.head.weight.requires_grad_(k < 6)
        step.model.blocks[0][1].weight.requires_grad_(k < 6)

    wanted = compare(device, batches(device, n=8, lengths=(8,)), between)
    assert counts.captures == 3, (
        "training, eval, frozen; back in training the first one is there still"
    )
    assert len({out.loss.item() for out in wanted}) == 8


def set_sign(opt, k):
    for group in opt.param_groups:
        group["maximize"] = k % 2 == 1


def half_the_loss(model, micro):
    total, tokens = loss_fn(model, micro)
    return total / 2, tokens


SETTINGS = {
    "lr": lambda opt, k: opt.param_groups[0].update(lr=LR / (k + 1)),
    "betas": lambda opt, k: opt.param_groups[-1].update(betas=(0.9 - 0.1 * k, 0.999)),
    "eps": lambda opt, k: opt.param_groups[0].update(eps=10.0 ** -(8 - k)),
    "weight_decay": lambda opt, k: opt.param_groups[0].update(weight_decay=0.1 * k),
    "max_norm": lambda opt, k: setattr(opt, "max_norm", LIMIT / (k + 1)),
    "no max_norm": lambda opt, k: setattr(opt, "max_norm", LIMIT if k < 2 else None),
    "scope": lambda opt, k: setattr(opt, "scope", "tensor" if k in (2, 3) else "global"),
    "maximize": set_sign,
}
# Attributes of the step: their value in each step.
STAGES = {
    "micro_batches": [2, 4, 1, 2, 2],
    "autocast": [None, torch.bfloat16, None, None, None],
    "loss_fn": [loss_fn, half_the_loss, loss_fn, loss_fn, half_the_loss],
}


@pytest.mark.parametrize("name", [*SETTINGS, *STAGES])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_setting_changed_by_hand_takes_effect_in_the_next_replay(device, name):
    def between(step, k):
        if name in STAGES:
            setattr(step, name, STAGES[name][k])
        else:
            SETTINGS[name](step.optimizers[0], k)

    data = batches(device, n=5, lengths=(8,))
    wanted = compare(device, data, between, schedule=None)
    plain, *_ = trained(make(device, "eager", schedule=None), data, device)
    assert wanted[4].loss != plain[4].loss, "the change makes no difference: nothing was tested"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_load_state_dict_between_replays_takes_effect(device, dtype, counts):
    """Back to an earlier state, with another rate in it; the graph is the same, because the state
    is loaded into its memory."""
    states = {}

    def between(step, k):
        if k == 2:
            states["early"] = copy.deepcopy(step.optimizers[0].state_dict())
            states["early"]["param_groups"][0]["lr"] = LR / 7
        if k == 4:
            step.optimizers[0].load_state_dict(states["early"])
            assert step.optimizers[0].param_groups[0]["lr"] == LR / 7

    data = batches(device, n=7, lengths=(8,))
    options = {"schedule": None, "dtype": dtype}
    wanted = compare(device, data, between, **options)
    assert counts.captures == 1
    plain, *_ = trained(make(device, "eager", **options), data, device)
    assert wanted[6].loss != plain[6].loss, "the state makes no difference: nothing was tested"


@pytest.mark.parametrize("make_data", [batches, lists])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_memory_assigned_before_a_capture_and_between_replays_is_an_edit(device, make_data):
    """Of an arena's weights, by torch's own function."""

    def between(step, k):
        if k in (0, 3):
            vector = nn.utils.parameters_to_vector(step.model.parameters())
            nn.utils.vector_to_parameters(vector * 0.5, step.model.parameters())

    for dtype in (torch.float32, torch.bfloat16):
        data = make_data(device)
        wanted = compare(device, data, between, dtype=dtype)
        plain, *_ = trained(make(device, "eager", dtype=dtype), data, device)
        assert wanted[-1].loss != plain[-1].loss, "the edits make no difference"


def test_an_unknown_replay_is_refused_and_the_model_stays_ordinary():
    model = llama()
    with pytest.raises(ArgumentError, match="replay is 'tape'; expected one of eager, graph, or"):
        TrainStep(model, replay="tape")
    assert Arena.of(model) is None
    with pytest.raises(ArgumentError, match="policy is 'maybe'"):
        Replay(policy="maybe")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_batch_that_cannot_be_split_is_refused_before_anything_is_captured(device, counts):
    x, y, weight = batches(device, n=1)[0]
    with make(device, "graph") as step, unchanged(step.model, step.optimizers[0], device):
        for batch in ((x[:0], y[:0], weight[:0]), (x, y[:2], weight), "text", []):
            with pytest.raises(ArgumentError):
                step(batch)
        assert counts.captures == 0 and step.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_a_model_of_transformers_is_replayed_with_eagers_bits(device, kind, counts):
    """On a GPU they ask whether they are being captured, and then mask in another way: see
    test_gpu_graphs.py."""
    options = {"net": theirs(kind), "loss": their_loss}
    wanted = compare(device, batches(device, n=6, bad=(3,)), **options)
    assert counts.replays == 6 and len({out.loss.item() for out in wanted}) == 6


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_what_was_captured_ahead_is_replayed(device, counts):
    (batch,) = batches(device, n=1)
    with make(device, "graph") as step:
        step.capture(batch)
        assert counts.captures == 1 and step.count == 0
        step(batch)
        assert counts.captures == 1 and step.count == 1


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_hook_that_a_replay_would_not_call_is_refused_by_name_on_every_backend(device):
    """Also one that is registered when the graph is there."""
    (batch,) = batches(device, n=1)
    message = r"head.weight has a hook of register_post_accumulate_grad_hook\(\).*replay='eager'"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = make(device, "graph", policy="auto")
    with step:
        for _ in range(2):
            handle = step.model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
            for refused in (step, step.capture):
                with (
                    unchanged(step.model, step.optimizers[0], device),
                    pytest.raises(CaptureError, match=message),
                ):
                    refused(batch)
            handle.remove()
            step(batch)
        assert step.count == 2


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_tensor_hook_is_captured_and_another_one_needs_another_graph(device, counts):
    handles = []

    def between(step, k):
        if k in (1, 2, 3):
            [handle.remove() for handle in handles]
            hook = [lambda g: 3 * g, lambda g: -g, None][k - 1]
            handles[:] = [step.model.head.weight.register_hook(hook)] if hook else []

    data = batches(device, n=5, lengths=(8,))
    wanted = compare(device, data, between, opt={"max_norm": None}, schedule=None)
    assert counts.captures == 3
    plain, *_ = trained(make(device, "eager", opt={"max_norm": None}, schedule=None), data, device)
    assert [a.norm == b.norm for a, b in zip(wanted, plain)] == [True] + [False] * 4


@pytest.mark.parametrize("replay", ["eager", "graph"])
def test_a_loop_over_lists_of_micro_batches_counts_their_tokens(replay, tmp_path):
    data = [[batch] * (k + 1) for k, batch in enumerate(batches("cpu", n=3))]
    path = tmp_path / "m.jsonl"
    with ga.use_backend("simt"), make("cpu", replay) as step:
        readings = list(ga.train(step, data, 3, log=path))
    tokens = [sum(micro[0].numel() for micro in micros) for micros in data]
    assert readings[-1].tokens == sum(tokens)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["tokens"] for row in rows] == list(itertools.accumulate(tokens))
