// accumulate: acc[i] += grad[i], gradients in fp32 or bf16 (GRAD_T), the sum always in fp32.
//
// Why fp32: in bf16, 256 + 1 = 256. A sum of many small gradients kept in bf16 stops growing; kept
// in fp32 it does not.
//
// Floor: every element of acc is read and written, every element of grad is read: 12 bytes with
// fp32 gradients, 10 with bf16. An H200 copies about 4.2 TB/s, so 470 M elements take at least 1.34
// ms (fp32) or 1.12 ms (bf16). The kernels are bound by memory alone.
//
// The ladder:
//   accumulate_v1  One thread, one element. A warp requests 128 bytes at a time: many small
//                  requests, most threads only wait. And one launch per tensor, however small.
//   accumulate_v2  One thread, four elements at a time: 16 bytes of fp32, 8 of bf16. Still one
//                  launch per tensor.
//   accumulate_v3  One launch for up to 256 tensors. Thread blocks take chunks of the arena; a
//                  table says which tensor a chunk belongs to. The addresses of the gradients are
//                  passed by value with the launch, so nothing is uploaded. Padding between tensors
//                  is never read: it exists only in the arena.
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
#if CHUNK % (4 * THREADS) != 0
#error "CHUNK must be a multiple of 4 * THREADS: a thread takes whole groups of four"
#endif
#ifndef MAX_TENSORS
#define MAX_TENSORS 256
#endif

extern "C" __global__ void accumulate_v1(
    float* acc,               // (n) the sum so far
    const GRAD_T* grad,       // (n)
    long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) acc[i] += as_float(grad[i]);
}

extern "C" __global__ void accumulate_v2(
    float4* acc,              // (n / 4) groups of four; 16-byte aligned
    const GRAD_T* grad,       // (n), aligned to four elements
    long long n)              // a multiple of 4
{
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n / 4; i += step)
        acc[i] = add4(acc[i], load4(grad, i));
}

// Address of each tensor's gradient; 0: it has none.
struct Sources { const GRAD_T* grad[MAX_TENSORS]; };

extern "C" __global__ void __launch_bounds__(THREADS) accumulate_v3(
    float4* acc,                   // (N / 4) the whole arena
    const int4* chunks,            // per chunk: .x its tensor, .y elements in it,
                                   // .z its index in the tensor, .w in the arena
    int first_row,                 // row of `chunks` for this launch's first thread block
    int first_tensor,              // tensor of sources.grad[0]
    Sources sources)
{
    int4 chunk = chunks[(long long)first_row + blockIdx.x];
    const GRAD_T* grad = sources.grad[chunk.x - first_tensor];
    if (grad == 0) return;
    grad += (long long)chunk.z * CHUNK;
    acc += (long long)chunk.w * (CHUNK / 4);
    int count = chunk.y;
    if (count == CHUNK && aligned4(grad, sizeof(GRAD_T))) {
        // All loads first, so that they are in flight together.
        float4 g[CHUNK / 4 / THREADS], a[CHUNK / 4 / THREADS];
        #pragma unroll
        for (int k = 0; k < CHUNK / 4 / THREADS; k++) {
            g[k] = load4(grad, k * THREADS + threadIdx.x);
            a[k] = acc[k * THREADS + threadIdx.x];
        }
        #pragma unroll
        for (int k = 0; k < CHUNK / 4 / THREADS; k++)
            acc[k * THREADS + threadIdx.x] = add4(a[k], g[k]);
    } else {  // a tensor's last chunk, or a gradient that is not aligned
        float* out = reinterpret_cast<float*>(acc);
        for (int i = threadIdx.x; i < count; i += THREADS) out[i] += as_float(grad[i]);
    }
}
