"""Generated problems, and graders in subprocesses, in a real run."""

import pytest

from roll_core.store.records.rollouts import decode_trajectories
from tests.integration.conftest import REHEARSED
from tests.integration.faulty_roles import DeadlyReward, use

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


def test_a_long_prompt_and_an_answer_that_kills_its_reward_worker_cost_a_sample_each(workspace):
    """Five rows, one too long and one deadly: the long one is replaced, and the deadly attempt counts as failed."""
    rows, held_out = workspace.folder / "rows.jsonl", workspace.folder / "held_out.jsonl"
    for file, prompts in {
        rows: ["21>", "43>", "65>", "87>", "1" * 30],
        held_out: ["31>", "53>", "75>", "97>", "2" * 30],
    }.items():
        file.write_text("".join(f'{{"prompt": "{prompt}", "answer": "{prompt[:2]}"}}\n' for prompt in prompts))
    with pytest.MonkeyPatch.context() as patch:
        use(patch, DeadlyReward)
        chain = workspace.train(
            *REHEARSED,
            f"problems={{kind: jsonl, train: {rows}, held_out: {held_out}}}",
            "evaluation={num_problems: 5, every: 1}",
            *("iterations=1", "warm_start=null", "checkpoint.export_at_end=false"),
        )
    last = chain[-1]
    assert sorted(last.draws.outcomes) in ([*"tttt"], [*"ttttx"])
    assert last.metrics["rollout/failed_groups"] == last.draws.outcomes.count("x")
    trajectories = decode_trajectories(workspace.store.get(last.collected.trajectories))
    (failed,) = [t for t in trajectories if t.failure is not None]
    assert failed.attempt == 1
    assert (
        f"problem {failed.problem_id}: 3 reward workers in a row died while they graded this answer" in failed.failure.cause
    )
    assert last.metrics["rollout/failed"] == 1.0
    assert last.metrics["accuracy/held_out_failed"] == 1.0
