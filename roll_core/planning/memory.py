"""What the roles of a run take of a GPU's memory, known before anything is started: by the torch backend, and an engine that
shares the GPU with it or has one of its own.

Activations are those of layers that were compiled: what the backward pass reads again, in bfloat16. How much that is beside
attention and matrices, and NOT_COMPILED, were fitted to two peaks on an H200 (1.4 billion weights, 16,320 tokens: 58.4 GB,
and 80.9 without compiling); other shapes were not measured.
"""

import subprocess
from dataclasses import dataclass

from roll_core.config.algorithm import Distillation
from roll_core.config.inference import VllmInference
from roll_core.config.placement import ClusterConfig
from roll_core.config.run import RunConfig
from roll_core.config.training import Precision
from roll_core.errors import UserError
from roll_core.planning.model_shape import ModelShape

GB = 1e9
PROCESS_GB = 0.8
"""A process on a GPU: CUDA's context, and the workspaces of its matrix products."""
ASLEEP_GB = 2.0
"""What an engine keeps while it sleeps: the same, and its recorded steps."""
NOT_COMPILED = 1.6
"""Activations of layers that were not compiled, as measured: each step between two matrix products keeps its own."""


@dataclass(frozen=True)
class TrainerMemory:
    """Of one rank, in GB."""

    weights: float
    gradients: float
    optimizer: float
    frozen: float
    """Policies that it is compared with, and teachers."""
    activations: float
    logits: float

    @property
    def kept(self) -> float:
        """Between two updates."""
        return self.weights + self.optimizer + self.frozen

    @property
    def peak(self) -> float:
        return self.kept + self.gradients + self.activations + self.logits


@dataclass(frozen=True)
class GpuMemory:
    """Of one GPU, in GB, at the two times of an iteration."""

    updating: float
    generating: float

    @property
    def peak(self) -> float:
        return max(self.updating, self.generating)


def trainer_memory(config: RunConfig, shape: ModelShape) -> TrainerMemory:
    ranks, training = len(config.placement.trainer), config.training
    weights = 4 * shape.num_parameters / ranks / GB
    num_models = 2 if config.algorithm.has_critic else 1
    numbers = 2 if training.precision is Precision.BFLOAT16 else 4
    layer = _kept_of_a_token(shape) * numbers * (1.0 if training.compile else NOT_COMPILED)
    # Recomputed layer by layer: what each was given, and all of one.
    kept = shape.layers * shape.hidden * numbers + layer if training.activation_checkpointing else shape.layers * layer
    chunk = min(training.logprob_chunk_tokens, training.micro_batch_tokens) * shape.vocabulary
    return TrainerMemory(
        weights=num_models * weights,
        gradients=num_models * weights,
        optimizer=2 * num_models * weights,
        frozen=_num_frozen(config) * weights,
        activations=training.micro_batch_tokens * kept / GB,
        logits=(8 * chunk + 4 * shape.vocabulary * shape.hidden) / GB,  # a buffer, its gradient, and that of the layer
    )


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


def check_memory(config: RunConfig, shape: ModelShape, device_gb: float) -> None:
    """Raise one sentence if a run cannot fit the GPUs it is given."""
    gpu, trainer = gpu_memory(config, shape, device_gb), trainer_memory(config, shape)
    if gpu.updating > device_gb:
        most = int(
            (device_gb - gpu.updating + trainer.activations) / trainer.activations * config.training.micro_batch_tokens
        )
        help = (
            f"lower training.micro_batch_tokens ({config.training.micro_batch_tokens}) to {most // 1024 * 1024}"
            if most >= max(1024, config.model.max_positions)
            else "give placement.trainer more devices"
        )
        raise UserError(
            f"training: an update needs about {gpu.updating:.0f} GB of a GPU that has {device_gb:.0f}: {help}"
            + ("" if config.training.activation_checkpointing else ", or set training.activation_checkpointing=true")
        )
    if gpu.generating > device_gb:
        share = (device_gb - gpu.generating) / device_gb
        raise UserError(
            f"inference: engine and trainer need about {gpu.generating:.0f} GB of a GPU that has {device_gb:.0f} while "
            "tokens are generated: set training.offload=true"
            + (
                f", or lower inference.memory_share to {config.inference.memory_share + share:.2f}"
                if isinstance(config.inference, VllmInference) and config.inference.memory_share + share > 0.05
                else ", or lower rollout.slots_per_engine"
            )
        )


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


def engine_gb(config: RunConfig, shape: ModelShape, device_gb: float) -> float:
    """Of an engine that is awake."""
    if isinstance(config.inference, VllmInference):
        return config.inference.memory_share * device_gb
    slots = config.rollout.slots_per_engine * config.model.max_positions * cache_bytes_of_a_token(shape)
    return 2 * shape.num_parameters / GB + slots / GB + PROCESS_GB


def cache_bytes_of_a_token(shape: ModelShape) -> int:
    """Keys and values, in bfloat16."""
    return 2 * 2 * shape.layers * shape.kv_heads * shape.head_size


def _kept_of_a_token(shape: ModelShape) -> int:
    """Numbers that the backward pass of one layer reads again."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    beside = 6 * shape.hidden  # what both halves were given, as it was and normalised, and what they answered
    attention = (
        (queries + keys) + (queries + 2 * keys) + queries
    )  # before norm and rotation, as attention gets it, its answer
    return beside + attention + 3 * shape.intermediate * shape.experts_per_token


def _num_frozen(config: RunConfig) -> int:
    """Teachers of other shapes are taken for one of this."""
    teachers = len(config.algorithm.teachers) if isinstance(config.algorithm, Distillation) else 0
    return teachers + int(config.algorithm.needs_reference)
