// poly_backward, third rung: the backward of poly_attention.cu on Hopper's warpgroup products
// (wgmma, sm_90a), for bf16 heads of 64.
//
//   s_ij = q~_i . k_j + q_i . PE[i - j]       t = tanh(s / 8)       phi_ij = scale (a (8 t)^p + b)       dphi_ij = dy_i . v_j
//   dv_j = sum_i phi_ij dy_i        ds_ij = dphi_ij scale a p (8 t)^(p-1) (1 - t^2)        dk_j = sum_i ds_ij q~_i
//   dq~_i = sum_j ds_ij k_j         dq_i = sum_j ds_ij PE[i - j]         dPE[r] = sum_i ds_i,i-r q_i (over batches and heads, too)
//
// As in v2 each of the three parts sums over another index, and computes s and dphi again: dq~ and
// dq go along the keys, dk and dv along the queries, dPE along a diagonal of tiles. To do two of
// them at once would need sums of blocks added in memory: 32 KiB for each tile of 64 x 64 pairs,
// more than all else.
//
// In all parts a warpgroup has 64 x 64 pairs at a time, rows are queries. Differences i - j there
// take 127 values: P = q PE^T of the tile of PE below 64 s + 1 (`near`) and of that above (`far`);
// shuffles put what belongs to one pair into one lane (skewed), and q~ k is summed onto that: c +=
// q~ K^T. So P needs no registers when s and dphi are there. Then:
//
//   backward_q    ds is the left factor of dq~ += ds K as it lies in registers; skewed back, two in
//                 one register, with that of the step before, it is that of dq += ds PE. q~ stays
//                 in registers, q and dy in shared memory; P of 64 differences is that of the step
//                 before. 5 products of 64 x 64 x 64 for a tile.
//   backward_kv   phi and ds go through shared memory, as rows by queries, and the tensor cores
//                 read them as their transposes: dv += phi^T dy, dk += ds^T q~. Queries change at
//                 each step, so P is computed for all 128 differences: 6 products; left factors are
//                 read from shared memory.
//   backward_pe   ds goes through shared memory, each row shifted to where its differences are, and
//                 is read as its transpose: two tiles of dPE for a diagonal of tiles, dPE += ds^T
//                 q. 6 products. Each tile of dPE is a part of two diagonals: `partial` has both,
//                 and poly_finish adds them up.
//
// A block is two warpgroups, which take most tiles together: of 128 queries (q), of 128 keys (kv),
// of two diagonals (pe). They are half a step apart: one waits for the tensor cores while the other
// computes special functions.
//
// Estimates for a tile, in clocks of an SM: tensor cores 640 (q), 768, 768; special functions 512
// (q: the exact tanh, two for a pair), 256, 256; shared memory about 740 (q: products 450, skews
// 190, loads 100), 1090 (kv: products 700, shuffles 130, phi and ds 130, loads 130), 1120 (pe:
// products 700, shuffles 130, ds 130, loads 160); instructions of a scheduler about 800, 600, 650.
// Measured on an H200, each part alone, T = 2,048: 1.3, 1.35 and 1.33 times as fast as v2.

#include "hopper.cuh"
#include "poly_attention.cuh"

#if HOPPER && HEAD == 64
// ---- tiles in shared memory ----
// A row is 128 bytes: eight chunks of 16. Chunk c of row r lies at place c ^ (r % 8) of its row, so
// that eight rows' chunks are in different banks: what the descriptors call a swizzle of 128 bytes.
// A tile begins at a multiple of 1024 bytes.

