"""`ObjectStore`, the only interface to stored bytes: content-addressed put, conditional create, verified reads.

Used by every process of a run. A folder and an S3 bucket behave alike; `store/media` implements both.

Layout under the store's address:
    objects/9f/86d081...            artifacts, named by the digest of their bytes, shared by all runs
    runs/quickstart-3/config.json   the resolved config of the run
    runs/quickstart-3/iterations/   one manifest per iteration
    runs/quickstart-3/checkpoints/  one record per checkpoint
    runs/quickstart-3/exports/      one record per exported Hugging Face folder
    runs/quickstart-3/weights/      one record per weights version that engines read from the store
"""

import hashlib
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from roll_core.config.operations.services import RETRY_SECONDS
from roll_core.errors import ArtifactDamaged, StoreRefused, StoreUnavailable, UserError
from roll_core.host import atomic_replace
from roll_core.store.media.folder import FolderMedium
from roll_core.store.media.medium import PART_SIZE, AlreadyExists, ListedObject, Medium, map_in_order, part_size
from roll_core.store.media.memory import MemoryMedium
from roll_core.types.refs import ArtifactKind, ArtifactRef, digest_of

FILES_IN_FLIGHT = 4
"""Files that `put_files` and `get_files` transfer at once."""
PROBE_SECONDS = 15.0
"""Longest time that `check_writable` retries. Short, because before a run starts a silent store is more likely a wrong
address than an outage."""


class ObjectStore:
    """Store of objects under one address. Thread-safe, fork-safe and picklable.

    Example: store = ObjectStore("file:///tmp/roll"); ref = store.put(b"...", ArtifactKind.TRAJECTORIES); store.get(ref)
    """

    def __init__(self, uri: str, retry_seconds: float = RETRY_SECONDS):
        self.uri = uri if uri.endswith("://") else uri.rstrip("/")
        self._retry_seconds = retry_seconds
        self._medium = _open_medium(self.uri, retry_seconds)

    def __reduce__(self) -> tuple[type["ObjectStore"], tuple[str, float]]:
        return ObjectStore, (self.uri, self._retry_seconds)

    def put(self, data: bytes, kind: ArtifactKind) -> ArtifactRef:
        """Store bytes under their digest and return the ref. An object with that name is overwritten, for three reasons.

        Rewriting repairs a damaged object. It restarts the object's age, so that garbage collection keeps it until a
        manifest of this run names it. The usual case, new bytes, needs no extra request to ask whether the object exists.
        """
        ref = ArtifactRef(kind=kind, digest=digest_of(data), size=len(data))
        self._medium.write(object_name(ref), _split(data), ref.size)
        return ref

    def put_file(self, path: Path, kind: ArtifactKind) -> ArtifactRef:
        """Store a file under its digest, with only a few parts in memory. The file must not change until this returns."""
        if path.stat().st_size <= PART_SIZE:
            return self.put(path.read_bytes(), kind)
        with open(path, "rb") as file:
            ref = ArtifactRef(kind=kind, digest=hashlib.file_digest(file, "sha256").hexdigest(), size=file.tell())
        self._medium.write(object_name(ref), _file_parts(path, ref), ref.size)
        return ref

    def put_files(self, paths: Iterable[Path], kind: ArtifactKind) -> list[ArtifactRef]:
        """Store several files under their digests, `FILES_IN_FLIGHT` at once; refs are in the order of `paths`."""
        return list(map_in_order(partial(self.put_file, kind=kind), paths, FILES_IN_FLIGHT))

    def get(self, ref: ArtifactRef) -> bytes:
        """Read the bytes that a ref names, verified. Raises ArtifactDamaged if they are damaged or missing."""
        return b"".join(self._verified_parts(ref))

    def exists(self, ref: ArtifactRef) -> bool:
        """True if an artifact is in the store. Its bytes are not read."""
        return self._medium.exists(object_name(ref))

    def touch(self, ref: ArtifactRef) -> None:
        """Restart an artifact's age, which garbage collection goes by, without transferring its bytes.

        Raises ArtifactDamaged if the artifact is missing.
        """
        try:
            self._medium.touch(object_name(ref), ref.size)
        except FileNotFoundError:
            raise self._missing(ref) from None

    def get_file(self, ref: ArtifactRef, path: Path) -> None:
        """Write the bytes that a ref names to a file. The file appears only once all bytes are verified."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(path) as file:
            file.writelines(self._verified_parts(ref))

    def get_files(self, wanted: Iterable[tuple[ArtifactRef, Path]]) -> None:
        """Write several artifacts to files, `FILES_IN_FLIGHT` at once."""
        for _ in map_in_order(lambda pair: self.get_file(*pair), wanted, FILES_IN_FLIGHT):
            pass

    def create(self, name: str, data: bytes) -> None:
        """Create an object that must not exist yet. One of several writers succeeds, the others get AlreadyExists."""
        self._medium.create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Write an object by its name, atomically, whether it exists or not."""
        self._medium.write(name, iter([data]), len(data))

    def read(self, name: str) -> bytes:
        """Read an object by its name, unverified. Raises FileNotFoundError if it does not exist."""
        return self._medium.read(name)

    def list(self, folder: str) -> Iterator[str]:
        """List the names directly in a folder, sorted; nothing if the folder does not exist."""
        yield from sorted(self._medium.list(folder))

    def list_below(self, folder: str) -> Iterator[ListedObject]:
        """List every object below a folder at any depth, with its size and its age by the store's own clock."""
        return self._medium.list_below(folder)

    def delete(self, name: str) -> None:
        """Delete an object. Idempotent: a missing object is not an error."""
        self._medium.delete(name)

    def delete_unmodified(self, listed: ListedObject) -> bool:
        """Delete an object unless it was written again since it was listed; returns whether it was deleted."""
        return self._medium.delete_unmodified(listed)

    def remove_unfinished(self, older_than_seconds: float) -> int:
        """Remove partial writes of that age, left by killed writers and invisible to readers; returns their number."""
        return self._medium.remove_unfinished(older_than_seconds)

    def check_writable(self) -> None:
        """Raise UserError, naming `store.uri`, if the store cannot be written to or ignores conditional creates.

        Called before a run starts, so that a wrong address does not show only after the first iteration.
        """
        medium = _open_medium(self.uri, min(self._retry_seconds, PROBE_SECONDS))
        name = f".probe-{uuid.uuid4().hex}"
        try:
            medium.list("runs")
            medium.create(name, b"")
            try:
                medium.create(name, b"")
            except AlreadyExists:
                return
            finally:
                medium.delete(name)
        except (StoreRefused, StoreUnavailable) as error:
            raise UserError(str(error)) from None
        raise UserError(
            f"store.uri: {self.uri} ignores conditional writes (If-None-Match), so two legs could commit one iteration: "
            "use a server that honours them"
        )

    def _verified_parts(self, ref: ArtifactRef) -> Iterator[bytes]:
        """Yield all bytes of an object in order, then raise ArtifactDamaged if their digest is wrong."""
        name, digest, size = object_name(ref), hashlib.sha256(), 0
        try:
            for part in self._medium.read_parts(name, ref.size):
                digest.update(part)
                size += len(part)
                yield part
        except FileNotFoundError:
            raise self._missing(ref) from None
        if digest.hexdigest() != ref.digest:
            raise ArtifactDamaged(f"store: {ref.kind} {name} in {self.uri} is damaged: {size} bytes, expected {ref.size}")

    def _missing(self, ref: ArtifactRef) -> ArtifactDamaged:
        return ArtifactDamaged(f"store: {ref.kind} {object_name(ref)} is missing from {self.uri}")


