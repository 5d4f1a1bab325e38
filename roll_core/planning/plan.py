"""A run, described: what `roll plan` prints. Pure: reads the config and nothing else."""

import math
from dataclasses import dataclass

from roll_core.config.model import ModelConfig, ScratchModel
from roll_core.config.placement import DeviceKind
from roll_core.config.rollout import RolloutConfig
from roll_core.config.run import RunConfig
from roll_core.config.services import LegsConfig
from roll_core.config.shaping import KlEstimator
from roll_core.planning.memory import device_memory_gb, gpu_memory, trainer_memory
from roll_core.planning.model_shape import shape_of
from roll_core.types.refs import digest_of


@dataclass(frozen=True)
class PlanSection:
    title: str
    rows: tuple[tuple[str, str], ...]


def describe_plan(config: RunConfig) -> list[PlanSection]:
    sections = [_run(config), _stages(config), _roles(config), _arithmetic(config)]
    return [*sections, *_memory(config), _surroundings(config)]


def _run(config: RunConfig) -> PlanSection:
    return PlanSection(
        "run",
        (
            ("name", f"{config.name}, {config.iterations} iterations, seed {config.seed}"),
            ("model", _model(config.model)),
            ("problems", f"{config.problems.kind}, graded by {config.reward.kind}"),
            ("algorithm", config.algorithm.kind),
            ("signals", _signals(config)),
            ("config digest", digest_of(config.model_dump_json(indent=1).encode())[:16]),
        ),
    )


def _signals(config: RunConfig) -> str:
    algorithm = config.algorithm
    signals = algorithm.credit_signals | config.algorithm_in_disagreement.loss_signals(config.training.steps_per_iteration)
    before = ", ".join(sorted(signals)) or "none: nothing is computed before the update"
    beside = algorithm.kl_loss is not None and algorithm.kl_loss.estimator is KlEstimator.FULL
    return f"{before}; the reference runs beside every update" if beside else before


def _model(model: ModelConfig) -> str:
    shape = shape_of(model)
    size = f"{shape.num_parameters / 1e6:,.2f} M parameters" if shape is not None else "not on this machine"
    name = f"{model.architecture} from scratch" if isinstance(model, ScratchModel) else model.path
    return f"{name}, {size}, {model.max_positions} positions"


def _stages(config: RunConfig) -> PlanSection:
    greedy = ", and a greedy one as the baseline" if config.algorithm.samples_greedily else ""
    steps = f"{config.training.steps_per_iteration} optimizer step(s)"
    rows = [
        ("collect", f"{config.rollout.num_groups} problems x {config.rollout.group_size} trajectories{greedy}"),
        *_sampling(config.rollout),
        ("prepare", "advantages, declared logprobs, packing"),
        *([("update critic", steps)] if config.algorithm.has_critic else []),
        ("update", steps),
        ("publish", "engines adopt the new weights"),
        ("evaluate", f"every {config.evaluation.every} iterations, {config.evaluation.num_problems} held-out problems"),
        ("checkpoint", f"every {config.checkpoint.every} iterations"),
        ("commit", "the manifest, last"),
    ]
    if config.warm_start is not None:
        warm_start = f"once: {config.warm_start.steps} supervised steps of {config.warm_start.batch_size} demonstrations"
        rows.insert(0, ("warm start", warm_start))
    return PlanSection("stages of an iteration", tuple(rows))


def _sampling(rollout: RolloutConfig) -> list[tuple[str, str]]:
    """What is drawn beyond the batch, or ahead of it, where anything is."""
    rows = []
    if rollout.filter is not None:
        conditions = ", ".join(
            f"{key} {value}" for key, value in rollout.filter.model_dump(mode="json", exclude_defaults=True).items()
        )
        most = int(rollout.max_draws * rollout.num_groups)
        rows.append(("", f"filtered ({conditions}): groups left out are replaced, at most {most} problems drawn"))
    if rollout.redundant_groups or rollout.redundant_attempts:
        extra = f"{rollout.redundant_groups} more problems, {rollout.redundant_attempts} more trajectories each"
        rows.append(("", f"{extra} in flight: the first to finish win, the rest is aborted"))
    if rollout.async_ratio:
        oldest = f"tokens at most {math.ceil(rollout.async_ratio)} weights version(s) old"
        rows.append(("", f"up to {rollout.async_ratio:g} iteration(s) ahead of training: {oldest}"))
        rows.append(("", f"attempts that are under way when weights change: {rollout.in_flight}"))
    return rows


