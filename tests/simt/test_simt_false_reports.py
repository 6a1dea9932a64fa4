"""Correct kernels that look like mistakes get no report; each one with a mistake still gets one.

A case is a correct kernel and one mistake in it.
"""

import pytest
import torch
from simt_cases import GOOD, good_kernel
from simt_pairs import Case, counts_on_page, ints, launched, with_mistake

import gpuaccel as ga
from gpuaccel.backends import find_compiler
from gpuaccel.simt import checking
from gpuaccel.simt.build import fill_pattern


def alternating(n):
    """-1, 1, 1, -1, 1, 1, ...: lane 0 of a warp is never the first positive one of its third."""
    return torch.where(torch.arange(n) % 3 == 0, -1.0, 1.0)


def flagged(n):
    """Arguments and result of FLAG with n threads."""
    return (lambda: (torch.zeros(n), torch.zeros(n), ints(1))), (lambda: torch.arange(float(n)))


# Block 1 waits for what block 0 writes.
FLAG = """
extern "C" __global__ void k(float* out, float* data, volatile int* flag)
{
    int t = threadIdx.x;
    if (blockIdx.x == 0) {
        data[t] = t;
        __threadfence();
        __syncthreads();
        if (t == 0) *flag = 1;
    } else {
        if (t == 0) while (*flag == 0) { }
        __syncthreads();
        out[t] = data[t];
    }
}
"""
FENCE_OF_ONE = (
    FLAG.replace("        __threadfence();\n", "")
    .replace("*flag = 1;", "{ __threadfence(); atomicExch(flag, 1); }")
    .replace("*flag == 0", "atomicAdd(flag, 0) == 0")
    .replace("volatile ", "")
)
BENIGN = "the results of this launch do not depend on which comes first"


def levels(count):
    """Distances below `count` from vertex 40 of a chain of 96, the others -1."""
    distances = (torch.arange(96) - 40).abs()
    return torch.where(distances < count, distances, -1).int()


