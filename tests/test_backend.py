"""The backend is chosen once, with a reason; what cannot run stops in words; nothing falls back in silence."""

import importlib
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch

import gpuaccel as ga
from gpuaccel.backends import (
    BACKENDS,
    POLICIES,
    backend,
    cache_dir,
    default_device,
    find_driver,
    find_gpu,
    resolve,
    use_backend,
)
from gpuaccel.errors import BackendError, GpuaccelError

module = importlib.import_module("gpuaccel.backends")
THERE, NOT = (
    (True, "NVIDIA X found, driver for CUDA 13.0"),
    (False, "no CUDA driver (libcuda.so.1 not found)"),
)


def expected(requested, policy, there):
    """The whole table once more, as rules: (backend, part of the reason), or the part of an error."""
    if policy == "off" and requested == "cuda":
        return BackendError("the GPU policy is off")
    if policy == "off":
        return (
            ("simt", "backend simt was asked for")
            if requested == "simt"
            else ("torch", "policy is off")
        )
    if not there and requested == "cuda":
        return BackendError("backend cuda was asked for, but there is none to use: no CUDA driver")
    if not there and policy == "require":
        return BackendError("policy require.*no CUDA driver")
    if requested in ("simt", "torch"):
        return (
            BackendError(f"backend {requested} was asked for, but the GPU policy is require")
            if policy == "require"
            else (requested, "asked for")
        )
    return ("cuda", "NVIDIA X found") if there else ("torch", "no CUDA driver")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("requested", BACKENDS)
def test_every_request_policy_and_presence_has_one_answer(requested, policy, there):
    want = expected(requested, policy, there)
    if isinstance(want, BackendError):
        with pytest.raises(BackendError, match=str(want)):
            resolve(requested, policy, THERE if there else NOT)
    else:
        name, reason = resolve(requested, policy, THERE if there else NOT)
        assert name == want[0] and want[1] in reason


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        BackendError, match="backend is 'opencl'; expected one of auto, cuda, simt, torch"
    ):
        resolve("opencl", "auto", NOT)
    with pytest.raises(
        BackendError, match="GPU policy is 'maybe'; expected one of auto, require, off"
    ):
        resolve("auto", "maybe", NOT)
    with pytest.raises(GpuaccelError):
        use_backend("opencl")


def test_the_choice_is_kept_and_reads_as_a_sentence():
    choice = backend()
    assert backend() is choice and choice.name in ("cuda", "simt", "torch") and choice.reason
    assert (
        str(choice)
        == f"backend {choice.name} on {choice.device}"
        + (f" ({choice.arch})" if choice.arch else "")
        + f": {choice.reason}"
    )
    assert default_device().type == ("cuda" if choice.name == "cuda" else "cpu")
    assert choice.policy == "off" or (find_driver()[0] is None) == (choice.driver is None)


def test_use_backend_as_a_function_stays_and_as_a_block_goes_back():
    first = backend()
    try:
        used = use_backend("torch")
        assert (
            backend().name == "torch"
            and backend().reason == "backend torch was asked for"
            and "torch" in repr(used)
        )
        kept = backend()
        with use_backend("torch", policy="off") as inner:
            assert (
                backend() is inner
                and inner.policy == "off"
                and "GPU policy is off" in inner.reason
                and inner.driver is None
            )
            with use_backend("auto"):
                assert backend().requested == "auto"
            assert backend() is inner
        assert backend() is kept
        with pytest.raises(ZeroDivisionError):
            with use_backend("torch", policy="off"):
                1 / 0
        assert backend() is kept, "an exception in the block must not keep its backend"

        @use_backend("torch", policy="off")
        def decorated():
            return backend().policy

        use_backend("torch")
        assert decorated() == "off"
    finally:
        module._current = first


def test_a_backend_that_cannot_run_changes_nothing(monkeypatch):
    monkeypatch.setattr(module, "find_gpu", lambda: NOT)
    before = backend()
    for arguments in (
        ("cuda",),
        ("auto", "require"),
        ("torch", "require"),
        ("cuda", "off"),
        ("nonsense",),
    ):
        with pytest.raises(BackendError):
            use_backend(*arguments)
        assert backend() is before


