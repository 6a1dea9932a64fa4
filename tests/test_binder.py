"""binder/: what Binder's builder does, in a clean environment and without its network."""

import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from clean_prefix import CleanPrefix
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parents[1]
BINDER = ROOT / "binder"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the repository, as Binder's builder makes one."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("checkout")
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory):
    """(checkout, environment) behind `pip install -r binder/requirements.txt` and postBuild.

    pip resolves every requirement against constraints.txt among what is installed here."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    lines = (BINDER / "requirements.txt").read_text().splitlines()
    (torch,) = [Requirement(line) for line in lines if line.startswith("torch")]
    here = importlib.metadata.version("torch")
    if not torch.specifier.contains(here):
        pytest.skip(f"Binder installs {torch}; here is torch {here}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    notebooks = project["optional-dependencies"]["notebooks"]
    # hatchling writes editable installs with `editables`
    requires = [*project["dependencies"], *notebooks, "hatchling", "editables"]
    prefix = CleanPrefix(tmp_path_factory.mktemp("prefix"), requires)
    words = ["--no-build-isolation", "-r", "binder/requirements.txt"]
    installed = prefix.pip("install", *words, cwd=checkout)
    assert installed.returncode == 0, installed.stderr
    done = prefix.run(checkout / "binder" / "postBuild", cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert "backend" in done.stdout, "postBuild shows what `gpuaccel doctor` says"
    return checkout, prefix


@pytest.mark.slow
def test_an_edit_of_a_kernel_counts(built):
    checkout, prefix = built
    ask = (
        "import gpuaccel as ga\n"
        "kernel = ga.Kernel('accumulate', 'accumulate_v1')\n"
        "print('edited_here' in kernel.source, ga.__file__)"
    )
    answers = []
    for _ in range(2):
        done = prefix.run("python", "-c", ask)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.split()[0])
        assert pathlib.Path(done.stdout.split()[1]).is_relative_to(checkout)
        with open(checkout / "kernels_cu" / "accumulate.cu", "a") as file:
            file.write("\n__device__ int edited_here() { return 1; }\n")
    assert answers == ["False", "True"]


def test_jupyterlab_has_the_settings_of_make_lab(built):
    checkout, prefix = built
    folder = prefix.bin.parent
    settings = json.loads((folder / "share/jupyter/lab/settings/overrides.json").read_text())
    viewers = settings["@jupyterlab/docmanager-extension:plugin"]["defaultViewers"]
    assert viewers["markdown"] == "Markdown Preview", "the index opens rendered"
    assert (folder / "share/jupyter/labextensions/gpuaccel-cells/package.json").is_file()
    done = prefix.run("python", folder / "etc/jupyter/jupyter_server_config.py")
    assert done.returncode == 0, done.stderr


def test_a_notebook_gets_one_thread(built):
    checkout, prefix = built
    words = ["python", "-c", "import torch; print(torch.get_num_threads())"]
    done = prefix.run(checkout / "binder" / "start", *words, OMP_NUM_THREADS="")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_the_files_are_those_that_binder_reads():
    assert re.fullmatch(r"python-3\.\d+\n", (BINDER / "runtime.txt").read_text())
    for name in ("postBuild", "start"):
        assert os.access(BINDER / name, os.X_OK)
        assert (BINDER / name).read_text().startswith("#!")
    assert not (ROOT / "environment.yml").exists(), (
        "an environment.yml would make Binder ignore requirements.txt"
    )


def test_the_link_opens_the_index():
    """docs/install.md has the link, whose path is that of `make lab`."""
    page = (ROOT / "docs" / "install.md").read_text()
    (path,) = set(
        re.findall(r"mybinder\.org/v2/gh/OWNER/REPO/\w+\?urlpath=lab/tree/([\w/.]+)", page)
    )
    assert (ROOT / path).is_file()
    assert f"default_url=/lab/tree/{path}" in (ROOT / "Makefile").read_text()
