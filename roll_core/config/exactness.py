"""Exactness of a run: which of its results a repetition gives to the bit, on machines of the same kind with the same code.

An update is repeated from stored trajectories, by resume and replay. A run is repeated from its config alone. Used by `roll
plan`, `roll show` and the manifest.
"""

from roll_core.config.inference import RehearsalInference, TorchInference, VllmInference
from roll_core.config.operations.placement import DeviceKind
from roll_core.config.run import RunConfig
from roll_core.config.training.training import BackendKind


def has_exact_updates(config: RunConfig) -> bool:
    """True if an update that is repeated from its stored trajectories gives the same weights, to the bit."""
    return config.training.deterministic or config.training.backend is BackendKind.REHEARSAL


def rollouts_vary_because(config: RunConfig) -> list[str]:
    """Reasons why another run of the same config samples other tokens, each with its key; empty if there is none."""
    rollout, reasons = config.rollout, []
    match config.inference:
        case VllmInference():
            reasons.append("inference.kind vllm rounds by the sequences that share a batch")
        case TorchInference() if config.cluster.device is DeviceKind.CUDA:
            reasons.append("cluster.device cuda rounds by the sequences that share a batch")
        case TorchInference() | RehearsalInference():
            pass
    if rollout.async_ratio:
        reasons.append("rollout.async_ratio above 0 samples with the weights of the moment")
    if rollout.redundant_groups or rollout.redundant_attempts:
        reasons.append("rollout.redundant_groups and redundant_attempts keep what finishes first")
    return reasons


def describe_exactness(config: RunConfig) -> str:
    """Say whether a run is exact, and why not. Example: no, because training.deterministic is false"""
    if not has_exact_updates(config):
        return "no, because training.deterministic is false"
    if reasons := rollouts_vary_because(config):
        return f"updates only (resume, replay): another run samples other tokens, because {'; '.join(reasons)}"
    return "yes: updates, and whole runs of this config on machines of this kind, are equal to the bit"
