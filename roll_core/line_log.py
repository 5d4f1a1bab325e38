"""Append-only logs of one JSON object per line. Used by the stage log and by the spool of the tracker.

A killed process, a full disk or a power cut leaves a line that is cut or filled with NUL bytes. Such a line costs itself and
no other: the writer starts a new line after it, and readers leave it out.
"""

import errno
import os
from pathlib import Path

from roll_core.host import PRIVATE


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file; end the last line first if it was torn. Raise OSError if the line cannot be written whole."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        _write_whole(descriptor, b"\n" * is_torn + line + b"\n")
    finally:
        os.close(descriptor)


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write all bytes; a short write raises ENOSPC."""
    if os.write(descriptor, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
