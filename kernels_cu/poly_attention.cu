// poly_attention: causal attention whose weights are a polynomial of the scores instead of their
// softmax, and its gradients.
//
//   s_ij = q~_i . k_j + q_i . PE[i - j]
//   phi_ij = scale (a c^p + b) for 0 <= i - j < window, else exactly 0; c = 8 tanh(s_ij / 8)
//   y_i = sum over j of phi_ij v_j
//
// q~ is the query with every part of the score folded in that is a product with the key
// (nn/poly_attention.py); p is odd. With dphi_ij = dy_i . v_j:
//
//   dv_j = sum_i phi_ij dy_i
//   ds_ij = dphi_ij scale a p c^(p-1) (1 - tanh^2(s_ij / 8))
//   dk_j = sum_i ds_ij q~_i
//   dq~_i = sum_j ds_ij k_j
//   dq_i = sum_j ds_ij PE[i - j]
//   dPE[r] = sum_i ds_i,i-r q_i, also over batches and heads
//   da, db and dscale are made of two sums over all pairs, of dphi c^p and of dphi
//
// Shapes: B batch, T time, H heads, d = HEAD the width of a head. A row of a head is contiguous;
// rows have a stride (columns of one matrix). There is no maximum and no sum to divide by, so the
// backward needs nothing but the inputs, and tiles can be taken in any order.
//
// Work: the unit is the causal half of all pairs of a head times d, T^2 d / 2 multiply-adds. The
// forward takes 3 units: s, its part with PE, y. In the backward each part computes s, its part
// with PE and dphi again: dq~ and dq 5, dk and dv 5, dPE 4. At T = 2048 and 16 heads of 64 a unit
// is 4.3 GFLOP per sequence; forward and backward are 73 GFLOP. v2 computes 83 (3.25, then 5.5, 6
// and 4.5 units: a tile has more diagonals, and needs more rows of PE, than it has queries). Few
// bytes are moved: every row once, and for 64 queries the rows of all keys before them, from L2.
// Memory is O(T): inputs, outputs, and partial sums of dPE.
//
// The difficulty is that PE is indexed by i - j. A tile of queries and keys needs PE of as many
// differences as it has diagonals, and each row of the product q PE^T is shifted by one more column
// against the same row of s. The shift is undone between the two products, never in memory as T x
// T.
//
// The ladder:
//   torch             T x T matrices in memory: scores, q PE^T and its shifted copy, tanh, powers;
//                     and all of them once more in the backward.
//   *_v1              Tiles of 32 x 32 pairs, fp32 multiply-adds from shared memory, 32 channels at
//                     a time. The shift: each lane reads its own row of PE from shared memory, with
//                     an odd row length against bank conflicts. Any dtype, any width, any GPU.
//   *_v2              Tiles of 64 x 64 pairs of bf16 on tensor cores (mma.sync m16n8k16, from sm_80
//                     on), widths that are multiples of 16 up to 128, sums in fp32; phi and ds are
//                     rounded to bf16 for the products that follow. The shift is done by shuffles.
//                     The next tiles are loaded (cp.async) while these are computed. Per tile a
//                     warp does 104, 176, 192 and 144 mma (d = 64; forward, backward_q, _kv, _pe)
//                     and reads shared memory 52, 88, 100 and 88 times, 512 bytes each. At 128
//                     bytes per clock for four warps shared memory is the limit, not the tensor
//                     cores.
//   poly_forward_v3   (poly_forward.cu) Tensor cores that read shared memory themselves: Hopper's
//                     wgmma, heads of 64.
//   poly_backward_v3  (poly_backward.cu) The same for the backward.
//
// The backward has three parts, because each sums over another index: keys (backward_q), queries
// (backward_kv), and along a diagonal (backward_pe). In v1 they are three launches, in v2 and v3
// one. Every sum is taken by one thread block in a fixed order, without atomics; that of dPE for
// groups of (batch, head), which poly_finish adds up in a last launch.

#include "poly_attention.cuh"

#ifndef DATA_T
#define DATA_T float          // q~, q, k, v, PE, y and their gradients
#endif
#ifndef VERSION
// Which kernels have a body: compiling the others too would only take time.
#define VERSION 1
#endif

struct Scale { float weight, offset, slope; };        // scale a, scale b, 4 scale a p

__device__ __forceinline__ Scale scale_of(const float* coefficients) {
    float a = coefficients[0], b = coefficients[1], scale = coefficients[2];
    Scale result = {scale * a, scale * b, 4.0f * scale * a * DEGREE};
    return result;
}

// c^p of one score s, and its derivative over 4 p, c^(p-1) (1 - tanh^2) / 4. With e = exp(-|s| /
// 4), tanh(|s| / 8) = (1 - e) / (1 + e) = 2 / (1 + e) - 1, and 1 - tanh^2 = 4 e / (1 + e)^2, where
// nothing is subtracted and no digits cancel.
__device__ __forceinline__ Power power_of(float s) {
    float e = expf(-0.25f * fabsf(s)), over = 1.0f / (1.0f + e),
          c = -8.0f * expm1f(-0.25f * fabsf(s)) * over;
    float square = c * c, even = 1.0f;
    #pragma unroll
    for (int k = 1; k < DEGREE; k += 2) even *= square;
    Power result = {copysignf(even * c, s), even * (e * over * over)};
    return result;
}

// The block's sums of all threads' values, in a fixed order: a tree over each warp, then over the
// warps. warps: shared memory.
template <int count, typename S>
__device__ __forceinline__ void write_sums(float* to, S (&sums)[2], S (*warps)[2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        for (int lane_delta = 16; lane_delta > 0; lane_delta /= 2)
            sums[i] += __shfl_down_sync(ALL, sums[i], lane_delta);
        if (lane == 0) warps[warp][i] = sums[i];
    }
    __syncthreads();
    if (threadIdx.x < 2) {
        S sum = 0;
        for (int w = 0; w < count; w++) sum += warps[w][threadIdx.x];
        to[threadIdx.x] = (float)sum;
    }
}

struct Head {                                 // the rows of one head of one sequence
    const DATA_T* q_tilde, * q, * k, * v, * dy, * pe;
    Rows stride;
    int T, window, wide;                      // wide: H * HEAD, from one row of y to the next
    long long out, grad;                      // offset of the head's first row: of y; of dq, dk, dv
};

__device__ __forceinline__ Head head_of(int which, const DATA_T* q_tilde, const DATA_T* q,
                                        const DATA_T* k, const DATA_T* v, const DATA_T* dy,
                                        const DATA_T* pe, Rows stride, int T, int H, int window) {
    long long b = which / H, h = which % H, row = b * T;
    long long out = row * H * HEAD + h * HEAD;
    Head head = {q_tilde + row * stride.q_tilde + h * HEAD,
                 q + row * stride.q + h * HEAD,
                 k + row * stride.k + h * HEAD,
                 v + row * stride.v + h * HEAD,
                 dy + out,
                 pe,
                 stride,
                 T,
                 window,
                 H * HEAD,
                 out,
                 row * stride.grad + h * HEAD};
    return head;
}

// What row i of y is multiplied by; gate: (B, T, H), or null.
__device__ __forceinline__ float factor_of(const float* gate, const Head& x, int i) {
    return gate && i < x.T ? gate[(x.out + (long long)i * x.wide) / HEAD] : 1.0f;
}

// ---- v1: fp32, 32 x 32 pairs ----

#define TILE 32
#define PARTS ((HEAD + 31) / 32)              // of 32 channels; the last one is padded with zeros
#define WARPS 8
#define MINE (TILE / WARPS)                   // rows of a tile that a warp takes

