"""A whole step and what is around it: step, micro (batches in pieces), loop, checkpoint, data, models, lora, lora_files."""
