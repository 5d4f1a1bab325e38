"""Folders on a node's own disk, each of one leg that lives. What killed legs left there goes when the next one comes."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from roll_core.errors import RollError

FOLDERS = Path(f"/tmp/roll-{os.getuid()}")
"""Not in TMPDIR: Ray's sockets lie below, and the names of sockets end at 107 characters."""


@contextlib.contextmanager
def own_folder(name: str) -> Iterator[Path]:
    """A folder that nobody else uses, for as long as the block lasts.

    A lock says that its owner lives; the kernel drops it when it does not.
    """
    FOLDERS.mkdir(mode=0o700, exist_ok=True)
    if FOLDERS.stat().st_uid != os.getuid():
        raise RollError(f"{FOLDERS} on this node belongs to somebody else: have it removed")
    for left in FOLDERS.glob("*.lock"):
        with contextlib.suppress(BlockingIOError), _locked(left, fcntl.LOCK_NB):
            _remove(left)
    lock_file = FOLDERS / f"{name}.lock"
    with _locked(lock_file):
        folder = lock_file.with_suffix("")
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            yield folder
        finally:
            _remove(lock_file)


@contextlib.contextmanager
def _locked(lock_file: Path, mode: int = 0) -> Iterator[None]:
    """Raises BlockingIOError if somebody has it and `mode` says not to wait."""
    while True:
        with open(lock_file, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | mode)
            if lock_file.exists() and os.path.samestat(lock_file.stat(), os.fstat(lock.fileno())):
                yield
                return
        # Somebody who cleared up removed the file between our opening and our locking it.


def _remove(lock_file: Path) -> None:
    shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
    lock_file.unlink(missing_ok=True)
