"""Catalog of algorithms: complete, documented, and with no more signals than each algorithm needs."""

import typing

import pytest

from roll_core.algorithms.catalog import TABLE, build_algorithm, row_of
from roll_core.algorithms.guide import guide
from roll_core.config.algorithm.correction import CorrectionConfig
from roll_core.config.algorithm.methods import AlgorithmConfig, DecoupledPpo, Grpo, Ppo, Reinforce, Rloo
from roll_core.config.algorithm.policy_update import KlLossConfig, Signal
from roll_core.config.algorithm.shaping import KlEstimator, KlRewardConfig, ShapingConfig
from tests.support import ROOT

VARIANTS = typing.get_args(typing.get_args(AlgorithmConfig)[0])


def built(config: AlgorithmConfig, num_optimizer_steps: int = 1):
    return build_algorithm(config, num_optimizer_steps=num_optimizer_steps, max_new_tokens=8)


def test_every_variant_has_one_row_and_every_row_a_variant():
    assert [row.config for row in TABLE] == list(VARIANTS)
    assert len({row.kind for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.kind)
def test_every_algorithm_builds_from_its_defaults(row):
    config = row.config.model_validate({"kind": row.kind} | row.example_settings)
    assert row_of(config) is row
    assert built(config).signals == config.credit_signals | config.loss_signals(1)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_every_setting_of_an_algorithm_has_a_description(variant):
    undocumented = {name for name, field in variant.model_fields.items() if not field.description}
    assert undocumented <= {"kind", "aggregation"}


def test_the_guide_on_disk_is_the_one_the_catalogue_gives():
    assert (ROOT / "docs/algorithms.md").read_text() == guide(), "run `make docs`"


def test_anchor_logprobs_are_needed_only_with_several_optimizer_steps():
    assert built(Grpo()).signals == frozenset()
    assert built(Grpo(), 4).signals == {Signal.ANCHOR}
    assert built(DecoupledPpo()).signals == frozenset()
    assert built(DecoupledPpo(), 4).signals == {Signal.ANCHOR}


def test_a_method_without_a_ratio_needs_an_anchor_only_for_its_correction():
    assert built(Rloo(), 4).signals == frozenset()
    assert built(Rloo(correction=CorrectionConfig()), 4).signals == {Signal.ANCHOR}


def test_a_kl_penalty_needs_the_reference_where_it_is_computed():
    assert built(Grpo(kl_loss=KlLossConfig())).loss_signals == {Signal.REFERENCE}
    in_reward = Grpo(shaping=ShapingConfig(kl=KlRewardConfig()))
    assert built(in_reward).credit_signals == {Signal.ANCHOR, Signal.REFERENCE}
    full_in_reward = Grpo(domains={"math": ShapingConfig(kl=KlRewardConfig(estimator=KlEstimator.FULL))})
    assert built(full_in_reward).credit_signals == {Signal.DIVERGENCE}
    in_loss = Grpo(kl_loss=KlLossConfig(estimator=KlEstimator.FULL))
    assert built(in_loss).signals == frozenset()
    assert built(in_loss).full_kl_loss
    assert all(config.needs_reference for config in (in_reward, full_in_reward, in_loss))
    assert not Grpo().needs_reference


def test_only_ppo_has_a_critic():
    assert built(Ppo()).credit_signals == {Signal.VALUES}
    assert [row.kind for row in TABLE if Signal.VALUES in row.config.own_signals] == ["ppo"]


def test_samples_without_advantage_are_skipped_only_if_no_other_term_has_a_gradient():
    assert built(Grpo()).skips_zero_advantages
    assert not built(Grpo(entropy_coefficient=0.01)).skips_zero_advantages
    assert not built(Grpo(kl_loss=KlLossConfig())).skips_zero_advantages
    assert not built(Ppo()).skips_zero_advantages


def test_groups_are_needed_only_where_they_are_compared():
    assert Grpo().compares_groups
    assert not Reinforce().compares_groups
    assert Reinforce(shaping={"normalize": {"mean": "group", "std": "none"}}).compares_groups
    assert not Reinforce(shaping={"normalize": {"mean": "batch", "std": "batch"}}).compares_groups
