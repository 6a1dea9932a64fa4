// poly_forward, third rung: the forward of poly_attention.cu on Hopper's warpgroup products (wgmma, sm_90a), for bf16 heads of 64.
//
//   s_ij = q~_i . k_j + q_i . PE[i - j]       c = 8 tanh(s / 8)       phi_ij = scale (a c^p + b) for 0 <= i - j < window, else exactly 0
//   y_i = sum over j of phi_ij v_j
//
// What limits v2 is that each warp reads every tile from shared memory into its registers, as often as there are warps. Here four warps, a warpgroup, make
// one product of 64 rows, and the tensor cores read the right factor from shared memory by themselves, while the warps go on with something else.
//
// A block has 128 queries of a head, 64 for each of two warpgroups, and goes from the diagonal to the left, 64 keys at a time. Step s of a warpgroup has the
// tiles S = q~ K^T and, because i - j takes 127 values there, products with two tiles of PE: P of the 64 differences 64 s + 1 .. 64 s + 64, and P of the 64
// before these, which is that of the step before. As in v2, shuffles put what belongs to one pair into one lane (skewed); S is summed onto it, phi is rounded,
// and is the left factor of y += phi V.
//
// While the special functions of step s are computed, the tensor cores make S and P of step s + 1; while that one is skewed, y of step s.
// The two warpgroups share K and V; of PE the one with the later queries is a tile ahead. So 24 KiB are loaded for two tiles.
//
// Per tile of 64 x 64 pairs: 12 products of m64n64k16, 32 clocks each, are 384 clocks of an SM's tensor cores; 4096 tanh are 256 clocks; shared memory is busy
// for 192 clocks with what the products read, for 96 with what is loaded, for 128 with shuffles. T = 2048 and 16 heads have 8448 such tiles (and
// T / 128 * 16 that are all masked): 64 for each of 132 SMs, 24,600 clocks of tensor cores.

#ifndef HEAD
#define HEAD 64
#endif
#ifndef DEGREE
#define DEGREE 3
#endif
#define THREADS 256
#define SIDE 64               // queries of a warpgroup, keys of a step
#define TILE_BYTES 8192       // 64 rows of 128 bytes
#define PLACES 4              // for tiles of each kind: tiles are loaded two steps ahead, and it is a power of two
#define ALL 0xffffffffu

struct Rows { int q_tilde, q, k, v, grad; };             // as in poly_attention.cu: elements from one row to the next

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && HEAD == 64
#define HOPPER 1
#else
#define HOPPER 0              // an empty body
#endif

#if HOPPER
typedef float Sums[32];       // of a lane, 64 x 64 of a warpgroup: lane 4 g + t of warp w has rows 16 w + g and 8 below; [4 m + 2 h + e] is row g + 8 h, column 8 m + 2 t + e

// ---- tiles in shared memory ----
// A row is 128 bytes: eight chunks of 16. Chunk c of row r lies at place c ^ (r % 8) of its row, so that eight rows' chunks are in different banks: what the
// descriptors call a swizzle of 128 bytes. A tile begins at a multiple of 1024 bytes.

// 64 rows from row `first` on, on their way. If `checked`, rows outside of 0 .. rows - 1 are zeros; else there are none such. `from`: this thread's chunk of row 0.
template <bool checked> __device__ __forceinline__ void ask(unsigned to, const bf16* from, int stride, int first, int rows) {
    int r = threadIdx.x / 8, c = threadIdx.x % 8;
    to += r * 128 + ((c ^ (r % 8)) << 4);
    #pragma unroll
    for (int k = 0; k < 2; k++) {
        int row = first + r + 32 * k, bytes = !checked || (unsigned)row < (unsigned)rows ? 16 : 0;         // of 0 bytes nothing is read, wherever that is
        const bf16* source;
        asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(source) : "r"(row), "r"((int)sizeof(bf16) * stride), "l"(from));        // one instruction
        if (checked) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to + 4096 * k), "l"(source), "r"(bytes) : "memory");
        else asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + 4096 * k), "l"(source) : "memory");
    }
}
__device__ __forceinline__ void asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All groups are there but the last `open`, for all threads and for the tensor cores.
template <int open> __device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_group %0;" :: "n"(open) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
}

