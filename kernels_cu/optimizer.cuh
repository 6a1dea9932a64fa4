// What the kernels of every optimizer share. A file such as adamw.cu or lion.cu declares
//
//   struct Settings       doubles, one row per parameter group. The host writes each field by its
//                         name in the group: lr, eps, ...; beta1 and beta2 are in `betas`;
//                         direction is 1, or -1 to maximize
//   struct Coefficients   floats: what is the same for all elements of a tensor in one step. Every
//                         optimizer has factor, skip and step, which begin_step fills in
//   coefficients_of       (Settings, number of the step) -> the other Coefficients
//   update                one element: its new weight and state
//
// and three kernels that call the functions below: <file>_begin (begin_step, one thread per tensor),
// <file>_v2 (update_list, tensors anywhere) and <file>_v3 (update_arena, neighbours in an arena).

#ifndef PARAM_T
#define PARAM_T float        // weights and state
#endif
#ifndef GRAD_T
#define GRAD_T float
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
#define UNROLL (CHUNK / 4 / THREADS)   // groups of four that a thread has in flight: a block takes a chunk in one go
#ifndef MAX_TENSORS
#define MAX_TENSORS 256      // of one launch of begin_step
#endif
#ifndef MAX_UPDATES
#define MAX_UPDATES 60       // of one launch of update_list
#endif

// ---- the beginning of a step ----

struct Steps {
    float* step[MAX_TENSORS];               // (1) how many steps each tensor has taken
    int tensor[MAX_TENSORS];                // its number; -1: no tensor
    unsigned short settings[MAX_TENSORS];   // its parameter group
};

// Decides whether the step is taken, counts it, and computes each tensor's coefficients.
template <class C, class S>
__device__ __forceinline__ void begin_step(
    C* coefficients,              // (MAX_TENSORS) this launch's
    const S* settings,            // (groups)
    const float4* verdicts,       // of reduce_v2; 0: no norm was taken
    const int* first_bad,         // per verdict: its first tensor that is not finite
    const int* groups,            // per tensor: its group among the verdicts; 0: there is one
    int verdict_count,
    int skip_nonfinite,
    const float* divisor,         // (1) of the gradients; 0: nothing
    const float* found_inf,       // (1) not 0: GradScaler saw a gradient that is not finite; 0: it did not look
    int* record,                  // (4): steps asked for, steps skipped, at the last skip: which step, first tensor that was not finite
    int count_it,                 // 1 in the first launch of a step
    const Steps& steps)
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
    const S& s = settings[steps.settings[threadIdx.x]];
    float factor = verdicts == 0 ? 1.0f : verdicts[groups == 0 ? 0 : groups[t]].x;
    if (divisor != 0) factor /= *divisor;
    C c = coefficients_of(s, (int)taken);
    c.factor = s.direction < 0.0 ? -factor : factor;
    c.skip = skip ? 1.0f : 0.0f;
    c.step = taken;
    coefficients[threadIdx.x] = c;
}

// beta^t by squaring: the same bits on every machine, which pow() does not promise.
__device__ __forceinline__ double power(double base, int exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent /= 2, base *= base) if (exponent % 2) result *= base;
    return result;
}

// ---- one chunk ----

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

// One of four elements. state: each state tensor's four.
template <int STATES, class C>
__device__ __forceinline__ void update_lane(float float4::*lane, float4& w, float4 g, float4 (&state)[STATES], const C& c) {
    float own[STATES];
    #pragma unroll
    for (int j = 0; j < STATES; j++) own[j] = state[j].*lane;
    update(w.*lane, g.*lane, own, c);
    #pragma unroll
    for (int j = 0; j < STATES; j++) state[j].*lane = own[j];
}

