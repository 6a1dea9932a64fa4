"""A whole .cu file without its host code: what its kernels need, and nothing else.

    text, left_out = device_code(source)
    str(left_out)                              # "main, 2 host functions"

A declaration stays if a kernel, an operator or a variable in device memory names it, directly or
through other declarations. A function stays only if it runs on the device: `__device__`,
`__global__` or `constexpr` stands in front of it. So `main`, launches, wrappers and what they use
are not there for the compilers of device code, which know no host functions. Blanks are in the
place of what is left out: all positions and line numbers stay.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .source import (
    DECLARATOR,
    DIRECTIVE,
    GPU_MACROS,
    active_text,
    closing,
    namespaces,
    split_list,
    without_comments,
)

_WORD = re.compile(r"(?<![\w.])(?<!->)[A-Za-z_]\w*")
_MARK = re.compile(r"[;{}()\[\]]")
_SCOPE = re.compile(r'(?:\bnamespace\b[\s\w:]*|\bextern\s+"C"\s*)$')
_LABEL = re.compile(r"\s*(?:public|private|protected)\s*:(?!:)|\s*;")
_SPACES = ("__global__", "__device__", "__constant__", "__shared__", "__managed__")
_ATTRIBUTES = re.compile(
    r"\b(?:__launch_bounds__|__cluster_dims__|__block_size__|__maxnreg__|__attribute__|__align__|"
    r"alignas|__declspec|decltype|explicit)\s*\(\)|\[\]\[\]"
)
_TYPE = re.compile(r"^[\w\s:]*\b(?:struct|class|union|enum)\b")
_INITIALISER = re.compile(r"(?<![=!<>+\-*/%&|^])=(?!=)")
_FUNCTION = re.compile(r"(~?\w+|\boperator\b[^()]*(?:\(\))?)\s*\(\)")
# Names that only a host has: they mark a member function without an annotation as host code.
_HOST_ONLY = re.compile(
    r"<<<|\bstd\s*::|\bcuda[A-Z]\w*|\b(?:c(?:out|err)|endl|f?printf|FILE|fopen|exit|abort|"
    r"[mc]alloc|free|new|delete|s?rand)\b"
)
_LAMBDA_SPACE = re.compile(r"\]\s*((?:\b__(?:host|device)__\s*)+)(?=[({])")
# Namespaces of headers that device code includes.
_DEVICE_NAMESPACES = ("std", "cooperative_groups", "nvcuda", "cub")


@dataclass(frozen=True)
class LeftOut:
    """What of a source is not compiled.

    Attributes:
        functions, variables: names of those of the host. headers: those that were not found.
    """

    functions: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()

    def __str__(self):
        others = len(set(self.functions) - {"main"})
        parts = ["main"] if "main" in self.functions else []
        if others:
            parts.append(f"{others} host function{'s' if others > 1 else ''}")
        parts += [f"{name} (not found)" for name in self.headers]
        return ", ".join(parts)


@dataclass
class _Declaration:
    """A declaration in a text.

    Attributes:
        start, end: its position. names: the names it declares. kind: "function", "variable",
        "type", "names" (aliases), "namespace" (using namespace), "assertion" or "macro" (a
        call of one).
        words: those in front of its body. body: start and end of the body; None without one.
    """

    start: int
    end: int
    kind: str
    names: tuple[str, ...]
    words: frozenset[str] = frozenset()
    body: tuple[int, int] | None = None


def _without_template(head: str) -> str:
    """A declaration without its `template <...>`."""
    while match := re.match(r"\s*template\s*<", head):
        depth = 1
        position = match.end()
        while depth and position < len(head):
            depth += {"<": 1, ">": -1}.get(head[position], 0)
            position += 1
        head = head[position:]
    return head


def _declarations(
    text: str, start: int, end: int, macros: frozenset[str], *, in_class: bool = False
) -> Iterator[_Declaration]:
    """The declarations in a part of a text without comments and directives.

    Raises:
        ValueError: where brackets do not match.
    """
    position = begin = start
    # The declaration so far: "()" and "[]" stand for what is in brackets.
    head = ""
    body = None
    while mark := _MARK.search(text, position, end):
        if not head.strip() and (label := _LABEL.match(text, position, end)):
            begin = position = label.end()
            head = ""
            continue
        head += text[position : mark.start()]
        position = mark.end()
        if mark[0] in "([":
            position = closing(text, mark.start())
            is_call = re.fullmatch(r"\s*(\w+)\s*", head)
            head += "()" if mark[0] == "(" else "[]"
            if is_call and is_call[1] in macros and text[position:end].lstrip()[:1] not in ";{=,(":
                yield _Declaration(begin, position, "macro", (), frozenset({is_call[1]}))
                begin, head = position, ""
            continue
        if mark[0] in ")]}":
            raise ValueError(mark[0])
        plain = _ATTRIBUTES.sub(" ", _without_template(head))
        if mark[0] == "{":
            if _SCOPE.search(plain.rstrip() + " ") and "(" not in plain:
                inner = closing(text, mark.start())
                yield from _declarations(text, position, inner - 1, macros)
                begin = position = inner
                head = ""
                continue
            position = closing(text, mark.start())
            is_operator = re.search(r"\boperator\b", plain) is not None
            is_value = not is_operator and _INITIALISER.search(plain) is not None
            is_type = _TYPE.match(plain) is not None and "(" not in plain
            # `Pair() : a{1}, b{2} {}`: the first braces belong to a member.
            is_member = re.search(r"\(\)\s*:.*[\w>]\s*$", plain, re.S) is not None
            if is_value or is_type or is_member or "(" not in plain:
                if is_type and body is None:
                    body = mark.end(), position - 1
                head += "{}"
                continue
            yield _declared(text, begin, position, plain, (mark.end(), position - 1), macros)
        else:
            if head.strip():
                yield _declared(text, begin, position, plain, body, macros)
        begin, head, body = position, "", None
    if head.strip() or text[position:end].strip():
        if not in_class:
            raise ValueError("end")


def _declared(text, start, end, head, body, macros) -> _Declaration:
    """The declaration text[start:end]. head: its part in front of a function's body."""
    start += len(text[start:end]) - len(text[start:end].lstrip())
    words = frozenset(re.findall(r"\w+", head))

    def declaration(kind, *names):
        return _Declaration(start, end, kind, tuple(names), words, body)

    plain = head.strip()
    if used := re.match(r"using\s+namespace\s+([\w:]+)", plain):
        return declaration("namespace", used[1].split("::")[-1])
    if alias := re.match(r"(?:using|namespace)\s+(?:typename\s+)?(?:[\w:]*::)?\s*(\w+)", plain):
        return declaration("names", alias[1])
    if plain.startswith("static_assert"):
        return declaration("assertion")
    if plain.startswith("typedef"):
        pointers = re.findall(r"\(\s*[\w:]*\s*\*\s*(\w+)\s*\)\s*\(", text[start:end])
        behind = plain.rpartition("{}")[2].split(",")
        last = [names[-1] for part in behind if (names := re.findall(r"\w+", part))]
        tag = re.match(r"typedef\s+(?:struct|class|union|enum)\s+(\w+)", plain)
        return declaration(
            "type", *pointers, *last, *([tag[1]] if tag else []), *_enumerators(text, body, words)
        )
    if body and _TYPE.match(plain) and "(" not in plain:
        before, _, behind = plain.partition("{}")
        tag = re.search(r"\b(?:struct|class|union|enum)\b[\s\[\]]*([^:{<]*)", before)
        names = re.findall(r"\w+", tag[1]) if tag else []
        names += re.findall(r"\w+", behind)
        return declaration("type", *names, *_enumerators(text, body, words))
    if re.fullmatch(r"(?:friend\s+)?(?:struct|class|union|enum)\s+(?:class\s+)?\w+", plain):
        return declaration("type", plain.split()[-1])
    is_operator = "operator" in words
    value = None if is_operator else _INITIALISER.search(plain)
    before = plain[: value.start()] if value else plain
    function = _FUNCTION.search(before)
    if function and (body is None or not _TYPE.match(plain) or "(" in plain):
        owner = re.search(r"(\w+)\s*(?:<[^()]*>)?\s*::\s*$", before[: function.start()])
        name = owner[1] if owner else "operator" if is_operator else function[1]
        return declaration("function", name)
    names = []
    for part in split_list(before if "," not in plain else re.sub(r"\{\}", "", plain)):
        declarator = re.search(r"(\w+)\s*(?:\[\]\s*)*(?:[={(:].*)?$", part.strip(), re.S)
        if declarator:
            names.append(declarator[1])
    return declaration("variable", *names)


