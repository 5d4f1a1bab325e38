"""Share of damaged store objects that a run detects, and whether damaged data is ever loaded.

    python -m benchmarks.damage [--damages 1000] [--seed 0] [--s3]

Needs a CPU; with --s3 also the packages of `make setup-test`. Writes a few runs (configs, manifests, trajectories as
Parquet, checkpoint files small and large) into a folder, or with --s3 into a real S3 server started here. Then, many times:
damages one random object (a flipped bit, truncation, deletion, or a swap with another object), reads everything through the
functions that a run uses, and repairs the object. Prints, by kind of object and of damage, how often the damage was detected
(an error names the object), harmless (and why), or loaded silently. Exits with 1 if anything was loaded silently, or failed
without an error sentence that names the object. `tests/contracts/test_damage.py` runs a small version.
"""

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from roll_core.config.load import validate_config
from roll_core.config.run import RunConfig
from roll_core.errors import RollError
from roll_core.store.media.medium import PART_SIZE
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import checkpoints_of, download_files, record_checkpoint, upload_files
from roll_core.store.records.rollouts import encode_trajectories
from roll_core.store.records.runs import commit, find_run, open_run, read_chain, read_config
from roll_core.types.manifest import NO_PARENT, Collected, CollectRequest, Draws, Evaluated, Manifest
from roll_core.types.refs import ArtifactKind, ArtifactRef, CheckpointRef, RunRef, digest_of, record_digest
from roll_core.types.trajectory import Ending, Score, Trajectory, Turn

CHECKPOINT_EVERY = 4
LARGE_FILE = PART_SIZE + 2**20
"""Bytes of the largest checkpoint file: two parts of a multi-part read, so that such reads meet damage too."""


class Damage(StrEnum):
    """Change to the bytes of one object, or of two."""

    FLIP = "flipped bit"
    CUT = "cut"
    DELETE = "deleted"
    SWAP = "swapped"


class Outcome(StrEnum):
    """Result of reading a damaged store; the value is printed."""

    DETECTED = "detected"
    REDONE = "harmless: the newest iteration is done again, or an older checkpoint loaded"
    SAME = "harmless: the data read is the same"
    NOT_NAMED = "detected, but the error does not name the object"
    CRASHED = "an exception without an error sentence"
    SILENT = "loaded silently"


ACCEPTED = {Outcome.DETECTED, Outcome.REDONE, Outcome.SAME}


@dataclass(frozen=True)
class Stored:
    """Runs of a store as they were written, and the names of all their objects."""

    runs: tuple[RunRef, ...]
    configs: dict[str, RunConfig]
    chains: dict[str, list[Manifest]]
    checkpoints: dict[str, list[CheckpointRef]]
    names: tuple[str, ...]

    @property
    def newest_manifests(self) -> set[str]:
        return {f"runs/{run_id}/iterations/{chain[-1].iteration:08d}.json" for run_id, chain in self.chains.items()}


@dataclass
class Findings:
    """Result of reading a whole store: errors, crashes, and differences from what was written. Empty if undamaged."""

    errors: list[str] = field(default_factory=list)
    """Messages of `RollError`s."""
    crashes: list[str] = field(default_factory=list)
    """Exceptions of any other type."""
    differences: list[str] = field(default_factory=list)
    """Labels of data that was read without an error, but differs."""
    shortened_runs: set[str] = field(default_factory=set)
    """Runs whose newest manifest was not found."""
    runs_with_fewer_checkpoints: set[str] = field(default_factory=set)


