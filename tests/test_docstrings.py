"""Docstrings: the examples run, and every public name says what a reference page needs.

A docstring is one sentence, then sections as in Google's style: Args, Attributes, Returns, Yields,
Raises, Source, Example. An example starts with `import torch` and `import gpuaccel as ga` done.
"""

import ast
import builtins
import dataclasses
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap

import pytest
import torch
from helpers import CUDA

import gpuaccel as ga
from gpuaccel import errors, public

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Source", "Example")
ITEM = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*): \S")
# What a method without an underscore may do without: torch.nn.Module prints it.
UNDOCUMENTED = {"extra_repr"}
CALLS = {"__call__", "__getitem__"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


# ---- reading docstrings --------------------------------------------------------------------------


def docstring(thing) -> str:
    """The docstring that stands at a function or class itself, not at what it inherits from."""
    own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    return inspect.cleandoc(own or "")


def sections(text):
    """(what stands in front of the first section, section -> its lines)."""
    before, found, name = [], {}, None
    for line in text.splitlines():
        if line.removesuffix(":") in SECTIONS and line.endswith(":"):
            name = line[:-1]
            assert name not in found, f"two sections {line}"
            found[name] = []
        elif name is None:
            before.append(line)
        elif line and not line.startswith("    "):
            raise AssertionError(f"text behind the sections: {line}")
        else:
            found[name].append(line)
    return before, found


def items(lines):
    """The names that a section describes: `a, *b: what they are`."""
    matches = filter(None, map(ITEM.match, lines))
    return [name.lstrip("*") for match in matches for name in match[1].split(", ")]


def parameters_of(thing):
    """name -> Parameter of what a user passes; a class is called as its __init__ says."""
    if inspect.isclass(thing):
        if "__init__" not in vars(thing) or dataclasses.is_dataclass(thing):
            return {}
        thing = thing.__init__
    named = inspect.signature(inspect.unwrap(thing)).parameters
    return {name: p for name, p in named.items() if name not in ("self", "cls")}


def raised_by(thing):
    """Names of the errors that the code of a function, or of a class's __init__, raises itself."""
    if inspect.isclass(thing):
        name = "__post_init__" if dataclasses.is_dataclass(thing) else "__init__"
        thing = vars(thing).get(name)
    if not inspect.isfunction(thing):
        return set()
    thing = inspect.unwrap(thing)
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    raised = {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
    }
    return {name for name in raised if name in vars(errors) or name in vars(builtins)}


# ---- what is public ------------------------------------------------------------------------------


def own_members(cls):
    """(name, function) of a class's methods and properties that a user calls."""
    for name, member in vars(cls).items():
        if (name.startswith("_") and name not in CALLS) or name in UNDOCUMENTED:
            continue
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        if isinstance(member, property):
            member = member.fget
        if inspect.isfunction(member):
            yield name, member


def of_this_package(cls):
    return inspect.isclass(cls) and cls.__module__.startswith("gpuaccel")


def named_in(annotation, namespace):
    """Public classes of this package in an annotation, which may be a string."""
    if inspect.isclass(annotation):
        classes = [annotation]
    else:
        classes = [namespace.get(word) for word in re.findall(r"\w+", str(annotation))]
    return [cls for cls in classes if of_this_package(cls) and not cls.__name__.startswith("_")]


def returned_classes(function):
    function = inspect.unwrap(function)
    return named_in(function.__annotations__.get("return", ""), function.__globals__)


def classes_behind(cls):
    """Those that a class inherits from, has as attributes, and returns from its methods."""
    namespace = vars(sys.modules[cls.__module__])
    attributes = vars(cls).get("__annotations__", {}).values()
    found = [base for base in cls.__bases__ if of_this_package(base)]
    found += [other for annotation in attributes for other in named_in(annotation, namespace)]
    return found + [other for _, member in own_members(cls) for other in returned_classes(member)]


def classes():
    """Name -> class: the public ones, and those behind them and behind public functions."""
    pending = [getattr(ga, name) for name in public.__all__]
    found = {}
    while pending:
        thing = pending.pop()
        if not inspect.isclass(thing):
            pending += returned_classes(thing)
            continue
        name = f"{thing.__module__.removeprefix('gpuaccel.')}.{thing.__qualname__}"
        if name not in found:
            found[name] = thing
            pending += classes_behind(thing)
    return dict(sorted(found.items()))


def members():
    return {
        f"{name}.{member}": function
        for name, cls in classes().items()
        for member, function in own_members(cls)
    }


def room_names():
    """Functions and classes that the rooms offer to each other and to users."""
    found = {}
    for room in ga.ROOMS:
        module = importlib.import_module(f"gpuaccel.{room}")
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)):
                found[f"{room}.{name}"] = value
    return found


# ---- the parts of a docstring --------------------------------------------------------------------


