"""The arena: the layout of any module, views that survive copies and loads, release."""

import copy
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpuaccel.backends import use_backend
from gpuaccel.errors import ArgumentError
from gpuaccel.ops.accumulate import CHUNK
from gpuaccel.optim import AdamW, Products
from gpuaccel.optim.arena import Arena
from gpuaccel.optim.layout import lay_out
from gpuaccel.training import TrainStep
from gpuaccel.training.models import Transformer, preset

few = settings(max_examples=30, deadline=None)


class Part(nn.Module):
    """Parameters of given (shape, dtype, frozen)."""

    def __init__(self, rows):
        super().__init__()
        for i, (shape, dtype, frozen) in enumerate(rows):
            self.register_parameter(
                f"p{i}", nn.Parameter(torch.randn(shape).to(dtype), requires_grad=not frozen)
            )


SHAPE = st.sampled_from(
    [(), (1,), (0,), (3, 0), (7,), (5, 3), (CHUNK,), (CHUNK + 1,), (2, CHUNK - 1)]
)
ROW = st.tuples(SHAPE, st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())


@st.composite
def modules(draw):
    def part():
        return Part(draw(st.lists(ROW, max_size=3)))

    model = Part(draw(st.lists(ROW, max_size=2)) + [((2, 3), torch.float32, False)])
    kind = draw(st.sampled_from(["none", "list", "sequential", "deep", "two lists"]))
    items = [part() for _ in range(draw(st.integers(1, 3)))]
    if kind == "list":
        model.blocks = nn.ModuleList(items)
    elif kind == "sequential":
        model.blocks = nn.Sequential(*items)
    elif kind == "deep":
        model.inner = nn.Module()
        model.inner.layers = nn.ModuleList([nn.Sequential(*items), part()])
    elif kind == "two lists":
        model.first, model.second = nn.ModuleList(items), nn.ModuleList([part()])
    if draw(st.booleans()) and kind == "list" and items[0]._parameters:
        model.tied = items[0].p0  # one tensor, two names
    return model


def check_layout(segments, blocks, module):
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    assert [s.name for s in segments] == [n for n, _ in reversed(named)], (
        "not in reverse registration order, or not each tensor once"
    )
    offset = 0
    for s, (_, p) in zip(segments, reversed(named)):
        assert s.offset == offset and offset % CHUNK == 0, (
            f"{s.name} does not follow its neighbour on a chunk"
        )
        assert s.shape == p.shape
        assert s.numel == p.numel()
        assert 0 <= s.padded - s.numel < CHUNK
        assert s.padded % CHUNK == 0
        offset += s.padded
    assert (blocks[0].start, blocks[0].first, blocks[-1].stop, blocks[-1].last) == (
        0,
        0,
        offset,
        len(segments),
    )
    for a, b in zip(blocks, blocks[1:]):
        assert (a.stop, a.last) == (b.start, b.first), f"a gap between {a.name} and {b.name}"
    for i, b in enumerate(blocks):
        assert b.last > b.first and all(s.block == i for s in segments[b.first : b.last])


def check_views(arena):
    buffers = {torch.float32: arena.weights, torch.bfloat16: arena.bf16_weights}
    for p, owner, view, s in zip(
        arena.module_parameters, arena.masters, arena.gradients.views, arena.segments
    ):
        if not s.numel:
            continue
        home = buffers[p.dtype]
        assert p.data_ptr() == home.data_ptr() + s.offset * home.element_size(), (
            f"{s.name} is no view of its buffer"
        )
        assert owner.dtype == torch.float32
        assert owner.data_ptr() == arena.weights.data_ptr() + 4 * s.offset
        assert (
            view.data_ptr() == arena.grads.data_ptr() + 4 * s.offset and view.data_ptr() % 16 == 0
        )
        assert owner.is_leaf
        assert p.is_leaf
        assert p.stride() == s.stride
        assert view.shape == p.shape == owner.shape


