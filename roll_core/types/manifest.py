"""Receipts of the stages of an iteration, and the manifest that commits the iteration.

Tasks return receipts, and flows pass them to later tasks and decide by them. A manifest names everything that an iteration
produced and is written last. A run is the chain of its manifests.
"""

from enum import StrEnum
from typing import Any

from pydantic import Field

from roll_core.types.refs import ArtifactRef, Record

Metrics = dict[str, float]
"""Metrics by name, `area/quantity`. Example: {"reward/mean": 0.41, "update/clip_fraction": 0.02}"""


class Receipt(Record):
    """Receipt that a stage returns; the base of all receipts."""

    seconds: float = 0.0
    """Duration of the stage in seconds. The task decorator fills it in."""
    metrics: Metrics = Field(default_factory=dict)


class CollectRequest(Record):
    """Request to collect the groups of an iteration.

    The groups are those of the next problems of the stream, unless `rollout.filter` leaves some out.

    Example: CollectRequest(iteration=4, parent="ab12...", weights_version=3, first_problem=96, num_groups=32)
    """

    iteration: int
    parent: str
    """Digest of the manifest that this iteration builds on. Equal requests therefore mean equal rollouts."""
    weights_version: int
    """Version of the weights that the iteration starts from."""
    first_problem: int
    """Index in the problem stream of the first problem to draw."""
    num_groups: int
    """Number of groups in the batch."""

    @property
    def request_id(self) -> str:
        """Id of the request. Roles return the first reply to a repeated id."""
        return f"{self.iteration}/{self.parent[:16]}"


class DrawOutcome(StrEnum):
    """Outcome of a problem that was drawn."""

    TRAINED = "trained"
    """At least one of its trajectories is trained on."""
    FILTERED = "filtered"
    """Its attempts were graded, and `rollout.filter` or a mask left out all of them."""
    FAILED = "failed"
    """None of its attempts could be graded, or its problem could not be posed."""
    ABORTED = "aborted"
    """Redundant, or without a finished attempt."""

    @property
    def letter(self) -> str:
        """Letter of the outcome in `Draws.outcomes`."""
        return self.value[0] if self is not DrawOutcome.FAILED else "x"


class Draw(Record):
    """One problem that an iteration drew, with its outcome.

    Example: Draw(problem=97, iteration=4, outcome="trained")
    """

    problem: int
    """Index of the problem in the problem stream."""
    iteration: int
    outcome: DrawOutcome


class Draws(Record):
    """Outcomes of the consecutive problems that an iteration drew, starting with problem `first`.

    `outcomes` has one letter per problem: t(rained), f(iltered), x (failed), a(borted).

    Example: Draws(first=96, outcomes="tttftttx")
    """

    first: int
    outcomes: str

    @property
    def next(self) -> int:
        """Index of the first problem that the next iteration draws."""
        return self.first + len(self.outcomes)

    def expand(self, iteration: int) -> list[Draw]:
        """Return the draws one by one: each problem with this iteration and its outcome, in place of a letter in
        `outcomes`."""
        outcome_of = {outcome.letter: outcome for outcome in DrawOutcome}
        return [
            Draw(problem=self.first + offset, iteration=iteration, outcome=outcome_of[letter])
            for offset, letter in enumerate(self.outcomes)
        ]


class Collected(Receipt):
    """Receipt of `collect`: a batch of finished groups, in the store and in the roles' memory."""

    request: CollectRequest
    trajectories: ArtifactRef
    num_trajectories: int
    num_failed: int
    """Number of trajectories that could not be finished or graded."""
    num_tokens: int
    """Number of completion tokens of all trajectories."""
    draws: Draws
    """Outcomes of the problems drawn. TRAINED here means that trajectories of the problem are in this batch; `prepare` may
    still mask some of them."""
    trace: ArtifactRef
    """Trace of every attempt: its states and times."""


class Prepared(Receipt):
    """Receipt of `prepare`: samples with advantages and logprobs are in the memory of the trainer ranks."""

    collected: Collected
    draws: Draws
    """Outcomes of the problems drawn, after the masks of `prepare`."""
    num_samples: int
    num_trained_tokens: int


