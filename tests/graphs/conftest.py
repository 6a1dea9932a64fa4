"""Fixtures of the tests of captured steps."""

import types

import pytest

from gpuaccel.graphs import capture, tape


@pytest.fixture
def counts(monkeypatch):
    """.replays and .captures: how often a recording was replayed, how many were made."""
    found = types.SimpleNamespace(replays=0, captures=0)

    def count(kind, method, what):
        original = getattr(kind, method)

        def counted(*args):
            setattr(found, what, getattr(found, what) + 1)
            return original(*args)

        monkeypatch.setattr(kind, method, counted)

    for kind in (tape.Tape, capture.CudaRecording):
        count(kind, "replay", "replays")
    for kind in (capture.TapeRecorder, capture.CudaRecorder):
        count(kind, "record", "captures")
    return found
