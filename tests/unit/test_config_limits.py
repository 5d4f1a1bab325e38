"""Hostile and mistaken configs: whatever a file or --set holds, loading it is quick, and a refusal is one sentence."""

from pathlib import Path

import pytest

from roll_core.config.load import absolute_uri, load_config
from roll_core.config.yaml_text import TextRefused, read_yaml
from roll_core.errors import LONGEST_SENTENCE, UserError
from tests.support import ROOT, tiny_config

QUICKSTART = ROOT / "configs/runs/quickstart.yaml"
MOE = ROOT / "configs/runs/qwen3-moe-30b.yaml"


def refusal_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) <= LONGEST_SENTENCE
    return text


def refusal_of_text(folder: Path, text: str) -> str:
    (folder / "run.yaml").write_text(text)
    return refusal_of(folder / "run.yaml")


def test_half_of_a_surrogate_pair_is_refused(tmp_path):
    assert "half of a surrogate pair" in refusal_of_text(tmp_path, 'name: "\\ud800"\n')
    assert "half of a surrogate pair" in refusal_of(QUICKSTART, 'name="\\ud800"')
    assert "a byte that is not UTF-8" in refusal_of(QUICKSTART, "na\udcffme=x")


@pytest.mark.parametrize("template", ["iterations: {}\n", "name: x\niterations: {}\n"])
@pytest.mark.parametrize("value", ["9" * 5000, "2024-13-45", "[" * 5000, "{a: " * 5000, "!!timestamp 2024-13-45", "!!int x"])
def test_a_value_that_no_key_can_have_is_refused(tmp_path, template, value):
    assert refusal_of_text(tmp_path, template.format(value))
    assert refusal_of(QUICKSTART, f"iterations={value}")


def test_dates_and_words_of_numbers_are_texts():
    assert [read_yaml(text) for text in ("2024-13-45", "nan", "inf", "1_000", "1:30", "0x1F", "yes")] == [
        "2024-13-45",
        "nan",
        "inf",
        "1_000",
        "1:30",
        "0x1F",
        "yes",
    ]


def test_numbers_are_read_alike_in_files_and_overrides():
    assert [read_yaml(text) for text in ("3e-4", "1e3", "010", "-2", ".5", "+1.5E+2")] == [3e-4, 1000.0, 10, -2, 0.5, 150.0]


@pytest.mark.parametrize("name", ["inf", "nan", "1_000"])
def test_a_name_that_python_would_read_as_a_number_stays_a_name(name):
    assert load_config(QUICKSTART, [f"name={name}"]).name == name


def test_a_recursive_anchor_is_refused(tmp_path):
    assert "an anchor holds an alias of itself" in refusal_of_text(tmp_path, "name: &a {b: *a}\n")


def test_an_alias_bomb_is_refused(tmp_path):
    lines = ["a0: &a0 {k: 1}", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]
    assert "has more than 5,000 values" in refusal_of_text(tmp_path, "\n".join(lines))