def _enumerators(text, body, words) -> list[str]:
    if body is None or "enum" not in words:
        return []
    parts = split_list(text[body[0] : body[1]])
    return [match[0] for part in parts if (match := re.match(r"\w+", part))]


@functools.lru_cache(maxsize=8)
def declared_names(source: str) -> frozenset[str]:
    """The names of what CUDA C text declares, outside of functions and classes, and its macros."""
    text = active_text(source, GPU_MACROS, one_branch=True)
    macros = _Macros(without_comments(source))
    names = {n for d in _declarations(text, 0, len(text), macros.functions) for n in d.names}
    return frozenset(names | macros.bodies.keys())


class _Macros:
    """The macros of a text: function-like ones, and the replacement of each."""

    def __init__(self, text: str):
        self.bodies: dict[str, str] = {}
        functions = set()
        for directive in DIRECTIVE.finditer(text):
            if directive[1] == "define" and (
                macro := re.match(r"\s*(\w+)(\(?)(.*)", directive[2], re.S)
            ):
                self.bodies[macro[1]] = f"{self.bodies.get(macro[1], '')} {macro[3]}"
                if macro[2]:
                    functions.add(macro[1])
        self.functions = frozenset(functions)

    def words(self, words) -> set[str]:
        """These words, and the words in replacements of macros among them."""
        result: set[str] = set()
        waiting = list(words)
        while waiting:
            word = waiting.pop()
            if word not in result:
                result.add(word)
                if word in self.bodies:
                    waiting += _WORD.findall(self.bodies[word])
        return result


