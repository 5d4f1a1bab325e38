"""Artifacts on their way to the store: kept on local disk, uploaded beside whatever comes next.

    spool/trajectories-9f86d081...      whole, synced, named by what it is; gone once it is stored

Whoever puts something gets its name at once; whoever commits waits until what it names is stored. The spool is bounded:
when it is full, `put` waits for uploads, so that a slow store slows the run down. What a killed process left is stored by
the next.
"""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from roll_core.errors import DeadlineExceeded, RollError
from roll_core.host import replacing
from roll_core.store.object_store import FILES_IN_FLIGHT, ObjectStore
from roll_core.types.refs import ArtifactKind, ArtifactRef, digest_of


class WriteBehind:
    """Example: spool = WriteBehind(store, folder, 2**30); ref = spool.put(data, kind); ...; spool.wait([ref], 60.0)"""

    def __init__(self, store: ObjectStore, folder: Path, max_bytes: int):
        self._store = store
        self._folder = folder
        self._max_bytes = max_bytes
        self._used = 0
        self._changed = threading.Condition()
        self._on_the_way: dict[str, Future[None]] = {}
        self._put_here: set[str] = set()
        self._failure: RollError | None = None
        self._uploads = ThreadPoolExecutor(FILES_IN_FLIGHT, "write-behind")
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes, kind: ArtifactKind) -> ArtifactRef:
        """Keep bytes on disk and begin to store them. Waits while the spool is full; raises if an upload has failed."""
        ref = ArtifactRef(kind=kind, digest=digest_of(data), size=len(data))
        with self._changed:
            # One that is larger than the spool goes through alone.
            self._changed.wait_for(lambda: self._failure or not self._used or self._used + ref.size <= self._max_bytes)
            if self._failure:
                raise self._failure
            self._put_here.add(ref.digest)
            if ref.digest in self._on_the_way:
                return ref
            self._used += ref.size
        path = self._folder / f"{kind}-{ref.digest}"
        _write_synced(path, data)
        self._upload(path, ref)
        return ref

    def wait(self, refs: Iterable[ArtifactRef], seconds: float) -> None:
        """Until these are stored. Raises why one could not be.

        One that an earlier process put may be of any age and named by no manifest yet: it is written again, before garbage
        collection takes it for what nobody needs.
        """
        for ref in refs:
            if ref.digest not in self._put_here:
                self._store.make_young(ref)
                self._put_here.add(ref.digest)
            upload = self._on_the_way.get(ref.digest)
            try:
                if upload is not None:
                    upload.result(timeout=seconds)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"deadlines.store: {ref.kind} {ref.digest[:12]} ({ref.size} bytes) did not reach {self._store.uri} "
                    f"within {seconds:.0f} s"
                ) from None

    def store_leftovers(self) -> int:
        """Store what an earlier process kept here and did not store; says how many there were."""
        count = 0
        for path in sorted(self._folder.iterdir()):
            kind, _, digest = path.name.rpartition("-")
            data = path.read_bytes()
            # A damaged one is as if it had never been written: whoever needs it makes it again.
            if kind in set(ArtifactKind) and digest_of(data) == digest:
                self._store.put(data, ArtifactKind(kind))
                count += 1
            path.unlink()
        return count

    def _upload(self, path: Path, ref: ArtifactRef) -> None:
        upload = self._uploads.submit(self._store.put_file, path, ref.kind)
        stored: Future[None] = Future()
        self._on_the_way[ref.digest] = stored

        def settle(done: Future[ArtifactRef]) -> None:
            with self._changed:
                self._used -= ref.size
                if (error := done.exception()) is None:
                    path.unlink(missing_ok=True)
                    self._on_the_way.pop(ref.digest, None)
                    stored.set_result(None)
                else:
                    self._failure = error if isinstance(error, RollError) else RollError(f"store: {error}")
                    stored.set_exception(self._failure)
                self._changed.notify_all()

        upload.add_done_callback(settle)


def _write_synced(path: Path, data: bytes) -> None:
    """Write a file that is whole after a crash or a power cut, or not there."""
    with replacing(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
