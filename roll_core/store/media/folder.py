"""Medium of files under a folder (file://), local or on a network filesystem.

A file is written and synced under a partial name beside its final one, then linked or renamed into place. Readers see it
whole or not at all.
"""

import contextlib
import logging
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from roll_core.errors import StoreRefused
from roll_core.host import remedy
from roll_core.store.media.medium import PART_SIZE, AlreadyExists, ListedObject
from roll_core.types.names import is_relative_name

PARTIAL = ".partial-"
"""Infix in the name of a file that is still being written; readers and listings skip it."""


log = logging.getLogger(__name__)


class FolderMedium:
    """Medium of files under one folder.

    Example: FolderMedium("file:///home/ada/roll-data").create("runs/a/config.json", b"{}")
    """

    def __init__(self, uri: str):
        self._uri = uri
        self._root = Path(uri.removeprefix("file://")).absolute()

    def write(self, name: str, parts: Iterator[bytes], size: int) -> None:  # noqa: ARG002
        path = self._path(name)
        with self._reporting_refusals("write to", "writable"), _partial_file(path, parts) as partial:
            os.replace(partial, path)
            _sync_folder(path.parent)

    def create(self, name: str, data: bytes) -> None:
        """Create the file by a hard link, which is atomic: the name appears with all its bytes, or the link fails."""
        path = self._path(name)
        with self._reporting_refusals("write to", "writable"), _partial_file(path, iter([data])) as partial:
            try:
                os.link(partial, path)
            except FileExistsError:
                # A network filesystem may lose the reply and repeat the link: then the existing file is this one.
                if not os.path.samefile(partial, path):
                    raise AlreadyExists(name) from None
            _sync_folder(path.parent)

    def read(self, name: str) -> bytes:
        with self._reporting_refusals("read from", "readable"):
            return self._path(name).read_bytes()

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def touch(self, name: str, size: int) -> None:  # noqa: ARG002
        with self._reporting_refusals("write to", "writable"):
            os.utime(self._path(name))

    def read_parts(self, name: str, expected_size: int) -> Iterator[bytes]:  # noqa: ARG002
        with self._reporting_refusals("read from", "readable"), open(self._path(name), "rb") as file:
            while part := file.read(PART_SIZE):
                yield part

    def list(self, folder: str) -> list[str]:
        with self._reporting_refusals("read from", "readable"):
            try:
                return [name for name in os.listdir(self._path(folder)) if PARTIAL not in name]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def list_below(self, folder: str) -> Iterator[ListedObject]:
        if not self._path(folder).is_dir():
            return
        now = self._now()
        for path in self._path(folder).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # deleted or renamed since it was listed
                found = path.lstat()  # a link is not followed: this class makes none, and a loop of links has no end
                if stat.S_ISREG(found.st_mode) and PARTIAL not in path.name:
                    name = path.relative_to(self._root).as_posix()
                    yield ListedObject(name, found.st_size, now - found.st_mtime, found.st_mtime)

    def delete(self, name: str) -> None:
        with self._reporting_refusals("write to", "writable"):
            self._path(name).unlink(missing_ok=True)

    def delete_unmodified(self, listed: ListedObject) -> bool:
        path = self._path(listed.name)
        with self._reporting_refusals("write to", "writable"), contextlib.suppress(FileNotFoundError):
            if path.lstat().st_mtime == listed.written_at:
                path.unlink()
                return True
        return False

    def remove_unfinished(self, older_than_seconds: float) -> int:
        oldest_kept, removed = self._now() - older_than_seconds, 0
        for path in self._root.rglob(f"*{PARTIAL}*"):
            with contextlib.suppress(FileNotFoundError):  # its writer has finished since it was listed
                if path.lstat().st_mtime < oldest_kept:
                    path.unlink()
                    removed += 1
        return removed

    def _now(self) -> float:
        """Epoch seconds by the clock that stamps files; on a network filesystem that is not this machine's clock.

        In a folder that cannot be written to, where nothing can be deleted either, this machine's clock has to do.
        """
        try:
            with _partial_file(self._root / "clock", iter([])) as stamped:
                return stamped.stat().st_mtime
        except OSError as error:
            log.warning("%s cannot be written to (%s): ages are by this machine's clock", self._uri, error.strerror)
            return time.time()

    def _path(self, name: str) -> Path:
        """Path of a named object. Raises StoreRefused for a name that leads out of the folder."""
        if not is_relative_name(name):
            raise StoreRefused(f"store.uri: {name!r} is not the name of an object in {self._uri}")
        return self._root / name

    @contextlib.contextmanager
    def _reporting_refusals(self, doing: str, wanted: str) -> Iterator[None]:
        """Turn every OSError but FileNotFoundError into StoreRefused, which says what was attempted and what to change.

        Below a file there are no objects: a file in the place of a folder is not an error of the store.
        """
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(error.errno, error.strerror, error.filename) from None
        except StoreRefused:
            raise
        except OSError as error:
            raise StoreRefused(
                f"store.uri: cannot {doing} {self._uri} ({error.strerror}): {remedy(error, wanted)} or point store.uri "
                "elsewhere"
            ) from None


@contextlib.contextmanager
def _partial_file(path: Path, parts: Iterator[bytes]) -> Iterator[Path]:
    """Write and sync a file under a partial name, yield its path, and delete it at the end unless it was renamed.

    A partial file that a crash leaves is invisible to readers.
    """
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
    """Create a folder and its parents and sync each entry. A synced file would be lost if a power cut dropped its folder."""
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
