"""Layouts of the megatron backend that a model and a cluster allow, the quickest first."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from roll_core.config.model import ModelShape
from roll_core.config.run import RunConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.training import BackendKind
from roll_core.planning.layout_checks import tensor_divides
from roll_core.planning.memory import ASLEEP_GB, PROCESS_GB, TrainerMemory, trainer_memory
from roll_core.planning.time_model import UpdateTime, update_time

HEADROOM = 0.1
"""Of a GPU's memory that a proposal leaves free: allocators leave gaps, and plans were right to a tenth where measured."""
MOST_CHUNKS = 4
"""Of a stage that are tried."""


@dataclass(frozen=True)
class Proposal:
    layout: LayoutConfig
    recomputes: bool
    """training.activation_checkpointing"""
    memory: TrainerMemory
    gpu_gb: float
    """With the process, and an engine that sleeps."""
    update: UpdateTime


def propose(config: RunConfig, shape: ModelShape, device_gb: float) -> list[Proposal]:
    """All layouts that fit, the quickest first; of those as quick, the one that leaves more memory."""
    proposals = []
    shared = config.placement.shared
    for layout in _layouts(config, shape):
        if config.rollout.num_trajectories // config.training.optimizer_steps < layout.data(len(config.placement.trainer)):
            continue
        for recomputes in (False, True):
            candidate, beside = with_layout(config, layout, recomputes), PROCESS_GB + ASLEEP_GB * bool(shared)
            memory = trainer_memory(candidate, shape)
            if memory.peak + beside <= (1 - HEADROOM) * device_gb:
                proposals.append(Proposal(layout, recomputes, memory, memory.peak + beside, update_time(candidate, shape)))
                break  # computing again would only take longer
    return sorted(proposals, key=lambda proposal: (round(proposal.update.total, 2), proposal.gpu_gb))


def nearest_that_fits(config: RunConfig, shape: ModelShape, device_gb: float) -> Proposal | None:
    """The one that changes the fewest settings; of those, the quickest."""
    settings = _settings(config.training.layout, config.training.activation_checkpointing)

    def changes(proposal: Proposal) -> int:
        return sum(a != b for a, b in zip(settings, _settings(proposal.layout, proposal.recomputes), strict=True))

    return min(propose(config, shape, device_gb), key=changes, default=None)


def with_layout(config: RunConfig, layout: LayoutConfig, recomputes: bool) -> RunConfig:
    changed = {"backend": BackendKind.MEGATRON, "layout": layout, "activation_checkpointing": recomputes}
    return config.model_copy(update={"training": config.training.model_copy(update=changed)})


def _settings(layout: LayoutConfig, recomputes: bool) -> tuple[int, ...]:
    return (*layout.model_dump().values(), int(recomputes))


def _layouts(config: RunConfig, shape: ModelShape) -> Iterator[LayoutConfig]:
    """Sizes that divide the ranks; what shares matrices stays within a node, where it is fast enough."""
    ranks, node = len(config.placement.trainer), config.cluster.devices_per_node
    within = [n for n in _divisors(ranks) if n <= node]
    tensors = [n for n in within if tensor_divides(n, shape)]
    experts = [n for n in _divisors(ranks) if shape.experts % n == 0] if shape.experts else [1]
    for pipeline in _divisors(ranks):
        for chunks in range(1, MOST_CHUNKS + 1) if pipeline > 1 else (1,):
            stages = LayoutConfig(pipeline=pipeline, virtual_pipeline=chunks)
            if stages.layers_of_chunks(shape.layers) is None:
                continue
            for tensor, context, expert in product(tensors, within, experts):
                if ranks % (tensor * pipeline * context):
                    continue
                # Experts are cut only as the rest is: each of them is small.
                for expert_tensor in {1, tensor} if shape.experts and shape.intermediate % tensor == 0 else {1}:
                    if ranks % (expert_tensor * expert * pipeline) == 0:
                        sizes = {"tensor": tensor, "context": context, "expert": expert, "expert_tensor": expert_tensor}
                        yield stages.model_copy(update=sizes)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
