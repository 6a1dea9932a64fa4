// lora: the gradients of LoRA's factors (Hu et al., 2021), for several layers in one launch.
//
//   dA += s B^T dy^T x        (rank, in)   of a layer y = x W^T + s (x A^T) B^T
//   dB += s dy^T (x A^T)      (out, rank)
//
// With du = s dy B and u = x A^T both are products of a wide and a thin matrix over the tokens:
//
//   C[c, r] += alpha * sum over t of wide[t, c] thin[t, r]
//
// dA is x and du, stored transposed; dB is dy and u. Products and sums are fp32, in a fixed order.
//
// Floor: two adapted layers of llama-350m have four such products, 1024 columns wide, of rank 16.
// 4096 tokens of bf16 are 25 MB of x and dy, 7.6 us at 3.3 TB/s (H100), and 268 M multiply-adds,
// 8.7 us on 132 SMs with 128 lanes each at 1.83 GHz; v2 takes 18.8 us. cuBLAS needs a launch for
// each product, and splits each sum among thread blocks, so that a second kernel adds the parts: 8
// launches, 28.4 us. With 1024 tokens the floor is 2.2 us, v2 takes 7.2 us, and cuBLAS, with 4
// launches, 17.0 us (H100, in a CUDA graph).
//
// The ladder:
//   lora_gradients_v1   One thread, one element of C. 1024 x 16 threads each read all tokens, and
//                       each multiply-add reads two numbers.
//   lora_gradients_v2   One thread, COLUMNS columns and all ranks of every STEP-th token, in
//                       registers: with rank 16 a multiply-add reads 24 / 128 numbers. A thread
//                       block owns TILE columns and all tokens, so no block waits for another one,
//                       and no sum depends on the GPU. 4 x 1024 columns are 128 blocks.
// Both take several products in one launch. Their addresses are passed by value with the launch, so
// nothing is uploaded.

#include "groups.cuh"         // DATA_T: wide and thin

#ifndef MAX_PRODUCTS
#define MAX_PRODUCTS 8
#endif
#ifndef RANKS
#define RANKS 16              // ranks there are registers for, 8 or 16; a product may have fewer
#endif
#define THREADS 256
#define TILE 32               // columns of a thread block
#define COLUMNS 8             // of a thread: 16 bytes of bf16, 32 of fp32
#define GROUPS (COLUMNS / WIDE)
#define LANES (TILE / COLUMNS)         // lanes that have one token
#define STEP (THREADS / LANES)         // tokens that a block has in work
// Steps whose loads are in flight while the steps before are computed: 16 KB for each block, about
// what an H100 has to have in flight on each SM to read at its full rate.
#define STEPS (8 / (int)sizeof(DATA_T))
#define PIECE (STEPS * STEP)           // tokens whose thin rows are in shared memory
#define QUADS (PIECE * RANKS / 4 / THREADS)
// A row of a warp's sums. With 4 floats more than it needs, the reads of a warp that go down a
// column meet twice in a bank, not 16 times.
#define PITCH (TILE + 4)
#define WARPS (THREADS / 32)

struct Product {
    const DATA_T* wide;       // (tokens, width)
    const DATA_T* thin;       // (tokens, rank)
    float* acc;               // (width, rank); transposed: (rank, width)
    long long wide_stride;    // elements from a row to the next one
    long long thin_stride;
    int width, rank;
    int first_tile;           // thread block that has its first columns
    int transposed;
    int overwrite;            // acc is written, and not read
    float alpha;
};
struct Products { Product of[MAX_PRODUCTS]; };

__device__ __forceinline__ void add(const Product& p, int column, int rank, float sum) {
    float* to = p.acc + (p.transposed ? (long long)rank * p.width + column
                                      : (long long)column * p.rank + rank);
    *to = p.overwrite ? __fmul_rn(p.alpha, sum) : fmaf(p.alpha, sum, *to);
}

// ---- one thread per element ----

