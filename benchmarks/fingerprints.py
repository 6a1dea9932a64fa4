"""What a result has measured: fingerprints of Python modules and kernels, and which changed.

>>> fingerprints("clip", {'kernels_cu/clip.cu'})
{'benchmarks/clip.py': '9f0c...', ..., 'kernels_cu/clip.cu': 'c3d7...', ...}
>>> machine_code(kernels_in_use(), "sm_90")
{'arch': 'sm_90', 'nvrtc': '13.0', 'kernels': [{'file': 'kernels_cu/clip.cu', ..., 'code': 'e1..'}]}
>>> changed(json.loads(path.read_text()))
['gpuaccel/optim/clip.py']

The modules are derived: the script and the modules that it imports, transitively. `sys.modules`
would name too many, because `import gpuaccel` imports nearly all of the package, and too few,
because most scripts measure in other processes. Imports inside of functions do not count: they are
of the CPU executor and of notebooks, which do not run in a benchmark on a GPU.

A module's fingerprint is a hash of its syntax tree, without docstrings and annotations. Its imports
are the names that its code uses, sorted: an import that nothing uses, the order of imports, and
what is only imported for annotations do not count. Comments and layout are not in the tree.
`ast.dump` is not used because it writes the same tree differently in other versions of Python.
Functions of benchmarks/ named show_* or show print what was measured and do not count.

The kernels are those that the script and its workers have made. The imports would name nearly all
of them, because models.py imports every layer. A kernel's fingerprint is a hash of its machine
code, compiled for the architecture of the result, which needs no GPU. Another version of NVRTC
makes another machine code of the same kernel; with another version than that of the result, and for
results without machine code, the tokens of kernel files are compared. Machine code is compared only
where tokens differ.
"""

import ast
import functools
import gc
import hashlib
import pathlib
import re
import struct
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
# These write and print results, and choose sizes, which a result names; they measure nothing.
UNMEASURED = (
    *(f"benchmarks/{name}.py" for name in ("common", "fingerprints", "memory", "power")),
    # The version.
    "gpuaccel/__init__.py",
)
# Modules that hand on names of others, beside each __init__.py.
FACADES = ("gpuaccel/public.py",)
# That staleness() lists.
MOST_NAMES = 6
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fingerprints(script: str, kernels, root: pathlib.Path = ROOT) -> "dict[str, str]":
    """Path -> fingerprint of what a benchmark measures.

    script: benchmarks/<script>.py and the modules that it imports
    kernels: paths of kernel files; the headers of all kernels are added"""
    modules = {}
    pending = [f"benchmarks/{script}.py"]
    while pending:
        name = pending.pop()
        if name not in modules and name not in UNMEASURED and (root / name).is_file():
            modules[name] = (root / name).read_text()
            pending += imported(modules[name], name, root)
    result = {
        name: module_fingerprint(text, name.startswith("benchmarks/"))
        for name, text in modules.items()
    }
    files = [root / name for name in kernels]
    if files:
        files += (root / "kernels_cu").glob("*.cuh")
    for path in filter(pathlib.Path.is_file, files):
        result[str(path.relative_to(root))] = _hash(kernel_tokens(path.read_text()))
    return dict(sorted(result.items()))


def changed(result: dict, root: pathlib.Path = ROOT) -> "list[str]":
    """Modules, kernels and kernel files that changed, appeared or disappeared since.

    Older results hold a hash of each file instead, which changes with any edit of the file."""
    if "fingerprints" in result:
        before = result["fingerprints"]
        kernels = [name for name in before if name.endswith(".cu")]
        now = fingerprints(result["benchmark"], kernels, root)
    else:
        before, now = result["sources"], _file_hashes(result["source_patterns"], root)
    names = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    files = {name for name in names if name.startswith("kernels_cu/")}
    if files and (kernels := changed_kernels(result.get("machine_code"), files, root)) is not None:
        names = names - files | kernels
    return sorted(names)


def staleness(result: dict, root: pathlib.Path = ROOT) -> str:
    """Which changes make a result stale, as a sentence; "" for a result that is not stale."""
    parts = [
        name.removeprefix("gpuaccel/").removeprefix("kernels_cu/") for name in changed(result, root)
    ]
    if not parts:
        return ""
    if len(parts) > MOST_NAMES:
        parts[MOST_NAMES - 1 :] = [f"{len(parts) - MOST_NAMES + 1} others"]
    return (
        f"measured on {result['date']}, before changes to {', '.join(parts)}: "
        f"run make bench ONLY={result['benchmark']}"
    )


# ---- Python modules -----------------------------------------------------------------------------


@functools.cache
def module_fingerprint(text: str, script: bool = False) -> str:
    """A hash of a module's syntax tree.

    script: a module of benchmarks/, whose functions that show results do not count."""
    module = ast.Module([node for node in _parse(text).body if not (script and _shows(node))], [])
    used = names_used(module)
    imports = {
        f"{name} = {source}"
        for node in ast.walk(module)
        for name, source in _bound(node)
        if name in used
    }
    return _hash("\n".join([tree_text(module), *sorted(imports)]))


