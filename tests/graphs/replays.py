"""Models, data and comparisons for the tests of captured steps: an eager run and a replayed one."""

import contextlib
import math
import random
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import same
from torch import nn

import gpuaccel as ga
from gpuaccel.graphs import tape
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.loop import warmup_cosine
from gpuaccel.training.step import TrainStep

V, HIDDEN, LR, LIMIT = 61, 32, 3e-2, 0.5


class Net(nn.Module):
    """Tokens (B, T) -> logits (B, T, V), with dropout in a ModuleList.

    rare: with a weight that only more than 8 tokens use."""

    def __init__(self, tied=False, rare=False, norm=False, dropout=0.2):
        super().__init__()
        self.embedding = nn.Embedding(V, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(HIDDEN),
                nn.Linear(HIDDEN, 64),
                nn.GELU(),
                nn.Linear(64, HIDDEN),
                nn.Dropout(dropout),
            )
            for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(HIDDEN) if norm else None
        self.head = nn.Linear(HIDDEN, V, bias=False)
        self.rare = nn.Parameter(torch.zeros(HIDDEN)) if rare else None
        self.register_buffer("size", torch.ones(HIDDEN))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x * self.size.to(x.dtype)
        if self.rare is not None and tokens.shape[1] > 8:
            x = x + self.rare
        for block in self.blocks:
            x = x + block(x)
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view(x.shape)
        return self.head(x)


def frozen():
    model = Net()
    model.embedding.weight.requires_grad_(False)
    return model


def side_by_side():
    """Its q, k and v are whole chunks of the arena: their products are one."""
    return llama(hidden=64, head_dim=64)


def llama(**changes):
    sizes = dict(vocab=V, layers=2, hidden=HIDDEN, intermediate=64, heads=2, kv_heads=1, T=16)
    return ga.training.Transformer(ga.preset("tiny", **(sizes | changes)))


def encoder():
    """Tokens and positions; the table of tokens is the output layer, too."""
    head = nn.Linear(HIDDEN, V, bias=False)
    model = nn.Sequential(ga.nn.Encoder(V, HIDDEN, 16), nn.LayerNorm(HIDDEN), head)
    head.weight = model[0].wte.weight
    return model


def each(model, micro):
    x, y, weight = micro
    found = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten(), reduction="none").view(
        y.shape
    )
    return found * weight[:, None]  # a weight that is NaN arrives as data


def loss_fn(model, micro):
    return each(model, micro).sum(), (micro[1] != -100).sum()


def mean_loss(model, micro):
    return each(model, micro).mean()


def batches(device, n=8, rows=4, lengths=(8, 16), bad=(), seed=1):
    """n batches of (tokens, targets, weights of the sequences). Lengths take turns, some targets do
    not count, a weight is NaN in batches `bad`."""
    generator, found = torch.Generator().manual_seed(seed), []
    for k in range(n):
        T = lengths[k % len(lengths)]
        x, y = (
            torch.randint(0, V, (rows, T), generator=generator),
            torch.randint(0, V, (rows, T), generator=generator),
        )
        y[0, : T // 2] = -100
        weight = torch.rand(rows, generator=generator) + 0.5
        if k in bad:
            weight[-1] = math.nan
        found.append(tuple(t.to(device) for t in (x, y, weight)))
    return found


def make(
    device,
    replay,
    *,
    net=Net,
    dtype=torch.float32,
    loss=loss_fn,
    opt=None,
    schedule=8,
    policy="require",
    max_graphs=8,
    **options,
):
    """A step with everything that moves: schedule with a warm-up, clipping, dropout, decay."""
    torch.manual_seed(0)
    model = net().to(device, dtype)
    opt = AdamW(Arena(model), **{"lr": LR, "weight_decay": 0.1, "max_norm": LIMIT, **(opt or {})})
    if replay == "graph":
        replay = Replay(policy, max_graphs)
    step = TrainStep(
        model,
        opt,
        loss,
        replay=replay,
        scheduler=warmup_cosine(opt, 2, schedule) if schedule else None,
        **{"micro_batches": 2, "deterministic": True, **options},
    )
    seed()
    return step


def seed():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)


