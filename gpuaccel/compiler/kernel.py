"""A kernel: CUDA C source -> machine code -> something you call on torch tensors.

    >>> k = ga.Kernel("accumulate", "accumulate_v1", GRAD_T="float")       # a file of kernels_cu/, specialised by macros
    >>> k[grid, block](acc, grad, acc.numel())                             # torch's current stream; also while a graph is captured
    >>> double = ga.compile('extern "C" __global__ void twice(float* x, int n) { ... }')
    >>> k.resources("sm_90").registers                                     # compiled, measured: no GPU needed

Each argument is checked against the kernel's own parameter list before anything is launched: count, kind, dtype against the
pointer's type, device, contiguity, alignment (a `float4*` asks for 16 bytes). The module is loaded through cuda.core. The
launch itself calls the driver's `cuLaunchKernel` with packed arguments: `cuda.core.launch` takes no struct by value yet
(cuda-python issue 2343), and costs more time than the rest of a launch. Neither is touched unless a driver was found.
Where the backend is not cuda, the same call runs the same source on CPU tensors (simt/).
"""

import ctypes
import functools
import logging
import numbers
import os
import pathlib
import re
import struct
import threading

import torch

from .. import simt
from ..backends import backend, find_driver
from ..errors import ArgumentError, BackendError, CompileError
from ..source import kernel_names, launch_bound, signature, without_comments
from . import nvrtc

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_SHARED = 232448  # bytes of dynamic shared memory that the largest GPUs give to a block
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has made no CUDA call yet


# ---- sources --------------------------------------------------------------------------------------------------------


@functools.cache
def kernel_root() -> pathlib.Path:
    """The folder of the .cu files: GPUACCEL_KERNELS, the installed package's, or the checkout's."""
    here = pathlib.Path(__file__).parents[1]
    for root in (
        os.environ.get("GPUACCEL_KERNELS"),
        here / "kernels_cu",
        here.parent / "kernels_cu",
    ):
        if root and pathlib.Path(root).is_dir():
            return pathlib.Path(root)
    raise CompileError(
        f"the folder kernels_cu was found neither in {here} nor beside it; set GPUACCEL_KERNELS"
    )


def kernel_files() -> "list[pathlib.Path]":
    """Every .cu file of kernels_cu, sorted."""
    return sorted(kernel_root().glob("*.cu"))


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([\w-]+\.cuh)"', re.M)


def whole_program(text: str, filename: str) -> str:
    """The text that is compiled: common.cuh, then each header of kernels_cu that `text` includes, then `text`.

    `#include "x.cuh"` names a file of kernels_cu. Each header stands once, in front of the text
    that names it, so an #include belongs above all other code. Its line is left empty, and every
    part begins with its own #line: line numbers in messages are those of the files. The cache key
    is made from this text, so an edited header recompiles."""
    parts, included = [], set()

    def add_header(name):
        if name not in included:
            included.add(name)
            add(f"kernels_cu/{name}", (kernel_root() / name).read_text())

    def add(name, text):
        for header in _INCLUDE.findall(text):
            if (kernel_root() / header).is_file():  # else the compiler reports it
                add_header(header)
        text = _INCLUDE.sub(lambda match: "" if match[1] in included else match[0], text)
        parts.append(f'#line 1 "{name}"\n{text}')

    add_header("common.cuh")
    add(filename, text)
    return "\n".join(parts)


# ---- the kernel -----------------------------------------------------------------------------------------------------


