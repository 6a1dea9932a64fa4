"""A kernel: CUDA C source -> machine code -> something you call on torch tensors.

    >>> k = ga.Kernel("accumulate", "accumulate_v1", GRAD_T="float")       # a file of kernels_cu/, specialised by macros
    >>> k[grid, block](acc, grad, acc.numel())                             # torch's current stream; also while a graph is captured
    >>> double = ga.compile('extern "C" __global__ void twice(float* x, int n) { ... }')
    >>> k.resources("sm_90").registers                                     # compiled, measured: no GPU needed

Each argument is checked against the kernel's own parameter list before anything is launched: count, kind, dtype against the
pointer's type, device, contiguity, alignment (a `float4*` asks for 16 bytes). The module is loaded through cuda.core; the
launch itself is `cuLaunchKernel` with packed arguments, because `cuda.core.launch` takes no struct by value yet (cuda-python
issue 2343). Neither is imported unless a driver was found.
"""
import ctypes
import functools
import numbers
import os
import pathlib
import re
import struct
import threading
from dataclasses import dataclass

import torch

from . import nvrtc
from .backend import backend, find_driver, find_gpu
from .errors import ArgumentError, BackendError, CompileError

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
# C scalar -> (struct code, torch dtypes that a pointer to it accepts)
SCALARS = {
    "float": ("f", (torch.float32,)), "double": ("d", (torch.float64,)), "bool": ("?", (torch.bool,)),
    "char": ("b", (torch.int8,)), "signed char": ("b", (torch.int8,)), "unsigned char": ("B", (torch.uint8, torch.bool)),
    "short": ("h", (torch.int16,)), "unsigned short": ("H", (torch.uint16, torch.int16)),
    "int": ("i", (torch.int32,)), "unsigned int": ("I", (torch.uint32, torch.int32)), "unsigned": ("I", (torch.uint32, torch.int32)),
    "long long": ("q", (torch.int64,)), "unsigned long long": ("Q", (torch.uint64, torch.int64)), "size_t": ("Q", (torch.uint64, torch.int64)),
    "bf16": (None, (torch.bfloat16,)), "fp16": (None, (torch.float16,)), "void": (None, None),
}
VECTOR_BASES = {"float": "float", "double": "double", "int": "int", "uint": "unsigned", "longlong": "long long", "char": "char",
                "uchar": "unsigned char", "short": "short", "ushort": "unsigned short", "ulonglong": "unsigned long long"}


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel, as its source declares it."""
    name: str
    ctype: str                 # "const float4*", "int", "Sources"
    pointer: bool
    code: "str | None"         # struct code of a number; None for pointers and structs
    dtypes: "tuple | None"     # torch dtypes that a pointer accepts; None: any
    align: int                 # bytes that a pointer must be a multiple of

    def __str__(self):
        return f"{self.ctype} {self.name}"


# ---- sources --------------------------------------------------------------------------------------------------------

@functools.cache
def kernel_root() -> pathlib.Path:
    """The folder of the .cu files: GPUACCEL_KERNELS, the installed package's, or the checkout's."""
    here = pathlib.Path(__file__).parent
    for root in (os.environ.get("GPUACCEL_KERNELS"), here / "kernels_cu", here.parent / "kernels_cu"):
        if root and pathlib.Path(root).is_dir():
            return pathlib.Path(root)
    raise CompileError(f"the folder kernels_cu was found neither in {here} nor beside it; set GPUACCEL_KERNELS")


def kernel_files() -> "list[pathlib.Path]":
    """Every .cu file of kernels_cu, sorted."""
    return sorted(kernel_root().glob("*.cu"))


def without_comments(source: str) -> str:
    """The same text with comments and string contents blanked, so that line numbers stay."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])
    return re.sub(r"//[^\n]*|/\*.*?\*/|(?<=\")(?:\\.|[^\"\\\n])+(?=\")(?<!C)", blank, source, flags=re.S)


_DECLARATION = re.compile(r"__global__\s+(?:__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s+)?void\s+"
                          r"(?:__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s+)?(\w+)\s*\(([^()]*)\)")


def kernel_names(source: str) -> "list[str]":
    """Names of the `__global__` functions in CUDA C text, in order."""
    return [m[1] for m in _DECLARATION.finditer(without_comments(source))]


