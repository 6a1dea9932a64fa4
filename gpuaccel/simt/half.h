// The 16-bit numbers of cuda_fp16.h and cuda_bf16.h: __half, __half2, __nv_bfloat16,
// __nv_bfloat162, their functions and operators.
//
// An operation converts to float, computes there, and rounds the result to the nearest (ties to
// even). A float has more than twice the digits of either type and two more, so sums, products,
// quotients and roots are those that rounding the exact result once would give. A fused
// multiply-add needs the digits of a double, and more: its sum is rounded to odd first.
#pragma once
#include "simt.h"

namespace {

// ---- 1. rounding --------------------------------------------------------------------------------

enum simt_direction { SIMT_TO_NEAREST, SIMT_TO_ZERO, SIMT_UP, SIMT_DOWN };

// The 16-bit number next to a double: `digits` of its fraction are kept, and the smallest normal
// number is 2 ** `lowest`. So one function rounds to both types.
template <int digits, int lowest>
inline unsigned short simt_narrow(double x, simt_direction direction = SIMT_TO_NEAREST) {
    unsigned long long bits = simt_bits<unsigned long long>(x);
    unsigned short sign = bits >> 63 ? 0x8000 : 0;
    constexpr unsigned infinity = 0x7fffu >> digits << digits;
    if (x != x) return 0x7fff;
    double magnitude = __builtin_fabs(x);
    if (__builtin_isinf(magnitude)) return sign | infinity;
    // The distance of two neighbours at x is 2 ** step.
    int exponent = int(bits >> 52 & 2047) - 1023;
    int step = (exponent < lowest ? lowest : exponent) - digits;
    double steps = magnitude * simt_bits<double>((unsigned long long)(1023 - step) << 52);
    double whole = __builtin_floor(steps);
    double rest = steps - whole;
    bool away = false;
    if (direction == SIMT_TO_NEAREST)
        away = rest > 0.5 || (rest == 0.5 && (unsigned long long)whole % 2 == 1);
    else if (direction == SIMT_UP) away = rest > 0 && !sign;
    else if (direction == SIMT_DOWN) away = rest > 0 && sign;
    // A number is its fraction's steps on top of those of all smaller exponents.
    int smaller = exponent < lowest ? 0 : exponent - lowest;
    long long result = (long long)whole + away + ((long long)smaller << digits);
    if (result < infinity) return sign | (unsigned short)result;
    bool to_limit = direction == SIMT_TO_ZERO || (direction == SIMT_UP && sign)
                    || (direction == SIMT_DOWN && !sign);
    return sign | (infinity - to_limit);
}

// x * y + z, rounded to odd: where the sum is not exact, its last bit is set. Rounding that to
// fewer digits gives what rounding the exact sum gives. x * y is exact.
inline double simt_fused(float x, float y, float z) {
    double product = double(x) * y;
    double sum = product + z;
    double part = sum - product;
    double error = (product - (sum - part)) + (z - part);
    unsigned long long bits = simt_bits<unsigned long long>(sum);
    if (error != 0 && error == error && !__builtin_isinf(sum) && bits % 2 == 0) {
        bits += (error > 0) == (sum > 0) ? 1 : -1;
        return simt_bits<double>(bits);
    }
    return sum;
}

}  // namespace

// ---- 2. types -----------------------------------------------------------------------------------

struct __half_raw { unsigned short x; };
struct __nv_bfloat16_raw { unsigned short x; };

// Towards zero, and to the nearest limit of the type.
#define SIMT_HALF_CAST(To)                                                                         \
    explicit operator To() const { return simt_to_integer<To>(trunc(float(*this))); }
