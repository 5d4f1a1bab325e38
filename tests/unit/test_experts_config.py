"""Config section `training.experts`: impossible settings are refused in one sentence."""

import pytest

from roll_core.errors import UserError
from roll_core.planning.preflight import check_experts
from tests.support import tiny_config

MIXTURE = {"model": {"kind": "scratch", "max_positions": 32, "architecture": "qwen3_moe"}}


@pytest.mark.parametrize("experts", [{"freeze_router": True}, {"balance_loss": 0.01}, {"z_loss": 0.001}, {"replay": True}])
def test_a_model_without_experts_has_no_routers_to_train(tmp_path, experts):
    (key,) = experts
    with pytest.raises(UserError, match=f"^training.experts.{key}: the model has no experts: leave it out, or"):
        check_experts(tiny_config(tmp_path, training={"experts": experts}))
    check_experts(tiny_config(tmp_path, training={"experts": experts}, **MIXTURE))


def test_a_limit_on_the_expert_load_is_allowed_without_experts(tmp_path):
    check_experts(tiny_config(tmp_path, training={"experts": {"max_load": 4}}))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"balance_loss": -0.1}, "training.experts.balance_loss is -0.1, but"),
        ({"balance_loss": 0.1, "freeze_router": True}, r"balance_loss \(0.1\) is to move the routers, which freeze_router"),
        ({"z_loss": 0.1, "freeze_router": True}, r"z_loss \(0.1\) is to move the routers, which freeze_router"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, experts, message):
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, training={"experts": experts}, **MIXTURE)


@pytest.mark.parametrize(
    "inference", [{"kind": "vllm"}, {"kind": "rehearsal", "seconds_per_token": 0.01, "median_tokens": 3, "sigma": 0.0}]
)
def test_replay_needs_an_engine_that_records_routing(tmp_path, inference):
    message = (
        f"needs an engine that records which experts it chose, and inference.kind {inference['kind']} does not so far: set"
    )
    with pytest.raises(UserError, match=f"training.experts.replay {message} inference.kind=torch"):
        tiny_config(tmp_path, training={"experts": {"replay": True}}, inference=inference, **MIXTURE)
