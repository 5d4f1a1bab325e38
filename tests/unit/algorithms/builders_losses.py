"""Builders of loss inputs for tests, explicit or random, and the objectives, reductions and corrections to test.

A layout says how many tokens each turn of each sequence has: ((2, 1), (3,)) is a sequence of two turns and one of one turn.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from roll_core.algorithms import losses, reductions
from roll_core.algorithms.corrections import Correction, correct
from roll_core.algorithms.inputs import LossInputs, Objective, Reduction, ValueInputs
from roll_core.algorithms.preferences import PreferenceInputs
from roll_core.config.algorithm.correction import Compared, CorrectionLevel, FilterConfig, WeightingConfig
from roll_core.config.algorithm.policy_update import RatioLevel

Layout = Sequence[Sequence[int]]
LAYOUT: Layout = ((2, 1), (3,), (1, 1, 2))

layouts = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4)
seeds = st.integers(0, 2**16)

PPO = partial(losses.clipped_ratio, clip_low=0.2, clip_high=0.28)
OBJECTIVES: dict[str, Objective] = {
    "policy_gradient": losses.policy_gradient,
    "ppo": PPO,
    "dual_clip": partial(PPO, dual_clip=1.5),
    "gspo": partial(losses.clipped_ratio, clip_low=0.1, clip_high=0.1, level=RatioLevel.SEQUENCE),
    "gspo_of_turns": partial(losses.clipped_ratio, clip_low=0.1, clip_high=0.1, level=RatioLevel.TURN),
    "gspo_token": partial(losses.clipped_shared_ratio, clip_low=0.1, clip_high=0.1, level=RatioLevel.SEQUENCE),
    "gspo_token_of_turns": partial(losses.clipped_shared_ratio, clip_low=0.1, clip_high=0.1, level=RatioLevel.TURN),
    "tis": partial(losses.truncated_importance_sampling, lower=0.8, upper=1.2),
    "cispo": partial(losses.clipped_importance_sampling, clip_low=0.2, clip_high=0.2, mask_clipped=False),
    "cispo_masked": partial(losses.clipped_importance_sampling, clip_low=0.2, clip_high=0.2, mask_clipped=True),
    "topr": partial(losses.tapered_off_policy, positive_weight=1.0, negative_weight=0.5, lower=0.0, upper=1.0),
    "kimi": partial(losses.mirror_descent, temperature=0.3, level=RatioLevel.SEQUENCE),
    "kimi_of_turns": partial(losses.mirror_descent, temperature=0.3, level=RatioLevel.TURN),
    "kimi_of_tokens": partial(losses.mirror_descent, temperature=0.3, level=RatioLevel.TOKEN),
}
WITH_STOPPED_WEIGHTS = ("tis", "cispo", "cispo_masked", "topr")
"""Objectives with a weight that depends on the policy but has no gradient."""
STRAIGHT_THROUGH = ("gspo_token", "gspo_token_of_turns")
"""Objectives with a factor pi / sg[pi], whose value is always 1: finite differences do not find its gradient."""

REDUCTIONS: dict[str, Reduction] = {
    "token_mean": reductions.token_mean,
    "sequence_mean_token_sum": reductions.sequence_mean_token_sum,
    "sequence_mean_token_mean": reductions.sequence_mean_token_mean,
    "fixed_length": partial(reductions.fixed_length, length=7),
}


def correction(
    *filters: FilterConfig, level: CorrectionLevel | None = None, upper: float | None = None, veto_below: float | None = None
) -> Correction:
    """Build a correction: weights if a level is given, and removal of tokens by filters and veto."""
    weighting = None if level is None else WeightingConfig(level=level, upper=upper)
    return partial(correct, weighting=weighting, filters=filters, veto_below=veto_below)


CORRECTIONS: dict[str, Correction | None] = {
    "uncorrected": None,
    **{f"weights_by_{level}": correction(level=level, upper=1.2) for level in CorrectionLevel},
    **{f"filter_by_{level}": correction(FilterConfig(level=level, lower=0.8, upper=1.3)) for level in CorrectionLevel},
    "filter_by_difference": correction(FilterConfig(compared=Compared.DIFFERENCE, lower=-0.05, upper=0.05)),
    "veto": correction(level=CorrectionLevel.TOKEN, veto_below=0.7),
}


def loss_inputs(
    *,
    policy: Sequence[float],
    anchor: Sequence[float] | None = None,
    sampler: Sequence[float] | None = None,
    advantages: Sequence[float] | None = None,
    layout: Layout | None = None,
    mask: Sequence[float] | None = None,
    entropies: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    divergences: Sequence[float] | None = None,
    global_tokens: float | None = None,
    global_sequences: float | None = None,
) -> LossInputs:
    """Build LossInputs. By default they are on-policy, with advantages of 1, no masked token, and one sequence of one turn,
    which is the whole batch."""
    count = len(policy)
    sequence_N, turn_N = _sequences_and_turns(layout or ((count,),))
    num_sequences = int(sequence_N.max()) + 1
    return LossInputs(
        policy_logprobs_N=_doubles(policy).requires_grad_(),
        anchor_logprobs_N=_doubles(policy if anchor is None else anchor),
        sampler_logprobs_N=_doubles(sampler if sampler is not None else policy if anchor is None else anchor),
        advantages_N=_doubles(advantages or [1.0] * count),
        weights_N=torch.ones(count, dtype=torch.float64),
        mask_N=_doubles(mask or [1.0] * count),
        entropies_N=_doubles(entropies or [0.0] * count),
        reference_logprobs_N=None if reference is None else _doubles(reference),
        divergences_N=None if divergences is None else _doubles(divergences),
        sequence_N=sequence_N,
        num_sequences=num_sequences,
        turn_N=turn_N,
        num_turns=int(turn_N.max()) + 1,
        global_tokens=global_tokens or float(count),
        global_sequences=global_sequences or float(num_sequences),
    )


def random_loss_inputs(seed: int, layout: Layout = LAYOUT, *, masked_share: float = 0.0, spread: float = 0.3) -> LossInputs:
    """Build random LossInputs. `spread` is the deviation of other logprobs from those of the anchor, in nats per token."""
    generator = torch.Generator().manual_seed(seed)
    sequence_N, turn_N = _sequences_and_turns(layout)
    count, num_sequences = len(sequence_N), int(sequence_N.max()) + 1

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    centre_N = -1 - normal(1.0).abs()
    return LossInputs(
        policy_logprobs_N=(centre_N + normal(spread)).requires_grad_(),
        anchor_logprobs_N=centre_N,
        sampler_logprobs_N=centre_N + normal(spread),
        reference_logprobs_N=centre_N + normal(spread),
        advantages_N=normal(1.0),
        weights_N=0.5 + torch.rand(count, generator=generator, dtype=torch.float64),
        mask_N=(torch.rand(count, generator=generator) >= masked_share).double(),
        entropies_N=normal(1.0).abs(),
        sequence_N=sequence_N,
        num_sequences=num_sequences,
        turn_N=turn_N,
        num_turns=int(turn_N.max()) + 1,
        global_tokens=float(count),
        global_sequences=float(num_sequences),
    )


def selected(inputs: LossInputs, sequences: Sequence[int]) -> LossInputs:
    """Micro-batch of some sequences of a batch, in this order; its gradient flows back to the batch's policy logprobs."""
    tokens = [(inputs.sequence_N == sequence).nonzero().flatten() for sequence in sequences]
    tokens_N = torch.cat(tokens)
    sequence_N = torch.cat([torch.full_like(each, number) for number, each in enumerate(tokens)])
    by_token = {
        name: value[tokens_N]
        for name, value in vars(inputs).items()
        if isinstance(value, Tensor) and name not in ("sequence_N", "turn_N")
    }
    _, turn_N = torch.unique_consecutive(inputs.turn_N[tokens_N], return_inverse=True)
    return replace(
        inputs,
        **by_token,
        sequence_N=sequence_N,
        num_sequences=len(sequences),
        turn_N=turn_N,
        num_turns=int(turn_N.max()) + 1,
    )


