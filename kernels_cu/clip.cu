// clip: the norm of all gradients, and the scale that brings it down to max_norm. The host never
// waits.
//
//   norm  = (sum of x^2 over every element of every tensor)^(1/2)
//   scale = min(1, max_norm / (norm + eps)), on the device, read by the kernel that multiplies
//
// Floor: one read for the norm; only where the scale is below 1 another read and a write. fp32: 4
// or 12 bytes per element. An H200 copies about 4.2 TB/s, so 470 M elements take at least 0.45 ms
// below the threshold and 1.34 ms above.
//
// The ladder:
//   item           For every tensor: its norm to the host (`.item()`), which adds and decides. The
//                  GPU is idle each time.
//   squares_v1     One launch per tensor, at most 256 blocks. Each writes one fp32 sum of squares
//                  into a common buffer, at the tensor's place. Warps are reduced by shuffles, in a
//                  fixed order, without atomics.
//   reduce_v1      One thread adds all of them, one after the other, in fp32, and writes the scale.
//                  The host no longer waits; 1,800 dependent additions remain.
//   scale_v1       One launch per tensor. Every thread reads the scale and multiplies, or returns
//                  where there is nothing to do.
//   squares_v2     One launch for up to 256 tensors of any dtype. A partial sum belongs to a chunk
//                  of 4096 elements, not to a thread block, so results do not depend on the grid.
//                  Squares that leave the range of fp32 are computed in fp64.
//   reduce_v2      One block per group of tensors (all of them, a transformer block, one tensor):
//                  1024 threads, a tree, fp64. It also finds the first tensor that is not finite,
//                  so that its name can be reported.
//   scale_v2       Many tensors per launch, as squares_v2.
// Beyond the ladder: adamw.cu multiplies by the scale itself, and peers.cu writes the same partial
// sums while it adds.

#ifndef CHUNK
#define CHUNK 4096
#endif
#ifndef THREADS
#define THREADS 256
#endif
#if CHUNK % (4 * THREADS) != 0
#error "CHUNK must be a multiple of 4 * THREADS: a thread takes whole groups of four"
#endif
#ifndef MAX_TENSORS
#define MAX_TENSORS 256
#endif
#define GROUPS_OF_FOUR (CHUNK / 4 / THREADS)     // that a thread takes of a chunk

// ---- one tensor per launch ----

extern "C" __global__ void __launch_bounds__(256) squares_v1(
    float* partials,          // one per block: where this tensor's begin
    const float* x,           // (n)
    long long n)
{
    __shared__ float warps[8];
    float sum = 0.0f;
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        sum = fmaf(x[i], x[i], sum);
    for (int lane_delta = 16; lane_delta > 0; lane_delta /= 2)
        sum += __shfl_down_sync(0xffffffffu, sum, lane_delta);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.0f;
        for (int warp = 0; warp < 8; warp++) sum += warps[warp];
        partials[blockIdx.x] = sum;
    }
}

extern "C" __global__ void reduce_v1(
    float* scale,             // (2) the scale, and the norm before clipping
    const float* partials,    // (n)
    int n,
    float max_norm)           // by value: a CUDA graph keeps the one it was captured with
{
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum += partials[i];
    float norm = sqrtf(sum);
    scale[0] = fminf(max_norm / norm, 1.0f);      // NaN becomes 1 here, unseen, as in the reference
    scale[1] = norm;
}

extern "C" __global__ void scale_v1(float* x, const float* scale, long long n) {
    float factor = *scale;
    if (fabsf(factor - 1.0f) < 1e-7f) return;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}

// ---- many tensors per launch ----

struct Tensors {                             // by value: nothing is uploaded
    void* address[MAX_TENSORS];
    int first[MAX_TENSORS + 1];              // its first chunk of this launch; then their number
    unsigned short tail[MAX_TENSORS];        // elements in its last chunk, 1 to CHUNK
    unsigned char kind[MAX_TENSORS];         // 0 fp32, 1 bf16, 2 fp16
};

