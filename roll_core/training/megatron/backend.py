"""The `megatron` training backend: a policy sharded over ranks by `training.layout`, and the frozen policies it is compared
with.

All Megatron code is imported and called within `on_device()`, which makes it run without a GPU.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll_core.algorithms.inputs import LossFn, LossOutputs
from roll_core.batching.micro_batch import MicroBatch
from roll_core.config.model import ModelConfig, PretrainedModel, ScratchModel
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.training.training import TrainingConfig
from roll_core.errors import RollError
from roll_core.models.causal_lm import build_model, model_config
from roll_core.models.checkpoint_names import to_checkpoint_names
from roll_core.models.megatron_names import MegatronNames
from roll_core.models.tensor_files import NamedTensors, TensorFiles, TensorsInMemory
from roll_core.training.base import Policy, Share, Snapshot
from roll_core.training.experts.losses import write_shares
from roll_core.training.experts.routers import Routers
from roll_core.training.loss_inputs import loss_inputs
from roll_core.training.megatron.cpu import on_device
from roll_core.training.megatron.offload import MegatronOffloader
from roll_core.training.schedule import learning_rate_at
from roll_core.training.scorer import ReferenceStates, Scored
from roll_core.training.snapshot import HostCopy, written_files
from roll_core.types.manifest import Metrics
from roll_core.weights.shards import Shard, TensorGatherer, load_shards

with on_device():
    from roll_core.training.megatron import checkpoint as megatron_checkpoint
    from roll_core.training.megatron.checkpoint import Block, Progress, blocks_of
    from roll_core.training.megatron.layers import ObservedRouter
    from roll_core.training.megatron.model import PolicyModel, build_chunks
    from roll_core.training.megatron.optimizer import MOMENTS, DistributedAdam, OwnedRange, wrap
    from roll_core.training.megatron.pipeline import RowPart, Scoring, broadcast_from_last_stage, forward, forward_backward
    from roll_core.training.megatron.shards import shards_of
    from roll_core.training.megatron.world import initialize_layout, share_of

AREA = "update"
"""First part of the metric names."""


class InitialWeights(StrEnum):
    """Initial weights of a model. MODEL: the weights that the model's config names. DRAWN: random weights, drawn by Megatron
    on the device, to measure models that no host has memory for."""

    MODEL = "model"
    DRAWN = "drawn"


@dataclass(frozen=True)
class MegatronSettings:
    """Settings that Megatron models are built with."""

    training: TrainingConfig
    seed: int
    temperature: float
    """Sampling temperature; logits are divided by it."""
    device: torch.device
    initial: InitialWeights = InitialWeights.MODEL


class MegatronBackend:
    """Policy trained by megatron-core, sharded over ranks; a `TrainingBackend`."""

    def __init__(self, model: ModelConfig, settings: MegatronSettings):
        self._settings = settings
        self._model_config = model
        with on_device():
            initialize_layout(settings.training.layout, settings.device, settings.seed)
            self._policy = _LocalPolicy(model, settings)
            if settings.training.routing.freeze_router:
                for router in _routers(self._policy.chunks):
                    router.requires_grad_(False)  # before wrapping, which allocates the gradient buffers
            self._wrapped = wrap(self._policy.chunks)
            self._gatherer = TensorGatherer(self._policy.shards, self._policy.names)
            self._routers = _observe_routers(self._policy.chunks, settings)
        self._share = share_of(settings.training.layout)
        self._frozen: dict[str, _LocalPolicy] = {}
        self._sums: dict[str, Tensor] = {}
        self._host_copy = HostCopy()
        self._offloader = MegatronOffloader(settings.device)
        self._checkpoint_group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None

    @property
    def share(self) -> Share:
        return self._share

    def start_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        self._optimizer_config = config
        self._total_steps = total_steps
        self._step = 0
        with on_device():
            self._optimizer = DistributedAdam(self._wrapped, config, self._settings.training.precision)

    def logprobs(self, micro_batches: Sequence[MicroBatch], policy: str) -> list[Tensor]:
        built = self._policy if policy == Policy.CURRENT else self._frozen[policy]
        return self._score(built, micro_batches, lambda score, _: score(None).logprobs_N)

    def divergences(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        references = self._reference_states(micro_batches)
        return self._score(self._policy, micro_batches, lambda score, n: score(references[n]).divergences_N)

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFn) -> None:
        self._accumulate(micro_batches, loss, {})

    def accumulate_beside_reference(self, micro_batches: Sequence[MicroBatch], loss: LossFn) -> None:
        self._accumulate(micro_batches, loss, self._reference_states(micro_batches))

    def apply_gradients(self) -> Metrics:
        rate = learning_rate_at(self._step, self._optimizer_config, self._total_steps)
        with on_device():
            norm = self._optimizer.step(rate)
        self._step += 1
        steps = {"gradient_norm": norm, "learning_rate": rate, "skipped_steps": float(not math.isfinite(norm))}
        found = self._drain_sums() | self._routers.metrics()
        return found | {f"{AREA}/{name}": value for name, value in steps.items()}

    def discard_gradients(self) -> None:
        with on_device():
            self._optimizer.discard()
        self._routers.discard()
        self._sums = {}

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full gradients accumulated so far, by Hugging Face name; for tests and for debugging a run."""
        with on_device():
            self._optimizer.gather_gradients()
        trained = TensorGatherer([each for each in self._policy.shards if each.parameter.requires_grad], self._policy.names)
        return trained.tensors(lambda parameter: parameter.main_grad, torch.float32)  # type: ignore[attr-defined]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._gatherer.tensors(lambda parameter: parameter.data, self._policy.dtype)

    def offload(self) -> None:
        owned_ranges = list(self._optimizer.owned_ranges())
        policies = [self._policy, *self._frozen.values()]
        kept: list[Tensor] = [parameter for policy in policies for parameter in policy.parameters]
        kept += [each.main for each in owned_ranges] + [each.state[name] for each in owned_ranges for name in MOMENTS]
        self._offloader.offload(kept, emptied=self._optimizer.gradient_buffers)

    def reload(self) -> None:
        self._offloader.reload()

    def snapshot(self) -> Snapshot:
        owned_ranges, parameters = list(self._optimizer.owned_ranges()), self._policy.parameters
        copied = self._host_copy.copy(
            {
                "weights": [parameter.data for parameter in parameters],
                "state": [{name: each.value(name) for name in self._stored_names} for each in owned_ranges],
            }
        )
        blocks = self._policy.weight_blocks(dict(zip(parameters, copied["weights"], strict=True)))
        blocks += [
            b for each, state in zip(owned_ranges, copied["state"], strict=True) for b in self._state_blocks(each, state)
        ]
        progress, group = Progress(self._step, self._optimizer.step_count), self._checkpoint_group
        shares = self._routers.losses.shares

        def write(folder: Path) -> list[Path]:
            # A process group of its own: ranks keep training, and collectives of a group must have one order on all ranks.
            megatron_checkpoint.save(folder, blocks, progress, group)
            return written_files(folder) + (write_shares(shares, folder) if dist.get_rank() == 0 else [])

        return write

    def load(self, folder: Path) -> None:
        owned_ranges = list(self._optimizer.owned_ranges())
        megatron_checkpoint.load(folder, self._policy.weight_blocks())
        with on_device():
            self._optimizer.sync_main_weights()
        blocks = [
            b
            for each in owned_ranges
            for b in self._state_blocks(each, {name: each.value(name) for name in self._stored_names})
        ]
        self._step, step_count = megatron_checkpoint.load(folder, blocks)
        self._optimizer.set_step_count(step_count)
        self._routers.losses.load(folder)

    def load_frozen(self, name: str, folder: Path) -> None:
        with on_device():
            frozen = _LocalPolicy(self._model_config, self._settings)
        megatron_checkpoint.load(folder, frozen.weight_blocks())
        self._frozen[name] = frozen

    def build_frozen(self, name: str, model: ModelConfig) -> None:
        with on_device():
            frozen = _LocalPolicy(model, self._settings)
        theirs, ours = frozen.vocabulary_size, self._policy.vocabulary_size
        if theirs != ours:
            raise RollError(f"algorithm.teachers: {name} has a vocabulary of {theirs} tokens, the policy one of {ours}")
        self._frozen[name] = frozen

    @property
    def _stored_names(self) -> tuple[str, ...]:
        """Names of the optimizer tensors in a checkpoint. The float32 main weights are stored only beside parameters of
        another dtype."""
        return MOMENTS if self._policy.dtype is torch.float32 else ("main", *MOMENTS)

    def _score(self, built: "_LocalPolicy", micro_batches: Sequence[MicroBatch], read: "ReadScores") -> list[Tensor]:
        """Score micro-batches and return, on all ranks, the tensor that `read` picks from the scores of each."""
        device = self._settings.device

        def finish(model: PolicyModel, part: RowPart, hidden: Tensor, number: int) -> Tensor:
            found = read(lambda reference: built.scoring.score(model, part, reference, hidden), number)
            assert found is not None
            return found

        with on_device():
            return broadcast_from_last_stage(forward(built.chunks, micro_batches, finish, device), micro_batches, device)

    def _reference_states(self, micro_batches: Sequence[MicroBatch]) -> dict[int, ReferenceStates]:
        """Compute the reference's states of each micro-batch, by its number; empty on all pipeline stages but the last."""
        reference = self._frozen[Policy.REFERENCE]

        def finish(model: PolicyModel, part: RowPart, hidden: Tensor, _: int) -> ReferenceStates:
            return reference.scoring.reference(model, part, hidden)

        with on_device():
            return dict(enumerate(forward(reference.chunks, micro_batches, finish, self._settings.device)))

    def _accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFn, references: dict[int, ReferenceStates]) -> None:
        scoring = self._policy.scoring

        def compute_loss(model: PolicyModel, part: RowPart, hidden: Tensor, number: int) -> Tensor:
            scored = scoring.score(model, part, references.get(number), hidden)
            outputs = loss(loss_inputs(part.batch, scored))
            self._record(outputs, len(scored.logprobs_N))
            return outputs.loss

        self._routers.begin_step(micro_batches)
        with on_device():
            forward_backward(self._wrapped, micro_batches, compute_loss, self._settings.device)

    def _record(self, outputs: LossOutputs, num_tokens: int) -> None:
        """Add the loss and the metric sums of a micro-batch to the sums of the optimizer step."""
        recorded = {"loss": outputs.loss, "scored_tokens": torch.tensor(float(num_tokens)), **outputs.metric_sums}
        for name, value in recorded.items():
            self._sums[name] = self._sums[name] + value.detach() if name in self._sums else value.detach()

    def _drain_sums(self) -> Metrics:
        """Return the sums of this optimizer step over all shares, and reset them. Per-token sums become means over the
        scored tokens, if there are any."""
        mine = {name: float(value) for name, value in self._sums.items()} if self._share.is_reporter else {}
        self._sums = {}
        parts: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, mine)
        sums = {name: sum(part[name] for part in parts if part) for name in sorted({n for part in parts for n in part})}
        loss, tokens = sums.pop("loss"), sums.pop("scored_tokens")
        means = {name: value / tokens for name, value in sums.items()} if tokens else {}
        return means | {f"{AREA}/loss": loss}

    def _state_blocks(self, held: OwnedRange, state: dict[str, Tensor]) -> Iterator[Block]:
        """Yield the checkpoint blocks of the optimizer state of an owned range."""
        for shard in self._policy.shards_by_parameter[held.parameter]:
            first = shard.first_row * held.parameter.stride(0)
            start, stop = max(held.start, first), min(held.stop, first + math.prod(shard.slice.shape))
            for name, values in state.items():
                part = values[start - held.start : stop - held.start]
                yield from blocks_of(name, shard.slice, self._policy.names, part, start - first, stop - first)


