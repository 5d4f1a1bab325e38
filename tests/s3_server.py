"""Real S3 server (SeaweedFS, one process) for tests and benchmarks. It uses free ports and can be paused, killed, restarted.

Example:
    with S3Server(folder) as server:
        os.environ.update(server.environment)
        store = ObjectStore(server.new_store_uri())
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Self

import botocore.session
import fsspec

from tests.support import free_ports, patience

if TYPE_CHECKING:
    import pytest

ACCESS_KEY, SECRET_KEY = "roll-test-key", "roll-test-secret"
OWNER_KEY = "roll-owner-key"
"""Access key that creates buckets. With it, a write to a missing bucket would create the bucket and hide a mistake, so tests
use another key."""
BUCKET = "roll"
START_SECONDS = 120.0
"""Most seconds that a start may take; a loaded machine with two cores took 30."""


class S3Server:
    """Process `weed server` with a master, a volume, a filer and an S3 gateway on 127.0.0.1, and its data in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._ports = free_ports(8)
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def port(self) -> int:
        """Port of the S3 gateway."""
        return self._ports[6]

    @property
    def environment(self) -> dict[str, str]:
        """AWS environment variables that direct clients to this server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def new_store_uri(self) -> str:
        """Address of an empty store, different at every call."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"

    def __enter__(self) -> Self:
        self.start()
        _make_bucket(self.environment)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self.kill()

    def start(self) -> None:
        """Start the server on the same ports and data as before, and wait until it is ready."""
        if self._closed:
            return  # a restart scheduled by a test that has ended
        self._folder.mkdir(parents=True, exist_ok=True)
        keys = self._folder / "keys.json"
        keys.write_text(json.dumps(_IDENTITIES))
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(self._command(keys), stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + patience(START_SECONDS)
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the S3 server did not start:\n{(self._folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the server with SIGKILL, like a power cut. Acknowledged writes are on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the process with SIGSTOP: the kernel accepts connections, but nothing responds."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process after `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def _is_ready(self) -> bool:
        """True if gateway and filer respond. The gateway is up first, but cannot serve a listing without the filer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/status")
            if connection.getresponse().status != 200:
                return False
            filer = http.client.HTTPConnection("127.0.0.1", self._ports[4], timeout=5)
            filer.request("GET", "/?limit=1", headers={"Accept": "application/json"})
            return filer.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _command(self, keys: Path) -> list[str]:
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = self._ports
        return [
            str(Path(sys.executable).with_name("weed")),
            *("-logtostderr=true", "server", f"-dir={self._folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-master.telemetry=false", f"-master.port={master}", f"-master.port.grpc={master_grpc}"),
            *("-master.volumeSizeLimitMB=1024", "-master.electionTimeout=1s"),
            *(f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}", "-volume.preStopSeconds=1", "-volume.max=0"),
            *("-filer", f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}"),
            *("-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-s3.iam=false", f"-s3.config={keys}"),
        ]


_IDENTITIES = {
    "identities": [
        {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Read", "Write", "List"],
        },
        {
            "name": "owner",
            "credentials": [{"accessKey": OWNER_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin"],
        },
    ]
}


def use_server(monkeypatch: "pytest.MonkeyPatch", environment: dict[str, str]) -> None:
    """Direct this process to a server. Clears the cache of s3fs, whose clients would keep the settings of another server."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def _make_bucket(environment: dict[str, str]) -> None:
    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=OWNER_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=environment["AWS_DEFAULT_REGION"],
    )
    client.create_bucket(Bucket=BUCKET)
