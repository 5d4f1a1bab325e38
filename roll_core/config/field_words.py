"""Words for one field of a config section: its text, type, default, unit and values, for `reference.py`."""

import ast
import inspect
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from roll_core.config.base import Section, Unit
from roll_core.config.load import sections_of

UNITS = {"gib": "GiB", "gigabytes": "GB", "megabytes": "MB", "steps": "optimizer steps"} | {
    unit: unit for unit in ("seconds", "minutes", "hours", "tokens", "iterations", "problems")
}
"""Unit by the last word of a key; a `Unit` marker on the field overrides it."""
PLURALS = {"text": "texts", "section": "sections"}


def text_of(section: type[BaseModel], name: str) -> str:
    """Docstring of a field, of the field it overrides, its text in the JSON schema, or the docstring of its type."""
    field = section.model_fields[name]
    owners = [owner for owner in section.__mro__ if issubclass(owner, Section) and name in owner.model_fields]
    texts = [owner.model_fields[name].description for owner in owners]
    if isinstance(field.json_schema_extra, dict):
        texts.append(str(field.json_schema_extra["description"]))
    texts += [kind.__doc__ for kind in (*sections_of(field.annotation)[0], _enum_of(field.annotation)) if kind]
    return " ".join(next((text for text in texts if text), "").split())


def _enum_of(annotation: Any) -> type[Enum] | None:
    """Enum class in an annotation, also inside a list, a union or a Literal."""
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, Enum):
            return type(part)
        if isinstance(part, type) and issubclass(part, Enum):
            return part
    return None


def values_of(annotation: Any) -> tuple[tuple[str, str], ...]:
    """Values of the enum in an annotation, each with its meaning."""
    enum = _enum_of(annotation)
    if enum is None:
        return ()
    allowed = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else tuple(enum)
    return tuple((str(member.value), _member_texts(enum)[member.name]) for member in allowed)


@cache
def _member_texts(enum: type[Enum]) -> dict[str, str]:
    """Docstring below each member of an enum; Python keeps them in the source only."""
    definition = ast.parse(inspect.getsource(enum)).body[0]
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, below in pairwise(definition.body):
        match statement, below:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
            case _:
                pass
    return texts


def unit_of(name: str, field: FieldInfo) -> str:
    """Unit of a key, from its `Unit` marker or from the last word of its name; empty if it has none."""
    marked = [str(mark) for mark in field.metadata if isinstance(mark, Unit)]
    return marked[0] if marked else UNITS.get(name.rpartition("_")[2], "")


def default_of(field: FieldInfo) -> str:
    """Default as YAML text, or "required". A section shows its kind only: its keys have defaults of their own."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = value.model_dump(include={"kind"})
    return yaml.safe_dump(to_jsonable_python(value), default_flow_style=True, width=1000).removesuffix("...\n").strip()


def type_of(annotation: Any, metadata: list[Any]) -> str:
    """Type in plain words. Examples: positive integer; number, at least 0, or null; one of: torch, megatron"""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_of(arguments[0], [*metadata, *arguments[1:]])
    if type(None) in arguments:
        return " or ".join(type_of(part, metadata) for part in arguments if part is not type(None)) + ", or null"
    if origin is tuple:
        words = next((str(mark) for mark in metadata if isinstance(mark, Unit)), type_of(arguments[0], []))
        return f"list of {PLURALS.get(words, words)}"
    if origin in (dict, Mapping):
        return f"mapping of name to {type_of(arguments[1], [])}"
    if sections_of(annotation)[0]:
        return "section"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_of(part, metadata) for part in arguments)
    if _enum_of(annotation):
        return f"one of: {', '.join(value for value, _ in values_of(annotation))}"
    noun = {bool: "true/false", int: "integer", float: "number", str: "text"}.get(annotation, "any value")
    limits = " and ".join(sorted(filter(None, map(_limit, metadata))))
    return f"positive {noun}" if limits == "above 0" else f"{noun}, {limits}" if limits else noun


def _limit(mark: Any) -> str:
    """Bound that a metadata object sets on a number, in words; empty if it sets none."""
    match mark:
        case Gt(gt=limit):
            return f"above {limit:,.12g}"
        case Ge(ge=limit):
            return f"at least {limit:,.12g}"
        case Lt(lt=limit):
            return f"below {limit:,.12g}"
        case Le(le=limit):
            return f"at most {limit:,.12g}"
        case _:
            return ""
