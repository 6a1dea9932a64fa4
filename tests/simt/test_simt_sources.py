"""CUDA C as people write it runs on the CPU: macros, #if, headers, dynamic shared memory, the heap.

Each kernel runs in fast and in checked mode, and its values are compared.
"""

import string

import pytest
import torch
from simt_pairs import run

import gpuaccel as ga

NUMBERS = torch.arange(32.0)


# ---- macros --------------------------------------------------------------------------------------

# x, y, z and w are fields of threadIdx and float4, on a GPU too.
LETTERS = {c: str(i) for i, c in enumerate(string.ascii_letters, 2) if c not in "xyzw"}


def test_macros_may_have_any_plain_name_and_those_of_source_and_options_count(mode):
    source = """
    #define N2 256
    #define Tau 3
    extern "C" __global__ void sum_of_macros(float* out) {
        out[threadIdx.x] = N2 + Tau + KAPPA + PHI + NORM + %s;
    }""" % " + ".join(LETTERS)
    (out,) = run(source, NUMBERS, options=("-DKAPPA=1000", "-D PHI=10000"), NORM=0, **LETTERS)
    assert (out == 256 + 3 + 1000 + 10000 + sum(map(int, LETTERS.values()))).all()


# ---- which kernels are there ---------------------------------------------------------------------

BESIDE = """
// extern "C" __global__ void in_a_comment(int* a) {}
#if 0
extern "C" __global__ void left_out(nothing* a) {}
#elif defined(SMALL) && N < (2 + 3) / 1
extern "C" __global__ void chosen(float* x) { x[threadIdx.x] += 1; }
#else
extern "C" __global__ void chosen(float* x, int by) { x[threadIdx.x] *= by; }
#endif
template <class T> __global__ void __launch_bounds__(64) of_any_type(T* x) { *x = 1; }
template <int n = sizeof(int)>
__global__ void of_any_number(float* x, int from = 1) { *x = n; }
#define KERNEL(name) \\
    extern "C" __global__ void name(float* x) { x[threadIdx.x] -= 1; }
KERNEL(from_a_macro)
#ifdef __CUDA_ARCH__
extern "C" __global__ void only_on_a_gpu(float* x) { asm(""); }
#endif
#ifdef __CUDA_ARCH__
extern "C" __global__ void on_both(float* x) { asm(""); }
#else
extern "C" __global__ void on_both(float* x) { x[threadIdx.x] = 7; }
#endif
"""


def test_kernels_that_are_left_out_are_not_in_the_way(mode):
    (out,) = run(BESIDE, NUMBERS, 3, name="chosen")
    assert torch.equal(out, NUMBERS * 3)
    (out,) = run(BESIDE, NUMBERS, name="chosen", SMALL="", N=4)
    assert torch.equal(out, NUMBERS + 1)
    (out,) = run(BESIDE, NUMBERS, name="on_both")
    assert (out == 7).all()
    assert ga.compiler.kernel_names(BESIDE) == ["chosen", "only_on_a_gpu", "on_both"]


def test_a_kernel_that_is_not_there_says_why(mode):
    with pytest.raises(ga.errors.CompileError, match="only_on_a_gpu is not there on the CPU: an #"):
        run(BESIDE, NUMBERS, name="only_on_a_gpu")
    with pytest.raises(ga.errors.CompileError, match="'of_any_type' is a template"):
        run(BESIDE, NUMBERS, name="of_any_type")


def test_default_arguments(mode):
    source = """
    __device__ float shifted(float x, float by = 0.5f, int times = 2) { return x + by * times; }
    extern "C" __global__ void defaults(float* x, int n = 0x20 ? 32 : 0, float by = -2.5e0f,
                                        int times = 3) {
        if (threadIdx.x < n) x[threadIdx.x] = shifted(x[threadIdx.x]) + by * times;
    }"""
    (out,) = run(source, NUMBERS, 16)
    assert torch.equal(out[:16], NUMBERS[:16] + 1 - 7.5) and torch.equal(out[16:], NUMBERS[16:])
    (out,) = run(source, NUMBERS, 32, 1.0)
    assert torch.equal(out, NUMBERS + 1 + 3)
    # The default of n is no plain number.
    with pytest.raises(ga.errors.ArgumentError, match="takes 4 arguments"):
        run(source, NUMBERS)


