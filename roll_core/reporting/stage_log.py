"""Stage log of a leg: one line when a stage begins, ends or fails, written at once, so that it survives the leg's death.

Written by the tasks into `leg-N/stages.jsonl`. A PURE task whose result comes from the stage cache writes no line, so
`collect 3` in the log means that the leg really generated.
"""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from roll_core.types.refs import Record

FILE_NAME = "stages.jsonl"
PROGRESS_LOGGER = "roll.progress"
"""Name of the logger that announces runs and manifests. Its log records carry `run` or `manifest` for a terminal to draw."""


class Edge(StrEnum):
    """Kind of stage event: begin, end or failure."""

    BEGIN = "begin"
    END = "end"
    FAILED = "failed"


class StageEvent(Record):
    """Line of a stage log. `name` is the stage and, for stages of an iteration, its number.

    Example: StageEvent(name="collect 3", edge="begin", at="2026-11-15T09:30:00.123456Z")
    """

    name: str
    edge: Edge
    at: datetime

    @property
    def stage(self) -> str:
        """Name of the stage without the iteration, such as "collect"."""
        return self.name.partition(" ")[0]

    @property
    def iteration(self) -> int | None:
        """Number of the iteration; None for a stage of the leg, such as recover."""
        number = self.name.partition(" ")[2]
        return int(number) if number.isdigit() else None


class StageLog:
    """Writer of a leg's stage log."""

    def __init__(self, leg_dir: Path):
        self._path = leg_dir / FILE_NAME

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Log the beginning of a stage, and its end or failure when the block is left."""
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
    """Read the stage events of all legs of a run that ran on this machine, in order of time. A torn last line is skipped."""
    return sorted((event for events in read_stages_by_leg(run_dir).values() for event in events), key=lambda event: event.at)


def read_stages_by_leg(run_dir: Path) -> dict[int, list[StageEvent]]:
    """Read the stage events of a run on this machine, by leg number. A torn last line is skipped."""
    paths = sorted(run_dir.glob(f"leg-*/{FILE_NAME}"))
    return {int(path.parent.name.removeprefix("leg-")): _read(path) for path in paths}


def _read(path: Path) -> list[StageEvent]:
    lines = (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return [StageEvent.model_validate_json(line) for line in lines]