def drawn(device):
    """Where the random generators stand."""
    found = {
        "random": torch.tensor([hash(random.getstate())]),
        "numpy": torch.tensor(np.random.get_state()[1].astype(np.int64)),
        "numpy's place": torch.tensor(np.random.get_state()[2]),
        "torch": torch.get_rng_state(),
    }
    return found | ({"torch.cuda": torch.cuda.get_rng_state()} if device == "cuda" else {})


def everything(model, opt, device):
    """Copies of all that a step may change: weights, masters, buffers, gradients, the optimizer's
    state, the generators."""
    arena = Arena.of(model)
    found = dict(model.state_dict(keep_vars=False))
    found |= {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    if arena is not None:
        found |= {f"master of {name}": t for name, t in arena.named_master().items()}
    for g, group in enumerate(opt.param_groups):
        for i, p in enumerate(group["params"]):
            found |= {
                f"{key} of {g}.{i}": t
                for key, t in opt.state.get(p, {}).items()
                if isinstance(t, torch.Tensor)
            }
    if isinstance(opt, AdamW):
        found["skipped"] = opt.skipped.to(device)
    return {name: t.detach().clone() for name, t in (found | drawn(device)).items()}


def agree(got, want):
    """All of `want`. What `got` has beyond that (state of weights that eager has not touched yet)
    is zero."""
    for name, t in want.items():
        same(got[name], t, name)
    assert not any(t.any() for name, t in got.items() if name not in want), [
        name for name in got if name not in want
    ]


OUTPUTS = ("loss", "tokens", "norm", "clipped_norm", "scale", "finite")


def outputs_agree(outs, wanted):
    for k, (out, want) in enumerate(zip(outs, wanted, strict=True)):
        for key in OUTPUTS:
            a, b = getattr(out, key), getattr(want, key)
            assert (a is None) == (b is None), f"step {k}: {key} is {a}, not {b}"
            if b is not None:
                same(a, b, f"{key} of step {k}")


def trained(step, data, device, between=None):
    """(outputs, everything afterwards, count, skips) of a step over batches.

    between(step, k): called before each."""
    outs = []
    for k, batch in enumerate(data):
        if between:
            between(step, k)
        outs.append(step(batch))
        # Slices without a gradient are stale: nothing reads them.
        for view in step.arena.gradients.views:
            view.fill_(math.nan)
    found = (
        everything(step.model, step.optimizers[0], device),
        step.count,
        getattr(step.optimizers[0], "last_skip", lambda: None)(),
    )
    step.close()
    return outs, *found


def compare(device, data, between=None, **how):
    """The same steps, eager and replayed, have the same bits. Returns eager's outputs."""
    wanted, left, count, skip = trained(make(device, "eager", **how), data, device, between)
    step = make(device, "graph", **how)
    outs, mine, mine_count, mine_skip = trained(step, data, device, between)
    assert step.replays == "graph", step.reason
    outputs_agree(outs, wanted)
    agree(mine, left)
    assert (mine_count, mine_skip) == (count, skip)
    return wanted


def graphed_or_eager(graphed, fn, state):
    """A context: fn captured, or fn itself."""
    return ga.GraphedStep(fn, state, policy="require") if graphed else contextlib.nullcontext(fn)


def follow_eager(device, build, drive):
    """drive(step, model, opt) of a captured step has eager's results, and leaves eager's state.

    build() -> (model, opt, fn); drive returns a list of tensors and Nones. Returns eager's."""
    runs = []
    for graphed in (False, True):
        model, opt, fn = build()
        seed()
        with graphed_or_eager(graphed, fn, [model, opt]) as step:
            results = drive(step, model, opt)
            runs.append((results, everything(model, opt, device)))
    (wanted, state_wanted), (got, state_got) = runs
    for k, (mine, want) in enumerate(zip(got, wanted, strict=True)):
        if want is not None:
            same(mine, want, f"result {k}")
    agree(state_got, state_wanted)
    return wanted


@contextlib.contextmanager
def unchanged(model, opt, device):
    """The block changes nothing that a step may change."""
    before = everything(model, opt, device)
    yield
    agree(everything(model, opt, device), before)


def healthy(device):
    """After a capture that failed: dropout draws, memory comes from where it should, and another
    capture works."""
    ones = torch.ones(1000, device=device)
    one, two = F.dropout(ones, 0.5), F.dropout(ones, 0.5)
    assert 300 < (one == 0).sum().item() < 700 and not torch.equal(one, two)
    assert not tape.launch.recorders
    if device == "cuda":
        new = torch.empty(5 << 20, dtype=torch.uint8, device=device)
        pools = [
            tuple(s["segment_pool_id"])
            for s in torch.cuda.memory_snapshot()
            if s["address"] <= new.data_ptr() < s["address"] + s["total_size"]
        ]
        assert pools == [(0, 0)], "memory still comes from the pool of the capture that failed"
    with ga.GraphedStep(
        lambda x: F.dropout(x, 0.5), torch.zeros(1, device=device), policy="require"
    ) as step:
        assert not torch.equal(step(ones), step(ones))


def small(device, norm=False, dropout=0.0):
    """An ordinary module over (B, 8) floats."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        *([nn.BatchNorm1d(16)] if norm else []),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(16, 4),
    ).to(device)


def pairs(device, n=10, rows=(6,)):
    generator = torch.Generator().manual_seed(2)
    return [
        tuple(
            torch.randn(rows[k % len(rows)], size, generator=generator).to(device)
            for size in (8, 4)
        )
        for k in range(n)
    ]


def plain_step(model, opt):
    """A training step as anybody writes it."""

    def fn(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return fn


def torchs(model, device):
    """torch.optim.AdamW as a graph needs it: every number that changes on the device."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=torch.tensor(LR, device=device),
        fused=True,
        capturable=device == "cuda",
    )


