"""Origins of a run: a fork or teacher whose checkpoints have other parameters is refused in one sentence."""

import pytest

from roll_core.errors import UserError
from roll_core.planning.preflight import check_origins
from tests.stored_runs import StoredRuns
from tests.support import tiny_config

MIXTURE = {"model": {"kind": "scratch", "max_positions": 32, "architecture": "qwen3_moe"}}
FROZEN = {"training": {"experts": {"freeze_router": True}}}
ADAPTED = {"training": {"lora": {"rank": 4}}}
FORK = {"iterations": 9, "forked_from": {"run_id": "tiny-1", "iteration": 2}}
DISTILLED = {"algorithm": {"kind": "distillation", "teachers": [{"kind": "run", "run_id": "tiny-1"}]}}


def store_run(tmp_path, **sections) -> None:
    """Store the run tiny-1 with these config sections and a checkpoint of iteration 2."""
    runs = StoredRuns(tmp_path)
    runs.open(**sections)
    runs.commit("tiny-1", 2)
    runs.checkpoint("tiny-1", 2)


@pytest.mark.parametrize(("before", "after"), [({}, ADAPTED), (ADAPTED, {}), (ADAPTED, {"training": {"lora": {"rank": 8}}})])
@pytest.mark.parametrize(
    ("origin", "message"),
    [
        (
            FORK,
            "^training.lora: checkpoints of tiny-1 are of other matrices: leave it as it was there, or export",
        ),
        (
            DISTILLED,
            "^algorithm.teachers.0.run_id: tiny-1 has another training.lora: export its policy",
        ),
    ],
    ids=["fork", "teacher"],
)
def test_a_fork_or_teacher_needs_the_same_lora_settings(tmp_path, before, after, origin, message):
    store_run(tmp_path, **before)
    with pytest.raises(UserError, match=message):
        check_origins(tiny_config(tmp_path, **origin, **after))
    check_origins(tiny_config(tmp_path, **origin, **before))


def test_a_fork_cannot_unfreeze_routers(tmp_path):
    store_run(tmp_path, **MIXTURE, **FROZEN)
    with pytest.raises(UserError, match="^training.experts.freeze_router: tiny-1 left its routers as they were, and its"):
        check_origins(tiny_config(tmp_path, **FORK, **MIXTURE))
    check_origins(tiny_config(tmp_path, **FORK, **MIXTURE, **FROZEN))


def test_a_fork_of_a_run_that_trained_routers_can_freeze_them(tmp_path):
    store_run(tmp_path, **MIXTURE)
    check_origins(tiny_config(tmp_path, **FORK, **MIXTURE, **FROZEN))
