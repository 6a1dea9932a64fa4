"""The published catalogue of CUDA synchronisation bugs: each kernel bug in it is found.

The catalogue is that of M. Wu et al., "Characterizing and Detecting CUDA Program Bugs" (2019;
arXiv:1905.01833) and "Simulee: Detecting CUDA Synchronization Bugs via Memory-Access Modeling"
(ICSE 2020): 27 synchronisation bugs in the histories of arrayfire, kaldi and mshadow. Their tool
finds 20 of them. 19 are in kernels, and stand here. The other 8 are in host code, which no kernel
shows: copies that could be asynchronous (5), a needless cudaThreadSynchronize, a host that does not
wait, and an initialisation that is not thread-safe.

EXTRA are bugs that the tool found in further projects.

Each kernel is our own, and has only the pattern of the bug. A case is the mended kernel and the
change that brings the bug back. A bug of the kinds NOTES is no error: it is in a trace.
"""

import pytest
import torch
from simt_pairs import Case, counts_on_page, launched

import gpuaccel as ga

NOTES = ("redundant barrier", "ended before a barrier")
RACE = ("race",)


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
IN_BRANCH = (
    "if (t < half) sums[t] += sums[t + half];\n        __syncthreads();",
    "if (t < half) { sums[t] += sums[t + half]; __syncthreads(); }",
)

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
    __syncthreads();  // 1
    if (t < 8) {
        float sum = 0;
        for (int i = 0; i < 4; i++) sum += squares[t + 8 * i];
        out[t] = sum;
    }
}
""",
        1,
        64,
        lambda: (torch.zeros(8), ramp(64)),
        lambda: (ramp(64) ** 2).view(8, 8).sum(0),
        ("__syncthreads();  // 1", ""),
        RACE,
    ),
    "arrayfire, scan_by_key: no barrier before the neighbour's flag is read": Case(
        """
extern "C" __global__ void k(int* out, const int* keys)
{
    __shared__ int flags[64];
    int t = threadIdx.x;
    flags[t] = keys[t];
    __syncthreads();
    out[t] = t > 0 && flags[t] == flags[t - 1];
}
""",
        1,
        64,
        lambda: (torch.zeros(64, dtype=torch.int32), torch.arange(64).int() // 3),
        lambda: (torch.arange(64) % 3 != 0).int(),
        ("__syncthreads();", ""),
        ("race", "uninitialised"),
    ),
    "arrayfire, homography: no barrier behind the load of a matrix": Case(
        """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ float matrix[8][8];
    int row = threadIdx.y, column = threadIdx.x;
    matrix[row][column] = x[row * 8 + column];
    __syncthreads();
    float product = 0;
    for (int i = 0; i < 8; i++) product += matrix[row][i] * matrix[column][i];
    out[row * 8 + column] = product;
}
""",
        1,
        (8, 8),
        lambda: (torch.zeros(64), ramp(64)),
        lambda: (ramp(64).view(8, 8) @ ramp(64).view(8, 8).T).flatten(),
        ("__syncthreads();", ""),
        ("race", "uninitialised"),
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
        __syncthreads();  // 1
    }
    out[t] = sum;
}
""",
        1,
        64,
        lambda: (torch.zeros(64), ramp(192), 3),
        lambda: ramp(192).view(3, 64).sum(0).flip(0),
        ("__syncthreads();  // 1", ""),
        RACE,
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
        __syncwarp();  // 1
    }
    if (t == 0) *out = places[0];
}
""",
        1,
        32,
        lambda: (torch.zeros(1, dtype=torch.int32), ramp(32)),
        lambda: torch.tensor([31]).int(),
        ("__syncwarp();  // 1", ""),
        RACE,
    ),
    "arrayfire, reductions: volatile memory instead of barriers": Case(
        TREE.replace("__shared__ float", "__shared__ volatile float"),
        1,
        64,
        *total(64),
        ("[t + half];\n        __syncthreads();", "[t + half];"),
        RACE,
    ),
    "arrayfire, reduce_first_kernel: no barrier before the first step": Case(
        TREE,
        1,
        64,
        *total(64),
        ("sums[t] = x[t];\n    __syncthreads();", "sums[t] = x[t];"),
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
        __syncthreads();  // 1
        out[r * 64 + t] = sum;
        if (t == 63) carry = sum;
        __syncthreads();
    }
}
""",
        1,
        64,
        lambda: (torch.zeros(128), ramp(128), 2),
        lambda: torch.cat([ramp(64), ramp(128)[64:] + 64]),
        ("__syncthreads();  // 1", ""),
        RACE,
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
    __syncthreads();  // 1
    shared[t] = x[t] == most;
    __syncthreads();
    float count = 0;
    for (int i = 0; i < 64; i++) count += shared[i];
    out[t] = count;
}
""",
        1,
        64,
        lambda: (torch.zeros(64), ramp(64)),
        lambda: torch.ones(64),
        ("__syncthreads();  // 1", ""),
        RACE,
    ),
    "arrayfire, FAST: a count is read before all have added to it": Case(
        """
