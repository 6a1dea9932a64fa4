"""CUDA C means the same on the CPU (simt.h) as on a GPU: types, numbers, bits, warps, atomics.

Each test runs in fast and in checked mode, and on a GPU where there is one. There it tests the
model, or simt.h's reading of the programming guide.
"""

import ctypes
import math
import operator
import random
import re
import struct
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
import torch
from simt_pairs import ROUND, check_bits, rounded

import gpuaccel as ga

FULL = 0xFFFFFFFF


def run(device, source, grid, block, *args, shared=0):
    """Launch on copies of the tensors; those copies, back on the CPU."""
    there = [a.clone().to(device) if isinstance(a, torch.Tensor) else a for a in args]
    ga.compile(source)[grid, block, shared](*there)
    return [a.cpu() for a in there if isinstance(a, torch.Tensor)]


class Line(ctypes.Structure):
    _fields_ = [("v", ctypes.c_double * 16)]


# ---- arguments ---------------------------------------------------------------------------------


def test_a_struct_by_value_lies_as_its_type_asks(device):
    source = """struct alignas(128) Line { double v[16]; };
    extern "C" __global__ void k(float* x, int n, float4 four, char c, Line line, float2 two) {
        *(float4*)x = four;
        for (int i = 0; i < 16; i++) x[4 + i] = line.v[i] * 2;
        x[20] = n; x[21] = c; x[22] = two.x; x[23] = two.y;
    }"""
    values = [float(i) for i in range(16)]
    four, two = struct.pack("4f", 1, 2, 3, 4), struct.pack("2f", 7, 8)
    line = struct.pack("16d", *values)
    for given in (line, Line.from_buffer_copy(line)):
        (got,) = run(device, source, 1, 1, torch.zeros(24), 5, four, 6, given, two)
        assert got.tolist() == [1, 2, 3, 4, *(2 * v for v in values), 5, 6, 7, 8]
    for wrong, message in (
        ((1, 2.0), "is a struct by value and expects bytes, got tuple"),
        (b"12345678", "is 128 bytes, got 8"),
    ):
        with pytest.raises(ga.errors.ArgumentError, match=f"`Line line` {message}"):
            run(device, source, 1, 1, torch.zeros(24), 5, four, 6, wrong, two)


# ---- the same types, the same overloads ----------------------------------------------------------

# The type that a call returns. NVRTC and the host compiler have to agree on each, and both have to
# refuse the calls in REFUSED.
TYPES = {
    "float": """
        pow(f, 2); pow(i, f); max(f, 1.0f); min(f, f); abs(f); fabs(f); exp10(f); rsqrt(f);
        rcbrt(f); sinpi(f); cospi(f); normcdf(f); ldexp(f, i); scalbn(f, i); frexp(f, &i);
        modf(f, &f); round(f); fmax(f, i); fma(f, f, f); hypot(f, f); __uint2float_rz(u);
        __ll2float_ru(ll); __ull2float_rd(ull); __int2float_rn(i); __double2float_rz(d);
        __fadd_rn(f, f); __fsub_rn(f, f); __fmul_rn(f, f); __fdiv_rn(f, f); __frcp_rn(f);
        __fsqrt_rn(f); __frsqrt_rn(f); __fmaf_rn(f, f, f); __saturatef(f); __fdividef(f, f);
        fdividef(f, f); __tanf(f); __exp10f(f); __log2f(f); __log10f(f); __powf(f, f); __tanhf(f);
        __ldg(&f); __ldca(&f); __ldcg(&f); __ldcs(&f); __ldlu(&f); __ldcv(&f); __uint_as_float(u);
        __int_as_float(i); __shfl_sync(u, f, i); __shfl_xor_sync(u, f, i, 8); atomicAdd(&f, f);
        atomicAdd_system(&f, f); atomicExch(&f, f); atomicExch_block(&f, f); make_float2(f, f).x;
        make_float4(f, f, f, f).w; __ldg((const float4*)0).z; float3{1, 2, 3}.y
    """,
    "double": """
        max(f, d); min(d, f); max(d, d); abs(d); fabs(d); pow(d, i); pow(d, d); exp10(d); rsqrt(d);
        __int2double_rn(i); __uint2double_rn(u); __ll2double_ru(ll); __ull2double_rz(ull);
        __dadd_rn(d, d); __dsub_rn(d, d); __dmul_rn(d, d); __ddiv_rn(d, d); __drcp_rn(d);
        __dsqrt_rn(d); __fma_rn(d, d, d); __longlong_as_double(ll); __hiloint2double(i, i);
        __shfl_down_sync(u, d, 1); atomicAdd(&d, d); atomicAdd_block(&d, d); make_double2(d, d).y;
        make_double4(d, d, d, d).z; floor(d); remainder(d, d)
    """,
    "int": """
        max(s, s); max(c, i); min(i, 3); abs(s); abs(i); ilogb(f); isnan(f) * 0; isinf(d) * 0;
        isfinite(f) * 0; signbit(d) * 0; __popc(u); __popcll(ull); __clz(i); __clzll(ll); __ffs(i);
        __ffsll(ll); __mulhi(i, i); __mul24(i, i); __dp4a(i, i, i); __float2int_rn(f);
        __float2int_ru(f); __double2int_rd(d); __double2hiint(d); __double2loint(d);
        __float_as_int(f); __syncthreads_count(i); __syncthreads_and(i); __syncthreads_or(i);
        __any_sync(u, i); __all_sync(u, i); __shfl_sync(u, s, 0); __shfl_up_sync(u, i, 1);
        __reduce_add_sync(u, i); __reduce_min_sync(u, i); __reduce_max_sync(u, i); atomicAdd(&i, i);
        atomicSub(&i, i); atomicMin(&i, i); atomicMax_block(&i, i); atomicCAS(&i, i, i);
        atomicAnd(&i, i); atomicOr_system(&i, i); atomicXor(&i, i); atomicExch(&i, i); warpSize + 0;
        make_int2(i, i).x; make_int3(i, i, i).y; __ldg((const int4*)0).x
    """,
    "unsigned": """
        max(i, u); min(u, i); max(u, u); __brev(u); __byte_perm(u, u, u); __umulhi(u, u);
        __umul24(u, u); __dp4a(u, u, u); __sad(i, i, u); __usad(u, u, u); __funnelshift_l(u, u, u);
        __funnelshift_r(u, u, u); __funnelshift_lc(u, u, u); __funnelshift_rc(u, u, u);
        __float2uint_rz(f); __double2uint_rn(d); __float_as_uint(f); __ballot_sync(u, i);
        __match_any_sync(u, f); __match_any_sync(u, ull); __match_all_sync(u, d, &i);
        __activemask(); __reduce_add_sync(u, u); __reduce_max_sync(u, u); __reduce_and_sync(u, u);
        __reduce_or_sync(u, u); __reduce_xor_sync(u, i); atomicAdd(&u, u); atomicSub_block(&u, u);
        atomicInc(&u, u); atomicDec(&u, u); atomicInc_system(&u, u); atomicDec_block(&u, u);
        atomicCAS_system(&u, u, u); atomicMin(&u, u); atomicExch(&u, u); threadIdx.x; blockDim.y;
        dim3(2).z; make_uint3(u, u, u).x; make_uint4(u, u, u, u).w
    """,
    "long long": """
        max(ll, ll); abs(ll); llabs(ll); llrint(f); llround(d); __mul64hi(ll, ll); __float2ll_rn(f);
        __double2ll_rz(d); __double_as_longlong(d); __shfl_sync(u, ll, 1, 16); atomicMin(&ll, ll);
        atomicMax_system(&ll, ll); atomicAnd(&ll, ll); atomicOr(&ll, ll); atomicXor_block(&ll, ll);
        clock64(); make_longlong2(ll, ll).x
    """,
    "unsigned long long": """
        max(ll, ull); min(ull, ull); __umul64hi(ull, ull); __brevll(ull); __float2ull_ru(f);
        __double2ull_rd(d); __shfl_xor_sync(u, ull, 1); atomicAdd(&ull, ull);
        atomicAdd_block(&ull, ull); atomicMin(&ull, ull); atomicAnd(&ull, ull);
        atomicExch(&ull, ull); atomicCAS(&ull, ull, ull); atomicCAS_block(&ull, ull, ull);
        make_ulonglong2(ull, ull).y
    """,
    "long": """
        max(l, l); abs(l); labs(l); lround(f); lrint(d); __shfl_sync(u, l, 1); clock();
        make_long2(l, l).x
    """,
    "unsigned short": "atomicCAS(&us, us, us); make_ushort4(us, us, us, us).y",
    "unsigned char": "make_uchar4(c, c, c, c).x",
    "signed char": "make_char3(1, 2, 3).z",
}
REFUSED = """
    pow(f, d); pow(i, i); sqrt(i); exp(ll); fabs(i); atan2(f, d); fma(f, f, d); max(i, f);
    max(i, ll); max(u, ull); abs(u); isnan(i); __reduce_add_sync(u, ll);
    __reduce_add_sync(u, f); atomicAdd(&ll, ll); atomicMax(&f, f); atomicSub(&f, f);
    atomicSub(&ull, ull); atomicExch(&d, d); atomicCAS(&f, f, f); atomicInc(&i, i);
    __shfl_sync(u, &f, 0)
"""
# Size and alignment. Of vectors: those of two and four are aligned as a whole, up to 16 bytes.
ELEMENTS = {"char": 1, "short": 2, "int": 4, "long": 8, "longlong": 8} | {"float": 4, "double": 8}
LAYOUT = {"dim3": (12, 4), "bf16": (2, 2), "fp16": (2, 2)} | {
    f"{sign}{name}{n}": (n * size, size if n in (1, 3) else min(n * size, 16))
    for name, size in ELEMENTS.items()
    for sign in (("",) if name in ("float", "double") else ("", "u"))
    for n in (1, 2, 3, 4)
}
VARIABLES = "int i, unsigned u, long l, long long ll, unsigned long long ull, float f, double d, "
VARIABLES += "short s, unsigned short us, unsigned char c"
LANGUAGE = """
template <class A, class B> struct is_same { static const bool value = false; };
template <class A> struct is_same<A, A> { static const bool value = true; };
template <class T> __device__ void keep(T value, void* out) { *(volatile T*)out = value; }
template <class T> __device__ T value_of(T);
#define TYPE(T, ...) \\
    static_assert(is_same<decltype(value_of(__VA_ARGS__)), T>::value, "type of " #__VA_ARGS__);

// A kernel's own overloads stand beside those of the language.
__device__ float4 max(float4 a, float4 b) { return make_float4(max(a.x, b.x), max(a.y, b.y),
max(a.z, b.z), max(a.w, b.w)); }
__device__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y,
a.z + b.z, a.w + b.w); }
__constant__ float table[2] = {1, 2};
__device__ int counter;
struct __align__(8) Pair { float value; int index; };

extern "C" __global__ void __launch_bounds__(128) language(void* __restrict__ out,
const Pair by_value, %(parameters)s) {
    extern __shared__ float dynamic[];
    __shared__ float one, two[3], three[2][4];
    __shared__ __align__(16) float aligned[8];
    __shared__ Pair pairs[4];
    __shared__ struct { int a; float b; } unnamed;
    keep(max(make_float4(1, 2, 3, 4), make_float4(4, 3, 2, 1)).x, out);
    keep((make_float4(1, 2, 3, 4) + float4{1, 2, 3, 4}).y, out);
    one = two[1] = three[1][2] = aligned[3] = dynamic[0] = table[i & 1];
    pairs[i & 3] = by_value;
    unnamed.a = counter++;
    sincosf(f, &f, &one); sincos(d, &d, &d); __sincosf(f, &f, &f);
    __syncthreads(); __syncwarp(); __syncwarp(u); __threadfence(); __threadfence_block();
    __threadfence_system(); __nanosleep(10);
    __stcg(&f, 1.0f); __stcs(&f, f); __stwb(&f, two[0]);
    __stwt((float4*)out, make_float4(1, 2, 3, 4)); __builtin_assume(i > 0);
    if (i == 77) __trap();
    #pragma unroll 4
    for (int k = 0; k < 4; k++) printf("%%d %%f\\n", k, one + unnamed.b + pairs[0].value);
    %(types)s
    %(layout)s
}
"""


