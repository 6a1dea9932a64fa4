"""Several machines with several ranks: sums inside of a machine by copies, between machines by the
ranks with one number. Here all ranks are processes of one machine that take each other for others'
(rank_checks.machines_of); test_machines.py has machines with a network between them."""

import pytest
import rank_checks as checks
import torch
from test_sums import (
    SIMT,
    TRANSFORMERS,
    check_transformers,
    is_one_process,
    near_one_process,
    words,
)

from gpuaccel.distributed.machines import Machines, machine_name
from gpuaccel.distributed.p2p import in_words

SIZES = [[2, 2], [1, 1, 1], [1, 1, 1, 1], [1, 1]]


# ---- the order of additions ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", ["torch", SIMT])
def test_ranks_are_added_in_their_order_then_machines_in_theirs(workers, backend, sizes, sharded):
    """Bit-identical to additions in that order, of numbers whose sum depends on it."""
    ranks = sum(sizes)
    results = workers(checks.added, ranks, sizes=sizes, backend=backend, sharded=sharded)
    everyone = [checks.gradients_of(r, 1 << 14) for r in range(ranks)]
    if ranks > 2:
        rotated = [*everyone[1:], everyone[0]]
        assert not torch.equal(
            checks.sums_in_order(everyone, sizes), checks.sums_in_order(rotated, sizes)
        )
    inside = f"peer-to-peer copies of {sizes[0]} ranks on each machine, and " * (sizes[0] > 1)
    said = f"gradients are added up by {inside}gloo between {len(sizes)} machines"
    for lines, same, left_out in results:
        assert lines == [said] and same
        assert (left_out > 0) == (sharded and backend != "torch")


@pytest.mark.gpu
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("sizes", [[1, 1], [2, 2], [1, 1, 1, 1]], ids=str)
def test_gpus_are_added_in_the_same_order(gpu_workers, sizes, sharded):
    ranks = sum(sizes)
    options = dict(sizes=sizes, backend="cuda", sharded=sharded, device="cuda")
    for lines, same, left_out in gpu_workers(ranks)(checks.added, ranks, **options):
        assert f"NCCL between {len(sizes)} machines" in lines[0] and same
        assert (left_out > 0) == sharded


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[1, 1], [2, 2]], ids=str)
def test_gpus_add_large_buckets_in_a_graph(gpu_workers, sizes):
    """NCCL registers large buffers then. Where it did so on one side only, no sum ever arrived."""
    ranks = sum(sizes)
    assert gpu_workers(ranks)(checks.added_by_a_graph, ranks, sizes=sizes) == [[True] * 2] * ranks


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(kind="sgd"),
        dict(deterministic=True, tied=True),
        dict(deterministic=True, compile="as if"),
        dict(config=dict(sharded=True)),
        dict(max_norm=0.05, kind="sgd"),
    ],
    ids=words,
)
@pytest.mark.parametrize("shares", [[2, 2, 2, 2], [1, 2, 0, 1]], ids=str)
def test_two_machines_of_two_ranks_are_one_process(workers, shares, options):
    near_one_process(workers(checks.as_one_process, 4, shares=shares, sizes=[2, 2], **options))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(config=dict(sharded=True)),
        dict(deterministic=True, tied=True),
        dict(deterministic=True, compile="as if", config=dict(sharded=True)),
        dict(low=torch.bfloat16, config=dict(sharded=True), bound=2e-3),
    ],
    ids=words,
)
@pytest.mark.parametrize("backend", [SIMT])
def test_two_machines_with_our_kernels(workers, backend, options):
    options = dict(options)
    bound = options.pop("bound", 1e-6)
    options = dict(shares=[1, 2, 0, 1], sizes=[2, 2], backend=backend, **options)
    near_one_process(workers(checks.as_one_process, 4, **options), bound, losses=10 * bound)


@pytest.mark.parametrize("config", [dict(), dict(sharded=True)], ids=words)
@pytest.mark.parametrize("backend", ["torch", SIMT])
@pytest.mark.parametrize("sizes", [[1, 1], [1, 1, 1]], ids=str)
def test_machines_of_one_rank_add_in_the_order_of_one_process(workers, sizes, backend, config):
    """Bit-identical to one process that adds one micro-batch after the other."""
    shares = [1] * len(sizes)
    options = dict(sizes=sizes, backend=backend, config=config, plain=False)
    for one in workers(checks.as_one_process, len(sizes), shares=shares, **options):
        assert one["moved"] > 0.01 and one["same"], (one["name"], one["off"])


