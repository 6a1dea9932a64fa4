"""Segments: the kernels' sort has the bits of the reference, the reference those of a few lines of
Python, whatever the tokens are."""

import pytest
import torch
from helpers import CUDA, KERNELS, drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.ops import token_sort as segments
from gpuaccel.ops.token_sort import (
    INVALID,
    PIECE,
    find_segments,
    launch_segments,
    reference_segments,
)

VOCABULARIES = [
    1,
    2,
    255,
    256,
    511,
    512,
    50257,
    262143,
    262144,
    600000,
]  # one to three passes, digits of 8 and 9 bits
DIRECT = ["cpu", *KERNELS]
some = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def definition(tokens, vocab, left_out=-1):
    """(order, pieces) as lists."""
    rows, order, pieces = {}, [], []
    for i, t in enumerate(tokens):
        valid = 0 <= t < vocab
        key = vocab if valid and t == left_out else t if valid else 0
        rows.setdefault(key, []).append(i if valid else i + INVALID)
    for token, run in sorted(rows.items()):
        order += [[i, token] for i in run]
        for k in range(0, len(run), PIECE):
            size = min(PIECE, len(run) - k)
            kind = size if len(run) <= PIECE else -len(run) if k == 0 else PIECE + size
            pieces += [0 if token == vocab else kind, *[0] * (size - 1)]
    return order, pieces


def launched(tokens, vocab, left_out=-1):
    return launch_segments(tokens, vocab, left_out)[0]


def same(got, want, what=""):
    assert got.n == want.n
    for name in ("order", "pieces"):
        a, b = getattr(got, name).cpu(), getattr(want, name).cpu()
        assert a.dtype == b.dtype == torch.int32 and a.shape == b.shape, (
            f"{what}: {name} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        )
        wrong = (a != b).nonzero()[:, 0].unique()
        first = int(wrong[0]) if len(wrong) else -1
        assert first < 0, (
            f"{what}: {name} differs at {len(wrong)} of {len(a)} places, first {first}:"
            f" {a[first].tolist()}, not {b[first].tolist()}"
        )


# ---- the reference is the definition -------------------------------------------------------------


@st.composite
def batches(draw):
    """(tokens, vocab, left_out): runs whose lengths stand at the borders of pieces, in any order,
    some out of range."""
    vocab = draw(st.sampled_from([1, 2, 3, 7, 256, 600000]))
    tokens = []
    for _ in range(draw(st.integers(0, 5))):
        token = draw(
            st.integers(0, vocab - 1) | st.sampled_from([-1, -(2**63), vocab, vocab + 1, 2**40])
        )
        tokens += [token] * draw(st.sampled_from([1, 1, 2, 31, 32, 33, 63, 64, 65, 96, 97]))
    return draw(st.permutations(tokens)), vocab, draw(st.sampled_from([-1, 0, vocab - 1]))


@pytest.mark.parametrize("device", DIRECT, indirect=True)
@some
@given(batch=batches())
def test_segments_are_the_runs_of_a_stable_sort_cut_into_pieces_of_32(device, batch):
    tokens, vocab, left_out = batch
    order, pieces = definition(*batch)
    given_ = torch.tensor(tokens, dtype=torch.int64, device=device)
    for found in (
        find_segments(given_, vocab, None if left_out < 0 else left_out),
        reference_segments(given_, vocab, left_out),
    ):
        assert found.order.tolist() == order and found.pieces.tolist() == pieces


# ---- the kernels are the reference ---------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_kernels_have_the_references_bits(device, vocab):
    for kind in ("uniform", "zipf", "sorted", "reversed", "all the same"):
        for n in (1, 31, 32, 33, 1000) if kind != "uniform" else (1, 33, 1000, 4097):
            for dtype in (torch.int64, torch.int32) if n == 1000 else (torch.int64,):
                tokens = drawn(kind, n, vocab, n).to(dtype)
                for left_out in (-1, int(tokens[0])):
                    same(
                        launched(tokens.to(device), vocab, left_out),
                        reference_segments(tokens, vocab, left_out),
                        f"{kind}, {n} {dtype}, left out {left_out}",
                    )


@pytest.mark.parametrize(
    "kind, vocab, dtype",
    [
        ("zipf", 50257, torch.int64),
        ("uniform", 600000, torch.int32),
        ("all the same", 50257, torch.int32),
    ],
)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_kernels_have_the_references_bits_for_many_tokens(device, kind, vocab, dtype):
    """More than 2^17: 16 positions per thread."""
    tokens = drawn(kind, 2**17 + 1, vocab).to(dtype)
    tokens[1000], tokens[-1] = -1, vocab
    same(launched(tokens.to(device), vocab), reference_segments(tokens, vocab))


@pytest.mark.parametrize("bits, keys", [(8, 4), (8, 16), (9, 4), (9, 16)])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_the_result_does_not_depend_on_the_tiles_nor_on_the_digits(device, bits, keys, monkeypatch):
    monkeypatch.setattr(
        segments,
        "segment_kernels",
        lambda tokens, vocab: [
            segments.sort_kernel(f"segments_{name}", tokens.dtype, bits, keys)
            for name in ("count", "scatter", "pieces")
        ],
    )
    for vocab in (300, 200_000):
        tokens = drawn("zipf", 10_000, vocab)
        same(launched(tokens.to(device), vocab, 7), reference_segments(tokens, vocab, 7))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("device", DIRECT, indirect=True)
def test_a_token_out_of_range_counts_as_token_0_and_its_row_is_marked(device, dtype):
    """Also as the token that is left out, and where its lower 32 bits alone would be in range."""
    wrong = [-1, 5, -(2**31), 2**31 - 1]
    if dtype == torch.int64:
        wrong += [2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63)]
    tokens = torch.tensor([3, *wrong, 0, 3], dtype=dtype, device=device)
    for left_out in (None, 0):
        found = find_segments(tokens, 5, left_out)
        got = found.order.tolist(), found.pieces.tolist()
        assert got == definition(tokens.tolist(), 5, -1 if left_out is None else left_out)