CASES = {
    # The loop of the CUDA C++ Programming Guide: its first read is not atomic.
    "loop with atomicCAS": Case(
        """
__device__ void add(double* address, double value)
{
    unsigned long long* bits = (unsigned long long*)address;
    unsigned long long old = *bits, assumed;
    do {
        assumed = old;
        double sum = value + __longlong_as_double(assumed);
        old = atomicCAS(bits, assumed, __double_as_longlong(sum));
    } while (assumed != old);
}
extern "C" __global__ void k(double* sum, const double* x)
{
    {{add(sum, x[ => *sum += (x[}}blockIdx.x * blockDim.x + threadIdx.x]);
}
""",
        lambda: (torch.zeros(1).double(), torch.ones(256).double()),
        lambda: torch.tensor([256.0]).double(),
        grid=4,
    ),
    "a plain read that no atomicCAS of the thread follows": Case(
        """
extern "C" __global__ void k(int* out, int* count)
{
    int old = *count, assumed;
    do {
        assumed = old;
        old = atomicCAS(count, assumed, assumed + 1);
    } while (assumed != old);
    {{out[threadIdx.x] = old; => out[threadIdx.x] = old; out[threadIdx.x] = *count;}}
}
""",
        lambda: (ints(64), ints(1)),
        lambda: torch.arange(64).int(),
    ),
    "bytes of one word": Case(
        """
extern "C" __global__ void k(int* words)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    ((signed char*){{words)[i] => words)[i / 2]}} = (signed char)i;
}
""",
        lambda: (ints(16),),
        lambda: torch.arange(64).to(torch.int8).view(torch.int32),
        grid=2,
        block=32,
    ),
    "members of one struct": Case(
        """
struct Pixel { unsigned char r, g, b, a; };
extern "C" __global__ void k(int* words)
{
    __shared__ Pixel pixels[16];
    int i = threadIdx.x;
    unsigned char* member = &pixels[i / 4].r + i % {{4 => 2}};
    *member = (unsigned char)i;
    __syncthreads();
    if (i < 16) words[i] = *(int*)&pixels[i];
}
""",
        lambda: (ints(16),),
        lambda: torch.arange(64).to(torch.uint8).view(torch.int32),
        ("race", "uninitialised"),
    ),
    "warp-aggregated atomics": Case(
        """
__device__ int append(int* count)
{
    unsigned mask = __activemask();
    int leader = __ffs(mask) - 1, lane = threadIdx.x % 32, first;
    if (lane == leader) first = atomicAdd(count, __popc(mask));
    first = {{__shfl_sync(mask, first, leader) => __shfl_sync(0xffffffffu, first, 0)}};
    return first + __popc(mask & ((1u << lane) - 1));
}
extern "C" __global__ void k(int* out, int* count, const float* x)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (x[i] > 0) out[append(count)] = i;
}
""",
        lambda: (ints(192), ints(1), alternating(192)),
        lambda: torch.cat([torch.arange(192)[alternating(192) > 0], torch.zeros(64)]).int(),
        ("shuffle", "deadlock", "uninitialised"),
        grid=2,
        block=96,
    ),
    "__activemask() in both branches": Case(
        """
extern "C" __global__ void k(int* out, const float* x)
{
    int i = threadIdx.x, count;
    if (x[i] > 0) {
        unsigned mask = {{__activemask(); => 0xffffffffu;}}
        count = __popc(__ballot_sync(mask, 1));
        __syncwarp(mask);
    } else {
        unsigned mask = {{__activemask(); => 0xffffffffu;}}
        count = -(int)__reduce_add_sync(mask, 1);
        __syncwarp(mask);
    }
    __syncwarp();
    out[i] = count;
}
""",
        lambda: (ints(32), alternating(32)),
        lambda: torch.where(alternating(32) > 0, 21, -11).int(),
        ("deadlock",),
        block=32,
    ),
    "a shuffle whose result only some lanes use": Case(
        """
extern "C" __global__ void k(float* out, const float* x, int n)
{
    int i = threadIdx.x;
    unsigned mask = __ballot_sync(0xffffffffu, i < n);
    if (i < n) {
        float sum = x[i];
        for (int distance = 16; distance; distance /= 2) {
            float other = __shfl_down_sync(mask, sum, distance);
            {{if (i + distance < n)}} sum += other;
        }
        __syncwarp(mask);
        if (i == 0) *out = sum;
    }
}
""",
        lambda: (torch.zeros(1), torch.ones(32), 13),
        lambda: torch.tensor([13.0]),
        ("shuffle",),
        block=32,
    ),
    "padding of a struct, also in dynamic shared memory": Case(
        """
struct Mixed { char a; float b; short c; double d; };
extern "C" __global__ void k(double* out)
{
    __shared__ Mixed items[32];
    extern __shared__ Mixed copies[];
    int i = threadIdx.x;
    items[i].a = i;
    items[i].b = i;
    {{items[i].c = i;}}
    items[i].d = i;
    __syncthreads();
    copies[i] = items[31 - i];
    __syncthreads();
    Mixed m = copies[31 - i], other = copies[i];
    out[i] = m.a + m.b + m.c + m.d + other.a + other.b + other.c + other.d;
}
""",
        lambda: (torch.zeros(32).double(),),
        lambda: torch.full((32,), 124.0).double(),
        ("uninitialised",),
        block=32,
        shared=32 * 24,
    ),
    "decoupled look-back": Case(
        """
extern "C" __global__ void k(int* out, const int* x, int* sums, volatile int* state, int* next)
{
    __shared__ int block, before;
    if (threadIdx.x == 0) {
        block = atomicAdd(next, 1);
        sums[block] = x[block];
        {{__threadfence();}}
        state[block] = 1;
        int total = 0;
        for (int b = block - 1; b >= 0; b--) {
            while (state[b] == 0) { }
            __threadfence();
            total += sums[b];
        }
        before = total;
    }
    __syncthreads();
    out[block * blockDim.x + threadIdx.x] = before;
}
""",
        lambda: (ints(256), torch.arange(8).int(), ints(8), ints(8), ints(1)),
        lambda: (torch.arange(8).cumsum(0) - torch.arange(8)).int().repeat_interleave(32),
        grid=8,
        block=32,
    ),
    "flag and value in one word": Case(
        """
extern "C" __global__ void k(int* out, const int* x, {{volatile}} unsigned long long* state)
{
    if (threadIdx.x == 0) {
        int b = blockIdx.x, before = 0;
        if (b > 0) {
            unsigned long long word;
            do word = state[b - 1];
            while (!(word >> 32));
            before = (int)word;
        }
        state[b] = 1ull << 32 | (unsigned)(before + x[b]);
        out[b] = before;
    }
}
""",
        lambda: (ints(8), torch.ones(8).int(), torch.zeros(8, dtype=torch.int64)),
        lambda: torch.arange(8).int(),
        grid=8,
        block=32,
    ),
    "a volatile flag of an earlier block": Case(
        with_mistake(FLAG, "if (t == 0) while (*flag == 0) { }", ""), *flagged(64), grid=2
    ),
    "the first of many flags": Case(
        """
extern "C" __global__ void k(int* out, int* data, volatile int* flags)
{
    if (blockIdx.x == 0) {
        for (int i = 0; i < 9; i++) {
            data[i] = i + 1;
            __threadfence();
            flags[i] = 1;
        }
    } else {
        int sum = 0;
        for (int i = 0; i < 3; i++) {
            while (flags[i] == 0) { }
            sum += {{data[i] => data[8 - i]}};
        }
        *out = sum;
    }
}
""",
        lambda: (ints(1), ints(9), ints(9)),
        lambda: torch.tensor([6]).int(),
        grid=2,
        block=1,
    ),
    "one thread's fence for its block": Case(
        with_mistake(FENCE_OF_ONE, "data[t] = t;\n        __syncthreads();", "data[t] = t;"),
        *flagged(64),
        grid=2,
    ),
    "a lane that waits for its warp": Case(
        with_mistake(
            FLAG.replace("__syncthreads", "__syncwarp"), "{ }\n        __syncwarp();", "{ }"
        ),
        *flagged(32),
        grid=2,
        block=32,
    ),
    "a flag in shared memory": Case(
        """
extern "C" __global__ void k(float* out)
{
    __shared__ volatile int flag;
    __shared__ float data;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        data = 5;
        {{__threadfence_block();}}
        flag = 1;
    } else if (threadIdx.x == 32) {
        while (flag == 0) { }
        __threadfence_block();
        *out = data;
    }
}
""",
        lambda: (torch.zeros(1),),
        lambda: torch.tensor([5.0]),
    ),
    "a lock": Case(
        """
extern "C" __global__ void k(float* sum, int* lock)
{
    if (threadIdx.x == 0) {
        {{while (atomicCAS(lock, 0, 1) != 0) { }}}
        *sum += 1;
        __threadfence();
        atomicExch(lock, 0);
    }
}
""",
        lambda: (torch.zeros(1), ints(1)),
        lambda: torch.tensor([4.0]),
        grid=4,
        block=32,
    ),
    "a sum of a warp in volatile memory": Case(
        """
extern "C" __global__ void k(float* out, const float* x)
{
    __shared__ volatile float sums[32];
    int t = threadIdx.x;
    float sum = x[t];
    sums[t] = sum;
    __syncwarp();
    for (int distance = 16; distance; distance /= 2) {
        sum += sums[(t + distance) % 32];
        {{__syncwarp();}}
        sums[t] = sum;
        __syncwarp();
    }
    if (t == 0) *out = sum;
}
""",
        lambda: (torch.zeros(1), torch.arange(32.0)),
        lambda: torch.tensor([496.0]),
        block=32,
    ),
    "atomicExch sets shared memory first": Case(
        """
extern "C" __global__ void k(int* out, const float* x)
{
    __shared__ int count;
    {{atomicExch(&count, 0);}}
    __syncthreads();
    if (x[threadIdx.x] > 0) atomicAdd(&count, 1);
    __syncthreads();
    if (threadIdx.x == 0) *out = count;
}
""",
        lambda: (ints(1), alternating(96)),
        lambda: torch.tensor([64]).int(),
        ("uninitialised",),
        block=96,
    ),
    "equal values in one place": Case(
        """
extern "C" __global__ void k(int* found, const float* x)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (x[i] > 0) *found = {{1 => i}};
}
""",
        lambda: (ints(1), alternating(128)),
        lambda: torch.ones(1).int(),
        grid=2,
        note="wrote the same value",
    ),
    "equal values in shared memory, each read by its writer": Case(
        """
extern "C" __global__ void k(int* out, int n)
{
    __shared__ int size;
    size = {{n; => n + threadIdx.x;}}
    out[threadIdx.x] = size;
}
""",
        lambda: (ints(64), 7),
        lambda: torch.full((64,), 7).int(),
        note="wrote the same value",
    ),
    # Of the two new vertices one thread reads its own before, the other one after it is written.
    "level-synchronous search": Case(
        """
extern "C" __global__ void k(int* dist, int level, int n)
{
    int v = blockIdx.x * blockDim.x + threadIdx.x;
    if (v >= n || {{dist[v] != level => dist[v] < 0}}) return;
    for (int u = v - 1; u <= v + 1; u += 2)
        if (u >= 0 && u < n && dist[u] == -1) dist[u] = level + 1;
}
""",
        lambda: (levels(3), 2, 96),
        lambda: levels(4),
        grid=3,
        block=32,
        note=BENIGN,
    ),
    "float maximum with atomicCAS that leaves early": Case(
        """
__device__ void raise(float* most, float v)
{
    if (*most >= v) return;
    int *bits = (int*)most, old = *bits, seen;
    do {
        seen = old;
        if (__int_as_float(seen) >= v) break;
        {{old = atomicCAS(bits, seen, __float_as_int(v)); => *most = v; old = seen;}}
    } while (seen != old);
}
extern "C" __global__ void k(float* most, const float* x)
{
    raise(most, x[blockIdx.x * blockDim.x + threadIdx.x]);
}
""",
        lambda: (torch.zeros(1), torch.arange(64.0).roll(9)),
        lambda: torch.tensor([63.0]),
        grid=2,
        block=32,
        note=BENIGN,
    ),
    # The threads before the last one have read it already.
    "atomicMin by the last thread": Case(
        """
extern "C" __global__ void k(int* least, const int* x)
{
    int v = x[threadIdx.x];
    if (v {{< *least) atomicMin(least, v) => <= *least) atomicSub(least, 1)}};
}
""",
        lambda: (ints(1), -(torch.arange(64) == 63).int()),
        lambda: torch.tensor([-1]).int(),
        note=BENIGN,
    ),
    "found by somebody": Case(
        """
extern "C" __global__ void k(int* found, const int* x)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (*found) return;
    if (x[i] == 7) *found = {{1 => i}};
}
""",
        lambda: (ints(1), torch.arange(64).int() % 40),
        lambda: torch.tensor([1]).int(),
        grid=2,
        block=32,
        note=BENIGN,
    ),
    "sieve": Case(
        """
extern "C" __global__ void k(int* composite, int n)
{
    int i = threadIdx.x + 2;
    if (i * i >= n || composite[i]) return;
    for (int j = i * i; j < n; j += i) composite[j] {{= => +=}} 1;
}
""",
        lambda: (ints(200), 200),
        lambda: torch.tensor(
            [i > 3 and any(i % j == 0 for j in range(2, i)) for i in range(200)]
        ).int(),
        note="no barrier orders the two",
    ),
}


