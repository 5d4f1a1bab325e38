"""Logprobs, entropies and divergences of the trained tokens of a micro-batch, one chunk of logits at a time.

Only positions that predict a trained token reach the output layer. A chunk's logits occupy one buffer that is overwritten
step by step. The backward pass computes them anew, so that none are kept. The vocabulary may be sharded over ranks: each
rank computes the logits of its slice, and the scores are all-reduced.

Shapes: N trained tokens, C tokens of a chunk, H hidden features, V vocabulary, or a rank's slice of it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from roll_core.batching.micro_batch import MicroBatch


class Scored(NamedTuple):
    """Scores of trained tokens. `divergences_N` is KL(policy || reference) over the full vocabulary; None without a
    reference."""

    logprobs_N: Tensor
    entropies_N: Tensor
    divergences_N: Tensor | None


@dataclass(frozen=True)
class ReferenceStates:
    """Last hidden states of another policy at the trained tokens of a micro-batch, and its output layer: enough to compute
    its distribution over the vocabulary."""

    hidden_NH: Tensor
    output_VH: Tensor


@dataclass(frozen=True)
class Vocabulary:
    """Slice of the vocabulary whose logits this rank computes, beginning with token `start`. Without a `group` it is the
    whole vocabulary."""

    start: int = 0
    group: dist.ProcessGroup | None = None

    def sum(self, part: Tensor) -> Tensor:
        """All-reduce `part` by sum, in place, over the ranks that share the vocabulary; return it."""
        if self.group is not None:
            dist.all_reduce(part, group=self.group)
        return part

    def max(self, part: Tensor) -> Tensor:
        """All-reduce `part` by maximum, in place, over the ranks that share the vocabulary; return it."""
        if self.group is not None:
            dist.all_reduce(part, dist.ReduceOp.MAX, group=self.group)
        return part

    def logsumexp(self, logits_CV: Tensor) -> Tensor:
        """Log-sum-exp [C, 1] of the logits over the whole vocabulary."""
        part_C = logits_CV.logsumexp(1, keepdim=True)
        if self.group is None:
            return part_C
        highest_C = self.max(part_C.clone())
        return highest_C + self.sum((part_C - highest_C).exp()).log()

    def locate(self, targets_C: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the columns [C, 1] of targets in this rank's slice of `size` tokens, and whether each target is in the
        slice. A target outside the slice gets an arbitrary column."""
        column_C = targets_C[:, None] - self.start
        is_here_C = (column_C >= 0) & (column_C < size)
        return column_C.clamp(0, size - 1), is_here_C


WHOLE = Vocabulary()
"""Whole vocabulary on one rank."""


class TokenScorer(nn.Module):
    """Model whose forward pass gives logprobs, entropies and divergences of the trained tokens. It is a module of its own,
    so that sharding hooks see one forward call around everything that needs weights."""

    def __init__(self, model: PreTrainedModel, temperature: float, chunk_tokens: int):
        super().__init__()
        assert model.get_output_embeddings().bias is None, "an output layer with a bias is not supported"
        self.model = model
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

    def forward(self, micro_batch: MicroBatch, reference: ReferenceStates | None = None) -> Scored:
        """Score the trained tokens of a micro-batch."""
        hidden_RTH = last_hidden_states(self.model.base_model, micro_batch)
        hidden_NH = select_rows(hidden_RTH.flatten(0, 1), micro_batch.predicted_by_N)
        output_VH = self.model.get_output_embeddings().weight
        if not len(hidden_NH):
            return empty_scores(hidden_RTH, output_VH, reference)
        return score_tokens(
            hidden_NH, output_VH, micro_batch.target_ids_N, reference, self._temperature, self._chunk_tokens, WHOLE
        )

    def reference_states(self, micro_batch: MicroBatch) -> ReferenceStates:
        """Compute the states by which another policy is compared with this one over the full vocabulary."""
        hidden_RTH = last_hidden_states(self.model.base_model, micro_batch)
        hidden_NH = select_rows(hidden_RTH.flatten(0, 1), micro_batch.predicted_by_N)
        return ReferenceStates(hidden_NH, self.model.get_output_embeddings().weight)


