"""Machines and lengths for a config of which nothing was recorded: `roll simulate` and `roll plan` say so where they use
them, and they are to be doubted."""

import math

from roll_core.config.inference import RehearsalInference, TorchInference
from roll_core.config.run import RunConfig
from roll_core.simulation.machines import Cost, EngineModel, GraderModel, TrainerModel
from roll_core.simulation.simulator import MachineModels
from roll_core.simulation.workload import SampledWorkload

SECONDS_PER_TRAINED_TOKEN = 1.2e-4
"""One device that does 400 Tflop/s on a model of 8 billion parameters, at 6 operations for a parameter and a token."""
FORWARD_SHARE = 1 / 3
"""Of training is the forward pass, which is what prepare does."""
MEDIAN_SHARE, SIGMA = 1 / 4, 0.8
"""The median completion has so much of rollout.max_new_tokens; at this sigma one of 25 reaches the limit."""
PROMPT_SHARE = 1 / 8
"""Prompts have so much of the room that completions leave of model.max_positions."""


def assumed_models(config: RunConfig) -> MachineModels:
    match config.inference:
        case RehearsalInference() as latency:
            engine = EngineModel(latency.seconds_to_first_token, latency.seconds_per_token)
        case TorchInference():
            engine = EngineModel(seconds_to_first_token=0.1, seconds_per_token=0.02, seconds_per_token_per_running=1e-4)
    trainer = TrainerModel(
        num_devices=1,
        prepare=Cost(0.0, FORWARD_SHARE * SECONDS_PER_TRAINED_TOKEN),
        update=Cost(0.0, SECONDS_PER_TRAINED_TOKEN),
        publish_seconds=2.0,
        other_seconds=0.5,
    )
    return MachineModels(engine, GraderModel((0.01,)), trainer)


def assumed_workload(config: RunConfig) -> SampledWorkload:
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


def assumed_tokens(config: RunConfig) -> tuple[float, float]:
    """Of a prompt, and of a completion: means."""
    most = config.rollout.max_new_tokens
    median, sigma = MEDIAN_SHARE * most, SIGMA
    if isinstance(config.inference, RehearsalInference):
        median, sigma = config.inference.median_tokens, config.inference.sigma
    return PROMPT_SHARE * (config.model.max_positions - most), min(most, median * math.exp(sigma**2 / 2))
