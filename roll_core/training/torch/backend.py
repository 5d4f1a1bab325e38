"""The `torch` training backend: a Hugging Face causal language model, and the frozen policies it is compared with."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from roll_core.algorithms.inputs import LossFn
from roll_core.batching.micro_batch import MicroBatch
from roll_core.config.model import ModelConfig
from roll_core.config.training.lora import LoraConfig
from roll_core.errors import RollError
from roll_core.models.causal_lm import routers_of
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.training.base import Policy, Share, Snapshot
from roll_core.training.checkpoint_reader import load_checkpoint
from roll_core.training.experts.losses import write_shares
from roll_core.training.experts.routers import Routers
from roll_core.training.loss_inputs import loss_inputs
from roll_core.training.scorer import ReferenceStates, TokenScorer
from roll_core.training.torch.lora import merged_parameters
from roll_core.training.torch.trainable import TorchSettings, TorchTrainable, full_tensor
from roll_core.types.manifest import Metrics
from roll_core.weights.ranks import rank, world_size


class TorchBackend(TorchTrainable):
    """Policy trained as a Hugging Face model, sharded over all ranks with FSDP2; a `TrainingBackend`."""

    def __init__(self, model: ModelConfig, settings: TorchSettings):
        self._model_config = model
        self._lora = settings.training.lora
        self._scorer = _build_scorer(model, settings, self._lora)
        self._frozen: dict[str, TokenScorer] = {}
        super().__init__(self._scorer, settings, area="update")
        routers, num_layers = routers_of(self._scorer.model), len(self._scorer.model.base_model.layers)
        if settings.training.routing.freeze_router:
            for router in routers.values():
                router.requires_grad_(False)
        # FSDP averages gradients over ranks; router losses are parts of a sum, so that they are scaled by the world size.
        num_experts = max((router.num_experts for router in routers.values()), default=0)
        self._routers = Routers(settings.training.routing, num_layers, num_experts, settings.device, world_size())
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._route, layer))

    def apply_gradients(self) -> Metrics:
        return super().apply_gradients() | self._routers.metrics()

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self._routers.discard()

    def snapshot(self) -> Snapshot:
        write_module, shares = super().snapshot(), self._routers.losses.shares

        def write(folder: Path) -> list[Path]:
            return write_module(folder) + (write_shares(shares, folder) if rank() == 0 else [])

        return write

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._routers.losses.load(folder)

    @property
    def share(self) -> Share:
        return Share(rank(), world_size(), is_reporter=True)

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch], policy: str) -> list[Tensor]:
        scorer = self._scorer if policy == Policy.CURRENT else self._frozen[policy]
        with self._settings.autocast():
            return [scorer(self._stage_batch(each)).logprobs_N.cpu() for each in micro_batches]

    @torch.no_grad()
    def divergences(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        with self._settings.autocast():
            batches = (self._stage_batch(each) for each in micro_batches)
            scored = [self._scorer(batch, self._reference_states(batch)) for batch in batches]
        return [each.divergences_N.cpu() for each in scored]

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFn) -> None:
        self._routers.begin_step(micro_batches)
        for micro_batch in micro_batches:
            batch = self._stage_batch(micro_batch)
            with self._settings.autocast():
                scored = self._scorer(batch)
            self._backward(loss(loss_inputs(batch, scored)), len(scored.logprobs_N))

    def accumulate_beside_reference(self, micro_batches: Sequence[MicroBatch], loss: LossFn) -> None:
        self._routers.begin_step(micro_batches)
        for micro_batch in micro_batches:
            batch = self._stage_batch(micro_batch)
            with self._settings.autocast():
                scored = self._scorer(batch, self._reference_states(batch))
            self._backward(loss(loss_inputs(batch, scored)), len(scored.logprobs_N))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        named = ((name, full_tensor(parameter.detach())) for name, parameter in self._scorer.model.named_parameters())
        return to_checkpoint_names(named if self._lora is None else merged_parameters(named, self._lora))

    def load_frozen(self, name: str, folder: Path) -> None:
        frozen = _build_scorer(self._model_config, self._settings, self._lora)
        state: dict[str, Any] = {"model": get_model_state_dict(frozen)}
        load_checkpoint(state, folder, no_dist=world_size() == 1)
        set_model_state_dict(frozen, state["model"])
        self._frozen[name] = frozen.requires_grad_(False)

    def build_frozen(self, name: str, model: ModelConfig) -> None:
        frozen = _build_scorer(model, self._settings, lora=None)
        theirs, ours = (scorer.model.config.vocab_size for scorer in (frozen, self._scorer))
        if theirs != ours:
            raise RollError(f"algorithm.teachers: {name} has a vocabulary of {theirs} tokens, the policy one of {ours}")
        self._frozen[name] = frozen.requires_grad_(False)

    def _stage_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """Move a micro-batch to the device and keep its routing notes for the routers, in the forward pass and in any
        recomputation."""
        batch = micro_batch.to(self._settings.device)
        self._notes_tC = batch.routing_notes().flatten(0, 1)
        return batch

    def _route(
        self, layer: int, router: Qwen3MoeTopKRouter, _: Any, outputs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Forward hook of a router: replay recorded choices, record the choice, and attach the auxiliary losses to the
        gates."""
        logits_tE, gates_tk, experts_tk = outputs
        replayed_tk = self._routers.replayed_choice(layer, self._notes_tC, experts_tk)
        if replayed_tk is not None:
            experts_tk = replayed_tk
            gates_tk = logits_tE.softmax(dim=-1, dtype=torch.float32).gather(1, experts_tk)
            if router.norm_topk_prob:
                gates_tk = gates_tk / gates_tk.sum(dim=-1, keepdim=True)
            gates_tk = gates_tk.to(logits_tE.dtype)
        if not torch.is_grad_enabled():
            return logits_tE, gates_tk, experts_tk
        # Not `one_hot` or `bincount`: their output shapes are unknown to the compiler.
        chosen_tE = torch.zeros_like(logits_tE, dtype=torch.bool).scatter_(1, experts_tk, True)
        return logits_tE, self._routers.record_choice(layer, self._notes_tC, logits_tE, gates_tk, chosen_tE), experts_tk

    def _modules(self) -> list[nn.Module]:
        return [self._scorer, *self._frozen.values()]

    @torch.no_grad()
    def _reference_states(self, batch: MicroBatch) -> ReferenceStates:
        return self._frozen[Policy.REFERENCE].reference_states(batch)


def _build_scorer(model: ModelConfig, settings: TorchSettings, lora: LoraConfig | None) -> TokenScorer:
    built = settings.build_model(model, lora)
    scorer = TokenScorer(built, settings.temperature, settings.training.logprob_chunk_tokens)
    settings.shard(scorer, scorer.model.base_model.layers)
    if world_size() > 1:
        register_fsdp_forward_method(scorer, "reference_states")
    return scorer