// ---- products of a warpgroup ----
// A descriptor: address / 16 in bits 0-13; in bits 16-29 and 32-45 two distances / 16, of which the second is that of eight rows, and the first counts only where a row
// has more than 128 bytes; 1 in bits 62-63 for a swizzle of 128 bytes. Sixteen channels on (the right factor's rows are keys or differences) are 32 bytes,
// sixteen keys on (V) 16 rows.
#define APART 64
__device__ __forceinline__ unsigned descriptor(unsigned address) { return APART << 16 | address >> 4; }     // its lower half
__device__ __forceinline__ unsigned long long whole(unsigned lower) { return (1ull << 62 | (unsigned long long)APART << 32) | lower; }

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
// d (64 x 64) = or += a (64 x 16, in registers) b. by_rows: the rows of b's tile are what is summed over; else d's columns.
template <bool adds, bool by_rows> __device__ __forceinline__ void multiply(Sums& d, const unsigned (&a)[4], unsigned long long b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
                 : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)adds), "n"((int)by_rows));
}
// d = or += a (64 x 64) times the tile of a descriptor, or its transpose. What is written into registers before comes first (begin); done after finished().
template <bool adds, bool by_rows> __device__ __forceinline__ void multiply(Sums& d, const unsigned (&a)[4][4], unsigned tile) {
    const int on = (by_rows ? 16 * 128 : 32) / 16;
    multiply<adds, by_rows>(d, a[0], whole(tile));
    #pragma unroll
    for (int k = 1; k < 4; k++) multiply<true, by_rows>(d, a[k], whole(tile + k * on));
}
__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int open> __device__ __forceinline__ void finished() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(open) : "memory"); }
// From here on these may be read: the compiler does not move that before a finished().
__device__ __forceinline__ void taken(Sums& d) {
    #pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}

// ---- between pairs and differences ----
// Of rows i and columns j of a step, difference i - j + 63 of the 128 that `near` and `far` have. A warp needs 79 of them, from 16 warp on. Column 8 m + 2 t + e of
// row g + 8 h is asked from one lane, that with the same g, and each lane is asked by one: for the odd or the even one of its columns, of one of two 8 x 8.
template <int warp> __device__ __forceinline__ void skewed(Sums& to, const Sums& scores, const Sums& near, const Sums& far) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int from = lane - t + (7 + g - 2 * t - e) % 8 / 2;
        bool odd = (g + e) % 2 == 0, upper = g + (e == 0) > 2 * t + odd;          // of what this lane gives
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[10];                                 // of the 8 x 8 from 2 warp on
            #pragma unroll
            for (int m = 0; m < 10; m++) {
                const Sums& of = 2 * warp + m < 8 ? near : far;
                int at = 4 * ((2 * warp + m) % 8) + 2 * h;
                x[m] = odd ? of[at + 1] : of[at];
            }
            #pragma unroll
            for (int m = 0; m < 8; m++) to[4 * m + 2 * h + e] = scores[4 * m + 2 * h + e] + __shfl_sync(ALL, upper ? x[8 - m + h] : x[7 - m + h], from);
        }
    }
}

__device__ __forceinline__ float eight_to(int p) {
    float power = 1.0f;
    #pragma unroll
    for (int k = 0; k < p; k++) power *= 8.0f;
    return power;
}
// tanh(x)^p + rest. Up to degree 3 one special function is near enough: off by 2^-11 of itself, and rounding to bf16 follows.
__device__ __forceinline__ float power_and(float x, float rest) {
    float tanh;
    if (DEGREE <= 3) asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(x));
    else {
        float e, over;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(2.88539008f * x));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(over) : "f"(1.0f + e));
        tanh = fmaf(-2.0f, over, 1.0f);
    }
    float square = tanh * tanh, even = 1.0f;
    #pragma unroll
    for (int k = 1; k < DEGREE; k += 2) even *= square;
    return fmaf(even, tanh, rest);
}

