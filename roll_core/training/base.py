"""What training backends must do. One object per trainer rank; all ranks get the same calls in the same order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from roll_core.algorithms.inputs import LossFn, ValueLossFn
from roll_core.batching.micro_batch import MicroBatch
from roll_core.config.model import ModelConfig
from roll_core.config.optimizer import OptimizerConfig
from roll_core.types.manifest import Metrics


class Policy(StrEnum):
    """Whose logprobs are asked for; teachers go by names of their own."""

    CURRENT = "current"
    REFERENCE = "reference"


Snapshot = Callable[[Path], list[Path]]
"""Writes what was copied into a folder all ranks share, together with the other ranks, from any thread; answers the files
this rank wrote. Only the newest snapshot of an object can be written: the next one reuses its memory."""


@dataclass(frozen=True)
class Share:
    """Which part of every batch a rank works on. Ranks that hold one copy of the model between them work on the same part;
    one of them speaks for it, so that sums over all ranks count every part once.

    Example (the second of two copies of a model, each on two ranks; the last rank): Share(index=1, count=2, speaks=True)
    """

    index: int
    count: int
    speaks: bool
    row_multiple: int = 1
    """Rows have a multiple of so many tokens, so that ranks can share them out."""


class Trainable(Protocol):
    """What a policy and a critic have in common."""

    def start_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """Begin a fresh optimizer and learning-rate schedule of `total_steps` steps."""
        ...

    def apply_gradients(self) -> Metrics:
        """One optimizer step with what was accumulated, skipped (and counted) if the gradient is not finite.

        Metrics are those of the whole batch, the same on every rank.
        """
        ...

    def discard_gradients(self) -> None:
        """Forget what was accumulated since the last step."""
        ...

    def offload(self) -> None:
        """Give the device's memory back: all waits in host memory, where it can be read and saved, until `reload`."""
        ...

    def reload(self) -> None:
        """Take the device again. Before this, nothing is computed; without an `offload` nothing happens."""
        ...

    def snapshot(self) -> Snapshot:
        """A copy of weights and optimizer state in host memory, which training on does not change."""
        ...

    def load(self, folder: Path) -> None:
        """Continue from a saved folder, whatever number of ranks wrote it."""
        ...


class TrainingBackend(Trainable, Protocol):
    """A policy in training, and the frozen policies it is compared with.

    Micro-batches come several at a time, all of an optimizer step where it can be: the stages of a pipeline are busy only
    while there are as many under way.
    """

    @property
    def share(self) -> Share:
        """Whose micro-batches this rank is given."""
        ...

    def logprobs(self, micro_batches: Sequence[MicroBatch], policy: str) -> list[Tensor]:
        """Logprob of every trained token (N) of each, without gradient."""
        ...

    def divergences(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """KL(current || reference) over the whole vocabulary, where each trained token is predicted (N), no gradient."""
        ...

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFn) -> None:
        """Add their gradients to those of this optimizer step. The loss is asked on ranks that know the logprobs, the one
        that speaks for its share among them."""
        ...

    def accumulate_beside_reference(self, micro_batches: Sequence[MicroBatch], loss: LossFn) -> None:
        """The same, with full-vocabulary divergences to the reference in the loss's inputs."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by Hugging Face name, one at a time; every rank iterates, every rank sees the same."""
        ...

    def load_frozen(self, name: str, folder: Path) -> None:
        """Take the weights of a saved folder as a frozen policy of that name."""
        ...

    def build_frozen(self, name: str, model: ModelConfig) -> None:
        """Take another model as a frozen policy of that name."""
        ...


class Values(NamedTuple):
    """What the critic expects before each trained token, and after the last token of each sequence."""

    values_N: Tensor
    final_values_S: Tensor


class CriticBackend(Trainable, Protocol):
    """A value model in training."""

    def values(self, micro_batch: MicroBatch) -> Values: ...

    def accumulate(self, micro_batch: MicroBatch, loss: ValueLossFn) -> None:
        """Add a micro-batch's gradient to those of this optimizer step."""
        ...

    def adopt(self, policy_weights: Iterator[tuple[str, Tensor]]) -> None:
        """Start from a policy's weights; only the value head stays the critic's own."""
        ...
