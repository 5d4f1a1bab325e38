"""Runs in the store: opened once, found by name, advanced by committing manifests. "Latest" is derived, never written."""

import json
from functools import partial
from typing import Any

from roll_core.config.load import validate_config
from roll_core.config.operations.services import RETRY_SECONDS
from roll_core.config.run import RunConfig
from roll_core.errors import ArtifactDamaged, IterationTaken, UserError
from roll_core.store.media.medium import in_order
from roll_core.store.object_store import AlreadyExists, ObjectStore
from roll_core.store.records.sealed import create_sealed, read_record, read_sealed
from roll_core.types.manifest import NO_PARENT, Manifest
from roll_core.types.refs import Record, RunRef, digest_of, record_digest, record_json

MANIFESTS_IN_FLIGHT = 16
"""Read at once: a thousand one after the other would take a store that answers in 20 ms 20 s."""


def open_run(store: ObjectStore, config: RunConfig) -> RunRef:
    """Claim the next free number under the config's name and store the resolved config there."""
    config_json = config.model_dump_json(indent=1).encode()
    number = 1 + max((_run_number(run_id, config.name) for run_id in store.list("runs")), default=0)
    while True:
        run_id = f"{config.name}-{number}"
        try:
            create_sealed(store, _config_name(run_id), config_json)
        except AlreadyExists:
            number += 1
            continue
        return _ref(store, run_id, config_json)


def open_run_as(store: ObjectStore, config: RunConfig, run_id: str) -> RunRef:
    """The run of that name, opened now if there is none: for whoever says the same again to go on."""
    config_json = config.model_dump_json(indent=1).encode()
    try:
        create_sealed(store, _config_name(run_id), config_json)
    except AlreadyExists:
        run = find_run(store, run_id)
        if run.config_digest != digest_of(config_json):
            raise UserError(f"--run: {run_id} was opened with another config: give this one another name") from None
        return run
    return _ref(store, run_id, config_json)


def store_of(run: RunRef) -> ObjectStore:
    """The store a run lives in, asked for as long as the run's config says."""
    return ObjectStore(run.store_uri, run.retry_seconds)


def give_back(store: ObjectStore, run: RunRef) -> None:
    """Undo `open_run` for a run that is not going to begin."""
    store.delete(_config_name(run.run_id))


def find_run(store: ObjectStore, run_id: str, asked_by: str = "RUN") -> RunRef:
    """The run of that name; `asked_by` is the key or argument that named it."""
    try:
        config_json = read_sealed(store, _config_name(run_id))
    except FileNotFoundError:
        known = ", ".join(list(store.list("runs"))[-8:]) or "none yet"
        raise UserError(f"{asked_by}: there is no run '{run_id}' in {store.uri}; runs there: {known}") from None
    return _ref(store, run_id, config_json)


def read_config(run: RunRef) -> RunConfig:
    """The config a run was opened with, checked against the digest the ref carries."""
    name = _config_name(run.run_id)
    try:
        config_json = read_sealed(store_of(run), name)
    except FileNotFoundError:
        raise ArtifactDamaged(f"store: {name} is missing from {run.store_uri}: restore it from a copy") from None
    if digest_of(config_json) != run.config_digest:
        raise ArtifactDamaged(f"store: {name} in {run.store_uri} is not the config this run was opened with")
    return validate_config(json.loads(config_json), name)


def stored_config(store: ObjectStore, run_id: str) -> dict[str, Any]:
    """A run's config as it was written, whatever version wrote it: for what has been in all of them. Empty for a folder that
    holds no run yet, or none any more: while one is being opened, and after it was given back."""
    try:
        return json.loads(read_sealed(store, _config_name(run_id)))
    except FileNotFoundError:
        if not list(store.list(f"runs/{run_id}/iterations")):
            return {}
        raise ArtifactDamaged(f"store: {_config_name(run_id)} is missing from {store.uri}: restore it from a copy") from None


def commit(store: ObjectStore, manifest: Manifest) -> None:
    """Make an iteration have happened. Of two writers one succeeds; the other is told to stop."""
    try:
        create_sealed(store, _manifest_name(manifest.run_id, manifest.iteration), record_json(manifest, indent=1))
    except AlreadyExists:
        raise IterationTaken(
            f"iteration {manifest.iteration} of {manifest.run_id} was committed by another leg: this leg stops, "
            "nothing of it was mixed in"
        ) from None


