"""A launch: arguments are checked, packed, and handed to the driver or to the CPU's executor.

Each argument is compared with the kernel's parameter list before the launch: number, kind, dtype,
device, contiguity and alignment (a `float4*` needs 16 bytes). A launch may be captured in a CUDA
graph.

The module is loaded through cuda.core. The launch calls the driver's `cuLaunchKernel` with packed
arguments, because `cuda.core.launch` takes no struct by value yet (cuda-python issue 2343) and
takes longer than the rest of a launch. Neither is imported unless there is a driver.

Where the backend is not cuda, the same call runs the same source on CPU tensors (simt/).
"""

import contextlib
import ctypes
import math
import numbers
import re
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import simt
from ..backends import backend, find_driver
from ..errors import ArgumentError, BackendError, CompileError
from ..source import Param, kernel_names, overloaded_names
from . import nvrtc

if TYPE_CHECKING:
    from .kernel import Kernel

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
# Bytes of dynamic shared memory that a block can have on the largest GPUs.
MAX_SHARED = 232448
# CUDA_ERROR_INVALID_CONTEXT: this thread has made no CUDA call yet.
INVALID_CONTEXT = 201
# Bytes that the address of a struct by value is a multiple of: enough for a float4 and for what
# alignas(128) asks for.
STRUCT_ALIGNMENT = 128
# What tensors= takes: any tensor with memory, in any order.
ANY = Param("tensors", "void*", True, None, None, 1)
# Functions of (launch, args, tensors) that are called before each launch on the CPU
# (graphs/tape.py).
recorders: list = []


class Launch:
    """`kernel[grid, block]`: call it with torch tensors and numbers.

    On a GPU the launch is queued on torch's current stream, and nothing waits; on the CPU it is
    over when the call returns.

    Args:
        kernel: the Kernel.
        shape: grid and block, each a number or up to three of them, and bytes of dynamic shared
            memory (default 0).

    Raises:
        ArgumentError: for another number of parts, and for sizes that no GPU has.
    """

    __slots__ = ("kernel", "shape")

    def __init__(self, kernel: "Kernel", shape):
        if not isinstance(shape, tuple) or len(shape) not in (2, 3):
            raise ArgumentError(
                f"{kernel.name}[...] takes [grid, block] or [grid, block, shared_bytes], "
                f"got {shape!r}"
            )
        shared = shape[2] if len(shape) == 3 else 0
        if not isinstance(shared, numbers.Integral) or not 0 <= int(shared) <= MAX_SHARED:
            raise ArgumentError(
                f"{kernel.name}: shared_bytes is {shared!r}; expected a whole number of bytes, "
                f"0 to {MAX_SHARED:,}"
            )
        grid = _dims(kernel, "grid", shape[0], MAX_GRID)
        block = _dims(kernel, "block", shape[1], MAX_BLOCK)
        self.kernel = kernel
        self.shape = (*grid, *block, int(shared))

    def __call__(self, *args, tensors=()):
        """Launch the kernel.

        Args:
            *args: for a pointer a contiguous tensor of its dtype, or None, the null pointer; for a
                number a Python number that its C type can hold; for a struct bytes or a ctypes
                structure. Nothing is converted.
            tensors: an iterable of those whose addresses are in a struct or a table of pointers,
                for the checks on the CPU.

        Raises:
            ArgumentError: with nothing launched, for another number, kind, dtype, device or
                alignment of the arguments than the kernel's parameters have.
            BackendError: where the driver refuses the launch.
            KernelError: on the CPU with the checks on, for a mistake of the kernel; no tensor has
                changed.
        """
        kernel = self.kernel
        if kernel.constants:
            kernel.variables.warn_unset(kernel.name, kernel.constants)
            kernel.constants = ()
        if backend().name != "cuda":
            return self.on_cpu(args, tensors)
        try:
            index, values = kernel.usual_values(*args)
        # None, or an argument without an address.
        except (TypeError, AttributeError, RuntimeError):
            index, values = check_arguments(kernel, args)
        if index is None:
            current = torch.cuda.current_device()
        else:
            current = torch._C._cuda_getDevice()
            if index != current:
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
                # It names the number that is out of its type's range.
                check_arguments(kernel, args)
                raise
            (status,) = loaded.launch(loaded.function, *self.shape, stream, loaded.address, 0)
            if status == INVALID_CONTEXT:
                _enter(current)
                (status,) = loaded.launch(loaded.function, *self.shape, stream, loaded.address, 0)
        if status:
            raise BackendError(
                f"{kernel.name}[{self.shape[:3]}, {self.shape[3:6]}, {self.shape[6]}] was not "
                f"launched: {status.name}"
            )

    def on_cpu(self, args, tensors=(), trace=False):
        """Launch on the CPU (simt), with CPU tensors, and wait.

        Args:
            args: as for a call.
            tensors: as for a call.
            trace: record every access, and change no tensor.

        Returns:
            A simt.Trace with trace=True, else None.

        Raises:
            ArgumentError: as for a call.
            KernelError: as for a call.
        """
        kernel, tensors = self.kernel, [*tensors]
        _, values = check_arguments(kernel, args, "cpu")
        for i, tensor in enumerate(tensors):
            if tensor is not None and (problem := _pointer_problem(ANY, tensor, None, gpu=False)):
                raise ArgumentError(f"{kernel.name}: tensors[{i}] {problem}")
        args = (*args, *values[len(args) :])
        checked = trace or simt.is_checked(kernel.learner)
        loaded = kernel.load("checked" if checked else "fast")
        _check_structs(kernel, loaded, values)

        for recorder in recorders:
            recorder(self, args, tensors)
        variables = contextlib.nullcontext()
        if kernel.variables:
            variables = kernel.variables.within(loaded.program, keep=not trace)
        with loaded.lock, variables:
            if not checked:
                simt.driver.run_fast(loaded.program, kernel.name, self.shape, loaded.packed(values))
                return None
            from ..simt import checking

            program, shape = loaded.program, self.shape
            facts = program, kernel.name, shape, kernel.params, args, values, tensors
            call = checking.Call(*facts, loaded.packed)
            if trace:
                return checking.record(call, kernel.text, kernel.filename)
            checking.run(call)


