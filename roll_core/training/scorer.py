"""Logprobs and entropies of the trained tokens of a micro-batch, without ever holding logits of all of them.

Only positions that predict a trained token reach the output layer, a chunk at a time; in training a chunk's logits are
recomputed in the backward pass instead of being kept. Shapes: N trained tokens, H hidden, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from roll_core.batching.micro_batch import MicroBatch


class TokenScorer(nn.Module):
    """A module of its own, so that sharding hooks see one forward call around everything that needs weights."""

    def __init__(self, model: PreTrainedModel, temperature: float, chunk_tokens: int):
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

    def forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        hidden_RTH = self.model.base_model(
            input_ids=micro_batch.token_ids_RT,
            attention_mask=micro_batch.attention_mask(),
            position_ids=micro_batch.position_ids_RT,
            use_cache=False,
        ).last_hidden_state
        hidden_NH = hidden_RTH.flatten(0, 1)[micro_batch.predicted_by_N]
        if not len(hidden_NH):
            # Nothing to score; the zero still hangs on every weight, so that all ranks run the same backward collectives.
            zero = (hidden_RTH.sum() + self.model.get_output_embeddings()(hidden_RTH[0, :1]).sum()) * 0.0
            return zero.float().expand(0), zero.float().expand(0)
        chunks = zip(hidden_NH.split(self._chunk_tokens), micro_batch.target_ids_N.split(self._chunk_tokens), strict=True)
        scored = [self._score_chunk(hidden, targets) for hidden, targets in chunks]
        return torch.cat([logprobs for logprobs, _ in scored]), torch.cat([entropies for _, entropies in scored])

    def _score_chunk(self, hidden_CH: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            return checkpoint(self._score, hidden_CH, targets_C, use_reentrant=False, preserve_rng_state=False)
        return self._score(hidden_CH, targets_C)

    def _score(self, hidden_CH: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = self.model.get_output_embeddings()(hidden_CH).float() / self._temperature
        log_normalizer_C = logits_CV.logsumexp(dim=-1)
        logprobs_C = logits_CV.gather(1, targets_C[:, None]).squeeze(1) - log_normalizer_C
        probabilities_CV = (logits_CV - log_normalizer_C[:, None]).exp()
        entropies_C = log_normalizer_C - (probabilities_CV * logits_CV).sum(dim=-1)
        return logprobs_C, entropies_C
