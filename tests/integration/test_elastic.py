"""A run that may use a node beside that of its leg, on a real SLURM: it comes, is taken away and comes back. The run gets
faster and slower by that, and ends where a run without it ends, to the bit. Nothing is left behind."""

from roll_core.reporting.chaos import differences
from tests.integration.conftest import wait_until
from tests.integration.test_slurm import LONG_S, Site, nothing_is_left, site

__all__ = ["nothing_is_left", "site"]

ELASTIC = """
extends: site.yaml
iterations: 24
rollout: {slots_per_engine: 2}
inference: {seconds_per_token: 0.3}
evaluation: {every: 12}
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
    wait_until(lambda: number in engines(site, "lent-1")[committed:], f"a batch is made by {number} engines", LONG_S)


def test_engines_on_a_node_that_comes_and_goes_change_nothing_but_the_time(site):
    config = site.folder / "elastic.yaml"
    config.write_text(ELASTIC)
    flow = site.start("run", str(config), "--set", "name=lent")
    wait_for_engines(site, 2)

    (job,) = site.slurm.command("squeue", "--noheader", "--partition=low", "--format=%i").split()
    node = site.slurm.fields(job)["NodeList"]
    take = ["sbatch", "--parsable", "--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null"]
    urgent = site.slurm.command(*take, "--wrap=sleep 600").strip()
    wait_until(lambda: site.slurm.fields(urgent)["JobState"] == "RUNNING", "somebody else has the node", LONG_S)
    wait_for_engines(site, 1)
    wait_for_engines(site, 2)
    assert "elastic node 0, job" in site.roll("show", "lent-1").stdout
    site.slurm.command("scancel", urgent)
    site.finish(flow)

    site.finish(site.start("run", str(config), "--set", "name=alone", *ALONE))
    assert differences(site.chain("alone-1"), site.chain("lent-1")) == ()
    assert {manifest.leg for manifest in site.chain("lent-1")} == {1}
    assert "engines  1 in iterations 1" in site.roll("show", "lent-1").stdout
