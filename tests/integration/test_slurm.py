"""Runs on a real SLURM: allocations end, are preempted, fail and are cancelled, and the run ends equal to an unbroken one,
to the bit. Nothing is left behind.

Engines and trainer rehearse, so that an iteration takes about a second and a test can intervene. Only the last iteration is
evaluated: a leg that is told to stop leaves an evaluation at once, and its uncommitted update is made again.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_core.types.manifest import Manifest
from tests.chaos.outcomes import differences
from tests.integration.conftest import ROLL, SharedRay, Workspace, settings
from tests.slurm_cluster import SlurmCluster, find_program
from tests.support import ROOT, patience, wait_until

LONG_S = 300.0
ITERATIONS = 12
SITE = """
extends: tiny.yaml
iterations: 12
inference: {kind: rehearsal, seconds_per_token: 0.15, median_tokens: 5, sigma: 0}
training: {backend: rehearsal}
legs:
  max_failures: 0
  time_limit_minutes: 60
  launcher: {kind: slurm, partition: low, exclusive: false, cpus_per_node: 2, memory_gigabytes: 2, signal_seconds: 100}
checkpoint: {every: 5}
evaluation: {every: 12}
"""
SLOW = """
extends: site.yaml
inference: {seconds_per_token: 0.6}
"""
"""The same tokens, later: for interventions that take a while."""
HERE = ("legs={launcher: {kind: local}}", "inference.seconds_per_token=0.001")
"""The same tokens, sooner, on this machine."""
TWO_NODES = ("cluster.nodes=2", "placement.engines=[1]")


class Site(Workspace):
    """Folder on a login node: commands find a SLURM cluster."""

    def __init__(self, folder: Path, environment: dict[str, str], shared_ray: SharedRay, slurm: SlurmCluster):
        roll_first = {"PATH": f"{Path(ROLL).parent}{os.pathsep}{environment['PATH']}"}
        super().__init__(folder, environment | slurm.environment | roll_first, shared_ray)
        self.slurm = slurm
        self.site = folder / "site.yaml"
        self.site.write_text(SITE)
        self.slow = folder / "slow.yaml"
        self.slow.write_text(SLOW)

    def begin(self, name: str, *overrides: str, config: Path | None = None) -> subprocess.Popen[str]:
        """Start `roll run` with legs on SLURM."""
        return self.start("run", str(config or self.site), *settings(f"name={name}", *overrides))

    def finish(self, process: subprocess.Popen[str]) -> str:
        """Wait for a command that must succeed; return its output."""
        output, _ = process.communicate(timeout=patience(LONG_S))
        assert process.returncode == 0, output
        return output

    def shown(self, run_id: str) -> str:
        """Output of `roll show`, which asks SLURM what jobs wait for."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            return self.printed("show", run_id)

    def job_of(self, run_id: str, leg: int) -> str:
        """Id of the newest job of a leg."""
        logs = (self.folder / f"roll-data/work/{run_id}/leg-{leg}").glob("*_submitted.pkl")
        return max((path.name.partition("_")[0] for path in logs), key=int)

    def wait_for_iteration(self, iteration: int, run_id: str = "tiny-1", deadline_s: float = LONG_S) -> None:
        super().wait_for_iteration(iteration, run_id, deadline_s)

    def wait_for_leg(self, leg: int, run_id: str) -> None:
        """Wait until a leg has committed an iteration."""
        self.wait_until(lambda: any(m.leg == leg for m in self.chain(run_id)), f"leg {leg} of {run_id} commits", LONG_S)

    def end_soon(self, job: str) -> None:
        """Set the end of a job's allocation to soon, so that its signal comes at once, with time enough to stop."""
        self.slurm.command("scontrol", "update", f"JobId={job}", "EndTime=now+90")

    @contextlib.contextmanager
    def preempting(self, *options: str) -> Iterator[None]:
        """Hold nodes in the partition that preempts others, for the duration of the block."""
        submit = ("sbatch", "--parsable", "--partition=high", *options, "--exclusive", "--output=/dev/null")
        urgent = self.slurm.command(*submit, "--wrap=sleep 600").strip()
        wait_until(lambda: self.slurm.fields(urgent)["JobState"] == "RUNNING", "the other job has the nodes", LONG_S)
        yield
        self.slurm.command("scancel", urgent)

    def submit(self, *arguments: str) -> str:
        """Run `sbatch ARGUMENTS`; return the job's id."""
        command = ["sbatch", "--parsable", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=patience(60), check=True
        )
        return done.stdout.strip()

    def wait_for_job(self, job: str, state: str) -> None:
        wait_until(lambda: self.slurm.fields(job)["JobState"] == state, f"job {job} is {state}", LONG_S)