def _dims(kernel, what, value, limits):
    """Three numbers for a grid or block; ArgumentError for an invalid one."""
    dims = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value,)
    is_valid = 1 <= len(dims) <= 3 and all(
        isinstance(d, numbers.Integral) and 1 <= d <= limit for d, limit in zip(dims, limits)
    )
    if not is_valid:
        raise ArgumentError(
            f"{kernel.name}: {what} is {value!r}; expected 1 to 3 whole numbers from 1 to "
            f"{', '.join(map(str, limits))}"
        )
    dims = (*map(int, dims), 1, 1)[:3]
    threads = math.prod(dims)
    if what == "block" and threads > kernel.bound:
        reason = "its __launch_bounds__ allow" if kernel.bound < 1024 else "a block has"
        raise ArgumentError(
            f"{kernel.name}: block is {value!r}, {threads} threads; {reason} {kernel.bound} at most"
        )
    return dims


def check_arguments(kernel: "Kernel", args, device: str = "cuda") -> tuple[int | None, list]:
    """(index of the tensors' GPU, values to pack) of a launch where tensors are on `device`.

    The index is None without tensors, and -1 on the CPU.

    Raises:
        ArgumentError: with the parameter, the argument and what is expected.
    """
    params = kernel.params
    if len(args) != len(params):
        missing = params[len(args) :]
        if len(args) > len(params) or any(param.default is None for param in missing):
            raise ArgumentError(
                f"{kernel.name} takes {len(params)} arguments ({', '.join(map(str, params))}), "
                f"got {len(args)}"
            )
        args = (*args, *(param.default for param in missing))
    index = None
    values = []
    for param, arg in zip(params, args):
        if not param.pointer:
            problem = _value_problem(param, arg)
            values.append(bytes(arg) if isinstance(arg, ctypes.Structure) else arg)
        elif arg is None:
            problem = None
            values.append(0)
        else:
            problem = _pointer_problem(param, arg, index, device == "cuda")
            if not problem:
                index = arg.get_device()
                values.append(arg.data_ptr())
        if problem:
            raise ArgumentError(f"{kernel.name}: parameter `{param}` {problem}")
    return index, values


def _value_problem(param, arg) -> str | None:
    if isinstance(arg, torch.Tensor):
        return (
            f"is passed by value and expects a number, got a tensor of shape {tuple(arg.shape)}: "
            "pass a Python number, or make the parameter a pointer"
        )
    if param.code is None:
        is_right = isinstance(arg, (bytes, bytearray, ctypes.Structure))
        return (
            None
            if is_right
            else f"is a struct by value and expects bytes, got {type(arg).__name__}"
        )
    is_real = param.code in "efd"
    if not isinstance(arg, numbers.Real if is_real else numbers.Integral):
        return f"expects a {'' if is_real else 'whole '}number, got {arg!r}"
    try:
        # "<" checks the range.
        struct.pack("<" + param.code, arg)
    except (struct.error, OverflowError) as error:
        return f"cannot hold {arg!r}: {error}"
    return None


