"""Traces give the textbook's numbers; ga.show draws them, with and without sliders, and in text.

The traces are made by hand here: small models of kernels, each a Python function that one thread
runs.
"""

import functools
import re
import sys
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import numpy as np
import pytest
from pictures import contrast, rgb

from gpuaccel.errors import ArgumentError
from gpuaccel.learn import show
from gpuaccel.learn.figures import access_panels
from gpuaccel.simt.tracing import ATOMIC, EVENT, READ, WRITE, Trace, Traced


def trace_of(body, grid, block, tensors, source="", **more):
    """Runs `body(thread, touch)` for every thread; tensors: name -> (elements, itemsize) or
    (elements, itemsize, "shared").

    touch(line, kind, name, index, elements=1) is one access; the place in the code is (line, kind,
    name)."""
    wide = [
        (*size, 1, 1)[:3] if isinstance(size, tuple) else (size, 1, 1) for size in (grid, block)
    ]
    (gx, gy, gz), (bx, by, bz) = wide
    traced = [
        Traced(
            name,
            size[0],
            size[1],
            {2: "bfloat16", 4: "float32", 8: "float64"}[size[1]],
            (*size, "global")[2],
        )
        for name, size in tensors.items()
    ]
    names, places, rows = list(tensors), {}, []
    for b in range(gx * gy * gz):
        for t in range(bx * by * bz):
            seen, steps = {}, [0]

            def touch(line, kind, name, index, elements=1):
                place, item = places.setdefault((line, kind, name), len(places)), tensors[name][1]
                visit = seen[place] = seen.get(place, -1) + 1
                rows.append(
                    (
                        line,
                        b,
                        t,
                        names.index(name),
                        index * item,
                        elements * item,
                        kind,
                        visit,
                        place,
                        steps[0],
                    )
                )
                steps[0] += 1

            body(
                SimpleNamespace(
                    b=b,
                    t=t,
                    i=b * bx * by * bz + t,
                    bx=b % gx,
                    by=b // gx % gy,
                    tx=t % bx,
                    ty=t // bx % by,
                ),
                touch,
            )
    return Trace(
        kernel=more.pop("kernel", "k"),
        grid=wide[0],
        block=wide[1],
        tensors=traced,
        events=np.array(rows, EVENT) if rows else np.zeros(0, EVENT),
        source=source,
        filename="<cell>",
        **more,
    )


