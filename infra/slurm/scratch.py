"""Scratch folders on a node's local disk, one per live leg. Used by `node.py`.

Folders that killed legs left are removed when the next leg starts on the node.
"""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from roll_core.errors import RollError

SCRATCH_ROOT = Path(f"/tmp/roll-{os.getuid()}")
"""Parent of all scratch folders of this user. Not in TMPDIR: Ray keeps Unix sockets below, whose paths are limited to 107
characters."""


@contextlib.contextmanager
def locked_folder(name: str) -> Iterator[Path]:
    """Provide a scratch folder during the block. Remove it afterwards, and remove folders of dead owners first.

    A file lock (flock) marks a live owner. The kernel releases it when the owner's process dies, however it dies.
    """
    SCRATCH_ROOT.mkdir(mode=0o700, exist_ok=True)
    _check_is_ours(SCRATCH_ROOT)
    for left in SCRATCH_ROOT.glob("*.lock"):
        with contextlib.suppress(BlockingIOError), _locked(left, fcntl.LOCK_NB):
            _remove(left)
    lock_file = SCRATCH_ROOT / f"{name}.lock"
    with _locked(lock_file):
        folder = lock_file.with_suffix("")
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            yield folder
        finally:
            _remove(lock_file)


def _check_is_ours(folder: Path) -> None:
    """Raise RollError unless a folder is a directory of this user that others cannot enter. Everybody may write to its
    parent: a symlink there could lead to another folder, in which a leg would remove files."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise RollError(f"{folder} on this node is not a directory: have it removed")
    if found.st_uid != os.getuid():
        raise RollError(f"{folder} on this node belongs to another user: have it removed")
    if found.st_mode & 0o077:
        raise RollError(f"{folder} on this node can be entered by other users: chmod 700 {folder}")


@contextlib.contextmanager
def _locked(lock_file: Path, mode: int = 0) -> Iterator[None]:
    """Hold an exclusive lock on a file during the block. With mode LOCK_NB, raise BlockingIOError if another holds it."""
    while True:
        with open(lock_file, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | mode)
            if lock_file.exists() and os.path.samestat(lock_file.stat(), os.fstat(lock.fileno())):
                yield
                return
        # Another process removed the file between our open and our lock: try again with a new file.


def _remove(lock_file: Path) -> None:
    shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
    lock_file.unlink(missing_ok=True)
