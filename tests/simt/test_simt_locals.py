"""What a report says of local variables and arrays, of calls, and of what no launch survives."""

import pytest
import torch
from simt_pairs import mistakes

import gpuaccel as ga
from gpuaccel.backends import find_compiler
from gpuaccel.simt.build import fill_pattern

HOST = find_compiler()[0]
needs_filling = pytest.mark.skipif(
    HOST is None or not fill_pattern(HOST), reason=f"{HOST} cannot fill local variables"
)
pytestmark = pytest.mark.usefixtures("on_the_cpu")


# ---- uninitialised local variables ---------------------------------------------------------------

HEAD = """__constant__ const float table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
__device__ void first(const float* x, int n, float* value) { if (n < 0) *value = x[0]; }
struct State { float sums[8], last; };
extern "C" __global__ void k(float* out, int n) {
"""
# Bodies of kernels, each with the mistake in its last line.
UNSET = {
    "a sum without a start": """float sum; for (int i = 0; i < n; i++) sum += i;
        out[threadIdx.x] = sum; }""",
    "a variable that one branch sets": """float value; if (threadIdx.x > n) value = 1;
        out[threadIdx.x] = value; }""",
    "the last element of an array": """float values[8]; for (int i = 0; i < n; i++) values[i] = i;
        out[threadIdx.x] = 2 * values[n]; }""",
    "a member of a struct": """float4 four; four.x = four.y = four.z = n;
        out[threadIdx.x] = four.x + four.w; }""",
    "what a function leaves unset": """float value; first(out, n, &value);
        out[threadIdx.x] = value; }""",
}


@needs_filling
@pytest.mark.parametrize("name", UNSET)
def test_an_uninitialised_local_variable_is_reported(name):
    out = torch.zeros(32)
    (report,) = mistakes(HEAD + UNSET[name], out, 5)
    assert (report.kind, report.line, report.thread) == ("uninitialised", 6, (0, 0, 0)), report
    assert not out.any()
    if "array" in name:
        assert report.tensor == "values" and "an element of values" in report.message


@needs_filling
def test_the_last_write_of_a_launch_is_looked_at():
    (report,) = mistakes(HEAD + UNSET["a sum without a start"], torch.zeros(1), 5, block=1)
    assert (report.kind, report.thread, report.line) == ("uninitialised", (0, 0, 0), 6)
    two = 'extern "C" __global__ void k(int* out) { *out = threadIdx.x; }'
    (report,) = mistakes(two, torch.zeros(1, dtype=torch.int32), block=2)
    assert (report.kind, report.thread, report.other_thread) == ("race", (1, 0, 0), (0, 0, 0))


@needs_filling
def test_an_unset_member_that_nobody_uses_is_no_mistake():
    source = """
struct Found { int is_there; float value; };
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ Found all[32];
    Found own[2];
    for (int i = 0; i < 2; i++) {
        own[i].is_there = x[threadIdx.x] > i;
        if (own[i].is_there) own[i].value = x[threadIdx.x];
    }
    all[threadIdx.x] = own[threadIdx.x % 2];
    __syncthreads();
    Found other = all[31 - threadIdx.x];
    out[threadIdx.x] = other.is_there ? other.value : 0;
}
"""
    x = torch.arange(32.0) - 16
    out = torch.zeros(32)
    assert not mistakes(source, out, x)
    assert torch.equal(out, torch.where(x > torch.arange(32) % 2, x, 0).flip(0))
    wrong = source.replace("other.is_there ? other.value : 0", "2 * own[threadIdx.x % 2].value")
    assert {report.kind for report in mistakes(wrong, out, x)} == {"uninitialised"}


def test_data_that_looks_uninitialised_is_data():
    """0xfefefefe fills local variables: here it comes from a tensor, as pixels or constants."""
    source = """
extern "C" __global__ void k(unsigned* out, const unsigned* x, const unsigned char* bytes, int n)
{
    unsigned values[4];
    for (int i = 0; i < n; i++) values[i] = x[threadIdx.x];
    const unsigned char* four = bytes + 4 * threadIdx.x;
    out[threadIdx.x] = values[n - 1];
    out[32 + threadIdx.x] = four[0] | four[1] << 8 | four[2] << 16 | (unsigned)four[3] << 24;
    out[64 + threadIdx.x] = 0xFEFEFEFEu;
}
"""
    looks = torch.full((128,), 0xFE, dtype=torch.uint8)
    out = torch.zeros(96, dtype=torch.int32)
    assert not mistakes(source, out, looks.view(torch.int32), looks, 4)
    assert torch.equal(out.view(torch.uint8), looks.repeat(3))


# ---- arrays and callers by name ------------------------------------------------------------------

