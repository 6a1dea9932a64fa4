// optimizer: device functions that the kernels of all optimizers share.
//
// The file of an optimizer, such as adamw.cu or lion.cu, declares
//
//   struct Settings      The hyperparameters of a parameter group, as doubles. The host writes each
//                        field from the group's entry of that name (lr, eps, ...). beta1 and beta2
//                        are the two numbers of `betas`; direction is 1, or -1 to maximize.
//   struct Coefficients  What all elements of a tensor have in common in one step, as floats. Every
//                        optimizer has factor, skip and step, which begin_step() writes.
//   coefficients_of()    Computes the other coefficients from the settings and the step number.
//   update()             Computes the new weight and state of one element.
//
// and three kernels, each of which calls one function of this header:
//
//   <file>_begin  begin_step()    Is the step taken? One thread per tensor computes coefficients.
//   <file>_v2     update_list()   The update of tensors that may lie anywhere in memory.
//   <file>_v3     update_arena()  The update of tensors that lie one after the other in an arena.

#ifndef PARAM_T
#define PARAM_T float        // of weights and state
#endif
#ifndef GRAD_T
#define GRAD_T float
#endif
#ifndef STOCHASTIC
#define STOCHASTIC 0         // 1: bf16 weights are rounded stochastically; 0: to the nearest
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
// Groups of four elements per thread. All are loaded before the first is used, so that a thread
// block has a whole chunk in flight.
#define UNROLL (CHUNK / 4 / THREADS)
#ifndef MAX_TENSORS
#define MAX_TENSORS 256      // tensors in one launch of begin_step(), and its threads
#endif
#ifndef MAX_UPDATES
#define MAX_UPDATES 60       // tensors in one launch of update_list()
#endif

// ---- the beginning of a step ----

struct Steps {
    float* step[MAX_TENSORS];               // (1) number of steps that the tensor has taken
    int tensor[MAX_TENSORS];                // its number; -1: no tensor
    unsigned short settings[MAX_TENSORS];   // its parameter group
};

// Decides whether the step is taken, counts it, and computes the coefficients of each tensor.
// Launched as one thread block of MAX_TENSORS threads, one per tensor.
template <class C, class S>
__device__ __forceinline__ void begin_step(
    C* coefficients,              // (MAX_TENSORS) result, one row per tensor of this launch
    const S* settings,            // (parameter groups)
    const float4* clip_results,   // (clip_count) of reduce_v2: .x scale, .w 1 if finite; may be 0
    const int* first_nonfinite,   // (clip_count) number of the first tensor with NaN or infinity
    const int* groups,            // (tensors) row of clip_results of each; 0: all have row 0
    int clip_count,
    int skip_nonfinite,           // 1: a gradient with NaN or infinity skips the step
    const float* divisor,         // (1) the gradients are divided by it; 0: by nothing
    const float* found_inf,       // (1) of torch's GradScaler: nonzero skips the step; may be 0
    int* record,                  // (4) steps begun, steps skipped; of the last skip: step, tensor
    int count_it,                 // 1: this launch counts the step in `record`
    const Steps& steps)
{
    // The threads share the rows of clip_results. One row that is not finite skips all tensors.
    bool inf_found = found_inf != 0 && *found_inf != 0.0f;
    bool nonfinite = false;
    for (int g = threadIdx.x; g < clip_count; g += MAX_TENSORS)
        nonfinite = nonfinite || clip_results[g].w == 0.0f;
    bool skip = __syncthreads_or(inf_found || (skip_nonfinite && nonfinite));
    if (threadIdx.x == 0 && count_it) {
        record[0]++;
        if (skip) {
            record[1]++;
            record[2] = record[0];
            record[3] = -1;
            for (int g = clip_count - 1; g >= 0; g--)
                if (clip_results[g].w == 0.0f) record[3] = first_nonfinite[g];
        }
    }
    int t = steps.tensor[threadIdx.x];
    if (t < 0) return;
    float step = *steps.step[threadIdx.x] + (skip ? 0.0f : 1.0f);
    if (!skip) *steps.step[threadIdx.x] = step;
    const S& s = settings[steps.settings[threadIdx.x]];
    float factor = clip_results == 0 ? 1.0f : clip_results[groups == 0 ? 0 : groups[t]].x;
    if (divisor != 0) factor /= *divisor;
    C c = coefficients_of(s, (int)step);
    c.factor = s.direction < 0.0 ? -factor : factor;
    c.skip = skip ? 1.0f : 0.0f;
    c.step = step;
    coefficients[threadIdx.x] = c;
}

