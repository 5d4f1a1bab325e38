"""GPU memory that the roles of a run need, term by term, estimated before anything is started: a trainer rank of the torch
backend or the megatron backend, and an engine that shares the GPU or has one of its own.

No term is fitted. Measured on an H200 (1.4 billion weights, 16,320 tokens, torch backend): 58.4 GB compiled (estimate 60.4),
80.9 GB not compiled (estimate 84.7). Megatron backend, same GPU, without Transformer Engine: a dense model 51.9 GB (52.4),
recomputed 37.9 (37.9); a mixture of experts 96.0 (99.0), recomputed 95.9 (98.4). Communication buffers of several GPUs
follow from arithmetic and were not compared with a measurement.
"""

import subprocess
from dataclasses import dataclass
from enum import StrEnum

from roll_core.config.algorithm.methods import Distillation
from roll_core.config.inference import VllmInference
from roll_core.config.model import ModelShape
from roll_core.config.operations.placement import ClusterConfig
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind, Precision
from roll_core.planning.activations import layer_input_bytes, saved_bytes_per_layer
from roll_core.planning.model_shape import layer_parameters, lora_parameters, parameters_of
from roll_core.planning.sharding import RankWeights, largest_stages, vocabulary_rows, weights_of_stages

GB = 1e9
"""Bytes in a GB."""
PROCESS_GB = 0.8
"""GB of a process on a GPU: CUDA's context, and the workspaces of its matrix products."""
COMMUNICATION_GB = 1.0
"""GB of NCCL's buffers for the process groups of a rank. A guess: they grow with the groups and with the cluster."""
SLEEPING_ENGINE_GB = 2.0
"""GB that an engine keeps while it sleeps: CUDA's context and its CUDA graphs."""
ENGINE_OVERHEAD_GB = 3.0
"""GB of `memory_share` that vLLM uses for neither weights nor KV cache: its largest forward pass, and its CUDA graphs. A
guess."""


TIGHT_SHARE = 0.9
"""Share of a GPU's memory above which a plan is called tight: allocators fragment, and estimates were right within a tenth
where measured."""


class MemoryFit(StrEnum):
    """Comparison of the memory that a plan needs with the memory that a GPU has."""

    FITS = "fits"
    """At most 90 % of the GPU is needed."""
    TIGHT = "tight"
    """More than 90 % is needed, which may not be there."""
    DOES_NOT_FIT = "does not fit"
    """More is needed than there is."""


def judge_memory(needed_gb: float, device_gb: float) -> MemoryFit:
    """Judge whether `needed_gb` fit a GPU of `device_gb`. Checks, plans and proposals all judge by this."""
    if needed_gb > device_gb:
        return MemoryFit.DOES_NOT_FIT
    return MemoryFit.TIGHT if needed_gb > TIGHT_SHARE * device_gb else MemoryFit.FITS


@dataclass(frozen=True)
class TrainerMemory:
    """GPU memory of one trainer rank in GB, by use; of several ranks, that of the rank that needs most."""

    weights: float
    gradients: float
    optimizer: float
    """State of the optimizer: moments, and float32 master weights of bfloat16 weights."""
    frozen: float
    """Reference policy and teachers."""
    activations: float
    logits: float
    buffers: float
    """Gathered weights and tokens of other ranks, communication buffers, and bfloat16 copies of weights."""
    step_temporaries: float = 0.0
    """Temporary memory of the optimizer step, when activations are already freed."""
    keeps_gradients: bool = False
    """True if the memory of gradients is never freed."""
    stage: int = 0
    """Pipeline stage of the rank."""

    @property
    def resident_gb(self) -> float:
        """GB that stay allocated between two updates."""
        return self.weights + self.optimizer + self.frozen + (self.gradients if self.keeps_gradients else 0.0)

    @property
    def peak(self) -> float:
        """GB at the peak of an update: in the backward pass or in the optimizer step."""
        backward = self.activations + self.logits + self.buffers
        return self.weights + self.gradients + self.optimizer + self.frozen + max(backward, self.step_temporaries)


