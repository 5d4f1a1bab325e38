"""Reader of torch.distributed.checkpoint files that runs no stored code.

torch unpickles a checkpoint's `.metadata` and its items that are not tensors. A pickle can name any function to be called,
and a checkpoint comes from a store that others may write to. Here metadata may name only the dozen classes that torch itself
writes there, and items that are not tensors are read with `weights_only=True`.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from roll_core.errors import ArtifactDamaged, RollError, one_line
from roll_core.types.names import is_relative_name

_METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath")),
}
"""Modules and names that the metadata of a checkpoint may refer to, besides dtypes of torch."""


def _memory_format(owner: object, name: str) -> Any:
    """Member of torch's enum of memory formats. Python 3.11.0 to 3.11.3 pickles it as getattr(enum, name)."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError("it names builtins.getattr")
    return _MEM_FORMAT_ENCODING[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that finds the allowed names only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in ALLOWED_NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """Read the metadata of a checkpoint. Raises ArtifactDamaged if it is anything else than torch writes."""
    pickled = io.BytesIO(path.read_bytes())
    try:
        metadata = _MetadataUnpickler(pickled).load()
        assert isinstance(metadata, Metadata), "it is not the metadata of a checkpoint"
        assert isinstance(metadata.storage_data, dict), "it says nothing about files"
        for stored in metadata.storage_data.values():
            assert is_relative_name(stored.relative_path), f"it names the file {stored.relative_path!r}"
    except Exception as error:  # noqa: BLE001  a damaged pickle raises almost anything
        reason = str(error) or type(error).__name__
        raise ArtifactDamaged(f"{path.name} of a checkpoint was not written by torch and is not read: {reason}") from None
    return metadata


class _Reader(dcp.FileSystemReader):
    """Reader of a checkpoint folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        metadata = read_metadata(Path(self.path) / ".metadata")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _StateDictPlanner(DefaultLoadPlanner):
    """Planner that fills a state dict. Items that are not tensors are numbers, texts and lists of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ArtifactDamaged(
                f"{name} of a checkpoint is not a plain value and is not read: {one_line(error)}"
            ) from None
        set_element(self.original_state_dict, self.mappings[name], loaded)


def load_checkpoint(state: dict[str, Any], folder: Path, planner: LoadPlanner | None = None, *, no_dist: bool) -> None:
    """Fill a state dict from a checkpoint folder. `planner` replaces the one that fills state dicts."""
    read_metadata(folder / ".metadata")  # torch would hide our error in an assertion
    try:
        dcp.load(state, storage_reader=_Reader(folder), planner=planner or _StateDictPlanner(), no_dist=no_dist)
    except dcp.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, RollError):
                raise cause from None
        raise
