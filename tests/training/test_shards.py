"""Batches of several ranks: ga.training.shard, and ga.training.Batches(rank=, ranks=)."""

import pytest
import torch

import gpuaccel as ga


@pytest.mark.parametrize("count, ranks", [(8, 2), (7, 2), (5, 4), (4, 4), (9, 1)])
@pytest.mark.parametrize("seed", [None, 3])
def test_shares_are_disjoint_and_complete(count, ranks, seed):
    """SHARD-001, -002, -004. Interleaved; shuffled anew in each epoch, the same in each run; every
    rank has as many turns."""
    shares = [ga.training.shard(range(count), rank, ranks, seed=seed) for rank in range(ranks)]
    turns = -(-count // ranks)
    assert [len(share) for share in shares] == [turns] * ranks
    order = [share[turn] for turn in range(turns) for share in shares]
    assert order[count:] == [None] * (turns * ranks - count)
    assert sorted(order[:count]) == list(range(count))
    if seed is None:
        assert order[:count] == list(range(count))
    else:
        assert shares[0] == ga.training.shard(range(count), 0, ranks, seed=seed)
        assert order[:count] != list(range(count)) or count < 5


def test_fewer_batches_than_ranks_is_an_error():
    """SHARD-003."""
    with pytest.raises(
        ga.errors.DataError, match="2 batches for 3 ranks; expected at least one for each"
    ):
        ga.training.shard([1, 2], 0, 3)
    with pytest.raises(
        ga.errors.DataError, match="an epoch has 10 sequences of T=4, 2 batches of 4, for 3 ranks"
    ):
        ga.training.Batches(torch.arange(41), 4, 4, ranks=3)
    for options, message in (
        (dict(rank=2, ranks=2), "rank is 2 of 2; expected 0 to 1"),
        (dict(rank=0, ranks=0), "rank is 0 of 0"),
        (dict(ranks=2, micro_batches=3), "a batch of 4 sequences in 3 micro-batches"),
    ):
        with pytest.raises(ga.errors.ArgumentError, match=message):
            ga.training.Batches(torch.arange(410), 4, 4, **options)


@pytest.mark.parametrize("ranks, micro_batches", [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_what_all_ranks_take_in_a_step_depends_on_their_product_only(ranks, micro_batches):
    """SHARD-005: micro-batch m of rank r is number m * ranks + r, over three epochs and a change of
    ranks in the middle. All ranks have the same position."""
    tokens = torch.arange(20 * 4 + 1)
    whole = ga.training.Batches(tokens, 6, 4, seed=5)
    shards = [
        ga.training.Batches(
            tokens, micro_batches, 4, 5, rank=r, ranks=ranks, micro_batches=micro_batches
        )
        for r in range(ranks)
    ]
    for step in range(10):
        expected = next(whole)[0]
        micros = torch.stack([next(batches)[0] for batches in shards], 1)
        assert torch.equal(micros.flatten(0, 1), expected), step
        assert all(batches.state_dict() == whole.state_dict() for batches in shards)
        if step == 4:
            other = ga.training.Batches(tokens, 6, 4, seed=0)
            other.load_state_dict(shards[-1].state_dict())
            whole = other
