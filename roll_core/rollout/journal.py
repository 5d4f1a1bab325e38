"""Journal of finished trajectories that no committed iteration has consumed. It is kept in the store, so that a killed leg
loses only the seconds since the last write and what was being generated.

    runs/RUN/unfinished/00000096-00000104-5d41402abc4b.parquet     first problem, last problem, digest of the bytes

A lost part costs time and nothing else, so an unreadable part is treated as absent. The rollout scheduler's role uses it.
"""

import asyncio
import contextlib
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from roll_core.errors import RollError
from roll_core.rollout.lifecycle import AttemptId
from roll_core.store.media.medium import AlreadyExists
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.rollouts import decode_trajectories, encode_trajectories
from roll_core.types.refs import digest_of
from roll_core.types.trajectory import Ending, Trajectory

RETRY_PAUSE_S = 5.0
"""Seconds between attempts to write while the store is unavailable."""

log = logging.getLogger(__name__)

_WHOLE = (Ending.STOP, Ending.LENGTH)
"""Endings of trajectories that are generated to their end."""
_NAME = re.compile(r"\d+-(?P<last>\d+)-(?P<digest>[0-9a-f]+)\.parquet")


@dataclass(frozen=True)
class _Part:
    """One Parquet file of the journal."""

    name: str
    last: int
    """Last problem in the file."""
    digest: str
    """First digits of the digest of its bytes."""


class Journal:
    """Write-behind journal of finished trajectories in the store.

    Example: journal = Journal(store, "quickstart-3", 5.0); journal.add(trajectory); ...; journal.read()
    """

    def __init__(self, store: ObjectStore, run_id: str, seconds: float):
        """Open the journal of a run. Additions are gathered for `seconds` and then written together."""
        self._store = store
        self._folder = f"runs/{run_id}/unfinished"
        self._seconds = seconds
        self._pending: dict[AttemptId, Trajectory] = {}
        self._writing: asyncio.Task[None] | None = None

    def read(self) -> dict[AttemptId, Trajectory]:
        """Read every journaled trajectory, by attempt id. If an attempt was written twice, the graded one wins."""
        kept: dict[AttemptId, Trajectory] = {}
        for part in self._parts():
            for t in self._read_part(part):
                if t.score is not None or (t.group, t.attempt) not in kept:
                    kept[t.group, t.attempt] = t
        return kept

    def _read_part(self, part: _Part) -> list[Trajectory]:
        try:
            data = self._store.read(part.name)
            return decode_trajectories(data) if digest_of(data).startswith(part.digest) else []
        except (FileNotFoundError, ValueError, KeyError) as error:  # deleted meanwhile, or written by another version
            log.warning("%s cannot be read, and is made again: %s", part.name, error)
            return []

    async def rewrite(self, trajectories: Iterable[Trajectory]) -> None:
        """Replace the content of the journal with these trajectories."""
        await asyncio.to_thread(self.forget_before, sys.maxsize)
        await self.keep(trajectories)

    def add(self, trajectory: Trajectory) -> None:
        """Journal one trajectory, together with others that are added within the next seconds."""
        self._pending[trajectory.group, trajectory.attempt] = trajectory
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_later())

    def drop_before(self, problem: int) -> None:
        """Drop unwritten trajectories of problems before `problem`: they are being stored as part of a batch."""
        for attempt_id in [attempt_id for attempt_id in self._pending if attempt_id[0] < problem]:
            del self._pending[attempt_id]

    async def keep(self, trajectories: Iterable[Trajectory]) -> None:
        """Write these trajectories and all pending ones now."""
        self._pending |= {(t.group, t.attempt): t for t in trajectories}
        await self._write()

    def forget_before(self, problem: int) -> None:
        """Delete stored parts that hold only problems before `problem`, which a committed iteration has consumed."""
        for part in self._parts():
            if part.last < problem:
                self._store.delete(part.name)

    async def _write_later(self) -> None:
        while self._pending:
            await asyncio.sleep(self._seconds)
            if not await self._write():
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _write(self) -> bool:
        """Write the pending trajectories; False if the store failed and they have to be retried."""
        pending, self._pending = self._pending, {}
        # Failures are cleared, so that the next leg grades again; trajectories without an end are left out and made again.
        whole = [replace(pending[p], failure=None) for p in sorted(pending) if pending[p].ending in _WHOLE]
        if not whole:
            return True
        try:
            await asyncio.to_thread(self._store_part, whole)
        except (RollError, OSError) as error:
            log.warning("%d finished trajectories could not be kept so far: %s", len(whole), error)
            self._pending = pending | self._pending
            return False
        return True

    def _store_part(self, trajectories: list[Trajectory]) -> None:
        data = encode_trajectories(trajectories)
        first, last = trajectories[0].group, trajectories[-1].group
        with contextlib.suppress(AlreadyExists):  # the name holds the digest: the bytes are equal
            self._store.create(f"{self._folder}/{first:08d}-{last:08d}-{digest_of(data)[:12]}.parquet", data)

    def _parts(self) -> Iterator[_Part]:
        for name in self._store.list(self._folder):
            if parts := _NAME.fullmatch(name):
                yield _Part(f"{self._folder}/{name}", int(parts["last"]), parts["digest"])