// One chunk, of which `count` elements exist. whole: it may be read in full; full: it may be written in full.
template <int STATES, class C>
__device__ __forceinline__ void update_chunk(
    PARAM_T* w, GRAD_T* g, PARAM_T* const (&state)[STATES], bf16* copy, int count, bool whole, bool full,
    bool clear, const C& c, const double* seed, int tensor, long long from)
{
    // All loads first, so that they are in flight together, and with them the coefficients.
    float4 W[UNROLL], G[UNROLL], S[UNROLL][STATES], zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    #pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int i = k * THREADS + threadIdx.x;
        W[k] = load4(w, i, count, whole);
        G[k] = load4(g, i, count, whole);
        #pragma unroll
        for (int j = 0; j < STATES; j++) S[k][j] = load4(state[j], i, count, whole);
    }
    C mine = c;
    #pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int i = k * THREADS + threadIdx.x;
        if (clear) store4(g, i, count, full, zero);
        if (mine.skip != 0.0f) continue;
        update_lane(&float4::x, W[k], G[k], S[k], mine);
        update_lane(&float4::y, W[k], G[k], S[k], mine);
        update_lane(&float4::z, W[k], G[k], S[k], mine);
        update_lane(&float4::w, W[k], G[k], S[k], mine);
        uint4 r = make_uint4(0, 0, 0, 0);
        if (STOCHASTIC) r = noise((unsigned long long)*seed, tensor, from / 4 + i, mine.step);
        if (STOCHASTIC && copy == 0) store4_stochastic(w, i, count, W[k], r);
        else store4(w, i, count, full, W[k]);
        #pragma unroll
        for (int j = 0; j < STATES; j++) store4(state[j], i, count, full, S[k][j]);
        if (copy == 0) continue;
        if (STOCHASTIC) store4_stochastic(copy, i, count, W[k], r);
        else store4(copy, i, count, full, W[k]);
    }
}

// ---- tensors anywhere ----

template <int TABLES>
struct UpdateList {                          // by value: nothing is uploaded
    PARAM_T* weight[MAX_UPDATES];
    GRAD_T* grad[MAX_UPDATES];
    PARAM_T* state[TABLES][MAX_UPDATES];     // one row per state tensor; 0 where the group has none
    bf16* copy[MAX_UPDATES];                 // where the weight's bf16 copy goes; 0: nowhere
    int first[MAX_UPDATES + 1];              // its first chunk among this launch's; behind the last tensor: how many there are
    int tensor[MAX_UPDATES];                 // its number: a part of the key of its random bits
    int place[MAX_UPDATES];                  // its place among the coefficients
    unsigned short tail[MAX_UPDATES];        // elements in its last chunk, 1 to CHUNK
    unsigned short clear[MAX_UPDATES];       // 1: its gradient is set to zero
};

// STATES: how many of the list's state tensors this kernel reads and writes.
template <int STATES, int TABLES, class C>
__device__ __forceinline__ void update_list(const C* coefficients, const double* seed, const UpdateList<TABLES>& updates) {
    for (int chunk = blockIdx.x; chunk < updates.first[MAX_UPDATES]; chunk += gridDim.x) {
        int t = tensor_of(updates.first, MAX_UPDATES, chunk);
        int count = chunk + 1 == updates.first[t + 1] ? updates.tail[t] : CHUNK;
        long long from = (long long)(chunk - updates.first[t]) * CHUNK;
        PARAM_T *w = updates.weight[t] + from, *state[STATES];
        GRAD_T* g = updates.grad[t] + from;
        bf16* copy = updates.copy[t] == 0 ? 0 : updates.copy[t] + from;
        bool whole = count == CHUNK && aligned4(w, sizeof(PARAM_T)) && aligned4(g, sizeof(GRAD_T)) && aligned4(copy, sizeof(bf16));
        #pragma unroll
        for (int j = 0; j < STATES; j++) {
            state[j] = updates.state[j][t] + from;
            whole = whole && aligned4(state[j], sizeof(PARAM_T));
        }
        update_chunk(w, g, state, copy, count, whole, whole, updates.clear[t], coefficients[updates.place[t]], seed, updates.tensor[t], from);
    }
}

// ---- neighbours in an arena ----

template <int STATES, class C>
__device__ __forceinline__ void update_arena(
    const C* coefficients, const double* seed,
    PARAM_T* w, GRAD_T* g, PARAM_T* const (&state)[STATES], bf16* copy,
    const int4* chunks,                      // (N / CHUNK) per chunk: .x its tensor, .y elements in it, .z which chunk of the tensor
    int first, int last,                     // chunks of the arena that are this launch's
    int ahead)                               // a tensor's coefficients stand so many places before its number
{
    for (int chunk = first + blockIdx.x; chunk < last; chunk += gridDim.x) {
        int4 where = chunks[chunk];
        long long at = (long long)chunk * CHUNK;         // behind a tensor's end the arena has zeros, which may be read
        PARAM_T* here[STATES];
        #pragma unroll
        for (int j = 0; j < STATES; j++) here[j] = state[j] + at;
        update_chunk(w + at, g + at, here, copy == 0 ? 0 : copy + at, where.y, true, where.y == CHUNK, true,
                     coefficients[where.x - ahead], seed, where.x, (long long)where.z * CHUNK);
    }
}
