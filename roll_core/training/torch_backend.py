"""The `torch` training backend: a Hugging Face model in one process, or sharded over ranks with FSDP2.

With several ranks the caller has initialised torch.distributed (gloo on CPU, NCCL on GPU). Losses carry global
denominators, so gradients are summed over ranks, never averaged.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from roll_core.algorithms.inputs import LossFn, LossInputs
from roll_core.batching.micro_batch import MicroBatch
from roll_core.config.model import ModelConfig
from roll_core.config.training import OptimizerConfig, Precision, TrainingConfig
from roll_core.models.causal_lm import build_model
from roll_core.training.base import Policy
from roll_core.training.schedule import learning_rate_at
from roll_core.training.scorer import TokenScorer
from roll_core.types.manifest import Metrics


class TorchBackend:
    def __init__(self, model: ModelConfig, training: TrainingConfig, *, seed: int, temperature: float, device: torch.device):
        self._model_config = model
        self._training = training
        self._seed = seed
        self._temperature = temperature
        self._device = device
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._scorer = self._build_scorer()
        self._reference: TokenScorer | None = None
        self._sums: dict[str, Tensor] = {}

    def start_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        self._optimizer_config = config
        self._total_steps = total_steps
        self._step = 0
        self._optimizer = torch.optim.AdamW(
            self._scorer.parameters(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch, policy: Policy) -> Tensor:
        scorer = self._scorer if policy is Policy.CURRENT else self._reference
        assert scorer is not None, "the reference policy was not loaded"
        with self._arithmetic():
            logprobs_N, _ = scorer(micro_batch.to(self._device))
        return logprobs_N.cpu()

    def accumulate(self, micro_batch: MicroBatch, loss: LossFn) -> None:
        batch = micro_batch.to(self._device)
        with self._arithmetic():
            logprobs_N, entropies_N = self._scorer(batch)
        outputs = loss(
            LossInputs(
                policy_logprobs_N=logprobs_N,
                entropies_N=entropies_N,
                # Fresh samples and one optimizer step: the policy is still the anchor.
                anchor_logprobs_N=logprobs_N.detach() if batch.anchor_logprobs_N is None else batch.anchor_logprobs_N,
                sampler_logprobs_N=batch.sampler_logprobs_N,
                reference_logprobs_N=batch.reference_logprobs_N,
                advantages_N=batch.advantages_N,
                mask_N=torch.ones_like(logprobs_N),
                sequence_N=batch.sequence_N,
                num_sequences=batch.num_sequences,
                global_tokens=batch.global_tokens,
                global_sequences=batch.global_sequences,
            )
        )
        # FSDP averages gradients over ranks; the global denominators already make their sum the right answer.
        (outputs.loss * self._world_size).backward()
        self._add("update/loss", outputs.loss.detach())
        self._add("scored_tokens", torch.tensor(float(len(logprobs_N)), device=self._device))
        for name, value in outputs.metric_sums.items():
            self._add(name, value.detach())

    def apply_gradients(self) -> Metrics:
        rate = learning_rate_at(self._step, self._optimizer_config, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = _whole(
            torch.nn.utils.clip_grad_norm_(self._scorer.parameters(), self._optimizer_config.max_gradient_norm)
        ).item()
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        skipped = float(not math.isfinite(norm))
        steps = {"update/gradient_norm": norm, "update/learning_rate": rate, "update/skipped_steps": skipped}
        return self._drain_sums() | steps

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Full gradients accumulated so far, by Hugging Face name: for tests and for debugging a run."""
        for name, parameter in self._scorer.model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            yield name, _whole(parameter.grad)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._scorer.model.named_parameters():
            yield name, _whole(parameter.detach())

    def save(self, folder: Path) -> list[Path]:
        model_state, optimizer_state = get_state_dict(self._scorer, self._optimizer)
        dcp.save(
            {"model": model_state, "optimizer": optimizer_state, "step": self._step},
            checkpoint_id=folder,
            no_dist=self._world_size == 1,
        )
        mine = sorted(folder.glob(f"__{self._rank}_*.distcp"))
        return [*mine, folder / ".metadata"] if self._rank == 0 else mine

    def load(self, folder: Path) -> None:
        model_state, optimizer_state = get_state_dict(self._scorer, self._optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=folder, no_dist=self._world_size == 1)
        set_state_dict(self._scorer, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self._step = int(state["step"])

    def load_reference(self, folder: Path) -> None:
        self._reference = self._build_scorer().requires_grad_(False)
        state: dict[str, Any] = {"model": get_model_state_dict(self._reference)}
        dcp.load(state, checkpoint_id=folder, no_dist=self._world_size == 1)
        set_model_state_dict(self._reference, state["model"])

    def _build_scorer(self) -> TokenScorer:
        model = build_model(self._model_config, self._seed).to(self._device)
        if self._training.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        scorer = TokenScorer(model, self._temperature, self._training.logprob_chunk_tokens)
        if self._world_size > 1:
            self._shard(scorer)
        return scorer

    def _shard(self, scorer: TokenScorer) -> None:
        bfloat16 = self._training.precision is Precision.BFLOAT16
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bfloat16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for module in [*scorer.model.base_model.layers, scorer]:
            fully_shard(module, mp_policy=policy)

    def _arithmetic(self) -> contextlib.AbstractContextManager[None]:
        if self._training.precision is Precision.BFLOAT16 and self._world_size == 1:
            return torch.autocast(self._device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _drain_sums(self) -> Metrics:
        """Sums of this step over all ranks; per-token sums become means over the tokens scored, if there were any."""
        names = sorted(self._sums)
        totals = torch.stack([self._sums[name].double() for name in names])
        if self._world_size > 1:
            dist.all_reduce(totals)
        self._sums = {}
        sums = dict(zip(names, totals.tolist(), strict=True))
        loss, tokens = sums.pop("update/loss"), sums.pop("scored_tokens")
        means = {name: value / tokens for name, value in sums.items()} if tokens else {}
        return means | {"update/loss": loss}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