@dataclass(frozen=True)
class GpuMemory:
    """Memory in use on one GPU of the trainer, in GB, in the two phases of an iteration."""

    updating: float
    generating: float

    @property
    def peak(self) -> float:
        return max(self.updating, self.generating)


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one GPU of a vLLM engine that is awake, in GB."""

    weights: float
    cache: float
    """KV cache; negative if the weights do not fit."""
    cached_tokens: int
    """Tokens in the KV cache, of all sequences of the engine together."""


def trainer_memory(config: RunConfig, shape: ModelShape) -> TrainerMemory:
    """Estimate the memory of the trainer rank that needs most."""
    match config.training.backend:
        case BackendKind.TORCH | BackendKind.REHEARSAL:
            return _torch_memory(config, shape)
        case BackendKind.MEGATRON:
            layout = config.training.layout
            stages = weights_of_stages(shape, layout, largest_stages(layout))
            return max((_megatron_memory(config, shape, stage) for stage in stages), key=lambda memory: memory.peak)


def _torch_memory(config: RunConfig, shape: ModelShape) -> TrainerMemory:
    """Estimate a rank of the torch backend: all state is float32 and sharded over all ranks."""
    ranks, training, parameters = len(config.placement.trainer), config.training, parameters_of(shape)
    num_models = 2 if config.algorithm.has_critic else 1
    weights = 4 * parameters.total / ranks / GB
    # A critic trains all its weights; with training.lora a policy trains only the added matrices.
    lora_weights = 0.0 if training.lora is None else 4 * lora_parameters(shape, training.lora) / ranks / GB
    trainable = (num_models - 1) * weights + (weights if training.lora is None else lora_weights)
    # Bytes per token that are saved for the backward pass.
    kept = (
        shape.layers * layer_input_bytes(config, shape) + saved_bytes_per_layer(config, shape)
        if training.activation_checkpointing
        else shape.layers * saved_bytes_per_layer(config, shape)
    )
    if ranks > 1:
        # Gathered in the precision of matrix products: this layer, the next (prefetch), and the weights outside layers.
        # Then the gradients of one layer, in that precision and, to be summed, in float32.
        layer, width = layer_parameters(shape).total, 2 if training.precision is Precision.BFLOAT16 else 4
        outside = parameters.embedding + parameters.head
        buffers = (width * (2 * layer + outside) + (width + 4) * max(layer, outside)) / GB + COMMUNICATION_GB
    else:
        # Autocast keeps bfloat16 copies of matrices for the backward pass; experts compute in float32.
        has_copies = training.precision is Precision.BFLOAT16
        buffers = 2 * (parameters.attention + parameters.mlp + parameters.router) / GB if has_copies else 0.0
    return TrainerMemory(
        weights=num_models * weights + lora_weights,
        gradients=trainable,
        optimizer=2 * trainable,
        frozen=num_frozen_models(config) * weights,
        activations=training.micro_batch_tokens * kept / GB,
        logits=_logits_gb(config, shape, shape.vocabulary),
        buffers=buffers,
    )


def _megatron_memory(config: RunConfig, shape: ModelShape, weights: RankWeights) -> TrainerMemory:
    """Estimate a rank of the megatron backend that has these weights."""
    training, layout, ranks = config.training, config.training.layout, len(config.placement.trainer)
    is_bfloat16 = training.precision is Precision.BFLOAT16
    width = 2 if is_bfloat16 else 4
    num_models = 2 if config.algorithm.has_critic else 1
    # Optimizer state is sharded over the copies of the model: Adam's two moments in float32, and float32 master weights
    # if the weights are bfloat16.
    owned = weights.shared / (
        layout.data_parallel_size(ranks) * layout.context
    ) + weights.experts / layout.expert_data_parallel_size(ranks)
    tokens = training.micro_batch_tokens
    layers = layers_in_flight(weights.layers, weights.stage, layout)
    # Bytes per token that are saved for the backward pass.
    kept = (
        layers * layer_input_bytes(config, shape) + saved_bytes_per_layer(config, shape)
        if training.activation_checkpointing
        else layers * saved_bytes_per_layer(config, shape)
    )
    local_tokens = tokens / layout.context
    buffers = COMMUNICATION_GB if ranks > 1 else 0.0
    if layout.tensor > 1:
        buffers += 2 * width * local_tokens * shape.hidden / GB  # tokens gathered for attention or MLP, and their gradients
    if layout.expert > 1:
        # Tokens that are dispatched to experts and back: send and receive buffers.
        buffers += (
            2 * width * local_tokens / layout.tensor * shape.experts_per_token * shape.hidden * layout.expert_tensor / GB
        )
    logits = 0.0
    if weights.stage == layout.pipeline - 1:
        logits = _logits_gb(config, shape, vocabulary_rows(shape, layout))
        logits += 2 * width * local_tokens * shape.hidden / GB  # last hidden states, of all tokens and of the scored ones
    return TrainerMemory(
        weights=num_models * width * weights.total / GB,
        gradients=num_models * 4 * weights.total / GB,
        optimizer=num_models * (12 if is_bfloat16 else 8) * owned / GB,
        frozen=num_frozen_models(config) * width * weights.total / GB,
        activations=tokens * kept / GB,
        logits=logits,
        buffers=buffers,
        step_temporaries=num_models * 4 * owned / GB,  # square roots of all second moments at once
        keeps_gradients=True,
        stage=weights.stage,
    )


def layers_in_flight(layers: int, stage: int, layout: LayoutConfig) -> float:
    """Maximum number of a stage's layers that hold activations, counted once for each micro-batch whose forward pass through
    the stage is done and whose backward pass is not.

    With one chunk per stage (1F1B schedule), a stage holds as many micro-batches as there are stages from it to the last.
    With several (interleaved schedule), the first chunk that a micro-batch passes waits for all others: two chunks for each
    stage that follows, and a round of all stages for each further chunk.
    """
    if layout.virtual_pipeline == 1:
        return layers * (layout.pipeline - stage)
    chunks = 2 * (layout.pipeline - stage - 1) + (layout.virtual_pipeline - 1) * layout.pipeline + 1
    return chunks * layers / layout.virtual_pipeline


def _logits_gb(config: RunConfig, shape: ModelShape, rows: int) -> float:
    """GB of logits and the output layer: a chunk of logits twice in float32 and twice in bfloat16; the output layer's
    gradient in float32 and in bfloat16. `rows` is the vocabulary's share of this rank."""
    chunk = min(config.training.logprob_chunk_tokens, config.training.micro_batch_tokens)
    return (12 * chunk * rows + 6 * rows * shape.hidden) / GB