#if VERSION == 1
// 32 channels of the rows that a tile needs; one float behind each row, against bank conflicts.
struct Shared {
    float q_tilde[TILE][33], q[TILE][33], dy[TILE][33];
    float k[2 * TILE][33], v[2 * TILE][33], pe[2 * TILE][33];
    float weight[TILE][33];                   // phi or ds of the tile
};

// Channels `part` of `count` rows from row `first`; rows outside of 0 .. rows - 1 are zeros.
__device__ __forceinline__ void fetch(float (*to)[33], const DATA_T* from, long long stride,
                                      int first, int count, int rows, int part) {
    for (int i = threadIdx.x; i < count * 32; i += 32 * WARPS) {
        int row = first + i / 32, c = 32 * part + i % 32;
        to[i / 32][i % 32] = row >= 0 && row < rows && c < HEAD ? as_float(from[row * stride + c])
                                                                : 0.0f;
    }
}

// Scores s, and with `back` dphi, of queries i0 .. and keys x0 .. (with `by_diagonal`: differences
// x0 ..). A lane has one key or difference, a warp MINE queries. valid: the pair is not masked.
template <bool by_diagonal, bool back>
__device__ __forceinline__ void scores(Shared& m, const Head& x, int i0, int x0, float (&s)[MINE],
                                       float (&dphi)[MINE], bool (&valid)[MINE]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int key = by_diagonal ? i0 - x0 - (TILE - 1) : x0, keys = by_diagonal ? 2 * TILE - 1 : TILE;
    int diagonal = by_diagonal ? x0 : i0 - x0 - (TILE - 1),
        diagonals = by_diagonal ? TILE : 2 * TILE - 1;
    #pragma unroll
    for (int r = 0; r < MINE; r++) {
        int i = i0 + warp * MINE + r, difference = by_diagonal ? x0 + lane : i - x0 - lane;
        valid[r] = i < x.T && difference >= 0 && difference <= i && difference < x.window;
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
            int i = warp * MINE + r, shifted = i - lane + TILE - 1;
            int key_row = by_diagonal ? shifted : lane, pe_row = by_diagonal ? lane : shifted;
            float sum = s[r], other = dphi[r];
            #pragma unroll 8
            for (int c = 0; c < 32; c++) {
                sum += m.q_tilde[i][c] * m.k[key_row][c] + m.q[i][c] * m.pe[pe_row][c];
                if (back) other += m.dy[i][c] * m.v[key_row][c];
            }
            s[r] = sum;
            dphi[r] = other;
        }
    }
}

// sums[r][part] += weight[row][x] * from[x], for the warp's rows, or its columns of weight.
template <bool columns>
__device__ __forceinline__ void add_rows(float (&sums)[MINE][PARTS], const Shared& m,
                                         const float (*from)[33], int part) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll 8
    for (int x = 0; x < TILE; x++) {
        float value = from[x][lane];
        #pragma unroll
        for (int r = 0; r < MINE; r++)
            sums[r][part] +=
                m.weight[columns ? x : warp * MINE + r][columns ? warp * MINE + r : x] * value;
    }
}

__device__ __forceinline__ void write_rows(DATA_T* to, const float (&sums)[MINE][PARTS],
                                           long long stride, int first, int rows) {
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
    // (B, T, H, d), rows with a stride.
    const DATA_T* q_tilde, const DATA_T* q, const DATA_T* k, const DATA_T* v,
    const DATA_T* pe,                         // (at least T, d)
    const float* coefficients,                // a, b, scale
    const float* gate,                        // (B, T, H) what y is multiplied by; null: nothing
    int T, int H, int window, Rows stride)
{
#if VERSION == 1
    __shared__ Shared m;
    // The tiles with the longest loops run first.
    int tiles = (T + TILE - 1) / TILE, heads = gridDim.x / tiles,
        i0 = (tiles - 1 - blockIdx.x / heads) * TILE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Head x = head_of(blockIdx.x % heads, q_tilde, q, k, v, q, pe, stride, T, H, window);
    Scale scale = scale_of(coefficients);
    float sums[MINE][PARTS] = {}, s[MINE], unused[MINE];
    bool valid[MINE];
    for (int j0 = max(0, i0 - window + 1) / TILE * TILE; j0 <= i0; j0 += TILE) {
        scores<false, false>(m, x, i0, j0, s, unused, valid);
        #pragma unroll
        for (int r = 0; r < MINE; r++)
            m.weight[warp * MINE + r][lane] =
                valid[r] ? scale.weight * power_of(s[r]).power + scale.offset : 0.0f;
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
            __syncthreads();
            fetch(m.v, x.v, stride.v, j0, TILE, T, part);
            __syncthreads();
            add_rows<false>(sums, m, m.v, part);
        }
    }
    #pragma unroll
    for (int r = 0; r < MINE; r++) {
        float factor = factor_of(gate, x, i0 + warp * MINE + r);
        #pragma unroll
        for (int part = 0; part < PARTS; part++) sums[r][part] *= factor;
    }
    write_rows(y + x.out, sums, x.wide, i0, T);
#endif
}

extern "C" __global__ void __launch_bounds__(256, 1) poly_backward_q_v1(
    DATA_T* dq_tilde, DATA_T* dq,             // (B, T, H, d); the rows of dq have a stride
    float* partial,                           // (blocks, 2) sums of dphi c^p and of dphi
    const DATA_T* dy, const DATA_T* q_tilde, const DATA_T* q, const DATA_T* k, const DATA_T* v,
    const DATA_T* pe, const float* coefficients,
    int T, int H, int window, Rows stride)
{
#if VERSION == 1
    __shared__ Shared m;
    __shared__ double warps[WARPS][2];
    int tiles = (T + TILE - 1) / TILE, heads = gridDim.x / tiles,
        i0 = (tiles - 1 - blockIdx.x / heads) * TILE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Head x = head_of(blockIdx.x % heads, q_tilde, q, k, v, dy, pe, stride, T, H, window);
    Scale scale = scale_of(coefficients);
    float by_k[MINE][PARTS] = {}, by_pe[MINE][PARTS] = {}, s[MINE], dphi[MINE];
    double totals[2] = {};                    // of millions of terms that nearly cancel
    bool valid[MINE];
    for (int j0 = max(0, i0 - window + 1) / TILE * TILE; j0 <= i0; j0 += TILE) {
        scores<false, true>(m, x, i0, j0, s, dphi, valid);
        #pragma unroll
        for (int r = 0; r < MINE; r++) {
            Power score = power_of(s[r]);
            m.weight[warp * MINE + r][lane] = valid[r] ? dphi[r] * scale.slope * score.slope : 0.0f;
            totals[0] += valid[r] ? dphi[r] * score.power : 0.0f;
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
                for (int r = 0; r < MINE; r++)
                    by_pe[r][part] += m.weight[warp * MINE + r][j] *
                                      m.pe[warp * MINE + r - j + TILE - 1][lane];
        }
    }
    write_rows(dq_tilde + x.out, by_k, x.wide, i0, T);
    write_rows(dq + x.grad, by_pe, stride.grad, i0, T);
    write_sums<WARPS>(partial + 2 * (long long)blockIdx.x, totals, warps);
#endif
}

