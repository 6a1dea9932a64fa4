// CUDA C for a host compiler: behind this text a kernel file compiles with g++, clang++ or zig c++,
// unchanged.
//
// It defines in C++ what a GPU has in hardware, mostly in one line per function: keywords, vector
// types, mathematics, bits and conversions, loads and stores, barriers, warp functions, atomics.
// Only functions that involve other threads (barriers, warp functions, fences) call the runtime.
// runtime.h lists these calls.
//
// The rules of this text:
//   * The overloads are those of NVRTC, the compiler for the GPU, and no C header is included. Here
//     as there pow(float, int) is a float and sqrt(int) is ambiguous, so a file that compiles here
//     almost always compiles for a GPU.
//   * Functions are in the unnamed namespace, like the kernels, so that a kernel file may add its
//     own max(float4, float4).
//   * A function that calls the runtime is never inlined (SIMT_CALL): its return address is the
//     user's line.
//   * In a checked build (SIMT_CHECKED) the compiler reports each memory access to the runtime,
//     except in SIMT_UNSEEN functions.
//   * Results are those of the CUDA C Programming Guide. Approximate functions (__expf) are more
//     exact here than on a GPU.
#pragma once
#include "runtime.h"

// __CUDA_ARCH__ is defined on a GPU, __SIMT_CPU__ on a CPU.
#define __SIMT_CPU__ 1

// ---- 1. keywords --------------------------------------------------------------------------------
// A CPU has one kind of function and one memory, so most keywords are empty. __shared__ is the
// exception: all threads of a block share such a variable. A block runs from start to end on one
// operating-system thread, so "one per block" is "one per operating-system thread". A checked build
// runs on only one of those, and collects the variables in a section where the runtime finds them.

#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __noinline__ __attribute__((noinline))
// Inlined: g++ does not instrument the read of a struct that is an argument of a call. Without
// `inline`, which a function may have once only: `inline __forceinline__` is usual. g++ refuses a
// call of such a function through a pointer: then build.py compiles again without it.
#ifdef SIMT_NO_FORCED_INLINE
#define __forceinline__
#else
#define __forceinline__ __attribute__((always_inline))
#endif
#ifdef SIMT_CHECKED
// Inlined into the loop over threads, clang would drop the checks.
#define __global__ __attribute__((noinline))
#define __shared__ static __attribute__((section("simt_shared")))
#else
#define __global__
#define __shared__ static thread_local
#endif
#ifndef __clang__
#define __builtin_assume(condition) ((void)0)
#endif

// The next four are ours. Without the attributes clang instruments atomics and merges two calls.
#if defined(__has_attribute) && __has_attribute(disable_sanitizer_instrumentation)
#define SIMT_UNSEEN                                                                                \
    __attribute__((no_sanitize("thread", "undefined"), disable_sanitizer_instrumentation))
#else
#define SIMT_UNSEEN __attribute__((no_sanitize("thread", "undefined")))
#endif
#if defined(__has_attribute) && __has_attribute(nomerge)
#define SIMT_CALL inline SIMT_UNSEEN __attribute__((noinline, nomerge))
#else
#define SIMT_CALL inline SIMT_UNSEEN __attribute__((noinline))
#endif
#define SIMT_INLINE inline __attribute__((always_inline))
#define SIMT_PART inline SIMT_UNSEEN __attribute__((always_inline))       // a part of a SIMT_CALL

// ---- 2. vector types ----------------------------------------------------------------------------
// A vector of two or four is aligned to its own size, 16 bytes at most, so that a thread reads it
// in one request. A vector of three is not.

#define SIMT_VECTOR(V, T, ALIGN2, ALIGN4)                                                          \
    struct V##1 { T x; };                                                                          \
    struct __align__(ALIGN2) V##2 { T x, y; };                                                     \
    struct __align__(ALIGN4) V##4 { T x, y, z, w; };                                               \
    namespace {                                                                                    \
    SIMT_INLINE V##1 make_##V##1(T x) { return {x}; }                                          \
    SIMT_INLINE V##2 make_##V##2(T x, T y) { return {x, y}; }                                  \
    SIMT_INLINE V##3 make_##V##3(T x, T y, T z) { return {x, y, z}; }                          \
    SIMT_INLINE V##4 make_##V##4(T x, T y, T z, T w) { return {x, y, z, w}; }                  \
    }

#define SIMT_THREE(V, T) struct V##3 { T x, y, z; };
SIMT_THREE(char, signed char)    SIMT_THREE(uchar, unsigned char)
SIMT_THREE(short, short)         SIMT_THREE(ushort, unsigned short)
SIMT_THREE(int, int)             SIMT_THREE(long, long)
SIMT_THREE(ulong, unsigned long) SIMT_THREE(longlong, long long)
SIMT_THREE(ulonglong, unsigned long long)
SIMT_THREE(float, float)         SIMT_THREE(double, double)
// uint3, the type of threadIdx, and dim3 are in runtime.h.

SIMT_VECTOR(char, signed char, 2, 4)        SIMT_VECTOR(uchar, unsigned char, 2, 4)
SIMT_VECTOR(short, short, 4, 8)             SIMT_VECTOR(ushort, unsigned short, 4, 8)
SIMT_VECTOR(int, int, 8, 16)                SIMT_VECTOR(uint, unsigned, 8, 16)
SIMT_VECTOR(long, long, 16, 16)             SIMT_VECTOR(ulong, unsigned long, 16, 16)
SIMT_VECTOR(longlong, long long, 16, 16)    SIMT_VECTOR(ulonglong, unsigned long long, 16, 16)
SIMT_VECTOR(float, float, 8, 16)            SIMT_VECTOR(double, double, 16, 16)