// base^exponent by repeated squaring: bit-identical on every machine, which pow() is not.
__device__ __forceinline__ double power(double base, int exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent /= 2, base *= base) if (exponent % 2) result *= base;
    return result;
}

// ---- one chunk ----

// The random bits of four elements. quad: their number within the tensor.
__device__ __forceinline__ uint4 noise(
    unsigned long long seed, int tensor, long long quad, float step)
{
    unsigned low = (unsigned)quad, high = (unsigned)(quad >> 32);
    return random_bits(seed, make_uint4(low, high, (unsigned)tensor, (unsigned)step));
}
__device__ __forceinline__ void store4_stochastic(bf16* x, int i, int count, float4 v, uint4 r) {
    if (4 * i < count) x[4 * i] = as_bf16_stochastic(v.x, r.x);
    if (4 * i + 1 < count) x[4 * i + 1] = as_bf16_stochastic(v.y, r.y);
    if (4 * i + 2 < count) x[4 * i + 2] = as_bf16_stochastic(v.z, r.z);
    if (4 * i + 3 < count) x[4 * i + 3] = as_bf16_stochastic(v.w, r.w);
}
template <class T>
__device__ __forceinline__ void store4_stochastic(T* x, int i, int count, float4 v, uint4) {
    store4_within(x, i, count, v);
}

// Updates one of four elements. lane: x, y, z or w. state: four elements of each state tensor.
template <int STATES, class C>
__device__ __forceinline__ void update_lane(
    float float4::*lane, float4& w, float4 g, float4 (&state)[STATES], const C& c)
{
    float lane_state[STATES];
    #pragma unroll
    for (int j = 0; j < STATES; j++) lane_state[j] = state[j].*lane;
    update(w.*lane, g.*lane, lane_state, c);
    #pragma unroll
    for (int j = 0; j < STATES; j++) state[j].*lane = lane_state[j];
}

// Updates one chunk. The pointers are those of its first element.
template <int STATES, class C>
__device__ __forceinline__ void update_chunk(
    PARAM_T* w, const GRAD_T* g, PARAM_T* const (&state)[STATES],
    bf16* copy,                  // of the new weights; 0: none
    int count,                   // elements of the chunk, 1 to CHUNK
    bool read_whole,             // all CHUNK elements may be read, with aligned vector loads
    bool write_whole,            // all CHUNK elements may be written, with aligned vector stores
    const C& coefficients,
    const double* seed, int tensor,
    long long start)             // number of the chunk's first element within the tensor
{
    // All loads are issued before the first value is used, the coefficients' among them.
    float4 W[UNROLL], G[UNROLL], S[UNROLL][STATES];
    #pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int i = k * THREADS + threadIdx.x;
        W[k] = load4(w, i, count, read_whole);
        G[k] = load4(g, i, count, read_whole);
        #pragma unroll
        for (int j = 0; j < STATES; j++) S[k][j] = load4(state[j], i, count, read_whole);
    }
    C c = coefficients;
    #pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int i = k * THREADS + threadIdx.x;
        if (c.skip != 0.0f) continue;
        update_lane(&float4::x, W[k], G[k], S[k], c);
        update_lane(&float4::y, W[k], G[k], S[k], c);
        update_lane(&float4::z, W[k], G[k], S[k], c);
        update_lane(&float4::w, W[k], G[k], S[k], c);
        uint4 r = make_uint4(0, 0, 0, 0);
        if (STOCHASTIC) r = noise((unsigned long long)*seed, tensor, start / 4 + i, c.step);
        if (STOCHASTIC && copy == 0) store4_stochastic(w, i, count, W[k], r);
        else store4(w, i, count, write_whole, W[k]);
        #pragma unroll
        for (int j = 0; j < STATES; j++) store4(state[j], i, count, write_whole, S[k][j]);
        if (copy == 0) continue;
        if (STOCHASTIC) store4_stochastic(copy, i, count, W[k], r);
        else store4(copy, i, count, write_whole, W[k]);
    }
}

