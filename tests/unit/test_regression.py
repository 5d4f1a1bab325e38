"""Nightly regression check without training: measured quantities, comparison with accepted runs, and the report."""

import math

import pytest

from roll_core.config.load import load_config, load_nightly
from roll_core.config.operations.nightly import ReferenceRun, Tolerances
from roll_core.errors import UserError
from roll_core.provenance import library_versions, machine_kind
from roll_core.reporting.regression import (
    compare,
    is_only_slower,
    judge,
    measure_run,
    robust_sigma,
    verdict_sentence,
    verdicts_page,
)
from roll_core.types.manifest import Collected, CollectRequest, Draws, Evaluated, Manifest
from roll_core.types.refs import ArtifactKind, ArtifactRef
from roll_core.types.regression import ComparisonOutcome, Measured, Origin, Verdict, learning_settings
from tests.stored_runs import bare_manifest
from tests.support import ROOT, tiny_config

TOLERANCES = Tolerances()
REFERENCE = ReferenceRun(config="runs/quickstart.yaml", at_least={"accuracy/last": 0.85})
ORIGIN = Origin(machine="EPYC, 2 CPUs", versions="torch 2.13.0", code="0.2.0+aaaa")
GOOD = {"accuracy/last": 0.95, "reward/last": 0.80, "seconds/update": 0.20, "throughput/tokens_per_second": 5000.0}


def night(number: int, origin: Origin = ORIGIN, weights: str = "w0 w1 w2", **changed: float) -> Measured:
    """Measured run with usual quantities, except those that are given: accuracy_last=0.7 sets accuracy/last."""
    quantities = GOOD | {name.replace("_", "/", 1): value for name, value in changed.items()}
    return Measured(
        reference="quickstart",
        run_id=f"quickstart-{number}",
        quantities=quantities,
        settings={"seed": "0", "training.optimizer.learning_rate": "0.001"},
        origin=origin,
        weights=tuple(weights.split()),
    )


def verdict_on(run: Measured, accepted: list[Measured], reference: ReferenceRun = REFERENCE) -> Verdict:
    return judge(run, accepted, reference, TOLERANCES)


def nights(count: int, **changed: float) -> list[Measured]:
    return [night(number, **changed) for number in range(1, count + 1)]


def test_the_robust_sigma_of_a_few_values_ignores_an_outlier():
    # Deviations from the median 12 are 2, 1, 0, 1, 78; their median is 1; the correction for five values is 1.206.
    assert robust_sigma([10, 11, 12, 13, 90]) == pytest.approx(1.206 * 1.4826)
    assert robust_sigma([7.0]) == 0.0
    assert robust_sigma([7.0] * 12) == 0.0
    # The median of 1..12 is 6.5; the deviations are 0.5 ... 5.5, twice each; their median is 3.
    assert robust_sigma(range(1, 13)) == pytest.approx(12 / 11.2 * 1.4826 * 3)


def test_beyond_four_sigmas_is_worse_and_on_the_good_side_better():
    accepted = [100, 110, 120, 130, 140]  # deviations 20, 10, 0, 10, 20: a sigma of 17.88, four of them 71.5
    found = {value: compare("throughput/x", value, accepted, "", TOLERANCES) for value in (48.0, 49.0, 191.0, 192.0)}
    assert found[48.0].tolerated == pytest.approx(4 * 1.206 * 1.4826 * 10)
    assert {value: c.outcome for value, c in found.items()} == {
        48.0: ComparisonOutcome.WORSE,
        49.0: ComparisonOutcome.AS_BEFORE,
        191.0: ComparisonOutcome.AS_BEFORE,
        192.0: ComparisonOutcome.BETTER,
    }


def test_more_seconds_are_worse():
    accepted = [0.50, 0.50, 0.50, 0.50, 0.50]  # equal values: the smallest tolerance, a fifth, applies
    outcomes = {s: compare("seconds/wall", s, accepted, "", TOLERANCES).outcome for s in (0.39, 0.41, 0.59, 0.61)}
    assert list(outcomes.values()) == [
        ComparisonOutcome.BETTER,
        ComparisonOutcome.AS_BEFORE,
        ComparisonOutcome.AS_BEFORE,
        ComparisonOutcome.WORSE,
    ]
    # A fifth of a stage of 30 ms is 6 ms: noise. Up to 50 ms more is tolerated.
    assert compare("seconds/publish", 0.075, [0.03] * 5, "", TOLERANCES).outcome is ComparisonOutcome.AS_BEFORE
    assert compare("seconds/publish", 0.085, [0.03] * 5, "", TOLERANCES).outcome is ComparisonOutcome.WORSE


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_a_value_that_is_missing_or_not_finite_is_worse(value):
    assert compare("reward/last", value, [0.8], "", TOLERANCES).outcome is ComparisonOutcome.WORSE


