"""Whether sampler and trainer agree about the tokens of an iteration: noted where the trainer scores them anyway."""

import torch
import torch.distributed as dist
from torch import Tensor

from roll_core.algorithms.inputs import LossFn, LossInputs, LossOutputs
from roll_core.algorithms.mismatch import MismatchSums, measure, quantities
from roll_core.batching.token_data import TokenData
from roll_core.config.training.mismatch import MISMATCH
from roll_core.training.base import Share
from roll_core.types.manifest import Metrics
from roll_core.weights.ranks import reduce_over_ranks


class MismatchMeter:
    """Collects log(trainer / sampler) of this rank's tokens, if it speaks for them. Nothing is measured before all are
    there, so that a device does not wait for it after every micro-batch."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._log_ratios: list[Tensor] = []
        self._are_fresh: list[Tensor] = []

    def note_anchors(self, tokens: TokenData) -> None:
        """What the trainer said of tokens before it moved."""
        assert tokens.anchor_logprobs_N is not None
        self._note(tokens.anchor_logprobs_N, tokens.sampler_logprobs_N, tokens.is_fresh_N)

    def noting(self, loss: LossFn) -> LossFn:
        """The same loss, which notes the policy's logprobs on the way."""

        def noted(inputs: LossInputs) -> LossOutputs:
            assert inputs.is_fresh_N is not None
            self._note(inputs.policy_logprobs_N.detach(), inputs.sampler_logprobs_N, inputs.is_fresh_N)
            return loss(inputs)

        return noted

    def metrics(self) -> Metrics:
        """Of the tokens of all ranks. Fresh ones are of the weights in training; without any there is only their number."""
        log_ratio_N = torch.cat([torch.empty(0), *(part.cpu() for part in self._log_ratios)])
        is_fresh_N = torch.cat([torch.empty(0, dtype=torch.bool), *(part.cpu() for part in self._are_fresh)])
        fresh, stale = (_of_all_ranks(measure(log_ratio_N[chosen_N])) for chosen_N in (is_fresh_N, ~is_fresh_N))
        found = {"fresh_tokens": fresh.sums[0].item()} | quantities(fresh)
        found |= {f"stale_{name}": value for name, value in quantities(stale).items()}
        return {f"{MISMATCH}{name}": value for name, value in found.items()}

    def _note(self, trainer_logprobs_N: Tensor, sampler_logprobs_N: Tensor, is_fresh_N: Tensor) -> None:
        if self._share.speaks:
            self._log_ratios.append(trainer_logprobs_N - sampler_logprobs_N)
            self._are_fresh.append(is_fresh_N)


def _of_all_ranks(part: MismatchSums) -> MismatchSums:
    return MismatchSums(
        sums=reduce_over_ranks(part.sums),
        counts_B=reduce_over_ranks(part.counts_B),
        extremes=reduce_over_ranks(part.extremes, dist.ReduceOp.MAX),
    )