class _Text:
    """CUDA C with its declarations and the references between them.

    Args:
        source: CUDA C.
        ours: see `device_code`.

    Raises:
        ValueError: where brackets do not match.
    """

    def __init__(self, source: str, ours: int = 0):
        self.ours = ours
        self.macros = _Macros(without_comments(source))
        # The text as a GPU compiles it, so that brackets match, and with the branches of a CPU.
        self.view = active_text(source, GPU_MACROS, one_branch=True)
        self.both = active_text(source)
        self.declarations = list(self._declarations(self.view))
        # Those branches alone, such as the #else of an `#ifdef __CUDA_ARCH__`.
        beside = merged = self.both
        for d in self.declarations:
            beside = beside[: d.start] + " " * (d.end - d.start) + beside[d.end :]
            merged = merged[: d.start] + self.view[d.start : d.end] + merged[d.end :]
        self.outside: set[str] = set()
        try:
            self.declarations += self._declarations(beside)
            self.view = merged
        except ValueError:
            self.outside = self.macros.words(_WORD.findall(beside))
        self.by_name: dict[str, list[_Declaration]] = {}
        for d in self.declarations:
            for name in d.names:
                self.by_name.setdefault(name, []).append(d)
        self.theirs = {
            (name, _parameters(self.view, d))
            for d in self.declarations
            if d.start >= ours
            for name in d.names
        }

    def _declarations(self, text):
        return _declarations(text, 0, len(text), self.macros.functions)

    def is_on_device(self, declaration: _Declaration) -> bool:
        words = self.macros.words(declaration.words)
        return not words.isdisjoint((*_SPACES, "constexpr"))

    def may_stay(self, declaration: _Declaration) -> bool:
        """True if a declaration that is needed can be compiled for the device."""
        if declaration.start < self.ours and any(
            (name, _parameters(self.view, declaration)) in self.theirs for name in declaration.names
        ):
            return False
        if declaration.kind == "variable" and not declaration.words.isdisjoint(
            # A texture reference stays, so that it can be refused by name.
            ("const", "texture", "surface")
        ):
            return True
        is_code = declaration.kind in ("function", "variable")
        return not is_code or self.is_on_device(declaration)

    def is_root(self, declaration: _Declaration) -> bool:
        """True if a declaration stays even if nothing refers to it."""
        if declaration.start < self.ours or not self.may_stay(declaration):
            return False
        words = self.macros.words(declaration.words)
        kind = declaration.kind
        if kind == "namespace":
            name = declaration.names[0]
            if name in _DEVICE_NAMESPACES:
                return True
            return re.search(rf"\bnamespace\s+{name}\b\s*\{{", self.view) is not None
        if kind == "macro":
            body = " ".join(self.macros.bodies.get(word, "") for word in declaration.words)
            return not words.isdisjoint(_SPACES) or not _HOST_ONLY.search(body)
        if kind == "function":
            return "__global__" in words or "operator" in words
        return kind == "variable" and not words.isdisjoint(_SPACES)

    def references(self, start: int, end: int) -> set[str]:
        return self.macros.words(_WORD.findall(self.both[start:end]))

    def members(self, declaration: _Declaration) -> list[_Declaration]:
        """The member functions of a class that only a host can run."""
        if declaration.kind != "type" or not declaration.body or "enum" in declaration.words:
            return []
        macros = self.macros.functions
        try:
            members = list(_declarations(self.view, *declaration.body, macros, in_class=True))
        except ValueError:
            return []
        return [
            member
            for member in members
            if member.kind == "function"
            and not self.is_on_device(member)
            and _HOST_ONLY.search(self.view, member.start, member.end)
        ]

    def needed_by(self, roots: list[_Declaration]) -> dict[int, _Declaration]:
        """Start -> declaration, of the roots and of all they refer to, directly or indirectly."""
        needed = {root.start: root for root in roots}
        waiting = list(roots)
        seen: set[str] = set()
        names = set(self.outside)
        while names or waiting:
            if waiting:
                declaration = waiting.pop()
                start = declaration.start
                for member in self.members(declaration):
                    names |= self.references(start, member.start)
                    start = member.end
                names |= self.references(start, declaration.end)
            for name in names - seen:
                for d in self.by_name.get(name, ()):
                    if d.start not in needed and self.may_stay(d):
                        needed[d.start] = d
                        waiting.append(d)
            seen |= names
            names = set()
        return needed


