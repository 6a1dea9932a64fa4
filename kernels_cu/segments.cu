// segments: which rows of a batch belong to which token, found on the device: a stable sort, and
// pieces of at most 32 rows.
//
//   order[i]  = (position, token) of all positions, sorted by token; equal tokens stay in the order
//               of their positions (stable)
//   pieces[i] = what begins at place i of this order. The rows of one token are a run, cut from its
//               own start into pieces of 32 rows:
//                 0         nothing begins here
//                 1 .. 32   a whole run of so many rows
//                 below 0   the first piece of a longer run, of -pieces[i] rows in all
//                 33 .. 64  a later piece of it, of pieces[i] - 32 rows
//
// So the order in which a token's rows are added depends on these rows alone, not on the other
// tokens of the batch.
//
// Floor: a position is 8 bytes of token and 8 of order, nothing beside the rows of dout, 1,536
// bytes each with 768 bf16 channels. What counts is the number of launches, and of steps that wait
// for one another.
//
// The sort is a radix sort from the lowest digit of BITS bits upwards, two passes for vocabularies
// from 512 to below 2^18. Each pass keeps the order of equal digits, so the last one leaves
// everything sorted. A pass is two launches:
//   segments_count    Each thread block counts the digits of its tile of positions.
//   segments_scatter  Moves a tile's positions to their places: behind all smaller digits, behind
//                     the same digit in earlier tiles, and behind it in this tile. Each block adds
//                     up the counts of all blocks itself, which saves a third launch (and would
//                     cost more than it beyond some 10 M positions).
// Then one launch:
//   segments_pieces   One thread per place finds the start and the end of its run by binary search.
//
// llm.c does this on the CPU (buckets, encoder.cu), with copies that no graph can capture.

#ifndef TOKEN_T
#define TOKEN_T long long
#endif
#ifndef BITS
#define BITS 8                // of a digit: 8 or 9
#endif
#ifndef KEYS
#define KEYS 4                // positions per thread: a tile has THREADS * KEYS
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef PIECE
#define PIECE 32
#endif
#define DIGITS (1 << BITS)
#define WARPS (THREADS / 32)
#define ALL 0xffffffffu
#define INVALID 0x80000000u   // in a position: its token was out of range

// The pair to sort, for position i. A token out of range counts as token 0, marked; one that is
// left out is sorted last, as token `vocab`.
__device__ __forceinline__ uint2 pair_at(const TOKEN_T* tokens, const uint2* pairs, long long i,
                                         int vocab, int left_out) {
    if (pairs != 0) return pairs[i];
    long long token = tokens[i];
    if (token < 0 || token >= vocab) return make_uint2((unsigned)i | INVALID, 0);
    return make_uint2((unsigned)i, token == left_out ? vocab : (unsigned)token);
}

extern "C" __global__ void __launch_bounds__(THREADS) segments_count(
    int* counts,              // (blocks, DIGITS)
    const TOKEN_T* tokens,    // (n) read by the first pass
    const uint2* pairs,       // (n) read by later passes: the result of the pass before; else 0
    int n,                    // below 2^31
    int vocab,
    int left_out,             // token whose rows count for nothing (padding_idx); -1: none
    int shift)                // of the digit, in bits
{
    __shared__ int count[DIGITS];
    for (int d = threadIdx.x; d < DIGITS; d += THREADS) count[d] = 0;
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < KEYS; k++) {
        long long i = ((long long)blockIdx.x * KEYS + k) * THREADS + threadIdx.x;
        int digit = -1;
        if (i < n)
            digit = (pair_at(tokens, pairs, i, vocab, left_out).y >> shift) & (DIGITS - 1);
        // One addition for all lanes with this digit.
        unsigned same = __match_any_sync(ALL, digit);
        if (digit >= 0 && threadIdx.x % 32 == __ffs(same) - 1)
            atomicAdd(&count[digit], __popc(same));
    }
    __syncthreads();
    for (int d = threadIdx.x; d < DIGITS; d += THREADS)
        counts[(long long)blockIdx.x * DIGITS + d] = count[d];
}

