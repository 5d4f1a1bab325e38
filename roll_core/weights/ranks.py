"""This process's rank among the ranks of torch.distributed; a process that joined no group is a world of its own."""

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
