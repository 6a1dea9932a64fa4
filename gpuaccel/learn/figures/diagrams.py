"""Pictures of a step as a CUDA graph: its nodes and edges, the gaps between launches, a learning rate that stays or follows.

    >>> diagrams.graph(*graphed.graph())                     # a node for each piece of work, in columns; an edge: must wait for
    >>> diagrams.launches({"eager": spans, "replay": others})        # the whole of a step, and a stretch of it enlarged
    >>> diagrams.rates(asked, {"a number": moved})           # what a schedule asked for, and what the step did

The same pictures serve a graph of CUDA's and a tape of the CPU's, a run of this machine and a recorded one. Each is a figures.Figure.
"""

import math
import re

from ...measure.timeline import Span, facts
from .figures import _KERNEL, _SPANS, BLUE, GREEN, GREY, ORANGE, PINK, Figure, _lane, _title
from .picture import RUN_COLOURS, WIDTH, _Ink, _nice_ticks, _text_width, _time_axis, microseconds

STAGES = {
    "forward": BLUE,
    "backward": ORANGE,
    "accumulate": GREEN,
    "clip": PINK,
    "AdamW": RUN_COLOURS[5],
    "results": GREY,
    "": BLUE,
}
MOST_COLUMNS, ROW, GAP, HEAD = 7, 18, 26, 22


# ---- a graph ------------------------------------------------------------------------------------

_OPERATIONS = [  # what the name of a kernel or an operator looks like -> what it is
    (r"splitK", "gemm, sum"),
    (r"gemm|nvjet|cutlass_\d+.*(tensorop|simt)|^(add|b|baddb)?mm$", "matmul"),
    (r"(flash|fmha|attention).*(bwd|backward|cutlassB)", "attention backward"),
    (r"flash|fmha|_attention", "attention"),
    (r"SoftMaxForward|softmax_warp_forward", "softmax"),
    (r"SoftMaxBackward|softmax_warp_backward", "softmax backward"),
    (r"nll_loss_forward", "nll_loss"),
    (r"nll_loss_backward", "nll_loss backward"),
    (
        r"embedding_(dense_)?backward|embedding_bag.*backward|compute_grad_weight|krn_partial|sum_and_scatter",
        "embedding backward",
    ),
    (r"layer_norm_grad|GammaBetaBackward|(layer|rms)_norm.*backward", "norm backward"),
    (r"(layer|rms)_?norm|RowwiseMoments", "norm"),
    (r"compare_?eq|CompareEq", "eq"),
    (r"vectorized_gather|indexSelect", "embedding"),
    (r"CatArrayBatchedCopy", "cat"),
    (r"MeanOps", "mean"),
    (r"sum_functor|SumOps", "sum"),
    (r"FillFunctor|^ones_like$|^zeros?_(like)?$", "fill"),
    (
        r"direct_copy|^_to_copy$|bfloat16_copy|^memcpy$|^clone$|multi_tensor.*Copy|^_foreach_copy_$",
        "copy",
    ),
]
_GENERIC = {
    "elementwise",
    "vectorized_elementwise",
    "unrolled_elementwise",
    "vectorized_templated_elementwise",
    "index_elementwise",
    "legacy_elementwise",
    "reduce",
    "gpu",
    "binary",
    "aunary",
    "bunary",
    "unary",
    "multi_tensor_apply",
}
_OURS = [
    (r"accumulate_v", "accumulate"),
    (r"(squares|reduce|scale)_v", "clip"),
    (r"adamw_", "AdamW"),
]
_LOSSES = {"nll_loss", "softmax", "log_softmax"}


