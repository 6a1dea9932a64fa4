"""What notebook 01 shows: its pictures say what they draw, its gradients are those of the steps."""

import pytest
import torch

import gpuaccel as ga
from gpuaccel.learn import places
from gpuaccel.learn.figures import accumulate_figures
from gpuaccel.learn.gradients import addition_here, step_gradient


@pytest.fixture(scope="module")
def batch():
    data = ga.make_dataset(max_bytes=200_000)
    return next(ga.Batches(data.train, batch=4, T=32, device=ga.default_device()))


def test_the_picture_of_micro_batches_counts_its_gradients():
    figure = accumulate_figures.micro_batches(rows=8, pieces=4)
    assert str(figure) == "8 rows in 4 micro-batches: 4 gradients, one sum, one step"
    assert [f"gradient {k}" in figure.drawn for k in range(5)] == [True] * 4 + [False]


def test_the_picture_of_chunks_counts_blocks_as_the_arena_does():
    figure = accumulate_figures.chunks([("a", 5), ("b", 12), ("c", 3)], chunk=8)
    assert "3 tensors in 4 chunks of 8: 4 blocks" in str(figure)
    assert "block 3" in figure.drawn and "block 4" not in figure.drawn


@pytest.mark.parametrize("place", [None, places.by_backward, *places.PLACES.values()])
def test_the_gradient_of_a_step_is_torchs(batch, place):
    torch.manual_seed(0)
    model = ga.Transformer(ga.preset("tiny")).to(ga.default_device())
    logits = model(batch[0])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    gradient = step_gradient(batch, place, micro_batches=2)
    torch.testing.assert_close(gradient.norm(), expected, rtol=1e-4, atol=0.0)
    assert gradient.dtype == torch.float32 and gradient.dim() == 1


def test_unequal_micro_batches_differ_only_when_their_means_are_averaged(batch):
    inputs, targets = batch
    targets = targets.clone()
    targets[:2, 4:] = -100
    whole = step_gradient((inputs, targets))
    by_tokens = step_gradient((inputs, targets), None, 2, "tokens")
    by_means = step_gradient((inputs, targets), None, 2, "micro_batches")
    assert (by_tokens - whole).norm() < 1e-4 * whole.norm()
    assert (by_means - whole).norm() > 1e-2 * whole.norm()


@pytest.mark.parametrize("place", places.PLACES.values())
def test_a_plain_step_trains_as_a_train_step_does(place):
    """bf16 weights; sums in bf16, and products that are not rounded, differ a little."""
    tokens = torch.randint(0, 256, (8, 17), device=ga.default_device())

    def weights(make):
        torch.manual_seed(0)
        config = ga.preset("tiny", layers=1, hidden=32, intermediate=64, heads=2, kv_heads=2)
        model = ga.Transformer(config).to(ga.default_device(), ga.default_dtype())
        arena = ga.Arena(model)
        step = make(model, torch.optim.SGD(arena.parameters(), lr=0.1))
        *_, reading = ga.train(step, [(tokens[:, :-1], tokens[:, 1:])] * 3, steps=3)
        step.close()
        return arena.weights, reading

    ours, reading = weights(
        lambda *a: places.PlainStep(
            *a, place, micro_batches=4, max_norm=0.5, clip=places.clip_by_item
        )
    )
    expected, theirs = weights(lambda *a: ga.TrainStep(*a, micro_batches=4, max_norm=0.5))
    assert (ours - expected).norm() < 2e-3 * expected.norm()
    assert reading.norm == pytest.approx(theirs.norm, rel=2e-2)
    assert reading.clipped_norm == pytest.approx(theirs.clipped_norm, rel=1e-2)
    assert {"forward", "backward", "accumulate", "clip", "optimizer"} <= reading.stages.keys()


def test_products_add_while_the_place_runs_only():
    model = ga.Transformer(ga.preset("tiny", layers=1))
    arena = ga.Arena(model)
    with places.adding_linears(arena):
        assert "forward" in vars(model.lm_head)
    assert "forward" not in vars(model.lm_head)


@pytest.mark.gpu
def test_the_rates_of_this_gpu_are_drawn():
    words = str(addition_here(2**22))
    assert "accumulate_v2" in words and "GB/s" in words
