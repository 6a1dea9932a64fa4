"""A tape repeats what a CUDA graph would repeat: operations on the same memory, numbers as they
were, and none of Python's work."""

import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import get_rng_state, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import gpuaccel as ga
from gpuaccel.compiler import launch
from gpuaccel.errors import CaptureError
from gpuaccel.graphs.tape import Tape


@pytest.fixture(autouse=True)
def simt():
    with ga.use_backend("simt"):
        yield


def taped(fn):
    tape = Tape()
    return tape, tape.record(fn)


def follows(fn, *inputs, times=3, equal=torch.equal):
    """Replays of fn(*inputs) on other inputs give what fn gives on them."""
    mine = [t.clone() for t in inputs]
    tape, result = taped(lambda: fn(*mine))
    for k in range(times):
        for t in mine:
            t.copy_(torch.randn(t.shape) if t.is_floating_point() else torch.randint(0, 5, t.shape))
        want = fn(*[t.clone() for t in mine])
        tape.replay()
        for got, wanted in zip(
            result if isinstance(result, (tuple, list)) else [result],
            want if isinstance(want, (tuple, list)) else [want],
        ):
            assert got.shape == wanted.shape and equal(got, wanted), (
                f"replay {k}: {got} is not {wanted}"
            )
    return tape


# ---- the same memory ----


def test_recording_runs_the_function_and_a_replay_repeats_it_on_the_same_memory():
    x = torch.ones(3)
    tape, y = taped(lambda: (x + 1) * 2)
    place = y.data_ptr()
    assert y.tolist() == [4, 4, 4]
    x.fill_(5)
    assert y.tolist() == [4, 4, 4], "nothing happens before the replay"
    tape.replay()
    assert y.tolist() == [12, 12, 12] and y.data_ptr() == place
    x.fill_(0)
    tape.replay(), tape.replay()
    assert y.tolist() == [2, 2, 2], "repeating twice is as repeating once, where nothing is kept"


def test_views_lead_to_the_memory_that_they_are_views_of():
    base = torch.zeros(4, 4)

    def fn():
        base[1:3].add_(1)  # a slice
        base.t()[0].fill_(7)  # a column
        base.view(-1)[::5].mul_(2)  # the diagonal
        return base[2]

    tape, row = taped(fn)
    want = torch.zeros(4, 4)
    for k in range(3):
        if k:
            tape.replay()
        want[1:3] += 1
        want[:, 0] = 7
        want.view(-1)[::5] *= 2
        assert torch.equal(base, want) and torch.equal(row, want[2]), f"after {k} replays"
    assert row.data_ptr() == base[2].data_ptr()


def follows_a_swap(x):
    """Its memory becomes another's."""
    y = x + 1
    y.mul_(2)
    y.data = x * 3
    return y.add_(1)


IN_PLACE_VIEWS = {
    "unsqueeze_": lambda x: (x + 1).unsqueeze_(0).mul_(2),
    "squeeze_": lambda x: (x + 1)[:1].squeeze_(0) * x[0],
    "transpose_": lambda x: (x + 1).transpose_(0, 1) @ x,
    "t_": lambda x: x.clone().t_().cumsum(0).t_(),
    "as_strided_": lambda x: (x + 1).as_strided_((2, 3), (1, 2), 4) * 2,
    "resize_": lambda x: (x + 1).resize_(2, 3).mul_(2),
    "to more memory": lambda x: (x + 1).resize_(20, 5)[:4].mul_(2),
    "set_": lambda x: (x + 1).set_(x * 2).add_(1),
    "data": follows_a_swap,
    "several": lambda x: (x + 1).unsqueeze_(0).transpose_(0, 2).mul_(2).squeeze_(2).sum(0),
    "the input": lambda x: x.transpose_(0, 1).mul_(2).transpose_(0, 1) + 1,
}


@pytest.mark.parametrize("how", IN_PLACE_VIEWS)
def test_operations_find_the_shapes_that_they_found_when_they_were_recorded(how):
    """Some operations change a tensor's shape in place, and its memory not."""
    follows(IN_PLACE_VIEWS[how], torch.randn(4, 5))


def with_zeros(x):
    y = x.clone()
    y[y > 0] = 0
    return y


