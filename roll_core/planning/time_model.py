"""Seconds of an iteration, estimated from the model's sizes and the hardware's speed (`cluster.speed`): for comparing
layouts, and for the order of magnitude of a run's cost.

Communication is not overlapped with computing, except for the torch backend's gathering. `roll simulate` is more exact: it
runs the scheduler and uses recorded runs.
"""

import math
from dataclasses import dataclass

from roll_core.config.inference import VllmInference
from roll_core.config.model import ModelShape
from roll_core.config.operations.placement import ClusterConfig
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind, Packing, Precision
from roll_core.planning.activations import EXPERT_IMBALANCE, mask_row_tokens
from roll_core.planning.assumptions import assumed_tokens
from roll_core.planning.memory import engine_memory, kv_cache_bytes_per_token
from roll_core.planning.model_shape import layer_parameters, parameters_of
from roll_core.planning.sharding import RankWeights, largest_stages, weights_of_stages

FLOPS_UTILIZATION = 0.45
"""Share of the stated floating-point operations per second that layers reach: 49 % were measured, compiled, on an H200
(docs/benchmarks/gpu.md)."""
BANDWIDTH_UTILIZATION = 0.6
"""Share of the stated memory bandwidth that decoding reaches."""
LATENCY_S = 20e-6
"""Seconds of a collective, however few bytes it carries."""


@dataclass(frozen=True)
class UpdateTime:
    """Seconds of all optimizer steps of an iteration, by cause, on the slowest pipeline stage."""

    compute: float
    tensor: float
    """Collectives of tensor-parallel groups."""
    expert: float
    """Dispatch of tokens to experts and back."""
    context: float
    """Exchange of keys and values in context-parallel groups."""
    pipeline: float
    """Sends between pipeline stages."""
    bubble: float
    """Idle time, waiting for other pipeline stages."""
    data: float
    """Summing gradients over the copies of the model, and gathering the weights that each copy updated."""
    optimizer: float
    micro_batches: int
    """Number of micro-batches of one optimizer step, on one copy of the model."""

    @property
    def communication(self) -> float:
        return self.tensor + self.expert + self.context + self.pipeline + self.data

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.bubble + self.optimizer


@dataclass(frozen=True)
class IterationTime:
    """Seconds of an iteration, by stage."""

    collect: float
    prepare: float
    update: UpdateTime
    publish: float
    is_overlapped: bool
    """True if engines generate while the trainer works."""

    @property
    def total(self) -> float:
        """Seconds of the whole iteration. If `is_overlapped`, collect runs at the same time as prepare and update."""
        training = self.prepare + self.update.total
        return (max(self.collect, training) if self.is_overlapped else self.collect + training) + self.publish


def iteration_time(config: RunConfig, shape: ModelShape, device_gb: float) -> IterationTime:
    """Estimate the seconds of one iteration. `device_gb` is a GPU's memory, which limits the sequences of an engine."""
    update = update_time(config, shape)
    forward = 1 / _num_passes(config)
    signals = config.algorithm.credit_signals | config.fallback_algorithm.loss_signals(config.training.steps_per_iteration)
    return IterationTime(
        collect=_collect_seconds(config, shape, device_gb),
        prepare=len(signals) * forward / config.training.epochs * (update.total - update.data - update.optimizer),
        update=update,
        publish=publish_bytes(config, shape) / (config.cluster.speed.network_gb * 1e9),
        is_overlapped=config.rollout.async_ratio > 0,
    )


def stop_seconds(config: RunConfig, shape: ModelShape, time: IterationTime) -> float:
    """Estimate the seconds that a leg needs after SIGTERM or SIGUSR2, at most: an update that has begun, its publish, and a
    checkpoint through one network card of each node. Other stages are left at once."""
    updates = 2 if config.algorithm.has_critic else 1
    store_gb = config.cluster.nodes * config.cluster.speed.network_gb
    return updates * time.update.total + time.publish + checkpoint_bytes(config, shape) / (store_gb * 1e9)


def publish_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes that each engine receives of a weights version."""
    return (2 if config.engines_in_bfloat16 else 4) * parameters_of(shape).total


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of a checkpoint: weights and Adam's moments in float32; the megatron backend also stores the bfloat16 weights it
    computes with."""
    has_bfloat16_copy = config.training.backend is BackendKind.MEGATRON and config.training.precision is Precision.BFLOAT16
    num_models = 2 if config.algorithm.has_critic else 1
    return num_models * (14 if has_bfloat16_copy else 12) * parameters_of(shape).total


