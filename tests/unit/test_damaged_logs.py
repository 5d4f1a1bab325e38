"""Logs that are torn, cut, full of NULs or foreign: reading leaves bad lines out, writing never raises."""

import logging
import os
import resource
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_core.reporting.goodput import commits_in_logs, leg_histories
from roll_core.reporting.stage_log import FILE_NAME, Edge, StageEvent, StageLog, read_stages, read_stages_by_leg

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
WHOLE = StageEvent(name="collect 3", edge=Edge.BEGIN, at=NOON).model_dump_json().encode() + b"\n"
DAMAGE = {
    "a torn line": WHOLE[:20] + b"\n",
    "two lines in one": WHOLE[:20] + WHOLE,
    "NULs of a power cut": bytes(4096) + b"\n",
    "no UTF-8": b'{"name":"\xff\xfe"}\n',
    "JSON that is no event": b'{"name": "collect 3"}\n',
    "a list": b"[1, 2]\n",
    "a time without a zone": b'{"name":"collect 3","edge":"begin","at":"2026-11-15T12:00:00"}\n',
    "an empty line": b"\n",
}


def leg_log(run_dir: Path, leg: str, content: bytes) -> None:
    (run_dir / leg).mkdir(parents=True)
    (run_dir / leg / FILE_NAME).write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_line_of_a_stage_log_is_left_out_and_counted(tmp_path: Path, caplog, damage: bytes):
    leg_log(tmp_path, "leg-1", WHOLE + damage + WHOLE)
    with caplog.at_level(logging.WARNING):
        assert read_stages(tmp_path) == [StageEvent.model_validate_json(WHOLE)] * 2
        assert read_stages(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"left out 1 damaged line(s) of {tmp_path}/leg-1/{FILE_NAME}"
    ], "said once"


@given(content=st.binary(max_size=300), cut=st.integers(0, len(WHOLE)))
def test_no_content_of_a_stage_log_raises(tmp_path_factory, content: bytes, cut: int):
    run_dir = tmp_path_factory.mktemp("run")
    leg_log(run_dir, "leg-1", WHOLE[:cut] + content + b"\n" + WHOLE)
    events = read_stages_by_leg(run_dir)
    assert events[1][-1] == StageEvent.model_validate_json(WHOLE)
    leg_histories(events, commits_in_logs(events))


@pytest.mark.parametrize("name", ["collect ²", "collect " + "9" * 5000, "collect -1", "collect", "", " "])
def test_a_stage_name_without_a_usable_number_has_no_iteration(name: str):
    assert StageEvent(name=name, edge=Edge.BEGIN, at=NOON).iteration is None


def test_folders_that_are_no_legs_and_logs_that_cannot_be_read_are_left_out(tmp_path: Path):
    for folder in ("leg-x", "leg-", "leg-²", "leg-1.old", "leg--1", "leg-" + "9" * 5000):
        if len(folder) < 255:
            leg_log(tmp_path, folder, WHOLE)
    (tmp_path / "leg-2" / FILE_NAME).mkdir(parents=True)
    leg_log(tmp_path, "leg-3", WHOLE)
    assert {leg: len(events) for leg, events in read_stages_by_leg(tmp_path).items()} == {2: 0, 3: 1}


def test_a_stage_log_goes_on_after_a_torn_line(tmp_path: Path):
    leg_log(tmp_path, "leg-1", WHOLE + WHOLE[:20])
    with StageLog(tmp_path / "leg-1").stage("update 3"):
        pass
    assert [event.name for event in read_stages(tmp_path)] == ["collect 3", "update 3", "update 3"]


def test_a_disk_that_is_full_for_a_moment_costs_a_stage_log_one_line(tmp_path: Path):
    (tmp_path / "leg-1").mkdir()
    log = StageLog(tmp_path / "leg-1")
    with log.stage("collect 3"):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "leg-1" / FILE_NAME).stat().st_size + 10, hard))
        try:
            with log.stage("prepare 3"):  # neither line fits
                pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with log.stage("update 3"):
        pass
    names = [(event.name, event.edge) for event in read_stages(tmp_path)]
    assert names == [
        ("collect 3", Edge.BEGIN),
        ("collect 3", Edge.END),
        ("update 3", Edge.BEGIN),
        ("update 3", Edge.END),
    ]


def test_a_stage_log_that_cannot_be_written_ends_no_stage(tmp_path: Path):
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    with StageLog(tmp_path).stage("collect 3"):
        pass
    with StageLog(tmp_path / "missing").stage("collect 3"):
        pass
    os.stat("/dev/full")  # still there: nothing replaced the log by a file
