"""Kernels on the CPU are compiled once, launched as on a GPU, and stopped when they do not end."""

import copy
import importlib
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from simt_pairs import python

import gpuaccel as ga
from gpuaccel.backends import cache_dir, find_compiler
from gpuaccel.errors import ArgumentError, BackendError, CompileError, KernelError
from gpuaccel.simt import build

backend_module = importlib.import_module("gpuaccel.backends")
TWICE = """extern "C" __global__ void twice(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2;
}"""
SPIN = """extern "C" __global__ void spin(float* x) {
  if (threadIdx.x == 3)
    while (true) x[0] += 1;
}"""
pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache on disk and in the process."""
    monkeypatch.setenv("GPUACCEL_CACHE", str(tmp_path))
    cache_dir.cache_clear()
    build.runtime.cache_clear()
    monkeypatch.setattr(build, "_programs", {})
    yield tmp_path / "simt"
    cache_dir.cache_clear()
    build.runtime.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    calls, real = [], build._run
    monkeypatch.setattr(
        build, "_run", lambda command, *rest: calls.append(command) or real(command, *rest)
    )
    return calls


def interactive(code):
    """A Python process whose output the test reads line by line."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GPUACCEL_BACKEND": "simt"},
    )


def test_simt_is_a_backend_with_a_reason_and_a_compiler():
    choice = ga.backend()
    assert (choice.name, choice.device) == ("simt", "CPU")
    assert str(find_compiler()[0]) in choice.reason
    assert ga.default_device().type == "cpu"
    assert str(find_compiler()[0]) in ga.doctor().facts["C++ compiler"]


def test_operations_run_our_kernels_only_where_simt_was_asked_for(monkeypatch):
    module = importlib.import_module("gpuaccel.ops.accumulate")
    used = []
    monkeypatch.setattr(
        module, "reference_accumulate", lambda acc, grad: used.append("torch") or acc.add_(grad)
    )
    for name, expected in (("simt", []), ("torch", ["torch"])):
        used.clear()
        with ga.use_backend(name):
            assert ga.ops.accumulate_(torch.ones(5), torch.ones(5)).eq(2).all()
        assert used == expected


def test_a_second_launch_and_a_second_process_compile_nothing(fresh, compilations, monkeypatch):
    x = torch.ones(100)
    with ga.checked(False):
        ga.compile(TWICE)[1, 128](x, 100)
        first = len(compilations)
        assert first == 3, "the runtime, and the kernel: compiled and linked"
        ga.compile(TWICE)[1, 128](x, 100)
        # As another process.
        monkeypatch.setattr(build, "_programs", {})
        build.runtime.cache_clear()
        ga.compile(TWICE)[1, 128](x, 100)
    assert len(compilations) == first and x.eq(8).all()


def test_a_slow_compiler_is_said_to_be_at_work(fresh, monkeypatch, caplog):
    monkeypatch.setattr(build, "QUIET", 0.0)
    with ga.checked(False):
        ga.compile(TWICE, filename="cell")[1, 8](torch.ones(8), 8)
        said = [record.message for record in caplog.records]
        assert any("is compiling gpuaccel's runtime for the CPU" in line for line in said), said
        assert any("is compiling cell for the CPU; the result is kept" in line for line in said), (
            said
        )
        caplog.clear()
        ga.compile(TWICE, filename="cell")[1, 8](torch.ones(8), 8)
    assert not caplog.records


@pytest.mark.slow
def test_in_a_notebook_that_line_goes_away_and_is_never_compared(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [
        f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parents[2])!r})\n"
        "import os, torch, gpuaccel as ga\nfrom gpuaccel.simt import build\n"
        f"build.QUIET, os.environ['GPUACCEL_CACHE'] = 0.0, {str(tmp_path)!r}",
        f"x = torch.ones(4)\nga.compile({TWICE!r})[1, 8](x, 4)\nprint(x.tolist())",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    seen = []
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    handle = client.process_message
    client.process_message = lambda msg, *rest: seen.append(msg) or handle(msg, *rest)
    client.execute()
    lines = [msg["content"]["data"] for msg in seen if msg["msg_type"] == "display_data"]
    assert len(lines) == 3 and all(
        set(data) == {"application/vnd.jupyter.widget-view+json"} for data in lines
    ), lines
    *gone, printed = notebook.cells[1].outputs
    assert [output.data for output in gone] == [{}] * 3 and printed.text == "[2.0, 2.0, 2.0, 2.0]\n"


