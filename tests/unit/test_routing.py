"""Routing records (the experts that each token went to): encoding, merging, storage, and alignment with packed tokens."""

import random

import numpy as np
import pytest
import torch

from roll_core.batching.packing import PackingLimits
from roll_core.batching.samples import build_batch
from roll_core.config.training.training import Packing
from roll_core.store.records.rollouts import decode_trajectories, encode_trajectories
from roll_core.types.routing import NOT_RECORDED, RoutedExperts, merge_routing
from roll_core.types.sample import Sample
from roll_core.types.trajectory import Ending, Score, Trajectory, Turn
from tests.micro_batches import cut
from tests.support import random_samples

LAYERS, CHOSEN = 3, 2


def numbered(num_tokens: int, first: int = 0) -> np.ndarray:
    """Expert numbers for `num_tokens` tokens, all different, from `first` on."""
    return np.arange(first, first + num_tokens * LAYERS * CHOSEN, dtype=np.int16).reshape(num_tokens, -1)


@pytest.mark.parametrize(("num_experts", "width"), [(8, 1), (255, 1), (256, 2), (1000, 2)])
def test_expert_numbers_survive_in_as_few_bytes_as_possible(num_experts, width):
    experts_tC = np.array([[0, num_experts - 1], [NOT_RECORDED, 3]], dtype=np.int16)
    kept = RoutedExperts.from_array(experts_tC, num_experts)
    assert (len(kept.numbers), kept.num_tokens) == (4 * width, 2)
    assert np.array_equal(kept.as_array(), experts_tC)


def test_merging_keeps_the_earlier_record_of_the_beginning_of_a_context():
    first, longer = RoutedExperts.from_array(numbered(2), 100), RoutedExperts.from_array(numbered(5, first=50), 100)
    merged = merge_routing(first, longer)
    assert merged is not None
    assert np.array_equal(merged.as_array(), np.concatenate([numbered(2), numbered(5, first=50)[2:]]))
    assert merge_routing(longer, first) == longer
    assert (merge_routing(None, first), merge_routing(first, None), merge_routing(None, None)) == (first, first, None)


def turn(prompt: tuple[int, ...], completion: tuple[int, ...], experts: RoutedExperts | None) -> Turn:
    return Turn(prompt, completion, (-0.5,) * len(completion), (0,) * len(completion), "x", experts=experts)


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory("sort/train/0", "sort", 0, 0, turns, Ending.STOP, Score(1.0, True), None)


def test_routing_records_are_stored_with_the_trajectories():
    recorded = [
        trajectory(turn((2, 3), (4, 5), RoutedExperts.from_array(numbered(3), 100))),
        trajectory(turn((2, 3), (4,), None)),
    ]
    assert decode_trajectories(encode_trajectories(recorded)) == recorded


def test_a_later_turn_records_the_experts_of_the_last_token_of_an_earlier_one():
    first = turn((2, 3), (4, 5), RoutedExperts.from_array(numbered(3), 200))
    second = turn((2, 3, 4, 5, 6), (7, 8), RoutedExperts.from_array(numbered(6, first=100), 200))
    (sample,) = build_batch([trajectory(first, second)]).samples
    assert sample.experts is not None
    assert sample.experts.num_tokens == sample.num_tokens - 1  # no engine has computed the last token
    assert np.array_equal(sample.experts.as_array(), np.concatenate([numbered(3), numbered(6, first=100)[3:]]))


def recorded_samples(count: int) -> list[Sample]:
    """Random samples with records of all tokens but the last; a record depends on the tokens before it alone. Every second
    group has none."""
    return [
        Sample(each.token_ids, each.trained, recorded(each.token_ids[:-1]) if number // 3 % 2 == 0 else None)
        for number, each in enumerate(random_samples(count))
    ]


def recorded(token_ids: tuple[int, ...]) -> RoutedExperts:
    """Routing record in which the experts of a token depend on the tokens up to it alone."""
    drawn = [random.Random(hash(token_ids[: position + 1])).choices(range(200), k=6) for position in range(len(token_ids))]
    return RoutedExperts.from_array(np.array(drawn, dtype=np.int16), 200)


@pytest.mark.parametrize("packing", Packing)
def test_routing_records_are_aligned_with_their_tokens_however_rows_are_packed(packing):
    samples, found = recorded_samples(12), 0
    for part in cut(samples, PackingLimits(60, 30, packing, width_multiple=8)):
        notes_tC = part.routing_notes().flatten(0, 1)[:, 1:]
        assert (notes_tC[part.segment_RT.flatten() == 0] == NOT_RECORDED).all()
        for sequence, end in zip(part.sample_S.tolist(), part.ends_S.tolist(), strict=True):
            sample = samples[sequence]
            after_prompt = sample.num_tokens - sample.num_prompt_tokens
            completion_tC = notes_tC[end - after_prompt + 1 : end + 1]
            if sample.experts is None:
                assert (completion_tC == NOT_RECORDED).all()
                continue
            assert torch.equal(completion_tC[:-1], torch.from_numpy(sample.experts.as_array()[sample.num_prompt_tokens :]))
            assert (completion_tC[-1] == NOT_RECORDED).all()
            first = part.predicted_by_N[part.token_index_N.tolist().index(_first_trained_token(samples, sequence))]
            assert notes_tC[first].tolist() == sample.experts.as_array()[sample.num_prompt_tokens - 1].tolist()
            found += 1
    assert found == 6


def _first_trained_token(samples: list[Sample], number: int) -> int:
    return sum(sample.num_trained_tokens for sample in samples[:number])


def test_tokens_without_routing_records_have_no_routing_notes():
    for part in cut(random_samples(6), PackingLimits(60, 30, Packing.ROWS)):
        assert part.experts_RTC is None
        assert part.routing_notes().shape[2] == 1
    blank = cut(recorded_samples(6), PackingLimits(60, 30, Packing.ROWS))[0].blank()
    assert (blank.routing_notes() == -1).all()
