"""Runs on a real SLURM: allocations end, are taken away, break and are cancelled, and what comes out is what an unbroken run
gives, to the bit. Nothing is left behind.

Engines rehearse, so that an iteration takes about a second and a test can come in between.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_core.types.manifest import Manifest
from tests.chaos.outcomes import differences
from tests.integration.conftest import ROLL, Workspace, wait_until
from tests.slurm_cluster import SlurmCluster
from tests.support import ROOT

LONG_S = 550.0
ITERATIONS = 16
SITE = """
extends: tiny.yaml
iterations: 16
inference: {kind: rehearsal, seconds_per_token: 0.15, median_tokens: 5, sigma: 0}
legs:
  max_failures: 0
  time_limit_minutes: 60
  launcher: {kind: slurm, partition: low, exclusive: false, cpus_per_node: 2, memory_gigabytes: 2, signal_seconds: 5}
checkpoint: {every: 5}
"""
SLOW = """
extends: site.yaml
inference: {seconds_per_token: 0.6}
"""
"""For those who take a while to come in between: the same tokens, later."""
TWO_NODES = ("--set", "cluster.nodes=2", "--set", "placement.engines=[1]")


class Site(Workspace):
    """A folder on a login node: commands find a SLURM cluster."""

    def __init__(self, folder: Path, environment: dict[str, str], slurm: SlurmCluster):
        roll_first = {"PATH": f"{Path(ROLL).parent}{os.pathsep}{environment['PATH']}"}
        super().__init__(folder, environment | slurm.environment | roll_first)
        self.slurm = slurm
        self.site = folder / "site.yaml"
        self.site.write_text(SITE)
        self.slow = folder / "slow.yaml"
        self.slow.write_text(SLOW)

    def begin(self, name: str, *settings: str) -> subprocess.Popen[str]:
        return self.start("run", str(self.site), "--set", f"name={name}", *settings)

    def finish(self, process: subprocess.Popen[str]) -> str:
        """Wait for a command; what it said, if it ended well."""
        output, _ = process.communicate(timeout=LONG_S)
        assert process.returncode == 0, output
        return output

    def job_of(self, run_id: str, leg: int) -> str:
        """The id of the newest job of a leg."""
        logs = (self.folder / f"roll-data/work/{run_id}/leg-{leg}").glob("*_submitted.pkl")
        return max((path.name.partition("_")[0] for path in logs), key=int)

    def wait_for_iteration(self, iteration: int, run_id: str = "tiny-1", deadline_s: float = LONG_S) -> None:
        super().wait_for_iteration(iteration, run_id, deadline_s)

    def wait_for_leg(self, leg: int, run_id: str) -> None:
        """Until a leg has committed something."""
        self.wait_until(lambda: any(m.leg == leg for m in self.chain(run_id)), f"leg {leg} of {run_id} commits", LONG_S)

    def submit(self, *arguments: str) -> str:
        """`sbatch ARGUMENTS`; the job's id."""
        command = ["sbatch", "--parsable", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.strip()


@pytest.fixture(scope="module")
def site(slurm, new_workspace) -> Site:
    workspace = new_workspace("site")
    return Site(workspace.folder, workspace.environment, slurm)


@pytest.fixture(scope="module")
def unbroken(site) -> list[Manifest]:
    """One leg of two nodes, that nobody disturbs."""
    assert site.finish(site.begin("whole", *TWO_NODES))
    return site.chain("whole-1")


@pytest.fixture(autouse=True)
def nothing_is_left(slurm) -> Iterator[None]:
    yield
    assert slurm.jobs() == []
    wait_until(lambda: slurm.idle_nodes() == slurm.nodes, "all nodes are idle again", 60.0)
    scratch = Path(f"/tmp/roll-{os.getuid()}")
    assert not list(scratch.iterdir()), "Ray's folders are still there"
    done = subprocess.run(["pgrep", "-af", f"{scratch}/"], capture_output=True, text=True, check=False)
    assert not done.stdout, "Ray is still there"


def test_a_leg_of_two_nodes_trains_with_ray_across_both(site, unbroken):
    assert [manifest.iteration for manifest in unbroken] == list(range(ITERATIONS + 1))
    assert unbroken[-1].nodes == tuple(site.slurm.nodes[:2])
    assert {manifest.leg for manifest in unbroken} == {1}
    assert not list((site.folder / "roll-data/work/whole-1/leg-1").glob("ray-*")), (
        "the token of the leg's Ray is still there"
    )


def test_a_run_outlives_its_time_limit_twice(site, unbroken):
    flow = site.begin("short")
    for leg in (1, 2):
        site.wait_for_leg(leg, "short-1")
        site.slurm.command("scontrol", "update", f"JobId={site.job_of('short-1', leg)}", "EndTime=now+14")
    site.finish(flow)
    chain = site.chain("short-1")
    assert differences(unbroken, chain) == ()
    assert {manifest.leg for manifest in chain} == {1, 2, 3}
    ends = {manifest.leg: manifest.iteration for manifest in chain}
    stored = {checkpoint.iteration for checkpoint in site.checkpoints("short-1")}
    assert {ends[1], ends[2]} <= stored, "a leg that had time to stop left work to do again"


def test_a_run_makes_way_and_comes_back(site, unbroken):
    """First it is requeued by somebody who may, then by a job that goes before it."""
    flow = site.begin("polite")
    site.wait_for_iteration(2, "polite-1")
    job = site.job_of("polite-1", 1)
    site.slurm.command("scontrol", "requeue", job)
    wait_until(lambda: site.slurm.fields(job)["Restarts"] == "1", "the job was requeued", 60.0)
    requeued_at = site.chain("polite-1")[-1].iteration
    site.wait_for_iteration(requeued_at + 2, "polite-1")
    assert site.job_of("polite-1", 1) == job

    everything = f"--nodes={len(site.slurm.nodes)}"
    submit = ["sbatch", "--parsable", "--partition=high", everything, "--exclusive", "--output=/dev/null"]
    urgent = site.slurm.command(*submit, "--wrap=sleep 600").strip()
    wait_until(lambda: site.slurm.fields(urgent)["JobState"] == "RUNNING", "the other job has the nodes", LONG_S)
    waiting = site.slurm.command("squeue", "--noheader", "--partition=low", "--format=%T").split()
    assert set(waiting) <= {"PENDING"}
    wait_until(lambda: ": waits for " in site.roll("show", "polite-1").stdout, "a job waits, as roll show says", 60.0)
    site.slurm.command("scancel", urgent)
    site.finish(flow)
    assert differences(unbroken, site.chain("polite-1")) == ()


def test_a_run_goes_on_when_its_node_is_lost_and_when_its_ray_is(site, unbroken):
    flow = site.begin("robust")
    site.wait_for_iteration(2, "robust-1")
    job = site.job_of("robust-1", 1)
    node = site.slurm.fields(job)["BatchHost"]
    site.slurm.lose_node(node)
    try:
        lost_at = site.chain("robust-1")[-1].iteration
        site.wait_for_iteration(lost_at + 2, "robust-1")
        assert site.slurm.fields(job)["BatchHost"] != node
    finally:
        site.slurm.start_node(node)
    head = subprocess.run(["pgrep", "-f", f"gcs_server.*/tmp/roll-{os.getuid()}/{job}\\."], capture_output=True, check=True)
    os.kill(int(head.stdout.split()[0]), signal.SIGKILL)
    site.finish(flow)
    chain = site.chain("robust-1")
    assert differences(unbroken, chain) == ()
    assert {manifest.leg for manifest in chain} == {1, 2}


def test_a_leg_outlives_its_flow_and_is_taken_over_and_whoever_cancels_has_the_last_word(site, unbroken):
    flow = site.start("run", str(site.slow), "--set", "name=adopted")
    site.wait_for_iteration(2, "adopted-1")
    job = site.job_of("adopted-1", 1)
    flow.kill()
    flow.communicate(timeout=60)
    assert site.slurm.fields(job)["JobState"] == "RUNNING"

    second = site.start("resume", "adopted-1")
    first_row = next(line for line in second.stdout if line.split()[:1] and line.split()[0].isdigit())
    assert site.slurm.jobs() == [job], f"a second leg was submitted beside the first, which was at {first_row}"
    site.slurm.command("scancel", job)
    output, _ = second.communicate(timeout=LONG_S)
    assert second.returncode == 1
    assert "the job of its leg was cancelled" in output
    assert "roll resume adopted-1" in output

    third = site.start("resume", "adopted-1")
    site.wait_for_leg(2, "adopted-1")
    third.send_signal(signal.SIGTERM)
    third.communicate(timeout=120)
    assert third.returncode != 0
    assert site.slurm.jobs() == [], "the flow was told to end and left its job"

    site.finish(site.start("resume", "adopted-1"))
    assert differences(unbroken, site.chain("adopted-1")) == ()


def test_what_would_fail_again_is_not_queued_again(site):
    stopped = site.roll_with("FailingTrainer", "run", str(site.site), "--set", "name=wrong", deadline_s=LONG_S)
    assert stopped.returncode == 1
    assert "another leg would fail in the same way: ValueError: loss is not finite" in stopped.stdout
    assert [path.name for path in (site.folder / "roll-data/work/wrong-1").glob("leg-*")] == ["leg-1"]


def test_scripts_of_two_runs_share_nodes_chain_themselves_and_go_on_when_submitted_again(site, unbroken):
    script = site.folder / "leg.sbatch"
    script.write_text(site.roll("sbatch", str(site.slow)).stdout)
    by_hand = ["--partition=low", "--cpus-per-task=2", "--mem=2G", str(ROOT / "infra/slurm/rlvr.sbatch"), str(site.slow)]
    chained, stopped = site.submit(str(script), "chained"), site.submit(*by_hand, "stopped")
    for run_id in ("chained", "stopped"):
        site.wait_for_iteration(2, run_id)
    assert site.slurm.fields(chained)["BatchHost"] == site.slurm.fields(stopped)["BatchHost"]
    site.slurm.command("scancel", "--signal=USR2", chained)
    site.slurm.command("scancel", stopped)
    wait_until(lambda: site.slurm.fields(stopped)["JobState"] == "CANCELLED", "the job is gone", 60.0)
    again = site.submit(*by_hand, "stopped")
    for job in (chained, again):
        wait_until(lambda job=job: site.slurm.fields(job)["JobState"] == "COMPLETED", f"job {job} is done", LONG_S)
    assert site.slurm.fields(chained)["Restarts"] == "1"
    assert differences(unbroken, site.chain("chained")) == ()
    assert differences(unbroken, site.chain("stopped")) == ()
