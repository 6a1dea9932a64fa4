"""What CUDA C text says without being compiled: its kernels and their parameters.

kernel_names(source)
# ['accumulate_v1', 'accumulate_v2', 'accumulate_v3']
signature(source, "accumulate_v1", {"GRAD_T": "float"})
# [float* acc, const float* grad, long long n]
"""

import ast
import contextlib
import functools
import operator
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .errors import CompileError, suggestion

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
    "unsigned": ("I", (torch.uint32, torch.int32)),
    "long long": ("q", (torch.int64,)),
    "unsigned long long": ("Q", (torch.uint64, torch.int64)),
    "size_t": ("Q", (torch.uint64, torch.int64)),
    "bf16": (None, (torch.bfloat16,)),
    "fp16": ("e", (torch.float16,)),
    "void": (None, None),
}


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel, as its source declares it."""

    name: str
    # "const float4*", "int", "Sources"
    ctype: str
    pointer: bool
    # struct code of a number; None for pointers and structs
    code: str | None
    # torch dtypes that a pointer accepts; None: any
    dtypes: tuple | None
    # bytes that a pointer must be a multiple of
    align: int
    # the value of a plain default argument, `int n = 4`; None without one
    default: int | float | None = None

    def __str__(self):
        return f"{self.ctype} {self.name}"


# A comment, a string or a character.
_COMMENT_OR_STRING = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\[^'\n]{1,4}|\\'|[^'\\\n])'", re.S
)


def without_comments(source: str, *, strings: bool = False) -> str:
    """The text with comments and the contents of strings (except "C") replaced by blanks.

    All positions and line numbers stay.

    Args:
        strings: their contents stay
    """

    def blank(match):
        text = match[0]
        if text == '"C"' or strings and text[0] != "/":
            return text
        blanks = re.sub(r"[^\n]", " ", text)
        return blanks if text[0] == "/" else text[0] + blanks[2:] + text[-1]

    return _COMMENT_OR_STRING.sub(blank, source)


def line_directive(line: int, filename: str) -> str:
    """The #line, with its line break, that gives the next line this number and file."""
    name = re.sub(r'(["\\])', r"\\\1", filename)
    return f'#line {line} "{name}"\n'


# A header by its name, to the end of the line.
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include\b[ \t]*[<"]([^>"\n]+)[>"][^\n]*', re.M)
# The type, the name and the lengths of an array or of one variable.
DECLARATOR = re.compile(r"(.*?)([A-Za-z_]\w*)\s*((?:\[[^\]]*\]\s*)*)", re.S)


# ---- conditionals: what the preprocessor leaves out ----------------------------------------------

DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)((?:\\\n|[^\n])*)", re.M)
_DEFINED = re.compile(r"\bdefined\s*(?:\(\s*(\w+)\s*\)|(\w+))")
_NAME = re.compile(r"\b[A-Za-z_]\w*")
# Python's operators that have C's value for the numbers of a condition.
_OPERATORS: dict[type, Callable[[int, int], int | None]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # C rounds towards zero.
    ast.Div: lambda a, b: a // b if a >= 0 and b > 0 else None,
    ast.Mod: lambda a, b: a % b if a >= 0 and b > 0 else None,
    ast.LShift: lambda a, b: a << b if 0 <= b < 64 else None,
    ast.RShift: lambda a, b: a >> b if 0 <= b < 64 else None,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
}


def _condition(text: str, macros: dict[str, str]) -> bool | None:
    """Value of an #if's condition; None if it depends on the compiler (__CUDA_ARCH__)."""

    def is_defined(match):
        name = match[1] or match[2]
        if name.startswith("__") and name not in macros:
            # A macro of the compiler's: whether it is defined is as unknown as its value.
            return name
        return "1" if name in macros else "0"

    value = _number(_DEFINED.sub(is_defined, text), macros)
    return None if value is None else value != 0