ReadScores = Callable[[Callable[[ReferenceStates | None], Scored], int], Tensor | None]
"""Function that picks a tensor from the scores of a micro-batch. Its arguments are a function that computes the scores,
given a reference or None, and the number of the micro-batch."""


class _LocalPolicy:
    """One policy on this rank: its model chunks, the shards they hold, and its scoring settings."""

    def __init__(self, model: ModelConfig, settings: MegatronSettings):
        config = model_config(model)
        self.vocabulary_size = int(config.vocab_size)
        self.names = MegatronNames(config)
        self.scoring = Scoring(self.vocabulary_size, settings.temperature, settings.training.logprob_chunk_tokens)
        self.chunks = build_chunks(config, settings.training, settings.device)
        self.shards = shards_of(self.chunks)
        if settings.initial is InitialWeights.MODEL:
            load_shards(self.shards, self.names, _initial_weights(model, settings.seed))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def shards_by_parameter(self) -> dict[nn.Parameter, list[Shard]]:
        found: dict[nn.Parameter, list[Shard]] = {}
        for shard in self.shards:
            found.setdefault(shard.parameter, []).append(shard)
        return found

    def weight_blocks(self, values: dict[nn.Parameter, Tensor] | None = None) -> list[Block]:
        """Checkpoint blocks of the weights, or of the copies in `values`."""
        blocks: list[Block] = []
        for shard in self.shards:
            part = shard.view_of(shard.parameter.data if values is None else values[shard.parameter]).view(-1)
            blocks += blocks_of("weight", shard.slice, self.names, part, 0, len(part))
        return blocks


def _observe_routers(chunks: Sequence[PolicyModel], settings: MegatronSettings) -> Routers:
    """Create the observer that counts the experts' load and replays routing, and attach it to each of the policy's
    routers."""
    config = chunks[0].config
    routers = Routers(settings.training.routing, config.num_layers, config.num_moe_experts or 0, settings.device)
    for router in _routers(chunks):
        router.observer = routers
    return routers


def _routers(chunks: Sequence[PolicyModel]) -> list[ObservedRouter]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, ObservedRouter)]


def _initial_weights(model: ModelConfig, seed: int) -> NamedTensors:
    """Tensors of a pretrained model's folder. For a model from scratch every rank draws all tensors, as the torch backend
    does."""
    match model:
        case PretrainedModel():
            return TensorFiles(Path(model.path))
        case ScratchModel():
            return TensorsInMemory(
                dict(to_checkpoint_names((n, p.detach()) for n, p in build_model(model, seed).named_parameters()))
            )
