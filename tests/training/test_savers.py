"""Other packages save a model in an arena as they save any model: every tensor, bit-identical.

torch, pickle, copy, safetensors, transformers, accelerate, torch.distributed.checkpoint:
tests/savers.py has a function for each.
"""

import copy
import io

import pytest
import torch
from helpers import CUDA
from savers import (
    batch,
    bits,
    by_accelerate_save_model,
    by_deepcopy,
    by_distributed_checkpoint,
    by_pickle,
    by_safetensors_file,
    by_safetensors_model,
    by_save_pretrained,
    by_torch_state_dict,
    by_torch_whole_model,
    bytes_below,
    llama,
    loss_of,
)
from torch import nn

import gpuaccel as ga

transformers = pytest.importorskip("transformers")


SAVERS = [
    by_torch_state_dict,
    by_torch_whole_model,
    by_pickle,
    by_deepcopy,
    by_safetensors_model,
    by_safetensors_file,
    by_save_pretrained,
    by_accelerate_save_model,
    by_distributed_checkpoint,
]


# ---- kinds of arena: each puts `model` into one, and leaves it in the middle of a run ------------


def laid_out(model):
    opt = ga.AdamW(ga.Arena(model), lr=1e-2)
    loss_of(model, batch(model.device))[0].backward()
    opt.step()
    return opt


def with_products(model):
    arena = ga.Arena(model)
    opt = torch.optim.AdamW(arena.parameters(), lr=1e-2)
    adding = ga.optim.Products(arena)
    loss_of(model, batch(model.device))[0].backward()
    opt.step()
    return arena, opt, adding


def captured(model):
    step = ga.TrainStep(
        model,
        loss_fn=loss_of,
        replay=ga.training.Replay(policy="require"),
        deterministic=True,
    )
    for seed in range(2):
        step(batch(model.device, seed))
    assert step.replays == "graph"
    return step


FP32 = torch.float32
BF16 = torch.bfloat16
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])

# (kind, tied, dtype, device). How tensors lie in memory depends on tied and dtype: all four with
# `with_products`, which has all that `laid_out` has.
ARENAS = [(with_products, tied, dtype, "cpu") for tied in (False, True) for dtype in (FP32, BF16)]
ARENAS += [(laid_out, True, BF16, "cpu")]
# A captured step needs a GPU, or the tape of backend simt.
ARENAS += [(captured, False, FP32, "simt"), (captured, True, BF16, "simt")]
ARENAS += [
    pytest.param(kind, tied, dtype, "cuda", marks=pytest.mark.gpu)
    for kind in (laid_out, with_products, captured)
    for tied in (False, True)
    for dtype in (FP32, BF16)
]


def difference(back, plain, expected, sizes):
    """In words, how the model that was read differs from one saved without an arena; or None.

    sizes: bytes that were written, without an arena and with one."""
    if bits(back.state_dict()) != expected:
        return "a tensor has another value"
    if abs(sizes[0] - sizes[1]) > 1024:
        return f"{sizes[1]} bytes were written; expected about {sizes[0]}"
    if type(back) is not type(plain) or ga.Arena.of(back) is not None:
        return "it is no ordinary model"
    if {type(part) for part in back.modules()} != {type(part) for part in plain.modules()}:
        return "it has modules of other classes"
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch_dtype.*")
@pytest.mark.parametrize("kind, tied, dtype, device", ARENAS, indirect=["device"])
def test_savers_write_what_they_write_without_an_arena(kind, tied, dtype, device, tmp_path):
    model = llama(device, dtype, tied)
    held = kind(model)  # noqa: F841  kept alive while the savers run
    plain = llama(device, dtype, tied, seed=1)  # the same weights, and no arena
    plain.load_state_dict(model.state_dict())
    expected = bits(plain.state_dict())
    problems = {}
    for saver in SAVERS:
        folders = tmp_path / saver.__name__ / "plain", tmp_path / saver.__name__ / "arena"
        for folder in folders:
            folder.mkdir(parents=True)
        saver(plain, llama(device, dtype, tied, seed=2), folders[0])
        try:
            back = saver(model, llama(device, dtype, tied, seed=2), folders[1])
        except Exception as error:
            problems[saver.__name__] = repr(error)[:500]
            continue
        sizes = [bytes_below(folder) for folder in folders]
        if problem := difference(back, plain, expected, sizes):
            problems[saver.__name__] = problem
    assert not problems
    ga.Arena.of(model).check()
    assert bits(model.state_dict()) == expected, "a saver changed the model"


# ---- one tensor, the optimizer's state -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_takes_as_many_bytes_as_it_has(dtype):
    model = llama(dtype=dtype)
    opt = laid_out(model)
    tensors = [
        *model.parameters(),
        *opt.arena.parameters(),
        *(t for state in opt.state.values() for t in state.values()),
    ]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len({id(t) for t in tensors})
    for t in tensors:
        file = io.BytesIO()
        torch.save(t.detach(), file)
        own = io.BytesIO()
        torch.save(t.detach().clone(), own)
        assert t.untyped_storage().nbytes() == t.numel() * t.element_size()
        assert len(file.getvalue()) == len(own.getvalue())


