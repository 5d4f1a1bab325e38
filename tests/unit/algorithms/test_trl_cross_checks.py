"""Losses and advantages against TRL's own code, on the same random numbers.

TRL's methods run on a stand-in for a trainer, whose generation, rewards and forward pass return our numbers. TRL computes
all that follows: advantages, importance ratios, losses. Its tensors are padded ([B, T]), ours are concatenated.
"""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from roll_core.algorithms import advantages, losses, reductions
from roll_core.algorithms.inputs import AdvantageFn, LossInputs, LossOutputs, Objective, Reduction
from roll_core.algorithms.preferences import (
    PreferenceInputs,
    direct_preference,
    identity_preference,
    preference_accuracy,
)
from roll_core.config.algorithm.correction import CorrectionLevel, FilterConfig
from roll_core.config.algorithm.policy_update import RatioLevel
from tests.unit.algorithms.builders_advantages import advantage_inputs
from tests.unit.algorithms.builders_losses import correction, gradient, random_loss_inputs, random_preference_inputs

pytest.importorskip("trl")

LENGTHS = (3, 1, 5, 2, 4, 2)
REWARDS = (1.0, 0.25, 0.0, 0.5, 2.0, -1.0)
GROUPS = [0, 0, 0, 1, 1, 1]
MAX_COMPLETION_LENGTH = 8
CLIP_LOW, CLIP_HIGH, BOUND, KL = 0.2, 0.28, 1.3, 0.04
PPO = partial(losses.clipped_ratio, clip_low=CLIP_LOW, clip_high=CLIP_HIGH)

REDUCTION_OF: dict[str, Reduction] = {
    "grpo": reductions.sequence_mean_token_mean,
    "bnpo": reductions.token_mean,
    "dapo": reductions.token_mean,
    "dr_grpo": partial(reductions.fixed_length, length=MAX_COMPLETION_LENGTH),
}
"""Reduction for each loss type of TRL. Within one batch BNPO's mean over tokens is DAPO's."""


def our_advantages(advantage: AdvantageFn, scale: float = 1.0) -> Tensor:
    rewards = [scale * reward for reward in REWARDS]
    return advantage(advantage_inputs(rewards, GROUPS, turns=[[length] for length in LENGTHS]))


def batch(seed: int, advantage: AdvantageFn = advantages.group_relative) -> LossInputs:
    """Random batch. Its sampler logprobs are representable in float32, which is how TRL stores them."""
    inputs = random_loss_inputs(seed, [[length] for length in LENGTHS])
    return replace(
        inputs,
        advantages_N=our_advantages(advantage),
        weights_N=torch.ones_like(inputs.mask_N),
        sampler_logprobs_N=inputs.sampler_logprobs_N.float().double(),
    )


def padded(values_N: Tensor) -> Tensor:
    """Padded rows, one per sequence, with zeros at the end; the gradient flows back."""
    return torch.nn.utils.rnn.pad_sequence(list(values_N.split(LENGTHS)), batch_first=True)


POLICY = "the policy"
ANCHOR = SimpleNamespace(training=True, is_gradient_checkpointing=False)
REFERENCE = "the reference"


def same(values: Tensor, **_) -> Tensor:
    return values


ALONE = SimpleNamespace(
    device=torch.device("cpu"),
    num_processes=1,
    process_index=0,
    sync_gradients=True,
    gather=same,
    gather_for_metrics=same,
    reduce=same,
)