@pytest.fixture(scope="module")
def site(slurm, new_workspace, shared_ray) -> Site:
    workspace = new_workspace("site")
    return Site(workspace.folder, workspace.environment, shared_ray, slurm)


@pytest.fixture
def five_nodes(tmp_path_factory, new_workspace, shared_ray) -> Iterator[Site]:
    """Site with a cluster of its own, of five nodes."""
    workspace = new_workspace("five-nodes")
    with SlurmCluster(tmp_path_factory.mktemp("five"), num_nodes=5, name="five") as cluster:
        yield Site(workspace.folder, workspace.environment, shared_ray, cluster)


@pytest.fixture(scope="module")
def unbroken(site) -> list[Manifest]:
    """Manifests of a run of the same config in one leg on this machine."""
    return site.train("name=whole", *HERE, config=site.site)


@pytest.fixture(autouse=True)
def nothing_is_left(slurm) -> Iterator[None]:
    """After every test: no job, no busy node, no folder and no process of a leg's Ray."""
    yield
    assert slurm.jobs() == []
    wait_until(lambda: slurm.idle_nodes() == slurm.nodes, "all nodes are idle again", 60.0)
    scratch = Path(f"/tmp/roll-{os.getuid()}")
    assert not list(scratch.iterdir()), "folders of Ray are left"
    done = subprocess.run(["pgrep", "-af", f"{scratch}/"], capture_output=True, text=True, check=False)
    assert not done.stdout, "processes of Ray are left"


def test_a_run_survives_a_killed_flow_a_time_limit_and_a_preemption(site, unbroken):
    """Leg 1 has two nodes with Ray across both. It outlives its flow, is found by the next one, and reaches its time limit.
    Leg 2 makes way for a job of higher priority."""
    flow = site.begin("chain", *TWO_NODES, config=site.slow)
    site.wait_for_iteration(1, "chain-1")
    job = site.job_of("chain-1", 1)
    flow.kill()
    flow.communicate(timeout=patience(60))
    assert site.slurm.fields(job)["JobState"] == "RUNNING"

    flow = site.start("resume", "chain-1")
    reached = len(site.chain("chain-1"))
    site.wait_for_iteration(reached, "chain-1")
    assert site.slurm.jobs() == [job], "a second leg was submitted beside the first"
    site.end_soon(job)

    site.wait_for_leg(2, "chain-1")
    with site.preempting(f"--nodes={len(site.slurm.nodes)}"):
        waiting = site.slurm.command("squeue", "--noheader", "--partition=low", "--format=%T").split()
        assert set(waiting) <= {"PENDING"}
        wait_until(lambda: ": waits for " in site.shown("chain-1"), "a job waits, as roll show says", 60.0)
    site.finish(flow)

    chain = site.chain("chain-1")
    assert differences(unbroken, chain) == ()
    assert [manifest.iteration for manifest in chain] == list(range(ITERATIONS + 1))
    assert chain[1].nodes == tuple(site.slurm.nodes[:2])
    last_of_leg = {manifest.leg: manifest.iteration for manifest in chain}
    stored = {checkpoint.iteration for checkpoint in site.checkpoints("chain-1")}
    assert last_of_leg[1] in stored, "a leg that had time to stop left work to do again"
    assert not list((site.folder / "roll-data/work/chain-1/leg-1").glob("ray-*")), "the token of the leg's Ray is left"


