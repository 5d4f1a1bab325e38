"""Operating system helpers: atomic file replacement, file locks, paths that can exist, remedies for failed writes, free
ports, and a signal when the parent process ends."""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

PRIVATE = 0o600
"""File mode: readable by its owner alone."""
ANY_ADDRESS = ""
"""All network interfaces of this host."""
NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""Errors of flock on a file system without locks, such as Lustre that was mounted without `-o flock`."""
LONGEST_PATH, LONGEST_NAME = 4096, 255
"""Longest path, and longest name of a file or folder in it, in bytes (Linux)."""
_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal a process gets when its parent ends."""

log = logging.getLogger(__name__)


def make_private_folder(folder: Path) -> Path:
    """Create a folder that its owner alone can enter, if it does not exist; return it. Parents get the usual mode."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user's: whoever made it decides
        folder.chmod(0o700)
    return folder


def make_files_private(folder: Path) -> None:
    """Make the files that are in a folder now readable by their owner alone. Not by a umask: processes that are started
    inherit it, and would make their files in the store private as well."""
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            path.chmod(PRIVATE)


@contextlib.contextmanager
def atomic_replace(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a draft file that atomically replaces `path` when the block ends. If the block raises, `path` is unchanged.

    The data is not synced to disk (no fsync).
    """
    draft = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def try_lock(file: IO[str] | IO[bytes]) -> bool:
    """Lock an open file until it is closed; False if another process has locked it.

    On a file system without locks, warn and return True. Callers use locks to notice a second process early, not to be safe
    from it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning("%s cannot be locked (%s): a second process would not be noticed", file.name, error.strerror)
    return True


def is_portable(text: str) -> bool:
    """True if a text has no NUL and no half of a surrogate pair, which stands for a byte that is not UTF-8."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def path_fault(path: str) -> str | None:
    """Reason why no file or folder can have a path; None if one can."""
    if not is_portable(path):
        return "holds a NUL or a byte that is not UTF-8: remove it"
    if len(os.fsencode(path)) >= LONGEST_PATH:
        return f"has {len(path)} characters: a path has fewer than {LONGEST_PATH}"
    if any(len(os.fsencode(name)) > LONGEST_NAME for name in path.split("/")):
        return f"holds a name of more than {LONGEST_NAME} bytes: shorten it"
    return None


def remedy(error: OSError, wanted: str = "writable") -> str:
    """Return what a user can do about a folder that an operation failed in. Example: make room there"""
    return "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"make it {wanted}"


def free_port(address: str = "127.0.0.1") -> int:
    """Find a TCP port that is free on an address now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, even by SIGKILL (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
