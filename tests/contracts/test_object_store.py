"""What every object store must do, on every filesystem we run on."""

import threading
import uuid
from pathlib import Path

import pytest

from roll_core.errors import ArtifactDamaged, UserError
from roll_core.store.object_store import AlreadyExists, ObjectStore
from roll_core.types.refs import ArtifactKind


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/store" if request.param == "file" else f"memory://{uuid.uuid4().hex}")


def overwrite(store: ObjectStore, name: str, data: bytes) -> None:
    store.delete(name)
    store.create(name, data)


def object_name(ref) -> str:
    return f"objects/{ref.digest[:2]}/{ref.digest[2:]}"


def test_bytes_come_back_by_their_ref(store):
    ref = store.put(b"hello", ArtifactKind.CHECKPOINT_FILE)
    assert (ref.size, store.get(ref)) == (5, b"hello")


def test_the_same_bytes_have_the_same_name_and_are_kept_once(store):
    first, second = store.put(b"same", ArtifactKind.CHECKPOINT_FILE), store.put(b"same", ArtifactKind.CHECKPOINT_FILE)
    assert first == second
    assert len(list(store.list("objects"))) == 1


@pytest.mark.parametrize("damage", [b"hellp", b"hell", b"", b"hello!"])
def test_damaged_bytes_are_reported_by_name_and_never_returned(store, damage):
    ref = store.put(b"hello", ArtifactKind.TRAJECTORIES)
    overwrite(store, object_name(ref), damage)
    with pytest.raises(ArtifactDamaged, match=ref.digest[2:]):
        store.get(ref)


def test_missing_bytes_are_reported_by_name(store):
    ref = store.put(b"hello", ArtifactKind.TRAJECTORIES)
    store.delete(object_name(ref))
    with pytest.raises(ArtifactDamaged, match="is missing"):
        store.get(ref)


def test_putting_bytes_again_repairs_a_truncated_object(store):
    ref = store.put(b"hello", ArtifactKind.CHECKPOINT_FILE)
    overwrite(store, object_name(ref), b"he")
    store.put(b"hello", ArtifactKind.CHECKPOINT_FILE)
    assert store.get(ref) == b"hello"


def test_create_succeeds_once_and_keeps_the_first_bytes(store):
    store.create("runs/a/config.json", b"first")
    with pytest.raises(AlreadyExists):
        store.create("runs/a/config.json", b"second")
    assert store.read("runs/a/config.json") == b"first"


def test_listing_is_sorted_and_empty_for_a_folder_that_is_not_there(store):
    for name in ("b", "a", "c"):
        store.create(f"runs/{name}/config.json", b"{}")
    assert list(store.list("runs")) == ["a", "b", "c"]
    assert list(store.list("nowhere")) == []


def test_of_sixteen_writers_racing_for_one_name_exactly_one_wins(tmp_path):
    store = ObjectStore(f"file://{tmp_path}")
    for round_number in range(10):
        winners: list[int] = []
        ready = threading.Barrier(16)

        def write(writer: int, name: str, winners: list[int] = winners, ready: threading.Barrier = ready) -> None:
            ready.wait()
            try:
                store.create(name, str(writer).encode())
            except AlreadyExists:
                return
            winners.append(writer)

        threads = [threading.Thread(target=write, args=(i, f"iterations/{round_number}")) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert store.read(f"iterations/{round_number}") == str(winners[0]).encode()


def test_a_half_written_file_is_invisible(tmp_path):
    store = ObjectStore(f"file://{tmp_path}")
    store.create("iterations/0", b"whole")
    (tmp_path / "iterations/1.partial-abc").write_bytes(b"torn")
    assert list(store.list("iterations")) == ["0"]


def test_an_unwritable_store_is_one_sentence_that_names_the_key(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="store.uri: cannot write to .*: make it writable or point store.uri elsewhere"):
        ObjectStore(f"file://{tmp_path}/file/store").check_writable()
