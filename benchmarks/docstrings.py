"""Draw docstrings of classes and functions at random, each with its signature, to test whether a reader understands them.

  python -m benchmarks.docstrings [--count 40] [--seed 17] [--answers]

A reader who sees only this output writes down what each object is or does, and why. With --answers the bodies are printed
too, to judge the reader. docs/benchmarks/docstrings.md has the result.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flows", "infra", "roll_core", "tasks")


@dataclass(frozen=True)
class Documented:
    """Class or function with a docstring."""

    place: str
    """File and line."""
    signature: str
    docstring: str
    source: str
    """Whole text, body included."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--answers", action="store_true", help="print bodies and places, too")
    options = parser.parse_args()
    drawn = random.Random(options.seed).sample(list(documented()), options.count)
    for number, one in enumerate(drawn, start=1):
        if options.answers:
            print(f"{number}. {one.place}\n{one.source}\n")
        else:
            print(f'{number}. {one.signature}\n   """{one.docstring}"""\n')


def documented() -> Iterator[Documented]:
    """Every class and function of the product that has a docstring."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            yield from _documented_in(ast.parse(text), "", path.relative_to(ROOT).as_posix(), text)


def _documented_in(parent: ast.AST, prefix: str, file: str, text: str) -> Iterator[Documented]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node):
                source = ast.get_source_segment(text, node) or ""
                yield Documented(f"{file}:{node.lineno}", _signature(node, prefix), docstring, source)
            yield from _documented_in(node, f"{prefix}{node.name}.", file, text)


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {prefix}{node.name}({', '.join(ast.unparse(base) for base in node.bases)})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {prefix}{node.name}({ast.unparse(node.args)}){returns}"


if __name__ == "__main__":
    main()
