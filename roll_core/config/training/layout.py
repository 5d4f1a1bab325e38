"""How one copy of a model is spread over trainer ranks by the megatron backend, and how many copies that makes. The
optimizer's state is always shared out among the ranks that have the same weights.

Ranks are numbered as Megatron does: tensor within context within data within pipeline; for experts, expert_tensor within
expert within data within pipeline. What needs the model's sizes is checked in `planning/divisibility.py`.
"""

from pydantic import PositiveInt, model_validator

from roll_core.config.base import Section


class LayoutConfig(Section):
    tensor: PositiveInt = 1
    """Ranks that share every matrix. Above 1 the tokens between matrices are shared out, too (sequence parallel)."""
    pipeline: PositiveInt = 1
    """Stages that the layers are cut into."""
    virtual_pipeline: PositiveInt = 1
    """Chunks of layers in each stage: the pipeline is idle for so much shorter, and sends so much more."""
    context: PositiveInt = 1
    """Ranks that share the tokens of every sequence."""
    expert: PositiveInt = 1
    """Ranks that share out the experts of a layer, each having whole ones."""
    expert_tensor: PositiveInt = 1
    """Ranks that share every matrix of an expert; `tensor` is for everything else."""

    @model_validator(mode="after")
    def _chunks_are_of_a_pipeline(self):
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual_pipeline ({self.virtual_pipeline}) cuts the stages of a pipeline: raise pipeline, or leave it at 1"
            )
        return self

    @property
    def ranks_per_copy(self) -> int:
        """Of all weights but experts."""
        return self.tensor * self.pipeline * self.context

    @property
    def ranks_per_expert_copy(self) -> int:
        return self.expert_tensor * self.expert * self.pipeline

    def data(self, num_ranks: int) -> int:
        """Copies of the model, each of which trains on its share of a batch."""
        return num_ranks // self.ranks_per_copy

    def expert_data(self, num_ranks: int) -> int:
        """Copies of every expert."""
        return num_ranks // self.ranks_per_expert_copy

    def layers_of_chunks(self, num_layers: int) -> tuple[int, ...] | None:
        """Layers of every chunk, in the order in which tokens go through them; None if they cannot be shared out.

        All the same, or else one less in the first, which has the embedding, and in the last, which has the output layer:
        94 layers make 11, 12, 12, 12, 12, 12, 12, 11.
        """
        num_chunks = self.pipeline * self.virtual_pipeline
        if num_layers % num_chunks == 0:
            return (num_layers // num_chunks,) * num_chunks
        each, left = divmod(num_layers + 2, num_chunks)
        if left or each < 2:
            return None
        return (each - 1, *(each,) * (num_chunks - 2), each - 1)
