"""A whole .cu file, as books and courses print it, compiles for a GPU and runs on the CPU.

Each text stands for one dialect. NVRTC compiles it for sm_90, the CPU runs it, and its values are
compared with NumPy's.
"""

import json
import pathlib

import numpy as np
import pytest
import torch

import gpuaccel as ga
from gpuaccel.compiler import Kernel
from gpuaccel.errors import ArgumentError, CompileError, CompileWarning
from gpuaccel.host_code import device_code

pytestmark = pytest.mark.filterwarnings("ignore:left out")


@pytest.fixture(autouse=True)
def on_the_cpu():
    with ga.use_backend("simt"):
        yield


X = torch.arange(32.0)


def launched(source, name=None, *args, **compiling):
    """X after one warp of the kernel, whose first argument it is."""
    x = X.clone()
    ga.compile(source, name, **compiling)[1, 32](x, *args)
    return x.numpy()


BOOK = r"""
/* A first program: main() { launches<<<1, 1>>>(); } in a comment. */
#include <stdio.h>
#include <stdlib.h>
#include <cuda_runtime.h>
#include "device_launch_parameters.h"

#define N 32
#define CHECK(call) do {                                              \
    cudaError_t status = (call);                                       \
    if (status != cudaSuccess) { fprintf(stderr, "{%s\n", "}"); exit(1); } \
} while (0)

__global__ void add_one(float *x);
static void fill(float *x, int n) { for (int i = 0; i < n; i++) x[i] = rand(); }
__device__ float more(float x) { return x + 1.0f; }

__global__ void add_one(float *x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) x[i] = more(x[i]);
}

void run(float *host) {
    float *device;
    CHECK(cudaMalloc(&device, N * sizeof(float)));
#ifdef VERBOSE
    printf("launching\n");
#endif
    add_one<<<1, N>>>(device);
    CHECK(cudaFree(device));
}

int main(int argc, char **argv) {
    float host[N];
    fill(host, N);
    run(host);
    printf("%c done: %f\n", '}', host[0]);
    return 0;
}
"""

MODERN = """
#include <algorithm>
#include <cassert>
#include <cmath>
#include <iostream>
#include <type_traits>
#include <vector>
using std::cout;
using std::vector;
using namespace std;

constexpr int WIDTH = 32;
constexpr int squared(int a) { return a * a; }
const float HALF = 1.0f / 2, QUARTER = HALF * HALF;

struct Timer {
    cudaEvent_t start;
    Timer() { cudaEventCreate(&start); }
    void stop() { std::cout << "stopped" << std::endl; }
};

template <typename T>
struct Range {
    T low, high;
    std::size_t size() const { return std::vector<T>(4).size(); }
    __host__ __device__ T clipped(T x) const { return std::min(std::max(x, low), high); }
};

namespace ours {
template <typename T> __device__ T doubled(T x) {
    if (std::is_same<T, float>::value) return x * 2;
    return x;
}
static __global__ void clip(float* x, float high) {
    __shared__ float s[squared(6)];
    auto shift = [=] __device__(float v) { return v + QUARTER; };
    assert(threadIdx.x < WIDTH);
    s[threadIdx.x] = doubled(x[threadIdx.x]);
    Range<float> range = {0.0f, high};
    x[threadIdx.x] = shift(range.clipped(s[threadIdx.x]));
}
}  // namespace ours

template <class F> void timed(F f, vector<float>& times) { Timer t; f(); t.stop(); }
std::ostream& operator<<(std::ostream& out, const Range<int>& r) { return out << r.low; }

int main() {
    vector<float> times{1.0f};
    timed([&] { ours::clip<<<1, WIDTH>>>(nullptr, 3.0f); }, times);
    cout << times[0];
}
"""

MACROS = """
#define HD __host__ __device__
#define KERNEL(name, op) \\
    __global__ void name(float* x) { x[threadIdx.x] = x[threadIdx.x] op 2; }
KERNEL(plus, +)
KERNEL(times, *)
#if defined(_OPENMP)
#include <omp.h>
#endif
HD inline float relu(float x) { return fmaxf(x, 0.0f); }
#ifdef __CUDA_ARCH__
__device__ float offset() { return 10; }
#else
__device__ float offset() { return 10; }
void check(int status) { if (status) exit(status); }
#endif
enum Mode { PLAIN, SHIFTED };
typedef struct { float weight; Mode mode; } Options;
__global__ void activated(float* x, Options options) {
    float v = x[threadIdx.x] * options.weight;
    x[threadIdx.x] = relu(options.mode == SHIFTED ? v - offset() : v);
}
"""

LIMITS = """
typedef unsigned int uint;
#define M_PI 3.0
__global__ void limits(float* x) {
    if (threadIdx.x) return;
    uint n = INT_MAX;
    int64_t m = -1;
    x[0] = fminf(INFINITY, FLT_MAX); x[1] = n; x[2] = m; x[3] = M_PI; x[4] = M_SQRT2;
    x[5] = isnan(NAN); x[6] = std::numeric_limits<float>::lowest();
}
"""


