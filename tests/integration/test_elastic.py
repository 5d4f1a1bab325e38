"""Elastic nodes on a real SLURM: engines join and leave while a leg runs, and the run ends equal to one on fixed nodes, to
the bit. Also: the roles of a node that has lost its Ray. Nothing is left behind."""

import os
import signal
import subprocess

import pytest

from tests.chaos.outcomes import differences
from tests.integration.test_slurm import HERE, LONG_S, Site, nothing_is_left, site
from tests.support import patience

__all__ = ["nothing_is_left", "site"]

ELASTIC = """
extends: site.yaml
iterations: 14
rollout: {slots_per_engine: 2}
inference: {seconds_per_token: 0.2}
evaluation: {every: 10}
legs: {launcher: {partition: high}, elastic: {nodes: 1, partition: low}}
"""


def engines(site: Site, run_id: str) -> list[float]:
    """Number of engines when each batch was complete."""
    return [manifest.metrics["rollout/engines"] for manifest in site.chain(run_id)[1:]]


def wait_for_engines(site: Site, run_id: str, number: int) -> None:
    """Wait until as many engines have worked on a batch that was committed after now."""
    committed = len(engines(site, run_id))
    site.wait_until(lambda: number in engines(site, run_id)[committed:], f"{number} engines make a batch", LONG_S)


def elastic_job(site: Site) -> tuple[str, str]:
    """The elastic job, and its node."""
    job, node = site.slurm.command("squeue", "--noheader", "--partition=low", "--states=RUNNING", "--format=%i %N").split()
    return job, node


def test_engines_on_a_node_that_is_lost_change_nothing_but_the_time(site):
    config = site.folder / "elastic.yaml"
    config.write_text(ELASTIC)
    flow = site.begin("lent", config=config)
    wait_for_engines(site, "lent-1", 2)
    _, node = elastic_job(site)
    site.slurm.lose_node(node)
    try:
        wait_for_engines(site, "lent-1", 1)
        site.finish(flow)
    finally:
        site.slurm.start_node(node)
    assert differences(site.train("name=alone", *HERE, "legs.elastic=null", config=config), site.chain("lent-1")) == ()
    assert {manifest.leg for manifest in site.chain("lent-1")} == {1}
    shown = next(line for line in site.shown("lent-1").splitlines() if line.startswith("engines"))
    assert "1 in " in shown
    assert "2 in " in shown


@pytest.mark.exhaustive
def test_elastic_jobs_outlive_their_flow_and_come_back_on_another_node_after_a_preemption(site):
    config = site.folder / "adopted.yaml"
    config.write_text(ELASTIC.replace("iterations: 14", "iterations: 20"))
    flow = site.begin("adopted", config=config)
    wait_for_engines(site, "adopted-1", 2)
    flow.kill()
    flow.communicate(timeout=patience(60))
    job, node = elastic_job(site)
    flow = site.start("resume", "adopted-1")
    wait_for_engines(site, "adopted-1", 2)
    assert elastic_job(site) == (job, node), "a flow that takes a run over takes over its elastic jobs"
    with site.preempting(f"--nodelist={node}"):
        wait_for_engines(site, "adopted-1", 1)
        wait_for_engines(site, "adopted-1", 2)
        assert elastic_job(site)[1] != node
        assert "elastic node 0, job" in site.shown("adopted-1")
    site.finish(flow)
    unbroken = site.train("name=fixed", *HERE, "legs.elastic=null", config=config)
    assert differences(unbroken, site.chain("adopted-1")) == ()
    assert {manifest.leg for manifest in site.chain("adopted-1")} == {1}


@pytest.mark.exhaustive
def test_roles_of_a_node_whose_ray_dies_are_started_again_in_the_same_allocation(site):
    """The trainer's node: the run cannot continue without its roles."""
    flow = site.begin("rebuilt", "cluster.nodes=2", "placement={trainer: [1], engines: [0]}")
    site.wait_for_iteration(2, "rebuilt-1")
    job = site.job_of("rebuilt-1", 1)
    pattern = f"raylet/raylet .*/tmp/roll-{os.getuid()}/{job}\\.0\\.1/"
    raylet = subprocess.run(["pgrep", "-f", pattern], capture_output=True, check=True)
    os.kill(int(raylet.stdout.split()[0]), signal.SIGKILL)
    site.finish(flow)
    chain = site.chain("rebuilt-1")
    assert {manifest.leg for manifest in chain} == {1}
    assert site.slurm.fields(job)["Restarts"] == "0"
    assert differences(site.train("name=whole", *HERE, config=site.site), chain) == ()
