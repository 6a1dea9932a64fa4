"""What running kernels on the CPU leaves behind: nothing in memory, nothing on the disk."""

import os
import pathlib
import signal
import sys

import pytest
import torch
from simt_pairs import python

import gpuaccel as ga
from gpuaccel.compiler import Kernel
from gpuaccel.simt import build

BIG = """
__device__ float table[1 << 20];
extern "C" __global__ void fill(float* x) {
    for (int i = threadIdx.x; i < 1 << 20; i += blockDim.x) table[i] = VALUE + i;
    __syncthreads();
    x[threadIdx.x] = table[(1 << 20) - 1 - threadIdx.x];
}"""


def resident() -> int:
    """MB of memory that this process has."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def loaded() -> int:
    """The kernels' libraries that this process has loaded."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in maps if build.PREFIX in line}
    return len([file for file in files if "(deleted)" in file])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_kernels_that_nothing_uses_is_given_back(monkeypatch):
    """Each of 40 kernels has 4 MB of its own: 160 MB if they stayed."""
    monkeypatch.setattr(build, "COLLECT_AFTER", 8)
    with ga.use_backend("simt"), ga.checked(False):
        first, before = resident(), loaded()
        for value in range(40):
            x = torch.zeros(32)
            Kernel.from_source(BIG, "fill", defines={"VALUE": value})[1, 32](x)
            assert x[0] == value + (1 << 20) - 1
            if value == 7:
                first = resident()
    assert resident() - first < 80 and loaded() - before <= 16


KILLED = """
import os, signal, torch, gpuaccel as ga
from gpuaccel.compiler import Kernel
with ga.use_backend("simt"), ga.checked(False):
    x = torch.zeros(32)
    source = 'extern "C" __global__ void one(float* x) { x[threadIdx.x] = 1; }'
    Kernel.from_source(source, "one")[1, 32](x)
print(x.sum().item(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_no_file_is_left_also_when_the_process_is_killed(tmp_path):
    done = python(KILLED, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "32.0\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


# A process in which there is memory for the stacks of one worker, and of no second one.
LITTLE = """
import resource
import torch
import gpuaccel as ga
ones = ga.compile('extern "C" __global__ void ones(int* x) { x[blockIdx.x] = 1; }')
x = torch.zeros(64, dtype=torch.int32)
with ga.use_backend("simt"), ga.checked(False):
    ones[1, 1](x)
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20),) * 2)
    ones[64, 256](x)
print(x.sum().item())
"""


def test_a_launch_has_as_many_workers_as_there_is_memory_for():
    done = python(LITTLE)
    assert done.stdout.split() == ["64"], done.stderr
