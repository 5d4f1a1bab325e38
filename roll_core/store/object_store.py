"""The one door to stored bytes: put by digest, create once, read verified. file:// and s3:// are the same code.

Layout under the store's address:
    objects/9f/86d081...            artifacts, named by the digest of their bytes, shared by all runs
    runs/quickstart-3/config.json   what the run is
    runs/quickstart-3/iterations/   one manifest an iteration
"""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from roll_core.errors import ArtifactDamaged, UserError
from roll_core.types.refs import ArtifactKind, ArtifactRef, digest_of


class AlreadyExists(Exception):
    """A conditional create found the name taken."""


class ObjectStore:
    """Objects under one address.

    Example: store = ObjectStore("file:///tmp/roll"); ref = store.put(b"...", ArtifactKind.TRAJECTORIES); store.get(ref)
    """

    def __init__(self, uri: str):
        self.uri = uri.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(self.uri)
        except (ValueError, ImportError) as error:
            raise UserError(f"store.uri: {self.uri} cannot be opened: {error}") from None
        self._root = root.rstrip("/")

    def put(self, data: bytes, kind: ArtifactKind) -> ArtifactRef:
        """Store bytes under their digest. Putting the same bytes again is free."""
        ref = ArtifactRef(kind=kind, digest=digest_of(data), size=len(data))
        if not self.has(ref):
            self._write(_object_name(ref), data)
        return ref

    def get(self, ref: ArtifactRef) -> bytes:
        """The bytes a ref names, verified; damaged or missing bytes are reported by name and never returned."""
        name = _object_name(ref)
        try:
            data = self.read(name)
        except FileNotFoundError:
            raise ArtifactDamaged(f"store: {ref.kind} {name} is missing from {self.uri}") from None
        if digest_of(data) != ref.digest:
            raise ArtifactDamaged(
                f"store: {ref.kind} {name} in {self.uri} is damaged: {len(data)} bytes, expected {ref.size}"
            )
        return data

    def has(self, ref: ArtifactRef) -> bool:
        path = self._path(_object_name(ref))
        return bool(self._fs.exists(path)) and self._fs.size(path) == ref.size

    def create(self, name: str, data: bytes) -> None:
        """Write an object that must not exist yet: of several writers exactly one succeeds, the others get AlreadyExists."""
        path = self._path(name)
        if isinstance(self._fs, LocalFileSystem):
            _link_into_place(Path(path), data)
            return
        try:
            self._fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            raise AlreadyExists(name) from None
        except OSError as error:
            # Some S3 servers answer a refused If-None-Match with EINVAL rather than EEXIST.
            if "pre-condition" in str(error).lower():
                raise AlreadyExists(name) from None
            raise

    def read(self, name: str) -> bytes:
        return self._fs.cat_file(self._path(name))

    def list(self, folder: str) -> Iterator[str]:
        """Names directly in a folder, sorted; none if there is no such folder."""
        try:
            found = self._fs.ls(self._path(folder), detail=False, refresh=True)
        except FileNotFoundError:
            return
        yield from sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found if ".partial-" not in path)

    def delete(self, name: str) -> None:
        self._fs.rm_file(self._path(name))

    def check_writable(self) -> None:
        """Fail now, naming the key, rather than after the first iteration."""
        name = f".probe-{uuid.uuid4().hex}"
        try:
            self._write(name, b"")
            self.delete(name)
        except Exception as error:
            raise UserError(
                f"store.uri: cannot write to {self.uri} ({_reason(error)}): make it writable or point store.uri elsewhere"
            ) from None

    def _write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if isinstance(self._fs, LocalFileSystem):
            partial = _write_partial(Path(path), data)
            os.replace(partial, path)
        else:
            self._fs.pipe_file(path, data)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _object_name(ref: ArtifactRef) -> str:
    return f"objects/{ref.digest[:2]}/{ref.digest[2:]}"


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__


def _write_partial(path: Path, data: bytes) -> Path:
    """Bytes on disk beside their final name; a crash leaves a .partial- file that no reader looks at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex}")
    with open(partial, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return partial


def _link_into_place(path: Path, data: bytes) -> None:
    """A hard link either makes the name appear with all its bytes or fails because it is taken."""
    partial = _write_partial(path, data)
    try:
        os.link(partial, path)
    except FileExistsError:
        raise AlreadyExists(path.name) from None
    finally:
        partial.unlink()
