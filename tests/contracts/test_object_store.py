"""Contract of the object store on every medium: a folder, memory, a bucket of a real S3 server."""

import os
import pickle
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from roll_core.errors import ArtifactDamaged, UserError
from roll_core.store.media.medium import PART_SIZE
from roll_core.store.object_store import AlreadyExists, ObjectStore, object_name
from roll_core.types.refs import ArtifactKind, digest_of
from tests.support import patience

KIND = ArtifactKind.CHECKPOINT_FILE
LARGE = PART_SIZE * 2 + 12345
"""Bytes of two whole parts and a short one."""


@pytest.fixture(params=["file", "memory", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "file":
            return f"file://{tmp_path}/store"
        case "memory":
            return f"memory://{uuid.uuid4().hex}"
        case _:
            return request.getfixturevalue("s3_server").new_store_uri()


@pytest.fixture
def store(uri: str) -> ObjectStore:
    return ObjectStore(uri, retry_seconds=60)


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "weights"
    path.write_bytes(os.urandom(LARGE))
    return path


def overwrite(store: ObjectStore, name: str, data: bytes) -> None:
    store.delete(name)
    store.create(name, data)


def test_bytes_come_back_by_their_ref(store):
    ref = store.put(b"hello", KIND)
    assert (ref.size, store.get(ref)) == (5, b"hello")


def test_empty_bytes_can_be_stored(store):
    ref = store.put(b"", KIND)
    assert (ref.size, store.get(ref)) == (0, b"")


def test_the_same_bytes_have_the_same_name_and_are_kept_once(store):
    first, second = store.put(b"same", KIND), store.put(b"same", KIND)
    assert first == second
    assert len(list(store.list("objects"))) == 1


@pytest.mark.parametrize("damage", [b"hellp", b"hell", b"", b"hello!"])
def test_damaged_bytes_are_reported_by_name_and_never_returned(store, tmp_path, damage):
    ref = store.put(b"hello", ArtifactKind.TRAJECTORIES)
    overwrite(store, object_name(ref), damage)
    with pytest.raises(ArtifactDamaged, match=f"trajectories {object_name(ref)} in .* is damaged: {len(damage)} bytes"):
        store.get(ref)
    with pytest.raises(ArtifactDamaged, match=object_name(ref)):
        store.get_file(ref, tmp_path / "out")
    assert list(tmp_path.glob("out*")) == []


def test_missing_bytes_are_reported_by_name(store, tmp_path):
    ref = store.put(b"hello", ArtifactKind.TRAJECTORIES)
    store.delete(object_name(ref))
    with pytest.raises(ArtifactDamaged, match=f"{object_name(ref)} is missing"):
        store.get(ref)
    with pytest.raises(ArtifactDamaged, match=f"{object_name(ref)} is missing"):
        store.get_file(ref, tmp_path / "out")


@pytest.mark.parametrize("damage", [b"he", b"hellp"])
def test_putting_bytes_again_repairs_a_damaged_object(store, damage):
    ref = store.put(b"hello", KIND)
    overwrite(store, object_name(ref), damage)
    store.put(b"hello", KIND)
    assert store.get(ref) == b"hello"


def test_a_file_of_several_parts_comes_back_as_a_file_and_as_bytes(store, large_file, tmp_path):
    ref = store.put_file(large_file, KIND)
    assert (ref.size, ref.digest) == (LARGE, digest_of(large_file.read_bytes()))
    store.get_file(ref, tmp_path / "deep" / "out")
    assert (tmp_path / "deep" / "out").read_bytes() == large_file.read_bytes()
    assert store.get(ref) == large_file.read_bytes()


def test_large_bytes_are_the_same_object_as_a_file_of_them(store, large_file):
    assert store.put(large_file.read_bytes(), KIND) == store.put_file(large_file, KIND)


@pytest.mark.parametrize("keep", [PART_SIZE - 1, PART_SIZE + 1, LARGE - 1])
def test_a_truncated_large_object_is_reported_by_name(store, large_file, tmp_path, keep):
    ref = store.put_file(large_file, KIND)
    overwrite(store, object_name(ref), large_file.read_bytes()[:keep])
    with pytest.raises(ArtifactDamaged, match=f"{object_name(ref)} .* is damaged: {keep} bytes, expected {LARGE}"):
        store.get_file(ref, tmp_path / "out")
    assert list(tmp_path.glob("out*")) == []


def test_several_files_are_put_and_got_together(store, large_file, tmp_path):
    sources = [large_file]
    for number in range(12):
        sources.append(tmp_path / f"small-{number}")
        sources[-1].write_bytes(b"x" * number)
    refs = store.put_files(sources, KIND)
    assert [ref.size for ref in refs] == [LARGE, *range(12)]
    targets = [tmp_path / "back" / str(number) for number in range(13)]
    store.get_files(zip(refs, targets, strict=True))
    assert [target.read_bytes() for target in targets] == [source.read_bytes() for source in sources]


def test_one_damaged_file_of_several_is_named(store, tmp_path):
    refs = [store.put(str(number).encode(), KIND) for number in range(8)]
    overwrite(store, object_name(refs[5]), b"damage")
    with pytest.raises(ArtifactDamaged, match=object_name(refs[5])):
        store.get_files((ref, tmp_path / ref.digest) for ref in refs)


def test_a_file_that_changes_while_it_is_stored_is_not_stored(store, large_file, tmp_path, monkeypatch):
    """The last part changes while the first is being written."""
    source = tmp_path / "changing"
    source.write_bytes(large_file.read_bytes())
    stored_as = f"objects/{digest_of(source.read_bytes())[:2]}"
    medium_write = store._medium.write

    def change_then_write(name, parts, size):
        with open(source, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        medium_write(name, parts, size)

    monkeypatch.setattr(store._medium, "write", change_then_write)
    with pytest.raises(ArtifactDamaged, match="changing changed while it was being stored"):
        store.put_file(source, KIND)
    assert list(store.list(stored_as)) == []


def test_create_succeeds_once_and_keeps_the_first_bytes(store):
    store.create("runs/a/config.json", b"first")
    with pytest.raises(AlreadyExists):
        store.create("runs/a/config.json", b"second")
    with pytest.raises(AlreadyExists):
        store.create("runs/a/config.json", b"first")
    assert store.read("runs/a/config.json") == b"first"


def test_reading_a_missing_object_raises_and_deleting_it_does_not(store):
    with pytest.raises(FileNotFoundError):
        store.read("runs/a/config.json")
    store.delete("runs/a/config.json")


def test_a_listing_is_sorted_and_empty_for_a_missing_folder(store):
    for name in ("b", "a", "c"):
        store.create(f"runs/{name}/config.json", b"{}")
    assert list(store.list("runs")) == ["a", "b", "c"]
    assert list(store.list("runs/a")) == ["config.json"]
    assert list(store.list("nowhere")) == []


def test_a_listing_shows_what_another_writer_did_since_the_last_one(store, uri):
    other = ObjectStore(uri)
    store.create("iterations/0", b"")
    assert list(store.list("iterations")) == ["0"]
    other.create("iterations/1", b"")
    assert list(store.list("iterations")) == ["0", "1"]
    other.delete("iterations/0")
    assert list(store.list("iterations")) == ["1"]


def test_everything_below_a_folder_is_listed_with_its_size(store):
    store.create("runs/a/config.json", b"{}")
    store.create("runs/a/iterations/0.json", b"12345")
    store.create("runs/ab/config.json", b"")
    assert {(found.name, found.size) for found in store.list_below("runs/a")} == {
        ("runs/a/config.json", 2),
        ("runs/a/iterations/0.json", 5),
    }
    assert len(list(store.list_below("runs"))) == 3
    assert list(store.list_below("nowhere")) == []


def ages(store: ObjectStore) -> dict[str, float]:
    return {found.name: found.age_seconds for found in store.list_below("objects")}


def wait_until_older(store: ObjectStore, seconds: float) -> None:
    """Wait until every object is so old. Some servers have timestamps of whole seconds."""
    deadline = time.monotonic() + 60
    while min(ages(store).values()) < seconds:
        assert time.monotonic() < deadline, "nothing grows older"
        time.sleep(0.1)


def test_putting_or_touching_an_object_restarts_its_age_and_a_delete_leaves_it_then(store):
    once, again, touched = (store.put(data, KIND) for data in (b"once", b"again", b"touched"))
    assert all(0.0 <= age < 600.0 for age in ages(store).values())
    wait_until_older(store, 2.0)
    listed = {found.name: found for found in store.list_below("objects")}
    store.put(b"again", KIND)
    store.touch(touched)
    now = ages(store)
    assert max(now[object_name(again)], now[object_name(touched)]) < now[object_name(once)]
    deleted = [store.delete_unmodified(listed[object_name(ref)]) for ref in (once, again, touched, once)]
    assert deleted == [True, False, False, False]
    assert [store.exists(ref) for ref in (once, again, touched)] == [False, True, True]
    assert (store.get(again), store.get(touched)) == (b"again", b"touched")
    with pytest.raises(ArtifactDamaged, match="is missing"):
        store.touch(once)


def test_an_object_by_name_can_be_replaced(store):
    store.create("runs/a/weights/0.json", b"old")
    store.replace("runs/a/weights/0.json", b"new")
    assert store.read("runs/a/weights/0.json") == b"new"


def test_a_long_listing_is_complete(store):
    names = [f"{number:08d}.json" for number in range(1100)]
    for name in names[:-1]:
        store._medium.write(f"iterations/{name}", iter([b""]), 0)
    store.create(f"iterations/{names[-1]}", b"")
    assert list(store.list("iterations")) == names
    assert sorted(found.name for found in store.list_below("iterations")) == [f"iterations/{name}" for name in names]


def test_of_sixteen_writers_racing_for_one_name_exactly_one_wins(store):
    """All writers write the same bytes, like two commands that open a run of the same config."""
    for round_number in range(5):
        winners: list[int] = []
        ready = threading.Barrier(16)

        def write(writer: int, name: str, winners: list[int] = winners, ready: threading.Barrier = ready) -> None:
            ready.wait()
            try:
                store.create(name, b"same")
            except AlreadyExists:
                return
            winners.append(writer)

        threads = [threading.Thread(target=write, args=(i, f"iterations/{round_number}")) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1


def test_readers_never_see_half_of_an_object_that_is_being_replaced(store):
    versions = [bytes([number]) * 2**20 for number in range(20)]
    store.create("turning", versions[0])
    seen: set[bytes] = set()
    done = threading.Event()

    def read_repeatedly() -> None:
        while not done.is_set():
            seen.add(store.read("turning"))

    reader = threading.Thread(target=read_repeatedly)
    reader.start()
    for version in versions:
        store._medium.write("turning", iter([version]), len(version))
    done.set()
    reader.join()
    assert seen <= set(versions)


FORKING_PROGRAM = """
import os, sys
from roll_core.store.object_store import ObjectStore
from roll_core.types.refs import ArtifactKind

store = ObjectStore(sys.argv[1])
before = store.put(b"before", ArtifactKind.TRAJECTORIES)
child = os.fork()
if child == 0:
    store.put(b"in the child", ArtifactKind.TRAJECTORIES)
    os._exit(0 if store.get(before) == b"before" and len(list(store.list_below("objects"))) == 2 else 1)
_, status = os.waitpid(child, 0)
store.put(b"in the parent", ArtifactKind.TRAJECTORIES)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("uri", ["file", "s3"], indirect=True)
def test_a_store_opened_before_a_fork_works_in_the_child_and_the_parent(uri, store):
    """In a process of its own: what other tests imported into this one need not survive a fork."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING_PROGRAM, uri], capture_output=True, text=True, timeout=patience(300)
    )
    assert done.returncode == 0, done.stderr
    stored = {store.read(each.name) for each in store.list_below("objects")}
    assert stored == {b"before", b"in the child", b"in the parent"}


def test_a_store_can_be_sent_to_another_process(store):
    ref = store.put(b"hello", KIND)
    sent = pickle.loads(pickle.dumps(store))
    assert (sent.uri, sent.get(ref)) == (store.uri, b"hello")


def test_check_writable_leaves_the_store_as_it_was(store):
    store.check_writable()
    assert list(store.list("objects")) == []


def test_a_partly_written_file_is_invisible_and_removed_when_it_is_old(tmp_path):
    store = ObjectStore(f"file://{tmp_path}")
    store.create("iterations/0", b"whole")
    partial = tmp_path / "iterations/1.partial-abc"
    partial.write_bytes(b"torn")
    assert list(store.list("iterations")) == ["0"]
    assert [found.name for found in store.list_below("iterations")] == ["iterations/0"]
    assert store.remove_unfinished(older_than_seconds=60) == 0
    os.utime(partial, (time.time() - 120, time.time() - 120))
    assert store.remove_unfinished(older_than_seconds=60) == 1
    assert not partial.exists()
    assert store.read("iterations/0") == b"whole"


def test_an_unwritable_store_is_refused_in_one_sentence_that_names_the_key(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="store.uri: cannot write to .*: make it writable or point store.uri elsewhere"):
        ObjectStore(f"file://{tmp_path}/file/store").check_writable()


@pytest.mark.parametrize("uri", ["gs://bucket/x", "s3://"])
def test_an_address_that_cannot_be_a_store_is_refused(uri):
    with pytest.raises(UserError, match="store.uri: "):
        ObjectStore(uri)
