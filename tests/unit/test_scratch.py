"""Scratch folders of legs on the disk of a node: one per leg, and those of dead legs are removed."""

import os
import signal
import subprocess
import sys

import pytest

from infra.slurm import scratch
from roll_core.errors import RollError
from tests.support import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from infra.slurm import scratch
scratch.SCRATCH_ROOT = Path(sys.argv[1])
with scratch.locked_folder("killed") as folder:
    (folder / "socket").touch()
    print("here", flush=True)
    time.sleep(600)
"""


"""Program that holds a locked folder until it is killed."""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "SCRATCH_ROOT", tmp_path / "roll")
    return tmp_path / "roll"


def names(folders) -> list[str]:
    return sorted(path.name for path in folders.iterdir())


def test_a_folder_is_private_and_is_removed_at_the_end_of_the_block(folders):
    with scratch.locked_folder("7.0.0") as folder:
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "ray").mkdir()
    assert names(folders) == []


def test_the_next_leg_removes_the_folders_of_dead_legs_and_none_of_living_ones(folders):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folders)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "here\n"
    with scratch.locked_folder("living"):
        assert names(folders) == ["killed", "killed.lock", "living", "living.lock"]
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with scratch.locked_folder("next"):
            assert names(folders) == ["living", "living.lock", "next", "next.lock"]


def test_a_symlink_in_place_of_the_scratch_root_is_refused_and_nothing_behind_it_is_removed(folders, tmp_path):
    home = tmp_path / "home"
    (home / "poetry").mkdir(parents=True)
    (home / "poetry.lock").touch()
    folders.symlink_to(home)
    with pytest.raises(RollError, match="is not a directory: have it removed"), scratch.locked_folder("7.0.0"):
        pass
    assert names(home) == ["poetry", "poetry.lock"]


def test_a_scratch_root_that_others_can_enter_is_refused(folders):
    folders.mkdir()
    folders.chmod(0o755)
    with pytest.raises(RollError, match="can be entered by other users: chmod 700"), scratch.locked_folder("7.0.0"):
        pass
