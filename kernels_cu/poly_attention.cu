// poly_attention: causal attention whose weights are a polynomial of the scores instead of their softmax, and its gradients.
//
//   s_ij = q~_i . k_j + q_i . PE[i - j]       c = 8 tanh(s / 8)       phi_ij = scale (a c^p + b) for 0 <= i - j < window, else exactly 0
//   y_i = sum over j of phi_ij v_j
//
// q~ is the query with everything of the score that is a product with the key folded in (poly_attention.py); p is odd. With dphi_ij = dy_i . v_j:
//
//   dv_j = sum_i phi_ij dy_i        ds_ij = dphi_ij scale a p c^(p-1) (1 - tanh^2(s / 8))        dk_j = sum_i ds_ij q~_i
//   dq~_i = sum_j ds_ij k_j         dq_i = sum_j ds_ij PE[i - j]         dPE[r] = sum_i ds_i,i-r q_i (over batches and heads, too)
//   and of all dphi c^p and all dphi the two sums that da, db and dscale are made of.
//
// Shapes: B batch, T time, H heads, d HEAD, the width of a head; a row of a head is contiguous, rows may lie apart (columns of one product).
// There is no maximum and no sum to divide by, so nothing but the inputs is kept for the backward, and tiles come in any order.
//
// Work, per head: the causal half of T^2 pairs times d is a unit, T^2 d / 2 multiply-adds. Forward: s, its part with PE, y: 3 units. Backward: s, PE
// and dphi again for each kernel, and dv, dk; dq~, dq; dPE: 5 + 5 + 4. At T = 2048, 16 heads of 64: 4.3 GFLOP per unit and sequence, 60 for both. The
// bytes are few: all rows once, and per 64 queries the rows of the keys before them, from L2. So tensor cores decide, then shared memory.
//
// What is hard is that PE is indexed by i - j. A tile of queries and keys needs PE of as many differences as it has diagonals, and the product
// q PE^T has rows that are shifted against those of s by one each: it is put into shared memory and read along the diagonal.
//
// The ladder:
//   torch          T x T matrices in memory: scores, the shifted q PE^T, tanh, powers, all once more for the backward.
//   *_v1           tiles of 32 x 32 pairs, fp32 multiply-adds from shared memory, 32 channels at a time. Any type, any width, any GPU.
//   *_v2           tiles of 64 x 64 pairs of bf16 on tensor cores (mma.sync m16n8k16, sm_80 and newer), sums in fp32; phi and ds are rounded to bf16 for the
//                  products that follow. The next tiles are on their way (cp.async) while these are computed.
//   poly_backward_q, poly_backward_kv and poly_backward_pe are three launches, because each sums over another index: queries, keys, diagonals. So every
//   sum is taken by one thread block in a fixed order, without atomics. dPE is summed over groups of (batch, head), then poly_finish adds up.

#ifndef DATA_T
#define DATA_T float          // q~, q, k, v, PE, y and their gradients
#endif
#ifndef HEAD
#define HEAD 64               // width of a head
#endif
#ifndef DEGREE
#define DEGREE 3
#endif
#ifndef VERSION
#define VERSION 1             // which kernels have a body: those of the other one would only cost time to compile
#endif
#define ALL 0xffffffffu

struct Rows {                 // where the rows of q~, q, k and v lie: row t of head h of sequence b at (b T + t) stride + h HEAD, in elements
    int q_tilde, q, k, v;
};

struct Scale { float weight, offset, slope; };        // scale a, scale b, scale a p

__device__ __forceinline__ Scale scale_of(const float* coefficients) {
    float a = coefficients[0], b = coefficients[1], scale = coefficients[2];
    Scale found = {scale * a, scale * b, scale * a * DEGREE};
    return found;
}

// Of one score: c^p, and its derivative over p, c^(p-1) (1 - tanh^2).
struct Power { float power, rise; };

