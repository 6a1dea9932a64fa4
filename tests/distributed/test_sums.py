"""Data-parallel training: ranks are one process, bit for bit where that is promised."""

import importlib.util
import math
import shutil

import pytest
import rank_checks as checks
import torch

import gpuaccel as ga
from gpuaccel.backends import find_compiler

SIMT = pytest.param(
    "simt", marks=pytest.mark.skipif(find_compiler()[0] is None, reason="needs a C++ compiler")
)
NEEDS_PEFT = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft, of the extra `test`, is not installed"
)


def words(options):
    """Names a case."""
    if not isinstance(options, dict):
        return str(options)
    return " ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in options.items())


def near_one_process(results, bound=1e-6, losses=None):
    """results: of as_one_process. bound: of the weights' distance in units of their norm; losses:
    relative, of losses and norms."""
    losses = losses or 20 * bound
    for rank, one in enumerate(results):
        assert one["moved"] > 1e-3, "the weights hardly moved: nothing was compared"
        assert one["off"] <= bound, (
            f"rank {rank}: the weights are off by {one['off']:.3g} of their norm, "
            f"{one['name']} most"
        )
        assert one["hash"] == results[0]["hash"], f"rank {rank} has other weights than rank 0"
        for actual, expected in zip(one["outs"], one["expected_outs"]):
            assert actual[1] == expected[1], f"tokens: {actual[1]}, expected {expected[1]}"
            for a, b in ((actual[0], expected[0]), (actual[2], expected[2])):
                assert a is b or math.isclose(a, b, rel_tol=losses), (
                    f"rank {rank}: {one['outs']}, expected {one['expected_outs']}"
                )


def is_one_process(results):
    """Bit-identical weights, losses and norms."""
    for rank, one in enumerate(results):
        assert one["moved"] > 1e-3, "the weights hardly moved: nothing was compared"
        assert one["same"], f"rank {rank}: off by {one['off']:.3g} of the norm, {one['name']} most"
        for actual, expected in zip(one["outs"], one["expected_outs"]):
            # Where loss_fn returns means, only a step of several ranks counts micro-batches.
            tokens = expected[1] is None or actual[1] == expected[1]
            assert tokens and actual[::2] == expected[::2], (one["outs"], one["expected_outs"])


# ---- all-reduce ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, shares", [(2, [2, 2]), (4, [1, 2, 0, 1])])
@pytest.mark.parametrize("products", [False, True])
def test_ranks_are_one_process(workers, products, ranks, shares):
    """DDP-001, -004. Uneven tokens, rows and micro-batches, a rank without any, tied weights,
    tensors that some or all ranks do not use. After each step all ranks have equal weights."""
    for kind in ("adamw", "sgd"):
        options = dict(deterministic=products, kind=kind, tied=products)
        near_one_process(workers(checks.as_one_process, ranks, shares=shares, **options))


@pytest.mark.parametrize("backend", [SIMT])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(tied=True),
        dict(net=checks.Twice),
        dict(net=checks.ProductsOnly),
        dict(config=dict(sharded=True)),
        dict(config=dict(sharded=True, dtype=torch.bfloat16)),
    ],
    ids=words,
)
def test_what_a_compiled_backward_sends_early(workers, options, backend):
    """Products say when they were added; other tensors of a bucket are sent behind the last one."""
    bound = 2e-3 if "dtype" in options.get("config", {}) else 1e-6
    fused = dict(deterministic=True, compile="as if", backend=backend)
    results = workers(checks.as_one_process, 2, shares=[2, 1], **fused, **options)
    near_one_process(results, bound, losses=10 * bound)


@pytest.mark.parametrize("backend", [SIMT])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(deterministic=True, tied=True),
        dict(deterministic=True, config=dict(find_nonfinite_rank=False, bucket_mb=0.02)),
        pytest.param(dict(deterministic=True, net=checks.adapted), marks=NEEDS_PEFT),
    ],
    ids=words,
)
def test_with_our_kernels(workers, options, backend):
    results = workers(checks.as_one_process, 2, shares=[2, 1], backend=backend, **options)
    near_one_process(results)


