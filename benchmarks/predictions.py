"""Accuracy of the simulator: seconds per iteration of real runs against the prediction of `roll simulate --trace RUN`.

    python -m benchmarks.predictions [--iterations 20]

Needs a CPU only. Runs the config `rehearsal` with three settings of the rollout. Predicts each run twice: from its own
trace (engine, graders and trainer are fitted to it), and from the trace of the synchronous run, which is what a user has
before changing a setting.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.roll_runs import FinishedRun, machine_load, run_config
from roll_core.config.run import RunConfig
from roll_core.simulation.fitting import fit_models
from roll_core.simulation.recorded import RecordedRun, read_recorded
from roll_core.simulation.simulator import MachineModels, simulate
from roll_core.simulation.workload import recorded_workload

REHEARSAL = Path(__file__).resolve().parents[1] / "configs" / "runs" / "rehearsal.yaml"
SETTINGS = {
    "synchronous": ["rollout.async_ratio=0"],
    "4 redundant groups": ["rollout.async_ratio=0", "rollout.redundant_groups=4"],
    "asynchronous, ratio 2": ["rollout.async_ratio=2"],
}


def run_rehearsal(folder: Path, overrides: list[str]) -> RecordedRun:
    """Run the config `rehearsal` in `folder` and read its traces and timings."""
    finished: FinishedRun = run_config(REHEARSAL, folder, overrides)
    return read_recorded(finished.store, finished.chain[-1].run_id)


def predict(config: RunConfig, models: MachineModels, from_run: RecordedRun) -> float:
    """Seconds per iteration of a config by simulation, with the attempts of a recorded run."""
    workload = recorded_workload(trace for traces in from_run.traces for trace in traces)
    return simulate(config, models, workload, len(from_run.timings)).seconds_per_iteration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    print(machine_load())
    print(f"{'seconds per iteration':<24}{'measured':>12}{'from own trace':>22}{'from synchronous':>18}")
    base: RecordedRun | None = None
    for name, overrides in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = run_rehearsal(Path(folder), [f"iterations={options.iterations}", *overrides])
        base = base or run
        measured = run.seconds_per_iteration
        own = predict(run.config, fit_models(run.config, run.warm_traces, run.warm_timings), run)
        other = predict(run.config, fit_models(base.config, base.warm_traces, base.warm_timings), base)
        print(
            f"{name:<24}{measured:>12.2f}{own:>14.2f}{own / measured - 1:>+8.0%}{other:>10.2f}{other / measured - 1:>+8.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
