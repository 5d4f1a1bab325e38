"""Problems from JSON lines, tables and Reasoning Gym: columns, extracted answers, prompt templates, held-out problems."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from roll_core.config.problems import AnswerRule, Columns, DatasetProblems, GymTask, JsonlProblems, ReasoningGymProblems
from roll_core.data.dataset import DatasetSource
from roll_core.data.file_source import extract_answer
from roll_core.data.jsonl import JsonlSource
from roll_core.data.problem_source import build_source
from roll_core.data.reasoning_gym import ReasoningGymSource
from roll_core.errors import UserError
from roll_core.types.trajectory import Message, Problem, Speaker
from tests.support import tiny_config

GSM = [
    {"question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A car costs 1,080 dollars. Two?", "answer": "2 x 1,080 = 2,160\n#### 2,160"},
]
GSM_COLUMNS = Columns(prompt="question")


def write_jsonl(folder: Path, rows: list[Any]) -> str:
    """Write rows.jsonl; return its path."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def write_parquet(folder: Path, rows: list[dict[str, Any]], name: str = "rows.parquet") -> str:
    """Write a Parquet file; return its path."""
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return str(folder / name)


def jsonl(folder: Path, rows: list[Any], **settings: Any) -> JsonlSource:
    path = write_jsonl(folder, rows)
    return JsonlSource(JsonlProblems(train=path, held_out=path, **settings), seed=0)


def dataset(path: str | Path, **settings: Any) -> DatasetSource:
    return DatasetSource(DatasetProblems(train=str(path), held_out=str(path), **settings), seed=0)


# -------------------------------------------------------------------------------------------------- answers and columns
@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        (AnswerRule.WHOLE, " 42 ", " 42 "),
        (AnswerRule.AFTER_HASHES, "6 x 7 = 42\n#### 42", "42"),
        (AnswerRule.AFTER_HASHES, "#### 1\nno, #### 1,042", "1,042"),
        (AnswerRule.BOXED, r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    ],
)
def test_an_answer_is_extracted_from_a_worked_solution(rule, text, answer):
    assert extract_answer(rule, text) == answer


@pytest.mark.parametrize(("rule", "text"), [(AnswerRule.AFTER_HASHES, "42"), (AnswerRule.BOXED, r"\boxed{1")])
def test_a_row_without_an_answer_is_refused_in_one_sentence(tmp_path, rule, text):
    with pytest.raises(UserError, match="problems.train: line 1 of .* has no .* problems.answer_rule"):
        jsonl(tmp_path, [{"prompt": "6 x 7?", "answer": text}], answer_rule=rule)


def test_gsm8k_is_read_as_published_from_jsonl_and_from_parquet(tmp_path):
    settings = {"columns": GSM_COLUMNS, "answer_rule": AnswerRule.AFTER_HASHES}
    for source in (jsonl(tmp_path, GSM, **settings), dataset(write_parquet(tmp_path, GSM), **settings)):
        assert [p.answer for p in source.held_out(2)] == ["7", "2,160"]
        assert source.held_out(1) == [Problem("rows/1", "rows", (Message(Speaker.USER, GSM[0]["question"]),), "7")]
        assert source.domains == {"rows"}


def test_a_column_may_be_nested_and_a_prompt_may_be_messages(tmp_path):
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "6 x 7?"}]
    rows = [{"prompt": chat, "reward_model": {"ground_truth": "42"}, "source": "made up"}]
    columns = Columns(answer="reward_model.ground_truth", domain="source")
    for source in (jsonl(tmp_path, rows, columns=columns), dataset(write_parquet(tmp_path, rows), columns=columns)):
        messages = (Message(Speaker.SYSTEM, "Think."), Message(Speaker.USER, "6 x 7?"))
        assert source.held_out(1) == [Problem("rows/1", "made up", messages, "42")]


def test_a_domain_column_is_used_where_there_is_one(tmp_path):
    rows = [{"prompt": "a", "answer": "b", "domain": "letters"}, {"prompt": "1", "answer": "2"}]
    assert [p.domain for p in jsonl(tmp_path, rows).held_out(2)] == ["letters", "rows"]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (GSM, {}, r"line 1 of .* has no 'prompt': .* set problems.columns to what it has \(question, answer\)"),
        (GSM, {"columns": Columns(prompt="question", domain="topic")}, "line 1 of .* has no 'topic'"),
        ([[1]], {}, 'line 1 of .* must be like {"prompt": "...", "answer": "..."}'),
        ([{"prompt": [{"role": "bot", "content": ""}], "answer": "1"}], {}, "has messages that are not like"),
        ([{"prompt": [{"role": "assistant", "content": ""}], "answer": "1"}], {}, "has no message of role 'user'"),
        (
            [{"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": ""}], "answer": "1"}],
            {"system": "Think."},
            "has a system message of its own: make problems.system null",
        ),
    ],
)
def test_a_row_that_cannot_be_a_problem_is_refused_in_one_sentence(tmp_path, rows, settings, message):
    with pytest.raises(UserError, match=f"^problems.train: .*{message}"):
        jsonl(tmp_path, rows, **settings)


