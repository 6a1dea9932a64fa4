// standard: what nvcc's headers declare beside CUDA C itself, in front of a kernel that is not of
// kernels_cu: limits, constants, integer types, and the part of std that runs on a device.
//
// Only what a source uses is compiled, and its own macro or declaration of a name comes first
// (host_code.py). So each #include of a header of C or C++ is left out.

// ---- <float.h>, <limits.h>, <math.h> ----
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#define DBL_DIG 15
#define DBL_MANT_DIG 53
#define CHAR_BIT 8
#define SCHAR_MIN (-128)
#define SCHAR_MAX 127
#define UCHAR_MAX 255
#define CHAR_MIN SCHAR_MIN
#define CHAR_MAX SCHAR_MAX
#define SHRT_MIN (-32768)
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define INT_MIN (-2147483647 - 1)
#define INT_MAX 2147483647
#define UINT_MAX 4294967295u
#define LLONG_MIN (-9223372036854775807ll - 1)
#define LLONG_MAX 9223372036854775807ll
#define ULLONG_MAX 18446744073709551615ull
#define LONG_MIN (sizeof(long) == 4 ? INT_MIN : LLONG_MIN)
#define LONG_MAX (sizeof(long) == 4 ? INT_MAX : LLONG_MAX)
#define ULONG_MAX (~0ul)
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define HUGE_VAL __longlong_as_double(0x7ff0000000000000ll)
#define HUGE_VALF INFINITY
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LOG10E 0.43429448190325182765
#define M_LN2 0.69314718055994530942
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_1_PI 0.31830988618379067154
#define M_2_PI 0.63661977236758134308
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_PI_F 3.141592654f
#define CUDART_INF HUGE_VAL
#define CUDART_PI M_PI

// ---- <stdint.h>, <sys/types.h> ----
#define INT8_MIN SCHAR_MIN
#define INT8_MAX SCHAR_MAX
#define UINT8_MAX UCHAR_MAX
#define INT16_MIN SHRT_MIN
#define INT16_MAX SHRT_MAX
#define UINT16_MAX USHRT_MAX
#define INT32_MIN INT_MIN
#define INT32_MAX INT_MAX
#define UINT32_MAX UINT_MAX
#define INT64_MIN LLONG_MIN
#define INT64_MAX LLONG_MAX
#define UINT64_MAX ULLONG_MAX
#define SIZE_MAX ULLONG_MAX
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
// The CPU's compiler has the types of fixed width from its own <stdint.h>.
#ifndef __SIMT_CPU__
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long intptr_t;
typedef unsigned long long uintptr_t;
typedef unsigned long long CUtexObject;
typedef unsigned long long CUsurfObject;
#endif

// ---- types of <cuda_runtime.h> that a struct may hold; NVRTC has them ----
#ifdef __SIMT_CPU__
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef int cudaError_t;
#endif

// ---- <cmath>, <algorithm>, <utility>, <limits>, <type_traits> ----
namespace std {
using ::abs;
using ::acos;
using ::asin;
using ::atan;
using ::atan2;
using ::ceil;
using ::cos;
using ::cosh;
using ::exp;
using ::exp2;
using ::fabs;
using ::floor;
using ::fma;
using ::fmax;
using ::fmin;
using ::fmod;
using ::isfinite;
using ::isinf;
using ::isnan;
using ::log;
using ::log10;
using ::log2;
using ::pow;
using ::round;
using ::rsqrt;
using ::sin;
using ::sinh;
using ::sqrt;
using ::tan;
using ::tanh;
using ::trunc;
using ::size_t;
using ::int8_t;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::uint8_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::intptr_t;
using ::uintptr_t;

template <class T> constexpr const T& min(const T& a, const T& b) { return b < a ? b : a; }
template <class T> constexpr const T& max(const T& a, const T& b) { return a < b ? b : a; }
template <class T> __device__ void swap(T& a, T& b) { T old = a; a = b; b = old; }

#ifdef __SIMT_CPU__
template <class T> struct simt_plain { using type = T; };
template <class T> struct simt_plain<T&> { using type = T; };
template <class T> struct simt_plain<T&&> { using type = T; };
template <class T> constexpr typename simt_plain<T>::type&& move(T&& value) {
    return static_cast<typename simt_plain<T>::type&&>(value);
}
template <class T> constexpr T&& forward(typename simt_plain<T>::type& value) {
    return static_cast<T&&>(value);
}
#endif

template <class T, T v> struct integral_constant {
    static constexpr T value = v;
    using value_type = T;
    constexpr operator T() const { return v; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool c, class T = void> using enable_if_t = typename enable_if<c, T>::type;
template <bool, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool c, class A, class B> using conditional_t = typename conditional<c, A, B>::type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> struct remove_cv { using type = T; };
template <class T> struct remove_cv<const T> { using type = T; };
template <class T> struct remove_cv<volatile T> { using type = T; };
template <class T> struct remove_cv<const volatile T> { using type = T; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> using decay_t = remove_cv_t<remove_reference_t<T>>;
template <class T> struct is_integral
    : integral_constant<bool, is_same<remove_cv_t<T>, bool>::value ||
          is_same<remove_cv_t<T>, char>::value || is_same<remove_cv_t<T>, signed char>::value ||
          is_same<remove_cv_t<T>, unsigned char>::value || is_same<remove_cv_t<T>, short>::value ||
          is_same<remove_cv_t<T>, unsigned short>::value || is_same<remove_cv_t<T>, int>::value ||
          is_same<remove_cv_t<T>, unsigned>::value || is_same<remove_cv_t<T>, long>::value ||
          is_same<remove_cv_t<T>, unsigned long>::value ||
          is_same<remove_cv_t<T>, long long>::value ||
          is_same<remove_cv_t<T>, unsigned long long>::value> {};
template <class T> constexpr bool is_integral_v = is_integral<T>::value;
template <class T> struct is_floating_point
    : integral_constant<bool, is_same<remove_cv_t<T>, float>::value ||
          is_same<remove_cv_t<T>, double>::value> {};
template <class T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> struct is_pointer : false_type {};
template <class T> struct is_pointer<T*> : true_type {};

template <class T> struct numeric_limits {
    static constexpr bool is_signed = T(-1) < T(0);
    static constexpr T max() { return T(~0ull >> (64 - 8 * int(sizeof(T)) + is_signed)); }
    static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
    static constexpr T lowest() { return min(); }
};
template <> struct numeric_limits<float> {
    static constexpr float max() { return FLT_MAX; }
    static constexpr float min() { return FLT_MIN; }
    static constexpr float lowest() { return -FLT_MAX; }
    static constexpr float epsilon() { return FLT_EPSILON; }
    static __device__ float infinity() { return INFINITY; }
    static __device__ float quiet_NaN() { return NAN; }
};
template <> struct numeric_limits<double> {
    static constexpr double max() { return DBL_MAX; }
    static constexpr double min() { return DBL_MIN; }
    static constexpr double lowest() { return -DBL_MAX; }
    static constexpr double epsilon() { return DBL_EPSILON; }
    static __device__ double infinity() { return HUGE_VAL; }
    static __device__ double quiet_NaN() { return NAN; }
};
}  // namespace std