@functools.cache
def copy(n, block, stride=1, wide=1, item=4):
    def body(th, touch):
        if th.i * wide * stride < n:
            touch(3, READ, "x", th.i * wide * stride, wide)
            touch(3, WRITE, "out", th.i * wide, wide)

    return trace_of(
        body, -(-n // (block * wide * stride)), block, {"x": (n, item), "out": (n // stride, item)}
    )


@functools.cache
def transpose(n, padding=None):
    """Naive, or through a tile of shared memory with rows of 32 + padding elements."""

    def naive(th, touch):
        touch(4, READ, "x", (th.by * 32 + th.ty) * n + th.bx * 32 + th.tx)
        touch(4, WRITE, "out", (th.bx * 32 + th.tx) * n + th.by * 32 + th.ty)

    def tiled(th, touch):
        row = 32 + padding
        touch(5, READ, "x", (th.by * 32 + th.ty) * n + th.bx * 32 + th.tx)
        touch(5, WRITE, "tile", th.ty * row + th.tx)
        touch(7, READ, "tile", th.tx * row + th.ty)
        touch(7, WRITE, "out", (th.bx * 32 + th.ty) * n + th.by * 32 + th.tx)

    tensors = {"x": (n * n, 4), "out": (n * n, 4)}
    if padding is None:
        return trace_of(naive, (n // 32, n // 32), (32, 32), tensors)
    return trace_of(
        tiled, (n // 32, n // 32), (32, 32), {**tensors, "tile": (32 * (32 + padding), 4, "shared")}
    )


SAXPY = """extern "C" __global__ void saxpy(float* y, float a, const float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""


def saxpy(n=21, block=8, grid=3, bug=0, **more):
    def body(th, touch):
        if th.i < n + bug:
            touch(4, READ, "x", th.i)
            touch(4, READ, "y", th.i)
            touch(4, WRITE, "y", th.i)

    return trace_of(body, grid, block, {"y": (n, 4), "x": (n, 4)}, SAXPY, kernel="saxpy", **more)


def reduction(block=64):
    def body(th, touch):
        touch(5, READ, "x", th.i)
        touch(5, WRITE, "partial", th.t)
        s = block // 2
        while s:
            if th.t < s:
                touch(8, READ, "partial", th.t)
                touch(8, READ, "partial", th.t + s)
                touch(8, WRITE, "partial", th.t)
            s //= 2
        if th.t == 0:
            touch(11, READ, "partial", 0)
            touch(11, WRITE, "out", th.b)

    lines = {
        3: "__shared__ float partial[64];",
        5: "partial[t] = x[i];",
        6: "__syncthreads();",
        7: "for (int s = 32; s; s /= 2)",
        8: "    if (t < s) partial[t] += partial[t + s];",
        11: "if (t == 0) out[blockIdx.x] = partial[0];",
    }
    source = "\n".join(lines.get(n, "") for n in range(1, 12))
    tensors = {"x": (2 * block, 4), "out": (2, 4), "partial": (block, 4, "shared")}
    return trace_of(body, 2, block, tensors, source, kernel="block_sum")


def one_read(index, block, grid=1, n=64):
    return trace_of(lambda th, touch: touch(1, READ, "x", index(th)), grid, block, {"x": (n, 4)})


def use(trace, tensor, kind):
    return next(u for u in trace.summary() if (u.tensor, u.kind) == (tensor, kind))


# ---- what a trace says --------------------------------------------------------------------------

GLOBAL = [
    # trace, tensor, kind, sectors per request, at best, share used
    ("copy", copy(1024, 256), "x", "read", 4.0, 4.0, 1.0),
    ("every 8th element", copy(8192, 256, stride=8), "x", "read", 32.0, 4.0, 0.125),
    ("every 2nd element", copy(2048, 256, stride=2), "x", "read", 8.0, 4.0, 0.5),
    ("float4", copy(4096, 256, wide=4), "x", "read", 16.0, 16.0, 1.0),
    ("bf16", copy(1024, 256, item=2), "x", "read", 2.0, 2.0, 1.0),
    ("float64", copy(1024, 256, item=8), "out", "write", 8.0, 8.0, 1.0),
    ("naive transpose, read", transpose(64), "x", "read", 4.0, 4.0, 1.0),
    ("naive transpose, write", transpose(64), "out", "write", 32.0, 4.0, 0.125),
    ("tiled transpose, write", transpose(32, 1), "out", "write", 4.0, 4.0, 1.0),
    ("one element for all", one_read(lambda th: 5, 64), "x", "read", 1.0, 1.0, 0.125),
    ("shifted by one", one_read(lambda th: th.t + 1, 32), "x", "read", 5.0, 4.0, 0.8),
]


@pytest.mark.parametrize(
    "what, trace, tensor, kind, sectors, needed, used", GLOBAL, ids=[row[0] for row in GLOBAL]
)
def test_sectors_of_a_request_are_the_textbook_s(what, trace, tensor, kind, sectors, needed, used):
    line_use = use(trace, tensor, kind)
    assert (line_use.sectors, line_use.needed, line_use.used) == pytest.approx(
        (sectors, needed, used)
    )
    assert line_use.count == line_use.requests * 32 and line_use.bank_turns is None


def shared_use(index, elements=1, kind=READ, item=4):
    size = (4096, item, "shared")
    return (
        trace_of(lambda th, touch: touch(1, kind, "s", index(th.t), elements), 1, 32, {"s": size})
        .summary()[0]
        .bank_turns
    )


@pytest.mark.parametrize(
    "expected, turns",
    [
        (32, use(transpose(32, 0), "tile", "read").bank_turns),
        (1, use(transpose(32, 1), "tile", "read").bank_turns),
        (1, use(transpose(32, 0), "tile", "write").bank_turns),
        (1, shared_use(lambda t: t)),
        (2, shared_use(lambda t: 2 * t)),
        (1, shared_use(lambda t: 3 * t)),
        (4, shared_use(lambda t: 4 * t)),
        (1, shared_use(lambda t: 7)),
        (1, shared_use(lambda t: t // 2)),
        (2, shared_use(lambda t: t % 2 * 32)),
        (1, shared_use(lambda t: t, item=2)),
        (1, shared_use(lambda t: 4 * t, 4)),
        (1, shared_use(lambda t: 2 * t, 2)),
        (1, shared_use(lambda t: t, item=8)),
        (2, shared_use(lambda t: 8 * t, 4)),
        (8, shared_use(lambda t: 32 * t, 4)),
        (16, shared_use(lambda t: 32 * t, 2)),
        (32, shared_use(lambda t: 7, kind=ATOMIC)),
        (1, shared_use(lambda t: t, kind=ATOMIC)),
        (4, shared_use(lambda t: t % 8, kind=ATOMIC)),
    ],
)
def test_bank_conflicts_are_the_textbook_s(expected, turns):
    assert turns == expected


def test_a_request_is_what_a_warp_does_at_one_place_at_one_time():
    rows = copy(96, 64).requests()
    assert (
        rows["threads"].tolist() == [32] * 6 and rows["requested"].tolist() == [128] * 6
    )  # one warp of the second block works
    who = sorted(rows[["block", "warp", "kind"]].tolist())
    assert who == [
        (0, 0, READ),
        (0, 0, WRITE),
        (0, 1, READ),
        (0, 1, WRITE),
        (1, 0, READ),
        (1, 0, WRITE),
    ]
    loop = trace_of(
        lambda th, touch: [touch(1, READ, "x", 64 * k + th.t) for k in range(3)],
        1,
        40,
        {"x": (192, 4)},
    )
    assert (
        loop.requests()["visit"].tolist() == [0, 1, 2, 0, 1, 2]
        and loop.requests()["threads"].tolist() == [32] * 3 + [8] * 3
    )
    assert trace_of(lambda th, touch: None, 1, 1, {"x": (1, 4)}).requests().size == 0


def test_accesses_are_counted_per_thread_and_in_all():
    assert [(u.tensor, u.kind, u.count, u.per_thread) for u in saxpy().summary()] == [
        ("x", "read", 21, "0 to 1"),
        ("y", "read", 21, "0 to 1"),
        ("y", "write", 21, "0 to 1"),
    ]
    assert (
        use(reduction(), "partial", "read").count,
        use(reduction(), "partial", "read").per_thread,
    ) == (252, "0 to 12")
    assert use(copy(1024, 256), "x", "read").per_thread == "1"
    assert str(saxpy().summary()[0]).startswith(
        "line 4, x read: 21 (0 to 1 per thread), 1.0 sectors per request, 87.5% of"
    )
    assert "32.0 sectors per request (at best 4.0), 12.5%" in str(
        use(transpose(64), "out", "write")
    )


def test_a_struct_is_read_before_its_copy_is_written():
    def body(th, touch):
        touch(3, WRITE, "out", 4 * th.i, 4)  # out[i] = x[i]: the compiler names the write first
        touch(3, READ, "x", 4 * th.i, 4)
        touch(4, READ, "x", 4 * th.i, 4)
        touch(5, READ, "x", 4 * th.i)

    trace = trace_of(body, 2, 8, {"x": (64, 4), "out": (64, 4)})
    first = trace.events[(trace.events["block"] == 1) & (trace.events["thread"] == 0)]
    rows = first[["line", "kind", "bytes", "step"]].tolist()
    assert rows == [(3, READ, 16, 0), (3, WRITE, 16, 1), (4, READ, 16, 2), (5, READ, 4, 3)]
    assert len(trace.events) == 16 * 4


def test_memory_without_a_type_is_counted_in_what_its_accesses_read():
    trace = trace_of(
        lambda th, touch: touch(1, WRITE, "buffer", th.t), 1, 32, {"buffer": (64, 4, "shared")}
    )
    trace.tensors[0] = Traced("buffer", 256, 1, "byte", "shared")
    measured = Trace(trace.kernel, trace.grid, trace.block, trace.tensors, trace.events).tensors[0]
    assert (measured.elements, measured.itemsize, measured.dtype) == (64, 4, "4-byte")


# ---- what the picture and the text say ----------------------------------------------------------


def words_of(svg):
    return [
        element.text for element in xml.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def drawn(shown, **look):
    """How many lines of a picture (between threads and elements) have this look."""
    paths = [
        p
        for p in xml.fromstring(shown.picture()).iter("{http://www.w3.org/2000/svg}path")
        if "C" in p.get("d")
    ]
    return sum(p.get("d").count("M") for p in paths if all(p.get(k) == v for k, v in look.items()))


def test_saxpy_is_drawn_with_its_threads_elements_counts_and_source():
    shown = show(saxpy(), block=1)
    words = words_of(shown.picture())
    assert {
        "saxpy",
        "3 blocks of 8 threads  ·  block 1, all accesses",
        "x",
        "y",
        "float32, 21 elements",
        "warp 0",
    } <= set(words)
    assert {
        "read ↓",
        "write ↓",
        "0 to 1",
        "1.0",
        "87.5%",
        "   4  if (i < n) y[i] = a * x[i] + y[i];",
    } <= set(words)
    assert (
        words.count("15") == 3 and words.count("20") == 3 and words.count("7") == 5
    )  # 3 rows of elements, 2 of threads
    assert drawn(shown) == 3 * 8 and drawn(show(saxpy(), block=2)) == 3 * 5
    assert str(shown).splitlines()[:4] == [
        "saxpy, 3 blocks of 8 threads; block 1, all accesses",
        "  y: reads elements 8 to 15; writes elements 8 to 15",
        "  x: reads elements 8 to 15",
        "line 4: if (i < n) y[i] = a * x[i] + y[i];",
    ]


def test_one_step_is_one_access_of_each_thread_in_the_same_frame():
    for step, tensor, verb in ((0, "x", "reads"), (1, "y", "reads"), (2, "y", "writes")):
        shown = show(saxpy(), block=0, step=step)
        assert drawn(shown) == 8 and f"  {tensor}: {verb} elements 0 to 7" in str(shown)
        assert f"access {step} of 0 to 2" in str(shown)
        assert words_of(shown.picture()).count("20") == 3  # everything stays where it is
    assert "thread without an access" in words_of(show(saxpy(), step=0).picture())


def test_accesses_outside_the_tensor_are_red_and_said():
    report = SimpleNamespace(
        kind="out of bounds", line=4, message="thread 5 of block 2 reads x[21]: x has 21 elements"
    )
    shown = show(saxpy(bug=2, reports=[report]), block=2)
    assert (
        drawn(shown, stroke="#e5484d") == 3 * 2
        and drawn(show(saxpy(), block=2), stroke="#e5484d") == 0
    )
    words = words_of(shown.picture())
    assert (
        words.count("21") == words.count("22") == 3
        and "outside the tensor" in words
        and f"line 4: {report.message}" in words
    )
    assert "OUTSIDE: elements 21 to 22 of 21" in str(shown) and report.message in str(shown)
    before = show(one_read(lambda th: th.t - 1, 8, n=1000))
    assert drawn(before, stroke="#e5484d") == 1 and "-1" in words_of(before.picture())
    assert "reads elements -1 to 6; OUTSIDE: element -1 of 1,000" in str(before)


@pytest.mark.parametrize(
    "trace, look",
    [
        (saxpy(32, 32, 1), {}),
        (saxpy(128, 128, 1), {}),
        (saxpy(21, 8, 3), {"block": 2}),
        # Two warps of which the second has few elements; half of a sector at the end.
        (saxpy(100, 64, 2), {"block": 1}),
        (copy(512, 64, item=2), {"block": 3}),
        (copy(512, 32, item=8), {"block": 1}),
        (transpose(64, 1), {"step": 1}),
    ],
)
def test_a_thread_stands_below_its_element_and_coalesced_accesses_are_straight_lines(trace, look):
    ends = re.findall(
        r"M([\d.]+) [\d.]+C[\d. ]+? ([\d.]+) [\d.]+(?=[M\"])", show(trace, **look).picture()
    )
    assert len(ends) >= 8
    assert all(abs(float(above) - float(below)) <= 0.11 for above, below in ends)


def test_strided_accesses_are_no_straight_lines():
    picture = show(copy(256, 32, stride=8), step=0).picture()
    ends = re.findall(r"M([\d.]+) [\d.]+C[\d. ]+? ([\d.]+) [\d.]+(?=[M\"])", picture)
    assert sum(abs(float(above) - float(below)) > 1 for above, below in ends) > 24


def test_shared_memory_is_drawn_as_banks_with_the_turns_they_take():
    words = words_of(show(transpose(32, 0)).picture())
    assert (
        words.count("32×") == 1 and "32-way bank conflict" in words and "32-way" in words
    )  # one bank, its lines converge
    words = words_of(show(transpose(32, 1)).picture())
    assert (
        not [w for w in words if w.endswith("×")]
        and "no bank conflict" in words
        and "32-way" not in words
    )
    assert drawn(show(transpose(32, 1))) == 4 * 32 and "by another warp" in words
    last = str(show(transpose(32, 1), warp=3))
    assert (
        "warp 3 of 0 to 31" in last
        and "tile: reads elements 3 to 1,026 in steps of 33; writes elements 99 to 130" in last
    )


def test_a_big_launch_shows_the_neighbourhood_that_a_block_touches():
    shown = show(copy(1 << 14, 256), block=9)
    assert "warps 0 to 3 of 0 to 7" in str(shown) and "x: reads elements 2,304 to 2,431" in str(
        shown
    )
    words = words_of(shown.picture())
    assert "2,304" in words and "2,424" in words and "0" not in words and words.count("…") == 4
    far = words_of(show(transpose(64)).picture())
    assert {"64", "128", "1,024"} <= set(
        far
    ) and "72" not in far  # one sector of each row, the rest left out
    loop = trace_of(
        lambda th, touch: [touch(1, READ, "x", 128 * k + th.t) for k in range(50)],
        1,
        64,
        {"x": (6400, 4)},
    )
    assert "the first 2 accesses of 50" in str(show(loop)) and "elements 3,840 to 3,903" in str(
        show(loop, step=30)
    )
    idle = show(
        trace_of(lambda th, touch: th.b or touch(1, READ, "x", th.t), 2, 8, {"x": (8, 4)}), block=1
    )
    assert "block 1, all accesses: no thread touches anything" in str(
        idle
    ) and "touched" not in words_of(idle.picture())


def odd_one(th, touch):
    touch(1, READ, "a", 3 * th.t)
    touch(1, READ, "a", 9000 - th.t, 2)
    touch(2, ATOMIC, "s", th.t % 5)
    touch(2, WRITE, "s", 5000 + th.t)
    if th.t % 3 == 0:
        touch(3, WRITE, "b", -70 + th.i * 40)
        touch(3, ATOMIC, "b", th.i)


ODD = trace_of(odd_one, 2, (8, 9), {"a": (9000, 2), "s": (40, 4, "shared"), "b": (7, 8)})
ALL = {
    "saxpy": saxpy(),
    "outside": saxpy(bug=3),
    "copy": copy(1024, 256),
    "stride": copy(8192, 256, stride=8),
    "odd": ODD,
    "float4": copy(4096, 256, wide=4),
    "transpose": transpose(64),
    "tile": transpose(32, 0),
    "padded": transpose(32, 1),
    "sum": reduction(),
    "one": copy(1, 1),
}


@pytest.mark.parametrize("name", ALL)
def test_every_block_and_step_is_a_small_well_formed_picture_and_a_text(name):
    trace = ALL[name]
    for block in range(min(trace.blocks, 2)):
        for step in (None, *range(min(show(trace).steps, 3))):
            for warp in {0, -(-trace.threads // 32) - 1}:
                shown = show(trace, block=block, step=step, warp=warp)
                bundle = shown._repr_mimebundle_()
                svg = bundle["image/svg+xml"]
                assert set(words_of(svg)) and len(svg) < 90_000, len(svg)
                assert not re.search(r"nan|inf\b|var\(--jp", svg) and bundle["text/plain"] == repr(
                    shown
                )
                right = [float(x) for x in re.findall(r"[ML](-?[\d.]+) ", svg)]
                assert min(right, default=0) > -12 and max(right, default=0) < 812


def test_its_colours_can_be_read_on_light_and_on_dark_pages():
    svg = "".join(show(trace).picture() for trace in (saxpy(bug=2), transpose(32, 0)))
    # white stands on a cell
    texts = set(re.findall(r'<(?:text|g)[^>]*fill="(#[0-9a-f]{6})"', svg)) - {"#ffffff"}
    lines = set(re.findall(r'stroke="(#[0-9a-f]{6})"', svg))
    assert len(texts) >= 2 and len(lines) >= 2
    for colour in texts | lines:
        for page in ((255, 255, 255), (17, 17, 17)):
            assert contrast(rgb(colour), page) >= 2.4, colour


def test_each_column_says_what_it_means_below_the_table():
    words = words_of(show(transpose(32, 0)).picture())
    for title in ("sectors per request", "of their bytes used", "bank conflict"):
        assert any(line.startswith(f"{title}: ") for line in words), title
    assert any(line.startswith("red: ") for line in words)
    assert not any(line.startswith("red: ") for line in words_of(show(saxpy()).picture()))


# ---- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: show(print), "got a builtin_function_or_method: write ga.show"),
        (lambda: show("saxpy", 3), "got a str"),
        (
            lambda: show(SimpleNamespace(name="saxpy")),
            r"write ga.show\(saxpy\[grid, block\], ...\)",
        ),
        (
            lambda: show(saxpy(), block=3),
            "block is 3; saxpy was started with grid 3: expected 0 to 2$",
        ),
        (lambda: show(saxpy(), block=-1), "block is -1"),
        (lambda: show(saxpy(), block="1"), "block is '1'"),
        (
            lambda: show(transpose(64), block=(2, 0)),
            r"block is \(2, 0\); k was started with grid 2 × 2: expected 0 to 3 or \(x, y,",
        ),
        (lambda: show(saxpy(), step=3), "step is 3; saxpy has steps 0 to 2 here, None shows all"),
        (lambda: show(saxpy(), step=True), "step is True"),
        (lambda: show(saxpy(), warp=1), "warp is 1; saxpy has warps 0 to 0 here"),
        (
            lambda: show(trace_of(lambda th, touch: None, 1, 8, {"x": (8, 4)})),
            "k touches no tensor .*; expected at least one",
        ),
    ],
)
def test_bad_calls_name_the_value_and_what_was_expected(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_blocks_have_a_number_and_a_place():
    assert show(transpose(64), block=(1, 1)).block == 3 and "block (1, 1)" in str(
        show(transpose(64), block=3)
    )


def test_a_kernel_is_run_on_copies_and_shown_with_the_lines_of_its_source():
    import torch

    import gpuaccel as ga
    from gpuaccel.backends import find_compiler

    if not find_compiler()[0]:
        pytest.skip(find_compiler()[1])
    kernel = ga.compile(SAXPY)
    x, y = torch.randn(21), torch.randn(21)
    before = y.clone()
    shown = show(kernel[3, 8], y, 2.0, x, 21)
    assert sorted(str(shown).splitlines()) == sorted(
        str(show(saxpy())).splitlines()
    )  # as the model of it, made by hand
    assert torch.equal(y, before)
    wrong = show(kernel[3, 8], y[:20].clone(), 2.0, x, 21, block=2)
    assert "y: reads elements 16 to 20; writes elements 16 to 20; OUTSIDE: element 20 of 20" in str(
        wrong
    )
    assert "thread 4 of block 2 reads y[20]" in str(wrong)
    with pytest.raises(ArgumentError, match=r"write ga.show\(saxpy\[grid, block\]"):
        show(kernel, y, 2.0, x, 21)


def test_a_view_begins_in_the_middle_of_a_sector():
    """x[1:33] lies in bytes 4 to 131 of its memory: 5 sectors, 128 of their 160 bytes."""
    import torch

    import gpuaccel as ga
    from gpuaccel.backends import find_compiler

    if not find_compiler()[0]:
        pytest.skip(find_compiler()[1])
    kernel, x = ga.compile(SAXPY), torch.randn(64)
    for first, sectors in (
        (0, "4.0 sectors per request, 100%"),
        (8, "4.0"),
        (1, "5.0"),
        (7, "5.0"),
    ):
        shown = show(kernel[1, 32], torch.randn(32), 2.0, x[first : first + 32], 32)
        assert f"x read: 32 (1 per thread), {sectors}" in str(shown)
    assert "5.0 sectors per request (at best 4.0), 80% of their bytes used" in str(shown)
    trace = shown.trace
    index = [traced.name for traced in trace.tensors].index("x")
    events, red = trace.events, np.zeros(len(trace.events), bool)
    cells = access_panels.Panel(trace, index, events, red, events, events, range(32)).cells
    # The first holds one element, seven are in front of it.
    assert list(cells.sectors.values())[0] == (0, 4) and list(cells.sectors.values())[-1] == (
        100,
        128,
    )


# ---- in a notebook ------------------------------------------------------------------------------


def test_sliders_choose_block_access_and_warp_and_the_picture_follows():
    pytest.importorskip("ipywidgets")
    shown, updates = show(transpose(64)), []
    shown._shown = SimpleNamespace(update=lambda bundle, raw: updates.append(bundle))
    sliders = {slider.description: slider for slider in shown._sliders().children}
    assert list(sliders) == ["block", "access", "warp"]
    sliders["block"].value = 2
    sliders["access"].value = 1
    sliders["warp"].value = 3
    assert (shown.block, shown.step, shown.warp) == (2, 1, 3) and len(updates) == 3
    assert "block (0, 1), warp 3 of 0 to 31, access 1 of 0 to 1" in updates[-1]["text/plain"]
    assert updates[-1]["image/svg+xml"] == shown.picture() != updates[-2]["image/svg+xml"]
    sliders["access"].value = -1
    assert shown.step is None and "all accesses" in updates[-1]["text/plain"]
    assert [s.description for s in show(saxpy(), step=2)._sliders().children] == ["block", "access"]
    assert (
        show(one_read(lambda th: th.t, 8))._sliders() is None
    )  # one block, one access: nothing to choose


def test_without_ipywidgets_there_is_the_picture_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert show(saxpy())._sliders() is None


@pytest.mark.slow
def test_a_saved_notebook_keeps_the_picture_and_the_text(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipywidgets")
    cell = f"""import sys; sys.path.insert(0, {__file__.rsplit("/", 3)[0]!r})
import numpy as np
from gpuaccel.learn import show
from gpuaccel.simt.tracing import EVENT, Trace, Traced
events = np.zeros(16, EVENT)
events["block"], events["thread"] = np.divmod(np.arange(16), 8)
events["offset"], events["bytes"] = 4 * np.arange(16), 4
tensors = [Traced("x", 16, 4, "float32", "global")]
show(Trace("one", (2, 1, 1), (8, 1, 1), tensors, events), block=1)"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    notebook.metadata.kernelspec = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    sliders, picture = notebook.cells[0].outputs
    assert set(sliders.data) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    assert (
        set(picture.data) == {"text/html", "image/svg+xml", "text/plain"}
        and "x: reads elements 8 to 15" in picture.data["text/plain"]
    )
    assert words_of(picture.data["image/svg+xml"])[0] == "one"