def signature(source: str, name: str, defines: "dict[str, str]") -> "list[Param]":
    """The parameters of kernel `name`, macros replaced."""
    text = without_comments(source)
    found = next((m for m in _DECLARATION.finditer(text) if m[1] == name), None)
    if found is None:
        names = ", ".join(kernel_names(source)) or "none"
        raise CompileError(f"there is no kernel {name!r} here; kernels found: {names}")
    macros = {m[1]: m[2].strip() for m in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([\w \t*]+?)[ \t]*$", text, re.M)}
    macros.update({m[2]: m[1].strip() for m in re.finditer(r"\btypedef\s+([\w\s*]+?)\s*\b(\w+)\s*;", text)})
    macros.update(defines)
    return [_param(declared, macros) for declared in found[2].split(",") if declared.strip() not in ("", "void")]


def _param(declared, macros):
    words = re.sub(r"\b(__restrict__|__restrict|restrict|volatile|__grid_constant__)\b", " ", declared)
    *kind, name = re.findall(r"\w+|\*", words)
    for _ in range(8):                                    # macros may name macros
        kind = [w for k in kind for w in re.findall(r"\w+|\*", str(macros.get(k, k)))]
    pointer, base = "*" in kind, " ".join(k for k in kind if k not in ("*", "const", "struct"))
    base = {"unsigned char": base, "long": "long long", "unsigned long": "unsigned long long", "int64_t": "long long",
            "int32_t": "int", "uint32_t": "unsigned", "uint64_t": "unsigned long long", "__nv_bfloat16": "bf16", "half": "fp16",
            "long long int": "long long"}.get(base, base)
    ctype = " ".join(k for k in kind if k != "*") + "*" * kind.count("*")
    vector = re.fullmatch(r"(\w*?[a-z])([234])", base)
    if vector and vector[1] in VECTOR_BASES:
        code, dtypes = SCALARS[VECTOR_BASES[vector[1]]]
        size, lanes = struct.calcsize(code), int(vector[2])
        return Param(name, ctype, pointer, None, dtypes, min(size * lanes, 16) if lanes != 3 else size)
    code, dtypes = SCALARS.get(base, (None, None))
    align = struct.calcsize(code) if code else 2 if base in ("bf16", "fp16") else 1
    if kind.count("*") > 1:                               # a table of pointers is a tensor of addresses
        return Param(name, ctype, True, None, (torch.int64, torch.uint64), 8)
    return Param(name, ctype, pointer, None if pointer else code, dtypes, align)


# ---- the kernel -----------------------------------------------------------------------------------------------------

class Kernel:
    """A kernel of kernels_cu, compiled at its first use and kept.

    file: name of the file without ".cu"; name: the kernel; defines: macros, e.g. GRAD_T="bf16".
    Raises CompileError when the file or the kernel is not there, or (at first use) does not compile."""

    def __init__(self, file: str, name: str, **defines):
        path = kernel_root() / f"{file}.cu"
        if not path.is_file():
            raise CompileError(f"there is no file {path.name} in kernels_cu; files: {', '.join(p.name for p in kernel_files())}")
        self._setup(path.read_text(), name, f"kernels_cu/{path.name}", defines)

    def _setup(self, text, name, filename, defines):
        self.text, self.name, self.filename = text, name, filename
        self.defines = {key: str(value) for key, value in defines.items()}
        common = (kernel_root() / "common.cuh").read_text()
        # One string is the whole program, so that the cache key is honest; #line keeps error messages at home.
        self.source = f'#line 1 "kernels_cu/common.cuh"\n{common}\n#line 1 "{filename}"\n{text}'
        self.params = signature(self.source, name, self.defines)
        self._ready, self._lock = {}, threading.Lock()

    def __repr__(self):
        return f"{self.name}({', '.join(map(str, self.params))})  [{self.filename}]"

    def cubin(self, arch: str) -> bytes:
        """Machine code for one architecture, e.g. "sm_90". No GPU needed."""
        return nvrtc.compile_cubin(self.source, self.filename, arch, self.defines)[0]

    def resources(self, arch: "str | None" = None) -> nvrtc.Resources:
        """Registers, shared memory, stack and spills on one architecture (default: this GPU's, else sm_90)."""
        arch = arch or (backend().arch if backend().name == "cuda" else None) or "sm_90"
        return nvrtc.resources(*nvrtc.compile_cubin(self.source, self.filename, arch, self.defines), self.name, arch)

    def __getitem__(self, shape) -> "Launch":
        """`kernel[grid, block]` or `kernel[grid, block, shared_bytes]`; grid and block are a number or up to three of them."""
        if not isinstance(shape, tuple) or len(shape) not in (2, 3):
            raise ArgumentError(f"{self.name}[...] takes [grid, block] or [grid, block, shared_bytes], got {shape!r}")
        return Launch(self, _dims(self, "grid", shape[0], MAX_GRID), _dims(self, "block", shape[1], MAX_BLOCK),
                      int(shape[2]) if len(shape) == 3 else 0)

    def load(self, index: int) -> "_Loaded":
        """The kernel, compiled and loaded for GPU `index`. Done once per GPU; a launch does it by itself."""
        found = self._ready.get(index)
        if found is None:
            with self._lock:
                found = self._ready[index] = self._ready.get(index) or _Loaded(self, index)
        return found


def compile(source: str, name: "str | None" = None, *, filename: str = "<source>", **defines) -> Kernel:
    """A kernel from a string of CUDA C. name: may be left out when there is only one kernel in it.

    The helpers of kernels_cu/common.cuh (bf16, as_float, ...) are at hand. Compiles at once, so that a mistake shows here:
    raises CompileError with the compiler's own message, line and caret."""
    names = kernel_names(source)
    if name is None:
        if len(names) != 1:
            raise CompileError(f"say which kernel: {filename} has {', '.join(names) or 'none (no __global__ function)'}")
        name = names[0]
    kernel = Kernel.__new__(Kernel)
    kernel._setup(source, name, filename, defines)
    if not re.search(r'extern\s+"C"', source):
        raise CompileError(f'kernel {name} needs extern "C" in front of __global__, so that it can be found by its name')
    kernel.resources()
    return kernel


def _dims(kernel, what, value, limits):
    dims = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value,)
    good = 1 <= len(dims) <= 3 and all(isinstance(d, numbers.Integral) and 1 <= d <= most for d, most in zip(dims, limits))
    if not good:
        raise ArgumentError(f"{kernel.name}: {what} is {value!r}; expected 1 to 3 whole numbers from 1 to {', '.join(map(str, limits))}")
    dims = (*map(int, dims), 1, 1)[:3]
    if what == "block" and dims[0] * dims[1] * dims[2] > 1024:
        raise ArgumentError(f"{kernel.name}: block is {value!r}, {dims[0] * dims[1] * dims[2]} threads; a block has 1024 at most")
    return dims


