"""How the policy is updated."""

from enum import StrEnum

from pydantic import PositiveInt

from roll_core.config.base import Section
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.training.experts import ExpertsConfig
from roll_core.config.training.layout import LayoutConfig
from roll_core.config.training.lora import LoraConfig
from roll_core.config.training.mismatch import MismatchConfig


class Precision(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Packing(StrEnum):
    """NONE: a row a sequence. ROWS: several sequences in a row. SHARED_PROMPTS: a prompt once, with completions to it."""

    NONE = "none"
    ROWS = "rows"
    SHARED_PROMPTS = "shared_prompts"


class BackendKind(StrEnum):
    """TORCH: a Hugging Face model, sharded over all ranks (FSDP2). MEGATRON: by `training.layout`, for large models."""

    TORCH = "torch"
    MEGATRON = "megatron"


class TrainingConfig(Section):
    backend: BackendKind = BackendKind.TORCH
    layout: LayoutConfig = LayoutConfig()
    """Of the megatron backend."""
    optimizer: OptimizerConfig = OptimizerConfig()
    optimizer_steps: PositiveInt = 1
    """Optimizer steps per pass over the iteration's groups, which are split evenly between them."""
    epochs: PositiveInt = 1
    """Passes over an iteration's batch, each of `optimizer_steps` (PPO's K, GRPO's mu)."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens, padding included, in one forward-backward of one rank."""
    packing: Packing = Packing.ROWS
    row_tokens: PositiveInt | None = None
    """Length of a packed row; null takes the longest sequence of the batch. Attention costs grow with it."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once; bounds memory at this times the vocabulary."""
    precision: Precision = Precision.FLOAT32
    """Arithmetic of the forward and backward pass; weights and optimizer state stay float32."""
    compile: bool = False
    """Compile the layers: about half a minute when they are first used, and one and a half times as fast on a GPU since."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: about 30 % more compute for much less memory."""
    offload: bool = False
    """Weights and optimizer state wait in host memory while engines on the trainer's devices generate, which then have the
    devices to themselves (inference.memory_share). Needs placement.trainer and placement.engines on the same GPUs."""
    lora: LoraConfig | None = None
    """Train small matrices beside the model's own; null trains all of it. Of training.backend torch."""
    experts: ExpertsConfig | None = None
    """How a mixture's routers are trained, and a limit on how unevenly it uses its experts; null trains routers like all
    else, and only measures (metrics experts/*)."""
    mismatch: MismatchConfig | None = None
    """Limits on how far the trainer's logprobs may be from the engines'; null only measures (metrics mismatch/*)."""

    @property
    def steps_per_iteration(self) -> int:
        return self.optimizer_steps * self.epochs

    @property
    def routing(self) -> ExpertsConfig:
        """How routers are trained: the section, or what null means."""
        return self.experts or ExpertsConfig()
