"""Tables and sentences about broken runs, and the page docs/benchmarks/chaos.md. Pure functions."""

import os
from collections.abc import Sequence

from tests.chaos.kill_points import STAGES, VICTIMS
from tests.chaos.outcomes import BrokenRun, Outcome, Recovery
from tests.chaos.storm import Storm, event_table, storm_table


def matrix_table(recoveries: Sequence[Recovery]) -> str:
    """Markdown table of verdicts, a row per victim and a column per stage.

    'ok 11 s' means that nothing was lost or differs after a resume, and that the next commit came after 11 seconds;
    'survived 2 s' means the same without a resume.
    """
    stages = sorted({recovery.point.stage for recovery in recoveries}, key=STAGES.index)
    cells: dict[tuple[str, str], list[str]] = {}
    for recovery in recoveries:
        cells.setdefault((recovery.point.victim, recovery.point.stage), []).append(recovery.verdict)
    victims = dict.fromkeys([v for v in VICTIMS if any((v, stage) in cells for stage in stages)] + [v for v, _ in cells])
    rows = [[victim, *(", ".join(cells.get((victim, stage), ["-"])) for stage in stages)] for victim in victims]
    return _table(["", *stages], rows)


def points_table(recoveries: Sequence[Recovery]) -> str:
    """Markdown table with a row per fault."""
    rows = [
        [
            recovery.point.victim,
            f"{recovery.point.event_name} {'inside' if recovery.point.delay_s else 'boundary'}",
            recovery.last_event,
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


def summary_sentence(broken: Sequence[BrokenRun]) -> str:
    """Totals over all runs. Example: 40 kill points tried in 10 runs, 12 survived, 0 missed; 0 differences, 0 committed
    iterations lost, 0 generated again"""
    recoveries = recoveries_of(broken)
    return (
        f"{len(recoveries)} kill points tried in {len(broken)} runs, {sum(r.survived for r in recoveries)} survived, "
        f"{sum(len(run.missed) for run in broken)} missed; "
        f"{sum(len(r.differences) for r in recoveries)} differences, "
        f"{sum(r.num_lost for r in recoveries)} committed iterations lost, "
        f"{sum(len(run.generated_again) for run in broken)} generated again"
    )


def recoveries_of(broken: Sequence[BrokenRun]) -> list[Recovery]:
    """All recoveries of some runs, in order."""
    return [recovery for run in broken for recovery in run.recoveries]


def defects(broken: Sequence[BrokenRun]) -> list[str]:
    """Sentences about every violated promise: lost iterations, differences, repeated collects, missed kill points."""
    lines = []
    for run in broken:
        for recovery in run.recoveries:
            where = f"{run.run_id}, {recovery.point.victim} at {recovery.point.event_name}"
            lines += [f"{where}: lost {recovery.num_lost} committed iterations"] if recovery.num_lost else []
            lines += [f"{where}: {difference}" for difference in recovery.differences]
        lines += [f"{run.run_id}: {name} was generated again after its commit" for name in run.generated_again]
        lines += [f"{run.run_id}: never came by {point.event_name}" for point in run.missed]
    return lines


def storm_defects(storms: Sequence[Storm]) -> list[str]:
    """Sentences about every difference that a storm made."""
    return [f"{storm.run_id}, storm, {storm.variant}: {line}" for storm in storms for line in storm.differences]


def short_report(broken: Sequence[BrokenRun]) -> str:
    """Report of killed processes: two tables, the defects and, as the last line, the summary sentence."""
    recoveries = recoveries_of(broken)
    return "\n\n".join(
        [matrix_table(recoveries), points_table(recoveries), "\n".join([*defects(broken), summary_sentence(broken)])]
    )


def page(
    outcome: Outcome,
    services: Sequence[BrokenRun],
    storms: Sequence[Storm],
    minutes: float,
    num_iterations: int,
    fault_seconds: float,
) -> str:
    """Markdown page about a whole experiment.

    `outcome` is about killed processes, `services` about services that failed for `fault_seconds` or longer, `storms` about
    random signals.
    """
    kills, faults = recoveries_of(outcome.broken), recoveries_of(services)
    broken = [*outcome.broken, *services]
    num_collects, num_needed = sum(run.num_collects for run in broken), num_iterations * len(broken)
    num_again = sum(len(run.generated_again) for run in broken)
    return f"""# Chaos

Written by `make chaos` in {minutes:.0f} minutes on {os.cpu_count()} cores. Real runs of a tiny model, {num_iterations}
iterations each, are broken on purpose, resumed, and compared with an unbroken run. Compared are, for every iteration and to
the bit: the digest of the weights, the rollouts (token ids, logprobs, scores), and every metric that is not a time.

`ok 12 s` means: nothing that was committed was lost, nothing differs, the command ended with one sentence, and the leg that
resumed the run committed 12 s after the fault. `survived 2 s` means the same without a resume: the command continued, and an
iteration that began after the fault was committed within 2 s. An iteration of this model takes a fraction of a second. The
seconds are therefore the time to end and start a leg, or to replace a role, not the time of repeated work.

## Processes killed with SIGKILL

{summary_sentence(outcome.broken)}.

{matrix_table(kills)}

A cell is one kill, at the boundary of the stage or inside it. A leg continues until it needs the dead process. It replaces a
dead engine or reward worker; the death of any other process ends the leg.

## Services that fail

A fault begins with the stage and lasts {fault_seconds:.0f} s or more. A store that stays away does so for longer than
`store.retry_seconds`: the command ends with one sentence, and the run is resumed later. MLflow and Prefect, where they stay
away, do so until the run has ended.

{matrix_table(faults)}

## Storms: random signals at random moments

Processes of a run, drawn at random, are killed, stopped for some seconds, or told to end. It begins with the command.
Beside the run `roll gc` collects what is a few seconds old and `roll export` writes a policy, and both are killed.
{sum(len(storm.events) for storm in storms)} events in {len(storms)} runs. A synchronous run must equal the unbroken one to
the bit. An asynchronous run must have trained on the same problems, each once.

{storm_table(storms)}

{event_table(storms)}

## Generation

Collects that began, in all broken runs: {num_collects}, for {num_needed} iterations. The others belong to iterations that a
kill undid before their rollouts were stored. Collects of iterations already committed: {num_again}.

## Every fault

{points_table([*kills, *faults])}

## Defects

{chr(10).join(f"- {line}" for line in [*defects(broken), *storm_defects(storms)]) or "None."}
"""
