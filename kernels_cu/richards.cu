// richards: the generalised logistic curve (Richards, 1959) with nine parameters that are learned, and the gated linear unit made of two of them.
//
//   u = V (s x / T + b)      t = ln(beta) - k' (u - m), k' = k nu with the birch tail, else k
//   L = ln(1 + e^t)          sigma = e^(-L / nu)          r = e^t / (1 + e^t)
//   R(x) = a gate + c, gate = sigma, or 2 sigma - 1 for tanh (V = 2; else V = 1)            R'(x) = a V sigma r k' V s / (nu T)
//
// t is a line in x, and R a line in sigma: t = A - B x, R = G sigma + H, R' = (G B / nu) sigma r. Each block of a forward makes these numbers
// (make_curves), A and B for powers and logarithms of 2, which the GPU has instructions for (t and L below are in these units).
// All nine derivatives need five sums over the elements, of dy sigma L, dy sigma r, dy sigma r x, dy sigma and dy; richards_finish makes the
// nine numbers of them. So a curve costs four special functions per element (two powers, a logarithm, a reciprocal), forward three.
//
// glu: h = x1 R_a(x1) R_g(x2), where x1 and x2 are the halves of one product. Bytes per element of h: forward 2 reads and a write, backward 3 reads and
// 2 writes (bf16: 6 and 10). Special functions: forward 6, backward 8. An H200 moves 4.2 TB/s and takes 16 special functions per clock and SM,
// 3.7 T/s at 1.755 GHz: forward is bound by these (1.6 ps per element, bytes 1.4), backward by bytes (2.4 ps, special functions 2.2).
//
// PolyAttention (nn/poly_attention.py) has two curves, one in its query and one in its gate; n is a row and a head, m one of the RANK parts of a head:
//
//   u_m = mean of q over part m      q~ = q / sqrt(d) + rho / (width of m) h_m, h = u R_q(u), rho = 0.15 / sqrt(RANK)      e = R_gate(alpha seen + beta)
//
// The ladder: six launches of torch's per curve and as many passes over memory -> one launch each way (richards_forward, richards_backward) -> both
// curves, the gate and the products with x1 in one (glu_forward, glu_backward); q~ and e in one (poly_query_gate), and what their backward has to do
// before and after the attention's (poly_gate_backward, poly_query_backward). Sums are taken per chunk in a fixed order, then by one block.

#ifndef DATA_T
#define DATA_T float          // x, y, h and their gradients
#endif
#ifndef WHOLE
#define WHOLE 0               // 1: rows are a multiple of 16 bytes and aligned to 16 bytes
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef GROUPS
#define GROUPS 8              // groups that a thread takes: a chunk has GROUPS * THREADS
#endif
#define WIDE (16 / (int)sizeof(DATA_T))       // elements of a group: 16 bytes, one request of a thread
#define SUMS 5
#define NU 0
#define K 1
#define M 2
#define BETA 3
#define T_ 4
#define GAIN 5
#define OFFSET 6
#define SCALE 7
#define SHIFT 8
#define LEAST 1e-6f           // nu, k, beta and T stay above it
#define LN2 0.6931471805599453
#define LOG2E 1.44269504f

struct Curve {                // what a thread needs of a curve; then its parameters, for richards_finish. (24) floats
    float A, B, over_nu, G, H, slope, V, birch;
    float p[9], chain[9];     // the parameters; and their derivatives by what is learned: 0 where nothing is
    float unused[6];          // zeros
};

struct Setting {              // of one curve, by value
    float fixed[9];           // the parameters that are not learned
    int kinds;                // two bits for each: 0 fixed, 1 learned as it is, 2 as its softplus, 3 as 0.1 + 9.9 sigmoid
    int tanh, birch;
};

struct Settings { Setting curve[2]; };