def trainer(inputs: LossInputs, *, reward_scale: float = 1.0, delta: float | None = None, **options) -> SimpleNamespace:
    """Stand-in for a trainer of TRL: the attributes that its methods read from `self`."""

    def forward(model, *_, **__) -> tuple[Tensor, Tensor, None]:
        if model is REFERENCE:
            return padded(inputs.reference_logprobs_N), padded(inputs.entropies_N), None
        logprobs_N = inputs.policy_logprobs_N if model is POLICY else inputs.anchor_logprobs_N
        return padded(logprobs_N), padded(inputs.entropies_N), None

    defaults = {
        "model": ANCHOR,
        "ref_model": REFERENCE,
        "_get_per_token_logps_and_entropies": forward,
        "_calculate_rewards": lambda *_: reward_scale * torch.tensor(REWARDS, dtype=torch.float64).unsqueeze(1),
        "accelerator": ALONE,
        "args": SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=len(LENGTHS),
        ),
        # read by the loss
        "aux_loss_enabled": False,
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
        "epsilon_low": CLIP_LOW,
        "epsilon_high": CLIP_HIGH,
        "importance_sampling_level": "token",
        "loss_type": "grpo",
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_adaptive_entropy": False,
        "_entropy_bonus_enabled": False,
        # read by advantages and importance ratios
        "mask_truncated_completions": False,
        "multi_objective_aggregation": "sum_then_normalize",
        "normalize_advantages": False,
        "num_generations": GROUPS.count(0),
        "num_iterations": 2,  # so that the anchor's logprobs are computed
        "reward_clip_range": None,
        "reward_func_names": ["reward"],
        "reward_weights": torch.ones(1, dtype=torch.float64),
        "scale_rewards": "none",
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        # read by the rest of the same methods
        "_logs": defaultdict(list) | {"rewards": defaultdict(list)},
        "_metrics": {"train": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "environment_factories": None,
        "environments": None,
        "log_multimodal": False,
        "pad_to_multiple_of": None,
        "tools": None,
    }
    return SimpleNamespace(**defaults | options)


PROMPTS = [{"prompt": "?"} for _ in LENGTHS]
PROMPT_IDS, COMPLETION_IDS, COMPLETIONS = ([[1]] * len(LENGTHS), [[1] * length for length in LENGTHS], ["!"] * len(LENGTHS))


def grpo(inputs: LossInputs, **options) -> tuple[Tensor, Tensor, dict[str, list[float]]]:
    """TRL's advantages, loss and metrics."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    sampler_logprobs = [logprobs_T.tolist() for logprobs_T in inputs.sampler_logprobs_N.split(LENGTHS)]
    generated = (PROMPT_IDS, COMPLETION_IDS, None, COMPLETIONS, sampler_logprobs, {}, None, None)
    stand_in = trainer(inputs, _generate=lambda _: generated, **options)
    scored = GRPOTrainer._generate_and_score_completions(stand_in, PROMPTS)
    return scored["advantages"], GRPOTrainer._compute_loss(stand_in, POLICY, scored), stand_in._metrics["train"]


def rloo(inputs: LossInputs, **options) -> tuple[Tensor, Tensor]:
    """TRL's advantages and loss."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    generated = (PROMPT_IDS, COMPLETION_IDS, COMPLETIONS)
    stand_in = trainer(inputs, _generate=lambda _: generated, **options)
    scored = RLOOTrainer._generate_and_score_completions(stand_in, PROMPTS)
    return scored["advantages"], RLOOTrainer._compute_loss(stand_in, POLICY, scored)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-6)


def assert_same_gradient(inputs: LossInputs, ours: Tensor, theirs: Tensor) -> None:
    found_N, expected_N = (gradient(loss, inputs.policy_logprobs_N) for loss in (ours, theirs))
    assert expected_N.any()
    assert_close(found_N, expected_N)


def assert_same_loss(inputs: LossInputs, theirs: Tensor, objective: Objective, reduce: Reduction, **terms) -> LossOutputs:
    outputs = losses.policy_loss(inputs, objective=objective, reduce=reduce, **terms)
    assert_close(outputs.loss, theirs)
    assert_same_gradient(inputs, outputs.loss, theirs)
    return outputs


every_loss_type = pytest.mark.parametrize("loss_type", REDUCTION_OF)
three_seeds = pytest.mark.parametrize("seed", range(3))


@three_seeds
@pytest.mark.parametrize("bound", [None, BOUND])
@pytest.mark.parametrize("kl", [0.0, KL])
@every_loss_type
def test_grpo_and_its_variants_of_aggregation(loss_type, kl, bound, seed):
    inputs = batch(seed)
    _, theirs, metrics = grpo(inputs, loss_type=loss_type, beta=kl, delta=bound)
    objective = partial(PPO, dual_clip=bound)
    outputs = assert_same_loss(inputs, theirs, objective, REDUCTION_OF[loss_type], kl_coefficient=kl)
    if kl:
        assert outputs.metric_sums["update/kl_to_reference"].item() / sum(LENGTHS) == pytest.approx(metrics["kl"][0])
    if bound is None:
        clipped = outputs.metric_sums["update/clip_fraction"].item() / sum(LENGTHS)
        assert clipped == pytest.approx(metrics["clip_ratio/region_mean"][0])
        assert clipped > 0