def test_zig_gets_no_file_that_another_user_can_have_written(fresh, monkeypatch):
    """zig links what it kept into later libraries. What it keeps is ours whatever the umask is."""
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    kept = fresh.parent / "zig" / "o" / "kept.o"
    write = ["sh", "-c", 'umask 2>&1 > "$ZIG_GLOBAL_CACHE_DIR/o/kept.o"; touch "$2"', "sh"]

    def compiled():
        build._zig_folder.cache_clear()
        build._run([*write, "-o", str(fresh.parent / "output")], "a test", str)

    kept.parent.mkdir(parents=True, mode=0o700)
    before = os.umask(0o002)
    try:
        compiled()
    finally:
        os.umask(before)
    assert kept.stat().st_mode & 0o777 == 0o600, "it is not in our cache, or others can read it"
    compiled()
    assert kept.exists()
    kept.chmod(0o666)
    with monkeypatch.context() as stubborn, pytest.raises(BackendError, match="not permitted"):
        stubborn.setattr(build.shutil, "rmtree", refuse_to_remove)
        compiled()
    compiled()
    assert not kept.parent.exists()


def refuse_to_remove(folder):
    raise PermissionError(f"{folder}: not permitted")


def test_without_a_compiler_the_message_says_how_to_get_one(monkeypatch):
    with monkeypatch.context() as nothing:
        nothing.setenv("PATH", "")
        nothing.delenv("GPUACCEL_CXX", raising=False)
        nothing.setitem(sys.modules, "ziglang", None)
        nothing.setattr(backend_module, "_ask_compiler", backend_module._ask_compiler.__wrapped__)
        found = find_compiler()
    monkeypatch.setattr(build, "find_compiler", lambda: found)
    monkeypatch.setattr(build, "_programs", {})
    with pytest.raises(
        BackendError,
        match="needs a C\\+\\+ compiler: neither g\\+\\+ .* pip install ziglang, "
        "or name one in GPUACCEL_CXX",
    ):
        ga.compile(TWICE + "// no compiler")[1, 4](torch.ones(4), 4)
    monkeypatch.setattr(backend_module, "find_compiler", lambda: (None, "none found"))
    with pytest.raises(
        BackendError,
        match="backend simt was asked for, but there is no C\\+\\+ compiler to use: none found",
    ):
        ga.use_backend("simt")


def test_a_compiler_that_is_installed_later_is_found(monkeypatch, tmp_path):
    """As `%pip install ziglang` does in a notebook that runs."""
    late = tmp_path / "late"
    monkeypatch.setenv("GPUACCEL_CXX", f"{late} -O1")
    assert find_compiler() == (None, f"GPUACCEL_CXX='{late} -O1' does not answer")
    late.write_text("#!/bin/sh\necho late 14.2.0\n")
    late.chmod(0o755)
    compiler, reason = find_compiler()
    assert compiler.command == (str(late), "-O1") and reason == "g++ 14.2.0 found"


def test_a_compiler_that_fails_shows_its_message(monkeypatch):
    source = 'extern "C" __global__ void k(float* x) {\n#ifdef __SIMT_CPU__\n  nonsense;\n#endif\n}'
    with pytest.raises(CompileError) as caught:
        ga.compile(source, filename="cell")[1, 1](torch.ones(1))
    assert "cell does not compile for the CPU" in str(caught.value)
    assert "cell:3:" in str(caught.value) and "nonsense" in caught.value.log


