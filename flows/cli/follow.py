"""Run a flow in the command's own process and draw its progress; used by `roll run`, `roll resume` and `roll fork`.

`print_where_to_look` prints where a run's store, MLflow page, report and exports are; `roll show` uses it as well.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.options import store_option
from roll_core.errors import PrefectUnavailable, RollError

if TYPE_CHECKING:
    from rich.console import Console

    from roll_core.config.run import RunConfig
    from roll_core.store.records.runs import RunSummary
    from roll_core.types.refs import RunRef

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of a command that Ctrl-C or SIGTERM stopped: 128 + the number of the signal, as shells report it."""


class Terminated(KeyboardInterrupt):
    """Raised in the main thread by SIGTERM, which stops a command in the same way as Ctrl-C."""


def follow(config: "RunConfig", store_uri: str, start_flow: "Callable[[], RunSummary]") -> int:
    """Run a flow, draw its progress, print where to look, and return the exit code of the command.

    `start_flow` imports the flow and calls it. Prefect reads its settings when it is imported, so the import must come after
    the Prefect server has started.
    """
    from flows.cli.progress_view import LastingConsole, live_view
    from flows.flow_runs import crash_dead_flow_runs
    from flows.prefect_server import exit_soon, prefect_api
    from roll_core.store.records.runs import summary_of_finished

    console = LastingConsole()
    if not console.is_terminal:  # which would show a progress bar
        console.print("starting Prefect, Ray and the models")
    with live_view(config, console) as view:
        try:
            with _raising_terminated(), prefect_api(Path(config.work_dir)):
                crash_dead_flow_runs(Path(config.work_dir))
                summary = start_flow()
        except KeyboardInterrupt as stop:
            view.progress.stop()
            advice = _resume_advice(view.run, store_uri) if view.run else "nothing had begun"
            console.print(f"stopped; what was committed is safe; {advice}", highlight=False, soft_wrap=True)
            return TERMINATED if isinstance(stop, Terminated) else INTERRUPTED
        except PrefectUnavailable as error:
            # Prefect's client could not report the end of the flow. Whether the run is finished, the store knows.
            view.progress.stop()
            finished = summary_of_finished(view.run) if view.run else None
            if finished is None:
                return _fail(str(error), error.exit_code, view.run, store_uri)
            summary = finished
        except RollError as error:
            view.progress.stop()
            return _fail(str(error), error.exit_code, view.run, store_uri)
    assert view.run is not None
    print_where_to_look(console, view.run, config, summary)
    exit_soon(0)
    return 0


@contextlib.contextmanager
def _raising_terminated() -> Iterator[None]:
    """Raise Terminated at SIGTERM during the block. Prefect handles the signal first, and then calls this handler."""

    def terminate(_number: int, _frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(sentence: str, exit_code: int, run: "RunRef | None", store_uri: str) -> int:
    """Print why the flow failed and how to resume its run; return the exit code."""
    from flows.prefect_server import exit_soon

    advice = f"; {_resume_advice(run, store_uri)}" if run else ""
    print(f"roll: {sentence}{advice}", file=sys.stderr)
    exit_soon(exit_code)
    return exit_code


def _resume_advice(run: "RunRef", store_uri: str) -> str:
    return f"resume it with: roll resume {run.run_id}{store_option(store_uri)}"


def print_where_to_look(console: "Console", run: "RunRef", config: "RunConfig", summary: "RunSummary") -> None:
    """Print where a run's store, MLflow page, report and newest export are, and the curve of its held-out accuracy."""
    from flows.cli.progress_view import accuracy_curve

    report = Path(config.work_dir) / run.run_id / "report.html"
    mlflow = config.tracking.uri or ""
    if mlflow.startswith("sqlite:"):
        mlflow = f"mlflow ui --backend-store-uri {mlflow}"
    rows = {
        "run": run.run_id,
        "store": f"{run.store_uri}/runs/{run.run_id}",
        "mlflow": mlflow,
        "report": str(report) if report.exists() else "",
        "export": _export_command(run, config),
        "curve": accuracy_curve(summary.curve) if summary.curve else "",
    }
    for label, text in rows.items():
        if text:
            console.print(f"{label:<8} {text}", highlight=False, soft_wrap=True)
    if summary.curve:
        console.print(summary.sentence, highlight=False)


def _export_command(run: "RunRef", config: "RunConfig") -> str:
    """Command that copies the run's newest export into a folder; empty if the store has no export of the run."""
    from roll_core.store.object_store import ObjectStore
    from roll_core.store.records.exports import read_exports

    exports = read_exports(ObjectStore(run.store_uri, config.store.retry_seconds), run.run_id)
    if not exports:
        return ""
    return f"roll export {run.run_id}@{exports[-1].iteration} FOLDER{store_option(run.store_uri)}"