def _pointer_problem(param, arg, index, gpu) -> str | None:
    if not isinstance(arg, torch.Tensor):
        return f"expects a torch tensor, got {type(arg).__name__}"
    if arg.layout != torch.strided:
        return f"expects a dense tensor, got {arg.layout}"
    if param.dtypes is not None and arg.dtype not in param.dtypes:
        return f"expects dtype {' or '.join(map(str, param.dtypes))}, got {arg.dtype}"
    if param is not ANY and not arg.is_contiguous():
        shape = tuple(arg.shape)
        return f"expects a contiguous tensor, got shape {shape} with strides {arg.stride()}"
    if gpu and not arg.is_cuda:
        return f"expects a tensor on a GPU, got one on {arg.device}"
    if not gpu and arg.device.type != "cpu":
        return f"expects a tensor on the CPU ({backend()}), got one on {arg.device}"
    if index is not None and arg.get_device() != index:
        return f"is on {arg.device}, the tensors before it on cuda:{index}"
    if not arg.data_ptr() and arg.numel():
        return f"expects a tensor with memory, got {arg.numel():,} elements in a storage of 0 bytes"
    if beyond := arg.data_ptr() % param.align:
        return f"expects an address that is a multiple of {param.align} bytes, got one {beyond} off"
    return None


def usual_values(params: list[Param], device: str) -> Callable[..., tuple | None]:
    """A function that is check_arguments() for arguments of the usual kinds only.

    Its code is generated for one parameter list, without a loop, which would take half of the
    host's time of a launch. It returns what check_arguments() returns. For other arguments it
    returns None or raises, and check_arguments() decides.

    Args:
        params: of the kernel.
        device: "cuda" or "cpu", where tensors have to be.
    """
    names = [f"argument{i}" for i in range(len(params))]
    pointers = [name for name, param in zip(names, params) if param.pointer]
    values, tests = [], []
    known: dict[str, Any] = {}
    for name, param in zip(names, params):
        if not param.pointer:
            values.append(name)
            # Of a struct the size is compared later.
            number_types = (int, float) if param.code and param.code in "efd" else (int,)
            known[f"{name}_types"] = number_types if param.code else (bytes,)
            tests.append(f"type({name}) in {name}_types")
            continue
        values.append(f"{name}_address")
        if param.dtypes is not None:
            known[f"{name}_dtypes"] = param.dtypes
            tests.append(f"{name}.dtype in {name}_dtypes")
        tests += [f"{name}.is_contiguous()", f"not {name}_address % {param.align}"]
        tests.append(f"({name}_address or not {name}.numel())")
        same = f"{name}.get_device() == index"
        tests.append(same if device == "cuda" else f"{name}.is_cpu")
    lines = [f"def check({', '.join(names)}):"]
    lines += [f"    {name}_address = {name}.data_ptr()" for name in pointers]
    lines.append(f"    index = {pointers[0]}.get_device()" if pointers else "    index = None")
    if pointers and device == "cuda":
        tests.append("index >= 0")
    lines.append(f"    if {' and '.join(tests) or True}:")
    lines.append(f"        return index, [{', '.join(values)}]")
    exec("\n".join(lines), known)
    return known["check"]


class _Packed:
    """A kernel's arguments as the driver and the CPU executor take them.

    They are one buffer and a table of pointers into it.

    Args:
        sizes: bytes of each parameter that is a struct, by its index
    """

    def __init__(self, params, sizes):
        self.params = params
        self.structs = sorted(sizes.items())
        # "<" checks the ranges of numbers. The zeros before each value align it.
        layout = "<"
        offsets = []
        for i, param in enumerate(params):
            code = "Q" if param.pointer else param.code or f"{sizes[i]}s"
            align = STRUCT_ALIGNMENT if i in sizes else 8
            layout += f"{-struct.calcsize(layout) % align}x"
            offsets.append(struct.calcsize(layout))
            layout += code
        self.pack = struct.Struct(layout).pack_into
        size = struct.calcsize(layout) + 16
        memory = ctypes.create_string_buffer(size + STRUCT_ALIGNMENT)
        before = -ctypes.addressof(memory) % STRUCT_ALIGNMENT
        self.buffer = (ctypes.c_char * size).from_buffer(memory, before)
        start = ctypes.addressof(self.buffer)
        addresses = (start + offset for offset in offsets)
        self.pointers = (ctypes.c_void_p * max(len(offsets), 1))(*addresses)
        self.address = ctypes.addressof(self.pointers)
        # All threads of the process share the buffer.
        self.lock = threading.Lock()

    def packed(self, values) -> int:
        """The address of the table, with these values in the buffer."""
        self.pack(self.buffer, 0, *values)
        return self.address