// The curves of a block, from what is learned; one warp makes them, all threads call this. kept: for the backward, written by the first block.
__device__ __forceinline__ void make_curves(Curve* made, Curve* kept, const float* theta0, const float* theta1, const Settings& settings, int count) {
    int which = threadIdx.x / 16, i = threadIdx.x % 16;           // sixteen lanes for each curve, a lane for each parameter
    if (threadIdx.x < 32) {
        bool mine = which < count && i < 9;
        int kinds = which == 0 ? settings.curve[0].kinds : settings.curve[1].kinds;
        bool tanh = which == 0 ? settings.curve[0].tanh : settings.curve[1].tanh, birch = which == 0 ? settings.curve[0].birch : settings.curve[1].birch;
        float fixed = 0.0f;                       // no index into what came by value: that would be a copy of it in memory
        #pragma unroll
        for (int k = 0; k < 9; k++)
            if (i == k) fixed = which == 0 ? settings.curve[0].fixed[k] : settings.curve[1].fixed[k];
        Curve& c = made[mine ? which : 0];
        int kind = mine ? kinds >> (2 * i) & 3 : 0;
        unsigned learned = __ballot_sync(0xffffffffu, kind != 0) >> (16 * which);
        if (mine) {
            float z = kind == 0 ? fixed : (which == 0 ? theta0 : theta1)[__popc(learned & ((1u << i) - 1))], e = expf(-fabsf(z));
            float rising = (z < 0.0f ? e : 1.0f) / (1.0f + e), falling = (z < 0.0f ? 1.0f : e) / (1.0f + e);
            float found = kind == 2 ? fmaxf(z, 0.0f) + log1pf(e) : kind == 3 ? fmaf(9.9f, rising, 0.1f) : z;
            c.p[i] = i == NU || i == K || i == BETA || i == T_ ? fmaxf(found, LEAST) : found;
            c.chain[i] = kind == 0 ? 0.0f : kind == 1 ? 1.0f : kind == 2 ? rising : __fmul_rn(__fmul_rn(9.9f, rising), falling);
        }
        __syncwarp();
        if (mine && i == 0) {
            const float* p = c.p;
            float V = tanh ? 2.0f : 1.0f, ke = birch ? __fmul_rn(p[K], p[NU]) : p[K], rate = __fmul_rn(__fmul_rn(ke, V), p[SCALE]) / p[T_];
            c.A = fmaf(-__fmul_rn(ke, fmaf(V, p[SHIFT], -p[M])), LOG2E, log2f(p[BETA]));
            c.B = __fmul_rn(rate, LOG2E);
            c.over_nu = 1.0f / p[NU];
            c.G = __fmul_rn(p[GAIN], V);
            c.H = p[OFFSET] - (tanh ? p[GAIN] : 0.0f);
            c.slope = __fmul_rn(c.G, rate) / p[NU];
            c.V = V;
            c.birch = birch ? 1.0f : 0.0f;
            for (int k = 0; k < 6; k++) c.unused[k] = 0.0f;
        }
    }
    __syncthreads();
    if (blockIdx.x == 0)
        for (int k = threadIdx.x; k < count * (int)(sizeof(Curve) / 4); k += THREADS) reinterpret_cast<float*>(kept)[k] = reinterpret_cast<const float*>(made)[k];
}

// The GPU's special functions, each one instruction; what is smaller than 2^-126 counts as 0 (-ftz=true).
__device__ __forceinline__ float one_over(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}

// 2^y for y <= 0, to 4 parts in 10^6, by ordinary instructions: for 16 bits, where a special function less per element is worth eight of these.
__device__ __forceinline__ float power_by_hand(float y) {
    y = fmaxf(y, -120.0f);
    float whole = y + 12582912.0f, part = y - (whole - 12582912.0f);        // at 1.5 * 2^23 a float's steps are 1
    float power = fmaf(fmaf(fmaf(fmaf(0.00956051f, part, 0.05591704f), part, 0.24024981f), part, 0.69312197f), part, 0.99999919f);
    return __uint_as_float(__float_as_uint(power) + (__float_as_uint(whole) << 23));
}

struct Point { float sigma, L, r; };          // of one x; L and r are not computed where nobody asks for them

template <bool by_hand> __device__ __forceinline__ Point point(float x, const Curve& c) {
    Point at;
    float t = fmaf(-c.B, x, c.A);
    if (sizeof(DATA_T) == 4) {                // log2(1 + e) below 0.02 by its series, where 1 + e has lost the last digits of e
        float e = exp2f(-fabsf(t)), one = 1.0f + e;
        at.L = fmaxf(t, 0.0f) + (e < 0.02f ? e * fmaf(e, fmaf(e, 0.48089835f, -0.72134752f), 1.44269504f) : __log2f(one));
        at.r = __fmul_rn(t < 0.0f ? e : 1.0f, one_over(one));
    } else {                                  // 2^-24 more or less of 1 is nothing to 16 bits: five instructions fewer
        float e = exp2f(fminf(t, 120.0f)), one = 1.0f + e;
        at.L = fmaxf(t, __log2f(one));
        at.r = __fmul_rn(e, one_over(one));
    }
    at.sigma = by_hand && sizeof(DATA_T) == 2 ? power_by_hand(-at.L * c.over_nu) : exp2f(-at.L * c.over_nu);
    return at;
}
__device__ __forceinline__ float height(const Point& at, const Curve& c) { return fmaf(c.G, at.sigma, c.H); }

