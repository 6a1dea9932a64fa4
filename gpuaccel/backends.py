"""Which backend runs, and why, in words.

    import gpuaccel as ga
    ga.backend()                      # chosen at the first use, then kept
    # Choice(name='torch', reason='no CUDA driver (libcuda.so.1 not found)', ...)
    with ga.use_backend("torch"):     # for one block
        ...

There are two settings. The *backend* (`GPUACCEL_BACKEND`, or `use_backend`) is one of:

* `cuda`: our kernels on the GPU
* `simt`: the same kernels on the CPU
* `torch`: the definition of each operation in plain torch
* `auto`: `cuda` where it works, else `torch`

A raw kernel has no definition in torch, so it runs on `simt` where there is no usable GPU.

The *policy* for the GPU (`GPUACCEL_GPU`) is `auto` (use a GPU where there is one), `require` (raise
without one) or `off` (leave it alone).

The choice takes three steps: look for a driver, remember the result, and resolve the request in
one pure function. Nothing falls back in silence.
"""

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import pathlib
import re
import shlex
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .errors import BackendError, check_choice

if TYPE_CHECKING:
    import torch

Running = Literal["cuda", "simt", "torch"]
Backend = Literal["auto", Running]
GpuPolicy = Literal["auto", "require", "off"]


@dataclass(frozen=True)
class Choice:
    """The backend in use. `str(choice)` is one sentence for a first notebook cell.

    Attributes:
        name: "cuda", "simt" or "torch".
        reason: why this backend, in words.
        requested: what was asked for: "auto", "cuda", "simt" or "torch".
        policy: "auto", "require" or "off".
        device: "NVIDIA H200", or "CPU".
        arch: "sm_90"; None without a GPU.
        driver: the newest CUDA version that the driver supports, "13.0"; None without a driver.
    """

    name: Running
    reason: str
    requested: str
    policy: str
    device: str
    arch: str | None
    driver: str | None

    def __str__(self):
        device = f"{self.device} ({self.arch})" if self.arch else self.device
        return f"backend {self.name} on {device}: {self.reason}"