struct Tiles {
    unsigned char* memory;    // of the first tile
    unsigned address;         // the same as an address of shared memory
    int group, warp, g, t;    // of this thread: warpgroup, warp in it, lane 4 g + t
    __device__ __forceinline__ Tiles(unsigned char* from) {
        unsigned begins = (unsigned)__cvta_generic_to_shared(from);
        address = (begins + 1023) & ~1023u;
        memory = from + (address - begins);
        group = __shfl_sync(ALL, threadIdx.x / 128, 0);
        warp = __shfl_sync(ALL, threadIdx.x / 32 % 4, 0);
        g = threadIdx.x % 32 / 4;
        t = threadIdx.x % 4;
    }
    // Copies the 64 rows of `from` from row `first` on to a place.
    template <bool checked>
    __device__ __forceinline__ void load(int place, const bf16* from, int stride, int first,
                                         int rows) const {
        int thread = opaque(threadIdx.x), r = thread / 8, c = thread % 8;
        unsigned to = address + place * TILE_BYTES + r * 128 + swizzle(r, c);
        load_chunks<checked>(to, from + 8 * c, stride, first + r, rows);
    }
    __device__ __forceinline__ void load(bool checked, int place, const bf16* from, int stride,
                                         int first, int rows) const {
        if (checked) load<true>(place, from, stride, first, rows);
        else load<false>(place, from, stride, first, rows);
    }
    // This warp's 16 rows of a tile as left factors.
    __device__ __forceinline__ void fetch(Factor& a, int place) const {
        const unsigned char* from = memory + place * TILE_BYTES + (16 * warp + g) * 128 + 4 * t;
        #pragma unroll
        for (int k = 0; k < 4; k++)
            #pragma unroll
            for (int i = 0; i < 4; i++)
                a[k][i] = *reinterpret_cast<const unsigned*>(from + 1024 * (i % 2) +
                                                             (((2 * k + i / 2) ^ g) << 4));
    }
    __device__ __forceinline__ void put(int place, const Factor& a) const {
        unsigned char* to = memory + place * TILE_BYTES + (16 * warp + g) * 128 + 4 * t;
        #pragma unroll
        for (int m = 0; m < 8; m++)
            #pragma unroll
            for (int h = 0; h < 2; h++)
                *reinterpret_cast<unsigned*>(to + 1024 * h + ((m ^ g) << 4)) =
                    a[m / 2][m % 2 * 2 + h];
    }
    // Row R of x to columns R - j + 63 of the 128 that two places have: by differences. The other
    // columns are never written.
    __device__ __forceinline__ void put_skewed(int place, const Sums& x) const {
        unsigned char* to = memory + place * TILE_BYTES + (16 * warp + g) * 128;
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            // Of m = h = 0; the others are multiples of 8 away.
            int column = opaque(16 * warp + g + 63 - 2 * t - e);
            #pragma unroll
            for (int by = -7; by < 2; by++) {
                int chunk = column / 8 + by;
                unsigned char* at = to + chunk / 8 * TILE_BYTES + ((chunk % 8 ^ g) << 4) +
                                    2 * (column % 8);
                if (by <= 0) *reinterpret_cast<bf16*>(at) = as_bf16(x[-4 * by + e]);
                if (by > -7) *reinterpret_cast<bf16*>(at + 1024) = as_bf16(x[4 * (1 - by) + 2 + e]);
            }
        }
    }
};
// ---- between pairs and differences ----
// Of rows i and columns j of a step, difference i - j + 63 of the 128 that `near` and `far` have. A
// warp needs 79 of them, from 16 warp on. Column 8 m + 2 t + e of row g + 8 h is asked from one
// lane, that with the same g, and each lane is asked by one: for the odd or the even one of its
// columns, of one of two 8 x 8.
template <int warp>
__device__ __forceinline__ void skewed(Sums& to, const Sums& near, const Sums& far) {
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
                to[4 * m + 2 * h + e] = __shfl_sync(ALL, upper ? x[8 - m + h] : x[7 - m + h], from);
        }
    }
}
// The same of factors: row i, column c of `to` is pair i - c + 63 of the 128 that `first` and
// `second` have. Two elements of two 8 x 8 go in one shuffle.
template <int warp>
__device__ __forceinline__ void skewed(Factor& to, const Factor& first, const Factor& second) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        unsigned got[2][4];
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            int from = lane - t + (7 + g - 2 * t - e) % 8 / 2;
            bool odd = (g + e) % 2 == 0, upper = g + (e == 0) > 2 * t + odd;
            unsigned x[5], which = h == 0 ? (upper ? 0x5432 : 0x3210) : upper ? 0x7654 : 0x5432;
            #pragma unroll
            // Of the 8 x 8 2 warp + 2 n and the one after it.
            for (int n = 0; n < 5; n++) {
                const Factor& of = warp + n < 4 ? first : second;
                x[n] = __byte_perm(of[(warp + n) % 4][h], of[(warp + n) % 4][2 + h],
                                   odd ? 0x7632 : 0x5410);
            }
            #pragma unroll
            for (int n = 0; n < 4; n++)
                got[e][n] = __shfl_sync(ALL, __byte_perm(x[3 - n], x[4 - n], which), from);
        }
        #pragma unroll
        for (int n = 0; n < 4; n++) {
            to[n][h] = __byte_perm(got[0][n], got[1][n], 0x7632);
            to[n][2 + h] = __byte_perm(got[0][n], got[1][n], 0x5410);
        }
    }
}
// Each warp has its own registers.
template <class X>
__device__ __forceinline__ void skew(int warp, X& to, const X& first, const X& second) {
    if (warp == 0) skewed<0>(to, first, second);
    else if (warp == 1) skewed<1>(to, first, second);
    else if (warp == 2) skewed<2>(to, first, second);
    else skewed<3>(to, first, second);
}

