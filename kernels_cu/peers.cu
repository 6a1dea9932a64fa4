// peers: the sum of several ranks' gradients, over the range of the arena that this rank adds up
// for all ranks (distributed/p2p.py).
//
//   sum[i] = ((g_0[i] + g_1[i]) + g_2[i]) + ..., always in the order of the ranks, so the result
//            does not depend on which rank adds
//
// Copy engines have copied the other ranks' parts into this rank's memory, and copy the sums back.
// The multiprocessors only add: with N ranks each reads N parts of one N-th of the arena and writes
// one, (N + 1) / N * 4 bytes per element of the arena. 432 M elements on 2 ranks: 2.6 GB, on an
// H200 with 4.2 TB/s at least 0.62 ms.
//
// The new sums are in registers, so each chunk's sum of squares is written too, and the gradient
// norm needs no pass of its own. A chunk whose sum is not finite is checked once more, part by
// part, to find the ranks whose gradients are not finite. (inf - inf is NaN, so nothing is hidden
// in a sum.)

#ifndef CHUNK
#define CHUNK 4096
#endif
#ifndef THREADS
#define THREADS 256
#endif
#define GROUPS (CHUNK / 4 / THREADS)          // groups of four that a thread takes

__device__ __forceinline__ bool finite(float4 x) {
    return isfinite(x.x) && isfinite(x.y) && isfinite(x.z) && isfinite(x.w);
}

extern "C" __global__ void __launch_bounds__(THREADS) peers_sum(
    float4* own,              // (chunks, CHUNK / 4) this rank's part; afterwards the sum
    double* partials,         // (chunks) sums of its squares
    int* nonfinite,           // [r * rows + chunk] = 1 where rank r's part of a chunk is not finite
    const float4* others,     // (ranks - 1, stride) the other ranks' parts
    int rank, int ranks, int rows, long long stride)
{
    __shared__ double warps[THREADS / 32];
    __shared__ int nonfinite_sum;
    own += (long long)blockIdx.x * (CHUNK / 4);
    others += (long long)blockIdx.x * (CHUNK / 4);
    float4 mine[GROUPS], sum[GROUPS], x[GROUPS];
    #pragma unroll
    for (int k = 0; k < GROUPS; k++) mine[k] = own[k * THREADS + threadIdx.x];
    auto part_of = [&](int r) {
        const float4* from = others + (r - (r > rank)) * stride;
        #pragma unroll
        for (int k = 0; k < GROUPS; k++)
            x[k] = r == rank ? mine[k] : from[k * THREADS + threadIdx.x];
    };
    for (int r = 0; r < ranks; r++) {
        part_of(r);
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) sum[k] = r == 0 ? x[k] : add4(sum[k], x[k]);
    }
    #pragma unroll
    for (int k = 0; k < GROUPS; k++) own[k * THREADS + threadIdx.x] = sum[k];
    double total = block_joined(magnitude(sum), warps);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = total;
        nonfinite_sum = !isfinite(total);
    }
    __syncthreads();
    if (!nonfinite_sum) return;
    for (int r = 0; r < ranks; r++) {
        part_of(r);
        bool good = true;
        for (int k = 0; k < GROUPS; k++) good = good && finite(x[k]);
        double bad = block_joined(good ? 0.0 : 1.0, warps);
        if (threadIdx.x == 0 && bad > 0.0) nonfinite[(long long)r * rows + blockIdx.x] = 1;
        __syncthreads();                      // `warps` is used again
    }
}
