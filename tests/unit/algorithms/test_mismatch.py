"""Mismatch metrics of trainer and sampler: values worked by hand, sums over parts of a batch, nothing infinite."""

import math

import pytest
import torch

from roll_core.algorithms.mismatch import MismatchSums, measure_mismatch, mismatch_metrics


def metrics_of(*log_ratios: float) -> dict[str, float]:
    return mismatch_metrics(measure_mismatch(torch.tensor(log_ratios)))


def test_four_tokens_by_hand():
    # k3: 0, e^0.1 - 1.1 = 0.0051709, e^-0.7 - 0.3 = 0.1965853, e^0.2 - 1.2 = 0.0214028
    assert metrics_of(0.0, 0.1, -0.7, 0.2) == pytest.approx(
        {
            "mean": (0.1 + 0.7 + 0.2) / 4,
            "max": 0.7,
            "kl": (0.0051709 + 0.1965853 + 0.0214028) / 4,
            "ratio_min": 0.4965853,
            "ratio_p01": 0.4965853,
            "ratio_p99": 1.2214028,
            "ratio_max": 1.2214028,
            "share_off": 1 / 4,  # e^-0.7 is just below a half
        },
        rel=1e-6,
    )


def test_equal_logprobs_have_no_mismatch():
    assert metrics_of(0.0, 0.0) == {
        "mean": 0.0,
        "max": 0.0,
        "kl": 0.0,
        "ratio_min": 1.0,
        "ratio_p01": 1.0,
        "ratio_p99": 1.0,
        "ratio_max": 1.0,
        "share_off": 0.0,
    }


def test_percentiles_are_those_of_the_tokens_and_not_the_extremes():
    d_N = torch.arange(1, 201) / 1000  # 0.001 to 0.2: two of 200 tokens are at most 0.002, two are above 0.198
    metrics = mismatch_metrics(measure_mismatch(d_N))
    assert metrics["ratio_p01"] == pytest.approx(math.exp(0.002))
    assert metrics["ratio_p99"] == pytest.approx(math.exp(0.198))
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.2))


@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_parts_add_up_to_the_whole_with_percentiles(cut):
    d_N = torch.tensor([0.3, -0.004, 1.5, -2.0, 0.01])
    parts = [measure_mismatch(d_N[:cut]), measure_mismatch(d_N[cut:])]
    whole = MismatchSums(
        sums=parts[0].sums + parts[1].sums,
        counts_B=parts[0].counts_B + parts[1].counts_B,
        extremes=torch.maximum(parts[0].extremes, parts[1].extremes),
    )
    assert mismatch_metrics(whole) == pytest.approx(mismatch_metrics(measure_mismatch(d_N)), rel=1e-12)


def test_no_token_has_no_metrics():
    assert metrics_of() == {}


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 400.0])
def test_an_infinite_or_undefined_log_ratio_counts_as_the_largest_and_every_metric_is_finite(odd):
    metrics = metrics_of(odd, 0.0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["max"] == 10.0
    assert metrics["mean"] == 5.0
    assert metrics["share_off"] == 0.5


def test_differences_far_below_the_width_of_a_bin_show_in_the_mean():
    assert metrics_of(2e-7, -2e-7)["mean"] == pytest.approx(2e-7)