def imported(text: str, name: str, root: pathlib.Path) -> "list[str]":
    """Modules of gpuaccel and of benchmarks/ that module `name` imports outside of functions.

    What its code does not use does not count. A name that a room's __init__.py hands on is of the
    module that defines it, and so is `ga.name`."""
    tree = _parse(text)
    used = names_used(tree)
    paths = []
    for node in tree.body:
        for alias in getattr(node, "names", []) if isinstance(node, IMPORTS) else []:
            bound = _name_of(alias)
            if bound not in used:
                continue
            if isinstance(node, ast.ImportFrom):
                paths += _definition(_base(node, name), alias.name, root)
            elif alias.name == "gpuaccel":
                for part in ast.walk(tree):
                    if isinstance(part, ast.Attribute) and _is_name(part.value, bound):
                        paths += _definition("gpuaccel.public", part.attr, root)
            else:
                paths += _definition(alias.name, None, root)
    return paths


def _base(node: ast.ImportFrom, name: str) -> str:
    """The module that `from ... import` names, in the module with the path `name`."""
    package = list(pathlib.PurePath(name).parts[:-1])
    above = package[: len(package) + 1 - node.level] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def _definition(module: str, member: "str | None", root: pathlib.Path) -> "list[str]":
    """The path of the module that defines a member of a module; [] for modules of others.

    member: None for the module itself"""
    # A script finds its neighbours in benchmarks/ by their bare names.
    folder = "" if module.split(".")[0] == "gpuaccel" else "benchmarks/"
    path = f"{folder}{module.replace('.', '/')}"
    if member and (root / path / f"{member}.py").is_file():
        return [f"{path}/{member}.py"]
    if not (root / f"{path}.py").is_file():
        path += "/__init__"
    path += ".py"
    if not (root / path).is_file():
        return []
    if path not in FACADES and not path.endswith("/__init__.py"):
        return [path]
    for node in _parse((root / path).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _name_of(alias) == member:
                    return _definition(_base(node, path), alias.name, root)
    return [] if member is None or path in FACADES else [path]


@functools.cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


IMPORTS = (ast.Import, ast.ImportFrom)


def names_used(node: ast.AST) -> "set[str]":
    """Names that code reads, those of __all__ included, and those of annotations not."""
    if isinstance(node, ast.Assign) and any(_is_name(t, "__all__") for t in node.targets):
        return {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
    if isinstance(node, ast.Name):
        return {node.id}
    if _is_unmeasured(node):
        return set()
    used = set()
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for part in value if isinstance(value, list) else [value]:
                used |= names_used(part) if isinstance(part, ast.AST) else set()
    return used


def _is_unmeasured(node) -> bool:
    """An import, and what only type checkers read."""
    return isinstance(node, IMPORTS) or (
        isinstance(node, ast.If) and _is_name(node.test, "TYPE_CHECKING")
    )


def _is_name(node, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _name_of(alias: ast.alias) -> str:
    """The name that an import binds."""
    return alias.asname or alias.name.split(".")[0]


def _bound(node) -> "list[tuple[str, str]]":
    """(name, what it is) of each name that an import binds."""
    if isinstance(node, ast.Import):
        return [(_name_of(alias), alias.name) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        return [(_name_of(alias), f"{base} {alias.name}") for alias in node.names]
    return []


def tree_text(node) -> str:
    """A syntax tree without docstrings, annotations and imports, as text that no Python version
    changes."""
    if isinstance(node, list):
        return f"[{', '.join(tree_text(part) for part in node if not _is_unmeasured(part))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for field, value in ast.iter_fields(node):
        # `kind` tells u"" from "". Other versions of Python leave out fields that are empty.
        if field in ("annotation", "returns", "type_comment", "kind") or value in (None, []):
            continue
        if field == "body" and isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            value = value[1:]
        fields.append(f"{field}={tree_text(value)}")
    return f"{type(node).__name__}({', '.join(fields)})"


def _shows(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef) and bool(re.match(r"show(_|$)", statement.name))


# ---- kernels ------------------------------------------------------------------------------------

_TOKENS = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    |"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'
    |\.?\d(?:[eEpP][+-]|[\w.'])*|\w+
    |<<=|>>=|<<|>>|->|\+\+|--|&&|\|\||::|\#\#|[-+*/%&|^!=<>]=
    |(?P<space>\s+)|.""",
    re.DOTALL | re.VERBOSE,
)


def kernel_tokens(text: str) -> str:
    """CUDA C without comments and layout: a space between tokens, a line for each directive."""
    lines = [""]
    # A backslash continues a directive on the next line.
    for line in re.sub(r"\\\n", " ", _without_comments(text)).split("\n"):
        tokens = " ".join(m[0] for m in _TOKENS.finditer(line) if not m["space"])
        if tokens.startswith("#"):
            lines += [tokens, ""]
        else:
            lines[-1] = f"{lines[-1]} {tokens}".strip()
    return "\n".join(filter(None, lines))


def _without_comments(text: str) -> str:
    return _TOKENS.sub(lambda m: " " if m["comment"] else m[0], text)


class KernelUse(NamedTuple):
    """A kernel as it is compiled. file: below the repository. defines: pairs of macro and value."""

    file: str
    name: str
    defines: tuple
    options: tuple


def kernels_in_use() -> "set[KernelUse]":
    """The kernels of kernels_cu that this process has made."""
    module = sys.modules.get("gpuaccel.compiler.kernel")
    if module is None:
        return set()
    kernels = [item for item in gc.get_objects() if type(item) is module.Kernel]
    return {
        KernelUse(k.filename, k.name, tuple(sorted(k.defines.items())), tuple(k.options))
        for k in kernels
        if k.filename.startswith("kernels_cu/")
    }


def machine_code(kernels, arch: str, root: pathlib.Path = ROOT) -> dict:
    """The kernels with a hash of the machine code of each, and which NVRTC has made it."""
    rows = [
        {
            **use._asdict(),
            "defines": dict(use.defines),
            "options": list(use.options),
            "code": kernel_code(use, arch, root),
        }
        for use in sorted(kernels)
    ]
    return {"arch": arch, "nvrtc": nvrtc_version(), "kernels": rows}


def changed_kernels(before: "dict | None", files, root: pathlib.Path) -> "set[str] | None":
    """Which kernels have another machine code; None where this NVRTC cannot tell.

    before: a result's machine_code(). files: those whose tokens changed; headers are in all."""
    if before is None or not before["kernels"] or before["nvrtc"] != nvrtc_version():
        return None
    all_files = any(name.endswith(".cuh") for name in files)
    changed = set()
    for row in before["kernels"]:
        if all_files or row["file"] in files:
            defines = tuple(sorted(row["defines"].items()))
            use = KernelUse(row["file"], row["name"], defines, tuple(row["options"]))
            if kernel_code(use, before["arch"], root) != row["code"]:
                changed.add(f"{use.file}: {use.name}")
    return changed


def kernel_code(use: KernelUse, arch: str, root: pathlib.Path = ROOT) -> "str | None":
    """A hash of one kernel's machine code; None where it does not compile."""
    # Not at the top: versions.py imports another gpuaccel than this one's.
    from gpuaccel.compiler import Kernel
    from gpuaccel.errors import GpuaccelError

    try:
        text = (root / use.file).read_text()
        kernel = Kernel.from_source(
            text, use.name, use.file, dict(use.defines), use.options, learner=False
        )
        used = kernel.resources(arch)
        sizes = used.registers, used.shared_bytes, used.stack_bytes
        return _hash(code_of(kernel.cubin(arch), use.name) + repr(sizes).encode())
    except (OSError, GpuaccelError):
        return None


def code_of(cubin: bytes, kernel: str) -> bytes:
    """What of a cubin is executed when a kernel runs.

    Its instructions and constants, those of functions that several kernels call, and tables of
    constants. Other kernels of the file do not count."""
    found = sections(cubin)
    # A kernel has parameters, which are its constant bank 0.
    bank = ".nv.constant0."
    kernels = {name[len(bank) :] for name in found if name.startswith(bank)}
    parts = []
    for name, content in found.items():
        match = re.match(r"(\.text|\.nv\.(?:shared|local|constant\d+|global)[^.]*)(?:\.|$)", name)
        owner = match and name[match.end() :]
        if match and (owner == kernel or owner not in kernels):
            parts.append(f"{name} {len(content)} ".encode() + content)
    return b"\n".join(sorted(parts))


def sections(elf: bytes) -> "dict[str, bytes]":
    """Name -> content of each section of a 64-bit ELF file; zeros where the file holds none."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<2I4Q", elf, table + i * size) for i in range(count)]
    first = headers[names][4]
    result = {}
    for name, kind, _, _, offset, length in headers:
        words = elf[first + name : elf.index(b"\0", first + name)].decode()
        # 8: SHT_NOBITS.
        result[words] = bytes(length) if kind == 8 else elf[offset : offset + length]
    return result


def nvrtc_version() -> "str | None":
    """As 12.9; None without NVRTC."""
    from gpuaccel.compiler import nvrtc
    from gpuaccel.errors import BackendError

    try:
        return ".".join(map(str, nvrtc.library().version))
    except BackendError:
        return None


# ---- hashes -------------------------------------------------------------------------------------


def _hash(text: "str | bytes") -> str:
    """The first 16 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def _file_hashes(patterns, root: pathlib.Path) -> "dict[str, str]":
    """Path below root -> hash of the file's bytes, for glob patterns."""
    paths = {path for pattern in patterns for path in root.glob(pattern)}
    return {str(path.relative_to(root)): _hash(path.read_bytes()) for path in paths}
