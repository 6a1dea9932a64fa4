"""The nodes and edges of a CUDA graph, from CUDA's own debug dump."""

import ctypes
import re


def parse_dot(text: str) -> "tuple[list[str], list[tuple[int, int]]]":
    """(names, edges) of a graph as cudaGraphDebugDotPrint writes it.

    Nodes stand in the order in which they were captured. An edge (i, j): node j waits for i."""
    labels = re.findall(
        r'"(graph_\d+_node_\d+)"\s*\[[^\]]*?label="\{?(.*?)"\s*\]', text, flags=re.S
    )
    names = {node: _node_name(label) for node, label in labels}
    in_order = sorted(names, key=lambda node: int(node.rsplit("_", 1)[1]))
    index = {node: i for i, node in enumerate(in_order)}
    arrows = re.findall(r'"(graph_\d+_node_\d+)"\s*->\s*"(graph_\d+_node_\d+)"', text)
    edges = [(index[a], index[b]) for a, b in arrows if a in index and b in index]
    return [names[node] for node in in_order], sorted(edges)


def _node_name(label: str) -> str:
    """What a node does: the kernel's whole name, or memset, memcpy, ..."""
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
