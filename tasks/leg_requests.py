"""Resource requests of legs, and the sbatch script for a run without a flow. Used by `tasks/legs.py` and `roll sbatch`.

Imports no Prefect, which takes seconds.
"""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from infra.slurm import slurm
from infra.slurm.launcher import LegRequest
from roll_core.config.operations.legs import SlurmLauncherConfig
from roll_core.config.operations.placement import DeviceKind
from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.nodes import excluded_nodes
from roll_core.types.refs import RunRef, digest_of
from tasks.services import run_dir

LEG, ELASTIC = "leg", "elastic"
"""Purposes of a run's jobs, as they appear in job names."""


def job_prefix(run: RunRef, purpose: str = LEG) -> str:
    """Return the first part of the names of a run's jobs. It includes a digest of the store, since runs of other stores may
    have the same name.

    Example: quickstart-3.1b4f77d0.leg-
    """
    return f"{run.run_id}.{digest_of(run.store_uri.encode())[:8]}.{purpose}-"


def leg_request(
    run: RunRef, config: RunConfig, leg: int, exclude: tuple[str, ...] = (), avoid: tuple[str, ...] = ()
) -> LegRequest:
    """Return the resource request of a leg. It must not run on nodes of `exclude`, and should not on those of `avoid`."""
    cluster = config.cluster
    return LegRequest(
        name=f"{job_prefix(run)}{leg}",
        folder=run_dir(run, config) / f"leg-{leg}",
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        gpus_per_node=cluster.devices_per_node if cluster.device is DeviceKind.CUDA else 0,
        time_limit_minutes=config.legs.time_limit_minutes,
        exclude=exclude,
        avoid=avoid,
    )


def check_submission(config: RunConfig) -> None:
    """Raise UserError if SLURM would refuse the jobs of a config's legs. Submits nothing; a local config passes."""
    launcher = config.legs.launcher
    if not isinstance(launcher, SlurmLauncherConfig):
        return
    run = RunRef(run_id=config.name, store_uri=config.store.uri, config_digest="")
    excluded = excluded_nodes(ObjectStore(config.store.uri, config.store.retry_seconds), config.nodes, datetime.now(UTC))
    slurm.SlurmLauncher(launcher).check(leg_request(run, config, leg=1, exclude=excluded))


def sbatch_script(config: RunConfig, config_path: str, overrides: list[str]) -> str:
    """Return an sbatch script that runs a config without a flow, leg after leg, through `roll leg` (`run_leg_here`)."""
    if not isinstance(config.legs.launcher, SlurmLauncherConfig):
        raise UserError("legs.launcher.kind must be slurm: extend a file of configs/clusters/ that says so, or --set it")
    run = RunRef(run_id=config.name, store_uri=config.store.uri, config_digest="")
    request = replace(leg_request(run, config, leg=0), name=config.name, folder=Path.cwd())
    arguments = [str(Path(config_path).absolute()), *(word for each in overrides for word in ("--set", each))]
    return slurm.sbatch_script(config.legs.launcher, request, arguments)
