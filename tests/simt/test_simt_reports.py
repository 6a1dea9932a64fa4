"""What a report names: the index that is far outside, the local array, the loop that waits.

The kernels of each part are one source, which is compiled once.
"""

import ctypes

import pytest
import torch
from simt_pairs import ints, mistakes

import gpuaccel as ga

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# ---- wild indices --------------------------------------------------------------------------------

WILD = """
__global__ void product(float* x, int row, int stride) { x[row * stride + threadIdx.x] = 1; }
extern "C" __global__ void earlier(float* x, int row, int stride)
{
    int i = row * stride;
    x[i] = 1;
}
extern "C" __global__ void before(float* x) { unsigned i = threadIdx.x; x[i] = x[i - 1]; }
extern "C" __global__ void between(float* a, float* x, float* b)
{
    unsigned i = threadIdx.x;
    a[i] = x[i - 1] + b[i];
}
extern "C" __global__ void vectors(float4* x) { unsigned i = threadIdx.x; x[i - 1] = float4{}; }
extern "C" __global__ void bytes(unsigned char* x, int n) { x[n + threadIdx.x] = 0; }
extern "C" __global__ void doubles(double* x, int n) { x[n] = 0; }
extern "C" __global__ void sum(float* x, int n, int m) { x[n + m] = 1; }
extern "C" __global__ void difference(float* x, int n, int m) { x[n - m] = 1; }
extern "C" __global__ void hash(float* x, int n)
{
    int h = 5381;
    for (int i = 0; i < n; i++) h = h * 33 + i;  // wraps around on purpose
    x[threadIdx.x] = h & 7;
}
"""
WILD_CASES = {
    "product": ((torch.zeros(100), 70000, 70000), "x", 605032704, "line 2 computes 70000 * 70000"),
    "earlier": ((torch.zeros(9), 60000, 60000), "x", -694967296, "line 5 computes 60000 * 60000"),
    "before": ((torch.zeros(32),), "x", 2**32 - 1, "as an unsigned int, -1 is 4294967295"),
    "between": (tuple(torch.zeros(32) for _ in range(3)), "x", 2**32 - 1, "-1 is 4294967295"),
    "vectors": ((torch.zeros(32),), "x", 4 * (2**32 - 1), "-1 is 4294967295"),
    "bytes": ((torch.zeros(32, dtype=torch.uint8), 2**31 - 1), "x", 2**31 - 1, "32 elements"),
    "doubles": ((torch.zeros(3).double(), -(2**31)), "x", -(2**31), "3 elements of float64"),
    "sum": ((torch.zeros(3), 2**30, 2**30), "x", -(2**31), "computes 1073741824 + 1073741824"),
    "difference": (
        (torch.zeros(3), -(2**31), 2),
        "x",
        2**31 - 2,
        "computes -2147483648 - 2, which",
    ),
}


@pytest.mark.parametrize("name", WILD_CASES)
def test_a_wild_index_is_named_with_its_tensor(name):
    args, tensor, element, words = WILD_CASES[name]
    (report,) = mistakes(WILD, *args, name=name, block=4)
    assert (report.kind, report.tensor, report.element) == ("out of bounds", tensor, element)
    assert words in report.message and "tensors=" not in report.message, report.message


def test_a_hash_that_wraps_around_is_no_mistake(recwarn):
    x = torch.zeros(4)
    ga.compile(WILD, "hash")[1, 4](x, 100)
    h = 5381
    for i in range(100):
        h = h * 33 + i
    assert x.tolist() == [h & 7] * 4 and not recwarn.list


# ---- local arrays --------------------------------------------------------------------------------

LOCAL = """
__device__ __noinline__ void fill(float* p, int n)
{
    for (int i = 0; i < n; i++) p[i] = i;
}
__device__ __noinline__ float at(const float* p, long i) { return p[i]; }
extern "C" __global__ void one(float* x, int n) { float a[4]; fill(a, n); x[0] = a[0]; }
extern "C" __global__ void two(float* x, int n)
{
    float a[4], b[8];
    fill(a, 4);
    fill(b, n);
    x[0] = a[0] + b[3];
}
extern "C" __global__ void member(float* x, int n)
{
    struct { float v[4]; int m; } s;
    fill(s.v, n);
    s.m = 1;
    x[0] = s.v[1] + s.m;
}
__global__ void reads(float* x, int n) { float a[4]; fill(a, 4); x[threadIdx.x] = at(a, n); }
extern "C" __global__ void waits(float* x, int n)
{
    float a[4];
    fill(a, 4);
    __syncthreads();
    x[threadIdx.x] = at(a, n);
}
extern "C" __global__ void scaled(float* x, int n) { float a[4]; fill(a, 4); x[0] = at(a, 4l * n); }
"""
# name -> n, line, words
LOCAL_CASES = [
    ("one", 5, 4, "writes"),
    ("one", 100_000, 4, "writes"),
    ("two", 64, 4, "local array through p"),
    ("member", 64, 4, "local array through p"),
    ("reads", 70_000, 6, "beyond a local array through p"),
    ("reads", -70_000_000, 6, "beyond a local array through p"),
    ("waits", 80_000_000, 6, "beyond a local array through p"),
    ("scaled", 2**31 - 1, 6, "beyond a local array through p"),
]