#define SIMT_HALF_TYPE(T, RAW, digits, lowest)                                                     \
    struct __align__(2) T {                                                                        \
        unsigned short __x;                                                                        \
        T() = default;                                                                             \
        constexpr T(RAW raw) : __x(raw.x) {}                                                       \
        T(float f) : __x(simt_narrow<digits, lowest>(f)) {}                                        \
        T(double f) : __x(simt_narrow<digits, lowest>(f)) {}                                       \
        T(short i) : T(double(i)) {}                                                               \
        T(unsigned short i) : T(double(i)) {}                                                      \
        T(int i) : T(double(i)) {}                                                                 \
        T(unsigned i) : T(double(i)) {}                                                            \
        T(long i) : T(double(i)) {}                                                                \
        T(unsigned long i) : T(double(i)) {}                                                       \
        T(long long i) : T(double(i)) {}                                                           \
        T(unsigned long long i) : T(double(i)) {}                                                  \
        SIMT_INLINE operator float() const;                                                    \
        operator RAW() const { return {__x}; }                                                     \
        explicit operator bool() const { return (__x & 0x7fff) != 0; }                             \
        SIMT_HALF_CAST(signed char)                                                                \
        SIMT_HALF_CAST(unsigned char)                                                              \
        SIMT_HALF_CAST(short)                                                                      \
        SIMT_HALF_CAST(unsigned short)                                                             \
        SIMT_HALF_CAST(int)                                                                        \
        SIMT_HALF_CAST(unsigned)                                                                   \
        SIMT_HALF_CAST(long)                                                                       \
        SIMT_HALF_CAST(unsigned long)                                                              \
        SIMT_HALF_CAST(long long)                                                                  \
        SIMT_HALF_CAST(unsigned long long)                                                         \
    };                                                                                             \
    struct __align__(4) T##2 {                                                                     \
        T x, y;                                                                                    \
        T##2() = default;                                                                          \
        constexpr T##2(T x, T y) : x(x), y(y) {}                                                   \
    };

SIMT_HALF_TYPE(__half, __half_raw, 10, -14)
// The last letter of a pair's name is its number of elements: __nv_bfloat162.
SIMT_HALF_TYPE(__nv_bfloat16, __nv_bfloat16_raw, 7, -126)
typedef __half half;
typedef __half2 half2;
typedef __half __nv_half;
typedef __half2 __nv_half2;
typedef __half nv_half;
typedef __half2 nv_half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

SIMT_INLINE __half::operator float() const {
    unsigned rest = __x & 0x7fffu;
    float result;
    // A subnormal number is a multiple of 2 ** -24.
    if (rest < 0x0400u) result = rest * 5.9604644775390625e-8f;
    else if (rest < 0x7c00u) result = __uint_as_float((rest << 13) + 0x38000000u);
    else result = __uint_as_float(0x7f800000u | rest << 13);
    return __x & 0x8000u ? -result : result;
}
SIMT_INLINE __nv_bfloat16::operator float() const {
    return __uint_as_float((unsigned)__x << 16);
}

namespace {

// ---- 3. functions of both types -----------------------------------------------------------------

// One lane at a time: a function of pairs from one of numbers.
#define SIMT_PAIR1(T, name2, name)                                                                 \
    inline T##2 name2(T##2 a) { return {name(a.x), name(a.y)}; }
#define SIMT_PAIR2(T, name2, name)                                                                 \
    inline T##2 name2(T##2 a, T##2 b) {                                                            \
        return {name(a.x, b.x), name(a.y, b.y)};                                                   \
    }
// An operation in float, for numbers and pairs.
#define SIMT_HALF1(T, name, name2, ...)                                                            \
    inline T name(T h) { float a = h; return T(__VA_ARGS__); }                                     \
    SIMT_PAIR1(T, name2, name)
#define SIMT_HALF2(T, name, name2, ...)                                                            \
    inline T name(T h, T k) {                                                                      \
        float a = h, b = k;                                                                        \
        return T(__VA_ARGS__);                                                                     \
    }                                                                                              \
    SIMT_PAIR2(T, name2, name)
// A comparison: of numbers; of pairs, as 1.0 or 0.0, as a mask, and of both at once. With a "u" at
// its end it is also true where one side is NaN.
#define SIMT_HALF_COMPARISON(T, n, op)                                                             \
    inline bool __h##n(T a, T b) {                                                                 \
        return !__hisnan(a) && !__hisnan(b) && float(a) op float(b);                               \
    }                                                                                              \
    inline bool __h##n##u(T a, T b) {                                                              \
        return __hisnan(a) || __hisnan(b) || __h##n(a, b);                                         \
    }                                                                                              \
    SIMT_HALF_COMPARED(T, n, )                                                                     \
    SIMT_HALF_COMPARED(T, n, u)