extern "C" __global__ void k(int* out, const float* x)
{
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (x[threadIdx.x] > 3) atomicAdd(&count, 1);
    __syncthreads();  // 1
    if (threadIdx.x == 0) *out = count;
}
""",
        1,
        64,
        lambda: (torch.zeros(1, dtype=torch.int32), ramp(64)),
        lambda: torch.tensor([61]).int(),
        ("__syncthreads();  // 1", ""),
        RACE,
    ),
    "mshadow: warp-synchronous code without __syncwarp()": Case(
        """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ float sums[32];
    int t = threadIdx.x;
    sums[t] = x[t];
    __syncwarp();
    for (int half = 16; half > 0; half /= 2) {
        if (t < half) sums[t] += sums[t + half];
        __syncwarp();  // 1
    }
    if (t == 0) *out = sums[0];
}
""",
        1,
        32,
        *total(32),
        ("__syncwarp();  // 1", ""),
        RACE,
    ),
    "arrayfire, nearest neighbour: a barrier in the branch of a reduction": Case(
        TREE, 1, 64, *total(64), IN_BRANCH, ("ended before a barrier",)
    ),
    "arrayfire, nearest neighbour: a barrier under the guard of the data": Case(
        """
extern "C" __global__ void k(float* out, const float* x, int n)
{
    __shared__ float row[64];
    int t = threadIdx.x;
    if (t < n) row[t] = x[t];
    __syncthreads();  // 1
    if (t < n) out[t] = row[n - 1 - t];
    __syncthreads();
    if (t < n) row[t] = 0;
}
""",
        1,
        64,
        lambda: (torch.zeros(50), ramp(50), 50),
        lambda: ramp(50).flip(0),
        ("row[t] = x[t];\n    __syncthreads();", "{ row[t] = x[t]; __syncthreads(); }"),
        ("divergent barrier",),
    ),
    "arrayfire, nearest neighbour: a barrier in a loop that threads leave": Case(
        """
