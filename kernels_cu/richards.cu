// richards: the generalised logistic curve (Richards, 1959) with nine parameters that are learned, and the gated linear unit made of two of them.
//
//   u = V (s x / T + b)      t = ln(beta) - k' (u - m), k' = k nu with the birch tail, else k
//   L = ln(1 + e^t)          sigma = e^(-L / nu)          r = e^t / (1 + e^t)
//   R(x) = a gate + c, gate = sigma, or 2 sigma - 1 for tanh (V = 2; else V = 1)            R'(x) = a V sigma r k' V s / (nu T)
//
// t is a line in x, and R a line in sigma: t = A - B x, R = G sigma + H, R' = (G B / nu) sigma r. richards_begin works these numbers out once;
// A and B for powers and logarithms of 2, which the GPU has instructions for (t and L below are in these units).
// All nine derivatives need five sums over the elements, of dy sigma L, dy sigma r, dy sigma r x, dy sigma and dy; richards_finish makes the
// nine numbers of them. So a curve costs four special functions per element (two powers, a logarithm, a reciprocal), forward three.
//
// glu: h = x1 R_a(x1) R_g(x2), where x1 and x2 are the halves of one product. Bytes per element of h: forward 2 reads and a write, backward 3 reads and
// 2 writes (bf16: 6 and 10). Special functions: forward 6, backward 8. An H200 moves 4.2 TB/s and takes 16 special functions per clock and SM,
// 3.7 T/s at 1.755 GHz: forward is bound by these (1.6 ps per element, bytes 1.4), backward by bytes (2.4 ps, special functions 2.2).
//
// The ladder: six launches of torch's per curve and as many passes over memory -> one launch each way (richards_forward, richards_backward) -> both
// curves, the gate and the products with x1 in one (glu_forward, glu_backward). Sums are taken per chunk in a fixed order, then by one block.

#ifndef DATA_T
#define DATA_T float          // x, y, h and their gradients
#endif
#ifndef WHOLE
#define WHOLE 0               // 1: rows are a multiple of 4 and aligned to four elements
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef GROUPS
#define GROUPS 8              // of four elements that a thread takes: a chunk has 4 * THREADS * GROUPS
#endif
#define SUMS 5
#define NU 0
#define K 1
#define M 2
#define BETA 3
#define T_ 4
#define GAIN 5
#define OFFSET 6
#define SCALE 7
#define SHIFT 8
#define LEAST 1e-6            // nu, k, beta and T stay above it
#define LN2 0.6931471805599453

struct Curve {                // what a thread needs of a curve; then its parameters, for richards_finish. (24) floats
    float A, B, over_nu, G, H, slope, unused[2];
    float p[9], chain[9];     // the parameters; and their derivatives by what is learned: 0 where nothing is
    float unused2[6];         // zeros
};

struct Setting {              // of one curve, by value
    float fixed[9];           // the parameters that are not learned
    int kinds;                // two bits for each: 0 fixed, 1 learned as it is, 2 as its softplus, 3 as 0.1 + 9.9 sigmoid
    int tanh, birch;
};

struct Settings { Setting curve[2]; };