__device__ __forceinline__ Power power_of(float s) {
#if VERSION == 1
    float e = expf(-0.25f * fabsf(s)), one = 1.0f + e, t = -expm1f(-0.25f * fabsf(s)) / one, flat = 4.0f * e / (one * one);
#else
    // e and the quotient to 2 units of the last place: t is off by 2e-7 at most, and 1 - t^2 by 5e-7 of itself.
    float e = __expf(-0.25f * fabsf(s)), over = __fdividef(1.0f, 1.0f + e), t = (1.0f - e) * over, flat = 4.0f * e * over * over;
#endif
    float c = copysignf(8.0f * t, s), square = c * c, even = 1.0f;
    #pragma unroll
    for (int k = 1; k < DEGREE; k += 2) even *= square;
    Power found = {even * c, even * flat};
    return found;
}

// Sums of all threads, in a fixed order: a tree over each warp, then over the warps. `warps`: shared memory.
template <int count> __device__ __forceinline__ void write_sums(float* to, float (&sums)[2], float (*warps)[2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        for (int far = 16; far > 0; far /= 2) sums[i] += __shfl_down_sync(ALL, sums[i], far);
        if (lane == 0) warps[warp][i] = sums[i];
    }
    __syncthreads();
    if (threadIdx.x < 2) {
        float sum = 0.0f;
        for (int w = 0; w < count; w++) sum += warps[w][threadIdx.x];
        to[threadIdx.x] = sum;
    }
}

// ---- v1: fp32, 32 x 32 pairs ----

#define TILE 32
#define PARTS ((HEAD + 31) / 32)              // of 32 channels; the last one's missing channels are zeros
#define WARPS 8
#define MINE (TILE / WARPS)                   // rows of a tile that a warp takes

#if VERSION == 1
struct Shared {                               // 32 channels of the rows that a tile needs; one float behind each row, against bank conflicts
    float q_tilde[TILE][33], q[TILE][33], dy[TILE][33];
    float k[2 * TILE][33], v[2 * TILE][33], pe[2 * TILE][33];
    float weight[TILE][33];                   // phi or ds of the tile
};

// Channels `part` of `count` rows from row `first`; rows outside of 0 .. rows - 1 are zeros.
__device__ __forceinline__ void fetch(float (*to)[33], const DATA_T* from, long long stride, int first, int count, int rows, int part) {
    for (int i = threadIdx.x; i < count * 32; i += 32 * WARPS) {
        int row = first + i / 32, c = 32 * part + i % 32;
        to[i / 32][i % 32] = row >= 0 && row < rows && c < HEAD ? as_float(from[row * stride + c]) : 0.0f;
    }
}

struct Head {                                 // the rows of one head of one sequence
    const DATA_T* q_tilde, * q, * k, * v, * dy, * pe;
    Rows stride;
    int T, window, wide;                      // wide: H * HEAD, from one row of y to the next
    long long out;                            // where this head's first row of y is
};

__device__ __forceinline__ Head head_of(int which, const DATA_T* q_tilde, const DATA_T* q, const DATA_T* k, const DATA_T* v, const DATA_T* dy,
                                        const DATA_T* pe, Rows stride, int T, int H, int window) {
    long long b = which / H, h = which % H, row = b * T;
    long long out = row * H * HEAD + h * HEAD;
    Head head = {q_tilde + row * stride.q_tilde + h * HEAD, q + row * stride.q + h * HEAD, k + row * stride.k + h * HEAD, v + row * stride.v + h * HEAD,
                 dy + out, pe, stride, T, window, H * HEAD, out};
    return head;
}