def write_runs(store: ObjectStore, scratch: Path, num_runs: int, num_iterations: int, large_file: int) -> Stored:
    """Write runs with a checkpoint every `CHECKPOINT_EVERY` iterations; the first one has a file of `large_file` bytes."""
    rng = random.Random(0)
    refs: list[RunRef] = []
    configs: dict[str, RunConfig] = {}
    chains: dict[str, list[Manifest]] = {}
    checkpoints: dict[str, list[CheckpointRef]] = {}
    for number in range(num_runs):
        config = _config(store.uri, seed=number)
        run = open_run(store, config)
        refs.append(run)
        configs[run.run_id] = config
        chain: list[Manifest] = []
        checkpoints[run.run_id] = []
        for iteration in range(num_iterations + 1):
            chain.append(_manifest(store, run, chain, rng))
            if iteration % CHECKPOINT_EVERY == 0:
                size = large_file if (number, iteration) == (0, 0) else 40_000
                checkpoints[run.run_id].append(_put_checkpoint(store, chain[-1], scratch, size, rng))
            commit(store, chain[-1])
        chains[run.run_id] = chain
    objects = [f"objects/{prefix}/{name}" for prefix in store.list("objects") for name in store.list(f"objects/{prefix}")]
    records = [f"runs/{run.run_id}/config.json" for run in refs]
    for folder in (f"runs/{run.run_id}/{part}" for run in refs for part in ("iterations", "checkpoints")):
        records += [f"{folder}/{name}" for name in store.list(folder)]
    return Stored(tuple(refs), configs, chains, checkpoints, (*objects, *records))


def try_damages(
    store: ObjectStore, stored: Stored, scratch: Path, count: int, seed: int
) -> Counter[tuple[str, Damage, Outcome]]:
    """Damage, read everything and repair, `count` times. Return the number of outcomes by kind of object and of damage."""
    rng = random.Random(seed)
    outcomes: Counter[tuple[str, Damage, Outcome]] = Counter()
    for _ in range(count):
        name, damage = rng.choice(stored.names), rng.choice(list(Damage))
        originals = {name: store.read(name)}
        if damage is Damage.SWAP:
            other = rng.choice([candidate for candidate in stored.names if candidate != name])
            originals[other] = store.read(other)
        for damaged, data in damaged_bytes(originals, damage, rng).items():
            replace(store, damaged, data)
        outcome = judge(read_everything(store, stored, scratch), set(originals), damage, stored)
        outcomes[object_kind(name), damage, outcome] += 1
        for original, data in originals.items():
            replace(store, original, data)
    return outcomes


def damaged_bytes(originals: dict[str, bytes], damage: Damage, rng: random.Random) -> dict[str, bytes | None]:
    """New bytes of each original object; None deletes it."""
    (name, data), *others = originals.items()
    match damage:
        case Damage.FLIP:
            position = rng.randrange(len(data))
            return {name: data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]}
        case Damage.CUT:
            return {name: data[: rng.randrange(len(data))]}
        case Damage.DELETE:
            return {name: None}
        case Damage.SWAP:
            ((other, other_data),) = others
            return {name: other_data, other: data}


def read_everything(store: ObjectStore, stored: Stored, scratch: Path) -> Findings:
    """Read all runs through the functions that a run uses, and compare with what was written.

    Reads the config by the run's name and by its ref, the chain, checkpoint records, and every artifact as bytes or files.
    """
    found = Findings()
    for run in stored.runs:
        chain = stored.chains[run.run_id]
        _read(found, lambda run=run: read_config(find_run(store, run.run_id)), stored.configs[run.run_id], run.run_id)
        _read(found, lambda run=run: read_config(run), stored.configs[run.run_id], run.run_id)
        _read_chain(found, store, run.run_id, chain)
        _read_checkpoint_records(found, store, run.run_id, stored)
        for manifest in chain:
            for ref in manifest.artifacts:
                _read(found, lambda ref=ref: digest_of(store.get(ref)), ref.digest, ref.digest)
        for checkpoint in stored.checkpoints[run.run_id]:
            _read_checkpoint(found, store, checkpoint, scratch / "restored")
    return found


