"""Services around a run: store, tracking, deadlines, retries, evaluation, checkpoints."""

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from roll_core.config.base import Section

RETRY_SECONDS = 300.0
"""Also for whoever has the address of a store and no config yet."""
GRACE_MINUTES = 60.0


class StoreConfig(Section):
    uri: str = "roll-data/store"
    """Folder, file:// or s3:// address that holds artifacts and manifests. For s3://, endpoint, credentials and region
    are the ordinary AWS settings: AWS_ENDPOINT_URL, AWS_PROFILE, AWS_ACCESS_KEY_ID and so on, or files under ~/.aws."""
    retry_seconds: PositiveFloat = RETRY_SECONDS
    """Longest outage of the store that is waited for. Requests that got no answer, or one that says "later", are repeated
    for so long, with growing pauses; then the leg fails and the run can be resumed."""
    grace_minutes: NonNegativeFloat = GRACE_MINUTES
    """What is younger is neither retired nor collected as garbage: somebody may have stored it who has not named it yet. It
    must be longer than an iteration, and than storing a checkpoint."""
    spool_megabytes: PositiveInt = 4096
    """Rollouts kept in work_dir on their way to the store. When that is full, collecting waits for the store."""
    unfinished_seconds: NonNegativeFloat = 5.0
    """How often finished trajectories are stored that no iteration has used up yet: a kill costs no more of them."""


class TrackingConfig(Section):
    uri: str = "sqlite:///roll-data/mlflow.db"
    """Any MLflow tracking address: sqlite:///FILE or http://HOST:PORT."""
    experiment: str = "roll"
    trajectory_samples: NonNegativeInt = 16
    """Trajectories of an evaluation kept as a readable MLflow artifact."""
    drain_seconds: PositiveFloat = 30.0
    """How long the end of a leg waits for metrics still in the spool; what is left is uploaded by the next leg."""


class DeadlinesConfig(Section):
    """Seconds after which a silent role is reported late, by name."""

    start: PositiveFloat = 300.0
    """Starting Ray and every role, models loaded."""
    heartbeat: PositiveFloat = 120.0
    """An engine that does not answer for so long, while others may, is ended and replaced. Longer than its longest step."""
    collect: PositiveFloat = 3600.0
    prepare: PositiveFloat = 1800.0
    update: PositiveFloat = 3600.0
    publish: PositiveFloat = 600.0
    evaluate: PositiveFloat = 3600.0
    checkpoint: PositiveFloat = 1800.0
    store: PositiveFloat = 3600.0
    """Rollouts that a commit names, on their way to the store."""


class RetriesConfig(Section):
    """How failures that pass by themselves are repeated: a reward whose service is away, a stage that lost a connection.

    The store has a limit of its own (store.retry_seconds). An engine or a reward worker that died is replaced; any
    other role that died or is late ends the leg, and the next is the retry.
    """

    repeats: NonNegativeInt = 6
    """Further attempts after the first; with the pauses below they last about a minute."""
    first_delay_seconds: PositiveFloat = 1.0
    """Pause before the first repeat. Each next one is twice as long; all are cut at random by up to half, so that those who
    failed together do not come back together."""
    longest_delay_seconds: PositiveFloat = 30.0


class EvaluationConfig(Section):
    every: PositiveInt = 5
    """Iterations between evaluations; the first and the last policy are always evaluated."""
    num_problems: PositiveInt = 256


class CheckpointConfig(Section):
    every: PositiveInt = 10
    """Iterations between checkpoints. Iterations since the last one are replayed from stored rollouts on resume."""
    keep_last: PositiveInt | None = None
    """How many of the newest checkpoints stay; null keeps all. The first one, which is the reference policy, always stays,
    and so does one that a fork or a run it teaches names, and one younger than store.grace_minutes."""
    keep_every: PositiveInt | None = None
    """Beside those, checkpoints of iterations that are multiples of this stay."""
    keep_best: NonNegativeInt = 0
    """Beside those, so many with the best held-out accuracy stay; of equals, the later."""
    export_at_end: bool = True
    """Store the last policy as a Hugging Face folder, too: it takes a third of a checkpoint, and `roll export` only copies
    it."""

    @model_validator(mode="after")
    def _keeps_something_to_keep_more_beside(self):
        if self.keep_last is None and (self.keep_every is not None or self.keep_best):
            raise ValueError("keep_every and keep_best name checkpoints to keep beside the last ones: set keep_last, too")
        return self
