"""Spans of host and GPU: what is drawn is what the profiler recorded after the last backward, and
nothing else."""

import pytest
import torch

import gpuaccel as ga
from gpuaccel.measure import Span, timeline
from gpuaccel.measure.profiler import REGION
from gpuaccel.measure.timeline import BACKWARD, facts, lines


def event(cat, name, ts, dur, correlation=None):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": {} if correlation is None else {"correlation": correlation},
    }


TRACE = [
    event("user_annotation", REGION, 1000, 500),
    event("cpu_op", BACKWARD + ": MmBackward0", 1000, 100),
    event("cuda_runtime", "cudaLaunchKernel", 1050, 5, 1),  # of backward, still to be done
    event("kernel", "void at::native::(anonymous namespace)::mm<float, 4>(float*)", 1090, 60, 1),
    event("cuda_runtime", "cudaLaunchKernel", 1110, 5, 2),
    event("kernel", "squares_v2", 1150, 20, 2),
    event("cuda_runtime", "cudaMemcpyAsync", 1120, 4, 3),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1172, 2, 3),
    event("cuda_runtime", "cudaStreamSynchronize", 1125, 55, 4),
    event("cuda_sync", "Stream Sync", 1125, 55, 4),  # the same wait
    event("cuda_sync", "Stream Synchronize", 1200, 10, 99),  # of a driver call: no call record
    event("cuda_runtime", "cudaEventQuery", 1215, 1, 5),
    event("cuda_runtime", "cudaLaunchKernel", 1480, 5, 6),
    event("kernel", "adamw_v2", 1500, 300, 6),  # ends after the region: asked for in it
    event("cuda_runtime", "cudaLaunchKernel", 1600, 5, 7),  # after the region
    event("kernel", "fill", 1800, 5, 7),
]


def test_spans_begin_at_the_end_of_backward_and_waits_are_counted_once():
    spans = timeline._spans(TRACE, True)
    assert [s for s in spans if s.lane == "GPU"] == [
        Span("GPU", "backward", 0, 50),
        Span("GPU", "squares_v2", 50, 70),
        Span("GPU", "copy", 72, 74),
        Span("GPU", "adamw_v2", 400, 700),
    ]
    assert [s[1:] for s in spans if s.lane == "host"] == [
        ("python", 0, 400),
        ("launch", 10, 15),
        ("copy", 20, 24),
        ("wait", 25, 80),
        ("wait", 100, 110),
        ("launch", 380, 385),
    ]
    found = facts(spans)
    assert (found["waits"], found["launches"], found["reads"], found["us"]) == (2, 2, 0, 700)
    assert found["gpu_busy"] == pytest.approx((70 + 2 + 300) / 700)
    assert {"host wait 25.0 80.0", "GPU adamw_v2 400.0 700.0"} < {*lines(spans)}


def test_on_the_cpu_operators_and_reads_after_backward_are_seen():
    w = torch.nn.Parameter(torch.randn(50, 50))

    def step():
        w.grad = None
        float((w @ w).sum().detach())  # before backward: not in the tail
        (w @ w).sum().backward()
        for _ in range(3):
            w.grad.norm().item()

    step()
    with ga.use_backend("torch", policy="off"):
        spans = timeline.tail(step)
    assert facts(spans)["reads"] == 3 and facts(spans)["gpu_busy"] is None
    assert {s.lane for s in spans} == {"host"} and {s.name for s in spans} == {
        "python",
        "operator",
        "read",
    }
    assert all(0 <= s.start <= s.stop for s in spans)


def test_only_one_profiler_can_watch():
    with ga.ledger("outer"), pytest.raises(ga.errors.BackendError, match="only one can watch"):
        timeline.tail(lambda: None)


@pytest.mark.gpu
def test_gpu_the_waits_of_clipping_by_item_are_drawn_and_the_fused_step_has_none():
    inputs, targets = torch.randint(0, 256, (2, 4, 64), device="cuda")
    waits = {}
    for clip in ("item", "torch", "fused"):
        arena = ga.Arena(ga.Transformer(ga.preset("tiny")).cuda())
        if clip == "fused":
            opt = ga.AdamW(arena, max_norm=1.0)
        else:
            opt = torch.optim.AdamW(arena.parameters(), fused=True)

        def step():
            logits = arena.module(inputs).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, targets.flatten()).backward()
            if clip == "item":
                for p in arena.parameters():
                    if p.grad.norm().item() > 1.0:
                        p.grad.mul_(0.5)
            elif clip == "torch":
                torch.nn.utils.clip_grad_norm_(arena.parameters(), 1.0)
            opt.step()
            opt.zero_grad()

        step()
        spans = timeline.tail(step)
        waits[clip] = facts(spans)["waits"]
        assert facts(spans)["gpu_busy"] > 0 and {"host", "GPU"} == {s.lane for s in spans}
    assert waits["item"] >= len(arena.segments) and waits["torch"] == waits["fused"] == 0
