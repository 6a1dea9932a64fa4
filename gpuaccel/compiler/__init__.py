"""From source to cubin to a callable on tensors.

nvrtc compiles and caches cubins. kernel checks arguments, and launches on a GPU or hands over to
simt.
"""