def test_the_page_has_this_number_of_cases():
    assert counts_on_page("CASES") == [len(CASES)] * 2


@pytest.mark.parametrize("name", CASES)
def test_a_correct_kernel_gets_no_report(name):
    case = CASES[name]
    result, notes = launched(case, case.source)
    if case.note is None:
        assert not notes
    else:
        assert notes and all(case.note in note for note in notes), notes
    assert torch.equal(result, case.result()), result


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_same_kernel_with_a_mistake_gets_one(name):
    case = CASES[name]
    with pytest.raises(ga.errors.KernelError) as info:
        launched(case, case.wrong_source)
    assert {report.kind for report in info.value.reports} & set(case.kinds), info.value


@pytest.mark.slow
def test_each_barrier_of_the_correct_kernels_orders_something(monkeypatch):
    """So the note on redundant barriers accuses none of them."""
    barriers, needed = set(), set()
    copy_back = checking.Session.copy_back

    def collect(session, *args, **options):
        for use in session.checks.barrier[: session.checks.barriers]:
            place = session.table.locate(use.pc - 1)
            barriers.add(place)
            if use.needed:
                needed.add(place)
        copy_back(session, *args, **options)

    monkeypatch.setattr(checking.Session, "copy_back", collect)
    with ga.use_backend("simt"), ga.checked():
        for name, good in GOOD.items():
            assert all(outcome.right for outcome in good.run(good_kernel(name), 0, "cpu")), name
    assert needed == barriers and len(barriers) >= 5


