"""Rendezvous file: how the nodes of a leg find the Ray head, or learn that there is none."""

import json

import pytest

from infra.slurm import node
from infra.slurm.node import TaskIdentity, wait_for_head


@pytest.fixture
def task(tmp_path) -> TaskIdentity:
    return TaskIdentity(job_id="7", restart=0, rank=1, node="n2", address="127.0.0.3", folder=tmp_path)


def test_a_node_finds_the_head_by_the_file_of_its_job(task):
    task.rendezvous_file.write_text(json.dumps({"head": "127.0.0.2:6379"}))
    head = wait_for_head(task)
    assert head is not None
    assert head.host_and_port == ("127.0.0.2", 6379)


def test_a_node_does_not_wait_for_a_head_that_gave_up(task):
    task.done_file.touch()
    assert wait_for_head(task) is None


def test_a_node_ignores_the_files_of_an_earlier_start_of_its_job(task, monkeypatch):
    monkeypatch.setattr(node, "RENDEZVOUS_DEADLINE_S", 0.05)
    monkeypatch.setattr(node, "WORKER_POLL_S", 0.01)
    later = TaskIdentity(job_id="7", restart=1, rank=1, node="n2", address="127.0.0.3", folder=task.folder)
    task.done_file.touch()
    with pytest.raises(node.RayLost, match="n2 waited"):
        wait_for_head(later)
