"""Samples: flat trainable token sequences, made from trajectories by `roll_core.batching`."""

from dataclasses import dataclass

from roll_core.types.routing import RoutedExperts


@dataclass(frozen=True)
class Sample:
    """One token sequence, and which of its tokens are trained: those of completions, not of prompts and observations. What a
    loss needs to know about the trained tokens is in `TokenData`, for all samples of a batch end to end.

    Example (prompt of 2 tokens, completion of 2): Sample(token_ids=(8, 25, 8, 2), trained=(False, False, True, True))
    """

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    experts: RoutedExperts | None = None
    """Which experts its tokens went to in the engine, as far as that is known."""

    def __post_init__(self):
        assert len(self.token_ids) == len(self.trained)
        assert not self.trained[0], "the first token of a sequence has no prediction to train"
        assert True in self.trained, "a sample without a trained token has nothing to teach"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first trained one: what the samples of a group have in common."""
        return self.trained.index(True)

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.trained)