def test_functors_and_lambdas(mode):
    source = """
    struct Scale {
        float by;
        __device__ __forceinline__ float operator()(float x) const { return x * by; }
        __host__ __device__ inline __forceinline__ static float twice(float x) { return 2 * x; }
    };
    struct Add {
        __forceinline__ __device__ __host__ Add(float by) : by(by) {}
        template <class T> __device__ __forceinline__ T operator()(T x) const { return x + by; }
        float by;
    };
    template <class F> __device__ __forceinline__ float apply(F f, float x) { return f(x); }
    static __inline__ __device__ __forceinline__ float plain(float x) { return x - 1; }
    extern "C" __global__ void functors(float* x, float by) {
        auto square = [=] __device__ (float v) { return v * v + by; };
        float v = x[threadIdx.x];
        x[threadIdx.x] = apply(Add(3), apply(Scale{by}, Scale::twice(plain(v)))) + square(v);
    }"""
    # For the CPU only: nvcc takes these spellings, NVRTC does not.
    out = NUMBERS.clone()
    ga.Kernel.from_source(source, "functors")[1, 32](out, 4.0)
    assert torch.equal(out, 2 * (NUMBERS - 1) * 4 + 3 + NUMBERS**2 + 4)


@pytest.mark.parametrize("guard", ["__CUDA_ARCH__ < 600", "!defined(__CUDA_ARCH__)"])
def test_ones_own_atomic_add_of_doubles(mode, guard):
    source = (
        """
    #if %s
    __device__ double atomicAdd(double* address, double value) {
        unsigned long long* word = (unsigned long long*)address;
        unsigned long long old = atomicAdd(word, 0ull), assumed;
        do {
            assumed = old;
            old = atomicCAS(word, assumed,
                            __double_as_longlong(value + __longlong_as_double(assumed)));
        } while (assumed != old);
        return __longlong_as_double(old);
    }
    #endif
    extern "C" __global__ void sums(double* sum, float* single, const float* x) {
        atomicAdd(sum, (double)x[threadIdx.x]);
        atomicAdd(single, x[threadIdx.x]);
    }"""
        % guard
    )
    total, single, _ = run(source, torch.zeros(1).double(), torch.zeros(1), NUMBERS, grid=2)
    assert total.item() == single.item() == 2 * NUMBERS.sum().item()


# ---- dynamic shared memory -----------------------------------------------------------------------

DYNAMIC = [
    "extern __shared__ float s[];",
    "extern __shared__ __align__(16) float s[];",
    "extern __align__(16) __shared__ float s[];",
    "__align__(16) extern __shared__ float s[];",
    "__shared__ extern float s[];",
    "extern volatile __shared__ float s[];",
    "volatile extern __shared__ float s[];",
    "extern __shared__ float\n        s[];",
    "extern __shared__ float s[], other[];",
    "DYNAMIC_ARRAY(float, s)",
]
# In a function, where a cast is usual.
CAST = [
    "extern __shared__ unsigned char bytes[]; float* s = reinterpret_cast<float*>(bytes);",
    "extern __shared__ __align__(sizeof(double)) char bytes[]; float* s = (float*)bytes;",
    "extern __shared__ float rows[][4]; float* s = rows[0];",
    "extern __shared__ Pair<float, 2> pairs[]; float* s = pairs[0].value;",
    "extern __shared__ float4 vectors[]; float* s = &vectors[0].x;",
]
REVERSE = """
template <class T, int n> struct Pair { T value[n]; };
#define DYNAMIC_ARRAY(T, name) \\
    extern __shared__ T name[];
%s
extern "C" __global__ void reverse(float* x) {
    %s
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = s[31 - threadIdx.x];
}
extern "C" __global__ void plain(float* x) {
    extern __shared__ float of_its_own[];
    of_its_own[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = 2 * of_its_own[threadIdx.x];
}"""