struct Tensors {
    // Of the first row; of_head: of a head's first row.
    const bf16* dy, * q_tilde, * q, * k, * v, * pe;
    const float* coefficients;
    int T, H, window;
    Rows stride;
    __device__ __forceinline__ int wide() const { return H * HEAD; }
    __device__ __forceinline__ long long row(int which, int stride) const {
        return (long long)(which / H) * T * stride + which % H * HEAD;
    }
    __device__ __forceinline__ Tensors of_head(int which) const {
        Tensors x = *this;
        x.dy += row(which, wide());
        x.q_tilde += row(which, stride.q_tilde);
        x.q += row(which, stride.q);
        x.k += row(which, stride.k);
        x.v += row(which, stride.v);
        return x;
    }
    // Of ds.
    __device__ __forceinline__ float slope() const {
        return coefficients[2] * coefficients[0] * DEGREE * power_of_8(DEGREE - 1);
    }
};

// Sixteen rows of a warp from row `first` on as left factors; rows from `rows` on are zeros.
__device__ __forceinline__ void fetch(Factor& a, const bf16* from, int stride, int first,
                                      int rows) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int k = 0; k < 4; k++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = first + g + 8 * (i % 2);
            a[k][i] = row < rows
                          ? *reinterpret_cast<const unsigned*>(from + (long long)row * stride +
                                                               16 * k + 8 * (i / 2) + 2 * t)
                          : 0u;
        }
}
// Sixteen rows of a warp from row `first` on, times `factor`, rounded.
__device__ __forceinline__ void write(bf16* to, const Sums& sums, float factor, int stride,
                                      int first, int rows) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = first + g + 8 * h;
        if (row >= rows) continue;
        #pragma unroll
        for (int m = 0; m < 8; m++)
            *reinterpret_cast<unsigned*>(to + (long long)row * stride + 8 * m + 2 * t) =
                both_as_bf16(factor * sums[4 * m + 2 * h], factor * sums[4 * m + 2 * h + 1]);
    }
}

