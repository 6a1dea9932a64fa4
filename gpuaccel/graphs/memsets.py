"""Small memsets of a captured CUDA graph, made into kernels before the graph is instantiated.

cuDNN and cuBLAS zero 4 bytes before many of their kernels, so a captured step has hundreds of such
memsets. Between two kernels of a graph a kernel that writes these bytes costs 1.5 to 2 us less than
a memset.
"""

import functools

from ..compiler import Kernel
from ..errors import BackendError

# Bytes. CUDA itself has a kernel for large ones.
LIMIT = 2**16
THREADS = 256
# An element of 1 or 2 bytes stands several times in a word of 4.
REPEATED = {1: 0x01010101, 2: 0x00010001, 4: 1}


@functools.cache
def _fill() -> Kernel:
    return Kernel("fill", "fill")


def memsets_to_kernels(graph: int, device: int) -> int:
    """Replace the small memset nodes of a graph by kernel nodes that write the same.

    Args:
        graph: address of a CUgraph that is not instantiated yet.
        device: index of the GPU whose memory they write.

    Returns:
        How many were replaced. 0 where the graph allocates memory itself: CUDA lets nobody remove a
        node of such a graph.

    Raises:
        BackendError: where the driver refuses a change; the graph must not be used then.
    """
    from cuda.bindings import driver

    kinds = driver.CUgraphNodeType
    nodes = _all_of(driver.cuGraphGetNodes, driver.CUgraph(graph))
    kind_of = [_single(driver.cuGraphNodeGetType, node) for node in nodes]
    if {kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC, kinds.CU_GRAPH_NODE_TYPE_MEM_FREE} & set(kind_of):
        return 0
    replaced = 0
    for node, kind in zip(nodes, kind_of):
        if kind != kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            continue
        memset = _single(driver.cuGraphMemsetNodeGetParams, node)
        written = words_of(memset)
        if written is not None:
            _replace(driver.CUgraph(graph), node, (int(memset.dst), *written), device)
            replaced += 1
    return replaced


def words_of(memset) -> "tuple[int, int] | None":
    """(value, number) of the 4-byte words that a memset writes; None: it stays a memset.

    Args:
        memset: a CUDA_MEMSET_NODE_PARAMS.
    """
    size = memset.elementSize * memset.width
    if memset.height != 1 or size > LIMIT or size % 4 or int(memset.dst) % 4:
        return None
    return memset.value * REPEATED[memset.elementSize], size // 4


def _replace(graph, node, arguments: "tuple[int, int, int]", device: int):
    """Put a launch of `fill` where a node is.

    arguments: address, value, and number of words."""
    from cuda.bindings import driver

    loaded = _fill().load(device)
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.kern = driver.CUkernel(int(loaded.function))
    params.gridDimX, params.blockDimX = -(-arguments[-1] // THREADS), THREADS
    params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1
    before = _all_of(driver.cuGraphNodeGetDependencies, node)
    behind = _all_of(driver.cuGraphNodeGetDependentNodes, node)
    with loaded.lock:
        # The new node gets a copy of them.
        loaded.pack(loaded.buffer, 0, *arguments)
        params.kernelParams = loaded.address
        kernel = _single(driver.cuGraphAddKernelNode, graph, before, len(before), params)
    if behind:
        # The bindings of CUDA 13 take data of each edge, too.
        no_data = [None] if driver.CUDA_VERSION >= 13000 else []
        edges = [kernel] * len(behind), behind
        _answer(driver.cuGraphAddDependencies(graph, *edges, *no_data, len(behind)))
    _answer(driver.cuGraphDestroyNode(node))


def _all_of(query, handle) -> list:
    """What a query of the driver lists: it is asked for the number first."""
    count = _answer(query(handle))[-1]
    return list(_answer(query(handle, count))[0]) if count else []


def _single(query, *args):
    (value,) = _answer(query(*args))
    return value


def _answer(results) -> list:
    status, *values = results
    if status:
        raise BackendError(f"the driver did not replace a memset of a CUDA graph: {status.name}")
    return values
