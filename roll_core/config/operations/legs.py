"""Legs: how they get machines (a local process or a SLURM allocation), how often they may fail, and which nodes they avoid."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from roll_core.config.base import Section


class LocalLauncherConfig(Section):
    """A process on this machine, that ends with the command that started it."""

    kind: Literal["local"] = "local"


class SlurmLauncherConfig(Section):
    """An allocation of `cluster.nodes` nodes for `legs.time_limit_minutes`. `roll sbatch CONFIG` prints what is submitted.

    `work_dir`, the store and the code must be where every node can reach them; the Prefect server, if PREFECT_API_URL names
    one, too.
    """

    kind: Literal["slurm"] = "slurm"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    exclusive: bool = True
    """Whole nodes, with all of their memory. Otherwise give cpus_per_node and memory_gigabytes."""
    cpus_per_node: PositiveInt | None = None
    """null leaves it to SLURM."""
    memory_gigabytes: PositiveInt | None = None
    """Of each node. null: all of it with `exclusive`, else what SLURM gives by default."""
    modules: tuple[str, ...] = ()
    """Environment modules to load, for example [cuda/13.0]."""
    setup: tuple[str, ...] = ()
    """Lines of bash before the leg, for example ["source /shared/venv/bin/activate"]."""
    python: str | None = None
    """Command that starts Python on a node, for example "apptainer exec --nv /shared/roll.sif python"; null: the Python that
    submits."""
    options: dict[str, str | int | bool] = Field(default_factory=dict)
    """Further options of sbatch by their long names, for example {constraint: h100, switches: 1}."""
    signal_seconds: PositiveInt = 120
    """How long before its end SLURM tells a job. The leg itself stops in time by the job's end time; this is for a leg
    whose iterations became longer than they ever were."""
    object_store_gigabytes: PositiveFloat | None = None
    """Ray's object store on each node; null takes three tenths of the memory that SLURM gave the leg there."""


class ElasticConfig(Section):
    """Up to so many nodes more, each a job of its own beside the leg's, that may be taken away at any time: their engines
    make a run faster, and it ends in the same policy without them. What is not said here is as in `legs.launcher`."""

    nodes: PositiveInt
    """With as many devices as those of the leg, all of them for engines."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: dict[str, str | int | bool] = Field(default_factory=dict)
    """Beside those of the launcher."""
    time_limit_minutes: PositiveInt | None = None
    """null: `legs.time_limit_minutes`. Short jobs start sooner; one that is over is queued again."""

    def launcher_of(self, leg: SlurmLauncherConfig) -> SlurmLauncherConfig:
        """How these nodes are asked for, where the leg's are asked for so."""
        own = self.model_dump(include={"partition", "account", "qos"}, exclude_none=True)
        return leg.model_copy(update=own | {"options": leg.options | self.options})


LauncherConfig = Annotated[LocalLauncherConfig | SlurmLauncherConfig, Field(discriminator="kind")]


class LegsConfig(Section):
    launcher: LauncherConfig = LocalLauncherConfig()
    """Where legs run."""
    max_failures: NonNegativeInt = 2
    """Legs in a row that may fail, run out of memory or run out of time without committing an iteration before the run gives
    up."""
    max_interruptions: NonNegativeInt = 20
    """The same for legs that were preempted or lost a machine, which says less about the run."""
    time_limit_minutes: PositiveInt = 7 * 24 * 60
    """Longest life of one leg; it stops by itself in time to commit, and the next one goes on."""
    elastic: ElasticConfig | None = None
    """Preemptible nodes with engines, beside those of the leg; null: none."""

    @model_validator(mode="after")
    def _elastic_nodes_are_slurms(self):
        if self.elastic is not None and not isinstance(self.launcher, SlurmLauncherConfig):
            raise ValueError(
                f"elastic asks for nodes of a SLURM cluster, but launcher.kind is {self.launcher.kind}: set it to slurm, "
                "or leave elastic out"
            )
        return self


class NodesConfig(Section):
    failures: PositiveInt = 2
    """A node with so many infrastructure failures within `window_hours`, of whichever runs, gets no further legs. One may be
    anybody's; a second within a day is seldom chance."""
    window_hours: PositiveFloat = 24.0
    """How long a failure counts against its node."""
    free_gigabytes: PositiveFloat = 1.0
    """Room that a node must have in its temporary folder and in work_dir before roles start."""
    clock_seconds: PositiveFloat = 30.0
    """How far a node's clock may be off that of the leg's driver. S3 refuses requests that are off by 15 minutes, and what
    happened when is told by the clocks of several nodes."""
    canary_seconds: PositiveFloat = 60.0
    """Within which all nodes must have answered what they are asked before roles start. The first import of torch from a
    shared disk is most of it."""
