"""Which weights a rank has, by the layout of the megatron backend."""

from collections.abc import Iterable
from dataclasses import dataclass

from roll_core.config.model import ModelShape
from roll_core.config.training.layout import LayoutConfig
from roll_core.planning.model_shape import layer_parameters


@dataclass(frozen=True)
class RankWeights:
    """How many weights a rank of one stage of the pipeline has."""

    stage: int
    layers: int
    shared: float
    """All but experts: the same are on as many ranks as there are copies of the model, times those that share sequences."""
    experts: float

    @property
    def total(self) -> float:
        return self.shared + self.experts


def weights_of_stages(shape: ModelShape, layout: LayoutConfig, stages: Iterable[int]) -> list[RankWeights]:
    """Of a rank of each of these stages of the pipeline."""
    layer, chunks = layer_parameters(shape), layout.layers_of_chunks(shape.layers)
    assert chunks is not None, "a layout is checked before it is planned"
    shared = (layer.attention + layer.mlp) / layout.tensor + layer.norms + layer.router
    experts = layer.experts / (layout.expert * layout.expert_tensor)
    table = rows_of_vocabulary(shape, layout) * shape.hidden
    weights = []
    for stage in stages:
        layers = sum(chunks[stage :: layout.pipeline])
        is_first, is_last = stage == 0, stage == layout.pipeline - 1
        # A tied output layer is the embedding, of which the last stage has a copy if it is not the first.
        tables = is_first + (is_last and not (is_first and shape.is_tied))
        outside = tables * table + is_last * shape.hidden
        weights.append(RankWeights(stage, layers, layers * shared + outside, layers * experts))
    return weights


def largest_stages(layout: LayoutConfig) -> list[int]:
    """One of these needs most: the first and the last have tables, and those behind the second no more than the second."""
    return sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})


def rows_of_vocabulary(shape: ModelShape, layout: LayoutConfig) -> int:
    """Of the embedding, on a rank: with rows that only make it divide."""
    return -(-shape.vocabulary // layout.tensor)
