"""How long an iteration takes, estimated from the model's sizes and what its machines are capable of (`cluster.speed`): for
comparing layouts with each other, and for the order of magnitude of a bill. Nothing that is sent is taken to be hidden
behind computing, but for what the torch backend gathers. `roll simulate` knows the scheduler, and recorded runs.
"""

import math
from dataclasses import dataclass

from roll_core.config.inference import VllmInference
from roll_core.config.model import ModelShape
from roll_core.config.operations.placement import ClusterConfig
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind, Packing, Precision
from roll_core.planning.activations import IMBALANCE, masked_tokens
from roll_core.planning.assumptions import assumed_tokens
from roll_core.planning.memory import cache_bytes_of_a_token, engine_memory
from roll_core.planning.model_shape import layer_parameters, parameters_of
from roll_core.planning.sharding import RankWeights, largest_stages, weights_of_stages

ARITHMETIC_SHARE = 0.45
"""Of the arithmetic that a maker states, what layers reach: 49 % were measured, compiled, on an H200 (docs/gpu.md)."""
MEMORY_SHARE = 0.6
"""Of the memory's speed, what decoding reaches."""
LATENCY_S = 20e-6
"""Of a collective, however little it carries."""


@dataclass(frozen=True)
class UpdateTime:
    """Seconds of all optimizer steps of an iteration, on the slowest stage."""

    compute: float
    tensor: float
    expert: float
    context: float
    pipeline: float
    """Sending between stages."""
    bubble: float
    """Waiting for stages before and behind."""
    data: float
    """Summing gradients over the copies, and gathering what each of them moved."""
    optimizer: float
    micro_batches: int
    """Of one optimizer step, on one copy."""

    @property
    def communication(self) -> float:
        return self.tensor + self.expert + self.context + self.pipeline + self.data

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.bubble + self.optimizer


@dataclass(frozen=True)
class IterationTime:
    """Seconds."""

    collect: float
    prepare: float
    update: UpdateTime
    publish: float
    is_ahead: bool
    """Whether engines generate while the trainer works."""

    @property
    def total(self) -> float:
        training = self.prepare + self.update.total
        return (max(self.collect, training) if self.is_ahead else self.collect + training) + self.publish


def iteration_time(config: RunConfig, shape: ModelShape, device_gb: float) -> IterationTime:
    update = update_time(config, shape)
    forward = 1 / _passes(config)
    signals = config.algorithm.credit_signals | config.fallback_algorithm.loss_signals(config.training.steps_per_iteration)
    return IterationTime(
        collect=_collect_seconds(config, shape, device_gb),
        prepare=len(signals) * forward / config.training.epochs * (update.total - update.data - update.optimizer),
        update=update,
        publish=sync_bytes(config, shape) / (config.cluster.speed.network_gb * 1e9),
        is_ahead=config.rollout.async_ratio > 0,
    )


def sync_bytes(config: RunConfig, shape: ModelShape) -> int:
    """What every engine is sent of a weights version."""
    return (2 if config.engines_in_bfloat16 else 4) * parameters_of(shape).total


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Weights and Adam's moments in float32; the megatron backend stores the weights as they are used, too."""
    halves = config.training.backend is BackendKind.MEGATRON and config.training.precision is Precision.BFLOAT16
    num_models = 2 if config.algorithm.has_critic else 1
    return num_models * (14 if halves else 12) * parameters_of(shape).total


def update_time(config: RunConfig, shape: ModelShape) -> UpdateTime:
    # A sequence alone in its row is filled up to the longest.
    is_alone = config.training.packing is Packing.NONE
    of_a_trajectory = config.model.max_positions if is_alone else sum(assumed_tokens(config))
    on_a_copy = of_a_trajectory * config.rollout.num_trajectories / config.training.optimizer_steps / config.data_ranks
    micro_batches = max(1, math.ceil(on_a_copy / config.training.micro_batch_tokens))
    steps = config.training.steps_per_iteration
    match config.training.backend:
        case BackendKind.TORCH:
            return _torch_time(config, shape, on_a_copy / micro_batches, micro_batches, steps)
        case BackendKind.MEGATRON:
            return _megatron_time(config, shape, on_a_copy / micro_batches, micro_batches, steps)


