"""The variables of a text, `__constant__` and `__device__`, as tensors.

    k = ga.compile("__constant__ float c[4]; __global__ void k(float* x) { ... c[i] ... }")
    k.variables["c"].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))     # cudaMemcpyToSymbol
    k.variables["c"].tolist()                                      # cudaMemcpyFromSymbol

The kernels of a Module share their variables. On a GPU a tensor is the variable's memory. On the
CPU a launch copies it into the kernel's library, and copies it back when the launch has succeeded:
what a kernel does unchecked, it finds again when it is checked.
"""

import contextlib
import ctypes
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from ..backends import backend
from ..errors import BackendError
from ..host_code import Variable, device_variables
from ..source import array_length, element_type

if TYPE_CHECKING:
    from .kernel import Kernel


class Variables(Mapping):
    """Name -> tensor of each variable of a kernel's text, but those that are const.

    A tensor has the shape of the variable's array, with a last dimension for the fields of a vector
    type. A struct is bytes: a uint8 tensor.

    Args:
        kernel: one of the text.
    """

    def __init__(self, kernel: "Kernel"):
        self._kernel = kernel
        self._declared = {v.name: v for v in device_variables(kernel.source)}
        # GPU's index, or None for the CPU -> name -> tensor
        self._tensors: dict[int | None, dict[str, torch.Tensor]] = {}
        # GPU's index -> the loaded code, one for all kernels of the text.
        self.modules: dict = {}
        self._given: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        """The variable, on the current GPU or on the CPU.

        Args:
            name: of the variable.

        Raises:
            KeyError: where there is no such variable.
            CompileError: where the text does not compile.
        """
        if name not in self._declared:
            there = ", ".join(self._declared) or "none"
            raise KeyError(f"{self._kernel.filename} has no variable {name!r}; variables: {there}")
        self._given.add(name)
        index = torch.cuda.current_device() if backend().name == "cuda" else None
        if index is None:
            return self._on_cpu()[name]
        tensors = self._tensors.setdefault(index, {})
        if name not in tensors:
            tensors[name] = self._on_gpu(self._declared[name], index)
        return tensors[name]

    def __iter__(self):
        return iter(self._declared)

    def __len__(self):
        return len(self._declared)

    def __repr__(self):
        return f"variables {', '.join(self._declared) or 'none'}  [{self._kernel.filename}]"

    @property
    def expressions(self) -> tuple[str, ...]:
        """What NVRTC has to find."""
        return tuple(f"&{variable.path}" for variable in self._declared.values())

    def warn_unset(self, kernel: str, names: tuple[str, ...]):
        """Warn of constants that a kernel reads and that nobody has set.

        Args:
            kernel: its name.
            names: of constants without a value.
        """
        unset = [name for name in names if name not in self._given]
        if unset:
            warnings.warn(
                f"{kernel} reads __constant__ variables that were never set and hold zeros: "
                f"{', '.join(unset)}; before the launch: "
                f'{kernel}.variables["{unset[0]}"].copy_(...)',
                stacklevel=3,
            )

    def _on_cpu(self, program=None) -> dict[str, torch.Tensor]:
        """Name -> tensor. program: a build of the text; None: that of the backend in use."""
        if None not in self._tensors:
            if program is None:
                program = self._kernel.loaded_on_cpu().program
            self._tensors[None] = {
                name: self._shaped(
                    self._declared[name], torch.frombuffer(bytearray(value), dtype=torch.uint8)
                )
                for name, (_, value) in program.variables.items()
                if value
            }
        return self._tensors[None]

    @contextlib.contextmanager
    def within(self, program, keep: bool = True) -> Iterator[None]:
        """Let a program of the CPU have the variables during the block.

        Args:
            program: a build of the text.
            keep: what the block changes stays, unless it raises.
        """
        places = [
            (program.variables[name][0], tensor.data_ptr(), tensor.numel() * tensor.element_size())
            for name, tensor in self._on_cpu(program).items()
        ]
        with program.lock:
            for address, ours, size in places:
                ctypes.memmove(address, ours, size)
            yield
            if keep:
                for address, ours, size in places:
                    ctypes.memmove(ours, address, size)

    def _on_gpu(self, variable: Variable, index: int) -> torch.Tensor:
        from cuda.bindings import driver

        with torch.cuda.device(index):
            loaded = self._kernel.load(index)
            module = self.modules[index]
            symbol = loaded.symbols[f"&{variable.path}"]
            status, address, size = driver.cuLibraryGetGlobal(module.handle, symbol.encode())
            if status != driver.CUresult.CUDA_SUCCESS:
                raise BackendError(
                    f"the driver did not find variable {variable.name}: {status.name}"
                )
            memory = _Memory(int(address), int(size), module)
            return self._shaped(variable, torch.as_tensor(memory, device=f"cuda:{index}"))

    def _shaped(self, variable: Variable, content: torch.Tensor) -> torch.Tensor:
        """View bytes as a tensor of the variable's type and shape."""
        dtype, lanes = element_type(self._kernel.source, variable.ctype)
        lengths = [array_length(self._kernel.source, text) for text in variable.lengths]
        if not lanes:
            return content
        values = content.view(dtype)
        shape = [-1 if length is None else length for length in lengths]
        shape += [lanes] if lanes > 1 else []
        known = math.prod(length for length in shape if length > 0)
        if (
            shape.count(-1) > 1
            or values.numel() % known
            or (-1 not in shape and known != values.numel())
        ):
            return values
        return values.view(shape)


class _Memory:
    """Bytes of a GPU's memory for torch. module: kept alive as long as they are used."""

    def __init__(self, address: int, size: int, module):
        self.module = module
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
