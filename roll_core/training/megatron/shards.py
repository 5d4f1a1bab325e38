"""Slices of global tensors that the parameters of Megatron's models hold, read from what Megatron describes for its own
checkpoints."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.models.gpt import GPTModel
from torch import nn

from roll_core.weights.shards import Shard, TensorSlice


def shards_of(chunks: Sequence[GPTModel]) -> list[Shard]:
    """Shards of all pipeline chunks on this rank. They stay valid wherever the parameters' memory moves."""
    return [shard for chunk in chunks for shard in _shards_of(chunk)]


def _shards_of(chunk: GPTModel) -> Iterator[Shard]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    described = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(described)  # splits gate and up, which are one parameter, into two slices
    parameters = sorted(chunk.parameters(), key=lambda parameter: parameter.data_ptr())
    addresses = [parameter.data_ptr() for parameter in parameters]
    for each in nested_values(described):
        if isinstance(each, ShardedTensor):
            parameter = parameters[max(0, bisect_right(addresses, each.data.data_ptr()) - 1)]
            stacked = each.prepend_axis_num
            yield Shard(
                slice=TensorSlice(
                    key=each.key,
                    index=tuple(each.global_offset[:stacked]),
                    global_shape=tuple(each.global_shape[stacked:]),
                    start=tuple(each.global_offset[stacked:]),
                    shape=tuple(each.local_shape),
                ),
                parameter=parameter,
                first_row=_first_row(each, parameter),
                is_main=is_main_replica(each.replica_id),
            )


def _first_row(each: ShardedTensor, parameter: nn.Parameter) -> int:
    """First row of a slice within its parameter. Assert that the slice is in the parameter's memory, not in a copy of it."""
    offset = (each.data.data_ptr() - parameter.data_ptr()) // parameter.itemsize
    is_within = 0 <= offset < parameter.numel() and each.data.stride() == parameter.stride()
    assert is_within, f"{each.key} is not in the memory of a parameter"
    return offset // parameter.stride(0)
