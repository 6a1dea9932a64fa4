"""Pictures of kernels: threads, the bits of a float, the sum of a block.

figures.threads(n=21, block=8)                  # which thread takes which element
"""

import struct

from .drawing import BLUE, RED, RUN_COLOURS, WHITE, WIDTH, Figure, Ink


def threads(n: int, block: int, per_thread: int = 1) -> Figure:
    """Thread blocks above, n elements below; threads without an element are hollow.

    For 40 threads at most."""
    ink = Ink()
    blocks = -(-n // (block * per_thread))
    slots = blocks * block * per_thread
    step = min(30.0, (WIDTH - 90 - 14 * blocks) / slots)

    def x_of(slot):
        return 84 + slot * step + (slot // (block * per_thread)) * 14

    ink.text(0, 47, "threads", 12.5, weight=600)
    ink.text(0, 107, "elements", 12.5, weight=600)
    for b in range(blocks):
        colour = RUN_COLOURS[b % 4]
        start = x_of(b * block * per_thread)
        width = block * per_thread * step
        ink.text(start + width / 2, 17, f"block {b}", 12, colour, "middle", 600)
        ink.rect(start - 4, 25, width + 6, 36, colour, 0.13, rx=7)
        for t in range(block):
            slot = (b * block + t) * per_thread
            busy = slot < n
            x = x_of(slot)
            width = per_thread * step - 3
            fill = colour if busy else "none"
            dash = None if busy else "3 3"
            ink.rect(x, 31, width, 24, fill, rx=5, stroke=colour, stroke_width=1.4, dash=dash)
            ink.text(x + width / 2, 47, t, 11, WHITE if busy else ink.soft, "middle")
            for i in range(slot, min(slot + per_thread, n)):
                middle = x_of(i) + (step - 3) / 2
                ink.line(x + width / 2, 57, middle, 89, opacity=0.8)
                ink.rect(x_of(i), 91, step - 3, 24, colour, 0.3, rx=3)
                ink.text(middle, 107, i, 11, anchor="middle")
    words = f"{n} elements, {blocks} blocks of {block} threads"
    if per_thread > 1:
        words += f", {per_thread} elements per thread"
    spare = blocks * block - -(-n // per_thread)
    if spare:
        pronoun = "it" if spare == 1 else "them"
        words += f"; {spare} to spare (dashed): the guard keeps {pronoun} idle"
    ink.text(84, 138, words, 12, ink.soft)
    return Figure(ink, 146, words)


def float_bits(value) -> int:
    """The bits of a number in fp32, as a whole number."""
    return struct.unpack(">I", struct.pack(">f", value))[0]


def tree_sum(count: int = 8) -> Figure:
    """How the threads of a block add up `count` numbers in shared memory, with its barriers.

    Each place of `part` shows how many numbers its sum holds. In each round, a thread of the first
    half adds the number of its partner in the second half. count: a power of two, 32 at most."""
    ink = Ink()
    left = 128
    step = min(64.0, (WIDTH - left - 2) / count)
    ink.text(0, 15, "thread", 12, ink.soft)
    for place in range(count):
        ink.text(left + (place + 0.5) * step, 15, place, 11.5, ink.soft, "middle")
    y = 24.0
    held = 1
    half = count
    while True:
        for place in range(count):
            needed = place < half
            x = left + place * step
            ink.rect(x + 2, y, step - 4, 22, BLUE, 1 if needed else 0.13, rx=4)
            if needed:
                ink.text(x + step / 2, y + 15.5, held, 12, WHITE, "middle", 600)
        if held == 1:
            ink.text(0, y + 15.5, "part, filled", 12)
        y += 22
        if half == 1:
            break
        half //= 2
        held *= 2
        ink.segment(0, y + 11, left + count * step, y + 11, RED, 1.6, dash="5 4")
        ink.text(0, y + 7, "barrier", 11, RED, weight=600)
        y += 18
        for place in range(half):
            x = left + (place + 0.5) * step
            start = x + half * step
            ink.line(x, y, x, y + 34, opacity=0.7)
            ink.curve(start, y, x + 2, y + 34, RUN_COLOURS[1])
        ink.text(0, y + 23, f"half = {half}", 12)
        y += 36
    rounds = count.bit_length() - 1
    words = f"{rounds} rounds with a barrier before each: thread 0 holds the sum of {count} numbers"
    ink.text(left, y + 18, words, 12, ink.soft)
    return Figure(ink, y + 26, words)
