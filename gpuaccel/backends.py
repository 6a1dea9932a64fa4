"""Which backend runs, and the reason in words.

    >>> import gpuaccel as ga
    >>> ga.backend()                      # chosen at the first use, then kept
    Choice(name='torch', reason='no CUDA driver (libcuda.so.1 not found)', ...)
    >>> with ga.use_backend("torch"):     # for one block; as a plain call: for the rest of the process
    ...     ...

Two separate choices. The *backend* (`GPUACCEL_BACKEND`, or `use_backend`): `auto`, `cuda`, `simt` (the same kernels on the CPU),
`torch` (each operation's definition in plain torch). `auto` is `cuda` where it works, else `torch`. Raw kernels have no
definition in torch: where there is no GPU to use, they run on simt. The *policy* for the GPU (`GPUACCEL_GPU`): `auto` takes a
GPU where there is one, `require` stops without one, `off` leaves it alone.
Three visible steps: try to find a driver; keep what was found; one function resolves the choice. Nothing falls back in silence.
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
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass

from .errors import BackendError

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # read at the first product; without it deterministic() is refused
BACKENDS = ("auto", "cuda", "simt", "torch")
POLICIES = ("auto", "require", "off")


@dataclass(frozen=True)
class Choice:
    """The backend in use. `str(choice)` is one sentence fit for a first notebook cell."""

    name: str  # "cuda", "simt" or "torch"
    reason: str  # why, in words
    requested: str  # what was asked for: auto | cuda | simt | torch
    policy: str  # auto | require | off
    device: str  # "NVIDIA H200", or "CPU"
    arch: "str | None"  # "sm_90"; None without a GPU
    driver: "str | None"  # CUDA version that the driver supports, "13.0"; None without a driver

    def __str__(self):
        where = f"{self.device} ({self.arch})" if self.arch else self.device
        return f"backend {self.name} on {where}: {self.reason}"


@functools.cache
def find_driver() -> "tuple[int | None, str]":
    """(CUDA version the driver supports as 1000*major + 10*minor, or None; the reason in words).

    Asks libcuda.so.1 itself: cuda.core and cuda.bindings.driver must not be entered without one (they can deadlock)."""
    library = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return None, f"no CUDA driver ({library} not found)"
    status = cuda.cuInit(0)
    if status:
        return None, f"the CUDA driver does not start (cuInit returned error {status})"
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return version.value, f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


@functools.cache
def find_gpu() -> "tuple[bool, str]":
    """(is there a GPU that torch can use, the reason in words)."""
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
        return (
            False,
            f"{reason}, but torch sees no GPU (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})",
        )
    return True, f"{torch.cuda.get_device_name()} found, {reason}"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler of this machine. kind: "g++", "clang" or "zig", which differ in their options; version: of zig that of its clang."""

    command: "tuple[str, ...]"
    kind: str
    version: str

    def __str__(self):
        return (
            f"zig (clang {self.version})" if self.kind == "zig" else f"{self.kind} {self.version}"
        )