@pytest.mark.parametrize(
    "options",
    [
        # A bf16 weight may be rounded the other way where a sum has another order.
        dict(low=torch.bfloat16, config=dict(bucket_mb=1.0), bound=2e-3),
        # Each rank rounds its sum once.
        dict(kind="sgd", config=dict(dtype=torch.bfloat16), bound=2e-3, losses=1e-2),
        dict(loss_fn=checks.mean_loss),
        dict(max_norm=0.05, kind="sgd"),
        # Reentrant checkpointing: backwards inside of the backward.
        dict(net=checks.Checkpointed),
    ],
    ids=words,
)
def test_every_dtype_divisor_and_clip(workers, options):
    options = dict(options)
    bound, losses = options.pop("bound", 1e-6), options.pop("losses", None)
    results = workers(checks.as_one_process, 2, shares=[2, 1], **options)
    near_one_process(results, bound, losses)


# Rows of each rank, step by step; in the last ones some have less than 4 micro-batches need.
SHORT = {
    2: [[4, 8], [3, 1], [1, 0], [0, 5]],
    3: [[4, 4, 4], [9, 1, 2], [0, 0, 3], [2, 0, 7]],
}


def is_one_rank_with_all_rows(results):
    for off, moved, outs, expected_outs in results:
        assert moved > 0.01 and off < 1e-6
        torch.testing.assert_close(outs, expected_outs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(deterministic=True),
        dict(config=dict(ordered=True)),
    ],
    ids=words,
)
@pytest.mark.parametrize("ranks", SHORT)
def test_short_batches_are_one_rank_with_all_rows(workers, ranks, options):
    """Ranks with different numbers of rows, fewer than micro-batches, or none."""
    is_one_rank_with_all_rows(workers(checks.short_batches, ranks, rows=SHORT[ranks], **options))


@pytest.mark.gpu
@pytest.mark.parametrize("replay", ["eager", "graph"])
def test_gpus_short_batches_are_one_rank_with_all_rows(gpu_workers, replay):
    options = dict(device="cuda", replay=replay)
    is_one_rank_with_all_rows(gpu_workers(2)(checks.short_batches, 2, rows=SHORT[2], **options))


def test_a_weight_shared_by_checkpointed_blocks_would_be_sent_too_early(workers):
    """Said, and not gone on with."""
    for first, second in workers(checks.step_that_raises, 2):
        assert first.startswith("blocks.0.0.weight got more of its gradient after that was sent")
        assert "use_reentrant=False" in first
        assert "left an earlier step with an error after it had sent part" in second


@pytest.mark.parametrize("products", [False, True])
def test_buckets_are_sent_while_backward_runs(workers, products):
    """Contiguous, whole blocks, from the last layer to the first; also a head larger than a
    bucket."""
    for order, is_arena in workers(checks.order_of_buckets, 2, products=products):
        numbers, in_backward = zip(*order)
        assert is_arena and numbers == tuple(range(len(numbers))) and len(numbers) > 3
        assert all(in_backward[:-1]), order


# ---- ordered -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(backend="simt", low=torch.bfloat16),
        dict(max_norm=0.05, kind="sgd"),
        # A plain step divides means beforehand, or adds inside of the product: plain=False.
        dict(loss_fn=checks.mean_loss, plain=False),
        dict(deterministic=True, tied=True, plain=False),
        dict(deterministic=True, backend="simt", plain=False),
    ],
    ids=words,
)
@pytest.mark.parametrize("ranks, shares", [(2, [3, 3]), (3, [2, 2, 0])])
def test_ordered_sums_are_those_of_one_process(workers, ranks, shares, options):
    """N ranks with M micro-batches each, and one with N * M, are bit-identical."""
    config = dict(ordered=True)
    is_one_process(workers(checks.as_one_process, ranks, shares=shares, config=config, **options))


def test_one_rank_needs_no_reducer():
    """Without a process group, and without ordered mode, there is nothing to reduce."""
    config = ga.Distributed()
    assert (config.rank, config.world, config.needs_reducer) == (0, 1, False)
    assert not torch.distributed.is_initialized()
    with checks.make_step(model := checks.Net(), distributed=config) as step:
        assert step.reducer is None
        step([checks.micro_batch(0)])
        with checks.make_step(plain := checks.Net()) as other:
            other([checks.micro_batch(0)])
            assert all(map(torch.equal, model.parameters(), plain.parameters()))


