"""The types of cuda_fp16.h and cuda_bf16.h on the CPU round as torch and as exact arithmetic do."""

import math
import random
from fractions import Fraction

import pytest
import torch
from simt_pairs import FORMATS, ROUND, check_bits, rounded

import gpuaccel as ga

TYPES = {
    # C name: (torch's dtype, letters in function names, of pairs, its name in FORMATS)
    "__half": (torch.float16, "half", "half2", "half"),
    "__nv_bfloat16": (torch.bfloat16, "bfloat16", "bfloat162", "bf16"),
}


@pytest.fixture(params=list(TYPES))
def name(request):
    return request.param


def run(source, *args, count, name):
    _, half, half2, _ = TYPES[name]
    source = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n" + source
    for word, text in (("T2", name + "2"), ("T", name), ("H2", half2), ("H", half)):
        source = source.replace(f"${word}", text)
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    ga.compile(source)[-(-count // 256), 256](*copies, count)
    return copies


def patterns(dtype, count, seed=0):
    """Numbers of random bits: infinities, NaN and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (count,), generator=generator)
    return bits.to(torch.int16).view(dtype)


def one_if_nan(choose, a, b):
    """The result of two numbers, but the other one where one is NaN (signalling NaN, too)."""
    return torch.where(a.isnan(), b, torch.where(b.isnan(), a, choose(a, b)))


UNARY = {
    "h + $T(0.0f)": lambda x: x + 0.0,
    "-h": lambda x: -x,
    "__habs(h)": lambda x: x.abs(),
    "hsqrt(h)": lambda x: x.sqrt(),
    "hrcp(h)": lambda x: 1 / x,
    "hfloor(h)": lambda x: x.floor(),
    "hceil(h)": lambda x: x.ceil(),
    "htrunc(h)": lambda x: x.trunc(),
    "hrint(h)": lambda x: x.round(),
    "__float2$H(__$H2float(h) * 3.0f)": lambda x: x * 3.0,
    "$T((float)h / 7.0f)": lambda x: x / 7.0,
    "__ushort_as_$H(__$H_as_ushort(h))": lambda x: x,
}
BINARY = {
    "a + b": lambda a, b: a + b,
    "a - b": lambda a, b: a - b,
    "a * b": lambda a, b: a * b,
    "a / b": lambda a, b: a / b,
    "__hadd(a, b)": lambda a, b: a + b,
    "__hmul(a, b)": lambda a, b: a * b,
    "__hmax(a, b)": lambda a, b: one_if_nan(torch.maximum, a, b),
    "__hmin(a, b)": lambda a, b: one_if_nan(torch.minimum, a, b),
    "__hmax_nan(a, b)": lambda a, b: torch.maximum(a, b),
    "$T(a < b)": lambda a, b: (a < b).to(a.dtype),
    "$T(a >= b)": lambda a, b: (a >= b).to(a.dtype),
    "$T(a == b)": lambda a, b: (a == b).to(a.dtype),
    "$T(a != b)": lambda a, b: (a != b).to(a.dtype),
    "$T(__hgt(a, b))": lambda a, b: (a > b).to(a.dtype),
    "$T(__hne(a, b))": lambda a, b: ((a != b) & ~a.isnan() & ~b.isnan()).to(a.dtype),
    "$T(__hleu(a, b))": lambda a, b: ((a <= b) | a.isnan() | b.isnan()).to(a.dtype),
    "__low2$H(p + q)": lambda a, b: a + b,
    "__high2$H(__hmul2(p, q))": lambda a, b: b * a,
    "__low2$H(__hsub2(p, q))": lambda a, b: a - b,
    "(p / q).y": lambda a, b: b / a,
    "__hmax2(p, q).y": lambda a, b: one_if_nan(torch.maximum, a, b),
    "__heq2(p, q).x": lambda a, b: (a == b).to(a.dtype),
    "$T(__hblt2(p, __halves2$H2(b, b)))": lambda a, b: torch.zeros_like(a),
    "__lowhigh2highlow(p).x": lambda a, b: b,
    "__floats2$H2_rn(a, b).y": lambda a, b: b,
    "__float22$H2_rn(__$H22float2(p)).x": lambda a, b: a,
    "__float2$H2_rn(a).y": lambda a, b: a,
    "$T(__low2float(p))": lambda a, b: a,
}


def test_functions_of_one_number(mode, name):
    dtype = TYPES[name][0]
    count = 65536 if mode == "fast" else 2048
    x = torch.arange(65536).to(torch.uint16).view(torch.int16).view(dtype)[:: 65536 // count]
    body = "\n".join(f"out[{k} * n + i] = {call};" for k, call in enumerate(UNARY))
    source = f"""extern "C" __global__ void unary($T* out, const $T* x, int n) {{
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        $T h = x[i];
        {body}
    }}"""
    out = run(source, torch.zeros(len(UNARY), count, dtype=dtype), x, count=count, name=name)[0]
    for k, (call, model) in enumerate(UNARY.items()):
        check_bits(out[k], model(x), call)


def test_functions_of_two_numbers(mode, name):
    dtype = TYPES[name][0]
    count = 40000 if mode == "fast" else 2048
    a, b = patterns(dtype, count, 1), patterns(dtype, count, 2)
    # Some that are equal.
    b[::50] = a[::50]
    body = "\n".join(f"out[{k} * n + i] = {call};" for k, call in enumerate(BINARY))
    source = f"""extern "C" __global__ void binary($T* out, const $T* x, const $T* y, int n) {{
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        $T a = x[i], b = y[i];
        $T2 p = __halves2$H2(a, b), q = make_$H2(b, a);
        {body}
    }}"""
    out = run(source, torch.zeros(len(BINARY), count, dtype=dtype), a, b, count=count, name=name)[0]
    for k, (call, model) in enumerate(BINARY.items()):
        expected = model(a, b)
        if call.startswith("__hm"):
            # Of -0.0 and 0.0 either is right.
            out[k][(a == 0) & (b == 0)] = expected[(a == 0) & (b == 0)]
        check_bits(out[k], expected, call)


def test_fused_multiply_add_rounds_once(mode, name):
    dtype, *_, kind = TYPES[name]
    digits, lowest = FORMATS[kind]
    count = 4000 if mode == "fast" else 512
    a, b, c = (patterns(dtype, count, seed) for seed in (3, 4, 5))
    # Sums that are just above or below the middle of two numbers: c is half a step of a * b.
    a[: count // 2] = (1 + torch.arange(count // 2) % 2**digits / 2**digits).to(dtype)
    b[: count // 2] = (1 + torch.arange(count // 2) * 7 % 2**digits / 2**digits).to(dtype)
    c[: count // 4] = (torch.arange(count // 4) % 5 * 2.0 ** (lowest + 3)).to(dtype)
    source = """extern "C" __global__ void fused($T* out, $T* pairs, const $T* x, const $T* y,
                                                  const $T* z, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        out[i] = __hfma(x[i], y[i], z[i]);
        pairs[i] = __high2$H(__hfma2(__$H2$H2(x[i]), __$H2$H2(y[i]), __$H2$H2(z[i])));
    }"""
    zero = torch.zeros(count, dtype=dtype)
    out, pairs, *_ = run(source, zero, zero, a, b, c, count=count, name=name)
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist())):
        if all(map(math.isfinite, (x, y, z))):
            expected = rounded(Fraction(x) * Fraction(y) + Fraction(z), kind)
        else:
            expected = x * y + z
        for got in (out[i].item(), pairs[i].item()):
            assert got == expected or math.isnan(got) and math.isnan(expected), (x, y, z)


def test_conversions(mode, name):
    dtype, *_, kind = TYPES[name]
    draw = random.Random(6)
    exact = [0.0, 1.0, 65504.0, 65519.0, 65520.0, 1e38, 3.4e38, 2.0**-25, 2.0**-24, 1e-45, -1.5]
    exact += [draw.uniform(-2, 2) * 2.0 ** draw.randint(-30, 20) for _ in range(500)]
    x = torch.tensor(exact)
    count = len(x)
    floats = "\n".join(
        f"out[{k} * n + i] = __float2$H_{direction}(x[i]);" for k, direction in enumerate(ROUND)
    )
    integers = "\n".join(
        f"whole[{k} * n + i] = __$H2int_{direction}(h); whole[{4 + k} * n + i] = "
        f"(long long)__$H2ll_{direction}(h);"
        for k, direction in enumerate(ROUND)
    )
    source = f"""extern "C" __global__ void convert($T* out, long long* whole, $T* back,
                                                     const float* x, int n) {{
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        $T h = x[i];
        {floats}
        {integers}
        back[i] = __int2$H_rn(3 * i) + $T(i);
    }}"""
    zeros, words = torch.zeros(4, count, dtype=dtype), torch.zeros(8, count, dtype=torch.int64)
    out, whole, back, *_ = run(source, zeros, words, zeros[0], x, count=count, name=name)
    for i, value in enumerate(x.tolist()):
        for k, direction in enumerate(ROUND):
            expected = rounded(Fraction(value), kind, direction)
            assert out[k, i].item() == expected, (value, direction)
            half = x[i].to(dtype).item()
            if math.isfinite(half):
                integer = ROUND[direction](half)
                assert whole[k, i].item() == max(-(2**31), min(2**31 - 1, integer)), (half, k)
                if abs(integer) < 2**63:
                    assert whole[4 + k, i].item() == integer, (half, k)
    steps = torch.arange(count)
    check_bits(back, (3 * steps).to(dtype) + steps.to(dtype), "from integers")


def test_pairs_shuffles_and_atomics_as_in_a_reduction(mode, name):
    dtype = TYPES[name][0]
    source = """
    __device__ $T sum_of_warp($T value) {
        for (int step = 16; step; step /= 2) value += __shfl_down_sync(~0u, value, step);
        return value;
    }
    extern "C" __global__ void reduce($T* sum, $T2* pair, const $T2* x, $T scale, int n) {
        __shared__ $T2 tile[256];
        tile[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        $T2 mine = tile[255 - threadIdx.x];
        mine = __hfma2(mine, __$H2$H2(scale), $T2(0.0f, 0.0f));
        $T value = sum_of_warp(mine.x);
        if (threadIdx.x % 32 == 0) atomicAdd(sum, value);
        atomicAdd(pair, mine);
        $T2 other = __shfl_xor_sync(~0u, mine, 1);
        if (threadIdx.x == 0) pair[1] = other;
    }"""
    # Small whole numbers, whose sums are exact in both types.
    x = (torch.arange(512) % 3 == 0).to(dtype)
    # A half is a number in Python, a bf16 its two bytes.
    scale = 1.0 if name == "__half" else b"\x80\x3f"
    zeros = torch.zeros(4, dtype=dtype)
    total, pair, *_ = run(source, zeros[:1], zeros, x, scale, count=256, name=name)
    exact = x.view(-1, 2).float().sum(0).tolist()
    assert total.item() == exact[0]
    assert pair.tolist() == [*exact, *x[2 * 254 :][:2].tolist()]