def _number(text: str, macros: dict[str, str]) -> int | None:
    """Value of a C expression of integers and macros, evaluated by Python's grammar.

    None where the two languages may differ, and for a name of the compiler's.
    """
    for _ in range(MACRO_DEPTH):
        text = _NAME.sub(lambda match: f" {macros.get(match[0], match[0])} ", text)
        if len(text) > 1000:
            return None
        text = " ".join(text.split())
    if "~" in text or "-" in text and re.search(r"\d[lL]*[uU]", text):
        # A large number where it is unsigned.
        return None
    text = re.sub(r"\b(0[xX][\da-fA-F]+|\d+)[uUlL]*\b", r"\1", text)
    text = re.sub(r"\b0+([0-7]+)\b", r"0o\1", text)
    text = text.replace("&&", " and ").replace("||", " or ")
    # Python's `not` binds more loosely than C's `!`, and its `~` as tightly.
    text = re.sub(r"!(?!=)|\bnot\b", "~", text)
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(value=int(constant)):
            return constant
        case ast.Name(id=name):
            # Names that are no macros are 0.
            return None if name.startswith("__") else int(name == "true")
        case ast.UnaryOp(op=sign, operand=operand):
            number = _value(operand)
            if number is None or isinstance(sign, ast.UAdd):
                return number
            return -number if isinstance(sign, ast.USub) else int(not number)
        case ast.BoolOp(op=sign, values=values):
            numbers = [_value(value) for value in values]
            truths = [None if number is None else number != 0 for number in numbers]
            decisive = isinstance(sign, ast.Or)
            if decisive in truths:
                return int(decisive)
            return None if None in truths else int(not decisive)
        case ast.BinOp(left=left, op=sign, right=right):
            pass
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            # C compares first: `1 | 2 == 3`.
            for side in (left, right):
                if isinstance(side, ast.BinOp) and isinstance(side.op, (ast.BitAnd, ast.BitOr)):
                    return None
        case _:
            return None
    a, b = _value(left), _value(right)
    if a is None or b is None or type(sign) not in _OPERATORS:
        return None
    result = _OPERATORS[type(sign)](a, b)
    return None if result is None else int(result)


def active_text(
    source: str, defines: dict[str, str] | None = None, *, one_branch: bool = False
) -> str:
    """The text without comments, directives and what `#if 0` and the like leave out.

    All positions and line numbers stay: blanks are in the place of what is left out. A condition
    that depends on the compiler, such as that of `#ifdef __CUDA_ARCH__`, leaves nothing out.

    Args:
        source: CUDA C.
        defines: macros.
        one_branch: such a condition is taken to hold, so that brackets match.
    """
    return _active_of(source, tuple((defines or {}).items()), None, one_branch)[0]


@functools.lru_cache(maxsize=32)
def _active_of(
    source: str,
    defines: tuple[tuple[str, str], ...],
    end: int | None,
    one_branch: bool = False,
) -> tuple[str, dict[str, str]]:
    blank = without_comments(source)[:end]
    # Both compilers compile as C++17.
    macros = {"__cplusplus": "201703L", **dict(defines)}
    pieces = []
    position = 0
    # Per open #if: whether its current branch is compiled, and whether one branch surely was.
    open_parts: list[tuple[bool, bool]] = []

    def is_active():
        return all(part for part, _ in open_parts)

    def keep(end):
        text = blank[position:end]
        pieces.append(text if is_active() else re.sub(r"[^\n]", " ", text))

    for match in DIRECTIVE.finditer(blank):
        keep(match.start())
        position = match.end()
        pieces.append(re.sub(r"[^\n]", " ", match[0]))
        word = match[1]
        rest = match[2].replace("\\\n", " ").strip()
        if word in ("if", "ifdef", "ifndef"):
            if word != "if":
                rest = f"defined({rest.split()[0] if rest else ''})"
            result = _condition(rest, macros)
            if word == "ifndef" and result is not None:
                result = not result
            if one_branch and result is None:
                result = True
            open_parts.append((result is not False, result is True))
        elif word == "elif" and open_parts:
            _, done = open_parts.pop()
            result = not done and _condition(rest, macros)
            if one_branch and result is None:
                result = True
            open_parts.append((result is not False, done or result is True))
        elif word == "else" and open_parts:
            _, done = open_parts.pop()
            open_parts.append((not done, True))
        elif word == "endif" and open_parts:
            open_parts.pop()
        elif word == "define" and is_active():
            name = re.match(r"(\w+)(\(?)\s*", rest)
            if name and not name[2]:
                macros[name[1]] = rest[name.end() :].strip()
        elif word == "undef" and is_active():
            macros.pop(rest, None)
    keep(len(blank))
    return "".join(pieces), macros


