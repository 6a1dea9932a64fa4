// encoder: the first layer, out[b, t] = wte[token[b, t]] + wpe[t], and its gradients, which are added into tensors that hold sums already:
//     dwte[v] += sum of dout[b, t] over all b, t with token v          dwpe[t] += sum over b of dout[b, t]
//
// Shapes: B batch, T time, C channels, V vocabulary; rows = B * T. dout in GRAD_T, the sums dwte and dwpe in ACC_T, every sum in fp32.
//
// Why it is hard: which rows meet is only known from the tokens. Floor: each row of dout is read once (1,536 bytes for 768 bf16 channels), each
// row of dwte that a token names is read and written. For 65,536 rows that is 100 MB and, on text, some 90 MB: 0.045 ms at 4.2 TB/s.
//
// The ladder:
//   encoder_backward_v1  atomics: each element of dout is added at once, in whatever order the threads come. The sums differ from run to run, and
//                        rows of a frequent token wait for each other. Shown, never used.
//   encoder_backward_v2  buckets, as in llm.c: the CPU sorts the rows by token; one thread block per bucket of a token and 256 channels, eight
//                        warps take its rows in turn, then warp 0 adds their sums in order. Same bits every time. But the CPU takes 8 to 21 ms for 65,536
//                        tokens, and where all tokens are the same, one block per 256 channels does all the work.
//   encoder_backward_v3  the rows as segments.cu has sorted them on the device, in pieces of at most 32: a warp adds a piece's rows in order, 128
//                        QUADS channels at a time. What is a whole run goes straight into dwte; the pieces of longer runs leave partial sums, which
//   encoder_combine_v3   adds up: eight warps take a run's pieces in turn, then warp 0 adds their sums in order.
//   encoder_wpe          one thread per position and four channels adds over the batch, in order.
//
// A token out of range is never used as an address. encoder_forward gives NaN for it and counts it; in the sums its rows are NaN in row 0
// of dwte, so that the step is seen to be wrong, and skipped.

#ifndef TOKEN_T
#define TOKEN_T long long
#endif
#ifndef PARAM_T
#define PARAM_T float         // wte, wpe, out
#endif
#ifndef GRAD_T
#define GRAD_T float          // dout
#endif
#ifndef ACC_T
#define ACC_T float           // dwte, dwpe
#endif
#ifndef STOCHASTIC
#define STOCHASTIC 0          // 1: how a sum in bf16 is rounded
#endif
#ifndef WHOLE
#define WHOLE 0               // 1: C is a multiple of 4 and every row is aligned to four elements
#endif
#ifndef QUADS
#define QUADS 2               // groups of four channels that a lane sums up
#endif
#ifndef UNROLL
#define UNROLL 4              // rows in flight
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef PIECE
#define PIECE 32              // rows, as in segments.cu
#endif
#define WARPS (THREADS / 32)
#define ALL 0xffffffffu
#define INVALID 0x80000000u   // in a row's number: its token was out of range

__device__ __forceinline__ float4 nan4() {
    float nan = __uint_as_float(0x7fc00000u);
    return make_float4(nan, nan, nan, nan);
}

extern "C" __global__ void __launch_bounds__(THREADS) encoder_forward(
    PARAM_T* out,                     // (rows, C)
    const TOKEN_T* tokens,            // (rows)
    const PARAM_T* wte,               // (vocab, C)
    const PARAM_T* wpe,               // (T, C); 0: there is none
    unsigned long long* invalid,      // (3) tokens out of range: how many; the first one's position << 32 | T; position << 32 | token
    long long rows, int T, int C, int vocab)
{
    long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;      // a warp each
    int lane = threadIdx.x % 32;
    if (row >= rows) return;
    long long token = tokens[row];
    bool valid = token >= 0 && token < vocab;
    if (!valid && lane == 0) {
        int shown = token < -2147483647 ? -2147483647 - 1 : token > 2147483647 ? 2147483647 : (int)token;
        atomicAdd(invalid, 1ull);
        atomicMin(invalid + 1, (unsigned long long)row << 32 | (unsigned)T);
        atomicMin(invalid + 2, (unsigned long long)row << 32 | (unsigned)shown);
    }
    const PARAM_T* from = wte + (valid ? token : 0) * C;
    #pragma unroll 4
    for (int q = lane; 4 * q < C; q += 32) {
        float4 x = valid ? load4(from, q, C, WHOLE) : nan4();
        if (wpe != 0) x = add4(x, load4(wpe + row % T * C, q, C, WHOLE));
        store4(out + row * C, q, C, WHOLE, x);
    }
}

// ---- v1: atomics ----

extern "C" __global__ void encoder_backward_v1(
    float* dwte, float* dwpe,         // (vocab, C), (T, C)
    const GRAD_T* dout,               // (rows, C)
    const TOKEN_T* tokens,            // (rows)
    long long rows, int T, int C, int vocab)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * C) return;
    long long row = i / C, token = tokens[row];
    int c = (int)(i % C);
    if (token < 0 || token >= vocab) return;
    atomicAdd(dwte + token * C + c, as_float(dout[i]));
    atomicAdd(dwpe + row % T * C + c, as_float(dout[i]));
}

