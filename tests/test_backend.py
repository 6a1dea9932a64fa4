"""The backend is chosen once, with a reason; what cannot run raises; nothing is silent."""

import importlib
import os
import re
import stat
import subprocess
import sys
import warnings
from typing import get_args

import pytest
import torch

import gpuaccel as ga
from gpuaccel.backends import (
    Backend,
    GpuPolicy,
    backend,
    cache_dir,
    default_device,
    default_dtype,
    find_driver,
    find_gpu,
    resolve,
    use_backend,
)
from gpuaccel.errors import BackendError, GpuaccelError
from gpuaccel.files import from_cache, read_entry, write_entry

module = importlib.import_module("gpuaccel.backends")
THERE = True, "NVIDIA X found, driver for CUDA 13.0"
NOT = False, "no CUDA driver (libcuda.so.1 not found)"


def fresh_process(code, **environment):
    """A Python that runs some code, without a setting of cuBLAS."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CUBLAS")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


# (request, policy) -> the backend with a GPU and without one, or part of the error
ANSWERS = {
    ("auto", "auto"): ("cuda", "torch"),
    ("auto", "require"): ("cuda", "policy require.*no CUDA driver"),
    ("auto", "off"): ("torch", "torch"),
    ("cuda", "auto"): ("cuda", "there is none to use: no CUDA driver"),
    ("cuda", "require"): ("cuda", "there is none to use: no CUDA driver"),
    ("cuda", "off"): ("the GPU policy is off", "the GPU policy is off"),
    **{
        (name, policy): answers
        for name in ("simt", "torch")
        for policy, answers in {
            "auto": (name, name),
            "require": (f"{name} was asked for, but the GPU policy is", "policy is|policy require"),
            "off": (name, name),
        }.items()
    },
}


@pytest.mark.parametrize("policy", get_args(GpuPolicy))
@pytest.mark.parametrize("requested", get_args(Backend))
def test_every_requestedpolicy_and_presence_has_one_answer(requested, policy):
    for gpu, answer in zip((THERE, NOT), ANSWERS[requested, policy], strict=True):
        if answer not in get_args(Backend):
            with pytest.raises(BackendError, match=answer):
                resolve(requested, policy, gpu)
            continue
        name, reason = resolve(requested, policy, gpu)
        assert name == answer
        is_free = requested == "auto" and policy != "off"
        assert reason == gpu[1] or not is_free and re.search("was asked for|policy is off", reason)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        GpuaccelError, match="backend is 'opencl'; expected one of auto, cuda, simt, torch"
    ):
        use_backend("opencl")
    with pytest.raises(
        BackendError, match="GPU policy is 'maybe'; expected one of auto, require, off"
    ):
        resolve("auto", "maybe", NOT)


def test_the_choice_is_kept_and_reads_as_a_sentence():
    choice = backend()
    assert backend() is choice and choice.name in ("cuda", "simt", "torch") and choice.reason
    arch = f" ({choice.arch})" if choice.arch else ""
    assert str(choice) == f"backend {choice.name} on {choice.device}{arch}: {choice.reason}"
    assert default_device().type == ("cuda" if choice.name == "cuda" else "cpu")
    assert choice.policy == "off" or (find_driver()[0] is None) == (choice.driver is None)


def test_use_backend_as_a_function_stays_and_as_a_block_goes_back():
    first = backend()
    try:
        used = use_backend("torch")
        kept = backend()
        assert (kept.name, kept.reason) == ("torch", "backend torch was asked for")
        assert repr(used) == str(kept)
        with pytest.raises(ZeroDivisionError), use_backend("torch", policy="off") as inner:
            assert backend() is inner and inner.driver is None
            assert inner.policy == "off" and "GPU policy is off" in inner.reason
            with use_backend("auto"):
                assert backend().requested == "auto"
            assert backend() is inner
            1 / 0
        assert backend() is kept, "an exception in the block must not keep its backend"
    finally:
        use_backend._current = first


def test_a_backend_that_cannot_run_changes_nothing(monkeypatch):
    monkeypatch.setattr(module, "find_gpu", lambda: NOT)
    before = backend()
    for arguments in (("cuda",), ("auto", "require"), ("nonsense",)):
        with pytest.raises(BackendError):
            use_backend(*arguments)
        assert backend() is before


def test_environment_is_read_at_the_first_use(monkeypatch):
    monkeypatch.setattr(use_backend, "_current", None)
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
        monkeypatch.setattr(use_backend, "_current", None)
        monkeypatch.setenv("GPUACCEL_GPU", gpu)
        monkeypatch.setenv("GPUACCEL_BACKEND", name)
        with pytest.raises(BackendError, match=message):
            backend()
        assert use_backend._current is None
    monkeypatch.setenv("GPUACCEL_GPU", "")  # set but empty is as good as unset
    monkeypatch.setenv("GPUACCEL_BACKEND", "")
    assert (backend().policy, backend().requested) == ("auto", "auto")


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the reason why there is no GPU: this machine has one"
)
def test_without_a_gpu_the_reason_says_what_is_missing():
    there, why = find_gpu()
    assert not there and why == find_driver()[1] or "torch" in why
    assert default_device() == torch.device("cpu")


@pytest.mark.parametrize(
    "built_for, message",
    [
        ("13.0", "CUDA 12.4, but torch .* needs a driver for CUDA 13 or newer: update the driver"),
        (None, "is a build without CUDA"),
    ],
)
def test_a_driver_that_does_not_fit_torch_is_explained(monkeypatch, built_for, message):
    monkeypatch.setattr(module, "find_driver", lambda: (12040, "driver for CUDA 12.4"))
    monkeypatch.setattr(torch.version, "cuda", built_for)
    there, why = find_gpu.__wrapped__()
    assert not there and re.search(message, why), why


# ---- deterministic algorithms --------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_deterministic_leaves_every_switch_as_it_was(monkeypatch, frozen):
    """Also after torch.backends.disable_global_flags(), which torch's own test helpers call."""

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