def judge(found: Findings, damaged: set[str], damage: Damage, stored: Stored) -> Outcome:
    """Outcome of reading a store in which the objects `damaged` were damaged.

    Two deletions are harmless. Without its newest manifest a run repeats that iteration. Without a checkpoint record it
    resumes from an older checkpoint.
    """
    if found.crashes:
        return Outcome.CRASHED
    newest_deleted = damage is Damage.DELETE and damaged <= stored.newest_manifests
    record_deleted = damage is Damage.DELETE and all("/checkpoints/" in name for name in damaged)
    if found.differences or (found.shortened_runs and not newest_deleted):
        return Outcome.SILENT
    if found.runs_with_fewer_checkpoints and not (record_deleted or newest_deleted):
        return Outcome.SILENT
    if found.shortened_runs or found.runs_with_fewer_checkpoints:
        return Outcome.REDONE
    if not found.errors:
        return Outcome.SAME
    return Outcome.DETECTED if any(name in error for name in damaged for error in found.errors) else Outcome.NOT_NAMED


def object_kind(name: str) -> str:
    """Kind of an object, as printed in the table."""
    if name.startswith("objects/"):
        return "artifact"
    if name.endswith("/config.json"):
        return "config"
    return "checkpoint record" if "/checkpoints/" in name else "manifest"


def replace(store: ObjectStore, name: str, data: bytes | None) -> None:
    """Overwrite an object, or delete it if `data` is None."""
    store.delete(name)
    if data is not None:
        store.create(name, data)


def _read(found: Findings, read: Callable[[], object], expected: object, label: str) -> None:
    try:
        if read() != expected:
            found.differences.append(label)
    except RollError as error:
        found.errors.append(str(error))
    except Exception as error:  # noqa: BLE001  any other exception is a crash, not an error sentence
        found.crashes.append(f"{label}: {error!r}")


def _read_chain(found: Findings, store: ObjectStore, run_id: str, written: list[Manifest]) -> None:
    def read() -> list[Manifest]:
        chain = read_chain(store, run_id)
        if chain == written[:-1]:
            found.shortened_runs.add(run_id)
            return written
        return chain

    _read(found, read, written, run_id)


def _read_checkpoint_records(found: Findings, store: ObjectStore, run_id: str, stored: Stored) -> None:
    written = stored.checkpoints[run_id]

    def read() -> list[CheckpointRef]:
        recorded = checkpoints_of(store, stored.chains[run_id])
        if len(recorded) < len(written) and all(checkpoint in written for checkpoint in recorded):
            found.runs_with_fewer_checkpoints.add(run_id)
            return written
        return recorded

    _read(found, read, written, f"checkpoints of {run_id}")


def _read_checkpoint(found: Findings, store: ObjectStore, checkpoint: CheckpointRef, folder: Path) -> None:
    def read() -> list[str]:
        download_files(store, checkpoint, folder)
        return [digest_of((folder / file.name).read_bytes()) for file in checkpoint.files]

    for file in checkpoint.files:
        (folder / file.name).unlink(missing_ok=True)
    _read(found, read, [file.artifact.digest for file in checkpoint.files], "checkpoint")


def _manifest(store: ObjectStore, run: RunRef, chain: list[Manifest], rng: random.Random) -> Manifest:
    """Build the next manifest with rollouts and a trace; every `CHECKPOINT_EVERY` iterations with an evaluation."""
    iteration, due = len(chain), len(chain) % CHECKPOINT_EVERY == 0
    parent = record_digest(chain[-1]) if chain else NO_PARENT
    request = CollectRequest(
        iteration=iteration, parent=parent, weights_version=iteration, first_problem=8 * iteration, num_groups=8
    )
    collected = Collected(
        request=request,
        trajectories=_put_trajectories(store, rng),
        num_trajectories=32,
        num_failed=0,
        num_tokens=320,
        draws=Draws(first=request.first_problem, outcomes="t" * 8),
        trace=store.put(rng.randbytes(64), ArtifactKind.TRACE),
        metrics={"reward/mean": rng.random()},
    )
    return Manifest(
        run_id=run.run_id,
        iteration=iteration,
        parent=parent,
        config_digest=run.config_digest,
        leg=1,
        weights_version=iteration,
        next_problem=8 * (iteration + 1),
        collected=collected,
        evaluated=_evaluated(store, iteration, rng) if due else None,
        weights_digest=digest_of(rng.randbytes(8)),
        metrics=collected.metrics,
        timings={"wall": rng.random()},
        committed_at="2026-11-15T09:30:00+00:00",
    )