# What a report says -> the body of a kernel, where n is 8.
OVERRUNS = {
    "acc[8]: acc is float[8]": """float acc[8]; for (int i = 0; i <= n; i++) acc[i] = i;
        out[threadIdx.x] = acc[2]; }""",
    "buf[8]: buf is float[8]": """__shared__ float buf[8], other[8];
        for (int i = 0; i <= n; i++) buf[i] = other[0] = i;
        out[threadIdx.x] = buf[2]; }""",
    "tile[threadIdx.x][8]: tile[threadIdx.x] is float[8]": """__shared__ float tile[32][8];
        out[threadIdx.x] = tile[threadIdx.x][n] = 1; }""",
    "state.sums[8]: state.sums is float[8]": """State state;
        for (int i = 0; i <= n; i++) state.sums[i] = i;
        out[threadIdx.x] = state.sums[0]; }""",
    "table[8]: table is float[8]": "out[threadIdx.x] = table[n]; }",
}


@pytest.mark.parametrize("words", OVERRUNS)
def test_an_overrun_names_the_array_and_the_index(words):
    (report,) = mistakes(HEAD + OVERRUNS[words], torch.zeros(32), 8, block=1)
    assert report.kind == "out of bounds" and words in report.message
    assert report.element == 8 and report.tensor == words.split("[")[0]


CALLS = """
__device__ {how} float element(const float* x, int i)
{{
    return x[i];
}}
__device__ {how} float twice(const float* x, int i)
{{
    return 2 * element(x, i);
}}
extern "C" __global__ void k(float* out, const float* x, int n)
{{
    float inside = twice(x, threadIdx.x);
    float outside = twice(x, threadIdx.x + n);
    out[threadIdx.x] = inside + outside;
}}
"""


@pytest.mark.parametrize("how", ["", "__forceinline__", "__noinline__"])
def test_a_report_in_a_function_names_the_lines_of_its_callers(how):
    source = CALLS.format(how=how)
    (report,) = mistakes(source, torch.zeros(32), torch.ones(32), 1)
    assert (report.line, report.callers) == (4, (8, 13))
    assert "called at line 8, which is called at line 13" in report.message
    assert report.thread == (31, 0, 0) and report.element == 32


# ---- memory of other threads, and of functions that returned -------------------------------------


def test_a_pointer_to_another_threads_local_variable_is_reported():
    source = """
extern "C" __global__ void k(float* out)
{
    __shared__ float* pointers[32];
    float own = threadIdx.x;
    pointers[threadIdx.x] = &own;
    __syncthreads();
    out[threadIdx.x] = *pointers[31 - threadIdx.x];  // BUG
}
"""
    reports = mistakes(source, torch.zeros(32))
    assert [(r.kind, r.line) for r in reports] == [("local of another thread", 8)], reports
    assert not mistakes(source.replace("31 - threadIdx.x", "threadIdx.x"), torch.zeros(32))


def test_a_write_below_a_local_array_is_stopped():
    source = """
extern "C" __global__ void k(float* out, int n)
{
    float values[4];
    float* first = values;
    for (int i = 0; i < n; i++) first[-i] = i;
    out[0] = values[0];
}
"""
    reports = mistakes(source, torch.zeros(1), 100_000, block=1)
    assert [(r.kind, r.line) for r in reports] == [("out of bounds", 6)], reports


# ---- nothing ends Python -------------------------------------------------------------------------

# Statements -> the kind of mistake, and the threads of the launch.
SURVIVED = {
    # A wrong argument of printf, and printf after it.
    'printf("%s", (const char*)7);': ("null", 1),
    'printf("%d\\n", 5); x[99] = 1;': ("out of bounds", 1),
    # A call through null.
    "x[1] = ((int (*)(int))(size_t)x[0])(3);": ("null", 1),
    "memcpy(x, (void*)(size_t)x[0], 8);": ("null", 1),
    "memset(x, 0, 1 << 30);": ("out of bounds", 1),
    "for (;;) __syncthreads();": ("time limit", 1024),
    "while (((volatile int*)x)[1] == 0) __activemask();": ("deadlock", 64),
    # All threads at the end.
    "__shared__ int s[1024]; s[threadIdx.x] = 1; __syncthreads(); x[4 + s[threadIdx.x ^ 1]] = 1;": (
        "out of bounds",
        1024,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("statements", SURVIVED)
def test_a_checked_launch_never_ends_python(statements):
    kind, block = SURVIVED[statements]
    kernel = ga.compile(f'extern "C" __global__ void k(int* x) {{ {statements} }}')
    x = torch.zeros(4, dtype=torch.int32)
    seconds = 2 if kind == "time limit" else 60
    with ga.checked(seconds=seconds), pytest.raises(ga.errors.KernelError) as caught:
        kernel[1, block](x)
    report = caught.value.reports[0]
    assert report.kind == kind and report.line and not x.any()