RESULTS = {
    "given memory": lambda x: torch.add(x, 1, out=torch.empty(5, 5)),
    "two": lambda x: x.sort(dim=1),
    "named": lambda x: torch.max(x, dim=0),
    "column-major": torch.linalg.qr,
    "views": lambda x: x.split(2),
    "joined": lambda x: torch.cat([x, x.t()]),
    "product": lambda x: x @ x.t(),
    "composite": lambda x: F.layer_norm(x, (5,)),
    "another layout": lambda x: x.cumsum(0).t().contiguous(),
    "another dtype": lambda x: x.double(),
    "chosen": lambda x: torch.where(x > 0, x, -x),
    "indexed": lambda x: x.clone().index_put_((torch.tensor([0, 2]),), x[0]),
    "indexed by integers": lambda x: x[torch.tensor([3, 0, 3])],
    "indexed twice": lambda x: x[torch.tensor([[1], [4]]), torch.tensor([0, 2])],
    "indexed by what it computes": lambda x: x[x.argmax(0)],
    "a number where a mask is": with_zeros,
    "one value where a mask is": lambda x: x.clone().index_put_((x > 0,), torch.tensor(7.0)),
    "repeated to a known size": lambda x: x.repeat_interleave(
        torch.tensor([2, 0, 1, 0, 3]), 0, output_size=6
    ),
    "expanded": lambda x: x.expand(3, 5, 5).sum(0),
    "scattered": lambda x: torch.zeros(5).index_add_(0, torch.tensor([1, 1, 3]), x[0, :3]),
    "two numbers": torch.var_mean,
    "the input": lambda x: x.contiguous(),
    "nothing": lambda x: x[:0] + 1,
    "a view of a result": lambda x: (x * 10).view(25)[5:],
    # What is added must not be there the next time.
    "zeros of its own": lambda x: torch.zeros(()).add_(x.sum()),
    "a constant of its own": lambda x: torch.tensor(10.0).add_(x.sum()),
}


def test_every_kind_of_result_is_written_anew():
    """Several results, results in another layout or dtype, in given memory, views."""
    # One test: of many the fast set would take eight.
    for kind, fn in RESULTS.items():
        print(kind)
        follows(fn, torch.randn(5, 5))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("training", [True, False], ids=["forward and backward", "no gradients"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_recurrent_layer_is_repeated(kind, training, batch_first):
    """nn.LSTM returns a workspace for backward, and only while gradients are on. nn.GRU transposes
    its result in place where the batch comes first."""
    torch.manual_seed(0)
    layer = kind(4, 3, num_layers=2, batch_first=batch_first)

    def fn(x):
        with torch.set_grad_enabled(training):
            y, _ = layer(x)
            if not training:
                return y
            return [y.detach(), *torch.autograd.grad(y.square().sum(), layer.parameters())]

    follows(fn, torch.randn(5, 2, 4))


# ---- what freezes, what does not ----


def test_numbers_stay_as_they_were_and_pythons_work_is_not_repeated():
    x, rate, calls = torch.zeros(2), 0.5, []

    def fn():
        calls.append(None)
        if len(calls) > 1:
            raise AssertionError("Python ran again")
        return x.add_(torch.ones(2), alpha=rate)

    tape, _ = taped(fn)
    rate = 100.0
    tape.replay()
    assert x.tolist() == [1, 1] and len(calls) == 1
    there = torch.tensor(0.5)
    y = torch.zeros(2)
    tape, _ = taped(lambda: y.add_(torch.ones(2) * there))
    there.fill_(100.0)
    tape.replay()
    assert y.tolist() == [100.5, 100.5], "a number in a tensor is read each time"


def test_random_operations_draw_anew():
    """As many numbers as the function itself would draw, from where the generator stands."""

    def fn():
        return (
            torch.rand(50),
            F.dropout(torch.ones(50), 0.5),
            torch.zeros(50).normal_(),
            torch.randperm(50),
            torch.bernoulli(torch.full((50,), 0.5)),
        )

    torch.manual_seed(1)
    tape, got = taped(fn)
    first = [t.clone() for t in got]
    tape.replay()
    second = [t.clone() for t in got]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    for mine in (first, second):
        for a, b in zip(mine, fn()):
            assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state) and not any(map(torch.equal, first, second))


def forks(x):
    """Draws in a fork, and the same numbers after it."""
    with torch.random.fork_rng():
        forked = torch.rand(50)
    return forked, x * torch.rand(50)


def goes_back(x):
    """Draws the same numbers twice, with a state that it has copied."""
    state = get_rng_state().clone()
    first = x * torch.rand(50)
    torch.set_rng_state(state)
    return first, torch.rand(50)


def seeds(x):
    torch.rand(7)
    torch.manual_seed(3)
    return x * torch.rand(50), torch.rand(50)


def checkpoints(x):
    """Dropout's mask is drawn in forward, and again in backward."""
    x = x.clone().requires_grad_()
    y = checkpoint(nn.Sequential(nn.Dropout(0.5), nn.Tanh()), x, use_reentrant=False)
    y.sum().backward()
    return y.detach(), x.grad


def checkpoints_reentrantly(x):
    x = x.clone().requires_grad_()
    y = checkpoint(nn.Sequential(nn.Dropout(0.5), nn.Tanh()), x, use_reentrant=True)
    y.sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("fn", [forks, goes_back, seeds, checkpoints, checkpoints_reentrantly])
def test_the_random_state_that_a_function_sets_is_set_in_every_replay(fn):
    """Reading and setting it passes no dispatcher. The generator is left as the function does."""
    x = torch.randn(50)
    torch.manual_seed(1)
    tape, results = taped(lambda: fn(x))
    assert torch.random.default_generator is torch.default_generator
    got = [[t.clone() for t in results]]
    for _ in range(2):
        tape.replay()
        got.append([t.clone() for t in results])
    state = torch.get_rng_state()
    torch.manual_seed(1)
    for mine in got:
        assert all(map(torch.equal, mine, fn(x)))
    assert torch.equal(torch.get_rng_state(), state)


# ---- our kernels ----


def test_launches_of_our_kernels_are_recorded_with_their_tensors_and_frozen_numbers():
    scale = ga.compile("""extern "C" __global__ void scale(float* x, float by, int n) {
                              int i = blockIdx.x * blockDim.x + threadIdx.x;
                              if (i < n) x[i] *= by;
                          }""")
    x, by = torch.ones(100), 2.0

    def fn():
        scale[1, 128](x, by, 100)
        x.add_(1)
        scale[1, 128](x[50:], by, 50)

    tape, _ = taped(fn)
    by = 1000.0
    want = torch.ones(100)
    for k in range(3):
        if k:
            tape.replay()
        want = want * 2 + 1
        want[50:] *= 2
        assert torch.equal(x, want), f"after {k} replays"
    names = [name for name in tape.nodes() if name in ("scale", "add_")]
    assert names == ["scale", "add_", "scale"]


def test_an_operation_made_of_launches_is_one_step():
    """Else its launches would be repeated twice: in the operation, and by themselves. Launches
    after it are recorded again."""

    @torch.library.custom_op("gpuaccel_test::twice", mutates_args=("total",))
    def twice(total: torch.Tensor, fresh: torch.Tensor) -> None:
        ga.ops.accumulate_(total, fresh)
        ga.ops.accumulate_(total, fresh)

    total, fresh = torch.zeros(4096), torch.ones(4096)

    def fn():
        twice(total, fresh)
        ga.ops.accumulate_(total, fresh)

    tape, _ = taped(fn)
    tape.replay(), tape.replay()
    assert total.eq(9).all() and len(tape.steps) == 2


# ---- what is refused ----

VALUES = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "index": lambda x: [1, 2, 3][x[0].long()],
    "format": lambda x: f"{x[0]:.2f}",
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "np.asarray": np.asarray,
    "repr": repr,
    "print": print,
    "str": str,
    "f-string": lambda x: f"{x}",
}


