"""Names that come from outside: run ids, and file names in records. No name leads out of the folder that it is joined to."""

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

LONGEST_RUN_ID = 200
"""Bytes of the longest run id. File systems allow 255 for one name, and log and export files add to it."""


def is_relative_name(name: str) -> bool:
    """True if a name stays within the folder that it is joined to: relative, without "..", NUL or an empty part."""
    parts = name.split("/")
    return not PurePosixPath(name).is_absolute() and "\0" not in name and not {"", ".", ".."} & set(parts)


def is_run_id(text: str) -> bool:
    """True for letters, digits, '-', '_' and '.', not '.' first, in at most `LONGEST_RUN_ID` bytes."""
    allowed = bool(text) and all(letter.isalpha() or letter.isdecimal() or letter in "-_." for letter in text)
    return allowed and not text.startswith(".") and len(text.encode()) <= LONGEST_RUN_ID


def _check_relative_name(name: str) -> str:
    if not is_relative_name(name):
        raise ValueError(f"{name!r} is not the name of a file within a folder")
    return name


def _check_run_id(text: str) -> str:
    if not is_run_id(text):
        raise ValueError(f"{text[:LONGEST_RUN_ID]!r} is not a run id: ids look like quickstart-1")
    return text


RelativeName = Annotated[str, AfterValidator(_check_relative_name)]
"""Name of a file within a folder, checked where a record is read. Example: critic/__0_0.distcp"""
RunId = Annotated[str, AfterValidator(_check_run_id)]
"""Id of a run, checked wherever one comes in. Example: quickstart-1"""