// Scores, and dphi where `back`, of queries i0 .. and keys x0 .. (or, where `by_diagonal`, differences x0 ..): a lane has one of these, a warp MINE
// queries. What is 0 because it is masked is made so by `valid`.
template <bool by_diagonal, bool back> __device__ __forceinline__ void scores(Shared& m, const Head& x, int i0, int x0, float (&s)[MINE], float (&dphi)[MINE],
                                                                             bool (&valid)[MINE]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int key = by_diagonal ? i0 - x0 - (TILE - 1) : x0, keys = by_diagonal ? 2 * TILE - 1 : TILE;
    int diagonal = by_diagonal ? x0 : i0 - x0 - (TILE - 1), diagonals = by_diagonal ? TILE : 2 * TILE - 1;
    #pragma unroll
    for (int r = 0; r < MINE; r++) {
        int i = i0 + warp * MINE + r, far = by_diagonal ? x0 + lane : i - x0 - lane;
        valid[r] = i < x.T && far >= 0 && far <= i && far < x.window;
        s[r] = dphi[r] = 0.0f;
    }
    for (int part = 0; part < PARTS; part++) {
        __syncthreads();
        fetch(m.q_tilde, x.q_tilde, x.stride.q_tilde, i0, TILE, x.T, part);
        fetch(m.q, x.q, x.stride.q, i0, TILE, x.T, part);
        fetch(m.k, x.k, x.stride.k, key, keys, x.T, part);
        fetch(m.pe, x.pe, HEAD, diagonal, diagonals, x.T, part);
        if (back) {
            fetch(m.dy, x.dy, x.wide, i0, TILE, x.T, part);
            fetch(m.v, x.v, x.stride.v, key, keys, x.T, part);
        }
        __syncthreads();
        #pragma unroll
        for (int r = 0; r < MINE; r++) {
            int i = warp * MINE + r, shifted = i - lane + TILE - 1, at = by_diagonal ? shifted : lane, far = by_diagonal ? lane : shifted;
            float sum = s[r], other = dphi[r];
            #pragma unroll 8
            for (int c = 0; c < 32; c++) {
                sum += m.q_tilde[i][c] * m.k[at][c] + m.q[i][c] * m.pe[far][c];
                if (back) other += m.dy[i][c] * m.v[at][c];
            }
            s[r] = sum;
            dphi[r] = other;
        }
    }
}

// sums[r][part] += weight[row][x] * from[x], for the warp's rows, or its columns of weight.
template <bool columns> __device__ __forceinline__ void add_rows(float (&sums)[MINE][PARTS], const Shared& m, const float (*from)[33], int part) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll 8
    for (int x = 0; x < TILE; x++) {
        float value = from[x][lane];
        #pragma unroll
        for (int r = 0; r < MINE; r++) sums[r][part] += m.weight[columns ? x : warp * MINE + r][columns ? warp * MINE + r : x] * value;
    }
}

