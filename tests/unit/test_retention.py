"""Retention: which checkpoints a policy keeps, and that none is retired which another run needs, in any order of events."""

import threading

import pytest

from roll_core.config.operations.services import CheckpointConfig
from roll_core.config.run import ForkedFrom
from roll_core.errors import ArtifactDamaged, UserError
from roll_core.planning.preflight import check_origins
from roll_core.roles import fleet as fleet_module
from roll_core.roles.fleet import Fleet
from roll_core.store.object_store import ObjectStore, object_name
from roll_core.store.records.checkpoints import (
    OwnedCheckpoint,
    checkpoint_iterations,
    checkpoint_record_name,
    checkpoints_of,
    mark_damaged,
    read_checkpoints,
    record_checkpoint,
    tombstone_name,
)
from roll_core.store.records.forks import checkpoints_from_origin
from roll_core.store.records.runs import find_run, read_chain
from roll_core.store.upkeep import retention
from roll_core.store.upkeep.retention import CheckpointKey, checkpoints_to_retire, referenced_checkpoints, retire
from roll_core.types.refs import CheckpointRef
from tasks.runs import _claim
from tests.stored_runs import StoredRuns, weights_digest
from tests.support import tiny_config

HOUR = 3600.0
LAST = CheckpointConfig(keep_last=1)


@pytest.fixture
def runs(tmp_path) -> StoredRuns:
    return StoredRuns(tmp_path)


@pytest.fixture
def parent(runs) -> StoredRuns:
    """Store with tiny-1: iterations 0 to 8 and a checkpoint of every second one, all older than the grace period."""
    runs.open()
    runs.commit("tiny-1", 8)
    for iteration in range(0, 9, 2):
        runs.checkpoint("tiny-1", iteration)
    runs.make_all_old()
    return runs


def iterations_left(runs: StoredRuns, run_id: str = "tiny-1") -> list[int]:
    """Iterations of the checkpoints that are in the store."""
    return [checkpoint.iteration for checkpoint in read_checkpoints(runs.store, run_id)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (CheckpointConfig(), [0, 2, 4, 6, 8]),
        (CheckpointConfig(keep_last=1), [0, 8]),
        (CheckpointConfig(keep_last=2), [0, 6, 8]),
        (CheckpointConfig(keep_last=99), [0, 2, 4, 6, 8]),
        (CheckpointConfig(keep_last=1, keep_every=4), [0, 4, 8]),
        (CheckpointConfig(keep_last=1, keep_best=1), [0, 4, 8]),
        (CheckpointConfig(keep_last=1, keep_best=2), [0, 2, 4, 8]),
        (CheckpointConfig(keep_last=1, keep_best=9), [0, 2, 4, 6, 8]),
    ],
    ids=str,
)
def test_a_policy_keeps_the_last_the_multiples_and_the_best(runs, policy, expected):
    """Iterations 4 and 2 are equally good, and the later counts first. Iteration 3 is the best but has no checkpoint."""
    runs.open()
    runs.commit("tiny-1", 8, {0: 0.1, 2: 0.7, 3: 0.9, 4: 0.7, 6: 0.6, 8: 0.2})
    checkpoints = [runs.checkpoint("tiny-1", iteration) for iteration in range(0, 9, 2)]
    retired = checkpoints_to_retire(checkpoints, read_chain(runs.store, "tiny-1"), policy, referenced=())
    assert [each.iteration for each in checkpoints if each not in retired] == expected


def test_an_iteration_without_an_evaluation_is_not_among_the_best(runs):
    runs.open()
    runs.commit("tiny-1", 6, {2: 0.1})
    checkpoints = [runs.checkpoint("tiny-1", iteration) for iteration in (0, 2, 4, 6)]
    retired = checkpoints_to_retire(
        checkpoints, read_chain(runs.store, "tiny-1"), CheckpointConfig(keep_last=1, keep_best=3), referenced=()
    )
    assert [each.iteration for each in retired] == [4]


