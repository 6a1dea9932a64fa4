"""The published catalogue of CUDA synchronisation bugs: each kernel bug in it is found.

The catalogue is that of M. Wu et al., "Characterizing and Detecting CUDA Program Bugs" (2019;
arXiv:1905.01833) and "Simulee: Detecting CUDA Synchronization Bugs via Memory-Access Modeling"
(ICSE 2020): 27 synchronisation bugs in the histories of arrayfire, kaldi and mshadow. Their tool
finds 20 of them. 19 are in kernels, and stand here. The other 8 are in host code, which no kernel
shows: copies that could be asynchronous (5), a needless cudaThreadSynchronize, a host that does not
wait, and an initialisation that is not thread-safe.

Each kernel is our own, and has only the pattern of the bug. A case is the mended kernel, with
the bug beside what mends it. A bug of the kinds NOTES is no error: it is in a trace.
"""

import pytest
import torch
from simt_pairs import Case, counts_on_page, launched, with_mistake

import gpuaccel as ga

NOTES = ("redundant barrier", "ended before a barrier")


def ramp(n):
    return torch.arange(1.0, n + 1)


def total(n):
    """Arguments and result of a kernel that sums n numbers."""
    return (lambda: (torch.zeros(1), ramp(n))), (lambda: ramp(n).sum().view(1))


TREE = """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ float sums[64];
    int t = threadIdx.x;
    sums[t] = x[t];
    __syncthreads();
    for (int half = 32; half > 0; half /= 2) {
        if (t < half) sums[t] += sums[t + half];
        __syncthreads();
    }
    if (t == 0) *out = sums[0];
}
"""
WARP_TREE = TREE.replace("32", "16").replace("64", "32").replace("threads()", "warp()")
IN_BRANCH = (
    "if (t < half) sums[t] += sums[t + half];\n        __syncthreads();",
    "if (t < half) { sums[t] += sums[t + half]; __syncthreads(); }",
)


def guarded(n):
    """Arguments and result of GUARDED for n numbers."""
    return (lambda: (torch.zeros(n), ramp(n), n)), (lambda: ramp(n).flip(0))


GUARDED = """
extern "C" __global__ void k(float* out, const float* x, int n)
{
    __shared__ float row[64];
    int t = threadIdx.x;
    if (t < n) {{row[t] = x[t];
    __syncthreads(); => { row[t] = x[t]; __syncthreads(); }}}  // 1
    if (t < n) out[t] = row[n - 1 - t];
    __syncthreads();
    if (t < n) row[t] = 0;
}
"""

