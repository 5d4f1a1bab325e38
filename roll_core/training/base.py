"""What a training backend must do. One object per trainer rank; all ranks get the same calls in the same order."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from torch import Tensor

from roll_core.algorithms.inputs import LossFn
from roll_core.batching.micro_batch import MicroBatch
from roll_core.config.training import OptimizerConfig
from roll_core.types.manifest import Metrics


class Policy(StrEnum):
    """Whose logprobs are asked for."""

    CURRENT = "current"
    REFERENCE = "reference"


class TrainingBackend(Protocol):
    def start_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """Begin a fresh optimizer and learning-rate schedule of `total_steps` steps."""
        ...

    def logprobs(self, micro_batch: MicroBatch, policy: Policy) -> Tensor:
        """Logprob of every trained token (N), without gradient."""
        ...

    def accumulate(self, micro_batch: MicroBatch, loss: LossFn) -> None:
        """Add a micro-batch's gradient to those of this optimizer step."""
        ...

    def apply_gradients(self) -> Metrics:
        """One optimizer step with what was accumulated, skipped (and counted) if the gradient is not finite.

        Metrics are those of the whole batch, the same on every rank.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by Hugging Face name, one at a time; every rank iterates, every rank sees the same."""
        ...

    def save(self, folder: Path) -> list[Path]:
        """Write weights and optimizer state into a folder all ranks share; the files this rank wrote."""
        ...

    def load(self, folder: Path) -> None:
        """Continue from a saved folder, whatever number of ranks wrote it."""
        ...

    def load_reference(self, folder: Path) -> None:
        """Take the weights of a saved folder as the frozen reference policy."""
        ...