extern "C" __global__ void richards_begin(
    Curve* curves,            // (blocks)
    const float* theta0, const float* theta1,      // what is learned of each curve, in the order of the parameters
    Settings settings)
{
    if (threadIdx.x > 0) return;
    Setting set = settings.curve[blockIdx.x];
    const float* theta = blockIdx.x == 0 ? theta0 : theta1;
    Curve c;
    double p[9];
    for (int i = 0, next = 0; i < 9; i++) {
        int kind = set.kinds >> (2 * i) & 3;
        double z = kind == 0 ? set.fixed[i] : theta[next++], rising = 1.0 / (1.0 + exp(-z));
        p[i] = kind == 2 ? (z > 0.0 ? z : 0.0) + log1p(exp(z > 0.0 ? -z : z)) : kind == 3 ? 0.1 + 9.9 * rising : z;
        if ((i == NU || i == K || i == BETA || i == T_) && p[i] < LEAST) p[i] = LEAST;
        c.p[i] = (float)p[i];
        c.chain[i] = (float)(kind == 0 ? 0.0 : kind == 1 ? 1.0 : kind == 2 ? rising : 9.9 * rising * (1.0 - rising));
    }
    double V = set.tanh ? 2.0 : 1.0, ke = set.birch ? p[K] * p[NU] : p[K];
    c.A = (float)((log(p[BETA]) - ke * (V * p[SHIFT] - p[M])) / LN2);
    c.B = (float)(ke * V * p[SCALE] / p[T_] / LN2);
    c.over_nu = (float)(1.0 / p[NU]);
    c.G = (float)(p[GAIN] * V);
    c.H = (float)(p[OFFSET] - (set.tanh ? p[GAIN] : 0.0));
    c.slope = (float)(p[GAIN] * V * ke * V * p[SCALE] / (p[T_] * p[NU]));
    c.unused[0] = (float)V;
    c.unused[1] = set.birch ? 1.0f : 0.0f;
    for (int i = 0; i < 6; i++) c.unused2[i] = 0.0f;
    curves[blockIdx.x] = c;
}

struct Point { float sigma, L, r; };          // of one x; L and r are not computed where nobody asks for them

__device__ __forceinline__ Point point(float x, const Curve& c) {
    Point at;
    float t = fmaf(-c.B, x, c.A), e = exp2f(-fabsf(t)), one = 1.0f + e;
    // log2(1 + e): below 0.02 by its series, where 1 + e has lost the last digits of e.
    float small = e < 0.02f ? e * fmaf(e, fmaf(e, 0.48089835f, -0.72134752f), 1.44269504f) : __log2f(one);
    at.L = fmaxf(t, 0.0f) + small;
    at.sigma = exp2f(-at.L * c.over_nu);
    at.r = __fdividef(t < 0.0f ? e : 1.0f, one);
    return at;
}
__device__ __forceinline__ float height(const Point& at, const Curve& c) { return fmaf(c.G, at.sigma, c.H); }
__device__ __forceinline__ float slope(const Point& at, const Curve& c) { return __fmul_rn(c.slope, __fmul_rn(at.sigma, at.r)); }

__device__ __forceinline__ void add_sums(float (&sums)[SUMS], float dy, float x, const Point& at) {
    float weighted = __fmul_rn(dy, at.sigma), risen = __fmul_rn(weighted, at.r);
    sums[0] = fmaf(weighted, at.L, sums[0]);
    sums[1] += risen;
    sums[2] = fmaf(risen, x, sums[2]);
    sums[3] += weighted;
    sums[4] += dy;
}

// The chunk's sums of all threads, in a fixed order: a tree over each warp, then over the warps.
template <int n> __device__ __forceinline__ void write_sums(float* to, const float (&sums)[n]) {
    __shared__ float warps[THREADS / 32][n];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int i = 0; i < n; i++) {
        float sum = sums[i];
        for (int far = 16; far > 0; far /= 2) sum += __shfl_down_sync(0xffffffffu, sum, far);
        if (lane == 0) warps[warp][i] = sum;
    }
    __syncthreads();
    if (threadIdx.x < n) {
        float sum = 0.0f;
        for (int w = 0; w < THREADS / 32; w++) sum += warps[w][threadIdx.x];
        to[threadIdx.x] = sum;
    }
}

// ---- one curve ----

