"""The requirements, the make commands, a fast import. test_installed.py has the wheel."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = pathlib.Path(__file__).resolve().parents[1]


def requirement_lines(path):
    lines = (line.split(" #")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "--"))]


def pins(path):
    """name -> Version of every `name==version` line."""
    return {
        canonicalize_name(r.name): Version(next(iter(r.specifier)).version)
        for r in requirement_lines(path)
        if str(r.specifier).startswith("==")
    }


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_kernels_are_found_from_the_source_tree():
    from gpuaccel.compiler.program import kernel_root

    assert kernel_root().resolve() == ROOT / "kernels_cu"


def test_constraints_pin_every_requirement_within_its_bounds(project):
    pinned = pins(ROOT / "constraints.txt")
    extras = project["optional-dependencies"]
    tested = [extras[name] for name in ("cu12", "notebooks", "test", "browser")]
    for line in [*project["dependencies"], *sum(tested, [])]:
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt has no version for {requirement.name}"
        assert version in requirement.specifier, (
            f"constraints.txt pins {requirement.name} {version}, pyproject.toml wants {line}"
        )


def test_constraints_serve_a_gpu_build_and_a_cpu_build_of_torch(project):
    pinned = pins(ROOT / "constraints.txt")
    assert pinned["torch"].local is None, (
        "a local version such as +cpu would keep the CUDA build out"
    )
    assert [name for name in pinned if name.startswith("nvidia-")] == ["nvidia-cuda-nvrtc-cu12"]
    assert all(
        str(r.specifier).startswith("==") for r in requirement_lines(ROOT / "constraints.txt")
    )
    assert pinned["cuda-bindings"].release[:2] == pinned["cuda-python"].release[:2]


def test_the_page_lists_every_extra(project):
    page = (ROOT / "docs" / "install.md").read_text().split("\n## macOS")[0]
    extras = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert sorted(extras) == sorted(project["optional-dependencies"])


def test_the_workflow_runs_make_test_on_every_python_of_the_makefile():
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert re.search(r"- run: make .*\btest$", text, re.M)
    pythons = re.findall(r'"(3\.\d+)"', text)
    first, last = re.search(r"\((3\.\d+) to (3\.\d+)\)", (ROOT / "Makefile").read_text()).groups()
    assert (pythons[0], pythons[-1], len(pythons)) == (first, last, 3)


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def dry_make(*words):
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        ["make", "-n", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout


@needs_make
def test_make_installs_again_when_the_requirements_changed(tmp_path):
    (tmp_path / ".installed").touch()
    installed, project = f"VENV={tmp_path}", "-e '.[test]'"
    assert project not in dry_make(installed, "test")
    assert project in dry_make(installed, "-W", "constraints.txt", "test")
    assert project in dry_make(installed, "-W", "pyproject.toml", "lab")
    assert project in dry_make(f"VENV={tmp_path / 'missing'}", "lab")


@needs_make
@pytest.mark.parametrize("there", [True, False])
def test_make_installs_a_compiler_where_the_package_finds_none(tmp_path, there):
    """Also where the environment was made before: a compiler may have been removed since."""
    assert "ziglang" in pins(ROOT / "constraints.txt")
    python, log = tmp_path / "bin" / "python", tmp_path / "log"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" = -m ] || exit {int(not there)}\n')
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    made = subprocess.run(
        ["make", f"VENV={tmp_path}", "compiler"], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0 and "find_compiler" in log.read_text(), made
    assert ("-c constraints.txt ziglang" in log.read_text()) == (not there)
    assert ("installing the compiler ziglang" in made.stdout) == (not there)
    for target in ("lab", "test"):
        assert "find_compiler" in dry_make(f"VENV={tmp_path}", target)


@needs_make
def test_make_commands_do_what_the_readme_says():
    assert "--nbval-lax" in dry_make("test") and "tests notebooks" in dry_make("test")
    lab = dry_make("lab")
    assert "jupyterlab" in lab and "default_url=/lab/tree/notebooks/README.md" in lab
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "notebooks" / "README.md").read_text())
    assert all((ROOT / "notebooks" / link).is_file() for link in links), links
    assert {path.name for path in (ROOT / "notebooks").glob("*.ipynb")} <= set(links), (
        "the start page names every notebook"
    )
    json.loads((ROOT / "notebooks" / ".jupyterlab" / "overrides.json").read_text())
    # A bare `make` is the help.
    assert "make lab" in dry_make()
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK) and ci.read_text().endswith("\nmake test-all\n")


@pytest.mark.slow
def test_it_imports_where_there_is_no_fcntl():
    """As on Windows."""
    code = "import sys; sys.modules.update(fcntl=None); import gpuaccel.cli, gpuaccel as g"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; g.TrainStep, g.show, g.launch"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def repository_files():
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_is_large():
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in repository_files()}
    large = {name: size for name, size in sizes.items() if size > 2_000_000}
    assert not large, f"larger than 2 MB: {large}"


def test_no_file_names_the_machine_it_was_written_on():
    words = ["/" + folder + "/" for folder in ("work", "tmp", "root", "farm")]
    words += ["before" + "-stop", ".wh" + "l/", "$" + "OUT"]
    words += ["pypi" + ".org", "python" + "hosted", "npm" + "js", "deb.debian" + ".org"]
    found = []
    for path in repository_files():
        text = path.read_bytes().decode(errors="ignore")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert not found, found