@pytest.mark.parametrize("how", VALUES)
def test_a_value_on_the_host_is_refused(how):
    with pytest.raises(CaptureError, match="the host would wait for a value of the device"):
        taped(lambda: VALUES[how](torch.ones(3)))
    assert not launch.recorders
    assert torch.ones(3).sum().item() == 3 and VALUES[how](torch.ones(3)) is not NotImplemented, (
        "the refusal outlives the recording"
    )


SHAPES = {
    "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": torch.unique,
    "where": lambda x: torch.where(x > 0),
    "values where a mask is": lambda x: x.clone().index_put_((x > 0,), torch.arange(3.0)),
    "a value of the device where a mask is": lambda x: x.clone().index_put_((x > 0,), x[0]),
    "a view of it where a mask is": lambda x: x.clone().index_put_((x > 0,), x[:1]),
    "a number where a mask of no dimension is": lambda x: x[0].clone().__setitem__(x[0] > 0, 0.0),
    "sums where a mask is": lambda x: x.index_put((x > 0,), x[0], accumulate=True),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, torch.tensor([1, 2, 3])),
}


@pytest.mark.parametrize("how", SHAPES)
def test_a_shape_that_depends_on_values_is_refused(how):
    with pytest.raises(CaptureError, match="depends on values|the host would wait"):
        taped(lambda: SHAPES[how](torch.ones(3)))
    assert torch.ones(3).nonzero().shape == (3, 1)


WITHOUT_MEMORY = {
    "sparse": lambda x: x.diag().to_sparse() @ x[:, None],
    "compressed": lambda x: x.diag().to_sparse_csr().to_dense(),
    "sparse gradient": lambda x: (
        F.embedding(torch.tensor([0, 2]), x[:, None].clone().requires_grad_(), sparse=True)
        .sum()
        .backward()
    ),
    "a zero of forward mode": lambda x: torch.func.jvp(nn.Linear(3, 3), (x,), (x,)),
    "second derivatives": lambda x: torch.func.hessian(lambda y: (y**3).sum())(x),
}


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_tensor_without_memory_of_its_own_is_refused(kind):
    """Memory is what a tape knows tensors by."""
    with pytest.raises(CaptureError, match="has no memory of its own"):
        taped(lambda: WITHOUT_MEMORY[kind](torch.randn(3)))
    WITHOUT_MEMORY[kind](torch.randn(3))


# ---- memory ----


@pytest.mark.slow
def test_intermediate_results_keep_their_memory_until_close():
    """Else a later operation would write where an earlier one still has to read; and afterwards all
    of it is free."""
    x, seen = torch.ones(1000), []

    def fn():
        a = x + 1
        seen.append(StorageWeakRef(a.untyped_storage()))
        b = a * 2
        del a
        c = torch.zeros(1000)  # would take a's memory
        return b + c

    tape, y = taped(fn)
    gc.collect()
    assert not seen[0].expired()
    x.fill_(3)
    tape.replay()
    assert y.eq(8).all()
    tape.close()
    gc.collect()
    assert seen[0].expired() and len(tape.steps) == 0 and y.eq(8).all()
    tape.close()
