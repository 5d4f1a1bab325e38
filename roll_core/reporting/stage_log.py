"""Where a leg is: a line when a stage begins, ends or fails, on disk at once, for whoever asks where it was when it died.

Written by the tasks into `leg-N/stages.jsonl`. An answer that was kept runs no stage and leaves no line: a `collect 3` that
is here really generated.
"""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from roll_core.types.refs import Record

FILE_NAME = "stages.jsonl"
PROGRESS_LOGGER = "roll.progress"
"""Logger that announces runs and manifests; its records carry `run` or `manifest` for a terminal to draw."""


class Edge(StrEnum):
    BEGIN = "begin"
    END = "end"
    FAILED = "failed"


class StageEvent(Record):
    """Example: StageEvent(name="collect 3", edge="begin", at="2026-11-15T09:30:00.123456Z")"""

    name: str
    edge: Edge
    at: datetime

    @property
    def stage(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def iteration(self) -> int | None:
        """None for a stage that belongs to a leg, such as recover."""
        number = self.name.partition(" ")[2]
        return int(number) if number.isdigit() else None


class StageLog:
    def __init__(self, leg_dir: Path):
        self._path = leg_dir / FILE_NAME

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Say that a stage begins, and how it ended."""
        self._append(name, Edge.BEGIN)
        try:
            yield
        except BaseException:
            self._append(name, Edge.FAILED)
            raise
        self._append(name, Edge.END)

    def _append(self, name: str, edge: Edge) -> None:
        line = StageEvent(name=name, edge=edge, at=datetime.now(UTC)).model_dump_json() + "\n"
        # A full disk must not end a run.
        with contextlib.suppress(OSError), open(self._path, "ab", buffering=0) as log:
            log.write(line.encode())


def read_stages(run_dir: Path) -> list[StageEvent]:
    """What all legs of a run on this machine did, in order. A line that was cut short is left out."""
    return sorted((event for events in read_stages_by_leg(run_dir).values() for event in events), key=lambda event: event.at)


def read_stages_by_leg(run_dir: Path) -> dict[int, list[StageEvent]]:
    """The same, leg by leg."""
    paths = sorted(run_dir.glob(f"leg-*/{FILE_NAME}"))
    return {int(path.parent.name.removeprefix("leg-")): _read(path) for path in paths}


def _read(path: Path) -> list[StageEvent]:
    lines = (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return [StageEvent.model_validate_json(line) for line in lines]
