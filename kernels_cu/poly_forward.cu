// poly_forward, third rung: the forward of poly_attention.cu on Hopper's warpgroup products (wgmma,
// sm_90a), for bf16 heads of 64.
//
//   s_ij = q~_i . k_j + q_i . PE[i - j]       c = 8 tanh(s / 8)       phi_ij = scale (a c^p + b) for 0 <= i - j < window, else exactly 0
//   y_i = sum over j of phi_ij v_j
//
// What limits v2 is that each warp reads every tile from shared memory into its registers, as often
// as there are warps. Here four warps, a warpgroup, make one product of 64 rows, and the tensor
// cores read the right factor from shared memory by themselves, while the warps go on with
// something else.
//
// A block has 128 queries of a head, 64 for each of two warpgroups, and goes from the diagonal to
// the left, 64 keys at a time. Step s of a warpgroup has the tiles S = q~ K^T and, because i - j
// takes 127 values there, products with two tiles of PE: P of the 64 differences 64 s + 1 .. 64 s +
// 64, and P of the 64 before these, which is that of the step before. As in v2, shuffles put what
// belongs to one pair into one lane (skewed); S is summed onto it, phi is rounded, and is the left
// factor of y += phi V.
//
// While the special functions of step s are computed, the tensor cores make S and P of step s + 1;
// while that one is skewed, y of step s. The two warpgroups share K and V; of PE the one with the
// later queries is a tile ahead. So 24 KiB are loaded for two tiles.
//
// Per tile of 64 x 64 pairs: 12 products of m64n64k16, 32 clocks each, are 384 clocks of an SM's
// tensor cores; 4096 tanh are 256 clocks; shared memory is busy for 192 clocks with what the
// products read, for 96 with what is loaded, for 128 with shuffles. T = 2048 and 16 heads have 8448
// such tiles (and T / 128 * 16 that are all masked): 64 for each of 132 SMs, 24,600 clocks of
// tensor cores.

#include "hopper.cuh"
#include "poly_attention.cuh"

#define PLACES 4              // for tiles of each kind: two steps ahead, and a power of two

#if HOPPER && HEAD == 64
// Copies the 64 rows of `from` from row `first` on into a tile. `from` is this thread's chunk of
// row 0.
template <bool checked>
__device__ __forceinline__ void load(unsigned to, const bf16* from, int stride, int first,
                                     int rows) {
    int r = threadIdx.x / 8, c = threadIdx.x % 8;
    load_chunks<checked>(to + (r * 128 + swizzle(r, c)), from, stride, first + r, rows);
}

// ---- between pairs and differences ----
// Of rows i and columns j of a step, difference i - j + 63 of the 128 that `near` and `far` have. A
// warp needs 79 of them, from 16 warp on. Column 8 m + 2 t + e of row g + 8 h is asked from one
// lane, that with the same g, and each lane is asked by one: for the odd or the even one of its
// columns, of one of two 8 x 8.
template <int warp>
__device__ __forceinline__ void skewed(Sums& to, const Sums& scores, const Sums& near,
                                       const Sums& far) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int from = lane - t + (7 + g - 2 * t - e) % 8 / 2;
        // Of what this lane gives.
        bool odd = (g + e) % 2 == 0, upper = g + (e == 0) > 2 * t + odd;
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
            for (int m = 0; m < 8; m++)
                to[4 * m + 2 * h + e] = scores[4 * m + 2 * h + e] +
                                        __shfl_sync(ALL, upper ? x[8 - m + h] : x[7 - m + h], from);
        }
    }
}

