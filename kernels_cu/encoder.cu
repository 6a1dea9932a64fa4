// encoder: the first layer, out[b, t] = wte[token[b, t]] + wpe[t], and its gradients, which are
// added into tensors that hold sums already:
//
//   dwte[v] += sum of dout[b, t] over all b, t with token v
//   dwpe[t] += sum of dout[b, t] over all b
//
// Shapes: B batch, T time, C channels, V vocabulary; rows = B * T. dout in GRAD_T, the sums dwte
// and dwpe in ACC_T, every addition in fp32.
//
// Why it is hard: only the tokens say which rows are added together. Floor: each row of dout is
// read once (1,536 bytes for 768 bf16 channels), each row of dwte that a token names is read and
// written. For 65,536 rows that is 100 MB and, on text, some 90 MB: 0.045 ms at 4.2 TB/s.
//
// The ladder:
//   encoder_backward_v1  Atomics: each element of dout is added at once, in whatever order the
//                        threads run. The sums differ from run to run, and rows of a frequent token
//                        wait for each other. A lesson, never used.
//   encoder_backward_v2  Buckets, as in llm.c: the CPU sorts the rows by token. One thread block
//                        per bucket, a token and 256 channels (128 in fp32): its eight warps take
//                        the rows in turn, then warp 0 adds their sums in order. Deterministic. But
//                        the CPU has to sort and to copy, and where all tokens are the same, one
//                        block per 256 channels does all the work.
//   encoder_backward_v3  The rows as segments.cu sorts them on the device, in pieces of at most 32.
//                        A warp adds the rows of one piece after the other in order, 128 QUADS
//                        channels at a time, UNROLL rows in flight, whichever piece they belong to.
//                        A whole run goes straight into dwte; the pieces of longer runs leave
//                        partial sums.
//   encoder_combine_v3   Adds these: the COMBINE warps of a block take a run's pieces in turn, then
//                        warp 0 adds their sums in order.
//   encoder_wpe          One thread per position and four channels adds over the batch, in order.
//
// A token out of range is never used as an address. encoder_forward gives NaN for it and counts it;
// in the sums its rows are NaN in row 0 of dwte, so that the step is skipped.

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
#ifndef WHOLE
#define WHOLE 0               // 1: C is a multiple of 4 and every row is aligned to four elements
#endif
#ifndef QUADS
#define QUADS 1               // groups of four channels that a lane of encoder_backward_v3 sums up
#endif
#ifndef UNROLL
#define UNROLL 4              // rows in flight
#endif
#ifndef THREADS
#define THREADS 128
#endif
#ifndef PIECE
#define PIECE 32              // rows, as in segments.cu
#endif
#ifndef COMBINE
#define COMBINE 16            // warps of a block of encoder_combine_v3
#endif
#ifndef SPAN
#define SPAN 8                // times 32 places, which such a block looks through; at most COMBINE
#endif
#define WARPS (THREADS / 32)
#define ALL 0xffffffffu
#define INVALID 0x80000000u   // in a row's number: its token was out of range

__device__ __forceinline__ float4 nan4() {
    float nan = __uint_as_float(0x7fc00000u);
    return make_float4(nan, nan, nan, nan);
}

// Four elements as they lie in memory. They are converted to floats only where they are used, so
// that the loads of many rows are in flight together.
template <class T> struct __align__(4 * sizeof(T)) Four { T x, y, z, w; };
template <class T> __device__ __forceinline__ float4 as_float4(Four<T> four) {
    return make_float4(as_float(four.x), as_float(four.y), as_float(four.z), as_float(four.w));
}

