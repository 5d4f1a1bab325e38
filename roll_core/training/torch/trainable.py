"""Base of the torch policy and the torch critic: a module in one process or sharded over ranks with FSDP2, its optimizer,
its checkpoints, and the metric sums of its losses.

With several ranks the caller has initialised torch.distributed (gloo on CPU, NCCL on GPU). Losses carry global denominators,
so gradients are summed over ranks, never averaged.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from roll_core.algorithms.inputs import LossOutputs
from roll_core.config.model import ModelConfig
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.training.lora import LoraConfig
from roll_core.config.training.training import Precision, TrainingConfig
from roll_core.models.causal_lm import build_model
from roll_core.training.base import Snapshot
from roll_core.training.checkpoint_reader import load_checkpoint
from roll_core.training.schedule import learning_rate_at
from roll_core.training.snapshot import HostCopy, written_files
from roll_core.training.torch.lora import add_adapters
from roll_core.training.torch.offload import Offloader, flatten_parameters
from roll_core.types.manifest import Metrics
from roll_core.weights.ranks import world_size


@dataclass(frozen=True)
class TorchSettings:
    """Settings that torch models are built, sharded and run with."""

    training: TrainingConfig
    seed: int
    temperature: float
    """Sampling temperature; logits are divided by it."""
    device: torch.device

    def build_model(self, model: ModelConfig, lora: LoraConfig | None = None) -> PreTrainedModel:
        """Build a model on the device, with LoRA, activation checkpointing and compilation as configured."""
        built = build_model(model, self.seed)
        if lora is not None:
            add_adapters(built, lora, self.seed)
        if world_size() == 1:  # with several ranks, sharding moves each layer's shards later
            flatten_parameters(built, self.device)
        if self.training.activation_checkpointing:
            built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            built.train()
        if self.training.compile:
            for layer in built.base_model.layers:
                layer.compile(dynamic=True)  # layer by layer: layers are alike, and are compiled only once
        return built

    def shard(self, module: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Shard a module over all ranks, layer by layer, in place; do nothing with one rank."""
        if world_size() == 1:
            return
        bfloat16 = self.training.precision is Precision.BFLOAT16
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bfloat16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        ranks = init_device_mesh(self.device.type, (world_size(),))
        for each in [*layers, module]:
            fully_shard(each, mesh=ranks, mp_policy=policy)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Autocast to bfloat16 on one rank, if configured. With several ranks FSDP casts instead."""
        if self.training.precision is Precision.BFLOAT16 and world_size() == 1:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()


class TorchTrainable:
    """Module with an optimizer, checkpoints and metric sums; a `Trainable`. `area` is the first part of its metric names:
    update or critic."""

    def __init__(self, module: nn.Module, settings: TorchSettings, area: str):
        self._module = module
        self._settings = settings
        self._area = area
        self._sums: dict[str, Tensor] = {}
        self._host_copy = HostCopy()
        self._offloader = Offloader(settings.device)
        self._checkpoint_group = dist.new_group(backend="gloo") if world_size() > 1 else None

    def start_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        self._optimizer_config = config
        self._total_steps = total_steps
        self._step = 0
        self._optimizer = torch.optim.AdamW(
            [parameter for parameter in self._module.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def apply_gradients(self) -> Metrics:
        rate = learning_rate_at(self._step, self._optimizer_config, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        parameters, max_norm = self._module.parameters(), self._optimizer_config.max_gradient_norm
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_norm)).item()
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        steps = {"gradient_norm": norm, "learning_rate": rate, "skipped_steps": float(not math.isfinite(norm))}
        return self._drain_sums() | {f"{self._area}/{name}": value for name, value in steps.items()}

    def discard_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._sums = {}

    def offload(self) -> None:
        self._offloader.offload(self._modules(), self._optimizer)

    def reload(self) -> None:
        self._offloader.reload(self._modules(), self._optimizer)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full gradients accumulated so far, by parameter name; for tests and for debugging a run."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, f"{name} has no gradient"
                yield name, full_tensor(parameter.grad)

    def snapshot(self) -> Snapshot:
        if not self._optimizer.state:
            self._init_optimizer_state()
        model_state, optimizer_state = get_state_dict(self._module, self._optimizer)
        state = self._host_copy.copy({"model": model_state, "optimizer": optimizer_state, "step": self._step})

        def write(folder: Path) -> list[Path]:
            # A process group of its own: ranks keep training, and collectives of a group must have one order on all ranks.
            dcp.save(state, checkpoint_id=folder, no_dist=world_size() == 1, process_group=self._checkpoint_group)
            return written_files(folder)

        return write

    def load(self, folder: Path) -> None:
        model_state, optimizer_state = get_state_dict(self._module, self._optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        load_checkpoint(state, folder, no_dist=world_size() == 1)
        set_state_dict(self._module, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self._step = int(state["step"])

    def _init_optimizer_state(self) -> None:
        """Create the optimizer state of step 0. torch creates it by a step with learning rate 0, which must not be
        counted."""
        get_state_dict(self._module, self._optimizer)
        for state in self._optimizer.state.values():
            state["step"].zero_()

    def _modules(self) -> list[nn.Module]:
        """Modules that occupy device memory."""
        return [self._module]

    def _backward(self, outputs: LossOutputs, num_tokens: int) -> None:
        # FSDP averages gradients over ranks; with global denominators their sum is the correct gradient.
        (outputs.loss * world_size()).backward()
        self._add_to_sum("loss", outputs.loss.detach())
        self._add_to_sum("scored_tokens", torch.tensor(float(num_tokens), device=self._settings.device))
        for name, value in outputs.metric_sums.items():
            self._add_to_sum(name, value.detach())

    def _add_to_sum(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _drain_sums(self) -> Metrics:
        """Return the sums of this optimizer step over all ranks, and reset them. Per-token sums become means over the scored
        tokens, if there are any."""
        names = sorted(self._sums)
        totals = torch.stack([self._sums[name].double() for name in names])
        if world_size() > 1:
            dist.all_reduce(totals)
        self._sums = {}
        sums = dict(zip(names, totals.tolist(), strict=True))
        loss, tokens = sums.pop("loss"), sums.pop("scored_tokens")
        means = {name: value / tokens for name, value in sums.items()} if tokens else {}
        return means | {f"{self._area}/loss": loss}


def full_tensor(tensor: Tensor) -> Tensor:
    """Assemble a distributed tensor from the shards of all ranks; return a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
