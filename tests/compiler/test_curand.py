"""NVIDIA's curand_kernel.h compiles for a GPU and draws the same numbers on the CPU."""

import math

import pytest
import torch

import gpuaccel as ga
from gpuaccel.compiler import Kernel, nvrtc
from gpuaccel.headers import curand_folder
from gpuaccel.simt import build

needs_curand = pytest.mark.skipif(
    curand_folder() is None, reason="needs curand_kernel.h: pip install nvidia-curand-cu12"
)
SEED = 0x123456789ABC
SOURCE = """
#include <curand_kernel.h>
__global__ void first(STATE* states, unsigned long long seed) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    curand_init(seed, i, 0, &states[i]);
}
__global__ void draw(STATE* states, unsigned* bits, float* uniform, float* normal, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    STATE state = states[i];
    for (int k = 0; k < n; k++) bits[i * n + k] = curand(&state);
    for (int k = 0; k < n; k++) uniform[i * n + k] = curand_uniform(&state);
    for (int k = 0; k < n; k++) normal[i * n + k] = curand_normal(&state);
}
"""
# The same numbers by common.cuh's generator.
PHILOX = """
__global__ void philox(unsigned* bits, unsigned long long seed, int n) {
    int i = threadIdx.x;
    for (int k = 0; k < n; k += 4) {
        uint4 four = random_bits(seed, make_uint4(k / 4, 0, i, 0));
        bits[i * n + k] = four.x; bits[i * n + k + 1] = four.y;
        bits[i * n + k + 2] = four.z; bits[i * n + k + 3] = four.w;
    }
}
"""


def xorwow(seed, count):
    """Marsaglia's generator, as curand_init(seed, 0, 0) starts it."""
    word = 2**32 - 1
    low = 1099087573 * ((seed & word) ^ 0xAAD26B49) & word
    high = 2591861531 * ((seed >> 32) ^ 0xF7DCEFDD) & word
    d = 6615241 + high + low & word
    v = [123456789 + low, 362436069 ^ low, 521288629 + high, 88675123 ^ high, 5783321 + low]
    numbers = []
    for _ in range(count):
        t = v[0] & word
        t ^= t >> 2
        last = v[4] & word
        v = [*v[1:], (last ^ (last << 4) ^ t ^ (t << 1)) & word]
        d = d + 362437 & word
        numbers.append(v[4] + d & word)
    return numbers


@needs_curand
@pytest.mark.parametrize("state", ["curandState", "curandStatePhilox4_32_10_t"])
def test_the_numbers_are_those_of_the_generator(state):
    n = 8
    module = ga.compile(SOURCE, STATE=state)
    bits = torch.zeros(32, n, dtype=torch.int32)
    uniform, normal = torch.zeros(1024, n), torch.zeros(1024, n)
    states = torch.zeros(1024 * 64, dtype=torch.uint8)
    many = torch.zeros(1024, n, dtype=torch.int32)
    with ga.use_backend("simt"), ga.checked(False):
        module["first"][32, 32](states, SEED)
        module["draw"][32, 32](states, many, uniform, normal, n)
        if "Philox" in state:
            ga.compile(PHILOX)[1, 32](bits, SEED, n)
            assert torch.equal(many[:32], bits)
        else:
            assert [number % 2**32 for number in many[0].tolist()] == xorwow(SEED, n)
    assert many.unique().numel() > 8 * 1024 - 8
    assert 0 < uniform.min() and uniform.max() <= 1
    # Three standard deviations of 8,192 numbers.
    assert abs(uniform.mean() - 0.5) < 3 * math.sqrt(1 / 12 / 8192)
    assert abs(normal.mean()) < 3 / math.sqrt(8192) and abs(normal.std() - 1) < 0.03


def test_a_header_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(nvrtc, "curand_folder", lambda: None)
    monkeypatch.setattr(nvrtc, "include_folders", lambda: ())
    monkeypatch.setattr(build, "curand_folder", lambda: None)
    with pytest.raises(ga.errors.CompileError, match="curand_kernel.h is in the wheel nvidia-cu"):
        Kernel.from_source(SOURCE, "first", defines={"STATE": "curandState"}).resources()
    with (
        ga.use_backend("simt"),
        pytest.raises(ga.errors.CompileError, match="line 2: curand_kernel.h is in NVIDIA's wheel"),
    ):
        ga.compile(SOURCE, "first", STATE="curandState")
