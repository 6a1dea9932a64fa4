"""The rank processes, and a run of one process, shared by all tests of this folder."""

from types import SimpleNamespace

import pytest
import torch
from rank_workers import Workers
from train_processes import HANG, gpuaccel, losses


@pytest.fixture(scope="session")
def workers():
    """Four ranks on the CPU."""
    four = Workers(4)
    yield four
    four.close()


@pytest.fixture(scope="session")
def gpu_workers():
    """Number of GPUs -> Workers with as many ranks."""
    made = {}

    def of(gpus):
        available = torch.cuda.device_count()
        if available < gpus:
            pytest.skip(f"needs {gpus} GPUs, and this machine has {available}")
        if gpus not in made:
            made[gpus] = Workers(gpus, "nccl")
        return made[gpus]

    yield of
    for workers in made.values():
        workers.close()


@pytest.fixture(scope="session")
def one_process(tmp_path_factory):
    """`gpuaccel train` with `options` in one process: its `losses`."""
    folder = tmp_path_factory.mktemp("one process") / "run"
    options = ("--ordered", "--steps", "60")
    process = gpuaccel(folder, *options)
    said = process.communicate(timeout=HANG)
    assert process.returncode == 0, said
    return SimpleNamespace(options=options, losses=losses(folder))
