"""Memsets of a captured graph become kernels (graphs/memsets.py); the order of a graph's nodes."""

import types

import pytest
import torch
from helpers import CUDA, KERNELS

import gpuaccel as ga
from gpuaccel.compiler import Kernel
from gpuaccel.graphs import capture, memsets
from gpuaccel.graphs.graph_dump import node_names


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
def test_the_kernel_writes_its_words_and_no_others(device, n):
    words = torch.full((n + 64,), 7, dtype=torch.int32, device=device)
    Kernel("fill", "fill")[-(-n // memsets.THREADS), memsets.THREADS](words[:n], 0x80000001, n)
    assert words[:n].tolist() == [0x80000001 - 2**32] * n
    assert words[n:].tolist() == [7] * 64


def test_a_memset_is_words_where_it_is_small_and_aligned():
    as_it_comes = {"dst": 1000, "elementSize": 1, "value": 0, "height": 1}
    for memset, words in [
        ({"width": 4}, (0, 1)),
        ({"width": 64, "value": 0xAB}, (0xABABABAB, 16)),
        ({"elementSize": 2, "width": 6, "value": 0x1234}, (0x12341234, 3)),
        ({"elementSize": 4, "width": 5, "value": 0xDEADBEEF}, (0xDEADBEEF, 5)),
        ({"width": memsets.LIMIT}, (0, memsets.LIMIT // 4)),
        ({"width": memsets.LIMIT + 4}, None),
        ({"width": 5}, None),
        ({"width": 0}, None),
        ({"width": 4, "value": 0xFFFFFF07}, (0x07070707, 1)),
        ({"elementSize": 4, "width": 1, "value": 0xFFFFFF07}, (0xFFFFFF07, 1)),
        ({"width": 4, "dst": 1002}, None),
        ({"width": 4, "height": 2}, None),
    ]:
        assert memsets.words_of(types.SimpleNamespace(**(as_it_comes | memset))) == words, memset


def test_memsets_stay_where_our_kernels_do_not_run():
    with ga.use_backend("torch"):
        assert memsets.memsets_to_kernels(0, torch.device("cuda", 0)) == 0


def as_dot(labels: list[str], edges: list[tuple[int, int]]) -> str:
    """As cudaGraphDebugDotPrint writes a graph."""
    nodes = [
        f'"graph_0_node_{i}" [style="solid" label="{i}\n{label}\n"];'
        for i, label in enumerate(labels)
    ]
    arrows = [f'"graph_0_node_{i}" -> "graph_0_node_{j}" [headlabel=0];' for i, j in edges]
    return "digraph dot {\n" + "\n".join(nodes + arrows) + "\n}"


def test_nodes_stand_in_an_order_in_which_they_can_run():
    """The last one replaced another one, and was put between."""
    text = as_dot([str(i) for i in range(4)], [(0, 3), (3, 1), (1, 2)])
    assert node_names(text) == ["0", "3", "1", "2"]


def zero_(tensor):
    """A memset of the driver, as cuBLAS asks for it."""
    from cuda.bindings import driver

    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    (status,) = driver.cuMemsetD8Async(tensor.data_ptr(), 0, tensor.nbytes, stream)
    assert status == driver.CUresult.CUDA_SUCCESS


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_small_memsets_become_kernels_where_they_stood(device):
    counts = torch.ones(3, dtype=torch.int32, device=device)
    large = torch.ones(memsets.LIMIT, dtype=torch.int32, device=device)
    total = torch.zeros(3, dtype=torch.int32, device=device)

    def run():
        zero_(counts)
        counts.add_(2)
        total.add_(counts)
        zero_(counts[1:2])
        zero_(large)
        total.add_(counts)

    recorder = capture.CudaRecorder(device)
    recorder.run(run)
    total.zero_()
    recording, _ = recorder.record(run)
    names = [name for name in recording.nodes() if name in ("fill", "memset")]
    assert names == ["fill", "fill", "memset"]
    for steps in (1, 2):
        large.fill_(5)
        recording.replay()
        assert counts.tolist() == [2, 0, 2] and not large.any()
        assert total.tolist() == [4 * steps, 2 * steps, 4 * steps]
    recording.close()


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_a_memset_between_branches_keeps_what_it_waits_for(device):
    """Two branches read what stood there before the memset; two read what it has written."""
    word = torch.zeros(1, device=device)
    seen = torch.zeros(4, device=device)
    side = torch.cuda.Stream(device)

    def on_both(first, second):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        first()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            second()
        main.wait_stream(side)

    def run():
        word.fill_(3)
        on_both(lambda: seen[0].copy_(word[0]), lambda: seen[1].copy_(word[0]))
        zero_(word)
        on_both(lambda: seen[2].copy_(word[0]), lambda: seen[3].copy_(word[0]))

    recorder = capture.CudaRecorder(device)
    recorder.run(run)
    recording, _ = recorder.record(run)
    assert "fill" in recording.nodes()
    for _ in range(3):
        seen.fill_(-1)
        recording.replay()
        assert seen.tolist() == [3, 3, 0, 0]
    recording.close()


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_a_graph_that_allocates_keeps_its_memsets(device):
    """CUDA refuses to remove a node of it."""
    from cuda.bindings import driver

    word = torch.ones(1, device=device)
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        status, memory = driver.cuMemAllocAsync(1024, stream.cuda_stream)
        assert not status
        zero_(word)
        (status,) = driver.cuMemFreeAsync(memory, stream.cuda_stream)
        assert not status
        graph.capture_end()
    assert memsets.memsets_to_kernels(graph.raw_cuda_graph(), word.device) == 0
    graph.instantiate()
    graph.replay()
    assert word.item() == 0
