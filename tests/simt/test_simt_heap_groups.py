"""The heap of new and malloc, cooperative groups and cuda::barrier on the CPU."""

import pytest
import torch
from simt_pairs import run

import gpuaccel as ga

NUMBERS = torch.arange(64.0)

# ---- the heap ------------------------------------------------------------------------------------

OBJECTS = """
struct Shape { __device__ virtual float area() const = 0; __device__ virtual ~Shape() {} };
struct Square : Shape {
    float side;
    __device__ Square(float side) : side(side) {}
    __device__ float area() const override { return side * side; }
};
struct Circle : Shape {
    float radius;
    __device__ Circle(float radius) : radius(radius) {}
    __device__ float area() const override { return 3 * radius * radius; }
};
extern "C" __global__ void make(Shape** shapes, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) shapes[i] = i % 2 ? (Shape*)new Square(x[i]) : (Shape*)new Circle(x[i]);
}
extern "C" __global__ void measure(Shape** shapes, float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = shapes[i]->area();
}
extern "C" __global__ void drop(Shape** shapes, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) delete shapes[i];
}"""


def test_objects_live_until_they_are_deleted(mode):
    """As ray tracers do: one kernel makes objects, another uses them, a third deletes them."""
    make, measure, drop = (ga.compile(OBJECTS, name) for name in ("make", "measure", "drop"))
    # More rounds than the heap could hold without delete.
    for _ in range(3):
        shapes, x = torch.zeros(64, dtype=torch.int64), NUMBERS.clone()
        make[2, 32](shapes, x, 64)
        measure[2, 32](shapes, x, 64)
        drop[2, 32](shapes, 64)
        even = torch.arange(64) % 2 == 0
        assert torch.equal(x, torch.where(even, 3 * NUMBERS**2, NUMBERS**2))


HEAP = """
extern "C" __global__ void heap(float* x, int how) {
    float* block = (float*)malloc(40);
    for (int i = 0; i < 10; i++) block[i] = i;
    float* sums = new float[how == 0 ? 3 : 4]();
    sums[2] = block[9];
    x[threadIdx.x] += sums[0] + sums[2];
    delete[] sums;
    if (how == 1) x[0] = block[10];
    if (how == 2) x[0] = block[-1];
    free(block);
    if (how == 3) block[3] = 1;
    if (how == 4) free(block);
    if (how == 5) delete (x + 1);
    if (how == 6) x[0] = malloc(1 << 30) == 0;
}"""


def test_new_and_malloc(mode):
    (out,) = run(HEAP, NUMBERS, 0, grid=1, block=64)
    assert torch.equal(out, NUMBERS + 9)
    # No such block: null, as on a GPU.
    assert run(HEAP, NUMBERS, 6, block=1)[0][0] == 1


@pytest.mark.parametrize(
    "how, text, line, checks_only",
    [
        (1, "reads 4 bytes at byte 40 behind the end of a block of the heap of 40 bytes", 9, True),
        (2, "reads 4 bytes at byte -4 in front of a block of the heap", 10, True),
        (3, "writes 4 bytes at byte 12 in a block of the heap that was freed", 12, True),
        (4, "frees a block of the heap a second time", 13, False),
        (5, "frees an address that neither new nor malloc returned", 14, False),
    ],
)
def test_mistakes_with_the_heap_are_named(mode, how, text, line, checks_only):
    if checks_only and mode == "fast":
        return
    with pytest.raises(ga.errors.KernelError) as caught:
        run(HEAP, NUMBERS, how, block=1)
    (report,) = caught.value.reports
    assert (report.kind, report.line) == ("heap", line) and text in report.message
    # Python goes on, and the next launch is a good one.
    assert run(HEAP, NUMBERS, 0, block=1)[0][0] == 9


# ---- cooperative groups --------------------------------------------------------------------------

GROUPS = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;
struct Wide { double a; int b; };

