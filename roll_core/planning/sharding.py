"""Weights of a rank under a layout of the megatron backend."""

from collections.abc import Iterable
from dataclasses import dataclass

from roll_core.config.model import ModelShape
from roll_core.config.training.layout import LayoutConfig
from roll_core.planning.model_shape import layer_parameters


@dataclass(frozen=True)
class RankWeights:
    """Number of weights on a rank of one pipeline stage."""

    stage: int
    layers: int
    shared: float
    """All weights but experts. Replicated over the copies of the model, and within each over its context-parallel ranks."""
    experts: float

    @property
    def total(self) -> float:
        return self.shared + self.experts


def weights_of_stages(shape: ModelShape, layout: LayoutConfig, stages: Iterable[int]) -> list[RankWeights]:
    """Count the weights of a rank of each of these pipeline stages."""
    layer, chunks = layer_parameters(shape), layout.layers_of_chunks(shape.layers)
    assert chunks is not None, "a layout is checked before it is planned"
    shared = (layer.attention + layer.mlp) / layout.tensor + layer.norms + layer.router
    experts = layer.experts / (layout.expert * layout.expert_tensor)
    table = vocabulary_rows(shape, layout) * shape.hidden
    weights = []
    for stage in stages:
        layers = sum(chunks[stage :: layout.pipeline])
        is_first, is_last = stage == 0, stage == layout.pipeline - 1
        # A tied output layer is the embedding; the last stage has a copy of it unless it is also the first.
        tables = is_first + (is_last and not (is_first and shape.is_tied))
        outside = tables * table + is_last * shape.hidden
        weights.append(RankWeights(stage, layers, layers * shared + outside, layers * experts))
    return weights


def largest_stages(layout: LayoutConfig) -> list[int]:
    """Return the candidates for the stage that needs most memory: the first, the second and the last. The first and the last
    have vocabulary tables; no stage between them needs more than the second."""
    return sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})


def vocabulary_rows(shape: ModelShape, layout: LayoutConfig) -> int:
    """Rows of the embedding on one rank, padding included."""
    return -(-shape.vocabulary // layout.tensor)
