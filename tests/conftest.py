"""What all tests share: one cache for the whole run, and the reason why GPU tests are skipped."""

import os
import signal
import tempfile

import pytest

_cache = None
if "GPUACCEL_CACHE" not in os.environ:
    # A clean cache, also for processes that tests start and for tests with their own cache.
    _cache = tempfile.mkdtemp(prefix="gpuaccel-test-cache-")
    os.environ["GPUACCEL_CACHE"] = _cache
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", os.path.join(_cache, "zig"))
# torch reads it once per process, at the first matrix product on a GPU: that may be any test's.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from gpuaccel.backends import find_gpu  # noqa: E402

# GPUACCEL_TEST_GIB=15: as on GPUs with 15 GiB of memory.
GIB = os.environ.get("GPUACCEL_TEST_GIB")


def limit_gpu_memory(gib: float):
    """Let this process, and each that it starts, allocate no more than so much on a GPU."""
    import torch

    for index in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(index).total_memory
        fraction = min(1.0, gib * 2**30 / total)
        torch.cuda.set_per_process_memory_fraction(fraction, index)
    # For ranks, notebooks and commands. This process has read its own before.
    os.environ["PYTORCH_ALLOC_CONF"] = f"per_process_memory_fraction:{fraction:.6f}"


def pytest_configure():
    if GIB and find_gpu()[0]:
        limit_gpu_memory(float(GIB))


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
    """Handle Ctrl-C as in a terminal, here and in the processes that a test starts.

    Under nohup, or in a script's background, SIGINT is ignored, and child processes inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def device(request):
    """The device of a test that is parametrised with indirect=True.

    "cpu" is plain torch, "simt" our kernels on the CPU, "cuda" our kernels on a GPU.
    """
    from gpuaccel.backends import use_backend

    with use_backend("torch" if request.param == "cpu" else request.param):
        yield "cuda" if request.param == "cuda" else "cpu"
