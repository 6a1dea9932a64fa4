"""The list of the kernels that a step launches, and the rungs drawn side by side."""

import pytest
import torch
from pictures import text_of

import gpuaccel as ga
from gpuaccel.backends import find_compiler
from gpuaccel.compiler import kernel_files, kernel_names
from gpuaccel.learn import launched, launches, recorded
from gpuaccel.learn.figures.rung_figures import pairs
from gpuaccel.learn.kernel_cases import CASES
from gpuaccel.learn.launched import WHAT_IT_DOES
from gpuaccel.measure import Ledger, Row

needs_simt = pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler for simt")


def test_every_kernel_that_can_be_replaced_has_a_sentence():
    there = {name for path in kernel_files() for name in kernel_names(path.read_text())}
    assert set(WHAT_IT_DOES) <= there
    assert set(CASES) == set(WHAT_IT_DOES)


def small_step():
    torch.manual_seed(0)
    model = ga.Transformer(ga.preset("tiny", layers=1, T=8)).to(ga.default_device())
    ga.deterministic_embeddings(model)
    optimizer = ga.AdamW(ga.Arena(model), lr=1e-3, max_norm=1.0)
    return ga.TrainStep(model, optimizer, micro_batches=3, deterministic=True)


@needs_simt
def test_launches_are_counted_by_kernel(monkeypatch):
    name = "cuda" if torch.cuda.is_available() else "simt"
    with ga.use_backend(name), small_step() as step:
        batch = tuple(torch.arange(24, device=ga.default_device()).view(3, 8) for _ in range(2))
        step(batch)
        counts = launches(step, batch)
        table = str(launched(step, batch))
        again = launches(step, batch)
    assert (counts["squares_v2"], counts["reduce_v2"]) == (1, 1)
    assert counts["encoder_forward"] == 3 and counts["adamw_v3"] == 1
    assert counts == again and set(counts) <= set(WHAT_IT_DOES)
    for kernel in counts:
        assert f"{kernel}: {WHAT_IT_DOES[kernel]}" in table
    assert "kernels_cu/adamw.cu" in table


def test_without_our_kernels_the_list_says_so():
    with ga.use_backend("torch"):
        x = torch.ones(3, device=ga.default_device())
        assert "None of our kernels is launched" in str(launched(lambda: x.add_(1)))


def test_rungs_are_multiples_of_the_first_one(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "results_folder", lambda: tmp_path)
    book = Ledger()
    book.add(Row("host"), tokens_per_s=200.0)
    book.add(Row("arena"), tokens_per_s=500.0)
    book.add(Row("no rate"))
    words = text_of(recorded.climb(book))
    assert "2.50x" in words and "500 tok/s" in words and "no rate" not in words
    both = text_of(pairs({"a": (1.0, 10.0), "b": (None, 30.0)}, ("here", "there"), "Rates"))
    assert "b 3.00x, 30 tok/s" in both and "a 1.00x, 1 tok/s" in both
    assert "there" in pairs({"a": (1.0, 10.0)}, ("here", "there"), "Rates").drawn
    assert "Rates" in text_of(pairs({}, ("here", "there"), "Rates"))
