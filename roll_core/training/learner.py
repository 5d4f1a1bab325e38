"""Learner of one trainer rank: the policy, the critic if the algorithm has one, and the state of credit assignment. It knows
neither Ray nor a store; `roles/trainer_rank.py` calls it. Every rank gets the same calls with the same trajectories.

Shapes: N trained tokens of the whole iteration, S trajectories, K teachers, D domains.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from roll_core.algorithms.catalog import Algorithm, build_algorithm
from roll_core.algorithms.corrections import with_effective_sample_size
from roll_core.algorithms.credit import Credit, CreditInputs, CreditState, assign_credit
from roll_core.algorithms.inputs import LossFn
from roll_core.algorithms.losses import cross_entropy
from roll_core.batching.micro_batch import GlobalCounts, MicroBatch, build_micro_batches
from roll_core.batching.packing import PackingLimits
from roll_core.batching.samples import GradedBatch, build_batch
from roll_core.batching.token_data import TokenData, blank_token_data
from roll_core.config.algorithm.methods import AlgorithmConfig, Distillation
from roll_core.config.algorithm.policy_update import Signal
from roll_core.config.optimizer import OptimizerConfig
from roll_core.config.run import RunConfig
from roll_core.config.training.mismatch import MISMATCH, MismatchAction
from roll_core.config.training.training import BackendKind, Packing
from roll_core.errors import SamplerMismatch
from roll_core.seeds import derive_seed
from roll_core.training.base import CriticBackend, Policy, Snapshot, Trainable, TrainingBackend
from roll_core.training.mismatch import MismatchMeter
from roll_core.training.torch.backend import TorchBackend
from roll_core.training.torch.critic import TorchCritic
from roll_core.training.torch.trainable import TorchSettings
from roll_core.types.manifest import Metrics
from roll_core.types.sample import Sample
from roll_core.types.trajectory import Trajectory
from roll_core.weights.ranks import reduce_over_ranks

COMPILED_WIDTH_MULTIPLE = 64
"""Tokens; with compiled layers row widths are multiples of this. Masked attention takes another code path where rows are not
a multiple of 8, and its tiles are 64 tokens wide."""
CRITIC_FOLDER, STATE_FILE = "critic", "credit-state.json"
"""Critic's subfolder and file of the credit state, within a checkpoint folder."""


@dataclass(frozen=True)
class PreparedBatch:
    """Micro-batches of this rank for one iteration, a tuple for each optimizer step, and the credit state after the update.
    The counts and groups are those of the whole iteration, over all ranks."""

    steps: tuple[tuple[MicroBatch, ...], ...]
    next_state: CreditState
    trained_groups: set[int]
    num_samples: int
    num_trained_tokens: int
    metrics: Metrics