def test_a_merge_bomb_is_refused(tmp_path):
    lines = ["a0: &a0 {k: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 10))]
    assert "has more than 5,000 values" in refusal_of_text(tmp_path, "\n".join(lines))


def test_merges_are_applied_in_yamls_order():
    text = "{a: &a {x: 1, y: 1}, b: &b {x: 2, z: 2}, c: {<<: [*a, *b], y: 3}}"
    assert read_yaml(text)["c"] == {"x": 1, "y": 3, "z": 2}
    with pytest.raises(TextRefused, match="<< takes a mapping"):
        read_yaml("{<<: 1}")


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    said = refusal_of_text(tmp_path, "name: x\niterations: 1\nseed: 1\nseed: 2\n")
    assert said.endswith("run.yaml: line 4: the key 'seed' is given twice: remove one of them")


def test_an_override_changes_one_of_the_places_that_an_alias_fills(tmp_path):
    text = (
        f"extends: {QUICKSTART}\n"
        "algorithm: {kind: ppo, critic: {optimizer: &adam {learning_rate: 0.001}}}\n"
        "training: {optimizer: *adam}\n"
    )
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml", ["training.optimizer.learning_rate=0.5"])
    assert config.training.optimizer.learning_rate == 0.5
    assert config.algorithm.critic.optimizer.learning_rate == 0.001


def test_extends_that_doubles_with_every_file_is_read_once(tmp_path):
    (tmp_path / "0.yaml").write_text(f"extends: {QUICKSTART}\n")
    for number in range(1, 27):
        (tmp_path / f"{number}.yaml").write_text(f"extends: [{number - 1}.yaml, {number - 1}.yaml]\nseed: {number}\n")
    assert load_config(tmp_path / "26.yaml").seed == 26


def test_a_long_chain_of_files_is_refused(tmp_path):
    for number in range(150):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    assert "a config of more than 100 files: extend fewer" in refusal_of(tmp_path / "0.yaml")


def test_a_huge_file_is_refused(tmp_path):
    assert "have more than 50,000 bytes: shorten them" in refusal_of_text(tmp_path, "# " + "x" * 60_000)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("placement.trainer=0-300000000", "placement.trainer: '0-300000000' is not a list of devices below 100000"),
        ("training.optimizer_steps=1e12", "set rollout.num_groups=1000000000000 or training.optimizer_steps=32"),
        ("problems.digits=1e9", "problems.digits is 1000000000.0, but input should be less than or equal to 1000"),
        (
            "rollout.num_groups=1e11",
            "rollout.num_groups is 100000000000.0, but input should be less than or equal to 1000000",
        ),
        (
            "evaluation.num_problems=1e9",
            "evaluation.num_problems is 1000000000.0, but input should be less than or equal to",
        ),
        ("evaluation.num_problems=200000", "evaluation.num_problems (200000) is more than problems.digits=5 can give"),
        ("rollout={num_groups: 1000000, group_size: 100}", "must be at most 10000000, because the trajectories"),
        (f"seed={10**400}", f"seed: it must be between -{2**63 - 1} and {2**63 - 1}"),
        (f"cluster.nodes={10**400}", "cluster.nodes is 1000000"),
        ("training.optimizer.learning_rate=.inf", "training.optimizer.learning_rate is inf, but input should be a finite"),
        ("rollout.temperature=.nan", "rollout.temperature is nan, but input should be a finite number"),
        ("rollout.temperature=1e400", "rollout.temperature is inf, but input should be a finite number"),
        ("iterations=true", "iterations is 'true', but input should be a valid integer"),
        (
            "training.optimizer.learning_rate=false",
            "training.optimizer.learning_rate is 'false', but input should be a valid",
        ),
        ("placement.trainer=[true]", "placement.trainer.0 is 'true', but input should be a valid integer"),
        (f"name={'n' * 300}", "name has 300 letters: it names folders and jobs, give it 128"),
        (f"model={{kind: pretrained, path: {'a/' * 2500}}}", "a path has fewer than 4096"),
        (f"work_dir={'w' * 300}", "holds a name of more than 255 bytes: shorten it"),
        ('work_dir="a\\0b"', "work_dir: the path 'a?b' holds a NUL"),
        ('store.uri="a\\0b"', "store.uri: the path 'a?b' holds a NUL"),
        ('tracking.experiment="a\\0b"', "tracking.experiment: 'a\\x00b' holds a character that no file name"),
        ("store.uri=file://host/x", "store.uri: file://host/x names a host or a relative path: write file:///host/x"),
        (f"rollout.in_flight={'x' * 5000}", "rollout.in_flight is 'xxx"),
        (f"{'a.' * 5000}a=1", "write it as key=value"),
    ],
    ids=lambda text: text[:40],
)
def test_a_number_or_text_beyond_all_reason_is_refused(setting, message):
    assert message in refusal_of(QUICKSTART, setting)


def test_an_enormous_layout_is_refused_without_counting_up_to_it():
    said = refusal_of(MOE, f"training.layout.expert={2**63 - 1}")
    assert "must divide the 32 devices of placement.trainer: set training.layout.expert=16" in said


@pytest.mark.parametrize("extends", ['"a\\0b"', "x" * 300, "/" + "a/" * 3000])
def test_a_path_that_no_file_can_have_is_refused(tmp_path, extends):
    assert "extends in" in refusal_of_text(tmp_path, f"extends: {extends}\n")


def test_a_folder_is_not_mistaken_for_a_missing_file(tmp_path):
    assert refusal_of(tmp_path).endswith(" is not a file: name a YAML file")


def test_a_missing_file_is_compared_with_yaml_files_by_name_alone(tmp_path):
    for name in ("inf.yaml", "quickstart.yaml", "quickstart.txt"):
        (tmp_path / name).write_text("")
    assert "did you mean" not in refusal_of(tmp_path / "missingfile.yaml")
    assert refusal_of(tmp_path / "quickstrat.yaml").endswith("did you mean " + str(tmp_path / "quickstart.yaml") + "?")


def test_true_for_a_truth_value_is_fine(tmp_path):
    assert tiny_config(tmp_path, training={"compile": True}).training.compile
    assert not tiny_config(tmp_path, training={"compile": "off"}).training.compile


def test_a_store_address_without_a_host_is_kept():
    assert absolute_uri("file:///data/store") == "file:///data/store"
    assert absolute_uri("s3://lab/runs") == "s3://lab/runs"
