// Helpers that stand in front of every kernel of gpuaccel, as text: no #include, no toolkit header
// is needed.
//
// bf16 is the upper half of a float: 1 sign, 8 exponent and 7 fraction bits. So reading one is a
// shift, and writing one is a rounding rule (to the nearest, ties to even) and a shift. fp16 has 1
// sign, 5 exponent and 10 fraction bits: finer steps than bf16, but nothing above 65504, and below
// 2^-14 its steps stay at 2^-24 (subnormal numbers). A GPU has an instruction for each way (for
// bf16 since sm_80); the text beside it computes the same bits.

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(bf16 x) {
    return __uint_as_float((unsigned)x.bits << 16);
}

// Two bf16 lie in one 32-bit word, the first one in its lower half.
__device__ __forceinline__ float low_as_float(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_as_float(unsigned word) {
    return __uint_as_float(word & 0xffff0000u);
}

__device__ __forceinline__ bf16 as_bf16(float x) {
    bf16 result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#else
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) result.bits = 0x7fff;                 // NaN stays NaN
    else result.bits = (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
    return result;
}
__device__ __forceinline__ unsigned both_as_bf16(float low, float high) {
    unsigned word;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    word = as_bf16(low).bits | (unsigned)as_bf16(high).bits << 16;
#endif
    return word;
}

__device__ __forceinline__ float as_float(fp16 x) {
    float result;
#ifdef __CUDA_ARCH__
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
#else
    // Without its sign.
    unsigned rest = x.bits & 0x7fffu;
    // Subnormal: so many times 2^-24.
    if (rest < 0x0400u) result = rest * 5.9604644775390625e-8f;
    // Exponent counts from 127 instead of 15.
    else if (rest < 0x7c00u) result = __uint_as_float((rest << 13) + 0x38000000u);
    else result = __uint_as_float(0x7f800000u | rest << 13);                       // infinity, NaN
    if (x.bits & 0x8000u) result = -result;
#endif
    return result;
}

__device__ __forceinline__ fp16 as_fp16(float x) {
    fp16 result;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#else
    unsigned bits = __float_as_uint(x), rest = bits & 0x7fffffffu, half;
    if (rest > 0x7f800000u) half = 0x7fffu;                                        // NaN stays NaN
    // 65536 and more: infinity.
    else if (rest >= 0x47800000u) half = 0x7c00u;
    else if (rest >= 0x38800000u) half = (rest - 0x38000000u + 0x0fffu + ((rest >> 13) & 1u)) >> 13;
    // At 0.5 a float's last bit is 2^-24.
    else half = __float_as_uint(__uint_as_float(rest) + 0.5f) & 0xffffu;
    result.bits = (unsigned short)(half | ((bits >> 16) & 0x8000u));
#endif
    return result;
}

// ---- special functions ----
// Each is one instruction, off by about 2 units of the last place; results below 2^-126 are 0.
__device__ __forceinline__ float ex2_approx(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}
__device__ __forceinline__ float rcp_approx(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}

// ---- four at a time ----
// Four numbers are 16 bytes (fp32) or 8 (bf16, fp16): one request of a thread. `i` counts groups of
// four; aligned to four elements.

__device__ __forceinline__ float4 load4(const float* x, long long i) {
    return reinterpret_cast<const float4*>(x)[i];
}
__device__ __forceinline__ float4 load4(const bf16* x, long long i) {
    uint2 two = reinterpret_cast<const uint2*>(x)[i];
    return make_float4(low_as_float(two.x), high_as_float(two.x), low_as_float(two.y),
                       high_as_float(two.y));
}
__device__ __forceinline__ float4 load4(const fp16* x, long long i) {
    ushort4 four = reinterpret_cast<const ushort4*>(x)[i];
    fp16 a = {four.x}, b = {four.y}, c = {four.z}, d = {four.w};
    return make_float4(as_float(a), as_float(b), as_float(c), as_float(d));
}
__device__ __forceinline__ void store(float* x, float value) { *x = value; }
__device__ __forceinline__ void store(bf16* x, float value) { *x = as_bf16(value); }
__device__ __forceinline__ void store(fp16* x, float value) { *x = as_fp16(value); }
__device__ __forceinline__ void store4(float* x, long long i, float4 v) {
    reinterpret_cast<float4*>(x)[i] = v;
}
__device__ __forceinline__ void store4(bf16* x, long long i, float4 v) {
    reinterpret_cast<uint2*>(x)[i] = make_uint2(both_as_bf16(v.x, v.y), both_as_bf16(v.z, v.w));
}
__device__ __forceinline__ void store4(fp16* x, long long i, float4 v) {
    reinterpret_cast<ushort4*>(x)[i] =
        make_ushort4(as_fp16(v.x).bits, as_fp16(v.y).bits, as_fp16(v.z).bits, as_fp16(v.w).bits);
}
__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ bool aligned4(const void* x, unsigned size) {
    return ((unsigned long long)x & (4 * size - 1)) == 0;
}

// Four elements of a tensor's chunk of `count`; what lies behind its end is 0 and is not read. `i`
// counts groups of four.
template <class T> __device__ __forceinline__ float4 load4_within(const T* x, int i, int count) {
    return make_float4(4 * i < count ? as_float(x[4 * i]) : 0.0f,
                       4 * i + 1 < count ? as_float(x[4 * i + 1]) : 0.0f,
                       4 * i + 2 < count ? as_float(x[4 * i + 2]) : 0.0f,
                       4 * i + 3 < count ? as_float(x[4 * i + 3]) : 0.0f);
}
template <class T> __device__ __forceinline__ void store4_within(T* x, int i, int count, float4 v) {
    if (4 * i < count) store(x + 4 * i, v.x);
    if (4 * i + 1 < count) store(x + 4 * i + 1, v.y);
    if (4 * i + 2 < count) store(x + 4 * i + 2, v.z);
    if (4 * i + 3 < count) store(x + 4 * i + 3, v.w);
}
template <class T>
__device__ __forceinline__ float4 load4(const T* x, int i, int count, bool whole) {
    return whole ? load4(x, i) : load4_within(x, i, count);
}
template <class T>
__device__ __forceinline__ void store4(T* x, int i, int count, bool whole, float4 v) {
    if (whole) store4(x, i, v); else store4_within(x, i, count, v);
}

// The tensor that a chunk belongs to: the last one of `count` whose first chunk is not behind it.
__device__ __forceinline__ int tensor_of(const int* first, int count, int chunk) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (first[middle] <= chunk) low = middle; else high = middle;
    }
    return low;
}

