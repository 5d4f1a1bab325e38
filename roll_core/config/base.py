"""What every config section shares: frozen, strict, documented by the text under each field."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _parse_devices(value: Any) -> Any:
    """'0-3,8' -> [0, 1, 2, 3, 8]; anything but text is left to pydantic."""
    if not isinstance(value, str):
        return value
    devices: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"'{value}' is not a list of devices: write it like '0-3,8' or [0, 1, 2, 3, 8]")
        devices.extend(range(int(first), int(last if dash else first) + 1))
    return devices


DeviceList = Annotated[tuple[int, ...], BeforeValidator(_parse_devices)]
"""Device numbers across the whole cluster, node by node: [0, 1] or '0-7'."""
