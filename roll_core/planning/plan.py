"""Description of a run, which `roll plan` prints. Reads the config, and the sizes of the model and the GPUs; writes
nothing."""

import math
from dataclasses import dataclass

from roll_core.config.algorithm.shaping import KlEstimator
from roll_core.config.exactness import describe_exactness
from roll_core.config.inference import VllmInference
from roll_core.config.model import ModelConfig, ModelShape, PretrainedModel, ScratchModel
from roll_core.config.operations.legs import LegsConfig
from roll_core.config.operations.placement import DeviceKind
from roll_core.config.operations.services import TrackingConfig
from roll_core.config.rollout import RolloutConfig
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind
from roll_core.planning.architectures import read_hf_config, why_not_planned
from roll_core.planning.assumptions import assumed_tokens
from roll_core.planning.fits import override_keys
from roll_core.planning.memory import (
    TIGHT_SHARE,
    MemoryFit,
    device_memory_gb,
    engine_memory,
    gpu_memory,
    judge_memory,
    trainer_memory,
)
from roll_core.planning.model_shape import parameters_of, shape_of
from roll_core.planning.proposals import Proposal, propose
from roll_core.planning.time_model import checkpoint_bytes, iteration_time, publish_bytes, stop_seconds
from roll_core.types.refs import digest_of

NUM_PROPOSALS = 5
"""Layouts listed, fastest first."""


@dataclass(frozen=True)
class PlanSection:
    """Section of a plan: a title, and rows of a label and a text."""

    title: str
    rows: tuple[tuple[str, str], ...]


def describe_plan(config: RunConfig) -> list[PlanSection]:
    """Describe a run, section by section. A summary comes first if the model's shape and the GPUs' memory are known, or the
    reason why nothing is estimated if the model's architecture is not known."""
    shape = shape_of(config.model)
    plain = [*_not_planned(config.model), _run(config), _stages(config), _roles(config), _arithmetic(config)]
    if shape is None or config.cluster.device is not DeviceKind.CUDA:
        return [*plain, _surroundings(config)]
    device_gb = device_memory_gb(config.cluster)
    sections = [*plain, _weights(config, shape), _memory(config, shape, device_gb)]
    if device_gb is not None:
        is_megatron = config.training.backend is BackendKind.MEGATRON
        proposals = propose(config, shape, device_gb) if is_megatron else []
        sections = [_summary(config, shape, device_gb, proposals), *sections]
        if is_megatron:
            sections.append(_proposals(proposals, device_gb))
    return [*sections, _surroundings(config)]


def _summary(config: RunConfig, shape: ModelShape, device_gb: float, proposals: list[Proposal]) -> PlanSection:
    """Memory, layout, seconds of an iteration and GPU-hours of the run."""
    gpu, time = gpu_memory(config, shape, device_gb), iteration_time(config, shape, device_gb)
    stages = {"collect": time.collect, "prepare": time.prepare, "update": time.update.total, "publish": time.publish}
    parts = " + ".join(f"{name} {seconds:.0f}" for name, seconds in stages.items())
    beside = ", collect beside the rest" if time.is_overlapped else ""
    hours = config.iterations * time.total / 3600
    prompt, completion = assumed_tokens(config)
    rows = [
        (judge_memory(gpu.peak, device_gb), f"{gpu.peak:.1f} of {device_gb:.1f} GB {_describe_margin(gpu.peak, device_gb)}"),
        ("an iteration", f"about {time.total:.0f} s: {parts}{beside}"),
        (
            "the run",
            f"{hours:,.0f} hours, {hours * config.cluster.num_devices:,.0f} GPU-hours for {config.iterations} iterations",
        ),
        ("told to stop", f"a leg needs up to {stop_seconds(config, shape, time):.0f} s: update + publish + checkpoint"),
        (
            "assumed",
            f"prompts of {prompt:,.0f} and completions of {completion:,.0f} tokens on average; cluster.speed",
        ),
    ]
    if config.training.backend is BackendKind.MEGATRON:
        layout, ranks = config.training.layout, len(config.placement.trainer)
        sizes = f"{describe_layout(layout)}, data {layout.data_parallel_size(ranks)}"
        rows.insert(1, ("layout", f"{sizes}: {_compare_with_best(config, time.update.total, proposals)}"))
    return PlanSection("in short (times are estimates)", tuple(rows))


def _describe_margin(needed_gb: float, device_gb: float) -> str:
    """Say which GPU is meant, and that little of it is left if the memory is tight."""
    where = "on the fullest GPU that trains"
    if judge_memory(needed_gb, device_gb) is MemoryFit.FITS:
        return where
    return f"{where}: over {TIGHT_SHARE:.0%}, fragmentation and communication may need the rest"