class Learner:
    """Policy, critic and credit state of one trainer rank."""

    def __init__(self, config: RunConfig, *, rank: int, device: torch.device):
        self._config = config
        self._rank = rank
        self._algorithm = self._fallback = _build_algorithm(config.algorithm, config)
        if config.fallback_algorithm is not config.algorithm:
            self._fallback = _build_algorithm(config.fallback_algorithm, config)
        settings = TorchSettings(config.training, config.seed, config.rollout.temperature, device)
        self._policy = _build_policy(config, settings)
        self._policy.start_optimizer(config.training.optimizer, config.policy_optimizer_steps)
        self._critic: CriticBackend | None = None
        if config.algorithm.value_model is not None:
            self._critic = TorchCritic(config.model, settings)
            self._critic.start_optimizer(config.algorithm.value_model.optimizer, config.total_optimizer_steps)
        self._state = CreditState()

    @property
    def needs_reference(self) -> bool:
        """True if the algorithm compares the policy with a frozen reference."""
        return self._config.algorithm.needs_reference

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's full tensors by Hugging Face name. Every rank must iterate."""
        return self._policy.weights()

    def imitate(self, demonstrations: Callable[[int], list[Sample]], optimizer: OptimizerConfig, num_steps: int) -> float:
        """Take `num_steps` supervised steps, then start a fresh optimizer for reinforcement learning. A critic starts from
        the resulting weights. `demonstrations` returns the samples of a step, by its number. Return the last loss."""
        self._policy.start_optimizer(optimizer, num_steps)
        # Demonstrations share no prompts: the shortest possible rows cost the least attention.
        limits = replace(self._packing_limits(), row_tokens=None, packing=Packing.ROWS)
        metrics: Metrics = {}
        for step in range(num_steps):
            samples = demonstrations(step)
            tokens, chosen = blank_token_data(_trained_tokens(samples)), range(len(samples))
            micro_batches = self._micro_batches(samples, tokens, chosen, _counts(samples), limits)
            self._policy.accumulate(micro_batches, cross_entropy)
            metrics = self._policy.apply_gradients()
        self._policy.start_optimizer(self._config.training.optimizer, self._config.policy_optimizer_steps)
        if self._critic is not None:
            self._critic.adopt(self._policy.weights())
        return metrics["update/loss"]

    def prepare(self, trajectories: Sequence[Trajectory], weights_version: int) -> PreparedBatch:
        """Build the batch of an iteration before the policy changes: compute the declared signals, assign credit, pack
        micro-batches. `weights_version` is the policy's version; tokens sampled by it are fresh."""
        batch = build_batch(trajectories)
        if not batch.samples:
            return PreparedBatch(
                (), self._state, set(), num_samples=0, num_trained_tokens=0, metrics=_left_out_metrics(batch)
            )
        inputs = self._with_signals(batch)
        credit, next_state = assign_credit(inputs, self._algorithm.credit, self._state)
        tokens = _token_data(inputs, credit, is_fresh_N=batch.weights_version_N == weights_version)
        kept = [number for number, is_kept in enumerate(credit.kept_S.tolist()) if is_kept]
        with_gradient = set(self._with_gradient(batch, credit))
        return PreparedBatch(
            steps=tuple(
                self._prepare_step(batch.samples, tokens, step, with_gradient)
                for step in _split_evenly(kept, self._config.training.optimizer_steps)
            ),
            next_state=next_state,
            trained_groups={batch.groups[number] for number in kept},
            num_samples=len(kept),
            num_trained_tokens=_trained_tokens([batch.samples[number] for number in kept]),
            metrics=credit.metrics | _left_out_metrics(batch),
        )

    def update(self, prepared: PreparedBatch, iteration: int) -> Metrics:
        """Take all optimizer steps of the policy and advance the credit state. The policy is held back while the critic
        warms up. Raise `SamplerMismatch` if `training.mismatch` stops the update."""
        held_back = iteration <= self._config.algorithm.warmup_iterations
        metrics = {"update/held_back": 1.0} if held_back else self._update_policy(prepared, iteration)
        self._state = prepared.next_state
        return metrics

    def update_critic(self, prepared: PreparedBatch, iteration: int) -> Metrics:
        """Take all optimizer steps of the critic, towards the returns of the prepared batch."""
        self._seed_dropout("update_critic", iteration)
        assert self._critic is not None, "this algorithm has no critic"
        assert self._algorithm.value_loss is not None
        per_step: list[Metrics] = []
        for micro_batches in prepared.steps * self._config.training.epochs:
            for micro_batch in micro_batches:
                self._critic.accumulate(micro_batch, self._algorithm.value_loss)
            per_step.append(self._critic.apply_gradients())
        return _mean_over_steps(per_step)

    def offload(self) -> None:
        """Move policy and critic to host memory and free the device memory until `reload`."""
        for trainable in self._trainables:
            trainable.offload()

    def reload(self) -> None:
        """Move policy and critic back to the device."""
        for trainable in self._trainables:
            trainable.reload()

    @property
    def _trainables(self) -> list[Trainable]:
        return [self._policy, *([self._critic] if self._critic is not None else [])]

    def snapshot(self) -> Snapshot:
        """Copy policy, critic and credit state to host memory. The returned function writes the copy while training
        continues."""
        policy, state = self._policy.snapshot(), self._state
        critic = self._critic.snapshot() if self._critic is not None else None

        def write(folder: Path) -> list[Path]:
            files = policy(folder)
            if critic is not None:
                files += critic(folder / CRITIC_FOLDER)
            if self._rank == 0:
                (folder / STATE_FILE).write_text(state.model_dump_json())
                files.append(folder / STATE_FILE)
            return files

        return write

    def load(self, folder: Path) -> None:
        """Restore policy, critic and credit state from a checkpoint folder."""
        self._policy.load(folder)
        if self._critic is not None:
            self._critic.load(folder / CRITIC_FOLDER)
        self._state = CreditState.model_validate_json((folder / STATE_FILE).read_bytes())

    @property
    def controllers(self) -> dict[str, Any]:
        """Credit state as JSON, without the fields that have their default value."""
        return self._state.model_dump(mode="json", exclude_defaults=True)

    def _update_policy(self, prepared: PreparedBatch, iteration: int) -> Metrics:
        if not prepared.steps:
            return {}
        loss, mismatch = self._accumulate_first_step(prepared, iteration)
        per_step = [with_effective_sample_size(self._policy.apply_gradients())]
        for micro_batches in (prepared.steps * self._config.training.epochs)[1:]:
            self._accumulate(micro_batches, loss)
            per_step.append(with_effective_sample_size(self._policy.apply_gradients()))
        return _mean_over_steps(per_step) | mismatch

    def _accumulate_first_step(self, prepared: PreparedBatch, iteration: int) -> tuple[LossFn, Metrics]:
        """Accumulate the gradients of the first optimizer step. Return the loss for all steps, which depends on the
        mismatch, and the mismatch metrics. With anchor logprobs the mismatch is known beforehand. Without them the first
        step measures it, and is repeated if the fallback loss is chosen."""
        meter, default_loss = MismatchMeter(self._policy.share), self._algorithm.loss
        self._seed_dropout("update", iteration)
        if self._has_anchor_logprobs:
            for micro_batch in chain(*prepared.steps):
                meter.record_anchors(micro_batch.tokens)
            loss, metrics = self._choose_loss(meter.metrics(), iteration)
        else:
            self._accumulate(prepared.steps[0], meter.recording(default_loss))
            loss, metrics = self._choose_loss(meter.metrics(), iteration)
            if loss is default_loss:
                return loss, metrics
            self._policy.discard_gradients()
            self._seed_dropout("update", iteration)
        self._accumulate(prepared.steps[0], loss)
        return loss, metrics

    def _choose_loss(self, metrics: Metrics, iteration: int) -> tuple[LossFn, Metrics]:
        """Return the loss for an iteration with this mismatch, and its metrics. All ranks choose the same loss, since their
        metrics are the same. Raise `SamplerMismatch` if limits are exceeded and `training.mismatch.action` is stop."""
        limits = self._config.training.mismatch
        if limits is None or not metrics[f"{MISMATCH}fresh_tokens"]:
            return self._algorithm.loss, metrics
        complaint = limits.exceeded_limit(metrics)
        if complaint is not None and limits.action is MismatchAction.STOP:
            self._policy.discard_gradients()
            raise SamplerMismatch(f"iteration {iteration} was not trained on: {complaint}")
        algorithm = self._algorithm if complaint is None else self._fallback
        return algorithm.loss, metrics | {f"{MISMATCH}beyond": float(complaint is not None)}

    def _accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFn) -> None:
        if self._algorithm.full_kl_loss:
            self._policy.accumulate_beside_reference(micro_batches, loss)
        else:
            self._policy.accumulate(micro_batches, loss)

    @property
    def _has_anchor_logprobs(self) -> bool:
        """True if all tokens are scored before the update. Otherwise the first optimizer step is the first to score any."""
        return Signal.ANCHOR in self._fallback.signals

    def _seed_dropout(self, stage: str, iteration: int) -> None:
        """Seed torch from run seed, stage, iteration and rank, so that a repeated update draws the same dropout in any
        process."""
        torch.manual_seed(derive_seed(self._config.seed, stage, iteration, self._rank))

    def load_frozen(self, name: str, folder: Path) -> None:
        """Load a checkpoint folder as the frozen policy `name`: the reference, or a teacher that is a run."""
        self._policy.load_frozen(name, folder)

    def build_teachers(self) -> None:
        """Build the teachers that are pretrained models. Teachers that are runs are loaded with `load_frozen`."""
        if isinstance(self._config.algorithm, Distillation):
            for number, teacher in enumerate(self._config.algorithm.teachers):
                if teacher.kind == "pretrained":
                    self._policy.build_frozen(teacher_name(number), teacher.model)

    def _with_signals(self, batch: GradedBatch) -> CreditInputs:
        """Compute the signals that credit needs. Each rank scores its share of the tokens, and all ranks get all values."""
        signals, inputs = self._algorithm.credit_signals, batch.credit
        if not signals:
            return inputs
        num_tokens, num_samples = len(inputs.outcomes.sequence_N), len(batch.samples)
        counts = GlobalCounts(num_tokens, num_samples)
        limits, all_samples = self._packing_limits(), range(num_samples)
        shares = self._micro_batches(batch.samples, blank_token_data(num_tokens), all_samples, counts, limits)
        outcomes = inputs.outcomes
        if Signal.VALUES in signals:
            assert self._critic is not None
            found = [self._critic.values(share) for share in shares]
            outcomes = replace(
                outcomes,
                values_N=self._gather(num_tokens, [s.token_index_N for s in shares], [v.values_N for v in found]),
                final_values_S=self._gather(num_samples, [s.sample_S for s in shares], [v.final_values_S for v in found]),
            )
        if Signal.TEACHER in signals:
            outcomes = replace(outcomes, **self._teacher_logprobs(shares, inputs))

        scores: dict[Signal, Callable[[], list[Tensor]]] = {
            Signal.ANCHOR: lambda: self._policy.logprobs(shares, Policy.CURRENT),
            Signal.REFERENCE: lambda: self._policy.logprobs(shares, Policy.REFERENCE),
            Signal.DIVERGENCE: lambda: self._policy.divergences(shares),
        }
        names = {
            Signal.ANCHOR: "anchor_logprobs_N",
            Signal.REFERENCE: "reference_logprobs_N",
            Signal.DIVERGENCE: "divergences_N",
        }
        indices = [share.token_index_N for share in shares]
        asked: dict[str, Any] = {
            names[signal]: self._gather(num_tokens, indices, score())
            for signal, score in scores.items()
            if signal in signals
        }
        return replace(inputs, outcomes=outcomes, **asked)

    def _teacher_logprobs(self, shares: list[MicroBatch], inputs: CreditInputs) -> dict[str, Tensor]:
        """Return every teacher's logprobs and weights for every token. A teacher has no weight outside its domains."""
        assert isinstance(self._config.algorithm, Distillation)
        teachers, sequence_N = self._config.algorithm.teachers, inputs.outcomes.sequence_N
        indices = [share.token_index_N for share in shares]
        logprobs = [
            self._gather(len(sequence_N), indices, self._policy.logprobs(shares, teacher_name(k)))
            for k in range(len(teachers))
        ]
        weights_KD = torch.tensor(
            [[t.weight * (not t.domains or domain in t.domains) for domain in inputs.domains] for t in teachers],
            dtype=torch.float64,
        )
        return {
            "teacher_logprobs_KN": torch.stack(logprobs),
            "teacher_weights_KN": weights_KD[:, inputs.domain_S][:, sequence_N],
        }

    def _with_gradient(self, batch: GradedBatch, credit: Credit) -> Sequence[int]:
        """Indices of the samples that have a gradient: all samples, unless zero advantages are known to give no gradient."""
        if not self._algorithm.skips_zero_advantages or self._config.training.routing.has_losses:
            return range(len(batch.samples))
        sequence_N = batch.credit.outcomes.sequence_N
        return torch.unique(sequence_N[credit.advantages_N != 0]).tolist()

    def _prepare_step(
        self, samples: Sequence[Sample], tokens: TokenData, step: list[int], with_gradient: set[int]
    ) -> tuple[MicroBatch, ...]:
        """Pack the samples of an optimizer step that have a gradient. The other samples still count in the denominators."""
        counts = _counts([samples[number] for number in step])
        chosen = [number for number in step if number in with_gradient]
        micro_batches = self._micro_batches(samples, tokens, chosen, counts, self._packing_limits())
        return tuple(self._with_loss_signals(micro_batches, tokens))

    def _with_loss_signals(self, micro_batches: list[MicroBatch], tokens: TokenData) -> list[MicroBatch]:
        """Add the anchor and reference logprobs that the loss needs, unless credit needed them already."""
        signals = self._fallback.loss_signals
        if Signal.ANCHOR in signals and tokens.anchor_logprobs_N is None:
            found = self._policy.logprobs(micro_batches, Policy.CURRENT)
            micro_batches = [m.with_signals(anchor_logprobs_N=each) for m, each in zip(micro_batches, found, strict=True)]
        if Signal.REFERENCE in signals and tokens.reference_logprobs_N is None:
            found = self._policy.logprobs(micro_batches, Policy.REFERENCE)
            micro_batches = [m.with_signals(reference_logprobs_N=each) for m, each in zip(micro_batches, found, strict=True)]
        return micro_batches

    def _gather(self, size: int, indices: list[Tensor], parts: list[Tensor]) -> Tensor:
        """Assemble values of the whole batch from the shares of all ranks. `indices` are the positions of `parts` in the
        batch; every position is in some rank's share."""
        values = torch.zeros(size, dtype=torch.float64)
        if self._policy.share.is_reporter:
            for index, part in zip(indices, parts, strict=True):
                values[index] = part.double()
        return reduce_over_ranks(values)

    def _micro_batches(
        self,
        samples: Sequence[Sample],
        tokens: TokenData,
        chosen: Sequence[int],
        counts: GlobalCounts,
        limits: PackingLimits,
    ) -> list[MicroBatch]:
        share = self._policy.share
        return build_micro_batches(
            samples, tokens, chosen=chosen, counts=counts, rank=share.index, num_ranks=share.count, limits=limits
        )

    def _packing_limits(self) -> PackingLimits:
        training = self._config.training
        return PackingLimits(
            training.micro_batch_tokens,
            training.row_tokens,
            training.packing,
            width_multiple=COMPILED_WIDTH_MULTIPLE if training.compile else self._policy.share.row_multiple,
        )


