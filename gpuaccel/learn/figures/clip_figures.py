"""The pictures of clipping: a sum by a tree, warps and lanes, a barrier, three kernels, passes.

clip_figures.tree_sum([3, 1, 4, 1, 5, 9, 2, 6])
clip_figures.barrier()
"""

from collections.abc import Sequence

from .drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    RUN_COLOURS,
    WHITE,
    WIDTH,
    Figure,
    Ink,
    Table,
    plural,
)

WARP = 32  # threads


def tree_sum(values: "Sequence[int]") -> Figure:
    """Threads of one block add numbers in shared memory, round by round, with barriers.

    Cells that a later round still reads are solid.

    Args:
        values: what `part` holds at first; 2, 4, 8 or 16 whole numbers.
    """
    part = list(values)
    count = len(part)
    left, right = 124, WIDTH - 70
    step = (right - left) / count
    ink = Ink()
    ink.text(0, 15, "thread", 12, ink.soft)
    for t in range(count):
        ink.text(left + (t + 0.5) * step, 15, t, 12, ink.soft, "middle")
    y = 24.0
    _draw_cells(ink, part, count, left, step, y)
    ink.text(0, y + 18, "part[t]", 12, weight=600)
    half = count // 2
    while half > 0:
        y += 28
        ink.segment(left, y + 11, right, y + 11, ORANGE, 2, dash="7 5")
        ink.text(right + 8, y + 15, "barrier", 12, ORANGE, weight=600)
        for t in range(half):
            x = left + (t + 0.5) * step
            ink.curve(x + half * step, y + 15, x + 5, y + 50, RUN_COLOURS[t % 4])
            ink.segment(x, y + 15, x, y + 50, RUN_COLOURS[t % 4], 1.8)
            part[t] += part[t + half]
        ink.text(0, y + 38, f"half = {half}", 12, ink.soft)
        y += 52
        _draw_cells(ink, part, half, left, step, y)
        adders = "thread 0 adds" if half == 1 else f"threads 0 to {half - 1} add"
        ink.text(0, y + 18, adders, 11, ink.soft)
        half //= 2
    rounds = count.bit_length() - 1
    words = f"{count} numbers, {plural(rounds, 'round')}: part[0] holds the sum, {part[0]}"
    ink.text(left, y + 48, words, 12.5, weight=600)
    return Figure(ink, y + 58, words)


def _draw_cells(ink, part, needed, left, step, y):
    """A row of shared memory. needed: how many of the first cells are still read."""
    for i, value in enumerate(part):
        is_needed = i < needed
        ink.rect(left + i * step + 2, y, step - 4, 26, BLUE, 1 if is_needed else 0.13, rx=4)
        colour = WHITE if is_needed else ink.soft
        ink.text(left + (i + 0.5) * step, y + 18, value, 13, colour, "middle", 600)


