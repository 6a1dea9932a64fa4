"""Pictures of a step as a graph: every node and edge is there, stages follow from names."""

import json
import re

import pytest
import torch
from helpers import write_result
from pictures import text_of

import gpuaccel as ga
from gpuaccel.learn import graph_figures, recorded
from gpuaccel.learn.figures.graph_figures import STAGES, plain, stages_of
from gpuaccel.measure import Span, timeline


@pytest.fixture(scope="module")
def step_graph():
    """Nodes and edges of a step of a small model: two micro-batches, clipped, AdamW."""
    with ga.use_backend("simt"):
        torch.manual_seed(0)
        model = ga.Transformer(ga.preset("tiny", layers=1))
        opt = ga.AdamW(ga.Arena(model), max_norm=1.0)

        def fn(tokens):
            for part in tokens.chunk(2):
                loss, count = ga.token_loss(model, (part, part))
                (loss / count).backward()
            opt.step()
            opt.zero_grad()
            return loss

        graphed = ga.GraphedStep(fn, [model, opt])
        graphed.capture(torch.randint(0, 256, (2, 16)))
        yield graphed.graph()


@pytest.mark.parametrize(
    "symbol, word",
    [
        (
            (
                "void at::native::vectorized_elementwise_kernel<4, "
                "at::native::BinaryFunctor<float, float, float, "
                "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul>"
                " >(int, at::native::BinaryFunctor<...>)"
            ),
            "mul",
        ),
        (
            (
                "void at::native::vectorized_elementwise_kernel<4, "
                "at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)"
            ),
            "add",
        ),
        (
            (
                "void at::native::vectorized_elementwise_kernel<4, "
                "at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)"
            ),
            "fill",
        ),
        (
            (
                "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_ker"
                "nel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(int)"
            ),
            "copy",
        ),
        (
            (
                "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous"
                " namespace)::silu_backward_kernel(at::TensorIteratorBase&)::{lambda()#1}"
                ">(int)"
            ),
            "silu backward",
        ),
        (
            (
                "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kern"
                "el_cuda(at::TensorIteratorBase&)::{lambda()#2}>(int)"
            ),
            "rsqrt",
        ),
        (
            (
                "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous"
                " namespace)::pow_tensor_scalar_kernel_impl<float, "
                "float>(float)::{lambda(float)#1}>(int)"
            ),
            "pow",
        ),
        (
            (
                "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
                "at::native::MeanOps<float, float, float, float>, unsigned int, float, 4>"
                " >(...)"
            ),
            "mean",
        ),
        (
            (
                "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
                "at::native::func_wrapper_t<float, at::native::sum_functor<float, float, "
                "float>::..."
            ),
            "sum",
        ),
        (
            (
                "void (anonymous namespace)::elementwise_kernel_with_index<int, "
                "at::native::arange_cuda_out(...)>"
            ),
            "elementwise_kernel_with_index",
        ),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize32x32x8_cublas", "matmul"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(...)", "gemm, sum"),
        (
            (
                "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_tra"
                "its<64, 128>>(...)"
            ),
            "attention",
        ),
        ("fmha_cutlassB_f32_aligned_64x64_k64_sm80(...)", "attention backward"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(...)", "softmax"),
        (
            (
                "void at::native::(anonymous "
                "namespace)::nll_loss_backward_reduce_cuda_kernel_2d<float, float, "
                "long>(...)"
            ),
            "nll_loss backward",
        ),
        ("vectorized_elementwise_kernel", "elementwise"),
        ("elementwise_kernel", "elementwise"),
        ("reduce_kernel", "reduce"),
        ("memcpy", "copy"),
        ("memset", "memset"),
        ("accumulate_v3", "accumulate_v3"),
        ("adamw_begin", "adamw_begin"),
        ("squares_v2", "squares_v2"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "attention backward"),
        ("embedding_dense_backward", "embedding backward"),
        ("add_", "add"),
        ("mm", "matmul"),
        ("_log_softmax_backward_data", "log_softmax backward"),
        ("_to_copy", "copy"),
        ("", ""),
    ],
)
def test_a_node_s_name_is_the_operation_in_it(symbol, word):
    assert plain(symbol) == word


def test_stages_are_told_from_the_names(step_graph):
    names, edges = step_graph
    stages = stages_of(names)
    order = [stage for i, stage in enumerate(stages) if i == 0 or stages[i - 1] != stage]
    assert order == [
        "forward",
        "backward",
        "accumulate",
        "forward",
        "backward",
        "clip",
        "optimizer",
        "results",
    ]
    assert {
        name: stages[names.index(name)]
        for name in ("embedding", "nll_loss_backward", "_foreach_copy_", "reduce_v2", "adamw_v3")
    } == {
        "embedding": "forward",
        "nll_loss_backward": "backward",
        "_foreach_copy_": "accumulate",
        "reduce_v2": "clip",
        "adamw_v3": "optimizer",
    }
    assert set(stages) <= set(STAGES) and stages.count("forward") < stages.count("backward")