extern "C" __global__ void k(float* out, const float* x, int n)
{
    __shared__ float row[64];
    int t = threadIdx.x;
    float most = 0;
    int rounds = (n + 63) / 64;  // 1
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
        1,
        64,
        lambda: (torch.zeros(64), ramp(100), 100),
        lambda: torch.cat([ramp(100)[64:], ramp(64)[36:]]),
        ("(n + 63) / 64;  // 1", "(n + 63 - t) / 64;"),
        ("divergent barrier",),
    ),
    "arrayfire, hamming_matcher: a barrier for one warp": Case(
        """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ float least[64];
    int t = threadIdx.x;
    least[t] = x[t];
    __syncthreads();
    if (t < 32) least[t] = fminf(least[t], least[t + 32]);
    __syncthreads();  // 1
    if (t < 16) out[t] = fminf(least[t], least[t + 16]);
    __syncthreads();
    least[t] = 0;
}
""",
        1,
        64,
        lambda: (torch.zeros(16), ramp(64)),
        lambda: ramp(16),
        (
            "least[t] = fminf(least[t], least[t + 32]);\n    __syncthreads();",
            "{ least[t] = fminf(least[t], least[t + 32]); __syncthreads(); }",
        ),
        ("divergent barrier",),
    ),
    "kaldi, thread-sync errors: a barrier in an if block": Case(
        TREE.replace("if (t == 0) *out", "__syncthreads();\n    if (t == 0) *out"),
        1,
        64,
        *total(64),
        IN_BRANCH,
        ("divergent barrier",),
    ),
    "kaldi, _add_diag_mat_mat: threads return before the barriers": Case(
        """
extern "C" __global__ void k(float* out, const float* x, int n)
{
    __shared__ float parts[64];
    int t = threadIdx.x, i = t / 4;
    bool inside = i < n;
    parts[t] = inside ? x[t] : 0;
    __syncthreads();
    if (t % 4 == 0 && inside) out[i] = parts[t] + parts[t + 1] + parts[t + 2] + parts[t + 3];
}
""",
        1,
        64,
        lambda: (torch.zeros(10), ramp(40), 10),
        lambda: ramp(40).view(10, 4).sum(1),
        ("bool inside = i < n;", "bool inside = true; if (i >= n) return;"),
        ("ended before a barrier",),
    ),
    "kaldi, softmax: a barrier behind what each thread reads itself": Case(
        """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ float row[64];
    int t = threadIdx.x;
    row[t] = x[t];
    row[t] = 2 * row[t];
    __syncthreads();
    out[t] = row[63 - t];
}
""",
        1,
        64,
        lambda: (torch.zeros(64), ramp(64)),
        lambda: 2 * ramp(64).flip(0),
        ("row[t] = x[t];", "row[t] = x[t]; __syncthreads();"),
        ("redundant barrier",),
    ),
    "kaldi, DivRowsVec: shared memory and a barrier for what registers hold": Case(
        """
extern "C" __global__ void k(float* x, const float* by)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float scale = 1 / by[i];
    x[i] *= scale;
}
""",
        2,
        32,
        lambda: (ramp(64), torch.full((64,), 2.0)),
        lambda: ramp(64) / 2,
        (
            "float scale = 1 / by[i];",
            "__shared__ float scales[32]; scales[threadIdx.x] = 1 / by[i]; __syncthreads(); "
            "float scale = scales[threadIdx.x];",
        ),
        ("redundant barrier",),
    ),
}

