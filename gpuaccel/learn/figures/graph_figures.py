"""Pictures of a step as a CUDA graph: a queue of launches, the memory that a graph knows, nodes and
edges, gaps between launches, a schedule under replay.

    spans = graph_figures.schedule(launch_us=6, kernel_us=2, count=8)
    graph_figures.queue({"short kernels": spans})          # host and GPU, kernel by kernel
    graph_figures.memory()                                 # static input, pool, results
    graph_figures.graph(*graphed.graph())                  # nodes in columns; edges: waits for
    graph_figures.launches({"eager": spans, "replay": more}, "One step")   # and enlarged
    graph_figures.rates(schedule, {"a number": rates})     # what the step multiplied by

CUDA's graphs and the CPU's tapes, runs of this machine and recorded ones have the same pictures.
Each is a Figure.
"""

import functools
import itertools
import math
import re

from ...compiler import kernel_files
from ...measure import Span, timeline
from .drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RUN_COLOURS,
    WHITE,
    WIDTH,
    Figure,
    Ink,
    microseconds,
    nice_ticks,
    plural,
    text_width,
)
from .timelines import (
    KERNEL_STYLE,
    LANE_HEIGHT,
    LEFT,
    RIGHT,
    SPAN_STYLES,
    draw_lanes,
    draw_zoom,
    lanes_of,
    legend_of,
    longest_run,
)

STAGES = {
    "forward": BLUE,
    "backward": ORANGE,
    "accumulate": GREEN,
    "clip": PINK,
    "optimizer": RUN_COLOURS[5],
    "results": GREY,
    "": BLUE,
}
MAX_COLUMNS = 7
# heights of a node and of a column's heading; the space between two columns
ROW, HEADING, GAP = 18, 22, 26


# ---- a queue ------------------------------------------------------------------------------------


def schedule(
    launch_us: float, kernel_us: float, count: int, graph_us: "float | None" = None
) -> "list[Span]":
    """When the host launches and when the GPU works, for equal kernels in one stream.

    Args:
        launch_us: the host's time for one launch. kernel_us: the GPU's time for one kernel.
        graph_us: all kernels are in one graph, whose launch takes the host this long.

    Returns:
        Spans, "launch" on the host's lane and the kernels' numbers on the GPU's.
    """
    spans = []
    host = gpu = 0.0
    for i in range(1, count + 1):
        duration = launch_us
        if graph_us is not None:
            duration = graph_us if i == 1 else 0.0
        if duration:
            spans.append(Span("host", "launch", host, host + duration))
            host += duration
        start = max(gpu, host)
        gpu = start + kernel_us
        spans.append(Span("GPU", str(i), start, gpu))
    return spans


def queue(runs: "dict[str, list[Span]]", title: str = "") -> Figure:
    """Launches on the host's lane and kernels on the GPU's, one box each, all runs on one scale.

    Args:
        runs: name -> the spans of schedule().
    """
    ink = Ink()
    summaries = []
    longest = longest_run(runs)
    scale = (RIGHT - LEFT) / longest
    y = 16.0
    if title:
        ink.title(y, title)
        y += 21
    ink.legend(y, [SPAN_STYLES["launch"], KERNEL_STYLE, (GREY, 0.25, "the GPU waits")])
    y += 25
    for (name, spans), colour in zip(runs.items(), itertools.cycle(RUN_COLOURS)):
        counts = timeline.facts(spans)
        launches = plural(counts["launches"], "launch")
        share = f"the GPU works {counts['gpu_busy']:.0%} of it" if counts["gpu_busy"] else ""
        summary = f"{launches}, done after {microseconds(counts['us'])}, {share}"
        summaries.append(f"{name}: {summary}")
        ink.text(0, y, name, 12.5, colour, weight=600)
        ink.text(text_width(name, 12.5) + 14, y, summary, 12, ink.soft)
        y += 8
        for lane in lanes_of(spans):
            ink.text(LEFT - 10, y + 14, lane, 11, ink.soft, "end")
            if lane == "GPU":
                ink.rect(LEFT, y, counts["us"] * scale, 20, GREY, 0.25)
            _draw_boxes(ink, [s for s in spans if s.lane == lane], y, scale)
            y += LANE_HEIGHT
        y += 24
    _microsecond_axis(ink, longest, scale, y - 12)
    summary = "; ".join(summaries)
    return Figure(ink, y + 8, f"{title}: {summary}" if title else summary)


