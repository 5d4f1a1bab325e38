"""Chaos tool without kills: drawing kill points, comparing runs, tables, the command line."""

import json
import math
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from roll_core.reporting.stage_log import FILE_NAME, Edge, StageEvent, StageLog, read_stages
from roll_core.types.manifest import Collected, CollectRequest, Draws, Manifest
from roll_core.types.refs import ArtifactKind, ArtifactRef
from tests.chaos.__main__ import main
from tests.chaos.kill_points import MIN_ITERATIONS_APART, VICTIMS, KillPoint, draw_kill_points
from tests.chaos.outcomes import BrokenRun, Recovery, committed_after, differences, generated_again
from tests.chaos.report import defects, matrix_table, points_table, short_report, summary_sentence

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
POINT = KillPoint(victim="engine 0", stage="collect", iteration=3, delay_s=0.0)
RECOVERED = Recovery(
    point=POINT,
    last_event="collect 3 begin",
    num_committed=3,
    num_lost=0,
    survived=False,
    seconds=11.4,
    error_line="engine 0 died",
    differences=(),
)


def stages_of_ten_iterations() -> list[StageEvent]:
    """Stage log of an unbroken run, one event per second: evaluation every 2 iterations, checkpoint every 4."""
    names = ["warm_start", "publish 0", "evaluate 0", "checkpoint 0", "commit 0", "recover"]
    for n in range(1, 11):
        names += [f"{stage} {n}" for stage in ("collect", "prepare", "update", "publish")]
        names += [f"evaluate {n}"] if n % 2 == 0 else []
        names += [f"checkpoint {n}"] if n % 4 == 0 or n == 10 else []
        names += [f"commit {n}"]
    edges = [(name, edge) for name in names for edge in (Edge.BEGIN, Edge.END)]
    return [StageEvent(name=name, edge=edge, at=NOON + timedelta(seconds=n)) for n, (name, edge) in enumerate(edges)]


def manifest(iteration: int, **changes) -> Manifest:
    request = CollectRequest(iteration=iteration, parent="", weights_version=0, first_problem=0, num_groups=1)
    rollouts = ArtifactRef(kind=ArtifactKind.TRAJECTORIES, digest="9f86" * 16, size=1)
    fields = {
        "run_id": "tiny-1",
        "iteration": iteration,
        "parent": "ab12",
        "config_digest": "1b4f",
        "leg": 1,
        "weights_version": iteration,
        "weights_digest": "77d0",
        "next_problem": 0,
        "collected": Collected(
            request=request,
            trajectories=rollouts,
            num_trajectories=4,
            num_failed=0,
            num_tokens=9,
            draws=Draws(first=0, outcomes="t"),
            trace=ArtifactRef(kind=ArtifactKind.TRACE, digest="8e35" * 16, size=1),
        ),
        "evaluated": None,
        "metrics": {"update/loss": 0.25, "throughput/tokens_per_second": 10.0},
        "timings": {},
        "committed_at": (NOON + timedelta(seconds=iteration)).isoformat(),
    }
    return Manifest.model_validate(fields | changes)


def test_kill_points_cover_every_victim_stage_moment_and_iteration_once_there_are_enough():
    runs = draw_kill_points(stages_of_ten_iterations(), kills=56, per_run=5, seed=0)
    points = [point for run in runs for point in run]
    stages = {"recover", "collect", "prepare", "update", "publish", "evaluate", "checkpoint", "commit"}
    assert Counter((p.victim, p.stage) for p in points) == {(v, s): 1 for v in VICTIMS for s in stages}
    assert {point.iteration for point in points} == set(range(11))
    for stage in stages:
        assert {point.delay_s > 0 for point in points if point.stage == stage} == {False, True}
    assert all(point.delay_s < 1.0 for point in points)


def test_twice_as_many_kills_visit_the_other_moment_of_every_cell():
    runs = draw_kill_points(stages_of_ten_iterations(), kills=112, per_run=5, seed=3)
    cells = Counter((p.victim, p.stage, p.delay_s > 0) for run in runs for p in run)
    assert set(cells.values()) == {1}
    assert len(cells) == 112


def test_a_few_kills_have_different_victims_and_stages_and_depend_on_the_seed_alone():
    first, second = (draw_kill_points(stages_of_ten_iterations(), kills=4, per_run=4, seed=7) for _ in range(2))
    points = [point for run in first for point in run]
    assert first == second
    assert len({point.victim for point in points}) == len({point.stage for point in points}) == 4


def test_the_kills_of_a_run_are_some_iterations_apart():
    for run in draw_kill_points(stages_of_ten_iterations(), kills=56, per_run=5, seed=1):
        assert 1 <= len(run) <= 5
        assert all(b.iteration - a.iteration >= MIN_ITERATIONS_APART for a, b in pairwise(run))


