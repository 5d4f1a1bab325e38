"""Random damage to stored runs, read by all that commands, recovery and upkeep read: `main(1000)` is half of `make fuzz`.

Each case copies a store of a few small runs, changes it once (bytes, names, sealed content, strays) and reads it in this
process. A finding is a traceback, more than 5 s of CPU time, a value that was read without an error and differs, or garbage
that an undamaged record names. `tests/unit/test_fuzz_stores.py` runs a small number of cases.
"""

import contextlib
import io
import json
import logging
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks import damage
from flows.cli import main as roll
from roll_core.config.operations.legs import NodesConfig
from roll_core.config.operations.services import CheckpointConfig
from roll_core.errors import RollError
from roll_core.rollout.journal import Journal
from roll_core.store.object_store import ObjectStore, object_name
from roll_core.store.records.checkpoints import CheckpointRef, download_files, record_checkpoint, upload_files
from roll_core.store.records.exports import find_export, manifest_to_export, record_export
from roll_core.store.records.nodes import NodeFailure, excluded_nodes, read_failures, record_failure
from roll_core.store.records.rollouts import decode_trajectories, encode_trajectories
from roll_core.store.records.runs import commit, find_run, open_run, read_chain, read_config
from roll_core.store.records.sealed import _seal
from roll_core.store.records.weights import record_weights, recorded_weights
from roll_core.store.upkeep.garbage import find_garbage, longest_grace_minutes
from roll_core.store.upkeep.retention import retire
from roll_core.training.checkpoint_reader import load_checkpoint
from roll_core.types.manifest import Manifest
from roll_core.types.refs import ArtifactKind, ExportRef, StoredBucket, WeightsRef, record_digest
from tasks.recover import restore_trainer

CPU_SECONDS, WALL_SECONDS = 5.0, 120.0
"""Most time to read one damaged store. The wall clock is for readers that sleep; a busy machine may be slow."""
STRAYS = (".DS_Store", ".nfs000000000001", "README", "README.md", "\u00b2", "00000002 copy.json", "\u0663.json", "x.json")
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**30, 1e308, float("nan"), "", "\0", "../../x", "/etc/passwd", "x" * 5000, "\u00b2"),
    *([], {}, [[]], {"kind": "run"}, {"run_id": "fuzz-1", "iteration": 0}),
)
"""Values that take the place of a value in a sealed record."""
DROPPABLE = ("/checkpoints/", "/exports/", "/weights/", "/unfinished/", "/damaged/", "nodes/")
"""Folders from which a record can be missing: it looks as if it had never been written."""

Reader = Callable[[ObjectStore, Path], Any]


class TooSlow(BaseException):
    """Reading took too long. Not an Exception, so that no reader catches it."""


@dataclass(frozen=True)
class Mutation:
    """Change of a store. `names` are the objects that are not as they were written."""

    kind: str
    names: frozenset[str]
    is_forged: bool = False
    """True if the change is sealed: it may be read as if it had been written so."""


class FetchingTrainer:
    """Trainer without a model, which downloads and decodes all that a recovery needs."""

    has_critic, needs_reference, origin = False, True, None

    def __init__(self, store: ObjectStore, folder: Path):
        self._store, self._folder = store, folder
        self.iteration = -1

    def restore(self, checkpoint: CheckpointRef) -> None:
        download_files(self._store, checkpoint, self._folder)
        load_checkpoint({"weight": torch.zeros(4), "step": 0}, self._folder, no_dist=True)
        self.iteration = checkpoint.iteration

    load_reference = restore

    def prepare(self, collected: Any) -> None:
        decode_trajectories(self._store.get(collected.trajectories))

    def update(self, collected: Any) -> SimpleNamespace:
        self.iteration = collected.request.iteration
        return SimpleNamespace(metrics={})