__device__ __forceinline__ void write_rows(DATA_T* to, const float (&sums)[MINE][PARTS], long long stride, int first, int rows) {
    #pragma unroll
    for (int r = 0; r < MINE; r++) {
        int row = first + threadIdx.x / 32 * MINE + r;
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
            int c = 32 * part + threadIdx.x % 32;
            if (row < rows && c < HEAD) store(to + row * stride + c, sums[r][part]);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(256, 1) poly_forward_v1(
    DATA_T* y,                                // (B, T, H, d)
    const DATA_T* q_tilde, const DATA_T* q, const DATA_T* k, const DATA_T* v,      // (B, T, H, d), rows apart
    const DATA_T* pe,                         // (at least T, d)
    const float* coefficients,                // a, b, scale
    int T, int H, int window, Rows stride)
{
#if VERSION == 1
    __shared__ Shared m;
    int tiles = (T + TILE - 1) / TILE, heads = gridDim.x / tiles, i0 = (tiles - 1 - blockIdx.x / heads) * TILE;      // the longest first
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Head x = head_of(blockIdx.x % heads, q_tilde, q, k, v, q, pe, stride, T, H, window);
    Scale scale = scale_of(coefficients);
    float sums[MINE][PARTS] = {}, s[MINE], unused[MINE];
    bool valid[MINE];
    for (int j0 = max(0, i0 - window + 1) / TILE * TILE; j0 <= i0; j0 += TILE) {
        scores<false, false>(m, x, i0, j0, s, unused, valid);
        #pragma unroll
        for (int r = 0; r < MINE; r++) m.weight[warp * MINE + r][lane] = valid[r] ? scale.weight * power_of(s[r]).power + scale.offset : 0.0f;
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
            __syncthreads();
            fetch(m.v, x.v, stride.v, j0, TILE, T, part);
            __syncthreads();
            add_rows<false>(sums, m, m.v, part);
        }
    }
    write_rows(y + x.out, sums, x.wide, i0, T);
#endif
}

extern "C" __global__ void __launch_bounds__(256, 1) poly_backward_q_v1(
    DATA_T* dq_tilde, DATA_T* dq,             // (B, T, H, d)
    float* partial,                           // (blocks, 2) sums of dphi c^p and of dphi
    const DATA_T* dy, const DATA_T* q_tilde, const DATA_T* q, const DATA_T* k, const DATA_T* v, const DATA_T* pe, const float* coefficients,
    int T, int H, int window, Rows stride)
{
#if VERSION == 1
    __shared__ Shared m;
    __shared__ float warps[WARPS][2];
    int tiles = (T + TILE - 1) / TILE, heads = gridDim.x / tiles, i0 = (tiles - 1 - blockIdx.x / heads) * TILE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Head x = head_of(blockIdx.x % heads, q_tilde, q, k, v, dy, pe, stride, T, H, window);
    Scale scale = scale_of(coefficients);
    float by_k[MINE][PARTS] = {}, by_pe[MINE][PARTS] = {}, s[MINE], dphi[MINE], totals[2] = {};
    bool valid[MINE];
    for (int j0 = max(0, i0 - window + 1) / TILE * TILE; j0 <= i0; j0 += TILE) {
        scores<false, true>(m, x, i0, j0, s, dphi, valid);
        #pragma unroll
        for (int r = 0; r < MINE; r++) {
            Power at = power_of(s[r]);
            m.weight[warp * MINE + r][lane] = valid[r] ? dphi[r] * scale.slope * at.rise : 0.0f;
            totals[0] += valid[r] ? dphi[r] * at.power : 0.0f;
            totals[1] += valid[r] ? dphi[r] : 0.0f;
        }
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
            __syncthreads();
            fetch(m.k, x.k, stride.k, j0, TILE, T, part);
            fetch(m.pe, x.pe, HEAD, i0 - j0 - (TILE - 1), 2 * TILE - 1, T, part);
            __syncthreads();
            add_rows<false>(by_k, m, m.k, part);
            for (int j = 0; j < TILE; j++)
                #pragma unroll
                for (int r = 0; r < MINE; r++) by_pe[r][part] += m.weight[warp * MINE + r][j] * m.pe[warp * MINE + r - j + TILE - 1][lane];
        }
    }
    write_rows(dq_tilde + x.out, by_k, x.wide, i0, T);
    write_rows(dq + x.out, by_pe, x.wide, i0, T);
    write_sums<WARPS>(partial + 2 * (long long)blockIdx.x, totals, warps);
#endif
}

extern "C" __global__ void __launch_bounds__(256, 1) poly_backward_kv_v1(
    DATA_T* dk, DATA_T* dv,                   // (B, T, H, d)
    const DATA_T* dy, const DATA_T* q_tilde, const DATA_T* q, const DATA_T* k, const DATA_T* v, const DATA_T* pe, const float* coefficients,
    int T, int H, int window, Rows stride)
{
#if VERSION == 1
    __shared__ Shared m;
    int tiles = (T + TILE - 1) / TILE, heads = gridDim.x / tiles, j0 = blockIdx.x / heads * TILE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Head x = head_of(blockIdx.x % heads, q_tilde, q, k, v, dy, pe, stride, T, H, window);
    Scale scale = scale_of(coefficients);
    float of_k[MINE][PARTS] = {}, of_v[MINE][PARTS] = {}, s[MINE], dphi[MINE];
    bool valid[MINE];
    for (int i0 = j0; i0 < T && i0 - j0 - (TILE - 1) < window; i0 += TILE) {
        scores<false, true>(m, x, i0, j0, s, dphi, valid);
        for (int pass = 0; pass < 2; pass++) {            // phi with dy, then ds with q~: one after the other in the same memory
            __syncthreads();
            #pragma unroll
            for (int r = 0; r < MINE; r++) {
                Power at = power_of(s[r]);
                m.weight[warp * MINE + r][lane] = !valid[r] ? 0.0f : pass == 0 ? scale.weight * at.power + scale.offset : dphi[r] * scale.slope * at.rise;
            }
            #pragma unroll
            for (int part = 0; part < PARTS; part++) {
                __syncthreads();
                fetch(m.dy, pass == 0 ? x.dy : x.q_tilde, pass == 0 ? x.wide : stride.q_tilde, i0, TILE, T, part);
                __syncthreads();
                if (pass == 0) add_rows<true>(of_v, m, m.dy, part);
                else add_rows<true>(of_k, m, m.dy, part);
            }
        }
    }
    write_rows(dk + x.out, of_k, x.wide, j0, T);
    write_rows(dv + x.out, of_v, x.wide, j0, T);
#endif
}

