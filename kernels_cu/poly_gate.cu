// poly_gate: what PolyAttention (nn/poly_attention.py) computes before and after the attention
// itself: the query q~ with its low-rank term, the gate e of each head, and their gradients.
//
//   u_m = mean of q over part m of a head, m = 0 .. RANK - 1
//   q~ = q / sqrt(d) + rho / (width of m) h_m, h = u R_q(u), rho = 0.15 / sqrt(RANK)
//   e = R_gate(alpha seen + beta) for each row and head, seen = x w_gate
//
// R_q and R_gate are Richards curves (richards.cuh).
//
// The ladder: six launches of torch's per curve and as many passes over memory -> one launch for q~
// and e (poly_query_gate), one before the attention's backward (poly_gate_backward) and one after
// it (poly_query_backward). Sums are taken per block in a fixed order; richards_finish adds them
// up.
//
// A block takes ROWS rows of one head, so that a head's sums are a block's; blocks of the same rows
// are neighbours. A thread takes a part m of a head alone: it reads what it averages, and the same
// once more (from L1) to write. With 16 bits and heads of 64 a part is 16 bytes, one request.

#include "richards.cuh"

#ifndef HEAD
#define HEAD 64               // width of a head
#endif
#ifndef RANK
// Parts of a head, the first HEAD % RANK of them one channel wider; at most 16.
#define RANK 8
#endif
#ifndef ROWS
#define ROWS 32               // of one head, that a block takes; a multiple of 32
#endif
#define GROUPS_OF_HEAD ((HEAD + WIDE - 1) / WIDE)
// Lanes that take a row: the largest power of two that is not above GROUPS_OF_HEAD, at most 32.
#define LANES                                                          \
    (GROUPS_OF_HEAD >= 32 ? 32 : GROUPS_OF_HEAD >= 16 ? 16 :           \
     GROUPS_OF_HEAD >= 8 ? 8 : GROUPS_OF_HEAD >= 4 ? 4 : GROUPS_OF_HEAD >= 2 ? 2 : 1)
#define LEAST_GATE 1e-4f      // a head whose gate is not above it is skipped

struct Part { int first, width; };            // channels of a head
__device__ __forceinline__ Part part_of(int m) {
    Part part = {m * (HEAD / RANK), HEAD / RANK};
    if (HEAD % RANK) {
        part.first += min(m, HEAD % RANK);
        part.width += m < HEAD % RANK;
    }
    return part;
}

__device__ __forceinline__ float mean_of(const DATA_T* from, int width) {
    float sum = 0.0f;
    for (int i = 0; WIDE * i < width; i++) {
        Group x = load_group(from, i, width);
        #pragma unroll
        for (int k = 0; k < WIDE; k++) sum += as_float(x.at[k]);
    }
    return sum / width;
}

extern "C" __global__ void __launch_bounds__(THREADS) poly_query_gate(
    DATA_T* q_tilde,                          // (rows, H, HEAD)
    float* gate,                              // (rows, H) e, or 0 where e <= LEAST_GATE
    const DATA_T* q,                          // (rows, H, HEAD), rows `stride` elements apart
    const DATA_T* seen,                       // (rows, H)
    const float* alpha, const float* beta,    // (H)
    const float* theta_gate, const float* theta_query, int kinds_gate, int kinds_query,
    int rows, int H, int stride)
{
    __shared__ Curve curves[2];
    make_curves(curves, theta_gate, theta_query, kinds_gate, kinds_query);
    int h = blockIdx.x % H, first = blockIdx.x / H * ROWS;
    if (threadIdx.x < ROWS && first + threadIdx.x < rows) {
        long long n = (long long)(first + threadIdx.x) * H + h;
        float e =
            height(point<false>(fmaf(alpha[h], as_float(seen[n]), beta[h]), curves[0]), curves[0]);
        gate[n] = e > LEAST_GATE ? e : 0.0f;
    }
    for (int i = threadIdx.x; i < ROWS * RANK; i += THREADS) {
        int row = first + i / RANK;
        if (row >= rows) return;
        Part part = part_of(i % RANK);
        const DATA_T* from = q + (long long)row * stride + h * HEAD + part.first;
        float u = mean_of(from, part.width);
        float more = 0.15f / sqrtf((float)RANK) / part.width * u *
                     height(point<false>(u, curves[1]), curves[1]);
        for (int j = 0; WIDE * j < part.width; j++) {
            Group x = load_group(from, j, part.width);
            float v[WIDE];
            #pragma unroll
            for (int k = 0; k < WIDE; k++)
                v[k] = fmaf(as_float(x.at[k]), 1.0f / sqrtf((float)HEAD), more);
            store_group(q_tilde + ((long long)row * H + h) * HEAD + part.first, j, part.width, v);
        }
    }
}

