"""A kernel: from CUDA C source to machine code to a callable on torch tensors.

    # a file of kernels_cu/, specialised by macros
    k = ga.Kernel("accumulate", "accumulate_v1", GRAD_T="float")
    k[grid, block](acc, grad, acc.numel())          # on torch's current stream
    double = ga.compile('extern "C" __global__ void twice(float* x, int n) { ... }')
    k.resources("sm_90").registers                  # of the compiled kernel: no GPU needed

Each argument is checked against the kernel's parameter list before the launch: number, kind, dtype,
device, contiguity and alignment (a `float4*` needs 16 bytes). A launch may be captured in a CUDA
graph.

The module is loaded through cuda.core. The launch calls the driver's `cuLaunchKernel` with packed
arguments, because `cuda.core.launch` takes no struct by value yet (cuda-python issue 2343) and
takes longer than the rest of a launch. Neither is imported unless there is a driver.

Where the backend is not cuda, the same call runs the same source on CPU tensors (simt/).
"""

import contextlib
import ctypes
import logging
import math
import numbers
import os
import pathlib
import re
import struct
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import simt
from ..backends import backend, find_driver
from ..errors import ArgumentError, BackendError, CompileError, CompileWarning, suggestion
from ..host_code import LeftOut, needed_constants
from ..source import (
    Param,
    base_name,
    definition,
    kernel_expressions,
    kernel_names,
    launch_bound,
    overloaded_names,
    signature,
    template_expression,
    template_names,
    without_comments,
)
from . import nvrtc
from .program import kernel_files, kernel_root, whole_program
from .variables import Variables

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
# Bytes of dynamic shared memory that a block can have on the largest GPUs.
MAX_SHARED = 232448
# CUDA_ERROR_INVALID_CONTEXT: this thread has made no CUDA call yet.
INVALID_CONTEXT = 201


def _with_macros(options, defines):
    """(options without -D, the macros of both)."""
    kept = []
    macros = {}
    words = iter(options)
    for word in words:
        if word == "-D":
            word += next(words, "")
        if match := re.match(r"(?:-D\s*|--define-macro=)([^=]+)(?:=(.*))?", word, re.S):
            macros[match[1].strip()] = "1" if match[2] is None else match[2]
        else:
            kept.append(word)
    return tuple(kept), macros | {key: str(value) for key, value in defines.items()}


# ---- another text in a kernel's place ------------------------------------------------------------

# Every Kernel of a file of kernels_cu.
_of_files: "weakref.WeakSet[Kernel]" = weakref.WeakSet()
# kernel's name -> CUDA C that replaces the file's
_replacements: dict[str, str] = {}


def replacements() -> tuple[tuple[str, str], ...]:
    """(kernel's name, the CUDA C in its place) of each kernel that is replaced now."""
    return tuple(_replacements.items())


def replaced_words() -> str | None:
    """ "your settings_write": the kernels that are replaced now, or None."""
    return f"your {', '.join(_replacements)}" if _replacements else None


def replace(name: str, source: str | None):
    """Let every Kernel `name` of kernels_cu run another definition, from its next launch on.

    A captured graph keeps launching the kernel that it was captured with.

    Args:
        name: of the kernel.
        source: CUDA C that defines the kernel with the same parameters. It is compiled as if it
            stood in the file in the place of the old definition. None: the file's own text again.

    Raises:
        CompileError: with nothing changed, for a kernel that does not compile here, and for other
            parameters.
    """
    kernels = [kernel for kernel in _of_files if kernel.name == name]
    texts = [kernel.text_with(source) for kernel in kernels]
    for kernel, text in zip(kernels, texts):
        if kernel._texts.get(text):
            # This text was compiled and loaded before.
            continue
        kernel.candidate(text).compile()
    for kernel, text in zip(kernels, texts):
        kernel._use(text)
    if source is None:
        _replacements.pop(name, None)
    else:
        _replacements[name] = source


def is_loaded(name: str) -> bool:
    """True if a Kernel `name` of kernels_cu was loaded with its current text.

    Args:
        name: of a kernel.
    """
    return any(kernel.name == name and kernel._ready for kernel in _of_files)


def _exact_kind(param) -> tuple:
    return param.pointer, param.dtypes, param.code, param.align


