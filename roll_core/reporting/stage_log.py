"""Stage log of a leg: one line when a stage begins, ends or fails, written at once, so that it survives the leg's death.

Written by the tasks into `leg-N/stages.jsonl`. A PURE task whose result comes from the stage cache writes no line, so
`collect 3` in the log means that the leg really generated.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from pydantic import AwareDatetime, ConfigDict, Field, ValidationError

from roll_core.line_log import append_line
from roll_core.types.manifest import Metrics
from roll_core.types.refs import Record

log = logging.getLogger(__name__)

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

    model_config = ConfigDict(ser_json_inf_nan="strings")  # plain JSON would turn NaN into null

    name: str
    edge: Edge
    at: AwareDatetime
    metrics: Metrics = Field(default_factory=dict)
    """Metrics of a stage of the leg, such as recover. Those of an iteration are in its manifest."""

    @property
    def stage(self) -> str:
        """Name of the stage without the iteration, such as "collect"."""
        return self.name.partition(" ")[0]

    @property
    def iteration(self) -> int | None:
        """Number of the iteration; None for a stage of the leg, such as recover."""
        return iteration_in(self.name)


class StageLog:
    """Writer of a leg's stage log."""

    def __init__(self, leg_dir: Path):
        self._path = leg_dir / FILE_NAME

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Metrics]:
        """Log the beginning of a stage, and its end or failure when the block is left. The block may fill in its metrics."""
        metrics: Metrics = {}
        self._append(StageEvent(name=name, edge=Edge.BEGIN, at=datetime.now(UTC)))
        try:
            yield metrics
        except BaseException:
            self._append(StageEvent(name=name, edge=Edge.FAILED, at=datetime.now(UTC)))
            raise
        self._append(StageEvent(name=name, edge=Edge.END, at=datetime.now(UTC), metrics=metrics))

    def _append(self, event: StageEvent) -> None:
        # A full disk must not end a run.
        with contextlib.suppress(OSError):
            append_line(self._path, event.model_dump_json(exclude_defaults=True).encode())


def read_stages(run_dir: Path) -> list[StageEvent]:
    """Read the stage events of all legs of a run that ran on this machine, in order of time."""
    return sorted((event for events in read_stages_by_leg(run_dir).values() for event in events), key=lambda event: event.at)


def read_stages_by_leg(run_dir: Path) -> dict[int, list[StageEvent]]:
    """Read the stage events of a run on this machine, by leg number. Damaged lines are left out, with a warning.

    A last line without a newline is being written, and is left out, too.
    """
    legs = {path: _number(path.parent.name.removeprefix("leg-")) for path in sorted(run_dir.glob(f"leg-*/{FILE_NAME}"))}
    return {leg: _read(path) for path, leg in legs.items() if leg is not None}


def _read(path: Path) -> list[StageEvent]:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        _warn_once(f"cannot read {path}: {error.strerror}")
        return []
    events = []
    for line in lines:
        with contextlib.suppress(ValidationError):
            events.append(StageEvent.model_validate_json(line))
    if num_damaged := len(lines) - len(events):
        _warn_once(f"left out {num_damaged} damaged line(s) of {path}")
    return events


@functools.cache
def _warn_once(sentence: str) -> None:
    """Log a warning that this process has not logged yet: a leg reads its logs at every evaluation."""
    log.warning(sentence)


def iteration_in(stage_name: str) -> int | None:
    """Number of the iteration in the name of a stage, such as "collect 3"; None for a stage of the leg."""
    return _number(stage_name.partition(" ")[2])


def _number(text: str) -> int | None:
    """Number that a text of at most 18 decimal digits says; None for any other text."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None
