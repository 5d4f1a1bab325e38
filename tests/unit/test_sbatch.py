"""Batch scripts that run legs without a flow: `roll sbatch` prints them, also on a machine without SLURM."""

import re

from flows import cli
from tests.support import ROOT


def printed(capsys, *arguments: str) -> list[str]:
    """Lines that a successful command prints."""
    assert cli.main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_a_script_asks_for_what_the_config_says(capsys):
    settings = {
        "account": "lab",
        "qos": "long",
        "modules": "[cuda/13.0]",
        "setup": "['source venv/bin/activate']",
        "python": "apptainer exec roll.sif python",
        "options": "{constraint: h100}",
        "signal_seconds": "300",
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"legs.launcher.{key}={value}")]
    lines = printed(capsys, "sbatch", "configs/runs/qwen3-moe-30b.yaml", *overrides)
    assert {
        "#SBATCH --account=lab",
        "#SBATCH --constraint=h100",
        "#SBATCH --exclusive",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --mem=0",
        "#SBATCH --nodes=8",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --partition=gpu",
        "#SBATCH --qos=long",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR2@300",
        "#SBATCH --time=1440",
    } <= set(lines)
    module, setup, run = (lines.index(line) for line in lines if line.startswith(("module load", "source", "run=")))
    command = next(line for line in lines if line.startswith("srun"))
    assert module < setup < run < lines.index(command)
    assert "apptainer exec roll.sif python -m flows.cli leg " in command
    assert f"{ROOT}/configs/runs/qwen3-moe-30b.yaml --set legs.launcher.account=lab" in command


def test_the_printed_and_the_shipped_script_requeue_themselves_alike(capsys):
    lines = printed(capsys, "sbatch", "configs/runs/qwen3-moe-30b.yaml")
    by_hand = (ROOT / "infra/slurm/rlvr.sbatch").read_text().splitlines()
    assert lines[-3:] == by_hand[-3:]


def test_a_plan_shows_legs_nodes_placement_and_the_script(capsys):
    text = "\n".join(printed(capsys, "plan", "configs/runs/qwen3-moe-30b.yaml"))
    for part in ("8 node(s) x 8 cuda", "32 rank(s) on devices 0-31", "slurm, 1440 min each", "#SBATCH --nodes=8", "srun"):
        assert part in text


def test_a_plan_states_how_long_a_leg_that_is_told_to_stop_takes(capsys):
    text = "\n".join(printed(capsys, "plan", "configs/runs/qwen3-moe-30b.yaml"))
    update, stop = (float(re.search(pattern, text)[1]) for pattern in (r"\+ update (\d+)", r"a leg needs up to (\d+) s"))  # type: ignore[index]
    assert update <= stop < 2 * update


def test_commands_that_need_slurm_are_refused_without_it_in_one_sentence(capsys, monkeypatch):
    assert cli.main(["sbatch", "configs/runs/quickstart.yaml"]) == 2
    assert "legs.launcher.kind must be slurm" in capsys.readouterr().err
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert cli.main(["leg", "configs/runs/quickstart.yaml", "--run", "x"]) == 2
    assert "this is no task of a SLURM job" in capsys.readouterr().err
