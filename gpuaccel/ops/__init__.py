"""Operations on plain tensors. Each module: the definition in torch, the launches of its file in kernels_cu, the public function."""
