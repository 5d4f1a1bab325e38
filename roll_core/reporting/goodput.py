"""Goodput: the time of every leg split into useful, lost, starting, recovering, other, and down between legs.

Pure functions over the stage logs and manifests of a run. `roll show` prints the table; the tracker logs the sums.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby, pairwise

from roll_core.reporting.stage_log import Edge, StageEvent
from roll_core.types.manifest import Manifest, Metrics
from roll_core.types.refs import Record

START, RECOVER, WARM_START = "start", "recover", "warm_start"
"""Names of stages that belong to a leg and not to an iteration. The warm start produces iteration 0."""
ZERO = timedelta()
ENGINES = "rollout/engines"
"""Metric name: number of live engines when a batch was complete."""


class LegHistory(Record):
    """Seconds of one leg, split by what they were spent on.

    Example: LegHistory(leg=2, num_committed=7, useful=61.0, lost=4.2, starting=9.5, recovering=1.1, other=0.8, down=12.0)
    """

    leg: int
    num_committed: int
    """Number of iterations the leg committed, iteration 0 included."""
    useful: float
    """Seconds in iterations that this leg committed, and in stages whose cached results a later leg committed."""
    lost: float
    """Seconds in stages that were repeated later or never committed."""
    starting: float
    """Seconds to start Ray and the roles with their models."""
    recovering: float
    """Seconds to load the checkpoint and replay the updates since."""
    other: float
    """Seconds not counted elsewhere: between iterations, and after the last."""
    down: float
    """Seconds between the last log line of the previous leg and the first of this one; 0 for the first leg. They include the
    queue and the launch and, if the previous leg was killed, its time after its last line."""

    @property
    def total(self) -> float:
        """Sum of all seconds, those before the leg included."""
        return self.useful + self.lost + self.starting + self.recovering + self.other + self.down


LegEvents = Mapping[int, Sequence[StageEvent]]
"""Stage events in order of time, by leg number."""


def commits_in_logs(events_of_leg: LegEvents) -> dict[int, int]:
    """Return the leg that committed each iteration, from stage logs alone, which is cheaper than reading all manifests.

    A commit is missing if its leg was killed before it could log the commit.
    """
    return {
        event.iteration: leg
        for leg, events in events_of_leg.items()
        for event in events
        if event.stage == "commit" and event.edge is Edge.END and event.iteration is not None
    }


def events_until(events_of_leg: LegEvents, at: datetime) -> dict[int, list[StageEvent]]:
    """Stage events up to a time, by leg: what the logs said then."""
    return {leg: [event for event in events if event.at <= at] for leg, events in events_of_leg.items()}


def commits_in_chain(chain: Sequence[Manifest]) -> dict[int, int]:
    """Return the leg that committed each iteration, from manifests."""
    return {manifest.iteration: manifest.leg for manifest in chain}


def leg_histories(events_of_leg: LegEvents, committed_by: Mapping[int, int]) -> list[LegHistory]:
    """Compute the history of every leg that wrote a stage log, in order. `committed_by` maps an iteration to its leg.

    It passes over the events of a leg a fixed number of times: a long run computes it at every evaluation.
    """
    legs = sorted(leg for leg, events in events_of_leg.items() if events)
    ends = {leg: events_of_leg[leg][-1].at for leg in legs}
    down = {legs[0]: 0.0} if legs else {}
    down |= {leg: max(ZERO, events_of_leg[leg][0].at - ends[before]).total_seconds() for before, leg in pairwise(legs)}
    begun_later: set[str] = set()
    histories = []
    for leg in reversed(legs):
        events = events_of_leg[leg]
        histories.append(_history(leg, events, committed_by, begun_later, down[leg]))
        begun_later |= {event.name for event in events if event.edge is Edge.BEGIN}
    return histories[::-1]


def _history(
    leg: int, events: Sequence[StageEvent], committed_by: Mapping[int, int], begun_later: set[str], down: float
) -> LegHistory:
    ours = {iteration for iteration, by in committed_by.items() if by == leg}
    times: dict[str, timedelta] = dict.fromkeys(("useful", "lost", START, RECOVER), ZERO)
    times["useful"] = sum((last - first for iteration, (first, last) in _spans(events).items() if iteration in ours), ZERO)
    for event, took in _durations(events):
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
        other=max(ZERO, life - sum(times.values(), ZERO)).total_seconds(),
        down=down,
    )


def _spans(events: Sequence[StageEvent]) -> dict[int, tuple[datetime, datetime]]:
    """Times of the first and the last event of each iteration, by iteration."""
    spans: dict[int, tuple[datetime, datetime]] = {}
    for event in events:
        if (iteration := _iteration(event)) is not None:
            first, _ = spans.get(iteration, (event.at, event.at))
            spans[iteration] = (first, event.at)
    return spans


def _iteration(event: StageEvent) -> int | None:
    """Iteration that a stage works for; the warm start works for iteration 0."""
    return 0 if event.name == WARM_START else event.iteration


def _durations(events: Sequence[StageEvent]) -> list[tuple[StageEvent, timedelta]]:
    """Return the end or failure event of each stage, with the stage's duration. A stage cut short by a kill has none."""
    begun: dict[str, datetime] = {}
    ended = []
    for event in events:
        if event.edge is Edge.BEGIN:
            begun[event.name] = event.at
        elif event.name in begun:
            ended.append((event, event.at - begun.pop(event.name)))
    return ended


