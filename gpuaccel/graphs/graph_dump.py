"""The nodes of a CUDA graph, from CUDA's own debug dump."""

import ctypes
import graphlib
import re


def node_names(text: str) -> list[str]:
    """The nodes of a graph that cudaGraphDebugDotPrint has written, in an order they can run in.

    A node that replaced another one (memsets.py) stands last in the text."""
    labels = re.findall(
        r'"(graph_\d+_node_\d+)"\s*\[[^\]]*?label="\{?(.*?)"\s*\]', text, flags=re.S
    )
    names = {node: _node_name(label) for node, label in labels}
    order = graphlib.TopologicalSorter({node: () for node in names})
    for before, after in re.findall(r'"(graph_\d+_node_\d+)"\s*->\s*"(graph_\d+_node_\d+)"', text):
        order.add(after, before)
    return [names[node] for node in order.static_order() if node in names]


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
