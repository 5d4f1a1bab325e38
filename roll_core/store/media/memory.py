"""Medium in the memory of this process (memory://NAME), for tests that need a store but no disk."""

import threading
import time
from collections.abc import Iterator

from roll_core.store.media.medium import AlreadyExists, ListedObject

_STORES: dict[str, dict[str, tuple[bytes, float]]] = {}
"""Bytes and the monotonic time of their last write, by object name, by store name."""
_LOCK = threading.Lock()


class MemoryMedium:
    """Medium of objects in memory. Two with the same store name share their objects."""

    def __init__(self, name: str):
        self._objects = _STORES.setdefault(name, {})

    def write(self, name: str, parts: Iterator[bytes], size: int) -> None:  # noqa: ARG002
        self._objects[name] = b"".join(parts), time.monotonic()

    def create(self, name: str, data: bytes) -> None:
        with _LOCK:
            if name in self._objects:
                raise AlreadyExists(name)
            self._objects[name] = data, time.monotonic()

    def read(self, name: str) -> bytes:
        if name not in self._objects:
            raise FileNotFoundError(name)
        return self._objects[name][0]

    def exists(self, name: str) -> bool:
        return name in self._objects

    def touch(self, name: str, size: int) -> None:  # noqa: ARG002
        with _LOCK:
            self._objects[name] = self.read(name), time.monotonic()

    def read_parts(self, name: str, expected_size: int) -> Iterator[bytes]:  # noqa: ARG002
        yield self.read(name)

    def list(self, folder: str) -> list[str]:
        prefix = f"{folder}/"
        return list({name.removeprefix(prefix).split("/")[0] for name in list(self._objects) if name.startswith(prefix)})

    def list_below(self, folder: str) -> Iterator[ListedObject]:
        for name, (data, written_at) in list(self._objects.items()):
            if name.startswith(f"{folder}/"):
                yield ListedObject(name, len(data), time.monotonic() - written_at, written_at)

    def delete(self, name: str) -> None:
        self._objects.pop(name, None)

    def delete_unmodified(self, listed: ListedObject) -> bool:
        with _LOCK:
            data_and_time = self._objects.get(listed.name)
            if data_and_time is None or data_and_time[1] != listed.written_at:
                return False
            del self._objects[listed.name]
            return True

    def remove_unfinished(self, older_than_seconds: float) -> int:  # noqa: ARG002
        return 0