def test_a_printed_program_runs():
    with pytest.warns(CompileWarning, match=r"^left out: main, 2 host functions$"):
        out = launched(BOOK)
    np.testing.assert_array_equal(out, X.numpy() + 1)


def test_host_classes_templates_and_the_standard_library():
    out = launched(MODERN, "clip", 7.0)
    np.testing.assert_array_equal(out, np.clip(2 * X.numpy(), 0, 7) + 0.25)


def test_macros_that_annotate_and_conditions_on_the_compiler():
    options = np.array([(2.0, 1)], dtype=[("weight", "f4"), ("mode", "i4")]).tobytes()
    out = launched(MACROS, "activated", options)
    np.testing.assert_array_equal(out, np.maximum(2 * X.numpy() - 10, 0))


def test_limits_and_constants_are_there_and_give_way_to_the_files_own():
    out = launched(LIMITS)
    top = np.finfo(np.float32).max
    expected = np.array([top, 2**31 - 1, -1, 3, 2**0.5, 1, -top], dtype=np.float32)
    np.testing.assert_array_equal(out[:7], expected)


def test_the_same_text_compiles_for_every_place():
    for source, name in ((BOOK, None), (MODERN, "clip"), (MACROS, "activated"), (LIMITS, None)):
        kernel = ga.compile(source, name)
        assert kernel.cubin("sm_90")[:4] == b"\x7fELF" and kernel.resources("sm_80").registers > 0
        with ga.checked(False):
            assert kernel.load("fast")


def test_several_kernels_are_a_module():
    module = ga.compile(BOOK + "__global__ void halve(float* x) { x[threadIdx.x] /= 2; }")
    assert list(module) == list(module.names) == ["add_one", "halve"]
    x = X.clone()
    module["halve"][1, 32](x)
    module["add_one"][1, 32](x)
    np.testing.assert_array_equal(x.numpy(), X.numpy() / 2 + 1)
    assert module["halve"] is module["halve"] and isinstance(module["halve"], Kernel)
    with pytest.raises(CompileError, match="say which kernel: <source> has add_one, halve"):
        module[1, 32]
    with pytest.raises(CompileError, match="no kernel 'third' here; kernels found: add_one, halve"):
        module["third"]


TEMPLATE = """
namespace ours {
template <typename T, int BY = 2, bool ADD = false>
__global__ void scale(T* x, T by) {
    x[threadIdx.x] = ADD ? x[threadIdx.x] + by * BY : x[threadIdx.x] * by * BY;
}
}
int main() { ours::scale<float><<<1, 32>>>(0, 1.0f); }
"""


@pytest.mark.parametrize(
    "name, expected",
    [
        ("scale<float>", X * 6),
        ("scale<float, 1>", X * 3),
        ("scale<float,4,true>", X + 12),
        ("scale<double>", X.double() * 6),
    ],
)
def test_an_instance_of_a_kernel_template(name, expected):
    kernel = ga.compile(TEMPLATE)[name]
    x = X.clone().to(expected.dtype)
    kernel[1, 32](x, 3.0)
    assert torch.equal(x, expected)
    assert kernel.name == name and kernel.resources("sm_90").registers > 0
    with ga.checked(False):
        kernel[1, 32](x, 1.0)


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "scale",
            "'scale' is a template: name it .* as in \"scale<float>\"; .*<typename T, int BY",
        ),
        ("scale<>", "template parameter `typename T` has no argument"),
        ("scale<float, 1, true, 4>", "the kernel has 3 template parameters .*, got 4"),
        ("scale<nothing>", 'identifier "nothing" is undefined'),
    ],
)
def test_wrong_template_arguments_are_refused(name, message):
    with pytest.raises(CompileError, match=message):
        ga.compile(TEMPLATE, name)


def test_a_file_by_its_path_with_the_headers_beside_it(tmp_path):
    (tmp_path / "book.h").write_text(
        "#include <stdio.h>\n#define DIM 32\nstatic void handle(int e) { if (e) exit(1); }\n"
        "template <class T> void swap(T& a, T& b) { T c = a; a = b; b = c; }\n"
        "__device__ float third(float x) { return x / 3; }\n"
    )
    (tmp_path / "k.cu").write_text(
        '#include "book.h"\n#include "timer.h"\nint steps = 3;\n'
        "__global__ void k(float* x) { if (threadIdx.x < DIM) x[threadIdx.x] += 1; }\n"
        "int main() { StartTimer(); return 0; }\n"
    )
    with pytest.warns(CompileWarning, match=r"left out: main, 2 host functions, timer.h \(not fo"):
        kernel = ga.compile(path=tmp_path / "k.cu")
    x = X.clone()
    kernel[1, 32](x)
    assert torch.equal(x, X + 1) and kernel.filename == str(tmp_path / "k.cu")
    for arguments in ({}, {"source": BOOK, "path": tmp_path / "k.cu"}):
        with pytest.raises(ArgumentError, match="a source or path="):
            ga.compile(**arguments)


