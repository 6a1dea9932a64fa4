"""The pictures of clipping draw what the kernels of notebook 02 do, and say it in text."""

import re

import pytest
import torch
from pictures import text_of

import gpuaccel as ga
from gpuaccel.learn import EXERCISES, clip_figures


def numbers(figure):
    """All whole numbers that the picture writes in bold: what cells hold."""
    return [int(n) for n in re.findall(r'font-weight="600"[^>]*>(\d+)<', figure.drawn)]


@pytest.mark.parametrize("values", [[3, 1], [3, 1, 4, 1, 5, 9, 2, 6], list(range(16))])
def test_a_tree_draws_every_round_a_barrier_before_each_and_ends_with_the_sum(values):
    figure = clip_figures.tree_sum(values)
    rounds = len(values).bit_length() - 1
    assert f"{rounds} round" in text_of(figure) and f"the sum, {sum(values)}" in text_of(figure)
    assert figure.drawn.count(">barrier<") == rounds
    rows = numbers(figure)
    assert len(rows) == len(values) * (rounds + 1)
    assert rows[: len(values)] == values
    assert rows[-len(values)] == sum(values)


def test_a_tree_draws_what_the_kernel_leaves_in_shared_memory():
    kernel = ga.compile(
        """extern "C" __global__ void rounds(float* rows, const float* x)
        {
            __shared__ float part[8];
            int t = threadIdx.x, row = 1;
            part[t] = x[t];
            rows[t] = part[t];
            for (int half = 4; half > 0; half /= 2) {
                __syncthreads();
                if (t < half) part[t] = part[t] + part[t + half];
                rows[8 * row++ + t] = part[t];
            }
        }"""
    )
    values = [3, 1, 4, 1, 5, 9, 2, 6]
    rows = torch.zeros(32)
    with ga.use_backend("simt"):
        kernel[1, 8](rows, torch.tensor(values, dtype=torch.float32))
    assert numbers(clip_figures.tree_sum(values)) == rows.int().tolist()


@pytest.mark.parametrize("threads, thread", [(256, 37), (256, 0), (64, 63), (40, 39)])
def test_a_thread_is_found_by_its_warp_and_lane(threads, thread):
    figure = clip_figures.warps(threads, thread)
    place = f"thread {thread} is lane {thread % 32} of warp {thread // 32}"
    assert place in text_of(figure)
    assert re.findall(r'font-weight="700"[^>]*>([^<]*)<', figure.drawn) == [str(thread)]
    assert figure.drawn.count("<rect") == threads
    assert figure.drawn.count(">threads ") == -(-threads // 32)


def test_without_a_barrier_the_read_is_drawn_before_the_write_ends_and_with_one_behind_it():
    figure = clip_figures.barrier()
    assert "before warp 4" in text_of(figure)

    def box(words, nth):
        """(left, right) of the nth box whose words these are."""
        places = []
        for x, width, text in re.findall(
            r'<rect x="([\d.]+)"[^>]*? width="([\d.]+)"[^>]*/><text[^>]*>([^<]*)<', figure.drawn
        ):
            if text == words:
                places.append((float(x), float(x) + float(width)))
        return places[nth]

    write, read = "writes part[128 to 159]", "reads part[128 to 159]"
    assert box(read, 0)[0] < box(write, 0)[1]
    assert box(read, 1)[0] > box(write, 1)[1]
    assert box("waits", 0)[1] <= box(read, 1)[0]


def test_the_host_queues_three_kernels_and_reads_nothing():
    figure = clip_figures.three_kernels()
    assert "goes on" in text_of(figure)
    for name in ("squares", "reduce", "scale"):
        assert f">queues {name}<" in figure.drawn and f">{name}<" in figure.drawn


@pytest.mark.parametrize(
    "sizes, elements",
    [
        ([10_000, 300, 5_000], ["4,096", "4,096", "1,808", "300", "4,096", "904"]),
        ([4_096], ["4,096"]),
        ([1, 4_097], ["1", "4,096", "1"]),
    ],
)
def test_each_chunk_has_a_block_and_a_sum_and_none_crosses_a_tensor(sizes, elements):
    figure = clip_figures.chunks(sizes)
    assert re.findall(r'y="78.0"[^>]*>([\d,]+)<', figure.drawn) == elements
    assert re.findall(r">block (\d+)<", figure.drawn) == [str(i) for i in range(len(elements))]
    assert re.findall(r">sum (\d+)<", figure.drawn) == [str(i) for i in range(len(elements))]
    chunks = "1 chunk" if len(elements) == 1 else f"{len(elements)} chunks"
    assert f", {chunks}: one launch" in text_of(figure)


@pytest.mark.parametrize("inside, together", [(False, 56), (True, 44)])
def test_bytes_of_passes_add_up(inside, together):
    *rows, last = clip_figures.passes(inside).rows
    assert last[0] == "together" and int(last[-1]) == together == sum(int(row[-1]) for row in rows)
    for _, reads, writes, count in rows:
        arrays = [name for side in (reads, writes) if side != "-" for name in side.split(", ")]
        assert int(count) == 4 * len(arrays)


@pytest.mark.parametrize("name", ["largest", "squares"])
def test_a_missing_barrier_is_named_as_a_race(name):
    solution = EXERCISES[name].solution
    without = ga.compile(solution.replace("__syncthreads();", ""), name)
    assert "__syncthreads" not in without.text
    with ga.use_backend("simt"):
        result = ga.check(name, without, seed=0)
    assert result.passed is False and "race" in str(result)
