"""Nodes that come and go: which jobs are queued for them, which engines are started there, what is told of it."""

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
from roll_core.types.manifest import Manifest, Metrics
from tests.support import ROOT

EACH = LegRequest("run.elastic-", Path("elastic"), 1, 8, 8, 60, exclude=("old",))


@dataclass
class Queue:
    """A launcher whose jobs end when they are told to."""

    jobs: dict[str, str] = field(default_factory=dict)
    ends: dict[str, JobEnd] = field(default_factory=dict)
    submitted: list[LegRequest] = field(default_factory=list)
    is_down: bool = False

    def submit_elastic(self, request: LegRequest, run_folder: Path) -> "Job":
        if self.is_down:
            raise SlurmUnavailable("sbatch: timed out")
        self.submitted.append(request)
        self.jobs[request.name] = str(len(self.submitted))
        return self.attach(self.jobs[request.name], request.folder)

    def find(self, prefix: str) -> dict[str, str]:
        return {name: job_id for name, job_id in self.jobs.items() if name.startswith(prefix)}

    def attach(self, job_id: str, folder: Path) -> "Job":
        return Job(job_id, self)

    def end(self, name: str, ending: LegEnding | None = None, lost_nodes: tuple[str, ...] = ()) -> None:
        self.ends[self.jobs.pop(name)] = JobEnd(ending, None, "why", lost_nodes)


@dataclass
class Job:
    job_id: str
    queue: Queue

    def has_ended(self) -> bool:
        return self.job_id in self.queue.ends

    def end(self) -> JobEnd:
        return self.queue.ends[self.job_id]


def two_nodes(queue: Queue) -> ElasticJobs:
    return ElasticJobs(queue, EACH, num_nodes=2, run_folder=Path("run"))  # type: ignore[arg-type]


def test_jobs_are_queued_once_the_leg_runs_and_for_other_nodes_than_its_own():
    queue = Queue()
    elastic = two_nodes(queue)
    elastic.poll(leg_nodes="", now=1.0)
    assert queue.submitted == []
    elastic.poll(leg_nodes="n[1-2]", now=1.0)
    assert queue.submitted == [replace(EACH, name=f"run.elastic-{n}", exclude=("old", "n[1-2]")) for n in (0, 1)]
    elastic.poll(leg_nodes="n[1-2]", now=1.0 + POLL_S)
    assert len(queue.submitted) == 2


def test_jobs_of_whoever_was_here_before_are_taken_over():
    queue = Queue(jobs={"run.elastic-1": "7", "other.elastic-0": "8"})
    elastic = two_nodes(queue)
    elastic.poll("n1", now=1.0)
    assert [request.name for request in queue.submitted] == ["run.elastic-0"]
    assert {job.job_id for job in elastic.find()} == {"7", queue.jobs["run.elastic-0"]}


def test_a_job_that_is_over_is_queued_again_after_a_while_and_not_on_a_node_it_lost():
    queue = Queue()
    elastic = two_nodes(queue)
    elastic.poll("n1", now=1.0)
    queue.end("run.elastic-0", lost_nodes=("n5",))
    elastic.poll("n1", now=1.0 + POLL_S)
    assert len(queue.submitted) == 2, "a job that fails at once would fill the queue"
    elastic.poll("n1", now=1.0 + RESUBMIT_S)
    assert queue.submitted[2:] == [replace(EACH, name="run.elastic-0", exclude=("old", "n1", "n5"))]
    assert [end.lost_nodes for end in elastic.ended] == [("n5",)]


def test_a_job_that_somebody_cancelled_is_not_queued_again():
    queue = Queue()
    elastic = two_nodes(queue)
    elastic.poll("n1", now=1.0)
    queue.end("run.elastic-1", LegEnding.CANCELLED)
    queue.end("run.elastic-0", LegEnding.PREEMPTED)
    elastic.poll("n1", now=1.0 + RESUBMIT_S)
    assert [request.name for request in queue.submitted[2:]] == ["run.elastic-0"]