def update_time(config: RunConfig, shape: ModelShape) -> UpdateTime:
    """Estimate the seconds of all optimizer steps of one iteration."""
    # Without packing, each sequence is padded to the longest.
    is_unpacked = config.training.packing is Packing.NONE
    tokens_per_trajectory = config.model.max_positions if is_unpacked else sum(assumed_tokens(config))
    tokens_per_copy = (
        tokens_per_trajectory * config.rollout.num_trajectories / config.training.optimizer_steps / config.data_ranks
    )
    micro_batches = max(1, math.ceil(tokens_per_copy / config.training.micro_batch_tokens))
    steps = config.training.steps_per_iteration
    match config.training.backend:
        case BackendKind.TORCH | BackendKind.REHEARSAL:
            return _torch_time(config, shape, tokens_per_copy / micro_batches, micro_batches, steps)
        case BackendKind.MEGATRON:
            return _megatron_time(config, shape, tokens_per_copy / micro_batches, micro_batches, steps)


def _torch_time(config: RunConfig, shape: ModelShape, tokens: float, micro_batches: int, steps: int) -> UpdateTime:
    """Estimate the torch backend. For every micro-batch, layers are gathered for the forward and the backward pass and
    gradients are reduced, overlapped with computing. `tokens` is per micro-batch."""
    speed, ranks, parameters = config.cluster.speed, len(config.placement.trainer), parameters_of(shape)
    layers, head = _forward_flops(config, shape)
    compute = tokens * (_num_passes(config) * shape.layers * layers + 4 * head) / _achieved_flops(config.cluster)
    width = 2 if config.training.precision is Precision.BFLOAT16 else 4
    sent = (2 * width + 4) * parameters.total * (ranks - 1) / ranks
    data = max(0.0, sent / _link_bandwidth(ranks, config.cluster) - compute)
    count = steps * micro_batches
    optimizer = steps * 28 * parameters.total / ranks / (speed.memory_gb * 1e9)
    return UpdateTime(count * compute, 0.0, 0.0, 0.0, 0.0, 0.0, count * data, optimizer, micro_batches)


