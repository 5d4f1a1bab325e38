"""`Medium`, the protocol that a folder, an S3 bucket and memory implement, and what the implementations share.

A medium knows names and bytes, and nothing about digests or runs. `ObjectStore` is its only user.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

PART_SIZE = 16 * 2**20
"""Bytes in one request. S3 wants at least 5 MiB; larger parts waste more when one has to be sent again."""
MAX_PARTS = 10_000
"""Most parts of one object: S3's limit."""
PARTS_IN_FLIGHT = 4
"""Parts of one object transferred at once. With FILES_IN_FLIGHT files, at most 4 * 5 * 16 MiB = 320 MiB are in memory."""


class AlreadyExists(Exception):
    """Conditional create failed because the name is taken."""


class ListedObject(NamedTuple):
    """Object in a listing.

    Example: ListedObject("objects/9f/86d081...", size=18433, age_seconds=42.0, written_at=1794300000.0)
    """

    name: str
    size: int
    age_seconds: float
    """Seconds since the last write, by the medium's own clock, because the clocks of writers and readers may differ."""
    written_at: float
    """Time of the last write by the medium's own clock, in seconds. It tells one write of a name from the next."""


class Medium(Protocol):
    """Named bytes with atomic writes: a name appears with all its bytes or not at all.

    Reading a missing name raises FileNotFoundError.
    """

    def write(self, name: str, parts: Iterator[bytes], size: int) -> None:
        """Write or replace an object of `size` bytes, in parts of `part_size(size)`. If `parts` raises, write nothing."""

    def create(self, name: str, data: bytes) -> None:
        """Create an object that must not exist yet. One of several writers succeeds, the others get AlreadyExists."""

    def read(self, name: str) -> bytes: ...

    def exists(self, name: str) -> bool:
        """True if there is an object of this name."""

    def touch(self, name: str, size: int) -> None:
        """Restart the age of an object of `size` bytes without transferring it."""

    def read_parts(self, name: str, expected_size: int) -> Iterator[bytes]:
        """Yield all bytes of an object in order. `expected_size`, in bytes, only decides how they are fetched."""

    def list(self, folder: str) -> list[str]:
        """List the names directly in a folder, never from a cache; empty if the folder does not exist."""

    def list_below(self, folder: str) -> Iterator[ListedObject]:
        """Yield every object below a folder, at any depth and in any order, one page of the listing at a time."""

    def delete(self, name: str) -> None:
        """Delete an object. Idempotent, so that a delete can be repeated: a missing object is not an error."""

    def delete_unmodified(self, listed: ListedObject) -> bool:
        """Delete an object unless it was written again since it was listed; returns whether it was deleted.

        The time of the last write is read directly before the delete. A write between the two requests is lost: S3 can
        delete on condition of an ETag only, and equal bytes have equal ETags.
        """

    def remove_unfinished(self, older_than_seconds: float) -> int:
        """Remove partial writes older than this that interrupted writers left behind; returns their number."""


def part_size(size: int) -> int:
    """Bytes per part of an object of `size` bytes: PART_SIZE, or more where that would make over MAX_PARTS parts."""
    return max(PART_SIZE, -(-size // MAX_PARTS))


def map_in_order(act: Callable[[Item], Result], items: Iterable[Item], in_flight: int) -> Iterator[Result]:
    """Map `act` over items in threads and yield the results in order.

    At most `in_flight` results are being computed or wait to be consumed.
    """
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
