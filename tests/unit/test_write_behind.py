"""Write-behind spool between a run and its store: bounded, undamaged, and emptied before a commit references its files."""

import os
import threading

import pytest

from roll_core.errors import ArtifactDamaged, DeadlineExceeded, StoreUnavailable
from roll_core.store import write_behind
from roll_core.store.object_store import ObjectStore, object_name
from roll_core.store.write_behind import WriteBehind
from roll_core.types.refs import ArtifactKind, ArtifactRef, digest_of

KIND = ArtifactKind.TRAJECTORIES


class HeldStore(ObjectStore):
    """Store whose uploads wait until the test sets `gate`, and fail if the test sets `failure`."""

    def __init__(self, uri: str):
        super().__init__(uri)
        self.gate = threading.Event()
        self.failure: Exception | None = None

    def put_file(self, path, kind):
        assert self.gate.wait(30)
        if self.failure:
            raise self.failure
        return super().put_file(path, kind)


@pytest.fixture
def store(tmp_path) -> HeldStore:
    return HeldStore(f"file://{tmp_path}/store")


@pytest.fixture
def spool(store, tmp_path):
    spool = WriteBehind(store, tmp_path / "spool", max_bytes=100, fresh_seconds=900.0)
    yield spool
    store.gate.set()


def names(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "spool").iterdir())


def test_an_artifact_has_a_name_at_once_and_is_stored_when_waited_for(store, spool, tmp_path):
    ref = spool.put(b"rollouts", KIND)
    assert names(tmp_path) == [f"trajectories-{digest_of(b'rollouts')}"]
    assert list(store.list("objects")) == []
    store.gate.set()
    spool.wait([ref], 30.0)
    assert store.get(ref) == b"rollouts"


def test_a_wait_for_a_store_that_hangs_ends_with_the_name_of_the_artifact(spool):
    ref = spool.put(b"rollouts", KIND)
    with pytest.raises(DeadlineExceeded, match=f"deadlines.store: trajectories {ref.digest[:12]}"):
        spool.wait([ref], 0.01)


def test_a_put_into_a_full_spool_waits_until_there_is_space(store, spool):
    spool.put(b"a" * 90, KIND)
    waiting = threading.Thread(target=spool.put, args=(b"b" * 20, KIND))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive(), "it was let in though the spool is full"
    store.gate.set()
    waiting.join(30)
    assert not waiting.is_alive()


def test_an_artifact_larger_than_the_spool_goes_through_alone(store, spool):
    store.gate.set()
    ref = spool.put(b"c" * 1000, KIND)
    spool.wait([ref], 30.0)
    assert store.get(ref) == b"c" * 1000


def test_the_same_bytes_are_spooled_once(store, spool, tmp_path):
    assert spool.put(b"same", KIND) == spool.put(b"same", KIND)
    assert len(names(tmp_path)) == 1
    store.gate.set()


def test_a_failed_upload_fails_the_wait_and_the_next_put_and_stays_on_disk(store, spool, tmp_path):
    store.failure = StoreUnavailable("store.uri: gone")
    ref = spool.put(b"rollouts", KIND)
    store.gate.set()
    with pytest.raises(StoreUnavailable, match="gone"):
        spool.wait([ref], 30.0)
    with pytest.raises(StoreUnavailable, match="gone"):
        spool.put(b"more", KIND)
    assert names(tmp_path) == [f"trajectories-{ref.digest}"]


def test_complete_files_of_a_killed_process_are_stored_by_the_next_and_incomplete_ones_are_removed(store, spool, tmp_path):
    ref = spool.put(b"rollouts", KIND)
    (tmp_path / f"spool/trajectories-{digest_of(b'torn')}").write_bytes(b"to")
    (tmp_path / f"spool/trajectories-{digest_of(b'cut')}.partial").write_bytes(b"cut")
    after = WriteBehind(ObjectStore(store.uri), tmp_path / "spool", max_bytes=100, fresh_seconds=900.0)
    assert after.store_leftovers() == 1
    assert store.get(ref) == b"rollouts"
    assert names(tmp_path) == [f"trajectories-{ref.digest}"], "kept until a commit names it"


def stored_spool(store: HeldStore, tmp_path, fresh_seconds: float = 900.0) -> WriteBehind:
    """Spool whose uploads are not held back."""
    store.gate.set()
    return WriteBehind(store, tmp_path / "spool", max_bytes=100, fresh_seconds=fresh_seconds)


