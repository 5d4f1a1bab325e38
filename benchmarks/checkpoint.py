"""Throughput of saving and loading a checkpoint, against a plain parallel upload and download of the same files.

    python -m benchmarks.checkpoint [--megabytes 500] [--rounds 3] [--folder]

Needs a CPU and the packages of `make setup-test`. A learner whose policy and Adam state have the given size is saved as a
trainer rank saves it: a snapshot (while the trainer is blocked), files written by torch.distributed.checkpoint, digests,
upload. Then the checkpoint is downloaded, verified and loaded. The plain side puts and gets the same files with s3fs,
several parts at a time, without digests. The two sides take turns in being first. The store is a real S3 server started
here, or with --folder a folder (plain side: copy and fsync).
"""

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import s3fs
import torch

from roll_core.config.load import validate_config
from roll_core.config.run import RunConfig
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import download_files, upload_files
from roll_core.training.learner import Learner
from roll_core.types.refs import CheckpointRef
from tests.s3_server import S3Server

BYTES_PER_PARAMETER = 12
"""Size of a float32 weight and Adam's two float32 moments."""
HIDDEN = 768
PARAMETERS_PER_LAYER = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2 + 3 * 4 * HIDDEN)
PART = 16 * 2**20
PARTS_AT_ONCE = 8

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass(frozen=True)
class Round:
    """Seconds of each step of one round."""

    blocked: float
    """Seconds of the snapshot, which blocks the trainer; included in `save`."""
    save: float
    fetch: float
    """Seconds of download and verification; included in `load`."""
    load: float
    plain_put: float
    plain_get: float


class PlainBucket:
    """Plain side on S3: parallel put and get of a list of files with s3fs."""

    def __init__(self, uri: str):
        self._base = f"{uri.removeprefix('s3://')}/plain-{uuid.uuid4().hex}"
        self._fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)

    def put(self, files: list[Path]) -> None:
        names = [f"{self._base}/{file.name}" for file in files]
        self._fs.put([str(file) for file in files], names, chunksize=PART, max_concurrency=PARTS_AT_ONCE)

    def get(self, files: list[Path], folder: Path) -> None:
        for file in files:
            name, size = f"{self._base}/{file.name}", file.stat().st_size
            starts = list(range(0, size, PART))
            ends = [min(start + PART, size) for start in starts]
            parts = self._fs.cat_ranges([name] * len(starts), starts, ends, batch_size=PARTS_AT_ONCE)
            with open(folder / file.name, "wb") as whole:
                whole.writelines(parts)


class PlainFolder:
    """Plain side on a folder: copy and fsync."""

    def __init__(self, uri: str):
        self._base = Path(uri.removeprefix("file://")) / f"plain-{uuid.uuid4().hex}"

    def put(self, files: list[Path]) -> None:
        self._base.mkdir(parents=True)
        for file in files:
            shutil.copyfile(file, self._base / file.name)
            with open(self._base / file.name, "rb") as copied:
                os.fsync(copied.fileno())

    def get(self, files: list[Path], folder: Path) -> None:
        for file in files:
            shutil.copyfile(self._base / file.name, folder / file.name)


def measure(learner: Learner, store: ObjectStore, plain_first: bool) -> Round:
    """Time one save and load of the learner, and one plain put and get of the same files."""
    plain: PlainBucket | PlainFolder = PlainBucket(store.uri) if store.uri.startswith("s3") else PlainFolder(store.uri)
    with tempfile.TemporaryDirectory() as scratch:
        own, plain_copy, source = (Path(scratch) / name for name in ("own", "plain", "source"))
        plain_copy.mkdir()
        files = learner.snapshot()(source)
        drop_from_page_cache(files)
        uploaded: list[CheckpointRef] = []
        times: dict[str, float] = {}

        def save() -> None:
            snapshot = timed(times, "blocked", learner.snapshot)
            written = snapshot(own / "saved")
            stored = upload_files(store, own / "saved", written)
            uploaded.append(CheckpointRef(iteration=0, weights_version=0, weights_digest="", files=tuple(stored)))

        def load() -> None:
            timed(times, "fetch", lambda: download_files(store, uploaded[0], own / "loaded"))
            learner.load(own / "loaded")

        steps: list[tuple[str, Callable[[], None]]] = [
            ("save", save),
            ("plain_put", lambda: plain.put(files)),
            ("load", load),
            ("plain_get", lambda: plain.get(files, plain_copy)),
        ]
        if plain_first:
            steps = [steps[1], steps[0], steps[3], steps[2]]
        for name, step in steps:
            timed(times, name, step)
    return Round(**times)