// The group of four `q` of a row. Behind the row's end its last element is repeated, without a
// branch.
template <class T> __device__ __forceinline__ Four<T> fetch4(const T* row, int q, int C) {
#if WHOLE
    return reinterpret_cast<const Four<T>*>(row)[q];
#else
    Four<T> four = {row[4 * q], row[min(4 * q + 1, C - 1)], row[min(4 * q + 2, C - 1)],
                    row[min(4 * q + 3, C - 1)]};
    return four;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) encoder_forward(
    PARAM_T* __restrict__ out,        // (rows, C)
    const TOKEN_T* tokens,            // (rows)
    const PARAM_T* __restrict__ wte,  // (vocab, C)
    const PARAM_T* __restrict__ wpe,  // (T, C); 0: there is none
    // (3) tokens out of range: their number; then, of one of the first batch that had any, its row
    // << 32 | T, and the token
    unsigned long long* invalid,
    long long rows, int T, int C, int vocab)
{
    long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;      // a warp each
    int lane = threadIdx.x % 32;
    if (row >= rows) return;
    long long token = tokens[row];
    bool valid = token >= 0 && token < vocab;
    // The first one that is seen leaves its place.
    if (!valid && lane == 0 && atomicAdd(invalid, 1ull) == 0) {
        invalid[1] = (unsigned long long)row << 32 | (unsigned)T;
        invalid[2] = (unsigned long long)token;
    }
    const PARAM_T* from = wte + (valid ? token : 0) * C, * add = wpe + row % T * C;
    int last = (C + 3) / 4 - 1;
    for (int q = lane; q <= last; q += 32 * UNROLL) {
        Four<PARAM_T> x[UNROLL], y[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            x[u] = fetch4(from, min(q + 32 * u, last), C);
            if (wpe != 0) y[u] = fetch4(add, min(q + 32 * u, last), C);
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            float4 sum = !valid     ? nan4()
                         : wpe != 0 ? add4(as_float4(x[u]), as_float4(y[u]))
                                    : as_float4(x[u]);
            if (q + 32 * u <= last) store4(out + row * C, q + 32 * u, C, WHOLE, sum);
        }
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

// ---- v2: buckets made by the CPU ----

// Groups of four channels of a lane: 16 bytes of dout, as in llm.c.
#define LANE4 (4 / (int)sizeof(GRAD_T))

extern "C" __global__ void __launch_bounds__(256) encoder_backward_v2(
    ACC_T* dwte,                      // (vocab, C)
    const GRAD_T* dout,               // (rows, C); C is a multiple of 4 * LANE4
    // Per block: .x its first item, .y how many, .z the token, .w which 128 * LANE4 channels.
    const int4* buckets,
    const int* items,                 // rows of all buckets, each bucket's in ascending order
    int C)
{
    __shared__ float4 partial[8][LANE4][32];
    int4 bucket = buckets[blockIdx.x];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, q = (bucket.w * 32 + lane) * LANE4;
    // Threads that have returned count as arrived at the barrier.
    if (4 * q >= C || warp >= bucket.y) return;
    float4 sum[LANE4];
    for (int k = 0; k < LANE4; k++) sum[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = warp; i < bucket.y; i += 8)
        for (int k = 0; k < LANE4; k++)
            sum[k] = add4(sum[k], load4(dout + (long long)items[bucket.x + i] * C, q + k));
    for (int k = 0; k < LANE4; k++) partial[warp][k][lane] = sum[k];
    __syncthreads();
    if (warp > 0) return;
    for (int k = 0; k < LANE4; k++) {
        for (int w = 1; w < min(8, bucket.y); w++) sum[k] = add4(sum[k], partial[w][k][lane]);
        store4(dwte + (long long)bucket.z * C, q + k, C, WHOLE,
                  add4(sum[k], load4(dwte + (long long)bucket.z * C, q + k)));
    }
}

// ---- v3: segments found on the device ----

// Where the sum of a piece goes that begins at `place`: at most one first and one later piece of
// longer runs begin in 32 places.
__device__ __forceinline__ float4* partial_of(float* partials, long long place, bool first, int C) {
    return reinterpret_cast<float4*>(partials) + (2 * (place / PIECE) + first) * ((C + 3) / 4);
}

extern "C" __global__ void __launch_bounds__(THREADS) encoder_backward_v3(
    ACC_T* dwte,                      // (vocab, C)
    // (2 * ceil(n / PIECE), 4 * ceil(C / 4)) sums of pieces of longer runs; 16-byte aligned.
    float* partials,
    const GRAD_T* dout,               // (n, C)
    const uint2* order,               // (n) row and token, sorted by token
    const int* pieces,                // (n) what begins at each place
    int n, int C)
{
    int lane = threadIdx.x % 32;
    // A warp takes what begins in 32 places.
    long long first = ((long long)blockIdx.x * WARPS + threadIdx.x / 32) * PIECE;
    int kind = first + lane < n ? pieces[first + lane] : 0;
    unsigned heads = __ballot_sync(ALL, kind != 0);
    if (heads == 0) return;
    uint2 here = first + lane < n ? order[first + lane] : make_uint2(0, 0);
    // The last piece may end in the next 32 places.
    unsigned behind = first + PIECE + lane < n ? order[first + PIECE + lane].x : 0;
    int start = __ffs(heads) - 1, final = 31 - __clz(heads),
        of_final = __shfl_sync(ALL, kind, final);
    int end = final + (of_final < 0 ? PIECE : of_final > PIECE ? of_final - PIECE : of_final);
    // One bit for each of the 64 places: the last of a piece; of a piece that is a whole run; a row
    // whose token was out of range.
    typedef unsigned long long Places;
    int mine = __shfl_sync(ALL, kind, (31 - __clz(heads & ((2u << lane) - 1))) & 31);
    Places lasts = (Places)heads >> 1 | 1ull << (end - 1), later = (Places)ALL << 32;
    Places whole = lasts & (__ballot_sync(ALL, mine > 0 && mine <= PIECE) |
                            (of_final > 0 && of_final <= PIECE ? later : 0));
    Places invalid = __ballot_sync(ALL, here.x & INVALID) |
                     (Places)__ballot_sync(ALL, behind & INVALID) << 32;
    // Its groups of four channels.
    int group = blockIdx.y * QUADS * 32 + lane, last = (C + 3) / 4 - 1, q[QUADS];
    #pragma unroll
    for (int k = 0; k < QUADS; k++) q[k] = min(group + 32 * k, last);
    float4 sum[QUADS];
    #pragma unroll
    // To which any number may be added, 0 and -0 too.
    for (int k = 0; k < QUADS; k++) sum[k] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
    for (int place = start; place < end; place += UNROLL) {
        unsigned ends = (unsigned)(lasts >> place) & ((1u << UNROLL) - 1),
                 old_too = (unsigned)(whole >> place) & ends;
        Four<GRAD_T> now[UNROLL][QUADS];
        Four<ACC_T> old[UNROLL][QUADS];
        #pragma unroll
        // Behind the end the last row again, rather than a branch.
        for (int u = 0; u < UNROLL; u++) {
            int at = min(place + u, end - 1);
            unsigned row = __shfl_sync(ALL, at < 32 ? here.x : behind, at % 32) & ~INVALID;
            #pragma unroll
            for (int k = 0; k < QUADS; k++) now[u][k] = fetch4(dout + (long long)row * C, q[k], C);
        }
        if (old_too)
            #pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                long long token = __shfl_sync(ALL, here.y, min(place + u, final));
                #pragma unroll
                for (int k = 0; k < QUADS; k++)
                    if ((old_too >> u & 1) && group + 32 * k <= last)
                        old[u][k] = fetch4(dwte + token * C, q[k], C);
            }
        if (ends == 0) {                                          // all of one piece
            #pragma unroll
            for (int u = 0; u < UNROLL; u++)
                #pragma unroll
                for (int k = 0; k < QUADS; k++) sum[k] = add4(sum[k], as_float4(now[u][k]));
            continue;
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            #pragma unroll
            for (int k = 0; k < QUADS; k++) sum[k] = add4(sum[k], as_float4(now[u][k]));
            // A piece ends here: the same for all lanes.
            if (!(ends >> u & 1)) continue;
            int rows = place + u - start + 1, what = __shfl_sync(ALL, kind, start % 32);
            long long token = __shfl_sync(ALL, here.y, min(place + u, final));
            bool nonfinite = invalid >> start & ((2ull << (rows - 1)) - 1);
            #pragma unroll
            for (int k = 0; k < QUADS; k++) {
                if (nonfinite) sum[k] = nan4();
                if (group + 32 * k <= last) {
                    if (old_too >> u & 1)
                        store4(dwte + token * C, q[k], C, WHOLE,
                               add4(as_float4(old[u][k]), sum[k]));
                    else partial_of(partials, first + start, what < 0, C)[q[k]] = sum[k];
                }
                sum[k] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
            }
            start = place + u + 1;
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * COMBINE) encoder_combine_v3(
    ACC_T* dwte, float* partials, const uint2* order, const int* pieces, int n, int C)
{
    __shared__ float4 warps[COMBINE][32];
    // Of the longer run that begins in each 32 places: at most one can.
    __shared__ int first_of[SPAN], rows_of[SPAN];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < SPAN) {
        long long place = ((long long)blockIdx.x * SPAN + warp) * PIECE + lane;
        int kind = place < n ? pieces[place] : 0, head = __ffs(__ballot_sync(ALL, kind < 0)) - 1;
        if (lane == 0 && head < 0) rows_of[warp] = 0;
        if (lane == head) { first_of[warp] = (int)place; rows_of[warp] = -kind; }
    }
    __syncthreads();
    // Four channels for a lane.
    int group = blockIdx.y * 32 + lane, last = (C + 3) / 4 - 1, q = min(group, last);
    for (int s = 0; s < SPAN; s++) {
        int rows = rows_of[s], count = (rows + PIECE - 1) / PIECE;
        if (rows == 0) continue;
        long long first = first_of[s], token = order[first].y;
        float4 sum;
        if (warp < count) {
            sum = partial_of(partials, first + (long long)warp * PIECE, warp == 0, C)[q];
            #pragma unroll 8
            for (int p = warp + COMBINE; p < count; p += COMBINE)
                sum = add4(sum, partial_of(partials, first + (long long)p * PIECE, false, C)[q]);
            warps[warp][lane] = sum;
        }
        __syncthreads();
        if (warp == 0 && group <= last) {
            for (int w = 1; w < min(COMBINE, count); w++) sum = add4(sum, warps[w][lane]);
            store4(dwte + token * C, q, C, WHOLE,
                   add4(as_float4(fetch4(dwte + token * C, q, C)), sum));
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) encoder_wpe(
    ACC_T* dwpe,                      // (T, C)
    const GRAD_T* dout,               // (B, T, C)
    int B, int T, int C)
{
    int groups = (C + 3) / 4;
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (long long)T * groups) return;
    long long t = i / groups;
    int q = (int)(i % groups);
    float4 sum = as_float4(fetch4(dout + t * C, q, C));
    #pragma unroll 8
    for (int b = 1; b < B; b++)
        sum = add4(sum, as_float4(fetch4(dout + ((long long)b * T + t) * C, q, C)));
    store4(dwpe + t * C, q, C, WHOLE, add4(as_float4(fetch4(dwpe + t * C, q, C)), sum));
}