// An eighth of 16 rows of a warp from row `first` on, as left factors; rows from `rows` on are
// zeros.
__device__ __forceinline__ void fetch(Factor& a, const bf16* from, int stride, int first,
                                      int rows) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int k = 0; k < 4; k++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = first + g + 8 * (i % 2);
            unsigned two = row < rows
                               ? *reinterpret_cast<const unsigned*>(from + (long long)row * stride +
                                                                    16 * k + 8 * (i / 2) + 2 * t)
                               : 0u;
            // Exact, but for numbers below 2^-123.
            a[k][i] = both_as_bf16(0.125f * low_as_float(two), 0.125f * high_as_float(two));
        }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) poly_forward_v3(
    bf16* y,                                  // (B, T, H, d)
    // (B, T, H, d), rows apart; 16-byte aligned.
    const bf16* q_tilde, const bf16* q, const bf16* k, const bf16* v,
    const bf16* pe,                           // (at least T, d)
    const float* coefficients,                // a, b, scale
    const float* gate,                        // (B, T, H) what y is multiplied by; null: nothing
    int T, int H, int window, Rows stride)
{
#if HOPPER && HEAD == 64
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned of_k = ((unsigned)__cvta_generic_to_shared(memory) + 1023) & ~1023u,
             of_v = of_k + PLACES * TILE_BYTES, of_pe = of_v + PLACES * TILE_BYTES;
    auto place = [&](unsigned of, unsigned s) { return of + s % PLACES * TILE_BYTES; };
    unsigned all_k = descriptor(of_k), all_v = descriptor(of_v), all_pe = descriptor(of_pe);
    auto tile_of = [&](unsigned all, unsigned s) { return all + s % PLACES * (TILE_BYTES / 16); };
    int group = __shfl_sync(ALL, threadIdx.x / 128, 0),
        warp = __shfl_sync(ALL, threadIdx.x / 32 % 4, 0), g = threadIdx.x % 32 / 4,
        t = threadIdx.x % 4;
    // The longest first.
    int tiles = (T + 2 * SIDE - 1) / (2 * SIDE), heads = gridDim.x / tiles,
        tile = tiles - 1 - blockIdx.x / heads;
    int head = blockIdx.x % heads % H;
    long long b = blockIdx.x % heads / H;
    q_tilde += b * T * stride.q_tilde + head * HEAD;
    q += b * T * stride.q + head * HEAD;
    k += b * T * stride.k + head * HEAD + threadIdx.x % 8 * 8;
    v += b * T * stride.v + head * HEAD + threadIdx.x % 8 * 8;
    pe += threadIdx.x % 8 * 8;
    // Steps: of the block, from the later queries' diagonal to the earlier ones' last key; of this
    // warpgroup, which begins (1 - group) steps later.
    int i0 = (2 * tile + group) * SIDE;
    int steps = 2 * tile + 2 - max(0, 2 * tile * SIDE - window + 1) / SIDE,
        mine = 2 * tile + group + 1 - max(0, i0 - window + 1) / SIDE;
    // Before this step all rows exist, but for those of step 0.
    int inside = (2 * tile + 1) * SIDE <= T ? min(steps, (T - 1) / SIDE) : 0;
    // What the block takes from step s on: V of s, K and PE of the next.
    auto load_step = [&](int s) {
        if (s > 0 && s + 1 < inside) {
            load<false>(place(of_v, s), v, stride.v, (2 * tile + 1 - s) * SIDE, T);
            load<false>(place(of_k, s + 1), k, stride.k, (2 * tile - s) * SIDE, T);
            load<false>(place(of_pe, s + 1), pe, HEAD, (s + 1) * SIDE + 1, T);
        } else if (s < steps) {
            load<true>(place(of_v, s), v, stride.v, (2 * tile + 1 - s) * SIDE, T);
            if (s + 1 < steps) {
                load<true>(place(of_k, s + 1), k, stride.k, (2 * tile - s) * SIDE, T);
                load<true>(place(of_pe, s + 1), pe, HEAD, (s + 1) * SIDE + 1, T);
            }
        }
        cp_async_commit_group();
    };
    // Free until step 1: PE of the differences -63 .. 0.
    unsigned before = place(of_v, PLACES - 1);
    load<true>(before, pe, HEAD, -63, T);
    load<true>(place(of_pe, 0), pe, HEAD, 1, T);
    load<true>(place(of_k, 0), k, stride.k, (2 * tile + 1) * SIDE, T);
    load_step(0);
    load_step(1);
    Factor by_k, by_pe, phi;
    fetch(by_k, q_tilde, stride.q_tilde, i0 + 16 * warp, T);
    fetch(by_pe, q, stride.q, i0 + 16 * warp, T);
    // phi = factor (tanh^p + rest). Where b is more than 1e20 times the other part, or that is 0,
    // nothing is seen of it.
    float scale = coefficients[2], rest = scale * coefficients[1],
          factor = scale * coefficients[0] * power_of_8(DEGREE);
    if (fabsf(rest) > 1e20f * fabsf(factor)) { factor = 1e-20f * rest; rest = 1e20f; }
    else rest = factor != 0.0f ? rest / factor : 0.0f;

    // Y; s / 8; S; P of even steps, and of odd ones.
    Sums sums, c, scores, even, odd;
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
        for (int i = 0; i < 32; i++) {
            float t = tanh_of<false>(c[i], 1.0f);
            c[i] = fmaf(even_power(t), t, rest);
        }
        if (s == 0 || (s + 1) * SIDE > window)
            #pragma unroll
            for (int i = 0; i < 32; i++) {
                int by = s * SIDE + 16 * warp + g + 8 * (i % 4 / 2) - (8 * (i / 4) + 2 * t + i % 2);
                c[i] = by >= 0 && by < window ? c[i] : 0.0f;
            }
    };
    auto add_values = [&](int at) {                      // y += phi V of step `at` of the block
        as_factor(phi, c);
        wgmma_fence();
        wgmma<true, true>(sums, phi, tile_of(all_v, at));
        wgmma_commit_group();
    };
    wait_for_tiles<1>();
    wgmma_fence();
    wgmma<false, false, true>(odd, by_pe, descriptor(before));
    wgmma<false, false, true>(even, by_pe, tile_of(all_pe, 0));
    wgmma<false, false, true>(scores, by_k, tile_of(all_k, 1 - group));
    wgmma_commit_group();
    wgmma_wait_group<0>();
    // Step s of the block: its tiles are there, and those that the next ones take the place of were
    // read.
    auto enter = [&](int s) {
        wait_for_tiles<1>();
        load_step(s + 2);
    };
    if (group == 0) enter(0);
    // Of step s, S and P (in `far`) are about to be there, P of the step before is. Then those of
    // step s + 1 are on their way, P in place of the one before.
    auto step = [&](int s, Sums& near, Sums& far) {
        int at = s + 1 - group;
        wgmma_wait_group<1>();                                   // all but y of the step before
        fence_operand(scores);
        fence_operand(near);
        fence_operand(far);
        enter(at);
        skew(near, far);
        wgmma_fence();
        wgmma<false, false, true>(scores, by_k, tile_of(all_k, at + 1));
        wgmma<false, false, true>(near, by_pe, tile_of(all_pe, s + 1));
        wgmma_commit_group();
        weights(s);
        // Y of the step before: phi may be written.
        wgmma_wait_group<1>();
        add_values(at);
    };
    auto last = [&](int s, Sums& near, Sums& far) {
        int at = s + 1 - group;
        wgmma_wait_group<0>();
        fence_operand(scores);
        fence_operand(near);
        fence_operand(far);
        enter(at);
        skew(near, far);
        weights(s);
        add_values(at);
        wgmma_wait_group<0>();
        fence_operand(sums);
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
            *reinterpret_cast<unsigned*>(y + 8 * h * wide + 8 * m) =
                both_as_bf16(times * sums[4 * m + 2 * h], times * sums[4 * m + 2 * h + 1]);
    }
#endif
}
