// lion: the Lion update (Chen et al., 2023, Symbolic Discovery of Optimization Algorithms).
//
//   u = beta1 m + (1 - beta1) g     w = w (1 - lr wd) - lr sign(u)     m = m + (1 - beta2) (g - m)
//
// Floor: weight and m are read and written; the gradient is read. In an arena the gradient is also
// set to zero, for the next accumulation. In fp32 that is 20 or, in an arena, 24 bytes per element,
// and 2 more where a bf16 copy of the weight is written: a quarter less than AdamW, which also
// reads and writes v.
//
// The ladder:
//   lion_v1     One launch per tensor, one thread per element, hyperparameters by value.
//   lion_begin  One thread per tensor. It decides whether the step is taken, counts it, and
//               computes what all elements of the tensor have in common.
//   lion_v2     One launch for up to 60 tensors, four elements at a time.
//   lion_v3     One launch over an arena, whose buffers all have the same offsets.
// adamw.cu says what each version gains. optimizer.cuh holds what the last three share with it.

#include "optimizer.cuh"

struct Settings {                // of a parameter group
    double lr, beta1, beta2, weight_decay, direction;
};

struct Coefficients {            // of a tensor in one step
    float factor;                // of the gradient: clip scale / divisor; negative to maximize
    float decay;                 // 1 - lr weight_decay
    float lr;
    float rest1, rest2;          // 1 - beta1, 1 - beta2
    float skip, step;
};

__device__ __forceinline__ Coefficients coefficients_of(const Settings& s, int) {
    Coefficients c;
    c.decay = (float)(1.0 - s.lr * s.weight_decay);
    c.lr = (float)s.lr;
    c.rest1 = (float)(1.0 - s.beta1);
    c.rest2 = (float)(1.0 - s.beta2);
    return c;
}

// Updates one element. fmaf and __fmul_rn fix where results are rounded, so that a GPU and a CPU
// agree. The sign of NaN is NaN.
__device__ __forceinline__ void update(
    float& w, float g, float (&state)[1], const Coefficients& c)
{
    float& m = state[0];
    g = __fmul_rn(g, c.factor);
    float u = fmaf(c.rest1, g - m, m);
    float sign = u > 0.0f ? 1.0f : u < 0.0f ? -1.0f : u;
    w = fmaf(-c.lr, sign, __fmul_rn(w, c.decay));
    m = fmaf(c.rest2, g - m, m);
}

extern "C" __global__ void lion_v1(
    float* w, const float* g, float* m,                  // (n)
    long long n, float lr, float beta1, float beta2, float weight_decay)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float decay = 1.0f - lr * weight_decay;
    Coefficients c = {1.0f, decay, lr, 1.0f - beta1, 1.0f - beta2, 0.0f, 0.0f};
    float state[1] = {m[i]};
    update(w[i], g[i], state, c);
    m[i] = state[0];
}

// The parameters are those of begin_step() in optimizer.cuh.
extern "C" __global__ void __launch_bounds__(MAX_TENSORS) lion_begin(
    Coefficients* coefficients, const Settings* settings,
    const float4* clip_results, const int* first_nonfinite, const int* groups, int clip_count,
    int skip_nonfinite, const float* divisor, const float* found_inf,
    int* record, int count_it, Steps steps)
{
    begin_step(coefficients, settings, clip_results, first_nonfinite, groups, clip_count,
               skip_nonfinite, divisor, found_inf, record, count_it, steps);
}

extern "C" __global__ void __launch_bounds__(THREADS) lion_v2(
    const Coefficients* coefficients,
    const double* seed,      // (1) of stochastic rounding, a whole number below 2^53
    UpdateList<1> updates)
{
    update_list<1>(coefficients, seed, updates);
}

// chunks, first, last, offset: as in update_arena() in optimizer.cuh.
extern "C" __global__ void __launch_bounds__(THREADS) lion_v3(
    const Coefficients* coefficients,
    const double* seed,
    PARAM_T* w, const GRAD_T* g, PARAM_T* exp_avg,   // (N) the whole arena
    bf16* copy,                                      // (N) of the weights; 0: none
    const int4* chunks, int first, int last, int offset)
{
    PARAM_T* const state[1] = {exp_avg};
    update_arena(coefficients, seed, w, g, state, copy, chunks, first, last, offset);
}
