"""A .cu file on the CPU gives the results of its reference, and on a GPU bit-identical ones."""

import functools
import gc
import pathlib
import sys
import time
import timeit

import pytest
import torch
from simt_cases import (
    BUGS,
    GOOD,
    OUR_VARIANTS,
    OURS,
    good_kernel,
    our_kernel,
    program,
    same_bits,
)

import gpuaccel as ga
from gpuaccel.compiler import nvrtc

# Without contraction each operation is rounded once, by the rules of IEEE 754, so the results of
# CPU and GPU are bit-identical. NVRTC rounds division and sqrtf correctly by default.
NO_FMA = ("-fmad=false",)


@pytest.fixture
def simt():
    """Fast mode on the CPU, also on a machine with a GPU."""
    with ga.use_backend("simt"), ga.checked(False):
        yield


# ---- against the reference -----------------------------------------------------------------------


def test_every_kernel_of_kernels_cu_is_tried_here():
    there = {
        (path.stem, name)
        for path in ga.compiler.kernel_files()
        for name in ga.compiler.kernel_names(path.read_text())
    }
    # Results of approximate functions and tensor cores differ between CPU and GPU. Tests in these
    # files compare them with float64.
    elsewhere = {
        "richards": "nn/test_richards.py",
        "poly_gate": "nn/test_poly_attention.py",
        "poly_attention": "nn/test_poly_attention.py",
        "poly_forward": "nn/test_poly_attention.py",
        "poly_backward": "nn/test_poly_attention.py",
        # Its own lines are held against float64, the others are adamw's, in optimizer.cuh.
        "lion": "optim/test_lion.py",
    }
    tests = pathlib.Path(__file__).parents[1]
    assert all((tests / name).is_file() for name in elsewhere.values())
    missing = {(file, name) for file, name in there if file not in elsewhere} - set(OURS)
    assert not missing, "\n".join(
        f'add a case to simt_cases.py: @ours("{file}", "{name}")' for file, name in sorted(missing)
    )
    assert set(OURS) <= there


def test_one_worker_and_many_give_the_same_bits(simt, monkeypatch):
    """Without float atomics the result does not depend on how blocks are spread over cores."""
    x = torch.randn(131_072, generator=torch.Generator().manual_seed(0))
    kernel, partials = good_kernel("last_block_sum"), []
    for cores in (1, 1, 2, 2, 2):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        partials.append(torch.empty(512))
        kernel[512, 64](torch.empty(1), partials[-1], torch.zeros(1).int(), x, len(x))
    assert all(same_bits(partials[0], p) for p in partials)


# ---- what runs on the CPU also compiles for a GPU ------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("cases", [GOOD, BUGS], ids=["correct", "planted bugs"])
def test_every_case_compiles_for_gpus(cases, arch):
    """NVRTC accepts all the planted bugs: a compiler finds none of them."""
    kernel = ga.Kernel.from_source(
        program([c.source for c in cases.values()])[0], next(iter(cases))
    )
    cubin, report, _ = nvrtc.compile_cubin(kernel.source, kernel.filename, arch)
    assert cubin[:4] == b"\x7fELF"
    for name in cases:
        assert nvrtc.resources(cubin, report, name, arch).registers > 0, name


# ---- on a GPU: the same kernels, the same inputs -------------------------------------------------


def both(run, kernel, seed):
    """Pairs (on the GPU, on the CPU) of outcomes."""
    with ga.use_backend("cuda"):
        gpu = list(run(kernel, seed, "cuda"))
    with ga.use_backend("simt"), ga.checked(False):
        cpu = list(run(kernel, seed, "cpu"))
    return list(zip(gpu, cpu, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GOOD)
def test_gpu_and_cpu_give_the_same_bits(name):
    good = GOOD[name]
    kernel = ga.compile(good.source, name, options=NO_FMA)
    for seed in range(3):
        for gpu, cpu in both(good.run, kernel, seed):
            assert gpu.right, f"cuda, seed {seed}: {gpu}"
            assert cpu.right, f"simt, seed {seed}: {cpu}"
            assert same_bits(gpu.got, cpu.got), f"seed {seed}, {gpu.label}: cuda and simt differ"


@pytest.mark.gpu
@pytest.mark.parametrize("file, name, macros", OUR_VARIANTS, ids=str)
def test_gpu_and_cpu_give_the_same_bits_for_our_own_kernels(file, name, macros):
    kernel, run = our_kernel(file, name, macros, options=NO_FMA)
    for gpu, cpu in both(run, kernel, 0):
        assert gpu.right and cpu.right and same_bits(gpu.got, cpu.got), f"{gpu}; {cpu}"


@pytest.mark.gpu
def test_gpu_with_contraction_stays_close():
    """With a * b + c rounded once, as users of a GPU get it, the results differ by a few ulp."""
    good = GOOD["last_block_sum"]
    for gpu, cpu in both(good.run, ga.compile(good.source), 0):
        bound = 1e-6 * cpu.got.double().abs().max()
        difference = (gpu.got.double() - cpu.got.double()).abs().max()
        assert difference <= bound, f"{gpu.label}: {difference:.3g} of {bound:.3g}"


# ---- what makes it fast (without absolute times) -------------------------------------------------


def test_a_launch_enters_few_python_functions(simt):
    kernel = ga.compile('extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1.0f; }')
    x, seen = torch.zeros(32), []
    launch = kernel[1, 32]
    launch(x)
    # A garbage collection would call finalizers of other tests' objects.
    gc.disable()
    sys.setprofile(lambda frame, event, _: event == "call" and seen.append(frame.f_code.co_name))
    try:
        launch(x)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert x.eq(2).all() and len(seen) <= 25, seen


def test_threads_that_do_not_wait_are_a_loop(simt, monkeypatch):
    """Only a thread that waits for others gets a stack of its own, and a switch costs time."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # one worker
    source = """extern "C" __global__ void k(float* out, const float* x) {
        int i = blockIdx.x * 256 + threadIdx.x;
        WAIT;
        out[i] = x[i] + 1;
    }"""
    x, out, seconds = torch.randn(1 << 18), torch.empty(1 << 18), {}
    for wait in ("", "__syncthreads()"):
        launch = ga.compile(source, WAIT=wait)[1024, 256]
        launch(out, x)
        assert torch.equal(out, x + 1)
        # Other programs can only add.
        work, clock = functools.partial(launch, out, x), time.process_time
        seconds[wait] = min(timeit.repeat(work, timer=clock, repeat=10, number=1))
    print(seconds)
    assert 2 * seconds[""] < seconds["__syncthreads()"], seconds