def test_environment_is_read_at_the_first_use(monkeypatch):
    monkeypatch.setattr(module, "_current", None)
    monkeypatch.setenv("GPUACCEL_GPU", "off")
    monkeypatch.setenv("GPUACCEL_BACKEND", "auto")
    assert backend().policy == "off" and backend().name == "torch" and backend().driver is None
    monkeypatch.setenv("GPUACCEL_GPU", "nonsense")
    assert backend().policy == "off"  # chosen once, then kept
    for gpu, name, message in (
        ("nonsense", "auto", "GPU policy is 'nonsense'"),
        ("auto", "rocm", "backend is 'rocm'"),
        ("off", "cuda", "GPUACCEL_GPU=off"),
    ):
        monkeypatch.setattr(module, "_current", None)
        monkeypatch.setenv("GPUACCEL_GPU", gpu)
        monkeypatch.setenv("GPUACCEL_BACKEND", name)
        with pytest.raises(BackendError, match=message):
            backend()
        assert module._current is None
    monkeypatch.setenv("GPUACCEL_GPU", "")  # set but empty is as good as unset
    monkeypatch.setenv("GPUACCEL_BACKEND", "")
    assert (backend().policy, backend().requested) == ("auto", "auto")


def test_environment_of_a_fresh_process():
    code = "from gpuaccel.backends import backend; print(backend())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "GPUACCEL_GPU": "off"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.stdout.strip() == "backend torch on CPU: the GPU policy is off (GPUACCEL_GPU=off)", (
        run.stderr
    )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the reason why there is no GPU: this machine has one"
)
def test_without_a_gpu_the_reason_says_what_is_missing():
    there, why = find_gpu()
    assert not there and why == find_driver()[1] or "torch" in why
    assert default_device() == torch.device("cpu")


@pytest.mark.parametrize(
    "version, built_for, message",
    [
        (
            12040,
            "13.0",
            "driver for CUDA 12.4, but torch .* needs a driver for CUDA 13 or newer: update the driver",
        ),
        (13000, None, "is a build without CUDA"),
    ],
)
def test_a_driver_that_does_not_fit_torch_is_explained(monkeypatch, version, built_for, message):
    monkeypatch.setattr(
        module,
        "find_driver",
        lambda: (version, f"driver for CUDA {version // 1000}.{version % 1000 // 10}"),
    )
    monkeypatch.setattr(torch.version, "cuda", built_for)
    there, why = find_gpu.__wrapped__()
    assert not there
    assert re.search(message, why), why


# ---- the cache folder -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_deterministic_leaves_every_switch_as_it_was(monkeypatch, frozen):
    """Also after torch.backends.disable_global_flags(), as torch's own test helpers call it on import."""

    def switches():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.benchmark,
        )

    before = switches()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        monkeypatch.setitem(
            torch.backends.disable_global_flags.__globals__, "flags_frozen", lambda: frozen
        )
        with pytest.raises(KeyError):
            with ga.deterministic():
                assert switches() == (True, False, False, False)
                raise KeyError
        assert switches() == (*before[:2], True, True)


@pytest.fixture
def fresh_cache(monkeypatch):
    yield cache_dir.cache_clear()
    cache_dir.cache_clear()


def test_the_cache_folder_is_made_on_use(monkeypatch, tmp_path, fresh_cache):
    monkeypatch.setenv("GPUACCEL_CACHE", str(tmp_path / "a" / "b"))
    assert cache_dir() == tmp_path / "a" / "b" and cache_dir().is_dir()
    cache_dir.cache_clear()
    monkeypatch.delenv("GPUACCEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / "gpuaccel"


def test_an_unwritable_cache_warns_once_and_kernels_still_compile(
    monkeypatch, tmp_path, fresh_cache
):
    """A path below a file: no user can write there, not even root."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUACCEL_CACHE", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert cache_dir() is None and cache_dir() is None
        from gpuaccel.compiler.kernel import Kernel

        assert Kernel("accumulate", "accumulate_v1").resources("sm_90").registers > 0
    texts = [str(w.message) for w in seen if "gpuaccel" in str(w.message)]
    assert len(texts) == 1, texts
    assert (
        "runs without a cache" in texts[0]
        and str(tmp_path / "file" / "cache") in texts[0]
        and "GPUACCEL_CACHE" in texts[0]
    )


@pytest.mark.gpu
def test_gpu_is_found_and_named():
    there, why = find_gpu()
    assert there and torch.cuda.get_device_name() in why
    with use_backend("cuda", policy="require") as choice:
        major, minor = torch.cuda.get_device_capability()
        assert (
            choice.arch == f"sm_{major}{minor}"
            and choice.device == torch.cuda.get_device_name()
            and choice.driver
        )
        assert default_device() == torch.device("cuda", torch.cuda.current_device())
    with use_backend("torch"):
        assert default_device().type == "cpu"


@pytest.mark.gpu
def test_gpu_hidden_by_the_environment_is_explained():
    code = "from gpuaccel.backends import backend; print(backend())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.stdout.startswith("backend torch on CPU: "), run.stdout + run.stderr
