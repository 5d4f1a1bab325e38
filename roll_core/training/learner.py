"""All that learns on one trainer rank: the policy, the critic where there is one, and the state of credit.

Knows neither Ray nor a store; every rank gets the same calls with the same trajectories. Shapes: N trained tokens of the
whole iteration, S trajectories, K teachers, D domains.
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
from roll_core.batching.token_data import TokenData, untaught
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

COMPILED_WIDTHS = 64
"""Tokens: attention with a mask takes another way where rows are not a multiple of 8, and tiles are of 64."""
CRITIC_FOLDER, STATE_FILE = "critic", "credit-state.json"


@dataclass(frozen=True)
class PreparedBatch:
    """This rank's share of an iteration, optimizer step by optimizer step, and the state of credit once it is learned."""

    steps: tuple[tuple[MicroBatch, ...], ...]
    next_state: CreditState
    trained_groups: set[int]
    num_samples: int
    num_trained_tokens: int
    metrics: Metrics


class Learner:
    def __init__(self, config: RunConfig, *, rank: int, device: torch.device):
        self._config = config
        self._rank = rank
        self._algorithm = self._fallback = _build(config.algorithm, config)
        if config.fallback_algorithm is not config.algorithm:
            self._fallback = _build(config.fallback_algorithm, config)
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
        return self._config.algorithm.needs_reference

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._policy.weights()

    def imitate(self, demonstrations: Callable[[int], list[Sample]], optimizer: OptimizerConfig, num_steps: int) -> float:
        """Supervised steps, then a fresh optimizer for reinforcement learning; the last loss. A critic starts from here."""
        self._policy.start_optimizer(optimizer, num_steps)
        # Demonstrations share no prompts: rows as short as they can be cost the least attention.
        limits = replace(self._limits(), row_tokens=None, packing=Packing.ROWS)
        metrics: Metrics = {}
        for step in range(num_steps):
            samples = demonstrations(step)
            tokens, chosen = untaught(_trained_tokens(samples)), range(len(samples))
            micro_batches = self._micro_batches(samples, tokens, chosen, _counts(samples), limits)
            self._policy.accumulate(micro_batches, cross_entropy)
            metrics = self._policy.apply_gradients()
        self._policy.start_optimizer(self._config.training.optimizer, self._config.policy_optimizer_steps)
        if self._critic is not None:
            self._critic.adopt(self._policy.weights())
        return metrics["update/loss"]

    def prepare(self, trajectories: Sequence[Trajectory], weights_version: int) -> PreparedBatch:
        """Declared signals, advantages, packing: everything that can be known before the policy moves from this version."""
        batch = build_batch(trajectories)
        if not batch.samples:
            return PreparedBatch((), self._state, set(), num_samples=0, num_trained_tokens=0, metrics=_left_out(batch))
        inputs = self._with_signals(batch)
        credit, next_state = assign_credit(inputs, self._algorithm.credit, self._state)
        tokens = _token_data(inputs, credit, is_fresh_N=batch.weights_version_N == weights_version)
        kept = [number for number, is_kept in enumerate(credit.kept_S.tolist()) if is_kept]
        pulling = set(self._pulling(batch, credit))
        return PreparedBatch(
            steps=tuple(
                self._prepare_step(batch.samples, tokens, step, pulling)
                for step in _split_evenly(kept, self._config.training.optimizer_steps)
            ),
            next_state=next_state,
            trained_groups={batch.groups[number] for number in kept},
            num_samples=len(kept),
            num_trained_tokens=_trained_tokens([batch.samples[number] for number in kept]),
            metrics=credit.metrics | _left_out(batch),
        )

    def update(self, prepared: PreparedBatch, iteration: int) -> Metrics:
        """All optimizer steps of the policy; none while the critic warms up, or where `training.mismatch` stops them."""
        held_back = iteration <= self._config.algorithm.warmup_iterations
        metrics = {"update/held_back": 1.0} if held_back else self._move_policy(prepared, iteration)
        self._state = prepared.next_state
        return metrics

    def update_critic(self, prepared: PreparedBatch, iteration: int) -> Metrics:
        """All optimizer steps of the critic, towards the returns of the prepared batch."""
        self._seed_chance("update_critic", iteration)
        assert self._critic is not None, "this algorithm has no critic"
        assert self._algorithm.value_loss is not None
        per_step: list[Metrics] = []
        for micro_batches in prepared.steps * self._config.training.epochs:
            for micro_batch in micro_batches:
                self._critic.accumulate(micro_batch, self._algorithm.value_loss)
            per_step.append(self._critic.apply_gradients())
        return _mean_over_steps(per_step)

    def offload(self) -> None:
        """Give the device's memory back until `reload`."""
        for trained in self._trained:
            trained.offload()

    def reload(self) -> None:
        for trained in self._trained:
            trained.reload()

    @property
    def _trained(self) -> list[Trainable]:
        return [self._policy, *([self._critic] if self._critic is not None else [])]

    def snapshot(self) -> Snapshot:
        """A copy of everything that learning goes on from, to be written beside what follows."""
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
        self._policy.load(folder)
        if self._critic is not None:
            self._critic.load(folder / CRITIC_FOLDER)
        self._state = CreditState.model_validate_json((folder / STATE_FILE).read_bytes())

    @property
    def controllers(self) -> dict[str, Any]:
        """What credit remembers, as far as it remembers anything."""
        return self._state.model_dump(mode="json", exclude_defaults=True)

    def _move_policy(self, prepared: PreparedBatch, iteration: int) -> Metrics:
        if not prepared.steps:
            return {}
        loss, mismatch = self._accumulate_first(prepared, iteration)
        per_step = [with_effective_sample_size(self._policy.apply_gradients())]
        for micro_batches in (prepared.steps * self._config.training.epochs)[1:]:
            self._accumulate(micro_batches, loss)
            per_step.append(with_effective_sample_size(self._policy.apply_gradients()))
        return _mean_over_steps(per_step) | mismatch

    def _accumulate_first(self, prepared: PreparedBatch, iteration: int) -> tuple[LossFn, Metrics]:
        """The gradients of the first step, by the loss that all steps take once it is known how far sampler and trainer are
        apart. Anchors tell before; without them the step itself does, and is done again if it takes the other loss."""
        meter, usual = MismatchMeter(self._policy.share), self._algorithm.loss
        self._seed_chance("update", iteration)
        if self._knows_anchors:
            for micro_batch in chain(*prepared.steps):
                meter.note_anchors(micro_batch.tokens)
            loss, metrics = self._judge(meter.metrics(), iteration)
        else:
            self._accumulate(prepared.steps[0], meter.noting(usual))
            loss, metrics = self._judge(meter.metrics(), iteration)
            if loss is usual:
                return loss, metrics
            self._policy.discard_gradients()
            self._seed_chance("update", iteration)
        self._accumulate(prepared.steps[0], loss)
        return loss, metrics

    def _judge(self, metrics: Metrics, iteration: int) -> tuple[LossFn, Metrics]:
        """The loss for an iteration with this mismatch; the same on every rank, since the metrics are."""
        limits = self._config.training.mismatch
        if limits is None or not metrics[f"{MISMATCH}fresh_tokens"]:
            return self._algorithm.loss, metrics
        complaint = limits.complaint(metrics)
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
    def _knows_anchors(self) -> bool:
        """Whether all tokens are scored before the update; else the first optimizer step is the first to score any."""
        return Signal.ANCHOR in self._fallback.signals

    def _seed_chance(self, stage: str, iteration: int) -> None:
        """Layers that draw (dropout) draw the same when an update is made again, by whichever process."""
        torch.manual_seed(derive_seed(self._config.seed, stage, iteration, self._rank))

    def load_frozen(self, name: str, folder: Path) -> None:
        self._policy.load_frozen(name, folder)

    def build_teachers(self) -> None:
        """Those that are models of their own; those that are runs are loaded with `load_frozen`."""
        if isinstance(self._config.algorithm, Distillation):
            for number, teacher in enumerate(self._config.algorithm.teachers):
                if teacher.kind == "pretrained":
                    self._policy.build_frozen(teacher_name(number), teacher.model)

    def _with_signals(self, batch: GradedBatch) -> CreditInputs:
        """What credit needs to know of the tokens, computed by all ranks together, each for its share."""
        signals, inputs = self._algorithm.credit_signals, batch.credit
        if not signals:
            return inputs
        num_tokens, num_samples = len(inputs.outcomes.sequence_N), len(batch.samples)
        counts = GlobalCounts(num_tokens, num_samples)
        limits, everyone = self._limits(), range(num_samples)
        shares = self._micro_batches(batch.samples, untaught(num_tokens), everyone, counts, limits)
        outcomes = inputs.outcomes
        if Signal.VALUES in signals:
            assert self._critic is not None
            found = [self._critic.values(share) for share in shares]
            outcomes = replace(
                outcomes,
                values_N=self._gather(num_tokens, [s.place_N for s in shares], [v.values_N for v in found]),
                final_values_S=self._gather(num_samples, [s.sample_S for s in shares], [v.final_values_S for v in found]),
            )
        if Signal.TEACHER in signals:
            outcomes = replace(outcomes, **self._taught(shares, inputs))

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
        places = [share.place_N for share in shares]
        asked: dict[str, Any] = {
            names[signal]: self._gather(num_tokens, places, score()) for signal, score in scores.items() if signal in signals
        }
        return replace(inputs, outcomes=outcomes, **asked)

    def _taught(self, shares: list[MicroBatch], inputs: CreditInputs) -> dict[str, Tensor]:
        """Logprobs of every teacher, and how much each counts: nothing outside its domains."""
        assert isinstance(self._config.algorithm, Distillation)
        teachers, sequence_N = self._config.algorithm.teachers, inputs.outcomes.sequence_N
        places = [share.place_N for share in shares]
        logprobs = [
            self._gather(len(sequence_N), places, self._policy.logprobs(shares, teacher_name(k)))
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

    def _pulling(self, batch: GradedBatch, credit: Credit) -> Sequence[int]:
        """Samples that have a gradient: all of them, unless zero advantages are known to have none."""
        if not self._algorithm.skips_zero_advantages or self._config.training.routing.has_losses:
            return range(len(batch.samples))
        sequence_N = batch.credit.outcomes.sequence_N
        return torch.unique(sequence_N[credit.advantages_N != 0]).tolist()

    def _prepare_step(
        self, samples: Sequence[Sample], tokens: TokenData, step: list[int], pulling: set[int]
    ) -> tuple[MicroBatch, ...]:
        """Samples without a gradient still count in the denominators."""
        counts = _counts([samples[number] for number in step])
        chosen = [number for number in step if number in pulling]
        micro_batches = self._micro_batches(samples, tokens, chosen, counts, self._limits())
        return tuple(self._with_loss_signals(micro_batches, tokens))

    def _with_loss_signals(self, micro_batches: list[MicroBatch], tokens: TokenData) -> list[MicroBatch]:
        signals = self._fallback.loss_signals
        if Signal.ANCHOR in signals and tokens.anchor_logprobs_N is None:
            found = self._policy.logprobs(micro_batches, Policy.CURRENT)
            micro_batches = [m.with_signals(anchor_logprobs_N=each) for m, each in zip(micro_batches, found, strict=True)]
        if Signal.REFERENCE in signals and tokens.reference_logprobs_N is None:
            found = self._policy.logprobs(micro_batches, Policy.REFERENCE)
            micro_batches = [m.with_signals(reference_logprobs_N=each) for m, each in zip(micro_batches, found, strict=True)]
        return micro_batches

    def _gather(self, size: int, places: list[Tensor], parts: list[Tensor]) -> Tensor:
        """Values at their places in the batch, from all ranks: every place is in some rank's share."""
        values = torch.zeros(size, dtype=torch.float64)
        if self._policy.share.speaks:
            for place, part in zip(places, parts, strict=True):
                values[place] = part.double()
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

    def _limits(self) -> PackingLimits:
        training = self._config.training
        return PackingLimits(
            training.micro_batch_tokens,
            training.row_tokens,
            training.packing,
            width_multiple=COMPILED_WIDTHS if training.compile else self._policy.share.row_multiple,
        )


def _build(algorithm: AlgorithmConfig, config: RunConfig) -> Algorithm:
    steps, max_new_tokens = config.training.steps_per_iteration, config.rollout.max_new_tokens
    return build_algorithm(algorithm, num_optimizer_steps=steps, max_new_tokens=max_new_tokens)


def _build_policy(config: RunConfig, settings: TorchSettings) -> TrainingBackend:
    if config.training.backend is BackendKind.TORCH:
        return TorchBackend(config.model, settings)
    from roll_core.training.megatron.backend import MegatronBackend, MegatronSettings  # ten seconds, for those who need it

    training, seed, temperature = config.training, config.seed, config.rollout.temperature
    return MegatronBackend(config.model, MegatronSettings(training, seed, temperature, settings.device))


def teacher_name(number: int) -> str:
    return f"teacher {number}"


def _left_out(batch: GradedBatch) -> Metrics:
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
    """Consecutive parts whose sizes differ by at most one; whole groups stay together while none of them is left out."""
    bounds = [len(numbers) * part // parts for part in range(parts + 1)]
    return [numbers[start:end] for start, end in pairwise(bounds) if end > start]
