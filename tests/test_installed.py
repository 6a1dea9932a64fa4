"""The wheel, installed in a clean environment beside nothing but what it requires.

Everything runs in another folder, without the checkout. tests/clean_prefix.py says how the
environment is made without a network."""

import json
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest
from clean_prefix import CleanPrefix

from gpuaccel.backends import find_compiler

ROOT = pathlib.Path(__file__).resolve().parents[1]


def build(kind, folder, out):
    """Build a wheel or an sdist of a source folder; the path of the file."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; it is in the extra `test`")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def source(sdist, tmp_path_factory):
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as file:
        file.extractall(folder, filter="data")
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel, built from the sdist, as `pip install gpuaccel.tar.gz` does."""
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel):
    """name -> values of the wheel's METADATA."""
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields: dict = {}
    for line in archive.read(name).decode().partition("\n\n")[0].splitlines():
        key, _, value = line.partition(": ")
        fields.setdefault(key, []).append(value)
    return fields


@pytest.fixture(scope="module")
def prefix(wheel, metadata, tmp_path_factory):
    runtime = [line for line in metadata["Requires-Dist"] if "extra ==" not in line]
    prefix = CleanPrefix(tmp_path_factory.mktemp("prefix"), runtime)
    installed = prefix.pip("install", "--no-deps", str(wheel))
    assert installed.returncode == 0, installed.stderr
    return prefix


def test_the_sdist_is_the_repository_and_gives_the_same_wheel(source, wheel, tmp_path):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    missing = {name for name in tracked if not (source / name).is_file()}
    assert missing <= {".gitignore"}, f"the sdist lacks {sorted(missing)[:5]}"
    names = zipfile.ZipFile(build("wheel", ROOT, tmp_path)).namelist()
    assert sorted(zipfile.ZipFile(wheel).namelist()) == sorted(names)


def test_the_wheel_holds_every_kernel_and_module_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    kernels = {f"gpuaccel/kernels_cu/{path.name}" for path in (ROOT / "kernels_cu").glob("*.cu*")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "gpuaccel").rglob("*.py")}
    assert kernels and {*kernels, *modules, "gpuaccel/py.typed"} <= set(names)
    outside = [
        name for name in names if not name.startswith("gpuaccel/") and ".dist-info/" not in name
    ]
    assert not outside, f"the wheel also holds {outside}"


@pytest.mark.slow
def test_it_has_all_that_it_requires(prefix):
    checked = prefix.pip("check")
    assert checked.returncode == 0, checked.stdout
    frozen = prefix.pip("list", "--format=json")
    assert not {row["name"] for row in json.loads(frozen.stdout)} & {"hypothesis", "ruff", "peft"}


@pytest.mark.slow
def test_both_programs_are_one_and_say_the_version(prefix, metadata):
    version = metadata["Version"][0]
    for command in (["gpuaccel"], ["python", "-m", "gpuaccel"]):
        done = prefix.run(*command, "--version")
        assert (done.returncode, done.stdout) == (0, f"gpuaccel {version}\n"), done.stderr


@pytest.mark.slow
def test_doctor_finds_nothing_wrong(prefix, metadata):
    done = prefix.run("gpuaccel", "doctor", "--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["problems"] == [], done.stderr
    assert facts["gpuaccel"] == metadata["Version"][0] and facts["NVRTC"]
    listed = prefix.run("gpuaccel", "kernels", "accumulate")
    assert listed.returncode == 0 and "accumulate_v3" in listed.stdout, listed.stderr


KERNEL = """
import gpuaccel as ga, torch
twice = ga.compile('''extern "C" __global__ void twice(float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}''')
x = torch.ones(100)
with ga.use_backend("simt"), ga.checked():
    twice[1, 128](x, 100)
print(x.sum().item(), ga.__file__)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler here")
def test_a_checked_kernel_runs_on_the_cpu(prefix):
    done = prefix.run("python", "-c", KERNEL)
    assert done.returncode == 0, done.stderr
    total, file = done.stdout.split()
    assert total == "200.0" and pathlib.Path(file).is_relative_to(prefix.site)


@pytest.mark.slow
def test_without_a_compiler_it_says_what_to_install(prefix):
    """ziglang is not among what gpuaccel requires, and PATH has no other compiler."""
    done = prefix.run("python", "-c", KERNEL, PATH=str(prefix.bin))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "pip install ziglang" in last and "apt install g++" in last
    said = prefix.run("gpuaccel", "doctor", PATH=str(prefix.bin)).stdout
    assert "pip install ziglang" in said and "apt install g++" in said


TRAIN = """
import sys, gpuaccel as ga, torch
torch.manual_seed(0)
data = ga.training.make_dataset()
model = ga.preset("tiny", T=16).build()
step = ga.TrainStep(model, max_norm=1.0)
losses = [r.loss for r in ga.train(step, ga.training.Batches(data.train, 4, 16), steps=10)]
assert len(losses) == 10 and losses[-1] < losses[0], losses

jupyter = {"IPython", "ipykernel", "ipywidgets", "jupyterlab", "nbval", "matplotlib"}
print(*sorted(jupyter & {name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.slow
def test_a_script_trains_without_jupyter(prefix):
    """`pip install .` brings none of what the notebooks need, and a script imports none of it."""
    done = prefix.run("python", "-c", TRAIN)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    done = prefix.run("python", "-c", "import IPython")
    assert "No module named 'IPython'" in done.stderr


@pytest.mark.slow
def test_the_command_trains_and_writes_plain_lines(prefix, tmp_path):
    words = ["train", "--device", "cpu", "--steps", "10", "--seq", "16", "--batch", "2"]
    done = prefix.run("gpuaccel", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "val loss" in done.stdout and "step 10/10" in done.stderr and "\r" not in done.stderr
    rows = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 11))