def language():
    types = [
        f"TYPE({kind}, {call.strip()})"
        for kind, calls in TYPES.items()
        for call in calls.split(";")
    ]
    types += [
        f"TYPE({kind}, {name}({', '.join([kind[0]] * count)}))"
        for names, count in ((MATH, 1), (MATH2, 2))
        for name in names
        for kind in ("float", "double")
    ]
    layout = "\n    ".join(
        f"static_assert(sizeof({name}) == {size} && alignof({name}) == {align}, "
        f'"layout of {name}");'
        for name, (size, align) in LAYOUT.items()
    )
    return LANGUAGE % dict(parameters=VARIABLES, types="\n    ".join(types), layout=layout)


def refusals():
    """Per call of REFUSED: a template that finds out whether it compiles, and a static_assert."""
    split = [v.rsplit(" ", 1) for v in VARIABLES.split(", ")]
    kinds = ", ".join(f"class {name.upper()}" for _, name in split)
    given = ", ".join(f"{name.upper()} {name}" for _, name in split)
    values = ", ".join(f"({kind})1" for kind, _ in split)
    return "".join(
        f"""
template <{kinds}> constexpr __device__ auto taken_{k}(int, {given}) -> decltype((void)({call}),
true) {{ return true; }}
template <{kinds}> constexpr __device__ bool taken_{k}(long, {given}) {{ return false; }}
static_assert(!taken_{k}(0, {values}), "{call}");"""
        for k, call in enumerate(map(str.strip, REFUSED.split(";")))
    )


def test_nvrtc_and_the_host_compiler_agree_on_every_type():
    kernel = ga.compile(language() + refusals())  # compiles for a GPU
    kernel.load("fast")
    kernel.load("checked")


# ---- numbers -------------------------------------------------------------------------------------

UPWARD = """
extern "C" __global__ void upward(
    float* from_bf16, float* from_fp16, const bf16* a, const fp16* b) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    from_bf16[i] = as_float(a[i]);
    from_fp16[i] = as_float(b[i]);
}"""
DOWNWARD = """
extern "C" __global__ void downward(bf16* to_bf16, fp16* to_fp16, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { to_bf16[i] = as_bf16(x[i]); to_fp16[i] = as_fp16(x[i]); }
}"""


def test_each_bf16_and_fp16_becomes_the_right_float(device):
    patterns = torch.arange(65536).to(torch.uint16).view(torch.int16)
    bf16, fp16 = patterns.view(torch.bfloat16), patterns.view(torch.float16)
    from_bf16, from_fp16, *_ = run(
        device, UPWARD, 256, 256, torch.zeros(65536), torch.zeros(65536), bf16, fp16
    )
    check_bits(from_bf16, bf16.float())
    check_bits(from_fp16, fp16.float())


