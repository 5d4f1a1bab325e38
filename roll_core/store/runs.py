"""Runs in the store: opened once, found by name, advanced by committing manifests. "Latest" is derived, never written."""

import json
from typing import Any

from roll_core.config.load import validate_config
from roll_core.config.run import RunConfig
from roll_core.errors import ArtifactDamaged, IterationTaken, UserError
from roll_core.store.object_store import AlreadyExists, ObjectStore
from roll_core.types.manifest import NO_PARENT, Manifest
from roll_core.types.refs import RunRef, digest_of, record_digest, record_json


def open_run(store: ObjectStore, config: RunConfig) -> RunRef:
    """Claim the next free number under the config's name and store the resolved config there."""
    config_json = config.model_dump_json(indent=1).encode()
    number = 1 + max((_run_number(run_id, config.name) for run_id in store.list("runs")), default=0)
    while True:
        run_id = f"{config.name}-{number}"
        try:
            store.create(f"runs/{run_id}/config.json", config_json)
        except AlreadyExists:
            number += 1
            continue
        return RunRef(run_id=run_id, store_uri=store.uri, config_digest=digest_of(config_json))


def find_run(store: ObjectStore, run_id: str, asked_by: str = "RUN") -> RunRef:
    """The run of that name; `asked_by` is the key or argument that named it."""
    try:
        config_json = store.read(f"runs/{run_id}/config.json")
    except FileNotFoundError:
        known = ", ".join(list(store.list("runs"))[-8:]) or "none yet"
        raise UserError(f"{asked_by}: there is no run '{run_id}' in {store.uri}; runs there: {known}") from None
    return RunRef(run_id=run_id, store_uri=store.uri, config_digest=digest_of(config_json))


def read_config(run: RunRef) -> RunConfig:
    """The config a run was opened with, checked against the digest the ref carries."""
    config_json = ObjectStore(run.store_uri).read(f"runs/{run.run_id}/config.json")
    if digest_of(config_json) != run.config_digest:
        raise UserError(f"runs/{run.run_id}/config.json in {run.store_uri} was changed after the run was opened")
    return validate_config(_in_todays_words(json.loads(config_json)), f"runs/{run.run_id}/config.json")


def _in_todays_words(config: dict[str, Any]) -> dict[str, Any]:
    """Configs stored by version 0.1.0 say `algorithm.kl_coefficient`."""
    algorithm = dict(config.get("algorithm", {}))
    coefficient = algorithm.pop("kl_coefficient", 0.0)
    if coefficient:
        algorithm["kl_loss"] = {"coefficient": coefficient}
    return config | {"algorithm": algorithm}


def commit(store: ObjectStore, manifest: Manifest) -> None:
    """Make an iteration have happened. Of two writers one succeeds; the other is told to stop."""
    try:
        store.create(_manifest_name(manifest.run_id, manifest.iteration), record_json(manifest))
    except AlreadyExists:
        raise IterationTaken(
            f"iteration {manifest.iteration} of {manifest.run_id} was committed by another leg: this leg stops, "
            "nothing of it was mixed in"
        ) from None


def read_manifest(store: ObjectStore, run_id: str, iteration: int) -> Manifest | None:
    """The manifest of an iteration, or None while it has not happened."""
    try:
        return Manifest.model_validate_json(store.read(_manifest_name(run_id, iteration)))
    except FileNotFoundError:
        return None


def read_chain(store: ObjectStore, run_id: str) -> list[Manifest]:
    """Committed manifests in order, each checked to name its predecessor; the chain ends where it is broken. That of a fork
    begins with its parent's, up to the iteration it was forked from."""
    chain = _inherited(store, run_id)
    while (manifest := read_manifest(store, run_id, len(chain))) is not None:
        expected_parent = record_digest(chain[-1]) if chain else NO_PARENT
        if manifest.parent != expected_parent:
            break
        chain.append(manifest)
    return chain


def _inherited(store: ObjectStore, run_id: str) -> list[Manifest]:
    try:
        origin = json.loads(store.read(f"runs/{run_id}/config.json")).get("forked_from")
    except FileNotFoundError:
        return []
    if origin is None:
        return []
    inherited = read_chain(store, origin["run_id"])[: origin["iteration"] + 1]
    if len(inherited) <= origin["iteration"]:
        place = f"{origin['run_id']}@{origin['iteration']}"
        raise ArtifactDamaged(f"store: {run_id} was forked from {place}, which is no longer whole in {store.uri}")
    return inherited


def checkpoint_iterations(store: ObjectStore, run_id: str) -> list[int]:
    """Iterations of a run after which it can be continued by others."""
    return [manifest.iteration for manifest in read_chain(store, run_id) if manifest.checkpoint is not None]


def refuse_unless_learned(chain: list[Manifest], run_id: str, iteration: int) -> None:
    """Only an iteration that was committed, and that has an update, can be replayed."""
    last = chain[-1].iteration if chain else 0
    if not 1 <= iteration <= last:
        raise UserError(f"RUN@ITERATION: {run_id} has iterations 1 to {last} to replay, not {iteration}")


def _manifest_name(run_id: str, iteration: int) -> str:
    return f"runs/{run_id}/iterations/{iteration:08d}.json"


def _run_number(run_id: str, name: str) -> int:
    stem, _, number = run_id.rpartition("-")
    return int(number) if stem == name and number.isdigit() else 0
