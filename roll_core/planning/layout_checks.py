"""Whether a model can be cut as a layout says. Raises one sentence with the key, and with values that work."""

from collections.abc import Callable

from roll_core.config.model import ModelShape
from roll_core.config.training.layout import LayoutConfig
from roll_core.errors import UserError


def check_divides(layout: LayoutConfig, shape: ModelShape) -> None:
    """Raise the first of `faults_of`."""
    if fault := next(iter(faults_of(layout, shape)), None):
        raise UserError(fault)


def tensor_divides(size: int, shape: ModelShape) -> bool:
    """Heads, and the inside of MLPs that are not experts; a vocabulary is filled up."""
    inside = 0 if shape.experts else shape.intermediate
    return not (shape.heads % size or shape.kv_heads % size or inside % size)


def faults_of(layout: LayoutConfig, shape: ModelShape) -> list[str]:
    checks: tuple[tuple[str, int, str, Callable[[int], bool]], ...] = (
        ("tensor", layout.tensor, _what_tensor_divides(shape), lambda n: tensor_divides(n, shape)),
        (
            "pipeline",
            layout.pipeline,
            f"the model's {shape.layers} layers"
            + (f" into {layout.virtual_pipeline} chunks a stage" if layout.virtual_pipeline > 1 else "")
            + ", or those and one for the embedding and one for the output layer",
            lambda n: _cut(layout, n).layers_of_chunks(shape.layers) is not None,
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
        f"training.layout.{key} ({value}) must divide {what}: {_near(value, works)}"
        for key, value, what, works in checks
        if not works(value)
    ]


def _cut(layout: LayoutConfig, num_stages: int) -> LayoutConfig:
    """Into so many stages; one stage is one chunk."""
    chunks = layout.virtual_pipeline if num_stages > 1 else 1
    return layout.model_copy(update={"pipeline": num_stages, "virtual_pipeline": chunks})


def _what_tensor_divides(shape: ModelShape) -> str:
    heads = f"the model's {shape.heads} heads and {shape.kv_heads} key-value heads"
    return heads if shape.experts else f"{heads}, and the {shape.intermediate} features inside its MLPs"


def _near(value: int, works: Callable[[int], bool]) -> str:
    """Values that work, the nearest below and above. Example: set it to 8 or 16"""
    below = next((n for n in range(value, 0, -1) if works(n)), None)
    above = next((n for n in range(value, 4 * value) if works(n)), None)
    return "set it to " + " or ".join(str(n) for n in (below, above) if n is not None)
