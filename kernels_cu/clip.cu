// clip: the norm of all gradients, and the factor that brings it down to max_norm. The host is never asked.
//
//   norm  = (sum of x^2 over every element of every tensor)^(1/2)
//   scale = min(1, max_norm / (norm + eps))          one number on the device, read by the kernel that multiplies
//
// Floor: one read for the norm, and only when the scale is below 1 another read and a write. fp32: 4 or 12 bytes per element;
// an H200 copies about 4.2 TB/s, so 470 M elements take at least 0.45 ms below the threshold and 1.34 ms above.
//
// The ladder:
//   item           for every tensor: its norm to the host (`.item()`), add there, decide there. The GPU stands still each time.
//   squares_v1     one launch per tensor, at most 256 blocks; each leaves one fp32 sum of squares in one common buffer, at the tensor's
//                  place. Warps are summed by shuffles, in a fixed order, without atomics.
//   reduce_v1      one thread adds all of them, one after the other, in fp32, and writes the scale. The host is out; 1,800 dependent
//                  additions are not.
//   scale_v1       one launch per tensor; every thread reads the scale and multiplies, or returns when there is nothing to do.
//   squares_v2     one launch for up to 256 tensors of any dtype. A partial sum belongs to a chunk of 4096 elements, not to a thread block,
//                  so that the bits do not depend on the grid; squares that leave fp32's range are taken in fp64.
//   reduce_v2      one block per group of tensors (all of them, a transformer block, one tensor): 1024 threads, a tree, fp64; it also
//                  finds the first tensor that is not finite, so that someone can be told its name later.
//   scale_v2       as squares_v2, many tensors per launch.
// Past the ladder: accumulate_v4 leaves the same partial sums while it adds, and adamw.cu multiplies by the scale itself: no pass at all.

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
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) sum = fmaf(x[i], x[i], sum);
    for (int far = 16; far > 0; far /= 2) sum += __shfl_down_sync(0xffffffffu, sum, far);
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
    scale[0] = fminf(max_norm / norm, 1.0f);      // the reference's edge case: NaN becomes 1, and nobody sees it
    scale[1] = norm;
}

extern "C" __global__ void scale_v1(float* x, const float* scale, long long n) {
    float by = *scale;
    if (fabsf(by - 1.0f) < 1e-7f) return;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}

// ---- many tensors per launch ----

struct Tensors {                             // by value: nothing is uploaded
    void* address[MAX_TENSORS];
    int first[MAX_TENSORS + 1];              // its first chunk among this launch's; behind the last tensor: how many there are
    unsigned short tail[MAX_TENSORS];        // elements in its last chunk, 1 to CHUNK
    unsigned char kind[MAX_TENSORS];         // 0 fp32, 1 bf16, 2 fp16
};

