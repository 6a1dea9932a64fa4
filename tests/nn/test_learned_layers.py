"""What RichardsGLU and PolyAttention have in common: kernels where they run, torch elsewhere, and
any derivative of either; in a captured step, compiled, under autocast, in a checkpoint."""

import contextlib
import copy
import functools
import logging
import os
import subprocess
import sys

import pytest
import torch
from helpers import EVERYWHERE, KERNELS, same
from richards_formula import close
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpuaccel as ga
from gpuaccel.compiler import kernel as kernels
from gpuaccel.errors import CompileError
from gpuaccel.nn import richards_glu as richards

NOT = "no CUDA driver (libcuda.so.1 not found)"
LAYERS = """
import logging, torch
logging.basicConfig(level="INFO", format="%(message)s")
import gpuaccel as ga
torch.manual_seed(0)
model = torch.nn.Sequential(ga.RichardsGLU(8, 12), ga.RichardsGLU(8, 12))
for _ in range(2):
    model(torch.randn(3, 8)).sum().backward()
"""


def run(**environment):
    return subprocess.run(
        [sys.executable, "-c", LAYERS],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the sentence without a driver: this machine has one"
)
def test_without_a_gpu_one_line_says_why_and_with_require_the_same_words_stop_it():
    done = run()
    lines = [line for line in done.stderr.splitlines() if "backend" in line]
    assert done.returncode == 0 and lines == [f"backend torch on CPU: {NOT}"], done.stderr
    stopped = run(GPUACCEL_GPU="require")
    assert stopped.returncode and stopped.stderr.strip().endswith(
        f"a GPU (policy require) was asked for, but there is none to use: {NOT}"
    )
    assert (
        "backend torch on CPU: the GPU policy is off (GPUACCEL_GPU=off)"
        in run(GPUACCEL_GPU="off").stderr
    )


@pytest.fixture
def fails(monkeypatch):
    """The kernels of richards.cu do not compile any more."""
    tried = []

    def load(self, where):
        tried.append(self.name)
        raise CompileError(f"{self.filename} needs 300 registers")

    monkeypatch.setattr(kernels, "_decided", {})
    monkeypatch.setattr(kernels.Kernel, "load", load)
    return tried


def test_a_kernel_that_does_not_compile_is_said_once_and_torch_goes_on_from_the_first_step(
    fails, caplog
):
    layer, x = ga.RichardsGLU(4, 6), torch.randn(5, 4)
    want = layer(x)
    with ga.use_backend("simt"), caplog.at_level(logging.INFO, "gpuaccel"):
        for _ in range(3):
            y = layer(x)
            y.sum().backward()
        assert torch.equal(y, want)
    said = [record.message for record in caplog.records if "runs in torch" in record.message]
    assert (
        said
        == [
            "kernels_cu/richards.cu runs in torch on cpu from now on:"
            " kernels_cu/richards.cu needs 300 registers"
        ]
        and len(fails) == 1
    )


def test_with_require_a_kernel_that_does_not_compile_stops_before_anything_has_changed(
    fails, monkeypatch
):
    layer = ga.RichardsGLU(4, 6)
    with ga.use_backend("simt") as choice:
        monkeypatch.setitem(choice.__dict__, "policy", "require")
        with pytest.raises(CompileError, match="needs 300 registers"):
            layer(torch.randn(5, 4))
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_out_of_memory_in_a_step_changes_nothing_and_the_next_step_goes_on(device, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(ga.RichardsGLU(8, 12), nn.Linear(8, 4)).to(device)
    step = ga.TrainStep(
        model, ga.AdamW(ga.Arena(model), lr=1e-2), lambda m, batch: (m(batch[0]) ** 2).mean()
    )
    batch = (torch.randn(6, 8, device=device),)
    step(batch)
    before, finish = [p.clone() for p in model.parameters()], richards.finish_curves

    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(richards, "finish_curves", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        step(batch)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    assert not any(step.arena.gradients.received())
    monkeypatch.setattr(richards, "finish_curves", finish)
    step(batch)
    assert not torch.equal(next(model.parameters()), before[0])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_a_layer_on_the_second_device_runs_there():
    layer = ga.RichardsGLU(8, 12, device="cuda:1")
    x = torch.randn(3, 8, device="cuda:1", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.device.index == 1 and torch.cuda.current_device() == 0
    with pytest.raises((ga.errors.ArgumentError, RuntimeError), match="cuda:"):
        layer(torch.randn(3, 8, device="cuda:0"))


KINDS = {
    "glu": lambda: ga.RichardsGLU(6, 4),
    "attention": lambda: ga.PolyAttention(6, 2, max_positions=16),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_second_derivatives_forward_mode_and_torch_func_are_those_of_float64(device, make):
    """A gradient's length as part of the loss, a directional derivative, torch.func.grad; nothing
    may vanish without a word."""
    torch.manual_seed(3)
    layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), make(), nn.Tanh(), nn.Linear(6, 2)).to(device)
    x, tangent = torch.randn(2, 5, 6, device=device), torch.randn(2, 5, 6, device=device)

    def found(layer, x, tangent):
        state = {name: p.detach() for name, p in layer.named_parameters()}
        loss = lambda state, x: torch.func.functional_call(layer, state, (x,)).pow(2).mean()
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(layer(x).pow(2).mean(), x, create_graph=True)
        again = torch.autograd.grad(slope.pow(2).sum() + layer(x).mean(), list(layer.parameters()))
        return [
            *again,
            torch.func.jvp(lambda x: loss(state, x), (x.detach(),), (tangent,))[1],
            *torch.func.grad(loss)(state, x.detach()).values(),
            *torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(state, x.detach()).values(),
        ]

    with ga.use_backend("torch"):
        want = found(copy.deepcopy(layer).double().cpu(), x.double().cpu(), tangent.double().cpu())
    for a, b in zip(found(layer, x, tangent), want):
        assert b.abs().max() > 0 and torch.allclose(
            a.double().cpu(), b, rtol=1e-3, atol=1e-5 * float(b.abs().max())
        ), (a, b)


@pytest.mark.slow
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_one_theta_for_two_curves_is_counted_once(device):
    """A gradient that may be differentiated again is the same gradient."""
    torch.manual_seed(5)
    glu = ga.RichardsGLU(6, 4).to(device)
    glu.activation = glu.gate
    x = torch.randn(3, 6, device=device, requires_grad=True)
    once, again = (
        torch.autograd.grad(glu(x).pow(2).sum(), (x, glu.gate.theta), create_graph=create)
        for create in (False, True)
    )
    for a, b in zip(once, again):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max())), (a, b)


