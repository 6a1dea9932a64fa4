"""The limit of a step of family "llama" on one GPU: what its kernels take one after another.

It is a sum of four parts, each measured, or counted and divided by a rate measured, in the run that
the step is measured in:

products    every matrix product of forward and backward, alone, in bf16, at its best rate. Products
            of one input are one joint product or several, whichever is faster. A weight's gradient
            is added into an fp32 sum by the product that computes it. Weights and sums are those of
            another layer each time, as in a model, so they come from memory and not from the cache.
attention   torch's flash or cuDNN kernels alone, forward and backward, whichever are faster.
bytes       what other kernels must read and write, in bf16, at the rate of a plain copy. Whatever
            stands between two products or attention is one kernel: it reads its inputs once and
            writes its outputs once.
tail        the bytes of norm, AdamW and bf16 weights, at the same rate.

A step reaches it where nothing else takes time: no gaps, no second read, no slower kernel. Two
things could make a step faster than it, and are not counted: a product that hides the bytes of a
neighbour, and what stays in the L2 cache, in short sequences, between two other kernels.
"""

import dataclasses
import functools
import itertools
import math

import torch
import torch.nn.functional as F
from common import DEVICE
from timing import copy_rate, random, release, timed
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpuaccel.training.models import Config

BF16 = torch.bfloat16
# Bytes of an element of bf16 and of fp32.
HALF, FULL = 2, 4
# Milliseconds to measure all products, and attention.
BUDGET = 1000.0
# fp32 elements of the copy that gives the rate.
COPIED = 2**28


@dataclasses.dataclass(frozen=True)
class Products:
    """Linear layers of one input: `count` times in a model.

    outs: outputs of each layer"""

    name: str
    count: int
    ins: int
    outs: tuple[int, ...]

    def flops(self, tokens: int) -> int:
        """Of three products, one of forward and two of backward: two per weight and product."""
        return 2 * 3 * self.count * tokens * self.ins * sum(self.outs)


def products_of(c: Config) -> list[Products]:
    """The linear layers of a model of family "llama"."""
    q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return [
        Products("w_q, w_k, w_v", c.layers, c.hidden, (q_dim, kv_dim, kv_dim)),
        Products("w_o", c.layers, q_dim, (c.hidden,)),
        Products("gate, up", c.layers, c.hidden, (c.intermediate,) * 2),
        Products("down", c.layers, c.intermediate, (c.hidden,)),
        Products("lm_head", 1, c.hidden, (c.vocab,)),
    ]


def bytes_of_micro_batch(c: Config, tokens: int) -> dict[str, int]:
    """What kernels between the products must read and write in forward and backward.

    tokens: of the micro-batch; they are drawn uniformly"""
    stream = tokens * c.hidden * HALF
    rotated = tokens * (c.heads + c.kv_heads) * c.head_dim * HALF
    wide = tokens * c.intermediate * HALF
    # Rows of the embedding that a batch has on average.
    distinct = round(c.vocab * (1 - (1 - 1 / c.vocab) ** tokens))
    norms = 2 * c.layers
    return {
        # Rows are read; the stream and its norm, the first product's input, are written.
        "embedding, forward": 3 * stream,
        # The stream's gradient is read; fp32 rows of the sum are read and written.
        "embedding, backward": stream + 2 * distinct * c.hidden * FULL,
        # The stream and what is added to it are read; the new stream and its norm are written.
        # One for each norm but the first, the final norm among them.
        "residual and norm, forward": norms * 4 * stream,
        # The norm's gradient, the stream and the stream's gradient are read, a new gradient is
        # written; no gradient comes to the final norm beside its own.
        "residual and norm, backward": (norms * 4 + 3) * stream,
        # Queries and keys are read and written, and so are their gradients.
        "rotation": c.layers * 2 * 2 * rotated,
        # gate and up are read, their product is written.
        "swiglu, forward": c.layers * 3 * wide,
        # gate, up and the product's gradient are read, two gradients written.
        "swiglu, backward": c.layers * 5 * wide,
        # Logits are read and their gradients written: a row fits on a multiprocessor.
        "cross-entropy": 2 * tokens * c.vocab * HALF,
    }


def tail_bytes_per_parameter() -> dict[str, int]:
    """What must be read and written for each trained parameter after the last backward."""
    return {
        # The norm needs every sum before the first weight can change.
        "norm reads the sum": FULL,
        "AdamW reads sum, weight and two moments": 4 * FULL,
        "AdamW writes weight and two moments": 3 * FULL,
        "AdamW writes the bf16 weight": HALF,
    }


def parameters_of(c: Config) -> int:
    """Weights of the products and of the embedding, and the norms."""
    matrices = sum(p.ins * sum(p.outs) * p.count for p in products_of(c))
    embedding = 0 if c.tied else c.vocab * c.hidden
    return matrices + embedding + (2 * c.layers + 1) * c.hidden


