"""Rehearsal backend of the trainer: its digest depends on everything that was trained on, and on nothing else."""

import subprocess
import sys

import pytest

from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.training.rehearsal import RehearsalLearner
from tests.support import tiny_config, trajectory

REHEARSED_ENGINES = {"kind": "rehearsal", "seconds_per_token": 0.001, "median_tokens": 4, "sigma": 0.0}
FIRST = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0), trajectory(1, 0, None)]
SECOND = [trajectory(0, 0, 0.0), trajectory(0, 1, 1.0)]


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return tiny_config(tmp_path, inference=REHEARSED_ENGINES, training={"backend": "rehearsal"})


def digest_after(config: RunConfig, *batches: list) -> str:
    learner = RehearsalLearner(config)
    for iteration, batch in enumerate(batches, start=1):
        learner.update(learner.prepare(batch, iteration - 1), iteration)
    return learner.state.digest


def test_the_same_batches_in_the_same_order_lead_to_the_same_digest(config):
    assert digest_after(config, FIRST, SECOND) == digest_after(config, FIRST, SECOND)


def test_order_batches_rewards_and_seed_change_the_digest(config, tmp_path):
    other_seed = tiny_config(tmp_path, inference=REHEARSED_ENGINES, training={"backend": "rehearsal"}, seed=1)
    digests = {
        digest_after(config, FIRST, SECOND),
        digest_after(config, SECOND, FIRST),
        digest_after(config, FIRST),
        digest_after(config, [trajectory(0, 0, 1.0), trajectory(0, 1, 0.5)], SECOND),
        digest_after(other_seed, FIRST, SECOND),
    }
    assert len(digests) == 5


def test_trajectories_without_a_grade_are_not_trained_on(config):
    prepared = RehearsalLearner(config).prepare(FIRST, 0)
    assert (prepared.trained_groups, prepared.num_samples, prepared.num_trained_tokens) == ({0}, 2, 6)


def test_a_snapshot_is_the_state_when_it_was_taken_and_can_be_continued_from(config, tmp_path):
    learner = RehearsalLearner(config)
    learner.warm_start(10)
    before = learner.state
    write = learner.snapshot()
    learner.update(learner.prepare(FIRST, 0), 1)
    write(tmp_path / "checkpoint")
    resumed = RehearsalLearner(config)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.state == before != learner.state


def test_the_rehearsal_rank_imports_no_torch():
    program = "import sys, roll_core.roles.rehearsal_rank; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"backend": "rehearsal"}},
            "training.backend rehearsal has no weights for engines of inference.kind torch",
        ),
        ({"training": {"seconds_per_token": 0.1}}, "training.seconds_per_token is of training.backend rehearsal"),
        (
            {"training": {"backend": "rehearsal"}, "inference": REHEARSED_ENGINES, "weights": {"transport": "store"}},
            "weights.transport store moves tensors, and training.backend rehearsal has none",
        ),
    ],
)
def test_settings_that_contradict_a_rehearsed_trainer_are_refused(tmp_path, sections, message):
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, **sections)