def test_floats_become_the_nearest_bf16_and_fp16(device, request):
    """Every number of both types, the midpoints, one step to either side, and random bits."""
    patterns = torch.arange(65536).to(torch.uint16).view(torch.int16)
    exact = torch.cat([patterns.view(t).float() for t in (torch.bfloat16, torch.float16)]).double()
    halfway = ((exact[:-1] + exact[1:]) / 2).float()
    limits = torch.tensor(
        [65504, 65519.996, 65520, 65535, 65536, 2.0**-25, 2.0**-24 * 1.5, 2.0**-14]
    )
    near = torch.cat([exact.float(), halfway, limits])
    edges = (
        near.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)
    ).flatten()
    count = (
        4_000_000 if "checked" not in request.node.name else 100_000
    )  # the checks see each access: 20 times slower
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0)).to(
        torch.int32
    )
    x = torch.cat([edges[:: 1 if count > 100_000 else 7], bits]).view(torch.float32)
    to_bf16, to_fp16, _ = run(
        device, DOWNWARD, -(-len(x) // 256), 256, x.bfloat16() * 0, x.half() * 0, x, len(x)
    )
    check_bits(to_bf16, x.bfloat16())
    check_bits(to_fp16, x.half())


# name -> (the same in Python, lowest and highest argument)
MATH = {
    "acos": (math.acos, -1, 1),
    "acosh": (math.acosh, 1, 50),
    "asin": (math.asin, -1, 1),
    "asinh": (math.asinh, -50, 50),
    "atan": (math.atan, -50, 50),
    "atanh": (math.atanh, -0.99, 0.99),
    "cbrt": (math.cbrt, -50, 50),
    "ceil": (math.ceil, -50, 50),
    "cos": (math.cos, -50, 50),
    "cosh": (math.cosh, -20, 20),
    "erf": (math.erf, -3, 3),
    "erfc": (math.erfc, -3, 5),
    "exp": (math.exp, -50, 50),
    "exp2": (math.exp2, -50, 50),
    "exp10": (lambda x: 10.0**x, -20, 20),
    "expm1": (math.expm1, -2, 20),
    "fabs": (abs, -9, 9),
    "floor": (math.floor, -50, 50),
    "lgamma": (math.lgamma, 3, 50),
    "log": (math.log, 1e-9, 0.9),
    "log10": (math.log10, 1.1, 1e9),
    "log1p": (math.log1p, -0.9, 9),
    "log2": (math.log2, 1.1, 1e9),
    "logb": (lambda x: math.frexp(x)[1] - 1, 0.01, 99),
    "nearbyint": (round, -50, 50),
    "rint": (round, -50, 50),
    "round": (lambda x: math.copysign(math.floor(abs(x) + 0.5), x), -50, 50),
    "sin": (math.sin, -50, 50),
    "sinh": (math.sinh, -20, 20),
    "sqrt": (math.sqrt, 0, 50),
    "tan": (math.tan, -1.5, 1.5),
    "tanh": (math.tanh, -9, 9),
    "tgamma": (math.gamma, 0.1, 20),
    "trunc": (math.trunc, -50, 50),
    "rsqrt": (lambda x: 1 / math.sqrt(x), 1e-3, 50),
    "rcbrt": (lambda x: 1 / math.cbrt(x), 1e-3, 50),
    "sinpi": (lambda x: math.sin(math.pi * x), -0.5, 0.5),
    "cospi": (lambda x: math.cos(math.pi * x), -0.4, 0.4),
    "normcdf": (lambda x: math.erfc(-x / math.sqrt(2)) / 2, -5, 5),
}
MATH2 = {
    "atan2": (math.atan2, 0.1, 9),
    "copysign": (math.copysign, -9, 9),
    "fdim": (lambda x, y: max(x - y, 0.0), 0.5, 9),
    "fmax": (max, -9, 9),
    "fmin": (min, -9, 9),
    "fmod": (math.fmod, 0.5, 9),
    "hypot": (math.hypot, -9, 9),
    "pow": (math.pow, 0.1, 9),
    "remainder": (math.remainder, 0.5, 9),
    "nextafter": (None, -9, 9),
}
EXACT = set(
    "ceil fabs floor logb nearbyint rint round sqrt trunc copysign fdim fmax fmin fmod "
    "remainder".split()
)
MATH_SOURCE = """
extern "C" __global__ void mathematics(float* plain, float* suffixed, double* wide,
const float* first, const float* second) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float x = first[i], y = second[i];
    switch (blockIdx.x) {
        %s
    }
}""" % "\n        ".join(
    f"case {k}: plain[i] = {name}({arguments}); suffixed[i] = {name}f({arguments}); "
    f"wide[i] = {name}({doubles}); break;"
    for k, (name, arguments, doubles) in enumerate(
        [
            *((name, "x", "double(x)") for name in MATH),
            *((name, "x, y", "double(x), double(y)") for name in MATH2),
        ]
    )
)


def test_mathematics(device):
    """Each function as f(float), ff(float) and f(double), to 16 ulp of Python's doubles."""
    table, n = {**MATH, **MATH2}, 64
    draw = random.Random(0)
    x, y = (
        torch.tensor(
            [[draw.uniform(low, high) for _ in range(n)] for _, low, high in table.values()]
        )
        for _ in range(2)
    )
    zeros = torch.zeros_like(x)
    plain, suffixed, wide, *_ = run(
        device, MATH_SOURCE, len(table), n, zeros, zeros, zeros.double(), x, y
    )
    check_bits(plain.flatten(), suffixed.flatten())
    for k, (name, (function, *_)) in enumerate(table.items()):
        if name == "nextafter":
            check_bits(plain[k], torch.nextafter(x[k], y[k]))
            check_bits(wide[k], torch.nextafter(x[k].double(), y[k].double()))
            continue
        pairs = zip(x[k].double().tolist(), y[k].double().tolist())
        expected = torch.tensor(
            [float(function(a, b) if name in MATH2 else function(a)) for a, b in pairs],
            dtype=torch.float64,
        )
        for got, unit in ((plain[k], 2.0**-23), (wide[k], 2.0**-52)):
            error = (
                (got.double() - expected.to(got.dtype).double()).abs() / (expected.abs() + 2.0**-60)
            ).max().item() / unit
            assert error <= (0 if name in EXACT else 16), (
                f"{name}: {error:.1f} units in the last place ({got.dtype})"
            )


# Expression -> the same in torch. Of positive `a`, the absolute value of x.
APPROXIMATE = {
    "__expf(x)": lambda x, y: x.exp(),
    "__logf(a)": lambda x, y: x.abs().log(),
    "__log2f(a)": lambda x, y: x.abs().log2(),
    "__log10f(a)": lambda x, y: x.abs().log10(),
    "__powf(a, y)": lambda x, y: x.abs() ** y,
    "__sinf(x)": lambda x, y: x.sin(),
    "__cosf(x)": lambda x, y: x.cos(),
    "__tanf(x)": lambda x, y: x.tan(),
    "__tanhf(x)": lambda x, y: x.tanh(),
    "__exp10f(x)": lambda x, y: 10**x,
    "__fdividef(x, y)": lambda x, y: x / y,
    "s": lambda x, y: x.sin(),
    "c": lambda x, y: x.cos(),
}
NEAREST = {
    "__saturatef(x)": lambda x, y: x.nan_to_num(0.0).clamp(0, 1),
    "__fadd_rn(x, y)": lambda x, y: x + y,
    "__fsub_rn(x, y)": lambda x, y: x - y,
    "__fmul_rn(x, y)": lambda x, y: x * y,
    "__fdiv_rn(x, y)": lambda x, y: x / y,
    "__frcp_rn(y)": lambda x, y: 1 / y,
    # torch's own float sqrt is not always the nearest
    "__fsqrt_rn(a)": lambda x, y: x.abs().double().sqrt().float(),
    "rest + fraction": lambda x, y: x,
    "ldexp(mantissa, whole)": lambda x, y: x,
    "scalbn(x, 3)": lambda x, y: x * 8,
    "abs(x)": lambda x, y: x.abs(),
    "min(x, y)": torch.fmin,
    "max(x, y)": torch.fmax,
    "(float)max(x, (double)y)": torch.fmax,
}
# Rounded once: fp64 tells what they give, within limits.
FUSED = {
    "__fmaf_rn(x, y, x)": lambda x, y: (x.double() * y.double() + x.double()).float(),
    "fmaf(x, y, y)": lambda x, y: (x.double() * y.double() + y.double()).float(),
}
QUICK = """
extern "C" __global__ void quick(
    float* out, int* tests, const float* first, const float* second, int n) {
    int i = threadIdx.x;
    float x = first[i], y = second[i], a = fabsf(x), s, c;
    __sincosf(x, &s, &c);
    int whole; float fraction, rest = modf(x, &fraction), mantissa = frexp(x, &whole);
    %s
    double d = x;
    tests[i] = (isnan(x) != 0) | (isinf(x) != 0) << 1 | (isfinite(x) != 0) << 2
        | (signbit(x) != 0) << 3 | (isnan(d) != 0) << 4;
}""" % "\n    ".join(
    f"out[{k} * n + i] = {call};" for k, call in enumerate(APPROXIMATE | NEAREST | FUSED)
)


def test_fast_and_rounded_functions(device):
    draw = random.Random(1)
    special = [0.0, -0.0, 0.5, 1.0, -1.0, 2.5, math.inf, -math.inf, math.nan, 1e-40, -3e38]
    x = torch.tensor([draw.uniform(-3, 3) for _ in range(244)] + special)
    y = torch.tensor([draw.uniform(0.1, 4) for _ in range(244)] + special[::-1])
    zeros = torch.zeros(len(APPROXIMATE | NEAREST | FUSED), len(x))
    out, tests, *_ = run(device, QUICK, 1, len(x), zeros, zeros[0].int(), x, y, len(x))
    results = iter(out)
    for (call, function), got in zip(APPROXIMATE.items(), results):
        expected = function(x, y)[:244]
        error = (got[:244] - expected).abs() / (1 + expected.abs())
        # __tanf is a quotient: poor where the cosine is small
        assert error.max() < (1e-4 if "tanf" in call else 1e-5), f"{call}: {error.max():.2g}"
    within = x.isfinite() & y.isfinite() & (x.abs() < 1e9) & (y.abs() < 1e9) & (x.abs() > 1e-9)
    for (call, function), got in zip((NEAREST | FUSED).items(), results):
        keep = within if call in FUSED else slice(None)
        got, expected = got[keep], function(x, y)[keep]
        # the sign of a zero is min's and max's own affair
        both = (expected == 0) & (got == 0)
        check_bits(torch.where(both, 0.0, got), torch.where(both, 0.0, expected))
    classes = x.isnan() * 17 | x.isinf() * 2 | x.isfinite() * 4 | torch.signbit(x) * 8
    assert torch.equal(tests, classes.int())


# ---- bits and conversions ------------------------------------------------------------------------


def signed(value, bits):
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def permuted(x, y, s):
    return sum(((y << 32 | x) >> 8 * (s >> 4 * k & 7) & 255) << 8 * k for k in range(4))


def dot4(x, y, bits):
    lanes = [(x >> s & 255, y >> s & 255) for s in (0, 8, 16, 24)]
    return sum((signed(a, 8) * signed(b, 8)) if bits else a * b for a, b in lanes)


# Of unsigned 32-bit x, y, s: the expression, and what Python says. Results are compared as 64 bits.
BITS = {
    "__popc(x)": lambda x, y, s: bin(x).count("1"),
    "__clz(x)": lambda x, y, s: 32 - x.bit_length(),
    "__ffs(x)": lambda x, y, s: (x & -x).bit_length(),
    "__brev(x)": lambda x, y, s: int(f"{x:032b}"[::-1], 2),
    "__byte_perm(x, y, s)": permuted,
    "__funnelshift_l(x, y, s)": lambda x, y, s: (y << 32 | x) << (s & 31) >> 32 & FULL,
    "__funnelshift_r(x, y, s)": lambda x, y, s: (y << 32 | x) >> (s & 31) & FULL,
    "__funnelshift_lc(x, y, s & 63)": lambda x, y, s: (y << 32 | x) << min(s & 63, 32) >> 32 & FULL,
    "__funnelshift_rc(x, y, s & 63)": lambda x, y, s: (y << 32 | x) >> min(s & 63, 32) & FULL,
    "__umulhi(x, y)": lambda x, y, s: x * y >> 32,
    "__mulhi(x, y)": lambda x, y, s: signed(x, 32) * signed(y, 32) >> 32,
    "__umul24(x, y)": lambda x, y, s: (x % 2**24) * (y % 2**24) & FULL,
    "__mul24(x, y)": lambda x, y, s: signed(signed(x, 24) * signed(y, 24), 32),
    "__sad(x, y, s)": lambda x, y, s: abs(signed(x, 32) - signed(y, 32)) + s & FULL,
    "__usad(x, y, s)": lambda x, y, s: abs(x - y) + s & FULL,
    "__dp4a(int(x), int(y), int(s))": lambda x, y, s: signed(dot4(x, y, 8) + s, 32),
    "__dp4a(x, y, s)": lambda x, y, s: dot4(x, y, 0) + s & FULL,
    "min(x, y)": lambda x, y, s: min(x, y),
    "max(int(x), int(y))": lambda x, y, s: max(signed(x, 32), signed(y, 32)),
    "max(int(x), y)": lambda x, y, s: max(x, y),
    "min((long long)int(x), (long long)y)": lambda x, y, s: min(signed(x, 32), y),
    "__popcll(wide)": lambda x, y, s: bin(y << 32 | x).count("1"),
    "__clzll(wide)": lambda x, y, s: 64 - (y << 32 | x).bit_length(),
    "__ffsll(wide)": lambda x, y, s: ((y << 32 | x) & -(y << 32 | x)).bit_length(),
    "__brevll(wide)": lambda x, y, s: int(f"{y << 32 | x:064b}"[::-1], 2),
    "__umul64hi(wide, other)": lambda x, y, s: (y << 32 | x) * (x << 32 | s) >> 64,
    "__mul64hi(wide, other)": lambda x, y, s: (
        signed(y << 32 | x, 64) * signed(x << 32 | s, 64) >> 64
    ),
    "__float_as_uint(__uint_as_float(x))": lambda x, y, s: (
        x if x & 0x7FFFFFFF <= 0x7F800000 else x | 0x400000
    ),
    "__double_as_longlong(__hiloint2double(int(y & 0x7fefffff), int(x)))": lambda x, y, s: (
        (y & 0x7FEFFFFF) << 32 | x
    ),
    "__double2hiint(__longlong_as_double(wide & ~(2047ull << 52)))": lambda x, y, s: signed(
        y & ~(2047 << 20), 32
    ),
}
BITS_SOURCE = """
extern "C" __global__ void bits(unsigned long long* out, const unsigned* numbers, int n) {
    int i = threadIdx.x;
    unsigned x = numbers[i], y = numbers[n + i], s = numbers[2 * n + i];
    unsigned long long wide = (unsigned long long)y << 32 | x,
    other = (unsigned long long)x << 32 | s;
    %s
}""" % "\n    ".join(
    f"out[{k} * n + i] = (unsigned long long)({call});" for k, call in enumerate(BITS)
)


def test_bits(device):
    draw = random.Random(2)
    edges = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, FULL, 0x800000, 0xFF]
    triples = [(x, y, s) for x in edges for y in edges for s in edges][::3]
    triples += [tuple(draw.getrandbits(32) for _ in range(3)) for _ in range(500)]
    n = len(triples)
    numbers = torch.from_numpy(np.array(triples, dtype=np.uint32).T.copy().view(np.int32))
    out, *_ = run(
        device, BITS_SOURCE, 1, n, torch.zeros(len(BITS), n, dtype=torch.int64), numbers, n
    )
    for k, (call, model) in enumerate(BITS.items()):
        for got, triple in zip(out[k].tolist(), triples):
            if "as_float(x)" in call:  # a signalling NaN may become a quiet one on the way
                got |= 0x400000 if got & 0x7FFFFFFF > 0x7F800000 else 0
            assert got == signed(model(*triple), 64), (
                f"{call} of {[hex(v) for v in triple]}: {got:#x}"
            )