def test_runs_that_differ_in_legs_and_times_alone_are_equal():
    ours = [
        manifest(
            1,
            leg=3,
            metrics={"update/loss": 0.25, "throughput/tokens_per_second": 3.0, "engine/busy": 0.4},
            timings={"update": 9.0},
        )
    ]
    assert differences([manifest(1)], ours) == ()
    bad = {"update/loss": math.nan}
    assert differences([manifest(1, metrics=bad)], [manifest(1, metrics=bad)]) == ()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"weights_digest": "77d1"}, "iteration 1: weights digest is 77d1, unbroken 77d0"),
        ({"metrics": {"update/loss": 0.25 + 2**-54}}, "iteration 1: update/loss is 0.25000000000000006, unbroken 0.25"),
        ({"metrics": {}}, "iteration 1: update/loss is None, unbroken 0.25"),
        ({"collected": None}, f"iteration 1: trajectories digest is , unbroken {'9f86' * 16}"),
    ],
)
def test_the_smallest_difference_is_named(changed, sentence):
    assert sentence in differences([manifest(0), manifest(1)], [manifest(0), manifest(1, **changed)])


def test_a_chain_that_is_too_short_is_a_difference():
    assert differences([manifest(0), manifest(1)], [manifest(0)]) == ("iteration 1 is in one run only",)


def test_only_a_collect_that_began_after_its_commit_counts_as_generated_again():
    began = [StageEvent(name=f"collect {n}", edge=Edge.BEGIN, at=NOON + timedelta(seconds=1.5)) for n in (1, 2, 3)]
    assert generated_again([manifest(0), manifest(1), manifest(2)], began) == ("collect 1",)


def test_the_tables_show_the_outcome_of_every_kill():
    differs = RECOVERED.model_copy(
        update={"point": POINT.model_copy(update={"victim": "leg", "stage": "commit"}), "differences": ("a", "b")}
    )
    assert matrix_table([RECOVERED, differs]).splitlines() == [
        "|  | collect | commit |",
        "| --- | --- | --- |",
        "| leg | - | 2 differ |",
        "| engine 0 | ok 11 s | - |",
    ]
    assert points_table([RECOVERED]).splitlines()[-1] == (
        "| engine 0 | collect 3 boundary | collect 3 begin | 3 | 0 | no | 11.4 | 0 |"
    )


def test_a_fault_that_needed_no_resume_counts_as_survived():
    survived = RECOVERED.model_copy(update={"survived": True, "seconds": 2.2, "error_line": ""})
    assert survived.verdict == "survived 2 s"
    assert survived.model_copy(update={"seconds": None}).verdict == "survived"
    assert survived.model_copy(update={"differences": ("a",)}).verdict == "1 differ"
    assert points_table([survived]).splitlines()[-1].endswith("| yes | 2.2 | 0 |")


def test_a_fault_is_over_when_an_iteration_that_began_after_it_is_committed():
    """The iteration that was running proves nothing: a scheduler that dies during a checkpoint is first needed by the next
    collect."""
    events = stages_of_ten_iterations()
    at = {(event.name, event.edge): event.at for event in events}
    for stage in ("collect 3", "publish 3", "commit 3"):
        assert committed_after(events, at[stage, Edge.BEGIN]) == at["commit 4", Edge.END]
    assert committed_after(events[:-1], at["collect 9", Edge.END]) is None
    assert committed_after(events, at["collect 10", Edge.BEGIN]) is None


def test_defects_are_counted_and_named():
    lost = RECOVERED.model_copy(update={"num_lost": 1})
    broken = BrokenRun(
        run_id="tiny-2", recoveries=(RECOVERED, lost), missed=(POINT,), generated_again=("collect 1",), num_collects=12
    )
    assert summary_sentence([broken]) == (
        "2 kill points tried in 1 runs, 0 survived, 1 missed; 0 differences, 1 committed iterations lost, 1 generated again"
    )
    assert defects([broken]) == [
        "tiny-2, engine 0 at collect 3: lost 1 committed iterations",
        "tiny-2: collect 1 was generated again after its commit",
        "tiny-2: never came by collect 3",
    ]
    assert short_report([broken]).splitlines()[-4:] == [*defects([broken]), summary_sentence([broken])]


def test_options_that_contradict_each_other_are_refused(capsys):
    for arguments in (["--config", "a.yaml", "--short"], ["--set", "iterations=2"], ["--only", "kills,stores"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    assert "--only: there is no part stores: name some of kills,store,mlflow,prefect" in capsys.readouterr().err


def test_a_missing_config_is_refused_in_one_sentence(capsys):
    assert main(["--config", "no-such.yaml"]) == 2
    assert capsys.readouterr().err.startswith("config: no such file")


def test_the_stage_log_has_the_begin_and_the_end_of_every_stage(tmp_path):
    for leg in ("leg-1", "leg-2"):
        (tmp_path / leg).mkdir()
    with StageLog(tmp_path / "leg-1").stage("collect 3"):
        pass
    with pytest.raises(RuntimeError), StageLog(tmp_path / "leg-2").stage("update 3"):
        raise RuntimeError
    with open(tmp_path / "leg-2" / FILE_NAME, "a") as log:
        log.write(json.dumps({"name": "publish 3"})[:9])  # cut short by a kill
    events = read_stages(tmp_path)
    assert [(event.stage, event.iteration, event.edge) for event in events] == [
        ("collect", 3, Edge.BEGIN),
        ("collect", 3, Edge.END),
        ("update", 3, Edge.BEGIN),
        ("update", 3, Edge.FAILED),
    ]
