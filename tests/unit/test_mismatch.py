"""Limits of `training.mismatch`, and the sentence about an iteration that exceeds them."""

import logging

import pytest

from roll_core.config.training.mismatch import MismatchAction, MismatchConfig
from roll_core.types.manifest import Updated
from tasks.stages import warn_of_mismatch

FAR = {"mismatch/mean": 0.21, "mismatch/kl": 0.03, "mismatch/share_off": 0.1}


def test_an_exceeded_limit_names_the_metric_the_key_and_what_to_check():
    sentence = MismatchConfig().exceeded_limit(FAR)
    assert sentence is not None
    assert sentence.startswith("mismatch/mean is 0.21, above training.mismatch.max_mean (0.05): ")
    assert "rollout.temperature" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("limits", "exceeded"),
    [
        (MismatchConfig(max_mean=0.2), "mean"),
        (MismatchConfig(max_mean=0.21), None),  # a value at the limit is within it
        (MismatchConfig(max_mean=None, max_kl=0.02), "kl"),
        (MismatchConfig(max_mean=None, max_kl=0.04, max_share_off=0.05), "share_off"),
    ],
)
def test_each_of_the_limits_can_be_exceeded(limits, exceeded):
    sentence = limits.exceeded_limit(FAR)
    assert (sentence is None) if exceeded is None else f"training.mismatch.max_{exceeded} " in str(sentence)


def test_a_batch_without_fresh_tokens_is_not_judged():
    assert MismatchConfig().exceeded_limit({"mismatch/fresh_tokens": 0.0, "mismatch/stale_mean": 3.0}) is None


def test_an_iteration_beyond_the_limits_is_logged_in_one_sentence(caplog):
    updated = Updated(iteration=7, weights_version=7, metrics=FAR)
    with caplog.at_level(logging.WARNING):
        warn_of_mismatch(updated, MismatchConfig(action=MismatchAction.WARN))
        warn_of_mismatch(updated, MismatchConfig(max_mean=1.0))
        warn_of_mismatch(updated, None)
    (record,) = caplog.records
    assert record.getMessage().startswith("iteration 7 (training.mismatch.action warn): mismatch/mean is 0.21, above")
