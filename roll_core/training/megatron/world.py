"""Process groups of Megatron for a layout. Megatron keeps them in globals of the process, so that one layout is in force at
a time."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from roll_core.config.training.layout import LayoutConfig
from roll_core.training.base import Share

_current_layout: list[LayoutConfig] = []
"""Layout in force, or nothing."""


def initialize_layout(layout: LayoutConfig, device: torch.device, seed: int) -> None:
    """Create the process groups of a layout, unless they exist. A process without torch.distributed becomes a world of one
    rank."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if _current_layout == [layout] and parallel_state.model_parallel_is_initialized():
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    _current_layout[:] = [layout]


def share_of(layout: LayoutConfig) -> Share:
    """Share of this rank. Ranks that hold a copy of the model work on the same micro-batches; the reporter is on the last
    stage, which knows the loss."""
    is_first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    return Share(
        index=parallel_state.get_data_parallel_rank(),
        count=parallel_state.get_data_parallel_world_size(),
        is_reporter=is_first and on_last_stage(),
        row_multiple=layout.tensor * layout.context,
    )


def on_last_stage() -> bool:
    """True if this rank is on the last pipeline stage."""
    return parallel_state.get_pipeline_model_parallel_rank() == parallel_state.get_pipeline_model_parallel_world_size() - 1