def test_retired_checkpoints_are_removed_with_all_files_that_others_do_not_share(parent):
    own = {c.iteration: object_name(c.files[0].artifact) for c in read_checkpoints(parent.store, "tiny-1")}
    shared = object_name(read_checkpoints(parent.store, "tiny-1")[0].files[1].artifact)
    before = parent.objects()
    assert [each.iteration for each in retire(parent.store, "tiny-1", LAST, HOUR)] == [2, 4, 6]
    assert iterations_left(parent) == [0, 8]
    assert before - parent.objects() == {own[2], own[4], own[6]}
    assert shared in parent.objects()
    assert list(parent.store.list("runs/tiny-1/retiring")) == []
    assert retire(parent.store, "tiny-1", LAST, HOUR) == []


def test_a_young_checkpoint_stays_whatever_the_policy(parent):
    parent.commit("tiny-1", 12)
    parent.checkpoint("tiny-1", 10)
    parent.checkpoint("tiny-1", 12)
    retire(parent.store, "tiny-1", LAST, HOUR)
    assert iterations_left(parent) == [0, 10, 12]


def test_a_checkpoint_of_an_uncommitted_iteration_is_neither_retired_nor_counted_as_the_newest(parent):
    parent.checkpoint("tiny-1", 10)
    parent.make_all_old()
    retire(parent.store, "tiny-1", LAST, HOUR)
    assert iterations_left(parent) == [0, 8, 10]


def test_a_checkpoint_of_a_leg_whose_commit_was_refused_is_retired(parent):
    parent.checkpoint("tiny-1", 8, weights="f" * 64)
    parent.make_all_old()
    retire(parent.store, "tiny-1", CheckpointConfig(keep_last=99), HOUR)
    assert [each.weights_digest for each in read_checkpoints(parent.store, "tiny-1") if each.iteration == 8] == [
        weights_digest("tiny-1", 8)
    ]


def test_files_that_were_just_put_again_stay_though_their_record_is_retired(parent):
    """A fork that made the same checkpoint has stored its files, but not its record yet."""
    again = read_checkpoints(parent.store, "tiny-1")[2].files[0].artifact
    parent.store.touch(again)
    retire(parent.store, "tiny-1", LAST, HOUR)
    assert iterations_left(parent) == [0, 8]
    assert object_name(again) in parent.objects()


def test_files_that_a_checkpoint_of_another_run_references_stay(parent):
    other = parent.open(name="other")
    parent.commit(other, 4)
    theirs = read_checkpoints(parent.store, "tiny-1")[2].model_copy(update={"weights_digest": weights_digest(other, 4)})
    record_checkpoint(parent.store, other, theirs)
    parent.make_all_old()
    retire(parent.store, "tiny-1", LAST, HOUR)
    assert iterations_left(parent) == [0, 8]
    assert {object_name(file.artifact) for file in theirs.files} <= parent.objects()


def test_the_origins_of_forks_and_the_checkpoints_of_teachers_stay(parent):
    parent.open(name="child", forked_from={"run_id": "tiny-1", "iteration": 4})
    teachers = [{"kind": "run", "run_id": "tiny-1", "iteration": 6}]
    parent.open(name="pupil", algorithm={"kind": "distillation", "teachers": teachers})
    retire(parent.store, "tiny-1", LAST, HOUR)
    assert iterations_left(parent) == [0, 4, 6, 8]


def test_a_fork_of_a_fork_may_need_the_grandparents_checkpoint(parent):
    parent.open(name="child", forked_from={"run_id": "tiny-1", "iteration": 6})
    parent.open(name="grandchild", forked_from={"run_id": "child-1", "iteration": 2})
    assert referenced_checkpoints(parent.store) == {CheckpointKey("tiny-1", 6), CheckpointKey("tiny-1", 2)}
    retire(parent.store, "tiny-1", LAST, HOUR)
    assert iterations_left(parent) == [0, 2, 6, 8]


def test_a_fork_retires_its_own_checkpoints_and_never_its_parents(parent):
    child = parent.open(name="child", forked_from={"run_id": "tiny-1", "iteration": 4})
    parent.commit(child, 10)
    for iteration in (6, 8, 10):
        parent.checkpoint(child, iteration)
    parent.make_all_old()
    assert [each.iteration for each in retire(parent.store, child, LAST, HOUR)] == [6, 8]
    assert iterations_left(parent) == [0, 2, 4, 6, 8]
    assert [c.iteration for c in checkpoints_of(parent.store, read_chain(parent.store, child))] == [0, 2, 4, 10]