def _active(source: str, defines, end: int | None = None) -> tuple[str, dict[str, str]]:
    """(the text up to `end` that is compiled, the macros there); the text has no comments."""
    text, macros = _active_of(source, tuple(defines.items()), end)
    return text, dict(macros)


# ---- kernels and their parameters ----------------------------------------------------------------


_BRACKET = re.compile(r"[()\[\]{}]")


def closing(text: str, start: int) -> int:
    """The position behind the bracket that closes the one at `start`, or the end of the text."""
    depth = 0
    for bracket in _BRACKET.finditer(text, start):
        depth += 1 if bracket[0] in "([{" else -1
        if depth == 0:
            return bracket.end()
    return len(text)


def split_list(text: str) -> list[str]:
    """The parts of a list between its commas, except those in brackets and template arguments."""
    parts = [""]
    depth = 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, "<": 1}.get(character, 0)
        depth -= {")": 1, "]": 1, "}": 1, ">": 1}.get(character, 0)
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


@dataclass(frozen=True)
class _Declaration:
    """A `__global__` function in a text.

    Attributes:
        name, params: as they are written. bound: the first argument of its __launch_bounds__.
        start: position of its `__global__`. template: its template parameters; None without.
        has_body: it is defined here, and not only declared.
    """

    name: str
    params: str
    bound: str
    start: int
    template: str | None
    has_body: bool


_ATTRIBUTES = r"__launch_bounds__|__cluster_dims__|__block_size__|__maxnreg__|__attribute__"


def _declarations(text: str) -> Iterator[_Declaration]:
    """The `__global__` functions in a text without comments and directives."""
    for keyword in re.finditer(r"\b__global__\b", text):
        position = keyword.end()
        bound = ""
        while word := re.compile(r"\s*(\w+)\s*(\(?)").match(text, position):
            if not word[2]:
                position = word.end()
                continue
            end = closing(text, word.end() - 1)
            if re.fullmatch(_ATTRIBUTES, word[1]):
                if word[1] == "__launch_bounds__":
                    bound = split_list(text[word.end() : end - 1])[0]
                position = end
                continue
            before = re.split(r"[;{}]", text[max(0, keyword.start() - 2000) : keyword.start()])[-1]
            between = text[keyword.end() : word.start()]
            template = re.search(r"\btemplate\s*<(.*)>", before, re.S)
            if re.search(r"\bvoid\b", before + between):
                yield _Declaration(
                    word[1],
                    text[word.end() : end - 1],
                    bound,
                    keyword.start(),
                    template[1] if template else None,
                    text[end : end + 200].lstrip()[:1] == "{",
                )
            break


def base_name(name: str) -> str:
    """The kernel's own name in that of a template's instance: `scale` of `scale<float, 4>`."""
    return name.partition("<")[0].strip()


def kernel_names(source: str, defines: dict[str, str] | None = None) -> list[str]:
    """Names of the `__global__` functions in CUDA C text, in order.

    Templates, and what an `#if` leaves out with these macros, do not count.

    Args:
        source: CUDA C text.
        defines: macro -> value; None: none.
    """
    text = active_text(source, defines)
    return list(dict.fromkeys(d.name for d in _declarations(text) if d.template is None))


def template_names(source: str, defines: dict[str, str] | None = None) -> list[str]:
    """Names of the kernel templates in CUDA C text, in order; see `kernel_names`."""
    text = active_text(source, defines)
    return list(dict.fromkeys(d.name for d in _declarations(text) if d.template is not None))


def _no_kernel(name: str, names: list[str]) -> str:
    found = ", ".join(names) or "none"
    return f"there is no kernel {name!r} here; kernels found: {found}{suggestion(name, names)}"