@pytest.mark.parametrize(
    "construct, name",
    [
        (
            'unsigned lane; asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)); x[0] = lane;',
            "inline PTX",
        ),
        ("nvcuda::wmma::fragment<int> f;", "tensor cores"),
        ("x[0] = tex2D<float>(0, 0, 0);", "textures"),
        ("cudaTextureObject_t t; x[0] = tex1Dfetch<float>(t, 0);", "textures"),
        ("__pipeline_commit();", "asynchronous copies"),
        ("cub::BlockReduce<float, 32> r;", "cub"),
    ],
)
def test_what_only_a_gpu_has_is_named(construct, name):
    text = f'extern "C" __global__ void k(float* x) {{\n  {construct}\n}}'
    with pytest.raises(
        CompileError,
        match=f"^cell, line 2: this uses {name}.*, which only a GPU can run. Put it between "
        "#ifdef __CUDA_ARCH__",
    ):
        build.program(f'#line 1 "cell"\n{text}', "cell", ["k"], False)
    guarded = (
        'extern "C" __global__ void k(float* x) {\n'
        f"#ifdef __CUDA_ARCH__\n  {construct}\n#else\n  x[0] = 5;\n#endif\n}}"
    )
    assert build.program(f'#line 1 "cell"\n{guarded}', "cell", ["k"], False).parameters("k") == [
        ("p", 8)
    ]


@pytest.mark.parametrize("mode", [True, False])
def test_a_kernel_that_never_ends_is_stopped_and_named(mode):
    k, x = ga.compile(SPIN, filename="cell"), torch.zeros(1)
    with (
        ga.checked(mode, seconds=1),
        pytest.raises(
            KernelError, match="thread 3 of block 0 was still running after 1 s"
        ) as caught,
    ):
        k[1, 8](x)
    (report,) = [r for r in caught.value.reports if r.kind == "time limit"]
    assert report.thread == (3, 0, 0) and (not mode or (report.line == 3 and x.eq(0).all()))


# Limits of microseconds end before the first thread, between blocks, or while the launch is ending.
# In a check every thread writes every element, the value that is there already: each write is a
# note that is half made for a while.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "mode, shape, n, limits",
    [(False, (20, 1), 1, (1e-6, 1.2e-5)), (True, (400, 256), 1000, (1e-4, 5e-3))],
)
def test_a_time_limit_ends_launches_never_the_process_and_leaves_no_half_made_report(
    mode, shape, n, limits
):
    source = "{ for (int i = 0; i < n; i++) x[i] = i; }"
    kernel = ga.compile(f'extern "C" __global__ void k(int* x, int n) {source}')
    x = torch.zeros(1000, dtype=torch.int32)
    stopped, end = 0, time.monotonic() + 5
    while time.monotonic() < end:
        try:
            with ga.checked(mode, seconds=random.uniform(*limits)):
                kernel[shape](x, n)
        except KernelError as error:
            assert [report.kind for report in error.reports] == ["time limit"], error
            stopped += 1
    assert stopped > 100


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(
    "body", ['printf("%d %f\\n", i, 0.5 * i)', "delete[] new float[1 + i % 9]"]
)
def test_a_launch_that_is_stopped_inside_printf_or_new_leaves_no_lock_behind(mode, body, capfd):
    endless = ga.compile(
        f'extern "C" __global__ void k(int* n) {{ for (int i = 0; i >= 0; i++) {{ {body}; }} }}'
    )
    once = ga.compile(f'extern "C" __global__ void k(int* n) {{ int i = n[0]; {body}; }}')
    n = torch.zeros(1, dtype=torch.int32)
    for _ in range(20):
        with ga.checked(mode, seconds=0.02), pytest.raises(KernelError, match="still running"):
            endless[1, 1](n)
        with ga.checked(mode, seconds=60):
            once[1, 1](n)


