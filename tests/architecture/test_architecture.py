"""Rules of the structure: import contracts, heavy libraries that a process must not load, and the kind of every task."""

import importlib
import json
import pkgutil
import subprocess
import sys

import pytest
from prefect import Task

import tasks
from tasks.durability import PureTask, StateChangingTask
from tests.support import ROOT

HEAVY = {"torch", "transformers", "vllm", "megatron", "ray"}
CONTROL_PLANE = ["flows", "tasks", "infra", "roll_core.types", "roll_core.config", "roll_core.store", "roll_core.planning"]


def loaded_after_importing(packages: list[str]) -> set[str]:
    """Names of the top-level modules in a fresh interpreter that has imported every module of `packages`."""
    program = f"""
import importlib, json, pkgutil, sys
for name in {packages!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_import_contracts_hold():
    done = subprocess.run([f"{sys.exec_prefix}/bin/lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_control_plane_imports_neither_models_nor_ray():
    assert not loaded_after_importing(CONTROL_PLANE) & HEAVY


def test_the_driver_imports_no_torch():
    """The driver of a leg holds Ray handles to the roles. Only the processes of the roles import torch."""
    assert not loaded_after_importing(["roll_core.roles", "roll_core.rollout"]) & {"torch", "transformers", "vllm"}


def test_the_rehearsal_engine_imports_no_torch():
    program = "import sys, roll_core.inference.rehearsal_engine; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_roles_with_models_import_neither_sklearn_nor_scipy_nor_pandas():
    """transformers would import all three; `lean_import` prevents it."""
    program = """
import sys
from roll_core.models.lean_import import import_models
import_models()
import roll_core.inference.torch_engine, roll_core.training.learner
sys.exit(", ".join({"sklearn", "scipy", "pandas"} & sys.modules.keys()) or 0)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_leg_process_begins_without_importing_prefect():
    """A leg first starts its own Prefect server, because Prefect reads the address of its server at import."""
    program = "import sys, flows.cli, flows.leg_process; sys.exit('prefect' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_help_of_the_command_loads_only_the_standard_library():
    program = """
import sys
from flows.cli import build_parser
build_parser().format_help()
sys.exit(", ".join({"prefect", "ray", "torch", "mlflow", "rich", "pydantic", "yaml", "fsspec"} & sys.modules.keys()) or 0)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_training_process_never_loads_mlflow():
    assert "mlflow" not in loaded_after_importing(["tasks", "roll_core.roles"])


def all_tasks() -> dict[str, Task]:
    """Every task of the package `tasks`, by module and name."""
    found = {}
    for module in pkgutil.iter_modules(tasks.__path__, "tasks."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Task):
                found[f"{module.name}.{name}"] = value
    return found


@pytest.mark.parametrize("name", sorted(all_tasks()))
def test_every_task_is_pure_or_state_changing(name):
    task = all_tasks()[name]
    assert task.retries == 0, "what is repeated, and how often, is for the config to say"
    match task:
        case PureTask():
            assert task.persist_result
        case StateChangingTask():
            assert not task.persist_result
        case _:
            pytest.fail(f"{name} was made without tasks.durability")


def test_only_collect_prepare_and_evaluate_are_pure_stages():
    kinds = {name.rsplit(".", 1)[1]: type(task) for name, task in all_tasks().items()}
    assert {stage for stage in kinds if kinds[stage] is PureTask} == {"collect", "prepare", "evaluate"}
    assert {"update", "publish", "checkpoint", "commit", "recover"} <= {s for s in kinds if kinds[s] is StateChangingTask}
