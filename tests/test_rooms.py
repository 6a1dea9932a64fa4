"""Folders of gpuaccel/ are rooms. Imports between rooms go one way.

A room's floor is computed from its imports."""

import ast
import graphlib
import itertools
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import gpuaccel

ROOT = pathlib.Path(gpuaccel.__file__).parent
# They offer what the rooms have.
OFFERS = ("__init__", "__main__", "public")
PAGE = ROOT.parent / "CONTRIBUTING.md"
GROUND = "ground floor"  # the modules beside the rooms


def room_of(parts):
    """The room of a module, given the names below gpuaccel/: its folder."""
    return parts[0] if (ROOT / parts[0]).is_dir() else GROUND


def imports_between_rooms():
    """(importing file, its room, imported room, names), wherever in the file the import stands."""
    for path in sorted(ROOT.rglob("*.py")):
        here = path.relative_to(ROOT).with_suffix("").parts
        if here[0] in OFFERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = here[: len(here) - node.level]
            modules = (
                [node.module.split(".")] if node.module else [[alias.name] for alias in node.names]
            )
            for module in modules:
                target = (*base, *module)
                if not target[0].startswith("__") and room_of(target) != room_of(here):
                    names = [alias.name for alias in node.names]
                    yield path.relative_to(ROOT), room_of(here), room_of(target), names


def floors(edges):
    """room -> floor: 0 for a room that imports no other, else one above the highest it imports.

    AssertionError for a cycle."""
    below = {}
    for here, there in edges:
        below.setdefault(here, set()).add(there)
        below.setdefault(there, set())
    found = {}
    while below:
        free = sorted(room for room, others in below.items() if others <= found.keys())
        assert free, f"rooms import each other in a cycle: {sorted(below)}"
        for room in free:
            found[room] = max((found[other] + 1 for other in below.pop(room)), default=0)
    return found


def test_imports_between_rooms_go_one_way():
    found = floors({(here, there) for _, here, there, _ in imports_between_rooms()})
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found.keys() == rooms | {GROUND}
    assert found[GROUND] == 0
    rows = re.findall(
        r"^\| (\d+) \| (?:`(\w+)/`|the modules beside the rooms) \|", PAGE.read_text(), re.M
    )
    assert {room or GROUND: int(floor) for floor, room in rows} == found, (
        "CONTRIBUTING.md has other floors"
    )


def test_no_room_imports_a_private_name_of_another():
    private = [
        (str(path), name)
        for path, *_, names in imports_between_rooms()
        for name in names
        if name.startswith("_") and not name.startswith("__")
    ]
    assert private == []


def modules():
    """(path below gpuaccel/, its room, its syntax tree)."""
    for path in sorted(ROOT.rglob("*.py")):
        here = path.relative_to(ROOT)
        if here.with_suffix("").parts[0] not in OFFERS:
            yield here, room_of(here.with_suffix("").parts), ast.parse(path.read_text())


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_attributes(tree):
    """Names that the classes of a module define: methods, class attributes, `self._name = ...`."""
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        for node in ast.walk(cls):
            if isinstance(node, ast.FunctionDef) and is_private(node.name):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                if is_private(node.id):
                    yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if is_private(node.attr) and ast.unparse(node.value) in ("self", "cls"):
                    yield node.attr


@pytest.mark.slow
def test_no_room_reads_a_private_attribute_of_anothers_objects():
    # _parameters, _modules, ...; _version, ...
    torchs = {*vars(torch.nn.Module()), *dir(torch.Tensor)}
    defined = {}
    for _, room, tree in modules():
        defined.setdefault(room, set()).update(private_attributes(tree))
    reads = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, room, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and ast.unparse(node.value) not in ("self", "cls")
        and node.attr not in defined[room] | torchs
        and any(node.attr in names for names in defined.values())
    ]
    assert reads == []


def test_no_object_changes_its_class():
    changes = [
        f"{path}:{node.lineno}"
        for path, _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "__class__"
        and isinstance(node.ctx, ast.Store)
    ]
    assert changes == []


