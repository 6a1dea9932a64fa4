"""The meter counts what was done, never waits for the device, and says how old its numbers are."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from gpuaccel.errors import ArgumentError
from gpuaccel.measure import LateValue, Meter, peak_flops
from gpuaccel.measure import meter as meter_module
from gpuaccel.measure.meter import StageTimer, _peak_of


@pytest.fixture
def clock(monkeypatch):
    """The meter's clock, which goes on when a test sleeps."""
    now = [100.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return SimpleNamespace(sleep=sleep)


def test_rate_and_step_time_are_those_of_the_loop(clock):
    meter = Meter("cpu", flops_per_token=10.0, peak_flops=1e6)
    for step in range(8):
        clock.sleep(0.02)
        reading = meter.update(100, loss=torch.tensor(3.0 - step))
    assert (reading.step, reading.tokens, reading.loss, reading.loss_step) == (8, 800, -4.0, 8)
    assert reading.step_ms == pytest.approx(20), reading
    assert reading.tokens_per_s == pytest.approx(100 / (reading.step_ms / 1e3), rel=1e-6)
    assert reading.mfu == pytest.approx(reading.tokens_per_s * 10 / 1e6)
    assert reading.seconds == pytest.approx(0.16) and reading.memory_bytes > 1 << 20
    assert json.loads(json.dumps(dataclasses.asdict(reading)))["tokens"] == 800


def test_window_forgets_a_slow_first_step(clock, monkeypatch):
    monkeypatch.setattr(meter_module, "WINDOW", 4)
    meter = Meter("cpu")
    clock.sleep(0.3)
    first = meter.update(10)
    for _ in range(6):
        clock.sleep(0.005)
        last = meter.update(10)
    assert (first.step_ms, last.step_ms) == pytest.approx((300, 5))


def test_val_loss_is_reported_once_and_loss_stays():
    meter = Meter("cpu")
    assert meter.update(1, loss=torch.tensor(2.0), val_loss=2.5).val_loss == 2.5
    second = meter.update(1)
    assert second.val_loss is None and second.loss == 2.0 and second.loss_step == 1
    assert meter.finish().step == 2


def test_stages_of_the_same_name_add_up(clock):
    timer = StageTimer("cpu")
    assert timer.poll() is None
    timer.start()
    for _ in range(2):
        clock.sleep(0.01)
        timer.mark("forward")
        clock.sleep(0.02)
        timer.mark("backward")
    timer.stop()
    stages = timer.poll()
    assert list(stages) == ["forward", "backward"]
    assert (stages["forward"], stages["backward"]) == pytest.approx((20, 40))


def test_an_abandoned_step_is_forgotten():
    timer = StageTimer("cpu")
    timer.start()
    timer.mark("lost")
    timer.start()
    timer.mark("kept")
    timer.stop()
    assert list(timer.poll()) == ["kept"]
    with pytest.raises(ArgumentError, match="mark.*outside a step"):
        timer.mark("forward")
    with pytest.raises(ArgumentError, match="stop.*outside a step"):
        timer.stop()


def test_late_value_takes_one_element_only():
    late = LateValue()
    assert late.get() is None
    late.put(torch.tensor([[1.5]], dtype=torch.bfloat16, requires_grad=True), tag=7)
    assert late.get() == 1.5 and late.tag == 7
    late.put(2.0)
    assert late.get() == 2.0
    with pytest.raises(ArgumentError, match=r"\(3,\)"):
        late.put(torch.zeros(3))
    assert late.get() == 2.0


@pytest.mark.parametrize(
    "name, dtype, peak",
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H20", torch.bfloat16, 148e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312e12),
        ("NVIDIA A10", torch.bfloat16, 125e12),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("Tesla T4", torch.float16, 65e12),
        ("Tesla T4", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
        ("NVIDIA H100 NVL", torch.bfloat16, 835e12),
        ("NVIDIA H200 NVL", torch.bfloat16, 835e12),
        ("Something New", torch.bfloat16, None),
        ("NVIDIA H200", torch.float64, None),
    ],
)
def test_peaks_are_found_by_whole_names(name, dtype, peak):
    assert _peak_of(name, dtype) == peak


def test_no_peak_on_a_cpu():
    assert peak_flops("cpu") is None


@pytest.mark.gpu
def test_gpu_meter_measures_the_device_and_never_waits():
    a = torch.randn(4096, 4096, device="cuda")
    (a @ a).sum()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        meter = Meter("cuda")
        for _ in range(30):
            meter.timer.start()
            for _ in range(8):
                b = a @ a
            meter.timer.mark("forward")
            loss = b.float().sum()
            meter.timer.mark("loss")
            meter.timer.stop()
            reading = meter.update(1000, loss=loss, norm=loss)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert reading.step == 30 and reading.tokens == 30_000
    final = meter.finish()
    assert final.loss_step == 30
    assert final.loss == pytest.approx(float(loss), rel=1e-6)
    assert final.norm == final.loss
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(80):
        a @ a
    end.record()
    torch.cuda.synchronize()
    alone = begin.elapsed_time(end) / 10
    print(
        f"step {final.step_ms:.2f} ms by the meter, {alone:.2f} ms by itself, stages {final.stages}"
    )
    assert 0.7 * alone < final.step_ms < 2.0 * alone
    assert 0.8 * final.step_ms < sum(final.stages.values()) < 1.3 * final.step_ms
    assert final.memory_bytes >= a.numel() * 4


@pytest.mark.gpu
def test_gpu_tokens_must_be_known_to_the_host_and_late_values_keep_their_tags():
    meter = Meter("cuda")
    with pytest.raises(ArgumentError, match="pass an int"):
        meter.update(torch.tensor(3, device="cuda"))
    late = LateValue()
    for i in range(50):
        late.put(torch.full((), float(i), device="cuda", dtype=torch.float64), tag=i)
        torch.cuda.synchronize()
        assert late.get() == float(i) and late.tag == i
