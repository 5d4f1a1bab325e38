"""Runs in the store: opened once, found by name, advanced by committing manifests.

No object says which manifest is the newest: readers derive it from a listing.
"""

import re
import sys
from functools import partial

from roll_core.config.load import validate_config
from roll_core.config.run import RunConfig
from roll_core.errors import ArtifactDamaged, IterationTaken, UserError
from roll_core.store.media.medium import map_in_order
from roll_core.store.object_store import AlreadyExists, ObjectStore
from roll_core.store.records.listing import ITERATION, list_matching, warn_of_strays
from roll_core.store.records.sealed import create_sealed, read_record, read_sealed
from roll_core.store.records.stored_config import NamedCheckpoint, config_name, parse_config_json, parse_stored_config
from roll_core.types.manifest import NO_PARENT, Manifest
from roll_core.types.names import is_run_id
from roll_core.types.refs import Record, RunRef, digest_of, record_digest, record_json

MANIFESTS_IN_FLIGHT = 16
"""Manifests read at once. One after another, 1,000 of them would take 20 s from a store with 20 ms latency."""

_NUMBERED = re.compile(r".+-(job)?[0-9]+")
"""Run ids as `open_run` and the scripts of `roll sbatch` make them. Others are given by hand."""


def open_run(store: ObjectStore, config: RunConfig) -> RunRef:
    """Open a run NAME-N: claim the next free number N under the config's name by storing the resolved config."""
    config_json = config.model_dump_json(indent=1).encode()
    number = 1 + max((_run_number(run_id, config.name) for run_id in list_runs(store)), default=0)
    while True:
        run_id = f"{config.name}-{number}"
        try:
            create_sealed(store, config_name(run_id), config_json)
        except AlreadyExists:
            number += 1
            continue
        return _run_ref(store, run_id, config_json)


def open_or_find_run(store: ObjectStore, config: RunConfig, run_id: str) -> RunRef:
    """Open a run under the given name, or find it if it was opened with the same config: repeating a command resumes it."""
    check_run_id(run_id, "--run")
    config_json = config.model_dump_json(indent=1).encode()
    try:
        create_sealed(store, config_name(run_id), config_json)
    except AlreadyExists:
        run = find_run(store, run_id)
        if run.config_digest != digest_of(config_json):
            raise UserError(f"--run: {run_id} was opened with another config: give this one another name") from None
        return run
    return _run_ref(store, run_id, config_json)


def check_run_id(run_id: str, named_by: str) -> None:
    """Raise UserError if a text cannot be a run id. `named_by` is the config key or argument that it came from."""
    if not is_run_id(run_id):
        raise UserError(
            f"{named_by}: {run_id[:80]!r} is not a run id: ids have letters, digits, '-', '_' and '.', as quickstart-1"
        )


def list_runs(store: ObjectStore) -> list[str]:
    """List the ids of the runs in a store, sorted."""
    is_run = {
        name: is_run_id(name) and (_NUMBERED.fullmatch(name) or _is_folder(store, name)) for name in store.list("runs")
    }
    warn_of_strays(store.uri, "runs", tuple(name for name in is_run if not is_run[name]))
    return [name for name in is_run if is_run[name]]


def _is_folder(store: ObjectStore, name: str) -> bool:
    """True if there is something below a name in runs/: a run given a name by hand, and not a file such as a README."""
    return any(True for _ in store.list(f"runs/{name}"))


def store_of(run: RunRef) -> ObjectStore:
    """Store of a run, with the `store.retry_seconds` of the run's config."""
    return ObjectStore(run.store_uri, run.retry_seconds)


def release_run(store: ObjectStore, run: RunRef) -> None:
    """Undo `open_run` for a run that will not start: delete its config, which frees its name."""
    store.delete(config_name(run.run_id))


