"""What the roles of a run take of a GPU's memory, known before anything is started, term by term: by the torch backend, the
megatron backend, and an engine that shares the GPU or has one of its own.

Nothing here is fitted. Measured on an H200 (1.4 billion weights, 16,320 tokens, torch backend): 58.4 GB compiled, for which
this says 60.4, and 80.9 GB not compiled, for which it says 84.7. The megatron backend there, without Transformer Engine: a
dense model 51.9 GB (52.4 here), recomputed 37.9 (37.9); a mixture 96.0 (99.0), recomputed 95.9 (98.4). What several GPUs
send each other follows from arithmetic, and was compared with no measurement.
"""

import subprocess
from dataclasses import dataclass

from roll_core.config.algorithm.methods import Distillation
from roll_core.config.inference import VllmInference
from roll_core.config.model import ModelShape
from roll_core.config.operations.placement import ClusterConfig
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind, Precision
from roll_core.planning.activations import kept_bytes_between_layers, kept_bytes_of_a_layer
from roll_core.planning.model_shape import layer_parameters, lora_parameters, parameters_of
from roll_core.planning.sharding import RankWeights, largest_stages, rows_of_vocabulary, weights_of_stages

GB = 1e9
PROCESS_GB = 0.8
"""A process on a GPU: CUDA's context, and the workspaces of its matrix products."""
COMMUNICATION_GB = 1.0
"""NCCL's buffers for the groups that a rank is in. A guess: they grow with the groups and with the cluster."""
ASLEEP_GB = 2.0
"""What an engine keeps while it sleeps: CUDA's context and its recorded steps."""
ENGINE_GB = 3.0
"""Of what vLLM may take, what is neither weights nor cache: its largest forward pass, and its recorded steps. A guess."""


@dataclass(frozen=True)
class TrainerMemory:
    """Of one rank, in GB; of several, the one that needs most."""

    weights: float
    gradients: float
    optimizer: float
    frozen: float
    """Policies that it is compared with, and teachers."""
    activations: float
    logits: float
    buffers: float
    """Weights and tokens of others while they are here, and copies in bfloat16."""
    stepping: float = 0.0
    """The optimizer's own while it moves, when what the backward pass read is gone."""
    gradients_stay: bool = False
    """Whether their memory is never given back."""
    stage: int = 0
    """Of the pipeline."""

    @property
    def kept(self) -> float:
        """Between two updates."""
        return self.weights + self.optimizer + self.frozen + (self.gradients if self.gradients_stay else 0.0)

    @property
    def peak(self) -> float:
        backward = self.activations + self.logits + self.buffers
        return self.weights + self.gradients + self.optimizer + self.frozen + max(backward, self.stepping)


@dataclass(frozen=True)
class GpuMemory:
    """Of one GPU, in GB, at the two times of an iteration."""

    updating: float
    generating: float

    @property
    def peak(self) -> float:
        return max(self.updating, self.generating)


@dataclass(frozen=True)
class EngineMemory:
    """Of one GPU of a vLLM engine that is awake, in GB."""

    weights: float
    cache: float
    """What is left for keys and values; below zero if weights do not fit."""
    cached_tokens: int
    """Of all sequences of the engine together."""


def trainer_memory(config: RunConfig, shape: ModelShape) -> TrainerMemory:
    match config.training.backend:
        case BackendKind.TORCH:
            return _torch_memory(config, shape)
        case BackendKind.MEGATRON:
            layout = config.training.layout
            stages = weights_of_stages(shape, layout, largest_stages(layout))
            return max((_stage_memory(config, shape, stage) for stage in stages), key=lambda memory: memory.peak)


def _torch_memory(config: RunConfig, shape: ModelShape) -> TrainerMemory:
    """All that is kept is float32 and shared out over all ranks."""
    ranks, training, parameters = len(config.placement.trainer), config.training, parameters_of(shape)
    num_models = 2 if config.algorithm.has_critic else 1
    weights = 4 * parameters.total / ranks / GB
    # A critic learns as a whole, a policy with training.lora by small matrices beside its own.
    added = 0.0 if training.lora is None else 4 * lora_parameters(shape, training.lora) / ranks / GB
    learning = (num_models - 1) * weights + (weights if training.lora is None else added)
    kept = (
        shape.layers * kept_bytes_between_layers(config, shape) + kept_bytes_of_a_layer(config, shape)
        if training.activation_checkpointing
        else shape.layers * kept_bytes_of_a_layer(config, shape)
    )
    if ranks > 1:
        # Gathered in the precision of the products: this layer, the next, and what is in none of them; then one layer's
        # gradients, as they are and, to be summed, in float32.
        layer, width = layer_parameters(shape).total, 2 if training.precision is Precision.BFLOAT16 else 4
        outside = parameters.embedding + parameters.head
        buffers = (width * (2 * layer + outside) + (width + 4) * max(layer, outside)) / GB + COMMUNICATION_GB
    else:
        # Autocast's copies of matrices are kept for the backward pass; experts compute in float32.
        has_copies = training.precision is Precision.BFLOAT16
        buffers = 2 * (parameters.attention + parameters.mlp + parameters.router) / GB if has_copies else 0.0
    return TrainerMemory(
        weights=num_models * weights + added,
        gradients=learning,
        optimizer=2 * learning,
        frozen=num_frozen(config) * weights,
        activations=training.micro_batch_tokens * kept / GB,
        logits=_logits_gb(config, shape, shape.vocabulary),
        buffers=buffers,
    )


