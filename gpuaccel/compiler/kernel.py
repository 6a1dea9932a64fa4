"""A kernel: from CUDA C source to machine code to a callable on torch tensors.

    # a file of kernels_cu/, specialised by macros
    k = ga.Kernel("accumulate", "accumulate_v1", GRAD_T="float")
    k[grid, block](acc, grad, acc.numel())          # on torch's current stream
    double = ga.compile('extern "C" __global__ void twice(float* x, int n) { ... }')
    k.resources("sm_90").registers                  # of the compiled kernel: no GPU needed

A launch of it is in launch.py.
"""

import itertools
import logging
import os
import pathlib
import re
import threading
import warnings
import weakref
from typing import Any

import torch

from .. import simt
from ..backends import backend
from ..errors import ArgumentError, CompileError, CompileWarning, suggestion
from ..host_code import LeftOut, needed_constants
from ..source import (
    base_name,
    definition,
    kernel_expressions,
    kernel_names,
    launch_bound,
    signature,
    template_expression,
    template_names,
    without_comments,
)
from . import nvrtc
from .launch import Launch, load_kernel, usual_values
from .program import kernel_files, kernel_root, whole_program
from .variables import Variables


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
    for i, (want, has) in enumerate(itertools.zip_longest(expected, got), 1):
        if not want or not has or kind(want) != kind(has):
            return (
                f"the kernel takes ({', '.join(map(str, got))}); "
                f"expected ({', '.join(map(str, expected))}): they differ at parameter {i}, "
                f"`{has or 'nothing'}` where `{want or 'nothing'}` belongs"
            )
    return None


# ---- the kernel ----------------------------------------------------------------------------------


# In the messages of NVRTC, g++ and clang.
_UNKNOWN_NAME = re.compile(
    r"""(?:identifier ['"]|')(\w+)['"](?: is undefined| was not declared|$)""", re.M
)


class Kernel:
    """A CUDA C kernel; `kernel[grid, block](...)` launches it.

    ga.compile makes one of a source. `ga.Kernel(file, name)` is one of the package's own, compiled
    at its first use.

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

    def __getitem__(self, shape) -> Launch:
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

    def loaded_on_cpu(self) -> Any:
        """The kernel as a launch on the CPU runs it: with the checks, or fast."""
        return self.load("checked" if simt.is_checked(self.learner) else "fast")

    def load(self, where: int | str) -> Any:
        """Compile and load the kernel, once. A launch does this by itself.

        Args:
            where: index of a GPU, or "fast" or "checked" for the CPU.
        """
        with self._lock:
            if where not in self._ready:
                try:
                    self._ready[where] = load_kernel(self, where)
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
    """The kernels of CUDA C: of a whole file, or a kernel alone.

    It takes most single-file programs. Kernels that launch kernels, call the CUDA runtime or have a
    texture<> reference are refused. Host code is left out, and a CompileWarning says so in one
    line. Headers of C, C++ and the CUDA runtime need not be there. The helpers of
    kernels_cu/common.cuh (bf16, as_float, ...) are at hand, those of another header after
    `#include "x.cuh"`. Compiles at once, so that a mistake shows here.

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
        A Kernel, to be launched as kernel[grid, block](tensors and numbers). If the source has
        several and name is None, a Module, a mapping of names to kernels.

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
