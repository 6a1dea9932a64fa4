// adamw: from the gradient to the new weight (Loshchilov and Hutter, 2019), everything that changes read from device memory.
//
//   m = m + (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2        w = w (1 - lr wd) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
//
// Floor: weight, m and v are read and written, the gradient is read, and in the arena written once more, with zero: the next window
// opens in the same pass. fp32: 28 or 32 bytes per element, and 2 more where a bf16 copy of the weight is written.
//
// The ladder:
//   adamw_v1      one launch per tensor, one thread per element, hyperparameters by value. Captured in a CUDA graph, its learning rate
//                 and its step number stay what they were at the capture.
//   adamw_set     writes the hyperparameters to the device when the host has changed them. Not part of a captured step.
//   adamw_begin   one thread per tensor: decides whether the step is taken, counts it, and works out what is the same for all of the
//                 tensor's elements (bias corrections, the clip scale, the sign), in fp64.
//   adamw_v2      one launch for up to 60 tensors: four elements at a time, scale and clearing included; a bf16 weight is rounded to the
//                 nearest or stochastically. Each thread block first has to find its tensor and six addresses.
//   adamw_v3      the same over an arena, where everything lies at one offset: the loads are under way before the block knows whose they
//                 are. So it moves its 32 bytes per element as fast as an H200 copies; adamw_v2 is a tenth slower.

#ifndef PARAM_T
#define PARAM_T float        // weights, m and v
#endif
#ifndef GRAD_T
#define GRAD_T float
#endif
#ifndef AMSGRAD
#define AMSGRAD 0
#endif
#ifndef STOCHASTIC
#define STOCHASTIC 0         // 1: how a bf16 weight is rounded
#endif
#ifndef CHUNK
#define CHUNK 4096
#endif
#ifndef THREADS
#define THREADS 256
#endif
#if CHUNK % (4 * THREADS) != 0
#error "CHUNK must be a multiple of 4 * THREADS: a thread takes whole groups of four"
#endif
#define UNROLL (CHUNK / 4 / THREADS)                 // groups of four that a thread has in flight: a thread block takes a chunk in one go
#define MAX_TENSORS 256      // of a launch of adamw_begin
#define MAX_UPDATES 60       // of a launch of adamw_v2
#define MAX_VALUES 256       // of a launch of adamw_set

struct Coefficients {        // of one tensor in one step: 40 bytes
    float factor;            // what its gradient is multiplied by: the clip scale, divided by the divisor; negative to maximize
    float decay;             // 1 - lr weight_decay
    float step_size;         // lr / (1 - beta1^t)
    float correction;        // 1 / sqrt(1 - beta2^t)
    float eps, beta2, rest1, rest2;      // rest = 1 - beta
    float skip, step;
};

// One element. Written with fmaf and __fmul_rn, so that a GPU and a CPU round at the same places.
__device__ __forceinline__ void update(float& w, float g, float& m, float& v, float& vmax, const Coefficients& c) {
    g = __fmul_rn(g, c.factor);
    w = __fmul_rn(w, c.decay);
    m = fmaf(c.rest1, g - m, m);
    v = fmaf(__fmul_rn(c.rest2, g), g, __fmul_rn(c.beta2, v));
    float second = v;
#if AMSGRAD
    vmax = vmax > v ? vmax : v;
    second = vmax;
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
    float unused = 0.0f;
    update(w[i], g[i], m[i], v[i], unused, c);
}

// beta^t by squaring: the same bits on every machine, which pow() does not promise.
__device__ __forceinline__ double power(double base, int exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent /= 2, base *= base) if (exponent % 2) result *= base;
    return result;
}

struct Values { double value[MAX_VALUES]; };

extern "C" __global__ void adamw_set(double* to, int count, Values values) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = values.value[i];
}

struct Steps {
    float* step[MAX_TENSORS];               // (1) how many steps each tensor has taken
    int tensor[MAX_TENSORS];                // its number; -1: no tensor
    unsigned short settings[MAX_TENSORS];   // its parameter group
};

