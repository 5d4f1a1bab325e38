"""Token sampling with random numbers of each request's own. Results depend neither on the batch nor on interruptions.

All engines that sample themselves use this function, so that equal logits give equal tokens.

Shapes: B sequences, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from roll_core.inference.randomness import uniforms


def sample_tokens(logprobs_BV: Tensor, seeds_B: np.ndarray, indices_B: np.ndarray) -> Tensor:
    """Sample one token per row [B] by inverse transform sampling, with the random number of its seed and its index in the
    completion."""
    uniforms_B = torch.from_numpy(uniforms(seeds_B, indices_B)).to(logprobs_BV.device)
    cumulative_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    drawn_B1 = torch.searchsorted(cumulative_BV, uniforms_B[:, None] * cumulative_BV[:, -1:], right=True)
    return drawn_B1.clamp(max=logprobs_BV.shape[-1] - 1).squeeze(1)
