"""Every test file belongs to a tier: a make target runs it.

Tiers go by folder. In `tests/contracts` and `tests/integration`, the marker `exhaustive` leaves single tests to
`make test-all`; `make test` must still run a test of every file there.
"""

import ast
import re

import pytest

from tests.support import ROOT

TARGETS_BY_FOLDER = {
    "unit": "check",
    "architecture": "check",
    "contracts": "test",
    "integration": "test",
    "megatron": "test-all",
    "gpu": "test-gpu",
}
TEST_FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))


def recipe(target: str) -> str:
    """Lines of a target in the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None, f"the Makefile has no target {target}"
    return found.group(1)


def is_exhaustive(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator) == "pytest.mark.exhaustive" for decorator in function.decorator_list)


def functions_of(source: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [function for function in functions if function.name.startswith("test_")]


def test_every_test_file_is_in_a_folder_of_a_tier():
    assert {path.parts[1] for path in TEST_FILES} == TARGETS_BY_FOLDER.keys()


@pytest.mark.parametrize("folder", TARGETS_BY_FOLDER)
def test_the_target_of_a_folder_runs_it(folder):
    assert f"tests/{folder}" in recipe(TARGETS_BY_FOLDER[folder]).split()


@pytest.mark.parametrize("folder", ["contracts", "integration"])
def test_make_test_all_runs_what_make_test_leaves_out(folder):
    assert '-m "not exhaustive"' in recipe("test")
    assert "exhaustive" not in recipe("test-all")
    assert f"tests/{folder}" in recipe("test-all").split()


@pytest.mark.parametrize("path", TEST_FILES, ids=str)
def test_every_file_has_a_test_in_its_tier(path):
    tests = functions_of((ROOT / path).read_text())
    assert any(not is_exhaustive(test) for test in tests)
    if TARGETS_BY_FOLDER[path.parts[1]] != "test":
        assert not any(is_exhaustive(test) for test in tests), "only contracts and integration tests are split by the marker"