def test_stages_of_other_graphs():
    assert stages_of(["lion_begin", "lion_v3"]) == ["optimizer", "optimizer"]
    assert stages_of(["mul", "add"]) == ["", ""] and stages_of([]) == []
    assert stages_of(["mm", "mm_backward", "add"]) == ["forward", "backward", "results"]
    by_block = [
        "mm",
        "nll_loss_forward",
        "mm_backward",
        "accumulate_v3",
        "mm",
        "accumulate_v3",
        "adamw_v2",
    ]  # a sum in the middle of backward
    assert stages_of(by_block) == [
        "forward",
        "forward",
        "backward",
        "accumulate",
        "backward",
        "accumulate",
        "optimizer",
    ]


def test_every_node_is_drawn_once_in_a_place_of_its_own(step_graph):
    names, edges = step_graph
    figure = graph_figures.graph(names, edges, "A step")
    boxes = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', figure.drawn)
    assert len(set(boxes)) == len(boxes) == len(names) and all(
        0 <= float(x) and float(x) + float(w) <= 800.1 for x, _, w in boxes
    )
    words = text_of(figure)
    assert (
        words.startswith(f"A step: {len(names)} nodes, {len(edges)} edges: forward ")
        and "accumulate 1, clip " in words
    )
    assert (
        figure.drawn.count("M") >= len(edges)
        and ">forward ↓<" in figure.drawn
        and ">update" in figure.drawn
    )


@pytest.mark.parametrize("count", [0, 1, 4, 60, 1500])
def test_a_chain_of_any_length_can_be_drawn(count):
    figure = graph_figures.graph(["mul"] * count, [(i, i + 1) for i in range(count - 1)])
    assert f"{count:,} node" in text_of(figure) and f"{max(count - 1, 0):,} edge" in text_of(figure)
    assert figure.drawn.count("<rect") == count


def test_columns_hold_all_nodes_in_order():
    for stages in (
        ["forward"] * 51 + ["backward"] * 79 + ["accumulate", "clip", "AdamW", "results"],
        [""] * 100,
        ["forward", "backward"] * 6,
    ):
        columns = graph_figures._columns(stages)
        assert sum(columns, []) == list(range(len(stages))) and len(columns) <= max(
            graph_figures.MAX_COLUMNS, 12
        )
        assert all(len({graph_figures._part(stages[i]) for i in nodes}) == 1 for nodes in columns)


EAGER = [Span("host", "python", 0.0, 2000.0)] + [
    span
    for i in range(100)
    for span in (
        Span("host", "launch", 20.0 * i, 20.0 * i + 4),
        Span("GPU", "k", 20.0 * i + 5, 20.0 * i + 10),
    )
]
REPLAY = [Span("host", "python", 0.0, 40.0), Span("host", "launch", 2.0, 30.0)] + [
    Span("GPU", "k", 30.0 + 5.5 * i, 35.0 + 5.5 * i) for i in range(100)
]


def test_launches_tells_how_many_and_how_busy_and_enlarges_the_same_stretch_of_each():
    figure = graph_figures.launches({"eager": EAGER, "graph": REPLAY}, "One step")
    assert text_of(figure) == (
        "One step: eager: 100 launches, 2.0 ms, the GPU works 25% of it; graph: 1"
        " launch, 580 µs, the GPU works 86% of it"
    )
    assert re.findall("enlarged: ([^<]+)<", figure.drawn) == ["224 µs"] * 2
    for words in ("launches", "kernels", "all else on the host"):
        assert f">{words}<" in figure.drawn


def test_launches_without_a_gpu_counts_operators_and_without_anything_is_empty():
    spans = [Span("host", "python", 0.0, 300.0)] + [
        Span("host", "operator", 10.0 * i, 10.0 * i + 6) for i in range(30)
    ]
    figure = graph_figures.launches({"eager": spans}, "Here")
    assert text_of(figure) == "Here: eager: 30 operators, 300 µs" and "GPU" not in figure.drawn
    for runs in ({}, {"nothing": []}, {"only Python": spans[:1]}):
        text_of(graph_figures.launches(runs, "Here"))


def test_whole_holds_what_comes_before_the_end_of_backward_too():
    x = torch.ones(3, requires_grad=True)

    def run():
        x.exp().sum().backward()
        x.grad.mul_(2)

    run()
    assert (
        sum(s.name in ("operator", "k") for s in timeline.whole(run))
        > sum(s.name in ("operator", "k") for s in timeline.tail(run))
        > 0
    )


@pytest.mark.parametrize(
    "launch_us, kernel_us, graph_us, ends",
    [
        # the host is slower, the GPU is slower, both are as fast, one launch for all
        (6, 2, None, [8, 14, 20]),
        (6, 20, None, [26, 46, 66]),
        (5, 5, None, [10, 15, 20]),
        (6, 2, 10, [12, 14, 16]),
    ],
)
def test_a_kernel_starts_when_it_is_in_the_queue_and_the_one_before_has_ended(
    launch_us, kernel_us, graph_us, ends
):
    spans = graph_figures.schedule(launch_us, kernel_us, 3, graph_us)
    kernels = [s for s in spans if s.lane == "GPU"]
    launches = [s for s in spans if s.lane == "host"]
    assert [s.name for s in kernels] == ["1", "2", "3"]
    assert [s.stop for s in kernels] == ends
    assert all(s.stop - s.start == kernel_us for s in kernels)
    assert launches[-1].stop == (graph_us or 3 * launch_us)
    assert len(launches) == (1 if graph_us else 3)