def _check_structs(kernel, loaded, values):
    for i, size in loaded.structs:
        if len(values[i]) != size:
            raise ArgumentError(
                f"{kernel.name}: parameter `{kernel.params[i]}` is {size} bytes, "
                f"got {len(values[i])}"
            )


def load_kernel(kernel: "Kernel", where: int | str) -> "_OnGpu | _OnCpu":
    """The kernel in the memory of a GPU (its index), or of this process ("fast", "checked")."""
    return _OnCpu(kernel, where) if isinstance(where, str) else _OnGpu(kernel, where)


class _OnGpu(_Packed):
    """A kernel in the memory of one GPU."""

    def __init__(self, kernel, index):
        nvrtc.check_driver(find_driver()[0])
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        major, minor = torch.cuda.get_device_capability(index)
        with torch.cuda.device(index):
            # torch makes the context.
            torch.cuda.current_stream()
            _enter(index)
            cubin, _, symbol, self.symbols = kernel._compile(kernel._target(f"sm_{major}{minor}"))
            # Kernels of a text share its variables.
            modules = kernel.variables.modules
            if index not in modules:
                modules[index] = ObjectCode.from_cubin(cubin, name=kernel.name)
            self.module = modules[index]
            handle = self.module.get_kernel(symbol).handle
            if re.search(r"\bextern\b[^;{}()]*__shared__", kernel.source):
                _allow_shared(kernel, handle, index)
        self.function = driver.CUfunction(int(handle))
        self.launch = driver.cuLaunchKernel
        sizes = {}
        for i, param in enumerate(kernel.params):
            if param.pointer or param.code is not None:
                continue
            # A struct: the driver knows its size.
            status, _, size = driver.cuKernelGetParamInfo(handle, i)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise BackendError(
                    f"{kernel.name}: the driver does not tell the size of `{param}` ({status.name})"
                )
            sizes[i] = int(size)
        super().__init__(kernel.params, sizes)


def _enter(index):
    """Make a GPU's primary context, which torch uses, current in this thread."""
    from cuda.bindings import driver

    _, context = driver.cuDevicePrimaryCtxRetain(index)
    driver.cuCtxSetCurrent(context)


def _allow_shared(kernel, handle, index):
    """Allow a kernel the largest dynamic shared memory of this GPU.

    The default limit of a launch is 48 KiB.
    """
    from cuda.bindings import driver

    limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    attribute = driver.CUfunction_attribute
    limit_status, most = driver.cuDeviceGetAttribute(limit, index)
    static_status, static = driver.cuKernelGetAttribute(
        attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle, index
    )
    (set_status,) = driver.cuKernelSetAttribute(
        attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most - static, handle, index
    )
    for status in (limit_status, static_status, set_status):
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(
                f"{kernel.name}: the driver did not allow {most:,} bytes of shared memory: "
                f"{status.name}"
            )


class _OnCpu(_Packed):
    """A kernel compiled by the host compiler. mode: "fast" or "checked"."""

    def __init__(self, kernel, mode):
        from ..simt import build

        overloaded = overloaded_names(kernel.source)
        names = [name for name in kernel_names(kernel.source) if name not in overloaded]
        if kernel.name not in names:
            names.append(kernel.name)
        self.program = build.program(kernel.source, kernel.filename, names, mode == "checked")
        compiled = self.program.parameters(kernel.name)
        for (letter, size), param in zip(compiled, kernel.params):
            is_number = param.code is not None
            if (letter == "p") != param.pointer or (
                is_number and struct.calcsize("<" + param.code) != size
            ):
                raise CompileError(
                    f"{kernel.name}: parameter `{param}` has {size} bytes for the host compiler, "
                    "and another type in its declaration"
                )
            if letter == "n" and not is_number:
                raise CompileError(
                    f"{kernel.name}: the type of parameter `{param}` is a number of {size} bytes "
                    "under a name that is not known here; declare it as one of C's types"
                )
        sizes = {
            i: size
            for i, (letter, size) in enumerate(compiled)
            if letter == "s" and kernel.params[i].code is None
        }
        super().__init__(kernel.params, sizes)