extern "C" __global__ void __launch_bounds__(THREADS) richards_forward(
    DATA_T* y, const DATA_T* x,               // (n)
    const Curve* curve, long long n)
{
    Curve c = *curve;
    long long start = (long long)blockIdx.x * THREADS * GROUPS;
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        long long i = start + (long long)g * THREADS + threadIdx.x;
        int count = (int)min(4ll, n - 4 * i);
        if (count <= 0) continue;
        float4 v = load4(x + 4 * i, 0, count, WHOLE);
        v = make_float4(height(point(v.x, c), c), height(point(v.y, c), c), height(point(v.z, c), c), height(point(v.w, c), c));
        store4(y + 4 * i, 0, count, WHOLE, v);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) richards_backward(
    DATA_T* dx,                               // (n)
    float* sums,                              // (chunks, SUMS)
    const DATA_T* dy, const DATA_T* x, const Curve* curve, long long n)
{
    Curve c = *curve;
    float mine[SUMS] = {};
    long long start = (long long)blockIdx.x * THREADS * GROUPS;
    #pragma unroll 2
    for (int g = 0; g < GROUPS; g++) {
        long long i = start + (long long)g * THREADS + threadIdx.x;
        int count = (int)min(4ll, n - 4 * i);
        if (count <= 0) continue;
        float4 v = load4(x + 4 * i, 0, count, WHOLE), d = load4(dy + 4 * i, 0, count, WHOLE);
        float xs[4] = {v.x, v.y, v.z, v.w}, ds[4] = {d.x, d.y, d.z, d.w};
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            Point at = point(xs[k], c);
            add_sums(mine, ds[k], xs[k], at);
            ds[k] = __fmul_rn(ds[k], slope(at, c));
        }
        store4(dx + 4 * i, 0, count, WHOLE, make_float4(ds[0], ds[1], ds[2], ds[3]));
    }
    write_sums(sums + (long long)blockIdx.x * SUMS, mine);
}

// ---- the gated linear unit ----

// Walks over the groups of four of a chunk: row and place in the row of one, without a division for each.
struct Walk { long long row; int q, step, width; };
__device__ __forceinline__ Walk walk_from(long long group, int width) { Walk w = {group / width, (int)(group % width), THREADS, width}; return w; }
__device__ __forceinline__ void next(Walk& w) { for (w.q += w.step; w.q >= w.width; w.q -= w.width) w.row++; }

