"""Fixtures of several suites: a real S3 server, started once, and ordinary AWS settings that lead to it; a real SLURM."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.s3_server import S3Server
    from tests.slurm_cluster import SlurmCluster


ON_SLURM = {
    "tests/contracts/test_launchers.py",
    "tests/integration/test_deployment.py",
    "tests/integration/test_elastic.py",
    "tests/integration/test_slurm.py",
}
"""Files whose tests look whether anything of a SLURM is left on this machine, and must not meet."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests run in two processes: each file in one of them, and those of SLURM in the same."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = file_of(nodeid)
            return "slurm" if file in ON_SLURM else file

        def _reschedule(self, node: Any) -> None:
            """A process is given its next file before its last test, which does not begin without. xdist gives it before the
            last but one: where tests take minutes, one process then has two files left, and another none."""
            if self.workqueue and self._pending_of(self.assigned_work[node]) > 1:
                return
            super()._reschedule(node)

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins: SLURM's tests, then files of few and long ones."""
    items.sort(key=lambda item: (file_of(item.nodeid) not in ON_SLURM, not item.nodeid.startswith("tests/integration/")))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


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


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[S3Server]":
    """A server to stop and kill. Others must not meet it afterwards: started again, this one takes objects for buckets that
    do not exist."""
    from tests.s3_server import S3Server, use_server

    with S3Server(tmp_path / "s3") as server:
        use_server(monkeypatch, server.environment)
        yield server


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SlurmCluster]":
    from tests.slurm_cluster import SlurmCluster

    with SlurmCluster(Path(tmp_path_factory.mktemp("slurm"))) as cluster:
        yield cluster