@pytest.mark.parametrize("name, n, line, words", LOCAL_CASES)
def test_an_overrun_of_a_local_array_is_named_at_its_line(name, n, line, words):
    (report,) = mistakes(LOCAL, torch.zeros(4), n, name=name, block=4)
    assert (report.kind, report.line, report.file) == ("out of bounds", line, "<source>")
    assert words in report.message and report.callers, report.message


def test_local_arrays_that_are_used_to_their_end_are_no_mistake(recwarn):
    for name, n in (("one", 4), ("two", 8), ("member", 4), ("reads", 3), ("waits", 3)):
        ga.compile(LOCAL, name)[1, 1](torch.zeros(4), n)
    assert not recwarn.list


# ---- addresses in memory -------------------------------------------------------------------------

ADDRESSES = """
struct Lock { int* mutex; };
struct Row { int n, unused; int* start; };
struct Node { Node* next; float value; };
struct Table { unsigned long long* words; int n; };
extern "C" __global__ void locks(Lock* l) { *l[threadIdx.x].mutex = 1; }
extern "C" __global__ void whole(unsigned long long* l) { *(int*)l[threadIdx.x] = 1; }
extern "C" __global__ void anything(void* l) { *((int**)l)[threadIdx.x] = 1; }
extern "C" __global__ void rows(Row* r) { r[threadIdx.x].start[0] += r[threadIdx.x].n; }
extern "C" __global__ void tables(int*** l) { *l[0][threadIdx.x] = 1; }
extern "C" __global__ void number(unsigned long long address) { ((int*)address)[threadIdx.x] = 1; }
extern "C" __global__ void by_value(Table t) { *(int*)t.words[threadIdx.x] = t.n; }
extern "C" __global__ void list(Node* n, float* out)
{
    float sum = 0;
    for (Node* p = n; p; p = p->next) sum += p->value;
    out[threadIdx.x] = sum;
}
extern "C" __global__ void link(Node* n) { int i = threadIdx.x; n[i].next = i ? n + i - 1 : 0; }
extern "C" __global__ void halves(const unsigned* l)
{
    int* p = (int*)((unsigned long long)l[1] << 32 | l[0]);
    p[threadIdx.x] = 1;
}
"""


class Table(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64), ("n", ctypes.c_int)]


def addresses(tensor):
    """The address of each element, as int64."""
    first = tensor.data_ptr()
    return torch.arange(first, first + 4 * tensor.numel(), 4)


def argument(name, m):
    """(argument, tensors=) of a kernel that gets the addresses of m's elements."""
    table = addresses(m)
    if name == "rows":
        table = torch.stack([torch.ones(4, dtype=torch.int64), table], 1).contiguous()
    if name == "tables":
        return torch.tensor([table.data_ptr()]), [table, m]
    if name == "number":
        return m.data_ptr(), [m]
    if name == "by_value":
        return Table(table.data_ptr(), 1), [table, m]
    return table.view(torch.uint8) if name == "anything" else table, [m]


@pytest.mark.parametrize(
    "name", ["locks", "whole", "anything", "rows", "tables", "number", "by_value"]
)
def test_addresses_in_structs_and_numbers_lead_to_their_tensors(name):
    m = ints(4)
    table, tensors = argument(name, m)
    before = table.clone() if isinstance(table, torch.Tensor) else None
    ga.compile(ADDRESSES, name)[1, 4](table, tensors=tensors)
    assert m.tolist() == [1, 1, 1, 1]
    if before is not None:
        assert torch.equal(table, before)


def test_a_linked_list_is_followed_and_one_that_a_kernel_made_has_the_tensors_addresses():
    nodes = torch.zeros(4, 2, dtype=torch.int64)
    nodes.view(torch.float32)[:, 2] = torch.arange(1.0, 5.0)
    first = nodes.data_ptr()
    nodes[:, 0] = torch.tensor([first + 16, first + 32, first + 48, 0])
    out = torch.zeros(2)
    ga.compile(ADDRESSES, "list")[1, 2](nodes, out)
    assert out.tolist() == [10.0, 10.0]
    ga.compile(ADDRESSES, "link")[1, 4](nodes)
    assert nodes[:, 0].tolist() == [0, first, first + 16, first + 32]


