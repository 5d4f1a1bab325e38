"""Config section `training.lora`: impossible settings are refused in one sentence."""

import pytest

from roll_core.errors import UserError
from roll_core.planning.memory import trainer_memory
from roll_core.planning.model_shape import shape_of
from roll_core.planning.preflight import check_lora_targets
from tests.support import tiny_config

MIXTURE = {"kind": "scratch", "max_positions": 32, "architecture": "qwen3_moe"}


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"lora": {"rank": 0}}, "training.lora.rank is 0, but"),
        ({"lora": {"targets": []}}, "training.lora.targets"),
        ({"lora": {"targets": ["q_proj", "q_proj"]}}, "training.lora.targets.* name each layer once"),
        ({"lora": {"targets": ["lm_head"]}}, "training.lora.targets.*lm_head"),
        (
            {"lora": {}, "backend": "megatron"},
            "training.lora is of training.backend torch, and this is megatron: leave",
        ),
    ],
)
def test_impossible_settings_are_refused(tmp_path, training, message):
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, training=training)


def test_lora_of_a_mixture_needs_a_target_in_attention(tmp_path):
    config = tiny_config(tmp_path, training={"lora": {"targets": ["gate_proj", "up_proj"]}}, model=MIXTURE)
    with pytest.raises(UserError, match="training.lora.targets .gate_proj, up_proj.: experts of a mixture .* add k_proj, o"):
        check_lora_targets(config)
    check_lora_targets(tiny_config(tmp_path, training={"lora": {}}, model=MIXTURE))


def test_the_plan_counts_no_gradients_and_moments_of_frozen_weights(tmp_path):
    whole, adapted = (tiny_config(tmp_path, training={"lora": lora}) for lora in (None, {"rank": 1}))
    shape = shape_of(whole.model)
    assert shape is not None
    before, after = trainer_memory(whole, shape), trainer_memory(adapted, shape)
    assert before.weights < after.weights < 1.1 * before.weights
    assert after.gradients < 0.1 * before.gradients
    assert after.optimizer == 2 * after.gradients
