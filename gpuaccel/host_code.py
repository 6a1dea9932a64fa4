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
from dataclasses import dataclass, field

from .source import DIRECTIVE, GPU_MACROS, active_text, closing, split_list, without_comments

_WORD = re.compile(r"(?<![\w.])(?<!->)[A-Za-z_]\w*")
_MARK = re.compile(r"[;{}()\[\]]")
_SCOPE = re.compile(r'(?:\bnamespace\b[\s\w:]*|\bextern\s+"C"\s*)$')
_LABEL = re.compile(r"\s*(?:public|private|protected)\s*:(?!:)|\s*;")
_SPACES = re.compile(r"\b__(?:global|device|constant|shared|managed)__\b")
_ATTRIBUTES = re.compile(
    r"\b(?:__launch_bounds__|__cluster_dims__|__block_size__|__maxnreg__|__attribute__|__align__|"
    r"alignas|__declspec|decltype|explicit)\s*\(\)|\[\]\[\]"
)
_TYPE = re.compile(r"^[\w\s:]*\b(?:struct|class|union|enum)\b")
_INITIALISER = re.compile(r"(?<![=!<>+\-*/%&|^])=(?!=)")
_FUNCTION = re.compile(r"(~?\w+|\boperator\b[^()]*(?:\(\))?)\s*\(\)")
# What only a host has, in a function of a class that does not say where it runs.
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

    functions: "tuple[str, ...]" = ()
    variables: "tuple[str, ...]" = ()
    headers: "tuple[str, ...]" = ()

    def __str__(self):
        others = len(set(self.functions) - {"main"})
        parts = ["main"] if "main" in self.functions else []
        if others:
            parts.append(f"{others} host function{'s' if others > 1 else ''}")
        parts += [f"{name} (not found)" for name in self.headers]
        return ", ".join(parts)


@dataclass
class _Declaration:
    """What a declaration says.

    Attributes:
        start, end: where it stands. names: what it declares. kind: "function", "variable", "type",
        "names" (aliases), "namespace" (using namespace), "assertion" or "macro" (a call of one).
        words: those in front of its body. body: where that begins and ends; None without one.
    """

    start: int
    end: int
    kind: str
    names: "tuple[str, ...]"
    words: "frozenset[str]" = frozenset()
    body: "tuple[int, int] | None" = None
    members: "list[_Declaration]" = field(default_factory=list)


def _without_template(head: str) -> str:
    """A declaration behind its `template <...>`."""
    while match := re.match(r"\s*template\s*<", head):
        depth = 1
        position = match.end()
        while depth and position < len(head):
            depth += {"<": 1, ">": -1}.get(head[position], 0)
            position += 1
        head = head[position:]
    return head


def _declarations(
    text: str, start: int, end: int, macros: "frozenset[str]", in_class: bool = False
) -> "Iterator[_Declaration]":
    """The declarations in a part of a text without comments and directives.

    ValueError where brackets do not match.
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
    """What is declared by text[start:end]. head: its part in front of a function's body."""
    start += len(text[start:end]) - len(text[start:end].lstrip())
    words = frozenset(re.findall(r"\w+", head))

    def found(kind, *names):
        return _Declaration(start, end, kind, tuple(names), words, body)

    plain = head.strip()
    if used := re.match(r"using\s+namespace\s+([\w:]+)", plain):
        return found("namespace", used[1].split("::")[-1])
    if alias := re.match(r"(?:using|namespace)\s+(?:typename\s+)?(?:[\w:]*::)?\s*(\w+)", plain):
        return found("names", alias[1])
    if plain.startswith("static_assert"):
        return found("assertion")
    if plain.startswith("typedef"):
        pointers = re.findall(r"\(\s*[\w:]*\s*\*\s*(\w+)\s*\)\s*\(", text[start:end])
        behind = plain.rpartition("{}")[2].split(",")
        last = [names[-1] for part in behind if (names := re.findall(r"\w+", part))]
        tag = re.match(r"typedef\s+(?:struct|class|union|enum)\s+(\w+)", plain)
        return found(
            "type", *pointers, *last, *([tag[1]] if tag else []), *_enumerators(text, body, words)
        )
    if body and _TYPE.match(plain) and "(" not in plain:
        before, _, behind = plain.partition("{}")
        tag = re.search(r"\b(?:struct|class|union|enum)\b[\s\[\]]*([^:{<]*)", before)
        names = re.findall(r"\w+", tag[1]) if tag else []
        names += re.findall(r"\w+", behind)
        return found("type", *names, *_enumerators(text, body, words))
    if re.fullmatch(r"(?:friend\s+)?(?:struct|class|union|enum)\s+(?:class\s+)?\w+", plain):
        return found("type", plain.split()[-1])
    is_operator = "operator" in words
    value = None if is_operator else _INITIALISER.search(plain)
    before = plain[: value.start()] if value else plain
    function = _FUNCTION.search(before)
    if function and (body is None or not _TYPE.match(plain) or "(" in plain):
        owner = re.search(r"(\w+)\s*(?:<[^()]*>)?\s*::\s*$", before[: function.start()])
        name = owner[1] if owner else "operator" if is_operator else function[1]
        return found("function", name)
    names = []
    for part in split_list(before if "," not in plain else re.sub(r"\{\}", "", plain)):
        declarator = re.search(r"(\w+)\s*(?:\[\]\s*)*(?:[={(:].*)?$", part.strip(), re.S)
        if declarator:
            names.append(declarator[1])
    return found("variable", *names)


