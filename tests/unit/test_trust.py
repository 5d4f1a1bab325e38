"""Trust in a store: no stored byte runs code, and no stored or given name leads out of its folder."""

import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from flows.cli import main as roll
from roll_core.config.run import ForkedFrom
from roll_core.errors import ArtifactDamaged, StoreRefused, UserError
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import find_run, open_or_find_run
from roll_core.store.records.sealed import create_sealed, read_record
from roll_core.training.checkpoint_reader import load_checkpoint, read_metadata
from roll_core.types.refs import ArtifactKind, ArtifactRef, CheckpointFile, CheckpointRef, RunRef
from tests.support import tiny_config

OUTSIDE = ("../x", "/tmp/x", "a/../../x", "a\0b", "", ".", "..", "a//b")


class RunsCode:
    """Object whose pickle calls os.mkdir when it is read."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


@pytest.fixture
def saved(tmp_path) -> tuple[Path, dict]:
    """Checkpoint folder of a model with its optimizer, and the state in it."""
    state = {"model": {"weight": torch.arange(6.0)}, "optimizer": {"lr": 1e-3, "betas": (0.9, 0.99)}, "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    return tmp_path / "checkpoint", state


def blank() -> dict:
    return {"model": {"weight": torch.zeros(6)}, "optimizer": {"lr": 0.0, "betas": (0.0, 0.0)}, "step": 0}


def test_a_checkpoint_of_tensors_and_numbers_is_read_back(saved):
    folder, state = saved
    loaded = blank()
    load_checkpoint(loaded, folder, no_dist=True)
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])
    assert (loaded["optimizer"], loaded["step"]) == (state["optimizer"], 7)


def test_a_malicious_pickle_in_the_place_of_metadata_is_refused_and_does_not_run(saved, tmp_path):
    folder, _ = saved
    (folder / ".metadata").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    with pytest.raises(
        ArtifactDamaged, match=r"\.metadata of a checkpoint was not written by torch .*: it names posix.mkdir"
    ):
        load_checkpoint(blank(), folder, no_dist=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "torch.distributed.checkpoint.metadata.os", "os.system"])
def test_metadata_may_name_the_classes_of_metadata_only(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(ArtifactDamaged, match=f"it names {name}"):
        read_metadata(tmp_path / ".metadata")


class Attribute:
    """Object whose pickle is an attribute of another object, as Python 3.11.2 pickles members of an enum."""

    def __init__(self, owner: object, name: str):
        self._reduced = getattr, (owner, name)

    def __reduce__(self):
        return self._reduced


@pytest.mark.parametrize(
    ("owner", "name", "reason"),
    [
        (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT", "it is not the metadata of a checkpoint"),
        (_MEM_FORMAT_ENCODING, "__class__", "it names builtins.getattr"),
        (Metadata, "__init__", "it names builtins.getattr"),
    ],
)
def test_of_all_attributes_metadata_may_name_memory_formats_only(tmp_path, owner, name, reason):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(owner, name)))
    with pytest.raises(ArtifactDamaged, match=reason):
        read_metadata(tmp_path / ".metadata")


def test_an_item_that_is_not_a_plain_value_is_refused_and_does_not_run(saved, tmp_path):
    """`torch.save` of the writer pickles anything; the reader must not read it."""
    folder, state = saved
    dcp.save(state | {"step": RunsCode(tmp_path / "ran")}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(ArtifactDamaged, match="step of a checkpoint is not a plain value"):
        load_checkpoint(blank(), folder, no_dist=True)
    assert not (tmp_path / "ran").exists()


def test_metadata_that_names_files_outside_the_checkpoint_is_refused(saved):
    folder, _ = saved
    data = (folder / ".metadata").read_bytes()
    name = b"__0_0.distcp"
    outside = b"../../etc/xx"
    assert name in data
    assert len(name) == len(outside)
    (folder / ".metadata").write_bytes(data.replace(name, outside))
    with pytest.raises(ArtifactDamaged, match="it names the file '../../etc/xx'"):
        read_metadata(folder / ".metadata")


def test_cut_metadata_is_damage(saved):
    folder, _ = saved
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:100])
    with pytest.raises(ArtifactDamaged, match="was not written by torch"):
        read_metadata(folder / ".metadata")


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_file_name_in_a_record_cannot_leave_its_folder(name):
    artifact = ArtifactRef(kind=ArtifactKind.EXPORT_FILE, digest="0" * 64, size=0)
    with pytest.raises(ValidationError, match="is not the name of a file within a folder"):
        CheckpointFile(name=name, artifact=artifact)


def test_a_record_with_a_name_that_leaves_its_folder_is_refused_though_it_is_sealed(tmp_path):
    store = ObjectStore(f"file://{tmp_path}/store")
    artifact = {"kind": "export-file", "digest": "0" * 64, "size": 1}
    files = [{"name": "../../victim/.bashrc", "artifact": artifact}]
    content = json.dumps({"iteration": 1, "weights_version": 1, "weights_digest": "", "files": files})
    create_sealed(store, "runs/a-1/checkpoints/00000001-.json", content.encode())
    with pytest.raises(ArtifactDamaged, match="runs/a-1/checkpoints/00000001-.json"):
        read_record(store, "runs/a-1/checkpoints/00000001-.json", CheckpointRef)


def test_a_digest_is_not_a_path():
    with pytest.raises(ValidationError):
        ArtifactRef(kind=ArtifactKind.TRACE, digest="../../etc/passwd", size=1)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_store_in_a_folder_reads_and_writes_in_that_folder_only(tmp_path, name):
    store = ObjectStore(f"file://{tmp_path}/store")
    for attempt in (store.read, store.delete, lambda name: store.create(name, b""), lambda name: store.replace(name, b"")):
        with pytest.raises(StoreRefused, match="is not the name of an object in"):
            attempt(name)


@pytest.mark.parametrize("run_id", ["../../x", "a/b", "a\0b", "", ".x", "x" * 300, "a b"])
def test_a_run_id_is_checked_wherever_one_comes_in(tmp_path, run_id, capsys):
    store = ObjectStore(f"file://{tmp_path}/store")
    with pytest.raises(UserError, match="--run: .* is not a run id"):
        open_or_find_run(store, tiny_config(tmp_path), run_id)
    with pytest.raises(UserError, match="RUN: .* is not a run id"):
        find_run(store, run_id)
    with pytest.raises(ValidationError):
        RunRef(run_id=run_id, store_uri="", config_digest="")
    with pytest.raises(ValidationError):
        ForkedFrom(run_id=run_id, iteration=0)
    for arguments in (["show", run_id], ["resume", run_id], ["replay", f"{run_id}@1"], ["fork", f"{run_id}@1"]):
        assert roll([*arguments, "--store", store.uri]) == 2
    assert roll(["export", run_id, str(tmp_path / "out"), "--store", store.uri]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_reading_bytes_of_torch_never_unpickles_more_than_plain_values():
    """Guard on torch itself: `weights_only` refuses a pickle that calls a function."""
    buffer = io.BytesIO()
    torch.save(RunsCode(Path("ran")), buffer)
    buffer.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(buffer, weights_only=True)
