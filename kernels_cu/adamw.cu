// adamw: the AdamW update (Loshchilov and Hutter, 2019). Everything that changes from step to step
// is read from device memory.
//
//   m = m + (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2
//   w = w (1 - lr wd) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
//
// Floor: weight, m and v are read and written; the gradient is read. In an arena the gradient is
// also set to zero, for the next accumulation. In fp32 that is 28 or, in an arena, 32 bytes per
// element, and 2 more where a bf16 copy of the weight is written.
//
// The ladder:
//   adamw_v1     One launch per tensor, one thread per element, hyperparameters by value. A CUDA
//                graph that captures it replays the learning rate and the step number of the
//                capture.
//   adamw_begin  One thread per tensor. It decides whether the step is taken, counts it, and
//                computes in fp64 what all elements of the tensor have in common: the bias
//                corrections, the clip scale, the sign. The kernel of settings.cu has written the
//                learning rate to device memory before.
//   adamw_v2     One launch for up to 60 tensors, four elements at a time. It also applies the clip
//                scale. A bf16 weight is rounded to the nearest or stochastically. Each thread
//                block first looks up its tensor and six addresses.
//   adamw_v3     One launch over an arena, whose buffers all have the same offsets: a thread block
//                issues its loads before it knows to which tensor they belong. It moves 28 bytes
//                per element at the speed at which an H200 copies; adamw_v2 is 10% slower.
// optimizer.cuh holds what the last three share with other optimizers.

#include "optimizer.cuh"

#ifndef AMSGRAD
#define AMSGRAD 0
#endif
#define STATES (2 + AMSGRAD)     // m, v, and with AMSGrad the largest v

struct Settings {                // of a parameter group
    double lr, beta1, beta2, eps, weight_decay, direction;
};

struct Coefficients {            // of a tensor in one step: 40 bytes
    float factor;                // of the gradient: clip scale / divisor; negative to maximize
    float decay;                 // 1 - lr weight_decay
    float step_size;             // lr / (1 - beta1^t)
    float correction;            // 1 / sqrt(1 - beta2^t)
    float eps, beta2;
    float rest1, rest2;          // 1 - beta1, 1 - beta2
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

// Updates one element. fmaf and __fmul_rn fix where results are rounded, so that a GPU and a CPU
// agree.
__device__ __forceinline__ void update(
    float& w, float g, float (&state)[STATES], const Coefficients& c)
{
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
    float step_size = lr / (1.0f - powf(beta1, (float)step));
    float correction = 1.0f / sqrtf(1.0f - powf(beta2, (float)step));
    Coefficients c = {1.0f, 1.0f - lr * weight_decay, step_size, correction, eps, beta2,
                      1.0f - beta1, 1.0f - beta2, 0.0f, (float)step};
    float state[STATES] = {m[i], v[i]};
    update(w[i], g[i], state, c);
    m[i] = state[0];
    v[i] = state[1];
}

// The parameters are those of begin_step() in optimizer.cuh.
extern "C" __global__ void __launch_bounds__(MAX_TENSORS) adamw_begin(
    Coefficients* coefficients, const Settings* settings,
    const float4* clip_results, const int* first_nonfinite, const int* groups, int clip_count,
    int skip_nonfinite, const float* divisor, const float* found_inf,
    int* record, int count_it, Steps steps)
{
    begin_step(coefficients, settings, clip_results, first_nonfinite, groups, clip_count,
               skip_nonfinite, divisor, found_inf, record, count_it, steps);
}

extern "C" __global__ void __launch_bounds__(THREADS) adamw_v2(
    const Coefficients* coefficients,
    const double* seed,      // (1) of stochastic rounding, a whole number below 2^53
    UpdateList<3> updates)
{
    update_list<STATES>(coefficients, seed, updates);
}

// chunks, first, last, offset: as in update_arena() in optimizer.cuh.
extern "C" __global__ void __launch_bounds__(THREADS) adamw_v3(
    const Coefficients* coefficients,
    const double* seed,
    PARAM_T* w, const GRAD_T* g,             // (N) the whole arena
    PARAM_T* exp_avg, PARAM_T* exp_avg_sq,   // (N) m, v
    PARAM_T* max_exp_avg_sq,                 // (N) with AMSGrad the largest v
    bf16* copy,                              // (N) of the weights; 0: none
    const int4* chunks, int first, int last, int offset)
{
#if AMSGRAD
    PARAM_T* const state[STATES] = {exp_avg, exp_avg_sq, max_exp_avg_sq};
#else
    PARAM_T* const state[STATES] = {exp_avg, exp_avg_sq};
#endif
    update_arena(coefficients, seed, w, g, state, copy, chunks, first, last, offset);
}