@few
@given(model=modules())
def test_layout_and_views_of_any_module(model):
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    arena = Arena(model)
    check_layout(arena.segments, arena.blocks, model)
    check_views(arena)
    assert {n for n, _ in model.named_parameters()} == set(before)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.dtype == before[name].dtype, (
            f"{name} changed its value"
        )
        assert not p.requires_grad or p in set(arena.module_parameters)
    assert set(arena.named_master()) == {
        s.name for s, p in zip(arena.segments, arena.module_parameters) if p.dtype == torch.bfloat16
    }
    assert list(arena.named_parameters()) == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]
    for i, s in enumerate(arena.segments):  # the table the kernel reads
        rows = arena.chunk_table[arena.first_chunk[i] : arena.first_chunk[i + 1]]
        assert (
            rows[:, 0].eq(i).all() and rows[:, 1].sum() == s.numel and (rows[:, 1] <= CHUNK).all()
        )
        assert (rows[:, 2] * CHUNK).tolist() == list(range(0, s.numel, CHUNK))
        assert (rows[:, 3] * CHUNK).tolist() == list(range(s.offset, s.offset + s.padded, CHUNK))
    arena.release()


def test_a_block_is_an_item_of_the_outermost_list():
    model = Transformer(preset("tiny", layers=3))
    arena = Arena(model)
    blocks = [(b.name, b.last - b.first) for b in arena.blocks]
    assert blocks == [
        ("lm_head.weight .. final_norm.weight", 2),
        *((f"blocks.{i}", 9) for i in (2, 1, 0)),
        ("embedding.weight", 1),
    ]
    assert [s.name for s in arena.segments if s.embedding] == ["embedding.weight"]
    norms = {n for n, _ in model.named_parameters() if "norm" in n}
    assert {s.name for s in arena.segments if not s.decay} == norms


def test_the_layout_of_a_model_without_memory():
    with torch.device("meta"):
        model = Transformer(preset("llama-350m"))
    segments, blocks = lay_out(model)
    check_layout(segments, blocks, model)
    assert sum(s.numel for s in segments if not s.embedding) == 398_509_056


def test_parameter_groups_carry_decay_and_learning_rate():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    arena = Arena(model, lr_scale=lambda name, p: 0.1 if name.startswith("1") else 1.0)
    groups = arena.parameter_groups(weight_decay=0.3, lr=2.0)
    facts = [(g["weight_decay"], g["lr"], len(g["params"])) for g in groups]
    assert facts == [(0.3, 2.0, 1), (0.0, 2.0, 1), (0.0, 0.2, 2)]
    groups = arena.parameter_groups()
    assert sum(len(g["params"]) for g in groups) == 4 and "lr" not in groups[0]
    arena.release()
    arena = Arena(model, decay=lambda name, p: name == "0.bias")
    assert [s.decay for s in arena.segments] == [False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_module_stands_alone_and_an_arena_has_none(dtype):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    arena = Arena(model)
    plain = copy.deepcopy(model)
    assert Arena.of(model) is arena and Arena.of(plain) is None
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    assert model[0].weight.any()
    sums = arena.grads.clone()
    plain(torch.ones(1, 3, dtype=dtype)).sum().backward()
    assert torch.equal(arena.grads, sums) and not any(arena.gradients.received())
    for thing in (arena, AdamW(arena)):
        with pytest.raises(ArgumentError, match="is neither copied nor pickled"):
            copy.deepcopy(thing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_loads_in_place_and_masters_follow(dtype):
    model, other = nn.Linear(5, 3).to(dtype), nn.Linear(5, 3).to(dtype)
    arena = Arena(model)
    assert list(model.state_dict()) == ["weight", "bias"]
    model.load_state_dict(other.state_dict())
    check_views(arena)
    arena.check()
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(arena.named_parameters()["weight"], other.weight.float())
    # Less than half a bf16 step: publish and reload keep it.
    with torch.no_grad():
        arena.named_parameters()["bias"].add_(2**-14)
    before = arena.named_parameters()["bias"].clone()
    arena.publish()
    model.load_state_dict(model.state_dict())
    assert torch.equal(arena.named_parameters()["bias"], before), (
        "a master lost bits to its own bf16 copy"
    )


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.bfloat16(),
        lambda m: setattr(m[0].weight, "data", torch.zeros(5, 3)),
        lambda m: setattr(m[0].weight, "data", torch.zeros(3, 5, dtype=torch.float64)),
        lambda m: setattr(m[0].bias, "data", m[1].bias.data),
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 5))),
        lambda m: m[0].__delattr__("weight"),
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
    ],
    ids=["to(dtype)", "bfloat16", "shape", "dtype", "tied", "setattr", "del", "assign"],
)
def test_a_parameter_that_left_the_arena_is_named(move):
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(5, 3))
    arena = Arena(model)
    arena.check()
    move(model)
    with pytest.raises(
        ArgumentError,
        match=r"parameter [01]\.(weight|bias) is no longer a view of the arena.*release",
    ):
        arena.check()