def _enumerators(text, body, words) -> "list[str]":
    if body is None or "enum" not in words:
        return []
    parts = split_list(text[body[0] : body[1]])
    return [match[0] for part in parts if (match := re.match(r"\w+", part))]


@functools.lru_cache(maxsize=8)
def declared_names(source: str) -> "frozenset[str]":
    """The names of what CUDA C text declares, outside of functions and classes, and its macros."""
    text = active_text(source, GPU_MACROS)
    macros = _Macros(without_comments(source))
    names = {n for d in _declarations(text, 0, len(text), macros.functions) for n in d.names}
    return frozenset(names | macros.bodies.keys())


class _Macros:
    """The macros of a text: which are called like functions, and what each stands for."""

    def __init__(self, text: str):
        self.bodies: "dict[str, str]" = {}
        functions = set()
        for directive in DIRECTIVE.finditer(text):
            if directive[1] == "define" and (
                macro := re.match(r"\s*(\w+)(\(?)(.*)", directive[2], re.S)
            ):
                self.bodies[macro[1]] = f"{self.bodies.get(macro[1], '')} {macro[3]}"
                if macro[2]:
                    functions.add(macro[1])
        self.functions = frozenset(functions)

    def words(self, words) -> "set[str]":
        """These words, and those that the macros among them stand for."""
        result: "set[str]" = set()
        waiting = list(words)
        while waiting:
            word = waiting.pop()
            if word not in result:
                result.add(word)
                if word in self.bodies:
                    waiting += _WORD.findall(self.bodies[word])
        return result


