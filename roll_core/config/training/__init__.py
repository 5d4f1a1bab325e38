"""Training settings: backend and layout, optimizer steps, LoRA, experts, limits on mismatch."""
