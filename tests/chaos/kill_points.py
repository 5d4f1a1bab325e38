"""What a broken run is held to: kill points drawn from an unbroken run, the two compared to the bit, tables of the outcome.

Pure functions; `tests/chaos/flow.py` breaks real runs by them, `tests/chaos/report.py` adds the services around a run.
"""

import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice, zip_longest

from roll_core.reporting.stage_log import Edge, StageEvent
from roll_core.types.manifest import Manifest
from roll_core.types.refs import Record, RunRef

FLOW = "flow"
VICTIMS = (FLOW, "leg", "trainer rank 0", "engine 0", "reward worker 0", "rollout scheduler", "ray node")
"""The command's own process, and those that `processes.json` of a leg names. Engines and reward workers are replaced inside
the leg; whoever else dies ends it."""
RECOVER = "recover"
"""The one stage that belongs to every leg: its kill points are met by whichever leg starts next. One that is still going on
is ended for that."""
STAGES = (RECOVER, "collect", "prepare", "update_critic", "update", "publish", "evaluate", "checkpoint", "commit")
ITERATIONS_APART = 2
"""Between two kills of a run: some deaths are noticed only in the next iteration, whose rollouts are then kept."""


class KillPoint(Record):
    """Who dies, when: `delay_s` after a stage began, zero meaning at its boundary.

    Example: KillPoint(victim="engine 0", stage="collect", iteration=3, delay_s=0.12)
    """

    victim: str
    stage: str
    iteration: int
    delay_s: float

    @property
    def begins_as(self) -> str:
        """The stage's name in the stage log."""
        return RECOVER if self.stage == RECOVER else f"{self.stage} {self.iteration}"


class Recovery(Record):
    """A kill, or a fault of a service, and what became of the run.

    Example: Recovery(point=KillPoint(...), found="update 3 begin", num_committed=3, num_lost=0, survived=False,
    seconds=11.4, said="trainer rank 0 died during update", differences=())
    """

    point: KillPoint
    found: str
    """The last line of the stage log when it happened."""
    num_committed: int
    """Iterations that were in the store when the broken command had ended or got over it, iteration 0 included."""
    num_lost: int
    """Of those, the ones that were missing or changed at the end of the run. Never above zero."""
    survived: bool
    """Whether the command went on, instead of ending and being resumed."""
    seconds: float | None
    """Until an iteration was committed that began afterwards; None where none did."""
    said: str
    """The sentence the broken command ended with; empty where it was killed itself, or never ended early."""
    differences: tuple[str, ...]
    """From the unbroken run, between this kill and the next."""

    @property
    def verdict(self) -> str:
        """Example: ok 11 s"""
        if self.num_lost:
            return f"lost {self.num_lost}"
        if self.differences:
            return f"{len(self.differences)} differ"
        word = "survived" if self.survived else "ok"
        return word if self.seconds is None else f"{word} {self.seconds:.0f} s"


class BrokenRun(Record):
    """A run that was broken at some points, resumed after each, and finished; `missed` points it never came by."""

    run_id: str
    recoveries: tuple[Recovery, ...]
    missed: tuple[KillPoint, ...]
    generated_again: tuple[str, ...]
    """Collects of iterations that were committed already. There are none."""
    num_collects: int
    """Collects that began, those that a kill undid included."""


class Outcome(Record):
    """An unbroken run, and those that should equal it."""

    unbroken: RunRef
    broken: tuple[BrokenRun, ...]


def draw_kill_points(unbroken: Sequence[StageEvent], kills: int, per_run: int, seed: int) -> list[list[KillPoint]]:
    """Kill points by run, in order: spread over every victim, every stage, its boundary and its inside, and all iterations.

    Within a run they are `ITERATIONS_APART`, so that each of its legs meets the next one.
    """
    rng = random.Random(seed)
    seconds = _seconds_by_stage(unbroken)
    runs: list[list[KillPoint]] = []
    for victim, stage, inside in islice(_cells([stage for stage in STAGES if stage in seconds], rng), kills):
        delays = {iteration: inside * rng.uniform(0.1, 0.9) * s for iteration, s in seconds[stage].items()}
        candidates = rng.sample(sorted(delays), len(delays))
        room = ((run, i) for run in [*runs, []] for i in candidates if len(run) < per_run and _far_from_all(i, run))
        run, iteration = next(room)
        if not run:
            runs.append(run)
        run.append(KillPoint(victim=victim, stage=stage, iteration=iteration, delay_s=delays[iteration]))
    return [sorted(run, key=lambda point: point.iteration) for run in runs]


def _cells(stages: list[str], rng: random.Random) -> Iterator[tuple[str, str, bool]]:
    """Victims, stages, and whether inside: diagonal by diagonal, so that a few are spread as well as all are."""
    coins = {(victim, stage): rng.random() < 0.5 for victim in VICTIMS for stage in stages}
    for other_side in (False, True):
        for diagonal in range(len(stages)):
            for number, victim in enumerate(VICTIMS):
                stage = stages[(number + diagonal) % len(stages)]
                yield victim, stage, coins[victim, stage] != other_side


def _far_from_all(iteration: int, run: Sequence[KillPoint]) -> bool:
    return all(abs(iteration - point.iteration) >= ITERATIONS_APART for point in run)


def _seconds_by_stage(events: Sequence[StageEvent]) -> dict[str, dict[int, float]]:
    """How long each stage of each iteration took; a recovery stands at every iteration, since any leg begins with one."""
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


