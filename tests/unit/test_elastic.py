"""Elastic nodes: which jobs are queued for them, which engines start on them, and which settings are refused."""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from infra.slurm.elastic import POLL_S, RESUBMIT_S, ElasticJobs
from infra.slurm.launcher import JobEnd, LegRequest
from infra.slurm.queue import SlurmUnavailable
from roll_core.config.load import load_config
from roll_core.config.operations.legs import ElasticConfig, SlurmLauncherConfig
from roll_core.config.operations.weights import WeightsTransport
from roll_core.errors import UserError
from roll_core.reporting.goodput import engines_over_time
from roll_core.roles.elastic import MAX_STARTS_PER_SLOT, free_engine_slots
from roll_core.rollout.meters import Meters
from roll_core.types.leg import LegEnding
from tests.stored_runs import bare_manifest
from tests.support import ROOT

REQUEST = LegRequest("run.elastic-", Path("elastic"), 1, 8, 8, 60, exclude=("old",))


@dataclass
class FakeQueue:
    """Launcher with a queue of jobs, each of which ends when the test calls `end`."""

    jobs: dict[str, str] = field(default_factory=dict)
    ends: dict[str, JobEnd] = field(default_factory=dict)
    submitted: list[LegRequest] = field(default_factory=list)
    is_down: bool = False

    def submit_elastic(self, request: LegRequest, run_folder: Path) -> "FakeJob":
        if self.is_down:
            raise SlurmUnavailable("sbatch: timed out")
        self.submitted.append(request)
        self.jobs[request.name] = str(len(self.submitted))
        return self.attach(self.jobs[request.name], request.folder)

    def find(self, prefix: str) -> dict[str, str]:
        return {name: job_id for name, job_id in self.jobs.items() if name.startswith(prefix)}

    def attach(self, job_id: str, folder: Path) -> "FakeJob":
        return FakeJob(job_id, self)

    def end(self, name: str, ending: LegEnding | None = None, lost_nodes: tuple[str, ...] = ()) -> None:
        self.ends[self.jobs.pop(name)] = JobEnd(ending, None, "why", lost_nodes)


@dataclass
class FakeJob:
    """Job in a fake queue."""

    job_id: str
    queue: FakeQueue

    def has_ended(self) -> bool:
        return self.job_id in self.queue.ends

    def end(self) -> JobEnd:
        return self.queue.ends[self.job_id]


def jobs_for_two_nodes(queue: FakeQueue) -> ElasticJobs:
    """Elastic jobs for two nodes."""
    return ElasticJobs(queue, REQUEST, num_nodes=2, run_folder=Path("run"))  # type: ignore[arg-type]


def test_jobs_are_queued_once_the_leg_runs_and_for_other_nodes_than_its_own():
    queue = FakeQueue()
    elastic = jobs_for_two_nodes(queue)
    elastic.poll(leg_nodes="", now=1.0)
    assert queue.submitted == []
    elastic.poll(leg_nodes="n[1-2]", now=1.0)
    assert queue.submitted == [replace(REQUEST, name=f"run.elastic-{n}", exclude=("old", "n[1-2]")) for n in (0, 1)]
    elastic.poll(leg_nodes="n[1-2]", now=1.0 + POLL_S)
    assert len(queue.submitted) == 2


def test_jobs_that_an_earlier_process_queued_are_adopted():
    queue = FakeQueue(jobs={"run.elastic-1": "7", "other.elastic-0": "8"})
    elastic = jobs_for_two_nodes(queue)
    elastic.poll("n1", now=1.0)
    assert [request.name for request in queue.submitted] == ["run.elastic-0"]
    assert {job.job_id for job in elastic.find()} == {"7", queue.jobs["run.elastic-0"]}


def test_an_ended_job_is_queued_again_after_a_while_and_not_on_a_node_it_lost():
    queue = FakeQueue()
    elastic = jobs_for_two_nodes(queue)
    elastic.poll("n1", now=1.0)
    queue.end("run.elastic-0", lost_nodes=("n5",))
    elastic.poll("n1", now=1.0 + POLL_S)
    assert len(queue.submitted) == 2, "a job that fails at once would fill the queue"
    elastic.poll("n1", now=1.0 + RESUBMIT_S)
    assert queue.submitted[2:] == [replace(REQUEST, name="run.elastic-0", exclude=("old", "n1", "n5"))]
    assert [end.lost_nodes for end in elastic.ended] == [("n5",)]


