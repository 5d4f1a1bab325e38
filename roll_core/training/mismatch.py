"""Measurement of the mismatch: the trainer's against the sampler's logprobs of an iteration's tokens. They are recorded
where the trainer scores the tokens anyway; `learner.py` acts on the metrics."""

import torch
import torch.distributed as dist
from torch import Tensor

from roll_core.algorithms.inputs import LossFn, LossInputs, LossOutputs
from roll_core.algorithms.mismatch import MismatchSums, measure_mismatch, mismatch_metrics
from roll_core.batching.token_data import TokenData
from roll_core.config.training.mismatch import MISMATCH
from roll_core.training.base import Share
from roll_core.types.manifest import Metrics
from roll_core.weights.ranks import reduce_over_ranks


class MismatchMeter:
    """Recorder of log(trainer / sampler) of this rank's tokens. Only the reporter of a share records. Statistics are
    computed once, in `metrics`, so that the device need not synchronize after every micro-batch."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._log_ratios: list[Tensor] = []
        self._is_fresh: list[Tensor] = []

    def record_anchors(self, tokens: TokenData) -> None:
        """Record the anchor logprobs: the trainer's logprobs before its first optimizer step."""
        assert tokens.anchor_logprobs_N is not None
        self._record(tokens.anchor_logprobs_N, tokens.sampler_logprobs_N, tokens.is_fresh_N)

    def recording(self, loss: LossFn) -> LossFn:
        """Return the same loss, wrapped to record the policy's logprobs on every call."""

        def recorded_loss(inputs: LossInputs) -> LossOutputs:
            assert inputs.is_fresh_N is not None
            self._record(inputs.policy_logprobs_N.detach(), inputs.sampler_logprobs_N, inputs.is_fresh_N)
            return loss(inputs)

        return recorded_loss

    def metrics(self) -> Metrics:
        """Mismatch metrics over the tokens of all ranks: of fresh tokens, sampled by the weights in training, and of stale
        ones (`stale_...`). Without fresh tokens only their number, 0, is reported for them."""
        log_ratio_N = torch.cat([torch.empty(0), *(part.cpu() for part in self._log_ratios)])
        is_fresh_N = torch.cat([torch.empty(0, dtype=torch.bool), *(part.cpu() for part in self._is_fresh)])
        fresh, stale = (_sum_over_ranks(measure_mismatch(log_ratio_N[chosen_N])) for chosen_N in (is_fresh_N, ~is_fresh_N))
        found = {"fresh_tokens": fresh.sums[0].item()} | mismatch_metrics(fresh)
        found |= {f"stale_{name}": value for name, value in mismatch_metrics(stale).items()}
        return {f"{MISMATCH}{name}": value for name, value in found.items()}

    def _record(self, trainer_logprobs_N: Tensor, sampler_logprobs_N: Tensor, is_fresh_N: Tensor) -> None:
        if self._share.is_reporter:
            self._log_ratios.append(trainer_logprobs_N - sampler_logprobs_N)
            self._is_fresh.append(is_fresh_N)


def _sum_over_ranks(part: MismatchSums) -> MismatchSums:
    """Merge the statistics of all ranks: sums and counts are added, extremes maximized."""
    return MismatchSums(
        sums=reduce_over_ranks(part.sums),
        counts_B=reduce_over_ranks(part.counts_B),
        extremes=reduce_over_ranks(part.extremes, dist.ReduceOp.MAX),
    )
