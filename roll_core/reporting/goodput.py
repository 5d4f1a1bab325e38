"""Where the life of every leg went: work that was committed, work that was lost, starting, recovering, and nobody there.

Pure functions over the stage logs of a run and its manifests; `roll show` prints them, the tracker gets their sums.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby, pairwise

from roll_core.reporting.stage_log import Edge, StageEvent
from roll_core.types.manifest import Manifest, Metrics
from roll_core.types.refs import Record

START, RECOVER, WARM_START = "start", "recover", "warm_start"
NOTHING = timedelta()
ENGINES = "rollout/engines"
"""Metric: engines that lived when a batch was complete."""


class LegHistory(Record):
    """Seconds of one leg, by what became of them.

    Example: LegHistory(leg=2, num_committed=7, useful=61.0, lost=4.2, starting=9.5, recovering=1.1, other=0.8, down=12.0)
    """

    leg: int
    num_committed: int
    """Iterations, iteration 0 included."""
    useful: float
    """In iterations that it committed, and in stages whose answers were kept and used by the leg that did."""
    lost: float
    """In stages that were made again, or never came to a commit."""
    starting: float
    """Ray, and the roles with their models."""
    recovering: float
    """Loading the checkpoint and making the updates since again."""
    other: float
    """The rest of its life: between iterations, and after the last."""
    down: float
    """Between the last sign of the leg before and the first of this one: the queue, the launch, and, where the one before
    was killed, what it did since it last wrote a line. Zero for the first."""

    @property
    def total(self) -> float:
        return self.useful + self.lost + self.starting + self.recovering + self.other + self.down


LegEvents = Mapping[int, Sequence[StageEvent]]
"""What every leg did, in order, by its number."""


def commits_in_logs(events_of_leg: LegEvents) -> dict[int, int]:
    """Which leg committed which iteration, without reading all manifests. A commit is missing whose leg was killed before it
    could write the line about it."""
    return {
        event.iteration: leg
        for leg, events in events_of_leg.items()
        for event in events
        if event.stage == "commit" and event.edge is Edge.END and event.iteration is not None
    }


def commits_in_chain(chain: Sequence[Manifest]) -> dict[int, int]:
    return {manifest.iteration: manifest.leg for manifest in chain}


def leg_histories(events_of_leg: LegEvents, committed_by: Mapping[int, int]) -> list[LegHistory]:
    """Of every leg that wrote a stage log, in order; `committed_by` says which leg committed an iteration."""
    legs = sorted(leg for leg, events in events_of_leg.items() if events)
    ends = {leg: events_of_leg[leg][-1].at for leg in legs}
    down = {legs[0]: 0.0} if legs else {}
    down |= {leg: max(NOTHING, events_of_leg[leg][0].at - ends[before]).total_seconds() for before, leg in pairwise(legs)}
    histories = []
    for leg in legs:
        later = {event.name for other in legs if other > leg for event in events_of_leg[other] if event.edge is Edge.BEGIN}
        histories.append(_history(leg, events_of_leg[leg], committed_by, later, down[leg]))
    return histories


def _history(
    leg: int, events: Sequence[StageEvent], committed_by: Mapping[int, int], begun_later: set[str], down: float
) -> LegHistory:
    ours = {iteration for iteration, by in committed_by.items() if by == leg}
    times: dict[str, timedelta] = dict.fromkeys(("useful", "lost", START, RECOVER), NOTHING)
    for committed in ours:
        of_it = [event.at for event in events if _iteration(event) == committed]
        times["useful"] += of_it[-1] - of_it[0] if of_it else NOTHING
    for event, took in _ended(events):
        if event.name in (START, RECOVER):
            times[event.name] += took
        elif (iteration := _iteration(event)) is not None and iteration not in ours:
            was_used = event.edge is Edge.END and iteration in committed_by and event.name not in begun_later
            times["useful" if was_used else "lost"] += took
    life = events[-1].at - events[0].at
    return LegHistory(
        leg=leg,
        num_committed=len(ours),
        useful=times["useful"].total_seconds(),
        lost=times["lost"].total_seconds(),
        starting=times[START].total_seconds(),
        recovering=times[RECOVER].total_seconds(),
        other=max(NOTHING, life - sum(times.values(), NOTHING)).total_seconds(),
        down=down,
    )


def _iteration(event: StageEvent) -> int | None:
    return 0 if event.name == WARM_START else event.iteration


def _ended(events: Sequence[StageEvent]) -> list[tuple[StageEvent, timedelta]]:
    """Ends and failures of stages, and how long each took. One that was cut short has neither, and is where the log ends."""
    begun: dict[str, datetime] = {}
    ended = []
    for event in events:
        if event.edge is Edge.BEGIN:
            begun[event.name] = event.at
        elif event.name in begun:
            ended.append((event, event.at - begun.pop(event.name)))
    return ended


def goodput_metrics(histories: Sequence[LegHistory]) -> Metrics:
    """Sums over the legs of a run, and the share of all its time that was of use."""
    sums = {
        f"goodput/{name}_seconds": sum(getattr(history, name) for history in histories)
        for name in ("useful", "lost", "starting", "recovering", "other", "down")
    }
    total = sum(history.total for history in histories)
    return sums | {"goodput/useful_share": sums["goodput/useful_seconds"] / total if total else 0.0}


def engines_over_time(chain: Sequence[Manifest]) -> str:
    """Example: 2 in iterations 1-6, 4 in 7-19, 2 in 20"""
    counted = [m for m in chain if ENGINES in m.metrics]
    parts: list[str] = []
    for number, some in groupby(counted, key=lambda manifest: manifest.metrics[ENGINES]):
        first, *others = [manifest.iteration for manifest in some]
        parts.append(f"{number:.0f} in {'' if parts else 'iterations '}{first}{f'-{others[-1]}' if others else ''}")
    return ", ".join(parts)


def leg_rows(histories: Sequence[LegHistory]) -> list[str]:
    """A table: a row a leg, seconds by what became of them."""
    return ["leg  iterations   useful     lost  starting  recovering    other     down  of use", *map(_row, histories)]


def _row(history: LegHistory) -> str:
    h, share = history, history.useful / history.total if history.total else 0.0
    return (
        f"{h.leg:>3}  {h.num_committed:>10}  {h.useful:>7.1f}  {h.lost:>7.1f}  {h.starting:>8.1f}  "
        f"{h.recovering:>10.1f}  {h.other:>7.1f}  {h.down:>7.1f}  {share:>6.0%}"
    )
