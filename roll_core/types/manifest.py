"""Receipts of the stages, and the manifest that makes an iteration have happened.

Flows pass receipts between tasks and decide by them; a manifest names everything an iteration produced and is
written last. A run is the chain of its manifests.
"""

from enum import StrEnum
from typing import Any

from pydantic import Field

from roll_core.types.refs import ArtifactRef, Record

Metrics = dict[str, float]
"""Quantities by name, `area/quantity`: {"reward/mean": 0.41, "update/clip_fraction": 0.02}."""


class Receipt(Record):
    """What a stage answers. `seconds` is filled in by the task that ran it."""

    seconds: float = 0.0
    metrics: Metrics = Field(default_factory=dict)


class CollectRequest(Record):
    """Which groups to generate: `num_groups` of the problems from `first_problem` on, by weights `weights_version`. Those
    are the next ones of the stream, unless a filter leaves some out.

    `parent` is the digest of the manifest this iteration builds on, so that the same request means the same rollouts.

    Example: CollectRequest(iteration=4, parent="ab12...", weights_version=3, first_problem=96, num_groups=32)
    """

    iteration: int
    parent: str
    weights_version: int
    first_problem: int
    num_groups: int

    @property
    def request_id(self) -> str:
        return f"{self.iteration}/{self.parent[:16]}"


class DrawOutcome(StrEnum):
    """What became of a problem. FILTERED: attempts were graded, and all left out by rollout.filter or masked. FAILED: none
    could be graded. ABORTED: it was redundant, or no attempt came to an end."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def letter(self) -> str:
        return self.value[0] if self is not DrawOutcome.FAILED else "x"


class Draw(Record):
    """Example: Draw(problem=97, iteration=4, outcome="trained")"""

    problem: int
    """Its place in the stream of problems."""
    iteration: int
    outcome: DrawOutcome


class Draws(Record):
    """The problems an iteration drew, from `first` on, a letter each: t(rained), f(iltered), x (failed), a(borted).

    Example: Draws(first=96, outcomes="tttftttx")
    """

    first: int
    outcomes: str

    @property
    def next(self) -> int:
        """Where the next iteration draws from."""
        return self.first + len(self.outcomes)

    def each(self, iteration: int) -> list[Draw]:
        outcome_of = {outcome.letter: outcome for outcome in DrawOutcome}
        return [
            Draw(problem=self.first + place, iteration=iteration, outcome=outcome_of[letter])
            for place, letter in enumerate(self.outcomes)
        ]


class Collected(Receipt):
    """A batch of finished groups, in the store and in the roles' memory."""

    request: CollectRequest
    trajectories: ArtifactRef
    num_trajectories: int
    num_failed: int
    num_tokens: int
    draws: Draws
    """Outcome of every problem drawn. TRAINED: its trajectories are in this batch; `prepare` may still mask some of them."""
    trace: ArtifactRef
    """What happened to every attempt, and when."""


class Prepared(Receipt):
    """Samples with advantages and the logprobs the algorithm declared, resident with the trainer ranks."""

    collected: Collected
    draws: Draws
    num_samples: int
    num_trained_tokens: int


class Updated(Receipt):
    """The optimizer has moved: the trainer now holds `weights_version`. `controllers` is what adapts between iterations, for
    example the weight of a KL: part of every checkpoint, shown here for whoever reads a manifest."""

    iteration: int
    weights_version: int
    controllers: dict[str, Any] = Field(default_factory=dict)


class Published(Receipt):
    """Every engine generates with `weights_version` from here on; the digest is over names, shapes and bytes."""

    weights_version: int
    weights_digest: str
    num_bytes: int


class Evaluated(Receipt):
    """Held-out accuracy of `weights_version`, greedy."""

    weights_version: int
    num_problems: int
    accuracy: float
    trajectories: ArtifactRef


class Checkpointing(Receipt):
    """A copy of all that learning goes on from was made; it is being stored beside what follows. `seconds` is how long the
    trainer waited."""

    iteration: int


class Manifest(Record):
    """One committed iteration. Iteration 0 is the policy training starts from (after any warm start).

    There is no state of a random generator in it: every seed is derived from the config's and from where it is used.

    Example: Manifest(run_id="quickstart-3", iteration=4, parent="ab12...", config_digest="1b4f...", leg=1,
    weights_version=4, weights_digest="77d0...", next_problem=128, collected=Collected(...), evaluated=None,
    metrics={"reward/mean": 0.41}, timings={"collect": 0.3, "update": 0.2}, committed_at="2026-11-15T09:30:00+00:00")
    """

    run_id: str
    iteration: int
    parent: str
    config_digest: str
    leg: int
    weights_version: int
    weights_digest: str
    """Digest of the policy after this iteration."""
    next_problem: int
    """The cursor: all problems before it were drawn by this iteration or one before."""
    draws: Draws | None = None
    """This iteration's page of the problem ledger."""
    controllers: dict[str, Any] = Field(default_factory=dict)
    code: str = ""
    """Version and digest of the sources that ran."""
    nodes: tuple[str, ...] = ()
    """Where they ran."""
    collected: Collected | None
    evaluated: Evaluated | None
    metrics: Metrics
    timings: dict[str, float]
    committed_at: str

    @property
    def artifacts(self) -> list[ArtifactRef]:
        """What must be in the store before this can be committed."""
        rollouts = [stage.trajectories for stage in (self.collected, self.evaluated) if stage is not None]
        return rollouts if self.collected is None else [*rollouts, self.collected.trace]


class Difference(Record):
    """Example: Difference(quantity="update/loss", committed="0.0417", replayed="0.0418")"""

    quantity: str
    committed: str
    replayed: str


class Replayed(Receipt):
    """An iteration's update, made again from its stored rollouts, against what was committed; no difference is the rule."""

    run_id: str
    iteration: int
    compared: tuple[str, ...]
    differences: tuple[Difference, ...]


NO_PARENT = ""
"""The parent of iteration 0."""