def value_inputs(
    *,
    values: Sequence[float],
    old_values: Sequence[float] | None = None,
    returns: Sequence[float],
    mask: Sequence[float] | None = None,
    global_tokens: float | None = None,
) -> ValueInputs:
    return ValueInputs(
        values_N=_doubles(values).requires_grad_(),
        old_values_N=_doubles(values if old_values is None else old_values),
        returns_N=_doubles(returns),
        mask_N=_doubles(mask or [1.0] * len(values)),
        global_tokens=global_tokens or float(len(values)),
    )


def random_value_inputs(seed: int, count: int = 9, *, masked_share: float = 0.0) -> ValueInputs:
    generator = torch.Generator().manual_seed(seed)
    values_N, moves_N, returns_N = torch.randn(3, count, generator=generator, dtype=torch.float64)
    return ValueInputs(
        values_N=values_N.clone().requires_grad_(),
        old_values_N=values_N + 0.3 * moves_N,
        returns_N=returns_N,
        mask_N=(torch.rand(count, generator=generator) >= masked_share).double(),
        global_tokens=float(count),
    )


def preference_inputs(
    *,
    chosen: Sequence[float],
    rejected: Sequence[float],
    chosen_reference: Sequence[float],
    rejected_reference: Sequence[float],
    global_pairs: float | None = None,
) -> PreferenceInputs:
    return PreferenceInputs(
        chosen_logprobs_P=_doubles(chosen).requires_grad_(),
        rejected_logprobs_P=_doubles(rejected).requires_grad_(),
        chosen_reference_P=_doubles(chosen_reference),
        rejected_reference_P=_doubles(rejected_reference),
        global_pairs=global_pairs or float(len(chosen)),
    )


def random_preference_inputs(seed: int, count: int = 5) -> PreferenceInputs:
    generator = torch.Generator().manual_seed(seed)
    names = ("chosen", "rejected", "chosen_reference", "rejected_reference")
    drawn = -5 + 2 * torch.randn(len(names), count, generator=generator, dtype=torch.float64)
    return preference_inputs(**dict(zip(names, drawn.tolist(), strict=True)))


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def policy_gradient_of(loss: Tensor, inputs: LossInputs) -> list[float]:
    """Gradient of a loss with respect to the policy's logprobs, for comparison with values worked by hand."""
    return gradient(loss, inputs.policy_logprobs_N).tolist()


def _sequences_and_turns(layout: Layout) -> tuple[Tensor, Tensor]:
    """Number of the sequence and number of the turn of each token."""
    turns = [(sequence, length) for sequence, lengths in enumerate(layout) for length in lengths]
    numbers = [(sequence, turn) for turn, (sequence, length) in enumerate(turns) for _ in range(length)]
    sequence_N, turn_N = torch.tensor(numbers).unbind(1)
    return sequence_N, turn_N


def _doubles(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