def _megatron_time(config: RunConfig, shape: ModelShape, tokens: float, micro_batches: int, steps: int) -> UpdateTime:
    """Estimate the megatron backend. `tokens` is per micro-batch."""
    layout, cluster, ranks = config.training.layout, config.cluster, len(config.placement.trainer)
    if layout.virtual_pipeline > 1:
        micro_batches = -(-micro_batches // layout.pipeline) * layout.pipeline
    stages = weights_of_stages(shape, layout, largest_stages(layout))
    layers, head = _forward_flops(config, shape)
    shared_by, passes = layout.tensor * layout.context, _num_passes(config)
    local_tokens = tokens / shared_by
    heaviest = max(
        passes * stage.layers * layers + (4 * head if stage.stage == layout.pipeline - 1 else 0) for stage in stages
    )
    # Every pass reads all weights, however few tokens there are: this is what makes many experts on a rank slow.
    read = passes * 2 * max(stage.total for stage in stages) / (cluster.speed.memory_gb * 1e9)
    compute = local_tokens * heaviest / _achieved_flops(cluster) + read
    most_layers = max(stage.layers for stage in stages)
    halves = 1 if shape.experts else 2  # that gather and sum over `tensor`: attention and MLP; experts take sharded tokens
    num_recomputes = passes - 3
    gathered = 2 * local_tokens * shape.hidden * (layout.tensor - 1)
    tensor = most_layers * halves * (5 + 2 * num_recomputes) * _collective_seconds(gathered, layout.tensor, cluster)
    expert = most_layers * (4 + 2 * num_recomputes) * _dispatch_seconds(local_tokens, shape, layout, cluster)
    rows = 4 * local_tokens * shape.kv_heads * shape.head_size * (layout.context - 1)
    context = most_layers * (2 + num_recomputes) * _collective_seconds(rows, shared_by if layout.context > 1 else 1, cluster)
    stage_sends = (
        2
        * layout.virtual_pipeline
        * _collective_seconds(2 * local_tokens * shape.hidden, ranks if layout.pipeline > 1 else 1, cluster)
    )
    per_micro_batch = compute + tensor + expert + context + stage_sends
    count = steps * micro_batches
    return UpdateTime(
        compute=count * compute,
        tensor=count * tensor,
        expert=count * expert,
        context=count * context,
        pipeline=count * stage_sends,
        bubble=steps * per_micro_batch * (layout.pipeline - 1) / layout.virtual_pipeline,
        data=steps * max(_data_seconds(stage, layout, ranks, cluster) for stage in stages),
        optimizer=steps * max(_optimizer_seconds(stage, layout, ranks, cluster) for stage in stages),
        micro_batches=micro_batches,
    )


def _dispatch_seconds(local_tokens: float, shape: ModelShape, layout: LayoutConfig, cluster: ClusterConfig) -> float:
    """Seconds to send a rank's tokens to their experts once; traffic within the node and to others overlaps."""
    span = layout.expert * layout.expert_tensor
    if span == 1:
        return 0.0
    sent = 2 * local_tokens * shape.hidden * shape.experts_per_token * EXPERT_IMBALANCE * (layout.expert - 1) / layout.expert
    remote_share = max(0.0, 1 - cluster.devices_per_node / span)
    speed = cluster.speed
    routed = max(sent * remote_share / (speed.network_gb * 1e9), sent * (1 - remote_share) / (speed.node_gb * 1e9))
    whole = 2 * local_tokens * shape.hidden * shape.experts_per_token * (layout.expert_tensor - 1)
    return LATENCY_S + routed + _collective_seconds(whole, layout.expert_tensor, cluster)


def _data_seconds(stage: RankWeights, layout: LayoutConfig, ranks: int, cluster: ClusterConfig) -> float:
    """Seconds to sum float32 gradients, and to gather bfloat16 weights, over the copies of the model."""
    copies, expert_copies = layout.data_parallel_size(ranks) * layout.context, layout.expert_data_parallel_size(ranks)
    span = ranks // layout.pipeline
    shared = 6 * stage.shared * (copies - 1) / copies
    experts = 6 * stage.experts * (expert_copies - 1) / expert_copies
    return _collective_seconds(shared, span, cluster) + _collective_seconds(
        experts, span if expert_copies > 1 else 1, cluster
    )


def _optimizer_seconds(stage: RankWeights, layout: LayoutConfig, ranks: int, cluster: ClusterConfig) -> float:
    """Seconds of an optimizer step: 30 bytes for each weight that the rank owns, since weights and moments are read and
    written and gradients are read."""
    owned = stage.shared / (
        layout.data_parallel_size(ranks) * layout.context
    ) + stage.experts / layout.expert_data_parallel_size(ranks)
    return 30 * owned / (cluster.speed.memory_gb * 1e9)


def _collective_seconds(num_bytes: float, span: int, cluster: ClusterConfig) -> float:
    """Seconds to send `num_bytes` among ranks on `span` consecutive devices; 0 for a single rank."""
    return LATENCY_S + num_bytes / _link_bandwidth(span, cluster) if span > 1 else 0.0


def _link_bandwidth(span: int, cluster: ClusterConfig) -> float:
    """Bytes per second between ranks on `span` consecutive devices: within a node if they fit one, else over the network."""
    return (cluster.speed.node_gb if span <= cluster.devices_per_node else cluster.speed.network_gb) * 1e9


def _achieved_flops(cluster: ClusterConfig) -> float:
    """Floating-point operations per second that a device reaches."""
    return FLOPS_UTILIZATION * cluster.speed.teraflops * 1e12


def _num_passes(config: RunConfig) -> int:
    """Cost of an update in forward passes: one forward, two for backward, and one more if activations are recomputed."""
    return 4 if config.training.activation_checkpointing else 3


def _forward_flops(config: RunConfig, shape: ModelShape) -> tuple[float, float]:
    """Floating-point operations of a forward pass per token: of one layer, and of the output layer."""
    prompt, completion = assumed_tokens(config)
    # Masked attention computes the whole row; that of a single sequence, the tokens before each token.
    seen = mask_row_tokens(config) or (prompt + completion) / 2
    attention = 4 * shape.heads * shape.head_size * seen
    head = 2 * shape.vocabulary * shape.hidden * completion / (prompt + completion)
    return 2 * layer_parameters(shape).active + attention, head


def _collect_seconds(config: RunConfig, shape: ModelShape, device_gb: float) -> float:
    """Seconds of a collect: all tokens at the speed of full engines, and at least the time of the longest completion. 0 for
    engines other than vLLM."""
    if not isinstance(config.inference, VllmInference):
        return 0.0
    prompt, completion = assumed_tokens(config)
    waiting = config.rollout.num_trajectories / len(config.engine_devices)
    fitting = engine_memory(config.inference, shape, device_gb).cached_tokens / (prompt + completion)
    running = max(1.0, min(config.rollout.slots_per_engine, waiting, fitting))
    step = decode_step_seconds(config, shape, running)
    return step * max(config.rollout.max_new_tokens, waiting * completion / running)


def decode_step_seconds(config: RunConfig, shape: ModelShape, running: float) -> float:
    """Seconds in which a vLLM engine decodes one token for each of `running` sequences.

    A step reads all weights (of experts, those that its sequences chose) and the keys and values of all sequences.
    """
    assert isinstance(config.inference, VllmInference)
    workers, speed, parameters = config.inference.tensor_parallel, config.cluster.speed, parameters_of(shape)
    prompt, completion = assumed_tokens(config)
    expert_share = 1 - (1 - shape.experts_per_token / shape.experts) ** running if shape.experts else 0.0
    weights = 2 * (parameters.total - parameters.experts * (1 - expert_share)) / workers
    cached = running * (prompt + completion / 2) * kv_cache_bytes_per_token(shape) / min(workers, shape.kv_heads)
    step = (weights + cached) / (BANDWIDTH_UTILIZATION * speed.memory_gb * 1e9)
    step += running * 2 * parameters.active / workers / _achieved_flops(config.cluster)
    if workers > 1:
        step += 2 * shape.layers * LATENCY_S
    return step
