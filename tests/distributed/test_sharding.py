"""A sharded optimizer (ZeRO stage 1): its updates, its memory, and its checkpoints."""

import pytest
import rank_checks as checks
import torch
from test_sums import NEEDS_PEFT, SIMT, is_one_process, near_one_process, words


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(backend="simt"),
        dict(backend="simt", deterministic=True, tied=True),
        pytest.param(
            dict(backend="simt", deterministic=True, net=checks.adapted), marks=NEEDS_PEFT
        ),
        dict(backend="simt", low=torch.bfloat16, bound=2e-3),
        dict(low=torch.bfloat16, bound=2e-3),
        dict(backend="simt", config=dict(dtype=torch.bfloat16), bound=2e-2),
    ],
    ids=words,
)
@pytest.mark.parametrize("ranks, shares", [(2, [2, 2]), (4, [1, 2, 0, 1])])
def test_a_sharded_optimizer_is_one_process(workers, ranks, shares, options):
    options = dict(options)
    bound = options.pop("bound", 1e-6)
    config = {"sharded": True, **options.pop("config", {})}
    results = workers(checks.as_one_process, ranks, shares=shares, config=config, **options)
    near_one_process(results, bound, losses=10 * bound)


@pytest.mark.parametrize("backend", ["torch", SIMT])
def test_shards_change_no_bit_and_need_less_memory(workers, backend):
    """Ordered and sharded, against one process. Each rank keeps the moments of its share, and of a
    few chunks that every rank updates."""
    config = dict(ordered=True, sharded=True)
    shares = [2, 2, 2]
    is_one_process(workers(checks.as_one_process, 3, shares=shares, backend=backend, config=config))
    for kept, whole, common in workers(checks.memory_of_moments, 3, backend=backend):
        assert kept <= whole / 3 + common and kept < whole / 2


@pytest.mark.parametrize("before, after", [(True, False), (False, True)])
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", SIMT])
def test_a_run_goes_on_with_shards_or_without(workers, backend, low, before, after):
    """The masters of bf16 weights are whole on every rank once a sharded step is closed. A state
    that is there is cut into shards."""
    options = dict(backend=backend, low=low, before=before, after=after)
    assert workers(checks.on_with_other_shards, 2, **options) == [True, True]


@pytest.mark.parametrize("backend", ["torch", SIMT])
def test_an_error_leaves_no_master_behind_its_weight(workers, backend):
    """Of other ranks' ranges the extra bits are lost with the state, the steps are not."""
    assert workers(checks.left_alone, 2, backend=backend) == [(True, True)] * 2


def test_the_state_dict_of_a_sharded_optimizer_is_whole_or_an_error(workers):
    """Never this rank's share."""
    for error, whole, after in workers(checks.state_dict_of_shards, 2):
        assert error.startswith("state_dict() of a sharded optimizer") and "gathered()" in error
        assert whole and after == error


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_goes_on_with_another_number_of_ranks(workers, sharded, tmp_path):
    """ga.train, ordered: the losses of 4 ranks, of 2 after 1, and of 2 after 2 are those of a run
    that nobody stopped, bit for bit."""
    folder = str(tmp_path / "4")
    whole = workers(checks.trained, 4, folder=folder, stops=0, ranks_then=0, sharded=sharded)[0]
    assert len(whole) == 5
    for ranks_then in (1, 2):
        options = dict(folder=str(tmp_path / f"2 after {ranks_then}"), stops=2, sharded=sharded)
        assert workers(checks.trained, 2, ranks_then=ranks_then, **options)[0] == whole


@pytest.mark.parametrize("sharded", [False, True])
def test_dropout_goes_on_as_it_was_on_every_rank(workers, sharded, tmp_path):
    losses = []
    for stops in (0, 2):
        options = dict(
            folder=str(tmp_path / f"{stops}"), stops=stops, sharded=sharded, dropout=True
        )
        losses.append(workers(checks.trained, 2, ranks_then=2, **options)[0])
    assert len(losses[0]) == 5 and losses[0] == losses[1]


def test_only_our_optimizer_over_the_arena_is_sharded(workers):
    for kind, message in workers.errors(checks.made, 2, config=dict(sharded=True), sgd=True):
        assert kind == "ArgumentError"
        assert "sharded=True with SGD: a rank has its share of the gradient" in message