def test_a_leg_does_not_suffer_from_a_queue_that_is_away(caplog):
    queue = Queue(is_down=True)
    elastic = two_nodes(queue)
    elastic.poll("n1", now=1.0)
    assert "legs.elastic: sbatch: timed out" in caplog.text
    queue.is_down = False
    elastic.poll("n1", now=1.0 + RESUBMIT_S)
    assert {request.name for request in queue.submitted} == {"run.elastic-0", "run.elastic-1"}


def test_every_place_on_a_node_gets_an_engine_and_another_if_it_dies_but_not_for_ever():
    nodes = {"a": 8, "b": 7}
    assert free_engine_slots(nodes, Counter(), Counter(), devices_per_engine=2) == ["a"] * 4 + ["b"] * 3
    assert free_engine_slots(nodes, Counter(a=4, b=2), Counter(a=4, b=3), devices_per_engine=2) == ["b"]
    assert free_engine_slots({"a": 1}, Counter(), Counter(a=MAX_STARTS_PER_SLOT), devices_per_engine=1) == []
    assert free_engine_slots({}, Counter(a=1), Counter(a=1), devices_per_engine=1) == []


def test_an_engine_that_is_gone_is_not_measured_any_more():
    meters = Meters(["engine 0", "engine 1"], num_slots=4, now=0.0)
    meters.set({"engine 0": 4, "engine 1": 4}, 0, 0, 0, now=0.0)
    meters.set({"engine 0": 4}, 0, 0, 0, now=1.0)
    first = meters.read(now=2.0)
    assert (first["rollout/engines"], first["engine/busy"]) == (1.0, 0.75)
    assert meters.read(now=3.0)["engine/busy"] == 1.0


def manifest(iteration: int, metrics: Metrics) -> Manifest:
    return Manifest(
        run_id="run-1",
        iteration=iteration,
        parent="",
        config_digest="",
        leg=1,
        weights_version=iteration,
        weights_digest="",
        next_problem=0,
        collected=None,
        evaluated=None,
        metrics=metrics,
        timings={},
        committed_at="",
    )


def test_the_number_of_engines_over_time_is_told_in_a_line():
    counts = [None, 1.0, 1.0, 2.0, 1.0, 1.0]
    chain = [manifest(n, {} if count is None else {"rollout/engines": count}) for n, count in enumerate(counts)]
    assert engines_over_time(chain) == "1 in iterations 1-2, 2 in 3, 1 in 4-5"


# -------------------------------------------------------------------------------------------------- what is asked for
def settings(*overrides: str):
    return load_config(ROOT / "configs/runs/qwen3-moe.yaml", overrides)


def test_nodes_are_asked_for_as_the_legs_but_for_what_is_said():
    leg = SlurmLauncherConfig(partition="gpu", account="lab", options={"constraint": "h100"})
    elastic = ElasticConfig(nodes=2, partition="spot", options={"licenses": "none"})
    assert elastic.merged_with(leg) == SlurmLauncherConfig(
        partition="spot", account="lab", options={"constraint": "h100", "licenses": "none"}
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["legs={launcher: {kind: local}, elastic: {nodes: 1}}"], "elastic asks for nodes of a SLURM cluster, but"),
        (
            ["legs.elastic={nodes: 1}", "placement.engines=0-31", "inference={kind: vllm}", "weights.transport=shared_gpu"],
            "weights.transport shared_gpu does not reach the engines of legs.elastic",
        ),
    ],
)
def test_what_cannot_be_lent_is_one_sentence_that_names_the_key(overrides, says):
    with pytest.raises(UserError) as refused:
        settings(*overrides)
    assert says in str(refused.value)


def test_weights_go_by_ray_to_engines_of_which_only_some_are_on_the_trainers_gpus():
    colocated = ("placement.engines=0-31", "inference={kind: vllm}")
    assert settings(*colocated).weights_transport is WeightsTransport.SHARED_GPU
    assert settings(*colocated, "legs.elastic={nodes: 1}").weights_transport is WeightsTransport.RAY