@functools.cache
def find_compiler() -> "tuple[Compiler | None, str]":
    """(the C++ compiler that runs kernels on the CPU, or None; the reason in words).

    `GPUACCEL_CXX` (a command), else g++, clang++, or pip's ziglang, the first that answers. (Of ziglang `cc`: its `c++` builds a
    C++ library first, for a minute, which kernels do not need.)"""
    chosen = os.environ.get("GPUACCEL_CXX")
    zig = [(sys.executable, "-m", "ziglang", "cc")] if importlib.util.find_spec("ziglang") else []
    for command in [tuple(shlex.split(chosen))] if chosen else [("g++",), ("clang++",), *zig]:
        try:
            done = subprocess.run(
                [*command, "--version"], capture_output=True, text=True, timeout=300
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        number = re.search(r"\d+\.\d+(\.\d+)?", done.stdout)
        if done.returncode == 0 and number:
            kind = (
                "zig"
                if any("zig" in part for part in command)
                else "clang"
                if "clang" in done.stdout
                else "g++"
            )
            return (found := Compiler(command, kind, number[0])), f"{found} found"
    return (
        None,
        f"GPUACCEL_CXX={chosen!r} does not answer"
        if chosen
        else "neither g++ nor clang++ nor ziglang found",
    )


def resolve(requested: str, policy: str, gpu: "tuple[bool, str]") -> "tuple[str, str]":
    """(backend, reason) for a request, a policy and what `find_gpu` said. Pure, so that tests can try every case."""
    if requested not in BACKENDS:
        raise BackendError(f"backend is {requested!r}; expected one of {', '.join(BACKENDS)}")
    if policy not in POLICIES:
        raise BackendError(f"GPU policy is {policy!r}; expected one of {', '.join(POLICIES)}")
    there, why = gpu
    if policy == "off" and requested == "cuda":
        raise BackendError(
            "backend cuda was asked for, but the GPU policy is off (GPUACCEL_GPU=off)"
        )
    if not there and policy != "off" and (requested == "cuda" or policy == "require"):
        asked = "backend cuda" if requested == "cuda" else "a GPU (policy require)"
        raise BackendError(f"{asked} was asked for, but there is none to use: {why}")
    if requested in ("simt", "torch") and policy == "require":
        raise BackendError(f"backend {requested} was asked for, but the GPU policy is require")
    if requested == "simt":
        return "simt", "backend simt was asked for"
    if policy == "off":
        return "torch", "the GPU policy is off (GPUACCEL_GPU=off)"
    if requested == "torch":
        return "torch", "backend torch was asked for"
    return ("cuda", why) if there else ("torch", why)


_current: "Choice | None" = None


def _choose(requested: str, policy: "str | None" = None) -> Choice:
    policy = policy or os.environ.get("GPUACCEL_GPU") or "auto"
    gpu = (False, "") if policy == "off" else find_gpu()
    name, reason = resolve(requested, policy, gpu)
    if name == "simt":
        found, why = find_compiler()
        if found is None:
            raise BackendError(
                f"backend simt was asked for, but there is no C++ compiler to use: {why}"
            )
        reason += f", kernels are compiled with {found}"
    version = None if policy == "off" else find_driver()[0]
    driver = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
    if name == "cuda":
        import torch

        major, minor = torch.cuda.get_device_capability()
        return Choice(
            name,
            reason,
            requested,
            policy,
            torch.cuda.get_device_name(),
            f"sm_{major}{minor}",
            driver,
        )
    return Choice(name, reason, requested, policy, "CPU", None, driver)


def backend() -> Choice:
    """The backend in use; chosen at the first call (`GPUACCEL_BACKEND`, `GPUACCEL_GPU`), logged once (logger "gpuaccel", INFO), then kept.

    Raises BackendError when what was asked for cannot run here."""
    global _current
    if _current is None:
        _current = _choose(os.environ.get("GPUACCEL_BACKEND") or "auto")
        logging.getLogger("gpuaccel").info("%s", _current)
    return _current


class use_backend(contextlib.ContextDecorator):
    """`use_backend("torch")` switches now; as a `with` block it switches back at the end.

    name: "auto", "cuda", "simt" or "torch"; policy: "auto", "require" or "off" (default: `GPUACCEL_GPU`, else "auto").
    Raises BackendError, and changes nothing, when the backend cannot run here."""

    def __init__(self, name: str, policy: "str | None" = None):
        global _current
        self.before = _current
        self.choice = _current = _choose(name, policy)

    def __enter__(self) -> Choice:
        global _current
        _current = self.choice
        return self.choice

    def __exit__(self, *error):
        global _current
        _current = self.before

    def __repr__(self):
        return str(self.choice)


def takes(device) -> bool:
    """Do operations on tensors of this torch.device run our kernels (backend cuda on a GPU, simt on the CPU)?"""
    return device.type == {"cuda": "cuda", "simt": "cpu"}.get(backend().name)


def default_device():
    """torch.device of the backend in use: the current GPU, or the CPU."""
    import torch

    return (
        torch.device("cuda", torch.cuda.current_device())
        if backend().name == "cuda"
        else torch.device("cpu")
    )


@functools.cache
def cache_dir() -> "pathlib.Path | None":
    """Where compiled kernels and tokenizers are kept: `GPUACCEL_CACHE`, else ~/.cache/gpuaccel.

    None, after one warning, when nothing can be written there: everything then works without a cache."""
    path = pathlib.Path(
        os.environ.get("GPUACCEL_CACHE")
        or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpuaccel"
    )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        return path
    except OSError as error:
        warnings.warn(
            f"gpuaccel runs without a cache: {path} cannot be written ({error.strerror}); "
            "set GPUACCEL_CACHE to a folder that can",
            stacklevel=2,
        )
        return None


@contextlib.contextmanager
def deterministic():
    """Inside the block two runs give the same bits: torch takes its deterministic backwards of attention and embedding.

    torch.use_deterministic_algorithms(True) at its least cost: uninitialised memory is not filled. An operation that torch has only in a form
    that differs from run to run raises RuntimeError with its name. Our own kernels give the same bits always."""
    import torch

    benchmark = (
        torch._C._set_cudnn_benchmark
    )  # the public name refuses after torch.backends.disable_global_flags()
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    benchmark(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]
        benchmark(before[3])