def kernel_positions(source: str) -> list[tuple[str, int]]:
    """(name, position of its `__global__`) of each kernel, templates included."""
    return [(d.name, d.start) for d in _declarations(active_text(source))]


# Macros that nvcc defines when it compiles for a GPU.
GPU_MACROS = {"__CUDA_ARCH__": "900", "__CUDACC__": "1", "__NVCC__": "1"}


def overloaded_names(source: str, defines: dict[str, str] | None = None) -> set[str]:
    """Names that several kernels have: none of these can be named alone."""
    text = active_text(source, GPU_MACROS | (defines or {}))
    names = [d.name for d in _declarations(text) if d.has_body]
    return {name for name in names if names.count(name) > 1}


def kernel_expressions(source: str) -> dict[str, str]:
    """Kernel -> its qualified name in C++, of those whose symbol is not their name.

    Kernels with `extern "C"`, and templates, are not among them.
    """
    if source.count("__global__") == source.count('extern "C" __global__'):
        return {}
    text = active_text(source, GPU_MACROS)
    overloaded = overloaded_names(source)
    expressions = {}
    for declaration in _declarations(text):
        before = text[: declaration.start]
        is_c = re.search(r'\bextern\s+"C"[^;{}]*$', before) or 'extern "C"' in (
            " ".join(scope.split()) for scope in scopes(text, declaration.start)
        )
        is_named = declaration.name not in overloaded
        if declaration.has_body and declaration.template is None and not is_c and is_named:
            path = [*namespaces(text, declaration.start), declaration.name]
            expressions[declaration.name] = "::".join(path)
    return expressions


def template_expression(source: str, name: str) -> str:
    """The qualified name of a template's instance: `ours::scale<float>` of `scale<float>`."""
    text = active_text(source)
    for declaration in _declarations(text):
        if declaration.name == base_name(name) and declaration.template is not None:
            return "::".join([*namespaces(text, declaration.start), name])
    return name


_SCOPE = re.compile(r'(?:\bnamespace(?:\s+([\w:]+))?|\bextern\s+"C")\s*$')


def scopes(text: str, position: int) -> list[str]:
    """The text before each open brace around a position, in a text without comments.

    It is `namespace x`, `extern "C"`, or "" for braces of code.
    """
    result: list[str] = []
    for brace in re.finditer(r"[{}]", text[:position]):
        if brace[0] == "{":
            before = text[max(0, brace.start() - 200) : brace.start()]
            scope = _SCOPE.search(before)
            result.append(scope[0].strip() if scope else "")
        elif result:
            result.pop()
    return result


def namespaces(text: str, position: int) -> list[str]:
    """The named namespaces around a position in a text without comments."""
    names = (re.fullmatch(r"namespace\s+([\w:]+)", scope) for scope in scopes(text, position))
    return [name[1] for name in names if name]


def definition(source: str, name: str) -> tuple[int, int]:
    """(start, end) of the definition of kernel `name`, from its `extern "C"` on."""
    text = active_text(source)
    for declaration in _declarations(text):
        if declaration.name == name and declaration.template is None and declaration.has_body:
            break
    else:
        raise CompileError(_no_kernel(name, kernel_names(source)))
    start = declaration.start
    if linkage := re.search(r'extern\s+"C"\s*$', text[:start]):
        start = linkage.start()
    parameters = text.index(declaration.name, declaration.start) + len(declaration.name)
    body = text.index("{", closing(text, text.index("(", parameters)))
    return start, closing(text, body)


def signature(source: str, name: str, defines: dict[str, str]) -> list[Param]:
    """The parameters of kernel `name`, with macros replaced.

    Raises:
        CompileError: for a parameter that is a reference or has no name.
    """
    declaration, macros = _declaration(source, name, defines)
    declared = [text for text in split_list(declaration.params) if text not in ("", "void")]
    for text in declared:
        if problem := _problem(text):
            raise CompileError(f"{name}: parameter `{' '.join(text.split())}` {problem}")
    return [_param(text, macros) for text in declared]


