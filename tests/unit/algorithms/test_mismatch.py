"""What is said about the distance between trainer and sampler: numbers by hand, parts that add up, nothing infinite."""

import math

import pytest
import torch

from roll_core.algorithms.mismatch import MismatchSums, measure_mismatch, mismatch_metrics


def found(*log_ratios: float) -> dict[str, float]:
    return mismatch_metrics(measure_mismatch(torch.tensor(log_ratios)))


def test_four_tokens_by_hand():
    # k3: 0, e^0.1 - 1.1 = 0.0051709, e^-0.7 - 0.3 = 0.1965853, e^0.2 - 1.2 = 0.0214028
    assert found(0.0, 0.1, -0.7, 0.2) == pytest.approx(
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


def test_perfect_agreement():
    assert found(0.0, 0.0) == {
        "mean": 0.0,
        "max": 0.0,
        "kl": 0.0,
        "ratio_min": 1.0,
        "ratio_p01": 1.0,
        "ratio_p99": 1.0,
        "ratio_max": 1.0,
        "share_off": 0.0,
    }


def test_tails_are_those_of_the_tokens_not_the_extremes():
    d_N = torch.arange(1, 201) / 1000  # 0.001 to 0.2: two of 200 tokens are at most 0.002, two are above 0.198
    metrics = mismatch_metrics(measure_mismatch(d_N))
    assert metrics["ratio_p01"] == pytest.approx(math.exp(0.002))
    assert metrics["ratio_p99"] == pytest.approx(math.exp(0.198))
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.2))


@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_parts_add_up_to_the_whole_tails_included(cut):
    d_N = torch.tensor([0.3, -0.004, 1.5, -2.0, 0.01])
    parts = [measure_mismatch(d_N[:cut]), measure_mismatch(d_N[cut:])]
    whole = MismatchSums(
        sums=parts[0].sums + parts[1].sums,
        counts_B=parts[0].counts_B + parts[1].counts_B,
        extremes=torch.maximum(parts[0].extremes, parts[1].extremes),
    )
    assert mismatch_metrics(whole) == pytest.approx(mismatch_metrics(measure_mismatch(d_N)), rel=1e-12)


def test_no_token_has_no_metrics():
    assert found() == {}


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 400.0])
def test_what_is_not_a_number_counts_as_far_apart_and_every_metric_is_finite(odd):
    metrics = found(odd, 0.0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["max"] == 10.0
    assert metrics["mean"] == 5.0
    assert metrics["share_off"] == 0.5


def test_differences_far_below_a_bin_are_still_seen_in_the_mean():
    assert found(2e-7, -2e-7)["mean"] == pytest.approx(2e-7)
