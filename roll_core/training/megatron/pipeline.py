"""Micro-batches through Megatron's pipeline schedules, and their scoring on the last stage.

With context parallelism rows are split between ranks. Each rank has a part of every row and scores the tokens that its part
predicts; then the scores are gathered on all of them.

Shapes as in `scorer.py`; R rows, T tokens of a row on this rank, n trained tokens that this rank scores.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from roll_core.batching.micro_batch import MicroBatch
from roll_core.training.megatron.model import PolicyModel
from roll_core.training.megatron.world import on_last_stage
from roll_core.training.scorer import ReferenceStates, Scored, Vocabulary, empty_scores, score_tokens, select_rows

Chunks = Sequence[torch.nn.Module]
"""Model chunks of this rank, bare or wrapped for training."""


@dataclass(frozen=True)
class Scoring:
    """Settings for scoring tokens with a policy."""

    vocabulary_size: int
    temperature: float
    chunk_tokens: int

    def score(self, model: PolicyModel, part: "RowPart", reference: ReferenceStates | None, hidden: Tensor) -> Scored:
        """Score all trained tokens of a micro-batch from this rank's last hidden states."""
        hidden_nH, vocabulary = part.predicting_states(hidden), self._vocabulary(model)
        output_VH = self._without_padding_rows(model.output_weight, vocabulary)
        scored = (
            score_tokens(hidden_nH, output_VH, part.targets_n, reference, self.temperature, self.chunk_tokens, vocabulary)
            if len(hidden_nH)
            else empty_scores(hidden, output_VH, reference)
        )
        divergences_n = scored.divergences_N
        return Scored(
            part.gather_scores(scored.logprobs_N),
            part.gather_scores(scored.entropies_N),
            None if divergences_n is None else part.gather_scores(divergences_n),
        )

    def reference(self, model: PolicyModel, part: "RowPart", hidden: Tensor) -> ReferenceStates:
        """States by which another policy is compared with this one, for the tokens that this rank scores."""
        output_VH = self._without_padding_rows(model.output_weight, self._vocabulary(model))
        return ReferenceStates(part.predicting_states(hidden), output_VH)

    def _vocabulary(self, model: PolicyModel) -> Vocabulary:
        group = parallel_state.get_tensor_model_parallel_group()
        return Vocabulary(group.rank() * len(model.output_weight), group) if group.size() > 1 else Vocabulary()

    def _without_padding_rows(self, weight: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Drop the rows that only pad the vocabulary to a multiple of the tensor-parallel ranks."""
        return weight[: self.vocabulary_size - vocabulary.start]


class RowPart:
    """Part of a micro-batch's rows that this rank computes. All context-parallel ranks have the same number of tokens of
    each row."""

    def __init__(self, micro_batch: MicroBatch, device: torch.device):
        self.batch = batch = micro_batch.to(device)
        self._group = parallel_state.get_context_parallel_group()
        width, parts, number = batch.token_ids_RT.shape[1], self._group.size(), self._group.rank()
        assert width % parts == 0, f"rows of {width} tokens cannot be shared out between {parts} ranks"
        here = slice(number * (width // parts), (number + 1) * (width // parts))
        self.token_ids_RT = batch.token_ids_RT[:, here]
        self.position_ids_RT = batch.position_ids_RT[:, here]
        is_plain = parts == 1 and micro_batch.has_one_sequence_per_row
        self.mask = None if is_plain else batch.attention_mask()[:, :, here]
        # Sequence parallelism: between attentions, tensor-parallel ranks split the tokens, too.
        tensor = parallel_state.get_tensor_model_parallel_group()
        self.routing_notes_RTC = batch.routing_notes()[:, here].chunk(tensor.size(), dim=1)[tensor.rank()]
        row_N, column_N = batch.predicted_by_N // width, batch.predicted_by_N % width
        self._token_index_n = ((column_N >= here.start) & (column_N < here.stop)).nonzero().flatten()
        row_n, column_n = row_N[self._token_index_n], column_N[self._token_index_n] - here.start
        self._predicted_by_n = column_n * len(batch.token_ids_RT) + row_n  # Megatron's hidden states are [T, R, H]
        self._num_tokens = len(batch.target_ids_N)
        self.targets_n = batch.target_ids_N[self._token_index_n]

    def predicting_states(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, H] that predict the trained tokens which this rank scores."""
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return select_rows(hidden.flatten(0, 1), self._predicted_by_n)

    def gather_scores(self, scores_n: Tensor) -> Tensor:
        """Gather the scores of all trained tokens (N) from the context-parallel ranks."""
        if self._group.size() == 1:
            return scores_n
        return _GatherScores.apply(scores_n, self._token_index_n, self._num_tokens, self._group)


class _GatherScores(torch.autograd.Function):
    """Sum of scores over ranks whose backward pass does not sum: every rank computes the same loss from all scores, and
    takes the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, scores_n: Tensor, token_index_n: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(token_index_n)
        scores_N = scores_n.new_zeros(size)
        scores_N[token_index_n] = scores_n
        dist.all_reduce(scores_N, group=group)
        return scores_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_N[ctx.saved_tensors[0]], None, None, None


OnLastStage = Callable[[PolicyModel, RowPart, Tensor, int], Any]
"""Function called on the last pipeline stage with the model, the row part, the last hidden states and the number of a
micro-batch."""


def forward(chunks: Chunks, micro_batches: Sequence[MicroBatch], finish: OnLastStage, device: torch.device) -> list[Any]:
    """Run micro-batches without gradients. Return what `finish` returns for each on the last stage, and an empty list on the
    others."""
    with torch.no_grad():
        return _run(chunks, micro_batches, finish, device, forward_only=True)[: len(micro_batches)]


def forward_backward(
    chunks: Chunks, micro_batches: Sequence[MicroBatch], compute_loss: OnLastStage, device: torch.device
) -> None:
    """Run micro-batches forward and backward, and accumulate the gradients of the losses that `compute_loss` returns."""

    def loss(model: PolicyModel, part: RowPart, hidden: Tensor, number: int) -> tuple[Tensor, Tensor, None]:
        # Zero tokens: Megatron must not divide by their number, since losses have global denominators.
        return compute_loss(model, part, hidden, number), torch.zeros((), dtype=torch.int, device=hidden.device), None

    _run(chunks, micro_batches, loss, device, forward_only=False)


def _run(
    chunks: Chunks,
    micro_batches: Sequence[MicroBatch],
    finish: Callable[..., Any],
    device: torch.device,
    *,
    forward_only: bool,
) -> list[Any]:
    padded = _padded_to_stages(micro_batches, len(chunks))

    def step(batches: Iterator[tuple[int, MicroBatch]], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        number, micro_batch = next(batches)
        part = RowPart(micro_batch, device)
        hidden = chunk(part.token_ids_RT, part.position_ids_RT, part.mask, padding_mask=part.routing_notes_RTC)

        def finished(hidden: Tensor, **_: Any) -> Any:
            if number >= len(micro_batches):
                return _no_loss(hidden, forward_only=forward_only)
            return finish(_unwrapped(chunk), part, hidden, number)

        return hidden, finished

    batches = [iter(enumerate(padded)) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(padded),
        seq_length=1,  # not used: stages send each other the shapes
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _no_loss(hidden: Tensor, *, forward_only: bool) -> Any:
    """Result of a blank micro-batch: nothing to score, no gradients, on every stage."""
    return None if forward_only else (hidden.sum() * 0.0, torch.zeros((), dtype=torch.int, device=hidden.device), None)


def _padded_to_stages(micro_batches: Sequence[MicroBatch], num_chunks: int) -> list[MicroBatch]:
    """Append blank micro-batches up to a multiple of the stages. The interleaved schedule (several chunks a stage) requires
    it."""
    if num_chunks == 1:
        return list(micro_batches)
    missing = -len(micro_batches) % parallel_state.get_pipeline_model_parallel_world_size()
    return [*micro_batches, *[micro_batches[-1].blank()] * missing]


def broadcast_from_last_stage(
    per_micro_batch: list[Tensor], micro_batches: Sequence[MicroBatch], device: torch.device
) -> list[Tensor]:
    """Broadcast the scores (N) of each micro-batch from the last pipeline stage to every stage. Return them on the CPU."""
    sizes = [len(each.target_ids_N) for each in micro_batches]
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return [each.cpu() for each in per_micro_batch]
    flat = torch.cat(per_micro_batch) if on_last_stage() else torch.empty(sum(sizes), device=device)
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return list(flat.cpu().split(sizes))


def _unwrapped(chunk: torch.nn.Module) -> PolicyModel:
    model = chunk if isinstance(chunk, PolicyModel) else chunk.module
    assert isinstance(model, PolicyModel)
    return model