extern "C" __global__ void __launch_bounds__(256) lora_gradients_v1(Products products, int tokens)
{
    Product p = products.of[blockIdx.y];
    int i = blockIdx.x * 256 + threadIdx.x;
    // Neighbouring threads have neighbouring columns.
    int rank = i / p.width, column = i % p.width;
    if (rank >= p.rank) return;
    float sum = 0.0f;
    for (long long t = 0; t < tokens; t++)
        sum = fmaf(as_float(p.wide[t * p.wide_stride + column]),
                   as_float(p.thin[t * p.thin_stride + rank]), sum);
    add(p, column, rank, sum);
}

// ---- columns times ranks in registers ----

// Four elements as they lie in memory: what is in flight takes as few registers as it can.
union Quad { unsigned words[sizeof(DATA_T)]; DATA_T at[4]; };

__device__ __forceinline__ void load_words(unsigned (&to)[2], const void* from) {
    uint2 two = *reinterpret_cast<const uint2*>(from);
    to[0] = two.x, to[1] = two.y;
}
__device__ __forceinline__ void load_words(unsigned (&to)[4], const void* from) {
    uint4 four = *reinterpret_cast<const uint4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// A thread's quads of the thin rows of a piece: four ranks of every STEP_OF_THIN-th token.
#define STEP_OF_THIN (THREADS * 4 / RANKS)
// ranks: how many of the four there are. whole: rows are made of aligned quads.
__device__ __forceinline__ void load_thin(Quad (&to)[QUADS], const DATA_T* from, long long step,
                                          int tokens, int ranks, bool whole) {
    if (whole) {
        #pragma unroll
        for (int k = 0; k < QUADS; k++) {
            to[k] = Quad{};
            if (k * STEP_OF_THIN < tokens) load_words(to[k].words, from + k * step);
        }
    } else {
        #pragma unroll
        for (int k = 0; k < QUADS; k++) {
            to[k] = Quad{};
            #pragma unroll
            for (int r = 0; r < 4; r++)
                if (k * STEP_OF_THIN < tokens && r < ranks) to[k].at[r] = from[k * step + r];
        }
    }
}

// A thread's columns of the wide rows of a piece: `groups` groups of every STEP-th token.
__device__ __forceinline__ void load_wide(Group (&to)[STEPS][GROUPS], const DATA_T* from,
                                          long long step, int tokens, int groups) {
    #pragma unroll
    for (int s = 0; s < STEPS; s++, from += step)
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            to[s][g].all = make_uint4(0, 0, 0, 0);
            if (s * STEP < tokens && g < groups)
                to[s][g].all = reinterpret_cast<const uint4*>(from)[g];
        }
}

// sum += x r^T over the tokens of a piece.
__device__ __forceinline__ void multiply(float (&sum)[RANKS * COLUMNS],
                                         const Group (&wide)[STEPS][GROUPS], const float4* row) {
    #pragma unroll
    for (int s = 0; s < STEPS; s++) {
        float4 x[COLUMNS / 4];
        #pragma unroll
        for (int h = 0; h < COLUMNS / 4; h++)
            x[h] = load4(wide[s][4 * h / WIDE].at, 4 * h % WIDE / 4);
        #pragma unroll
        for (int q = 0; q < RANKS / 4; q++) {
            float4 four = row[s * STEP * (RANKS / 4) + q];
            const float r[4] = {four.x, four.y, four.z, four.w};
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int h = 0; h < COLUMNS / 4; h++) {
                    float* to = sum + (4 * q + i) * COLUMNS + 4 * h;
                    to[0] = fmaf(x[h].x, r[i], to[0]);
                    to[1] = fmaf(x[h].y, r[i], to[1]);
                    to[2] = fmaf(x[h].z, r[i], to[2]);
                    to[3] = fmaf(x[h].w, r[i], to[3]);
                }
        }
    }
}

