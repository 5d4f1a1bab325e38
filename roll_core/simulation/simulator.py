"""Simulator: predicts how fast a config would run. It runs the real rollout scheduler in virtual time, with modelled
engines, graders and trainer, so the scheduling policy in the prediction is the real one. `roll simulate` uses it."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from math import ceil

from roll_core.config.load import override_config
from roll_core.config.rollout import GroupFilter
from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.reporting.activity import TRAINING, stage_spans
from roll_core.reporting.stage_log import Edge, StageEvent
from roll_core.rollout.scheduler import RolloutScheduler
from roll_core.simulation.machines import (
    USEFUL,
    DemandBook,
    EngineModel,
    GraderModel,
    NumberedProblems,
    NumberRenderer,
    SimulatedEngine,
    SimulatedGrader,
    TrainerModel,
)
from roll_core.simulation.virtual_time import run_in_virtual_time
from roll_core.simulation.workload import Workload
from roll_core.types.manifest import CollectRequest
from roll_core.types.trace import AttemptTrace, Fate

DEADLINE_S = 1e9
"""Virtual seconds after which a collect is taken to be stuck; virtual time costs nothing."""
ASYNC_RATIOS = (0, 1, 2, 4)
"""Values of `rollout.async_ratio` that `recommend` tries."""
REDUNDANCIES = (0.0, 0.1, 0.25)
"""Values of `rollout.redundant_groups` that `recommend` tries, as shares of `rollout.num_groups`."""
TRAINER_SHARES = (1 / 4, 1 / 2, 3 / 4)
"""Shares of the devices that `recommend` gives to the trainer, if trainer and engines do not share devices."""


@dataclass(frozen=True)
class MachineModels:
    """Speed models of the machines of a simulation."""

    engine: EngineModel
    grader: GraderModel
    trainer: TrainerModel


@dataclass(frozen=True)
class Prediction:
    """Predicted speed of a config."""

    iteration_seconds: tuple[float, ...]
    """Virtual seconds of each iteration."""
    periodic_seconds: tuple[float, ...]
    """Seconds of evaluation and checkpoint within each iteration; 0 where neither was due."""
    mean_periodic_seconds: float
    """Seconds of evaluation and checkpoint per iteration, averaged over their intervals."""
    trainer_busy: float
    """Share of time in which the trainer computes."""
    engines_busy: float
    """Share of time in which an engine runs at least one attempt, mean over engines."""
    mean_running: float
    """Mean number of running attempts per engine."""
    staleness_mean: float
    """Mean age of the oldest token of each trained attempt, in weights versions."""
    staleness_max: int
    wasted_share: float
    """Share of generated tokens that were not trained on."""
    stages: tuple[StageEvent, ...] = field(repr=False)
    traces: tuple[AttemptTrace, ...] = field(repr=False)

    @property
    def seconds_per_iteration(self) -> float:
        """Mean seconds per iteration. The first is left out if there are more, because nothing was generated ahead of it.

        Evaluations and checkpoints count with their average per iteration, so that a short simulation predicts a long run.
        """
        between = [
            seconds - periodic for seconds, periodic in zip(self.iteration_seconds, self.periodic_seconds, strict=True)
        ]
        counted = between[1:] or between
        return sum(counted) / len(counted) + self.mean_periodic_seconds

    @property
    def bubble(self) -> float:
        """Share of time in which the trainer waits."""
        return 1.0 - self.trainer_busy


def simulate(config: RunConfig, models: MachineModels, workload: Workload, num_iterations: int) -> Prediction:
    """Simulate `num_iterations` iterations. The config gives the numbers of engines, slots, graders and devices."""
    return run_in_virtual_time(_Simulation(config, models, workload).run(num_iterations))


class _Simulation:
    """One simulated leg."""

    def __init__(self, config: RunConfig, models: MachineModels, workload: Workload):
        self._config = config
        self._models = models
        self._workload = workload
        self._stages: list[StageEvent] = []
        self._periodic: list[float] = []
        self._traces: list[list[AttemptTrace]] = []

    async def run(self, num_iterations: int) -> Prediction:
        config, placement = self._config, self._config.placement
        demands = DemandBook(self._workload)
        engines = [
            SimulatedEngine(f"engine {number}", self._models.engine, config.rollout.slots_per_engine, demands)
            for number in range(len(config.engine_devices))
        ]
        scheduler = RolloutScheduler(
            _with_modelled_filter(config).rollout,
            num_iterations=max(num_iterations, config.iterations),
            seed=config.seed,
            max_positions=config.model.max_positions,
            source=NumberedProblems(),
            renderer=NumberRenderer(),
            engines=engines,
            graders=[
                SimulatedGrader(f"grader {number}", self._models.grader, self._workload)
                for number in range(placement.reward_workers)
            ],
            greedy_baseline=config.algorithm.samples_greedily,
        )
        seconds = []
        first_problem = 0
        for iteration in range(1, num_iterations + 1):
            began_at = _now()
            first_problem = await self._iterate(scheduler, engines, iteration, first_problem)
            seconds.append(_now() - began_at)
        await scheduler.close()
        return self._prediction(seconds, engines)

    async def _iterate(
        self, scheduler: RolloutScheduler, engines: Sequence[SimulatedEngine], iteration: int, first_problem: int
    ) -> int:
        """Simulate one iteration from collect to commit; return the first problem of the next one."""
        config, trainer = self._config, self._models.trainer
        sharing = [
            engine.name
            for engine, devices in zip(engines, config.engine_devices, strict=True)
            if config.placement.shared.intersection(devices)
        ]
        request = CollectRequest(
            iteration=iteration,
            parent="",
            weights_version=iteration - 1,
            first_problem=first_problem,
            num_groups=config.rollout.num_groups,
        )
        with self._stage(f"collect {iteration}"):
            rollout = await scheduler.collect(request, DEADLINE_S)
        self._traces.append(_in_loop_time(rollout.trace))
        num_tokens = sum(trace.num_tokens for trace in rollout.trace if trace.fate is Fate.TRAINED)
        share = trainer.num_devices / len(config.placement.trainer)
        if sharing:
            await scheduler.pause(sharing)
        with self._stage(f"prepare {iteration}"):
            await asyncio.sleep(trainer.prepare.seconds_for(num_tokens) * share)
        with self._stage(f"update {iteration}"):
            await asyncio.sleep(trainer.update.seconds_for(num_tokens) * share)
        with self._stage(f"publish {iteration}"):
            adoptions = (engine.adopt(iteration, config.rollout.in_flight, trainer.publish_seconds) for engine in engines)
            await asyncio.gather(*adoptions)
            if sharing:
                scheduler.resume(sharing)
            scheduler.adopted(iteration)
        periodic = 0.0
        for stage, every, lasts in (
            ("evaluate", config.evaluation.every, trainer.evaluate_seconds),
            ("checkpoint", config.checkpoint.every, trainer.checkpoint_seconds),
        ):
            if iteration % every == 0 and lasts:
                periodic += lasts
                with self._stage(f"{stage} {iteration}"):
                    await asyncio.sleep(lasts)
        self._periodic.append(periodic)
        with self._stage(f"commit {iteration}"):
            await asyncio.sleep(trainer.other_seconds)
        return rollout.draws.next

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Context manager that records the begin and end of a stage."""
        self._record(name, Edge.BEGIN)
        yield
        self._record(name, Edge.END)

    def _record(self, name: str, edge: Edge) -> None:
        self._stages.append(StageEvent(name=name, edge=edge, at=datetime.fromtimestamp(_now(), UTC)))

    def _prediction(self, seconds: Sequence[float], engines: Sequence[SimulatedEngine]) -> Prediction:
        total = sum(seconds)
        training = sum(span.end - span.begin for span in stage_spans(self._stages) if span.stage in TRAINING)
        traces = [trace for traces in self._traces for trace in traces]
        staleness = [
            version - trace.oldest_version
            for version, traces in enumerate(self._traces)
            for trace in traces
            if trace.fate is Fate.TRAINED and trace.oldest_version is not None
        ]
        tokens = sum(trace.num_tokens for trace in traces)
        wasted = sum(trace.num_tokens for trace in traces if trace.fate is not Fate.TRAINED)
        trainer, config = self._models.trainer, self._config
        shares = (trainer.evaluate_seconds / config.evaluation.every, trainer.checkpoint_seconds / config.checkpoint.every)
        return Prediction(
            iteration_seconds=tuple(seconds),
            periodic_seconds=tuple(self._periodic),
            mean_periodic_seconds=sum(shares),
            trainer_busy=training / total,
            engines_busy=sum(engine.busy_seconds for engine in engines) / total / len(engines),
            mean_running=sum(engine.running_seconds for engine in engines) / total / len(engines),
            staleness_mean=sum(staleness) / max(1, len(staleness)),
            staleness_max=max(staleness, default=0),
            wasted_share=wasted / max(1, tokens),
            stages=tuple(self._stages),
            traces=tuple(traces),
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _with_modelled_filter(config: RunConfig) -> RunConfig:
    """Replace the filter of a config by one that drops the groups the workload calls useless; rewards are not modelled."""
    if config.rollout.filter is None:
        return config
    rollout = config.rollout.model_copy(update={"filter": GroupFilter(min_mean=USEFUL)})
    return config.model_copy(update={"rollout": rollout})


def _in_loop_time(traces: Sequence[AttemptTrace]) -> list[AttemptTrace]:
    """Shift the traces of a batch from seconds since 1970 to event-loop time, such that the batch is consumed now."""
    shift = _now() - traces[0].consumed_at
    if not shift:
        return list(traces)
    return [
        replace(
            trace,
            drawn_at=trace.drawn_at + shift,
            spans=tuple(replace(span, begin=span.begin + shift, end=span.end + shift) for span in trace.spans),
            grading_at=None if trace.grading_at is None else trace.grading_at + shift,
            graded_at=None if trace.graded_at is None else trace.graded_at + shift,
            consumed_at=trace.consumed_at + shift,
        )
        for trace in traces
    ]


# -------------------------------------------------------------------------------------------------- other settings
@dataclass(frozen=True)
class Candidate:
    """Settings that were tried, with their prediction.

    Example: Candidate(overrides=("placement.trainer=0-3", "placement.engines=4-7"), prediction=Prediction(...))
    """

    overrides: tuple[str, ...]
    """Arguments for `--set`."""
    prediction: Prediction


def recommend(config: RunConfig, models: MachineModels, workload: Workload, num_iterations: int) -> list[Candidate]:
    """Simulate a small grid of settings that the config allows; return the candidates, fastest first.

    The grid varies the split of devices between trainer and engines (if they are apart), `rollout.async_ratio` and
    `rollout.redundant_groups`. Training is assumed to scale with the trainer's devices. The effect of staleness on learning
    is not modelled.
    """
    num_groups = config.rollout.num_groups
    redundancies = sorted({ceil(share * num_groups) for share in REDUNDANCIES})
    candidates = []
    for split, async_ratio, redundant_groups in product(_splits(config), ASYNC_RATIOS, redundancies):
        settings = (f"rollout.async_ratio={async_ratio}", f"rollout.redundant_groups={redundant_groups}")
        try:
            changed = override_config(config, (*split, *settings), config.name)
        except UserError:
            continue  # the config does not allow this combination
        candidates.append(Candidate((*split, *settings), simulate(changed, models, workload, num_iterations)))
    return sorted(candidates, key=lambda candidate: candidate.prediction.seconds_per_iteration)


def _splits(config: RunConfig) -> list[tuple[str, ...]]:
    """Overrides for each split of the devices between trainer and engines; one empty override if they share devices."""
    if config.placement.colocated:
        return [()]
    total = config.cluster.num_devices
    present = len(config.placement.trainer)
    trainers = {min(total - 1, max(1, round(share * total))) for share in TRAINER_SHARES} | {present}
    return [
        (f"placement.trainer={_devices(0, trainer)}", f"placement.engines={_devices(trainer, total)}")
        for trainer in sorted(trainers)
        if trainer < total and (total - trainer) % len(config.engine_devices[0]) == 0
    ]


def _devices(first: int, after: int) -> str:
    """Device range in config syntax: "2-5" or "[2]"."""
    return f"{first}-{after - 1}" if after - first > 1 else f"[{first}]"
