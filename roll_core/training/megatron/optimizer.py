"""Wrapper of Megatron's distributed optimizer: every rank updates a range of each parameter's elements, and holds the
optimizer state of that range only."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.training.training import Precision
from roll_core.training.megatron.model import PolicyModel

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state of each element: its first and second moment."""


@dataclass(frozen=True)
class OwnedRange:
    """Elements `start` to `stop` of a parameter, which this rank updates, and their optimizer state."""

    parameter: nn.Parameter
    start: int
    stop: int
    main: Tensor
    """Float32 main weights; the parameter's own memory if the parameter is float32."""
    state: dict[str, Any]

    def value(self, name: str) -> Tensor:
        """Return the main weights ("main") or an optimizer state, by name."""
        return self.main.data if name == "main" else self.state[name]


def wrap(chunks: Sequence[PolicyModel]) -> list[DistributedDataParallel]:
    """Wrap chunks for training: gradients accumulate in float32 and are summed over the model copies once per optimizer
    step."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


class DistributedAdam:
    """AdamW over this rank's wrapped chunks. `step_count` is the number of applied steps."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, precision: Precision):
        self._chunks = list(chunks)
        self._max_norm = config.max_gradient_norm
        self._is_reduced = False
        self.step_count = 0
        is_bfloat16 = precision is Precision.BFLOAT16
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.epsilon,
            clip_grad=config.max_gradient_norm,
            bf16=is_bfloat16,
            params_dtype=torch.bfloat16 if is_bfloat16 else torch.float32,
            use_distributed_optimizer=True,
        )
        # No overrides: norm weights decay, too, as in the torch backend.
        self._optimizer = get_megatron_optimizer(settings, self._chunks, config_overrides={}, use_gloo_process_groups=False)
        self._init_state()
        self.discard()

    def reduce(self) -> None:
        """Sum gradients over ranks, unless done since the last step. Afterwards each rank has the sums of its own ranges."""
        if not self._is_reduced:
            finalize_model_grads(self._chunks)
            self._is_reduced = True

    def step(self, rate: float) -> float:
        """Apply the clipped gradients at this learning rate, if they are finite. Return the gradient norm before
        clipping."""
        self.reduce()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if math.isfinite(norm):
            for each in self._optimizer.chained_optimizers:
                if parameters := each.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, max_norm=self._max_norm, total_norm=norm)
            self._optimizer.step_with_ready_grads()
            self.step_count += 1
        self.discard()
        return norm

    def discard(self) -> None:
        """Zero all gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._is_reduced = False

    def gather_gradients(self) -> None:
        """All-gather the summed gradients, so that every rank has all of them, for inspection."""
        self.reduce()
        for chunk in self._chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)

    @property
    def gradient_buffers(self) -> list[Tensor]:
        """Gradient buffers of all chunks; all zero between two steps."""
        return [buffer.grad_data for chunk in self._chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """Yield the ranges of the parameters that this rank updates."""
        for each in self._optimizer.chained_optimizers:
            for parameter, (group, order) in each.model_param_group_index_map.items():
                main = each.optimizer.param_groups[group]["params"][order]
                place = each._get_model_param_range_map(parameter)["param"]
                yield OwnedRange(parameter, place.start, place.end, main, each.optimizer.state[main])

    def sync_main_weights(self) -> None:
        """Copy the parameters into the float32 main weights, after the parameters were set."""
        self._optimizer.reload_model_params()

    def set_step_count(self, step_count: int) -> None:
        """Set Adam's step count, which its bias correction depends on."""
        self.step_count = step_count
        for held in self.owned_ranges():
            held.state["step"].fill_(step_count)

    def _init_state(self) -> None:
        """Create the optimizer state, so that it can be saved and loaded before the first step."""
        for each in self._optimizer.chained_optimizers:
            for group in each.optimizer.param_groups:
                for main in group["params"]:
                    zeros = {name: torch.zeros_like(main.data) for name in MOMENTS}
                    each.optimizer.state[main].update(step=torch.tensor(0.0), **zeros)