// Of the lanes that have the same columns, each keeps half of the sums and gives the other half.
template <int KEPT>
__device__ __forceinline__ void exchange(float (&sum)[RANKS * COLUMNS], int other) {
    bool upper = threadIdx.x & other;
    #pragma unroll
    for (int i = 0; i < KEPT; i++) {
        float low = sum[i], high = sum[i + KEPT];
        sum[i] = (upper ? high : low) +
                 __shfl_xor_sync(0xffffffffu, upper ? low : high, other);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) lora_gradients_v2(
    Products products,        // wide rows are made of aligned groups of 16 bytes
    int count, int tokens)
{
    // Thin rows of two pieces; at the end the sums of each warp.
    __shared__ float4 shared[2 * PIECE * RANKS > WARPS * RANKS * PITCH
                             ? 2 * PIECE * RANKS / 4 : WARPS * RANKS * PITCH / 4];
    int k = 0;
    while (k + 1 < count && products.of[k + 1].first_tile <= blockIdx.x) k++;
    Product p = products.of[k];
    int tile = (blockIdx.x - p.first_tile) * TILE, lane = threadIdx.x % 32,
        warp = threadIdx.x / 32;

    // What a thread loads: groups of its columns, of token `own` of each step; and quads.
    int column = lane % LANES * COLUMNS, own = threadIdx.x / LANES,
        groups = (p.width - tile - column) / WIDE;
    const DATA_T* wide_from = p.wide + own * p.wide_stride + tile + column;
    long long wide_step = STEP * p.wide_stride;
    int rank = threadIdx.x % (RANKS / 4) * 4, thin_own = threadIdx.x / (RANKS / 4);
    const DATA_T* thin_from = p.thin + thin_own * p.thin_stride + rank;
    long long thin_step = STEP_OF_THIN * p.thin_stride;
    bool whole = p.rank % 4 == 0 && p.thin_stride % 4 == 0 && aligned4(p.thin, sizeof(DATA_T));
    // Tokens from the first own one on.
    int wide_tokens = tokens - own, thin_tokens = rank < p.rank ? tokens - thin_own : 0;

    float sum[RANKS * COLUMNS] = {};
    Quad thin[QUADS];
    Group wide[STEPS][GROUPS];
    load_thin(thin, thin_from, thin_step, thin_tokens, p.rank - rank, whole);
    load_wide(wide, wide_from, wide_step, wide_tokens, groups);
    // Multiplies the piece that is loaded, and loads the next one. The pieces take turns in
    // registers, and in shared memory, where other threads may still read the piece before.
    auto piece = [&](Group (&now)[STEPS][GROUPS], Group (&next)[STEPS][GROUPS], float4* rows) {
        #pragma unroll
        for (int q = 0; q < QUADS; q++) rows[q * THREADS + threadIdx.x] = load4(thin[q].at, 0);
        // Loads stay in front of the barrier, and so ahead of all that follows it.
        thin_from += QUADS * thin_step;
        thin_tokens -= PIECE;
        load_thin(thin, thin_from, thin_step, thin_tokens, p.rank - rank, whole);
        wide_from += STEPS * wide_step;
        wide_tokens -= PIECE;
        load_wide(next, wide_from, wide_step, wide_tokens, groups);
        __syncthreads();
        multiply(sum, now, rows + own * (RANKS / 4));
    };
    Group next[STEPS][GROUPS];
    #pragma unroll 1
    for (int start = 0; start < tokens; start += 2 * PIECE) {
        piece(wide, next, shared);
        if (start + PIECE >= tokens) break;
        piece(next, wide, shared + PIECE * RANKS / 4);
    }

    // Of RANKS * COLUMNS sums a lane keeps RANKS: those from lane / LANES * RANKS on.
    exchange<RANKS * COLUMNS / 2>(sum, 16);
    exchange<RANKS * COLUMNS / 4>(sum, 8);
    exchange<RANKS * COLUMNS / 8>(sum, 4);
    __syncthreads();          // `shared` is used again
    #pragma unroll
    for (int i = 0; i < RANKS; i += 4) {
        int first = lane / LANES * RANKS + i,
            place = (warp * RANKS + first / COLUMNS) * PITCH + column + first % COLUMNS;
        shared[place / 4] = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
    }
    __syncthreads();
    // The sums of the warps, in their order.
    const float* of_warps = reinterpret_cast<const float*>(shared);
    for (int i = threadIdx.x; i < RANKS * TILE; i += THREADS) {
        // Neighbouring threads write neighbouring elements.
        int r = p.transposed ? i / TILE : i % RANKS, c = p.transposed ? i % TILE : i / RANKS;
        if (r >= p.rank || tile + c >= p.width) continue;
        float total = 0.0f;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) total += of_warps[(w * RANKS + r) * PITCH + c];
        add(p, tile + c, r, total);
    }
}
