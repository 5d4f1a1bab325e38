"""Micro-batches: the tensors of one forward-backward pass. Shapes: R rows, T tokens a row, N trained tokens, S sequences, C
values per token for routers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roll_core.batching.packing import PackingLimits, Unit, plan_ranks, plan_units
from roll_core.batching.token_data import TokenData
from roll_core.config.training.training import Packing
from roll_core.types.routing import NOT_RECORDED
from roll_core.types.sample import Sample


@dataclass(frozen=True)
class GlobalCounts:
    """Denominators of losses: trained tokens and sequences of a whole optimizer step, over all ranks."""

    tokens: float
    sequences: float


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows of one forward-backward pass, and the data of their trained tokens.

    `segment_RT` numbers the prompts and the continuations of a row from 1; 0 is padding. `prefix_RT` is the segment of the
    prompt that a token continues (its own, for prompt tokens). `predicted_by_N` is the flat position whose output predicts
    each trained token, `ends_S` the flat position of each sequence's last token. `token_index_N` and `sample_S` are the
    indices of the trained tokens and of the samples in the whole batch.

    Example (one row: prompt [8, 25] with continuations [8, 2] and [9, 2], all of them trained, the prompt shared):
    token_ids_RT=[[8, 25, 8, 2, 9, 2]], position_ids_RT=[[0, 1, 2, 3, 2, 3]], segment_RT=[[1, 1, 2, 2, 3, 3]],
    prefix_RT=[[1, 1, 1, 1, 1, 1]], predicted_by_N=[1, 2, 1, 4], target_ids_N=[8, 2, 9, 2], sequence_N=[0, 0, 1, 1],
    ends_S=[3, 5], token_index_N=[0, 1, 2, 3], sample_S=[0, 1]
    """

    token_ids_RT: Tensor
    position_ids_RT: Tensor
    segment_RT: Tensor
    prefix_RT: Tensor
    predicted_by_N: Tensor
    target_ids_N: Tensor
    sequence_N: Tensor
    token_index_N: Tensor
    ends_S: Tensor
    sample_S: Tensor
    tokens: TokenData
    counts: GlobalCounts
    experts_RTC: Tensor | None = None
    """Experts that the engine chose for each token, layer by layer; -1 where not recorded; None if nothing was recorded. A
    prompt shared by several sequences has the experts of the first one."""

    @property
    def num_sequences(self) -> int:
        return len(self.sample_S)

    @property
    def num_turns(self) -> int:
        return int(self.tokens.turn_N.max()) + 1 if len(self.token_index_N) else 0

    @property
    def has_one_sequence_per_row(self) -> bool:
        """True if each row is a prompt with at most one continuation. Plain causal attention then equals
        `attention_mask`."""
        return bool((self.segment_RT <= 2).all()) and bool((self.prefix_RT <= 1).all())

    def blank(self) -> "MicroBatch":
        """Build a micro-batch of the same optimizer step that trains nothing: one row of padding, as wide as the rows
        here."""
        nothing = torch.empty(0, dtype=torch.long, device=self.token_index_N.device)
        row: dict[str, Any] = {
            name: torch.zeros_like(getattr(self, name)[:1])
            for name in ("token_ids_RT", "position_ids_RT", "segment_RT", "prefix_RT")
        }
        for name in ("predicted_by_N", "target_ids_N", "sequence_N", "token_index_N", "ends_S", "sample_S"):
            row[name] = nothing
        if self.experts_RTC is not None:
            row["experts_RTC"] = torch.full_like(self.experts_RTC[:1], NOT_RECORDED)
        return replace(self, **row, tokens=self.tokens.take(nothing))

    def with_signals(self, **signals: Tensor) -> "MicroBatch":
        """Copy with these fields of the token data filled in."""
        return replace(self, tokens=replace(self.tokens, **signals))

    def attention_mask(self) -> Tensor:
        """Mask [R, 1, T, T], true where a token may attend: not ahead, and only to its own segment or the prompt it
        continues."""
        segment, prefix = self.segment_RT, self.prefix_RT
        key_segment = segment[:, None, None, :]
        related = (segment[:, None, :, None] == key_segment) | (prefix[:, None, :, None] == key_segment)
        num_tokens = segment.shape[1]
        return related & torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=segment.device).tril()

    def routing_notes(self) -> Tensor:
        """Routing notes [R, T, C] of each token for MoE routers: the number of trained tokens it predicts (-1 for padding),
        then its recorded experts. A token shared by several completions counts for each of them."""
        predicts = torch.zeros_like(self.token_ids_RT).flatten()
        predicts.scatter_add_(0, self.predicted_by_N, torch.ones_like(self.predicted_by_N))
        notes_RT1 = torch.where(self.segment_RT > 0, predicts.view_as(self.segment_RT), -1)[..., None].to(torch.int16)
        return notes_RT1 if self.experts_RTC is None else torch.cat([notes_RT1, self.experts_RTC], dim=2)

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy with all tensors on the device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, tokens=self.tokens.to(device), **moved)


