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
//   accumulate_v3  One launch for up to 180 tensors. A thread block takes a chunk of 4096 elements,
//                  and finds its tensor by a search. The addresses are passed by value with the
//                  launch, so nothing is uploaded.
//
// A chunk never crosses a tensor.

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
#define MAX_TENSORS 180     // a launch has 4 KB of arguments
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

struct Additions {                           // by value: nothing is uploaded
    float* sum[MAX_TENSORS];
    const GRAD_T* grad[MAX_TENSORS];
    int first[MAX_TENSORS + 1];              // its first chunk of this launch; then their number
    unsigned short tail[MAX_TENSORS];        // elements in its last chunk, 1 to CHUNK
};

// One thread block per chunk of all tensors.
extern "C" __global__ void __launch_bounds__(THREADS) accumulate_v3(Additions tensors) {
    int chunk = blockIdx.x, t = tensor_of(tensors.first, MAX_TENSORS, chunk);
    long long from = (long long)(chunk - tensors.first[t]) * CHUNK;
    int count = chunk + 1 == tensors.first[t + 1] ? tensors.tail[t] : CHUNK;
    float* sum = tensors.sum[t] + from;
    const GRAD_T* grad = tensors.grad[t] + from;
    if (count == CHUNK && aligned4(sum, sizeof(float)) && aligned4(grad, sizeof(GRAD_T))) {
        // All loads first, so that they are in flight together.
        float4 g[CHUNK / 4 / THREADS], a[CHUNK / 4 / THREADS];
        #pragma unroll
        for (int k = 0; k < CHUNK / 4 / THREADS; k++) {
            g[k] = load4(grad, k * THREADS + threadIdx.x);
            a[k] = load4(sum, k * THREADS + threadIdx.x);
        }
        #pragma unroll
        for (int k = 0; k < CHUNK / 4 / THREADS; k++)
            store4(sum, k * THREADS + threadIdx.x, add4(a[k], g[k]));
    } else {  // a tensor's last chunk, or memory that is not aligned
        for (int i = threadIdx.x; i < count; i += THREADS) sum[i] += as_float(grad[i]);
    }
}
