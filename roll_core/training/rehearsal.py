"""The `rehearsal` training backend: no model and no torch.

An update takes a configured time and folds the batch into a digest: two runs end in the same digest only if they trained on
the same rollouts in the same order. For rehearsing how a large run is orchestrated, on a machine without accelerators.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll_core.config.run import RunConfig
from roll_core.types.manifest import Metrics
from roll_core.types.refs import Record
from roll_core.types.trajectory import GREEDY_ATTEMPT, Trajectory

STATE_FILE = "rehearsed-state.json"


class RehearsedState(Record):
    """Stand-in for weights and optimizer state. Example: RehearsedState(digest="9f86...", num_updates=3)"""

    digest: str
    num_updates: int


@dataclass(frozen=True)
class RehearsedBatch:
    """A batch that is ready to be trained on."""

    digest: str
    """SHA-256 over problems, tokens and rewards, in order."""
    trained_groups: set[int]
    num_samples: int
    num_trained_tokens: int
    metrics: Metrics


class RehearsalLearner:
    """Stands in for `learner.Learner` on a trainer rank: the same calls, without tensors."""

    needs_reference = False

    def __init__(self, config: RunConfig):
        self._seconds_per_token = config.training.seconds_per_token
        self.state = RehearsedState(digest=_digest(f"seed {config.seed}"), num_updates=0)
        self.controllers: dict[str, object] = {}

    def warm_start(self, num_steps: int) -> float:
        """Stand in for supervised steps; return a loss."""
        self._advance(f"warm start of {num_steps} steps")
        return _unit_interval(self.state.digest)

    def prepare(self, trajectories: Sequence[Trajectory], weights_version: int) -> RehearsedBatch:
        """Digest the graded trajectories of a batch, greedy baselines left out."""
        del weights_version
        trained = [t for t in trajectories if t.score is not None and t.attempt != GREEDY_ATTEMPT]
        contents = (f"{t.problem_id} {t.attempt} {[turn.completion_ids for turn in t.turns]} {t.score}" for t in trained)
        return RehearsedBatch(
            digest=_digest("\n".join(contents)),
            trained_groups={t.group for t in trained},
            num_samples=len(trained),
            num_trained_tokens=sum(t.num_completion_tokens for t in trained),
            metrics={},
        )

    def update(self, prepared: RehearsedBatch, iteration: int) -> Metrics:
        """Take `training.seconds_per_token` for every trained token, then fold the batch into the state."""
        time.sleep(self._seconds_per_token * prepared.num_trained_tokens)
        self._advance(f"update {iteration} {prepared.digest}")
        loss = _unit_interval(self.state.digest)
        return {"update/loss": loss, "update/gradient_norm": 1.0 - loss}

    def update_critic(self, prepared: RehearsedBatch, iteration: int) -> Metrics:
        """Fold the batch into the state, as an update of the critic."""
        self._advance(f"update_critic {iteration} {prepared.digest}")
        return {"critic/loss": _unit_interval(self.state.digest)}

    def snapshot(self) -> Callable[[Path], list[Path]]:
        """Copy the state; the copy is written by calling what is returned with a folder."""
        state = self.state

        def write(folder: Path) -> list[Path]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / STATE_FILE).write_text(state.model_dump_json())
            return [folder / STATE_FILE]

        return write

    def load(self, folder: Path) -> None:
        """Continue from the state in a checkpoint's folder."""
        self.state = RehearsedState.model_validate_json((folder / STATE_FILE).read_bytes())

    def offload(self) -> None:
        """Do nothing: there is no device memory to give back."""

    def reload(self) -> None:
        """Do nothing: there is no device memory to take again."""

    def _advance(self, what: str) -> None:
        self.state = RehearsedState(digest=_digest(f"{self.state.digest} {what}"), num_updates=self.state.num_updates + 1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _unit_interval(digest: str) -> float:
    """Map a digest to a number in [0, 1)."""
    return int(digest[:13], 16) / 16**13