@pytest.mark.slow
def test_importing_gpuaccel_sets_nothing_in_the_process():
    """Neither the environment nor one of torch's flags; torch is imported first, with its own."""
    code = """
import os, sys, warnings
import torch

def state():
    return dict(
        environment=dict(os.environ), filters=list(warnings.filters),
        threads=torch.get_num_threads(), hooks=sys.excepthook,
        deterministic=torch.are_deterministic_algorithms_enabled(), dtype=torch.get_default_dtype(),
        fill=torch.utils.deterministic.fill_uninitialized_memory, grad=torch.is_grad_enabled(),
        precision=torch.get_float32_matmul_precision(), anomaly=torch.is_anomaly_enabled(),
        cudnn=torch.backends.cudnn.benchmark, tf32=torch.backends.cuda.matmul.allow_tf32,
        seed=torch.initial_seed(), random=torch.get_rng_state().tolist(),
    )

before = state()
import gpuaccel
after = state()
print([key for key in before if before[key] != after[key]])
"""
    run = fresh_process(code)
    assert run.stdout == "[]\n", run.stdout + run.stderr


@pytest.mark.parametrize("value", [None, ":16:8", ":4096:2:16:8"])
def test_deterministic_sets_the_cublas_workspace_for_its_block_only(monkeypatch, value):
    if value is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    with ga.deterministic():
        inside = os.environ["CUBLAS_WORKSPACE_CONFIG"]
        assert inside == (":16:8" if value == ":16:8" else ":4096:8")
        with ga.deterministic():
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == inside
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == inside
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == value


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_gpu_deterministic_before_and_after_the_first_product(early):
    """Where torch reads the variable once (2.13), it refuses products if the first came before."""
    code = f"""
import torch, gpuaccel as ga
x = torch.ones(8, 8, device="cuda")
if {early}:
    x @ x
with ga.deterministic():
    pass
x.sum().item()
refused = False
try:
    x @ x
    with ga.deterministic():
        x @ x
except RuntimeError:
    refused = True
print(refused)
"""
    run = fresh_process(code)
    expected = ["False\n"] + ["True\n"] * early
    assert run.stdout in expected, run.stdout + run.stderr


