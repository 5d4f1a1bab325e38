"""Expert load: metrics worked by hand, and the sentence about a load above the limit."""

import pytest
import torch

from roll_core.config.training.experts import ExpertsConfig
from roll_core.training.experts.load import load_metrics


def test_a_load_is_the_busiest_experts_tokens_over_the_mean_of_its_layer():
    found = load_metrics(torch.tensor([[4, 4, 4, 4], [12, 4, 0, 0], [0, 0, 0, 0]]))  # the last layer is dense
    assert found == pytest.approx({"max_load": 3.0, "mean_max_load": 2.0, "idle_share": 2 / 8})


def test_a_model_that_saw_no_tokens_has_no_load():
    assert load_metrics(torch.zeros(2, 4)) == {}


def test_an_exceeded_limit_names_the_metric_and_the_key():
    limits = ExpertsConfig(max_load=2.5)
    assert limits.exceeded_limit({"experts/max_load": 2.5}) is None
    assert limits.exceeded_limit({}) is None
    sentence = str(limits.exceeded_limit({"experts/max_load": 3.0}))
    assert sentence.startswith("experts/max_load is 3, above training.experts.max_load (2.5): ")