@functools.lru_cache(maxsize=8)
def device_code(source: str, ours: int = 0) -> tuple[str, LeftOut]:
    """(the source with blanks for what no kernel needs, what was left out of it).

    Args:
        source: CUDA C. Where brackets do not match, it is returned as it is.
        ours: where the caller's own text begins. In front of it stand helpers, which give way to
            declarations of the caller with the same name and parameters.
    """
    try:
        text = _Text(source, ours)
    except ValueError:
        return source, LeftOut()
    needed = text.needed_by([d for d in text.declarations if text.is_root(d)])
    for d in text.declarations:
        if d.kind == "assertion" and all(
            other.start in needed
            for word in text.references(d.start, d.end)
            for other in text.by_name.get(word, ())
        ):
            needed[d.start] = d
    ranges = [(d.start, d.end) for d in text.declarations if d.start not in needed]
    ranges += [(m.start, m.end) for d in needed.values() for m in text.members(d)]
    # nvcc accepts these words only with an option, and they mean nothing in device code.
    ranges += [(m.start(1), m.end(1)) for m in _LAMBDA_SPACE.finditer(text.view)]
    # NVRTC accepts a floating-point constant in device code only as constexpr.
    constants = {
        constant.start(): constant.end()
        for d in needed.values()
        if d.kind == "variable" and not text.is_on_device(d)
        if (constant := re.compile(r"\bconst\b").search(text.view, d.start, d.end))
        if re.match(r"[^*;]*=", text.view[d.start : d.end])
    }
    of_host = [d for d in text.declarations if d.start >= ours and not text.may_stay(d)]
    functions = [d.names[0] for d in of_host if d.kind == "function" and d.body]
    variables = [name for d in of_host if d.kind == "variable" for name in d.names]
    left_out = LeftOut(tuple(dict.fromkeys(functions)), tuple(dict.fromkeys(variables)))
    return _blanked(source, ranges, constants), left_out


