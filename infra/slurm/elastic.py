"""Elastic jobs (`legs.elastic`): preemptible single-node jobs that lend engines to a run while a leg of it runs.

Each job runs `node.join_legs`: it finds the running leg by itself, and ends a while after the last leg. Jobs are identified
by name, as legs are, so a flow that adopts a run also adopts the run's elastic jobs. `tasks/legs.py` uses this file.
"""

import logging
from dataclasses import replace
from pathlib import Path

from infra.slurm import queue
from infra.slurm.launcher import JobEnd, LegRequest
from infra.slurm.slurm import SlurmLauncher, SlurmLegJob
from roll_core.types.leg import LegEnding

POLL_S = 15.0
"""Seconds between two queries of the queue."""
RESUBMIT_S = 60.0
"""Minimum seconds between two submissions under one name. A job that fails at once must not flood the queue."""

log = logging.getLogger(__name__)


class ElasticJobs:
    """Elastic jobs of a run, as one leg manages them. Jobs that an earlier leg submitted are adopted."""

    def __init__(self, launcher: SlurmLauncher, template: LegRequest, num_nodes: int, run_folder: Path):
        """Manage `num_nodes` jobs. Each is requested like `template`; its name is the template's name and a number."""
        self._launcher = launcher
        self._template = template
        self._run_folder = run_folder
        self._next_submit_at = {f"{template.name}{number}": 0.0 for number in range(num_nodes)}
        self._jobs: dict[str, SlurmLegJob] = {}
        self._next_poll_at = 0.0
        self.ended: list[JobEnd] = []
        """Ends of the jobs that have left the queue."""

    def find(self) -> list[SlurmLegJob]:
        """Query the queue and return the jobs that are pending or running. Record the end of jobs that have left it."""
        queued = self._launcher.find(self._template.name)
        self.ended += [self._end(name) for name in self._jobs.keys() - queued.keys()]
        self._jobs = {name: self._launcher.attach(job_id, self._template.folder) for name, job_id in queued.items()}
        return list(self._jobs.values())

    def poll(self, leg_nodes: str, now: float) -> None:
        """Submit the elastic jobs that are missing from the queue, for other nodes than those of the leg.

        `leg_nodes` is the leg's node list in SLURM's notation; "" while the leg is pending, and then nothing is submitted.
        `now` is a monotonic time in seconds. A SLURM failure is logged and does not affect the leg.
        """
        if not leg_nodes or now < self._next_poll_at:
            return
        self._next_poll_at = now + POLL_S
        try:
            self.find()
            for name, next_submit_at in self._next_submit_at.items():
                if name not in self._jobs and now >= next_submit_at:
                    self._next_submit_at[name] = now + RESUBMIT_S
                    exclude = (*self._template.exclude, leg_nodes, *(node for end in self.ended for node in end.lost_nodes))
                    request = replace(self._template, name=name, exclude=exclude)
                    self._jobs[name] = self._launcher.submit_elastic(request, self._run_folder)
        except (queue.SlurmUnavailable, queue.SlurmRefused) as error:
            log.warning("legs.elastic: %s", error)

    def _end(self, name: str) -> JobEnd:
        """Return how a job that left the queue ended. A cancelled job is not submitted again by this leg."""
        job = self._jobs[name]
        job.has_ended()
        end = job.end()
        if end.ending is LegEnding.CANCELLED:
            self._next_submit_at[name] = float("inf")
        log.info("%s: %s", name, end.cause)
        return end