def _draw_boxes(ink, spans, y, scale):
    """A box for each span, with its number where there is room."""
    for i, s in enumerate(spans, 1):
        colour = SPAN_STYLES.get(s.name, KERNEL_STYLE)[0]
        x, width = LEFT + s.start * scale, (s.stop - s.start) * scale
        ink.rect(x + 0.5, y, max(width - 1, 1.0), 20, colour, rx=2)
        if width > text_width(i, 11) + 3:
            ink.text(x + width / 2, y + 14, i, 11, WHITE, "middle", 600)


def _microsecond_axis(ink, longest, scale, y):
    ink.line(LEFT, y, RIGHT, y)
    for tick in nice_ticks(0.0, longest, 6):
        if tick > longest:
            continue
        x = LEFT + tick * scale
        ink.line(x, y, x, y + 5)
        anchor = "end" if x > RIGHT - 20 else "middle" if tick else "start"
        ink.text(x, y + 17, f"{tick:g} µs" if tick else "0", 11, ink.soft, anchor)


# ---- the memory of a graph ----------------------------------------------------------------------


def memory(title: str = "One call of a captured function") -> Figure:
    """Which memory a captured function uses: the caller's, and what the graph knows by address."""
    ink = Ink()
    ink.title(16, title)
    height, top = 46.0, 74.0
    middle = top + height / 2
    ink.rect(158, 34, 484, 112, GREY, 0.13, rx=8)
    ink.text(400, 52, "memory that the graph knows by its address", 12, ink.soft, "middle")
    # (left edge, width, colour, first line, second line)
    boxes = [
        (0, 112, ORANGE, "your batch", "new each time"),
        (176, 112, BLUE, "static input", "same address"),
        (330, 140, GREY, "pool", "results in between"),
        (512, 112, BLUE, "static result", "same address"),
        (688, 112, ORANGE, "your result", "new each time"),
    ]
    for x, width, colour, first, second in boxes:
        ink.rect(x, top, width, height, colour, rx=5)
        ink.text(x + width / 2, top + 20, first, 12, WHITE, "middle", 600)
        ink.text(x + width / 2, top + 36, second, 10.5, WHITE, "middle")
    arrows = [(112, 176, "copy"), (288, 330, ""), (470, 512, ""), (624, 688, "copy")]
    for start, stop, words in arrows:
        ink.path(
            f"M{start + 4} {middle:.1f}H{stop - 5}M{stop - 11} {middle - 5:.1f}"
            f"L{stop - 4} {middle:.1f}L{stop - 11} {middle + 5:.1f}",
            stroke=ink.strong,
            stroke_width=1.8,
        )
        outside = start + 23 if start < 158 else stop - 24
        if words:
            ink.text(outside, middle - 9, words, 11, ink.soft, "middle")
    ink.text(
        400, 138, "the graph's kernels read and write here, in each replay", 11, ink.soft, "middle"
    )
    words = (
        f"{title}: your batch is copied into the static input; the graph's kernels read it, write "
        "to the pool and to the static result; the static result is copied into your result"
    )
    return Figure(ink, 152, words)


# ---- a graph ------------------------------------------------------------------------------------

