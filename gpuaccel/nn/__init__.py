"""Modules: embedding, richards_glu, poly_attention, and linear layers whose weight gradient goes straight into an arena (fused_linear)."""
