"""Config of the services around a run: store, tracking, deadlines, retries, evaluation, checkpoints."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from roll_core.config.base import PathText, Section, Unit

RETRY_SECONDS = 300.0
"""Default of store.retry_seconds, also for code that has the address of a store but no config yet."""
GRACE_MINUTES = 60.0
"""Default of store.grace_minutes."""


def check_has_no_password(uri: str, alternative: str) -> None:
    """Raise ValueError if an address contains a password: configs are stored, tracked and printed."""
    if urlsplit(uri).password is not None:
        raise ValueError(f"uri must not contain a password, because configs are stored and shown: {alternative}")


class StoreConfig(Section):
    """Store of artifacts, manifests and records."""

    uri: PathText = "roll-data/store"
    """Folder, file:// or s3:// address that holds artifacts and manifests. For s3://, the ordinary AWS settings give
    endpoint, credentials and region: AWS_ENDPOINT_URL, AWS_PROFILE, AWS_ACCESS_KEY_ID and so on, or files under ~/.aws."""
    retry_seconds: PositiveFloat = RETRY_SECONDS
    """Longest outage of the store to wait for, in seconds. Requests without a reply, or with one that says to try later, are
    repeated with backoff; then the leg fails, and the run can be resumed."""
    grace_minutes: NonNegativeFloat = GRACE_MINUTES
    """Grace period, in minutes: younger objects are neither retired nor garbage-collected, because a running leg may not
    have named them in a manifest yet. An iteration may last longer: what it stored is made young again before its commit."""
    spool_megabytes: PositiveInt = 4096
    """Most rollouts in work_dir that wait for upload to the store, in MB. When the spool is full, collecting waits."""
    unfinished_seconds: NonNegativeFloat = 5.0
    """Interval at which finished trajectories that no iteration has used yet are stored, in seconds. A killed leg loses no
    more than this."""

    @model_validator(mode="after")
    def _check_uri_has_no_password(self):
        check_has_no_password(
            self.uri, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them to ~/.aws/credentials"
        )
        return self


class TrackingConfig(Section):
    """MLflow tracking."""

    uri: str | None = "sqlite:///roll-data/mlflow.db"
    """MLflow tracking address: sqlite:///FILE or http://HOST:PORT. Null uploads nothing: metrics stay in the spool in
    work_dir, and `roll nightly` has nothing to compare with."""
    experiment: str = "roll"
    """MLflow experiment that runs are filed under; created if missing."""
    trajectory_samples: Annotated[NonNegativeInt, Unit("trajectories")] = 16
    """Trajectories of each evaluation to keep as a readable MLflow artifact; 0 keeps none."""
    drain_seconds: PositiveFloat = 30.0
    """Longest wait at the end of a leg for pages that are being made, and then for the upload of the spool, in seconds each.
    The next leg uploads the rest."""

    @model_validator(mode="after")
    def _check_uri_has_no_password(self):
        check_has_no_password(
            self.uri or "",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or write them to ~/.mlflow/credentials",
        )
        return self


class DeadlinesConfig(Section):
    """Time limits of a leg's stages, in seconds. A stage beyond its limit fails and names the roles that were late."""

    start: Annotated[PositiveFloat, Unit("seconds")] = 300.0
    """Longest start of Ray and of every role, in seconds, model loading included."""
    heartbeat: Annotated[PositiveFloat, Unit("seconds")] = 120.0
    """Longest silence of an engine or a reward worker, in seconds, before it is ended and replaced. Must be longer than the
    longest step of an engine, and than any reward blocks its process."""
    collect: Annotated[PositiveFloat, Unit("seconds")] = 3600.0
    """Longest collect stage, in seconds: generating and grading one iteration's groups."""
    prepare: Annotated[PositiveFloat, Unit("seconds")] = 1800.0
    """Longest prepare stage, in seconds: scoring logprobs and computing advantages."""
    update: Annotated[PositiveFloat, Unit("seconds")] = 3600.0
    """Longest update of the policy or of the critic, and longest warm start, in seconds."""
    publish: Annotated[PositiveFloat, Unit("seconds")] = 600.0
    """Longest publish stage, in seconds: engines adopt new weights."""
    evaluate: Annotated[PositiveFloat, Unit("seconds")] = 3600.0
    """Longest evaluation, in seconds."""
    checkpoint: Annotated[PositiveFloat, Unit("seconds")] = 1800.0
    """Longest time to store or to load a checkpoint, in seconds."""
    store: Annotated[PositiveFloat, Unit("seconds")] = 3600.0
    """Longest wait before a commit for its rollouts to reach the store, in seconds."""


class RetriesConfig(Section):
    """Retries of transient failures with exponential backoff: a reward's service is away, a stage lost a connection.

    The store has its own limit (store.retry_seconds). A dead engine or reward worker is replaced; any other role that dies
    or is late ends the leg, and the next leg is the retry.
    """

    repeats: Annotated[NonNegativeInt, Unit("attempts")] = 6
    """Further attempts after the first; with the default delays they last about a minute. 0 never retries."""
    first_delay_seconds: PositiveFloat = 1.0
    """Delay before the first repeat, in seconds. Each next delay is twice as long, and each is shortened by a random share
    of up to half (jitter), so that clients that failed together do not return together."""
    longest_delay_seconds: PositiveFloat = 30.0
    """Longest delay between two repeats, in seconds."""


class EvaluationConfig(Section):
    """Greedy evaluation on held-out problems."""

    every: Annotated[PositiveInt, Unit("iterations")] = 5
    """Iterations between evaluations. The first and the last policy are always evaluated."""
    num_problems: Annotated[PositiveInt, Field(le=1_000_000)] = 256
    """Held-out problems per evaluation. More give a more precise accuracy and take longer: the standard error of an accuracy
    is 0.03 at most with 256, and 0.0005 with a million."""


class CheckpointConfig(Section):
    """Checkpoints: how often they are stored, and which of them stay."""

    every: Annotated[PositiveInt, Unit("iterations")] = 10
    """Iterations between checkpoints. A resumed run replays the iterations since the last one from stored rollouts."""
    keep_last: Annotated[PositiveInt | None, Unit("checkpoints")] = None
    """Newest checkpoints that stay; null keeps all. Always kept: the first (the reference policy), those named by a fork or
    by a run that learns from this one, and those younger than store.grace_minutes."""
    keep_every: Annotated[PositiveInt | None, Unit("iterations")] = None
    """Interval of checkpoints that stay in addition to keep_last: those of iterations that are multiples of this. Null keeps
    none in addition."""
    keep_best: Annotated[NonNegativeInt, Unit("checkpoints")] = 0
    """Checkpoints with the best held-out accuracy that stay in addition to keep_last; of equals, the later."""
    export_at_end: bool = True
    """Store the last policy also as a Hugging Face folder. It takes a third of a checkpoint's space, and `roll export` then
    only copies it."""

    @model_validator(mode="after")
    def _check_keep_last_is_set(self):
        if self.keep_last is None and (self.keep_every is not None or self.keep_best):
            raise ValueError("keep_every and keep_best name checkpoints to keep beside the last ones: set keep_last, too")
        return self