extern "C" __global__ void __launch_bounds__(256, 1) poly_backward_kv_v1(
    DATA_T* dk, DATA_T* dv,                   // (B, T, H, d), rows with a stride
    const DATA_T* dy, const DATA_T* q_tilde, const DATA_T* q, const DATA_T* k, const DATA_T* v,
    const DATA_T* pe, const float* coefficients,
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
        // Phi with dy, then ds with q~: one after the other in the same memory.
        for (int pass = 0; pass < 2; pass++) {
            __syncthreads();
            #pragma unroll
            for (int r = 0; r < MINE; r++) {
                Power score = power_of(s[r]);
                m.weight[warp * MINE + r][lane] = !valid[r] ? 0.0f
                                                  : pass == 0
                                                      ? scale.weight * score.power + scale.offset
                                                      : dphi[r] * scale.slope * score.slope;
            }
            #pragma unroll
            for (int part = 0; part < PARTS; part++) {
                __syncthreads();
                fetch(m.dy, pass == 0 ? x.dy : x.q_tilde, pass == 0 ? x.wide : stride.q_tilde, i0,
                      TILE, T, part);
                __syncthreads();
                if (pass == 0) add_rows<true>(of_v, m, m.dy, part);
                else add_rows<true>(of_k, m, m.dy, part);
            }
        }
    }
    write_rows(dk + x.grad, of_k, stride.grad, j0, T);
    write_rows(dv + x.grad, of_v, stride.grad, j0, T);
#endif
}

extern "C" __global__ void __launch_bounds__(256, 1) poly_backward_pe_v1(
    float* partial,                           // (groups, blocks.x * 32, d)
    const DATA_T* dy, const DATA_T* q_tilde, const DATA_T* q, const DATA_T* k, const DATA_T* v,
    const DATA_T* pe, const float* coefficients,
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
            for (int r = 0; r < MINE; r++)
                m.weight[warp * MINE + r][lane] =
                    valid[r] ? dphi[r] * scale.slope * power_of(s[r]).slope : 0.0f;
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
            if (32 * part + lane < HEAD)
                to[(long long)(warp * MINE + r) * HEAD + 32 * part + lane] = of_pe[r][part];
#endif
}

// ---- v2: bf16 on tensor cores, 64 x 64 pairs ----
// A block is four warps. In the forward and in backward_q a warp has 16 of the block's 64 queries,
// in backward_kv 16 keys, in backward_pe 16 queries and then 16 differences. A product of a warp is
// made of m16n8k16: a 16 x 16 factor a in four registers of each lane, b, of which two 16 x 8 are
// read at a time, and sums c. Lane 4 g + t has rows g and g + 8 of a and c, columns g of b: c[0],
// c[1] at row g, columns 2t and 2t + 1, c[2], c[3] at row g + 8. Two c side by side, rounded, are
// an a again: so phi and ds go from one product into the next without leaving the registers.
//
// Along the diagonal: of 16 queries and 64 keys, query r and key j have difference r - j + 63 above
// the smallest one; there are 79, and 80 rows of PE are multiplied. What belongs to one pair lies
// in the same four lanes in both products, and at a distance that depends on the lane alone: column
// j of row g is column (7 + g - j) mod 8 of one of two neighbouring 16 x 8. So a shuffle and two
// selections per element do what would take a round through shared memory (skewed). The same goes
// back from pairs to differences (ds, for dq = ds PE), with zeros beside the band.

#ifndef STAGES
#define STAGES 2              // 2: the next tiles are loaded while these are computed
#endif
#define SIDE 64               // rows of a tile
// Elements from one row of a tile to the next: 16 bytes of padding, against bank conflicts.
#define LD (HEAD + 8)
#define STEPS (HEAD / 16)
#define NARROW 72             // the same of ds in backward_pe
#define TENSOR_THREADS 128
#define FORWARD_BLOCKS 3      // on an SM: bounds the registers
#define BACKWARD_BLOCKS 2
#define FORWARD_UNROLL 4      // parts of a tile that are one body
#define Q_UNROLL 2
#define KV_UNROLL 2
#define PE_UNROLL 4

#if VERSION == 2

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define TENSOR_CORES 1
#define PIECE __device__ __forceinline__
#else
// The same products through shared memory, to run anywhere, not to be fast.
#define TENSOR_CORES 0
#define PIECE __device__ __noinline__
#endif

typedef float Sums[2][4];     // 16 x 16 of a product

// Where this thread begins to load 64 rows from row `first` on, 16 bytes at a time. The rows are
// shared by all threads, or (side 16, 32 threads) each warp loads its own 16 rows.
#define ACROSS (HEAD / 8)
template <int side = SIDE, int threads = TENSOR_THREADS>
__device__ __forceinline__ const bf16* thread_source(const bf16* from, int stride, int first) {
    int r = threadIdx.x / threads * side + threadIdx.x % threads / ACROSS;
    return from + (long long)(first + r) * stride + threadIdx.x % threads % ACROSS * 8;
}
// Starts to copy these rows into shared memory; they are complete after wait_for_tiles().
// checked: rows outside of 0 .. rows - 1 are zeros; if not checked there must be none such.
template <int side = SIDE, int threads = TENSOR_THREADS>
__device__ __forceinline__ void load_rows(bf16* to, const bf16* source, int stride,
                                          bool checked = false, int first = 0, int rows = 0) {
    const int down = threads / ACROSS;                                   // rows at a time
    int mine = threadIdx.x % threads / ACROSS, r = threadIdx.x / threads * side + mine;
    to += r * LD + threadIdx.x % threads % ACROSS * 8;
    #pragma unroll
    for (int k = 0; k < side; k += down, source += down * stride) {
        if ((threads % ACROSS || side % down) && (mine >= down || mine + k >= side)) continue;
        bool valid = !checked || (unsigned)(first + r + k) < (unsigned)rows;
#if TENSOR_CORES
        // With 0 bytes nothing is read, so the address may be invalid.
        unsigned at = (unsigned)__cvta_generic_to_shared(to + k * LD);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(at), "l"(source), "r"(valid ? 16 : 0) : "memory");
#else
        *reinterpret_cast<uint4*>(to + k * LD) = valid ? *reinterpret_cast<const uint4*>(source)
                                                       : make_uint4(0, 0, 0, 0);
#endif
    }
}
// The same, checked, given the address of row 0.
__device__ __forceinline__ void load_tile(bf16* to, const bf16* from, int stride, int first,
                                          int rows) {
    load_rows(to, thread_source(from, stride, first), stride, true, first, rows);
}
// Closes a group: the copies since the last call.
__device__ __forceinline__ void cp_async_commit_group() {
#if TENSOR_CORES
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for the copies of all threads but the last `pending` groups.
template <int pending> __device__ __forceinline__ void wait_for_tiles() {
#if TENSOR_CORES
    asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory");
#endif
    __syncthreads();
}

// Reads a 16 x 16 part of a tile as four 8 x 8 matrices.
//   by_columns  the second matrix is to the right of the first (else below it)
//   transposed  a lane gets two rows of one column instead of two columns of one row
template <bool by_columns, bool transposed, int ld>
PIECE void ldmatrix(unsigned (&x)[4], const bf16* part) {
    int lane = threadIdx.x % 32;
#if TENSOR_CORES
    int m = lane / 8, row = 8 * (by_columns ? m / 2 : m % 2) + lane % 8,
        column = 8 * (by_columns ? m % 2 : m / 2);
    unsigned at = (unsigned)__cvta_generic_to_shared(part + row * ld + column);
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
#else
    for (int m = 0; m < 4; m++) {
        const bf16* corner = part + 8 * (by_columns ? m / 2 : m % 2) * ld +
                             8 * (by_columns ? m % 2 : m / 2);
        int g = lane / 4, t = lane % 4;
        x[m] = transposed
                   ? corner[2 * t * ld + g].bits | (unsigned)corner[(2 * t + 1) * ld + g].bits << 16
                   : *reinterpret_cast<const unsigned*>(corner + g * ld + 2 * t);
    }
#endif
}

// c (16 x 8) += a (16 x 16) b (16 x 8)
PIECE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if TENSOR_CORES
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    __shared__ unsigned exchange[TENSOR_THREADS][6];
    unsigned (*warp)[6] = exchange + threadIdx.x / 32 * 32;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) warp[lane][i] = a[i];
    warp[lane][4] = b0;
    warp[lane][5] = b1;
    __syncwarp();
    for (int k = 0; k < 8; k++)                         // two of the 16 at a time
        for (int i = 0; i < 4; i++) {
            unsigned x = warp[4 * g + k % 4][k / 4 * 2 + i / 2],
                     y = warp[4 * (2 * t + i % 2) + k % 4][4 + k / 4];
            c[i] += low_as_float(x) * low_as_float(y) + high_as_float(x) * high_as_float(y);
        }
    __syncwarp();
