// hopper: the instructions of sm_90a that poly_forward_v3 and poly_backward_v3 use, each under its
// PTX name, and the tiles in shared memory that these instructions read.
//
//   cp.async   copies 16 bytes from global to shared memory while the thread goes on.
//   wgmma      multiplies two bf16 matrices with the four warps of a warpgroup and sums in fp32. It
//              reads the right factor from shared memory, described by a 64-bit descriptor, and the
//              left one from registers or from shared memory. It runs while the warps go on.
//
// HOPPER is 1 where these instructions exist; elsewhere a kernel that needs them has an empty body.
// The names follow the PTX ISA, sections "cp.async" and "Asynchronous warpgroup level matrix
// multiply-accumulate instructions".

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1
#else
#define HOPPER 0
#endif
#define THREADS 256           // two warpgroups
#define SIDE 64               // rows of a tile
#define TILE_BYTES 8192       // 64 rows of 128 bytes

#if HOPPER
// What a lane has of the 64 x 64 sums of a warpgroup. Lane 4 g + t of warp w has the rows 16 w + g
// and 16 w + g + 8; element [4 m + 2 h + e] is row g + 8 h, column 8 m + 2 t + e.
typedef float Sums[32];
// The same in bf16, as a left factor: [m / 2][m % 2 * 2 + h] has e = 0 and e = 1.
typedef unsigned Factor[4][4];

// The same number, but the compiler does not know that: what it computes from the result is not
// kept in registers over the loops.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ---- copies into shared memory ----

