"""The nodes and edges of a CUDA graph, from CUDA's own debug dump."""

import ctypes
import graphlib
import heapq
import re


def parse_dot(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """(names, edges) of a graph as cudaGraphDebugDotPrint writes it.

    Nodes are in topological order; of several that could be next, the one captured first comes
    first. An edge (i, j): node j waits for i."""
    labels = re.findall(
        r'"(graph_\d+_node_\d+)"\s*\[[^\]]*?label="\{?(.*?)"\s*\]', text, flags=re.S
    )
    names = {node: _node_name(label) for node, label in labels}
    captured = sorted(names, key=lambda node: int(node.rsplit("_", 1)[1]))
    index = {node: i for i, node in enumerate(captured)}
    arrows = re.findall(r'"(graph_\d+_node_\d+)"\s*->\s*"(graph_\d+_node_\d+)"', text)
    edges = [(index[a], index[b]) for a, b in arrows if a in index and b in index]
    order = _in_order(len(captured), edges)
    position = {i: place for place, i in enumerate(order)}
    return (
        [names[captured[i]] for i in order],
        sorted((position[i], position[j]) for i, j in edges),
    )


def _in_order(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """The nodes 0 to count - 1 in topological order, the smallest of several candidates first.

    A node that replaced another one (memsets.py) has the highest number."""
    sorter = graphlib.TopologicalSorter({i: () for i in range(count)})
    for i, j in edges:
        sorter.add(j, i)
    sorter.prepare()
    ready: list[int] = []
    order: list[int] = []
    while sorter.is_active():
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order


def _node_name(label: str) -> str:
    """The kernel's full name, or memset, memcpy, ..."""
    kind = re.findall(r"\w+", label)[0]
    symbol = re.search(r"topoId: \d+\)\s*\|\s*(.*?)\\<\\<\\<", label, flags=re.S)
    return demangled(symbol[1]) if kind == "KERNEL" and symbol else kind.lower()


def demangled(symbol: str) -> str:
    """The C++ name of a mangled symbol; the symbol itself where libstdc++ is missing."""
    if not symbol.startswith("_Z"):
        return symbol
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return symbol
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    return ctypes.string_at(address).decode() if address else symbol
