"""What only a GPU shows of CUDA graphs: launches, waits, memory, other threads and streams."""

import contextlib
import gc
import math
import threading

import pytest
import torch
from helpers import CUDA, no_waiting
from replays import (
    LR,
    Net,
    agree,
    batches,
    compare,
    compiler_or_skip,
    everything,
    lists,
    llama,
    loss_fn,
    make,
    outputs_agree,
    pairs,
    plain_step,
    side_by_side,
    small,
    takes_a_value,
    their_loss,
    theirs,
    trained,
)

import gpuaccel as ga
from gpuaccel.errors import CaptureError
from gpuaccel.optim.adamw import AdamW


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_a_model_of_transformers_as_it_comes_replays_alike_twice_and_follows_eager(
    device, kind
):
    data = batches(device, n=6)
    (wanted, *_), (first, one, *_), (second, two, *_) = (
        trained(make(device, replay, net=theirs(kind), loss=their_loss), data, device)
        for replay in ("eager", "graph", "graph")
    )
    outputs_agree(second, first)
    agree(two, one)
    losses = [(a.loss.item(), b.loss.item()) for a, b in zip(first, wanted)]
    assert all(abs(a - b) < 0.1 for a, b in losses), losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", ["blocks", "whole"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_a_compiled_model_is_replayed_with_the_bits_of_its_eager_launches(
    device, compiled, dtype
):
    compiler_or_skip()

    def net():
        torch._dynamo.reset()  # both runs compile the same things in the same order
        model = side_by_side()
        for block in model.blocks if compiled == "blocks" else ():
            block.compile(dynamic=False)
        return model

    compare(
        device,
        batches(device, n=6, bad=(3,)),
        net=net,
        dtype=dtype,
        compile=compiled == "whole",
    )
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["whole", "list"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_a_replayed_step_never_waits_and_is_one_launch(device, how):
    """Under a schedule, with two lengths in turn; a list of K micro-batches is K + 1 launches."""
    data = batches(device, n=8) if how == "whole" else lists(device) + lists(device)[:2]
    step = make(device, "graph")
    for batch in data:
        step(batch)  # captures every kind
    with no_waiting():
        kept = [step(batch) for batch in data[:5]]
    with ga.ledger("warm up"):
        step(data[0])
    for batch in data[:5]:
        with ga.ledger("replay") as row:
            kept.append(step(batch))
        assert (row.syncs, row.graph_launches) == (0, 1 if how == "whole" else len(batch) + 1), row
        assert not row.bytes("DtoH") and not row.bytes("HtoD"), row.copies
    assert all(out.loss.isfinite() for out in kept)
    step.close()


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_inputs_from_pinned_memory_are_copied_without_a_wait(device):
    data = [tuple(t.pin_memory() for t in batch) for batch in batches("cpu", n=4, lengths=(8,))]
    wanted, *_ = trained(
        make(device, "eager"), [tuple(t.cuda() for t in batch) for batch in data], device
    )
    step = make(device, "graph")
    outs = [step(data[0])]
    with no_waiting():
        outs += [step(batch) for batch in data[1:]]
    torch.cuda.synchronize()
    outputs_agree(outs, wanted)
    step.close()


def held():
    """(allocated, reserved) bytes, once everything that can go has gone."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize("how", ["whole", "list"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_three_hundred_replays_do_not_grow_memory(device, how):
    data = batches(device, n=4) if how == "whole" else lists(device)
    step = make(device, "graph")
    for batch in data * 3:
        out = step(batch)
    before = held()
    for k in range(300):
        out = step(data[k % len(data)])
    after = held()
    assert after[0] <= before[0] and after[1] <= before[1], (
        f"{before} bytes allocated and reserved before, {after} after 300 replays"
    )
    assert out.loss.isfinite()
    step.close()


@pytest.mark.parametrize("kind", ["GraphedStep", "TrainStep", "TrainStep that fails"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_twenty_captures_and_closes_do_not_leak(device, kind):
    data = batches(device, n=2, rows=64)

    def once():
        if kind == "GraphedStep":
            model = small(device, dropout=0.3)
            opt = AdamW(model.parameters(), lr=LR)
            with ga.GraphedStep(plain_step(model, opt), [model, opt], policy="require") as step:
                for x, y in pairs(device, 2, rows=(512, 1024)):
                    step(x, y)
            return
        step = make(
            device,
            "graph",
            net=lambda: Net(norm=True),
            loss=takes_a_value if kind.endswith("fails") else loss_fn,
        )
        with pytest.raises(CaptureError) if kind.endswith("fails") else contextlib.nullcontext():
            for batch in data:
                step(batch)
        step.close()

    for _ in range(3):
        once()
    before = held()
    for _ in range(20):
        once()
    after = held()
    assert all(b - a < 8 << 20 for a, b in zip(before, after)), (
        f"{before} bytes allocated and reserved before, {after} after 20 captures"
    )


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_other_threads_may_use_the_gpu_during_a_capture(device):
    """A loader pins memory and copies, all the time while ten kinds of input are captured."""
    stop, errors, rounds = threading.Event(), [], [0]

    def load():
        try:
            while not stop.is_set():
                there = torch.full((1 << 14,), 3.0).pin_memory().to(device, non_blocking=True)
                torch.empty(1 << 20, device=device).fill_(1.0)
                assert there.sum().item() == 3.0 * (1 << 14)
                rounds[0] += 1
        except BaseException as error:
            errors.append(error)

    model = small(device)
    opt = AdamW(model.parameters(), lr=LR)
    loader = threading.Thread(target=load)
    loader.start()
    try:
        with ga.GraphedStep(
            plain_step(model, opt), [model, opt], policy="require", max_graphs=10
        ) as step:
            before = rounds[0]
            for x, y in pairs(device, 10, rows=range(1, 11)):
                assert step(x, y).isfinite()
            assert len(step) == 10 and rounds[0] > before, "the other thread did nothing meanwhile"
    finally:
        stop.set()
        loader.join()
    assert not errors, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_two_deterministic_runs_have_the_same_bits_eager_and_replayed(device, dtype):
    """Attention is long enough for torch's fast backward, which is not deterministic by itself."""
    data = batches(device, n=6, rows=8, lengths=(64, 32), bad=(3,))
    net = lambda: llama(hidden=128, intermediate=256, head_dim=64, T=64)  # noqa: E731
    how = {"net": net, "dtype": dtype}
    wanted = compare(device, data, **how)
    outs, left, *_ = trained(make(device, "graph", **how), data, device)
    outputs_agree(outs, wanted)
    agree(left, trained(make(device, "eager", **how), data, device)[1])


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_eager_work_between_replays_disturbs_nothing(device):
    """The memory pool is the graphs' own: evaluation, allocations and frees between replays leave
    it alone."""

    def between(step, k):
        junk = [torch.full((1 << 18,), math.nan, device=device) for _ in range(20)]
        step.model.eval()
        with torch.no_grad():
            step.model(torch.zeros(2, 8, dtype=torch.int64, device=device))
        step.model.train()
        del junk

    compare(device, batches(device, n=6, lengths=(8, 16, 12)), between)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_replays_on_another_stream_have_eagers_bits(device):
    data = batches(device, n=4)
    wanted, left, *_ = trained(make(device, "eager"), data, device)
    step = make(device, "graph")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outs = [step(batch) for batch in data]
    torch.cuda.current_stream().wait_stream(stream)
    outputs_agree(outs, wanted)
    agree(everything(step.model, step.optimizers[0], device), left)
    step.close()
