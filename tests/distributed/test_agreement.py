"""What all ranks have in common, and what is said where a rank differs or brings a NaN."""

import inspect
import re
from dataclasses import fields

import pytest
import rank_checks as checks
import torch
from test_sums import SIMT

import gpuaccel as ga


def test_all_ranks_begin_with_the_weights_of_rank_0(workers):
    assert workers(checks.start_equal, 3) == [True] * 3


@pytest.mark.parametrize(
    "other, message",
    [
        (
            dict(net=checks.LargerHead),
            r"head.weight is float32 \[41, 16\], weight decay True, .* on rank 1, "
            r"and float32 \[40, 16\]",
        ),
        (dict(config=dict(ordered=True)), "ordered is True on rank 1, and False on rank 0"),
        (dict(config=dict(bucket_mb=3.0)), "bucket_mb is 3.0 on rank 1, and 32.0 on rank 0"),
        (
            dict(opt=dict(lr=1e-2)),
            "lr of the optimizer's group 0 is 0.01 on rank 1, and 0.001 on rank 0",
        ),
        (
            dict(opt=dict(on_nonfinite="raise")),
            "on_nonfinite of the optimizer is raise on rank 1, and skip",
        ),
        (dict(opt=dict(max_norm=0.5)), "max_norm of the optimizer is 0.5 on rank 1, and None"),
        (dict(opt=dict(seed=3)), "seed of the optimizer is 3 on rank 1, and 0"),
        (dict(autocast=torch.bfloat16), "autocast is torch.bfloat16 on rank 1, and None"),
        (dict(deterministic=True), "deterministic is True on rank 1, and False on rank 0"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(workers, other, message):
    for kind, actual in workers.errors(checks.made, 2, other=other):
        assert kind == "ArgumentError"
        assert re.search(f"^the ranks differ: {message}", actual), actual


@pytest.mark.parametrize(
    "options, message",
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
    with pytest.raises(ga.errors.ArgumentError, match=message):
        ga.Distributed(**options)


def test_default_values():
    values = {field.name: field.default for field in fields(ga.Distributed) if field.init}
    assert values == dict(
        group=None,
        dtype=torch.float32,
        ordered=False,
        sharded=False,
        broadcast_buffers=True,
        bucket_mb=32.0,
        find_unused=None,
        check_every=0,
        find_nonfinite_rank=True,
        peer_to_peer=None,
        timeout=600.0,
    )
    launch = inspect.signature(ga.launch).parameters
    expected = dict(ranks=2, args=(), backend=None, timeout=60.0, start=60.0, after_step=False)
    assert {name: launch[name].default for name in expected} == expected


def test_gloos_collectives_cannot_be_captured(workers):
    for kind, message in workers.errors(checks.made, 2, replay="graph"):
        assert kind == "ArgumentError"
        assert (
            "needs collectives that a CUDA graph can hold, those of NCCL; the group's are gloo's"
            in message
        )


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    "backend, products, options",
    [
        ("torch", False, {}),
        ("simt", False, {}),
        ("simt", True, {}),
        ("simt", False, {"slab": 4096}),
        ("simt", True, {"compile": "as if", "where": "norm", "slab": 4096}),
        ("simt", False, {"where": "norm", "slab": 4096, "sharded": True}),
        ("torch", True, {"compile": "as if"}),
        ("simt", True, {"compile": "as if"}),
        ("simt", True, {"compile": "as if", "where": "norm"}),
    ],
)
def test_a_nan_on_one_rank_skips_the_step_on_all_and_names_the_rank(
    workers, backend, products, options, ordered
):
    """DDP-003, as a skip: no rank takes the step, and each can say whose gradient it was, and of
    which tensor."""
    results = workers(
        checks.nan_on, 3, who=2, backend=backend, products=products, ordered=ordered, **options
    )
    for one in results:
        assert one["same"] and one["moved"] and not one["finite"] and one["skipped"] == 1
        before, skip, nonfinite = one["skips"]
        assert before is None
        assert skip["step"] == 2 and skip["rank"] == nonfinite["rank"] == 2
        assert skip["tensor"] == nonfinite["tensor"]
        assert skip["tensor"].startswith(options.get("where", "blocks.0"))
        assert one["hash"] == results[0]["hash"]


@pytest.mark.parametrize("backend", ["torch", SIMT])
def test_one_bit_that_differs_is_noticed(workers, backend):
    """DDP-001."""
    for kind, message in workers.errors(checks.drift, 3, who=1, backend=backend):
        assert kind == "RankError" and message.startswith(
            "after step 4 the weights of rank 1 are not those of rank 0: norm.weight is the first"
        ), message


def test_the_first_step_decides_which_tensors_take_part(workers):
    """Another one is an error, and no rank goes on alone: the other one has updated its weights."""
    for ranks in (1, 2):
        assert workers(checks.late_tensor, ranks, find_unused=True) == [(True, [])] * ranks
    first, (_, errors) = workers(checks.late_tensor, 2, find_unused=False)
    assert first == (False, []) and [kind for kind, _ in errors] == ["ArgumentError", "RankError"]
    assert errors[0][1].startswith(
        "rank 1: sometimes got a gradient, and in the first step it got none on any rank"
    )
    assert errors[1][1].startswith("rank 1 left an earlier step with an error")


@pytest.mark.parametrize("steps", [0, 2], ids=["at the start", "in each step"])
def test_buffers_of_any_dtype_are_rank_0s(workers, steps):
    (first, second) = workers(checks.buffers_of_rank_0, 2, steps=steps)
    assert first == second == [[1 + 0j] * 3] * 5 + [1 + 0j, [[1 + 0j] * 2], []]


def as_ddp(run, ranks, broadcast_buffers, device="cpu", **options):
    """BatchNorm's running means, and weights, are those of torch's DistributedDataParallel."""
    arguments = dict(broadcast_buffers=broadcast_buffers, device=device)
    expected = run(checks.normed_by_ddp, ranks, **arguments)
    actual = run(checks.normed_by_step, ranks, **arguments, **options)
    for rank, (mine, ddps) in enumerate(zip(actual, expected)):
        for name, value in ddps.items():
            value, got = torch.tensor(value), torch.tensor(mine[name])
            where = f"{name} of rank {rank}, {got}, {value}: "
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6, msg=where.__add__)
    assert actual[0]["layers.1.running_mean"] != actual[1]["layers.1.running_mean"]


@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize("options", [{}, {"as_list": True}, {"deterministic": True}], ids=str)
def test_running_means_are_those_of_ddp(workers, options, broadcast_buffers):
    as_ddp(workers, 2, broadcast_buffers, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("replay", ["eager", "graph"])
def test_gpus_running_means_are_those_of_ddp(gpu_workers, replay, as_list, broadcast_buffers):
    as_ddp(gpu_workers(2), 2, broadcast_buffers, "cuda", replay=replay, as_list=as_list)


def test_a_rank_that_takes_a_step_again_broadcasts_no_buffers_twice(workers):
    one, other = workers(checks.tries_again, 2)
    assert one["layers.0.weight"] == other["layers.0.weight"]


def test_without_buffers_nothing_is_broadcast(workers):
    for with_buffers, without in workers(checks.broadcasts, 2):
        assert (with_buffers, without) == (4, 0)


# ---- what a step returns -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss_fn, tokens", [(checks.weighted, pytest.approx(2.5)), (checks.mean_of_squares, None)]
)
def test_a_rank_without_a_batch_says_what_the_others_say(workers, loss_fn, tokens):
    """Of tokens that are no whole numbers, and of means, which have none."""
    one, other = workers(checks.only_rank_0_has_batches, 2, loss_fn=loss_fn)
    assert one == other and one[:2] == (torch.float32, tokens)


def test_a_step_without_any_batch_changes_nothing(workers):
    assert workers(checks.nobody_has_a_batch, 2) == [(True, True)] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_follows_one_whose_norm_was_not_finite(workers, sharded):
    """The error is raised on all ranks, before any weight has changed."""
    said = ["fine", "NonFiniteError", "fine", "fine"]
    assert workers(checks.nonfinite_raises, 2, sharded=sharded) == [said] * 2


# ---- the end of a run ----------------------------------------------------------------------------


def test_batches_of_one_length_end_with_a_checkpoint(workers, tmp_path):
    def run(name, lengths, hidden=False):
        return workers(
            checks.trained_to_the_end_of_batches,
            2,
            folder=str(tmp_path / name),
            lengths=lengths,
            hidden=hidden,
        )

    assert run("equal", (3, 3)) == [(3, ["step-00000003.safetensors"])] * 2
    # Nobody knows whether the others leave, too.
    assert run("hidden", (3, 3), hidden=True) == [(3, [])] * 2
