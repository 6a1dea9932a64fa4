"""Runs the paths of kernels_cu for GPUs from sm_80 to sm_89 on the CPU.

    with ptx.on("sm_80"):
        kernel[grid, block](x)         # a kernel that was not used before

The sources are compiled as for that architecture. Each asm statement becomes a call of a function
of this file that does in C++ what the PTX ISA says of its instruction. Copies that are asynchronous
on a GPU are done at once.
"""

import contextlib
import re
from unittest import mock

from gpuaccel.simt import build
from gpuaccel.source import without_comments

# Registers are 32-bit words; b16 pairs have their first element in the lower half.
INSTRUCTIONS = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define __cvta_generic_to_shared(p) ((unsigned long long)((const char*)(p) - (char*)simt_dynamic()))

inline char* ptx_shared(unsigned at) { return (char*)simt_dynamic() + at; }
inline float ptx_bf16(unsigned word, int half) {
    return __uint_as_float(half ? word & 0xffff0000u : word << 16);
}
inline unsigned short ptx_rounded(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

inline void ptx_cvt_rn_bf16_f32(unsigned short& d, float a) { d = ptx_rounded(a); }
inline void ptx_cvt_rn_bf16x2_f32(unsigned& d, float high, float low) {
    d = ptx_rounded(low) | (unsigned)ptx_rounded(high) << 16;
}
inline void ptx_cvt_f32_f16(float& d, unsigned short a) { d = __half2float(__ushort_as_half(a)); }
inline void ptx_cvt_rn_f16_f32(unsigned short& d, float a) {
    d = __half_as_ushort(__float2half_rn(a));
}
inline void ptx_ex2_approx_ftz_f32(float& d, float a) { d = exp2f(a); }
inline void ptx_rcp_approx_ftz_f32(float& d, float a) { d = 1.0f / a; }
inline void ptx_tanh_approx_f32(float& d, float a) { d = tanhf(a); }

// 16 bytes, of which `size` are read and the others are 0.
inline void ptx_cp_async_cg_shared_global(unsigned to, const void* from, int size) {
    if (to % 16 || (unsigned long long)from % 16 && size) __trap();
    for (int i = 0; i < 4; i++)
        ((unsigned*)ptx_shared(to))[i] = 4 * i < size ? ((const unsigned*)from)[i] : 0u;
}
inline void ptx_cp_async_commit_group() {}
inline void ptx_cp_async_wait_group(int) {}

// Four 8 x 8 matrices: lane 8 m + r has the address of row r of matrix m. A lane receives of each
// matrix two elements of one row, transposed of one column. Up to four warps.
inline void ptx_ldmatrix(unsigned* (&d)[4], unsigned at, bool transposed) {
    if (at % 16) __trap();
    __shared__ unsigned rows[4][32];
    int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    rows[warp][threadIdx.x % 32] = at;
    __syncwarp();
    for (int m = 0; m < 4; m++) {
        unsigned word = 0;
        for (int half = 0; half < 2; half++) {
            int r = transposed ? 2 * pair + half : row, c = transposed ? row : 2 * pair + half;
            const char* start = ptx_shared(rows[warp][8 * m + r]);
            word |= (unsigned)((const unsigned short*)start)[c] << 16 * half;
        }
        *d[m] = word;
    }
    __syncwarp();
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(
        unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned at) {
    unsigned* to[4] = {&a, &b, &c, &d};
    ptx_ldmatrix(to, at, false);
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(
        unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned at) {
    unsigned* to[4] = {&a, &b, &c, &d};
    ptx_ldmatrix(to, at, true);
}

// c (16 x 8) += a (16 x 16) b (16 x 8); up to four warps.
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
        float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1, unsigned a2,
        unsigned a3, unsigned b0, unsigned b1) {
    __shared__ float left[4][16][16], right[4][16][8];
    int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, pair = 2 * (threadIdx.x % 4);
    unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 4; i++)
            left[warp][group + i % 2 * 8][pair + i / 2 * 8 + half] = ptx_bf16(a[i], half);
        for (int i = 0; i < 2; i++)
            right[warp][pair + i * 8 + half][group] = ptx_bf16(b[i], half);
    }
    __syncwarp();
    float* c[4] = {&c0, &c1, &c2, &c3};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++)
            *c[i] += left[warp][group + i / 2 * 8][k] * right[warp][k][pair + i % 2];
    __syncwarp();
}
"""
_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
_TOKEN = re.compile(r'"[^"]*"|[(),:;]|[^"(),:;]+')


def calls(source: str) -> str:
    """The source with a call in the place of each asm statement."""
    blank, pieces, position = without_comments(source, strings=True), [], 0
    for match in _ASM.finditer(blank):
        # Template, outputs, inputs, clobbers; of each the operands.
        parts, depth, end = [[""]], 1, match.end()
        while depth:
            token = _TOKEN.match(source, end)[0]
            end += len(token)
            depth += {"(": 1, ")": -1}.get(token, 0)
            if depth == 1 and token == ":":
                parts.append([""])
            elif depth == 1 and token == ",":
                parts[-1].append("")
            elif depth:
                parts[-1][-1] += token
        template = "".join(re.findall(r'"([^"]*)"', parts[0][0]))
        operands = [
            re.sub(r'^\s*"[^"]*"\s*', "", text) for part in parts[1:3] for text in part if text
        ]
        name = re.sub(r"\W+", "_", re.split(r"[%{[;]", template)[0].strip())
        call = f"ptx_{name}({', '.join(operands)})" if template else "(void)0"
        pieces += [source[position : match.start()], call]
        position = end
    return "".join([*pieces, source[position:]])


@contextlib.contextmanager
def on(arch: str):
    """Inside, kernels that are compiled for the CPU run as on a GPU of this architecture."""
    number = 10 * int(arch.removeprefix("sm_"))
    front = f'#define __CUDA_ARCH__ {number}\n#line 1 "ptx"\n{INSTRUCTIONS}\n'
    compile = build.program

    def program(source, *options):
        return compile(front + calls(source), *options)

    with mock.patch.object(build, "program", program):
        yield
