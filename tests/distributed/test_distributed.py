"""Data-parallel training: ranks together are one process, bit for bit where that is promised; and what is said when they cannot be."""

import contextlib
import json
import math
import multiprocessing
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import rank_checks as checks
import torch
import torch.distributed as dist

import gpuaccel as ga
from gpuaccel.backends import find_compiler
from gpuaccel.distributed import rendezvous
from gpuaccel.distributed import trace as exchange
from gpuaccel.distributed.rendezvous import loopback
from gpuaccel.distributed.spawn import _drained, _Watch
from gpuaccel.measure.timeline import Span
from gpuaccel.optim.accumulate import MODES

HANG = checks.HANG
BACKENDS = [
    "torch",
    pytest.param(
        "simt", marks=pytest.mark.skipif(find_compiler()[0] is None, reason="needs a C++ compiler")
    ),
]


def words(options):
    return " ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in options.items())


@pytest.fixture(scope="module")
def crew():
    found = checks.Crew(4)
    yield found
    found.close()


def close(found, bound=1e-6, losses=None):
    for rank, one in enumerate(found):
        assert one["moved"] > 1e-3, "the weights hardly moved: nothing was compared"
        assert one["far"] <= bound, (
            f"rank {rank}: the weights are off by {one['far']:.3g} of their norm, {one['name']} most"
        )
        assert one["hash"] == found[0]["hash"], f"rank {rank} has other weights than rank 0"
        for got, want in zip(one["outs"], one["wanted"]):
            assert got[1] == want[1], f"tokens: {got[1]}, expected {want[1]}"
            for a, b in ((got[0], want[0]), (got[2], want[2])):
                assert a is b or math.isclose(a, b, rel_tol=losses or 20 * bound), (
                    f"rank {rank}: {one['outs']}, expected {one['wanted']}"
                )


# ---- one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks,shares", [(2, [2, 2]), (4, [1, 2, 0, 1])])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_together_are_one_process(crew, mode, ranks, shares):
    """DDP-001, -004. Uneven tokens, rows and micro-batches, a rank without any, accumulation, tied weights, tensors that some or all ranks do
    not use; the weights have the same bits on all ranks after every step."""
    for kind in ("adamw", "sgd"):
        close(
            crew(
                checks.as_one_process,
                ranks,
                shares=shares,
                accumulate=mode,
                kind=kind,
                tied=mode == "fused",
            )
        )


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(tied=True),
        dict(net=checks.Twice),
        dict(net=checks.Bare),
        dict(how=dict(sharded=True)),
        dict(how=dict(sharded=True, dtype=torch.bfloat16), bound=2e-3),
    ],
    ids=words,
)
def test_what_a_compiled_backward_sends_early(crew, options):
    """Products say when they have been added; what is beside them in a bucket comes behind the last one."""
    bound = options.get("bound", 1e-6)
    close(
        crew(
            checks.as_one_process,
            2,
            shares=[2, 1],
            accumulate="fused",
            compile="as if",
            backend=BACKENDS[-1].values[0],
            **{k: v for k, v in options.items() if k != "bound"},
        ),
        bound,
        losses=10 * bound,
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(accumulate="arena"),
        dict(accumulate="fused", tied=True),
        dict(accumulate="arena", low=torch.bfloat16, how=dict(bucket_mb=1.0)),
        dict(accumulate="fused", how=dict(blame=False, bucket_mb=0.02)),
    ],
    ids=words,
)
def test_with_our_kernels(crew, options):
    if "low" not in options:
        options = {"backend": BACKENDS[-1].values[0], **options}
    bound = (
        2e-3 if "low" in options else 1e-6
    )  # bf16 weights: a sum in another order may round a weight the other way
    close(crew(checks.as_one_process, 2, shares=[2, 1], **options), bound)


@pytest.mark.parametrize(
    "options",
    [
        dict(divide="sequences"),
        dict(divide="micro_batches"),
        dict(loss_fn=checks.mean_loss),
        dict(clip="torch", max_norm=0.05, kind="sgd"),
        dict(clip="item", max_norm=0.05, kind="sgd"),
    ],
    ids=words,
)
def test_every_divisor_and_way_of_clipping(crew, options):
    close(crew(checks.as_one_process, 2, shares=[2, 1], **options))


def test_sums_may_travel_in_bf16(crew):
    """Each rank rounds its sum once: the same bits everywhere, the weights near those of fp32."""
    close(
        crew(checks.as_one_process, 2, shares=[2, 2], kind="sgd", how=dict(dtype=torch.bfloat16)),
        2e-3,
        losses=1e-2,
    )


# ---- ordered --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [dict(accumulate=mode) for mode in MODES[:3]]
    + [
        dict(accumulate="arena", backend="simt", low=torch.bfloat16),
        dict(accumulate="autograd", clip="torch", max_norm=0.05, kind="sgd"),
        dict(divide="sequences"),
        *[
            dict(plain=False, **more)
            for more in (
                dict(divide="micro_batches"),
                dict(loss_fn=checks.mean_loss),
                dict(accumulate="fused", tied=True),
                dict(accumulate="fused", backend="simt"),
            )
        ],
    ],
    ids=words,
)
@pytest.mark.parametrize("ranks,shares", [(2, [3, 3]), (3, [2, 2, 0])])
def test_ordered_sums_have_the_bits_of_one_process(crew, ranks, shares, options):
    """N ranks with M micro-batches each, and one with N * M: weights, losses and norms are equal bit for bit. plain=False: that one is in ordered
    mode too, where a plain step divides means beforehand, or adds inside of the product."""
    for rank, one in enumerate(
        crew(checks.as_one_process, ranks, shares=shares, how=dict(ordered=True), **options)
    ):
        assert one["moved"] > 1e-3
        assert one["same"], f"rank {rank}: off by {one['far']:.3g} of the norm, {one['name']} most"
        for got, want in zip(one["outs"], one["wanted"]):
            assert got == want or (got[0], got[2]) == (want[0], want[2]) and want[1] is None, (
                f"{one['outs']}, expected {one['wanted']}"
            )


