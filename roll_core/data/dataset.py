"""Problem source of tables on disk: Parquet files, and datasets in the layout of Hugging Face's `save_to_disk` (Arrow
streams listed in `state.json`). pyarrow reads only the columns that the config names."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from roll_core.config.problems import Columns, DatasetProblems
from roll_core.data.file_source import FileSource, SourceRow
from roll_core.errors import UserError, one_line

STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes next to the data of one split, and next to the folders of several splits."""


class DatasetSource(FileSource):
    """Problem source of Parquet files or a `save_to_disk` folder."""

    def __init__(self, config: DatasetProblems, seed: int):
        super().__init__(config, _rows, seed)


def _rows(key: str, path: Path, columns: Columns) -> Iterator[SourceRow]:
    number = 0
    try:
        files = _files(key, path)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{key}: the tables in {path} cannot be listed ({one_line(error)})") from None
    for file in files:
        try:
            table = pq.read_table(file) if file.suffix == ".parquet" else _read_arrow(file)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{key}: {file} cannot be read as a table: {str(error).splitlines()[0]}") from None
        for values in table.select(_needed(table.column_names, columns)).to_pylist():
            number += 1
            yield SourceRow(_name(path), number, f"row {number} of {path}", values)


def _files(key: str, path: Path) -> list[Path]:
    """Table files of a path (file, folder or glob pattern), in a fixed order."""
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
    """Columns of a table that the config names. All columns if one is missing, so that the error can list them."""
    domain = columns.domain or "domain"
    named = {name if name in there else name.partition(".")[0] for name in (columns.prompt, columns.answer)}
    named |= {name for name in (domain, domain.partition(".")[0]) if name in there}
    return [name for name in there if name in named] if named <= set(there) else there


def _name(path: Path) -> str:
    """Short name of a file, the prefix of its problem ids: /data/gsm8k/train-*.parquet -> train."""
    return path.stem.partition("*")[0].rstrip("-_.") or path.parent.name
