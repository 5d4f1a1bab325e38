"""Megatron training backend: megatron-core models with tensor, pipeline, context, expert and data parallelism."""