def goodput_metrics(histories: Sequence[LegHistory]) -> Metrics:
    """Goodput metrics of a run: seconds of each class summed over its legs, and the useful share of the total."""
    sums = {
        f"goodput/{name}_seconds": sum(getattr(history, name) for history in histories)
        for name in ("useful", "lost", "starting", "recovering", "other", "down")
    }
    total = sum(history.total for history in histories)
    return sums | {"goodput/useful_share": sums["goodput/useful_seconds"] / total if total else 0.0}


def engines_over_time(chain: Sequence[Manifest]) -> str:
    """Describe how many engines a run had. Example: 2 in iterations 1-6, 4 in 7-19, 2 in 20"""
    counted = [m for m in chain if ENGINES in m.metrics]
    parts: list[str] = []
    for number, some in groupby(counted, key=lambda manifest: manifest.metrics[ENGINES]):
        first, *others = [manifest.iteration for manifest in some]
        parts.append(f"{number:.0f} in {'' if parts else 'iterations '}{first}{f'-{others[-1]}' if others else ''}")
    return ", ".join(parts)


def leg_rows(histories: Sequence[LegHistory]) -> list[str]:
    """Lines of a text table, one row per leg, with its seconds by class and its useful share."""
    return ["leg  iterations   useful     lost  starting  recovering    other     down  of use", *map(_row, histories)]


def leg_measurements(events_of_leg: LegEvents) -> list[str]:
    """Metrics of the stages that belong to a leg, one line per leg that has some. A repeated stage shows its last value.

    Example: leg 2: recover/replayed_iterations 3, recover/exact 1, checkpoint/megabytes 0.41
    """
    measured = {leg: _merged_metrics(events) for leg, events in sorted(events_of_leg.items())}
    return [
        f"leg {leg}: {', '.join(f'{name} {value:.6g}' for name, value in metrics.items())}"
        for leg, metrics in measured.items()
        if metrics
    ]


def _merged_metrics(events: Sequence[StageEvent]) -> Metrics:
    return {name: value for event in events for name, value in event.metrics.items()}


def _row(history: LegHistory) -> str:
    h, share = history, history.useful / history.total if history.total else 0.0
    return (
        f"{h.leg:>3}  {h.num_committed:>10}  {h.useful:>7.1f}  {h.lost:>7.1f}  {h.starting:>8.1f}  "
        f"{h.recovering:>10.1f}  {h.other:>7.1f}  {h.down:>7.1f}  {share:>6.0%}"
    )
