"""Small memsets of a captured CUDA graph, made into kernels before the graph is instantiated.

cuDNN and cuBLAS zero 4 bytes before many of their kernels, so a captured step has hundreds of such
memsets. A kernel that writes these bytes costs up to 2 us less than a memset between two kernels.
"""

import functools

import torch

from ..backends import takes
from ..compiler import Kernel, usable
from ..errors import BackendError

# Bytes. CUDA itself has a kernel for large ones.
LIMIT = 2**16
THREADS = 256
# A value of 1, 2 or 4 bytes times this fills a word of 4.
REPEATED = {1: 0x01010101, 2: 0x00010001, 4: 1}


@functools.cache
def _fill() -> Kernel:
    return Kernel("fill", "fill")


def memsets_to_kernels(graph: int, device: torch.device) -> int:
    """Replace small memset nodes by kernel nodes that write the same, and return how many.

    0 where kernels do not run on this device, and where the graph allocates memory itself: CUDA
    lets nobody remove a node of such a graph.

    Args:
        graph: address of a CUgraph that is not instantiated yet.

    Raises:
        BackendError: where the driver refuses a change; the graph must not be used then.
    """
    from cuda.bindings import driver

    kernel = _fill()
    if not (takes(device) and usable(device, kernel)):
        return 0
    kinds = driver.CUgraphNodeType
    with torch.cuda.device(device):
        nodes = _all_of(driver.cuGraphGetNodes, driver.CUgraph(graph))
        kind_of = [_single(driver.cuGraphNodeGetType, node) for node in nodes]
        if {kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC, kinds.CU_GRAPH_NODE_TYPE_MEM_FREE} & set(kind_of):
            return 0
        memsets = [
            node for node, kind in zip(nodes, kind_of) if kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET
        ]
        loaded = kernel.load(device.index)
        return sum(_replaced(driver.CUgraph(graph), node, loaded) for node in memsets)


def words_of(memset) -> tuple[int, int] | None:
    """(value, number) of the 4-byte words that CUDA_MEMSET_NODE_PARAMS write; None: it stays."""
    size = memset.elementSize * memset.width
    if memset.height != 1 or not 0 < size <= LIMIT or size % 4 or int(memset.dst) % 4:
        return None
    # The value's bytes beyond the element size are ignored.
    value = memset.value % 256**memset.elementSize
    return value * REPEATED[memset.elementSize], size // 4


def _replaced(graph, node, loaded) -> bool:
    """Replace a memset node by a launch of `fill`; False if it has to stay a memset."""
    from cuda.bindings import driver

    memset = _single(driver.cuGraphMemsetNodeGetParams, node)
    words = words_of(memset)
    if words is None:
        return False
    try:
        before = _all_of(driver.cuGraphNodeGetDependencies, node)
        behind = _all_of(driver.cuGraphNodeGetDependentNodes, node)
    except BackendError:
        # The bindings of CUDA 12 do not read edges that have data.
        return False
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.kern = driver.CUkernel(int(loaded.function))
    params.gridDimX, params.blockDimX = -(-words[1] // THREADS), THREADS
    params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1
    with loaded.lock:
        # The driver copies the arguments into the node.
        loaded.pack(loaded.buffer, 0, int(memset.dst), *words)
        params.kernelParams = loaded.address
        kernel = _single(driver.cuGraphAddKernelNode, graph, before, len(before), params)
    if behind:
        # The bindings of CUDA 13 take data of each edge, too.
        no_data = [None] if driver.CUDA_VERSION >= 13000 else []
        edges = [kernel] * len(behind), behind
        _answer(driver.cuGraphAddDependencies(graph, *edges, *no_data, len(behind)))
    _answer(driver.cuGraphDestroyNode(node))
    return True


def _all_of(query, handle) -> list:
    """All items of a driver query, which is first asked for their number."""
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
