"""From source to cubin to a callable on tensors.

nvrtc compiles and caches cubins. kernel checks arguments, and launches on a GPU or hands over to
simt.
"""

from . import nvrtc
from .dtypes import C_TYPES, FLOAT_DTYPES, KINDS
from .kernel import Kernel, Launch, compile, kernel_files, kernel_names, kernel_root, usable, zero_

__all__ = [
    "C_TYPES",
    "FLOAT_DTYPES",
    "KINDS",
    "Kernel",
    "Launch",
    "compile",
    "kernel_files",
    "kernel_names",
    "kernel_root",
    "nvrtc",
    "usable",
    "zero_",
]
