"""Batching: trajectories become samples, and samples become packed micro-batches that are balanced over ranks."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from roll_core.algorithms.advantages import group_relative
from roll_core.batching.micro_batch import GlobalCounts
from roll_core.batching.packing import PackingLimits, pack_rows, plan_ranks, plan_units
from roll_core.batching.samples import build_batch
from roll_core.config.training.training import Packing
from roll_core.types.sample import Sample
from roll_core.types.trajectory import GREEDY_ATTEMPT, Trajectory, Turn
from tests.micro_batches import cut, random_tokens
from tests.support import random_samples, trajectory

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)


def test_a_sample_is_prompt_then_completion_and_only_the_completion_is_trained():
    batch = build_batch([trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)])
    assert batch.samples[0] == Sample(token_ids=(2, 3, 10, 11, 12), trained=(False, False, True, True, True))
    assert batch.credit.outcomes.rewards_S.tolist() == [1.0, 0.0]
    assert batch.credit.outcomes.sequence_N.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.credit.outcomes.sampler_logprobs_N.tolist() == [-0.5] * 6
    assert batch.credit.correct_S.tolist() == [True, False]


def test_a_turn_has_the_weights_version_of_its_first_token():
    # later tokens of the turn may have been sampled over a KV cache of the older weights
    first = Turn((2, 3), (10, 11), (-0.5, -0.5), (6, 7), "x")
    second = Turn((2, 3, 10, 11, 4), (12,), (-0.5,), (7,), "y")
    batch = build_batch([replace(trajectory(0, 0, 1.0), turns=(first, second)), trajectory(0, 1, 0.0, version=5)])
    assert batch.weights_version_N.tolist() == [6, 6, 7, 5, 5, 5]


def test_a_failed_trajectory_is_left_out_and_does_not_lower_the_baseline():
    batch = build_batch([trajectory(0, 0, 1.0), trajectory(0, 1, None), trajectory(0, 2, 0.0)])
    assert len(batch.samples) == 2
    assert group_relative(batch.credit.outcomes).tolist() == [0.5] * 3 + [-0.5] * 3


def test_groups_are_renumbered_without_gaps():
    batch = build_batch([trajectory(7, 0, 1.0), trajectory(7, 1, 0.0), trajectory(2, 0, 4.0)])
    assert batch.credit.outcomes.group_S.tolist() == [0, 0, 1]


def test_a_greedy_attempt_is_the_baseline_of_its_group_and_is_not_trained_on():
    batch = build_batch(
        [
            trajectory(0, GREEDY_ATTEMPT, 0.25),
            trajectory(0, 0, 1.0),
            trajectory(1, GREEDY_ATTEMPT, 1.0),
            trajectory(1, 0, 0.0),
        ]
    )
    assert len(batch.samples) == 2
    assert batch.credit.outcomes.greedy_rewards_S.tolist() == [0.25, 1.0]


def test_a_group_whose_greedy_attempt_failed_has_no_baseline_and_is_left_out():
    batch = build_batch([trajectory(0, GREEDY_ATTEMPT, None), trajectory(0, 0, 1.0), trajectory(1, GREEDY_ATTEMPT, 0.5)])
    assert batch.samples == ()


def conversation(group: int, rewards: tuple[float, float], observation: tuple[int, ...]) -> Trajectory:
    """Trajectory of two turns: prompt (2, 3), answer (10), an observation, answer (11, 12). Its score is 1."""
    first = Turn((2, 3), (10,), (-0.1,), (0,), "a", reward=rewards[0])
    second = Turn((2, 3, 10, *observation), (11, 12), (-0.2, -0.3), (0, 0), "bc", reward=rewards[1])
    return replace(trajectory(group, 0, 1.0), turns=(first, second))


def test_a_conversation_is_one_sample_and_observations_are_not_trained():
    batch = build_batch([conversation(0, (0.5, 0.25), (7, 8))])
    assert batch.samples == (Sample((2, 3, 10, 7, 8, 11, 12), (False, False, True, False, False, True, True)),)
    outcomes = batch.credit.outcomes
    assert outcomes.turn_N.tolist() == [0, 1, 1]
    assert outcomes.turn_rewards_T.tolist() == [0.5, 0.25]
    assert outcomes.rewards_S.tolist() == [1.75]


def test_equal_observations_are_the_same_state_and_others_are_not():
    batch = build_batch([conversation(0, (0, 0), (7, 8)), conversation(0, (0, 0), (7, 8)), conversation(0, (0, 0), (9,))])
    assert batch.credit.outcomes.state_T.tolist() == [0, 1, 0, 1, 0, 2]


@given(LENGTHS)
def test_packing_keeps_every_sample_and_overfills_no_row(lengths):
    rows = pack_rows(lengths, 20)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 20 for row in rows)


@given(LENGTHS)
def test_packing_needs_at_most_eleven_ninths_of_the_fewest_rows(lengths):
    fewest = -(-sum(lengths) // 20)
    assert len(pack_rows(lengths, 20)) <= 11 / 9 * max(fewest, 1) + 1 + sum(length > 10 for length in lengths)


@given(LENGTHS, st.integers(1, 4), st.sampled_from([Packing.NONE, Packing.ROWS]))
def test_every_rank_gets_equally_many_micro_batches_and_every_sample_is_in_one_of_them(lengths, num_ranks, packing):
    limits = PackingLimits(micro_batch_tokens=40, row_tokens=None, packing=packing)
    ranks = plan_ranks(lengths, num_ranks, limits)
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    placed = [i for micro_batches in ranks for rows in micro_batches for row in rows for i in row]
    assert sorted(placed) == list(range(len(lengths)))
    longest = max(lengths)
    assert all(len(rows) * longest <= 40 for micro_batches in ranks for rows in micro_batches)


def test_a_packed_row_restarts_positions_and_keeps_sequences_apart():
    samples = [
        Sample((8, 25, 8, 1), (False, False, True, True)),
        Sample((9, 25, 1), (False, False, True)),
    ]
    limits = PackingLimits(micro_batch_tokens=100, row_tokens=7, packing=Packing.ROWS)
    (batch,) = cut(samples, limits)
    assert batch.token_ids_RT.tolist() == [[8, 25, 8, 1, 9, 25, 1]]
    assert batch.position_ids_RT.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.segment_RT.tolist() == [[1, 1, 2, 2, 3, 3, 4]]
    assert batch.prefix_RT.tolist() == [[1, 1, 1, 1, 3, 3, 3]]
    assert batch.predicted_by_N.tolist() == [1, 2, 5]
    assert batch.target_ids_N.tolist() == [8, 1, 1]
    assert batch.ends_S.tolist() == [3, 6]
    assert batch.sequence_N.tolist() == [0, 0, 1]
    mask = batch.attention_mask()[0, 0]
    assert mask[5].tolist() == [False, False, False, False, True, True, False]
    assert mask[6].tolist() == [False, False, False, False, True, True, True]


def test_a_shared_prompt_is_packed_once_and_continuations_attend_to_it_but_not_to_each_other():
    samples = [
        Sample((8, 25, 8, 1), (False, False, True, True)),
        Sample((8, 25, 9), (False, False, True)),
    ]
    limits = PackingLimits(micro_batch_tokens=100, row_tokens=8, packing=Packing.SHARED_PROMPTS)
    (batch,) = cut(samples, limits)
    assert batch.token_ids_RT.tolist() == [[8, 25, 8, 1, 9]]
    assert batch.position_ids_RT.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.predicted_by_N.tolist() == [1, 2, 1]
    mask = batch.attention_mask()[0, 0]
    assert mask[4].tolist() == [True, True, False, False, True]
    assert mask[3].tolist() == [True, True, True, True, False]


def test_samples_share_a_prompt_as_long_as_they_fit_into_one_row():
    assert plan_units(["a", "a", "b", "a"], [(2, 3), (2, 4), (5, 1), (2, 1)], 9) == [(0, 1), (2,), (3,)]


def test_tokens_and_samples_of_a_micro_batch_keep_their_index_in_the_batch():
    samples = random_samples(5)
    tokens = random_tokens(samples)
    limits = PackingLimits(micro_batch_tokens=100, row_tokens=None, packing=Packing.ROWS)
    (batch,) = cut(samples, limits, tokens, chosen=[4, 1])
    trained = [t for s in samples for t, is_trained in zip(s.token_ids, s.trained, strict=True) if is_trained]
    assert sorted(batch.sample_S.tolist()) == [1, 4]
    assert batch.target_ids_N.tolist() == [trained[index] for index in batch.token_index_N.tolist()]
    assert batch.tokens.advantages_N.tolist() == tokens.advantages_N[batch.token_index_N].tolist()
    assert batch.num_turns == int(batch.tokens.turn_N.max()) + 1


def test_samples_that_are_not_chosen_still_count_in_the_denominators():
    samples = random_samples(4)
    limits = PackingLimits(micro_batch_tokens=100, row_tokens=None, packing=Packing.ROWS)
    (batch,) = cut(samples, limits, chosen=[0, 1, 2])
    assert batch.num_sequences == 3
    assert batch.counts == GlobalCounts(sum(s.num_trained_tokens for s in samples), 4)