#define SIMT_HALF_COMPARED(T, n, u)                                                                \
    inline T##2 __h##n##u##2(T##2 a, T##2 b) {                                                     \
        return {T(float(__h##n##u(a.x, b.x))),                                                     \
                T(float(__h##n##u(a.y, b.y)))};                                                    \
    }                                                                                              \
    inline unsigned __h##n##u##2_mask(T##2 a, T##2 b) {                                            \
        return (__h##n##u(a.x, b.x) ? 0xffffu : 0)                                                 \
               | (__h##n##u(a.y, b.y) ? 0xffff0000u : 0);                                          \
    }                                                                                              \
    inline bool __hb##n##u##2(T##2 a, T##2 b) {                                                    \
        return __h##n##u(a.x, b.x) && __h##n##u(a.y, b.y);                                         \
    }
#define SIMT_HALF_OPERATOR(T, op, name)                                                            \
    inline T operator op(const T& a, const T& b) {                                                 \
        return name(a, b);                                                                         \
    }                                                                                              \
    inline T& operator op##=(T& a, const T& b) {                                                   \
        return a = name(a, b);                                                                     \
    }
#define SIMT_HALF_ORDER(T, op, name)                                                               \
    inline bool operator op(const T& a, const T& b) {                                              \
        return name(a, b);                                                                         \
    }
// To and from whole numbers, with each rounding.
#define SIMT_HALF_INTEGER(T, HALF, name, To)                                                       \
    inline To __##HALF##2##name##_rn(T h) {                                                        \
        return simt_to_integer<To>(rint(float(h)));                                                \
    }                                                                                              \
    inline To __##HALF##2##name##_rz(T h) {                                                        \
        return simt_to_integer<To>(trunc(float(h)));                                               \
    }                                                                                              \
    inline To __##HALF##2##name##_ru(T h) {                                                        \
        return simt_to_integer<To>(ceil(float(h)));                                                \
    }                                                                                              \
    inline To __##HALF##2##name##_rd(T h) {                                                        \
        return simt_to_integer<To>(floor(float(h)));                                               \
    }                                                                                              \
    inline T __##name##2##HALF##_rn(To i) { return T(double(i)); }

