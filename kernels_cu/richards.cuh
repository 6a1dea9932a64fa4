// richards: what richards.cu and poly_gate.cu share: rows in groups of 16 bytes, the numbers of a
// curve, its value and its sums at one x. The formulas stand at the top of richards.cu.

#ifndef DATA_T
#define DATA_T float          // x, y, h and their gradients
#endif
#ifndef WHOLE
#define WHOLE 0               // 1: rows are a multiple of 16 bytes and aligned to 16 bytes
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef GROUPS
#define GROUPS 8              // groups that a thread takes: a chunk has GROUPS * THREADS
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
#define LEAST 1e-6f           // nu, k, beta and T stay above it
#define LN2 0.6931471805599453
#define LOG2E 1.44269504f
#define WIDE (16 / (int)sizeof(DATA_T))   // elements of a group

// A group as it lies in memory. It is loaded one iteration ahead, and converted to floats only
// where it is used.
union Group { uint4 all; DATA_T at[WIDE]; };

// What lies behind the row's end is 0.
__device__ __forceinline__ Group load_group(const DATA_T* row, long long group, long long width) {
    Group result;
#if WHOLE
    result.all = reinterpret_cast<const uint4*>(row)[group];
#else
    result.all = make_uint4(0, 0, 0, 0);
    #pragma unroll
    for (int k = 0; k < WIDE; k++)
        if (WIDE * group + k < width) result.at[k] = row[WIDE * group + k];
#endif
    return result;
}

__device__ __forceinline__ void store2(float* to, float a, float b) { to[0] = a; to[1] = b; }
__device__ __forceinline__ void store2(fp16* to, float a, float b) {
    to[0] = as_fp16(a);
    to[1] = as_fp16(b);
}
__device__ __forceinline__ void store2(bf16* to, float a, float b) {
    unsigned both = both_as_bf16(a, b);
    to[0].bits = (unsigned short)both;
    to[1].bits = (unsigned short)(both >> 16);
}

__device__ __forceinline__ void store_group(DATA_T* row, long long group, long long width,
                                            const float (&values)[WIDE]) {
    Group result;
    #pragma unroll
    for (int k = 0; k < WIDE; k += 2) store2(result.at + k, values[k], values[k + 1]);
#if WHOLE
    reinterpret_cast<uint4*>(row)[group] = result.all;
#else
    #pragma unroll
    for (int k = 0; k < WIDE; k++)
        if (WIDE * group + k < width) row[WIDE * group + k] = result.at[k];
#endif
}

// What a thread needs of a curve; then its parameters, for richards_finish.
struct Curve {
    float A, B, over_nu, G, H, slope;
    float p[9];               // the parameters
    float chain[9];           // their derivatives by what is learned; 0 for what is fixed
};

// Computes the two curves of a block from what is learned. One warp computes, all threads call it.
// kinds0, kinds1: two bits for each parameter: 0 not learned, 1 learned as it is, 2 as its
// softplus, 3 as 0.1 + 9.9 sigmoid.
__device__ __forceinline__ void make_curves(Curve* curves, const float* theta0,
                                            const float* theta1, int kinds0, int kinds1) {
    // Sixteen lanes for each curve, a lane for each parameter.
    int which = threadIdx.x / 16, i = threadIdx.x % 16;
    if (threadIdx.x < 32) {
        bool mine = i < 9;
        int kinds = which == 0 ? kinds0 : kinds1;
        // Of a parameter that is not learned.
        float fixed = i == M || i == OFFSET || i == SHIFT ? 0.0f : 1.0f;
        Curve& c = curves[which];
        int kind = mine ? kinds >> (2 * i) & 3 : 0;
        unsigned learned = __ballot_sync(0xffffffffu, kind != 0) >> (16 * which);
        if (mine) {
            const float* theta = which == 0 ? theta0 : theta1;
            float z = kind == 0 ? fixed : theta[__popc(learned & ((1u << i) - 1))];
            float e = expf(-fabsf(z));
            float rising = (z < 0.0f ? e : 1.0f) / (1.0f + e),
                  falling = (z < 0.0f ? 1.0f : e) / (1.0f + e);
            float value = kind == 2   ? fmaxf(z, 0.0f) + log1pf(e)
                          : kind == 3 ? fmaf(9.9f, rising, 0.1f)
                                      : z;
            c.p[i] = i == NU || i == K || i == BETA || i == T_ ? fmaxf(value, LEAST) : value;
            c.chain[i] = kind == 0   ? 0.0f
                         : kind == 1 ? 1.0f
                         : kind == 2 ? rising
                                     : __fmul_rn(__fmul_rn(9.9f, rising), falling);
        }
        __syncwarp();
        if (mine && i == 0) {
            const float* p = c.p;
            float k_nu = __fmul_rn(p[K], p[NU]), rate = __fmul_rn(k_nu, p[SCALE]) / p[T_];
            c.A = fmaf(-__fmul_rn(k_nu, p[SHIFT] - p[M]), LOG2E, log2f(p[BETA]));
            c.B = __fmul_rn(rate, LOG2E);
            c.over_nu = 1.0f / p[NU];
            c.G = p[GAIN];
            c.H = p[OFFSET];
            c.slope = __fmul_rn(c.G, rate) / p[NU];
        }
    }
    __syncthreads();
}

