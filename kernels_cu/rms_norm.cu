// rms_norm: the addition to the residual stream, and RMSNorm (Zhang and Sennrich, 2019) of the sum.
//
//   s = x + residual             rounded to DATA_T; without a residual s is x
//   rstd = 1 / sqrt(mean of s^2 over the row + eps)
//   y = s rstd w                 computed in fp32, rounded once
// and with g = dy w, h = s rstd:
//   dx = ds + rstd (g - h mean of g h)     the gradient of x and of the residual, rounded once
//   dw = sum over the rows of dy h         in fp32, rounded once
// ds is the gradient that the residual stream s itself has received.
//
// Floor, per element: the forward reads x and the residual and writes s and y, the backward reads
// dy, ds and s and writes dx. Both move four matrices. A micro-batch of llama-350m has 4 x 1024
// rows of 1024 bf16: a matrix is 8.4 MB, four take 10.2 us at 3.3 TB/s (H100). Its 49 norms have a
// floor of 0.50 ms forward and 0.50 ms backward. torch.compile's backward moves six matrices, 0.75
// ms at that rate: one kernel computes dx, and another reads dy and s again for dw, because its
// sums run down the columns. backward_v3 adds 1.0 MB of partial sums, written and read once, to the
// four matrices: 0.53 ms. By bytes 0.22 ms of each micro-batch's backward are saved, and more where
// the reduction for dw does not reach the copy rate.
//
// The ladder:
//   *_v1           One thread per row. Neighbouring threads read addresses that are a row apart, so
//                  a warp's request is 32 requests; and 4,096 rows are 4,096 threads for the whole
//                  GPU.
//   weight_v1      dw: one thread per column. Requests are whole, but 1,024 threads add 4,096 rows
//                  each, and dy and s are read once more.
//   *_v2           One block per row. Requests are whole; sums by shuffles. The row is read a
//                  second time (from L1) once its sum is known.
//   *_v3           A team of TEAM threads per row, a warp for up to 1,024 bf16. Groups of 16 bytes;
//                  the row stays in registers between its sum and its result. In the backward a
//                  block takes ROWS rows, and a thread adds dy h of its columns in registers, so
//                  nothing is read again: a block writes one row of partial sums.
//   weight_v3      dw from the partial sums.
// Every sum has a fixed order, and the rows of a block do not depend on the GPU: results are
// deterministic, and those of a row do not depend on how many other rows there are (dw apart).

#include "groups.cuh"         // DATA_T: x, residual, w, y, s and their gradients

#ifndef TEAM
#define TEAM 32               // threads of a row: 32, 64, ... 512
#endif
#ifndef GROUPS
#define GROUPS 4              // groups of 16 bytes that a thread takes of a row
#endif
#if TEAM < 256
#define THREADS 256
#else
#define THREADS TEAM
#endif
#define TEAMS (THREADS / TEAM)     // rows that a block has in work
// Rows that share one row of partial sums: 16, which with a warp per row are two for each warp.
// More rows would leave SMs without work (4,096 rows are 256 blocks, two for each of 128 SMs),
// fewer would write more sums. Up to 2,048 rows take 8: with 16, 1,024 rows would be 64 blocks, and
// half of an H100's SMs would have none.
#ifndef ROWS
#define ROWS 16
#endif

// ---- one thread per row ----

extern "C" __global__ void __launch_bounds__(256) rms_norm_forward_v1(
    DATA_T* y, DATA_T* s,     // (rows, width)
    float* rstd,              // (rows)
    const DATA_T* x,          // (rows, width)
    const DATA_T* residual,   // (rows, width); 0: there is none, and s is not written
    const DATA_T* weight,     // (width)
    float eps, long long rows, int width)
{
    long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    long long start = row * width;
    float sum = 0.0f;
    for (int c = 0; c < width; c++) {
        float value = as_float(x[start + c]);
        if (residual != 0) {
            store(s + start + c, value + as_float(residual[start + c]));
            value = as_float(s[start + c]);
        }
        sum = fmaf(value, value, sum);
    }
    float scale = 1.0f / sqrtf(sum / width + eps);
    rstd[row] = scale;
    const DATA_T* row_of_s = (residual != 0 ? s : x) + start;
    for (int c = 0; c < width; c++)
        store(y + start + c, __fmul_rn(__fmul_rn(as_float(row_of_s[c]), scale),
                                       as_float(weight[c])));
}

