"""NVRTC is found by what is installed, compiles for each GPU, and its results are cached."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import gpuaccel as ga
from gpuaccel import files
from gpuaccel.backends import cache_dir
from gpuaccel.compiler import Kernel, kernel_root, nvrtc
from gpuaccel.compiler.nvrtc import Library, check_arch, check_driver, compile_cubin, library
from gpuaccel.errors import BackendError, CompileError

SOURCE = """extern "C" __global__ void k(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= %s;
}
"""
# Counts the programs that a process really compiles, and says which NVRTC it chose.
COUNT = """
import json, sys
{before}
from gpuaccel import files
from gpuaccel.compiler import nvrtc
from gpuaccel.compiler.kernel import Kernel
compiled, real = [], nvrtc._compile
nvrtc._compile = lambda *a: compiled.append(a[1]) or real(*a)
kernel = Kernel("accumulate", "accumulate_v3", GRAD_T="bf16")
registers = kernel.resources("sm_90").registers
print(json.dumps(dict(path=nvrtc.library().path, compiled=len(compiled), registers=registers)))
"""


def processes(*runs):
    """Start one Python per (code, environment), all at once; what each printed, as dicts."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for code, env in runs
    ]
    out = [p.communicate(timeout=600) for p in started]
    for p, (_, err) in zip(started, out):
        assert p.returncode == 0, err
    return [json.loads(text.splitlines()[-1]) for text, _ in out]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUACCEL_CACHE", str(tmp_path / "cache"))
    cache_dir.cache_clear()
    yield tmp_path / "cache" / "cubin"
    cache_dir.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    calls, real = [], nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *a: calls.append(a) or real(*a))
    return calls


def test_the_library_says_what_it_is():
    lib = library()
    assert lib.version[0] in (12, 13) and {"sm_75", "sm_90", "sm_120"} <= set(lib.archs)
    assert str(lib) == f"NVRTC {lib.version[0]}.{lib.version[1]} ({lib.path})"


@pytest.mark.slow
def test_the_choice_of_nvrtc_does_not_depend_on_import_order(tmp_path):
    """torch first; gpuaccel first; NVRTC 13 loaded first, where there is one.

    And three processes share a cold cache.
    """
    others = [path for path in nvrtc.candidates() if path.endswith(".13") and os.path.isabs(path)]
    thirteen = next(iter(others), None)
    third = f"import ctypes; ctypes.CDLL({thirteen!r}, ctypes.RTLD_GLOBAL)"
    first = ["import torch", "import gpuaccel", third if thirteen else "import numpy"]
    env = {"GPUACCEL_CACHE": str(tmp_path)}
    rows = processes(*((COUNT.format(before=before), env) for before in first))
    assert {row["path"] for row in rows} == {library().path}
    assert len({row["registers"] for row in rows}) == 1
    assert all(row["compiled"] <= 1 for row in rows)
    (entry,) = (tmp_path / "cubin").iterdir()
    assert not entry.name.startswith(".")
    (again,) = processes((COUNT.format(before=""), env))
    assert again["compiled"] == 0, "a second process compiled"


def test_a_chosen_nvrtc_is_the_only_candidate(monkeypatch):
    monkeypatch.setenv("GPUACCEL_NVRTC", "/somewhere/libnvrtc.so.12")
    assert nvrtc.candidates() == ["/somewhere/libnvrtc.so.12"]
    with pytest.raises(
        BackendError,
        match="pip install nvidia-cuda-nvrtc-cu12.*looked at /somewhere/libnvrtc.so.12",
    ):
        library.__wrapped__()