def lists(device, kinds=((2, 8), (2, 16)), bad=()):
    """Steps of 3, 1, 2, 4, 1, 3 micro-batches of two kinds, in no order that repeats."""
    found, at = [], 0
    for k, many in enumerate((3, 1, 2, 4, 1, 3)):
        micros = []
        for _ in range(many):
            rows, T = kinds[(at * at // 3) % len(kinds)]
            micros += batches(
                device, n=1, rows=rows, lengths=(T,), seed=100 + at, bad=(0,) if k in bad else ()
            )
            at += 1
        found.append(micros)
    return found


def momentum(model, device):
    return torch.optim.SGD(
        model.parameters(), lr=torch.tensor(LR, device=device), momentum=0.9, fused=True
    )


def takes_a_value(model, micro):
    total, tokens = loss_fn(model, micro)
    return total, tokens + 0 * int(total.isnan().any().item())


def theirs(kind):
    """A model of transformers, from its config; GPT-2 with dropout in all its places."""

    def build():
        transformers = pytest.importorskip(
            "transformers", reason="transformers, of the extra `test`, is not installed"
        )
        if kind == "gpt2":
            name, head = "GPT2", "LMHeadModel"
            sizes = dict(n_positions=32, n_embd=HIDDEN, n_layer=2, n_head=4)
            sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
        else:
            name, head = kind.capitalize(), "ForCausalLM"
            sizes = dict(hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2)
            sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
        config = getattr(transformers, f"{name}Config")
        config = config(vocab_size=V, bos_token_id=0, eos_token_id=1, **sizes)
        return getattr(transformers, f"{name}{head}")(config).train()

    return build


def their_loss(model, micro):
    x, y, weight = micro
    found = F.cross_entropy(
        model(input_ids=x).logits.float().flatten(0, 1), y.flatten(), reduction="none"
    ).view(y.shape)
    return (found * weight[:, None]).sum(), (y != -100).sum()


def compiler_or_skip():
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("torch.compile on a GPU (triton) needs a C compiler, and there is none")