__device__ __forceinline__ void cp_async(unsigned to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
// Copies `bytes` of the 16, fills the rest with zeros. With bytes = 0 nothing is read.
__device__ __forceinline__ void cp_async(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `pending` groups of this thread's copies are on their way.
template <int pending> __device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory");
}
// Makes what this thread wrote into shared memory visible to the tensor cores, after the barrier
// that follows.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Waits for the copies of all threads but the last `pending` groups; the tensor cores see them.
template <int pending> __device__ __forceinline__ void wait_for_tiles() {
    cp_async_wait_group<pending>();
    fence_proxy_async();
    asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
}
// __syncthreads() for the threads of one warpgroup.
__device__ __forceinline__ void sync_warpgroup(int group) {
    asm volatile("bar.sync %0, 128;" :: "r"(2 + group) : "memory");
}

// A tile has 64 rows of 128 bytes, eight chunks of 16. Chunk c of row r lies in place c ^ (r % 8)
// of its row, so that the chunks of eight rows are in different banks; the descriptors call this a
// swizzle of 128 bytes. A tile begins at a multiple of 1024 bytes.
__device__ __forceinline__ int swizzle(int r, int c) { return (c ^ (r % 8)) << 4; }

// Copies a thread's share of a tile, one chunk of row `row` and one of row + 32.
//   to, from  the chunk's address in the tile; the same chunk of row 0
//   checked   rows outside of 0 .. rows - 1 are zeros; if not checked there must be none such
template <bool checked>
__device__ __forceinline__ void load_chunks(unsigned to, const bf16* from, int stride, int row,
                                            int rows) {
    #pragma unroll
    for (int k = 0; k < 2; k++) {
        int at = row + 32 * k, bytes = !checked || (unsigned)at < (unsigned)rows ? 16 : 0;
        const bf16* source;              // from + at * stride, in one instruction
        asm("mad.wide.s32 %0, %1, %2, %3;"
            : "=l"(source) : "r"(at), "r"((int)sizeof(bf16) * stride), "l"(from));
        if (checked) cp_async(to + 4096 * k, source, bytes);
        else cp_async(to + 4096 * k, source);
    }
}

// ---- products of a warpgroup ----

// A matrix descriptor. Bits 0-13: address / 16. Bits 16-29 and 32-45: two strides / 16; the second
// is that of eight rows, the first counts only where a row has more than 128 bytes. Bits 62-63: 1
// for a swizzle of 128 bytes. Only the lower half depends on the tile.
#define STRIDE 64
__device__ __forceinline__ unsigned descriptor(unsigned address) {
    return STRIDE << 16 | address >> 4;
}
__device__ __forceinline__ unsigned long long full_descriptor(unsigned lower_half) {
    return (1ull << 62 | (unsigned long long)STRIDE << 32) | lower_half;
}
// From one k-step of 16 to the next: 16 rows of a transposed factor (the sum goes over its rows),
// else 16 columns, 32 bytes.
#define K_STEP(transposed) (((transposed) ? 16 * 128 : 32) / 16)

#define D4(c, x, i) c(x[i]), c(x[i + 1]), c(x[i + 2]), c(x[i + 3])
#define D32(c, x) D4(c, x, 0), D4(c, x, 4), D4(c, x, 8), D4(c, x, 12), \
                  D4(c, x, 16), D4(c, x, 20), D4(c, x, 24), D4(c, x, 28)
#define R32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R64 R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
            "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_N64 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" R32 "}, "
#define WGMMA_N128 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R64 "}, "
// The predicate p is scale-d: false writes d, true adds to d. With "+f" the compiler keeps what d
// was before, even where it is only written; with "=f" it does not, which saves registers.
#define WRITE(body) "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n" body "\n}"
#define ADD(body) "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n" body "\n}"

// d (64 x 64) = or += a b, a (64 x 16) in registers. keep: "+f" in any case.
template <bool add, bool transpose_b, bool keep = add>
__device__ __forceinline__ void wgmma(Sums& d, const unsigned (&a)[4], unsigned long long b) {
    #define BODY WGMMA_N64 "{%32, %33, %34, %35}, %36, p, 1, 1, %37;"
    #define FACTORS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)transpose_b)
    if (add) asm volatile(ADD(BODY) : D32("+f", d) : FACTORS);
    else if (keep) asm volatile(WRITE(BODY) : D32("+f", d) : FACTORS);
    else asm volatile(WRITE(BODY) : D32("=f", d) : FACTORS);
    #undef BODY
    #undef FACTORS
}
// The same with a (64 x 16) in shared memory.
template <bool add, bool transpose_a, bool transpose_b>
__device__ __forceinline__ void wgmma(Sums& d, unsigned long long a, unsigned long long b) {
    #define BODY WGMMA_N64 "%32, %33, p, 1, 1, %34, %35;"
    #define FACTORS "l"(a), "l"(b), "n"((int)transpose_a), "n"((int)transpose_b)
    if (add) asm volatile(ADD(BODY) : D32("+f", d) : FACTORS);
    else asm volatile(WRITE(BODY) : D32("=f", d) : FACTORS);
    #undef BODY
    #undef FACTORS
}
// d = or += a (64 x 64) times a tile; in terms of rows and columns of the tile in memory, the sum
// goes over its rows if transpose_b, else over its columns. After wgmma_fence(); d is complete
// after wgmma_wait_group().
template <bool add, bool transpose_b, bool keep = add>
__device__ __forceinline__ void wgmma(Sums& d, const Factor& a, unsigned b) {
    wgmma<add, transpose_b, keep>(d, a[0], full_descriptor(b));
    #pragma unroll
    for (int k = 1; k < 4; k++)
        wgmma<true, transpose_b>(d, a[k], full_descriptor(b + k * K_STEP(transpose_b)));
}
template <bool add, bool transpose_a, bool transpose_b>
__device__ __forceinline__ void wgmma(Sums& d, unsigned a, unsigned b) {
    wgmma<add, transpose_a, transpose_b>(d, full_descriptor(a), full_descriptor(b));
    #pragma unroll
    for (int k = 1; k < 4; k++)
        wgmma<true, transpose_a, transpose_b>(d, full_descriptor(a + k * K_STEP(transpose_a)),
                                              full_descriptor(b + k * K_STEP(transpose_b)));
}
// near and far (64 x 64 each) = a (64 x 64) times two tiles that lie one behind the other; a is
// read once.
__device__ __forceinline__ void wgmma_n128(Sums& near, Sums& far, unsigned a, unsigned b) {
    #define BODY WGMMA_N128 "%64, %65, p, 1, 1, 0, 0;"
    asm volatile(WRITE(BODY) : D32("=f", near), D32("=f", far)
                 : "l"(full_descriptor(a)), "l"(full_descriptor(b)));
    #pragma unroll
    for (int k = 1; k < 4; k++)
        asm volatile(ADD(BODY) : D32("+f", near), D32("+f", far)
                     : "l"(full_descriptor(a + k * K_STEP(false))),
                       "l"(full_descriptor(b + k * K_STEP(false))));
    #undef BODY
}
// Before the first wgmma, and after registers of its factors or sums were written.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending> __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(pending) : "memory");
}
// After wgmma_wait_group(): the compiler does not move reads of d to before the wait.
__device__ __forceinline__ void fence_operand(Sums& d) {
    #pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}

__device__ __forceinline__ void clear(Sums& d) {
    #pragma unroll
    for (int i = 0; i < 32; i++) d[i] = 0.0f;
}
// Sums, rounded, as a left factor.
__device__ __forceinline__ void as_factor(Factor& a, const Sums& d) {
    #pragma unroll
    for (int i = 0; i < 16; i++) a[i / 4][i % 4] = both_as_bf16(d[2 * i], d[2 * i + 1]);
}
#endif
