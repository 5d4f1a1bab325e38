"""Trajectories that are finished and that no committed iteration has used up, kept in the store: a leg that is killed costs
the seconds since they were last written, and what was being generated.

    runs/RUN/unfinished/00000096-00000104-5d41402abc4b.parquet     from problem to problem, and the digest of the bytes

Losing one costs time and nothing else, so one that cannot be read is as good as none. The rollout scheduler's role uses it.
"""

import asyncio
import contextlib
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from roll_core.errors import RollError
from roll_core.rollout.lifecycle import Place
from roll_core.store.media.medium import AlreadyExists
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.rollouts import decode_trajectories, encode_trajectories
from roll_core.types.refs import digest_of
from roll_core.types.trajectory import Ending, Trajectory

PAUSE_S = 5.0
"""Between attempts to write to a store that is away."""

log = logging.getLogger(__name__)

_NAME = re.compile(r"\d+-(?P<last>\d+)-(?P<digest>[0-9a-f]+)\.parquet")


@dataclass(frozen=True)
class _Part:
    name: str
    last: int
    digest: str


class Journal:
    """Example: journal = Journal(store, "quickstart-3", 5.0); journal.add(trajectory); ...; journal.read()"""

    def __init__(self, store: ObjectStore, run_id: str, seconds: float):
        self._store = store
        self._folder = f"runs/{run_id}/unfinished"
        self._seconds = seconds
        self._pending: dict[Place, Trajectory] = {}
        self._writing: asyncio.Task[None] | None = None

    def read(self) -> dict[Place, Trajectory]:
        """Everything that was kept, by problem and attempt; of what was kept twice, what says more."""
        kept: dict[Place, Trajectory] = {}
        for part in self._parts():
            for t in self._read_part(part):
                if t.score is not None or (t.group, t.attempt) not in kept:
                    kept[t.group, t.attempt] = t
        return kept

    def _read_part(self, part: _Part) -> list[Trajectory]:
        try:
            data = self._store.read(part.name)
            return decode_trajectories(data) if digest_of(data).startswith(part.digest) else []
        except (FileNotFoundError, ValueError, KeyError) as error:  # gone meanwhile, or written by another version
            log.warning("%s cannot be read, and is made again: %s", part.name, error)
            return []

    async def rewrite(self, trajectories: Iterable[Trajectory]) -> None:
        """Keep these and nothing else."""
        await asyncio.to_thread(self.forget_before, sys.maxsize)
        await self.keep(trajectories)

    def add(self, trajectory: Trajectory) -> None:
        """Keep one, with others that come within some seconds."""
        self._pending[trajectory.group, trajectory.attempt] = trajectory
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_later())

    def drop_before(self, problem: int) -> None:
        """What has not been kept so far need not be: it is on its way into the store as part of a batch."""
        for place in [place for place in self._pending if place[0] < problem]:
            del self._pending[place]

    async def keep(self, trajectories: Iterable[Trajectory]) -> None:
        """Keep these and everything that waits, now."""
        self._pending |= {(t.group, t.attempt): t for t in trajectories}
        await self._write()

    def forget_before(self, problem: int) -> None:
        """What was kept of earlier problems, which a committed iteration has used up, is gone from here on."""
        for part in self._parts():
            if part.last < problem:
                self._store.delete(part.name)

    async def _write_later(self) -> None:
        while self._pending:
            await asyncio.sleep(self._seconds)
            if not await self._write():
                await asyncio.sleep(PAUSE_S)

    async def _write(self) -> bool:
        """Whether nothing has to be tried again."""
        pending, self._pending = self._pending, {}
        # Failed grades are tried again, and what an engine gave up is made again.
        whole = [replace(pending[p], failure=None) for p in sorted(pending) if pending[p].ending is not Ending.ABORTED]
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
        with contextlib.suppress(AlreadyExists):  # with the same bytes
            self._store.create(f"{self._folder}/{first:08d}-{last:08d}-{digest_of(data)[:12]}.parquet", data)

    def _parts(self) -> Iterator[_Part]:
        for name in self._store.list(self._folder):
            if parts := _NAME.fullmatch(name):
                yield _Part(f"{self._folder}/{name}", int(parts["last"]), parts["digest"])