def gradients(layer, x, call=None, block=contextlib.nullcontext):
    """Of the input and the parameters. call: in the place of the layer; block: around it."""
    inputs = [x.detach().requires_grad_(), *layer.parameters()]
    layer.zero_grad()
    with block():
        loss = (call or layer)(inputs[0]).pow(2).sum()
    loss.backward()
    return [t.grad for t in inputs]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_computed_again_in_a_checkpoint_gradients_are_the_same(device, make):
    torch.manual_seed(4)
    layer, x = make().to(device), torch.randn(2, 5, 6, device=device)
    want = gradients(layer, x)
    for reentrant in (False, True):
        again = functools.partial(checkpoint, layer, use_reentrant=reentrant)
        assert all(map(torch.equal, gradients(layer, x, again), want))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_backward_after_the_block_of_its_forward_has_the_same_gradients(device, make):
    torch.manual_seed(6)
    layer, x = make().to(device), torch.randn(2, 5, 6, device=device)
    behind = gradients(layer, x, block=lambda: ga.use_backend("torch"))
    with ga.use_backend("torch"):
        want = gradients(layer, x)
    for a, b in zip(want, behind):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max())), (a, b)


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 6), nn.Linear(6, 31)
        self.norm, self.layer = nn.RMSNorm(6), KINDS[kind]()

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.layer(self.norm(x)))


def trained(device, kind, **options):
    torch.manual_seed(4)
    net = Net(kind).to(device)
    opt = ga.AdamW(ga.Arena(net), lr=1e-2, max_norm=1.0)
    with ga.TrainStep(net, opt, micro_batches=2, deterministic=True, **options) as step:
        data = torch.randint(0, 31, (3, 2, 4, 9), generator=torch.Generator().manual_seed(5))
        losses = [step(tuple(batch.to(device))).loss for batch in data]
        return torch.stack(losses), *[p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_in_a_train_step_replay_has_eagers_bits(device, kind):
    replayed = trained(device, kind, replay=ga.training.Replay(policy="require"))
    for got, want in zip(replayed, trained(device, kind), strict=True):
        same(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_computes_the_same(kind):
    torch.manual_seed(6)
    layer, x, runs = KINDS[kind](), torch.randn(2, 5, 6), []
    for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        f(x).square().sum().backward()
        runs.append([p.grad.clone() for p in layer.parameters()])
    for a, b in zip(*runs):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_under_autocast_products_are_bf16_and_parameters_stay_fp32(device, kind):
    torch.manual_seed(7)
    layer, x = KINDS[kind]().to(device), torch.randn(2, 5, 6, device=device)
    inside = []
    layer.w_out.register_forward_pre_hook(lambda _, given: inside.append(given[0].dtype))
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert inside == [torch.bfloat16]
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    close(y, layer(x), 3e-2, "y")


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_copies_and_state_dicts_carry_what_is_learned(make):
    one, other, x = make(), make(), torch.randn(2, 5, 6)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x)) and torch.equal(copy.deepcopy(one)(x), one(x))