# Macros may name macros, to this depth.
MACRO_DEPTH = 8


def launch_bound(source: str, name: str) -> int | None:
    """The most threads per block that the __launch_bounds__ of kernel `name` allow.

    None without __launch_bounds__, or where it is not a plain number.
    """
    declaration, macros = _declaration(source, name, {})
    bound = declaration.bound
    for _ in range(MACRO_DEPTH):
        bound = str(macros.get(bound.strip(), bound)).strip()
    return int(bound) if bound.isdigit() else None


_TYPEDEF = re.compile(r"\btypedef\s+([\w\s*]+?)\s*\b(\w+)\s*;")
_ENUM = re.compile(r"\benum\s+(?:class\s+|struct\s+)?(\w+)\s*(?::\s*([\w\s]+?)\s*)?\{")
_USING = re.compile(r"\busing\s+(\w+)\s*=\s*([\w\s*]+?)\s*;")


def _declaration(source, name, defines):
    """(a kernel's declaration, macro or typedef -> its replacement there)."""
    text, _ = _active(source, defines)
    # Prefer the definition: a forward declaration may leave its parameters unnamed.
    found = [d for d in _declarations(text) if d.name == base_name(name)]
    declaration = next((d for d in found if d.has_body), found[0] if found else None)
    arguments = _template_arguments(name)
    if declaration is None or (declaration.template is None) != (arguments is None):
        names = kernel_names(source, defines)
        if declaration is not None and arguments is None:
            raise CompileError(
                f"kernel {name!r} is a template: name it with its template arguments, as in "
                f'"{name}<float>"; its template parameters are <{declaration.template}>; '
                f"kernels found: {', '.join(names) or 'none'}"
            )
        raise CompileError(_no_kernel(name, names))
    if len(found) > 1 and declaration.name in overloaded_names(source, defines):
        raise CompileError(f"several kernels are named {declaration.name}: give each its own name")
    _, macros = _active(source, defines, declaration.start)
    types = _types(_outside_code(text[: declaration.start]))
    if declaration.template is not None:
        types |= _template_values(declaration, name, arguments)
    return declaration, types | _short(macros)


def _types(text: str) -> dict[str, str]:
    """Name -> type, of a text's typedefs, aliases and enumerations."""
    types = {match[2]: match[1].strip() for match in _TYPEDEF.finditer(text)}
    types |= {match[1]: match[2].strip() for match in _USING.finditer(text)}
    return types | {match[1]: (match[2] or "int").strip() for match in _ENUM.finditer(text)}


def _short(macros: dict[str, str]) -> dict[str, str]:
    """The macros that are replaced by a type or a number."""
    return {name: text for name, text in macros.items() if re.fullmatch(r"[\w \t*]+", text)}


def _template_arguments(name: str) -> list[str] | None:
    """`float` and `4` of `scale<float, 4>`; None for a kernel that is no template."""
    match = re.fullmatch(r"\s*\w+\s*<(.*)>\s*", name, re.S)
    return None if match is None else [part for part in split_list(match[1]) if part]


def _template_values(declaration, name, arguments) -> dict[str, str]:
    """Template parameter of a kernel -> its argument."""
    values = {}
    parameters = [part for part in split_list(declaration.template) if part]
    if len(arguments) > len(parameters):
        raise CompileError(
            f"{name}: the kernel has {len(parameters)} template parameters "
            f"<{declaration.template}>, got {len(arguments)}"
        )
    for i, parameter in enumerate(parameters):
        declared, _, default = parameter.partition("=")
        value = arguments[i] if i < len(arguments) else default.strip()
        names = re.findall(r"\w+", declared)
        if not value:
            raise CompileError(
                f"{name}: template parameter `{parameter}` has no argument; the template "
                f"parameters are <{declaration.template}>"
            )
        values[names[-1]] = value
    return values


