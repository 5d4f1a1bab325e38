"""Defects of the original ROLL that must not come back: each test fails with the formula or behaviour of the original.
Defects of single functions are tested in tests/unit/algorithms."""

import asyncio
from dataclasses import replace

import pytest
import torch

from roll_core.config.problems import ArithmeticProblems
from roll_core.config.rollout import RolloutConfig
from roll_core.data.arithmetic import ArithmeticSource
from roll_core.rollout.renderer import CharacterRenderer
from roll_core.rollout.scheduler import RolloutScheduler
from roll_core.training.learner import Learner, PreparedBatch
from roll_core.types.manifest import CollectRequest
from roll_core.types.trajectory import Score, Trajectory, Turn
from tests.support import tiny_config, trajectory
from tests.unit.test_rollouts import EchoEngine


def prepare(tmp_path, trajectories: list[Trajectory], **training: object) -> PreparedBatch:
    config = tiny_config(tmp_path, algorithm={"kind": "reinforce"}, training=training)
    return Learner(config, rank=0, device=torch.device("cpu")).prepare(trajectories, weights_version=0)


def samples_of(prepared: PreparedBatch) -> list[list[int]]:
    return [[n for micro_batch in step for n in micro_batch.sample_S.tolist()] for step in prepared.steps]


@pytest.mark.parametrize("count", [5, 7, 9, 16])
def test_a_batch_that_does_not_divide_evenly_is_trained_on_once_and_never_copied(tmp_path, count):
    # copying samples until 4 steps of 4 are full would train on 16 of them, whatever the count
    prepared = prepare(tmp_path, [trajectory(i, 0, 1.0) for i in range(count)], optimizer_steps=4)
    steps = samples_of(prepared)
    assert sorted(n for step in steps for n in step) == list(range(count))
    assert max(map(len, steps)) - min(map(len, steps)) <= 1
    assert [step[0].counts.sequences for step in prepared.steps] == [len(step) for step in steps]


@pytest.mark.parametrize("num_turns", [1, 3])
def test_turns_do_not_multiply_optimizer_steps(tmp_path, num_turns):
    # one sample per turn would multiply the 2 optimizer steps of an iteration by the number of turns
    turns: list[Turn] = []
    for number in range(num_turns):
        seen = turns[-1].prompt_ids + turns[-1].completion_ids if turns else ()
        turns.append(Turn((*seen, 2, 3), (10 + number,), (-0.5,), (0,), "x"))
    attempts = [replace(trajectory(i, 0, 1.0), turns=tuple(turns)) for i in range(6)]
    prepared = prepare(tmp_path, attempts, optimizer_steps=2)
    assert len(prepared.steps) == 2
    assert prepared.num_samples == 6
    assert prepared.num_trained_tokens == 6 * num_turns


class ForgetfulGrader:
    """Grader that returns one result too few, as a reward worker with a length bug did."""

    name = "forgetful grader"

    async def grade(self, items):
        yield [(index, Score(0.0, False)) for index, _ in enumerate(items[:-1])]


def test_a_grader_that_returns_too_few_results_stops_the_stage():
    """Pairing too few results with the trajectories would give trajectories the scores of others, or none."""
    scheduler = RolloutScheduler(
        RolloutConfig(num_groups=1, group_size=2, max_new_tokens=4),
        seed=0,
        max_positions=32,
        source=ArithmeticSource(ArithmeticProblems(digits=3), seed=0),
        renderer=CharacterRenderer(),
        engines=[EchoEngine("engine 0")],
        graders=[ForgetfulGrader()],
    )
    request = CollectRequest(iteration=1, parent="", weights_version=0, first_problem=0, num_groups=1)
    with pytest.raises(AssertionError, match="forgetful grader gave no grade for 1 of 2 trajectories"):
        asyncio.run(scheduler.collect(request, 10.0))
