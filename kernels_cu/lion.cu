// lion: from the gradient to the new weight (Chen et al., 2023, Symbolic Discovery of Optimization Algorithms).
//
//   u = beta1 m + (1 - beta1) g        w = w (1 - lr wd) - lr sign(u)        m = m + (1 - beta2) (g - m)
//
// Floor: weight and m are read and written, the gradient is read, and in the arena written once more, with zero. fp32: 20 or 24
// bytes per element, and 2 more where a bf16 copy of the weight is written: a quarter less than AdamW, which has v, too.
//
// The ladder:
//   lion_v1      one launch per tensor, one thread per element, hyperparameters by value, as adamw_v1.
//   lion_begin   one thread per tensor: decides whether the step is taken, and computes what its elements have in common.
//   lion_v2      one launch for up to 60 tensors, four elements at a time.
//   lion_v3      the same over an arena, where everything lies at one offset.
// optimizer.cuh has what the last three share with adamw.cu.

#include "optimizer.cuh"

struct Settings {                // of one parameter group
    double lr, beta1, beta2, weight_decay, direction;
};

struct Coefficients {            // of one tensor in one step
    float factor;                // what its gradient is multiplied by: the clip scale, divided by the divisor; negative to maximize
    float decay;                 // 1 - lr weight_decay
    float lr, rest1, rest2;      // rest = 1 - beta
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

// One element. Written with fmaf and __fmul_rn, so that a GPU and a CPU round at the same places. The sign of NaN is NaN.
__device__ __forceinline__ void update(float& w, float g, float (&state)[1], const Coefficients& c) {
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
    Coefficients c = {1.0f, 1.0f - lr * weight_decay, lr, 1.0f - beta1, 1.0f - beta2, 0.0f, 0.0f};
    float state[1] = {m[i]};
    update(w[i], g[i], state, c);
    m[i] = state[0];
}

// Parameters: optimizer.cuh, begin_step.
extern "C" __global__ void __launch_bounds__(MAX_TENSORS) lion_begin(
    Coefficients* coefficients, const Settings* settings, const float4* verdicts, const int* first_bad, const int* groups,
    int verdict_count, int skip_nonfinite, const float* divisor, const float* found_inf, int* record, int count_it, Steps steps)
{
    begin_step(coefficients, settings, verdicts, first_bad, groups, verdict_count, skip_nonfinite, divisor, found_inf, record, count_it, steps);
}

extern "C" __global__ void __launch_bounds__(THREADS) lion_v2(
    const Coefficients* coefficients,
    const double* seed,                      // (1) of stochastic rounding, a whole number below 2^53
    UpdateList<1> updates)
{
    update_list<1>(coefficients, seed, updates);
}

// chunks, first, last, ahead: optimizer.cuh, update_arena.
extern "C" __global__ void __launch_bounds__(THREADS) lion_v3(
    const Coefficients* coefficients,
    const double* seed,
    PARAM_T* w, GRAD_T* g, PARAM_T* exp_avg, bf16* copy,       // (N) the whole arena; copy: 0 for none
    const int4* chunks, int first, int last, int ahead)
{
    PARAM_T* const state[1] = {exp_avg};
    update_arena(coefficients, seed, w, g, state, copy, chunks, first, last, ahead);
}
