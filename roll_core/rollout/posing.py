"""Posing of problems: from a problem to the tokens of its prompt, or the reason why there are none.

A prompt that is too long, or that the chat template refuses, is a fault of the data. It costs its problem and never a run.
The rollout scheduler poses every problem that it draws; `planning/preflight.py` poses some before a run starts. The trainer
renders demonstrations here.
"""

import logging
from dataclasses import dataclass

from roll_core.errors import one_line
from roll_core.rollout.renderer import Renderer
from roll_core.types.trajectory import Demonstration, Failure, Problem

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptRoom:
    """Room for a prompt: what the model's positions leave beside the longest completion.

    Example: PromptRoom(max_positions=4096, max_new_tokens=1024).max_tokens == 3072
    """

    max_positions: int
    max_new_tokens: int

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt that can be posed."""
        return self.max_positions - self.max_new_tokens


def pose(problem: Problem, renderer: Renderer, room: PromptRoom) -> tuple[int, ...] | Failure:
    """Return the token ids of a problem's prompt, or the failure of a problem that cannot be posed."""
    try:
        prompt_ids = renderer.prompt(problem.messages)
    except Exception as error:  # boundary to chat templates, which raise what they like
        return Failure("pose", f"problem {problem.problem_id} cannot be rendered: {one_line(error)}")
    if not prompt_ids:
        return Failure("pose", f"problem {problem.problem_id} has an empty prompt")
    if len(prompt_ids) > room.max_tokens:
        return Failure(
            "pose",
            f"problem {problem.problem_id}: prompt too long: {len(prompt_ids)} tokens of {room.max_tokens} allowed "
            f"(model.max_positions {room.max_positions} less rollout.max_new_tokens {room.max_new_tokens})",
        )
    return prompt_ids


def render_demonstration(demonstration: Demonstration, renderer: Renderer) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the token ids of a demonstration's prompt and completion; None, with a warning, if it cannot be rendered."""
    try:
        return renderer.prompt(demonstration.problem.messages), renderer.completion(demonstration.completion)
    except Exception as error:  # boundary to chat templates, which raise what they like
        log.warning("the demonstration of problem %s is left out: %s", demonstration.problem.problem_id, one_line(error))
        return None