def test_a_fork_opened_while_its_origin_gets_a_tombstone_keeps_the_origin(parent, monkeypatch):
    """The config of the fork is stored after retention has read all configs once, and before it reads them again."""
    read_references, reads = retention.referenced_checkpoints, []

    def read_then_open(store):
        if reads:
            return read_references(store)
        reads.append(read_references(store))
        parent.open(name="child", forked_from={"run_id": "tiny-1", "iteration": 4})
        return reads[0]

    monkeypatch.setattr(retention, "referenced_checkpoints", read_then_open)
    assert [each.iteration for each in retire(parent.store, "tiny-1", LAST, HOUR)] == [2, 6]
    assert iterations_left(parent) == [0, 4, 8]
    assert checkpoint_iterations(parent.store, "tiny-1") == [0, 4, 8]


def test_a_fork_that_finds_a_tombstone_after_opening_is_refused_and_leaves_nothing(parent, tmp_path):
    """The preflight of the fork ran before the tombstone was created."""
    config = tiny_config(tmp_path, iterations=9, name="child", forked_from={"run_id": "tiny-1", "iteration": 4})
    check_origins(config)
    parent.store.create(tombstone_name("tiny-1", read_checkpoints(parent.store, "tiny-1")[2]), b"")
    with pytest.raises(UserError, match=r"tiny-1 has no checkpoint of iteration 4; it has \[0, 2, 6, 8\]"):
        _claim(parent.store, config)
    assert list(parent.store.list("runs/child-1")) == []
    assert referenced_checkpoints(parent.store) == set()


def test_the_tombstones_of_a_killed_process_are_removed_or_acted_on(parent):
    """A killed process left tombstones on 4, the origin of a fork that was opened later, and on 6."""
    records = read_checkpoints(parent.store, "tiny-1")
    parent.open(name="child", forked_from={"run_id": "tiny-1", "iteration": 4})
    for record in records[2:4]:
        parent.store.create(tombstone_name("tiny-1", record), b"")
    assert checkpoint_iterations(parent.store, "tiny-1") == [0, 2, 8]
    retire(parent.store, "tiny-1", LAST, HOUR)
    assert checkpoint_iterations(parent.store, "tiny-1") == [0, 4, 8]