@pytest.mark.parametrize("device", DIRECT, indirect=True)
def test_tokens_of_any_shape_and_strides_are_taken_in_row_major_order(device):
    tokens = drawn("zipf", 24, 9).view(2, 3, 4)
    for view in (tokens, tokens.transpose(0, 2), tokens[:, ::2], tokens[0, 0, 0], tokens[:0]):
        want = reference_segments(view.reshape(-1).clone(), 9)
        same(find_segments(view.to(device), 9), want, f"shape {tuple(view.shape)}")


@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_the_sort_stays_within_its_buffers(device):
    """Under the checks for races, bounds and what was never written; odd sizes too."""
    with ga.checked():
        for n, vocab in ((1, 1), (1025, 600000), (1023, 300)):
            tokens = drawn("uniform", n, vocab)
            tokens[n // 2] = -7
            same(launched(tokens, vocab, 0), reference_segments(tokens, vocab, 0))


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, vocab, message",
    [
        ([1, 2], 5, "tokens are list; expected a torch.int64 or torch.int32 tensor"),
        (torch.ones(3), 5, "tokens are torch.float32; expected"),
        (torch.ones(3, dtype=torch.int16), 5, "tokens are torch.int16"),
        (torch.ones(3, dtype=torch.bool), 5, "tokens are torch.bool"),
        (torch.ones(3, dtype=torch.int64), 0, "the vocabulary has 0 tokens; expected 1 to"),
        (torch.ones(3, dtype=torch.int64), 2**31 - 1, "has 2,147,483,647 tokens"),
        (torch.ones(3, dtype=torch.int64, device="meta"), 5, "tokens are on meta, where they have"),
        (
            torch.empty(2**31, dtype=torch.int32, device="meta"),
            5,
            "there are 2,147,483,648 tokens; expected fewer than 2",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "simt"], indirect=True)
def test_what_cannot_be_sorted_is_refused_in_words(device, tokens, vocab, message):
    with pytest.raises(ArgumentError, match=message.replace("^", r"\^")):
        find_segments(tokens, vocab)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1000, 2**17 + 1])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_a_captured_sort_is_replayed_on_other_tokens(device, n):
    tokens = drawn("zipf", n, 50257).to(device)
    launched(tokens, 50257)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, scratch = launch_segments(tokens, 50257)
    for kind in ("uniform", "all the same", "reversed", "zipf"):
        tokens.copy_(drawn(kind, n, 50257, 1))
        tokens[0] = -1
        graph.replay()
        same(found, reference_segments(tokens.cpu(), 50257), kind)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_a_sort_on_another_stream_waits_for_the_tokens(device):
    """They are written by the current stream just before; it then waits for the sort."""
    side, tokens = torch.cuda.Stream(), torch.zeros(2**16, dtype=torch.int64, device=device)
    for seed in range(5):
        new = drawn("zipf", 2**16, 50257, seed).to(device)
        torch.cuda._sleep(2_000_000)
        tokens.copy_(new)
        found, scratch = launch_segments(tokens, 50257, stream=side)
        torch.cuda.current_stream().wait_stream(side)
        same(found, reference_segments(new.cpu(), 50257))
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream())
            same(find_segments(tokens, 50257), reference_segments(new.cpu(), 50257))