def test_rollouts_that_were_collected_as_garbage_during_a_long_iteration_are_there_before_the_commit(store, tmp_path):
    spool = stored_spool(store, tmp_path)
    ref = spool.put(b"rollouts", KIND)
    spool.wait([ref], 30.0)
    store.delete(object_name(ref))
    spool.wait([ref], 30.0)
    assert store.get(ref) == b"rollouts"


def test_an_artifact_that_is_no_longer_fresh_is_made_young_before_a_commit_names_it(store, tmp_path):
    spool = stored_spool(store, tmp_path, fresh_seconds=0.0)
    ref = spool.put(b"rollouts", KIND)
    spool.wait([ref], 30.0)
    path = tmp_path / "store" / object_name(ref)
    os.utime(path, (0, 0))
    spool.wait([ref], 30.0)
    assert path.stat().st_mtime > 0


def test_an_artifact_that_a_late_delete_took_after_the_commit_is_put_again(store, tmp_path):
    spool = stored_spool(store, tmp_path)
    first, second = spool.put(b"first", KIND), spool.put(b"second", KIND)
    spool.wait([first], 30.0)
    spool.on_committed()
    store.delete(object_name(first))
    spool.wait([second], 30.0)
    store.delete(object_name(second))
    spool.on_committed()
    assert (store.get(first), store.get(second)) == (b"first", b"second")


def test_the_spool_keeps_the_bytes_of_the_last_commit_and_drops_older_ones(store, tmp_path):
    spool = stored_spool(store, tmp_path)
    refs = [spool.put(data, KIND) for data in (b"first", b"second", b"never committed")]
    spool.wait(refs, 30.0)
    for ref in refs[:2]:
        spool.wait([ref], 30.0)
        spool.on_committed()
    assert names(tmp_path) == [f"trajectories-{refs[1].digest}"]


def test_bytes_that_were_committed_and_dropped_can_be_put_and_named_again(store, tmp_path):
    spool = stored_spool(store, tmp_path)
    for data in (b"same", b"other", b"same"):
        ref = spool.put(data, KIND)
        spool.wait([ref], 30.0)
        spool.on_committed()
    assert names(tmp_path) == [f"trajectories-{digest_of(b'same')}"]


def test_a_wait_between_the_spooling_of_an_artifact_and_its_upload_is_a_wait_for_the_upload(store, spool, monkeypatch):
    """Two threads: one has begun to put, the other waits for the same bytes."""
    writing, go_on = threading.Event(), threading.Event()
    write = write_behind._write_synced

    def held_write(path, data):
        writing.set()
        assert go_on.wait(30)
        write(path, data)

    monkeypatch.setattr(write_behind, "_write_synced", held_write)
    ref = ArtifactRef(kind=KIND, digest=digest_of(b"rollouts"), size=8)
    putting = threading.Thread(target=spool.put, args=(b"rollouts", KIND))
    putting.start()
    assert writing.wait(30)
    with pytest.raises(DeadlineExceeded):
        spool.wait([ref], 0.01)
    go_on.set()
    putting.join()


def test_an_artifact_that_changed_in_the_spool_is_not_taken_for_stored(store, tmp_path):
    spool = stored_spool(store, tmp_path)
    ref = spool.put(b"rollouts", KIND)
    spool.wait([ref], 30.0)
    (tmp_path / "spool" / f"trajectories-{ref.digest}").write_bytes(b"roll0uts")
    store.delete(object_name(ref))
    with pytest.raises(ArtifactDamaged, match="work_dir: .* is not what was written there"):
        spool.wait([ref], 30.0)


def test_waiting_for_an_artifact_of_an_earlier_process_makes_it_young_again(store, spool, tmp_path):
    store.gate.set()
    ref = store.put(b"rollouts", KIND)
    path = tmp_path / "store" / object_name(ref)
    os.utime(path, (0, 0))
    spool.wait([ref], 30.0)
    assert path.stat().st_mtime > 0


def test_an_artifact_that_was_collected_as_garbage_is_missed_before_the_commit(store, spool):
    ref = ArtifactRef(kind=KIND, digest=digest_of(b"rollouts"), size=8)
    with pytest.raises(ArtifactDamaged, match=f"{object_name(ref)} is missing"):
        spool.wait([ref], 30.0)