class Kernel:
    """A kernel of kernels_cu, compiled at its first use and kept.

    file: name of the file without ".cu"; name: the kernel; options: for NVRTC, e.g. ("-fmad=false",) for the very sums that a
    CPU makes; defines: macros, e.g. GRAD_T="bf16".
    Raises CompileError when the file or the kernel is not there, or (at first use) does not compile."""

    def __init__(self, file: str, name: str, *, options: "tuple[str, ...]" = (), **defines):
        path = kernel_root() / f"{file}.cu"
        if not path.is_file():
            raise CompileError(
                f"there is no file {path.name} in kernels_cu; files: {', '.join(p.name for p in kernel_files())}"
            )
        self._setup(path.read_text(), name, f"kernels_cu/{path.name}", defines, options)

    def _setup(self, text, name, filename, defines, options=(), learner=False):
        self.text, self.name, self.filename = text, name, filename
        self.options, self.learner = tuple(options), learner
        self.defines = {key: str(value) for key, value in defines.items()}
        self.source = whole_program(text, filename)
        # What tests for one architecture's own instructions (wgmma: sm_90a) is compiled for these there; no other GPU runs that code.
        self.own = {
            f"sm_{number}"
            for number in re.findall(
                r"\b__CUDA_ARCH_FEAT_SM(\d+)_ALL\b", without_comments(self.source)
            )
        }
        self.params = signature(self.source, name, self.defines)
        self.bound = launch_bound(self.source, name, self.defines) or 1024
        self.plan = [
            (
                p.pointer,
                p.dtypes,
                p.align,
                {None: (), "f": (int, float), "d": (int, float)}.get(p.code, (int,)),
            )
            for p in self.params
        ]  # what check_arguments looks at, one tuple per parameter
        self._ready, self._launches, self._lock = {}, {}, threading.RLock()

    def __repr__(self):
        return f"{self.name}({', '.join(map(str, self.params))})  [{self.filename}]"

    def __reduce__(self):  # what is compiled is made again where it arrives
        return _again, (
            self.text,
            self.name,
            self.filename,
            self.defines,
            self.options,
            self.learner,
        )

    def __call__(self, *args):
        raise ArgumentError(
            f"a kernel is launched with its grid and block: {self.name}[grid, block](...)"
        )

    def cubin(self, arch: str) -> bytes:
        """Machine code for one architecture, e.g. "sm_90". No GPU needed."""
        return nvrtc.compile_cubin(
            self.source, self.filename, self._target(arch), self.defines, self.options
        )[0]

    def _target(self, arch):
        return f"{arch}a" if arch in self.own else arch

    def resources(self, arch: "str | None" = None) -> nvrtc.Resources:
        """Registers, shared memory, stack and spills on one architecture (default: this GPU's, else sm_90)."""
        arch = self._target(
            arch or (backend().arch if backend().name == "cuda" else None) or "sm_90"
        )
        return nvrtc.resources(
            *nvrtc.compile_cubin(self.source, self.filename, arch, self.defines, self.options),
            self.name,
            arch,
        )

    def __getitem__(self, shape) -> "Launch":
        """`kernel[grid, block]` or `kernel[grid, block, shared_bytes]`; grid and block are a number or up to three of them."""
        try:
            return self._launches[shape]  # the same shape again costs a look-up
        except (KeyError, TypeError):
            pass
        if not isinstance(shape, tuple) or len(shape) not in (2, 3):
            raise ArgumentError(
                f"{self.name}[...] takes [grid, block] or [grid, block, shared_bytes], got {shape!r}"
            )
        shared = shape[2] if len(shape) == 3 else 0
        if not isinstance(shared, numbers.Integral) or not 0 <= shared <= MAX_SHARED:
            raise ArgumentError(
                f"{self.name}: shared_bytes is {shared!r}; expected a whole number of bytes, 0 to {MAX_SHARED:,}"
            )
        launch = Launch(
            self,
            _dims(self, "grid", shape[0], MAX_GRID),
            _dims(self, "block", shape[1], MAX_BLOCK),
            int(shared),
        )
        if len(self._launches) < 1000 and all(isinstance(part, (int, tuple)) for part in shape):
            self._launches[shape] = launch
        return launch

    def load(self, where: "int | str") -> "_Loaded | _OnCpu":
        """The kernel, compiled and loaded for a GPU (its index) or for the CPU ("fast" or "checked"). Done once; a launch does it by
        itself."""
        found = self._ready.get(where)
        if found is None:
            with self._lock:
                found = self._ready[where] = self._ready.get(where) or (
                    _OnCpu if isinstance(where, str) else _Loaded
                )(self, where)
        return found


def compile(
    source: str,
    name: "str | None" = None,
    *,
    filename: str = "<source>",
    options: "tuple[str, ...]" = (),
    **defines,
) -> Kernel:
    """A kernel from a string of CUDA C. name: may be left out when there is only one kernel in it; options: for NVRTC.

    The helpers of kernels_cu/common.cuh (bf16, as_float, ...) are at hand, those of another header
    after `#include "x.cuh"`. Compiles at once, so that a mistake shows here.
    Raises CompileError with the compiler's own message, line and caret."""
    names = kernel_names(source)
    if name is None:
        if len(names) != 1:
            raise CompileError(
                f"say which kernel: {filename} has {', '.join(names) or 'none (no __global__ function)'}"
            )
        name = names[0]
    kernel = _again(source, name, filename, defines, options, True)
    if not re.search(r'extern\s+"C"', without_comments(source)):
        raise CompileError(
            f'kernel {name} needs extern "C" in front of __global__, so that it can be found by its name'
        )
    kernel.resources()
    return kernel


