"""Base of every config section, and types that several sections share.

A section is frozen, refuses unknown keys, and documents each key in the docstring under it. `reference.py` builds the user's
reference manual from those docstrings, so they say what a key does, its unit, what null means and when to change it.
"""

import typing
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, field_validator, model_validator

from roll_core.host import is_portable, path_fault

LARGEST = 2**63 - 1
"""Largest number in a config: the largest integer of JSON readers, SLURM, databases and tensors."""
MOST_DEVICES = 100_000
"""Most devices that a config can name. The largest clusters have about as many GPUs."""


class Section(BaseModel):
    """Group of config keys: immutable, and an unknown key is an error. A number must be finite and must not be true or
    false; a text must be one that files, commands and databases can hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _take_truth_values_for_text(cls, values: Any) -> Any:
        """Keep pydantic from taking true for 1: where a number is expected, true becomes 'true', which is none."""
        if not isinstance(values, dict):
            return values
        return {key: _without_truth_values(value) if key in _number_fields(cls) else value for key, value in values.items()}

    @field_validator("*", mode="after")
    @classmethod
    def _check_numbers_and_texts_are_portable(cls, value: Any) -> Any:
        for each in _members(value):
            if isinstance(each, int | float) and abs(each) > LARGEST:
                raise ValueError(f"it must be between -{LARGEST} and {LARGEST}")
            if isinstance(each, str) and not is_portable(each):
                raise ValueError(f"{each!r} holds a character that no file name, command or database can: remove it")
        return value


def _without_truth_values(value: Any) -> Any:
    """Value with true and false as text, also in a list or a mapping."""
    match value:
        case bool():
            return str(value).lower()
        case list():
            return [_without_truth_values(each) for each in value]
        case dict():
            return {key: _without_truth_values(each) for key, each in value.items()}
        case _:
            return value


def _members(value: Any) -> Iterable[Any]:
    """Members of a list or of a mapping, else the value itself."""
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list | tuple) else (value,)


@cache
def _number_fields(section: type[BaseModel]) -> frozenset[str]:
    """Fields that may hold a number and must not hold a truth value."""
    types = {name: _types_in(field.annotation) for name, field in section.model_fields.items()}
    return frozenset(name for name, found in types.items() if found & {int, float} and bool not in found)


def _types_in(annotation: Any) -> set[Any]:
    """Plain types that an annotation is made of. Example: tuple[int, ...] | None -> {int, NoneType}"""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return {annotation}
    return set().union(*map(_types_in, typing.get_args(annotation)))


def _check_path(path: str) -> str:
    if not path:
        raise ValueError("it is empty: name a path")
    if fault := path_fault(path):
        raise ValueError(f"the path '{path}' {fault}")
    return path


PathText = Annotated[str, AfterValidator(_check_path)]
"""Path of a file or folder, or address that holds one, that the filesystem can have."""


class Unit(str):
    """Unit of a key whose name does not end in one. Example: `start: Annotated[PositiveFloat, Unit("seconds")]`"""


def _parse_devices(value: Any) -> Any:
    """Expand text like '0-3,8' to [0, 1, 2, 3, 8]; pydantic checks every other type."""
    if not isinstance(value, str):
        return value
    devices: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_device(first) or (dash and not _is_device(last)) or len(devices) > MOST_DEVICES:
            raise ValueError(
                f"'{value}' is not a list of devices below {MOST_DEVICES}: write it like '0-3,8' or [0, 1, 2, 3, 8]"
            )
        devices.extend(range(int(first), int(last if dash else first) + 1))
    return devices


def _is_device(text: str) -> bool:
    """True if a text is the number of a device, short enough to be one."""
    return text.isascii() and text.isdigit() and len(text) < len(str(MOST_DEVICES))


DeviceList = Annotated[
    tuple[int, ...],
    BeforeValidator(_parse_devices, json_schema_input_type=str | tuple[int, ...]),
    Unit("device numbers"),
]
"""Device numbers across the whole cluster, counted node by node: [0, 1] or '0-7'."""