// ---- the last step: into the sum ----

struct Rounding {             // of sums in bf16: what the noise depends on, beside the element
    unsigned long long seed;
    const int* later;         // (1) added to step; 0: nothing. A captured step counts on there
    int step, micro_batch;
};

__device__ __forceinline__ void store_rounded(float* x, float value, unsigned) { *x = value; }
__device__ __forceinline__ void store_rounded(fp16* x, float value, unsigned) { *x = as_fp16(value); }
__device__ __forceinline__ void store_rounded(bf16* x, float value, unsigned noise) { *x = as_bf16_stochastic(value, noise); }

// sums[row] (C) gets the group of four `x` at q. `which` tensor: 0 wte, 1 wpe.
__device__ __forceinline__ void store_sum(ACC_T* sums, long long row, int q, int C, float4 x, const Rounding& rounding, int which) {
    ACC_T* to = sums + row * C;
#if STOCHASTIC
    long long group = row * ((C + 3) / 4) + q;
    unsigned step = rounding.step + (rounding.later != 0 ? *rounding.later : 0);
    uint4 noise = random_bits(rounding.seed, make_uint4((unsigned)group, (unsigned)(group >> 32), 2 * rounding.micro_batch + which, step));
    if (4 * q < C) store_rounded(to + 4 * q, x.x, noise.x);
    if (4 * q + 1 < C) store_rounded(to + 4 * q + 1, x.y, noise.y);
    if (4 * q + 2 < C) store_rounded(to + 4 * q + 2, x.z, noise.z);
    if (4 * q + 3 < C) store_rounded(to + 4 * q + 3, x.w, noise.w);
#else
    store4(to, q, C, WHOLE, x);
#endif
}

__device__ __forceinline__ float4 over(float4 x, int count) {
    float n = (float)count;
    return make_float4(x.x / n, x.y / n, x.z / n, x.w / n);
}

// ---- v2: buckets made by the CPU ----

#define LANE4 (4 / (int)sizeof(GRAD_T))      // groups of four channels of a lane: 16 bytes of dout, as in llm.c

extern "C" __global__ void __launch_bounds__(256) encoder_backward_v2(
    ACC_T* dwte,                      // (vocab, C)
    const GRAD_T* dout,               // (rows, C); C is a multiple of 4 * LANE4
    const int4* buckets,              // per block: .x its first item, .y how many, .z the token, .w which 128 * LANE4 channels
    const int* items,                 // rows of all buckets, each bucket's in ascending order
    int C, Rounding rounding)
{
    __shared__ float4 partial[8][LANE4][32];
    int4 bucket = buckets[blockIdx.x];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, q = (bucket.w * 32 + lane) * LANE4;
    if (4 * q >= C || warp >= bucket.y) return;   // threads that have returned count as arrived at the barrier
    float4 sum[LANE4];
    for (int k = 0; k < LANE4; k++) sum[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = warp; i < bucket.y; i += 8)
        for (int k = 0; k < LANE4; k++) sum[k] = add4(sum[k], load4(dout + (long long)items[bucket.x + i] * C, q + k));
    for (int k = 0; k < LANE4; k++) partial[warp][k][lane] = sum[k];
    __syncthreads();
    if (warp > 0) return;
    for (int k = 0; k < LANE4; k++) {
        for (int w = 1; w < min(8, bucket.y); w++) sum[k] = add4(sum[k], partial[w][k][lane]);
        store_sum(dwte, bucket.z, q + k, C, add4(sum[k], load4(dwte + (long long)bucket.z * C, q + k)), rounding, 0);
    }
}

// ---- v3: segments found on the device ----

__device__ __forceinline__ float4* partial_of(float* partials, long long place, bool first, int C) {
    return reinterpret_cast<float4*>(partials) + (2 * (place / PIECE) + first) * ((C + 3) / 4);     // at most one of each kind begins in 32 places
}