def test_nvrtc_12_comes_before_13(monkeypatch, tmp_path):
    for part in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13"):
        path = tmp_path / "nvidia" / part
        path.parent.mkdir(parents=True)
        path.write_text("")
    monkeypatch.delenv("GPUACCEL_NVRTC", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = [p for p in nvrtc.candidates() if p.startswith(str(tmp_path))]
    assert [pathlib.Path(p).name for p in found] == ["libnvrtc.so.12", "libnvrtc.so.13"]
    majors = [
        p.rsplit(".", 1)[1]
        for p in nvrtc.candidates()
        if os.path.isabs(p) and "site-packages" in p or p.startswith(str(tmp_path))
    ]
    assert majors == sorted(majors), f"a 13 stands before a 12: {majors}"


def test_a_second_compilation_comes_from_the_cache(cache, compilations):
    one = compile_cubin(SOURCE % "2.0f", "one.cu", "sm_90")
    assert compile_cubin(SOURCE % "2.0f", "one.cu", "sm_90") == one and len(compilations) == 1
    for change in (
        dict(arch="sm_80"),
        dict(source=SOURCE % "3.0f"),
        dict(options=("-lineinfo",)),
        dict(filename="two.cu"),
        dict(expressions=("k",)),
    ):
        compile_cubin(**{**dict(source=SOURCE % "2.0f", filename="one.cu", arch="sm_90"), **change})
    assert len(compilations) == 6 and len(list(cache.iterdir())) == 6
    assert one[0][:4] == b"\x7fELF" and "registers" in one[1]


@pytest.mark.parametrize(
    "damage",
    [lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b[:70] + b"!" + b[71:]]
    # These have the right checksum.
    + [b"", b"no newline", b"no JSON\n\x7fELF", b"[1, {}]\n\x7fELF", b'["log", {}]\nno ELF'],
)
def test_a_damaged_entry_is_compiled_again(cache, compilations, damage):
    good = compile_cubin(SOURCE % "4.0f", "one.cu", "sm_90")
    (entry,) = cache.iterdir()
    if isinstance(damage, bytes):
        files.write_entry("cubin", entry.name, damage)
    else:
        entry.write_bytes(damage(entry.read_bytes()))
    for _ in range(2):
        assert compile_cubin(SOURCE % "4.0f", "one.cu", "sm_90")[0] == good[0]
        assert len(compilations) == 2, "the damaged entry was not replaced"


def test_a_cache_that_cannot_be_written_costs_no_run(cache, compilations):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"{cache} cannot be written"):
            assert compile_cubin(SOURCE % "5.0f", "one.cu", "sm_90")[0]
    assert len(compilations) == 2 and os.listdir(cache.parent) == ["cubin"]


def test_old_entries_go_first(cache, monkeypatch):
    monkeypatch.setattr(files, "KEPT_ENTRIES", 2)
    for i in range(4):
        compile_cubin(SOURCE % f"{i}.5f", "one.cu", "sm_90")
        for entry in cache.iterdir():  # the clock of the file system may be coarse
            os.utime(entry, (entry.stat().st_atime, entry.stat().st_mtime - 10))
    assert len(list(cache.iterdir())) == 2


def test_an_edited_helper_is_compiled_again(cache, compilations, monkeypatch, tmp_path):
    shutil.copytree(kernel_root(), tmp_path / "kernels")
    monkeypatch.setenv("GPUACCEL_KERNELS", str(tmp_path / "kernels"))
    kernel_root.cache_clear()
    try:
        assert kernel_root() == tmp_path / "kernels"
        Kernel("accumulate", "accumulate_v1").cubin("sm_90")
        Kernel("accumulate", "accumulate_v2").cubin("sm_90")
        assert len(compilations) == 1, "one file is one program"
        helper = tmp_path / "kernels" / "common.cuh"
        helper.write_text(
            helper.read_text() + "\n__device__ float half_of(float x) { return 0.5f * x; }\n"
        )
        Kernel("accumulate", "accumulate_v1").cubin("sm_90")
        assert len(compilations) == 2, "an edited common.cuh must not be answered from the cache"
    finally:
        kernel_root.cache_clear()


@pytest.mark.parametrize("option", ["-I{0}", "-I {0}", "--include-path={0}", "--pre-include={0}/h"])
def test_an_edited_header_of_the_options_is_compiled_again(cache, option, tmp_path):
    include = "" if "pre" in option else "#include <h>\n"
    options = tuple(option.format(tmp_path).split())
    cubins = []
    for factor in ("2.0f", "3.0f"):
        (tmp_path / "h").write_text(f"#define FACTOR {factor}\n")
        source = include + SOURCE % "FACTOR"
        cubins.append(compile_cubin(source, "one.cu", "sm_90", options)[0])
    assert cubins[0] != cubins[1]


