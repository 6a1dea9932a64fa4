"""CUDA C in, machine code (cubin) out: NVRTC opened by path, with a cache on disk.

It needs no GPU and no driver.

    from gpuaccel import nvrtc
    nvrtc.library()                                   # which NVRTC, and its path
    # Library(version=(12, 9), path='.../nvidia/cuda_nvrtc/lib/libnvrtc.so.12', ...)
    cubin, log, symbols = nvrtc.compile_cubin(source, "x.cu", "sm_90")

Why by path, through ctypes: `cuda.bindings.nvrtc` takes whichever libnvrtc the process has loaded.
With torch's CUDA 13 wheels beside NVRTC 12 the compiler would then depend on the order of imports.
Here it depends only on what is installed: `GPUACCEL_NVRTC` (a path), else the NVRTC 12 wheel (its
code runs on CUDA 12 and 13 drivers), else torch's NVRTC 13, else the system's. Libraries of both
major versions can be loaded in one process, because their symbols are versioned.
"""

import ctypes
import functools
import glob
import hashlib
import json
import os
import re
import threading
import warnings
from dataclasses import dataclass

from ..errors import BackendError, CompileError, CompileWarning
from ..files import from_cache
from ..headers import CURAND_STUBS, curand_folder, folders_with, wheel_roots
from ..source import INCLUDE

# The second makes ptxas report registers and spills. The third lets constexpr functions run on the
# device; host_code.py removes all other functions without an annotation.
OPTIONS = ("-std=c++17", "--ptxas-options=-v", "-default-device")


@dataclass(frozen=True)
class Library:
    """One NVRTC. archs: those that it can write machine code for, as "sm_75"."""

    version: tuple[int, int]
    path: str
    archs: tuple[str, ...]
    handle: ctypes.CDLL

    def __str__(self):
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"


@dataclass(frozen=True)
class Resources:
    """What one kernel uses on one architecture, as ptxas reports it.

    Shared memory is per block; registers, stack and spills are per thread.

    Attributes:
        arch: the architecture, e.g. "sm_90".
        registers: per thread.
        shared_bytes: static shared memory per block.
        stack_bytes: per thread.
        spill_store_bytes: registers written to the stack, per thread.
        spill_load_bytes: registers read back from the stack, per thread.
        cubin_bytes: size of the machine code.
    """

    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    cubin_bytes: int


def candidates() -> list[str]:
    """Paths where an NVRTC may be, best first. The order does not depend on what is loaded."""
    if chosen := os.environ.get("GPUACCEL_NVRTC"):
        return [chosen]
    wheels = wheel_roots()
    libraries = ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13")
    patterns = [os.path.join(root, "nvidia", path) for path in libraries for root in wheels]
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    patterns.append(os.path.join(toolkit, "lib64", "libnvrtc.so.1[23]"))
    paths = [path for pattern in patterns for path in sorted(glob.glob(pattern), reverse=True)]
    return [*paths, "libnvrtc.so.12", "libnvrtc.so.13"]


@functools.cache
def include_folders() -> tuple[str, ...]:
    """The folders with cuda_fp16.h, cooperative_groups.h and cuda/barrier: of wheels, or a toolkit.

    Empty where there are none of NVRTC's major version: NVRTC's own wheel has no headers.
    """
    major = library().version[0]
    name = "cuda_runtime" if major == 12 else f"cu{major}"
    for folder in folders_with("cuda_runtime_api.h", (name,)):
        with open(os.path.join(folder, "cuda_runtime_api.h"), encoding="latin-1") as file:
            version = re.search(r"#define CUDART_VERSION\s+(\d+)", file.read())
        if version and int(version[1]) // 1000 == major:
            beside = os.path.join(folder, "..", "..", "cuda_cccl", "include")
            parts = (folder, os.path.join(folder, "cccl"), beside)
            return tuple(os.path.normpath(part) for part in parts if os.path.isdir(part))
    return ()


def lacks_header(log: str) -> bool:
    """True if the compiler's messages report that a header of CUDA is missing."""
    names = re.findall(r'(?:could not|cannot) open source file "([^"]*)"', log)
    headers = r"cuda|cooperative_groups|nv/|cub/|curand|(?:crt/)?mma\.h"
    return bool(names) and all(re.match(headers, name) for name in names)


def _open(path: str) -> Library:
    for builtins in sorted(glob.glob(os.path.join(os.path.dirname(path), "*nvrtc-builtins*"))):
        if ".alt." not in builtins:
            # NVRTC 13.0 has no search path of its own and would not find them.
            ctypes.CDLL(builtins)
    lib = ctypes.CDLL(path)
    major = ctypes.c_int()
    minor = ctypes.c_int()
    count = ctypes.c_int()
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    lib.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    lib.nvrtcGetSupportedArchs(archs)
    version = major.value, minor.value
    return Library(version, path, tuple(f"sm_{arch}" for arch in archs), lib)