# pattern in the name of a kernel or an operator -> what it does
_OPERATIONS = [
    (r"splitK", "gemm, sum"),
    (r"gemm|nvjet|cutlass_\d+.*(tensorop|simt)|^(add|b|baddb)?mm$", "matmul"),
    (r"(flash|fmha|attention).*(bwd|backward|cutlassB)", "attention backward"),
    (r"flash|fmha|_attention", "attention"),
    (r"SoftMaxForward|softmax_warp_forward", "softmax"),
    (r"SoftMaxBackward|softmax_warp_backward", "softmax backward"),
    (r"nll_loss_forward", "nll_loss"),
    (r"nll_loss_backward", "nll_loss backward"),
    (r"embedding_(dense_)?backward|embedding_bag.*backward", "embedding backward"),
    (r"compute_grad_weight|krn_partial|sum_and_scatter", "embedding backward"),
    (r"layer_norm_grad|GammaBetaBackward|(layer|rms)_norm.*backward", "norm backward"),
    (r"(layer|rms)_?norm|RowwiseMoments", "norm"),
    (r"compare_?eq|CompareEq", "eq"),
    (r"vectorized_gather|indexSelect", "embedding"),
    (r"CatArrayBatchedCopy", "cat"),
    (r"MeanOps", "mean"),
    (r"sum_functor|SumOps", "sum"),
    (r"FillFunctor|^ones_like$|^zeros?_(like)?$", "fill"),
    (r"direct_copy|^_to_copy$|bfloat16_copy|^memcpy$|^clone$", "copy"),
    (r"multi_tensor.*Copy|^_foreach_copy_$", "copy"),
]
# names of templates that say nothing about the operation
_GENERIC = set(
    "elementwise vectorized_elementwise unrolled_elementwise vectorized_templated_elementwise "
    "index_elementwise legacy_elementwise reduce gpu binary aunary bunary unary "
    "multi_tensor_apply".split()
)
_LOSSES = {"nll_loss", "softmax", "log_softmax"}


def plain(name: str) -> str:
    """A node's name as an operation; our kernels keep their name.

    void at::native::vectorized_elementwise_kernel<4, ...MulFunctor<float>...> -> mul"""
    name = re.sub(r"\(anonymous namespace\)::", "", name.removeprefix("void "))
    for pattern, operation in _OPERATIONS:
        if re.search(pattern, name):
            return operation
    if "::" not in name and "<" not in name:
        operation = re.sub(r"_backward(_data)?$", " backward", name.strip("_"))
        operation = re.sub(r"^(vectorized|unrolled|index)_(?=elementwise)", "", operation)
        operation = re.sub(r"(_cuda|_gpu)?_kernel.*$", "", operation)
        return operation.removesuffix("_") or name
    functors = re.finditer(
        r"CUDAFunctor(?:OnSelf|OnOther)?_(\w+)|(\w+?)_kernel(?:_cuda|_impl)*\b|"
        r"(\w+?)_?[fF]unctor\b|(\w+)Ops\b",
        name,
    )
    for match in functors:
        word = next(group for group in match.groups() if group)
        if word.lower() not in _GENERIC:
            operation = re.sub(r"_?(cuda|gpu|tensor_scalar|scalar)(?=_|$)", "", word.lower())
            return operation.replace("_backward", " backward").strip("_") or word
    return re.split(r"[<(]", name)[0].split("::")[-1]


@functools.cache
def _patterns_of_our_kernels() -> "list[tuple[str, str]]":
    """(pattern of a kernel's name, its stage). An optimizer's kernels are named as their file."""
    files = [f.stem for f in kernel_files() if '#include "optimizer.cuh"' in f.read_text()]
    return [
        (r"^accumulate_v|^_foreach_copy_$|multi_tensor.*Copy", "accumulate"),
        (r"^(squares|reduce|scale)_v", "clip"),
        (rf"^({'|'.join(files)})_", "optimizer"),
    ]


def stages_of(names: "list[str]") -> "list[str]":
    """The stage of each node, a key of STAGES, read from the names in the order of launch.

    Forward lasts until the loss, and backward until the last gradient before the next loss.
    "accumulate" is a kernel of ours, or the copy of fresh gradients into an arena; torch's own
    additions have no name of their own, and count as backward. What follows the last gradient and
    is no kernel of ours is "results". All stages are "" if no name tells."""
    patterns = _patterns_of_our_kernels()
    known = [
        next((stage for pattern, stage in patterns if re.search(pattern, name)), None)
        for name in names
    ]
    operations = [plain(name) for name in names]
    gradients = [
        _with_addition(i, operations)
        for i, operation in enumerate(operations)
        if known[i] == "accumulate" or _is_backward(operation)
    ]
    last = max(gradients, default=-1)
    if last < 0 and not any(known):
        return [""] * len(names)
    losses = [i for i, operation in enumerate(operations) if operation in _LOSSES]
    forward_begins = {max((k for k in gradients if k < loss), default=-1) + 1 for loss in losses}
    stages = []
    phase = "forward"
    for i, stage in enumerate(known):
        if i in forward_begins:
            phase = "forward"
        if _is_backward(operations[i]):
            phase = "backward"
        stages.append(stage or ("results" if i > last else phase))
    return stages


