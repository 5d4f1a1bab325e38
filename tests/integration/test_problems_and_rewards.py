"""Generated problems, and graders in subprocesses, in a real run."""

import pytest

from roll_core.store.records.rollouts import decode_trajectories
from tests.integration.conftest import REHEARSED

GYM = (
    "problems={kind: reasoning_gym, tasks: [{name: chain_sum, params: {max_terms: 2, max_digits: 1}}]}",
    "model.max_positions=128",
)


@pytest.mark.parametrize(("overrides", "reward"), [(GYM, "reasoning_gym"), ((), "math_verify")])
def test_every_trajectory_of_a_run_is_graded(workspace, overrides, reward):
    short = ("iterations=2", "warm_start=null", "evaluation.num_problems=4", "checkpoint.export_at_end=false")
    for manifest in workspace.train(*REHEARSED, *overrides, f"reward={{kind: {reward}}}", *short)[1:]:
        trajectories = decode_trajectories(workspace.store.get(manifest.collected.trajectories))
        assert len(trajectories) == 16
        assert [t.failure for t in trajectories] == [None] * 16