def _torch_time(config: RunConfig, shape: ModelShape, tokens: float, micro_batches: int, steps: int) -> UpdateTime:
    """Layers are gathered for the forward and for the backward pass, and gradients summed, for every micro-batch, beside
    what is computed."""
    speed, ranks, parameters = config.cluster.speed, len(config.placement.trainer), parameters_of(shape)
    layers, head = _operations(config, shape)
    compute = tokens * (_passes(config) * shape.layers * layers + 4 * head) / _arithmetic(config.cluster)
    width = 2 if config.training.precision is Precision.BFLOAT16 else 4
    sent = (2 * width + 4) * parameters.total * (ranks - 1) / ranks
    data = max(0.0, sent / _link(ranks, config.cluster) - compute)
    count = steps * micro_batches
    moved = steps * 28 * parameters.total / ranks / (speed.memory_gb * 1e9)
    return UpdateTime(count * compute, 0.0, 0.0, 0.0, 0.0, 0.0, count * data, moved, micro_batches)


def _megatron_time(config: RunConfig, shape: ModelShape, tokens: float, micro_batches: int, steps: int) -> UpdateTime:
    layout, cluster, ranks = config.training.layout, config.cluster, len(config.placement.trainer)
    if layout.virtual_pipeline > 1:
        micro_batches = -(-micro_batches // layout.pipeline) * layout.pipeline
    stages = weights_of_stages(shape, layout, largest_stages(layout))
    layers, head = _operations(config, shape)
    shared_by, passes = layout.tensor * layout.context, _passes(config)
    here = tokens / shared_by
    heaviest = max(
        passes * stage.layers * layers + (4 * head if stage.stage == layout.pipeline - 1 else 0) for stage in stages
    )
    # Every pass reads all weights, however few tokens come: that is what keeps experts from being many on a rank.
    read = passes * 2 * max(stage.total for stage in stages) / (cluster.speed.memory_gb * 1e9)
    compute = here * heaviest / _arithmetic(cluster) + read
    most_layers = max(stage.layers for stage in stages)
    halves = 1 if shape.experts else 2  # of a layer that gather and sum over `tensor`; experts take tokens as they lie
    again = passes - 3
    gathered = 2 * here * shape.hidden * (layout.tensor - 1)
    tensor = most_layers * halves * (5 + 2 * again) * _seconds(gathered, layout.tensor, cluster)
    expert = most_layers * (4 + 2 * again) * _dispatch_seconds(here, shape, layout, cluster)
    rows = 4 * here * shape.kv_heads * shape.head_size * (layout.context - 1)
    context = most_layers * (2 + again) * _seconds(rows, shared_by if layout.context > 1 else 1, cluster)
    between = 2 * layout.virtual_pipeline * _seconds(2 * here * shape.hidden, ranks if layout.pipeline > 1 else 1, cluster)
    each = compute + tensor + expert + context + between
    count = steps * micro_batches
    return UpdateTime(
        compute=count * compute,
        tensor=count * tensor,
        expert=count * expert,
        context=count * context,
        pipeline=count * between,
        bubble=steps * each * (layout.pipeline - 1) / layout.virtual_pipeline,
        data=steps * max(_data_seconds(stage, layout, ranks, cluster) for stage in stages),
        optimizer=steps * max(_optimizer_seconds(stage, layout, ranks, cluster) for stage in stages),
        micro_batches=micro_batches,
    )


def _dispatch_seconds(here: float, shape: ModelShape, layout: LayoutConfig, cluster: ClusterConfig) -> float:
    """Tokens of a rank to their experts, once: within the node, and beside that to others."""
    span = layout.expert * layout.expert_tensor
    if span == 1:
        return 0.0
    sent = 2 * here * shape.hidden * shape.experts_per_token * IMBALANCE * (layout.expert - 1) / layout.expert
    away = max(0.0, 1 - cluster.devices_per_node / span)
    speed = cluster.speed
    routed = max(sent * away / (speed.network_gb * 1e9), sent * (1 - away) / (speed.node_gb * 1e9))
    whole = 2 * here * shape.hidden * shape.experts_per_token * (layout.expert_tensor - 1)
    return LATENCY_S + routed + _seconds(whole, layout.expert_tensor, cluster)


def _data_seconds(stage: RankWeights, layout: LayoutConfig, ranks: int, cluster: ClusterConfig) -> float:
    """Gradients in float32 summed, weights in bfloat16 gathered."""
    copies, expert_copies = layout.data(ranks) * layout.context, layout.expert_data(ranks)
    span = ranks // layout.pipeline
    shared = 6 * stage.shared * (copies - 1) / copies
    experts = 6 * stage.experts * (expert_copies - 1) / expert_copies
    return _seconds(shared, span, cluster) + _seconds(experts, span if expert_copies > 1 else 1, cluster)


def _optimizer_seconds(stage: RankWeights, layout: LayoutConfig, ranks: int, cluster: ClusterConfig) -> float:
    """Weights and moments read and written, gradients read: 30 bytes for each that the rank moves."""
    mine = stage.shared / (layout.data(ranks) * layout.context) + stage.experts / layout.expert_data(ranks)
    return 30 * mine / (cluster.speed.memory_gb * 1e9)


def _seconds(num_bytes: float, span: int, cluster: ClusterConfig) -> float:
    """To send so much among ranks of which the first and the last are so far apart."""
    return LATENCY_S + num_bytes / _link(span, cluster) if span > 1 else 0.0


def _link(span: int, cluster: ClusterConfig) -> float:
    return (cluster.speed.node_gb if span <= cluster.devices_per_node else cluster.speed.network_gb) * 1e9


def _arithmetic(cluster: ClusterConfig) -> float:
    return ARITHMETIC_SHARE * cluster.speed.teraflops * 1e12


def _passes(config: RunConfig) -> int:
    """Forward, twice that backward, and forward again where layers are computed again."""
    return 4 if config.training.activation_checkpointing else 3


def _operations(config: RunConfig, shape: ModelShape) -> tuple[float, float]:
    """Of a forward pass, for a token: of a layer, and of the output layer."""
    prompt, completion = assumed_tokens(config)
    # Attention with a mask computes all of a row; that of a single sequence, what is before a token.
    seen = masked_tokens(config) or (prompt + completion) / 2
    attention = 4 * shape.heads * shape.head_size * seen
    head = 2 * shape.vocabulary * shape.hidden * completion / (prompt + completion)
    return 2 * layer_parameters(shape).active + attention, head


def _collect_seconds(config: RunConfig, shape: ModelShape, device_gb: float) -> float:
    """Seconds of a collect: all tokens at the speed of full engines, and at least the time of the longest completion."""
    if not isinstance(config.inference, VllmInference):
        return 0.0
    prompt, completion = assumed_tokens(config)
    waiting = config.rollout.num_trajectories / len(config.engine_devices)
    fitting = engine_memory(config.inference, shape, device_gb).cached_tokens / (prompt + completion)
    running = max(1.0, min(config.rollout.slots_per_engine, waiting, fitting))
    step = decode_step_seconds(config, shape, running)
    return step * max(config.rollout.max_new_tokens, waiting * completion / running)


def decode_step_seconds(config: RunConfig, shape: ModelShape, running: float) -> float:
    """Seconds in which a vLLM engine gives each of `running` sequences one token.

    A step reads all weights (of experts, those that its sequences chose) and the keys and values of all sequences.
    """
    assert isinstance(config.inference, VllmInference)
    workers, speed, parameters = config.inference.tensor_parallel, config.cluster.speed, parameters_of(shape)
    prompt, completion = assumed_tokens(config)
    chosen = 1 - (1 - shape.experts_per_token / shape.experts) ** running if shape.experts else 0.0
    weights = 2 * (parameters.total - parameters.experts * (1 - chosen)) / workers
    cached = running * (prompt + completion / 2) * cache_bytes_of_a_token(shape) / min(workers, shape.kv_heads)
    step = (weights + cached) / (MEMORY_SHARE * speed.memory_gb * 1e9)
    step += running * 2 * parameters.active / workers / _arithmetic(config.cluster)
    if workers > 1:
        step += 2 * shape.layers * LATENCY_S
    return step
