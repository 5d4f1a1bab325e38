"""Divisibility checks of a model by `training.layout`. Each error is one sentence with the key, and with values that
work."""

from collections.abc import Callable

from roll_core.config.model import ModelShape
from roll_core.config.training.layout import LayoutConfig
from roll_core.errors import UserError


def check_divides(layout: LayoutConfig, shape: ModelShape) -> None:
    """Raise UserError with the first of `layout_faults`, if any."""
    if fault := next(iter(layout_faults(layout, shape)), None):
        raise UserError(fault)


def tensor_divides(size: int, shape: ModelShape) -> bool:
    """Return True if `size` divides the heads and, in a model without experts, the width inside the MLPs. The vocabulary is
    padded, so any size divides it."""
    inside = 0 if shape.experts else shape.intermediate
    return not (shape.heads % size or shape.kv_heads % size or inside % size)


def layout_faults(layout: LayoutConfig, shape: ModelShape) -> list[str]:
    """Return one sentence for each key of the layout that does not divide the model, with values that do."""
    checks: tuple[tuple[str, int, str, Callable[[int], bool]], ...] = (
        ("tensor", layout.tensor, _describe_tensor_dimensions(shape), lambda n: tensor_divides(n, shape)),
        (
            "pipeline",
            layout.pipeline,
            f"the model's {shape.layers} layers"
            + (f" into {layout.virtual_pipeline} chunks a stage" if layout.virtual_pipeline > 1 else "")
            + ", or those and one for the embedding and one for the output layer",
            lambda n: _with_stages(layout, n).layers_of_chunks(shape.layers) is not None,
        ),
        (
            "expert",
            layout.expert,
            f"the {shape.experts} experts of a layer"
            if shape.experts
            else "the experts of a layer, of which there are none",
            lambda n: shape.experts % n == 0 if shape.experts else n == 1,
        ),
        (
            "expert_tensor",
            layout.expert_tensor,
            f"the {shape.intermediate} features inside an expert" if shape.experts else "experts, of which there are none",
            lambda n: shape.intermediate % n == 0 if shape.experts else n == 1,
        ),
    )
    return [
        f"training.layout.{key} ({value}) must divide {what}: {_suggest_values(value, is_valid)}"
        for key, value, what, is_valid in checks
        if not is_valid(value)
    ]


def _with_stages(layout: LayoutConfig, num_stages: int) -> LayoutConfig:
    """Return the layout with this many pipeline stages; a single stage has one chunk."""
    chunks = layout.virtual_pipeline if num_stages > 1 else 1
    return layout.model_copy(update={"pipeline": num_stages, "virtual_pipeline": chunks})


def _describe_tensor_dimensions(shape: ModelShape) -> str:
    """Describe what `training.layout.tensor` must divide, for an error sentence."""
    heads = f"the model's {shape.heads} heads and {shape.kv_heads} key-value heads"
    return heads if shape.experts else f"{heads}, and the {shape.intermediate} features inside its MLPs"


def _suggest_values(value: int, is_valid: Callable[[int], bool]) -> str:
    """Suggest the nearest valid values below and above. Example: set it to 8 or 16"""
    below = next((n for n in range(value, 0, -1) if is_valid(n)), None)
    above = next((n for n in range(value, 4 * value) if is_valid(n)), None)
    return "set it to " + " or ".join(str(n) for n in (below, above) if n is not None)
