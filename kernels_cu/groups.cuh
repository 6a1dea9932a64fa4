// groups: rows of a matrix in groups of 16 bytes, one request of a thread; of richards.cuh.

#ifndef DATA_T
#define DATA_T float          // the elements
#endif
#ifndef WHOLE
#define WHOLE 0               // 1: rows are a multiple of 16 bytes and aligned to 16 bytes
#endif
// Elements of a group.
#define WIDE (16 / (int)sizeof(DATA_T))

// A group as it lies in memory. It is loaded one iteration ahead, and converted to floats only
// where it is used.
union Group { uint4 all; DATA_T at[WIDE]; };

// What lies behind the row's end is 0.
__device__ __forceinline__ Group load_group(const DATA_T* row, long long group, long long width) {
    Group result;
#if WHOLE
    result.all = reinterpret_cast<const uint4*>(row)[group];
#else
    result.all = make_uint4(0, 0, 0, 0);
    #pragma unroll
    for (int k = 0; k < WIDE; k++)
        if (WIDE * group + k < width) result.at[k] = row[WIDE * group + k];
#endif
    return result;
}

__device__ __forceinline__ void store2(float* to, float a, float b) { to[0] = a; to[1] = b; }
__device__ __forceinline__ void store2(fp16* to, float a, float b) {
    to[0] = as_fp16(a);
    to[1] = as_fp16(b);
}
__device__ __forceinline__ void store2(bf16* to, float a, float b) {
    unsigned both = both_as_bf16(a, b);
    to[0].bits = (unsigned short)both;
    to[1].bits = (unsigned short)(both >> 16);
}

__device__ __forceinline__ void store_group(DATA_T* row, long long group, long long width,
                                            const float (&values)[WIDE]) {
    Group result;
    #pragma unroll
    for (int k = 0; k < WIDE; k += 2) store2(result.at + k, values[k], values[k + 1]);
#if WHOLE
    reinterpret_cast<uint4*>(row)[group] = result.all;
#else
    #pragma unroll
    for (int k = 0; k < WIDE; k++)
        if (WIDE * group + k < width) row[WIDE * group + k] = result.at[k];
#endif
}
