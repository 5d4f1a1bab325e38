"""Write-behind spool: artifacts are kept on local disk and uploaded to the store while the run continues.

    spool/trajectories-9f86d081...      whole, synced, named by kind and digest; deleted after the next commit but one

`put` returns the ref at once; a commit waits until the artifacts it names are stored. The spool is bounded: when it is full,
`put` waits for uploads, which is back-pressure from a slow store. Files that a killed process left in the spool are stored
by the next one. Used by the rollout scheduler.

Why garbage collection takes nothing that a commit names, however long the iteration lasts:
1. Before the commit, `wait` puts again what was put longer than `fresh_seconds` ago, a quarter of the grace period, and what
   is missing. So all that the manifest names is young when the manifest is created, and a collection that begins later
   finds the manifest.
2. A collection that listed an object as old before it was put again reads the time of its last write directly before the
   delete (`Medium.delete_unmodified`), and keeps it.
3. A delete that was already on its way arrives before the next commit. The bytes stay in the spool until then:
   `on_committed` looks for the artifacts of this commit and of the one before, and puts again what is missing.
What remains is a process that sleeps between the two requests of step 2 for as long as an iteration takes.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from roll_core.errors import ArtifactDamaged, DeadlineExceeded, RollError
from roll_core.host import atomic_replace
from roll_core.store.object_store import FILES_IN_FLIGHT, ObjectStore
from roll_core.types.refs import ArtifactKind, ArtifactRef, digest_of

log = logging.getLogger(__name__)


@dataclass
class _SpooledFile:
    """File in the spool, with the state of its upload."""

    ref: ArtifactRef
    path: Path
    stored: "Future[None]" = field(default_factory=Future)
    put_at: float = field(default_factory=time.monotonic)
    """Monotonic time before the last upload began. The object is younger than this by the store's clock."""


