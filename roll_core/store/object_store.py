"""The one door to stored bytes: put by digest, create once, read verified. A folder and a bucket behave the same.

Layout under the store's address:
    objects/9f/86d081...            artifacts, named by the digest of their bytes, shared by all runs
    runs/quickstart-3/config.json   what the run is
    runs/quickstart-3/iterations/   one manifest an iteration
    runs/quickstart-3/checkpoints/  one record a checkpoint
    runs/quickstart-3/exports/      one record a Hugging Face folder
    runs/quickstart-3/weights/      one record a version that engines read from here
"""

import hashlib
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from roll_core.config.operations.services import RETRY_SECONDS
from roll_core.errors import ArtifactDamaged, StoreRefused, StoreUnavailable, UserError
from roll_core.host import replacing
from roll_core.store.media.folder import FolderMedium
from roll_core.store.media.medium import PART_SIZE, AlreadyExists, ListedObject, Medium, in_order, part_size
from roll_core.store.media.memory import MemoryMedium
from roll_core.types.refs import ArtifactKind, ArtifactRef, digest_of

FILES_IN_FLIGHT = 4
PROBE_SECONDS = 15.0
"""Before a run starts, a store that does not answer is more likely a wrong address than an outage."""


class ObjectStore:
    """Objects under one address. It can be used from several threads, after a fork, and sent to another process.

    Example: store = ObjectStore("file:///tmp/roll"); ref = store.put(b"...", ArtifactKind.TRAJECTORIES); store.get(ref)
    """

    def __init__(self, uri: str, retry_seconds: float = RETRY_SECONDS):
        self.uri = uri if uri.endswith("://") else uri.rstrip("/")
        self._retry_seconds = retry_seconds
        self._medium = _open_medium(self.uri, retry_seconds)

    def __reduce__(self) -> tuple[type["ObjectStore"], tuple[str, float]]:
        return ObjectStore, (self.uri, self._retry_seconds)

    def put(self, data: bytes, kind: ArtifactKind) -> ArtifactRef:
        """Store bytes under their digest, whatever is there under that name.

        Bytes that are there already are written again: that repairs them if they were damaged, makes them as young as the
        run that needs them (so that nobody collects them as garbage before its manifest names them), and spares the usual
        case, new bytes, a question.
        """
        ref = ArtifactRef(kind=kind, digest=digest_of(data), size=len(data))
        self._medium.write(object_name(ref), _cut(data), ref.size)
        return ref

    def put_file(self, path: Path, kind: ArtifactKind) -> ArtifactRef:
        """Store a file's bytes under their digest, holding a few parts of it in memory. It must not change meanwhile."""
        if path.stat().st_size <= PART_SIZE:
            return self.put(path.read_bytes(), kind)
        with open(path, "rb") as file:
            ref = ArtifactRef(kind=kind, digest=hashlib.file_digest(file, "sha256").hexdigest(), size=file.tell())
        self._medium.write(object_name(ref), _parts_of(path, ref), ref.size)
        return ref

    def put_files(self, paths: Iterable[Path], kind: ArtifactKind) -> list[ArtifactRef]:
        """`put_file` for several, a few at a time."""
        return list(in_order(partial(self.put_file, kind=kind), paths, FILES_IN_FLIGHT))

    def get(self, ref: ArtifactRef) -> bytes:
        """The bytes a ref names, verified; damaged or missing bytes are reported by name and never returned."""
        return b"".join(self._verified_parts(ref))

    def make_young(self, ref: ArtifactRef) -> None:
        """Write an artifact again, verified, as if it had been put now."""
        self.put(self.get(ref), ref.kind)

    def get_file(self, ref: ArtifactRef, path: Path) -> None:
        """Lay the bytes a ref names down as a file, which appears when all of them are there and verified."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.writelines(self._verified_parts(ref))

    def get_files(self, wanted: Iterable[tuple[ArtifactRef, Path]]) -> None:
        """`get_file` for several, a few at a time."""
        for _ in in_order(lambda pair: self.get_file(*pair), wanted, FILES_IN_FLIGHT):
            pass

    def create(self, name: str, data: bytes) -> None:
        """Write an object that must not exist yet: of several writers exactly one succeeds, the others get AlreadyExists."""
        self._medium.create(name, data)

    def read(self, name: str) -> bytes:
        """The bytes of an object by its name, not verified; FileNotFoundError if it is not there."""
        return self._medium.read(name)

    def list(self, folder: str) -> Iterator[str]:
        """Names directly in a folder, sorted; none if there is no such folder."""
        yield from sorted(self._medium.list(folder))

    def list_below(self, folder: str) -> Iterator[ListedObject]:
        """Every object below a folder, with its size and its age by the store's own clock."""
        return self._medium.list_below(folder)

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        self._medium.delete(name)

    def remove_unfinished(self, older_than_seconds: float) -> int:
        """Remove what writers left that were killed that long ago; nobody could see it. Says how many there were."""
        return self._medium.remove_unfinished(older_than_seconds)

    def check_writable(self) -> None:
        """Fail now, naming the key, rather than after the first iteration."""
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
        """All bytes of an object in order; the end is reached only if they are the right ones."""
        name, digest, size = object_name(ref), hashlib.sha256(), 0
        try:
            for part in self._medium.read_parts(name, ref.size):
                digest.update(part)
                size += len(part)
                yield part
        except FileNotFoundError:
            raise ArtifactDamaged(f"store: {ref.kind} {name} is missing from {self.uri}") from None
        if digest.hexdigest() != ref.digest:
            raise ArtifactDamaged(f"store: {ref.kind} {name} in {self.uri} is damaged: {size} bytes, expected {ref.size}")


def object_name(ref: ArtifactRef) -> str:
    """Example: objects/9f/86d081..."""
    return f"objects/{ref.digest[:2]}/{ref.digest[2:]}"


def _open_medium(uri: str, retry_seconds: float) -> Medium:
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
    """Imported here because it takes half a second, which runs in a folder need not wait for."""
    try:
        from roll_core.store.media.s3 import S3Medium
    except ImportError as error:
        raise UserError(
            f"store.uri: {uri} cannot be opened: s3fs does not work here ({error}): install the versions it asks for with "
            "`pip install --upgrade s3fs`"
        ) from None
    return S3Medium(uri, retry_seconds)


def _cut(data: bytes) -> Iterator[bytes]:
    step = part_size(len(data))
    if len(data) <= step:
        yield data
        return
    for start in range(0, len(data), step):
        yield data[start : start + step]


def _parts_of(path: Path, ref: ArtifactRef) -> Iterator[bytes]:
    """A file's bytes; the end is reached only if they are still those of the ref."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(part_size(ref.size)):
            digest.update(part)
            yield part
    if digest.hexdigest() != ref.digest:
        raise ArtifactDamaged(f"store: {path} changed while it was being stored: nothing of it was kept")
