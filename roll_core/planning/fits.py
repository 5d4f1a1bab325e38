"""Memory check of a run against its GPUs. The error is one sentence that says what is missing and which settings would
fit. Every setting that it names was tried first."""

import math
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError

from roll_core.config.inference import VllmInference
from roll_core.config.model import ModelShape
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind
from roll_core.errors import UserError
from roll_core.planning.memory import TIGHT_SHARE, MemoryFit, engine_memory, gpu_memory, judge_memory, trainer_memory
from roll_core.planning.proposals import nearest_proposal, with_layout


def check_memory(config: RunConfig, shape: ModelShape, device_gb: float) -> None:
    """Raise UserError if what is on a GPU at once does not fit its `device_gb` GB (1e9 bytes): the trainer during an update,
    or engine and trainer during generation."""
    gpu = gpu_memory(config, shape, device_gb)
    if judge_memory(gpu.updating, device_gb) is MemoryFit.DOES_NOT_FIT:
        raise UserError(
            f"training: an update needs about {gpu.updating:.0f} GB of a GPU that has {device_gb:.0f}, "
            f"{gpu.updating - device_gb:.1f} too many: {_advise_update(config, shape, device_gb)}"
        )
    if judge_memory(gpu.generating, device_gb) is MemoryFit.DOES_NOT_FIT:
        raise UserError(
            f"inference: engine and trainer need about {gpu.generating:.0f} GB of a GPU that has {device_gb:.0f} while "
            f"tokens are generated: {_advise_generation(config, shape, device_gb)}"
        )
    if isinstance(config.inference, VllmInference):
        _check_engine(config, config.inference, shape, device_gb)


# -------------------------------------------------------------------------------------------------------------------- advice
Advice = tuple[str, RunConfig]
"""Words of an advice, and the config of a user who follows it."""


def _advise_update(config: RunConfig, shape: ModelShape, device_gb: float) -> str:
    """Advise settings with which an update fits, for the end of an error sentence."""
    if config.training.backend is BackendKind.MEGATRON:
        nearest = nearest_proposal(config, shape, device_gb)
        if nearest is not None:
            changed = override_keys(config, nearest.layout, nearest.recomputes)
            verb = "fits" if nearest.verdict is MemoryFit.FITS else "is tight"
            return f"{' '.join(f'--set {each}' for each in changed)} {verb}, with {nearest.gpu_gb:.0f} GB"
    tried = [
        words
        for words, changed in _update_advice(config, shape, device_gb)
        if judge_memory(gpu_memory(changed, shape, device_gb).updating, device_gb) is not MemoryFit.DOES_NOT_FIT
    ]
    return ", or ".join(tried) or "give placement.trainer more devices, or take GPUs with more memory"


def _update_advice(config: RunConfig, shape: ModelShape, device_gb: float) -> Iterator[Advice]:
    """Iterate over what may make an update fit."""
    training = config.training
    if (smaller := _smaller_micro_batch(config, shape, device_gb)) is not None:
        words = f"lower training.micro_batch_tokens ({training.micro_batch_tokens}) to {smaller}"
        yield words, _changed(config, training={"micro_batch_tokens": smaller})
    recomputing = _changed(config, training={"activation_checkpointing": True})
    if not training.activation_checkpointing:
        yield "set training.activation_checkpointing=true", recomputing
        if smaller is None and (smaller := _smaller_micro_batch(recomputing, shape, device_gb)) is not None:
            words = f"set training.activation_checkpointing=true and training.micro_batch_tokens={smaller}"
            yield words, _changed(recomputing, training={"micro_batch_tokens": smaller})
    if training.backend is BackendKind.TORCH and len(config.placement.trainer) > 1:
        nearest = nearest_proposal(config, shape, device_gb)
        if nearest is not None:
            keys = " ".join(f"--set {each}" for each in override_keys(config, nearest.layout, nearest.recomputes))
            words = f"set training.backend=megatron, which shares out layers and tokens, too ({keys})"
            sharing = with_layout(config, nearest.layout, nearest.recomputes)
            if _is_valid(sharing):
                yield words, sharing