#endif
}

// 16 x 16 sums, rounded, as a left factor.
__device__ __forceinline__ void as_factor(unsigned (&a)[4], const Sums& c) {
    a[0] = both_as_bf16(c[0][0], c[0][1]);
    a[1] = both_as_bf16(c[0][2], c[0][3]);
    a[2] = both_as_bf16(c[1][0], c[1][1]);
    a[3] = both_as_bf16(c[1][2], c[1][3]);
}

// 16 rows of a tile as a left factor. kept: in registers; else read from shared memory each time.
template <bool kept> struct Left {
    unsigned a[kept ? STEPS : 1][4];
    const bf16* rows;
    __device__ __forceinline__ void begin(const bf16* from) {
        rows = from;
        if (kept)
            #pragma unroll
            for (int k = 0; k < STEPS; k++)
                ldmatrix<false, false, LD>(a[kept ? k : 0], from + 16 * k);
    }
    // Multiplies what is kept by 1/8: exact, but for numbers below 2^-123.
    __device__ __forceinline__ void scale_by_eighth() {
        if (kept)
            #pragma unroll
            for (int k = 0; k < STEPS; k++)
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    a[kept ? k : 0][i] = both_as_bf16(0.125f * low_as_float(a[kept ? k : 0][i]),
                                                      0.125f * high_as_float(a[kept ? k : 0][i]));
    }
    __device__ __forceinline__ void at(unsigned (&x)[4], int k) const {
        if (!kept) ldmatrix<false, false, LD>(x, rows + 16 * k);
        else
            #pragma unroll
            for (int i = 0; i < 4; i++) x[i] = a[kept ? k : 0][i];
    }
};

__device__ __forceinline__ void clear(Sums& c) {
    #pragma unroll
    for (int i = 0; i < 8; i++) c[i / 4][i % 4] = 0.0f;
}
__device__ __forceinline__ void copy(Sums& to, const Sums& c) {
    #pragma unroll
    for (int i = 0; i < 8; i++) to[i / 4][i % 4] = c[i / 4][i % 4];
}

// c (16 x 16) += left (16 x d) times 16 rows of a tile, transposed.
template <bool kept>
__device__ __forceinline__ void add_scores(Sums& c, const Left<kept>& left, const bf16* rows) {
    #pragma unroll (kept ? STEPS : 2)
    for (int k = 0; k < STEPS; k++) {
        unsigned a[4], b[4];
        left.at(a, k);
        ldmatrix<true, false, LD>(b, rows + 16 * k);
        mma(c[0], a, b[0], b[1]);
        mma(c[1], a, b[2], b[3]);
    }
}

// The same for two left factors; the 16 rows are read once.
template <bool kept>
__device__ __forceinline__ void add_scores(Sums& c, Sums& other, const Left<kept>& left,
                                           const Left<kept>& below, const bf16* rows) {
    #pragma unroll (kept ? STEPS : 2)
    for (int k = 0; k < STEPS; k++) {
        unsigned a[4], b[4];
        ldmatrix<true, false, LD>(b, rows + 16 * k);
        left.at(a, k);
        mma(c[0], a, b[0], b[1]);
        mma(c[1], a, b[2], b[3]);
        below.at(a, k);
        mma(other[0], a, b[0], b[1]);
        mma(other[1], a, b[2], b[3]);
    }
}

// sums (16 x d) += a (16 x 16) times 16 rows of a tile.
__device__ __forceinline__ void add_product(float (&sums)[2 * STEPS][4], const unsigned (&a)[4],
                                            const bf16* rows) {
    #pragma unroll
    for (int n = 0; n < STEPS; n++) {
        unsigned b[4];
        ldmatrix<false, true, LD>(b, rows + 16 * n);
        mma(sums[2 * n], a, b[0], b[1]);
        mma(sums[2 * n + 1], a, b[2], b[3]);
    }
}

// Rows 16 which .. of the 128 rows of two tiles, one behind the other.
__device__ __forceinline__ const bf16* sixteen_rows(const bf16* first, const bf16* second,
                                                    int which) {
    return (which < 4 ? first : second - SIDE * LD) + 16 * which * LD;
}

// Tiles of PE. near: the differences 64 s - 63 ..; far: the 64 after these; free: with two stages
// the tile that is being loaded.
struct Ring {
    bf16* near, * far, * free;
    __device__ __forceinline__ Ring(bf16* from)
        : near(from), far(from + SIDE * LD), free(from + (STAGES == 2 ? 2 * SIDE * LD : 0)) {}
    __device__ __forceinline__ void turn() {
        bf16* first = near;
        near = far;
        far = free;
        free = STAGES == 2 ? first : near;
    }
    __device__ __forceinline__ const bf16* sixteen_rows(int which) const {
        return ::sixteen_rows(near, far, which);
    }
};

// From differences to pairs; rows are queries. Element j of row r of `to` is element r - j + 15 of
// the 32 that `first` and `second` hold. Exactly one lane reads from each lane (__shfl_sync), so
// the lane that gives knows whether the element lies in the lower or in the upper of two 16 x 8.
__device__ __forceinline__ void skewed(Sums& to, const Sums& first, const Sums& second) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int from = lane - t + (7 + g - 2 * t - e) % 8 / 2;
        // Which of its elements this lane gives.
        bool odd = (g + e) % 2 == 0, upper = g + (e == 0) > 2 * t + odd;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[4];
            #pragma unroll
            for (int n = 0; n < 4; n++) {
                const Sums& of = n < 2 ? first : second;
                x[n] = odd ? of[n % 2][2 * h + 1] : of[n % 2][2 * h];
            }
            #pragma unroll
            for (int i = 0; i < 2; i++)
                to[i][2 * h + e] = __shfl_sync(ALL, upper ? x[2 - i + h] : x[1 - i + h], from);
        }
    }
}

// The same for factors, and from pairs to differences: both elements of a register are fetched with
// their neighbours, then put together.
__device__ __forceinline__ void skewed(unsigned (&to)[4], const unsigned (&first)[4],
                                       const unsigned (&second)[4]) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unsigned both[2][4];
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int from = lane - t + (7 + g - 2 * t - e) % 8 / 2;
        // Which of its elements this lane gives.
        bool odd = (g + e) % 2 == 0, upper = g + (e == 0) > 2 * t + odd;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            unsigned x[4] = {first[h], first[2 + h], second[h], second[2 + h]};
            #pragma unroll
            for (int i = 0; i < 2; i++)
                both[e][2 * i + h] = __shfl_sync(ALL, upper ? x[2 - i + h] : x[1 - i + h], from);
        }
    }
    #pragma unroll
    for (int i = 0; i < 4; i++)
        to[i] = __byte_perm(both[0][i], both[1][i], g % 2 ? 0x7610 : 0x5432);
}

