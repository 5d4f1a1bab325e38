"""Trainer rank of `training.backend: rehearsal` as a Ray actor: no model, and no import of torch in its process."""

from pathlib import Path

import ray

from roll_core.roles.process import freeze_garbage_collector
from roll_core.roles.ray_weights import RayWeights
from roll_core.roles.trainer_rank import TrainerRank
from roll_core.training.rehearsal import RehearsalLearner
from roll_core.types.manifest import Metrics
from roll_core.types.refs import CheckpointRef


class RehearsalRank(TrainerRank):
    """Ray actor of one rehearsing trainer rank. Published weights have a version and a digest, and no tensors."""

    _learner: RehearsalLearner  # type: ignore[assignment]

    def start(self, rendezvous_address: str) -> None:
        """Build the learner; without collectives there is no process group to join."""
        del rendezvous_address
        self._learner = RehearsalLearner(self._config)
        freeze_garbage_collector()

    def load_reference(self, checkpoint: CheckpointRef) -> None:
        """Load nothing: the weights of a rehearsal depend on what was trained on alone."""

    def put_in_object_store(self, version: int) -> RayWeights | None:
        """Return weights without buckets, under this version number and the state's digest; rank 0 only."""
        return RayWeights(version, (), ray.put(None), self._learner.state.digest) if self._rank == 0 else None

    def export(self, folder: Path) -> str:
        """Write the state as the only file of a folder, and return its digest: there is no model to export."""
        if self._rank == 0:
            self._learner.snapshot()(folder)
        return self._learner.state.digest

    def _warm_start(self) -> Metrics:
        plan = self._config.warm_start
        assert plan is not None
        return {"warm_start/loss": self._learner.warm_start(plan.steps)}

    def _memory_metrics(self) -> Metrics:
        return {}