// ---- dq~ and dq: 128 queries of a head, keys from the diagonal to the left ----
// Places: 4 of K, 4 of V, 2 of q and 2 of dy (a warpgroup has its own), 8 of PE, whose tile n has
// the differences 64 n + 1 .. The second warpgroup has the later queries, and is a tile of PE
// ahead.
__device__ __forceinline__ void backward_q(const Tiles& m, bf16* dq_tilde, bf16* dq,
                                           float* totals_of, const Tensors& in, int unit,
                                           int heads) {
    __shared__ float warps[2][4][2];
    // The longest first.
    int T = in.T, window = in.window, group = m.group, warp = m.warp,
        tile = (T + 2 * SIDE - 1) / (2 * SIDE) - 1 - unit / heads;
    Tensors x = in.of_head(unit % heads);
    unsigned all = descriptor(m.address);
    auto of_k = [&](int u) { return u % 4; };
    auto of_v = [&](int u) { return 4 + u % 4; };
    auto of_pe = [&](int n) { return 12 + (n & 7); };
    auto at_place = [&](int place) { return all + place * (TILE_BYTES / 16); };
    // Steps: of the block, from the later queries' diagonal to the earlier ones' last key; of this
    // warpgroup, which begins (1 - group) steps later.
    int i0 = (2 * tile + group) * SIDE;
    int steps = 2 * tile + 2 - max(0, 2 * tile * SIDE - window + 1) / SIDE,
        mine = 2 * tile + group + 1 - max(0, i0 - window + 1) / SIDE;
    auto load_step = [&](int u) {                          // what the block takes from step u on
        if (u < steps) {
            bool checked = (2 * tile + 2 - u) * SIDE > T || (u + 2) * SIDE >= T;
            m.load(checked, of_k(u), x.k, x.stride.k, (2 * tile + 1 - u) * SIDE, T);
            m.load(checked, of_v(u), x.v, x.stride.v, (2 * tile + 1 - u) * SIDE, T);
            m.load(checked, of_pe(u + 1), x.pe, HEAD, (u + 1) * SIDE + 1, T);
        }
        cp_async_commit_group();
    };
    m.load<true>(of_pe(-1), x.pe, HEAD, -63, T);
    m.load<true>(of_pe(0), x.pe, HEAD, 1, T);
    m.load<true>(8, x.q, x.stride.q, 2 * tile * SIDE, T);
    m.load<true>(9, x.q, x.stride.q, (2 * tile + 1) * SIDE, T);
    m.load<true>(10, x.dy, x.wide(), 2 * tile * SIDE, T);
    m.load<true>(11, x.dy, x.wide(), (2 * tile + 1) * SIDE, T);
    load_step(0);
    load_step(1);
    // Q~; ds of the step before, of this one, by differences.
    Factor by_k, before, ds, by_difference;
    fetch(by_k, x.q_tilde, x.stride.q_tilde, i0 + 16 * warp, T);
    Sums near, far, c, d, sums_k, sums_pe;               // P; s; dphi, then ds; dq~, dq
    clear(sums_k);
    clear(sums_pe);
    float totals[2] = {};
    #pragma unroll
    for (int i = 0; i < 16; i++) before[i / 4][i % 4] = 0;
    wait_for_tiles<1>();
    wgmma_fence();
    wgmma<false, false, false>(near, at_place(8 + group), at_place(of_pe(-1)));
    wgmma<false, false, false>(far, at_place(8 + group), at_place(of_pe(0)));
    wgmma_commit_group();
    wgmma_wait_group<0>();
    fence_operand(near);
    fence_operand(far);
    // Step u of the block: its tiles are there, and those that the next ones take the place of were
    // read.
    auto enter = [&](int u) {
        if (u >= steps) return;
        wait_for_tiles<1>();
        load_step(u + 2);
    };
    // The second warpgroup enters a step in the middle of its own one before.
    enter(0);
    for (int s = 0; s < mine; s++) {
        int at = s + 1 - group;
        if (group == 0) enter(at);
        skew(warp, c, near, far);                        // while dq of the step before is computed
        #pragma unroll
        // Two bodies that change places would need none of that, but more registers than there are.
        for (int i = 0; i < 32; i++) near[i] = far[i];
        wgmma_fence();
        wgmma<true, false>(c, by_k, at_place(of_k(at)));
        wgmma<false, false, false>(d, at_place(10 + group), at_place(of_v(at)));
        wgmma_commit_group();
        if (group == 1) enter(at + 1);
        wgmma_wait_group<0>();
        fence_operand(c);
        fence_operand(d);
        if (s == 0 || (s + 1) * SIDE > window)
            #pragma unroll
            for (int i = 0; i < 32; i++) {
                int by = s * SIDE + 16 * warp + m.g + 8 * (i % 4 / 2) -
                         (8 * (i / 4) + 2 * m.t + i % 2);
                d[i] = by >= 0 && by < window ? d[i] : 0.0f;
            }
        // Of totals: four short sums each, none waits for the other.
        float some[2][4];
        #pragma unroll
        for (int i = 0; i < 32; i++) {
            Power of = power_of_tanh<true>(c[i]);
            some[0][i % 4] = i < 4 ? d[i] * of.power : fmaf(d[i], of.power, some[0][i % 4]);
            some[1][i % 4] = i < 4 ? d[i] : some[1][i % 4] + d[i];
            d[i] *= of.slope;
        }
        #pragma unroll
        for (int i = 0; i < 2; i++)
            totals[i] += (some[i][0] + some[i][1]) + (some[i][2] + some[i][3]);
        as_factor(ds, d);
        wgmma_fence();
        wgmma<true, true>(sums_k, ds, at_place(of_k(at)));
        // In the last step for nothing.
        wgmma<false, false, false>(far, at_place(8 + group), at_place(of_pe(s + 1)));
        wgmma_commit_group();
        skew(warp, by_difference, ds, before);           // of the differences of `near`
        wgmma_fence();
        wgmma<true, true>(sums_pe, by_difference, at_place(of_pe(s - 1)));
        wgmma_commit_group();
        wgmma_wait_group<1>();
        fence_operand(far);
        #pragma unroll
        for (int i = 0; i < 16; i++) before[i / 4][i % 4] = ds[i / 4][i % 4];
    }
    wgmma_wait_group<0>();
    #pragma unroll
    for (int i = 0; i < 16; i++) ds[i / 4][i % 4] = 0;
    skew(warp, by_difference, ds, before);               // of the differences of the last `far`
    wgmma_fence();
    wgmma<true, true>(sums_pe, by_difference, at_place(of_pe(mine - 1)));
    wgmma_commit_group();
    wgmma_wait_group<0>();
    fence_operand(sums_k);
    fence_operand(sums_pe);
    if (group == 1) for (int u = mine + 1; u < steps; u++) enter(u);

    float slope = in.slope();
    unit = opaque(unit);
    write(dq_tilde + in.row(unit % heads, in.wide()), sums_k, slope, in.wide(), i0 + 16 * warp, T);
    write(dq + in.row(unit % heads, in.stride.grad), sums_pe, slope, in.stride.grad, i0 + 16 * warp,
          T);
    // Sums of the 64 queries, in a fixed order: a tree over each warp, then over the warps.
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        for (int far = 16; far > 0; far /= 2) totals[i] += __shfl_down_sync(ALL, totals[i], far);
        if (threadIdx.x % 32 == 0) warps[group][warp][i] = totals[i];
    }
    __syncthreads();
    if (threadIdx.x < 4) {
        int of = threadIdx.x / 2, i = threadIdx.x % 2;
        float sum = ((warps[of][0][i] + warps[of][1][i]) + warps[of][2][i]) + warps[of][3][i];
        if ((2 * tile + of) * SIDE < T)
            totals_of[2 * ((long long)(2 * tile + of) * heads + unit % heads) + i] =
                i == 0 ? power_of_8(DEGREE) * sum : sum;
    }
}