def problems_of(thing):
    """What is wrong with what a docstring says of arguments and errors."""
    before, found = sections(docstring(thing))
    if not before or not before[0]:
        return ["has no docstring"]
    problems = []
    if before[0][-1] not in ".:":
        problems.append(f"does not begin with one sentence on one line: {before[0]!r}")
    described = items(found.get("Args", ()))
    parameters = parameters_of(thing)
    problems += [
        f"does not describe the argument {name}" for name in set(parameters) - set(described)
    ]
    problems += [
        f"describes {name}, which is no argument" for name in set(described) - set(parameters)
    ]
    if dataclasses.is_dataclass(thing):
        fields = {
            field.name for field in dataclasses.fields(thing) if not field.name.startswith("_")
        }
        named = set(items(found.get("Attributes", ())))
        problems += [f"does not describe the field {name}" for name in fields - named]
    documented = set(items(found.get("Raises", ())))
    problems += [f"does not say when it raises {name}" for name in raised_by(thing) - documented]
    for name in ("Returns", "Yields"):
        # Google's style, and what renders it, read `words: more words` as a type and a description.
        if ":" in re.sub("`.*?`", "", found.get(name, [""])[0]):
            problems.append(f"{name} has a colon in its first line")
    known = {*vars(errors), *vars(builtins)}
    problems += [f"raises an unknown {name}" for name in documented - known]
    return problems


def returns(thing):
    """Whether a function's annotation says that it returns something."""
    if inspect.isclass(thing):
        return False
    annotation = inspect.unwrap(thing).__annotations__.get("return")
    return annotation not in (None, "None")


def report(problems, name):
    assert not problems, f"{name}: " + "; ".join(problems)


@pytest.mark.parametrize("name", public.__all__)
def test_a_public_name_has_all_parts(name):
    thing = getattr(ga, name)
    problems = problems_of(thing)
    _, found = sections(docstring(thing))
    if not any(line.lstrip().startswith(">>> ") for line in found.get("Example", ())):
        problems.append("has no example")
    if returns(thing) and not {"Returns", "Yields"} & set(found):
        problems.append("does not say what it returns")
    report(problems, name)


@pytest.mark.parametrize("name", public.__all__)
def test_a_public_signature_has_types(name):
    thing = getattr(ga, name)
    function = inspect.unwrap(thing.__init__ if inspect.isclass(thing) else thing)
    if not inspect.isfunction(function):
        return
    untyped = [p.name for p in parameters_of(thing).values() if p.annotation is p.empty]
    if not inspect.isclass(thing) and "return" not in function.__annotations__:
        untyped.append("return")
    assert not untyped, f"{name}: no type at {', '.join(untyped)}"


@pytest.mark.parametrize("name", classes())
def test_a_class_that_users_meet_is_described(name):
    report(problems_of(classes()[name]), name)


@pytest.mark.parametrize("name", members())
def test_a_public_method_is_described(name):
    report(problems_of(members()[name]), name)


@pytest.mark.parametrize("name", room_names())
def test_a_name_of_a_room_is_described(name):
    report(problems_of(room_names()[name]), name)


def halves(size: int, *names: str) -> list:
    if size % 2:
        raise ValueError(size)
    return [size // 2, names]


RIGHT = """Halve a number.

Args:
    size: even.
    *names: any,
        number of them.

Returns:
    A list.

Raises:
    ValueError: for an odd one.
"""


@pytest.mark.parametrize(
    "text, problem",
    [
        (RIGHT, None),
        (RIGHT.replace("    size: even.\n", ""), "does not describe the argument size"),
        (RIGHT.replace("size:", "sizes, size:"), "describes sizes, which is no argument"),
        (RIGHT.replace("ValueError:", "TypeError:"), "does not say when it raises ValueError"),
    ],
)
def test_a_missing_part_is_noticed(text, problem, monkeypatch):
    monkeypatch.setattr(halves, "__doc__", text)
    assert problems_of(halves) == ([] if problem is None else [problem])


# ---- the examples --------------------------------------------------------------------------------


@functools.cache
def examples():
    """Name -> DocTest of every docstring with an example, in all modules."""
    names = [info.name for info in pkgutil.walk_packages(ga.__path__, "gpuaccel.")]
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {}
    for name in ["gpuaccel", *names]:
        if name.rpartition(".")[2] == "__main__":
            continue
        for test in finder.find(importlib.import_module(name), name):
            if test.examples:
                found[test.name.removeprefix("gpuaccel.")] = test
    return found


def outcome(test):
    """(examples that failed, what doctest prints about them)."""
    output = []
    test.globs = {"torch": torch, "ga": ga}
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(test, out=output.append)
    return runner.failures, "".join(output)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no CUDA graph")
@pytest.mark.parametrize("device", ["cpu", CUDA], indirect=True)
@pytest.mark.parametrize("name", examples())
def test_an_example_runs_as_it_stands(name, device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    failures, words = outcome(examples()[name])
    assert not failures, words


def test_every_public_name_has_its_example_among_those_that_run():
    run = {test.docstring for test in examples().values()}
    assert not [name for name in public.__all__ if getattr(ga, name).__doc__ not in run]
