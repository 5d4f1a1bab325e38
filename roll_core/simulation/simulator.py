"""How fast a config would run, before it does: the real rollout scheduler, in virtual time, between modelled engines and
graders and a modelled trainer. The prediction contains the policy of the scheduler because it is the scheduler.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from math import ceil

from roll_core.config.load import changed_config
from roll_core.config.rollout import GroupFilter
from roll_core.config.run import RunConfig
from roll_core.errors import UserError
from roll_core.reporting.activity import TRAINING, stage_spans
from roll_core.reporting.stage_log import Edge, StageEvent
from roll_core.rollout.scheduler import RolloutScheduler
from roll_core.simulation.machines import (
    USEFUL,
    Demands,
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
"""Virtual seconds are free; a collect that lasts longer waits for something that does not come."""
ASYNC_RATIOS = (0, 1, 2, 4)
REDUNDANCIES = (0.0, 0.1, 0.25)
"""Shares of rollout.num_groups."""
TRAINER_SHARES = (1 / 4, 1 / 2, 3 / 4)
"""Of the devices, where trainer and engines have devices of their own."""


@dataclass(frozen=True)
class MachineModels:
    """All that a simulation knows of the machines."""

    engine: EngineModel
    grader: GraderModel
    trainer: TrainerModel


@dataclass(frozen=True)
class Prediction:
    iteration_seconds: tuple[float, ...]
    beside_seconds: tuple[float, ...]
    """Of these, the seconds of an evaluation and a checkpoint, in the iterations that have them."""
    beside_share: float
    """Of an evaluation and a checkpoint, for every iteration."""
    trainer_busy: float
    """Share of time in which the trainer computes."""
    engines_busy: float
    """Share of time with at least one attempt running, mean of the engines."""
    mean_running: float
    """Attempts at once, per engine."""
    staleness_mean: float
    """Of the oldest tokens of attempts that were trained on, in weights versions."""
    staleness_max: int
    wasted_share: float
    """Of the tokens generated: those nobody trained on."""
    stages: tuple[StageEvent, ...] = field(repr=False)
    traces: tuple[AttemptTrace, ...] = field(repr=False)

    @property
    def seconds_per_iteration(self) -> float:
        """Mean, without the first iteration if there are more: there, nothing was generated ahead yet. Each has its share of
        an evaluation and a checkpoint, so that a few say what many would take."""
        between = [seconds - beside for seconds, beside in zip(self.iteration_seconds, self.beside_seconds, strict=True)]
        counted = between[1:] or between
        return sum(counted) / len(counted) + self.beside_share

    @property
    def bubble(self) -> float:
        """Share of time in which the trainer waits."""
        return 1.0 - self.trainer_busy


def simulate(config: RunConfig, models: MachineModels, workload: Workload, num_iterations: int) -> Prediction:
    """So many iterations of a config. Numbers of engines, slots, graders and devices are the config's."""
    return run_in_virtual_time(_Simulation(config, models, workload).run(num_iterations))


class _Simulation:
    def __init__(self, config: RunConfig, models: MachineModels, workload: Workload):
        self._config = config
        self._models = models
        self._workload = workload
        self._stages: list[StageEvent] = []
        self._beside: list[float] = []
        self._traces: list[list[AttemptTrace]] = []

    async def run(self, num_iterations: int) -> Prediction:
        config, placement = self._config, self._config.placement
        demands = Demands(self._workload)
        engines = [
            SimulatedEngine(f"engine {number}", self._models.engine, config.rollout.slots_per_engine, demands)
            for number in range(len(config.engine_devices))
        ]
        scheduler = RolloutScheduler(
            _with_modelled_filter(config).rollout,
            num_iterations=max(num_iterations, config.iterations),
            seed=config.seed,
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
        """Collect, prepare, update, publish and what follows; the next iteration's first problem."""
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
        self._traces.append(_by_this_clock(rollout.trace))
        num_tokens = sum(trace.num_tokens for trace in rollout.trace if trace.fate is Fate.TRAINED)
        share = trainer.num_devices / len(config.placement.trainer)
        if sharing:
            await scheduler.pause(sharing)
        with self._stage(f"prepare {iteration}"):
            await asyncio.sleep(trainer.prepare.of(num_tokens) * share)
        with self._stage(f"update {iteration}"):
            await asyncio.sleep(trainer.update.of(num_tokens) * share)
        with self._stage(f"publish {iteration}"):
            adoptions = (engine.adopt(iteration, config.rollout.in_flight, trainer.publish_seconds) for engine in engines)
            await asyncio.gather(*adoptions)
            if sharing:
                scheduler.resume(sharing)
            scheduler.adopted(iteration)
        beside = 0.0
        for stage, every, lasts in (
            ("evaluate", config.evaluation.every, trainer.evaluate_seconds),
            ("checkpoint", config.checkpoint.every, trainer.checkpoint_seconds),
        ):
            if iteration % every == 0 and lasts:
                beside += lasts
                with self._stage(f"{stage} {iteration}"):
                    await asyncio.sleep(lasts)
        self._beside.append(beside)
        with self._stage(f"commit {iteration}"):
            await asyncio.sleep(trainer.other_seconds)
        return rollout.draws.next

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._note(name, Edge.BEGIN)
        yield
        self._note(name, Edge.END)

    def _note(self, name: str, edge: Edge) -> None:
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
            beside_seconds=tuple(self._beside),
            beside_share=sum(shares),
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
    """A filter that leaves out what the workload says would be left out: rewards are not modelled beyond that."""
    if config.rollout.filter is None:
        return config
    rollout = config.rollout.model_copy(update={"filter": GroupFilter(min_mean=USEFUL)})
    return config.model_copy(update={"rollout": rollout})


def _by_this_clock(traces: Sequence[AttemptTrace]) -> list[AttemptTrace]:
    """Traces say seconds since the epoch, the simulation since its beginning; consumed is what is consumed now."""
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


# -------------------------------------------------------------------------------------------------- what else one could do
@dataclass(frozen=True)
class Candidate:
    """Example: Candidate(overrides=("placement.trainer=0-3", "placement.engines=4-7"), prediction=Prediction(...))"""

    overrides: tuple[str, ...]
    """What to --set."""
    prediction: Prediction


def recommend(config: RunConfig, models: MachineModels, workload: Workload, num_iterations: int) -> list[Candidate]:
    """Settings of a small grid that the config allows, the quickest first.

    How many devices train and how many generate, where they are apart; how far to generate ahead; how much redundancy.
    Training is taken to scale with the number of devices that train, and nothing is said of how well a staler batch teaches.
    """
    num_groups = config.rollout.num_groups
    redundancies = sorted({ceil(share * num_groups) for share in REDUNDANCIES})
    candidates = []
    for split, async_ratio, redundant_groups in product(_splits(config), ASYNC_RATIOS, redundancies):
        settings = (f"rollout.async_ratio={async_ratio}", f"rollout.redundant_groups={redundant_groups}")
        try:
            changed = changed_config(config, (*split, *settings), config.name)
        except UserError:
            continue  # the config does not allow this combination
        candidates.append(Candidate((*split, *settings), simulate(changed, models, workload, num_iterations)))
    return sorted(candidates, key=lambda candidate: candidate.prediction.seconds_per_iteration)


def _splits(config: RunConfig) -> list[tuple[str, ...]]:
    """Devices for the trainer, the rest for engines; as they are where both share them."""
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
    return f"{first}-{after - 1}" if after - first > 1 else f"[{first}]"