# ---- peer-to-peer copies -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(tied=True),
        dict(deterministic=True, compile="as if"),
        dict(config=dict(sharded=True)),
        dict(deterministic=True, compile="as if", config=dict(sharded=True)),
        dict(low=torch.bfloat16, config=dict(sharded=True)),
    ],
    ids=words,
)
@pytest.mark.parametrize("ranks, slab", [(2, 1 << 22), (3, 4096)])
@pytest.mark.parametrize("backend", [SIMT])
def test_copies_are_added_in_the_order_of_the_ranks(workers, backend, ranks, slab, options):
    """As on GPUs, between files in place of GPUs' memory: bit-identical to one process that adds
    one micro-batch after the other. gloo adds the small tensors beside a compiled backward in an
    order of its own."""
    options = dict(backend=backend, plain=False, slab=slab, **options)
    results = workers(checks.as_one_process, ranks, shares=[1] * ranks, **options)
    gloo_adds = ranks > 2 and "compile" in options
    for one in results:
        assert one["log"] == [f"gradients are added up by peer-to-peer copies of {ranks} ranks"]
        assert one["moved"] > 0.01
        assert one["off"] <= 1e-6 if gloo_adds else one["same"], (one["name"], one["off"])


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [2, 4])
def test_gpus_add_large_buckets_in_a_graph(gpu_workers, gpus):
    assert gpu_workers(gpus)(checks.added_by_a_graph, gpus) == [[True] * 2] * gpus


@pytest.mark.skipif(find_compiler()[0] is None, reason="needs a C++ compiler")
def test_a_second_step_takes_the_place_of_the_first_and_a_refused_one_leaves_it_alone(workers):
    for second, closed, refusal, refused, one in workers(checks.second_step, 2):
        assert second == refused == one
        assert "this TrainStep is closed" in closed and "no optimizer holds" in refusal


@pytest.mark.parametrize(
    "options, reason",
    [
        (
            dict(slab=0),
            "the 3 ranks' collectives are gloo's, the model is on cpu, backend torch",
        ),
        (dict(machines="001"), "the ranks are on 2 machines"),
        (dict(config=dict(ordered=True)), "sums are ordered"),
        (dict(config=dict(dtype=torch.bfloat16)), "sums are sent in torch.bfloat16"),
        (dict(full=[2]), "on rank 2: [Errno 28] No space left on device"),
    ],
    ids=words,
)
def test_copies_that_are_not_possible_are_refused_on_all_ranks(workers, options, reason):
    """Or not made, unless they are demanded."""
    for copies, error in workers(checks.copies_refused, 3, **options):
        assert copies is None
        assert error.startswith(f"peer_to_peer is True, and {reason}; expected the GPUs of one")


# ---- a transformer, on CPUs and GPUs -------------------------------------------------------------

TRANSFORMERS = [
    dict(),
    dict(low=torch.bfloat16),
    dict(dtype=torch.bfloat16),
    dict(ordered=True),
    dict(sharded=True),
    dict(sharded=True, low=torch.bfloat16),
    dict(low=torch.bfloat16, compile=True),
    dict(compile=True, sharded=True),
    dict(peer_to_peer=False),
    dict(sharded=True, compile=True, peer_to_peer=False),
]


def check_transformers(results, options):
    """Bit-identical on all ranks, and near one process; in order: equal to it."""
    bound = 1e-5
    if "ordered" in options:
        bound = 0.0
    elif "dtype" in options or "low" in options:
        bound = 2e-2
    for one in results:
        assert (one["hash"], one["losses"]) == (results[0]["hash"], results[0]["losses"])
        assert one["off"] <= bound
        assert "compile" not in options or max(one["left"]) > 0, (
            "no bucket was sent before the compiled backward's last product"
        )


@pytest.mark.slow
@pytest.mark.parametrize("options", [TRANSFORMERS[k] for k in (0, 1, 3, 7)], ids=words)
def test_a_transformer_on_two_ranks(workers, options):
    if options.get("compile") and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("inductor needs a C++ compiler for the CPU, and there is none")
    results = workers(checks.transformer, 2, device="cpu", replay="eager", **options)
    check_transformers(results, options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "gpus, options",
    [*((2, options) for options in TRANSFORMERS), *((4, TRANSFORMERS[k]) for k in (0, 3, 6, 7))],
    ids=words,
)
def test_gpus_eager_and_captured(gpu_workers, gpus, options):
    """A graph that holds the collectives is bit-identical to the eager step."""
    results = []
    for replay in ("eager", "graph"):
        results += gpu_workers(gpus)(
            checks.transformer, gpus, device="cuda", replay=replay, **options
        )
    check_transformers(results, options)
    copies = not options.keys() & {"dtype", "ordered"} and options.get("peer_to_peer", True)
    assert all(one["copies"] == copies for one in results)