def test_an_address_behind_its_tensor_and_one_that_cannot_be_found_are_named():
    m = ints(4)
    table = addresses(m)[1:]
    table = torch.cat([table, table[-1:] + 4])
    (report,) = mistakes(ADDRESSES, table, name="locks", block=4, tensors=[m])
    assert (report.tensor, report.element, report.thread) == ("tensors[0]", 4, (3, 0, 0))
    halves = addresses(m).view(torch.int32)
    (report,) = mistakes(ADDRESSES, halves, name="halves", block=4, tensors=iter([m]))
    assert report.kind == "far" and "that of tensors[0][0]" in report.message
    assert "ga.checked(False)" in report.message
    (report,) = mistakes(ADDRESSES, addresses(m), name="locks", block=4)
    assert report.kind == "far" and "tensors=[...]" in report.message


# ---- loops that wait, and other messages ---------------------------------------------------------

OTHER = """
extern "C" __global__ void later(int* out, volatile int* flag)
{
    if (blockIdx.x == 1) flag[0] = 1;
    while (flag[0] == 0) { }
    out[blockIdx.x] = 1;
}
extern "C" __global__ void barrier(int* out, int* count)
{
    atomicAdd(count, 1);
    while (atomicAdd(count, 0) < gridDim.x) __nanosleep(10);
    out[blockIdx.x] = 1;
}
__global__ void locked(int* out, int* lock) { while (atomicCAS(lock, 0, 1)) { } out[0] = 1; }
extern "C" __global__ void bounded(int* out, volatile int* flag)
{
    int i = 0;
    while (flag[0] == 0 && i < 1000) i++;
    out[threadIdx.x] = i;
}
extern "C" __global__ void dynamic(int* out, int* x)
{
    extern __shared__ int copy[];
    copy[threadIdx.x] = x[0];
    out[threadIdx.x] = copy[threadIdx.x];
}
extern "C" __global__ void race(int* out, int* x) { x[0] += 1; out[threadIdx.x] = 1; }
template <class F> __device__ int fold(int v, F f)
{
    for (int o = 16; o; o /= 2) v = f(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
__device__ __forceinline__ int plus(int a, int b) { return a + b; }
__forceinline__ __device__ int larger(int a, int b) { return a > b ? a : b; }
static __forceinline__ __device__ int smaller(int a, int b) { return a < b ? a : b; }
extern "C" __global__ void functor(int* out, int* x)
{
    int v = threadIdx.x, (*chosen)(int, int) = x[0] ? larger : smaller;
    out[threadIdx.x] = fold(v, plus) + fold(v, larger) + fold(v, &smaller) + chosen(v, 40);
}
"""


@pytest.mark.parametrize("name", ["later", "barrier", "locked"])
def test_a_wait_that_cannot_end_is_found_long_before_the_time_limit(name):
    (report,) = mistakes(OTHER, ints(4), ints(1), name=name, grid=2, block=1)
    assert report.kind == "deadlock" and "waits in a loop" in report.message
    assert "cannot wait for a later one" in report.message and report.line is not None


def test_a_wait_with_an_end_is_no_mistake():
    out = ints(4)
    ga.compile(OTHER, "bounded")[1, 4](out, ints(1))
    assert out.tolist() == [1000] * 4


def test_forgotten_dynamic_shared_memory_says_how_a_launch_asks_for_it():
    reports = mistakes(OTHER, ints(4), ints(1), name="dynamic", block=4)
    assert reports and all("kernel[grid, block, bytes]" in report.message for report in reports)
    ga.compile(OTHER, "dynamic")[1, 4, 16](ints(4), ints(1))


def test_a_race_says_how_the_kernel_runs_all_the_same():
    kernel, out = ga.compile(OTHER, "race"), ints(4)
    with pytest.raises(ga.errors.KernelError, match=r"ga\.checked\(False\) runs"):
        kernel[1, 4](out, ints(1))
    with ga.checked(False):
        kernel[1, 4](out, ints(1))
    assert out.tolist() == [1] * 4


def test_a_forceinline_function_may_be_an_argument(mode):
    out = ints(32)
    ga.compile(OTHER, "functor")[1, 32](out, ints(1))
    assert out.tolist() == [496 + 31 + 0 + i for i in range(32)]
