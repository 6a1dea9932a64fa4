// poly_attention: what all kernels of polynomial attention share (poly_attention.cu,
// poly_forward.cu, poly_backward.cu): how rows lie in memory, and the polynomial of one score.

#ifndef HEAD
#define HEAD 64               // width of a head
#endif
#ifndef DEGREE
#define DEGREE 3              // p, odd
#endif
#define ALL 0xffffffffu

// Elements from one row to the next: row t of head h of sequence b begins at (b T + t) stride + h
// HEAD. `grad` is the stride of dq, dk and dv; rows of y, dy and dq~ lie side by side.
struct Rows { int q_tilde, q, k, v, grad; };

// t = tanh(factor x). With `exact`, t = 1 - 2 / (1 + e), e = exp(2 factor x), off by 2e-7 at most.
// Else, up to degree 3 and from sm_80 on, one special function, off by 2^-11 of t, which its power
// is off by p times: less than the rounding to bf16 that follows, too much for the sums of dphi
// c^p.
template <bool exact> __device__ __forceinline__ float tanh_of(float x, float factor) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (!exact && DEGREE <= 3) {
        float t;
        asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(factor * x));
        return t;
    }
#endif
    return fmaf(-2.0f, rcp_approx(1.0f + ex2_approx(2.88539008f * factor * x)), 1.0f);
}

// t^(p-1), an even power.
__device__ __forceinline__ float even_power(float t) {
    float square = t * t, even = 1.0f;
    #pragma unroll
    for (int k = 1; k < DEGREE; k += 2) even *= square;
    return even;
}

// t^p and t^(p-1) (1 - t^2) of one score s, t = tanh(s / 8), where factor x = s / 8. These are c^p
// and c^(p-1) (1 - t^2), c = 8 t, without their powers of 8: those go into the factors of sums.
struct Power { float power, slope; };
template <bool exact>
__device__ __forceinline__ Power power_of_tanh(float x, float factor = 0.125f) {
    float t = tanh_of<exact>(x, factor), even = even_power(t);
    Power result = {even * t, even - even * (t * t)};
    return result;
}

__device__ __forceinline__ float power_of_8(int p) {
    float power = 1.0f;
    #pragma unroll
    for (int k = 0; k < p; k++) power *= 8.0f;
    return power;
}
