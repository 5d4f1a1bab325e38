"""What `roll run` shows: a row and a bar per iteration while it goes on, and at the end where to look."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from roll_core.config.run import RunConfig
from roll_core.reporting.report import stage_seconds
from roll_core.reporting.stage_log import PROGRESS_LOGGER
from roll_core.types.manifest import Manifest
from roll_core.types.refs import RunRef

SHOWN_FROM_S = 0.02
"""Stages shorter than this are left out of a row: a terminal is narrow."""
_BLOCKS = "▁▂▃▄▅▆▇█"


@contextmanager
def showing(config: RunConfig, console: Console) -> Iterator["RunView"]:
    """Draw the progress records of the flow that runs inside this block."""
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


class RunView(logging.Handler):
    def __init__(self, config: RunConfig, console: Console):
        super().__init__()
        self.run: RunRef | None = None
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
        self._rows = 0

    def emit(self, record: logging.LogRecord) -> None:
        manifest: Manifest | None = record.__dict__.get("manifest")
        if manifest is not None:
            self._show(manifest)
        self.run = record.__dict__.get("run", self.run)

    def _show(self, manifest: Manifest) -> None:
        if manifest.evaluated:
            self._accuracy = manifest.evaluated.accuracy
        if not self._rows:
            self.progress.console.print(HEADER, style="dim", highlight=False)
        self._rows += 1
        self.progress.console.print(iteration_row(manifest, self._accuracy), highlight=False, soft_wrap=True)
        self.progress.update(self._bar, completed=manifest.iteration, description=f"{manifest.run_id}")


HEADER = "iter  reward             held-out   tok/s  seconds  of which"


def iteration_row(manifest: Manifest, accuracy: float | None) -> str:
    """One line an iteration: a bar of the reward, the newest held-out accuracy, speed, and where the time went."""
    stages = "  ".join(
        f"{stage} {seconds:.2f}" for stage, seconds in stage_seconds(manifest).items() if seconds >= SHOWN_FROM_S
    )
    held_out = "     " if accuracy is None else f"{accuracy:.2f}{'*' if manifest.evaluated else ' '}"
    reward, speed = manifest.metrics.get("reward/mean"), manifest.metrics.get("throughput/tokens_per_second")
    bar = f"{'start':<17}" if reward is None else f"[cyan]{_bar(reward)}[/] {reward:.2f}"
    speed_text = "" if speed is None else f"{speed:.0f}"
    return (
        f"[bold]{manifest.iteration:>4}[/]  {bar}  [green]{held_out}[/]  {speed_text:>9}  "
        f"{manifest.timings['wall']:>6.2f}  [dim]{stages}[/]"
    )


def _bar(share: float) -> str:
    filled = round(max(0.0, min(1.0, share)) * 12)
    return "█" * filled + "·" * (12 - filled)


def curve(points: tuple[tuple[int, float], ...]) -> str:
    """Held-out accuracy over the run, one block per evaluation: '0 ▁▃▅▇█ 40'."""
    blocks = "".join(_BLOCKS[round(max(0.0, min(1.0, y)) * (len(_BLOCKS) - 1))] for _, y in points)
    return f"{points[0][0]} {blocks} {points[-1][0]}"
