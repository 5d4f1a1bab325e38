"""How trajectories are generated."""

from pydantic import NonNegativeFloat, PositiveInt

from roll_core.config.base import Section


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

    @property
    def num_trajectories(self) -> int:
        return self.num_groups * self.group_size