def test_a_cancelled_job_is_not_queued_again():
    queue = FakeQueue()
    elastic = jobs_for_two_nodes(queue)
    elastic.poll("n1", now=1.0)
    queue.end("run.elastic-1", LegEnding.CANCELLED)
    queue.end("run.elastic-0", LegEnding.PREEMPTED)
    elastic.poll("n1", now=1.0 + RESUBMIT_S)
    assert [request.name for request in queue.submitted[2:]] == ["run.elastic-0"]


def test_a_leg_continues_while_slurm_is_unavailable(caplog):
    queue = FakeQueue(is_down=True)
    elastic = jobs_for_two_nodes(queue)
    elastic.poll("n1", now=1.0)
    assert "legs.elastic: sbatch: timed out" in caplog.text
    queue.is_down = False
    elastic.poll("n1", now=1.0 + RESUBMIT_S)
    assert {request.name for request in queue.submitted} == {"run.elastic-0", "run.elastic-1"}


def test_every_slot_of_a_node_gets_an_engine_and_a_limited_number_of_replacements():
    nodes = {"a": 8, "b": 7}
    assert free_engine_slots(nodes, Counter(), Counter(), devices_per_engine=2) == ["a"] * 4 + ["b"] * 3
    assert free_engine_slots(nodes, Counter(a=4, b=2), Counter(a=4, b=3), devices_per_engine=2) == ["b"]
    assert free_engine_slots({"a": 1}, Counter(), Counter(a=MAX_STARTS_PER_SLOT), devices_per_engine=1) == []
    assert free_engine_slots({}, Counter(a=1), Counter(a=1), devices_per_engine=1) == []


def test_an_engine_that_left_is_no_longer_measured():
    meters = Meters(["engine 0", "engine 1"], num_slots=4, now=0.0)
    meters.set({"engine 0": 4, "engine 1": 4}, 0, 0, 0, now=0.0)
    meters.set({"engine 0": 4}, 0, 0, 0, now=1.0)
    first = meters.read(now=2.0)
    assert (first["rollout/engines"], first["engine/busy"]) == (1.0, 0.75)
    assert meters.read(now=3.0)["engine/busy"] == 1.0


def test_the_number_of_engines_over_time_is_one_line():
    counts = [None, 1.0, 1.0, 2.0, 1.0, 1.0]
    chain = [bare_manifest(n, metrics={} if count is None else {"rollout/engines": count}) for n, count in enumerate(counts)]
    assert engines_over_time(chain) == "1 in iterations 1-2, 2 in 3, 1 in 4-5"


# -------------------------------------------------------------------------------------------------- settings
def config_with(*overrides: str):
    return load_config(ROOT / "configs/runs/qwen3-moe.yaml", overrides)


def test_elastic_nodes_use_the_launcher_settings_of_the_leg_unless_overridden():
    leg = SlurmLauncherConfig(partition="gpu", account="lab", options={"constraint": "h100"})
    elastic = ElasticConfig(nodes=2, partition="spot", options={"licenses": "none"})
    assert elastic.merged_with(leg) == SlurmLauncherConfig(
        partition="spot", account="lab", options={"constraint": "h100", "licenses": "none"}
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["legs={launcher: {kind: local}, elastic: {nodes: 1}}"], "elastic asks for nodes of a SLURM cluster, but"),
        (
            ["legs.elastic={nodes: 1}", "placement.engines=0-31", "inference={kind: vllm}", "weights.transport=shared_gpu"],
            "weights.transport shared_gpu does not reach the engines of legs.elastic",
        ),
    ],
)
def test_impossible_elastic_settings_are_refused_in_one_sentence_that_names_the_key(overrides, message):
    with pytest.raises(UserError) as refused:
        config_with(*overrides)
    assert message in str(refused.value)


def test_weights_travel_by_ray_if_only_some_engines_are_on_the_trainers_gpus():
    colocated = ("placement.engines=0-31", "inference={kind: vllm}")
    assert config_with(*colocated).weights_transport is WeightsTransport.SHARED_GPU
    assert config_with(*colocated, "legs.elastic={nodes: 1}").weights_transport is WeightsTransport.RAY
