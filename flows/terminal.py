"""What `roll run` shows: a row and a bar per iteration while it goes on, and at the end where to look."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from roll_core.config.run import RunConfig
from roll_core.types.manifest import Manifest
from roll_core.types.refs import RunRef

PROGRESS = "roll.progress"
_BLOCKS = " ▁▂▃▄▅▆▇█"


@contextmanager
def showing(config: RunConfig, console: Console) -> Iterator["RunView"]:
    """Draw the progress records of the flow that runs inside this block."""
    view = RunView(config, console)
    logger = logging.getLogger(PROGRESS)
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

    def emit(self, record: logging.LogRecord) -> None:
        manifest: Manifest | None = record.__dict__.get("manifest")
        if manifest is not None:
            self._show(manifest)
        self.run = record.__dict__.get("run", self.run)

    def _show(self, manifest: Manifest) -> None:
        if manifest.evaluated:
            self._accuracy = manifest.evaluated.accuracy
        self.progress.console.print(iteration_row(manifest, self._accuracy), highlight=False)
        self.progress.update(self._bar, completed=manifest.iteration, description=f"{manifest.run_id}")


def iteration_row(manifest: Manifest, accuracy: float | None) -> str:
    """One line an iteration: a bar of the reward, the newest held-out accuracy, speed, and where the time went."""
    seconds = " ".join(f"{stage} {manifest.timings[stage]:.2f}" for stage in manifest.timings if stage != "wall")
    held_out = "" if accuracy is None else f"accuracy {accuracy:.2f}{'*' if manifest.evaluated else ' '}"
    if manifest.collected is None:
        return f"[bold]{manifest.iteration:>4}[/]  start  {held_out}  [dim]{seconds}[/]"
    reward = manifest.metrics["reward/mean"]
    speed = manifest.metrics["throughput/tokens_per_second"]
    return (
        f"[bold]{manifest.iteration:>4}[/]  reward [cyan]{_bar(reward)}[/] {reward:.2f}  [green]{held_out}[/]  "
        f"{speed:>6.0f} tok/s  {manifest.timings['wall']:.2f} s  [dim]{seconds}[/]"
    )


def _bar(share: float) -> str:
    filled = round(max(0.0, min(1.0, share)) * 12)
    return "█" * filled + "·" * (12 - filled)


def curve(points: tuple[tuple[int, float], ...]) -> str:
    """Held-out accuracy over the run, one block per evaluation: '0 ▁▃▅▇█ 40'."""
    blocks = "".join(_BLOCKS[1 + round(max(0.0, min(1.0, y)) * (len(_BLOCKS) - 2))] for _, y in points)
    return f"{points[0][0]} {blocks} {points[-1][0]}"