extern "C" __global__ void __launch_bounds__(THREADS) encoder_backward_v3(
    ACC_T* dwte,                      // (vocab, C)
    float* partials,                  // (2 * ceil(n / PIECE), 4 * ceil(C / 4)) sums of pieces of longer runs; 16-byte aligned
    const GRAD_T* dout,               // (n, C)
    const uint2* order,               // (n) row and token, sorted by token
    const int* pieces,                // (n) what begins at each place
    int n, int C,
    int by_count,                     // 1: divide by the number of rows (scale_grad_by_freq)
    Rounding rounding)
{
    int lane = threadIdx.x % 32;
    long long first = ((long long)blockIdx.x * WARPS + threadIdx.x / 32) * PIECE;      // a warp takes what begins in 32 places
    int kind = first + lane < n ? pieces[first + lane] : 0;
    unsigned heads = __ballot_sync(ALL, kind != 0);
    if (heads == 0) return;
    uint2 here = first + lane < n ? order[first + lane] : make_uint2(0, 0);
    unsigned behind = first + PIECE + lane < n ? order[first + PIECE + lane].x : 0;    // a piece may end in the next 32 places
    int q = blockIdx.y * QUADS * 32 + lane;                                             // its groups of four channels: q, q + 32, ...
    while (heads != 0) {
        int head = __ffs(heads) - 1;
        heads &= heads - 1;
        int what = __shfl_sync(ALL, kind, head), rows = what < 0 ? PIECE : what > PIECE ? what - PIECE : what;
        bool whole_run = what > 0 && what <= PIECE;
        long long token = __shfl_sync(ALL, here.y, head);
        float4 sum[QUADS], old[QUADS];
        #pragma unroll
        for (int k = 0; k < QUADS; k++)                          // asked for early: on its way while the rows are added
            old[k] = whole_run && 4 * (q + 32 * k) < C ? load4(dwte + token * C, q + 32 * k, C, WHOLE) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int r = 0; r < rows; r += UNROLL) {
            float4 x[UNROLL][QUADS];
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                int at = head + r + u;
                unsigned row = __shfl_sync(ALL, at < PIECE ? here.x : behind, at % PIECE);
                #pragma unroll
                for (int k = 0; k < QUADS; k++)
                    x[u][k] = row & INVALID ? nan4() : r + u < rows && 4 * (q + 32 * k) < C
                        ? load4(dout + (long long)row * C, q + 32 * k, C, WHOLE) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
            #pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (r + u < rows) {
                    #pragma unroll
                    for (int k = 0; k < QUADS; k++) sum[k] = r + u == 0 ? x[u][k] : add4(sum[k], x[u][k]);
                }
        }
        #pragma unroll
        for (int k = 0; k < QUADS; k++) {
            if (4 * (q + 32 * k) >= C) continue;
            if (whole_run) store_sum(dwte, token, q + 32 * k, C, add4(old[k], by_count ? over(sum[k], rows) : sum[k]), rounding, 0);
            else partial_of(partials, first + head, what < 0, C)[q + 32 * k] = sum[k];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) encoder_combine_v3(
    ACC_T* dwte, float* partials, const uint2* order, const int* pieces, int n, int C, int by_count, Rounding rounding)
{
    __shared__ float4 warps[WARPS][QUADS][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long first = (long long)blockIdx.x * PIECE;              // at most one longer run begins in 32 places
    int kind = first + lane < n ? pieces[first + lane] : 0;
    unsigned heads = __ballot_sync(ALL, kind < 0);
    if (heads == 0) return;
    int head = __ffs(heads) - 1, rows = -__shfl_sync(ALL, kind, head), count = (rows + PIECE - 1) / PIECE;
    long long token = order[first + head].y;
    int q = blockIdx.y * QUADS * 32 + lane;
    float4 sum[QUADS];
    #pragma unroll
    for (int k = 0; k < QUADS; k++) sum[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    #pragma unroll 4
    for (int p = warp; p < count; p += WARPS) {                   // a run has at least two pieces; a warp without one adds nothing
        const float4* from = partial_of(partials, first + head + (long long)p * PIECE, p == 0, C);
        #pragma unroll
        for (int k = 0; k < QUADS; k++) if (4 * (q + 32 * k) < C) sum[k] = p == warp ? from[q + 32 * k] : add4(sum[k], from[q + 32 * k]);
    }
    #pragma unroll
    for (int k = 0; k < QUADS; k++) warps[warp][k][lane] = sum[k];
    __syncthreads();
    if (warp > 0) return;
    #pragma unroll
    for (int k = 0; k < QUADS; k++) {
        if (4 * (q + 32 * k) >= C) continue;
        for (int w = 1; w < min(WARPS, count); w++) sum[k] = add4(sum[k], warps[w][k][lane]);
        float4 old = load4(dwte + token * C, q + 32 * k, C, WHOLE);
        store_sum(dwte, token, q + 32 * k, C, add4(old, by_count ? over(sum[k], rows) : sum[k]), rounding, 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) encoder_wpe(
    ACC_T* dwpe,                      // (T, C)
    const GRAD_T* dout,               // (B, T, C)
    int B, int T, int C, Rounding rounding)
{
    int groups = (C + 3) / 4;
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (long long)T * groups) return;
    long long t = i / groups;
    int q = (int)(i % groups);
    float4 sum = load4(dout + t * C, q, C, WHOLE);
    #pragma unroll 8
    for (int b = 1; b < B; b++) sum = add4(sum, load4(dout + ((long long)b * T + t) * C, q, C, WHOLE));
    store_sum(dwpe, t, q, C, add4(load4(dwpe + t * C, q, C, WHOLE), sum), rounding, 1);
}
