// adamw: from the gradient to the new weight (Loshchilov and Hutter, 2019). Everything that changes from step to step is read from
// device memory.
//
//   m = m + (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2
//   w = w (1 - lr wd) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
//
// Floor: weight, m and v are read and written, the gradient is read, and in the arena written once more, with zero: the next
// accumulation starts in the same pass. fp32: 28 or 32 bytes per element, and 2 more where a bf16 copy of the weight is written.
//
// The ladder:
//   adamw_v1      one launch per tensor, one thread per element, hyperparameters by value. Captured in a CUDA graph, its learning
//                 rate and its step number stay what they were at the capture.
//   adamw_begin   one thread per tensor: decides whether the step is taken, counts it, and computes what is the same for all of the
//                 tensor's elements (bias corrections, the clip scale, the sign), in fp64. The learning rate comes from device
//                 memory, where settings.cu has written it.
//   adamw_v2      one launch for up to 60 tensors: four elements at a time, scale and clearing included; a bf16 weight is rounded to
//                 the nearest or stochastically. Each thread block first has to find its tensor and six addresses.
//   adamw_v3      the same over an arena, where everything lies at one offset: the loads are under way before the block knows whose
//                 they are. So it moves its 32 bytes per element as fast as an H200 copies; adamw_v2 is a tenth slower.

#include "optimizer.cuh"

#ifndef AMSGRAD
#define AMSGRAD 0
#endif
#define STATES (2 + AMSGRAD)     // m, v, and with AMSGrad the largest v

struct Settings {                // of one parameter group
    double lr, beta1, beta2, eps, weight_decay, direction;
};

struct Coefficients {            // of one tensor in one step: 40 bytes
    float factor;                // what its gradient is multiplied by: the clip scale, divided by the divisor; negative to maximize
    float decay;                 // 1 - lr weight_decay
    float step_size;             // lr / (1 - beta1^t)
    float correction;            // 1 / sqrt(1 - beta2^t)
    float eps, beta2, rest1, rest2;      // rest = 1 - beta
    float skip, step;
};

__device__ __forceinline__ Coefficients coefficients_of(const Settings& s, int step) {
    Coefficients c;
    c.decay = (float)(1.0 - s.lr * s.weight_decay);
    c.step_size = (float)(s.lr / (1.0 - power(s.beta1, step)));
    c.correction = 1.0f / sqrtf((float)(1.0 - power(s.beta2, step)));
    c.eps = (float)s.eps;
    c.beta2 = (float)s.beta2;
    c.rest1 = (float)(1.0 - s.beta1);
    c.rest2 = (float)(1.0 - s.beta2);
    return c;
}

// One element. Written with fmaf and __fmul_rn, so that a GPU and a CPU round at the same places.
__device__ __forceinline__ void update(float& w, float g, float (&state)[STATES], const Coefficients& c) {
    float &m = state[0], &v = state[1];
    g = __fmul_rn(g, c.factor);
    w = __fmul_rn(w, c.decay);
    m = fmaf(c.rest1, g - m, m);
    v = fmaf(__fmul_rn(c.rest2, g), g, __fmul_rn(c.beta2, v));
    float second = v;
#if AMSGRAD
    state[2] = state[2] > v ? state[2] : v;
    second = state[2];
#endif
    float denominator = fmaf(sqrtf(second), c.correction, c.eps);
    w = fmaf(-c.step_size, m / denominator, w);
}

extern "C" __global__ void adamw_v1(
    float* w, const float* g, float* m, float* v,        // (n)
    long long n, float lr, float beta1, float beta2, float eps, float weight_decay, int step)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Coefficients c = {1.0f, 1.0f - lr * weight_decay, lr / (1.0f - powf(beta1, (float)step)), 1.0f / sqrtf(1.0f - powf(beta2, (float)step)),
                      eps, beta2, 1.0f - beta1, 1.0f - beta2, 0.0f, (float)step};
    float state[STATES] = {m[i], v[i]};
    update(w[i], g[i], state, c);
    m[i] = state[0];
    v[i] = state[1];
}

// Parameters: optimizer.cuh, begin_step.
extern "C" __global__ void __launch_bounds__(MAX_TENSORS) adamw_begin(
    Coefficients* coefficients, const Settings* settings, const float4* verdicts, const int* first_bad, const int* groups,
    int verdict_count, int skip_nonfinite, const float* divisor, const float* found_inf, int* record, int count_it, Steps steps)
{
    begin_step(coefficients, settings, verdicts, first_bad, groups, verdict_count, skip_nonfinite, divisor, found_inf, record, count_it, steps);
}

extern "C" __global__ void __launch_bounds__(THREADS) adamw_v2(
    const Coefficients* coefficients,
    const double* seed,                      // (1) of stochastic rounding, a whole number below 2^53
    UpdateList<3> updates)
{
    update_list<STATES>(coefficients, seed, updates);
}

// chunks, first, last, ahead: optimizer.cuh, update_arena.
extern "C" __global__ void __launch_bounds__(THREADS) adamw_v3(
    const Coefficients* coefficients,
    const double* seed,
    PARAM_T* w, GRAD_T* g,                                             // (N) the whole arena
    PARAM_T* exp_avg, PARAM_T* exp_avg_sq, PARAM_T* max_exp_avg_sq,    // (N) m, v, and with AMSGrad the largest v
    bf16* copy,                                                        // (N) of the weights; 0: none
    const int4* chunks, int first, int last, int ahead)
{
#if AMSGRAD
    PARAM_T* const state[STATES] = {exp_avg, exp_avg_sq, max_exp_avg_sq};
#else
    PARAM_T* const state[STATES] = {exp_avg, exp_avg_sq};
#endif
    update_arena(coefficients, seed, w, g, state, copy, chunks, first, last, ahead);
}
