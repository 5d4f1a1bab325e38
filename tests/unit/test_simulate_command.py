"""Command `roll simulate`: assumed machines, machines of a stored run, and mistakes that are refused in one sentence."""

from pathlib import Path

import pytest
import yaml

from flows.cli import main
from roll_core.config.run import RunConfig
from roll_core.reporting.activity import iterations_of, stage_spans
from roll_core.simulation.machines import Cost, EngineModel, GraderModel, TrainerModel
from roll_core.simulation.recorded import read_recorded
from roll_core.simulation.simulator import MachineModels, Prediction, simulate
from roll_core.simulation.workload import SampledWorkload
from roll_core.store.object_store import ObjectStore
from roll_core.store.records.runs import commit, open_run, read_chain
from roll_core.store.records.traces import encode_trace
from roll_core.types.manifest import NO_PARENT, Collected, CollectRequest, Draws
from roll_core.types.refs import ArtifactKind, record_digest
from tests.stored_runs import bare_manifest
from tests.support import ROOT, tiny_config

MODELS = MachineModels(
    EngineModel(0.2, 0.1), GraderModel((0.05, 0.07)), TrainerModel(1, Cost(1.0), Cost(2.0), 0.5, 0.0, 0.0, 0.3)
)


def store_simulated(store: ObjectStore, config: RunConfig, prediction: Prediction) -> str:
    """Store a run whose iterations took the predicted times; return its id."""
    run = open_run(store, config)
    spans = stage_spans(prediction.stages)
    traces = iter(sorted({trace.consumed_at for trace in prediction.traces}))
    for iteration in range(len(prediction.iteration_seconds) + 1):
        chain = read_chain(store, run.run_id)
        collected, timings = None, {}
        if iteration:
            consumed_at = next(traces)
            attempts = [trace for trace in prediction.traces if trace.consumed_at == consumed_at]
            begin, end = iterations_of(spans)[iteration]
            timings = {span.stage: span.end - span.begin for span in spans if span.iteration == iteration}
            timings = {stage: timings[stage] for stage in ("collect", "prepare", "update", "publish")} | {
                "wall": end - begin
            }
            collected = Collected(
                request=CollectRequest(
                    iteration=iteration, parent="", weights_version=iteration - 1, first_problem=0, num_groups=4
                ),
                trajectories=store.put(b"rollouts", ArtifactKind.TRAJECTORIES),
                num_trajectories=len(attempts),
                num_failed=0,
                num_tokens=sum(trace.num_tokens for trace in attempts),
                draws=Draws(first=0, outcomes="tttt"),
                trace=store.put(encode_trace(attempts), ArtifactKind.TRACE),
            )
        manifest = bare_manifest(
            iteration,
            run_id=run.run_id,
            parent=record_digest(chain[-1]) if chain else NO_PARENT,
            collected=collected,
            timings=timings,
        )
        commit(store, manifest)
    return run.run_id


def config_file(folder: Path, config: RunConfig) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return str(path)


def test_a_stored_run_is_predicted_from_its_traces(tmp_path, capsys):
    config = tiny_config(tmp_path, rollout={"num_groups": 8, "group_size": 4, "max_new_tokens": 30})
    store = ObjectStore(config.store.uri)
    recorded = simulate(config, MODELS, SampledWorkload(10, 0.5, 30), num_iterations=6)
    run_id = store_simulated(store, config, recorded)
    assert len(read_recorded(store, run_id).warm_traces) == 5, "the first iteration of a leg is cold"

    page = tmp_path / "timeline.html"
    arguments = ["simulate", config_file(tmp_path, config), "--trace", run_id, "--store", config.store.uri]
    assert main([*arguments, "--recommend", "--timeline", str(page)]) == 0
    printed = capsys.readouterr().out
    assert f"machines, as fitted to 5 iterations of {run_id}" in printed
    assert "0.2 s to the first token, 0.1 s a token, 0 s more for each other sequence" in printed
    assert "prepare 1 s, update 2 s, by 1 device" in printed
    assert "measured" in printed
    assert "rollout.async_ratio=0 rollout.redundant_groups=2" in printed
    assert "tiny, simulated" in page.read_text()


def test_without_a_trace_the_assumed_machines_are_printed(tmp_path, capsys):
    config = tiny_config(tmp_path)
    assert main(["simulate", config_file(tmp_path, config), "--iterations", "2"]) == 0
    printed = capsys.readouterr().out
    assert "machines, as assumed; --trace RUN takes those of a run" in printed
    assert "prediction, over 2 iterations" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--iterations", "0"], "roll: --iterations (0) must be at least 1\n"),
        (["--trace", "tiny-7"], "roll: --trace: there is no run 'tiny-7' in "),
        (["--trace", "tiny-1"], "roll: --trace: tiny-1 has no trace of an iteration in "),
        (["--timeline", "/no/such/folder/page.html"], "roll: --timeline: cannot write /no/such/folder/page.html (No such"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(tmp_path, capsys, arguments, message):
    config = tiny_config(tmp_path)
    open_run(ObjectStore(config.store.uri), config)
    assert main(["simulate", config_file(tmp_path, config), "--store", config.store.uri, *arguments]) != 0
    refusal = capsys.readouterr().err
    assert refusal.startswith(message)
    assert refusal.count("\n") == 1


@pytest.mark.parametrize("command", [("plan",), ("simulate", "--iterations", "1")], ids=lambda command: command[0])
@pytest.mark.parametrize("path", sorted((ROOT / "configs/runs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_that_comes_with_roll_can_be_planned_and_simulated(path, command, capsys):
    name, *options = command
    assert main([name, str(path), *options]) == 0, capsys.readouterr().err
