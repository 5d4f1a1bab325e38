"""Roles without a cluster: what the reward role makes of rewards that raise, return NaN or are unavailable, and how a broken
GPU is named."""

import pickle

import pytest

from roll_core.errors import DeviceFault, FailureClass, RewardError, RewardUnavailable, RollError, classify
from roll_core.roles.process import names_device
from roll_core.roles.reward_role import RewardRole
from roll_core.roles.scheduler_role import refuse_if_none_graded
from roll_core.roles.trainer_rank import BACKGROUND, TrainerRank
from roll_core.rollout.router import Grade
from roll_core.types.trajectory import Failure, Message, Problem, Score, Speaker, Trajectory
from tests.support import grades_of, tiny_config, trajectory

PROBLEM = Problem("p/1", "p", (Message(Speaker.USER, "?"),), "42")


async def raising(problem: Problem, attempt: Trajectory) -> Score:
    raise KeyError("no such column")


async def not_a_number(problem: Problem, attempt: Trajectory) -> Score:
    return Score(float("nan"), False)


@pytest.mark.parametrize(("reward", "message"), [(raising, "KeyError: 'no such column'"), (not_a_number, "it answered nan")])
def test_a_reward_that_misbehaves_becomes_a_failure_and_never_a_score(tmp_path, reward, message):
    role = RewardRole(tiny_config(tmp_path))
    role._reward = reward
    (result,) = grades_of(role, [(PROBLEM, trajectory(0, 0, None))])
    assert isinstance(result, Failure)
    assert message in result.cause


class Judge:
    """Reward behind a service: it raises each of `failures` once before it grades, and never grades the attempt `broken`."""

    def __init__(self, *failures: Exception, broken: int | None = None):
        self.failures = list(failures)
        self.broken = broken
        self.calls: list[int] = []

    async def __call__(self, problem: Problem, attempt: Trajectory) -> Score:
        self.calls.append(attempt.attempt)
        if attempt.attempt == self.broken:
            raise TimeoutError("no answer within 10 s")
        if self.failures:
            raise self.failures.pop(0)
        return Score(0.5, False)


def grade_with(judge: Judge, tmp_path, repeats: int = 3, count: int = 1) -> list[Grade]:
    retries = {"repeats": repeats, "first_delay_seconds": 1e-6}
    role = RewardRole(tiny_config(tmp_path, retries=retries, reward={"kind": "exact_match", "concurrency": 1}))
    role._reward = judge
    return grades_of(role, [(PROBLEM, trajectory(0, attempt, None)) for attempt in range(count)])


def test_an_unavailable_reward_is_called_again_until_it_grades(tmp_path):
    judge = Judge(ConnectionRefusedError(), RewardUnavailable("503"), TimeoutError())
    assert grade_with(judge, tmp_path, count=2) == [Score(0.5, False)] * 2
    assert judge.calls == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "error", [RewardError("math", "p/1", "no number"), KeyError("x"), FileNotFoundError("tests/1"), MemoryError()]
)
def test_a_reward_is_not_called_again_after_a_data_failure(tmp_path, error):
    judge = Judge(error)
    results = grade_with(judge, tmp_path, count=2)
    assert isinstance(results[0], Failure)
    assert results[1] == Score(0.5, False)
    assert judge.calls == [0, 1]


def test_a_reward_that_stays_unavailable_is_reported_and_earlier_grades_are_kept(tmp_path):
    judge = Judge(broken=1)
    graded, unavailable, untried = grade_with(judge, tmp_path, repeats=2, count=3)
    assert graded == Score(0.5, False)
    assert isinstance(unavailable, RewardUnavailable)
    assert str(unavailable) == (
        "reward 'exact_match' was unavailable 3 times in a row (last: TimeoutError: no answer within 10 s)"
    )
    assert untried is unavailable
    assert judge.calls == [0, 1, 1, 1]


def test_a_batch_without_a_grade_is_refused_and_one_with_a_single_grade_is_not():
    failed = [trajectory(0, 0, None), trajectory(0, 1, None)]
    with pytest.raises(RollError, match="collect 4: every trajectory failed, the first with: boom"):
        refuse_if_none_graded(failed, "collect 4")
    refuse_if_none_graded([*failed, trajectory(0, 2, 0.0)], "collect 4")


# -------------------------------------------------------------------------------------------------- broken GPUs
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


@names_device
class Rank:
    """Role whose `update` fails with a given error."""

    def update(self, error: Exception) -> None:
        raise error


def test_a_broken_gpu_is_named_with_its_node_and_ends_the_leg_as_a_failure_of_that_node(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-017")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(DeviceFault) as caught:
        Rank().update(RuntimeError(ILLEGAL))
    assert caught.value.reasons == {
        "gpu-017": "GPU 3 failed (RuntimeError: CUDA error: an illegal memory access was encountered)"
    }
    assert classify(caught.value) is FailureClass.TRANSIENT
    assert pickle.loads(pickle.dumps(caught.value)).reasons == caught.value.reasons, "it crosses processes"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: device-side assert triggered"), ValueError("nan")])
def test_an_error_of_the_program_is_not_blamed_on_a_gpu(error):
    with pytest.raises(type(error)) as caught:
        Rank().update(error)
    assert caught.value is error


def test_all_methods_of_a_trainer_rank_name_its_gpu_and_keep_their_concurrency_group():
    assert all("__wrapped__" in vars(method) for name, method in vars(TrainerRank).items() if not name.startswith("_"))
    assert vars(TrainerRank.store_snapshot)["__ray_concurrency_group__"] == BACKGROUND
