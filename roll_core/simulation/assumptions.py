"""Assumed machines and workload for a config without a recorded run. `roll simulate` says so where it uses them."""

from roll_core.config.inference import RehearsalInference, TorchInference, VllmInference
from roll_core.config.operations.placement import DeviceKind
from roll_core.config.run import RunConfig
from roll_core.planning.assumptions import MEDIAN_SHARE, SIGMA
from roll_core.planning.model_shape import shape_of
from roll_core.planning.time_model import decode_step_seconds
from roll_core.simulation.machines import Cost, EngineModel, GraderModel, TrainerModel
from roll_core.simulation.simulator import MachineModels
from roll_core.simulation.workload import SampledWorkload

SECONDS_PER_TRAINED_TOKEN = 1.2e-4
"""Seconds per token of a training step: one device at 400 Tflop/s, 8e9 parameters, 6 operations per parameter and token."""
FORWARD_SHARE = 1 / 3
"""Share of a training step that is the forward pass; `prepare` computes only that."""
SMALL_ENGINE = EngineModel(seconds_to_first_token=0.1, seconds_per_token=0.02, seconds_per_token_per_running=1e-4)
"""Model of an engine on a CPU, or of one whose model shape is unknown."""


def assumed_models(config: RunConfig) -> MachineModels:
    """Build the assumed speed models of the engines, graders and trainer of a config."""
    engine = _assumed_engine(config)
    trainer = TrainerModel(
        num_devices=1,
        prepare=Cost(0.0, FORWARD_SHARE * SECONDS_PER_TRAINED_TOKEN),
        update=Cost(0.0, SECONDS_PER_TRAINED_TOKEN),
        publish_seconds=2.0,
        other_seconds=0.5,
    )
    return MachineModels(engine, GraderModel((0.01,)), trainer)


def assumed_workload(config: RunConfig) -> SampledWorkload:
    """Build the assumed distribution of completion lengths and environment waits of a config."""
    most, seed = config.rollout.max_new_tokens, config.seed
    match config.inference:
        case RehearsalInference(environment=None) as latency:
            return SampledWorkload(latency.median_tokens, latency.sigma, most, seed=seed)
        case RehearsalInference(environment=waits) as latency if waits is not None:
            return SampledWorkload(
                latency.median_tokens,
                latency.sigma,
                most,
                num_waits=waits.turns,
                median_wait_seconds=waits.median_seconds,
                wait_sigma=waits.sigma,
                seed=seed,
            )
        case _:
            return SampledWorkload(max(1.0, MEDIAN_SHARE * most), SIGMA, most, seed=seed)


def _assumed_engine(config: RunConfig) -> EngineModel:
    match config.inference:
        case RehearsalInference() as latency:
            return EngineModel(latency.seconds_to_first_token, latency.seconds_per_token)
        case VllmInference():
            return _assumed_vllm(config)
        case TorchInference():
            return SMALL_ENGINE


def _assumed_vllm(config: RunConfig) -> EngineModel:
    """Engine model with decode steps by the model's shape and `cluster.speed`; SMALL_ENGINE on a CPU or without a shape."""
    shape = shape_of(config.model)
    if shape is None or config.cluster.device is DeviceKind.CPU:
        return SMALL_ENGINE
    slots = config.rollout.slots_per_engine
    alone, full = (decode_step_seconds(config, shape, running) for running in (1, slots))
    return EngineModel(SMALL_ENGINE.seconds_to_first_token, alone, (full - alone) / max(1, slots - 1))
