"""Pictures of notebook 01: a batch in micro-batches, and the thread blocks that add chunks.

accumulate_figures.micro_batches(rows=8, pieces=4)
accumulate_figures.chunks([("a", 5), ("b", 12), ("c", 3)], chunk=8)
"""

import torch

from ...errors import ArgumentError
from .drawing import RUN_COLOURS, WHITE, WIDTH, Figure, Ink


def micro_batches(rows: int, pieces: int) -> Figure:
    """A batch of `rows` rows, cut into pieces; a backward of each; one sum; one optimizer step.

    Raises:
        ArgumentError: for fewer rows than pieces, and for no piece.
    """
    if not 1 <= pieces <= rows:
        raise ArgumentError(f"pieces is {pieces}; expected 1 to {rows}, the number of rows")
    ink = Ink()
    left, gap = 96, 18
    width = (WIDTH - left - gap * (pieces - 1)) / pieces
    labels = ((37, "batch"), (91, "backward"), (147, "sum"), (203, "optimizer"))
    for y, words in labels:
        ink.text(0, y, words, 12.5, weight=600)
    # As TrainStep cuts a batch.
    for piece, numbers in enumerate(torch.arange(rows).tensor_split(pieces)):
        colour = RUN_COLOURS[piece % len(RUN_COLOURS)]
        x = left + piece * (width + gap)
        step = width / len(numbers)
        for row, number in enumerate(numbers.tolist()):
            ink.rect(x + row * step, 22, step - 3, 22, colour, rx=4)
            ink.text(x + row * step + (step - 3) / 2, 37, number, 11.5, WHITE, "middle")
        middle = x + width / 2
        ink.text(middle, 14, f"micro-batch {piece}", 11.5, colour, "middle", 600)
        ink.line(middle, 46, middle, 74, opacity=0.8)
        ink.rect(x, 76, width - 3, 22, colour, 0.3, rx=4)
        ink.text(middle, 91, f"gradient {piece}", 11.5, anchor="middle")
        ink.line(middle, 100, middle, 130, opacity=0.8)
        ink.text(middle + 7, 119, "+=", 12, ink.soft)
    ink.rect(left, 132, WIDTH - left - 3, 22, RUN_COLOURS[0], 0.18, rx=4)
    middle = (left + WIDTH) / 2
    ink.text(middle, 147, "one tensor of the model's size", 11.5, anchor="middle")
    ink.line(middle, 156, middle, 186, opacity=0.8)
    ink.text(middle, 203, "one step", 12, anchor="middle")
    words = f"{rows} rows in {pieces} micro-batches: {pieces} gradients, one sum, one step"
    return Figure(ink, 212, words)


def chunks(tensors: "list[tuple[str, int]]", chunk: int) -> Figure:
    """A buffer of chunks: each tensor begins with a chunk; one thread block adds one chunk.

    Args:
        tensors: (name, elements); for 40 elements at most.
        chunk: elements of a chunk.
    """
    ink = Ink()
    counts = [-(-size // chunk) for _, size in tensors]
    left, gap = 96, 10
    step = (WIDTH - left - gap * sum(counts)) / (chunk * sum(counts))
    for y, words in ((37, "blocks"), (97, "elements"), (127, "tensors")):
        ink.text(0, y, words, 12.5, weight=600)
    block = 0
    for k, ((name, size), count) in enumerate(zip(tensors, counts)):
        colour = RUN_COLOURS[k % len(RUN_COLOURS)]
        start = left + block * (chunk * step + gap)
        for part in range(count):
            x = left + block * (chunk * step + gap)
            width = chunk * step - 2
            ink.rect(x, 22, width, 24, colour, rx=5)
            ink.text(x + width / 2, 38, f"block {block}", 11.5, WHITE, "middle", 600)
            ink.line(x + width / 2, 48, x + width / 2, 78, opacity=0.8)
            for i in range(chunk):
                filled = part * chunk + i < size
                ink.rect(x + i * step, 80, step - 2, 24, colour, 0.75 if filled else 0.13, rx=3)
                number = block * chunk + i
                text_colour = WHITE if filled else ink.soft
                ink.text(x + i * step + step / 2 - 1, 96, number, 10, text_colour, "middle")
            block += 1
        end = left + block * (chunk * step + gap) - gap
        ink.text((start + end) / 2, 127, f"{name}, {size} elements", 12, colour, "middle", 600)
    words = (
        f"{len(tensors)} tensors in {block} chunks of {chunk}: {block} blocks, one launch; "
        "pale elements are padding"
    )
    ink.text(left, 152, words, 12, ink.soft)
    return Figure(ink, 160, words)
