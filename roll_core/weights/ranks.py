"""Rank of this process in torch.distributed's default group. A process outside any group counts as a world of one rank."""

import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """Rank of this process; 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 outside a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def reduce_over_ranks(values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce `values` over the ranks; the result is on the CPU."""
    if world_size() > 1:
        values = values.cpu()
        dist.all_reduce(values, operation)
    return values.cpu()
