"""Stored configs, read without knowing all their keys: upkeep and chains read configs of other versions of roll, too."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from roll_core.config.operations.services import GRACE_MINUTES, RETRY_SECONDS
from roll_core.errors import ArtifactDamaged
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.listing import ITERATION, list_matching
from roll_core.store.records.sealed import read_sealed
from roll_core.types.names import RunId


class _Lenient(BaseModel):
    """Base of the parts of a stored config that are read here; other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NamedCheckpoint(_Lenient):
    """Checkpoint that a config names: the origin of a fork, or a teacher that is a run."""

    run_id: RunId
    iteration: NonNegativeInt


class _NamedTeacher(_Lenient):
    kind: str
    run_id: RunId = "none"
    iteration: NonNegativeInt = 0


class _StoreKeys(_Lenient):
    retry_seconds: float = Field(RETRY_SECONDS, gt=0, allow_inf_nan=False)
    grace_minutes: float = Field(GRACE_MINUTES, ge=0, allow_inf_nan=False)


class _AlgorithmKeys(_Lenient):
    teachers: tuple[_NamedTeacher, ...] | None = None


class StoredConfig(_Lenient):
    """Keys of a stored config that its own version of roll is not needed for."""

    iterations: NonNegativeInt
    forked_from: NamedCheckpoint | None = None
    store: _StoreKeys = _StoreKeys()
    algorithm: _AlgorithmKeys = _AlgorithmKeys()

    @property
    def named_checkpoints(self) -> list[tuple[str, int]]:
        """Run and iteration of each checkpoint that the run starts or learns from."""
        teachers = [(each.run_id, each.iteration) for each in self.algorithm.teachers or () if each.kind == "run"]
        origin = self.forked_from
        return [*([(origin.run_id, origin.iteration)] if origin else []), *teachers]


def read_stored_config(store: ObjectStore, run_id: str) -> StoredConfig | None:
    """Read the config of a run; None for a folder without config and manifests: a run being opened, released, or a stray."""
    name = config_name(run_id)
    try:
        return parse_stored_config(read_sealed(store, name), f"{name} in {store.uri}")
    except FileNotFoundError:
        if not list_matching(store, f"runs/{run_id}/iterations", ITERATION):
            return None
        raise ArtifactDamaged(f"store: {name} is missing from {store.uri}: restore it from a copy") from None


def parse_stored_config(config_json: bytes, where: str) -> StoredConfig:
    """Parse the JSON of a config. `where` names it in the ArtifactDamaged that anything else raises."""
    try:
        return StoredConfig.model_validate(parse_config_json(config_json, where))
    except ValidationError as error:
        keys = ", ".join(sorted({".".join(map(str, each["loc"])) for each in error.errors()}))
        raise ArtifactDamaged(f"store: {where} is not the config of a run (wrong: {keys}): restore it from a copy") from None


def parse_config_json(config_json: bytes, where: str) -> dict[str, Any]:
    """Parse JSON that must be an object."""
    try:
        tree = json.loads(config_json)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise ArtifactDamaged(f"store: {where} is not the config of a run: restore it from a copy")
    return tree


def config_name(run_id: str) -> str:
    """Name of a run's config in the store."""
    return f"runs/{run_id}/config.json"