def _again(text, name, filename, defines, options, learner) -> Kernel:
    kernel = Kernel.__new__(Kernel)
    kernel._setup(text, name, filename, defines, options, learner)
    return kernel


def _dims(kernel, what, value, limits):
    dims = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value,)
    good = 1 <= len(dims) <= 3 and all(
        isinstance(d, numbers.Integral) and 1 <= d <= most for d, most in zip(dims, limits)
    )
    if not good:
        raise ArgumentError(
            f"{kernel.name}: {what} is {value!r}; expected 1 to 3 whole numbers from 1 to {', '.join(map(str, limits))}"
        )
    dims = (*map(int, dims), 1, 1)[:3]
    if what == "block" and dims[0] * dims[1] * dims[2] > kernel.bound:
        why = "its __launch_bounds__ allow" if kernel.bound < 1024 else "a block has"
        raise ArgumentError(
            f"{kernel.name}: block is {value!r}, {dims[0] * dims[1] * dims[2]} threads; {why} {kernel.bound} at most"
        )
    return dims


def zero_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a contiguous tensor with zeros; on a GPU by one device memset on the current stream. Returns it."""
    if not (
        tensor.is_cuda and backend().name == "cuda" and tensor.is_contiguous() and tensor.numel()
    ):
        return tensor.zero_()
    from cuda.bindings import driver

    size, stream = (
        tensor.numel() * tensor.element_size(),
        torch.cuda.current_stream(tensor.device).cuda_stream,
    )
    with torch.cuda.device(tensor.device):
        (status,) = driver.cuMemsetD8Async(tensor.data_ptr(), 0, size, stream)
        if status == INVALID_CONTEXT:
            _enter(tensor.device.index)
            (status,) = driver.cuMemsetD8Async(tensor.data_ptr(), 0, size, stream)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"memset of {tensor.numel()} elements failed: {status.name}")
    return tensor


class _Packed:
    """A kernel's arguments as the driver (and the executor on the CPU) takes them: one buffer, and a table of pointers into it.

    sizes: bytes of each parameter that is a struct, by its place."""

    def __init__(self, params, sizes):
        self.params, layout, offsets, self.structs = params, "<", [], sorted(sizes.items())
        for i, param in enumerate(
            params
        ):  # "<" checks ranges; what C aligns, the zeros behind each value do
            code = "Q" if param.pointer else param.code or f"{sizes[i]}s"
            offsets.append(struct.calcsize(layout))  # each starts at a multiple of 8 bytes
            layout += f"{code}{-struct.calcsize('<' + code) % 8}x"
        self.pack = struct.Struct(layout).pack_into
        self.buffer = ctypes.create_string_buffer(struct.calcsize(layout) + 16)
        start = ctypes.addressof(self.buffer)
        self.pointers = (ctypes.c_void_p * max(len(offsets), 1))(
            *(start + offset for offset in offsets)
        )
        self.address = ctypes.addressof(self.pointers)
        self.lock = threading.Lock()  # the buffer is shared by all threads of the process


def _check_structs(kernel, loaded, values):
    for i, size in loaded.structs:
        if len(values[i]) != size:
            raise ArgumentError(
                f"{kernel.name}: parameter `{kernel.params[i]}` is {size} bytes, got {len(values[i])}"
            )


class _Loaded(_Packed):
    """A kernel in one GPU's memory."""

    def __init__(self, kernel, index):
        nvrtc.check_driver(find_driver()[0])
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        major, minor = torch.cuda.get_device_capability(index)
        with torch.cuda.device(index):
            torch.cuda.current_stream()  # torch makes the context
            _enter(index)
            self.module = ObjectCode.from_cubin(
                kernel.cubin(f"sm_{major}{minor}"), name=kernel.name
            )
            handle = self.module.get_kernel(kernel.name).handle
            if "extern __shared__" in kernel.source:
                _allow_shared(kernel, handle, index)
        self.function, self.launch = driver.CUfunction(int(handle)), driver.cuLaunchKernel
        sizes = {}
        for i, param in enumerate(kernel.params):
            if not param.pointer and param.code is None:  # a struct: the driver knows its size
                status, _, size = driver.cuKernelGetParamInfo(handle, i)
                if status != driver.CUresult.CUDA_SUCCESS:
                    raise BackendError(
                        f"{kernel.name}: the driver does not tell the size of `{param}` ({status.name})"
                    )
                sizes[i] = int(size)
        super().__init__(kernel.params, sizes)