def test_lines_are_those_of_the_file():
    wrong = BOOK.replace("more(x[i]);", "more(y[i]);")
    line = wrong[: wrong.index("y[i]")].count("\n") + 1
    with pytest.raises(CompileError, match=rf'book.cu\({line}\): error: identifier "y"'):
        ga.compile(wrong, filename="book.cu")
    with ga.checked(), pytest.raises(ga.errors.KernelError) as caught:
        launched(BOOK.replace("more(x[i]);", "more(x[i + 1]);"))
    assert caught.value.reports[0].line == line


CALLS = """#include "tools.h"
int steps = 3;
float helper(float x) { return x; }
__global__ void k(float* x) {
    x[0] = %s;
}"""


@pytest.mark.parametrize(
    "expression, message",
    [
        ("helper(x[0])", r"<source>: helper is a function of the host: write __device__ in front"),
        ("steps", r"<source>: steps is a variable of the host: make it const, or __device__"),
        ("tool(x[0])", r"<source>: tool may be of tools.h, which is neither beside the source nor"),
    ],
)
def test_a_name_of_the_host_in_a_kernel_is_explained(expression, message):
    with pytest.raises(CompileError, match=message):
        ga.compile(CALLS % expression)
    # By the compiler of the CPU, too.
    with pytest.raises(CompileError, match=message):
        Kernel.from_source(CALLS % expression, "k").load("fast")


@pytest.mark.parametrize(
    "source, message",
    [
        ("k<<<1, 1>>>(x);", r"<source>\(4\): this launches a kernel inside a kernel"),
        ("x[0] = tex1Dfetch(t, 0);", r"<source>\(2\): this has a texture reference"),
        ("cudaDeviceSynchronize();", r"<source>\(4\): this calls the CUDA runtime inside a kernel"),
    ],
)
def test_what_only_nvcc_can_compile_is_named(source, message):
    with pytest.raises(CompileError, match=message):
        ga.compile(
            f"#include <cuda.h>\ntexture<float> t;\n__global__ void k(float* x) {{\n{source}}}"
        )


def test_what_device_code_does_not_need_is_not_compiled():
    source = (
        "#include <cub/cub.cuh>\n#include <mma.h>\n#include <thrust/sort.h>\n#include <vector>\n"
        "std::vector<int> all;\n__device__ void unused() { nonsense(); }\n"
        "__global__ void k(float* x) { x[threadIdx.x] *= 2; }"
    )
    assert torch.equal(torch.from_numpy(launched(source)), X * 2)


def test_brackets_that_do_not_match_leave_the_text_as_it_is():
    source = "#define BEGIN {\n__global__ void k(float* x) BEGIN x[0] = 1; }\nint main() { }\n"
    assert device_code(source)[0] == source


def test_the_page_has_the_figures_of_the_survey_of_other_peoples_kernels():
    root = pathlib.Path(__file__).parents[2]
    survey = json.loads((root / "docs" / "foreign_kernels.json").read_text())
    _, _, page = (root / "CONTRIBUTING.md").read_text().partition("Kernels of other people")
    page = " ".join(page.split())
    outcomes, gpu, files = (
        survey[name] for name in ("outcomes", "compared_with_a_gpu", "whole_files")
    )
    refused, gpu_runs = outcomes["refused"], [gpu[n] for n in ("equal", "close", "different")]
    for words in (
        f"of {files['files']} whole files of {len(files['repositories'])} repositories",
        f"repositories {files['compiled']} compile",
        f"{files['ran_and_compared_with_numpy']['equal']} of them ran with inputs of ours",
        f"Of {survey['kernels']:,} kernels of {len(survey['repositories'])} repositories, "
        f"{outcomes['ran']} ran without a report, {outcomes['reported_rightly']} were rightly",
        f"{outcomes['reported_for_guessed_arguments']} reported for an argument or block",
        f"{sum(refused.values())} refused, and {outcomes['not_compiled_by_nvrtc']} are refused by",
        f"{sum(gpu_runs):,} kernels also ran on a GPU",
        "{} were bit-identical, {} equal within rounding, and {} differed".format(*gpu_runs),
    ):
        assert words in page, words
    assert sum(row["ran"] for row in survey["repositories"]) == outcomes["ran"]
    for part, names in ((survey, ["kernels"]), (files, ["files", "kernels", "compiled"])):
        for name in names:
            assert sum(row[name] for row in part["repositories"]) == part[name], name
    assert survey["kernels"] == sum(refused.values()) + sum(
        count for count in outcomes.values() if isinstance(count, int)
    )