def _is_backward(operation: str) -> bool:
    return "backward" in operation or operation.startswith("encoder_combine")


def _with_addition(i: int, operations: "list[str]") -> int:
    """The last node of a gradient: torch adds that of an embedding to the sum by the next one."""
    adds = operations[i] == "embedding backward" and operations[i + 1 : i + 2] == ["add"]
    return i + adds


def graph(names: "list[str]", edges: "list[tuple[int, int]]", title: str = "") -> Figure:
    """A graph's nodes in the order of launch, down one column and up the next.

    Args:
        names: of the nodes. edges: (i, j): node j waits for node i.
    """
    ink = Ink()
    stages = stages_of(names)
    words = [plain(name) for name in names]
    if title:
        ink.title(16, title)
    columns = _columns(stages)
    has_stages = any(stages)
    top = (26 if title else 8) + (HEADING if has_stages else 0)
    rows = max(map(len, columns), default=0)
    pitch = (WIDTH + GAP) / max(len(columns), 5)
    width = pitch - GAP
    place = {}  # node -> (its column, left edge, middle)
    for c, nodes in enumerate(columns):
        for r, i in enumerate(nodes):
            row = r if c % 2 == 0 else rows - 1 - r
            place[i] = c, c * pitch, top + row * ROW + ROW / 2

    # (stage, whether the two nodes follow each other) -> edges
    paths: "dict[tuple[str, bool], list[str]]" = {}
    for i, j in edges:
        if i in place and j in place:
            edge = _edge(place[i], place[j], width, i, j)
            paths.setdefault((stages[i], abs(i - j) == 1), []).append(edge)
    for (stage, near), some in sorted(paths.items(), key=lambda item: item[0][1]):
        ink.path(
            "".join(some),
            stroke=STAGES[stage],
            stroke_width=1.8 if near else 1.1,
            opacity=1 if near else 0.6,
        )
    for i, (_, x, y) in place.items():
        word = words[i].removesuffix(" backward") if stages[i] == "backward" else words[i]
        ink.rect(x, y - 7, width, 14, STAGES[stages[i]], rx=4)
        size = 10 * min(1.0, (width - 4) / text_width(word, 10))
        ink.text(x + width / 2, y + 3.4, word, f"{size:.1f}", WHITE, "middle", 600)

    bottom = top + rows * ROW
    previous = None
    for c, nodes in enumerate(columns if has_stages else []):
        # the part of the step where its first column begins, and the direction of each column
        part = _part(stages[nodes[0]])
        down = c % 2 == 0
        heading = f"{part if part != previous else ''} {'↓' if down else '↑'}".strip()
        y = top - 7 if down else bottom + 12
        ink.text(c * pitch, y, heading, 11.5, STAGES[stages[nodes[0]]], weight=600)
        previous = part

    x, y = 0.0, bottom + (HEADING if has_stages and len(columns) > 1 else 0) + 18
    counts = {stage: stages.count(stage) for stage in STAGES if stage and stage in stages}
    summary = f"{plural(len(names), 'node')}, {plural(len(edges), 'edge')}"
    ink.text(x, y, summary, 12, ink.soft)
    x += text_width(summary, 12) * 1.06 + 14
    for stage, count in counts.items():
        ink.text(x, y, f"{stage} {count}", 12, STAGES[stage], weight=600)
        x += text_width(f"{stage} {count}", 12) * 1.06 + 14
    if counts:
        summary += ": " + ", ".join(f"{stage} {count}" for stage, count in counts.items())
    return Figure(ink, y + 8, f"{title}: {summary}" if title else summary)


def _part(stage) -> str:
    """The part of the step whose columns hold a stage."""
    if stage == "accumulate":
        return "backward"
    return stage if stage in ("forward", "backward", "") else "update"