def test_a_queue_has_a_box_for_each_launch_and_kernel_and_says_when_all_is_done():
    figure = graph_figures.queue(
        {
            "short": graph_figures.schedule(6, 2, 8),
            "one launch": graph_figures.schedule(6, 2, 8, graph_us=10),
        },
        "Eight kernels",
    )
    assert str(figure) == (
        "Eight kernels: short: 8 launches, done after 50 µs, the GPU works 32% of it; "
        "one launch: 1 launch, done after 26 µs, the GPU works 62% of it"
    )
    assert text_of(figure) == str(figure)
    boxes = [box for box in re.findall("<rect [^>]*>", figure.drawn) if 'rx="2"' in box]
    assert len(boxes) == 8 + 8 + 1 + 8
    assert "Eight" not in graph_figures.queue({"a": graph_figures.schedule(1, 1, 1)}).drawn


def test_the_memory_of_a_graph_is_named_and_inside_the_picture():
    figure = graph_figures.memory("A call")
    words = text_of(figure)
    for part in ("your batch", "static input", "pool", "static result", "your result"):
        assert part in words and f">{part}<" in figure.drawn
    # what is new each time is copied, and nothing else
    assert figure.drawn.count(">copy<") == figure.drawn.count(">new each time<") == 2


def test_rates_say_who_follows_the_schedule():
    asked = [0.1, 0.2, 0.3, 0.1]
    figure = graph_figures.rates(
        asked,
        {"a number": [0.1] * 4, "a tensor": asked, "ga.AdamW": [r * (1 + 1e-6) for r in asked]},
        "Rates",
    )
    assert text_of(figure) == (
        "Rates: a number does not follow the schedule, a tensor follows the "
        "schedule, ga.AdamW follows the schedule"
    )
    assert figure.drawn.count("<polyline") == 4
    text_of(graph_figures.rates([0.0], {}))


RESULT = {
    "gpu": "NVIDIA H200",
    "date": "2026-01-02",
    "torch": "2.11.0",
    "results": {
        "what": "llama-350m, batch 1",
        "timeline": {"eager": timeline.lines(EAGER), "replay": timeline.lines(REPLAY), "odd": None},
        "graph": {
            "names": ["embedding", "nll_loss_forward", "mm_backward", "accumulate_v3", "adamw_v3"],
            "edges": [[0, 1], [1, 2], [2, 3], [3, 4]],
        },
        "ledger": {
            "eager": {"launches": 4321, "graph_launches": 0, "syncs": 0},
            "replay": {"launches": 0, "graph_launches": 1, "syncs": 0},
            "odd": 1,
        },
        "speed": {
            "4 x 256": {
                "plain torch": {"tokens_per_s": 2e4, "times_plain": 1.0},
                "ours, replayed": {"tokens_per_s": 7e4, "times_plain": 3.5},
            },
            "1 x 128": {"ours, replayed": {"tokens_per_s": 123.0}},
            "odd": 2,
        },
    },
}
VIEWS = [recorded.launches, recorded.graph, recorded.replaying, recorded.replay_ledger]


def test_recorded_graphs_are_read_and_labelled(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "results_folder", lambda: tmp_path)
    write_result(tmp_path / "h200" / "graphs.json", json.dumps(RESULT))
    for view in VIEWS:
        assert str(view()).startswith("Recorded, not run here: NVIDIA H200, 2026-01-02"), view
    assert "eager: 100 launches" in text_of(
        recorded.launches()
    ) and "5 nodes, 4 edges: forward 2, backward 1" in text_of(recorded.graph())
    speed, ledger = (str(view()).split("\n") for view in VIEWS[2:])
    assert [re.split("  +", line) for line in speed[1:]] == [
        ["batch x T", "plain torch", "ours, replayed"],
        ["4 x 256", "20,000, 1.00x", "70,000, 3.50x"],
        ["1 x 128", "-", "123"],
    ]
    assert ledger[0].endswith("llama-350m, batch 1") and [line.split() for line in ledger[2:]] == [
        ["eager", "4321", "0", "0"],
        ["replay", "0", "1", "0"],
    ]


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        {
            "results": {
                "graph": {"names": [], "edges": []},
                "timeline": [],
                "speed": {"4 x 256": {}},
                "ledger": None,
            }
        },
    ],
)
def test_without_a_recorded_graph_it_says_so(tmp_path, monkeypatch, content):
    monkeypatch.setattr(recorded, "results_folder", lambda: tmp_path)
    if content is not None:
        write_result(tmp_path / "h200" / "graphs.json", json.dumps(content))
    for view in VIEWS:
        assert isinstance(view(), recorded.Recorded) and (
            "no recorded run in this checkout" in str(view())
        ) == (content is None)
