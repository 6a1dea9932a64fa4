"""A step captured once and replayed: graphed_step, capture (CUDA graphs), tape (their stand-in on the CPU)."""
