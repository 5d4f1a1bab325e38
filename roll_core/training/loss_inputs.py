"""Assembly of a loss's inputs from a micro-batch and its scores; shared by all backends."""

import torch

from roll_core.algorithms.inputs import LossInputs
from roll_core.batching.micro_batch import MicroBatch
from roll_core.training.scorer import Scored


def loss_inputs(batch: MicroBatch, scored: Scored) -> LossInputs:
    """Combine a micro-batch and its scores into the inputs of a loss."""
    tokens, logprobs_N = batch.tokens, scored.logprobs_N
    return LossInputs(
        policy_logprobs_N=logprobs_N,
        entropies_N=scored.entropies_N,
        # Without anchor logprobs there is only one optimizer step, in which the policy is its own anchor.
        anchor_logprobs_N=logprobs_N.detach() if tokens.anchor_logprobs_N is None else tokens.anchor_logprobs_N,
        sampler_logprobs_N=tokens.sampler_logprobs_N,
        advantages_N=tokens.advantages_N,
        weights_N=tokens.weights_N,
        mask_N=torch.ones_like(logprobs_N),
        sequence_N=batch.sequence_N,
        num_sequences=batch.num_sequences,
        turn_N=tokens.turn_N,
        num_turns=batch.num_turns,
        global_tokens=batch.counts.tokens,
        global_sequences=batch.counts.sequences,
        reference_logprobs_N=tokens.reference_logprobs_N,
        divergences_N=scored.divergences_N,
        is_fresh_N=tokens.is_fresh_N,
    )
