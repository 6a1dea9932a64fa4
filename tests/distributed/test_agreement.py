"""What all ranks have in common, and what is said where a rank differs or brings a NaN."""

import re

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
        (
            dict(net=checks.LowBlock),
            "blocks.1.2.weight is bfloat16 .* on rank 1, and float32",
        ),
        (dict(config=dict(ordered=True)), "ordered is True on rank 1, and False on rank 0"),
        (dict(config=dict(bucket_mb=3.0)), "bucket_mb is 3.0 on rank 1, and 32.0 on rank 0"),
        (
            dict(lr=1e-2),
            "lr of the optimizer's group 0 is 0.01 on rank 1, and 0.001 on rank 0",
        ),
        (dict(accumulate="fused"), "accumulate is fused on rank 1, and arena on rank 0"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(workers, other, message):
    for kind, actual in workers.errors(checks.made, 2, other=other):
        assert kind == "ArgumentError" and re.search(message, actual), actual


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


def test_gloos_collectives_cannot_be_captured(workers):
    for kind, message in workers.errors(checks.made, 2, replay="graph"):
        assert kind == "ArgumentError"
        assert (
            "needs collectives that a CUDA graph can hold, those of NCCL; the group's are gloo's"
            in message
        )


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    "backend, mode, options",
    [
        ("torch", "arena", {}),
        ("simt", "arena", {}),
        ("simt", "fused", {}),
        ("simt", "arena", {"slab": 4096}),
        ("simt", "fused", {"compile": "as if", "where": "norm", "slab": 4096}),
        ("simt", "arena", {"where": "norm", "slab": 4096, "sharded": True}),
        ("torch", "fused", {"compile": "as if"}),
        ("simt", "fused", {"compile": "as if"}),
        ("simt", "fused", {"compile": "as if", "where": "norm"}),
    ],
)
def test_a_nan_on_one_rank_skips_the_step_on_all_and_names_the_rank(
    workers, backend, mode, options, ordered
):
    """DDP-003, as a skip: no rank takes the step, and each can say whose gradient it was, and of
    which tensor."""
    results = workers(
        checks.nan_on, 3, who=2, backend=backend, mode=mode, ordered=ordered, **options
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
    for ranks in (1, 2):
        assert workers(checks.late_tensor, ranks, find_unused=True) == [True] * ranks
    ((kind, message),) = workers.errors(checks.late_tensor, 2, expected=1, find_unused=False)
    assert kind == "ArgumentError" and message.startswith(
        "rank 1: sometimes got a gradient, and in the first step it got none on any rank"
    ), message