@pytest.mark.exhaustive
def test_a_script_carries_a_run_without_a_flow_and_requeues_itself(site, unbroken):
    script = site.folder / "leg.sbatch"
    script.write_text(site.printed("sbatch", str(site.site)))
    job = site.submit(str(script), "scripted")
    site.wait_for_iteration(2, "scripted")
    site.slurm.command("scancel", "--signal=USR2", job)
    site.wait_for_job(job, "COMPLETED")
    assert site.slurm.fields(job)["Restarts"] == "1"
    assert differences(unbroken, site.chain("scripted")) == ()


@pytest.mark.exhaustive
def test_a_run_outlives_its_time_limit_twice(site, unbroken):
    flow = site.begin("short")
    for leg in (1, 2):
        site.wait_for_leg(leg, "short-1")
        site.end_soon(site.job_of("short-1", leg))
    site.finish(flow)
    chain = site.chain("short-1")
    assert differences(unbroken, chain) == ()
    assert {manifest.leg for manifest in chain} == {1, 2, 3}
    last_of_leg = {manifest.leg: manifest.iteration for manifest in chain}
    stored = {checkpoint.iteration for checkpoint in site.checkpoints("short-1")}
    assert {last_of_leg[1], last_of_leg[2]} <= stored, "a leg that had time to stop left work to do again"


@pytest.mark.exhaustive
def test_a_leg_that_is_requeued_starts_again_in_the_same_job(site, unbroken):
    flow = site.begin("requeued")
    site.wait_for_iteration(2, "requeued-1")
    job = site.job_of("requeued-1", 1)
    site.slurm.command("scontrol", "requeue", job)
    wait_until(lambda: site.slurm.fields(job)["Restarts"] == "1", "the job was requeued", 60.0)
    requeued_at = site.chain("requeued-1")[-1].iteration
    site.wait_for_iteration(requeued_at + 2, "requeued-1")
    assert site.job_of("requeued-1", 1) == job
    site.finish(flow)
    assert differences(unbroken, site.chain("requeued-1")) == ()


@pytest.mark.exhaustive
def test_a_run_continues_when_its_node_is_lost_and_when_its_ray_is(site, unbroken):
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


@pytest.mark.exhaustive
def test_a_cancelled_job_stops_the_run_and_a_terminated_flow_cancels_its_job(site, unbroken):
    flow = site.begin("cancelled", config=site.slow)
    site.wait_for_iteration(2, "cancelled-1")
    site.slurm.command("scancel", site.job_of("cancelled-1", 1))
    output, _ = flow.communicate(timeout=patience(LONG_S))
    assert flow.returncode == 1
    assert "the job of its leg was cancelled" in output
    assert "roll resume cancelled-1" in output

    second = site.start("resume", "cancelled-1")
    site.wait_for_leg(2, "cancelled-1")
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=patience(120))
    assert second.returncode != 0
    assert site.slurm.jobs() == [], "the flow was terminated and left its job"

    site.finish(site.start("resume", "cancelled-1"))
    assert differences(unbroken, site.chain("cancelled-1")) == ()


@pytest.mark.exhaustive
def test_a_deterministic_failure_gets_one_more_leg(site):
    arguments = ("FailingTrainer", "run", str(site.site), *settings("name=wrong"))
    stopped = site.run_module("tests.integration.faulty_roles", *arguments, deadline_s=LONG_S)
    assert stopped.returncode == 1
    assert "two legs in a row failed in the same way: ValueError: loss is not finite" in stopped.stdout
    legs = sorted(path.name for path in (site.folder / "roll-data/work/wrong-1").glob("leg-*"))
    assert legs == ["leg-1", "leg-2"]


