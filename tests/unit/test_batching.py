"""Trajectories to samples to packed, balanced micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from roll_core.algorithms.advantages import group_relative
from roll_core.batching.micro_batch import build_micro_batches
from roll_core.batching.packing import PackingLimits, pack_rows, plan_ranks, plan_units
from roll_core.batching.samples import build_samples
from roll_core.config.training import Packing
from roll_core.types.sample import Sample
from tests.support import random_samples, trajectory

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)


def test_a_sample_is_prompt_then_completion_with_its_advantage_on_the_completion():
    samples = build_samples([trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)], group_relative)
    assert samples[0] == Sample(
        token_ids=(2, 3, 10, 11, 12),
        trained=(False, False, True, True, True),
        advantages=(0.0, 0.0, 0.5, 0.5, 0.5),
        sampler_logprobs=(0.0, 0.0, -0.5, -0.5, -0.5),
    )


def test_a_failed_trajectory_is_left_out_and_does_not_lower_the_baseline():
    samples = build_samples([trajectory(0, 0, 1.0), trajectory(0, 1, None), trajectory(0, 2, 0.0)], group_relative)
    assert [s.advantages[-1] for s in samples] == [0.5, -0.5]


def test_groups_are_told_apart_by_number_even_when_numbers_are_missing():
    samples = build_samples([trajectory(7, 0, 1.0), trajectory(7, 1, 0.0), trajectory(2, 0, 4.0)], group_relative)
    assert [s.advantages[-1] for s in samples] == [0.5, -0.5, 0.0]


@given(LENGTHS)
def test_packing_loses_nothing_and_overfills_nothing(lengths):
    rows = pack_rows(lengths, 20)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 20 for row in rows)


@given(LENGTHS)
def test_packing_needs_at_most_eleven_ninths_of_the_fewest_rows(lengths):
    fewest = -(-sum(lengths) // 20)
    assert len(pack_rows(lengths, 20)) <= 11 / 9 * max(fewest, 1) + 1 + sum(length > 10 for length in lengths)


@given(LENGTHS, st.integers(1, 4), st.sampled_from([Packing.NONE, Packing.ROWS]))
def test_every_rank_gets_as_many_micro_batches_and_every_sample_goes_somewhere_once(lengths, num_ranks, packing):
    limits = PackingLimits(micro_batch_tokens=40, row_tokens=None, packing=packing)
    ranks = plan_ranks(lengths, num_ranks, limits)
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    placed = [i for micro_batches in ranks for rows in micro_batches for row in rows for i in row]
    assert sorted(placed) == list(range(len(lengths)))
    longest = max(lengths)
    assert all(len(rows) * longest <= 40 for micro_batches in ranks for rows in micro_batches)


def test_a_packed_row_restarts_positions_and_keeps_sequences_apart():
    samples = [
        Sample((8, 25, 8, 1), (False, False, True, True), (0, 0, 1, 1), (0, 0, -1, -2)),
        Sample((9, 25, 1), (False, False, True), (0, 0, 3), (0, 0, -3)),
    ]
    limits = PackingLimits(micro_batch_tokens=100, row_tokens=7, packing=Packing.ROWS)
    (batch,) = build_micro_batches(samples, rank=0, num_ranks=1, limits=limits, skip_zero_advantages=False)
    assert batch.token_ids_RT.tolist() == [[8, 25, 8, 1, 9, 25, 1]]
    assert batch.position_ids_RT.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.segment_RT.tolist() == [[1, 1, 2, 2, 3, 3, 4]]
    assert batch.prefix_RT.tolist() == [[1, 1, 1, 1, 3, 3, 3]]
    assert batch.predicted_by_N.tolist() == [1, 2, 5]
    assert batch.target_ids_N.tolist() == [8, 1, 1]
    assert batch.advantages_N.tolist() == [1, 1, 3]
    assert batch.sequence_N.tolist() == [0, 0, 1]
    mask = batch.attention_mask()[0, 0]
    assert mask[5].tolist() == [False, False, False, False, True, True, False]
    assert mask[6].tolist() == [False, False, False, False, True, True, True]


def test_a_shared_prompt_is_laid_down_once_and_every_continuation_looks_at_it_alone():
    samples = [
        Sample((8, 25, 8, 1), (False, False, True, True), (0, 0, 1, 1), (0, 0, -1, -2)),
        Sample((8, 25, 9), (False, False, True), (0, 0, 3), (0, 0, -3)),
    ]
    limits = PackingLimits(micro_batch_tokens=100, row_tokens=8, packing=Packing.SHARED_PROMPTS)
    (batch,) = build_micro_batches(samples, rank=0, num_ranks=1, limits=limits, skip_zero_advantages=False)
    assert batch.token_ids_RT.tolist() == [[8, 25, 8, 1, 9]]
    assert batch.position_ids_RT.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.predicted_by_N.tolist() == [1, 2, 1]
    mask = batch.attention_mask()[0, 0]
    assert mask[4].tolist() == [True, True, False, False, True]
    assert mask[3].tolist() == [True, True, True, True, False]


def test_units_share_a_prompt_as_far_as_a_row_goes():
    assert plan_units(["a", "a", "b", "a"], [(2, 3), (2, 4), (5, 1), (2, 1)], 9) == [(0, 1), (2,), (3,)]


def test_skipped_samples_still_count_in_the_denominators():
    pulling = random_samples(3)
    idle = Sample((5, 6, 7), (False, True, True), (0.0, 0.0, 0.0), (0.0, -1.0, -1.0))
    limits = PackingLimits(micro_batch_tokens=100, row_tokens=None, packing=Packing.ROWS)
    (batch,) = build_micro_batches([*pulling, idle], rank=0, num_ranks=1, limits=limits, skip_zero_advantages=True)
    assert batch.num_sequences == 3
    assert batch.global_sequences == 4
    assert batch.global_tokens == sum(s.num_trained_tokens for s in pulling) + 2
