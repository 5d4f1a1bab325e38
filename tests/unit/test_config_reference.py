"""Reference of config keys: complete, up to date on disk, and a JSON schema that accepts every shipped run file."""

from collections.abc import Iterator
from functools import cache

import pytest
import yaml
from jsonschema import Draft202012Validator

from roll_core.config import reference
from roll_core.config.base import Section
from roll_core.errors import UserError
from tests.support import ROOT

RUN_FILES = sorted((ROOT / "configs").glob("*/*.yaml"))


@cache
def entries() -> list[reference.KeyEntry]:
    return reference.entries()


def entry(key: str, variant: str = "") -> reference.KeyEntry:
    return next(each for each in entries() if each.key == key and each.variant == variant)


def sections(base: type[Section] = Section) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        if section.__module__.startswith("roll_core.config"):
            yield section
            yield from sections(section)


@cache
def schema() -> dict[str, object]:
    return reference.json_schema()


def schema_errors(tree: dict[str, object]) -> list[str]:
    return [error.message for error in Draft202012Validator(schema()).iter_errors(tree)]


def test_the_reference_on_disk_is_the_one_the_config_classes_give():
    assert (ROOT / "docs/reference/config.md").read_text() == reference.markdown(), "run `make docs`"


def test_every_field_of_every_section_has_a_docstring():
    undocumented = {
        f"{section.__module__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if name != "kind" and not field.description
    }
    # docs/algorithms.md shows an empty cell for these; the reference takes the text of their type.
    assert all(name.startswith("roll_core.config.algorithm.") for name in undocumented)
    assert [each.key for each in entries() if not each.text] == []


def test_every_value_of_a_choice_has_a_meaning():
    assert [(each.key, value) for each in entries() for value, meaning in each.values if not meaning] == []


def test_an_entry_says_type_default_and_unit_in_plain_words():
    assert entry("deadlines.start").unit == "seconds"
    assert entry("legs.time_limit_minutes").unit == "minutes"
    assert entry("training.optimizer.learning_rate").default == "1.0e-06"
    assert entry("iterations").default == "required"
    assert entry("cluster.device").type == "one of: cpu, cuda"
    assert entry("placement.engines").type == "list of device numbers"
    assert entry("training.mismatch.max_share_off").type == "number, above 0 and below 1, or null"


def test_an_entry_says_which_runs_use_it():
    assert entry("rollout.num_groups").used_by == "every run"
    assert entry("training.layout.tensor").used_by == "runs with `training.backend: megatron`"
    assert entry("warm_start.optimizer.final_fraction").used_by == (
        "runs with `warm_start` and (`warm_start.optimizer.decay: linear` or `warm_start.optimizer.decay: cosine`)"
    )
    assert entry("inference.cache_gib", "inference.kind: vllm").used_by == "runs with `inference.kind: vllm`"
    assert entry("tolerances.sigmas").used_by == "nightly files"


def test_a_condition_names_keys_and_values_that_exist():
    named = {part for each in entries() for part in each.condition.split("`")[1::2]}
    known = {each.key: {value for value, _ in each.values} for each in entries()}
    for condition in named:
        key, _, value = condition.partition(": ")
        assert key in known
        assert not value or value in known[key]


def test_describing_nothing_lists_every_section_on_one_line():
    lines = reference.describe(None).splitlines()
    assert [line.split()[0] for line in lines][:4] == ["name", "seed", "iterations", "model"]
    assert "rollout      (run file) Generation of trajectories: how many, how long, how far ahead of training" in lines


def test_describing_a_section_lists_its_keys():
    text = reference.describe("checkpoint")
    assert "checkpoint.keep_last\n    positive integer, or null (checkpoints); default: null\n" in text


def test_describing_a_key_says_what_its_values_mean():
    text = reference.describe("weights.transport")
    assert text.startswith("weights.transport\n    one of: auto, shared_gpu, broadcast, ray, store; default: auto\n")
    assert "`ray`: Host memory, through Ray's object store." in text


def test_describing_a_key_of_variants_names_them():
    assert "Only with `problems.kind: jsonl` or `problems.kind: dataset`." in reference.describe("problems.train")
    assert reference.describe("algorithm.teachers.0.run_id").startswith("algorithm.teachers[].run_id\n    text; required\n")


def test_a_key_of_a_repeated_section_is_found_where_it_is_listed():
    assert reference.describe("algorithm.domains.math.kl") == reference.describe("algorithm.shaping.kl")


def test_a_typo_is_refused_in_one_sentence_with_the_nearest_key():
    with pytest.raises(UserError, match="rollout.grup_size is not a config key; did you mean 'rollout.group_size'?"):
        reference.describe("rollout.grup_size")


def test_the_json_schema_is_valid():
    Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_every_shipped_run_file_validates_against_the_json_schema(path):
    assert schema_errors(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    "tree", [{"itertions": 3}, {"rollout": {"grup_size": 4}}, {"problems": {"kind": "jsnl"}}, {"extends": 5}]
)
def test_the_json_schema_refuses_what_the_loader_refuses(tree):
    assert schema_errors(tree)
