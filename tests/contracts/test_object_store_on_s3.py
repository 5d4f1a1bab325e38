"""Object store on S3 when server or network fail: it waits, retries, and gives up with one sentence."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roll_core.errors import ArtifactDamaged, StoreRefused, StoreUnavailable, UserError
from roll_core.store.media import s3
from roll_core.store.media.medium import PART_SIZE
from roll_core.store.object_store import AlreadyExists, ObjectStore
from roll_core.types.refs import ArtifactKind
from tests.faulty_proxy import Fault, FaultyProxy
from tests.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, use_server
from tests.support import ROOT, patience

KIND = ArtifactKind.CHECKPOINT_FILE
TRANSIENT = [Fault.DISCONNECT, Fault.LOSE_RESPONSE, Fault.ERROR_500, Fault.SLOW_DOWN, Fault.EXPIRED_TOKEN, Fault.SLOW]


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_server.port) as proxy:
        use_server(monkeypatch, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"})
        yield proxy


@pytest.fixture
def store(s3_server: S3Server, proxy: FaultyProxy) -> ObjectStore:
    """Store on the S3 server, behind the proxy."""
    return ObjectStore(s3_server.new_store_uri(), retry_seconds=60)


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(3 * PART_SIZE))
    return path


def later(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def test_a_wrong_secret_is_refused_at_once_in_one_sentence(s3_server, monkeypatch):
    use_server(monkeypatch, {"AWS_SECRET_ACCESS_KEY": "not the secret"})
    store = ObjectStore(s3_server.new_store_uri())
    started = time.monotonic()
    with pytest.raises(StoreRefused, match="store.uri: s3://roll/.* refuses the request .*: check the credentials"):
        store.put(b"hello", KIND)
    with pytest.raises(StoreRefused, match="check the credentials"):
        store.read("runs/a/config.json")
    with pytest.raises(UserError, match="store.uri: .*: check the credentials"):
        store.check_writable()
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.read("runs/a/config.json"),
        lambda store: list(store.list("runs")),
        lambda store: store.check_writable(),
    ],
    ids=["read", "list", "check_writable"],
)
def test_a_bucket_that_does_not_exist_is_named(s3_server, act):
    """A missing bucket must not look like an empty store: a run would start again from iteration 0."""
    store = ObjectStore("s3://nowhere/x")
    with pytest.raises((StoreRefused, UserError), match="store.uri: s3://nowhere/x names a bucket that does not exist"):
        act(store)
    with pytest.raises(StoreRefused, match="store.uri: s3://nowhere/x"):
        store.put(b"hello", KIND)


@pytest.mark.parametrize("fault", [Fault.ACCESS_DENIED, Fault.TIME_SKEWED, Fault.NO_BUCKET])
def test_a_store_that_has_worked_before_may_refuse_requests_for_a_while(store, proxy, fault):
    ref = store.put(b"hello", KIND)
    assert store.get(ref) == b"hello"
    proxy.next_faults = [fault, fault]
    assert store.put(b"again", KIND) != ref
    proxy.next_faults = [fault]
    assert ObjectStore(store.uri, retry_seconds=60).get(ref) == b"hello", "another object of the same store in this process"


def test_a_store_that_keeps_refusing_is_reported_as_one_that_refuses(store, proxy):
    store.put(b"hello", KIND)
    proxy.fault_of = lambda method, path: Fault.ACCESS_DENIED
    with pytest.raises(StoreRefused, match="store.uri: .* refuses the request .AccessDenied.*: check the credentials"):
        ObjectStore(store.uri, retry_seconds=8).put(b"again", KIND)


def test_a_right_that_was_never_granted_is_refused_at_once(store, proxy):
    list(store.list("runs"))
    proxy.fault_of = lambda method, path: Fault.ACCESS_DENIED if method == "PUT" else None
    before = len(proxy.requests)
    with pytest.raises(StoreRefused, match="check the credentials"):
        store.put(b"hello", KIND)
    assert [method for method, _, _ in proxy.requests[before:]].count("PUT") == 1, "asked once"


def test_an_endpoint_without_a_server_is_reported_before_a_run_starts(s3_server, monkeypatch):
    use_server(monkeypatch, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    with pytest.raises(UserError, match="store.uri: .* did not answer for 2 s"):
        ObjectStore(s3_server.new_store_uri(), retry_seconds=2).check_writable()


@pytest.mark.parametrize("fault", TRANSIENT)
def test_every_operation_survives_transient_faults(store, proxy, tmp_path, fault):
    def with_fault(act: Callable[[], object]) -> object:
        proxy.next_faults = [fault, fault]
        return act()

    ref = store.put(b"hello", KIND)
    assert with_fault(lambda: store.put(b"hello", KIND)) == ref
    assert with_fault(lambda: store.get(ref)) == b"hello"
    with_fault(lambda: store.get_file(ref, tmp_path / "out"))
    with_fault(lambda: store.create("runs/a/config.json", b"{}"))
    assert with_fault(lambda: list(store.list("runs/a"))) == ["config.json"]
    assert with_fault(lambda: [found.name for found in store.list_below("runs")]) == ["runs/a/config.json"]
    assert with_fault(lambda: store.read("runs/a/config.json")) == b"{}"
    with_fault(lambda: store.delete("runs/a/config.json"))
    assert list(store.list("runs/a")) == []


def test_a_truncated_response_is_requested_again(store, proxy):
    ref = store.put(b"hello" * 1000, KIND)
    proxy.next_faults = [Fault.TRUNCATE, Fault.TRUNCATE]
    assert store.get(ref) == b"hello" * 1000


def test_a_request_that_hangs_is_given_up_and_repeated(store, proxy):
    ref = store.put(b"hello", KIND)
    proxy.next_faults = [Fault.HANG]
    assert store.get(ref) == b"hello"


def test_large_files_go_through_a_store_that_fails_every_third_request(store, proxy, large_file, tmp_path):
    requests = 0

    def every_third(method: str, path: str) -> Fault | None:
        nonlocal requests
        requests += 1
        return TRANSIENT[requests // 3 % len(TRANSIENT)] if requests % 3 == 0 else None

    proxy.fault_of = every_third
    ref = store.put_file(large_file, KIND)
    store.get_file(ref, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == large_file.read_bytes()
    assert requests > 10


@pytest.mark.parametrize("lost", [1, 2])
def test_a_create_whose_response_was_lost_is_not_mistaken_for_another_writer(store, proxy, lost):
    proxy.next_faults = [Fault.LOSE_RESPONSE] * lost
    store.create("iterations/7", b"mine")
    assert store.read("iterations/7") == b"mine"


def test_a_create_whose_response_was_lost_on_a_reused_connection_succeeds(store, proxy):
    """The HTTP client repeats a PUT on a reused connection by itself, so that the store does not see the lost response."""
    store.create("iterations/6", b"opens the connection")
    proxy.next_faults = [Fault.LOSE_RESPONSE]
    store.create("iterations/7", b"mine")
    with pytest.raises(AlreadyExists):
        store.create("iterations/7", b"mine")


def test_a_second_create_is_refused_even_if_its_response_was_lost(store, proxy):
    store.create("iterations/7", b"theirs")
    proxy.next_faults = [Fault.LOSE_RESPONSE]
    with pytest.raises(AlreadyExists):
        store.create("iterations/7", b"theirs")


def test_an_upload_succeeds_if_the_response_to_its_completion_was_lost(store, proxy, large_file):
    lost: list[str] = []

    def lose_the_first_completion(method: str, path: str) -> Fault | None:
        if method == "POST" and "uploadId=" in path and not lost:
            lost.append(path)
            return Fault.LOSE_RESPONSE
        return None

    proxy.fault_of = lose_the_first_completion
    ref = store.put_file(large_file, KIND)
    assert len(lost) == 1
    assert store.get(ref) == large_file.read_bytes()


def test_an_upload_that_fails_is_invisible_and_leaves_no_parts(store, proxy, large_file):
    proxy.fault_of = lambda method, path: Fault.ERROR_500 if "partNumber=2" in path else None
    impatient = ObjectStore(store.uri, retry_seconds=3)
    with pytest.raises(
        StoreUnavailable,
        match="store.uri: .* did not answer for 3 s .store.retry_seconds; last: (InternalError|FSTimeoutError)",
    ):
        impatient.put_file(large_file, KIND)
    assert list(store.list("objects")) == []
    assert store.remove_unfinished(older_than_seconds=0) == 0


def test_a_killed_upload_is_invisible_and_its_parts_are_removed(store, proxy, large_file):
    """The process is killed when it requests the completion of its multi-part upload."""
    completion_requested = threading.Event()

    def hold_completion(method: str, path: str) -> Fault | None:
        if method != "POST" or "uploadId=" not in path:
            return None
        completion_requested.set()
        return Fault.HANG

    proxy.fault_of = hold_completion
    program = f"""