INTEGERS = {"int": (True, 32), "uint": (False, 32), "ll": (True, 64), "ull": (False, 64)}
TO_INTEGER = {
    f"__{source}2{target}_{mode}": (source, target, mode)
    for source in ("float", "double")
    for target in INTEGERS
    for mode in ROUND
}
FROM_INTEGER = {
    f"__{source}2{target}_{mode}": (source, target, mode)
    for target in ("float", "double")
    for source in INTEGERS
    for mode in ROUND
    if target == "float" or source in ("ll", "ull")
}
CONVERT = """
extern "C" __global__ void convert(long long* whole, double* real, float* narrow, const double* x,
const long long* w, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double as_double = x[i]; float as_float = (float)as_double;
    long long as_ll = w[i]; unsigned long long as_ull = as_ll; unsigned as_uint = (unsigned)as_ll;
    int as_int = (int)as_uint;
    %s
}""" % "\n    ".join(
    [
        f"whole[{k} * n + i] = (long long){name}(as_{source});"
        for k, (name, (source, *_)) in enumerate(TO_INTEGER.items())
    ]
    + [
        f"real[{k} * n + i] = {name}(as_{source});"
        for k, (name, (source, *_)) in enumerate(FROM_INTEGER.items())
    ]
    + [f"narrow[{k} * n + i] = __double2float_{mode}(as_double);" for k, mode in enumerate(ROUND)]
)


def square_root(x):
    """The first bits of an exact root, and one more where there are others."""
    scaled = x.numerator * 4**400
    root = math.isqrt(scaled // x.denominator)
    return Fraction(2 * root + (root**2 * x.denominator != scaled), 2**401)


# p: f or d; f: f or nothing
DIRECTED = {
    "__{p}add_{mode}({x}, {y})": lambda x, y: x + y,
    "__{p}sub_{mode}({x}, {y})": lambda x, y: x - y,
    "__{p}mul_{mode}({x}, {y})": lambda x, y: x * y,
    "__{p}div_{mode}({x}, {y})": lambda x, y: x / y,
    "__{p}rcp_{mode}({x})": lambda x, y: 1 / x,
    "__{p}sqrt_{mode}(fabs({x}))": lambda x, y: square_root(abs(x)),
    "__fma{f}_{mode}({x}, {y}, {x})": lambda x, y: x * y + x,
}
DIRECTED_SOURCE = """
extern "C" __global__ void k(float* f, double* d, const float* fx, const float* fy,
    const double* dx, const double* dy, int n)
{
    int i = threadIdx.x;
    float x = fx[i], y = fy[i];
    double a = dx[i], b = dy[i];
    %s
}"""


def test_directed_rounding_is_exact(device):
    """Against fractions."""
    draw, n = random.Random(5), 128

    def number(most):
        return draw.choice((-1, 1)) * draw.uniform(1, 2) * 2.0 ** draw.randint(-most, most)

    inputs = []
    for most, dtype in ((40, torch.float32), (300, torch.float64)):
        # Ties, results that are exact, tiny and huge ones.
        x = [1.0, 3.0, 1.0, 0.1, 1e-38, 3e38, -3e38, 4.0, *(number(most) for _ in range(n - 8))]
        y = [2.0**-60, 3.0, -1.0, 0.2, 3.0, 3e38, 3e38, 2.0, *(number(most) for _ in range(n - 8))]
        inputs += [torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)]
    fx, fy, dx, dy = inputs
    calls = [(name, mode) for name in DIRECTED for mode in ("rd", "ru", "rz")]
    lines = [
        f"{p}[{k} * n + i] = {name.format(p=p, f=suffix, mode=mode, x=x, y=y)};"
        for k, (name, mode) in enumerate(calls)
        for p, suffix, x, y in (("f", "f", "x", "y"), ("d", "", "a", "b"))
    ]
    source, zeros = DIRECTED_SOURCE % "\n    ".join(lines), torch.zeros(len(calls), n)
    f, d, *_ = run(device, source, 1, n, zeros, zeros.double(), *inputs, n)
    for k, (name, mode) in enumerate(calls):
        for kind, results, xs, ys in (("float", f, fx, fy), ("double", d, dx, dy)):
            for result, x, y in zip(results[k].tolist(), xs.tolist(), ys.tolist()):
                expected = rounded(DIRECTED[name](Fraction(x), Fraction(y)), kind, mode)
                assert result == expected, (name, mode, x, y, result, expected)