def score_tokens(
    hidden_NH: Tensor,
    output_VH: Tensor,
    targets_N: Tensor,
    reference: ReferenceStates | None,
    temperature: float,
    chunk_tokens: int,
    vocabulary: Vocabulary,
) -> Scored:
    """Score trained tokens from their hidden states, chunk by chunk. With a sharded vocabulary the gradient of `hidden_NH`
    covers this rank's slice only: the caller's backward pass must sum it over ranks."""
    scores = ScoreTokens.apply(
        hidden_NH,
        output_VH,
        targets_N,
        None if reference is None else reference.hidden_NH,
        None if reference is None else reference.output_VH,
        temperature,
        # At least four chunks: the logits of a whole micro-batch never exist at once, however small it is.
        min(chunk_tokens, -(-len(hidden_NH) // 4)),
        vocabulary,
    )
    return Scored(*scores)


def empty_scores(hidden: Tensor, output_VH: Tensor, reference: ReferenceStates | None) -> Scored:
    """Scores of no tokens. They have a zero gradient for every weight, so that all ranks run the same backward
    collectives."""
    nothing = ((hidden.sum() + output_VH.sum()) * 0.0).float().expand(0)
    return Scored(nothing, nothing, nothing if reference is not None else None)


def last_hidden_states(base_model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Run the model without its output layer and return the last hidden states [R, T, H]."""
    embedded_RTH = base_model.get_input_embeddings()(micro_batch.token_ids_RT)
    device = embedded_RTH.device.type
    if torch.is_autocast_enabled(device):
        # The residual stream keeps the dtype of the embeddings: in float32 every layer would move twice the bytes.
        embedded_RTH = embedded_RTH.to(torch.get_autocast_dtype(device))
    return base_model(
        inputs_embeds=embedded_RTH,
        attention_mask=micro_batch.attention_mask(),
        position_ids=micro_batch.position_ids_RT,
        use_cache=False,
    ).last_hidden_state


def select_rows(states_XH: Tensor, index_N: Tensor) -> Tensor:
    """Rows [N, H] of `states_XH` by index, repeats allowed: completions that share a prompt share its last state.

    As a lookup in an embedding table, because its backward pass adds repeats in their order. That of `states_XH[index_N]`
    adds with atomics on several CPU threads, and that of `index_select` on GPUs: in any order.
    """
    return functional.embedding(index_N, states_XH)


class ScoreTokens(torch.autograd.Function):
    """Fused output layer, softmax and scores: log p(target), H = -sum p log p and D = sum p (log p - log q), with p the
    policy's and q the reference's distribution. Only log-normalisers are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        output_VH: Tensor,
        targets_N: Tensor,
        reference_NH: Tensor | None,
        reference_VH: Tensor | None,
        temperature: float,
        chunk_tokens: int,
        vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        arithmetic = _Arithmetic.current(output_VH, temperature, vocabulary)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            scores, normalizers_N = _score_chunks(
                hidden_NH, output_VH, targets_N, reference_NH, reference_VH, arithmetic, chunk_tokens
            )
        ctx.save_for_backward(
            hidden_NH, output_VH, targets_N, reference_NH, reference_VH, normalizers_N, scores[1], scores[2]
        )
        ctx.arithmetic, ctx.chunk_tokens = arithmetic, chunk_tokens
        return scores

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropies_N: Tensor, grad_divergences_N: Tensor) -> tuple:
        hidden_NH, output_VH, targets_N, reference_NH, reference_VH, normalizers_N, entropies_N, divergences_N = (
            ctx.saved_tensors
        )
        if grad_logprobs_N is None and grad_entropies_N is None and grad_divergences_N is None:
            return (None,) * 8
        arithmetic: _Arithmetic = ctx.arithmetic
        output = output_VH.to(arithmetic.dtype)
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_output_VH = torch.zeros_like(output_VH, dtype=arithmetic.wide) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_NH), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            hidden_CH = hidden_NH[chunk].to(arithmetic.dtype)
            # d log p(target) / d logits = onehot - p;  dH = -p (log p + H);  dD = p (log p - log q - D)
            slope_CV = arithmetic.logits(hidden_CH, output).sub_(normalizers_N[chunk, None])
            if grad_entropies_N is None and grad_divergences_N is None:
                slope_CV.exp_().mul_(-grad_logprobs_N[chunk, None])
            else:
                probabilities_CV, constant_C = slope_CV.exp(), torch.zeros_like(normalizers_N[chunk])
                per_logprob_C = torch.zeros_like(constant_C)
                if grad_logprobs_N is not None:
                    constant_C -= grad_logprobs_N[chunk]
                if grad_entropies_N is not None:
                    per_logprob_C -= grad_entropies_N[chunk]
                    constant_C -= grad_entropies_N[chunk] * entropies_N[chunk]
                if grad_divergences_N is not None:
                    per_logprob_C += grad_divergences_N[chunk]
                    constant_C -= grad_divergences_N[chunk] * divergences_N[chunk]
                slope_CV.mul_(per_logprob_C[:, None]).add_(constant_C[:, None])
                if grad_divergences_N is not None:
                    other_CV = arithmetic.logprobs(reference_NH[chunk], reference_VH)
                    slope_CV.sub_(other_CV.mul_(grad_divergences_N[chunk, None]))
                slope_CV.mul_(probabilities_CV)
            if grad_logprobs_N is not None:
                column_C, is_here_C = arithmetic.vocabulary.locate(targets_N[chunk], slope_CV.shape[1])
                slope_CV.scatter_add_(1, column_C, torch.where(is_here_C, grad_logprobs_N[chunk, None], 0.0))
            slope = slope_CV.div_(arithmetic.temperature).to(arithmetic.dtype)
            grad_hidden_NH[chunk] = (slope @ output).to(grad_hidden_NH.dtype)
            if grad_output_VH is not None:
                grad_output_VH += slope.T @ hidden_CH
        grad_output = None if grad_output_VH is None else grad_output_VH.to(output_VH.dtype)
        return grad_hidden_NH, grad_output, None, None, None, None, None, None


def _score_chunks(
    hidden_NH: Tensor,
    output_VH: Tensor,
    targets_N: Tensor,
    reference_NH: Tensor | None,
    reference_VH: Tensor | None,
    arithmetic: "_Arithmetic",
    chunk_tokens: int,
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the scores and the log-normalisers. A chunk has one [C, V] buffer: logits, then probabilities, then -p log
    p."""
    output, vocabulary = output_VH.to(arithmetic.dtype), arithmetic.vocabulary
    logprobs, entropies, normalizers, divergences = [], [], [], []
    for start in range(0, len(hidden_NH), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        buffer_CV = arithmetic.logits(hidden_NH[chunk], output)
        column_C, is_here_C = vocabulary.locate(targets_N[chunk], buffer_CV.shape[1])
        target_C = vocabulary.sum(torch.where(is_here_C, buffer_CV.gather(1, column_C), 0.0)).squeeze(1)
        highest_C = vocabulary.max(buffer_CV.amax(1, keepdim=True))
        total_C = vocabulary.sum(buffer_CV.sub_(highest_C).exp_().sum(1, keepdim=True))
        normalizer_C = (highest_C + total_C.log()).squeeze(1)
        probabilities_CV = buffer_CV.div_(total_C)
        expected_C = None
        if reference_NH is not None and reference_VH is not None:
            expected_C = vocabulary.sum(_expected(probabilities_CV, arithmetic.logprobs(reference_NH[chunk], reference_VH)))
        entropy_C = vocabulary.sum(torch.special.entr(probabilities_CV, out=probabilities_CV).sum(1))
        if expected_C is not None:
            divergences.append(-entropy_C - expected_C)
        logprobs.append(target_C - normalizer_C)
        entropies.append(entropy_C)
        normalizers.append(normalizer_C)
    scores = torch.cat(logprobs), torch.cat(entropies), torch.cat(divergences) if divergences else None
    return scores, torch.cat(normalizers)


@dataclass(frozen=True)
class _Arithmetic:
    """Dtypes of the computation: products in `dtype` (autocast's, where autocast is on), everything else in `wide`, at least
    float32."""

    dtype: torch.dtype
    wide: torch.dtype
    temperature: float
    vocabulary: Vocabulary

    @staticmethod
    def current(weight: Tensor, temperature: float, vocabulary: Vocabulary) -> "_Arithmetic":
        """Build the arithmetic for an output layer under the autocast state in force."""
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        return _Arithmetic(dtype, torch.promote_types(dtype, torch.float32), temperature, vocabulary)

    def logits(self, hidden_CH: Tensor, output_VH: Tensor) -> Tensor:
        """Return logits [C, V], divided by the temperature, in a new buffer that the caller may overwrite."""
        return (hidden_CH.to(self.dtype) @ output_VH.T).to(self.wide).div_(self.temperature)

    def logprobs(self, hidden_CH: Tensor, output_VH: Tensor) -> Tensor:
        logits_CV = self.logits(hidden_CH, output_VH.to(self.dtype))
        return logits_CV.sub_(self.vocabulary.logsumexp(logits_CV))


def _expected(probabilities_CV: Tensor, values_CV: Tensor) -> Tensor:
    """Return sum p v for each token, without a buffer for the products."""
    return torch.bmm(probabilities_CV[:, None, :], values_CV[:, :, None]).flatten()
