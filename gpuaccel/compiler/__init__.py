"""Source to cubin to a callable on tensors: nvrtc (compiles, keeps the cubins), kernel (checks arguments, launches on a GPU or hands over to simt)."""