# ---- resuming a run ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", CUDA], indirect=True)
@dtypes
def test_accelerate_saves_and_resumes(dtype, device, tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def start(seed):
        accelerator = accelerate.Accelerator(cpu=device == "cpu")
        model = llama(device, dtype, seed=seed)
        opt = ga.AdamW(ga.Arena(model), lr=1e-2, max_norm=1.0)
        return accelerator, *accelerator.prepare(model, opt)

    def train(accelerator, model, opt, first, last):
        losses = []
        for seed in range(first, last):
            loss = loss_of(model, batch(device, seed))[0]
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            losses.append(float(loss))
        return losses

    run = start(0)
    train(*run, 0, 3)
    run[0].save_state(tmp_path / "state")
    losses = train(*run, 3, 6)
    other = start(1)
    train(*other, 0, 1)
    other[0].load_state(tmp_path / "state")
    assert train(*other, 3, 6) == losses
    assert bits(other[1].state_dict()) == bits(run[1].state_dict())


def test_masters_of_other_weights_do_not_replace_those_of_the_model():
    model, other = llama(dtype=torch.bfloat16), llama(dtype=torch.bfloat16, seed=1)
    opt, mine = laid_out(model), laid_out(other)
    before = bits(other.state_dict())
    mine.load_state_dict(opt.state_dict())
    mine.param_groups[0]["lr"] = mine.param_groups[1]["lr"] = 0.0
    loss_of(other, batch("cpu"))[0].backward()
    mine.step()
    assert bits(other.state_dict()) == before != bits(model.state_dict())


def test_a_master_of_another_shape_is_refused_before_anything_changes():
    model = llama(dtype=torch.bfloat16)
    opt = laid_out(model)
    state = copy.deepcopy(opt.state_dict())
    before = opt.arena.weights.clone(), bits(opt.state_dict()["state"][3])
    state["state"][2]["master"] = state["state"][2]["master"].flatten()[:3]
    with pytest.raises(
        ga.errors.ArgumentError, match="master of model.*has shape \\(3,\\); expected"
    ):
        opt.load_state_dict(state)
    assert torch.equal(opt.arena.weights, before[0])
    assert bits(opt.state_dict()["state"][3]) == before[1]


# ---- bf16 weights that are edited ----------------------------------------------------------------


LOOPS = [("ga.AdamW", "cpu"), ("ga.AdamW", "simt"), ("torch.optim", "cpu"), ("captured", "simt")]
LOOPS += [
    pytest.param(loop, "cuda", marks=pytest.mark.gpu)
    for loop in ("ga.AdamW", "torch.optim", "captured")
]


@pytest.mark.parametrize("loop, device", LOOPS, indirect=["device"])
def test_an_edit_of_bf16_weights_counts(loop, device):
    layer = nn.Linear(3, 2).to(device, torch.bfloat16)
    arena = ga.Arena(layer)
    x = torch.ones(1, 3, device=device, dtype=torch.bfloat16)
    if loop == "captured":
        step = ga.TrainStep(
            layer,
            ga.AdamW(arena, lr=0.0),
            lambda model, x: model(x).float().sum(),
            replay=ga.training.Replay(policy="require"),
        )
        take_step = lambda: step(x)
    else:
        if loop == "ga.AdamW":
            opt = ga.AdamW(arena, lr=0.0)
        else:
            opt = torch.optim.SGD(arena.parameters(), lr=0.0)

        def take_step():
            layer(x).sum().backward()
            opt.step()
            opt.zero_grad()

    take_step()
    before = layer.bias.clone()
    nn.init.constant_(layer.weight, 0.5)
    for _ in range(2):
        take_step()
        assert layer.weight.eq(0.5).all() and arena.named_parameters()["weight"].eq(0.5).all()
    assert torch.equal(layer.bias, before)
    # The version does not count this one.
    layer.weight.data.fill_(2.0)
    arena.adopt(everything=True)
    take_step()
    assert layer.weight.eq(2.0).all() and arena.named_parameters()["weight"].eq(2.0).all()


def test_masters_keep_bits_that_a_stochastically_rounded_weight_has_not(tmp_path):
    """A stochastically rounded weight is not the nearest to its master, and yet it is no edit."""
    with ga.use_backend("simt"):
        layer = nn.Linear(64, 8, bias=False).to(torch.bfloat16)
        opt = ga.AdamW(ga.Arena(layer), lr=1e-3, stochastic_rounding=True)
        step = ga.TrainStep(
            layer,
            opt,
            lambda model, x: model(x).float().square().sum(),
            replay=ga.training.Replay(policy="require"),
        )
        x = torch.randn(2, 64).bfloat16()
        for _ in range(3):
            step(x)
        master = opt.arena.weights.clone()
        assert not torch.equal(layer.weight, opt.arena.named_parameters()["weight"].bfloat16())
        opt.param_groups[0]["lr"] = 0.0
        opt.param_groups[0]["weight_decay"] = 0.0
        step(x)
        assert torch.equal(opt.arena.weights, master)
        path = ga.save_checkpoint(
            tmp_path / "one.safetensors", model=layer, optimizer=opt, arena=opt.arena
        )
        ga.load_checkpoint(path, model=layer, optimizer=opt, arena=opt.arena)
        step(x)
        assert torch.equal(opt.arena.weights, master)