def test_blocks_that_are_computed_again(crew):
    """Reentrant checkpointing: backwards inside of the backward. A weight that several of them share would be sent too early:
    said, and not gone on with."""
    close(crew(checks.as_one_process, 2, shares=[2, 1], net=checks.Checkpointed))
    for first, second in crew(checks.broken_off, 2):
        assert (
            first.startswith("blocks.0.0.weight got more of its gradient after that was sent")
            and "use_reentrant=False" in first
        ), first
        assert second.startswith("rank ") and "left an earlier step half way" in second, second


def test_a_hundred_uneven_steps_in_order(crew):
    one, *_ = crew(checks.as_one_process, 2, shares=[1, 1], steps=100, how=dict(ordered=True))
    assert one["same"] and one["outs"] == one["wanted"], (
        f"off by {one['far']:.3g} of the norm, {one['name']} most"
    )


def test_a_head_of_more_than_100_mb(crew):
    for off, size in crew(checks.large_head, 2):
        assert size > 100e6 and off < 1e-6


# ---- sharded --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(backend="simt"),
        dict(backend="simt", accumulate="fused", tied=True),
        dict(backend="simt", low=torch.bfloat16, bound=2e-3),
        dict(low=torch.bfloat16, bound=2e-3),
        dict(backend="simt", how=dict(dtype=torch.bfloat16), bound=2e-2),
    ],
    ids=words,
)
@pytest.mark.parametrize("ranks,shares", [(2, [2, 2]), (4, [1, 2, 0, 1])])
def test_a_sharded_optimizer_is_one_process(crew, ranks, shares, options):
    options = dict(options)
    bound, how = options.pop("bound", 1e-6), {"sharded": True, **options.pop("how", {})}
    close(
        crew(checks.as_one_process, ranks, shares=shares, how=how, **options),
        bound,
        losses=10 * bound,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_change_no_bit_and_need_less_memory(crew, backend):
    """Ordered and sharded, against one process; each rank keeps the moments of its share, and the rest of a few chunks."""
    for one in crew(
        checks.as_one_process,
        3,
        shares=[2, 2, 2],
        backend=backend,
        how=dict(ordered=True, sharded=True),
    ):
        assert one["same"] and one["outs"] == one["wanted"], one["name"]
    for kept, whole, rest in crew(checks.memory_of_moments, 3, backend=backend):
        assert kept <= whole / 3 + rest and kept < whole / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_of_shares_is_resumed_by_any_number_of_ranks(crew, backend, tmp_path):
    """Ordered: 2 ranks for two steps, then 4, 1 and 2 for two more: the bits of one process that took all four."""
    crew(checks.shares_to_file, 2, backend=backend, folder=str(tmp_path))
    for ranks in (4, 1, 2):
        assert (
            crew(checks.shares_from_file, ranks, backend=backend, folder=str(tmp_path))
            == [True] * ranks
        )


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
def test_savers_of_others_write_a_sharded_run_whole(crew, low, tmp_path):
    assert crew(checks.savers_of_shares, 2, low=low, folder=str(tmp_path)) == [True, True]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_goes_on_with_another_number_of_ranks(crew, sharded, tmp_path):
    """ga.train, ordered: the losses of 4 ranks, of 2 after 1, and of 2 after 2 are those of a run that nobody stopped, bit for bit."""
    folders = iter([str(tmp_path / str(i)) for i in range(9)])
    whole = crew(checks.trained, 4, folder=next(folders), stops=0, ranks_then=0, sharded=sharded)[0]
    assert len(whole) == 5
    for ranks, then in ((2, 1), (2, 2)):
        assert (
            crew(
                checks.trained,
                ranks,
                folder=next(folders),
                stops=2,
                ranks_then=then,
                sharded=sharded,
            )[0]
            == whole
        )


def test_dropout_goes_on_as_it_was_on_every_rank(crew, tmp_path):
    whole, halves = (
        crew(
            checks.trained,
            2,
            folder=str(tmp_path / name),
            stops=stops,
            ranks_then=2,
            sharded=False,
            dropout=True,
        )[0]
        for name, stops in (("whole", 0), ("halves", 2))
    )
    assert len(whole) == 5 and halves == whole


def test_what_cannot_be_sharded(crew):
    for kind, said in crew(
        checks.attempt, 2, errors=True, how=None, all=dict(sharded=True), sgd=True
    ):
        assert (
            kind == "ArgumentError"
            and "sharded=True with clip='torch': a rank has its share of the gradient only" in said
        )


# ---- the start ------------------------------------------------------------------------------------------------------


def test_all_ranks_begin_with_the_weights_of_rank_0(crew):
    assert crew(checks.start_equal, 3) == [True] * 3


@pytest.mark.parametrize(
    "options,message",
    [
        (
            dict(net=checks.Wider),
            r"head.weight is float32 \[41, 16\], weight decay True, .*on rank 1, and float32 \[40, 16\]",
        ),
        (dict(net=checks.Low), r"blocks.1.2.weight is bfloat16 .* on rank 1, and float32"),
        (dict(how=dict(ordered=True)), "ordered is True on rank 1, and False on rank 0"),
        (dict(how=dict(bucket_mb=3.0)), "bucket_mb is 3.0 on rank 1, and 32.0 on rank 0"),
        (dict(groups=True), "lr of the optimizer's group 0 is 0.01 on rank 1, and 0.001 on rank 0"),
        (dict(step=dict(accumulate="fused")), "accumulate is fused on rank 1, and arena on rank 0"),
    ],
)
def test_ranks_that_differ_are_told_apart_on_every_rank(crew, options, message):
    for kind, said in crew(checks.attempt, 2, errors=True, **options):
        assert kind == "ArgumentError" and re.search(message, said), said


@pytest.mark.parametrize(
    "options,message",
    [
        (
            dict(dtype=torch.float16),
            "dtype is torch.float16; sums are sent as torch.float32 or torch.bfloat16",
        ),
        (dict(dtype=torch.bfloat16, ordered=True), "in ordered mode every addition is fp32"),
        (dict(bucket_mb=0), "bucket_mb is 0"),
        (dict(check_every=-1), "check_every is -1"),
    ],
)
def test_arguments_that_make_no_sense(options, message):
    with pytest.raises(ga.ArgumentError, match=message):
        ga.Distributed(**options)


def test_a_tape_is_no_graph_for_collectives(crew):
    for kind, said in crew(checks.attempt, 2, errors=True, replay="graph"):
        assert (
            kind == "ArgumentError"
            and "needs collectives that a CUDA graph can hold, those of NCCL; the group's are gloo's"
            in said
        )


def test_one_rank_costs_nothing():
    """Without a process group, and without ordered mode, there is nothing to reduce."""
    how = ga.Distributed()
    assert (how.rank, how.world, how.works, dist.is_initialized()) == (0, 1, False, False)
    with checks.make_step(model := checks.Net(), distributed=how) as step:
        assert step.reducer is None
        step([checks.micro_batch(0)])
        plain = checks.Net()
        with checks.make_step(plain) as other:
            other([checks.micro_batch(0)])
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))


