"""The encoder: sums against float64, the kernels against the reference bit by bit, and ga.Embedding
as what nn.Embedding was."""

import contextlib
import copy
import math
import pickle
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    CUDA,
    EVERYWHERE,
    KERNELS,
    differ,
    drawn,
    generator,
    no_waiting,
    products_add,
    same,
    sums,
)
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError, CaptureError
from gpuaccel.nn import embedding, fused_forward
from gpuaccel.ops import embedding_backward as encoder
from gpuaccel.ops.embedding_backward import (
    encoder_backward,
    reference_encoder,
    reference_encoder_backward,
)
from gpuaccel.ops.token_sort import find_segments, reference_segments
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.step import TrainStep

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
V, B, T = 131, 7, 69
KINDS = ("zipf", "uniform", "all the same", "borders")


def tokens_of(kind, shape=(B, T), vocab=V, seed=0):
    """Tokens (*shape) int64. borders: tokens 0 to 6 have 1, 31, 32, 33, 64, 65 and 257 rows."""
    n = math.prod(shape)
    if kind != "borders":
        return drawn(kind, n, vocab, seed).view(shape)
    rows = torch.arange(7).repeat_interleave(torch.tensor([1, 31, 32, 33, 64, 65, 257]))
    return rows[torch.randperm(n, generator=generator(seed))].view(shape)


def normal(*shape, dtype=F32, seed=0):
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def sums_of(C, dtype=F32, positions=T, vocab=V):
    """dwte (V, C) and dwpe (positions, C), which hold sums already."""
    return normal(vocab, C, dtype=dtype, seed=1), normal(positions, C, dtype=dtype, seed=2)