extern "C" __global__ void __launch_bounds__(THREADS) segments_scatter(
    uint2* sorted,            // (n)
    const int* counts,        // (blocks, DIGITS) of segments_count
    const TOKEN_T* tokens, const uint2* pairs, int n, int vocab, int left_out, int shift)
{
    // Of each digit, in each warp; then: in the warps before.
    __shared__ int seen[WARPS][DIGITS];
    // Where this tile's first position with each digit goes.
    __shared__ int start[DIGITS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int d = threadIdx.x; d < WARPS * DIGITS; d += THREADS) (&seen[0][0])[d] = 0;
    for (int d = threadIdx.x; d < DIGITS; d += THREADS) {
        int before = 0, all = 0;
        #pragma unroll 8
        for (int b = 0; b < gridDim.x; b++) {
            int count = counts[(long long)b * DIGITS + d];
            all += count;
            if (b < blockIdx.x) before += count;
        }
        start[d] = all;
        seen[0][d] = before;                  // kept there until the scan is done
    }
    __syncthreads();
    // From counts to the place where each digit begins.
    if (warp == 0) {
        int mine[DIGITS / 32], sum = 0;
        #pragma unroll
        for (int k = 0; k < DIGITS / 32; k++) {
            mine[k] = start[lane * (DIGITS / 32) + k];
            sum += mine[k];
        }
        int below = sum;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(ALL, below, step);
            if (lane >= step) below += other;
        }
        below -= sum;
        #pragma unroll
        for (int k = 0; k < DIGITS / 32; k++) {
            start[lane * (DIGITS / 32) + k] = below;
            below += mine[k];
        }
    }
    __syncthreads();
    for (int d = threadIdx.x; d < DIGITS; d += THREADS) { start[d] += seen[0][d]; seen[0][d] = 0; }
    __syncthreads();

    // Each warp walks over its own part of the tile in order, 32 positions at a time.
    uint2 pair[KEYS];
    int rank[KEYS];
    #pragma unroll
    for (int k = 0; k < KEYS; k++) {
        long long i = (((long long)blockIdx.x * WARPS + warp) * KEYS + k) * 32 + lane;
        pair[k] = i < n ? pair_at(tokens, pairs, i, vocab, left_out) : make_uint2(0, 0);
        int digit = i < n ? (int)(pair[k].y >> shift) & (DIGITS - 1) : -1;
        unsigned same = __match_any_sync(ALL, digit);
        rank[k] = digit >= 0 ? seen[warp][digit] + __popc(same & ((1u << lane) - 1)) : -1;
        __syncwarp();
        if (digit >= 0 && lane == __ffs(same) - 1) seen[warp][digit] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int d = threadIdx.x; d < DIGITS; d += THREADS) {
        int before = start[d];
        #pragma unroll
        for (int w = 0; w < WARPS; w++) {
            int count = seen[w][d];
            seen[w][d] = before;
            before += count;
        }
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < KEYS; k++)
        if (rank[k] >= 0)
            sorted[seen[warp][(pair[k].y >> shift) & (DIGITS - 1)] + rank[k]] = pair[k];
}

// The first place in [low, high) whose token is not below `token`; high when there is none.
__device__ __forceinline__ int place_of(const uint2* order, int low, int high, unsigned token) {
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (order[middle].y < token) low = middle + 1; else high = middle;
    }
    return low;
}

extern "C" __global__ void segments_pieces(
    int* pieces,              // (n)
    const uint2* order,       // (n) sorted
    int n, int vocab)
{
    long long place = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (place >= n) return;
    int i = (int)place, kind = 0;
    unsigned token = order[i].y;
    if (token < vocab) {                                          // else its rows are left out
        bool first = i == 0 || order[i - 1].y != token;
        int start = first ? i : place_of(order, 0, i, token);
        if ((i - start) % PIECE == 0) {
            bool more = n - i > PIECE && order[i + PIECE].y == token;
            if (first && more) kind = -(place_of(order, i + PIECE, n, token + 1) - i);
            else
                kind =
                    (first ? 0 : PIECE) +
                    (more ? PIECE
                          : place_of(order, i, min((long long)i + PIECE, (long long)n), token + 1) -
                                i);
        }
    }
    pieces[i] = kind;
}