def find_run(store: ObjectStore, run_id: str, named_by: str = "RUN") -> RunRef:
    """Find a run by its name. `named_by` is the config key or argument that named it, for the UserError if there is none."""
    check_run_id(run_id, named_by)
    try:
        config_json = read_sealed(store, config_name(run_id))
    except FileNotFoundError:
        known = ", ".join(list_runs(store)[-8:]) or "none yet"
        raise UserError(f"{named_by}: there is no run '{run_id}' in {store.uri}; runs there: {known}") from None
    return _run_ref(store, run_id, config_json)


def read_config(run: RunRef) -> RunConfig:
    """Read the config a run was opened with, checked against the digest in the ref."""
    name = config_name(run.run_id)
    try:
        config_json = read_sealed(store_of(run), name)
    except FileNotFoundError:
        raise ArtifactDamaged(f"store: {name} is missing from {run.store_uri}: restore it from a copy") from None
    if digest_of(config_json) != run.config_digest:
        raise ArtifactDamaged(f"store: {name} in {run.store_uri} is not the config this run was opened with")
    return validate_config(parse_config_json(config_json, f"{name} in {run.store_uri}"), name)


def commit(store: ObjectStore, manifest: Manifest) -> None:
    """Commit an iteration by a conditional create of its manifest. Raises IterationTaken if another leg committed it."""
    try:
        create_sealed(store, _manifest_name(manifest.run_id, manifest.iteration), record_json(manifest, indent=1))
    except AlreadyExists:
        raise IterationTaken(
            f"iteration {manifest.iteration} of {manifest.run_id} was committed by another leg: this leg stops, "
            "nothing of it was mixed in"
        ) from None


def read_manifest(store: ObjectStore, run_id: str, iteration: int) -> Manifest | None:
    """Read the manifest of an iteration; None if it is not committed. Raises ArtifactDamaged if it is damaged."""
    try:
        return read_record(store, _manifest_name(run_id, iteration), Manifest)
    except FileNotFoundError:
        return None


def read_chain(store: ObjectStore, run_id: str) -> list[Manifest]:
    """Read the committed manifests of a run in order, each checked to name its predecessor as parent.

    The chain of a fork begins with its parent's manifests, up to the iteration it was forked from. Any manifest that is
    damaged, or missing before the newest, raises ArtifactDamaged: a silently shorter chain would train iterations again.
    """
    return _read_chain(store, run_id, ())


def _read_chain(store: ObjectStore, run_id: str, descendants: tuple[str, ...]) -> list[Manifest]:
    """Read a chain as `read_chain` does. `descendants` are the forks that led here, to detect a run forked from itself."""
    length = _own_length(store, run_id)
    chain = _parent_chain(store, run_id, descendants)
    for manifest in map_in_order(partial(read_manifest, store, run_id), range(len(chain), length), MANIFESTS_IN_FLIGHT):
        name = _manifest_name(run_id, len(chain))
        if manifest is None:
            raise ArtifactDamaged(
                f"store: {name} is missing from {store.uri}, though later iterations are there: restore it from a copy"
            )
        if (manifest.run_id, manifest.iteration) != (run_id, len(chain)):
            raise ArtifactDamaged(f"store: {name} in {store.uri} says that it is another manifest: restore it from a copy")
        if manifest.parent != (record_digest(chain[-1]) if chain else NO_PARENT):
            raise ArtifactDamaged(
                f"store: {name} in {store.uri} does not continue the iteration before it: restore both from a copy"
            )
        chain.append(manifest)
    return chain


def chain_owners(store: ObjectStore, run_id: str) -> list[tuple[str, int]]:
    """Runs that committed the manifests of a chain, each with its last iteration in the chain: the run itself, whose last is
    not known, then its ancestors. Reads no manifest."""
    owners = [(run_id, sys.maxsize)]
    while (origin := _origin(store, owners[-1][0])) is not None:
        if origin.run_id in {owner for owner, _ in owners}:
            raise ArtifactDamaged(f"store: {config_name(owners[-1][0])} in {store.uri} makes the run a fork of itself")
        owners.append((origin.run_id, min(origin.iteration, owners[-1][1])))
    return owners