extern "C" __global__ void __launch_bounds__(MAX_TENSORS) adamw_begin(
    Coefficients* coefficients,   // (MAX_TENSORS) this launch's
    const double* settings,       // (groups, 8): lr, beta1, beta2, eps, weight_decay, 1 to minimize or -1 to maximize, 0, 0
    const float4* verdicts,       // of reduce_v2; 0: no norm was taken
    const int* first_bad,
    const int* groups,            // per tensor: its group among the verdicts; 0: there is one
    int verdict_count,
    int skip_nonfinite,
    const float* divisor,         // (1) of the gradients; 0: nothing
    const float* found_inf,       // (1) not 0: someone else saw a gradient that is not finite; 0: nobody looked
    int* record,                  // (4): steps asked for, steps skipped, at the last skip: which step, first tensor that was not finite
    int count_it,                 // 1 in the first launch of a step
    Steps steps)
{
    // Every thread looks at some verdicts; one that is not finite holds all tensors back.
    bool bad = found_inf != 0 && *found_inf != 0.0f, not_finite = false;
    for (int g = threadIdx.x; g < verdict_count; g += MAX_TENSORS) not_finite = not_finite || verdicts[g].w == 0.0f;
    bool skip = __syncthreads_or(bad || (skip_nonfinite && not_finite));
    if (threadIdx.x == 0 && count_it) {
        record[0]++;
        if (skip) {
            record[1]++;
            record[2] = record[0];
            record[3] = -1;
            for (int g = verdict_count - 1; g >= 0; g--) if (verdicts[g].w == 0.0f) record[3] = first_bad[g];
        }
    }
    int t = steps.tensor[threadIdx.x];
    if (t < 0) return;
    float taken = *steps.step[threadIdx.x] + (skip ? 0.0f : 1.0f);
    if (!skip) *steps.step[threadIdx.x] = taken;
    const double* s = settings + 8 * steps.settings[threadIdx.x];
    float factor = verdicts == 0 ? 1.0f : verdicts[groups == 0 ? 0 : groups[t]].x;
    if (divisor != 0) factor /= *divisor;
    Coefficients& c = coefficients[threadIdx.x];
    c.factor = s[5] < 0.0 ? -factor : factor;
    c.decay = (float)(1.0 - s[0] * s[4]);
    c.step_size = (float)(s[0] / (1.0 - power(s[1], (int)taken)));
    c.correction = 1.0f / sqrtf((float)(1.0 - power(s[2], (int)taken)));
    c.eps = (float)s[3];
    c.beta2 = (float)s[2];
    c.rest1 = (float)(1.0 - s[1]);
    c.rest2 = (float)(1.0 - s[2]);
    c.skip = skip ? 1.0f : 0.0f;
    c.step = taken;
}

struct Updates {                             // by value, 3,848 bytes: nothing is uploaded
    PARAM_T* weight[MAX_UPDATES];
    GRAD_T* grad[MAX_UPDATES];
    PARAM_T* m[MAX_UPDATES];
    PARAM_T* v[MAX_UPDATES];
    PARAM_T* vmax[MAX_UPDATES];              // AMSGRAD only
    bf16* copy[MAX_UPDATES];                 // where the weight's bf16 copy goes; 0: nowhere
    int first[MAX_UPDATES + 1];              // its first chunk among this launch's; behind the last tensor: how many there are
    int tensor[MAX_UPDATES];                 // its number: a part of the key of its random bits
    int at[MAX_UPDATES];                     // its place among the coefficients
    unsigned short tail[MAX_UPDATES];        // elements in its last chunk, 1 to CHUNK
    unsigned short clear[MAX_UPDATES];       // 1: its gradient is set to zero
};

__device__ __forceinline__ uint4 noise(unsigned long long seed, int tensor, long long group_of_four, float step) {
    return random_bits(seed, make_uint4((unsigned)group_of_four, (unsigned)(group_of_four >> 32), (unsigned)tensor, (unsigned)step));
}
__device__ __forceinline__ void store4_stochastic(bf16* x, int i, int count, float4 v, uint4 r) {
    if (4 * i < count) x[4 * i] = as_bf16_stochastic(v.x, r.x);
    if (4 * i + 1 < count) x[4 * i + 1] = as_bf16_stochastic(v.y, r.y);
    if (4 * i + 2 < count) x[4 * i + 2] = as_bf16_stochastic(v.z, r.z);
    if (4 * i + 3 < count) x[4 * i + 3] = as_bf16_stochastic(v.w, r.w);
}
template <class T> __device__ __forceinline__ void store4_stochastic(T* x, int i, int count, float4 v, uint4) { store4_within(x, i, count, v); }

