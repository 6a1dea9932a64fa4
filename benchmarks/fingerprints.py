"""What a result has measured: fingerprints of Python modules and kernel files, and which changed.

>>> fingerprints("clip", {'kernels_cu/clip.cu'})
{'benchmarks/clip.py': '9f0c...', ..., 'kernels_cu/clip.cu': 'c3d7...', ...}
>>> changed(json.loads(path.read_text()))
['gpuaccel/optim/clip.py']

The modules are derived: the script and the modules that it imports, transitively. `sys.modules`
would name too many, because `import gpuaccel` imports nearly all of the package, and too few,
because most scripts measure in other processes. Imports inside of functions do not count: they are
of the CPU executor and of notebooks, which do not run in a benchmark on a GPU.

A module's fingerprint is a hash of its syntax tree, without docstrings and annotations. Comments
and layout are not in the tree. `ast.dump` is not used because it writes the same tree differently
in other versions of Python. Functions of benchmarks/ named show_* or show print what was measured
and do not count.

The kernel files are those whose kernels the script and its workers have made. The imports would
name nearly all of them, because models.py imports every layer.

A kernel file's fingerprint is a hash of its tokens. The cubin would be the better answer, and NVRTC
is deterministic; but another version of NVRTC makes another cubin of the same kernel, and results
come from machines with other versions.
"""

import ast
import functools
import gc
import hashlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# These write and print results; they measure nothing.
UNMEASURED = ("benchmarks/common.py", "benchmarks/fingerprints.py")
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
    """Modules and kernel files that changed, appeared or disappeared after the measurement.

    Older results hold a hash of each file instead, which changes with any edit of the file."""
    if "fingerprints" in result:
        before = result["fingerprints"]
        kernels = [name for name in before if name.endswith(".cu")]
        now = fingerprints(result["benchmark"], kernels, root)
    else:
        before, now = result["sources"], _file_hashes(result["source_patterns"], root)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def staleness(result: dict, root: pathlib.Path = ROOT) -> str:
    """Which changes make a result stale, as a sentence; "" for a result that is not stale."""
    parts = [
        name.removeprefix("gpuaccel/").removeprefix("kernels_cu/") for name in changed(result, root)
    ]
    if not parts:
        return ""
    return (
        f"measured on {result['date']}, before changes to {', '.join(parts)}: "
        f"run python benchmarks/{result['benchmark']}.py on a GPU"
    )


# ---- Python modules -----------------------------------------------------------------------------


@functools.cache
def module_fingerprint(text: str, script: bool = False) -> str:
    """A hash of a module's syntax tree.

    script: a module of benchmarks/, whose functions that show results do not count."""
    body = [node for node in _parse(text).body if not (script and _shows(node))]
    return _hash(tree_text(ast.Module(body, [])))


def imported(text: str, name: str, root: pathlib.Path) -> "list[str]":
    """Modules of gpuaccel and of benchmarks/ that module `name` imports outside of functions."""
    package = list(pathlib.PurePath(name).parts[:-1])
    paths = []
    for node in _parse(text).body:
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            wanted = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in wanted:
            # A script finds its neighbours in benchmarks/ by their bare names.
            folder = "" if module.startswith("gpuaccel.") else "benchmarks/"
            path = f"{folder}{module.replace('.', '/')}.py"
            if (root / path).is_file():
                paths.append(path)
    return paths


@functools.cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def tree_text(node) -> str:
    """A syntax tree without docstrings and annotations, as text that no Python version changes."""
    if isinstance(node, list):
        return f"[{', '.join(map(tree_text, node))}]"
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


def kernels_in_use() -> "set[str]":
    """Files of kernels_cu, below the repository, whose kernels this process has made."""
    module = sys.modules.get("gpuaccel.compiler.kernel")
    if module is None:
        return set()
    kernels = [item for item in gc.get_objects() if type(item) is module.Kernel]
    return {k.filename for k in kernels if k.filename.startswith("kernels_cu/")}


# ---- hashes -------------------------------------------------------------------------------------


def _hash(text: "str | bytes") -> str:
    """The first 16 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def _file_hashes(patterns, root: pathlib.Path) -> "dict[str, str]":
    """Path below root -> hash of the file's bytes, for glob patterns."""
    paths = {path for pattern in patterns for path in root.glob(pattern)}
    return {str(path.relative_to(root)): _hash(path.read_bytes()) for path in paths}