def _columns(stages) -> "list[list[int]]":
    """The nodes of each column: as few rows as MAX_COLUMNS allow.

    Forward, backward (with its accumulation) and what follows begin columns of their own."""
    # (part of the step, its nodes)
    parts: "list[tuple[str, list[int]]]" = []
    for i, stage in enumerate(stages):
        if not parts or parts[-1][0] != _part(stage):
            parts.append((_part(stage), []))
        parts[-1][1].append(i)
    rows = 1
    while sum(-(-len(nodes) // rows) for _, nodes in parts) > max(MAX_COLUMNS, len(parts)):
        rows += 1
    return [nodes[k : k + rows] for _, nodes in parts for k in range(0, len(nodes), rows)]


def _edge(start, stop, width, i, j) -> str:
    """The path from node i at place `start` to node j at place `stop`."""
    (c1, x1, y1), (c2, x2, y2) = start, stop
    if c1 == c2 and abs(i - j) == 1:
        return f"M{x1 + width / 2:.1f} {y1:.1f}L{x2 + width / 2:.1f} {y2:.1f}"
    if c1 == c2:
        x = x1 + width
        bulge = x + min(12.0, 4 + abs(y2 - y1) / 16)
        return f"M{x:.1f} {y1:.1f}C{bulge:.1f} {y1:.1f} {bulge:.1f} {y2:.1f} {x:.1f} {y2:.1f}"
    if c2 > c1:
        a, b, sign = x1 + width, x2, 1
    else:
        a, b, sign = x1, x2 + width, -1
    bend = sign * max(10.0, abs(b - a) * 0.4)
    # between columns that are no neighbours a horizontal edge is lifted over the nodes between them
    lift = 13.0 if y1 == y2 and abs(c1 - c2) > 1 else 0.0
    return (
        f"M{a:.1f} {y1:.1f}C{a + bend:.1f} {y1 - lift:.1f} {b - bend:.1f} {y2 - lift:.1f} "
        f"{b:.1f} {y2:.1f}"
    )


# ---- the gaps between launches ------------------------------------------------------------------


def launches(runs: "dict[str, list[Span]]", title: str, launched: int = 12) -> Figure:
    """How busy host and GPU are in each run, on one scale, and a stretch of each run enlarged.

    A lane is as high as the share of the time in which the host launches or the GPU computes. The
    stretch is as long as `launched` launches of the first run."""
    ink = Ink()
    summaries = []
    longest = longest_run(runs)
    ink.title(16, title)
    ink.legend(37, legend_of(runs))
    y = 62.0
    length = None
    for (name, spans), colour in zip(runs.items(), itertools.cycle(RUN_COLOURS)):
        summary = _launch_summary(spans)
        summaries.append(f"{name}: {summary}")
        ink.text(0, y, name, 12.5, colour, weight=600)
        ink.text(text_width(name, 12.5) + 14, y, summary, 12, ink.soft)
        top = y + 8
        y = _draw_shares(ink, spans, top, (RIGHT - LEFT) / longest)
        first, length = _stretch(spans, length, launched)
        if 0 < length < 0.5 * longest:
            draw_zoom(ink, first, first + length, longest, top, y, colour)
            y = draw_lanes(ink, spans, y + 19, first, first + length, kernel_names=False)
            ink.text(RIGHT, y + 11, f"enlarged: {microseconds(length)}", 11, ink.soft, "end")
            y += 14
        y += 22
    ink.time_axis(longest, LEFT, RIGHT, y - 2)
    return Figure(ink, y + 14, f"{title}: " + "; ".join(summaries))


def _launch_summary(spans):
    """How much is launched, and how long all of it takes, in words."""
    counts = timeline.facts(spans)
    if counts["gpu_busy"] is None:
        operators = sum(s.name == "operator" for s in spans)
        return f"{plural(operators, 'operator')}, {microseconds(counts['us'])}"
    count = plural(counts["launches"], "launch")
    return f"{count}, {microseconds(counts['us'])}, the GPU works {counts['gpu_busy']:.0%} of it"


def _draw_shares(ink, spans, y, scale, step=2.0) -> float:
    """The lanes of one run as bars, as high as the share of their time that is filled.

    Args:
        scale: pixels per microsecond.
        step: width of a bar.

    Returns:
        Where the lanes end.
    """
    for lane in lanes_of(spans):
        ink.text(LEFT - 10, y + 14, lane, 11, ink.soft, "end")
        # the host may be done long before the GPU
        end = max(s.stop for s in spans if s.lane == lane or lane == "GPU") * scale
        ink.rect(LEFT, y, end, 20, GREY, 0.22 if lane == "host" else 0.1)
        # style -> {number of a bar: the share of it that is filled}
        styles: "dict[tuple[str, float, str], dict[int, float]]" = {}
        for s in spans:
            if s.lane != lane or s.name == "python":
                continue
            shares = styles.setdefault(SPAN_STYLES.get(s.name, KERNEL_STYLE), {})
            start, stop = s.start * scale, s.stop * scale
            for k in range(int(start / step), int(stop / step) + 1):
                filled = max(0.0, min(stop, (k + 1) * step) - max(start, k * step))
                shares[k] = shares.get(k, 0.0) + filled / step
        for (colour, opacity, _), shares in styles.items():
            path = ""
            for k, share in shares.items():
                if share > 0.01 and k * step < end:
                    x, height = LEFT + k * step, 20 * min(share, 1.0)
                    width = min(step, end - k * step)
                    path += f"M{x:.0f} {y + 20:.1f}v{-height:.1f}h{width:.1f}v{height:.1f}z"
            ink.path(path, colour, opacity=opacity)
        y += LANE_HEIGHT
    return y


def _stretch(spans, length, launched) -> "tuple[float, float]":
    """(start, length) of a stretch in the middle of the work.

    Args:
        length: in microseconds; None: as long as `launched` launches take.
    """
    if length is None:
        calls = [s for s in spans if s.lane == "host" and s.name in ("launch", "operator")]
        calls.sort(key=lambda s: s.start)
        middle = len(calls) * 2 // 5
        some = calls[middle : middle + launched]
        return (some[0].start, some[-1].stop - some[0].start) if some else (0.0, 0.0)
    work = sorted((s for s in spans if s.lane == "GPU"), key=lambda s: s.start)
    work = work or [s for s in spans if s.name == "operator"]
    return (work[len(work) * 2 // 5].start if work else 0.0), length


# ---- a learning rate ----------------------------------------------------------------------------


def rates(
    schedule: "list[float]",
    runs: "dict[str, list[float]]",
    title: str = "What the step multiplied by",
) -> Figure:
    """A schedule as a broad line, and the rates that each run's steps used as thin ones.

    A run that follows the schedule lies on it."""
    ink = Ink()
    left, top, right, bottom = 48, 40, WIDTH - 150, 190
    values = [*schedule, *(value for run in runs.values() for value in run)]
    ticks = nice_ticks(0.0, max(values, default=1.0) or 1.0)
    ink.title(16, title)

    def place(i, value):
        across = i / max(len(schedule) - 1, 1)
        return left + across * (right - left), bottom - value / ticks[-1] * (bottom - top)

    for tick in ticks:
        y = place(0, tick)[1]
        ink.line(left, y, right, y, opacity=0.9 if not tick else 0.45)
        ink.text(left - 8, y + 4, f"{tick:g}", 11, ink.soft, "end")
    ink.text(left, bottom + 17, "step 1", 11, ink.soft)
    ink.text(right, bottom + 17, len(schedule), 11, ink.soft, "end")
    points = [place(i, value) for i, value in enumerate(schedule)]
    ink.polyline(points, GREY, 9, 0.35, stroke_linecap="round")
    labels = [("the schedule", ink.soft)]
    for k, ((name, values), colour) in enumerate(zip(runs.items(), (ORANGE, BLUE, GREEN, PINK))):
        points = [place(i, value) for i, value in enumerate(values)]
        # runs that lie on each other are dashed in turn
        dashed = k and len(runs) > 2
        dash = f"7 {7 * (len(runs) - 2)}" if dashed else None
        ink.polyline(points, colour, 2.4, dash=dash, dash_offset=-7 * (k - 1) if dashed else None)
        labels.append((name, colour))
    for k, (name, colour) in enumerate(labels):
        ink.text(right + 18, top + 10 + 20 * k, name, 12, colour, weight=600)
    summaries = []
    for name, values in runs.items():
        follows = all(
            math.isclose(value, rate, rel_tol=1e-3, abs_tol=1e-6)
            for value, rate in zip(values, schedule)
        )
        verb = "follows" if follows else "does not follow"
        summaries.append(f"{name} {verb} the schedule")
    return Figure(ink, bottom + 26, f"{title}: {', '.join(summaries)}")