def master_of(model):
    return Arena.of(model).named_parameters()["0.weight"]


MOVES = {
    # The index is another device's to torch, which copies.
    "to(cpu:0)": lambda model: model.to("cpu:0"),
    ".data": lambda model: setattr(model[0].weight, "data", torch.ones(3, 5).to(model[0].weight)),
    "a copy": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "a master": lambda model: setattr(master_of(model), "data", torch.ones(3, 5)),
}
# What it comes to: an edit in place, or nothing.
IN_PLACE = {
    ".data": lambda model: nn.init.ones_(model[0].weight),
    "a master": lambda model: nn.init.ones_(master_of(model)),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("optimizer", ["ga", "torch"])
@pytest.mark.parametrize("loop", ["launched", "eager", "graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_were_put_elsewhere_count_and_lie_in_the_arena_again(
    dtype, loop, optimizer, move
):
    """As `accelerator.prepare` does on a CPU with several processes: it calls to("cpu:0")."""

    def loss_fn(model, x):
        return model(x).float().square().mean()

    def trained(move):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).to(dtype)
        arena = Arena(model)
        opt = AdamW(arena, lr=0.1)
        if optimizer == "torch":
            opt = torch.optim.AdamW(arena.parameter_groups(0.01), lr=0.1)
        step = None if loop == "launched" else TrainStep(model, opt, loss_fn, replay=loop)
        for k in range(4):
            if k in (0, 2):
                move(model)
            x = torch.ones(2, 5, dtype=dtype) * k
            if step is None:
                loss_fn(model, x).backward()
                opt.step(), opt.zero_grad()
            else:
                step(x)
        arena.check()
        check_views(arena)
        return [p.detach().clone() for p in (*model.parameters(), *arena.parameters())]

    in_place = IN_PLACE.get(move, lambda model: None)
    with use_backend("simt" if loop == "graph" else "torch"):
        for p, q in zip(trained(MOVES[move]), trained(in_place), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_that_move_keep_their_values_and_their_views(dtype):
    model = Transformer(preset("tiny", layers=1)).to(dtype)
    arena = Arena(model)
    model(torch.arange(6)[None]).float().sum().backward()
    for name in ("grads", "weights") + ("bf16_weights",) * (dtype == torch.bfloat16):
        before, home = getattr(arena, name).clone(), torch.empty_like(getattr(arena, name))
        arena.move(name, home)
        assert torch.equal(getattr(arena, name), before)
        assert getattr(arena, name).data_ptr() == home.data_ptr()
    check_views(arena)
    arena.check()
    for p, view in zip(arena.module_parameters, arena.gradients.views):
        assert p.grad is view
    sums = [p.grad.clone() for p in arena.module_parameters]
    model(torch.arange(6)[None]).float().sum().backward()
    for p, view, before in zip(arena.module_parameters, arena.gradients.views, sums):
        assert p.grad is view and torch.equal(view, 2 * before)
    with pytest.raises(ArgumentError, match="no longer a view"):
        moved = Arena(nn.Linear(5, 3).to(dtype))
        moved.module.to(torch.float64)
        moved.move("grads", torch.empty_like(moved.grads))
    Products(arena)
    with pytest.raises(ArgumentError, match="while a TrainStep uses it"):
        arena.move("grads", torch.empty_like(arena.grads))


@pytest.mark.parametrize("adding", ["autograd", "products"])
def test_squares_are_kept_until_a_gradient_changes(adding):
    model = nn.Sequential(nn.Linear(5, 3))
    arena = Arena(model)
    products = Products(arena) if adding == "products" else None
    squares = torch.ones(2, dtype=torch.float64)

    def backward():
        if products is not None:
            products.begin_backward()
        model(torch.ones(2, 5)).sum().backward()

    assert arena.gradients.kept_squares() is None
    for change in (
        backward,
        arena.gradients.clear,
        backward,
        lambda: arena.grads.mul_(2),
        lambda: model[0].weight.grad.add_(1),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda: setattr(model[0].bias, "grad", None),
        lambda: (setattr(model[0].bias, "grad", torch.ones(3)), arena.gradients.collect()),
    ):
        arena.gradients.keep_squares(squares)
        assert arena.gradients.kept_squares()[0] is squares
        arena.gradients.collect()
        assert arena.gradients.kept_squares()[0] is squares
        change()
        assert arena.gradients.kept_squares() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_release_gives_ordinary_parameters_back(dtype):
    model = nn.Linear(5, 3).to(dtype)
    weight, before = model.weight, model.weight.detach().clone()
    arena = Arena(model)
    model(torch.ones(1, 5, dtype=dtype)).sum().backward()
    assert arena.named_parameters()["weight"].grad.eq(1).all()
    # Not the slice.
    model.bias.grad = torch.full((3,), 3.0)
    arena.release()
    arena.release()  # twice does nothing
    assert model.bias.grad.dtype == dtype and model.bias.grad.eq(3).all()
    assert model.weight is weight and torch.equal(weight, before) and Arena.of(model) is None
    for t, buffer in ((weight, arena.weights), (weight.grad, arena.grads)):
        start = buffer.data_ptr()
        assert t.data_ptr() not in range(start, start + buffer.nbytes), "still a view of the arena"
    for n in (2, 3):
        model(torch.ones(1, 5, dtype=dtype)).sum().backward()
        assert weight.grad.eq(n).all() and weight.grad.dtype == dtype
    with pytest.raises(ArgumentError, match="no longer a view"):
        arena.check()
    model.to(torch.float64)
    Arena(model.float()).check()


def sparse_parameter():
    module = nn.Module()
    module.w = nn.Parameter(torch.eye(3).to_sparse())
    return module


def overlapping():
    module, base = nn.Module(), torch.zeros(10)
    module.a, module.b = nn.Parameter(base[:6]), nn.Parameter(base[4:])
    return module


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: nn.ReLU(), "ReLU has no trainable parameter"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "Linear has no trainable parameter"),
        (
            lambda: nn.Linear(2, 2).half(),
            "weight is float16; expected float32 or bfloat16.*GradScaler",
        ),
        (lambda: nn.Linear(2, 2).double(), "weight is torch.float64; expected float32 or bfloat16"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "weight is torch.complex64"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True)),
            r"1 makes sparse gradients \(sparse=True\)",
        ),
        (sparse_parameter, "w has layout torch.sparse_coo"),
        (overlapping, "a and b overlap in memory"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), r"1\.weight is"),
    ],
)
def test_an_arena_refuses_and_changes_nothing(make, message):
    def addresses(module):
        dense = [p.layout == torch.strided and not p.is_meta for p in module.parameters()]
        return [
            (id(p), p.data_ptr() if has_data else 0)
            for p, has_data in zip(module.parameters(), dense)
        ]

    module = make()
    before = addresses(module)
    with pytest.raises(ArgumentError, match=message):
        Arena(module)
    assert addresses(module) == before
    assert Arena.of(module) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_kernels_wrote_are_another_version(dtype):
    """A graph that saved a weight must not be run backward behind a collective that wrote it."""
    model = nn.Linear(2, 2).to(dtype)
    arena = Arena(model)
    losses = [t.square().sum() for t in (*model.parameters(), *arena.masters)]
    # Masters need not round to their parameters, as with stochastic rounding.
    arena.weights.add_(1.0)
    before = arena.weights.clone()
    arena.weights_written()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    arena.adopt()
    assert torch.equal(arena.weights, before), "written weights count as edited ones"


