"""Flat storage (arena), what backward adds to it (accumulate), clipping over it (clip), and the optimizer (adamw)."""
