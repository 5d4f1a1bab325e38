"""The nightly regression flow on a real Prefect server and MLflow: an equal run is accepted, a worse one fails and is no
baseline."""

import asyncio

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from roll_core.config.operations.services import TrackingConfig
from roll_core.tracking.baselines import Baselines
from tests.integration.conftest import TRACKED, Workspace

PLAN = f"""
references:
- config: tiny.yaml
  overrides: [warm_start.steps=60, rollout.num_groups=16, evaluation.num_problems=64, "{TRACKED}"]
"""
PLANTED = "warm_start.steps=1"
"""Regression of the third night: a policy that has hardly seen an answer."""


class Nights:
    """Three nights of one reference run; of each, the exit code and the output in one line."""

    def __init__(self, workspace: Workspace):
        (workspace.folder / "nightly.yaml").write_text(PLAN)
        self.workspace = workspace
        self.first = self._night()
        self.second = self._night()
        self.third = self._night("--set", PLANTED)
        self.tracking = TrackingConfig(uri=workspace.tracking)

    def _night(self, *arguments: str) -> tuple[int, str]:
        exit_code, output = self.workspace.roll_here("nightly", "nightly.yaml", *arguments)
        return exit_code, " ".join(output.split())

    def accepted(self) -> list[str]:
        return [run.run_id for run in Baselines(self.tracking).accepted("tiny")]

    def in_mlflow(self) -> dict[str, Run]:
        client = MlflowClient(self.tracking.uri)
        experiment = client.get_experiment_by_name("roll")
        assert experiment is not None
        return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


@pytest.fixture(scope="module")
def nights(new_workspace, tracked) -> Nights:
    return Nights(tracked(new_workspace("nightly")))


async def on_the_server(api_url: str) -> tuple[list[str], list[str]]:
    """States of the nightly flow runs, and their pages, oldest first."""
    with temporary_settings({PREFECT_API_URL: api_url}):
        async with get_client() as client:
            runs = {run.id: run for run in await client.read_flow_runs() if run.name and run.deployment_id is None}
            nightly = [f.id for f in await client.read_flows() if f.name == "nightly"]
            states = sorted((r.start_time, r.state_name) for r in runs.values() if r.flow_id in nightly)
            pages = sorted((a.created, a.data) for a in await client.read_artifacts() if a.key == "nightly-regression")
    return [state for _, state in states], [page for _, page in pages]


def test_the_first_run_and_one_that_equals_it_are_accepted(nights):
    exit_code, output = nights.first
    assert exit_code == 0, output
    assert "tiny-1: accepted; 0 comparisons, none worse; the first run of this reference" in output
    exit_code, output = nights.second
    assert exit_code == 0, output
    assert "tiny-2: accepted; 4 comparisons, none worse; the weights of tiny-1, to the bit" in output


def test_a_run_that_learns_worse_fails_and_says_in_which_quantity(nights):
    exit_code, output = nights.third
    assert exit_code == 1, output
    assert "tiny-3: regression: " in output
    assert "reward/last is " in output


def test_a_rejected_run_is_no_baseline_until_it_is_accepted_by_hand(nights):
    assert nights.accepted() == ["tiny-1", "tiny-2"]
    assert "tiny-3 is accepted" in nights.workspace.printed("nightly", "nightly.yaml", "--accept", "tiny-3")
    assert nights.accepted() == ["tiny-3"], "from now on runs are compared with this one"


def test_verdict_and_reasons_are_on_the_run_in_mlflow(nights):
    runs = nights.in_mlflow()
    assert runs["tiny-2"].data.tags["roll.nightly.verdict"] == "accepted"
    assert runs["tiny-2"].data.tags["roll.nightly.reasons"] == "none"
    assert "reward/last is " in runs["tiny-3"].data.tags["roll.nightly.reasons"]
    assert runs["tiny-3"].data.metrics["nightly/reward/last"] < runs["tiny-2"].data.metrics["nightly/reward/last"] - 0.05
    assert {run.info.status for run in runs.values()} == {"FINISHED"}


def test_every_second_of_a_leg_is_accounted_for(nights):
    shown = nights.workspace.printed("show", "tiny-1").splitlines()
    [header] = [number for number, line in enumerate(shown) if line.startswith("leg  iterations")]
    leg, num_committed, *seconds, share = shown[header + 1].split()
    useful, lost, starting, _, _, down = map(float, seconds)
    assert (leg, num_committed, lost, down) == ("1", "4", 0.0, 0.0)
    assert min(useful, starting) > 0.0
    assert 0 < int(share.rstrip("%")) < 100
    assert nights.in_mlflow()["tiny-1"].data.metrics["goodput/lost_seconds"] == 0.0


def test_every_night_has_a_page_on_the_prefect_server(nights):
    states, pages = asyncio.run(on_the_server(nights.workspace.environment["PREFECT_API_URL"]))
    assert states == ["Completed", "Completed", "Failed"]
    assert ["accepted" in page.splitlines()[0] for page in pages] == [True, True, False]
    assert "->" not in pages[1], "settings and origin come back from MLflow as they were logged"
    assert "- warm_start.steps: 60 -> 1" in pages[-1].splitlines()
