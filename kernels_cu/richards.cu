// richards: a gated linear unit of two generalised logistic curves (Richards, 1959) with up to nine
// learned parameters each.
//
//   u = s x / T + b
//   t = ln(beta) - k nu (u - m)
//   L = ln(1 + e^t)
//   sigma = e^(-L / nu)
//   r = e^t / (1 + e^t)
//   R(x) = a sigma + c
//   R'(x) = a sigma r k s / T
//
// t is a line in x, and R a line in sigma: t = A - B x, R = G sigma + H, R' = (G B / nu) sigma r.
// Each block computes these numbers (make_curves), A and B for powers and logarithms
// of 2, which the GPU has instructions for (t and L are in these units there).
//
// All nine derivatives need five sums over the elements: of dy sigma L, dy sigma r, dy sigma r x,
// dy sigma and dy. richards_finish computes the nine numbers from them.
//
// A backward costs four special functions per element of a curve, a forward three: two powers, a
// logarithm, and in the backward a reciprocal.
//
// glu: h = x1 R_a(x1) R_g(x2), where x1 and x2 are the halves of one matrix. Elements of memory per
// element of h: forward 2 reads and a write, backward 3 reads and 2 writes (bf16: 6 and 10 bytes).
// Special functions: forward 6, backward 8. An H200 moves 4.2 TB/s and computes 16 special
// functions per clock and SM, 3.7 T/s at 1.755 GHz: the forward is bound by special functions (1.6
// ps per element, memory 1.4), the backward by memory (2.4 ps, special functions 2.2).
//
// The ladder:
//   torch   Six launches per curve, and as many passes over memory.
//   glu_*   Both curves, the gate and the products with x1: one launch forward, one backward (and
//           richards_finish).
// Sums are taken per block in a fixed order, then by one block per curve (richards_finish).

#include "richards.cuh"

// Walks over the groups of a chunk: row and place in the row of one, without a division for each.
struct Walk { long long row; int q, width; };
__device__ __forceinline__ Walk walk_from(long long group, int width) {
    Walk w = {group / width, (int)(group % width), width};
    return w;
}
__device__ __forceinline__ void step(Walk& w) {
    for (w.q += THREADS; w.q >= w.width; w.q -= w.width) w.row++;
}

