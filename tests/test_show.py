"""Traces give the textbook figures; pictures show who touches what, with and without sliders, and say it in text as well.

The traces are made by hand here: small models of kernels, each a Python function that one thread runs.
"""
import re
import sys
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import numpy as np
import pytest

from gpuaccel.errors import ArgumentError
from gpuaccel.show import show
from gpuaccel.simt.tracing import ATOMIC, EVENT, READ, WRITE, Trace, Traced


def trace_of(body, grid, block, tensors, source="", **more):
    """Runs `body(thread, touch)` for every thread; tensors: name -> (elements, itemsize) or (elements, itemsize, "shared").

    touch(line, kind, name, index, elements=1) is one access; the place in the code is (line, kind, name)."""
    wide = [(*size, 1, 1)[:3] if isinstance(size, tuple) else (size, 1, 1) for size in (grid, block)]
    (gx, gy, gz), (bx, by, bz) = wide
    traced = [Traced(name, size[0], size[1], {2: "bfloat16", 4: "float32", 8: "float64"}[size[1]], (*size, "global")[2])
              for name, size in tensors.items()]
    names, places, rows = list(tensors), {}, []
    for b in range(gx * gy * gz):
        for t in range(bx * by * bz):
            seen, steps = {}, [0]

            def touch(line, kind, name, index, elements=1):
                place, item = places.setdefault((line, kind, name), len(places)), tensors[name][1]
                visit = seen[place] = seen.get(place, -1) + 1
                rows.append((line, b, t, names.index(name), index * item, elements * item, kind, visit, place, steps[0]))
                steps[0] += 1

            body(SimpleNamespace(b=b, t=t, i=b * bx * by * bz + t, bx=b % gx, by=b // gx % gy, tx=t % bx, ty=t // bx % by), touch)
    return Trace(kernel=more.pop("kernel", "k"), grid=wide[0], block=wide[1], tensors=traced,
                 events=np.array(rows, EVENT) if rows else np.zeros(0, EVENT), source=source, filename="<cell>", **more)


def copy(n, block, stride=1, wide=1, item=4):
    def body(th, touch):
        if th.i * wide * stride < n:
            touch(3, READ, "x", th.i * wide * stride, wide)
            touch(3, WRITE, "out", th.i * wide, wide)
    return trace_of(body, -(-n // (block * wide * stride)), block, {"x": (n, item), "out": (n // stride, item)})


def transpose(n, padding=None):
    """Naive, or through a tile of shared memory with rows of 32 + padding elements."""
    def naive(th, touch):
        touch(4, READ, "x", (th.by * 32 + th.ty) * n + th.bx * 32 + th.tx)
        touch(4, WRITE, "out", (th.bx * 32 + th.tx) * n + th.by * 32 + th.ty)

    def tiled(th, touch):
        row = 32 + padding
        touch(5, READ, "x", (th.by * 32 + th.ty) * n + th.bx * 32 + th.tx)
        touch(5, WRITE, "tile", th.ty * row + th.tx)
        touch(7, READ, "tile", th.tx * row + th.ty)
        touch(7, WRITE, "out", (th.bx * 32 + th.ty) * n + th.by * 32 + th.tx)
    tensors = {"x": (n * n, 4), "out": (n * n, 4)}
    if padding is None:
        return trace_of(naive, (n // 32, n // 32), (32, 32), tensors)
    return trace_of(tiled, (n // 32, n // 32), (32, 32), {**tensors, "tile": (32 * (32 + padding), 4, "shared")})


SAXPY = """extern "C" __global__ void saxpy(float* y, float a, const float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""


def saxpy(n=21, block=8, grid=3, bug=0, **more):
    def body(th, touch):
        if th.i < n + bug:
            touch(4, READ, "x", th.i)
            touch(4, READ, "y", th.i)
            touch(4, WRITE, "y", th.i)
    return trace_of(body, grid, block, {"y": (n, 4), "x": (n, 4)}, SAXPY, kernel="saxpy", **more)


def reduction(block=64):
    def body(th, touch):
        touch(5, READ, "x", th.i)
        touch(5, WRITE, "partial", th.t)
        s = block // 2
        while s:
            if th.t < s:
                touch(8, READ, "partial", th.t)
                touch(8, READ, "partial", th.t + s)
                touch(8, WRITE, "partial", th.t)
            s //= 2
        if th.t == 0:
            touch(11, READ, "partial", 0)
            touch(11, WRITE, "out", th.b)
    lines = {3: "__shared__ float partial[64];", 5: "partial[t] = x[i];", 6: "__syncthreads();", 7: "for (int s = 32; s; s /= 2)",
             8: "    if (t < s) partial[t] += partial[t + s];", 11: "if (t == 0) out[blockIdx.x] = partial[0];"}
    source = "\n".join(lines.get(n, "") for n in range(1, 12))
    tensors = {"x": (2 * block, 4), "out": (2, 4), "partial": (block, 4, "shared")}
    return trace_of(body, 2, block, tensors, source, kernel="block_sum")


def use(trace, tensor, kind):
    return next(u for u in trace.summary() if (u.tensor, u.kind) == (tensor, kind))