# ---- measured -----------------------------------------------------------------------------------


def product_runs(layers: Products, tokens: int) -> dict[tuple, object]:
    """(out, what) -> the function that computes it. out: of all layers, or of one of them."""
    runs = {}
    for out in {sum(layers.outs), *layers.outs}:
        x = random(tokens, layers.ins, seed=1)
        dy = random(tokens, out, seed=2)
        shape = layers.count, out, layers.ins
        weights = random(*shape, seed=3)
        runs[out, "forward"] = in_turn(functools.partial(F.linear, x), weights)
        runs[out, "input"] = in_turn(functools.partial(torch.mm, dy), weights)
        sums = torch.zeros(shape, device=DEVICE)
        for what, beta in (("first", 0), ("added", 1)):
            run = functools.partial(add_product, dy=dy, x=x, beta=beta)
            runs[out, what] = in_turn(run, sums)
    return runs


def in_turn(run, tensors):
    """A function without arguments: run() of the first tensor, then of the next one, and so on."""
    of_layers = itertools.cycle(tensors.unbind())
    return lambda: run(next(of_layers))


def add_product(total, dy, x, beta: int):
    """total = beta * total + dy^T x, in fp32."""
    if DEVICE == "cuda":
        torch.addmm(total, dy.t(), x, out_dtype=torch.float32, beta=beta, out=total)
    else:
        total.addmm_(dy.t().float(), x.float(), beta=beta)


def product_ms(layers: Products, tokens: int, micro_batches: int) -> dict:
    """Milliseconds of a step's products of these layers, and FLOP/s."""
    runs = product_runs(layers, tokens)
    ms = timed(runs, budget=BUDGET / 5)

    def of(outs):
        """Of a micro-batch; the first product of a weight in a step overwrites its sum."""
        total = 0.0
        for out in outs:
            first, added = ms[out, "first"], ms[out, "added"]
            weights = (first + (micro_batches - 1) * added) / micro_batches
            total += layers.count * (ms[out, "forward"] + ms[out, "input"] + weights)
        return total

    joint, alone = of((sum(layers.outs),)), of(layers.outs)
    step = min(joint, alone) * micro_batches
    done = layers.flops(tokens) * micro_batches
    return {
        "ms": step,
        "TFLOP_per_s": done / step / 1e9,
        "joint": joint <= alone,
    }


def attention_ms(c: Config, rows: int, T: int) -> tuple[float, str]:
    """(milliseconds of one layer's forward and backward, whose kernels they are)."""

    def heads(count, seed):
        # As a product leaves them: (rows, T, heads, head_dim), seen transposed.
        return random(rows, T, count, c.head_dim, seed=seed).transpose(1, 2).requires_grad_()

    q, k, v = heads(c.heads, 1), heads(c.kv_heads, 2), heads(c.kv_heads, 3)
    dy = heads(c.heads, 4).detach()

    def run(backend):
        with sdpa_kernel(backend):
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=c.heads != c.kv_heads
            )
        return torch.autograd.grad(y, (q, k, v), dy)

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    if DEVICE == "cpu":
        backends = {"torch's own": SDPBackend.MATH}
    runs = {}
    for name, backend in backends.items():
        try:
            run(backend)
        except RuntimeError:
            # Not for these heads, or not on this GPU.
            continue
        runs[name] = functools.partial(run, backend)
    ms = timed(runs)
    best = min(ms, key=ms.get)
    return ms[best], best


class Limit:
    """The limit of a step, as a worker (workers.Workers)."""

    def __init__(self, config: Config, rows: int, T: int, micro_batches: int):
        self.config = config
        self.rows, self.T, self.micro_batches = rows, T, micro_batches

    def measure(self) -> dict:
        """Milliseconds of each part and of all."""
        c, tokens = self.config, self.rows * self.T
        products = {}
        for layers in products_of(c):
            products[layers.name] = product_ms(layers, tokens, self.micro_batches)
            release()
        attention, kernels = attention_ms(c, self.rows, self.T)
        rate = copy_rate(COPIED)
        release()
        moved = bytes_of_micro_batch(c, tokens)
        tail = parameters_of(c) * sum(tail_bytes_per_parameter().values())
        parts = {
            "products": sum(p["ms"] for p in products.values()),
            "attention": attention * c.layers * self.micro_batches,
            "bytes": sum(moved.values()) * self.micro_batches / rate / 1e6,
            "tail": tail / rate / 1e6,
        }
        done = sum(p.flops(tokens) for p in products_of(c)) * self.micro_batches
        return {
            "ms": math.fsum(parts.values()),
            "parts": parts,
            "TFLOP_per_s": done / parts["products"] / 1e9,
            "products": products,
            "attention": kernels,
            "bytes": {what: size * self.micro_batches for what, size in moved.items()},
            "tail_bytes": tail,
            "copy_GB_per_s": rate,
        }