def near(got, old, at, rows, what):
    """got = old with `rows` (n, C) added at `at`, as in float64: within 64 roundings of fp32 at the
    size of a random walk (the root of the sum of squares; a single row that is missing is far
    more), and one of the result's dtype."""
    # Some columns at a time: float64 of a whole table takes more memory than many GPUs have.
    width = max(1, 2**25 // (len(old) + len(rows)))
    for some in torch.arange(old.shape[1]).split(width):
        columns = slice(int(some[0]), int(some[-1]) + 1)
        near_columns(got[:, columns], old[:, columns], at, rows[:, columns], what)


def near_columns(got, old, at, rows, what):
    want, squares = (
        f(old.double()).index_add_(0, at, f(rows.double())) for f in (torch.clone, torch.square)
    )
    kind = torch.finfo(got.dtype)
    bound = 64 * 2**-24 * squares.sqrt() + kind.eps * want.abs() + kind.smallest_normal * kind.eps
    off = (got.to(want.device).double() - want).abs()
    assert (off <= bound).all(), (
        f"{what}: {off.max():.3g} off, {(off / bound).max():.3g} of the bound"
    )


def near_both(got, old, dout, tokens, what=""):
    rows = dout.flatten(0, -2)
    near(got[0], old[0], tokens.flatten(), rows, f"{what}, dwte")
    near(
        got[1],
        old[1],
        torch.arange(tokens.shape[-1], device=tokens.device).repeat(
            tokens.numel() // tokens.shape[-1]
        ),
        rows,
        f"{what}, dwpe",
    )


def added(device, sums, dout, tokens, **how):
    """Fresh copies of the sums, into which encoder_backward has added on a device."""
    got = [t if t is None else t.to(device, copy=True) for t in sums]
    encoder_backward(*got, dout.to(device), tokens.to(device), **how)
    assert not tokens.numel() or all(t is None or t._version for t in got), (
        "autograd has not seen the additions"
    )
    return got


def by_reference(sums, dout, tokens, padding_idx=-1):
    got = [t if t is None else t.clone() for t in sums]
    reference_encoder_backward(
        *got,
        dout,
        reference_segments(tokens, V if sums[0] is None else len(sums[0]), padding_idx),
    )
    return got


def same_both(got, want, what=""):
    for name, a, b in zip(("dwte", "dwpe"), got, want):
        assert a is None and b is None or same(a.cpu(), b.cpu(), f"{what}, {name}") is None


# ---- the sums ------------------------------------------------------------------------------------

ALL_TYPES = [(F32, F32), (BF16, F32), (BF16, BF16), (F16, F16), (F32, BF16)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "C, types",
    [(768, ALL_TYPES), *[(C, ALL_TYPES[:2]) for C in (1, 2, 6, 770, 1600)], (4096, ALL_TYPES[1:2])],
    ids=lambda x: x if isinstance(x, int) else "",
)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_sums_are_those_of_float64_and_have_the_references_bits(device, C, types):
    for dtype, sum_dtype in types:
        old, dout = sums_of(C, sum_dtype, T + 2), normal(B, T, C, dtype=dtype)
        for kind in KINDS if C < 10 or (dtype, sum_dtype) == (BF16, F32) else ("borders",):
            tokens, what = tokens_of(kind), f"{kind}, {dtype} into {sum_dtype}"
            got = added(device, old, dout, tokens)
            near_both(got, old, dout, tokens, what)
            same_both(got, by_reference(old, dout, tokens), what)
            same(
                got[0].cpu()[absent := ~torch.isin(torch.arange(V), tokens)],
                old[0][absent],
                f"{what}: a token that is not there",
            )
            same(got[1].cpu()[T:], old[1][T:], f"{what}: behind the last position")


@pytest.mark.parametrize("shape", [(), (5,), (0,), (4, 0), (0, 4), (2, 3, 4)])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_tokens_of_any_shape_any_integer_and_dout_of_any_strides(device, shape):
    """Position: the place in the last dimension. Against index_add_ in float64; the sums of small
    whole numbers are exact."""
    tokens = torch.randint(0, 5, shape, generator=generator(0))
    dout = (
        torch.randint(-8, 9, (3, *shape), generator=generator(1)).float().movedim(0, -1)
    )  # not contiguous
    old = (torch.ones(5, 3), None if not shape else torch.ones(4 if shape[-1] < 5 else 5, 3))
    want = (
        old[0].double().index_add(0, tokens.flatten(), dout.double().reshape(-1, 3)),
        None
        if not shape
        else old[1]
        .double()
        .index_add(
            0, torch.arange(tokens.numel()) % max(shape[-1], 1), dout.double().reshape(-1, 3)
        ),
    )
    for given in (tokens, tokens.int()):
        same_both(added(device, old, dout, given), [w if w is None else w.float() for w in want])
        same_both(
            added(device, old, dout, given, segments=find_segments(given.to(device), 5)),
            [w if w is None else w.float() for w in want],
        )


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_sums_and_gradients_may_begin_at_any_element(device):
    """Then rows of 8 channels cannot be read four at a time; what lies around them stays."""
    tokens, dout = tokens_of("borders"), normal(B, T, 8, dtype=BF16)
    for skip, start in ((1, 0), (0, 1), (4, 4)):
        wte, wpe, grad = (
            torch.full((V * 8 + 9,), 7.0),
            torch.full((T * 8 + 9,), 7.0),
            torch.zeros(B * T * 8 + 9, dtype=BF16),
        )
        old, there = (wte, wpe), [t.to(device, copy=True) for t in (wte, wpe, grad)]
        views = [
            t[s : s + n * 8].view(*shape)
            for t, s, n, shape in zip(
                there, (skip, skip, start), (V, T, B * T), ((V, 8), (T, 8), (B, T, 8))
            )
        ]
        views[2].copy_(dout)
        encoder_backward(*views[:2], views[2], tokens.to(device))
        want = by_reference(
            [t[skip : skip + n * 8].view(n, 8) for t, n in zip(old, (V, T))], dout, tokens
        )
        same_both(views[:2], want, f"{skip} and {start} behind")
        for t, n in zip(there, (V, T)):
            assert t[:skip].eq(7).all() and t[skip + n * 8 :].eq(7).all()


@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_nothing_is_read_or_written_out_of_bounds_whatever_the_tokens_are(device):
    """With the checks on: races, bounds, what was never written. Segments are those of the device
    path, where nobody looks at the tokens before."""
    tokens = tokens_of("borders")
    tokens[0, 0], tokens[3, 3], tokens[6, 68] = -1, V, -(2**63)
    dwte, dwpe = sums_of(C := 261)
    with ga.checked():
        found = find_segments(tokens, V)
        encoder.launch_backward(dwte, dwpe, dout := normal(B, T, C), found)
        out = encoder.launch_forward(
            tokens, wte := normal(V, C), wpe := normal(T, C), invalid := embedding._none_seen("cpu")
        )
    same_both((dwte, dwpe), by_reference(sums_of(C), dout, tokens))
    assert dwte[0].isnan().all() and not dwte[1:].isnan().any() and not dwpe.isnan().any()
    same(out, reference_encoder(tokens, wte, wpe))
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 0], [3, 3], [6, 68]]
    row, columns, token = invalid[1].item() >> 32, invalid[1].item() & 0xFFFFFFFF, invalid[2].item()
    assert (
        invalid[0] == 3
        and columns == T
        and token == tokens[row // T, row % T]
        and token in (-1, V, -(2**63))
    )


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_tokens_sum_does_not_depend_on_the_rest_of_the_batch(device):
    """Its own rows in their order, anywhere among other tokens, in a batch of another size: the
    same bits."""
    for rows in (1, 33, 300):
        mine, found = normal(rows, 6, seed=5), []
        for n, kind, seed in (
            (rows, "uniform", 0),
            (rows + 50, "uniform", 1),
            (900, "zipf", 2),
            (1500, "all the same", 3),
        ):
            tokens = drawn(kind, n, V - 1, seed)  # without token V - 1
            places = torch.randperm(n, generator=generator(seed))[:rows].sort()[0]
            tokens[places], dout = V - 1, normal(n, 6, seed=9 + seed)
            dout[places] = mine
            found.append(added(device, (torch.ones(V, 6), None), dout, tokens)[0][V - 1])
        for other in found[1:]:
            same(other, found[0], f"{rows} rows")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_every_run_has_the_same_bits_on_any_stream(device, kind):
    shape = (16, 512) if kind != "borders" else (B, T)
    tokens = tokens_of(kind, shape, 50257).to(device)
    dout = normal(*shape, 768, dtype=BF16).to(device)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    old, first = [t.to(device) for t in sums_of(768, positions=shape[1], vocab=50257)], None
    for k in range(100):
        stream, got = streams[k % len(streams)], [t.clone() for t in old]
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            encoder_backward(*got, dout, tokens)
        torch.cuda.default_stream().wait_stream(stream)
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(got, first)), (
            f"run {k}: {differ(got[0], first[0])}"
        )


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_padding_as_torchs_embedding_backward(device, dtype):
    dout, tokens = normal(B, T, 6, dtype=dtype), tokens_of("borders")
    for padding_idx in (0, 6):
        zeros = torch.zeros(V, 6), None
        got, _ = added(device, zeros, dout, tokens, padding_idx=padding_idx)
        want = torch.ops.aten.embedding_dense_backward(dout.double(), tokens, V, padding_idx, False)
        assert not got[padding_idx].any()
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)
        same(got.cpu(), by_reference(zeros, dout, tokens, padding_idx)[0])


