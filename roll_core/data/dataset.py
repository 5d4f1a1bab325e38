"""Problems from tables on disk: Parquet files, and datasets as Hugging Face's `save_to_disk` leaves them (Arrow streams
that `state.json` lists). Read with pyarrow alone, and only the columns that are named."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from roll_core.config.problems import Columns, DatasetProblems
from roll_core.data.file_source import FileSource, SourceRow
from roll_core.errors import UserError

STATE, SPLITS = "state.json", "dataset_dict.json"
"""What `save_to_disk` writes beside the data of one split, and beside the folders of several."""


class DatasetSource(FileSource):
    def __init__(self, config: DatasetProblems, seed: int):
        super().__init__(config, _rows, seed)


def _rows(key: str, path: Path, columns: Columns) -> Iterator[SourceRow]:
    number = 0
    for file in _files(key, path):
        try:
            table = pq.read_table(file) if file.suffix == ".parquet" else _read_arrow(file)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{key}: {file} cannot be read as a table: {str(error).splitlines()[0]}") from None
        for values in table.select(_needed(table.column_names, columns)).to_pylist():
            number += 1
            yield SourceRow(_name(path), number, f"row {number} of {path}", values)


def _files(key: str, path: Path) -> list[Path]:
    """The files behind a name, in a fixed order."""
    if (path / SPLITS).is_file():
        splits = json.loads((path / SPLITS).read_text())["splits"]
        raise UserError(f"{key}: {path} holds the splits {', '.join(splits)}: name one of them, like {path / splits[0]}")
    if (path / STATE).is_file():
        return [path / part["filename"] for part in json.loads((path / STATE).read_text())["_data_files"]]
    if path.is_file():
        return [path]
    found = sorted(path.rglob("*.parquet")) if path.is_dir() else sorted(path.parent.glob(path.name))
    if not found:
        raise UserError(f"{key}: no tables in {path}: name a Parquet file, a folder of them, or a folder of save_to_disk")
    return found


def _read_arrow(file: Path) -> pa.Table:
    with pa.memory_map(str(file)) as source:
        return pa.ipc.open_stream(source).read_all()


def _needed(there: list[str], columns: Columns) -> list[str]:
    """The columns of a table that hold what is named; all of them if something is missing, so that it can be said."""
    domain = columns.domain or "domain"
    named = {name if name in there else name.partition(".")[0] for name in (columns.prompt, columns.answer)}
    named |= {name for name in (domain, domain.partition(".")[0]) if name in there}
    return [name for name in there if name in named] if named <= set(there) else there


def _name(path: Path) -> str:
    """What problems of a file are called: /data/gsm8k/train-*.parquet -> train."""
    return path.stem.partition("*")[0].rstrip("-_.") or path.parent.name
