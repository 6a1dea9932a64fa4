"""The ledger counts what the records hold, and says what it cannot count."""

import pytest
import torch

from gpuaccel.errors import BackendError
from gpuaccel.measure import Ledger, Row, ledger
from gpuaccel.measure.ledger import _fill
from gpuaccel.measure.profiler import REGION as REGION_NAME


def call(name, ts, correlation, cat="cuda_runtime"):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": 1,
        "args": {"correlation": correlation},
    }


def record(name, ts, correlation, size, cat="gpu_memcpy"):
    args = {"correlation": correlation, "bytes": size}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 1, "args": args}


REGION = {
    "ph": "X",
    "cat": "user_annotation",
    "name": REGION_NAME,
    "ts": 100.0,
    "dur": 100.0,
}


def test_a_trace_is_counted_by_who_asked():
    row = Row("made up")
    _fill(
        row,
        [
            REGION,
            {**REGION, "cat": "gpu_user_annotation", "ts": 130.0},
            call("cudaLaunchKernel", 90, 1),
            call("cudaLaunchKernel", 110, 2),
            call("cudaLaunchKernelExC", 111, 3),
            call("cuLaunchKernelEx", 112, 4, "cuda_driver"),
            call("cudaGraphLaunch", 113, 5),
            call("cudaMemcpyAsync", 114, 6),
            call("cudaStreamSynchronize", 115, 7),
            call("cudaMemcpy", 116, 8),
            call("cudaMemsetAsync", 117, 9),
            call("cudaEventQuery", 118, 10),
            call("cudaStreamWaitEvent", 119, 11),
            record("Memcpy DtoH (Device -> Pinned)", 205, 6, 4),
            record("Memcpy HtoD (Pageable -> Device)", 206, 8, 1024),
            record("Memcpy DtoD (Device -> Device)", 120, 50, 64),
            record("Memset (Device)", 207, 9, 16, "gpu_memset"),
            call("cudaDeviceSynchronize", 201, 12),
            call("cudaMemcpyAsync", 202, 13),
            record("Memcpy DtoH (x)", 208, 13, 4),
            call("Stream Sync", 115, 7, "cuda_sync"),
            call("Context Sync", 121, 60, "cuda_sync"),
            call("Stream Wait Event", 122, 61, "cuda_sync"),
            {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 109, "dur": 2},
            {"ph": "M", "name": "process_name"},
        ],
        gpu=True,
    )
    assert (row.launches, row.graph_launches) == (3, 1)
    assert (
        row.syncs == 3
    )  # the stream, the blocking copy, and a wait by the driver known only by its record
    assert row.copies == {"DtoH": (1, 4), "HtoD": (1, 1024), "DtoD": (1, 64)}
    assert row.operators == 1 and row.bytes("DtoH") == 4 and row.bytes("PtoP") == 0


def test_a_profiler_that_sees_no_gpu_says_so():
    row = Row("blind")
    _fill(row, [REGION], gpu=True)
    assert row.launches is None
    assert row.syncs is None
    assert row.copies is None
    assert "no records of the GPU" in row.notes[0]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="counts of a machine without a GPU: this one has a GPU"
)
def test_cpu_row_counts_operators_and_scalars_only(capfd):
    x = torch.ones(4)
    with ledger("arena") as row:
        for _ in range(3):
            x.add_(1)
        x.sum().item()
    assert row.launches is None and row.syncs is None and row.copies is None
    assert row.would_sync == 1 and row.operators >= 5
    assert "no GPU" in row.notes[0] and "–" not in str(row) and str(row.operators) in str(row)
    with ledger("nothing") as nothing:
        pass
    assert nothing.operators == 0 and nothing.would_sync == 0
    assert capfd.readouterr().err == ""


