"""Listings of record folders without strays: files that roll did not write, such as .DS_Store, .nfs0000001 or a README.

Strays are ignored with one warning, because the tools that make them are not the user's doing.
"""

import functools
import logging
import re

from roll_core.store.object_store import ObjectStore

ITERATION = re.compile(r"[0-9]{8,}\.json")
"""File name of a manifest. Example: 00000012.json"""
ITERATION_AND_DIGEST = re.compile(r"[0-9]{8,}-[0-9a-zA-Z_-]{0,12}\.json")
"""File name of a record of a checkpoint, an export or a weights version. Example: 00000012-77d0c2a94e1b.json"""
ARTIFACT = re.compile(r"objects/[0-9a-f]{2}/[0-9a-f]{62}")
"""Name of an artifact in the store."""

log = logging.getLogger(__name__)


def list_matching(store: ObjectStore, folder: str, pattern: re.Pattern[str]) -> list[str]:
    """List the names directly in a folder that match a pattern, sorted. The first sight of others is a warning."""
    names = list(store.list(folder))
    warn_of_strays(store.uri, folder, tuple(name for name in names if not pattern.fullmatch(name)))
    return [name for name in names if pattern.fullmatch(name)]


@functools.cache
def warn_of_strays(store_uri: str, folder: str, strays: tuple[str, ...]) -> None:
    """Log one warning about files in a folder of a store that are not roll's. Repeated calls are silent."""
    if strays:
        shown = ", ".join(map(repr, strays[:4])) + (f" and {len(strays) - 4} more" if len(strays) > 4 else "")
        log.warning("%s/%s: ignored, since roll did not write it: %s", store_uri, folder, shown)
