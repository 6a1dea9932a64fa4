"""What all tests share: one cache for the whole run, and the reason why GPU tests are skipped."""

import contextlib
import itertools
import os
import pathlib
import signal

import pytest

# One cache for all processes of a run, kept for the next run; `make clean` removes it.
CACHE = pathlib.Path(__file__).parent.parent / ".pytest_cache" / "gpuaccel"
os.environ.setdefault("GPUACCEL_CACHE", str(CACHE))
os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(CACHE / "zig"))
# torch reads it once per process, at the first matrix product on a GPU: that may be any test's.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# transformers downloads nothing. It reads the variable when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from gpuaccel.backends import find_gpu  # noqa: E402

# In the fast set, of a parametrised function.
MOST_OF_A_FUNCTION = 8
GPU_ITEMS = pytest.StashKey[str]()
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


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="only what `make test` runs")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if hasattr(item, "output_timeout"):
            # Seconds between a cell's outputs. nbval's 5 are too few for a busy machine.
            item.output_timeout = 120
    there, why = find_gpu()
    gpu_items = [] if there else [item for item in items if "gpu" in item.keywords]
    fast = fast_items(items) if config.getoption("--fast") else set(items)
    left_out = [item for item in items if item in gpu_items or item not in fast]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if gpu_items:
        config.stash[GPU_ITEMS] = f"{len(gpu_items)} tests need a GPU and are not run: {why}"
        if hasattr(config, "workeroutput"):
            config.workeroutput["gpu_items"] = config.stash[GPU_ITEMS]


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody calls it
def pytest_testnodedown(node, error):
    """A worker of pytest-xdist has ended: it has collected the tests."""
    if "gpu_items" in getattr(node, "workeroutput", {}):
        node.config.stash[GPU_ITEMS] = node.workeroutput["gpu_items"]


def pytest_terminal_summary(terminalreporter, config):
    if GPU_ITEMS in config.stash:
        terminalreporter.write_line(config.stash[GPU_ITEMS])


def fast_items(items) -> set:
    """What `make test` runs: no slow test, and of each function at most MOST_OF_A_FUNCTION items.

    These have every value of each parameter where that is possible, and as many pairs of values."""
    by_function = {}
    for item in items:
        if "slow" not in item.keywords:
            function = (item.path, item.nodeid.split("[")[0])
            by_function.setdefault(function if hasattr(item, "callspec") else item, []).append(item)
    return {item for group in by_function.values() for item in spread(group, MOST_OF_A_FUNCTION)}


def spread(items: list, most: int) -> list:
    """At most so many items of a parametrised function, that have as many pairs of values as can
    be."""
    if len(items) <= most:
        return items
    # First and last value of a single parameter before those between.
    waiting = [items[0], items[-1], *items[1:-1]]
    pairs = {item: parameter_pairs(item.callspec.params) for item in items}
    seen, result = set(), []
    while len(result) < most:
        best = max(waiting, key=lambda item: len(pairs[item] - seen))
        waiting.remove(best)
        result.append(best)
        seen |= pairs[best]
    return result


def parameter_pairs(params: dict) -> set:
    """{name and identity of a value} of each, and of each two parameters.

    Not callspec.indices: those of a parameter without a fixture differ in all items."""
    values = [(name, id(value)) for name, value in params.items()]
    return {frozenset(two) for two in itertools.product(values, repeat=2)}


@pytest.fixture
def interruptible():
    """Handle Ctrl-C as in a terminal, here and in the processes that a test starts.

    Under nohup, or in a script's background, SIGINT is ignored, and child processes inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["fast", "checked", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where tensors are; parametrised with indirect=True, or wherever kernels run.

    "cpu" is plain torch, "simt" our kernels on the CPU, "fast" and "checked" its two modes, "cuda"
    our kernels on a GPU.
    """
    from gpuaccel.backends import use_backend
    from gpuaccel.simt import checked

    backend = {"cpu": "torch", "cuda": "cuda"}.get(request.param, "simt")
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_backend(backend))
        if request.param in ("fast", "checked"):
            stack.enter_context(checked(request.param == "checked"))
        yield "cuda" if request.param == "cuda" else "cpu"