@functools.cache
def find_driver() -> tuple[int | None, str]:
    """Return the newest CUDA version that the driver supports, and a sentence on how we know.

    The version is 1000 * major + 10 * minor, or None without a driver. It comes from libcuda.so.1
    itself: cuda.core and cuda.bindings.driver can deadlock where there is no driver.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, "no CUDA driver (libcuda.so.1 not found)"
    status = cuda.cuInit(0)
    if status:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        return None, f"the CUDA driver does not start (cuInit returned error {status}{why})"
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return version.value, f"driver for CUDA {_version_text(version.value)}"


def _version_text(version: int) -> str:
    """13000 -> "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def find_gpu() -> tuple[bool, str]:
    """Return whether there is a GPU that torch can use, and why, in words."""
    version, reason = find_driver()
    if version is None:
        return False, reason
    import torch

    if torch.version.cuda is None:
        return False, f"{reason}, but torch {torch.__version__} is a build without CUDA"
    needed = int(torch.version.cuda.split(".")[0])
    if version // 1000 < needed:
        return False, (
            f"{reason}, but torch {torch.__version__} needs a driver for CUDA {needed} or newer: "
            "update the driver, or install a torch built for an older CUDA"
        )
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return False, f"{reason}, but torch sees no GPU (CUDA_VISIBLE_DEVICES={visible!r})"
    return True, f"{torch.cuda.get_device_name()} found, {reason}"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler of this machine.

    Attributes:
        command: the words that start it.
        kind: "g++", "clang" or "zig", which differ in their options.
        version: of zig: the version of its clang.
    """

    command: tuple[str, ...]
    kind: str
    version: str

    def __str__(self):
        if self.kind == "zig":
            return f"zig (clang {self.version})"
        return f"{self.kind} {self.version}"


# How to get a C++ compiler.
GET_COMPILER = (
    "install g++ or clang++ (Debian, Ubuntu: apt install g++), or pip install ziglang, or name one "
    "in GPUACCEL_CXX"
)


def find_compiler() -> tuple[Compiler | None, str]:
    """Return the C++ compiler that builds kernels for the CPU (or None), and why, in words.

    `GPUACCEL_CXX` (a command) is the only candidate where it is set. Otherwise the first of g++,
    clang++ and pip's ziglang that answers is taken. We call ziglang's `cc`: its `c++` first
    compiles a C++ library for a minute, and kernels do not need one.
    """
    chosen = os.environ.get("GPUACCEL_CXX")
    for command in [tuple(shlex.split(chosen))] if chosen else _compilers():
        with contextlib.suppress(LookupError):
            compiler = _ask_compiler(command)
            return compiler, f"{compiler} found"
    if chosen:
        return None, f"GPUACCEL_CXX={chosen!r} does not answer"
    return None, f"neither g++ nor clang++ nor ziglang found: {GET_COMPILER}"


def _compilers() -> Iterator[tuple[str, ...]]:
    """Commands of compilers that may be there."""
    yield ("g++",)
    yield ("clang++",)
    # `%pip install` in a notebook may have brought it a moment ago. Not asked where another one
    # answers: two threads may not invalidate caches at a time.
    importlib.invalidate_caches()
    if importlib.util.find_spec("ziglang"):
        yield (sys.executable, "-m", "ziglang", "cc")


# An error is not cached: a compiler can be installed while a notebook runs.
@functools.cache
def _ask_compiler(command: tuple[str, ...]) -> Compiler:
    """The compiler behind a command, or LookupError if it does not answer."""
    try:
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=300
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LookupError(command) from error
    version = re.search(r"\d+\.\d+(\.\d+)?", answer.stdout)
    if answer.returncode or not version:
        raise LookupError(command)
    if any("zig" in part for part in command):
        kind = "zig"
        # In front of all other options, it keeps zig from adding its own sanitizer callbacks.
        command = (*command, "-fno-sanitize=undefined")
    elif "clang" in answer.stdout:
        kind = "clang"
    else:
        kind = "g++"
    return Compiler(command, kind, version[0])


def resolve(requested: str, policy: str, gpu: tuple[bool, str]) -> tuple[Running, str]:
    """Return (backend, reason) for a request, a policy and the result of `find_gpu`.

    The function is pure, so that tests can try every case.

    Raises:
        BackendError: for an unknown name and for a request that cannot be met.
    """
    check_choice("backend", requested, Backend, error=BackendError)
    check_choice("GPU policy", policy, GpuPolicy, error=BackendError)
    has_gpu, why = gpu
    if policy == "off" and requested == "cuda":
        raise BackendError(
            "backend cuda was asked for, but the GPU policy is off (GPUACCEL_GPU=off)"
        )
    if not has_gpu and policy != "off" and (requested == "cuda" or policy == "require"):
        request = "backend cuda" if requested == "cuda" else "a GPU (policy require)"
        raise BackendError(f"{request} was asked for, but there is none to use: {why}")
    if requested in ("simt", "torch") and policy == "require":
        raise BackendError(f"backend {requested} was asked for, but the GPU policy is require")
    if requested == "simt":
        return "simt", "backend simt was asked for"
    if policy == "off":
        return "torch", "the GPU policy is off (GPUACCEL_GPU=off)"
    if requested == "torch":
        return "torch", "backend torch was asked for"
    return ("cuda", why) if has_gpu else ("torch", why)


def _choose(requested: str, policy: str | None = None) -> Choice:
    policy = policy or os.environ.get("GPUACCEL_GPU") or "auto"
    gpu = (False, "") if policy == "off" else find_gpu()
    name, reason = resolve(requested, policy, gpu)
    if name == "simt":
        compiler, why = find_compiler()
        if compiler is None:
            raise BackendError(
                f"backend simt was asked for, but there is no C++ compiler to use: {why}"
            )
        reason += f", kernels are compiled with {compiler}"
    device = "CPU"
    arch = None
    if name == "cuda":
        import torch

        major, minor = torch.cuda.get_device_capability()
        device = torch.cuda.get_device_name()
        arch = f"sm_{major}{minor}"
    version = None if policy == "off" else find_driver()[0]
    driver = None if version is None else _version_text(version)
    return Choice(name, reason, requested, policy, device, arch, driver)


def backend() -> Choice:
    """The backend in use.

    The first call chooses it (`GPUACCEL_BACKEND`, `GPUACCEL_GPU`) and logs it (logger "gpuaccel",
    level INFO).

    Returns:
        The name, the reason in words, and the device, as a Choice.

    Raises:
        BackendError: when the requested backend cannot run here.

    Example:
        >>> choice = ga.backend()
        >>> choice.name in ("cuda", "simt", "torch")
        True
        >>> print(choice)
        backend ... on ...: ...
    """
    if use_backend._current is None:
        use_backend._current = _choose(os.environ.get("GPUACCEL_BACKEND") or "auto")
        logging.getLogger("gpuaccel").info("%s", use_backend._current)
    return use_backend._current


class ProcessSwitch:
    """Sets a value of the whole process: a call for good, a `with` block until its end.

    As with torch.set_grad_enabled, the end of the block restores what held before the call. A
    subclass keeps the value in its attribute `_current`.

    Args:
        value: the new one.
    """

    _current: Any = None

    def __init__(self, value):
        self._previous = type(self)._current
        type(self)._current = value

    def __enter__(self):
        return self

    def __exit__(self, *error):
        type(self)._current = self._previous


class use_backend(ProcessSwitch):
    """Switch the backend of the whole process: by a call, or for a `with` block.

    The end of the block restores the previous backend.

    Args:
        name: "auto", "cuda", "simt" or "torch".
        policy: for the GPU: "auto", "require" or "off"; default: `GPUACCEL_GPU`, else "auto".

    Raises:
        BackendError: with nothing changed, for an unknown name, and when the backend cannot run
            here.

    Example:
        >>> with ga.use_backend("torch"):  # for this block; a plain call switches for good
        ...     print(ga.backend().name, ga.default_device())
        torch cpu
    """

    def __init__(self, name: Backend, policy: GpuPolicy | None = None):
        self.choice = _choose(name, policy)
        super().__init__(self.choice)

    def __enter__(self) -> Choice:
        return self.choice

    def __repr__(self):
        return str(self.choice)


def takes(device) -> bool:
    """Whether operations on tensors of this torch.device run our kernels.

    They do with backend cuda on a GPU, and with backend simt on the CPU.
    """
    return device.type == {"cuda": "cuda", "simt": "cpu"}.get(backend().name)


def default_device() -> "torch.device":
    """The torch.device of the backend in use: the current GPU, or the CPU.

    Returns:
        torch.device("cuda", index) or torch.device("cpu").

    Raises:
        BackendError: when the requested backend cannot run here.

    Example:
        >>> batch = torch.zeros(8, 16, device=ga.default_device())
        >>> batch.is_cuda == (ga.backend().name == "cuda")
        True
    """
    import torch

    if backend().name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def default_dtype() -> "torch.dtype":
    """The dtype to train in: torch.bfloat16 on a GPU that has matrix products in it.

    These are GPUs of compute capability 8.0 (sm_80) and newer. On older ones torch emulates bf16.
    They and the CPU get torch.float32: fp16 gradients would need a scaled loss.

    Returns:
        torch.bfloat16 or torch.float32.

    Raises:
        BackendError: when the requested backend cannot run here.

    Example:
        >>> model = torch.nn.Linear(4, 2).to(ga.default_device(), ga.default_dtype())
        >>> model.weight.dtype == ga.default_dtype()
        True
    """
    import torch

    arch = backend().arch
    if arch is not None and int(arch.removeprefix("sm_")) >= 80:
        return torch.bfloat16
    return torch.float32


@functools.cache
def cache_dir() -> pathlib.Path | None:
    """The folder of compiled kernels and tokenizers: `GPUACCEL_CACHE`, else ~/.cache/gpuaccel.

    Returns:
        None, after one warning, when the folder cannot be written, or when other users can write to
        it: what lies there is run. Everything then works without a cache.
    """
    path = pathlib.Path(
        os.environ.get("GPUACCEL_CACHE")
        or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpuaccel"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        folders = (path, *(entry for entry in path.iterdir() if entry.is_dir()))
        shared = next((folder for folder in folders if not may_be_loaded(folder.stat())), None)
        if shared is None:
            return path
        warnings.warn(
            f"gpuaccel runs without a cache: other users can write to {shared}, and may have put "
            "code there that this process would run; set GPUACCEL_CACHE to a folder of your own, "
            f"or delete {path} if it holds nothing else",
            stacklevel=2,
        )
        return None
    except OSError as error:
        warnings.warn(
            f"gpuaccel runs without a cache: {path} cannot be written ({error.strerror}); "
            "set GPUACCEL_CACHE to a folder that can",
            stacklevel=2,
        )
        return None


def may_be_loaded(status: os.stat_result) -> bool:
    """Whether only this user and root can have written a regular file, or what a folder holds."""
    mode = status.st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return False
    # Windows reports neither owners nor such modes.
    return os.name == "nt" or (
        status.st_uid in (os.getuid(), 0) and not mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


# ---- deterministic algorithms ----------------------------------------------------------------

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Run a block in which two runs are bit-identical, with torch's deterministic algorithms.

    This is torch.use_deterministic_algorithms(True), except that uninitialised memory is not
    filled, which would cost time. Our own kernels are deterministic with and without it. The end of
    the block restores every setting.

    Yields:
        Nothing; the block runs with the settings.

    Raises:
        RuntimeError: at an operation that torch has only in a nondeterministic version, with its
            name. torch counts matrix products on a GPU among these, unless CUBLAS_WORKSPACE_CONFIG
            was :4096:8 or :16:8 at the first product of the process. The block sets this variable.

    Source:
        torch.use_deterministic_algorithms.

    Example:
        >>> with ga.deterministic():
        ...     torch.are_deterministic_algorithms_enabled()
        True
        >>> torch.are_deterministic_algorithms_enabled()
        False
    """
    import torch

    # The public name raises after torch.backends.disable_global_flags().
    set_cudnn_benchmark = torch._C._set_cudnn_benchmark
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # A module whose attribute is a property: mypy does not know it.
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    with cublas_workspace():
        try:
            torch.use_deterministic_algorithms(True)
            settings.fill_uninitialized_memory = False
            set_cudnn_benchmark(False)
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            settings.fill_uninitialized_memory = fill
            set_cudnn_benchmark(benchmark)


@contextlib.contextmanager
def cublas_workspace():
    """Set CUBLAS_WORKSPACE_CONFIG to a deterministic value for a block, and let torch read it.

    torch reads the variable once per process, at its first matrix product on a GPU, and keeps the
    answer. Where CUDA is initialised, the block therefore begins with one product of two numbers.
    """
    before = os.environ.get(CUBLAS_VARIABLE)
    if before in CUBLAS_DETERMINISTIC:
        yield
        return
    os.environ[CUBLAS_VARIABLE] = CUBLAS_DETERMINISTIC[0]
    try:
        _let_torch_read_cublas_variable()
        yield
    finally:
        if before is None:
            os.environ.pop(CUBLAS_VARIABLE, None)
        else:
            os.environ[CUBLAS_VARIABLE] = before


_torch_has_read_it = False


def _let_torch_read_cublas_variable():
    global _torch_has_read_it
    import torch

    is_ready = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    if _torch_has_read_it or not is_ready:
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Without the deterministic mode: where torch has read another value, it would refuse this one.
    torch.use_deterministic_algorithms(False)
    try:
        x = torch.zeros(1, 1, device="cuda")
        torch.mm(x, x)
        _torch_has_read_it = True
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