// ---- tensors anywhere in memory ----

template <int TABLES>
struct UpdateList {                          // passed by value: no copy to the device is needed
    PARAM_T* weight[MAX_UPDATES];
    const GRAD_T* grad[MAX_UPDATES];
    PARAM_T* state[TABLES][MAX_UPDATES];     // a row per state tensor; 0 where the group has none
    bf16* copy[MAX_UPDATES];                 // the bf16 copy of the weight; 0: none
    int first[MAX_UPDATES + 1];              // its first chunk; the last entry: number of chunks
    int tensor[MAX_UPDATES];                 // its number, a part of the key of its random bits
    int place[MAX_UPDATES];                  // its row of the coefficients
    unsigned short tail[MAX_UPDATES];        // elements in its last chunk, 1 to CHUNK
};

// Updates the tensors of a list. A thread block takes one chunk after the other.
// STATES: the number of state tensors that this kernel reads and writes, at most TABLES.
template <int STATES, int TABLES, class C>
__device__ __forceinline__ void update_list(
    const C* coefficients, const double* seed, const UpdateList<TABLES>& updates)
{
    for (int chunk = blockIdx.x; chunk < updates.first[MAX_UPDATES]; chunk += gridDim.x) {
        int t = tensor_of(updates.first, MAX_UPDATES, chunk);
        int count = chunk + 1 == updates.first[t + 1] ? updates.tail[t] : CHUNK;
        long long start = (long long)(chunk - updates.first[t]) * CHUNK;
        PARAM_T *w = updates.weight[t] + start, *state[STATES];
        const GRAD_T* g = updates.grad[t] + start;
        bf16* copy = updates.copy[t] == 0 ? 0 : updates.copy[t] + start;
        // Tested in this order: with g and copy first, NVRTC 12.9 uses up to 34 more registers.
        bool whole = count == CHUNK && aligned4(w, sizeof(PARAM_T));
        #pragma unroll
        for (int j = 0; j < STATES; j++) {
            state[j] = updates.state[j][t] + start;
            whole = whole && aligned4(state[j], sizeof(PARAM_T));
        }
        whole = whole && aligned4(g, sizeof(GRAD_T)) && aligned4(copy, sizeof(bf16));
        update_chunk(w, g, state, copy, count, whole, whole,
                     coefficients[updates.place[t]], seed, updates.tensor[t], start);
    }
}

// ---- tensors in an arena ----

// Updates chunks [first, last) of an arena. All its buffers have the same offsets, so a thread
// block issues its loads before it knows to which tensor its chunk belongs.
template <int STATES, class C>
__device__ __forceinline__ void update_arena(
    const C* coefficients, const double* seed,
    PARAM_T* w, const GRAD_T* g, PARAM_T* const (&state)[STATES], bf16* copy,   // (N) each
    const int4* chunks,          // (N / CHUNK) .x tensor, .y elements, .z index within the tensor
    int first, int last,
    int offset)                  // number of a tensor minus its row of the coefficients
{
    for (int chunk = first + blockIdx.x; chunk < last; chunk += gridDim.x) {
        int4 entry = chunks[chunk];
        long long start = (long long)chunk * CHUNK;
        PARAM_T* chunk_state[STATES];
        #pragma unroll
        for (int j = 0; j < STATES; j++) chunk_state[j] = state[j] + start;
        // A partial chunk may be read in full: the arena pads each tensor with zeros.
        update_chunk(w + start, g + start, chunk_state, copy == 0 ? 0 : copy + start,
                     entry.y, true, entry.y == CHUNK, coefficients[entry.x - offset],
                     seed, entry.x, (long long)entry.z * CHUNK);
    }
}
