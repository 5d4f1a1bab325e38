"""Run configs: unknown keys are refused, mistakes are explained in one sentence, and every process reads the same values."""

from pathlib import Path

import pytest

from roll_core.config.algorithm.policy_update import Signal
from roll_core.config.load import load_config
from roll_core.config.model import PretrainedModel
from roll_core.config.run import flat_config
from roll_core.errors import UserError
from tests.support import ROOT, tiny_config

RUN_FILES = sorted((ROOT / "configs/runs").glob("*.yaml"))


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal_of(path: Path, *overrides: str) -> str:
    """Load a config that must be refused; return the error, which is one line."""
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda p: p.stem)
def test_every_run_file_loads_and_overrides_at_most_twenty_lines(path):
    assert load_config(path).name == path.stem
    settings = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert len(settings) <= 20


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.clip_hihg=0.3", "algorithm.clip_hihg is not a key; did you mean 'clip_high'?"),
        ("rollout.grup_size=4", "rollout.grup_size is not a key; did you mean 'group_size'?"),
        ("problems.digts=4", "problems.digts is not a key; did you mean 'digits'?"),
        ("warm_start.optimizer.lr=1", "warm_start.optimizer.lr is not a key; valid keys here: learning_rate"),
        ("itertions=4", "itertions is not a key; did you mean 'iterations'?"),
        ("problems.kind=jsnl", "problems.kind is 'jsnl', expected one of 'arithmetic', 'jsonl'"),
        ("inference.kind=tourch", "inference.kind is 'tourch', expected one of 'torch', 'vllm', 'rehearsal'"),
        ("inference={kind: rehearsal, sigma: 1, median_tokens: 9}", "inference.seconds_per_token is required: add it"),
        ("rollout.in_flight=abort", "rollout.in_flight is 'abort', but input should be 'finish', 'resume' or 'continue'"),
        ("rollout.async_ratio=-1", "rollout.async_ratio is -1, but input should be greater than or equal to 0"),
        ("rollout.group_size=1", "rollout.group_size (1) must be at least 2"),
        ("rollout.group_size=zero", "rollout.group_size is 'zero', but input should be a valid integer"),
        ("rollout.num_groups=0", "rollout.num_groups is 0, but input should be greater than 0"),
        ("training.optimizer_steps=5", "rollout.num_groups (32) must be a multiple of training.optimizer_steps (5)"),
        ("rollout.max_new_tokens=32", "rollout.max_new_tokens (32) must be below model.max_positions (32)"),
        ("training.micro_batch_tokens=8", "training.micro_batch_tokens (8) must be at least model.max_positions (32)"),
        ("rollout.temperature=0", "rollout.temperature must be above 0"),
        ("placement.engines=[1]", "placement.engines names device 1, but cluster.nodes (1) x cluster.devices_per_node (1)"),
        ("placement.trainer=0-x", "placement.trainer: '0-x' is not a list of devices"),
        (
            "checkpoint.keep_best=2",
            "checkpoint: keep_every and keep_best name checkpoints to keep beside the last ones: set",
        ),
        ("name=a/b", "name ('a/b') may hold letters, digits"),
        ("model.num_heads=5", "model: hidden_size (96) must be a multiple of num_heads (5)"),
        ("algorithm.clip_low=1.5", "algorithm: clip_low (1.5) must be below 1"),
        ("algorithm={kind: gspo, level: token}", "algorithm.level is 'token', but input should be"),
        (
            "algorithm={kind: gigpo, episode_weight: 0, step_weight: 0}",
            "algorithm: episode_weight and step_weight cannot both",
        ),
        ("algorithm={kind: topr, lower: 2}", "algorithm: lower (2.0) must be below upper (1.0)"),
        ("algorithm={kind: topr, positive_weight: 0, negative_weight: 0}", "algorithm: positive_weight and negative_weight"),
        (
            "algorithm={kind: topr, shaping: {kl: {}}}",
            "algorithm: shaping.kl gives the tokens of a trajectory advantages of",
        ),
        ("algorithm={kind: topr, domains: {sort: {kl: {}}}}", "algorithm: shaping.kl gives the tokens of a trajectory"),
        ("algorithm.kl_loss={estimator: k1}", "algorithm.kl_loss: estimator k1 has an expected gradient of zero as a loss"),
        (
            "algorithm.correction={filters: [{level: sequence, compared: difference}]}",
            "algorithm.correction.filters.0: level sequence is a product of ratios, which compared difference does not have",
        ),
        ("algorithm={kind: tis, correction: {}}", "algorithm: the objective already weighs by policy / sampler"),
        ("algorithm.correction={weighting: null}", "algorithm.correction: without weighting, filters and veto_below"),
        (
            "algorithm.correction={filters: [{lower: 9}]}",
            "algorithm.correction.filters.0: lower (9.0) must be below upper (5.0)",
        ),
        ("algorithm.fixed_length_tokens=9", "algorithm: fixed_length_tokens (9) needs aggregation fixed_length"),
        (
            "algorithm.shaping.masks={min_accuracy: 0.8, max_accuracy: 0.2}",
            "algorithm.shaping.masks: min_accuracy (0.8) must",
        ),
        ("algorithm.shaping.overlong.buffer_tokens=9", "algorithm.shaping.overlong.buffer_tokens (9) must be at most"),
        ("algorithm.shaping.masks.wrong_above_tokens=8", "algorithm.shaping.masks.wrong_above_tokens (8) must be below"),
        (
            "algorithm={kind: ppo, critic: {warmup_iterations: 40}}",
            "algorithm.critic.warmup_iterations (40) must be below iter",
        ),
        ("algorithm={kind: distillation, teachers: [{kind: run}]}", "algorithm.teachers.0.run_id is required"),
        ("training.mismatch.max_men=1", "training.mismatch.max_men is not a key; did you mean 'max_mean'?"),
        ("training.mismatch.max_mean=0", "training.mismatch.max_mean is 0, but input should be greater than 0"),
        ("training.mismatch.max_share_off=1", "training.mismatch.max_share_off is 1, but input should be less than 1"),
        ("training.mismatch.action=halt", "training.mismatch.action is 'halt', but input should be 'warn', 'correct' or"),
        ("training.mismatch.max_mean=null", "training.mismatch: without max_mean, max_kl and max_share_off nothing is"),
        ("rollout", "--set rollout: write it as key=value"),
        ("seed.x=1", "--set seed.x: 'seed' is a value, not a section"),
    ],
)
def test_a_mistake_is_refused_in_one_sentence_that_names_the_key(setting, message):
    overrides = ["seed=1", setting]
    assert message in refusal_of(ROOT / "configs/runs/quickstart.yaml", *overrides)