LANES = {
    "vadd": ("u", lambda a, b, low, high: a + b),
    "vsub": ("u", lambda a, b, low, high: a - b),
    "vaddss": ("s", lambda a, b, low, high: min(max(a + b, low), high)),
    "vaddus": ("u", lambda a, b, low, high: min(max(a + b, low), high)),
    "vsubss": ("s", lambda a, b, low, high: min(max(a - b, low), high)),
    "vsubus": ("u", lambda a, b, low, high: min(max(a - b, low), high)),
    "vmaxs": ("s", lambda a, b, low, high: max(a, b)),
    "vmaxu": ("u", lambda a, b, low, high: max(a, b)),
    "vmins": ("s", lambda a, b, low, high: min(a, b)),
    "vminu": ("u", lambda a, b, low, high: min(a, b)),
    "vabsdiffs": ("s", lambda a, b, low, high: abs(a - b)),
    "vabsdiffu": ("u", lambda a, b, low, high: abs(a - b)),
    "vhaddu": ("u", lambda a, b, low, high: (a + b) // 2),
    "vavgu": ("u", lambda a, b, low, high: (a + b + 1) // 2),
    # Away from zero.
    "vavgs": ("s", lambda a, b, low, high: (a + b + (a + b >= 0)) // 2),
    "vneg": ("s", lambda a, b, low, high: -a),
    "vnegss": ("s", lambda a, b, low, high: min(-a, high)),
    "vabs": ("s", lambda a, b, low, high: abs(a)),
    "vabsss": ("s", lambda a, b, low, high: min(abs(a), high)),
}
COMPARISONS = {"eq": "u", "ne": "u"} | {
    f"{name}{sign}": sign for name in ("gt", "ge", "lt", "le") for sign in "su"
}


def lane_function(name):
    """(sign, function of two parts and their limits) of a name such as "vcmpges"."""
    if name in LANES:
        return LANES[name]
    true, compare = (-1 if name.startswith("vcmp") else 1), getattr(operator, name[4:6])
    return COMPARISONS[name[4:]], lambda a, b, low, high: true * compare(a, b)


def lanes(word, bits, sign):
    parts = [word >> i & (1 << bits) - 1 for i in range(0, 32, bits)]
    return [signed(part, bits) if sign == "s" else part for part in parts]


def test_functions_of_two_halves_or_four_bytes(device):
    """Each of them against Python's integers, and the averages of whole words."""
    draw = random.Random(6)
    n = 128
    x, y = ([draw.getrandbits(32) for _ in range(n)] for _ in range(2))
    x[:4], y[:4] = [0x80008000, 0x80FF7F01, 0, 0xFFFFFFFF], [0x80008000, 0x7F018080, 0, 0xFFFFFFFF]
    compares = [f"{kind}{name}" for kind in ("vcmp", "vset") for name in COMPARISONS]
    calls = [(name, n) for name in (*LANES, *compares, "vsads", "vsadu") for n in (2, 4)]
    unary = ("vneg", "vnegss", "vabs", "vabsss")
    averages = [
        "__hadd(int(a), int(b))",
        "__rhadd(int(a), int(b))",
        "__uhadd(a, b)",
        "__urhadd(a, b)",
    ]
    lines = [f"__{name}{parts}({'a' if name in unary else 'a, b'})" for name, parts in calls]
    lines += averages
    source = """
extern "C" __global__ void k(unsigned* out, const unsigned* x, const unsigned* y, int n)
{
    unsigned a = x[threadIdx.x], b = y[threadIdx.x];
    %s
}""" % "\n    ".join(f"out[{k} * n + threadIdx.x] = {line};" for k, line in enumerate(lines))
    words = [torch.tensor([signed(v, 32) for v in values]).int() for values in (x, y)]
    out, *_ = run(device, source, 1, n, torch.zeros(len(lines), n).int(), *words, n)
    for (name, parts), row in zip(calls, out.tolist()):
        bits = 32 // parts
        sums = name.startswith("vsad")
        sign, function = (name[-1], None) if sums else lane_function(name)
        low, high = (0, 2**bits - 1) if sign == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        for a, b, got in zip(x, y, row):
            pairs = list(zip(lanes(a, bits, sign), lanes(b, bits, sign)))
            if function is None:
                expected = sum(abs(p - q) for p, q in pairs)
            else:
                values = [function(p, q, low, high) % 2**bits for p, q in pairs]
                expected = sum(value << i * bits for i, value in enumerate(values))
            assert got % 2**32 == expected, (name, parts, hex(a), hex(b), hex(got % 2**32))
    for k, (sign, up) in enumerate([("s", 0), ("s", 1), ("u", 0), ("u", 1)]):
        (first, second) = ([signed(v, 32) if sign == "s" else v for v in w] for w in (x, y))
        expected = [(a + b + up) // 2 % 2**32 for a, b in zip(first, second)]
        assert [got % 2**32 for got in out[len(calls) + k].tolist()] == expected


def test_conversions(device):
    """Each rounding to integers (limits and NaN as in the PTX manual) and to narrower types."""
    draw = random.Random(3)
    edges = [2.0**k + step for k in (31, 32, 53, 63, 64) for step in (-1, -0.5, 0, 2)]
    edges += [0.0, 0.5, 1.5, 2.5, 1e-300, 1 + 2.0**-24, 1 + 2.0**-40, 1e30, math.inf, math.nan]
    edges += [3.4028235e38, 3.4028235e38 * (1 + 2.0**-30)]
    x = [sign * v for v in edges for sign in (1, -1)]
    x += [draw.uniform(-1, 1) * 10.0 ** draw.randint(-3, 22) for _ in range(450)]
    w = [
        sign * 2**k + step
        for k in (24, 31, 32, 53, 62)
        for step in (-1, 0, 1, 3)
        for sign in (1, -1)
    ]
    w += [0, 1, -1, 2**63 - 1, -(2**63)]
    w += [signed(draw.getrandbits(64) >> draw.randint(0, 50), 64) for _ in range(len(x) - len(w))]
    n = len(x)
    whole, real = (
        torch.zeros(len(TO_INTEGER), n, dtype=torch.int64),
        torch.zeros(len(FROM_INTEGER), n, dtype=torch.float64),
    )
    numbers = torch.tensor(x, dtype=torch.float64), torch.tensor(w)
    whole, real, narrow, *_ = run(
        device, CONVERT, -(-n // 256), 256, whole, real, torch.zeros(4, n), *numbers, n
    )
    for k, (name, (source, target, mode)) in enumerate(TO_INTEGER.items()):
        has_sign, bits = INTEGERS[target]
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if has_sign else (0, 2**bits - 1)
        for got, value in zip(whole[k].tolist(), x):
            value = float(np.float32(value)) if source == "float" else value
            if math.isnan(value):
                expected = 0 if source == "float" and bits == 32 else 2 ** (bits - 1)
            else:
                limit = int(math.copysign(2**65, value))
                whole_number = ROUND[mode](value) if math.isfinite(value) else limit
                expected = max(low, min(high, whole_number))
            assert (got - expected) % 2**bits == 0, f"{name}({value!r}): {got}, expected {expected}"
    for k, (name, (source, target, mode)) in enumerate(FROM_INTEGER.items()):
        has_sign, bits = INTEGERS[source]
        for got, value in zip(real[k].tolist(), w):
            exact = signed(value, bits) if has_sign else value % 2**bits
            expected = rounded(Fraction(exact), target, mode)
            assert got == expected, f"{name}({exact}): {got!r}, expected {expected!r}"
    for k, mode in enumerate(ROUND):
        for got, value in zip(narrow[k].tolist(), x):
            finite = math.isfinite(value)
            expected = rounded(Fraction(value), "float", mode) if finite else value
            both_nan = math.isnan(got) and math.isnan(value)
            assert got == expected or both_nan, f"__double2float_{mode}({value!r}): {got!r}"


# ---- warps ---------------------------------------------------------------------------------------

ARGUMENTS = 36  # a shuffle's argument, 0 to 35: the hardware reads five bits of a distance
SHUFFLES = """extern "C" __global__ void shuffles(int* out, long long* typed, double* real) {
    int t = threadIdx.x, n = blockDim.x;
    unsigned mask = t < 64 ? ~0u : 0xffu;
    for (int w = 0; w < (t < 64 ? 6 : 4); w++)                 // the third warp has 8 lanes
        for (int a = 0; a < %(arguments)d; a++) {
            int* to = out + ((w * %(arguments)d + a) * 4) * n + t;
            to[0] = __shfl_sync(mask, t, a, 1 << w);
            to[n] = __shfl_up_sync(mask, t, a, 1 << w);
            to[2 * n] = __shfl_down_sync(mask, t, a, 1 << w);
            to[3 * n] = __shfl_xor_sync(mask, t, a, 1 << w);
        }
    typed[t] = __shfl_xor_sync(mask, 1000000007ll * t - (1ll << 40), 5);
    typed[n + t] = __shfl_xor_sync(mask, 18000000000000000000ull + t, 5);
    typed[2 * n + t] = __shfl_xor_sync(mask, 4000000000u + t, 5);
    typed[3 * n + t] = __shfl_xor_sync(mask, -5 - t, 5);
    typed[4 * n + t] = __shfl_xor_sync(mask, (long)t << 33, 5);
    real[t] = __shfl_xor_sync(mask, t + 1.0 / 3, 5);
    real[n + t] = __shfl_xor_sync(mask, t + 0.1f, 5);
}"""


def lane_read(kind, lane, argument, width):
    """As the PTX manual defines shfl.sync: the own lane where `source` is outside the segment."""
    first, last, distance = lane // width * width, lane // width * width + width - 1, argument % 32
    if kind == "idx":
        return first + argument % width
    if kind == "up":
        return lane - distance if lane - distance >= first else lane
    other = lane + distance if kind == "down" else lane ^ distance
    return other if other <= last else lane


def test_shuffles(device):
    n = 72
    out = torch.full((6, ARGUMENTS, 4, n), -1, dtype=torch.int32)
    typed, real = torch.zeros(5, n, dtype=torch.int64), torch.zeros(2, n, dtype=torch.float64)
    out, typed, real = run(device, SHUFFLES % dict(arguments=ARGUMENTS), 1, n, out, typed, real)
    for t in range(n):
        for w in range(6):
            for a in range(ARGUMENTS):
                # The third warp has 8 lanes.
                is_left = t >= 64 and w > 3
                expected = [
                    -1 if is_left else t // 32 * 32 + lane_read(kind, t % 32, a, 1 << w)
                    for kind in ("idx", "up", "down", "xor")
                ]
                assert out[w, a, :, t].tolist() == expected, f"width {1 << w}, {a}, thread {t}"
    o = torch.arange(n) ^ 5
    words = 1000000007 * o - 2**40, o + (18000000000000000000 - 2**64), 4000000000 + o, -5 - o
    check_bits(typed, torch.stack([*words, o << 33]))
    check_bits(real, torch.stack([o.double() + 1 / 3, (o.float() + torch.tensor(0.1)).double()]))


def matching(lanes, values, key, own):
    """The mask of the lanes whose value has the same key as the lane's own; % is C's."""
    return sum(1 << lane for lane, v in zip(lanes, values) if key(v) == key(own))


def unsigned(values):
    return [v % 2**32 for v in values]


# Expression -> what Python says, of the mask's lanes, their values, and the lane's own value.
VOTES = {
    "__ballot_sync(mask, value & 4)": lambda lanes, v, own: matching(lanes, v, lambda x: x & 4, 4),
    "__any_sync(mask, value > 95)": lambda lanes, v, own: max(v) > 95,
    "__all_sync(mask, value > -60)": lambda lanes, v, own: min(v) > -60,
    "__match_any_sync(mask, value % 3)": lambda lanes, v, own: matching(
        lanes, v, lambda x: math.fmod(x, 3), own
    ),
    "__match_any_sync(mask, value % 2 ? 0.5f : -0.0f)": lambda lanes, v, own: matching(
        lanes, v, lambda x: x % 2, own
    ),
    "__match_any_sync(mask, value % 5 + (1ll << 40))": lambda lanes, v, own: matching(
        lanes, v, lambda x: math.fmod(x, 5), own
    ),
    "__match_any_sync(mask, value % 2 * 0.25)": lambda lanes, v, own: matching(
        lanes, v, lambda x: math.fmod(x, 2), own
    ),
    "__match_all_sync(mask, value / 1000, &all)": lambda lanes, v, own: (
        sum(1 << lane for lane in lanes) * (len({int(x / 1000) for x in v}) == 1)
    ),
    "all": lambda lanes, v, own: len({int(x / 1000) for x in v}) == 1,
    "__match_all_sync(mask, (unsigned long long)value << 32, &all)": lambda lanes, v, own: (
        sum(1 << lane for lane in lanes) * (len(set(v)) == 1)
    ),
    "all + 0": lambda lanes, v, own: len(set(v)) == 1,
    "__reduce_add_sync(mask, value)": lambda lanes, v, own: sum(v),
    "__reduce_min_sync(mask, value)": lambda lanes, v, own: min(v),
    "__reduce_max_sync(mask, value)": lambda lanes, v, own: max(v),
    "__reduce_add_sync(mask, value * 100000007u)": lambda lanes, v, own: sum(v) * 100000007,
    "__reduce_min_sync(mask, (unsigned)value)": lambda lanes, v, own: min(unsigned(v)),
    "__reduce_max_sync(mask, (unsigned)value)": lambda lanes, v, own: max(unsigned(v)),
    "__reduce_and_sync(mask, value | 1u)": lambda lanes, v, own: reduce(int.__and__, v) | 1,
    "__reduce_or_sync(mask, (unsigned)value)": lambda lanes, v, own: reduce(int.__or__, v),
    "__reduce_xor_sync(mask, (unsigned)value)": lambda lanes, v, own: reduce(int.__xor__, v),
    "__shfl_sync(mask, value, __ffs(mask) - 1)": lambda lanes, v, own: v[0],
    "__shfl_sync(mask, value, 31 - __clz(mask))": lambda lanes, v, own: v[-1],
}
VOTES_SOURCE = """
__device__ void together(unsigned mask, int value, int* out, int n) {
    int all;
    %s
}

extern "C" __global__ void votes(int* out, const int* masks, const int* values, const int* groups,
int n) {
    int t = blockIdx.x * blockDim.x + threadIdx.x, group = groups[t];
    unsigned mask = masks[t];
    // they take part in nothing, and nobody waits for them
    if (group == 0) return;
    if (group == 1) {
        together(mask, values[t], out + t, n);
    } else {
        // group 2 goes round twice, group 3 three times
        for (int k = 0; k < group; k++) {
            if (group == 3) __syncwarp(mask);
            together(mask, values[t] + group - k, out + t, n);
        }
    }
}""" % "\n    ".join(f"out[{k} * n] = (int)({call});" for k, call in enumerate(VOTES))


@pytest.mark.parametrize("seed", [0, 1])
def test_votes_matches_and_reductions_with_partial_masks(device, seed):
    """Each warp splits into up to three groups in different branches; a fourth exits at once."""
    draw, n = random.Random(seed), 4 * 80
    groups = [draw.choice([0, 1, 2, 3]) for _ in range(n)]
    values = [draw.choice([7, draw.randint(-60, 100)]) for _ in range(n)]
    if seed:
        groups = [1 + t % 3 // 2 for t in range(n)]
        values = [7 if t % 80 < 32 else 0 for t in range(n)]
    warp = [(t // 80, t % 80 // 32) for t in range(n)]
    members = [
        [u for u in range(n) if warp[u] == warp[t] and groups[u] == groups[t]] for t in range(n)
    ]
    masks = [signed(sum(1 << u % 80 % 32 for u in members[t]), 32) for t in range(n)]
    inputs = [torch.tensor(v, dtype=torch.int32) for v in (masks, values, groups)]
    out, *_ = run(device, VOTES_SOURCE, 4, 80, torch.zeros(len(VOTES), n).int(), *inputs, n)
    final = [value + (group > 1) for value, group in zip(values, groups)]  # of the last round
    for t in range(n):
        lanes, theirs = [u % 80 % 32 for u in members[t]], [final[u] for u in members[t]]
        for (call, model), got in zip(VOTES.items(), out[:, t].tolist()):
            expected = signed(int(model(lanes, theirs, final[t])), 32) if groups[t] else 0
            assert got == expected, f"{call}: {got}, expected {expected}, thread {t}"


# ---- blocks: barriers and shared memory ----------------------------------------------------------

BARRIERS = """
struct Pair { float value; int index; };

extern "C" __global__ void barriers(int* out, unsigned* active, int n) {
    extern __shared__ int dynamic[];
    __shared__ int one, row[64], grid[8][9];
    __shared__ __align__(16) float4 vectors[64];
    __shared__ Pair pairs[64];
    int t = threadIdx.x + threadIdx.y * blockDim.x, b = blockIdx.x;
    if (t >= n) return;                                        // who has left counts as arrived
    if (t == 0) one = b;
    row[t] = t * t;
    dynamic[t] = t + 1;
    grid[t / 8][t % 8] = t;
    vectors[t] = make_float4(t, 2 * t, 3 * t, b);
    pairs[t].value = t * 0.5f; pairs[t].index = b;
    __syncthreads();
    int u = n - 1 - t;
    out += (b * 64 + t) * 12;
    out[0] = one; out[1] = row[u]; out[2] = dynamic[u]; out[3] = grid[u / 8][u % 8];
    out[4] = (int)vectors[u].z; out[5] = (int)vectors[u].w;
    out[6] = (int)(2 * pairs[u].value) + pairs[u].index;
    out[7] = t; out[8] = __syncthreads_count(t % 3 == b);
    out[9] = __syncthreads_and(t < 40) != 0; out[10] = __syncthreads_or(t == b) != 0;
    out[11] = ((size_t)vectors % 16 == 0) + ((size_t)pairs % 4 == 0);
    active[b * 64 + t] = __activemask();
    __syncthreads();
}"""


def test_barriers_and_shared_memory(device):
    for n in (64, 50, 33, 1):
        zeros = torch.zeros(5, 64, 12).int()
        out, active = run(device, BARRIERS, 5, (16, 4), zeros, zeros[..., 0].clone(), n, shared=256)
        for b in range(5):
            for t in range(n):
                u = n - 1 - t
                shared = [b, u * u, u + 1, u, 3 * u, b, u + b]
                votes = [sum(v % 3 == b for v in range(n)), n <= 40, b < n]
                expected = [*shared, t, *votes, 2]
                assert out[b, t].tolist() == expected, f"n = {n}, thread {t} of block {b}"
            if device == "cpu":  # on a GPU: who runs together just now
                assert [a & FULL for a in active[b, :n].tolist()] == [
                    (1 << min(32, n - t // 32 * 32)) - 1 for t in range(n)
                ]


TEMPLATE = """
template <int N> __device__ int* scratch() { __shared__ int buffer[N]; return buffer; }

// each instance of a template has its own shared memory
extern "C" __global__ void instances(int* out) {
    int t = threadIdx.x, u = blockDim.x - 1 - t;
    scratch<64>()[t] = blockIdx.x; scratch<96>()[t] = 5 * t;
    __syncthreads();
    out[blockIdx.x * blockDim.x + t] = 1000 * scratch<64>()[u] + scratch<96>()[u];
}"""


def test_shared_memory_of_a_template(device):
    (out,) = run(device, TEMPLATE, 3, 64, torch.zeros(3, 64).int())
    assert out.tolist() == [[1000 * b + 5 * (63 - t) for t in range(64)] for b in range(3)]


# ---- atomics -------------------------------------------------------------------------------------

ATOMICS = """
// compare and swap until nobody was in between
__device__ void locked_add(unsigned short* word, unsigned short value) {
    // a first guess: a plain read would race with the others' atomics
    unsigned short old = 0, seen;
    do { seen = old; old = atomicCAS(word, seen, (unsigned short)(seen + value));
    } while (old != seen);
}

extern "C" __global__ void atomics(int* i, unsigned* u, long long* l, unsigned long long* w,
float* f, double* d,
                                   unsigned short* s, int* old, int* taken, const int* values) {
    int t = blockIdx.x * blockDim.x + threadIdx.x, v = values[t];
    old[t] = atomicAdd(&i[0], 1);
    atomicAdd_block(&i[1], v); atomicSub(&i[2], v); atomicMin(&i[3], v); atomicMax(&i[4], v);
    atomicAnd(&i[5], ~(1 << (t & 31))); atomicOr(&i[6], 1 << (t % 31)); atomicXor(&i[7], v);
    taken[t] = atomicExch(&i[8], t + 1);
    for (int seen = 0, now; (now = atomicCAS(&i[9], seen, seen + 3)) != seen; seen = now);
    atomicAdd(&u[0], (unsigned)v); atomicSub(&u[1], (unsigned)v); atomicMin(&u[2], (unsigned)v);
    atomicMax(&u[3], (unsigned)v);
    atomicInc(&u[4], 999); atomicDec(&u[5], 999); atomicXor_system(&u[6], (unsigned)v * 77u);
    atomicMin(&l[0], (long long)v << 33); atomicMax(&l[1], (long long)v << 33);
    atomicAnd(&l[2], ~(1ll << (t & 63))); atomicOr(&l[3], 1ll << (t & 63));
    atomicXor(&l[4], (long long)v << 20);
    atomicAdd(&w[0], (unsigned long long)(long long)v << 33);
    atomicMin(&w[1], (unsigned long long)(long long)v);
    atomicMax(&w[2], (unsigned long long)(long long)v); atomicExch(&w[3], 5ull);
    for (unsigned long long seen = 0, now; (now = atomicCAS(&w[4], seen,
    seen + v)) != seen; seen = now);
    atomicAdd(&f[0], (float)(v & 15)); atomicExch(&f[1], 2.5f); atomicAdd(&d[0], v * 0.25);
    locked_add(s + 1, 3);
}"""


def test_atomics_from_many_blocks(device, request):
    """With whole numbers the order does not matter. In fast mode two workers run the threads."""
    n, draw = 64 * 256 if "checked" not in request.node.name else 1024, random.Random(4)
    v = [draw.randint(-500, 500) for _ in range(n)]
    i = torch.tensor([0, 0, 0, 1000, -1000, -1, 0, 0, 0, 0]).int()
    # atomicDec begins out of its range, with 5000.
    u = torch.tensor([0, 0, -1, 0, 0, 5000, 0]).int()
    l, w = torch.tensor([2**62, -(2**62), -1, 0, 0]), torch.tensor([0, -1, 0, 0, 0])
    real = torch.zeros(2), torch.zeros(1).double(), torch.zeros(4).short()
    old = torch.zeros(n).int()
    inputs = i, u, l, w, *real, old, old, torch.tensor(v).int()
    i, u, l, w, f, d, s, old, taken, _ = run(device, ATOMICS, n // 256, 256, *inputs)
    xor, xor_u, xor_l = (reduce(int.__xor__, (x * by for x in v)) for by in (1, 77, 2**20))
    unsigned, wide = [x % 2**32 for x in v], [x % 2**64 for x in v]
    assert sorted(old.tolist()) == list(range(n)), "each old value was seen once"
    exchanged = sorted([*taken.tolist(), i[8].item()])
    assert exchanged == list(range(n + 1)), "nothing exchanged was lost"
    assert i[:8].tolist() == [n, sum(v), -sum(v), min(v), max(v), 0, 2**31 - 1, xor]
    assert i[9] == 3 * n
    sums = sum(v), -sum(v), min(unsigned), max(unsigned), n % 1000, -n % 1000, xor_u
    assert u.tolist() == [signed(x, 32) for x in sums]
    assert l.tolist() == [min(v) << 33, max(v) << 33, 0, -1, xor_l]
    assert w.tolist() == [signed(x, 64) for x in (sum(v) << 33, min(wide), max(wide), 5, sum(v))]
    assert f.tolist() == [sum(x & 15 for x in v), 2.5] and d.item() == sum(v) * 0.25
    assert s.tolist() == [0, signed(3 * n, 16), 0, 0]


CHOSEN = """
__device__ int one_of(bool first, const int* a, const int* b, int i, int n) {
    return (first ? a : b)[i % n];
}
extern "C" __global__ void chosen(int* out, const int* a, const int* b, int n, int s) {
    __shared__ int x[16], y[16];
    int i = threadIdx.x % 16;
    bool first = threadIdx.x < 16;
    // written through the choice, too
    (first ? x : y) [i * s / s] = 100 + threadIdx.x;
    __syncthreads();
    int* mine = out + 4 * threadIdx.x;
    mine[0] = one_of(first, a, b, i, n);
    mine[1] = (first ? a : (i > 3 ? a : b))[(1 << (i % 4)) % n];
    mine[2] = (first ? x : y)[i / s];
    mine[3] = (i % 2 ? (first ? a : b)[i % n] : 7) + (first ? a : b)[(n ? i % n : 0)];
}"""


def test_an_element_of_the_one_or_the_other(device):
    """g++'s sanitizers compute a part of the index in one half only."""
    a, b, out = (
        torch.randint(0, 1000, (n,), generator=torch.Generator().manual_seed(n), dtype=torch.int32)
        for n in (16, 17, 128)
    )
    got = run(device, CHOSEN, 1, 32, out, a, b, 7, 3)[0]
    a, b = a.tolist(), b.tolist()
    for t in range(32):
        i, one = t % 16, a if t < 16 else b
        want = [
            one[i % 7],
            (a if t < 16 or i > 3 else b)[(1 << i % 4) % 7],
            100 + t - i + i // 3,
            (one[i % 7] if i % 2 else 7) + one[i % 7],
        ]
        assert got[4 * t : 4 * t + 4].tolist() == want, t


# ---- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how, text, line, thread",
    [
        (1, "__trap()", 7, 3),
        (2, "assert(x[threadIdx.x] < 8 || how == 0)", 8, 8),
    ],
)
def test_a_trap_and_a_false_assertion_end_the_launch(mode, how, text, line, thread):
    source = """
#ifndef __SIMT_CPU__
#define assert(condition) ((condition) ? (void)0 : __trap())
#endif
extern "C" __global__ void stops(int* x, int how) {
    if (how == 1 && threadIdx.x == 3)
        __trap();
    assert(x[threadIdx.x] < 8 ||
           how == 0);
    x[threadIdx.x] = 5;
}"""
    kernel, x = ga.compile(source), torch.arange(16).int()
    with pytest.raises(ga.errors.KernelError) as caught:
        kernel[1, 16](x.clone(), how)
    (report,) = caught.value.reports
    assert (report.kind, report.line, report.thread) == ("trap", line, (thread, 0, 0))
    assert text in report.message
    kernel[1, 16](x, 0)
    assert (x == 5).all()


def test_a_shuffle_of_odd_width_says_so(on_the_cpu):
    source = """extern "C" __global__ void odd(int* x) {
        x[threadIdx.x] = __shfl_down_sync(~0u, x[threadIdx.x], 1, 24);
    }"""
    with pytest.raises(ga.errors.KernelError) as caught:
        run("cpu", source, 1, 32, torch.zeros(32).int())
    assert "width of a shuffle must be 1, 2, 4, 8, 16 or 32" in caught.value.reports[0].message


# ---- casts ---------------------------------------------------------------------------------------

CAST = """
extern "C" __global__ void cast(
    int* out, unsigned char* bytes, signed char* signs, const float* x, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    out[i] = (int)x[i];
    bytes[i] = (unsigned char)fabsf(x[i]);
    signs[i] = (signed char)x[i];
}"""
WITHIN = [0.0, -0.5, 1.9, -1.9, 255.0, -3e4, 300.5, -300.5, 2147483520.0, -(2.0**31)]


@pytest.mark.parametrize("number", [2.0**31, -2147483904.0, 1e30, math.inf, math.nan])
def test_a_cast_to_an_integer_that_cannot_hold_the_number_is_a_note(number):
    source = CAST.replace("bytes[i] =", "// bytes[i] =").replace("signs[i] =", "// signs[i] =")
    x = torch.tensor([*WITHIN, number])
    out = torch.zeros(len(x)).int()
    message = f"line 6: thread {len(WITHIN)} of block 0 casts {number:g} to 'int'"
    with pytest.warns(UserWarning, match=re.escape(message)):
        run("cpu", source, 1, 32, out, out.byte(), out.char(), x, len(x))


def test_a_cast_within_the_32_bits_of_a_gpu_is_no_note_and_fewer_bits_are_the_lower_ones(recwarn):
    x = torch.tensor(WITHIN[:-1])
    out = torch.zeros(len(x)).int()
    out, small, signs, _ = run("cpu", CAST, 1, 32, out, out.byte(), out.char(), x, len(x))
    assert out.tolist() == [int(number) for number in x.tolist()]
    assert small.tolist() == [int(abs(number)) % 256 for number in x.tolist()]
    assert all((int(a) - b) % 256 == 0 for a, b in zip(x.tolist(), signs.tolist()))
    assert not recwarn.list


# ---- what learners wrote ------------------------------------------------------------------------


def test_variables_keep_their_value_between_launches_and_each_kernel_has_its_own(device):
    """A shuffle from an absent lane, whose value is not used, makes a checked launch run twice."""
    source = """
__device__ int launches;
extern "C" __global__ void diff(float* y, const float* x, int* ticket, int n)
{
    int i = threadIdx.x;
    float next = __shfl_down_sync(0xfffff, x[i], 1);
    if (i < n - 1) y[i] = next - x[i];
    if (i == 0) ticket[0] = atomicAdd(&launches, 1);
}
"""
    x, ticket = torch.arange(20.0, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    tickets = []
    for kernel in (ga.compile(source), ga.compile(source)):
        for _ in range(3):
            y = torch.zeros(20, device=device)
            kernel[1, 20](y, x, ticket, 20)
            assert y[:19].tolist() == [1.0] * 19
            tickets.append(int(ticket))
    assert tickets == [0, 1, 2, 0, 1, 2]


def test_a_half_becomes_an_integer_as_cuda_rounds_it(device):
    """Towards zero, and to the nearest limit of the type; NaN is 0."""
    source = """
#include <cuda_fp16.h>
extern "C" __global__ void f(int* o, const float* x)
{
    half h = __float2half(x[threadIdx.x]);
    int* mine = o + 4 * threadIdx.x;
    mine[0] = (short)h;
    mine[1] = (unsigned char)h;
    mine[2] = (int)h;
    mine[3] = (signed char)h;
}
"""
    x = torch.tensor([40000.0, -5.0, 300.0, -7.9, math.nan], device=device)
    o = torch.zeros(5, 4, dtype=torch.int32, device=device)
    ga.compile(source)[1, 5](o, x)
    assert o.tolist() == [
        [32767, 255, 40000, 127],
        [-5, 0, -5, -5],
        [300, 255, 300, 127],
        [-7, 0, -7, -7],
        [0, 0, 0, 0],
    ]


def test_dim3_and_uint3_become_each_other_and_whole_turns_are_exact(device):
    source = """
extern "C" __global__ void f(float* o)
{
    dim3 t = threadIdx;
    uint3 b = blockDim;
    dim3 g(blockIdx);
    o[0] = t.x + b.y + g.z;
    o[1] = sinpif(1.0f);
    o[2] = cospif(1.5f);
    o[3] = sinpif(-2.5f);
    o[4] = cospif(3.0f);
    o[5] = sinpif(0.25f);
}
"""
    o = torch.zeros(6, device=device)
    ga.compile(source)[1, 1](o)
    assert o.tolist()[:5] == [1.0, 0.0, 0.0, -1.0, -1.0]
    assert o[5].item() == pytest.approx(math.sqrt(0.5), rel=1e-6)


def test_a_kernel_behind_a_comment_that_ends_on_its_line(device):
    x = torch.zeros(1, device=device)
    ga.compile('/* adds\n one */ extern "C" __global__ void f(float* x) { x[0] += 1; }')[1, 1](x)
    assert x.tolist() == [1.0]


def test_a_pointer_that_is_const_itself_may_be_written_through(device, recwarn):
    source = """
extern "C" __global__ void f(float* const x, const float* const y)
{
    x[threadIdx.x] = y[threadIdx.x];
}
"""
    x, y = torch.zeros(4, device=device), torch.ones(4, device=device)
    ga.compile(source)[1, 4](x, y)
    assert x.tolist() == [1.0] * 4 and not [w for w in recwarn if "const" in str(w.message)]