// One chunk: of which `count` elements exist. whole: it may be read in full; full: it may be written in full.
__device__ __forceinline__ void update_chunk(PARAM_T* w, GRAD_T* g, PARAM_T* m, PARAM_T* v, PARAM_T* vmax, bf16* copy, int count, bool whole, bool full,
                                             bool clear, const Coefficients& c, const double* seed, int tensor, long long from)
{
    // All loads first, so that they are in flight together, and with them the coefficients.
    float4 W[UNROLL], G[UNROLL], M[UNROLL], V[UNROLL], X[UNROLL], zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    #pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int i = k * THREADS + threadIdx.x;
        W[k] = load4(w, i, count, whole);
        G[k] = load4(g, i, count, whole);
        M[k] = load4(m, i, count, whole);
        V[k] = load4(v, i, count, whole);
        X[k] = AMSGRAD ? load4(vmax, i, count, whole) : zero;
    }
    Coefficients mine = c;
    #pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int i = k * THREADS + threadIdx.x;
        if (clear) store4(g, i, count, full, zero);
        if (mine.skip != 0.0f) continue;
        update(W[k].x, G[k].x, M[k].x, V[k].x, X[k].x, mine);
        update(W[k].y, G[k].y, M[k].y, V[k].y, X[k].y, mine);
        update(W[k].z, G[k].z, M[k].z, V[k].z, X[k].z, mine);
        update(W[k].w, G[k].w, M[k].w, V[k].w, X[k].w, mine);
        uint4 r = make_uint4(0, 0, 0, 0);
        if (STOCHASTIC) r = noise((unsigned long long)*seed, tensor, from / 4 + i, mine.step);
        if (STOCHASTIC && copy == 0) store4_stochastic(w, i, count, W[k], r);
        else store4(w, i, count, full, W[k]);
        store4(m, i, count, full, M[k]);
        store4(v, i, count, full, V[k]);
        if (AMSGRAD) store4(vmax, i, count, full, X[k]);
        if (copy == 0) continue;
        if (STOCHASTIC) store4_stochastic(copy, i, count, W[k], r);
        else store4(copy, i, count, full, W[k]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) adamw_v2(
    const Coefficients* coefficients,
    const double* seed,                      // (1) of stochastic rounding, a whole number below 2^53
    Updates updates)
{
    for (int chunk = blockIdx.x; chunk < updates.first[MAX_UPDATES]; chunk += gridDim.x) {
        int t = tensor_of(updates.first, MAX_UPDATES, chunk);
        int count = chunk + 1 == updates.first[t + 1] ? updates.tail[t] : CHUNK;
        long long from = (long long)(chunk - updates.first[t]) * CHUNK;
        PARAM_T *w = updates.weight[t] + from, *m = updates.m[t] + from, *v = updates.v[t] + from;
        GRAD_T* g = updates.grad[t] + from;
        PARAM_T* vmax = AMSGRAD ? updates.vmax[t] + from : 0;
        bf16* copy = updates.copy[t] == 0 ? 0 : updates.copy[t] + from;
        bool whole = count == CHUNK && aligned4(w, sizeof(PARAM_T)) && aligned4(m, sizeof(PARAM_T)) && aligned4(v, sizeof(PARAM_T))
            && aligned4(vmax, sizeof(PARAM_T)) && aligned4(g, sizeof(GRAD_T)) && aligned4(copy, sizeof(bf16));
        update_chunk(w, g, m, v, vmax, copy, count, whole, whole, updates.clear[t], coefficients[updates.at[t]], seed, updates.tensor[t], from);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) adamw_v3(
    const Coefficients* coefficients,
    const double* seed,
    PARAM_T* w, GRAD_T* g, PARAM_T* m, PARAM_T* v, PARAM_T* vmax, bf16* copy,       // (N) the whole arena; vmax, copy: 0 for none
    const int4* chunks,                      // (N / CHUNK) per chunk: .x its tensor, .y elements in it, .z which chunk of the tensor
    int first, int last,                     // chunks of the arena that are this launch's
    int ahead)                               // a tensor's coefficients stand so many places before its number
{
    for (int chunk = first + blockIdx.x; chunk < last; chunk += gridDim.x) {
        int4 where = chunks[chunk];
        long long at = (long long)chunk * CHUNK;         // behind a tensor's end the arena has zeros, which may be read
        update_chunk(w + at, g + at, m + at, v + at, vmax == 0 ? 0 : vmax + at, copy == 0 ? 0 : copy + at, where.y, true, where.y == CHUNK, true,
                     coefficients[where.x - ahead], seed, where.x, (long long)where.z * CHUNK);
    }
}