def test_a_cycle_of_rooms_is_found():
    assert floors({("b", "a"), ("c", "b"), ("c", "a")}) == {"a": 0, "b": 1, "c": 2}
    try:
        floors({("a", "b"), ("b", "c"), ("c", "a")})
    except AssertionError as error:
        assert "cycle" in str(error)
    else:
        raise AssertionError("a cycle was not found")


def imports_inside(folder):
    """file -> the files of the folder that it imports, wherever in it the import stands."""
    imports = {}
    for path in sorted(folder.glob("*.py")):
        imports[path.name] = imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            prefix = []
            if isinstance(node, ast.ImportFrom):
                prefix = [folder.name] * (node.level == 1) + [node.module] * bool(node.module)
            elif not isinstance(node, ast.Import):
                continue
            for alias in node.names:
                name = ".".join([*prefix, alias.name]).removeprefix(f"{ROOT.name}.")
                room, *parts = name.split(".")
                if room == folder.name:
                    is_file = bool(parts) and (folder / f"{parts[0]}.py").exists()
                    imported.add(f"{parts[0]}.py" if is_file else "__init__.py")
    return imports


def circle_in_words(imports):
    """A circle of files that import each other; empty: there is none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        steps = itertools.pairwise(reversed(error.args[1]))
        return ", ".join(f"{here} imports {there}" for here, there in steps)
    return ""


@pytest.mark.parametrize("room", ["distributed", "optim", "training"])
def test_files_of_a_room_import_one_way(room):
    assert circle_in_words(imports_inside(ROOT / room)) == ""


@pytest.mark.parametrize(
    "there, back",
    [
        ("from .b import B", "from .a import A"),
        ("from . import b", "import {room}.a"),
        ("def f():\n    from .b import B", "from gpuaccel.{room}.a import A"),
        ("if TYPE_CHECKING:\n    from .b import B", "from ..{room}.a import A"),
        ("from . import b", "if TYPE_CHECKING:\n    from ..{room} import a"),
    ],
)
def test_a_circle_of_files_is_found(there, back, tmp_path):
    """In each form that an import has. A third file, which both import, belongs to none."""
    (tmp_path / "a.py").write_text(f"from .c import C\n{there}\n")
    (tmp_path / "b.py").write_text("from .c import C\n")
    (tmp_path / "c.py").write_text("import torch\nfrom ..errors import ArgumentError\n")
    assert imports_inside(tmp_path) == {"a.py": {"b.py", "c.py"}, "b.py": {"c.py"}, "c.py": set()}
    assert circle_in_words(imports_inside(tmp_path)) == ""
    (tmp_path / "b.py").write_text(f"from .c import C\n{back.format(room=tmp_path.name)}\n")
    words = circle_in_words(imports_inside(tmp_path))
    assert words in (
        "a.py imports b.py, b.py imports a.py",
        "b.py imports a.py, a.py imports b.py",
    )


@pytest.mark.slow
def test_importing_the_package_loads_nothing_for_notebooks_and_the_command_line():
    code = (
        "import sys, gpuaccel as ga\n"
        "unwanted = 'gpuaccel.learn', 'gpuaccel.cli', 'IPython', 'ipywidgets'\n"
        "loaded = [name for name in sys.modules if name.startswith(unwanted)]\n"
        "assert not loaded, loaded\n"
        "assert 'torch' not in sys.modules\n"
        "assert callable(ga.TrainStep) and ga.nn.Encoder\n"
        "loaded = [name for name in sys.modules if name.startswith(unwanted)]\n"
        "assert not loaded, loaded\n"
        "assert callable(ga.doctor) and callable(ga.show) and callable(ga.check)\n"
        "assert ga.LiveThroughput.__module__ == 'gpuaccel.learn.widgets'\n"
        "missing = [name for name in ga.__all__ if not hasattr(ga, name)]\n"
        "assert not missing and set(ga.__all__) <= set(dir(ga)), missing\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_public_name_is_that_of_a_module():
    """`ga.ledger` is one thing, whatever was imported before."""
    for name in gpuaccel.__all__:
        assert not (ROOT / f"{name}.py").exists() and not (ROOT / name).is_dir(), (
            f"{name} is a name and a module"
        )