extern "C" __global__ void __launch_bounds__(256, 1) poly_backward_pe_v1(
    float* partial,                           // (groups, blocks.x * 32, d)
    const DATA_T* dy, const DATA_T* q_tilde, const DATA_T* q, const DATA_T* k, const DATA_T* v, const DATA_T* pe, const float* coefficients,
    int T, int H, int heads, int window, Rows stride)     // heads: B * H
{
#if VERSION == 1
    __shared__ Shared m;
    int r0 = blockIdx.x * TILE, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Scale scale = scale_of(coefficients);
    float of_pe[MINE][PARTS] = {}, s[MINE], dphi[MINE];
    bool valid[MINE];
    for (int which = blockIdx.y; which < heads; which += gridDim.y) {
        Head x = head_of(which, q_tilde, q, k, v, dy, pe, stride, T, H, window);
        for (int i0 = r0; i0 < T; i0 += TILE) {
            scores<true, true>(m, x, i0, r0, s, dphi, valid);
            #pragma unroll
            for (int r = 0; r < MINE; r++) m.weight[warp * MINE + r][lane] = valid[r] ? dphi[r] * scale.slope * power_of(s[r]).rise : 0.0f;
            #pragma unroll
            for (int part = 0; part < PARTS; part++) {
                __syncthreads();
                fetch(m.q, x.q, stride.q, i0, TILE, T, part);
                __syncthreads();
                add_rows<true>(of_pe, m, m.q, part);
            }
        }
    }
    float* to = partial + ((long long)blockIdx.y * gridDim.x * TILE + r0) * HEAD;
    for (int r = 0; r < MINE; r++)
        #pragma unroll
        for (int part = 0; part < PARTS; part++)
            if (32 * part + lane < HEAD) to[(long long)(warp * MINE + r) * HEAD + 32 * part + lane] = of_pe[r][part];
#endif
}

// ---- from the sums of parts to the gradients ----

extern "C" __global__ void __launch_bounds__(256) poly_finish_pe(
    DATA_T* dpe,                              // (positions, d)
    const float* partial,                     // (groups, rows, d)
    int positions, int rows, int groups)
{
    long long i = (long long)blockIdx.x * 256 + threadIdx.x, apart = (long long)rows * HEAD;
    if (i >= (long long)positions * HEAD) return;
    float sum = 0.0f;
    if (i < apart)
        for (int g = 0; g < groups; g++) sum += partial[g * apart + i];
    store(dpe + i, sum);
}

extern "C" __global__ void __launch_bounds__(256) poly_finish(
    float* dcoefficients,                     // da, db, dscale
    const float* partial,                     // (count, 2)
    const float* coefficients, int count)
{
    __shared__ double warps[8];
    double total[2];                          // in thread 0
    for (int s = 0; s < 2; s++) {
        double sum = 0.0;
        for (int i = threadIdx.x; i < count; i += 256) sum += partial[2 * (long long)i + s];
        total[s] = block_joined(sum, warps);
        __syncthreads();
    }
    if (threadIdx.x > 0) return;
    double a = coefficients[0], b = coefficients[1], scale = coefficients[2];
    dcoefficients[0] = (float)(scale * total[0]);
    dcoefficients[1] = (float)(scale * total[1]);
    dcoefficients[2] = (float)(a * total[0] + b * total[1]);
}