@pytest.mark.parametrize(
    "config", [dict(), dict(sharded=True), dict(peer_to_peer=False)], ids=words
)
@pytest.mark.parametrize("backend", ["torch", SIMT])
@pytest.mark.parametrize("shares", [[2, 2, 2, 2], [1, 2, 0, 3]], ids=str)
def test_ordered_sums_of_two_machines_are_those_of_one_process(workers, shares, backend, config):
    """With two levels, and with one (peer_to_peer=False)."""
    config = dict(ordered=True, **config)
    options = dict(shares=shares, sizes=[2, 2], backend=backend, config=config)
    is_one_process(workers(checks.as_one_process, 4, **options))


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", SIMT])
def test_shards_change_no_bit_on_two_machines(workers, backend, low):
    """Weights, masters and moments, as they are gathered, are those of a run without shards."""
    results = workers(checks.state_of_shards, 4, sizes=[2, 2], backend=backend, low=low)
    assert all(same for same, _ in results)
    assert all(hashes == results[0][1] for _, hashes in results)


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
def test_a_sharded_checkpoint_of_two_machines_is_read_by_one(workers, low, tmp_path):
    options = dict(sizes=[2, 2], folder=str(tmp_path), low=low)
    assert workers(checks.shards_of_machines, 4, **options) == [True] * 4


@pytest.mark.parametrize("backend", ["torch", SIMT])
@pytest.mark.parametrize("products, ordered", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("sizes", [[2, 2], [1, 1, 1, 1]], ids=str)
def test_the_rank_of_a_nan_is_found_on_any_machine(workers, sizes, products, ordered, backend):
    for who in (1, 2):
        options = dict(who=who, sizes=sizes, backend=backend, products=products, ordered=ordered)
        for one in workers(checks.nan_on, 4, **options):
            assert one["same"] and one["moved"] and not one["finite"] and one["skipped"] == 1
            assert one["skips"][2]["rank"] == who and one["skips"][1]["rank"] == who


# ---- what is chosen, and why ---------------------------------------------------------------------


def test_one_level_where_machines_cannot_be_blocks(workers):
    flat = "gradients are added up by gloo: "
    for names, reason in (
        ("aab", "the machines have 1 and 2 ranks"),
        ("abba", "the ranks of a machine are not neighbours"),
    ):
        results = workers(checks.reduced_by, len(names), names=names)
        assert results == [[flat + reason]] * len(names)
    config = dict(dtype=torch.bfloat16)
    for lines in workers(checks.reduced_by, 4, names="aabb", config=config):
        assert lines == [flat + "sums are sent in torch.bfloat16"]
    assert workers(checks.reduced_by, 4, names="aabb", config=dict(peer_to_peer=False)) == [[]] * 4


def test_one_level_where_a_rank_has_no_memory_to_share(workers):
    """All ranks go on with gloo, and say why."""
    for lines in workers(checks.reduced_without_memory, 4, names="aabb", who=2):
        assert lines == [
            "gradients are added up by gloo: on rank 2: [Errno 28] No space left on device"
        ]


def test_copies_that_are_demanded_and_impossible_are_an_error(workers):
    options = dict(names="aab", config=dict(peer_to_peer=True))
    for kind, message in workers.errors(checks.reduced_by, 3, **options):
        assert kind == "ArgumentError"
        assert message.startswith("peer_to_peer is True, and the machines have 1 and 2 ranks; ")


def test_a_node_of_torchrun_is_a_machine(monkeypatch):
    """Two on one host, as they are started to try two machines, are two."""
    names = set()
    for node in ("0", "1", "1"):
        monkeypatch.setenv("GROUP_RANK", node)
        names.add(machine_name())
    assert len(names) == 2


def test_ordered_sums_say_that_they_have_two_levels(workers):
    for lines in workers(checks.reduced_by, 4, names="aabb", config=dict(ordered=True)):
        assert lines == ["ordered sums go from machine to machine: 2 machines of 2 ranks"]


def test_groups_are_made_once(workers):
    """A communicator of NCCL takes memory, and is never given back."""
    assert workers(checks.groups_made, 4, names="aabb") == [0] * 4


# ---- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("options", [TRANSFORMERS[k] for k in (0, 3, 4, 5, 6, 7)], ids=words)
@pytest.mark.parametrize("sizes", [[1, 1], [2, 2]], ids=str)
def test_gpus_of_two_machines_eager_and_captured(gpu_workers, sizes, options):
    """A graph that holds copies and NCCL's collectives between machines is bit-identical to the
    eager step. Two ranks are added in one order only: as two machines they are bit-identical to two
    ranks of one."""
    gpus, results = sum(sizes), []
    for replay in ("eager", "graph"):
        for placed in [sizes, None] if gpus == 2 and "compile" not in options else [sizes]:
            results += gpu_workers(gpus)(
                checks.transformer, gpus, device="cuda", replay=replay, sizes=placed, **options
            )
    check_transformers(results, options)
    if "ordered" not in options:
        assert all(one["copies"] for one in results)
    if gpus > 2:
        assert all(one["levels"] == 2 for one in results)


@pytest.mark.parametrize(
    "count, size, words",
    [
        (1, 4, "peer-to-peer copies of 4 ranks"),
        (2, 4, "peer-to-peer copies of 4 ranks on each machine, and NCCL between 2 machines"),
        (8, 1, "NCCL between 8 machines"),
    ],
)
def test_the_log_says_what_adds_up_gradients(count, size, words):
    assert in_words(Machines(count, size, 0, 0, None, None), "nccl") == words
