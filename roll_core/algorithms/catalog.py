"""The named algorithms: an advantage, a loss, and the signals they need. Reads like the table of a survey.

| kind | advantage        | loss                    | signals                                                        |
|------|------------------|-------------------------|----------------------------------------------------------------|
| grpo | group_normalized | clipped_policy_gradient | anchor if >1 optimizer step; reference if kl_coefficient > 0    |
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from roll_core.algorithms import reductions
from roll_core.algorithms.advantages import group_normalized, group_relative
from roll_core.algorithms.inputs import AdvantageFn, LossFn
from roll_core.algorithms.losses import Reduction, clipped_policy_gradient
from roll_core.config.algorithm import Aggregation, AlgorithmConfig, Grpo


class Signal(StrEnum):
    """Logprobs computed before the update because an algorithm declares them; what nobody declares is not computed."""

    ANCHOR = "anchor"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Algorithm:
    advantage: AdvantageFn
    loss: LossFn
    signals: frozenset[Signal]
    skips_zero_advantages: bool
    """True when tokens of zero advantage have no gradient, so that their samples need no forward pass."""


REDUCTIONS: dict[Aggregation, Reduction] = {
    Aggregation.TOKEN_MEAN: reductions.token_mean,
    Aggregation.SEQUENCE_MEAN_TOKEN_MEAN: reductions.sequence_mean_token_mean,
    Aggregation.SEQUENCE_MEAN_TOKEN_SUM: reductions.sequence_mean_token_sum,
}


def build_algorithm(config: AlgorithmConfig, num_optimizer_steps: int) -> Algorithm:
    """The algorithm a config names, for updates of `num_optimizer_steps` per iteration."""
    match config:
        case Grpo():
            return _grpo(config, num_optimizer_steps)


def _grpo(config: Grpo, num_optimizer_steps: int) -> Algorithm:
    return Algorithm(
        advantage=group_normalized if config.scale_by_std else group_relative,
        loss=partial(
            clipped_policy_gradient,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coefficient=config.kl_coefficient,
            entropy_coefficient=config.entropy_coefficient,
            reduce=REDUCTIONS[config.aggregation],
        ),
        signals=_signals({Signal.ANCHOR: num_optimizer_steps > 1, Signal.REFERENCE: config.kl_coefficient > 0}),
        skips_zero_advantages=config.kl_coefficient == 0 and config.entropy_coefficient == 0,
    )


def _signals(needed: dict[Signal, bool]) -> frozenset[Signal]:
    return frozenset(signal for signal, is_needed in needed.items() if is_needed)
