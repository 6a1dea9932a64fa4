"""GPU when there is one: chosen once, said in one line, kept; and when something goes wrong nothing is half done."""
import contextlib
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import gpuaccel as ga
from gpuaccel import kernel as kernels
from gpuaccel import richards
from gpuaccel.errors import BackendError, CompileError

NOT = "no CUDA driver (libcuda.so.1 not found)"
LAYERS = """
import logging, torch
logging.basicConfig(level="INFO", format="%(message)s")
import gpuaccel as ga
torch.manual_seed(0)
model = torch.nn.Sequential(ga.RichardsGLU(8, 12), ga.RichardsGLU(8, 12), ga.RichardsCurve())
for _ in range(2):
    model(torch.randn(3, 8)).sum().backward()
"""


def run(**environment):
    return subprocess.run([sys.executable, "-c", LAYERS], capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sentence without a driver: this machine has one")
def test_without_a_gpu_one_line_says_why_and_with_require_the_same_words_stop_it():
    done = run()
    lines = [line for line in done.stderr.splitlines() if "backend" in line]
    assert done.returncode == 0 and lines == [f"backend torch on CPU: {NOT}"], done.stderr
    stopped = run(GPUACCEL_GPU="require")
    assert stopped.returncode and stopped.stderr.strip().endswith(f"a GPU (policy require) was asked for, but there is none to use: {NOT}")
    assert "backend torch on CPU: the GPU policy is off (GPUACCEL_GPU=off)" in run(GPUACCEL_GPU="off").stderr


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


def test_a_kernel_that_does_not_compile_is_said_once_and_torch_goes_on_from_the_first_step(fails, caplog):
    layer, x = ga.RichardsGLU(4, 6), torch.randn(5, 4)
    want = layer(x)
    with ga.use_backend("simt"), caplog.at_level(logging.INFO, "gpuaccel"):
        for _ in range(3):
            y = layer(x)
            y.sum().backward()
        assert torch.equal(y, want)
    said = [record.message for record in caplog.records if "runs in torch" in record.message]
    assert said == ["kernels_cu/richards.cu runs in torch on cpu from now on: kernels_cu/richards.cu needs 300 registers"] and len(fails) == 1


def test_with_require_a_kernel_that_does_not_compile_stops_before_anything_has_changed(fails, monkeypatch):
    layer = ga.RichardsGLU(4, 6)
    with ga.use_backend("simt") as choice:
        monkeypatch.setitem(choice.__dict__, "policy", "require")
        with pytest.raises(CompileError, match="needs 300 registers"):
            layer(torch.randn(5, 4))
    assert all(p.grad is None for p in layer.parameters())


def test_every_layer_asks_one_place():
    with ga.use_backend("torch"):
        for layer in (ga.RichardsGLU(4, 6), ga.RichardsCurve()):
            assert not richards._ours(torch.randn(2, 4), *layer.parameters()) and ga.backend().name == "torch"


@pytest.mark.parametrize("device", ["simt", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_out_of_memory_in_a_step_changes_nothing_and_the_next_step_goes_on(device, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(ga.RichardsGLU(8, 12), nn.Linear(8, 4)).to(device)
    step = ga.TrainStep(model, ga.AdamW(ga.Arena(model), lr=1e-2), lambda m, batch: (m(batch[0]) ** 2).mean())
    batch = (torch.randn(6, 8, device=device),)
    step(batch)
    before, launch = [p.clone() for p in model.parameters()], richards.launch_glu_backward

    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    monkeypatch.setattr(richards, "launch_glu_backward", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        step(batch)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before)) and not step.arena.grads.any()
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
    with pytest.raises((ga.ArgumentError, RuntimeError), match="cuda:"):
        layer(torch.randn(3, 8, device="cuda:0"))


def test_a_backend_that_cannot_be_is_refused_before_anything_changes():
    before = ga.backend()
    with pytest.raises(BackendError) if not torch.cuda.is_available() else contextlib.nullcontext():
        ga.use_backend("cuda", "require")
    ga.use_backend(before.requested)
