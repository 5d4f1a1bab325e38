"""A user's mistake is one sentence that names the key and the fix, exit code 2, before anything starts."""

import socket

import pytest


def test_the_command_itself_prints_one_line_and_exits_with_2(workspace):
    """All other mistakes are made in the test's process, which has imported what the command needs."""
    done = workspace.roll("run", str(workspace.config), "--set", "rollout.grup_size=4")
    assert done.returncode == 2, done.stdout
    assert done.stdout.splitlines() == [
        f"roll: {workspace.config}: rollout.grup_size is not a key; did you mean 'group_size'?"
    ]


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("rollout.grup_size=4", "rollout.grup_size is not a key; did you mean 'group_size'?"),
        ("training.optimizer_steps=3", "rollout.num_groups (4) must be a multiple of training.optimizer_steps (3)"),
    ],
)
def test_a_bad_setting(workspace, command, setting, says):
    assert says in workspace.refused(command, str(workspace.config), "--set", setting)
    assert not (workspace.folder / "roll-data").exists()


def test_a_missing_config(workspace):
    assert "tinny.yaml; did you mean" in workspace.refused("run", "tinny.yaml")


def test_a_missing_problem_file(workspace):
    settings = ["--set", "problems={kind: jsonl, train: nowhere.jsonl, held_out: nowhere.jsonl}"]
    assert "problems.train: no such file" in workspace.refused("run", str(workspace.config), *settings)


def test_a_missing_table(workspace):
    settings = ["--set", "problems={kind: dataset, train: nowhere, held_out: nowhere}"]
    assert "problems.train: no tables in" in workspace.refused("run", str(workspace.config), *settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["problems={kind: reasoning_gym, tasks: [{name: chain_sun}]}"], "did you mean 'chain_sum'?"),
        (["problems={kind: reasoning_gym, tasks: [{nam: x}]}"], "problems.tasks.0.nam is not a key; did you mean 'name'?"),
        (["problems={kind: reasoning_gym, tasks: []}"], "problems.tasks is [], but"),
        (["reward.kind=reasoning_gym", "reward.partial_credit=0"], "reasoning_gym has the keys: deadline_seconds"),
        (["reward={kind: reasoning_gym}"], "reward.kind reasoning_gym grades problems.kind reasoning_gym alone"),
        (["reward={kind: math_verify, deadline_seconds: 0}"], "reward.deadline_seconds is 0, but"),
    ],
)
def test_problems_and_rewards_that_cannot_be(workspace, settings, says):
    assert says in workspace.refused("run", str(workspace.config), *(part for s in settings for part in ("--set", s)))


def test_a_missing_model(workspace):
    settings = ["--set", "model={kind: pretrained, path: /nowhere, max_positions: 64}"]
    assert "model.path: no Hugging Face model in /nowhere" in workspace.refused("run", str(workspace.config), *settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["algorithm={kind: grpo, domains: {math: {}}}"],
            "algorithm.domains: no problem is of domain 'math'; domains: sort",
        ),
        (
            ["algorithm.kind=distillation", "algorithm.teachers=[{kind: run, run_id: tiny-9}]"],
            "algorithm.teachers.0.run_id: there is no run 'tiny-9'",
        ),
        (
            ["algorithm.kind=gspo", "algorithm.step_weight=1"],
            "gspo has the keys: shaping, domains, whiten_advantages",
        ),
        (["algorithm.kind=rlo"], "algorithm.kind is 'rlo', expected one of 'reinforce', 'reinforce_plus_plus', 'grpo'"),
    ],
)
def test_an_algorithm_that_cannot_be(workspace, settings, says):
    assert says in workspace.refused("run", str(workspace.config), *(part for s in settings for part in ("--set", s)))


def test_a_prompt_that_cannot_fit(workspace):
    said = workspace.refused("run", str(workspace.config), "--set", "problems.digits=30")
    assert "problems: none of" in said
    assert "problem sort/held-out/0: prompt too long: 31 tokens of 27 allowed (model.max_positions 32 less" in said


def test_devices_this_machine_does_not_have(workspace):
    said = workspace.refused("run", str(workspace.config), "--set", "cluster.nodes=2")
    assert "cluster.nodes (2) must be 1 with legs.launcher.kind local" in said


def test_a_store_nobody_can_open(workspace):
    said = workspace.refused("run", str(workspace.config), "--set", "store.uri=nowhere://x")
    assert "store.uri: nowhere://x cannot be opened" in said


def test_an_unwritable_store(workspace):
    (workspace.folder / "in-the-way").write_text("")
    said = workspace.refused("run", str(workspace.config), "--set", "store.uri=in-the-way/store")
    assert "store.uri: cannot write to" in said


def test_an_unknown_run(workspace):
    assert "there is no run 'tiny-7'" in workspace.refused("resume", "tiny-7")
    assert "there is no run 'tiny-7'" in workspace.refused("show", "tiny-7")


def test_a_busy_port(workspace):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = workspace.refused("up", "--prefect-port", str(port))
    assert f"--prefect-port: port {port} is in use: stop what uses it, or give another --prefect-port" in said


def test_plan_touches_nothing_and_says_what_would_run(workspace):
    before = sorted(workspace.folder.rglob("*"))
    printed = workspace.printed("plan", str(workspace.config))
    for word in ("collect", "trainer", "4 x 4 = 16 trajectories", "store", "tracking"):
        assert word in printed
    assert sorted(workspace.folder.rglob("*")) == before