def num_frozen_models(config: RunConfig) -> int:
    """Number of frozen models that a rank holds. A teacher of another shape counts as one of this shape."""
    teachers = len(config.algorithm.teachers) if isinstance(config.algorithm, Distillation) else 0
    return teachers + int(config.algorithm.needs_reference)


# ------------------------------------------------------------------------------------------------------------------- engines
def gpu_memory(config: RunConfig, shape: ModelShape, device_gb: float) -> GpuMemory:
    """Estimate a GPU of the trainer. `generating` is 0 if engines have GPUs of their own."""
    trainer = trainer_memory(config, shape)
    if not config.placement.shared:
        return GpuMemory(trainer.peak + PROCESS_GB, generating=0.0)
    trainer_gb = 0.0 if config.training.offload else trainer.resident_gb
    return GpuMemory(
        updating=trainer.peak + PROCESS_GB + SLEEPING_ENGINE_GB,
        generating=engine_gb(config, shape, device_gb) + trainer_gb + PROCESS_GB,
    )


def engine_gb(config: RunConfig, shape: ModelShape, device_gb: float) -> float:
    """GB of an engine that is awake, on one GPU."""
    if isinstance(config.inference, VllmInference):
        return config.inference.memory_share * device_gb
    slots = config.rollout.slots_per_engine * config.model.max_positions * kv_cache_bytes_per_token(shape)
    return 2 * parameters_of(shape).total / GB + slots / GB + PROCESS_GB


def engine_memory(inference: VllmInference, shape: ModelShape, device_gb: float) -> EngineMemory:
    """Estimate one GPU of a vLLM engine: weights in bfloat16, and the rest of `memory_share` for the KV cache, unless
    `cache_gib` sets its size. Key-value heads are replicated if there are more GPUs than heads."""
    workers = inference.tensor_parallel
    weights = 2 * parameters_of(shape).total / workers / GB
    cache = inference.memory_share * device_gb - weights - ENGINE_OVERHEAD_GB
    if inference.cache_gib is not None:
        cache = inference.cache_gib * 2**30 / GB
    bytes_per_token = kv_cache_bytes_per_token(shape) / min(workers, shape.kv_heads)
    return EngineMemory(weights, cache, max(0, int(cache * GB / bytes_per_token)))


def kv_cache_bytes_per_token(shape: ModelShape) -> int:
    """Bytes of the keys and values of one token, over all layers, in bfloat16."""
    return 2 * 2 * shape.layers * shape.kv_heads * shape.head_size


def device_memory_gb(cluster: ClusterConfig) -> float | None:
    """GB of a GPU: from the config, else from this machine's GPUs (the smallest); None if neither is known."""
    if cluster.device_memory_gib is not None:
        return cluster.device_memory_gib * 2**30 / GB
    try:
        asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return min(map(float, found)) * 2**20 / GB if found else None