# ---- the cache folder ----------------------------------------------------------------------------


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


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("inside", ["", "cubin"])
@pytest.mark.parametrize("change", [0o775, 0o702, "owner"])
def test_a_cache_that_others_can_write_to_is_not_used(
    monkeypatch, tmp_path, fresh_cache, change, inside
):
    """What lies there would be run. The warning comes once."""
    monkeypatch.setenv("GPUACCEL_CACHE", str(tmp_path))
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    if change == "owner":
        _another_owner(folder)
    else:
        folder.chmod(change)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert cache_dir() is None and cache_dir() is None
    (text,) = [str(w.message) for w in seen]
    assert f"other users can write to {folder}" in text and "chmod" not in text
    assert "set GPUACCEL_CACHE" in text and f"delete {tmp_path}" in text
    folder.chmod(0o755)
    os.chown(folder, os.getuid(), -1)
    cache_dir.cache_clear()
    assert cache_dir() == tmp_path


def _another_owner(path):
    if os.getuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


def _a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _a_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes, links and pipes")
@pytest.mark.parametrize(
    "change",
    [
        _another_owner,
        lambda path: path.chmod(0o660),
        lambda path: path.chmod(0o606),
        _a_link,
        _a_pipe,
    ],
)
def test_an_entry_that_another_user_can_have_written_is_made_anew(
    monkeypatch, tmp_path, fresh_cache, change
):
    """The folder may be ours again: its files stay whose they are."""
    monkeypatch.setenv("GPUACCEL_CACHE", str(tmp_path))
    write_entry("simt", "key", b"foreign")
    assert read_entry("simt", "key") == b"foreign"
    change(tmp_path / "simt" / "key")
    assert from_cache("simt", "key", lambda: b"own", lambda content: content) == b"own"
    assert read_entry("simt", "key") == b"own"
    status = (tmp_path / "simt" / "key").lstat()
    assert status.st_uid == os.getuid() and status.st_mode == stat.S_IFREG | 0o600


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_folders_of_the_cache_are_ours_whatever_the_umask(monkeypatch, tmp_path, fresh_cache):
    monkeypatch.setenv("GPUACCEL_CACHE", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        write_entry("cubin", "key", b"content")
    finally:
        os.umask(before)
    cache_dir.cache_clear()
    assert cache_dir() == tmp_path / "cache" and read_entry("cubin", "key") == b"content"


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
    (text,) = [str(w.message) for w in seen if "gpuaccel" in str(w.message)]
    assert "runs without a cache" in text and "GPUACCEL_CACHE" in text
    assert str(tmp_path / "file" / "cache") in text


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (12, 0)])
def test_the_default_dtype_is_one_that_the_gpu_multiplies(capability, monkeypatch):
    """Where it is not bf16, doctor says why."""
    monkeypatch.setattr(module, "find_gpu", lambda: THERE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA X")
    with use_backend("cuda"):
        fact = ga.doctor().facts["default dtype"]
        if capability < (8, 0):
            words = f"torch.float32: sm_{capability[0]}{capability[1]} has no matrix products in"
            assert default_dtype() == torch.float32 and fact.startswith(words)
        else:
            assert default_dtype() == torch.bfloat16 and fact == "torch.bfloat16"
    for name in ("torch", "simt"):
        with use_backend(name):
            assert default_dtype() == torch.float32
            assert ga.doctor().facts["default dtype"] == "torch.float32"


@pytest.mark.gpu
def test_gpu_is_found_and_named():
    there, why = find_gpu()
    assert there and torch.cuda.get_device_name() in why
    with use_backend("cuda", policy="require") as choice:
        major, minor = torch.cuda.get_device_capability()
        assert choice.arch == f"sm_{major}{minor}" and choice.driver
        assert choice.device == torch.cuda.get_device_name()
        assert default_device() == torch.device("cuda", torch.cuda.current_device())
    with use_backend("torch"):
        assert default_device().type == "cpu"


@pytest.mark.gpu
def test_gpu_hidden_by_the_environment_is_explained():
    code = "from gpuaccel.backends import backend; print(backend())"
    run = fresh_process(code, CUDA_VISIBLE_DEVICES="")
    assert run.stdout.startswith("backend torch on CPU: "), run.stdout + run.stderr
