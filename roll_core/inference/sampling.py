"""Tokens drawn with each request's own random numbers: what shares a batch does not matter, nor where a request was
interrupted. Every engine that draws for itself draws like this, so that the same logits give the same tokens.

Shapes: B sequences, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from roll_core.inference.randomness import uniforms


def draw(logprobs_BV: Tensor, seeds_B: np.ndarray, places_B: np.ndarray) -> Tensor:
    """One token a row (B) by inverting its distribution at the random number of its seed and its place in the completion."""
    uniforms_B = torch.from_numpy(uniforms(seeds_B, places_B)).to(logprobs_BV.device)
    cumulative_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    drawn_B1 = torch.searchsorted(cumulative_BV, uniforms_B[:, None] * cumulative_BV[:, -1:], right=True)
    return drawn_B1.clamp(max=logprobs_BV.shape[-1] - 1).squeeze(1)