def test_the_fast_mode_has_the_same_active_lanes():
    for name in ("warp-aggregated atomics", "__activemask() in both branches"):
        case = CASES[name]
        args = case.args()
        with ga.use_backend("simt"), ga.checked(False):
            ga.compile(case.source, "k")[case.grid, case.block, case.shared](*args)
        assert torch.equal(args[0], case.result()), name


def test_notes_are_in_a_trace():
    case = CASES["equal values in one place"]
    with ga.use_backend("simt"):
        kernel = ga.compile(case.source, "k")
        trace = ga.simt.trace(kernel[case.grid, case.block], *case.args())
        shown = str(ga.show(kernel[case.grid, case.block], *case.args()))
    assert not trace.reports
    assert [note.kind for note in trace.notes] == ["same value"]
    assert trace.notes[0].line == 5 and trace.notes[0].message in shown


PAIRS = """
extern "C" __global__ void k(uint2* out, const uint2* x, int n)
{
    uint2 pair[4];
    for (int j = 0; j < 4; j++)
        if (threadIdx.x * 4 + j < n) pair[j] = x[threadIdx.x * 4 + j];
    for (int j = 0; j < 4; j++)
        if (threadIdx.x * 4 + j < n) out[threadIdx.x * 4 + j] = pair[j];
}
"""


@pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler")
def test_a_copied_struct_is_looked_at_after_its_copy():
    # What `out` held before is the pattern of uninitialised variables; that is overwritten.
    pattern = fill_pattern(find_compiler()[0]) - 2**32
    out = torch.full((128, 2), pattern, dtype=torch.int32)
    x = torch.arange(256, dtype=torch.int32).view(128, 2)
    with ga.use_backend("simt"), ga.checked(True):
        ga.compile(PAIRS)[1, 32](out, x, 128)
        assert out.equal(x)
        # Two threads that write different structs race: it is no note of the same value.
        source = "{ out[0] = x[threadIdx.x]; }"
        declaration = 'extern "C" __global__ void k(uint2* out, const uint2* x) '
        with pytest.raises(ga.errors.KernelError, match="race: thread 1") as caught:
            ga.compile(declaration + source)[1, 32](out, x)
    assert [report.kind for report in caught.value.reports] == ["race"]


@pytest.mark.slow
def test_a_number_that_looks_like_a_variable_that_is_not_set_is_no_mistake():
    """Of bytes, and of an integer; one that is not set is still found."""
    inverted = """
extern "C" __global__ void f(uchar4* o, const uchar4* x)
{
    uchar4 v = x[threadIdx.x];
    o[threadIdx.x] = make_uchar4(255 - v.x, 255 - v.y, 255 - v.z, 255 - v.w);
}
"""
    pattern = fill_pattern(find_compiler()[0])
    byte = 255 - (pattern & 0xFF)
    x = torch.randint(0, 256, (400,), dtype=torch.uint8)
    x[40:44] = byte
    number = pattern - 2**32
    with ga.use_backend("simt"):
        o = torch.zeros_like(x)
        ga.compile(inverted)[1, 100](o, x)
        assert torch.equal(o, 255 - x)
        source = 'extern "C" __global__ void f(int* o, int a) { o[0] = a + 2; }'
        o = ints(1)
        ga.compile(source)[1, 1](o, number - 2)
        assert o.item() == number
        source = (
            'extern "C" __global__ void f(int* o, int a) { int v; if (a > 0) v = a; o[0] = v; }'
        )
        with pytest.raises(ga.errors.KernelError, match="uninitialised local variable to o"):
            ga.compile(source)[1, 1](o, -1)