from pathlib import Path
from roll_core.store.object_store import ObjectStore
ObjectStore({store.uri!r}).put_file(Path({str(large_file)!r}), {KIND.value!r})
"""
    child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    assert completion_requested.wait(patience(60))
    child.kill()
    child.wait()
    assert list(store.list("objects")) == []
    assert store.remove_unfinished(older_than_seconds=3600) == 0
    assert store.remove_unfinished(older_than_seconds=0) == 1
    assert store.remove_unfinished(older_than_seconds=0) == 0


def test_several_parts_and_several_files_are_uploaded_concurrently(store, proxy, large_file, tmp_path):
    """The server answers no part before it has received four, of a file with three and one with two."""
    received = threading.Semaphore(0)
    four_received = threading.Event()

    def hold(method: str, path: str) -> Fault | None:
        if "partNumber=" in path:
            received.release()
            assert four_received.wait(patience(60)), "parts are uploaded one after the other"
        return None

    def watch() -> None:
        for _ in range(4):
            received.acquire()
        four_received.set()

    threading.Thread(target=watch, daemon=True).start()
    proxy.fault_of = hold
    other = tmp_path / "other"
    other.write_bytes(os.urandom(2 * PART_SIZE))
    store.put_files([large_file, other], KIND)
    assert four_received.is_set()


@pytest.mark.exhaustive
def test_files_are_not_held_in_memory(s3_server, tmp_path):
    """A process uploads and downloads a file of 40 parts; its memory may grow by 12 parts."""
    size = 40 * PART_SIZE
    with open(tmp_path / "big", "wb") as file:
        file.truncate(size)
    program = f"""