def _build_algorithm(algorithm: AlgorithmConfig, config: RunConfig) -> Algorithm:
    steps, max_new_tokens = config.training.steps_per_iteration, config.rollout.max_new_tokens
    return build_algorithm(algorithm, num_optimizer_steps=steps, max_new_tokens=max_new_tokens)


def _build_policy(config: RunConfig, settings: TorchSettings) -> TrainingBackend:
    if config.training.backend is BackendKind.TORCH:
        return TorchBackend(config.model, settings)
    from roll_core.training.megatron.backend import MegatronBackend, MegatronSettings  # takes ten seconds

    training, seed, temperature = config.training, config.seed, config.rollout.temperature
    return MegatronBackend(config.model, MegatronSettings(training, seed, temperature, settings.device))


def teacher_name(number: int) -> str:
    """Name of the frozen policy of a teacher, by its position in `algorithm.teachers`."""
    return f"teacher {number}"


def _left_out_metrics(batch: GradedBatch) -> Metrics:
    return {"sample/without_baseline": float(batch.num_without_baseline)} if batch.num_without_baseline else {}


def _token_data(inputs: CreditInputs, credit: Credit, is_fresh_N: Tensor) -> TokenData:
    outcomes = inputs.outcomes
    assert outcomes.sampler_logprobs_N is not None
    optional = {
        "anchor_logprobs_N": inputs.anchor_logprobs_N,
        "reference_logprobs_N": inputs.reference_logprobs_N,
        "values_N": outcomes.values_N,
        "returns_N": credit.returns_N,
    }
    return TokenData(
        sampler_logprobs_N=outcomes.sampler_logprobs_N.float(),
        turn_N=outcomes.turn_N,
        advantages_N=credit.advantages_N.float(),
        weights_N=credit.weights_S[outcomes.sequence_N].float(),
        is_fresh_N=is_fresh_N,
        **{name: tensor.float() for name, tensor in optional.items() if tensor is not None},
    )


def _counts(samples: Sequence[Sample]) -> GlobalCounts:
    return GlobalCounts(float(_trained_tokens(samples)), float(len(samples)))


def _trained_tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.num_trained_tokens for sample in samples)


def _mean_over_steps(per_step: list[Metrics]) -> Metrics:
    names = dict.fromkeys(name for metrics in per_step for name in metrics)
    return {name: mean(metrics[name] for metrics in per_step if name in metrics) for name in names}


def _split_evenly(numbers: list[int], parts: int) -> list[list[int]]:
    """Split into consecutive parts whose sizes differ by at most one; drop empty parts. Whole groups stay together as long
    as no sample of the batch is left out."""
    bounds = [len(numbers) * part // parts for part in range(parts + 1)]
    return [numbers[start:end] for start, end in pairwise(bounds) if end > start]