// Adds to the sums; returns dy sigma r, which times the curve's slope is dx.
__device__ __forceinline__ float add_sums(float* sums, float dy, float x, const Point& at) {
    float weighted = __fmul_rn(dy, at.sigma), risen = __fmul_rn(weighted, at.r);
    sums[0] = fmaf(weighted, at.L, sums[0]);
    sums[1] += risen;
    sums[2] = fmaf(risen, x, sums[2]);
    sums[3] += weighted;
    sums[4] += dy;
    return risen;
}

// The chunk's sums of all threads, in a fixed order: a tree over each warp, then over the warps.
template <int n> __device__ __forceinline__ void write_sums(float* to, const float (&sums)[n]) {
    __shared__ float warps[THREADS / 32][n];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int i = 0; i < n; i++) {
        float sum = sums[i];
        for (int far = 16; far > 0; far /= 2) sum += __shfl_down_sync(0xffffffffu, sum, far);
        if (lane == 0) warps[warp][i] = sum;
    }
    __syncthreads();
    if (threadIdx.x < n) {
        float sum = 0.0f;
        for (int w = 0; w < THREADS / 32; w++) sum += warps[w][threadIdx.x];
        to[threadIdx.x] = sum;
    }
}

// A group as it lies in memory. It is asked for one round ahead, and turned into floats only where it is used.
union Group { uint4 all; DATA_T at[WIDE]; };

__device__ __forceinline__ Group ask(const DATA_T* row, long long group, long long width) {      // what lies behind the row's end is 0
    Group found;
#if WHOLE
    found.all = reinterpret_cast<const uint4*>(row)[group];
#else
    found.all = make_uint4(0, 0, 0, 0);
    #pragma unroll
    for (int k = 0; k < WIDE; k++)
        if (WIDE * group + k < width) found.at[k] = row[WIDE * group + k];
#endif
    return found;
}

__device__ __forceinline__ void put2(float* to, float a, float b) { to[0] = a; to[1] = b; }
__device__ __forceinline__ void put2(fp16* to, float a, float b) { to[0] = as_fp16(a); to[1] = as_fp16(b); }
__device__ __forceinline__ void put2(bf16* to, float a, float b) {
    unsigned both = both_as_bf16(a, b);
    to[0].bits = (unsigned short)both;
    to[1].bits = (unsigned short)(both >> 16);
}

__device__ __forceinline__ void write(DATA_T* row, long long group, long long width, const float (&values)[WIDE]) {
    Group made;
    #pragma unroll
    for (int k = 0; k < WIDE; k += 2) put2(made.at + k, values[k], values[k + 1]);
#if WHOLE
    reinterpret_cast<uint4*>(row)[group] = made.all;
#else
    #pragma unroll
    for (int k = 0; k < WIDE; k++)
        if (WIDE * group + k < width) row[WIDE * group + k] = made.at[k];
#endif
}

// ---- one curve ----

