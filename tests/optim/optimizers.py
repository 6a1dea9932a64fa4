"""What tests of the optimizers share: parameters and gradients, comparisons, training steps."""

import torch
from helpers import Blocks, bits, differ, filled, generator, same
from torch import nn

from gpuaccel.optim.arena import Arena

# How far two implementations of the same formula may drift apart in a dozen steps of fp32: a few
# roundings of weights of size 1.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
SHAPES = ((10, 5), (5,), (), (0,), (4097,), (1, 1, 3))


def params_of(device="cpu", shapes=SHAPES, dtype=torch.float32, seed=0):
    random = generator(seed)
    return [nn.Parameter(torch.randn(s, generator=random).to(device, dtype)) for s in shapes]


def twin(params):
    return [nn.Parameter(p.detach().clone()) for p in params]


def give(seed, *sets, size=1.0, without=()):
    """The same random gradients to each set of parameters."""
    random = generator(1000 + seed)
    for i, row in enumerate(zip(*sets)):
        g = size * torch.randn(row[0].shape, generator=random)
        for p in row:
            p.grad = None if i in without else torch.empty_like(p).copy_(g)


def march(mine, theirs, ours, reference, steps=12, seed=0, **how):
    """So many steps of two optimizers on the same gradients; compared after each."""
    for k in range(steps):
        give(seed + k, ours, reference)
        mine.step(), theirs.step()
        compare(ours, reference, f"step {k}", **how)


def compare(ours, reference, what="", **how):
    for i, (a, b) in enumerate(zip(ours, reference, strict=True)):
        torch.testing.assert_close(
            a.detach(),
            b.detach(),
            **{**CLOSE, **how},
            msg=lambda m: f"{what}, tensor {i}: {differ(a, b)}\n{m}",
        )


def states(optimizer, key):
    return [
        optimizer.state[p].get(key) for group in optimizer.param_groups for p in group["params"]
    ]


def snapshot(optimizer, *more):
    """Bits of all that a step may change."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [
        t
        for p in tensors
        for t in optimizer.state.get(p, {}).values()
        if isinstance(t, torch.Tensor)
    ] + list(more)
    return [bits(t) for t in tensors]


def unchanged(before, optimizer, *more):
    after = snapshot(optimizer, *more)
    assert len(after) == len(before)
    wrong = [i for i, (a, b) in enumerate(zip(after, before)) if not torch.equal(a, b)]
    assert not wrong, f"tensors {wrong} of weights, states and gradients were changed"


def check_arena(arena):
    """Masters, copies and padding as an arena promises."""
    for s, master, p in zip(arena.segments, arena.masters, arena.module_parameters):
        if master is not p:
            rounded = master.detach().bfloat16()
            same(p.detach(), rounded, f"the bf16 copy of {s.name} is its master, rounded")
    used = torch.zeros(arena.numel, dtype=torch.bool)
    for s in arena.segments:
        used[s.offset : s.offset + s.numel] = True
    assert not arena.weights.cpu()[~used].any() and not arena.grads.cpu()[~used].any(), (
        "padding was written"
    )


class Training:
    """An optimizer over "parameters" or an "arena", and its gradients."""

    def __init__(self, make, what, device, dtype=torch.float32, **kwargs):
        if what == "parameters":
            self.take(make(params_of(device, dtype=dtype), **kwargs))
        else:
            self.take(make(Arena(Blocks(dtype=dtype).to(device)), **kwargs))

    def take(self, opt):
        """Train with this optimizer, and what it is over."""
        self.opt, self.arena = opt, opt.arena
        if opt.arena is None:
            self.params = [p for group in opt.param_groups for p in group["params"]]
            self.watched, self.bad_name = [], "parameter 4 of shape (4097,)"
            return
        self.params = opt.arena.masters
        self.watched = [t for t in (opt.arena.weights, opt.arena.bf16_weights) if t is not None]
        self.bad_name = opt.arena.segments[3].name

    def backward(self, k, bad=None):
        """Gradients of step k; bad: NaN or infinity, which one of them has."""
        self.opt.zero_grad()
        if self.arena is None:
            give(k, self.params)
            if bad is not None:
                self.params[4].grad[4096] = bad
            return
        model = self.arena.module
        grads = filled(model, k)
        if bad is not None:
            grads[3][4096] = bad
        model(grads).backward()

    def step(self, k):
        self.backward(k)
        self.opt.step()

    def gradients(self):
        """What the next step reads, in the order of `params`."""
        return [p.grad for p in self.params]

    def close(self):
        if self.arena is not None:
            self.arena.release()
