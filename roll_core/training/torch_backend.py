"""The `torch` training backend: a Hugging Face causal language model, and the frozen policies it is compared with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method

from roll_core.algorithms.inputs import LossFn, LossInputs
from roll_core.batching.micro_batch import MicroBatch
from roll_core.config.model import ModelConfig
from roll_core.errors import RollError
from roll_core.models.checkpoint_names import as_checkpoint
from roll_core.training.base import Policy
from roll_core.training.scorer import Reference, Scored, TokenScorer
from roll_core.training.torch_trained import TorchSettings, TorchTrained, whole, world_size


class TorchBackend(TorchTrained):
    def __init__(self, model: ModelConfig, settings: TorchSettings):
        self._model_config = model
        self._scorer = _build_scorer(model, settings)
        self._frozen: dict[str, TokenScorer] = {}
        super().__init__(self._scorer, settings, area="update")

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch, policy: str) -> Tensor:
        scorer = self._scorer if policy == Policy.CURRENT else self._frozen[policy]
        with self._settings.arithmetic():
            return scorer(micro_batch.to(self._settings.device)).logprobs_N.cpu()

    @torch.no_grad()
    def divergences(self, micro_batch: MicroBatch) -> Tensor:
        batch = micro_batch.to(self._settings.device)
        with self._settings.arithmetic():
            divergences_N = self._scorer(batch, self._reference_states(batch)).divergences_N
        return divergences_N.cpu()

    def accumulate(self, micro_batch: MicroBatch, loss: LossFn) -> None:
        batch = micro_batch.to(self._settings.device)
        with self._settings.arithmetic():
            scored = self._scorer(batch)
        self._backward(loss(loss_inputs(batch, scored)), len(scored.logprobs_N))

    def accumulate_beside_reference(self, micro_batch: MicroBatch, loss: LossFn) -> None:
        batch = micro_batch.to(self._settings.device)
        with self._settings.arithmetic():
            scored = self._scorer(batch, self._reference_states(batch))
        self._backward(loss(loss_inputs(batch, scored)), len(scored.logprobs_N))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        parameters = self._scorer.model.named_parameters()
        return as_checkpoint((name, whole(parameter.detach())) for name, parameter in parameters)

    def load_frozen(self, name: str, folder: Path) -> None:
        frozen = _build_scorer(self._model_config, self._settings)
        state: dict[str, Any] = {"model": get_model_state_dict(frozen)}
        dcp.load(state, checkpoint_id=folder, no_dist=world_size() == 1)
        set_model_state_dict(frozen, state["model"])
        self._frozen[name] = frozen.requires_grad_(False)

    def build_frozen(self, name: str, model: ModelConfig) -> None:
        frozen = _build_scorer(model, self._settings)
        theirs, ours = (scorer.model.config.vocab_size for scorer in (frozen, self._scorer))
        if theirs != ours:
            raise RollError(f"algorithm.teachers: {name} has a vocabulary of {theirs} tokens, the policy one of {ours}")
        self._frozen[name] = frozen.requires_grad_(False)

    def _modules(self) -> list[nn.Module]:
        return [self._scorer, *self._frozen.values()]

    @torch.no_grad()
    def _reference_states(self, batch: MicroBatch) -> Reference:
        return self._frozen[Policy.REFERENCE].reference_states(batch)


def _build_scorer(model: ModelConfig, settings: TorchSettings) -> TokenScorer:
    scorer = TokenScorer(settings.build_model(model), settings.temperature, settings.training.logprob_chunk_tokens)
    settings.shard(scorer, scorer.model.base_model.layers)
    if world_size() > 1:
        register_fsdp_forward_method(scorer, "reference_states")
    return scorer


def loss_inputs(batch: MicroBatch, scored: Scored) -> LossInputs:
    tokens, logprobs_N = batch.tokens, scored.logprobs_N
    return LossInputs(
        policy_logprobs_N=logprobs_N,
        entropies_N=scored.entropies_N,
        # One optimizer step: the policy is still the anchor.
        anchor_logprobs_N=logprobs_N.detach() if tokens.anchor_logprobs_N is None else tokens.anchor_logprobs_N,
        sampler_logprobs_N=tokens.sampler_logprobs_N,
        advantages_N=tokens.advantages_N,
        weights_N=tokens.weights_N,
        mask_N=torch.ones_like(logprobs_N),
        sequence_N=batch.sequence_N,
        num_sequences=batch.num_sequences,
        turn_N=tokens.turn_N,
        num_turns=batch.num_turns,
        global_tokens=batch.counts.tokens,
        global_sequences=batch.counts.sequences,
        reference_logprobs_N=tokens.reference_logprobs_N,
        divergences_N=scored.divergences_N,
    )