def test_parameters_that_meet_in_memory_do_not_overlap():
    module, base = nn.Module(), torch.arange(10.0)
    module.a, module.b = nn.Parameter(base[:4]), nn.Parameter(base[4:])
    check_views(Arena(module))
    assert torch.equal(torch.cat([module.a, module.b]), base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_arena_takes_the_place_of_the_first(dtype, caplog):
    """Weights and gradients stay; an arena of a part has its parameters alone."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)
    first = Arena(model)
    model(torch.ones(1, 2, dtype=dtype)).sum().backward()
    before = [(p.detach().clone(), p.grad.to(dtype)) for p in model.parameters()]
    for again in (model, model[1]):
        second = Arena(again)
        assert first.released and Arena.of(again) is second
        check_views(second)
        first = second
    assert all(
        torch.equal(p, weight) and torch.equal(p.grad.to(dtype), grad)
        for p, (weight, grad) in zip(model.parameters(), before)
    )
    assert [r.message for r in caplog.records] == [
        "a new Arena of Sequential takes the place of the first",
        "a new Arena of Linear takes the place of the first",
    ]


def test_an_arena_of_empty_tensors_only():
    module = nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))])
    arena = Arena(module)
    assert arena.numel == 0
    sum(p.sum() for p in module).backward()
    torch.optim.SGD(arena.parameters(), lr=1.0).step()


def test_an_arena_that_nobody_holds_leaves_no_hook_on_its_parameters():
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(Arena(model).parameters(), lr=0.1)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    opt.step()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        # Without a bias, whose gradient the norm would make rounding alone.
        self.first = nn.Conv2d(3, 5, 3, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.second = nn.Conv2d(5, 4, 3)
        self.volume = nn.Conv3d(2, 3, 2)

    def forward(self, x):
        y = self.second(self.norm(self.first(x)).relu())
        return y.mean() + self.volume(y.unflatten(1, (2, 2))).square().mean()


def convolutions(dtype, memory_formats=True):
    torch.manual_seed(0)
    model = Convolutions().to(dtype)
    if memory_formats:
        for layer in (model.first, model.second):
            layer.to(memory_format=torch.channels_last)
        model.volume.to(memory_format=torch.channels_last_3d)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_channels_last_weight_keeps_its_memory_format_and_gives_it_back(dtype):
    model = convolutions(dtype)
    strides = {name: p.stride() for name, p in model.named_parameters()}
    assert not model.first.weight.is_contiguous() and not model.volume.weight.is_contiguous()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    arena = Arena(model)
    check_views(arena)
    for segment, p, master, view in zip(
        arena.segments, arena.module_parameters, arena.masters, arena.gradients.views
    ):
        assert {t.stride() for t in (p, master, view)} == {strides[segment.name]}, segment.name
        assert torch.equal(p, values[segment.name])
    arena.release()
    assert {name: p.stride() for name, p in model.named_parameters()} == strides
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("optimizer", ["ga.AdamW", "torch.optim.AdamW", "torch.optim.SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_weights_train_as_contiguous_ones(dtype, optimizer):
    """As an arena of contiguous weights, up to the order of the convolutions' sums."""
    random = torch.Generator().manual_seed(1)
    data = torch.randn(6, 2, 3, 9, 9, generator=random).to(dtype)
    results = []
    for memory_formats in (False, True):
        model = convolutions(dtype, memory_formats)
        arena = Arena(model)
        if optimizer == "ga.AdamW":
            opt = AdamW(arena, lr=1e-2, max_norm=0.5)
        else:
            opt = getattr(torch.optim, optimizer.rpartition(".")[2])(arena.parameters(), lr=1e-2)
        for x in data:
            x = x.to(memory_format=torch.channels_last) if memory_formats else x
            model(x).backward()
            model(x).backward()
            opt.step()
            opt.zero_grad()
        results.append({name: p.detach().clone() for name, p in arena.named_parameters().items()})
        arena.release()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, p in results[0].items():
        torch.testing.assert_close(
            results[1][name], p, rtol=tolerance, atol=tolerance, check_stride=False
        )
    assert results[1]["first.weight"].stride() != results[0]["first.weight"].stride()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["released", "collected"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW])