def _outside_code(text: str) -> str:
    """The text with blanks for scopes that are closed, whose names mean nothing at its end.

    Braces of `extern "C"` and of namespaces keep their content, except for a closed, named
    namespace that no `using namespace` names.
    """
    used = set(re.findall(r"\busing\s+namespace\s+([\w:]+)", text))
    open_braces = []
    hidden = []
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            scope = _SCOPE.search(text, max(0, brace.start() - 200), brace.start())
            is_visible = scope is not None and (scope[1] is None or scope[1] in used)
            open_braces.append((brace.end(), is_visible))
        elif open_braces:
            start, is_visible = open_braces.pop()
            if not is_visible:
                hidden.append((start, brace.start()))
    pieces = []
    position = 0
    # Outer braces first.
    for start, end in sorted(hidden):
        if start >= position:
            pieces += [text[position:start], " " * (end - start)]
            position = end
    return "".join([*pieces, text[position:]])


_QUALIFIER = re.compile(r"\b(__restrict__|__restrict|restrict|volatile|__grid_constant__)\b")
_ARRAY = re.compile(r"^(.*?)(\w+)\s*(?:\[[^\]]*\]\s*)+$", re.S)
# The words of whole numbers, in the order that names of types have here.
_INTEGERS = ("unsigned", "short", "long", "int", "char")
_KEYWORDS = {*_INTEGERS, "signed", "float", "double", "bool", "void"}
# C type -> the name that SCALARS has for it
SYNONYMS = {
    "long": "long long",
    "unsigned long": "unsigned long long",
    "int64_t": "long long",
    "int32_t": "int",
    "uint32_t": "unsigned",
    "uint64_t": "unsigned long long",
    "__nv_bfloat16": "bf16",
    "nv_bfloat16": "bf16",
    "half": "fp16",
    "__half": "fp16",
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "uint": "unsigned",
    "uchar": "unsigned char",
    "ushort": "unsigned short",
    "longlong": "long long",
    "ulonglong": "unsigned long long",
    "ptrdiff_t": "long long",
    "intptr_t": "long long",
    "uintptr_t": "unsigned long long",
    "clock_t": "long long",
    "cudaTextureObject_t": "unsigned long long",
    "cudaSurfaceObject_t": "unsigned long long",
    "CUtexObject": "unsigned long long",
    "CUsurfObject": "unsigned long long",
}


def _default(text: str) -> int | float | None:
    """The value of a C literal that is a number; None for anything else."""
    if text in ("true", "false"):
        return int(text == "true")
    digits = re.sub(r"(?<=[\d.])[uUlLfF]+$", "", text.replace(" ", ""))
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(digits)
    return None


def _problem(declared: str) -> str | None:
    """Why a parameter cannot be read, or None if it can."""
    text = _ARRAY.sub(r"\1 * \2", _QUALIFIER.sub(" ", declared.partition("=")[0]))
    if "&" in text:
        return "is a reference; a kernel takes pointers and values"
    if re.search(r"\(\s*\*", text):
        return "points to an array or a function; declare a plain pointer"
    words = [
        word for word in re.findall(r"\w+|\*", text) if word not in ("const", "struct", "enum")
    ]
    if len(words) < 2 or words[-1] == "*" or words[-1] in _KEYWORDS:
        return "has no name; give it one"
    return None


