"""Config of the megatron backend's parallelism: how one copy of a model is sharded over trainer ranks.

Ranks that hold the same weights always shard the optimizer state among them. Rank order is Megatron's: tensor within context
within data within pipeline; for experts, expert_tensor within expert within data within pipeline. Checks that need the
model's sizes are in `roll_core/planning`.
"""

from typing import Annotated

from pydantic import PositiveInt, model_validator

from roll_core.config.base import Section, Unit


class LayoutConfig(Section):
    """Parallelism of the megatron backend. tensor x pipeline x context must divide the number of placement.trainer devices;
    the quotient is the number of copies of the model (data parallelism)."""

    tensor: Annotated[PositiveInt, Unit("ranks")] = 1
    """Ranks that split every matrix (tensor parallelism). Above 1 they also split the tokens between matrices (sequence
    parallelism). Keep it within a node."""
    pipeline: Annotated[PositiveInt, Unit("stages")] = 1
    """Pipeline stages that the layers are split into."""
    virtual_pipeline: Annotated[PositiveInt, Unit("chunks")] = 1
    """Chunks of layers in each pipeline stage (interleaved schedule). It divides the pipeline's idle time by this number and
    multiplies what stages send by it. Needs a pipeline above 1."""
    context: Annotated[PositiveInt, Unit("ranks")] = 1
    """Ranks that split the tokens of every sequence (context parallelism). Raise it for long sequences."""
    expert: Annotated[PositiveInt, Unit("ranks")] = 1
    """Ranks that split the experts of a layer, each with whole experts (expert parallelism)."""
    expert_tensor: Annotated[PositiveInt, Unit("ranks")] = 1
    """Ranks that split every matrix of an expert; `tensor` is for all other matrices."""

    @model_validator(mode="after")
    def _check_chunks_have_a_pipeline(self):
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual_pipeline ({self.virtual_pipeline}) cuts the stages of a pipeline: raise pipeline, or leave it at 1"
            )
        return self

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that hold one copy of all weights other than experts."""
        return self.tensor * self.pipeline * self.context

    @property
    def ranks_per_expert_copy(self) -> int:
        """Ranks that hold one copy of all experts."""
        return self.expert_tensor * self.expert * self.pipeline

    def data_parallel_size(self, num_ranks: int) -> int:
        """Number of copies of the model; each copy trains on its share of a batch."""
        return num_ranks // self.ranks_per_copy

    def expert_data_parallel_size(self, num_ranks: int) -> int:
        """Number of copies of every expert."""
        return num_ranks // self.ranks_per_expert_copy

    def layers_of_chunks(self, num_layers: int) -> tuple[int, ...] | None:
        """Number of layers in every chunk, in the order of the forward pass; None if the layers cannot be split so.

        All chunks have the same number, or the first (with the embedding) and the last (with the output layer) have one
        less: 94 layers in 8 chunks make 11, 12, 12, 12, 12, 12, 12, 11.
        """
        num_chunks = self.pipeline * self.virtual_pipeline
        if num_layers % num_chunks == 0:
            return (num_layers // num_chunks,) * num_chunks
        each, left = divmod(num_layers + 2, num_chunks)
        if left or each < 2:
            return None
        return (each - 1, *(each,) * (num_chunks - 2), each - 1)