def _compare_with_best(config: RunConfig, seconds: float, proposals: list[Proposal]) -> str:
    """Compare the seconds of the config's updates with the fastest layout."""
    best = proposals[0] if proposals else None
    if best is None or best.update.total > 0.98 * seconds:
        return "none is quicker by more than 2 %"
    settings = " ".join(f"--set {each}" for each in override_keys(config, best.layout, best.recomputes))
    return f"updates would be {seconds / best.update.total:.2f} times as quick with {settings}"


def _not_planned(model: ModelConfig) -> list[PlanSection]:
    """Section that says why memory and time are not planned; none if the model's sizes are known or its folder is absent."""
    hf_config = read_hf_config(model) if isinstance(model, PretrainedModel) else None
    reason = why_not_planned(hf_config) if hf_config is not None else None
    return [PlanSection("in short", (("not planned", f"memory and time: {reason}"),))] if reason is not None else []


def _run(config: RunConfig) -> PlanSection:
    return PlanSection(
        "run",
        (
            ("name", f"{config.name}, {config.iterations} iterations, seed {config.seed}"),
            ("model", _model(config.model)),
            ("problems", f"{config.problems.kind}, graded by {config.reward.kind}"),
            ("algorithm", config.algorithm.kind),
            ("signals", _signals(config)),
            ("exact", describe_exactness(config)),
            ("config digest", digest_of(config.model_dump_json(indent=1).encode())[:16]),
        ),
    )


def _signals(config: RunConfig) -> str:
    """Signals that are computed before the update."""
    algorithm = config.algorithm
    signals = algorithm.credit_signals | config.fallback_algorithm.loss_signals(config.training.steps_per_iteration)
    before = ", ".join(sorted(signals)) or "none: nothing is computed before the update"
    beside = algorithm.kl_loss is not None and algorithm.kl_loss.estimator is KlEstimator.FULL
    return f"{before}; the reference runs beside every update" if beside else before


def _model(model: ModelConfig) -> str:
    shape = shape_of(model)
    is_here = isinstance(model, PretrainedModel) and read_hf_config(model) is not None
    unknown = "size not known" if is_here else "not on this machine"
    size = f"{parameters_of(shape).total / 1e6:,.2f} M parameters" if shape is not None else unknown
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
    """Rows of the plan's table about the filter, redundant groups and asynchronous collection; empty if all are off."""
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
            ("told to stop", "by SIGTERM or SIGUSR2: an update that has begun is committed and checkpointed, else at once"),
            *_elastic(config),
        ),
    )


def _legs(legs: LegsConfig) -> str:
    """Describe the legs and their limits.
    Example: slurm, 1440 min each, one after the other; at most 2 in a row that fail, 20 that are interrupted"""
    limits = f"at most {legs.max_failures} in a row that fail, {legs.max_interruptions} that are interrupted"
    return f"{legs.launcher.kind}, {legs.time_limit_minutes} min each, one after the other; {limits}"


