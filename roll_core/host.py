"""Operating system helpers: atomic file replacement, free ports, and a signal when the parent process ends."""

import contextlib
import ctypes
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
"""File mode: readable by its owner alone."""
ANY_ADDRESS = ""
"""All network interfaces of this host."""
_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal a process gets when its parent ends."""


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


def free_port(address: str = "127.0.0.1") -> int:
    """Find a TCP port that is free on an address now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, even by SIGKILL (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
