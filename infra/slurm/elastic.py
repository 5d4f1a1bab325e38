"""Jobs that lend a run nodes it can do without (`legs.elastic`), one node each: kept in the queue while a leg runs.

What they run is `node.join_legs`: they find the leg by themselves, and leave a while after the last one. They are found by
their names, as legs are, so whoever takes a run over has them, too.
"""

import logging
from dataclasses import replace
from pathlib import Path

from infra.slurm import queue
from infra.slurm.launcher import JobEnd, LegRequest
from infra.slurm.slurm import SlurmLauncher, SlurmLegJob
from roll_core.types.leg import LegEnding

LOOK_S = 15.0
QUEUE_AGAIN_S = 60.0
"""Between two jobs for the same node: one that fails at once must not flood the queue."""

log = logging.getLogger(__name__)


class ElasticJobs:
    """Of one leg; those that an earlier leg had are taken over."""

    def __init__(self, launcher: SlurmLauncher, each: LegRequest, num_nodes: int, run_folder: Path):
        """The name of `each` is what their names begin with."""
        self._launcher = launcher
        self._each = each
        self._run_folder = run_folder
        self._submit_from = {f"{each.name}{number}": 0.0 for number in range(num_nodes)}
        self._jobs: dict[str, SlurmLegJob] = {}
        self._look_from = 0.0
        self.ended: list[JobEnd] = []
        """How those ended that are over."""

    def find(self) -> list[SlurmLegJob]:
        """Those that wait or run."""
        queued = self._launcher.find(self._each.name)
        self.ended += [self._end(name) for name in self._jobs.keys() - queued.keys()]
        self._jobs = {name: self._launcher.attach(job_id, self._each.folder) for name, job_id in queued.items()}
        return list(self._jobs.values())

    def look(self, leg_nodes: str, now: float) -> None:
        """While the leg runs on some nodes, have all jobs queued for others. What goes wrong with that is no harm to it."""
        if not leg_nodes or now < self._look_from:
            return
        self._look_from = now + LOOK_S
        try:
            self.find()
            for name, submit_from in self._submit_from.items():
                if name not in self._jobs and now >= submit_from:
                    self._submit_from[name] = now + QUEUE_AGAIN_S
                    exclude = (*self._each.exclude, leg_nodes, *(node for end in self.ended for node in end.lost_nodes))
                    request = replace(self._each, name=name, exclude=exclude)
                    self._jobs[name] = self._launcher.submit_elastic(request, self._run_folder)
        except queue.SlurmUnavailable as error:
            log.warning("legs.elastic: %s", error)

    def _end(self, name: str) -> JobEnd:
        """How a job ended that is not in the queue any more. One that somebody cancelled is not wanted by this leg again."""
        job = self._jobs[name]
        job.has_ended()
        end = job.end()
        if end.ending is LegEnding.CANCELLED:
            self._submit_from[name] = float("inf")
        log.info("%s: %s", name, end.cause)
        return end
