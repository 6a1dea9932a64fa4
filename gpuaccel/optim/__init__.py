"""Flat storage (arena), what backward adds to it (accumulate), clipping over it (clip), and the optimizers (adamw, lion)."""

from .lion import Lion as Lion