def _smaller_micro_batch(config: RunConfig, shape: ModelShape, device_gb: float) -> int | None:
    """Largest multiple of 1,024 tokens a micro-batch with which an update fits, not tightly; None if there is none."""
    activations, training = trainer_memory(config, shape).activations, config.training
    room = TIGHT_SHARE * device_gb - (gpu_memory(config, shape, device_gb).updating - activations)
    tokens = int(room / activations * training.micro_batch_tokens) // 1024 * 1024
    least = max(1024, config.model.max_positions, training.row_tokens or 0)
    return tokens if least <= tokens < training.micro_batch_tokens else None


def _advise_generation(config: RunConfig, shape: ModelShape, device_gb: float) -> str:
    """Advise settings with which engine and trainer fit together, for the end of an error sentence."""
    tried = [
        words
        for words, changed in _generation_advice(config, shape, device_gb)
        if judge_memory(gpu_memory(changed, shape, device_gb).generating, device_gb) is not MemoryFit.DOES_NOT_FIT
        and _has_cache(changed, shape, device_gb)
    ]
    return ", or ".join(tried) or "give placement.engines GPUs of their own, or take GPUs with more memory"


def _generation_advice(config: RunConfig, shape: ModelShape, device_gb: float) -> Iterator[Advice]:
    """Iterate over what may make engine and trainer fit together."""
    if not config.training.offload and config.shares_gpus:
        yield "set training.offload=true", _changed(config, training={"offload": True})
    surplus = gpu_memory(config, shape, device_gb).generating - TIGHT_SHARE * device_gb
    if isinstance(config.inference, VllmInference):
        share = math.floor(100 * (config.inference.memory_share - surplus / device_gb)) / 100
        if share > 0:
            yield f"lower inference.memory_share to {share:.2f}", _changed(config, inference={"memory_share": share})
        return
    slots = config.rollout.slots_per_engine
    while slots > 1:
        slots //= 2
        changed = _changed(config, rollout={"slots_per_engine": slots})
        if judge_memory(gpu_memory(changed, shape, device_gb).generating, device_gb) is MemoryFit.FITS:
            yield f"lower rollout.slots_per_engine to {slots}", changed
            return


def _changed(config: RunConfig, **sections: dict[str, object]) -> RunConfig:
    """Return the config with other values of some keys, by section."""
    changed: dict[str, BaseModel] = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update=changed)


def _is_valid(config: RunConfig) -> bool:
    """True if the config would be accepted."""
    try:
        RunConfig.model_validate(config.model_dump())
    except ValidationError:
        return False
    return True


def override_keys(config: RunConfig, layout: LayoutConfig, recomputes: bool) -> list[str]:
    """Return the overrides to --set for a layout. Example: ["training.layout.expert=8"]"""
    present = config.training.layout.model_dump()
    changed = [f"training.layout.{key}={value}" for key, value in layout.model_dump().items() if value != present[key]]
    if recomputes != config.training.activation_checkpointing:
        changed.append(f"training.activation_checkpointing={str(recomputes).lower()}")
    return changed


# ------------------------------------------------------------------------------------------------------------------- engines
def _has_cache(config: RunConfig, shape: ModelShape, device_gb: float) -> bool:
    """True if an engine has room for one sequence of model.max_positions tokens beside its weights."""
    if not isinstance(config.inference, VllmInference):
        return True
    return engine_memory(config.inference, shape, device_gb).cached_tokens >= config.model.max_positions


def _check_engine(config: RunConfig, inference: VllmInference, shape: ModelShape, device_gb: float) -> None:
    """Raise UserError if the weights and one sequence of model.max_positions tokens do not fit an engine's GPUs."""
    if _has_cache(config, shape, device_gb):
        return
    sizes = (n for n in range(inference.tensor_parallel + 1, config.cluster.devices_per_node + 1) if shape.heads % n == 0)
    fits = next((n for n in sizes if _has_cache(_changed(config, inference={"tensor_parallel": n}), shape, device_gb)), None)
    help = f"set inference.tensor_parallel={fits}" if fits is not None else "take GPUs with more memory"
    weights_gb = engine_memory(inference, shape, device_gb).weights
    raise UserError(
        f"inference.tensor_parallel ({inference.tensor_parallel}): of each of an engine's GPUs weights take "
        f"{weights_gb:.0f} of {inference.memory_share * device_gb:.0f} GB, which leaves no room for a sequence of "
        f"{config.model.max_positions} tokens: {help}"
    )