extern "C" __global__ void __launch_bounds__(THREADS) richards_forward(
    DATA_T* y,                                // (n)
    Curve* curve,                             // for the backward
    const DATA_T* x, const float* theta, Settings settings, long long n)
{
    __shared__ Curve made[1];
    long long i = (long long)blockIdx.x * THREADS * GROUPS + threadIdx.x;
    Group next;
    if (WIDE * i < n) next = ask(x, i, n);
    make_curves(made, curve, theta, theta, settings, 1);
    if (WIDE * i >= n) return;
    Curve c = made[0];
    #pragma unroll 2
    for (int g = 0; g < GROUPS; g++, i += THREADS) {
        if (WIDE * i >= n) return;
        Group now = next;
        if (g + 1 < GROUPS && WIDE * (i + THREADS) < n) next = ask(x, i + THREADS, n);
        float v[WIDE];
        #pragma unroll
        for (int k = 0; k < WIDE; k++) v[k] = height(point<true>(as_float(now.at[k]), c), c);
        write(y, i, n, v);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) richards_backward(
    DATA_T* dx,                               // (n)
    float* sums,                              // (chunks, SUMS)
    const DATA_T* dy, const DATA_T* x, const Curve* curve, long long n)
{
    Curve c = *curve;
    float mine[SUMS] = {};
    long long i = (long long)blockIdx.x * THREADS * GROUPS + threadIdx.x;
    Group next_x, next_dy;
    if (WIDE * i < n) { next_x = ask(x, i, n); next_dy = ask(dy, i, n); }
    #pragma unroll 2
    for (int g = 0; g < GROUPS; g++, i += THREADS) {
        if (WIDE * i >= n) break;
        Group at_x = next_x, at_dy = next_dy;
        if (g + 1 < GROUPS && WIDE * (i + THREADS) < n) { next_x = ask(x, i + THREADS, n); next_dy = ask(dy, i + THREADS, n); }
        float v[WIDE];
        #pragma unroll
        for (int k = 0; k < WIDE; k++) {
            float xk = as_float(at_x.at[k]), dyk = as_float(at_dy.at[k]);
            v[k] = __fmul_rn(c.slope, add_sums(mine, dyk, xk, point<false>(xk, c)));
        }
        write(dx, i, n, v);
    }
    write_sums(sums + (long long)blockIdx.x * SUMS, mine);
}

// ---- the gated linear unit ----

// Walks over the groups of a chunk: row and place in the row of one, without a division for each.
struct Walk { long long row; int q, width; };
__device__ __forceinline__ Walk walk_from(long long group, int width) { Walk w = {group / width, (int)(group % width), width}; return w; }
__device__ __forceinline__ void step(Walk& w) { for (w.q += THREADS; w.q >= w.width; w.q -= w.width) w.row++; }

extern "C" __global__ void __launch_bounds__(THREADS) glu_forward(
    DATA_T* h,                                // (N, hidden)
    Curve* curves,                            // of x1, of x2: for the backward
    const DATA_T* x,                          // (N, 2 hidden): x1, x2
    const float* theta_a, const float* theta_g,   // what is learned of each, in the order of the parameters
    Settings settings, long long N, int hidden)
{
    __shared__ Curve made[2];
    Walk at = walk_from((long long)blockIdx.x * THREADS * GROUPS + threadIdx.x, (hidden + WIDE - 1) / WIDE);
    Group next1, next2;
    auto ask_both = [&]() {
        const DATA_T* from = x + at.row * 2 * hidden;
        next1 = ask(from, at.q, hidden);
        next2 = ask(from + hidden, at.q, hidden);
    };
    if (at.row < N) ask_both();
    make_curves(made, curves, theta_a, theta_g, settings, 2);         // while the first groups are on their way
    Curve a = made[0], g = made[1];
    #pragma unroll 2
    for (int k = 0; k < GROUPS; k++) {
        if (at.row >= N) break;
        Group x1 = next1, x2 = next2;
        Walk here = at;
        step(at);
        if (k + 1 < GROUPS && at.row < N) ask_both();
        float v[WIDE];
        #pragma unroll
        for (int i = 0; i < WIDE; i++) {
            float one = as_float(x1.at[i]);
            v[i] = __fmul_rn(__fmul_rn(one, height(point<true>(one, a), a)), height(point<false>(as_float(x2.at[i]), g), g));
        }
        write(h + here.row * hidden, here.q, hidden, v);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) glu_backward(
    DATA_T* dx,                               // (N, 2 hidden)
    float* sums,                              // (chunks, 2 SUMS)
    const DATA_T* dh,                         // (N, hidden)
    const DATA_T* x, const Curve* curves, long long N, int hidden)
{
    Curve a = curves[0], g = curves[1];
    float both[2 * SUMS] = {};                // of a, of g
    Walk at = walk_from((long long)blockIdx.x * THREADS * GROUPS + threadIdx.x, (hidden + WIDE - 1) / WIDE);
    Group next1, next2, next_dh;
    auto ask_all = [&]() {
        const DATA_T* from = x + at.row * 2 * hidden;
        next1 = ask(from, at.q, hidden);
        next2 = ask(from + hidden, at.q, hidden);
        next_dh = ask(dh + at.row * hidden, at.q, hidden);
    };
    if (at.row < N) ask_all();
    #pragma unroll 2
    for (int k = 0; k < GROUPS; k++) {
        if (at.row >= N) break;
        Group x1 = next1, x2 = next2, up = next_dh;
        Walk here = at;
        step(at);
        if (k + 1 < GROUPS && at.row < N) ask_all();
        float d1[WIDE], d2[WIDE];
        #pragma unroll
        for (int i = 0; i < WIDE; i++) {
            float one = as_float(x1.at[i]), two = as_float(x2.at[i]), dhi = as_float(up.at[i]);
            Point p = point<false>(one, a), s = point<false>(two, g);
            float activation = height(p, a), gate = height(s, g);
            float dvalue = __fmul_rn(dhi, gate), dgate = __fmul_rn(dhi, __fmul_rn(one, activation));
            d1[i] = fmaf(a.slope, add_sums(both, __fmul_rn(one, dvalue), one, p), __fmul_rn(dvalue, activation));
            d2[i] = __fmul_rn(g.slope, add_sums(both + SUMS, dgate, two, s));
        }
        DATA_T* to = dx + here.row * 2 * hidden;
        write(to, here.q, hidden, d1);
        write(to + hidden, here.q, hidden, d2);
    }
    write_sums(sums + (long long)blockIdx.x * 2 * SUMS, both);
}

// ---- what stands around polynomial attention ----
// A block takes ROWS rows of one head, so that a head's sums are a block's; blocks of the same rows are neighbours. A thread takes a part m of a head alone:
// it reads what it averages, and the same once more (from L1) to write. With 16 bits and heads of 64 a part is 16 bytes, one request.

#ifndef HEAD
#define HEAD 64               // width of a head
#endif
#ifndef RANK
#define RANK 8                // parts of a head, the first HEAD % RANK of them one channel wider; at most 16
#endif
#ifndef LOW_RANK
#define LOW_RANK 1            // 0: q~ is q / sqrt(d) alone, and there is no curve of the query
#endif
#ifndef ROWS
#define ROWS 32               // of one head, that a block takes; a multiple of 32
#endif
#define GROUPS_OF_HEAD ((HEAD + WIDE - 1) / WIDE)
#define LANES (GROUPS_OF_HEAD >= 32 ? 32 : GROUPS_OF_HEAD >= 16 ? 16 : GROUPS_OF_HEAD >= 8 ? 8 : GROUPS_OF_HEAD >= 4 ? 4 : GROUPS_OF_HEAD >= 2 ? 2 : 1)
#define LEAST_GATE 1e-4f      // a head whose gate is not above it counts for nothing

struct Part { int first, width; };            // channels of a head
__device__ __forceinline__ Part part_of(int m) {
    Part part = {m * (HEAD / RANK), HEAD / RANK};
    if (HEAD % RANK) {
        part.first += min(m, HEAD % RANK);
        part.width += m < HEAD % RANK;
    }
    return part;
}

__device__ __forceinline__ float mean_of(const DATA_T* from, int width) {
    float sum = 0.0f;
    for (int i = 0; WIDE * i < width; i++) {
        Group x = ask(from, i, width);
        #pragma unroll
        for (int k = 0; k < WIDE; k++) sum += as_float(x.at[k]);
    }
    return sum / width;
}

extern "C" __global__ void __launch_bounds__(THREADS) poly_query_gate(
    DATA_T* q_tilde,                          // (rows, H, HEAD)
    float* gate,                              // (rows, H) e, or 0 where it is shut
    Curve* kept,                              // curves of the gate, of the query: for the backward
    const DATA_T* q,                          // (rows, H, HEAD), rows `stride` elements apart
    const DATA_T* seen,                       // (rows, H)
    const float* alpha, const float* beta,    // (H)
    const float* theta_gate, const float* theta_query, Settings settings,
    int rows, int H, int stride)
{
    __shared__ Curve curves[1 + LOW_RANK];
    make_curves(curves, kept, theta_gate, theta_query, settings, 1 + LOW_RANK);
    int h = blockIdx.x % H, first = blockIdx.x / H * ROWS;
    if (threadIdx.x < ROWS && first + threadIdx.x < rows) {
        long long n = (long long)(first + threadIdx.x) * H + h;
        float e = height(point<false>(fmaf(alpha[h], as_float(seen[n]), beta[h]), curves[0]), curves[0]);
        gate[n] = e > LEAST_GATE ? e : 0.0f;
    }
    for (int i = threadIdx.x; i < ROWS * RANK; i += THREADS) {
        int row = first + i / RANK;
        if (row >= rows) return;
        Part part = part_of(i % RANK);
        const DATA_T* from = q + (long long)row * stride + h * HEAD + part.first;
        float more = 0.0f;
        if (LOW_RANK) {
            float u = mean_of(from, part.width);
            more = 0.15f / sqrtf((float)RANK) / part.width * u * height(point<false>(u, curves[1]), curves[1]);
        }
        for (int j = 0; WIDE * j < part.width; j++) {
            Group x = ask(from, j, part.width);
            float v[WIDE];
            #pragma unroll
            for (int k = 0; k < WIDE; k++) v[k] = fmaf(as_float(x.at[k]), 1.0f / sqrtf((float)HEAD), more);
            write(q_tilde + ((long long)row * H + h) * HEAD + part.first, j, part.width, v);
        }
    }
}

// out = e y: de = sum of dout y = sum of dout out / e, over the head. LANES lanes take a row.
extern "C" __global__ void __launch_bounds__(THREADS) poly_gate_backward(
    DATA_T* dy,                               // (rows, H, HEAD)
    DATA_T* dseen,                            // (rows, H)
    float* sums,                              // (blocks, (1 + LOW_RANK) SUMS), of which these are the first SUMS
    float* by_head,                           // (blocks, 2) for dalpha, dbeta
    const DATA_T* dout, const DATA_T* out, const float* gate, const DATA_T* seen, const float* alpha, const float* beta, const Curve* curves,
    int rows, int H)
{
    int h = blockIdx.x % H, first = blockIdx.x / H * ROWS, lane = threadIdx.x % LANES;
    float mine[SUMS] = {}, of_head[2] = {};
    for (int i = threadIdx.x / LANES; i < ROWS; i += THREADS / LANES) {            // whole warps
        bool valid = first + i < rows;
        long long n = (long long)(first + i) * H + h;
        float e = valid ? gate[n] : 0.0f, sum = 0.0f;
        for (int j = lane; valid && j < GROUPS_OF_HEAD; j += LANES) {
            Group up = ask(dout + n * HEAD, j, HEAD), x = ask(out + n * HEAD, j, HEAD);
            float v[WIDE];
            #pragma unroll
            for (int k = 0; k < WIDE; k++) {
                v[k] = __fmul_rn(e, as_float(up.at[k]));
                sum = fmaf(as_float(up.at[k]), as_float(x.at[k]), sum);
            }
            write(dy + n * HEAD, j, HEAD, v);
        }
        #pragma unroll
        for (int far = LANES / 2; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
        if (lane > 0 || !valid) continue;
        float x = as_float(seen[n]), ds = 0.0f;
        if (e > 0.0f) {
            float s = fmaf(alpha[h], x, beta[h]);
            ds = curves->slope * add_sums(mine, sum / e, s, point<false>(s, *curves));
        }
        of_head[0] = fmaf(ds, x, of_head[0]);
        of_head[1] += ds;
        store(dseen + n, alpha[h] * ds);
    }
    write_sums(sums + (long long)blockIdx.x * (1 + LOW_RANK) * SUMS, mine);
    write_sums(by_head + 2 * (long long)blockIdx.x, of_head);
}

// dq += what comes through q~; and dalpha, dbeta from the sums that poly_gate_backward has left.
extern "C" __global__ void __launch_bounds__(THREADS) poly_query_backward(
    DATA_T* dq,                               // (rows, H, HEAD), rows `apart` elements apart
    float* sums,                              // (blocks, 2 SUMS), of which these are the last SUMS; with LOW_RANK
    float* dalpha, float* dbeta,              // (H), by the first block of each head
    const DATA_T* dq_tilde, const DATA_T* q, const float* by_head, const Curve* curves,
    int rows, int H, int stride, int apart)
{
    int h = blockIdx.x % H, first = blockIdx.x / H * ROWS;
    float mine[SUMS] = {};
    for (int i = threadIdx.x; i < ROWS * RANK; i += THREADS) {
        int row = first + i / RANK;
        if (row >= rows) break;
        Part part = part_of(i % RANK);
        const DATA_T* up = dq_tilde + ((long long)row * H + h) * HEAD + part.first;
        DATA_T* to = dq + (long long)row * apart + h * HEAD + part.first;
        float du = 0.0f;
        if (LOW_RANK) {
            float u = mean_of(q + (long long)row * stride + h * HEAD + part.first, part.width);
            float dh = 0.15f / sqrtf((float)RANK) * mean_of(up, part.width);
            Point at = point<false>(u, curves[1]);
            du = fmaf(curves[1].slope, add_sums(mine, dh * u, u, at), dh * height(at, curves[1])) / part.width;
        }
        for (int j = 0; WIDE * j < part.width; j++) {
            Group x = ask(up, j, part.width), old = ask(to, j, part.width);
            float v[WIDE];
            #pragma unroll
            for (int k = 0; k < WIDE; k++) v[k] = as_float(old.at[k]) + fmaf(as_float(x.at[k]), 1.0f / sqrtf((float)HEAD), du);
            write(to, j, part.width, v);
        }
    }
    if (LOW_RANK) write_sums(sums + ((long long)blockIdx.x * 2 + 1) * SUMS, mine);
    if (blockIdx.x >= H) return;
    __shared__ double warps[THREADS / 32];
    for (int s = 0; s < 2; s++) {
        double sum = 0.0;
        for (int i = blockIdx.x + threadIdx.x * H; i < gridDim.x; i += THREADS * H) sum += by_head[2 * (long long)i + s];
        __syncthreads();
        sum = block_joined(sum, warps);
        if (threadIdx.x == 0) (s == 0 ? dalpha : dbeta)[h] = (float)sum;
    }
}

// ---- from the sums to the gradients of the parameters ----

extern "C" __global__ void __launch_bounds__(1024) richards_finish(
    float* dtheta0, float* dtheta1,           // one per learned parameter of each curve
    const float* sums,                        // (chunks, curves * SUMS)
    const Curve* curves, long long chunks, Settings settings)
{
    __shared__ double of_warp[SUMS][32], total[SUMS];
    double mine[SUMS] = {};
    int which = blockIdx.x, wide = gridDim.x * SUMS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll 4
    for (long long i = threadIdx.x; i < chunks; i += 1024)
        #pragma unroll
        for (int s = 0; s < SUMS; s++) mine[s] += sums[i * wide + which * SUMS + s];
    #pragma unroll
    for (int s = 0; s < SUMS; s++) {
        for (int far = 16; far > 0; far /= 2) mine[s] += __shfl_down_sync(0xffffffffu, mine[s], far);
        if (lane == 0) of_warp[s][warp] = mine[s];
    }
    __syncthreads();
    if (warp < SUMS) {
        double sum = of_warp[warp][lane];
        for (int far = 16; far > 0; far /= 2) sum += __shfl_down_sync(0xffffffffu, sum, far);
        if (lane == 0) total[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    const Curve* c = curves + which;
    const float* p = c->p;
    bool birch = c->birch != 0.0f;
    double V = c->V, G = c->G, nu = p[NU], over_nu = 1.0 / nu, over_T = 1.0 / p[T_], over_beta = 1.0 / p[BETA];
    double k_of_m = birch ? p[K] : p[K] * over_nu;                                     // k' / nu
    double S0 = G * LN2 * total[0], S1 = G * total[1], Sx = G * total[2];
    double Su = V * p[SCALE] * over_T * Sx + (V * p[SHIFT] - p[M]) * S1;               // sum of dy G sigma r (u - m)
    double d[9];
    d[NU] = S0 * over_nu * over_nu + (birch ? p[K] * Su * over_nu : 0.0);
    d[K] = birch ? Su : Su * over_nu;
    d[M] = -k_of_m * S1;
    d[BETA] = -S1 * over_nu * over_beta;
    d[T_] = -k_of_m * V * p[SCALE] * over_T * over_T * Sx;
    d[GAIN] = V * total[3] - (V == 2.0 ? total[4] : 0.0);
    d[OFFSET] = total[4];
    d[SCALE] = k_of_m * V * over_T * Sx;
    d[SHIFT] = k_of_m * V * S1;
    float* to = which == 0 ? dtheta0 : dtheta1;
    for (int i = 0, next = 0; i < 9; i++)
        if (settings.curve[which].kinds >> (2 * i) & 3) to[next++] = (float)(d[i] * c->chain[i]);
}