def parameters_differ(expected, got, kind=_exact_kind) -> str | None:
    """How a kernel's parameters differ from those expected, in a sentence; names are free.

    Args:
        expected, got: what `signature` returns. None: they do not differ.
        kind: a function of a parameter; two parameters are alike if it returns the same for both.
    """
    for i in range(max(len(expected), len(got))):
        want = expected[i] if i < len(expected) else None
        has = got[i] if i < len(got) else None
        if not want or not has or kind(want) != kind(has):
            return (
                f"the kernel takes ({', '.join(map(str, got))}); "
                f"expected ({', '.join(map(str, expected))}): they differ at parameter {i + 1}, "
                f"`{has or 'nothing'}` where `{want or 'nothing'}` belongs"
            )
    return None


# ---- the kernel ----------------------------------------------------------------------------------


# In the messages of NVRTC, g++ and clang.
_UNKNOWN_NAME = re.compile(
    r"""(?:identifier ['"]|')(\w+)['"](?: is undefined| was not declared|$)""", re.M
)


class Kernel:
    """A kernel of kernels_cu, compiled at its first use.

    Args:
        file: name of a file of kernels_cu, without ".cu".
        name: name of the kernel in it.
        options: further options for NVRTC, e.g. ("-fmad=false",) for sums that are bit-identical to
            a CPU's. Default: none.
        **defines: macros, e.g. GRAD_T="bf16".

    Raises:
        CompileError: when there is no such file or kernel. A source that does not compile raises it
            at the first use.

    Example:
        >>> kernel = ga.Kernel("accumulate", "accumulate_v1", GRAD_T="float")
        >>> total = torch.zeros(1000, device=ga.default_device())
        >>> kernel[4, 256](total, torch.ones_like(total), total.numel())
        >>> total.sum().item()
        1000.0
    """

    def __init__(self, file: str, name: str, *, options: tuple[str, ...] = (), **defines: object):
        path = kernel_root() / f"{file}.cu"
        if not path.is_file():
            names = [file.name for file in kernel_files()]
            raise CompileError(
                f"there is no file {path.name} in kernels_cu; files: {', '.join(names)}"
                f"{suggestion(path.name, names)}"
            )
        self._setup(path.read_text(), name, f"kernels_cu/{path.name}", defines, options)
        self._file_text = self.text
        if name in _replacements:
            text = self.text_with(_replacements[name])
            self.candidate(text)
            self._use(text)
        _of_files.add(self)

    def _setup(self, text, name, filename, defines, options=(), learner=False):
        self.name = name
        self.filename = filename
        self.options, self.defines = _with_macros(options, defines)
        self.learner = learner
        self._ready = {}
        self._launches = {}
        self._lock = threading.RLock()
        # text -> what was loaded of it: a captured graph may still launch it.
        self._texts = {text: self._ready}
        self._use(text)
        # A replacement is launched with as many threads, whatever its own bounds are.
        self.bound = launch_bound(self.source, name) or 1024

    def _use(self, text):
        self.text = text
        folders = nvrtc.chosen_folders(self.options)
        self.source, self.left_out = whole_program(text, self.filename, self.defines, folders)
        # Architectures whose own instructions the source tests for, as wgmma of sm_90a. For these
        # GPUs it is compiled with that `a`; the code runs on no other GPU.
        self.own = {
            f"sm_{number}"
            for number in re.findall(
                r"\b__CUDA_ARCH_FEAT_SM(\d+)_ALL\b", without_comments(self.source)
            )
        }
        self.params = signature(self.source, self.name, self.defines)
        # Name -> its name in C++, of those that NVRTC has to find.
        self.expressions = kernel_expressions(self.source)
        if not self.name.isidentifier():
            self.expressions[self.name] = template_expression(self.source, self.name)
        self.usual_values = usual_values(self.params, "cuda")
        self._ready = self._texts.setdefault(text, {})
        self.variables = Variables(self)
        # Constants without a value that the kernel reads; warned of at its first launch.
        self.constants = needed_constants(self.source, base_name(self.name))

    def candidate(self, text: str) -> "Kernel":
        """A kernel of its own with another text.

        Args:
            text: the CUDA C of the whole file.

        Raises:
            CompileError: for other parameters.
        """
        kernel = Kernel.from_source(
            text, self.name, self.filename, self.defines, self.options, learner=False
        )
        if problem := parameters_differ(self.params, kernel.params):
            raise CompileError(f"{self.name}: {problem}")
        return kernel

    def text_with(self, source: str | None) -> str:
        """The file's text with another definition of this kernel; None: the file's own text.

        Messages about it name the file "cell", whose first line is the definition's.

        Args:
            source: CUDA C that defines the kernel, or None.
        """
        if source is None:
            return self._file_text
        start, end = definition(self._file_text, self.name)
        line = self._file_text.count("\n", 0, end) + 1
        return "".join(
            [
                self._file_text[:start],
                f'\n#line 1 "cell"\n{source}\n#line {line} "{self.filename}"\n',
                self._file_text[end:],
            ]
        )

    @classmethod
    def from_source(
        cls, text, name, filename="<source>", defines=None, options=(), learner=True
    ) -> "Kernel":
        """A kernel from a string; ga.compile() does this and finds the name.

        Args:
            text: CUDA C.
            name: of the kernel in it.
            filename: what messages call the text.
            defines: macro -> value, or None.
            options: for NVRTC.
            learner: it is checked by default when it runs on the CPU.

        Raises:
            CompileError: where there is no such kernel in the text.
        """
        kernel = cls.__new__(cls)
        kernel._setup(text, name, filename, defines or {}, options, learner)
        return kernel

    def __repr__(self):
        return f"{self.name}({', '.join(map(str, self.params))})  [{self.filename}]"

    def __reduce__(self):
        # A copy of a kernel compiles again.
        source = self.text, self.name, self.filename, self.defines, self.options, self.learner
        return Kernel.from_source, source

    def __call__(self, *args):
        """Refuse a call without a grid and a block.

        Args:
            *args: of any kind.

        Raises:
            ArgumentError: always; it says how a kernel is launched.
        """
        raise ArgumentError(
            f"a kernel is launched with its grid and block: {self.name}[grid, block](...)"
        )

    def cubin(self, arch: str) -> bytes:
        """Machine code for one architecture, e.g. "sm_90". No GPU is needed.

        Args:
            arch: an architecture that NVRTC knows, e.g. "sm_90".

        Raises:
            CompileError: with the compiler's messages.
            BackendError: for an architecture that NVRTC does not know, and without NVRTC.
        """
        return self._compile(self._target(arch))[0]

    def ptx(self, arch: str = "sm_90") -> str:
        """PTX for one architecture, with a `.loc` for each source line. No GPU is needed.

        Args:
            arch: an architecture that NVRTC knows, e.g. "sm_90".

        Raises:
            CompileError: with the compiler's messages.
            BackendError: for an architecture that NVRTC does not know, and without NVRTC.
        """
        return nvrtc.compile_ptx(self.source, self.filename, self._target(arch), self.options)

    def _compile(self, target: str) -> tuple[bytes, str, str, dict[str, str]]:
        """(cubin, ptxas's report, the kernel's symbol in the cubin, symbols of all expressions)."""
        try:
            cubin, log, symbols = nvrtc.compile_cubin(
                self.source,
                self.filename,
                target,
                self.options,
                (*self.expressions.values(), *self.variables.expressions),
            )
        except CompileError as error:
            raise self._explained(error) from None
        return cubin, log, symbols.get(self.expressions.get(self.name, ""), self.name), symbols

    def _explained(self, error: CompileError) -> CompileError:
        """The error, with a first line about names from host code or from a missing header."""
        unknown = list(dict.fromkeys(_UNKNOWN_NAME.findall(error.log)))
        lines = [
            f"{self.filename}: {name} is a function of the host: write __device__ in front of it"
            for name in unknown
            if name in self.left_out.functions
        ]
        lines += [
            f"{self.filename}: {name} is a variable of the host: make it const, or __device__"
            for name in unknown
            if name in self.left_out.variables
        ]
        if unknown and not lines and self.left_out.headers:
            lines.append(
                f"{self.filename}: {', '.join(unknown)} may be of "
                f"{', '.join(self.left_out.headers)}, which is neither beside the source nor in "
                "kernels_cu or the working folder"
            )
        return CompileError("\n".join([*lines, str(error)]), error.log) if lines else error

    def compile(self):
        """Compile for this GPU, or for sm_90 without a GPU.

        Raises:
            CompileError: with the compiler's messages.
        """
        try:
            self.resources()
        except CompileError as error:
            # Without CUDA's headers the CPU's compiler decides: it does not need them.
            if backend().name == "cuda" or not nvrtc.lacks_header(error.log):
                raise
            self.loaded_on_cpu()

    def _target(self, arch: str) -> str:
        return f"{arch}a" if arch in self.own else arch

    def resources(self, arch: str | None = None) -> nvrtc.Resources:
        """Registers, shared memory, stack and spills on one architecture.

        Args:
            arch: e.g. "sm_90"; default: this GPU's, else sm_90.
        """
        if arch is None and backend().name == "cuda":
            arch = backend().arch
        target = self._target(arch or "sm_90")
        cubin, log, symbol, _ = self._compile(target)
        return nvrtc.resources(cubin, log, symbol, target)

    def __getitem__(self, shape) -> "Launch":
        """`kernel[grid, block]` or `kernel[grid, block, shared_bytes]`: a Launch, to be called.

        Args:
            shape: as for Launch.

        Raises:
            ArgumentError: as for Launch.
        """
        try:
            # The same shape again costs one look-up.
            return self._launches[shape]
        except (KeyError, TypeError):
            pass
        launch = Launch(self, shape)
        if len(self._launches) < 1000 and all(isinstance(part, (int, tuple)) for part in shape):
            self._launches[shape] = launch
        return launch

    def loaded_on_cpu(self) -> "_OnCpu":
        """The kernel as a launch on the CPU runs it: with the checks, or fast."""
        return self.load("checked" if simt.is_checked(self.learner) else "fast")

    def load(self, where: int | str) -> Any:
        """Compile and load the kernel, once. A launch does this by itself.

        Args:
            where: index of a GPU, or "fast" or "checked" for the CPU.
        """
        with self._lock:
            if where not in self._ready:
                kind = _OnCpu if isinstance(where, str) else _Loaded
                try:
                    self._ready[where] = kind(self, where)
                except CompileError as error:
                    raise self._explained(error) from None
            return self._ready[where]


