"""Placement by the config alone: the devices of each engine, and the transport of its weights."""

import pytest

from roll_core.config.load import load_config
from roll_core.config.operations.weights import WeightsTransport
from roll_core.errors import UserError
from roll_core.roles.placement import device_bundles
from tests.support import ROOT

QUICKSTART = ROOT / "configs/runs/quickstart.yaml"
ON_GPUS = "cluster={device: cuda, devices_per_node: 4}"
TWO_PER_ENGINE = "inference={kind: vllm, tensor_parallel: 2}"


def config_with(*overrides: str):
    return load_config(QUICKSTART, overrides)


@pytest.mark.parametrize(
    ("overrides", "transport"),
    [
        ([], WeightsTransport.RAY),
        ([ON_GPUS, "placement={trainer: 0-3, engines: 0-3}"], WeightsTransport.SHARED_GPU),
        ([ON_GPUS, "placement={trainer: 0-3, engines: 0-1}"], WeightsTransport.SHARED_GPU),
        ([ON_GPUS, "placement={trainer: 0-1, engines: 2-3}"], WeightsTransport.BROADCAST),
        ([ON_GPUS, "placement={trainer: 0-2, engines: 2-3}"], WeightsTransport.RAY),
        ([ON_GPUS, "placement={trainer: 0-3, engines: 0-3}", "weights.transport=store"], WeightsTransport.STORE),
        (["weights.transport=broadcast"], WeightsTransport.BROADCAST),
    ],
)
def test_the_placement_determines_the_default_transport(overrides, transport):
    assert config_with(*overrides).weights_transport is transport


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights.transport=shared_gpu"], "weights.transport shared_gpu needs cluster.device cuda and every device of"),
        (["weights.transport=nfs"], "weights.transport is 'nfs', but input should be 'auto', 'shared_gpu', 'broadcast'"),
        (
            [ON_GPUS, "placement={trainer: 0-2, engines: 2-3}", "weights.transport=broadcast"],
            "weights.transport broadcast needs a GPU for each who takes part, but placement.trainer and placement.engines "
            "share [2]",
        ),
        (
            ["weights.transport=broadcast", "inference={kind: rehearsal, sigma: 1, median_tokens: 9, seconds_per_token: 1}"],
            "weights.transport broadcast is for engines with a model, and inference.kind rehearsal has none",
        ),
        ([TWO_PER_ENGINE], "placement.engines names 1 device(s), but inference.tensor_parallel gives each engine 2"),
        (
            [ON_GPUS, TWO_PER_ENGINE, "placement={trainer: 0-1, engines: 0-3}"],
            "inference.tensor_parallel (2) needs GPUs of the engines' own so far, but placement.trainer and "
            "placement.engines share [0, 1]",
        ),
        (
            [
                "cluster={device: cuda, devices_per_node: 3, nodes: 2}",
                TWO_PER_ENGINE,
                "placement={trainer: 0-1, engines: 2-5}",
            ],
            "inference.tensor_parallel (2) must divide cluster.devices_per_node (3)",
        ),
    ],
)
def test_impossible_placements_are_refused_in_one_sentence_that_names_the_key(overrides, message):
    with pytest.raises(UserError) as refused:
        config_with(*overrides)
    assert message in str(refused.value)


def test_an_engine_takes_as_many_devices_as_its_tensor_parallelism():
    config = config_with(ON_GPUS, TWO_PER_ENGINE, "placement={trainer: 0-1, engines: 2-3}")
    assert config.engine_devices == [(2, 3)]
    assert config_with("cluster.devices_per_node=3", "placement.engines=0-2").engine_devices == [(0,), (1,), (2,)]


def test_the_devices_of_an_engine_are_one_bundle_and_all_others_are_bundles_of_one():
    assert device_bundles(6, [(2, 3), (4, 5)]) == ((0,), (1,), (2, 3), (4, 5))
    assert device_bundles(3, [(0,), (1,)]) == ((0,), (1,), (2,))
