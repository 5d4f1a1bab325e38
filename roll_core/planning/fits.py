"""Memory check of a run against its GPUs. The error is one sentence that says what is missing and which settings would
fit."""

import math

from roll_core.config.inference import VllmInference
from roll_core.config.model import ModelShape
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind
from roll_core.errors import UserError
from roll_core.planning.memory import GpuMemory, engine_memory, gpu_memory, trainer_memory
from roll_core.planning.proposals import nearest_that_fits


def check_memory(config: RunConfig, shape: ModelShape, device_gb: float) -> None:
    """Raise UserError if what is on a GPU at once does not fit its `device_gb` GB (1e9 bytes): the trainer during an update,
    or engine and trainer during generation."""
    gpu = gpu_memory(config, shape, device_gb)
    if gpu.updating > device_gb:
        raise UserError(
            f"training: an update needs about {gpu.updating:.0f} GB of a GPU that has {device_gb:.0f}, "
            f"{gpu.updating - device_gb:.1f} too many: {_suggest_fit(config, shape, gpu, device_gb)}"
        )
    if gpu.generating > device_gb:
        share = (device_gb - gpu.generating) / device_gb
        raise UserError(
            f"inference: engine and trainer need about {gpu.generating:.0f} GB of a GPU that has {device_gb:.0f} while "
            "tokens are generated: set training.offload=true"
            + (
                f", or lower inference.memory_share to {math.floor(100 * (config.inference.memory_share + share)) / 100:.2f}"
                if isinstance(config.inference, VllmInference) and config.inference.memory_share + share > 0.05
                else ", or lower rollout.slots_per_engine"
            )
        )
    if isinstance(config.inference, VllmInference):
        _check_engine(config, config.inference, shape, device_gb)


def _suggest_fit(config: RunConfig, shape: ModelShape, gpu: GpuMemory, device_gb: float) -> str:
    """Suggest settings with which an update fits, for the end of an error sentence."""
    if config.training.backend is BackendKind.MEGATRON:
        nearest = nearest_that_fits(config, shape, device_gb)
        if nearest is not None:
            changed = override_keys(config, nearest.layout, nearest.recomputes)
            return f"{' '.join(f'--set {each}' for each in changed)} fits, with {nearest.gpu_gb:.0f} GB"
    activations = trainer_memory(config, shape).activations
    most = int((device_gb - gpu.updating + activations) / activations * config.training.micro_batch_tokens)
    help = (
        f"lower training.micro_batch_tokens ({config.training.micro_batch_tokens}) to {most // 1024 * 1024}"
        if most >= max(1024, config.model.max_positions)
        else "give placement.trainer more devices"
    )
    if config.training.backend is BackendKind.TORCH and len(config.placement.trainer) > 1:
        help += ", or set training.backend=megatron, which shares out layers and tokens, too"
    return help + ("" if config.training.activation_checkpointing else ", or set training.activation_checkpointing=true")


def override_keys(config: RunConfig, layout: LayoutConfig, recomputes: bool) -> list[str]:
    """Return the overrides to --set for a layout. Example: ["training.layout.expert=8"]"""
    present = config.training.layout.model_dump()
    changed = [f"training.layout.{key}={value}" for key, value in layout.model_dump().items() if value != present[key]]
    if recomputes != config.training.activation_checkpointing:
        changed.append(f"training.activation_checkpointing={str(recomputes).lower()}")
    return changed


def _check_engine(config: RunConfig, inference: VllmInference, shape: ModelShape, device_gb: float) -> None:
    """Raise UserError if the weights and one sequence of model.max_positions tokens do not fit an engine's GPUs."""
    engine = engine_memory(inference, shape, device_gb)
    if engine.cached_tokens >= config.model.max_positions:
        return
    sizes = (n for n in range(inference.tensor_parallel + 1, config.cluster.devices_per_node + 1) if shape.heads % n == 0)
    larger = (inference.model_copy(update={"tensor_parallel": n}) for n in sizes)
    enough = (each for each in larger if engine_memory(each, shape, device_gb).cached_tokens >= config.model.max_positions)
    fits = next(enough, None)
    help = f"set inference.tensor_parallel={fits.tensor_parallel}" if fits is not None else "take GPUs with more memory"
    raise UserError(
        f"inference.tensor_parallel ({inference.tensor_parallel}): of each of an engine's GPUs weights take "
        f"{engine.weights:.0f} of {inference.memory_share * device_gb:.0f} GB, which leaves no room for a sequence of "
        f"{config.model.max_positions} tokens: {help}"
    )
