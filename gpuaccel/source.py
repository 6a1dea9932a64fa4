"""What CUDA C text says without being compiled: its kernels and their parameters.

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
    # "const float4*", "int", "Sources"
    ctype: str
    pointer: bool
    # struct code of a number; None for pointers and structs
    code: "str | None"
    # torch dtypes that a pointer accepts; None: any
    dtypes: "tuple | None"
    # bytes that a pointer must be a multiple of
    align: int

    def __str__(self):
        return f"{self.ctype} {self.name}"


# A comment, a string or a character.
_COMMENT_OR_STRING = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\[^'\n]{1,4}|\\'|[^'\\\n])'", re.S
)


def without_comments(source: str) -> str:
    """The text with comments and the contents of strings (except "C") replaced by blanks.

    All positions and line numbers stay.
    """

    def blank(match):
        text = match[0]
        if text == '"C"':
            return text
        blanks = re.sub(r"[^\n]", " ", text)
        return blanks if text[0] == "/" else text[0] + blanks[2:] + text[-1]

    return _COMMENT_OR_STRING.sub(blank, source)


_BOUNDS = r"(?:__launch_bounds__\s*\(([^(),]*)[^()]*(?:\([^()]*\)[^()]*)*\)\s+)?"
_DECLARATION = re.compile(
    rf"__global__\s+{_BOUNDS}void\s+{_BOUNDS}(?P<name>\w+)\s*\((?P<params>[^()]*)\)"
)


def kernel_names(source: str) -> "list[str]":
    """Names of the `__global__` functions in CUDA C text, in order."""
    return [m["name"] for m in _DECLARATION.finditer(without_comments(source))]


def signature(source: str, name: str, defines: "dict[str, str]") -> "list[Param]":
    """The parameters of kernel `name`, with macros replaced."""
    declaration, macros = _declaration(source, name, defines)
    return [
        _param(text, macros)
        for text in declaration["params"].split(",")
        if text.strip() not in ("", "void")
    ]


# Macros may name macros, to this depth.
MACRO_DEPTH = 8


def launch_bound(source: str, name: str, defines: "dict[str, str]") -> "int | None":
    """The most threads per block that the __launch_bounds__ of kernel `name` allow.

    None without __launch_bounds__, or where it is not a plain number.
    """
    declaration, macros = _declaration(source, name, defines)
    bound = declaration[1] or declaration[2] or ""
    for _ in range(MACRO_DEPTH):
        bound = str(macros.get(bound.strip(), bound)).strip()
    return int(bound) if bound.isdigit() else None


_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([\w \t*]+?)[ \t]*$", re.M)
_TYPEDEF = re.compile(r"\btypedef\s+([\w\s*]+?)\s*\b(\w+)\s*;")


def _declaration(source, name, defines):
    """(the match of a kernel's declaration, what each macro and typedef stands for)."""
    text = without_comments(source)
    declaration = next((m for m in _DECLARATION.finditer(text) if m["name"] == name), None)
    if declaration is None:
        names = ", ".join(kernel_names(source)) or "none"
        raise CompileError(f"there is no kernel {name!r} here; kernels found: {names}")
    macros = {match[1]: match[2].strip() for match in _DEFINE.finditer(text)}
    macros |= {match[2]: match[1].strip() for match in _TYPEDEF.finditer(text)}
    return declaration, macros | defines


_QUALIFIER = re.compile(r"\b(__restrict__|__restrict|restrict|volatile|__grid_constant__)\b")
_ARRAY = re.compile(r"^(.*?)(\w+)\s*\[[^\]]*\]\s*$", re.S)
# C type -> the name that SCALARS has for it
SYNONYMS = {
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
}


def _param(declared, macros):
    # `float x[]` is a pointer.
    text = _ARRAY.sub(r"\1 * \2", _QUALIFIER.sub(" ", declared))
    *words, name = re.findall(r"\w+|\*", text)
    for _ in range(MACRO_DEPTH):
        words = [w for word in words for w in re.findall(r"\w+|\*", str(macros.get(word, word)))]
    stars = words.count("*")
    ctype = " ".join(word for word in words if word != "*") + "*" * stars
    base = " ".join(word for word in words if word not in ("*", "const", "struct"))
    base = SYNONYMS.get(base, base)
    vector = re.fullmatch(r"(\w*?[a-z])([234])", base)
    if vector and vector[1] in VECTOR_BASES:
        code, dtypes = SCALARS[VECTOR_BASES[vector[1]]]
        size = struct.calcsize(code)
        lanes = int(vector[2])
        align = size if lanes == 3 else min(size * lanes, 16)
        return Param(name, ctype, stars > 0, None, dtypes, align)
    if stars > 1:
        # A table of pointers is a tensor of addresses.
        return Param(name, ctype, True, None, (torch.int64, torch.uint64), 8)
    code, dtypes = SCALARS.get(base, (None, None))
    if code:
        align = struct.calcsize(code)
    else:
        align = 2 if base in ("bf16", "fp16") else 1
    return Param(name, ctype, stars > 0, None if stars else code, dtypes, align)


def struct_fields(source: str, name: str) -> "list[str]":
    """Names of the fields of `struct <name> { ... }` in CUDA C text, in order.

    Fields are numbers, declared one or several at a time: `double lr, beta1;`.
    Raises CompileError when there is no such struct."""
    match = re.search(rf"\bstruct\s+{name}\s*\{{(.*?)\}}\s*;", without_comments(source), re.S)
    if match is None:
        raise CompileError(f"there is no struct {name} here")
    return re.findall(r"\b(\w+)\s*(?=[,;])", match[1])