def _allow_shared(kernel, handle, index):
    """Let a kernel be launched with all the shared memory that a block can have on this GPU: without asking, a launch gets 48 KiB at most."""
    from cuda.bindings import driver

    limit, kind = (
        driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        driver.CUfunction_attribute,
    )
    failed, most = driver.cuDeviceGetAttribute(limit, index)
    unknown, own = driver.cuKernelGetAttribute(
        kind.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle, index
    )
    (refused,) = driver.cuKernelSetAttribute(
        kind.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most - own, handle, index
    )
    for status in (failed, unknown, refused):
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(
                f"{kernel.name}: the driver did not allow {most:,} bytes of shared memory: {status.name}"
            )


class _OnCpu(_Packed):
    """A kernel as the host compiler made it. mode: "fast" or "checked"."""

    def __init__(self, kernel, mode):
        from ..simt import build

        self.program = build.program(
            kernel.source,
            kernel.filename,
            kernel_names(kernel.text),
            kernel.defines,
            mode == "checked",
        )
        found = self.program.parameters(kernel.name)
        for (letter, size), param in zip(found, kernel.params):
            if (letter == "p") != param.pointer or (
                param.code and struct.calcsize("<" + param.code) != size
            ):
                raise CompileError(
                    f"{kernel.name}: parameter `{param}` is {size} bytes to the host compiler, which was not expected"
                )
        super().__init__(
            kernel.params, {i: size for i, (letter, size) in enumerate(found) if letter == "s"}
        )


_decided: "dict[tuple, bool]" = {}  # (device, how, kernels) -> do they run there?


def usable(device: torch.device, *kernels: Kernel) -> bool:
    """Do all of an operation's kernels compile and load on this device? Tried before its first launch: nothing is half done, the answer stays.

    If one does not, the operation runs in torch instead, and one line of the log (logger "gpuaccel") says why. With the policy `require` the
    error is raised."""
    how = (
        device.index
        if device.type == "cuda"
        else "checked"
        if any(simt.is_checked(k.learner) for k in kernels)
        else "fast"
    )
    key = device.type, how, *kernels
    if key not in _decided:
        try:
            for kernel in kernels:
                kernel.load(how)
            _decided[key] = True
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of ours, of the driver, of cuda.core
            if backend().policy == "require":
                raise
            why = str(error).partition("\n")[0]
            logging.getLogger("gpuaccel").warning(
                "%s runs in torch on %s from now on: %s", kernels[0].filename, device, why
            )
            _decided[key] = False
    return _decided[key]


recorders: list = []  # called with (launch, args, tensors) before each launch on the CPU: graphs/tape.py


