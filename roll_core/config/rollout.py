"""Config of rollouts: how many trajectories an iteration generates, how far ahead of training, and which are left out."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from roll_core.config.base import Section, Unit

MOST_TRAJECTORIES = 10_000_000
"""Most trajectories of an iteration. At 100 kB each, so many take a terabyte."""


class InFlightPolicy(StrEnum):
    """Treatment of attempts in flight when engines adopt new weights."""

    FINISH = "finish"
    """Attempts in flight finish with the old weights; new attempts wait until then."""
    RESUME = "resume"
    """Attempts in flight are interrupted, keep their tokens, and resume after them with the new weights."""
    CONTINUE = "continue"
    """Attempts in flight continue at once with the new weights; the torch engine keeps the old weights' KV cache."""


class GroupFilter(Section):
    """Dynamic sampling: which groups to leave out of training, judged by their rewards as soon as all are graded.

    A group that is left out, or that has no graded trajectory, is replaced at once by the next problem.
    """

    equal_rewards: bool = False
    """Leave out groups whose rewards are all equal: a method that compares within groups learns nothing from them."""
    min_spread: PositiveFloat | None = None
    """Smallest difference between a group's largest and smallest reward; groups below are left out. Null sets no limit."""
    min_mean: float | None = None
    """Smallest mean reward of a group; groups below are too hard and are left out. Null sets no limit."""
    max_mean: float | None = None
    """Largest mean reward of a group; groups above are too easy and are left out. Null sets no limit."""
    predicate: str | None = None
    """Your own function, as package.module:function. It gets a group's rewards as a list and returns True to train on it. It
    is called last, and again after a resume, so it must be deterministic. Null calls none."""

    @model_validator(mode="after")
    def _check_filter_is_not_empty(self):
        if self == GroupFilter.model_construct():
            raise ValueError(
                "it leaves nothing out: set equal_rewards, min_spread, min_mean, max_mean or predicate, or make it null"
            )
        if self.min_mean is not None and self.max_mean is not None and self.min_mean > self.max_mean:
            raise ValueError(f"min_mean ({self.min_mean}) must not be above max_mean ({self.max_mean})")
        return self


class RolloutConfig(Section):
    """Generation of trajectories."""

    num_groups: Annotated[PositiveInt, Field(le=1_000_000), Unit("problems")] = 32
    """Problems per iteration, each with one group of trajectories. Must be a multiple of training.optimizer_steps."""
    group_size: Annotated[PositiveInt, Field(le=1_000_000), Unit("trajectories")] = 8
    """Trajectories per problem. At least 2 for methods that compare the trajectories of a group."""
    max_new_tokens: PositiveInt = 16
    """Longest completion, in tokens. Must be below model.max_positions, which also holds the prompt."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature, also applied to training logprobs; must be above 0. Evaluation is always greedy."""
    slots_per_engine: Annotated[PositiveInt, Unit("sequences")] = 512
    """Sequences an engine decodes at once. A finished one is replaced from the queue at once. Lower it to save memory."""
    tokens_per_engine: Annotated[PositiveInt | None, Unit("tokens")] = None
    """Tokens that an engine's KV cache holds. An engine then gets only as many sequences as are expected to fit, judged by
    the mean length so far. Null limits sequences by slots_per_engine alone."""
    filter: GroupFilter | None = None
    """Groups to leave out of training and replace; null trains on every group."""
    max_draws: Annotated[float, Unit("times num_groups")] = Field(default=8.0, ge=1.0)
    """Most problems an iteration may draw, as a multiple of num_groups; those drawn ahead are not counted. The iteration
    fails when they are used up. More than num_groups are drawn if `rollout.filter` leaves groups out, or if a prompt is too
    long or cannot be rendered."""
    redundant_groups: Annotated[NonNegativeInt, Unit("problems")] = 0
    """Extra problems in flight: the first num_groups to complete are trained on, the rest is aborted. Shortens the wait for
    the slowest; the choice then depends on timing and favours short completions."""
    redundant_attempts: Annotated[NonNegativeInt, Unit("attempts")] = 0
    """Extra attempts in flight for each problem: the first group_size to be graded are trained on, the rest is aborted."""
    async_ratio: Annotated[float, Unit("iterations")] = Field(default=0.0, ge=0.0, le=64.0)
    """Iterations of groups that may be generated ahead of training. 0 is the synchronous loop: engines wait while the
    trainer works. Rounded up, it is the largest staleness of a trained token, in weights versions. While the trainer never
    waits, less is generated ahead, down to one iteration, because later tokens come from newer weights."""
    in_flight: InFlightPolicy = InFlightPolicy.RESUME
    """Treatment of attempts in flight when engines adopt new weights. Matters if async_ratio is above 0. Each token records
    the weights version that produced it."""

    @property
    def num_trajectories(self) -> int:
        """Trajectories per iteration."""
        return self.num_groups * self.group_size

    @model_validator(mode="after")
    def _check_trajectories_fit_into_memory(self):
        if self.num_trajectories > MOST_TRAJECTORIES:
            raise ValueError(
                f"num_groups ({self.num_groups}) x group_size ({self.group_size}) must be at most {MOST_TRAJECTORIES}, "
                "because the trajectories of an iteration are in memory together: lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_group_has_a_spread(self):
        compares = self.filter is not None and (self.filter.equal_rewards or self.filter.min_spread is not None)
        if compares and self.group_size < 2:
            raise ValueError(
                "filter.equal_rewards and filter.min_spread need a group_size of at least 2: one reward has no spread"
            )
        return self
