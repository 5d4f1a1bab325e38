"""Micro-batches of given samples, with random or blank token data, for tests of losses and training backends."""

from collections.abc import Sequence

import torch

from roll_core.batching.micro_batch import GlobalCounts, MicroBatch, build_micro_batches
from roll_core.batching.packing import PackingLimits
from roll_core.batching.token_data import TokenData, blank_token_data
from roll_core.types.sample import Sample


def random_tokens(samples: Sequence[Sample], seed: int = 0) -> TokenData:
    """Random token data: one advantage per sample, sampler logprobs, values and returns per token.

    Each sample has two turns, each with half of its tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([s.num_trained_tokens for s in samples])
    total = int(lengths.sum())
    half_N = torch.cat([(torch.arange(n) >= (n + 1) // 2).long() for n in lengths.tolist()])
    return TokenData(
        sampler_logprobs_N=-5 * torch.rand(total, generator=generator),
        turn_N=2 * torch.arange(len(samples)).repeat_interleave(lengths) + half_N,
        advantages_N=torch.randn(len(samples), generator=generator).repeat_interleave(lengths),
        weights_N=torch.ones(total),
        is_fresh_N=torch.ones(total, dtype=torch.bool),
        values_N=torch.randn(total, generator=generator),
        returns_N=torch.randn(total, generator=generator),
    )


def cut(
    samples: Sequence[Sample],
    limits: PackingLimits,
    tokens: TokenData | None = None,
    *,
    chosen: Sequence[int] | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[MicroBatch]:
    """Build one rank's micro-batches of one optimizer step over all samples, or over those with indices `chosen`."""
    num_tokens = sum(s.num_trained_tokens for s in samples)
    return build_micro_batches(
        samples,
        tokens or blank_token_data(num_tokens),
        chosen=range(len(samples)) if chosen is None else chosen,
        counts=GlobalCounts(num_tokens, len(samples)),
        rank=rank,
        num_ranks=num_ranks,
        limits=limits,
    )