class Launch:
    """`kernel[grid, block]`: call it with torch tensors and numbers."""

    __slots__ = ("kernel", "shape")

    def __init__(self, kernel, grid, block, shared):
        self.kernel, self.shape = kernel, (*grid, *block, shared)

    def __call__(self, *args, tensors=()):
        """Launch. tensors: those whose addresses stand in a struct or a table of pointers; the checks on the CPU want to know them."""
        kernel = self.kernel
        if backend().name != "cuda":
            return self.on_cpu(args, tensors)
        index, values = check_arguments(kernel, args)
        current = torch._C._cuda_getDevice() if index is not None else torch.cuda.current_device()
        if index is not None and index != current:
            with torch.cuda.device(index):
                return self(*args)
        loaded = kernel._ready.get(current) or kernel.load(current)
        if loaded.structs:
            _check_structs(kernel, loaded, values)
        stream = torch._C._cuda_getCurrentRawStream(current)
        with loaded.lock:
            try:
                loaded.pack(loaded.buffer, 0, *values)
            except (struct.error, OverflowError):
                raise _misfit(kernel, values) from None
            (status,) = loaded.launch(loaded.function, *self.shape, stream, loaded.address, 0)
            if status == INVALID_CONTEXT:
                _enter(current)
                (status,) = loaded.launch(loaded.function, *self.shape, stream, loaded.address, 0)
        if status:
            raise BackendError(
                f"{kernel.name}[{self.shape[:3]}, {self.shape[3:6]}, {self.shape[6]}] was not launched: {status.name}"
            )

    def on_cpu(self, args, tensors=(), trace=False):
        """The same launch on the CPU (simt), on CPU tensors; done when it returns. `trace`: see simt.trace."""
        kernel = self.kernel
        _, values = check_arguments(kernel, args, "cpu")
        checked = trace or simt.is_checked(kernel.learner)
        loaded = kernel.load("checked" if checked else "fast")
        _check_structs(kernel, loaded, values)

        def pack(values):
            try:
                loaded.pack(loaded.buffer, 0, *values)
            except (struct.error, OverflowError):
                raise _misfit(kernel, values) from None
            return loaded.address

        for note in recorders:
            note(self, args, tensors)
        with loaded.lock:
            if not checked:
                return simt.driver.run_fast(loaded.program, kernel.name, self.shape, pack(values))
            from ..simt.checking import record, run

            how = (
                loaded.program,
                kernel.name,
                self.shape,
                kernel.params,
                args,
                values,
                tensors,
                pack,
            )
            return record(*how, kernel.text, kernel.filename) if trace else run(*how)


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
            return ArgumentError(
                f"{kernel.name}: parameter `{param}` cannot hold {value!r}: {error}"
            )
    return ArgumentError(f"{kernel.name}: a number does not fit its C type: {values}")


def check_arguments(kernel: Kernel, args, device: str = "cuda") -> "tuple[int | None, list]":
    """Compare arguments with the kernel's parameters; ArgumentError names the parameter, what it got and what it expects.

    device: where tensors have to be, "cuda" or "cpu". Returns the index of their GPU (None without tensors, -1 on the CPU) and the
    values to pack."""
    params, index, values, gpu = kernel.params, None, [], device == "cuda"
    if len(args) != len(params):
        raise ArgumentError(
            f"{kernel.name} takes {len(params)} arguments ({', '.join(map(str, params))}), got {len(args)}"
        )
    for arg, (pointer, dtypes, align, kinds) in zip(
        args, kernel.plan
    ):  # every launch pays for each word of this loop
        if pointer:
            if (
                isinstance(arg, _TENSOR)
                and (dtypes is None or arg.dtype in dtypes)
                and arg.layout is _STRIDED
                and arg.is_contiguous()
            ):
                on, address = arg.get_device(), arg.data_ptr()
                if (
                    (on >= 0 if gpu else arg.is_cpu)
                    and (index is None or on == index)
                    and not address % align
                ):
                    index = on
                    values.append(address)
                    continue
        elif type(arg) in kinds:  # a number of the usual kind
            values.append(arg)
            continue
        values.append(_slowly(kernel, params[len(values)], arg, index, gpu))
    return index, values


_TENSOR, _STRIDED = torch.Tensor, torch.strided


def _slowly(kernel, param, arg, index, gpu):
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
            raise error(
                f"expects a contiguous tensor, got shape {tuple(arg.shape)} with strides {arg.stride()}"
            )
        if gpu and not arg.is_cuda:
            raise error(f"expects a tensor on a GPU, got one on {arg.device}")
        if not gpu and arg.device.type != "cpu":
            raise error(f"expects a tensor on the CPU ({backend()}), got one on {arg.device}")
        if index is not None and arg.get_device() != index:
            raise error(f"is on {arg.device}, the tensors before it on cuda:{index}")
        raise error(
            f"expects an address that is a multiple of {param.align} bytes, got one {arg.data_ptr() % param.align} off"
        )
    if isinstance(arg, torch.Tensor):
        raise error(
            f"is passed by value and expects a number, got a tensor of shape {tuple(arg.shape)}: "
            "pass a Python number, or make the parameter a pointer"
        )
    if param.code is None:
        if isinstance(arg, ctypes.Structure):
            return bytes(arg)
        if not isinstance(arg, (bytes, bytearray)):
            raise error(f"is a struct by value and expects bytes, got {type(arg).__name__}")
    elif not isinstance(arg, numbers.Real if param.code in "fd" else numbers.Integral):
        raise error(
            f"expects {'a number' if param.code in 'fd' else 'a whole number'}, got {arg!r}"
        )
    return arg