class Module:
    """The kernels of one text: `module["name"]` is a Kernel, as `ga.compile` returns it.

    Args:
        text: CUDA C.
        filename: what messages call it.
        options: for NVRTC.
        defines: macro -> value.

    Attributes:
        names: its kernels, in order. templates: its kernel templates; module["scale<float>"] is an
            instance of `scale`.
        left_out: what of the text is not compiled; str() of it is one line.
        variables: name -> tensor, of its variables in device memory; see Kernel.variables. Those of
            a template's instance are its own. None before a kernel is compiled.
    """

    def __init__(self, text: str, filename: str, options: tuple[str, ...], defines):
        self._facts = text, filename, defines, options
        macros = _with_macros(options, defines)[1]
        self.names = tuple(kernel_names(text, macros))
        self.templates = tuple(template_names(text, macros))
        self._kernels: dict[str, Kernel] = {}
        self.left_out = LeftOut()
        self.variables: Variables | None = None

    def __getitem__(self, name: str) -> Kernel:
        """The kernel of this name, compiled when it is first asked for.

        Args:
            name: of a kernel, with the template arguments of a template: "scale<float, 4>".

        Raises:
            CompileError: with the compiler's messages, and where there is no such kernel.
        """
        if not isinstance(name, str):
            raise self.unnamed()
        if name not in self._kernels:
            text, filename, defines, options = self._facts
            kernel = Kernel.from_source(text, name, filename, defines, options)
            self.left_out = kernel.left_out
            if name.isidentifier():
                # An instance of a template is compiled by itself.
                self.variables = kernel.variables = self.variables or kernel.variables
            kernel.compile()
            self._kernels[name] = kernel
        return self._kernels[name]

    def unnamed(self) -> CompileError:
        """The error for a kernel that is not named: it lists what there is."""
        there = [*self.names, *(f'"{name}<...>"' for name in self.templates)]
        words = ", ".join(there) or "none (no __global__ function)"
        return CompileError(f"say which kernel: {self._facts[1]} has {words}")

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)

    def __repr__(self):
        names = [*self.names, *(f"{name}<...>" for name in self.templates)]
        return f"{', '.join(names)}  [{self._facts[1]}]"