def build_micro_batches(
    samples: Sequence[Sample],
    tokens: TokenData,
    *,
    chosen: Sequence[int],
    counts: GlobalCounts,
    rank: int,
    num_ranks: int,
    limits: PackingLimits,
) -> list[MicroBatch]:
    """Pack this rank's share of the chosen samples into micro-batches. `tokens` has the data of all samples, end to end."""
    kept = [samples[number] for number in chosen]
    units = _units(kept, limits)
    plan = plan_ranks([_unit_tokens(kept, unit) for unit in units], num_ranks, limits)[rank]
    starts = [0, *accumulate(sample.num_trained_tokens for sample in samples)]
    located = _LocatedSamples(kept, [starts[number] for number in chosen], list(chosen))
    return [
        _assemble(located, [[units[u] for u in row] for row in rows], tokens, counts, limits.width_multiple) for rows in plan
    ]


@dataclass(frozen=True)
class _LocatedSamples:
    """Chosen samples, with the index of the first trained token of each and its own number in the whole batch."""

    samples: list[Sample]
    first_token: list[int]
    number: list[int]


def _units(samples: Sequence[Sample], limits: PackingLimits) -> list[Unit]:
    if limits.packing is not Packing.SHARED_PROMPTS or not samples:
        return [(i,) for i in range(len(samples))]
    lengths = [(s.num_prompt_tokens, s.num_tokens - s.num_prompt_tokens) for s in samples]
    row_tokens = max(limits.row_tokens or 0, max(s.num_tokens for s in samples))
    return plan_units([s.token_ids[: s.num_prompt_tokens] for s in samples], lengths, row_tokens)


def _unit_tokens(samples: Sequence[Sample], unit: Unit) -> int:
    prompt = samples[unit[0]].num_prompt_tokens
    return prompt + sum(samples[i].num_tokens - prompt for i in unit)


