"""What can be read from CUDA C text without compiling it: its kernels and their parameters.

>>> kernel_names(source)
['accumulate_v1', 'accumulate_v2', 'accumulate_v3']
>>> signature(source, "accumulate_v1", {"GRAD_T": "float"})
[float* acc, const float* grad, long long n]
"""

import re
import struct
from dataclasses import dataclass

import torch

from .errors import CompileError

# C scalar -> (struct code, torch dtypes that a pointer to it accepts)
SCALARS = {
    "float": ("f", (torch.float32,)),
    "double": ("d", (torch.float64,)),
    "bool": ("?", (torch.bool,)),
    "char": ("b", (torch.int8,)),
    "signed char": ("b", (torch.int8,)),
    "unsigned char": ("B", (torch.uint8, torch.bool)),
    "short": ("h", (torch.int16,)),
    "unsigned short": ("H", (torch.uint16, torch.int16)),
    "int": ("i", (torch.int32,)),
    "unsigned int": ("I", (torch.uint32, torch.int32)),
    "unsigned": ("I", (torch.uint32, torch.int32)),
    "long long": ("q", (torch.int64,)),
    "unsigned long long": ("Q", (torch.uint64, torch.int64)),
    "size_t": ("Q", (torch.uint64, torch.int64)),
    "bf16": (None, (torch.bfloat16,)),
    "fp16": (None, (torch.float16,)),
    "void": (None, None),
}
VECTOR_BASES = {
    "float": "float",
    "double": "double",
    "int": "int",
    "uint": "unsigned",
    "longlong": "long long",
    "char": "char",
    "uchar": "unsigned char",
    "short": "short",
    "ushort": "unsigned short",
    "ulonglong": "unsigned long long",
}


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel, as its source declares it."""

    name: str
    ctype: str  # "const float4*", "int", "Sources"
    pointer: bool
    code: "str | None"  # struct code of a number; None for pointers and structs
    dtypes: "tuple | None"  # torch dtypes that a pointer accepts; None: any
    align: int  # bytes that a pointer must be a multiple of

    def __str__(self):
        return f"{self.ctype} {self.name}"


def without_comments(source: str) -> str:
    """The same text with comments and the contents of strings (not of "C") blanked, so that line numbers stay."""

    def blank(match):
        inside = re.sub(r"[^\n]", " ", match[0])
        return (
            match[0]
            if match[0] == '"C"'
            else inside
            if match[0][0] == "/"
            else match[0][0] + inside[2:] + match[0][-1]
        )

    return re.sub(
        r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\[^'\n]{1,4}|\\'|[^'\\\n])'",
        blank,
        source,
        flags=re.S,
    )


_BOUNDS = r"(?:__launch_bounds__\s*\(([^(),]*)[^()]*(?:\([^()]*\)[^()]*)*\)\s+)?"
_DECLARATION = re.compile(
    rf"__global__\s+{_BOUNDS}void\s+{_BOUNDS}(?P<name>\w+)\s*\((?P<params>[^()]*)\)"
)


def kernel_names(source: str) -> "list[str]":
    """Names of the `__global__` functions in CUDA C text, in order."""
    return [m["name"] for m in _DECLARATION.finditer(without_comments(source))]


def signature(source: str, name: str, defines: "dict[str, str]") -> "list[Param]":
    """The parameters of kernel `name`, macros replaced."""
    found, macros = _declaration(source, name, defines)
    return [
        _param(declared, macros)
        for declared in found["params"].split(",")
        if declared.strip() not in ("", "void")
    ]


def launch_bound(source: str, name: str, defines: "dict[str, str]") -> "int | None":
    """The most threads per block that kernel `name` allows with __launch_bounds__; None without one, or when it is no plain number."""
    found, macros = _declaration(source, name, defines)
    bound = found[1] or found[2] or ""
    for _ in range(8):
        bound = str(macros.get(bound.strip(), bound)).strip()
    return int(bound) if bound.isdigit() else None


def _declaration(source, name, defines):
    """(the match of a kernel's declaration, what each macro and typedef stands for)."""
    text = without_comments(source)
    found = next((m for m in _DECLARATION.finditer(text) if m["name"] == name), None)
    if found is None:
        names = ", ".join(kernel_names(source)) or "none"
        raise CompileError(f"there is no kernel {name!r} here; kernels found: {names}")
    macros = {
        m[1]: m[2].strip()
        for m in re.finditer(
            r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([\w \t*]+?)[ \t]*$", text, re.M
        )
    }
    macros.update(
        {m[2]: m[1].strip() for m in re.finditer(r"\btypedef\s+([\w\s*]+?)\s*\b(\w+)\s*;", text)}
    )
    macros.update(defines)
    return found, macros


def _param(declared, macros):
    words = re.sub(
        r"\b(__restrict__|__restrict|restrict|volatile|__grid_constant__)\b", " ", declared
    )
    words = re.sub(
        r"^(.*?)(\w+)\s*\[[^\]]*\]\s*$", r"\1 * \2", words, flags=re.S
    )  # `float x[]` is a pointer
    *kind, name = re.findall(r"\w+|\*", words)
    for _ in range(8):  # macros may name macros
        kind = [w for k in kind for w in re.findall(r"\w+|\*", str(macros.get(k, k)))]
    pointer, base = "*" in kind, " ".join(k for k in kind if k not in ("*", "const", "struct"))
    base = {
        "unsigned char": base,
        "long": "long long",
        "unsigned long": "unsigned long long",
        "int64_t": "long long",
        "int32_t": "int",
        "uint32_t": "unsigned",
        "uint64_t": "unsigned long long",
        "__nv_bfloat16": "bf16",
        "half": "fp16",
        "long long int": "long long",
        "long int": "long long",
        "short int": "short",
        "signed": "int",
        "signed int": "int",
        "unsigned short int": "unsigned short",
        "unsigned long int": "unsigned long long",
        "unsigned long long int": "unsigned long long",
    }.get(base, base)
    ctype = " ".join(k for k in kind if k != "*") + "*" * kind.count("*")
    vector = re.fullmatch(r"(\w*?[a-z])([234])", base)
    if vector and vector[1] in VECTOR_BASES:
        code, dtypes = SCALARS[VECTOR_BASES[vector[1]]]
        size, lanes = struct.calcsize(code), int(vector[2])
        return Param(
            name, ctype, pointer, None, dtypes, min(size * lanes, 16) if lanes != 3 else size
        )
    code, dtypes = SCALARS.get(base, (None, None))
    align = struct.calcsize(code) if code else 2 if base in ("bf16", "fp16") else 1
    if kind.count("*") > 1:  # a table of pointers is a tensor of addresses
        return Param(name, ctype, True, None, (torch.int64, torch.uint64), 8)
    return Param(name, ctype, pointer, None if pointer else code, dtypes, align)


def struct_fields(source: str, name: str) -> "list[str]":
    """Names of the fields of `struct <name> { ... }` in CUDA C text, in order.

    Fields are numbers, declared one or several at a time: `double lr, beta1;`.
    Raises CompileError when there is no such struct."""
    match = re.search(rf"\bstruct\s+{name}\s*\{{(.*?)\}}\s*;", without_comments(source), re.S)
    if match is None:
        raise CompileError(f"there is no struct {name} here")
    return re.findall(r"\b(\w+)\s*(?=[,;])", match[1])