@functools.cache
def library() -> Library:
    """The NVRTC that compiles every kernel of this process.

    Raises:
        BackendError: it names the wheel to install.
    """
    paths = candidates()
    for path in paths:
        try:
            return _open(path)
        except (OSError, AttributeError) as error:
            problem = error
    raise BackendError(
        "NVRTC, the compiler for CUDA C, was not found: pip install nvidia-cuda-nvrtc-cu12 "
        f"(looked at {', '.join(paths)}; last answer: {problem})"
    )


def check_arch(arch: str) -> str:
    """Return `arch`, if this NVRTC can write machine code for it.

    "sm_90a" is sm_90 with the instructions that only it has. NVRTC lists only sm_90.

    Raises:
        BackendError: it says what to do otherwise.
    """
    lib = library()
    if arch not in lib.archs and not (arch.endswith("a") and arch[:-1] in lib.archs):
        raise BackendError(
            f"{lib} knows {', '.join(lib.archs)} and not {arch}: install a newer "
            "nvidia-cuda-nvrtc-cu12, or point GPUACCEL_NVRTC at another libnvrtc"
        )
    return arch


def check_driver(driver: int | None):
    """Raise BackendError if a driver (1000 * major + 10 * minor) is too old for this code."""
    if driver is not None and driver // 1000 < library().version[0]:
        raise BackendError(
            f"the driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, but {library()} "
            f"writes code for CUDA {library().version[0]}: update the driver, or "
            "pip install 'nvidia-cuda-nvrtc-cu12<13'"
        )


def compile_cubin(
    source: str,
    filename: str,
    arch: str,
    options: tuple[str, ...] = (),
    expressions: tuple[str, ...] = (),
) -> tuple[bytes, str, dict[str, str]]:
    """(cubin, ptxas report, symbols) of a whole program for one architecture, or from the cache.

    Args:
        source: CUDA C with everything it needs, so that the cache key covers it. Where options
            bring headers, as -I does for an #include, nothing is kept.
        filename: what error messages call it
        arch: e.g. "sm_90"
        options: further options for NVRTC
        expressions: qualified names of kernels in C++, and `&name` of variables: the symbol of each
            is in the result; a template's instance is thereby compiled

    Raises:
        CompileError: with file, line and caret as NVRTC prints them.
    """
    flags = _flags(source, arch, options)
    facts = json.dumps([source, filename, flags, library().version, expressions])
    key = hashlib.sha256(facts.encode()).hexdigest()

    def make():
        cubin, _, log, symbols = _compile(source, filename, flags, expressions)
        _show_warnings(log, filename)
        return json.dumps([log, symbols]).encode() + b"\n" + cubin

    # Headers that the options bring are not in the key.
    is_brought = re.search(r"(?:^| )--?(?:pre-)?include(?:[= ]|$)", " ".join(options))
    is_found = chosen_folders(options) and INCLUDE.search(source)
    return _load(make()) if is_brought or is_found else from_cache("cubin", key, make, _load)


def _flags(source, arch, options) -> list[str]:
    # NVRTC 12.9 and newer have their own cache on machines with a driver; it lacks ptxas's report.
    no_cache = ("--no-cache",) if library().version >= (12, 9) else ()
    flags = [f"-arch={check_arch(arch)}", *OPTIONS, *no_cache, *options]
    if INCLUDE.search(source):
        folders = include_folders()
        if "curand" in source and (curand := curand_folder()):
            folders = (*folders, curand)
        flags += [f"-I{folder}" for folder in folders]
    return flags


def compile_ptx(source: str, filename: str, arch: str, options: tuple[str, ...] = ()) -> str:
    """PTX of a whole program, with a `.loc` for each source line. The cache keeps none."""
    flags = _flags(source, arch, (*options, "-lineinfo"))
    return _compile(source, filename, flags, ())[1]


def _load(entry: bytes) -> tuple[bytes, str, dict[str, str]]:
    """Read a cache entry: the report and the symbols as JSON, a newline, and the cubin."""
    line, cubin = entry.split(b"\n", 1)
    log, symbols = json.loads(line)
    if not isinstance(log, str) or not isinstance(symbols, dict) or cubin[:4] != b"\x7fELF":
        raise ValueError(
            f"a compiled program is {type(log).__name__}, {type(symbols).__name__} and "
            f"{cubin[:4]!r}...; expected the report (str), the symbols (dict) and an ELF file"
        )
    return cubin, log, symbols


def chosen_folders(options: tuple[str, ...]) -> tuple[str, ...]:
    """The folders that -I names in the options."""
    folders = []
    words = iter(options)
    for word in words:
        if path := re.fullmatch(r"(?:-I|--include-path(?:=|$))\s*(.*)", word):
            folders.append(path[1] or next(words, ""))
    return tuple(folders)