class _Builder:
    """Rows being filled unit by unit, and the lists that become the tensors of a micro-batch."""

    def __init__(self, located: _LocatedSamples, num_rows: int, width: int):
        self.token_ids, self.positions, self.segments, self.prefixes = (
            [[0] * width for _ in range(num_rows)] for _ in range(4)
        )
        self.predicted_by: list[int] = []
        self.targets: list[int] = []
        self.sequence: list[int] = []
        self.token_index: list[int] = []
        self.ends: list[int] = []
        self.sample: list[int] = []
        self.experts = _empty_experts(located.samples, num_rows, width)
        self._located = located
        self._width = width

    def fill(self, row: int, units: Sequence[Unit]) -> None:
        start, segment = 0, 0
        for unit in units:
            prompt = self._located.samples[unit[0]]
            prompt_segment = segment = segment + 1
            prompt_start, length = start, prompt.num_prompt_tokens
            self._put(row, start, prompt.token_ids[:length], 0, segment, segment)
            self._put_experts(row, start, prompt, slice(0, length))
            start += length
            for index in unit:
                segment += 1
                rest = self._located.samples[index].token_ids[length:]
                self._put(row, start, rest, length, segment, prompt_segment)
                self._put_experts(row, start, self._located.samples[index], slice(length, None))
                self._add_targets(index, row * self._width + start, row * self._width + prompt_start + length - 1)
                start += len(rest)

    def _put(self, row: int, start: int, tokens: tuple[int, ...], position: int, segment: int, prefix: int) -> None:
        end = start + len(tokens)
        self.token_ids[row][start:end] = tokens
        self.positions[row][start:end] = range(position, position + len(tokens))
        self.segments[row][start:end] = [segment] * len(tokens)
        self.prefixes[row][start:end] = [prefix] * len(tokens)

    def _put_experts(self, row: int, start: int, sample: Sample, part: slice) -> None:
        if self.experts is not None and sample.experts is not None:
            known = sample.experts.as_array(part)
            self.experts[row, start : start + len(known)] = known

    def _add_targets(self, index: int, rest_at: int, prompt_end_at: int) -> None:
        """Add the trained tokens of a sample. Its tokens after the prompt start at flat position `rest_at`; the last token
        of its prompt is at `prompt_end_at`."""
        sample = self._located.samples[index]
        length, sequence, before = sample.num_prompt_tokens, len(self.sample), len(self.targets)
        for t in range(length, sample.num_tokens):
            if sample.trained[t]:
                self.predicted_by.append(prompt_end_at if t == length else rest_at + t - length - 1)
                self.targets.append(sample.token_ids[t])
                self.sequence.append(sequence)
        first_token = self._located.first_token[index]
        self.token_index.extend(range(first_token, first_token + len(self.targets) - before))
        self.ends.append(rest_at + sample.num_tokens - length - 1)
        self.sample.append(self._located.number[index])


def _empty_experts(samples: Sequence[Sample], num_rows: int, width: int) -> NDArray[np.int16] | None:
    """Array of NOT_RECORDED for the experts of all tokens; None if no sample has recorded experts."""
    per_token = next((sample.experts.per_token for sample in samples if sample.experts is not None), None)
    return None if per_token is None else np.full((num_rows, width, per_token), NOT_RECORDED, dtype=np.int16)


def _assemble(
    located: _LocatedSamples, rows: Sequence[Sequence[Unit]], tokens: TokenData, counts: GlobalCounts, width_multiple: int
) -> MicroBatch:
    # A blank micro-batch still runs a short forward pass, so that this rank takes part in every collective.
    width = max((sum(_unit_tokens(located.samples, unit) for unit in row) for row in rows), default=1)
    width = -(-width // width_multiple) * width_multiple
    built = _Builder(located, max(len(rows), 1), width)
    for number, row in enumerate(rows):
        built.fill(number, row)
    token_index_N = torch.tensor(built.token_index, dtype=torch.long)
    return MicroBatch(
        token_ids_RT=torch.tensor(built.token_ids),
        position_ids_RT=torch.tensor(built.positions),
        segment_RT=torch.tensor(built.segments),
        prefix_RT=torch.tensor(built.prefixes),
        predicted_by_N=torch.tensor(built.predicted_by, dtype=torch.long),
        target_ids_N=torch.tensor(built.targets, dtype=torch.long),
        sequence_N=torch.tensor(built.sequence, dtype=torch.long),
        token_index_N=token_index_N,
        ends_S=torch.tensor(built.ends, dtype=torch.long),
        sample_S=torch.tensor(built.sample, dtype=torch.long),
        tokens=tokens.take(token_index_N),
        counts=counts,
        experts_RTC=None if built.experts is None else torch.from_numpy(built.experts),
    )