@pytest.mark.exhaustive
def test_scripts_of_two_runs_share_a_node_and_one_that_was_cancelled_continues_when_submitted_again(site, unbroken):
    script = site.folder / "two.sbatch"
    script.write_text(site.printed("sbatch", str(site.slow)))
    by_hand = ["--partition=low", "--cpus-per-task=2", "--mem=2G", str(ROOT / "infra/slurm/rlvr.sbatch"), str(site.slow)]
    generated, stopped = site.submit(str(script), "generated"), site.submit(*by_hand, "stopped")
    for run_id in ("generated", "stopped"):
        site.wait_for_iteration(2, run_id)
    assert site.slurm.fields(generated)["BatchHost"] == site.slurm.fields(stopped)["BatchHost"]
    site.slurm.command("scancel", stopped)
    site.wait_for_job(stopped, "CANCELLED")
    again = site.submit(*by_hand, "stopped")
    for job in (generated, again):
        site.wait_for_job(job, "COMPLETED")
    assert differences(unbroken, site.chain("generated")) == ()
    assert differences(unbroken, site.chain("stopped")) == ()


class Output:
    """Output of a command, collected while it runs. The command is killed at the end of the block, should it still run."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self._lines.extend(process.stdout or ()), daemon=True)

    def __enter__(self) -> "Output":
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.text, f"the command says '{words}'", LONG_S)


def kill_controller_at_next_sbatch(site: Site, folder: Path) -> Path:
    """Give a site an sbatch that first kills the controller if a marker file is there; return the path of the marker."""
    marker, sbatch = folder / "kill-the-controller", folder / "bin" / "sbatch"
    sbatch.parent.mkdir()
    script = (
        f'if [ -e {marker} ]; then rm {marker}; kill -9 {site.slurm.controller_pid}; fi; exec {find_program("sbatch")} "$@"'
    )
    sbatch.write_text(f"#!/bin/bash\n{script}\n")
    sbatch.chmod(0o755)
    site.environment["PATH"] = f"{sbatch.parent}{os.pathsep}{site.environment['PATH']}"
    return marker


@pytest.mark.exhaustive
def test_a_run_survives_a_preempted_start_a_requeue_hold_a_drained_node_and_a_controller_that_dies_between_legs(
    five_nodes, tmp_path
):
    """`legs.max_failures` is 0: one of these troubles, taken for a failure of the run, would end it."""
    site, slurm, run_id = five_nodes, five_nodes.slurm, "troubled-1"
    unbroken = site.train("name=whole", *HERE, config=site.site)
    leg_folder = site.folder / f"roll-data/work/{run_id}/leg-1"
    marker = kill_controller_at_next_sbatch(site, tmp_path)

    flow = site.begin("troubled", config=site.slow)
    with Output(flow) as output:
        wait_until(lambda: bool(list(leg_folder.glob("ray-*.token"))), "leg 1 starts Ray and its driver", LONG_S)
        assert site.chain(run_id) == []
        with site.preempting(f"--nodes={len(slurm.nodes)}"):
            pass

        site.wait_for_iteration(2, run_id)
        job = slurm.jobs()[0]
        slurm.command("scontrol", "requeuehold", job)
        output.wait_for(f"release it with: scontrol release {job}")
        held_at = site.chain(run_id)[-1].iteration
        slurm.command("scontrol", "release", job)

        site.wait_for_iteration(held_at + 2, run_id)
        drained = slurm.fields(job)["BatchHost"]
        slurm.command("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=test")
        marker.touch()
        slurm.command("scancel", "--signal=USR2", job)
        output.wait_for("SLURM does not answer")
        assert not marker.exists()
        slurm.lose_controller()
        left_at = site.chain(run_id)[-1].iteration
        slurm.start_controller()
        assert flow.wait(patience(LONG_S)) == 0, output.text

    chain = site.chain(run_id)
    assert differences(unbroken, chain) == ()
    assert drained not in {node for manifest in chain[left_at + 1 :] for node in manifest.nodes}
    assert slurm.jobs() == []
