"""Operations on plain tensors.

Each module holds the definition in torch, the launches of its file in kernels_cu, and the public
function.
"""