def _roles(config: RunConfig) -> PlanSection:
    cluster, placement = config.cluster, config.placement
    if placement.colocated:
        together = "colocated: engines sleep while the trainer works"
    elif placement.shared:
        together = f"those on {_devices(tuple(sorted(placement.shared)))} sleep while the trainer works"
    else:
        together = "disaggregated"
    return PlanSection(
        "roles",
        (
            ("cluster", f"{cluster.nodes} node(s) x {cluster.devices_per_node} {cluster.device} device(s)"),
            ("trainer", f"{len(placement.trainer)} rank(s) on {_devices(placement.trainer)} ({config.training.backend})"),
            (
                "engines",
                f"{len(config.engine_devices)} {config.inference.kind} engine(s) on {_devices(placement.engines)}, "
                f"{together}",
            ),
            ("weights", f"to the engines by {config.weights_transport}"),
            ("reward workers", str(placement.reward_workers)),
            ("legs", _legs(config.legs)),
            *_elastic(config),
        ),
    )


def _legs(legs: LegsConfig) -> str:
    """Example: slurm, 1440 min each, one after the other; at most 2 in a row that fail, 20 that are interrupted"""
    limits = f"at most {legs.max_failures} in a row that fail, {legs.max_interruptions} that are interrupted"
    return f"{legs.launcher.kind}, {legs.time_limit_minutes} min each, one after the other; {limits}"


def _elastic(config: RunConfig) -> list[tuple[str, str]]:
    elastic = config.legs.elastic
    if elastic is None:
        return []
    engines = elastic.nodes * (config.cluster.devices_per_node // len(config.engine_devices[0]))
    return [("elastic", f"up to {elastic.nodes} node(s) with {engines} engine(s) more, a job each, that may be taken away")]


def _devices(devices: tuple[int, ...]) -> str:
    consecutive = len(devices) > 2 and list(devices) == list(range(devices[0], devices[-1] + 1))
    return f"devices {devices[0]}-{devices[-1]}" if consecutive else f"device {', '.join(map(str, devices))}"


def _arithmetic(config: RunConfig) -> PlanSection:
    rollout, training = config.rollout, config.training
    per_step = rollout.num_trajectories // training.optimizer_steps
    return PlanSection(
        "batch arithmetic",
        (
            ("iteration", f"{rollout.num_groups} x {rollout.group_size} = {rollout.num_trajectories} trajectories"),
            ("optimizer step", f"{rollout.num_trajectories} / {training.optimizer_steps} = {per_step} trajectories"),
            ("rank", f"{per_step} / {len(config.placement.trainer)} = about {per_step / len(config.placement.trainer):.0f}"),
            ("micro-batch", f"at most {training.micro_batch_tokens} tokens, packed: {training.packing}"),
            (
                "whole run",
                f"{config.iterations * rollout.num_trajectories} trajectories, {config.total_optimizer_steps} steps",
            ),
        ),
    )


def _memory(config: RunConfig) -> list[PlanSection]:
    """Of a GPU, where the run needs one and its model is known."""
    shape = shape_of(config.model)
    if config.cluster.device is not DeviceKind.CUDA or shape is None:
        return []
    trainer = trainer_memory(config, shape)
    rows = [
        ("weights", f"{trainer.weights:.1f} GB, as much for gradients, {trainer.optimizer:.1f} GB for the optimizer"),
        ("activations", f"{trainer.activations:.1f} GB, {trainer.logits:.1f} GB for logits"),
    ]
    if trainer.frozen:
        rows.insert(1, ("frozen policies", f"{trainer.frozen:.1f} GB"))
    device_gb = device_memory_gb(config.cluster)
    if device_gb is None:
        return [PlanSection("memory of a GPU", (*rows, ("at most", "cluster.device_memory_gib is not known")))]
    gpu = gpu_memory(config, shape, device_gb)
    rows.append(("while it updates", f"{gpu.updating:.1f} of {device_gb:.0f} GB"))
    if config.placement.shared:
        waits = ", trainer in host memory" if config.training.offload else f", {trainer.kept:.1f} GB of them the trainer's"
        rows.append(("while it generates", f"{gpu.generating:.1f} of {device_gb:.0f} GB{waits}"))
    return [PlanSection("memory of a GPU", tuple(rows))]


def _surroundings(config: RunConfig) -> PlanSection:
    return PlanSection(
        "around it",
        (
            ("store", config.store.uri),
            ("tracking", f"{config.tracking.uri}, experiment '{config.tracking.experiment}'"),
            ("scratch", config.work_dir),
        ),
    )
