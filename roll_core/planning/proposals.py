"""Layouts of the megatron backend that a model and a cluster allow, fastest first. `roll plan` lists them; errors suggest
them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from roll_core.config.model import ModelShape
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind
from roll_core.planning.layout_checks import tensor_divides
from roll_core.planning.memory import (
    PROCESS_GB,
    SLEEPING_ENGINE_GB,
    MemoryFit,
    TrainerMemory,
    judge_memory,
    trainer_memory,
)
from roll_core.planning.time_model import UpdateTime, update_time

MAX_CHUNKS = 4
"""Chunks per pipeline stage that are tried, at most."""


@dataclass(frozen=True)
class Proposal:
    """Layout that fits, if only tightly, with its estimated memory and time."""

    layout: LayoutConfig
    recomputes: bool
    """Value of training.activation_checkpointing."""
    memory: TrainerMemory
    gpu_gb: float
    """GB at the peak of an update, with the process and a sleeping engine."""
    verdict: MemoryFit
    update: UpdateTime


def propose(config: RunConfig, shape: ModelShape, device_gb: float) -> list[Proposal]:
    """Return all layouts that fit, or, if none does, those that are tight: fastest first; of equally fast ones, the one that
    needs less memory first."""
    layouts = [layout for layout in _layouts(config, shape) if _has_work(config, layout)]
    for verdict in (MemoryFit.FITS, MemoryFit.TIGHT):
        tried = [_try_layout(config, shape, device_gb, layout, verdict) for layout in layouts]
        if proposals := [proposal for proposal in tried if proposal is not None]:
            return sorted(proposals, key=lambda proposal: (round(proposal.update.total, 2), proposal.gpu_gb))
    return []


def _has_work(config: RunConfig, layout: LayoutConfig) -> bool:
    """True if every copy of the model gets a trajectory in every optimizer step."""
    per_step = config.rollout.num_trajectories // config.training.optimizer_steps
    return per_step >= layout.data_parallel_size(len(config.placement.trainer))


def _try_layout(
    config: RunConfig, shape: ModelShape, device_gb: float, layout: LayoutConfig, wanted: MemoryFit
) -> Proposal | None:
    """Estimate a layout that earns the wanted verdict, with recomputation only if it must be; None if it does not."""
    overhead_gb = PROCESS_GB + SLEEPING_ENGINE_GB * bool(config.placement.shared)
    for recomputes in (False, True):
        candidate = with_layout(config, layout, recomputes)
        memory = trainer_memory(candidate, shape)
        gpu_gb = memory.peak + overhead_gb
        if judge_memory(gpu_gb, device_gb) is wanted:
            return Proposal(layout, recomputes, memory, gpu_gb, wanted, update_time(candidate, shape))
    return None


def nearest_proposal(config: RunConfig, shape: ModelShape, device_gb: float) -> Proposal | None:
    """Return the layout of `propose` with the fewest changed settings, the fastest of several; None if there is none."""
    settings = _settings(config.training.layout, config.training.activation_checkpointing)

    def num_changes(proposal: Proposal) -> int:
        return sum(a != b for a, b in zip(settings, _settings(proposal.layout, proposal.recomputes), strict=True))

    return min(propose(config, shape, device_gb), key=num_changes, default=None)


def with_layout(config: RunConfig, layout: LayoutConfig, recomputes: bool) -> RunConfig:
    """Return the config with this layout of the megatron backend."""
    changed = {"backend": BackendKind.MEGATRON, "layout": layout, "activation_checkpointing": recomputes}
    return config.model_copy(update={"training": config.training.model_copy(update=changed)})


def _settings(layout: LayoutConfig, recomputes: bool) -> tuple[int, ...]:
    return (*layout.model_dump().values(), int(recomputes))


def _layouts(config: RunConfig, shape: ModelShape) -> Iterator[LayoutConfig]:
    """Iterate over layouts whose sizes divide the ranks. Tensor and context groups stay within a node, where links are
    fast."""
    ranks, node = len(config.placement.trainer), config.cluster.devices_per_node
    within = [n for n in _divisors(ranks) if n <= node]
    tensors = [n for n in within if tensor_divides(n, shape)]
    experts = [n for n in _divisors(ranks) if shape.experts % n == 0] if shape.experts else [1]
    for pipeline in _divisors(ranks):
        for chunks in range(1, MAX_CHUNKS + 1) if pipeline > 1 else (1,):
            stages = LayoutConfig(pipeline=pipeline, virtual_pipeline=chunks)
            if stages.layers_of_chunks(shape.layers) is None:
                continue
            for tensor, context, expert in product(tensors, within, experts):
                if ranks % (tensor * pipeline * context):
                    continue
                # Experts are split as the rest is, or not at all: each of them is small.
                for expert_tensor in {1, tensor} if shape.experts and shape.intermediate % tensor == 0 else {1}:
                    if ranks % (expert_tensor * expert * pipeline) == 0:
                        sizes = {"tensor": tensor, "context": context, "expert": expert, "expert_tensor": expert_tensor}
                        yield stages.model_copy(update=sizes)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