// ---- dk and dv: 128 keys of a head, queries from the diagonal on ----
// Places: 2 of K, 2 of V (a warpgroup has its own), 3 of q~, 3 of dy, 3 of q, 5 of PE, and 4 for
// each warpgroup: phi and ds of two steps in turn. q and PE are loaded a step earlier than the
// others, because P is computed a step ahead. The second warpgroup has the later keys: it begins a
// step later, and is a tile of PE behind.
__device__ __forceinline__ void backward_kv(const Tiles& m, bf16* dk, bf16* dv, const Tensors& in,
                                            int unit, int heads) {
    // The longest first.
    int T = in.T, window = in.window, group = m.group, warp = m.warp, tile = unit / heads;
    Tensors x = in.of_head(unit % heads);
    unsigned all = descriptor(m.address);
    auto of_q_tilde = [&](int u) { return 4 + u % 3; };
    auto of_dy = [&](int u) { return 7 + u % 3; };
    auto of_q = [&](int u) { return 10 + u % 3; };
    auto of_pe = [&](int n) { return 13 + (n + 5) % 5; };
    auto of_phi = [&](int u) { return 18 + 4 * group + u % 2 * 2; };             // and ds behind it
    auto at_place = [&](int place) { return all + place * (TILE_BYTES / 16); };
    int j0 = (2 * tile + group) * SIDE;
    auto end_of = [&](int first) {
        return (min(T - 1, first + SIDE - 2 + window)) / SIDE - 2 * tile + 1;
    };
    // Step u has the queries from (2 tile + u) 64 on; this warpgroup has steps group .. end - 1.
    int steps = end_of((2 * tile + 1) * SIDE), end = end_of(j0);
    auto load_ahead = [&](int u) {
        if (u >= steps) return;
        bool checked = (2 * tile + u + 1) * SIDE >= T;
        m.load(checked, of_q(u), x.q, x.stride.q, (2 * tile + u) * SIDE, T);
        m.load(checked, of_pe(u), x.pe, HEAD, u * SIDE + 1, T);
    };
    auto load_step = [&](int u) {
        if (u < steps) {
            bool checked = (2 * tile + u + 1) * SIDE > T;
            m.load(checked, of_q_tilde(u), x.q_tilde, x.stride.q_tilde, (2 * tile + u) * SIDE, T);
            m.load(checked, of_dy(u), x.dy, x.wide(), (2 * tile + u) * SIDE, T);
            load_ahead(u + 1);
        }
        cp_async_commit_group();
    };
    for (int i = 0; i < 2; i++) {
        m.load<true>(i, x.k, x.stride.k, (2 * tile + i) * SIDE, T);
        m.load<true>(2 + i, x.v, x.stride.v, (2 * tile + i) * SIDE, T);
    }
    m.load<true>(of_pe(-1), x.pe, HEAD, -63, T);
    load_ahead(0);
    load_step(0);
    float offset = in.coefficients[2] * in.coefficients[1],
          weight = in.coefficients[2] * in.coefficients[0] * power_of_8(DEGREE);
    Sums near, far, c, d, sums_k, sums_v;                // P; s, then phi; dphi, then ds; dk, dv
    Factor of;
    clear(sums_k);
    clear(sums_v);
    auto start_p = [&](int u) {                            // P of step u
        m.fetch(of, of_q(u));
        wgmma_fence();
        wgmma<false, false>(near, of, at_place(of_pe(u - group - 1)));
        wgmma<false, false>(far, of, at_place(of_pe(u - group)));
        wgmma_commit_group();
    };
    wait_for_tiles<0>();
    start_p(group);
    wgmma_wait_group<0>();
    fence_operand(near);
    fence_operand(far);
    // Step u of the block: its tiles are there, and q and PE of the next.
    auto enter = [&](int u) {
        if (u >= steps) return;
        wait_for_tiles<0>();
        load_step(u + 1);
    };
    if (group == 1) { enter(0); enter(1); }
    for (int u = group; u < end; u++) {
        int s = u - group;
        if (group == 0) enter(u);
        // While dk and dv of the step before are computed.
        skew(warp, c, near, far);
        wgmma_fence();
        wgmma<true, false, false>(c, at_place(of_q_tilde(u)), at_place(group));
        wgmma<false, false, false>(d, at_place(of_dy(u)), at_place(2 + group));
        wgmma_commit_group();
        wgmma_wait_group<0>();
        fence_operand(c);
        fence_operand(d);
        if (group == 1) enter(u + 1);
        #pragma unroll
        for (int i = 0; i < 32; i++) {
            Power at = power_of_tanh<false>(c[i]);
            c[i] = fmaf(weight, at.power, offset);
            d[i] *= at.slope;
        }
        if (s == 0 || (s + 1) * SIDE > window)
            #pragma unroll
            for (int i = 0; i < 32; i++) {
                int by = s * SIDE + 16 * warp + m.g + 8 * (i % 4 / 2) -
                         (8 * (i / 4) + 2 * m.t + i % 2);
                bool valid = by >= 0 && by < window;
                c[i] = valid ? c[i] : 0.0f;
                d[i] = valid ? d[i] : 0.0f;
            }
        Factor a;
        as_factor(a, c);
        m.put(of_phi(u), a);
        as_factor(a, d);
        m.put(of_phi(u) + 1, a);
        if (u + 1 < end) start_p(u + 1);
        fence_proxy_async();
        sync_warpgroup(group);
        wgmma_fence();
        wgmma<true, true, true>(sums_v, at_place(of_phi(u)), at_place(of_dy(u)));
        wgmma<true, true, true>(sums_k, at_place(of_phi(u) + 1), at_place(of_q_tilde(u)));
        wgmma_commit_group();
        wgmma_wait_group<1>();
        fence_operand(near);
        fence_operand(far);
    }
    wgmma_wait_group<0>();
    fence_operand(sums_k);
    fence_operand(sums_v);
    for (int u = max(group, end) + group; u < steps; u++) enter(u);
    write(dk + in.row(unit % heads, in.stride.grad), sums_k, in.slope(), in.stride.grad,
          j0 + 16 * warp, T);
    write(dv + in.row(unit % heads, in.stride.grad), sums_v, 1.0f, in.stride.grad, j0 + 16 * warp,
          T);
}

