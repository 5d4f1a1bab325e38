"""Micro-batches through Megatron's schedules, and what is scored of them at the end of the pipeline.

Rows may be shared out between ranks (context parallel): each has a part of every row and scores the tokens that it predicts;
then all of them know all scores. Shapes as in `scorer.py`; R rows, T tokens of a row on this rank.
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
from roll_core.training.scorer import ReferenceStates, Scored, Vocabulary, nothing_scored, score_tokens

Chunks = Sequence[torch.nn.Module]
"""Those of this rank, as they are or wrapped for training."""


@dataclass(frozen=True)
class Scoring:
    """How tokens are scored by a policy."""

    vocabulary_size: int
    temperature: float
    chunk_tokens: int

    def score(self, model: PolicyModel, part: "RowPart", reference: ReferenceStates | None, hidden: Tensor) -> Scored:
        """Of all trained tokens of a micro-batch, from this rank's last hidden states."""
        hidden_nH, vocabulary = part.states_of_targets(hidden), self._vocabulary(model)
        output_VH = self._rows_that_count(model.output_weight, vocabulary)
        scored = (
            score_tokens(hidden_nH, output_VH, part.targets_n, reference, self.temperature, self.chunk_tokens, vocabulary)
            if len(hidden_nH)
            else nothing_scored(hidden, output_VH, reference)
        )
        divergences_n = scored.divergences_N
        return Scored(
            part.of_all_parts(scored.logprobs_N),
            part.of_all_parts(scored.entropies_N),
            None if divergences_n is None else part.of_all_parts(divergences_n),
        )

    def reference(self, model: PolicyModel, part: "RowPart", hidden: Tensor) -> ReferenceStates:
        """What another policy needs to be compared with this one, for the tokens that this rank scores."""
        output_VH = self._rows_that_count(model.output_weight, self._vocabulary(model))
        return ReferenceStates(part.states_of_targets(hidden), output_VH)

    def _vocabulary(self, model: PolicyModel) -> Vocabulary:
        group = parallel_state.get_tensor_model_parallel_group()
        return Vocabulary(group.rank() * len(model.output_weight), group) if group.size() > 1 else Vocabulary()

    def _rows_that_count(self, weight: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Without those that only make the vocabulary divide."""
        return weight[: self.vocabulary_size - vocabulary.start]


class RowPart:
    """The part of a micro-batch's rows that this rank computes: as many tokens of each as other ranks have."""

    def __init__(self, micro_batch: MicroBatch, device: torch.device):
        self.batch = batch = micro_batch.to(device)
        self._group = parallel_state.get_context_parallel_group()
        width, parts, number = batch.token_ids_RT.shape[1], self._group.size(), self._group.rank()
        assert width % parts == 0, f"rows of {width} tokens cannot be shared out between {parts} ranks"
        here = slice(number * (width // parts), (number + 1) * (width // parts))
        self.token_ids_RT = batch.token_ids_RT[:, here]
        self.position_ids_RT = batch.position_ids_RT[:, here]
        is_plain = parts == 1 and micro_batch.has_one_sequence_a_row
        self.mask = None if is_plain else batch.attention_mask()[:, :, here]
        # Between attention and attention ranks that share matrices share out tokens, too.
        tensor = parallel_state.get_tensor_model_parallel_group()
        self.routing_notes_RTC = batch.routing_notes()[:, here].chunk(tensor.size(), dim=1)[tensor.rank()]
        row_N, column_N = batch.predicted_by_N // width, batch.predicted_by_N % width
        self._mine_n = ((column_N >= here.start) & (column_N < here.stop)).nonzero().flatten()
        self._row_n, self._column_n = row_N[self._mine_n], column_N[self._mine_n] - here.start
        self._num_tokens = len(batch.target_ids_N)
        self.targets_n = batch.target_ids_N[self._mine_n]

    def states_of_targets(self, hidden: Tensor) -> Tensor:
        """The states [n, H] that predict those trained tokens which this rank scores."""
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden[self._column_n, self._row_n]

    def of_all_parts(self, scores_n: Tensor) -> Tensor:
        """Scores of all trained tokens (N), from all ranks that have a part of the rows."""
        if self._group.size() == 1:
            return scores_n
        return _FromAllParts.apply(scores_n, self._mine_n, self._num_tokens, self._group)


class _FromAllParts(torch.autograd.Function):
    """Every rank computes the same loss from all scores, so that each takes the gradient of its own and adds nothing up."""

    @staticmethod
    def forward(ctx: Any, scores_n: Tensor, place_n: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(place_n)
        scores_N = scores_n.new_zeros(size)
        scores_N[place_n] = scores_n
        dist.all_reduce(scores_N, group=group)
        return scores_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_N[ctx.saved_tensors[0]], None, None, None


AtTheEnd = Callable[[PolicyModel, RowPart, Tensor, int], Any]
"""What becomes of the last hidden states of a micro-batch, given its number."""


def forward(chunks: Chunks, micro_batches: Sequence[MicroBatch], at_the_end: AtTheEnd, device: torch.device) -> list[Any]:
    """What is answered at the end for each, on the last stage; nothing on the others. No gradients."""
    with torch.no_grad():
        return _run(chunks, micro_batches, at_the_end, device, forward_only=True)[: len(micro_batches)]


def forward_backward(
    chunks: Chunks, micro_batches: Sequence[MicroBatch], loss_at_the_end: AtTheEnd, device: torch.device
) -> None:
    """Add the gradients of the losses that are answered at the end."""

    def loss(model: PolicyModel, part: RowPart, hidden: Tensor, number: int) -> tuple[Tensor, Tensor, None]:
        # Megatron would divide by the number of tokens; losses have their denominators.
        return loss_at_the_end(model, part, hidden, number), torch.zeros((), dtype=torch.int, device=hidden.device), None

    _run(chunks, micro_batches, loss, device, forward_only=False)


def _run(
    chunks: Chunks,
    micro_batches: Sequence[MicroBatch],
    finish: Callable[..., Any],
    device: torch.device,
    *,
    forward_only: bool,
) -> list[Any]:
    filled = _filled_up(micro_batches, len(chunks))

    def step(batches: Iterator[tuple[int, MicroBatch]], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        number, micro_batch = next(batches)
        part = RowPart(micro_batch, device)
        hidden = chunk(part.token_ids_RT, part.position_ids_RT, part.mask, padding_mask=part.routing_notes_RTC)

        def finished(hidden: Tensor, **_: Any) -> Any:
            if number >= len(micro_batches):
                return _nothing(hidden, forward_only=forward_only)
            return finish(_unwrapped(chunk), part, hidden, number)

        return hidden, finished

    batches = [iter(enumerate(filled)) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(filled),
        seq_length=1,  # stages tell each other what comes
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _nothing(hidden: Tensor, *, forward_only: bool) -> Any:
    """What a blank micro-batch comes to: no gradients, on every stage."""
    return None if forward_only else (hidden.sum() * 0.0, torch.zeros((), dtype=torch.int, device=hidden.device), None)


def _filled_up(micro_batches: Sequence[MicroBatch], num_chunks: int) -> list[MicroBatch]:
    """With blank ones to a multiple of the stages, where these have several chunks: their schedule knows no other number."""
    if num_chunks == 1:
        return list(micro_batches)
    missing = -len(micro_batches) % parallel_state.get_pipeline_model_parallel_world_size()
    return [*micro_batches, *[micro_batches[-1].blank()] * missing]


def to_all_stages(per_micro_batch: list[Tensor], micro_batches: Sequence[MicroBatch], device: torch.device) -> list[Tensor]:
    """Scores (N) that the last stage knows, on every stage."""
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