def _stage_memory(config: RunConfig, shape: ModelShape, weights: RankWeights) -> TrainerMemory:
    """Of a rank of the megatron backend."""
    training, layout, ranks = config.training, config.training.layout, len(config.placement.trainer)
    is_bfloat16 = training.precision is Precision.BFLOAT16
    width = 2 if is_bfloat16 else 4
    num_models = 2 if config.algorithm.has_critic else 1
    # Adam's two moments in float32, and where weights are bfloat16, those in float32: shared out among the copies.
    mine = weights.shared / (layout.data(ranks) * layout.context) + weights.experts / layout.expert_data(ranks)
    tokens = training.micro_batch_tokens
    layers = layers_in_flight(weights.layers, weights.stage, layout)
    kept = (
        layers * kept_bytes_between_layers(config, shape) + kept_bytes_of_a_layer(config, shape)
        if training.activation_checkpointing
        else layers * kept_bytes_of_a_layer(config, shape)
    )
    here = tokens / layout.context
    buffers = COMMUNICATION_GB if ranks > 1 else 0.0
    if layout.tensor > 1:
        buffers += 2 * width * here * shape.hidden / GB  # a half's tokens gathered, and their gradients
    if layout.expert > 1:
        # Tokens on their way to experts and back: sent and received.
        buffers += 2 * width * here / layout.tensor * shape.experts_per_token * shape.hidden * layout.expert_tensor / GB
    logits = 0.0
    if weights.stage == layout.pipeline - 1:
        logits = _logits_gb(config, shape, rows_of_vocabulary(shape, layout))
        logits += 2 * width * here * shape.hidden / GB  # the last states, of all tokens and of those that predict one
    return TrainerMemory(
        weights=num_models * width * weights.total / GB,
        gradients=num_models * 4 * weights.total / GB,
        optimizer=num_models * (12 if is_bfloat16 else 8) * mine / GB,
        frozen=num_frozen(config) * width * weights.total / GB,
        activations=tokens * kept / GB,
        logits=logits,
        buffers=buffers,
        stepping=num_models * 4 * mine / GB,  # roots of the second moments, all at once
        gradients_stay=True,
        stage=weights.stage,
    )


def layers_in_flight(layers: int, stage: int, layout: LayoutConfig) -> float:
    """Of a stage, counted once for each micro-batch that was forward through it and not yet backward, at most.

    With one chunk a stage, a stage begins with as many micro-batches as there are stages from it on. With several, the first
    of those chunks that a micro-batch goes through must wait for all others: twice the stages that follow, and a round of
    all stages for every further chunk.
    """
    if layout.virtual_pipeline == 1:
        return layers * (layout.pipeline - stage)
    chunks = 2 * (layout.pipeline - stage - 1) + (layout.virtual_pipeline - 1) * layout.pipeline + 1
    return chunks * layers / layout.virtual_pipeline


def _logits_gb(config: RunConfig, shape: ModelShape, rows: int) -> float:
    """A chunk of logits twice in float32, and twice in bfloat16; the output layer's gradient in float32, and a copy."""
    chunk = min(config.training.logprob_chunk_tokens, config.training.micro_batch_tokens)
    return (12 * chunk * rows + 6 * rows * shape.hidden) / GB


def num_frozen(config: RunConfig) -> int:
    """Teachers of other shapes are taken for one of this."""
    teachers = len(config.algorithm.teachers) if isinstance(config.algorithm, Distillation) else 0
    return teachers + int(config.algorithm.needs_reference)


# ------------------------------------------------------------------------------------------------------------------- engines
def gpu_memory(config: RunConfig, shape: ModelShape, device_gb: float) -> GpuMemory:
    """Of a GPU of the trainer; where engines are on others, those have theirs to themselves."""
    trainer = trainer_memory(config, shape)
    if not config.placement.shared:
        return GpuMemory(trainer.peak + PROCESS_GB, generating=0.0)
    stays = 0.0 if config.training.offload else trainer.kept
    return GpuMemory(
        updating=trainer.peak + PROCESS_GB + ASLEEP_GB,
        generating=engine_gb(config, shape, device_gb) + stays + PROCESS_GB,
    )


def engine_gb(config: RunConfig, shape: ModelShape, device_gb: float) -> float:
    """Of an engine that is awake."""
    if isinstance(config.inference, VllmInference):
        return config.inference.memory_share * device_gb
    slots = config.rollout.slots_per_engine * config.model.max_positions * cache_bytes_of_a_token(shape)
    return 2 * parameters_of(shape).total / GB + slots / GB + PROCESS_GB


def engine_memory(inference: VllmInference, shape: ModelShape, device_gb: float) -> EngineMemory:
    """Weights in bfloat16, and of what is left of `memory_share`, keys and values; a head of them may be on several GPUs."""
    workers = inference.tensor_parallel
    weights = 2 * parameters_of(shape).total / workers / GB
    cache = inference.memory_share * device_gb - weights - ENGINE_GB
    if inference.cache_gib is not None:
        cache = inference.cache_gib * 2**30 / GB
    of_a_token = cache_bytes_of_a_token(shape) / min(workers, shape.kv_heads)
    return EngineMemory(weights, cache, max(0, int(cache * GB / of_a_token)))


def cache_bytes_of_a_token(shape: ModelShape) -> int:
    """Keys and values, in bfloat16."""
    return 2 * 2 * shape.layers * shape.kv_heads * shape.head_size


def device_memory_gb(cluster: ClusterConfig) -> float | None:
    """What the config says, or what this machine's GPUs have; None where neither does."""
    if cluster.device_memory_gib is not None:
        return cluster.device_memory_gib * 2**30 / GB
    try:
        asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return min(map(float, found)) * 2**20 / GB if found else None
