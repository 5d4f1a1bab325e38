"""How evenly experts are used, by hand; and when it is said that they are not."""

import pytest
import torch

from roll_core.config.training.experts import ExpertsConfig
from roll_core.training.experts.load import load_metrics


def test_a_load_is_the_busiest_experts_tokens_over_the_mean_of_its_layer():
    found = load_metrics(torch.tensor([[4, 4, 4, 4], [12, 4, 0, 0], [0, 0, 0, 0]]))  # the last layer is a dense one
    assert found == pytest.approx({"max_load": 3.0, "mean_max_load": 2.0, "idle_share": 2 / 8})


def test_a_model_that_saw_no_tokens_has_no_load():
    assert load_metrics(torch.zeros(2, 4)) == {}


def test_a_complaint_names_the_number_and_the_key():
    limits = ExpertsConfig(max_load=2.5)
    assert limits.exceeded_limit({"experts/max_load": 2.5}) is None
    assert limits.exceeded_limit({}) is None
    complaint = str(limits.exceeded_limit({"experts/max_load": 3.0}))
    assert complaint.startswith("experts/max_load is 3, above training.experts.max_load (2.5): ")