def test_the_first_run_has_nothing_to_be_compared_with_but_fixed_limits():
    assert not verdict_on(night(1), []).is_regression
    assert verdict_on(night(1, accuracy_last=0.80), []).reasons == ("accuracy/last is 0.8, at least 0.85 is expected",)
    assert verdict_on(night(1, reward_last=math.nan), []).reasons == ("reward/last is nan",)


def test_learning_is_judged_from_the_second_run_on_and_speed_from_the_sixth():
    slow_and_bad = night(2, reward_last=0.7, seconds_update=0.9)
    assert [c.quantity for c in verdict_on(slow_and_bad, nights(1)).worse] == ["reward/last"]
    assert [c.quantity for c in verdict_on(slow_and_bad, nights(4)).worse] == ["reward/last"]
    assert [c.quantity for c in verdict_on(slow_and_bad, nights(5)).worse] == ["reward/last", "seconds/update"]
    [not_judged] = [c for c in verdict_on(slow_and_bad, nights(4)).comparisons if c.quantity == "seconds/update"]
    assert not_judged.against == "with 4 accepted runs on this kind of machine of 5 needed to judge it"


def test_learning_is_compared_across_kinds_of_machines_and_speed_is_not():
    elsewhere = night(9, origin=ORIGIN.model_copy(update={"machine": "H200"}), seconds_update=0.9, reward_last=0.7)
    verdict = verdict_on(elsewhere, nights(8))
    assert {c.quantity for c in verdict.worse} == {"reward/last"}
    assert "machine: EPYC, 2 CPUs -> H200" in verdict.remarks


def test_new_libraries_and_code_are_held_to_the_same_tolerances():
    newer = Origin(machine=ORIGIN.machine, versions="torch 2.14.0", code="0.2.0+bbbb")
    verdict = verdict_on(night(9, origin=newer, weights="w0 x1 x2", seconds_update=0.9), nights(8))
    assert [c.quantity for c in verdict.worse] == ["seconds/update"] * 2, "against the last eight and the first five"
    assert verdict.remarks == (
        "weights part from those of quickstart-8 from iteration 1 on",
        "versions: torch 2.13.0 -> torch 2.14.0",
        "code: 0.2.0+aaaa -> 0.2.0+bbbb",
    )


def test_a_slow_drift_is_noticed_against_the_oldest_accepted_runs():
    """Seconds grow by two percent every night. They are never far from the last twenty, whose median is ten nights old."""
    seconds = [0.50 * 1.02**number for number in range(40)]
    accepted: list[Measured] = []
    for number, value in enumerate(seconds):
        verdict = verdict_on(night(number, seconds_wall=value), accepted)
        if verdict.is_regression:
            break
        accepted.append(night(number, seconds_wall=value))
    # The median of the first five is 0.50 * 1.02**2; a fifth more is passed in night 2 + ln(1.2) / ln(1.02) = 11.2.
    assert len(accepted) == 12
    assert [c.against for c in verdict.worse] == ["the first 5"]


def test_a_reproducible_run_must_repeat_its_weights_to_the_bit():
    accepted = [*nights(2), night(3, origin=ORIGIN.model_copy(update={"code": "0.2.0+bbbb"}), weights="w0 y1 y2")]
    assert not verdict_on(night(4), accepted).is_regression, "its twin is not the newest, but the newest of the same origin"
    verdict = verdict_on(night(4, weights="w0 w1 z2"), accepted)
    assert verdict.reasons == (
        "weights differ from those of quickstart-2 from iteration 2 on, though config, code, libraries and machine are "
        "the same",
    )
    by_chance = ReferenceRun(config="runs/async.yaml", reproducible=False)
    assert not verdict_on(night(4, weights="w0 w1 z2"), accepted, by_chance).is_regression


def test_a_changed_setting_is_named_and_does_not_excuse_a_worse_run():
    run = night(2, reward_last=0.2)
    changed = run.model_copy(update={"settings": run.settings | {"training.optimizer.learning_rate": "1e-09"}})
    verdict = verdict_on(changed, nights(1))
    assert [c.quantity for c in verdict.worse] == ["reward/last"]
    assert "training.optimizer.learning_rate: 0.001 -> 1e-09" in verdict.remarks


def test_a_missing_learning_quantity_is_a_regression_and_a_missing_stage_is_not():
    run = night(9)
    without = {k: v for k, v in run.quantities.items() if k not in ("reward/last", "seconds/update")}
    verdict = verdict_on(run.model_copy(update={"quantities": without}), nights(8))
    assert {c.quantity for c in verdict.worse} == {"reward/last"}