def test_a_fork_opened_during_retention_keeps_its_origin_or_is_refused(parent, tmp_path):
    """Forks and retention run at once, in any order. The origin of every opened fork is there afterwards."""
    ready = threading.Barrier(5)
    opened: list[int] = []
    retired: list[CheckpointRef] = []

    def fork(iteration: int) -> None:
        config = tiny_config(
            tmp_path, iterations=9, name=f"child{iteration}", forked_from={"run_id": "tiny-1", "iteration": iteration}
        )
        ready.wait()
        try:
            _claim(parent.store, config)
        except UserError:
            return
        opened.append(iteration)

    def run_retention() -> None:
        ready.wait()
        retired.extend(retire(parent.store, "tiny-1", LAST, HOUR))

    threads = [threading.Thread(target=run_retention), *(threading.Thread(target=fork, args=(n,)) for n in (2, 4, 6, 8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(iterations_left(parent)) == {0, 2, 4, 6, 8} - {each.iteration for each in retired}
    assert {0, 8, *opened} <= set(iterations_left(parent))
    for checkpoint in read_checkpoints(parent.store, "tiny-1"):
        for file in checkpoint.files:
            parent.store.get(file.artifact)


def test_an_unreadable_run_stops_retention_before_anything_is_removed(parent):
    parent.open(name="other")
    parent.store.delete("runs/other-1/config.json")
    parent.store.create("runs/other-1/config.json", b"{")
    with pytest.raises(ArtifactDamaged, match="runs/other-1/config.json"):
        retire(parent.store, "tiny-1", LAST, HOUR)
    assert iterations_left(parent) == [0, 2, 4, 6, 8]


def test_a_run_continues_when_its_checkpoints_cannot_be_retired(parent, tmp_path, caplog):
    parent.open(name="other")
    parent.store.delete("runs/other-1/config.json")
    parent.store.create("runs/other-1/config.json", b"{")
    keeping = tiny_config(tmp_path, checkpoint={"every": 1, "keep_last": 1})
    Fleet(find_run(parent.store, "tiny-1"), keeping, tmp_path).retire_checkpoints()
    assert "checkpoints of tiny-1 could not be retired: store: runs/other-1/config.json" in caplog.text
    assert iterations_left(parent) == [0, 2, 4, 6, 8]


def test_a_fork_whose_origin_was_deleted_stops_with_a_sentence(parent):
    """The origin was deleted by hand. The first checkpoint of the parent is there, and the fork must not resume from it."""
    child = parent.open(name="child", forked_from={"run_id": "tiny-1", "iteration": 4})
    chain, origin = read_chain(parent.store, child), ForkedFrom(run_id="tiny-1", iteration=4)
    checkpoints_from_origin(parent.store, chain, origin)
    parent.store.delete(checkpoint_record_name("tiny-1", read_checkpoints(parent.store, "tiny-1")[2]))
    with pytest.raises(ArtifactDamaged, match="forked_from.iteration: the checkpoint of tiny-1@4 is no longer in"):
        checkpoints_from_origin(parent.store, chain, origin)
    parent.commit(child, 5)
    parent.checkpoint(child, 5)
    resumed = checkpoints_from_origin(parent.store, read_chain(parent.store, child), origin)
    assert [(each.run_id, each.checkpoint.iteration) for each in resumed] == [(child, 5)]


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(parent):
    """Without the marker, 8 would be the one checkpoint that stays beside the first, and 6, the last good one, would go."""
    newest = read_checkpoints(parent.store, "tiny-1")[-1]
    mark_damaged(parent.store, OwnedCheckpoint("tiny-1", newest), "its bytes are wrong")
    assert [each.iteration for each in retire(parent.store, "tiny-1", LAST, HOUR)] == [2, 4, 8]
    assert iterations_left(parent) == [0, 6]
    assert list(parent.store.list("runs/tiny-1/damaged")) == []


def test_any_exception_in_retention_is_logged_and_ends_no_run(parent, tmp_path, caplog, monkeypatch):
    def fail(*_):
        raise ValueError("time data '.DS_Store' does not match")

    monkeypatch.setattr(fleet_module, "retire", fail)
    keeping = tiny_config(tmp_path, checkpoint={"every": 1, "keep_last": 1})
    Fleet(find_run(parent.store, "tiny-1"), keeping, tmp_path).retire_checkpoints()
    assert "could not be retired: ValueError: time data" in caplog.text


def test_an_object_that_is_put_again_after_retention_listed_it_stays(parent, monkeypatch):
    """Two runs of one config and seed share checkpoint files: the other run stores the same bytes, and names them soon."""
    retired = read_checkpoints(parent.store, "tiny-1")[1].files[0].artifact
    data, delete_unmodified = parent.store.get(retired), ObjectStore.delete_unmodified

    def put_again_then_delete(store, listed):
        if listed.name == object_name(retired):
            parent.store.put(data, retired.kind)
        return delete_unmodified(store, listed)

    monkeypatch.setattr(ObjectStore, "delete_unmodified", put_again_then_delete)
    retire(parent.store, "tiny-1", LAST, HOUR)
    assert iterations_left(parent) == [0, 8]
    assert parent.store.get(retired) == data


@pytest.mark.parametrize("is_fork", [False, True])
def test_retiring_takes_as_many_requests_however_long_the_run_is(runs, monkeypatch, is_fork):
    """The run has checkpoints of three iterations, as long runs have that keep a few."""
    run_id = runs.open()
    runs.commit(run_id, 4)
    runs.checkpoint(run_id, 4)
    if is_fork:
        run_id = runs.open(name="child", forked_from={"run_id": run_id, "iteration": 4})
    read, requests = ObjectStore.read, []
    monkeypatch.setattr(ObjectStore, "read", lambda store, name: requests.append(name) or read(store, name))

    def count_requests(newest: int) -> int:
        runs.commit(run_id, newest)
        runs.checkpoint(run_id, newest)
        requests.clear()
        retire(runs.store, run_id, CheckpointConfig(keep_last=2), 0.0)
        return len(requests)

    for newest in (8, 12):
        count_requests(newest)
    assert count_requests(16) == count_requests(90)
    assert iterations_left(runs, run_id)[-2:] == [16, 90]
