// rotary: rotary positions (Su et al., 2021) of queries and keys, in place where the joint product
// of v, k and q has written them; and their gradients, written where that product's backward reads.
//
//   a = x[i], b = x[i + D/2]   ->   a cos - b sin, b cos + a sin   (the gradient: the other way)
//
// A row of `vkq` is a token: kv_heads heads of v, kv_heads of k, heads of q, D elements each. It is
// what x @ [w_v, w_k, w_q]^T has computed. v stays as it is.
//
// Floor: the forward reads and writes q and k. The backward reads dq, dk and dv and writes one
// tensor. With 16 heads of q, 4 of k and of v, D = 64, and 4 * 1024 rows of bf16 that is 21.0 MB
// and 25.2 MB, at an H200's 4.2 TB/s 5.0 and 6.0 us. cos and sin, 0.5 MB, stay in the cache.
//
// The ladder:
//   torch                A pass for q, one for k, and both again for their gradients; then a
//                        concatenation of dq, dk and dv, which reads and writes all three: 67.1 MB.
//   rotary_v1            One thread, one pair, in place. A warp requests 64 bytes of bf16.
//   rotary_backward_v1   The same; dv is copied.
//   rotary_v2            One thread, 16 bytes of a and of b, of up to HEADS heads. They have one
//   rotary_backward_v2   position, so cos and sin are read once. All loads are in flight together.
//
// Products and sums are rounded one by one, as torch does: fp32 results are bit-identical to those
// of torch's operations. With 16 bits the result is rounded once, at the end.
//
// Shapes: B batch, T time, rows = B * T, P positions of the table, D width of a head.

#ifndef DATA_T
#define DATA_T float          // float, bf16 or fp16
#endif
#ifndef TABLE_T
#define TABLE_T float         // float, bf16 or fp16
#endif
#ifndef THREADS
#define THREADS 128
#endif
#ifndef HEADS
#define HEADS 4               // heads that a thread takes
#endif
// Elements of a group: 16 bytes, one request of a thread.
#define WIDE (16 / (int)sizeof(DATA_T))

__device__ __forceinline__ float sum_of_products(float a, float cos, float b, float sin) {
    return __fmul_rn(a, cos) + __fmul_rn(b, sin);
}

extern "C" __global__ void rotary_v1(
    DATA_T* vkq,              // (rows, first + heads * D): the heads behind column `first` rotate
    const TABLE_T* table,     // (2, P, D): [cos, cos] and [-sin, sin]
    long long pairs,          // rows * heads * D / 2
    int T, int P, int first, int heads, int D)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    int half = D / 2, in_row = i % (heads * half), column = in_row % half;
    long long row = i / (heads * half);
    DATA_T* x = vkq + row * (first + heads * D) + first + in_row / half * D + column;
    const TABLE_T* angle = table + row % T * D + column;
    float cos = as_float(angle[0]), sin = as_float(angle[(long long)P * D + half]);
    float a = as_float(x[0]), b = as_float(x[half]);
    store(x, sum_of_products(a, cos, b, -sin));
    store(x + half, sum_of_products(b, cos, a, sin));
}

// The gradient of head `head` of a row's dv, dk and dq.
__device__ __forceinline__ const DATA_T* head_of(
    const DATA_T* dv, const DATA_T* dk, const DATA_T* dq,
    long long row, int head, int kv_heads, int heads, int D)
{
    if (head >= 2 * kv_heads) return dq + (row * heads + head - 2 * kv_heads) * D;
    return (head >= kv_heads ? dk - kv_heads * D : dv) + (row * kv_heads + head) * D;
}

extern "C" __global__ void rotary_backward_v1(
    DATA_T* dvkq,             // (rows, (2 * kv_heads + heads) * D)
    const DATA_T* dv,         // (rows, kv_heads * D)
    const DATA_T* dk,         // (rows, kv_heads * D)
    const DATA_T* dq,         // (rows, heads * D)
    const TABLE_T* table,
    long long pairs,          // rows * (2 * kv_heads + heads) * D / 2
    int T, int P, int kv_heads, int heads, int D)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    int half = D / 2, all = 2 * kv_heads + heads, in_row = i % (all * half),
        head = in_row / half, column = in_row % half;
    long long row = i / (all * half);
    const DATA_T* dx = head_of(dv, dk, dq, row, head, kv_heads, heads, D) + column;
    DATA_T* to = dvkq + (row * all + head) * D + column;
    const TABLE_T* angle = table + row % T * D + column;
    float cos = as_float(angle[0]), sin = as_float(angle[(long long)P * D + half]);
    float a = as_float(dx[0]), b = as_float(dx[half]);
    bool rotated = head >= kv_heads;
    store(to, rotated ? sum_of_products(a, cos, b, sin) : a);
    store(to + half, rotated ? sum_of_products(b, cos, a, -sin) : b);
}

// ---- 16 bytes at a time ----

__device__ __forceinline__ uint4 load_group(const DATA_T* x) {
    return *reinterpret_cast<const uint4*>(x);
}
__device__ __forceinline__ void store_group(DATA_T* x, uint4 group) {
    *reinterpret_cast<uint4*>(x) = group;
}

