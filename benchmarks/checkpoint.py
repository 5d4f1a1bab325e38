"""Checkpoints against a plain parallel put and get of the same bytes, to the same server, in the same run.

    python -m benchmarks.checkpoint [--megabytes 500] [--rounds 3] [--folder]

A learner with a policy and its Adam state of that size is saved as a trainer rank does it: copied (the time the trainer is
blocked), written to disk by torch.distributed.checkpoint, digested and uploaded; then fetched, verified, and loaded. Beside
it the same files are put and got by s3fs alone, several parts at a time, nothing digested or verified. Rounds alternate who
is first. Into a real S3 server started for the purpose, or with --folder into a folder (plain: copied and synced).
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
"""A float32 weight and two float32 moments."""
HIDDEN = 768
PARAMETERS_PER_LAYER = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2 + 3 * 4 * HIDDEN)
PART = 16 * 2**20
PARTS_AT_ONCE = 8

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass(frozen=True)
class Round:
    """Seconds of one round."""

    blocked: float
    save: float
    fetch: float
    load: float
    """Includes the fetch."""
    plain_put: float
    plain_get: float


class Bucket:
    """What anybody would write who has s3fs and a list of files."""

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


class Folder:
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
    plain: Bucket | Folder = Bucket(store.uri) if store.uri.startswith("s3") else Folder(store.uri)
    with tempfile.TemporaryDirectory() as scratch:
        mine, theirs, source = (Path(scratch) / name for name in ("mine", "theirs", "source"))
        theirs.mkdir()
        files = learner.snapshot()(source)
        drop_from_page_cache(files)
        uploaded: list[CheckpointRef] = []
        times: dict[str, float] = {}

        def save() -> None:
            snapshot = timed(times, "blocked", learner.snapshot)
            written = snapshot(mine / "saved")
            stored = upload_files(store, mine / "saved", written)
            uploaded.append(CheckpointRef(iteration=0, weights_version=0, weights_digest="", files=tuple(stored)))

        def load() -> None:
            timed(times, "fetch", lambda: download_files(store, uploaded[0], mine / "loaded"))
            learner.load(mine / "loaded")

        steps: list[tuple[str, Callable[[], None]]] = [
            ("save", save),
            ("plain_put", lambda: plain.put(files)),
            ("load", load),
            ("plain_get", lambda: plain.get(files, theirs)),
        ]
        if plain_first:
            steps = [steps[1], steps[0], steps[3], steps[2]]
        for name, step in steps:
            timed(times, name, step)
    return Round(**times)


def timed(times: dict[str, float], name: str, act: Callable[[], object]) -> object:
    start = time.perf_counter()
    answer = act()
    times[name] = time.perf_counter() - start
    return answer


def drop_from_page_cache(files: list[Path]) -> None:
    """Both sides read from a disk that is not warm; where the system does not allow it, both read from memory."""
    for file in files:
        with open(file, "rb") as opened, contextlib.suppress(OSError):
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def learner_of(megabytes: int, folder: Path) -> Learner:
    num_layers = max(1, round(megabytes * 1e6 / BYTES_PER_PARAMETER / PARAMETERS_PER_LAYER))
    learner = Learner(_config(num_layers, folder), rank=0, device=torch.device("cpu"))
    learner.snapshot()  # makes Adam's moments, and the memory that later copies go into
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
    parser.add_argument("--folder", action="store_true", help="into a folder instead of a real S3 server")
    options = parser.parse_args()
    with open_store(options.folder) as store, tempfile.TemporaryDirectory() as scratch:
        learner = learner_of(options.megabytes, Path(scratch))
        files = learner.snapshot()(Path(scratch) / "size")
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        rounds = [measure(learner, store, plain_first=bool(number % 2)) for number in range(options.rounds)]
    print(f"{megabytes:.0f} MB in {len(files)} files, {'a folder' if options.folder else 'S3'}, {options.rounds} rounds")
    print(f"{'':<10} {'seconds':>9} {'MB/s':>7} {'plain MB/s':>11} {'of plain':>9}")
    for name, plain in (("save", "plain_put"), ("fetch", "plain_get"), ("load", "plain_get")):
        ours, theirs = (statistics.median(getattr(each, which) for each in rounds) for which in (name, plain))
        ratio = statistics.median(getattr(each, plain) / getattr(each, name) for each in rounds)
        print(f"{name:<10} {ours:>9.2f} {megabytes / ours:>7.0f} {megabytes / theirs:>11.0f} {ratio:>9.2f}")
    blocked = statistics.median(each.blocked for each in rounds)
    share = statistics.median(each.blocked / each.save for each in rounds)
    print(f"trainer blocked {1000 * blocked:.0f} ms, {share:.1%} of a save")
    return 0


if __name__ == "__main__":
    sys.exit(main())