class Updated(Receipt):
    """Receipt of `update`: the optimizer has stepped, and the trainer holds `weights_version`."""

    iteration: int
    weights_version: int
    controllers: dict[str, Any] = Field(default_factory=dict)
    """Values that the algorithm adapts between iterations, for example the weight of a KL penalty. For information only:
    every checkpoint contains them."""


class Published(Receipt):
    """Receipt of `publish`: every engine generates with `weights_version` from now on."""

    weights_version: int
    weights_digest: str
    """Digest over the names, shapes and bytes of all tensors."""
    num_bytes: int


class Evaluated(Receipt):
    """Receipt of `evaluate`: accuracy of `weights_version` on held-out problems, with greedy decoding."""

    weights_version: int
    num_problems: int
    accuracy: float
    """Share of the problems that are solved. An answer without a grade counts as wrong."""
    trajectories: ArtifactRef


class Checkpointing(Receipt):
    """Receipt of `checkpoint`: a snapshot of the training state was taken, and its upload runs beside the next stages.

    `seconds` is how long the trainer waited.
    """

    iteration: int


class Manifest(Record):
    """Manifest of one committed iteration. Iteration 0 is the policy that training starts from, after any warm start.

    It holds no random generator state: every seed is derived from the config's seed and from its use (`roll_core.seeds`).

    Example: Manifest(run_id="quickstart-3", iteration=4, parent="ab12...", config_digest="1b4f...", leg=1,
    weights_version=4, weights_digest="77d0...", next_problem=128, collected=Collected(...), evaluated=None,
    metrics={"reward/mean": 0.41}, timings={"collect": 0.3, "update": 0.2}, committed_at="2026-11-15T09:30:00+00:00")
    """

    run_id: str
    iteration: int
    parent: str
    """Digest of the manifest before this one; NO_PARENT for iteration 0."""
    config_digest: str
    leg: int
    weights_version: int
    weights_digest: str
    """Digest of the policy after this iteration."""
    next_problem: int
    """Cursor into the problem stream: this iteration and earlier ones drew all problems before it."""
    draws: Draws | None = None
    """Entries of this iteration in the problem ledger; null for iteration 0."""
    controllers: dict[str, Any] = Field(default_factory=dict)
    """Values that the algorithm adapts between iterations, see `Updated.controllers`."""
    code: str = ""
    """Version and digest of the source code that ran."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes that the leg ran on."""
    exact: bool | None = None
    """True if the update was computed with deterministic algorithms (`training.deterministic`): repeated on the same kind of
    machine it gives the same weights to the bit. Null in manifests that do not record it."""
    collected: Collected | None
    """Receipt of `collect`; null for iteration 0."""
    evaluated: Evaluated | None
    """Receipt of `evaluate`; null if no evaluation was due."""
    metrics: Metrics
    timings: dict[str, float]
    """Seconds of each stage; `wall` is the time since the previous commit, or since the recovery of the leg."""
    committed_at: str
    """Time of the commit, ISO 8601 in UTC."""

    @property
    def artifacts(self) -> list[ArtifactRef]:
        """Artifacts that must be in the store before this manifest can be committed."""
        rollouts = [stage.trajectories for stage in (self.collected, self.evaluated) if stage is not None]
        return rollouts if self.collected is None else [*rollouts, self.collected.trace]


class Difference(Record):
    """One quantity in which a replay differs from the committed iteration.

    Example: Difference(quantity="update/loss", committed="0.0417", replayed="0.0418")
    """

    quantity: str
    committed: str
    replayed: str


class Replayed(Receipt):
    """Receipt of `replay`: an iteration's update, replayed from stored rollouts and compared with what was committed.

    On the same hardware and code there are no differences.
    """

    run_id: str
    iteration: int
    compared: tuple[str, ...]
    """Names of the quantities that were compared."""
    differences: tuple[Difference, ...]


NO_PARENT = ""
"""Value of `Manifest.parent` in iteration 0."""
