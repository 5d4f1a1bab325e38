"""Protocol of rewards, which reward workers call."""

from typing import Protocol

from roll_core.types.trajectory import Problem, Score, Trajectory


class Reward(Protocol):
    """Grader of single trajectories."""

    async def __call__(self, problem: Problem, trajectory: Trajectory) -> Score:
        """Grade one trajectory, or raise RewardError."""
        ...

    async def close(self) -> None:
        """End what the reward started; most rewards start nothing."""
        return