// 2^y for y <= 0, to 4 parts in 10^6, by ordinary instructions. For 16-bit dtypes, where one
// special function less per element is worth eight of these.
__device__ __forceinline__ float power_by_hand(float y) {
    y = fmaxf(y, -120.0f);
    // At 1.5 * 2^23 a float's steps are 1.
    float whole = y + 12582912.0f, part = y - (whole - 12582912.0f);
    float power =
        fmaf(fmaf(fmaf(fmaf(0.00956051f, part, 0.05591704f), part, 0.24024981f), part, 0.69312197f),
             part, 0.99999919f);
    return __uint_as_float(__float_as_uint(power) + (__float_as_uint(whole) << 23));
}

// Of one x. L and r are not computed where they are not used.
struct Point { float sigma, L, r; };

template <bool by_hand> __device__ __forceinline__ Point point(float x, const Curve& c) {
    Point result;
    float t = fmaf(-c.B, x, c.A);
    if (sizeof(DATA_T) == 4) {
        // log2(1 + e) for e below 0.02 by its series: 1 + e has lost the last digits of e there.
        float e = exp2f(-fabsf(t)), one = 1.0f + e;
        result.L = fmaxf(t, 0.0f) + (e < 0.02f
                                     ? e * fmaf(e, fmaf(e, 0.48089835f, -0.72134752f), 1.44269504f)
                                     : __log2f(one));
        result.r = __fmul_rn(t < 0.0f ? e : 1.0f, rcp_approx(one));
    } else {
        // For 16 bits an error of 2^-24 does not matter, and five instructions are saved.
        float e = exp2f(fminf(t, 120.0f)), one = 1.0f + e;
        result.L = fmaxf(t, __log2f(one));
        result.r = __fmul_rn(e, rcp_approx(one));
    }
    result.sigma = by_hand && sizeof(DATA_T) == 2 ? power_by_hand(-result.L * c.over_nu)
                                              : exp2f(-result.L * c.over_nu);
    return result;
}
__device__ __forceinline__ float height(const Point& p, const Curve& c) {
    return fmaf(c.G, p.sigma, c.H);
}

// Adds to the sums; returns dy sigma r, which times the curve's slope is dx.
__device__ __forceinline__ float add_sums(float* sums, float dy, float x, const Point& p) {
    float weighted = __fmul_rn(dy, p.sigma), risen = __fmul_rn(weighted, p.r);
    sums[0] = fmaf(weighted, p.L, sums[0]);
    sums[1] += risen;
    sums[2] = fmaf(risen, x, sums[2]);
    sums[3] += weighted;
    sums[4] += dy;
    return risen;
}

// The chunk's sums of all threads, in a fixed order: a tree over each warp, then over the warps.
template <int n> __device__ __forceinline__ void write_sums(float* to, const float (&sums)[n]) {
    __shared__ float warps[THREADS / 32][n];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int i = 0; i < n; i++) {
        float sum = sums[i];
        for (int lane_delta = 16; lane_delta > 0; lane_delta /= 2)
            sum += __shfl_down_sync(0xffffffffu, sum, lane_delta);
        if (lane == 0) warps[warp][i] = sum;
    }
    __syncthreads();
    if (threadIdx.x < n) {
        float sum = 0.0f;
        for (int w = 0; w < THREADS / 32; w++) sum += warps[w][threadIdx.x];
        to[threadIdx.x] = sum;
    }
}