def _evaluated(store: ObjectStore, iteration: int, rng: random.Random) -> Evaluated:
    return Evaluated(
        weights_version=iteration, num_problems=32, accuracy=rng.random(), trajectories=_put_trajectories(store, rng)
    )


def _put_trajectories(store: ObjectStore, rng: random.Random) -> ArtifactRef:
    return store.put(
        encode_trajectories([_trajectory(group, attempt, rng) for group in range(8) for attempt in range(4)]),
        ArtifactKind.TRAJECTORIES,
    )


def _trajectory(group: int, attempt: int, rng: random.Random) -> Trajectory:
    turn = Turn(
        prompt_ids=tuple(rng.randrange(1000) for _ in range(8)),
        completion_ids=tuple(rng.randrange(1000) for _ in range(10)),
        sampler_logprobs=tuple(-rng.random() for _ in range(10)),
        weights_versions=(0,) * 10,
        text="an answer",
    )
    score = Score(rng.random(), correct=False)
    return Trajectory(f"sort/train/{group}", "sort", group, attempt, (turn,), Ending.STOP, score, None)


def _put_checkpoint(store: ObjectStore, manifest: Manifest, scratch: Path, size: int, rng: random.Random) -> CheckpointRef:
    folder = scratch / "checkpoint"
    files = [folder / name for name in ("__0_0.distcp", "__1_0.distcp", ".metadata")]
    for file, file_size in zip(files, (size, 40_000, 900), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(rng.randbytes(file_size))
    uploaded = upload_files(store, folder, files)
    checkpoint = CheckpointRef(
        iteration=manifest.iteration,
        weights_version=manifest.iteration,
        weights_digest=manifest.weights_digest,
        files=tuple(uploaded),
    )
    record_checkpoint(store, manifest.run_id, checkpoint)
    return checkpoint


def _config(store_uri: str, seed: int) -> RunConfig:
    sections = {
        "name": "damage",
        "seed": seed,
        "iterations": 8,
        "model": {"kind": "scratch", "max_positions": 32},
        "problems": {"kind": "arithmetic", "puzzle": "sort", "digits": 3},
        "reward": {"kind": "exact_match"},
        "rollout": {"num_groups": 8, "group_size": 4, "max_new_tokens": 10},
        "training": {"optimizer": {"learning_rate": 1e-3}},
        "store": {"uri": store_uri},
    }
    return validate_config(sections, "damage")


def print_table(outcomes: Counter[tuple[str, Damage, Outcome]]) -> None:
    print(f"{'object':<18} {'damage':<12} {'outcome':<76} {'times':>5}")
    for (kind, damage, outcome), times in sorted(outcomes.items()):
        print(f"{kind:<18} {damage:<12} {outcome:<76} {times:>5}")
    print()
    for outcome in Outcome:
        print(f"{outcome:<76} {sum(times for (_, _, each), times in outcomes.items() if each is outcome):>5}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--s3", action="store_true", help="store on a real S3 server instead of in a folder")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        uri = f"file://{folder}/store"
        if options.s3:
            from tests.s3_server import S3Server

            server = stack.enter_context(S3Server(folder / "s3"))
            os.environ.update(server.environment)
            uri = server.new_store_uri()
        store = ObjectStore(uri)
        stored = write_runs(store, folder, num_runs=3, num_iterations=8, large_file=LARGE_FILE)
        undamaged = read_everything(store, stored, folder)
        assert undamaged == Findings(), undamaged
        print(f"{options.damages} damages to {len(stored.names)} objects of {len(stored.runs)} runs in {uri}\n")
        outcomes = try_damages(store, stored, folder, options.damages, options.seed)
        assert read_everything(store, stored, folder) == Findings()
    print_table(outcomes)
    return 0 if {outcome for _, _, outcome in outcomes} <= ACCEPTED else 1


if __name__ == "__main__":
    sys.exit(main())
