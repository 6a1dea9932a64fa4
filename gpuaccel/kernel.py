"""A kernel: CUDA C source -> machine code -> something you call on torch tensors.

    >>> k = ga.Kernel("accumulate", "accumulate_v1", GRAD_T="float")       # a file of kernels_cu/, specialised by macros
    >>> k[grid, block](acc, grad, acc.numel())                             # torch's current stream; also while a graph is captured
    >>> double = ga.compile('extern "C" __global__ void twice(float* x, int n) { ... }')
    >>> k.resources("sm_90").registers                                     # compiled, measured: no GPU needed

Each argument is checked against the kernel's own parameter list before anything is launched: count, kind, dtype against the
pointer's type, device, contiguity, alignment (a `float4*` asks for 16 bytes). The module is loaded through cuda.core. The
launch itself calls the driver's `cuLaunchKernel` with packed arguments: `cuda.core.launch` takes no struct by value yet
(cuda-python issue 2343), and costs more time than the rest of a launch. Neither is touched unless a driver was found.
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
INVALID_CONTEXT = 201          # CUDA_ERROR_INVALID_CONTEXT: this thread has made no CUDA call yet
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
    """The same text with comments and the contents of strings (not of "C") blanked, so that line numbers stay."""
    def blank(match):
        inside = re.sub(r"[^\n]", " ", match[0])
        return match[0] if match[0] == '"C"' else inside if match[0][0] == "/" else match[0][0] + inside[2:] + match[0][-1]
    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\[^'\n]{1,4}|\\'|[^'\\\n])'", blank, source, flags=re.S)


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
    words = re.sub(r"^(.*?)(\w+)\s*\[[^\]]*\]\s*$", r"\1 * \2", words, flags=re.S)      # `float x[]` is a pointer
    *kind, name = re.findall(r"\w+|\*", words)
    for _ in range(8):                                    # macros may name macros
        kind = [w for k in kind for w in re.findall(r"\w+|\*", str(macros.get(k, k)))]
    pointer, base = "*" in kind, " ".join(k for k in kind if k not in ("*", "const", "struct"))
    base = {"unsigned char": base, "long": "long long", "unsigned long": "unsigned long long", "int64_t": "long long",
            "int32_t": "int", "uint32_t": "unsigned", "uint64_t": "unsigned long long", "__nv_bfloat16": "bf16", "half": "fp16",
            "long long int": "long long", "long int": "long long", "short int": "short", "signed": "int", "signed int": "int",
            "unsigned short int": "unsigned short", "unsigned long int": "unsigned long long",
            "unsigned long long int": "unsigned long long"}.get(base, base)
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
        self.plan = [(p.pointer, p.dtypes, p.align, {None: (), "f": (int, float), "d": (int, float)}.get(p.code, (int,)))
                     for p in self.params]                 # what check_arguments looks at, one tuple per parameter
        self._ready, self._launches, self._lock = {}, {}, threading.Lock()

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
        try:
            return self._launches[shape]                   # the same shape again costs a look-up
        except (KeyError, TypeError):
            pass
        if not isinstance(shape, tuple) or len(shape) not in (2, 3):
            raise ArgumentError(f"{self.name}[...] takes [grid, block] or [grid, block, shared_bytes], got {shape!r}")
        shared = shape[2] if len(shape) == 3 else 0
        if not isinstance(shared, numbers.Integral) or not 0 <= shared < 2**31:
            raise ArgumentError(f"{self.name}: shared_bytes is {shared!r}; expected a whole number of bytes, 0 or more")
        launch = Launch(self, _dims(self, "grid", shape[0], MAX_GRID), _dims(self, "block", shape[1], MAX_BLOCK), int(shared))
        if len(self._launches) < 1000 and all(isinstance(part, (int, tuple)) for part in shape):
            self._launches[shape] = launch
        return launch

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
    if not re.search(r'extern\s+"C"', without_comments(source)):
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
    if not (tensor.is_cuda and backend().name == "cuda" and tensor.is_contiguous() and tensor.numel()):
        return tensor.zero_()
    from cuda.bindings import driver
    size, stream = tensor.numel() * tensor.element_size(), torch.cuda.current_stream(tensor.device).cuda_stream
    with torch.cuda.device(tensor.device):
        status, = driver.cuMemsetD8Async(tensor.data_ptr(), 0, size, stream)
        if status == INVALID_CONTEXT:
            _enter(tensor.device.index)
            status, = driver.cuMemsetD8Async(tensor.data_ptr(), 0, size, stream)
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
        with torch.cuda.device(index):
            torch.cuda.current_stream()                    # torch makes the context
            _enter(index)
            self.module = ObjectCode.from_cubin(kernel.cubin(f"sm_{major}{minor}"), name=kernel.name)
            handle = self.module.get_kernel(kernel.name).handle
        self.function, self.launch = driver.CUfunction(int(handle)), driver.cuLaunchKernel
        layout, offsets, self.structs = "<", [], []        # "<" checks ranges; what C aligns, the zeros behind each value do
        for i, param in enumerate(kernel.params):          # each starts at a multiple of 8 bytes
            code = "Q" if param.pointer else param.code
            if code is None:                               # a struct: the driver knows its size
                status, _, size = driver.cuKernelGetParamInfo(handle, i)
                if status != driver.CUresult.CUDA_SUCCESS:
                    raise BackendError(f"{kernel.name}: the driver does not tell the size of `{param}` ({status.name})")
                code = f"{int(size)}s"
                self.structs.append((i, int(size)))
            offsets.append(struct.calcsize(layout))
            layout += f"{code}{-struct.calcsize('<' + code) % 8}x"
        self.pack = struct.Struct(layout).pack_into
        self.buffer = ctypes.create_string_buffer(struct.calcsize(layout) + 16)
        start = ctypes.addressof(self.buffer)
        self.pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(start + offset for offset in offsets))
        self.address = ctypes.addressof(self.pointers)
        self.lock = threading.Lock()


class Launch:
    """`kernel[grid, block]`: call it with torch tensors and numbers."""

    __slots__ = ("kernel", "shape")

    def __init__(self, kernel, grid, block, shared):
        self.kernel, self.shape = kernel, (*grid, *block, shared)

    def __call__(self, *args):
        kernel = self.kernel
        if backend().name != "cuda":
            there, why = find_gpu()
            raise BackendError(f"{kernel.name} compiles, but cannot be launched here: " + (backend().reason if there else why))
        index, values = check_arguments(kernel, args)
        current = torch.cuda.current_device()
        if index is not None and index != current:
            with torch.cuda.device(index):
                return self(*args)
        loaded = kernel._ready.get(current) or kernel.load(current)
        for i, size in loaded.structs:
            if len(values[i]) != size:
                raise ArgumentError(f"{kernel.name}: parameter `{kernel.params[i]}` is {size} bytes, got {len(values[i])}")
        stream = torch._C._cuda_getCurrentRawStream(current)
        with loaded.lock:                                  # the buffer is shared by all threads of the process
            try:
                loaded.pack(loaded.buffer, 0, *values)
            except (struct.error, OverflowError):
                raise _misfit(kernel, values) from None
            status, = loaded.launch(loaded.function, *self.shape, stream, loaded.address, 0)
            if status == INVALID_CONTEXT:
                _enter(current)
                status, = loaded.launch(loaded.function, *self.shape, stream, loaded.address, 0)
        if status:
            raise BackendError(f"{kernel.name}[{self.shape[:3]}, {self.shape[3:6]}, {self.shape[6]}] was not launched: {status.name}")


def _enter(index):
    """Make a GPU's primary context, the one torch works in, current in this thread: a fresh thread has none."""
    from cuda.bindings import driver
    _, context = driver.cuDevicePrimaryCtxRetain(index)
    driver.cuCtxSetCurrent(context)


