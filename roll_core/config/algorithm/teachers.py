"""Config of teachers: policies that a run is distilled from."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from roll_core.config.base import Section
from roll_core.config.model import ModelConfig
from roll_core.types.names import RunId

TeacherWeight = Annotated[
    PositiveFloat,
    Field(json_schema_extra={"description": "Factor of this teacher's advantage in the sum over all teachers."}),
]
"""Weight of a teacher. Its text is not an attribute docstring, because docs/algorithms.md shows none for the key."""


class PretrainedTeacher(Section):
    """A model of its own."""

    kind: Literal["pretrained"] = "pretrained"
    model: ModelConfig
    """Must read the same tokens as the policy."""
    weight: TeacherWeight = 1.0
    domains: tuple[str, ...] = ()
    """Teaches only problems of these domains; empty: all."""


class RunTeacher(Section):
    """The policy another run of the same model ended with."""

    kind: Literal["run"] = "run"
    run_id: RunId
    """A run in the same store, for example quickstart-1."""
    iteration: NonNegativeInt | None = None
    """Which of its checkpoints teaches; null takes the last one there is when this run is opened."""
    weight: TeacherWeight = 1.0
    domains: tuple[str, ...] = ()
    """Teaches only problems of these domains; empty: all."""


TeacherConfig = Annotated[PretrainedTeacher | RunTeacher, Field(discriminator="kind")]
