"""The package's docstrings, which are Markdown with sections, in reStructuredText for autodoc.

Args:                               also Attributes, Returns, Yields, Raises, Example
    model: an nn.Module             an argument
`code`, * a list, | a | table |     as in Markdown
    >>> code                        indented: a block of code
"""

import ast
import inspect
import re

INLINE = re.compile(r"(``.+?``|`[^`]+`)")
SPECIAL = re.compile(r"([\\*|`]|(?<=\w)_(?=\W|$)|<(?=\w))")
EMPHASIS = re.compile(r"(?<!\w)\\\*(\w(?:[\w -]*\w)?)\\\*(?!\w)")
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Warns|Examples?|Source|Note):$")
FIELDS = {"Args": "param", "Attributes": "ivar", "Raises": "raises", "Warns": "raises"}
ENTRY = re.compile(r"([*\w.]+(?:, [*\w.]+)*): +(\S.*)")
FIELD = re.compile(r"([*\w]+(?:, [*\w]+)*): +(\S.*)")


def inline(text: str) -> str:
    """Words with `code`; no other character means anything."""
    parts = INLINE.split(text)
    for i, part in enumerate(parts):
        if i % 2:
            code = part.strip("`")
            # A role needs no space around it, unlike double backticks.
            parts[i] = ":code:`" + code.replace("\\", "\\\\") + "`\\ "
        else:
            parts[i] = EMPHASIS.sub(r"*\1*", SPECIAL.sub(r"\\\1", part))
    return "".join(parts).removesuffix("\\ ")


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def blocks(lines):
    """Groups of lines of one kind: "text", "code", "table", "list"."""
    group, kind = [], None
    for line in [*lines, ""]:
        if not line.strip():
            if kind == "code":
                group.append("")
                continue
            new = None
        elif line.startswith("    ") and kind in (None, "code"):
            new = "code"
        elif line.startswith("|"):
            new = "table"
        elif re.match(r"[*-] ", line):
            new = "list"
        elif line.startswith(" ") and kind in ("list", "text", "fields"):
            new = kind
        else:
            new = "text"
        if new != kind and group:
            yield kind, group
            group = []
        kind = new
        if new:
            group.append(line)
    if group:
        yield kind, group


def language(lines) -> str:
    text = inspect.cleandoc("\n".join(["", *lines]))
    try:
        return "python" if ">>>" in text or ast.parse(text) else "text"
    except SyntaxError:
        return "text"


def table(lines):
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rows = [row for row in rows if not all(re.fullmatch(r":?-+:?(\|:?-+:?)*", c) for c in row)]
    yield ".. list-table::"
    yield "   :header-rows: 1"
    yield ""
    for row in rows:
        for i, cell in enumerate(row):
            yield f"   {'* -' if i == 0 else '  -'} {inline(cell)}"


def fields_or_text(lines, names):
    """Lines "name: what it is", with what hangs below them, are fields; others are paragraphs."""
    parts = []
    for line in lines:
        found = FIELD.match(line)
        if found and all(name.strip("*") in names for name in found[1].split(", ")):
            # A space would end the name and begin a type.
            name = found[1].replace(", ", ",").replace("*", r"\*")
            parts.append((f":param {name}: ", [found[2]]))
        elif parts and (line.startswith(" ") or not parts[-1][0]):
            parts[-1][1].append(line.strip())
        else:
            parts.append(("", [line.strip()]))
    for field, words in parts:
        if not field:
            yield ""
        yield field + inline(" ".join(words))
        if not field:
            yield ""


def sections(lines):
    """(title, its lines without their indent); the title is None for what stands in no section."""
    title, body = None, []
    for line in lines:
        found = SECTION.match(line)
        ends = title and line.strip() and not line.startswith(" ")
        if found or ends:
            yield title, inspect.cleandoc("\n".join(["", *body])).split("\n") if title else body
            title, body = (found[1], []) if found else (None, [line])
        else:
            body.append(line)
    yield title, inspect.cleandoc("\n".join(["", *body])).split("\n") if title else body


def entries(kind, lines):
    """Fields from "name: words", whose words go on in lines with an indent."""
    words: "list[list[str]]" = []
    for line in lines:
        found = ENTRY.match(line)
        if found:
            # A space would end the name and begin a type.
            name = found[1].replace(", ", ",").replace("*", r"\*")
            words.append([f":{kind} {name}: ", found[2]])
        elif words:
            words[-1].append(line.strip())
        elif line.strip():
            words.append(["", line.strip()])
    for first, *rest in words:
        yield first + inline(" ".join(filter(None, rest)))


def restructured(lines, names=()) -> "list[str]":
    """A docstring's lines in reStructuredText; names: of the arguments or attributes."""
    out: "list[str]" = []
    for title, body in sections(lines):
        if title in FIELDS:
            out += ["", *entries(FIELDS[title], body), ""]
        elif title in ("Returns", "Yields"):
            out += ["", f":{title.lower()}: {inline(' '.join(' '.join(body).split()))}", ""]
        elif title:
            out += ["", f".. rubric:: {title}", ""]
            if title.startswith("Example"):
                body = ["    " + line if line else "" for line in body]
            out += without_sections(body, names)
        else:
            out += without_sections(body, names)
    return out


def without_sections(lines, names=()) -> "list[str]":
    out = []
    for kind, group in blocks(lines):
        if kind == "code":
            out += [f".. code-block:: {language(group)}", ""]
            out += group
        elif kind == "table":
            out += table(group)
        elif kind == "list":
            items = re.split(r"^[*-] ", "\n".join(group), flags=re.MULTILINE)[1:]
            out += ["* " + inline(" ".join(item.split())) for item in items]
        else:
            out += fields_or_text(group, names)
        out.append("")
    return out


def names_of(what, thing) -> "set[str]":
    names = set()
    try:
        names |= set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        pass
    if what in ("class", "exception"):
        for base in thing.__mro__:
            names |= set(vars(base).get("__annotations__", {})) | set(vars(base))
            init = vars(base).get("__init__")
            names |= set(getattr(getattr(init, "__code__", None), "co_names", ()))
    return names


def convert(app, what, name, thing, options, lines):
    lines[:] = restructured(lines, names_of(what, thing))


def setup(app):
    app.connect("autodoc-process-docstring", convert)