def warps(threads: int = 256, thread: int = 37) -> Figure:
    """The threads of one block as warps (rows) of 32 lanes (columns); one thread is marked."""
    left, step, height = 66, 19.0, 21
    ink = Ink()
    ink.text(left - 10, 15, "lane", 12, ink.soft, "end")
    for lane in range(WARP):
        ink.text(left + (lane + 0.5) * step, 15, lane, 10.5, ink.soft, "middle")
    y = 22.0
    for warp in range(-(-threads // WARP)):
        first = warp * WARP
        last = min(first + WARP, threads) - 1
        colour = RUN_COLOURS[warp % len(RUN_COLOURS)]
        ink.text(left - 10, y + 14, f"warp {warp}", 12, colour, "end", 600)
        for t in range(first, last + 1):
            x = left + (t - first) * step
            marked = t == thread
            ink.rect(x + 1, y, step - 2, height - 3, colour, 1 if marked else 0.3, rx=3)
            if marked:
                ink.text(x + step / 2, y + 13, t, 10, WHITE, "middle", 700)
        words = f"threads {first} to {last}"
        ink.text(left + WARP * step + 8, y + 14, words, 11.5, ink.soft)
        y += height
    words = f"thread {thread} is lane {thread % WARP} of warp {thread // WARP}"
    ink.text(left, y + 18, words, 12.5, weight=600)
    count = plural(-(-threads // WARP), "warp")
    return Figure(ink, y + 28, f"a block of {threads} threads is {count} of 32 lanes; {words}")


def barrier() -> Figure:
    """Two warps of a block, one of them late: what is read without a barrier, and with one."""
    ink = Ink()
    left, middle = 76, 452
    lane = 30

    def scene(y, title, colour, read_start, notes):
        """Two lanes of boxes; `read_start` is where warp 0 begins to read."""
        ink.text(0, y, title, 13, colour, weight=600)
        for row, warp in enumerate((0, 4)):
            top = y + 12 + row * (lane + 12)
            ink.text(left - 12, top + 19, f"warp {warp}", 12, anchor="end", weight=600)
            ink.line(left, top + lane + 5, WIDTH - 20, top + lane + 5)
        ink.box(left + 8, y + 12, 150, lane, BLUE, "writes part[0 to 31]")
        ink.box(middle - 178, y + 24 + lane, 172, lane, GREEN, "writes part[128 to 159]")
        ink.box(read_start, y + 12, 172, lane, colour, "reads part[128 to 159]")
        ink.text(left, y + 44 + 2 * lane, notes, 12, ink.soft)

    scene(
        16,
        "Without a barrier",
        RED,
        left + 168,
        "Warp 4 is late. Warp 0 reads memory that warp 4 has not written yet: a race.",
    )
    y = 158
    scene(
        y,
        "With __syncthreads()",
        BLUE,
        middle + 18,
        "Warp 0 waits at the barrier until every warp of the block has reached it.",
    )
    ink.segment(middle + 6, y + 4, middle + 6, y + 26 + 2 * lane, ORANGE, 3, dash="7 4")
    ink.text(middle + 14, y + 3, "barrier", 12, ORANGE, weight=600)
    ink.box(left + 168, y + 12, middle - left - 172, lane, GREY, "waits", 0.35, 12, ink.strong)
    ink.text(WIDTH, y + 78 + 2 * lane, "time →", 11.5, ink.soft, "end")
    words = (
        "Without a barrier warp 0 reads part[128 to 159] before warp 4, which is late, has "
        "written it; with __syncthreads() warp 0 waits until every warp has written"
    )
    return Figure(ink, y + 86 + 2 * lane, words)


def three_kernels() -> Figure:
    """Clipping as three kernels: the host only queues them, the numbers stay on the device."""
    ink = Ink()
    ink.rect(0, 4, WIDTH, 62, GREY, 0.12, rx=8)
    ink.text(12, 39, "host", 13, weight=600)
    ink.rect(0, 98, WIDTH, 118, GREEN, 0.1, rx=8)
    ink.text(12, 156, "device", 13, weight=600)
    kernels = (("squares", BLUE), ("reduce", ORANGE), ("scale", PINK))
    values = ("gradients", "one sum per block", "norm, scale", "gradients")
    start, kernel_width, gap = 66, 78, 122.0
    for i, value in enumerate(values):
        x = start + i * (kernel_width + gap)
        ink.text(x + gap / 2 - 2, 150, value, 11.5, anchor="middle")
        ink.segment(x + 6, 160, x + gap - 10, 160, ink.strong, 1.4)
        ink.path(f"M{x + gap - 12:.1f} 156l8 4l-8 4z", ink.strong)
    for i, (name, colour) in enumerate(kernels):
        x = start + gap + i * (kernel_width + gap)
        ink.box(x, 140, kernel_width, 40, colour, name, size=13)
        ink.box(x - 17, 18, kernel_width + 34, 34, colour, f"queues {name}")
        ink.segment(x + kernel_width / 2, 54, x + kernel_width / 2, 130, colour, 1.6, dash="4 3")
        ink.path(f"M{x + kernel_width / 2 - 4:.1f} 129l4 8l4 -8z", colour)
    ink.text(WIDTH - 62, 39, "goes on", 12, ink.soft)
    ink.text(start, 206, "No number travels up: the host never waits.", 12, ink.soft)
    words = (
        "the host queues three kernels and goes on; on the device squares makes one sum per block, "
        "reduce makes norm and scale of them, scale multiplies the gradients"
    )
    return Figure(ink, 222, words)


def chunks(sizes: "Sequence[int]", chunk: int = 4096) -> Figure:
    """Tensors cut into chunks: one thread block and one partial sum for each chunk.

    Args:
        sizes: elements of each tensor.
    """
    counts = [-(-size // chunk) for size in sizes]
    gap = 22.0
    step = (WIDTH - 90 - gap * (len(sizes) - 1)) / sum(counts)
    ink = Ink()
    for row, words in ((52, "chunks"), (120, "blocks"), (180, "sums")):
        ink.text(0, row, words, 12.5, weight=600)
    number = 0
    x = 88.0
    for t, (size, count) in enumerate(zip(sizes, counts)):
        colour = RUN_COLOURS[t % len(RUN_COLOURS)]
        words = f"tensor {t}: {size:,}"
        ink.text(x, 18, words, 12, colour, weight=600)
        for part in range(count):
            elements = min(chunk, size - part * chunk)
            width = step - 6
            ink.rect(x, 32, width, 30, "none", rx=4, stroke=colour, stroke_width=1.2, dash="3 3")
            ink.box(x, 32, max(width * elements / chunk, 3), 30, colour)
            ink.text(x + width / 2, 78, f"{elements:,}", 11, ink.soft, "middle")
            ink.segment(x + width / 2, 84, x + width / 2, 98, ink.soft, 1.2)
            ink.box(x + 6, 100, width - 12, 30, GREY, f"block {number}", 0.35, 12, ink.strong)
            ink.segment(x + width / 2, 132, x + width / 2, 160, ink.soft, 1.2)
            ink.box(x + 6, 162, width - 12, 28, colour, f"sum {number}")
            number += 1
            x += step
        x += gap
    words = f"{plural(len(sizes), 'tensor')}, {plural(number, 'chunk')}: one launch of " + plural(
        number, "block"
    )
    ink.text(88, 214, words, 12.5, weight=600)
    return Figure(ink, 224, words)


# A pass over memory: its name, the arrays that it reads, the arrays that it writes.
_SEPARATE = (
    ("add", ("sum", "fresh gradient"), ("sum",)),
    ("norm", ("sum",), ()),
    ("scale", ("sum",), ("sum",)),
    ("AdamW", ("weight", "sum", "m", "v"), ("weight", "m", "v")),
    ("zero", (), ("sum",)),
)
_INSIDE = (
    ("add", ("sum", "fresh gradient"), ("sum",)),
    ("norm", ("sum",), ()),
    ("AdamW, with scale", ("weight", "sum", "m", "v"), ("weight", "m", "v")),
)


def passes(inside: bool) -> Table:
    """What follows backward, pass after pass, and the bytes that each moves per fp32 element.

    Args:
        inside: False for five kernels of their own; True for three that do the same.
    """
    rows = []
    total = 0
    for name, reads, writes in _INSIDE if inside else _SEPARATE:
        count = 4 * (len(reads) + len(writes))
        total += count
        rows.append((name, ", ".join(reads) or "-", ", ".join(writes) or "-", count))
    rows.append(("together", "", "", total))
    return Table(("pass", "reads", "writes", "bytes per element"), rows)
