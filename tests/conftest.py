"""Services of several suites, started once per test process: a real S3 server with ordinary AWS settings, a real SLURM.

Also the order of tests: `make test` runs two processes, and a file's tests run in one of them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.s3_server import S3Server
    from tests.slurm_cluster import SlurmCluster


GROUPS = {
    "slurm": (
        "tests/contracts/test_launchers.py",
        "tests/integration/test_deployment.py",
        "tests/integration/test_elastic.py",
        "tests/integration/test_slurm.py",
    ),
    "ranks": (
        "tests/contracts/test_lora.py",
        "tests/contracts/test_megatron_layouts.py",
        "tests/contracts/test_megatron_weights.py",
        "tests/contracts/test_mismatch.py",
        "tests/contracts/test_routers.py",
        "tests/contracts/test_training_backend.py",
        "tests/megatron/test_all_layouts.py",
    ),
}
"""Files that run in the same process, one after another. Tests on SLURM check that no SLURM process is left on this machine.
Tests that start ranks share a fork server, which takes longer to import everything than most of them take."""
GROUP_OF = {file: name for name, files in GROUPS.items() for file in files}
LONGEST_FIRST = (*GROUPS["slurm"], "tests/integration/", "tests/contracts/test_inference_engine.py", *GROUPS["ranks"])
"""Beginnings of test ids, in the order in which they run; the rest follows."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by file; files of a group go to the same process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return GROUP_OF.get(file, file)

        def _reschedule(self, node: Any) -> None:
            """Assign a process its next file before its last test begins, which needs a successor.

            xdist assigns it one test earlier. Where tests take minutes, one process would then have two files left while
            the other has none.
            """
            if self.workqueue and self._pending_of(self.assigned_work[node]) > 1:
                return
            super()._reschedule(node)

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that the two processes end at about the same time."""
    items.sort(key=lambda item: next((i for i, begin in enumerate(LONGEST_FIRST) if item.nodeid.startswith(begin)), 99))


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
    """S3 server of one test, which may stop and kill it. SeaweedFS, started again, accepts objects for missing buckets."""
    from tests.s3_server import S3Server, use_server

    with S3Server(tmp_path / "s3") as server:
        use_server(monkeypatch, server.environment)
        yield server


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SlurmCluster]":
    from tests.slurm_cluster import SlurmCluster

    with SlurmCluster(Path(tmp_path_factory.mktemp("slurm"))) as cluster:
        yield cluster