def plain(name: str) -> str:
    """A node's name as an operation: `void at::native::vectorized_elementwise_kernel<4, ...MulFunctor<float>...>` -> mul; our kernels keep theirs."""
    name = re.sub(r"\(anonymous namespace\)::", "", name.removeprefix("void "))
    for pattern, word in _OPERATIONS:
        if re.search(pattern, name):
            return word
    if "::" not in name and "<" not in name:
        words = re.sub(r"_backward(_data)?$", " backward", name.strip("_"))
        words = re.sub(
            r"^(vectorized|unrolled|index)_(?=elementwise)|(_cuda|_gpu)?_kernel.*$", "", words
        )
        return words.removesuffix("_") or name
    for found in re.finditer(
        r"CUDAFunctor(?:OnSelf|OnOther)?_(\w+)|(\w+?)_kernel(?:_cuda|_impl)*\b|(\w+?)_?[fF]unctor\b|(\w+)Ops\b",
        name,
    ):
        word = next(group for group in found.groups() if group)
        if word.lower() not in _GENERIC:
            return (
                re.sub(r"_?(cuda|gpu|tensor_scalar|scalar)(?=_|$)", "", word.lower())
                .replace("_backward", " backward")
                .strip("_")
                or word
            )
    return re.split(r"[<(]", name)[0].split("::")[-1]


def stages_of(names: "list[str]") -> "list[str]":
    """The stage of each node, a key of STAGES, told from the names in the order of launch: forward up to the loss, backward up to the sums, again
    for each micro-batch; what follows the last sum and is no kernel of ours is "results". Where nothing tells, all are ""."""
    ours = [
        next((stage for pattern, stage in _OURS if re.match(pattern, name)), None) for name in names
    ]
    words = [plain(name) for name in names]
    sums = [i for i, stage in enumerate(ours) if stage == "accumulate"]
    last = max(sums or [i for i, word in enumerate(words) if "backward" in word], default=-1)
    if last < 0 and not any(ours):
        return [""] * len(names)
    stages, phase = [], "forward"
    for i, stage in enumerate(ours):
        if stage == "accumulate" and any(
            words[k] in _LOSSES for k in range(i, min((k for k in sums if k > i), default=i))
        ):
            phase = "forward"  # of the next micro-batch
        elif "backward" in words[i]:
            phase = "backward"
        stages.append(stage or ("results" if i > last else phase))
    return stages


def graph(names: "list[str]", edges: "list[tuple[int, int]]", title: str = "") -> Figure:
    """Nodes in the order of launch, down one column and up the next; an edge (i, j) says that node j waits for node i."""
    ink, stages, words = _Ink(themed=False), stages_of(names), [plain(name) for name in names]
    if title:
        _title(ink, 16, title)
    columns, staged = _columns(stages), any(stages)
    top = (26 if title else 8) + (HEAD if staged else 0)
    rows, wide = max(map(len, columns), default=0), (WIDTH + GAP) / max(len(columns), 5)
    place = {}  # node -> its column, left edge, middle
    for c, nodes in enumerate(columns):
        for r, i in enumerate(nodes):
            place[i] = c, c * wide, top + (r if c % 2 == 0 else rows - 1 - r) * ROW + ROW / 2
    paths = {}
    for i, j in edges:
        if i in place and j in place:
            paths.setdefault((stages[i], abs(i - j) == 1), []).append(
                _edge(place[i], place[j], wide - GAP, i, j)
            )
    for (stage, near), some in sorted(paths.items(), key=lambda item: item[0][1]):
        ink.out.append(
            f'<path d="{"".join(some)}" fill="none" stroke="{STAGES[stage]}" stroke-width="{1.8 if near else 1.1}" opacity="{1 if near else 0.6}"/>'
        )
    for i, (c, x, y) in place.items():
        word = words[i].removesuffix(" backward") if stages[i] == "backward" else words[i]
        ink.out.append(
            f'<rect x="{x:.1f}" y="{y - 7:.1f}" width="{wide - GAP:.1f}" height="14" rx="4" fill="{STAGES[stages[i]]}"/>'
        )
        size = 10 * min(1.0, (wide - GAP - 4) / _text_width(word, 10))
        ink.text(x + (wide - GAP) / 2, y + 3.4, word, f"{size:.1f}", "#ffffff", "middle", 600)
    bottom = top + rows * ROW
    for c, nodes in enumerate(
        columns if staged else []
    ):  # a stage's name and an arrow where its first column begins
        part, before = _part(stages[nodes[0]]), _part(stages[columns[c - 1][0]]) if c else None
        ink.text(
            c * wide,
            top - 7 if c % 2 == 0 else bottom + 12,
            f"{part if part != before else ''} {'↓' if c % 2 == 0 else '↑'}".strip(),
            11.5,
            STAGES[stages[nodes[0]]],
            weight=600,
        )
    y, x = bottom + (HEAD if staged and len(columns) > 1 else 0) + 18, 0.0
    counts = {stage: stages.count(stage) for stage in STAGES if stage and stage in stages}
    told = f"{len(names):,} node{'s' * (len(names) != 1)}, {len(edges):,} edge{'s' * (len(edges) != 1)}"
    for part, colour in [
        (told, ink.soft),
        *((f"{stage} {n}", STAGES[stage]) for stage, n in counts.items()),
    ]:
        ink.text(x, y, part, 12, colour, weight=400 if part == told else 600)
        x += _text_width(part, 12) * 1.06 + 14
    told += ": " + ", ".join(f"{stage} {n}" for stage, n in counts.items()) if counts else ""
    return Figure(ink, y + 8, f"{title}: {told}" if title else told)


