"""Whether sampler and trainer agree about the tokens of an iteration: noted where the trainer scores them anyway."""

import torch
import torch.distributed as dist
from torch import Tensor

from roll_core.algorithms.agreement import Differences, measure, quantities
from roll_core.algorithms.inputs import LossFn, LossInputs, LossOutputs
from roll_core.batching.micro_batch import MicroBatch
from roll_core.config.agreement import MISMATCH
from roll_core.training.torch_trained import over_ranks
from roll_core.types.manifest import Metrics


class Agreement:
    """Collects log(trainer / sampler) of this rank's tokens. Nothing is measured before all are there, so that a device
    does not wait for it after every micro-batch."""

    def __init__(self) -> None:
        self._log_ratios: list[Tensor] = []
        self._are_fresh: list[Tensor] = []

    def note(self, trainer_logprobs_N: Tensor, micro_batch: MicroBatch) -> None:
        sampler_logprobs_N = micro_batch.tokens.sampler_logprobs_N.to(trainer_logprobs_N.device)
        self._log_ratios.append(trainer_logprobs_N.detach() - sampler_logprobs_N)
        self._are_fresh.append(micro_batch.tokens.is_fresh_N)

    def noting(self, loss: LossFn, micro_batch: MicroBatch) -> LossFn:
        """The same loss, which notes the policy's logprobs on the way."""

        def noted(inputs: LossInputs) -> LossOutputs:
            self.note(inputs.policy_logprobs_N, micro_batch)
            return loss(inputs)

        return noted

    def metrics(self) -> Metrics:
        """Of the tokens of all ranks. Fresh ones are of the weights in training; without any there is only their number."""
        log_ratio_N = torch.cat([part.cpu() for part in self._log_ratios])
        is_fresh_N = torch.cat(self._are_fresh)
        fresh, stale = (_of_all_ranks(measure(log_ratio_N[chosen_N])) for chosen_N in (is_fresh_N, ~is_fresh_N))
        found = {"fresh_tokens": fresh.sums[0].item()} | quantities(fresh)
        found |= {f"stale_{name}": value for name, value in quantities(stale).items()}
        return {f"{MISMATCH}{name}": value for name, value in found.items()}


def _of_all_ranks(part: Differences) -> Differences:
    return Differences(
        sums=over_ranks(part.sums),
        counts_B=over_ranks(part.counts_B),
        extremes=over_ranks(part.extremes, dist.ReduceOp.MAX),
    )
