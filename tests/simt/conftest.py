"""Fixtures of the tests of simt."""

import pytest

import gpuaccel as ga


@pytest.fixture(params=["fast", "checked"])
def mode(request):
    """Both modes of the CPU's backend in turn; which one it is."""
    with ga.use_backend("simt"), ga.checked(request.param == "checked"):
        yield request.param


@pytest.fixture
def on_the_cpu():
    with ga.use_backend("simt"):
        yield