// ---- dPE: two diagonals of tiles, of every head of a group ----
// Tiles of queries I and keys I - s, s = 2 pair + warpgroup. Places: 4 of q, 2 of q~, 2 of dy, 3 of
// K, 3 of V, 3 of PE, and 4 for each warpgroup: ds by 128 differences, of two steps in turn. q is
// loaded a step earlier than the others. No pair needs a mask: what is not seen has differences
// that are not written, or dy or v is 0.
__device__ __forceinline__ void backward_pe(const Tiles& m, float* partial, const Tensors& in,
                                            int pair, int of_group, int groups, int heads) {
    int T = in.T, group = m.group, warp = m.warp, tiles = (T + SIDE - 1) / SIDE,
        rows = (in.window + SIDE - 1) / SIDE * SIDE;
    int first = 2 * pair, s = first + group,
        diagonals = min((in.window + SIDE - 2) / SIDE, tiles - 1) + 1;
    unsigned all = descriptor(m.address);
    auto of_q = [&](int u) { return u % 4; };
    auto of_q_tilde = [&](int u) { return 4 + u % 2; };
    auto of_dy = [&](int u) { return 6 + u % 2; };
    auto of_k = [&](int u) { return 8 + u % 3; };
    auto of_v = [&](int u) { return 11 + u % 3; };
    auto of_pe = [&](int n) { return 14 + n; };          // tile first - 1 + n
    auto of_ds = [&](int u) { return 17 + 4 * group + u % 2 * 2; };
    auto at_place = [&](int place) { return all + place * (TILE_BYTES / 16); };
    for (int i = threadIdx.x; i < 8 * TILE_BYTES / 16; i += THREADS)
        reinterpret_cast<uint4*>(m.memory + 17 * TILE_BYTES)[i] = make_uint4(0, 0, 0, 0);
    #pragma unroll
    for (int n = 0; n < 3; n++) m.load<true>(of_pe(n), in.pe, HEAD, (first - 1 + n) * SIDE + 1, T);
    // P; s; dphi, then ds; dPE of the differences 64 s - 63 .. and of the 64 after these.
    Sums near, far, c, d, sums_near, sums_far;
    clear(sums_near);
    clear(sums_far);
    // Step u has queries first + u; this warpgroup has steps group .., keys u - group.
    int steps = tiles - first, mine = s < diagonals ? steps : 0;
    for (int which = of_group; which < heads; which += groups) {
        Tensors x = in.of_head(which);
        auto load_ahead = [&](int u) {
            if (u < steps)
                m.load((first + u + 1) * SIDE > T, of_q(u), x.q, x.stride.q, (first + u) * SIDE, T);
        };
        auto load_step = [&](int u) {
            if (u < steps) {
                bool checked = (first + u + 1) * SIDE > T;
                m.load(checked, of_q_tilde(u), x.q_tilde, x.stride.q_tilde, (first + u) * SIDE, T);
                m.load(checked, of_dy(u), x.dy, x.wide(), (first + u) * SIDE, T);
                m.load(checked, of_k(u), x.k, x.stride.k, u * SIDE, T);
                m.load(checked, of_v(u), x.v, x.stride.v, u * SIDE, T);
                load_ahead(u + 1);
            }
            cp_async_commit_group();
        };
        auto start_p = [&](int u) {
            wgmma_fence();
            wgmma_n128(near, far, at_place(of_q(u)), at_place(of_pe(group)));
            wgmma_commit_group();
        };
        auto enter = [&](int u) {
            if (u >= steps) return;
            wait_for_tiles<0>();
            load_step(u + 1);
        };
        __syncthreads();                                 // the head before is done
        load_ahead(0);
        load_step(0);
        wait_for_tiles<0>();
        start_p(group);
        wgmma_wait_group<0>();
        fence_operand(near);
        fence_operand(far);
        if (group == 1) { enter(0); enter(1); }
        for (int u = group; u < mine; u++) {
            if (group == 0) enter(u);
            skew(warp, c, near, far);                    // while dPE of the step before is computed
            wgmma_fence();
            wgmma<true, false, false>(c, at_place(of_q_tilde(u)), at_place(of_k(u - group)));
            wgmma<false, false, false>(d, at_place(of_dy(u)), at_place(of_v(u - group)));
            wgmma_commit_group();
            wgmma_wait_group<0>();
            fence_operand(c);
            fence_operand(d);
            if (group == 1) enter(u + 1);
            #pragma unroll
            for (int i = 0; i < 32; i++) d[i] *= power_of_tanh<false>(c[i]).slope;
            m.put_skewed(of_ds(u), d);
            if (u + 1 < mine) start_p(u + 1);
            fence_proxy_async();
            sync_warpgroup(group);
            wgmma_fence();
            wgmma<true, true, true>(sums_near, at_place(of_ds(u)), at_place(of_q(u)));
            wgmma<true, true, true>(sums_far, at_place(of_ds(u) + 1), at_place(of_q(u)));
            wgmma_commit_group();
            wgmma_wait_group<1>();
            fence_operand(near);
            fence_operand(far);
        }
        wgmma_wait_group<0>();
        for (int u = max(group, mine) + group; u < steps; u++) enter(u);
    }
    fence_operand(sums_near);
    fence_operand(sums_far);
    if (s >= diagonals) return;
    float slope = in.slope();
    float* to = partial + (long long)(2 * of_group) * rows * HEAD;
    // Row: of dPE; from `rows` on no one asks, from `window` on it is 0.
    auto write = [&](float* to, const Sums& sums, int row0) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = row0 + 16 * warp + m.g + 8 * h;
            if (row < 0 || row >= rows) continue;
            float factor = row < in.window ? slope : 0.0f;
            #pragma unroll
            for (int n = 0; n < 8; n++)
                *reinterpret_cast<float2*>(to + row * HEAD + 8 * n + 2 * m.t) =
                    make_float2(factor * sums[4 * n + 2 * h], factor * sums[4 * n + 2 * h + 1]);
        }
    };
    write(to, sums_near, SIDE * s - 63);
    write(to + (long long)rows * HEAD, sums_far, SIDE * s + 1);
    // The rows of either half that no diagonal has.
    clear(c);
    if (s == diagonals - 1) write(to, c, SIDE * s + 1);
    if (s == 0) write(to + (long long)rows * HEAD, c, -63);
}
#endif

