// Helpers that stand in front of every kernel of gpuaccel, as text: no #include, no toolkit header is needed.
//
// bf16 is the upper half of a float: 1 sign, 8 exponent and 7 fraction bits. So reading one is a shift, and writing one is a
// rounding rule (to the nearest, ties to even) and a shift.
// fp16 has 1 sign, 5 exponent and 10 fraction bits: finer steps than bf16, but nothing above 65504, and below 2^-14 its steps
// stay at 2^-24 (subnormal numbers). A GPU has an instruction for each way; the text beside it computes the same bits.

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

// Two bf16 lie in one 32-bit word, the first one in its lower half.
__device__ __forceinline__ float low_as_float(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_as_float(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ bf16 as_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    bf16 result;
    if ((bits & 0x7fffffffu) > 0x7f800000u) result.bits = 0x7fff;                 // NaN stays NaN
    else result.bits = (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    return result;
}

__device__ __forceinline__ float as_float(fp16 x) {
    float result;
#ifdef __CUDA_ARCH__
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
#else
    unsigned rest = x.bits & 0x7fffu;                                              // without its sign
    if (rest < 0x0400u) result = rest * 5.9604644775390625e-8f;                    // subnormal: so many times 2^-24
    else if (rest < 0x7c00u) result = __uint_as_float((rest << 13) + 0x38000000u); // exponent counts from 127 instead of 15
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
    else if (rest >= 0x47800000u) half = 0x7c00u;                                  // 65536 and more: infinity
    else if (rest >= 0x38800000u) half = (rest - 0x38000000u + 0x0fffu + ((rest >> 13) & 1u)) >> 13;
    else half = __float_as_uint(__uint_as_float(rest) + 0.5f) & 0xffffu;           // at 0.5 a float's last bit is 2^-24
    result.bits = (unsigned short)(half | ((bits >> 16) & 0x8000u));
#endif
    return result;
}