def test_a_missing_file_is_refused_with_the_closest_name():
    assert "did you mean" in refusal_of(ROOT / "configs/runs/quikstart.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "configs/models").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_model_config_loads(tmp_path, path):
    config = load_config(write(tmp_path, f"extends: {path}\nname: a\niterations: 1\n"))
    if isinstance(config.model, PretrainedModel):
        assert Path(config.model.path).name.lower() == path.stem


def test_a_missing_parent_is_refused_with_the_file_that_extends_it(tmp_path):
    path = write(tmp_path, "extends: nowhere.yaml\nname: a\n")
    assert f"extends in {path}: no such file" in refusal_of(path)


def test_files_that_extend_each_other_are_refused(tmp_path):
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    assert "extends itself" in refusal_of(tmp_path / "a.yaml")


@pytest.mark.parametrize("parents", ["5", "[1]", "{a: b}"])
def test_extends_must_name_files(tmp_path, parents):
    assert "must be a file or a list of files" in refusal_of(write(tmp_path, f"extends: {parents}\nname: a\n"))


def test_broken_yaml_is_refused_in_one_sentence(tmp_path):
    assert "is not valid YAML" in refusal_of(write(tmp_path, "name: [a\n"))


def test_a_typo_is_reported_before_the_key_it_leaves_missing(tmp_path):
    refusal = refusal_of(write(tmp_path, "name: a\niteratons: 3\n"))
    assert "iteratons is not a key; did you mean 'iterations'?" in refusal


def test_later_files_and_overrides_win(tmp_path):
    write(tmp_path, "name: base\niterations: 1\nrollout: {num_groups: 8, group_size: 4}\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nname: child\nrollout: {group_size: 2}\n")
    config = load_config(path, ["iterations=3", "training.optimizer.learning_rate=3e-4"])
    assert (config.name, config.iterations) == ("child", 3)
    assert (config.rollout.num_groups, config.rollout.group_size) == (8, 2)
    assert config.training.optimizer.learning_rate == 3e-4


def test_paths_become_absolute_so_that_every_process_reads_the_same_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(ROOT / "configs/runs/quickstart.yaml")
    assert config.store.uri == f"file://{tmp_path}/roll-data/store"
    assert config.tracking.uri == f"sqlite:///{tmp_path}/roll-data/mlflow.db"
    assert load_config(ROOT / "configs/runs/quickstart.yaml", ["store.uri=s3://b/x"]).store.uri == "s3://b/x"


def test_device_ranges_are_expanded():
    config = load_config(ROOT / "configs/runs/qwen3-moe-30b.yaml")
    assert config.placement.engines == tuple(range(32, 64))


def test_a_config_survives_a_round_trip_through_json(tmp_path):
    config = load_config(ROOT / "configs/runs/quickstart.yaml")
    assert type(config).model_validate_json(config.model_dump_json()) == config


def test_flat_config_names_every_value_by_its_dotted_key():
    flat = flat_config(load_config(ROOT / "configs/runs/quickstart.yaml"))
    assert flat["rollout.group_size"] == "16"
    assert flat["training.optimizer.decay"] == "linear"


@pytest.mark.parametrize(
    ("settings", "key", "expected"),
    [
        (["algorithm.kind=dapo", "algorithm.shaping.reward_clip=5"], "algorithm.shaping.overlong.weight", "1.0"),
        (
            ["algorithm.kind=decoupled_ppo", "algorithm.correction.veto_below=1e-4"],
            "algorithm.correction.weighting.upper",
            "None",
        ),
        (
            ["algorithm.kind=decoupled_ppo", "algorithm.correction.weighting.level=sequence"],
            "algorithm.correction.weighting.upper",
            "None",
        ),
        (
            ["algorithm.kind=ppo", "algorithm.critic.optimizer.beta1=0.8"],
            "algorithm.critic.optimizer.learning_rate",
            "1e-05",
        ),
        (["warm_start.optimizer.beta1=0.8"], "warm_start.optimizer.learning_rate", "0.003"),
    ],
)
def test_setting_one_key_of_a_section_keeps_the_defaults_of_the_others(settings, key, expected):
    assert flat_config(load_config(ROOT / "configs/runs/quickstart.yaml", settings))[key] == expected


def test_the_relative_folder_of_a_teacher_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teacher = "algorithm.teachers=[{kind: pretrained, model: {kind: pretrained, path: some/model}}]"
    config = load_config(ROOT / "configs/runs/quickstart.yaml", ["algorithm.kind=distillation", teacher])
    assert config.algorithm.teachers[0].model.path == str(tmp_path / "some/model")


def test_the_policys_schedule_leaves_out_the_critics_warm_up():
    settings = ["algorithm={kind: ppo, critic: {warmup_iterations: 3}}", "training.optimizer_steps=2", "training.epochs=2"]
    config = load_config(ROOT / "configs/runs/quickstart.yaml", settings)
    assert config.total_optimizer_steps == 40 * 4
    assert config.policy_optimizer_steps == 37 * 4


def test_a_rehearsal_cannot_have_mismatch_limits():
    message = refusal_of(ROOT / "configs/runs/rehearsal.yaml", "training.mismatch={action: stop}")
    assert "inference.kind rehearsal has no model: leave training.mismatch out" in message


def test_a_mismatch_limit_that_corrects_declares_the_anchor_logprobs_it_may_need():
    settings = ["algorithm={kind: rloo}", "training.optimizer_steps=2", "training.mismatch.action=correct"]
    config = load_config(ROOT / "configs/runs/quickstart.yaml", settings)
    assert config.fallback_algorithm.loss_signals(2) == {Signal.ANCHOR}
    assert config.algorithm.loss_signals(2) == frozenset()


@pytest.mark.parametrize(
    ("algorithm", "level"),
    [("{kind: grpo}", "token"), ("{kind: gspo}", "geometric"), ("{kind: gspo, level: turn}", "segment")],
)
def test_a_mismatch_is_corrected_over_the_span_of_the_policy_ratio(algorithm, level):
    settings = [f"algorithm={algorithm}", "training.mismatch.action=correct"]
    correction = load_config(ROOT / "configs/runs/quickstart.yaml", settings).fallback_algorithm.correction
    assert correction is not None
    assert correction.weighting is not None
    assert correction.weighting.level == level


@pytest.mark.parametrize("kind", ["tis", "topr", "decoupled_ppo"])
def test_an_algorithm_with_a_correction_is_its_own_fallback(kind):
    settings = [f"algorithm={{kind: {kind}}}", "training.mismatch.action=correct"]
    config = load_config(ROOT / "configs/runs/quickstart.yaml", settings)
    assert config.fallback_algorithm is config.algorithm


def test_a_config_without_engines_has_one_rehearsal_engine(tmp_path):
    placement = {"trainer": [0], "engines": "1-2"}
    inference = {"kind": "vllm", "tensor_parallel": 2}
    config = tiny_config(tmp_path, cluster={"devices_per_node": 3}, placement=placement, inference=inference)
    learning = config.without_engines
    assert (config.engine_devices, learning.engine_devices) == ([(1, 2)], [(1,)])
    assert learning.inference.kind == "rehearsal"
    differ = {name for name in type(config).model_fields if getattr(config, name) != getattr(learning, name)}
    assert differ == {"inference", "placement"}
    assert learning.placement.trainer == config.placement.trainer