// The blocks of dPE, then those of dq, then those of dk and dv; each the longest first. (dq and dk
// in turns, as in v2, take 8 to 11% longer.)
extern "C" __global__ void __launch_bounds__(THREADS, 1) poly_backward_v3(
    // (B, T, H, d); but for dq_tilde with rows apart.
    bf16* dq_tilde, bf16* dq, bf16* dk, bf16* dv,
    // (tiles of 64 queries, B H, 2) sums of dphi c^p and of dphi.
    float* sums,
    float* partial,  // (groups, 2, rows: multiple of 64, d)
    const bf16* dy, const bf16* q_tilde, const bf16* q, const bf16* k, const bf16* v,
    const bf16* pe, const float* coefficients, int T, int H, int window, int heads, int groups,
    Rows stride)  // heads: B * H
{
#if HOPPER && HEAD == 64
    extern __shared__ __align__(1024) unsigned char memory[];
    Tensors in = {dy, q_tilde, q, k, v, pe, coefficients, T, H, window, stride};
    int diagonals = min((window + SIDE - 2) / SIDE, (T + SIDE - 1) / SIDE - 1) + 1;
    int of_pe = (diagonals + 1) / 2 * groups, each = (T + 2 * SIDE - 1) / (2 * SIDE) * heads,
        unit = blockIdx.x - of_pe;
    Tiles m(memory);
    if (unit < 0)
        backward_pe(m, partial, in, blockIdx.x / groups, blockIdx.x % groups, groups, heads);
    else if (unit < each) backward_q(m, dq_tilde, dq, sums, in, unit, heads);
    else backward_kv(m, dk, dv, in, unit - each, heads);
#endif
}