def _misfit(kernel, values) -> ArgumentError:
    """The error for the first number that its parameter's C type cannot hold."""
    for value, param in zip(values, kernel.params):
        try:
            struct.pack("<" + (param.code or "0s"), *([value] if param.code else [b""]))
        except (struct.error, OverflowError) as error:
            return ArgumentError(f"{kernel.name}: parameter `{param}` cannot hold {value!r}: {error}")
    return ArgumentError(f"{kernel.name}: a number does not fit its C type: {values}")


def check_arguments(kernel: Kernel, args) -> "tuple[int | None, list]":
    """Compare arguments with the kernel's parameters; ArgumentError names the parameter, what it got and what it expects.

    Returns the index of the tensors' GPU (None when there are no tensors) and the values to pack."""
    params, index, values = kernel.params, None, []
    if len(args) != len(params):
        raise ArgumentError(f"{kernel.name} takes {len(params)} arguments ({', '.join(map(str, params))}), got {len(args)}")
    for arg, (pointer, dtypes, align, kinds), param in zip(args, kernel.plan, params):
        if type(arg) in kinds:                             # a number of the usual kind
            values.append(arg)
            continue
        if pointer and isinstance(arg, torch.Tensor) and (dtypes is None or arg.dtype in dtypes) and arg.layout is torch.strided:
            on, address = arg.get_device(), arg.data_ptr()
            if on >= 0 and (index is None or on == index) and address % align == 0 and arg.is_contiguous():
                index = on
                values.append(address)
                continue
        values.append(_slowly(kernel, param, arg, index))
    return index, values


def _slowly(kernel, param, arg, index):
    """The value to pack for an argument that is not of the usual kind, or the error that says what is wrong with it."""
    def error(problem):
        return ArgumentError(f"{kernel.name}: parameter `{param}` {problem}")
    if param.pointer:
        if arg is None:
            return 0
        if not isinstance(arg, torch.Tensor):
            raise error(f"expects a torch tensor, got {type(arg).__name__}")
        if arg.layout != torch.strided:
            raise error(f"expects a dense tensor, got {arg.layout}")
        if param.dtypes is not None and arg.dtype not in param.dtypes:
            raise error(f"expects dtype {' or '.join(map(str, param.dtypes))}, got {arg.dtype}")
        if not arg.is_contiguous():
            raise error(f"expects a contiguous tensor, got shape {tuple(arg.shape)} with strides {arg.stride()}")
        if not arg.is_cuda:
            raise error(f"expects a tensor on a GPU, got one on {arg.device}")
        if index is not None and arg.get_device() != index:
            raise error(f"is on {arg.device}, the tensors before it on cuda:{index}")
        raise error(f"expects an address that is a multiple of {param.align} bytes, got one {arg.data_ptr() % param.align} off")
    if isinstance(arg, torch.Tensor):
        raise error(f"is passed by value and expects a number, got a tensor of shape {tuple(arg.shape)}: "
                    "pass a Python number, or make the parameter a pointer")
    if param.code is None:
        if not isinstance(arg, (bytes, bytearray)):
            raise error(f"is a struct by value and expects bytes, got {type(arg).__name__}")
    elif not isinstance(arg, numbers.Real if param.code in "fd" else numbers.Integral):
        raise error(f"expects {'a number' if param.code in 'fd' else 'a whole number'}, got {arg!r}")
    return arg
