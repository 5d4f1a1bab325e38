"""Routing of tokens to experts, as an engine recorded it, for routing replay in the trainer. Torch-free.

Shapes: t tokens, C choices per token (layers x experts per token).
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

NOT_RECORDED = -1
"""Expert index that stands for a routing choice that was not recorded, or for a layer without experts."""


@dataclass(frozen=True)
class RoutedExperts:
    """Expert indices of the first tokens of a context, packed into bytes token by token and layer by layer.

    The largest index that fits `width` bytes stands for NOT_RECORDED. Later tokens of the context have no entry. The last
    token of a completion never has one, since the engine did not compute it.

    Example (one token, two layers, two experts each of eight): RoutedExperts(b"\\x02\\x07\\x00\\x01", per_token=4, width=1)
    """

    numbers: bytes
    """Packed little-endian expert indices."""
    per_token: int
    """Number of indices per token: layers x experts per token."""
    width: int
    """Bytes per index, 1 or 2."""

    def __post_init__(self):
        assert self.width in (1, 2)
        assert len(self.numbers) % self._token_bytes == 0, "tokens have as many experts each"

    @classmethod
    def from_array(cls, experts_tC: NDArray[np.integer], num_experts: int) -> Self:
        """Pack expert indices, or NOT_RECORDED, of a model with `num_experts` experts per layer."""
        width = 1 if num_experts < 2**8 else 2
        return cls(experts_tC.astype(f"<u{width}").tobytes(), experts_tC.shape[1], width)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have an entry."""
        return len(self.numbers) // self._token_bytes

    def as_array(self, tokens: slice = slice(None)) -> NDArray[np.int16]:
        """Unpack the expert indices [t, C] of some tokens; NOT_RECORDED where they are unknown."""
        found = np.frombuffer(self.numbers, dtype=f"<u{self.width}").reshape(-1, self.per_token)[tokens]
        is_recorded = found != 2 ** (8 * self.width) - 1
        return np.where(is_recorded, found.astype(np.int16), np.int16(NOT_RECORDED))

    def extended_with(self, later: Self) -> Self:
        """Return a copy that also has the later tokens of a longer context, which starts with the same tokens.

        Existing entries win: the completion was sampled with them. An engine that recomputes the prefix when it resumes may
        route it differently.
        """
        assert (later.per_token, later.width) == (self.per_token, self.width), "recorded by another model"
        return type(self)(self.numbers + later.numbers[len(self.numbers) :], self.per_token, self.width)

    @property
    def _token_bytes(self) -> int:
        return self.per_token * self.width


def merge_routing(known: RoutedExperts | None, later: RoutedExperts | None) -> RoutedExperts | None:
    """Merge the records of a context's beginning and of the whole context; either may be missing."""
    if known is None or later is None:
        return known or later
    return known.extended_with(later)