# -------------------------------------------------------------------------------------------------- prompt templates
def test_a_system_message_and_a_template_surround_the_prompt(tmp_path):
    settings = {"system": "You add.", "template": "{prompt}\nBoxes like \\boxed{7} are fine."}
    [problem] = jsonl(tmp_path, [{"prompt": "3 + 4?", "answer": "7"}], **settings).held_out(1)
    user_text = "3 + 4?\nBoxes like \\boxed{7} are fine."
    assert problem.messages == (Message(Speaker.SYSTEM, "You add."), Message(Speaker.USER, user_text))


def test_a_template_without_the_prompt_is_refused_in_one_sentence(tmp_path):
    problems = {"kind": "jsonl", "train": "t", "held_out": "h", "template": "Answer!"}
    with pytest.raises(UserError, match="problems.template: 'Answer!' must contain {prompt}"):
        tiny_config(tmp_path, problems=problems)


# -------------------------------------------------------------------------------------------------- tables
def test_several_parquet_files_are_read_by_pattern_and_by_folder(tmp_path):
    for number in range(3):
        write_parquet(tmp_path, [{"prompt": f"{number}?", "answer": str(number)}], f"train-{number}-of-3.parquet")
    write_parquet(tmp_path, [{"prompt": "9?", "answer": "9"}], "test-0-of-1.parquet")
    pattern, folder = dataset(tmp_path / "train-*.parquet"), dataset(tmp_path)
    assert [(p.problem_id, p.answer) for p in pattern.held_out(3)] == [("train/1", "0"), ("train/2", "1"), ("train/3", "2")]
    assert [p.answer for p in folder.held_out(4)] == ["9", "0", "1", "2"]


def test_a_dataset_saved_by_hugging_face_is_read(tmp_path):
    Dataset.from_list(GSM).save_to_disk(tmp_path / "gsm", num_shards=2)
    source = dataset(tmp_path / "gsm", columns=GSM_COLUMNS, answer_rule=AnswerRule.AFTER_HASHES)
    assert [p.answer for p in source.held_out(2)] == ["7", "2,160"]


def test_a_split_must_be_named(tmp_path):
    DatasetDict({"train": Dataset.from_list(GSM), "test": Dataset.from_list(GSM)}).save_to_disk(tmp_path / "gsm")
    with pytest.raises(
        UserError, match="problems.train: .*gsm holds the splits train, test: name one of them, like .*gsm/train"
    ):
        dataset(tmp_path / "gsm")
    assert dataset(tmp_path / "gsm/test", columns=GSM_COLUMNS).domains == {"test"}


def test_missing_and_broken_tables_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="problems.train: no tables in .*nowhere: name a Parquet file, a folder of them"):
        dataset(tmp_path / "nowhere")
    (tmp_path / "bad.parquet").write_text("not a table")
    with pytest.raises(UserError, match="problems.train: .*bad.parquet cannot be read as a table"):
        dataset(tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"row 1 of .* has no 'prompt': .*\(question, answer\)"):
        dataset(write_parquet(tmp_path, GSM))


# -------------------------------------------------------------------------------------------------- Reasoning Gym
SUMS = GymTask(name="chain_sum", params={"max_terms": 2, "max_digits": 1})
WORDS = GymTask(name="spell_backward", weight=3.0)


def gym(*tasks: GymTask, seed: int = 0, **settings: Any) -> ReasoningGymSource:
    return ReasoningGymSource(ReasoningGymProblems(tasks=tasks, **settings), seed)


def test_items_depend_on_seed_and_index_alone():
    source, again, other = gym(SUMS, WORDS), gym(SUMS, WORDS), gym(SUMS, WORDS, seed=1)
    assert [source.problem(i) for i in (7, 3)] == [again.problem(i) for i in (7, 3)]
    assert [source.problem(i) for i in range(8)] != [other.problem(i) for i in range(8)]
    assert source.held_out(20) == other.held_out(30)[:20]


def test_tasks_are_drawn_by_weight():
    source = gym(SUMS, WORDS)
    drawn = [source.problem(i).domain for i in range(400)]
    assert source.domains == set(drawn) == {"chain_sum", "spell_backward"}
    assert 0.65 < drawn.count("spell_backward") / 400 < 0.85


def test_held_out_items_are_never_trained_on_even_where_there_are_few_different_ones():
    source = gym(SUMS)
    held_out_texts = {p.messages[0].text for p in source.held_out(10)}
    trained = [source.problem(i).messages[0].text for i in range(600)]
    assert len(held_out_texts) == 10
    assert len(set(trained)) < 200, "there are few, so many come twice"
    assert not held_out_texts & set(trained)


