"""From source to cubin to a callable on tensors.

program puts a source together. nvrtc compiles and caches cubins. kernel compiles and loads. launch
checks arguments, and launches on a GPU or hands over to simt.
"""

from . import nvrtc
from .dtypes import C_TYPES, FLOAT_DTYPES, KINDS
from .kernel import (
    Kernel,
    Module,
    compile,
    is_loaded,
    kernel_names,
    parameters_differ,
    replace,
    replaced_words,
    replacements,
    usable,
)
from .launch import Launch
from .program import kernel_files, kernel_root

__all__ = [
    "C_TYPES",
    "FLOAT_DTYPES",
    "KINDS",
    "Kernel",
    "Launch",
    "Module",
    "compile",
    "is_loaded",
    "kernel_files",
    "kernel_names",
    "kernel_root",
    "nvrtc",
    "parameters_differ",
    "replace",
    "replaced_words",
    "replacements",
    "usable",
]
