"""Folders of gpuaccel/ are rooms. Imports between rooms go one way.

A room's floor is computed from its imports."""

import ast
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


def imports():
    """(parts of the importing module, parts of the imported one, names), wherever it stands."""
    for path in sorted(ROOT.rglob("*.py")):
        here = path.relative_to(ROOT).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = here[: len(here) - node.level]
            names = [alias.name for alias in node.names]
            for module in [node.module] if node.module else names:
                yield here, (*base, *module.split(".")), names


def imports_between_rooms():
    """(importing module, its room, imported room, names)."""
    for here, target, names in imports():
        if here[0] not in OFFERS and not target[0].startswith("__"):
            if room_of(target) != room_of(here):
                yield "/".join(here), room_of(here), room_of(target), names


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
        (module, name)
        for module, *_, names in imports_between_rooms()
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
    with pytest.raises(AssertionError, match="cycle"):
        floors({("a", "b"), ("b", "c"), ("c", "a")})


@pytest.mark.parametrize("room", ["distributed", "graphs", "nn", "optim", "training"])
def test_files_of_a_room_import_one_way(room):
    files = {path.stem for path in (ROOT / room).glob("*.py")}
    edges = {
        (here[1], target[1] if len(target) > 1 and target[1] in files else "__init__")
        for here, target, _ in imports()
        if here[0] == target[0] == room
    }
    assert len(floors(edges)) == len(files)


@pytest.mark.slow
def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, gpuaccel as ga\n"
        "unwanted = ('gpuaccel.learn', 'gpuaccel.cli', 'IPython', 'ipywidgets', 'jupyterlab',\n"
        "            'nbval', 'tokenizers', 'matplotlib')\n"
        "loaded = [name for name in sys.modules if name.startswith(unwanted)]\n"
        "assert not loaded, loaded\n"
        "assert 'torch' not in sys.modules\n"
        "assert callable(ga.TrainStep) and ga.nn.Encoder\n"
        "loaded = [name for name in sys.modules if name.startswith(unwanted)]\n"
        "assert not loaded, loaded\n"
        "assert callable(ga.doctor) and callable(ga.show) and callable(ga.check)\n"
        "assert ga.Live.__module__ == 'gpuaccel.learn.widgets'\n"
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