extern "C" __global__ void __launch_bounds__(256) rms_norm_backward_v1(
    DATA_T* dx,               // (rows, width)
    const DATA_T* dy,         // (rows, width)
    const DATA_T* ds,         // (rows, width); 0: zeros
    const DATA_T* s,          // (rows, width)
    const float* rstd,        // (rows)
    const DATA_T* weight,     // (width)
    long long rows, int width)
{
    long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    long long start = row * width;
    float scale = rstd[row], sum = 0.0f;
    for (int c = 0; c < width; c++) {
        float g = __fmul_rn(as_float(dy[start + c]), as_float(weight[c]));
        sum = fmaf(g, as_float(s[start + c]), sum);
    }
    float mean = __fmul_rn(sum, scale) / width;
    for (int c = 0; c < width; c++) {
        float g = __fmul_rn(as_float(dy[start + c]), as_float(weight[c])),
              h = __fmul_rn(as_float(s[start + c]), scale),
              before = ds == 0 ? 0.0f : as_float(ds[start + c]);
        store(dx + start + c, fmaf(scale, fmaf(-h, mean, g), before));
    }
}

extern "C" __global__ void __launch_bounds__(256) rms_norm_weight_v1(
    DATA_T* dweight,          // (width)
    const DATA_T* dy, const DATA_T* s, const float* rstd, long long rows, int width)
{
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= width) return;
    float sum = 0.0f;
    for (long long row = 0; row < rows; row++) {
        float h = __fmul_rn(as_float(s[row * width + c]), rstd[row]);
        sum = fmaf(as_float(dy[row * width + c]), h, sum);
    }
    store(dweight + c, sum);
}

// ---- one block per row ----

// The sum over a block of 256 threads, for all of them.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float warps[8];
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
    for (int warp = 0; warp < 8; warp++) x += warps[warp];
    return x;
}

extern "C" __global__ void __launch_bounds__(256) rms_norm_forward_v2(
    DATA_T* y, DATA_T* s, float* rstd, const DATA_T* x, const DATA_T* residual,
    const DATA_T* weight, float eps, long long rows, int width)
{
    long long start = (long long)blockIdx.x * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += 256) {
        float value = as_float(x[start + c]);
        if (residual != 0) {
            store(s + start + c, value + as_float(residual[start + c]));
            value = as_float(s[start + c]);
        }
        sum = fmaf(value, value, sum);
    }
    float scale = 1.0f / sqrtf(block_sum(sum) / width + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
    const DATA_T* row_of_s = (residual != 0 ? s : x) + start;
    for (int c = threadIdx.x; c < width; c += 256)
        store(y + start + c, __fmul_rn(__fmul_rn(as_float(row_of_s[c]), scale),
                                       as_float(weight[c])));
}

extern "C" __global__ void __launch_bounds__(256) rms_norm_backward_v2(
    DATA_T* dx, const DATA_T* dy, const DATA_T* ds, const DATA_T* s, const float* rstd,
    const DATA_T* weight, long long rows, int width)
{
    long long start = (long long)blockIdx.x * width;
    float scale = rstd[blockIdx.x], sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += 256) {
        float g = __fmul_rn(as_float(dy[start + c]), as_float(weight[c]));
        sum = fmaf(g, as_float(s[start + c]), sum);
    }
    float mean = __fmul_rn(block_sum(sum), scale) / width;
    for (int c = threadIdx.x; c < width; c += 256) {
        float g = __fmul_rn(as_float(dy[start + c]), as_float(weight[c])),
              h = __fmul_rn(as_float(s[start + c]), scale),
              before = ds == 0 ? 0.0f : as_float(ds[start + c]);
        store(dx + start + c, fmaf(scale, fmaf(-h, mean, g), before));
    }
}

