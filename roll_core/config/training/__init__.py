"""Config of training: backend and layout, optimizer steps, LoRA, experts, limits on the mismatch."""