// Of the WIDE pairs of a thread, in fours.
struct Angles { float4 cos[WIDE / 4], sin[WIDE / 4]; };

__device__ __forceinline__ Angles load_angles(const TABLE_T* table, int position, int P, int D,
                                              int column) {
    Angles result;
    const TABLE_T *cos = table + (long long)position * D + column,
                  *sin = cos + (long long)P * D + D / 2;
    #pragma unroll
    for (int k = 0; k < WIDE / 4; k++) {
        result.cos[k] = load4(cos, k);
        result.sin[k] = load4(sin, k);
    }
    return result;
}

// sign: 1 rotates, -1 rotates back.
__device__ __forceinline__ void rotate(uint4& group_a, uint4& group_b, const Angles& angles,
                                       float sign) {
    DATA_T *a = reinterpret_cast<DATA_T*>(&group_a), *b = reinterpret_cast<DATA_T*>(&group_b);
    #pragma unroll
    for (int k = 0; k < WIDE / 4; k++) {
        float4 x = load4(a, k), y = load4(b, k), cos = angles.cos[k], sin = angles.sin[k];
        sin = make_float4(sign * sin.x, sign * sin.y, sign * sin.z, sign * sin.w);
        store4(a, k, make_float4(sum_of_products(x.x, cos.x, y.x, -sin.x),
                                 sum_of_products(x.y, cos.y, y.y, -sin.y),
                                 sum_of_products(x.z, cos.z, y.z, -sin.z),
                                 sum_of_products(x.w, cos.w, y.w, -sin.w)));
        store4(b, k, make_float4(sum_of_products(y.x, cos.x, x.x, sin.x),
                                 sum_of_products(y.y, cos.y, x.y, sin.y),
                                 sum_of_products(y.z, cos.z, x.z, sin.z),
                                 sum_of_products(y.w, cos.w, x.w, sin.w)));
    }
}

// What a thread takes: the pairs from `column` on of heads `head`, `head + step`, ... of a row.
// Neighbours take neighbouring columns, then neighbouring heads.
struct Part { int row, head, step, column; };

__device__ __forceinline__ Part part_of_thread(int heads, int D) {
    // An int is enough: a thread has 32 bytes or more.
    int i = blockIdx.x * THREADS + threadIdx.x, groups = D / 2 / WIDE;
    Part part;
    part.step = (heads + HEADS - 1) / HEADS;
    part.column = i % groups * WIDE;
    part.head = i / groups % part.step;
    part.row = i / (groups * part.step);
    return part;
}

extern "C" __global__ void __launch_bounds__(THREADS) rotary_v2(
    DATA_T* vkq,              // (rows, first + heads * D); rows are whole groups
    const TABLE_T* table,     // (2, P, D), aligned to four elements
    int rows, int T, int P, int first, int heads, int D)
{
    Part part = part_of_thread(heads, D);
    if (part.row >= rows) return;
    DATA_T* x = vkq + (long long)part.row * (first + heads * D) + first + part.column;
    Angles angles = load_angles(table, part.row % T, P, D, part.column);
    uint4 a[HEADS], b[HEADS];
    #pragma unroll
    for (int k = 0; k < HEADS; k++) {
        int head = part.head + k * part.step;
        if (head >= heads) break;
        a[k] = load_group(x + head * D);
        b[k] = load_group(x + head * D + D / 2);
    }
    #pragma unroll
    for (int k = 0; k < HEADS; k++) {
        int head = part.head + k * part.step;
        if (head >= heads) break;
        rotate(a[k], b[k], angles, 1.0f);
        store_group(x + head * D, a[k]);
        store_group(x + head * D + D / 2, b[k]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rotary_backward_v2(
    DATA_T* dvkq,             // (rows, (2 * kv_heads + heads) * D)
    const DATA_T* dv,         // (rows, kv_heads * D)
    const DATA_T* dk,         // (rows, kv_heads * D)
    const DATA_T* dq,         // (rows, heads * D)
    const TABLE_T* table,     // (2, P, D)
    int rows, int T, int P, int kv_heads, int heads, int D)
{
    int all = 2 * kv_heads + heads;
    Part part = part_of_thread(all, D);
    if (part.row >= rows) return;
    DATA_T* to = dvkq + (long long)part.row * all * D + part.column;
    Angles angles = load_angles(table, part.row % T, P, D, part.column);
    uint4 a[HEADS], b[HEADS];
    #pragma unroll
    for (int k = 0; k < HEADS; k++) {
        int head = part.head + k * part.step;
        if (head >= all) break;
        const DATA_T* dx =
            head_of(dv, dk, dq, part.row, head, kv_heads, heads, D) + part.column;
        a[k] = load_group(dx);
        b[k] = load_group(dx + D / 2);
    }
    #pragma unroll
    for (int k = 0; k < HEADS; k++) {
        int head = part.head + k * part.step;
        if (head >= all) break;
        if (head >= kv_heads) rotate(a[k], b[k], angles, -1.0f);
        store_group(to + head * D, a[k]);
        store_group(to + head * D + D / 2, b[k]);
    }
}
