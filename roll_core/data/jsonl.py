"""JSON lines as a problem source: the simplest way to bring your own data."""

import json
from collections.abc import Iterator
from pathlib import Path

from roll_core.config.problems import Columns, JsonlProblems
from roll_core.data.file_source import FileSource, SourceRow
from roll_core.errors import UserError


class JsonlSource(FileSource):
    """Problem source of JSON lines files, one problem per line."""

    def __init__(self, config: JsonlProblems, seed: int):
        super().__init__(config, _rows, seed)


def _rows(key: str, path: Path, columns: Columns) -> Iterator[SourceRow]:
    if not path.is_file():
        raise UserError(f"{key}: no such file {path}")
    for number, line in enumerate(_lines(key, path), start=1):
        location = f"line {number} of {path}"
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise UserError(f'{key}: {location} must be like {{"{columns.prompt}": "...", "{columns.answer}": "..."}}')
        yield SourceRow(path.stem, number, location, values)


def _lines(key: str, path: Path) -> Iterator[str]:
    """Lines of a file. Only a line feed or a carriage return ends one: a text in a row may hold other separators, such as
    U+2028."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {path} cannot be read as UTF-8 text ({error}): convert it") from None