@dataclass(frozen=True)
class Variable:
    """A variable in device memory, as a source declares it.

    Attributes:
        name: of it. path: its qualified name in C++. position: where its declaration begins.
        ctype: of one element. lengths: those of its array, as they are written.
        is_constant: it is `__constant__`. has_value: its declaration sets it.
    """

    name: str
    path: str
    position: int
    ctype: str
    lengths: tuple[str, ...]
    is_constant: bool
    has_value: bool


_NO_TYPE = re.compile(
    r"\b(?:__align__|alignas|__attribute__)\s*\((?:[^()]|\([^()]*\))*\)|"
    r"\b(?:static|inline|volatile|__(?:device|constant|managed|restrict)__)\b"
)


@functools.lru_cache(maxsize=8)
def device_variables(source: str) -> tuple[Variable, ...]:
    """The variables in device memory that kernels and a host can set, in order."""
    if not re.search(r"\b__(?:device|constant|managed)__\b[^;(){}]*[;=\[]", source):
        return ()
    try:
        text = _Text(source)
    except ValueError:
        return ()
    variables = []
    for d in text.declarations:
        words = text.macros.words(d.words)
        if d.kind != "variable" or words.isdisjoint(("__device__", "__constant__", "__managed__")):
            continue
        if not words.isdisjoint(("const", "constexpr", "extern", "template")):
            continue
        declared = _NO_TYPE.sub(" ", text.view[d.start : d.end].rstrip(";"))
        scope = namespaces(text.view, d.start)
        ctype = ""
        for part in split_list(declared):
            declarator = DECLARATOR.fullmatch(re.split(r"[={(]", part)[0].strip())
            if declarator is None:
                break
            ctype = ctype or " ".join(declarator[1].split())
            name = declarator[2]
            lengths = tuple(re.findall(r"\[([^\]]*)\]", declarator[3]))
            is_constant = "__constant__" in words
            has_value = re.search(r"[={(]", part) is not None
            path = "::".join([*scope, name])
            variables.append(Variable(name, path, d.start, ctype, lengths, is_constant, has_value))
    return tuple(variables)


def needed_constants(source: str, kernel: str) -> tuple[str, ...]:
    """Names of the `__constant__` variables without a value that a kernel reads."""
    constants = [v for v in device_variables(source) if v.is_constant and not v.has_value]
    if not constants:
        return ()
    text = _Text(source)
    needed = text.needed_by(text.by_name.get(kernel, [])).values()
    # A declaration of several variables names them all.
    words = set().union(*(text.references(d.start, d.end) for d in needed if d.kind != "variable"))
    return tuple(v.name for v in constants if v.name in words)


def _parameters(text: str, declaration: _Declaration) -> tuple[str, ...] | None:
    """The types of a function's parameters, as they are written; None if it is no function."""
    if declaration.kind != "function":
        return None
    name = re.compile(rf"\b{declaration.names[0]}\s*\(").search(text, declaration.start)
    if name is None or name.start() >= declaration.end:
        return ()
    parts = split_list(text[name.end() : closing(text, name.end() - 1) - 1])
    return tuple(" ".join(re.sub(r"\b\w+\s*$", "", part).split()) for part in parts)


def _blanked(source: str, ranges: list[tuple[int, int]], constants: dict[int, int]) -> str:
    """The source with these ranges blanked, except for their directives.

    constants: start -> end of words that become `constexpr`.
    """
    plain = without_comments(source, strings=True)
    pieces = []
    position = 0
    for start, end in sorted([*ranges, *constants.items()]):
        if start < position:
            continue
        pieces.append(source[position:start])
        position = start
        if start in constants:
            pieces.append("constexpr")
            position = end
            continue
        for directive in DIRECTIVE.finditer(plain, start, end):
            pieces.append(_blank(source[position : directive.start()]))
            # A pragma belongs to the code.
            is_code = directive[1] in ("pragma", "include", "error", "warning")
            pieces.append(_blank(directive[0]) if is_code else directive[0])
            position = directive.end()
        pieces.append(_blank(source[position:end]))
        position = end
    return "".join([*pieces, source[position:]])


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)