def test_masters_without_an_arena_are_refused_and_nothing_changes(kind, end):
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    arena = Arena(model)
    opt = kind(arena.parameters(), lr=0.1)
    x = torch.randn(3, 8).bfloat16()
    model(x).square().sum().backward()
    opt.step()
    before = model.weight.detach().clone()
    if end == "released":
        arena.release()
    del arena
    gc.collect()
    model(x).square().sum().backward()
    with pytest.raises(ArgumentError, match="keep the arena in a variable"):
        opt.step()
    assert torch.equal(model.weight, before)
    opt.state_dict()


def test_release_does_not_stop_at_a_sparse_gradient():
    model = nn.Linear(4, 4)
    arena = Arena(model)
    model.weight.grad = torch.eye(4).to_sparse()
    arena.release()
    assert arena.released and torch.equal(model.weight.grad.to_dense(), torch.eye(4))


def test_a_slice_that_was_placed_elsewhere_gets_its_memory_again():
    model = nn.Linear(4, 4)
    arena = Arena(model)
    model(torch.ones(2, 4)).sum().backward()
    other = torch.zeros(4)
    before = arena.gradients.place({arena.number_of(model.bias): other})
    model.bias.grad.data = torch.full((4,), 5.0)
    arena.gradients.collect()
    assert model.bias.grad.data_ptr() == other.data_ptr() and other.eq(5).all()
    arena.gradients.place(before)
    assert model.bias.grad.data_ptr() == arena.gradients.views[0].data_ptr()


