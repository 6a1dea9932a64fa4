"""Kernels for the tests of simt: BUGS, each with one mistake planted, and GOOD, which have none.

A line that has to be reported has a mark in a comment: `// BUG`, `// BUG2`. The other side of a
race is marked `// OTHER`. Each source compiles by itself. `program(sources)` joins many into one
text: forty kernels compile ten times faster together.

    >>> bug = BUGS["read_past_end"]
    >>> call = bug.call()                          # fresh tensors, a grid, a block
    >>> good = GOOD["block_scan"]
    >>> for outcome in good.run(kernel, seed=0, device="cpu"):   # compares with torch or numpy
    ...     assert outcome.right, outcome
"""

import functools
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from simt_pairs import ints

import gpuaccel as ga
from gpuaccel.compiler.program import kernel_root, whole_program
from gpuaccel.ops.accumulate import packed_additions
from gpuaccel.ops.clip import launches_for, reference_scale
from gpuaccel.ops.embedding_backward import (
    reference_encoder,
    reference_encoder_backward,
)
from gpuaccel.ops.rounding import reference_random_bits, reference_round
from gpuaccel.ops.token_sort import MAX_TOKENS, reference_segments
from gpuaccel.optim import AdamW
from gpuaccel.optim.update_rule import STEPS, Job, launch_update, list_launches
from gpuaccel.source import closing, kernel_names, without_comments

# ---- planted bugs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One launch: `kernel[grid, block, shared](*args, tensors=tensors)`."""

    grid: object
    block: object
    args: tuple
    tensors: tuple = ()
    shared: int = 0


@dataclass(frozen=True)
class Expect:
    """A report that is expected. None is not compared: it depends on the order of the threads."""

    kinds: tuple  # any of these kinds is right
    at: str = "BUG"  # mark of the line
    other: str | None = None  # mark of the other side; line and other line may come in either order
    tensor: str | None = None
    element: int | None = None
    thread: tuple | None = None
    block: tuple | None = None


@dataclass(frozen=True)
class Bug:
    name: str  # of the case and of its kernel
    source: str
    call: Callable[[], Call]
    expects: tuple[Expect, ...]
    note: bool = False  # not an error: the launch succeeds


def marked(source: str) -> dict[str, list[int]]:
    """Mark -> line numbers, from 1."""
    found = {}
    for number, line in enumerate(source.split("\n"), 1):
        for mark in re.findall(r"//.*?\b((?:BUG|OTHER)\d?)\b", line):
            found.setdefault(mark, []).append(number)
    return found


def program(sources: list[str]) -> tuple[str, list[int]]:
    """All sources as one text, and how many lines stand before each."""
    before, lines = [], 0
    for source in sources:
        before.append(lines)
        lines += source.count("\n")
    return "".join(sources), before


_FUNCTION = re.compile(
    r"(?:template\s*<[^>]*>\s*)?(?:extern \"C\" __global__|__device__)[^;{(]*?"
    r"(?:__launch_bounds__\s*\([^()]*\)[^;{(]*?)?\b(\w+)\s*\("
)


@functools.cache
def functions(source):
    """Name -> [(start, end)] of a file's functions; overloads share a name."""
    text, places = without_comments(source), {}
    for m in _FUNCTION.finditer(text):
        body = text.index("{", closing(text, m.end() - 1))
        places.setdefault(m[1], []).append((m.start(), closing(text, body)))
    return places


@functools.cache
def reached(kernel, source):
    """Names of the functions that a kernel calls, and its own."""
    text, places = without_comments(source), functions(source)
    names, new = set(), {kernel}
    while new:
        names |= new
        inside = " ".join(text[a:b] for name in new for a, b in places[name])
        words = set(re.findall(r"\w+", inside))
        new = (words & places.keys()) - names
    return names


def alone(kernel, source):
    """The source without the functions that the kernel does not call: it compiles faster."""
    # Functions of a header call functions of the source, too.
    needed = reached(kernel, whole_program(source, "kernels_cu/kernel.cu")[0])
    for name, places in functions(source).items():
        for a, b in places if name not in needed else ():
            source = source[:a] + re.sub(r"[^\n]", " ", source[a:b]) + source[b:]
    return source


def renamed(source, suffix):
    """The source with a suffix behind every name that it defines: many copies fit one program."""
    text = without_comments(source)
    names = {
        *kernel_names(source),
        *re.findall(r"__device__[^;{(]*?\b(\w+)\s*\(", text),
        *re.findall(r"\b(?:struct|union) (?:__align__\(.*?\) )?(\w+)\s*\{", text),
        *re.findall(r"#define (\w+)", text),
    }
    return re.sub(rf"\b({'|'.join(sorted(names))})\b", rf"\1{suffix}", source)


def with_headers(path):
    """A file's text with its headers in the place of the #include lines."""
    return re.sub(
        r'#include "(.*?)"', lambda m: with_headers(kernel_root() / m[1]), path.read_text()
    )


BUGS: dict[str, Bug] = {}


def bug(source, call, *expects, **more):
    (name,) = kernel_names(source)
    BUGS[name] = Bug(name, source.lstrip("\n"), call, expects, **more)


def ramp(n, dtype=torch.float32):
    return torch.arange(1, n + 1).to(dtype)


OUTSIDE, RACE, UNSET = ("out of bounds",), ("race",), ("uninitialised",)

bug(
    """
extern "C" __global__ void read_past_end(float* out, const float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i + 1] - x[i];  // BUG: the last thread has no right neighbour
}
""",
    lambda: Call(4, 256, (torch.zeros(1000), ramp(1000), 1000)),
    Expect(OUTSIDE, tensor="x", element=1000, thread=(231, 0, 0), block=(3, 0, 0)),
)

bug(
    """
extern "C" __global__ void float4_tail(float4* out, const float4* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (n + 3) / 4) {
        float4 four = x[i];  // BUG: 1001 elements are 250 groups and one
        out[i] = four;                                          // BUG2
    }
}
""",
    lambda: Call(4, 64, (torch.zeros(1001), ramp(1001), 1001)),
    Expect(OUTSIDE, tensor="x", element=1001, thread=(58, 0, 0), block=(3, 0, 0)),
    Expect(OUTSIDE, "BUG2", tensor="out", element=1001, thread=(58, 0, 0), block=(3, 0, 0)),
)