def object_name(ref: ArtifactRef) -> str:
    """Name of an artifact's object in the store. Example: objects/9f/86d081..."""
    return f"objects/{ref.digest[:2]}/{ref.digest[2:]}"


def _open_medium(uri: str, retry_seconds: float) -> Medium:
    """Open the medium that the scheme of `uri` names; an address without a scheme is a folder."""
    match uri.partition("://"):
        case ["file", "://", _] | [_, "", ""]:
            return FolderMedium(uri)
        case ["memory", "://", name]:
            return MemoryMedium(name)
        case ["s3", "://", _]:
            return _open_bucket(uri, retry_seconds)
        case _:
            raise UserError(f"store.uri: {uri} cannot be opened: give a folder, file:// or s3://")


def _open_bucket(uri: str, retry_seconds: float) -> Medium:
    """Open an S3 bucket. The import is here because it takes half a second, which runs in a folder need not pay."""
    try:
        from roll_core.store.media.s3 import S3Medium
    except ImportError as error:
        raise UserError(
            f"store.uri: {uri} cannot be opened: s3fs does not work here ({error}): install the versions it asks for with "
            "`pip install --upgrade s3fs`"
        ) from None
    return S3Medium(uri, retry_seconds)


def _split(data: bytes) -> Iterator[bytes]:
    """Yield bytes in parts of `part_size`."""
    step = part_size(len(data))
    if len(data) <= step:
        yield data
        return
    for start in range(0, len(data), step):
        yield data[start : start + step]


def _file_parts(path: Path, ref: ArtifactRef) -> Iterator[bytes]:
    """Yield a file in parts, then raise ArtifactDamaged if its bytes are no longer those of the ref."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(part_size(ref.size)):
            digest.update(part)
            yield part
    if digest.hexdigest() != ref.digest:
        raise ArtifactDamaged(f"store: {path} changed while it was being stored: nothing of it was kept")