def test_an_item_has_its_answer_and_the_template_of_the_config():
    problem = gym(SUMS, template="{prompt} #### ").problem(0)
    text = problem.messages[0].text
    first, sign, second = text.partition("problem: ")[2].removesuffix(" = #### ").split()
    assert int(problem.answer) == int(first) + int(second) * (1 if sign == "+" else -1)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            GymTask(name="chain_sun"),
            "problems.tasks.0.name: Reasoning Gym has no task 'chain_sun'; did you mean 'chain_sum'?",
        ),
        (
            GymTask(name="chain_sum", params={"digits": 3}),
            "problems.tasks.0.params: chain_sum does not take them .*'digits'",
        ),
        (GymTask(name="chain_sum", params={"min_terms": 9}), "problems.tasks.0.params: chain_sum does not take them"),
    ],
)
def test_an_impossible_task_is_refused_in_one_sentence(task, message):
    with pytest.raises(UserError, match=f"^{message}"):
        gym(task)


def test_more_held_out_items_than_exist_are_refused_in_one_sentence():
    with pytest.raises(UserError, match=r"evaluation.num_problems \(40\) is more than the different problems"):
        gym(SUMS).held_out(40)


def test_a_config_may_not_set_the_seed_of_a_task(tmp_path):
    problems = {"kind": "reasoning_gym", "tasks": [{"name": "chain_sum", "params": {"seed": 3}}]}
    with pytest.raises(UserError, match="problems.tasks.0.params: 'seed' is not for the config to say"):
        tiny_config(tmp_path, problems=problems)


def test_dataset_and_reasoning_gym_sources_are_built_from_the_config(tmp_path):
    path = write_parquet(tmp_path, [{"prompt": "a", "answer": "b"}])
    config = tiny_config(tmp_path, problems={"kind": "dataset", "train": path, "held_out": path})
    assert build_source(config.problems, 0).domains == {"rows"}
    config = tiny_config(tmp_path, problems={"kind": "reasoning_gym", "tasks": [{"name": "chain_sum"}]})
    assert build_source(config.problems, 0).domains == {"chain_sum"}


# -------------------------------------------------------------------------------------------------- files as they come
def test_only_a_line_feed_ends_a_row(tmp_path):
    """U+2028, U+0085, a vertical tab and a file separator are characters of a text; str.splitlines takes them for ends."""
    prompt = "one\u2028two\u0085three"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "1"}, ensure_ascii=False) + "\n")
    path = str(tmp_path / "rows.jsonl")
    [problem] = JsonlSource(JsonlProblems(train=path, held_out=path), seed=0).held_out(1)
    assert problem.messages[0].text == prompt


def test_blank_lines_are_skipped_and_lines_are_counted_as_an_editor_does(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '\ufeff{"prompt": "1+1=", "answer": "2"}\r\n\r\n  \n{"prompt": "1+2=", "answer": "3"}\n\n'
    )
    path = str(tmp_path / "rows.jsonl")
    problems = JsonlSource(JsonlProblems(train=path, held_out=path), seed=0).held_out(2)
    assert [(problem.problem_id, problem.answer) for problem in problems] == [("rows/1", "2"), ("rows/4", "3")]


@pytest.mark.parametrize("row", [b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}"])
def test_a_row_that_is_not_json_in_utf8_is_refused_in_one_sentence(tmp_path, row):
    (tmp_path / "rows.jsonl").write_bytes(row)
    path = str(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="^problems.train: .*rows.jsonl"):
        JsonlSource(JsonlProblems(train=path, held_out=path), seed=0)


def test_a_held_out_problem_that_is_also_trained_on_is_refused(tmp_path):
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    for name, some in (("train", rows[:3]), ("held_out", rows[2:]), ("apart", rows[3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "held_out", "apart")}
    JsonlSource(JsonlProblems(train=files["train"], held_out=files["apart"]), seed=0).check_apart()
    with pytest.raises(
        UserError, match=r"^problems.held_out: 1 of its 2 problems .* the first is held_out/1, which is train/3: "
    ):
        JsonlSource(JsonlProblems(train=files["train"], held_out=files["held_out"]), seed=0).check_apart()


def test_a_template_with_a_placeholder_of_another_library_is_refused(tmp_path):
    problems = {"kind": "jsonl", "train": "t", "held_out": "h", "template": "{prompt} {question}"}
    with pytest.raises(
        UserError, match="problems.template: only {prompt} is replaced, and {question} would reach the model"
    ):
        tiny_config(tmp_path, problems=problems)


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"_data_files": [1]}'])
def test_a_damaged_dataset_folder_is_refused_in_one_sentence(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UserError, match="^problems.train: the tables in .* cannot be listed"):
        dataset(tmp_path)