def test_many_threads_may_launch_and_a_stopped_launch_leaves_the_next_one_alone():
    k, spin = ga.compile(TWICE), ga.compile(SPIN)
    tensors = [torch.ones(100_000) for _ in range(8)]

    def work(x):
        for _ in range(5):
            k[-(-x.numel() // 256), 256](x, x.numel())

    with ga.checked(False, seconds=600), ThreadPoolExecutor(len(tensors)) as pool:
        list(pool.map(work, tensors))
    assert all(x.eq(32).all() for x in tensors)
    for _ in range(2):
        with ga.checked(False, seconds=0.2), pytest.raises(KernelError):
            spin[1, 8](torch.zeros(1))
        with ga.checked(False, seconds=600):
            work(tensors[0])
    assert tensors[0].eq(2**15).all()


def test_checked_launches_of_several_threads_report_each_its_own():
    kernels = [
        ga.compile(
            f'extern "C" __global__ void k{i}(float* a{i}, int n) {{ '
            f"if (threadIdx.x == 0) for (int j = 0; j < 50000; j++) a{i}[0] += 1;\n"
            + "\n" * i
            + f"  a{i}[n + threadIdx.x] = 1;\n}}",
            filename="cell",
        )
        for i in range(4)
    ]

    def work(i):
        for _ in range(5):
            with pytest.raises(KernelError) as caught:
                kernels[i][1, 8](torch.zeros(8 + i), 8 + i)
            (report,) = caught.value.reports
            assert (report.line, report.tensor) == (2 + i, f"a{i}")
            assert (report.element, report.count) == (8 + i, 8)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.slow
def test_an_interrupt_of_a_launch_in_another_thread_is_no_success(interruptible):
    """A signal before the launch reaches only the main thread, so the test sends several."""
    code = """
import signal, threading, time, torch, gpuaccel as ga
k = ga.compile(
    'extern "C" __global__ void k(float* x, int n) { x[0] += 1; while (n > 0) x[0] += 1; }'
)
x = torch.zeros(1)
said = []

def work():
    try:
        k[1, 1](x, 1)
        said.append("done")
    except KeyboardInterrupt:
        said.append("interrupted")
with ga.checked(seconds=600):
    k[1, 1](x, 0)
    thread = threading.Thread(target=work)
    thread.start()
    print("ready", flush=True)
    while not said:                                 # join() may not be interrupted at every moment
        try:
            time.sleep(0.05)
        except KeyboardInterrupt:
            pass
    signal.signal(signal.SIGINT, signal.SIG_IGN)
print(said, x.eq(1).all().item(), flush=True)
"""
    process = interactive(code)
    assert process.stdout.readline() == "ready\n"
    while process.poll() is None:
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert out == "['interrupted'] True\n"


@pytest.mark.slow
def test_a_forked_process_can_launch():
    code = f"""
import os, torch, gpuaccel as ga
k, x = ga.compile('''{TWICE}'''), torch.ones(100_000)
with ga.checked(False):
    k[400, 256](x, 100_000)
    child = os.fork()
    if child == 0:
        k[400, 256](x, 100_000)
        os._exit(0 if x.eq(4).all() else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), x.eq(2).all().item())
"""
    done = python(
        code, GPUACCEL_GPU="off", OMP_NUM_THREADS="1"
    )  # torch's own threads do not survive a fork
    assert done.stdout.split() == ["0", "True"], done.stdout + done.stderr


def test_the_mode_comes_from_the_environment_and_checked_goes_back(monkeypatch):
    from gpuaccel.simt.driver import is_checked, time_limit

    assert is_checked(True) and not is_checked(False) and time_limit() == 20
    with ga.checked():
        assert is_checked(False)
        with ga.checked(False, seconds=7):
            assert not is_checked(True) and time_limit() == 7
        assert is_checked(False) and time_limit() == 20
    for value, both in (("checked", True), ("fast", False)):
        monkeypatch.setenv("GPUACCEL_SIMT", value)
        assert is_checked(True) is is_checked(False) is both
    monkeypatch.setenv("GPUACCEL_SIMT", "slow")
    with pytest.raises(
        BackendError, match="GPUACCEL_SIMT is 'slow'; expected one of auto, checked, fast"
    ):
        is_checked(True)
    monkeypatch.setenv("GPUACCEL_SIMT_SECONDS", "soon")
    with pytest.raises(BackendError, match="GPUACCEL_SIMT_SECONDS is 'soon'"):
        time_limit()
    with pytest.raises(ArgumentError, match="seconds is -1"):
        ga.checked(seconds=-1)


def test_what_a_kernel_prints_comes_where_python_prints(capsys):
    k = ga.compile(
        'extern "C" __global__ void hello(int n) {\n'
        "if (threadIdx.x < n) "
        'printf("%u of %d: %.2f %s %lld%%\\n", threadIdx.x, n, 0.5f, "of", 1ll << 40); }'
    )
    k[1, 8](2)
    line = "of 2: 0.50 of 1099511627776%\n"
    assert capsys.readouterr().out == f"0 {line}1 {line}"


@pytest.mark.slow
def test_python_itself_still_handles_its_faults():
    """The handlers are ours only while a kernel runs: another fault ends the process as usual."""
    code = f"""
import ctypes, faulthandler, torch, gpuaccel as ga
faulthandler.enable()
ga.compile('''{TWICE}''')[1, 8](torch.ones(8), 8)
ctypes.string_at(0)
"""
    done = python(code, GPUACCEL_BACKEND="simt")
    assert done.returncode == -11 and "Fatal Python error: Segmentation fault" in done.stderr


@pytest.mark.slow
def test_where_static_thread_storage_is_full_the_slower_kind_is_taken(fresh, monkeypatch):
    real = build._loaded_executor

    def refuse(image):
        monkeypatch.setattr(build, "_loaded_executor", real)
        raise OSError("cannot allocate memory in static TLS block")

    monkeypatch.setattr(build, "_loaded_executor", refuse)
    x = torch.ones(100_000)
    with ga.checked(False):
        ga.compile(TWICE)[400, 256](x, 100_000)
        assert build.runtime(False).tls == build.SLOWER_TLS
    assert x.eq(2).all()


# ---- what new users met -------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupt_ends_a_launch_at_once(interruptible):
    """Also where several threads of the system run its blocks, none of which ends by itself."""
    code = f"""
import torch, gpuaccel as ga
k, x = ga.compile('''{SPIN}'''), torch.zeros(1)
for mode, blocks, threads in ((True, 1, 8), (False, 1, 8), (False, 64, 256)):
    with ga.checked(mode, seconds=600):
        k[1, 1](x)                                  # compiles; one thread does not spin
        print("ready", flush=True)
        try:
            k[blocks, threads](x)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
ga.compile('''{TWICE}''')[1, 8](torch.ones(8), 8)
"""
    process = interactive(code)
    for _ in range(3):
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
    out, _ = process.communicate(timeout=600)
    assert out == "" and process.returncode == 0


def test_a_kernel_travels_by_its_source():
    k = ga.compile(TWICE, filename="cell")
    for other in (pickle.loads(pickle.dumps(k)), copy.deepcopy(k)):
        x = torch.ones(8)
        other[1, 8](x, 8)
        assert x.eq(2).all() and other.learner and str(other.params) == str(k.params)


def test_a_lane_without_a_thread_is_called_by_name():
    with pytest.raises(
        KernelError, match=r"thread 47 of block 0 reads lane 16, for which the block has no thread"
    ):
        ga.compile(
            'extern "C" __global__ void k(int* x) { x[threadIdx.x] = __shfl_down_sync(~0u, 1, 1); }'
        )[1, 48](torch.zeros(48).int())


def test_too_much_shared_memory_gets_a_hint():
    big = (
        "__global__ void big(int* x) { __shared__ int s[20000]; s[x[0]] = 1; "
        "__syncthreads(); x[0] = s[5]; }"
    )
    with pytest.raises(CompileError, match="hint: .*49,152 bytes"):
        ga.compile(big)


def test_a_compiler_that_writes_nothing_is_named(monkeypatch):
    from gpuaccel.backends import Compiler

    monkeypatch.setattr(build, "find_compiler", lambda: (Compiler(("true",), "g++", "9.1"), ""))
    build.runtime.cache_clear()
    try:
        with pytest.raises(
            BackendError, match="the host compiler true ended without an error, but wrote nothing"
        ):
            ga.compile(TWICE)[1, 8](torch.ones(8), 8)
    finally:
        build.runtime.cache_clear()


@pytest.mark.parametrize("words", ["'last' was not declared in", "undeclared identifier 'last'"])
def test_a_variable_that_is_not_declared_is_not_called_a_feature_of_the_gpu(words):
    log = f"cell:2:14: error: {words}\n  if (last < 1) return;"
    reason = build.explain("__global__ void k(float* x) {}", log, "cell")
    assert "cell, line 2: last: not declared. In C" in reason


def test_what_the_cpu_does_not_have_is_named():
    k = ga.compile(
        'extern "C" __global__ void k(float* x) {\n  x[0] = j0f(x[0]);\n}', filename="cell"
    )
    with pytest.raises(
        CompileError,
        match=r"^cell, line 2: the CPU does not have j0f. Where a GPU has it, put it between "
        "#ifdef __CUDA_ARCH__",
    ):
        k[1, 1](torch.ones(1))