import resource
from pathlib import Path
from roll_core.store.object_store import ObjectStore
store = ObjectStore({s3_server.new_store_uri()!r})
store.check_writable()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ref = store.put_file(Path({str(tmp_path / "big")!r}), {KIND.value!r})
store.get_file(ref, Path({str(tmp_path / "back")!r}))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 12 * PART_SIZE
    assert (tmp_path / "back").stat().st_size == size


def test_a_server_that_ignores_conditional_writes_is_refused_before_a_run_starts(store, proxy):
    proxy.fault_of = lambda method, path: Fault.ACCEPT_ANYWAY
    with pytest.raises(UserError, match="store.uri: .* ignores conditional writes"):
        store.check_writable()


def test_renewed_credentials_are_picked_up_when_the_old_ones_expire(s3_server, proxy, tmp_path, monkeypatch):
    credentials = tmp_path / "credentials"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    use_server(monkeypatch, {"AWS_SHARED_CREDENTIALS_FILE": str(credentials)})

    def write_credentials(key: str, secret: str) -> None:
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    def expired_if_signed_with_the_old_key(method: str, path: str) -> Fault | None:
        _, _, headers = proxy.requests[-1]
        if "Credential=old-key/" not in headers["Authorization"]:
            return None
        write_credentials(ACCESS_KEY, SECRET_KEY)
        return Fault.EXPIRED_TOKEN

    write_credentials("old-key", "old-secret")
    proxy.fault_of = expired_if_signed_with_the_old_key
    store = ObjectStore(s3_server.new_store_uri(), retry_seconds=60)
    assert store.get(store.put(b"hello", KIND)) == b"hello"


