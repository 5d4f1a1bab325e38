"""Torch training backend: Hugging Face models sharded with FSDP2, critic, LoRA, offload."""
