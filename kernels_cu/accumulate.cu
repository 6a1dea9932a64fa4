// accumulate: acc[i] += grad[i], gradients in fp32 or bf16 (GRAD_T), the sum always in fp32.
//
// Why fp32: in bf16, 256 + 1 = 256. A sum of many small gradients kept in bf16 stops growing; kept in fp32 it does not.
//
// Floor: every element is read twice and written once, 12 bytes with fp32 gradients and 10 with bf16. An H200 copies about
// 4.2 TB/s, so that 470 M elements take at least 1.34 ms (fp32) or 1.12 ms (bf16). Nothing but bytes counts here.
//
// The ladder:
//   accumulate_v1  one thread, one element. A warp asks for 128 bytes at a time: many small requests, most threads only wait.
//                  And one launch per tensor: a transformer block has nine of them, two of which are tiny.
//   accumulate_v2  one thread, 16 bytes at a time (float4; eight bf16), several in flight. Still one launch per tensor.
//   accumulate_v3  one launch for many tensors, up to 256. Thread blocks take chunks of the arena; a table says which tensor a chunk
//                  belongs to, and the addresses of the fresh gradients come by value with the launch itself, so that nothing
//                  is uploaded. Padding between tensors is never read: only its place in the arena exists.
//
// Shapes: N elements of the arena, a multiple of CHUNK; a chunk never crosses a tensor.

#ifndef GRAD_T
#define GRAD_T float
#endif
#ifndef CHUNK
#define CHUNK 4096
#endif
#ifndef THREADS
#define THREADS 512
#endif
#ifndef MAX_TENSORS
#define MAX_TENSORS 256
#endif

extern "C" __global__ void accumulate_v1(
    float* acc,               // (n) the sum so far
    const GRAD_T* grad,       // (n) fresh gradient
    long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) acc[i] += as_float(grad[i]);
}

// Four gradients from 16 (fp32) or 8 (bf16) bytes. `i` counts groups of four.
__device__ __forceinline__ float4 load4(const float* grad, long long i) { return reinterpret_cast<const float4*>(grad)[i]; }
__device__ __forceinline__ float4 load4(const bf16* grad, long long i) {
    uint2 two = reinterpret_cast<const uint2*>(grad)[i];
    return make_float4(low_as_float(two.x), high_as_float(two.x), low_as_float(two.y), high_as_float(two.y));
}
__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

extern "C" __global__ void accumulate_v2(
    float4* acc,              // (n / 4) groups of four; 16-byte aligned
    const GRAD_T* grad,       // (n), aligned to four elements
    long long n)              // a multiple of 4
{
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n / 4; i += step)
        acc[i] = add4(acc[i], load4(grad, i));
}

struct Sources { const GRAD_T* grad[MAX_TENSORS]; };      // address of each tensor's fresh gradient; 0: it got none

extern "C" __global__ void __launch_bounds__(THREADS) accumulate_v3(
    float4* acc,                   // (N / 4) the whole arena
    const int4* chunks,            // per chunk: .x its tensor, .y elements in it, .z which chunk of the tensor, .w of the arena
    int first_row,                 // row of `chunks` for this launch's first thread block
    int first_tensor,              // tensor of sources.grad[0]
    Sources sources)
{
    int4 where = chunks[(long long)first_row + blockIdx.x];
    const GRAD_T* grad = sources.grad[where.x - first_tensor];
    if (grad == 0) return;
    grad += (long long)where.z * CHUNK;
    acc += (long long)where.w * (CHUNK / 4);
    int count = where.y;
    if (count == CHUNK && ((unsigned long long)grad & (4 * sizeof(GRAD_T) - 1)) == 0) {
        // All loads first, so that they are in flight together; then the sums.
        float4 g[CHUNK / 4 / THREADS], a[CHUNK / 4 / THREADS];
        #pragma unroll
        for (int k = 0; k < CHUNK / 4 / THREADS; k++) {
            g[k] = load4(grad, k * THREADS + threadIdx.x);
            a[k] = acc[k * THREADS + threadIdx.x];
        }
        #pragma unroll
        for (int k = 0; k < CHUNK / 4 / THREADS; k++) acc[k * THREADS + threadIdx.x] = add4(a[k], g[k]);
    } else {                       // a tensor's last chunk, or a gradient that is a view at an odd address
        float* out = reinterpret_cast<float*>(acc);
        for (int i = threadIdx.x; i < count; i += THREADS) out[i] += as_float(grad[i]);
    }
}