namespace {

constexpr int warpSize = SIMT_WARP;
typedef long clock_t;

// ---- 3. mathematics -----------------------------------------------------------------------------
// sqrtf(float), sqrt(float) and sqrt(double), for every function of C. __builtin_sqrtf is C's own
// sqrtf: an instruction where the processor has one, else a call of the C library.

#define SIMT_MATH_TO(name, F, D)                                                                   \
    inline F name##f(float x) { return __builtin_##name##f(x); }                                   \
    inline F name(float x) { return __builtin_##name##f(x); }                                      \
    inline D name(double x) { return __builtin_##name(x); }
#define SIMT_MATH2(name, F, D)                                                                     \
    inline float name##f(float x, F y) { return __builtin_##name##f(x, y); }                       \
    inline float name(float x, F y) { return __builtin_##name##f(x, y); }                          \
    inline double name(double x, D y) { return __builtin_##name(x, y); }
#define SIMT_MATH(name) SIMT_MATH_TO(name, float, double)

SIMT_MATH(acos)   SIMT_MATH(acosh)  SIMT_MATH(asin)   SIMT_MATH(asinh)  SIMT_MATH(atan)
SIMT_MATH(atanh)  SIMT_MATH(cbrt)   SIMT_MATH(ceil)   SIMT_MATH(cos)    SIMT_MATH(cosh)
SIMT_MATH(erf)    SIMT_MATH(erfc)   SIMT_MATH(exp)    SIMT_MATH(exp2)   SIMT_MATH(expm1)
SIMT_MATH(fabs)   SIMT_MATH(floor)  SIMT_MATH(lgamma) SIMT_MATH(log)    SIMT_MATH(log10)
SIMT_MATH(log1p)  SIMT_MATH(log2)   SIMT_MATH(logb)   SIMT_MATH(rint)   SIMT_MATH(round)
SIMT_MATH(sin)    SIMT_MATH(sinh)   SIMT_MATH(sqrt)   SIMT_MATH(tan)    SIMT_MATH(tanh)
SIMT_MATH(tgamma) SIMT_MATH(trunc)  SIMT_MATH(nearbyint)
SIMT_MATH_TO(ilogb, int, int)
SIMT_MATH_TO(lrint, long, long)             SIMT_MATH_TO(lround, long, long)
SIMT_MATH_TO(llrint, long long, long long)  SIMT_MATH_TO(llround, long long, long long)
SIMT_MATH2(atan2, float, double)      SIMT_MATH2(copysign, float, double)
SIMT_MATH2(fdim, float, double)       SIMT_MATH2(fmax, float, double)
SIMT_MATH2(fmin, float, double)       SIMT_MATH2(fmod, float, double)
SIMT_MATH2(hypot, float, double)      SIMT_MATH2(nextafter, float, double)
SIMT_MATH2(pow, float, double)        SIMT_MATH2(remainder, float, double)
SIMT_MATH2(ldexp, int, int)           SIMT_MATH2(scalbn, int, int)
SIMT_MATH2(frexp, int*, int*)         SIMT_MATH2(modf, float*, double*)
inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }

// What CUDA has and C has not.
#define SIMT_CUDA_MATH(name, ...)                                                                  \
    inline float name##f(float x) { return float(__VA_ARGS__); }                                   \
    inline float name(float x) { return name##f(x); }                                              \
    inline double name(double x) { return __VA_ARGS__; }
SIMT_CUDA_MATH(rsqrt, 1 / sqrt(x))
SIMT_CUDA_MATH(rcbrt, 1 / cbrt(x))
SIMT_CUDA_MATH(exp10, pow(10.0, double(x)))
// Exact where the result is: multiples of one half are told apart before pi is multiplied.
inline double simt_sine_of_turn(double x, int quarter) {
    double near = rint(2 * x), rest = 3.14159265358979323846 * (x - near / 2);
    int turn = (int)(near - 4 * floor(near / 4)) + quarter;
    double value = turn & 1 ? cos(rest) : sin(rest);
    // Of zeros sinpi has the sign of x, and cospi none.
    if (value == 0) return quarter ? 0.0 : copysign(0.0, x);
    return turn & 2 ? -value : value;
}
SIMT_CUDA_MATH(sinpi, simt_sine_of_turn(x, 0))
SIMT_CUDA_MATH(cospi, simt_sine_of_turn(x, 1))
SIMT_CUDA_MATH(normcdf, 0.5 * erfc(-0.70710678118654752440 * x))
// The inverse of erf: an approximation, then two steps of Newton's method.
inline double simt_inverse_erf(double y, double rest) {
    if (!(rest > 0) || y <= -1) return fabs(y) == 1 ? y * __builtin_inf() : __builtin_nan("");
    if (y < 0) return -simt_inverse_erf(-y, 2 - rest);
    double t = log(rest) + log1p(y), u = 4.3307467508 + t / 2;
    double x = copysign(sqrt(sqrt(u * u - t / 0.147) - u), y);
    for (int i = 0; i < 3; i++) {
        double error = x < 1 ? erf(x) - y : rest - erfc(x);
        double step = error * 0.88622692545275801365 * exp(x * x);
        x -= step / (1 + x * step);
    }
    return x;
}
SIMT_CUDA_MATH(erfinv, simt_inverse_erf(x, 1 - double(x)))
SIMT_CUDA_MATH(erfcinv, simt_inverse_erf(1 - double(x), x))
SIMT_CUDA_MATH(normcdfinv, -1.41421356237309504880 * erfcinv(2 * double(x)))
inline void sincosf(float x, float* sine, float* cosine) { *sine = sinf(x); *cosine = cosf(x); }
inline void sincos(float x, float* sine, float* cosine) { sincosf(x, sine, cosine); }
inline void sincos(double x, double* sine, double* cosine) { *sine = sin(x); *cosine = cos(x); }
inline void sincospif(float x, float* sine, float* cosine) {
    *sine = sinpif(x);
    *cosine = cospif(x);
}
inline void sincospi(double x, double* sine, double* cosine) {
    *sine = sinpi(x);
    *cosine = cospi(x);
}

#define SIMT_TEST(name, builtin)                                                                   \
    inline int name(float x) { return builtin(x) != 0; }                                           \
    inline int name(double x) { return builtin(x) != 0; }
SIMT_TEST(isnan, __builtin_isnan)
SIMT_TEST(isinf, __builtin_isinf)
SIMT_TEST(isfinite, __builtin_isfinite)
SIMT_TEST(signbit, __builtin_signbit)

// Fast functions. A GPU computes __powf(x, y) as 2 ** (y * log2(x)), so a negative x gives NaN.
#define SIMT_FAST(name) inline float __##name(float x) { return name(x); }
SIMT_FAST(expf)  SIMT_FAST(exp10f)  SIMT_FAST(logf)  SIMT_FAST(log2f)  SIMT_FAST(log10f)
SIMT_FAST(sinf)  SIMT_FAST(cosf)    SIMT_FAST(tanf)  SIMT_FAST(tanhf)
inline float __powf(float x, float y) { return exp2f(y * log2f(x)); }
inline void __sincosf(float x, float* sine, float* cosine) { sincosf(x, sine, cosine); }
inline float fdividef(float x, float y) { return x / y; }
// 0 where y is above 2 ** 126.
inline float __fdividef(float x, float y) { return fabsf(y) > 8.507059e37f ? x * 0.0f : x / y; }
// 0 for NaN.
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// Rounded to the nearest, and never fused with another operation. Here the compiler fuses nothing
// at all (-ffp-contract=off).
#define SIMT_NEAREST(T, prefix, fma_name)                                                          \
    inline T __##prefix##add_rn(T x, T y) { return x + y; }                                        \
    inline T __##prefix##sub_rn(T x, T y) { return x - y; }                                        \
    inline T __##prefix##mul_rn(T x, T y) { return x * y; }                                        \
    inline T __##prefix##div_rn(T x, T y) { return x / y; }                                        \
    inline T __##prefix##rcp_rn(T x) { return T(1) / x; }                                          \
    inline T __##prefix##sqrt_rn(T x) { return sqrt(x); }                                          \
    inline T fma_name(T x, T y, T z) { return fma(x, y, z); }
SIMT_NEAREST(float, f, __fmaf_rn)
SIMT_NEAREST(double, d, __fma_rn)

// Rounded down (rd), up (ru) or towards zero (rz): the processor has these modes, too. A mode is
// set for one operation. The empty asm keeps the operation behind that, and before the next change.
#if defined(__x86_64__)
enum { SIMT_MODE_DOWN = 1 << 13, SIMT_MODE_UP = 2 << 13, SIMT_MODE_ZERO = 3 << 13 };
template <class T> SIMT_PART void simt_keep_one(T& x) {
    __asm__ __volatile__("" : "+x"(x)::"memory");
}
SIMT_PART unsigned simt_rounding() { return __builtin_ia32_stmxcsr(); }
SIMT_PART void simt_set_rounding(unsigned mode) { __builtin_ia32_ldmxcsr(mode); }
#else
enum { SIMT_MODE_UP = 1 << 22, SIMT_MODE_DOWN = 2 << 22, SIMT_MODE_ZERO = 3 << 22 };
template <class T> SIMT_PART void simt_keep_one(T& x) {
    __asm__ __volatile__("" : "+w"(x)::"memory");
}
SIMT_PART unsigned long simt_rounding() {
    unsigned long mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
SIMT_PART void simt_set_rounding(unsigned long mode) {
    __asm__ __volatile__("msr fpcr, %0" ::"r"(mode));
}
#endif
template <class... T> SIMT_PART void simt_keep(T&... x) { (simt_keep_one(x), ...); }
#define SIMT_ROUNDED(T, name, mode, parameters, names, operation)                                  \
    inline SIMT_UNSEEN T name parameters {                                                         \
        auto before = simt_rounding();                                                             \
        simt_set_rounding(before | mode);                                                          \
        simt_keep names;                                                                           \
        T result = operation;                                                                      \
        simt_keep(result);                                                                         \
        simt_set_rounding(before);                                                                 \
        return result;                                                                             \
    }
#define SIMT_DIRECTED(T, prefix, fma_name, suffix, mode)                                           \
    SIMT_ROUNDED(T, __##prefix##add_##suffix, mode, (T x, T y), (x, y), x + y)                     \
    SIMT_ROUNDED(T, __##prefix##sub_##suffix, mode, (T x, T y), (x, y), x - y)                     \
    SIMT_ROUNDED(T, __##prefix##mul_##suffix, mode, (T x, T y), (x, y), x * y)                     \
    SIMT_ROUNDED(T, __##prefix##div_##suffix, mode, (T x, T y), (x, y), x / y)                     \
    SIMT_ROUNDED(T, __##prefix##rcp_##suffix, mode, (T x), (x), 1 / x)                             \
    SIMT_ROUNDED(T, __##prefix##sqrt_##suffix, mode, (T x), (x), sqrt(x))                          \
    SIMT_ROUNDED(T, fma_name##_##suffix, mode, (T x, T y, T z), (x, y, z), fma(x, y, z))
#define SIMT_DIRECTIONS(T, prefix, fma_name)                                                       \
    SIMT_DIRECTED(T, prefix, fma_name, rd, SIMT_MODE_DOWN)                                         \
    SIMT_DIRECTED(T, prefix, fma_name, ru, SIMT_MODE_UP)                                           \
    SIMT_DIRECTED(T, prefix, fma_name, rz, SIMT_MODE_ZERO)
SIMT_DIRECTIONS(float, f, __fmaf)
SIMT_DIRECTIONS(double, d, __fma)
inline float __frsqrt_rn(float x) { return float(1.0 / sqrt(double(x))); }

// min and max convert as C++ does: those of an int and an unsigned are unsigned. Of a float and NaN
// the result is the float.
#define SIMT_MIN_MAX(A, B, R)                                                                      \
    inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; }                                   \
    inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
#define SIMT_MIN_MAX_MIXED(A, B)                                                                   \
    SIMT_MIN_MAX(A, A, A) SIMT_MIN_MAX(A, B, B) SIMT_MIN_MAX(B, A, B) SIMT_MIN_MAX(B, B, B)
SIMT_MIN_MAX_MIXED(int, unsigned)
SIMT_MIN_MAX_MIXED(long, unsigned long)
SIMT_MIN_MAX_MIXED(long long, unsigned long long)
#define SIMT_MIN_MAX_FLOAT(A, B, R)                                                                \
    inline R min(A a, B b) { return fmin(R(a), R(b)); }                                            \
    inline R max(A a, B b) { return fmax(R(a), R(b)); }
SIMT_MIN_MAX_FLOAT(float, float, float)    SIMT_MIN_MAX_FLOAT(float, double, double)
SIMT_MIN_MAX_FLOAT(double, float, double)  SIMT_MIN_MAX_FLOAT(double, double, double)

#define SIMT_ABS(name, T) inline T name(T x) { return x < 0 ? -x : x; }
SIMT_ABS(abs, int)    SIMT_ABS(abs, long)    SIMT_ABS(abs, long long)
SIMT_ABS(labs, long)  SIMT_ABS(llabs, long long)
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }

// ---- 4. bits and conversions --------------------------------------------------------------------

// The same bits under another type; a narrower one gets or gives the low bytes.
template <class To, class From> SIMT_PART To simt_bits(From from) {
    To to{};
    __builtin_memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
    return to;
}
inline unsigned __float_as_uint(float x) { return simt_bits<unsigned>(x); }
inline int __float_as_int(float x) { return simt_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return simt_bits<float>(x); }
inline float __int_as_float(int x) { return simt_bits<float>(x); }
inline long long __double_as_longlong(double x) { return simt_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return simt_bits<double>(x); }
inline int __double2loint(double x) { return simt_bits<int>(x); }
inline int __double2hiint(double x) { return int(simt_bits<long long>(x) >> 32); }
inline double __hiloint2double(int high, int low) {
    return simt_bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
// The place of the lowest bit set, from 1; 0 for none.
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
// Reversed bits: swap neighbours, then pairs, then fours, then bytes.
inline unsigned __brev(unsigned x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}
inline unsigned long long __brevll(unsigned long long x) {
    return (unsigned long long)__brev(unsigned(x)) << 32 | __brev(unsigned(x >> 32));
}
// Four of the eight bytes y:x, byte 0 lowest; each hexadecimal digit of `selector` picks one.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        int byte = selector >> 4 * i & 7;
        result |= unsigned(bytes >> byte * 8 & 0xff) << 8 * i;
    }
    return result;
}
// high:low shifted, its upper (left) or lower (right) word. The shift is taken modulo 32, or (..c)
// limited to 32.
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
    return shift < 32 ? __funnelshift_l(low, high, shift) : low;
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
    return shift < 32 ? __funnelshift_r(low, high, shift) : high;
}

// Products: the upper half, or of the low 24 bits.
inline int __mulhi(int x, int y) { return int((long long)x * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) {
    return unsigned((unsigned long long)x * y >> 32);
}
inline long long __mul64hi(long long x, long long y) { return (long long)((__int128)x * y >> 64); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline unsigned __umul24(unsigned x, unsigned y) { return (x & 0xffffffu) * (y & 0xffffffu); }
SIMT_PART unsigned simt_low24(int x) { return unsigned(int(unsigned(x) << 8) >> 8); }
inline int __mul24(int x, int y) { return int(simt_low24(x) * simt_low24(y)); }
inline unsigned __sad(int x, int y, unsigned z) {
    return (x > y ? unsigned(x) - unsigned(y) : unsigned(y) - unsigned(x)) + z;
}
inline unsigned __usad(unsigned x, unsigned y, unsigned z) { return (x > y ? x - y : y - x) + z; }
// The sum of four products of bytes.
inline int __dp4a(int x, int y, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (signed char)(x >> i) * (signed char)(y >> i);
    return sum;
}
inline unsigned __dp4a(unsigned x, unsigned y, unsigned sum) {
    for (int i = 0; i < 32; i += 8) sum += (x >> i & 0xff) * (y >> i & 0xff);
    return sum;
}

// Averages that do not overflow: rounded down, and (r) up.
inline int __hadd(int x, int y) { return int(((long long)x + y) >> 1); }
inline int __rhadd(int x, int y) { return int(((long long)x + y + 1) >> 1); }
inline unsigned __uhadd(unsigned x, unsigned y) {
    return unsigned(((unsigned long long)x + y) >> 1);
}
inline unsigned __urhadd(unsigned x, unsigned y) {
    return unsigned(((unsigned long long)x + y + 1) >> 1);
}

// Two halves or four bytes of a word at a time: L is the type of one, `s` and `u` in a name its
// sign, ss and us that it stays within its range.
template <class L> constexpr int simt_most = L(-1) < L(0) ? (1 << (8 * sizeof(L) - 1)) - 1 : L(-1);
template <class L> constexpr int simt_least = L(-1) < L(0) ? -simt_most<L> - 1 : 0;
template <class L> SIMT_PART int simt_saturated(int x) {
    return x > simt_most<L> ? simt_most<L> : x < simt_least<L> ? simt_least<L> : x;
}
template <class L, class F> SIMT_PART unsigned simt_each(unsigned x, unsigned y, F f) {
    constexpr int bits = 8 * sizeof(L);
    unsigned result = 0;
    for (int i = 0; i < 32; i += bits)
        result |= unsigned(f(int(L(x >> i)), int(L(y >> i))) & ((1 << bits) - 1)) << i;
    return result;
}
// a, b: the parts as int
#define SIMT_LANES(name, S2, S4, ...)                                                              \
    inline unsigned name##2(unsigned x, unsigned y) {                                              \
        using L = S2;                                                                              \
        return simt_each<L>(x, y, [](int a, int b) { return int(__VA_ARGS__); });                  \
    }                                                                                              \
    inline unsigned name##4(unsigned x, unsigned y) {                                              \
        using L = S4;                                                                              \
        return simt_each<L>(x, y, [](int a, int b) { return int(__VA_ARGS__); });                  \
    }
#define SIMT_LANES_S(name, ...) SIMT_LANES(name, short, signed char, __VA_ARGS__)
#define SIMT_LANES_U(name, ...) SIMT_LANES(name, unsigned short, unsigned char, __VA_ARGS__)
SIMT_LANES_U(__vadd, a + b)            SIMT_LANES_U(__vsub, a - b)
SIMT_LANES_S(__vaddss, simt_saturated<L>(a + b))
SIMT_LANES_U(__vaddus, simt_saturated<L>(a + b))
SIMT_LANES_S(__vsubss, simt_saturated<L>(a - b))
SIMT_LANES_U(__vsubus, simt_saturated<L>(a - b))
SIMT_LANES_S(__vmaxs, a > b ? a : b)   SIMT_LANES_U(__vmaxu, a > b ? a : b)
SIMT_LANES_S(__vmins, a < b ? a : b)   SIMT_LANES_U(__vminu, a < b ? a : b)
SIMT_LANES_U(__vavgu, (a + b + 1) >> 1)
SIMT_LANES_U(__vhaddu, (a + b) >> 1)
// Halves are rounded away from zero.
SIMT_LANES_S(__vavgs, (a + b + (a + b >= 0)) >> 1)
SIMT_LANES_S(__vabsdiffs, a > b ? a - b : b - a)
SIMT_LANES_U(__vabsdiffu, a > b ? a - b : b - a)
// A comparison gives all bits (cmp), or 1 (set).
#define SIMT_COMPARES(suffix, LANES, ...)                                                          \
    LANES(__vcmp##suffix, (__VA_ARGS__) ? -1 : 0)                                                  \
    LANES(__vset##suffix, (__VA_ARGS__) ? 1 : 0)
SIMT_COMPARES(eq, SIMT_LANES_U, a == b)   SIMT_COMPARES(ne, SIMT_LANES_U, a != b)
SIMT_COMPARES(gts, SIMT_LANES_S, a > b)   SIMT_COMPARES(gtu, SIMT_LANES_U, a > b)
SIMT_COMPARES(ges, SIMT_LANES_S, a >= b)  SIMT_COMPARES(geu, SIMT_LANES_U, a >= b)
SIMT_COMPARES(lts, SIMT_LANES_S, a < b)   SIMT_COMPARES(ltu, SIMT_LANES_U, a < b)
SIMT_COMPARES(les, SIMT_LANES_S, a <= b)  SIMT_COMPARES(leu, SIMT_LANES_U, a <= b)
// Of one word. abs and neg of the least number are itself; with ss they are the greatest one.
#define SIMT_LANES1(name, ...)                                                                     \
    inline unsigned name##2(unsigned x) {                                                          \
        using L = short;                                                                           \
        return simt_each<L>(x, 0, [](int a, int) { return int(__VA_ARGS__); });                    \
    }                                                                                              \
    inline unsigned name##4(unsigned x) {                                                          \
        using L = signed char;                                                                     \
        return simt_each<L>(x, 0, [](int a, int) { return int(__VA_ARGS__); });                    \
    }
SIMT_LANES1(__vneg, -a)  SIMT_LANES1(__vnegss, simt_saturated<L>(-a))
SIMT_LANES1(__vabs, a < 0 ? -a : a)
SIMT_LANES1(__vabsss, simt_saturated<L>(a < 0 ? -a : a))
// The sum of the differences.
#define SIMT_SADS(name, differences)                                                               \
    inline unsigned name##2(unsigned x, unsigned y) {                                              \
        unsigned all = differences##2(x, y);                                                       \
        return (all & 0xffff) + (all >> 16);                                                       \
    }                                                                                              \
    inline unsigned name##4(unsigned x, unsigned y) {                                              \
        unsigned all = differences##4(x, y);                                                       \
        return (all & 0xff) + (all >> 8 & 0xff) + (all >> 16 & 0xff) + (all >> 24);                \
    }
SIMT_SADS(__vsads, __vabsdiffs)  SIMT_SADS(__vsadu, __vabsdiffu)

// A whole floating-point number as an integer. A number out of range becomes the nearest limit. NaN
// becomes 0, or the top bit alone where one of the two types has 64 bits. (A plain cast of such a
// number is undefined in C++, here as on a GPU.)
template <class To, class From> inline To simt_to_integer(From x) {
    constexpr bool has_sign = To(-1) < To(0);
    constexpr bool has_64_bits = sizeof(From) == 8 || sizeof(To) == 8;
    constexpr To most = To(~0ull >> (64 - 8 * int(sizeof(To)) + has_sign));
    constexpr To least = has_sign ? To(-most - 1) : To(0);
    if (isnan(x)) return has_64_bits ? To(1ull << (8 * sizeof(To) - 1)) : To(0);
    return x >= From(most) ? most : x <= From(least) ? least : To(x);
}
#define SIMT_TO_INTEGER(From, name, To)                                                            \
    inline To __##name##_rn(From x) { return simt_to_integer<To>(rint(x)); }                       \
    inline To __##name##_rz(From x) { return simt_to_integer<To>(trunc(x)); }                      \
    inline To __##name##_ru(From x) { return simt_to_integer<To>(ceil(x)); }                       \
    inline To __##name##_rd(From x) { return simt_to_integer<To>(floor(x)); }
SIMT_TO_INTEGER(float, float2int, int)
SIMT_TO_INTEGER(float, float2uint, unsigned)
SIMT_TO_INTEGER(float, float2ll, long long)
SIMT_TO_INTEGER(float, float2ull, unsigned long long)
SIMT_TO_INTEGER(double, double2int, int)
SIMT_TO_INTEGER(double, double2uint, unsigned)
SIMT_TO_INTEGER(double, double2ll, long long)
SIMT_TO_INTEGER(double, double2ull, unsigned long long)

// To a type with fewer digits. A cast rounds to the nearest; where that is the wrong direction, the
// result is the neighbour. The type EXACT holds both numbers.
#define SIMT_ROUND(From, name, To, EXACT)                                                          \
    inline To __##name##_rn(From x) { return To(x); }                                              \
    inline To __##name##_ru(From x) {                                                              \
        return EXACT(To(x)) < EXACT(x) ? nextafter(To(x), To(__builtin_inf())) : To(x);            \
    }                                                                                              \
    inline To __##name##_rd(From x) {                                                              \
        return EXACT(To(x)) > EXACT(x) ? nextafter(To(x), To(-__builtin_inf())) : To(x);           \
    }                                                                                              \
    inline To __##name##_rz(From x) { return EXACT(x) < 0 ? __##name##_ru(x) : __##name##_rd(x); }
SIMT_ROUND(double, double2float, float, double)
SIMT_ROUND(int, int2float, float, double)
SIMT_ROUND(unsigned, uint2float, float, double)
SIMT_ROUND(long long, ll2float, float, __int128)
SIMT_ROUND(unsigned long long, ull2float, float, __int128)
SIMT_ROUND(long long, ll2double, double, __int128)
SIMT_ROUND(unsigned long long, ull2double, double, __int128)
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }

// ---- 5. loads and stores ------------------------------------------------------------------------
// The cache hints change no result. These are macros, so that the access is at the user's line.

#define __ldg(...) (*(__VA_ARGS__))
#define __ldca(...) (*(__VA_ARGS__))
#define __ldcg(...) (*(__VA_ARGS__))
#define __ldcs(...) (*(__VA_ARGS__))
#define __ldlu(...) (*(__VA_ARGS__))
// Reads memory again, whatever is in a register.
#define __ldcv(...) (*(simt_forget(), (__VA_ARGS__)))
#define __stwb(p, ...) ((void)(*(p) = (__VA_ARGS__)))
#define __stcg(p, ...) ((void)(*(p) = (__VA_ARGS__)))
#define __stcs(p, ...) ((void)(*(p) = (__VA_ARGS__)))
#define __stwt(p, ...) ((void)(*(p) = (__VA_ARGS__)))
// clang's checks leave the copy of a large struct to plain memcpy, which they would not see.
#if defined(SIMT_CHECKED) && defined(__clang__)
#ifdef __x86_64__
#define SIMT_INSTEAD(name)                                                                         \
    __asm__(".text\n.hidden " #name "\n.globl " #name "\n" #name ": jmp __tsan_" #name "@PLT\n")
#else
#define SIMT_INSTEAD(name)                                                                         \
    __asm__(".text\n.hidden " #name "\n.globl " #name "\n" #name ": b __tsan_" #name "\n")
#endif
SIMT_INSTEAD(memcpy);
SIMT_INSTEAD(memmove);
SIMT_INSTEAD(memset);
#endif
SIMT_INLINE void simt_forget() { __asm__ __volatile__("" ::: "memory"); }

#ifdef SIMT_CHECKED                           // so that each access is seen
}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t bytes);
extern "C" void* __tsan_memset(void* to, int byte, size_t bytes);
namespace {
SIMT_INLINE void* memcpy(void* to, const void* from, size_t bytes) {
    return __tsan_memcpy(to, from, bytes);
}
SIMT_INLINE void* memset(void* to, int byte, size_t bytes) {
    return __tsan_memset(to, byte, bytes);
}
#else
inline void* memcpy(void* to, const void* from, size_t bytes) {
    return __builtin_memcpy(to, from, bytes);
}
inline void* memset(void* to, int byte, size_t bytes) { return __builtin_memset(to, byte, bytes); }
#endif

// ---- 6. barriers and fences ---------------------------------------------------------------------
// At a barrier the runtime stops this thread, runs the others of the block up to the barrier, and
// resumes. A fence orders what blocks on different operating-system threads see of each other's
// memory.

SIMT_CALL void __syncthreads() { simt_barrier(SIMT_BARRIER, 0, SIMT_PC); }
SIMT_CALL int __syncthreads_count(int predicate) {
    return simt_barrier(SIMT_BARRIER_COUNT, predicate != 0, SIMT_PC);
}
SIMT_CALL int __syncthreads_and(int predicate) {
    return simt_barrier(SIMT_BARRIER_AND, predicate != 0, SIMT_PC);
}
SIMT_CALL int __syncthreads_or(int predicate) {
    return simt_barrier(SIMT_BARRIER_OR, predicate != 0, SIMT_PC);
}
SIMT_CALL void __syncwarp(unsigned mask = ~0u) { simt_warp(SIMT_SYNCWARP, mask, 0, 0, SIMT_PC); }

#ifdef SIMT_CHECKED
SIMT_CALL void __threadfence() { simt_fence(SIMT_PC); }
SIMT_CALL void __threadfence_system() { simt_fence(SIMT_PC); }
SIMT_CALL void __threadfence_block() { simt_fence(SIMT_PC); }
#else
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { simt_forget(); }
#endif

// ---- 7. warp functions --------------------------------------------------------------------------
// Each lane of `mask` calls simt_warp, which computes the results of all when the last one arrives.

SIMT_PART int simt_lane() { return int(simt_me->current % SIMT_WARP); }

// A shuffle works within segments of `width` lanes. It reads lane `source`, or its own lane where
// `source` is outside the segment.
template <class T> inline T* simt_same(T* one) { return one; }              // see build.py
template <class T> inline T&& simt_same(T&& one) { return static_cast<T&&>(one); }

template <class T>
SIMT_PART T simt_shuffle(unsigned mask, T value, int width, int source, bool inside, void* pc) {
    if (width < 1 || width > SIMT_WARP || (width & (width - 1)))
        simt_trap("the width of a shuffle must be 1, 2, 4, 8, 16 or 32", pc);
    unsigned long long bits = simt_bits<unsigned long long>(value);
    return simt_bits<T>(simt_warp(SIMT_SHUFFLE, mask, bits, inside ? source : simt_lane(), pc));
}
// First and last lane of this lane's segment.
SIMT_PART int simt_first(int width) { return simt_lane() & ~(width - 1); }
SIMT_PART int simt_last(int width) { return simt_lane() | (width - 1); }

// As in hardware: five bits of the distance count, and an exchange (xor) can read from an earlier
// segment, but not from a later one.
#define SIMT_SHUFFLES(T)                                                                           \
    SIMT_CALL T __shfl_sync(unsigned mask, T value, int source, int width = SIMT_WARP) {           \
        source = simt_first(width) | (source & (width - 1));                                       \
        return simt_shuffle(mask, value, width, source, true, SIMT_PC);                            \
    }                                                                                              \
    SIMT_CALL T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = SIMT_WARP) { \
        int source = simt_lane() - int(distance & 31);                                             \
        return simt_shuffle(mask, value, width, source, source >= simt_first(width), SIMT_PC);     \
    }                                                                                              \
    SIMT_CALL T                                                                                    \
    __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = SIMT_WARP) {           \
        int source = simt_lane() + int(distance & 31);                                             \
        return simt_shuffle(mask, value, width, source, source <= simt_last(width), SIMT_PC);      \
    }                                                                                              \
    SIMT_CALL T __shfl_xor_sync(unsigned mask, T value, int bits, int width = SIMT_WARP) {         \
        int source = simt_lane() ^ (bits & 31);                                                    \
        return simt_shuffle(mask, value, width, source, source <= simt_last(width), SIMT_PC);      \
    }
// Which lanes hold the same bits as this one; whether all do.
#define SIMT_MATCHES(T)                                                                            \
    SIMT_CALL unsigned __match_any_sync(unsigned mask, T value) {                                  \
        unsigned long long bits = simt_bits<unsigned long long>(value);                            \
        return unsigned(simt_warp(SIMT_MATCH_ANY, mask, bits, 0, SIMT_PC));                        \
    }                                                                                              \
    SIMT_CALL unsigned __match_all_sync(unsigned mask, T value, int* all) {                        \
        unsigned long long bits = simt_bits<unsigned long long>(value);                            \
        unsigned equal = unsigned(simt_warp(SIMT_MATCH_ALL, mask, bits, 0, SIMT_PC));              \
        *all = equal != 0;                                                                         \
        return equal;                                                                              \
    }
#define SIMT_SHUFFLES_MATCHES(T) SIMT_SHUFFLES(T) SIMT_MATCHES(T)
SIMT_SHUFFLES_MATCHES(int)        SIMT_SHUFFLES_MATCHES(unsigned)
SIMT_SHUFFLES_MATCHES(long)       SIMT_SHUFFLES_MATCHES(unsigned long)
SIMT_SHUFFLES_MATCHES(long long)  SIMT_SHUFFLES_MATCHES(unsigned long long)
SIMT_SHUFFLES_MATCHES(float)      SIMT_SHUFFLES_MATCHES(double)

#define SIMT_VOTE(name, T, kind)                                                                   \
    SIMT_CALL T __##name##_sync(unsigned mask, int predicate) {                                    \
        return T(simt_warp(kind, mask, predicate != 0, 0, SIMT_PC));                               \
    }
SIMT_VOTE(ballot, unsigned, SIMT_BALLOT)
SIMT_VOTE(any, int, SIMT_ANY)
SIMT_VOTE(all, int, SIMT_ALL)

// One result for all lanes of the mask. An int goes to the runtime with its sign in all 64 bits.
#define SIMT_REDUCE(name, T, kind)                                                                 \
    SIMT_CALL T __reduce_##name##_sync(unsigned mask, T value) {                                   \
        return T(simt_warp(kind, mask, (unsigned long long)(long long)value, 0, SIMT_PC));         \
    }
SIMT_REDUCE(add, unsigned, SIMT_ADD)    SIMT_REDUCE(add, int, SIMT_ADD)
SIMT_REDUCE(min, unsigned, SIMT_MIN)    SIMT_REDUCE(min, int, SIMT_MIN_SIGNED)
SIMT_REDUCE(max, unsigned, SIMT_MAX)    SIMT_REDUCE(max, int, SIMT_MAX_SIGNED)
SIMT_REDUCE(and, unsigned, SIMT_AND)    SIMT_REDUCE(or, unsigned, SIMT_OR)
SIMT_REDUCE(xor, unsigned, SIMT_XOR)

// On a GPU these are the lanes that run in lockstep now. Here each lane runs alone, so these are
// the lanes that arrive at the same place when all have gone as far as they can.
SIMT_CALL unsigned __activemask() { return simt_active(SIMT_PC); }

// ---- 8. atomics ---------------------------------------------------------------------------------
// One thread at a time changes the value, and gets the old one. Blocks run in parallel, on several
// cores, so these are atomic operations of the processor.

#ifdef SIMT_CHECKED
#define SIMT_ATOMIC(T) SIMT_CALL T
#define SIMT_NOTE(address) simt_atomic(address, sizeof *(address), SIMT_PC)
#define SIMT_NOTE_SWAP(address) simt_atomic_swap(address, sizeof *(address), SIMT_PC)
#else
#define SIMT_ATOMIC(T) inline T
#define SIMT_NOTE(address) ((void)0)
#define SIMT_NOTE_SWAP(address) ((void)0)
#endif

#define SIMT_RELAXED __ATOMIC_RELAXED, __ATOMIC_RELAXED

// Where the processor has the operation, in one step.
#define SIMT_STEP(name, T, builtin)                                                                \
    SIMT_ATOMIC(T) name(T* address, T value) {                                                     \
        SIMT_NOTE(address);                                                                        \
        return builtin(address, value, __ATOMIC_RELAXED);                                          \
    }
// Where it has not: compute the new value, and store it if the old one is still there; else repeat.
#define SIMT_RETRY(name, T, new_value)                                                             \
    SIMT_ATOMIC(T) name(T* address, T value) {                                                     \
        SIMT_NOTE(address);                                                                        \
        T old, next;                                                                               \
        __atomic_load(address, &old, __ATOMIC_RELAXED);                                            \
        do next = new_value;                                                                       \
        while (!__atomic_compare_exchange(address, &old, &next, true, SIMT_RELAXED));              \
        return old;                                                                                \
    }
#define SIMT_SWAP(name, T, unused)                                                                 \
    SIMT_ATOMIC(T) name(T* address, T expected, T value) {                                         \
        SIMT_NOTE_SWAP(address);                                                                   \
        __atomic_compare_exchange_n(address, &expected, value, false, SIMT_RELAXED);               \
        return expected;                                                                           \
    }
// Atomic for the GPU, the block, or the whole machine: all one here.
#define SIMT_EACH(MACRO, name, T, how)                                                             \
    MACRO(name, T, how) MACRO(name##_block, T, how) MACRO(name##_system, T, how)
#define SIMT_INTEGER_ATOMICS(T)                                                                    \
    SIMT_EACH(SIMT_STEP, atomicAnd, T, __atomic_fetch_and)                                         \
    SIMT_EACH(SIMT_STEP, atomicOr, T, __atomic_fetch_or)                                           \
    SIMT_EACH(SIMT_STEP, atomicXor, T, __atomic_fetch_xor)                                         \
    SIMT_EACH(SIMT_RETRY, atomicMin, T, min(old, value))                                           \
    SIMT_EACH(SIMT_RETRY, atomicMax, T, max(old, value))

SIMT_INTEGER_ATOMICS(int)        SIMT_INTEGER_ATOMICS(unsigned)
SIMT_INTEGER_ATOMICS(long long)  SIMT_INTEGER_ATOMICS(unsigned long long)
SIMT_EACH(SIMT_STEP, atomicAdd, int, __atomic_fetch_add)
SIMT_EACH(SIMT_STEP, atomicAdd, unsigned, __atomic_fetch_add)
SIMT_EACH(SIMT_STEP, atomicSub, int, __atomic_fetch_sub)
SIMT_EACH(SIMT_STEP, atomicSub, unsigned, __atomic_fetch_sub)
SIMT_EACH(SIMT_STEP, atomicExch, int, __atomic_exchange_n)
SIMT_EACH(SIMT_STEP, atomicExch, unsigned, __atomic_exchange_n)
SIMT_EACH(SIMT_STEP, atomicAdd, unsigned long long, __atomic_fetch_add)
SIMT_EACH(SIMT_STEP, atomicExch, unsigned long long, __atomic_exchange_n)
SIMT_EACH(SIMT_RETRY, atomicAdd, float, old + value)
// Templates, so that a kernel's own function of that name, as for old GPUs, is preferred.
#define SIMT_RETRY_IF_NONE(name, T, new_value)                                                     \
    template <class = void> SIMT_RETRY(name, T, new_value)
SIMT_EACH(SIMT_RETRY_IF_NONE, atomicAdd, double, old + value)
SIMT_EACH(SIMT_RETRY, atomicExch, float, value)
// Counts from 0 to value, then from 0 again; and down.
SIMT_EACH(SIMT_RETRY, atomicInc, unsigned, old >= value ? 0 : old + 1)
SIMT_EACH(SIMT_RETRY, atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
SIMT_EACH(SIMT_SWAP, atomicCAS, int, )             SIMT_EACH(SIMT_SWAP, atomicCAS, unsigned, )
SIMT_EACH(SIMT_SWAP, atomicCAS, unsigned short, )
SIMT_EACH(SIMT_SWAP, atomicCAS, unsigned long long, )

// ---- 9. the rest --------------------------------------------------------------------------------

// The address behind `extern __shared__ T name[];`
SIMT_CALL void* simt_dynamic() { return simt_me->dynamic; }
SIMT_CALL void simt_stop_here(const char* reason) { simt_trap(reason, SIMT_PC); }
SIMT_CALL void simt_wait_here(const char* reason) { simt_pause(reason, SIMT_PC); }
SIMT_CALL void* malloc(size_t bytes) { return simt_allocate(bytes, 1, SIMT_PC); }
SIMT_CALL void free(void* block) { simt_free(block, SIMT_PC); }
SIMT_CALL void __trap() { simt_trap("__trap()", SIMT_PC); }
inline void __brkpt() {}
// It may wait for what another thread will write.
SIMT_CALL void __nanosleep(unsigned) { simt_pause(0, SIMT_PC); }
#define printf simt_print
#define assert(...) ((__VA_ARGS__) ? (void)0 : simt_stop_here("assert(" #__VA_ARGS__ ")"))

// A counter of the processor's: enough to see that time passes, not to compare with a GPU's cycles.
SIMT_INLINE long long clock64() {
#if defined(__x86_64__)
    return (long long)__builtin_ia32_rdtsc();
#else
    long long ticks;
    __asm__ __volatile__("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#endif
}
SIMT_INLINE long clock() { return long(clock64()); }

}  // namespace

// new and delete use the kernels' heap. They are of this library only.
namespace std { enum class align_val_t : size_t {}; }
#pragma GCC visibility push(hidden)
#define SIMT_HEAP_CALL SIMT_UNSEEN __attribute__((noinline))
SIMT_HEAP_CALL void* operator new(size_t bytes) { return simt_allocate(bytes, 1, SIMT_PC); }
SIMT_HEAP_CALL void* operator new[](size_t bytes) { return simt_allocate(bytes, 1, SIMT_PC); }
SIMT_HEAP_CALL void* operator new(size_t bytes, std::align_val_t alignment) {
    return simt_allocate(bytes, size_t(alignment), SIMT_PC);
}
SIMT_HEAP_CALL void* operator new[](size_t bytes, std::align_val_t alignment) {
    return simt_allocate(bytes, size_t(alignment), SIMT_PC);
}
#define SIMT_DELETE(...)                                                                           \
    SIMT_HEAP_CALL void operator delete(__VA_ARGS__) noexcept {                                  \
        simt_free(block, SIMT_PC);                                                                 \
    }                                                                                              \
    SIMT_HEAP_CALL void operator delete[](__VA_ARGS__) noexcept {                                \
        simt_free(block, SIMT_PC);                                                                 \
    }
SIMT_DELETE(void* block)
SIMT_DELETE(void* block, size_t)
SIMT_DELETE(void* block, std::align_val_t)
SIMT_DELETE(void* block, size_t, std::align_val_t)
#pragma GCC visibility pop
// An object at an address.
inline void* operator new(size_t, void* place) noexcept { return place; }
inline void* operator new[](size_t, void* place) noexcept { return place; }

// Where a variable in device memory is, for who sets it. scope: its namespace, or nothing
#define SIMT_EXPORT_VARIABLE(name, scope)                                                          \
    extern "C" __attribute__((visibility("default"))) void* simt_variable_##name(                  \
        size_t* simt_bytes) {                                                                      \
        *simt_bytes = sizeof(scope::name);                                                         \
        return (void*)&scope::name;                                                                \
    }

// At the end, so that the compiler's message names what cannot run here. A kernel has a plain
// branch for it: #ifdef __CUDA_ARCH__ ... #else.
#define asm simt_inline_PTX_runs_only_on_a_GPU
#define __asm simt_inline_PTX_runs_only_on_a_GPU
#define __asm__ simt_inline_PTX_runs_only_on_a_GPU
