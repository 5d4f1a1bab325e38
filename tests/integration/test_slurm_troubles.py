"""One run through everything that a SLURM cluster does to it in a bad night. Nobody helps, and nothing is lost."""

import subprocess
import threading
from collections.abc import Iterator

import pytest

from tests.chaos.outcomes import differences
from tests.integration.test_slurm import HERE, LONG_S, Site
from tests.slurm_cluster import SlurmCluster, find_program
from tests.support import patience, wait_until

SBATCH = """#!/bin/bash
if [ -e {marker} ]; then rm {marker}; kill -9 {controller}; fi
exec {sbatch} "$@"
"""
"""sbatch that first kills the controller if a marker file is there."""


@pytest.fixture
def five_nodes(tmp_path) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path / "slurm", num_nodes=5, name="five") as cluster:
        yield cluster


@pytest.fixture
def site(five_nodes, new_workspace, shared_ray) -> Site:
    workspace = new_workspace("troubled-site")
    return Site(workspace.folder, workspace.environment, shared_ray, five_nodes)


class Output:
    """Output of a command, collected while it runs."""

    def __init__(self, process: subprocess.Popen[str]):
        assert process.stdout is not None
        self._lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self._lines.extend(process.stdout or ()), daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.text, f"the command says '{words}'", LONG_S)


@pytest.mark.exhaustive
def test_a_run_survives_a_preempted_start_a_requeue_hold_a_drained_node_and_a_controller_that_dies_between_legs(
    site, tmp_path
):
    """`legs.max_failures` is 0: one of these troubles, taken for a failure of the run, would end it."""
    unbroken = site.train("name=whole", *HERE, config=site.site)
    slurm, run_id = site.slurm, "troubled-1"
    leg_folder = site.folder / f"roll-data/work/{run_id}/leg-1"
    marker, wrapper = tmp_path / "kill-the-controller", tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(SBATCH.format(marker=marker, controller=slurm.controller_pid, sbatch=find_program("sbatch")))
    wrapper.chmod(0o755)
    site.environment["PATH"] = f"{wrapper.parent}:{site.environment['PATH']}"

    flow = site.begin("troubled", config=site.slow)
    output = Output(flow)
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
