"""Type of samples: flat trainable token sequences, which `roll_core.batching` makes from trajectories."""

from dataclasses import dataclass

from roll_core.types.routing import RoutedExperts


@dataclass(frozen=True)
class Sample:
    """One token sequence with a mask of its trained tokens: completions are trained, prompts and observations are not.

    `TokenData` holds the loss inputs of the trained tokens, concatenated over all samples of a batch.

    Example (prompt of 2 tokens, completion of 2): Sample(token_ids=(8, 25, 8, 2), trained=(False, False, True, True))
    """

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    experts: RoutedExperts | None = None
    """Experts that the engine routed the tokens to; None if it did not record them."""

    def __post_init__(self):
        assert len(self.token_ids) == len(self.trained)
        assert not self.trained[0], "the first token of a sequence has no prediction to train"
        assert True in self.trained, "a sample without a trained token has nothing to teach"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the first trained one. The samples of a group share these tokens."""
        return self.trained.index(True)

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.trained)