@functools.lru_cache(maxsize=8)
def device_code(source: str, ours: int = 0) -> "tuple[str, LeftOut]":
    """(the source with blanks for what no kernel needs, what was left out of it).

    Args:
        source: CUDA C. Where brackets do not match, it is returned as it is.
        ours: where the caller's own text begins. In front of it stand helpers, which give way to
            declarations of the caller with the same name and parameters.
    """
    plain = without_comments(source)
    macros = _Macros(plain)
    # As a GPU sees it, so that brackets match; and with what a CPU compiles.
    view = active_text(source, GPU_MACROS)
    both = active_text(source)
    try:
        declarations = list(_declarations(view, 0, len(view), macros.functions))
    except ValueError:
        return source, LeftOut()

    # What stands beside these, as behind the #else of an `#ifdef __CUDA_ARCH__`.
    beside = merged = both
    for declaration in declarations:
        start, end = declaration.start, declaration.end
        beside = beside[:start] + " " * (end - start) + beside[end:]
        merged = merged[:start] + view[start:end] + merged[end:]
    roots: "set[str]" = set()
    try:
        declarations += _declarations(beside, 0, len(beside), macros.functions)
        view = merged
    except ValueError:
        roots = macros.words(_WORD.findall(beside))

    @functools.cache
    def annotation(words):
        return macros.words(words)

    def is_on_device(declaration):
        words = annotation(declaration.words)
        return not words.isdisjoint(
            ("__device__", "__global__", "__constant__", "__shared__", "__managed__", "constexpr")
        )

    def references(start, end):
        return macros.words(_WORD.findall(both[start:end]))

    by_name: "dict[str, list[_Declaration]]" = {}
    for declaration in declarations:
        for name in declaration.names:
            by_name.setdefault(name, []).append(declaration)
    theirs = {
        (name, _parameters(view, declaration))
        for name, of_name in by_name.items()
        for declaration in of_name
        if declaration.start >= ours
    }
    kept: "set[int]" = set()
    needed: "list[_Declaration]" = []
    functions = []
    variables = []

    def keep(declaration):
        if declaration.start in kept:
            return
        if declaration.start < ours and any(
            (name, _parameters(view, declaration)) in theirs for name in declaration.names
        ):
            return
        kept.add(declaration.start)
        needed.append(declaration)

    def may_stay(declaration):
        if declaration.kind == "function":
            return is_on_device(declaration)
        if declaration.kind == "variable":
            # A texture reference stays, so that it can be refused by name.
            return is_on_device(declaration) or not declaration.words.isdisjoint(
                ("const", "texture", "surface")
            )
        return True

    def is_root(declaration):
        if declaration.start < ours:
            return False
        words = annotation(declaration.words)
        if declaration.kind == "namespace":
            name = declaration.names[0]
            return name in _DEVICE_NAMESPACES or re.search(rf"\bnamespace\s+{name}\b\s*\{{", view)
        if declaration.kind == "macro":
            body = " ".join(macros.bodies.get(word, "") for word in declaration.words)
            return _SPACES.search(" ".join(words)) or not _HOST_ONLY.search(body)
        if declaration.kind == "function":
            return "__global__" in words or "operator" in words and is_on_device(declaration)
        return declaration.kind == "variable" and _SPACES.search(" ".join(words))

    for declaration in declarations:
        if declaration.kind == "function" and not is_on_device(declaration):
            if declaration.body and declaration.start >= ours:
                functions.append(declaration.names[0])
        elif is_root(declaration):
            keep(declaration)
        elif declaration.kind == "variable" and not may_stay(declaration):
            variables += declaration.names
    waiting = [roots]
    dropped_members = []
    seen: "set[str]" = set()
    while needed or waiting:
        if needed:
            declaration = needed.pop()
            start = declaration.start
            if declaration.kind == "type" and declaration.body and "enum" not in declaration.words:
                members = _members(view, declaration, macros, is_on_device)
                for member in members:
                    waiting.append(references(start, member.start))
                    start = member.end
                dropped_members += members
            waiting.append(references(start, declaration.end))
        for name in waiting.pop() - seen:
            seen.add(name)
            for declaration in by_name.get(name, ()):
                if may_stay(declaration):
                    keep(declaration)
    for declaration in declarations:
        if declaration.kind == "assertion":
            words = references(declaration.start, declaration.end)
            if all(d.start in kept for word in words for d in by_name.get(word, ())):
                kept.add(declaration.start)
    ranges = [(d.start, d.end) for d in declarations if d.start not in kept]
    ranges += [(d.start, d.end) for d in dropped_members]
    # nvcc takes these words only with an option, and they say nothing in device code.
    ranges += [(m.start(1), m.end(1)) for m in _LAMBDA_SPACE.finditer(view)]
    # A floating-point constant is one for NVRTC only if it says so.
    constants = {
        constant.start(): constant.end()
        for d in declarations
        if d.start in kept and d.kind == "variable" and not is_on_device(d)
        if (constant := re.compile(r"\bconst\b").search(view, d.start, d.end))
        if re.match(r"[^*;]*=", view[d.start : d.end])
    }
    text = _blanked(source, ranges, constants)
    return text, LeftOut(tuple(dict.fromkeys(functions)), tuple(variables))


def _members(view, declaration, macros, is_on_device) -> "list[_Declaration]":
    """The functions in a class that only a host can run."""
    try:
        members = list(_declarations(view, *declaration.body, macros.functions, in_class=True))
    except ValueError:
        return []
    return [
        member
        for member in members
        if member.kind == "function"
        and not is_on_device(member)
        and _HOST_ONLY.search(view, member.start, member.end)
    ]


def _parameters(text: str, declaration: _Declaration) -> "tuple[str, ...] | None":
    """The types of a function's parameters, as they are written; None for no function."""
    if declaration.kind != "function":
        return None
    name = re.compile(rf"\b{declaration.names[0]}\s*\(").search(text, declaration.start)
    if name is None or name.start() >= declaration.end:
        return ()
    parts = split_list(text[name.end() : closing(text, name.end() - 1) - 1])
    return tuple(" ".join(re.sub(r"\b\w+\s*$", "", part).split()) for part in parts)


def _blanked(source: str, ranges: "list[tuple[int, int]]", constants: "dict[int, int]") -> str:
    """The source with blanks in these ranges, except for their directives.

    constants: start and end of words that become `constexpr`.
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