extern "C" __global__ void __launch_bounds__(THREADS) glu_forward(
    DATA_T* h,                                // (N, hidden)
    const DATA_T* x,                          // (N, 2 hidden): x1, x2
    const Curve* curves,                      // of x1, of x2
    long long N, int hidden)
{
    Curve a = curves[0], g = curves[1];
    int width = (hidden + 3) / 4;
    Walk at = walk_from((long long)blockIdx.x * THREADS * GROUPS + threadIdx.x, width);
    #pragma unroll 2
    for (int k = 0; k < GROUPS; k++, next(at)) {
        if (at.row >= N) break;
        const DATA_T* from = x + at.row * 2 * hidden;
        float4 x1 = load4(from, at.q, hidden, WHOLE), x2 = load4(from + hidden, at.q, hidden, WHOLE);
        float one[4] = {x1.x, x1.y, x1.z, x1.w}, two[4] = {x2.x, x2.y, x2.z, x2.w};
        #pragma unroll
        for (int i = 0; i < 4; i++) one[i] = __fmul_rn(__fmul_rn(one[i], height(point(one[i], a), a)), height(point(two[i], g), g));
        store4(h + at.row * hidden, at.q, hidden, WHOLE, make_float4(one[0], one[1], one[2], one[3]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) glu_backward(
    DATA_T* dx,                               // (N, 2 hidden)
    float* sums,                              // (chunks, 2 SUMS)
    const DATA_T* dh,                         // (N, hidden)
    const DATA_T* x, const Curve* curves, long long N, int hidden)
{
    Curve a = curves[0], g = curves[1];
    float of_a[SUMS] = {}, of_g[SUMS] = {};
    int width = (hidden + 3) / 4;
    Walk at = walk_from((long long)blockIdx.x * THREADS * GROUPS + threadIdx.x, width);
    #pragma unroll 2
    for (int k = 0; k < GROUPS; k++, next(at)) {
        if (at.row >= N) break;
        const DATA_T* from = x + at.row * 2 * hidden;
        float4 x1 = load4(from, at.q, hidden, WHOLE), x2 = load4(from + hidden, at.q, hidden, WHOLE), d = load4(dh + at.row * hidden, at.q, hidden, WHOLE);
        float one[4] = {x1.x, x1.y, x1.z, x1.w}, two[4] = {x2.x, x2.y, x2.z, x2.w}, up[4] = {d.x, d.y, d.z, d.w};
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            Point p = point(one[i], a), s = point(two[i], g);
            float activation = height(p, a), gate = height(s, g);
            float dvalue = __fmul_rn(up[i], gate), dgate = __fmul_rn(up[i], __fmul_rn(one[i], activation));
            add_sums(of_a, __fmul_rn(one[i], dvalue), one[i], p);
            add_sums(of_g, dgate, two[i], s);
            one[i] = __fmul_rn(dvalue, fmaf(one[i], slope(p, a), activation));
            two[i] = __fmul_rn(dgate, slope(s, g));
        }
        DATA_T* to = dx + at.row * 2 * hidden;
        store4(to, at.q, hidden, WHOLE, make_float4(one[0], one[1], one[2], one[3]));
        store4(to + hidden, at.q, hidden, WHOLE, make_float4(two[0], two[1], two[2], two[3]));
    }
    float all[2 * SUMS];
    #pragma unroll
    for (int i = 0; i < SUMS; i++) { all[i] = of_a[i]; all[SUMS + i] = of_g[i]; }
    write_sums(sums + (long long)blockIdx.x * 2 * SUMS, all);
}

// ---- from the sums to the gradients of the parameters ----

extern "C" __global__ void __launch_bounds__(THREADS) richards_finish(
    float* dtheta0, float* dtheta1,           // one per learned parameter of each curve
    const float* sums,                        // (chunks, curves * SUMS)
    const Curve* curves, long long chunks, Settings settings)
{
    __shared__ double warps[THREADS / 32];
    double total[SUMS];                       // in thread 0
    int which = blockIdx.x, wide = gridDim.x * SUMS;
    for (int s = 0; s < SUMS; s++) {
        double sum = 0.0;
        for (long long i = threadIdx.x; i < chunks; i += THREADS) sum += sums[i * wide + which * SUMS + s];
        total[s] = block_joined(sum, warps);
        __syncthreads();
    }
    if (threadIdx.x > 0) return;
    Curve c = curves[which];
    const float* p = c.p;
    double V = c.unused[0], G = c.G, nu = p[NU], ke = c.unused[1] != 0.0f ? (double)p[K] * nu : p[K], k_of_m = c.unused[1] != 0.0f ? p[K] : p[K] / nu;
    double S0 = G * LN2 * total[0], S1 = G * total[1], Sx = G * total[2];
    double U = V * p[SCALE] / p[T_], Su = U * Sx + (V * p[SHIFT] - p[M]) * S1;        // sum of dy G sigma r (u - m)
    double d[9];
    d[NU] = S0 / (nu * nu) + (c.unused[1] != 0.0f ? p[K] * Su / nu : 0.0);
    d[K] = c.unused[1] != 0.0f ? Su : Su / nu;
    d[M] = -k_of_m * S1;
    d[BETA] = -S1 / (nu * p[BETA]);
    d[T_] = -ke / nu * V * p[SCALE] / ((double)p[T_] * p[T_]) * Sx;
    d[GAIN] = V * total[3] - (V == 2.0 ? total[4] : 0.0);
    d[OFFSET] = total[4];
    d[SCALE] = ke / nu * V / p[T_] * Sx;
    d[SHIFT] = ke / nu * V * S1;
    float* to = which == 0 ? dtheta0 : dtheta1;
    for (int i = 0, next = 0; i < 9; i++)
        if (settings.curve[which].kinds >> (2 * i) & 3) to[next++] = (float)(d[i] * c.chain[i]);
}
