"""The newcomer's path: the quickstart, shortened, learns, and all that a user then looks at is there."""

import re

import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

from roll_core.types.refs import record_digest
from tests.integration.conftest import Workspace
from tests.support import ROOT

ITERATIONS = 14


@pytest.fixture(scope="module")
def finished(tmp_path_factory, newcomer, shared_ray):
    workspace = Workspace(tmp_path_factory.mktemp("quickstart"), newcomer, shared_ray)
    config = str(ROOT / "configs/runs/quickstart.yaml")
    done = workspace.roll("run", config, "--set", f"iterations={ITERATIONS}", "--set", "evaluation.every=7")
    assert done.returncode == 0, done.stdout
    return workspace, done.stdout


def test_accuracy_rises(finished):
    workspace, _ = finished
    curve = [m.evaluated.accuracy for m in workspace.chain("quickstart-1") if m.evaluated]
    assert len(curve) == 3
    assert curve[0] < 0.3
    assert curve[-1] > curve[0] + 0.3


@pytest.mark.exhaustive
def test_ppo_with_a_critic_learns_the_same_problem(workspace):
    overrides = ("iterations=20", "evaluation.every=20", "checkpoint.every=20", "tracking.uri=null")
    chain = workspace.train(*overrides, config=ROOT / "configs/runs/quickstart-ppo.yaml")
    curve = [m.evaluated.accuracy for m in chain if m.evaluated]
    assert curve[0] < 0.3
    assert curve[-1] > curve[0] + 0.3
    assert [m.metrics.get("update/held_back") for m in chain[1:5]] == [1.0, 1.0, 1.0, None]
    assert all("update_critic" in m.timings for m in chain[1:])
    # While the policy stands still, so do the returns, and the critic learns them.
    assert chain[3].metrics["critic/squared_error"] < chain[1].metrics["critic/squared_error"]
    assert {"critic/.metadata", "credit-state.json"} <= {
        file.name for file in workspace.checkpoints("quickstart-ppo-1")[-1].files
    }


def test_the_terminal_tells_the_story(finished):
    _, output = finished
    last_line = output.strip().splitlines()[-1]
    assert re.fullmatch(rf"held-out accuracy 0\.\d\d -> 0\.\d\d in {ITERATIONS} iterations", last_line)
    for label in ("run ", "store ", "mlflow ", "report ", "export ", "curve "):
        assert re.search(rf"^{label}", output, re.MULTILINE), f"no '{label}' line in:\n{output}"
    rows = [line for line in output.splitlines() if re.match(r"^\s*\d+ ", line)]
    assert len(rows) == ITERATIONS + 1
    assert "Traceback" not in output


def test_every_iteration_is_a_manifest_that_names_its_parent_and_its_artifacts(finished):
    workspace, _ = finished
    chain = workspace.chain("quickstart-1")
    assert [m.iteration for m in chain] == list(range(ITERATIONS + 1))
    assert [m.parent for m in chain[1:]] == [record_digest(m) for m in chain[:-1]]
    assert chain[-1].next_problem == ITERATIONS * 32
    rollouts = chain[-1].collected.trajectories.digest
    table = pq.read_table(workspace.folder / f"roll-data/store/objects/{rollouts[:2]}/{rollouts[2:]}")
    assert table.num_rows == 512
    assert [c.iteration for c in workspace.checkpoints("quickstart-1")] == [0, 10, ITERATIONS]


def test_mlflow_holds_one_finished_run_with_its_curves_config_and_samples(finished):
    workspace, _ = finished
    client = MlflowClient(f"sqlite:///{workspace.folder}/roll-data/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("roll").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["rollout.group_size"] == "16"
    expected = {"reward/mean", "accuracy/held_out", "update/kl_to_sampler", "update/clip_fraction", "update/entropy"}
    expected |= {"response/mean_tokens", "throughput/tokens_per_second", "seconds/collect", "seconds/update"}
    expected |= {"recover/exact", "recover/replayed_iterations", "checkpoint/megabytes", "export/megabytes"}
    assert expected <= run.data.metrics.keys()
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted(point.step for point in history) == list(range(1, ITERATIONS + 1))
    artifacts = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"config.json", "manifests", "trajectories", "timeline"} <= artifacts


def test_the_report_is_a_page_with_the_headline(finished):
    workspace, _ = finished
    page = (workspace.folder / "roll-data/work/quickstart-1/report.html").read_text()
    assert "held-out accuracy" in page
    assert page.count("<svg") == 4


def test_runs_and_show_read_the_store(finished):
    workspace, _ = finished
    listed = workspace.printed("runs")
    assert "quickstart-1" in listed
    assert "finished" in listed
    shown = workspace.printed("show", "quickstart-1")
    assert f"in {ITERATIONS} iterations" in shown
    assert "recover/replayed_iterations 0, recover/exact 1" in shown