def _part(stage) -> str:
    """Which columns a stage stands in."""
    return {"accumulate": "backward", "forward": "forward", "backward": "backward", "": ""}.get(
        stage, "update"
    )


def _columns(stages) -> "list[list[int]]":
    """The nodes of each column, as few rows as MOST_COLUMNS allow: forward and backward (with its sums) begin columns of their own, and so does the rest."""
    parts = []
    for i, stage in enumerate(stages):
        if not parts or parts[-1][0] != _part(stage):
            parts.append((_part(stage), []))
        parts[-1][1].append(i)
    rows = 1
    while sum(-(-len(nodes) // rows) for _, nodes in parts) > max(MOST_COLUMNS, len(parts)):
        rows += 1
    return [nodes[k : k + rows] for _, nodes in parts for k in range(0, len(nodes), rows)]


def _edge(one, two, wide, i, j) -> str:
    (c1, x1, y1), (c2, x2, y2) = one, two
    if c1 == c2:
        if abs(i - j) == 1:
            return f"M{x1 + wide / 2:.1f} {y1:.1f}L{x2 + wide / 2:.1f} {y2:.1f}"
        bulge = min(12.0, 4 + abs(y2 - y1) / 16)
        return f"M{x1 + wide:.1f} {y1:.1f}C{x1 + wide + bulge:.1f} {y1:.1f} {x1 + wide + bulge:.1f} {y2:.1f} {x1 + wide:.1f} {y2:.1f}"
    a, b = (x1 + wide, x2) if c2 > c1 else (x1, x2 + wide)
    bend = max(10.0, abs(b - a) * 0.4) * (1 if c2 > c1 else -1)
    lift = 13.0 if y1 == y2 and abs(c1 - c2) > 1 else 0.0  # over what stands between them
    return f"M{a:.1f} {y1:.1f}C{a + bend:.1f} {y1 - lift:.1f} {b - bend:.1f} {y2 - lift:.1f} {b:.1f} {y2:.1f}"


# ---- the gaps between launches ------------------------------------------------------------------


def launches(runs: "dict[str, list[Span]]", title: str, launched: int = 12) -> Figure:
    """Each run's lanes on one scale, as high as the share of the time that the host launches and the GPU computes; below each a stretch
    enlarged, as long as `launched` launches of the first run take."""
    ink, left, right, told = _Ink(themed=False), 44, WIDTH - 8, []
    longest = max((s.stop for spans in runs.values() for s in spans), default=0.0) or 1.0
    _title(ink, 16, title)
    x, names = 0.0, {s.name for spans in runs.values() for s in spans}
    for colour, opacity, meaning in [_SPANS[name] for name in _SPANS if name in names] + [
        _KERNEL
    ] * any(name not in _SPANS for name in names):
        ink.out.append(
            f'<rect x="{x:.1f}" y="28" width="10" height="10" rx="2.5" fill="{colour}" opacity="{opacity}"/>'
        )
        ink.text(x + 15, 37, meaning, 11.5, ink.soft)
        x += _text_width(meaning, 11.5) * 0.92 + 34
    y, stretch = 62.0, None
    for (name, spans), colour in zip(runs.items(), RUN_COLOURS):
        found = facts(spans)
        busy = found["gpu_busy"]
        many = found["launches"] if busy is not None else sum(s.name == "operator" for s in spans)
        what = f"{many:,} {'launch' if busy is not None else 'operator'}{('es' if busy is not None else 's') * (many != 1)}, {microseconds(found['us'])}"
        what += f", the GPU works {busy:.0%} of it" if busy is not None else ""
        told.append(f"{name}: {what}")
        ink.text(0, y, name, 12.5, colour, weight=600)
        ink.text(_text_width(name, 12.5) + 14, y, what, 12, ink.soft)
        top, y = y + 8, _shares(ink, spans, y + 8, left, (right - left) / longest)
        first, stretch = _stretch(spans, stretch, launched)
        if 0 < stretch < 0.5 * longest:
            a, b = (left + us / longest * (right - left) for us in (first, first + stretch))
            ink.out.append(
                f'<rect x="{a - 1:.1f}" y="{top - 2:.1f}" width="{max(b - a, 1) + 2:.1f}" height="{y - top:.1f}" fill="none" stroke="{colour}" '
                f'stroke-width="1.4" rx="2"/>'
            )
            for near, far in ((a - 1, left), (b + 1, right)):
                ink.out.append(
                    f'<path d="M{near:.1f} {y - 2:.1f}L{far:.1f} {y + 17:.1f}" stroke="{colour}" stroke-width="1" opacity="0.5"/>'
                )
            y += 19
            for lane in _lanes(spans):
                ink.text(left - 10, y + 14, lane, 11, ink.soft, "end")
                some = [s for s in spans if s.lane == lane]
                _lane(
                    ink,
                    [s._replace(name=" ") if s.name not in _SPANS else s for s in some],
                    y,
                    20,
                    lambda us: left + (us - first) / stretch * (right - left),
                    left,
                    right,
                )
                y += 24
            ink.text(right, y + 11, f"enlarged: {microseconds(stretch)}", 11, ink.soft, "end")
            y += 14
        y += 22
    _time_axis(ink, longest, left, right, y - 2)
    return Figure(ink, y + 14, f"{title}: " + "; ".join(told))


def _lanes(spans):
    return [lane for lane in ("host", "GPU") if any(s.lane == lane for s in spans)]


def _shares(ink, spans, y, left, scale, step=2.0) -> float:
    """The lanes of one run: bars `step` wide, as high as the share of their time that is filled. Returns where they end."""
    for lane in _lanes(spans):
        ink.text(left - 10, y + 14, lane, 11, ink.soft, "end")
        end = (
            max(s.stop for s in spans if s.lane == lane or lane == "GPU") * scale
        )  # the host may be done long before the GPU
        ink.out.append(
            f'<rect x="{left}" y="{y:.1f}" width="{end:.1f}" height="20" fill="{GREY}" opacity="{0.22 if lane == "host" else 0.1}"/>'
        )
        looks = {}
        for s in spans:
            if s.lane == lane and s.name != "python":
                bars = looks.setdefault(_SPANS.get(s.name, _KERNEL), {})
                for k in range(int(s.start * scale / step), int(s.stop * scale / step) + 1):
                    bars[k] = (
                        bars.get(k, 0.0)
                        + max(
                            0.0,
                            min(s.stop * scale, (k + 1) * step) - max(s.start * scale, k * step),
                        )
                        / step
                    )
        for (colour, opacity, _), bars in looks.items():
            path = "".join(
                f"M{left + k * step:.0f} {y + 20:.1f}v{-20 * min(share, 1.0):.1f}h{min(step, end - k * step):.1f}v{20 * min(share, 1.0):.1f}z"
                for k, share in bars.items()
                if share > 0.01 and k * step < end
            )
            ink.out.append(f'<path d="{path}" fill="{colour}" opacity="{opacity}"/>')
        y += 24
    return y


def _stretch(spans, length, launched) -> "tuple[float, float]":
    """(where it begins, how long it is): a stretch in the middle of the work, of the length given, or of so many launches."""
    work = sorted((s for s in spans if s.lane == "GPU"), key=lambda s: s.start) or [
        s for s in spans if s.name == "operator"
    ]
    if length is None:
        calls = sorted(
            (s for s in spans if s.lane == "host" and s.name in ("launch", "operator")),
            key=lambda s: s.start,
        )
        middle = len(calls) * 2 // 5
        some = calls[middle : middle + launched]
        length = some[-1].stop - some[0].start if some else 0.0
        return (some[0].start if some else 0.0), length
    return (work[len(work) * 2 // 5].start if work else 0.0), length


# ---- a learning rate ----------------------------------------------------------------------------


def rates(
    asked: "list[float]", runs: "dict[str, list[float]]", title: str = "What the step multiplied by"
) -> Figure:
    """A schedule as a broad line, and what the steps did as thin ones; a run that follows it lies on it."""
    ink, left, top, right, bottom = _Ink(themed=False), 48, 40, WIDTH - 150, 190
    ticks = _nice_ticks(
        0.0, max([*asked, *(v for run in runs.values() for v in run)], default=1.0) or 1.0
    )
    _title(ink, 16, title)

    def at(i, value):
        return left + i / max(len(asked) - 1, 1) * (right - left), bottom - value / ticks[-1] * (
            bottom - top
        )

    def path(values):
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(i, v) for i, v in enumerate(values)))

    for tick in ticks:
        y = at(0, tick)[1]
        ink.line(left, y, right, y, opacity=0.9 if not tick else 0.45)
        ink.text(left - 8, y + 4, f"{tick:g}", 11, ink.soft, "end")
    ink.text(left, bottom + 17, "step 1", 11, ink.soft)
    ink.text(right, bottom + 17, len(asked), 11, ink.soft, "end")
    ink.out.append(
        f'<polyline points="{path(asked)}" fill="none" stroke="{GREY}" stroke-width="9" opacity="0.35" stroke-linejoin="round" '
        'stroke-linecap="round"/>'
    )
    labels = [("what was asked", ink.soft)]
    for k, ((name, values), colour) in enumerate(zip(runs.items(), (ORANGE, BLUE, GREEN, PINK))):
        dashes = (
            f'stroke-dasharray="7 {7 * max(len(runs) - 2, 0)}" stroke-dashoffset="{-7 * (k - 1)}"'
            if k and len(runs) > 2
            else ""
        )
        ink.out.append(
            f'<polyline points="{path(values)}" fill="none" stroke="{colour}" stroke-width="2.4" stroke-linejoin="round" {dashes}/>'
        )
        labels.append((name, colour))
    for k, (name, colour) in enumerate(labels):
        ink.text(right + 18, top + 10 + 20 * k, name, 12, colour, weight=600)
    same = {
        name: all(math.isclose(v, a, rel_tol=1e-3, abs_tol=1e-6) for v, a in zip(values, asked))
        for name, values in runs.items()
    }
    told = ", ".join(
        f"{name} {'follows' if follows else 'does not follow'} the schedule"
        for name, follows in same.items()
    )
    return Figure(ink, bottom + 26, f"{title}: {told}")