# "x.cu(3): warning #177-D: variable "a" was declared but never referenced"
_WARNING = re.compile(r"^(.+?)\((\d+)\): warning(?: #[\w-]+)?: (.*)$", re.M)
# Of helpers that a kernel does not call, and of a kernel that is half written.
_UNUSED = re.compile(r'\w+ "[^"]*" was declared but never referenced')


def _show_warnings(log: str, filename: str):
    """Show NVRTC's warnings, once per compilation: a kernel from the cache shows none."""
    for file, line, text in dict.fromkeys(_WARNING.findall(log)):
        if file.startswith("kernels_cu/") and file != filename or _UNUSED.match(text):
            continue
        # The warning names the user's line, not this one.
        warnings.warn_explicit(text, CompileWarning, file, int(line))


_lock = threading.Lock()


def _compile(source, filename, flags, expressions):
    lib = library().handle
    program = ctypes.c_void_p()

    def read(what):
        size = ctypes.c_size_t()
        lib[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
        content = ctypes.create_string_buffer(max(size.value, 1))
        lib[f"nvrtcGet{what}"](program, content)
        return content.raw[: size.value]

    def read_text(what):
        return read(what).rstrip(b"\0").decode(errors="replace").strip()

    # A header of NVIDIA's is preferred.
    stubs = {
        name: text
        for name, text in CURAND_STUBS.items()
        if "curand" in source and not any(os.path.isfile(f"{flag[2:]}/{name}") for flag in flags)
    }
    texts = (ctypes.c_char_p * len(stubs))(*(text.encode() for text in stubs.values()))
    names = (ctypes.c_char_p * len(stubs))(*(name.encode() for name in stubs))
    with _lock:
        status = lib.nvrtcCreateProgram(
            *(ctypes.byref(program), source.encode(), filename.encode(), len(stubs), texts, names)
        )
        if status:
            reason = lib.nvrtcGetErrorString(status).decode()
            raise CompileError(f"NVRTC refused {filename}: {reason}")
        try:
            for expression in expressions:
                lib.nvrtcAddNameExpression(program, expression.encode())
            arguments = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            status = lib.nvrtcCompileProgram(program, len(flags), arguments)
            log = read_text("ProgramLog")
            if status:
                raise CompileError(f"{filename} does not compile:\n{log}{_hint(log)}", log)
            symbols = {}
            for expression in expressions:
                symbol = ctypes.c_char_p()
                lib.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(symbol))
                symbols[expression] = (symbol.value or b"").decode()
            return read("CUBIN"), read_text("PTX"), log, symbols
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))


# What the compiler did not find or refused, and what helps.
HINTS = {
    r'open source file "(cuda|coop|nv/|cub/)': "the headers of CUDA are in the "
    "wheels nvidia-cuda-runtime-cu12 and nvidia-cuda-cccl-cu12, or in a toolkit (CUDA_HOME)",
    r'open source file "(crt/)?mma': "tensor cores (wmma) need the headers mma.h and crt/mma.h of "
    "the wheel nvidia-cuda-nvcc-cu12, or of a toolkit (CUDA_HOME)",
    r'cub/[^\n]*error: cannot open source file "c': "NVRTC compiles headers of single block or "
    "warp functions of cub, as <cub/block/block_reduce.cuh>, and not <cub/cub.cuh>",
    r'open source file "curand': "curand_kernel.h is in the wheel nvidia-curand-cu12, or in a "
    "toolkit (CUDA_HOME)",
    # More than 49,152 bytes, in the words of NVRTC and of ptxas.
    r"too much shared data|\b(4915[3-9]|491[6-9]\d|49[2-9]\d\d|[5-9]\d{4}|\d{6,}) bytes smem": "a "
    "block has 49,152 bytes of static __shared__ memory; a launch can ask for more: "
    "kernel[grid, block, bytes]",
}


def _hint(log: str) -> str:
    hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, log)]
    return "".join(f"\nhint: {hint}" for hint in hints)


def resources(cubin: bytes, log: str, name: str, arch: str) -> Resources:
    """What the kernel with the symbol `name` uses, read from ptxas's report."""
    part = re.search(
        rf"properties for {re.escape(name)}\b(.*?)(?=Compiling entry function|\Z)", log, re.S
    )
    if part is None:
        raise CompileError(f"the compiler's report does not mention kernel {name!r}", log)

    def number(pattern):
        match = re.search(pattern, part[1])
        return int(match[1]) if match else 0

    return Resources(
        arch,
        registers=number(r"Used (\d+) registers"),
        shared_bytes=number(r"(\d+) bytes smem"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
        cubin_bytes=len(cubin),
    )
