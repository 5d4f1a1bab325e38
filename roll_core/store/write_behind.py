"""Write-behind spool: artifacts are kept on local disk and uploaded to the store while the run continues.

    spool/trajectories-9f86d081...      whole, synced, named by kind and digest; deleted once it is stored

`put` returns the ref at once; a commit waits until the artifacts it names are stored. The spool is bounded: when it is full,
`put` waits for uploads, which is back-pressure from a slow store. Files that a killed process left in the spool are stored
by the next one. Used by the rollout scheduler.
"""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from roll_core.errors import DeadlineExceeded, RollError
from roll_core.host import atomic_replace
from roll_core.store.object_store import FILES_IN_FLIGHT, ObjectStore
from roll_core.types.refs import ArtifactKind, ArtifactRef, digest_of


class WriteBehind:
    """Bounded spool in a folder, uploaded to a store in the background. `max_bytes` is its size in bytes.

    Example: spool = WriteBehind(store, folder, 2**30); ref = spool.put(data, kind); ...; spool.wait([ref], 60.0)
    """

    def __init__(self, store: ObjectStore, folder: Path, max_bytes: int):
        self._store = store
        self._folder = folder
        self._max_bytes = max_bytes
        self._used = 0
        self._changed = threading.Condition()
        self._uploading: dict[str, Future[None]] = {}
        self._put_by_this_process: set[str] = set()
        self._failure: RollError | None = None
        self._uploads = ThreadPoolExecutor(FILES_IN_FLIGHT, "write-behind")
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes, kind: ArtifactKind) -> ArtifactRef:
        """Write bytes to the spool, start their upload and return the ref. Waits while the spool is full.

        Raises the error of any earlier upload that failed.
        """
        ref = ArtifactRef(kind=kind, digest=digest_of(data), size=len(data))
        with self._changed:
            # An artifact larger than the spool is admitted once the spool is empty.
            self._changed.wait_for(lambda: self._failure or not self._used or self._used + ref.size <= self._max_bytes)
            if self._failure:
                raise self._failure
            self._put_by_this_process.add(ref.digest)
            if ref.digest in self._uploading:
                return ref
            self._used += ref.size
        path = self._folder / f"{kind}-{ref.digest}"
        _write_synced(path, data)
        self._upload(path, ref)
        return ref

    def wait(self, refs: Iterable[ArtifactRef], seconds: float) -> None:
        """Wait until these artifacts are stored, `seconds` for each. Raises the upload's error or DeadlineExceeded.

        An artifact that an earlier process put may be old, and no manifest names it yet. It is touched, so that garbage
        collection does not remove it before the commit.
        """
        for ref in refs:
            if ref.digest not in self._put_by_this_process:
                self._store.touch(ref)
                self._put_by_this_process.add(ref.digest)
            upload = self._uploading.get(ref.digest)
            try:
                if upload is not None:
                    upload.result(timeout=seconds)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"deadlines.store: {ref.kind} {ref.digest[:12]} ({ref.size} bytes) did not reach {self._store.uri} "
                    f"within {seconds:.0f} s"
                ) from None

    def store_leftovers(self) -> int:
        """Store the artifacts that an earlier process left in the spool; returns their number."""
        count = 0
        for path in sorted(self._folder.iterdir()):
            kind, _, digest = path.name.rpartition("-")
            data = path.read_bytes()
            # A damaged artifact is dropped as if it had never been written: its iteration generates it again.
            if kind in set(ArtifactKind) and digest_of(data) == digest:
                self._store.put(data, ArtifactKind(kind))
                count += 1
            path.unlink()
        return count

    def _upload(self, path: Path, ref: ArtifactRef) -> None:
        """Start the upload of a spooled file; when it ends, free the file's bytes in the spool and record a failure."""
        upload = self._uploads.submit(self._store.put_file, path, ref.kind)
        stored: Future[None] = Future()
        self._uploading[ref.digest] = stored

        def settle(done: Future[ArtifactRef]) -> None:
            with self._changed:
                self._used -= ref.size
                if (error := done.exception()) is None:
                    path.unlink(missing_ok=True)
                    self._uploading.pop(ref.digest, None)
                    stored.set_result(None)
                else:
                    self._failure = error if isinstance(error, RollError) else RollError(f"store: {error}")
                    stored.set_exception(self._failure)
                self._changed.notify_all()

        upload.add_done_callback(settle)


def _write_synced(path: Path, data: bytes) -> None:
    """Write a file atomically and durably: after a crash or a power cut it is whole or absent."""
    with atomic_replace(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
