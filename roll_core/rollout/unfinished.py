"""Trajectories of collects that failed, until a later collect of the same request has used them.

In the run's scratch folder, a file per request: SHA-256, a line break, Parquet. Losing one costs time and nothing else, so
one that cannot be read is as good as none. The rollout scheduler's role uses it.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from roll_core.rollout.scheduler import Finished
from roll_core.store.rollouts import decode_trajectories, encode_trajectories
from roll_core.types.refs import digest_of
from roll_core.types.trajectory import Ending

log = logging.getLogger(__name__)


class Unfinished:
    """Example: with Unfinished(folder).kept("4/ab12") as finished: await scheduler.collect(request, 3600.0, finished)"""

    def __init__(self, folder: Path):
        self._folder = folder

    @contextlib.contextmanager
    def kept(self, request_id: str) -> Iterator[Finished]:
        """What an earlier collect had finished, to be added to; kept again if the body fails, forgotten if it does not."""
        path = self._folder / request_id.replace("/", "-")
        finished = _read(path)
        try:
            yield finished
        except BaseException:
            try:
                _write(path, finished)
            except OSError as error:
                log.warning("%d trajectories could not be kept in %s: %s", len(finished), path, error)
            raise
        with contextlib.suppress(OSError):
            path.unlink()


def _read(path: Path) -> Finished:
    try:
        digest, _, data = path.read_bytes().partition(b"\n")
    except OSError:
        return {}
    if digest.decode(errors="replace") != digest_of(data):
        return {}
    return {(t.group, t.attempt): t for t in decode_trajectories(data)}


def _write(path: Path, finished: Finished) -> None:
    """Without failed grades, which are tried again, and without what an engine aborted."""
    whole = [
        replace(finished[place], failure=None) for place in sorted(finished) if finished[place].ending != Ending.ABORTED
    ]
    data = encode_trajectories(whole)
    path.parent.mkdir(parents=True, exist_ok=True)
    being_written = path.with_name(f"{path.name}.being-written")
    being_written.write_bytes(digest_of(data).encode() + b"\n" + data)
    os.replace(being_written, path)
