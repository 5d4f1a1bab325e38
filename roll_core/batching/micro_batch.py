"""Micro-batches: the tensors of one forward-backward pass. Shapes: R rows, T tokens a row, N trained tokens, S sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from roll_core.batching.packing import MicroBatchPlan, PackingLimits, plan_ranks
from roll_core.types.sample import Sample


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows. `segment_RT` numbers the sequences of a row from 1; 0 is padding. `predicted_by_N` is the flat
    position whose output predicts each trained token. The global counts are those of the whole optimizer step.

    Example (one row, sequences [8, 25 | 8, 2] and [9, 25 | 2], bars before the trained tokens):
    token_ids_RT=[[8, 25, 8, 2, 9, 25, 2]], position_ids_RT=[[0, 1, 2, 3, 0, 1, 2]], segment_RT=[[1, 1, 1, 1, 2, 2, 2]],
    predicted_by_N=[1, 2, 5], target_ids_N=[8, 2, 2], sequence_N=[0, 0, 1]
    """

    token_ids_RT: Tensor
    position_ids_RT: Tensor
    segment_RT: Tensor
    predicted_by_N: Tensor
    target_ids_N: Tensor
    advantages_N: Tensor
    sampler_logprobs_N: Tensor
    anchor_logprobs_N: Tensor | None
    reference_logprobs_N: Tensor | None
    sequence_N: Tensor
    num_sequences: int
    global_tokens: float
    global_sequences: float

    def with_signals(self, *, anchor: Tensor | None, reference: Tensor | None) -> "MicroBatch":
        return replace(self, anchor_logprobs_N=anchor, reference_logprobs_N=reference)

    def attention_mask(self) -> Tensor:
        """[R, 1, T, T], true where a token may look: earlier or same position, same sequence."""
        segment = self.segment_RT
        same_sequence = segment[:, None, :, None] == segment[:, None, None, :]
        num_tokens = segment.shape[1]
        return same_sequence & torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=segment.device).tril()

    def to(self, device: torch.device) -> "MicroBatch":
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def build_micro_batches(
    samples: Sequence[Sample],
    *,
    rank: int,
    num_ranks: int,
    limits: PackingLimits,
    skip_zero_advantages: bool,
) -> list[MicroBatch]:
    """This rank's share of one optimizer step. Skipped samples still count in the global denominators."""
    global_tokens = float(sum(s.num_trained_tokens for s in samples))
    global_sequences = float(len(samples))
    kept = [s for s in samples if s.pulls_the_policy] if skip_zero_advantages else list(samples)
    plan = plan_ranks([s.num_tokens for s in kept], num_ranks, limits)[rank]
    return [_assemble(kept, rows, global_tokens, global_sequences) for rows in plan]


def _assemble(samples: Sequence[Sample], rows: MicroBatchPlan, global_tokens: float, global_sequences: float) -> MicroBatch:
    # A blank micro-batch still runs a one-token forward pass, so that this rank takes part in every collective.
    width = max((sum(samples[i].num_tokens for i in row) for row in rows), default=1)
    token_ids, positions, segments = ([[0] * width for _ in rows or [()]] for _ in range(3))
    predicted_by, targets, advantages, sampler, sequence = [], [], [], [], []
    num_sequences = 0
    for row_number, row in enumerate(rows):
        start = 0
        for segment, index in enumerate(row, start=1):
            sample = samples[index]
            end = start + sample.num_tokens
            token_ids[row_number][start:end] = sample.token_ids
            positions[row_number][start:end] = range(sample.num_tokens)
            segments[row_number][start:end] = [segment] * sample.num_tokens
            trained = [t for t in range(sample.num_tokens) if sample.trained[t]]
            offset = row_number * width + start
            predicted_by += [offset + t - 1 for t in trained]
            targets += [sample.token_ids[t] for t in trained]
            advantages += [sample.advantages[t] for t in trained]
            sampler += [sample.sampler_logprobs[t] for t in trained]
            sequence += [num_sequences] * len(trained)
            num_sequences += 1
            start = end
    return MicroBatch(
        token_ids_RT=torch.tensor(token_ids),
        position_ids_RT=torch.tensor(positions),
        segment_RT=torch.tensor(segments),
        predicted_by_N=torch.tensor(predicted_by, dtype=torch.long),
        target_ids_N=torch.tensor(targets, dtype=torch.long),
        advantages_N=torch.tensor(advantages, dtype=torch.float32),
        sampler_logprobs_N=torch.tensor(sampler, dtype=torch.float32),
        anchor_logprobs_N=None,
        reference_logprobs_N=None,
        sequence_N=torch.tensor(sequence, dtype=torch.long),
        num_sequences=num_sequences,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
    )