OF_TIME = (
    *("throughput/", "engine/", "grader/", "rollout/queue_", "rollout/buffer_"),
    *("rollout/interruptions", "rollout/engines"),  # who died, and whose attempts went on elsewhere
)
"""Metrics that say how long things took, or how much there was at once: not what came out."""


def differences(unbroken: Sequence[Manifest], broken: Sequence[Manifest]) -> tuple[str, ...]:
    """What is not the same to the bit: weights, rollouts (token ids, logprobs, scores), what became of every problem, and
    every metric but times."""
    found = []
    for expected, got in zip_longest(unbroken, broken):
        if expected is None or got is None:
            found.append(f"iteration {(expected or got).iteration} is in one run only")
            continue
        ours, theirs = _quantities(got), _quantities(expected)
        found += [
            f"iteration {expected.iteration}: {name} is {ours.get(name)}, unbroken {theirs.get(name)}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
    return tuple(found)


def _quantities(manifest: Manifest) -> dict[str, str]:
    """As text, by which NaN equals NaN and no two floats are equal that are not."""
    collected, evaluated = manifest.collected, manifest.evaluated
    return {
        "weights digest": manifest.weights_digest,
        "trajectories digest": collected.trajectories.digest if collected else "",
        "number of trajectories": str(collected.num_trajectories if collected else 0),
        "evaluation digest": evaluated.trajectories.digest if evaluated else "",
        "problems drawn": manifest.draws.model_dump_json() if manifest.draws else "",
        "controllers": repr(manifest.controllers),
    } | {name: repr(value) for name, value in manifest.metrics.items() if not _measures_time(name)}


def _measures_time(name: str) -> bool:
    return name.startswith(OF_TIME) or "seconds" in name


def generated_again(chain: Sequence[Manifest], events: Sequence[StageEvent]) -> tuple[str, ...]:
    """Collects that began though their iteration had been committed."""
    committed_at = {manifest.iteration: datetime.fromisoformat(manifest.committed_at) for manifest in chain}
    collects = [event for event in events if event.stage == "collect" and event.edge is Edge.BEGIN]
    return tuple(e.name for e in collects if e.iteration in committed_at and e.at > committed_at[e.iteration])


def committed_after(events: Sequence[StageEvent], at: datetime) -> datetime | None:
    """When the first iteration was committed that began after a fault: everybody had to do with it, so whoever was missing
    was missed."""
    begun = {event.iteration for event in events if event.stage == "collect" and event.edge is Edge.BEGIN and event.at > at}
    commits = (event for event in events if event.stage == "commit" and event.edge is Edge.END and event.iteration in begun)
    return next((event.at for event in commits), None)


def matrix_table(recoveries: Sequence[Recovery]) -> str:
    """Who died by where. 'ok 11 s' is nothing lost, nothing different, resumed, and the seconds to the next commit;
    'survived 2 s' the same without a resume."""
    stages = sorted({recovery.point.stage for recovery in recoveries}, key=STAGES.index)
    cells: dict[tuple[str, str], list[str]] = {}
    for recovery in recoveries:
        cells.setdefault((recovery.point.victim, recovery.point.stage), []).append(recovery.verdict)
    victims = dict.fromkeys([v for v in VICTIMS if any((v, stage) in cells for stage in stages)] + [v for v, _ in cells])
    rows = [[victim, *(", ".join(cells.get((victim, stage), ["-"])) for stage in stages)] for victim in victims]
    return _table(["", *stages], rows)


def points_table(recoveries: Sequence[Recovery]) -> str:
    """Every kill on a line of its own."""
    rows = [
        [
            recovery.point.victim,
            f"{recovery.point.begins_as} {'inside' if recovery.point.delay_s else 'boundary'}",
            recovery.found,
            str(recovery.num_committed),
            str(recovery.num_lost),
            "yes" if recovery.survived else "no",
            "-" if recovery.seconds is None else f"{recovery.seconds:.1f}",
            str(len(recovery.differences)),
        ]
        for recovery in recoveries
    ]
    header = ["killed", "aimed at", "the log said", "committed", "lost", "survived", "seconds to recover", "differences"]
    return _table(header, rows)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sentence(broken: Sequence[BrokenRun]) -> str:
    """Example: 40 kill points tried in 10 runs, 12 survived, 0 missed; 0 differences, 0 committed iterations lost, 0
    generated again"""
    recoveries = [recovery for run in broken for recovery in run.recoveries]
    return (
        f"{len(recoveries)} kill points tried in {len(broken)} runs, {sum(r.survived for r in recoveries)} survived, "
        f"{sum(len(run.missed) for run in broken)} missed; "
        f"{sum(len(r.differences) for r in recoveries)} differences, "
        f"{sum(r.num_lost for r in recoveries)} committed iterations lost, "
        f"{sum(len(run.generated_again) for run in broken)} generated again"
    )


def trouble(broken: Sequence[BrokenRun]) -> list[str]:
    """Everything that was not as it should be, a line each."""
    lines = []
    for run in broken:
        for recovery in run.recoveries:
            where = f"{run.run_id}, {recovery.point.victim} at {recovery.point.begins_as}"
            lines += [f"{where}: lost {recovery.num_lost} committed iterations"] if recovery.num_lost else []
            lines += [f"{where}: {difference}" for difference in recovery.differences]
        lines += [f"{run.run_id}: {name} was generated again after its commit" for name in run.generated_again]
        lines += [f"{run.run_id}: never came by {point.begins_as}" for point in run.missed]
    return lines
