"""Micro-batches: the tensors of one forward-backward pass. Shapes: R rows, T tokens a row, N trained tokens, S sequences."""

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
    """What losses are divided by: trained tokens and sequences of a whole optimizer step, over all ranks."""

    tokens: float
    sequences: float


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows. `segment_RT` numbers the prompts and the continuations of a row from 1; 0 is padding. `prefix_RT` is the
    segment of the prompt a token continues (its own, for prompt tokens). `predicted_by_N` is the flat position whose output
    predicts each trained token, `ends_S` that of each sequence's last token. `place_N` and `sample_S` say which trained
    token and which sample of the batch these are.

    Example (one row: prompt [8, 25] with continuations [8, 2] and [9, 2], all of them trained, the prompt shared):
    token_ids_RT=[[8, 25, 8, 2, 9, 2]], position_ids_RT=[[0, 1, 2, 3, 2, 3]], segment_RT=[[1, 1, 2, 2, 3, 3]],
    prefix_RT=[[1, 1, 1, 1, 1, 1]], predicted_by_N=[1, 2, 1, 4], target_ids_N=[8, 2, 9, 2], sequence_N=[0, 0, 1, 1],
    ends_S=[3, 5], place_N=[0, 1, 2, 3], sample_S=[0, 1]
    """

    token_ids_RT: Tensor
    position_ids_RT: Tensor
    segment_RT: Tensor
    prefix_RT: Tensor
    predicted_by_N: Tensor
    target_ids_N: Tensor
    sequence_N: Tensor
    place_N: Tensor
    ends_S: Tensor
    sample_S: Tensor
    tokens: TokenData
    counts: GlobalCounts
    experts_RTC: Tensor | None = None
    """Which experts tokens went to in the engine, layer by layer, where that is known of any; -1 where it is not. Those of a
    prompt that several sequences share are those of the first."""

    @property
    def num_sequences(self) -> int:
        return len(self.sample_S)

    @property
    def num_turns(self) -> int:
        return int(self.tokens.turn_N.max()) + 1 if len(self.place_N) else 0

    @property
    def has_one_sequence_a_row(self) -> bool:
        """A prompt and one continuation: who looks at all that came before looks at nothing else."""
        return bool((self.segment_RT <= 2).all()) and bool((self.prefix_RT <= 1).all())

    def blank(self) -> "MicroBatch":
        """One of the same step that trains nothing: a row of padding, as wide as this one's."""
        nothing = torch.empty(0, dtype=torch.long, device=self.place_N.device)
        row: dict[str, Any] = {
            name: torch.zeros_like(getattr(self, name)[:1])
            for name in ("token_ids_RT", "position_ids_RT", "segment_RT", "prefix_RT")
        }
        for name in ("predicted_by_N", "target_ids_N", "sequence_N", "place_N", "ends_S", "sample_S"):
            row[name] = nothing
        if self.experts_RTC is not None:
            row["experts_RTC"] = torch.full_like(self.experts_RTC[:1], NOT_RECORDED)
        return replace(self, **row, tokens=self.tokens.take(nothing))

    def with_signals(self, **signals: Tensor) -> "MicroBatch":
        """With these fields of its token data filled in."""
        return replace(self, tokens=replace(self.tokens, **signals))

    def attention_mask(self) -> Tensor:
        """[R, 1, T, T], true where a token may look: not ahead, and only at its own segment or the prompt it continues."""
        segment, prefix = self.segment_RT, self.prefix_RT
        looked_at = segment[:, None, None, :]
        related = (segment[:, None, :, None] == looked_at) | (prefix[:, None, :, None] == looked_at)
        num_tokens = segment.shape[1]
        return related & torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=segment.device).tril()

    def routing_notes(self) -> Tensor:
        """[R, T, C], what routers are told of each token: how many trained tokens it predicts, -1 for padding, then which
        experts it is known to have gone to. A token that several completions share counts for each of them."""
        predicts = torch.zeros_like(self.token_ids_RT).flatten()
        predicts.scatter_add_(0, self.predicted_by_N, torch.ones_like(self.predicted_by_N))
        notes_RT1 = torch.where(self.segment_RT > 0, predicts.view_as(self.segment_RT), -1)[..., None].to(torch.int16)
        return notes_RT1 if self.experts_RTC is None else torch.cat([notes_RT1, self.experts_RTC], dim=2)

    def to(self, device: torch.device) -> "MicroBatch":
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
    """This rank's share of the chosen samples. `tokens` are those of all samples, end to end."""
    kept = [samples[number] for number in chosen]
    units = _units(kept, limits)
    plan = plan_ranks([_unit_tokens(kept, unit) for unit in units], num_ranks, limits)[rank]
    starts = [0, *accumulate(sample.num_trained_tokens for sample in samples)]
    placed = _Placed(kept, [starts[number] for number in chosen], list(chosen))
    return [
        _assemble(placed, [[units[u] for u in row] for row in rows], tokens, counts, limits.width_multiple) for rows in plan
    ]


