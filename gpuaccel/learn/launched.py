"""Which of our kernels a step launches, and what each of them does.

    launched(step, batch)     # a table: kernel and what it does, launches, file
    launches(step, batch)     # {"encoder_forward": 4, "squares_v2": 1, ...}

Kernels are listed in the order of their first launch. On a GPU they are read from the records of
`torch.profiler`, and on the CPU from the launches themselves.
"""

from collections import Counter

from ..compiler import kernel, kernel_files, kernel_names
from ..measure import profiler_sees_gpu, timeline
from .figures.drawing import Table

# Kernels that training steps launch, those of learn/places.py among them.
WHAT_IT_DOES = {
    "accumulate_v1": "adds one gradient tensor to a sum, one element per thread",
    "accumulate_v2": "adds one gradient tensor to a sum, four elements per thread",
    "accumulate_v3": "adds the gradients of many tensors to the sums in the arena",
    "adamw_begin": "writes what AdamW needs once in a step: bias corrections and the scale",
    "adamw_v2": "AdamW for a list of tensors",
    "adamw_v3": "AdamW for the whole arena: scales, and updates weights and moments",
    "lion_begin": "writes what Lion needs once in a step",
    "lion_v2": "Lion for a list of tensors",
    "lion_v3": "Lion for the whole arena",
    "squares_v2": "the sum of the squares of each chunk of 4,096 gradients",
    "reduce_v2": "adds these sums up: the gradient norm, and the scale that clips it",
    "scale_v2": "multiplies the gradients by the scale",
    "encoder_forward": "the embedding: copies the row of each token, and may add one per position",
    "encoder_backward_v3": "adds the gradient rows of each token in a fixed order",
    "encoder_combine_v3": "adds the partial sums of tokens with more than 32 rows",
    "encoder_wpe": "adds the gradient rows of each position",
    "segments_count": "counts the digits of the token numbers: the first half of a sort",
    "segments_scatter": "moves each position to its place among the sorted tokens",
    "segments_pieces": "cuts the rows of each token into pieces of at most 32",
    "settings_write": "writes changed settings, such as the learning rate, to device memory",
    "peers_sum": "adds the gradients of several GPUs",
    "richards_forward": "a learned activation: the curve, for each element",
    "richards_backward": "the gradients of that curve",
    "richards_finish": "adds up the gradients of the curve's nine parameters",
    "glu_forward": "a gated unit: two curves and two products for each element",
    "glu_backward": "the gradients of the gated unit",
    "poly_query_gate": "polynomial attention: multiplies the queries by their gate",
    "poly_gate_backward": "polynomial attention: the gradient of the gate",
    "poly_query_backward": "polynomial attention: the gradient of the queries before the gate",
    "poly_forward_v1": "polynomial attention without tensor cores",
    "poly_forward_v2": "polynomial attention on tensor cores",
    "poly_forward_v3": "polynomial attention on the tensor cores of an H100",
    "poly_backward_q_v1": "polynomial attention: the gradient of the queries",
    "poly_backward_kv_v1": "polynomial attention: the gradients of keys and values",
    "poly_backward_pe_v1": "polynomial attention: the gradient of the positions",
    "poly_backward_v2": "polynomial attention: all gradients, on tensor cores",
    "poly_backward_v3": "polynomial attention: all gradients, on the tensor cores of an H100",
    "poly_finish": "polynomial attention: adds up partial gradients",
}


def launches(run, *args) -> "dict[str, int]":
    """Name -> launches of each of our kernels in `run(*args)`, in the order of the first ones.

    Call it once before to warm up. A replayed graph launches its kernels on a GPU only.

    Args:
        run: a function.
        *args: its arguments.
    """
    if profiler_sees_gpu():
        spans = timeline.whole(lambda: run(*args))
        names = [span.name for span in spans if span.lane == "GPU" and span.name in WHAT_IT_DOES]
        return dict(Counter(names))
    counts: "Counter[str]" = Counter()

    def count(launch, args, tensors):
        counts[launch.kernel.name] += 1

    kernel.recorders.append(count)
    try:
        run(*args)
    finally:
        kernel.recorders.remove(count)
    return dict(counts)


def launched(run, *args) -> Table:
    """The kernels that `run(*args)` launches: how often, what each does, and in which file it is.

    Args:
        run: a function.
        *args: its arguments.
    """
    files = {name: path.name for path in kernel_files() for name in kernel_names(path.read_text())}
    rows = [
        [f"{name}: {WHAT_IT_DOES[name]}", count, f"kernels_cu/{files[name]}"]
        for name, count in launches(run, *args).items()
        if name in WHAT_IT_DOES
    ]
    if not rows:
        return Table(
            ["kernel"], [], "None of our kernels is launched: torch's operations do it all."
        )
    columns = ["kernel", "launches", "file"]
    return Table(columns, rows, "Our kernels in one step, in the order of their first launch")