def timed(times: dict[str, float], name: str, act: Callable[[], object]) -> object:
    """Call `act`, note its seconds under `name`, and return its result."""
    start = time.perf_counter()
    result = act()
    times[name] = time.perf_counter() - start
    return result


def drop_from_page_cache(files: list[Path]) -> None:
    """Drop files from the page cache, so that both sides read from disk; where the system refuses, both read from memory."""
    for file in files:
        with open(file, "rb") as opened, contextlib.suppress(OSError):
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def build_learner(megabytes: int, folder: Path) -> Learner:
    """Build a learner whose checkpoint has about this size in MB (1e6 bytes)."""
    num_layers = max(1, round(megabytes * 1e6 / BYTES_PER_PARAMETER / PARAMETERS_PER_LAYER))
    learner = Learner(_config(num_layers, folder), rank=0, device=torch.device("cpu"))
    learner.snapshot()  # allocates Adam's moments, and the host buffers that later snapshots reuse
    return learner


def _config(num_layers: int, folder: Path) -> RunConfig:
    sections = {
        "name": "checkpoint",
        "iterations": 1,
        "model": {
            "kind": "scratch",
            "hidden_size": HIDDEN,
            "intermediate_size": 4 * HIDDEN,
            "num_layers": num_layers,
            "num_heads": 12,
            "num_kv_heads": 6,
            "max_positions": 32,
        },
        "rollout": {"max_new_tokens": 16},
        "store": {"uri": str(folder)},
    }
    return validate_config(sections, "checkpoint")


@contextlib.contextmanager
def open_store(in_folder: bool) -> Iterator[ObjectStore]:
    """Open an empty store, in a temporary folder or on an S3 server that lives as long as this context."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if in_folder:
            yield ObjectStore(f"file://{folder}/store")
            return
        server = stack.enter_context(S3Server(folder / "s3"))
        os.environ.update(server.environment)
        yield ObjectStore(server.new_store_uri())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", action="store_true", help="store in a folder instead of a real S3 server")
    options = parser.parse_args()
    with open_store(options.folder) as store, tempfile.TemporaryDirectory() as scratch:
        learner = build_learner(options.megabytes, Path(scratch))
        files = learner.snapshot()(Path(scratch) / "size")
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        rounds = [measure(learner, store, plain_first=bool(number % 2)) for number in range(options.rounds)]
    print(f"{megabytes:.0f} MB in {len(files)} files, {'a folder' if options.folder else 'S3'}, {options.rounds} rounds")
    print(f"{'median':<10} {'seconds':>9} {'MB/s':>7} {'plain MB/s':>11} {'of plain':>9}")
    for name, plain in (("save", "plain_put"), ("fetch", "plain_get"), ("load", "plain_get")):
        own_s, plain_s = (statistics.median(getattr(each, step) for each in rounds) for step in (name, plain))
        ratio = statistics.median(getattr(each, plain) / getattr(each, name) for each in rounds)
        print(f"{name:<10} {own_s:>9.2f} {megabytes / own_s:>7.0f} {megabytes / plain_s:>11.0f} {ratio:>9.2f}")
    blocked = statistics.median(each.blocked for each in rounds)
    share = statistics.median(each.blocked / each.save for each in rounds)
    print(f"trainer blocked {1000 * blocked:.0f} ms, {share:.1%} of a save")
    return 0


if __name__ == "__main__":
    sys.exit(main())
