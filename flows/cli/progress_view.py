"""Terminal view of a run: one row per iteration, and a progress bar while `roll run`, `resume` or `fork` follows it."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from roll_core.config.run import RunConfig
from roll_core.reporting.report import stage_seconds
from roll_core.reporting.stage_log import PROGRESS_LOGGER
from roll_core.types.manifest import Manifest
from roll_core.types.refs import RunRef

MIN_STAGE_SECONDS = 0.02
"""Shortest stage a row names, in seconds: a terminal is too narrow for all of them."""
BAR_CELLS = 12
"""Width in characters of the bar that shows the mean reward."""
IDLE_NOTE_EVERY = 20
"""Iterations without a learning signal, one after the other, after which the terminal says so again."""
HEADER = "iter  reward             held-out   tok/s  seconds  of which"
_BLOCKS = "▁▂▃▄▅▆▇█"


@contextmanager
def live_view(config: RunConfig, console: Console) -> Iterator["RunView"]:
    """Draw the progress of the flow that runs inside this block."""
    view = RunView(config, console)
    logger = logging.getLogger(PROGRESS_LOGGER)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(view)
    try:
        with view.progress:
            yield view
    finally:
        logger.removeHandler(view)


class LastingConsole(Console):
    """Console that falls silent when its reader goes away, as in `roll run CONFIG | head`: the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class RunView(logging.Handler):
    """Log handler that draws the records of the progress logger: the opened run, its committed manifests, and what it
    waits for."""

    def __init__(self, config: RunConfig, console: Console):
        super().__init__()
        self.run: RunRef | None = None
        """Run that the flow works on; None until the flow has opened or found it."""
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._bar = self.progress.add_task("starting Prefect, Ray and the models", total=config.iterations)
        self._accuracy: float | None = None
        self._num_rows = 0
        self._compares_groups = config.algorithm.compares_groups
        self._num_idle = 0
        """Iterations without a learning signal, up to the newest."""

    def emit(self, record: logging.LogRecord) -> None:
        manifest: Manifest | None = record.__dict__.get("manifest")
        if manifest is not None:
            self._print_row(manifest)
        if record.levelno >= logging.WARNING:
            self.progress.console.print(record.getMessage(), style="yellow", highlight=False, markup=False, soft_wrap=True)
        run: RunRef | None = record.__dict__.get("run")
        if run is not None:
            self.run = run
            self.progress.console.print(f"{'run':<8} {run.run_id}", highlight=False)
            self.progress.update(self._bar, description=f"{run.run_id}: starting Ray and the models")

    def _print_row(self, manifest: Manifest) -> None:
        if manifest.evaluated:
            self._accuracy = manifest.evaluated.accuracy
        if not self._num_rows:
            self.progress.console.print(HEADER, style="dim", highlight=False)
        self._num_rows += 1
        self.progress.console.print(iteration_row(manifest, self._accuracy), highlight=False, soft_wrap=True)
        self._note_if_idle(manifest)
        self.progress.update(self._bar, completed=manifest.iteration, description=f"{manifest.run_id}")

    def _note_if_idle(self, manifest: Manifest) -> None:
        """Print a line if an iteration taught nothing: for the first of such iterations, and again every
        `IDLE_NOTE_EVERY`."""
        is_idle = self._compares_groups and manifest.metrics.get("reward/informative_groups") == 0.0
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if is_idle and self._num_idle % IDLE_NOTE_EVERY == 1:
            self.progress.console.print(idle_note(manifest), highlight=False, soft_wrap=True)


def idle_note(manifest: Manifest) -> str:
    """One line about an iteration without a learning signal, and what to do about it."""
    metrics = manifest.metrics
    wanted = "harder" if metrics["accuracy/train"] > 0.5 else "easier"
    return (
        f"[yellow]nothing is learned in iteration {manifest.iteration}[/]: within each group all rewards are equal (mean "
        f"{metrics['reward/mean']:g}): choose {wanted} problems, give partial credit, or raise rollout.group_size"
    )


def iteration_row(manifest: Manifest, accuracy: float | None) -> str:
    """One line for an iteration: reward, held-out accuracy, tokens per second, wall seconds, and the seconds by stage.

    `accuracy` is the newest one; a star marks the iteration that measured it.
    """
    stages = "  ".join(
        f"{stage} {seconds:.2f}" for stage, seconds in stage_seconds(manifest).items() if seconds >= MIN_STAGE_SECONDS
    )
    held_out = "     " if accuracy is None else f"{accuracy:.2f}{'*' if manifest.evaluated else ' '}"
    reward, speed = manifest.metrics.get("reward/mean"), manifest.metrics.get("throughput/tokens_per_second")
    bar = f"{'start':<17}" if reward is None else f"[cyan]{_reward_bar(reward)}[/] {reward:.2f}"
    speed_text = "" if speed is None else f"{speed:.0f}"
    return (
        f"[bold]{manifest.iteration:>4}[/]  {bar}  [green]{held_out}[/]  {speed_text:>9}  "
        f"{manifest.timings.get('wall', 0.0):>6.2f}  [dim]{stages}[/]"
    )


def _reward_bar(reward: float) -> str:
    num_filled = round(max(0.0, min(1.0, reward)) * BAR_CELLS)
    return "█" * num_filled + "·" * (BAR_CELLS - num_filled)


def accuracy_curve(points: tuple[tuple[int, float], ...]) -> str:
    """Held-out accuracy over the run, one block per evaluation, between the first and the last iteration: '0 ▁▃▅▇█ 40'."""
    blocks = "".join(_BLOCKS[round(max(0.0, min(1.0, accuracy)) * (len(_BLOCKS) - 1))] for _, accuracy in points)
    return f"{points[0][0]} {blocks} {points[-1][0]}"
