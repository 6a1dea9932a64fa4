"""Variables in device memory are tensors: set and read from Python, shared by a text's kernels."""

import warnings

import numpy as np
import pytest
import torch

import gpuaccel as ga
from gpuaccel.compiler import Kernel

SOURCE = """
#define RADIUS 2
constexpr int ROWS = 3;
struct Sphere { float radius; int color; };
__constant__ float mask[2 * RADIUS + 1], table[ROWS][4] = {{1, 2, 3, 4}};
__device__ int counter = 7;
static __device__ __align__(16) float4 corners[2];
namespace scene { __constant__ Sphere spheres[ROWS]; __device__ unsigned char flag; }
__constant__ const float FIXED[2] = {1, 2};
__constant__ double unused;
__device__ __host__ float scaled(float x) { return x * FIXED[1]; }

__global__ void convolve(float* y, const float* x) {
    int i = threadIdx.x;
    float sum = 0;
    for (int k = -RADIUS; k <= RADIUS; k++)
        if (i + k >= 0 && i + k < 32) sum += x[i + k] * mask[k + RADIUS];
    y[i] = sum;
    if (i == 0) atomicAdd(&counter, 1);
}
__global__ void look(float* y) {
    y[0] = table[1][2]; y[1] = counter; y[2] = corners[1].w; y[3] = scene::spheres[2].color;
    y[4] = scene::flag; y[5] = scaled(4);
    corners[0].x = 9;
}
int main() { cudaMemcpyToSymbol(mask, 0, sizeof(mask)); }
"""


@pytest.fixture
def module():
    with pytest.warns(ga.errors.CompileWarning, match="left out: main$"):
        return ga.compile(SOURCE)


def test_a_kernel_reads_what_was_set_and_what_others_wrote(device, module):
    variables = module.variables
    x = torch.randn(32, device=device)
    y = torch.zeros(32, device=device)
    mask = torch.tensor([0.5, -1, 2, 0.25, 1])
    variables["mask"].copy_(mask)
    for _ in range(2):
        module["convolve"][1, 32](y, x)
    expected = np.convolve(x.cpu().numpy(), mask.numpy()[::-1], mode="same")
    np.testing.assert_allclose(y.cpu().numpy(), expected, rtol=1e-5, atol=1e-5)
    variables["table"][1, 2] = 5
    variables["corners"][1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    spheres = np.zeros(3, dtype=[("radius", "f4"), ("color", "i4")])
    spheres["color"] = [10, 20, 30]
    variables["spheres"].copy_(torch.from_numpy(spheres.view("u1")))
    variables["flag"].fill_(200)
    module["look"][1, 1](y)
    assert y[:6].tolist() == [5, 9, 4, 30, 200, 8]
    assert variables["counter"].item() == 9 and variables["corners"][0].tolist() == [9, 0, 0, 0]
    assert module["look"].variables is variables


def test_shapes_and_types_are_those_of_the_declarations(device, module):
    found = {name: (tuple(t.shape), t.dtype) for name, t in module.variables.items()}
    assert found == {
        "mask": ((5,), torch.float32),
        "table": ((3, 4), torch.float32),
        "counter": ((), torch.int32),
        "corners": ((2, 4), torch.float32),
        "spheres": ((24,), torch.uint8),
        "flag": ((), torch.uint8),
        "unused": ((), torch.float64),
    }
    assert module.variables["table"].tolist()[0] == [1, 2, 3, 4]
    with pytest.raises(KeyError, match="no variable 'FIXED'; variables: mask, table"):
        module.variables["FIXED"]


def test_a_constant_that_was_never_set_is_reported_once(device):
    with pytest.warns(ga.errors.CompileWarning):
        convolve, look = (ga.compile(SOURCE, name) for name in ("convolve", "look"))
    x, y = torch.ones(32, device=device), torch.zeros(32, device=device)
    with pytest.warns(UserWarning, match="convolve reads __constant__ .* hold zeros: mask; before"):
        convolve[1, 32](y, x)
    look.variables["spheres"].zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convolve[1, 32](y, x)
        look[1, 1](y)


def test_kernels_of_two_texts_do_not_share(device, module, recwarn):
    other = ga.compile(SOURCE)
    module.variables["counter"].fill_(100)
    y = torch.zeros(32, device=device)
    other["look"][1, 1](y)
    assert y[1].item() == 7
    assert other.variables["counter"].item() == 7


def test_values_stay_when_the_checks_go_on_or_off():
    with ga.use_backend("simt"):
        kernel = Kernel.from_source(
            "__device__ int n;\n__global__ void k(int* x, int i) { x[i] = atomicAdd(&n, 1); }", "k"
        )
        x = torch.zeros(1, dtype=torch.int32)
        held = kernel.variables["n"]
        for on in (True, False, True):
            with ga.checked(on):
                kernel[1, 1](x, 0)
        assert x.item() == 2 and held.item() == 3
        # What is refused, or traced, has not happened.
        with ga.checked(), pytest.raises(ga.errors.KernelError):
            kernel[1, 1](x, 5)
        ga.simt.trace(kernel[1, 1], x, 0)
        assert held.item() == 3