def test_one_rank_in_ordered_mode_has_the_bits_of_a_plain_step():
    outs = []
    for how in (None, ga.Distributed(ordered=True)):
        model = checks.Net()
        outs.append((checks.run(model, 3, 1, 0, [3], distributed=how)))
    (got, said), (want, wanted) = outs
    assert said == wanted and all(torch.equal(got[n], want[n]) for n in want)


def test_a_rank_that_others_have_left_says_so_in_words():
    """What gloo raises names addresses only."""

    def loss_fn(model, micro):
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"
        )

    step = checks.make_step(checks.Net(), loss_fn=loss_fn, distributed=ga.Distributed(ordered=True))
    with pytest.raises(
        ga.RankError,
        match=r"rank 0 of 1 cannot reach another one in step 1: .*Connection reset by peer",
    ):
        step([checks.micro_batch(0), checks.micro_batch(1)])


# ---- while it runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_buckets_leave_while_backward_runs(crew, mode):
    """Contiguous, whole blocks, from the last layer to the first; also a head larger than a bucket. host and autograd: when the sums are there."""
    for sent, blocks, whole in crew(checks.order_of_buckets, 2, mode=mode):
        over = sent.index("backward is over")
        assert (
            whole
            and len(blocks) > 3
            and [n for n in sent if n != "backward is over"] == list(range(len(blocks)))
        )
        assert over == 0 if mode in ("host", "autograd") else over >= len(blocks) - 1, (
            f"sent: {sent}, of {blocks}"
        )


COPIES = [
    dict(tied=True),
    dict(accumulate="fused", compile="as if"),
    dict(how=dict(sharded=True)),
    dict(accumulate="fused", compile="as if", how=dict(sharded=True)),
    dict(low=torch.bfloat16, how=dict(sharded=True)),
]


@pytest.mark.parametrize("options", COPIES, ids=words)
@pytest.mark.parametrize("ranks, slab", [(2, 1 << 22), (3, 4096)])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_copies_are_added_in_the_order_of_the_ranks(crew, backend, ranks, slab, options):
    """As on GPUs, between files in place of GPUs' memory: the bits of one process that adds one micro-batch after the other. What is left of shares
    at a bucket's end, and light tensors beside a compiled backward, are gloo's sums, whose order is its own."""
    rest = ranks > 2 and ("how" in options or "compile" in options)
    for one in crew(
        checks.as_one_process,
        ranks,
        shares=[1] * ranks,
        backend=backend,
        plain=False,
        copies=slab,
        **options,
    ):
        assert one["moved"] > 0.01 and one["far"] <= 1e-6 if rest else one["same"], (
            f"{one['name']} is off; distance {one['far']}"
        )


@pytest.mark.skipif(find_compiler()[0] is None, reason="needs a C++ compiler")
def test_a_refused_second_step_leaves_the_copies_of_the_first_alone(crew):
    for said, one, other in crew(checks.refused, 2):
        assert "has a GradientAccumulator already" in said and one == other


