"""Which experts tokens went to in the engine that produced them, so that a trainer can send them to the same. Torch-free."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

NOT_RECORDED = -1
"""In place of an expert: a token whose choice is not known, or a layer without experts."""


@dataclass(frozen=True)
class RoutedExperts:
    """Of the first tokens of a context, token by token, layer by layer: `per_token` numbers of `width` bytes each. What the
    largest number stands for is not recorded. Tokens beyond those are not, either: the newest of a completion never is,
    since nobody has computed it.

    Example (one token, two layers, two experts each of eight): RoutedExperts(b"\\x02\\x07\\x00\\x01", per_token=4, width=1)
    """

    numbers: bytes
    per_token: int
    width: int

    def __post_init__(self):
        assert self.width in (1, 2)
        assert len(self.numbers) % self._token_bytes == 0, "tokens have as many experts each"

    @classmethod
    def of(cls, experts_tC: NDArray[np.integer], num_experts: int) -> Self:
        """From numbers of experts [tokens, layers x experts a token], or NOT_RECORDED."""
        width = 1 if num_experts < 2**8 else 2
        return cls(experts_tC.astype(f"<u{width}").tobytes(), experts_tC.shape[1], width)

    @property
    def num_tokens(self) -> int:
        return len(self.numbers) // self._token_bytes

    def as_array(self, tokens: slice = slice(None)) -> NDArray[np.int16]:
        """Numbers of experts of these tokens [tokens, layers x experts a token], or NOT_RECORDED."""
        found = np.frombuffer(self.numbers, dtype=f"<u{self.width}").reshape(-1, self.per_token)[tokens]
        is_recorded = found != 2 ** (8 * self.width) - 1
        return np.where(is_recorded, found.astype(np.int16), np.int16(NOT_RECORDED))

    def extended_by(self, later: Self) -> Self:
        """With those of a longer context that begins with the same tokens. What was known before stays: tokens were sampled
        after it, however the engine computes them when it is asked to go on."""
        assert (later.per_token, later.width) == (self.per_token, self.width), "recorded by another model"
        return type(self)(self.numbers + later.numbers[len(self.numbers) :], self.per_token, self.width)

    @property
    def _token_bytes(self) -> int:
        return self.per_token * self.width


def extended(known: RoutedExperts | None, later: RoutedExperts | None) -> RoutedExperts | None:
    """What is known of a context, by what was said of its beginning and of all of it."""
    if known is None or later is None:
        return known or later
    return known.extended_by(later)
