"""Samples: flat trainable token sequences, made from trajectories by `roll_core.batching`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One token sequence with everything a loss needs about it, one entry per token unless said otherwise.

    `trained` marks completion tokens; the other per-token entries are meaningful only there (zero elsewhere).

    Example (prompt of 2 tokens, completion of 2):
    Sample(token_ids=(8, 25, 8, 2), trained=(False, False, True, True), advantages=(0, 0, 0.5, 0.5),
    sampler_logprobs=(0, 0, -0.1, -0.2))
    """

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    advantages: tuple[float, ...]
    sampler_logprobs: tuple[float, ...]

    def __post_init__(self):
        assert len(self.token_ids) == len(self.trained) == len(self.advantages) == len(self.sampler_logprobs)
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

    @property
    def pulls_the_policy(self) -> bool:
        """False when every advantage is exactly zero, so that a pure policy-gradient loss has no gradient here."""
        return any(advantage != 0.0 for advantage in self.advantages)