def write_template(folder: Path) -> list[str]:
    """Write a store with two runs, a fork, checkpoints, an export, stored weights, a journal and node failures."""
    store = ObjectStore(f"file://{folder}/store")
    stored = damage.write_runs(store, folder, num_runs=2, num_iterations=5, large_file=1000)
    checkpoint = folder / "dcp"
    dcp.save({"weight": torch.arange(4.0), "step": 3}, checkpoint_id=checkpoint, no_dist=True)
    for run in stored.runs:
        for name in list(store.list(f"runs/{run.run_id}/checkpoints")):
            store.delete(f"runs/{run.run_id}/checkpoints/{name}")
        for manifest in stored.chains[run.run_id]:
            if manifest.iteration % 2 == 0:
                _checkpoint(store, manifest, checkpoint)
    first, chain = stored.runs[0], stored.chains[stored.runs[0].run_id]
    origin = {"run_id": first.run_id, "iteration": 2}
    config = stored.configs[first.run_id].model_copy(update={"name": "fork"}).model_dump() | {"forked_from": origin}
    fork = open_run(store, type(stored.configs[first.run_id]).model_validate(config))
    child = chain[3].model_copy(update={"run_id": fork.run_id, "parent": record_digest(chain[2])})
    commit(store, child)
    files = tuple(upload_files(store, checkpoint, sorted(checkpoint.iterdir()), ArtifactKind.EXPORT_FILE))
    record_export(store, first.run_id, ExportRef(iteration=4, weights_digest=chain[4].weights_digest, files=files))
    artifact = store.put(b"weights", ArtifactKind.WEIGHTS)
    bucket = StoredBucket(number=0, size=7, digest=artifact.digest, artifact=artifact)
    record_weights(
        store,
        WeightsRef(
            run_id=first.run_id,
            version=5,
            weights_digest="",
            base=None,
            layout=artifact,
            buckets=(bucket,),
            check=artifact,
        ),
    )
    rollouts = encode_trajectories(decode_trajectories(store.get(chain[1].collected.trajectories)))
    name = f"runs/{first.run_id}/unfinished/00000000-00000007-{damage.digest_of(rollouts)[:12]}.parquet"
    store.create(name, rollouts)
    for leg in (1, 2):
        at = datetime(2026, 11, 15, 20, leg, tzinfo=UTC)
        record_failure(store, NodeFailure(node="gpu-1", reason="no disk", run_id=first.run_id, leg=leg, at=at))
    return [stored.name for top in ("runs", "objects", "nodes") for stored in store.list_below(top)]


def _checkpoint(store: ObjectStore, manifest: Manifest, folder: Path) -> None:
    files = tuple(upload_files(store, folder, sorted(folder.iterdir())))
    record_checkpoint(
        store,
        manifest.run_id,
        CheckpointRef(
            iteration=manifest.iteration,
            weights_version=manifest.iteration,
            weights_digest=manifest.weights_digest,
            files=files,
        ),
    )


# ---------------------------------------------------------------------------------------------------- mutations