MASKS = {
    "x[mask] = 0": 0,
    "x[mask] = value": 1,
    "x[mask] = value.expand(1)": 1,
    "x[mask]": 1,
    "x[mask] += 1": 2,
    "x.masked_select(mask)": 1,
    "mask.nonzero()": 1,
    # Python asks which of two masks a mask of no dimension is.
    "value[value > 9] = 0": 1,
    "x[index.view(1)] = value": 0,
    "x[index] = value": 1,
    "x[mask] = 0; x.sum().item()": 1,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("statement", MASKS)
def test_a_mask_is_counted_as_a_gpu_waits_for_it(statement, device):
    """A GPU fills by a mask with a number of the host; of other values it must know how many."""
    names = {
        "x": torch.arange(-2.0, 3.0, device=device),
        "mask": torch.arange(5, device=device) > 2,
        "value": torch.tensor(7.0, device=device),
        "index": torch.tensor(2, device=device),
    }
    exec(statement, names)
    with ledger("a mask") as row:
        exec(statement, names)
    if device == "cpu":
        assert row.would_sync == MASKS[statement]
    else:
        assert bool(row.syncs) == bool(MASKS[statement])


def test_step_counters_of_an_optimizer_are_not_counted_as_waits():
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([w], fused=True)
    w.grad = torch.ones(3)
    optimizer.step()
    with ledger("step") as row:
        optimizer.step()
        float(w.detach().sum())
    assert row.would_sync == 1


def test_backward_is_counted_and_errors_pass_through():
    w = torch.ones(3, requires_grad=True)
    with ledger("step") as row:
        (w * 2).sum().backward()
    assert row.operators >= 4
    with pytest.raises(ZeroDivisionError):
        with ledger("broken"):
            1 / 0
    with ledger("outer") as outer:
        with pytest.raises(BackendError, match="inner.*only one"):
            with ledger("inner"):
                pass
    assert outer.operators == 0


def test_the_table_leaves_out_what_nobody_knows():
    book = Ledger()
    assert "empty" in str(book) and "empty" in book._repr_html_()
    cpu = Row("on <b>CPU</b>", operators=1234, would_sync=2, notes=["no GPU here"])
    gpu = Row(
        "arena", launches=24, graph_launches=0, syncs=0, copies={"DtoD": (2, 3 << 20)}, operators=99
    )
    book.add(gpu)
    text = str(book)
    assert "3 MiB in 2" in text and "none" in text and "torch operators" not in text
    book.add(cpu)
    text, html = str(book), book._repr_html_()
    assert "1,234" in text and "no GPU here" in text and "–" in text
    assert "on &lt;b&gt;CPU&lt;/b&gt;" in html and "<b>" not in html and "var(--jp-" in html
    book.add(Row("arena", launches=25))
    assert [row.launches for row in book.rows] == [25, None]


@pytest.mark.gpu
def test_gpu_row_counts_exactly():
    x, y = torch.zeros(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")
    pinned = torch.zeros(256, pin_memory=True)
    with ledger("warm up"):
        x.add_(y), x.copy_(y), x[0].item()
    with ledger("launches") as row:
        for _ in range(10):
            x.add_(y)
    assert (row.launches, row.graph_launches, row.syncs, row.copies) == (10, 0, 0, {}), row
    with ledger("copies") as row:
        x.copy_(y)
        x[:256].copy_(pinned, non_blocking=True)
        pinned.copy_(x[:256], non_blocking=True)
    assert (
        row.copies == {"DtoD": (1, 4 << 20), "HtoD": (1, 1024), "DtoH": (1, 1024)}
        and row.syncs == 0
    ), row
    with ledger("waits") as row:
        x[0].item()
        torch.cuda.synchronize()
    assert row.syncs == 2 and row.copies["DtoH"] == (1, 4), row
    assert not row.notes


@pytest.mark.gpu
def test_gpu_graph_launch_is_one_launch():
    x = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    x.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(5):
            x.add_(1)
    with ledger("replay") as row:
        graph.replay()
    assert (row.launches, row.graph_launches, row.syncs) == (0, 1, 0), row