// ---- a team per row, its groups in registers ----

// The sum over a team, for all of its threads. Every thread of the block takes part.
__device__ __forceinline__ float team_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
#if TEAM > 32
    __shared__ float warps[THREADS / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    int first = threadIdx.x / TEAM * (TEAM / 32);
    x = 0.0f;
    for (int warp = 0; warp < TEAM / 32; warp++) x += warps[first + warp];
    __syncthreads();          // `warps` is used again
#endif
    return x;
}

// Element i of a group. Two bf16 are taken from their word: else the compiler keeps each of them in
// a register of its own.
template <class T> __device__ __forceinline__ float element(const T* group, int i) {
    return as_float(group[i]);
}
__device__ __forceinline__ float element(const bf16* group, int i) {
    unsigned word = reinterpret_cast<const unsigned*>(group)[i / 2];
    return i % 2 == 0 ? low_as_float(word) : high_as_float(word);
}

// From here on the group is converted to floats anew. Else the compiler keeps the floats of the
// first loop for the second one, in twice the registers, and spills.
__device__ __forceinline__ void keep_packed(Group& group) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(group.all.x), "+r"(group.all.y), "+r"(group.all.z), "+r"(group.all.w));
#endif
}

// A thread's groups of a row; zeros behind its end, and without a row (0).
__device__ __forceinline__ void load_row(Group (&to)[GROUPS], const DATA_T* row, int width) {
    #pragma unroll
    for (int k = 0; k < GROUPS; k++) {
        int group = k * TEAM + threadIdx.x % TEAM;
        to[k].all = make_uint4(0, 0, 0, 0);
        if (row != 0 && WIDE * group < width) to[k] = load_group(row, group, width);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) rms_norm_forward_v3(
    DATA_T* y, DATA_T* s, float* rstd, const DATA_T* x, const DATA_T* residual,
    const DATA_T* weight, float eps, long long rows, int width)
{
    long long row = (long long)blockIdx.x * TEAMS + threadIdx.x / TEAM, start = row * width;
    bool there = row < rows;
    Group value[GROUPS], more[GROUPS], w[GROUPS];
    load_row(value, there ? x + start : 0, width);
    load_row(more, there && residual != 0 ? residual + start : 0, width);
    load_row(w, weight, width);
    float sum = 0.0f;
    #pragma unroll
    for (int k = 0; k < GROUPS; k++)
        #pragma unroll
        for (int i = 0; i < WIDE; i += 2) {
            // Without a residual `more` is zeros, and x + 0 is x.
            store2(value[k].at + i, element(value[k].at, i) + element(more[k].at, i),
                   element(value[k].at, i + 1) + element(more[k].at, i + 1));
            float a = element(value[k].at, i), b = element(value[k].at, i + 1);
            sum = fmaf(b, b, fmaf(a, a, sum));
        }
    float scale = 1.0f / sqrtf(team_sum(sum) / width + eps);
    if (!there) return;
    if (threadIdx.x % TEAM == 0) rstd[row] = scale;
    #pragma unroll
    for (int k = 0; k < GROUPS; k++) {
        int group = k * TEAM + threadIdx.x % TEAM;
        keep_packed(value[k]);
        if (WIDE * group < width) {
            float sums[WIDE], result[WIDE];
            #pragma unroll
            for (int i = 0; i < WIDE; i++) {
                sums[i] = element(value[k].at, i);
                result[i] = __fmul_rn(__fmul_rn(sums[i], scale), element(w[k].at, i));
            }
            if (residual != 0) store_group(s + start, group, width, sums);
            store_group(y + start, group, width, result);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) rms_norm_backward_v3(
    DATA_T* dx,
    float* partials,          // (blocks, width); 0: dw is not wanted
    const DATA_T* dy, const DATA_T* ds, const DATA_T* s, const float* rstd, const DATA_T* weight,
    long long rows, int width)
{
    int team = threadIdx.x / TEAM, lane = threadIdx.x % TEAM;
    float sums[GROUPS * WIDE] = {};
    Group w[GROUPS];
    load_row(w, weight, width);
    #pragma unroll 1
    for (int i = 0; i < ROWS; i += TEAMS) {
        long long row = (long long)blockIdx.x * ROWS + i + team, start = row * width;
        bool there = row < rows;
        Group upper[GROUPS], value[GROUPS], before[GROUPS];
        load_row(upper, there ? dy + start : 0, width);
        load_row(value, there ? s + start : 0, width);
        load_row(before, there && ds != 0 ? ds + start : 0, width);
        float scale = there ? rstd[row] : 0.0f, sum = 0.0f;
        #pragma unroll
        for (int k = 0; k < GROUPS; k++)
            #pragma unroll
            for (int j = 0; j < WIDE; j++) {
                float g = __fmul_rn(element(upper[k].at, j), element(w[k].at, j));
                sum = fmaf(g, element(value[k].at, j), sum);
            }
        float mean = __fmul_rn(team_sum(sum), scale) / width;
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            keep_packed(w[k]);
            keep_packed(upper[k]);
            keep_packed(value[k]);
            float result[WIDE];
            #pragma unroll
            for (int j = 0; j < WIDE; j++) {
                float up = element(upper[k].at, j), g = __fmul_rn(up, element(w[k].at, j)),
                      h = __fmul_rn(element(value[k].at, j), scale);
                sums[k * WIDE + j] = fmaf(up, h, sums[k * WIDE + j]);
                result[j] = fmaf(scale, fmaf(-h, mean, g), element(before[k].at, j));
            }
            int group = k * TEAM + lane;
            if (there && WIDE * group < width) store_group(dx + start, group, width, result);
        }
    }
    if (partials == 0) return;
    float* to = partials + (long long)blockIdx.x * width;
#if TEAMS > 1
    // The teams' sums, in the order of the teams. A row of 32 / WIDE floats more than there are
    // groups: neither writes nor reads of a warp meet in a bank.
    __shared__ float of_team[TEAMS][WIDE][GROUPS * TEAM + 32 / WIDE];
    #pragma unroll
    for (int k = 0; k < GROUPS; k++)
        #pragma unroll
        for (int j = 0; j < WIDE; j++) of_team[team][j][k * TEAM + lane] = sums[k * WIDE + j];
    __syncthreads();
    for (int c = threadIdx.x; c < width; c += THREADS) {
        float sum = 0.0f;
        for (int t = 0; t < TEAMS; t++) sum += of_team[t][c % WIDE][c / WIDE];
        to[c] = sum;
    }
#else
    #pragma unroll
    for (int k = 0; k < GROUPS; k++)
        #pragma unroll
        for (int j = 0; j < WIDE; j++) {
            int c = (k * TEAM + lane) * WIDE + j;
            if (c < width) to[c] = sums[k * WIDE + j];
        }
#endif
}

extern "C" __global__ void __launch_bounds__(1024) rms_norm_weight_v3(
    DATA_T* dweight,          // (width)
    const float* partials,    // (blocks, width)
    int blocks, int width)
{
    // 32 columns for each block, so that a warp's request is whole. Warp w adds rows w, w + 32, ...
    __shared__ float of_warp[32][33];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (c < width)
        #pragma unroll 8
        for (int row = warp; row < blocks; row += 32) sum += partials[(long long)row * width + c];
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && c < width) {
        sum = 0.0f;
        for (int w = 0; w < 32; w++) sum += of_warp[w][lane];
        store(dweight + c, sum);
    }
}