CATALOGUE = {
    "arrayfire, homography: no barrier between the steps of a sum": Case(
        """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ float squares[64];
    int t = threadIdx.x;
    squares[t] = x[t] * x[t];
    __syncthreads();
    if (t < 32) squares[t] += squares[t + 32];
    {{__syncthreads();}}
    if (t < 8) {
        float sum = 0;
        for (int i = 0; i < 4; i++) sum += squares[t + 8 * i];
        out[t] = sum;
    }
}
""",
        lambda: (torch.zeros(8), ramp(64)),
        lambda: (ramp(64) ** 2).view(8, 8).sum(0),
    ),
    "arrayfire, scan_by_key: no barrier before the neighbour's flag is read": Case(
        """
extern "C" __global__ void k(int* out, const int* keys)
{
    __shared__ int flags[64];
    int t = threadIdx.x;
    flags[t] = keys[t];
    {{__syncthreads();}}
    out[t] = t > 0 && flags[t] == flags[t - 1];
}
""",
        lambda: (torch.zeros(64, dtype=torch.int32), torch.arange(64).int() // 3),
        lambda: (torch.arange(64) % 3 != 0).int(),
        ("race", "uninitialised"),
    ),
    "arrayfire, homography: no barrier behind the load of a matrix": Case(
        """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ float matrix[8][8];
    int row = threadIdx.y, column = threadIdx.x;
    matrix[row][column] = x[row * 8 + column];
    {{__syncthreads();}}
    float product = 0;
    for (int i = 0; i < 8; i++) product += matrix[row][i] * matrix[column][i];
    out[row * 8 + column] = product;
}
""",
        lambda: (torch.zeros(64), ramp(64)),
        lambda: (ramp(64).view(8, 8) @ ramp(64).view(8, 8).T).flatten(),
        ("race", "uninitialised"),
        block=(8, 8),
    ),
    "arrayfire, homography: no barrier before the next round overwrites": Case(
        """
extern "C" __global__ void k(float* out, const float* x, int rounds)
{
    __shared__ float row[64];
    int t = threadIdx.x;
    float sum = 0;
    for (int r = 0; r < rounds; r++) {
        row[t] = x[r * 64 + t];
        __syncthreads();
        sum += row[63 - t];
        {{__syncthreads();}}
    }
    out[t] = sum;
}
""",
        lambda: (torch.zeros(64), ramp(192), 3),
        lambda: ramp(192).view(3, 64).sum(0).flip(0),
    ),
    "arrayfire, ireduce: volatile memory instead of barriers in a warp": Case(
        """
extern "C" __global__ void k(int* out, const float* x)
{
    __shared__ volatile float values[32];
    __shared__ volatile int places[32];
    int t = threadIdx.x;
    values[t] = x[t];
    places[t] = t;
    __syncwarp();
    for (int half = 16; half > 0; half /= 2) {
        if (t < half && values[t + half] > values[t]) {
            values[t] = values[t + half];
            places[t] = places[t + half];
        }
        {{__syncwarp();}}
    }
    if (t == 0) *out = places[0];
}
""",
        lambda: (torch.zeros(1, dtype=torch.int32), ramp(32)),
        lambda: torch.tensor([31]).int(),
        block=32,
    ),
    "arrayfire, reductions: volatile memory instead of barriers": Case(
        with_mistake(
            TREE.replace("__shared__ float", "__shared__ volatile float"),
            "[t + half];\n        __syncthreads();",
            "[t + half];",
        ),
        *total(64),
    ),
    "arrayfire, reduce_first_kernel: no barrier before the first step": Case(
        with_mistake(TREE, "sums[t] = x[t];\n    __syncthreads();", "sums[t] = x[t];"),
        *total(64),
        ("race", "uninitialised"),
    ),
    "arrayfire, accum: the carry is read while the last thread writes it": Case(
        """
extern "C" __global__ void k(float* out, const float* x, int rounds)
{
    __shared__ float carry;
    int t = threadIdx.x;
    if (t == 0) carry = 0;
    __syncthreads();
    for (int r = 0; r < rounds; r++) {
        float sum = carry + x[r * 64 + t];
        {{__syncthreads();}}
        out[r * 64 + t] = sum;
        if (t == 63) carry = sum;
        __syncthreads();
    }
}
""",
        lambda: (torch.zeros(128), ramp(128), 2),
        lambda: torch.cat([ramp(64), ramp(128)[64:] + 64]),
    ),
    "kaldi, _vec_soft_max: one array for two reductions, no barrier between": Case(
        """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ float shared[64];
    int t = threadIdx.x;
    shared[t] = x[t];
    __syncthreads();
    float most = shared[0];
    for (int i = 1; i < 64; i++) most = fmaxf(most, shared[i]);
    {{__syncthreads();}}
    shared[t] = x[t] == most;
    __syncthreads();
    float count = 0;
    for (int i = 0; i < 64; i++) count += shared[i];
    out[t] = count;
}
""",
        lambda: (torch.zeros(64), ramp(64)),
        lambda: torch.ones(64),
    ),
    "arrayfire, FAST: a count is read before all have added to it": Case(
        """
extern "C" __global__ void k(int* out, const float* x)
{
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (x[threadIdx.x] > 3) atomicAdd(&count, 1);
    {{__syncthreads();}}
    if (threadIdx.x == 0) *out = count;
}
""",
        lambda: (torch.zeros(1, dtype=torch.int32), ramp(64)),
        lambda: torch.tensor([61]).int(),
    ),
    "mshadow: warp-synchronous code without __syncwarp()": Case(
        with_mistake(WARP_TREE, "[t + half];\n        __syncwarp();", "[t + half];"),
        *total(32),
        block=32,
    ),
    "arrayfire, nearest neighbour: a barrier in the branch of a reduction": Case(
        with_mistake(TREE, *IN_BRANCH), *total(64), ("ended before a barrier",)
    ),
    "arrayfire, nearest neighbour: a barrier under the guard of the data": Case(
        GUARDED, *guarded(50), ("divergent barrier",)
    ),
    "arrayfire, nearest neighbour: a barrier in a loop that threads leave": Case(
        """
extern "C" __global__ void k(float* out, const float* x, int n)
{
    __shared__ float row[64];
    int t = threadIdx.x;
    float most = 0;
    int rounds = (n + {{63) / 64; => 63 - t) / 64;}}
    for (int r = 0; r < rounds; r++) {
        row[t] = 64 * r + t < n ? x[64 * r + t] : 0;
        __syncthreads();  // the first
        most = fmaxf(most, row[63 - t]);
        __syncthreads();
    }
    row[t] = most;
    __syncthreads();
    out[t] = row[63 - t];
}
""",
        lambda: (torch.zeros(64), ramp(100), 100),
        lambda: torch.cat([ramp(100)[64:], ramp(64)[36:]]),
        ("divergent barrier",),
    ),
    "arrayfire, hamming_matcher: a barrier for one warp": Case(
        GUARDED, *guarded(32), ("divergent barrier",)
    ),
    "kaldi, thread-sync errors: a barrier in an if block": Case(
        with_mistake(
            TREE.replace("if (t == 0) *out", "__syncthreads();\n    if (t == 0) *out"), *IN_BRANCH
        ),
        *total(64),
        ("divergent barrier",),
    ),
    "kaldi, _add_diag_mat_mat: threads return before the barriers": Case(
        """
extern "C" __global__ void k(float* out, const float* x, int n)
{
    __shared__ float parts[64];
    int t = threadIdx.x, i = t / 4;
    bool inside = {{i < n; => true; if (i >= n) return;}}
    parts[t] = inside ? x[t] : 0;
    __syncthreads();
    if (t % 4 == 0 && inside) out[i] = parts[t] + parts[t + 1] + parts[t + 2] + parts[t + 3];
}
""",
        lambda: (torch.zeros(10), ramp(40), 10),
        lambda: ramp(40).view(10, 4).sum(1),
        ("ended before a barrier",),
    ),
    "kaldi, softmax: a barrier behind what each thread reads itself": Case(
        """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ float row[64];
    int t = threadIdx.x;
    {{row[t] = x[t]; => row[t] = x[t]; __syncthreads();}}
    row[t] = 2 * row[t];
    __syncthreads();
    out[t] = row[63 - t];
}
""",
        lambda: (torch.zeros(64), ramp(64)),
        lambda: 2 * ramp(64).flip(0),
        ("redundant barrier",),
    ),
    "kaldi, DivRowsVec: shared memory and a barrier for what registers hold": Case(
        """
extern "C" __global__ void k(float* x, const float* by)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    {{float scale = 1 / by[i]; => __shared__ float scales[32];
    scales[threadIdx.x] = 1 / by[i];
    __syncthreads();
    float scale = scales[threadIdx.x];}}
    x[i] *= scale;
}
""",
        lambda: (ramp(64), torch.full((64,), 2.0)),
        lambda: ramp(64) / 2,
        ("redundant barrier",),
        grid=2,
        block=32,
    ),
}


def notes_of(case, source):
    """Kinds of the notes in a trace of this kernel."""
    with ga.use_backend("simt"):
        kernel = ga.compile(source, "k")
        trace = ga.simt.trace(kernel[case.grid, case.block], *case.args())
    assert not trace.reports
    return {note.kind for note in trace.notes}


def test_every_kernel_bug_of_the_catalogue_is_here():
    assert counts_on_page("CATALOGUE") == [len(CATALOGUE)] * 2 == [19, 19]
    assert sum(name.startswith("arrayfire") for name in CATALOGUE) == 13
    assert sum(name.startswith("kaldi") for name in CATALOGUE) == 5


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_bug_is_found(name):
    case = CATALOGUE[name]
    if case.kinds[0] in NOTES:
        assert case.kinds[0] in notes_of(case, case.wrong_source)
        return
    with pytest.raises(ga.errors.KernelError) as info:
        launched(case, case.wrong_source)
    assert {report.kind for report in info.value.reports} & set(case.kinds), info.value


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_mended_kernel_gets_no_report(name):
    case = CATALOGUE[name]
    result, notes = launched(case, case.source)
    assert not notes
    assert torch.equal(result, case.result()), result
    assert case.kinds[0] not in notes_of(case, case.source)
