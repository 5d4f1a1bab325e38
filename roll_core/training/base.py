"""Protocols of the training backends (`torch`, `megatron`) and the records they share. There is one backend object per
trainer rank. All ranks get the same calls in the same order, since most calls contain collectives."""

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
    """Name of the policy that `TrainingBackend.logprobs` scores with. Teachers have names of their own
    (`learner.teacher_name`)."""

    CURRENT = "current"
    REFERENCE = "reference"


Snapshot = Callable[[Path], list[Path]]
"""Function that writes a host-memory copy of the state into a folder shared by all ranks and returns the files this rank
wrote. All ranks call it together, from any thread. Only the newest snapshot of an object can be written: the next one reuses
its memory."""


@dataclass(frozen=True)
class Share:
    """Part `index` of the `count` parts of every batch: the part that a rank works on. All ranks of one model copy work on
    the same part. Exactly one rank per model copy reports sums (`is_reporter`), so that sums over all ranks count every part
    once.

    Example (two copies of a model, each on two ranks; the last rank): Share(index=1, count=2, is_reporter=True)
    """

    index: int
    count: int
    is_reporter: bool
    row_multiple: int = 1
    """Row lengths are multiples of this many tokens, so that the ranks of one model copy can split a row evenly."""


class Trainable(Protocol):
    """Model with an optimizer: the methods that policy and critic have in common."""

    def start_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """Start a fresh optimizer and a learning-rate schedule of `total_steps` steps."""
        ...

    def apply_gradients(self) -> Metrics:
        """Take one optimizer step with the accumulated gradients; skip and count it if the gradient is not finite.

        Return the metrics of the whole batch, identical on every rank.
        """
        ...

    def discard_gradients(self) -> None:
        """Drop the gradients accumulated since the last step."""
        ...

    def offload(self) -> None:
        """Move all state to host memory and free the device memory. The state can be read and saved there; computing has to
        wait for `reload`."""
        ...

    def reload(self) -> None:
        """Move all state back to the device; do nothing unless it is offloaded."""
        ...

    def snapshot(self) -> Snapshot:
        """Copy weights and optimizer state to host memory. Further training does not change the copy."""
        ...

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state from a checkpoint folder, whatever number of ranks wrote it."""
        ...


class TrainingBackend(Trainable, Protocol):
    """Policy in training, and the frozen policies (reference, teachers) it is compared with.

    Methods take several micro-batches at a time, preferably all of an optimizer step: the stages of a pipeline idle when
    fewer micro-batches than stages are in flight.
    """

    @property
    def share(self) -> Share:
        """Part of every batch that this rank is given."""
        ...

    def logprobs(self, micro_batches: Sequence[MicroBatch], policy: str) -> list[Tensor]:
        """Return the logprob of every trained token (N) of each micro-batch under the named policy, without gradient."""
        ...

    def divergences(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return KL(current || reference) over the full vocabulary at every trained token (N) of each micro-batch, without
        gradient."""
        ...

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFn) -> None:
        """Add the gradients of these micro-batches to the current optimizer step. The loss is evaluated only on ranks that
        have the logprobs; the reporter of the share is one of them."""
        ...

    def accumulate_beside_reference(self, micro_batches: Sequence[MicroBatch], loss: LossFn) -> None:
        """Accumulate like `accumulate`, with full-vocabulary divergences from the reference in the loss's inputs."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors by Hugging Face name, one at a time. Every rank must iterate, and gets the same tensors."""
        ...

    def load_frozen(self, name: str, folder: Path) -> None:
        """Load a checkpoint folder as the frozen policy `name`."""
        ...

    def build_frozen(self, name: str, model: ModelConfig) -> None:
        """Build another model as the frozen policy `name`."""
        ...


class Values(NamedTuple):
    """Values of the critic: the expected return before each trained token, and after the last token of each sequence."""

    values_N: Tensor
    final_values_S: Tensor


class CriticBackend(Trainable, Protocol):
    """Value model in training."""

    def values(self, micro_batch: MicroBatch) -> Values:
        """Return the values of a micro-batch, without gradient."""
        ...

    def accumulate(self, micro_batch: MicroBatch, loss: ValueLossFn) -> None:
        """Add the gradient of a micro-batch to the current optimizer step."""
        ...

    def adopt(self, policy_weights: Iterator[tuple[str, Tensor]]) -> None:
        """Start from a policy's weights; only the value head keeps its own."""
        ...
