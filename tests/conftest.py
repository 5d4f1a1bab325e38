"""Fixtures of several suites: a real S3 server, started once, and ordinary AWS settings that lead to it; a real SLURM."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.s3_server import S3Server
    from tests.slurm_cluster import SlurmCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests run in two processes, each file in one of them. Files that must not meet name a group, and begin: they take
    longest."""
    grouped = [item for item in items if item.get_closest_marker("xdist_group")]
    others = [item for item in items if not item.get_closest_marker("xdist_group")]
    for item in others:
        item.add_marker(pytest.mark.xdist_group(item.path.name))
    items[:] = grouped + others


@pytest.fixture(scope="session")
def started_s3_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[S3Server]":
    from tests.s3_server import S3Server  # here, so that tests on a GPU need no S3 library

    with S3Server(Path(tmp_path_factory.mktemp("s3"))) as server:
        yield server


@pytest.fixture
def s3_server(started_s3_server: "S3Server", monkeypatch: pytest.MonkeyPatch) -> "S3Server":
    from tests.s3_server import use_server

    use_server(monkeypatch, started_s3_server.environment)
    return started_s3_server


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SlurmCluster]":
    from tests.slurm_cluster import SlurmCluster

    with SlurmCluster(Path(tmp_path_factory.mktemp("slurm"))) as cluster:
        yield cluster
