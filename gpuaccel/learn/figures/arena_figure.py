"""The picture of an arena: where each tensor lies in the flat buffer."""

from .drawing import RUN_COLOURS, WHITE, WIDTH, Figure, Ink, text_width


def arena(arena) -> Figure:
    """An Arena from its first element to its last: its blocks, and below them one block's tensors.

    The block is the first of those with the most tensors. Padding is pale."""
    ink = Ink()
    elements = arena.numel
    colours = [RUN_COLOURS[i % len(RUN_COLOURS)] for i in range(len(arena.blocks))]
    filled = [sum(s.numel for s in arena.segments[b.first : b.last]) for b in arena.blocks]
    names = [
        b.name.removesuffix(".weight").replace("lm_head.weight .. final_norm", "head")
        for b in arena.blocks
    ]
    ink.text(0, 14, "backward yields its gradients in this order  →", 12, ink.soft)
    blocks = [
        (name, b.stop - b.start, size, colour)
        for name, b, size, colour in zip(names, arena.blocks, filled, colours)
    ]
    label_height = _band(ink, blocks, 24, 44, elements)

    counts = [b.last - b.first for b in arena.blocks]
    largest = counts.index(max(counts))
    block = arena.blocks[largest]
    top = 24 + 44 + label_height + 46
    for edge, x in ((block.start, 0.0), (block.stop, float(WIDTH))):
        edge_x = edge / elements * WIDTH
        ink.line(edge_x, 68, edge_x, 68 + label_height, 1.0, "3 3")
        ink.line(edge_x, 68 + label_height, x, top - 4, 1.0, "3 3")
    heading = f"{names[largest]}, {counts[largest]} tensors"
    ink.text(0, top - 12, heading, 12, colours[largest], weight=600)
    tensors = [
        (
            s.name.removeprefix(block.name + ".").removesuffix(".weight"),
            s.padded,
            s.numel,
            colours[largest],
        )
        for s in arena.segments[block.first : block.last]
    ]
    label_height = _band(ink, tensors, top, 36, block.stop - block.start)
    padding = elements - sum(filled)
    words = (
        f"{len(arena.segments)} tensors in {len(arena.blocks)} blocks, "
        f"{4 * elements / 2**20:,.1f} MiB in one buffer, "
        f"{padding / elements:.1%} of it padding (pale)"
    )
    ink.text(0, top + 36 + label_height + 22, words, 12, ink.soft)
    return Figure(ink, top + 36 + label_height + 30, words)


def _band(ink, parts, y, height, total):
    """Parts side by side, as wide as their share of `total`.

    Args:
        parts: (name, size, size without padding, colour).

    Returns:
        The height of labels below it.
    """
    x = 0.0
    below = []
    for name, size, filled, colour in parts:
        width = size / total * WIDTH
        ink.rect(x, y, max(width - 1.4, 0.7), height, colour, 0.28, rx=3)
        ink.rect(x, y, max(filled / total * WIDTH - 1.4, 0.7), height, colour, rx=3)
        middle = x + width / 2
        if text_width(name, 11.5) + 6 < width:
            ink.text(middle - 0.7, y + height / 2 + 4, name, 11.5, WHITE, "middle", 600)
        else:
            below.append((name, middle))
        x += width
    for k, (name, x) in enumerate(below):
        drop = 15 * (k % 3)
        ink.line(x, y + height, x, y + height + 8 + drop, 1.0)
        anchor, shift = ("start", 4) if x < WIDTH / 2 else ("end", -4)
        ink.text(x + shift, y + height + 14 + drop, name, 11, ink.soft, anchor)
    return 15 * min(len(below), 3) + 8 if below else 0