EXTRA = {
    "kaldi, _copy_low_upp: a stride smaller than the rows": Case(
        """
extern "C" __global__ void k(float* matrix, int rows)
{
    int i = threadIdx.y, j = threadIdx.x, stride = rows;
    if (j < i && i < rows) matrix[j * stride + i] = matrix[i * stride + j];
}
""",
        1,
        (8, 8),
        lambda: (torch.arange(64.0), 8),
        lambda: (
            torch.arange(64.0).view(8, 8).tril() + torch.arange(64.0).view(8, 8).tril(-1).T
        ).flatten(),
        ("stride = rows", "stride = rows / 2"),
        RACE,
    ),
    "kaldi, _add_diag_vec_mat: rows that overlap": Case(
        """
extern "C" __global__ void k(float* matrix, const float* diagonal, int columns)
{
    int row = threadIdx.y, column = threadIdx.x, stride = columns;
    matrix[row * stride + column] += diagonal[row];
}
""",
        1,
        (8, 8),
        lambda: (torch.zeros(64), ramp(8), 8),
        lambda: ramp(8).repeat_interleave(8),
        ("stride = columns", "stride = columns - 1"),
        RACE,
    ),
    "kaldi, _trace_mat_mat: a warp that is taken to run in step": Case(
        TREE,
        1,
        64,
        *total(64),
        ("__syncthreads();\n    }", "if (half > 32) __syncthreads();\n    }"),
        RACE,
    ),
    "cuda-convnet2, kDotProduct: volatile memory in a warp": Case(
        """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ volatile float sums[64];
    int t = threadIdx.x;
    sums[t] = x[t];
    __syncthreads();
    if (t < 32) {
        volatile float* mine = &sums[t];
        for (int half = 32; half > 0; half /= 2) {
            float other = mine[half];
            __syncwarp();  // 1
            *mine += other;
            __syncwarp();  // 2
        }
        if (t == 0) *out = *mine;
    }
}
""",
        1,
        64,
        *total(64),
        ("__syncwarp();  // 1", ""),
        RACE,
    ),
    "gunrock, Join: what other blocks write is read behind a barrier": Case(
        """
extern "C" __global__ void k(int* out, int* from, const int* x)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    from[i] = x[i];
    __syncthreads();
    int first = blockIdx.x * blockDim.x;
    out[i] = from[first];
}
""",
        4,
        32,
        lambda: (
            torch.zeros(128, dtype=torch.int32),
            torch.zeros(128, dtype=torch.int32),
            torch.arange(128).int(),
        ),
        lambda: (torch.arange(128) // 32 * 32).int(),
        ("int first = blockIdx.x * blockDim.x;", "int first = 0;"),
        RACE,
    ),
    "thundersvm, smo_solve: the next reduction begins while the result is read": Case(
        """
__device__ int place_of_least(const float* values, int* places)
{
    int t = threadIdx.x;
    places[t] = t;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (t < half && values[places[t + half]] < values[places[t]]) places[t] = places[t + half];
        __syncthreads();
    }
    return places[0];
}
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ float values[64];
    __shared__ int places[64];
    int t = threadIdx.x;
    values[t] = x[t];
    int first = place_of_least(values, places);
    float least = values[first];
    __syncthreads();  // 1
    values[t] = -x[t];
    int second = place_of_least(values, places);
    if (t == 0) { out[0] = least; out[1] = -values[second]; }
}
""",
        1,
        64,
        lambda: (torch.zeros(2), ramp(64)),
        lambda: torch.tensor([1.0, 64.0]),
        ("__syncthreads();  // 1", ""),
        RACE,
    ),
    "CUDA-CNN, g_getCost_3: a barrier behind the start of each thread's sum": Case(
        TREE.replace("sums[t] = x[t];", "sums[t] = 0;\n    sums[t] += x[t];"),
        1,
        64,
        *total(64),
        ("sums[t] = 0;", "sums[t] = 0; __syncthreads();"),
        ("redundant barrier",),
    ),
    "CudaSift, FindMaxCorr: a barrier at the end": Case(
        TREE,
        1,
        64,
        *total(64),
        ("*out = sums[0];", "*out = sums[0];\n    __syncthreads();"),
        ("redundant barrier",),
    ),
    "cudpp, sparseMatrixVectorSetFlags: a barrier without shared memory": Case(
        """
extern "C" __global__ void k(int* flags, const int* rows, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) flags[rows[i]] = 1;
}
""",
        2,
        32,
        lambda: (torch.zeros(128, dtype=torch.int32), 2 * torch.arange(60).int(), 60),
        lambda: (torch.arange(128) % 2 == 0).int() * (torch.arange(128) < 120).int(),
        ("flags[rows[i]] = 1;", "flags[rows[i]] = 1;\n    __syncthreads();"),
        ("redundant barrier",),
    ),
}

CASES = CATALOGUE | EXTRA


def notes_of(case, source):
    """Kinds of the notes in a trace of this kernel."""
    with ga.use_backend("simt"):
        kernel = ga.compile(source, "k")
        trace = ga.simt.trace(kernel[case.grid, case.block], *case.args())
    assert not trace.reports
    return {note.kind for note in trace.notes}


def test_every_kernel_bug_of_the_catalogue_is_here():
    assert counts_on_page("CATALOGUE") == [len(CATALOGUE)] * 2 == [19, 19]
    assert counts_on_page("EXTRA") == [len(EXTRA)] * 2
    assert sum(name.startswith("arrayfire") for name in CATALOGUE) == 13
    assert sum(name.startswith("kaldi") for name in CATALOGUE) == 5


@pytest.mark.parametrize("name", CASES)
def test_the_bug_is_found(name):
    case = CASES[name]
    old, new = case.change
    assert old in case.source
    source = case.source.replace(old, new)
    if case.kinds[0] in NOTES:
        assert case.kinds[0] in notes_of(case, source)
        return
    with pytest.raises(ga.errors.KernelError) as info:
        launched(case, source)
    assert {report.kind for report in info.value.reports} & set(case.kinds), info.value


@pytest.mark.parametrize("name", CASES)
def test_the_mended_kernel_gets_no_report(name):
    case = CASES[name]
    result, notes = launched(case, case.source)
    assert not notes
    assert torch.equal(result, case.result()), result
    assert case.kinds[0] not in notes_of(case, case.source)
