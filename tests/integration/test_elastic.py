"""What may come and go while a leg lasts, on a real SLURM: nodes beside its own, by which a run gets faster and slower, and
the roles of a node that has lost its Ray. Each run ends where one does that nobody disturbs, to the bit. Nothing is left."""

import os
import signal
import subprocess

from tests.chaos.outcomes import differences
from tests.integration.conftest import wait_until
from tests.integration.test_slurm import LONG_S, Site, nothing_is_left, site

__all__ = ["nothing_is_left", "site"]

ELASTIC = """
extends: site.yaml
iterations: 20
rollout: {slots_per_engine: 2}
inference: {seconds_per_token: 0.3}
evaluation: {every: 10}
legs: {launcher: {partition: high}, elastic: {nodes: 1, partition: low}}
"""
ALONE = ("--set", "legs={launcher: {kind: local}}", "--set", "inference.seconds_per_token=0.001")
"""The same tokens, sooner, on this machine."""


def engines(site: Site, run_id: str) -> list[float]:
    """How many there were when each batch was complete."""
    return [manifest.metrics["rollout/engines"] for manifest in site.chain(run_id)[1:]]


def wait_for_engines(site: Site, number: int) -> None:
    """Until as many have worked on a batch that was committed after now."""
    committed = len(engines(site, "lent-1"))
    site.wait_until(lambda: number in engines(site, "lent-1")[committed:], f"{number} engines make a batch", LONG_S)


def elastic_job(site: Site) -> tuple[str, str]:
    """The job that lends a node, and the node."""
    job, node = site.slurm.command("squeue", "--noheader", "--partition=low", "--states=RUNNING", "--format=%i %N").split()
    return job, node


def test_engines_on_a_node_that_comes_and_goes_change_nothing_but_the_time(site):
    config = site.folder / "elastic.yaml"
    config.write_text(ELASTIC)
    flow = site.start("run", str(config), "--set", "name=lent")
    wait_for_engines(site, 2)

    flow.kill()
    flow.communicate(timeout=60)
    job, taken = elastic_job(site)
    flow = site.start("resume", "lent-1")
    wait_for_engines(site, 2)
    assert elastic_job(site) == (job, taken), "whoever takes a run over takes over what it has in the queue"

    take = ["sbatch", "--parsable", "--partition=high", f"--nodelist={taken}", "--exclusive", "--output=/dev/null"]
    urgent = site.slurm.command(*take, "--wrap=sleep 600").strip()
    wait_until(lambda: site.slurm.fields(urgent)["JobState"] == "RUNNING", "somebody else has the node", LONG_S)
    wait_for_engines(site, 1)
    wait_for_engines(site, 2)
    _, lost = elastic_job(site)
    assert lost != taken
    assert "elastic node 0, job" in site.roll("show", "lent-1").stdout
    site.slurm.command("scancel", urgent)

    site.slurm.lose_node(lost)
    try:
        wait_for_engines(site, 1)
        site.finish(flow)
    finally:
        site.slurm.start_node(lost)

    site.finish(site.start("run", str(config), "--set", "name=alone", *ALONE))
    assert differences(site.chain("alone-1"), site.chain("lent-1")) == ()
    assert {manifest.leg for manifest in site.chain("lent-1")} == {1}
    told = next(line for line in site.roll("show", "lent-1").stdout.splitlines() if line.startswith("engines"))
    assert "1 in " in told
    assert "2 in " in told


def test_roles_of_a_node_whose_ray_dies_are_started_again_in_the_same_allocation(site):
    """Those of the trainer, whom nobody can do without."""
    apart = ["--set", "cluster.nodes=2", "--set", "placement={trainer: [1], engines: [0]}"]
    flow = site.begin("rebuilt", *apart)
    site.wait_for_iteration(2, "rebuilt-1")
    job = site.job_of("rebuilt-1", 1)
    pattern = f"raylet/raylet .*/tmp/roll-{os.getuid()}/{job}\\.0\\.1/"
    raylet = subprocess.run(["pgrep", "-f", pattern], capture_output=True, check=True)
    os.kill(int(raylet.stdout.split()[0]), signal.SIGKILL)
    site.finish(flow)
    chain = site.chain("rebuilt-1")
    assert {manifest.leg for manifest in chain} == {1}
    assert site.slurm.fields(job)["Restarts"] == "0"

    site.finish(site.begin("whole", *ALONE))
    assert differences(site.chain("whole-1"), chain) == ()
