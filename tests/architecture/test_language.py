"""The language of the code, asserted: docstrings begin with their subject, and a name stands for one idea."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

PACKAGES = ("roll_core", "flows", "tasks", "infra")
NO_SUBJECT = {
    *("of", "those", "what", "whatever", "whoever", "whom", "whose", "which", "that", "such", "this", "these", "it", "they"),
    *("by", "so", "how", "where", "when", "while", "who", "with", "from", "as", "also", "and", "but", "for", "to", "until"),
    *("since", "because", "nobody", "somebody", "anybody"),
}
"""First words that refer to something else: a docstring begins with a verb or a noun."""
SHOWN_IN_ALGORITHMS_MD = "roll_core/config/algorithm/"
"""Attribute docstrings here are cells of docs/algorithms.md, a table that was reviewed as it stands."""
TWO_IDEAS_ALLOWED = {
    "load_grader": "the entry point that every module run by SubprocessGrader has",
    "main": "the entry point of a module that is run as a program",
}
"""Names that stand in several modules of roll_core on purpose, and why."""


class Docstring(NamedTuple):
    file: str
    line: int
    owner: str
    text: str


def docstrings() -> Iterator[Docstring]:
    """Every docstring of the product: modules, classes, functions, and attributes."""
    for path in sources(*PACKAGES):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                owner = "module" if isinstance(node, ast.Module) else node.name
                if text := ast.get_docstring(node):
                    yield Docstring(file, getattr(node, "lineno", 1), owner, text)
                if not file.startswith(SHOWN_IN_ALGORITHMS_MD):
                    yield from (Docstring(file, line, owner, text) for line, text in attribute_docstrings(node))


def attribute_docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[int, str]]:
    """Strings that stand alone below an assignment: their line and text."""
    for above, below in zip(node.body, node.body[1:], strict=False):
        match above, below:
            case (ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text)))):
                yield below.lineno, text


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def test_every_docstring_begins_with_a_verb_or_a_noun():
    def begins_badly(text: str) -> bool:
        word = re.match(r"[\w'-]+", text.lstrip("`'\""))
        return word is not None and word.group().lower() in NO_SUBJECT

    bad = [f"{d.file}:{d.line} {d.owner}: {d.text.splitlines()[0]}" for d in docstrings() if begins_badly(d.text)]
    allowed = "roll_core/config/algorithm/shaping.py"  # a class docstring that docs/algorithms.md shows
    assert [line for line in bad if not (line.startswith(allowed) and "SampleWeightsConfig" in line)] == []


def test_every_module_says_what_it_is_for():
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in sources(*PACKAGES)
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_a_public_name_or_a_class_stands_for_one_idea():
    """Private functions are read in their module alone, and may repeat a short name."""
    places = defaultdict(list)
    for path in sources("roll_core"):
        for node in ast.parse(path.read_text()).body:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(node, ast.ClassDef) or (is_function and not node.name.startswith("_")):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in TWO_IDEAS_ALLOWED} == {}
    assert TWO_IDEAS_ALLOWED.keys() <= shared.keys(), "an exception that is not needed any more"
