"""The package's docstrings, which are Markdown, in reStructuredText for autodoc.

model: an nn.Module                 an argument
`code`, * a list, | a | table |     as in Markdown
    >>> code                        indented: a block of code
"""

import inspect
import re

INLINE = re.compile(r"(``.+?``|`[^`]+`)")
SPECIAL = re.compile(r"([\\*|`]|(?<=\w)_(?=\W|$)|<(?=\w))")
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
            parts[i] = SPECIAL.sub(r"\\\1", part)
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


def restructured(lines, names=()) -> "list[str]":
    """A docstring's lines in reStructuredText; names: of the arguments or attributes."""
    out = []
    for kind, group in blocks(lines):
        if kind == "code":
            out += [".. code-block:: " + ("python" if ">>>" in group[0] else "text"), ""]
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