def next_iteration(store: ObjectStore, run_id: str) -> int:
    """Number of the iteration after the newest committed one. Reads no manifest, so that it may be of another version of
    roll."""
    if length := _own_length(store, run_id):
        return length
    origin = _origin(store, run_id)
    return 0 if origin is None else origin.iteration + 1


def _own_length(store: ObjectStore, run_id: str) -> int:
    """Number after that of the newest manifest that a run, and not its parent, committed; 0 if there is none."""
    names = list_matching(store, f"runs/{run_id}/iterations", ITERATION)
    return 1 + max((int(name.removesuffix(".json")) for name in names), default=-1)


def _origin(store: ObjectStore, run_id: str) -> NamedCheckpoint | None:
    """Run and iteration that a run was forked from; None if it is not a fork or has no config."""
    try:
        return parse_stored_config(
            read_sealed(store, config_name(run_id)), f"{config_name(run_id)} in {store.uri}"
        ).forked_from
    except FileNotFoundError:
        return None


def _parent_chain(store: ObjectStore, run_id: str, descendants: tuple[str, ...]) -> list[Manifest]:
    """Manifests that a fork inherits from its parent; empty if the run is not a fork or has no config."""
    origin = _origin(store, run_id)
    if origin is None:
        return []
    if origin.run_id in (run_id, *descendants):
        raise ArtifactDamaged(f"store: {config_name(run_id)} in {store.uri} makes the run a fork of itself")
    inherited = _read_chain(store, origin.run_id, (run_id, *descendants))[: origin.iteration + 1]
    if len(inherited) <= origin.iteration:
        origin_name = f"{origin.run_id}@{origin.iteration}"
        raise ArtifactDamaged(f"store: {run_id} was forked from {origin_name}, which is no longer whole in {store.uri}")
    return inherited


def check_has_update(chain: list[Manifest], run_id: str, iteration: int) -> None:
    """Raise UserError if an iteration is not committed or has no update, as iteration 0: it cannot be replayed."""
    last = chain[-1].iteration if chain else 0
    if not 1 <= iteration <= last:
        raise UserError(f"RUN@ITERATION: {run_id} has iterations 1 to {last} to replay, not {iteration}")


class RunSummary(Record):
    """Length and accuracy curve of a run.

    Example: RunSummary(run_id="quickstart-3", iterations=40, curve=((0, 0.01), (20, 0.88), (40, 0.97)))
    """

    run_id: str
    iterations: int
    curve: tuple[tuple[int, float], ...]
    """Pairs (iteration, held-out accuracy) of every evaluation."""

    @property
    def sentence(self) -> str:
        """Accuracy before and after, in words. Example: held-out accuracy 0.01 -> 0.97 in 40 iterations"""
        return f"held-out accuracy {self.curve[0][1]:.2f} -> {self.curve[-1][1]:.2f} in {self.iterations} iterations"


def summary_of(run_id: str, chain: list[Manifest]) -> RunSummary:
    """Summarise a chain of manifests."""
    curve = tuple((m.iteration, m.evaluated.accuracy) for m in chain if m.evaluated is not None)
    return RunSummary(run_id=run_id, iterations=chain[-1].iteration if chain else 0, curve=curve)


def summary_of_finished(run: RunRef) -> RunSummary | None:
    """Summary of a run if its last iteration is committed, else None."""
    chain = read_chain(store_of(run), run.run_id)
    is_finished = bool(chain) and chain[-1].iteration == read_config(run).iterations
    return summary_of(run.run_id, chain) if is_finished else None


def _run_ref(store: ObjectStore, run_id: str, config_json: bytes) -> RunRef:
    seconds = parse_stored_config(config_json, f"{config_name(run_id)} in {store.uri}").store.retry_seconds
    return RunRef(run_id=run_id, store_uri=store.uri, config_digest=digest_of(config_json), retry_seconds=seconds)


def _manifest_name(run_id: str, iteration: int) -> str:
    return f"runs/{run_id}/iterations/{iteration:08d}.json"


def _run_number(run_id: str, name: str) -> int:
    stem, _, number = run_id.rpartition("-")
    return int(number) if stem == name and number.isdecimal() else 0