template <class T>
__device__ __forceinline__ void load_chunk(float4 (&x)[GROUPS_OF_FOUR], const T* from, int count) {
    bool whole = count == CHUNK && aligned4(from, sizeof(T));
    #pragma unroll
    for (int k = 0; k < GROUPS_OF_FOUR; k++) {
        int i = k * THREADS + threadIdx.x;
        x[k] = load4(from, i, count, whole);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) squares_v2(
    double* partials,         // one per chunk, from this launch's first
    int* chunk_to_tensor,     // per chunk: its tensor; 0: not wanted
    int first_tensor,
    Tensors tensors)
{
    __shared__ double warps[THREADS / 32];
    for (int chunk = blockIdx.x; chunk < tensors.first[MAX_TENSORS]; chunk += gridDim.x) {
        int t = tensor_of(tensors.first, MAX_TENSORS, chunk), index = chunk - tensors.first[t];
        int count = chunk + 1 == tensors.first[t + 1] ? tensors.tail[t] : CHUNK;
        long long from = (long long)index * CHUNK;
        float4 x[GROUPS_OF_FOUR];
        if (tensors.kind[t] == 0) load_chunk(x, (const float*)tensors.address[t] + from, count);
        else if (tensors.kind[t] == 1) load_chunk(x, (const bf16*)tensors.address[t] + from, count);
        else load_chunk(x, (const fp16*)tensors.address[t] + from, count);
        double sum = block_joined(magnitude(x), warps);
        if (threadIdx.x == 0) {
            partials[chunk] = sum;
            if (chunk_to_tensor != 0) chunk_to_tensor[chunk] = first_tensor + t;
        }
        __syncthreads();                     // `warps` is used again
    }
}

// The row where group g begins. Rows are ordered by tensor, tensors by group.
__device__ __forceinline__ int row_of_group(const int* chunk_to_tensor, const int* groups, int rows,
                                            int g) {
    int low = 0, high = rows;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (groups[chunk_to_tensor[middle]] < g) low = middle + 1; else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(1024) reduce_v2(
    float4* clip_results,     // per group: scale, norm before clipping, norm after it, 1 if finite
    int* first_bad,           // per group: its first tensor with a number that is not finite, or -1
    const double* partials,   // (rows)
    const int* chunk_to_tensor,   // (rows) the tensor of each
    const int* groups,        // per tensor: its group; 0: all tensors are one group
    int rows,
    const double* max_norm,   // (1) on the device, so that a replayed graph reads today's
    double eps,
    const float* divisor)     // (1) what the gradients are still to be divided by; 0: nothing
{
    __shared__ double warps[32];
    __shared__ int bad[32];
    int start = groups == 0 ? 0 : row_of_group(chunk_to_tensor, groups, rows, blockIdx.x);
    int stop = groups == 0 ? rows : row_of_group(chunk_to_tensor, groups, rows, blockIdx.x + 1);
    double sum = 0.0;
    int first = 2147483647;
    #pragma unroll 8
    for (int i = start + threadIdx.x; i < stop; i += 1024) {
        double part = partials[i];
        sum = joined(sum, part);
        if (!isfinite(part)) first = min(first, i);
    }
    for (int lane_delta = 16; lane_delta > 0; lane_delta /= 2)
        first = min(first, __shfl_down_sync(0xffffffffu, first, lane_delta));
    if (threadIdx.x % 32 == 0) bad[threadIdx.x / 32] = first;
    // Its barrier also stands between writing and reading `bad`.
    sum = block_joined(sum, warps);
    if (threadIdx.x > 0) return;
    for (int warp = 0; warp < 32; warp++) first = min(first, bad[warp]);
    double norm = NORM == 2 ? sqrt(sum) : sum;
    if (divisor != 0) norm /= *divisor;
    double ratio = *max_norm / (norm + eps);
    float scale = ratio >= 1.0 ? 1.0f : (float)ratio;      // NaN stays NaN
    clip_results[blockIdx.x] =
        make_float4(scale, (float)norm, (float)(norm * scale), isfinite((float)norm) ? 1.0f : 0.0f);
    first_bad[blockIdx.x] = first == 2147483647 ? -1 : chunk_to_tensor[first];
}

template <class T> __device__ __forceinline__ void scale_chunk(T* data, int count, float scale) {
    float4 x[GROUPS_OF_FOUR];
    load_chunk(x, data, count);
    bool whole = count == CHUNK && aligned4(data, sizeof(T));
    #pragma unroll
    for (int k = 0; k < GROUPS_OF_FOUR; k++) {
        int i = k * THREADS + threadIdx.x;
        float4 scaled = make_float4(x[k].x * scale, x[k].y * scale, x[k].z * scale, x[k].w * scale);
        store4(data, i, count, whole, scaled);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) scale_v2(
    const float4* clip_results,
    const int* groups,        // per tensor; 0: all tensors are one group
    int skip,                 // 1: do not scale a group that is not finite
    int first_tensor,
    Tensors tensors)
{
    if (groups == 0 && (clip_results[0].x == 1.0f || (skip && clip_results[0].w == 0.0f))) return;
    for (int chunk = blockIdx.x; chunk < tensors.first[MAX_TENSORS]; chunk += gridDim.x) {
        int t = tensor_of(tensors.first, MAX_TENSORS, chunk), index = chunk - tensors.first[t];
        float4 result = clip_results[groups == 0 ? 0 : groups[first_tensor + t]];
        if (result.x == 1.0f || (skip && result.w == 0.0f)) continue;
        int count = chunk + 1 == tensors.first[t + 1] ? tensors.tail[t] : CHUNK;
        long long from = (long long)index * CHUNK;
        if (tensors.kind[t] == 0) scale_chunk((float*)tensors.address[t] + from, count, result.x);
        else if (tensors.kind[t] == 1)
            scale_chunk((bf16*)tensors.address[t] + from, count, result.x);
        else scale_chunk((fp16*)tensors.address[t] + from, count, result.x);
    }
}
