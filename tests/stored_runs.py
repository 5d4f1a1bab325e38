"""Runs in a store, written by hand without training: committed iterations, checkpoints, exports, and objects of any age."""

import os
from pathlib import Path
from typing import Any

from roll_core.store.object_store import ObjectStore
from roll_core.store.records.checkpoints import record_checkpoint
from roll_core.store.records.exports import record_export
from roll_core.store.records.runs import commit, open_run, read_chain
from roll_core.types.manifest import NO_PARENT, Evaluated, Manifest
from roll_core.types.refs import ArtifactKind, CheckpointFile, CheckpointRef, ExportRef, record_digest
from tests.support import tiny_config


class StoredRuns:
    """Writer of runs into a store in a folder, whose files can be made old."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.store = ObjectStore(f"file://{folder}/store")

    def open(self, **sections: Any) -> str:
        """Open a new run of the tiny config and return its id; `sections` replace whole sections."""
        return open_run(self.store, tiny_config(self.folder, iterations=99, **sections)).run_id

    def commit(self, run_id: str, upto: int, accuracies: dict[int, float] | None = None) -> None:
        """Commit all missing iterations up to `upto`. With `accuracies`, only the iterations in it have an evaluation."""
        chain = read_chain(self.store, run_id)
        for iteration in range(len(chain), upto + 1):
            accuracy = 0.5 if accuracies is None else accuracies.get(iteration)
            chain.append(self._manifest(run_id, iteration, chain, accuracy))
            commit(self.store, chain[-1])

    def write_tiny(self) -> None:
        """Write the run tiny-1: iterations 0 to 4, a checkpoint of every second one, and an export of the last."""
        run_id = self.open()
        self.commit(run_id, 4)
        for iteration in (0, 2, 4):
            self.checkpoint(run_id, iteration)
        self.export(run_id, 4)

    def checkpoint(self, run_id: str, iteration: int, weights: str = "") -> CheckpointRef:
        """Store and record a checkpoint of two files; the second is the same in all checkpoints of all runs.

        `weights` replaces the digest of its weights.
        """
        contents = {"__0_0.distcp": f"{run_id} {iteration} {weights}".encode(), ".metadata": b"shapes"}
        files = (
            CheckpointFile(name=name, artifact=self.store.put(data, ArtifactKind.CHECKPOINT_FILE))
            for name, data in contents.items()
        )
        digest = weights or weights_digest(run_id, iteration)
        checkpoint = CheckpointRef(iteration=iteration, weights_version=iteration, weights_digest=digest, files=tuple(files))
        record_checkpoint(self.store, run_id, checkpoint)
        return checkpoint

    def export(self, run_id: str, iteration: int) -> ExportRef:
        """Store and record an export of one file."""
        artifact = self.store.put(f"config of {run_id} {iteration}".encode(), ArtifactKind.EXPORT_FILE)
        file = CheckpointFile(name="config.json", artifact=artifact)
        export = ExportRef(iteration=iteration, weights_digest=weights_digest(run_id, iteration), files=(file,))
        record_export(self.store, run_id, export)
        return export

    def make_all_old(self, seconds: float = 7200.0) -> None:
        """Increase the age of every file in the store by so many seconds."""
        for path in (self.folder / "store").rglob("*"):
            if path.is_file():
                then = path.stat().st_mtime - seconds
                os.utime(path, (then, then))

    def objects(self) -> set[str]:
        """Names of all artifacts in the store."""
        return {stored.name for stored in self.store.list_below("objects")}

    def _manifest(self, run_id: str, iteration: int, chain: list[Manifest], accuracy: float | None) -> Manifest:
        rollouts = self.store.put(f"rollouts of {run_id} {iteration}".encode(), ArtifactKind.TRAJECTORIES)
        evaluated = Evaluated(weights_version=iteration, num_problems=8, accuracy=accuracy or 0.0, trajectories=rollouts)
        return bare_manifest(
            iteration,
            run_id=run_id,
            parent=record_digest(chain[-1]) if chain else NO_PARENT,
            weights_digest=weights_digest(run_id, iteration),
            evaluated=None if accuracy is None else evaluated,
        )


def bare_manifest(iteration: int, **values: Any) -> Manifest:
    """Manifest of an iteration of the run tiny-1 in which nothing happened, except for `values`."""
    nothing: dict[str, Any] = {
        "run_id": "tiny-1",
        "parent": "",
        "config_digest": "",
        "leg": 1,
        "weights_version": iteration,
        "weights_digest": "",
        "next_problem": 0,
        "collected": None,
        "evaluated": None,
        "metrics": {},
        "timings": {},
        "committed_at": "",
    }
    return Manifest(iteration=iteration, **nothing | values)


def weights_digest(run_id: str, iteration: int) -> str:
    """Made-up digest of 64 characters for the weights after an iteration."""
    return f"{iteration:06d}{run_id:>58}".replace(" ", "0")