def test_copies_are_refused_in_words_where_there_is_nothing_to_copy(crew):
    for kind, said in crew(checks.attempt, 2, errors=True, all=dict(peer_to_peer=True)):
        assert (kind, said) == (
            "ArgumentError",
            "peer_to_peer is True, and the 2 ranks' collectives are gloo's, the model is on cpu, backend torch; expected the GPUs of "
            "one machine, which can read each other's memory, and fp32 sums",
        )


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    "backend,mode,options",
    [
        ("torch", "arena", {}),
        ("simt", "arena", {}),
        ("simt", "fused", {}),
        ("simt", "arena", {"copies": True}),
        ("simt", "fused", {"compile": "as if", "where": "norm", "copies": True}),
        ("simt", "arena", {"where": "norm", "copies": True, "sharded": True}),
        ("torch", "fused", {"compile": "as if"}),
        ("simt", "fused", {"compile": "as if"}),
        ("simt", "fused", {"compile": "as if", "where": "norm"}),
    ],
)
def test_a_nan_on_one_rank_skips_the_step_on_all_and_names_the_rank(
    crew, backend, mode, options, ordered
):
    """DDP-003, as a skip: all ranks leave the step out, and each can say whose gradient it was and which tensor's."""
    found = crew(checks.nan_on, 3, who=2, backend=backend, mode=mode, ordered=ordered, **options)
    for one in found:
        assert one["same"] and one["moved"] and not one["finite"] and one["skipped"] == 1
        first, second, third = one["said"]
        assert (
            first is None
            and second["step"] == 2
            and second["rank"] == third["rank"] == 2
            and second["tensor"] == third["tensor"]
        ), one["said"]
        assert second["tensor"].startswith(options.get("where", "blocks.0"))
        assert one["hash"] == found[0]["hash"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_drift_apart_are_noticed(crew, backend):
    """DDP-001: one bit is enough."""
    for kind, said in crew(checks.drift, 3, errors=True, who=1, backend=backend):
        assert kind == "RankError" and said.startswith(
            "after step 4 the weights of rank 1 are not those of rank 0: norm.weight is the first"
        ), said


def test_which_tensors_take_part_is_settled_in_the_first_step(crew):
    assert crew(checks.held, 1, find_unused=True) == [True]
    assert crew(checks.held, 2, find_unused=True) == [True] * 2
    ((kind, said),) = [what for what in crew(checks.held, 2, find_unused=False, errors=1)]
    assert kind == "ArgumentError" and said.startswith(
        "rank 1: sometimes got a gradient, and in the first step it got none on any rank"
    ), said


# ---- data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count,ranks", [(8, 2), (7, 2), (5, 4), (4, 4), (9, 1)])
@pytest.mark.parametrize("seed", [None, 3])
def test_shares_are_disjoint_and_complete(count, ranks, seed):
    """SHARD-001, -002, -004. Interleaved; shuffled anew in each epoch, the same in each run; nobody has more turns than another."""
    shares = [ga.shard(range(count), rank, ranks, seed=seed, epoch=1) for rank in range(ranks)]
    turns = -(-count // ranks)
    assert [len(share) for share in shares] == [turns] * ranks
    order = [share[nth] for nth in range(turns) for share in shares]
    assert order[count:] == [None] * (turns * ranks - count) and sorted(order[:count]) == list(
        range(count)
    )
    if seed is None:
        assert order[:count] == list(range(count))
    else:
        assert shares[0] == ga.shard(range(count), 0, ranks, seed=seed + 1, epoch=0), (
            "seed + epoch is the seed"
        )
        assert order[:count] != list(range(count)) or count < 5


def test_fewer_batches_than_ranks_is_an_error():
    """SHARD-003."""
    with pytest.raises(ga.DataError, match="2 batches for 3 ranks; expected at least one for each"):
        ga.shard([1, 2], 0, 3)
    with pytest.raises(
        ga.DataError, match="an epoch has 10 windows of T=4, 2 batches of 4, for 3 ranks"
    ):
        ga.Batches(torch.arange(41), 4, 4, ranks=3)
    for options, message in (
        (dict(rank=2, ranks=2), "rank is 2 of 2; expected 0 to 1"),
        (dict(rank=0, ranks=0), "rank is 0 of 0"),
        (dict(ranks=2, micro_batches=3), "a batch of 4 windows in 3 micro-batches"),
    ):
        with pytest.raises(ga.ArgumentError, match=message):
            ga.Batches(torch.arange(410), 4, 4, **options)


@pytest.mark.parametrize("ranks,micro_batches", [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_what_all_ranks_take_in_a_step_depends_on_their_product_only(ranks, micro_batches):
    """SHARD-005: micro-batch m of rank r is number m * ranks + r, over three epochs and a change of ranks in the middle; the same position everywhere."""
    tokens, size = torch.arange(20 * 4 + 1), 1
    whole = ga.Batches(tokens, 6 * size, 4, seed=5)
    mine = [
        ga.Batches(
            tokens,
            micro_batches * size,
            4,
            seed=5,
            rank=r,
            ranks=ranks,
            micro_batches=micro_batches,
        )
        for r in range(ranks)
    ]
    for nth in range(10):
        want = next(whole)[0].view(6, size, 4)
        got = [next(batches)[0].view(micro_batches, size, 4) for batches in mine]
        assert torch.equal(torch.stack(got, 1).flatten(0, 1), want), nth
        assert all(batches.state_dict() == whole.state_dict() for batches in mine)
        if nth == 4:
            other = ga.Batches(tokens, 6 * size, 4, seed=0)
            other.load_state_dict(mine[-1].state_dict())
            whole = other


# ---- launch, and what may go wrong ----------------------------------------------------------------------------------


def test_launch_runs_a_function_on_every_rank():
    (first, *one), (second, *two) = ga.launch(checks.steps_with, 2, (checks.nothing, 0))
    assert (first, second) == (0, 1) and one == two and one[0] == 2


def test_tensors_come_back_by_value():
    for found in ga.launch(checks.tensors, 2, (torch.arange(3),)):
        assert (
            found["values"].tolist() == [1, 2, 3]
            and found["parameter"].tolist() == [0.0, 1.0, 2.0]
            and found["parameter"].requires_grad
        )


def test_a_rank_that_returned_while_another_waits_for_it_is_named():
    with pytest.raises(
        ga.RankError,
        match=r"rank 1 has returned, after 2 steps, and rank 0 waits for it in step 3\..*step\(None\)",
    ):
        ga.launch(checks.fewer_steps, 2)


def test_what_cannot_be_handed_over_is_said():
    with pytest.raises(ga.ArgumentError, match="args is 5; expected a tuple"):
        ga.launch(checks.tensors, 2, 5)
    with pytest.raises(ga.ArgumentError, match="args cannot be handed to new processes"):
        ga.launch(checks.tensors, 2, (lambda: 5,))
    with pytest.raises(ga.RankError, match="what the function returned cannot be sent back"):
        ga.launch(checks.not_sendable, 1)


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK is set, and MASTER_ADDR and MASTER_PORT not"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "RANK is 2 and WORLD_SIZE 2; expected a rank from 0 on, below it",
        ),
    ],
)
def test_an_environment_that_is_not_torchruns(settings, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ga.ArgumentError, match=message):
        ga.Distributed()


@pytest.mark.parametrize(
    "trouble,message",
    [
        (checks.raises, "rank 1 raised ValueError: no more data. All ranks were stopped"),
        (checks.killed, "rank 1 was killed by SIGKILL in step 4"),
        (checks.leaves, "rank 1 ended with status 3 in step 4"),
        (
            checks.hangs,
            "rank 1 hangs: it has not come to the end of its backward in step 4 for 8 s",
        ),
    ],
)
def test_trouble_on_one_rank_stops_all_and_names_it(trouble, message):
    """Eight seconds, in which a rank that is well comes to its next step on a busy machine too."""
    with pytest.raises(ga.RankError, match=message):
        ga.launch(checks.steps_with, 2, (trouble, 1), timeout=8.0, start=HANG)


@pytest.mark.parametrize(
    "where,message",
    [("before", "made its TrainStep"), ("round", "come to the end of its backward in step 1")],
)
def test_a_rank_that_hangs_before_its_first_step_is_over_is_named(where, message):
    """Kernels may be compiled until then: it has a limit of its own."""
    with pytest.raises(ga.RankError, match=f"rank 1 hangs: it has not {message} for 12 s"):
        ga.launch(checks.comes_late, 2, (where,), timeout=0.5, start=12.0)


def test_an_error_between_two_steps_does_not_wait_for_the_others(tmp_path):
    """Neither the loop's last checkpoint nor the closing of a sharded optimizer, which would take all ranks."""
    with pytest.raises(ga.RankError, match="rank 1 raised ValueError: no more data"):
        ga.launch(checks.fails_in_the_loop, 2, (str(tmp_path),), timeout=HANG)
    assert ga.latest_checkpoint(tmp_path).name == "step-00000002.safetensors"


@pytest.mark.parametrize("seed", range(-(-int(os.environ.get("GPUACCEL_KILLS", 3)) // 3)))
def test_killed_at_any_moment_a_run_goes_on_bit_for_bit(tmp_path, seed):
    """Three times a random rank is killed at a random moment of a run with checkpoints: nothing hangs, no checkpoint is damaged, and the losses are those
    of one process left in peace. More: GPUACCEL_KILLS=20 python -m pytest tests/distributed/test_distributed.py -k killed_at_any_moment"""
    folder, chance = str(tmp_path / "killed"), random.Random(seed)
    for _ in range(3):
        who, at = chance.randrange(2), 0.1 * chance.random()
        with pytest.raises(ga.RankError, match=f"rank {who} was killed by SIGKILL"):
            ga.launch(checks.train_and_die, 2, (folder, at, who), timeout=HANG)
    ga.launch(checks.train_and_die, 2, (folder,))
    checks.train_and_die(str(tmp_path / "peace"))  # one process
    killed, peace = (
        [
            json.loads(line)["loss"]
            for line in (tmp_path / name / "lines.jsonl").read_text().splitlines()
        ]
        for name in ("killed", "peace")
    )
    assert killed == peace and len(peace) == 20


def test_a_function_of_a_notebook_is_handed_on_by_a_fork():
    """It belongs to no file; torch has computed before, as in a notebook."""
    cells = """
import torch, gpuaccel as ga
(torch.randn(300, 300) @ torch.randn(300, 300)).sum()
torch.randn(10**6).sin().sum()                                # by several threads, which a fork does not have
torch.nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()
def work(x):
    how, model = ga.Distributed(), torch.nn.Linear(4, 4)
    torch.randn(10**6).sin().sum()
    with ga.TrainStep(model, loss_fn=lambda m, b: m(b).square().mean(), distributed=how) as step:
        for _ in range(3):
            out = step(torch.ones(2, 4))
    return how.rank, x, float(out.loss)
print(ga.launch(work, 1, (5,)) + ga.launch(work, 2, (5,)))
"""
    done = subprocess.run(
        [sys.executable, "-"],
        input=cells,
        text=True,
        capture_output=True,
        timeout=HANG,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    alone, one, two = eval(done.stdout) if done.returncode == 0 else pytest.fail(done.stderr)
    assert alone[:2] == one[:2] == (0, 5) and two[:2] == (1, 5) and one[2] == two[2]


def test_the_readings_of_every_rank_are_drawn_while_they_train(capsys):
    live = ga.LiveThroughput("two ranks")
    assert ga.launch(lambda: checks.yields(6), 2, live=live) == [0, 1] and list(live.runs) == [
        "rank 0",
        "rank 1",
    ]
    first, second = live.runs.values()
    assert [p[0] for p in first.points] == [p[0] for p in second.points] == list(
        range(1, 7)
    ) and first.state == second.state == "done"
    assert first.loss == second.loss and math.isfinite(first.loss) and first.colour != second.colour


def test_a_generator_is_run_to_its_end_also_where_nobody_looks():
    def one(result):
        yield "a reading"
        return result

    line = SimpleNamespace(send_bytes=(sent := []).append)
    assert (_drained(one(7), line), _drained([8], line), list(map(pickle.loads, sent))) == (
        7,
        [8],
        [(None, "a reading")],
    )


def test_a_rank_that_dies_ends_the_live_view_too(capsys):
    live = ga.LiveThroughput()
    with pytest.raises(ga.RankError, match="rank 1 was killed by SIGKILL"):
        ga.launch(lambda: checks.yields(3, checks.killed), 2, live=live)
    assert [run.state for run in live.runs.values()] == ["failed", "failed"] and live.runs[
        "rank 1"
    ].last.step == 3


def test_stop_ends_all_ranks_even_one_that_is_silent(capsys, monkeypatch):
    """Rank 1 sleeps after its steps: no reading will come. What a rank has returned by then is kept."""
    live, others, returned = (
        ga.LiveThroughput(),
        set(multiprocessing.active_children()),
        threading.Event(),
    )
    listen = _Watch._listen

    def noted(watch):
        news = listen(watch)
        if 0 in watch.results:
            returned.set()
        return news

    monkeypatch.setattr(_Watch, "_listen", noted)

    def press():
        until = time.monotonic() + HANG
        while time.monotonic() < until and not (
            "rank 1" in live.runs
            and live.runs["rank 1"].last is not None
            and live.runs["rank 1"].last.step == 3
        ):
            time.sleep(0.05)
        returned.wait(HANG)
        live.stop()

    finger = threading.Thread(target=press)
    finger.start()
    assert ga.launch(lambda: checks.yields(3, checks.hangs), 2, live=live) == [0, None]
    finger.join()
    assert set(multiprocessing.active_children()) <= others
    assert [run.state for run in live.runs.values()] == ["stopped", "stopped"]


def test_where_a_fork_would_not_do_a_function_is_handed_on_by_value(monkeypatch):
    """One that belongs to no module, where torch sees a GPU; what it refers to comes along, or is named as what cannot."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    factor, lock = 5, threading.Lock()

    def work(x):
        return dist.get_rank(), x * factor

    assert ga.launch(work, 2, (3,), backend="gloo") == [(0, 15), (1, 15)]
    with pytest.raises(
        ga.ArgumentError, match="<lambda> cannot be handed to new processes: .*lock"
    ):
        ga.launch(lambda: lock, 2, backend="gloo")


@pytest.mark.parametrize(
    "mode, backend, copies",
    [
        ("autograd", "torch", False),
        ("arena", "torch", False),
        *(
            pytest.param("arena", *b.values, copies, marks=b.marks)
            for b in BACKENDS[1:]
            for copies in (False, True)
        ),
    ],
)
def test_what_was_sent_when_is_noted(crew, mode, backend, copies):
    """exchange.watch: every bucket once, in order, before backward is over only where the sums are ready by then; no bit changes."""
    for spans, buckets, same in crew(
        checks.watched, 2, accumulate=mode, backend=backend, copies=copies
    ):
        spans = [Span(*s) for s in spans]
        assert same and buckets >= 3
        sent = [s for s in spans if s.lane == "sends"]
        assert [s.name for s in sent] == [f"bucket {nth}" for nth in range(buckets)] and all(
            0 <= s.start <= s.stop for s in spans
        )
        assert [s.name for s in spans if s.name in ("forward", "backward")] == [
            "forward",
            "backward",
        ] * 2
        early = exchange.sent_early(spans)
        assert early == 0 if mode == "autograd" else 1 <= early <= buckets
        optimizer = next(s for s in spans if s.name == "optimizer")
        assert all(s.start < optimizer.start for s in sent) and any(s.name == "wait" for s in spans)


def test_one_process_and_ordered_sums_have_no_exchange_to_watch():
    for how in (None, ga.Distributed(ordered=True)):
        with (
            checks.make_step(checks.Net(), distributed=how) as step,
            pytest.raises(ga.ArgumentError, match="of two ranks or more, not in ordered mode"),
        ):
            exchange.watch(step, [checks.micro_batch(0)])


def test_launch_says_what_it_needs():
    for ranks, options, message in (
        (0, {}, "ranks is 0"),
        (2, dict(backend="mpi"), "backend is 'mpi'; expected 'nccl' or 'gloo'"),
    ):
        with pytest.raises(ga.ArgumentError, match=message):
            ga.launch(checks.nothing, ranks, **options)
    if torch.cuda.device_count() < 64:
        with pytest.raises(
            ga.ArgumentError,
            match="64 ranks with backend 'nccl' need a GPU each, and this machine has",
        ):
            ga.launch(checks.nothing, 64, backend="nccl")


@pytest.mark.parametrize("rank", [1, 0])
def test_an_address_where_nobody_answers_or_somebody_else_does(monkeypatch, rank):
    """Rank 1 finds nobody, rank 0 a port that is taken: within the time limit, in words."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if rank == 0:
            other.listen()
        for key, value in (
            ("RANK", rank),
            ("WORLD_SIZE", 2),
            ("LOCAL_RANK", 0),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", other.getsockname()[1]),
            ("GLOO_SOCKET_IFNAME", loopback()),
        ):
            monkeypatch.setenv(key, str(value))
        with pytest.raises(
            ga.RankError, match=f"rank {rank} of 2 found no common start at 127.0.0.1:"
        ):
            ga.Distributed(timeout=2)
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    "device, how",
    [
        ("cpu", {}),
        *(
            pytest.param("cuda", {"peer_to_peer": copies}, marks=pytest.mark.gpu)
            for copies in (True, False)
        ),
    ],
)
def test_a_rank_that_waits_in_silence_ends_in_words(device, how):
    """No call comes back with an error there: on GPUs the collectives are in a graph, and on CPUs gloo would wait for ten minutes."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(checks.free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import rank_checks; rank_checks.comes_no_more({device!r}, {how!r})",
            ],
            cwd=pathlib.Path(__file__).parent,
            text=True,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": str(pathlib.Path(__file__).parents[1]),
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
        )
        for rank in range(2)
    ]
    try:
        said = ranks[0].communicate(timeout=HANG)[1]
        assert (
            ranks[0].returncode == 1
            and "gpuaccel: rank 0 of 2 has waited 6 s for rank 1: it has stopped" in said
            and ranks[1].poll() is None
        ), said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(
    "answer, said",
    [
        ([1], "has waited 0.2 s for rank 1: it has stopped"),
        (None, "for the one where the ranks met, which does not answer"),
        ([], None),
    ],
)
def test_a_rank_that_waits_says_for_whom_and_goes_on_if_all_are_there(
    answer, said, monkeypatch, capsys
):
    """Until the group is another one, or there is none."""
    place = object()
    for where, name, value in (
        (rendezvous, "store", place),
        (rendezvous, "came", 3),
        (rendezvous, "SLACK", 0.1),
        (rendezvous, "missing", lambda: answer),
        (dist, "is_initialized", lambda: True),
        (dist, "get_rank", lambda: 0),
        (dist, "get_world_size", lambda: 2),
        (os, "_exit", sys.exit),
    ):
        monkeypatch.setattr(where, name, value)
    if said is None:
        threading.Timer(0.5, lambda: setattr(rendezvous, "store", None)).start()
    with pytest.raises(SystemExit) if said else contextlib.nullcontext():
        rendezvous.watch(place, 0.2)
    assert (said or "") in capsys.readouterr().err


def test_who_is_missing_is_one_of_the_others(monkeypatch):
    place = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for where, name, value in (
        (rendezvous, "store", place),
        (rendezvous, "came", 3),
        (rendezvous, "_asking", None),
        (dist, "get_rank", lambda: 0),
        (dist, "get_world_size", lambda: 4),
    ):
        monkeypatch.setattr(where, name, value)
    place.set("rank 1 came", "3")
    place.set("rank 2 came", "2")
    assert rendezvous.missing() == [2, 3]
    monkeypatch.setattr(rendezvous, "store", SimpleNamespace(check=lambda _: time.sleep(5)))
    assert rendezvous.missing() is None


# ---- GPUs -----------------------------------------------------------------------------------------------------------

GPU_WAYS = [
    dict(),
    dict(accumulate="fused"),
    dict(low=torch.bfloat16, accumulate="fused"),
    dict(dtype=torch.bfloat16),
    dict(ordered=True),
    dict(sharded=True),
    dict(sharded=True, low=torch.bfloat16),
    dict(accumulate="fused", low=torch.bfloat16, compile=True),
    dict(accumulate="fused", compile=True, sharded=True),
    dict(peer_to_peer=False),
    dict(accumulate="fused", sharded=True, compile=True, peer_to_peer=False),
]


@pytest.fixture(scope="module")
def gpu_crew():
    """Number of GPUs -> that many ranks."""
    made = {}

    def of(gpus):
        if (there := torch.cuda.device_count()) < gpus:
            pytest.skip(
                f"needs {gpus} GPUs, and there {'is' if there == 1 else 'are'} {there or 'none'}"
            )
        if gpus not in made:
            made[gpus] = checks.Crew(gpus, "nccl")
        return made[gpus]

    yield of
    for crew in made.values():
        crew.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "gpus, options",
    [*((2, way) for way in GPU_WAYS), *((4, GPU_WAYS[k]) for k in (0, 4, 7, 8))],
    ids=lambda value: words(value) if isinstance(value, dict) else str(value),
)
def test_gpus_eager_and_captured(gpu_crew, gpus, options):
    """The same bits on all, the same bits from a graph that holds the collectives, and near one process (in order: equal)."""
    eager, graph = (
        gpu_crew(gpus)(checks.transformer, gpus, device="cuda", replay=replay, **options)
        for replay in ("eager", "graph")
    )
    bound = (
        0.0 if "ordered" in options else 2e-2 if "dtype" in options or "low" in options else 1e-5
    )
    for one in eager + graph:
        assert (one["hash"], one["losses"]) == (eager[0]["hash"], eager[0]["losses"])
        assert one["far"] <= bound
        assert one["copies"] == (
            not options.keys() & {"dtype", "ordered"} and options.get("peer_to_peer", True)
        )
        assert "compile" not in options or max(one["left"]) > 0, (
            "no bucket was sent before the compiled backward's last product"
        )


@pytest.mark.parametrize(
    "options",
    [way for way in GPU_WAYS if not way.keys() & {"compile", "peer_to_peer"}] + [GPU_WAYS[8]],
    ids=words,
)
def test_a_transformer_on_two_ranks(crew, options):
    if options.get("compile") and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("inductor needs a C++ compiler for the CPU, and there is none")
    for one in (found := crew(checks.transformer, 2, device="cpu", replay="eager", **options)):
        assert (one["hash"], one["losses"]) == (found[0]["hash"], found[0]["losses"])
        assert one["far"] <= (
            0.0
            if "ordered" in options
            else 2e-2
            if "dtype" in options or "low" in options
            else 1e-5
        )
        assert "compile" not in options or max(one["left"]) > 0, (
            "no bucket was sent before the compiled backward's last product"
        )


# ---- the command line -----------------------------------------------------------------------------------------------


def test_the_command_line_trains_with_ranks_and_resumes(tmp_path, interruptible):
    """--nproc 2 with shares, stopped by Ctrl-C after some step, then torchrun without to the end: the losses of one process, bit for bit (--ordered)."""
    whole = checks.gpuaccel(tmp_path / "a", "--ordered", "--steps", "60")
    first = checks.gpuaccel(
        tmp_path / "b", "--ordered", "--steps", "60", "--nproc", "2", "--sharded"
    )
    until = time.monotonic() + HANG
    while (
        not (tmp_path / "b" / "metrics.jsonl").exists() or len(checks.lines_of(tmp_path / "b")) < 3
    ):
        assert first.poll() is None and time.monotonic() < until, first.communicate()
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    out, said = first.communicate(timeout=HANG)
    assert first.returncode == 130 and "checkpoint written; --resume goes on" in said, (out, said)
    done = len(checks.lines_of(tmp_path / "b"))
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(checks.free_port()),
        "--max-restarts",
        "1",
        "--monitor-interval",
        "0.1",
        "-m",
        "gpuaccel",
    )
    rest = checks.gpuaccel(
        tmp_path / "b",
        "--ordered",
        "--steps",
        "60",
        "--resume",
        "--checkpoint-every",
        "2",
        launcher=torchrun,
    )
    while not any(
        checks.step_of(path) > done + 1 for path in (tmp_path / "b").glob("step-*.safetensors")
    ):
        assert rest.poll() is None and time.monotonic() < until, rest.communicate()
        time.sleep(0.01)
    ranks = checks.children_of(rest.pid)
    assert all(checks.listens_at(rank) == {"127.0.0.1"} for rank in ranks)
    os.kill(
        random.choice(ranks), signal.SIGKILL
    )  # torchrun starts all of them again, from the last checkpoint
    out, said = rest.communicate(timeout=HANG)
    assert rest.returncode == 0 and out.count("val loss") == 1 and whole.wait(HANG) == 0, said
    assert 3 <= done < 60 and checks.lines_of(tmp_path / "b") == checks.lines_of(tmp_path / "a")


def test_a_rank_that_hangs_is_named_by_those_that_wait_for_it(tmp_path):
    """Whoever has started them: --timeout seconds after the others came to where it did not. One that stops in the middle of a collective has come."""
    named = "gpuaccel: rank 0 of 2 cannot reach rank 1 of 2 in step [0-9]+: "
    assert any(re.search(named, hanging(tmp_path / str(attempt))) for attempt in range(4))


def hanging(folder):
    """Two ranks train, then rank 1 is stopped: what rank 0 says."""
    folder.mkdir()
    port = str(checks.free_port())
    ranks = [
        checks.gpuaccel(
            folder / "a",
            "--steps",
            "100000",
            "--timeout",
            "10",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE="2",
        )
        for rank in range(2)
    ]
    try:
        until = time.monotonic() + HANG
        while (
            not (folder / "a" / "metrics.jsonl").exists() or len(checks.lines_of(folder / "a")) < 3
        ):
            assert all(rank.poll() is None for rank in ranks) and time.monotonic() < until
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGSTOP)
        said = ranks[0].communicate(timeout=HANG)[1]
        assert ranks[0].returncode == 1 and re.search(
            "gpuaccel: rank 0 of 2 cannot reach (rank 1 of 2|another one) in step [0-9]+: ", said
        ), said
        return said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_ranks_of_one_start_meet_in_a_corner_that_earlier_starts_do_not_know():
    """torchrun keeps its store over restarts: what rank 1 of the first start left there is no rank 1 of the second."""
    shared = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(ranks, limit):
        def one(rank):
            try:
                store = dist.TCPStore(
                    "127.0.0.1", shared.port, is_master=False, timeout=timedelta(seconds=limit)
                )
                mine = rendezvous._corner(store, rank, 3, limit)
                mine.add("ranks", 1)
                found[rank] = mine
            except OSError as error:
                found[rank] = str(error)

        found = {}
        threads = [threading.Timer(0.1 * turn, one, (rank,)) for turn, rank in enumerate(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    for ranks in ((2, 1, 0), (0, 2, 1)):
        assert [corner.add("ranks", 0) for corner in start(ranks, HANG).values()] == [3] * 3
    assert start((0, 2), 3.0)[0] == "rank 1 did not come" and start((1, 2), 3.0) == {
        1: "rank 0 did not come",
        2: "rank 0 did not come",
    }
