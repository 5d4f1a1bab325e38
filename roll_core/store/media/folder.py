"""Medium of files under a folder (file://), local or on a network filesystem.

A file is written and synced under a partial name beside its final one, then linked or renamed into place. Readers see it
whole or not at all.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from roll_core.errors import StoreRefused
from roll_core.host import remedy
from roll_core.store.media.medium import PART_SIZE, AlreadyExists, ListedObject

PARTIAL = ".partial-"
"""Infix in the name of a file that is still being written; readers and listings skip it."""


class FolderMedium:
    """Medium of files under one folder.

    Example: FolderMedium("file:///home/ada/roll-data").create("runs/a/config.json", b"{}")
    """

    def __init__(self, uri: str):
        self._uri = uri
        self._root = Path(uri.removeprefix("file://")).absolute()

    def write(self, name: str, parts: Iterator[bytes], size: int) -> None:  # noqa: ARG002
        path = self._root / name
        with self._reporting_refusals("write to", "writable"), _partial_file(path, parts) as partial:
            os.replace(partial, path)
            _sync_folder(path.parent)

    def create(self, name: str, data: bytes) -> None:
        """Create the file by a hard link, which is atomic: the name appears with all its bytes, or the link fails."""
        path = self._root / name
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
            return (self._root / name).read_bytes()

    def read_parts(self, name: str, expected_size: int) -> Iterator[bytes]:  # noqa: ARG002
        with self._reporting_refusals("read from", "readable"), open(self._root / name, "rb") as file:
            while part := file.read(PART_SIZE):
                yield part

    def list(self, folder: str) -> list[str]:
        with self._reporting_refusals("read from", "readable"):
            try:
                return [name for name in os.listdir(self._root / folder) if PARTIAL not in name]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def list_below(self, folder: str) -> Iterator[ListedObject]:
        if not (self._root / folder).is_dir():
            return
        now = self._now()
        for path in (self._root / folder).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # deleted or renamed since it was listed
                found = path.stat()
                if path.is_file() and PARTIAL not in path.name:
                    yield ListedObject(path.relative_to(self._root).as_posix(), found.st_size, now - found.st_mtime)

    def delete(self, name: str) -> None:
        with self._reporting_refusals("write to", "writable"):
            (self._root / name).unlink(missing_ok=True)

    def remove_unfinished(self, older_than_seconds: float) -> int:
        oldest_kept, removed = self._now() - older_than_seconds, 0
        for path in self._root.rglob(f"*{PARTIAL}*"):
            with contextlib.suppress(FileNotFoundError):  # its writer has finished since it was listed
                if path.stat().st_mtime < oldest_kept:
                    path.unlink()
                    removed += 1
        return removed

    def _now(self) -> float:
        """Epoch seconds by the clock that stamps files; on a network filesystem that is not this machine's clock."""
        with self._reporting_refusals("write to", "writable"), _partial_file(self._root / "clock", iter([])) as stamped:
            return stamped.stat().st_mtime

    @contextlib.contextmanager
    def _reporting_refusals(self, doing: str, wanted: str) -> Iterator[None]:
        """Turn every OSError but FileNotFoundError into StoreRefused, which says what was attempted and what to change."""
        try:
            yield
        except FileNotFoundError:
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
