"""Each operation makes few launches, of as many blocks as have work: results do not tell."""

import pytest
import torch
from torch import nn

import gpuaccel as ga
from gpuaccel.compiler import launch as launches
from gpuaccel.ops import embedding_backward as encoder
from gpuaccel.ops.token_sort import find_segments

ROWS, T, C = 3, 700, 132
SIZES = (4097, 5, 7)  # four chunks


def encode():
    tokens = torch.arange(ROWS * T).view(ROWS, T) % 5
    table, positions, dout = torch.zeros(5, C), torch.zeros(T, C), torch.ones(ROWS, T, C)
    encoder.launch_forward(tokens, table, positions, torch.zeros(3, dtype=torch.int64))
    encoder.launch_backward(table, positions, dout, find_segments(tokens, 5))


class Clip(list):
    def step(self):
        ga.clip_grad_norm_(self, 1.0)


def two_steps(make, without=None):
    """without: number of a tensor that gets no gradient."""

    def steps():
        model = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in SIZES)
        opt = make(model)
        for _ in range(2):
            sum(p.sum() for i, p in enumerate(model) if i != without).backward()
            opt.step()

    return steps


# Settings are written once.
SETTINGS = ("settings_write", 1, 1)
NORM = ("squares_v2", 4, 1), ("reduce_v2", 1, 1)


@pytest.mark.parametrize(
    "call, expected",
    [
        (
            encode,
            [
                ("encoder_forward", 525, 1),
                ("segments_count", 3, 1),
                ("segments_scatter", 3, 1),
                ("segments_pieces", 9, 1),
                ("encoder_backward_v3", 17, 2),
                ("encoder_combine_v3", 9, 2),
                ("encoder_wpe", 181, 1),
            ],
        ),
        (
            two_steps(lambda model: Clip(model.parameters())),
            2 * [*NORM, ("scale_v2", 4, 1)],
        ),
        (
            two_steps(lambda model: ga.AdamW(model.parameters(), max_norm=1.0)),
            [SETTINGS, *2 * [*NORM, ("adamw_begin", 1, 1), ("adamw_v2", 4, 1)]],
        ),
        (
            two_steps(lambda model: ga.AdamW(ga.Arena(model))),
            [SETTINGS, *2 * [*NORM, ("adamw_begin", 1, 1), ("adamw_v3", 4, 1)]],
        ),
        # Two runs of neighbours would be two launches.
        (
            two_steps(lambda model: ga.AdamW(ga.Arena(model), on_nonfinite="propagate"), without=1),
            [SETTINGS, *2 * [("adamw_begin", 1, 1), ("adamw_v2", 3, 1)]],
        ),
    ],
    ids=["encoder", "clip", "parameters", "arena", "arena with a gap"],
)
def test_a_launch_has_as_many_blocks_as_have_work(call, expected, monkeypatch):
    launched = []
    note = lambda launch, *_: launched.append((launch.kernel.name, *launch.shape[:2]))
    monkeypatch.setattr(launches, "recorders", [note])
    with ga.use_backend("simt"):
        call()
    assert launched == expected
