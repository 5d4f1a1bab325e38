"""What a leg asks for, and the script that asks SLURM for it. Without Prefect, which takes seconds to import: `roll
plan` shows the script."""

from dataclasses import replace
from pathlib import Path

from infra.slurm import slurm
from infra.slurm.launcher import LegRequest
from roll_core.config.operations.legs import SlurmLauncherConfig
from roll_core.config.operations.placement import DeviceKind
from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.types.refs import RunRef, digest_of
from tasks.services import run_dir

LEG, ELASTIC = "leg", "elastic"
"""What jobs of a run are for, as their names say it."""


def job_prefix(run: RunRef, what: str = LEG) -> str:
    """Says which run of which store it is: there may be others of that name."""
    return f"{run.run_id}.{digest_of(run.store_uri.encode())[:8]}.{what}-"


def leg_request(run: RunRef, config: RunConfig, leg: int, exclude: tuple[str, ...] = ()) -> LegRequest:
    """What a leg of a run asks for."""
    cluster = config.cluster
    return LegRequest(
        name=f"{job_prefix(run)}{leg}",
        folder=run_dir(run, config) / f"leg-{leg}",
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        gpus_per_node=cluster.devices_per_node if cluster.device is DeviceKind.CUDA else 0,
        time_limit_minutes=config.legs.time_limit_minutes,
        exclude=exclude,
    )


def sbatch_script(config: RunConfig, config_path: str, overrides: list[str]) -> str:
    """A script for sbatch that carries a run of a config without a flow, leg after leg, by `run_leg_here`."""
    if not isinstance(config.legs.launcher, SlurmLauncherConfig):
        raise UserError("legs.launcher.kind must be slurm: extend a file of configs/clusters/ that says so, or --set it")
    run = RunRef(run_id=config.name, store_uri=config.store.uri, config_digest="")
    request = replace(leg_request(run, config, leg=0), name=config.name, folder=Path.cwd())
    arguments = [str(Path(config_path).absolute()), *(word for each in overrides for word in ("--set", each))]
    return slurm.sbatch_script(config.legs.launcher, request, arguments)
