"""Shared by all tests: one cache for the whole run, and GPU tests that skip themselves in words."""

import os
import signal
import tempfile

import pytest

_cache = (
    tempfile.mkdtemp(prefix="gpuaccel-test-cache-") if "GPUACCEL_CACHE" not in os.environ else None
)
if _cache:
    os.environ["GPUACCEL_CACHE"] = _cache  # a clean cache, also for the processes that tests start
    os.environ.setdefault(
        "ZIG_GLOBAL_CACHE_DIR", os.path.join(_cache, "zig")
    )  # also for tests with a cache of their own

from gpuaccel.backends import find_gpu  # noqa: E402


def pytest_collection_modifyitems(items):
    there, why = find_gpu()
    if not there:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {why}"))


def pytest_sessionfinish():
    if _cache and os.environ.get("PYTEST_XDIST_WORKER") is None:
        import shutil

        shutil.rmtree(_cache, ignore_errors=True)


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal, here and in the processes that a test starts: under nohup, or in a script's background, SIGINT is ignored,
    and whoever is started inherits that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def device(request):
    """The device of a test that is parametrised with indirect=True: "cpu" (plain torch), "simt" (our kernels on the CPU), "cuda"."""
    from gpuaccel.backends import use_backend

    with use_backend("torch" if request.param == "cpu" else request.param):
        yield "cuda" if request.param == "cuda" else "cpu"