@three_seeds
def test_gspo(seed):
    inputs = batch(seed)
    _, theirs, _ = grpo(inputs, importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.1)
    objective = partial(losses.clipped_ratio, clip_low=0.05, clip_high=0.1, level=RatioLevel.SEQUENCE)
    assert_same_loss(inputs, theirs, objective, reductions.sequence_mean_token_mean)


@three_seeds
def test_cispo(seed):
    """TRL bounds the weight itself, we bound its distance from 1. Neither has a lower bound here."""
    inputs = batch(seed)
    _, theirs, _ = grpo(inputs, loss_type="cispo", epsilon_high=1 + CLIP_HIGH)
    objective = partial(losses.clipped_importance_sampling, clip_low=1.0, clip_high=CLIP_HIGH, mask_clipped=False)
    assert_same_loss(inputs, theirs, objective, reductions.token_mean)


@three_seeds
@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_the_entropy_bonus(loss_type, seed):
    """TRL's bonus is a mean over tokens whatever the loss; ours is aggregated as the loss is."""
    inputs = batch(seed)
    entropies_N = -inputs.policy_logprobs_N * inputs.policy_logprobs_N.exp()  # any function of the policy
    inputs = replace(inputs, entropies_N=entropies_N)
    _, theirs, _ = grpo(inputs, loss_type=loss_type, _entropy_bonus_enabled=True, entropy_coef=0.3)
    assert_same_loss(inputs, theirs, PPO, reductions.token_mean, entropy_coefficient=0.3)


@three_seeds
@pytest.mark.parametrize("upper", [1.1, None])
@pytest.mark.parametrize(
    ("mode", "level"), [("token_truncate", CorrectionLevel.TOKEN), ("sequence_truncate", CorrectionLevel.SEQUENCE)]
)
@every_loss_type
def test_weights_for_the_mismatch_with_the_sampler(loss_type, mode, level, upper, seed):
    """Weights at token level without an upper bound are decoupled PPO."""
    inputs = batch(seed)
    options = {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": 0.0,
        "vllm_importance_sampling_clip_max": upper,
    }
    _, theirs, _ = grpo(inputs, loss_type=loss_type, beta=KL, **options)
    weigh = correction(level=level, upper=upper)
    assert_same_loss(inputs, theirs, PPO, REDUCTION_OF[loss_type], correction=weigh, kl_coefficient=KL)


@three_seeds
@pytest.mark.parametrize(
    ("mode", "level"), [("token_mask", CorrectionLevel.TOKEN), ("sequence_mask", CorrectionLevel.SEQUENCE)]
)
@every_loss_type
def test_filters_for_the_mismatch_with_the_sampler(loss_type, mode, level, seed):
    """TRL's masks keep the KL term of removed tokens and ours drop it, so the losses are compared without a KL term."""
    inputs = batch(seed)
    options = {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": 0.75,
        "vllm_importance_sampling_clip_max": 1.3,
    }
    _, theirs, _ = grpo(inputs, loss_type=loss_type, **options)
    mask = correction(FilterConfig(level=level, lower=0.75, upper=1.3), level=level)
    outputs = assert_same_loss(inputs, theirs, PPO, REDUCTION_OF[loss_type], correction=mask)
    assert 0 < outputs.metric_sums["correction/kept"] < sum(LENGTHS)


@three_seeds
def test_rloo(seed):
    """Gradients agree on policy, where TRL uses the ratio of the whole sequence, whose value is 1, and we the logprob."""
    inputs = batch(seed, advantages.leave_one_out)
    inputs = replace(inputs, anchor_logprobs_N=inputs.policy_logprobs_N.detach())
    theirs_S, theirs = rloo(inputs)
    outputs = losses.policy_loss(inputs, objective=losses.policy_gradient, reduce=reductions.sequence_mean_token_sum)
    assert_close(inputs.advantages_N, spread(theirs_S))
    assert_same_gradient(inputs, outputs.loss, theirs)


@pytest.mark.parametrize(
    ("scaling", "ours"),
    [
        ("none", advantages.group_relative),
        ("group", advantages.group_normalized),
        ("batch", advantages.group_mean_batch_std),
    ],
)
def test_group_advantages(scaling, ours):
    """Rewards are about a million, so that what is added to standard deviations does not show: 1e-4 by TRL, 1e-6 by us."""
    theirs_S, _, _ = grpo(batch(0), scale_rewards=scaling, reward_scale=1e6)
    assert_close(our_advantages(ours, scale=1e6), spread(theirs_S))


