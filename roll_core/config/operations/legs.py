"""Config of legs: how they get machines (a local process or a SLURM job), how often they may fail, which nodes they
avoid."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from roll_core.config.base import Section, Unit


class LocalLauncherConfig(Section):
    """Process on this machine that ends with the command that started it."""

    kind: Literal["local"] = "local"


class SlurmLauncherConfig(Section):
    """SLURM job of `cluster.nodes` nodes for `legs.time_limit_minutes`. `roll sbatch CONFIG` prints what is submitted.

    Every node must reach `work_dir`, the store, the code and, if PREFECT_API_URL names one, the Prefect server.
    """

    kind: Literal["slurm"] = "slurm"
    partition: str | None = None
    """SLURM partition; null leaves it to SLURM."""
    account: str | None = None
    """SLURM account to charge; null leaves it to SLURM."""
    qos: str | None = None
    """SLURM quality of service; null leaves it to SLURM."""
    exclusive: bool = True
    """Request whole nodes with all of their memory. If false, set cpus_per_node and memory_gigabytes."""
    cpus_per_node: Annotated[PositiveInt | None, Unit("CPUs")] = None
    """CPUs on each node; null leaves it to SLURM."""
    memory_gigabytes: Annotated[PositiveInt | None, Unit("GiB")] = None
    """Memory on each node, in GiB (SLURM's G). Null takes all of it with `exclusive`, else SLURM's default."""
    modules: tuple[str, ...] = ()
    """Environment modules to load on each node, for example [cuda/13.0]."""
    setup: tuple[str, ...] = ()
    """Lines of bash to run before the leg, for example ["source /shared/venv/bin/activate"]."""
    python: str | None = None
    """Command that starts Python on a node, for example "apptainer exec --nv /shared/roll.sif python". Null takes the Python
    that submits the job."""
    options: dict[str, str | int | bool] = Field(default_factory=dict)
    """Further sbatch options by their long names, for example {constraint: h100, switches: 1}."""
    signal_seconds: PositiveInt = 120
    """Time before the end of a job at which SLURM signals it, in seconds. A leg stops by itself in time; the signal is for a
    leg whose iterations became longer than ever before."""
    object_store_gigabytes: Annotated[PositiveFloat | None, Unit("GiB")] = None
    """Size of Ray's object store on each node, in GiB. Null takes three tenths of the memory that SLURM gave the leg
    there."""


class ElasticConfig(Section):
    """Preemptible nodes beside the leg's, each in a SLURM job of its own. Their engines make the run faster; without them it
    ends in the same policy. Keys that are null are taken from `legs.launcher`."""

    nodes: Annotated[PositiveInt, Unit("nodes")]
    """Most extra nodes, each with cluster.devices_per_node devices, all for engines."""
    partition: str | None = None
    """SLURM partition; null takes that of legs.launcher."""
    account: str | None = None
    """SLURM account to charge; null takes that of legs.launcher."""
    qos: str | None = None
    """SLURM quality of service; null takes that of legs.launcher."""
    options: dict[str, str | int | bool] = Field(default_factory=dict)
    """Further sbatch options by their long names, in addition to those of legs.launcher."""
    time_limit_minutes: PositiveInt | None = None
    """Longest life of an extra node's job, in minutes; null takes legs.time_limit_minutes. Short jobs start sooner, and a
    job that is over is queued again."""

    def merged_with(self, launcher: SlurmLauncherConfig) -> SlurmLauncherConfig:
        """The leg's launcher config with this section's overrides."""
        own = self.model_dump(include={"partition", "account", "qos"}, exclude_none=True)
        return launcher.model_copy(update=own | {"options": launcher.options | self.options})


LauncherConfig = Annotated[LocalLauncherConfig | SlurmLauncherConfig, Field(discriminator="kind")]


class LegsConfig(Section):
    """Legs: the allocations that a run consists of, one after another."""

    launcher: LauncherConfig = LocalLauncherConfig()
    """Way to get the machines of a leg."""
    max_failures: Annotated[NonNegativeInt, Unit("legs")] = 2
    """Most legs in a row that may fail, run out of memory or run out of time without committing an iteration; then the run
    stops."""
    max_interruptions: Annotated[NonNegativeInt, Unit("legs")] = 20
    """Most legs in a row that may be preempted or lose a node without committing an iteration; then the run stops. Higher
    than max_failures, because an interruption says little about the run."""
    time_limit_minutes: PositiveInt = 7 * 24 * 60
    """Longest life of one leg, in minutes (SLURM's walltime). A leg stops by itself in time to commit, and the next one
    resumes. Lower it to the limit of the partition."""
    elastic: ElasticConfig | None = None
    """Preemptible nodes with engines, in addition to those of the leg; null asks for none. Only with
    `legs.launcher.kind: slurm`."""

    @model_validator(mode="after")
    def _check_elastic_needs_slurm(self):
        if self.elastic is not None and not isinstance(self.launcher, SlurmLauncherConfig):
            raise ValueError(
                f"elastic asks for nodes of a SLURM cluster, but launcher.kind is {self.launcher.kind}: set it to slurm, "
                "or leave elastic out"
            )
        return self


class NodesConfig(Section):
    """Health checks of nodes before roles start, and exclusion of nodes that fail repeatedly."""

    failures: Annotated[PositiveInt, Unit("failures")] = 2
    """Infrastructure failures within window_hours, of any run, after which a node gets no further legs. One failure may have
    any cause; a second within a day is seldom chance. Only with `legs.launcher.kind: slurm`."""
    window_hours: PositiveFloat = 24.0
    """Time for which a failure counts against its node, in hours. Only with `legs.launcher.kind: slurm`."""
    free_gigabytes: PositiveFloat = 1.0
    """Free space, in GB, that a node must have in its temporary folder and in work_dir before roles start."""
    clock_seconds: PositiveFloat = 30.0
    """Largest offset of a node's clock from the driver's, in seconds; checked on GPUs or with several nodes. S3 refuses
    requests that are off by 15 minutes, and the order of events comes from the clocks of several nodes."""
    canary_seconds: PositiveFloat = 60.0
    """Longest wait for all nodes to pass the health check, in seconds; checked on GPUs or with several nodes. Most of it is
    the first import of torch from a shared disk."""
