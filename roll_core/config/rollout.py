"""How trajectories are generated."""

from enum import StrEnum

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from roll_core.config.base import Section


class InFlightPolicy(StrEnum):
    """What happens to attempts that are being generated when engines take over new weights."""

    FINISH = "finish"
    """They finish with the old weights first; new ones wait for that."""
    RESUME = "resume"
    """The engine ends them now, with the tokens they have; they are resumed from there with the new weights."""
    CONTINUE = "continue"
    """They go on at once with the new weights, over what the old ones left in the cache."""


class GroupFilter(Section):
    """Which groups are left out of training, judged by their rewards as soon as all are there (dynamic sampling).

    A group that is left out, or that nobody could grade, is replaced at once by the next problem.
    """

    equal_rewards: bool = False
    """Leave out groups whose rewards are all the same: they teach a method that compares within groups nothing."""
    min_spread: PositiveFloat | None = None
    """Leave out groups whose largest and smallest reward differ by less."""
    min_mean: float | None = None
    """Leave out groups with a lower mean reward: too hard."""
    max_mean: float | None = None
    """Leave out groups with a higher mean reward: too easy."""
    predicate: str | None = None
    """A function of yours, as package.module:function: it is given the rewards of a group, in a list, and says whether to
    train on it. Asked last, and only about groups that pass the rest. It must give the same answer again: it is asked
    once more after a resume."""

    @model_validator(mode="after")
    def _says_something(self):
        if self == GroupFilter.model_construct():
            raise ValueError(
                "it leaves nothing out: set equal_rewards, min_spread, min_mean, max_mean or predicate, or make it null"
            )
        if self.min_mean is not None and self.max_mean is not None and self.min_mean > self.max_mean:
            raise ValueError(f"min_mean ({self.min_mean}) must not be above max_mean ({self.max_mean})")
        return self


class RolloutConfig(Section):
    num_groups: PositiveInt = 32
    """Problems per iteration."""
    group_size: PositiveInt = 8
    """Trajectories per problem."""
    max_new_tokens: PositiveInt = 16
    """Longest completion, in tokens."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; training logprobs use the same. 0 is greedy, for evaluation only."""
    slots_per_engine: PositiveInt = 512
    """Sequences an engine decodes at once; a finished one is replaced from the queue at once."""
    tokens_per_engine: PositiveInt | None = None
    """Tokens that an engine's cache holds: it is given no more sequences than are expected to fit, going by how long they
    became so far. Null leaves that to the slots."""
    filter: GroupFilter | None = None
    """Groups to leave out and replace; null trains on all of them."""
    max_draws: float = Field(default=8.0, ge=1.0)
    """Most problems that a filter may use up in an iteration, as a multiple of num_groups, beside those drawn ahead; then
    the iteration fails."""
    redundant_groups: NonNegativeInt = 0
    """Further problems in flight: the first num_groups to be complete are trained on, the rest is aborted. Shortens the wait
    for the slowest; what is trained on then depends on timing, and leans towards short completions."""
    redundant_attempts: NonNegativeInt = 0
    """Further attempts in flight for each problem: the first group_size to be graded are trained on, the rest is aborted."""
    async_ratio: float = Field(default=0.0, ge=0.0, le=64.0)
    """How many iterations' worth of groups may be generated ahead of training. 0 is the synchronous loop: engines wait while
    the trainer works. Its ceiling is the largest staleness, in weights versions, of any token that is trained on. While the
    trainer never waits, fewer are, down to one: what is generated later is by newer weights."""
    in_flight: InFlightPolicy = InFlightPolicy.RESUME
    """What happens to attempts that are being generated when engines take over new weights: finish (with the old ones, while
    new attempts wait), resume (interrupted, then resumed after the tokens they have) or continue (as if nothing happened).
    Each token says which version produced it."""

    @property
    def num_trajectories(self) -> int:
        return self.num_groups * self.group_size

    @model_validator(mode="after")
    def _filter_can_pass(self):
        compares = self.filter is not None and (self.filter.equal_rewards or self.filter.min_spread is not None)
        if compares and self.group_size < 2:
            raise ValueError(
                "filter.equal_rewards and filter.min_spread need a group_size of at least 2: one reward has no spread"
            )
        return self