def compile(
    source: str | None = None,
    name: str | None = None,
    *,
    path: str | os.PathLike | None = None,
    filename: str | None = None,
    options: tuple[str, ...] = (),
    **defines: object,
) -> Any:
    """The kernels of CUDA C, as nvcc takes it: a whole file, or a kernel alone.

    Host code is left out, and a CompileWarning says so in one line. Headers of C, C++ and the CUDA
    runtime need not be there. The helpers of kernels_cu/common.cuh (bf16, as_float, ...) are at
    hand, those of another header after `#include "x.cuh"`. Compiles at once, so that a mistake
    shows here.

    Args:
        source: CUDA C with at least one `__global__` function.
        name: of the kernel; may be left out when there is only one in the source. A template's has
            its arguments: "scale<float>".
        path: of a file, instead of a source.
        filename: what messages call the source, and beside which headers are looked for; default:
            the path, or "<source>".
        options: further options for NVRTC. Default: none.
        **defines: macros, e.g. N=4.

    Returns:
        A Kernel, to be launched as kernel[grid, block](tensors and numbers); a Module, a mapping of
        names to kernels, for several kernels without a name.

    Raises:
        CompileError: with the compiler's own message, line and caret; for a source without a
            kernel.
        ArgumentError: for a source and a path, or for neither.

    Example:
        >>> twice = ga.compile('''
        ... __global__ void twice(float* x, int n) {
        ...     int i = blockIdx.x * blockDim.x + threadIdx.x;
        ...     if (i < n) x[i] *= 2;
        ... }''')
        >>> x = torch.arange(5.0, device=ga.default_device())
        >>> twice[1, 32](x, 5)
        >>> x.tolist()
        [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if (source is None) == (path is None):
        raise ArgumentError("ga.compile takes a source or path=, a file: one of them")
    if path is not None:
        source = pathlib.Path(path).read_text("utf-8", errors="replace")
        filename = filename or str(path)
    assert source is not None
    module = Module(source, filename or "<source>", options, defines)
    if name is None and len(module.names) == 1:
        name = module.names[0]
    if name is None and not module.names and not module.templates:
        raise module.unnamed()
    for kernel in [name] if name else module.names:
        module[kernel]
    if str(module.left_out):
        warnings.warn(f"left out: {module.left_out}", CompileWarning, stacklevel=2)
    return module[name] if name else module


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


# Bytes that the address of a struct by value is a multiple of: enough for a float4 and for what
# alignas(128) asks for.
STRUCT_ALIGNMENT = 128


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


def _check_structs(kernel, loaded, values):
    for i, size in loaded.structs:
        if len(values[i]) != size:
            raise ArgumentError(
                f"{kernel.name}: parameter `{kernel.params[i]}` is {size} bytes, "
                f"got {len(values[i])}"
            )


class _Loaded(_Packed):
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


# (device type, GPU or executor of the CPU, kernels) -> whether they run there
_decided: dict[tuple, bool] = {}


def usable(device: torch.device, *kernels: Kernel) -> bool:
    """Whether all kernels of an operation compile and load on this device.

    It is decided before the first launch, so that nothing is half done, and then kept. Where one of
    them does not, the operation runs in torch, and one line of the log (logger "gpuaccel") says
    why. With the policy `require` the error is raised instead.

    Args:
        device: where the operation's tensors are.
        *kernels: all that the operation launches.
    """
    if device.type == "cuda":
        where: int | str = device.index
    elif any(simt.is_checked(kernel.learner) for kernel in kernels):
        where = "checked"
    else:
        where = "fast"
    key = device.type, where, *kernels
    if key not in _decided:
        try:
            for kernel in kernels:
                kernel.load(where)
            _decided[key] = True
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Any error, of this package, the driver or cuda.core.
            if backend().policy == "require":
                raise
            reason = str(error).partition("\n")[0]
            logging.getLogger("gpuaccel").warning(
                "%s runs in torch on %s from now on: %s", kernels[0].filename, device, reason
            )
            _decided[key] = False
    return _decided[key]


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
            *args: tensors for pointers, numbers, and bytes or ctypes structures for structs.
            tensors: those whose addresses are in a struct or a table of pointers, for the checks on
                the CPU.

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
        kernel = self.kernel
        _, values = check_arguments(kernel, args, "cpu")
        args = (*args, *values[len(args) :])
        checked = trace or simt.is_checked(kernel.learner)
        loaded = kernel.load("checked" if checked else "fast")
        _check_structs(kernel, loaded, values)

        def pack(values):
            loaded.pack(loaded.buffer, 0, *values)
            return loaded.address

        for recorder in recorders:
            recorder(self, args, tensors)
        variables = contextlib.nullcontext()
        if kernel.variables:
            variables = kernel.variables.within(loaded.program, keep=not trace)
        with loaded.lock, variables:
            if not checked:
                simt.driver.run_fast(loaded.program, kernel.name, self.shape, pack(values))
                return None
            from ..simt import checking

            program, shape = loaded.program, self.shape
            facts = program, kernel.name, shape, kernel.params, args, values, tensors, pack
            call = checking.Call(*facts)
            if trace:
                return checking.record(call, kernel.text, kernel.filename)
            checking.run(call)


def _enter(index):
    """Make a GPU's primary context, which torch uses, current in this thread."""
    from cuda.bindings import driver

    _, context = driver.cuDevicePrimaryCtxRetain(index)
    driver.cuCtxSetCurrent(context)


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


def check_arguments(kernel: Kernel, args, device: str = "cuda") -> tuple[int | None, list]:
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
    if not arg.is_contiguous():
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