@dataclass(frozen=True)
class _Placed:
    """Samples with the place of their first trained token, and their own, in the batch."""

    samples: list[Sample]
    first: list[int]
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
    """Rows being filled, token by token; knows where the next one goes."""

    def __init__(self, placed: _Placed, num_rows: int, width: int):
        self.token_ids, self.positions, self.segments, self.prefixes = (
            [[0] * width for _ in range(num_rows)] for _ in range(4)
        )
        self.predicted_by: list[int] = []
        self.targets: list[int] = []
        self.sequence: list[int] = []
        self.place: list[int] = []
        self.ends: list[int] = []
        self.sample: list[int] = []
        self.experts = _empty_experts(placed.samples, num_rows, width)
        self._placed = placed
        self._width = width

    def fill(self, row: int, units: Sequence[Unit]) -> None:
        start, segment = 0, 0
        for unit in units:
            prompt = self._placed.samples[unit[0]]
            prompt_segment = segment = segment + 1
            prompt_start, length = start, prompt.num_prompt_tokens
            self._put(row, start, prompt.token_ids[:length], 0, segment, segment)
            self._put_experts(row, start, prompt, slice(0, length))
            start += length
            for index in unit:
                segment += 1
                rest = self._placed.samples[index].token_ids[length:]
                self._put(row, start, rest, length, segment, prompt_segment)
                self._put_experts(row, start, self._placed.samples[index], slice(length, None))
                self._train(index, row * self._width + start, row * self._width + prompt_start + length - 1)
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

    def _train(self, index: int, rest_at: int, prompt_end_at: int) -> None:
        """Note the trained tokens of a sample whose tokens after the prompt lie at flat position `rest_at`."""
        sample = self._placed.samples[index]
        length, sequence, before = sample.num_prompt_tokens, len(self.sample), len(self.targets)
        for t in range(length, sample.num_tokens):
            if sample.trained[t]:
                self.predicted_by.append(prompt_end_at if t == length else rest_at + t - length - 1)
                self.targets.append(sample.token_ids[t])
                self.sequence.append(sequence)
        first = self._placed.first[index]
        self.place.extend(range(first, first + len(self.targets) - before))
        self.ends.append(rest_at + sample.num_tokens - length - 1)
        self.sample.append(self._placed.number[index])


def _empty_experts(samples: Sequence[Sample], num_rows: int, width: int) -> NDArray[np.int16] | None:
    per_token = next((sample.experts.per_token for sample in samples if sample.experts is not None), None)
    return None if per_token is None else np.full((num_rows, width, per_token), NOT_RECORDED, dtype=np.int16)


def _assemble(
    placed: _Placed, rows: Sequence[Sequence[Unit]], tokens: TokenData, counts: GlobalCounts, width_multiple: int
) -> MicroBatch:
    # A blank micro-batch still runs a short forward pass, so that this rank takes part in every collective.
    width = max((sum(_unit_tokens(placed.samples, unit) for unit in row) for row in rows), default=1)
    width = -(-width // width_multiple) * width_multiple
    built = _Builder(placed, max(len(rows), 1), width)
    for number, row in enumerate(rows):
        built.fill(number, row)
    place_N = torch.tensor(built.place, dtype=torch.long)
    return MicroBatch(
        token_ids_RT=torch.tensor(built.token_ids),
        position_ids_RT=torch.tensor(built.positions),
        segment_RT=torch.tensor(built.segments),
        prefix_RT=torch.tensor(built.prefixes),
        predicted_by_N=torch.tensor(built.predicted_by, dtype=torch.long),
        target_ids_N=torch.tensor(built.targets, dtype=torch.long),
        sequence_N=torch.tensor(built.sequence, dtype=torch.long),
        place_N=place_N,
        ends_S=torch.tensor(built.ends, dtype=torch.long),
        sample_S=torch.tensor(built.sample, dtype=torch.long),
        tokens=tokens.take(place_N),
        counts=counts,
        experts_RTC=None if built.experts is None else torch.from_numpy(built.experts),
    )
