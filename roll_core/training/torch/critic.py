"""The `torch` critic: the policy's architecture with a value head instead of an output layer. Shapes as in `scorer.py`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel

from roll_core.algorithms.inputs import ValueInputs, ValueLossFn
from roll_core.batching.micro_batch import MicroBatch
from roll_core.config.model import ModelConfig
from roll_core.models.checkpoint_names import to_parameter_names
from roll_core.training.base import Values
from roll_core.training.scorer import last_hidden_states, select_rows
from roll_core.training.torch.trainable import TorchSettings, TorchTrainable


class ValueScorer(nn.Module):
    """Model with a value head: values at the positions that predict trained tokens, and at the ends of sequences. The head
    starts at zero, so that all values are zero at first."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model.base_model
        self.prefix = f"{model.base_model_prefix}."
        self.head = nn.Linear(model.config.hidden_size, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, micro_batch: MicroBatch) -> Values:
        """Compute the critic's values at the trained tokens of a micro-batch and at the ends of its sequences, with
        gradient."""
        hidden_RTH = last_hidden_states(self.model, micro_batch)
        with torch.autocast(hidden_RTH.device.type, enabled=False):
            # In float32: rounding to bfloat16 changes values by more than a critic learns in an update.
            weight, bias = self.head.weight.float(), self.head.bias.float()
            values = nn.functional.linear(hidden_RTH.float(), weight, bias).flatten()
        # The added zero has a gradient for every weight: even without trained tokens all ranks run the same collectives.
        values_N = select_rows(values[:, None], micro_batch.predicted_by_N).squeeze(1)
        return Values(values_N + values.sum() * 0.0, values[micro_batch.ends_S])


class TorchCritic(TorchTrainable):
    """Value model trained as a Hugging Face model, sharded over all ranks with FSDP2; a `CriticBackend`."""

    def __init__(self, model: ModelConfig, settings: TorchSettings):
        self._scorer = ValueScorer(settings.build_model(model))
        settings.shard(self._scorer, self._scorer.model.layers)
        super().__init__(self._scorer, settings, area="critic")

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Values:
        with self._settings.autocast():
            scored = self._scorer(micro_batch.to(self._settings.device))
        return Values(scored.values_N.cpu(), scored.final_values_S.cpu())

    def accumulate(self, micro_batch: MicroBatch, loss: ValueLossFn) -> None:
        batch = micro_batch.to(self._settings.device)
        with self._settings.autocast():
            values_N = self._scorer(batch).values_N
        assert batch.tokens.values_N is not None, "the critic's values before the update are missing"
        assert batch.tokens.returns_N is not None, "the returns are missing"
        inputs = ValueInputs(
            values_N=values_N,
            old_values_N=batch.tokens.values_N,
            returns_N=batch.tokens.returns_N,
            mask_N=torch.ones_like(values_N),
            global_tokens=batch.counts.tokens,
        )
        self._backward(loss(inputs), len(values_N))

    def adopt(self, policy_weights: Iterator[tuple[str, Tensor]]) -> None:
        prefix = self._scorer.prefix
        ours: dict[str, Any] = {
            name.removeprefix(prefix): tensor
            for name, tensor in to_parameter_names(policy_weights)
            if name.startswith(prefix)
        }
        set_model_state_dict(self._scorer.model, ours, options=StateDictOptions(full_state_dict=True))
