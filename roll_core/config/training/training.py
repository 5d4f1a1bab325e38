"""Config of the policy update: backend, optimizer steps, batching, precision and memory."""

from enum import StrEnum
from typing import Annotated

from pydantic import NonNegativeFloat, PositiveInt

from roll_core.config.base import Section, Unit
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.lora import LoraConfig
from roll_core.config.training.mismatch import MismatchConfig


class Precision(StrEnum):
    """Arithmetic of the forward and backward pass."""

    FLOAT32 = "float32"
    """32-bit arithmetic: exact, and slow on GPUs."""
    BFLOAT16 = "bfloat16"
    """16-bit arithmetic; engines on GPUs then hold their weights in bfloat16, too."""


class Packing(StrEnum):
    """Arrangement of sequences in the rows of a micro-batch."""

    NONE = "none"
    """One sequence in a row, padded."""
    ROWS = "rows"
    """Several sequences in a row."""
    SHARED_PROMPTS = "shared_prompts"
    """A prompt once in a row, followed by several of its completions; needs row_tokens."""


class BackendKind(StrEnum):
    """Library that trains the policy."""

    TORCH = "torch"
    """Hugging Face model, sharded over all trainer ranks (FSDP2)."""
    MEGATRON = "megatron"
    """megatron-core, sharded by training.layout: for large models."""
    REHEARSAL = "rehearsal"
    """No model: an update takes training.seconds_per_token and moves a digest. For rehearsing a run's orchestration without
    accelerators; needs inference.kind rehearsal."""


class TrainingConfig(Section):
    """Update of the policy."""

    backend: BackendKind = BackendKind.TORCH
    """Library that trains the policy."""
    layout: LayoutConfig = LayoutConfig()
    """Parallelism of the trainer ranks. Only with `training.backend: megatron`."""
    seconds_per_token: Annotated[NonNegativeFloat, Unit("seconds")] = 0.0
    """Time that a rehearsed update takes for each trained token of the batch. Only with `training.backend: rehearsal`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW settings of the policy."""
    optimizer_steps: PositiveInt = 1
    """Optimizer steps per pass over an iteration's groups, which are split evenly between them. Above 1 is less
    on-policy."""
    epochs: Annotated[PositiveInt, Unit("passes")] = 1
    """Passes over an iteration's batch, each of optimizer_steps (PPO's K, GRPO's mu)."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens, padding included, in one forward and backward pass of one rank; at least model.max_positions. Lower it if
    a rank runs out of memory."""
    packing: Packing = Packing.ROWS
    """Arrangement of sequences in the rows of a micro-batch."""
    row_tokens: PositiveInt | None = None
    """Length of a packed row, in tokens; null takes the longest sequence of the batch. The cost of attention grows with
    it."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are in memory at once; their memory is this times the vocabulary. Lower it to save memory."""
    precision: Precision = Precision.FLOAT32
    """Arithmetic of the forward and backward pass. The optimizer keeps its state and its copy of the weights in float32."""
    deterministic: bool = True
    """Use deterministic algorithms only, in trainer ranks and torch engines: equal inputs on machines of the same kind give
    equal bits, on any number of threads, beside any load. Resume and replay rely on it. False may be faster on GPUs; then
    a replayed update differs within rounding. Only with `training.backend: torch` or `training.backend: megatron`."""
    compile: bool = False
    """Compile the layers: about half a minute at first use, then about 1.5 times as fast on a GPU. Only with
    `training.backend: torch`."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: about 30 % more compute for much less memory."""
    offload: bool = False
    """Offload weights and optimizer state to host memory while engines on the trainer's GPUs generate, which then have the
    GPUs to themselves (inference.memory_share). Needs every placement.engines device in placement.trainer. Only with
    `cluster.device: cuda`."""
    lora: LoraConfig | None = None
    """Low-rank adaptation; null trains all weights. Only with `training.backend: torch`."""
    experts: ExpertsConfig | None = None
    """Training of a mixture's routers, and a limit on uneven use of its experts. Null trains routers like all other weights
    and only measures (metrics experts/...)."""
    mismatch: MismatchConfig | None = None
    """Limits on the mismatch between the trainer's and the engines' logprobs; null only measures (metrics mismatch/...)."""

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps per iteration, over all epochs."""
        return self.optimizer_steps * self.epochs

    @property
    def routing(self) -> ExpertsConfig:
        """The section `experts`, or its defaults if it is null."""
        return self.experts or ExpertsConfig()
