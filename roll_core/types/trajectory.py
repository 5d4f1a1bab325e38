"""Problems and attempts at them: the data of a rollout, before it becomes trainable samples.

In memory only (frozen dataclasses); `roll_core.store.records.rollouts` writes and reads them as Parquet. Without slots on purpose:
thousands of these are pickled between roles every iteration, and slotted dataclasses pickle many times slower.
"""

from dataclasses import dataclass
from enum import StrEnum

from roll_core.types.routing import RoutedExperts


class Speaker(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class Message:
    speaker: Speaker
    text: str


@dataclass(frozen=True)
class Problem:
    """What the policy is asked, with what grading needs.

    Example: Problem(problem_id="sort/train/17", domain="sort", messages=(Message(Speaker.USER, "40213>"),), answer="01234")
    """

    problem_id: str
    domain: str
    messages: tuple[Message, ...]
    answer: str
    recipe: str = ""
    """How its source makes it again, for a grader that needs more than the answer; most problems have none."""


@dataclass(frozen=True)
class Demonstration:
    """A problem with a completion to imitate; it need not be right, only well formed.

    Example: Demonstration(problem=Problem(...), completion="42013")
    """

    problem: Problem
    completion: str


class Ending(StrEnum):
    """Why generation of a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Turn:
    """One completion: the tokens the policy was given, those it produced, and who produced each.

    Example: Turn(prompt_ids=(8, 4, 6, 25), completion_ids=(4, 6, 8, 2), sampler_logprobs=(-0.1, -0.3, -0.2, -0.0),
    weights_versions=(7, 7, 7, 7), text="023")
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    weights_versions: tuple[int, ...]
    text: str
    reward: float = 0.0
    """What the environment paid for this turn, beside the score of the whole trajectory."""
    experts: RoutedExperts | None = None
    """Which experts the tokens of prompt and completion went to, where the engine records it (training.experts.replay)."""

    def __post_init__(self):
        lengths = {len(self.completion_ids), len(self.sampler_logprobs), len(self.weights_versions)}
        assert len(lengths) == 1, "a turn needs one logprob and one weights version per completion token"


@dataclass(frozen=True)
class Score:
    """What a reward says of a trajectory: `value` trains, `correct` is what accuracy counts.

    Example: Score(value=0.7, correct=False)
    """

    value: float
    correct: bool


@dataclass(frozen=True)
class Failure:
    """Why a trajectory could not be finished or graded. It is excluded from training and counted.

    Example: Failure(stage="grade", cause="reward 'exact_match' could not grade problem sort/train/17: ...")
    """

    stage: str
    cause: str


GREEDY_ATTEMPT = -1
"""The number of an attempt that was made without chance, as a baseline for the others of its group. It is not trained on."""


@dataclass(frozen=True)
class Trajectory:
    """One attempt at one problem. Exactly one of `score` and `failure` is set once it is graded.

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
        return sum(len(turn.completion_ids) for turn in self.turns)