def _elastic(config: RunConfig) -> list[tuple[str, str]]:
    """Row about elastic nodes; empty without `legs.elastic`."""
    elastic = config.legs.elastic
    if elastic is None:
        return []
    engines = elastic.nodes * (config.cluster.devices_per_node // len(config.engine_devices[0]))
    return [("elastic", f"up to {elastic.nodes} node(s) with {engines} engine(s) more, a job each, that may be taken away")]


def _devices(devices: tuple[int, ...]) -> str:
    """Describe device numbers. Example: devices 0-7"""
    consecutive = len(devices) > 2 and list(devices) == list(range(devices[0], devices[-1] + 1))
    return f"devices {devices[0]}-{devices[-1]}" if consecutive else f"device {', '.join(map(str, devices))}"


def _arithmetic(config: RunConfig) -> PlanSection:
    rollout, training = config.rollout, config.training
    per_step = rollout.num_trajectories // training.optimizer_steps
    copy = "rank" if training.backend is BackendKind.TORCH else "copy of it"
    return PlanSection(
        "batch arithmetic",
        (
            ("iteration", f"{rollout.num_groups} x {rollout.group_size} = {rollout.num_trajectories} trajectories"),
            ("optimizer step", f"{rollout.num_trajectories} / {training.optimizer_steps} = {per_step} trajectories"),
            (copy, f"{per_step} / {config.data_ranks} = about {per_step / config.data_ranks:.0f} trajectories"),
            ("micro-batch", f"at most {training.micro_batch_tokens} tokens, packed: {training.packing}"),
            (
                "whole run",
                f"{config.iterations * rollout.num_trajectories} trajectories, {config.total_optimizer_steps} steps",
            ),
        ),
    )


def _memory(config: RunConfig, shape: ModelShape, device_gb: float | None) -> PlanSection:
    """Memory by use, on the fullest GPU of the trainer and on a GPU of an engine."""
    trainer = trainer_memory(config, shape)
    rows = [
        ("weights", _gb(trainer.weights)),
        ("gradients", _gb(trainer.gradients)),
        ("optimizer", _gb(trainer.optimizer)),
        ("frozen policies", _gb(trainer.frozen)),
        ("activations", _gb(trainer.activations) + (", recomputed" if config.training.activation_checkpointing else "")),
        ("logits", _gb(trainer.logits)),
        ("buffers", _gb(trainer.buffers)),
    ]
    rows = [row for row in rows if not row[1].strip().startswith("0.0")]
    if device_gb is None:
        return PlanSection("memory of a GPU", (*rows, ("at most", "cluster.device_memory_gib is not known")))
    gpu = gpu_memory(config, shape, device_gb)
    stages = config.training.layout.pipeline
    where = f", on stage {trainer.stage} of {stages}" if stages > 1 else ""
    rows.append(("updating", f"{_gb(gpu.updating)} of {device_gb:.1f}{where}"))
    if config.placement.shared:
        waits = (
            ", trainer in host memory" if config.training.offload else f", {trainer.resident_gb:.1f} of them the trainer's"
        )
        rows.append(("generating", f"{_gb(gpu.generating)} of {device_gb:.1f}{waits}"))
    if isinstance(config.inference, VllmInference):
        engine = engine_memory(config.inference, shape, device_gb)
        longest = engine.cached_tokens // config.model.max_positions
        rows.append(("engine's weights", _gb(engine.weights)))
        rows.append(
            ("engine's cache", f"{_gb(engine.cache)}: {engine.cached_tokens:,} tokens, {longest} sequences of full length")
        )
    return PlanSection("memory of a GPU", tuple(rows))


def _gb(amount: float) -> str:
    return f"{amount:6.1f} GB"


def _weights(config: RunConfig, shape: ModelShape) -> PlanSection:
    """Number of weights by kind, and the size of a published version and of a checkpoint."""
    parameters = parameters_of(shape)
    rows = [
        (kind, f"{getattr(parameters, kind) / 1e6:12,.1f} M")
        for kind in ("embedding", "attention", "mlp", "experts", "router", "norms", "head")
        if getattr(parameters, kind)
    ]
    total = f"{parameters.total / 1e6:12,.1f} M"
    if shape.experts:
        total += f", {parameters.active / 1e6:,.1f} M of them for a token"
    sync, checkpoint = publish_bytes(config, shape), checkpoint_bytes(config, shape)
    stay = config.checkpoint.keep_last
    return PlanSection(
        "weights",
        (
            *rows,
            ("all", total),
            ("to each engine", f"{sync / 1e9:12,.1f} GB a version, by {config.weights_transport}"),
            ("a checkpoint", f"{checkpoint / 1e9:12,.1f} GB, {'all' if stay is None else f'the last {stay}'} stay"),
        ),
    )


def _proposals(proposals: list[Proposal], device_gb: float) -> PlanSection:
    """Table of the fastest layouts, described by the keys to --set; keys that are not named are 1."""
    rows = []
    for proposal in proposals[:NUM_PROPOSALS]:
        sizes = describe_layout(proposal.layout) + (", recomputed" if proposal.recomputes else "")
        sizes += ", tight" if proposal.verdict is MemoryFit.TIGHT else ""
        total = proposal.update.total
        shares = f"{proposal.update.communication / total:4.0%} sending {proposal.update.bubble / total:4.0%} idle"
        rows.append((f"{total:10.1f} s", f"{proposal.gpu_gb:6.1f} GB {shares}  {sizes}"))
    if not rows:
        rows = [("", f"none of those tried fits {device_gb:.0f} GB")]
    return PlanSection("layouts: an iteration's updates, the quickest first", tuple(rows))


def describe_layout(layout: LayoutConfig) -> str:
    """Describe a layout by its sizes above 1. Example: tensor 4, pipeline 8, expert 8"""
    sizes = ", ".join(f"{key} {size}" for key, size in layout.model_dump().items() if size > 1)
    return sizes or "every rank has all"


def _surroundings(config: RunConfig) -> PlanSection:
    return PlanSection(
        "around it",
        (
            ("store", config.store.uri),
            ("tracking", _tracking(config.tracking)),
            ("scratch", config.work_dir),
        ),
    )


def _tracking(tracking: TrackingConfig) -> str:
    if tracking.uri is None:
        return "none: metrics stay in the work folder (tracking.uri is null)"
    return f"{tracking.uri}, experiment '{tracking.experiment}'"