// ---- norms ----
// What a chunk adds to a norm: the sum of squares (NORM 2), of magnitudes (1), or the largest
// magnitude (0, the infinity norm). The order is fixed: a thread's own elements, then a tree over
// its warp, then over the warps. So every run gives the same bits.
#ifndef NORM
#define NORM 2
#endif

// NaN wins a comparison here, as it does in a sum.
__device__ __forceinline__ double joined(double a, double b) {
#if NORM == 0
    return a != a || a > b ? a : b;
#else
    return a + b;
#endif
}

// A thread's `n` groups of four. fp32 is exact enough for a few squares, unless they leave its
// range (above 3e38, or below 1e-38, where digits get lost): then the same once more in fp64.
template <int n> __device__ __forceinline__ double magnitude(const float4 (&x)[n]) {
#if NORM == 2
    float sum = 0.0f;
    #pragma unroll
    for (int k = 0; k < n; k++)
        sum = fmaf(x[k].x, x[k].x,
                   fmaf(x[k].y, x[k].y, fmaf(x[k].z, x[k].z, fmaf(x[k].w, x[k].w, sum))));
    if (sum > 1e-30f && sum < 1e38f) return sum;
    float any = 0.0f;
    #pragma unroll
    for (int k = 0; k < n; k++)
        any += fabsf(x[k].x) + fabsf(x[k].y) + fabsf(x[k].z) + fabsf(x[k].w);
    if (any == 0.0f) return 0.0;
    double exact = 0.0;
    for (int k = 0; k < n; k++)
        exact += (double)x[k].x * x[k].x + (double)x[k].y * x[k].y + (double)x[k].z * x[k].z +
                 (double)x[k].w * x[k].w;
    return exact;
#else
    double all = 0.0;
    for (int k = 0; k < n; k++)
        all = joined(joined(joined(joined(all, fabsf(x[k].x)), fabsf(x[k].y)), fabsf(x[k].z)),
                     fabsf(x[k].w));
    return all;
#endif
}

// All threads' values joined, in thread 0. Every thread of the block takes part; `warps` is shared
// memory for blockDim.x / 32 values.
__device__ __forceinline__ double block_joined(double mine, double* warps) {
    for (int step = 16; step > 0; step /= 2)
        mine = joined(mine, __shfl_down_sync(0xffffffffu, mine, step));
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = blockDim.x / 32;
    if (lane == 0) warps[warp] = mine;
    __syncthreads();
    if (warp == 0) {
        mine = lane < count ? warps[lane] : 0.0;
        for (int step = 16; step > 0; step /= 2)
            mine = joined(mine, __shfl_down_sync(0xffffffffu, mine, step));
    }
    return mine;
}

// ---- random bits ----
// Philox4x32-10 (Salmon et al., 2011): four words of random bits for each counter, the same on
// every machine and in any order.
__device__ __forceinline__ uint4 random_bits(unsigned long long key, uint4 counter) {
    unsigned low = (unsigned)key, high = (unsigned)(key >> 32);
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned long long a = 0xD2511F53ull * counter.x, b = 0xCD9E8D57ull * counter.z;
        counter = make_uint4((unsigned)(b >> 32) ^ counter.y ^ low, (unsigned)b,
                             (unsigned)(a >> 32) ^ counter.w ^ high, (unsigned)a);
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return counter;
}

// Round to one of the two neighbouring bf16, to the nearer one more often: on average nothing is
// lost. `noise`: 16 random bits.
__device__ __forceinline__ bf16 as_bf16_stochastic(float x, unsigned noise) {
    unsigned bits = __float_as_uint(x);
    // Infinity and NaN stay.
    if ((bits & 0x7f800000u) == 0x7f800000u) return as_bf16(x);
    bf16 result;
    result.bits = (unsigned short)((bits + (noise & 0xffffu)) >> 16);
    return result;
}