template <int size> __device__ int sum_of_tile(cg::thread_block_tile<size> tile, int value) {
    for (int step = tile.size() / 2; step > 0; step /= 2) value += tile.shfl_down(value, step);
    return tile.shfl(value, 0);
}
extern "C" __global__ void groups(int* out, int n) {
    __shared__ int row[64];
    cg::thread_block block = cg::this_thread_block();
    cg::grid_group grid = cg::this_grid();
    auto tile = cg::tiled_partition<8>(block);
    auto warp = cg::tiled_partition<32>(block);
    auto part = cg::tiled_partition<4>(tile);
    int t = block.thread_rank();
    row[t] = t;
    cg::sync(block);
    int* mine = out + t;
    mine[0 * n] = row[block.size() - 1 - t];
    block.sync();
    mine[1 * n] = block.group_index().x * 1000 + block.thread_index().y;
    mine[2 * n] = tile.meta_group_rank() * 100 + tile.thread_rank();
    mine[3 * n] = part.meta_group_rank() * 100 + part.meta_group_size() * 10 + part.thread_rank();
    mine[4 * n] = sum_of_tile<8>(tile, t);
    mine[5 * n] = cg::reduce(warp, t, cg::plus<int>());
    mine[6 * n] = cg::reduce(tile, t * 7 % 5, cg::greater<int>()) * 10
                  + cg::reduce(tile, t * 7 % 5, cg::less<int>());
    mine[7 * n] = tile.ballot(t % 3 == 0);
    mine[8 * n] = tile.any(t == 17) * 10 + tile.all(t > 20);
    mine[9 * n] = tile.shfl_xor(t, 3) * 100 + tile.shfl_up(t, 2);
    mine[10 * n] = (int)tile.shfl(Wide{t * 0.5, t}, 6).a + tile.shfl(Wide{0, t}, 1).b;
    mine[11 * n] = cg::inclusive_scan(tile, t) * 1000 + cg::exclusive_scan(tile, t);
    mine[12 * n] = grid.thread_rank() + grid.size() * 1000 + (int)grid.is_valid();
    cg::coalesced_group together = cg::coalesced_threads();
    mine[13 * n] = together.size() * 100 + together.thread_rank();
    mine[14 * n] = cg::labeled_partition(tile, t % 3).size() * 10
                   + cg::binary_partition(tile, t % 8 < 3).thread_rank();
    cg::thread_group old = cg::tiled_partition(block, 16);
    mine[15 * n] = old.size() * 100 + old.thread_rank();
    tile.sync();
    old.sync();
    mine[16 * n] = tile.match_any(t % 2);
    mine[17 * n] = cg::reduce(together, t, cg::plus<int>()) + together.shfl(t, 3);
}"""


def test_cooperative_groups(mode):
    n = 64
    out = run(GROUPS, torch.zeros(18, n, dtype=torch.int32), n, block=(16, 4))[0].tolist()
    for t in range(n):
        first = t // 8 * 8
        tile = range(first, first + 8)
        warp = range(t // 32 * 32, t // 32 * 32 + 32)
        rank = t - first
        same = [u for u in tile if (u - first < 3) == (rank < 3)]
        expected = [
            63 - t,
            t // 16,
            t // 8 * 100 + rank,
            rank // 4 * 100 + 20 + rank % 4,
            sum(tile),
            sum(warp),
            max(u * 7 % 5 for u in tile) * 10 + min(u * 7 % 5 for u in tile),
            sum(1 << u - first for u in tile if u % 3 == 0),
            (17 in tile) * 10 + all(u > 20 for u in tile),
            (first + (rank ^ 3)) * 100 + (t - 2 if rank >= 2 else t),
            (first + 6) // 2 + first + 1,
            sum(u for u in tile if u <= t) * 1000 + sum(u for u in tile if u < t),
            t + 64 * 1000 + 1,
            3200 + t % 32,
            sum(u % 3 == t % 3 for u in tile) * 10 + same.index(t),
            1600 + t % 16,
            0x55 << t % 2,
            sum(warp) + warp[3],
        ]
        for k, value in enumerate(expected):
            assert out[k][t] == value, f"row {k}, thread {t}: {out[k][t]}, expected {value}"


def test_a_barrier_of_the_whole_grid_is_refused_in_one_sentence(mode):
    source = """#include <cooperative_groups.h>
    extern "C" __global__ void whole(float* x) {
        x[blockIdx.x] += 1;
        cooperative_groups::this_grid().sync();
        x[blockIdx.x] *= 2;
    }"""
    assert run(source, NUMBERS, block=1)[0][0] == 2
    with pytest.raises(ga.errors.KernelError) as caught:
        run(source, NUMBERS, grid=2, block=1)
    (report,) = caught.value.reports
    assert report.line == 4 and "grid.sync() needs all blocks at once" in report.message


# ---- cuda::barrier -------------------------------------------------------------------------------

BARRIER = """
#include <cuda/barrier>
using barrier = cuda::barrier<cuda::thread_scope_block>;
extern "C" __global__ void pipeline(float* x, int rounds, int how) {
    __shared__ barrier ready[2];
    __shared__ float tile[32];
    int t = threadIdx.x;
    if (t == 0) {
        init(&ready[0], blockDim.x);
        init(&ready[1], blockDim.x);
    }
    __syncthreads();
    float sum = x[t];
    for (int round = 0; round < rounds; round++) {
        tile[t] = sum;
        if (how == 1) ready[0].arrive_and_wait();
        else {
            barrier::arrival_token token = ready[0].arrive();
            float own = sum * 0;
            ready[0].wait(std::move(token));
            sum += own;
        }
        sum += tile[(t + 1) % blockDim.x];
        if (how != 2) ready[1].arrive_and_wait();
    }
    x[t] = sum;
}
extern "C" __global__ void never(float* x) {
    __shared__ barrier ready;
    if (threadIdx.x == 0) init(&ready, blockDim.x + 1);
    __syncthreads();
    ready.arrive_and_wait();
    x[0] = 1;
}"""


@pytest.mark.parametrize("how", [0, 1])
def test_a_barrier_in_shared_memory(mode, how):
    (out,) = run(BARRIER, NUMBERS, 5, how, name="pipeline")
    expected = NUMBERS[:32]
    for _ in range(5):
        expected = expected + expected.roll(-1)
    assert torch.equal(out[:32], expected)


def test_what_a_barrier_does_not_order_is_a_race():
    with ga.use_backend("simt"), ga.checked(), pytest.raises(ga.errors.KernelError, match="race"):
        run(BARRIER, NUMBERS, 5, 2, name="pipeline")


@pytest.mark.slow
def test_a_barrier_that_nobody_completes_ends_the_launch(mode):
    with ga.checked(mode == "checked", seconds=2), pytest.raises(ga.errors.KernelError) as caught:
        run(BARRIER, NUMBERS, name="never")
    assert caught.value.reports[0].kind in ("trap", "time limit")