// From differences to pairs where keys are the rows and queries the columns: element r of row j of
// `to` is row r - j + 15 of the 32 that `first` and `second` hold.
__device__ __forceinline__ void skewed_down(Sums& to, const Sums& first, const Sums& second) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int from = 4 * ((7 + 2 * t + e - g) % 8) + t;
        bool upper = 2 * t + e > g;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            float x[4] = {first[i][e], first[i][2 + e], second[i][e], second[i][2 + e]};
            #pragma unroll
            for (int h = 0; h < 2; h++)
                to[i][2 * h + e] = __shfl_sync(ALL, upper ? x[2 + i - h] : x[1 + i - h], from);
        }
    }
}

// Writes the warp's 16 of the rows from `first` on, times `factor`, rounded.
__device__ __forceinline__ void write_tile(bf16* to, const float (&sums)[2 * STEPS][4],
                                           float factor, long long stride, int first, int rows) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = first + threadIdx.x / 32 * 16 + g;
    #pragma unroll
    for (int n = 0; n < 2 * STEPS; n++)
        #pragma unroll
        for (int i = 0; i < 2; i++)
            if (row + 8 * i < rows)
                *reinterpret_cast<unsigned*>(to + (row + 8 * i) * stride + 8 * n + 2 * t) =
                    both_as_bf16(factor * sums[n][2 * i], factor * sums[n][2 * i + 1]);
}

// Row and column of element e of 16 x 16 sums.
    #define ROW(e) (g + 8 * ((e) % 4 / 2))
    #define COLUMN(e) (8 * ((e) / 4) + 2 * t + (e) % 2)
    #define OF(c, e) c[(e) / 4][(e) % 4]

// c (16 x 16) = left (16 x d) times 16 rows of a tile, transposed. Each such product is a chain of
// its own, so that those of q~ k, q PE and dy v overlap.
template <bool kept>
__device__ __forceinline__ void scores_of(Sums& c, const Left<kept>& left, const bf16* rows) {
    clear(c);
    add_scores(c, left, rows);
}