def zero_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a contiguous tensor with zeros; on a GPU by one device memset on the current stream. Returns it."""
    if not (tensor.is_cuda and backend().name == "cuda" and tensor.is_contiguous()):
        return tensor.zero_()
    from cuda.bindings import driver
    with torch.cuda.device(tensor.device):
        status, = driver.cuMemsetD8Async(tensor.data_ptr(), 0, tensor.numel() * tensor.element_size(),
                                         torch.cuda.current_stream().cuda_stream)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"memset of {tensor.numel()} elements failed: {status.name}")
    return tensor


class _Loaded:
    """A kernel in one GPU's memory, with its argument buffer."""

    def __init__(self, kernel, index):
        nvrtc.check_driver(find_driver()[0])
        from cuda.bindings import driver
        from cuda.core import ObjectCode
        major, minor = torch.cuda.get_device_capability(index)
        torch.cuda.current_stream(index)                   # torch makes the context
        with torch.cuda.device(index):
            self.module = ObjectCode.from_cubin(kernel.cubin(f"sm_{major}{minor}"), name=kernel.name)
            self.handle = self.module.get_kernel(kernel.name)
        self.launch = driver.cuLaunchKernel
        self.function = driver.CUfunction(int(self.handle.handle))
        self.ok = driver.CUresult.CUDA_SUCCESS
        codes, offsets = [], []
        for i, param in enumerate(kernel.params):          # every value starts at a multiple of 8 bytes
            code = "Q" if param.pointer else param.code
            if code is None:
                status, _, size = driver.cuKernelGetParamInfo(self.handle.handle, i)
                if status != self.ok:
                    raise BackendError(f"{kernel.name}: the driver does not tell the size of `{param}` ({status.name})")
                code = f"{int(size)}s"
            codes.append(code + "0q")
            offsets.append(struct.calcsize("@" + "".join(codes[:-1])))
        layout = struct.Struct("@" + "".join(codes))
        self.pack, self.codes = layout.pack_into, codes
        self.buffer = ctypes.create_string_buffer(layout.size + 16)
        start = ctypes.addressof(self.buffer)
        self.pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(start + offset for offset in offsets))
        self.address = ctypes.addressof(self.pointers)
        self.lock = threading.Lock()


