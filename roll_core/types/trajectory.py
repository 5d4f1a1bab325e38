"""Types of rollouts: problems, and trajectories before they become trainable samples.

In-memory types (frozen dataclasses); `roll_core.store.records.rollouts` stores them as Parquet. They have no slots on
purpose: thousands of them are pickled between roles every iteration, and slotted dataclasses pickle many times slower.
"""

from dataclasses import dataclass
from enum import StrEnum

from roll_core.types.routing import RoutedExperts


class Speaker(StrEnum):
    """Author of a chat message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class Message:
    """One chat message of a prompt."""

    speaker: Speaker
    text: str


@dataclass(frozen=True)
class Problem:
    """Problem posed to the policy, with the data that grading needs.

    Example: Problem(problem_id="sort/train/17", domain="sort", messages=(Message(Speaker.USER, "40213>"),), answer="01234")
    """

    problem_id: str
    domain: str
    messages: tuple[Message, ...]
    answer: str
    recipe: str = ""
    """Parameters from which the source regenerates the problem, for graders that need more than `answer`; "" for most."""


@dataclass(frozen=True)
class Demonstration:
    """Problem with a completion to imitate. The completion must be well formed, but need not be correct.

    Example: Demonstration(problem=Problem(...), completion="42013")
    """

    problem: Problem
    completion: str


class Ending(StrEnum):
    """Reason why the generation of a completion ended."""

    STOP = "stop"
    """The policy produced a stop token."""
    LENGTH = "length"
    """The completion reached its maximum length."""
    ABORTED = "aborted"
    """The request was aborted."""
    UNPOSED = "unposed"
    """No request was made: the prompt is too long, or could not be rendered."""


@dataclass(frozen=True)
class Turn:
    """One completion: the prompt tokens, the completion tokens, and the logprob and weights version of each of the latter.

    Example: Turn(prompt_ids=(8, 4, 6, 25), completion_ids=(4, 6, 8, 2), sampler_logprobs=(-0.1, -0.3, -0.2, -0.0),
    weights_versions=(7, 7, 7, 7), text="023")
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    weights_versions: tuple[int, ...]
    text: str
    reward: float = 0.0
    """Reward that the environment gave for this turn, in addition to the score of the whole trajectory."""
    experts: RoutedExperts | None = None
    """Experts that the tokens of prompt and completion were routed to; None unless `training.experts.replay` is set."""

    def __post_init__(self):
        lengths = {len(self.completion_ids), len(self.sampler_logprobs), len(self.weights_versions)}
        assert len(lengths) == 1, "a turn needs one logprob and one weights version per completion token"


@dataclass(frozen=True)
class Score:
    """Grade of a trajectory: `value` is the reward that is trained on, `correct` counts for accuracy.

    Example: Score(value=0.7, correct=False)
    """

    value: float
    correct: bool


@dataclass(frozen=True)
class Failure:
    """Reason why a trajectory could not be finished or graded. Such a trajectory is excluded from training and counted.

    Example: Failure(stage="grade", cause="reward 'exact_match' could not grade problem sort/train/17: ...")
    """

    stage: str
    cause: str


GREEDY_ATTEMPT = -1
"""Attempt number of a greedy attempt, which is a baseline for the other attempts of its group and is not trained on."""


@dataclass(frozen=True)
class Trajectory:
    """Trajectory: one attempt at one problem. Once graded, exactly one of `score` and `failure` is set.

    Example: Trajectory(problem_id="sort/train/17", domain="sort", group=3, attempt=0, turns=(Turn(...),),
    ending=Ending.STOP, score=Score(1.0, True), failure=None)
    """

    problem_id: str
    domain: str
    group: int
    attempt: int
    turns: tuple[Turn, ...]
    ending: Ending
    score: Score | None
    failure: Failure | None

    @property
    def num_completion_tokens(self) -> int:
        """Number of completion tokens of all turns."""
        return sum(len(turn.completion_ids) for turn in self.turns)