def test_a_bf16_weight_that_has_got_other_memory_is_the_weight():
    """`.data =` has no version: the master follows, unless it rounds to the weight already."""
    model = nn.Linear(4, 4).bfloat16()
    arena = Arena(model)
    for master in arena.parameters():
        master.data += 2**-14
    bias = arena.masters[arena.number_of(model.bias)].clone()
    model.weight.data = torch.full((4, 4), 3.0, dtype=torch.bfloat16)
    arena.check()
    master = arena.masters[arena.number_of(model.weight)]
    assert model.weight.eq(3).all() and master.eq(3).all()
    assert torch.equal(arena.masters[arena.number_of(model.bias)], bias)


def test_every_sum_is_hidden_while_it_is_aside():
    """Also one that a user shows by another tensor; an inner block leaves it hidden."""
    model = nn.Linear(4, 4)
    arena = Arena(model)
    model(torch.ones(2, 4)).sum().backward()
    model.bias.grad = arena.gradients.views[arena.number_of(model.bias)].view(4)
    with arena.gradients.aside():
        assert model.weight.grad is None and model.bias.grad is None
        with arena.gradients.aside():
            model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad is None and model.bias.grad is None
        assert arena.gradients.received() == [True, True]
    assert model.weight.grad.eq(4).all() and model.bias.grad.eq(4).all()