bug(
    """
extern "C" __global__ void before_the_start(float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i - 1] = 0.0f;                                 // BUG
}
""",
    lambda: Call(1, 32, (ramp(32), 32)),
    Expect(OUTSIDE, tensor="x", element=-1, thread=(0, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void end_of_a_view(float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = 1.0f;  // BUG: the storage goes on behind the view, the tensor does not
}
""",
    lambda: Call(1, 64, (ramp(1000)[100:150], 50)),
    Expect(OUTSIDE, tensor="x", element=50, thread=(50, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void rows_without_a_guard(float* out, const float* x, int rows, int columns)
{
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (column < columns)
        out[row * columns + column] = 1.0f;                     // BUG: rows may end within a block
}
""",
    lambda: Call((3, 4), (16, 8), (torch.zeros(26, 40), torch.ones(26, 40), 26, 40)),
    Expect(OUTSIDE, tensor="out", element=26 * 40, thread=(0, 2, 0), block=(0, 3, 0)),
)

bug(
    """
extern "C" __global__ void atomic_past_end(int* bins, const int* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&bins[x[i]], 1);  // BUG: one value is larger than the bins there are
}
""",
    lambda: Call(1, 128, (ints(256), torch.where(ramp(128) == 78, 300, 5).int(), 128)),
    Expect(OUTSIDE, tensor="bins", element=300, thread=(77, 0, 0), block=(0, 0, 0)),
)

PAIR = struct.Struct("QQi4x")


def _pair(n):
    out, x = torch.zeros(n), ramp(n)
    return Call(1, 128, (PAIR.pack(out.data_ptr(), x.data_ptr(), n),), (out, x))


bug(
    """
struct Pair { float* out; const float* x; int n; };
extern "C" __global__ void past_end_in_a_struct(Pair pair)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= pair.n) {
        float value = pair.x[i];                                // BUG
        pair.out[i] = 2.0f * value;                             // BUG2
    }
}
""",
    lambda: _pair(100),
    Expect(OUTSIDE, element=100, thread=(100, 0, 0), block=(0, 0, 0)),
    Expect(OUTSIDE, "BUG2", element=100, thread=(100, 0, 0), block=(0, 0, 0)),
)


def _table(second):
    x = ramp(64)
    return Call(2, 64, (torch.zeros(128), torch.tensor([x.data_ptr(), second])), (x,))


bug(
    """
extern "C" __global__ void wild_address(float* out, const float* const* table)
{
    const float* x = table[blockIdx.x];
    float value = x[threadIdx.x];  // BUG: the second address is nobody's
    out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}
""",
    lambda: _table(0x123456789000),
    Expect(("far",), thread=(0, 0, 0), block=(1, 0, 0)),
)

bug(
    """
extern "C" __global__ void null_pointer(float* out, const float* bias, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] += bias[i];                               // BUG: None was passed
}
""",
    lambda: Call(2, 32, (ramp(64), None, 64)),
    Expect(("null",), tensor=None, thread=(0, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void local_groups_past_end(float4* out, const float4* x, int count)
{
    float4 group[2];
    for (int k = 0; k <= count; k++)
        group[k] = x[k];  // BUG: group[2], a whole struct at once
    out[threadIdx.x] = make_float4(group[0].x, group[1].y, 0.0f, 0.0f);
}
""",
    lambda: Call(1, 32, (torch.zeros(128), ramp(12), 2)),
    Expect(OUTSIDE, thread=(0, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void shared_groups_past_end(float4* out, const float4* x)
{
    __shared__ float4 groups[32];
    int t = threadIdx.x;
    groups[t] = x[t];
    __syncthreads();
    out[t] = groups[t + 1];                                     // BUG: groups[32]
}
""",
    lambda: Call(1, 32, (torch.zeros(128), ramp(128))),
    Expect(OUTSIDE, thread=(31, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void dynamic_shared_past_end(float* out, const float* x)
{
    extern __shared__ float numbers[];
    int t = threadIdx.x;
    numbers[t] = x[t];                                          // BUG: 128 threads, room for 100
    out[t] = 2.0f * x[t];
}
""",
    lambda: Call(1, 128, (torch.zeros(128), ramp(128)), shared=400),
    Expect(OUTSIDE, element=100, thread=(100, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void misaligned_float4(float* out, const float* x)
{
    int t = threadIdx.x;
    float4 four = *reinterpret_cast<const float4*>(x + 4 * t + 1);  // BUG: 4 bytes off
    out[t] = four.x + four.y + four.z + four.w;
}
""",
    lambda: Call(1, 32, (torch.zeros(32), ramp(132))),
    Expect(("misaligned",), thread=(0, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void no_barrier(float* out, const float* x)
{
    __shared__ float buffer[256];
    int t = threadIdx.x;
    buffer[t] = x[blockIdx.x * 256 + t];                        // OTHER
    out[blockIdx.x * 256 + t] = buffer[255 - t];                // BUG: the barrier is missing
}
""",
    lambda: Call(2, 256, (torch.zeros(512), ramp(512))),
    Expect(UNSET, tensor="buffer", element=255, thread=(0, 0, 0), block=(0, 0, 0)),
    Expect(RACE, other="OTHER", tensor="buffer"),
)

bug(
    """
extern "C" __global__ void too_many_partials(float* out, const float* x)
{
    __shared__ float partial[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) partial[warp] = x[warp];
    __syncthreads();
    if (warp == 0) {
        float mine = partial[lane];                             // BUG: 8 warps wrote 8 of the 32
        out[lane] = mine;
    }
}
""",
    lambda: Call(1, 256, (torch.zeros(32), ramp(8))),
    Expect(UNSET, tensor="partial", element=8, thread=(8, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void only_the_last_warp_waits(float* out)
{
    __shared__ float total;
    if (threadIdx.x == 0) total = 1.0f;
    __syncthreads();
    out[threadIdx.x] = total;                                   // OTHER
    if (threadIdx.x >= 96) {
        __syncwarp();  // its own lanes have read it; the others perhaps not
        if (threadIdx.x == 96)
            total = 2.0f;                                       // BUG
    }
}
""",
    lambda: Call(1, 128, (torch.zeros(128),)),
    Expect(RACE, other="OTHER", tensor="total"),
)

bug(
    """
extern "C" __global__ void sum_without_atomic(float* sum, const float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) *sum += x[i];                                    // BUG
}
""",
    lambda: Call(2, 64, (torch.zeros(1), ramp(128), 128)),
    Expect(RACE, other="BUG", tensor="sum", element=0),
)

bug(
    """
extern "C" __global__ void no_fence(float* total, float* partial, unsigned* arrived, const float* x)
{
    __shared__ bool last;
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int k = 0; k < 32; k++) sum += x[blockIdx.x * 32 + k];
        partial[blockIdx.x] = sum;                              // OTHER
        last = atomicAdd(arrived, 1u) == gridDim.x - 1;  // no __threadfence() before
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0.0f;
        for (unsigned b = 0; b < gridDim.x; b++)
            sum += partial[b];                                  // BUG
        total[0] = sum;
    }
}
""",
    lambda: Call(4, 32, (torch.zeros(1), torch.zeros(4), ints(1), ramp(128))),
    Expect(RACE, other="OTHER", tensor="partial", block=(3, 0, 0)),
)

bug(
    """
extern "C" __global__ void overwritten_for_other_blocks(float* out, float* scale)
{
    out[blockIdx.x * blockDim.x + threadIdx.x] = scale[0];      // OTHER
    __syncthreads();
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0)
        scale[0] = 0.0f;  // BUG: other blocks may not have read it yet
}
""",
    lambda: Call(4, 64, (torch.zeros(256), torch.ones(1))),
    Expect(RACE, other="OTHER", tensor="scale", element=0),
)

bug(
    """
extern "C" __global__ void barrier_in_both_branches(float* x)
{
    int t = threadIdx.x;
    if (t % 2 == 0) {
        x[t] *= 2.0f;
        __syncthreads();                                        // BUG
        x[t] += 1.0f;
    } else {
        x[t] -= 3.0f;
        __syncthreads();                                        // OTHER
        x[t] *= 4.0f;
    }
}
""",
    lambda: Call(1, 64, (ramp(64),)),
    Expect(("divergent barrier",), other="OTHER", block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void barrier_against_shuffle(float* x)
{
    int t = threadIdx.x;
    float value = x[t];
    if (t < 16) {
        __syncthreads();                                        // OTHER
        value += 1.0f;
    } else {
        value = __shfl_sync(0xffffffffu, value, 16);  // BUG: lanes of the mask wait elsewhere
    }
    x[t] = value;
}
""",
    lambda: Call(1, 32, (ramp(32),)),
    Expect(("deadlock",), other="OTHER", block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void shuffle_from_the_gone(float* x, int n)
{
    int t = threadIdx.x;
    if (t >= n) return;
    float value = x[t];
    value += __shfl_down_sync(0xffffffffu, value, 1);  // BUG: thread 40 has returned
    x[t] = value;
}
""",
    lambda: Call(1, 64, (ramp(40), 40)),
    Expect(("shuffle",), thread=(39, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void lane_outside_its_mask(float* x)
{
    int lane = threadIdx.x;
    float value = x[lane];
    if (lane < 20)
        value += __shfl_xor_sync(0x0000ffffu, value, 1);  // BUG: lanes 16 to 19 are not in the mask
    x[lane] = value;
}
""",
    lambda: Call(1, 32, (ramp(32),)),
    Expect(("shuffle",), thread=(16, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void division_by_zero(int* out, const int* x, const int* by, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] / by[i];                           // BUG: by[77] is 0
}
""",
    lambda: Call(2, 64, (ints(128), ramp(128).int(), (ramp(128) - 78).int(), 128)),
    Expect(("division by zero",), thread=(13, 0, 0), block=(1, 0, 0)),
)

bug(
    """
extern "C" __global__ void shift_too_far(int* out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (int)(1u << i);                         // BUG: 32 and more
}
""",
    lambda: Call(1, 64, (ints(40), 40)),
    Expect(("shift",), thread=(32, 0, 0), block=(0, 0, 0)),
)

bug(
    """
__device__ __noinline__ float sink(const float* x, int d)
{ volatile float k[64]; k[d % 64] = *x; return d <= 0 ? k[0] : sink(x, d - 1) + k[d % 64]; }  // BUG
extern "C" __global__ void too_deep(float* out, const float* x, int depth)
{
    out[threadIdx.x] = sink(x, depth);
}
""",
    lambda: Call(1, 32, (torch.zeros(32), ramp(1), 10_000_000)),
    Expect(("stack overflow",), thread=(0, 0, 0), block=(0, 0, 0)),
)

bug(
    """
// The frame is larger than any guard page.
extern "C" __global__ void large_local_array(int* out, const int* place)
{ volatile char kept[1 << 21]; kept[place[0]] = 1; out[threadIdx.x] = kept[place[1]]; }     // BUG
""",
    lambda: Call(1, 32, (ints(32), torch.tensor([0, 2000000]).int())),
    Expect(("stack overflow",), thread=(0, 0, 0), block=(0, 0, 0)),
)

bug(
    """
extern "C" __global__ void writes_through_const(float* out, const float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        out[i] = x[i];
        const_cast<float*>(x)[i] = 0.0f;  // BUG: allowed, but the signature said otherwise
    }
}
""",
    lambda: Call(1, 32, (torch.zeros(32), ramp(32), 32)),
    Expect(("const",), tensor="x"),
    note=True,
)


# ---- correct kernels -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a launch wrote beside what it should have written."""

    label: str
    got: torch.Tensor  # on the CPU
    want: torch.Tensor
    tolerance: float = 0.0  # of |want| (largest element); 0: every bit

    @property
    def right(self) -> bool:
        if self.tolerance == 0.0:
            return same_bits(self.got, self.want)
        bound = self.tolerance * max(float(self.want.double().abs().max()), 1e-30)
        return bool(
            ((self.got.double() - self.want.double()).abs() <= bound).all()
        )  # NaN is not right

    def __str__(self):
        if self.got.shape != self.want.shape:
            return f"{self.label}: shape {self.got.shape}, expected {self.want.shape}"
        d = (self.got.double() - self.want.double()).abs()
        return (
            f"{self.label}: {int((d != 0).sum())} of {d.numel()} differ, by {d.max():.3g} at most"
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def ratio(label, got, exact, tolerance=1e-6) -> Outcome:
    """Each element over the exact one."""
    got = got.cpu().double() / exact
    return Outcome(f"{label}, over the exact ones", got, torch.ones_like(got), tolerance)


def finite(t):
    """On the CPU, with numbers for what is not finite: NaN has other bits on a GPU."""
    return t.cpu().nan_to_num(-7.0, -8.0, -9.0)


@dataclass(frozen=True)
class Good:
    """run(kernel, seed, device) launches on several sizes and yields an Outcome for each result."""

    name: str
    source: str
    run: Callable


GOOD: dict[str, Good] = {}


def good(source):
    """Enters the decorated `run` under the name of the kernel."""
    (name,) = kernel_names(source)

    def enter(run):
        GOOD[name] = Good(name, source.lstrip("\n"), run)
        return run

    return enter


def rng(seed):
    return np.random.default_rng(seed)


def normal(random, *shape):
    return random.standard_normal(shape, dtype=np.float32)


def on(device, array):
    """A fresh tensor on the device, from a numpy array or a tensor."""
    return (torch.from_numpy(array) if isinstance(array, np.ndarray) else array).clone().to(device)


def cpu(array):
    return torch.from_numpy(np.ascontiguousarray(array)) if isinstance(array, np.ndarray) else array


SIZES = (1, 255, 256, 257, 1000)
f32 = np.float32


@good("""
extern "C" __global__ void vec_add(float* out, const float* a, const float* b, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
""")
def run(kernel, seed, device):
    for n in SIZES:
        a, b = normal(rng(seed), 2, n)
        out = on(device, np.full(n, np.nan, f32))
        kernel[-(-n // 256), 256](out, on(device, a), on(device, b), n)
        yield Outcome(f"n = {n}", out.cpu(), cpu(a + b))


@good("""
struct Span { float* begin; float* end; const float* grad; };
extern "C" __global__ void add_between_pointers(Span span)
{
    float* first = span.begin + threadIdx.x;
    for (float* p = first; p < span.end; p += blockDim.x) *p += span.grad[p - span.begin];
}
""")
def run(kernel, seed, device):
    for n in (1, 100):
        a, g = normal(rng(seed), 2, n)
        acc, grad = on(device, a), on(device, g)
        kernel[1, 64](
            struct.pack("QQQ", acc.data_ptr(), acc.data_ptr() + 4 * n, grad.data_ptr()),
            tensors=[acc, grad],
        )
        yield Outcome(f"n = {n}", acc.cpu(), cpu(a + g))


def strided_sums(values, blocks, threads):
    """(blocks, threads) float32: each thread's sum of every (blocks * threads)-th value."""
    padded = np.zeros(-(-len(values) // (blocks * threads)) * blocks * threads, f32)
    padded[: len(values)] = values
    sums = np.zeros(blocks * threads, f32)
    for row in padded.reshape(-1, blocks * threads):
        sums = sums + row
    return sums.reshape(blocks, threads)


def tree(sums):
    """Over the last axis: the upper half is added to the lower half, until one is left."""
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


@good("""
extern "C" __global__ void last_block_sum(
    float* total, volatile float* partial, unsigned* arrived, const float* x, int n)
{
    __shared__ float sums[64];
    __shared__ bool last;
    int t = threadIdx.x;
    float sum = 0.0f;
    for (int i = blockIdx.x * 64 + t; i < n; i += gridDim.x * 64) sum += x[i] * x[i];
    sums[t] = sum;
    __syncthreads();
    for (int half = 32; half > 0; half /= 2) {
        if (t < half) sums[t] += sums[t + half];
        __syncthreads();
    }
    if (t == 0) {
        partial[blockIdx.x] = sums[0];
        __threadfence();            // whoever sees the counter sees the sum
        last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && t == 0) {           // always in the order of the blocks
        float all = 0.0f;
        for (unsigned b = 0; b < gridDim.x; b++) all += partial[b];
        total[0] = all;
        arrived[0] = 0;             // ready for the next launch
    }
}
""")
def run(kernel, seed, device):
    arrived = on(device, np.zeros(1, np.int32))
    for n in (1, 257, 1000):
        x = normal(rng(seed), n)
        total, partial = on(device, np.full(1, np.nan, f32)), on(device, np.full(5, np.nan, f32))
        kernel[5, 64](total, partial, arrived, on(device, x), n)
        of_block = tree(strided_sums(x * x, 5, 64))
        yield Outcome(f"n = {n}", total.cpu(), cpu(of_block.cumsum(dtype=f32)[-1:]))
        exact = torch.from_numpy(x).double().square().sum().view(1)
        yield Outcome(f"n = {n}, exact", total.cpu().double(), exact, 1e-6)
        yield Outcome(f"n = {n}, partial", partial.cpu(), cpu(of_block))
        yield Outcome(f"n = {n}, counter", arrived.cpu().clone(), torch.zeros(1, dtype=torch.int32))


@good("""
extern "C" __global__ void block_scan(int* out, const int* x, int n)
{
    extern __shared__ int both[];   // two rows of blockDim.x: read from one, write into the other
    int t = threadIdx.x, i = blockIdx.x * blockDim.x + t, from = 0;
    both[t] = i < n ? x[i] : 0;
    __syncthreads();
    for (int offset = 1; offset < blockDim.x; offset *= 2) {
        int* read = both + from * blockDim.x;
        int* write = both + (1 - from) * blockDim.x;
        write[t] = t >= offset ? read[t] + read[t - offset] : read[t];
        from = 1 - from;
        __syncthreads();
    }
    if (i < n) out[i] = both[from * blockDim.x + t];
}
""")
def run(kernel, seed, device):
    for n, threads in ((1, 32), (300, 64), (500, 96)):
        blocks = -(-n // threads)
        x = rng(seed).integers(-(2**20), 2**20, n, dtype=np.int32)
        out = on(device, np.full(n, -1, np.int32))
        kernel[blocks, threads, 2 * 4 * threads](out, on(device, x), n)
        padded = np.zeros(blocks * threads, np.int32)
        padded[:n] = x
        want = padded.reshape(blocks, threads).cumsum(1, dtype=np.int32).reshape(-1)[:n]
        yield Outcome(f"n = {n} by {threads}", out.cpu(), cpu(want))


@good("""
extern "C" __global__ void neighbours_3d(int* out, const int* in, int X, int Y, int Z)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    int z = blockIdx.z * blockDim.z + threadIdx.z, at = (z * Y + y) * X + x, sum = 0;
    if (x >= X || y >= Y || z >= Z) return;
    if (x > 0) sum += in[at - 1];
    if (x + 1 < X) sum += in[at + 1];
    if (y > 0) sum += in[at - X];
    if (y + 1 < Y) sum += in[at + X];
    if (z > 0) sum += in[at - X * Y];
    if (z + 1 < Z) sum += in[at + X * Y];
    out[at] = sum;
}
""")
def run(kernel, seed, device):
    for Z, Y, X in ((1, 1, 1), (5, 6, 9)):
        cube = rng(seed).integers(1, 1000, (Z, Y, X), dtype=np.int32)
        out = on(device, np.full((Z, Y, X), -1, np.int32))
        kernel[(2, 2, 3), (8, 4, 2)](out, on(device, cube), X, Y, Z)
        p = np.pad(cube, 1)
        want = sum(np.roll(p, by, axis)[1:-1, 1:-1, 1:-1] for by in (-1, 1) for axis in (0, 1, 2))
        yield Outcome(f"{Z} x {Y} x {X}", out.cpu(), cpu(want.astype(np.int32)))


# ---- the kernels of kernels_cu -------------------------------------------------------------------

OURS: dict[tuple[str, str], Callable] = {}  # (file, kernel) -> run


def ours(file, name):
    def enter(run):
        OURS[file, name] = run
        return run

    return enter


DTYPES = {"float": torch.float32, "bf16": torch.bfloat16}


def _optional(device, values, dtype=torch.int32):
    return None if values is None else torch.tensor(values, dtype=dtype, device=device)


def _grad_dtype(kernel):
    return DTYPES[kernel.defines.get("GRAD_T", "float")]


def _pair_of(random, n, dtype, device, skip):
    """(acc, grad) of n elements that start `skip` elements behind an allocation, and their sum."""
    acc, grad = (torch.from_numpy(normal(random, n + skip)).to(d) for d in (torch.float32, dtype))
    moved = (t.to(device, copy=True)[skip:] for t in (acc, grad))
    return *moved, (acc + grad.float())[skip:]


@ours("fill", "fill")
def run(kernel, seed, device):
    for n in (1, 256, 1000):
        words = torch.from_numpy(rng(seed).integers(0, 100, n + 40).astype(np.int32))
        want = words.clone()
        want[:n] = seed
        words = on(device, words)
        kernel[-(-n // 256), 256](words, seed, n)
        yield Outcome(f"n = {n}", words.cpu(), want)


@ours("accumulate", "accumulate_v1")
def run(kernel, seed, device):
    for n, skip in ((1, 0), (255, 0), (257, 1), (1000, 3)):
        acc, grad, want = _pair_of(rng(seed), n, _grad_dtype(kernel), device, skip)
        kernel[-(-n // 256), 256](acc, grad, n)
        yield Outcome(f"n = {n}, {skip} behind", acc.cpu(), want)


@ours("accumulate", "accumulate_v2")
def run(kernel, seed, device):
    for n, skip, blocks in ((4, 0, 1), (1024, 4, 2), (5000, 0, 3)):
        acc, grad, want = _pair_of(rng(seed), n, _grad_dtype(kernel), device, skip)
        kernel[blocks, 128](acc, grad, n)
        yield Outcome(f"n = {n}, {skip} behind", acc.cpu(), want)


CHUNK = 4096


def _chunk_table(sizes):
    """Of tensors in an arena: [(tensor, elements, number in the tensor, number in the arena)] of
    each chunk, and the number of each tensor's first chunk."""
    counts = [-(-n // CHUNK) for n in sizes]
    firsts = np.cumsum([0, *counts])
    rows = [
        (i, min(CHUNK, n - CHUNK * k), k, firsts[i] + k)
        for i, n in enumerate(sizes)
        for k in range(counts[i])
    ]
    return rows, firsts


@ours("accumulate", "accumulate_v3")
def run(kernel, seed, device):
    """Six tensors in one launch; the sum or the gradient of some is misaligned."""
    sizes, skips = (10, 4096, 9000, 4096, 5000, 3), ((0, 0), (0, 0), (0, 0), (1, 0), (0, 1), (2, 2))
    random, dtype = rng(seed), _grad_dtype(kernel)
    accs, grads, wants = zip(*[_pair_of(random, n, dtype, device, 0) for n in sizes])
    accs, grads = (
        [torch.cat([t[: skip[k]], t])[skip[k] :] for t, skip in zip(tensors, skips)]
        for k, tensors in enumerate((accs, grads))
    )
    ((blocks, tensors),) = packed_additions(
        tuple(t.data_ptr() for t in accs), tuple(t.data_ptr() for t in grads), sizes
    )
    kernel[blocks, 512](tensors, tensors=[*accs, *grads])
    for n, acc, want in zip(sizes, accs, wants):
        yield Outcome(f"n = {n}", acc.cpu(), want)


@ours("clip", "squares_v1")
def run(kernel, seed, device):
    for n, blocks in ((1, 1), (255, 2), (3000, 3), (1024, 4)):
        x = normal(rng(seed), n)
        out = torch.full((blocks + 1,), -1.0, device=device)
        kernel[blocks, 256](out, on(device, x), n)
        block = np.arange(n) // 256 % blocks
        want = [np.square(x.astype(np.float64))[block == b].sum() for b in range(blocks)]
        yield Outcome(f"n = {n}, {blocks} blocks", out.cpu(), torch.tensor([*want, -1.0]), 1e-6)


@ours("clip", "reduce_v1")
def run(kernel, seed, device):
    for n, max_norm in ((1, 100.0), (300, 0.5), (300, 1e9)):
        x = np.square(normal(rng(seed), n))
        out = torch.zeros(2, device=device)
        kernel[1, 1](out, on(device, x), n, max_norm)
        norm = math.sqrt(x.astype(np.float64).sum())
        want = torch.tensor([min(max_norm / norm, 1.0), norm]).double()
        yield ratio(f"n = {n}, max_norm = {max_norm}", out, want, 1e-5)


@ours("clip", "scale_v1")
def run(kernel, seed, device):
    for n, by in ((1, 0.5), (255, 0.3), (257, 1.0), (1000, 1 - 2**-24), (1000, 1 - 2**-22)):
        x, scale = torch.from_numpy(normal(rng(seed), n)), torch.tensor([by])
        y = x.to(device, copy=True)
        kernel[-(-n // 256), 256](y, scale.to(device), n)
        yield Outcome(f"n = {n}, scale {by}", y.cpu(), x if by > 1 - 1e-7 else x * scale)


def _mixed_tensors(seed, device):
    """Of every dtype, with tails, at odd addresses, empty."""
    random, sizes, skips = rng(seed), (9000, 4096, 5, 0, 4097, 4100, 8192), (1, 0, 0, 0, 0, 1, 3)
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    return [
        torch.from_numpy(normal(random, n + skip)).to(device, dtype, copy=True)[skip:]
        for n, dtype, skip in zip(sizes, (fp32, bf16, fp16, fp32, fp32, fp16, bf16), skips)
    ]


@ours("clip", "squares_v2")
def run(kernel, seed, device):
    tensors = _mixed_tensors(seed, device)
    tensors[4][17] = 1e25  # its square is beyond fp32
    ((_, chunks, _, packed),) = launches_for(tensors, 256)
    present = [(7 + i, t.cpu()) for i, t in enumerate(tensors) if t.numel()]
    parts = [(number, part) for number, t in present for part in t.split(CHUNK)]
    # One more, behind the end.
    exact = torch.tensor([*[part.double().square().sum() for _, part in parts], -1.0]).double()
    for grid, numbers in ((chunks, [number for number, _ in parts]), (2, None)):
        partials = torch.full((chunks + 1,), -1.0, dtype=torch.float64, device=device)
        owners = torch.full((chunks + 1,), -1, dtype=torch.int32, device=device)
        its_owners = owners[:chunks] if numbers else None
        kernel[grid, kernel.bound](partials[:chunks], its_owners, 7, packed, tensors=tensors)
        yield ratio(f"{grid} blocks", partials, exact)
        want = torch.tensor([*(numbers or [-1] * chunks), -1]).int()
        yield Outcome(f"{grid} blocks, owners", owners.cpu(), want)


@ours("clip", "reduce_v2")
def run(kernel, seed, device):
    rows = torch.tensor([1500, 3, 0, 40, 700])  # of each tensor
    owners = torch.arange(5).repeat_interleave(rows)
    limit, eps = 20.0, 1e-3
    for groups, divisor, bad in (
        (None, None, {}),
        (None, 4.0, {2: math.nan}),
        ([0, 0, 1, 2, 3], None, {1600: math.nan}),
        ([0, 0, 1, 2, 3], 0.5, {}),
        ([0, 1, 2, 3, 4], None, {0: math.nan, 2242: math.inf}),
    ):
        partials = torch.from_numpy(np.square(rng(seed).standard_normal(len(owners))))
        for row, value in bad.items():
            partials[row] = value
        group = torch.tensor(groups or [0] * 5)[owners]
        count = 1 + max(groups or [0])
        norms = torch.stack([partials[group == g].sum() for g in range(count)]).sqrt()
        norms /= divisor or 1.0
        scales = reference_scale(norms, limit, eps)
        want = torch.stack([scales, norms, norms * scales, norms.isfinite().double()], 1)
        # The owner of each group's first row that is not finite.
        wrong = [owners[(group == g) & ~partials.isfinite()].tolist() for g in range(count)]
        verdicts = torch.full((count, 4), -9.0, device=device)
        first = torch.full((count,), -9, dtype=torch.int32, device=device)
        kernel[count, 1024](
            verdicts,
            first,
            *_moved(device, partials, owners.int()),
            _optional(device, groups),
            len(owners),
            torch.tensor([limit], dtype=torch.float64, device=device),
            eps,
            None if divisor is None else torch.tensor([divisor], device=device),
        )
        what = f"groups {groups}, divisor {divisor}, bad rows {bad}"
        yield Outcome(what, finite(verdicts), finite(want), 1e-6)
        firsts = torch.tensor([rows[0] if rows else -1 for rows in wrong]).int()
        yield Outcome(f"{what}: first bad tensor", first.cpu(), firsts)


@ours("peers", "peers_sum")
def run(kernel, seed, device):
    """Three chunks from row 2 of 6 on, by each of 3 ranks and by one of 2.

    A chunk may be nonfinite, or beyond fp32 when squared.
    """
    random, chunks, rows = rng(seed), 3, 6
    for ranks, rank, bad in (
        (3, 0, ()),
        (3, 1, ((0, 1, math.inf), (2, 1, -math.inf))),
        (3, 2, ((1, 2, math.nan),)),
        (2, 1, ((1, 0, math.inf),)),
        (2, 0, ()),
    ):
        what = f"rank {rank} of {ranks}, {len(bad)} bad"
        parts = torch.from_numpy(normal(random, ranks * chunks * CHUNK)).view(ranks, -1)
        parts[0, 17] = 1e25
        wrong = torch.zeros(ranks, rows, dtype=torch.int32)
        for r, c, value in bad:
            parts[r, c * CHUNK + 4000 + r] = value
            wrong[r, 2 + c] = 1
        want = functools.reduce(torch.add, parts)
        squares = torch.full((rows,), -1.0, dtype=torch.float64)
        squares[2:5] = want.double().square().view(chunks, CHUNK).sum(1)
        apart = chunks * CHUNK + 8
        others = torch.full((ranks - 1, apart), math.nan)
        others[:, : chunks * CHUNK] = parts[[r for r in range(ranks) if r != rank]]
        own, others, found = (
            t.to(device, copy=True) for t in (parts[rank], others, torch.zeros_like(wrong))
        )
        partials = torch.full((rows,), -1.0, dtype=torch.float64, device=device)
        kernel[chunks, kernel.bound](
            own, partials[2:], found.view(-1)[2:], others, rank, ranks, rows, apart // 4
        )
        yield Outcome(f"{what}: sums", finite(own), finite(want))
        good = squares.isfinite()
        yield ratio(f"{what}: squares", partials.cpu()[good], squares[good])
        bad_squares = partials.cpu()[~good].isfinite()
        yield Outcome(f"{what}: other squares", bad_squares, torch.zeros_like(bad_squares))
        yield Outcome(f"{what}: whose", found.cpu(), wrong)


@ours("clip", "scale_v2")
def run(kernel, seed, device):
    results = torch.tensor(
        [[0.3, 1, 0.3, 1], [1, 0.5, 0.5, 1], [math.nan, math.nan, math.nan, 0], [0.7, 2, 1.4, 1]]
    )
    some = [9, 9, 0, 1, 2, 0, 3, 2, 3]
    for groups, skip, grid, chosen in (
        (some, 1, 3, 0),
        (some, 0, None, 0),
        (None, 0, None, 0),
        (None, 0, 2, 1),
        (None, 1, 2, 2),
    ):
        tensors = _mixed_tensors(seed, device)
        ((_, chunks, _, packed),) = launches_for(tensors, 256)
        before = [t.cpu().clone() for t in tensors]
        table = results if groups else results[chosen : chosen + 1]
        kernel[grid or chunks, kernel.bound](
            table.to(device), _optional(device, groups), skip, 2, packed, tensors=tensors
        )
        for i, (t, old) in enumerate(zip(tensors, before)):
            scale, _, _, is_finite = table[groups[2 + i] if groups else 0]
            is_left = scale == 1 or (skip and is_finite == 0)
            want = old if is_left else (old.float() * scale).to(old.dtype)
            yield Outcome(f"groups {groups}, skip {skip}, tensor {i}", finite(t), finite(want))


@ours("adamw", "adamw_v1")
def run(kernel, seed, device):
    """Powers of two for betas: powf is not the same on every machine."""
    for n in (1, 255, 257, 1000):
        random = rng(seed)
        w, g, m = (normal(random, n) for _ in range(3))
        v = np.square(normal(random, n))
        out = [on(device, t) for t in (w, g, m, v)]
        kernel[-(-n // 256), 256](*out, n, 0.25, 0.5, 0.25, 1e-3, 0.125, 3)
        w, g, m, v = (t.astype(np.float64) for t in (w, g, m, v))
        m, v = 0.5 * m + 0.5 * g, 0.25 * v + 0.75 * g * g
        w = w * (1 - 0.25 * 0.125) - 0.25 / (1 - 0.5**3) * m / (
            np.sqrt(v) / math.sqrt(1 - 0.25**3) + 1e-3
        )
        for name, got, want in zip("wmv", (out[0], out[2], out[3]), (w, m, v)):
            yield Outcome(f"n = {n}, {name}", got.cpu().double(), torch.from_numpy(want), 1e-6)


@ours("settings", "settings_write")
def run(kernel, seed, device):
    for count in (1, 100, 256):
        values = rng(seed).standard_normal(count).tolist()
        out = torch.full((count,), -1.0, dtype=torch.float64, device=device)
        kernel[1, 256](out, count, struct.pack("256d", *values, *[5.0] * (256 - count)))
        yield Outcome(f"{count} numbers", out.cpu(), torch.tensor(values, dtype=torch.float64))
    out = torch.zeros(300, dtype=torch.float64, device=device)
    kernel[1, 32](out, 100, struct.pack("256d", *range(256)))
    yield Outcome("with 32 threads", out.cpu()[:101], torch.tensor([*range(100), 0.0]).double())


@ours("adamw", "adamw_begin")
def run(kernel, seed, device):
    settings = torch.tensor(
        [[0.01, 0.9, 0.999, 1e-8, 0.1, 1.0], [0.3, 0.5, 0.25, 1e-3, 0.0, -1.0]], dtype=torch.float64
    )
    numbers, of, counts = [2, 0, 5, 1], [0, 1, 1, 0], [0.0, 6.0, 2.0**20, 1.0]
    good, bad = [0.5, 2.0, 1.0, 1.0], [math.nan, math.nan, math.nan, 0.0]
    # The norms, each norm's first bad tensor, the group of each tensor, and other settings.
    one, lasting = ([good], [-1], None), [-1] * 299
    for what, (verdicts, firsts, groups), more in (
        ("no norm", (None, None, None), {}),
        ("clipped and divided", one, dict(skip=1, divisor=4.0, found_inf=0.0)),
        ("second launch of a step", one, dict(skip=1, count_it=0)),
        ("found by someone else", one, dict(found_inf=1.0)),
        (
            "a bad group",
            ([good, bad, bad, good, good, good], [-1, 4, 3, -1, -1, -1], range(6)),
            dict(skip=1),
        ),
        (
            "the last of many",
            ([good] * 299 + [bad], [*lasting, 8], [0, 1, 2, 3, 4, 299]),
            dict(skip=1, found_inf=0.0),
        ),
        (
            "bad, and let through",
            ([good, bad, good, good, good, good], [-1, 4, -1, -1, -1, -1], [0, 2, 2, 3, 4, 5]),
            {},
        ),
    ):
        skip, count_it = more.get("skip", 0), more.get("count_it", 1)
        divisor, found_inf = more.get("divisor"), more.get("found_inf")
        steps = torch.tensor(counts, device=device)
        record = torch.tensor([3, 1, 2, 9], dtype=torch.int32, device=device)
        coefficients = torch.full((256, 10), -3.0, device=device)
        rest = [0] * 252
        addresses = [steps[i:].data_ptr() for i in range(4)]
        packed = STEPS.pack(*addresses, *rest, *numbers, *[-1] * 252, *of, *rest)
        kernel[1, 256](
            coefficients,
            settings.to(device).flatten(),
            _optional(device, verdicts, torch.float32),
            _optional(device, firsts),
            _optional(device, groups),
            len(verdicts or ()),
            skip,
            _optional(device, None if divisor is None else [divisor], torch.float32),
            _optional(device, None if found_inf is None else [found_inf], torch.float32),
            record,
            count_it,
            packed,
            tensors=[steps],
        )
        skipped = bool(found_inf) or bool(skip and verdicts and bad in verdicts)
        first = next((f for v, f in zip(verdicts or (), firsts or ()) if v is bad), -1)
        taken = torch.tensor(counts).double() + (not skipped)
        recorded = [3 + count_it, *((2, 4, first) if skipped and count_it else (1, 2, 9))]
        yield Outcome(f"{what}: counts", steps.cpu().double(), taken)
        yield Outcome(f"{what}: record", record.cpu(), torch.tensor(recorded).int())
        lr, beta1, beta2, eps, decay, sign = settings[of].T
        factors = [(verdicts or [good])[groups[k] if groups else 0][0] for k in numbers]
        scale = torch.tensor(factors).double() if verdicts else 1.0
        want = [
            sign * scale / (divisor or 1.0),
            1 - lr * decay,
            lr / (1 - beta1**taken),
            (1 - beta2**taken).float().double().rsqrt(),
            *(eps, beta2, 1 - beta1, 1 - beta2),
            torch.full((4,), float(skipped)),
            taken,
        ]
        want = torch.stack(want, 1).nan_to_num(-7.0, -8.0)
        got = coefficients.cpu()[:4].double().nan_to_num(-7.0, -8.0)
        got = torch.where(want == 0, got, got / want)
        yield Outcome(f"{what}: coefficients, over the exact", got, (want != 0).double(), 1e-6)
        yield Outcome(f"{what}: unused rows", coefficients.cpu()[4:], torch.full((252, 10), -3.0))


def _fma(a, b, c):
    """fp32, rounded once: the product of two fp32 is exact in fp64."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


TENSORS, SEED = ("weight", "gradient", "m", "v", "vmax", "copy"), 2**52 + 12345


def _updated(c, old, number, amsgrad, stochastic):
    """Weight, gradient, m, v, vmax and copy (or None) after a step: the kernel's steps in numpy."""
    w, g, m, v, vmax = (t.float().numpy() for t in old[:5])
    dtype, new = old[0].dtype, [*old]
    if not c[8]:
        g, w = g * c[0], w * c[1]
        m = _fma(c[6], g - m, m)
        v = _fma(c[7] * g, g, c[5] * v)
        vmax = np.maximum(vmax, v) if amsgrad else vmax
        exact = torch.from_numpy(
            _fma(-c[2], m / _fma(np.sqrt(vmax if amsgrad else v), c[3], c[4]), w)
        )
        rounded = exact.bfloat16()
        if stochastic:
            bits = reference_random_bits(SEED, number, len(w), int(c[9]))
            rounded = reference_round(exact, bits)
        new = [
            rounded.to(dtype) if dtype == torch.bfloat16 and old[5] is None else exact.to(dtype),
            old[1],
            *[torch.from_numpy(t).to(dtype) for t in (m, v)],
            torch.from_numpy(vmax).to(dtype) if amsgrad else old[4],
            rounded if old[5] is not None else None,
        ]
    return new


def _coefficients(held):
    """Rows of coefficients of tensors, some of which skip this step."""
    rows = [
        (0.5 - i, 0.9, 0.1 * (i + 1), 3.0, 1e-3, 0.75, 0.1, 0.25, skipped, 5 + i)
        for i, skipped in enumerate(held)
    ]
    return np.array(rows, np.float32)


@ours("adamw", "adamw_v2")
def run(kernel, seed, device, PARAM_T="float", AMSGRAD=0, STOCHASTIC=0):
    """Bit-identical to the same operations in numpy.

    Tensors with a tail, misaligned, with a copy, skipped.
    """
    random, dtype, grad_dtype = rng(seed), DTYPES[PARAM_T], _grad_dtype(kernel)
    coefficients, jobs = _coefficients((0, 0, 0, 0, 1, 1)), []
    # elements, elements before it, copy
    for n, skip, copied in (
        *((5, 0, False), (4096, 0, True), (4097, 0, False)),
        *((4200, 1, True), (4096, 0, False), (300, 0, True)),
    ):
        tensors = [torch.from_numpy(normal(random, n + skip)) for _ in range(3)]
        tensors += [torch.from_numpy(np.square(normal(random, n + skip))) for _ in range(2)]
        tensors = [
            t.to(d).to(device, copy=True)[skip:]
            for t, d in zip(tensors, (dtype, grad_dtype, dtype, dtype, dtype))
        ]
        copy = torch.full((n + skip,), 7.0, dtype=torch.bfloat16, device=device)[skip:]
        jobs.append((*tensors, copy if copied else None))
    before = [[None if t is None else t.cpu().clone() for t in j] for j in jobs]
    step = torch.zeros(())
    # The first one is empty, so that a tensor's place is not its number among the launch's.
    launched = [
        Job(9 + i, 0, w, g, (m, v, vmax if AMSGRAD else None), step, copy, ())
        for i, (w, g, m, v, vmax, copy) in enumerate([(*[step.new_zeros(0)] * 5, None), *jobs])
    ]
    ((_, arguments, updated),) = list_launches(AdamW.rule, launched, bool(STOCHASTIC))
    launch_update(
        [(kernel[4, kernel.bound], arguments, updated)],
        torch.from_numpy(np.vstack([coefficients[:1], coefficients])).to(device),
        torch.tensor([SEED], dtype=torch.float64, device=device) if STOCHASTIC else None,
    )
    for i, (job, old) in enumerate(zip(jobs, before)):
        updated = _updated(coefficients[i], old, 10 + i, AMSGRAD, STOCHASTIC)
        for name, got, want in zip(TENSORS, job, updated):
            if got is not None:
                yield Outcome(f"tensor {i}, {name}", got.cpu(), want)


@ours("adamw", "adamw_v3")
def run(kernel, seed, device, PARAM_T="float", AMSGRAD=0, STOCHASTIC=0):
    """An arena of six tensors; a launch updates the second to the fifth, and no padding."""
    random, dtype, grad_dtype = rng(seed), DTYPES[PARAM_T], _grad_dtype(kernel)
    sizes, coefficients, ahead = (7, 4096, 5000, 3, 4097, 9), _coefficients((0, 0, 0, 1, 0, 0)), 1
    chunks, starts = _chunk_table(sizes)
    used = np.zeros(4096 * len(chunks), bool)
    for n, at in zip(sizes, starts):
        used[4096 * at : 4096 * at + n] = True
    flats = [torch.from_numpy(normal(random, len(used)) * used) for _ in range(5)]
    flats = [*flats[:3], flats[3].square(), flats[4].square()]
    flats = [t.to(d) for t, d in zip(flats, (dtype, grad_dtype, dtype, dtype, dtype))]
    for copied in (True, False):
        flat = [*flats, (7 * torch.from_numpy(used)).bfloat16() if copied else None]
        there = [None if t is None else t.to(device, copy=True) for t in flat]
        kernel[3, kernel.bound](
            torch.from_numpy(coefficients[ahead:5].copy()).to(device),
            torch.tensor([SEED], dtype=torch.float64, device=device) if STOCHASTIC else None,
            *there[:4],
            there[4] if AMSGRAD else None,
            there[5],
            on(device, np.array(chunks, np.int32)),
            int(starts[1]),
            int(starts[5]),
            ahead,
        )
        want = [None if t is None else t.clone() for t in flat]
        for i in range(1, 5):
            here = slice(4096 * starts[i], 4096 * starts[i] + sizes[i])
            old = [None if t is None else t[here] for t in flat]
            for t, new in zip(want, _updated(coefficients[i], old, i, AMSGRAD, STOCHASTIC)):
                if t is not None:
                    t[here] = new
        for name, got, new in zip(TENSORS, there, want):
            if got is not None:
                yield Outcome(f"{name}, {'with' if copied else 'without'} copy", got.cpu(), new)


# ---- segments and encoder, beside their definitions in torch -------------------------------------


def _moved(device, *arguments):
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]


def _some_tokens(random, n, vocab, TOKEN_T):
    """Few and many of a kind, three of them out of range."""
    tokens = np.where(
        random.random(n) < 0.5, random.integers(0, 5, n), random.integers(0, vocab, n)
    )
    tokens[n // 2 :: n // 2 + 1], tokens[n // 3 :: n] = -5, vocab
    tokens[n // 4 :: n] = 2**31 - 1 if TOKEN_T == "int" else 2**40
    return tokens if n > 1 else np.zeros(1, int)


def _passes(seed, TOKEN_T, BITS, KEYS):
    """The first and a later pass over several token lists.

    Yields (what, the kernel's last arguments, the pairs in the order in which it finds them, the
    digit of each, how often each digit occurs in each tile).
    """
    random = rng(seed)
    tile = 256 * KEYS
    for n, vocab, left_out in (
        (1, 1, -1),
        (tile, 700, 3),
        (2 * tile + 77, 70_000, -1),
        (tile + 33, 300, 299),
    ):
        tokens = torch.from_numpy(_some_tokens(random, n, vocab, TOKEN_T))
        tokens = tokens.to(torch.int32 if TOKEN_T == "int" else torch.int64)
        order = reference_segments(tokens, vocab, left_out).order
        first = order[(order[:, 0] & MAX_TOKENS).argsort()].contiguous()
        second = first[(first[:, 1] % 2**BITS).argsort(stable=True)].contiguous()
        for inputs, pairs, shift in (((tokens, None), first, 0), ((None, second), second, BITS)):
            digits = (pairs[:, 1] >> shift) % 2**BITS
            counts = [part.bincount(minlength=2**BITS) for part in digits.split(tile)]
            arguments = *inputs, n, vocab, left_out, shift
            yield f"n = {n}, shift {shift}", arguments, pairs, digits, torch.stack(counts).int()


@ours("segments", "segments_count")
def run(kernel, seed, device, TOKEN_T="long long", BITS=8, KEYS=4):
    for what, arguments, _, _, want in _passes(seed, TOKEN_T, BITS, KEYS):
        counts = torch.full_like(want, -1, device=device)
        kernel[len(counts), 256](counts, *_moved(device, *arguments))
        yield Outcome(what, counts.cpu(), want)


@ours("segments", "segments_scatter")
def run(kernel, seed, device, TOKEN_T="long long", BITS=8, KEYS=4):
    for what, arguments, pairs, digits, counts in _passes(seed, TOKEN_T, BITS, KEYS):
        out = torch.full_like(pairs, -1, device=device)
        kernel[len(counts), 256](out, *_moved(device, counts, *arguments))
        yield Outcome(what, out.cpu(), pairs[digits.argsort(stable=True)])


@ours("segments", "segments_pieces")
def run(kernel, seed, device):
    for vocab, left_out, runs in (
        (1, -1, [1]),
        (9, 7, [31, 32, 33, 0, 64, 65, 1, 5, 300]),
        (300, -1, [0] * 40 + [128] + [1] * 255 + [0] * 4),
        (2, 1, [0, 40]),
    ):
        tokens = rng(seed).permutation(np.repeat(np.arange(len(runs)), runs))
        segments = reference_segments(torch.from_numpy(tokens), vocab, left_out)
        n = segments.n
        pieces = torch.full((n,), -9999, dtype=torch.int32, device=device)
        kernel[-(-n // 256), 256](pieces, segments.order.to(device), n, vocab)
        yield Outcome(f"runs of {runs[:8]}", pieces.cpu(), segments.pieces)


@ours("encoder", "encoder_forward")
def run(kernel, seed, device, TOKEN_T="long long", PARAM_T="float", WHOLE=0):
    random = rng(seed)
    dtype = DTYPES[PARAM_T]
    token_dtype = torch.int32 if TOKEN_T == "int" else torch.int64
    huge = torch.iinfo(token_dtype).max, torch.iinfo(token_dtype).min
    for B, T, C, V, wrong in (
        (1, 1, 4, 2, ()),
        (3, 7, 132 if WHOLE else 130, 11, (12, 2**31 - 1)),
        (5, 13, 8 if WHOLE else 3, 4, (-1, *huge, 4)),
        (2, 9, 4, 3, huge),
    ):
        tokens = torch.from_numpy(random.integers(0, V, B * T))
        tokens[random.permutation(B * T)[: len(wrong)]] = torch.tensor(wrong, dtype=torch.int64)
        tokens[-1] = V - 1  # the last row of all
        wte, wpe = (torch.from_numpy(normal(random, rows, C)).to(dtype) for rows in (V, T))
        bad = ((tokens < 0) | (tokens >= V)).nonzero()[:, 0].tolist()
        for positions, before in ((wpe, 0), (None, 3)):
            what = f"B, T, C, V = {B, T, C, V}, wpe {positions is not None}"
            out = torch.full((B * T, C), 5.0, dtype=dtype, device=device)
            invalid = torch.tensor([before, 7, 8], device=device)
            inputs = _moved(device, tokens.to(token_dtype), wte, positions, invalid, B * T, T, C, V)
            kernel[-(-B * T // 4), 128](out, *inputs)
            want = reference_encoder(tokens.view(B, T), wte, positions).view(B * T, C)
            yield Outcome(what, finite(out), finite(want))
            # The first of them is recorded, whichever thread it is; all are counted.
            count, *named = invalid.tolist()
            may = [[(row << 32) + T, int(tokens[row])] for row in bad]
            got = torch.tensor([count, named in (may if bad and not before else [[7, 8]])])
            yield Outcome(f"{what}, tokens out of range", got, torch.tensor([before + len(bad), 1]))


@ours("encoder", "encoder_backward_v1")
def run(kernel, seed, device):
    """Small whole numbers, whose sum is the same in every order."""
    random = rng(seed)
    for B, T, C, V in ((1, 1, 1, 1), (3, 21, 5, 4)):
        tokens = random.integers(-1, V + 1, B * T) if V > 1 else np.zeros(1, int)
        dout = torch.from_numpy(random.integers(-8, 9, (B * T, C))).float()
        dwte, dwpe = (
            torch.from_numpy(random.integers(-8, 9, (rows, C))).float() for rows in (V, T)
        )
        there = [t.to(device, copy=True) for t in (dwte, dwpe)]
        inputs = dout.to(_grad_dtype(kernel)), torch.from_numpy(tokens), B * T, T, C, V
        kernel[-(-B * T * C // 256), 256](*there, *_moved(device, *inputs))
        for i, token in enumerate(tokens):
            if 0 <= token < V:
                dwte[token] += dout[i]
                dwpe[i % T] += dout[i]
        yield Outcome(f"B, T, C, V = {B, T, C, V}, dwte", there[0].cpu(), dwte)
        yield Outcome(f"B, T, C, V = {B, T, C, V}, dwpe", there[1].cpu(), dwpe)


@ours("encoder", "encoder_backward_v2")
def run(kernel, seed, device, ACC_T="float"):
    """llm.c's order: warp w has rows w, w + 8, ...; then the warps' sums in order; then dwte."""
    random = rng(seed)
    lanes = 32 if _grad_dtype(kernel) == torch.float32 else 64
    for C, counts in ((8, [1, 0, 7]), (264, [8, 9, 1, 70])):
        rows = np.split(random.permutation(sum(counts)), np.cumsum(counts)[:-1])
        start = np.cumsum([0, *counts])
        buckets = [
            (start[v], n, v, group)
            for v, n in enumerate(counts)
            if n
            for group in range(-(-C // (4 * lanes)))
        ]
        dout = torch.from_numpy(normal(random, sum(counts), C)).to(_grad_dtype(kernel))
        dwte = torch.from_numpy(normal(random, len(counts), C)).to(DTYPES[ACC_T])
        there = dwte.to(device, copy=True)
        kernel[len(buckets), 256](
            there,
            dout.to(device),
            on(device, random.permutation(np.array(buckets, np.int32))),
            on(device, np.concatenate([np.sort(r) for r in rows]).astype(np.int32)),
            C,
        )
        for v, r in enumerate(rows):
            if len(r):
                x = dout.float()[np.sort(r)]
                warps = [functools.reduce(torch.add, x[w::8]) for w in range(min(8, len(r)))]
                value = dwte[v].float() + functools.reduce(torch.add, warps)
                dwte[v] = value.to(dwte.dtype)
        yield Outcome(f"C = {C}", there.cpu(), dwte)


def _both_launches(name):
    """A run of encoder_backward_v3 and encoder_combine_v3, of which `name` is the kernel's.

    The runs of equal tokens have 1 to 700 rows: one of -0.0, one left out, some rows invalid.
    """

    def run(kernel, seed, device, WHOLE=0, QUADS=1, SPAN=8, ACC_T="float"):
        backward, combine = (
            kernel
            if name == other
            else ga.Kernel("encoder", other, options=kernel.options, **kernel.defines)
            for other in ("encoder_backward_v3", "encoder_combine_v3")
        )
        rows = [5, 1, 31, 4, 32, 33, 1, 64, 0, 65, 700, 38]
        n = sum(rows)
        for C in (8, 264) if WHOLE else (5, 259):
            random = rng(seed)
            tokens = random.permutation(np.repeat(np.arange(len(rows)), rows))
            tokens[np.flatnonzero(tokens == 0)[:2]] = -1
            segments = reference_segments(torch.from_numpy(tokens), len(rows), 3)
            dout = torch.from_numpy(normal(random, n, C)).to(_grad_dtype(kernel))
            dwte = torch.from_numpy(normal(random, len(rows), C)).to(DTYPES[ACC_T])
            dout[torch.from_numpy(tokens == 6)], dwte[6] = -0.0, -0.0
            there = dwte.to(device, copy=True)
            partials = torch.full((2 * -(-n // 32), -(-C // 4) * 4), math.nan, device=device)
            inputs = *_moved(device, segments.order, segments.pieces), n, C
            grid = -(-n // 128), -(-C // (128 * QUADS))
            backward[grid, 128](there, partials, dout.to(device), *inputs)
            grid = -(-n // (32 * SPAN)), -(-C // 128)
            combine[grid, 512](there, partials, *inputs)
            reference_encoder_backward(dwte, None, dout, segments)
            yield Outcome(f"C = {C}", finite(there), finite(dwte))

    return run


for _name in ("encoder_backward_v3", "encoder_combine_v3"):
    ours("encoder", _name)(_both_launches(_name))


@ours("encoder", "encoder_wpe")
def run(kernel, seed, device, WHOLE=0, ACC_T="float"):
    random = rng(seed)
    for B, T, C in ((1, 1, 4), (5, 37, 32 if WHOLE else 29)):
        dout = torch.from_numpy(normal(random, B, T, C)).to(_grad_dtype(kernel))
        dwpe = torch.from_numpy(normal(random, T, C)).to(DTYPES[ACC_T])
        there = dwpe.to(device, copy=True)
        kernel[-(-T * -(-C // 4) // 128), 128](there, dout.to(device), B, T, C)
        reference_encoder_backward(None, dwpe, dout, None)
        yield Outcome(f"B, T, C = {B, T, C}", there.cpu(), dwpe)


# (file, kernel) -> macros that are tried besides the default ones; `run` gets them by name as well
VARIANTS: dict[tuple[str, str], list[dict]] = {
    ("adamw", "adamw_v2"): [
        {"PARAM_T": "bf16", "AMSGRAD": 1, "STOCHASTIC": 1},
        {"PARAM_T": "bf16"},
        {"AMSGRAD": 1, "STOCHASTIC": 1},
    ],
    ("adamw", "adamw_v3"): [{"AMSGRAD": 1, "STOCHASTIC": 1}],
    ("segments", "segments_count"): [{"TOKEN_T": "int", "BITS": 9, "KEYS": 16}],
    ("segments", "segments_scatter"): [{"TOKEN_T": "int", "BITS": 9, "KEYS": 16}],
    ("encoder", "encoder_forward"): [{"WHOLE": 1, "PARAM_T": "bf16", "TOKEN_T": "int"}],
    ("encoder", "encoder_backward_v2"): [{"ACC_T": "bf16"}],
    ("encoder", "encoder_backward_v3"): [
        {"WHOLE": 1, "QUADS": 2},
        {"ACC_T": "bf16"},
    ],
    ("encoder", "encoder_combine_v3"): [
        {"WHOLE": 1, "SPAN": 2},
        {"ACC_T": "bf16"},
    ],
    ("encoder", "encoder_wpe"): [{"WHOLE": 1}, {"ACC_T": "bf16"}],
}

# (file, kernel, macros): of each kernel with both dtypes of gradients, where its file has them.
OUR_VARIANTS = [
    (file, name, {"GRAD_T": grad_t})
    for file, name in OURS
    for grad_t in ("float", "bf16")
    if grad_t == "float" or "GRAD_T" in (kernel_root() / f"{file}.cu").read_text()
]
OUR_VARIANTS += [
    (*key, {"GRAD_T": "bf16"} | macros) for key, variants in VARIANTS.items() for macros in variants
]


def our_kernel(file, name, macros, options=()):
    """(a kernel of kernels_cu, its case)."""
    more = {key: value for key, value in macros.items() if key != "GRAD_T"}
    run = functools.partial(OURS[file, name], **more)
    if not more or options:
        return ga.Kernel(file, name, options=options, **macros), run
    # A program of its own compiles faster without the file's other functions.
    source = alone(name, with_headers(kernel_root() / f"{file}.cu"))
    path = f"kernels_cu/{file}.cu"
    return ga.Kernel.from_source(source, name, path, macros, learner=False), run


GOOD_TEXT = program([case.source for case in GOOD.values()])[0]


def good_kernel(name):
    return ga.compile(GOOD_TEXT, name)
