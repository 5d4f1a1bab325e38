"""Kill points: which process of a run dies, at which stage. Drawn from the stage log of an unbroken run.

Pure functions; `process_kills.py` kills real processes at these points, `service_faults.py` makes services fail at them.
"""

import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice

from roll_core.reporting.stage_log import Edge, StageEvent
from roll_core.types.refs import Record

FLOW = "flow"
VICTIMS = (FLOW, "leg", "ray node", "trainer rank 0", "engine 0", "reward worker 0", "rollout scheduler")
"""Processes to kill: the command's own, and those that `processes.json` of a leg names. The leg replaces a dead engine or
reward worker; the death of any other process ends the leg."""
RECOVER = "recover"
"""First stage of every leg. The next leg that starts meets its kill point; a command that still runs is killed first."""
STAGES = (RECOVER, "collect", "prepare", "update_critic", "update", "publish", "evaluate", "checkpoint", "commit")
MIN_ITERATIONS_APART = 2
"""Minimum distance of two kills in a run, in iterations. Some deaths are noticed only in the next iteration, after its
rollouts have been stored."""


class KillPoint(Record):
    """Process or service to break, and the moment: `delay_s` seconds after a stage began; 0 means at the stage's boundary.

    Example: KillPoint(victim="engine 0", stage="collect", iteration=3, delay_s=0.12)
    """

    victim: str
    stage: str
    iteration: int
    delay_s: float

    @property
    def event_name(self) -> str:
        """Name of the stage in the stage log. Example: collect 3"""
        return RECOVER if self.stage == RECOVER else f"{self.stage} {self.iteration}"


def draw_kill_points(unbroken: Sequence[StageEvent], kills: int, per_run: int, seed: int) -> list[list[KillPoint]]:
    """Draw kill points and assign them to runs, each run's points in order of iteration.

    The points spread over every victim, every stage, the boundary and the inside of a stage, and all iterations. Points of a
    run are `MIN_ITERATIONS_APART`, so that the leg that recovers from one of them meets the next.
    """
    rng = random.Random(seed)
    seconds = _seconds_by_stage(unbroken)
    runs: list[list[KillPoint]] = []
    for victim, stage, inside in islice(_cells([stage for stage in STAGES if stage in seconds], rng), kills):
        delays = {iteration: inside * rng.uniform(0.1, 0.9) * s for iteration, s in seconds[stage].items()}
        candidates = rng.sample(sorted(delays), len(delays))
        free_slots = ((run, i) for run in [*runs, []] for i in candidates if len(run) < per_run and _far_from_all(i, run))
        run, iteration = next(free_slots)
        if not run:
            runs.append(run)
        run.append(KillPoint(victim=victim, stage=stage, iteration=iteration, delay_s=delays[iteration]))
    return [sorted(run, key=lambda point: point.iteration) for run in runs]


def _cells(stages: list[str], rng: random.Random) -> Iterator[tuple[str, str, bool]]:
    """Pairs of victim and stage, and whether to kill inside the stage, diagonal by diagonal: any prefix is spread evenly.

    The second pass visits every pair again at its other moment.
    """
    coins = {(victim, stage): rng.random() < 0.5 for victim in VICTIMS for stage in stages}
    for other_side in (False, True):
        for diagonal in range(len(stages)):
            for number, victim in enumerate(VICTIMS):
                stage = stages[(number + diagonal) % len(stages)]
                yield victim, stage, coins[victim, stage] != other_side


def _far_from_all(iteration: int, run: Sequence[KillPoint]) -> bool:
    return all(abs(iteration - point.iteration) >= MIN_ITERATIONS_APART for point in run)


def _seconds_by_stage(events: Sequence[StageEvent]) -> dict[str, dict[int, float]]:
    """Seconds of each stage by iteration. A recovery is listed at every iteration, since any leg begins with one."""
    seconds: dict[str, dict[int, float]] = {RECOVER: {}}
    began: dict[str, datetime] = {}
    iterations = sorted({event.iteration for event in events if event.iteration is not None})
    for event in events:
        if event.edge is Edge.BEGIN:
            began[event.name] = event.at
            continue
        took = (event.at - began[event.name]).total_seconds()
        if event.stage == RECOVER:
            seconds[RECOVER] = dict.fromkeys(iterations, took)
        elif event.iteration is not None:
            seconds.setdefault(event.stage, {})[event.iteration] = took
    return seconds