class Launch:
    """`kernel[grid, block]`: call it with torch tensors and numbers."""

    __slots__ = ("kernel", "grid", "block", "shared")

    def __init__(self, kernel, grid, block, shared):
        self.kernel, self.grid, self.block, self.shared = kernel, grid, block, shared

    def __call__(self, *args):
        kernel = self.kernel
        if backend().name != "cuda":
            there, why = find_gpu()
            raise BackendError(f"{kernel.name} compiles, but cannot be launched here: " + (backend().reason if there else why))
        device = check_arguments(kernel, args)
        index = torch.cuda.current_device() if device is None else device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self._launch(kernel.load(index), index, args)
        return self._launch(kernel.load(index), index, args)

    def _launch(self, loaded, index, args):
        values = []
        for i, (arg, param) in enumerate(zip(args, self.kernel.params)):
            if param.pointer:
                values.append(0 if arg is None else arg.data_ptr())
            elif param.code is None and len(arg) != (size := int(loaded.codes[i][:-3])):
                raise ArgumentError(f"{self.kernel.name}: parameter `{param}` is {size} bytes, got {len(arg)}")
            else:
                values.append(arg)
        with loaded.lock:                                  # the buffer is shared by all threads of the process
            try:
                loaded.pack(loaded.buffer, 0, *values)
            except struct.error as error:
                raise ArgumentError(f"{self.kernel.name}: a number does not fit its C type: {error}") from None
            status, = loaded.launch(loaded.function, *self.grid, *self.block, self.shared,
                                    torch.cuda.current_stream(index).cuda_stream, loaded.address, 0)
        if status != loaded.ok:
            raise BackendError(f"{self.kernel.name}[{self.grid}, {self.block}, {self.shared}] was not launched: {status.name}")


def check_arguments(kernel: Kernel, args) -> "torch.device | None":
    """Compare arguments with the kernel's parameters; ArgumentError names the parameter, what it got and what it expects.

    Returns the device of the tensors, None when there are none."""
    params, device = kernel.params, None
    if len(args) != len(params):
        raise ArgumentError(f"{kernel.name} takes {len(params)} arguments ({', '.join(map(str, params))}), got {len(args)}")
    for arg, param in zip(args, params):
        if param.pointer:
            if arg is None:
                continue
            if not isinstance(arg, torch.Tensor):
                raise ArgumentError(f"{kernel.name}: parameter `{param}` expects a torch tensor, got {type(arg).__name__}")
            problem = None
            if param.dtypes is not None and arg.dtype not in param.dtypes:
                problem = f"expects dtype {' or '.join(map(str, param.dtypes))}, got {arg.dtype}"
            elif not arg.is_contiguous():
                problem = f"expects a contiguous tensor, got shape {tuple(arg.shape)} with strides {arg.stride()}"
            elif not arg.is_cuda:
                problem = f"expects a tensor on a GPU, got one on {arg.device}"
            elif device is not None and arg.device != device:
                problem = f"is on {arg.device}, the tensors before it on {device}"
            elif arg.data_ptr() % param.align:
                problem = f"expects an address that is a multiple of {param.align} bytes, got one {arg.data_ptr() % param.align} off"
            if problem:
                raise ArgumentError(f"{kernel.name}: parameter `{param}` {problem}")
            device = arg.device
        elif isinstance(arg, torch.Tensor):
            raise ArgumentError(f"{kernel.name}: parameter `{param}` is passed by value and expects a number, got a tensor of shape "
                                f"{tuple(arg.shape)}: pass a Python number, or make the parameter a pointer")
        elif param.code is None:
            if not isinstance(arg, (bytes, bytearray, memoryview)):
                raise ArgumentError(f"{kernel.name}: parameter `{param}` is a struct by value and expects bytes, got {type(arg).__name__}")
        elif not isinstance(arg, numbers.Real) or param.code not in "fd" and not isinstance(arg, numbers.Integral):
            kind = "a number" if param.code in "fd" else "a whole number"
            raise ArgumentError(f"{kernel.name}: parameter `{param}` expects {kind}, got {arg!r}")
    return device