# ---- the module: a drop-in -----------------------------------------------------------------------


def twins(device="cpu", dtype=F32, **how):
    """nn.Embedding and ga.Embedding with the same weight."""
    torch.manual_seed(0)
    plain = nn.Embedding(13, 6, **how).to(device, dtype)
    mine = ga.Embedding(13, 6, **how).to(device, dtype)
    mine.load_state_dict(plain.state_dict())
    return plain, mine


SHAPES = {
    "0-d": torch.tensor(3),
    "empty": torch.zeros(0, dtype=torch.int64),
    "no rows": torch.zeros(2, 0, dtype=torch.int64),
    "1-d": torch.tensor([0, 5, 5, 12]),
    "3-d": drawn("zipf", 60, 13).view(3, 4, 5),
    "int32": drawn("zipf", 20, 13).int(),
    "transposed": drawn("zipf", 70, 13).view(10, 7).t(),
    "every other": drawn("zipf", 80, 13).view(4, 20)[:, ::2],
    "expanded": torch.tensor([[4], [2]]).expand(2, 40),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"padding_idx": -13}], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_embedding_gives_what_torchs_gives(device, dtype, how):
    """Output bit by bit, the gradient of small whole numbers too (exact in any order), for tokens
    and gradients of any shape and strides."""
    for what, tokens in SHAPES.items():
        plain, mine = twins(device, dtype, **how)
        outs = [module(tokens.to(device)) for module in (plain, mine)]
        same(outs[1], outs[0], what)
        dout = (
            torch.randint(-4, 5, (6, *tokens.shape), generator=generator(1))
            .movedim(0, -1)
            .to(device, dtype)
        )
        for out in outs:
            out.backward(dout)
        same(mine.weight.grad, plain.weight.grad, f"{what}: gradient")
        assert mine.weight.grad.is_contiguous()


@pytest.mark.parametrize("C, dtype", [(6, F32), (128, BF16), (128, F16)])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_encoder_adds_positions_and_is_rounded_once(device, C, dtype):
    torch.manual_seed(0)
    module = ga.nn.Encoder(13, C, 9, device=device, dtype=dtype)
    wte, wpe = (part.weight.detach().cpu().clone() for part in (module.wte, module.wpe))
    for tokens in (
        torch.tensor([3, 3, 0]),
        drawn("zipf", 40, 13).view(5, 8),
        drawn("zipf", 24, 13).view(2, 3, 4).int(),
        torch.zeros(2, 0, dtype=torch.int64),
    ):
        module.zero_grad()
        out = module(tokens.to(device))
        same(
            out.detach().cpu(),
            wte[tokens.long()] + wpe[: tokens.shape[-1]],
            f"tokens {tuple(tokens.shape)}",
        )
        dout = torch.randint(-2, 3, out.shape, generator=generator(1)).to(device, dtype)
        out.backward(dout)
        want = (
            torch.zeros_like(wte)
            .double()
            .index_add(0, tokens.flatten().long(), dout.cpu().double().flatten(0, -2)),
            torch.zeros_like(wpe).double(),
        )
        want[1][: tokens.shape[-1]] += (
            dout.cpu().double().flatten(0, -3).sum(0) if tokens.dim() > 1 else dout.cpu().double()
        )
        for part, w in zip((module.wte, module.wpe), want):
            same(part.weight.grad.cpu(), w.to(dtype), "gradient")
    assert "13 tokens, 9 positions" in repr(module) and set(module.state_dict()) == {
        "wte.weight",
        "wpe.weight",
    }


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_copies_pickles_and_state_dicts_go_both_ways(device):
    plain, mine = twins(device, padding_idx=2)
    assert list(mine.state_dict()) == list(plain.state_dict()) == ["weight"] and repr(mine) == repr(
        plain
    )
    plain.load_state_dict(mine.state_dict(), strict=True)
    tokens = torch.tensor([[1, 2, 2], [12, 0, 1]], device=device)
    want = plain(tokens)
    loaded = ga.Embedding.from_pretrained(plain.weight.detach(), freeze=False, padding_idx=2)
    frozen = ga.Embedding.from_pretrained(plain.weight.detach())
    for twin in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), loaded):
        assert (
            type(twin) is ga.Embedding and twin.padding_idx == 2 and twin.weight is not mine.weight
        )
        same(twin(tokens), want)
        twin(tokens).sum().backward()
        assert (
            twin.weight.grad.cpu()[[0, 1, 2, 3, 12], 0].tolist() == [1, 2, 0, 0, 1]
            and mine.weight.grad is None
        )
    assert (
        not frozen.weight.requires_grad
        and not frozen(tokens).requires_grad
        and frozen.padding_idx is None
    )
    mine.weight.requires_grad_(False)
    assert not mine(tokens).requires_grad
    mine.weight.requires_grad_(True)
    with torch.no_grad():
        assert not mine(tokens).requires_grad
    with torch.inference_mode():
        same(mine(tokens).clone(), want.detach())
    one, two = (
        torch.autograd.grad(mine(tokens).sum() + mine(tokens[:1]).sum(), mine.weight)[0],
        mine(tokens),
    )
    assert one[:, 0].tolist()[:4] == [1, 3, 0, 0] and mine.weight.grad is None
    with torch.no_grad():
        mine.weight.add_(
            1
        )  # torch's embedding keeps no weight for its backward, and this one neither
    two.sum().backward(retain_graph=True)
    two.sum().backward()
    assert mine.weight.grad[:, 0].tolist()[:4] == [2, 4, 0, 0]


