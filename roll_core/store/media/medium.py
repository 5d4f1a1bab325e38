"""What an object store lies on: a folder, a bucket, memory. A medium knows names and bytes, nothing of digests or runs."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

PART_SIZE = 16 * 2**20
"""Bytes of one request. S3 wants at least 5 MiB; larger parts waste more when one has to be sent again."""
MAX_PARTS = 10_000
"""S3's limit for one object."""
PARTS_IN_FLIGHT = 4
"""Of one object. With FILES_IN_FLIGHT files this keeps at most 4 * 5 * 16 MiB = 320 MiB in memory."""


class AlreadyExists(Exception):
    """A conditional create found the name taken."""


class ListedObject(NamedTuple):
    """An object as a listing shows it. Example: ListedObject("objects/9f/86d081...", size=18433, age_seconds=42.0)"""

    name: str
    size: int
    age_seconds: float
    """Since it was last written, by the medium's own clock: writers and whoever asks may disagree about the time."""


class Medium(Protocol):
    """Named bytes. A name appears with all its bytes or not at all; one that is not there is FileNotFoundError."""

    def write(self, name: str, parts: Iterator[bytes], size: int) -> None:
        """Put or replace an object of `size` bytes, cut by `part_size`. If `parts` raises, nothing is written."""

    def create(self, name: str, data: bytes) -> None:
        """Put an object that must not exist yet: of several writers one succeeds, the others get AlreadyExists."""

    def read(self, name: str) -> bytes: ...

    def read_parts(self, name: str, expected_size: int) -> Iterator[bytes]:
        """All bytes of an object, in order; `expected_size` decides only how they are fetched."""

    def list(self, folder: str) -> list[str]:
        """Names directly in a folder as they are now, none if there is no such folder."""

    def list_below(self, folder: str) -> Iterator[ListedObject]:
        """Every object below a folder at any depth, in any order, a part of the listing at a time."""

    def delete(self, name: str) -> None:
        """Deleting what is not there is nothing, so that a delete can be repeated."""

    def remove_unfinished(self, older_than_seconds: float) -> int:
        """Remove what interrupted writers left behind, and say how many there were."""


def part_size(size: int) -> int:
    return max(PART_SIZE, -(-size // MAX_PARTS))


def in_order(act: Callable[[Item], Result], items: Iterable[Item], in_flight: int) -> Iterator[Result]:
    """Results of `act` over items, in order, from threads; at most `in_flight` are being made or waiting to be taken."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(in_flight) as pool:
        try:
            for item in items:
                if len(waiting) == in_flight:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(act, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
