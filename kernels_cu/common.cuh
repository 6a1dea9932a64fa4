// Helpers that stand in front of every kernel of gpuaccel, as text: no #include, no toolkit header is needed.
//
// bf16 is the upper half of a float: 1 sign, 8 exponent and 7 fraction bits. So reading one is a shift, and writing one is a
// rounding rule (to the nearest, ties to even) and a shift. Nothing else is hidden here.

struct bf16 { unsigned short bits; };

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
