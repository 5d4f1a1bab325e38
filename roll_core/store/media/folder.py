"""Objects as files under a folder (file://). Written beside their name, synced, then linked or renamed into place."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from roll_core.errors import StoreRefused
from roll_core.store.media.medium import PART_SIZE, AlreadyExists, ListedObject

PARTIAL = ".partial-"
"""In the name of a file that is being written: no reader looks at it."""


class FolderMedium:
    """Example: FolderMedium("file:///home/ada/roll-data").create("runs/a/config.json", b"{}")"""

    def __init__(self, uri: str):
        self._uri = uri
        self._root = Path(uri.removeprefix("file://")).absolute()

    def write(self, name: str, parts: Iterator[bytes], size: int) -> None:  # noqa: ARG002
        path = self._root / name
        with self._refusals("write to", "writable"), _partial_file(path, parts) as partial:
            os.replace(partial, path)
            _sync_folder(path.parent)

    def create(self, name: str, data: bytes) -> None:
        """A hard link either makes the name appear with all its bytes or fails because it is taken."""
        path = self._root / name
        with self._refusals("write to", "writable"), _partial_file(path, iter([data])) as partial:
            try:
                os.link(partial, path)
            except FileExistsError:
                # A network filesystem may lose its answer and repeat the link: then the name is ours already.
                if not os.path.samefile(partial, path):
                    raise AlreadyExists(name) from None
            _sync_folder(path.parent)

    def read(self, name: str) -> bytes:
        with self._refusals("read from", "readable"):
            return (self._root / name).read_bytes()

    def read_parts(self, name: str, expected_size: int) -> Iterator[bytes]:  # noqa: ARG002
        with self._refusals("read from", "readable"), open(self._root / name, "rb") as file:
            while part := file.read(PART_SIZE):
                yield part

    def list(self, folder: str) -> list[str]:
        with self._refusals("read from", "readable"):
            try:
                return [name for name in os.listdir(self._root / folder) if PARTIAL not in name]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def list_below(self, folder: str) -> Iterator[ListedObject]:
        if not (self._root / folder).is_dir():
            return
        now = self._now()
        for path in (self._root / folder).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # deleted or renamed meanwhile
                found = path.stat()
                if path.is_file() and PARTIAL not in path.name:
                    yield ListedObject(path.relative_to(self._root).as_posix(), found.st_size, now - found.st_mtime)

    def delete(self, name: str) -> None:
        with self._refusals("write to", "writable"):
            (self._root / name).unlink(missing_ok=True)

    def remove_unfinished(self, older_than_seconds: float) -> int:
        oldest_kept, removed = self._now() - older_than_seconds, 0
        for path in self._root.rglob(f"*{PARTIAL}*"):
            with contextlib.suppress(FileNotFoundError):  # its writer finished meanwhile
                if path.stat().st_mtime < oldest_kept:
                    path.unlink()
                    removed += 1
        return removed

    def _now(self) -> float:
        """By the clock that stamps files, which on a network filesystem is not this machine's."""
        with self._refusals("write to", "writable"), _partial_file(self._root / "clock", iter([])) as stamped:
            return stamped.stat().st_mtime

    @contextlib.contextmanager
    def _refusals(self, doing: str, wanted: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreRefused(
                f"store.uri: cannot {doing} {self._uri} ({error.strerror}): make it {wanted} or point store.uri elsewhere"
            ) from None


@contextlib.contextmanager
def _partial_file(path: Path, parts: Iterator[bytes]) -> Iterator[Path]:
    """Bytes on disk beside their final name, gone at the end unless renamed; what a crash leaves, no reader looks at."""
    _make_folder(path.parent)
    partial = path.with_name(f"{path.name}{PARTIAL}{uuid.uuid4().hex}")
    try:
        with open(partial, "xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """With its parents, each made durable: a synced file in a folder that a power cut forgets would be lost."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