class WriteBehind:
    """Bounded spool in a folder, uploaded to a store in the background.

    `max_bytes` is the size of all files that wait for their upload. `fresh_seconds` is the age from which an artifact is put
    again before a commit names it.

    Example: spool = WriteBehind(store, folder, 2**30, 900.0); ref = spool.put(data, kind); ...; spool.wait([ref], 60.0)
    """

    def __init__(self, store: ObjectStore, folder: Path, max_bytes: int, fresh_seconds: float):
        self._store = store
        self._folder = folder
        self._max_bytes = max_bytes
        self._fresh_seconds = fresh_seconds
        self._used = 0
        self._changed = threading.Condition()
        self._files: dict[str, _SpooledFile] = {}
        """Files in the spool by digest, stored ones included."""
        self._named: set[str] = set()
        """Digests that the last `wait` waited for: the next commit names them."""
        self._committed: set[str] = set()
        """Digests that the last commit names."""
        self._failure: RollError | None = None
        self._uploads = ThreadPoolExecutor(FILES_IN_FLIGHT, "write-behind")
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes, kind: ArtifactKind) -> ArtifactRef:
        """Write bytes to the spool, start their upload and return the ref. Waits while the spool is full.

        Raises the error of any earlier upload that failed.
        """
        ref = ArtifactRef(kind=kind, digest=digest_of(data), size=len(data))
        file = _SpooledFile(ref, self._folder / f"{kind}-{ref.digest}")
        with self._changed:
            # An artifact larger than the spool is admitted once the spool is empty.
            self._changed.wait_for(lambda: self._failure or not self._used or self._used + ref.size <= self._max_bytes)
            if self._failure:
                raise self._failure
            if ref.digest in self._files and not self._files[ref.digest].stored.done():
                return ref
            self._files[ref.digest] = file
            self._used += ref.size
        try:
            _write_synced(file.path, data)
        except OSError as error:
            self._settle(file, error)
            raise
        self._uploads.submit(self._put_file, file).add_done_callback(lambda done: self._settle(file, done.exception()))
        return ref

    def wait(self, refs: Iterable[ArtifactRef], seconds: float) -> None:
        """Wait until these artifacts are stored, `seconds` for each, and young enough for a commit to name them.

        Raises the upload's error, DeadlineExceeded, or ArtifactDamaged if an artifact is neither in the spool nor in the
        store.
        """
        named = list(refs)
        for ref in named:
            if ref.digest not in self._files:  # put by an earlier process, whose spool is gone
                self.put(self._store.get(ref), ref.kind)
            self._wait_for_upload(self._files[ref.digest], seconds)
        for ref in named:
            file = self._files[ref.digest]
            if time.monotonic() - file.put_at > self._fresh_seconds or not self._store.exists(ref):
                self._put_file(file)
        self._named = {ref.digest for ref in named}

    def on_committed(self) -> None:
        """Put again what a collection has taken of this commit and the one before, then drop all files but this commit's.

        Called after the commit that followed a `wait`. Files that are put meanwhile are those of the next iteration.
        """
        named, spooled = self._named, list(self._files.values())
        for digest in sorted(self._committed | named):
            file = self._files.get(digest)
            if file is not None and not self._store.exists(file.ref):
                log.warning("%s %s was removed from the store while it was committed: put again", file.ref.kind, digest[:12])
                self._put_file(file)
        with self._changed:
            for file in spooled:
                is_stored = file.stored.done() and file.stored.exception() is None
                if is_stored and file.ref.digest not in named and self._files.get(file.ref.digest) is file:
                    del self._files[file.ref.digest]
                    file.path.unlink(missing_ok=True)
        self._committed = named

    def store_leftovers(self) -> int:
        """Store the artifacts that an earlier process left in the spool; returns their number."""
        count = 0
        for path in sorted(self._folder.iterdir()):
            kind, _, digest = path.name.rpartition("-")
            # A damaged artifact is dropped as if it had never been written: its iteration generates it again.
            if not path.is_file() or kind not in set(ArtifactKind) or digest_of(data := path.read_bytes()) != digest:
                _remove(path)
                continue
            file = _SpooledFile(ArtifactRef(kind=ArtifactKind(kind), digest=digest, size=len(data)), path)
            self._put_file(file)
            file.stored.set_result(None)
            self._files[digest] = file
            count += 1
        return count

    def _wait_for_upload(self, file: _SpooledFile, seconds: float) -> None:
        try:
            file.stored.result(timeout=seconds)
        except TimeoutError:
            raise DeadlineExceeded(
                f"deadlines.store: {file.ref.kind} {file.ref.digest[:12]} ({file.ref.size} bytes) did not reach "
                f"{self._store.uri} within {seconds:.0f} s"
            ) from None

    def _put_file(self, file: _SpooledFile) -> None:
        """Upload a file from the spool, and note when. Raises ArtifactDamaged if the file has changed on disk."""
        put_at = time.monotonic()
        try:
            stored = self._store.put_file(file.path, file.ref.kind)
        except FileNotFoundError:
            stored = None
        if stored != file.ref:
            raise ArtifactDamaged(f"work_dir: {file.path} is not what was written there: check the disk")
        file.put_at = put_at

    def _settle(self, file: _SpooledFile, error: BaseException | None) -> None:
        """Record the end of an upload: its bytes no longer count, and its failure is that of the spool."""
        with self._changed:
            self._used -= file.ref.size
            if error is None:
                file.stored.set_result(None)
            else:
                self._failure = error if isinstance(error, RollError) else RollError(f"store: {error}")
                file.stored.set_exception(self._failure)
            self._changed.notify_all()


def _remove(path: Path) -> None:
    """Delete a stray file of the spool; a stray folder is left alone."""
    if not path.is_dir():
        path.unlink()


def _write_synced(path: Path, data: bytes) -> None:
    """Write a file atomically and durably: after a crash or a power cut it is whole or absent."""
    with atomic_replace(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