def test_threads_may_compile_at_once(cache):
    with ThreadPoolExecutor(4) as pool:
        sources = [SOURCE % f"{i % 3}.25f" for i in range(9)]
        cubins = list(pool.map(lambda text: compile_cubin(text, "one.cu", "sm_90")[0], sources))
    assert cubins[:3] == cubins[3:6] == cubins[6:]
    assert len(set(cubins)) == len(list(cache.iterdir())) == 3


def test_an_unknown_architecture_lists_the_known_ones():
    assert check_arch("sm_90") == "sm_90"
    with pytest.raises(
        BackendError,
        match=r"NVRTC 1.*knows sm_.*sm_90.* and not sm_999: install a newer nvidia-cuda-nvrtc-cu12",
    ):
        compile_cubin(SOURCE % "1.0f", "one.cu", "sm_999")


def test_a_broken_candidate_is_passed_over(monkeypatch, tmp_path):
    (tmp_path / "libnvrtc.so.12").write_text("not a library")
    good = library().path
    monkeypatch.setattr(nvrtc, "candidates", lambda: [str(tmp_path / "libnvrtc.so.12"), good])
    assert library.__wrapped__().path == good


@pytest.mark.parametrize(
    "major, fitting, too_old", [(13, (13000, None), (12000, 12090)), (12, (12000, 13020), (11080,))]
)
def test_a_driver_too_old_for_the_compiler_is_refused(monkeypatch, major, fitting, too_old):
    chosen = Library((major, 0), f"/x/libnvrtc.so.{major}", ("sm_90",), None)
    monkeypatch.setattr(nvrtc, "library", lambda: chosen)
    for driver in fitting:
        check_driver(driver)
    for driver in too_old:
        told = (
            f"driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, but NVRTC {major}.0 "
            f".*writes code for CUDA {major}: update the driver"
        )
        with pytest.raises(BackendError, match=told):
            check_driver(driver)


def test_a_mistake_is_shown_with_file_line_and_caret():
    with pytest.raises(CompileError) as caught:
        compile_cubin(
            'extern "C" __global__ void k(float* x) {\n  x[0] = y;\n}\n', "mine.cu", "sm_90"
        )
    text = str(caught.value)
    assert text.startswith("mine.cu does not compile:\n")
    assert "mine.cu(2)" in text and '"y" is undefined' in text
    caret = next(line for line in text.splitlines() if line.strip() == "^")
    assert text.splitlines()[text.splitlines().index(caret) - 1][caret.index("^")] == "y"
    assert caught.value.log in text and caught.value.log


@pytest.mark.gpu
def test_gpu_the_same_program_compiled_twice_keeps_its_report(cache):
    """NVRTC's own cache (from 12.9, with a driver) returns a cubin without ptxas's report."""
    source = SOURCE % "3.5f"
    for _ in range(2):
        shutil.rmtree(cache, ignore_errors=True)
        cubin, log, _ = compile_cubin(source, "k.cu", "sm_90")
        assert nvrtc.resources(cubin, log, "k", "sm_90").registers > 0


def test_warnings_are_shown_once_with_file_and_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "cache_dir", lambda: tmp_path)
    source = """
extern "C" __global__ void careless(float* x, int n) {
    unsigned i = threadIdx.x;
    if (i >= 0 && i < n) x[i] = 1;
}"""
    with pytest.warns(ga.errors.CompileWarning) as caught:
        ga.compile(source, filename="careless.cu")
    places = [(warning.filename, warning.lineno) for warning in caught]
    assert ("careless.cu", 4) in places, places
    # The second time the kernel is in the cache.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ga.compile(source, filename="careless.cu")
    # A careful one has none.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ga.compile(source.replace("i >= 0 && ", "").replace("i < n", "i < (unsigned)n"))