// out = e y: de = sum of dout y = sum of dout out / e, over the head. LANES lanes take a row.
extern "C" __global__ void __launch_bounds__(THREADS) poly_gate_backward(
    DATA_T* dy,                               // (rows, H, HEAD)
    DATA_T* dseen,                            // (rows, H)
    float* sums,                              // (blocks, 2 SUMS): writes the first SUMS
    float* by_head,                           // (blocks, 2) for dalpha, dbeta
    const DATA_T* dout, const DATA_T* out, const float* gate, const DATA_T* seen,
    const float* alpha, const float* beta,
    const float* theta_gate, const float* theta_query, int kinds_gate, int kinds_query,
    int rows, int H)
{
    __shared__ Curve curves[2];
    make_curves(curves, theta_gate, theta_query, kinds_gate, kinds_query);
    int h = blockIdx.x % H, first = blockIdx.x / H * ROWS, lane = threadIdx.x % LANES;
    float mine[SUMS] = {}, of_head[2] = {};
    for (int i = threadIdx.x / LANES; i < ROWS; i += THREADS / LANES) {            // whole warps
        bool valid = first + i < rows;
        long long n = (long long)(first + i) * H + h;
        float e = valid ? gate[n] : 0.0f, sum = 0.0f;
        for (int j = lane; valid && j < GROUPS_OF_HEAD; j += LANES) {
            Group up = load_group(dout + n * HEAD, j, HEAD),
                  x = load_group(out + n * HEAD, j, HEAD);
            float v[WIDE];
            #pragma unroll
            for (int k = 0; k < WIDE; k++) {
                v[k] = __fmul_rn(e, as_float(up.at[k]));
                sum = fmaf(as_float(up.at[k]), as_float(x.at[k]), sum);
            }
            store_group(dy + n * HEAD, j, HEAD, v);
        }
        #pragma unroll
        for (int lane_delta = LANES / 2; lane_delta > 0; lane_delta /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, lane_delta);
        if (lane > 0 || !valid) continue;
        float x = as_float(seen[n]), ds = 0.0f;
        if (e > 0.0f) {
            float s = fmaf(alpha[h], x, beta[h]);
            ds = curves->slope * add_sums(mine, sum / e, s, point<false>(s, *curves));
        }
        of_head[0] = fmaf(ds, x, of_head[0]);
        of_head[1] += ds;
        store(dseen + n, alpha[h] * ds);
    }
    write_sums(sums + (long long)blockIdx.x * 2 * SUMS, mine);
    write_sums(by_head + 2 * (long long)blockIdx.x, of_head);
}

// dq += the gradient through q~; and dalpha, dbeta from the sums that poly_gate_backward wrote.
extern "C" __global__ void __launch_bounds__(THREADS) poly_query_backward(
    DATA_T* dq,                               // (rows, H, HEAD), rows `dq_stride` elements apart
    float* sums,                              // (blocks, 2 SUMS): writes the last SUMS
    float* dalpha, float* dbeta,              // (H), by the first block of each head
    const DATA_T* dq_tilde, const DATA_T* q, const float* by_head,
    const float* theta_gate, const float* theta_query, int kinds_gate, int kinds_query,
    int rows, int H, int stride, int dq_stride)
{
    __shared__ Curve curves[2];
    make_curves(curves, theta_gate, theta_query, kinds_gate, kinds_query);
    int h = blockIdx.x % H, first = blockIdx.x / H * ROWS;
    float mine[SUMS] = {};
    for (int i = threadIdx.x; i < ROWS * RANK; i += THREADS) {
        int row = first + i / RANK;
        if (row >= rows) break;
        Part part = part_of(i % RANK);
        const DATA_T* up = dq_tilde + ((long long)row * H + h) * HEAD + part.first;
        DATA_T* to = dq + (long long)row * dq_stride + h * HEAD + part.first;
        float u = mean_of(q + (long long)row * stride + h * HEAD + part.first, part.width);
        float dh = 0.15f / sqrtf((float)RANK) * mean_of(up, part.width);
        Point at = point<false>(u, curves[1]);
        float du =
            fmaf(curves[1].slope, add_sums(mine, dh * u, u, at), dh * height(at, curves[1])) /
            part.width;
        for (int j = 0; WIDE * j < part.width; j++) {
            Group x = load_group(up, j, part.width), old = load_group(to, j, part.width);
            float v[WIDE];
            #pragma unroll
            for (int k = 0; k < WIDE; k++)
                v[k] = as_float(old.at[k]) + fmaf(as_float(x.at[k]), 1.0f / sqrtf((float)HEAD), du);
            store_group(to, j, part.width, v);
        }
    }
    write_sums(sums + ((long long)blockIdx.x * 2 + 1) * SUMS, mine);
    if (blockIdx.x >= H) return;
    __shared__ double warps[THREADS / 32];
    for (int s = 0; s < 2; s++) {
        double sum = 0.0;
        for (int i = blockIdx.x + threadIdx.x * H; i < gridDim.x; i += THREADS * H)
            sum += by_head[2 * (long long)i + s];
        __syncthreads();
        sum = block_joined(sum, warps);
        if (threadIdx.x == 0) (s == 0 ? dalpha : dbeta)[h] = (float)sum;
    }
}
