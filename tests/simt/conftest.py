"""Fixtures of the tests of simt."""

import pytest

import gpuaccel as ga


@pytest.fixture(params=["fast", "checked"])
def mode(request):
    """Both modes of the CPU's backend in turn; which one it is."""
    with ga.use_backend("simt"), ga.checked(request.param == "checked"):
        yield request.param


@pytest.fixture(params=["fast", "checked", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Both modes of the CPU's backend, and a GPU, in turn; where tensors are."""
    if request.param == "cuda":
        with ga.use_backend("cuda"):
            yield "cuda"
    else:
        with ga.use_backend("simt"), ga.checked(request.param == "checked"):
            yield "cpu"


@pytest.fixture
def on_the_cpu():
    with ga.use_backend("simt"):
        yield