def test_a_module_made_on_the_meta_device_works_where_its_weights_come_to_lie():
    for fill in ("to_empty", "assign"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(5, 4), ga.Embedding(4, 4))
        assert ga.deterministic_embeddings(model) == ["0"]
        weights = {"0.weight": normal(5, 4), "1.weight": normal(4, 4)}
        model = model.to_empty(device="cpu") if fill == "to_empty" else model
        model.load_state_dict(weights, assign=fill == "assign")
        same(model[0](torch.tensor([4, 0])), weights["0.weight"][[4, 0]], fill)
        assert model[0].invalid_tokens() is None


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_opcheck_of_the_operations(device):
    tokens, wte, wpe = (
        drawn("zipf", 12, 7).view(3, 4).to(device),
        normal(7, 6).to(device),
        normal(5, 6).to(device),
    )
    found, dout = find_segments(tokens, 7).buffer, normal(3, 4, 6).to(device)
    for positions, segments in ((wpe, True), (None, False)):
        torch.library.opcheck(
            torch.ops.gpuaccel.encoder_forward.default,
            (tokens, wte, positions, embedding._none_seen(device), -1, segments),
        )
    torch.library.opcheck(
        torch.ops.gpuaccel.encoder_backward_.default,
        (normal(5, 6).to(device), dout, None, False),
    )
    torch.library.opcheck(
        torch.ops.gpuaccel.encoder_backward_.default,
        (normal(7, 6).to(device), dout, found, False),
    )


