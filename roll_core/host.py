"""Operating system helpers: atomic file replacement, file locks, free ports, and a signal when the parent process ends."""

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
_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal a process gets when its parent ends."""

log = logging.getLogger(__name__)


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


def free_port(address: str = "127.0.0.1") -> int:
    """Find a TCP port that is free on an address now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, even by SIGKILL (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