def _param(declared, macros):
    declared, _, default = declared.partition("=")
    # `float x[]` is a pointer, and so is `float x[4][4]`.
    text = _ARRAY.sub(r"\1 * \2", _QUALIFIER.sub(" ", declared))
    *words, name = re.findall(r"\w+|\*", text)
    for _ in range(MACRO_DEPTH):
        words = [w for word in words for w in re.findall(r"\w+|\*", str(macros.get(word, word)))]
    words = _QUALIFIER.sub(" ", " ".join(words)).split()
    while "*" in words and words[-1] == "const":
        # The parameter itself is const, and not what it points to.
        words.pop()
    stars = words.count("*")
    ctype = " ".join(word for word in words if word != "*") + "*" * stars
    base = " ".join(word for word in words if word not in ("*", "const", "struct", "enum"))
    if base and set(base.split()) <= {*_INTEGERS, "signed"}:
        # `long unsigned int` is `unsigned long`; only for a char does `signed` mean anything.
        parts = [word for word in base.split() if word != "int"]
        parts = [word for word in parts if word != "signed" or "char" in base]
        base = " ".join(sorted(parts, key=("signed", *_INTEGERS).index)) or "int"
    base = SYNONYMS.get(base, base)
    if stars > 1:
        # A table of pointers is a tensor of addresses.
        return Param(name, ctype, True, None, (torch.int64, torch.uint64), 8)
    if vector := re.fullmatch(r"(\w+?)([234])", base):
        element, lanes = SYNONYMS.get(vector[1], vector[1]), int(vector[2])
        code, dtypes = SCALARS.get(element, (None, None))
        # Two halves are in one word; half4 and bool2 are structs of the source's own.
        if lanes == 2 if element in ("bf16", "fp16") else code not in (None, "?"):
            size = struct.calcsize(code or "e")
            align = size if lanes == 3 else min(size * lanes, 16)
            return Param(name, ctype, stars > 0, None, dtypes, align)
    code, dtypes = SCALARS.get(base, (None, None))
    if code:
        align = struct.calcsize(code)
    else:
        align = 2 if base == "bf16" else 1
    value = _default(default.strip()) if code and not stars else None
    return Param(name, ctype, stars > 0, None if stars else code, dtypes, align, value)


def element_type(source: str, ctype: str) -> tuple[torch.dtype, int]:
    """(dtype, how many of them) of one element of type `ctype`; of a struct (uint8, 0)."""
    text, macros = _active(source, {})
    param = _param(f"{ctype} x", _types(text) | _short(macros))
    if param.pointer:
        # An address.
        return torch.int64, 1
    if not param.dtypes:
        return torch.uint8, 0
    lanes = re.search(r"[a-z]([1-4])$", param.ctype)
    return param.dtypes[0], int(lanes[1]) if param.code is None and lanes else 1


def array_length(source: str, text: str) -> int | None:
    """The length of an array as a source writes it; None where it names no numbers or macros."""
    macros = _active(source, {})[1]
    constants = re.findall(r"\b(?:const|constexpr)\s+\w+\s+(\w+)\s*=\s*([^;,]+);", source)
    value = _number(text, dict(constants) | macros)
    return value if value and value > 0 else None


# What only nvcc and its linker make of device code -> in words.
NVCC_ONLY = {
    r"<<<": "launches a kernel inside a kernel (<<< >>>), which needs the linker of nvcc",
    r"\b(?:texture|surface)\s*<": "has a texture reference (texture<>), which CUDA 12 has removed",
    r"\bcuda(?:Malloc|Memcpy|Memset|Free|Launch|DeviceSynchronize|Stream|Event|GetLast)\w*\s*\(": (
        "calls the CUDA runtime inside a kernel, which needs the linker of nvcc"
    ),
}


def check_possible(source: str, filename: str):
    """Refuse device code that no compiler without a linker can compile, with its line."""
    text = active_text(source, GPU_MACROS)
    for pattern, words in NVCC_ONLY.items():
        if found := re.search(pattern, text):
            line = line_number(source, found.start())
            raise CompileError(f"{filename}({line}): this {words}")


LINE = re.compile(r'^#line (\d+)(?: "((?:\\.|[^"\\\n])*)")?\n', re.M)


def line_number(source: str, position: int) -> int:
    """The number that messages have for the line at a position; #line says where parts begin."""
    first = 1
    start = 0
    for match in LINE.finditer(source, 0, position):
        first = int(match[1])
        start = match.end()
    return first + source.count("\n", start, position)


def struct_fields(source: str, name: str) -> list[str]:
    """Names of the fields of `struct <name> { ... }` in CUDA C text, in order.

    Fields are numbers, declared one or several at a time: `double lr, beta1;`.

    Raises:
        CompileError: when there is no such struct.
    """
    match = re.search(rf"\bstruct\s+{name}\s*\{{(.*?)\}}\s*;", without_comments(source), re.S)
    if match is None:
        raise CompileError(f"there is no struct {name} here")
    return re.findall(r"\b(\w+)\s*(?=[,;])", match[1])
