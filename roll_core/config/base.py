"""Base of every config section, and types that several sections share.

A section is frozen, refuses unknown keys, and documents each key in the docstring under it. `reference.py` builds the user's
reference manual from those docstrings, so they say what a key does, its unit, what null means and when to change it.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Group of config keys: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Unit(str):
    """Unit of a key whose name does not end in one. Example: `start: Annotated[PositiveFloat, Unit("seconds")]`"""


def _parse_devices(value: Any) -> Any:
    """Expand text like '0-3,8' to [0, 1, 2, 3, 8]; pydantic checks every other type."""
    if not isinstance(value, str):
        return value
    devices: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"'{value}' is not a list of devices: write it like '0-3,8' or [0, 1, 2, 3, 8]")
        devices.extend(range(int(first), int(last if dash else first) + 1))
    return devices


DeviceList = Annotated[
    tuple[int, ...],
    BeforeValidator(_parse_devices, json_schema_input_type=str | tuple[int, ...]),
    Unit("device numbers"),
]
"""Device numbers across the whole cluster, counted node by node: [0, 1] or '0-7'."""