// The same number, but the compiler does not know that: what it computes from the result is not
// kept in registers over the loops.
__device__ __forceinline__ int opaque(int x) {
#if TENSOR_CORES
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// Loads the tiles of steps s = 0, 1, .. in turn: 64 keys and values, from the diagonal to the left,
// and PE of the 64 larger differences.
struct Loads {
    const bf16* k, * v, * pe;
    int k_stride, v_stride, i0, T;
    __device__ __forceinline__ Loads(const Head& x, int i0, int T)
        : k(thread_source(x.k, x.stride.k, i0)),
          v(thread_source(x.v, x.stride.v, i0)),
          pe(thread_source(x.pe, HEAD, 1)),
          k_stride(x.stride.k),
          v_stride(x.stride.v),
          i0(i0),
          T(T) {}
    __device__ __forceinline__ void load_all(bf16* to, bf16* pe_to, int s, bool checked) {
        load_rows(to, k, k_stride, checked, i0 - s * SIDE, T);
        load_rows(to + SIDE * LD, v, v_stride, checked, i0 - s * SIDE, T);
        load_rows(pe_to, pe, HEAD, checked, (s + 1) * SIDE - 63, T);
    }
    __device__ __forceinline__ void load_step(bf16* to, bf16* pe_to, int s) {
        if (s == 0 || (s + 1) * SIDE >= T) load_all(to, pe_to, s, true);
        else load_all(to, pe_to, s, false);
        cp_async_commit_group();
        k -= opaque(SIDE * k_stride);
        v -= opaque(SIDE * v_stride);
        pe += SIDE * HEAD;
    }
};

struct Tensors {
    const bf16* dy, * q_tilde, * q, * k, * v, * pe;
    const float* coefficients;
    int T, H, window;
    Rows stride;
};
__device__ __forceinline__ Head head_of(int which, const Tensors& x) {
    return head_of(which, x.q_tilde, x.q, x.k, x.v, x.dy, x.pe, x.stride, x.T, x.H, x.window);
}
#endif

extern "C" __global__ void __launch_bounds__(TENSOR_THREADS, FORWARD_BLOCKS) poly_forward_v2(
    bf16* y,                                  // (B, T, H, d)
    // (B, T, H, d), rows with a stride; 16-byte aligned.
    const bf16* q_tilde, const bf16* q, const bf16* k, const bf16* v,
    const bf16* pe,                           // (at least T, d)
    const float* coefficients,                // a, b, scale
    const float* gate,                        // (B, T, H) what y is multiplied by; null: nothing
    int T, int H, int window, Rows stride)
{
#if VERSION == 2
    extern __shared__ __align__(16) unsigned char memory[];
    // A wide head would take too many registers; its block's own rows stay in shared memory.
    const bool kept = HEAD <= 64;
    // Tiles of k and v of each stage, then STAGES + 1 tiles of PE.
    bf16* tiles_of = reinterpret_cast<bf16*>(memory), * of_pe = tiles_of + 2 * STAGES * SIDE * LD;
    // The block's own rows: in the last stage's place.
    bf16* own = !kept ? of_pe + (STAGES + 1) * SIDE * LD : tiles_of + (STAGES - 1) * 2 * SIDE * LD;
    // The tiles with the longest loops run first.
    int tiles = (T + SIDE - 1) / SIDE, heads = gridDim.x / tiles,
        tile = tiles - 1 - blockIdx.x / heads, i0 = tile * SIDE;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Head x = head_of(blockIdx.x % heads, q_tilde, q, k, v, q, pe, stride, T, H, window);
    Scale scale = scale_of(coefficients);
    float weight = scale.weight * power_of_8(DEGREE);
    // From the diagonal to the left.
    int steps = tile - max(0, i0 - window + 1) / SIDE + 1;
    // PE of the differences 64 s - 63 .. and of the 64 after these.
    Ring ring(of_pe);
    Loads loads(x, i0, T);
    auto load_step = [&](int s, bf16* pe_to) {
        loads.load_step(tiles_of + s % STAGES * 2 * SIDE * LD, pe_to, s);
    };
    Left<kept> left_k, left_pe;
    load_tile(own, x.q_tilde, stride.q_tilde, i0, T);
    load_tile(own + SIDE * LD, x.q, stride.q, i0, T);
    cp_async_commit_group();
    load_tile(ring.near, x.pe, HEAD, -63, T);
    if (!kept || STAGES == 2) { load_step(0, ring.far); wait_for_tiles<1>(); }
    else wait_for_tiles<0>();
    left_k.begin(own + 16 * warp * LD);
    left_pe.begin(own + (SIDE + 16 * warp) * LD);
    left_k.scale_by_eighth();
    left_pe.scale_by_eighth();
    if (kept && STAGES == 1) { __syncthreads(); load_step(0, ring.far); }
    float sums[2 * STEPS][4] = {};
    // q PE^T of the 16 differences before those of the next part.
    Sums lower;
    auto part = [&](int s, int n, bool masked) {         // 16 keys, from the right to the left
        const bf16* keys = tiles_of + (s % STAGES * 2 * SIDE + 16 * (3 - n)) * LD;
        Sums upper, c;
        scores_of(upper, left_pe, ring.sixteen_rows(warp + n + 1));
        skewed(c, lower, upper);
        add_scores(c, left_k, keys);
        copy(lower, upper);
        #pragma unroll
        for (int e = 0; e < 8; e++) {
            int difference = s * SIDE + 16 * (warp + n - 3) + ROW(e) - COLUMN(e);
            float phi = weight * power_of_tanh<false>(OF(c, e), kept ? 1.0f : 0.125f).power +
                        scale.offset;
            OF(c, e) = !masked || (difference >= 0 && difference < window) ? phi : 0.0f;
        }
        unsigned a[4];
        as_factor(a, c);
        add_product(sums, a, keys + SIDE * LD);
    };
    for (int s = 0; s < steps; s++) {
        // After this barrier the tiles of the step before are no longer read.
        wait_for_tiles<0>();
        if (STAGES == 2 && s + 1 < steps) load_step(s + 1, ring.free);
        if (s == 0) scores_of(lower, left_pe, ring.sixteen_rows(3));
        // Steps with a mask have a body of their own; on the diagonal they skip what is masked.
        if (!TENSOR_CORES || s == 0 || (s + 1) * SIDE > window)
            #pragma unroll 1
            for (int n = s == 0 ? 3 - warp : 0; n < 4; n++) part(s, n, true);
        else
            #pragma unroll (kept ? FORWARD_UNROLL : 2)
            for (int n = 0; n < 4; n++) part(s, n, false);
        if (STAGES == 1 && s + 1 < steps) { __syncthreads(); load_step(s + 1, ring.free); }
        ring.turn();
    }
    int which = blockIdx.x % (gridDim.x / ((opaque(T) + SIDE - 1) / SIDE));
    x = head_of(which, q_tilde, q, k, v, q, pe, stride, T, H, window);
    float upper_rows = factor_of(gate, x, i0 + 16 * warp + g),
          lower_rows = factor_of(gate, x, i0 + 16 * warp + g + 8);
    #pragma unroll
    for (int n = 0; n < 2 * STEPS; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] *= i < 2 ? upper_rows : lower_rows;
    write_tile(y + x.out, sums, 1.0f, x.wide, i0, T);
#endif
}

#if VERSION == 2
// dq~ and dq of 64 queries of a head, number `unit`. Tiles of keys from the diagonal to the left.
__device__ __forceinline__ void backward_q(unsigned char* memory, bf16* dq_tilde, bf16* dq,
                                           float* partial, const Tensors& in, int unit, int heads) {
    const bool kept = HEAD <= 64;
    __shared__ float warps[4][2];
    int T = in.T, window = in.window;
    // Tiles of k and v of each stage, then STAGES + 1 tiles of PE.
    bf16* tiles_of = reinterpret_cast<bf16*>(memory), * of_pe = tiles_of + 2 * STAGES * SIDE * LD;
    bf16* own = !kept         ? of_pe + (STAGES + 1) * SIDE * LD
                : STAGES == 2 ? tiles_of + 2 * SIDE * LD
                              : tiles_of;
    int tiles = (T + SIDE - 1) / SIDE, tile = tiles - 1 - unit / heads, i0 = tile * SIDE;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Head x = head_of(unit % heads, in);
    int steps = tile - max(0, i0 - window + 1) / SIDE + 1;
    Ring ring(of_pe);
    ring.turn();                                         // the first place is `own`'s
    Loads loads(x, i0, T);
    auto load_step = [&](int s, bf16* pe_to) {
        loads.load_step(tiles_of + s % STAGES * 2 * SIDE * LD, pe_to, s);
    };
    Left<kept> left_k, left_pe, left_v;
    load_tile(own, x.q_tilde, x.stride.q_tilde, i0, T);
    load_tile(own + SIDE * LD, x.q, x.stride.q, i0, T);
    load_tile(own + 2 * SIDE * LD, x.dy, x.wide, i0, T);
    cp_async_commit_group();
    if (!kept || STAGES == 2) {
        load_tile(ring.near, x.pe, HEAD, -63, T);
        load_step(0, ring.far);
        wait_for_tiles<1>();
    } else wait_for_tiles<0>();
    left_k.begin(own + 16 * warp * LD);
    left_pe.begin(own + (SIDE + 16 * warp) * LD);
    left_v.begin(own + (2 * SIDE + 16 * warp) * LD);
    if (kept && STAGES == 1) {
        __syncthreads();
        load_tile(ring.near, x.pe, HEAD, -63, T);
        load_step(0, ring.far);
    }
    float by_k[2 * STEPS][4] = {}, by_pe[2 * STEPS][4] = {}, totals[2] = {};
    // q PE^T of the 16 differences before those of the next part.
    Sums lower;
    unsigned before[4] = {};                             // ds of the 16 keys of the part before
    auto part = [&](int s, int n, bool masked) {         // 16 keys, from the right to the left
        const bf16* keys = tiles_of + (s % STAGES * 2 * SIDE + 16 * (3 - n)) * LD;
        Sums upper, c, ds;
        unsigned a[4], by_difference[4];
        scores_of(upper, left_pe, ring.sixteen_rows(warp + n + 1));
        scores_of(ds, left_v, keys + SIDE * LD);
        skewed(c, lower, upper);
        add_scores(c, left_k, keys);
        copy(lower, upper);
        // Parts of totals: four short sums each, so that none waits for another.
        float some[2][4];
        #pragma unroll
        for (int e = 0; e < 8; e++) {
            int difference = s * SIDE + 16 * (warp + n - 3) + ROW(e) - COLUMN(e);
            Power score = power_of_tanh<true>(OF(c, e));
            float dphi = !masked || (difference >= 0 && difference < window) ? OF(ds, e) : 0.0f;
            some[0][e % 4] = e < 4 ? dphi * score.power : some[0][e % 4] + dphi * score.power;
            some[1][e % 4] = e < 4 ? dphi : some[1][e % 4] + dphi;
            OF(ds, e) = dphi * score.slope;
        }
        #pragma unroll
        for (int i = 0; i < 2; i++)
            totals[i] += (some[i][0] + some[i][1]) + (some[i][2] + some[i][3]);
        as_factor(a, ds);
        add_product(by_k, a, keys);
        skewed(by_difference, a, before);                // of the differences that `lower` was of
        #pragma unroll
        for (int i = 0; i < 4; i++) before[i] = a[i];
        add_product(by_pe, by_difference, ring.sixteen_rows(warp + n));
    };
    for (int s = 0; s < steps; s++) {
        wait_for_tiles<0>();
        if (STAGES == 2 && s + 1 < steps) load_step(s + 1, ring.free);
        if (s == 0) scores_of(lower, left_pe, ring.sixteen_rows(3));
        if (!TENSOR_CORES || s == 0 || (s + 1) * SIDE > window)
            #pragma unroll 1
            for (int n = s == 0 ? 3 - warp : 0; n < 4; n++) part(s, n, true);
        else
            #pragma unroll Q_UNROLL
            for (int n = 0; n < 4; n++) part(s, n, false);
        if (STAGES == 1 && s + 1 < steps) { __syncthreads(); load_step(s + 1, ring.free); }
        ring.turn();
    }
    unsigned none[4] = {}, last[4];
    skewed(last, none, before);
    add_product(by_pe, last, ring.sixteen_rows(warp));
    Scale scale = scale_of(in.coefficients);
    write_tile(dq_tilde + x.out, by_k, scale.slope * 0.25f * power_of_8(DEGREE - 1), x.wide, i0, T);
    write_tile(dq + x.grad, by_pe, scale.slope * 0.25f * power_of_8(DEGREE - 1), x.stride.grad, i0,
               T);
    totals[0] *= power_of_8(DEGREE);
    write_sums<4>(partial + 2 * (long long)unit, totals, warps);
}

// dk and dv of 64 keys of a head. Tiles of queries from the diagonal on.
__device__ __forceinline__ void backward_kv(unsigned char* memory, bf16* dk, bf16* dv,
                                            const Tensors& in, int unit, int heads) {
    const bool kept = HEAD <= 64;
    int T = in.T, window = in.window;
    // Tiles of q~, q and dy of each stage, then of PE.
    bf16* tiles_of = reinterpret_cast<bf16*>(memory), * of_pe = tiles_of + 3 * STAGES * SIDE * LD;
    bf16* own = !kept ? of_pe + (STAGES + 1) * SIDE * LD : tiles_of + (STAGES - 1) * 3 * SIDE * LD;
    int tile = unit / heads, j0 = tile * SIDE;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Head x = head_of(unit % heads, in);
    Scale scale = scale_of(in.coefficients);
    float weight = scale.weight * power_of_8(DEGREE);
    // From the diagonal tile on.
    int steps = (min(T - 1, j0 + SIDE - 2 + window) - j0) / SIDE + 1;
    Ring ring(of_pe);
    const bf16 *q_tilde_from = thread_source(x.q_tilde, x.stride.q_tilde, j0),
               *q_from = thread_source(x.q, x.stride.q, j0),
               *dy_from = thread_source(x.dy, x.wide, j0);
    const bf16* pe_from = thread_source(x.pe, HEAD, 1);
    auto load_step = [&](int s, bf16* pe_to) {               // s = 0, 1, .. in turn
        bf16* to = tiles_of + s % STAGES * 3 * SIDE * LD;
        int first = j0 + s * SIDE;
        auto all = [&](bool checked) {
            load_rows(to, q_tilde_from, x.stride.q_tilde, checked, first, T);
            load_rows(to + SIDE * LD, q_from, x.stride.q, checked, first, T);
            load_rows(to + 2 * SIDE * LD, dy_from, x.wide, checked, first, T);
            load_rows(pe_to, pe_from, HEAD, checked, (s + 1) * SIDE - 63, T);
        };
        if (first + SIDE > T || (s + 1) * SIDE >= T) all(true);
        else all(false);
        cp_async_commit_group();
        q_tilde_from += opaque(SIDE * x.stride.q_tilde);
        q_from += opaque(SIDE * x.stride.q);
        dy_from += opaque(SIDE * x.wide);
        pe_from += SIDE * HEAD;
    };
    Left<kept> left_k, left_v, lower, upper;             // lower, upper: PE of 16 differences each
    load_tile(own, x.k, x.stride.k, j0, T);
    load_tile(own + SIDE * LD, x.v, x.stride.v, j0, T);
    cp_async_commit_group();
    load_tile(ring.near, x.pe, HEAD, -63, T);
    if (!kept || STAGES == 2) { load_step(0, ring.far); wait_for_tiles<1>(); }
    else wait_for_tiles<0>();
    left_k.begin(own + 16 * warp * LD);
    left_v.begin(own + (SIDE + 16 * warp) * LD);
    if (kept && STAGES == 1) { __syncthreads(); load_step(0, ring.far); }
    float dk_sums[2 * STEPS][4] = {}, dv_sums[2 * STEPS][4] = {};
    auto part = [&](int s, int n, bool masked) {  // 16 queries; keys are the rows
        const bf16 *queries = tiles_of + (s % STAGES * 3 * SIDE + 16 * n) * LD,
                   *dys = queries + 2 * SIDE * LD;
        Sums c, dphi, first, second;
        lower = upper;
        upper.begin(ring.sixteen_rows(n - warp + 4));
        clear(first);
        clear(second);
        add_scores(first, second, lower, upper, queries + SIDE * LD);
        scores_of(dphi, left_v, dys);
        skewed_down(c, first, second);
        add_scores(c, left_k, queries);
    #pragma unroll
        for (int e = 0; e < 8; e++) {
            int difference = s * SIDE + 16 * (n - warp) + COLUMN(e) - ROW(e);
            bool valid = !masked || (difference >= 0 && difference < window);
            Power score = power_of_tanh<false>(OF(c, e));
            OF(c, e) = valid ? weight * score.power + scale.offset : 0.0f;
            OF(dphi, e) = valid ? OF(dphi, e) * score.slope : 0.0f;
        }
        unsigned a[4];
        as_factor(a, c);
        add_product(dv_sums, a, dys);
        as_factor(a, dphi);
        add_product(dk_sums, a, queries);
    };
    for (int s = 0; s < steps; s++) {
        wait_for_tiles<0>();
        if (STAGES == 2 && s + 1 < steps) load_step(s + 1, ring.free);
        if (s == 0) upper.begin(ring.sixteen_rows(3));
        if (!TENSOR_CORES || s == 0 || (s + 1) * SIDE > window)
            #pragma unroll 1
            for (int n = s == 0 ? warp : 0; n < 4; n++) part(s, n, true);
        else
            #pragma unroll (kept ? KV_UNROLL : 1)
            for (int n = 0; n < 4; n++) part(s, n, false);
        if (STAGES == 1 && s + 1 < steps) { __syncthreads(); load_step(s + 1, ring.free); }
        ring.turn();
    }
    write_tile(dk + x.grad, dk_sums, scale.slope * 0.25f * power_of_8(DEGREE - 1), x.stride.grad,
               j0, T);
    write_tile(dv + x.grad, dv_sums, 1.0f, x.stride.grad, j0, T);
}

// dPE: tiles of 64 queries and 64 differences, where 16 queries have 79 keys. s and dphi are
// computed by keys and skewed to differences; ds goes through shared memory, because the sum goes
// over the queries of all warps. With two stages the next tiles are loaded as soon as the current
// ones have arrived: k and v have three places, q has two, and each warp has its own rows of q~ and
// dy in registers by then. With one stage, and for what stays in shared memory (wide heads), they
// are loaded when the scores are done.
__device__ __forceinline__ void backward_pe(unsigned char* memory, float* partial,
                                            const Tensors& in, int diagonal, int diagonals,
                                            int group, int groups, int heads) {
    int T = in.T, window = in.window;
    const bool kept = HEAD <= 64, early = STAGES == 2, early_left = early && kept;
    bf16 *of_q_tilde = reinterpret_cast<bf16*>(memory), *of_dy = of_q_tilde + SIDE * LD,
         *of_pe = of_dy + SIDE * LD, *of_q = of_pe + SIDE * LD;
    // (64, NARROW) queries, differences.
    bf16 *of_k = of_q + 2 * SIDE * LD, *of_v = of_k + (STAGES + 1) * SIDE * LD,
         *ds = of_v + (STAGES + 1) * SIDE * LD;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4,
        r0 = diagonal * SIDE;
    float sums[2 * STEPS][4] = {};
    for (int which = group; which < heads; which += groups) {
        Head x = head_of(which, in);
        Ring keys(of_k), values(of_v);                   // i0 - r0 - 63 .., and the 64 after these
        const bf16 *k_from = thread_source(x.k, x.stride.k, 1),
                   *v_from = thread_source(x.v, x.stride.v, 1),
                   *q_from = thread_source(x.q, x.stride.q, r0);
        const bf16 *q_tilde_from = thread_source<16, 32>(x.q_tilde, x.stride.q_tilde, r0),
                   *dy_from = thread_source<16, 32>(x.dy, x.wide, r0);
        auto outside = [&](int i0) { return i0 + SIDE > T || i0 - r0 + SIDE >= T; };
        // i0 = r0, r0 + 64, .. in turn. Of the 128 keys the later 64; the others were loaded
        // before.
        auto load_step = [&](int i0, bf16* k_to, bf16* v_to) {
            auto all = [&](bool checked) {
                load_rows(k_to, k_from, x.stride.k, checked, i0 - r0 + 1, T);
                load_rows(v_to, v_from, x.stride.v, checked, i0 - r0 + 1, T);
                load_rows(of_q + i0 / SIDE % 2 * SIDE * LD, q_from, x.stride.q, checked, i0, T);
            };
            if (outside(i0)) all(true);
            else all(false);
            k_from += opaque(SIDE * x.stride.k);
            v_from += opaque(SIDE * x.stride.v);
            q_from += opaque(SIDE * x.stride.q);
        };
        auto load_left = [&](int i0) {
            auto all = [&](bool checked) {
                load_rows<16, 32>(of_q_tilde, q_tilde_from, x.stride.q_tilde, checked, i0, T);
                load_rows<16, 32>(of_dy, dy_from, x.wide, checked, i0, T);
            };
            if (outside(i0)) all(true);
            else all(false);
            q_tilde_from += opaque(SIDE * x.stride.q_tilde);
            dy_from += opaque(SIDE * x.wide);
        };
        __syncthreads();
        load_tile(of_pe, x.pe, HEAD, r0, T);
        load_tile(keys.near, x.k, x.stride.k, -63, T);
        load_tile(values.near, x.v, x.stride.v, -63, T);
        load_step(r0, keys.far, values.far);
        load_left(r0);
        cp_async_commit_group();
        for (int i0 = r0; i0 < T; i0 += SIDE) {
            const bf16* queries = of_q + i0 / SIDE % 2 * SIDE * LD;
            int next = i0 + SIDE;
            wait_for_tiles<0>();
            Left<kept> left_k, left_v, left_pe;
            left_k.begin(of_q_tilde + 16 * warp * LD);
            left_v.begin(of_dy + 16 * warp * LD);
            left_pe.begin(queries + 16 * warp * LD);
            if (early && next < T) {
                __syncwarp();
                load_step(next, keys.free, values.free);
                if (early_left) load_left(next);
            }
            Sums upper, upper_dphi;                      // of 16 keys each
            scores_of(upper, left_k, keys.sixteen_rows(warp + 4));
            scores_of(upper_dphi, left_v, values.sixteen_rows(warp + 4));
            #pragma unroll PE_UNROLL
            for (int part = 0; part < 4; part++) {       // 16 differences
                Sums c, dphi, lower, lower_dphi;
                scores_of(lower, left_k, keys.sixteen_rows(warp + 3 - part));
                scores_of(lower_dphi, left_v, values.sixteen_rows(warp + 3 - part));
                skewed(c, lower, upper);
                add_scores(c, left_pe, of_pe + 16 * part * LD);
                skewed(dphi, lower_dphi, upper_dphi);
                copy(upper, lower);
                copy(upper_dphi, lower_dphi);
                #pragma unroll
                // Needs no mask: where there is no query or no key, dy or v is 0, and so is dphi.
                for (int e = 0; e < 8; e++)
                    OF(c, e) = OF(dphi, e) * power_of_tanh<false>(OF(c, e)).slope;
                #pragma unroll
                for (int e = 0; e < 8; e += 2)
                    *reinterpret_cast<unsigned*>(ds + (16 * warp + ROW(e)) * NARROW + 16 * part +
                                                 COLUMN(e)) = both_as_bf16(OF(c, e), OF(c, e + 1));
            }
            __syncthreads();
            if (next < T) {
                if (!early) load_step(next, keys.free, values.free);
                if (!early_left) load_left(next);
                cp_async_commit_group();
            }
            keys.turn();
            values.turn();
            #pragma unroll PE_UNROLL
            for (int part = 0; part < 4; part++) {       // 16 queries
                unsigned a[4];
                ldmatrix<true, true, NARROW>(a, ds + 16 * part * NARROW + 16 * warp);
                add_product(sums, a, queries + 16 * part * LD);
            }
        }
    }
    float slope = scale_of(in.coefficients).slope * 0.25f * power_of_8(DEGREE - 1);
    float* to = partial + ((long long)group * diagonals * SIDE + r0 + 16 * warp) * HEAD;
    #pragma unroll
    for (int n = 0; n < 2 * STEPS; n++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            bool seen = r0 + 16 * warp + g + 8 * i < window;
            *reinterpret_cast<float2*>(to + (g + 8 * i) * HEAD + 8 * n + 2 * t) = make_float2(
                seen ? slope * sums[n][2 * i] : 0.0f, seen ? slope * sums[n][2 * i + 1] : 0.0f);
        }
}
#endif

// The whole backward in one launch: the blocks of dPE, which are longest where a group has several
// heads, then those of dq and of dk and dv, alternating. Each kind begins with its longest, so that
// short blocks fill the end.
extern "C" __global__ void __launch_bounds__(TENSOR_THREADS, BACKWARD_BLOCKS) poly_backward_v2(
    // (B, T, H, d); the rows of dq, dk and dv have a stride.
    bf16* dq_tilde, bf16* dq, bf16* dk, bf16* dv,
    float* sums,                              // (B H tiles, 2) sums of dphi c^p and of dphi
    float* partial,                           // (groups, diagonals * 64, d)
    const bf16* dy, const bf16* q_tilde, const bf16* q, const bf16* k, const bf16* v,
    const bf16* pe, const float* coefficients,
    int T, int H, int window, int heads, int groups, Rows stride)       // heads: B * H
{
#if VERSION == 2
    extern __shared__ __align__(16) unsigned char memory[];
    Tensors in = {dy, q_tilde, q, k, v, pe, coefficients, T, H, window, stride};
    int diagonals = (window + SIDE - 1) / SIDE, unit = blockIdx.x - diagonals * groups;
    if (unit < 0)
        backward_pe(memory, partial, in, blockIdx.x / groups, diagonals, blockIdx.x % groups,
                    groups, heads);
    else if (unit % 2 == 0) backward_q(memory, dq_tilde, dq, sums, in, unit / 2, heads);
    else backward_kv(memory, dk, dv, in, unit / 2, heads);
#endif
}

// ---- from partial sums to the gradients ----

extern "C" __global__ void __launch_bounds__(256) poly_finish(
    DATA_T* dpe,                              // (positions, d)
    float* dcoefficients,                     // da, db, dscale: by block 0
    const float* partial,                     // (groups, rows, d)
    const float* sums,                        // (count, 2)
    const float* coefficients, int positions, int rows, int groups, int count)
{
    if (blockIdx.x > 0) {
        long long i = (long long)(blockIdx.x - 1) * 256 + threadIdx.x,
                  stride = (long long)rows * HEAD;
        if (i >= (long long)positions * HEAD) return;
        float sum = 0.0f;
        if (i < stride)
            #pragma unroll 8
            for (int g = 0; g < groups; g++) sum += partial[g * stride + i];
        store(dpe + i, sum);
        return;
    }
    __shared__ double warps[8];
    double total[2];                          // in thread 0
    for (int s = 0; s < 2; s++) {
        double sum = 0.0;
        for (int i = threadIdx.x; i < count; i += 256) sum += sums[2 * (long long)i + s];
        total[s] = block_joined(sum, warps);
        __syncthreads();
    }
    if (threadIdx.x > 0) return;
    double a = coefficients[0], b = coefficients[1], scale = coefficients[2];
    dcoefficients[0] = (float)(scale * total[0]);
    dcoefficients[1] = (float)(scale * total[1]);
    dcoefficients[2] = (float)(a * total[0] + b * total[1]);
}