def read_manifest(store: ObjectStore, run_id: str, iteration: int) -> Manifest | None:
    """The manifest of an iteration, or None while it has not happened; one that cannot be trusted is an error."""
    try:
        return read_record(store, _manifest_name(run_id, iteration), Manifest)
    except FileNotFoundError:
        return None


def read_chain(store: ObjectStore, run_id: str) -> list[Manifest]:
    """Committed manifests in order, each checked to name its predecessor. Those of a fork follow its parent's, up to the
    iteration it was forked from.

    The run ends at the newest manifest there is. One that is damaged or missing before it, or the newest itself damaged, is
    an error that names it: a run that silently became shorter would train again what it had trained.
    """
    stems = (name.removesuffix(".json") for name in store.list(f"runs/{run_id}/iterations"))
    length = 1 + max((int(stem) for stem in stems if stem.isdigit()), default=-1)
    chain = _inherited(store, run_id)
    for manifest in in_order(partial(read_manifest, store, run_id), range(len(chain), length), MANIFESTS_IN_FLIGHT):
        name = _manifest_name(run_id, len(chain))
        if manifest is None:
            raise ArtifactDamaged(
                f"store: {name} is missing from {store.uri}, though later iterations are there: restore it from a copy"
            )
        if manifest.parent != (record_digest(chain[-1]) if chain else NO_PARENT):
            raise ArtifactDamaged(
                f"store: {name} in {store.uri} does not continue the iteration before it: restore both from a copy"
            )
        chain.append(manifest)
    return chain


def _inherited(store: ObjectStore, run_id: str) -> list[Manifest]:
    try:
        origin = json.loads(read_sealed(store, _config_name(run_id))).get("forked_from")
    except FileNotFoundError:
        return []
    if origin is None:
        return []
    inherited = read_chain(store, origin["run_id"])[: origin["iteration"] + 1]
    if len(inherited) <= origin["iteration"]:
        place = f"{origin['run_id']}@{origin['iteration']}"
        raise ArtifactDamaged(f"store: {run_id} was forked from {place}, which is no longer whole in {store.uri}")
    return inherited


def refuse_unless_learned(chain: list[Manifest], run_id: str, iteration: int) -> None:
    """Only an iteration that was committed, and that has an update, can be replayed."""
    last = chain[-1].iteration if chain else 0
    if not 1 <= iteration <= last:
        raise UserError(f"RUN@ITERATION: {run_id} has iterations 1 to {last} to replay, not {iteration}")


class RunSummary(Record):
    """Example: RunSummary(run_id="quickstart-3", iterations=40, curve=((0, 0.01), (20, 0.88), (40, 0.97)))"""

    run_id: str
    iterations: int
    curve: tuple[tuple[int, float], ...]
    """(iteration, held-out accuracy) of every evaluation."""

    @property
    def sentence(self) -> str:
        return f"held-out accuracy {self.curve[0][1]:.2f} -> {self.curve[-1][1]:.2f} in {self.iterations} iterations"


def summary_of(run_id: str, chain: list[Manifest]) -> RunSummary:
    curve = tuple((m.iteration, m.evaluated.accuracy) for m in chain if m.evaluated is not None)
    return RunSummary(run_id=run_id, iterations=chain[-1].iteration if chain else 0, curve=curve)


def summary_of_finished(run: RunRef) -> RunSummary | None:
    """What a run achieved, if it came to its last iteration."""
    chain = read_chain(store_of(run), run.run_id)
    is_finished = bool(chain) and chain[-1].iteration == read_config(run).iterations
    return summary_of(run.run_id, chain) if is_finished else None


def _ref(store: ObjectStore, run_id: str, config_json: bytes) -> RunRef:
    seconds = json.loads(config_json).get("store", {}).get("retry_seconds", RETRY_SECONDS)
    return RunRef(run_id=run_id, store_uri=store.uri, config_digest=digest_of(config_json), retry_seconds=seconds)


def _config_name(run_id: str) -> str:
    return f"runs/{run_id}/config.json"


def _manifest_name(run_id: str, iteration: int) -> str:
    return f"runs/{run_id}/iterations/{iteration:08d}.json"


def _run_number(run_id: str, name: str) -> int:
    stem, _, number = run_id.rpartition("-")
    return int(number) if stem == name and number.isdigit() else 0
