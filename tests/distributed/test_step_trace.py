"""trace.watch: what was sent when."""

import pytest
import rank_checks as checks
from test_sums import SIMT

import gpuaccel as ga
from gpuaccel.distributed import trace
from gpuaccel.measure import Span


@pytest.mark.parametrize(
    "backend, slab",
    [
        ("torch", 0),
        *(pytest.param(*SIMT.values, slab, marks=SIMT.marks) for slab in (0, 4096)),
    ],
)
def test_what_was_sent_when_is_recorded(workers, backend, slab):
    """Every bucket once, in order; before backward is over only where the sums are ready by then.
    The weights are bit-identical to those of a step without a trace."""
    for spans, buckets, same in workers(checks.traced, 2, backend=backend, slab=slab):
        spans = [Span(*s) for s in spans]
        assert same and buckets >= 3
        sends = [s for s in spans if s.lane == "sends"]
        assert [s.name for s in sends] == [f"bucket {number}" for number in range(buckets)]
        assert all(0 <= s.start <= s.stop for s in spans)
        stages = [s.name for s in spans if s.name in ("forward", "backward")]
        assert stages == ["forward", "backward"] * 2
        early = trace.sent_early(spans)
        assert 1 <= early <= buckets
        optimizer = next(s for s in spans if s.name == "optimizer")
        assert all(s.start < optimizer.start for s in sends)
        assert any(s.name == "wait" for s in spans)


def test_one_process_and_ordered_sums_have_no_buckets_to_watch():
    for config in (None, ga.Distributed(ordered=True)):
        with (
            checks.make_step(checks.Net(), distributed=config) as step,
            pytest.raises(
                ga.errors.ArgumentError, match="of two ranks or more, not in ordered mode"
            ),
        ):
            trace.watch(step, [checks.micro_batch(0)])