extern "C" __global__ void __launch_bounds__(THREADS) glu_forward(
    DATA_T* h,                                // (N, hidden)
    const DATA_T* x,                          // (N, 2 hidden): x1, x2
    // What is learned of each, in the order of the parameters.
    const float* theta_a, const float* theta_g,
    int kinds_a, int kinds_g, long long N, int hidden)
{
    __shared__ Curve shared_curves[2];
    Walk at = walk_from((long long)blockIdx.x * THREADS * GROUPS + threadIdx.x,
                        (hidden + WIDE - 1) / WIDE);
    Group next1, next2;
    auto ask_both = [&]() {
        const DATA_T* from = x + at.row * 2 * hidden;
        next1 = load_group(from, at.q, hidden);
        next2 = load_group(from + hidden, at.q, hidden);
    };
    if (at.row < N) ask_both();
    // While the first groups are on their way.
    make_curves(shared_curves, theta_a, theta_g, kinds_a, kinds_g);
    Curve a = shared_curves[0], g = shared_curves[1];
    #pragma unroll 2
    for (int k = 0; k < GROUPS; k++) {
        if (at.row >= N) break;
        Group x1 = next1, x2 = next2;
        Walk here = at;
        step(at);
        if (k + 1 < GROUPS && at.row < N) ask_both();
        float v[WIDE];
        #pragma unroll
        for (int i = 0; i < WIDE; i++) {
            float one = as_float(x1.at[i]);
            v[i] = __fmul_rn(__fmul_rn(one, height(point<true>(one, a), a)),
                             height(point<false>(as_float(x2.at[i]), g), g));
        }
        store_group(h + here.row * hidden, here.q, hidden, v);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) glu_backward(
    DATA_T* dx,                               // (N, 2 hidden)
    float* sums,                              // (chunks, 2 SUMS)
    const DATA_T* dh,                         // (N, hidden)
    const DATA_T* x, const float* theta_a, const float* theta_g,
    int kinds_a, int kinds_g, long long N, int hidden)
{
    __shared__ Curve shared_curves[2];
    make_curves(shared_curves, theta_a, theta_g, kinds_a, kinds_g);
    Curve a = shared_curves[0], g = shared_curves[1];
    float both[2 * SUMS] = {};                // of a, of g
    Walk at = walk_from((long long)blockIdx.x * THREADS * GROUPS + threadIdx.x,
                        (hidden + WIDE - 1) / WIDE);
    Group next1, next2, next_dh;
    auto ask_all = [&]() {
        const DATA_T* from = x + at.row * 2 * hidden;
        next1 = load_group(from, at.q, hidden);
        next2 = load_group(from + hidden, at.q, hidden);
        next_dh = load_group(dh + at.row * hidden, at.q, hidden);
    };
    if (at.row < N) ask_all();
    #pragma unroll 2
    for (int k = 0; k < GROUPS; k++) {
        if (at.row >= N) break;
        Group x1 = next1, x2 = next2, up = next_dh;
        Walk here = at;
        step(at);
        if (k + 1 < GROUPS && at.row < N) ask_all();
        float d1[WIDE], d2[WIDE];
        #pragma unroll
        for (int i = 0; i < WIDE; i++) {
            float one = as_float(x1.at[i]), two = as_float(x2.at[i]), dhi = as_float(up.at[i]);
            Point p = point<false>(one, a), s = point<false>(two, g);
            float activation = height(p, a), gate = height(s, g);
            float dvalue = __fmul_rn(dhi, gate), dgate = __fmul_rn(dhi, __fmul_rn(one, activation));
            d1[i] = fmaf(a.slope, add_sums(both, __fmul_rn(one, dvalue), one, p),
                         __fmul_rn(dvalue, activation));
            d2[i] = __fmul_rn(g.slope, add_sums(both + SUMS, dgate, two, s));
        }
        DATA_T* to = dx + here.row * 2 * hidden;
        store_group(to, here.q, hidden, d1);
        store_group(to + hidden, here.q, hidden, d2);
    }
    write_sums(sums + (long long)blockIdx.x * 2 * SUMS, both);
}

// ---- from the sums to the gradients of the parameters ----

extern "C" __global__ void __launch_bounds__(1024) richards_finish(
    float* dtheta0, float* dtheta1,           // one per learned parameter of each curve
    const float* sums,                        // (chunks, 2 SUMS)
    const float* theta0, const float* theta1, int kinds0, int kinds1, long long chunks)
{
    __shared__ Curve curves[2];
    make_curves(curves, theta0, theta1, kinds0, kinds1);
    __shared__ double of_warp[SUMS][32], total[SUMS];
    double mine[SUMS] = {};
    int which = blockIdx.x, wide = 2 * SUMS, lane = threadIdx.x % 32,
        warp = threadIdx.x / 32;
    #pragma unroll 4
    for (long long i = threadIdx.x; i < chunks; i += 1024)
        #pragma unroll
        for (int s = 0; s < SUMS; s++) mine[s] += sums[i * wide + which * SUMS + s];
    #pragma unroll
    for (int s = 0; s < SUMS; s++) {
        for (int lane_delta = 16; lane_delta > 0; lane_delta /= 2)
            mine[s] += __shfl_down_sync(0xffffffffu, mine[s], lane_delta);
        if (lane == 0) of_warp[s][warp] = mine[s];
    }
    __syncthreads();
    if (warp < SUMS) {
        double sum = of_warp[warp][lane];
        for (int lane_delta = 16; lane_delta > 0; lane_delta /= 2)
            sum += __shfl_down_sync(0xffffffffu, sum, lane_delta);
        if (lane == 0) total[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    const Curve* c = curves + which;
    const float* p = c->p;
    double k = p[K], over_nu = 1.0 / p[NU], over_T = 1.0 / p[T_], over_beta = 1.0 / p[BETA];
    double S0 = c->G * LN2 * total[0], S1 = c->G * total[1], Sx = c->G * total[2];
    // Sum of dy a sigma r (u - m)
    double Su = p[SCALE] * over_T * Sx + ((double)p[SHIFT] - p[M]) * S1;
    double d[9];
    d[NU] = S0 * over_nu * over_nu + k * Su * over_nu;
    d[K] = Su;
    d[M] = -k * S1;
    d[BETA] = -S1 * over_nu * over_beta;
    d[T_] = -k * p[SCALE] * over_T * over_T * Sx;
    d[GAIN] = total[3];
    d[OFFSET] = total[4];
    d[SCALE] = k * over_T * Sx;
    d[SHIFT] = k * S1;
    float* to = which == 0 ? dtheta0 : dtheta1;
    for (int i = 0, next = 0; i < 9; i++)
        if ((which == 0 ? kinds0 : kinds1) >> (2 * i) & 3) to[next++] = (float)(d[i] * c->chain[i]);
}