// An eighth of 16 rows of a warp from row `first` on, as left factors; rows from `rows` on are zeros.
__device__ __forceinline__ void fetch(unsigned (&a)[4][4], const bf16* from, int stride, int first, int rows) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int k = 0; k < 4; k++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = first + g + 8 * (i % 2);
            unsigned two = row < rows ? *reinterpret_cast<const unsigned*>(from + (long long)row * stride + 16 * k + 8 * (i / 2) + 2 * t) : 0u;
            a[k][i] = both_as_bf16(0.125f * low_as_float(two), 0.125f * high_as_float(two));       // exact, but for numbers below 2^-123
        }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) poly_forward_v3(
    bf16* y,                                  // (B, T, H, d)
    const bf16* q_tilde, const bf16* q, const bf16* k, const bf16* v,              // (B, T, H, d), rows apart; 16-byte aligned
    const bf16* pe,                           // (at least T, d)
    const float* coefficients,                // a, b, scale
    const float* gate,                        // (B, T, H) what y is multiplied by; null: nothing
    int T, int H, int window, Rows stride)
{
#if HOPPER
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned of_k = ((unsigned)__cvta_generic_to_shared(memory) + 1023) & ~1023u, of_v = of_k + PLACES * TILE_BYTES, of_pe = of_v + PLACES * TILE_BYTES;
    auto place = [&](unsigned of, unsigned s) { return of + s % PLACES * TILE_BYTES; };
    unsigned all_k = descriptor(of_k), all_v = descriptor(of_v), all_pe = descriptor(of_pe);
    auto tile_of = [&](unsigned all, unsigned s) { return all + s % PLACES * (TILE_BYTES / 16); };
    int group = __shfl_sync(ALL, threadIdx.x / 128, 0), warp = __shfl_sync(ALL, threadIdx.x / 32 % 4, 0), g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int tiles = (T + 2 * SIDE - 1) / (2 * SIDE), heads = gridDim.x / tiles, tile = tiles - 1 - blockIdx.x / heads;      // the longest first
    int head = blockIdx.x % heads % H;
    long long b = blockIdx.x % heads / H;
    q_tilde += b * T * stride.q_tilde + head * HEAD;
    q += b * T * stride.q + head * HEAD;
    k += b * T * stride.k + head * HEAD + threadIdx.x % 8 * 8;
    v += b * T * stride.v + head * HEAD + threadIdx.x % 8 * 8;
    pe += threadIdx.x % 8 * 8;
    // Steps: of the block, from the later queries' diagonal to the earlier ones' last key; of this warpgroup, which begins (1 - group) steps later.
    int i0 = (2 * tile + group) * SIDE;
    int steps = 2 * tile + 2 - max(0, 2 * tile * SIDE - window + 1) / SIDE, mine = 2 * tile + group + 1 - max(0, i0 - window + 1) / SIDE;
    int inside = (2 * tile + 1) * SIDE <= T ? min(steps, (T - 1) / SIDE) : 0;           // before this step all rows exist, but for those of step 0
    auto ask_for = [&](int s) {                          // what the block takes from step s on: V of s, K and PE of the next
        if (s > 0 && s + 1 < inside) {
            ask<false>(place(of_v, s), v, stride.v, (2 * tile + 1 - s) * SIDE, T);
            ask<false>(place(of_k, s + 1), k, stride.k, (2 * tile - s) * SIDE, T);
            ask<false>(place(of_pe, s + 1), pe, HEAD, (s + 1) * SIDE + 1, T);
        } else if (s < steps) {
            ask<true>(place(of_v, s), v, stride.v, (2 * tile + 1 - s) * SIDE, T);
            if (s + 1 < steps) {
                ask<true>(place(of_k, s + 1), k, stride.k, (2 * tile - s) * SIDE, T);
                ask<true>(place(of_pe, s + 1), pe, HEAD, (s + 1) * SIDE + 1, T);
            }
        }
        asked();
    };
    unsigned before = place(of_v, PLACES - 1);           // free until step 1: PE of the differences -63 .. 0
    ask<true>(before, pe, HEAD, -63, T);
    ask<true>(place(of_pe, 0), pe, HEAD, 1, T);
    ask<true>(place(of_k, 0), k, stride.k, (2 * tile + 1) * SIDE, T);
    ask_for(0);
    ask_for(1);
    unsigned by_k[4][4], by_pe[4][4], phi[4][4];
    fetch(by_k, q_tilde, stride.q_tilde, i0 + 16 * warp, T);
    fetch(by_pe, q, stride.q, i0 + 16 * warp, T);
    // phi = factor (tanh^p + rest). Where b is more than 1e20 times the other part, or that is 0, nothing is seen of it.
    float scale = coefficients[2], rest = scale * coefficients[1], factor = scale * coefficients[0] * eight_to(DEGREE);
    if (fabsf(rest) > 1e20f * fabsf(factor)) { factor = 1e-20f * rest; rest = 1e20f; }
    else rest = factor != 0.0f ? rest / factor : 0.0f;

    Sums sums, c, scores, even, odd;                     // y; s / 8; S; P of even steps, and of odd ones
    #pragma unroll
    for (int i = 0; i < 32; i++) sums[i] = scores[i] = even[i] = odd[i] = 0.0f;
    auto skew = [&](const Sums& near, const Sums& far) {          // each warp has its own registers
        if (warp == 0) skewed<0>(c, scores, near, far);
        else if (warp == 1) skewed<1>(c, scores, near, far);
        else if (warp == 2) skewed<2>(c, scores, near, far);
        else skewed<3>(c, scores, near, far);
    };
    auto weights = [&](int s) {                          // phi of step s, over `factor`
        #pragma unroll
        for (int i = 0; i < 32; i++) c[i] = power_and(c[i], rest);
        if (s == 0 || (s + 1) * SIDE > window)
            #pragma unroll
            for (int i = 0; i < 32; i++) {
                int by = s * SIDE + 16 * warp + g + 8 * (i % 4 / 2) - (8 * (i / 4) + 2 * t + i % 2);
                c[i] = by >= 0 && by < window ? c[i] : 0.0f;
            }
    };
    auto add_values = [&](int at) {                      // y += phi V of step `at` of the block
        #pragma unroll
        for (int i = 0; i < 16; i++) phi[i / 4][i % 4] = both_as_bf16(c[2 * i], c[2 * i + 1]);
        begin();
        multiply<true, true>(sums, phi, tile_of(all_v, at));
        commit();
    };
    arrived<1>();
    begin();
    multiply<false, false>(odd, by_pe, descriptor(before));
    multiply<false, false>(even, by_pe, tile_of(all_pe, 0));
    multiply<false, false>(scores, by_k, tile_of(all_k, 1 - group));
    commit();
    finished<0>();
    auto enter = [&](int s) {                            // step s of the block: its tiles are there, and those that the next ones take the place of were read
        arrived<1>();
        ask_for(s + 2);
    };
    if (group == 0) enter(0);
    // Of step s, S and P (in `far`) are about to be there, P of the step before is. Then those of step s + 1 are on their way, P in place of the one before.
    auto step = [&](int s, Sums& near, Sums& far) {
        int at = s + 1 - group;
        finished<1>();                                   // all but y of the step before
        taken(scores);
        taken(near);
        taken(far);
        enter(at);
        skew(near, far);
        begin();
        multiply<false, false>(scores, by_k, tile_of(all_k, at + 1));
        multiply<false, false>(near, by_pe, tile_of(all_pe, s + 1));
        commit();
        weights(s);
        finished<1>();                                   // y of the step before: phi may be written
        add_values(at);
    };
    auto last = [&](int s, Sums& near, Sums& far) {
        int at = s + 1 - group;
        finished<0>();
        taken(scores);
        taken(near);
        taken(far);
        enter(at);
        skew(near, far);
        weights(s);
        add_values(at);
        finished<0>();
        taken(sums);
    };
    for (int s = 0;; s += 2) {
        if (s + 1 == mine) { last(s, odd, even); break; }
        step(s, odd, even);
        if (s + 2 == mine) { last(s + 1, even, odd); break; }
        step(s + 1, even, odd);
    }
    if (group == 1) for (int s = mine; s < steps; s++) enter(s);

    long long wide = (long long)H * HEAD, row = i0 + 16 * warp + g;
    y += (b * T + row) * wide + head * HEAD + 2 * t;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        if (row + 8 * h >= T) continue;
        float times = gate ? factor * gate[(b * T + row + 8 * h) * H + head] : factor;
        #pragma unroll
        for (int m = 0; m < 8; m++)
            *reinterpret_cast<unsigned*>(y + 8 * h * wide + 8 * m) = both_as_bf16(times * sums[4 * m + 2 * h], times * sums[4 * m + 2 * h + 1]);
    }
#endif
}