@pytest.mark.parametrize(
    "outside, inside",
    [("", text) for text in (*DYNAMIC, *CAST)]
    + [(text, "") for text in DYNAMIC[:-1]]
    + [("namespace ours { extern __shared__ float s[]; }", "using namespace ours;")],
)
def test_every_spelling_of_dynamic_shared_memory(mode, outside, inside):
    source = REVERSE % (outside, inside)
    (out,) = run(source, NUMBERS, shared=128, name="reverse")
    assert torch.equal(out, NUMBERS.flip(0))


def test_dynamic_shared_memory_of_two_kernels(mode):
    (out,) = run(REVERSE % ("", DYNAMIC[0]), NUMBERS, shared=128, name="plain")
    assert torch.equal(out, NUMBERS * 2)


# ---- headers -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "outer.h").write_text(
        '#pragma once\n#include "inner.h"\n#define TWICE(x) (SCALE * (x))\n'
    )
    (tmp_path / "part" / "inner.h").write_text(
        "#ifndef INNER_H\n#define INNER_H\n"
        "__device__ float half_of(float x) {\n    return x / 2;\n}\n#endif\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


INCLUDES = """#define SCALE 2
#include "FOLDERouter.h"   // "inner.h" is beside it
#include "FOLDERinner.h"
// #include "nowhere.h"
#ifdef MISSING
#include "missing.h"
#endif
extern "C" __global__ void included(float* x) {
    x[threadIdx.x] = TWICE(half_of(x[threadIdx.x])) + 1;
}
"""


def test_headers_beside_the_source_and_in_the_working_folder(mode, folder):
    beside = INCLUDES.replace("FOLDER", "")
    (out,) = run(beside, NUMBERS, filename=str(folder / "part" / "k.cu"))
    assert torch.equal(out, NUMBERS + 1)
    (folder / "part" / "k.cu").write_text(beside)
    (out,) = run(beside, NUMBERS, filename="part/k.cu")
    assert torch.equal(out, NUMBERS + 1)
    (out,) = run(INCLUDES.replace("FOLDER", "part/"), NUMBERS)
    assert torch.equal(out, NUMBERS + 1)


def test_headers_in_a_folder_of_the_options(mode, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for options in (
        (f"-I{folder}/part",),
        ("-I", f"{folder}/part"),
        (f"--include-path={folder}/part",),
    ):
        (out,) = run(INCLUDES.replace("FOLDER", ""), NUMBERS, options=options)
        assert torch.equal(out, NUMBERS + 1)


def test_a_header_may_have_another_encoding(mode, folder):
    (folder / "latin.h").write_bytes(b"// caf\xe9\n#define VALUE 4\n")
    source = '#include "latin.h"\nextern "C" __global__ void k(float* x) '
    (out,) = run(source + "{ x[threadIdx.x] += VALUE; }", NUMBERS)
    assert torch.equal(out, NUMBERS + 4)


def test_a_mistake_behind_and_in_a_header_has_its_own_line(mode, folder):
    source = INCLUDES.replace("FOLDER", "part/").replace("threadIdx.x] =", "threadIdx.x + 30] =")
    with ga.checked(), pytest.raises(ga.errors.KernelError) as caught:
        run(source, NUMBERS)
    assert caught.value.reports[0].line == 9
    assert "TWICE(half_of(x[threadIdx.x])) + 1;" in str(caught.value)
    inner = folder / "part" / "inner.h"
    inner.write_text(inner.read_text().replace("return x", "return y"))
    with pytest.raises(ga.errors.CompileError, match=r"inner\.h\(4\)"):
        run(INCLUDES.replace("FOLDER", "part/"), NUMBERS)


@pytest.mark.parametrize("filename", [r"C:\Users\me\k.cu", r"D:\new\b.cu", 'a"b.cu', "a\\"])
def test_a_filename_may_have_any_character(mode, filename):
    source = 'extern "C" __global__ void beyond(float* x) {\n    x[%s] = 1;\n}\n'
    run(source % "threadIdx.x", NUMBERS, filename=filename)
    with pytest.raises(ga.errors.CompileError) as refused:
        ga.compile(source % "y", filename=filename)
    assert f'{filename}(2): error: identifier "y"' in str(refused.value)
    with ga.checked(), pytest.raises(ga.errors.KernelError) as caught:
        run(source % "40", NUMBERS, filename=filename)
    assert f"{filename}, line 2" in str(caught.value) and "x[40] = 1;" in str(caught.value)