def spread(values_S: Tensor) -> Tensor:
    """Repeat the value of a sequence for each of its tokens."""
    return torch.cat([value.expand(length) for value, length in zip(values_S, LENGTHS, strict=True)])


# Preferences


def dpo(inputs: PreferenceInputs, loss_type: str, beta: float) -> tuple[Tensor, float]:
    """TRL's loss, and its share of pairs in the right order. The last token of a completion holds its whole logprob. Chosen
    completions have three tokens and rejected ones two, after a prompt of one."""
    from trl.trainer.dpo_trainer import DPOTrainer

    pairs = len(inputs.chosen_logprobs_P)
    completion_mask = torch.tensor([[0, 1, 1, 1]] * pairs + [[0, 1, 1, 0]] * pairs)
    shape = completion_mask[:, 1:].shape
    chosen_PT, rejected_PT = (
        torch.nn.functional.pad(logprobs_P.unsqueeze(1), padding)
        for logprobs_P, padding in ((inputs.chosen_logprobs_P, (2, 0)), (inputs.rejected_logprobs_P, (1, 1)))
    )
    model_outputs = SimpleNamespace(
        log_probs=torch.cat([chosen_PT, rejected_PT]),
        entropy=torch.zeros(shape),
        mean_logits=torch.zeros(shape),
        is_top1=torch.zeros(shape, dtype=torch.bool),
    )
    stand_in = SimpleNamespace(
        model=ANCHOR,
        accelerator=ALONE,
        aux_loss_enabled=False,
        beta=beta,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        loss_types=[loss_type],
        loss_weights=[1.0],
        precompute_ref_logps=True,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    seen = {
        "input_ids": torch.ones_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": inputs.chosen_reference_P,
        "ref_rejected_logps": inputs.rejected_reference_P,
    }
    loss = DPOTrainer._compute_loss(stand_in, lambda **_: model_outputs, seen, return_outputs=False)
    return loss, stand_in._metrics["train"]["rewards/accuracies"][0]


def assert_same_preference(inputs: PreferenceInputs, ours: Tensor, theirs: Tensor) -> None:
    assert_close(ours, theirs)
    for leaf_P in (inputs.chosen_logprobs_P, inputs.rejected_logprobs_P):
        assert gradient(theirs, leaf_P).any()
        assert_close(gradient(ours, leaf_P), gradient(theirs, leaf_P))


@pytest.mark.parametrize("beta", [0.1, 0.5])
@three_seeds
def test_dpo(seed, beta):
    inputs = random_preference_inputs(seed)
    theirs, share = dpo(inputs, "sigmoid", beta)
    assert_same_preference(inputs, direct_preference(inputs, beta=beta), theirs)
    assert preference_accuracy(inputs).item() / inputs.global_pairs == pytest.approx(share)


@pytest.mark.parametrize("beta", [0.1, 0.5])
@three_seeds
def test_ipo(seed, beta):
    """TRL divides logprobs by the lengths of completions. Our loss leaves that to its caller, here the test."""
    inputs = random_preference_inputs(seed)
    by_token = replace(
        inputs,
        chosen_logprobs_P=inputs.chosen_logprobs_P / 3,
        chosen_reference_P=inputs.chosen_reference_P / 3,
        rejected_logprobs_P=inputs.rejected_logprobs_P / 2,
        rejected_reference_P=inputs.rejected_reference_P / 2,
    )
    assert_same_preference(inputs, identity_preference(by_token, beta=beta), dpo(inputs, "ipo", beta)[0])


@pytest.mark.parametrize("share", [0.1, 0.4])
@three_seeds
def test_cdpo(seed, share):
    """The installed TRL has no label smoothing for its sigmoid loss. cDPO is its loss of the pairs as labelled plus its loss
    of the swapped pairs, each weighted by its probability."""
    inputs = random_preference_inputs(seed)
    swapped = replace(
        inputs,
        chosen_logprobs_P=inputs.rejected_logprobs_P,
        chosen_reference_P=inputs.rejected_reference_P,
        rejected_logprobs_P=inputs.chosen_logprobs_P,
        rejected_reference_P=inputs.chosen_reference_P,
    )
    right, wrong = (dpo(each, "sigmoid", 0.3)[0] for each in (inputs, swapped))
    ours = direct_preference(inputs, beta=0.3, label_smoothing=share)
    assert_same_preference(inputs, ours, (1 - share) * right + share * wrong)
