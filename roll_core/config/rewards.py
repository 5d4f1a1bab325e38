"""Config of rewards: how completions are graded."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from roll_core.config.base import Section, Unit


class InProcessGrading(Section):
    """Grading in the reward worker's own process."""

    deadline_seconds: PositiveFloat = 60.0
    """Longest time to grade one answer, in seconds. Then the trajectory counts as failed, not as wrong, and the others go
    on. The default is ample for a local function and for one request to a judge. A function that blocks its process cannot
    be stopped so: `deadlines.heartbeat` ends the process."""
    concurrency: Annotated[PositiveInt, Unit("answers")] = 32
    """Answers that a reward worker grades at once. It matters for rewards that wait, such as for a judge: raise it if
    grading is slow and the service has room, lower it if the service refuses requests."""

    @property
    def at_once(self) -> int:
        """Answers that a reward worker grades at once."""
        return self.concurrency


class ExactMatch(InProcessGrading):
    """Text comparison: right if the answer, stripped of white space, equals the expected one to the letter."""

    kind: Literal["exact_match"] = "exact_match"
    partial_credit: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the reward given for the fraction of positions that are right; 0 pays only for right answers. Raise it if a
    model is too seldom right to learn."""


class NumberMatch(InProcessGrading):
    """Number comparison: right if the last number in the answer equals the expected number."""

    kind: Literal["number_match"] = "number_match"
    tolerance: NonNegativeFloat = 0.0
    """Largest absolute difference that still counts as right."""


class SubprocessGrading(Section):
    """Grading in subprocesses of the reward worker, because a grader may hang or crash."""

    deadline_seconds: PositiveFloat = 5.0
    """Longest time to grade one answer, in seconds. Then the process is replaced, and the trajectory counts as failed, not
    as wrong."""
    processes: Annotated[PositiveInt, Unit("processes")] = 2
    """Answers that a reward worker grades at once, each in its own process."""

    @property
    def at_once(self) -> int:
        """Answers that a reward worker grades at once."""
        return self.processes


class MathVerify(SubprocessGrading):
    """Mathematical equality by Math-Verify: right if the expression in the answer equals the expected one (1/2 is 0.5)."""

    kind: Literal["math_verify"] = "math_verify"


class ReasoningGym(SubprocessGrading):
    """Score of Reasoning Gym's own scorer of the task, 0 to 1; right at 1. Needs `problems.kind: reasoning_gym`."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tag: str | None = "answer"
    """Name of the XML tag around the answer. The text in the last `<answer>...</answer>` is graded, or the whole completion
    if it has none. Null always grades the whole completion."""


RewardConfig = Annotated[ExactMatch | NumberMatch | MathVerify | ReasoningGym, Field(discriminator="kind")]