def test_only_a_run_that_is_merely_slower_is_trained_again():
    assert is_only_slower(verdict_on(night(9, seconds_update=0.9), nights(8)))
    assert not is_only_slower(verdict_on(night(9, seconds_update=0.9, reward_last=0.1), nights(8)))
    assert not is_only_slower(verdict_on(night(9), nights(8)))
    assert not is_only_slower(Verdict(reference="quickstart", run_id="quickstart", defects=("training did not finish",)))


def test_the_page_and_the_sentence_say_why():
    worse = verdict_on(night(9, reward_last=0.2), nights(8))
    assert verdict_sentence(worse).startswith(
        "quickstart-9: regression: reward/last is 0.2, the median of the last 8 accepted runs 0.8, tolerated 0.05"
    )
    page = verdicts_page([worse, verdict_on(night(9), nights(8))])
    assert "## quickstart: regression (quickstart-9)" in page
    assert "## quickstart: accepted (quickstart-9)" in page
    assert "| reward/last | 0.2 | 0.8 | 0.05 | the last 8 | worse |" in page
    assert verdict_sentence(verdict_on(night(9), nights(8))).endswith("none worse; the weights of quickstart-8, to the bit")


def manifest(iteration: int, reward: float, wall: float, accuracy: float | None) -> Manifest:
    artifact = ArtifactRef(kind=ArtifactKind.TRAJECTORIES, digest="9f86" * 16, size=1)
    request = CollectRequest(iteration=iteration, parent="", weights_version=0, first_problem=0, num_groups=1)
    collected = Collected(
        request=request,
        trajectories=artifact,
        num_trajectories=1,
        num_failed=0,
        num_tokens=100,
        draws=Draws(first=0, outcomes="t"),
        trace=artifact,
    )
    evaluated = (
        None
        if accuracy is None
        else Evaluated(weights_version=iteration, num_problems=8, accuracy=accuracy, trajectories=artifact)
    )
    return bare_manifest(
        iteration,
        weights_digest=f"{iteration:064d}",
        collected=collected if iteration else None,
        evaluated=evaluated,
        metrics={"reward/mean": reward, "throughput/tokens_per_second": 100 / wall} if iteration else {},
        timings={"wall": wall} | ({"evaluate": 0.25} if evaluated else {}),
        committed_at="2026-11-15T12:00:00+00:00",
    )


def test_quantities_of_a_run_are_measured_from_its_manifests(tmp_path):
    chain = [
        manifest(0, 0.0, 9.0, 0.0),
        manifest(1, 0.1, 7.0, None),
        manifest(2, 0.3, 0.5, 0.4),
        manifest(3, 0.5, 0.4, None),
        manifest(4, 0.7, 9.9, 0.6),
    ]
    config = tiny_config(tmp_path)
    measured = measure_run(config, chain, ORIGIN)
    assert measured.quantities == pytest.approx(
        {
            "reward/last": 0.7,  # mean over the last quarter
            "reward/mean": 0.4,
            "accuracy/last": 0.6,
            "accuracy/mean": 0.5,  # without iteration 0, which is before any training
            "throughput/tokens_per_second": 200.0,  # the median of 200, 250 and 10; the first iteration does not count
            "seconds/wall": 0.5,
            "seconds/evaluate": 0.25,
        }
    )
    assert measured.weights == ("00000000",) * 5
    assert measured.settings["seed"] == "0"
    elsewhere = measure_run(tiny_config(tmp_path / "elsewhere"), chain, ORIGIN)
    assert elsewhere.settings == measured.settings, "where things are kept is no part of what a run is"


def test_the_references_of_the_repository_can_be_loaded():
    plan = load_nightly(ROOT / "configs/nightly.yaml")
    names = [load_config(reference.config, reference.overrides).name for reference in plan.references]
    assert names == ["quickstart", "quickstart-ppo"]


def test_a_typo_in_a_nightly_file_is_refused_in_one_sentence(tmp_path):
    file = tmp_path / "nightly.yaml"
    file.write_text("references: [{config: a.yaml}]\ntolerances: {acuracy: 0.1}\n")
    with pytest.raises(UserError, match="tolerances.acuracy is not a key; did you mean 'accuracy'?"):
        load_nightly(file)


def test_the_origin_of_a_run_has_the_kind_of_machine_and_no_paths():
    kind, versions = machine_kind(), library_versions()
    assert kind.partition(", ")[2].startswith(tuple("123456789")), kind
    assert versions.startswith("python 3.")
    assert ", torch " in versions
    assert learning_settings({"store.uri": "x", "seed": "1", "work_dir": "y"}) == {"seed": "1"}