template <class T> __device__ __forceinline__ void load_chunk(float4 (&x)[GROUPS_OF_FOUR], const T* from, int count) {
    bool whole = count == CHUNK && aligned4(from, sizeof(T));
    #pragma unroll
    for (int k = 0; k < GROUPS_OF_FOUR; k++) {
        int i = k * THREADS + threadIdx.x;
        x[k] = load4(from, i, count, whole);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) squares_v2(
    double* partials,         // one per chunk, from this launch's first
    int* owners,              // per chunk: its tensor; 0: that is known
    int first_tensor,
    Tensors tensors)
{
    __shared__ double warps[THREADS / 32];
    for (int chunk = blockIdx.x; chunk < tensors.first[MAX_TENSORS]; chunk += gridDim.x) {
        int t = tensor_of(tensors.first, MAX_TENSORS, chunk), nth = chunk - tensors.first[t];
        int count = chunk + 1 == tensors.first[t + 1] ? tensors.tail[t] : CHUNK;
        long long from = (long long)nth * CHUNK;
        float4 x[GROUPS_OF_FOUR];
        if (tensors.kind[t] == 0) load_chunk(x, (const float*)tensors.address[t] + from, count);
        else if (tensors.kind[t] == 1) load_chunk(x, (const bf16*)tensors.address[t] + from, count);
        else load_chunk(x, (const fp16*)tensors.address[t] + from, count);
        double sum = block_joined(magnitude(x), warps);
        if (threadIdx.x == 0) {
            partials[chunk] = sum;
            if (owners != 0) owners[chunk] = first_tensor + t;
        }
        __syncthreads();                     // `warps` is used again
    }
}

// Where group g's rows begin; rows come in the order of their tensors, tensors in the order of their groups.
__device__ __forceinline__ int row_of_group(const int* owners, const int* groups, int rows, int g) {
    int low = 0, high = rows;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (groups[owners[middle]] < g) low = middle + 1; else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(1024) reduce_v2(
    float4* verdicts,         // per group: scale, norm before clipping, norm after it, 1 where all is finite (else 0)
    int* first_bad,           // per group: its first tensor with a number that is not finite, or -1
    const double* partials,   // (rows)
    const int* owners,        // (rows) the tensor of each
    const int* groups,        // per tensor: its group; 0: all tensors are one group
    int rows,
    const double* max_norm,   // (1) on the device, so that a replayed graph reads today's
    double eps,
    const float* divisor)     // (1) what the gradients are still to be divided by (tokens, a loss scale); 0: by nothing
{
    __shared__ double warps[32];
    __shared__ int bad[32];
    int start = groups == 0 ? 0 : row_of_group(owners, groups, rows, blockIdx.x);
    int stop = groups == 0 ? rows : row_of_group(owners, groups, rows, blockIdx.x + 1);
    double sum = 0.0;
    int worst = 2147483647;
    #pragma unroll 8
    for (int i = start + threadIdx.x; i < stop; i += 1024) {
        double part = partials[i];
        sum = joined(sum, part);
        if (!isfinite(part)) worst = min(worst, i);
    }
    for (int far = 16; far > 0; far /= 2) worst = min(worst, __shfl_down_sync(0xffffffffu, worst, far));
    if (threadIdx.x % 32 == 0) bad[threadIdx.x / 32] = worst;
    sum = block_joined(sum, warps);          // its barrier also stands between writing and reading `bad`
    if (threadIdx.x > 0) return;
    for (int warp = 0; warp < 32; warp++) worst = min(worst, bad[warp]);
    double norm = NORM == 2 ? sqrt(sum) : sum;
    if (divisor != 0) norm /= *divisor;
    double by = *max_norm / (norm + eps);
    float scale = by >= 1.0 ? 1.0f : (float)by;            // NaN stays NaN
    verdicts[blockIdx.x] = make_float4(scale, (float)norm, (float)(norm * scale), isfinite((float)norm) ? 1.0f : 0.0f);
    first_bad[blockIdx.x] = worst == 2147483647 ? -1 : owners[worst];
}

template <class T> __device__ __forceinline__ void scale_chunk(T* at, int count, float by) {
    float4 x[GROUPS_OF_FOUR];
    load_chunk(x, at, count);
    bool whole = count == CHUNK && aligned4(at, sizeof(T));
    #pragma unroll
    for (int k = 0; k < GROUPS_OF_FOUR; k++) {
        int i = k * THREADS + threadIdx.x;
        float4 scaled = make_float4(x[k].x * by, x[k].y * by, x[k].z * by, x[k].w * by);
        store4(at, i, count, whole, scaled);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) scale_v2(
    const float4* verdicts,
    const int* groups,        // per tensor; 0: all tensors are one group
    int skip,                 // 1: leave a group alone that is not finite
    int first_tensor,
    Tensors tensors)
{
    if (groups == 0 && (verdicts[0].x == 1.0f || (skip && verdicts[0].w == 0.0f))) return;
    for (int chunk = blockIdx.x; chunk < tensors.first[MAX_TENSORS]; chunk += gridDim.x) {
        int t = tensor_of(tensors.first, MAX_TENSORS, chunk), nth = chunk - tensors.first[t];
        float4 verdict = verdicts[groups == 0 ? 0 : groups[first_tensor + t]];
        if (verdict.x == 1.0f || (skip && verdict.w == 0.0f)) continue;
        int count = chunk + 1 == tensors.first[t + 1] ? tensors.tail[t] : CHUNK;
        long long from = (long long)nth * CHUNK;
        if (tensors.kind[t] == 0) scale_chunk((float*)tensors.address[t] + from, count, verdict.x);
        else if (tensors.kind[t] == 1) scale_chunk((bf16*)tensors.address[t] + from, count, verdict.x);
        else scale_chunk((fp16*)tensors.address[t] + from, count, verdict.x);
    }
}
