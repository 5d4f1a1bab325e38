"""A slice of `make fuzz`: mutated configs are accepted, or refused in one short line, soon and in little memory."""

import pytest

from roll_core.errors import UserError
from tests.fuzz import configs
from tests.fuzz.configs import Mutation, judge, mutate

SLICE, FIRST_SEED = 150, 1_000_000
"""Mutations, of seeds that `make fuzz` does not visit."""


def test_a_mutated_config_is_accepted_or_refused_in_one_sentence():
    outcomes = configs.run(SLICE, FIRST_SEED)
    assert [f"{outcome.kind}\n{outcome.mutation}\n{outcome.detail}" for outcome in outcomes if outcome.is_finding] == []
    assert {outcome.kind for outcome in outcomes} == {"accepted", "refused by the plan", "refused by the checks"}


def test_a_mutation_is_a_function_of_its_seed():
    assert [mutate(seed) for seed in range(20)] == [mutate(seed) for seed in range(20)]


def _loop() -> None:
    while True:
        pass


def _grow() -> None:
    _ = bytearray(configs.MEMORY * 2)


def _fail() -> None:
    raise KeyError("a traceback")


def _say_much() -> None:
    error = UserError("")
    error.args = ("x" * 3000,)
    raise error


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [
        (_loop, "plan: more than 0.2 s"),
        (_grow, "plan: more than 1 GB"),
        (_fail, "plan: KeyError"),
        (_say_much, "plan: more than 2000 characters"),
    ],
)
def test_a_hang_a_bomb_a_traceback_and_a_long_sentence_are_findings(tmp_path, monkeypatch, mistake, kind):
    monkeypatch.setattr(configs, "CPU_SECONDS", 0.2)
    monkeypatch.setattr(configs, "_plan", lambda path, overrides: mistake())
    outcome = judge(Mutation(0, "", ()), tmp_path)
    assert outcome.is_finding
    assert outcome.kind == kind
