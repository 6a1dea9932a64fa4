"""GPU when there is one: chosen once, said in one line, kept; and when something goes wrong nothing
is half done."""

import contextlib
import copy
import functools
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpuaccel as ga
from gpuaccel.compiler import kernel as kernels
from gpuaccel.errors import BackendError, CompileError
from gpuaccel.nn import richards_glu as richards

PLACES = ["cpu", "simt", pytest.param("cuda", marks=pytest.mark.gpu)]
NOT = "no CUDA driver (libcuda.so.1 not found)"
LAYERS = """
import logging, torch
logging.basicConfig(level="INFO", format="%(message)s")
import gpuaccel as ga
torch.manual_seed(0)
model = torch.nn.Sequential(ga.RichardsGLU(8, 12), ga.RichardsGLU(8, 12), ga.nn.RichardsCurve())
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


def test_every_layer_asks_one_place():
    with ga.use_backend("torch"):
        for layer in (ga.RichardsGLU(4, 6), ga.nn.RichardsCurve()):
            assert (
                not richards._kernels_run(torch.randn(2, 4), *layer.parameters())
                and ga.backend().name == "torch"
            )


@pytest.mark.parametrize(
    "device", ["simt", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_out_of_memory_in_a_step_changes_nothing_and_the_next_step_goes_on(device, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(ga.RichardsGLU(8, 12), nn.Linear(8, 4)).to(device)
    step = ga.TrainStep(
        model, ga.AdamW(ga.Arena(model), lr=1e-2), lambda m, batch: (m(batch[0]) ** 2).mean()
    )
    batch = (torch.randn(6, 8, device=device),)
    step(batch)
    before, launch = [p.clone() for p in model.parameters()], richards.launch_glu_backward

    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(richards, "launch_glu_backward", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        step(batch)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    assert not any(step.arena.gradients.received())
    monkeypatch.setattr(richards, "launch_glu_backward", launch)
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


def test_a_backend_that_cannot_be_is_refused_before_anything_changes():
    before = ga.backend()
    with pytest.raises(BackendError) if not torch.cuda.is_available() else contextlib.nullcontext():
        ga.use_backend("cuda", "require")
    ga.use_backend(before.requested)


KINDS = {
    "curve": lambda: ga.nn.RichardsCurve("gompertz"),
    "glu": lambda: ga.RichardsGLU(6, 4),
    "attention": lambda: ga.PolyAttention(6, 2, max_positions=8),
    "attention without the low-rank term": lambda: ga.PolyAttention(
        6, 2, max_positions=8, low_rank=False
    ),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("device", PLACES, indirect=True)
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
@pytest.mark.parametrize("device", PLACES, indirect=True)
def test_what_is_made_of_one_another_is_counted_once(device):
    """A gradient that may be differentiated again is the same gradient: a query q~ that is made of
    q, one theta for two curves, one curve twice."""
    torch.manual_seed(5)
    layer, glu = (
        ga.PolyAttention(12, 2, max_positions=8).to(device),
        ga.RichardsGLU(6, 4).to(device),
    )
    glu.activation = ga.nn.RichardsCurve("sigmoid", learn=richards.GATE, bounded=True).to(device)
    glu.activation.theta = glu.gate.theta
    qkv, x, abc = (
        torch.randn(3, 1, 5, 2, 6, device=device, requires_grad=True),
        torch.randn(3, 6, device=device, requires_grad=True),
        layer.coefficients,
    )
    for inputs, function in (
        ((qkv, abc), lambda: ga.nn.poly_attention(layer.query(qkv[0]), *qkv, layer.pe, abc)),
        ((x, glu.gate.theta), lambda: glu(x)),
        ((x, glu.gate.theta), lambda: glu.gate(glu.gate(x))),
    ):
        once, again = (
            torch.autograd.grad(function().pow(2).sum(), inputs, create_graph=create)
            for create in (False, True)
        )
        for a, b in zip(once, again):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max())), (a, b)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("device", PLACES, indirect=True)
def test_computed_again_in_a_checkpoint_gradients_are_the_same(device, make):
    torch.manual_seed(4)
    layer, x = make().to(device), torch.randn(2, 5, 6, device=device)
    found = []
    for call in (
        layer,
        functools.partial(checkpoint, layer, use_reentrant=False),
        functools.partial(checkpoint, layer, use_reentrant=True),
    ):
        inputs = [x.detach().requires_grad_(), *layer.parameters()]
        layer.zero_grad()
        call(inputs[0]).pow(2).sum().backward()
        found.append([t.grad for t in inputs])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "device", ["simt", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_a_backward_after_the_block_of_its_forward_has_the_same_gradients(device, make):
    torch.manual_seed(6)
    layer, x = make().to(device), torch.randn(2, 5, 6, device=device)
    found = []
    for inside in (True, False):
        inputs = [x.detach().requires_grad_(), *layer.parameters()]
        layer.zero_grad()
        with ga.use_backend("torch"):
            loss = layer(inputs[0]).pow(2).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append([t.grad for t in inputs])
    for a, b in zip(*found):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max())), (a, b)


@pytest.mark.parametrize(
    "device", ["simt", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_the_numbers_of_a_curve_are_those_that_the_kernels_keep(device):
    for curve in (
        ga.nn.RichardsCurve(nu=0.7, k=1.3, m=0.2, beta=1.1, T=1.5, a=0.9, c=0.1, s=1.2, b=-0.3),
        ga.nn.RichardsCurve("tanh", learn=("nu", "m", "b"), b=0.4),
        ga.nn.RichardsCurve("gompertz", birch=True),
        ga.nn.RichardsCurve("sigmoid", learn=richards.GATE, bounded=True, T=3.0),
    ):
        x, theta = torch.randn(3, device=device), curve.theta.detach().to(device)
        _, kept = richards.launch_forward(x, theta, curve.setting)
        numbers = richards.reference_numbers(theta, curve.setting)
        assert torch.allclose(numbers, kept[0], rtol=1e-5, atol=1e-6), (numbers, kept)