class Model(nn.Module):
    """Tokens (B, T) -> logits (B, T, 29)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = ga.nn.Encoder(29, 24, 16)
        self.hidden, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)
        self.head = nn.Linear(24, 29, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.norm(x + torch.tanh(self.hidden(x))))


def loss_fn(model, micro):
    x, y = micro
    return F.cross_entropy(
        model(x).float().flatten(0, 1), y.flatten(), reduction="sum"
    ), torch.ones_like(y).sum()


def micros(n, device="cpu", shape=(4, 16), seed=0):
    return [
        tuple(
            drawn("zipf", math.prod(shape), 29, seed + 2 * k + i).view(shape).to(device)
            for i in range(2)
        )
        for k in range(n)
    ]


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_second_derivatives_and_forward_mode_are_those_of_torch(device, options):
    """A Hessian-vector product of a whole model, as power iteration takes it; nothing may vanish
    without a word."""
    tokens, found = torch.tensor([[3, 1, 1, 4], [1, 0, 4, 3]], device=device), []
    for cls in (nn.Embedding, ga.Embedding):
        torch.manual_seed(0)
        model = nn.Sequential(cls(6, 5, **options), nn.Tanh(), nn.Linear(5, 2)).to(device)
        params = list(model.parameters())
        loss = model(tokens).pow(2).mean()
        grads = torch.autograd.grad(loss, params, create_graph=True)
        vectors = [torch.randn_like(p) for p in params]
        product = torch.autograd.grad(grads, params, vectors)
        state = {name: p.detach() for name, p in model.named_parameters()}

        def at(state):
            return torch.func.functional_call(model, state, (tokens,)).pow(2).mean()

        tangents = dict(zip(state, vectors))
        found.append(
            [
                *product,
                torch.func.jvp(at, (state,), (tangents,))[1],
                *torch.func.grad(at)(state).values(),
            ]
        )
    for want, got in zip(*found):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-6), (
            f"largest difference {(got - want).abs().max():.3g}"
        )


@pytest.mark.parametrize("device", ["cpu", "simt"], indirect=True)
def test_finite_differences_agree_with_first_and_second_derivatives(device):
    for module in (ga.Embedding(4, 3, padding_idx=2), ga.nn.Encoder(4, 3, 5)):
        module = module.double()
        names, params = zip(*module.named_parameters())
        tokens = torch.tensor([[0, 2, 1], [1, 1, 3]])
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(
                lambda *p: torch.func.functional_call(module, dict(zip(names, p)), (tokens,)) ** 2,
                params,
            )


def test_padding_idx_counts_from_the_end_as_torchs_and_is_checked():
    tokens, dout = torch.tensor([1, 19, 19, 2]), torch.ones(4, 8)
    sums = torch.zeros(20, 8)
    encoder_backward(sums, None, dout, tokens, padding_idx=-1)
    assert sums[19].sum() == 0 and sums[1].sum() == 8
    for wrong in (20, -21, 1.5):
        with pytest.raises(
            ArgumentError,
            match=f"padding_idx is {wrong}; expected None, or a number from -20 to 19",
        ):
            encoder_backward(sums, None, dout, tokens, padding_idx=wrong)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_options_set_after_construction_are_honoured_or_refused(device):
    plain, mine = twins(device)
    tokens = torch.tensor([0, 12, 12, 3], device=device)
    for module in (plain, mine):
        module.padding_idx = -1
        module(tokens).sum().backward()
    same(mine.weight.grad, plain.weight.grad)
    for name, value in (("max_norm", 0.5), ("sparse", True), ("scale_grad_by_freq", True)):
        _, mine = twins(device)
        setattr(mine, name, value)
        with pytest.raises(ArgumentError, match=f"{name}={value}: here"):
            mine(tokens)


def test_embeddings_are_replaced_before_products_add():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    with products_add(Arena(model)):
        with pytest.raises(ArgumentError, match=r"^0 is at work in a TrainStep.*close\(\)"):
            ga.deterministic_embeddings(model)
    assert type(model[0]) is nn.Embedding and ga.deterministic_embeddings(model) == ["0"]
    assert type(model[0]) is ga.Embedding
    model(torch.tensor([1, 2])).sum().backward()


def test_counts_are_no_buffers_and_survive_a_move():
    """DistributedDataParallel would hand every rank the first one's; to_empty() would leave memory
    without a value."""
    module = ga.Embedding(5, 4)
    torch.ops.gpuaccel.encoder_forward(
        torch.tensor([[7]]), module.weight, None, module.invalid, -1, False
    )
    assert list(module.buffers()) == [] and list(module.state_dict()) == ["weight"]
    assert module.double().invalid_tokens() == {"count": 1, "token": 7, "position": (0, 0)}
    assert module.to("meta").to_empty(device="cpu").invalid_tokens() is None


def test_functions_that_launch_step_aside_in_a_compiled_function():
    with ga.use_backend("simt"):
        tokens, dout = torch.tensor([[0, 1, 1]]), torch.ones(1, 3, 4)

        @torch.compile(backend="eager")
        def f(sums):
            encoder_backward(sums, None, dout, tokens)
            return sums * 2

        assert f(torch.zeros(3, 4))[:, 0].tolist() == [2, 4, 0]


# ---- into the arena ------------------------------------------------------------------------------


def assert_close(got, want, what, bound=2e-6):
    for name, w in want.items():
        e = ((got[name].double() - w.double()).norm() / w.double().norm().clamp(min=1e-30)).item()
        assert e <= bound, f"{what}, {name}: {e:.3g} off; {differ(got[name], w)}"


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_sums_have_the_bits_of_the_kernels_on_the_same_gradients(device):
    """No rounding in between: dout straight into the fp32 sums, micro-batch after micro-batch, from
    bf16 weights too."""
    for dtype in (F32, BF16):
        module = ga.nn.Encoder(29, 12, 16, device=device, dtype=dtype)
        arena, want = (
            Arena(module),
            [torch.zeros(29, 12, device=device), torch.zeros(16, 12, device=device)],
        )
        with products_add(arena):
            for k, (tokens, _) in enumerate(micros(3, device)):
                dout = normal(4, 16, 12, dtype=dtype, seed=k).to(device)
                module(tokens).backward(dout)
                encoder_backward(*want, dout, tokens)
            got = arena.named_parameters()
            same_both((got["wte.weight"].grad, got["wpe.weight"].grad), want, f"{dtype}")


def test_products_reach_plain_embeddings_and_ours_and_leave_the_others():
    model = nn.ModuleDict(
        {
            "plain": nn.Embedding(5, 4),
            "mine": ga.Embedding(5, 4),
            "hooked": nn.Embedding(5, 4),
            "limited": nn.Embedding(5, 4, max_norm=0.5),
            "frozen": nn.Embedding(5, 4),
        }
    )
    seen = []
    model["hooked"].weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    model["frozen"].weight.requires_grad_(False)
    before = {
        name: (type(part), part.weight, set(vars(part)), dict(part._buffers))
        for name, part in model.items()
    }
    tokens = torch.tensor([1, 1, 3])
    with products_add(arena := Arena(model)):
        assert [name for name, part in model.items() if fused_forward(part)] == ["plain", "mine"]
        twin = copy.deepcopy(model["plain"])
        twin(tokens).sum().backward()
        assert (
            type(twin) is nn.Embedding and twin.weight.grad is not None and not arena.grads.any()
        ), "a copy is not the arena's"
        for part in model.values():
            if part.weight.requires_grad:
                part(tokens).sum().backward()
        grads = {name: p.grad[:, 0].tolist() for name, p in arena.named_parameters().items()}
        assert (
            grads
            == {
                f"{name}.weight": [0, 2 * k, 0, k, 0]
                for name, k in (("plain", 1), ("mine", 1), ("hooked", 2), ("limited", 1))
            }
            and len(seen) == 1
        )
        assert model["limited"].weight[1].norm() <= 0.5001 < model["plain"].weight[1].norm()
    for name, part in model.items():
        cls, _, keys, buffers = before[name]
        assert (
            type(part) is cls and set(vars(part)) == keys and set(part._buffers) == set(buffers)
        ), name
    assert [type(part) for part in model.values()].count(nn.Embedding) == 4


@pytest.mark.parametrize("which", ["wte", "wpe"])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_frozen_weight_gets_nothing_and_the_other_its_sum(device, which):
    module = ga.nn.Encoder(29, 12, 16, device=device)
    getattr(module, which).weight.requires_grad_(False)
    other, (tokens, _) = "wpe" if which == "wte" else "wte", micros(1, device)[0]
    dout, want = (
        normal(4, 16, 12).to(device),
        {"wte": torch.zeros(29, 12, device=device), "wpe": torch.zeros(16, 12, device=device)},
    )
    encoder_backward(want["wte"], want["wpe"], dout, tokens)
    with products_add(arena := Arena(module)):
        module(tokens).backward(dout)
        assert list(arena.named_parameters()) == [f"{other}.weight"]
        same(arena.named_parameters()[f"{other}.weight"].grad, want[other])
    # Frozen is one way of not being asked for; backward(inputs=...) is another.
    whole = ga.nn.Encoder(29, 12, 16, device=device)
    with products_add(arena := Arena(whole)):
        whole(tokens).backward(dout, inputs=[getattr(whole, other).weight])
        got = arena.named_parameters()
        same(got[f"{other}.weight"].grad, want[other])
        assert got[f"{which}.weight"].grad is None and not sums(arena)[f"{which}.weight"].any()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_two_embeddings_of_one_weight_have_one_sum(device):
    model, tokens = (
        nn.ModuleDict({"a": nn.Embedding(5, 4, padding_idx=1), "b": nn.Embedding(5, 4)}).to(device),
        torch.tensor([1, 1, 3], device=device),
    )
    model["b"].weight = model["a"].weight
    with products_add(arena := Arena(model)):
        for _ in range(2):
            (model["a"](tokens).sum() + 3 * model["b"](tokens).sum()).backward()
        assert arena.parameters()[0].grad[:, 0].tolist() == [0, 12, 0, 8, 0]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA], indirect=True)
def test_a_compiled_encoder_adds_into_the_arena(device):
    """inductor, which hands an operation the tensor itself."""
    if not any(
        map(shutil.which, ("g++", "clang++") if device == "cpu" else ("cc", "gcc", "clang"))
    ):
        pytest.skip("inductor needs a compiler, and there is none")
    torch._dynamo.reset()
    module, data = ga.nn.Encoder(29, 12, 16, device=device), micros(2, device)
    want = [torch.zeros(29, 12, device=device), torch.zeros(16, 12, device=device)]
    with products_add(arena := Arena(module)):
        compiled = torch.compile(
            lambda tokens, by: (module(tokens) * by).sum(), backend="inductor", dynamic=False
        )
        for k, (tokens, _) in enumerate(data):
            by = normal(4, 16, 12, seed=k).to(device)
            compiled(tokens, by).backward()
            encoder_backward(*want, by, tokens)
        got = arena.named_parameters()
        same_both((got["wte.weight"].grad, got["wpe.weight"].grad), want)
    torch._dynamo.reset()


# ---- other people's models -----------------------------------------------------------------------


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_model_of_transformers_trains_with_deterministic_embeddings(device):
    transformers = pytest.importorskip(
        "transformers", reason="transformers, of the extra `test`, is not installed"
    )
    torch.manual_seed(0)
    sizes = dict(vocab_size=29, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    plain = transformers.GPT2LMHeadModel(config).to(device)
    names = ["transformer.wte", "transformer.wpe"]
    mine, ((x, _),) = copy.deepcopy(plain), micros(1, device)
    weights = {name: p for name, p in mine.named_parameters()}
    assert ga.deterministic_embeddings(mine) == names and ga.deterministic_embeddings(mine) == [], (
        "the second time there is nothing left to do"
    )
    assert all(type(mine.get_submodule(name)) is ga.Embedding for name in names) and list(
        mine.state_dict()
    ) == list(plain.state_dict())
    assert all(p is weights[name] for name, p in mine.named_parameters()), "a weight was replaced"
    for model in (plain, mine):
        model(input_ids=x, labels=x).loss.backward()
    assert_close(
        {name: p.grad for name, p in mine.named_parameters()},
        {name: p.grad for name, p in plain.named_parameters()},
        "gradient",
        1e-5,
    )


@pytest.mark.parametrize(
    "how, message",
    [({"max_norm": 1.0}, "b.0 has max_norm=1.0"), ({"sparse": True}, "b.0 has sparse=True")],
)
def test_embeddings_that_cannot_be_deterministic_are_refused_and_nothing_has_changed(how, message):
    model = nn.ModuleDict(
        {
            "a": nn.Embedding(4, 4),
            "b": nn.Sequential(nn.Embedding(4, 4, **how)),
            "c": nn.Embedding(4, 4),
        }
    )
    with pytest.raises(ArgumentError, match=f"{message}: .* expected a plain nn.Embedding"):
        ga.deterministic_embeddings(model)
    assert [type(part) for part in model.modules() if isinstance(part, nn.Embedding)] == [
        nn.Embedding
    ] * 3 and not list(model.buffers())
    with pytest.raises(
        ArgumentError, match=f"{message.removeprefix('b.0 has ')}: .*keep torch.nn.Embedding"
    ):
        ga.Embedding(4, 4, **how)


def test_a_class_of_its_own_stays_and_is_named():
    class Scaled(nn.Embedding):
        def forward(self, tokens):
            return 2 * super().forward(tokens)

    model = nn.ModuleDict({"own": Scaled(4, 4), "plain": nn.Embedding(4, 4)})
    with pytest.warns(UserWarning, match=r"left as they are.*own \(Scaled\)"):
        assert ga.deterministic_embeddings(model) == ["plain"]
    assert type(model["own"]) is Scaled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ArgumentError, match="make a ga.Embedding instead"):
            ga.deterministic_embeddings(nn.Embedding(3, 3))


# ---- bad input -----------------------------------------------------------------------------------


def good():
    """Arguments of encoder_backward that fit: V = 5, C = 4, tokens (2, 3)."""
    return {
        "dwte": torch.ones(5, 4),
        "dwpe": torch.ones(6, 4),
        "dout": normal(2, 3, 4),
        "tokens": torch.tensor([[0, 1, 2], [2, 2, 4]]),
    }


REFUSED = {
    "dwte int": (
        {"dwte": torch.ones(5, 4, dtype=torch.int32)},
        r"dwte is torch\.int32; expected torch\.float32, torch\.bfloat16 or torch\.float16",
    ),
    "dout sparse": ({"dout": torch.zeros(2, 3, 4).to_sparse()}, "dout is torch.sparse_coo"),
    "tokens a list": (
        {"tokens": [[0, 1, 2], [2, 2, 4]]},
        "tokens is list; expected a dense torch tensor",
    ),
    "tokens fp32": (
        {"tokens": torch.zeros(2, 3)},
        r"tokens are torch\.float32; expected a torch\.int64 or torch\.int32",
    ),
    "dwte elsewhere": (
        {"dwte": torch.ones(5, 4, device="meta")},
        "dwte is on meta, tokens on cpu; expected one device",
    ),
    "dout shape": (
        {"dout": torch.zeros(3, 2, 4)},
        r"dout has shape \(3, 2, 4\); expected \(2, 3, 'C'\)",
    ),
    "T longer than wpe": (
        {"dwpe": torch.ones(2, 4)},
        r"dwpe has shape \(2, 4\); expected \(at least 3, 4\)",
    ),
    "dwte strides": (
        {"dwte": torch.ones(4, 5).t()},
        r"dwte has shape \(5, 4\) with strides \(1, 5\); expected a contiguous tensor",
    ),
    "token too large": (
        {"tokens": torch.tensor([[0, 1, 2], [2, 5, 4]])},
        r"token 5 at \(1, 1\) of tokens \(2, 3\) is out of range; expected 0 to 4",
    ),
    "no position": (
        {"tokens": torch.tensor(3), "dout": torch.ones(4)},
        r"tokens have shape \(\); expected \(\.\.\., T\)",
    ),
    "dwte requires grad": ({"dwte": torch.ones(5, 4, requires_grad=True)}, "dwte requires grad"),
    "segments of others": (
        {"segments": reference_segments(torch.tensor([1, 2]), 5)},
        "segments are of 2 tokens out of 5, .* left out.*;"
        " expected those of these 6 tokens out of 5",
    ),
}


@pytest.mark.parametrize("device", ["cpu", "simt"], indirect=True)
def test_bad_arguments_are_named_and_nothing_has_changed(device):
    # One test: of many the fast set would take eight.
    for case, (changes, message) in REFUSED.items():
        print(case)
        how = {**good(), **changes}
        before = {
            name: t.clone()
            for name, t in how.items()
            if isinstance(t, torch.Tensor) and not t.is_meta
        }
        # Checked: what is not refused must not write anywhere either.
        with ga.checked(), pytest.raises(ArgumentError, match=message):
            encoder_backward(**how)
        for name, t in before.items():
            assert torch.equal(how[name].to_dense(), t.to_dense()), f"{case}: {name} was changed"


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda m: m(torch.zeros(2, 5, dtype=torch.int64)),
            r"tokens have shape \(2, 5\); expected \(\.\.\., T\) with T up to 4",
        ),
        (
            lambda m: m(torch.zeros(2, 3, dtype=torch.int64, device="meta")),
            "tokens are on meta, wte on cpu; expected one device",
        ),
        (
            lambda m: m(torch.tensor([[0, 9]])),
            r"token 9 at \(0, 1\) of tokens \(1, 2\) is out of range; expected 0 to 8",
        ),
        (lambda m: m.wte(torch.tensor(-1)), r"token -1 at \(\) of tokens \(\) is out of range"),
        (
            lambda m: (
                m.half()
                and setattr(m.wpe, "weight", nn.Parameter(m.wpe.weight.float()))
                or m(torch.tensor([1]))
            ),
            r"wpe is torch\.float32, wte torch\.float16; expected one dtype",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "simt"], indirect=True)
def test_a_module_names_bad_input(device, call, message):
    module = ga.nn.Encoder(9, 4, 4)
    with pytest.raises(ArgumentError, match=message):
        call(module)
    assert module.wte.invalid_tokens() is None and module.wte.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_the_device_path_masks_counts_and_names_tokens_out_of_range(device, dtype):
    """The operation itself, as a graph or a GPU runs it: nobody has looked at the tokens before."""
    module = ga.nn.Encoder(9, 6, 8, device=device)
    kept = tokens = torch.tensor([[0, 3, 8, 1], [1, -1, 9, 5], [2, 2, 2, -(2**31)]], dtype=dtype)
    if dtype == torch.int64:
        tokens = torch.where(tokens == 9, 2**33 + 1, tokens)
    assert module.wte.invalid_tokens() is None
    with pytest.raises(ArgumentError) if device == "cpu" else contextlib.nullcontext():
        module(tokens.to(device))
    wrong, before = (tokens < 0) | (tokens > 8), module.wte.invalid[0].item()
    out, found = torch.ops.gpuaccel.encoder_forward(
        tokens.to(device), module.wte.weight, module.wpe.weight, module.wte.invalid, -1, True
    )
    want = (
        module.wte.weight.cpu()[torch.where(wrong, 0, kept.long())] + module.wpe.weight.cpu()[:4]
    ).detach()
    want[wrong] = math.nan
    same(out.detach().cpu(), want)
    same(found.cpu(), reference_segments(tokens, 9).buffer)
    seen = module.wte.invalid_tokens()

    def named(seen, tokens):
        return tokens[seen["position"]].item() == seen["token"] and not 0 <= seen["token"] < 9

    assert seen["count"] == before + 3 and named(seen, tokens)
    # Of a later batch they are counted, and the one of the first batch stays named.
    torch.ops.gpuaccel.encoder_forward(
        tokens.flip(0).to(device), module.wte.weight, None, module.wte.invalid, -1, False
    )
    seen = module.wte.invalid_tokens()
    assert seen["count"] == before + 6 and named(seen, tokens), seen
    fresh = ga.Embedding(9, 6, device=device)
    torch.ops.gpuaccel.encoder_forward(
        torch.tensor(2**31 - 1, dtype=dtype, device=device),
        fresh.weight,
        None,
        fresh.invalid,
        -1,
        False,
    )
    assert fresh.invalid_tokens() == {"count": 1, "token": 2**31 - 1, "position": (0, 0)}
    dwte = torch.zeros(9, 6, device=device)
    torch.ops.gpuaccel.encoder_backward_(dwte, torch.ones(3, 4, 6, device=device), found, False)
    assert (
        dwte[0].isnan().all()
        and dwte[1:, 0].tolist() == torch.bincount(tokens[~wrong].long(), minlength=9)[1:].tolist()
    )


@pytest.mark.parametrize("replay", ["graph", "eager"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_step_with_a_token_out_of_range_is_skipped_and_named_at_the_next_read(device, replay):
    if device == "cpu" and replay == "eager":
        with (
            TrainStep(model := Model(), loss_fn=loss_fn) as step,
            pytest.raises(ArgumentError, match=r"token 29 at \(1, 2\)"),
        ):
            bad = micros(1)[0]
            bad[0][1, 2] = 29
            before = [p.clone() for p in model.parameters()]
            step(bad)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before)), (
            "at once, with nothing changed"
        )
        return
    model = Model().to(device)
    opt = AdamW(Arena(model), lr=1e-2)
    step = TrainStep(
        model,
        opt,
        loss_fn,
        replay=ga.training.Replay(policy="require") if replay == "graph" else "eager",
    )
    data = micros(4, device)
    step(data[0])
    before = [p.detach().clone() for p in model.parameters()]
    bad = tuple(t.clone() for t in data[1])
    bad[0][1, 2], bad[0][3, 3] = 29, -3
    out = step(bad)
    assert not out.finite and out.loss.isnan() and int(opt.skipped) == 1
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before)), (
        "weights of a skipped step have changed"
    )
    found = model.embedding.wte.invalid_tokens()
    assert found in (
        {"count": 2, "token": token, "position": at} for token, at in ((29, (1, 2)), (-3, (3, 3)))
    ), found  # whichever was first
    assert opt.last_skip()["invalid_tokens"] == {"embedding.wte": found}
    for good_ in data[2:]:
        assert step(good_).finite.all()
    assert int(opt.skipped) == 1 and not any(
        torch.equal(p, q) for p, q in zip(model.parameters(), before)
    )
    step.close()


@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_a_capture_with_a_token_out_of_range_is_refused_on_the_host(device):
    model, bad = Model(), micros(1)[0]
    bad[0][0, 0] = -1
    with TrainStep(model, loss_fn=loss_fn, replay=ga.training.Replay(policy="require")) as step:
        with pytest.raises((ArgumentError, CaptureError), match=r"token -1 at \(0, 0\)"):
            step(bad)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(
    "C, vocab, shape",
    [
        (768, 50257, (64, 1024)),
        (1600, 256, (64, 1024)),
        (4096, 128256, (4, 1024)),
        (766, 50257, (512, 1024)),
    ],
)
def test_gpu_sums_at_full_size_are_those_of_float64(device, C, vocab, shape):
    old, dout = (
        [torch.randn(n, C, device=device) for n in (vocab, 1024)],
        torch.randn(*shape, C, device=device).bfloat16(),
    )
    for kind in KINDS[:3]:
        tokens = tokens_of(kind, shape, vocab).to(device)
        got = [t.clone() for t in old]
        encoder_backward(*got, dout, tokens)
        near_both(got, old, dout, tokens, kind)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_nothing_waits_for_the_device(device):
    model, data = Model().to(device), micros(2, device)
    tokens, dout, sums = (
        tokens_of("zipf").to(device),
        normal(B, T, 6).to(device),
        [t.to(device) for t in sums_of(6)],
    )
    with products_add(Arena(model)):
        for k in range(2):  # the first compiles and loads
            with contextlib.nullcontext() if k == 0 else no_waiting():
                for micro in data:
                    model(micro[0]).sum().backward()
                encoder_backward(*sums, dout, tokens)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_an_encoder_trains_alike_twice_in_deterministic_mode(device):
    """The widths of GPT-2, a tied head, 10 steps: every weight."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        head = nn.Linear(768, 50304, bias=False)
        model = nn.Sequential(ga.nn.Encoder(50304, 768, 1024), nn.LayerNorm(768), head)
        head.weight = model[0].wte.weight
        model.to(device, BF16)
        data = [
            drawn("zipf", 2 * 4 * 257, 50257, k).view(4, 2, 257)[:, 0].to(device) for k in range(10)
        ]
        with TrainStep(model, micro_batches=2, deterministic=True) as step:
            for x in data:
                step((x[:, :-1].contiguous(), x[:, 1:].contiguous()))
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, w in found[0].items():
        same(found[1][name], w, name)