def test_operations_wait_for_a_server_that_is_paused(own_server):
    store = ObjectStore(own_server.new_store_uri(), retry_seconds=60)
    ref = store.put(b"hello", KIND)
    own_server.pause()
    resume = later(4, own_server.resume)
    started = time.monotonic()
    assert store.put(b"during the pause", KIND).size == 16
    assert time.monotonic() - started >= 3.5
    assert store.get(ref) == b"hello"
    resume.join()


def test_operations_wait_for_a_server_that_is_killed_and_comes_back(own_server, monkeypatch, large_file):
    """The server is killed in the middle of an upload; acknowledged writes from before are there afterwards."""
    restarts: list[threading.Timer] = []

    def kill_at_the_second_part(method: str, path: str) -> Fault | None:
        if "partNumber=2" in path and not restarts:
            own_server.kill()
            restarts.append(later(2, own_server.start))
        return None

    with FaultyProxy(own_server.port) as proxy:
        use_server(monkeypatch, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"})
        store = ObjectStore(own_server.new_store_uri(), retry_seconds=120)
        store.create("iterations/0", b"before")
        proxy.fault_of = kill_at_the_second_part
        ref = store.put_file(large_file, KIND)
        store.create("iterations/1", b"after")
        restarts[0].join()
        assert store.get(ref) == large_file.read_bytes()
        assert [store.read(f"iterations/{name}") for name in store.list("iterations")] == [b"before", b"after"]


@pytest.mark.parametrize("how", [pytest.param("pause", marks=pytest.mark.exhaustive), "kill"])
def test_an_outage_past_the_deadline_is_reported_in_one_sentence(own_server, large_file, tmp_path, how):
    patient = ObjectStore(own_server.new_store_uri())
    ref = patient.put(b"hello", KIND)
    store = ObjectStore(patient.uri, retry_seconds=3)
    own_server.pause() if how == "pause" else own_server.kill()
    sentence = "store.uri: s3://roll/.* did not answer for 3 s .*resume the run when the store is back"
    acts: list[Callable[[], object]] = [
        lambda: store.get(ref),
        lambda: store.put_file(large_file, KIND),
        lambda: store.create("iterations/0", b""),
        lambda: list(store.list("objects")),
    ]
    for act in acts:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=sentence) as failed:
            act()
        assert "\n" not in str(failed.value)
        assert time.monotonic() - started < patience(8)
    own_server.resume() if how == "pause" else own_server.start()
    assert patient.get(ref) == b"hello"


def test_a_server_that_stops_reading_a_request_is_not_waited_for_forever(own_server, large_file):
    """The server is paused with an open connection: the body fills the socket's buffer and no response comes."""
    ObjectStore(own_server.new_store_uri()).put(b"opens the connection", KIND)
    store = ObjectStore(own_server.new_store_uri(), retry_seconds=3)
    own_server.pause()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        store.put(large_file.read_bytes()[: PART_SIZE - 1], KIND)
    assert time.monotonic() - started < patience(8)
    own_server.resume()


def test_a_corrupted_object_is_reported_as_damage(store, proxy):
    ref = store.put(b"hello", KIND)
    store.delete(f"objects/{ref.digest[:2]}/{ref.digest[2:]}")
    store.create(f"objects/{ref.digest[:2]}/{ref.digest[2:]}", b"jello")
    with pytest.raises(ArtifactDamaged, match="is damaged: 5 bytes, expected 5"):
        store.get(ref)


def test_an_object_too_large_for_one_copy_is_touched_in_parts(s3_server, monkeypatch):
    """S3 copies at most 5 GiB in one request; here the limit is smaller."""
    store = ObjectStore(s3_server.new_store_uri(), retry_seconds=60)
    ref = store.put(os.urandom(6 * 2**20), ArtifactKind.CHECKPOINT_FILE)
    before = next(store.list_below("objects"))
    monkeypatch.setattr(s3, "LARGEST_COPY", 2**20)
    store.touch(ref)
    store.get(ref)
    assert next(store.list_below("objects")).written_at >= before.written_at