#define SIMT_HALF_FUNCTIONS(T, HALF, HALF2, digits, lowest)                                        \
    inline unsigned short __##HALF##_as_ushort(T h) { return h.__x; }                              \
    inline short __##HALF##_as_short(T h) { return short(h.__x); }                                 \
    inline T __ushort_as_##HALF(unsigned short i) {                                                \
        T h;                                                                                       \
        h.__x = i;                                                                                 \
        return h;                                                                                  \
    }                                                                                              \
    inline T __short_as_##HALF(short i) {                                                          \
        return __ushort_as_##HALF((unsigned short)i);                                              \
    }                                                                                              \
    inline float __##HALF##2float(T h) { return h; }                                               \
    inline T __float2##HALF(float f) { return T(f); }                                              \
    inline T __float2##HALF##_rn(float f) { return T(f); }                                         \
    inline T __double2##HALF(double f) { return T(f); }                                            \
    inline T __float2##HALF##_rz(float f) {                                                        \
        return __ushort_as_##HALF(simt_narrow<digits, lowest>(f, SIMT_TO_ZERO));                   \
    }                                                                                              \
    inline T __float2##HALF##_ru(float f) {                                                        \
        return __ushort_as_##HALF(simt_narrow<digits, lowest>(f, SIMT_UP));                        \
    }                                                                                              \
    inline T __float2##HALF##_rd(float f) {                                                        \
        return __ushort_as_##HALF(simt_narrow<digits, lowest>(f, SIMT_DOWN));                      \
    }                                                                                              \
    SIMT_HALF_INTEGER(T, HALF, int, int)                                                           \
    SIMT_HALF_INTEGER(T, HALF, uint, unsigned)                                                     \
    SIMT_HALF_INTEGER(T, HALF, short, short)                                                       \
    SIMT_HALF_INTEGER(T, HALF, ushort, unsigned short)                                             \
    SIMT_HALF_INTEGER(T, HALF, ll, long long)                                                      \
    SIMT_HALF_INTEGER(T, HALF, ull, unsigned long long)                                            \
    inline T##2 __##HALF##2##HALF##2(T h) { return {h, h}; }                                       \
    inline T##2 __float2##HALF##2_rn(float f) { return {T(f), T(f)}; }                             \
    inline T##2 __floats2##HALF##2_rn(float f, float g) {                                          \
        return {T(f), T(g)};                                                                       \
    }                                                                                              \
    inline T##2 __float22##HALF2##_rn(float2 f) { return {T(f.x), T(f.y)}; }                       \
    inline float2 __##HALF2##2float2(T##2 h) { return {float(h.x), float(h.y)}; }                  \
    inline T##2 make_##HALF2(T a, T b) { return {a, b}; }                                          \
    inline T##2 __halves2##HALF2(T a, T b) { return {a, b}; }                                      \
    inline T __low2##HALF(T##2 h) { return h.x; }                                                  \
    inline T __high2##HALF(T##2 h) { return h.y; }                                                 \
    inline float __low2float(T##2 h) { return h.x; }                                               \
    inline float __high2float(T##2 h) { return h.y; }                                              \
    inline T##2 __low2##HALF2(T##2 h) { return {h.x, h.x}; }                                       \
    inline T##2 __high2##HALF2(T##2 h) { return {h.y, h.y}; }                                      \
    inline T##2 __lows2##HALF2(T##2 a, T##2 b) { return {a.x, b.x}; }                              \
    inline T##2 __highs2##HALF2(T##2 a, T##2 b) { return {a.y, b.y}; }                             \
    inline T##2 __lowhigh2highlow(T##2 h) { return {h.y, h.x}; }                                   \
    inline bool __hisnan(T h) { return __builtin_isnan(float(h)); }                                \
    inline int __hisinf(T h) {                                                                     \
        return __builtin_isinf(float(h)) ? (h.__x & 0x8000 ? -1 : 1) : 0;                          \
    }                                                                                              \
    inline T##2 __hisnan2(T##2 h) {                                                                \
        return {T(float(__hisnan(h.x))), T(float(__hisnan(h.y)))};                                 \
    }                                                                                              \
    SIMT_HALF2(T, __hadd, __hadd2, a + b)                                                          \
    SIMT_HALF2(T, __hsub, __hsub2, a - b)                                                          \
    SIMT_HALF2(T, __hmul, __hmul2, a * b)                                                          \
    SIMT_HALF2(T, __hadd_rn, __hadd2_rn, a + b)                                                    \
    SIMT_HALF2(T, __hsub_rn, __hsub2_rn, a - b)                                                    \
    SIMT_HALF2(T, __hmul_rn, __hmul2_rn, a * b)                                                    \
    SIMT_HALF2(T, __hdiv, __h2div, a / b)                                                          \
    SIMT_HALF2(T, __hadd_sat, __hadd2_sat, __saturatef(a + b))                                     \
    SIMT_HALF2(T, __hsub_sat, __hsub2_sat, __saturatef(a - b))                                     \
    SIMT_HALF2(T, __hmul_sat, __hmul2_sat, __saturatef(a * b))                                     \
    SIMT_HALF2(T, __hmax, __hmax2, a != a ? b : b != b ? a : fmaxf(a, b))                          \
    SIMT_HALF2(T, __hmin, __hmin2, a != a ? b : b != b ? a : fminf(a, b))                          \
    SIMT_HALF2(T, __hmax_nan, __hmax2_nan, a != a ? a : b != b ? b : fmaxf(a, b))                  \
    SIMT_HALF2(T, __hmin_nan, __hmin2_nan, a != a ? a : b != b ? b : fminf(a, b))                  \
    SIMT_HALF1(T, __hneg, __hneg2, -a)                                                             \
    SIMT_HALF1(T, __habs, __habs2, fabsf(a))                                                       \
    SIMT_HALF1(T, hsqrt, h2sqrt, sqrtf(a))                                                         \
    SIMT_HALF1(T, hrsqrt, h2rsqrt, rsqrt(double(a)))                                               \
    SIMT_HALF1(T, hrcp, h2rcp, 1.0f / a)                                                           \
    SIMT_HALF1(T, hexp, h2exp, exp(double(a)))                                                     \
    SIMT_HALF1(T, hexp2, h2exp2, exp2(double(a)))                                                  \
    SIMT_HALF1(T, hexp10, h2exp10, exp10(double(a)))                                               \
    SIMT_HALF1(T, hlog, h2log, log(double(a)))                                                     \
    SIMT_HALF1(T, hlog2, h2log2, log2(double(a)))                                                  \
    SIMT_HALF1(T, hlog10, h2log10, log10(double(a)))                                               \
    SIMT_HALF1(T, hsin, h2sin, sin(double(a)))                                                     \
    SIMT_HALF1(T, hcos, h2cos, cos(double(a)))                                                     \
    SIMT_HALF1(T, htanh, h2tanh, tanh(double(a)))                                                  \
    SIMT_HALF1(T, hfloor, h2floor, floorf(a))                                                      \
    SIMT_HALF1(T, hceil, h2ceil, ceilf(a))                                                         \
    SIMT_HALF1(T, htrunc, h2trunc, truncf(a))                                                      \
    SIMT_HALF1(T, hrint, h2rint, rintf(a))                                                         \
    inline T __hfma(T a, T b, T c) {                                                               \
        return T(simt_fused(a, b, c));                                                             \
    }                                                                                              \
    inline T __hfma_relu(T a, T b, T c) {                                                          \
        T h = __hfma(a, b, c);                                                                     \
        return float(h) < 0 ? T(0.0f) : h;                                                         \
    }                                                                                              \
    inline T __hfma_sat(T a, T b, T c) {                                                           \
        return T(__saturatef(__hfma(a, b, c)));                                                    \
    }                                                                                              \
    inline T##2 __hfma2(T##2 a, T##2 b, T##2 c) {                                                  \
        return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                                     \
    }                                                                                              \
    inline T##2 __hfma2_relu(T##2 a, T##2 b, T##2 c) {                                             \
        return {__hfma_relu(a.x, b.x, c.x), __hfma_relu(a.y, b.y, c.y)};                           \
    }                                                                                              \
    SIMT_HALF_COMPARISON(T, eq, ==)                                                                \
    SIMT_HALF_COMPARISON(T, ne, !=)                                                                \
    SIMT_HALF_COMPARISON(T, lt, <)                                                                 \
    SIMT_HALF_COMPARISON(T, le, <=)                                                                \
    SIMT_HALF_COMPARISON(T, gt, >)                                                                 \
    SIMT_HALF_COMPARISON(T, ge, >=)                                                                \
    SIMT_HALF_OPERATOR(T, +, __hadd)                                                               \
    SIMT_HALF_OPERATOR(T, -, __hsub)                                                               \
    SIMT_HALF_OPERATOR(T, *, __hmul)                                                               \
    SIMT_HALF_OPERATOR(T, /, __hdiv)                                                               \
    SIMT_HALF_OPERATOR(T##2, +, __hadd2)                                                           \
    SIMT_HALF_OPERATOR(T##2, -, __hsub2)                                                           \
    SIMT_HALF_OPERATOR(T##2, *, __hmul2)                                                           \
    SIMT_HALF_OPERATOR(T##2, /, __h2div)                                                           \
    inline T operator+(const T& h) { return h; }                                                   \
    inline T operator-(const T& h) { return __hneg(h); }                                           \
    inline T##2 operator+(const T##2& h) { return h; }                                             \
    inline T##2 operator-(const T##2& h) { return __hneg2(h); }                                    \
    inline T& operator++(T& h) { return h = __hadd(h, T(1.0f)); }                                  \
    inline T& operator--(T& h) { return h = __hsub(h, T(1.0f)); }                                  \
    SIMT_HALF_ORDER(T, ==, __heq)      SIMT_HALF_ORDER(T, !=, __hneu)                              \
    SIMT_HALF_ORDER(T, <, __hlt)       SIMT_HALF_ORDER(T, <=, __hle)                               \
    SIMT_HALF_ORDER(T, >, __hgt)       SIMT_HALF_ORDER(T, >=, __hge)                               \
    SIMT_HALF_ORDER(T##2, ==, __hbeq2) SIMT_HALF_ORDER(T##2, !=, __hbneu2)                         \
    SIMT_HALF_ORDER(T##2, <, __hblt2)  SIMT_HALF_ORDER(T##2, <=, __hble2)                          \
    SIMT_HALF_ORDER(T##2, >, __hbgt2)  SIMT_HALF_ORDER(T##2, >=, __hbge2)                          \
    SIMT_SHUFFLES(T)                                                                               \
    SIMT_SHUFFLES(T##2)                                                                            \
    SIMT_HALF_ATOMIC_ADD(T, unsigned short)                                                        \
    SIMT_HALF_ATOMIC_ADD(T##2, unsigned)

// A template, so that a kernel's own function of that name is preferred.
#define SIMT_HALF_ATOMIC_ADD(T, WORD)                                                              \
    template <class = void> SIMT_ATOMIC(T) atomicAdd(T* address, T value) {                        \
        SIMT_NOTE(address);                                                                        \
        WORD old = __atomic_load_n((WORD*)address, __ATOMIC_RELAXED), next;                        \
        do next = simt_bits<WORD>(simt_bits<T>(old) + value);                                      \
        while (!__atomic_compare_exchange_n((WORD*)address, &old, next, true, SIMT_RELAXED));      \
        return simt_bits<T>(old);                                                                  \
    }

SIMT_HALF_FUNCTIONS(__half, half, half2, 10, -14)
SIMT_HALF_FUNCTIONS(__nv_bfloat16, bfloat16, bfloat162, 7, -126)

}  // namespace
