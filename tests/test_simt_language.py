"""The language of a kernel means on the CPU (simt.h) what it means on a GPU: types, numbers, bits, warps, atomics.

Each test runs in fast and in checked mode, and on a GPU where there is one: there it is the model, or simt.h's reading of the
programming guide, that is put to the test.
"""
import math
import random
import struct

import numpy as np
import pytest
import torch

import gpuaccel as ga

FULL = 0xffffffff


@pytest.fixture(params=["fast", "checked", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda":
        with ga.use_backend("cuda"):
            yield "cuda"
    else:
        with ga.use_backend("simt"), ga.checked(request.param == "checked"):
            yield "cpu"


@pytest.fixture
def fast():
    with ga.use_backend("simt"), ga.checked(False):
        yield


def run(device, source, grid, block, *args, shared=0):
    """Launch on copies of the tensors; those copies, back on the CPU."""
    there = [a.clone().to(device) if isinstance(a, torch.Tensor) else a for a in args]
    ga.compile(source)[grid, block, shared](*there)
    return [a.cpu() for a in there if isinstance(a, torch.Tensor)]


def same_bits(got, expected):
    """Equal bit for bit; but one NaN is as good as another."""
    if got.is_floating_point():
        nan = expected.isnan()
        assert torch.equal(nan, got.isnan())
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        got, expected = got.view(kind)[~nan], expected.view(kind)[~nan]
    wrong = (got != expected).nonzero().flatten()
    assert not len(wrong), f"{len(wrong)} of {got.numel()} differ, first at {wrong[0]}: {got[wrong[0]]}, expected {expected[wrong[0]]}"


# ---- the same types, the same overloads ------------------------------------------------------------------------------

# What a call returns. NVRTC and the host compiler have to agree on each line, and neither may take what stands in REFUSED.
TYPES = {
    "float": """pow(f, 2); pow(i, f); max(f, 1.0f); min(f, f); abs(f); fabs(f); exp10(f); rsqrt(f); rcbrt(f); sinpi(f); cospi(f); normcdf(f);
        ldexp(f, i); scalbn(f, i); frexp(f, &i); modf(f, &f); round(f); fmax(f, i); fma(f, f, f); hypot(f, f); __uint2float_rz(u); __ll2float_ru(ll);
        __ull2float_rd(ull); __int2float_rn(i); __double2float_rz(d); __fadd_rn(f, f); __fsub_rn(f, f); __fmul_rn(f, f); __fdiv_rn(f, f);
        __frcp_rn(f); __fsqrt_rn(f); __frsqrt_rn(f); __fmaf_rn(f, f, f); __saturatef(f); __fdividef(f, f); fdividef(f, f); __tanf(f); __exp10f(f);
        __log2f(f); __log10f(f); __powf(f, f); __tanhf(f); __ldg(&f); __ldca(&f); __ldcg(&f); __ldcs(&f); __ldlu(&f); __ldcv(&f);
        __uint_as_float(u); __int_as_float(i); __shfl_sync(u, f, i); __shfl_xor_sync(u, f, i, 8); atomicAdd(&f, f); atomicAdd_system(&f, f);
        atomicExch(&f, f); atomicExch_block(&f, f); make_float2(f, f).x; make_float4(f, f, f, f).w; __ldg((const float4*)0).z; float3{1, 2, 3}.y""",
    "double": """max(f, d); min(d, f); max(d, d); abs(d); fabs(d); pow(d, i); pow(d, d); copysign(f, d); exp10(d); rsqrt(d); __int2double_rn(i);
        __uint2double_rn(u); __ll2double_ru(ll); __ull2double_rz(ull); __dadd_rn(d, d); __dsub_rn(d, d); __dmul_rn(d, d); __ddiv_rn(d, d);
        __drcp_rn(d); __dsqrt_rn(d); __fma_rn(d, d, d); __longlong_as_double(ll); __hiloint2double(i, i); __shfl_down_sync(u, d, 1);
        atomicAdd(&d, d); atomicAdd_block(&d, d); make_double2(d, d).y; make_double4(d, d, d, d).z; floor(d); remainder(d, d)""",
    "int": """max(s, s); max(c, i); min(i, 3); abs(s); abs(i); ilogb(f); isnan(f) * 0; isinf(d) * 0; isfinite(f) * 0; signbit(d) * 0; __popc(u);
        __popcll(ull); __clz(i); __clzll(ll); __ffs(i); __ffsll(ll); __mulhi(i, i); __mul24(i, i); __dp4a(i, i, i); __float2int_rn(f);
        __float2int_ru(f); __double2int_rd(d); __double2hiint(d); __double2loint(d); __float_as_int(f); __syncthreads_count(i);
        __syncthreads_and(i); __syncthreads_or(i); __any_sync(u, i); __all_sync(u, i); __shfl_sync(u, s, 0); __shfl_up_sync(u, i, 1);
        __reduce_add_sync(u, i); __reduce_min_sync(u, i); __reduce_max_sync(u, i); atomicAdd(&i, i); atomicSub(&i, i); atomicMin(&i, i);
        atomicMax_block(&i, i); atomicCAS(&i, i, i); atomicAnd(&i, i); atomicOr_system(&i, i); atomicXor(&i, i); atomicExch(&i, i); warpSize + 0;
        make_int2(i, i).x; make_int3(i, i, i).y; __ldg((const int4*)0).x""",
    "unsigned": """max(i, u); min(u, i); max(u, u); __brev(u); __byte_perm(u, u, u); __umulhi(u, u); __umul24(u, u); __dp4a(u, u, u);
        __sad(i, i, u); __usad(u, u, u); __funnelshift_l(u, u, u); __funnelshift_r(u, u, u); __funnelshift_lc(u, u, u); __funnelshift_rc(u, u, u);
        __float2uint_rz(f); __double2uint_rn(d); __float_as_uint(f); __ballot_sync(u, i); __match_any_sync(u, f); __match_any_sync(u, ull);
        __match_all_sync(u, d, &i); __activemask(); __reduce_add_sync(u, u); __reduce_max_sync(u, u); __reduce_and_sync(u, u);
        __reduce_or_sync(u, u); __reduce_xor_sync(u, i); atomicAdd(&u, u); atomicSub_block(&u, u); atomicInc(&u, u); atomicDec(&u, u);
        atomicInc_system(&u, u); atomicDec_block(&u, u); atomicCAS_system(&u, u, u); atomicMin(&u, u); atomicExch(&u, u); threadIdx.x;
        blockDim.y; dim3(2).z; make_uint3(u, u, u).x; make_uint4(u, u, u, u).w""",
    "long long": """max(ll, ll); abs(ll); llabs(ll); llrint(f); llround(d); __mul64hi(ll, ll); __float2ll_rn(f); __double2ll_rz(d);
        __double_as_longlong(d); __shfl_sync(u, ll, 1, 16); atomicMin(&ll, ll); atomicMax_system(&ll, ll); atomicAnd(&ll, ll); atomicOr(&ll, ll);
        atomicXor_block(&ll, ll); clock64(); make_longlong2(ll, ll).x""",
    "unsigned long long": """max(ll, ull); min(ull, ull); __umul64hi(ull, ull); __brevll(ull); __float2ull_ru(f); __double2ull_rd(d);
        __shfl_xor_sync(u, ull, 1); atomicAdd(&ull, ull); atomicAdd_block(&ull, ull); atomicMin(&ull, ull); atomicAnd(&ull, ull);
        atomicExch(&ull, ull); atomicCAS(&ull, ull, ull); atomicCAS_block(&ull, ull, ull); make_ulonglong2(ull, ull).y""",
    "long": "max(l, l); abs(l); labs(l); lround(f); lrint(d); __shfl_sync(u, l, 1); clock(); make_long2(l, l).x",
    "unsigned short": "atomicCAS(&us, us, us); make_ushort4(us, us, us, us).y",
    "unsigned char": "make_uchar4(c, c, c, c).x",
    "signed char": "make_char3(1, 2, 3).z",
}
REFUSED = ["pow(f, d)", "pow(i, i)", "sqrt(i)", "exp(ll)", "fabs(i)", "atan2(f, d)", "fma(f, f, d)", "max(i, f)", "max(i, ll)", "max(u, ull)", "abs(u)",
           "isnan(i)", "__reduce_add_sync(u, ll)", "__reduce_add_sync(u, f)", "atomicAdd(&ll, ll)", "atomicMax(&f, f)", "atomicSub(&f, f)",
           "atomicSub(&ull, ull)", "atomicExch(&d, d)", "atomicCAS(&f, f, f)", "atomicInc(&i, i)",
           "__shfl_sync(u, &f, 0)"]
LAYOUT = {"char2": (2, 2), "char3": (3, 1), "char4": (4, 4), "uchar4": (4, 4), "short2": (4, 4), "short3": (6, 2), "ushort4": (8, 8), "int1": (4, 4),
          "int2": (8, 8), "int3": (12, 4), "int4": (16, 16), "uint2": (8, 8), "uint3": (12, 4), "uint4": (16, 16), "long2": (16, 16),
          "longlong2": (16, 16), "longlong3": (24, 8), "ulonglong2": (16, 16), "ulong4": (32, 16), "float1": (4, 4), "float2": (8, 8),
          "float3": (12, 4), "float4": (16, 16), "double2": (16, 16), "double3": (24, 8), "double4": (32, 16), "dim3": (12, 4),
          "bf16": (2, 2), "fp16": (2, 2)}
VARIABLES = ("int i", "unsigned u", "long l", "long long ll", "unsigned long long ull", "float f", "double d", "short s", "unsigned short us",
             "unsigned char c")
LANGUAGE = """
template <class A, class B> struct is_same { static const bool value = false; };
template <class A> struct is_same<A, A> { static const bool value = true; };
template <class T> __device__ void keep(T value, void* out) { *(volatile T*)out = value; }
#define TYPE(T, ...) { auto r = __VA_ARGS__; static_assert(is_same<decltype(r), T>::value, "type of " #__VA_ARGS__); keep(r, out); }

// A kernel's own overloads stand beside those of the language.
__device__ float4 max(float4 a, float4 b) { return make_float4(max(a.x, b.x), max(a.y, b.y), max(a.z, b.z), max(a.w, b.w)); }
__device__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__constant__ float table[2] = {1, 2};
__device__ int counter;
struct __align__(8) Pair { float value; int index; };

extern "C" __global__ void __launch_bounds__(128) language(void* __restrict__ out, const Pair by_value, %(parameters)s) {
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
    __syncthreads(); __syncwarp(); __syncwarp(u); __threadfence(); __threadfence_block(); __threadfence_system(); __nanosleep(10);
    __stcg(&f, 1.0f); __stcs(&f, f); __stwb(&f, two[0]); __stwt((float4*)out, make_float4(1, 2, 3, 4)); __builtin_assume(i > 0);
    if (i == 77) __trap();
    #pragma unroll 4
    for (int k = 0; k < 4; k++) printf("%%d %%f\\n", k, one + unnamed.b + pairs[0].value);
    %(types)s
    %(layout)s
}
"""


def language():
    types = "\n    ".join(f"TYPE({kind}, {call.strip()})" for kind, calls in TYPES.items() for call in calls.split(";"))
    layout = "\n    ".join(f'static_assert(sizeof({name}) == {size} && alignof({name}) == {align}, "layout of {name}");'
                           for name, (size, align) in LAYOUT.items())
    return LANGUAGE % dict(parameters=", ".join(VARIABLES), types=types, layout=layout)


def refusals():
    """Per call of REFUSED: a template that asks whether it means anything, and the demand that it does not."""
    kinds = ", ".join(f"class {v.split()[-1].upper()}" for v in VARIABLES)
    given, values = ", ".join(f"{v.split()[-1].upper()} {v.split()[-1]}" for v in VARIABLES), ", ".join(f"({v.rsplit(' ', 1)[0]})1" for v in VARIABLES)
    return "".join(f"""
template <{kinds}> constexpr __device__ auto taken_{k}(int, {given}) -> decltype((void)({call}), true) {{ return true; }}
template <{kinds}> constexpr __device__ bool taken_{k}(long, {given}) {{ return false; }}
static_assert(!taken_{k}(0, {values}), "{call}");""" for k, call in enumerate(REFUSED))


def test_nvrtc_and_the_host_compiler_agree_on_every_type():
    kernel = ga.compile(language() + refusals())               # compiles for a GPU
    kernel.load("fast")
    kernel.load("checked")