def mutate(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    """Change the copy of a store once, at random."""
    kind = rng.choice(list(MUTATIONS))
    return MUTATIONS[kind](folder, names, rng)


def _write(folder: Path, name: str, data: bytes | None) -> None:
    """Replace a file, which is a hard link to the template's, or delete it."""
    path = folder / name
    path.unlink(missing_ok=True)
    if data is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _flip(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    name = rng.choice(names)
    data = bytearray((folder / name).read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    _write(folder, name, bytes(data))
    return Mutation("flipped bit", frozenset({name}))


def _cut(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    name = rng.choice(names)
    data = (folder / name).read_bytes()
    _write(folder, name, data[: rng.randrange(len(data))])
    return Mutation("cut", frozenset({name}))


def _zero(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    name = rng.choice(names)
    data = (folder / name).read_bytes()
    start = rng.randrange(len(data))
    length = min(len(data) - start, rng.choice([1, 16, 4096]))
    _write(folder, name, data[:start] + b"\0" * length + data[start + length :])
    return Mutation("NULs", frozenset({name}))


def _swap(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    one, other = rng.sample(names, 2)
    first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
    _write(folder, one, second)
    _write(folder, other, first)
    return Mutation("swapped", frozenset({one, other}))


def _copy(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    source, place = rng.choice(names), rng.choice(names)
    number = rng.choice(["00000003", "00000006", "99999999"])
    name = str(Path(place).with_name(f"{number}{Path(source).name[8:]}"))
    _write(folder, name, (folder / source).read_bytes())
    return Mutation("copied", frozenset({name}))


def _delete(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    name = rng.choice(names)
    _write(folder, name, None)
    return Mutation("deleted", frozenset({name}))


def _renumber(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    name = rng.choice([name for name in names if name.startswith("runs/")])
    renamed = str(Path(name).with_name(f"{rng.randrange(12):08d}{Path(name).name[8:]}"))
    data = (folder / name).read_bytes()
    _write(folder, name, None)
    _write(folder, renamed, data)
    return Mutation("renumbered", frozenset({name, renamed}))


def _edit(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    """Change a value of a sealed record, and seal it again in two of three cases."""
    name = rng.choice([name for name in names if name.endswith(".json")])
    sealed = json.loads((folder / name).read_bytes())
    parent, key = rng.choice(list(_places(sealed, "content")))
    parent[key] = rng.choice(ODD_VALUES)
    is_forged = rng.random() < 2 / 3
    content = json.dumps(sealed["content"], indent=1).encode()
    _write(folder, name, _seal(name, content) if is_forged else json.dumps(sealed).encode())
    return Mutation("edited and sealed" if is_forged else "edited", frozenset({name}), is_forged)


def _places(parent: Any, key: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a tree of JSON values, as a container and a key in it."""
    yield parent, key
    value = parent[key]
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for inner in keys:
        yield from _places(value, inner)


def _stray(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    path = (folder / rng.choice([*names, "nodes/x", "runs/x", "objects/x", "nodes/x/y", "runs/x/iterations/y"])).parent
    path = path / rng.choice(STRAYS)
    with contextlib.suppress(FileExistsError, NotADirectoryError):
        path.parent.mkdir(parents=True, exist_ok=True)
        match rng.randrange(4):
            case 0:
                path.symlink_to(path)
            case 1:
                path.symlink_to(folder)
            case 2:
                path.mkdir()
            case _:
                path.write_bytes(b"not a record of roll")
    return Mutation("stray", frozenset())


def _folder_instead(folder: Path, names: list[str], rng: random.Random) -> Mutation:
    name = rng.choice(names)
    _write(folder, name, None)
    (folder / name).mkdir()
    return Mutation("a folder instead", frozenset({name}))


MUTATIONS: dict[str, Callable[[Path, list[str], random.Random], Mutation]] = {
    "flip": _flip,
    "cut": _cut,
    "zero": _zero,
    "swap": _swap,
    "copy": _copy,
    "delete": _delete,
    "renumber": _renumber,
    "edit": _edit,
    "stray": _stray,
    "folder": _folder_instead,
}


# ------------------------------------------------------------------------------------------------------ readers


def readers() -> dict[str, Reader]:
    """Everything that reads a store, by name; the last ones also write to it."""
    run_ids = ("damage-1", "damage-2", "fork-1")
    each: dict[str, Reader] = {}
    for run_id in run_ids:
        each |= {
            f"config {run_id}": lambda store, _, run_id=run_id: read_config(find_run(store, run_id)),
            f"chain {run_id}": lambda store, _, run_id=run_id: read_chain(store, run_id),
            f"artifacts {run_id}": lambda store, _, run_id=run_id: _artifacts(store, run_id),
            f"export {run_id}": lambda store, folder, run_id=run_id: _export(store, run_id, folder),
            f"journal {run_id}": lambda store, _, run_id=run_id: Journal(store, run_id, 5.0).read(),
            f"weights {run_id}": lambda store, _, run_id=run_id: [w.weights for w in recorded_weights(store, run_id)],
            f"show {run_id}": lambda store, _, run_id=run_id: _command("show", run_id, "--store", store.uri),
        }
    each |= {
        "runs": lambda store, _: _command("runs", "--store", store.uri),
        "nodes": lambda store, _: _command("nodes", "--store", store.uri),
        "failures": lambda store, _: read_failures(store),
        "excluded": lambda store, _: excluded_nodes(store, NodesConfig(), datetime(2026, 11, 15, 21, tzinfo=UTC)),
        "grace": lambda store, _: longest_grace_minutes(store),
        "gc": lambda store, _: _command("gc", "--dry-run", "--older-than", "0", "--store", store.uri),
    }
    for run_id in run_ids:
        each |= {
            f"recover {run_id}": lambda store, folder, run_id=run_id: _recover(store, run_id, folder),
            f"retire {run_id}": lambda store, _, run_id=run_id: retire(
                store, run_id, CheckpointConfig(keep_last=99), grace_seconds=0.0
            ),
        }
    return each


def _command(*arguments: str) -> str:
    """Run a command of `roll`. Its text is not compared: it may say what is damaged."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = roll(arguments)
    assert code in {0, 1, 2}, f"exit code {code}"
    return ""


def _artifacts(store: ObjectStore, run_id: str) -> list[bytes]:
    return [store.get(artifact) for manifest in read_chain(store, run_id) for artifact in manifest.artifacts]


def _export(store: ObjectStore, run_id: str, folder: Path) -> bytes:
    export = find_export(store, manifest_to_export(store, run_id, 4 if run_id == "damage-1" else None))
    if export is None:
        return b""
    download_files(store, export, folder)
    return b"".join((folder / file.name).read_bytes() for file in export.files)


def _recover(store: ObjectStore, run_id: str, folder: Path) -> int:
    """Recover a run; return the iteration that the trainer has reached."""
    trainer = FetchingTrainer(store, folder)
    restore_trainer(read_chain(store, run_id), store, trainer)  # type: ignore[arg-type]
    return trainer.iteration


# ------------------------------------------------------------------------------------------------------- judging


class Fuzzer:
    """Template of a store, and the verdict on changed copies of it."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.names = write_template(folder)
        self._readers = readers()
        with self._copy() as store:
            self._expected = {name: read(store, folder / "out") for name, read in self._readers.items()}
            self._named = _named_by_record(store)
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def try_one(self, seed: int) -> list[str]:
        """Change a copy and read it; return the findings, each with the seed that repeats it."""
        with self._copy() as store:
            mutation = mutate(Path(store.uri.removeprefix("file://")), self.names, random.Random(seed))
            findings = [*self._garbage_findings(store, mutation)]
            refused = False
            for name, read in self._readers.items():
                verdict = self._verdict(name, read, store, mutation)
                refused |= verdict == "refused"
                if verdict not in {"", "refused"}:
                    findings.append(f"{name}: {verdict}")
        outcome = "FINDING" if findings else "refused" if refused else "read the same, or as not written"
        self.outcomes[mutation.kind, outcome] += 1
        return [f"seed {seed}, {mutation.kind} {sorted(mutation.names)}: {finding}" for finding in findings]

    def _verdict(self, name: str, read: Reader, store: ObjectStore, mutation: Mutation) -> str:
        try:
            with time_limit():
                value = read(store, self._folder / "out")
        except RollError as error:
            return "refused" if "\n" not in str(error) else f"an error of several lines: {error}"
        except TooSlow:
            return "takes too long"
        except (Exception, SystemExit) as error:
            return f"traceback {type(error).__name__}: {error}"
        if value == self._expected[name] or mutation.is_forged or self._may_be_missing(mutation):
            return ""
        if name.startswith("journal") and any("/unfinished/" in each for each in mutation.names):
            return ""  # a damaged part of the journal is generated again, by design
        return "damage was read without an error"

    def _may_be_missing(self, mutation: Mutation) -> bool:
        """True if only records that may be missing, or newest manifests, are no longer under their names."""
        gone = mutation.kind in {"deleted", "renumbered"}
        newest = {"runs/damage-1/iterations/00000005.json", "runs/damage-2/iterations/00000005.json"}
        newest |= {"runs/fork-1/iterations/00000003.json"}
        return gone and all(name in newest or any(part in name for part in DROPPABLE) for name in mutation.names)

    def _garbage_findings(self, store: ObjectStore, mutation: Mutation) -> Iterator[str]:
        try:
            with time_limit():
                garbage = {stored.name for stored in find_garbage(store, 0.0)}
        except RollError:
            return
        except TooSlow:
            yield "garbage: takes too long"
            return
        except Exception as error:
            yield f"garbage: traceback {type(error).__name__}: {error}"
            return
        for record, objects in self._named.items():
            if record not in mutation.names and objects & garbage:
                yield f"garbage: collected what {record} names"

    @contextlib.contextmanager
    def _copy(self) -> Iterator[ObjectStore]:
        """Copy the template, by hard links."""
        copy = self._folder / "copy"
        shutil.copytree(self._folder / "store", copy, copy_function=os.link)
        try:
            yield ObjectStore(f"file://{copy}")
        finally:
            shutil.rmtree(copy)
            shutil.rmtree(self._folder / "out", ignore_errors=True)


def _named_by_record(store: ObjectStore) -> dict[str, set[str]]:
    """Objects that each checkpoint record and manifest of the template names."""
    named: dict[str, set[str]] = {}
    for run_id in ("damage-1", "damage-2"):
        for manifest in read_chain(store, run_id):
            name = f"runs/{run_id}/iterations/{manifest.iteration:08d}.json"
            named[name] = {object_name(artifact) for artifact in manifest.artifacts}
    return named


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise TooSlow in the block after `CPU_SECONDS` of CPU time, or `WALL_SECONDS`."""

    def stop(*_: object) -> None:
        raise TooSlow

    before = [signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


def try_many(folder: Path, number: int, first_seed: int = 0) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Try `number` cases; return how often each kind of change had each outcome, and all findings."""
    fuzzer = Fuzzer(folder)
    findings = [finding for seed in range(first_seed, first_seed + number) for finding in fuzzer.try_one(seed)]
    return fuzzer.outcomes, findings


def main(number: int) -> None:
    """Try `number` cases and print a table; exit with 1 if there is a finding."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="roll-fuzz-") as folder:
        outcomes, findings = try_many(Path(folder), number)
    print(f"stores: {number} changes of stored runs\n{'change':<20} {'outcome':<34} {'times':>5}")
    for (kind, outcome), times in sorted(outcomes.items()):
        print(f"{kind:<20} {outcome:<34} {times:>5}")
    print("\n".join(findings[:40]))
    if findings:
        raise SystemExit(1)
